"""The table guards itself: plain SQL makes right rows, and no impossible ones, on either database."""

import uuid
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DataError, IntegrityError, connection, transaction

from django_forgejobs import enqueue, process_one, scheduler
from django_forgejobs.models import Job, Schedule
from django_forgejobs.slots import Fate
from django_forgejobs.states import Status
from tests.factories import make_job, make_schedule

pytestmark = pytest.mark.django_db

TOKEN = uuid.UUID(int=1)


@pytest.mark.parametrize("status", Status)
def test_a_row_can_be_in_every_status(status: Status) -> None:
    assert make_job(status=status).status == status


def test_a_row_of_type_and_payload_alone_is_a_right_one() -> None:
    """What any other program may insert."""
    with connection.cursor() as cursor:
        cursor.execute("""INSERT INTO forgejobs_job (type, payload) VALUES ('t', '{"n": 1.5}')""")
    by_sql = Job.objects.get()
    by_api = Job.objects.get(pk=enqueue("t", {"n": 1.5}))
    moments = {"run_at", "created_at"}
    for name in {one.attname for one in Job._meta.concrete_fields} - moments - {"id"}:
        assert getattr(by_sql, name) == getattr(by_api, name), name
    for name in moments:
        passed = getattr(by_api, name) - getattr(by_sql, name)
        assert 0 <= passed.total_seconds() < 5, name
    seen: list[Any] = []
    assert process_one({"t": seen.append})
    assert process_one({"t": seen.append})
    assert seen == [{"n": 1.5}, {"n": 1.5}]


def test_a_row_without_a_payload_is_given_an_empty_one() -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO forgejobs_job (type) VALUES ('t')")
    assert Job.objects.get().payload == {}


IMPOSSIBLE = [
    ("ready", "status = 'lost'"),
    ("ready", "status = ''"),
    ("ready", "status = NULL"),
    ("ready", "status = 'running'"),
    ("ready", "status = 'done'"),
    ("ready", "claim_token = '{token}'"),
    ("ready", "locked_until = CURRENT_TIMESTAMP"),
    ("ready", "finished_at = CURRENT_TIMESTAMP"),
    ("ready", "attempts = max_attempts"),
    ("ready", "max_attempts = 0"),
    ("ready", "attempts = -1"),
    ("ready", "claims = -1"),
    ("ready", "claims = 2147483647"),
    ("ready", "claims = 2000000000"),
    ("ready", "run_at = '{ancient}'"),
    ("ready", "created_at = '{ancient}'"),
    ("done", "finished_at = '{ancient}'"),
    ("ready", "history = '{{}}'"),
    ("ready", "history = '\"x\"'"),
    ("ready", "lease_expirations = -1"),
    ("ready", "priority = 101"),
    ("ready", "priority = -101"),
    ("ready", "type = ''"),
    ("ready", "type = NULL"),
    ("ready", "queue = ''"),
    ("ready", "idempotency_key = ''"),
    ("ready", "payload = NULL"),
    ("ready", "run_at = NULL"),
    ("running", "claim_token = NULL"),
    ("running", "locked_until = NULL"),
    ("running", "status = 'ready'"),
    ("running", "status = 'done', finished_at = CURRENT_TIMESTAMP"),
    ("running", "finished_at = CURRENT_TIMESTAMP"),
    ("running", "attempts = max_attempts + 1"),
    ("done", "finished_at = NULL"),
    ("failed", "finished_at = NULL"),
    ("dead", "claim_token = '{token}'"),
    ("dead", "status = 'ready'"),
    ("cancelled", "locked_until = CURRENT_TIMESTAMP"),
    ("cancelled", "attempts = max_attempts + 1"),
]


@pytest.mark.parametrize(("status", "change"), IMPOSSIBLE)
def test_an_impossible_row_is_refused_also_from_plain_sql(status: str, change: str) -> None:
    job = make_job(status=status)
    change = change.format(token=TOKEN.hex, ancient="0001-01-01 00:00:00")
    with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"UPDATE forgejobs_job SET {change} WHERE id = %s", [job.pk])


@pytest.mark.parametrize(
    ("column", "longest"),
    [("queue", 64), ("type", 200), ("locked_by", 200), ("idempotency_key", 255)],
)
def test_a_text_may_be_as_long_as_promised_and_no_longer(column: str, longest: int) -> None:
    job = make_job()
    update = f"UPDATE forgejobs_job SET {column} = %s WHERE id = %s"
    with connection.cursor() as cursor:
        cursor.execute(update, ["é" * longest, job.pk])
        with pytest.raises((IntegrityError, DataError)), transaction.atomic():
            cursor.execute(update, ["é" * (longest + 1), job.pk])


def test_a_key_is_had_by_one_row_whatever_its_status() -> None:
    make_job(idempotency_key="k", status="done")
    with pytest.raises(IntegrityError), transaction.atomic():
        make_job(idempotency_key="k")
    make_job(idempotency_key="K")
    make_job(idempotency_key=None)
    make_job(idempotency_key=None)


def test_models_and_migrations_agree() -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


@pytest.mark.postgres_only
def test_a_heartbeat_stays_in_its_page() -> None:
    """It would not with `locked_until` in an index, nor in a page filled to the brim."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT reloptions FROM pg_class WHERE relname = 'forgejobs_job'")
        assert cursor.fetchone() == (
            [
                "fillfactor=80",
                "autovacuum_vacuum_scale_factor=0",
                "autovacuum_vacuum_threshold=20000",
            ],
        )
        cursor.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'forgejobs_job'")
        assert not [definition for (definition,) in cursor if "locked_until" in definition]


# --- Schedules -----------------------------------------------------------------------------------


def test_a_schedule_of_name_type_and_cron_alone_is_a_right_one() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO forgejobs_schedule (name, job_type, cron) VALUES ('by sql', 't', '0 9 * * *')"
        )
    by_sql = Schedule.objects.get()
    by_orm = make_schedule(job_type="t", cron="0 9 * * *")
    assert scheduler.tick("default").disabled == 0
    for row in (by_sql, by_orm):
        row.refresh_from_db()
        assert row.next_run_at is not None
    moments = {"id", "name", "created_at", "planned_at"}
    for name in {one.attname for one in Schedule._meta.concrete_fields} - moments:
        assert getattr(by_sql, name) == getattr(by_orm, name), name


@pytest.mark.parametrize(
    "change",
    [
        "name = ''",
        "name = NULL",
        "job_type = ''",
        "cron = ''",
        "timezone = ''",
        "on_missed = 'never'",
        "on_overlap = ''",
        "source = 'git'",
        "spread = -1",
        "priority = 101",
        "max_attempts = 0",
        "next_run_at = '{ancient}'",
        "starts_at = '{ancient}'",
        "enabled = NULL",
    ],
)
def test_an_impossible_schedule_is_refused_also_from_plain_sql(change: str) -> None:
    schedule = make_schedule()
    change = change.format(ancient="0001-01-01 00:00:00")
    with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"UPDATE forgejobs_schedule SET {change} WHERE id = %s", [schedule.pk])


@pytest.mark.parametrize(
    ("column", "longest"),
    [("name", 200), ("job_type", 200), ("queue", 64), ("cron", 255), ("timezone", 64)],
)
def test_a_text_of_a_schedule_may_be_as_long_as_promised_and_no_longer(column: str, longest: int) -> None:
    schedule = make_schedule()
    update = f"UPDATE forgejobs_schedule SET {column} = %s WHERE id = %s"
    with connection.cursor() as cursor:
        cursor.execute(update, ["é" * longest, schedule.pk])
        with pytest.raises((IntegrityError, DataError)), transaction.atomic():
            cursor.execute(update, ["é" * (longest + 1), schedule.pk])


def test_a_schedule_has_one_record_a_slot() -> None:
    schedule = make_schedule()
    Schedule.objects.record(schedule, schedule.created_at, Fate.FIRED)
    with pytest.raises(IntegrityError), transaction.atomic():
        Schedule.objects.record(schedule, schedule.created_at, Fate.SKIPPED)
    Schedule.objects.record(make_schedule(), schedule.created_at, Fate.FIRED)


@pytest.mark.sqlite_only
@pytest.mark.parametrize(
    "change", ["last_slot = '2026-13-45 00:00:00'", "spread = 'much'", "name = CAST(x'ff41' AS text)"]
)
def test_a_schedule_that_cannot_even_be_read_is_disabled_and_stops_no_other(change: str) -> None:
    bad, good = make_schedule(), make_schedule()
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE forgejobs_schedule SET {change} WHERE id = %s", [bad.pk])
    assert scheduler.tick("default").disabled == 1
    assert list(Schedule.objects.filter(enabled=True).values_list("pk", flat=True)) == [good.pk]
    assert Schedule.objects.values_list("disabled_reason", flat=True).get(pk=bad.pk)
