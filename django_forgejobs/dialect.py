"""SQL words that PostgreSQL and SQLite spell differently, as expressions: Django's compiler picks the
spelling, so no other module asks which database it talks to.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.db.models import (
    CharField,
    DateTimeField,
    Expression,
    F,
    Func,
    IntegerField,
    JSONField,
    UUIDField,
)
from django.db.models.functions import Now

#: ``history`` keeps this many first and last entries, and a count of those between.
HISTORY_KEPT = 10

_SQLITE_ISO = "STRFTIME('%%Y-%%m-%%dT%%H:%%M:%%f+00:00', {})"


class Literal(Expression):
    """A word written into the SQL instead of bound: a bound ``status`` cannot use a partial index under
    a generic plan (measured: 55 ms instead of 1.1), nor ever on SQLite.
    """

    def __init__(self, word: str) -> None:
        super().__init__(output_field=CharField())
        self.word = str(word)
        if not self.word.isidentifier():
            raise ValueError(f"{word!r} is not a plain word")

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        return f"'{self.word}'", []


class Zero(Expression):
    """0, written out, where a partial index has to be recognised."""

    def __init__(self) -> None:
        super().__init__(output_field=IntegerField())

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        return "0", []


class Null(Expression):
    """NULL, written out: a bound one has no type for PostgreSQL to go by."""

    def __init__(self) -> None:
        super().__init__(output_field=CharField())

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        return "NULL", []


class AfterSeconds(Func):
    """``since`` (now, when not given) plus a number of seconds."""

    output_field = DateTimeField()

    def __init__(self, seconds: Any, since: Any = None) -> None:
        super().__init__(seconds, Now() if since is None else since)

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return self.as_sql(
            compiler,
            connection,
            template="(%(expressions)s)",
            arg_joiner=" * INTERVAL '1 second' + ",
        )

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        seconds, since = (compiler.compile(part) for part in self.source_expressions)
        sql = f"STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', {since[0]}, PRINTF('%%+.3f seconds', {seconds[0]}))"
        return sql, [*since[1], *seconds[1]]


class NewToken(Func):
    """A random UUID for each row."""

    output_field = UUIDField()

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return "GEN_RANDOM_UUID()", []

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return "LOWER(HEX(RANDOMBLOB(16)))", []


class AsJson(Func):
    """A text column as the type of the JSON columns."""

    output_field = JSONField()

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return self.as_sql(compiler, connection, template="(%(expressions)s)::jsonb")

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return self.as_sql(compiler, connection, template="%(expressions)s")


class AsRead(Func):
    """A column as an UPDATE reads it back: a time as text where the driver takes 3 µs to make a ``datetime``
    of one; ``moment`` takes a tenth of that.
    """

    def __init__(self, table: str, field: Any) -> None:
        super().__init__(output_field=CharField())
        self.column, self.is_time = f"{table}.{field.column}", isinstance(field, DateTimeField)

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return self.column + "::text" * self.is_time, []

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return self.column, []


def moment(text: str, expression: Any = None, connection: Any = None) -> datetime:
    """Return the time that ``AsRead`` has read, in UTC; a database converter in Django's sense."""
    return datetime.fromisoformat(text).astimezone(UTC)


class JsonType(Func):
    """The type of a JSON column's value: "array", "object" and so on."""

    output_field = CharField()

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return self.as_sql(compiler, connection, function="JSONB_TYPEOF")

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return self.as_sql(compiler, connection, function="JSON_TYPE")


class ServerStarted(Func):
    """When the database server came up; long ago for one without a server."""

    output_field = DateTimeField()

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return "PG_POSTMASTER_START_TIME()", []

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return "'1970-01-01 00:00:00.000'", []


class Notify(Func):
    """A statement that tells a channel each of a list of words (a bare ``%s``); "" where there are none."""

    def __init__(self, channel: str) -> None:
        super().__init__(Literal(channel), output_field=CharField())

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return self.as_sql(
            compiler,
            connection,
            template="SELECT PG_NOTIFY(%(expressions)s, word) FROM UNNEST(%%s::text[]) AS word",
        )

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return "", []


class HistoryAppended(Func):
    """``history`` with one entry more, in SQL, so that no reader's copy is ever written back.

    The entry takes time, claim, worker and start from the row and the database's clock; ``facts`` (a JSON
    object) is merged over it. At ``2 * HISTORY_KEPT`` entries the oldest of the last half gives way to
    ``{"event": "omitted", "count": n}``.
    """

    output_field = JSONField()

    def __init__(self, event: str, facts: Any) -> None:
        super().__init__(F("history"), F("claims"), F("locked_by"), F("started_at"), facts, Literal(event))

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        history, claims, worker, started, facts, event = self._compiled(compiler)
        entry = (
            f"(JSONB_BUILD_OBJECT('at', STATEMENT_TIMESTAMP(), 'event', {event[0]}, 'claim', {claims[0]}, "
            f"'worker', {worker[0]}, 'started', {started[0]}) || ({facts[0]})::jsonb)"
        )
        n = HISTORY_KEPT
        sql = (
            f"CASE WHEN JSONB_ARRAY_LENGTH({history[0]}) < {2 * n} THEN {history[0]}"
            f" WHEN JSONB_ARRAY_LENGTH({history[0]}) = {2 * n} THEN JSONB_SET({history[0]}, '{{{n}}}',"
            f""" '{{"event": "omitted", "count": 1}}')"""
            f" ELSE JSONB_SET({history[0]} - {n + 1}, '{{{n},count}}',"
            f" TO_JSONB(COALESCE(({history[0]} -> {n} ->> 'count')::int, 0) + 1)) END || {entry}"
        )
        return sql, list(facts[1])

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        history, claims, worker, started, facts, event = self._compiled(compiler)
        n = HISTORY_KEPT
        at, started_at = _SQLITE_ISO.format("'NOW'"), _SQLITE_ISO.format(started[0])
        entry = (
            f"JSON_PATCH(JSON_OBJECT('at', {at}, 'event', {event[0]}, 'claim', {claims[0]}, "
            f"'worker', {worker[0]}, 'started', {started_at}), {facts[0]})"
        )
        kept = (
            f"CASE WHEN JSON_ARRAY_LENGTH({history[0]}) < {2 * n} THEN {history[0]}"
            f" WHEN JSON_ARRAY_LENGTH({history[0]}) = {2 * n} THEN JSON_SET({history[0]}, '$[{n}]',"
            f""" JSON('{{"event": "omitted", "count": 1}}'))"""
            f" ELSE JSON_SET(JSON_REMOVE({history[0]}, '$[{n + 1}]'), '$[{n}].count',"
            f" JSON_EXTRACT({history[0]}, '$[{n}].count') + 1) END"
        )
        return f"JSON_INSERT({kept}, '$[#]', {entry})", list(facts[1])

    def _compiled(self, compiler: Any) -> list[tuple[str, list[Any]]]:
        return [compiler.compile(part) for part in self.source_expressions]


class Rows(Func):
    """A SELECT that reads rows from one JSON parameter (a bare ``%s``): a batch of any size is one
    parameter and one statement text.
    """

    def __init__(self, columns: dict[str, str]) -> None:
        super().__init__(output_field=CharField())
        self.columns = columns

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        columns = ", ".join(f"{name} {kind}" for name, kind in self.columns.items())
        return f"SELECT * FROM JSON_TO_RECORDSET(%s::json) AS r({columns})", []

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        columns = ", ".join(f"JSON_EXTRACT(value, '$.{name}') AS {name}" for name in self.columns)
        return f"SELECT {columns} FROM JSON_EACH(%s)", []


class ReadBy(Func):
    """A table in FROM, read by the index named. SQLite, with no statistics or with some, would rather read
    all rows of a queue, or sort the whole table, for a LIMIT of one.
    """

    def __init__(self, table: str, index: str) -> None:
        super().__init__(output_field=CharField())
        self.table, self.index = table, index

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return self.table, []

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return f"{self.table} INDEXED BY {self.index}", []


class ForEach(Func):
    """Join the rows before it, each with the rows that ``inner`` finds for it, as ``found``.

    ``inner`` is a compiled SELECT that reads ``id`` first and may name columns of the rows before:
    LATERAL, or a correlated IN where the database has no LATERAL.
    """

    def __init__(self, table: str, inner: str) -> None:
        super().__init__(output_field=CharField())
        self.table, self.inner = table, inner

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return f"CROSS JOIN LATERAL ({self.inner}) AS found", []

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        ids = f"SELECT id FROM ({self.inner})"
        # CROSS: SQLite may turn any other join around, and read the whole table for each lane.
        return f"CROSS JOIN {self.table} AS found ON found.id IN ({ids})", []


class StoredSize(Func):
    """About the bytes that a JSON column takes in memory, told without reading what is stored apart from its
    row. PostgreSQL compresses what is longer than 2 kB: taken for sixteenfold.
    """

    output_field = IntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        (column, params) = compiler.compile(self.source_expressions[0])
        size = f"PG_COLUMN_SIZE({column})"
        return f"(CASE WHEN {size} > 1900 THEN 16 ELSE 1 END * {size})", [*params, *params]

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return self.as_sql(compiler, connection, function="LENGTH")


class FoundSize(Func):
    """The ``size`` of a row that ``ForEach`` has found, which is the whole row where there is no LATERAL."""

    output_field = IntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return "found.size", []

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return "LENGTH(found.payload)", []


class IsCandidate(Func):
    """That a row of ``table`` is one of the CTE ``candidate``.

    PostgreSQL is told twice: it takes an array to be short, but of the join it expects a hundred rows, and
    would read a table of 20,000 rows from end to end rather than look them up, even for one.
    """

    def __init__(self, table: str) -> None:
        super().__init__(output_field=CharField())
        self.table = table

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        ids = "SELECT candidate_id FROM candidate"
        return f"{self.table}.id = candidate.candidate_id AND {self.table}.id = ANY(ARRAY({ids}))", []

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return f"{self.table}.id = candidate.candidate_id", []


class Locked(Func):
    """CTEs of which the last, ``fresh``, has the ids of ``due``, locked.

    ``scan`` is the ordered SELECT of the ids of one ``lane``. Where rivals work side by side, each lane
    gives as many as ``due`` has of it, its first ones that nobody has locked. SQLite has one writer, and
    that holds the lock already.
    """

    def __init__(self, due: str, columns: str, scan: str, params: tuple[Any, ...]) -> None:
        super().__init__(output_field=CharField())
        self.due, self.columns, self.scan, self.params = due, columns, scan, params

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        lock = connection.ops.for_update_sql(skip_locked=True, no_key=True)
        sql = (
            f"share AS MATERIALIZED (SELECT {self.columns}, COUNT(*) AS wanted FROM {self.due} "
            f"GROUP BY {self.columns}), fresh(id) AS MATERIALIZED (SELECT found.id FROM share AS lane "
            f"CROSS JOIN LATERAL ({self.scan} LIMIT lane.wanted {lock}) AS found)"
        )
        return sql, list(self.params)

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return f"fresh(id) AS MATERIALIZED (SELECT found FROM {self.due})", []


class Fused(Func):
    """Two compiled UPDATEs of different rows as one statement: the ``width`` columns that the second reads
    back, after a NULL; then the one column of the first. Empty where an UPDATE cannot stand in a WITH.
    """

    def __init__(self, first: str, second: str, width: int) -> None:
        super().__init__(output_field=CharField())
        self.first, self.second, self.width = first, second, width

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> Any:
        nothing = ", NULL" * self.width
        sql = (
            f"WITH first(id) AS ({self.first}), second AS ({self.second}) "
            f"SELECT NULL::bigint, second.* FROM second UNION ALL SELECT first.id{nothing} FROM first"
        )
        return sql, []

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> Any:
        return "", []
