"""What a caller of ``enqueue`` asked for, checked and made a row. Touches no database."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django_forgejobs import conf, payloads, registry
from django_forgejobs.exceptions import JobError

logger = logging.getLogger("django_forgejobs")

PRIORITIES = range(-100, 101)


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
    """Return the row for ``sql.insert``; raise ``JobError`` with the value and the remedy.

    What is ``None`` comes from the type's registered policy, else from the project's defaults. A payload
    of ``None`` is stored as ``{}``, since handlers are promised a dict.
    """
    settings = conf.current()
    _text("type", type, 200)
    policy = registry.get(type)
    if policy is None:
        logger.debug('Enqueued "%s", which no jobs.py of this process registers.', type)
        policy = registry.Definition(type, row)
    queue = _first(queue, policy.queue, "default")
    priority = _first(priority, policy.priority, 0)
    max_attempts = _first(max_attempts, policy.max_attempts, settings.DEFAULT_MAX_ATTEMPTS)
    _text("queue", queue, 64)
    _whole("priority", priority, PRIORITIES.start, PRIORITIES.stop - 1)
    _whole("max_attempts", max_attempts, 1, 2**31 - 1)
    if idempotency_key is not None:
        _text("idempotency_key", idempotency_key, 255)
        if idempotency_key.startswith("schedule:"):
            raise JobError(
                f'idempotency_key {idempotency_key!r} starts with "schedule:", which belongs to the '
                "scheduler. Choose another prefix."
            )
    return {
        "type": type,
        "payload": payloads.dumps({} if payload is None else payload, max_bytes=settings.PAYLOAD_MAX_BYTES),
        "queue": queue,
        "priority": priority,
        "max_attempts": max_attempts,
        "idempotency_key": idempotency_key,
        **_when(available_in, run_at),
    }


def rows(jobs: Any) -> list[dict[str, Any]]:
    """Return rows for an iterable of dicts of ``enqueue``'s arguments; the error names the index."""
    result = []
    for index, arguments in enumerate(jobs):
        if not isinstance(arguments, Mapping):
            raise JobError(
                f"jobs[{index}] is {arguments!r}; each must be a dict of enqueue's arguments, such as "
                '{"type": "email.send", "payload": {…}}.'
            )
        try:
            result.append(row(**arguments))
        except (JobError, TypeError) as error:
            message = str(error).replace("row()", "enqueue()")
            raise JobError(f"jobs[{index}]: {message}") from None
    return result


def _when(available_in: float | timedelta, run_at: datetime | None) -> dict[str, Any]:
    try:
        delay = conf.seconds(available_in)
    except ValueError as error:
        raise JobError(f"available_in={available_in!r}: {error}.") from None
    if run_at is None:
        return {"run_at": None, "delay": delay}
    if delay:
        raise JobError(
            f"Both available_in={available_in!r} and run_at={run_at!r} were given. Give one of them."
        )
    if not isinstance(run_at, datetime):
        raise JobError(f"run_at={run_at!r} is not a datetime.")
    if run_at.utcoffset() is None:
        raise JobError(
            f"run_at={run_at!r} has no time zone. Use django.utils.timezone.now() or make_aware()."
        )
    try:
        instant = run_at.astimezone(UTC)
    except OverflowError:
        instant = datetime.max.replace(tzinfo=UTC)
    if not 1970 <= instant.year <= 9000:
        raise JobError(f"run_at={run_at!r} is outside the years 1970 to 9000.")
    return {"run_at": instant, "delay": 0.0}


def _text(name: str, value: Any, longest: int) -> None:
    if type(value) is not str:
        raise JobError(f"{name}={value!r} is not a string.")
    if not value:
        raise JobError(f"{name} is empty; name it.")
    payloads.check_text(value, name)
    if len(value) > longest:
        raise JobError(f"{name}={value[:40]!r}… is {len(value)} characters, more than {longest}.")


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise JobError(f"{name}={value!r} is not a whole number from {least} to {most}.")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
