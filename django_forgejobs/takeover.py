"""Take back at once what a worker held that was seen to die. Holds no state: what one try leaves, the next
does, and in the end the lease runs out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from django_forgejobs import conf, executor, registry, tally
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import COMPLETE, GIVE_BACK


@dataclass(frozen=True)
class Death:
    """How one start of a worker ended, as its supervisor saw it.

    ``how`` ends a sentence that begins "Its worker died:". ``begun`` are the jobs that its handlers were at,
    None if that is not known; ``over`` are those from which they had come back. With ``overdue`` it was
    killed because these did not come back in time; ``blameless``: for a reason that is none of its jobs'.
    """

    worker: str
    how: str
    begun: frozenset[int] | None
    over: frozenset[int] = frozenset()
    overdue: frozenset[int] = frozenset()
    blameless: bool = False


def take_back(death: Death, db: str) -> list[Job]:
    """Move all that the dead worker holds; return what was reclaimed, or put back as the suspect that it was.

    What had not begun is given back as if nothing had been; what was over, but not written, is released.
    What was running is reclaimed: any of it may have been the killer. But where that is known, the overdue
    jobs have failed by their timeout, and the others are released. A row that somebody has locked is left to
    the next call. Raises what the database does.
    """
    held = Job.objects.held_by(death.worker, db=db)
    running = [job for job in held if death.begun is None or job.pk in death.begun]
    overdue = [job for job in running if job.pk in death.overdue]
    outcomes = [
        _unwritten(job, death) if job.pk in death.over else Outcome(job, GIVE_BACK)
        for job in held
        if job not in running
    ]
    outcomes += [_timed_out(job, death) for job in overdue]
    if death.overdue or death.blameless:
        outcomes += [_released(job, death.how) for job in running if job not in overdue]
        running = []
    reclaimed = Job.objects.reclaim_from(death.worker, running, because=death.how, db=db)
    settlement = Job.objects.finish(outcomes, db=db)
    if settlement.outage is not None:
        raise settlement.outage
    tally.flush(db)
    return reclaimed + [outcome.job for outcome in settlement.accepted if outcome.job.lease_expirations]


def _released(job: Job, reason: str) -> Outcome:
    """Release a job; one that is a suspect without a delay, since a process for it begins at once."""
    return executor.released(job, reason, delay=0.0 if job.lease_expirations else 1.0)


def _unwritten(job: Job, death: Death) -> Outcome:
    """Release a job that ran, but whose end was not written: not its fault, unless it happens ten times."""
    reason = f"it had run, but {death.how} before its end was written"
    definition = registry.definitions(None)[job.type]
    return replace(
        _released(job, reason),
        facts={"reason": reason, "outage": True},
        charged=executor.undone(Outcome(job, COMPLETE), definition, RuntimeError(reason)),
    )


def _timed_out(job: Job, death: Death) -> Outcome:
    definition = registry.definitions(None)[job.type]
    seconds = (definition.timeout or 0.0) + conf.current().TIMEOUT_MARGIN
    outcome = executor.timed_out(job, definition, seconds)
    return replace(outcome, error=f"{outcome.error} Its {death.how}.")
