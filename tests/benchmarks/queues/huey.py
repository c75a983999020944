"""huey on SQLite: its consumer with threads and a WAL, as durable as ours beside it ($BENCH_SYNCHRONOUS)."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tests.benchmarks.effects import effect
from tests.benchmarks.queues import PYTHON, Load, Queue

THREADS = 4

QUEUE = Queue(
    name="huey on SQLite",
    module="huey",
    worker=lambda load: (
        *(*PYTHON, "huey.bin.huey_consumer", "tests.benchmarks.queues.huey_app.app"),
        *("--workers", str(THREADS), "--worker-type", "thread", "--quiet", "--no-periodic"),
    ),
    open_jobs="SELECT count(*) FROM task",
    distribution="huey",
    needs=("huey",),
    settings=f"SqliteHuey, {THREADS} threads, WAL, synchronous=FULL",
    sqlite=True,
    stop=signal.SIGINT,
)


def make_app() -> Any:
    """Return the huey object and its task."""
    from huey import SqliteHuey
    from huey.storage import SqliteStorage

    class Storage(SqliteStorage):
        def _create_connection(self) -> Any:
            connection = super()._create_connection()
            connection.execute(f"PRAGMA synchronous={os.environ.get('BENCH_SYNCHRONOUS', 'FULL')}")
            return connection

    app = SqliteHuey(filename=os.environ["BENCH_SQLITE"], storage_class=Storage, timeout=20)

    @app.task()
    def noop(number: int) -> None:
        effect(number)

    return app, noop


def prepare() -> None:
    """Make the tables."""
    make_app()


def enqueue(load: Load) -> dict[str, float]:
    """Insert the jobs one by one, in one transaction."""
    app, noop = make_app()
    began = time.perf_counter()
    with app.storage.db(commit=True, close=True) as connection:
        for number in load.numbers:
            data = app.serialize_task(noop.s(number))
            connection.execute(
                "INSERT INTO task (queue, data, priority) VALUES (?, ?, ?)", (app.storage.name, data, 0)
            )
    return {"seconds": time.perf_counter() - began}
