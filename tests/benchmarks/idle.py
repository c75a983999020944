"""Goal 6: what a worker costs that has nothing to do, and what it weighs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.drain import commits
from tests.benchmarks.machine import BenchmarkError, until
from tests.benchmarks.queues import PYTHON, Load

if TYPE_CHECKING:
    from tests.benchmarks.bench import Bench
    from tests.benchmarks.machine import Database

CHILDREN = 3


def run(bench: Bench) -> None:
    """Look at idle workers, then weigh them."""
    if not Path("/proc/self/smaps_rollup").exists():
        bench.report.note("Idle costs are read from /proc, which this system does not have.")
        return
    idle(bench)
    weigh(bench)


def idle(bench: Bench) -> None:
    """Watch two workers that have run a few jobs and wait for more, one with many threads."""
    # What a session has committed is reported within ten seconds.
    settling, seconds = bench.size(12, 11, 1), bench.size(20, 10, 1)
    report = bench.report
    with ExitStack() as stack:
        workers = {
            concurrency: stack.enter_context(up(bench, *bench.flags, "--concurrency", str(concurrency)))
            for concurrency in (1, 50)
        }
        time.sleep(settling)
        before = {c: (commits(database), cpu_seconds(pid)) for c, (pid, database) in workers.items()}
        time.sleep(seconds)
        after = {c: (commits(database), cpu_seconds(pid)) for c, (pid, database) in workers.items()}
    for concurrency in workers:
        transactions, cpu = (b - a for a, b in zip(before[concurrency], after[concurrency], strict=True))
        report.at_most(6, f"idle transactions, concurrency {concurrency}", transactions / seconds, 1.2, "/s")
        report.at_most(6, f"idle CPU, concurrency {concurrency}", cpu / seconds * 100, 0.5, "%")


def weigh(bench: Bench) -> None:
    """Compare a worker with a process that has set Django up and asked the database one question."""
    report = bench.report
    database = bench.machine.database(bench.ours)
    environment = bench.machine.environment(
        {**database.environment, **bench.ours.environment, "BENCH_BARE": "1", "FORGEJOBS_TEST_APPS": ""}
    )
    bare_process = subprocess.Popen(
        (*PYTHON, "tests.benchmarks.idle"),
        env=environment,
        cwd=bench.machine.checkout,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert bare_process.stdin is not None
    assert bare_process.stdout is not None
    try:
        bare_process.stdout.readline()
        bare = memory(bare_process.pid)
    finally:
        bare_process.stdin.close()
        bare_process.wait()
        bare_process.stdout.close()
    bench.machine.drop(database)
    with up(bench, *bench.flags) as (pid, _):
        ours = memory(pid)
    for name, found in (("bare Django with psycopg", bare), ("an idle worker", ours)):
        report.figure(
            6, f"{name}: RSS", found["Rss"], "MB", f"PSS {found['Pss']:.1f}, private {found['Private']:.1f}"
        )
    report.at_most(6, "RSS of a worker above bare Django", ours["Rss"] - bare["Rss"], 15, "MB")
    if not takes_processes(bench):
        report.note("runworker has no --processes: further processes were not weighed.")
        return
    with up(bench, *bench.flags, "--processes", str(CHILDREN)) as (pid, _):
        children = list(children_of(pid))
        weights = [memory(child)["Private"] for child in children]
        parent = memory(pid)
    if not weights:
        raise BenchmarkError("No child processes were found.")
    report.figure(6, "the supervisor: private", parent["Private"], "MB", f"RSS {parent['Rss']:.1f}")
    each = report.figure(6, f"each of {len(weights)} processes: private", weights, "MB")
    report.at_most(6, "private memory of each further process", each, 30, "MB")


@contextmanager
def up(bench: Bench, *flags: str) -> Iterator[tuple[int, Database]]:
    """Start a worker, let it run a few jobs; yield its pid and its database."""
    jobs = 200
    database = bench.machine.database(bench.ours)
    effects = bench.machine.effects(jobs)
    with bench.machine.workers(bench.ours, database, effects, Load(jobs), *flags) as (worker,):
        bench.machine.enqueue(bench.ours, database, Load(jobs))
        if not until(lambda: effects.done() >= jobs, 30, workers=[worker]):
            raise BenchmarkError(f"The worker did not run its first jobs.\n{worker.said}")
        time.sleep(1)
        yield worker.pid, database
    bench.machine.drop(database)


def takes_processes(bench: Bench) -> bool:
    """Say whether runworker has ``--processes``."""
    command = (*PYTHON, "testproject.manage", "runworker", "--help")
    environment = bench.machine.environment(bench.ours.environment)
    done = subprocess.run(
        command, env=environment, cwd=bench.machine.checkout, capture_output=True, text=True
    )
    return "--processes" in done.stdout


def cpu_seconds(pid: int) -> float:
    """Return what a process has used, all threads (proc(5): utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> dict[str, float]:
    """Return megabytes: Rss, Pss, and Private, which would be free without the process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(rest.split()[0]) / 1024 for name, rest in (line.split(":", 1) for line in lines)}
    return {**sizes, "Private": sizes["Private_Clean"] + sizes["Private_Dirty"]}


def children_of(pid: int) -> Iterator[int]:
    """Yield the children of a process."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def bare() -> None:
    """Be a Django process that has asked one question, until stdin ends."""
    import django

    django.setup()
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    print("up", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    bare()
