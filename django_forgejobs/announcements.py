"""What living processes say of themselves, again and again: the types that workers serve, and that a
scheduler ticks. Silence, not a farewell, tells that nobody does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import models
from django.db.models import Case, F, Value, When
from django.db.models.functions import Now

from django_forgejobs.dialect import AfterSeconds


class AnnouncementManager(models.Manager[Any]):
    """Announcements by the name that is their primary key."""

    def announce(self, names: Iterable[str], *, grace: float, db: str) -> None:
        """Say that ``names`` are there now; an announcement older than ``grace`` seconds begins anew."""
        names = sorted(set(names))
        known = self.using(db).filter(pk__in=names)
        # One statement that commits itself: whoever is frozen or cut off in the middle holds no row for long.
        renewed = known.update(
            since=Case(When(seen_at__lt=AfterSeconds(Value(-grace)), then=Now()), default=F("since")),
            seen_at=Now(),
        )
        if renewed < len(names):
            new = set(names) - set(known.values_list("pk", flat=True))
            self.using(db).bulk_create(
                [self.model(pk=name, since=Now(), seen_at=Now()) for name in sorted(new)],
                ignore_conflicts=True,
            )

    def lasting(self, *, grace: float, db: str) -> Any:
        """Return what has been announced, without a break, for all of the last ``grace`` seconds."""
        cutoff = AfterSeconds(Value(-grace))
        return self.using(db).filter(seen_at__gte=cutoff, since__lte=cutoff)


class AnnouncedTypeManager(AnnouncementManager):
    """Which types the living workers serve."""

    def unserved(self, types: Iterable[str], *, grace: float, db: str) -> list[str]:
        """Return those of ``types`` that nobody has announced for ``grace`` seconds.

        None at all while no worker has been announcing for that long: when every worker is down, or has
        just come back, silence says nothing about a type.
        """
        if not self.lasting(grace=grace, db=db).exists():
            return []
        recent = self.using(db).filter(seen_at__gte=AfterSeconds(Value(-grace)))
        return sorted(set(types) - set(recent.values_list("type", flat=True)))
