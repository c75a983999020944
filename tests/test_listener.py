"""The thread that wakes a worker: what it hears, what it does when its line is cut, and how it ends."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS, connection, connections, transaction

from django_forgejobs import enqueue, hints, listener
from django_forgejobs.listener import Listener
from tests.sessions import session
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

#: No time at all until the end of a test.
LONG = 60.0


@pytest.fixture(autouse=True)
def no_hint_yet() -> None:
    hints._sent.clear()


class Ears:
    """A listener and when it woke us, after the first time, which is its beginning."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.woken: list[float] = []
        listener.wake = lambda: self.woken.append(time.monotonic())

    def wait(self, times: int = 1) -> None:
        """Return when it has woken us so many times since it was last asked."""
        wait_for(lambda: len(self.woken) >= times, message=lambda: f"woken {len(self.woken)} times")
        self.woken.clear()


@contextmanager
def listening(queues: tuple[str, ...] | None = None, *, db: str = DEFAULT_DB_ALIAS) -> Iterator[Ears]:
    ears = Ears(Listener(db=db, queues=queues, wake=lambda: None))
    with ears.listener:
        ears.wait()
        yield ears
    assert not ears.listener._thread.is_alive()  # type: ignore[union-attr]


def listeners(columns: str = "pid") -> list[tuple[Any, ...]]:
    """Return what the server says of the connections to this database that listen."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {columns} FROM pg_stat_activity "
            f"WHERE query = 'LISTEN {hints.CHANNEL}' AND datname = current_database()"
        )
        return list(cursor.fetchall())


def test_a_committed_job_wakes_and_one_that_is_not_does_not() -> None:
    with listening() as ears:
        with transaction.atomic():
            enqueue("t.ok")
            transaction.set_rollback(True)
        enqueue("t.ok")
        ears.wait()


@pytest.mark.postgres_only
def test_only_a_job_of_its_queues_wakes_a_worker(monkeypatch: Any) -> None:
    monkeypatch.setattr(hints, "HELD_BACK", 0)  # nobody looks a second time
    with listening(("a", "b")) as mine, listening(("c",)) as others, listening() as all_of_them:
        enqueue("t.ok", queue="c")
        others.wait()
        all_of_them.wait()
        enqueue("t.ok", queue="b")
        wait_for(lambda: mine.woken)
        assert len(mine.woken) == 1


@pytest.mark.postgres_only
def test_who_was_woken_looks_again_for_what_was_held_back_meanwhile(monkeypatch: Any) -> None:
    monkeypatch.setattr(hints, "HELD_BACK", 0.2)
    with listening() as ears:
        enqueue("t.ok")
        enqueue("t.ok")
        wait_for(lambda: len(ears.woken) > 1)
        first, second = ears.woken[:2]
        assert second - first >= 0.2


@pytest.mark.postgres_only
def test_hints_that_pour_in_from_many_processes_wake_once_at_a_time(monkeypatch: Any) -> None:
    with listening() as ears:
        monkeypatch.setattr(hints, "HELD_BACK", LONG)
        for _ in range(20):
            hints._sent.clear()  # as if it were another process
            enqueue("t.ok")
        wait_for(lambda: ears.woken)
        with session("last") as last, last.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, 'x')", [hints.CHANNEL])
    assert len(ears.woken) == 1


@pytest.mark.postgres_only
def test_its_connection_is_its_own_and_idle_and_says_whose_it_is(settings: Any) -> None:
    with session("pooled", pool={"min_size": 1, "max_size": 1}, application_name="web " * 20) as pooled:
        with listening(db="pooled"):
            (found,) = listeners("state, xact_start, application_name")
            assert found == ("idle", None, "web " * 14 + " listen")
            assert "pooled" not in pooled._connection_pools  # type: ignore[attr-defined]
        assert connections[DEFAULT_DB_ALIAS].connection is not None
    assert wait_for(lambda: not listeners())


@pytest.mark.postgres_only
def test_a_cut_line_is_opened_again_and_what_came_meanwhile_is_looked_for(caplog: Any) -> None:
    with listening() as ears:
        for _ in range(2):
            ((pid,),) = listeners()
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            ears.wait()
            assert listeners() != [(pid,)]
            enqueue("t.ok")
            ears.wait()
    told = [record.getMessage() for record in caplog.records if "wake this worker" in record.getMessage()]
    assert [line.split(" (")[0] for line in told] == [
        "New jobs do not wake this worker for now, polling finds them",
        "New jobs wake this worker again.",
    ] * 2


def test_a_database_out_of_reach_is_tried_again_with_one_line_until_told_to_stop(
    caplog: Any, tmp_path: Any
) -> None:
    nowhere = tmp_path / "nowhere"
    with session("nowhere") as away:
        away.settings_dict |= {"HOST": str(nowhere), "NAME": str(nowhere / "db")}
        ears = Ears(Listener(db="nowhere", queues=None, wake=lambda: None))
        with ears.listener:
            wait_for(lambda: caplog.records)
            wait_for(lambda: ears.listener.failures > 2)
            assert ears.listener._thread.is_alive()  # type: ignore[union-attr]
    assert not ears.listener._thread.is_alive()  # type: ignore[union-attr]
    assert ears.woken == []
    assert len(caplog.records) == 1


def test_a_listener_that_is_turned_off_opens_nothing(settings: Any) -> None:
    settings.FORGEJOBS = {"LISTEN_DATABASE": None}
    with Listener(db=DEFAULT_DB_ALIAS, queues=None, wake=lambda: None) as off:
        assert off._thread is None


def test_what_the_queue_of_another_alias_brings_is_listened_for_there(settings: Any) -> None:
    with session("queue"), session("direct"):
        settings.FORGEJOBS = {"DATABASE": "queue", "LISTEN_DATABASE": "direct"}
        assert Listener(db="queue", queues=None, wake=lambda: None).alias == "direct"
        assert Listener(db=DEFAULT_DB_ALIAS, queues=None, wake=lambda: None).alias == DEFAULT_DB_ALIAS


@pytest.mark.sqlite_only
def test_a_file_is_not_asked_while_no_job_could_be_taken_and_nothing_is_missed_meanwhile(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(listener, "LOOK_EVERY_QUIET", 0.001)
    with listening() as ears:
        ears.listener.idle = False
        enqueue("t.ok")
        with pytest.raises(AssertionError):
            wait_for(lambda: ears.woken, timeout=0.1)
        ears.listener.idle = True
        ears.wait()
