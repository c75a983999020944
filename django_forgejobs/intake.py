"""What a caller asked for, checked, and for ``enqueue`` made a row. Touches no database."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections

from django_forgejobs import conf, payloads, registry
from django_forgejobs.exceptions import JobError

if TYPE_CHECKING:
    from django.db.models import Model

logger = logging.getLogger("django_forgejobs")

_NO_POLICY = registry.Definition("", dict)


def alias(db: str | None) -> str:
    """Return the alias of the queue's database; ``JobError`` for one that ``DATABASES`` does not have."""
    if not db:
        return conf.current().DATABASE
    if db not in connections.databases:
        raise JobError(f"db={db!r} is not one of DATABASES ({', '.join(connections.databases)}).")
    return db


def row(
    type: str,
    payload: Any = None,
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    available_in: float | timedelta = 0,
    run_at: datetime | None = None,
    idempotency_key: str | None = None,
) -> dict[str, Any]:
    """Return the row for ``inserts``; raise ``JobError`` with the value and the remedy.

    What is ``None`` comes from the type's registered policy, else from the project's defaults. A payload
    of ``None`` is stored as ``{}``, since handlers are promised a dict.
    """
    settings = conf.current()
    payloads.check_label("type", type, 200)
    if queue is not None or priority is not None or max_attempts is not None:
        registry.check(queue=queue, priority=priority, max_attempts=max_attempts)
    policy = registry.get(type) or _unregistered(type)
    if queue is None:
        queue = policy.queue or "default"
    if priority is None:
        priority = policy.priority or 0
    if max_attempts is None:
        max_attempts = policy.max_attempts or settings.DEFAULT_MAX_ATTEMPTS
    if idempotency_key is not None:
        payloads.check_name("idempotency_key", idempotency_key, 255)
        if idempotency_key.startswith("schedule:"):
            raise JobError(
                f'idempotency_key {idempotency_key!r} starts with "schedule:", which belongs to the '
                "scheduler. Choose another prefix."
            )
    instant, delay = _when(available_in, run_at)
    return {
        "type": type,
        "payload": payloads.dumps({} if payload is None else payload, max_bytes=settings.PAYLOAD_MAX_BYTES),
        "queue": queue,
        "priority": priority,
        "max_attempts": max_attempts,
        "idempotency_key": idempotency_key,
        "run_at": instant,
        "delay": delay,
    }


def _unregistered(type_: str) -> registry.Definition:
    logger.debug('Enqueued "%s", which no jobs.py of this process registers.', type_)
    return _NO_POLICY


def rows(jobs: Any) -> list[dict[str, Any]]:
    """Return rows for an iterable of dicts of ``enqueue``'s arguments; the error names the index."""
    result = []
    if not isinstance(jobs, Iterable):
        raise JobError(f"jobs={payloads.in_words(jobs)} is no iterable of dicts of enqueue's arguments.")
    for index, arguments in enumerate(jobs):
        if not isinstance(arguments, Mapping):
            raise JobError(
                f"jobs[{index}] is {payloads.in_words(arguments)}; each must be a dict of enqueue's "
                'arguments, such as {"type": "email.send", "payload": {…}}.'
            )
        try:
            result.append(row(**arguments))
        except (JobError, TypeError) as error:
            message = str(error).replace("row()", "enqueue()")
            raise JobError(f"jobs[{index}]: {message}") from None
    return result


def slot_rows(jobs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows for the jobs of a schedule's slots: their keys are those that nobody else may use."""
    return [
        row(**{name: value for name, value in one.items() if name != "slot_key"})
        | {"idempotency_key": one["slot_key"]}
        for one in jobs
    ]


def row_id(row: Model | int) -> int:
    """Return the id of a row, or of what may be one; raise ``JobError`` for anything else."""
    pk = getattr(row, "pk", row)
    if type(pk) is not int:
        raise JobError(f"{payloads.in_words(row)} is neither a stored row nor the id of one, a whole number.")
    return pk


def queues(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of queues to serve; raise ``JobError`` for what is none."""
    found = tuple(names)
    for name in found:
        payloads.check_label("queue", name, 64)
    return found


def interval(name: str, value: float | timedelta) -> float:
    """Return ``value`` as seconds above 0; raise ``JobError`` for anything else."""
    try:
        return conf.positive(value)
    except ValueError as error:
        raise JobError(f"{name}={payloads.in_words(value)}: {error}.") from None


def by_whom(name: str) -> dict[str, str]:
    """Return the part of a history entry that says who moved a job by hand."""
    if name:
        payloads.check_name("by", name, 200)
    return {"by": name} if name else {}


def _when(available_in: float | timedelta, run_at: datetime | None) -> tuple[datetime | None, float | None]:
    if run_at is None and type(available_in) is int and not available_in:
        return None, None
    try:
        delay = conf.seconds(available_in)
    except ValueError as error:
        raise JobError(f"available_in={payloads.in_words(available_in)}: {error}.") from None
    if run_at is None:
        return None, delay or None
    if delay:
        raise JobError(
            f"Both available_in={available_in!r} and run_at={payloads.in_words(run_at)} were given. "
            "Give one of them."
        )
    if not isinstance(run_at, datetime):
        raise JobError(
            f"run_at={payloads.in_words(run_at)} is not a datetime; for seconds there is available_in."
        )
    if run_at.utcoffset() is None:
        raise JobError(
            f"run_at={run_at!r} has no time zone. Use django.utils.timezone.now() or make_aware()."
        )
    try:
        instant = run_at.astimezone(UTC)
    except OverflowError:
        instant = datetime.max.replace(tzinfo=UTC)
    if not 1970 <= instant.year <= 9000:
        raise JobError(
            f"run_at={run_at!r} is outside the years 1970 to 9000. Is it the instant that you mean?"
        )
    return instant, None
