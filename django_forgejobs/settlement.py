"""Write how a batch of claims ended: one bad or locked row spoils no other; what is in doubt is looked up."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.db import Error as DatabaseError

from django_forgejobs import faults, lanes, signals, sql
from django_forgejobs.fields import entries
from django_forgejobs.outcomes import Outcome, Settlement
from django_forgejobs.payloads import StrictEncoder
from django_forgejobs.states import BURY, COMPLETE, FAIL, RELEASE, RETRY, SNOOZE, Move

if TYPE_CHECKING:
    from django_forgejobs.models import Job

logger = logging.getLogger("django_forgejobs")

#: An outage may release a job this often in a row before it is charged as an attempt.
OUTAGES_FORGIVEN = 10


def settle(outcomes: Sequence[Outcome], db: str) -> Settlement:
    """Write ``outcomes``, a statement for each move among them; return what became of each."""
    settlement = Settlement()
    groups: dict[Move, list[Outcome]] = defaultdict(list)
    try:
        for outcome in _forgiven(outcomes, db):
            groups[outcome.move].append(outcome)
    except DatabaseError as error:
        if not faults.is_outage(error) and not faults.is_again(error):
            raise
        return Settlement(waiting=list(outcomes), outage=error)
    for move in list(groups):
        _finish_group(move, groups[move], db, settlement)
    return settlement


def settle_and_claim(
    outcomes: Sequence[Outcome], claim: sql.Statement, db: str
) -> tuple[Settlement, list[Job] | None]:
    """Write ``outcomes`` and execute ``claim``; return what became of each, and the jobs claimed, or None
    when an outage ate the answer.

    Jobs that are simply done, nearly all, share one transaction with the claim. If it fails for something
    that stands in one of them, they are written apart, and nothing is claimed.
    """
    done = [outcome for outcome in outcomes if outcome.move is COMPLETE]
    settlement = settle([outcome for outcome in outcomes if outcome.move is not COMPLETE], db)
    if settlement.outage is not None:
        settlement.waiting += done
        return settlement, []
    try:
        if done:
            ended = sql.finishing(db, COMPLETE, [_row(outcome) for outcome in done])
            moved, jobs = sql.both(db, ended, claim)
        else:
            moved, jobs = [], sql.run(db, claim)
    except DatabaseError as error:
        if faults.is_outage(error) or faults.is_again(error):
            settlement.outage = error
            settlement.waiting += done
            return settlement, None if faults.is_outage(error) else []
        if not done:
            raise
        _finish_group(COMPLETE, done, db, settlement)
        return settlement, []
    _sort(COMPLETE, done, set(moved), db, settlement)
    return settlement, lanes.in_claim_order(jobs)


def _finish_group(move: Move, group: Sequence[Outcome], db: str, settlement: Settlement) -> None:
    if not group:
        return
    if settlement.outage is not None:
        settlement.waiting += group
        return
    try:
        moved = sql.finish(db, move, [_row(outcome) for outcome in group])
    except DatabaseError as error:
        if faults.is_outage(error) or faults.is_again(error):
            settlement.outage = error
            settlement.waiting += group
        elif len(group) > 1:
            for outcome in group:
                _finish_group(move, [outcome], db, settlement)
        elif group[0].result is not None:
            _finish_group(FAIL, [group[0].unstorable(error)], db, settlement)
        else:
            logger.exception("The end of %s could not be written; its lease will run out.", group[0].job)
            settlement.lost.append(group[0])
    else:
        _sort(move, group, moved, db, settlement)


def _sort(move: Move, group: Sequence[Outcome], moved: set[int], db: str, settlement: Settlement) -> None:
    """Add ``group`` to ``settlement``, of which the UPDATE has moved the ids in ``moved``."""
    missing = [outcome for outcome in group if outcome.job.id not in moved]
    try:
        lost, waiting = _missed(move, missing, db) if missing else (set(), set())
    except DatabaseError as error:
        if not faults.is_outage(error) and not faults.is_again(error):
            raise
        settlement.outage = error
        lost, waiting = set(), {outcome.job.id for outcome in missing}
    accepted = []
    for outcome in group:
        if outcome.job.id in lost:
            settlement.lost.append(outcome)
            signals.send(signals.lost, job=outcome.job, attempted=move.name)
        elif outcome.job.id in waiting:
            settlement.waiting.append(outcome)
        else:
            accepted.append(outcome)
    settlement.accepted += accepted
    if move is COMPLETE and accepted:
        signals.send(signals.done_together, outcomes=accepted)
    for outcome in accepted if move is not COMPLETE or signals.done.receivers else ():
        _tell(outcome)


def _missed(move: Move, missing: Sequence[Outcome], db: str) -> tuple[set[int], set[int]]:
    """Sort rows that the UPDATE did not change into (lost, locked by somebody).

    In neither: what an earlier try wrote although its answer never arrived.
    """
    now = sql.jobs(db).in_bulk([outcome.job.id for outcome in missing])
    lost, waiting = set(), set()
    for outcome in missing:
        row = now.get(outcome.job.id)
        if row is not None and row.claim_token == outcome.job.claim_token:
            waiting.add(outcome.job.id)
        elif row is None or not _bears(row, move, outcome.job.claims):
            lost.add(outcome.job.id)
    return lost, waiting


def _forgiven(outcomes: Sequence[Outcome], db: str) -> list[Outcome]:
    """Replace a release by its charge where outages have released the job too often in a row."""
    doubtful = [outcome.job.id for outcome in outcomes if outcome.charged is not None]
    if not doubtful:
        return list(outcomes)
    histories = dict(sql.jobs(db).filter(pk__in=doubtful).values_list("pk", "history"))
    return [
        outcome.charged
        if outcome.charged is not None and _outages(histories.get(outcome.job.id, ())) >= OUTAGES_FORGIVEN
        else outcome
        for outcome in outcomes
    ]


def _row(outcome: Outcome) -> dict[str, Any]:
    # Not job.pk: a property of Django's that costs as much as all the rest of this, ten times a job.
    row: dict[str, Any] = {"id": outcome.job.id, "claim_token": outcome.job.claim_token}
    if outcome.delay is not None:
        row["delay"] = outcome.delay
    if outcome.error is not None:
        row["error"] = outcome.error
    if outcome.facts:
        row["facts"] = json.dumps(outcome.facts, cls=StrictEncoder)
    if outcome.result is not None:
        row["result"] = outcome.result
    return row


def _bears(row: Job, move: Move, claim: int) -> bool:
    """Whether ``row`` shows that the claim numbered ``claim`` ended by ``move``, and not by the reaper or by
    hand, which may leave the same status.
    """
    events = [entry.get("event") for entry in entries(row.history) if entry.get("claim") == claim]
    if move.recorded:
        return move.name in events
    return row.claims == claim and row.status == move.target and not events


def _tell(outcome: Outcome) -> None:
    job, error, exception = outcome.job, outcome.error, outcome.exception
    if outcome.move is COMPLETE:
        signals.send(signals.done, job=job, seconds=outcome.seconds)
    elif outcome.move is RETRY:
        signals.send(signals.retried, job=job, error=error, delay=outcome.delay, exception=exception)
    elif outcome.move in (BURY, FAIL):
        signal = signals.dead if outcome.move is BURY else signals.failed
        signals.send(signal, job=job, error=error, exception=exception)
    elif outcome.move is SNOOZE:
        signals.send(signals.snoozed, job=job, delay=outcome.delay)
    elif outcome.move is RELEASE:
        signals.send(signals.released, job=job, reason=outcome.facts.get("reason", ""))


def _outages(history: Any) -> int:
    """Count the entries at the end of ``history`` that an outage wrote."""
    count = 0
    for entry in reversed(entries(history)):
        if not entry.get("outage"):
            break
        count += 1
    return count
