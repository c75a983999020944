"""Wake-ups, the sending half: after a commit that brought due jobs, one NOTIFY for their queues.

A hint and no more: polling is the truth. Whatever goes wrong here costs a job a moment, and its producer
nothing. Where a database cannot notify (SQLite), the listener looks whether the file has changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

from django.db import connections

from django_forgejobs import conf, sql
from django_forgejobs.dialect import Notify

logger = logging.getLogger("django_forgejobs")

CHANNEL = "forgejobs"

#: Seconds for which a process sends no second hint for a queue. Who was woken looks again that much later, so
#: that the jobs of a burst are found, and their producer pays for one NOTIFY and not for thousands.
HELD_BACK = 0.025

#: Queues to remember a time for; more of them than that, and all times are forgotten.
_REMEMBERED = 1000

_sent: dict[tuple[str, str], float] = {}


def enqueued(db: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Wake the workers of the queues of those ``rows``, as ``intake`` makes them, that are due now."""
    if _wanted(db):
        now = datetime.now(UTC)
        due(db, {row["queue"] for row in rows if (row["run_at"] or now) <= now and not row["delay"]})


def due(db: str, queues: Collection[str]) -> None:
    """Wake the workers of ``queues`` when the transaction at hand is committed.

    Not inside it: a NOTIFY takes a lock at commit that all databases of the server share, and commits would
    queue for it. Nothing is sent where autocommit is off and nobody says when the commit was; nothing after
    a rollback, of a savepoint too. Never raises; if the process dies between commit and hint, polling finds
    the jobs.
    """
    if not queues or not _wanted(db):
        return
    connection = connections[db]
    if connection.in_atomic_block:
        connection.on_commit(partial(_send, db, queues), robust=True)
    elif connection.get_autocommit():
        _send(db, queues)


def _wanted(db: str) -> bool:
    return conf.current().LISTEN_DATABASE is not None and bool(statement(db))


@lru_cache(maxsize=8)
def statement(db: str) -> str:
    """Return the statement that wakes a list of queues; "" where the database knows none."""
    return sql.expression(db, Notify(CHANNEL)).text


def _send(db: str, queues: Collection[str]) -> None:
    now = time.monotonic()  # before the hint is on its way: who hears it looks again no earlier
    silent = [queue for queue in queues if now - _sent.get((db, queue), -HELD_BACK) >= HELD_BACK]
    if not silent:
        return
    connection = connections[db]
    try:
        # The driver's own cursor: no hint shall be counted by assertNumQueries or recorded as a query.
        with connection.connection.cursor() as cursor:
            cursor.execute(statement(db), [silent])
    except Exception:
        connection.errors_occurred = True  # at the end of the request Django looks whether it still works
        logger.debug("A hint for the queues %s was not sent; polling finds the jobs.", silent, exc_info=True)
        return
    if len(_sent) > _REMEMBERED:
        _sent.clear()
    _sent.update({(db, queue): now for queue in silent})
