"""Move finished jobs out of the queue's table, or away, a small batch and a commit at a time.

Resumable: killed anywhere, a batch is either moved or not. Rows that somebody holds are left for the next
run; so are rows that another table still references.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta

from django.db import IntegrityError
from django.db.models import Value

from django_forgejobs import conf, sql
from django_forgejobs.dialect import AfterSeconds
from django_forgejobs.models import AnnouncedType, Job, ScheduleSlot, Tally

logger = logging.getLogger("django_forgejobs")

BATCH = 500
#: Seconds for which counts, announcements and the slots of schedules are kept.
KEPT = timedelta(days=30).total_seconds()


def due(db: str) -> dict[str, int]:
    """Count, by status, the jobs that are older than ``RETENTION`` keeps them."""
    return {
        status: Job.objects.using(db).ended_since(status, age).count()
        for status, age in conf.current().RETENTION.items()
        if age is not None
    }


def batches(db: str, *, delete: bool = False) -> Iterator[int]:
    """Move what is due into the archive table, or away with ``delete``; yield the size of each batch.

    Each batch is committed when its size is yielded.
    """
    for status, age in conf.current().RETENTION.items():
        if age is None:
            continue
        passed_over: set[int] = set()
        while moved := _batch(db, status, age, delete, passed_over):
            yield moved


def prune(db: str) -> None:
    """Delete counts, announcements and slots of schedules that are too old to say anything."""
    cutoff = AfterSeconds(Value(-KEPT))
    Tally.objects.using(db).filter(at__lt=cutoff).delete()
    AnnouncedType.objects.using(db).filter(seen_at__lt=cutoff).delete()
    old = ScheduleSlot.objects.using(db).filter(at__lt=cutoff).order_by("at").values_list("pk", flat=True)
    while batch := list(old[:BATCH]):
        ScheduleSlot.objects.using(db).filter(pk__in=batch).delete()


def _batch(db: str, status: str, age: float, delete: bool, passed_over: set[int]) -> int:
    ended = Job.objects.using(db).ended_since(status, age).exclude(pk__in=passed_over)
    try:
        return len(sql.archive(ended[:BATCH], delete=delete))
    except IntegrityError:
        # Somebody's foreign key points at one of them: find it, and let it spoil no other.
        moved = 0
        for pk in list(ended.values_list("pk", flat=True)[:BATCH]):
            try:
                moved += len(sql.archive(ended.filter(pk=pk)[:1], delete=delete))
            except IntegrityError as error:
                passed_over.add(pk)
                logger.warning("Job %s stays: another table references it (%s).", pk, error)
        return moved or (_batch(db, status, age, delete, passed_over) if passed_over else 0)
