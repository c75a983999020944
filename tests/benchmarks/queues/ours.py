"""django_forgejobs, by its commands, as a user would."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
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
    open_jobs="SELECT count(*) FROM forgejobs_job WHERE status IN ('ready', 'running') AND run_at <= now()",
    distribution="django-forgejobs",
    settings=f"runworker --concurrency {CONCURRENCY}",
    environment={
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "FORGEJOBS_TEST_APPS": "tests.benchmarks.app",
    },
)


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


def jobs(load: Load) -> Iterator[Mapping[str, Any]]:
    """Yield the arguments of each job's ``enqueue``."""
    for number in load.numbers:
        job: dict[str, Any] = {"type": "bench.noop", "payload": number}
        if load.queues > 1:
            job["queue"] = load.queue(number)
        if load.priorities > 1:
            job["priority"] = load.priority(number)
        if load.keyed:
            job["idempotency_key"] = f"bench:{number}"
        yield job


def _django() -> None:
    import django

    django.setup()
