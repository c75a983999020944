"""Goal 7: what a SIGKILL in the middle of a drain repeats, counted by effects."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tests.benchmarks.machine import BenchmarkError, until
from tests.benchmarks.queues import Load
from tests.benchmarks.queues.ours import CONCURRENCY

if TYPE_CHECKING:
    from tests.benchmarks.bench import Bench
    from tests.benchmarks.effects import Effects
    from tests.benchmarks.machine import Database

#: So that a dead worker's jobs come back within seconds.
QUICK = {"LEASE": 3, "HEARTBEAT": 1, "RECLAIM_INTERVAL": 1}


def run(bench: Bench) -> None:
    """Kill a worker, let another finish, and see which jobs ran twice; as often as there is time for."""
    jobs = bench.size(20_000, 3_000, 500)
    queue = replace(bench.ours, environment={**bench.ours.environment, "FORGEJOBS_JSON": json.dumps(QUICK)})
    flight, open_ends, batches, repeated, recovered = [], [], [], [], []
    for _ in range(bench.size(3, 1)):
        machine, load = bench.machine, Load(jobs)
        database = machine.database(queue)
        machine.enqueue(queue, database, load)
        database.settle()
        effects = machine.effects(jobs, gate=True)
        with machine.workers(queue, database, effects, load, *bench.flags) as workers:
            if not until(effects.ready, 30, workers=workers):
                raise BenchmarkError(f"No job was started.\n{workers[0].said}")
            effects.open_gate()
            until(partial(_more_than, effects, jobs / 3), 60, every=0.001, workers=workers)
            workers[0].signal(signal.SIGKILL)
            workers[0].popen.wait()
        until(partial(_is_zero, database, BACKENDS), 10)
        flight.append(database.value("SELECT count(*) FROM forgejobs_job WHERE status = 'running'"))
        open_ends.append(effects.done() - database.value(DONE))
        began = time.monotonic()
        batches.append(database.value(LARGEST))
        with machine.workers(queue, database, effects, load, *bench.flags) as workers:
            ended = until(partial(_is_zero, database, queue.open_jobs), 180, every=0.1, workers=workers)
        recovered.append(time.monotonic() - began)
        counts = effects.counts()
        if not ended or 0 in counts:
            raise BenchmarkError(f"After a SIGKILL {counts.count(0)} jobs of {jobs} did not run.")
        repeated.append(sum(1 for count in counts if count > 1))
        machine.drop(database)
    report = bench.report
    report.figure(7, "jobs claimed when the worker was killed", flight, "")
    report.figure(7, "of these, with an effect that was not yet committed", open_ends, "")
    report.figure(7, "jobs that ran twice", repeated, "")
    report.figure(7, "jobs of its largest batch", batches, "")
    report.figure(7, f"until the queue is empty again, lease {QUICK['LEASE']} s", recovered, "s")
    report.at_most(7, "jobs that ran twice, against those claimed", max(repeated) / max(1, max(flight)), 1)
    # One batch is on its way to the disk, another has ended meanwhile, each thread may be past its effect.
    end = 2 * max(batches) + CONCURRENCY
    report.at_most(7, "jobs that ran twice, against those that end in a round trip", max(repeated) / end, 1)


DONE = "SELECT count(*) FROM forgejobs_job WHERE status = 'done'"

#: Jobs that one statement finished have one time.
LARGEST = (
    "SELECT coalesce(max(n), 1) FROM "
    "(SELECT count(*) AS n FROM forgejobs_job WHERE status = 'done' GROUP BY finished_at) AS batch"
)

#: Sessions of the killed worker; its last statement may still be committed.
BACKENDS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND "
    "application_name LIKE 'forgejobs%'"
)


def _is_zero(database: Database, query: str) -> bool:
    return int(database.value(query)) == 0


def _more_than(effects: Effects, count: float) -> bool:
    return effects.done() > count
