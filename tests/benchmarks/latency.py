"""Goal 2: how long a job waits for an idle worker, and a more urgent one for a busy worker."""

from __future__ import annotations

import statistics
import threading
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from tests.benchmarks.machine import BenchmarkError, until
from tests.benchmarks.queues import Load, Queue, ours

if TYPE_CHECKING:
    from tests.benchmarks.bench import Bench
    from tests.benchmarks.effects import Effects
    from tests.benchmarks.machine import Database

EVERY = 0.05  # seconds between two commits


def run(bench: Bench) -> None:
    """Measure all idle workers in turns, block by block, then the busy one."""
    idle(bench)
    urgent(bench)


def idle(bench: Bench) -> None:
    """One commit every 50 ms, to workers that are all up and have nothing else to do."""
    jobs, blocks = bench.size(200, 40, 6), bench.size(4, 2, 1)
    peers = [bench.peer("procrastinate"), *([bench.peer("pgqueuer")] if bench.full else [])]
    queues = [bench.ours, *(peer for peer in peers if peer), ours.SQLITE]
    waits: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        up: list[tuple[Queue, Database, Effects]] = []
        for queue in queues:
            database = bench.machine.database(queue)
            effects = bench.machine.effects(jobs + 1)
            flags = bench.flags if queue.module == "ours" else ()
            stack.enter_context(bench.machine.workers(queue, database, effects, Load(1), *flags))
            up.append((queue, database, effects))
        for queue, database, effects in up:  # the first job says that the worker is up
            bench.machine.enqueue(queue, database, Load(1, first=jobs))
            if not until(partial(_has, effects, 1), 30):
                raise BenchmarkError(f"{queue.name}: the worker did not run its first job.")
        size = jobs // blocks
        for block in range(blocks):
            for queue, database, effects in up:
                load = Load(size, first=block * size)
                committed = bench.machine.trickle(queue, database, effects, load, every=EVERY)
                until(partial(_has, effects, (block + 1) * size + 1), 15)
                starts = effects.starts()
                if missing := [number for number in committed if number not in starts]:
                    raise BenchmarkError(f"{queue.name}: {len(missing)} jobs did not start within 15 s.")
                waits[queue.name] += [(starts[n] - moment) * 1000 for n, moment in committed.items()]
    p50, p95 = {}, {}
    for name, found in waits.items():
        p50[name] = bench.report.figure(2, f"idle latency p50, {name}", statistics.median(found), "ms")
        p95[name] = bench.report.figure(2, f"idle latency p95, {name}", _p95(found), "ms")
    name, sqlite = bench.ours.name, ours.SQLITE.name
    if "procrastinate" in p50:
        bench.report.at_most(2, "p50 against procrastinate", p50[name] / p50["procrastinate"], 1)
        bench.report.at_most(2, "p95 against procrastinate", p95[name] / p95["procrastinate"], 1)
    bench.report.at_most(2, "p95 on SQLite", p95[sqlite], 25, "ms")


def urgent(bench: Bench) -> None:
    """Jobs of a higher priority, committed while a worker is in the middle of a full queue."""
    backlog, count = bench.size(20_000, 20_000, 500), 5
    queue, load = bench.ours, Load(backlog)
    database = bench.machine.database(queue)
    bench.machine.enqueue(queue, database, load)
    database.settle()
    effects = bench.machine.effects(backlog + count, gate=True)
    committed: dict[int, float] = {}
    fresh = Load(count, first=backlog, urgent=10)

    def trickle() -> None:
        committed.update(bench.machine.trickle(queue, database, effects, fresh, every=0.1))

    producer = threading.Thread(target=trickle)
    with bench.machine.workers(queue, database, effects, load, *bench.flags) as workers:
        producer.start()
        until(effects.ready, 30, workers=workers)
        until(lambda: database.value(CONNECTED) > 0, 10)
        effects.open_gate()
        producer.join()
        until(lambda: all(effects.started(number) for number in fresh.numbers), 30, workers=workers)
    starts = effects.starts()
    before, left, waited = [], [], []
    for number, moment in committed.items():
        start = starts.get(number)
        if start is None:
            raise BenchmarkError(f"The urgent job {number} did not start within 30 s.")
        others = [s for n, s in starts.items() if n < backlog and s > moment]
        left.append(backlog - sum(1 for n, s in starts.items() if n < backlog and s <= moment))
        before.append(sum(1 for s in others if s < start))
        waited.append((start - moment) * 1000)
    busy = [i for i, open_jobs in enumerate(left) if open_jobs > backlog / 20]
    if not busy:
        bench.report.note("The queue was empty before the urgent jobs came: nothing to judge.")
        return
    bench.report.figure(2, f"urgent job, {backlog:,} ready: waits", [waited[i] for i in busy], "ms")
    bench.report.figure(2, "jobs that start between its commit and its start", [before[i] for i in busy], "")
    share = statistics.median(before[i] / left[i] for i in busy)
    bench.report.at_most(2, "share of the backlog that starts before an urgent job", share, 0.1, "")


#: Whether the producer is connected, and so ready to go.
CONNECTED = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND "
    "application_name NOT LIKE 'forgejobs%' AND pid <> pg_backend_pid()"
)


def _has(effects: Effects, count: int) -> bool:
    return effects.done() >= count


def _p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]
