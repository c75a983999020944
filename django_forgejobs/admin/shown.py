"""The state a row is shown in, and how the rows shown in a state are found without reading the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Q
from django.db.models.enums import TextChoices
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_forgejobs.dialect import Literal
from django_forgejobs.predicates import CLAIMABLE
from django_forgejobs.states import Status


class Shown(TextChoices):
    """The statuses, with what is ready told apart."""

    READY = "ready", _("ready")
    SCHEDULED = "scheduled", _("scheduled")
    RETRYING = "retrying", _("retrying")
    RUNNING = "running", _("running")
    DONE = "done", _("done")
    FAILED = "failed", _("failed")
    DEAD = "dead", _("dead")
    CANCELLED = "cancelled", _("cancelled")


def shown(job: Any) -> Shown:
    """Return the state to show; ``job.now`` is the database's clock when the row was read."""
    if job.status != Status.READY:
        return Shown(job.status)
    if job.attempts:
        return Shown.RETRYING
    return Shown.SCHEDULED if job.run_at > job.now else Shown.READY


@dataclass(frozen=True)
class Rows:
    """What a list holds, as one or more walks along an index in the order of the list.

    ``walks`` are the conditions that pick a stretch of the index, ``also`` what each row of it is asked.
    A ``whole`` walk has few rows, or type and queue in its index: it may be searched to its end. Any other
    can be millions of rows long, so that whoever filters it further must bound it.
    """

    walks: tuple[Q, ...] = (Q(),)
    order: tuple[str, ...] = ("-pk",)
    also: Q = field(default_factory=Q)
    whole: bool = False

    @property
    def condition(self) -> Q:
        """The rows of all walks."""
        return reduce(or_, self.walks) & self.also


# The columns of the index forgejobs_job_lane: any other order would sort all that waits.
_LANES = ("queue", "type", "priority", "run_at", "pk")
_ENDED = ("-finished_at", "-pk")


def ended(*statuses: str) -> Rows:
    """Return the rows that ended so, newest end first."""
    return Rows(tuple(Q(status=status, finished_at__isnull=False) for status in statuses), _ENDED)


#: How the jobs in each state are found. Attempts are in no index, so retrying jobs are picked out of all.
JOBS: dict[str, Rows] = {
    Shown.READY: Rows((CLAIMABLE["ready"],), _LANES, Q(CLAIMABLE["due"], attempts=0), whole=True),
    Shown.SCHEDULED: Rows((CLAIMABLE["ready"],), _LANES, Q(run_at__gt=Now(), attempts=0), whole=True),
    Shown.RETRYING: Rows(also=Q(CLAIMABLE["ready"], attempts__gt=0)),
    Shown.RUNNING: Rows((Q(status=Literal("running")),), whole=True),
    **{state: ended(state) for state in (Shown.DONE, Shown.FAILED, Shown.DEAD, Shown.CANCELLED)},
}
