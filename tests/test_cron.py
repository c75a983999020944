"""Cron expressions: what is accepted, when it runs, and what clock changes do to it."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from django_forgejobs import cron
from django_forgejobs.cron import Cron
from django_forgejobs.exceptions import JobError

VECTORS = json.loads((Path(__file__).parent / "cron_vectors.json").read_text())
BERLIN, LORD_HOWE, NUUK = "Europe/Berlin", "Australia/Lord_Howe", "America/Nuuk"


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


def following(expression: str, zone: str, start: str, number: int = 3) -> list[str]:
    runs = cron.parse(expression, zone).runs(instant(start), number)
    return [f"{run.slot:%Y-%m-%dT%H:%M:%SZ}" for run in runs]


# --- What was handed over ------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda one: f"{one['cron']} {one['tz']}")
def test_a_vector_runs_when_it_must(vector: dict[str, Any]) -> None:
    """C011, C015, C033, C123."""
    assert following(vector["cron"], vector["tz"], vector["start"]) == vector["next"]


def test_the_hosts_zone_changes_nothing() -> None:
    script = """
import json, sys
from datetime import datetime
from django_forgejobs import cron
for one in json.load(open(sys.argv[1]))["vectors"]:
    runs = cron.parse(one["cron"], one["tz"]).runs(datetime.fromisoformat(one["start"]), 3)
    assert [f"{run.slot:%Y-%m-%dT%H:%M:%SZ}" for run in runs] == one["next"], one
"""
    path = Path(__file__).parent / "cron_vectors.json"
    subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env=os.environ | {"TZ": "Europe/London"},
        check=True,
        timeout=60,
    )


@pytest.mark.parametrize("expression", VECTORS["refuse"])
def test_what_must_be_refused_is(expression: Any) -> None:
    with pytest.raises(JobError, match="cron="):
        cron.parse(expression, "UTC")


@pytest.mark.parametrize("expression", VECTORS["accept"])
def test_what_must_be_accepted_is(expression: str) -> None:
    assert cron.parse(expression, "UTC").after(instant("2026-01-01T00:00Z")) is not None


# --- What is accepted ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "days"),
    [
        ("0 8 * * SAT-SUN", "sat sun"),
        ("0 8 * * FRI-MON", "mon fri sat sun"),
        ("0 8 * * 5-7", "fri sat sun"),
        ("0 8 * * 7", "sun"),
        ("0 8 * * 0", "sun"),
        ("0 8 * * mon,Wed", "mon wed"),
        ("0 8 * * mon-fri/2", "mon wed fri"),
        ("0 8 * * */3", "wed sat sun"),
        ("0 8 * * 6-1", "mon sat sun"),
        ("0 8 * * 5-5", "fri"),
        ("0 8 * * fri-5", "fri"),
        ("0 8 * * 5-5/2,MON", "mon fri"),
        ("0 8 * * 7-0", "sun"),
        ("0 8 * * 7-7", "sun"),
        ("0 8 * * 0-7", "mon tue wed thu fri sat sun"),
        ("0 8 * * 6-1/2", "mon sat"),
        ("0 8 * * FRI-TUE/2", "tue fri sun"),
        ("0 8 * * 1-7/3", "mon thu sun"),
        ("0 8 * * 7/2", "tue thu sat sun"),  # as 0/2
    ],
)
def test_weekdays_are_what_crontab_makes_of_them(expression: str, days: str) -> None:
    """C119."""
    runs = cron.parse(expression, "UTC").runs(instant("2026-06-01T00:00Z"), 14)
    week = {run.slot.date() for run in runs if run.slot < instant("2026-06-08T00:00Z")}
    assert [f"{day:%a}".lower() for day in sorted(week)] == days.split()


@pytest.mark.parametrize(
    ("expression", "runs"),
    [
        ("0 22-2 * * *", ["2026-06-01T01", "2026-06-01T02", "2026-06-01T22"]),
        ("0 20-4/3 * * *", ["2026-06-01T02", "2026-06-01T20", "2026-06-01T23"]),
        ("50-10/15 0 * * *", ["2026-06-01T00:05", "2026-06-01T00:50", "2026-06-02T00:05"]),
        ("0 0 25-5/4 * *", ["2026-06-02T00", "2026-06-25T00", "2026-06-29T00"]),
        ("0 0 28 11-2/2 *", ["2026-11-28T00", "2027-01-28T00", "2027-11-28T00"]),
        ("0 0 2-31,L * *", ["2026-06-02T00", "2026-06-03T00", "2026-06-04T00"]),
        ("0 0 1-29,31,L 7 *", [*(f"2026-07-{day:02}T00" for day in range(1, 30)), "2026-07-31T00"]),
        ("0 0 L * *", ["2026-06-30T00", "2026-07-31T00", "2026-08-31T00"]),
        ("0 0 L,15 * *", ["2026-06-15T00", "2026-06-30T00", "2026-07-15T00"]),
        ("0 0 * * L5", ["2026-06-26T00", "2026-07-31T00", "2026-08-28T00"]),
        ("0 0 * * 1#1", ["2026-07-06T00", "2026-08-03T00", "2026-09-07T00"]),
        ("0 0 * * MON#2,TUE#1", ["2026-06-02T00", "2026-06-08T00", "2026-07-07T00"]),
        ("0 0 * * L5,1#1", ["2026-06-26T00", "2026-07-06T00", "2026-07-31T00"]),
        ("0 0 * * 1#4,L1", ["2026-06-22T00", "2026-06-29T00", "2026-07-27T00"]),
        ("0 0 1 JAN-MAR *", ["2027-01-01T00", "2027-02-01T00", "2027-03-01T00"]),
        ("0 0 1-31 * 1", ["2026-06-02T00", "2026-06-03T00", "2026-06-04T00"]),
        ("0 0 */10 * *", ["2026-06-11T00", "2026-06-21T00", "2026-07-01T00"]),
        ("5/15 1 * * *", ["2026-06-01T01:05", "2026-06-01T01:20", "2026-06-01T01:35"]),
        ("*/40 * * * *", ["2026-06-01T00:40", "2026-06-01T01:00", "2026-06-01T01:40"]),
        ("*/100 * * * *", ["2026-06-01T01:00", "2026-06-01T02:00", "2026-06-01T03:00"]),
        (" 0\t0 * *  * \n", ["2026-06-02T00", "2026-06-03T00", "2026-06-04T00"]),
        ("@WEEKLY", ["2026-06-07T00", "2026-06-14T00", "2026-06-21T00"]),
        ("@monthly", ["2026-07-01T00", "2026-08-01T00", "2026-09-01T00"]),
        ("@yearly", ["2027-01-01T00", "2028-01-01T00", "2029-01-01T00"]),
        ("@annually", ["2027-01-01T00", "2028-01-01T00", "2029-01-01T00"]),
        ("@midnight", ["2026-06-02T00", "2026-06-03T00", "2026-06-04T00"]),
        ("@hourly", ["2026-06-01T01", "2026-06-01T02", "2026-06-01T03"]),
        ("0 0 29 2 */2", ["2028-02-29T00", "2032-02-29T00", "2048-02-29T00"][:1]),
    ],
)
def test_an_accepted_expression_runs_when_crontab_would(expression: str, runs: list[str]) -> None:
    found = following(expression, "UTC", "2026-06-01T00:00Z", len(runs))
    assert [run.replace(":00Z", "Z").rstrip("Z") for run in found] == [
        run if ":" in run else f"{run}:00" for run in runs
    ]


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("0 0 * * 5L", "Write L5 for the last Friday"),
        ("0 0 * * L", "'l', which is no name"),
        ("0 0 * * 5#L", "'l', which is no name"),
        ("0 0 * * 1#6", "cannot be understood"),
        ("0 0 * * 1,L2", "beside single days"),
        ("0 0 L-3 * *", "cannot be understood"),
        ("0 0 15W * *", "nearest weekday"),
        ("0 0 LW * *", "no name|nearest weekday"),
        ("0 0 15 * 1#2", "cannot be combined"),
        ("0 0 15 * L5", "cannot be combined"),
        ("0 0 * * *,1#1", "beside single days"),
        ("0 0 * * 0-6,1#1", "beside single days"),
        ("0 0 * * 0,1#1,2,3,4,5,6", "beside single days"),
        ("0 0 * * 1,5#2", "beside single days"),
        ("0 0 * * mon-fri#1", "beside single days"),
        ("0 0 * * monday", "Write mon"),
        ("0 0 30 2 *", "no such day"),
        ("0 0 0 * *", "which is not from"),
        ("60 * * * *", "which is not from"),
        ("0 24 * * *", "which is not from"),
        ("*/0 * * * *", "cannot be understood"),
        ("0 0 * 13 *", "which is not from"),
        ("0 0 * * 8", "which is not from"),
        ("mon * * * *", "'mon', which is no name that belongs there"),
        ("1,,2 * * * *", "cannot be understood"),
        ("٣ * * * *", "plain ASCII"),
        ("1_0 * * * *", "does not belong there"),
        ("+5 * * * *", "does not belong there"),
        ("@daily 5", "none of @hourly"),
        ("H * * * *", "Give a name"),
        ("H/H * * * *", "Give a name"),
        ("R(1-5) * * * *", "random"),
        ("0-59," * 2000 + "1 * * * *", "more than 255"),
        (5, "both are texts"),
    ],
)
def test_a_refused_expression_is_refused_with_a_reason(expression: Any, why: str) -> None:
    with pytest.raises(JobError, match=why):
        cron.parse(expression, "UTC")


@pytest.mark.parametrize(
    "zone",
    [
        *("", "Mars", "europe/berlin", "../etc/passwd", "/etc/localtime", "localtime", "posixrules"),
        *("right/UTC", "Europe", "a\0b", "UTC\n", "é", "\udcff", "x" * 5000, None, 1),
    ],
)
def test_what_is_no_zone_is_refused(zone: Any) -> None:
    with pytest.raises(JobError, match="timezone="):
        cron.parse("* * * * *", zone)


def test_a_zone_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(JobError, match=r"Did you mean 'Europe/Berlin'\?"):
        cron.parse("* * * * *", "Europe/Berln")


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.text(max_size=60), st.text("0123456789*/,-#LHRW? \tmonjan@()", max_size=40)),
    st.text(max_size=20),
)
def test_any_text_is_accepted_or_refused_and_nothing_else(expression: str, zone: str) -> None:
    for where in ("UTC", zone):
        try:
            found = cron.parse(expression, where, name="x")
        except JobError:
            continue
        after = found.after(instant("2026-06-01T00:00Z"))
        assert after is not None
        assert after > instant("2026-06-01T00:00Z")


def test_validity_does_not_depend_on_the_date() -> None:
    """croniter 8 accepts `0 0 29 2 */2` in 2026 and raises in 2033."""
    rare = cron.parse("0 0 29 2 */2", "UTC")
    for year in range(1950, 2210):
        start = datetime(year, 6, 1, tzinfo=UTC)
        assert (found := rare.after(start)) is not None
        assert found > start
        assert rare.latest(start) is not None


def test_a_hash_is_the_same_for_a_name_and_differs_between_names() -> None:
    def times(name: str) -> tuple[int, ...]:
        return cron.parse("H H(1-4) * * *", "UTC", name=name).grid.times

    assert times("nightly.report") == times("nightly.report")
    assert len({times(f"schedule {number}") for number in range(50)}) > 20
    assert all(60 <= times(f"schedule {number}")[0] < 300 for number in range(50))
    assert len(cron.parse("H/15 * * * *", "UTC", name="x").grid.times) == 96
    assert cron.offset("x", 600) == cron.offset("x", 600)
    assert {cron.offset(f"schedule {number}", 10) for number in range(200)} == set(range(10))
    assert cron.offset("x", 0) == 0


def test_a_name_that_is_no_text_is_refused() -> None:
    for name in (5, b"x", ["x"], object()):
        with pytest.raises(JobError, match="name="):
            cron.parse("H * * * *", "UTC", name=name)  # type: ignore[arg-type]


# --- Clock changes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "zone", "start", "runs"),
    [
        # A gap at midnight.
        ("30 0 * * *", "Africa/Cairo", "2026-04-23T12:00Z", ["2026-04-23T22:00:00Z", "2026-04-24T21:30:00Z"]),
        # A day that never was.
        ("0 9 * * *", "Pacific/Apia", "2011-12-29T20:00Z", ["2011-12-30T10:00:00Z", "2011-12-30T19:00:00Z"]),
        # Wildcards: none in the gap, both copies in the overlap.
        ("*/30 2 * * *", BERLIN, "2026-03-28T02:00Z", ["2026-03-30T00:00:00Z"]),
        (
            "30 * * * *",
            "Europe/Berlin",
            "2026-10-25T00:00Z",
            ["2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"],
        ),
        # Half an hour.
        (
            "45 1 * * *",
            "Australia/Lord_Howe",
            "2026-04-04T00:00Z",
            ["2026-04-04T14:45:00Z", "2026-04-05T15:15:00Z"],
        ),
        # The gap's end is a slot itself: one run.
        (
            "0 2,3 * * *",
            "Europe/Berlin",
            "2026-03-28T12:00Z",
            ["2026-03-29T01:00:00Z", "2026-03-30T00:00:00Z"],
        ),
        # An overlap that goes back over midnight.
        (
            "30 23 * * *",
            "America/Nuuk",
            "2026-10-24T12:00Z",
            ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"],
        ),
    ],
)
def test_a_clock_change_loses_and_doubles_nothing(
    expression: str, zone: str, start: str, runs: list[str]
) -> None:
    assert following(expression, zone, start, len(runs)) == runs
    slots = [instant(run) for run in runs]
    check_walk(cron.parse(expression, zone), instant(start), slots[-1], slots)


def test_the_second_copy_of_a_fixed_time_never_runs_whenever_one_looks() -> None:
    """From within the second copy of the hour, and from so much later that the search begins there."""
    only, second = instant("2026-11-01T05:30Z"), instant("2026-11-01T06:30Z")
    daily = cron.parse("30 1 * * *", "America/New_York")
    yearly = cron.parse("30 1 1 11 *", "America/New_York")
    for minutes in range(0, 10 * 1440, 10):
        at = only + timedelta(minutes=minutes)
        assert daily.after(at) != second
        assert daily.latest(at) != second
        assert daily.count(at, max(at, second)) == 0
        assert yearly.latest(at) == only


@pytest.mark.parametrize("zone", ["UTC", "America/Adak", "Pacific/Kiritimati"])
@pytest.mark.parametrize("expression", ["0 0 1 1 *", "59 23 31 12 *", "30 12 29 2 *", "0 0 29 2 */7"])
def test_a_rare_slot_is_the_latest_until_the_next(expression: str, zone: str) -> None:
    """However far east or west, where a date begins and ends half a day before or after UTC's."""
    rare = cron.parse(expression, zone)
    slot = rare.after(instant("1999-12-01T00:00Z"))
    for _ in range(5):
        assert slot is not None
        then = rare.after(slot)
        assert then is not None
        moment = timedelta(microseconds=1)
        for at in (slot, slot + timedelta(days=1), slot + timedelta(days=200), then - moment):
            assert rare.latest(at) == slot
            assert rare.after(at) == then
        assert rare.after(slot - moment) == slot
        assert rare.count(slot - moment, then) == 2
        slot = then


def test_a_daily_run_is_one_a_local_date_for_years_in_every_zone() -> None:
    """C015: the dates, not every 24 hours."""
    for zone in sorted(available_timezones() - {"localtime"}):
        found = cron.parse("30 2 * * *", zone)
        start, end = instant("2024-01-01T00:00Z"), instant("2030-01-01T00:00Z")
        first = found.after(start - timedelta(days=1))
        assert first is not None
        days = (end.astimezone(found.zone).date() - start.astimezone(found.zone).date()).days
        assert abs(found.count(start, end) - days) <= 1, zone


def test_what_clocks_do_is_noted() -> None:
    forward = cron.parse("30 2 * * *", "America/New_York").runs(instant("2026-03-07T12:00Z"), 2)
    assert forward[0].local.isoformat() == "2026-03-08T03:00:00-04:00"
    assert forward[0].note == (
        "Clocks go forward on this day, 02:00 to 03:00. "
        "The time of this run does not exist: it runs when the gap ends."
    )
    assert forward[1].note == ""
    [back] = cron.parse("30 1 * * *", "America/New_York").runs(instant("2026-10-31T12:00Z"), 1)
    assert back.note == (
        "Clocks go back on this day, 02:00 to 01:00. This is the first 01:30 of two, the only run."
    )
    hourly = cron.parse("0 * * * *", "America/New_York").runs(instant("2026-11-01T04:30Z"), 3)
    assert [run.note.partition(". ")[2] for run in hourly] == [
        "This is the first 01:00 of two.",
        "This is the second 01:00 of two.",
        "",
    ]
    assert cron.parse("0 12 * * *", "UTC").runs(instant("2026-03-07T12:00Z"), 1)[0].note == ""


@pytest.mark.parametrize(
    ("expression", "zone", "start", "note"),
    [
        ("30 23 * * *", NUUK, "2025-03-29T12:00Z", "forward, 2025-03-29 23:00 to 2025-03-30 00:00. The time"),
        ("0 12 * * *", "Pacific/Apia", "2011-12-30T06:00Z", "forward, 2011-12-30 00:00 to 2011-12-31 00:00."),
        ("30 23 * * *", NUUK, "2025-10-25T12:00Z", "back, 2025-10-26 00:00 to 2025-10-25 23:00. This is the"),
    ],
)
def test_a_clock_change_across_midnight_is_noted_with_both_dates(
    expression: str, zone: str, start: str, note: str
) -> None:
    """The first two run on the day after the one that lacks their time."""
    runs = cron.parse(expression, zone).runs(instant(start), 2)
    assert runs[0].note.startswith(f"Clocks go {note}")
    assert runs[1].note == ""


# --- Against a scan of every minute --------------------------------------------------------------


def expected(field: str, least: int, most: int, names: str = "") -> set[int]:
    """Return the values of a plain field, read as crontab(5) says."""
    values: set[int] = set()
    for part in field.split(","):
        body, _, step = part.partition("/")
        if body == "*":
            low, high = least, most
        else:
            low_text, _, high_text = body.partition("-")
            low = int(low_text)
            high = int(high_text) if high_text else low
        values |= set(range(low, high + 1, int(step or 1)))
    return values


@dataclass(frozen=True)
class Walk:
    """Every real minute from two days before a clock change to two days after it: the instant, what clocks
    show, and which local minutes they have just skipped.
    """

    minutes: list[tuple[datetime, datetime, list[datetime]]]

    @classmethod
    def around(cls, zone: str, change: str) -> "Walk":
        at = instant(change) - timedelta(days=2)
        minutes = []
        before = None
        while at <= instant(change) + timedelta(days=2):
            local = at.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
            jump = int((local - before).total_seconds()) // 60 if before else 1
            skipped = [local - timedelta(minutes=minute) for minute in range(1, jump)]
            minutes.append((at, local, skipped))
            before = local
            at += timedelta(minutes=1)
        return cls(minutes)

    def scan(self, expression: str) -> list[datetime]:
        """Apply the rules of cron_vectors.json, each as it is written."""
        minute, hour, dom, month, dow = expression.split()
        minutes, hours, months = expected(minute, 0, 59), expected(hour, 0, 23), expected(month, 1, 12)
        doms, dows = expected(dom, 1, 31), {value % 7 for value in expected(dow, 0, 7)}
        wildcard = minute.startswith("*") or hour.startswith("*")
        either = not dom.startswith("*") and not dow.startswith("*")

        def matches(local: datetime) -> bool:
            if local.minute not in minutes or local.hour not in hours or local.month not in months:
                return False
            by_month, by_week = local.day in doms, local.isoweekday() % 7 in dows
            return by_month or by_week if either else by_month and by_week

        found: list[datetime] = []
        seen: set[datetime] = set()
        for at, local, skipped in self.minutes:
            if wildcard:
                if matches(local):
                    found.append(at)
                continue
            first_copy = local not in seen
            seen.add(local)
            if (first_copy and matches(local)) or any(map(matches, skipped)):
                found.append(at)
        return found


def field(least: int, most: int, chance: random.Random, star: float) -> str:
    if chance.random() < star:
        return chance.choice(["*", "*", f"*/{chance.randint(1, most)}"])
    low = chance.randint(least, most)
    high = chance.randint(low, most)
    return chance.choice([str(low), f"{low}-{high}", f"{low},{high}", f"{low}-{high}/{chance.randint(1, 7)}"])


CHANGES = [
    ("America/New_York", "2026-03-08T07:00Z"),
    ("America/New_York", "2026-11-01T06:00Z"),
    ("Europe/Berlin", "2026-03-29T01:00Z"),
    ("Europe/Berlin", "2026-10-25T01:00Z"),
    ("Australia/Lord_Howe", "2026-10-03T15:30Z"),
    ("Australia/Lord_Howe", "2026-04-04T15:00Z"),
    ("Africa/Cairo", "2026-04-23T22:00Z"),
    ("Africa/Cairo", "2026-10-29T21:00Z"),
    ("America/Nuuk", "2026-03-29T01:00Z"),
    ("America/Nuuk", "2026-10-25T01:00Z"),
    ("Asia/Beirut", "2026-03-28T22:00Z"),
    ("America/Havana", "2026-11-01T05:00Z"),
    ("Pacific/Apia", "2011-12-30T10:00Z"),
    ("Africa/Casablanca", "2026-02-15T02:00Z"),
    ("Asia/Kolkata", "2026-06-01T00:00Z"),
]


@pytest.mark.parametrize(("zone", "change"), CHANGES)
def test_random_expressions_run_as_a_scan_of_every_minute_finds(zone: str, change: str) -> None:
    chance = random.Random(f"{zone} {change}")
    walk = Walk.around(zone, change)
    for _ in range(200):
        star = chance.choice([0.2, 0.6, 0.9])
        expression = " ".join(
            [
                field(0, 59, chance, star),
                field(0, 23, chance, star),
                field(1, 31, chance, 0.7),
                field(1, 12, chance, 0.9),
                field(0, 7, chance, 0.7),
            ]
        )
        try:
            found = cron.parse(expression, zone)
        except JobError as error:
            assert "no such day" in str(error)  # noqa: PT017
            continue
        # From a moment at which the walk has seen the last overlap whole.
        start = instant(change) - timedelta(seconds=chance.randint(0, 86400))
        end = instant(change) + timedelta(seconds=chance.randint(0, 86400))
        check_walk(found, start, end, [slot for slot in walk.scan(expression) if start < slot <= end])


def check_walk(found: Cron, start: datetime, end: datetime, slots: list[datetime]) -> None:
    """Walk by `after`, back by `latest`, and count, and compare with the slots expected."""
    where = f"{found.expression} in {found.timezone} from {start}"
    walked, at = [], start
    while (slot := found.after(at)) is not None and slot <= end:
        assert slot > at, where
        walked.append(slot)
        at = slot
    assert walked == slots, where
    assert found.count(start, end) == len(slots), where
    back: list[datetime] = []
    until = found.latest(end)
    while until is not None and until > start:
        back.append(until)
        until = found.latest(until - timedelta(microseconds=1))
    assert back[::-1] == slots, where


# --- Against another library ---------------------------------------------------------------------


def changes_of(zone: ZoneInfo) -> list[datetime]:
    """Return the days of 2024 to 2030 on which the zone's offset changes; none is changed back at once."""
    days = [instant("2024-01-01T00:00Z") + timedelta(days=day) for day in range(7 * 365 + 2)]
    offsets = [day.astimezone(zone).utcoffset() for day in days]
    return [day for day, old, new in zip(days, offsets, offsets[1:], strict=False) if old != new]


def instants(simulated: CronSim, end: datetime) -> list[datetime]:
    """Return its instants up to `end`, in UTC, but for those that go back."""
    found: list[datetime] = []
    for slot in simulated:
        at = slot.astimezone(UTC)
        if at > end:
            return found
        if not found or at > found[-1]:
            found.append(at)
    return found


def test_cronsim_agrees_at_every_clock_change_of_every_zone() -> None:
    """Where it returns an instant that is not later, in a repeated hour, it is left out."""
    zones = {ZoneInfo(name) for name in available_timezones() if name != "localtime"}
    seen: set[Any] = set()
    compared = 0
    for zone in sorted(zones, key=lambda zone: zone.key):
        for change in changes_of(zone):
            start = change - timedelta(hours=30)
            offsets = tuple(
                (start + timedelta(hours=hours)).astimezone(zone).utcoffset() for hours in range(0, 72, 3)
            )
            if (start, offsets) in seen:  # a zone of the same clocks
                continue
            seen.add((start, offsets))
            for expression in ("30 2 * * *", "15,45 0 * * *", "30 1 * * *", "0 * * * *", "*/20 1-3 * * *"):
                mine = cron.parse(expression, zone.key)
                end = start + timedelta(hours=70)
                theirs = instants(CronSim(expression, start.astimezone(zone)), end)
                check_walk(mine, start, end, theirs)
                compared += 1
    assert compared > 1000


# --- Bounds --------------------------------------------------------------------------------------


def test_slots_are_counted_without_being_visited() -> None:
    minutes = cron.parse("* * * * *", "UTC")
    start = instant("2016-01-01T00:00Z")
    assert minutes.count(start, start + timedelta(days=3652)) == 3652 * 1440
    assert minutes.count(start, start) == 0
    assert minutes.count(start, start - timedelta(days=1)) == 0
    assert minutes.count(start - timedelta(seconds=1), start) == 1
    daily = cron.parse("30 2 * * *", "America/New_York")
    assert daily.count(instant("2016-01-01T05:00Z"), instant("2026-01-01T05:00Z")) == 3653


def steps(work: Callable[[], object]) -> int:
    """Return how many functions of the package are called: what work costs, on any machine."""
    called = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal called
        called += event == "call" and "django_forgejobs" in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return called


def test_ten_years_of_minutes_cost_no_more_to_count_than_ten_years_of_days() -> None:
    start, end = instant("2016-01-01T00:00Z"), instant("2026-01-01T00:00Z")
    minutes, days = cron.parse("* * * * *", BERLIN), cron.parse("* 0 * * *", BERLIN)
    assert steps(lambda: minutes.count(start, end)) <= 1.1 * steps(lambda: days.count(start, end))
    assert steps(lambda: minutes.count(start, end)) < 20_000  # of 5,260,320 slots


def test_a_thousand_rare_schedules_are_found_without_passing_the_days_between() -> None:
    """C081: a 29 February on one weekday, up to 40 years away."""
    for number in range(1000):
        start = datetime(2000 + number % 100, 3, 1, tzinfo=UTC)
        expression = f"{number % 60} {number % 24} 29 2 */{7 - number % 2}"
        rare = cron.parse(expression, BERLIN if number % 3 else "UTC")
        assert steps(partial(rare.after, start)) < 3000
        assert steps(partial(rare.latest, start)) < 3000


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Adak"])
def test_the_ends_of_the_calendar_raise_nothing(zone: str) -> None:
    found = cron.parse("* * * * *", zone)
    for edge in (datetime.min, datetime.max):
        for offset in (-14, 0, 14):
            at = edge.replace(tzinfo=timezone(timedelta(hours=offset)))
            found.after(at)
            found.latest(at)
            found.count(at, at)
    assert found.after(datetime.max.replace(tzinfo=UTC)) is None
    assert found.latest(datetime.min.replace(tzinfo=UTC)) is None


@pytest.mark.parametrize(
    ("expression", "seconds"),
    [
        ("* * * * *", 60),
        ("*/40 * * * *", 20 * 60),
        ("0 9,17 * * *", 8 * 3600),
        ("0 9 * * *", 86400),
        ("0 23,1 * * *", 2 * 3600),
        ("0 9 * * mon", 7 * 86400),
        ("0 0 1 * *", 28 * 86400),
        ("0 0 29 2 *", 1461 * 86400),
        ("59 23 1 1 *", 365 * 86400),
        ("0 9 29 2 5", 86400),  # a Saturday, in 2020
    ],
)
def test_the_smallest_gap_between_slots(expression: str, seconds: float) -> None:
    assert cron.parse(expression, "UTC").smallest_gap == seconds


@pytest.mark.parametrize(
    ("expression", "warning"),
    [
        ("*/40 * * * *", "*/40 is no interval: it means minute 0, 40, 40 minutes apart, then 20."),
        ("*/100 * * * *", "*/100 is no interval: it means minute 0, 60 minutes apart."),
        ("0 */5 * * *", "*/5 is no interval: it means hour 0, 5, 10, 15, 20, 5 hours apart, then 4."),
        ("0 0 */2 * *", "*/2 is no interval: it begins again on day 1 of each month."),
        ("0 0 1 */5 *", "*/5 is no interval: it means month 1, 6, 11, 5 months apart, then 2."),
        ("0 0 * * */3", "*/3 is no interval: it means day sun, wed, sat, 3 days apart, then 1."),
    ],
)
def test_a_step_that_is_no_interval_is_warned_of(expression: str, warning: str) -> None:
    assert cron.parse(expression, "UTC").warnings == [warning]


@pytest.mark.parametrize("expression", ["*/15 * * * *", "0 */6 * * *", "5 4 * * *", "H/15 * * * *"])
def test_a_step_that_divides_is_not_warned_of(expression: str) -> None:
    assert cron.parse(expression, "UTC", name="x").warnings == []


def test_a_leap_day_is_found_decades_away() -> None:
    assert following("0 0 29 2 *", "UTC", "2096-03-01T00:00Z", 1) == ["2104-02-29T00:00:00Z"]
    assert cron.parse("0 0 29 2 *", "UTC").latest(instant("2103-01-01T00:00Z")) == instant(
        "2096-02-29T00:00Z"
    )
