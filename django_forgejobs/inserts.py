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

from django.apps import apps
from django.db import connections, transaction
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from django_forgejobs import hints, signals, sql
from django_forgejobs.dialect import AfterSeconds, AsJson, Rows
from django_forgejobs.exceptions import JobError

if TYPE_CHECKING:
    from django_forgejobs.models import Job

#: Rows of one INSERT; and characters of payload after which it takes no further row.
ROWS = 2000
CHARACTERS = 16_000_000

#: What ``intake`` makes: ``payload`` is JSON text; ``run_at`` an aware datetime, or ``delay`` seconds from
#: now, or neither.
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

#: What the table gives a row that names nothing else.
_DEFAULTS = {"queue": "default", "priority": 0, "max_attempts": 1}


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
    return _insert(rows, db, _whole(db))


def ids(rows: Sequence[Row], db: str) -> list[int]:
    """Do what ``jobs`` does and return ids; no more is read back, unless a receiver of ``enqueued`` asks."""
    return [one.id for one in _insert(rows, db, _whole(db) if signals.enqueued.receivers else _IDS)]


class _Read(NamedTuple):
    """How stored jobs come back: the columns of one without a key, and of one with; what is made of rows of
    those columns, and of a queryset.
    """

    keyless: str
    keyed: str
    made: Callable[[str, Sequence[tuple[Any, ...]]], list[Any]]
    found: Callable[[Any], list[Any]]


_IDS = _Read(
    "id",
    ", ".join(Known._fields),
    lambda db, stored: list(starmap(Known, stored)),
    lambda found: list(starmap(Known, found.values_list(*Known._fields))),
)


@lru_cache(maxsize=8)
def _whole(db: str) -> _Read:
    columns = tuple(str(field.column) for field in apps.get_model("forgejobs", "Job")._meta.concrete_fields)
    names = sql.read_back(db, columns)
    return _Read(names, names, lambda db, stored: sql.read(db, columns, stored), list)


def _insert(rows: Sequence[Row], db: str, read: _Read) -> list[Any]:
    if len(rows) == 1 and rows[0]["idempotency_key"] is None:
        # Most jobs come this way, and what it costs is measured against a bare INSERT.
        parts, keys = [rows], False
    else:
        keyless = [row for row in rows if row["idempotency_key"] is None]
        parts, keys = list(_parts(keyless)), len(keyless) < len(rows)

    def insert() -> list[Any]:
        new = placed = [one for part in parts for one in _run(db, part, read)]
        if keys:
            new, placed = _insert_keyed(db, rows, placed, read)
        if new:
            _tell(db, rows, new)
        return placed

    # One statement needs no transaction, and in the caller's no savepoint: decision 0015.
    alone = len(rows) <= 1 or (len(parts) == 1 and not keys)
    return sql.again(db, insert if alone else transaction.atomic(using=db)(insert))


def _insert_keyed(
    db: str, rows: Sequence[Row], keyless: Sequence[Any], read: _Read
) -> tuple[list[Any], list[Any]]:
    """Insert those of ``rows`` that have a key, ``keyless`` being what became of the others; return all that
    was inserted, and what there is now for each row.
    """
    by_key = {row["idempotency_key"]: row for row in reversed(rows) if row["idempotency_key"] is not None}
    new = list(keyless)
    found: dict[str, Any] = {}
    # In sorted order, so that two callers with the same keys cannot deadlock.
    for part in _parts([by_key[key] for key in sorted(by_key)]):
        # More than one round only if a key's row is archived between our INSERT and our SELECT.
        while missing := [row for row in part if row["idempotency_key"] not in found]:
            inserted = _run(db, missing, read)
            new += inserted
            found |= {one.idempotency_key: one for one in inserted}
            if rivals := [row["idempotency_key"] for row in missing if row["idempotency_key"] not in found]:
                theirs = read.found(sql.jobs(db).filter(idempotency_key__in=rivals))
                found |= {one.idempotency_key: one for one in theirs}
    unnamed = iter(keyless)
    return new, [
        next(unnamed) if row["idempotency_key"] is None else _of_its_type(row, found) for row in rows
    ]


def _of_its_type(row: Row, found: Mapping[str, Any]) -> Any:
    one = found[row["idempotency_key"]]
    if one.type != row["type"]:
        raise JobError(
            f"idempotency_key {one.idempotency_key!r} belongs to job {one.id} of type "
            f'"{one.type}", not "{row["type"]}". Put the type into the key.'
        )
    return one


def _tell(db: str, rows: Sequence[Row], new: Sequence[Any]) -> None:
    """Tell the workers, by a hint, and whoever receives ``enqueued``, when the transaction is committed."""
    hints.enqueued(db, rows)
    connection = connections[db]
    # Where autocommit is off, nobody says when the commit was.
    if signals.enqueued.receivers and (connection.in_atomic_block or connection.get_autocommit()):

        def announce() -> None:
            for job in new:
                signals.send(signals.enqueued, job=job)

        transaction.on_commit(announce, using=db, robust=True)


# --- The statements ------------------------------------------------------------------------------


def _run(db: str, rows: Sequence[Row], read: _Read) -> list[Any]:
    """Insert ``rows``, all with keys or all without; return those whose key did not exist, in order."""
    keyed = rows[0]["idempotency_key"] is not None
    returning = read.keyed if keyed else read.keyless
    if len(rows) == 1:
        given = {name: value for name, value in _ready(db, rows[0]).items() if value != _DEFAULTS.get(name)}
        return _answer(db, _text_of_one(db, tuple(given), returning), list(given.values()), read)
    text = json.dumps([_ready(db, row) for row in rows])
    # Ids are given in the order of the rows, but RETURNING promises none.
    return sorted(_answer(db, _text_of_many(db, keyed, returning), [text], read), key=attrgetter("id"))


def _answer(db: str, text: str, params: Sequence[Any], read: _Read) -> list[Any]:
    with connections[db].cursor() as cursor:
        cursor.execute(text, params)
        return read.made(db, cursor.fetchall())


def _ready(db: str, row: Row) -> Row:
    if row["run_at"] is None:
        return row
    return {**row, "run_at": str(connections[db].ops.adapt_datetimefield_value(row["run_at"]))}


@lru_cache(maxsize=64)
def _text_of_one(db: str, given: tuple[str, ...], returning: str) -> str:
    """Of the values ``given`` alone: each that is bound and parsed for nothing costs a single INSERT 1 %."""
    values = dict.fromkeys(given, "%s")
    if "delay" in given:
        values["run_at"] = _after(db, values.pop("delay"))
    into = f"INSERT INTO {sql.TABLE} ({', '.join(values)}) VALUES ({', '.join(values.values())})"
    return _ending(into, "idempotency_key" in given, returning)


@lru_cache(maxsize=64)
def _text_of_many(db: str, keyed: bool, returning: str) -> str:
    values = {name: f"new.{name}" for name in _NEW}
    now = sql.expression(db, Now()).text
    values["run_at"] = f"COALESCE(new.run_at, {_after(db, values.pop('delay'))}, {now})"
    values["payload"] = sql.expression(db, AsJson(RawSQL("new.payload", ()))).text
    # WHERE true: without it SQLite reads ON CONFLICT as a join condition.
    into = (
        f"INSERT INTO {sql.TABLE} ({', '.join(values)}) SELECT {', '.join(values.values())} "
        f"FROM ({sql.expression(db, Rows(_NEW)).text}) AS new WHERE true"
    )
    return _ending(into, keyed, returning)


def _ending(into: str, keyed: bool, returning: str) -> str:
    # Of the key alone: an id that is taken, since the sequence was set back, is an error and no rival.
    conflict = " ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING" if keyed else ""
    return f"{into}{conflict} RETURNING {returning}"


def _after(db: str, seconds: str) -> str:
    return sql.expression(db, AfterSeconds(RawSQL(seconds, ()))).text


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
