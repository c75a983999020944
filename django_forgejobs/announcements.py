"""Which types the living workers serve: they say so when they start, and every ``RECLAIM_INTERVAL``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import models
from django.db.models import Value
from django.db.models.functions import Now

from django_forgejobs.dialect import AfterSeconds


class AnnouncedTypeManager(models.Manager[Any]):
    """Which types the living workers serve."""

    def announce(self, types: Iterable[str], *, grace: float, db: str) -> None:
        """Say that ``types`` are served now; an announcement older than ``grace`` begins anew."""
        cutoff = AfterSeconds(Value(-grace))
        names = sorted(set(types))
        self.using(db).filter(type__in=names, seen_at__lt=cutoff).update(since=Now())
        self.using(db).bulk_create(
            [self.model(type=name, since=Now(), seen_at=Now()) for name in names],
            update_conflicts=True,
            unique_fields=["type"],
            update_fields=["seen_at"],
        )

    def unserved(self, types: Iterable[str], *, grace: float, db: str) -> list[str]:
        """Return those of ``types`` that nobody has announced for ``grace`` seconds.

        None at all while no worker has been announcing for that long: when every worker is down, or has
        just come back, silence says nothing about a type.
        """
        recent = self.using(db).filter(seen_at__gte=AfterSeconds(Value(-grace)))
        if not recent.filter(since__lte=AfterSeconds(Value(-grace))).exists():
            return []
        return sorted(set(types) - set(recent.values_list("type", flat=True)))
