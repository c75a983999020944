"""How often what happened: counted in memory by every process, appended to the database once a minute.

For rates only. A killed process loses the counts of its last minute and nothing else: no state is here.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from django_forgejobs import signals
from django_forgejobs.slots import Fate

_lock = threading.Lock()
_counts: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])


def note(event: str, type_: str, *, times: int = 1, waited: float = 0.0, ran: float = 0.0) -> None:
    """Count an ``event`` of ``type_``, with the seconds that the job waited and ran."""
    with _lock:
        counts = _counts[event, type_]
        counts[0] += times
        counts[1] += waited
        counts[2] += ran


def flush(db: str) -> None:
    """Append what was counted since the last flush, one row an event and type."""
    from django_forgejobs.models import Tally

    with _lock:
        counted = dict(_counts)
        _counts.clear()
    if not counted:
        return
    rows = [
        Tally(event=event, type=type_, count=int(count), waited=waited, ran=ran)
        for (event, type_), (count, waited, ran) in sorted(counted.items())
    ]
    try:
        Tally.objects.using(db).bulk_create(rows)
    except Exception:
        with _lock:
            for key, values in counted.items():
                _counts[key] = [a + b for a, b in zip(_counts[key], values, strict=True)]
        raise


def connect() -> None:
    """Count what the signals tell."""
    for event, signal in (
        ("retried", signals.retried),
        ("failed", signals.failed),
        ("dead", signals.dead),
        ("lease_expired", signals.reclaimed),
    ):
        signal.connect(_receiver(event), weak=False, dispatch_uid=f"django_forgejobs.tally.{event}")
    signals.done_together.connect(_done, dispatch_uid="django_forgejobs.tally.done")
    signals.slots_skipped.connect(_missed, dispatch_uid="django_forgejobs.tally.slot_missed")


def _missed(*, schedule: Any, stretch: Any, fate: str, **_: Any) -> None:
    if fate == Fate.MISSED:
        note("slot_missed", schedule.job_type, times=stretch.count)


def _receiver(event: str) -> Any:
    def receive(*, job: Any, **facts: Any) -> None:
        note(event, job.type, waited=_waited(job), ran=facts.get("seconds", 0.0))

    return receive


def _done(*, outcomes: Any, **_: Any) -> None:
    sums: dict[str, list[float]] = {}
    for outcome in outcomes:
        type_sums = sums.setdefault(outcome.job.type, [0, 0.0, 0.0])
        type_sums[0] += 1
        type_sums[1] += _waited(outcome.job)
        type_sums[2] += outcome.seconds
    for type_, (times, waited, ran) in sums.items():
        note("done", type_, times=int(times), waited=waited, ran=ran)


def _waited(job: Any) -> float:
    return max((job.started_at - job.run_at).total_seconds(), 0.0) if job.started_at else 0.0
