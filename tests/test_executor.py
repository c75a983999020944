"""From whatever a handler does to an outcome that can be stored."""

import asyncio
import contextvars
import functools
import os
import socket
import sys
import threading
import time
import tracemalloc
import uuid
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import psycopg.errors
import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import IntegrityError, OperationalError, connection, transaction
from django.test import override_settings
from django.utils import timezone, translation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_forgejobs import PermanentError, Retry, Snooze, between, executor, failures, process_one, registry
from django_forgejobs.context import JobContext
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from tests.factories import make_job
from tests.sessions import in_threads
from tests.waiting import wait_for

any_text = st.text(st.characters(exclude_categories=()), max_size=60)


def run(
    handler: Callable[..., Any],
    *,
    attempt: int = 1,
    max_attempts: int = 3,
    reachable: Callable[[], bool] | None = None,
    meanwhile: Callable[[JobContext], object] | None = None,
    **policy: Any,
) -> Outcome:
    """Run a handler as a job, without a row: the executor writes nothing."""
    job = Job(
        pk=1,
        type="t",
        payload={"n": 1},
        attempts=attempt,
        max_attempts=max_attempts,
        claims=attempt,
        claim_token=uuid.uuid4(),
    )
    definition = registry.define("t", handler, **({"backoff": 7} | policy))
    context = JobContext(job, lease=900, renew=lambda context: True, timeout=definition.timeout)
    if meanwhile is not None:
        meanwhile(context)
    return executor.execute(job, definition, context, reachable=reachable or unasked, before=between.depths())


def unasked() -> bool:
    raise AssertionError("Nothing looked like an outage.")


def raising(error: BaseException) -> Callable[[Any], None]:
    def handler(payload: Any) -> None:
        raise error

    return handler


def async_raising(error: BaseException) -> Callable[[Any], Any]:
    async def handler(payload: Any) -> None:
        await asyncio.sleep(0)
        raise error

    return handler


# --- What a handler is given, and what it returns ------------------------------------------------


@pytest.mark.parametrize("handler", [lambda payload: None, async_raising], ids=["sync", "async"])
def test_a_handler_that_returns_nothing_is_done_without_a_result(handler: Any) -> None:
    async def nothing(payload: Any) -> None: ...

    outcome = run(nothing if handler is async_raising else handler)
    assert (outcome.move.name, outcome.result, outcome.error) == ("complete", None, None)


def test_what_a_handler_returns_is_the_result() -> None:
    assert run(lambda payload: (payload, 1.0)).result == '[{"n":1},1.0]'


def test_a_handler_is_given_the_token_and_the_context_if_it_wants_them() -> None:
    def handler(payload: Any, claim_token: Any, *, context: Any) -> list[Any]:
        assert claim_token == context.claim_token
        assert context.heartbeat()
        assert not context.should_stop
        return [context.job_id, context.type, context.attempt, context.max_attempts]

    assert run(handler, attempt=2).result == '[1,"t",2,3]'


class AsyncCallable:
    async def __call__(self, payload: Any) -> str:
        return "called"


async def _coroutine(payload: Any, claim_token: Any, word: str = "awaited") -> str:
    await asyncio.sleep(0)
    return word


@pytest.mark.parametrize(
    ("handler", "result"),
    [
        (_coroutine, '"awaited"'),
        (functools.partial(_coroutine, word="partial"), '"partial"'),
        (AsyncCallable(), '"called"'),
        (lambda payload: _coroutine(payload, None), '"awaited"'),
    ],
    ids=["function", "partial", "callable", "returns an awaitable"],
)
def test_async_handlers_work_in_every_form(handler: Any, result: str) -> None:
    assert run(handler).result == result


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"m": float("nan")}, 'result["m"] is nan, which JSON does not have.'),
        (float("inf"), "result is inf"),
        (timedelta(1), "result is datetime.timedelta, which JSON cannot give back"),
        (map(str, []), "result is builtins.map"),
        ({1: 2}, "result has the key 1 (int)"),
        ("\udcff", "result contains a lone surrogate"),
        ("x" * 1024 * 1024, "result is more than PAYLOAD_MAX_BYTES"),
    ],
    ids=lambda value: str(value).partition(" object at ")[0][:20].encode("ascii", "replace").decode(),
)
def test_a_result_that_cannot_be_stored_ends_the_job_as_failed(value: Any, said: str) -> None:
    outcome = run(lambda payload: value)
    assert (outcome.move.name, outcome.result) == ("fail", None)
    assert (outcome.error or "").startswith(f"The result could not be stored: {said}")


# --- Any exception counts ------------------------------------------------------------------------


class Own(BaseException):
    pass


EXCEPTIONS: list[tuple[BaseException, str]] = [
    (ValueError("no"), "ValueError: no"),
    (ValueError(), "ValueError"),
    (SystemExit(0), "SystemExit: 0"),
    (SystemExit("x"), "SystemExit: x"),
    (SystemExit(), "SystemExit"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (GeneratorExit(), "GeneratorExit"),
    (asyncio.CancelledError(), "asyncio.exceptions.CancelledError"),
    (TimeoutError(), "TimeoutError"),
    (MemoryError(), "MemoryError"),
    (Own("mine"), "tests.test_executor.Own: mine"),
    (ExceptionGroup("two", [OSError("a"), KeyError("b")]), "ExceptionGroup: two (2 sub-exceptions)"),
    (
        BaseExceptionGroup("mixed", [Own(), ValueError()]),
        "BaseExceptionGroup: mixed (2 sub-exceptions)",
    ),
]


@pytest.mark.parametrize(("error", "said"), EXCEPTIONS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("handler_of", [raising, async_raising])
def test_whatever_a_handler_raises_is_a_failed_attempt(
    handler_of: Callable[[BaseException], Any], error: BaseException, said: str
) -> None:
    [elsewhere] = in_threads(1, lambda index: run(handler_of(error), max_attempts=1))
    for outcome, move in ((run(handler_of(error)), "retry"), (elsewhere, "bury")):
        assert (outcome.move.name, outcome.error, outcome.exception) == (move, said, error)
        assert outcome.facts["error"] == said.split(":")[0]
        assert said in outcome.facts["traceback"]
        assert "test_executor.py" in outcome.facts["traceback"]


def test_stop_iteration_counts_also_where_async_turns_it_into_another() -> None:
    assert run(raising(StopIteration(5))).error == "StopIteration: 5"
    assert (run(async_raising(StopIteration(5))).error or "").startswith("RuntimeError: coroutine")


def test_an_attempt_is_tried_again_until_the_last_one() -> None:
    handler = raising(ValueError())
    outcomes = [run(handler, attempt=n, backoff=lambda attempt, error: attempt * 10) for n in (1, 2, 3)]
    assert [(outcome.move.name, outcome.delay) for outcome in outcomes] == [
        ("retry", 10),
        ("retry", 20),
        ("bury", None),
    ]


@override_settings(FORGEJOBS={"BACKOFF": {"base": 3, "jitter": 0}})
def test_without_a_policy_of_its_own_a_type_has_the_projects_backoff() -> None:
    assert run(raising(ValueError()), attempt=2, backoff=None).delay == pytest.approx(6)


# --- The handler's own words ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "attempt", "move", "delay"),
    [
        (Retry(in_=30), 1, "retry", 30),
        (Retry(in_=timedelta(minutes=1)), 1, "retry", 60),
        (Retry(), 1, "retry", 7),
        (Retry(in_=0), 1, "retry", 0),
        (Retry(in_=30), 3, "bury", None),
        (Snooze(in_=30), 1, "snooze", 30),
        (Snooze(in_=30), 3, "snooze", 30),
        (Snooze(in_=timedelta(0)), 3, "snooze", 0),
        (PermanentError("bad address"), 1, "fail", None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("handler_of", [raising, async_raising])
def test_a_handler_says_what_becomes_of_its_job(
    handler_of: Any, word: Exception, attempt: int, move: str, delay: float | None
) -> None:
    outcome = run(handler_of(word), attempt=attempt)
    assert (outcome.move.name, outcome.delay) == (move, delay)


def test_the_words_carry_their_reason() -> None:
    retried = run(raising(Retry("the mail server is busy", in_=1)))
    assert retried.error == "django_forgejobs.exceptions.Retry: the mail server is busy"
    assert run(raising(Snooze("not yet", in_=1))).facts == {"reason": "not yet"}
    failed = run(raising(PermanentError("bad address")))
    assert failed.error == "django_forgejobs.exceptions.PermanentError: bad address"
    assert "bad address" in failed.facts["traceback"]


@pytest.mark.django_db
@pytest.mark.parametrize("message", ["a\0b", "\udcff", "x" * 100_000])
def test_any_reason_to_snooze_can_be_stored(message: str) -> None:
    job = make_job()
    assert process_one({"test.job": raising(Snooze(message, in_=5))})
    job.refresh_from_db()
    assert job.status == "ready"
    assert 0 < len(job.history[-1]["reason"]) <= failures.ERROR_CHARACTERS


def test_a_retry_shows_what_it_was_raised_from() -> None:
    def handler(payload: Any) -> None:
        try:
            raise ConnectionResetError("by peer")
        except OSError as error:
            raise Retry("later", in_=5) from error

    shown = run(handler).facts["traceback"]
    assert shown.index("ConnectionResetError: by peer") < shown.index("caused") < shown.index("later")


BAD_DURATIONS: list[tuple[Any, str]] = [
    (-1, "it must not be negative"),
    (float("nan"), "expected a number of seconds or a timedelta"),
    (float("inf"), "expected a number of seconds or a timedelta"),
    ("5", "expected a number of seconds or a timedelta"),
    (10**400, "it is longer than a hundred years"),
    (10**5000, "it is longer than a hundred years"),
    (timedelta.max, "it is longer than a hundred years"),
]


@pytest.mark.parametrize("word", [Retry, Snooze])
@pytest.mark.parametrize("number", range(len(BAD_DURATIONS)))
def test_a_word_with_a_duration_that_is_none_is_a_failed_attempt(word: Any, number: int) -> None:
    in_, said = BAD_DURATIONS[number]
    outcome = run(raising(word("why", in_=in_)))
    assert (outcome.move.name, outcome.delay) == ("retry", 7)
    assert (outcome.error or "").startswith(f"ValueError: {word.__name__}(in_=")
    assert said in (outcome.error or "")
    assert run(raising(word("why", in_=in_)), attempt=3).move.name == "bury"


def test_snooze_without_a_duration_is_a_bug_of_the_handler() -> None:
    def handler(payload: Any) -> None:
        raise Snooze("some day")  # type: ignore[call-arg]

    assert "missing 1 required keyword-only argument" in (run(handler).error or "")


# --- Errors in words -----------------------------------------------------------------------------


class Needy(Exception):
    def __init__(self, *, why: str) -> None:
        self.why = why

    def __str__(self) -> str:
        return self.why


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit("I will not say")


class Five(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Baseless(Exception):
    @property
    def __cause__(self) -> BaseException | None:  # type: ignore[override]
        raise ZeroDivisionError


def test_an_exception_is_kept_as_text_whatever_it_holds() -> None:
    class Local(Exception):
        pass

    def handler(payload: Any) -> None:
        raise Local(threading.Lock(), socket.socket, map(str, []))

    outcome = run(handler)
    assert outcome.facts["error"].startswith("tests.test_executor.test_an_exception_is_kept")
    assert outcome.facts["error"].endswith(".<locals>.Local")
    assert "_thread.lock" in (outcome.error or "")
    assert run(raising(Needy(why="because"))).error == "tests.test_executor.Needy: because"
    missing = Group.DoesNotExist("Group matching query does not exist.")
    assert run(raising(missing)).facts["error"] == "django.contrib.auth.models.Group.DoesNotExist"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Mute(), "tests.test_executor.Mute: <its message cannot be shown: SystemExit>"),
        (Five(), "tests.test_executor.Five: <its message cannot be shown: TypeError>"),
        (Baseless("all"), "tests.test_executor.Baseless: all"),
    ],
)
def test_an_exception_that_cannot_be_shown_fails_like_any_other(error: Exception, said: str) -> None:
    outcome = run(raising(error))
    assert outcome.move.name == "retry"
    assert said in (outcome.error or "")
    assert outcome.facts["error"] in said


def test_a_message_of_200_mb_costs_no_memory_and_keeps_its_ends() -> None:
    message = "head" + "x" * 200_000_000 + "tail"
    tracemalloc.start()
    try:
        outcome = run(raising(ValueError(message)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    for text in (outcome.error or "", outcome.facts["message"]):
        assert len(text) <= failures.ERROR_CHARACTERS
        assert text.startswith("ValueError: headx")
        assert text.endswith("xtail")
        assert "characters cut]" in text
    assert len(outcome.facts["traceback"]) <= failures.TRACEBACK_CHARACTERS


def test_a_traceback_of_100_000_frames_shows_its_ends_and_costs_little() -> None:
    def fall(depth: int) -> None:
        if depth:
            fall(depth - 1)
        else:
            raise ValueError("the bottom")

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(120_000)
    try:
        fall(100_000)
    except ValueError as error:
        tracemalloc.start()
        facts = failures.facts(error)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    finally:
        sys.setrecursionlimit(limit)
    assert peak < 1_000_000
    assert "… 99,972 frames more …" in facts["traceback"]
    assert facts["traceback"].rstrip().endswith("ValueError: the bottom")
    assert len(facts["traceback"]) <= failures.TRACEBACK_CHARACTERS


def test_a_chain_of_1_000_causes_shows_the_last_and_says_that_there_are_more() -> None:
    error: Exception = ValueError(0)
    for number in range(1, 1000):
        later = ValueError(number)
        later.__cause__ = error
        error = later
    shown = run(raising(error)).facts["traceback"]
    assert shown.startswith("… earlier causes are left out …\n\ncaused\n\n")
    assert [f"ValueError: {number}\n" in shown for number in (994, 995, 999)] == [False, True, True]


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_a_circle_of_causes_ends(link: str) -> None:
    first, second = ValueError("first"), ValueError("second")
    setattr(first, link, second)
    setattr(second, link, first)
    shown = run(raising(first)).facts["traceback"]
    assert (shown.count("ValueError: first"), shown.count("ValueError: second")) == (1, 1)
    assert "left out" not in shown


def test_a_cause_that_the_handler_suppressed_is_not_shown() -> None:
    def handler(payload: Any) -> None:
        try:
            raise ValueError("a secret")
        except ValueError:
            raise RuntimeError("said") from None

    assert "a secret" not in run(handler).facts["traceback"]


def test_a_group_shows_what_it_holds_and_where_that_was_raised() -> None:
    def broken() -> None:
        raise OSError("the disk")

    async def handler(payload: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(broken))

    shown = run(handler).facts["traceback"]
    assert "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)" in shown
    assert "OSError: the disk" in shown
    assert "in broken" in shown


def test_a_group_of_groups_100_000_deep_costs_no_stack() -> None:
    error: Exception = ValueError("the bottom")
    for _ in range(100_000):
        error = ExceptionGroup("g", [error])
    try:
        shown = run(raising(error)).facts["traceback"]
    finally:
        while isinstance(error, ExceptionGroup):  # taken apart from outside: recursion would overflow
            error = error.exceptions[0]
    assert "ValueError: the bottom" in shown


@pytest.mark.django_db
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_text)
def test_any_error_text_can_be_stored(message: str) -> None:
    job = make_job()
    assert process_one({"test.job": raising(type("É" * 300, (Exception,), {})(message))})
    job.refresh_from_db()
    assert job.status == "dead"
    assert job.last_error.startswith("tests.test_executor.ÉÉÉ") or "ÉÉÉ" in job.last_error
    assert job.history[-1]["event"] == "bury"


@pytest.mark.django_db
@pytest.mark.parametrize("message", ["\udcff", "a\udcffb"])
def test_any_error_text_can_be_logged(message: str, caplog: pytest.LogCaptureFixture) -> None:
    make_job()
    assert process_one({"test.job": raising(ValueError(message))})
    assert "ValueError" in caplog.text
    caplog.text.encode()


# --- Whose fault it was --------------------------------------------------------------------------


def outage() -> OperationalError:
    error = OperationalError("terminating connection")
    error.__cause__ = psycopg.errors.lookup("57P01")("terminating connection")
    return error


def test_an_outage_is_not_charged_if_the_queues_database_is_away_too() -> None:
    outcome = run(raising(outage()), attempt=3, reachable=lambda: False)
    assert (outcome.move.name, outcome.delay) == ("release", executor.OUTAGE_DELAY)
    assert outcome.facts["reason"] == "the queue's database was out of reach"
    assert outcome.facts["outage"] is True
    assert "terminating connection" in outcome.facts["traceback"]
    assert outcome.charged is not None
    assert (outcome.charged.move.name, outcome.charged.error) == (
        "bury",
        "django.db.utils.OperationalError: terminating connection",
    )


def test_an_outage_of_some_other_database_is_the_jobs_own() -> None:
    outcome = run(raising(outage()), reachable=lambda: True)
    assert (outcome.move.name, outcome.charged) == ("retry", None)


def test_an_error_that_is_no_outage_asks_no_database() -> None:
    assert run(raising(IntegrityError("twice")), reachable=unasked).move.name == "retry"


@pytest.mark.django_db
@pytest.mark.parametrize("released_before", [9, 10])
def test_an_outage_is_charged_after_ten_in_a_row(released_before: int) -> None:
    history = [{"event": "release", "outage": True}] * released_before
    job = make_job(status="running", max_attempts=3, history=[{"event": "retry"}, *history])
    error = run(raising(outage()), max_attempts=3, reachable=lambda: False)
    charged = Outcome(job, error.charged.move, delay=1.0, error="charged") if error.charged else None
    Job.objects.finish([Outcome(job, error.move, delay=1.0, facts=error.facts, charged=charged)])
    job.refresh_from_db()
    assert job.attempts == (0 if released_before == 9 else 1)
    assert job.history[-1]["event"] == ("release" if released_before == 9 else "retry")


# --- Time ----------------------------------------------------------------------------------------


def cancels(context: JobContext, *, late: bool = False) -> None:
    """Tell the handler to stop as soon as it listens, from another thread as the worker does."""

    def body() -> None:
        wait_for(lambda: context.on_stop is not None, interval=0.001)
        if late:
            context.deadline = time.monotonic()
        context.tell()

    threading.Thread(target=body).start()


async def endless(payload: Any) -> None:
    await asyncio.Event().wait()


def runs_late(context: JobContext) -> None:
    cancels(context, late=True)


def begins_late(context: JobContext) -> None:
    context.deadline = time.monotonic()
    context.tell()


@pytest.mark.parametrize("late", [runs_late, begins_late])
def test_an_async_handler_is_cancelled_when_its_time_is_over_and_the_row_says_timeout(late: Any) -> None:
    outcome = run(endless, timeout=5, meanwhile=late)
    assert outcome.move.name == "retry"
    assert (outcome.error or "").startswith("Timeout: the handler was still running")
    assert "its limit is 5 s." in (outcome.error or "")


@pytest.mark.parametrize("goes", [cancels, JobContext.revoke], ids=["while it runs", "before it begins"])
def test_an_async_handler_is_cancelled_when_its_claim_is_gone(goes: Any) -> None:
    outcome = run(endless, meanwhile=goes)
    assert outcome.error == "asyncio.exceptions.CancelledError"


def test_an_async_handler_can_clean_up_when_it_is_cancelled() -> None:
    async def careful(payload: Any) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            return "tidy"
        return "never"

    assert run(careful, meanwhile=cancels).result == '"tidy"'


def test_a_sync_handler_sees_that_its_time_is_over() -> None:
    def handler(payload: Any, context: Any) -> bool:
        return bool(context.should_stop)

    def late(context: JobContext) -> None:
        context.deadline = time.monotonic()

    assert run(handler, timeout=5, meanwhile=late).result == "true"


# --- Nothing leaks -------------------------------------------------------------------------------

variable = contextvars.ContextVar("variable", default="clean")


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_that_a_handler_sets_reaches_the_next_job(is_async: bool) -> None:
    def leave() -> list[str]:
        before = [variable.get(), translation.get_language(), timezone.get_current_timezone_name()]
        variable.set("dirty")
        translation.activate("fr")
        timezone.activate("Asia/Tokyo")
        return before

    async def async_handler(payload: Any) -> list[str]:
        return leave()

    handler = async_handler if is_async else lambda payload: leave()
    results = [run(handler).result for _ in range(2)]
    assert results == ['["clean","en","UTC"]'] * 2
    assert (variable.get(), translation.get_language()) == ("clean", "en")


@pytest.mark.django_db(transaction=True)
def test_async_jobs_in_threads_never_share_a_transaction() -> None:
    """Five with a transaction open at once, of which one rolls back."""
    at_once = threading.Barrier(5) if connection.vendor == "postgresql" else threading.Barrier(1)

    def body(index: int) -> str:
        async def handler(payload: Any) -> None:
            set_autocommit = sync_to_async(transaction.set_autocommit)
            await set_autocommit(False)
            await Group.objects.acreate(name=f"group {index}")
            await asyncio.to_thread(at_once.wait, 20)
            end = transaction.rollback if index == 2 else transaction.commit
            await sync_to_async(end)()
            await set_autocommit(True)

        with between.jobs():
            return run(handler).move.name

    assert in_threads(5, body) == ["complete"] * 5
    names = Group.objects.order_by("name").values_list("name", flat=True)
    assert list(names) == ["group 0", "group 1", "group 3", "group 4"]


# --- What bites ------------------------------------------------------------------------------------


class _Biting(type):
    """The metaclass of classes that cannot even be named."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__module__", "__qualname__", "__name__"):
            raise MemoryError("no memory for a name")
        return super().__getattribute__(name)


class Unnameable(Exception, metaclass=_Biting):
    pass


@pytest.mark.parametrize("handler", [raising(Unnameable()), lambda payload: Unnameable()])
def test_an_end_that_cannot_be_described_is_a_failed_attempt_all_the_same(
    handler: Callable[[Any], Any],
) -> None:
    outcome = run(handler)
    assert outcome.move.name in ("retry", "fail")
    assert outcome.error


def test_a_handler_that_forks_and_comes_back_twice_is_one_worker_still() -> None:
    def handler(payload: Any) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks beside threads
            child = os.fork()
        if child == 0:
            return 0
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    here = os.getpid()
    outcome = run(handler)
    if os.getpid() != here:
        os._exit(99)  # the child got out of the executor: its parent, waiting in the handler, will tell
    assert outcome.result == "1"


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_outage_that_a_handler_wraps_into_an_error_of_its_own_is_one_still(wrapped: bool) -> None:
    def handler(payload: Any) -> None:
        try:
            raise OperationalError("server closed the connection unexpectedly")
        except OperationalError as error:
            if wrapped:
                raise ValueError("could not save") from error
            raise ValueError("could not save")  # noqa: B904

    assert run(handler, reachable=lambda: False).move.name == "release"
    assert run(handler, reachable=lambda: True).move.name == "retry"


@pytest.mark.postgres_only
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("block", [transaction.atomic, nullcontext])
def test_a_job_whose_connection_was_cut_is_released_also_inside_atomic(block: Callable[[], Any]) -> None:
    def handler(payload: Any) -> None:
        with block(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    row = make_job(type="t")
    assert process_one({"t": handler})
    row.refresh_from_db()
    assert (row.status, row.attempts) == ("ready", 0)
    assert row.history[-1]["outage"]
