"""Why a job is where it is: each reason where it holds, and only there, by the predicate of the claim."""

from typing import Any

import pytest
from django.db.models.functions import Now

from django_forgejobs import drain, enqueue, explain, lanes
from django_forgejobs.models import AnnouncedType, ArchivedJob, Job
from django_forgejobs.predicates import CLAIMABLE
from django_forgejobs.states import Status
from tests.factories import in_seconds, make_job

pytestmark = pytest.mark.django_db


@pytest.fixture
def served() -> None:
    """Have a worker announce the types that these tests use."""
    AnnouncedType.objects.announce(["t", "other"], grace=900, db="default")


def codes(job: Any) -> list[str]:
    return [reason.code for reason in explain(job)]


def say(job: Any) -> str:
    return " ".join(map(str, explain(job)))


@pytest.mark.usefixtures("served")
def test_a_job_alone_in_its_queue_is_next() -> None:
    assert codes(enqueue("t")) == ["next"]


@pytest.mark.usefixtures("served")
def test_a_job_is_behind_those_that_the_claim_takes_first() -> None:
    jobs = [enqueue("t") for _ in range(3)]
    urgent = enqueue("t", priority=5)
    enqueue("t", queue="elsewhere", priority=9)
    enqueue("t", available_in=60, priority=9)
    assert codes(urgent) == ["next"]
    assert "Behind 1 due job of queue 'default'" in say(jobs[0])
    assert "Behind 3 due jobs of queue 'default'" in say(jobs[2])
    order = [job.pk for job in Job.objects.claim(4, worker="w", queues=["default"])]
    assert order == [urgent, *jobs]


@pytest.mark.usefixtures("served")
def test_a_job_in_the_future_says_when_it_is_due() -> None:
    assert codes(enqueue("t", available_in=3700)) == ["scheduled"]
    assert "It is due in 61 min (" in say(enqueue("t", available_in=3700))


@pytest.mark.usefixtures("served")
def test_a_retry_says_what_failed_and_when_the_next_attempt_is() -> None:
    job = make_job(
        type="t", attempts=1, max_attempts=3, run_at=in_seconds(600), last_error="OSError: no route"
    )
    assert codes(job) == ["retrying"]
    assert "Attempt 1 of 3 failed (OSError: no route)" in say(job)


def test_without_any_worker_that_is_the_first_reason() -> None:
    assert codes(enqueue("t"))[0] == "no-worker"
    assert "manage.py runworker" in say(enqueue("t"))


@pytest.mark.usefixtures("served")
def test_a_type_that_no_running_worker_serves_is_named() -> None:
    job = enqueue("typo")
    assert codes(job)[0] == "unserved"
    assert 'No running worker serves type "typo", so far.' in say(job)


@pytest.mark.usefixtures("served")
def test_a_job_that_has_killed_a_worker_says_that_it_runs_alone() -> None:
    job = make_job(type="t", lease_expirations=2)
    assert codes(job) == ["suspect", "next"]
    assert "2 workers their lives" in say(job)
    assert "At 3 it is dead" in say(job)


def test_a_running_job_says_who_runs_it_and_until_when() -> None:
    job = make_job(type="t", status="running", locked_by="web:1:abc")
    assert codes(job) == ["running"]
    assert "Worker web:1:abc runs it" in say(job)


def test_a_lease_that_ran_out_is_told_by_the_predicate_of_the_reaper() -> None:
    job = make_job(type="t", status="running", locked_until=in_seconds(-5), started_at=Now())
    assert codes(job)[0] == ("expired" if Job.objects.expired().filter(pk=job.pk) else "server-started")


@pytest.mark.parametrize("status", [s.value for s in Status if s not in (Status.READY, Status.RUNNING)])
def test_an_ended_job_says_how_and_what_to_do(status: str) -> None:
    job = make_job(type="t", status=status, last_error="" if status == "done" else "OSError: no route")
    (reason,) = explain(job)
    assert reason.code == status
    assert reason.remedy
    assert str(reason).startswith(reason.text)
    assert ("OSError: no route." in str(reason)) == (status in ("failed", "dead"))


def test_an_archived_job_and_an_unknown_one_are_told_apart() -> None:
    ArchivedJob.objects.create(id=7, type="t", status="done")
    assert codes(7) == ["archived"]
    assert codes(8) == ["unknown"]


@pytest.mark.usefixtures("served")
def test_the_claim_takes_a_job_exactly_when_no_condition_of_its_stands_against_it() -> None:
    jobs = [
        make_job(type="t"),
        make_job(type="t", run_at=in_seconds(60)),
        make_job(type="t", status="running"),
        make_job(type="t", status="dead"),
    ]
    against = {"scheduled", "running", "dead"}
    claimable = {job.pk for job in jobs if not against & set(codes(job))}
    assert {job.pk for job in Job.objects.claim(9, worker="w")} == claimable == {jobs[0].pk}


@pytest.mark.usefixtures("served")
def test_a_changed_condition_of_the_claim_is_seen_by_both(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    job = enqueue("t")
    monkeypatch.setitem(CLAIMABLE, "due", ~CLAIMABLE["due"])  # type: ignore[arg-type]
    lanes._claim.cache_clear()
    request.addfinalizer(lanes._claim.cache_clear)
    assert codes(job) == ["scheduled"]
    assert drain({"t": lambda payload: None}) == 0
