"""The job threads of a worker: they run what is handed out, clean up after each job, and hand back its
outcome.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from django_forgejobs import between, conf, executor, signals
from django_forgejobs.board import Board
from django_forgejobs.context import JobContext
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.registry import Definition
from django_forgejobs.states import GIVE_BACK

logger = logging.getLogger("django_forgejobs")

#: Seconds that an idle thread gets to close its connections.
CLOSE_WITHIN = 5.0


@dataclass(slots=True)
class Running:
    """One claimed job in the hands of a worker, until its end is written; ``started`` is None while it waits
    for a thread. ``superseded`` is whether the worker has claimed the same job anew.
    """

    job: Job
    definition: Definition
    context: JobContext
    started: float | None = None
    told_at: float | None = None
    superseded: bool = False

    def start(self) -> None:
        """Note that the handler begins now; its time runs from here."""
        self.started = time.monotonic()
        if self.definition.timeout is not None:
            self.context.deadline = self.started + self.definition.timeout

    @property
    def seconds(self) -> float:
        """For how long it has been running."""
        return time.monotonic() - (self.started or time.monotonic())

    @property
    def overdue_at(self) -> float | None:
        """When the worker gives it up, on the monotonic clock; None without a timeout."""
        deadline = self.context.deadline
        return None if deadline is None else deadline + conf.current().TIMEOUT_MARGIN


class JobThreads:
    """Up to ``limit`` threads started as they are needed, daemons all: a stuck handler must not keep the
    process alive.

    Of the idle ones one is called when work comes, and each that finds more than it takes calls another: were
    all called at once, they would fight over the interpreter's lock for jobs that are over in no time.
    ``wake``, and whatever ends the wait of a thread, is a ``put`` into a ``SimpleQueue``, which is safe in a
    signal handler. Jobs that ran elsewhere come back by the same way, with ``hand_back``.
    """

    def __init__(self, db: str, board: Board, limit: int) -> None:
        self.db = db
        self.board = board
        self.limit = limit
        self._last_priority = 0
        self._work: deque[Running] = deque()
        # As many marks, or calls on their way, as threads wait for a call.
        self._idle: deque[None] = deque()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[Running, Outcome] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """How many jobs wait for a thread."""
        return len(self._work)

    def hand_out(self, batch: list[Running]) -> None:
        """Have ``batch``, which is in claim order, run; what waits already and is less urgent, after it."""
        if not batch:
            return
        if self._work and batch[0].job.priority > self._last_priority:
            batch = sorted(self.take_back() + batch, key=lambda running: -running.job.priority)
        self._work.extend(batch)
        self._last_priority = batch[-1].job.priority
        self._call_another()

    def take_back(self, keep: int = 0) -> list[Running]:
        """Return the jobs that no thread has begun, but for the first ``keep``, and let none begin them."""
        waiting: deque[Running] = deque()
        try:
            while len(self._work) > keep:
                waiting.appendleft(self._work.pop())
        except IndexError:
            pass
        return list(waiting)

    def hand_back(self, running: Running, outcome: Outcome) -> None:
        """Tell the worker that ``running`` has ended. Safe from any thread."""
        self._ended.put((running, outcome))

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
            self._calls.put(False)
        for thread in self._threads if wait else ():
            thread.join(timeout=CLOSE_WITHIN)

    def _call_another(self) -> None:
        try:
            self._idle.pop()
        except IndexError:
            self._begin_thread()
        else:
            self._calls.put(True)

    def _begin_thread(self) -> None:
        with self._lock:
            if len(self._threads) < self.limit:
                name = f"forgejobs-job-{len(self._threads) + 1}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()

    def _next(self) -> Running | None:
        """Return the next job, when there is one; None when the threads are dismissed."""
        while True:
            try:
                running = self._work.popleft()
            except IndexError:
                self._idle.append(None)
                if self._work:  # it came before the mark was set, so nobody was called
                    try:
                        self._idle.pop()
                        continue
                    except IndexError:  # somebody was, by now: that call is to be answered
                        pass
                if not self._calls.get():
                    return None
            else:
                if self._work:
                    self._call_another()
                return running

    def _run(self) -> None:
        cleaner = between.jobs()
        try:
            while (running := self._next()) is not None:
                if running.context.lease_lost:
                    self.hand_back(running, Outcome(running.job, GIVE_BACK))
                    continue
                running.start()
                slot = self.board.begin(running.job.id, running.overdue_at)
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
                self.hand_back(running, outcome)
                del running, outcome
        finally:
            between.close_all()
