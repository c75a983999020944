"""How one claim ended, before the database knows: built by the executor, written by the manager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from django_forgejobs import payloads
from django_forgejobs.states import FAIL, Move

if TYPE_CHECKING:
    from django_forgejobs.models import Job


@dataclass(frozen=True)
class Outcome:
    """The move to make with ``job``, whose claim token is the fence.

    ``delay`` is seconds until it is due again; ``error`` becomes ``last_error``; ``facts`` go into the
    history entry; ``result`` is JSON text; ``seconds`` is how long the handler ran. ``charged`` is the
    outcome to write instead when outages have released this job too often in a row.
    """

    job: Job
    move: Move
    delay: float | None = None
    error: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    result: str | None = None
    seconds: float = 0.0
    exception: BaseException | None = None
    charged: Outcome | None = None

    def unstorable(self, error: BaseException) -> Outcome:
        """Return the outcome for a result that the database would not take."""
        text = payloads.storable(f"The result could not be stored: {error}", 2000)
        return replace(self, move=FAIL, result=None, error=text, facts={"reason": text}, exception=error)


@dataclass
class Settlement:
    """What became of a batch of outcomes.

    ``accepted`` are committed (or part of the caller's transaction), ``lost`` had no claim any more and
    changed nothing, ``waiting`` are held by somebody's open transaction or by an ``outage``, and must be
    tried again.
    """

    accepted: list[Outcome] = field(default_factory=list)
    lost: list[Outcome] = field(default_factory=list)
    waiting: list[Outcome] = field(default_factory=list)
    outage: BaseException | None = None
