"""The INSERTs: how many statements a way in takes, and that one job and many are stored alike."""

import random
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS, IntegrityError, connection, transaction

from django_forgejobs import JobError, enqueue, enqueue_many, inserts
from django_forgejobs.models import Job
from tests.factories import make_job
from tests.sessions import session, statements

pytestmark = pytest.mark.django_db
real_commits = pytest.mark.django_db(transaction=True)

NOON = datetime(2030, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"payload": [1, (2.5, None, True), {"é": '\N{GRINNING FACE}\\ " \n'}]},
    {"payload": "a string"},
    {"payload": 1.2345e25},
    {"payload": {"n": 2**200, "deep": [[[]]]}, "queue": "mail", "priority": -100, "max_attempts": 9},
    {"available_in": 90.5},
    {"available_in": timedelta(days=1), "idempotency_key": "later"},
    {"run_at": NOON},
    {"run_at": NOON, "idempotency_key": "noon, 100 %s"},
    {"idempotency_key": "k"},
]
CALLS = [{"type": "t", **options} for options in OPTIONS]


def columns(job: Job) -> dict[str, Any]:
    return {field.attname: getattr(job, field.attname) for field in Job._meta.concrete_fields}


def in_the_table(jobs: list[Job], db: str = DEFAULT_DB_ALIAS) -> list[dict[str, Any]]:
    rows = Job.objects.using(db).in_bulk([job.pk for job in jobs])
    return [columns(rows[job.pk]) for job in jobs]


def what_was_asked_for(job: Job) -> dict[str, Any]:
    """Return the columns, but for what differs with every row; a time that counts from now as its delay."""
    values = columns(job)
    if job.run_at != NOON:
        values["run_at"] = job.run_at - job.created_at
    return {name: value for name, value in values.items() if name not in ("id", "created_at")}


# --- One job and many ----------------------------------------------------------------------------


def test_the_jobs_that_come_back_are_what_their_rows_say() -> None:
    many = Job.objects.enqueue_many(CALLS)
    assert [columns(job) for job in many] == in_the_table(many)
    known = Job.objects.enqueue_many(CALLS)  # the keys are known now
    assert [columns(job) for job in known] == in_the_table(known)
    Job.objects.all().delete()
    each = [Job.objects.enqueue(**call) for call in CALLS]
    assert [columns(job) for job in each] == in_the_table(each)


def test_a_job_is_stored_alone_as_it_is_among_many() -> None:
    among_many = [what_was_asked_for(job) for job in Job.objects.enqueue_many(CALLS)]
    Job.objects.all().delete()
    alone = [what_was_asked_for(job) for job in (Job.objects.enqueue(**call) for call in CALLS)]
    assert alone == among_many


def test_what_a_single_insert_leaves_out_is_what_the_table_gives() -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO forgejobs_job (type) VALUES ('t')")
    row = columns(Job.objects.get())
    assert {name: row[name] for name in inserts._DEFAULTS} == inserts._DEFAULTS


@real_commits
@pytest.mark.postgres_only
def test_values_that_the_server_binds_are_stored_as_those_that_the_client_does() -> None:
    by_client = [what_was_asked_for(job) for job in Job.objects.enqueue_many(CALLS)]
    Job.objects.all().delete()
    with session("binding", server_side_binding=True):
        many = Job.objects.enqueue_many(CALLS, db="binding")
        assert [what_was_asked_for(job) for job in many] == by_client
        Job.objects.all().delete()
        each = [Job.objects.enqueue(**call, db="binding") for call in CALLS]
        assert [what_was_asked_for(job) for job in each] == by_client


def test_the_ids_of_a_shuffled_mixture_are_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inserts, "ROWS", 4)
    keys = [None] * 15 + [f"key {number}" for number in range(10)] * 2
    random.Random(8).shuffle(keys)
    ids = enqueue_many({"type": "t", "payload": n, "idempotency_key": key} for n, key in enumerate(keys))
    rows = Job.objects.in_bulk(ids)
    for number, (pk, key) in enumerate(zip(ids, keys, strict=True)):
        assert rows[pk].idempotency_key == key
        assert rows[pk].payload == (number if key is None else keys.index(key))


def test_jobs_enqueued_together_are_claimed_in_their_order() -> None:
    ids = enqueue_many({"type": "t", "payload": number} for number in range(300))
    assert ids == sorted(ids)
    assert [job.pk for job in Job.objects.claim(300, worker="w")] == ids


def test_an_instant_that_has_just_come_is_due_and_one_that_has_not_is_not() -> None:
    """SQLite compares text: an instant must be written as the database writes its own."""
    now = Job.objects.enqueue("now").created_at
    for minutes, type_ in ((-1, "past"), (1, "future")):
        run_at = (now + timedelta(minutes=minutes)).astimezone(timezone(timedelta(hours=9)))
        enqueue_many([{"type": type_, "run_at": run_at}] * 2)
        enqueue(type_, run_at=run_at)
    assert [job.type for job in Job.objects.claim(9, worker="w")] == ["past"] * 3 + ["now"]


# --- Statements ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False], ids=["inside a transaction", "outside"])
@pytest.mark.django_db(transaction=True)
def test_a_job_and_a_thousand_are_one_insert_with_no_transaction_of_their_own(inside: bool) -> None:
    def count(act: Any) -> list[str]:
        if not inside:
            return [text.split()[0] for text in statements(act)]
        with transaction.atomic():
            return [text.split()[0] for text in statements(act)]

    assert count(lambda: enqueue("t", {"n": 1})) == ["INSERT"]
    assert count(lambda: enqueue("t", idempotency_key="k")) == ["INSERT"]
    assert count(lambda: enqueue("t", idempotency_key="k")) == ["INSERT", "SELECT"]
    assert count(lambda: enqueue_many([{"type": "t"}] * 1000)) == ["INSERT"]
    assert count(lambda: enqueue_many([{"type": "t", "available_in": 5}])) == ["INSERT"]
    assert count(lambda: enqueue_many([])) == []


def test_what_would_be_a_huge_statement_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inserts, "CHARACTERS", 1000)
    jobs = [{"type": "t", "payload": str(number) * 300} for number in range(9)]
    sent = [text for text in statements(lambda: enqueue_many(jobs)) if text.startswith("INSERT")]
    assert len(sent) == 3
    rows = Job.objects.order_by("pk").values_list("payload", flat=True)
    assert list(rows) == [job["payload"] for job in jobs]


@real_commits
def test_of_many_statements_all_are_stored_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inserts, "ROWS", 2)
    make_job(type="other", idempotency_key="z")
    jobs: list[dict[str, Any]] = [{"type": "t"}] * 5 + [{"type": "t", "idempotency_key": key} for key in "az"]
    with pytest.raises(JobError, match="belongs to job"):
        enqueue_many(jobs)
    assert Job.objects.count() == 1
    with transaction.atomic():
        with pytest.raises(JobError, match="belongs to job"):
            enqueue_many(jobs)
        enqueue("t")
    assert Job.objects.count() == 2


# --- What the database refuses -------------------------------------------------------------------


@pytest.mark.postgres_only
@pytest.mark.parametrize("key", [None, "k"])
def test_an_id_that_is_taken_is_an_error_and_no_rival_for_a_key(key: str | None) -> None:
    """A restored table whose sequence was forgotten: the next ids are taken."""
    taken = make_job().pk
    with connection.cursor() as cursor:
        cursor.execute("SELECT setval(pg_get_serial_sequence('forgejobs_job', 'id'), %s, false)", [taken])
    with pytest.raises(IntegrityError, match="forgejobs_job_pkey"), transaction.atomic():
        enqueue("t", idempotency_key=key)
    assert Job.objects.get().pk == taken
