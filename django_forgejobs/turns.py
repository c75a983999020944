"""Whose turn it is: jobs that have cost a worker its life run alone, and neither they nor others starve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from django_forgejobs.sql import Suspects

logger = logging.getLogger("django_forgejobs")


class Turns:
    """Tells one worker when to take a suspect.

    Idle, it takes suspects and others in turn. Busy, it takes none; but when one has been waiting for
    ``patience`` seconds of that, the worker stops claiming until it is idle.
    """

    def __init__(self, patience: float, waiting: Callable[[], bool]) -> None:
        self._patience = patience
        self._waiting = waiting
        self._suspect_first = True
        self._busy_since: float | None = None
        self._making_room = False

    def idle(self) -> Suspects:
        """Return what an idle worker's claim may take."""
        self._busy_since = None
        self._making_room = False
        return Suspects.FIRST if self._suspect_first else Suspects.LAST

    def started(self, *, suspect: bool) -> None:
        """Note what was started; the other kind is preferred next."""
        self._suspect_first = not suspect

    def makes_room(self) -> bool:
        """Return whether a busy worker must stop claiming, so that a suspect gets its turn."""
        now = time.monotonic()
        if self._busy_since is None:
            self._busy_since = now
        if now - self._busy_since < self._patience:
            return False
        waiting = self._waiting()
        if not waiting:
            self._busy_since = now
        elif not self._making_room:
            logger.info("Making room: a job that has cost a worker its life runs alone.")
            self._suspect_first = True
        self._making_room = waiting
        return waiting
