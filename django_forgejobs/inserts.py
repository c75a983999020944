"""How rows come in: the INSERTs, the idempotency keys, and who is told of new jobs after the commit.

One row is an INSERT … VALUES; many are read from one JSON parameter, thousands to a statement. Only rows with
keys can find something in their way, so only they pay for ON CONFLICT, a seventh of an INSERT's time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections, transaction
from django.db.models.expressions import RawSQL

from django_forgejobs import signals, sql
from django_forgejobs.dialect import AfterSeconds, AsJson, Rows
from django_forgejobs.exceptions import JobError

if TYPE_CHECKING:
    from django_forgejobs.models import Job

#: Rows of one INSERT; and characters of payload after which it takes no further row.
ROWS = 2000
CHARACTERS = 16_000_000

#: What ``intake`` makes: ``payload`` is JSON text, ``run_at`` an aware datetime or None, and then ``delay``
#: counts, in seconds from now.
Row = Mapping[str, Any]
_NEW = {
    "type": "text",
    "payload": "text",
    "queue": "text",
    "priority": "smallint",
    "max_attempts": "int",
    "idempotency_key": "text",
    "run_at": "timestamptz",
    "delay": "float8",
}


class Known(NamedTuple):
    """What is read of a stored job when only its id is asked for."""

    id: int
    type: str = ""
    idempotency_key: str | None = None


def jobs(rows: Sequence[Row], db: str) -> list[Job]:
    """Insert ``rows``, all or none, as part of the caller's transaction; return their jobs in order.

    A row whose idempotency key exists is not inserted: the job that has it is returned. An uncommitted rival
    for a key is waited for: the unique index decides. Raises ``JobError`` when the job with the key is of
    another type.
    """
    return _insert(rows, db, _JOBS)


def ids(rows: Sequence[Row], db: str) -> list[int]:
    """Do what ``jobs`` does and return ids; no more is read back, unless a receiver of ``enqueued`` asks."""
    return [one.id for one in _insert(rows, db, _JOBS if signals.enqueued.receivers else _IDS)]


class _Read(NamedTuple):
    """How stored jobs come back: which columns of a row without a key, which of one with; what is made of a
    statement's answer, and of a queryset.
    """

    keyless: str
    keyed: str
    answer: Callable[[str, sql.Compiled], list[Any]]
    found: Callable[[Any], list[Any]]


def _known(db: str, statement: sql.Compiled) -> list[Known]:
    with connections[db].cursor() as cursor:
        cursor.execute(statement.text, statement.params)
        return list(starmap(Known, cursor.fetchall()))


_IDS = _Read(
    "id",
    ", ".join(Known._fields),
    _known,
    lambda found: list(starmap(Known, found.values_list(*Known._fields))),
)
_JOBS = _Read("*", "*", lambda db, statement: list(sql.jobs(db).raw(*statement)), list)


def _insert(rows: Sequence[Row], db: str, read: _Read) -> list[Any]:
    keyless = [row for row in rows if row["idempotency_key"] is None]
    keyed = {row["idempotency_key"]: row for row in reversed(rows) if row["idempotency_key"] is not None}
    parts = list(_parts(keyless))
    # In sorted order, so that two callers with the same keys cannot deadlock.
    keyed_parts = list(_parts([keyed[key] for key in sorted(keyed)]))

    def insert() -> list[Any]:
        new = [one for part in parts for one in _run(db, part, read)]
        unnamed = iter(tuple(new))
        named: dict[str, Any] = {}
        for part in keyed_parts:
            inserted, found = _insert_keyed(db, part, read)
            new += inserted
            named |= found
        placed = [
            next(unnamed) if (key := row["idempotency_key"]) is None else _of_type(row["type"], named[key])
            for row in rows
        ]
        _tell(new, db)
        return placed

    # One statement needs no transaction, and in the caller's no savepoint: decision 0015.
    alone = len(rows) == 1 or (len(parts) == 1 and not keyed)
    return sql.again(db, insert if alone else transaction.atomic(using=db)(insert))


def _insert_keyed(db: str, rows: Sequence[Row], read: _Read) -> tuple[list[Any], dict[str, Any]]:
    """Return what was inserted of ``rows``, each with a key of its own; and what has the keys now."""
    new: list[Any] = []
    found: dict[str, Any] = {}
    # More than one round only if a key's row is archived between our INSERT and our SELECT.
    while missing := [row for row in rows if row["idempotency_key"] not in found]:
        inserted = _run(db, missing, read)
        new += inserted
        found |= {one.idempotency_key: one for one in inserted}
        rivals = [key for row in missing if (key := row["idempotency_key"]) not in found]
        theirs = read.found(sql.jobs(db).filter(idempotency_key__in=rivals)) if rivals else ()
        found |= {one.idempotency_key: one for one in theirs}
    return new, found


def _of_type(type_: str, stored: Any) -> Any:
    if stored.type != type_:
        raise JobError(
            f"idempotency_key {stored.idempotency_key!r} belongs to job {stored.id} of type "
            f'"{stored.type}", not "{type_}". Put the type into the key.'
        )
    return stored


def _tell(new: Sequence[Any], db: str) -> None:
    if signals.enqueued.receivers and new:

        def announce() -> None:
            for job in new:
                signals.send(signals.enqueued, job=job)

        transaction.on_commit(announce, using=db, robust=True)


# --- The statements ------------------------------------------------------------------------------


def _run(db: str, rows: Sequence[Row], read: _Read) -> list[Any]:
    """Insert ``rows``, all with keys or all without; return those whose key did not exist, in order."""
    adapt = connections[db].ops.adapt_datetimefield_value
    ready = [row if row["run_at"] is None else {**row, "run_at": str(adapt(row["run_at"]))} for row in rows]
    keyed = rows[0]["idempotency_key"] is not None
    text = _text(db, keyed, len(ready) == 1, read.keyed if keyed else read.keyless)
    params = [json.dumps(ready)] if len(ready) > 1 else [ready[0][name] for name in _NEW]
    # Ids are given in the order of the rows, but RETURNING promises none.
    return sorted(read.answer(db, sql.Compiled(text, tuple(params))), key=attrgetter("id"))


@lru_cache(maxsize=32)
def _text(db: str, keyed: bool, single: bool, returning: str) -> str:
    new = {name: "%s" if single else f"new.{name}" for name in _NEW}
    due = sql.expression(db, AfterSeconds(RawSQL(new.pop("delay"), ()))).text
    new["run_at"] = f"COALESCE({new['run_at']}, {due})"
    new["payload"] = sql.expression(db, AsJson(RawSQL(new["payload"], ()))).text
    values = ", ".join(new.values())
    text = f"INSERT INTO {sql.TABLE} ({', '.join(new)}) "
    if single:
        text += f"VALUES ({values})"
    else:
        # WHERE true: without it SQLite reads ON CONFLICT as a join condition.
        text += f"SELECT {values} FROM ({sql.expression(db, Rows(_NEW)).text}) AS new WHERE true"
    if keyed:
        # Of the key alone: an id that is taken, since the sequence was set back, is an error and no rival.
        text += " ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING"
    return f"{text} RETURNING {returning}"


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Cut ``rows`` into what one statement takes."""
    start = size = 0
    for end, row in enumerate(rows):
        if end - start == ROWS or size > CHARACTERS:
            yield rows[start:end]
            start, size = end, 0
        size += len(row["payload"])
    if rows:
        yield rows[start:]
