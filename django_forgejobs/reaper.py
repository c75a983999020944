"""One tick: put back what dead workers held, and fail what nobody serves. Holds no state: killed anywhere,
the next tick does the rest; two at once share the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_forgejobs import conf, lanes, tally
from django_forgejobs.models import AnnouncedType, Job

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Tick:
    """What one tick did, in numbers of jobs."""

    put_back: int = 0
    buried: int = 0
    unserved: int = 0


def tick(db: str, *, stop: Callable[[], bool] | None = None) -> Tick:
    """Reclaim every expired lease, in batches with a commit each, then sweep types that nobody serves."""
    reclaimed = Job.objects.reclaim(db=db, stop=stop)
    if reclaimed:
        tally.flush(db)  # lease expirations are looked for right after they happen
    buried = sum(job.finished_at is not None for job in reclaimed)
    return Tick(len(reclaimed) - buried, buried, sweep(db, stop=stop))


def sweep(db: str, *, stop: Callable[[], bool] | None = None) -> int:
    """Fail the jobs whose type nobody has announced for ``UNKNOWN_TYPE_GRACE``; return how many."""
    grace = conf.current().UNKNOWN_TYPE_GRACE
    unserved = AnnouncedType.objects.unserved(lanes.ready_types(db), grace=grace, db=db)
    return sum(len(Job.objects.fail_unserved(type_, grace=grace, db=db, stop=stop)) for type_ in unserved)
