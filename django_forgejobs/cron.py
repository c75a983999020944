"""Cron expressions: from five fields and a zone to instants. The only module that knows croniter, which
reads an expression; the slots are counted here, by arithmetic (docs/decisions/0006).

Rules of crontab(5), and these on days when clocks change. A *wildcard* expression, whose minute or hour
field begins with ``*``, follows real time: each matching local minute that happens, so none in a gap and
both copies in an overlap. Any other is *fixed-time*: a time that is skipped runs once, when the gap ends; one
that happens twice runs at its first copy.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

from croniter import croniter

from django_forgejobs.exceptions import JobError
from django_forgejobs.grid import Grid
from django_forgejobs.payloads import in_words
from django_forgejobs.wallclock import Stretch, local, naive, stretches, zone

LONGEST = 255

ALIASES: Mapping[str, str] = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

#: Nobody plans beyond; the years in which a database, too, can store what is computed.
_FIRST, _LAST = datetime(1900, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)

_DAY = timedelta(days=1)
_MOMENT = timedelta(microseconds=1)


@dataclass(frozen=True)
class Run:
    """One slot, as people see it: ``local`` is in the schedule's zone, ``note`` tells of a clock change."""

    slot: datetime
    local: datetime
    note: str = ""


def parse(expression: Any, timezone: Any, *, name: str | None = None) -> Cron:
    """Return what ``expression`` means in the zone ``timezone``.

    ``name`` is what ``H`` hashes, so that schedules spread themselves. Whether an expression is valid does
    not depend on the date. Raises ``JobError``, and nothing else, for whatever is none.
    """
    if not isinstance(name, str | None):
        raise JobError(f"name={in_words(name)}: a schedule's name is a text.")
    if not isinstance(expression, str) or not isinstance(timezone, str):
        raise JobError(
            f"cron={in_words(expression)} in timezone={in_words(timezone)}: both are texts, such as "
            '"30 2 * * *" and "Europe/Berlin".'
        )
    return _parse(expression, timezone, name)


@lru_cache(maxsize=2000)
def _parse(expression: str, timezone: str, name: str | None) -> Cron:
    return Cron(expression, timezone, zone(timezone), *_grid(expression, name))


def offset(name: str, spread: int) -> int:
    """Return a number of seconds from 0 to ``spread``, which is left out: always the same for a name."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) % spread if spread > 0 else 0


# --- What is accepted ----------------------------------------------------------------------------

_NAMES = {
    3: ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
    4: ["sun", "mon", "tue", "wed", "thu", "fri", "sat"],
}
_FIELDS = ("minute", "hour", "day of month", "month", "day of week")
_CIRCLES = (range(60), range(24), range(1, 32), range(1, 13), range(7))


def _refuse(expression: str, why: str) -> JobError:
    return JobError(f"cron={in_words(expression)}: {why}")


def _fields(expression: str) -> list[str]:
    """Return the five fields in lower case, aliases resolved; refuse what croniter would misunderstand."""
    if len(expression) > LONGEST:
        raise _refuse(expression, f"it is {len(expression):,} characters long, more than {LONGEST}.")
    text = expression.strip().lower()
    if text.startswith("@"):
        if text not in ALIASES:
            known = ", ".join(ALIASES)
            raise _refuse(expression, f"it is none of {known}. Write five fields for anything else.")
        text = ALIASES[text]
    if not text.isascii() or not text.replace("\t", " ").isprintable():
        raise _refuse(expression, "it has characters that no expression has. Write it in plain ASCII.")
    fields = text.split()
    if len(fields) != 5:
        raise _refuse(
            expression,
            f"it has {len(fields)} fields, not the five of an expression: {', '.join(_FIELDS)}.",
        )
    for index, text in enumerate(fields):
        _check_letters(expression, index, text)
    return fields


def _check_letters(expression: str, index: int, text: str) -> None:
    where = f"the {_FIELDS[index]} {text!r}"
    for word in re.findall(r"[a-z]+", text):
        if word == "h" or word in _NAMES.get(index, ()):
            continue
        last_days = index == 4 and all(re.fullmatch(r"l[0-7]|[^l]*", part) for part in text.split(","))
        if word == "l" and (index == 2 or last_days):
            continue
        if word == "r":
            raise _refuse(expression, f"{where} is random, so that nobody could say when it runs. Use H.")
        if word == "w":
            raise _refuse(expression, f"{where} asks for the nearest weekday, which is not supported.")
        known = difflib.get_close_matches(word, _NAMES.get(index, ()), n=1, cutoff=0.5)
        hint = f" Write {known[0]}." if known else ""
        if index == 4 and "l" in (word, word[-1:]) and not known:
            hint = " Write L5 for the last Friday."
        raise _refuse(expression, f"{where} has {word!r}, which is no name that belongs there.{hint}")
    if wrong := re.search(r"[^a-z0-9*,/#()-]" if index == 4 else r"[^a-z0-9*,/()-]", text):
        hint = " Write * for any." if wrong[0] == "?" else ""
        raise _refuse(expression, f"{where} has {wrong[0]!r}, which does not belong there.{hint}")
    circle = _CIRCLES[index]
    for number in re.findall(r"(?<![/#\d])\d+", text):
        if int(number) not in range(circle[0], circle[-1] + 1 + (index == 4)):
            least, most = circle[0], circle[-1] + (index == 4)
            raise _refuse(expression, f"{where} has {number}, which is not from {least} to {most}.")


def _unrolled(index: int, field: str) -> str:
    """Return the field with values instead of ranges that go round (``22-2``) or are one value (``5-5``).
    croniter miscounts the steps of the former, and takes the latter for the whole circle.
    """
    parts = field.split(",")
    circle, names = _CIRCLES[index], _NAMES.get(index, [])
    for at, part in enumerate(parts):
        if match := re.fullmatch(r"(\w+)-(\w+)(?:/0*([1-9]\d*))?", part):
            low, high = (
                circle[names.index(end)] if end in names else int(end) if end.isdecimal() else -1
                for end in match.groups()[:2]
            )
            if circle[0] <= high <= low <= circle[-1] + (index == 4):  # 7 is Sunday, too
                steps = range(low, low + (high - low) % len(circle) + 1, int(match[3] or 1))
                parts[at] = ",".join(str(circle[(value - circle[0]) % len(circle)]) for value in steps)
    return ",".join(parts)


def _check_week(expression: str, fields: list[str]) -> None:
    """Refuse what croniter would ignore beside ``1#2`` or ``L5``."""
    parts = fields[4].split(",")
    if not any("#" in part or part.startswith("l") for part in parts):
        return
    if not all(re.fullmatch(r"\w+#\d|l\d", part) for part in parts):
        raise _refuse(
            expression,
            f"the day of week {fields[4]!r} has something beside single days such as 1#2 or L5. Make two "
            "schedules.",
        )
    if not fields[2].startswith("*"):
        raise _refuse(
            expression,
            f"the day of month {fields[2]!r} and the day of week {fields[4]!r} cannot be combined. Leave one "
            "of them *, or make two schedules.",
        )


def _grid(expression: str, name: str | None) -> tuple[Grid, bool, tuple[str, ...]]:
    fields = _fields(expression)
    if name is None and any(re.search(r"(?<![a-z])h(?![a-z])", field) for field in fields):
        raise _refuse(expression, "H is a hash of the schedule's name, and none is given. Give a name.")
    _check_week(expression, fields)
    plain = [_unrolled(index, field) for index, field in enumerate(fields)]
    # Without L: croniter takes 31 parts, such as 2-31,L, for every day.
    numbered = [part for part in plain[2].split(",") if part != "l"]
    plain[2] = ",".join(numbered) or "*"
    try:
        lists, nth = croniter.expand(" ".join(plain), hash_id=(name or "").encode("utf-8", "surrogatepass"))
    except Exception as error:  # its own in version 7; a tick must survive those of any other, too
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _refuse(expression, f"it cannot be understood ({reason[:200]}).") from None
    minutes, hours, days, months, weekdays = lists
    free = [field.startswith("*") for field in fields]
    grid = Grid(
        times=tuple(sorted(h * 60 + m for h in _all(1, hours) for m in _all(0, minutes))),
        months=frozenset(_all(3, months)),
        days=frozenset(_all(2, days) if numbered else ()),
        last_day="l" in fields[2].split(","),
        weekdays=frozenset(_all(4, weekdays)),
        nth=tuple((day, frozenset(which)) for day, which in nth.items()),
        either=not free[2] and not free[4],
    )
    # Every day of the Gregorian calendar on every weekday comes in these years, or never.
    if grid.next_day(date(2000, 1, 1)) is None:
        hint = f" H may be too late a day for {name!r}: H(1-28) is none." if "h" in fields[2] else ""
        raise _refuse(expression, f"there is no such day in any year.{hint}")
    return grid, not (free[0] or free[1]), tuple(fields)


def _all(index: int, values: list[Any]) -> list[int]:
    return list(_CIRCLES[index]) if "*" in values else values


# --- Instants ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cron:
    """An expression in a zone. Its slots are UTC instants, given and taken as aware datetimes."""

    expression: str
    timezone: str
    zone: ZoneInfo
    grid: Grid
    fixed: bool
    fields: tuple[str, ...]

    def after(self, instant: datetime) -> datetime | None:
        """Return the first slot that is strictly later; None beyond the year 9000."""
        at = max(_utc(instant), _FIRST)
        later = at
        while at < _LAST:
            for stretch in stretches(self.zone, at - _DAY, at + 2 * _DAY):
                if (slot := self._first_in(stretch, later)) is not None:
                    return slot
            following = self.grid.first(local(self.zone, at + _DAY))
            if following is None:
                return None
            # A day before it, in case a clock changes there. What lies between has no slot.
            at = max(at + _DAY, following.replace(tzinfo=UTC) - 2 * _DAY)
            later = at - _MOMENT
        return None

    def latest(self, instant: datetime) -> datetime | None:
        """Return the last slot that is not later; None before the year 1900."""
        at = min(_utc(instant), _LAST)
        while at > _FIRST:
            floor = at - 2 * _DAY
            for stretch in reversed(list(stretches(self.zone, floor - _DAY, at + _MOMENT))):
                slot = self._last_in(stretch, at)
                if slot is not None and slot >= floor:
                    return slot
            previous = self.grid.last(local(self.zone, floor) + _DAY)
            if previous is None:
                return None
            at = min(at - _DAY, previous.replace(tzinfo=UTC) + 2 * _DAY)
        return None

    def count(self, after: datetime, until: datetime) -> int:
        """Return how many slots are later than ``after`` and not later than ``until``: no slot is visited."""
        after, until = max(_utc(after), _FIRST), min(_utc(until), _LAST)
        if after >= until:
            return 0
        return sum(
            self._count_in(stretch, after, until)
            for stretch in stretches(self.zone, after - _DAY, until + _MOMENT)
        )

    def runs(self, start: datetime, number: int) -> list[Run]:
        """Return the ``number`` slots that follow ``start``, or fewer, with what clock changes do to them."""
        found: list[Run] = []
        slot = self.after(start)
        while slot is not None and len(found) < number:
            found.append(Run(slot, slot.astimezone(self.zone), self._note(slot)))
            slot = self.after(slot)
        return found

    @cached_property
    def smallest_gap(self) -> float:
        """The seconds between the two slots that are nearest to each other, clock changes apart."""
        last, days = 0, 1_000_000
        for year in range(2000, 2057):  # each weekday has its 29 February twice
            for month in _CIRCLES[3]:
                for day in self.grid.days_of(year, month):
                    last, before = date(year, month, day).toordinal(), last
                    days = min(days, last - before)
            if days == 1:
                break
        times = self.grid.times
        return 60.0 * min([days * 1440 - times[-1] + times[0], *(b - a for a, b in pairwise(times))])

    @property
    def warnings(self) -> list[str]:
        """What of the expression may not mean what it seems to: steps that do not divide their range."""
        found = []
        for index, field in enumerate(self.fields):
            match = re.fullmatch(r"\*/(\d+)", field)
            circle, step = _CIRCLES[index], int(match[1]) if match else 1
            if step > 1 and index == 2:
                found.append(f"{field} is no interval: it begins again on day 1 of each month.")
            elif len(circle) % step:
                values = circle[::step]
                unit = ("minute", "hour", "", "month", "day")[index]
                last = len(circle) - values[-1] + circle[0]
                shown = ", ".join(_NAMES[4][value] if index == 4 else f"{value}" for value in values)
                apart = f"{step} {unit}s apart, then {last}" if len(values) > 1 else f"{last} {unit}s apart"
                found.append(f"{field} is no interval: it means {unit} {shown}, {apart}.")
        return found

    # --- slots in a stretch ----------------------------------------------------------------------

    def _bounds(self, stretch: Stretch) -> tuple[datetime, datetime]:
        """Return the local times whose slots lie in ``stretch``."""
        low = stretch.start + stretch.offset
        if self.fixed:  # of an overlap the first copy only
            low = max(low, stretch.start + stretch.before)
        return naive(low), naive(stretch.end + stretch.offset)

    def _extra(self, stretch: Stretch) -> datetime | None:
        """Return the end of a gap that swallowed fixed times, unless it is a slot anyway."""
        if not self.fixed or stretch.offset <= stretch.before:
            return None
        low, high = stretch.was, stretch.shows
        swallowed = self.grid.count(low, high) and not self.grid.count(high, high + _MOMENT)
        return stretch.start if swallowed else None

    def _first_in(self, stretch: Stretch, after: datetime) -> datetime | None:
        if (extra := self._extra(stretch)) is not None and extra > after:
            return extra
        low, high = self._bounds(stretch)
        shown = self.grid.first(max(low, naive(after + stretch.offset) + _MOMENT))
        return None if shown is None or shown >= high else shown.replace(tzinfo=UTC) - stretch.offset

    def _last_in(self, stretch: Stretch, until: datetime) -> datetime | None:
        low, high = self._bounds(stretch)
        shown = self.grid.last(min(high, naive(until + stretch.offset) + _MOMENT))
        if shown is not None and shown >= low:
            return shown.replace(tzinfo=UTC) - stretch.offset
        extra = self._extra(stretch)
        return extra if extra is not None and extra <= until else None

    def _count_in(self, stretch: Stretch, after: datetime, until: datetime) -> int:
        low, high = self._bounds(stretch)
        low = max(low, naive(after + stretch.offset) + _MOMENT)
        high = min(high, naive(until + stretch.offset) + _MOMENT)
        extra = self._extra(stretch)
        return self.grid.count(low, high) + (extra is not None and after < extra <= until)

    # --- what people read ------------------------------------------------------------------------

    def _note(self, slot: datetime) -> str:
        """Return what clocks do on the local day of ``slot``, and to it."""
        day = local(self.zone, slot).date()
        for stretch in stretches(self.zone, slot - 2 * _DAY, slot + 2 * _DAY):
            if stretch.offset == stretch.before:
                continue
            old, new = stretch.was, stretch.shows
            days = min(old, new).date(), (max(old, new) - _MOMENT).date()
            if day not in days and slot != self._extra(stretch):
                continue
            way = "forward" if new > old else "back"
            when = f" on this day, {old:%H:%M} to {new:%H:%M}"
            if old.date() != new.date():
                when = f", {old:%Y-%m-%d %H:%M} to {new:%Y-%m-%d %H:%M}"
            return f"Clocks go {way}{when}.{self._moved(slot, stretch)}"
        return ""

    def _moved(self, slot: datetime, change: Stretch) -> str:
        if slot == self._extra(change):
            return " The time of this run does not exist: it runs when the gap ends."
        shown = local(self.zone, slot)
        if not change.shows <= shown < change.was:
            return ""
        if slot >= change.start:
            return f" This is the second {shown:%H:%M} of two."
        return f" This is the first {shown:%H:%M} of two{', the only run' if self.fixed else ''}."


def _utc(instant: datetime) -> datetime:
    """Return the instant in UTC; those at the ends of Python's calendar, whose UTC it cannot tell, as is."""
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        return _FIRST if instant.year < 5000 else _LAST
