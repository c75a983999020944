"""Whose turn it is: jobs that have cost a worker its life run alone, and neither they nor others starve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from django_forgejobs.lanes import Suspects

logger = logging.getLogger("django_forgejobs")


#: A turn of the suspects, as a share of ``patience``. A killed worker can leave a thousand of them: what it
#: had claimed ahead. One a turn, they would take hours beside a full queue.
TURN = 0.2

#: Seconds for which it is believed that there is no suspect. To look for one makes a claim a tenth dearer.
NONE_FOR = 1.0


class Turns:
    """Tells one worker when to take a suspect.

    Idle, it takes suspects and others in turn: one suspect after the other for a while, then others. Busy, it
    takes none; but when one has been waiting for ``patience`` seconds of that, the worker stops claiming, to
    become idle. It does not stop for longer than it has worked before: if long jobs keep it busy all the
    same, it goes on for a while, and the next time it waits twice as long. So a suspect gets its turn, and
    costs the others half the slots at most.
    """

    def __init__(self, patience: float, waiting: Callable[[], bool]) -> None:
        self._patience = patience
        self._waiting = waiting
        self._suspect_first = True
        self._suspects_until = self._none_until = -float("inf")
        self._span = patience
        self._works_until: float | None = None
        self._making_room = False

    def idle(self) -> Suspects:
        """Return what an idle worker's claim may take."""
        self._works_until = None
        self._making_room = False
        now = time.monotonic()
        if now < self._none_until:
            return Suspects.NEVER
        return Suspects.FIRST if self._suspect_first or now < self._suspects_until else Suspects.LAST

    def looked(self, where: Suspects, *, found: bool) -> None:
        """Note whether a claim found a suspect: if none was there, the next claims need not look for one."""
        if where is Suspects.FIRST and not found:
            self._none_until = time.monotonic() + NONE_FOR

    def started(self, *, suspect: bool) -> None:
        """Note what was started; the other kind is preferred next, or when the turn of suspects is over."""
        if suspect and self._suspect_first:
            self._suspects_until = time.monotonic() + TURN * self._patience
        self._suspect_first = not suspect

    def look(self) -> None:
        """Look whether a suspect waits, where another process is to take it."""

    def makes_room(self) -> bool:
        """Return whether a busy worker must stop claiming, so that a suspect gets its turn."""
        now = time.monotonic()
        if self._works_until is None:
            self._span = self._patience
            self._works_until = now + self._span
        if now < self._works_until:
            return False
        if not self._waiting():
            self._works_until = None
            self._making_room = False
        elif now >= self._works_until + self._span:
            self._span *= 2
            self._works_until = now + self._span
            self._making_room = False
        else:
            if not self._making_room:
                logger.info("Making room: a job that has cost a worker its life runs alone.")
            self._making_room = self._suspect_first = True
        return self._making_room


class Apart(Turns):
    """The turns where suspects run in a process of their own, which takes nothing else (``ONLY``): the others
    never take one, but look every ``patience`` seconds, and say by ``tell`` that one waits.
    """

    def __init__(
        self, takes: Suspects, patience: float, waiting: Callable[[], bool], tell: Callable[[], None]
    ) -> None:
        super().__init__(patience, waiting)
        self._takes = takes
        self._tell = tell
        self._looks_at = 0.0

    def idle(self) -> Suspects:
        """Return what any claim may take."""
        return self._takes

    def makes_room(self) -> bool:
        """Return whether a busy worker must not claim: one that runs a suspect."""
        return self._takes is Suspects.ONLY

    def look(self) -> None:
        """Say so if a suspect waits, also when all slots are taken by long jobs."""
        if self._takes is Suspects.NEVER and time.monotonic() >= self._looks_at:
            self._looks_at = time.monotonic() + self._patience
            if self._waiting():
                self._tell()
