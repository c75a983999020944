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
from collections.abc import Iterator
from contextlib import contextmanager
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

#: Seconds of idleness after which a connection is asked whether it still lives.
IDLE_BEFORE_CHECK = 2.0

#: Of this thread: ``since`` when it is idle, and which driver connections its job has ``used``, by alias.
_local = threading.local()


@contextmanager
def jobs() -> Iterator[None]:
    """Clean this thread up when the job inside is over, however it ends.

    An open transaction is rolled back and autocommit restored; a connection that is broken or whose
    session was changed is closed; signal handlers are restored.
    """
    changed: set[str] = set()
    _local.used = {}
    handlers = _signal_handlers()
    _drop_dead_connections()
    watches = {connection: _Watch(connection.alias, changed) for connection in connections.all()}
    for connection, watch in watches.items():
        connection.execute_wrappers.append(watch)
    try:
        yield
    finally:
        for connection, watch in watches.items():
            # By name, not the last one: instrumentation adds its own when a connection is made.
            if watch in connection.execute_wrappers:
                connection.execute_wrappers.remove(watch)
        for connection in connections.all(initialized_only=True):
            _clean(connection, session_changed=connection.alias in changed)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        _local.used = {}
        _local.since = time.monotonic()


def _drop_dead_connections() -> None:
    """Close connections that died while this thread was idle, before a job trips over them."""
    if time.monotonic() - getattr(_local, "since", 0.0) < IDLE_BEFORE_CHECK:
        return
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and not connection.is_usable():
            close(connection)


class _Watch:
    """An execute wrapper that notes which connections saw a statement that outlives its transaction."""

    def __init__(self, alias: str, changed: set[str]) -> None:
        self.alias, self.changed = alias, changed

    def __call__(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        if _SESSION.search(_text(sql)):
            self.changed.add(self.alias)
        _local.used[self.alias] = context["connection"].connection
        return execute(sql, params, many, context)


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
        _leave_transaction(connection)
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
    if getattr(getattr(_local, "used", {}).get(db), "closed", False):
        return False
    try:
        if connection.connection is None:
            connection.ensure_connection()
        _leave_transaction(connection)
        return bool(connection.is_usable())
    except Exception:
        return False


def depths() -> dict[str, int]:
    """Return how deep in transactions each connection of this thread is, by alias; 0 is in none."""
    return {
        one.alias: len(one.savepoint_ids) + one.in_atomic_block + (not one.autocommit)
        for one in connections.all(initialized_only=True)
        if one.connection is not None
    }


def _leave_transaction(connection: BaseDatabaseWrapper) -> None:
    connection.in_atomic_block = False
    connection.savepoint_ids = []
    connection.atomic_blocks = []
    connection.needs_rollback = False
    # Also for a BEGIN that Django knows nothing of; where nothing is open the driver asks no server.
    connection.rollback()
    if not connection.get_autocommit():
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
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in signal.valid_signals()}
