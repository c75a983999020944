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
from django_forgejobs.coroutines import JobLoop
from django_forgejobs.crew import Crew, Errand, Errands
from django_forgejobs.lanes import Suspects
from django_forgejobs.lease import LeaseKeeper
from django_forgejobs.listener import Listener
from django_forgejobs.models import AnnouncedType, Job
from django_forgejobs.outage import Outage
from django_forgejobs.outcomes import Outcome, Settlement
from django_forgejobs.pace import AHEAD
from django_forgejobs.states import GIVE_BACK
from django_forgejobs.threads import JobThreads, Running
from django_forgejobs.turns import Apart, Turns

logger = logging.getLogger("django_forgejobs")

TALLY_INTERVAL = 60.0
#: Seconds before a result is tried again whose row somebody has locked.
LOCKED_AGAIN = 0.05
#: Seconds after a line was cut at which to look for a claim that the server has committed since.
LATE_COMMITS = (1.0, 5.0, 30.0)


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
    dict takes every job of its queues and fails those that it does not know. Up to ``concurrency`` jobs run
    in threads, and beside them up to ``async_concurrency`` (None: as many) whose handlers are ``async def``
    on an event loop. ``stop()`` is looked at between any two jobs. ``burst`` ends when nothing is due.
    """

    def __init__(
        self,
        *,
        db: str,
        handlers: Mapping[str, Callable[..., Any]] | None = None,
        queues: tuple[str, ...] | None = None,
        concurrency: int = 1,
        async_concurrency: int | None = None,
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
        self.async_concurrency = concurrency if async_concurrency is None else async_concurrency
        self.poll_interval = (
            self.settings.POLL_INTERVAL
            if poll_interval is None
            else intake.interval("poll_interval", poll_interval)
        )
        self.burst = burst
        self.max_jobs = max_jobs
        self.grace = self.settings.GRACE if grace is None else grace
        self.place = place or Place(identity(name), Board(concurrency + self.async_concurrency))
        self.identity = self.place.identity
        self.claimed = 0
        self.finished = 0
        self.stop = stop or (lambda: False)
        self._signals = 0
        self._exhausted = False
        self._threads = JobThreads(db, self.place.board, self.concurrency)
        self._coroutines = JobLoop(
            db, limit=self.async_concurrency, ended=self._threads.hand_back, board=self.place.board
        )
        self._in_threads = Crew(self._threads, self.concurrency)
        self._on_loop = Crew(self._coroutines, self.async_concurrency)
        self._crews = self._in_threads, self._on_loop
        self._errands = Errands(
            self.definitions, self.types, threads=self._in_threads, coroutines=self._on_loop, db=db
        )
        #: Claimed and not ended, those that wait for their turn included.
        self._running: dict[int, Running] = {}
        #: Those of them whose time is limited.
        self._timed: dict[int, Running] = {}
        self._unwritten: dict[int, tuple[Running, Outcome]] = {}
        #: The job that must run alone, if it is one.
        self._suspect: int | None = None
        self._stopping_since: float | None = None
        self._look_at = 0.0
        self._hinted = False
        self._write_at = 0.0
        self._ticked_at = -float("inf")
        self._tallied_at = time.monotonic()
        self._turns = self._take_turns()
        self._outage = Outage(db)
        self._in_doubt = False
        #: When to look once more for claims whose answer was lost: the server may commit one late.
        self._doubts: list[float] = []
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
                stuck = any(crew.stuck for crew in self._crews)
                forced = bool(self._open() or stuck or self._coroutines.abandoned)
            finally:
                if self._open():
                    self._give_back()
                self._coroutines.dismiss(wait=not forced)
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
            or self._crew_lost()
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
        asked = self._signals > 0 or self._crew_lost()
        nobody_renews = self._keeper.failed is not None
        only_in_doubt = self._in_doubt and not self._running and not self._unwritten
        return asked or nobody_renews or only_in_doubt

    def _crew_lost(self) -> bool:
        return any(crew.lost for crew in self._crews)

    def _turn(self) -> None:
        """One turn: write what ended, claim what fits, then sleep until something happens."""
        self.place.board.come_round()
        self._on_loop.blocked = self._coroutines.blocked_since() is not None
        self._check_timeouts()
        for crew in self._crews:
            # One that is to end with what it has keeps it, however long that takes.
            if (surplus := crew.surplus) and not self._takes_its_time():
                self._give_back_waiting(crew, keep=crew.hands.waiting - surplus)
        if time.monotonic() >= self._outage.retry_at:
            self._ask_the_database()
        if not self._over():
            self._collect(self._pause())

    def _ask_the_database(self) -> None:
        try:
            self._keep_commits_ours()
            if self._outage.failures:
                self._put_off_reclaiming()
            self._tick()
            if self._in_doubt or (self._doubts and time.monotonic() >= self._doubts[0]):
                self._settle_doubt(start=not self.stopping)
            self._exchange()
        except DatabaseError as error:
            self._outage.met(error, meanwhile=f"{len(self._running)} jobs run on.")
        else:
            self._outage.over()

    def _keep_commits_ours(self) -> None:
        """Undo what a receiver of a signal did to this connection, lest our next statement be part of it."""
        connection = connections[self.db]
        if connection.in_atomic_block or not connection.get_autocommit():
            between.leave_transaction(connection)
            logger.warning(
                "A receiver of a signal left a transaction open; what it did there is rolled back."
            )

    def _collect(self, timeout: float) -> None:
        before = [crew.busy for crew in self._crews]
        for running, outcome in self._threads.collect(timeout):
            self._ended(running, outcome)
        for crew, busy in zip(self._crews, before, strict=True):
            crew.pace.ended(busy - crew.busy)

    def _ended(self, running: Running, outcome: Outcome) -> None:
        crew = self._crew(running)
        if self._running.get(running.job.id) is not running:  # a handler whose claim is gone came back
            if running.superseded:
                crew.busy -= 1
            else:
                crew.stuck -= 1  # it had timed out
            return
        del self._running[running.job.id]
        crew.busy -= 1
        self._timed.pop(running.job.id, None)
        running.context.over = True
        self._unwritten[running.job.id] = running, outcome
        self._look_at = self._write_at = 0.0

    def _pause(self) -> float:
        """Return for how many seconds there is nothing to do, unless something happens."""
        now = time.monotonic()
        # A second at the most: ``stop()`` may be anybody's function, and nobody wakes us for it.
        moments = [now + (0.1 if self.stopping else 1.0)]
        moments += [self._judged_at(running) for running in self._timed.values()]
        if self._unwritten:
            moments.append(max(self._write_at, self._outage.retry_at))
        moments += [max(crew.patient_until, now + AHEAD) for crew in self._crews if crew.hands.waiting]
        self._listener.idle = self._may_claim()
        if self._listener.idle:
            moments.append(max(now if self._hinted else self._look_at, self._outage.retry_at))
        return min(moments) - now

    # --- claim -----------------------------------------------------------------------------------

    def _crew(self, running: Running) -> Crew:
        return self._on_loop if running.definition.is_async else self._in_threads

    def _room(self, errand: Errand | None = None) -> int:
        """Return how many jobs may be claimed: those that can start at once, and a few ahead."""
        if self._suspect in self._running:
            return 0  # it runs alone
        room = (errand or self._errands.next()).room
        if self.max_jobs is not None:
            room = min(room, self.max_jobs - self.claimed)
        return max(room, 0)

    def _may_claim(self) -> bool:
        return not self.stopping and self._keeper.healthy and self._room() > 0

    def _exchange(self) -> None:
        """Write what has ended and claim what there is room for, in one round trip."""
        errand = self._errands.next()
        wanted = self._wanted(errand)
        outcomes = self._to_write()
        if not wanted:
            if outcomes:
                self._settled(Job.objects.finish(outcomes, db=self.db))
            return
        busy = bool(self._running or self._unwritten)
        after = errand.cursor.after()
        suspects = Suspects.NEVER if self._running else self._turns.idle()
        connections[self.db].ensure_connection()  # what fails here is not in doubt
        self._in_doubt = True
        asked_at = time.monotonic()
        settlement, jobs = Job.objects.finish_and_claim(
            outcomes,
            wanted,
            worker=self.identity,
            queues=self.queues,
            types=errand.types,
            suspects=suspects,
            lease=self.settings.LEASE,
            after=after,
            ahead=max(wanted - errand.free, 0),
            db=self.db,
        )
        if jobs is not None:
            self._in_doubt = False
            if not self.burst:  # that must be sure that nothing is left
                self._turns.looked(suspects, found=any(job.lease_expirations for job in jobs[:1]))
            self._claimed(errand, jobs, wanted, swept=not after, seconds=time.monotonic() - asked_at)
            whole = errand is self._errands.whole
            nothing = not jobs and not busy and not after and settlement.outage is None
            self._exhausted = self.burst and whole and nothing
        self._settled(settlement)

    def _wanted(self, errand: Errand) -> int:
        """Return how many jobs to claim now."""
        now = time.monotonic()
        if not self._may_claim() or not (self._hinted or now >= self._look_at):
            return 0
        self._hinted = False
        self._look_at = now + random.uniform(1, 1.1) * self.poll_interval  # noqa: S311
        if self._running and self._turns.makes_room():
            return 0
        return self._room(errand)

    def _claimed(self, errand: Errand, jobs: list[Job], wanted: int, *, swept: bool, seconds: float) -> None:
        errand.cursor.claimed(jobs, wanted=wanted, swept=swept, seconds=seconds)
        if self._errands.done(errand, full=len(jobs) == wanted):
            self._look_at = 0.0
        elif not swept:
            self._look_at = min(self._look_at, errand.cursor.sweeps_at)
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
            if (older := self._running.get(running.job.id)) is not None:
                # Cancelled and requeued while its handler runs here: that one is told, and not waited for.
                older.superseded = True
                older.context.revoke()
                self._keeper.remove(older.context)
            self._running[running.job.id] = running
            self._crew(running).busy += 1
            if running.definition.timeout is not None:
                self._timed[running.job.id] = running
        first = jobs[0]
        self._suspect = first.id if first.lease_expirations else None
        self._turns.started(suspect=self._suspect is not None)
        for crew in self._crews:
            if batch := [running for running in taken if self._crew(running) is crew]:
                crew.hands.hand_out(batch)

    def _give_back_waiting(self, *crews: Crew, keep: int = 0) -> None:
        """Let others have what waits for a thread here, or for its turn on the loop, but for the first."""
        for crew in crews or self._crews:
            for running in crew.hands.take_back(keep):
                self._ended(running, Outcome(running.job, GIVE_BACK))
                self.claimed -= 1

    def _settle_doubt(self, *, start: bool) -> None:
        """Run the jobs of a claim whose answer was lost, or give them back: the database knows whether it
        took place.
        """
        known = self._running.keys() | self._unwritten.keys()
        mine = [job for job in Job.objects.held_by(self.identity, db=self.db) if job.pk not in known]
        now = time.monotonic()
        if self._in_doubt:
            self._doubts = [now + seconds for seconds in LATE_COMMITS]
        self._doubts = [moment for moment in self._doubts if moment > now]
        self._in_doubt = False
        if start:
            self._start(mine)
            return
        for running in self._take(mine):
            self._unwritten[running.job.id] = running, Outcome(running.job, GIVE_BACK)
        self._write_at = 0.0

    # --- finish ----------------------------------------------------------------------------------

    def _to_write(self) -> list[Outcome]:
        if time.monotonic() < self._write_at:
            return []
        return [outcome for _, outcome in self._unwritten.values()]

    def _settled(self, settlement: Settlement) -> None:
        over = [self._unwritten.pop(o.job.id)[0] for o in (*settlement.accepted, *settlement.lost)]
        self._keeper.remove(*(running.context for running in over))
        self.finished += len(over)
        if settlement.outage is not None:
            raise settlement.outage
        if settlement.waiting:
            self._write_at = time.monotonic() + LOCKED_AGAIN

    def _judged_at(self, running: Running) -> float:
        """Return when ``running`` must be told that its time is over, or given up; or, while it waits for its
        turn, the first moment at which that can be.
        """
        deadline = running.context.deadline
        if deadline is None:
            return time.monotonic() + (running.definition.timeout or 0.0)
        return deadline + self.settings.TIMEOUT_MARGIN if running.told_at is not None else deadline

    def _check_timeouts(self) -> None:
        now = time.monotonic()
        for running in list(self._timed.values()):
            if running.started is None or now < self._judged_at(running) or running.context.over:
                continue
            if running.told_at is None:
                self._coroutines.ask()
                running.told_at = time.monotonic()
                running.context.tell()
            else:
                self._give_up(running)

    def _give_up(self, running: Running) -> None:
        """End the claim of a handler that does not come back; its slot is lost."""
        crew = self._crew(running)
        if crew is self._on_loop:
            blocked_since = self._coroutines.blocked_since()
            if blocked_since is not None and blocked_since <= (running.told_at or 0.0):
                self._give_up_loop()  # nobody has heard
                return
        outcome = executor.timed_out(running.job, running.definition, running.seconds)
        logger.error("Job %s is stuck, and its slot is lost.", running.job)
        self._end_stuck(running, outcome)
        crew.stuck += 1

    def _give_up_loop(self) -> None:
        """End the claims of all coroutines, since one of them lets no other run. It alone is to blame."""
        self._give_back_waiting(self._on_loop)
        blocker = self._coroutines.blocked_by()
        logger.error("Job %s blocks the event loop for good; the worker ends.", blocker and blocker.job)
        for running in [one for one in self._running.values() if self._crew(one) is self._on_loop]:
            if running is blocker:
                outcome = executor.blocked(running.job, running.definition, running.seconds)
            else:
                outcome = executor.released(running.job, "another job blocked the event loop")
            self._end_stuck(running, outcome)
        self._on_loop.stuck = self._on_loop.size

    def _end_stuck(self, running: Running, outcome: Outcome) -> None:
        running.context.revoke()
        self.place.board.forgive(running.job.id)
        self._ended(running, outcome)

    def _give_back(self) -> None:
        """Release what has not ended, as the last statement before the process leaves."""
        self._give_back_waiting()
        self._collect(0)
        for running in self._running.values():
            outcome = executor.released(running.job, "the worker was stopped")
            self._unwritten[running.job.id] = running, outcome
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
