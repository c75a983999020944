"""The worker in this process: its loop in a thread, its handlers in threads of theirs, a real database."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, ProgrammingError, connection

from django_forgejobs import (
    Snooze,
    between,
    cancel,
    drain,
    enqueue,
    enqueue_many,
    executor,
    registry,
    requeue,
    run_worker,
    signals,
)
from django_forgejobs import worker as worker_module
from django_forgejobs.context import JobContext
from django_forgejobs.models import AnnouncedType, Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import COMPLETE
from django_forgejobs.worker import Ended, Worker, identity
from tests.factories import make_job
from tests.sessions import connections_of, isolation, session
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

LOOP = "worker-loop"


class AtWork:
    """A worker whose loop runs in a thread."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.ended: Ended | BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=LOOP)

    def _run(self) -> None:
        try:
            self.ended = self.worker.run()
        except BaseException as error:
            self.ended = error
        finally:
            between.close_all()

    def wait(self, timeout: float = 15) -> Ended | BaseException | None:
        """Wait for the end of the loop and return how it ended."""
        self.thread.join(timeout)
        assert not self.thread.is_alive(), "the worker did not come to an end"
        return self.ended


@contextmanager
def at_work(handlers: dict[str, Callable[..., Any]] | None = None, **options: Any) -> Iterator[AtWork]:
    """Run a worker beside the block; at its end the worker is stopped, and must have ended well."""
    worker = Worker(db="default", handlers=handlers, **{"poll_interval": 0.02, **options})
    work = AtWork(worker)
    work.thread.start()
    try:
        yield work
    finally:
        worker.request_stop()
        work.thread.join(10)
        if work.thread.is_alive():
            worker.request_stop()
        work.wait()
    assert not isinstance(work.ended, BaseException), work.ended


def statuses() -> list[str]:
    return list(Job.objects.order_by("pk").values_list("status", flat=True))


def all_are(status: str) -> bool:
    return set(statuses()) == {status}


class Gate:
    """A handler that stays inside until it is let out, and says who is in."""

    def __init__(self) -> None:
        self.inside: list[int] = []
        self.most = 0
        self.order: list[int] = []
        self.out = threading.Event()
        self.contexts: list[JobContext] = []
        self._lock = threading.Lock()

    def __call__(self, payload: Any, context: JobContext) -> None:
        with self._lock:
            self.inside.append(context.job_id)
            self.order.append(context.job_id)
            self.contexts.append(context)
            self.most = max(self.most, len(self.inside))
        try:
            assert self.out.wait(20)
        finally:
            with self._lock:
                self.inside.remove(context.job_id)


class Weather:
    """Decides before each statement of the loop whether the database is there."""

    def __init__(self, words: str = "") -> None:
        self.words = words
        self.bad = threading.Event()
        self.cuts = 0

    def __call__(self, sql: str) -> None:
        if self.bad.is_set() and self.words in sql:
            self.cuts += 1
            raise OperationalError("server closed the connection unexpectedly")


def nothing(payload: Any) -> None:
    """Do nothing."""


# --- Slots and order -----------------------------------------------------------------------------


def test_it_runs_as_many_jobs_as_it_has_slots_and_claims_no_more_than_it_can_start() -> None:
    enqueue_many({"type": "t"} for _ in range(7))
    gate = Gate()
    with at_work({"t": gate}, concurrency=3) as work:
        wait_for(lambda: len(gate.inside) == 3, message="three slots, but not three jobs at once")
        assert statuses().count("running") == 3
        gate.out.set()
        wait_for(lambda: all_are("done"))
        assert gate.most == 3
        assert work.worker.claimed == 7


def test_jobs_start_by_priority_and_ties_in_the_order_they_came() -> None:
    pks = [make_job(type="t", priority=priority).pk for priority in (0, 5, -5, 5, 0)]
    seen: list[int] = []
    with at_work({"t": lambda payload, context: seen.append(context.job_id)}):
        wait_for(lambda: all_are("done"))
    assert seen == [pks[1], pks[3], pks[0], pks[4], pks[2]]


def test_a_worker_serves_its_queues_and_leaves_the_others() -> None:
    for queue in ("a", "b", "c"):
        enqueue("t", queue=queue)
    with at_work({"t": nothing}, queues=("a", "c")):
        wait_for(lambda: statuses() == ["done", "ready", "done"])


def test_a_worker_with_explicit_handlers_fails_a_type_that_it_does_not_know_at_once() -> None:
    enqueue("unheard.of")
    with at_work({"t": nothing}):
        wait_for(lambda: statuses() == ["failed"])
    assert '"unheard.of"' in Job.objects.get().last_error


def test_a_worker_with_the_registry_leaves_unknown_types_and_announces_its_own() -> None:
    enqueue("unheard.of")
    with at_work() as work:
        wait_for(lambda: AnnouncedType.objects.exists() or not work.worker.types)
        assert set(AnnouncedType.objects.values_list("type", flat=True)) == set(work.worker.types or ())
    assert statuses() == ["ready"]


# --- What it costs to be idle --------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 20])
def test_an_idle_worker_asks_at_most_once_a_poll_interval_whatever_its_concurrency(
    concurrency: int,
) -> None:
    asked: list[tuple[float, str]] = []

    def note(sql: str) -> None:
        asked.append((time.monotonic(), sql))

    def is_claim(sql: str) -> bool:
        return "lane" in sql and "UPDATE" in sql

    def claims() -> list[str]:
        return [sql for _, sql in asked if is_claim(sql)]

    with (
        connections_of("worker", before=note),
        connections_of("forgejobs", before=note),
        at_work({"t": nothing}, concurrency=concurrency, poll_interval=0.2),
    ):
        wait_for(claims)  # its start is over: reclaim, sweep, first claim
        asked.clear()
        wait_for(lambda: len(claims()) >= 7)
        seen = list(asked)  # before the worker is told to stop: until it hears of it, it asks again
    assert [sql for _, sql in seen if not is_claim(sql)] == []
    # An interval begins with the decision to ask; when the statement follows is up to the machine. So seven
    # of them have five whole intervals between them, and some of a sixth.
    assert seen[6][0] - seen[0][0] >= 5 * 0.2


def test_connections_are_bounded_by_the_slots_plus_two_and_none_is_left() -> None:
    enqueue_many({"type": "t"} for _ in range(60))

    def look(payload: Any) -> None:
        list(Job.objects.all()[:1])

    with connections_of("") as opened:
        with at_work({"t": look}, concurrency=5) as work:
            wait_for(lambda: all_are("done"))
            live = {id(each) for each in opened if each.connection is not None}
            assert len(live) <= 5 + 2
            work.worker.request_stop()
            work.wait()
        left = [each for each in opened if each.connection is not None and each is not connection]
    assert left == []


def test_an_idle_worker_holds_one_connection_and_its_listener_one() -> None:
    connection.ensure_connection()  # this thread's own is not counted
    with connections_of("") as opened, at_work({"t": nothing}, concurrency=8):
        wait_for(lambda: opened)
        enqueue("t")
        wait_for(lambda: all_are("done"))
        assert len([each for each in opened if each.connection is not None]) <= 2


# --- Stop ----------------------------------------------------------------------------------------


def test_stop_is_looked_at_between_two_jobs_on_a_full_queue() -> None:
    enqueue_many({"type": "t"} for _ in range(50))
    done: list[int] = []
    run_worker({"t": lambda payload: done.append(1)}, stop=lambda: len(done) >= 3, poll_interval=0.01)
    assert len(done) == 3
    assert drain({"t": lambda payload: done.append(1)}, stop=lambda: len(done) >= 5) == 2
    assert statuses().count("ready") == 45


def test_a_stop_lets_what_runs_come_to_its_end_and_claims_nothing_more() -> None:
    enqueue_many({"type": "t"} for _ in range(5))
    gate = Gate()
    with at_work({"t": gate}, concurrency=2) as work:
        wait_for(lambda: len(gate.inside) == 2)
        work.worker.request_stop()
        wait_for(lambda: all(context.should_stop for context in gate.contexts), message="nobody was told")
        gate.out.set()
        assert work.wait() is Ended.CLEAN
    assert Counter(statuses()) == {"done": 2, "ready": 3}


def test_leases_are_renewed_until_the_last_result_is_written(settings: Any) -> None:
    settings.FORGEJOBS = {"LEASE": 0.6, "HEARTBEAT": 0.1}
    enqueue("t")
    gate = Gate()
    with at_work({"t": gate}) as work:
        wait_for(lambda: gate.inside)
        work.worker.request_stop()
        end = time.monotonic() + 1.5
        wait_for(lambda: Job.objects.reclaim() or time.monotonic() > end)
        assert statuses() == ["running"]
        gate.out.set()
        assert work.wait() is Ended.CLEAN
    row = Job.objects.get()
    assert (row.status, row.claims, row.lease_expirations) == ("done", 1, 0)


@pytest.mark.parametrize("how", ["second signal", "grace over"])
def test_what_cannot_end_is_given_back_at_once_and_keeps_its_attempt(how: str) -> None:
    enqueue_many({"type": "t"} for _ in range(2))
    gate = Gate()
    try:
        with at_work({"t": gate}, concurrency=2, grace=0.2 if how == "grace over" else 60) as work:
            wait_for(lambda: len(gate.inside) == 2)
            work.worker.request_stop()
            if how == "second signal":
                work.worker.request_stop()
            assert work.wait() is Ended.FORCED
            for row in Job.objects.all():
                assert (row.status, row.attempts, row.claim_token) == ("ready", 0, None)
                assert (row.claims, row.lease_expirations) == (1, 0)
                assert row.history[-1]["event"] == "release"
    finally:
        gate.out.set()
    wait_for(lambda: not gate.inside)


def test_a_result_that_is_there_when_the_worker_is_forced_out_is_written_not_thrown_away() -> None:
    quick, slow = enqueue("quick"), enqueue("slow")
    gate = Gate()
    held = threading.Event()

    def refuse(sql: str) -> None:
        if held.is_set() and "'done'" in sql:
            raise OperationalError("the server is restarting")

    try:
        with (
            connections_of(LOOP, before=refuse),
            at_work({"quick": lambda payload: held.set(), "slow": gate}, concurrency=2) as work,
        ):
            wait_for(lambda: gate.inside and held.is_set())
            wait_for(lambda: work.worker._unwritten)
            held.clear()
            work.worker.request_stop()
            work.worker.request_stop()
            assert work.wait() is Ended.FORCED
    finally:
        gate.out.set()
    assert dict(Job.objects.values_list("pk", "status")) == {quick: "done", slow: "ready"}


def test_a_burst_ends_when_nothing_is_due_and_max_jobs_after_so_many() -> None:
    enqueue_many({"type": "t"} for _ in range(10))
    enqueue("t", available_in=3600)
    few = Worker(db="default", handlers={"t": nothing}, concurrency=4, max_jobs=3)
    assert few.run() is Ended.CLEAN
    assert Counter(statuses()) == {"done": 3, "ready": 8}
    rest = Worker(db="default", handlers={"t": nothing}, concurrency=4, burst=True)
    assert rest.run() is Ended.CLEAN
    assert Counter(statuses()) == {"done": 10, "ready": 1}


# --- Suspects ------------------------------------------------------------------------------------


def test_nothing_runs_beside_a_suspect() -> None:
    for number in range(12):
        make_job(type="t", lease_expirations=number % 2)
    inside: list[int] = []
    beside_suspect: list[int] = []
    lock = threading.Lock()

    def handler(payload: Any, context: JobContext) -> None:
        with lock:
            inside.append(context.job_id)
        threading.Event().wait(0.02)
        with lock:
            suspects = set(inside) & suspect_pks
            if suspects and len(inside) > 1:
                beside_suspect.append(context.job_id)
            inside.remove(context.job_id)

    suspect_pks = set(Job.objects.filter(lease_expirations=1).values_list("pk", flat=True))
    with at_work({"t": handler}, concurrency=4):
        wait_for(lambda: all_are("done"))
    assert beside_suspect == []


def test_a_busy_worker_makes_room_for_a_suspect_after_a_while(settings: Any) -> None:
    settings.FORGEJOBS = {"SUSPECT_PATIENCE": 0.2}
    ran = threading.Event()
    begun: list[int] = []

    def endless(payload: Any, context: JobContext) -> None:
        """Leave when a successor has begun, so that the worker is never idle by itself."""
        begun.append(context.job_id)
        last = time.monotonic() + 0.4
        enqueue("endless")
        wait_for(lambda: begun[-1] != context.job_id or ran.is_set() or time.monotonic() > last)

    enqueue("endless")
    handlers: dict[str, Any] = {"endless": endless, "suspect": lambda payload: ran.set()}
    with at_work(handlers, concurrency=2):
        wait_for(lambda: len(begun) > 2)
        suspect = make_job(type="suspect", lease_expirations=1)
        wait_for(ran.is_set, timeout=8, message="the suspect starved on a busy worker")
        Job.objects.filter(type="endless", status="ready").delete()
    assert Job.objects.get(pk=suspect.pk).status == "done"


def test_fresh_jobs_do_not_starve_behind_many_suspects(settings: Any) -> None:
    settings.FORGEJOBS = {"SUSPECT_PATIENCE": 0.2}  # a turn of theirs is a fifth of that
    pause = threading.Event()
    for _ in range(30):
        make_job(type="t", lease_expirations=1, priority=50)
    fresh = {make_job(type="t").pk for _ in range(4)}
    seen: list[int] = []

    def slow(payload: Any, context: JobContext) -> None:
        seen.append(context.job_id)
        pause.wait(0.02)

    with at_work({"t": slow}):
        wait_for(lambda: all_are("done"))
    assert fresh < set(seen[:10])


def test_suspects_follow_each_other_without_waiting_for_a_poll() -> None:
    for _ in range(10):
        make_job(type="t", lease_expirations=1)
    with at_work({"t": nothing}, concurrency=3, poll_interval=30):
        wait_for(lambda: all_are("done"), message="each suspect waits for the next look at the queue")


def test_many_suspects_do_not_wait_for_a_turn_each_beside_a_full_queue(settings: Any) -> None:
    """A killed worker leaves as many as it had claimed ahead."""
    settings.FORGEJOBS = {"SUSPECT_PATIENCE": 1.0}
    suspects = {make_job(type="t", lease_expirations=1).pk for _ in range(30)}
    ran: list[int] = []
    left = set(suspects)

    def endless(payload: Any, context: JobContext) -> None:
        ran.append(context.job_id)
        left.discard(context.job_id)
        if left:
            enqueue("t", priority=9)

    for _ in range(20):
        enqueue("t", priority=9)
    with at_work({"t": endless}):
        wait_for(lambda: not left, timeout=12, message=lambda: f"{len(left)} suspects still wait")


def test_a_job_requeued_while_it_runs_here_costs_no_slot_and_no_clean_end() -> None:
    first, second = Gate(), Gate()
    gates = [first, second]
    job = enqueue("t")
    with at_work({"t": lambda payload, context: gates.pop(0)(payload, context)}, concurrency=2) as work:
        wait_for(lambda: first.inside)
        cancel(job)
        assert requeue(job)
        wait_for(lambda: second.inside, message="the other slot did not take it")
        second.out.set()
        wait_for(lambda: statuses() == ["done"])
        first.out.set()
        wait_for(lambda: work.worker._in_threads.free == 2, message="a slot is lost")
    assert work.ended is Ended.CLEAN
    assert Job.objects.get(pk=job).claims == 2


def test_a_receiver_that_leaves_a_transaction_open_costs_no_end_its_commit() -> None:
    def leave_it_open(**_: Any) -> None:
        connection.set_autocommit(False)

    signals.done.connect(leave_it_open)
    try:
        enqueue_many({"type": "t"} for _ in range(5))
        with at_work({"t": nothing}):
            wait_for(lambda: all_are("done"))
            enqueue("t")
            wait_for(lambda: statuses() == ["done"] * 6)
    finally:
        signals.done.disconnect(leave_it_open)


def test_a_burst_does_not_take_a_race_that_it_lost_for_an_empty_queue() -> None:
    """As when somebody holds the lock of a SQLite file for longer than we try again."""
    enqueue("t")
    refused: list[str] = []

    def locked(sql: str) -> None:
        if len(refused) < 12 and "lane" in sql and "UPDATE" in sql:
            refused.append(sql)
            raise OperationalError("database is locked")

    with connections_of(LOOP, before=locked), at_work({"t": nothing}, burst=True) as work:
        work.wait(30)
    assert len(refused) == 12
    assert all_are("done")


# --- Timeouts ------------------------------------------------------------------------------------


@pytest.fixture
def impatient(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give type `t` a timeout of 0.2 s, and 0.2 s more before its slot is given up."""
    from django_forgejobs import registry

    settings.FORGEJOBS = {"TIMEOUT_MARGIN": 0.2}
    known = dict(registry._definitions)
    registry._definitions["t"] = registry.define("t", nothing, timeout=0.2)
    yield
    registry._definitions.clear()
    registry._definitions.update(known)


@pytest.mark.usefixtures("impatient")
def test_a_handler_is_told_when_its_time_is_over_and_may_end_well() -> None:
    enqueue("t")

    def polite(payload: Any, context: JobContext) -> None:
        wait_for(lambda: context.should_stop)
        raise Snooze(in_=3600)

    with at_work({"t": polite}):
        wait_for(lambda: Job.objects.get().history)
    row = Job.objects.get()
    assert (row.status, row.attempts, row.history[-1]["event"]) == ("ready", 0, "snooze")


@pytest.mark.usefixtures("impatient")
def test_an_async_handler_is_cancelled_when_its_time_is_over() -> None:
    enqueue("t")

    async def sleepy(payload: Any) -> None:
        await asyncio.sleep(60)

    with at_work({"t": sleepy}):
        wait_for(lambda: statuses() == ["dead"])


@pytest.mark.usefixtures("impatient")
def test_a_deaf_handler_costs_its_claim_and_its_slot_and_the_other_slots_work_on() -> None:
    stuck = enqueue("t", priority=9)
    gate = Gate()
    try:
        with at_work({"t": gate, "quick": nothing}, concurrency=2) as work:
            wait_for(lambda: Job.objects.get(pk=stuck).status == "dead", message="it was not given up")
            assert "Timeout" in Job.objects.get(pk=stuck).last_error
            assert gate.inside == [stuck]
            enqueue_many({"type": "quick"} for _ in range(5))
            wait_for(lambda: Job.objects.filter(status="done").count() == 5)
            wait_for(lambda: work.worker._in_threads.free == 1, message="a lost slot is still counted")
            gate.out.set()
            wait_for(lambda: work.worker._in_threads.free == 2, message="its slot did not come back")
    finally:
        gate.out.set()
    assert Job.objects.get(pk=stuck).status == "dead"


@pytest.mark.usefixtures("impatient")
def test_a_worker_without_a_slot_drains_and_ends_as_forced() -> None:
    enqueue_many({"type": "t"} for _ in range(3))
    gate = Gate()
    try:
        with at_work({"t": gate}, concurrency=2) as work:
            assert work.wait() is Ended.FORCED
    finally:
        gate.out.set()
    assert Counter(statuses()) == {"dead": 2, "ready": 1}


# --- Lost leases ---------------------------------------------------------------------------------


def test_a_cancelled_job_is_told_its_result_refused_and_the_worker_goes_on(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.FORGEJOBS = {"LEASE": 30, "HEARTBEAT": 0.05}
    job = enqueue("t")

    def until_told(payload: Any, context: JobContext) -> str:
        wait_for(lambda: context.lease_lost, message="the handler was not told")
        return "a result that nobody may see"

    with at_work({"t": until_told, "next": nothing}):
        wait_for(lambda: statuses() == ["running"])
        assert cancel(job)
        after = enqueue("next")
        wait_for(lambda: Job.objects.get(pk=after).status == "done")
    row = Job.objects.get(pk=job)
    assert (row.status, row.result) == ("cancelled", None)


def test_a_worker_that_cannot_renew_takes_no_new_jobs(settings: Any) -> None:
    settings.FORGEJOBS = {"LEASE": 30, "HEARTBEAT": 0.2}
    enqueue("t")
    weather, gate = Weather(), Gate()
    with (
        connections_of("forgejobs-lease", before=weather),
        at_work({"t": gate, "next": nothing}, concurrency=2) as work,
    ):
        wait_for(lambda: gate.inside)
        weather.bad.set()
        wait_for(lambda: not work.worker._keeper.healthy)
        enqueue("next")
        tries = weather.cuts
        wait_for(lambda: weather.cuts > tries + 2)  # meanwhile ten polls go by
        assert statuses() == ["running", "ready"]
        weather.bad.clear()
        wait_for(lambda: statuses() == ["running", "done"], message="it did not take up its work again")
        gate.out.set()


def test_a_worker_cut_off_for_longer_than_its_lease_writes_nothing_when_it_is_back(settings: Any) -> None:
    """Others can reach the database, and take its job; its handler is told, and so is the log."""
    settings.FORGEJOBS = {"LEASE": 0.6, "HEARTBEAT": 0.1, "RECLAIM_INTERVAL": 0}
    enqueue("t")
    weather = Weather()
    lost = threading.Event()

    def cut_off(payload: Any, context: JobContext) -> str:
        weather.bad.set()
        wait_for(lambda: context.lease_lost, message="the handler was not told that its lease ran out")
        assert context.should_stop
        lost.set()
        return "by the one that was cut off"

    with (
        connections_of(LOOP, before=weather),
        connections_of("forgejobs-lease", before=weather),
        at_work({"t": cut_off}, max_jobs=1) as work,
    ):
        wait_for(lost.is_set)
        wait_for(Job.objects.reclaim)
        (job,) = Job.objects.claim(worker="successor", lease=60)
        row = Job.objects.values().get()
        weather.bad.clear()
        assert work.wait() is Ended.CLEAN
        assert Job.objects.values().get() == row
        assert Job.objects.finish([Outcome(job, COMPLETE)]).accepted


def test_a_worker_whose_lease_thread_has_died_gives_its_jobs_back_and_ends() -> None:
    enqueue("t")
    gate = Gate()

    def bug(sql: str) -> None:
        raise ProgrammingError("column does not exist")

    try:
        with (
            connections_of("forgejobs-lease", before=bug),
            at_work({"t": gate}, grace=0.2) as work,
        ):
            wait_for(lambda: gate.inside)
            gate.contexts[0].renewed_at -= 60
            gate.contexts[0].heartbeat()
            assert work.wait() is Ended.FORCED
    finally:
        gate.out.set()
    row = Job.objects.get()
    assert (row.status, row.attempts) == ("ready", 0)


# --- A database that comes and goes --------------------------------------------------------------


def test_a_result_is_written_when_the_database_is_back_and_the_job_ran_once() -> None:
    enqueue("t")
    runs: list[int] = []
    weather = Weather()

    def handler(payload: Any) -> dict[str, int]:
        runs.append(1)
        weather.bad.set()
        return {"n": 1}

    with connections_of(LOOP, before=weather), at_work({"t": handler}):
        wait_for(lambda: weather.cuts >= 2, message="the loop did not try again")
        weather.bad.clear()
        wait_for(lambda: all_are("done"))
    row = Job.objects.get()
    assert (runs, row.result, row.claims, row.attempts) == ([1], {"n": 1}, 1, 1)


def test_a_result_that_cannot_be_written_yet_keeps_its_lease(settings: Any) -> None:
    settings.FORGEJOBS = {"LEASE": 3, "HEARTBEAT": 0.05}
    enqueue("t")
    weather = Weather("'done'")
    weather.bad.set()
    with connections_of(LOOP, before=weather), at_work({"t": nothing}):
        wait_for(lambda: weather.cuts)
        renewals: set[object] = set()

        def renewed() -> bool:
            renewals.add(Job.objects.get().locked_until)
            return len(renewals) > 4

        wait_for(renewed, timeout=5, message="the lease of an unwritten result was not renewed")
        weather.bad.clear()
        wait_for(lambda: all_are("done"))


@pytest.mark.parametrize("poll_interval", [0.001, 5])
def test_jobs_of_a_claim_in_doubt_are_run_by_their_claimer_and_once(poll_interval: float) -> None:
    enqueue_many({"type": "t"} for _ in range(6))
    seen: list[int] = []
    lost: list[str] = []

    def lose(sql: str) -> None:
        if not lost and "lane" in sql and "UPDATE" in sql:
            lost.append(sql)
            raise OperationalError("server closed the connection unexpectedly")

    def note(payload: Any, context: JobContext) -> None:
        seen.append(context.job_id)

    with (
        connections_of(LOOP, after=lose),
        at_work({"t": note}, concurrency=2, poll_interval=poll_interval),
    ):
        wait_for(lambda: all_are("done"), message=lambda: f"{statuses()} {lost}")
    assert len(lost) == 1
    assert Counter(seen).most_common(1)[0][1] == 1
    assert len(seen) == 6
    assert set(Job.objects.values_list("claims", flat=True)) == {1}


def test_a_claim_that_the_server_commits_late_is_found_by_its_claimer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line is cut while the claim waits for a lock; when the worker looks, nothing is committed yet."""
    monkeypatch.setattr(worker_module, "LATE_COMMITS", (0.5, 1.0))
    enqueue("t")
    lost: list[str] = []
    ran: list[int] = []

    def lose(sql: str) -> None:
        if not lost and "lane" in sql and "UPDATE" in sql:
            lost.append(sql)
            raise OperationalError("server closed the connection unexpectedly")

    def note(payload: Any, context: JobContext) -> None:
        ran.append(context.job_id)

    with connections_of(LOOP, after=lose), at_work({"t": note}) as work:
        wait_for(lambda: len(ran) == 1)
        late = make_job(type="t", status="running", locked_by=work.worker.identity)
        wait_for(lambda: late.pk in ran, message="its claim is nobody's for as long as its lease")


def test_jobs_of_a_claim_in_doubt_are_given_back_unstarted_by_a_worker_that_stops() -> None:
    enqueue_many({"type": "t"} for _ in range(2))
    stop = threading.Event()
    lost: list[str] = []

    def lose(sql: str) -> None:
        if not lost and "lane" in sql and "UPDATE" in sql:
            lost.append(sql)
            stop.set()
            raise OperationalError("server closed the connection unexpectedly")

    with (
        connections_of(LOOP, after=lose),
        at_work({"t": nothing}, concurrency=2, stop=stop.is_set) as work,
    ):
        assert work.wait() is Ended.CLEAN
    for row in Job.objects.all():
        assert (row.status, row.attempts, row.claims) == ("ready", 0, 1)
        assert row.history == []


def test_an_end_in_doubt_is_recognised_and_the_job_is_not_run_again() -> None:
    enqueue_many({"type": "t"} for _ in range(3))
    runs: list[int] = []
    lost: list[str] = []

    def lose(sql: str) -> None:
        if not lost and "'done'" in sql:
            lost.append(sql)
            raise OperationalError("server closed the connection unexpectedly")

    with connections_of(LOOP, after=lose), at_work({"t": lambda payload: runs.append(1)}) as work:
        wait_for(lambda: all_are("done"))
        wait_for(lambda: work.worker.finished == 3)
    assert (len(runs), len(lost)) == (3, 1)
    assert set(Job.objects.values_list("claims", flat=True)) == {1}


def test_a_reaper_that_has_just_reconnected_waits_one_heartbeat(settings: Any) -> None:
    """The workers whose leases ran out during the outage come back too, and must not lose their jobs."""
    settings.FORGEJOBS = {"LEASE": 3, "HEARTBEAT": 1, "RECLAIM_INTERVAL": 0.05}
    weather = Weather()
    reclaimed_at: list[float] = []

    with connections_of(LOOP, before=weather), at_work({"t": nothing}):
        wait_for(lambda: AnnouncedType.objects.exists() or True)
        weather.bad.set()
        wait_for(lambda: weather.cuts >= 2)
        make_job(status="running", lease=-1)
        weather.bad.clear()
        back = time.monotonic()
        wait_for(lambda: Job.objects.filter(lease_expirations=1).exists())
        reclaimed_at.append(time.monotonic() - back)
    assert reclaimed_at[0] >= 0.95


def test_an_outage_is_told_once_a_try_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    weather = Weather()
    caplog.set_level(logging.WARNING, "django_forgejobs")
    with connections_of(LOOP, before=weather), at_work({"t": nothing}):
        weather.bad.set()
        wait_for(lambda: weather.cuts == 4)
        weather.bad.clear()
        wait_for(lambda: "is back after" in caplog.text)
    tries = [r.getMessage() for r in caplog.records if "out of reach" in r.getMessage()]
    assert len(tries) == 4
    assert "try 4" in tries[3]


@pytest.mark.usefixtures("impatient")
def test_a_worker_in_an_outage_still_looks_at_stop_and_at_timeouts() -> None:
    enqueue("t")
    weather, told, stop = Weather(), threading.Event(), threading.Event()

    with connections_of(LOOP, before=weather):

        def polite(payload: Any, context: JobContext) -> None:
            context.on_stop = told.set
            weather.bad.set()
            wait_for(lambda: weather.cuts, message="the loop met no outage")
            work.worker._outage.failures = 10  # the next tries are some ten seconds apart
            seen = weather.cuts
            wait_for(lambda: weather.cuts > seen)
            context.deadline = time.monotonic() + 0.1
            work.worker.wake()
            assert told.wait(15)
            stop.set()

        with at_work({"t": polite}, concurrency=2, stop=stop.is_set) as work:
            assert told.wait(5), "the timeout was not told during the outage"
            wait_for(lambda: work.worker.stopping, timeout=3, message="stop was not looked at")
            weather.bad.clear()
            work.worker._outage.retry_at = 0.0


@pytest.mark.postgres_only
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_two_workers_at_a_strict_isolation_level_run_each_job_once(level: str) -> None:
    enqueue_many({"type": "t"} for _ in range(150))
    seen: list[int] = []

    def note(payload: Any, context: JobContext) -> None:
        seen.append(context.job_id)

    with session("strict", options=isolation(level)):
        workers = [
            AtWork(Worker(db="strict", handlers={"t": note}, concurrency=3, poll_interval=0.02, burst=True))
            for _ in range(2)
        ]
        for each in workers:
            each.thread.start()
        assert [each.wait() for each in workers] == [Ended.CLEAN, Ended.CLEAN]
    assert sorted(seen) == sorted(Job.objects.filter(status="done").values_list("pk", flat=True))
    assert len(seen) == 150


SETTINGS: list[dict[str, Any]] = [
    {"OPTIONS": {"server_side_binding": True}, "DISABLE_SERVER_SIDE_CURSORS": True},
    {"OPTIONS": {"pool": True}},
    {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True},
    {"CONN_MAX_AGE": 60},
]


@pytest.mark.postgres_only
@pytest.mark.parametrize("settings_of_it", SETTINGS, ids=str)
def test_it_works_with_what_django_lets_one_set_for_a_database(settings_of_it: dict[str, Any]) -> None:
    enqueue_many({"type": "t", "payload": {"n": n}} for n in range(20))

    def handler(payload: Any) -> Any:
        assert Job.objects.using("special").exists()
        if payload["n"] % 2:
            raise ValueError("odd")
        return payload

    special: Any
    with session("special", **settings_of_it.get("OPTIONS", {})) as special:
        special.settings_dict |= {name: v for name, v in settings_of_it.items() if name != "OPTIONS"}
        make_job(status="running", lease=-1, type="t", payload={"n": 0}, max_attempts=2)
        worker = Worker(db="special", handlers={"t": handler}, concurrency=2, burst=True)
        assert worker.run() is Ended.CLEAN
        if "pool" in settings_of_it.get("OPTIONS", {}):
            special.close_pool()
    assert Counter(statuses()) == {"done": 11, "dead": 10}


# --- Cut connections -----------------------------------------------------------------------------


def cut(*each: Any) -> None:
    with connection.cursor() as cursor:
        for one in each:
            cursor.execute("SELECT pg_terminate_backend(%s)", [one.connection.info.backend_pid])


@pytest.mark.postgres_only
@pytest.mark.parametrize("whose", [LOOP, "forgejobs-lease", "forgejobs-job"])
@pytest.mark.parametrize("when", ["idle", "running"])
def test_a_cut_connection_is_replaced_and_no_job_is_charged_for_it(
    whose: str, when: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.FORGEJOBS = {"LEASE": 30, "HEARTBEAT": 0.05}
    monkeypatch.setattr(executor, "OUTAGE_DELAY", 0.05)
    gate = Gate()

    def handler(payload: Any, context: JobContext) -> None:
        list(Job.objects.all()[:1])
        gate(payload, context)
        list(Job.objects.all()[:1])

    def run_one(then: Callable[[], object] = lambda: None) -> None:
        gate.out.clear()
        enqueue("t")
        wait_for(lambda: gate.inside)
        then()
        gate.out.set()
        wait_for(lambda: all_are("done"), message=lambda: str(list(Job.objects.values())))

    with connections_of(whose) as opened, at_work({"t": handler}):
        run_one(lambda: wait_for(lambda: opened))
        if when == "running":
            run_one(lambda: cut(opened[-1]))
        else:
            cut(opened[-1])
        run_one(lambda: wait_for(lambda: whose == LOOP or len(opened) > 1))
        assert len(opened) > 1, "it was not opened again"
    for row in Job.objects.all():
        assert (row.attempts, row.lease_expirations) == (1, 0)
        assert {entry["event"] for entry in row.history} <= {"release"}


# --- Names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["web", "", "h" * 255, "büro-süd", "名前"])
def test_each_start_has_a_name_of_its_own_that_fits_and_can_be_read(name: str) -> None:
    names = {identity(name) for _ in range(50)}
    assert len(names) == 50
    for each in names:
        assert each.isascii()
        assert len(each) <= 200
        make_job(status="running", locked_by=each).delete()


# --- What a job may do to its thread ---------------------------------------------------------------


def test_a_thread_survives_whatever_its_clean_up_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = enqueue("bad"), enqueue("good")
    clean = between._clean

    def bite(connection: Any, *, session_changed: bool) -> None:
        if ran == ["bad"]:
            raise MemoryError("in the clean-up")
        clean(connection, session_changed=session_changed)

    ran: list[str] = []
    monkeypatch.setattr(between, "_clean", bite)
    with at_work({"bad": lambda payload: ran.append("bad"), "good": lambda payload: ran.append("good")}):
        wait_for(lambda: all_are("done"))
    assert ran == ["bad", "good"]
    assert set(Job.objects.values_list("pk", flat=True)) == {bad, good}


def test_a_context_says_that_the_claim_is_gone_once_its_end_is_written() -> None:
    kept: list[JobContext] = []

    def keep(payload: Any, context: JobContext) -> None:
        assert context.heartbeat()
        kept.append(context)

    enqueue("keep")
    with at_work({"keep": keep}):
        wait_for(lambda: all_are("done"))
        wait_for(lambda: kept[0].lease_lost)
        assert not kept[0].heartbeat()


@pytest.mark.usefixtures("impatient")
def test_a_deaf_handler_that_asks_after_all_is_told_that_its_claim_is_gone() -> None:
    answers: list[bool] = []
    given_up = threading.Event()

    def deaf(payload: Any, context: JobContext) -> None:
        given_up.wait(10)
        answers.append(context.heartbeat())

    drain_later = registry.define("deaf", deaf, timeout=0.05)
    worker = Worker(db="default", handlers={"deaf": deaf}, concurrency=2, poll_interval=0.02)
    worker.definitions["deaf"] = drain_later
    pk = enqueue("deaf")
    work = AtWork(worker)
    work.thread.start()
    wait_for(lambda: Job.objects.get(pk=pk).status == "dead")
    given_up.set()
    wait_for(lambda: bool(answers))
    worker.request_stop()
    work.wait()
    assert answers == [False]


def test_a_receiver_that_leaves_by_system_exit_ends_no_worker() -> None:
    def leave(**_: Any) -> None:
        raise SystemExit(7)

    signals.started.connect(leave)
    try:
        enqueue("t")
        with at_work({"t": nothing}):
            wait_for(lambda: all_are("done"))
    finally:
        signals.started.disconnect(leave)
