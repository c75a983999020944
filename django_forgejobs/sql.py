"""The few statements the queue lives on, each named, with its reason and the figure behind it.

Every move is one statement of one shape: ``WITH candidate AS MATERIALIZED (SELECT … FOR NO KEY UPDATE
SKIP LOCKED) UPDATE … FROM candidate … RETURNING``. Predicates and assignments are ORM expressions; only
the frame is text.

* MATERIALIZED, not ``id IN (SELECT … LIMIT n)``: the planner may run such a sub-query again for each row;
  with one plan it took 2,000 rows for a limit of one.
* NO KEY UPDATE: a plain FOR UPDATE skips a job that an open transaction references by foreign key.
* ``candidate_id``: a CTE column called ``pk`` in ``id IN (SELECT pk FROM cte)`` may bind to the outer
  table, and then every row matches.
* SKIP LOCKED also when finishing: somebody's open transaction holds up its own row alone, nothing waits,
  so nothing deadlocks.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from django.apps import apps
from django.core.exceptions import EmptyResultSet
from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.models import DateTimeField, F, QuerySet, Value
from django.db.models.base import ModelState
from django.db.models.expressions import RawSQL
from django.db.models.functions import Greatest, Now

from django_forgejobs import faults
from django_forgejobs.dialect import (
    AfterSeconds,
    AsJson,
    AsRead,
    ForEach,
    Fused,
    HistoryAppended,
    IsCandidate,
    Literal,
    Null,
    ReadBy,
    Rows,
    moment,
)
from django_forgejobs.states import Move, RunAt

if TYPE_CHECKING:
    from django_forgejobs.models import Job

T = TypeVar("T")

TABLE = "forgejobs_job"

_TRIES = 10
_GIVE_UP_AFTER = 30.0  # seconds; SQLite waits its busy timeout before each answer


class Compiled(NamedTuple):
    """SQL text and its parameters."""

    text: str
    params: tuple[Any, ...] = ()


class Statement(NamedTuple):
    """A move, compiled: ``frame`` finds the rows, ``update`` writes them and reads ``columns`` back."""

    frame: Compiled
    update: Compiled
    columns: tuple[str, ...]

    @property
    def whole(self) -> Compiled:
        """All of it as one text."""
        text = f"WITH RECURSIVE {self.frame.text} {self.update.text}"
        return Compiled(text, self.frame.params + self.update.params)


# --- What a move writes --------------------------------------------------------------------------


def assignments(move: Move, *, delay: Any = None, error: Any = None, facts: Any = None) -> dict[str, Any]:
    """Return what ``move`` writes, by column: the matrix of moves as expressions.

    ``delay`` is seconds, ``error`` text, ``facts`` a JSON object for the history entry.
    """
    values: dict[str, Any] = {}
    if move.sources != {move.target}:
        values["status"] = Literal(move.target.value)
    if move.attempts is None:
        values |= {"attempts": Value(0), "lease_expirations": Value(0)}
    elif move.attempts:
        values["attempts"] = Greatest(F("attempts") + Value(move.attempts), Value(0))
    if not move.keeps_claim:
        ended = Now() if move.ends else Null()
        values |= {"claim_token": Null(), "locked_until": Null(), "finished_at": ended}
    if move.run_at is RunAt.NOW:
        values["run_at"] = Now()
    elif move.run_at is RunAt.DELAY:
        values["run_at"] = AfterSeconds(delay)
    if move.explained:
        values["last_error"] = error
    if move.recorded:
        values["history"] = HistoryAppended(move.name, Value("{}") if facts is None else facts)
    return values


# --- Moves of rows that a predicate finds --------------------------------------------------------


def move(
    candidates: QuerySet[Job],
    values: Mapping[str, Any],
    *,
    returning: Sequence[str] = (),
) -> list[Job]:
    """Write ``values`` to the rows that ``candidates`` selects; return them as they are now.

    ``returning`` names the columns to read back, all when empty. Rows locked by others are left out. No
    order is promised. If the process dies before it returns, all of it happened or nothing.
    """
    db = candidates.db
    try:
        found = select(candidates.values("id"))
    except EmptyResultSet:  # Django sees that no row can match: an id beyond bigint, an empty list
        return []
    frame = Compiled(f"candidate(candidate_id) AS MATERIALIZED ({found.text})", found.params)
    return run(db, update(db, frame, values, returning))


# --- Finish --------------------------------------------------------------------------------------

_OUTCOME = {
    "id": "bigint",
    "claim_token": "uuid",
    "delay": "float8",
    "error": "text",
    "facts": "text",
    "result": "text",
}


def finish(db: str, the_move: Move, rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Make ``the_move`` with each of ``rows`` that still holds its claim; return the ids of those it moved.

    A row maps names of ``_OUTCOME``, the first two at least: ``delay`` in seconds, ``facts`` and ``result``
    as JSON text. A row that is missing from the answer has lost its claim, or is locked by somebody.
    """
    return {row[0] for row in rows_of(db, finishing(db, the_move, rows))}


def finishing(db: str, the_move: Move, rows: Sequence[Mapping[str, Any]]) -> Statement:
    """Return the statement of ``finish``."""
    told = set().union(*rows)
    frame, update, columns = _finishing(db, the_move, tuple(name for name in _OUTCOME if name in told))
    # As the column has it: UUIDField's own preparation costs more than all the rest of a row.
    token = str if connections[db].features.has_native_uuid_field else attrgetter("hex")
    in_json = json.dumps(rows, default=token)
    return Statement(Compiled(frame.text, (in_json, *frame.params)), update, columns)


@lru_cache(maxsize=128)
def _finishing(db: str, the_move: Move, told: tuple[str, ...]) -> Statement:
    values = assignments(
        the_move,
        delay=RawSQL("candidate.delay", ()),
        error=RawSQL("candidate.error", ()),
        facts=RawSQL("COALESCE(candidate.facts, '{}')", ()),
    )
    if "result" in told:
        values["result"] = AsJson(RawSQL("candidate.result", ()))
    held = (
        jobs(db).running().filter(pk=RawSQL("outcome.id", ()), claim_token=RawSQL("outcome.claim_token", ()))
    )
    found = select(held.values("id"))
    columns = ", ".join(
        f"outcome.{name}" if name in told else f"NULL AS {name}"
        for name in ("delay", "error", "facts", "result")
    )
    frame = (
        f"outcome AS ({expression(db, Rows({name: _OUTCOME[name] for name in told})).text}), "
        f"candidate(candidate_id, delay, error, facts, result) AS MATERIALIZED ("
        f"SELECT found.id, {columns} FROM outcome {for_each(db, found.text)})"
    )
    return update(db, Compiled(frame, found.params), values, ("id",))


# --- Archive -----------------------------------------------------------------------------------------


def archive(ended: QuerySet[Job], *, delete: bool) -> list[int]:
    """Move the jobs that ``ended`` (sliced) selects to the archive table, or only delete them; return
    their ids. One transaction. It begins with its write, so that SQLite never has to turn a reader into
    a writer, which fails at once when another writer was quicker.
    """
    db = ended.db
    found = select(ended.values("id"))
    chosen = f"WITH candidate(candidate_id) AS MATERIALIZED ({found.text})"
    one_of = "id IN (SELECT candidate_id FROM candidate)"
    with transaction.atomic(using=db), connections[db].cursor() as cursor:
        if delete:
            cursor.execute(f"{chosen} DELETE FROM {TABLE} WHERE {one_of} RETURNING id", found.params)
            return [row[0] for row in cursor.fetchall()]
        columns = ", ".join(str(field.column) for field in _model()._meta.concrete_fields)
        cursor.execute(
            f"{chosen} INSERT INTO forgejobs_archivedjob ({columns}) "
            f"SELECT {columns} FROM {TABLE} WHERE {one_of} RETURNING id",
            found.params,
        )
        moved = [row[0] for row in cursor.fetchall()]
        jobs(db).filter(pk__in=moved)._raw_delete(db)
        return moved


# --- The frame -----------------------------------------------------------------------------------


def run(db: str, statement: Statement) -> list[Job]:
    """Execute a move and return the rows that it moved, with the columns that it reads back."""
    return read(db, statement.columns, rows_of(db, statement))


def rows_of(db: str, statement: Statement | Compiled) -> list[tuple[Any, ...]]:
    """Execute one statement that returns rows; in a caller's transaction, within a savepoint."""
    text, params = statement.whole if isinstance(statement, Statement) else statement

    def execute() -> list[tuple[Any, ...]]:
        with _savepoint(db), connections[db].cursor() as cursor:
            cursor.execute(text, params)
            return list(cursor.fetchall())

    return again(db, execute)


def both(db: str, first: Statement, second: Statement) -> tuple[list[int], list[Job]]:
    """Execute two moves of different rows in one transaction; return the ids that the first moved, and the
    rows of the second.

    Where the database can, they are one statement: one round trip, one commit, and no moment at which a
    frozen process could hold the locks.
    """
    fused = expression(db, Fused(first.whole.text, second.whole.text, len(second.columns))).text

    def apart() -> tuple[list[int], list[Job]]:
        with transaction.atomic(using=db):
            return [row[0] for row in rows_of(db, first)], run(db, second)

    if not fused:
        return again(db, apart)
    rows = rows_of(db, Compiled(fused, first.whole.params + second.whole.params))
    claimed = [row[1:] for row in rows if row[0] is None]
    return [row[0] for row in rows if row[0] is not None], read(db, second.columns, claimed)


def read_back(db: str, columns: Iterable[str]) -> str:
    """Return the words after RETURNING for what ``read`` reads."""
    return ", ".join(expression(db, AsRead(TABLE, _field(column))).text for column in columns)


def read(db: str, columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> list[Job]:
    """Return ``rows`` as jobs; a column that was not read back is asked for when it is used.

    By hand: ``Model.from_db`` would cost more than all the rest of a claim, for signals that nobody hears.
    """
    model, names, converters = _reading(db, columns)
    connection = connections[db]
    jobs = []
    for row in rows:
        job = model.__new__(model)
        job._state = ModelState()
        job._state.adding, job._state.db = False, db
        values = job.__dict__
        values.update(zip(names, row, strict=True))
        for name, convert, column in converters:
            if values[name] is not None:
                values[name] = convert(values[name], column, connection)
        jobs.append(job)
    return jobs


@lru_cache(maxsize=64)
def _reading(db: str, columns: tuple[str, ...]) -> tuple[type[Job], list[str], list[tuple[str, Any, Any]]]:
    model, connection = _model(), connections[db]
    by_column = {str(field.column): field for field in model._meta.concrete_fields}
    fields = [by_column[column] for column in columns]
    converters = []
    for field in fields:
        column = field.get_col(TABLE)
        convert = [*connection.ops.get_db_converters(column), *field.get_db_converters(connection)]
        if isinstance(field, DateTimeField) and not convert:
            convert = [moment]
        converters += [(field.attname, one, column) for one in convert]
    return model, [field.attname for field in fields], converters


def again(db: str, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, running it again, bounded, when it loses a race: serialization failure,
    deadlock, SQLite's "locked". Not inside a transaction of the caller: there it is the caller's to repeat.
    """
    started = time.monotonic()
    attempt = 1
    while True:
        try:
            return work()
        except DatabaseError as error:
            last = attempt == _TRIES or time.monotonic() - started > _GIVE_UP_AFTER
            if last or connections[db].in_atomic_block or not faults.is_again(error):
                raise
            time.sleep(random.uniform(0, 0.005 * 2**attempt))  # noqa: S311
            attempt += 1


def _savepoint(db: str) -> AbstractContextManager[Any]:
    return transaction.atomic(using=db) if connections[db].in_atomic_block else nullcontext()


def update(db: str, frame: Compiled, values: Mapping[str, Any], returning: Sequence[str]) -> Statement:
    """Return the UPDATE of the rows that the CTE ``candidate`` of ``frame`` has; it reads back the columns
    named, all when none is.
    """
    fields = _model()._meta.concrete_fields
    written = {_field(name).column: expression(db, value) for name, value in values.items()}
    read = [str(f.column) for f in fields if f.primary_key or not returning or f.name in returning]
    text = (
        f"UPDATE {TABLE} SET "
        + ", ".join(f"{column} = {value.text}" for column, value in written.items())
        + f" FROM candidate WHERE {expression(db, IsCandidate(TABLE)).text} RETURNING "
        + read_back(db, read)
    )
    params = tuple(p for value in written.values() for p in value.params)
    return Statement(frame, Compiled(text, params), tuple(read))


def for_each(db: str, inner: str) -> str:
    return expression(db, ForEach(TABLE, inner)).text


def select(queryset: QuerySet[Any, Any], *, lock: bool = True, by: str = "", limit: bool = False) -> Compiled:
    """Compile ``queryset`` with its lock clause, and read it by the index ``by`` where that must be said.
    With ``limit``, one more parameter is a LIMIT.

    Not ``select_for_update()``: Django refuses to compile that outside a transaction, and one statement
    needs none (BEGIN and COMMIT would be two more round trips).
    """
    connection = connections[queryset.db]
    text, params = queryset.query.get_compiler(queryset.db).as_sql()
    if by:
        table = connection.ops.quote_name(TABLE)
        read = expression(queryset.db, ReadBy(table, by)).text
        text = text.replace(f"FROM {table}", f"FROM {read}", 1)
    if limit:
        text += " LIMIT %s"
    if lock and connection.features.has_select_for_update_skip_locked:
        text += " " + connection.ops.for_update_sql(skip_locked=True, no_key=True)
    return Compiled(text, tuple(params))


def expression(db: str, expression: Any) -> Compiled:
    query = jobs(db).all().query
    compiler = query.get_compiler(db)
    resolved = expression.resolve_expression(query, allow_joins=False, for_save=True)
    text, params = compiler.compile(resolved)
    return Compiled(text, tuple(params))


def _field(name: str) -> Any:
    return _model()._meta.get_field(name)


def _model() -> type[Job]:
    return apps.get_model("forgejobs", "Job")


def jobs(db: str) -> Any:
    return _model().objects.using(db)
