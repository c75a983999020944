"""Schedulers killed, whenever and however many: every slot fires exactly once, and nobody is told of it."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from django.db import connection

import tests.jobsapp.jobs  # noqa: F401 (registers the types)
from django_forgejobs import cron, scheduler
from django_forgejobs.models import Job, Schedule, ScheduleSlot
from django_forgejobs.scheduler import Tick
from django_forgejobs.timetable import slot_key
from tests.factories import in_seconds, make_schedule
from tests.jobsapp.management.commands.tick_simulated import CLOCK, set_clock
from tests.processes.harness import Manage, Process
from tests.sessions import gate, statements
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

START = datetime(2026, 6, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
APP = {"FORGEJOBS_TEST_APPS": "tests.jobsapp"}
YEARLY = "0 0 1 1 *"
Simulate = Callable[..., Process]


@pytest.fixture
def simulate(manage: Manage) -> Simulate:
    """Return a function that starts schedulers on the clock of the test."""

    def simulate(*arguments: object) -> Process:
        return manage("tick_simulated", *arguments, env=APP)

    return simulate


# --- At any moment -------------------------------------------------------------------------------

#: Minutes between the slots of twenty schedules.
EVERY = (1, 2, 3, 3, 4, 4, 5, 5, 5, 6, 6, 10, 10, 12, 15, 15, 20, 20, 30, 60)
HOURS = 6


def test_five_schedulers_killed_at_any_moment_fire_every_slot_of_twenty_schedules_once(
    simulate: Simulate, tmp_path: Path
) -> None:
    """C035."""
    set_clock(START)
    # "all": how far the clock goes between two ticks is chance, and no slot may be left out.
    every = {
        make_schedule(
            cron="0 * * * *" if minutes == 60 else f"*/{minutes} * * * *",
            on_missed="all",
            spread=30 * (number % 2),
            next_run_at=START + minutes * MINUTE,
        ): minutes
        for number, minutes in enumerate(EVERY)
    }
    seed, end = random.randrange(1_000_000), START + timedelta(hours=HOURS)
    chance, until = random.Random(seed), tmp_path / "until"
    schedulers = simulate("--seed", seed, "--until", until)
    now = START
    while now < end:
        now = min(end, now + timedelta(seconds=chance.uniform(1, 300)))
        set_clock(now)
        # Far less than the hundred missed slots that "all" fires at most.
        wait_for(partial(is_settled, now - 15 * MINUTE), message=lambda: schedulers.output)
    wait_for(partial(is_settled, end), message=lambda: schedulers.output)
    until.touch()
    assert schedulers.wait() == 0, schedulers.output
    assert "ERROR" not in schedulers.output
    assert "Traceback" not in schedulers.output
    kills = int(schedulers.output.split()[-2])
    assert kills > 20, "too few died for this to say anything"

    jobs = {job.pk: (job.idempotency_key, job.run_at) for job in Job.objects.all()}
    for schedule, minutes in every.items():
        schedule.refresh_from_db()
        slots = [START + number * minutes * MINUTE for number in range(1, HOURS * 60 // minutes + 1)]
        rows = ScheduleSlot.objects.filter(schedule=schedule).order_by("slot")
        assert [(row.slot, row.count, row.fate) for row in rows] == [(slot, 1, "fired") for slot in slots], (
            seed
        )
        assert (schedule.last_slot, schedule.next_run_at) == (end, end + minutes * MINUTE), (seed, schedule)
        shift = timedelta(seconds=cron.offset(schedule.name, schedule.spread))
        assert [jobs[row.job_id] for row in rows if row.job_id] == [
            (slot_key(schedule.pk, slot), slot + shift) for slot in slots
        ], (seed, schedule)
    assert len(jobs) == sum(HOURS * 60 // minutes for minutes in EVERY), seed


def is_settled(until: datetime) -> bool:
    return not Schedule.objects.filter(next_run_at__lte=until).exists()


# --- At chosen moments ---------------------------------------------------------------------------


def overdue() -> Schedule:
    """Make a schedule with all that a tick writes: one slot is missed, and one fires."""
    return make_schedule(next_run_at=START)


def rows_of(*schedules: Schedule) -> list[tuple[object, ...]]:
    """Return all that was written for schedules."""
    pks = [schedule.pk for schedule in schedules]
    return [
        *Schedule.objects.filter(pk__in=pks).order_by("pk").values_list(),
        *ScheduleSlot.objects.filter(schedule__in=pks).values_list(),
        *Job.objects.values_list(),
    ]


def test_a_scheduler_killed_after_any_statement_has_done_nothing_and_the_next_one_does_all(
    simulate: Simulate,
) -> None:
    set_clock(START + MINUTE)
    rehearsal = overdue()
    sent = statements(lambda: scheduler.settle(rehearsal.pk, "default", clock=CLOCK))
    rehearsal.delete()
    Job.objects.all().delete()

    schedules = [overdue() for _ in sent]
    before = rows_of(*schedules)
    schedulers = simulate("--die-in", *(schedule.pk for schedule in schedules))
    assert schedulers.wait() == 0, schedulers.output
    assert rows_of(*schedules) == before
    assert scheduler.tick("default", clock=CLOCK) == Tick(fired=len(sent), missed=len(sent))
    assert Counter(ScheduleSlot.objects.values_list("slot", "fate")) == {
        (START, "missed"): len(sent),
        (START + MINUTE, "fired"): len(sent),
    }
    assert set(Job.objects.values_list("pk")) == set(
        ScheduleSlot.objects.filter(fate="fired").values_list("job_id")
    )
    assert set(Schedule.objects.values_list("next_run_at")) == {(START + 2 * MINUTE,)}


@pytest.mark.postgres_only
@pytest.mark.parametrize(
    ("write", "when"),
    [
        ("INSERT ON forgejobs_job", "true"),
        ("INSERT ON forgejobs_scheduleslot", "true"),
        ("UPDATE ON forgejobs_schedule", "NEW.last_slot IS NOT NULL"),
    ],
)
def test_a_scheduler_killed_in_the_middle_of_a_write_holds_up_its_own_schedule_alone(
    write: str, when: str, manage: Manage
) -> None:
    """C035: the server goes on with the statement, and learns of the death when that is over."""
    stuck = make_schedule(cron=YEARLY, next_run_at=in_seconds(-60))
    with gate("victim", on=write, per="ROW", when=when) as closed:
        victim = manage("runscheduler", env=APP | {"PGAPPNAME": "victim"})
        closed.wait()
        victim.kill()
        victim.wait()
        other = make_schedule(cron=YEARLY, next_run_at=in_seconds(-30))
        with impatient():
            assert scheduler.tick("default") == Tick(fired=1)
        assert ScheduleSlot.objects.get().schedule == other
        assert Job.objects.count() == 1
        closed.open()
        wait_for(lambda: scheduler.tick("default") == Tick(fired=1), message="it was held up for ever")
    assert Counter(ScheduleSlot.objects.values_list("schedule", "fate")) == {
        (stuck.pk, "fired"): 1,
        (other.pk, "fired"): 1,
    }
    assert Job.objects.count() == 2


@contextmanager
def impatient() -> Iterator[None]:
    """Let this thread's statements wait for nobody: whom they would wait for waits for this thread."""
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '1s'")
        try:
            yield
        finally:
            cursor.execute("RESET lock_timeout")
