"""Whose turn it is: jobs that have cost a worker its life run alone, and neither they nor others starve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from django_forgejobs.lanes import Suspects

logger = logging.getLogger("django_forgejobs")


class Turns:
    """Tells one worker when to take a suspect.

    Idle, it takes suspects and others in turn. Busy, it takes none; but when one has been waiting for
    ``patience`` seconds of that, the worker stops claiming, to become idle. It does not stop for longer than
    it has worked before: if long jobs keep it busy all the same, it goes on for a while, and the next
    time it waits twice as long. So a suspect gets its turn, and costs the others half the slots at most.
    """

    def __init__(self, patience: float, waiting: Callable[[], bool]) -> None:
        self._patience = patience
        self._waiting = waiting
        self._suspect_first = True
        self._span = patience
        self._works_until: float | None = None
        self._making_room = False

    def idle(self) -> Suspects:
        """Return what an idle worker's claim may take."""
        self._works_until = None
        self._making_room = False
        return Suspects.FIRST if self._suspect_first else Suspects.LAST

    def started(self, *, suspect: bool) -> None:
        """Note what was started; the other kind is preferred next."""
        self._suspect_first = not suspect

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
