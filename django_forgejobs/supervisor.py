"""Keeps several worker processes: starts them, replaces who ended, and has taken back what a dead one held.

It has no thread and asks no database, so that nothing but memory is shared when it forks, and no outage keeps
it from supervising. What needs the database is done by a process that lives only for that, the executor
of a dead worker's estate. Says nothing about how a worker works: that is ``worker``.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from django.db import Error as DatabaseError
from django.db import connections

from django_forgejobs import between, conf, takeover, watchdog
from django_forgejobs.board import Board, Note, Place
from django_forgejobs.lanes import Suspects
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
#: Seconds after a death at which what the dead worker held is looked for. More than once: a claim that was
#: under way when it died may be committed after that.
LOOKS = (0.0, 1.0, 5.0, 30.0)
#: Seconds for one look; a connection may hang.
LOOK_WITHIN = 30.0
#: Seconds beyond the grace, or after a second signal, that workers get to leave by themselves.
LAST_RESORT = 12.0
#: Seconds that taking back may take when the supervisor itself is to end.
LAST_LOOK = 5.0

#: How a process that takes back ends: all is done, and there are suspects now; or it must be tried again.
DONE, AGAIN, SUSPECTS = 0, 1, 2

#: What is said at the first, the second and the third stop signal.
WORDS = (
    "Stopping: what runs has {grace:g} s to finish. A second signal gives it back at once.",
    "Stopping at once: what runs is given back.",
    "The workers do not come to an end: {number} killed.",
)

_BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass
class Seat:
    """A place that is to be filled. ``number`` 0 is the one for suspects, filled when one ``is_wanted``."""

    number: int
    is_wanted: bool = True
    next_start: float = 0.0
    deaths: int = 0


@dataclass
class Child:
    """One worker process."""

    seat: Seat
    pid: int
    identity: str
    board: Board
    started: float = field(default_factory=time.monotonic)
    leaving: bool = False
    late: dict[int, float] = field(default_factory=dict)
    overdue: frozenset[int] = frozenset()
    rounds: int = 0
    silent: float = 0.0
    forced: bool = False


@dataclass
class Estate:
    """What a dead worker may have left, and when to look for it."""

    death: Death
    died: float = field(default_factory=time.monotonic)
    looks: int = 0
    tries: int = 0
    next_look: float = 0.0


class Supervisor:
    """Keeps ``processes`` workers of ``concurrency`` each, until told to stop or, in a ``burst``, until
    each has ended by itself.

    A killed supervisor ends its workers: they finish what runs. ``forced`` is whether, at the stop,
    any had to be forced; ``changed`` whether to restart since code changed.
    """

    def __init__(
        self, *, db: str, processes: int, concurrency: int, grace: float, name: str = "", burst: bool = False
    ) -> None:
        self.db = db
        self.concurrency = concurrency
        self.grace = grace
        self.name = name
        self.burst = burst
        self.forced = False
        self.changed = False
        self.starts = 0
        self.deaths = 0
        self._seats = [Seat(number) for number in range(1, processes + 1)]
        self._alone = Seat(0, is_wanted=False)
        self._children: dict[int, Child] = {}
        self._estates: list[Estate] = []
        self._executor: tuple[int, float, list[Estate]] | None = None
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
        with _awake() as (reader, self._pipe):
            lifeline, self._alive = os.pipe()
            self._lifeline = lifeline
            while True:
                for seat in (*self._seats, self._alone):
                    if self._is_vacant(seat) and (place := self._fill(seat)):
                        return place
                self._execute_estates()
                self._tell_systemd()
                if self._is_over():
                    break
                _wait(reader, INTERVAL)
                self._bury()
                self._pass_on()
                self._look_at_boards()
            os.close(self._alive)
            os.close(lifeline)
        return None

    # --- places ----------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether nobody is replaced any more."""
        return self._signals > 0 or self.changed

    def _is_over(self) -> bool:
        if self._children:
            return False
        if self.stopping:
            now = time.monotonic()
            return not any(one.looks == 0 and now - one.died < LAST_LOOK for one in self._estates)
        return self.burst and not any(seat.is_wanted for seat in (*self._seats, self._alone))

    def _is_vacant(self, seat: Seat) -> bool:
        if self.stopping or not seat.is_wanted or time.monotonic() < seat.next_start:
            return False
        mine = [child for child in self._children.values() if child.seat is seat]
        # One successor at a time, or a seat whose leaving workers come to no end would fill the machine.
        return not mine or (len(mine) == 1 and mine[0].leaving)

    def _fill(self, seat: Seat) -> Place | None:
        """Start a worker; return its place in its own process, None in this one."""
        token, board = secrets.token_hex(4), Board(self.concurrency)
        try:
            pid = _fork()
        except OSError as error:
            seat.next_start = time.monotonic() + AT_ONCE
            logger.error("No process can be started (%s): again in %g s.", error, AT_ONCE)
            return None
        if pid == 0:
            os.setpgid(0, 0)  # a Ctrl-C reaches the whole group, and is passed on once
            _forget(self._pipe, self._alive)
            # In a burst the last one to work takes all that the suspects may have enqueued.
            alone = None if self.burst else Suspects.ONLY
            suspects = alone if seat is self._alone else Suspects.NEVER
            return Place(identity(self.name, token=token), board, suspects, seat.number, self._lifeline)
        if seat is self._alone:
            seat.is_wanted = False
        self.starts += 1
        child = Child(seat, pid, identity(self.name, pid=pid, token=token), board)
        self._children[pid] = child
        return None

    # --- ends ------------------------------------------------------------------------------------

    def _bury(self) -> None:
        """See who has ended."""
        for child in list(self._children.values()):
            code = _exit_code(child.pid)
            if code is None:
                continue
            del self._children[child.pid]
            if code == 0 and not child.board.begun():
                child.seat.deaths = 0
                if self.burst and not child.board.noted(Note.LEAVING):
                    child.seat.is_wanted = False
            else:
                self._died(child, code)

    def _died(self, child: Child, code: int) -> None:
        self.deaths += 1
        self.forced = self.forced or self.stopping
        process = f"process {child.pid} ({child.identity})"
        begun = child.board.begun()
        if child.overdue:
            how = f"{process} gave no sign and was killed"
        elif child.forced:
            how = f"{process} was killed, since it did not stop"
        else:
            how = f"{process} {_in_words(code)}"
        self._estates.append(
            Estate(Death(child.identity, how, begun, child.board.over(), child.overdue, child.forced))
        )
        pause = self._pause(child)
        logger.error(
            "Worker %s %s; it was at %s. What it held is put back.%s",
            child.identity,
            _in_words(code),
            _jobs(begun),
            f" It died at once, {child.seat.deaths} in a row: the next one starts in {pause:g} s."
            if pause
            else "",
        )

    def _pause(self, child: Child) -> float:
        """Return how long its place stays empty: the longer, the more workers have died there at once."""
        seat = child.seat
        lived = time.monotonic() - child.started
        seat.deaths = seat.deaths + 1 if lived < AT_ONCE else 0
        pause = min(0.25 * 2 ** (seat.deaths - 1), PAUSE_AT_MOST) if seat.deaths > 1 else 0.0
        seat.next_start = time.monotonic() + pause
        return pause

    # --- estates ---------------------------------------------------------------------------------

    def _execute_estates(self) -> None:
        """Have a process of its own take back what dead workers held, one at a time."""
        now = time.monotonic()
        if self._executor is not None:
            pid, started, estates = self._executor
            code = _exit_code(pid)
            if code is None:
                if now - started > LOOK_WITHIN:
                    os.kill(pid, signal.SIGKILL)
                return
            self._executor = None
            for estate in estates:
                self._executed(estate, code)
        due = [estate for estate in self._estates if now >= estate.next_look]
        if not due:
            return
        try:
            pid = _fork()
        except OSError:
            logger.exception("What dead workers held cannot be taken back just now.")
            for estate in due:
                estate.next_look = now + AT_ONCE
            return
        if pid == 0:
            os.setpgid(0, 0)
            _forget(self._pipe, self._alive)
            _leave(_take_back([estate.death for estate in due], self.db))
        self._executor = pid, now, due

    def _executed(self, estate: Estate, code: int) -> None:
        now = time.monotonic()
        if code in (DONE, SUSPECTS):
            self._alone.is_wanted = self._alone.is_wanted or code == SUSPECTS
            estate.tries = 0
            estate.looks += 1
            if estate.looks == len(LOOKS):
                self._estates.remove(estate)
                return
            estate.next_look = estate.died + LOOKS[estate.looks]
        else:
            estate.tries += 1
            estate.next_look = now + min(0.5 * 2 ** min(estate.tries, 10), 15.0)
        if estate.next_look - estate.died > conf.current().LEASE:
            self._estates.remove(estate)  # a reaper is as quick

    # --- stop ------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Pass stop signals on: the first as TERM, the second as INT, and then KILL."""
        now = time.monotonic()
        if self.stopping and self._stopping_since is None:
            self._stopping_since = self._told_at = now
            watchdog.tell(watchdog.STOPPING)
        wanted = max(self._signals, int(self.changed))
        if self._stopping_since is not None:
            late = now - self._stopping_since > self.grace + LAST_RESORT
            if late or (self._passed_on >= 2 and now - self._told_at > LAST_RESORT):
                wanted = 3
        while self._passed_on < min(wanted, 3):
            self._passed_on += 1
            self._told_at = now
            logger.info("%s", WORDS[self._passed_on - 1].format(grace=self.grace, number=len(self._children)))
            number = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)[self._passed_on - 1]
            for child in self._children.values():
                child.forced = number == signal.SIGKILL
                os.kill(child.pid, number)

    def _look_at_boards(self) -> None:
        """Read what the workers have noted."""
        now = time.monotonic()
        looked, self._looked_at = self._looked_at, now
        for child in self._children.values():
            child.leaving = child.leaving or child.board.noted(Note.LEAVING)
            if child.board.noted(Note.CHANGED):
                self.changed = True
            if child.board.noted(Note.SUSPECTS):
                child.board.note(Note.SUSPECTS, False)
                self._alone.is_wanted = True
            if why := self._hangs(child, now, looked):
                logger.error("Worker %s is killed: %s.", child.identity, why)
                os.kill(child.pid, signal.SIGKILL)

    def _hangs(self, child: Child, now: float, looked: float) -> str:
        """Return why a worker is to be killed, if it hangs: in a handler that lets nothing else run, say.

        Time counts only as it is seen to pass, or a machine that was frozen would wake up to a massacre.
        """
        if child.overdue:
            return ""
        child.late = {id: child.late.get(id, now) for id in child.board.overdue(now)}
        child.overdue = frozenset(id for id, since in child.late.items() if now - since > OVERDUE)
        if child.overdue:
            return f"it does not give up {_jobs(child.overdue)}, whose time is over"
        silent = child.rounds == child.board.rounds
        child.silent = child.silent + min(now - looked, 2 * INTERVAL) if silent else 0.0
        child.rounds = child.board.rounds
        if child.silent > (lease := conf.current().LEASE):
            child.silent = 0.0
            return f"it has given no sign for {lease:g} s, so that its leases have run out"
        return ""

    def _tell_systemd(self) -> None:
        now = time.monotonic()
        if self._alive_at == 0.0:
            watchdog.tell(watchdog.READY)
        if now - self._alive_at >= 1.0:
            self._alive_at = now
            watchdog.tell(watchdog.ALIVE)


def _take_back(deaths: list[Death], db: str) -> int:
    """Take back what the dead held; return the exit code of the process that does it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    code = DONE
    for death in deaths:
        try:
            if any(job.finished_at is None for job in takeover.take_back(death, db)) and code == DONE:
                code = SUSPECTS
        except DatabaseError as error:
            code = AGAIN
            logger.warning(
                "What %s held cannot be taken back yet: %s", death.worker, " ".join(str(error).split())
            )
        except BaseException:
            code = AGAIN
            logger.exception("What %s held cannot be taken back.", death.worker)
    return code


# --- Processes and signals -----------------------------------------------------------------------


def _fork() -> int:
    """Fork, with nothing shared but memory, and stop signals blocked in the child."""
    for connection in connections.all(initialized_only=True):
        between.close(connection)
        if close_pool := getattr(connection, "close_pool", None):
            close_pool()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()  # or both would write what waits in it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _forget(pipe: tuple[int, int], alive: int) -> None:
    """In a child: take the signals as an ordinary process does, and hold nothing of the supervisor's."""
    signal.set_wakeup_fd(-1)
    for number in _BLOCKED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
    for descriptor in (*pipe, alive):
        os.close(descriptor)


@contextmanager
def _awake() -> Iterator[tuple[int, tuple[int, int]]]:
    """Have a pipe to wait for: signals write into it, those of ended children too."""
    owner = os.getpid()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader, (reader, writer)
    finally:
        if os.getpid() == owner:
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGCHLD, before)
            os.close(reader)
            os.close(writer)


def _wait(reader: int, timeout: float) -> None:
    if select.select([reader], [], [], timeout)[0]:
        with suppress(BlockingIOError):
            while os.read(reader, 4096):
                pass


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child that has ended, -N for signal N."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 1  # somebody else has waited for it
    return os.waitstatus_to_exitcode(status) if ended else None


def _in_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _jobs(ids: frozenset[int] | None) -> str:
    if ids is None:
        return "jobs that are not known"
    return f"job {', '.join(map(str, sorted(ids)))}" if ids else "no job"


def _leave(code: int) -> None:
    logging.shutdown()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)
