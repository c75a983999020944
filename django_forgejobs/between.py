"""What must not leak from one job into the next: transactions, sessions, signal handlers.

Language, time zone and every other context variable cannot: ``executor`` runs each handler in a copy of
the context.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from functools import lru_cache
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_forgejobs")

# Statements that change the session beyond their transaction, at the start of a text or after a semicolon. A
# healthy connection is kept otherwise: opening one anew costs 7 ms a job, and DISCARD ALL would undo Django's
# own settings.
_SESSION = re.compile(
    r"(^|;)(?>\s|/\*.*?\*/|--[^\n]*\n)*+(SET(?!\s+(LOCAL|CONSTRAINTS|TRANSACTION)\b)|RESET|DISCARD|LISTEN|UNLISTEN|"
    r"PREPARE|DECLARE|LOAD|ATTACH|DETACH|PRAGMA|DO|CREATE\s+(OR\s+REPLACE\s+)?((LOCAL|GLOBAL)\s+)?TEMP(ORARY)?)\b"
    r"|\bINTO\s+((LOCAL|GLOBAL)\s+)?TEMP(ORARY)?\b"
    r"|\bSET_CONFIG\s*\(|\bPG_(TRY_)?ADVISORY_LOCK",
    re.IGNORECASE | re.DOTALL,
)

#: Statements up to this long are judged once.
REMEMBERED_CHARACTERS = 4096

#: Seconds of idleness after which a connection is asked whether it still lives.
IDLE_BEFORE_CHECK = 2.0

#: Of this thread: the ``cleaner`` at work, and ``since`` when the thread is idle.
_local = threading.local()


def jobs() -> Cleaner:
    """Return a context manager that cleans this thread up when the job inside is over, however it ends.

    An open transaction is rolled back and autocommit restored; a connection that is broken or whose
    session was changed is closed; signal handlers are restored. A thread that does nothing else may keep it
    and enter it for each of its jobs.
    """
    return Cleaner()


class Cleaner:
    """What ``jobs`` returns. Every job pays for it, so it costs a few microseconds: no generator, one look at
    the thread's connections a job, and no question to a driver that has nothing open.
    """

    __slots__ = ("_connections", "_handlers", "_outer", "_watch")

    def __init__(self) -> None:
        self._watch = _Watch()
        self._connections = connections.all()
        self._handlers: dict[int, Any] = {}
        self._outer: Cleaner | None = None

    def __enter__(self) -> None:
        self._handlers = _signal_handlers()
        self._watch.forget()
        idle = time.monotonic() - getattr(_local, "since", 0.0)
        for connection in self._connections:
            if idle >= IDLE_BEFORE_CHECK and connection.connection is not None and not connection.is_usable():
                close(connection)  # it died while the thread was idle: the job must not trip over it
            connection.execute_wrappers.append(self._watch)
        self._outer = getattr(_local, "cleaner", None)  # of a handler that runs jobs of its own
        _local.cleaner = self

    def __exit__(self, *_: object) -> None:
        _local.cleaner = self._outer
        watch = self._watch
        for connection in self._connections:
            # By name, not the last one: instrumentation adds its own when a connection is made.
            if watch in connection.execute_wrappers:
                connection.execute_wrappers.remove(watch)
        self._connections = connections.all()  # a handler may have replaced one, or added an alias
        for connection in self._connections:
            _clean(connection, session_changed=connection.alias in watch.changed)
            connection.queries_log.clear()  # under DEBUG it would grow for as long as the thread lives
        if self._handlers:
            _restore(self._handlers)
        _local.since = time.monotonic()

    def cut(self, alias: str) -> bool:
        """Return whether the driver's connection that this job used last has been closed under it."""
        return bool(getattr(self._watch.used.get(alias), "closed", False))


class _Watch:
    """An execute wrapper that notes which connections saw a statement that outlives its transaction, and
    which driver's connection was used last, by alias.
    """

    __slots__ = ("changed", "used")

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self.used: dict[str, Any] = {}

    def forget(self) -> None:
        self.changed.clear()
        self.used.clear()

    def __call__(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        connection = context["connection"]
        if _changes_session(sql):
            self.changed.add(connection.alias)
        self.used[connection.alias] = connection.connection
        return execute(sql, params, many, context)


def _changes_session(sql: Any) -> bool:
    # Most texts come again and again, and the search costs 50 µs a kB; only short ones are worth the memory.
    if type(sql) is str and len(sql) <= REMEMBERED_CHARACTERS:
        return _remembered(sql)
    return _SESSION.search(_text(sql)) is not None


@lru_cache(maxsize=1024)
def _remembered(sql: str) -> bool:
    return _SESSION.search(sql) is not None


def _text(sql: Any) -> str:
    if isinstance(sql, bytes):
        return sql.decode("utf-8", "replace")
    compose = getattr(sql, "as_string", None)  # psycopg.sql
    return str(sql if compose is None else compose(None))


def _clean(connection: BaseDatabaseWrapper, *, session_changed: bool) -> None:
    if connection.connection is None:
        connection.needs_rollback = False
        return
    suspicious = connection.errors_occurred
    try:
        leave_transaction(connection)
        broken = suspicious and not connection.is_usable()
    except Exception:  # a connection in an unknown state is replaced, whatever it complains about
        broken = True
    connection.errors_occurred = False
    if broken or session_changed:
        close(connection)


def reachable(db: str) -> bool:
    """Probe ``db`` on this thread's own connection, the one that a handler has just had.

    A cut connection counts as an outage even where a new one could be had: it was not the handler's doing.
    ``atomic()`` has closed it by now, so the driver's own connection is asked. What is open is rolled back
    first, since a failed transaction answers nothing.
    """
    connection = connections[db]
    cleaner = getattr(_local, "cleaner", None)
    if cleaner is not None and cleaner.cut(db):
        return False
    try:
        if connection.connection is None:
            connection.ensure_connection()
        leave_transaction(connection)
        return bool(connection.is_usable())
    except Exception:
        return False


def depths() -> dict[str, int]:
    """Return how deep in transactions each connection of this thread is, by alias; 0 is in none."""
    return {
        one.alias: len(one.savepoint_ids) + one.in_atomic_block + (not one.autocommit)
        for one in connections.all()  # half the cost of asking which have been made
        if one.connection is not None
    }


def leave_transaction(connection: BaseDatabaseWrapper) -> None:
    """Roll back whatever transaction is open on ``connection``, and restore autocommit."""
    connection.in_atomic_block = False
    connection.savepoint_ids = []
    connection.atomic_blocks = []
    connection.needs_rollback = False
    connection.run_on_commit = []
    # The driver's own, a tenth of what Django's costs: also for a BEGIN that Django knows nothing of. Where
    # nothing is open it asks no server.
    connection.connection.rollback()
    if not connection.autocommit:
        connection.set_autocommit(True)


def close(connection: BaseDatabaseWrapper) -> None:
    """Close ``connection`` in whatever state it is; the next query opens a new one."""
    connection.in_atomic_block = False
    connection.savepoint_ids = []
    connection.needs_rollback = False
    connection.closed_in_transaction = False
    try:
        connection.close()
    except Exception:
        logger.debug("Closing a broken connection failed.", exc_info=True)
        connection.connection = None


def close_all() -> None:
    """Close every connection of this thread."""
    for connection in connections.all(initialized_only=True):
        close(connection)


def _signal_handlers() -> dict[int, Any]:
    """Return what this process does on signals; nothing in a thread that cannot change it."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
