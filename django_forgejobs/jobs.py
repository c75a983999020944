"""Jobs of our own, with schedules ready to be enabled: archive and reclaim, for sites without a timer.

A worker reclaims by itself while it runs, so that nobody has to enable anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_forgejobs.registry import job
from django_forgejobs.schedules import schedule
from django_forgejobs.slots import OnOverlap

if TYPE_CHECKING:
    from django_forgejobs.context import JobContext

ARCHIVE, RECLAIM = "forgejobs.archive", "forgejobs.reclaim"

#: Their types: every worker knows them.
BUILT_IN = frozenset({ARCHIVE, RECLAIM})


@schedule("H H(1-4) * * *", on_overlap=OnOverlap.SKIP.value, enabled=False)
@job(ARCHIVE, max_attempts=3)
def archive_jobs(payload: dict[str, Any], context: JobContext) -> dict[str, int]:
    """Do what ``manage.py archive_jobs`` does: ``{"delete": true}`` keeps no archive. Stops when the worker
    does; the next run goes on.
    """
    from django_forgejobs import archive

    moved = 0
    for batch in archive.batches(context.db, delete=bool(payload.get("delete"))):
        moved += batch
        if context.should_stop:
            break
    archive.prune(context.db)
    return {"archived": moved}


@schedule("*/5 * * * *", on_overlap=OnOverlap.SKIP.value, enabled=False)
@job(RECLAIM, priority=100, max_attempts=3)
def reclaim_jobs(payload: dict[str, Any], context: JobContext) -> dict[str, int]:
    """Do what ``manage.py reclaim_jobs`` does."""
    from django_forgejobs import reaper

    return vars(reaper.tick(context.db, stop=lambda: context.should_stop)).copy()
