"""Every transition of a job: nothing else in the project writes ``status``."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from django.db import Error as DatabaseError
from django.db import models
from django.db.models import CharField, F, Q, Value
from django.db.models.functions import Cast, Concat, Now

from django_forgejobs import conf, faults, hints, inserts, intake, lanes, settlement, signals, sql
from django_forgejobs.dialect import AfterSeconds
from django_forgejobs.exceptions import JobError
from django_forgejobs.lanes import LaneEnd, Suspects
from django_forgejobs.outcomes import Outcome, Settlement
from django_forgejobs.payloads import StrictEncoder
from django_forgejobs.predicates import CLAIMABLE, JobQuerySet
from django_forgejobs.states import (
    CANCEL,
    FAIL,
    RECLAIM,
    RECLAIM_DEAD,
    RENEW,
    REQUEUE,
    RUN_NOW,
    Move,
    Status,
)

if TYPE_CHECKING:
    from django_forgejobs.models import Job

logger = logging.getLogger("django_forgejobs")

T = TypeVar("T")

#: Rows of one reclaiming statement.
RECLAIM_ROWS = 100

#: Seconds for which a move by hand waits for a row that somebody has locked; a heartbeat takes a millisecond.
LOCKED_PATIENCE = 5.0


class ClaimOptions(TypedDict, total=False):
    """What a claim may be told. ``queues`` and ``types`` of None mean all; ``lease`` is in seconds; with
    ``after``, only those lanes are looked at, and in each what comes after its end; the last ``ahead`` are
    claimed only while all payloads are small.
    """

    queues: Collection[str] | None
    types: Collection[str] | None
    suspects: Suspects
    lease: float | None
    after: Sequence[LaneEnd]
    ahead: int


class JobManager(models.Manager.from_queryset(JobQuerySet)):  # type: ignore[misc]
    """The one writer of ``status``. Each move is one guarded UPDATE whose answer is read."""

    def alias(self, db: str | None) -> str:
        """Return the alias of the queue's database; reads go there too, never to a replica.

        Raises ``JobError`` for one that ``DATABASES`` does not have.
        """
        return intake.alias(db or self._db)

    # --- in --------------------------------------------------------------------------------------

    def enqueue(self, type: str, payload: Any = None, *, db: str | None = None, **options: Any) -> Job:
        """Insert a job and return it; with a known ``idempotency_key``, return the job that has it.

        Part of the caller's transaction. Options and errors are those of ``queue.enqueue``.
        """
        return inserts.jobs([intake.row(type, payload, **options)], self.alias(db))[0]

    def enqueue_many(self, jobs: Iterable[Mapping[str, Any]], *, db: str | None = None) -> list[Job]:
        """Insert many jobs, all or none; return them in input order."""
        alias = self.alias(db)
        return inserts.jobs(intake.rows(jobs), alias)

    def enqueue_slots(self, jobs: Iterable[Mapping[str, Any]], *, db: str | None = None) -> list[Job]:
        """Insert the jobs of a schedule's slots, part of the caller's transaction; return them in order.

        ``jobs`` are dicts of ``enqueue``'s arguments, but for the key, which is a ``slot_key``.
        """
        return inserts.jobs(intake.slot_rows(jobs), self.alias(db))

    # --- claim -----------------------------------------------------------------------------------

    def claim(
        self, limit: int = 1, *, worker: str, db: str | None = None, **options: Unpack[ClaimOptions]
    ) -> list[Job]:
        """Take up to ``limit`` due jobs for ``worker`` and return them in claim order.

        The only door out of ``ready``; the options are those of ``ClaimOptions``. Each job gets a token of
        its own. If the process dies after this, the lease runs out and the reaper puts the job back; if the
        answer is lost, ``held_by`` finds the jobs.
        """
        alias = self.alias(db)
        statement = self._claiming(limit, worker, alias, **options)
        return [] if statement is None else lanes.in_claim_order(sql.run(alias, statement))

    def finish_and_claim(
        self,
        outcomes: Sequence[Outcome],
        limit: int,
        *,
        worker: str,
        db: str | None = None,
        **options: Unpack[ClaimOptions],
    ) -> tuple[Settlement, list[Job] | None]:
        """Write ``outcomes``, as ``finish`` does, and claim, as ``claim`` does, in one transaction: commits
        are what a queue pays for.

        The jobs are None when nobody knows whether they were claimed: an outage ate the answer.
        """
        alias = self.alias(db)
        statement = self._claiming(limit, worker, alias, **options)
        if statement is None:
            return settlement.settle(outcomes, alias), []
        return settlement.settle_and_claim(outcomes, statement, alias)

    def _claiming(
        self,
        limit: int,
        worker: str,
        db: str,
        *,
        queues: Collection[str] | None = None,
        types: Collection[str] | None = None,
        suspects: Suspects = Suspects.LAST,
        lease: float | None = None,
        after: Sequence[LaneEnd] = (),
        ahead: int = 0,
    ) -> sql.Statement | None:
        if limit < 1 or (types is not None and not types) or (queues is not None and not queues):
            return None
        return lanes.claim(
            db,
            limit,
            queues=None if queues is None else tuple(sorted(queues)),
            types=None if types is None else tuple(sorted(types)),
            suspects=suspects,
            worker=worker,
            lease=conf.current().LEASE if lease is None else lease,
            after=after,
            ahead=ahead,
        )

    def held_by(self, worker: str, *, db: str | None = None) -> list[Job]:
        """Return the running jobs of one start of a worker: how a claim in doubt is found again."""
        return list(self.using(self.alias(db)).running().filter(locked_by=worker).order_by("pk"))

    def renew(
        self, claims: Mapping[int, uuid.UUID], *, lease: float | None = None, db: str | None = None
    ) -> set[uuid.UUID]:
        """Extend the leases of ``claims`` (token by job id); return the tokens that are still current.

        Rows locked by somebody are not taken for lost: they are asked about without a lock.
        """
        alias = self.alias(db)
        tokens = set(claims.values())
        mine = self.using(alias).running().filter(pk__in=list(claims), claim_token__in=tokens)
        seconds = conf.current().LEASE if lease is None else lease
        values = {**sql.assignments(RENEW), "locked_until": AfterSeconds(Value(seconds))}
        moved = sql.move(mine, values, returning=["claim_token"])
        renewed = {job.claim_token for job in moved if job.claim_token is not None}
        if renewed != tokens:
            renewed |= set(mine.values_list("claim_token", flat=True))
        return renewed

    def heartbeat(self, claim_token: uuid.UUID, *, db: str | None = None) -> bool:
        """Extend one lease; return whether the claim is current. In a worker, ask ``queue.heartbeat``."""
        alias = self.alias(db)
        found = self.using(alias).running().filter(claim_token=claim_token)
        pk = found.values_list("pk", flat=True).first()
        return pk is not None and bool(self.renew({pk: claim_token}, db=alias))

    # --- finish ----------------------------------------------------------------------------------

    def finish(self, outcomes: Sequence[Outcome], *, db: str | None = None) -> Settlement:
        """Write how claims ended, each fenced by its token; return what became of each.

        One bad or locked row spoils no other. An outage is reported, not raised: what it left open is
        ``waiting``. If the process dies before, the lease runs out and the job runs again.
        """
        return settlement.settle(outcomes, self.alias(db))

    # --- reclaim ---------------------------------------------------------------------------------

    def reclaim(self, *, db: str | None = None, stop: Callable[[], bool] | None = None) -> list[Job]:
        """Put back, or bury, every job whose lease ran out; return them. A commit for each batch."""
        reclaimed: list[Job] = []
        after, more = 0, True
        while more and not (stop is not None and stop()):
            moved, after = self.reclaim_batch(after=after, db=db)
            reclaimed += moved
            more = after > 0
        return reclaimed

    def reclaim_batch(self, *, after: int = 0, db: str | None = None) -> tuple[list[Job], int]:
        """Put back, or bury, a batch of jobs whose leases ran out; return them and where to go on.

        The second value is the id to pass as ``after``, or 0 when there is nothing more. The whole
        condition is part of the UPDATE, so a job renewed, finished or claimed again meanwhile stays as it is.
        A row that the database refuses to change is logged and passed over.
        """
        alias = self.alias(db)
        batch = list(
            self.using(alias)
            .expired()
            .filter(pk__gt=after)
            .order_by("pk")
            .values_list("pk", "claim_token")[:RECLAIM_ROWS]
        )
        expired = self.using(alias).expired()
        because = (
            Value("the lease of claim "),
            Cast(F("claims"), CharField()),
            Value(", held by "),
            F("locked_by"),
            Value(", ran out"),
        )
        moved = self._reclaim(batch, expired, because, "lease expired")
        return moved, batch[-1][0] if len(batch) == RECLAIM_ROWS else 0

    def reclaim_from(
        self, worker: str, jobs: Sequence[Job], *, because: str, db: str | None = None
    ) -> list[Job]:
        """Put back, or bury, ``jobs`` of a ``worker`` that was seen to die while it ran them; return them.

        It is the reaper's move, without waiting for the leases to run out. ``because`` says how it died.
        """
        held = self.using(self.alias(db)).running().filter(locked_by=worker)
        pairs = [(job.pk, job.claim_token) for job in jobs]
        return self._reclaim(pairs, held, (Value(because),), because)

    def _reclaim(
        self, pairs: Sequence[tuple[int, Any]], held: JobQuerySet, because: Sequence[Any], reason: str
    ) -> list[Job]:
        limit = conf.current().MAX_LEASE_EXPIRATIONS
        died = Concat(
            Value("Its worker died: "),
            *because,
            Value(" (expiration "),
            Cast(F("lease_expirations") + Value(1), CharField()),
            Value(f" of {limit})."),
            output_field=models.TextField(),
        )
        facts = Value(json.dumps({"reason": reason}))
        moves = (
            (RECLAIM, Q(lease_expirations__lt=limit - 1)),
            (RECLAIM_DEAD, Q(lease_expirations__gte=limit - 1)),
        )

        def write(rows: Sequence[tuple[int, Any]]) -> list[Job]:
            ids, tokens = [pk for pk, _ in rows], [token for _, token in rows]
            found = held.filter(pk__in=ids, claim_token__in=tokens).order_by("pk")
            moved: list[Job] = []
            for move, which in moves:
                values = sql.assignments(move, error=died, facts=facts)
                values["lease_expirations"] = F("lease_expirations") + Value(1)
                moved += sql.move(found.filter(which), values)
            return moved

        moved = self._each(pairs, write)
        for job in moved:
            signals.send(signals.reclaimed, job=job, error=job.last_error)
            if job.finished_at is not None:
                signals.send(signals.dead, job=job, error=job.last_error, exception=None)
        return moved

    def fail_unserved(
        self, type: str, *, grace: float, db: str | None = None, stop: Callable[[], bool] | None = None
    ) -> list[Job]:
        """End as ``failed`` the jobs of a type that no worker serves, due for ``grace`` seconds.

        A commit for each batch; a row that the database refuses to change is logged and passed over.
        """
        alias = self.alias(db)
        text = (
            f'Unknown type: no worker has announced "{type}" for {grace:g} s. Is it registered by the '
            "jobs.py of an installed app, and does a worker run that code? Then requeue."
        )
        values = sql.assignments(FAIL, error=Value(text), facts=Value(json.dumps({"reason": text})))
        due = self.using(alias).ready().filter(type=type, run_at__lte=AfterSeconds(Value(-grace)))

        def write(rows: Sequence[Any]) -> list[Job]:
            return sql.move(due.filter(pk__in=[pk for pk, _ in rows]), values)

        failed: list[Job] = []
        passed_over: set[int] = set()
        while not (stop is not None and stop()):
            found = due.exclude(pk__in=passed_over)
            batch = list(found.values_list("pk", "claim_token")[:RECLAIM_ROWS])
            if not batch:
                break
            moved = self._each(batch, write)
            passed_over |= {pk for pk, _ in batch} - {job.pk for job in moved}
            for job in moved:
                signals.send(signals.failed, job=job, error=text, exception=None)
            failed += moved
        return failed

    # --- by hand ---------------------------------------------------------------------------------

    def cancel(self, job: Job | int, *, by: str = "", db: str | None = None) -> bool:
        """Call off a ready or running job; return whether this call did it.

        A running handler is told at its next heartbeat; its effects may still happen, its finish is
        refused.
        """
        return self._by_hand(CANCEL, job, by, signals.cancelled, db)

    def requeue(self, job: Job | int, *, by: str = "", db: str | None = None) -> bool:
        """Give a failed, dead or cancelled job fresh attempts, due now; return whether this call did."""
        return self._by_hand(REQUEUE, job, by, signals.requeued, db)

    def run_now(self, job: Job | int, *, by: str = "", db: str | None = None) -> bool:
        """Make a waiting job due now; return whether this call did it."""
        return self._by_hand(RUN_NOW, job, by, None, db, run_at__gt=Now())

    def _by_hand(self, move: Move, job: Job | int, by: str, signal: Any, db: str | None, **also: Any) -> bool:
        alias = self.alias(db)
        pk = intake.row_id(job)
        facts = Value(json.dumps(intake.by_whom(by), cls=StrictEncoder))
        sources = [status.value for status in move.sources]
        candidates = self.using(alias).filter(pk=pk, status__in=sources, **also)
        moved = patiently(
            f"Job {pk}",
            lambda: sql.move(candidates, sql.assignments(move, facts=facts)),
            candidates.exists,
        )
        if not moved:
            return False
        if move.target is Status.READY:
            hints.due(alias, {moved[0].queue})
        if signal is not None:
            signals.send(signal, job=moved[0], by=by)
        return True

    # --- questions -------------------------------------------------------------------------------

    def get_job(self, id: int, *, db: str | None = None) -> Job | None:
        """Return the job, or ``None``; archived jobs are not looked for."""
        found: Job | None = self.using(self.alias(db)).filter(pk=intake.row_id(id)).first()
        return found

    def pending_count(self, *, queue: str = "default", db: str | None = None) -> int:
        """Count the ready jobs of ``queue``, future ones included."""
        intake.queues((queue,))
        waiting: JobQuerySet = self.using(self.alias(db)).filter(CLAIMABLE["ready"], queue=queue)
        return waiting.count()

    def _each(self, rows: Sequence[Any], write: Callable[[Sequence[Any]], list[Job]]) -> list[Job]:
        """Write ``rows`` together, or one by one when one of them makes the statement fail."""
        try:
            return write(rows) if rows else []
        except DatabaseError as error:
            if faults.is_outage(error):
                raise
            if len(rows) == 1:
                logger.exception("Job %s could not be changed; it is passed over.", rows[0][0])
                return []
            return [job for row in rows for job in self._each([row], write)]


def patiently(row: str, act: Callable[[], Sequence[T]], there: Callable[[], bool]) -> Sequence[T]:
    """Return what ``act`` returns, called again while it comes back empty and the row is ``there``: somebody
    holds it. Raises ``JobError`` after ``LOCKED_PATIENCE``.
    """
    give_up = time.monotonic() + LOCKED_PATIENCE
    while not (done := act()) and there():
        if time.monotonic() >= give_up:
            raise JobError(
                f"{row} could not be changed for {LOCKED_PATIENCE:g} s: an open transaction holds its row. "
                "Find that in pg_stat_activity, and try again."
            )
        time.sleep(0.02)
    return done
