"""Which jobs: the conditions that the claim, the reaper, the archive and ``reasons`` all ask."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from django.db import models
from django.db.models import Q, Value
from django.db.models.functions import Now
from django.db.models.lookups import GreaterThanOrEqual

from django_forgejobs import conf
from django_forgejobs.dialect import AfterSeconds, Literal, ServerStarted, Zero

if TYPE_CHECKING:
    from django_forgejobs.models import Job  # noqa: F401 (the class's type argument)

#: What makes a job claimable, by name. The claim asks all of them, ``reasons`` each.
CLAIMABLE: Mapping[str, Q] = {
    "ready": Q(status=Literal("ready")),
    "due": Q(run_at__lte=Now()),
}


class JobQuerySet(models.QuerySet["Job"]):
    """Jobs by what may happen to them next."""

    def ready(self) -> JobQuerySet:
        """Jobs that may be claimed now."""
        return self.filter(*CLAIMABLE.values())

    def running(self) -> JobQuerySet:
        """Jobs that a worker holds."""
        return self.filter(status=Literal("running"))

    def expired(self) -> JobQuerySet:
        """Running jobs whose worker is taken for dead.

        A server that has just started could not take heartbeats while it was down: claims older than
        its start get one heartbeat more, so that an outage costs no live worker its job.
        """
        heartbeat = conf.current().HEARTBEAT
        return self.running().filter(
            Q(started_at__isnull=True)
            | Q(started_at__gte=ServerStarted())
            | Q(GreaterThanOrEqual(Now(), AfterSeconds(Value(heartbeat), since=ServerStarted()))),
            locked_until__lt=Now(),
        )

    def ended_since(self, status: str, seconds: float) -> JobQuerySet:
        """Jobs that ended as ``status`` more than ``seconds`` ago, oldest first."""
        cutoff = AfterSeconds(Value(-seconds))
        return self.filter(status=Literal(status), finished_at__lt=cutoff).order_by("finished_at")

    def suspects(
        self, queues: Collection[str] | None = None, types: Collection[str] | None = None
    ) -> JobQuerySet:
        """Jobs due that have cost a worker its life, in claim order."""
        found = self.ready().filter(lease_expirations__gt=Zero())
        if queues is not None:
            found = found.filter(queue__in=queues)
        if types is not None:
            found = found.filter(type__in=types)
        return found.order_by("-priority", "run_at", "pk")
