"""Which of a schedule's slots fire: the arithmetic of one tick, without a database.

A slot is *due* when its instant has come. It is *missed* when the next one is due too: a tick that is a
moment late, or hours late for a daily slot, has missed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models.enums import TextChoices
from django.utils.translation import gettext_lazy as _

from django_forgejobs.cron import Cron

#: How many missed slots ``all`` fires, the newest.
ALL_AT_MOST = 100

#: Between an instant and the next.
MOMENT = timedelta(microseconds=1)


class OnMissed(TextChoices):
    """What becomes of missed slots."""

    LATEST = "latest", _("run the latest once")
    ALL = "all", _("run all, 100 at most")
    SKIP = "skip", _("run none")


class OnOverlap(TextChoices):
    """What becomes of a slot while the previous run is still queued or running."""

    ALLOW = "allow", _("run beside it")
    SKIP = "skip", _("skip the slot")


class Source(TextChoices):
    """Who may change a schedule."""

    CODE = "code", _("code")
    ADMIN = "admin", _("admin")


class Fate(TextChoices):
    """What became of a slot."""

    FIRED = "fired", _("fired")
    BY_HAND = "by_hand", _("run by hand")
    MISSED = "missed", _("missed")
    OVERLAP = "overlap", _("skipped: the previous run had not ended")
    UNKNOWN = "unknown", _("skipped: unknown job type")
    SKIPPED = "skipped", _("skipped by hand")


@dataclass(frozen=True)
class Stretch:
    """``count`` slots from ``first`` to ``last``."""

    first: datetime
    last: datetime
    count: int


@dataclass(frozen=True)
class Decision:
    """What one tick does: slots to ``fire``, oldest first, slots to record as ``missed``, and the ``next``
    slot (None: there is none).
    """

    fire: tuple[datetime, ...] = ()
    missed: Stretch | None = None
    next: datetime | None = None

    @property
    def due(self) -> Stretch | None:
        """All slots that are settled with it; None when nothing was due."""
        missed, fire = self.missed, self.fire
        if missed is None:
            return Stretch(fire[0], fire[-1], len(fire)) if fire else None
        return Stretch(missed.first, fire[-1] if fire else missed.last, missed.count + len(fire))


def first(cron: Cron, now: datetime, starts_at: datetime | None, ends_at: datetime | None) -> datetime | None:
    """Return the first slot later than ``now`` within start and end, both included."""
    if starts_at is not None:
        now = max(now, starts_at - MOMENT)
    slot = cron.after(now)
    return None if slot is None or (ends_at is not None and slot > ends_at) else slot


def decide(
    cron: Cron,
    *,
    due: datetime,
    now: datetime,
    last_slot: datetime | None,
    ends_at: datetime | None,
    on_missed: str,
    at_most: int = ALL_AT_MOST,
) -> Decision:
    """Decide from the stored slot ``due``, not from what a process remembers.

    Slots up to ``last_slot`` are settled already, whatever ``due`` says. Slots that are missed are counted by
    arithmetic: ten years of minutes cost no more than two.
    """
    if last_slot is not None and due <= last_slot:
        following = first(cron, last_slot, None, ends_at)
        if following is None or following > now:
            return Decision(next=following)
        due = following
    # A stored slot counts even where the zone's rules have changed since, and it is none any more.
    newest = max(due, cron.latest(now if ends_at is None else min(now, ends_at)) or due)
    following = first(cron, max(newest, now), None, ends_at)
    if newest == due:
        return Decision((due,), None, following)
    keep = {OnMissed.LATEST: 1, OnMissed.ALL: min(at_most, ALL_AT_MOST), OnMissed.SKIP: 0}[
        OnMissed(on_missed)
    ]
    fire = _newest(cron, due, newest, keep)
    last_missed = _before(cron, due, fire[0]) if fire else newest
    if last_missed is None:
        return Decision(fire, None, following)
    return Decision(fire, Stretch(due, last_missed, 1 + cron.count(due, last_missed)), following)


def _newest(cron: Cron, due: datetime, newest: datetime, keep: int) -> tuple[datetime, ...]:
    """Return the ``keep`` newest slots from ``due`` to ``newest``, oldest first."""
    found: list[datetime] = []
    slot: datetime | None = newest
    while slot is not None and len(found) < keep:
        found.append(slot)
        slot = _before(cron, due, slot)
    return tuple(reversed(found))


def _before(cron: Cron, due: datetime, slot: datetime) -> datetime | None:
    """Return the slot before ``slot``, ``due`` at the earliest."""
    if slot <= due:
        return None
    return max(due, cron.latest(slot - MOMENT) or due)
