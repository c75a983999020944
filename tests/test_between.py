"""Whatever a job leaves behind, the next one finds a clean thread, and a healthy connection is kept."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg.sql
import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, InternalError, connection, connections, transaction

from django_forgejobs import between
from tests.sessions import in_threads, session
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def connected() -> None:
    """Have a connection from the start, as a worker's thread has after its first job."""
    connection.ensure_connection()


def run(sql: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone() if cursor.description else None


# --- Transactions --------------------------------------------------------------------------------


def open_block() -> None:
    transaction.atomic().__enter__()
    Group.objects.create(name="left")


def open_block_in_a_block() -> None:
    open_block()
    open_block_again = transaction.atomic()
    open_block_again.__enter__()


def broken_block() -> None:
    open_block()
    with pytest.raises(DatabaseError):
        run("SELECT nothing_of_that_name")


def marked_for_rollback() -> None:
    open_block()
    transaction.set_rollback(True)


def autocommit_off() -> None:
    transaction.set_autocommit(False)
    Group.objects.create(name="left")


def plain_begin() -> None:
    run("BEGIN")
    Group.objects.create(name="left")


LEFT_OPEN = [
    open_block,
    open_block_in_a_block,
    broken_block,
    marked_for_rollback,
    autocommit_off,
    plain_begin,
]


@pytest.mark.parametrize("leave", LEFT_OPEN)
@pytest.mark.parametrize("raises", [False, True])
def test_a_transaction_left_open_is_rolled_back_and_its_connection_kept(
    leave: Callable[[], None], raises: bool
) -> None:
    driver = connection.connection
    try:
        with between.jobs():
            leave()
            assert not raises or 1 / 0
    except ZeroDivisionError:
        pass
    assert connection.connection is driver
    assert connection.get_autocommit()
    assert not connection.in_atomic_block
    assert not Group.objects.exists()
    with transaction.atomic():
        Group.objects.create(name="next")
    with session() as other:
        assert Group.objects.using(other.alias).get().name == "next"


def test_what_was_to_happen_on_commit_is_forgotten_with_the_transaction() -> None:
    called: list[str] = []
    with between.jobs():
        open_block()
        transaction.on_commit(lambda: called.append("left"))
    with transaction.atomic():
        transaction.on_commit(lambda: called.append("next"))
    assert called == ["next"]


def test_a_connection_closed_inside_a_transaction_is_replaced() -> None:
    with between.jobs():
        open_block()
        connection.close()
    assert run("SELECT 1") == (1,)
    assert not Group.objects.exists()


# --- Sessions ------------------------------------------------------------------------------------

COMPOSED = psycopg.sql.SQL("SET search_path TO {}").format(psycopg.sql.Identifier("pg_catalog"))
CHANGES: dict[str, list[Any]] = {
    "postgresql": [
        "SET search_path TO pg_catalog",
        "  set session statement_timeout = 60000",
        "/* tenant */ SET search_path TO pg_catalog",
        "-- tenant\nSET search_path TO pg_catalog",
        "SELECT 1; SET search_path TO pg_catalog",
        "SELECT set_config('search_path', 'pg_catalog', false)",
        "SET TIME ZONE 'Asia/Tokyo'",
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "RESET statement_timeout",
        "DISCARD PLANS",
        "LISTEN anything",
        "PREPARE forgejobs_prepared AS SELECT 1",
        "CREATE TEMP TABLE forgejobs_t (a int)",
        "CREATE TEMPORARY TABLE forgejobs_t (a int)",
        "CREATE LOCAL TEMP TABLE forgejobs_t (a int)",
        "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
        "SELECT pg_advisory_lock(1)",
        "SELECT pg_try_advisory_lock_shared(1)",
        b"SET search_path TO pg_catalog",
        COMPOSED,
    ],
    "sqlite": [
        "PRAGMA foreign_keys = OFF",
        "CREATE TEMP TABLE t (a)",
        "ATTACH ':memory:' AS other",
    ],
}
NO_CHANGES: dict[str, list[Any]] = {
    "postgresql": [
        "SET LOCAL statement_timeout = 60000",
        "SET CONSTRAINTS ALL IMMEDIATE",
        "SET TRANSACTION READ ONLY",
        "SELECT pg_advisory_xact_lock(1)",
        "SHOW search_path",
    ],
    "sqlite": [],
}
ORDINARY = [
    "SELECT 1",
    "UPDATE auth_group SET name = 'x' WHERE name = 'set'",
    "INSERT INTO auth_group (name) VALUES ('set reset discard')",
    "/* a comment */ SELECT 1",
    "SELECT 1 AS set_configuration",
]


def cases(by_vendor: dict[str, list[Any]]) -> list[Any]:
    return by_vendor[connection.vendor]


@pytest.mark.parametrize("sql", cases(CHANGES), ids=str)
def test_a_connection_whose_session_was_changed_is_replaced(sql: Any) -> None:
    driver = connection.connection
    with between.jobs():
        run(sql)
        assert connection.connection is driver
    assert connection.connection is None
    assert run("SELECT 1") == (1,)


@pytest.mark.parametrize("sql", cases(NO_CHANGES) + ORDINARY)
def test_a_connection_that_saw_other_statements_is_kept(sql: str) -> None:
    driver = connection.connection
    with between.jobs(), transaction.atomic():
        run(sql)
    assert connection.connection is driver


@pytest.mark.postgres_only
def test_the_next_job_finds_the_search_path_that_it_should() -> None:
    with between.jobs():
        run("SET search_path TO pg_catalog")
    assert run("SHOW search_path") == ('"$user", public',)


def test_forty_comments_before_a_statement_cost_nothing() -> None:
    with between.jobs():
        assert run("/* */ " * 40 + "SELECT 1") == (1,)


# --- Connections ---------------------------------------------------------------------------------


def terminate(pid: int) -> None:
    with session("killer") as killer, killer.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [pid])

        def gone() -> bool:
            cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid])
            return cursor.fetchone() is None

        wait_for(gone, message="the backend did not end")


@pytest.mark.postgres_only
def test_a_healthy_connection_is_kept_from_job_to_job_also_after_an_ordinary_error() -> None:
    pids = []
    for _ in range(3):
        with between.jobs():
            pids.append(run("SELECT pg_backend_pid()"))
            with pytest.raises(DatabaseError):
                run("SELECT nothing_of_that_name")
    assert len(set(pids)) == 1


@pytest.mark.postgres_only
@pytest.mark.parametrize("in_block", [False, True])
def test_a_connection_that_broke_under_a_job_is_replaced(in_block: bool) -> None:
    with between.jobs():
        if in_block:
            open_block()
        terminate(run("SELECT pg_backend_pid()")[0])
        with pytest.raises(DatabaseError):
            run("SELECT 1")
    assert connection.connection is None
    assert run("SELECT 1") == (1,)
    assert not Group.objects.exists()


@pytest.mark.postgres_only
def test_a_connection_that_died_while_idle_trips_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "IDLE_BEFORE_CHECK", 0)
    with between.jobs():
        pid = run("SELECT pg_backend_pid()")[0]
    terminate(pid)
    with between.jobs():
        assert run("SELECT pg_backend_pid()")[0] != pid


@pytest.mark.parametrize("leave", [lambda: None, *LEFT_OPEN])
def test_the_queues_database_is_in_reach_whatever_a_handler_did_to_its_transaction(
    leave: Callable[[], None],
) -> None:
    leave()
    assert between.reachable("default")
    between.close(connection)
    assert between.reachable("default")
    between.close(connection)


@pytest.mark.postgres_only
def test_a_cut_connection_is_an_outage_even_if_another_could_be_had() -> None:
    terminate(run("SELECT pg_backend_pid()")[0])
    assert not between.reachable("default")
    between.close(connection)


@pytest.mark.postgres_only
def test_a_server_that_is_away_is_out_of_reach() -> None:
    with session("away") as away:
        away.settings_dict["HOST"] = "/nowhere"
        assert not between.reachable("away")


@pytest.mark.postgres_only
def test_a_failed_transaction_of_the_handler_is_no_outage() -> None:
    """The probe would say so, were the transaction not rolled back first."""
    broken_block()
    connection.needs_rollback = False
    with pytest.raises(InternalError):
        run("SELECT 1")
    assert between.reachable("default")


# --- The rest ------------------------------------------------------------------------------------


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put back what this process does on signals, should a test not."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    kept = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signal_handlers_are_those_of_before(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with between.jobs():
        signal.signal(number, signal.SIG_IGN)
    assert signal.getsignal(number) is before


def test_a_thread_leaves_the_signals_alone() -> None:
    def body(index: int) -> str:
        with between.jobs():
            return threading.current_thread().name

    assert in_threads(1, body) != [threading.main_thread().name]


def test_instrumentation_added_while_a_job_runs_stays_and_is_the_only_thing_to_stay() -> None:
    def instrument(execute: Any, *arguments: Any) -> Any:
        return execute(*arguments)

    before = list(connection.execute_wrappers)
    with between.jobs():
        connection.execute_wrappers.append(instrument)
    assert connection.execute_wrappers == [*before, instrument]
    connection.execute_wrappers.remove(instrument)


def test_closing_all_closes_what_this_thread_has() -> None:
    open_block()
    between.close_all()
    assert all(one.connection is None for one in connections.all())
    assert run("SELECT 1") == (1,)


@pytest.mark.parametrize("kept", [False, True])
def test_a_database_that_a_job_adds_is_cleaned_like_those_there_before(kept: bool) -> None:
    """Sites with a database a tenant add its alias when they meet it."""
    cleaner = between.jobs()
    with ExitStack() as after:
        for _ in range(2):
            with cleaner if kept else between.jobs():
                if "tenant" not in connections.settings:
                    after.enter_context(session("tenant"))
                transaction.atomic(using="tenant").__enter__()
            assert not connections["tenant"].in_atomic_block


def test_a_connection_that_a_job_puts_in_anothers_place_is_cleaned() -> None:
    old = connections["default"]
    try:
        with between.jobs():
            connections["default"] = old.copy()
            open_block()
        assert not connections["default"].in_atomic_block
        assert not Group.objects.exists()
    finally:
        between.close(connections["default"])
        connections["default"] = old


@pytest.mark.postgres_only
def test_a_job_that_runs_jobs_is_still_told_of_its_own_cut_connection() -> None:
    with between.jobs():
        pid = run("SELECT pg_backend_pid()")[0]
        with between.jobs():
            pass
        terminate(pid)
        with pytest.raises(DatabaseError), transaction.atomic():
            run("SELECT 1")
        assert not between.reachable("default")


def test_a_kept_cleaner_forgets_what_the_job_before_did() -> None:
    cleaner = between.jobs()
    with cleaner:
        run(cases(CHANGES)[0])
    connection.ensure_connection()
    driver = connection.connection
    with cleaner:
        run("SELECT 1")
    assert connection.connection is driver
