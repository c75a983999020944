"""Time zones: the table that `tzdata` ships, and when clocks change. No database, no jobs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from zoneinfo import ZoneInfo

# Shorter than any time between two changes of one zone (Morocco: about four weeks, round Ramadan).
STEP = 7 * 86400
HORIZON = 3 * 366 * 86400


@dataclass(frozen=True)
class Change:
    """Clocks go from one UTC offset to another at this instant; offsets are seconds."""

    at: datetime
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.at:%Y-%m-%d %H:%M} UTC: {_offset(self.before)} → {_offset(self.after)}"


def read_table() -> list[str]:
    """Return the names in zone.tab, sorted: each inhabited place that has had a time of its own."""
    table = (files("tzdata") / "zoneinfo" / "zone.tab").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in table.splitlines() if not line.startswith("#"))
    return sorted({row[2] for row in rows})


def next_changes(zone: str, after: datetime, *, count: int = 2, within: int = HORIZON) -> list[Change]:
    """Return the next `count` changes of the UTC offset, of those within so many seconds.

    Raises ZoneInfoNotFoundError or ValueError for a name that is no zone.
    """
    info = ZoneInfo(zone)

    def offset(instant: int) -> int:
        difference = datetime.fromtimestamp(instant, info).utcoffset()
        assert difference is not None
        return int(difference.total_seconds())

    found: list[Change] = []
    start = int(after.timestamp())
    for low in range(start, start + within, STEP):
        high, before, now = low + STEP, offset(low), offset(low + STEP)
        if before == now:
            continue
        while high - low > 1:  # the change is after low, and at high at the latest
            middle = (low + high) // 2
            low, high = (middle, high) if offset(middle) == before else (low, middle)
        found.append(Change(datetime.fromtimestamp(high, UTC), before, now))
        if len(found) == count:
            break
    return found


def _offset(seconds: int) -> str:
    sign = "-" if seconds < 0 else "+"
    hours, minutes = divmod(timedelta(seconds=abs(seconds)) // timedelta(minutes=1), 60)
    return f"{sign}{hours:02d}:{minutes:02d}"
