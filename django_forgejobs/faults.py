"""Which database errors are an outage, which mean "again", and which are somebody's bug.

The one place that reads SQLSTATE. An outage is never a job's fault; the statement may or may not have
happened, and its author asks the row.
https://www.postgresql.org/docs/current/errcodes-appendix.html
"""

from __future__ import annotations

from collections.abc import Iterator

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError

# Classes of PostgreSQL: connection, resources, object not in the state wanted, operator intervention,
# system error.
_OUTAGE_CLASSES = ("08", "53", "55", "57", "58")
_OUTAGE_CODES = frozenset(
    {
        "25P02",  # in a failed transaction: what failed it was the outage
        "25P03",  # idle_in_transaction_session_timeout: a frozen process waking
        "25P04",  # transaction_timeout
        "25006",  # read-only transaction: a standby after a failover
        "42P05",  # a pooler handed us a session that has our prepared statement …
        "26000",  # … or one that has not
    }
)
_AGAIN_CODES = frozenset({"40001", "40P01"})  # serialization failure, deadlock
_LINKS = 20  # of a chain of exceptions that are looked at
_SQLITE_BUSY = ("database is locked", "database table is locked", "database schema is locked")
_SQLITE_OUTAGE = (
    "unable to open database file",
    "disk i/o error",
    "database or disk is full",
    "readonly database",
)


def sqlstate(error: BaseException) -> str | None:
    """Return the five-character SQLSTATE of ``error`` or of what caused it, if there is one."""
    for link in _chain(error):
        if code := getattr(link, "sqlstate", None):
            return str(code)
    return None


def is_again(error: BaseException) -> bool:
    """Whether the statement lost a race and may simply be repeated: nothing of it happened."""
    if not isinstance(error, DatabaseError):
        return False
    code = sqlstate(error)
    if code is not None:
        return code in _AGAIN_CODES
    return any(word in str(error) for word in _SQLITE_BUSY)


def is_outage(error: BaseException) -> bool:
    """Whether the database, not the statement, is at fault.

    An operational error without a SQLSTATE is one too: psycopg has none to give when the connection
    breaks, a COMMIT in doubt included.
    """
    if not isinstance(error, DatabaseError) or is_again(error):
        return False
    code = sqlstate(error)
    if code is not None:
        return code[:2] in _OUTAGE_CLASSES or code in _OUTAGE_CODES
    if isinstance(error, InterfaceError):
        return True
    if not isinstance(error, OperationalError):
        return False
    text = str(error).lower()
    sqlite_error = any(type(link).__module__ == "sqlite3" for link in _chain(error))
    return not sqlite_error or any(word in text for word in _SQLITE_OUTAGE)


def comes_from_outage(error: BaseException) -> bool:
    """Whether an outage is ``error``, or what it was raised from or while handling."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _LINKS:
        if is_outage(link):
            return True
        seen.add(id(link))
        try:
            link = link.__cause__ or link.__context__
        except Exception:  # a class may make anything of these
            return False
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
