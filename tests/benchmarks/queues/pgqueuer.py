"""pgqueuer: asyncpg, uvloop, batches of 500.

Started as its command line does it; that itself (`pgqueuer run`) fails with current releases of typer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from tests.benchmarks.effects import effect
from tests.benchmarks.queues import PYTHON, Load, Queue

BATCH = 500

QUEUE = Queue(
    name="pgqueuer",
    module="pgqueuer",
    worker=lambda load: (*PYTHON, "tests.benchmarks.queues.pgqueuer"),
    open_jobs="SELECT count(*) FROM pgqueuer",
    distribution="pgqueuer",
    needs=("pgqueuer", "asyncpg", "uvloop"),
    settings=f"asyncpg, uvloop, batch_size={BATCH}",
)


@asynccontextmanager
async def manager() -> AsyncIterator[Any]:
    """Yield its manager with the one job."""
    import asyncpg
    from pgqueuer import PgQueuer

    connection = await asyncpg.connect()
    queuer = PgQueuer.from_asyncpg_connection(connection)

    @queuer.entrypoint("noop")
    async def noop(job: Any) -> None:
        effect(int(job.payload))

    yield queuer


def work() -> None:
    """Run a worker until TERM."""
    import uvloop
    from pgqueuer.adapters.cli import supervisor
    from pgqueuer.types import QueueExecutionMode

    uvloop.run(
        supervisor.run(
            manager,
            dequeue_timeout=timedelta(seconds=30),
            batch_size=BATCH,
            restart_delay=timedelta(seconds=5),
            restart_on_failure=False,
            mode=QueueExecutionMode.continuous,
        )
    )


def prepare() -> None:
    """Install its tables, durable as it does by default."""

    async def install() -> None:
        queries, connection = await _queries()
        await queries.install()
        await connection.close()

    asyncio.run(install())


def enqueue(load: Load) -> dict[str, float]:
    """Insert the jobs, 10,000 a statement."""

    async def insert() -> float:
        queries, connection = await _queries()
        began = time.perf_counter()
        for start in range(0, load.count, 10_000):
            numbers = load.numbers[start : start + 10_000]
            await queries.enqueue(
                ["noop"] * len(numbers),
                [str(number).encode() for number in numbers],
                [load.priority(number) for number in numbers],
            )
        seconds = time.perf_counter() - began
        await connection.close()
        return seconds

    return {"seconds": asyncio.run(insert())}


def trickle(load: Load, moments: Iterator[int]) -> dict[int, float]:
    """Enqueue a job at each of ``moments``; return when each was committed, by its number."""

    async def insert() -> dict[int, float]:
        queries, connection = await _queries()
        committed = {}
        for number in moments:
            await queries.enqueue("noop", str(number).encode())
            committed[number] = time.monotonic()
        await connection.close()
        return committed

    return asyncio.run(insert())


async def _queries() -> tuple[Any, Any]:
    import asyncpg
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.queries import Queries

    connection = await asyncpg.connect()
    return Queries(AsyncpgDriver(connection)), connection


if __name__ == "__main__":
    work()
