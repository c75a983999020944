"""The tick: each slot once, whatever was missed, whoever else ticks, whatever a row says."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.db.models import DateTimeField, Value
from django.db.models.functions import Now

import tests.jobsapp.jobs  # noqa: F401 (registers the types)
from django_forgejobs import cron, managers, registry, scheduler, signals
from django_forgejobs.exceptions import JobError
from django_forgejobs.models import Job, Liveness, Schedule, ScheduleSlot
from django_forgejobs.scheduler import Tick
from django_forgejobs.slots import Fate
from tests.factories import in_seconds, make_job, make_schedule
from tests.sessions import before, in_threads, session

pytestmark = pytest.mark.django_db(transaction=True)

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def minute(number: float) -> datetime:
    return NOON + timedelta(minutes=number)


def tick(at: datetime = NOON) -> Tick:
    """Tick as if the database's clock showed `at`."""
    return scheduler.tick("default", clock=Value(at, output_field=DateTimeField()))


def fired() -> list[datetime]:
    return sorted(slot.slot for slot in ScheduleSlot.objects.filter(fate=Fate.FIRED))


def ledger() -> list[tuple[Any, ...]]:
    rows = ScheduleSlot.objects.order_by("slot")
    return [(row.slot, row.until, row.count, row.fate) for row in rows]


def row(schedule: Schedule) -> Schedule:
    schedule.refresh_from_db()
    return schedule


# --- A slot --------------------------------------------------------------------------------------


def test_a_due_slot_becomes_a_job_with_its_key_and_leaves_a_record() -> None:
    schedule = make_schedule(next_run_at=NOON, payload={"a": [1]}, queue="mail", priority=7, max_attempts=4)
    assert tick(NOON + timedelta(seconds=2)) == Tick(fired=1)
    job = Job.objects.get()
    assert (job.type, job.payload, job.queue, job.priority, job.max_attempts) == (
        "t.ok",
        {"a": [1]},
        "mail",
        7,
        4,
    )
    assert job.idempotency_key == f"schedule:{schedule.pk}:2026-06-01T12:00:00Z"
    assert job.run_at == NOON
    slot = ScheduleSlot.objects.get()
    assert (slot.schedule_id, slot.slot, slot.fate, slot.job_id) == (schedule.pk, NOON, "fired", job.pk)
    assert slot.late == pytest.approx(2)
    row(schedule)
    assert (schedule.next_run_at, schedule.last_slot, schedule.last_job_id) == (minute(1), NOON, job.pk)


def test_without_values_of_its_own_a_schedules_job_has_those_of_its_type() -> None:
    make_schedule(job_type="t.flaky", next_run_at=NOON)
    tick()
    job = Job.objects.get()
    assert (job.queue, job.priority, job.max_attempts) == ("default", 0, 10)


def test_a_second_tick_finds_nothing_to_do() -> None:
    make_schedule(next_run_at=NOON)
    assert (tick().fired, tick().fired, tick(minute(0.9)).fired) == (1, 0, 0)
    assert tick(minute(1)).fired == 1
    assert fired() == [NOON, minute(1)]


def test_without_a_clock_of_its_own_a_tick_goes_by_the_databases() -> None:
    schedule = make_schedule()
    assert scheduler.tick("default") == Tick()
    Schedule.objects.update(next_run_at=in_seconds(-1))
    assert scheduler.tick("default").fired == 1
    now = Schedule.objects.annotate(now=Now()).get().now
    row(schedule)
    assert schedule.next_run_at is not None
    assert timedelta() < schedule.next_run_at - now <= timedelta(minutes=1)


def test_a_new_schedule_is_planned_and_fires_nothing_at_once() -> None:
    """C047."""
    schedule = make_schedule(cron="0 15 * * *", starts_at=NOON - timedelta(days=30))
    assert tick(minute(122)) == Tick()
    assert row(schedule).next_run_at == minute(180)
    ended = make_schedule(ends_at=NOON - timedelta(days=1))
    assert (tick(), tick(minute(60))) == (Tick(), Tick())
    assert row(ended).next_run_at is None
    assert not Job.objects.exists()


def test_fifty_schedules_of_one_instant_fire_fifty_times() -> None:
    """C017."""
    for _ in range(50):
        make_schedule(cron="0 23 * * *", next_run_at=NOON)
    assert tick() == Tick(fired=50)
    assert len(set(ScheduleSlot.objects.values_list("schedule", "job_id"))) == 50


def test_a_job_that_exists_for_the_slot_is_not_enqueued_twice() -> None:
    """Its slot was rewound by SQL, and the ledger emptied: the key is left."""
    schedule = make_schedule(next_run_at=NOON)
    tick()
    ScheduleSlot.objects.all().delete()
    Schedule.objects.update(next_run_at=NOON, last_slot=None)
    tick(minute(0.5))
    assert Job.objects.count() == 1
    assert row(schedule).next_run_at == minute(1)


def test_a_slot_fires_once_also_when_its_job_was_archived() -> None:
    schedule = make_schedule(next_run_at=NOON)
    tick()
    Job.objects.all().delete()
    Schedule.objects.update(next_run_at=NOON)
    assert tick(minute(0.5)) == Tick()  # not later than last_slot
    Schedule.objects.update(next_run_at=NOON, last_slot=None)
    assert tick(minute(0.5)) == Tick()  # and the ledger has it
    assert not Job.objects.exists()
    assert row(schedule).next_run_at == minute(1)


def test_a_slot_fires_once_also_when_neither_its_job_nor_its_record_is_left() -> None:
    """Both are pruned in time; a slot that is rewound later than that is known by `last_slot` alone."""
    schedule = make_schedule(next_run_at=NOON)
    tick()
    Job.objects.all().delete()
    ScheduleSlot.objects.all().delete()
    Schedule.objects.update(next_run_at=NOON)
    assert tick(minute(0.5)) == Tick()
    assert not Job.objects.exists()
    assert row(schedule).next_run_at == minute(1)


def test_the_offset_of_a_schedule_moves_its_jobs_and_not_its_slots() -> None:
    schedule = make_schedule(name="spread", cron="0 * * * *", spread=600, next_run_at=NOON)
    shift = cron.offset("spread", 600)
    assert shift > 60
    tick(NOON + timedelta(seconds=1))
    assert Job.objects.get().run_at == NOON + timedelta(seconds=shift)
    assert row(schedule).next_run_at == minute(60)
    assert ScheduleSlot.objects.get().late == 0
    tick(minute(60) + timedelta(seconds=shift + 5))
    assert ScheduleSlot.objects.get(slot=minute(60)).late == pytest.approx(5)


# --- Missed slots --------------------------------------------------------------------------------


def test_of_three_missed_days_of_minutes_the_latest_runs_once_and_the_rest_is_one_record() -> None:
    """C003."""
    schedule = make_schedule(next_run_at=NOON)
    assert tick(minute(3 * 1440 + 0.5)) == Tick(fired=1, missed=3 * 1440)
    assert ledger() == [
        (NOON, minute(3 * 1440 - 1), 3 * 1440, "missed"),
        (minute(3 * 1440), None, 1, "fired"),
    ]
    assert row(schedule).next_run_at == minute(3 * 1440 + 1)


def test_with_skip_and_latest_nothing_more_fires_in_the_ticks_that_follow() -> None:
    """C125."""
    skips = make_schedule(next_run_at=NOON, on_missed="skip")
    latest = make_schedule(next_run_at=NOON)
    for _ in range(5):
        tick(minute(300))
    assert [slot.slot for slot in skips.slots.all()] == [NOON]
    assert skips.slots.get().count == 301
    assert [slot.slot for slot in latest.slots.filter(fate="fired")] == [minute(300)]
    assert (row(skips).next_run_at, row(latest).next_run_at) == (minute(301), minute(301))


def test_with_all_a_hundred_missed_slots_fire_each_with_its_own_job() -> None:
    schedule = make_schedule(next_run_at=NOON, on_missed="all")
    assert tick(minute(199)) == Tick(fired=100, missed=100)
    assert fired() == [minute(number) for number in range(100, 200)]
    assert Job.objects.count() == 100
    assert row(schedule).last_job_id == Job.objects.latest("pk").pk
    assert Job.objects.latest("pk").run_at == minute(199)


def test_ten_years_of_missed_minutes_are_settled_in_one_tick() -> None:
    schedule = make_schedule(next_run_at=NOON - timedelta(days=3652))
    assert tick() == Tick(fired=1, missed=3652 * 1440)
    assert ScheduleSlot.objects.count() == 2
    assert row(schedule).next_run_at == minute(1)


# --- Overlap -------------------------------------------------------------------------------------


def overlapping(previous: Job, **fields: Any) -> Schedule:
    """Insert a schedule that has fired `previous` a minute ago."""
    schedule = make_schedule(next_run_at=NOON, **{"on_overlap": "skip", **fields})
    Schedule.objects.record(schedule, minute(-1), Fate.FIRED, job=previous)
    return schedule


@pytest.mark.parametrize("status", ["ready", "running"])
def test_a_slot_is_skipped_while_the_previous_run_has_not_ended(status: str) -> None:
    """C045."""
    previous = make_job(status=status)
    schedule = overlapping(previous)
    assert tick() == Tick(skipped=1)
    slot = ScheduleSlot.objects.latest("slot")
    assert slot.fate == "overlap"
    assert slot.reason == f"{previous} has not ended"
    assert (row(schedule).next_run_at, schedule.last_job_id) == (minute(1), None)


@pytest.mark.parametrize("status", ["done", "dead", "failed", "cancelled", "archived"])
def test_a_previous_run_that_has_ended_or_is_gone_stands_in_nobodys_way(status: str) -> None:
    previous = make_job(status="done" if status == "archived" else status)
    overlapping(previous)
    if status == "archived":
        previous.delete()
    assert tick() == Tick(fired=1)


def test_a_crash_of_the_previous_run_blocks_the_next_no_longer_than_its_lease() -> None:
    """C071: the job is reclaimed and dies; the slot after that fires."""
    previous = make_job(status="running", lease=-1, lease_expirations=2)
    overlapping(previous)
    assert tick() == Tick(skipped=1)
    Job.objects.reclaim()
    assert tick(minute(1)) == Tick(fired=1)


def test_a_run_by_hand_hides_no_run_that_has_not_ended() -> None:
    schedule = overlapping(make_job(status="running"))
    job = Schedule.objects.run_now(schedule)
    assert job is not None
    Job.objects.cancel(job)
    assert tick() == Tick(skipped=1)


def test_an_old_row_that_is_written_back_lets_no_run_overlap_and_no_slot_go_unrecorded() -> None:
    """C009, by code: a copy of before, with another value in one column."""
    old = make_schedule(next_run_at=NOON, on_overlap="skip")
    tick()
    old.priority = 5
    old.save()
    assert tick(minute(1)).fired == 0  # NOON has fired, and its job is still ready
    skips = make_schedule(next_run_at=NOON, on_missed="skip")
    tick(minute(3))
    skips.save()
    tick(minute(6))
    assert sum(slot.count for slot in skips.slots.all()) == 7


def test_overlapping_runs_are_allowed_unless_said_otherwise() -> None:
    overlapping(make_job(status="running"), on_overlap="allow")
    assert tick() == Tick(fired=1)


def test_a_schedule_that_may_not_overlap_fires_one_of_its_missed_slots() -> None:
    make_schedule(next_run_at=NOON, on_missed="all", on_overlap="skip")
    assert tick(minute(10)) == Tick(fired=1, missed=10)
    assert fired() == [minute(10)]


# --- Changes -------------------------------------------------------------------------------------


def change_by_orm(schedule: Schedule, **values: Any) -> None:
    Schedule.objects.filter(pk=schedule.pk).update(**values)


def change_by_save(schedule: Schedule, **values: Any) -> None:
    mine = Schedule.objects.get(pk=schedule.pk)
    for name, value in values.items():
        setattr(mine, name, value)
    mine.save()


def change_by_sql(schedule: Schedule, **values: Any) -> None:
    sets = ", ".join(f"{name} = %s" for name in values)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE forgejobs_schedule SET {sets} WHERE id = %s", [*values.values(), schedule.pk])


CHANGES = pytest.mark.parametrize("change", [change_by_orm, change_by_save, change_by_sql])
Change = Callable[..., None]


@CHANGES
def test_a_resumed_schedule_fires_from_the_next_future_slot(change: Change) -> None:
    """C037: paused before its slot, resumed after it, with or without a tick in between."""
    for ticked_between in (True, False):
        schedule = make_schedule(cron="0 9 * * *", next_run_at=NOON - timedelta(hours=3))
        change(schedule, enabled=False)
        if ticked_between:
            assert tick(minute(-10)) == Tick()
        change(schedule, enabled=True)
        assert tick() == Tick()
        assert row(schedule).next_run_at == NOON + timedelta(hours=21)
        schedule.delete()


@CHANGES
@pytest.mark.parametrize(
    ("values", "following"),
    [
        ({"cron": "30 * * * *"}, minute(30)),
        ({"timezone": "Asia/Kolkata"}, minute(30)),
        ({"starts_at": minute(200)}, minute(240)),
        ({"ends_at": minute(5)}, None),
    ],
)
def test_a_change_of_what_was_planned_for_fires_nothing_and_plans_anew(
    change: Change, values: dict[str, Any], following: datetime | None
) -> None:
    schedule = make_schedule(cron="0 * * * *", next_run_at=NOON)
    change(schedule, **values)
    assert tick(minute(1)) == Tick()
    assert row(schedule).next_run_at == following
    assert tick(minute(2)) == Tick()


@CHANGES
def test_other_changes_leave_the_next_slot_alone(change: Change) -> None:
    schedule = make_schedule(next_run_at=NOON, payload={"a": 1})
    change(schedule, queue="mail", spread=30, on_missed="all", name="renamed")
    assert row(schedule).next_run_at == NOON
    assert tick() == Tick(fired=1)
    assert Job.objects.get().queue == "mail"


def test_a_paused_schedule_fires_nothing_and_has_no_next_slot() -> None:
    schedule = make_schedule(next_run_at=NOON)
    assert Schedule.objects.pause(schedule, by="ada") is True
    assert Schedule.objects.pause(schedule) is False
    assert tick(minute(60)) == Tick()
    row(schedule)
    assert (schedule.next_run_at, schedule.disabled_reason) == (None, "Paused by ada.")
    assert Schedule.objects.resume(schedule) is True
    assert Schedule.objects.resume(schedule) is False
    tick(minute(60.5))
    row(schedule)
    assert (schedule.next_run_at, schedule.disabled_reason) == (minute(61), "")


def test_a_stale_copy_that_is_saved_makes_no_slot_fire_twice() -> None:
    """C009, by code: it writes back the slot of before."""
    schedule = make_schedule(next_run_at=NOON)
    tick()
    tick(minute(1))
    schedule.save()
    assert row(schedule).next_run_at == NOON
    assert tick(minute(1.5)) == Tick()
    assert Job.objects.count() == 2
    assert row(schedule).next_run_at == minute(2)


# --- By hand -------------------------------------------------------------------------------------


def test_a_skipped_slot_does_not_fire_and_the_one_after_it_does() -> None:
    schedule = make_schedule(next_run_at=NOON)
    assert Schedule.objects.skip_next(schedule, by="ada") == NOON
    assert tick() == Tick()
    assert tick(minute(1)) == Tick(fired=1)
    assert ledger() == [(NOON, None, 1, "skipped"), (minute(1), None, 1, "fired")]
    assert ScheduleSlot.objects.get(fate="skipped").reason == "by ada"


def test_a_skipped_slot_stays_skipped_when_the_schedule_is_planned_anew() -> None:
    schedule = make_schedule(cron="0 * * * *", next_run_at=NOON)
    Schedule.objects.skip_next(schedule)
    Schedule.objects.update(cron="0,30 * * * *")
    tick(minute(-10))
    assert row(schedule).next_run_at == NOON
    assert tick() == Tick()
    assert row(schedule).next_run_at == minute(30)


def test_a_slot_that_was_skipped_and_planned_anew_is_skipped_once_and_missed_never() -> None:
    schedule = make_schedule(cron="0 * * * *", next_run_at=NOON)
    tick()
    assert Schedule.objects.skip_next(schedule) == minute(60)
    Schedule.objects.pause(schedule)
    Schedule.objects.resume(schedule)
    tick(minute(1))
    assert row(schedule).next_run_at == minute(60)
    assert Schedule.objects.skip_next(schedule) == minute(120)
    Schedule.objects.update(next_run_at=minute(60))
    assert tick(minute(310)) == Tick(fired=1, missed=2)
    assert ledger() == [
        (NOON, None, 1, "fired"),
        (minute(60), None, 1, "skipped"),
        (minute(120), None, 1, "skipped"),
        (minute(180), minute(240), 2, "missed"),
        (minute(300), None, 1, "fired"),
    ]


def test_of_a_schedule_that_is_to_be_planned_the_slot_that_will_be_next_is_skipped() -> None:
    schedule = make_schedule(cron="0 0 1 1 *")
    slot = Schedule.objects.skip_next(schedule)
    assert slot is not None
    assert (slot.month, slot.day) == (1, 1)
    assert tick(slot - timedelta(days=1)) == Tick()
    assert tick(slot) == Tick()
    assert row(schedule).next_run_at == slot.replace(year=slot.year + 1)


@pytest.mark.postgres_only
@pytest.mark.parametrize("move", ["pause", "resume", "skip_next", "run_now"])
def test_a_move_by_hand_says_so_when_somebody_holds_the_row(
    move: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managers, "LOCKED_PATIENCE", 0.1)
    held = make_schedule(next_run_at=NOON, enabled=move != "resume")
    with session() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT 1 FROM forgejobs_schedule WHERE id = %s FOR UPDATE", [held.pk])
        with pytest.raises(JobError, match="an open transaction holds its row"):
            getattr(Schedule.objects, move)(held)


def test_nothing_is_skipped_where_nothing_is_planned() -> None:
    assert Schedule.objects.skip_next(make_schedule(next_run_at=NOON, enabled=False)) is None
    assert Schedule.objects.skip_next(123456) is None
    with pytest.raises(JobError, match="neither a stored row nor the id of one"):
        Schedule.objects.skip_next("1")  # type: ignore[arg-type]


def test_a_run_by_hand_is_recorded_and_leaves_the_slots_alone() -> None:
    schedule = make_schedule(next_run_at=NOON, enabled=False, spread=30, payload={"x": 1})
    job = Schedule.objects.run_now(schedule, by="ada")
    assert job is not None
    assert (job.type, job.payload, job.status) == ("t.ok", {"x": 1}, "ready")
    assert Job.objects.ready().get() == job
    slot = ScheduleSlot.objects.get()
    assert (slot.fate, slot.job_id, slot.reason) == ("by_hand", job.pk, "by ada")
    assert (row(schedule).next_run_at, schedule.last_job_id) == (NOON, job.pk)
    assert Schedule.objects.run_now(123456) is None


# --- Rows that cannot be understood --------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "cron": ({"cron": "61 * * * *"}, "cron='61 * * * *'"),
    "impossible": ({"cron": "0 0 31 2 *"}, "no such day"),
    "zone": ({"timezone": "Mars/Olympus"}, "timezone='Mars/Olympus'"),
    "payload": ({"payload": {"x": "y" * 2_000_000}}, "PAYLOAD_MAX_BYTES"),
    "spread": ({"spread": 60}, "spread=60"),
    "queue": ({"queue": "a,b"}, "queue='a,b'"),
    "type": ({"job_type": " "}, "job_type=' '"),
}


@pytest.mark.parametrize("which", BAD)
def test_a_row_that_cannot_be_understood_is_disabled_with_a_reason_and_stops_no_other(
    which: str, caplog: pytest.LogCaptureFixture
) -> None:
    values, reason = BAD[which]
    planned = make_schedule(**values, next_run_at=NOON)
    new = make_schedule(**values)
    good = [make_schedule(next_run_at=NOON), make_schedule(next_run_at=NOON)]
    assert tick() == Tick(fired=2, disabled=2)
    for schedule in (planned, new):
        assert row(schedule).enabled is False
        assert reason in schedule.disabled_reason
        assert schedule.name in schedule.disabled_reason
    assert {slot.schedule for slot in ScheduleSlot.objects.all()} == set(good)
    assert [record.levelname for record in caplog.records if "disabled" in record.message] == ["ERROR"] * 2
    assert tick() == Tick()


def test_a_mended_schedule_is_planned_once_it_is_resumed() -> None:
    schedule = make_schedule(cron="61 * * * *")
    tick()
    with pytest.raises(JobError, match="61"):
        Schedule.objects.resume(schedule)  # the next tick would only disable it again
    Schedule.objects.update(cron="30 * * * *")
    assert tick() == Tick()
    assert Schedule.objects.resume(schedule) is True
    tick()
    row(schedule)
    assert (schedule.next_run_at, schedule.disabled_reason) == (minute(30), "")


def test_an_error_that_nobody_foresaw_disables_its_schedule_and_stops_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(registry.Definition):
        def __post_init__(self) -> None:
            pass

        def __getattribute__(self, name: str) -> Any:
            if name == "__post_init__":
                return super().__getattribute__(name)
            raise RuntimeError("a bug")

    monkeypatch.setitem(registry._definitions, "t.broken", Broken("t.broken", print))
    broken = make_schedule(next_run_at=NOON, job_type="t.broken")
    good = make_schedule(next_run_at=NOON)
    assert tick() == Tick(fired=1, disabled=1)
    assert "RuntimeError: a bug" in row(broken).disabled_reason
    assert row(good).enabled is True


# --- Types that this process does not know -------------------------------------------------------


def test_a_slot_of_an_unknown_type_is_left_to_a_scheduler_that_knows_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling deploy: old code ticks first, new code fires; nothing is lost, nothing is disabled."""
    schedule = make_schedule(job_type="t.new", next_run_at=NOON)
    assert (tick(), tick(minute(0.5))) == (Tick(), Tick())
    assert (row(schedule).next_run_at, schedule.enabled) == (NOON, True)
    told = [record for record in caplog.records if 'job type "t.new"' in record.message]
    assert [record.levelname for record in told] == ["WARNING"]  # once, not with every tick
    monkeypatch.setitem(registry._definitions, "t.new", registry.define("t.new", print))
    assert tick(minute(0.9)) == Tick(fired=1)


def test_slots_of_a_type_that_no_scheduler_knows_are_recorded_as_skipped_after_the_grace(
    settings: Any,
) -> None:
    settings.FORGEJOBS = {"UNKNOWN_TYPE_GRACE": 600}
    schedule = make_schedule(job_type="t.nowhere", next_run_at=NOON)
    assert tick(minute(10)) == Tick()  # a scheduler that has just come up knows nothing of the others
    Liveness.objects.create(name=scheduler.ALIVE, since=in_seconds(-700), seen_at=in_seconds(0))
    assert tick(minute(9.9)) == Tick()
    assert tick(minute(10)) == Tick(skipped=11)
    slot = ScheduleSlot.objects.get()
    assert (slot.slot, slot.until, slot.count, slot.fate) == (NOON, minute(10), 11, "unknown")
    assert slot.reason == 'no scheduler knew the job type "t.nowhere" for 600 s'
    assert (row(schedule).enabled, schedule.next_run_at) == (True, minute(11))
    assert not Job.objects.exists()


# --- The clock -----------------------------------------------------------------------------------


def test_a_clock_that_stepped_back_is_noticed_and_no_slot_is_lost_or_fired_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C055: eight hours ahead for a moment."""
    schedule = make_schedule(cron="0 * * * *", next_run_at=NOON)
    tick()
    ahead = NOON + timedelta(hours=8)
    assert tick(ahead) == Tick(fired=1, missed=7)
    assert not [record for record in caplog.records if "stepped back" in record.message]
    assert tick(minute(5)) == Tick()
    assert [record.levelname for record in caplog.records if "stepped back" in record.message] == ["WARNING"]
    row(schedule)
    assert (schedule.next_run_at, schedule.last_slot) == (minute(60), NOON)
    for number in range(6, 601):
        tick(minute(number))
    assert fired() == [NOON + timedelta(hours=hour) for hour in range(11)]
    assert Job.objects.count() == 11
    assert {fate for *_, fate in ledger()} == {"fired"}


def test_what_was_planned_by_a_clock_ahead_of_its_time_is_planned_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has never fired, so that no slot tells; it would be silent for ten years."""
    schedule = make_schedule()
    tick(NOON + timedelta(days=3652))
    tick()
    assert row(schedule).next_run_at == minute(1)
    assert "stepped back" in caplog.text


def test_a_clock_that_stepped_back_by_less_than_a_minute_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedule = make_schedule(next_run_at=NOON)
    tick()
    assert tick(minute(-0.9)) == Tick()
    assert row(schedule).next_run_at == minute(1)
    assert "stepped back" not in caplog.text


def test_what_was_recorded_of_slots_to_come_is_cut_when_the_clock_steps_back() -> None:
    schedule = make_schedule(cron="0 * * * *", next_run_at=NOON, on_missed="skip")
    tick(NOON + timedelta(hours=8))
    assert ledger() == [(NOON, NOON + timedelta(hours=8), 9, "missed")]
    tick(NOON + timedelta(hours=2, minutes=1))
    assert ledger() == [(NOON, NOON + timedelta(hours=2), 3, "missed")]
    assert row(schedule).next_run_at == NOON + timedelta(hours=3)


# --- Many schedulers -----------------------------------------------------------------------------


def test_schedulers_that_tick_at_once_fire_each_slot_once() -> None:
    """C035, in threads."""
    for _ in range(20):
        make_schedule(next_run_at=NOON)
    assert sum(done.fired for done in in_threads(5, lambda _: tick())) == 20
    assert Job.objects.count() == ScheduleSlot.objects.count() == 20


@pytest.mark.postgres_only
def test_a_schedule_that_another_scheduler_holds_is_passed_over_without_waiting() -> None:
    held = make_schedule(next_run_at=NOON)
    free = make_schedule(next_run_at=NOON)
    with session() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT 1 FROM forgejobs_schedule WHERE id = %s FOR UPDATE", [held.pk])
        assert tick() == Tick(fired=1)
        assert row(held).next_run_at == NOON
        assert row(free).next_run_at == minute(1)
    assert tick() == Tick(fired=1)


# --- Who listens ---------------------------------------------------------------------------------


def test_signals_tell_what_fired_and_what_did_not() -> None:
    told: list[tuple[str, dict[str, Any]]] = []

    def hear_fired(**facts: Any) -> None:
        told.append(("fired", facts))

    def hear_skipped(**facts: Any) -> None:
        told.append(("skipped", facts))

    schedule = make_schedule(next_run_at=NOON)
    signals.slot_fired.connect(hear_fired)
    signals.slots_skipped.connect(hear_skipped)
    try:
        tick(minute(2))
    finally:
        signals.slot_fired.disconnect(hear_fired)
        signals.slots_skipped.disconnect(hear_skipped)
    assert [what for what, _ in told] == ["skipped", "fired"]
    assert all(facts["schedule"] == schedule for _, facts in told)
    assert told[0][1]["stretch"].count == 2
    assert told[1][1]["job"] == Job.objects.get()


def test_a_missed_slot_is_a_warning_and_a_fired_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_forgejobs")
    make_schedule(name="minutes", next_run_at=NOON)
    tick(minute(2))
    lines = [(record.levelname, record.message) for record in caplog.records]
    job = Job.objects.get()
    assert lines == [
        (
            "WARNING",
            "schedule minutes slot 2026-06-01 12:00Z to 2026-06-01 12:01Z, 2 slots missed: "
            "on_missed is latest",
        ),
        ("INFO", f"schedule minutes slot 2026-06-01 12:02Z fired: job {job.pk}"),
    ]


def test_a_slot_whose_record_fails_leaves_no_job_behind() -> None:
    """Job, record and next slot are one transaction: here the last statement of it fails."""
    schedule = make_schedule(next_run_at=NOON)

    def cut() -> None:
        raise OperationalError("server closed the connection unexpectedly")

    with before('UPDATE "forgejobs_schedule" SET "next_run_at"', cut), pytest.raises(OperationalError):
        tick()
    assert (Job.objects.count(), ScheduleSlot.objects.count()) == (0, 0)
    assert row(schedule).next_run_at == NOON
    assert tick() == Tick(fired=1)
