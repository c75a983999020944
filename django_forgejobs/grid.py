"""The local minutes that an expression matches, without any zone: found and counted by arithmetic, month by
month, never minute by minute.
"""

from __future__ import annotations

from bisect import bisect_left
from calendar import monthrange
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import cached_property

#: A 29 February on one weekday is up to 40 years from the next, since 2100 is no leap year.
YEARS_BETWEEN = 40

_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Grid:
    """Which local minutes match. ``times`` are minutes of a day; ``weekdays`` count from Sunday, 0; ``nth``
    are weekdays with which of a month they are meant, "l" for the last; ``either`` is whether a day of month
    or of week is enough.
    """

    times: tuple[int, ...]
    months: frozenset[int]
    days: frozenset[int]
    last_day: bool
    weekdays: frozenset[int]
    nth: tuple[tuple[int, frozenset[int | str]], ...]
    either: bool

    def days_of(self, year: int, month: int) -> list[int]:
        """Return the days of a month that match, in order."""
        if month not in self.months:
            return []
        return self._days_by_month[monthrange(year, month)]

    @cached_property
    def _ordered_months(self) -> list[int]:
        return sorted(self.months)

    @cached_property
    def _days_by_month(self) -> dict[tuple[int, int], list[int]]:
        """The days that match in a month that begins on a weekday, from Monday, 0, and has a length: there
        are only 28 such months, and a rare day is looked for in hundreds.
        """
        return {
            (first, length): [
                day for day in range(1, length + 1) if self._matches(day, (first + day) % 7, length)
            ]
            for first in range(7)
            for length in range(28, 32)
        }

    def _matches(self, day: int, weekday: int, length: int) -> bool:
        by_month = day in self.days or (self.last_day and day == length)
        by_week = weekday in self.weekdays
        if self.nth:
            week = "l" if day + 7 > length else 0
            by_week = any(
                weekday == one and ((day + 6) // 7 in which or week in which) for one, which in self.nth
            )
        return by_month or by_week if self.either else by_month and by_week

    def next_day(self, since: date) -> date | None:
        """Return the first day that matches, ``since`` or later."""
        for year in range(since.year, since.year + YEARS_BETWEEN + 1):
            for month in self._ordered_months:
                if (year, month) >= (since.year, since.month):
                    for day in self.days_of(year, month):
                        if (found := date(year, month, day)) >= since:
                            return found
        return None

    def last_day_until(self, until: date) -> date | None:
        """Return the last day that matches, ``until`` or earlier."""
        for year in range(until.year, until.year - YEARS_BETWEEN - 1, -1):
            for month in reversed(self._ordered_months):
                if (year, month) <= (until.year, until.month):
                    for day in reversed(self.days_of(year, month)):
                        if (found := date(year, month, day)) <= until:
                            return found
        return None

    def first(self, since: datetime) -> datetime | None:
        """Return the first minute that matches, ``since`` or later."""
        day = self.next_day(since.date())
        if day is None:
            return None
        if day == since.date():
            if (index := bisect_left(self.times, _minute(since))) < len(self.times):
                return _at(day, self.times[index])
            day = self.next_day(day + _DAY)
        return None if day is None else _at(day, self.times[0])

    def last(self, before: datetime) -> datetime | None:
        """Return the last minute that matches, earlier than ``before``."""
        day = self.last_day_until(before.date())
        if day is None:
            return None
        if day == before.date():
            if index := bisect_left(self.times, _minute(before)):
                return _at(day, self.times[index - 1])
            day = self.last_day_until(day - _DAY)
        return None if day is None else _at(day, self.times[-1])

    def count(self, since: datetime, before: datetime) -> int:
        """Return how many minutes match, from ``since`` to ``before``, which is left out."""
        if since >= before:
            return 0
        days = self._count_days(since.date(), before.date())
        return days * len(self.times) - self._earlier(since) + self._earlier(before)

    def _count_days(self, since: date, before: date) -> int:
        """Return how many days match, from ``since`` to ``before``, which is left out: month by month."""
        total, year, month = 0, since.year, since.month
        while (year, month) <= (before.year, before.month):
            days = self.days_of(year, month)
            if (year, month) == (since.year, since.month):
                total -= bisect_left(days, since.day)
            if (year, month) == (before.year, before.month):
                return total + bisect_left(days, before.day)
            total += len(days)
            year, month = year + month // 12, month % 12 + 1
        return total

    def _earlier(self, moment: datetime) -> int:
        """Return how many minutes match on the day of ``moment`` before it."""
        if moment.day not in self.days_of(moment.year, moment.month):
            return 0
        return bisect_left(self.times, _minute(moment))


def _minute(moment: datetime) -> float:
    return moment.hour * 60 + moment.minute + (moment.second + moment.microsecond / 1e6) / 60


def _at(day: date, minute: int) -> datetime:
    return datetime.combine(day, time(minute // 60, minute % 60))
