"""The statuses of a job and the one table of its transitions.

A move says what it writes; ``managers`` carries moves out, ``sql`` compiles them. Nothing else in the
project knows which status follows which.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from django.db.models.enums import TextChoices
from django.utils.translation import gettext_lazy as _


class Status(TextChoices):
    """Where a job is. ``failed`` and ``dead`` are the dead letters."""

    READY = "ready", _("ready")
    RUNNING = "running", _("running")
    DONE = "done", _("done")
    FAILED = "failed", _("failed")
    DEAD = "dead", _("dead")
    CANCELLED = "cancelled", _("cancelled")


ENDED = frozenset({Status.DONE, Status.FAILED, Status.DEAD, Status.CANCELLED})
DEAD_LETTERS = frozenset({Status.FAILED, Status.DEAD})


class RunAt(Enum):
    """What a move does to ``run_at``."""

    KEEP = "keep"
    NOW = "now"
    DELAY = "now + delay"


@dataclass(frozen=True)
class Move:
    """One row of the matrix of moves.

    ``attempts`` is a difference, ``None`` means back to zero. ``recorded`` moves append a line to
    ``history``; ``explained`` ones set ``last_error``. Every move but claim and renew ends the claim.
    """

    name: str
    sources: frozenset[Status]
    target: Status
    run_at: RunAt = RunAt.KEEP
    attempts: int | None = 0
    explained: bool = False
    recorded: bool = False

    @property
    def ends(self) -> bool:
        """Whether the job is over after it, so that ``finished_at`` is set."""
        return self.target in ENDED

    @property
    def keeps_claim(self) -> bool:
        """Whether a worker holds the job after it."""
        return self.target is Status.RUNNING


def _move(name: str, sources: set[Status], target: Status, **writes: object) -> Move:
    return Move(name, frozenset(sources), target, **writes)  # type: ignore[arg-type]


_RUNNING = {Status.RUNNING}

CLAIM = _move("claim", {Status.READY}, Status.RUNNING, attempts=+1)
RENEW = _move("renew", _RUNNING, Status.RUNNING)
COMPLETE = _move("complete", _RUNNING, Status.DONE)
RETRY = _move("retry", _RUNNING, Status.READY, run_at=RunAt.DELAY, explained=True, recorded=True)
BURY = _move("bury", _RUNNING, Status.DEAD, explained=True, recorded=True)
FAIL = _move("fail", {Status.RUNNING, Status.READY}, Status.FAILED, explained=True, recorded=True)
RELEASE = _move("release", _RUNNING, Status.READY, run_at=RunAt.DELAY, attempts=-1, recorded=True)
GIVE_BACK = _move("give_back", _RUNNING, Status.READY, attempts=-1)
SNOOZE = _move("snooze", _RUNNING, Status.READY, run_at=RunAt.DELAY, attempts=-1, recorded=True)
RECLAIM = _move("reclaim", _RUNNING, Status.READY, attempts=-1, explained=True, recorded=True)
RECLAIM_DEAD = _move("reclaim", _RUNNING, Status.DEAD, attempts=-1, explained=True, recorded=True)
CANCEL = _move("cancel", {Status.READY, Status.RUNNING}, Status.CANCELLED, recorded=True)
REQUEUE = _move(
    "requeue",
    {Status.FAILED, Status.DEAD, Status.CANCELLED},
    Status.READY,
    run_at=RunAt.NOW,
    attempts=None,
    recorded=True,
)
RUN_NOW = _move("run_now", {Status.READY}, Status.READY, run_at=RunAt.NOW, recorded=True)

TRANSITIONS: tuple[Move, ...] = (
    CLAIM,
    RENEW,
    COMPLETE,
    RETRY,
    BURY,
    FAIL,
    RELEASE,
    GIVE_BACK,
    SNOOZE,
    RECLAIM,
    RECLAIM_DEAD,
    CANCEL,
    REQUEUE,
    RUN_NOW,
)
