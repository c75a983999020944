"""The six measures of a queue, read from the rows as they are now."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from django.db.models import Count, DurationField, ExpressionWrapper, F, Sum, Value
from django.db.models.functions import Now

from django_forgejobs import lanes
from django_forgejobs.dialect import AfterSeconds
from django_forgejobs.models import Job, Liveness, ScheduleSlot, Tally
from django_forgejobs.scheduler import ALIVE
from django_forgejobs.slots import Fate
from django_forgejobs.states import DEAD_LETTERS, Status

DAY = 86400.0


@dataclass(frozen=True)
class Snapshot:
    """A queue's state at one moment.

    ``counts`` is number of jobs by queue and status; ``oldest_ready_seconds`` how long the oldest due
    job has been due (None when nothing is due); ``attempts`` how many unfinished and dead jobs have had
    how many attempts; ``missed_slots`` how many slots the last 24 hours have found missed;
    ``scheduler_seen_seconds`` how long ago a scheduler said that it is alive (None: never).
    """

    counts: dict[str, dict[str, int]]
    oldest_ready_seconds: float | None
    running_by_type: dict[str, int]
    attempts: dict[int, int]
    lease_expirations_per_hour: float
    dead_letters: int
    missed_slots: int
    scheduler_seen_seconds: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return asdict(self)


def snapshot(db: str) -> Snapshot:
    """Measure the queue of ``db``. The counts read the whole table; the rest its live rows only."""
    jobs = Job.objects.using(db)
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    grouped = jobs.values_list("queue", "status").annotate(number=Count("id"))
    for queue, status, number in grouped.order_by("queue", "status"):
        counts[queue][status] = number
    live = [Status.READY, Status.RUNNING, Status.DEAD]
    attempts = jobs.filter(status__in=live).values_list("attempts").annotate(number=Count("id"))
    running = jobs.running().values_list("type").annotate(number=Count("id"))
    hour = Tally.objects.using(db).filter(event="lease_expired", at__gte=AfterSeconds(Value(-3600.0)))
    return Snapshot(
        counts=dict(counts),
        oldest_ready_seconds=oldest_ready_seconds(db),
        running_by_type=dict(running.order_by("type")),
        attempts=dict(attempts.order_by("attempts")),
        lease_expirations_per_hour=float(hour.aggregate(sum=Sum("count"))["sum"] or 0),
        dead_letters=sum(n for s in counts.values() for k, n in s.items() if k in DEAD_LETTERS),
        missed_slots=missed_slots(db),
        scheduler_seen_seconds=scheduler_seen_seconds(db),
    )


def missed_slots(db: str) -> int:
    """Return how many slots of schedules the last 24 hours have found missed, as the ledger has it."""
    found = ScheduleSlot.objects.using(db).filter(fate=Fate.MISSED, at__gte=AfterSeconds(Value(-DAY)))
    return int(found.aggregate(sum=Sum("count"))["sum"] or 0)


def scheduler_seen_seconds(db: str) -> float | None:
    """Return how long ago a scheduler said that it is alive; None if none ever did. It does so every 15 s."""
    age = ExpressionWrapper(Now() - F("seen_at"), DurationField())
    found = Liveness.objects.using(db).filter(name=ALIVE).annotate(age=age).values_list("age", flat=True)
    seen = found.first()
    return None if seen is None else max(0.0, seen.total_seconds())


def oldest_ready_seconds(db: str) -> float | None:
    """Return for how many seconds the oldest due job has been due; one probe a lane, not a scan."""
    pk = lanes.oldest_ready(db)
    age = ExpressionWrapper(Now() - F("run_at"), DurationField())
    found = Job.objects.using(db).filter(pk=pk).annotate(age=age).values_list("age", flat=True)
    oldest = found.first() if pk is not None else None
    return None if oldest is None else oldest.total_seconds()
