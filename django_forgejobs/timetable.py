"""The schedules as rows: which are due, what people do to them by hand, and what the code declares.

What a tick does to one that is due is in ``scheduler``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeVar

from django.apps import apps
from django.db import models, transaction
from django.db.models import Case, DateTimeField, F, Q, Value, When
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast, Now

from django_forgejobs import cron, intake, schedules, slots, sql
from django_forgejobs.dialect import AfterSeconds
from django_forgejobs.managers import patiently
from django_forgejobs.schedules import Declared
from django_forgejobs.slots import Fate, Source

if TYPE_CHECKING:
    from django_forgejobs.models import Job, Schedule, ScheduleSlot

T = TypeVar("T")

#: A clock that stepped back by less has lost nothing: slots are a minute apart at the least.
STEPPED_BACK = 60.0

#: How the reason begins for which a person, not a tick, has disabled a schedule.
PAUSED = "Paused"


def _differs(name: str) -> Q:
    planned = f"planned_{name}"
    neither = Q(**{f"{name}__isnull": True, f"{planned}__isnull": True})
    return ~(Q(**{planned: F(name)}) | neither)


#: What ``next_run_at`` depends on has changed since it was computed.
PLANNED_FOR = ("cron", "timezone", "starts_at", "ends_at")
UNPLANNED = reduce(or_, map(_differs, PLANNED_FOR))


class ScheduleQuerySet(models.QuerySet["Schedule"]):
    """Schedules by what a tick has to do with them. ``now`` is the one clock: the database's, unless a
    simulation brings its own.
    """

    def active(self) -> ScheduleQuerySet:
        """Those that fire: neither paused nor gone from the code."""
        return self.filter(enabled=True, gone_at__isnull=True)

    def due(self, now: Combinable | None = None) -> ScheduleQuerySet:
        """Active ones that a tick has something to do with, ``clocked``."""
        now = Now() if now is None else now
        return self.active().clocked(now).filter(Q(planned=False) | Q(next_run_at__lte=now) | Q(ahead=True))

    def clocked(self, now: Combinable | None = None) -> ScheduleQuerySet:
        """All of them, each with the time as ``now``; ``planned``: whether ``next_run_at`` was computed for
        what the row says now; and ``ahead``: whether that was at a time that is still to come, for the
        clock has stepped back.
        """
        now = Now() if now is None else now
        limit = AfterSeconds(Value(STEPPED_BACK), since=now)
        return self.annotate(
            now=Cast(now, DateTimeField()),
            planned=Case(When(UNPLANNED, False), default=True),
            ahead=Case(When(Q(last_slot__gt=limit) | Q(planned_at__gt=limit), True), default=False),
        )


@dataclass
class Synced:
    """What a sync did, by names of schedules. ``refused`` exist already, and are not the code's; ``held`` are
    locked by somebody, and were not changed.
    """

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


class ScheduleManager(models.Manager.from_queryset(ScheduleQuerySet)):  # type: ignore[misc]
    """What is done to schedules by hand and by code. Each call is one transaction, the row locked; one that
    somebody else holds is tried for ``managers.LOCKED_PATIENCE``, then a ``JobError``.
    """

    # --- by hand ---------------------------------------------------------------------------------

    def pause(self, schedule: Schedule | int, *, by: str = "", db: str | None = None) -> bool:
        """Stop a schedule from firing; return whether this call did it."""
        switched = self._locked(
            schedule, db, lambda row: self._switch(row, enabled=False, disabled_reason=paused(by))
        )
        return bool(switched)

    def resume(self, schedule: Schedule | int, *, by: str = "", db: str | None = None) -> bool:
        """Let a schedule fire again, from the next future slot; return whether this call did it.

        Raises ``JobError`` for one that the next tick would only disable again. ``by`` is taken for the sake
        of the other moves: a schedule that fires has nothing to explain.
        """

        def resume(row: Schedule) -> bool:
            if not row.enabled:
                schedules.check(row)
            return self._switch(row, enabled=True, disabled_reason="")

        return bool(self._locked(schedule, db, resume))

    def _switch(self, row: Schedule, *, enabled: bool, **values: Any) -> bool:
        # What was planned is forgotten by a trigger, so that plain SQL has the same effect.
        found = self.using(row._state.db).filter(pk=row.pk, enabled=not enabled)
        return bool(found.update(enabled=enabled, **values))

    def skip_next(self, schedule: Schedule | int, *, by: str = "", db: str | None = None) -> datetime | None:
        """Leave out the next slot of an active schedule and return it; None if there is none planned."""

        def skip(row: Schedule) -> datetime | None:
            if not row.enabled or row.gone_at is not None:
                return None
            found = schedules.check(row)
            planned, slot = row.planned, row.next_run_at  # type: ignore[attr-defined]
            if not planned:  # as the next tick will
                slot = slots.first(found, row.now, row.starts_at, row.ends_at)  # type: ignore[attr-defined]
            settled = row.slots.using(row._state.db)
            # One that was skipped, and planned anew when its schedule was paused and resumed.
            while slot is not None and settled.filter(slot=slot).exists():
                slot = slots.first(found, slot, None, row.ends_at)
            if slot is None:
                return None
            self.record(row, slot, Fate.SKIPPED, reason=f"by {by}" if by else "")
            if planned:
                following = slots.first(found, slot, None, row.ends_at)
                self.using(row._state.db).filter(pk=row.pk).update(next_run_at=following)
            return slot

        return self._locked(schedule, db, skip)

    def run_now(self, schedule: Schedule | int, *, by: str = "", db: str | None = None) -> Job | None:
        """Enqueue a job of the schedule beside its slots and return it; None if there is no such schedule.

        The slots stay as they are. Raises ``JobError`` for a schedule that no job can be made of.
        """

        def run(row: Schedule) -> Job:
            now: datetime = row.now  # type: ignore[attr-defined]
            [job] = self.enqueue(row, [now], offset=0)
            self.record(row, now, Fate.BY_HAND, job=job, reason=f"by {by}" if by else "")
            self.using(row._state.db).filter(pk=row.pk).update(last_job_id=job.pk)
            return job

        return self._locked(schedule, db, run)

    def _locked(self, schedule: Schedule | int, db: str | None, work: Callable[[Schedule], T]) -> T | None:
        alias = self.alias(db)
        pk = intake.row_id(schedule)

        found = self.using(alias).filter(pk=pk)

        def locked() -> list[T]:
            with transaction.atomic(using=alias):
                rows = found.clocked().select_for_update(skip_locked=True, no_key=True)
                return [work(row) for row in rows]

        done = patiently(f"Schedule {pk}", lambda: sql.again(alias, locked), found.exists)
        return done[0] if done else None

    # --- what a slot leaves behind ---------------------------------------------------------------

    def enqueue(
        self, schedule: Schedule, instants: Iterable[datetime], *, offset: float | None = None
    ) -> list[Job]:
        """Insert the jobs of the slots at ``instants``, due ``offset`` seconds after them; part of the
        caller's transaction.

        Their keys make that once: a job whose key exists is returned as it is. Raises ``JobError`` before
        anything is written.
        """
        if offset is None:
            offset = cron.offset(schedule.name, schedule.spread)
        jobs = [
            {
                "type": schedule.job_type,
                "payload": schedule.payload,
                "queue": schedule.queue or None,
                "priority": schedule.priority,
                "max_attempts": schedule.max_attempts,
                "run_at": slot + timedelta(seconds=offset),
                "slot_key": slot_key(schedule.pk, slot),
            }
            for slot in instants
        ]
        found: list[Job] = apps.get_model("forgejobs", "Job").objects.enqueue_slots(
            jobs, db=schedule._state.db
        )
        return found

    def record(
        self, schedule: Schedule, slot: datetime, fate: Fate, *, job: Job | None = None, **facts: Any
    ) -> ScheduleSlot:
        """Write down what became of a slot; part of the caller's transaction, in which it is locked."""
        recorded: ScheduleSlot = (
            apps.get_model("forgejobs", "ScheduleSlot")
            .objects.using(schedule._state.db)
            .create(
                schedule_id=schedule.pk, slot=slot, fate=fate, job_id=None if job is None else job.pk, **facts
            )
        )
        return recorded

    # --- by code ---------------------------------------------------------------------------------

    def sync(self, declared: Mapping[str, Declared], *, db: str | None = None) -> Synced:
        """Make the rows of code what the code declares; leave alone whether they are paused.

        A schedule of that name that was made in the admin stays, and is refused to the code.
        """
        alias = self.alias(db)

        def sync() -> Synced:
            done = Synced()
            with transaction.atomic(using=alias):
                known = {row.name: row for row in self.using(alias).filter(name__in=list(declared))}
                for name, one in sorted(declared.items()):
                    if name not in known:
                        self._add(one, alias)
                        done.added.append(name)
                    elif known[name].source != Source.CODE:
                        done.refused.append(name)
                    elif changed := self._changes(known[name], one):
                        moved = self._update_free(self.using(alias).filter(name=name), **changed)
                        (done.changed if moved else done.held).append(name)
            self.announce(declared, db=alias)
            return done

        return sql.again(alias, sync)

    def _update_free(self, rows: ScheduleQuerySet, **values: Any) -> int:
        """Update those of ``rows`` that nobody holds: somebody's open transaction holds up its own row alone.
        Return how many.
        """
        with transaction.atomic(using=rows.db):
            free = rows.select_for_update(skip_locked=True, no_key=True).values_list("pk", flat=True)
            return int(self.using(rows.db).filter(pk__in=list(free)).update(**values))

    def _add(self, one: Declared, db: str) -> None:
        row = self.model(**one.columns(), enabled=one.enabled, source=Source.CODE, declared_at=Now())
        # Another scheduler may be starting too, and have been quicker. Not ignore_conflicts: SQLite would
        # ignore a row that a constraint refuses, too.
        self.using(db).bulk_create(
            [row], update_conflicts=True, unique_fields=["name"], update_fields=["declared_at"]
        )

    def _changes(self, row: Schedule, one: Declared) -> dict[str, Any]:
        return {
            name: value for name, value in one.columns().items() if _text(getattr(row, name)) != _text(value)
        }

    def announce(self, names: Iterable[str], *, db: str | None = None) -> None:
        """Say that the code declares ``names`` now. One that was gone is planned anew, and fires nothing."""
        mine = self.using(self.alias(db)).filter(source=Source.CODE, name__in=list(names))
        self._update_free(mine.filter(gone_at__isnull=False), gone_at=None, planned_cron="")
        self._update_free(mine, declared_at=Now())

    def mark_gone(self, *, grace: float, db: str | None = None) -> list[str]:
        """Mark schedules that no code has declared for ``grace`` seconds; return their names.

        They stay, with their slots, and fire no more.
        """
        silent = self.using(self.alias(db)).filter(
            source=Source.CODE, gone_at__isnull=True, declared_at__lt=AfterSeconds(Value(-grace))
        )
        names = sorted(silent.values_list("name", flat=True))
        return [name for name in names if self._update_free(silent.filter(name=name), gone_at=Now())]

    def alias(self, db: str | None) -> str:
        """Return the alias of the queue's database: schedules live where their jobs do."""
        found: str = apps.get_model("forgejobs", "Job").objects.alias(db or self._db)
        return found


def paused(by: str) -> str:
    """Return the reason to store with a schedule that somebody pauses."""
    return f"{PAUSED} by {by}." if by else f"{PAUSED}."


def _text(value: Any) -> str:
    """Return what tells 1 from true and 1.0, where Python's ``==`` does not."""
    return json.dumps(value, sort_keys=True, default=str)


def slot_key(schedule_id: int, slot: datetime) -> str:
    """Return the idempotency key of the job of a slot."""
    return f"schedule:{schedule_id}:{slot.astimezone(UTC).isoformat().replace('+00:00', 'Z')}"
