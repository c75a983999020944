"""Goal 3: what a history, a distant future, ten million ready jobs and a type that nobody serves cost."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tests.benchmarks.drain import drain
from tests.benchmarks.machine import Database
from tests.benchmarks.queues import PYTHON, Load, Queue, bare, ours

if TYPE_CHECKING:
    from tests.benchmarks.bench import Bench

#: Rows of one claim whose time is taken.
BATCH = 50


def run(bench: Bench) -> None:
    """Compare tables that differ in one thing each."""
    history(bench)
    sqlite(bench)
    unserved(bench)
    if bench.full:
        millions(bench)


# --- history and future --------------------------------------------------------------------------


def history(bench: Bench) -> None:
    """Drain beside a history, and beside none; then look at what a claim reads."""
    done, future = bench.size(1_000_000, 100_000, 1_000), bench.size(200_000, 20_000, 200)
    jobs = bench.size(60_000, 15_000, 500)
    queue, databases = bench.ours, {}
    for name in ("empty", "grown"):
        databases[name] = bench.machine.database(queue)
    grow(bench, databases["grown"], done=done, future=future)
    rates = alternate(bench, queue, databases, jobs)
    table = f"{done:,} done and {future:,} future rows"
    report = bench.report
    empty = report.figure(3, "drain, empty table", rates["empty"], "jobs/s")
    grown = report.figure(3, f"drain beside {table}", rates["grown"], "jobs/s")
    report.at_least(3, f"drain beside {table}, against the empty table", grown / empty, 0.9)
    pages = {}
    for name, database in databases.items():
        bench.machine.enqueue(queue, database, Load(1_000, first=10_000_000))
        database.settle(analyze=True)
        pages[name] = report.figure(
            3, f"pages that a claim of {BATCH} touches, {name}", buffers(database), ""
        )
        bench.machine.drop(database)
    report.at_most(
        3, "pages that a claim touches, beside the history against none", pages["grown"] / pages["empty"], 1.2
    )


def alternate(
    bench: Bench, queue: Queue, databases: dict[str, Database], jobs: int
) -> dict[str, list[float]]:
    """Drain in each of ``databases`` in turn, new jobs each time; return the rates."""
    rates: dict[str, list[float]] = defaultdict(list)
    flags = bench.flags if queue.module == "ours" else ()
    limit = bench.size(20, 6)
    for turn in range(bench.size(3, 1)):
        load = Load(jobs, first=turn * jobs)
        complete = True
        for name, database in databases.items():
            bench.machine.enqueue(queue, database, load)
            database.settle()
            drained = drain(bench.machine, queue, load, *flags, limit=limit, database=database, enqueue=False)
            complete = complete and drained.complete
            rates[name].append(drained.rate)
            label = f"{queue.name}, {name}" if name else queue.name
            bench.report.say(f"3  {label}: {drained.rate:,.0f} jobs/s")
        if not complete:
            break  # what is left would be counted among the next jobs
    return rates


def grow(bench: Bench, database: Database, *, done: int, future: int) -> None:
    """Put ended jobs and jobs of next year into the table, before any other."""
    began = time.monotonic()
    database.execute(
        *(_rows(kind, count, sqlite=database.sqlite) for kind, count in (("done", done), ("future", future)))
    )
    database.settle(analyze=True)
    bench.report.say(f"3  {done + future:,} rows put in, {time.monotonic() - began:.0f} s")


#: Type, status and due time of the rows that are put in.
KINDS = {
    "done": ("bench.noop", "done", "a_day_ago"),
    "future": ("bench.noop", "ready", "next_year"),
    "unserved": ("nobody.serves", "ready", "a_day_ago"),
    "ready": ("bench.noop", "ready", "a_day_ago"),
}


def _rows(kind: str, count: int, *, sqlite: bool = False) -> str:
    """Return an INSERT of ``count`` rows of a kind."""
    if sqlite:
        series = f"WITH RECURSIVE s(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < {count})"
        now = "STRFTIME('%Y-%m-%d %H:%M:%f', 'now'{})"
        times = {"a_day_ago": now.format(", '-1 day'"), "next_year": now.format(", '+1 year'")}
    else:
        series = f"WITH s AS (SELECT GENERATE_SERIES(1, {count}))"
        times = {"a_day_ago": "now() - INTERVAL '1 day'", "next_year": "now() + INTERVAL '1 year'"}
    job_type, status, due = KINDS[kind]
    finished, worker = (times["a_day_ago"], "a worker:1:00000000") if kind == "done" else ("NULL", "")
    ran = int(kind == "done")
    return (
        f"INSERT INTO forgejobs_job "
        f"(type, payload, status, run_at, finished_at, started_at, locked_by, attempts, claims) "
        f"{series} SELECT '{job_type}', '0', '{status}', {times[due]}, {finished}, {finished}, '{worker}', "
        f"{ran}, {ran} FROM s"
    )


def sqlite(bench: Bench) -> None:
    """The same on SQLite, with huey beside us; both with a WAL, and the disk waited for at each commit."""
    done, future = bench.size(1_000_000, 100_000, 1_000), bench.size(200_000, 20_000, 200)
    jobs = bench.size(20_000, 3_000, 200)
    queue, report = ours.SQLITE, bench.report
    databases = {"empty": bench.machine.database(queue), "grown": bench.machine.database(queue)}
    grow(bench, databases["grown"], done=done, future=future)
    rates = alternate(bench, queue, databases, jobs)
    table = f"{done:,} done and {future:,} future rows"
    empty = report.figure(3, "drain on SQLite, empty table", rates["empty"], "jobs/s")
    grown = report.figure(3, f"drain on SQLite beside {table}", rates["grown"], "jobs/s")
    report.at_least(3, "drain on SQLite beside the history, against the empty table", grown / empty, 0.9)
    peer = bench.peer("huey")
    if peer:
        beside = alternate(bench, peer, {"": bench.machine.database(peer)}, jobs)[""]
        other = report.figure(3, "drain on SQLite, huey", beside, "jobs/s")
        report.at_least(3, "drain on SQLite against huey", empty / other, 1)
    for one in (queue, peer) if bench.full else ():
        if one is not None:
            less = ours.less_durable(one)
            found = alternate(bench, less, {"": bench.machine.database(less)}, jobs)[""]
            report.figure(3, f"drain, {less.name}", found, "jobs/s")
    for database in databases.values():
        bench.machine.drop(database)


# --- the claim by itself -------------------------------------------------------------------------


def unserved(bench: Bench) -> None:
    """What rows of a type that nobody serves, at the head of the queue, add to a claim."""
    rows = bench.size(100_000, 100_000, 1_000)
    times = {}
    for name in ("none", "many"):
        database = bench.machine.database(bench.ours)
        if name == "many":
            database.execute(_rows("unserved", rows))
        bench.machine.enqueue(bench.ours, database, Load(3_000))
        database.settle()
        times[name] = claim_ms(database, 20)
        bench.machine.drop(database)
    report = bench.report
    report.figure(3, f"a claim of {BATCH}", times["none"], "ms")
    behind = report.figure(
        3, f"a claim of {BATCH} behind {rows:,} rows of a type that nobody serves", times["many"], "ms"
    )
    report.at_most(3, f"a claim behind {rows:,} rows of a type that nobody serves", behind, 5, "ms")


def millions(bench: Bench) -> None:
    """How long a claim takes with 100,000 and with 10,000,000 ready rows."""
    times = {}
    for rows in (100_000, 10_000_000):
        database = bench.machine.database(bench.ours)
        began = time.monotonic()
        database.execute(*(_rows("ready", min(rows, 2_000_000)) for _ in range(max(1, rows // 2_000_000))))
        database.settle(analyze=True)
        bench.report.say(f"3  {rows:,} ready rows put in, {time.monotonic() - began:.0f} s")
        times[rows] = bench.report.figure(
            3, f"a claim of {BATCH}, {rows:,} ready rows", claim_ms(database, 100), "ms"
        )
        bench.machine.drop(database)
    bench.report.at_most(
        3, "a claim, ten million ready rows against 100,000", times[10_000_000] / times[100_000], 1.5
    )


def claim_ms(database: Database, times: int) -> float:
    """Return the median milliseconds of ``times`` claims, each committed."""
    return float(_probe(database, "time", str(times)))


def buffers(database: Database) -> float:
    """Return how many pages one claim touches, indexes included."""
    return float(_probe(database, "buffers"))


def _probe(database: Database, *arguments: str) -> Any:
    return database.machine.ask(
        (*PYTHON, "tests.benchmarks.growth", *arguments), {**database.environment, **bare.QUEUE.environment}
    )


def probe(what: str, times: int = 1) -> float:
    """Claim, in a process of its own, and return milliseconds or pages."""
    import django
    import psycopg

    django.setup()
    sql = bare.statements(BATCH)
    with psycopg.connect(autocommit=True) as connection:
        if what == "buffers":
            connection.execute(
                sql.claim, sql.claim_params
            )  # the catalogue is read once, and hint bits are set
            plan = connection.execute(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql.claim}", sql.claim_params
            )
            top = plan.fetchone()[0][0]["Plan"]  # type: ignore[index]
            return float(top["Shared Hit Blocks"] + top["Shared Read Blocks"])
        taken = []
        for _ in range(times + 5):
            began = time.perf_counter()
            connection.execute(sql.claim, sql.claim_params, prepare=True).fetchall()
            taken.append((time.perf_counter() - began) * 1000)
        return statistics.median(taken[5:])


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], *map(int, sys.argv[2:]))))
