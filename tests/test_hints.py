"""What is sent to wake a worker, when, and that nobody pays for it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from django_forgejobs import between, enqueue, enqueue_many, hints, requeue
from django_forgejobs.models import Job
from tests.factories import in_seconds, make_job
from tests.sessions import session

pytestmark = pytest.mark.django_db(transaction=True)

Heard = Callable[[], list[str]]


@pytest.fixture(autouse=True)
def no_hint_yet() -> Iterator[None]:
    hints._sent.clear()
    yield
    hints._sent.clear()


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Return a function that returns the queues named in hints since the last call, in order."""
    with session("ear") as ear, ear.cursor() as cursor:
        cursor.execute(f"LISTEN {hints.CHANNEL}")
        words: list[str] = []
        ear.connection.add_notify_handler(lambda notification: words.append(notification.payload))

        def heard() -> list[str]:
            cursor.execute("SELECT pg_notify(%s, 'all of them')", [hints.CHANNEL])  # comes last, and at once
            cursor.execute("SELECT 1")
            *queues, last = words
            assert last == "all of them"
            words.clear()
            return queues

        yield heard


@pytest.mark.postgres_only
def test_a_committed_job_is_told_of_by_its_queue(heard: Heard) -> None:
    enqueue("t.ok", queue="mail")
    assert heard() == ["mail"]


@pytest.mark.postgres_only
def test_the_hint_is_sent_after_the_commit_in_a_transaction_of_its_own(heard: Heard) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    with session("watcher") as watcher, watcher.cursor() as cursor:
        with transaction.atomic():
            enqueue("t.ok")
            assert heard() == []
        cursor.execute("SELECT query FROM pg_stat_activity WHERE pid = %s", [pid])
        assert "PG_NOTIFY" in cursor.fetchone()[0]  # and not COMMIT
    assert heard() == ["default"]


@pytest.mark.postgres_only
def test_a_transaction_sends_one_hint_for_each_of_its_queues(heard: Heard, monkeypatch: Any) -> None:
    monkeypatch.setattr(hints, "HELD_BACK", 60)  # however slow the machine is
    with transaction.atomic():
        for _ in range(3):
            enqueue("t.ok", queue="a")
            enqueue_many({"type": "t.ok", "queue": queue} for queue in "abc")
    assert sorted(heard()) == ["a", "b", "c"]


@pytest.mark.postgres_only
def test_a_burst_of_enqueues_costs_one_hint_at_a_time(heard: Heard, monkeypatch: Any) -> None:
    monkeypatch.setattr(hints, "HELD_BACK", 60)
    for _ in range(20):
        enqueue("t.ok")
    assert heard() == ["default"]
    enqueue("t.ok", queue="other")
    assert heard() == ["other"]
    monkeypatch.setattr(hints, "HELD_BACK", 0)
    enqueue("t.ok")
    enqueue("t.ok")
    assert heard() == ["default"] * 2


@pytest.mark.postgres_only
def test_what_need_not_be_looked_for_now_is_not_told_of(heard: Heard) -> None:
    enqueue("t.ok", available_in=3600)
    enqueue("t.ok", run_at=make_job(run_at=in_seconds(60)).run_at)
    with transaction.atomic():
        enqueue("t.ok")
        transaction.set_rollback(True)
    with transaction.atomic(), transaction.atomic():
        enqueue("t.ok")
        transaction.set_rollback(True)
    assert heard() == []
    enqueue("t.ok", idempotency_key="k")
    assert heard() == ["default"]
    hints._sent.clear()
    enqueue("t.ok", idempotency_key="k")
    assert heard() == []
    enqueue("t.ok", run_at=make_job().run_at)
    assert heard() == ["default"]


@pytest.mark.postgres_only
def test_a_job_made_due_by_hand_is_told_of(heard: Heard) -> None:
    assert requeue(make_job(status="dead", queue="a"))
    assert Job.objects.run_now(make_job(run_at=in_seconds(60), queue="b"))
    assert Job.objects.cancel(make_job(queue="c"))
    assert heard() == ["a", "b"]


@pytest.mark.postgres_only
def test_no_hint_is_sent_where_nobody_says_when_the_commit_was(heard: Heard) -> None:
    transaction.set_autocommit(False)
    try:
        enqueue("t.ok")
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert heard() == []
    assert Job.objects.count() == 1


@pytest.mark.postgres_only
def test_a_project_can_do_without_hints(heard: Heard, settings: Any) -> None:
    settings.FORGEJOBS = {"LISTEN_DATABASE": None}
    enqueue("t.ok")
    assert heard() == []


@pytest.mark.postgres_only
def test_a_hint_that_cannot_be_sent_costs_the_caller_nothing(heard: Heard) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()

    def cut() -> None:
        with session("killer") as killer, killer.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    try:
        with transaction.atomic():
            transaction.on_commit(cut)
            enqueue("t.ok")
        assert connection.errors_occurred  # so that Django opens another one for the next request
    finally:
        between.close(connection)
    assert heard() == []
    assert Job.objects.count() == 1
    enqueue("t.ok")
    assert heard() == ["default"]


def test_no_hint_is_counted_as_a_query(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1):
        enqueue("t.ok")


@pytest.mark.sqlite_only
def test_nothing_is_sent_where_nobody_can_hear_it(django_capture_on_commit_callbacks: Any) -> None:
    with transaction.atomic(), django_capture_on_commit_callbacks() as callbacks:
        enqueue("t.ok")
    assert callbacks == []
