"""Goal 1: how fast a full queue is emptied, beside peers and beside the same SQL without a worker."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.benchmarks import pgbench
from tests.benchmarks.machine import BenchmarkError, Database, Machine, until
from tests.benchmarks.queues import Load, Queue
from tests.benchmarks.report import number

if TYPE_CHECKING:
    from tests.benchmarks.bench import Bench
    from tests.benchmarks.effects import Effects

#: Seconds for workers to be up and hold their first jobs.
START = 30.0


@dataclass
class Drained:
    """What one drain showed. ``rate`` is jobs/s from the gate to the last effect."""

    queue: str
    jobs: int
    done: int
    seconds: float
    processes: int
    finishes: int = 0
    starts: list[float] = field(default_factory=list, repr=False)

    @property
    def rate(self) -> float:
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def complete(self) -> bool:
        return self.done == self.jobs

    @property
    def batch(self) -> float:
        """Jobs for each statement that finished some; 0 where nobody knows."""
        return self.done / self.finishes if self.finishes else 0.0

    def slices(self, count: int = 10) -> list[float]:
        """The rate in ``count`` equal parts of the jobs, in the order in which they ran."""
        size = len(self.starts) // count
        edges = [self.starts[min(i * size, len(self.starts) - 1)] for i in range(count + 1)]
        return [size / max(b - a, 1e-9) for a, b in pairwise(edges)]


def drain(
    machine: Machine,
    queue: Queue,
    load: Load,
    *flags: str,
    processes: int = 1,
    limit: float = 30.0,
    database: Database | None = None,
    enqueue: bool = True,
    analyze: bool = False,
) -> Drained:
    """Put ``load`` in and let workers empty it; stop after ``limit`` seconds and count what is done.

    Statistics are what autovacuum has made of them, as after any burst, unless ``analyze`` is true. The clock
    starts when every process is up and holds its first jobs. Raises ``BenchmarkError`` when a job ran twice
    or, in a drain that ended, not at all.
    """
    own = database is None
    database = database or machine.database(queue)
    if enqueue:
        machine.enqueue(queue, database, load)
        database.settle(analyze=analyze)
    effects = machine.effects(load.first + load.count, gate=True)
    with machine.workers(queue, database, effects, load, *flags, processes=processes) as workers:
        wanted = processes_of(processes, flags)
        if not until(lambda: effects.ready() >= wanted, START, workers=workers) and not effects.ready():
            raise BenchmarkError(f"{queue.name}: no job was started in {START:g} s.\n{workers[0].said}")
        opened = effects.open_gate()
        ended = until(lambda: effects.done() >= load.count, limit, workers=workers)
        closed = time.monotonic()
        if ended and not until(lambda: database.value(queue.open_jobs) == 0, 15, every=0.05):
            raise BenchmarkError(f"{queue.name}: all jobs ran, but not all are finished in its tables.")
    finishes = database.value(queue.finishes) if queue.finishes else 0
    starts = sorted(effects.starts().values())
    verify(queue, effects, load, complete=ended)
    seconds = (starts[-1] if ended else closed) - opened
    if own:
        machine.drop(database)
    return Drained(queue.name, load.count, len(starts), seconds, effects.ready(), finishes, starts)


def processes_of(processes: int, flags: tuple[str, ...]) -> int:
    """How many processes will run jobs."""
    return int(flags[flags.index("--processes") + 1]) if "--processes" in flags else processes


def verify(queue: Queue, effects: Effects, load: Load, *, complete: bool) -> None:
    """Raise unless each job had its effect once, or at most once in a drain that was cut short."""
    counts = effects.counts()
    twice = sum(1 for number in load.numbers if counts[number] > 1)
    never = sum(1 for number in load.numbers if counts[number] == 0)
    if twice or (complete and never):
        raise BenchmarkError(f"{queue.name}: of {load.count} jobs {twice} ran twice and {never} never.")


def commits(database: Database) -> int:
    """How many transactions the database has committed; statistics of other sessions may lag by a second."""
    if database.sqlite:
        return 0
    query = f"SELECT xact_commit FROM pg_stat_database WHERE datname = '{database.environment['PGDATABASE']}'"
    return int(database.machine.postgres_database.value(query))


# --- the part ------------------------------------------------------------------------------------


def run(bench: Bench) -> None:
    """Drain by us, peers, a bare loop and pgbench, one after the other, in rounds."""
    rates: dict[str, list[float]] = defaultdict(list)
    report = bench.report
    batch = BATCH

    def measure(label: str, queue: Queue | None, jobs: int, *flags: str, **options: Any) -> Drained | None:
        if queue is None:
            return None
        try:
            drained = drain(
                bench.machine, queue, Load(jobs, queues=options.pop("queues", 1)), *flags, **options
            )
        except BenchmarkError as error:
            report.note(f"{label}: {error}")
            return None
        rates[label].append(drained.rate)
        batches = f", {drained.batch:.0f} jobs a batch" if drained.batch else ""
        cut = "" if drained.complete else f", cut short at {drained.done:,} of {jobs:,}"
        report.say(f"1  {label}: {number(drained.rate)} jobs/s{batches}{cut}")
        return drained

    jobs = bench.size(100_000, 50_000, 1_000)
    limit = bench.size(20, 4)
    ours, peers = bench.ours, {name: bench.peer(name) for name in PEERS[: 3 if bench.full else 2]}
    for _ in range(bench.size(2, 1)):
        one = measure(OURS, ours, jobs, *bench.flags, limit=limit)
        if one and one.batch > 1:
            batch = round(one.batch)
        if bench.tiny:
            break
        measure(PGQUEUER, peers["pgqueuer"], jobs, limit=limit)
        measure(OX, peers["ox"], bench.size(4_000, 800), limit=limit)
        measure(BARE, bench.take("bare"), jobs, str(batch), limit=limit)
        rates[PGBENCH].append(pgbench.rate(bench.machine, jobs=jobs, batch=batch))
        measure(FIVE, ours, jobs, *bench.flags, queues=5, limit=limit)
        measure(TWO, ours, jobs, *bench.flags, "--processes", "2", limit=limit)
        if bench.full:
            measure(PROCRASTINATE, peers["procrastinate"], 4_000, limit=limit)
            measure(f"{PGQUEUER}, 2 processes", peers["pgqueuer"], jobs, processes=2, limit=limit)
            measure(f"{BARE}, 2 processes", bench.take("bare"), jobs, str(batch), processes=2, limit=limit)
            two = pgbench.rate(bench.machine, jobs=jobs, batch=batch, clients=2)
            rates[f"{PGBENCH}, 2 clients"].append(two)
            measure(f"{PGQUEUER}, {ANALYZED}", peers["pgqueuer"], jobs, limit=limit, analyze=True)
            measure(f"{OURS}, {ANALYZED}", ours, jobs, *bench.flags, limit=limit, analyze=True)
        measure(EIGHT, ours, jobs, *bench.flags, "--processes", "8", limit=limit)
    of = {label: report.figure(1, label, samples, "jobs/s") for label, samples in rates.items()}
    report.figure(1, "jobs a batch, ours, 1 process", float(batch), "")

    def ratio(name: str, label: str, against: str, bound: float) -> None:
        if label in of and of.get(against):
            report.at_least(1, name, of[label] / of[against], bound)

    ratio("drain, one queue, against pgqueuer", OURS, PGQUEUER, 2)
    ratio("drain, five queues, against pgqueuer", FIVE, PGQUEUER, 2)
    ratio("drain, one queue, against django-ox", OURS, OX, 30)
    ratio("drain, five queues, against django-ox", FIVE, OX, 30)
    ratio("two processes against one", TWO, OURS, 1.3)
    ratio("eight processes against two", EIGHT, TWO, 0.9)
    ratio("drain against a bare psycopg loop", OURS, BARE, 0.6)
    ratio("drain against pgbench with the same SQL", OURS, PGBENCH, 0.25)


OURS, FIVE, TWO, EIGHT = "ours", "ours, five queues", "ours, 2 processes", "ours, 8 processes"
PGQUEUER, OX, PROCRASTINATE = "pgqueuer", "django-ox", "procrastinate"
BARE, PGBENCH = "bare psycopg loop", "pgbench"
ANALYZED = "after ANALYZE"

PEERS = ("pgqueuer", "ox", "procrastinate")

#: Jobs a batch of the bare loop and of pgbench, where our worker's are not known.
BATCH = 200
