"""django_forgejobs, by its commands, as a user would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from tests.benchmarks.queues import PYTHON, Load, Queue

CONCURRENCY = 8


def worker(load: Load, *flags: str) -> tuple[str, ...]:
    """Return the command of a worker; a named queue is served by name."""
    served = () if load.queues == 1 else ("--queues", ",".join(load.names))
    concurrency = () if "--concurrency" in flags else ("--concurrency", str(CONCURRENCY))
    return (*PYTHON, "testproject.manage", "runworker", "--no-reload", *concurrency, *served, *flags)


QUEUE = Queue(
    name="django_forgejobs",
    module="ours",
    worker=worker,
    open_jobs=(
        "SELECT count(*) FROM forgejobs_job "
        "WHERE status IN ('ready', 'running') AND run_at <= CURRENT_TIMESTAMP"
    ),
    # Jobs that one statement finished have one time.
    finishes="SELECT count(DISTINCT finished_at) FROM forgejobs_job WHERE status = 'done'",
    distribution="django-forgejobs",
    settings=f"runworker --concurrency {CONCURRENCY}",
    environment={
        "DJANGO_SETTINGS_MODULE": "tests.benchmarks.settings",
        "FORGEJOBS_TEST_APPS": "tests.benchmarks.app",
    },
)

SQLITE = replace(QUEUE, name="django_forgejobs on SQLite", sqlite=True)


def less_durable(queue: Queue) -> Queue:
    """Return a queue on SQLite that does not wait for the disk at each commit."""
    environment = {**queue.environment, "BENCH_SYNCHRONOUS": "NORMAL"}
    return replace(queue, name=f"{queue.name}, {NORMAL}", environment=environment)


NORMAL = "synchronous=NORMAL"


def prepare() -> None:
    """Migrate."""
    _django()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def enqueue(load: Load) -> dict[str, float]:
    """Insert the jobs with ``enqueue_many``; return the seconds it took."""
    _django()
    from django_forgejobs import enqueue_many

    began = time.perf_counter()
    enqueue_many(jobs(load))
    return {"seconds": time.perf_counter() - began}


def trickle(load: Load, moments: Iterator[int]) -> dict[int, float]:
    """Enqueue a job at each of ``moments``; return when each was committed, by its number.

    From the commit on, and not from the return of ``enqueue``, so that what it does after the commit counts.
    """
    _django()
    from django.db import connection, transaction

    from django_forgejobs import enqueue

    committed: dict[int, float] = {}
    connection.ensure_connection()
    for job, number in zip(jobs(load), moments, strict=False):
        with transaction.atomic():
            transaction.on_commit(partial(_note, committed, number))
            enqueue(job.pop("type"), **job)
    return committed


def _note(committed: dict[int, float], number: int) -> None:
    committed[number] = time.monotonic()


def jobs(load: Load) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each job's ``enqueue``."""
    for number in load.numbers:
        job: dict[str, Any] = {"type": "bench.noop", "payload": number}
        if load.queues > 1:
            job["queue"] = load.queue(number)
        if priority := load.priority(number):
            job["priority"] = priority
        if load.keyed:
            job["idempotency_key"] = f"bench:{number}"
        yield job


def _django() -> None:
    import django

    django.setup()
