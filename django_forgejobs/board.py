"""What a worker process notes for its supervisor, in memory that both have: it can be read when the
process is dead or hangs.
"""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from django_forgejobs.lanes import Suspects

_WORD = 8
#: Handlers for which there is room at least: coroutines are many, and a page costs nothing.
_HANDLERS = 1000
#: How many of the jobs that were over last are remembered, more than a worker has in hand; a power of two.
_OVER = 4096


class Note(IntEnum):
    """One word each at the head of a board: whether it is so."""

    #: The worker has done enough: it finishes what runs, and another may take its place.
    LEAVING = 0
    #: A job is due that must run alone.
    SUSPECTS = 1
    #: The code has changed.
    CHANGED = 2
    #: There were more handlers than slots: any claimed job may have been begun.
    FULL = 3
    #: Not a yes or no: how often the worker's loop has come round.
    ROUNDS = 4


class Board:
    """The notes of one process: which jobs its handlers are at, and until when, and a few words.

    A slot is the id of a job, and the moment at which it is overdue: of the monotonic clock, which is one
    for all processes of a machine, or 0 for never. Writing one is a store to memory, half a microsecond, and
    safe in any thread. What a process has written is there when it is dead.
    """

    def __init__(self, handlers: int = 1) -> None:
        slots = max(handlers, _HANDLERS)
        ids, overdue, over = len(Note), len(Note) + slots, len(Note) + 2 * slots
        memory = memoryview(mmap.mmap(-1, (over + _OVER) * _WORD))
        self._notes = memory[: ids * _WORD].cast("q")
        self._ids = memory[ids * _WORD : overdue * _WORD].cast("q")
        self._overdue = memory[overdue * _WORD : over * _WORD].cast("d")
        self._over = memory[over * _WORD :].cast("q")
        self._free = deque(range(slots))
        self._ended = count()  # both are safe in any thread

    def begin(self, job_id: int, overdue_at: float | None = None) -> int:
        """Note that a handler begins; return the slot with which to ``end``."""
        try:
            slot = self._free.popleft()
        except IndexError:
            self.note(Note.FULL)
            return -1
        self._ids[slot] = job_id
        self._overdue[slot] = overdue_at or 0.0
        return slot

    def end(self, slot: int) -> None:
        """Note that the handler has come back, and that what it left behind is cleaned up."""
        if slot >= 0:
            self._over[next(self._ended) % _OVER] = self._ids[slot]
            self._overdue[slot] = 0.0
            self._ids[slot] = 0
            self._free.append(slot)

    def forgive(self, job_id: int) -> None:
        """Note that the worker has given this handler up itself, and lives with that."""
        for slot, pk in enumerate(self._ids):
            if pk == job_id:
                self._overdue[slot] = 0.0

    def come_round(self) -> None:
        """Note that the worker's loop is alive."""
        self._notes[Note.ROUNDS] += 1

    @property
    def rounds(self) -> int:
        """How often the worker's loop has come round."""
        return self._notes[Note.ROUNDS]

    def note(self, note: Note, value: bool = True) -> None:
        """Write one word."""
        self._notes[note] = value

    def noted(self, note: Note) -> bool:
        """Read one word."""
        return bool(self._notes[note])

    def begun(self) -> frozenset[int] | None:
        """Return the jobs that handlers are at; None if that cannot be said."""
        return None if self.noted(Note.FULL) else frozenset(self._ids) - {0}

    def over(self) -> frozenset[int]:
        """Return the jobs whose handlers have come back last."""
        return frozenset(self._over) - {0}

    def overdue(self, now: float) -> frozenset[int]:
        """Return the jobs that are overdue at ``now``."""
        if not self._overdue.tobytes().strip(b"\0"):
            return frozenset()  # ten times as quick, and the rule
        late = [slot for slot, at in enumerate(self._overdue.tolist()) if 0.0 < at < now]
        return frozenset(self._ids[slot] for slot in late)


@dataclass(frozen=True)
class Place:
    """Where a worker works: alone in its process, or in one of several that a supervisor keeps.

    ``suspects`` says what it does with jobs that must run alone: takes them in turn (None), leaves them to
    another process (``NEVER``), or takes nothing else (``ONLY``). ``number`` counts from 1; ``lifeline``
    is a pipe that ends with the supervisor.
    """

    identity: str
    board: Board
    suspects: Suspects | None = None
    number: int = 1
    lifeline: int | None = None
