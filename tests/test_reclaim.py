"""The reaper: what dead workers held comes back, from the row alone; what nobody serves is failed by name."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

from django_forgejobs import reaper, reclaim, signals
from django_forgejobs.managers import RECLAIM_ROWS
from django_forgejobs.models import AnnouncedType, Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import COMPLETE
from tests.factories import in_seconds, make_job
from tests.sessions import before, beside, gate, in_threads, refusing, session

pytestmark = pytest.mark.django_db(transaction=True)


def expired(**fields: Any) -> Job:
    return make_job(status="running", lease=-1, **fields)


def columns(job: Job) -> dict[str, Any]:
    return Job.objects.values().get(pk=job.pk)


# --- Dead workers --------------------------------------------------------------------------------


def test_a_dead_workers_job_is_ready_again_and_keeps_its_attempt() -> None:
    job = expired(locked_by="web-1:7:abc", claims=3)
    assert reclaim() == 1
    row = Job.objects.get()
    assert (row.status, row.attempts, row.lease_expirations) == ("ready", 0, 1)
    assert (row.run_at, row.claims) == (job.run_at, 3)
    assert row.last_error == (
        "Its worker died: the lease of claim 3, held by web-1:7:abc, ran out (expiration 1 of 3)."
    )
    assert row.history[-1]["event"] == "reclaim"
    assert row.history[-1]["worker"] == "web-1:7:abc"


def test_a_job_of_one_attempt_survives_two_deaths_and_is_dead_after_the_third() -> None:
    make_job(max_attempts=1)
    statuses = []
    for _ in range(3):
        Job.objects.claim(worker="mortal")
        Job.objects.update(locked_until=in_seconds(-1))
        reclaim()
        statuses.append(Job.objects.get().status)
    row = Job.objects.get()
    assert statuses == ["ready", "ready", "dead"]
    assert row.last_error.startswith("Its worker died")
    assert row.finished_at is not None
    assert reclaim() == 0


def test_only_the_lease_decides_not_how_long_a_job_has_been_running() -> None:
    make_job(status="running", started_at=in_seconds(-91 * 86400), lease=1)
    assert reclaim() == 0


def test_the_row_alone_decides_whoever_is_or_was_announced() -> None:
    """There is no table of workers whose rows could vanish; and a new start never adopts old leases."""
    expired(locked_by="web-1:7:abc")
    AnnouncedType.objects.all().delete()
    assert Job.objects.held_by("web-1:7:def") == []
    assert reclaim() == 1


def test_a_backlog_of_many_batches_is_reclaimed_at_once() -> None:
    jobs = Job.objects.bulk_create(
        Job(type="t", status="running", attempts=1, claim_token=token, locked_until=in_seconds(-1))
        for token in _tokens(2 * RECLAIM_ROWS + 50)
    )
    assert reclaim() == len(jobs)
    assert set(Job.objects.values_list("status", "lease_expirations")) == {("ready", 1)}


def _tokens(count: int) -> list[str]:
    return [f"{n:032x}" for n in range(1, count + 1)]


def test_each_reclaimed_job_is_told_and_each_dead_one_as_dead_too() -> None:
    told: list[tuple[str, int]] = []
    receivers: dict[Any, Callable[..., None]] = {}
    for name in ("reclaimed", "dead"):

        def receive(*, job: Job, error: str, name: str = name, **_: Any) -> None:
            told.append((name, job.pk))
            assert error.startswith("Its worker died")

        receivers[getattr(signals, name)] = receive
        getattr(signals, name).connect(receive)
    try:
        again, over = expired(), expired(lease_expirations=2)
        reclaim()
    finally:
        for signal, receive in receivers.items():
            signal.disconnect(receive)
    assert told == [("reclaimed", again.pk), ("reclaimed", over.pk), ("dead", over.pk)]


# --- What happens between the reaper's look and its write ----------------------------------------


def renewed(job: Job) -> None:
    assert job.claim_token is not None
    assert Job.objects.renew({job.pk: job.claim_token})


def finished(job: Job) -> None:
    assert Job.objects.finish([Outcome(job, COMPLETE)]).accepted


def claimed_again(job: Job) -> None:
    assert Job.objects.reclaim()
    assert Job.objects.claim(worker="successor")


def claimed_again_and_expired(job: Job) -> None:
    """Its token is another one: whoever holds it now has lost nothing that the reaper saw."""
    claimed_again(job)
    Job.objects.filter(pk=job.pk).update(locked_until=in_seconds(-1))


GAP = [renewed, finished, claimed_again, claimed_again_and_expired]


@pytest.mark.parametrize("meanwhile", GAP)
def test_a_job_that_changed_between_the_look_and_the_write_stays_as_it_is(
    meanwhile: Callable[[Job], None],
) -> None:
    job = expired()
    rows: list[dict[str, Any]] = []

    def act() -> None:
        meanwhile(job)
        rows.append(columns(job))

    with before("UPDATE forgejobs_job", act):
        moved, _ = Job.objects.reclaim_batch()
    assert moved == []
    assert columns(job) == rows[0]


@pytest.mark.postgres_only
@pytest.mark.parametrize("meanwhile", GAP)
def test_a_job_that_changed_while_the_write_was_under_way_stays_as_it_is(
    meanwhile: Callable[[Job], None],
) -> None:
    job = expired()
    with (
        session("reaper", application_name="late"),
        gate("late") as closed,
        beside(lambda: Job.objects.reclaim_batch(db="reaper")[0]) as reaping,
    ):
        closed.wait()
        meanwhile(job)
        row = columns(job)
        closed.open()
        assert reaping.result(timeout=10) == []
    assert columns(job) == row


# --- Many reapers, and rows that resist ----------------------------------------------------------


def test_two_reapers_count_each_expiration_once() -> None:
    for _ in range(60):
        expired()
    counts = in_threads(4, lambda _: reclaim())
    assert sum(counts) == 60
    assert set(Job.objects.values_list("status", "lease_expirations")) == {("ready", 1)}


@pytest.mark.postgres_only
def test_a_row_in_somebodys_open_transaction_holds_up_no_other_and_comes_later() -> None:
    held, free = expired(), expired()
    with session() as other, transaction.atomic(using="other"), other.cursor() as cursor:
        cursor.execute("SELECT 1 FROM forgejobs_job WHERE id = %s FOR UPDATE", [held.pk])
        assert [job.pk for job in Job.objects.reclaim()] == [free.pk]
    assert [job.pk for job in Job.objects.reclaim()] == [held.pk]


def test_a_row_that_the_database_refuses_spoils_no_other(caplog: pytest.LogCaptureFixture) -> None:
    jobs = [expired() for _ in range(RECLAIM_ROWS + 5)]
    with refusing(jobs[2].pk):
        assert reclaim() == len(jobs) - 1
    assert list(Job.objects.filter(status="running")) == [jobs[2]]
    assert f"Job {jobs[2].pk} could not be changed" in caplog.text
    assert reclaim() == 1


def test_a_reaper_that_is_told_to_stop_ends_between_two_batches() -> None:
    for _ in range(RECLAIM_ROWS + 1):
        expired()
    looks = iter([False, True])
    assert len(Job.objects.reclaim(stop=lambda: next(looks))) == RECLAIM_ROWS
    assert reclaim() == 1


@pytest.mark.postgres_only
def test_a_bad_row_in_the_callers_transaction_leaves_that_transaction_usable() -> None:
    bad, good = expired(), expired()
    with refusing(bad.pk), transaction.atomic():
        assert [job.pk for job in Job.objects.reclaim()] == [good.pk]
        make_job()
    assert Job.objects.count() == 3


# --- Types that nobody serves --------------------------------------------------------------------

GRACE = 900


def announced(*types: str, since: float = -10_000, seen: float = 0) -> None:
    for type_ in types:
        AnnouncedType.objects.create(type=type_, since=in_seconds(since), seen_at=in_seconds(seen))


def old(type_: str, **fields: Any) -> Job:
    return make_job(type=type_, **{"run_at": in_seconds(-GRACE - 1), **fields})


def test_a_type_that_nobody_announces_is_failed_by_name_and_its_jobs_can_be_requeued() -> None:
    announced("served")
    job, served = old("renamed.long.ago"), old("served")
    assert reaper.tick("default").unserved == 1
    row = Job.objects.get(pk=job.pk)
    assert (row.status, row.attempts) == ("failed", 0)
    assert '"renamed.long.ago"' in row.last_error
    assert "requeue" in row.last_error
    assert row.history[-1]["event"] == "fail"
    assert Job.objects.get(pk=served.pk).status == "ready"
    assert Job.objects.requeue(job)


@pytest.mark.parametrize(
    "fields",
    [
        {"run_at": in_seconds(-GRACE + 60)},
        {"run_at": in_seconds(3600)},
        {"status": "running", "lease": 60},
        {"status": "done"},
    ],
    ids=["due for less than the grace", "future", "running", "done"],
)
def test_it_leaves_alone_what_is_not_due_for_as_long(fields: dict[str, Any]) -> None:
    announced("served")
    job = old("unknown", **fields)
    row = columns(job)
    assert reaper.sweep("default") == 0
    assert columns(job) == row


@pytest.mark.parametrize(
    ("since", "seen"),
    [(-GRACE + 60, 0), (-10_000, -GRACE - 60), (None, None)],
    ids=["workers have just come back", "all workers are down", "there never was a worker"],
)
def test_silence_says_nothing_while_no_worker_has_been_announcing_for_the_grace(
    since: float | None, seen: float | None
) -> None:
    if since is not None and seen is not None:
        announced("served", since=since, seen=seen)
    old("unknown")
    assert reaper.sweep("default") == 0


def test_a_type_that_somebody_announced_within_the_grace_is_waited_for() -> None:
    announced("served")
    announced("other.pool", seen=-GRACE + 60)
    job = old("other.pool")
    assert reaper.sweep("default") == 0
    AnnouncedType.objects.filter(type="other.pool").update(seen_at=in_seconds(-GRACE - 60))
    assert reaper.sweep("default") == 1
    assert Job.objects.get(pk=job.pk).status == "failed"


def test_announcing_again_after_a_silence_begins_anew() -> None:
    announced("a", since=-10_000, seen=-GRACE - 60)
    announced("b", since=-10_000, seen=-60)
    AnnouncedType.objects.announce(["a", "b", "c"], grace=GRACE, db="default")
    old("unknown")
    since = dict(AnnouncedType.objects.values_list("type", "since"))
    assert since["b"] < since["a"]
    assert AnnouncedType.objects.unserved(["unknown"], grace=GRACE, db="default") == ["unknown"]
    AnnouncedType.objects.filter(type="b").delete()
    assert AnnouncedType.objects.unserved(["unknown"], grace=GRACE, db="default") == []


def test_many_unserved_jobs_are_failed_in_batches_and_a_bad_row_spoils_no_other() -> None:
    announced("served")
    jobs = Job.objects.bulk_create(
        Job(type="unknown", run_at=in_seconds(-GRACE - 60)) for _ in range(RECLAIM_ROWS + 20)
    )
    bad = Job.objects.order_by("pk")[3]
    with refusing(bad.pk, "NEW.status = 'failed'"):
        assert reaper.sweep("default") == len(jobs) - 1
    assert list(Job.objects.filter(status="ready")) == [bad]


def test_workers_that_announce_at_once_do_not_disturb_each_other() -> None:
    types = [f"t{n}" for n in range(20)]
    for round_ in range(3):

        def announce(index: int, round_: int = round_) -> None:
            mine = types if (index + round_) % 2 else types[::-1]
            AnnouncedType.objects.announce(mine, grace=GRACE, db="default")

        in_threads(6, announce)
    assert sorted(AnnouncedType.objects.values_list("type", flat=True)) == sorted(types)


def test_a_reaper_asks_for_little_when_there_is_nothing_to_do() -> None:
    from tests.sessions import statements

    make_job()
    assert len(statements(lambda: reaper.tick("default"))) <= 4


@pytest.mark.postgres_only
def test_the_look_for_expired_leases_reads_the_running_rows_alone() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO forgejobs_job (type, status, finished_at) "
            "SELECT 't', 'done', now() FROM generate_series(1, 20000)"
        )
        cursor.execute("ANALYZE forgejobs_job")
    plan = Job.objects.expired().order_by("pk").explain(analyze=True, buffers=True)
    assert "forgejobs_job_running" in plan
    assert "Seq Scan" not in plan
