"""When a schedule runs next, for people: in its zone, in UTC and in theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.utils import timezone

from django_forgejobs import cron, schedules, slots
from django_forgejobs.cron import Run
from django_forgejobs.exceptions import JobError

#: Runs that are shown.
RUNS = 10

FORMAT = "%a %Y-%m-%d %H:%M %Z"


@dataclass(frozen=True)
class Preview:
    """The next ``runs`` as texts, and what to mind; or the ``error`` for which there are none. ``shift`` is
    the seconds that the spread adds.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
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
    runs: list[dict[str, Any]] = []
    slot = slots.first(found, since, schedule.starts_at, schedule.ends_at)
    while slot is not None and len(runs) < RUNS:
        [run] = found.runs(slot - slots.MOMENT, 1)
        runs.append(_texts(run))
        slot = slots.first(found, slot, None, schedule.ends_at)
    return Preview(runs, found.warnings, cron.offset(schedule.name, schedule.spread))


def _texts(run: Run) -> dict[str, Any]:
    return {
        "local": run.local.strftime(FORMAT),
        "utc": f"{run.slot:%Y-%m-%d %H:%M}Z",
        "yours": timezone.localtime(run.slot).strftime(FORMAT),
        "note": run.note,
    }
