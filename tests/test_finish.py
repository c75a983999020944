"""The finish: fenced by the token, sorted into accepted, lost and waiting, and one row spoils no other."""

from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from django_forgejobs import signals
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import BURY, COMPLETE, FAIL, GIVE_BACK, RELEASE, RETRY, SNOOZE, Move
from tests.factories import in_seconds, make_job
from tests.sessions import answer_lost, before, beside, gate, refusing, session, statements

pytestmark = pytest.mark.django_db(transaction=True)

ENDS = [COMPLETE, RETRY, BURY, FAIL, RELEASE, GIVE_BACK, SNOOZE]
every_end = pytest.mark.parametrize("move", ENDS, ids=lambda move: move.name)


def running(**fields: Any) -> Job:
    return make_job(status="running", max_attempts=9, **fields)


def end(job: Job, move: Move = COMPLETE, **facts: Any) -> Outcome:
    delay = 60.0 if move in (RETRY, RELEASE, SNOOZE) else None
    error = "ValueError: no" if move in (RETRY, BURY, FAIL) else None
    return Outcome(job, move, delay=delay, error=error, **facts)


def columns(job: Job) -> dict[str, Any]:
    return Job.objects.values().get(pk=job.pk)


def expire(job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(locked_until=in_seconds(-1))


# --- The fence -----------------------------------------------------------------------------------


@every_end
def test_a_reclaimed_job_cannot_be_finished_by_its_old_owner(move: Move) -> None:
    job = running()
    expire(job)
    Job.objects.reclaim()
    row = columns(job)
    settlement = Job.objects.finish([end(job, move)])
    assert settlement.lost == [end(job, move)]
    assert columns(job) == row


@every_end
def test_a_job_that_a_successor_runs_cannot_be_finished_by_its_old_owner(move: Move) -> None:
    job = running()
    expire(job)
    Job.objects.reclaim()
    (mine,) = Job.objects.claim(worker=job.locked_by)  # even if the successor has the same name
    row = columns(job)
    assert Job.objects.finish([end(job, move)]).lost == [end(job, move)]
    assert columns(job) == row
    assert Job.objects.finish([end(mine, move)]).accepted == [end(mine, move)]


@every_end
def test_a_job_that_a_successor_has_finished_stays_as_it_is(move: Move) -> None:
    job = running()
    expire(job)
    Job.objects.reclaim()
    (mine,) = Job.objects.claim(worker="successor")
    Job.objects.finish([end(mine, move)])
    row = columns(job)
    assert Job.objects.finish([end(job, move)]).lost == [end(job, move)]
    assert columns(job) == row


def test_a_job_buried_by_the_reaper_is_not_taken_for_buried_by_its_owner() -> None:
    job = running(lease_expirations=2)
    expire(job)
    Job.objects.reclaim()
    row = columns(job)
    assert row["status"] == "dead"
    assert Job.objects.finish([end(job, BURY)]).lost == [end(job, BURY)]
    assert columns(job) == row


def test_a_cancelled_job_refuses_the_end_of_the_handler_that_ran_on() -> None:
    job = running()
    Job.objects.cancel(job)
    assert Job.objects.finish([end(job, result='"done"')]).lost
    assert Job.objects.get().status == "cancelled"


def test_a_late_finish_is_accepted_while_nobody_has_taken_the_claim() -> None:
    job = running(lease=-3600)
    assert Job.objects.finish([end(job)]).accepted
    assert Job.objects.get().status == "done"


def test_a_deleted_job_is_lost_and_spoils_no_other() -> None:
    gone, here = running(), running()
    Job.objects.filter(pk=gone.pk).delete()
    settlement = Job.objects.finish([end(gone), end(here)])
    assert (settlement.lost, settlement.accepted) == ([end(gone)], [end(here)])


def test_each_loss_is_told_by_a_signal_that_names_the_move() -> None:
    told: list[tuple[int, str]] = []

    def receive(*, job: Job, attempted: str, **_: Any) -> None:
        told.append((job.pk, attempted))

    signals.lost.connect(receive)
    try:
        job = running()
        Job.objects.cancel(job)
        Job.objects.finish([end(job)])
    finally:
        signals.lost.disconnect(receive)
    assert told == [(job.pk, "complete")]


# --- The answer that never came ------------------------------------------------------------------


@every_end
def test_an_end_whose_answer_was_lost_is_recognised_as_written(move: Move) -> None:
    job = running()
    with answer_lost("UPDATE forgejobs_job"):
        first = Job.objects.finish([end(job, move)])
    assert isinstance(first.outage, OperationalError)
    assert first.waiting == [end(job, move)]
    row = columns(job)
    second = Job.objects.finish(first.waiting)
    assert (second.accepted, second.lost) == ([end(job, move)], [])
    assert columns(job) == row


@pytest.mark.parametrize("move", [RETRY, RELEASE, SNOOZE], ids=lambda move: move.name)
def test_it_is_recognised_also_when_somebody_has_claimed_the_job_since(move: Move) -> None:
    job = running()
    with answer_lost("UPDATE forgejobs_job"):
        Job.objects.finish([end(job, move)])
    Job.objects.run_now(job)
    (claimed,) = Job.objects.claim(worker="successor")
    assert Job.objects.finish([end(job, move)]).accepted == [end(job, move)]
    assert columns(job)["claim_token"] == claimed.claim_token


def test_an_outage_in_the_middle_leaves_the_rest_of_the_batch_waiting() -> None:
    jobs = [running() for _ in range(3)]
    outcomes = [end(jobs[0], COMPLETE), end(jobs[1], RETRY), end(jobs[2], SNOOZE)]

    def cut() -> None:
        raise OperationalError("server closed the connection unexpectedly")

    with before("'retry'", cut):
        settlement = Job.objects.finish(outcomes)
    assert settlement.accepted == outcomes[:1]
    assert settlement.waiting == outcomes[1:]
    assert Job.objects.finish(settlement.waiting).accepted == outcomes[1:]


# --- One row spoils no other ---------------------------------------------------------------------


@every_end
def test_a_row_that_the_database_refuses_spoils_no_other(move: Move) -> None:
    jobs = [running() for _ in range(5)]
    with refusing(jobs[2].pk):
        settlement = Job.objects.finish([end(job, move) for job in jobs])
    assert [outcome.job.pk for outcome in settlement.lost] == [jobs[2].pk]
    assert len(settlement.accepted) == 4
    assert list(Job.objects.filter(status="running")) == [jobs[2]]


def test_a_result_that_the_database_refuses_fails_its_job_and_no_other() -> None:
    jobs = [running() for _ in range(3)]
    with refusing(jobs[1].pk, "NEW.result IS NOT NULL"):
        Job.objects.finish([end(job, result='{"n": 1}') for job in jobs])
    rows = Job.objects.order_by("pk").values_list("status", "result")
    assert list(rows) == [("done", {"n": 1}), ("failed", None), ("done", {"n": 1})]
    assert "result could not be stored" in Job.objects.get(pk=jobs[1].pk).last_error


@pytest.mark.postgres_only
def test_a_row_in_somebodys_open_transaction_waits_and_holds_up_no_other() -> None:
    held, free = running(), running()
    with session() as other, transaction.atomic(using="other"), other.cursor() as cursor:
        cursor.execute("SELECT 1 FROM forgejobs_job WHERE id = %s FOR UPDATE", [held.pk])
        settlement = Job.objects.finish([end(held), end(free)])
        assert (settlement.waiting, settlement.accepted) == ([end(held)], [end(free)])
        assert (settlement.lost, settlement.outage) == ([], None)
    assert Job.objects.finish(settlement.waiting).accepted == [end(held)]


@pytest.mark.postgres_only
def test_a_job_reclaimed_while_the_finish_is_under_way_is_lost() -> None:
    """The finish has its snapshot, in which the claim is current; the reaper is quicker to the row."""
    job = running(lease=-1)
    with (
        session("finisher", application_name="late"),
        gate("late") as closed,
        beside(lambda: Job.objects.finish([end(job)], db="finisher")) as finish,
    ):
        closed.wait()
        assert Job.objects.reclaim()
        closed.open()
        assert finish.result(timeout=10).lost == [end(job)]
    assert Job.objects.get().status == "ready"


# --- Together with a claim -----------------------------------------------------------------------


def finish_and_claim(*outcomes: Outcome, limit: int = 5) -> Any:
    return Job.objects.finish_and_claim(list(outcomes), limit, worker="w")


def ids(jobs: Any) -> list[int]:
    return [job.pk for job in jobs]


def test_a_finish_and_a_claim_are_one_commit() -> None:
    job, following = running(), make_job()
    sent = statements(lambda: finish_and_claim(end(job)))
    if connection.vendor == "postgresql":
        assert len(sent) == 1
    else:
        assert [sent.index("BEGIN IMMEDIATE"), sent.count("BEGIN IMMEDIATE")] == [0, 1]
    assert (columns(job)["status"], columns(following)["status"]) == ("done", "running")


def test_together_too_each_row_is_fenced_and_what_did_not_end_well_is_written() -> None:
    mine, retried, reclaimed = running(), running(), running()
    following = [make_job() for _ in range(7)]
    expire(reclaimed)
    Job.objects.reclaim()
    Job.objects.filter(pk=reclaimed.pk).update(run_at=in_seconds(60))
    row = columns(reclaimed)
    settlement, jobs = finish_and_claim(end(mine), end(retried, RETRY), end(reclaimed))
    assert sorted(ids(o.job for o in settlement.accepted)) == [mine.pk, retried.pk]
    assert ids(o.job for o in settlement.lost) == [reclaimed.pk]
    assert columns(reclaimed) == row
    assert ids(jobs) == ids(following[:5])
    assert columns(retried)["status"] == "ready"


def test_an_end_that_the_database_refuses_spoils_no_other_and_claims_nothing_by_halves() -> None:
    good, bad, following = running(), running(), make_job()
    with refusing(bad.pk):
        settlement, jobs = finish_and_claim(end(good), end(bad))
        assert ids(o.job for o in settlement.accepted) == [good.pk]
        assert ids(o.job for o in settlement.lost) == [bad.pk]
        assert jobs == []
        assert columns(following)["status"] == "ready"
    assert ids(finish_and_claim()[1]) == [following.pk]


def test_an_answer_that_is_lost_leaves_the_ends_waiting_and_the_claim_in_doubt() -> None:
    job, following = running(), make_job()
    with answer_lost("UPDATE"):
        settlement, jobs = finish_and_claim(end(job))
    assert (settlement.waiting, jobs) == ([end(job)], None)
    connection.close()
    again, more = finish_and_claim(end(job))
    assert again.accepted == [end(job)]
    assert columns(job)["status"] == "done"
    found = ids(Job.objects.held_by("w")) + ids(more)
    assert following.pk in found
