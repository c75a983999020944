"""When a schedule runs next, for people: in its zone, in UTC and in theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from typing import Any

from django.utils import timezone

from django_forgejobs import cron, schedules, slots
from django_forgejobs.exceptions import JobError

#: Runs that are shown.
RUNS = 10

FORMAT = "%a %Y-%m-%d %H:%M %Z"


@dataclass(frozen=True)
class Preview:
    """The next ``runs`` as texts, a time for each of ``zones``, and what to mind; or the ``error`` for which
    there are none. ``shift`` is the seconds that the spread adds.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    zones: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    shift: int = 0
    error: str = ""


def preview(schedule: Any, since: datetime, *, whole: bool) -> Preview:
    """Return the next slots of a schedule after ``since``; never raises. Of one that is not ``whole`` only
    what tells when it runs is looked at: the rest may be filled in later.
    """
    try:
        if whole:
            found = schedules.check(schedule)
        else:
            found = cron.parse(schedule.cron, schedule.timezone, name=schedule.name or None)
    except JobError as error:
        return Preview(error=schedules.reason(error, schedule.name))
    # Each zone once: its own, UTC and the reader's.
    zones: dict[str, tzinfo] = {found.timezone: found.zone, "UTC": UTC}
    zones |= {timezone.get_current_timezone_name(): timezone.get_current_timezone()}
    runs: list[dict[str, Any]] = []
    slot = slots.first(found, since, schedule.starts_at, schedule.ends_at)
    while slot is not None and len(runs) < RUNS:
        [run] = found.runs(slot - slots.MOMENT, 1)
        times = [run.slot.astimezone(one).strftime(FORMAT) for one in zones.values()]
        runs.append({"times": times, "note": run.note})
        slot = slots.first(found, slot, None, schedule.ends_at)
    return Preview(runs, list(zones), found.warnings, cron.offset(schedule.name, schedule.spread))
