"""The part of schedules in the demo. How their slots are counted is in `summary`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from django_forgejobs.models import Job, Schedule, ScheduleSlot
from testproject.clocks.zones import read_table
from testproject.demo.narrator import Narrator
from testproject.demo.supervisor import Supervisor

TYPE = "clocks.upcoming"
DECLARED = TYPE  # @schedule names a schedule as its job, unless told otherwise
MINUTELY = "upcoming, every minute"
DOWN_FOR = timedelta(hours=3)
MINUTE = timedelta(minutes=1)
SCHEDULERS = ("scheduler-1", "scheduler-2")


@dataclass
class Recurring:
    """What the demo knows of its schedules beside their rows."""

    since: datetime | None = None  # the first slot that nobody was there for
    this_minute: datetime | None = None  # the slot of the areas
    by_hand: int | None = None
    killed: list[int] = field(default_factory=list)
    ended: bool = False


def story(narrator: Narrator, known: Recurring, supervisor: Supervisor) -> Iterator[None]:
    """Tell it. Each `yield` is a wait for what schedulers and workers do."""
    yield from _catch_up(narrator, known, supervisor)
    yield from _run_by_hand(narrator, known)
    yield from _kill(narrator, known, supervisor)
    known.ended = True


def _catch_up(narrator: Narrator, known: Recurring, supervisor: Supervisor) -> Iterator[None]:
    known.since = _this_minute() - DOWN_FOR
    minutely = _planned(
        MINUTELY, cron="* * * * *", next_run_at=known.since, last_slot=known.since - MINUTE, payload={}
    )
    for name in SCHEDULERS:
        supervisor.fill(name, "runscheduler")
    pids = " and ".join(str(supervisor.posts[name].child.pid) for name in SCHEDULERS)
    narrator.say(
        f'The schedule "{MINUTELY}" looks as if every scheduler had been down for three hours. Now two start:'
        f" manage.py runscheduler, pids {pids}."
    )
    fired = ScheduleSlot.objects.filter(schedule=minutely, fate="fired")
    while not fired.exists():
        yield
    missed = ScheduleSlot.objects.get(schedule=minutely, fate="missed")
    narrator.say(
        f'"{MINUTELY}" has caught up: {missed.count} slots are missed, and one row of the ledger says so; the'
        f" latest, {_clock(fired[0].slot)}, became job {fired[0].job_id}. (on_missed is latest, the default)"
    )


def _run_by_hand(narrator: Narrator, known: Recurring) -> Iterator[None]:
    declared = Schedule.objects.filter(name=DECLARED, next_run_at__isnull=False)
    while (schedule := declared.first()) is None:
        yield
    job = Schedule.objects.run_now(schedule, by="the demo")
    assert job is not None
    known.by_hand = job.pk
    narrator.say(
        f'The code declares a schedule, "{schedule}", daily at 06:00 UTC: the schedulers have made a row of'
        f" it, next at {schedule.next_run_at:%Y-%m-%d %H:%M}. We do not wait for that, and run it now: job"
        f" {job.pk}."
    )


def _kill(narrator: Narrator, known: Recurring, supervisor: Supervisor) -> Iterator[None]:
    slot = known.this_minute = _this_minute()
    daily = {"cron": f"{slot.minute} {slot.hour} * * *", "next_run_at": slot}
    with transaction.atomic():
        for area in areas():
            _planned(f"upcoming in {area}", payload={"area": area}, **daily)
    fired = ScheduleSlot.objects.filter(slot=slot, fate="fired", schedule__payload__has_key="area")
    while not fired.exists():
        yield
    name = SCHEDULERS[0]
    pid = supervisor.kill(name)
    known.killed.append(pid)
    narrator.say(
        f"{len(areas())} daily schedules have been due since {_clock(slot)}, one for each area of the world:"
        f" kill -9 {pid}, a scheduler, when {fired.count()} of them had fired. Started again, pid"
        f" {supervisor.posts[name].child.pid}."
    )
    while fired.count() < len(areas()):
        yield
    narrator.say("All of them have fired.")


def scheduled(until: int) -> dict[int, str]:
    """Return the jobs up to id `until` that the ledger of slots names, with the fate of their slot."""
    slots = ScheduleSlot.objects.filter(job_id__lte=until)
    return {job: fate for job, fate in slots.values_list("job_id", "fate") if job is not None}


def areas() -> list[str]:
    """Return Africa, America and so on."""
    return sorted({zone.partition("/")[0] for zone in read_table()})


def _planned(name: str, **fields: Any) -> Schedule:
    """Insert a schedule that a scheduler has planned in the past, and as a person would in the admin."""
    return Schedule.objects.create(
        name=name,
        job_type=TYPE,
        timezone="UTC",
        planned_cron=fields["cron"],
        planned_timezone="UTC",
        **fields,
    )


def _this_minute() -> datetime:
    """Return the beginning of the minute on the database's clock, as schedulers read it."""
    now: datetime = Job.objects.values_list(Now(), flat=True)[:1].get()
    return now.replace(second=0, microsecond=0)


def _clock(slot: datetime) -> str:
    return f"{slot:%H:%M} UTC"
