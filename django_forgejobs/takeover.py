"""Take back at once what a worker held that was seen to die. Holds no state: what one try leaves, the next
does, and in the end the lease runs out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from django_forgejobs import conf, executor, registry, tally
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import GIVE_BACK


@dataclass(frozen=True)
class Death:
    """How one start of a worker ended, as its supervisor saw it.

    ``how`` ends a sentence that begins "Its worker died:". ``begun`` are the jobs that its handlers were at,
    None if that is not known. With ``overdue`` it was killed because these did not come back in time;
    ``blameless``: for a reason that is none of its jobs'.
    """

    worker: str
    how: str
    begun: frozenset[int] | None
    overdue: frozenset[int] = frozenset()
    blameless: bool = False


def take_back(death: Death, db: str) -> list[Job]:
    """Move all that the dead worker holds; return what was reclaimed.

    What had not begun is given back as if nothing had been. What was running is reclaimed: any of it may
    have been the killer. But where that is known, the overdue jobs have failed by their timeout, and the
    others are released. A row that somebody has locked is left to the next call. Raises what the database
    does.
    """
    held = Job.objects.held_by(death.worker, db=db)
    running = [job for job in held if death.begun is None or job.pk in death.begun]
    overdue = [job for job in running if job.pk in death.overdue]
    outcomes = [Outcome(job, GIVE_BACK) for job in held if job not in running]
    outcomes += [_timed_out(job, death) for job in overdue]
    if death.overdue or death.blameless:
        outcomes += [executor.released(job, death.how) for job in running if job not in overdue]
        running = []
    reclaimed = Job.objects.reclaim_from(death.worker, running, because=death.how, db=db)
    settlement = Job.objects.finish(outcomes, db=db)
    if settlement.outage is not None:
        raise settlement.outage
    tally.flush(db)
    return reclaimed


def _timed_out(job: Job, death: Death) -> Outcome:
    definition = registry.definitions(None)[job.type]
    seconds = (definition.timeout or 0.0) + conf.current().TIMEOUT_MARGIN
    outcome = executor.timed_out(job, definition, seconds)
    return replace(outcome, error=f"{outcome.error} Its {death.how}.")
