"""Coroutines by the hundred on one loop, none of which can tell that it is not alone."""

import asyncio
import contextvars
import gc
import logging
import os
import queue
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import Group
from django.db import DatabaseError, connection, transaction
from django.utils import translation

from django_forgejobs import cancel, coroutines, enqueue, enqueue_many, faults, registry, signals
from django_forgejobs.board import Board
from django_forgejobs.context import JobContext
from django_forgejobs.coroutines import JobLoop
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.threads import Running
from django_forgejobs.worker import Ended, Worker
from tests.sessions import session
from tests.test_worker import AtWork, Gate, at_work
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


class Loop:
    """A loop, and what has come back from it."""

    def __init__(self, limit: int) -> None:
        self.board = Board(limit)
        self.ended: queue.SimpleQueue[tuple[Running, Outcome]] = queue.SimpleQueue()
        self.loop = JobLoop(
            "default", limit=limit, ended=lambda *item: self.ended.put(item), board=self.board
        )
        self.count = 0

    def hand_out(
        self, handler: Callable[..., Any], times: int = 1, *, urgency: int = 0, **policy: Any
    ) -> list[Running]:
        definition = registry.define("t", handler, **({"backoff": 7} | policy))
        claimed = [self.claimed(n, urgency) for n in range(times)]
        batch = [Running(job, definition, context) for job, context in claimed]
        self.loop.hand_out(batch)
        return batch

    def claimed(self, n: int, priority: int = 0) -> tuple[Job, JobContext]:
        self.count += 1
        job = Job(
            pk=self.count,
            type="t",
            payload=n,
            attempts=1,
            max_attempts=3,
            claims=1,
            claim_token=uuid.uuid4(),
            priority=priority,
        )
        job._state.db = "default"
        return job, JobContext(job, lease=900, renew=lambda context: True)

    def outcomes(self, times: int = 1) -> list[Outcome]:
        found = [self.ended.get(timeout=15) for _ in range(times)]
        return [outcome for _, outcome in sorted(found, key=lambda item: item[0].job.pk)]

    def run(self, handler: Callable[..., Any], times: int = 1, **policy: Any) -> list[Outcome]:
        self.hand_out(handler, times, **policy)
        return self.outcomes(times)


def start(limit: int = 100) -> Iterator[Loop]:
    loop = Loop(limit)
    yield loop
    loop.loop.dismiss(wait=True)
    wait_for(lambda: not threads(), message="threads are left")


@pytest.fixture
def loop() -> Iterator[Loop]:
    yield from start()


@pytest.fixture
def narrow() -> Iterator[Loop]:
    yield from start(limit=2)


def threads(kind: str = "") -> list[str]:
    prefixes = ("forgejobs-loop", "forgejobs-coroutine", "forgejobs-to-thread")
    return [t.name for t in threading.enumerate() if t.name.startswith(prefixes) and kind in t.name]


def moves(outcomes: list[Outcome]) -> set[str]:
    return {outcome.move.name for outcome in outcomes}


def backends() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
        count: int = cursor.fetchone()[0]
    return count


class Meeting:
    """Lets coroutines wait until so many of them are there."""

    def __init__(self, size: int) -> None:
        self.size, self.count, self.all_there = size, 0, asyncio.Event()

    async def join(self) -> None:
        self.count += 1
        if self.count == self.size:
            self.all_there.set()
        async with asyncio.timeout(10):
            await self.all_there.wait()


async def nothing(payload: Any) -> None: ...


async def endless(payload: Any) -> None:
    await asyncio.Event().wait()


# --- Which handlers ------------------------------------------------------------------------------


class AsyncCallable:
    async def __call__(self, payload: Any) -> str:
        return "called"


class Callable_:
    def __call__(self, payload: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "is_async"),
    [
        (nothing, True),
        (AsyncCallable(), True),
        (lambda payload: nothing(payload), False),
        (Callable_(), False),
        (print, False),
    ],
    ids=["async def", "async callable", "returns an awaitable", "callable", "built-in"],
)
def test_a_definition_knows_which_handlers_need_no_thread(handler: Any, is_async: bool) -> None:
    assert registry.define("t", handler).is_async is is_async


# --- By the hundred ------------------------------------------------------------------------------


def test_a_hundred_coroutines_wait_side_by_side_in_one_thread_without_a_connection(loop: Loop) -> None:
    meeting = Meeting(100)
    seen: list[list[str]] = []

    async def handler(payload: int) -> int:
        await meeting.join()
        seen.append(threads())
        return payload

    outcomes = loop.run(handler, 100)
    assert [outcome.result for outcome in outcomes] == [str(n) for n in range(100)]
    assert seen == [["forgejobs-loop"]] * 100


@pytest.mark.postgres_only
def test_thirty_coroutines_have_a_connection_each_and_all_are_gone_afterwards(loop: Loop) -> None:
    before = backends()
    meeting = Meeting(30)

    async def handler(payload: int) -> int:
        pid: int = await sync_to_async(pid_of_backend)()
        await meeting.join()
        assert pid == await sync_to_async(pid_of_backend)()
        return pid

    outcomes = loop.run(handler, 30)
    assert len({outcome.result for outcome in outcomes}) == 30, moves(outcomes)
    wait_for(lambda: threads() == ["forgejobs-loop"], message="threads are left")
    wait_for(lambda: backends() == before, message="connections are left")


def pid_of_backend() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid: int = cursor.fetchone()[0]
    return pid


def test_no_more_run_than_the_limit_and_those_that_wait_can_be_taken_back(narrow: Loop) -> None:
    go = asyncio.Event()
    begun: list[int] = []

    async def handler(payload: int) -> None:
        begun.append(payload)
        await go.wait()

    batch = narrow.hand_out(handler, 5)
    wait_for(lambda: len(begun) == 2)
    assert narrow.loop.waiting == 3
    assert [running.started is None for running in batch] == [False, False, True, True, True]
    assert narrow.board.begun() == {1, 2}
    assert [running.job.pk for running in narrow.loop.take_back()] == [3, 4, 5]
    narrow.hand_out(handler, 2)
    narrow.hand_out(opens(go))
    narrow.loop._loop.call_soon_threadsafe(go.set)  # type: ignore[union-attr]
    assert moves(narrow.outcomes(5)) == {"complete"}
    assert begun == [0, 1, 0, 1]
    assert narrow.board.begun() == set()


def test_what_waits_already_runs_after_what_is_more_urgent(narrow: Loop) -> None:
    go = asyncio.Event()
    begun: list[int] = []

    async def handler(payload: int, context: JobContext) -> None:
        begun.append(context.job_id)
        await go.wait()

    narrow.hand_out(handler, 4)
    wait_for(lambda: len(begun) == 2)
    narrow.hand_out(handler, 2, urgency=5)
    narrow.loop._loop.call_soon_threadsafe(go.set)  # type: ignore[union-attr]
    narrow.outcomes(6)
    assert begun == [1, 2, 5, 6, 3, 4]


def opens(event: asyncio.Event) -> Callable[[Any], Any]:
    async def handler(payload: Any) -> None:
        event.set()

    return handler


def test_a_job_that_is_over_waits_for_no_garbage_collector(loop: Loop) -> None:
    kept: list[Any] = []

    class Big: ...

    async def handler(payload: Any) -> None:
        big = Big()
        kept.append(weakref.ref(big))
        kept.append(weakref.ref(coroutines._mine.get()))  # what all else of a job hangs on
        await Group.objects.acount()

    gc.disable()
    try:
        loop.run(handler)
        wait_for(lambda: [one() for one in kept] == [None, None], message=lambda: str(kept))
    finally:
        gc.enable()


# --- Transactions and connections ----------------------------------------------------------------


def test_the_open_transaction_of_one_swallows_no_rows_of_the_others(loop: Loop) -> None:
    meeting = Meeting(6)
    rolled_back = asyncio.Event()
    on_postgres = connection.vendor == "postgresql"

    async def handler(payload: int) -> None:
        if payload == 0:
            begin = transaction.atomic()
            await sync_to_async(begin.__enter__)()
            if on_postgres:  # SQLite has one writer
                await Group.objects.acreate(name="undone")
            await meeting.join()
            await sync_to_async(transaction.set_rollback)(True)
            await sync_to_async(begin.__exit__)(None, None, None)
            rolled_back.set()
        elif on_postgres:
            await Group.objects.acreate(name=f"group {payload}")
            await meeting.join()
        else:
            await meeting.join()
            await rolled_back.wait()
            await Group.objects.acreate(name=f"group {payload}")

    assert moves(loop.run(handler, 6)) == {"complete"}
    assert sorted(Group.objects.values_list("name", flat=True)) == [f"group {n}" for n in range(1, 6)]


def test_a_transaction_that_a_coroutine_leaves_open_is_rolled_back_and_its_attempt_has_failed(
    loop: Loop,
) -> None:
    def leave_open() -> None:
        transaction.atomic().__enter__()
        Group.objects.create(name="left")

    async def handler(payload: Any) -> None:
        await sync_to_async(leave_open)()

    [outcome] = loop.run(handler)
    assert outcome.move.name == "retry"
    assert 'left a transaction open on "default"' in (outcome.error or "")
    assert not Group.objects.exists()


def test_sync_code_of_a_coroutine_can_call_async_code_on_the_same_connection(loop: Loop) -> None:
    async def inner() -> None:
        await Group.objects.acreate(name="inner")

    def outer() -> bool:
        with transaction.atomic():
            async_to_sync(inner)()
            found = Group.objects.exists()
            transaction.set_rollback(True)
        return found

    async def handler(payload: Any) -> Any:
        return await sync_to_async(outer)()

    assert [outcome.result for outcome in loop.run(handler)] == ["true"]
    assert not Group.objects.exists()


@pytest.mark.postgres_only
def test_what_the_pool_opens_is_closed_and_an_open_transaction_rolled_back(loop: Loop) -> None:
    before = backends()

    def work() -> int:
        transaction.atomic().__enter__()
        Group.objects.create(name="left")
        return pid_of_backend()

    async def handler(payload: Any) -> Any:
        return [
            await asyncio.to_thread(work),
            await sync_to_async(pid_of_backend, thread_sensitive=False)(),
        ]

    [outcome] = loop.run(handler)
    assert outcome.move.name == "complete"
    wait_for(lambda: backends() == before, message="connections are left")
    assert not Group.objects.exists()


@pytest.mark.postgres_only
@pytest.mark.parametrize("in_block", [False, True])
def test_a_cut_connection_releases_a_coroutines_job(loop: Loop, in_block: bool) -> None:
    def cut() -> None:
        pid = pid_of_backend()
        with session("killer") as killer, killer.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        with transaction.atomic() if in_block else pytest.raises(DatabaseError):
            Group.objects.create(name="lost")

    async def handler(payload: Any) -> None:
        await sync_to_async(cut)()
        await Group.objects.acreate(name="lost")

    [outcome] = loop.run(handler)
    assert (outcome.move.name, outcome.facts.get("outage")) == ("release", True)


def test_an_error_like_an_outages_is_the_jobs_own_while_the_database_answers(loop: Loop) -> None:
    async def handler(payload: Any) -> None:
        raise DatabaseError("of another database") from ConnectionError()

    assert moves(loop.run(handler)) == {"retry"}


def test_who_listens_for_starts_may_use_the_orm(loop: Loop) -> None:
    heard: list[int] = []

    def listen(job: Job, **_: Any) -> None:
        Group.objects.create(name="heard")
        heard.append(job.pk)

    async def handler(payload: Any) -> bool:
        return heard == [1]

    signals.started.connect(listen)
    try:
        assert [outcome.result for outcome in loop.run(handler)] == ["true"]
    finally:
        signals.started.disconnect(listen)
    assert Group.objects.get().name == "heard"


# --- Contexts ------------------------------------------------------------------------------------


def test_language_and_context_of_one_are_not_those_of_another(loop: Loop) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    languages = ["de", "fr", "en"]
    meeting = Meeting(3)

    async def handler(payload: int) -> Any:
        fresh = variable.get(None) is None
        variable.set(payload)
        translation.activate(languages[payload])
        await meeting.join()
        in_thread = await sync_to_async(translation.get_language)()
        return [fresh, variable.get(), translation.get_language(), in_thread]

    results = [outcome.result for outcome in loop.run(handler, 3)]
    assert results == [f'[true,{n},"{word}","{word}"]' for n, word in enumerate(languages)]


# --- Whatever is raised --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        BaseExceptionGroup("two", [SystemExit(1), ValueError()]),
        GeneratorExit(),
        StopAsyncIteration(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("in_thread", [False, True])
def test_whatever_a_coroutine_raises_is_an_attempt_and_the_loop_goes_on(
    loop: Loop, error: BaseException, in_thread: bool
) -> None:
    def work() -> None:
        raise error

    async def handler(payload: Any) -> None:
        if in_thread:
            await sync_to_async(work)()
        await asyncio.sleep(0)
        work()

    [outcome] = loop.run(handler)
    assert outcome.move.name == "retry"
    assert type(error).__name__ in (outcome.error or "")
    assert moves(loop.run(nothing)) == {"complete"}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_a_task_that_would_end_the_loop_fails_its_own_job_only(loop: Loop, error: BaseException) -> None:
    async def child() -> None:
        raise error

    async def handler(payload: Any) -> None:
        await asyncio.create_task(child())

    begun = asyncio.Event()

    async def neighbour(payload: Any) -> None:
        await begun.wait()

    loop.hand_out(neighbour)
    assert moves(loop.run(handler)) == {"retry"}
    assert moves(loop.run(opens(begun), 2)) == {"complete"}
    assert moves(loop.outcomes()) == {"complete"}


def test_a_coroutine_that_cancels_its_own_task_disturbs_no_clean_up(loop: Loop) -> None:
    async def handler(payload: int) -> str:
        await Group.objects.acount()
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if payload:
            await asyncio.sleep(0)
        return "done"

    at_once, later = loop.run(handler, 2)
    assert (at_once.move.name, at_once.result) == ("complete", '"done"')
    assert (later.move.name, later.error) == ("retry", "asyncio.exceptions.CancelledError")


def test_a_result_that_cannot_be_stored_fails_its_job(loop: Loop) -> None:
    async def handler(payload: Any) -> Any:
        return {"when": object()}

    assert moves(loop.run(handler)) == {"fail"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_that_comes_back_from_a_coroutine_ends(loop: Loop) -> None:
    async def handler(payload: Any) -> int:
        return os.fork()

    [outcome] = loop.run(handler)
    _, status = os.waitpid(int(outcome.result or 0), 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_a_job_for_which_no_thread_can_be_had_is_released(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(payload: Any) -> None:
        raise DatabaseError("to be looked into, in a thread") from OSError()

    begin = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if "coroutine" in thread.name:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    monkeypatch.setattr(faults, "comes_from_outage", lambda error: True)
    [outcome] = loop.run(handler)
    assert (outcome.move.name, outcome.facts) == ("release", {"reason": "it could not be run"})


# --- Told to stop --------------------------------------------------------------------------------


def test_a_coroutine_is_cancelled_when_its_time_is_over(loop: Loop) -> None:
    [running] = loop.hand_out(endless, timeout=0.01)
    wait_for(lambda: running.context.late and running.context.on_stop)
    running.context.tell()
    [outcome] = loop.outcomes()
    assert (outcome.error or "").startswith("Timeout: the handler was still running")


def test_a_coroutine_is_cancelled_when_its_claim_is_gone(loop: Loop) -> None:
    [running] = loop.hand_out(endless)
    wait_for(lambda: running.context.on_stop)
    running.context.revoke()
    assert [outcome.error for outcome in loop.outcomes()] == ["asyncio.exceptions.CancelledError"]


def test_a_call_that_runs_on_in_a_thread_keeps_its_job_from_ending(loop: Loop) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        leave.wait(15)

    async def pooled(payload: Any) -> None:
        await asyncio.to_thread(slow)

    async def sensitive(payload: Any) -> None:
        await sync_to_async(slow)()

    for handler in (pooled, sensitive):
        entered.clear()
        leave.clear()
        [running] = loop.hand_out(handler)
        assert entered.wait(15)
        running.context.revoke()
        assert moves(loop.run(nothing)) == {"complete"}
        assert loop.ended.empty()
        leave.set()
        assert moves(loop.outcomes()) == {"retry"}


def test_what_still_runs_at_the_dismissal_is_cancelled(loop: Loop) -> None:
    tidied: list[int] = []

    async def handler(payload: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tidied.append(payload)

    batch = loop.hand_out(handler, 3)
    wait_for(lambda: all(running.context.on_stop for running in batch))
    loop.loop.dismiss(wait=True)
    assert sorted(tidied) == [0, 1, 2]
    assert threads() == []


# --- What a coroutine leaves behind --------------------------------------------------------------


def test_tasks_left_behind_are_cancelled_and_named_and_may_tidy_up(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    tidied: list[bool] = []

    async def child() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await Group.objects.acreate(name="tidy")
            tidied.append(True)

    async def handler(payload: Any) -> None:
        loop.tasks = [  # type: ignore[attr-defined]
            asyncio.create_task(child(), name="forgotten"),
            asyncio.create_task(asyncio.sleep(60), name="ends before the other has tidied up"),
        ]
        await asyncio.sleep(0)

    [outcome] = loop.run(handler)
    assert outcome.move.name == "complete"
    assert tidied == [True]
    assert Group.objects.get().name == "tidy"
    assert "left 2 tasks behind, which are cancelled: " in caplog.text
    assert "forgotten" in caplog.text


def test_the_siblings_of_a_failed_task_are_no_news(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def handler(payload: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(60))
            group.create_task(fail())

    assert moves(loop.run(handler)) == {"retry"}
    assert "behind" not in caplog.text


def test_a_task_in_a_context_of_its_own_outlives_its_job(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    go, done = asyncio.Event(), threading.Event()

    async def child() -> None:
        await go.wait()
        done.set()

    async def handler(payload: Any) -> None:
        task = asyncio.create_task(child(), context=contextvars.Context())
        loop.task = task  # type: ignore[attr-defined] # a loop holds its tasks weakly

    loop.run(handler)
    loop.run(opens(go))
    assert done.wait(15)
    assert "behind" not in caplog.text


def test_a_deaf_task_is_named_and_keeps_nobody(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coroutines, "LEAVE_WITHIN", 0.05)
    go = asyncio.Event()
    refused: list[str] = []

    async def child() -> None:
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()
        try:
            await Group.objects.acount()
        except RuntimeError as error:
            refused.append(str(error))

    async def handler(payload: Any) -> None:
        loop.task = asyncio.create_task(child(), name="deaf")  # type: ignore[attr-defined]
        await Group.objects.acount()

    assert moves(loop.run(handler)) == {"complete"}
    assert "have not within 0.05 s, and go on" in caplog.text
    assert "deaf" in caplog.text
    loop.run(opens(go))
    wait_for(lambda: bool(refused))


def test_a_call_in_the_pool_that_does_not_come_back_is_known_of(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coroutines, "LEAVE_WITHIN", 0.05)
    leave = threading.Event()

    async def handler(payload: Any) -> None:
        loop.task = asyncio.create_task(asyncio.to_thread(leave.wait, 15))  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    assert moves(loop.run(handler)) == {"complete"}
    assert loop.loop.abandoned
    leave.set()
    wait_for(lambda: not loop.loop.abandoned)


# --- A loop that does not come round --------------------------------------------------------------


def test_who_blocks_the_loop_is_named_with_the_line_where_it_stands(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coroutines, "BLOCKED_AFTER", 0.05)
    entered, leave = threading.Event(), threading.Event()

    async def child() -> None:
        entered.set()
        leave.wait(15)

    async def handler(payload: Any) -> None:
        await asyncio.gather(child())

    loop.hand_out(endless, 2)
    [blocker] = loop.hand_out(handler)
    assert entered.wait(15)
    wait_for(lambda: loop.loop.blocked_since() is not None)
    assert loop.loop.blocked_since() is not None
    [record] = [one for one in caplog.records if one.levelno == logging.WARNING]
    text = record.getMessage()
    assert f"{blocker.job} blocks the event loop: 2 other coroutines have waited" in text
    assert "leave.wait(15)" in text
    leave.set()
    wait_for(lambda: "came round after" in caplog.text)
    assert loop.loop.blocked_since() is None
    loop.outcomes()


def test_a_loop_that_comes_round_is_not_complained_of(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coroutines, "BLOCKED_AFTER", 0.01)
    loop.hand_out(endless, 3)
    answered: list[float | None] = []
    wait_for(lambda: answered.append(loop.loop.blocked_since()) or len(answered) > 5)  # type: ignore[func-returns-value]
    assert not any(answered)
    assert not caplog.records


# --- In a worker ---------------------------------------------------------------------------------


@pytest.fixture
def impatient(settings: Any) -> None:
    settings.FORGEJOBS = {"TIMEOUT_MARGIN": 0.05, "GRACE": 0.5}


def statuses_of(type_: str) -> Counter[str]:
    return Counter(Job.objects.filter(type=type_).values_list("status", flat=True))


def limited(work: Worker, **seconds: float) -> Worker:
    for type_, timeout in seconds.items():
        work.definitions[type_] = registry.define(type_, work.definitions[type_].handler, timeout=timeout)
    return work


def test_coroutines_by_the_dozen_run_beside_a_single_busy_thread_which_takes_no_more_than_its_one() -> None:
    gate, meeting = Gate(), Meeting(40)

    async def meet(payload: Any) -> None:
        await meeting.join()

    enqueue_many({"type": "gate", "priority": 9} for _ in range(3))
    enqueue_many({"type": "meet"} for _ in range(40))
    enqueue_many({"type": "gate"} for _ in range(60))
    with at_work({"gate": gate, "meet": meet}, concurrency=1, async_concurrency=40):
        wait_for(lambda: statuses_of("meet") == {"done": 40})
        assert statuses_of("gate") == {"running": 1, "ready": 62}
        gate.out.set()
        wait_for(lambda: statuses_of("gate") == {"done": 63})
    assert gate.most == 1


def test_coroutines_that_fill_the_loop_keep_no_thread_from_its_work() -> None:
    out = asyncio.Event()
    inside: list[int] = []

    async def stay(payload: int) -> None:
        inside.append(payload)
        await out.wait()

    enqueue_many({"type": "stay", "payload": n, "priority": 9} for n in range(5))
    enqueue_many({"type": "t"} for _ in range(5))
    with at_work({"stay": stay, "t": lambda payload: None, "open": opens(out)}, async_concurrency=2) as work:
        wait_for(lambda: statuses_of("t") == {"done": 5})
        assert statuses_of("stay") == {"running": 2, "ready": 3}
        assert work.worker._coroutines._loop is not None
        work.worker._coroutines._loop.call_soon_threadsafe(out.set)
        wait_for(lambda: statuses_of("stay") == {"done": 5})


def test_a_burst_ends_when_neither_kind_is_due() -> None:
    ran: list[str] = []

    async def coroutine(payload: Any) -> None:
        ran.append("async")

    enqueue_many({"type": "async"} for _ in range(30))
    enqueue_many({"type": "sync"} for _ in range(30))
    enqueue_many({"type": "async", "priority": -1} for _ in range(30))
    worker = Worker(
        db="default",
        handlers={"async": coroutine, "sync": lambda payload: ran.append("sync")},
        async_concurrency=7,
        burst=True,
    )
    assert worker.run() is Ended.CLEAN
    assert Counter(ran) == {"async": 60, "sync": 30}
    assert set(Job.objects.values_list("status", flat=True)) == {"done"}


def test_no_more_than_max_jobs_coroutines_are_run() -> None:
    enqueue_many({"type": "t"} for _ in range(9))
    worker = Worker(db="default", handlers={"t": nothing}, async_concurrency=5, max_jobs=4)
    assert worker.run() is Ended.CLEAN
    assert statuses_of("t") == {"done": 4, "ready": 5}


def test_a_coroutine_whose_job_is_cancelled_is_told(settings: Any) -> None:
    settings.FORGEJOBS = {"LEASE": 30, "HEARTBEAT": 0.05}
    told: list[bool] = []

    async def handler(payload: Any, context: JobContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            told.append(context.lease_lost)

    job = enqueue("t")
    with at_work({"t": handler}):
        wait_for(lambda: statuses_of("t") == {"running": 1})
        assert cancel(job)
        wait_for(lambda: told == [True])
    assert statuses_of("t") == {"cancelled": 1}


@pytest.mark.usefixtures("impatient")
def test_a_deaf_coroutine_costs_its_claim_and_its_slot_and_the_others_work_on() -> None:
    out = asyncio.Event()

    async def deaf(payload: Any) -> None:
        while not out.is_set():
            with suppress(asyncio.CancelledError):
                await out.wait()

    enqueue("deaf", priority=9)
    worker = Worker(
        db="default",
        handlers={"deaf": deaf, "t": nothing, "open": opens(out)},
        async_concurrency=2,
        poll_interval=0.02,
    )
    work = AtWork(limited(worker, deaf=0.05))
    work.thread.start()
    wait_for(lambda: statuses_of("deaf") == {"dead": 1})
    enqueue_many({"type": "t"} for _ in range(5))
    wait_for(lambda: statuses_of("t") == {"done": 5})
    assert worker._on_loop.free == 1
    enqueue("open")
    wait_for(lambda: worker._on_loop.free == 2, message="its slot did not come back")
    worker.request_stop()
    assert work.wait() is Ended.CLEAN


@pytest.mark.usefixtures("impatient")
def test_who_blocks_the_loop_for_good_is_charged_and_its_neighbours_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coroutines, "BLOCKED_AFTER", 0.01)
    leave = threading.Event()

    async def block(payload: Any) -> None:
        for running in list(worker._timed.values()):
            running.context.deadline = time.monotonic()
        worker.wake()
        leave.wait(15)

    enqueue_many({"type": "neighbour"} for _ in range(2))
    enqueue("block", priority=-9)
    handlers = {"neighbour": endless, "block": block}
    worker = Worker(db="default", handlers=handlers, async_concurrency=3, poll_interval=0.02)
    work = AtWork(limited(worker, neighbour=60))
    work.thread.start()
    try:
        assert work.wait() is Ended.FORCED
    finally:
        leave.set()
    assert statuses_of("block") == {"dead": 1}
    assert "blocked the event loop" in Job.objects.get(type="block").last_error
    assert statuses_of("neighbour") == {"ready": 2}
    assert set(Job.objects.filter(type="neighbour").values_list("attempts", flat=True)) == {0}


@pytest.mark.usefixtures("impatient")
def test_coroutines_that_outlast_the_grace_are_given_back_and_cancelled() -> None:
    cancelled: list[int] = []

    async def handler(payload: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(payload)

    enqueue_many({"type": "t", "payload": n} for n in range(3))
    with at_work({"t": handler}, async_concurrency=3) as work:
        wait_for(lambda: statuses_of("t") == {"running": 3})
        work.worker.request_stop()
        assert work.wait() is Ended.FORCED
    assert statuses_of("t") == {"ready": 3}
    wait_for(lambda: sorted(cancelled) == [0, 1, 2])


def test_what_is_claimed_ahead_for_the_loop_is_given_back_when_it_stalls() -> None:
    out = asyncio.Event()

    async def stay(payload: int) -> None:
        await out.wait()

    enqueue_many({"type": "t", "priority": 9} for _ in range(200))
    enqueue_many({"type": "stay"} for _ in range(50))
    with at_work({"t": nothing, "stay": stay, "open": opens(out)}, async_concurrency=2) as work:
        wait_for(lambda: statuses_of("t") == {"done": 200})
        wait_for(lambda: statuses_of("stay") == {"running": 2, "ready": 48})
        assert set(Job.objects.filter(type="stay", status="ready").values_list("attempts", flat=True)) == {0}
        assert work.worker._coroutines._loop is not None
        work.worker._coroutines._loop.call_soon_threadsafe(out.set)
        wait_for(lambda: statuses_of("stay") == {"done": 50})


def test_a_worker_does_not_wait_for_a_call_that_a_coroutine_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python would wait for it at the exit, so the process must be left by force."""
    monkeypatch.setattr(coroutines, "LEAVE_WITHIN", 0.05)
    leave = threading.Event()
    kept: list[Any] = []

    async def handler(payload: Any) -> None:
        kept.append(asyncio.create_task(asyncio.to_thread(leave.wait, 15)))
        await asyncio.sleep(0)

    enqueue("t")
    try:
        with at_work({"t": handler}) as work:
            wait_for(lambda: statuses_of("t") == {"done": 1})
            work.worker.request_stop()
            assert work.wait() is Ended.FORCED
    finally:
        leave.set()
