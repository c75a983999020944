"""The way in: what is stored, what is refused, and what two callers with one key get."""

import json
import logging
import os
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import time_machine
from asgiref.sync import async_to_sync
from django.db import OperationalError, connection, transaction
from django.test import override_settings
from hypothesis import HealthCheck, given, settings

from django_forgejobs import (
    JobError,
    aenqueue,
    aenqueue_many,
    enqueue,
    enqueue_many,
    inserts,
    job,
    process_one,
    reclaim,
    registry,
    requeue,
    signals,
)
from django_forgejobs.models import Job
from tests.factories import make_job
from tests.json_values import json_values
from tests.sessions import before, beside, in_threads, session, statements
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db
real_commits = pytest.mark.django_db(transaction=True)

SURROGATE = os.fsdecode(b"\xff.txt")
NEW_YORK = ZoneInfo("America/New_York")


# --- What is stored ------------------------------------------------------------------------------


def test_a_job_of_nothing_but_a_type_gets_the_defaults() -> None:
    pk = enqueue("email.send")
    row = Job.objects.get()
    assert (type(pk), pk) == (int, row.pk)
    assert (row.type, row.payload, row.queue, row.priority) == ("email.send", {}, "default", 0)
    assert (row.status, row.attempts, row.max_attempts) == ("ready", 0, 1)
    assert (row.idempotency_key, row.history, row.result) == (None, [], None)
    assert row.run_at == row.created_at


def test_every_option_is_stored() -> None:
    enqueue("t", [1], queue="q", priority=-100, max_attempts=7, idempotency_key="k")
    row = Job.objects.get()
    assert (row.payload, row.queue, row.priority) == ([1], "q", -100)
    assert (row.max_attempts, row.idempotency_key) == (7, "k")


@override_settings(FORGEJOBS={"DEFAULT_MAX_ATTEMPTS": 4})
def test_what_is_not_given_comes_from_the_types_policy_else_from_the_project(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_definitions", {})
    send = job("email.send", queue="mail", priority=3, max_attempts=9)(lambda payload: None)
    ids = [send.enqueue({"n": 1}), send.enqueue(queue="q", priority=0, max_attempts=1), enqueue("t")]
    rows = [Job.objects.get(pk=pk) for pk in ids]
    assert [row.type for row in rows] == ["email.send", "email.send", "t"]
    assert [(row.queue, row.priority, row.max_attempts) for row in rows] == [
        ("mail", 3, 9),
        ("q", 0, 1),
        ("default", 0, 4),
    ]


def test_an_unregistered_type_leaves_a_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "django_forgejobs"):
        enqueue("email.typo")
    assert 'Enqueued "email.typo", which no jobs.py of this process registers.' in caplog.text


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(json_values)
def test_any_payload_that_is_accepted_comes_back_equal_from_the_database(payload: Any) -> None:
    expected = {} if payload is None else payload
    row = Job.objects.get(pk=enqueue("t", payload))
    assert row.payload == expected
    # Of the same types too; but -0.0 is 0.0 for PostgreSQL, and keys have no order.
    stored, given = (json.dumps(x, sort_keys=True) for x in (row.payload, expected))
    assert stored.replace("-0.0", "0.0") == given.replace("-0.0", "0.0")


def test_names_are_stored_up_to_their_length_in_characters() -> None:
    enqueue("é" * 200, queue="é" * 64, idempotency_key="é" * 255)
    row = Job.objects.get()
    assert (len(row.type), len(row.queue), len(row.idempotency_key or "")) == (200, 64, 255)


# --- When ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available_in", "seconds"),
    [(0, 0), (90, 90), (0.25, 0.25), (timedelta(days=1), 86400), (36500 * 86400, 36500 * 86400)],
)
def test_a_delay_is_counted_from_now(available_in: Any, seconds: float) -> None:
    row = Job.objects.get(pk=enqueue("t", available_in=available_in))
    assert (row.run_at - row.created_at).total_seconds() == pytest.approx(seconds, abs=0.002)


@pytest.mark.parametrize("hours", [-24 * 3650, -1, 1, 24 * 3650])
def test_the_clock_of_the_host_changes_nothing(hours: int) -> None:
    with time_machine.travel(datetime.now(UTC) + timedelta(hours=hours), tick=True):
        enqueue("later", available_in=60)
        enqueue("now")
        seen: list[str] = []
        handlers = {type_: lambda payload, n=type_: seen.append(n) for type_ in ("now", "later")}
        assert process_one(handlers)
        assert not process_one(handlers)
    assert seen == ["now"]
    assert abs(Job.objects.get(type="later").created_at - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Shanghai", "UTC"])
@pytest.mark.parametrize(
    "run_at",
    [
        datetime(2026, 11, 1, 1, 30, fold=0, tzinfo=NEW_YORK),
        datetime(2026, 11, 1, 1, 30, fold=1, tzinfo=NEW_YORK),
        datetime(2026, 3, 8, 2, 30, tzinfo=NEW_YORK),
        datetime(2026, 6, 1, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    ],
)
def test_an_instant_stays_the_same_whatever_the_time_zones(run_at: datetime, zone: str) -> None:
    with override_settings(TIME_ZONE=zone):
        row = Job.objects.get(pk=enqueue("t", run_at=run_at))
    assert row.run_at == run_at.astimezone(UTC)


@pytest.mark.postgres_only
def test_the_time_zone_of_the_session_changes_no_instant() -> None:
    run_at = datetime(2026, 11, 1, 1, 30, fold=1, tzinfo=NEW_YORK)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL TIME ZONE 'America/New_York'")
        enqueue("at", run_at=run_at)
        enqueue("in", available_in=60)
        cursor.execute("SET LOCAL TIME ZONE 'UTC'")
    assert Job.objects.get(type="at").run_at == run_at.astimezone(UTC)
    row = Job.objects.get(type="in")
    assert row.run_at - row.created_at == timedelta(seconds=60)
    assert abs(row.created_at - datetime.now(UTC)) < timedelta(minutes=1)


def test_an_instant_in_the_past_is_due_at_once() -> None:
    enqueue("t", run_at=datetime(1970, 1, 1, tzinfo=UTC))
    assert process_one({"t": lambda payload: None})


# --- What is refused -----------------------------------------------------------------------------

UTC_MIN, UTC_MAX = (moment.replace(tzinfo=UTC) for moment in (datetime.min, datetime.max))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": ""}, "type is empty; name it."),
    ({"type": None}, "type=None is of type NoneType, not a plain string"),
    ({"type": ["t"]}, "type=['t'] is of type list, not a plain string"),
    ({"type": "t" * 201}, "is 201 characters, more than 200. Shorten it."),
    ({"type": "a\0"}, "type contains a NUL character, which PostgreSQL cannot store. Remove it."),
    ({"type": SURROGATE}, "type contains a lone surrogate ('\\udcff')"),
    ({"queue": ""}, "queue is empty; name it."),
    ({"queue": "q" * 65}, "is 65 characters, more than 64. Shorten it."),
    ({"queue": SURROGATE}, "queue contains a lone surrogate"),
    ({"queue": b"q"}, "queue=b'q' is of type bytes, not a plain string"),
    ({"priority": 101}, "priority=101 is not a whole number from -100 to 100."),
    ({"priority": -101}, "priority=-101 is not a whole number"),
    ({"priority": "high"}, "priority='high' is not a whole number"),
    ({"priority": 10**5000}, "priority=<a int whose repr raises ValueError> is not a whole number"),
    ({"max_attempts": 0}, "max_attempts=0 is not a whole number from 1 to 2147483647."),
    ({"max_attempts": 2.0}, "max_attempts=2.0 is not a whole number"),
    ({"max_attempts": 2**31}, "max_attempts=2147483648 is not a whole number"),
    ({"idempotency_key": ""}, "idempotency_key is empty; name it."),
    ({"idempotency_key": 5}, "idempotency_key=5 is of type int, not a plain string"),
    ({"idempotency_key": "k" * 256}, "is 256 characters, more than 255. Shorten it."),
    ({"idempotency_key": SURROGATE}, "idempotency_key contains a lone surrogate"),
    ({"idempotency_key": "schedule:1:2026"}, "belongs to the scheduler. Choose another prefix."),
    ({"available_in": -1}, "available_in=-1: it must not be negative."),
    ({"available_in": timedelta(seconds=-1)}, "it must not be negative."),
    ({"available_in": float("nan")}, "available_in=nan: expected a number of seconds or a timedelta."),
    ({"available_in": float("inf")}, "available_in=inf: expected a number of seconds"),
    ({"available_in": "5"}, "available_in='5': expected a number of seconds"),
    ({"available_in": None}, "available_in=None: expected a number of seconds"),
    ({"available_in": True}, "available_in=True: expected a number of seconds"),
    ({"available_in": 1e11}, "it is longer than a hundred years."),
    ({"available_in": 10**5000}, "it is longer than a hundred years."),
    ({"available_in": timedelta.max}, "it is longer than a hundred years."),
    ({"run_at": datetime(2026, 1, 1)}, "has no time zone. Use django.utils.timezone.now()"),
    ({"run_at": date(2026, 1, 1)}, "run_at=datetime.date(2026, 1, 1) is not a datetime"),
    ({"run_at": 1767225600}, "run_at=1767225600 is not a datetime; for seconds there is available_in."),
    ({"run_at": UTC_MIN}, "is outside the years 1970 to 9000"),
    ({"run_at": UTC_MAX}, "is outside the years 1970 to 9000"),
    ({"run_at": UTC_MAX.replace(tzinfo=NEW_YORK)}, "is outside the years 1970 to 9000"),
    ({"run_at": UTC_MIN.replace(tzinfo=ZoneInfo("Asia/Tokyo"))}, "is outside the years"),
    (
        {"run_at": datetime(2030, 1, 1, tzinfo=UTC), "available_in": 5},
        "Both available_in=5 and run_at=datetime.datetime(2030, 1, 1, 0, 0, tzinfo=datetime.timezone.utc)"
        " were given. Give one of them.",
    ),
    ({"payload": {1: "a", "1": "b"}}, "payload has the key 1 (int); JSON keys are strings."),
    ({"payload": {"m": [float("nan")]}}, 'payload["m"][0] is nan, which JSON does not have.'),
    ({"payload": {"f": SURROGATE}}, 'payload["f"] contains a lone surrogate'),
    ({"payload": {"at": datetime(2026, 1, 1)}}, 'payload["at"] is datetime.datetime, which JSON'),
    ({"payload": "x" * 1048575}, "payload is more than PAYLOAD_MAX_BYTES (1,048,576) allows"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_a_wrong_call_stores_nothing_and_is_told_the_value_and_the_remedy(
    call: dict[str, Any], said: str
) -> None:
    arguments = {"type": "t"} | call
    with pytest.raises(JobError) as caught:
        enqueue(**arguments)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500
    with pytest.raises(JobError) as caught:
        enqueue_many([{"type": "right"}, arguments])
    assert str(caught.value).startswith("jobs[1]: ")
    assert said in str(caught.value)
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        (["a"], "jobs[0] is 'a'; each must be a dict of enqueue's arguments, such as {\"type\""),
        ({"type": "t"}, "jobs[0] is 'type'; each must be a dict"),
        ([{"type": "t"}, None], "jobs[1] is None; each must be a dict"),
        ([{}], "jobs[0]: enqueue() missing 1 required positional argument: 'type'"),
        ([{"type": "t", "que": "q"}], "enqueue() got an unexpected keyword argument 'que'"),
        ([{"type": "t", "db": "x"}], "enqueue() got an unexpected keyword argument 'db'"),
        ([{"type": "t", 5: 1}], "jobs[0]: keywords must be strings"),
    ],
)
def test_many_of_which_one_is_wrong_name_its_index(jobs: Any, said: str) -> None:
    with pytest.raises(JobError) as caught:
        enqueue_many(jobs)
    assert said in str(caught.value)
    assert not Job.objects.exists()


# --- Many ----------------------------------------------------------------------------------------


def test_the_ids_of_many_come_back_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inserts, "ROWS", 3)
    known = enqueue("t", idempotency_key="known")
    keys = [None, "z", None, "known", "a", None, "z", None, None, "m", "b", "c"]
    jobs = [{"type": "t", "payload": n, "idempotency_key": key} for n, key in enumerate(keys)]
    ids = enqueue_many(jobs)
    assert ids[3] == known
    assert ids[6] == ids[1]
    for number in set(range(len(keys))) - {3, 6}:
        row = Job.objects.get(pk=ids[number])
        assert (row.payload, row.idempotency_key) == (number, keys[number])
    assert Job.objects.count() == len(keys) - 1


def test_thousands_are_one_round_trip() -> None:
    jobs = ({"type": "t", "payload": n} for n in range(2000))
    sent = statements(lambda: enqueue_many(jobs))
    assert len([text for text in sent if "SAVEPOINT" not in text]) == 1
    payloads = Job.objects.order_by("pk").values_list("payload", flat=True)
    assert list(payloads) == list(range(2000))


def test_many_of_none_are_none() -> None:
    assert enqueue_many([]) == []
    assert enqueue_many(iter(())) == []


def test_many_are_stored_all_or_none_also_when_the_last_is_refused_late() -> None:
    enqueue("t", idempotency_key="k")
    jobs = [{"type": "t"}, {"type": "t", "idempotency_key": "a"}]
    with pytest.raises(JobError, match="belongs to job"):
        enqueue_many([*jobs, {"type": "other", "idempotency_key": "k"}])
    assert Job.objects.count() == 1


def test_a_generator_that_raises_stores_nothing() -> None:
    def jobs() -> Iterator[dict[str, Any]]:
        yield {"type": "t"}
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        enqueue_many(jobs())
    assert not Job.objects.exists()


# --- Idempotency keys ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["ready", "running", "done", "failed", "dead", "cancelled"])
def test_a_known_key_gives_the_id_of_the_job_that_has_it_whatever_its_status(status: str) -> None:
    first = make_job(status=status, type="t", idempotency_key="k")
    assert enqueue("t", {"another": "payload"}, idempotency_key="k") == first.pk
    assert Job.objects.get().payload == {}


def test_a_key_lives_as_long_as_its_row() -> None:
    first = enqueue("t", idempotency_key="k")
    Job.objects.filter(pk=first).delete()
    assert enqueue("t", idempotency_key="k") != first


def test_a_key_of_another_type_is_refused_naming_both() -> None:
    first = enqueue("t", idempotency_key="k")
    with pytest.raises(JobError) as caught:
        enqueue("other", idempotency_key="k")
    assert f'\'k\' belongs to job {first} of type "t", not "other"' in str(caught.value)
    with pytest.raises(JobError, match='of type "a", not "b"'):
        enqueue_many([{"type": type_, "idempotency_key": "twice"} for type_ in ("a", "b")])
    assert Job.objects.get().pk == first


def test_a_known_key_leaves_the_callers_transaction_usable() -> None:
    with transaction.atomic():
        first = enqueue("t", idempotency_key="k")
        assert enqueue("t", idempotency_key="k") == first
        with pytest.raises(JobError):
            enqueue("other", idempotency_key="k")
        assert Job.objects.count() == 1
    assert Job.objects.count() == 1


def test_a_job_whose_worker_died_keeps_its_key_before_and_after_it_is_reclaimed() -> None:
    died = make_job(status="running", lease=-1, type="t", idempotency_key="k", max_attempts=2)
    assert enqueue("t", idempotency_key="k") == died.pk
    assert reclaim() == 1
    assert enqueue("t", idempotency_key="k") == died.pk
    assert process_one({"t": lambda payload: None})
    assert Job.objects.get().status == "done"


def test_a_job_with_a_key_can_fail_be_retried_and_requeued_beside_a_second_enqueue() -> None:
    pk = enqueue("t", idempotency_key="k", max_attempts=2)
    for number in range(2):
        assert process_one({"t": lambda payload: 1 / 0})
        assert enqueue("t", idempotency_key="k") == pk
        Job.objects.run_now(pk)
        assert Job.objects.get().attempts == number + 1
    assert requeue(pk)
    assert Job.objects.get().status == "ready"


def test_a_row_that_goes_between_our_two_looks_does_not_take_the_job_with_it() -> None:
    enqueue("t", idempotency_key="k")

    def archive() -> None:
        Job.objects.all().delete()

    with before('SELECT "forgejobs_job"', archive):
        pk = enqueue("t", idempotency_key="k")
    assert Job.objects.get().pk == pk


@real_commits
@pytest.mark.parametrize("rival_commits", [True, False])
def test_an_uncommitted_rival_is_waited_for_and_never_believed(rival_commits: bool) -> None:
    with session("rival") as rival:
        rival.set_autocommit(False)
        enqueue("t", "theirs", idempotency_key="k", db="rival")
        with beside(lambda: enqueue("t", "ours", idempotency_key="k")) as ours:
            if connection.vendor == "postgresql":
                wait_for(_somebody_waits_for_a_lock, message="the second enqueue did not wait")
            assert not ours.done()
            if rival_commits:
                rival.commit()
            else:
                rival.rollback()
    row = Job.objects.get()
    assert row.pk == ours.result()
    assert row.payload == ("theirs" if rival_commits else "ours")


def _somebody_waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_locks WHERE NOT granted")
        return bool(cursor.fetchone())


@real_commits
def test_many_threads_with_one_key_get_one_job() -> None:
    for _ in range(3):
        ids = in_threads(8, lambda index: enqueue("t", {"n": index}, idempotency_key="k"))
        assert set(ids) == {Job.objects.get().pk}
        Job.objects.all().delete()  # the key is free again


@real_commits
def test_callers_with_the_same_keys_in_opposite_order_do_not_deadlock() -> None:
    jobs = [{"type": "t", "idempotency_key": f"k{number:03}"} for number in range(300)]

    def many(index: int) -> list[int]:
        ordered = jobs if index % 2 else jobs[::-1]
        ids = enqueue_many(ordered)
        return ids if index % 2 else ids[::-1]

    answers = in_threads(6, many)
    assert all(ids == answers[0] for ids in answers)
    assert Job.objects.count() == 300


@real_commits
@pytest.mark.postgres_only
def test_under_a_stricter_level_the_caller_gets_the_serialization_failure() -> None:
    with session("strict") as strict, transaction.atomic(using="strict"):
        with strict.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT 1 FROM forgejobs_job")
        pk = enqueue("t", idempotency_key="k")
        with pytest.raises(OperationalError, match="serialize"):
            enqueue("t", idempotency_key="k", db="strict")
    assert Job.objects.get().pk == pk


# --- The caller's transaction --------------------------------------------------------------------


@real_commits
def test_a_job_is_seen_when_its_transaction_commits_and_not_before() -> None:
    with session("worker"):
        with transaction.atomic():
            pk = enqueue("t")
            assert pk == Job.objects.get().pk
            if connection.vendor == "postgresql":  # SQLite's claim would wait for our commit
                assert not process_one({"t": lambda payload: None}, db="worker")
        assert process_one({"t": lambda payload: None}, db="worker")


@real_commits
def test_a_transaction_rolled_back_takes_its_jobs_with_it() -> None:
    with transaction.atomic():
        enqueue("t")
        enqueue_many([{"type": "t"}] * 3)
        transaction.set_rollback(True)
    assert not Job.objects.exists()


# --- Told ----------------------------------------------------------------------------------------


@pytest.fixture
def told() -> Iterator[list[int]]:
    """Collect the ids that the signal tells, behind a receiver that raises."""
    ids: list[int] = []

    def broken(**_: Any) -> None:
        raise ZeroDivisionError

    def receive(sender: Any, job: Job, **_: Any) -> None:
        assert sender is Job
        ids.append(job.pk)

    signals.enqueued.connect(broken)
    signals.enqueued.connect(receive)
    yield ids
    signals.enqueued.disconnect(broken)
    signals.enqueued.disconnect(receive)


@real_commits
def test_a_job_is_told_once_and_only_after_the_commit(told: list[int]) -> None:
    with transaction.atomic():
        pk = enqueue("t", idempotency_key="k")
        again = enqueue("t", idempotency_key="k")
        assert told == []
    assert told == [pk]
    assert again == pk
    enqueue("t", idempotency_key="k")
    assert told == [pk]
    ids = enqueue_many([{"type": "t"}] * 3)
    assert sorted(told) == sorted([pk, *ids])


@real_commits
def test_nothing_is_told_of_a_job_that_was_rolled_back(told: list[int]) -> None:
    with transaction.atomic():
        enqueue("t")
        transaction.set_rollback(True)
    assert told == []


# --- From async code -----------------------------------------------------------------------------


def test_async_code_enqueues_with_the_twins() -> None:
    async def main() -> list[int]:
        send = registry.Handler(len, registry.define("t", len))
        return [await aenqueue("t", {"n": 1}), *await aenqueue_many([{"type": "t"}]), await send.aenqueue()]

    ids = async_to_sync(main)()
    assert sorted(Job.objects.values_list("pk", flat=True)) == sorted(ids)
    assert len(ids) == 3
