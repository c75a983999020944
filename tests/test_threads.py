"""The job threads: none sleeps while a job waits that it could run, and no more run than may."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_forgejobs import registry
from django_forgejobs.board import Board
from django_forgejobs.context import JobContext
from django_forgejobs.models import Job
from django_forgejobs.threads import JobThreads, Running
from tests.factories import make_job
from tests.test_worker import Gate
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

LIMIT = 8


@pytest.fixture
def threads() -> Iterator[JobThreads]:
    made = JobThreads("default", Board(), LIMIT)
    yield made
    made.dismiss(wait=True)


@pytest.fixture
def job() -> Job:
    return make_job(status="running")


def batch(job: Job, handler: Any, count: int) -> list[Running]:
    definition = registry.definitions({"t": handler})["t"]
    return [Running(job, definition, JobContext(job, lease=900, renew=lambda _: True)) for _ in range(count)]


def full(gate: Gate) -> Callable[[], bool]:
    return lambda: len(gate.inside) == LIMIT


def ended(threads: JobThreads, count: int) -> None:
    """Wait until so many jobs have come back."""
    seen = 0

    def all_of_them() -> bool:
        nonlocal seen
        seen += sum(1 for _ in threads.collect(0.01))
        return seen == count

    wait_for(all_of_them, message=lambda: f"{seen} of {count} jobs came back, {threads.waiting} wait")


def test_a_batch_runs_in_as_many_threads_as_there_may_be_and_the_rest_waits(
    threads: JobThreads, job: Job
) -> None:
    for _ in range(3):  # the first time the threads are new, then they sleep
        gate = Gate()
        threads.hand_out(batch(job, gate, LIMIT + 3))
        wait_for(full(gate), message="a thread sleeps while a job waits for it")
        assert threads.waiting == 3
        gate.out.set()
        ended(threads, LIMIT + 3)
        assert gate.most == LIMIT


def test_however_work_comes_none_of_it_waits_for_a_thread_that_sleeps(threads: JobThreads, job: Job) -> None:
    """Batches of any size, while some threads are at work, falling asleep or waking up."""
    dice = random.Random(7)
    for _ in range(150):
        gate = Gate()
        many = dice.randint(0, 2 * LIMIT)
        threads.hand_out(batch(job, lambda payload: None, many))
        if dice.random() < 0.5:
            ended(threads, many)
            many = 0
        threads.hand_out(batch(job, gate, LIMIT))
        wait_for(full(gate), interval=0.001, message="a thread sleeps while a job waits for it")
        gate.out.set()
        ended(threads, many + LIMIT)


def test_what_is_taken_back_runs_nowhere_else(threads: JobThreads, job: Job) -> None:
    ran: list[int] = []
    lock = threading.Lock()

    def count(payload: Any) -> None:
        with lock:
            ran.append(1)

    for _ in range(200):
        ran.clear()
        threads.hand_out(batch(job, count, 50))
        back = len(threads.take_back())
        ended(threads, 50 - back)
        assert len(ran) == 50 - back
