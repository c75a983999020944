"""Schedules that code declares, how they become rows, and what becomes of them when the code forgets them."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import connection

import django_forgejobs.jobs  # noqa: F401 (registers ours)
import tests.jobsapp.jobs  # noqa: F401 (registers the types)
from django_forgejobs import JobError, archive, job, process_one, registry, schedule, scheduler, schedules
from django_forgejobs.jobs import BUILT_IN
from django_forgejobs.models import Job, Liveness, Schedule, ScheduleSlot
from django_forgejobs.schedules import Declared
from tests.factories import in_seconds, make_job, make_schedule
from tests.sessions import session

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def nothing_declared_stays() -> Iterator[None]:
    before = [(one, dict(one)) for one in (schedules._decorated, registry._definitions)]
    yield
    for one, was in before:
        one.clear()
        one.update(was)  # type: ignore[arg-type]


def declare(**options: Any) -> dict[str, Declared]:
    """Return one schedule as code declares it."""
    values = {"name": "one", "job_type": "t.ok", "cron": "0 3 * * *", **options}
    return {values["name"]: Declared(**values)}


# --- Declaring -----------------------------------------------------------------------------------


def test_a_decorated_job_has_a_schedule_under_the_name_of_its_type() -> None:
    @schedule("*/5 * * * *", spread=timedelta(seconds=30), payload={"a": 1})
    @job("t.decorated")
    def handler(payload: Any) -> None: ...

    declared = schedules.declared()["t.decorated"]
    assert (declared.job_type, declared.cron) == ("t.decorated", "*/5 * * * *")
    columns = declared.columns()
    assert (columns["spread"], columns["timezone"], columns["payload"]) == (30, "UTC", {"a": 1})
    assert handler({}) is None  # type: ignore[func-returns-value]


def test_a_job_may_have_several_schedules_by_name() -> None:
    @schedule("0 3 * * *", name="at night")
    @schedule("0 15 * * *", name="by day", timezone="Europe/Paris")
    @job("t.decorated")
    def handler(payload: Any) -> None: ...

    assert schedules.declared()["by day"].timezone == "Europe/Paris"
    assert "at night" in schedules.declared()
    with pytest.raises(JobError, match='There are two schedules "at night"'):
        schedule("1 3 * * *", name="at night")(handler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cron": "61 * * * *"}, "cron='61"),
        ({"timezone": "Mars"}, "timezone='Mars'"),
        ({"spread": 86400}, "spread=86400"),
        ({"spread": -1}, "must not be negative"),
        ({"on_missed": "never"}, "on_missed='never' is not one of latest, all, skip"),
        ({"on_overlap": True}, "on_overlap=True is not one of allow, skip"),
        ({"payload": {1: 2}}, "JSON keys are strings"),
        ({"queue": "a,b"}, "queue='a,b'"),
        ({"priority": 101}, "priority=101"),
        ({"max_attempts": 0}, "max_attempts=0"),
        ({"starts_at": datetime(2026, 1, 1)}, "no datetime with a time zone"),
        ({"ends_at": "2026"}, "ends_at='2026' is no datetime"),
        ({"starts_at": NOON, "ends_at": NOON - timedelta(days=1)}, "is before starts_at"),
        ({"ends_at": datetime(9000, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5)))}, "outside the years"),
        ({"enabled": "no"}, "enabled='no' is no bool"),
        ({"nmae": "x"}, "has no 'nmae'"),
        ({"name": ""}, "name is empty"),
    ],
)
def test_a_schedule_that_no_scheduler_could_run_is_refused_where_it_is_declared(
    options: dict[str, Any], message: str
) -> None:
    @job("t.decorated")
    def handler(payload: Any) -> None: ...

    with pytest.raises(JobError, match=message):
        schedule(options.pop("cron", "0 3 * * *"), **options)(handler)


def test_schedule_stands_above_job() -> None:
    with pytest.raises(JobError, match=r'@schedule\("0 3 \* \* \*"\) stands above @job'):

        @schedule("0 3 * * *")  # type: ignore[arg-type]
        def handler(payload: Any) -> None: ...


def test_schedule_without_an_expression_is_refused() -> None:
    """Or the job would be lost, and no schedule made, without a word."""
    with pytest.raises(JobError, match=r"@schedule takes an expression, not <job 't\.decorated'"):

        @schedule  # type: ignore[arg-type]
        @job("t.decorated")
        def handler(payload: Any) -> None: ...


def test_settings_declare_schedules_too(settings: Any) -> None:
    settings.FORGEJOBS = {"SCHEDULES": {"nightly": {"cron": "@daily", "job_type": "t.ok", "queue": "low"}}}
    assert schedules.declared()["nightly"].queue == "low"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"x": {"cron": "@daily", "job_type": "t.okk"}}, "is not registered. Did you mean 't.ok'?"),
        ({"x": {"cron": "@never", "job_type": "t.ok"}}, "cron='@never'"),
        ({"x": {"job_type": "t.ok"}}, 'Schedule "x" needs a cron.'),
        ({"x": {"cron": "@daily", "job_type": "t.ok", "time_zone": "UTC"}}, "Did you mean 'timezone'?"),
        ({"forgejobs.archive": {"cron": "@daily", "job_type": "t.ok"}}, "There are two schedules"),
        ({"x": "@daily"}, "expected a dict of dicts by name"),
        (["x"], "expected a dict of dicts by name"),
    ],
)
@pytest.mark.django_db  # Django 6.1 asks the database in run_checks()
def test_the_checks_report_a_bad_schedule_in_the_settings(settings: Any, declared: Any, message: str) -> None:
    settings.FORGEJOBS = {"SCHEDULES": declared}
    found = [error for error in run_checks() if error.id in ("forgejobs.E001", "forgejobs.E008")]
    assert message in " ".join(error.msg for error in found)


# --- Rows ----------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_what_code_declares_becomes_rows_and_is_planned_by_the_next_tick() -> None:
    assert scheduler.begin("default", declare(queue="low")).added == ["one"]
    row = Schedule.objects.get()
    assert (row.name, row.source, row.queue, row.enabled, row.timezone) == ("one", "code", "low", True, "UTC")
    assert scheduler.tick("default").fired == 0
    row.refresh_from_db()
    assert row.next_run_at is not None
    assert row.next_run_at.hour == 3
    again = scheduler.begin("default", declare(queue="low"))
    assert (again.added, again.changed) == ([], [])
    assert Schedule.objects.get().next_run_at == row.next_run_at


@pytest.mark.django_db
def test_code_that_changed_changes_its_row_and_leaves_a_pause_alone() -> None:
    scheduler.begin("default", declare())
    scheduler.tick("default")
    Schedule.objects.pause(Schedule.objects.get(), by="ada")
    assert scheduler.begin("default", declare(cron="0 4 * * *", payload={"x": 1})).changed == ["one"]
    row = Schedule.objects.get()
    assert (row.cron, row.payload, row.enabled, row.disabled_reason) == (
        "0 4 * * *",
        {"x": 1},
        False,
        "Paused by ada.",
    )


@pytest.mark.django_db
def test_a_payload_that_changes_from_1_to_true_is_a_change() -> None:
    scheduler.begin("default", declare(payload={"a": 1}))
    assert scheduler.begin("default", declare(payload={"a": True})).changed == ["one"]
    assert Schedule.objects.get().payload == {"a": True}


@pytest.mark.postgres_only
@pytest.mark.django_db(transaction=True)
def test_a_row_that_somebody_holds_stops_no_scheduler() -> None:
    scheduler.begin("default", declare())
    with session() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT 1 FROM forgejobs_schedule FOR UPDATE")
        with connection.cursor() as impatient:
            impatient.execute("SET lock_timeout = 2000")
        try:
            synced = scheduler.begin("default", declare(cron="5 5 * * *"))
            scheduler.announce("default", declare())
        finally:
            with connection.cursor() as impatient:
                impatient.execute("SET lock_timeout = 0")
    assert (synced.held, synced.changed) == (["one"], [])
    assert scheduler.begin("default", declare(cron="5 5 * * *")).changed == ["one"]


@pytest.mark.django_db
def test_a_schedule_made_in_the_admin_is_not_taken_over_by_code(caplog: pytest.LogCaptureFixture) -> None:
    make_schedule(name="one", cron="5 5 * * *")
    assert scheduler.begin("default", declare()).refused == ["one"]
    assert Schedule.objects.get().cron == "5 5 * * *"
    assert "made in the admin: that one counts" in caplog.text


@pytest.mark.django_db
def test_a_schedule_that_begins_paused_does_so_once() -> None:
    scheduler.begin("default", declare(enabled=False))
    assert Schedule.objects.get().enabled is False
    Schedule.objects.resume(Schedule.objects.get())
    scheduler.begin("default", declare(enabled=False))
    assert Schedule.objects.get().enabled is True


# --- Gone from the code --------------------------------------------------------------------------


def age(seconds: float) -> None:
    """Let schedulers have been alive, and the schedule undeclared, for so long."""
    Liveness.objects.update(since=in_seconds(-seconds))
    Schedule.objects.update(declared_at=in_seconds(-seconds))


@pytest.mark.django_db
def test_a_schedule_gone_from_the_code_is_marked_after_the_grace_and_fires_no_more(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.FORGEJOBS = {"UNKNOWN_TYPE_GRACE": 600}
    scheduler.begin("default", declare())
    scheduler.announce("default", declare())
    age(590)
    scheduler.announce("default", {})
    assert Schedule.objects.get().gone_at is None
    age(610)
    scheduler.announce("default", {})
    row = Schedule.objects.get()
    assert row.gone_at is not None
    assert row.enabled is True  # gone is not paused
    assert 'Schedule "one" is gone from the code' in caplog.text
    Schedule.objects.update(next_run_at=in_seconds(-1))
    assert scheduler.tick("default").fired == 0


@pytest.mark.django_db
def test_after_a_time_without_any_scheduler_silence_says_nothing_about_a_schedule(settings: Any) -> None:
    settings.FORGEJOBS = {"UNKNOWN_TYPE_GRACE": 600}
    scheduler.begin("default", declare())
    scheduler.announce("default", declare())
    Liveness.objects.update(since=in_seconds(-9000), seen_at=in_seconds(-900))
    Schedule.objects.update(declared_at=in_seconds(-900))
    scheduler.announce("default", {})  # old code comes up first
    assert Schedule.objects.get().gone_at is None


@pytest.mark.django_db
def test_a_schedule_that_comes_back_fires_from_the_next_future_slot_and_stays_paused() -> None:
    scheduler.begin("default", declare())
    scheduler.tick("default")
    Schedule.objects.update(
        gone_at=in_seconds(-100), next_run_at=in_seconds(-50), enabled=False, disabled_reason="Paused."
    )
    scheduler.begin("default", declare())
    row = Schedule.objects.get()
    assert (row.gone_at, row.enabled, row.disabled_reason) == (None, False, "Paused.")
    Schedule.objects.resume(row)
    assert scheduler.tick("default").fired == 0


@pytest.mark.django_db
def test_schedules_of_the_admin_are_never_gone(settings: Any) -> None:
    settings.FORGEJOBS = {"UNKNOWN_TYPE_GRACE": 1}
    make_schedule()
    scheduler.announce("default", {})
    age(1000)
    scheduler.announce("default", {})
    assert Schedule.objects.get().gone_at is None


# --- Our own -------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_archive_and_reclaim_have_schedules_ready_to_be_enabled() -> None:
    declared = {name: one for name, one in schedules.declared().items() if name in BUILT_IN}
    scheduler.begin("default", declared)
    assert set(Schedule.objects.values_list("name", "enabled")) == {(name, False) for name in BUILT_IN}


@pytest.mark.django_db
def test_the_jobs_of_our_own_schedules_archive_and_reclaim() -> None:
    make_job(status="done", finished_at=in_seconds(-30 * 86400))
    killed = make_job(status="running", lease=-1)
    for type_ in sorted(BUILT_IN):
        Job.objects.enqueue(type_, queue="ours")
    assert process_one(queue="ours")
    assert process_one(queue="ours")
    results = dict(Job.objects.filter(queue="ours").values_list("type", "result"))
    assert results["forgejobs.archive"] == {"archived": 1}
    assert results["forgejobs.reclaim"]["put_back"] == 1
    assert Job.objects.get(pk=killed.pk).status == "ready"


@pytest.mark.django_db
def test_the_archive_prunes_the_slots_of_long_ago() -> None:
    one = make_schedule()
    for number in range(3):
        Schedule.objects.record(one, NOON + timedelta(minutes=number), "missed")  # type: ignore[arg-type]
    kept = ScheduleSlot.objects.latest("slot")
    ScheduleSlot.objects.exclude(pk=kept.pk).update(at=in_seconds(-31 * 86400))
    archive.prune("default")
    assert list(ScheduleSlot.objects.all()) == [kept]
