"""Why is this job where it is? Asks the predicates that the claim and the reaper use, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import BooleanField, DateTimeField, ExpressionWrapper, Q, Subquery
from django.db.models.functions import Now
from django.utils import timezone

from django_forgejobs import conf, intake
from django_forgejobs.fields import entries
from django_forgejobs.models import AnnouncedType, ArchivedJob, Job
from django_forgejobs.predicates import CLAIMABLE
from django_forgejobs.states import Status

if TYPE_CHECKING:
    from django_forgejobs.predicates import JobQuerySet

#: Jobs ahead in the queue are counted up to here.
COUNTED_AHEAD = 1000


@dataclass(frozen=True)
class Reason:
    """One reason, with a stable ``code`` for programs; ``str()`` of it is a sentence with what to do."""

    code: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        stop = "" if self.text.endswith((".", "!", "?")) else "."
        return f"{self.text}{stop} {self.remedy}".rstrip()


def reasons(job_or_id: Job | int, *, db: str) -> list[Reason]:
    """Return why the job is where it is, most important first, as the database has it now."""
    pk = intake.row_id(job_or_id)
    claimable = {
        f"is_{name}": ExpressionWrapper(condition, BooleanField()) for name, condition in CLAIMABLE.items()
    }
    now = ExpressionWrapper(Now(), DateTimeField())
    job: Any = Job.objects.using(db).filter(pk=pk).annotate(now=now, **claimable).first()
    if job is None:
        return [_missing(pk, db)]
    if job.status == Status.READY:
        return list(_ready(job, db))
    if job.status == Status.RUNNING:
        return list(_running(job, db))
    return [_ended(job)]


def _missing(pk: int, db: str) -> Reason:
    if ArchivedJob.objects.using(db).filter(pk=pk).exists():
        return Reason(
            "archived",
            f"Job {pk} has ended and was moved to the archive by archive_jobs.",
            "Look at the archived jobs in the admin.",
        )
    return Reason(
        "unknown",
        f"There is no job {pk}.",
        "Was its transaction rolled back, or was it archived with --delete?",
    )


def _ready(job: Any, db: str) -> Iterator[Reason]:
    if not job.is_due:
        yield _not_due(job)
    if unserved := _unserved(job, db):
        yield unserved
    if job.lease_expirations:
        lives = _times(job.lease_expirations, "worker its life", "workers their lives")
        yield Reason(
            "suspect",
            f"It has cost {lives} and runs alone: a worker takes it when nothing else runs in its process.",
            f"At {conf.current().MAX_LEASE_EXPIRATIONS} it is dead. Look for crashes, memory limits and "
            "deploys at the times in its history.",
        )
    if job.is_ready and job.is_due:
        ahead = _ahead(job, db)[:COUNTED_AHEAD].count()
        if ahead:
            more = " or more" if ahead == COUNTED_AHEAD else ""
            first = f"{ahead}{more} due {'job' if ahead == 1 else 'jobs'} of queue {job.queue!r}"
            yield Reason(
                "queued",
                f"Behind {first}: of larger priority, or due before it.",
                "Add workers or concurrency, or cancel what is not needed.",
            )
        elif not unserved:
            poll = conf.current().POLL_INTERVAL
            yield Reason(
                "next",
                f"It is next in queue {job.queue!r}: a worker with a free slot takes it within {poll:g} s.",
                "If nothing happens, all slots are busy, or no worker serves this queue: runworker --queues.",
            )


def _not_due(job: Any) -> Reason:
    when = f"due {_distance(job.run_at, job.now)} by the database's clock"
    remedy = 'Wait, or choose "run now" in the admin.'
    if job.attempts:
        return Reason(
            "retrying",
            f"Attempt {job.attempts} of {job.max_attempts} failed ({job.last_error[:200]}); "
            f"the next is {when}.",
            remedy,
        )
    return Reason("scheduled", f"It is {when}.", remedy)


def _unserved(job: Any, db: str) -> Reason | None:
    """Workers announce the types they serve when they start and every ``RECLAIM_INTERVAL``."""
    interval = conf.current().RECLAIM_INTERVAL or 60.0
    fresh = timedelta(seconds=2 * interval + 10)
    seen = AnnouncedType.objects.using(db).filter(type=job.type).values_list("seen_at", flat=True)
    last = seen.first()
    if last is not None and job.now - last <= fresh:
        return None
    if not AnnouncedType.objects.using(db).filter(seen_at__gte=job.now - fresh).exists():
        return Reason(
            "no-worker",
            "No worker has been seen lately.",
            "Start one: manage.py runworker. (A worker with an explicit handlers dict is not seen.)",
        )
    since = f"since {_distance(last, job.now)}" if last else "so far"
    grace = conf.current().UNKNOWN_TYPE_GRACE
    return Reason(
        "unserved",
        f'No running worker serves type "{job.type}", {since}.',
        "Is it registered in the jobs.py of an installed app, and do workers run that code? Due for "
        f"{grace:g} s without a worker, it ends as failed.",
    )


def _ahead(job: Any, db: str) -> JobQuerySet:
    # Its own time is read in the query: in Python it would come back with other decimals on SQLite.
    run_at = Subquery(Job.objects.using(db).filter(pk=job.pk).values("run_at")[:1])
    earlier = Q(run_at__lt=run_at) | Q(run_at=run_at, pk__lt=job.pk)
    first = Q(priority__gt=job.priority) | Q(priority=job.priority) & earlier
    due: JobQuerySet = Job.objects.using(db).ready()
    return due.filter(first, queue=job.queue)


def _running(job: Any, db: str) -> Iterator[Reason]:
    attempt = f"attempt {job.attempts} of {job.max_attempts}, claim {job.claims}"
    since = _distance(job.started_at, job.now) if job.started_at else "for an unknown time"
    if job.locked_until >= job.now:
        yield Reason(
            "running",
            f"Worker {job.locked_by} runs it ({attempt}), started {since}; its lease ends "
            f"{_distance(job.locked_until, job.now)} and is renewed while the worker lives.",
            "Nothing to do. If that worker is dead, the reaper takes over when the lease is over.",
        )
    elif Job.objects.using(db).expired().filter(pk=job.pk).exists():
        yield Reason(
            "expired",
            f"Its lease ran out {_distance(job.locked_until, job.now)}: worker {job.locked_by} is dead or "
            f"cut off ({attempt}, started {since}).",
            "The next reclaim puts it back: manage.py reclaim_jobs, or any running worker within a minute.",
        )
    else:
        yield Reason(
            "server-started",
            "Its lease ran out while the database was down; its worker gets one heartbeat to show up.",
            f"Wait {conf.current().HEARTBEAT:g} s after the server's start.",
        )
    if job.lease_expirations:
        yield Reason("suspect", "It has cost a worker its life already, and runs alone.")


def _ended(job: Any) -> Reason:
    when = _distance(job.finished_at, job.now)
    who = f" by worker {job.locked_by}" if job.locked_by else ""
    if job.status == Status.DONE:
        return Reason("done", f"Done {when}{who}, on attempt {job.attempts}.", "Nothing to do.")
    if job.status == Status.CANCELLED:
        by = next((e.get("by") for e in reversed(entries(job.history)) if e.get("event") == "cancel"), None)
        return Reason(
            "cancelled",
            f"Cancelled {when} by {by or 'somebody'}.",
            "Requeue it to run it after all.",
        )
    if job.status == Status.FAILED:
        return Reason(
            "failed",
            f"Failed for good {when}: {job.last_error[:500]}",
            "Retrying could not cure it. Mend the cause, then requeue it.",
        )
    tried = _times(job.attempts, "attempt", "attempts")
    return Reason(
        "dead",
        f"Dead {when}, after {tried} of {job.max_attempts} and {job.lease_expirations} expired leases: "
        f"{job.last_error[:500]}",
        "Read its history, mend the cause, then requeue it: manage.py requeue_jobs, or the admin.",
    )


def _times(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _distance(instant: datetime, now: datetime) -> str:
    """Return a moment as a person says it, with the instant: ``in 40 s (2026-01-01 …)``."""
    seconds = (instant - now).total_seconds()
    size = abs(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if size >= 2 * length:
            size, word = size / length, unit
            break
    else:
        word = "s"
    span = f"{int(size)} {word}"
    local = timezone.localtime(instant).strftime("%Y-%m-%d %H:%M:%S %Z")
    return f"{'in ' + span if seconds > 0 else span + ' ago'} ({local})"
