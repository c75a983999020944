"""Goal 4: a transaction that is held open, as by a backup, from before the enqueue to the drain's end."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from tests.benchmarks.drain import Drained, drain
from tests.benchmarks.queues import Load, Queue

if TYPE_CHECKING:
    from tests.benchmarks.bench import Bench


def run(bench: Bench) -> None:
    """Drain the same mixed jobs without and with the snapshot."""
    jobs, limit = bench.size(300_000, 30_000, 500), bench.size(60, 6)
    ours: dict[bool, list[Drained]] = {False: [], True: []}
    for _ in range(bench.size(2, 1)):
        for held in (False, True):
            drained = with_snapshot(bench, bench.ours, jobs, held=held, limit=limit)
            ours[held].append(drained)
    without = bench.report.figure(4, "drain, mixed priorities", [d.rate for d in ours[False]], "jobs/s")
    rate = bench.report.figure(4, "the same, snapshot held", [d.rate for d in ours[True]], "jobs/s")
    slices = ours[True][-1].slices()
    told = " ".join(f"{one:,.0f}" for one in slices)
    bench.report.figure(4, "slowest tenth of it", min(slices), "jobs/s", f"in order: {told}")
    bench.report.at_least(4, "held snapshot against none", rate / without, 0.9)
    # The start-up and the end of a drain are not its course.
    half = len(slices) // 2
    flat = statistics.mean(slices[half:-1]) / statistics.mean(slices[1:half])
    bench.report.at_least(4, "its second half against its first", flat, 0.9)
    if bench.full and (peer := bench.peer("pgqueuer")):
        for held in (False, True):
            one = with_snapshot(bench, peer, jobs, held=held, limit=30)
            name = "pgqueuer, snapshot held" if held else "pgqueuer, mixed priorities"
            cut = "" if one.complete else f"stopped after {one.seconds:.0f} s at {one.done:,}"
            bench.report.figure(4, name, one.rate, "jobs/s", cut)


def with_snapshot(bench: Bench, queue: Queue, jobs: int, *, held: bool, limit: float) -> Drained:
    """Drain ``jobs`` of five priorities; ``held``: while an older snapshot is open."""
    machine = bench.machine
    database = machine.database(queue)
    flags = bench.flags if queue.module == "ours" else ()
    with database.connect(autocommit=False) as connection:
        if held:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT 1 FROM pg_class LIMIT 1")
        drained = drain(machine, queue, Load(jobs, priorities=5), *flags, limit=limit, database=database)
    machine.drop(database)
    how = "snapshot held" if held else "no snapshot"
    bench.report.say(f"4  {queue.name}, {how}: {drained.rate:,.0f} jobs/s, {drained.done:,} of {jobs:,}")
    return drained
