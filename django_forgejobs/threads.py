"""The job threads of a worker: they run what is handed out, clean up after each job, and hand back its
outcome.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from django_forgejobs import between, conf, executor, signals
from django_forgejobs.board import Board
from django_forgejobs.context import JobContext
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.registry import Definition

logger = logging.getLogger("django_forgejobs")

#: Seconds that an idle thread gets to close its connections.
CLOSE_WITHIN = 5.0


@dataclass(slots=True)
class Running:
    """One claimed job in the hands of a worker, until its end is written; ``started`` is None while it waits
    for a thread.
    """

    job: Job
    definition: Definition
    context: JobContext
    handed_out: float = field(default_factory=time.monotonic)
    started: float | None = None
    told: bool = False

    def start(self) -> None:
        """Note that the handler begins now; its time runs from here."""
        self.started = time.monotonic()
        if self.definition.timeout is not None:
            self.context.deadline = self.started + self.definition.timeout

    @property
    def overdue_at(self) -> float | None:
        """When the worker gives it up, on the monotonic clock; None without a timeout."""
        deadline = self.context.deadline
        return None if deadline is None else deadline + conf.current().TIMEOUT_MARGIN


class JobThreads:
    """Threads started as they are needed, daemons all: a stuck handler must not keep the process alive.

    Both ways are a ``SimpleQueue``, whose ``put`` is safe in a signal handler; so is ``wake``.
    """

    def __init__(self, db: str, board: Board) -> None:
        self.db = db
        self.board = board
        self.last_start = 0.0
        self._last_priority = 0
        self._work: queue.SimpleQueue[Running | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[Running, Outcome] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def waiting(self) -> int:
        """How many jobs wait for a thread."""
        return self._work.qsize()

    def hand_out(self, batch: list[Running], *, threads: int) -> None:
        """Have ``batch``, which is in claim order, run by up to ``threads`` threads. What waits already and
        is less urgent runs after it.
        """
        if batch and self.waiting and batch[0].job.priority > self._last_priority:
            batch = sorted(self.take_back() + batch, key=lambda running: -running.job.priority)
        for running in batch:
            self._work.put(running)
            self._last_priority = running.job.priority
        while len(self._threads) < threads:
            name = f"forgejobs-job-{len(self._threads) + 1}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def take_back(self) -> list[Running]:
        """Return the jobs that no thread has begun, and let none begin them."""
        waiting = []
        try:
            while (running := self._work.get_nowait()) is not None:
                waiting.append(running)
        except queue.Empty:
            pass
        return waiting

    def collect(self, timeout: float) -> Iterator[tuple[Running, Outcome]]:
        """Wait up to ``timeout`` seconds for a job to end or a wake-up, then yield all that has ended."""
        try:
            item = self._ended.get(timeout=timeout) if timeout > 0 else self._ended.get_nowait()
            while True:
                if item is not None:
                    yield item
                item = self._ended.get_nowait()
        except queue.Empty:
            return

    def wake(self) -> None:
        """End the wait of ``collect``."""
        self._ended.put(None)

    def dismiss(self, *, wait: bool) -> None:
        """Let the threads end and close their connections; wait for them only if none is stuck."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads if wait else ():
            thread.join(timeout=CLOSE_WITHIN)

    def _run(self) -> None:
        cleaner = between.jobs()
        try:
            while (running := self._work.get()) is not None:
                running.start()
                self.last_start = running.started or 0.0
                slot = self.board.begin(running.job.pk, running.overdue_at)
                outcome = executor.released(running.job, "its thread failed before it began")
                try:
                    with cleaner:
                        signals.send(signals.started, job=running.job)
                        outcome = executor.execute(
                            running.job,
                            running.definition,
                            running.context,
                            reachable=lambda: between.reachable(self.db),
                        )
                except BaseException:
                    # A thread that died here would keep its job, and its slot, for ever.
                    logger.critical("Cleaning up after %s failed.", running.job, exc_info=True)
                    between.close_all()
                self.board.end(slot)
                self._ended.put((running, outcome))
                del running, outcome
        finally:
            between.close_all()
