"""How rows come in: the INSERT, the idempotency keys, and what is told of new jobs after the commit."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.models.expressions import RawSQL

from django_forgejobs import signals, sql
from django_forgejobs.dialect import AfterSeconds, AsJson, Rows
from django_forgejobs.exceptions import JobError

if TYPE_CHECKING:
    from django_forgejobs.models import Job

#: Rows of one INSERT.
ROWS = 2000

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


def insert(rows: Sequence[Mapping[str, Any]], db: str) -> list[Job]:
    """Insert ``rows``, as ``intake`` makes them; return their jobs in order.

    A row whose idempotency key exists is not inserted: the job that has it is returned.
    """
    placed: dict[int, Job] = {}
    by_key: dict[str, list[int]] = defaultdict(list)
    keyless = []
    for index, row in enumerate(rows):
        if row["idempotency_key"] is None:
            keyless.append(index)
        else:
            by_key[row["idempotency_key"]].append(index)
    for chunk in _chunks(keyless, ROWS):
        inserted = _run(db, [rows[index] for index in chunk])
        placed |= zip(chunk, inserted, strict=True)
    new = set(placed.values())
    # In sorted order, so that two callers with the same keys cannot deadlock.
    for keys in _chunks(sorted(by_key), ROWS):
        found = _insert_keyed({key: rows[by_key[key][0]] for key in keys}, db, new)
        for key in keys:
            for index in by_key[key]:
                if found[key].type != rows[index]["type"]:
                    raise JobError(
                        f"idempotency_key {key!r} belongs to job {found[key].pk} of type "
                        f'"{found[key].type}", not "{rows[index]["type"]}". Put the type into the key.'
                    )
                placed[index] = found[key]
    _announce(new, db)
    return [placed[index] for index in range(len(rows))]


def _insert_keyed(rows: Mapping[str, Mapping[str, Any]], db: str, new: set[Job]) -> dict[str, Job]:
    found: dict[str, Job] = {}
    # More than one round only if a key's row is archived between our INSERT and our SELECT.
    while missing := [key for key in rows if key not in found]:
        for job in _run(db, [rows[key] for key in missing]):
            found[str(job.idempotency_key)] = job
            new.add(job)
        rivals = [key for key in missing if key not in found]
        for job in sql.jobs(db).filter(idempotency_key__in=rivals) if rivals else ():
            found[str(job.idempotency_key)] = job
    return found


def _announce(jobs: Collection[Job], db: str) -> None:
    if signals.enqueued.receivers and jobs:

        def announce() -> None:
            for job in jobs:
                signals.send(signals.enqueued, job=job)

        transaction.on_commit(announce, using=db, robust=True)


def _run(db: str, rows: Sequence[Mapping[str, Any]]) -> list[Job]:
    """Insert ``rows`` but for those whose idempotency key exists; return what was inserted, in order.

    A row maps the names of ``_NEW``: ``payload`` is JSON text, ``run_at`` an aware datetime or None, and
    then ``delay`` counts, in seconds from now. An uncommitted rival for a key is waited for: the unique
    index decides.
    """
    adapt = connections[db].ops.adapt_datetimefield_value
    prepared = [
        row if row["run_at"] is None else {**row, "run_at": str(adapt(row["run_at"]))} for row in rows
    ]
    inserted = sql.run(db, sql.Compiled(_insert(db), (json.dumps(prepared),)))
    return sorted(inserted, key=lambda job: job.pk)  # ids are given in the order of the rows


@lru_cache(maxsize=8)
def _insert(db: str) -> str:
    due = sql.expression(db, AfterSeconds(RawSQL("new.delay", ()))).text
    payload = sql.expression(db, AsJson(RawSQL("new.payload", ()))).text
    # WHERE true: without it SQLite reads ON CONFLICT as a join condition.
    return (
        f"INSERT INTO {sql.TABLE} "
        f"(type, payload, queue, priority, max_attempts, idempotency_key, run_at) "
        f"SELECT new.type, {payload}, new.queue, new.priority, new.max_attempts, "
        f"new.idempotency_key, COALESCE(new.run_at, {due}) "
        f"FROM ({sql.expression(db, Rows(_NEW)).text}) AS new WHERE true "
        f"ON CONFLICT DO NOTHING RETURNING *"
    )


def _chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
