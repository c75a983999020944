"""What a dead worker held is taken back at once, and each job by what is known of it."""

import dataclasses
from typing import Any

import pytest
from django.db import transaction

import tests.jobsapp.jobs  # noqa: F401 (registers the types)
from django_forgejobs import signals
from django_forgejobs.managers import RECLAIM_ROWS
from django_forgejobs.models import Job, Tally
from django_forgejobs.settlement import OUTAGES_FORGIVEN
from django_forgejobs.takeover import Death, take_back
from tests.factories import make_job
from tests.sessions import in_threads, session

pytestmark = pytest.mark.django_db(transaction=True)

DEAD = "web:7:0badcafe"


def held(type: str = "t.ok", **fields: Any) -> Job:
    return make_job(status="running", type=type, locked_by=DEAD, **fields)


def death(*begun: Job, over: tuple[Job, ...] = (), overdue: tuple[Job, ...] = (), **fields: Any) -> Death:
    def ids(jobs: tuple[Job, ...]) -> frozenset[int]:
        return frozenset(job.pk for job in jobs)

    return Death(DEAD, "process 7 was killed by SIGKILL", ids(begun), ids(over), ids(overdue), **fields)


def row(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def test_what_was_running_is_reclaimed_and_what_had_not_begun_is_as_if_nothing_had_been() -> None:
    running, waiting = held(attempts=2, max_attempts=3), held(attempts=2, max_attempts=3, claims=5)
    assert [job.pk for job in take_back(death(running), "default")] == [running.pk]
    now = row(running)
    assert (now.status, now.attempts, now.lease_expirations, now.run_at) == ("ready", 1, 1, running.run_at)
    assert now.last_error == "Its worker died: process 7 was killed by SIGKILL (expiration 1 of 3)."
    assert [entry["event"] for entry in now.history] == ["reclaim"]
    now = row(waiting)
    assert (now.status, now.attempts, now.lease_expirations, now.claims) == ("ready", 1, 0, 5)
    assert (now.run_at, now.history, now.last_error) == (waiting.run_at, [], "")


def test_a_job_that_has_killed_as_often_as_it_may_is_dead_and_told(capture: list[str]) -> None:
    killer = held(lease_expirations=2)
    assert [job.status for job in take_back(death(killer), "default")] == ["dead"]
    assert capture == ["reclaimed", "dead"]
    assert Tally.objects.get(event="lease_expired").count == 1


@pytest.fixture
def capture() -> Any:
    told: list[str] = []

    def reclaimed(**_: Any) -> None:
        told.append("reclaimed")

    def dead(**_: Any) -> None:
        told.append("dead")

    signals.reclaimed.connect(reclaimed)
    signals.dead.connect(dead)
    yield told
    signals.reclaimed.disconnect(reclaimed)
    signals.dead.disconnect(dead)


def test_where_it_is_not_known_what_had_begun_all_of_it_is_suspect() -> None:
    held(), held()
    unknown = dataclasses.replace(death(), begun=None)
    assert len(take_back(unknown, "default")) == 2
    assert set(Job.objects.values_list("status", "lease_expirations")) == {("ready", 1)}


def test_the_overdue_job_has_failed_and_what_ran_beside_it_is_released_uncharged() -> None:
    late, beside, waiting = held("t.gil", attempts=1, max_attempts=2), held(), held()
    assert take_back(death(late, beside, overdue=(late,)), "default") == []
    now = row(late)
    assert (now.status, now.attempts, now.lease_expirations) == ("ready", 1, 0)
    assert now.last_error.startswith("Timeout: the handler was still running 10.2 s after its start")
    assert now.last_error.endswith("Its process 7 was killed by SIGKILL.")
    assert [entry["event"] for entry in now.history] == ["retry"]
    now = row(beside)
    assert (now.status, now.attempts, now.history[-1]["event"]) == ("ready", 0, "release")
    assert (row(waiting).attempts, row(waiting).history) == (0, [])


def test_a_job_is_not_to_blame_for_a_worker_that_somebody_else_killed() -> None:
    running = held()
    assert take_back(death(running, blameless=True), "default") == []
    now = row(running)
    assert (now.status, now.attempts, now.lease_expirations) == ("ready", 0, 0)
    assert now.history[-1]["reason"] == "process 7 was killed by SIGKILL"


def test_a_job_that_had_run_but_was_not_written_says_so_and_is_charged_in_the_end() -> None:
    job = held()
    take_back(death(over=(job,)), "default")
    now = row(job)
    assert (now.status, now.attempts, now.lease_expirations) == ("ready", 0, 0)
    assert now.history[-1]["reason"] == (
        "it had run, but process 7 was killed by SIGKILL before its end was written"
    )
    for _time in range(OUTAGES_FORGIVEN):
        Job.objects.filter(pk=job.pk).update(run_at=job.run_at)
        Job.objects.claim(worker=DEAD)
        take_back(death(over=(job,)), "default")
    assert row(job).status == "dead"
    assert "it had run, but process 7" in row(job).last_error


def test_what_another_worker_holds_by_now_and_what_has_ended_is_left_alone() -> None:
    others = [make_job(status="running", locked_by="web:8:0"), make_job(status="done", locked_by=DEAD)]
    before = list(Job.objects.order_by("pk").values())
    assert take_back(death(*others), "default") == []
    assert list(Job.objects.order_by("pk").values()) == before


@pytest.mark.postgres_only
def test_a_row_that_somebody_holds_is_left_to_the_next_call() -> None:
    """The statement of the dead worker itself, say, that its server process has not ended yet."""
    running, waiting = held(), held()
    with session("other"), transaction.atomic(using="other"):
        list(Job.objects.using("other").select_for_update().all())
        assert take_back(death(running), "default") == []
        assert set(Job.objects.values_list("status", flat=True)) == {"running"}
    assert len(take_back(death(running), "default")) == 1
    assert (row(running).lease_expirations, row(waiting).lease_expirations) == (1, 0)


def test_two_who_take_back_at_once_move_each_job_once() -> None:
    for _number in range(20):
        held()
    everything = dataclasses.replace(death(), begun=None)
    in_threads(4, lambda _: take_back(everything, "default"))
    assert set(Job.objects.values_list("status", "lease_expirations")) == {("ready", 1)}


def test_more_than_one_statement_of_them_is_taken_back_too() -> None:
    jobs = [held() for _number in range(RECLAIM_ROWS + 5)]
    assert len(take_back(death(*jobs), "default")) == RECLAIM_ROWS + 5
