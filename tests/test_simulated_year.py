"""A year of ticks in zones whose clocks change in different ways: a run for every local date, and no more.

What is expected is told by the calendar alone: by a look at the clock of each zone, every quarter of an hour.
"""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from django.db.models import DateTimeField, Value

import tests.jobsapp.jobs  # noqa: F401 (registers the types)
from django_forgejobs import scheduler
from django_forgejobs.models import Job, Schedule, ScheduleSlot
from django_forgejobs.scheduler import Tick
from tests.factories import make_schedule

pytestmark = pytest.mark.django_db

FROM, TO = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
DAY, QUARTER = timedelta(days=1), timedelta(minutes=15)


def tick(at: datetime) -> Tick:
    """Tick as if the database's clock showed `at`."""
    return scheduler.tick("default", clock=Value(at, output_field=DateTimeField()))


def clock_of(zone: str) -> Iterator[tuple[datetime, datetime]]:
    """Yield every quarter of an hour of the year, and what clocks of the zone show then."""
    at = FROM
    while at < TO:
        yield at, at.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
        at += QUARTER


def daily(zone: str, hour: int, minute: int) -> list[datetime]:
    """Return the slots of a daily time: the first instant at which clocks show it, or have passed it."""
    found = []
    shown = next(clock_of(zone))[1]
    wanted = shown.replace(hour=hour, minute=minute)
    if wanted < shown:
        wanted += DAY
    for at, shown in clock_of(zone):
        if shown >= wanted:
            found.append(at)
            wanted += DAY
    return found


def whenever(zone: str, *hours: int) -> list[datetime]:
    """Return the slots of a wildcard schedule: all instants at which clocks show the hours."""
    return [at for at, shown in clock_of(zone) if shown.hour in hours and shown.minute == 0]


def test_in_a_year_of_ticks_there_is_a_run_for_every_local_date() -> None:
    """C011, C033: in gaps of an hour, of half an hour, at midnight and before it, and when clocks go back."""
    expected = {
        ("UTC", "0 0 * * *"): daily("UTC", 0, 0),
        ("America/New_York", "30 2 * * *"): daily("America/New_York", 2, 30),  # in the gap
        ("Europe/Berlin", "30 2 * * *"): daily("Europe/Berlin", 2, 30),  # in both
        ("Australia/Lord_Howe", "15 2 * * *"): daily("Australia/Lord_Howe", 2, 15),  # in the gap
        ("Australia/Lord_Howe", "45 1 * * *"): daily("Australia/Lord_Howe", 1, 45),  # in the overlap
        ("Africa/Cairo", "0 0 * * *"): daily("Africa/Cairo", 0, 0),  # in the gap
        ("America/Nuuk", "30 23 * * *"): daily("America/Nuuk", 23, 30),  # in both
    }
    assert {len(slots) for slots in expected.values()} == {365}
    expected["America/Nuuk", "0 */23 * * *"] = whenever("America/Nuuk", 0, 23)  # one less, one more
    for zone, cron in expected:
        # A tick is never so late that a daily slot is missed.
        on_missed = "all" if "*/" in cron else "latest"
        make_schedule(name=f"{cron} {zone}", cron=cron, timezone=zone, on_missed=on_missed)
    now = FROM - timedelta(seconds=1)
    while now < TO:
        tick(now)
        now += timedelta(hours=6)
    assert set(ScheduleSlot.objects.values_list("fate", "count")) == {("fired", 1)}
    for (zone, cron), slots in expected.items():
        fired = ScheduleSlot.objects.filter(schedule__name=f"{cron} {zone}").order_by("slot")
        assert list(fired.values_list("slot", flat=True)) == slots, (zone, cron)
    assert Job.objects.count() == sum(map(len, expected.values()))


@pytest.mark.parametrize("on_missed", ["latest", "all", "skip"])
def test_what_fired_and_what_did_not_is_every_slot_of_a_year_with_outages(on_missed: str) -> None:
    """C003, C125: of random length, up to weeks; the ledger has no gap and nothing twice."""
    expected = {
        ("Europe/Berlin", "0 */6 * * *"): whenever("Europe/Berlin", 0, 6, 12, 18),
        ("Africa/Cairo", "0 */12 * * *"): whenever("Africa/Cairo", 0, 12),
        ("America/Nuuk", "0 */23 * * *"): whenever("America/Nuuk", 0, 23),
        ("America/New_York", "30 2 * * *"): daily("America/New_York", 2, 30),
        ("Australia/Lord_Howe", "15 2 * * *"): daily("Australia/Lord_Howe", 2, 15),
    }
    for zone, cron in expected:
        make_schedule(name=f"{cron} {zone}", cron=cron, timezone=zone, on_missed=on_missed)
    seed = random.randrange(1_000_000)
    chance = random.Random(seed)
    now = FROM - timedelta(seconds=1)
    ticks = [now]
    while now < TO:
        tick(now)
        # Up to forty days, in which "all" has more than it may fire; most are short.
        now += timedelta(minutes=1) + timedelta(days=40 * chance.random() ** 6)
        ticks.append(now)
    ticks[-1] = TO - timedelta(seconds=1)
    tick(ticks[-1])
    at_most = {"latest": 1, "all": 100, "skip": 0}[on_missed]
    for (zone, cron), slots in expected.items():
        fates: list[str] = []
        for since, until in pairwise(ticks):
            due = [slot for slot in slots if since < slot <= until]
            fire = len(due) if len(due) == 1 else min(len(due), at_most)
            fates += ["missed"] * (len(due) - fire) + ["fired"] * fire
        schedule = Schedule.objects.get(name=f"{cron} {zone}")
        recorded: list[tuple[datetime, str]] = []
        for row in ScheduleSlot.objects.filter(schedule=schedule).order_by("slot"):
            covered = [slot for slot in slots if row.slot <= slot <= (row.until or row.slot)]
            assert (covered[0], covered[-1]) == (row.slot, row.until or row.slot), (seed, zone, cron)
            assert len(covered) == row.count, (seed, zone, cron, row)
            recorded += [(slot, row.fate) for slot in covered]
        assert recorded == list(zip(slots, fates, strict=True)), (seed, zone, cron)
        assert schedule.last_slot == slots[-1], (seed, zone, cron)
    assert Job.objects.count() == ScheduleSlot.objects.filter(fate="fired").count() > 0, seed


# --- A clock that steps --------------------------------------------------------------------------


@pytest.mark.parametrize("on_missed", ["latest", "all", "skip"])
def test_however_a_clock_steps_no_slot_fires_twice_and_the_ledger_has_each_once(on_missed: str) -> None:
    """C055: ahead for a moment and back, at random, for some days."""
    zone, cron = "Europe/Berlin", "0 * * * *"
    slots = [at for at, shown in clock_of(zone) if shown.minute == 0]
    schedule = make_schedule(cron=cron, timezone=zone, on_missed=on_missed)
    seed = random.randrange(1_000_000)
    chance = random.Random(seed)
    now = start = FROM + 30 * DAY - timedelta(seconds=1)
    tick(now)
    while now < start + 5 * DAY:
        now += timedelta(minutes=chance.choice([10, 20, 40, 300]))
        tick(now)
        if chance.random() < 0.1:
            ahead = now + timedelta(hours=chance.uniform(0, 12))
            before = Job.objects.count()
            tick(ahead)
            assert Job.objects.count() - before <= (100 if on_missed == "all" else 1), seed
            tick(now)
    covered: list[datetime] = []
    for row in schedule.slots.filter(slot__lte=now).order_by("slot"):
        stretch = [slot for slot in slots if row.slot <= slot <= (row.until or row.slot)]
        assert len(stretch) == row.count, (seed, row)
        covered += stretch
    assert sorted(covered) == [slot for slot in slots if start < slot <= now], seed
    assert Job.objects.count() == schedule.slots.filter(fate="fired").count() > 0, seed
