"""Schedules declared in code, by name: ``@schedule`` beside ``@job``, and ``FORGEJOBS["SCHEDULES"]``; and
what any schedule must be, wherever it comes from. Touches no database: ``timetable`` makes rows of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ParamSpec, TypeVar

from django.conf import settings

from django_forgejobs import conf, cron, payloads, registry
from django_forgejobs.conf import did_you_mean
from django_forgejobs.cron import Cron
from django_forgejobs.exceptions import JobError
from django_forgejobs.registry import Handler
from django_forgejobs.slots import OnMissed, OnOverlap

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Declared:
    """A schedule as code declares it, with the names of ``Schedule``'s columns.

    An empty ``timezone`` is ``TIME_ZONE``; an empty queue, and no priority or max_attempts, are those of the
    type. ``enabled`` is how it begins: whether it is paused later is for people to say.
    """

    name: str
    job_type: str
    cron: str
    timezone: str = ""
    payload: Any = None
    queue: str = ""
    priority: int | None = None
    max_attempts: int | None = None
    spread: float | timedelta = 0
    on_missed: str = OnMissed.LATEST.value
    on_overlap: str = OnOverlap.ALLOW.value
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    enabled: bool = True

    def columns(self, *, max_bytes: int | None = None) -> dict[str, Any]:
        """Return the columns that are the code's, checked; raise ``JobError`` for a bad one."""
        if type(self.enabled) is not bool:
            raise JobError(f'Schedule "{self.name}": enabled={payloads.in_words(self.enabled)} is no bool.')
        named = replace(
            self,
            timezone=self.timezone or settings.TIME_ZONE,
            payload={} if self.payload is None else self.payload,
            spread=_whole_seconds(self.name, self.spread),
        )
        check(named, max_bytes=max_bytes)
        return {one.name: getattr(named, one.name) for one in fields(named) if one.name != "enabled"}


_decorated: dict[str, Declared] = {}


def schedule(
    cron: str, /, *, name: str | None = None, **options: Any
) -> Callable[[Handler[P, R]], Handler[P, R]]:
    """Enqueue a job of the decorated handler at every slot of ``cron``, once, however many schedulers run.

    Stands above ``@job``. ``name`` is the job type's unless given; a handler with several schedules needs
    a name for each. Options: ``timezone`` (``TIME_ZONE``), ``payload``, ``queue``, ``priority``,
    ``max_attempts``, ``spread`` (seconds or timedelta), ``on_missed`` ("latest", "all", "skip"),
    ``on_overlap`` ("allow", "skip"), ``starts_at``, ``ends_at`` (aware), ``enabled`` (how it begins). Raises
    ``JobError`` for what no scheduler could run.
    """

    if not isinstance(cron, str):
        raise JobError(
            f"@schedule takes an expression, not {payloads.in_words(cron)}: write "
            '@schedule("30 2 * * *") above @job("…").'
        )

    def decorate(handler: Handler[P, R]) -> Handler[P, R]:
        if not isinstance(handler, Handler):
            raise JobError(
                f'@schedule("{cron}") stands above @job("…"), since it is the job that it enqueues.'
            )
        type_ = handler.definition.type
        declared = _declare(type_ if name is None else name, {"job_type": type_, "cron": cron, **options})
        # Settings may be wrong, and it is for the checks to say so, not for an import: no limit of theirs is
        # asked for, and any zone will do to see the rest.
        replace(declared, timezone=declared.timezone or "UTC").columns(max_bytes=sys.maxsize)
        if _decorated.get(declared.name, declared) != declared:
            raise JobError(f'There are two schedules "{declared.name}". Give one of them another name=.')
        _decorated[declared.name] = declared
        return handler

    return decorate


def declared() -> dict[str, Declared]:
    """Return all declared schedules by name; raise ``JobError`` that names the first bad one."""
    found = {**_decorated}
    for name, options in conf.current().SCHEDULES.items():
        if name in found:
            raise JobError(f'There are two schedules "{name}": in FORGEJOBS["SCHEDULES"], and by @schedule.')
        found[name] = _declare(name, options)
        if registry.get(found[name].job_type) is None:
            raise JobError(
                f'FORGEJOBS["SCHEDULES"]["{name}"]: job type {payloads.in_words(found[name].job_type)} is '
                f"not registered.{did_you_mean(found[name].job_type, registry.types())} Is it imported by "
                "the jobs.py of an installed app?"
            )
    for one in found.values():
        one.columns()
    return found


def check(schedule: Any, *, max_bytes: int | None = None) -> Cron:
    """Return the ``Cron`` of a schedule, a row or a declared one; raise ``JobError`` for what it cannot be.

    ``max_bytes`` of None is ``PAYLOAD_MAX_BYTES``. Whether its job type is registered is not asked: another
    process may know it.
    """
    payloads.check_label("name", schedule.name, 200)
    try:
        return _check(schedule, conf.current().PAYLOAD_MAX_BYTES if max_bytes is None else max_bytes)
    except JobError as error:
        raise JobError(f'Schedule "{schedule.name}": {error}') from None


def reason(error: JobError | str, name: str) -> str:
    """Return what ``check`` says of the schedule ``name``, without the name."""
    return str(error).removeprefix(f'Schedule "{name}": ')


def _check(schedule: Any, max_bytes: int) -> Cron:
    payloads.check_label("job_type", schedule.job_type, 200)
    registry.check(
        queue=schedule.queue or None, priority=schedule.priority, max_attempts=schedule.max_attempts
    )
    payloads.check_whole("spread", schedule.spread, 0, 2**31 - 1)
    payloads.dumps(schedule.payload, max_bytes=max_bytes)
    for what, words in (("on_missed", OnMissed), ("on_overlap", OnOverlap)):
        if (value := getattr(schedule, what)) not in words.values:
            raise JobError(f"{what}={payloads.in_words(value)} is not one of {', '.join(words.values)}.")
    _check_times(schedule)
    found = cron.parse(schedule.cron, schedule.timezone, name=schedule.name)
    if schedule.spread and schedule.spread >= found.smallest_gap:
        raise JobError(
            f"spread={schedule.spread} s is not shorter than the {found.smallest_gap:g} s between two slots "
            f'of "{schedule.cron}": runs would overtake the next slot. Lower it.'
        )
    return found


def _check_times(schedule: Any) -> None:
    for what in ("starts_at", "ends_at"):
        value = getattr(schedule, what)
        if value is not None and (not isinstance(value, datetime) or value.utcoffset() is None):
            raise JobError(f"{what}={payloads.in_words(value)} is no datetime with a time zone.")
        if value is not None and not 1970 <= _utc_year(value) <= 9000:
            raise JobError(f"{what}={value} is outside the years 1970 to 9000.")
    if schedule.starts_at and schedule.ends_at and schedule.ends_at < schedule.starts_at:
        raise JobError(f"ends_at={schedule.ends_at} is before starts_at={schedule.starts_at}.")


def _utc_year(value: datetime) -> int:
    try:
        return value.astimezone(UTC).year
    except OverflowError:
        return 0


def _whole_seconds(name: str, spread: Any) -> int:
    try:
        number = conf.seconds(spread)
    except ValueError as error:
        raise JobError(f'Schedule "{name}": spread={payloads.in_words(spread)}: {error}.') from None
    return int(number)


def _declare(name: str, options: Mapping[str, Any]) -> Declared:
    known = [one.name for one in fields(Declared) if one.name != "name"]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known)
            raise JobError(f'Schedule "{name}" has no {payloads.in_words(option)}.{hint or _one_of(known)}')
    for needed in ("job_type", "cron"):
        if needed not in options:
            raise JobError(f'Schedule "{name}" needs a {needed}.')
    # None stands for the default, as in enqueue().
    return Declared(name, **{option: value for option, value in options.items() if value is not None})


def _one_of(known: list[str]) -> str:
    return f" It has {', '.join(known)}."


def problems() -> Iterator[str]:
    """Yield what is wrong with the declared schedules; nothing when they are sound."""
    try:
        declared()
    except JobError as error:
        yield str(error)
