"""Keeps several worker processes: starts them, replaces who ended, and has taken back what a dead one held.

It has no thread and asks no database, so that nothing but memory is shared when it forks. How a worker works
is said in ``worker``; what one notes for its supervisor, in ``board``.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import time
from dataclasses import dataclass, field

from django_forgejobs import conf, forks, watchdog
from django_forgejobs.board import Board, Note, Place
from django_forgejobs.lanes import Suspects
from django_forgejobs.recovery import SUSPECTS, Recovery
from django_forgejobs.takeover import Death
from django_forgejobs.worker import identity

logger = logging.getLogger("django_forgejobs")

#: Seconds between two looks at what the workers have noted.
INTERVAL = 0.25
#: Seconds that a worker gets to give a handler up, after it should have, before it is killed.
OVERDUE = 3.0
#: A worker that lived for less seconds than this died at once; so many of them in a row make a pause.
AT_ONCE = 5.0
#: Longest pause, in seconds, before the next start in a place where workers die at once.
PAUSE_AT_MOST = 30.0
#: Seconds beyond the grace, or after a second signal, that workers get to leave by themselves.
LAST_RESORT = 12.0
#: Seconds that taking back may take when the supervisor itself is to end.
LAST_LOOK = 5.0

#: What is passed on at the first, the second and the third stop signal, and what is said then.
STOPS = (
    (signal.SIGTERM, "Stopping: what runs has {grace:g} s to finish. A second signal gives it back at once."),
    (signal.SIGINT, "Stopping at once: what runs is given back."),
    (signal.SIGKILL, "The workers do not come to an end: {number} killed."),
)


@dataclass(eq=False)
class Seat:
    """What is to be filled. ``number`` 0 is the one for suspects, filled when ``is_wanted``."""

    number: int
    is_wanted: bool = True
    next_start: float = 0.0
    deaths: int = 0


@dataclass(eq=False)
class Child:
    """One worker process."""

    seat: Seat
    pid: int
    identity: str
    board: Board
    started: float = field(default_factory=time.monotonic)
    leaving: bool = False
    forced: bool = False
    #: Since when each overdue job has been seen to be so, and for which it was killed.
    late: dict[int, float] = field(default_factory=dict)
    overdue: frozenset[int] = frozenset()
    #: How often its loop had come round at the last look, and for how long it has not since.
    rounds: int = 0
    silent: float = 0.0


class Supervisor:
    """Keeps ``processes`` workers of ``concurrency`` each, until told to stop or, in a ``burst``, until
    each has ended by itself.

    A killed supervisor ends its workers: they finish what runs. ``forced`` is whether, at the stop,
    any had to be forced; ``changed`` whether to restart since code changed.
    """

    def __init__(
        self, *, db: str, processes: int, concurrency: int, grace: float, name: str = "", burst: bool = False
    ) -> None:
        self.concurrency = concurrency
        self.grace = grace
        self.name = name
        self.burst = burst
        self.forced = False
        self.changed = False
        self.starts = 0
        self.deaths = 0
        self._parent = forks.Parent()
        self._recovery = Recovery(db, self._parent)
        self._seats = [Seat(number) for number in range(1, processes + 1)]
        self._alone = Seat(0, is_wanted=False)
        self._children: list[Child] = []
        self._signals = 0
        self._passed_on = 0
        self._stopping_since: float | None = None
        self._told_at = 0.0
        self._looked_at = time.monotonic()
        self._alive_at = 0.0

    def request_stop(self) -> None:
        """Pass a stop signal on to the workers. Safe in a signal handler."""
        self._signals += 1

    def run(self) -> Place | None:
        """Supervise. Return None when all is over, and in each worker process, at its start, its place.

        In a worker process the stop signals are blocked until it handles them.
        """
        gc.collect()
        gc.freeze()  # or each collection in a worker would write to, and so copy, all that is shared
        with self._parent:
            while True:
                self._recover()
                for seat in (*self._seats, self._alone):
                    if self._is_vacant(seat) and (place := self._fill(seat)):
                        return place
                self._tell_systemd()
                if self._is_over():
                    return None
                self._parent.wait(INTERVAL)
                self._see_who_ended()
                self._pass_on()
                self._look_at_boards()

    @property
    def stopping(self) -> bool:
        """Whether nobody is replaced any more."""
        return self._signals > 0 or self.changed

    def _is_over(self) -> bool:
        if self._children:
            return False
        if self.stopping:
            return not self._recovery.is_pending(1, within=LAST_LOOK)
        wanted = any(seat.is_wanted for seat in (*self._seats, self._alone))
        return self.burst and not wanted and not self._recovery.is_pending(2)

    # --- starts ----------------------------------------------------------------------------------

    def _is_vacant(self, seat: Seat) -> bool:
        if self.stopping or not seat.is_wanted or time.monotonic() < seat.next_start:
            return False
        mine = [child for child in self._children if child.seat is seat]
        # One successor at a time, or a seat whose leaving workers come to no end would fill the machine.
        return not mine or (len(mine) == 1 and mine[0].leaving)

    def _fill(self, seat: Seat) -> Place | None:
        """Start a worker; return its place in its own process, None in this one."""
        token, board = secrets.token_hex(4), Board(self.concurrency)
        try:
            pid = self._parent.fork()
        except OSError as error:
            seat.next_start = time.monotonic() + AT_ONCE
            logger.error("No process can be started (%s): again in %g s.", error, AT_ONCE)
            return None
        if pid == 0:
            takes: Suspects | None = Suspects.NEVER
            if seat is self._alone:  # in a burst, also what the suspects enqueue: nobody else is left
                takes = None if self.burst else Suspects.ONLY
            name = identity(self.name, token=token)
            return Place(name, board, takes, seat.number, self._parent.lifeline)
        if seat is self._alone:
            seat.is_wanted = False
        self.starts += 1
        self._children.append(Child(seat, pid, identity(self.name, pid=pid, token=token), board))
        return None

    # --- ends ------------------------------------------------------------------------------------

    def _see_who_ended(self) -> None:
        ended = {child: forks.exit_code(child.pid) for child in self._children}
        self._children = [child for child, code in ended.items() if code is None]
        for child, code in ended.items():
            if code is None:
                continue
            # A handler may have ended the process, and with exit code 0 too.
            if code or child.board.begun() != frozenset():
                self._died(child, code)
                continue
            child.seat.deaths = 0
            if self.burst and not child.board.noted(Note.LEAVING):
                child.seat.is_wanted = False

    def _died(self, child: Child, code: int) -> None:
        self.deaths += 1
        child.seat.is_wanted = True  # also that for suspects: others may wait for their turn
        self.forced = self.forced or self.stopping
        begun, pause = child.board.begun(), self._pause(child)
        how = forks.in_words(code)
        # When we stop, a worker that was forced to has said so, and given back what it could.
        logger.log(
            logging.WARNING if self.stopping else logging.ERROR,
            "Worker %s %s; it was at %s. What it held is put back.%s",
            child.identity,
            how,
            _jobs(begun),
            f" It died at once, {child.seat.deaths} in a row: the next one starts in {pause:g} s."
            if pause
            else "",
        )
        if child.overdue:
            how = "gave no sign and was killed"
        elif child.forced:
            how = "was killed, since it did not stop"
        how = f"process {child.pid} ({child.identity}) {how}"
        death = Death(child.identity, how, begun, child.board.over(), child.overdue, blameless=child.forced)
        self._recovery.add(death)

    def _pause(self, child: Child) -> float:
        """Return how long its place stays empty: the longer, the more workers have died there at once."""
        seat = child.seat
        lived = time.monotonic() - child.started
        seat.deaths = seat.deaths + 1 if lived < AT_ONCE else 0
        pause = min(0.25 * 2 ** (seat.deaths - 1), PAUSE_AT_MOST) if seat.deaths > 1 else 0.0
        seat.next_start = time.monotonic() + pause
        return pause

    def _recover(self) -> None:
        code = self._recovery.turn()
        if code == SUSPECTS:
            self._alone.is_wanted = True
        if code is not None and self.burst:
            self._seats[0].is_wanted = True  # for what was given back, if nobody works any more

    # --- stop ------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Pass stop signals on; the last one also when time is over."""
        now = time.monotonic()
        if self.stopping and self._stopping_since is None:
            self._stopping_since = self._told_at = now
            watchdog.tell(watchdog.STOPPING)
        wanted = max(self._signals, int(self.changed))
        if self._stopping_since is not None:
            late = now - self._stopping_since > self.grace + LAST_RESORT
            if late or (self._passed_on >= 2 and now - self._told_at > LAST_RESORT):
                wanted = len(STOPS)
        for number, words in STOPS[self._passed_on : wanted]:
            self._passed_on += 1
            self._told_at = now
            for child in self._children:
                child.forced = number == signal.SIGKILL
                os.kill(child.pid, number)
            logger.info("%s", words.format(grace=self.grace, number=len(self._children)))

    # --- now and then ----------------------------------------------------------------------------

    def _look_at_boards(self) -> None:
        """Read what the workers have noted."""
        now = time.monotonic()
        passed = min(now - self._looked_at, 2 * INTERVAL)
        self._looked_at = now
        for child in self._children:
            child.leaving = child.leaving or child.board.noted(Note.LEAVING)
            if child.board.noted(Note.CHANGED):
                self.changed = True
            if child.board.noted(Note.SUSPECTS):
                child.board.note(Note.SUSPECTS, False)
                self._alone.is_wanted = True
            if why := hangs(child, now, passed):
                logger.error("Worker %s is killed: %s.", child.identity, why)
                os.kill(child.pid, signal.SIGKILL)

    def _tell_systemd(self) -> None:
        now = time.monotonic()
        if self._alive_at == 0.0:
            watchdog.tell(watchdog.READY)
        if now - self._alive_at >= 1.0:
            self._alive_at = now
            watchdog.tell(watchdog.ALIVE)


def hangs(child: Child, now: float, passed: float) -> str:
    """Return why a worker is to be killed, if it hangs: in a handler that lets nothing else run, say.

    Time counts only as it is seen to pass, or a machine that was frozen would wake up to a massacre.
    """
    if child.overdue:
        return ""
    child.late = {id: child.late.get(id, now) for id in child.board.overdue(now)}
    child.overdue = frozenset(id for id, since in child.late.items() if now - since > OVERDUE)
    if child.overdue:
        return f"it does not give up {_jobs(child.overdue)}, whose time is over"
    rounds = child.board.rounds
    child.silent = child.silent + passed if rounds == child.rounds else 0.0
    child.rounds = rounds
    lease = conf.current().LEASE
    if child.silent <= lease:
        return ""
    child.silent = 0.0
    return f"it has given no sign for {lease:g} s, so that its leases have run out"


def _jobs(ids: frozenset[int] | None) -> str:
    if ids is None:
        return "jobs that are not known"
    return f"job {', '.join(map(str, sorted(ids)))}" if ids else "no job"
