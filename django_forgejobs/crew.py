"""The two kinds of hands that a worker has, threads and coroutines: how many are free, and for which jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from django_forgejobs.cursor import ClaimCursor
from django_forgejobs.pace import AHEAD, PATIENCE, Pace

if TYPE_CHECKING:
    from django_forgejobs.coroutines import JobLoop
    from django_forgejobs.registry import Definitions
    from django_forgejobs.threads import JobThreads

#: Seconds for which jobs of one kind alone are claimed; the other has that much waiting while it is busy.
TURN = AHEAD / 2


@dataclass
class Crew:
    """So many hands (``size``) of one kind. ``busy`` counts the jobs that it has, those that wait included;
    ``stuck`` the hands that are lost to handlers which do not come back; ``blocked`` is whether none can
    begin anything for now.
    """

    hands: JobThreads | JobLoop
    size: int
    busy: int = 0
    stuck: int = 0
    blocked: bool = False
    pace: Pace = field(default_factory=Pace)
    #: When what waits beyond the pace is given back, unless the pace picks up.
    patient_until: float = 0.0

    @property
    def free(self) -> int:
        """How many jobs can start at once; less than none while some wait."""
        return self.size - self.stuck - self.busy

    @property
    def room(self) -> int:
        """How many jobs may be claimed: those that can start at once, and a few ahead."""
        return 0 if self.blocked else max(self.free + self.pace.ahead(), 0)

    @property
    def surplus(self) -> int:
        """How many of those that wait, the last ones, are to be given back: they will not start soon."""
        now, ahead = time.monotonic(), self.pace.ahead()
        if self.hands.waiting <= 2 * ahead:
            self.patient_until = now + PATIENCE
        return max(self.hands.waiting - ahead, 0) if now >= self.patient_until else 0

    @property
    def lost(self) -> bool:
        """Whether no hand is left."""
        return self.stuck >= self.size


@dataclass
class Errand:
    """What a claim is to bring: jobs of ``types`` (None: of any) for the hands of ``crews``."""

    types: tuple[str, ...] | None
    crews: tuple[Crew, ...]
    cursor: ClaimCursor

    @property
    def room(self) -> int:
        """How many jobs there is room for, whichever of the types they are of."""
        return min(crew.room for crew in self.crews)

    @property
    def free(self) -> int:
        """How many of those can start at once."""
        return max(min(crew.free for crew in self.crews), 0)


class Errands:
    """Tells what to claim next: jobs of any kind, but no more than the kind with less room could start; or,
    where one kind has room for many more and there are many, jobs of that kind alone for a while.
    """

    def __init__(
        self,
        definitions: Definitions,
        types: tuple[str, ...] | None,
        *,
        threads: Crew,
        coroutines: Crew,
        db: str,
    ) -> None:
        is_async = {type_: definitions[type_].is_async for type_ in sorted(definitions)}
        both = any(is_async.values())
        self.whole = Errand(types, (threads, coroutines) if both else (threads,), ClaimCursor(db))
        self._parts = [
            Errand(tuple(one for one in is_async if is_async[one] is kind), (crew,), ClaimCursor(db))
            for kind, crew in ((False, threads), (True, coroutines))
            if both and kind in is_async.values()
        ]
        self._part: Errand | None = None
        self._part_until = 0.0

    def next(self) -> Errand:
        """Return what there is room for; without any, one whose ``room`` is 0."""
        if self._part is not None and self._part.room and time.monotonic() < self._part_until:
            return self._part
        if self.whole.room:
            return self.whole
        return next((part for part in self._parts if part.room), self.whole)

    def done(self, errand: Errand, *, full: bool) -> bool:
        """Note that ``errand`` is done, ``full`` if it brought all that there was room for; return whether
        another look at once may bring more.
        """
        if not full:
            self._part = None
            return errand is not self.whole and self.whole.room > 0
        if errand is self.whole and self._parts:
            part = max(self._parts, key=lambda one: one.room)
            if part.room > 2 * errand.room:
                self._part, self._part_until = part, time.monotonic() + TURN
        return True
