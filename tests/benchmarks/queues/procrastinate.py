"""procrastinate: psycopg's async pool, an async task, its own command line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tests.benchmarks.effects import effect
from tests.benchmarks.queues import PYTHON, Load, Queue

CONCURRENCY = 10

QUEUE = Queue(
    name="procrastinate",
    module="procrastinate",
    worker=lambda load: (
        *(*PYTHON, "procrastinate", "--app", "tests.benchmarks.queues.procrastinate_app.app"),
        *("worker", "--concurrency", str(CONCURRENCY)),
    ),
    open_jobs="SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
    distribution="procrastinate",
    needs=("procrastinate",),
    settings=f"--concurrency {CONCURRENCY}, async task",
)


def prepare() -> None:
    """Install its schema."""
    app = make_app(sync=True)
    with app.open():
        app.schema_manager.apply_schema()


def enqueue(load: Load) -> dict[str, float]:
    """Insert the jobs by batches."""
    app = make_app(sync=True)
    with app.open():
        began = time.perf_counter()
        for start in range(0, load.count, 5_000):
            numbers = load.numbers[start : start + 5_000]
            app.tasks["noop"].batch_defer(*({"number": number} for number in numbers))
        return {"seconds": time.perf_counter() - began}


def trickle(load: Load, moments: Iterator[int]) -> dict[int, float]:
    """Defer a job at each of ``moments``; return when each was committed, by its number."""
    app = make_app(sync=True)
    committed = {}
    with app.open():
        for number in moments:
            app.tasks["noop"].defer(number=number)
            committed[number] = time.monotonic()
    return committed


def make_app(*, sync: bool = False) -> Any:
    """Return an app with the one task."""
    from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

    app = App(connector=SyncPsycopgConnector() if sync else PsycopgConnector())

    @app.task(name="noop")
    async def noop(number: int) -> None:
        effect(number)

    return app
