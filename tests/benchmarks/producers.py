"""Goal 5: what it costs to put jobs in, beside bare INSERTs into the same table on the same connection."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.benchmarks.machine import BenchmarkError, Database, until
from tests.benchmarks.queues import PYTHON, Load
from tests.benchmarks.report import TIMES

if TYPE_CHECKING:
    from tests.benchmarks.bench import Bench

#: What a program without a queue would send; Django's cursor, autocommit.
INSERT = "INSERT INTO forgejobs_job (type, payload) VALUES (%s, %s)"
PRODUCERS = 8


def run(bench: Bench) -> None:
    """Bulk, single and concurrent enqueues."""
    many(bench)
    single(bench)
    concurrent(bench)


def many(bench: Bench) -> None:
    """``enqueue_many``, in rows a second; iterating over the input counts."""
    rows = bench.size(50_000, 50_000, 500)
    for name, keyed in (("without keys", False), ("each with a key", True)):
        rates = []
        for _ in range(bench.size(3, 1)):
            database = bench.machine.database(bench.ours)
            seconds = bench.machine.enqueue(bench.ours, database, Load(rows, keyed=keyed))["seconds"]
            rates.append(rows / seconds)
            bench.machine.drop(database)
        rate = bench.report.figure(5, f"enqueue_many of {rows:,}, {name}", rates, "rows/s")
        bench.report.at_least(5, f"enqueue_many, {name}", rate, 50_000, "rows/s")


def single(bench: Bench) -> None:
    """``enqueue`` and a bare INSERT in turns, on one connection."""
    database = bench.machine.database(bench.ours)
    rounds = str(bench.size(40, 8, 1))
    for how in ("autocommit", "in a transaction"):
        got = _ask(bench, database, "single", how, rounds)
        ours = bench.report.figure(5, f"enqueue, {how}", got["ours"], "µs")
        bare = bench.report.figure(5, f"a bare INSERT, {how}", got["bare"], "µs")
        bench.report.at_most(5, f"enqueue against a bare INSERT, {how}", ours / bare, 1.3)
    bench.machine.drop(database)


def concurrent(bench: Bench) -> None:
    """One producer and eight, by us and by bare INSERTs, in turns; all commit each job."""
    seconds = bench.size(5, 1, 1)
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(bench.size(3, 1)):
        for what in ("ours", "bare"):
            for producers in (1, PRODUCERS):
                rates.setdefault((what, producers), []).append(_together(bench, what, producers, seconds))
    of = {
        (what, count): bench.report.figure(
            5, f"{count} producer{'s' if count > 1 else ''}, {what}", samples, "commits/s"
        )
        for (what, count), samples in rates.items()
    }
    ratio = of["ours", PRODUCERS] / of["bare", PRODUCERS]
    bench.report.figure(5, f"{PRODUCERS} producers against {PRODUCERS} with bare INSERTs", ratio, TIMES)
    scaling = (of["ours", PRODUCERS] / of["ours", 1]) / (of["bare", PRODUCERS] / of["bare", 1])
    bench.report.at_least(5, f"gain by {PRODUCERS} producers, ours against bare", scaling, 0.9)


def _together(bench: Bench, what: str, producers: int, seconds: float) -> float:
    database = bench.machine.database(bench.ours)
    effects = bench.machine.effects(1, gate=True)
    environment = bench.machine.environment(
        {**database.environment, **bench.ours.environment, **effects.environment}
    )
    command = (*PYTHON, "tests.benchmarks.producers", "together", what, str(seconds))
    started = [
        subprocess.Popen(
            command, env=environment, cwd=bench.machine.checkout, stdout=subprocess.PIPE, text=True
        )
        for _ in range(producers)
    ]
    try:
        connected = f"SELECT count(*) >= {producers} FROM pg_stat_activity WHERE datname = current_database()"
        if not until(lambda: database.value(connected), 60, every=0.05):
            raise BenchmarkError("The producers did not start.")
        effects.open_gate()
        return sum(json.loads(process.communicate(timeout=60)[0]) for process in started) / seconds
    finally:
        for process in started:
            process.kill()
            process.wait()
        bench.machine.drop(database)


def _ask(bench: Bench, database: Database, *arguments: str) -> Any:
    environment = {**database.environment, **bench.ours.environment}
    return bench.machine.ask((*PYTHON, "tests.benchmarks.producers", *arguments), environment)


# --- in a process of its own ---------------------------------------------------------------------


def _producers() -> dict[str, Callable[[int], object]]:
    import django
    from django.db import connection

    django.setup()
    from django_forgejobs import enqueue

    def bare(number: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute(INSERT, ("bench.noop", str(number)))

    connection.ensure_connection()
    return {"ours": lambda number: enqueue("bench.noop", number), "bare": bare}


def _single(how: str, rounds: int, chunk: int = 50) -> dict[str, float]:
    """Return the median microseconds of each; chunks in turns, so that a slow moment hits both."""
    from contextlib import nullcontext

    ways = _producers()
    from django.db import transaction

    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, put in ways.items():
            with transaction.atomic() if how == "in a transaction" else nullcontext():
                for number in range(chunk):
                    began = time.perf_counter()
                    put(number)
                    if turn:  # the first round compiles and imports
                        taken[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(found) for name, found in taken.items()}


def _for_seconds(what: str, seconds: float) -> int:
    from tests.benchmarks.effects import wait_for_gate

    put = _producers()[what]
    wait_for_gate()
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        put(count)
        count += 1
    return count


if __name__ == "__main__":
    if sys.argv[1] == "single":
        print(json.dumps(_single(sys.argv[2], int(sys.argv[3]))))
    else:
        print(_for_seconds(sys.argv[2], float(sys.argv[3])))
