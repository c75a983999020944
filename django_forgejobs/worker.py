"""The worker: one loop that writes what ended, claims what fits, and waits; its threads are `threads`."""

from __future__ import annotations

import enum
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from django.db import Error as DatabaseError
from django.db import connections

from django_forgejobs import (
    between,
    conf,
    executor,
    intake,
    reaper,
    registry,
    tally,
)
from django_forgejobs.board import Board, Note, Place
from django_forgejobs.context import JobContext
from django_forgejobs.cursor import ClaimCursor
from django_forgejobs.lanes import Suspects
from django_forgejobs.lease import LeaseKeeper
from django_forgejobs.listener import Listener
from django_forgejobs.models import AnnouncedType, Job
from django_forgejobs.outage import Outage
from django_forgejobs.outcomes import Outcome, Settlement
from django_forgejobs.pace import STALLED, Pace
from django_forgejobs.states import GIVE_BACK
from django_forgejobs.threads import JobThreads, Running
from django_forgejobs.turns import Apart, Turns

logger = logging.getLogger("django_forgejobs")

TALLY_INTERVAL = 60.0
#: Seconds before a result is tried again whose row somebody has locked.
LOCKED_AGAIN = 0.05


class Ended(enum.Enum):
    """How ``Worker.run`` came back."""

    CLEAN = "clean"
    #: Jobs were given back, or threads are stuck: the process must leave without waiting for them.
    FORCED = "forced"


def identity(name: str = "", *, pid: int | None = None, token: str = "") -> str:
    """Return a name for one start of a process, unique also where containers share host and pid."""
    host = (name or socket.gethostname()).encode("ascii", "replace").decode()[:120]
    return f"{host}:{pid or os.getpid()}:{token or secrets.token_hex(4)}"


class Worker:
    """Runs jobs until told to stop.

    ``queues`` of None serves every queue. ``handlers`` of None serves the registered types; an explicit
    dict takes every job of its queues and fails those that it does not know. ``stop()`` is looked at
    between any two jobs. ``burst`` ends when nothing is due.
    """

    def __init__(
        self,
        *,
        db: str,
        handlers: Mapping[str, Callable[..., Any]] | None = None,
        queues: tuple[str, ...] | None = None,
        concurrency: int = 1,
        poll_interval: float | timedelta | None = None,
        burst: bool = False,
        max_jobs: int | None = None,
        grace: float | None = None,
        name: str = "",
        stop: Callable[[], bool] | None = None,
        place: Place | None = None,
    ) -> None:
        self.settings = conf.current()
        self.db = db
        self.definitions = registry.definitions(handlers)
        self.types = tuple(sorted(self.definitions)) if handlers is None else None
        self.queues = None if queues is None else intake.queues(queues)
        self.concurrency = concurrency
        self.poll_interval = (
            self.settings.POLL_INTERVAL
            if poll_interval is None
            else intake.interval("poll_interval", poll_interval)
        )
        self.burst = burst
        self.max_jobs = max_jobs
        self.grace = self.settings.GRACE if grace is None else grace
        self.place = place or Place(identity(name), Board(concurrency))
        self.identity = self.place.identity
        self.claimed = 0
        self.finished = 0
        self.stop = stop or (lambda: False)
        self._signals = 0
        self._exhausted = False
        self._threads = JobThreads(db, self.place.board, concurrency)
        #: Claimed and not ended, those that wait for a thread included.
        self._running: dict[int, Running] = {}
        #: Those of them whose time is limited.
        self._timed: dict[int, Running] = {}
        self._unwritten: dict[int, tuple[Running, Outcome]] = {}
        self._stuck = 0
        #: The job that must run alone, if it is one.
        self._suspect: int | None = None
        self._stopping_since: float | None = None
        self._cursor = ClaimCursor(db)
        self._pace = Pace()
        self._look_at = 0.0
        self._hinted = False
        self._handed_out_at = 0.0
        self._write_at = 0.0
        self._ticked_at = -float("inf")
        self._tallied_at = time.monotonic()
        self._turns = self._take_turns()
        self._outage = Outage(db)
        self._in_doubt = False
        self._keeper = LeaseKeeper(db=db, lease=self.settings.LEASE, heartbeat=self.settings.HEARTBEAT)
        self._keeper.on_failure = self.wake
        self._listener = Listener(db=db, queues=self.queues, wake=self.hint)

    # --- from outside ----------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask for a drain; a second call gives unfinished jobs back at once. Safe in a signal handler."""
        self._signals += 1
        self.wake()

    def wake(self) -> None:
        """Make the loop look at everything now. Safe in a signal handler and from any thread."""
        self._threads.wake()

    def hint(self) -> None:
        """Make the loop look for jobs now. Safe from any thread."""
        self._hinted = True
        self.wake()

    # --- the loop --------------------------------------------------------------------------------

    def run(self) -> Ended:
        """Work until stopped; return how it ended. Results are committed before it returns."""
        forced = True
        with self._keeper, nullcontext() if self.burst else self._listener:
            try:
                while not self._over():
                    self._turn()
                forced = bool(self._open() or self._stuck)
            finally:
                if self._open():
                    self._give_back()
                self._threads.dismiss(wait=not forced)
            self._flush()
        failed = self._keeper.failed is not None
        return Ended.FORCED if forced or failed else Ended.CLEAN

    def _over(self) -> bool:
        if self._signals > 1 or self._past_grace():
            return True
        return self.stopping and not self._open()

    def _open(self) -> bool:
        """Whether there are claims, or may be, whose end is not written."""
        return bool(self._running or self._unwritten or self._in_doubt)

    @property
    def stopping(self) -> bool:
        """Whether no more jobs are claimed."""
        if self._stopping_since is None and self._has_reason_to_stop():
            self._stopping_since = time.monotonic()
            if not self._takes_its_time():
                self._give_back_waiting()
            for running in self._running.values():
                running.context.stopping = True
        return self._stopping_since is not None

    def _has_reason_to_stop(self) -> bool:
        return (
            self._signals > 0
            or self.stop()
            or self._keeper.failed is not None
            or self._stuck >= self.concurrency
            or self._takes_its_time()
        )

    def _takes_its_time(self) -> bool:
        """Whether it is to end with the jobs that it has, however long they wait."""
        return self._exhausted or (self.max_jobs is not None and self.claimed >= self.max_jobs)

    def _past_grace(self) -> bool:
        since = self._stopping_since
        return since is not None and self._in_a_hurry() and time.monotonic() - since >= self.grace

    def _in_a_hurry(self) -> bool:
        """Whether the grace counts: a burst or --max-jobs lets its jobs end, however long they take."""
        asked = self._signals > 0 or self._stuck >= self.concurrency
        nobody_renews = self._keeper.failed is not None
        only_in_doubt = self._in_doubt and not self._running and not self._unwritten
        return asked or nobody_renews or only_in_doubt

    def _turn(self) -> None:
        """One turn: write what ended, claim what fits, then sleep until something happens."""
        self.place.board.come_round()
        self._check_timeouts()
        if self._threads.waiting and time.monotonic() >= self._stalled_at():
            self._give_back_waiting()
        if time.monotonic() >= self._outage.retry_at:
            self._ask_the_database()
        if not self._over():
            self._collect(self._pause())

    def _ask_the_database(self) -> None:
        try:
            if self._outage.failures:
                self._put_off_reclaiming()
            self._tick()
            if self._in_doubt:
                self._settle_doubt(start=not self.stopping)
            self._exchange()
        except DatabaseError as error:
            self._outage.met(error, meanwhile=f"{len(self._running)} jobs run on.")
        else:
            self._outage.over()

    def _collect(self, timeout: float) -> None:
        before = len(self._unwritten)
        for running, outcome in self._threads.collect(timeout):
            self._ended(running, outcome)
        self._pace.ended(len(self._unwritten) - before)

    def _ended(self, running: Running, outcome: Outcome) -> None:
        if self._running.get(running.job.pk) is not running:
            self._stuck -= 1  # a thread that had timed out came back after all; its claim is gone
            return
        del self._running[running.job.pk]
        self._timed.pop(running.job.pk, None)
        running.context.over = True
        self._unwritten[running.job.pk] = running, outcome
        self._look_at = self._write_at = 0.0

    def _pause(self) -> float:
        """Return for how many seconds there is nothing to do, unless something happens."""
        now = time.monotonic()
        # A second at the most: ``stop()`` may be anybody's function, and nobody wakes us for it.
        moments = [now + (0.1 if self.stopping else 1.0)]
        moments += [self._judged_at(running) for running in self._timed.values()]
        if self._unwritten:
            moments.append(max(self._write_at, self._outage.retry_at))
        if self._threads.waiting:
            moments.append(self._stalled_at())
        self._listener.idle = self._may_claim()
        if self._listener.idle:
            moments.append(max(now if self._hinted else self._look_at, self._outage.retry_at))
        return min(moments) - now

    # --- claim -----------------------------------------------------------------------------------

    def _free(self) -> int:
        """Return how many jobs can start at once; less than none while some wait."""
        return self.concurrency - self._stuck - len(self._running)

    def _room(self) -> int:
        """Return how many jobs may be claimed: those that can start at once, and a few ahead."""
        if self._suspect in self._running:
            return 0  # it runs alone
        room = self._free() + self._pace.ahead()
        if self.max_jobs is not None:
            room = min(room, self.max_jobs - self.claimed)
        return max(room, 0)

    def _may_claim(self) -> bool:
        return not self.stopping and self._keeper.healthy and self._room() > 0

    def _exchange(self) -> None:
        """Write what has ended and claim what there is room for, in one round trip."""
        wanted = self._wanted()
        outcomes = self._to_write()
        if not wanted:
            if outcomes:
                self._settled(Job.objects.finish(outcomes, db=self.db))
            return
        busy = bool(self._running or self._unwritten)
        after = self._cursor.after()
        connections[self.db].ensure_connection()  # what fails here is not in doubt
        self._in_doubt = True
        asked_at = time.monotonic()
        settlement, jobs = Job.objects.finish_and_claim(
            outcomes,
            wanted,
            worker=self.identity,
            queues=self.queues,
            types=self.types,
            suspects=Suspects.NEVER if busy else self._turns.idle(),
            lease=self.settings.LEASE,
            after=after,
            ahead=wanted - min(wanted, max(self._free(), 0)),
            db=self.db,
        )
        if jobs is not None:
            self._in_doubt = False
            self._claimed(jobs, wanted, swept=not after, seconds=time.monotonic() - asked_at)
            self._exhausted = self.burst and not jobs and not busy and not after
        self._settled(settlement)

    def _wanted(self) -> int:
        """Return how many jobs to claim now."""
        now = time.monotonic()
        if not self._may_claim() or not (self._hinted or now >= self._look_at):
            return 0
        self._hinted = False
        self._look_at = now + random.uniform(1, 1.1) * self.poll_interval  # noqa: S311
        if (self._running or self._unwritten) and self._turns.makes_room():
            return 0
        return self._room()

    def _claimed(self, jobs: list[Job], wanted: int, *, swept: bool, seconds: float) -> None:
        self._cursor.claimed(jobs, wanted=wanted, swept=swept, seconds=seconds)
        if len(jobs) == wanted:
            self._look_at = 0.0
        elif not swept:
            self._look_at = min(self._look_at, self._cursor.sweeps_at)
        self._start(jobs)

    def _take_turns(self) -> Turns:
        patience, takes = self.settings.SUSPECT_PATIENCE, self.place.suspects
        if takes is None:
            return Turns(patience, self._suspects_wait)
        return Apart(takes, patience, self._suspects_wait, lambda: self.place.board.note(Note.SUSPECTS))

    def _suspects_wait(self) -> bool:
        return bool(Job.objects.using(self.db).suspects(self.queues, self.types).exists())

    def _take(self, jobs: list[Job]) -> list[Running]:
        """Keep the leases of claimed jobs from now on."""
        lease, ask = self.settings.LEASE, self._keeper.ask
        taken = [
            Running(job, self.definitions[job.type], JobContext(job, lease=lease, renew=ask)) for job in jobs
        ]
        self._keeper.add(*(running.context for running in taken))
        return taken

    def _start(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        taken = self._take(jobs)
        self.claimed += len(taken)
        for running in taken:
            self._running[running.job.pk] = running
            if running.definition.timeout is not None:
                self._timed[running.job.pk] = running
        first = jobs[0]
        self._suspect = first.pk if first.lease_expirations else None
        self._turns.started(suspect=self._suspect is not None)
        self._handed_out_at = time.monotonic()
        self._threads.hand_out(taken)

    def _stalled_at(self) -> float:
        """Return when the jobs that wait for a thread are given back, if none starts until then."""
        return max(self._threads.last_start, self._handed_out_at) + STALLED

    def _give_back_waiting(self) -> None:
        """Let others have what waits for a thread here."""
        for running in self._threads.take_back():
            self._ended(running, Outcome(running.job, GIVE_BACK))
            self.claimed -= 1

    def _settle_doubt(self, *, start: bool) -> None:
        """Run the jobs of a claim whose answer was lost, or give them back: the database knows whether it
        took place.
        """
        known = self._running.keys() | self._unwritten.keys()
        mine = [job for job in Job.objects.held_by(self.identity, db=self.db) if job.pk not in known]
        self._in_doubt = False
        if start:
            self._start(mine)
            return
        for running in self._take(mine):
            self._unwritten[running.job.pk] = running, Outcome(running.job, GIVE_BACK)
        self._write_at = 0.0

    # --- finish ----------------------------------------------------------------------------------

    def _to_write(self) -> list[Outcome]:
        if time.monotonic() < self._write_at:
            return []
        return [outcome for _, outcome in self._unwritten.values()]

    def _settled(self, settlement: Settlement) -> None:
        over = [self._unwritten.pop(o.job.pk)[0] for o in (*settlement.accepted, *settlement.lost)]
        self._keeper.remove(*(running.context for running in over))
        self.finished += len(over)
        if settlement.outage is not None:
            raise settlement.outage
        if settlement.waiting:
            self._write_at = time.monotonic() + LOCKED_AGAIN

    def _judged_at(self, running: Running) -> float:
        """Return when ``running`` must be told that its time is over, or given up; or, while it waits for a
        thread, the first moment at which that can be.
        """
        deadline = running.context.deadline
        if deadline is None:
            return running.handed_out + (running.definition.timeout or 0.0)
        return deadline + self.settings.TIMEOUT_MARGIN if running.told else deadline

    def _check_timeouts(self) -> None:
        now = time.monotonic()
        for running in list(self._timed.values()):
            if running.started is None or now < self._judged_at(running):
                continue
            if not running.told:
                running.told = True
                running.context.tell()
            else:
                self._give_up(running)

    def _give_up(self, running: Running) -> None:
        """End the claim of a handler that does not come back; its thread, and so its slot, is lost."""
        seconds = time.monotonic() - (running.started or running.handed_out)
        outcome = executor.timed_out(running.job, running.definition, seconds)
        logger.error("Job %s is stuck in its thread, whose slot is lost.", running.job)
        running.context.revoke()
        self.place.board.forgive(running.job.pk)
        self._ended(running, outcome)
        self._stuck += 1

    def _give_back(self) -> None:
        """Release what has not ended, as the last statement before the process leaves."""
        self._give_back_waiting()
        self._collect(0)
        for running in self._running.values():
            outcome = executor.released(running.job, "the worker was stopped")
            self._unwritten[running.job.pk] = running, outcome
        self._running.clear()
        before = self.finished
        for _ in range(2):  # the second time on a new connection: the first may be dead and not know it
            self._write_at = 0.0
            try:
                if self._in_doubt:
                    self._settle_doubt(start=False)
                self._settled(Job.objects.finish(self._to_write(), db=self.db))
                break
            except DatabaseError as error:
                logger.warning("Unfinished jobs could not be given back (%s).", error)
                between.close(connections[self.db])
        logger.warning(
            "Unfinished jobs: %d given back, %d not, whose leases will end.",
            self.finished - before,
            len(self._unwritten),
        )

    # --- now and then ----------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._tallied_at >= TALLY_INTERVAL:
            self._tallied_at = now
            tally.flush(self.db)
        self._turns.look()
        interval = self.settings.RECLAIM_INTERVAL
        if now - self._ticked_at < (interval or TALLY_INTERVAL) or self.stopping:
            return
        self._ticked_at = now
        if self.types is not None:
            AnnouncedType.objects.announce(self.types, grace=self.settings.UNKNOWN_TYPE_GRACE, db=self.db)
        if interval:
            reaper.tick(self.db, stop=lambda: self.stopping)
            self._look_at = 0.0

    def _flush(self) -> None:
        try:
            tally.flush(self.db)
        except DatabaseError:
            logger.debug("The last counts could not be written.", exc_info=True)

    def _put_off_reclaiming(self) -> None:
        """Give other workers, which come back too, one heartbeat before their leases are judged."""
        interval = self.settings.RECLAIM_INTERVAL or TALLY_INTERVAL
        self._ticked_at = time.monotonic() + self.settings.HEARTBEAT - interval
