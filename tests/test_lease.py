"""Leases: renewed by the database's clock, in one statement, by a thread of their own; how loss is told."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import time_machine
from django.db import OperationalError, ProgrammingError, connection, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from django_forgejobs import JobError, cancel, heartbeat
from django_forgejobs.context import JobContext
from django_forgejobs.lease import LeaseKeeper
from django_forgejobs.models import Job
from tests.factories import in_seconds, make_job
from tests.sessions import beside, connections_of, gate, session, statements
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def running(**fields: Any) -> Job:
    return make_job(status="running", **fields)


def claims(*jobs: Job) -> dict[int, uuid.UUID]:
    return {job.pk: job.claim_token for job in jobs if job.claim_token}


def left(job: Job) -> timedelta:
    """Return how long the lease still runs, by the database's clock."""
    row = Job.objects.annotate(now=Now()).get(pk=job.pk)
    assert row.locked_until is not None
    remaining: timedelta = row.locked_until - row.now
    return remaining


# --- Renewal -------------------------------------------------------------------------------------


def test_all_leases_of_a_worker_are_renewed_by_one_statement() -> None:
    jobs = [running(lease=5) for _ in range(30)]
    sent = statements(lambda: Job.objects.renew(claims(*jobs), lease=500))
    assert len(sent) == 1
    assert all(timedelta(seconds=490) < left(job) <= timedelta(seconds=500) for job in jobs)


def test_a_renewal_answers_which_claims_are_current_and_touches_no_other() -> None:
    mine, cancelled, others = running(lease=5), running(lease=5), running(lease=5)
    cancel(cancelled)
    held = claims(mine, cancelled) | {others.pk: uuid.uuid4()}
    assert Job.objects.renew(held) == {mine.claim_token}
    assert left(others) < timedelta(seconds=6)
    assert Job.objects.get(pk=cancelled.pk).locked_until is None


def test_a_lease_that_has_run_out_is_renewed_while_nobody_has_taken_the_claim() -> None:
    job = running(lease=-100)
    assert Job.objects.renew(claims(job)) == {job.claim_token}
    assert Job.objects.reclaim() == []


def test_a_reclaimed_claim_is_not_renewed() -> None:
    job = running(lease=-1)
    Job.objects.reclaim()
    assert Job.objects.renew(claims(job)) == set()


@pytest.mark.postgres_only
def test_a_row_in_somebodys_open_transaction_is_neither_waited_for_nor_taken_for_lost() -> None:
    held, free = running(lease=5), running(lease=5)
    with session() as other, transaction.atomic(using="other"), other.cursor() as cursor:
        cursor.execute("SELECT 1 FROM forgejobs_job WHERE id = %s FOR UPDATE", [held.pk])
        assert Job.objects.renew(claims(held, free), lease=500) == {held.claim_token, free.claim_token}
        assert left(held) < timedelta(seconds=6)
        assert left(free) > timedelta(seconds=400)
    Job.objects.renew(claims(held, free), lease=500)
    assert left(held) > timedelta(seconds=400)


@pytest.mark.postgres_only
def test_a_claim_lost_while_its_renewal_is_under_way_is_not_renewed() -> None:
    job = running(lease=-1)
    with (
        session("keeper", application_name="late"),
        gate("late") as closed,
        beside(lambda: Job.objects.renew(claims(job), db="keeper")) as renewal,
    ):
        closed.wait()
        assert Job.objects.reclaim()
        closed.open()
        assert renewal.result(timeout=10) == set()


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_host_clock_that_is_off_changes_no_lease(minutes: int) -> None:
    job = running(lease=5)
    make_job()
    with time_machine.travel(datetime.now(UTC) + timedelta(minutes=minutes)):
        Job.objects.renew(claims(job), lease=500)
        assert Job.objects.reclaim() == []
        (claimed,) = Job.objects.claim(worker="ahead")
    assert timedelta(seconds=490) < left(job) <= timedelta(seconds=500)
    assert left(claimed) <= timedelta(seconds=900)


# --- heartbeat(claim_token) outside a worker -----------------------------------------------------


def test_a_heartbeat_extends_the_lease_and_says_whether_the_claim_is_current() -> None:
    job = running(lease=5)
    assert job.claim_token is not None
    assert heartbeat(job.claim_token) is True
    assert heartbeat(str(job.claim_token)) is True
    assert left(job) > timedelta(seconds=800)
    cancel(job)
    assert heartbeat(job.claim_token) is False
    assert heartbeat(uuid.uuid4()) is False


@pytest.mark.parametrize("token", ["", "no token", None, 7])
def test_what_is_no_token_is_refused_with_the_remedy(token: Any) -> None:
    with pytest.raises(JobError, match="parameter of that name"):
        heartbeat(token)


# --- The lease thread ----------------------------------------------------------------------------


@contextmanager
def keeper(lease: float = 900, beat: float = 0.05) -> Iterator[LeaseKeeper]:
    with LeaseKeeper(db="default", lease=lease, heartbeat=beat) as kept:
        yield kept


def held_by(kept: LeaseKeeper, job: Job) -> JobContext:
    context = JobContext(job, lease=kept.lease, renew=kept.ask)
    kept.add(context)
    return context


def lease_connections(
    before: Callable[[str], object] | None = None,
) -> AbstractContextManager[list[BaseDatabaseWrapper]]:
    return connections_of("forgejobs-lease", before)


def test_the_lease_thread_renews_until_the_end_is_written_and_no_longer() -> None:
    ended, goes_on = running(lease=5), running(lease=5)

    def shorten() -> None:
        Job.objects.update(locked_until=in_seconds(5))

    def is_renewed(job: Job) -> bool:
        return left(job) > timedelta(seconds=800)

    with keeper() as kept:
        context, _ = held_by(kept, ended), held_by(kept, goes_on)
        wait_for(lambda: is_renewed(ended) and is_renewed(goes_on), message="no lease was renewed")
        kept.remove(context)
        for _ in range(2):  # the first round may have begun before
            shorten()
            wait_for(lambda: is_renewed(goes_on), message="the other lease was not renewed")
    assert not is_renewed(ended)


def test_the_lease_thread_leaves_no_connection_behind() -> None:
    with lease_connections() as opened, keeper() as kept:
        held_by(kept, running())
        wait_for(lambda: opened)
    assert [each.connection for each in opened] == [None]


@pytest.mark.parametrize("how", ["cancelled", "reclaimed", "deleted"])
def test_a_lost_claim_is_told_to_its_handler_and_to_the_log(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    lost, kept_job = running(), running()
    with keeper() as kept:
        context, other = held_by(kept, lost), held_by(kept, kept_job)
        told: list[bool] = []
        context.on_stop = lambda: told.append(True)
        if how == "cancelled":
            cancel(lost)
        elif how == "deleted":
            lost.delete()
        else:
            with transaction.atomic():  # so that no renewal comes between
                Job.objects.filter(pk=lost.pk).update(locked_until=in_seconds(-1))
                assert Job.objects.reclaim()
        wait_for(lambda: context.lease_lost, message="the handler was not told")
    assert told
    assert context.should_stop
    assert not context.heartbeat()
    assert not other.lease_lost
    assert [r.levelname for r in caplog.records if "is gone" in r.getMessage()] == ["WARNING"]


def test_a_handlers_heartbeat_is_answered_by_the_lease_thread_never_by_its_own_connection() -> None:
    job = running()
    with keeper(beat=300) as kept:
        context = held_by(kept, job)
        for expected in (True, False):
            context.renewed_at -= 60
            answers: list[bool] = []
            assert statements(lambda: answers.append(heartbeat(context.claim_token))) == []  # noqa: B023
            assert answers == [expected]
            cancel(job)


@pytest.mark.postgres_only
def test_a_heartbeat_in_a_transaction_sees_what_others_have_committed_since() -> None:
    job = running()
    with session(isolation_level=3) as other, keeper(beat=300) as kept:
        context = held_by(kept, job)
        context.renewed_at -= 60
        with transaction.atomic(using="other"):
            assert Job.objects.using("other").get().status == "running"
            cancel(job)
            assert Job.objects.using("other").get().status == "running"  # its snapshot is older
            assert heartbeat(context.claim_token, db="other") is False
            assert not other.needs_rollback


def test_a_handler_that_asks_all_the_time_costs_one_renewal_a_second() -> None:
    sent: list[str] = []
    with lease_connections(sent.append), keeper(beat=300) as kept:
        context = held_by(kept, running())
        context.renewed_at -= 60
        assert all(context.heartbeat() for _ in range(1000))
    assert len([sql for sql in sent if "UPDATE" in sql]) == 1


def test_while_the_database_is_away_nothing_is_taken_for_lost_and_no_jobs_are_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = threading.Event()

    def cut(sql: str) -> None:
        if away.is_set():
            raise OperationalError("could not connect to server")

    job = running()
    with lease_connections(cut), keeper(lease=0.3) as kept:
        context = held_by(kept, job)
        wait_for(lambda: context.heartbeat() and kept.healthy)
        away.set()
        wait_for(lambda: not kept.healthy, message="the outage was not noticed")
        assert not context.revoked
        # Longer than the lease: only then may the handler think that somebody else has the job.
        wait_for(lambda: context.lease_lost, message="the lease never ran out")
        assert not context.revoked
        away.clear()
        wait_for(lambda: kept.healthy and not context.lease_lost, message="it did not recover")
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert "Leases cannot be renewed" in messages
    assert "Leases are renewed again" in messages


def test_a_lease_thread_that_dies_says_so_and_calls_for_the_workers_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def bug(sql: str) -> None:
        raise ProgrammingError("column does not exist")

    called: list[bool] = []
    with lease_connections(bug), keeper() as kept:
        kept.on_failure = lambda: called.append(True)
        held_by(kept, running())
        wait_for(lambda: called)
        assert isinstance(kept.failed, ProgrammingError)
        assert not kept.healthy
    assert [r.levelname for r in caplog.records if "lease thread died" in r.getMessage()] == ["CRITICAL"]


@pytest.mark.postgres_only
def test_a_cut_lease_connection_is_opened_again_before_the_lease_runs_out() -> None:
    with lease_connections() as opened, keeper(lease=60) as kept:
        context = held_by(kept, running())
        wait_for(lambda: opened)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [opened[0].connection.info.backend_pid])
        wait_for(lambda: len(opened) > 1 and kept.healthy, message="it did not come back")
        assert not context.lease_lost
