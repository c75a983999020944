"""The function API: parse, call, return. Every rule is on a lower floor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from asgiref.sync import sync_to_async

from django_forgejobs import intake, payloads
from django_forgejobs.exceptions import JobError
from django_forgejobs.payloads import in_words

if TYPE_CHECKING:
    from django_forgejobs.managers import JobManager
    from django_forgejobs.models import Job
    from django_forgejobs.reasons import Reason

Handlers = Mapping[str, Callable[..., Any]]


def _jobs() -> JobManager:
    from django_forgejobs.models import Job

    return Job.objects


def enqueue(
    type: str,
    payload: Any = None,
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    available_in: float | timedelta = 0,
    run_at: datetime | None = None,
    idempotency_key: str | None = None,
    db: str | None = None,
) -> int:
    """Insert a job as part of the caller's transaction and return its id.

    ``available_in`` is seconds or a ``timedelta``, counted by the database; ``run_at`` an aware datetime.
    What is ``None`` comes from the type's ``@job`` policy, else ``"default"``, 0 and
    ``DEFAULT_MAX_ATTEMPTS``. If ``idempotency_key`` exists, nothing is inserted and the id of the job that
    has it comes back, ended or not; an uncommitted rival is waited for.

    Raises ``JobError``, with the value and the remedy, for whatever cannot be stored or understood.
    """
    from django_forgejobs import inserts

    alias = intake.alias(db)
    row = intake.row(
        type,
        payload,
        queue=queue,
        priority=priority,
        max_attempts=max_attempts,
        available_in=available_in,
        run_at=run_at,
        idempotency_key=idempotency_key,
    )
    return inserts.ids([row], alias)[0]


def enqueue_many(jobs: Iterable[Mapping[str, Any]], *, db: str | None = None) -> list[int]:
    """Insert many jobs, all or none; return their ids in input order.

    ``jobs`` are dicts of ``enqueue``'s arguments. A key given twice gives the same id twice.
    """
    from django_forgejobs import inserts

    alias = intake.alias(db)
    return inserts.ids(intake.rows(jobs), alias)


def process_one(handlers: Handlers | None = None, *, queue: str = "default", db: str | None = None) -> bool:
    """Claim one due job of ``queue`` and run it here; return whether there was one.

    ``handlers`` maps types to functions; a job of another type is failed at once. ``None`` means the
    types registered by ``@job``. Inside a transaction of the caller all happens in savepoints on the
    caller's connection.
    """
    from django_forgejobs.foreground import process

    return process(handlers, queue=queue, db=db)


def drain(
    handlers: Handlers | None = None,
    *,
    queue: str = "default",
    max_jobs: int | None = None,
    db: str | None = None,
    stop: Callable[[], bool] | None = None,
) -> int:
    """Run the due jobs of ``queue`` here, one after the other; return how many.

    ``stop()`` is looked at between any two jobs. A Ctrl-C gives the running job back and is raised. A
    handler that always raises ``Snooze(in_=0)`` is always due: bound it with ``max_jobs``.
    """
    if max_jobs is not None:
        payloads.check_whole("max_jobs", max_jobs, 0, 2**63 - 1)
    done = 0
    while (max_jobs is None or done < max_jobs) and not (stop is not None and stop()):
        if not process_one(handlers, queue=queue, db=db):
            break
        done += 1
    return done


def run_worker(
    handlers: Handlers | None = None,
    *,
    queue: str = "default",
    poll_interval: float | timedelta = 1.0,
    db: str | None = None,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Run jobs of ``queue``, one at a time, until ``stop()`` is true; then the running job ends first.

    ``poll_interval`` is seconds. It survives outages of the database for as long as they take.
    """
    from django_forgejobs.worker import Worker

    Worker(
        db=_jobs().alias(db), handlers=handlers, queues=(queue,), poll_interval=poll_interval, stop=stop
    ).run()


def heartbeat(claim_token: UUID | str, *, db: str | None = None) -> bool:
    """Extend the lease of a claim; return whether it is still the caller's.

    ``False``: somebody else may have the job, so stop. Inside a worker the lease thread answers, at most
    once a second, on its own connection: safe in ``atomic()`` and in ``async def``. Raises ``JobError``
    for what is no token.
    """
    from django_forgejobs.context import live

    try:
        token = claim_token if isinstance(claim_token, UUID) else UUID(claim_token)
    except (ValueError, TypeError, AttributeError):
        raise JobError(
            f"claim_token={in_words(claim_token)} is no claim token. Give your handler a parameter of that "
            "name and pass it on."
        ) from None
    context = live(token)
    return context.heartbeat() if context is not None else _jobs().heartbeat(token, db=db)


def reclaim(*, db: str | None = None) -> int:
    """Put back, or bury, every job whose lease ran out; return how many. Safe to run anywhere, any time."""
    from django_forgejobs import reaper

    tick = reaper.tick(_jobs().alias(db))
    return tick.put_back + tick.buried


def get_job(id: int, *, db: str | None = None) -> Job | None:
    """Return the job, or ``None``; archived jobs are not looked for."""
    return _jobs().get_job(id, db=db)


def pending_count(*, queue: str = "default", db: str | None = None) -> int:
    """Return the number of ready jobs of ``queue``, future ones included."""
    return _jobs().pending_count(queue=queue, db=db)


def cancel(job_or_id: Job | int, *, by: str = "", db: str | None = None) -> bool:
    """Call off a ready or running job; return whether this call did it. ``by`` goes into the history."""
    return _jobs().cancel(job_or_id, by=by, db=db)


def requeue(job_or_id: Job | int, *, by: str = "", db: str | None = None) -> bool:
    """Give a failed, dead or cancelled job fresh attempts, due now; return whether this call did it."""
    return _jobs().requeue(job_or_id, by=by, db=db)


def explain(job_or_id: Job | int, *, db: str | None = None) -> list[Reason]:
    """Return why the job is where it is, most important first; ``str(reason)`` says what to do."""
    from django_forgejobs.reasons import reasons

    return reasons(job_or_id, db=_jobs().alias(db))


aenqueue = sync_to_async(enqueue)
aenqueue_many = sync_to_async(enqueue_many)
aget_job = sync_to_async(get_job)
acancel = sync_to_async(cancel)
arequeue = sync_to_async(requeue)
aheartbeat = sync_to_async(heartbeat)
