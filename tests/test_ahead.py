"""What a worker claims ahead: as much as will start at once, in order, and not to keep."""

import threading
from collections import Counter
from typing import Any

import pytest
from django.db import connection

from django_forgejobs import crew, enqueue, enqueue_many, pace, registry
from django_forgejobs.board import Board
from django_forgejobs.context import JobContext
from django_forgejobs.models import Job
from django_forgejobs.pace import Pace
from django_forgejobs.threads import JobThreads, Running
from tests.factories import make_job
from tests.test_worker import Gate, all_are, at_work
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def nothing(payload: Any) -> None:
    pass


def warmed_up(limit: int = 300) -> None:
    """Enqueue jobs so quick that the worker begins to claim ahead."""
    enqueue_many({"type": "quick", "priority": 50} for _ in range(limit))


# --- How many ------------------------------------------------------------------------------------


def test_as_many_are_claimed_ahead_as_have_ended_within_the_last_tenth_of_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    measured = Pace()
    assert measured.ahead() == 0
    measured.ended(7)
    now += 0.06
    measured.ended(5)
    assert measured.ahead() == 12
    now += 0.06
    assert measured.ahead() == 5
    now += 0.06
    assert measured.ahead() == 0
    measured.ended(10**6)
    assert measured.ahead() == pace.AT_MOST


def test_payloads_bound_what_is_claimed_ahead_but_never_what_can_start() -> None:
    big = "x" * (60_000 if connection.vendor == "postgresql" else 1_000_000)
    with connection.cursor() as at:
        if connection.vendor == "postgresql":  # stored as they are, and taken for compressed all the same
            at.execute("ALTER TABLE forgejobs_job ALTER payload SET STORAGE EXTERNAL")
    try:
        enqueue_many({"type": "t", "payload": big} for _ in range(20))
        claimed = Job.objects.claim(20, worker="w", ahead=18)
        assert 2 < len(claimed) < 10
        assert len(Job.objects.claim(20, worker="w", ahead=0)) == 20 - len(claimed)
    finally:
        with connection.cursor() as at:
            if connection.vendor == "postgresql":
                at.execute("ALTER TABLE forgejobs_job ALTER payload SET STORAGE EXTENDED")


# --- In order ------------------------------------------------------------------------------------


def test_what_is_more_urgent_overtakes_what_waits_in_the_worker() -> None:
    gate, order = Gate(), []
    threads = JobThreads("default", Board(), 1)

    def running(handler: Any, priority: int) -> Running:
        job = make_job(status="running", priority=priority)
        definition = registry.definitions({"t": handler})["t"]
        return Running(job, definition, JobContext(job, lease=900, renew=lambda _: True))

    def note(payload: Any, context: JobContext) -> None:
        order.append(Job.objects.get(pk=context.job_id).priority)

    threads.hand_out([running(gate, 0)])
    wait_for(lambda: gate.inside)
    threads.hand_out([running(note, 5), running(note, 0)])
    threads.hand_out([running(note, 9), running(note, 0)])
    assert threads.waiting == 4
    gate.out.set()
    wait_for(lambda: len(order) == 4)
    assert order == [9, 5, 0, 0]
    threads.dismiss(wait=True)


def _unless_late(context: JobContext, pause: threading.Event) -> None:
    pause.wait(0.08)
    assert not context.late


# --- Not to keep ---------------------------------------------------------------------------------


def test_what_cannot_start_is_given_back_uncounted_and_others_run_it() -> None:
    warmed_up()
    gate = Gate()
    stuck = enqueue("long", priority=40, max_attempts=1)
    behind = [enqueue("quick", max_attempts=1) for _ in range(50)]
    with at_work({"quick": nothing, "long": gate}):
        wait_for(lambda: gate.inside == [stuck])
        waiting = Job.objects.filter(pk__in=behind)
        wait_for(
            lambda: not waiting.exclude(status="ready").exists(),
            message="a worker keeps what it cannot start",
        )
        assert waiting.filter(claims__gt=0).exists(), "nothing was claimed ahead: this test shows nothing"
        assert not waiting.exclude(attempts=0, history=[]).exists()
        with at_work({"quick": nothing}):
            wait_for(lambda: not waiting.exclude(status="done").exists())
        gate.out.set()
        wait_for(lambda: all_are("done"))


def test_a_stop_on_a_full_queue_gives_back_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "PATIENCE", 60.0)  # at once, not because it would not start soon
    ran: Counter[int] = Counter()
    begun, out = threading.Event(), threading.Event()

    def quick(payload: Any, context: JobContext) -> None:
        ran[context.job_id] += 1
        if len(ran) == 500:
            begun.set()
            assert out.wait(20)

    enqueue_many({"type": "quick", "max_attempts": 1} for _ in range(2_000))
    given_back = Job.objects.filter(status="ready", claims__gt=0)
    with at_work({"quick": quick}) as work:
        assert begun.wait(20)
        work.worker.request_stop()
        wait_for(given_back.exists, message="a worker that stops keeps what has not begun")
        out.set()
        work.wait()
    assert Counter(Job.objects.values_list("status", flat=True)) == {"done": 500, "ready": 1500}
    assert not given_back.exclude(attempts=0, history=[]).exists()
    assert set(ran.values()) == {1}


def test_a_bounded_worker_runs_exactly_its_number_also_of_what_it_claims_ahead() -> None:
    warmed_up(1000)
    ran: list[Any] = []
    with at_work({"quick": ran.append}, max_jobs=700) as work:
        work.wait()
    assert len(ran) == 700
    assert Job.objects.filter(status="done").count() == 700
    assert not Job.objects.filter(status="running").exists()


def test_the_time_of_a_job_runs_from_its_start_not_from_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four jobs wait for one thread; together they take longer than each of them may."""
    monkeypatch.setitem(registry._definitions, "slow", registry.define("slow", nothing, timeout=0.3))
    monkeypatch.setattr(crew, "PATIENCE", 60.0)  # nothing is given back
    warmed_up()
    pause = threading.Event()
    for _ in range(8):
        enqueue("slow")
    with at_work({"quick": nothing, "slow": lambda payload, context: _unless_late(context, pause)}):
        wait_for(lambda: all_are("done") or Job.objects.filter(status="dead").exists())
    assert all_are("done")


def test_more_than_will_start_soon_is_given_back_although_something_starts_now_and_then() -> None:
    """After many quick jobs come some of a tenth of a second each: hundreds of them wait in the worker."""
    warmed_up(1000)
    pause = threading.Event()
    for _ in range(300):
        enqueue("slow")
    slow = Job.objects.filter(type="slow")
    with at_work({"quick": nothing, "slow": lambda payload: pause.wait(0.1)}):
        wait_for(lambda: slow.filter(status="done").exists())
        wait_for(
            lambda: slow.filter(status="running").count() < 20,
            message=lambda: f"{slow.filter(status='running').count()} jobs wait in one worker",
        )
        assert slow.filter(status="ready", claims__gt=0).exists(), "nothing was claimed ahead"
        urgent = enqueue("quick", priority=100)
        wait_for(lambda: Job.objects.get(pk=urgent).status == "done", timeout=5)


def test_a_job_whose_claim_is_gone_before_it_began_does_not_begin() -> None:
    ran: list[int] = []
    threads = JobThreads("default", Board(), 1)
    job = make_job(status="running")
    definition = registry.definitions({"t": lambda payload: ran.append(1)})["t"]
    waiting = [Running(job, definition, JobContext(job, lease=900, renew=lambda _: True)) for _ in range(2)]
    waiting[0].context.revoke()
    threads.hand_out(waiting)
    ended: list[Any] = []

    def both() -> bool:
        ended.extend(threads.collect(0.05))
        return len(ended) == 2

    wait_for(both)
    threads.dismiss(wait=True)
    assert ran == [1]
    assert [outcome.move.name for _, outcome in ended] == ["give_back", "complete"]


def test_a_bounded_worker_runs_its_number_also_when_what_it_claimed_ahead_takes_long() -> None:
    warmed_up(600)
    pause = threading.Event()
    for _ in range(30):
        enqueue("slow")
    handlers = {"quick": nothing, "slow": lambda payload: pause.wait(0.05)}
    with at_work(handlers, max_jobs=620) as work:
        work.wait(30)
    assert Job.objects.filter(status="done").count() == 620
