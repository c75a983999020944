"""django-ox: its command, its bulk enqueue."""

from __future__ import annotations

import time

from tests.benchmarks.queues import PYTHON, Load, Queue

CONCURRENCY = 8

QUEUE = Queue(
    name="django-ox",
    module="ox",
    worker=lambda load: (
        *(*PYTHON, "django", "ox_worker", "--concurrency", str(CONCURRENCY), "--verbosity", "0"),
    ),
    open_jobs="SELECT count(*) FROM django_ox_oxtask WHERE status IN ('READY', 'RUNNING')",
    distribution="django-ox",
    needs=("django_ox", "django.tasks"),
    settings=f"ox_worker --concurrency {CONCURRENCY}, persistent connections",
    environment={"DJANGO_SETTINGS_MODULE": "tests.benchmarks.queues.ox_settings"},
)


def prepare() -> None:
    """Migrate."""
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def enqueue(load: Load) -> dict[str, float]:
    """Insert the jobs with its ``enqueue_many``."""
    import django

    django.setup()
    from django_ox.bulk import enqueue_many

    from tests.benchmarks.queues.ox_tasks import noop

    began = time.perf_counter()
    enqueue_many(noop, [((number,), {}) for number in load.numbers])
    return {"seconds": time.perf_counter() - began}
