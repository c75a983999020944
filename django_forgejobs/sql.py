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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from django.apps import apps
from django.core.exceptions import EmptyResultSet
from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.models import F, QuerySet, UUIDField, Value
from django.db.models.expressions import RawSQL
from django.db.models.functions import Greatest, Now

from django_forgejobs import faults
from django_forgejobs.dialect import (
    AfterSeconds,
    AsJson,
    ForEach,
    HistoryAppended,
    Literal,
    Null,
    ReadBy,
    Rows,
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


def finish(db: str, the_move: Move, rows: Sequence[Mapping[str, Any]]) -> list[Job]:
    """Make ``the_move`` with each of ``rows`` that still holds its claim; return those it moved.

    A row maps the names of ``_OUTCOME``: ``delay`` in seconds, ``facts`` and ``result`` as JSON text or
    None. A row that is missing from the answer has lost its claim, or is locked by somebody.
    """
    has_result = any(row["result"] is not None for row in rows)
    text, params = _finish(db, the_move, has_result)
    token = UUIDField()
    prepared = [
        {**row, "claim_token": str(token.get_db_prep_value(row["claim_token"], connections[db]))}
        for row in rows
    ]
    return run(db, Compiled(text, (json.dumps(prepared), *params)))


@lru_cache(maxsize=64)
def _finish(db: str, the_move: Move, has_result: bool) -> Compiled:
    values = assignments(
        the_move,
        delay=RawSQL("candidate.delay", ()),
        error=RawSQL("candidate.error", ()),
        facts=RawSQL("COALESCE(candidate.facts, '{}')", ()),
    )
    if has_result:
        values["result"] = AsJson(RawSQL("candidate.result", ()))
    held = (
        jobs(db).running().filter(pk=RawSQL("outcome.id", ()), claim_token=RawSQL("outcome.claim_token", ()))
    )
    found = select(held.values("id"))
    frame = (
        f"outcome AS ({expression(db, Rows(_OUTCOME)).text}), "
        f"candidate(candidate_id, delay, error, facts, result) AS MATERIALIZED ("
        f"SELECT found.id, outcome.delay, outcome.error, outcome.facts, outcome.result "
        f"FROM outcome {for_each(db, found.text)})"
    )
    return update(db, Compiled(frame, found.params), values, ("claims",))


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


def run(db: str, statement: Compiled) -> list[Job]:
    """Execute one statement that returns job rows; in a caller's transaction, within a savepoint."""

    def execute() -> list[Job]:
        with _savepoint(db):
            return list(jobs(db).raw(statement.text, statement.params))

    return again(db, execute)


def again(db: str, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, running it again, bounded, when it loses a race: serialization failure,
    deadlock, SQLite's "locked". Not inside a transaction of the caller: there it is the caller's to repeat.
    """
    connection = connections[db]
    started = time.monotonic()
    attempt = 1
    while True:
        try:
            return work()
        except DatabaseError as error:
            last = attempt == _TRIES or time.monotonic() - started > _GIVE_UP_AFTER
            if last or connection.in_atomic_block or not faults.is_again(error):
                raise
            time.sleep(random.uniform(0, 0.005 * 2**attempt))  # noqa: S311
            attempt += 1


def _savepoint(db: str) -> AbstractContextManager[Any]:
    return transaction.atomic(using=db) if connections[db].in_atomic_block else nullcontext()


def update(db: str, frame: Compiled, values: Mapping[str, Any], returning: Sequence[str]) -> Compiled:
    fields = _model()._meta.concrete_fields
    written = {_field(name).column: expression(db, value) for name, value in values.items()}
    read = [f.column for f in fields if f.primary_key or not returning or f.name in returning]
    text = (
        f"WITH RECURSIVE {frame.text} UPDATE {TABLE} SET "
        + ", ".join(f"{column} = {value.text}" for column, value in written.items())
        + f" FROM candidate WHERE {TABLE}.id = candidate.candidate_id RETURNING "
        + ", ".join(f"{TABLE}.{column}" for column in read)
    )
    params = (*frame.params, *(p for value in written.values() for p in value.params))
    return Compiled(text, params)


def for_each(db: str, inner: str) -> str:
    return expression(db, ForEach(TABLE, inner)).text


def select(queryset: QuerySet[Any, Any], *, lock: bool = True, by: str = "") -> Compiled:
    """Compile ``queryset`` with its lock clause, and read it by the index ``by`` where that must be said.

    Not ``select_for_update()``: Django refuses to compile that outside a transaction, and one statement
    needs none (BEGIN and COMMIT would be two more round trips).
    """
    connection = connections[queryset.db]
    text, params = queryset.query.get_compiler(queryset.db).as_sql()
    if by:
        table = connection.ops.quote_name(TABLE)
        read = expression(queryset.db, ReadBy(table, by)).text
        text = text.replace(f"FROM {table}", f"FROM {read}", 1)
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
