"""Ticks the scheduler until told to stop: a process of its own, or a thread beside a worker."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from django.db import Error as DatabaseError

from django_forgejobs import between, conf, scheduler, schedules, tally
from django_forgejobs.outage import Outage
from django_forgejobs.scheduler import Tick

logger = logging.getLogger("django_forgejobs")

#: Seconds between two announcements that a scheduler is alive, and what its code declares.
ANNOUNCE_INTERVAL = 15.0

#: Seconds for which a worker that ends waits for the tick under way.
STOP_WITHIN = 10.0


class Ticker:
    """Makes rows of the declared schedules, then ticks every ``POLL_INTERVAL``; outages only delay it.

    Any number may run. ``on_round`` is called after each round, an outage or not, and between two schedules:
    the loop is alive.
    ``done`` is what all ticks did. Raises ``JobError`` at once for a declared schedule that is wrong.
    """

    def __init__(self, *, db: str, on_round: Callable[[], None] | None = None) -> None:
        self.db = db
        self.interval = conf.current().POLL_INTERVAL
        self.declared = schedules.declared()
        self.done = Tick()
        self.failed: BaseException | None = None
        self._on_round = on_round or (lambda: None)
        self.stopping = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._outage = Outage(db)
        self._synced = False
        self._announced_at = -float("inf")

    def request_stop(self) -> None:
        """Make ``run`` return after the schedule under way. Safe in a signal handler."""
        self.stopping = True
        self._wake.put(None)  # unlike an Event's set(), safe where a signal interrupts the wait for it

    def run(self) -> None:
        """Tick until told to stop."""
        while not self.stopping:
            if time.monotonic() >= self._outage.retry_at:
                self._round()
            self._on_round()
            with suppress(queue.Empty):
                self._wake.get(timeout=self.interval * random.uniform(0.9, 1))  # noqa: S311

    def once(self) -> Tick:
        """Do one round and return what it did; raises what the database does."""
        if not self._synced:
            self._synced = not scheduler.begin(self.db, self.declared).held
        if time.monotonic() - self._announced_at >= ANNOUNCE_INTERVAL:
            scheduler.announce(self.db, self.declared)
            self._announced_at = time.monotonic()
            tally.flush(self.db)
        tick = scheduler.tick(self.db, stop=self._between)
        self.done += tick
        return tick

    @contextmanager
    def in_background(self, on_failure: Callable[[], None]) -> Iterator[None]:
        """Run in a thread with a connection of its own, until the block ends; ``failed`` is why it ended
        before.
        """
        thread = threading.Thread(
            target=self._in_thread, args=(on_failure,), name="forgejobs-scheduler", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self.request_stop()
            thread.join(STOP_WITHIN)

    def _in_thread(self, on_failure: Callable[[], None]) -> None:
        try:
            self.run()
        except BaseException as error:
            self.failed = error
            logger.critical("The scheduler's thread died; its worker ends.", exc_info=True)
            on_failure()
        finally:
            between.close_all()

    def _between(self) -> bool:
        """Say between two schedules that the loop is alive: a thousand of them can take a minute."""
        self._on_round()
        return self.stopping

    def _round(self) -> None:
        try:
            self.once()
        except DatabaseError as error:
            self._outage.met(error)
        else:
            self._outage.over()
