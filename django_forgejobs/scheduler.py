"""One tick: what is due by its schedule becomes jobs, each slot once. Holds no state: any number may tick,
all may be killed.

A schedule is settled in a transaction of its own, its row locked: job, slot and next slot are written
together or not at all. A row that cannot be understood is disabled and stops no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models import Q

from django_forgejobs import (
    conf,
    failures,
    faults,
    payloads,
    registry,
    schedules,
    signals,
    slots,
    sql,
    timetable,
)
from django_forgejobs.cron import Cron
from django_forgejobs.exceptions import JobError
from django_forgejobs.models import Job, Liveness, Schedule, ScheduleSlot
from django_forgejobs.schedules import Declared
from django_forgejobs.slots import Decision, Fate, OnOverlap, Stretch
from django_forgejobs.states import Status
from django_forgejobs.timetable import Synced

if TYPE_CHECKING:
    from django.db.models.expressions import Combinable
    from django.dispatch import Signal

logger = logging.getLogger("django_forgejobs")

#: The name under which schedulers say that one of them is alive.
ALIVE = "scheduler"

#: So many of the last runs are asked whether they have ended.
RUNS = 100

#: Characters of a reason for disabling that are stored.
REASON = 2000


@dataclass
class Tick:
    """What a tick, or many, did: jobs ``fired``, slots ``missed`` and ``skipped``, schedules ``disabled``."""

    fired: int = 0
    missed: int = 0
    skipped: int = 0
    disabled: int = 0

    def __iadd__(self, other: Tick) -> Tick:
        for name, number in vars(other).items():
            setattr(self, name, getattr(self, name) + number)
        return self


def tick(db: str, *, clock: Combinable | None = None, stop: Callable[[], bool] | None = None) -> Tick:
    """Settle every schedule that is due; return what was done.

    ``clock`` stands for the database's clock in a simulation. If the process dies, each schedule is
    settled or as it was.
    """
    done = Tick()
    due = Schedule.objects.using(db).due(clock).order_by("next_run_at", "pk")
    for pk in list(due.values_list("pk", flat=True)):
        if stop is not None and stop():
            break
        done += settle(pk, db, clock=clock)
    return done


def begin(db: str, declared: Mapping[str, Declared]) -> Synced:
    """Make rows of the schedules that code declares; return what was done."""
    synced = Schedule.objects.sync(declared, db=db)
    for name in () if synced.held else synced.refused:  # it is tried again, and said then
        logger.warning(
            'The code declares a schedule "%s", but one of that name was made in the admin: that one counts. '
            "Rename one of them.",
            name,
        )
    return synced


def announce(db: str, declared: Mapping[str, Declared]) -> None:
    """Say that a scheduler is alive and what its code declares; mark what no code declares any more.

    Not before schedulers have been announcing for the whole grace: after a time in which all were down,
    silence says nothing about a schedule.
    """
    grace = conf.current().UNKNOWN_TYPE_GRACE
    Liveness.objects.announce([ALIVE], grace=grace, db=db)
    Schedule.objects.announce(declared, db=db)
    if not Liveness.objects.lasting(grace=grace, db=db).filter(name=ALIVE).exists():
        return
    for name in Schedule.objects.mark_gone(grace=grace, db=db):
        logger.warning(
            'Schedule "%s" is gone from the code: no scheduler has declared it for %g s. It fires no more; '
            "it can be deleted in the admin.",
            name,
            grace,
        )


def settle(pk: int, db: str, *, clock: Combinable | None = None) -> Tick:
    """Settle one schedule, unless another process has it or has done it; return what was done."""

    def locked() -> _Settling | None:
        with transaction.atomic(using=db):
            found = Schedule.objects.using(db).due(clock).filter(pk=pk)
            schedule = found.select_for_update(skip_locked=True, no_key=True).first()
            if schedule is None:
                logger.debug("Schedule %s is with another scheduler, or it has done it.", pk)
                return None
            settling = _Settling(schedule, db)
            settling.settle()
            return settling

    try:
        settling = sql.again(db, locked)
    except JobError as error:
        reason = str(error)
    except DatabaseError as error:
        if faults.is_again(error) or faults.is_outage(error):
            raise
        reason = f"The database refuses it: {failures.message(error)}"
    except Exception as error:
        logger.exception("Schedule %s met an error that nobody foresaw.", pk)
        reason = f"It met an error that nobody foresaw: {failures.describe(error)}"
    else:
        return Tick() if settling is None else settling.tell()
    return sql.again(db, lambda: _disable(pk, db, reason))


def _disable(pk: int, db: str, reason: str) -> Tick:
    """Stop a schedule that cannot be understood; a person mends it and resumes.

    A transaction of its own, since what had been written is rolled back. It reads nothing that may be wrong:
    SQLite keeps any text for a time, and any bytes for a text.
    """
    reason = payloads.storable(reason, REASON)
    with transaction.atomic(using=db):
        found = Schedule.objects.using(db).active().filter(pk=pk)
        if not found.select_for_update(skip_locked=True, no_key=True).values_list("pk").first():
            return Tick()
        found.update(enabled=False, disabled_reason=reason)
    try:
        schedule = Schedule.objects.using(db).only("name", "job_type").get(pk=pk)
    except DatabaseError:
        schedule = Schedule(pk=pk, name=f"#{pk}")
    signals.send(signals.schedule_disabled, schedule=schedule, reason=reason)
    return Tick(disabled=1)


@dataclass
class _Settling:
    """A schedule, locked, and what is done to it. Whoever listens is told when that is committed."""

    schedule: Schedule
    db: str
    done: Tick = field(default_factory=Tick)
    told: list[tuple[Signal, dict[str, Any]]] = field(default_factory=list)

    @property
    def now(self) -> datetime:
        now: datetime = self.schedule.now  # type: ignore[attr-defined]
        return now

    def settle(self) -> None:
        """Plan the schedule, if it is new or was changed; otherwise do what its due slots ask for."""
        cron = schedules.check(self.schedule)
        if self.schedule.ahead:  # type: ignore[attr-defined]
            self._take_back(cron)
            self._plan(cron)
        elif self.schedule.planned:  # type: ignore[attr-defined]
            self._fire(cron)
        else:
            self._plan(cron)

    def tell(self) -> Tick:
        """Send the signals; return what was done."""
        for signal, facts in self.told:
            signals.send(signal, schedule=self.schedule, **facts)
        return self.done

    # --- the next slot ---------------------------------------------------------------------------

    def _plan(self, cron: Cron) -> None:
        """Compute the next future slot. Nothing fires: whoever changed a schedule means from now on."""
        one = self.schedule
        since = self.now if one.last_slot is None else max(self.now, one.last_slot)
        self._write(
            next_run_at=slots.first(cron, since, one.starts_at, one.ends_at),
            last_slot=one.last_slot,
            disabled_reason="",
            planned_at=self.now,
            **{f"planned_{name}": getattr(one, name) for name in timetable.PLANNED_FOR},
            # SQLite compares times as text: one that plain SQL wrote in another form is never equal.
            starts_at=one.starts_at,
            ends_at=one.ends_at,
        )

    def _take_back(self, cron: Cron) -> None:
        """Slots that a clock ahead of its time had settled come again. Those that fired stay fired; what was
        only recorded of the others is taken back.
        """
        one, now = self.schedule, self.now
        logger.warning(
            'Schedule "%s" was settled and planned at %s, but the database\'s clock says %s: it has stepped '
            "back. Slots from now on fire when their time comes, but for those that have fired.",
            one.name,
            max(at for at in (one.last_slot, one.planned_at) if at is not None),
            now,
        )
        if one.last_slot is None or one.last_slot <= now:
            return
        recorded = ScheduleSlot.objects.using(self.db).filter(
            schedule=one, fate__in=(Fate.MISSED, Fate.OVERLAP, Fate.UNKNOWN)
        )
        recorded.filter(slot__gt=now).delete()
        one.last_slot = cron.latest(now)
        for stretch in recorded.filter(until__gt=now):
            recorded.filter(pk=stretch.pk).update(
                until=one.last_slot, count=1 + cron.count(stretch.slot, now)
            )

    # --- due slots -------------------------------------------------------------------------------

    def _fire(self, cron: Cron) -> None:
        one = self.schedule
        assert one.next_run_at is not None  # or it would not be due
        decision = slots.decide(
            cron,
            due=one.next_run_at,
            now=self.now,
            last_slot=one.last_slot,
            ends_at=one.ends_at,
            on_missed=one.on_missed,
            # The runs of a schedule that may not overlap would only get into each other's way.
            at_most=1 if one.on_overlap == OnOverlap.SKIP else slots.ALL_AT_MOST,
        )
        if (due := decision.due) is not None:
            if registry.get(one.job_type) is not None:
                if decision.missed is not None:
                    self._skip(cron, decision.missed, Fate.MISSED, f"on_missed is {one.on_missed}")
                self._fire_slots(decision)
            elif not self._unknown(cron, due):
                return
            one.last_slot = due.last
        self._write(
            next_run_at=decision.next,
            last_slot=one.last_slot,
            last_job_id=one.last_job_id,
            planned_at=self.now,
        )

    def _skip(self, cron: Cron, due: Stretch, fate: Fate, reason: str) -> None:
        """Record slots that do not fire, but for those of them that the ledger has: skipped by hand, fired
        when a clock was ahead of its time, or settled before somebody wrote back an old row.
        """
        settled = ScheduleSlot.objects.using(self.db).filter(
            Q(slot__gte=due.first) | Q(until__gte=due.first), schedule=self.schedule, slot__lte=due.last
        )
        first: datetime | None = due.first
        for since, until in [*settled.order_by("slot").values_list("slot", "until"), (None, None)]:
            last = due.last if since is None else cron.latest(since - slots.MOMENT)
            if first is not None and last is not None and first <= last:
                self._record(Stretch(first, last, 1 + cron.count(first, last)), fate, reason)
            if since is not None and first is not None:
                first = max(first, cron.after(until or since) or first)

    def _fire_slots(self, decision: Decision) -> None:
        """Enqueue what is to fire, but for slots that have been settled before, as the ledger knows."""
        ledger = ScheduleSlot.objects.using(self.db).filter(schedule=self.schedule)
        settled = set(ledger.filter(slot__in=decision.fire).values_list("slot", flat=True))
        fire = [slot for slot in decision.fire if slot not in settled]
        if not fire:
            return
        if previous := self._previous_run():
            for slot in fire:
                self._record(Stretch(slot, slot, 1), Fate.OVERLAP, f"{previous} has not ended")
            return
        jobs = Schedule.objects.enqueue(self.schedule, fire)
        for slot, job in zip(fire, jobs, strict=True):
            late = max(0.0, (self.now - job.run_at).total_seconds())
            Schedule.objects.record(self.schedule, slot, Fate.FIRED, job=job, late=late)
            self._tell(signals.slot_fired, slot=slot, job=job, late=late)
        self.schedule.last_job_id = jobs[-1].pk
        self.done.fired += len(jobs)

    def _previous_run(self) -> Job | None:
        """Return a job that stands in the way of the next one, as the ledger knows it. One that died stands
        there no longer than its lease, and then as long as it is to be retried.
        """
        if self.schedule.on_overlap != OnOverlap.SKIP:
            return None
        alive = (Status.READY, Status.RUNNING)
        runs = ScheduleSlot.objects.using(self.db).filter(schedule=self.schedule, job_id__isnull=False)
        recent = list(runs.order_by("-slot").values_list("job_id", flat=True)[:RUNS])
        jobs = Job.objects.using(self.db).filter(pk__in=recent, status__in=alive)
        previous: Job | None = jobs.defer("payload", "history").first()
        return previous

    def _unknown(self, cron: Cron, due: Stretch) -> bool:
        """Leave slots of a type that this process does not know to one that does; after a grace in which
        there was none, record them as skipped. Return whether that is done.
        """
        one, grace = self.schedule, conf.current().UNKNOWN_TYPE_GRACE
        waited = (self.now - due.first).total_seconds()
        # As long as none has been running for the grace, silence says nothing about the type.
        alive = Liveness.objects.lasting(grace=grace, db=self.db).filter(name=ALIVE)
        if waited < grace or not alive.exists():
            reason = f'this process does not know the job type "{one.job_type}"'
            self._tell(signals.slot_left, slot=due.first, reason=reason, grace=grace)
            return False
        self._skip(
            cron, due, Fate.UNKNOWN, f'no scheduler knew the job type "{one.job_type}" for {grace:g} s'
        )
        return True

    # --- writing ---------------------------------------------------------------------------------

    def _record(self, stretch: Stretch, fate: Fate, reason: str) -> None:
        """Record a stretch of slots that did not fire as one row."""
        until = None if stretch.count == 1 else stretch.last
        Schedule.objects.record(
            self.schedule, stretch.first, fate, until=until, count=stretch.count, reason=reason
        )
        if fate is Fate.MISSED:
            self.done.missed += stretch.count
        else:
            self.done.skipped += stretch.count
        self._tell(signals.slots_skipped, stretch=stretch, fate=fate, reason=reason)

    def _write(self, **values: Any) -> None:
        Schedule.objects.using(self.db).filter(pk=self.schedule.pk).update(**values)

    def _tell(self, signal: Signal, **facts: Any) -> None:
        self.told.append((signal, facts))
