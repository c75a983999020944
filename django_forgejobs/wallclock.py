"""The clocks on the walls of a zone: its offset from UTC, and when that changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

from django_forgejobs.conf import did_you_mean
from django_forgejobs.exceptions import JobError
from django_forgejobs.payloads import in_words

_DAY = timedelta(days=1)


def zone(name: str) -> ZoneInfo:
    """Return the time zone of that name; raise ``JobError`` for one that is not in the tz database."""
    hint = ""
    try:
        # These depend on the host, or count leap seconds.
        if name.partition("/")[0] not in ("localtime", "posixrules", "posix", "right"):
            return ZoneInfo(name)
    except Exception:  # ValueError, KeyError, OSError, UnicodeError: whatever a name makes of a path
        hint = did_you_mean(name, available_timezones())
    raise JobError(
        f"timezone={in_words(name)} is no zone of the tz database.{hint} Names are such as "
        '"Europe/Berlin" or "UTC"; where the system has no tz database, install tzdata.'
    )


@dataclass(frozen=True)
class Stretch:
    """The time from ``start`` to ``end``, which is left out, while the zone's offset is ``offset``; until
    then it was ``before``. All UTC.
    """

    start: datetime
    end: datetime
    offset: timedelta
    before: timedelta

    @property
    def was(self) -> datetime:
        """What clocks showed when it began, had they not been changed."""
        return naive(self.start + self.before)

    @property
    def shows(self) -> datetime:
        """What clocks show when it begins."""
        return naive(self.start + self.offset)


def offset_at(zone: ZoneInfo, instant: datetime) -> timedelta:
    """Return how far local time is ahead of UTC."""
    return instant.astimezone(zone).utcoffset() or timedelta()


def local(zone: ZoneInfo, instant: datetime) -> datetime:
    """Return what clocks show."""
    return naive(instant + offset_at(zone, instant))


def stretches(zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[Stretch]:
    """Yield the stretches of one offset from ``start`` to ``end``. The tz database does not tell when
    offsets change, so it is asked once a day.
    """
    at, offset = start, offset_at(zone, start)
    before = offset
    while at < end:
        later = min(at + _DAY, end)
        if (changed := offset_at(zone, later)) != offset:
            change = _change(zone, at, later)
            yield Stretch(start, change, offset, before)
            start, before, offset = change, offset, changed
        at = later
    if start < end:
        yield Stretch(start, end, offset, before)


def _change(zone: ZoneInfo, low: datetime, high: datetime) -> datetime:
    """Return the second, later than ``low``, in which the offset of ``low`` ends."""
    offset, since = offset_at(zone, low), low.replace(microsecond=0)
    same, other = 0, int((high - low).total_seconds()) + 1
    while other - same > 1:
        middle = (same + other) // 2
        if offset_at(zone, since + timedelta(seconds=middle)) == offset:
            same = middle
        else:
            other = middle
    return since + timedelta(seconds=other)


def naive(instant: datetime) -> datetime:
    """Return the same figures without a zone."""
    return instant.replace(tzinfo=None)
