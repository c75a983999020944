"""Other sessions of the test database, and what they do between two statements of ours."""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import dj_database_url
from django.db import DEFAULT_DB_ALIAS, OperationalError, connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from django_forgejobs import between
from tests.waiting import wait_for

T = TypeVar("T")


@contextmanager
def session(alias: str = "other", *, url: str = "", **options: Any) -> Iterator[BaseDatabaseWrapper]:
    """Open a connection to the test database, or to `url`, under an alias and with OPTIONS of its own."""
    settings = copy.deepcopy(connections[DEFAULT_DB_ALIAS].settings_dict)
    if url:
        settings |= dj_database_url.parse(url)
    settings["OPTIONS"] = {**settings.get("OPTIONS", {}), **options}
    connections.databases[alias] = settings
    try:
        # The test case lets nobody connect to an alias that it did not know at its start.
        with mock.patch.object(BaseDatabaseWrapper, "ensure_connection", _ensure_connection):
            yield connections[alias]
    finally:
        between.close(connections[alias])
        del connections[alias]
        del connections.databases[alias]


def isolation(level: str) -> str:
    """Return libpq's `options` for a level. Django's own setting has no hold on single statements."""
    return "-c default_transaction_isolation=" + level.replace(" ", r"\ ")


def _ensure_connection(connection: BaseDatabaseWrapper) -> None:
    if connection.connection is None:
        with connection.wrap_database_errors:
            connection.connect()


def in_threads(count: int, act: Callable[[int], T]) -> list[T]:
    """Call `act(index)` in so many threads at once, each with connections of its own; return the answers."""
    start = threading.Barrier(count)

    def body(index: int) -> T:
        start.wait(timeout=30)
        try:
            return act(index)
        finally:
            between.close_all()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(body, range(count)))


@contextmanager
def beside(act: Callable[[], T]) -> Iterator[Future[T]]:
    """Call `act` in a thread with connections of its own while the block runs; wait for its end."""

    def body() -> T:
        try:
            return act()
        finally:
            between.close_all()

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(body)


@contextmanager
def before(words: str, act: Callable[[], object], *, db: str = DEFAULT_DB_ALIAS) -> Iterator[None]:
    """Call `act` once, just before this thread's first statement that contains `words`."""
    todo = [act]

    def wrapper(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        if todo and words in sql:
            todo.pop()()
        return execute(sql, params, many, context)

    with connections[db].execute_wrapper(wrapper):
        yield
    assert not todo, f"no statement contained {words!r}"


@contextmanager
def answer_lost(words: str, *, db: str = DEFAULT_DB_ALIAS) -> Iterator[None]:
    """Let this thread's first statement with `words` be committed, and cut the line before its answer."""
    todo = [True]

    def wrapper(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        answer = execute(sql, params, many, context)
        if todo and words in sql:
            todo.clear()
            context["cursor"].fetchall()  # SQLite commits when all rows are read
            raise OperationalError("server closed the connection unexpectedly")
        return answer

    with connections[db].execute_wrapper(wrapper):
        yield
    assert not todo, f"no statement contained {words!r}"


@contextmanager
def connections_of(
    threads: str, before: Callable[[str], object] | None = None, after: Callable[[str], object] | None = None
) -> Iterator[list[BaseDatabaseWrapper]]:
    """Collect the connections that threads whose name begins so open; look before and after each statement.

    What `before` and `after` raise is what the thread gets in place of its answer.
    """
    opened: list[BaseDatabaseWrapper] = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if before is not None:
            before(sql)
        answer = execute(sql, params, many, context)
        if after is not None:
            try:
                after(sql)
            except OperationalError:
                context["cursor"].fetchall()  # SQLite commits when all rows are read
                raise
        return answer

    def note(*, connection: BaseDatabaseWrapper, **_: Any) -> None:
        if threading.current_thread().name.startswith(threads):
            if connection not in opened:
                # In front: whoever has put a wrapper on for a while takes the last one away.
                connection.execute_wrappers.insert(0, wrapper)
            opened.append(connection)

    connection_created.connect(note)
    try:
        yield opened
    finally:
        connection_created.disconnect(note)
        # A connection that lives on, as this thread's own, would bring the wrapper into the next test.
        for each in set(opened):
            each.execute_wrappers.remove(wrapper)


def statements(of: Callable[[], object], *, db: str = DEFAULT_DB_ALIAS) -> list[str]:
    """Return the statements that this thread sends while it calls `of`."""
    seen: list[str] = []

    def wrapper(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        seen.append(sql)
        return execute(sql, params, many, context)

    with connections[db].execute_wrapper(wrapper):
        of()
    return seen


@contextmanager
def refusing(pk: int, what: str = "NEW.status <> 'running'") -> Iterator[None]:
    """Let a trigger raise whenever one row is to be changed so that `what` holds."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ "
                "BEGIN RAISE EXCEPTION 'this row is refused'; END $$"
            )
            act = "FOR EACH ROW WHEN (NEW.id = {} AND {}) EXECUTE FUNCTION refuse()"
        else:
            act = "FOR EACH ROW WHEN NEW.id = {} AND {} BEGIN SELECT RAISE(ABORT, 'this row is refused'); END"
        cursor.execute(f"CREATE TRIGGER refuse BEFORE UPDATE ON forgejobs_job {act.format(pk, what)}")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("DROP FUNCTION refuse CASCADE")
            else:
                cursor.execute("DROP TRIGGER refuse")


class Gate:
    """A trigger that holds up what one application writes (PostgreSQL) until the gate is opened.

    A statement's trigger fires when its snapshot is taken and no row is locked yet; a row's when the row
    is locked and not yet changed: the two gaps in which somebody else can be quicker.
    """

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def wait(self) -> None:
        """Return when somebody stands at the gate."""
        wait_for(self._is_besieged, message="nobody came to the gate")

    def open(self) -> None:
        """Let them through, and all who come later."""
        self._cursor.execute("SELECT pg_advisory_unlock_all()")

    def _is_besieged(self) -> bool:
        self._cursor.execute(
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return bool(self._cursor.fetchone())


@contextmanager
def gate(
    application: str, *, on: str = "UPDATE ON forgejobs_job", per: str = "STATEMENT", when: str = "true"
) -> Iterator[Gate]:
    """Close a gate for what `application` writes, to the jobs unless told; rows may be chosen by `when`."""
    with session("gatekeeper") as keeper, keeper.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(7)")
        cursor.execute(
            f"""CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF current_setting('application_name') = '{application}' THEN
                PERFORM pg_advisory_xact_lock_shared(7);
            END IF; RETURN NEW; END $$;
            CREATE TRIGGER gate BEFORE {on} FOR EACH {per} WHEN ({when})
            EXECUTE FUNCTION gate()"""
        )
        opened = Gate(cursor)
        try:
            yield opened
        finally:
            opened.open()
            cursor.execute("DROP FUNCTION gate CASCADE")
