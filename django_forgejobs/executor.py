"""Run the handler of one claimed job and turn whatever happens into an outcome. Writes nothing."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import async_to_sync

from django_forgejobs import backoff, between, conf, failures, faults, payloads
from django_forgejobs.exceptions import JobError, PermanentError, Retry, Snooze
from django_forgejobs.fields import Unreadable
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import BURY, COMPLETE, FAIL, RELEASE, RETRY, SNOOZE

if TYPE_CHECKING:
    from django_forgejobs.context import JobContext
    from django_forgejobs.models import Job
    from django_forgejobs.registry import Definition

#: Seconds before a job that an outage released is due again.
OUTAGE_DELAY = 5.0


@dataclass(slots=True)
class Ending:
    """How a handler came back: with a ``value`` or an ``error``, ``seconds`` after it was called."""

    seconds: float
    value: Any = None
    error: BaseException | None = None


#: How deep a thread's connections are in transactions between two jobs.
NOT_AT_ALL: Mapping[str, int] = {}


def execute(
    job: Job,
    definition: Definition,
    context: JobContext,
    *,
    reachable: Callable[[], bool],
    before: Mapping[str, int] = NOT_AT_ALL,
) -> Outcome:
    """Run ``job`` on this thread and return its outcome; never raises, whatever the handler raises.

    The handler runs in a copy of the current context, so nothing it sets there reaches the next job. If
    the process dies inside, the row is still ``running`` and its lease will end. ``reachable`` is asked
    when the handler ends with a database error that looks like an outage. ``before`` is how deep the
    caller's own transactions are, as ``between.depths`` says.
    """
    started = time.monotonic()
    try:
        ending = contextvars.copy_context().run(_call, job, definition, context)
        return _judge(job, definition, context, ending, before, reachable)
    except BaseException:
        return _indescribable(job, definition, time.monotonic() - started)


def _call(job: Job, definition: Definition, context: JobContext) -> Ending:
    started, process = time.monotonic(), os.getpid()
    try:
        value = _invoke(job, definition, context)
        if value is not None and inspect.isawaitable(value):
            # ``async_to_sync`` runs its ``sync_to_async`` parts (the ORM) on this very thread, hence on this
            # thread's connection: two async jobs never share a transaction.
            value = async_to_sync(_await)(value, context)
        return Ending(time.monotonic() - started, value)
    except BaseException as error:
        return Ending(time.monotonic() - started, error=error)
    finally:
        _stay_the_parent(process)


async def acall(job: Job, definition: Definition, context: JobContext) -> Ending:
    """Await the handler of ``job`` on this loop and return how it ended; never raises.

    The current task is cancelled when ``context`` is told to stop; so it must not wait for anything after the
    handler's end, when that may still reach it. ``judge`` makes an outcome of it.
    """
    started, process = time.monotonic(), os.getpid()
    try:
        value = await _await(_invoke(job, definition, context), context)
        return Ending(time.monotonic() - started, value)
    except BaseException as error:  # SystemExit too: out of a task it would take the loop with it
        return Ending(time.monotonic() - started, error=error)
    finally:
        _stay_the_parent(process)


def judge(
    job: Job,
    definition: Definition,
    context: JobContext,
    ending: Ending,
    *,
    reachable: Callable[[], bool],
    before: Mapping[str, int] | None = None,
) -> Outcome:
    """Return what the ``ending`` of an async handler means, on the thread whose connections it used; never
    raises. ``before`` is how deep they were in transactions; None if it had no connection.
    """
    try:
        return _judge(job, definition, context, ending, before, reachable)
    except BaseException:
        return _indescribable(job, definition, ending.seconds)


def _invoke(job: Job, definition: Definition, context: JobContext) -> Any:
    if isinstance(job.payload, Unreadable):
        raise PermanentError(f"The payload cannot be read: {job.payload.problem}")
    if not definition.wants:
        return definition.handler(job.payload)
    offered = {"claim_token": job.claim_token, "context": context}
    return definition.handler(job.payload, **{name: offered[name] for name in definition.wants})


async def _await(awaitable: Awaitable[Any], context: JobContext) -> Any:
    """Await it; when ``context`` is told to stop, cancel the task that does."""
    loop = asyncio.get_running_loop()
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    context.on_stop = lambda: loop.call_soon_threadsafe(task.cancel)
    try:
        if context.revoked or context.late:  # told before there was anybody to hear it
            task.cancel()
        return await awaitable
    finally:
        context.on_stop = None


def _stay_the_parent(process: int) -> None:
    if os.getpid() != process:
        os._exit(1)  # the handler forked and came back as the child, on its parent's connections


def _judge(
    job: Job,
    definition: Definition,
    context: JobContext,
    ending: Ending,
    before: Mapping[str, int] | None,
    reachable: Callable[[], bool],
) -> Outcome:
    error, seconds = ending.error, ending.seconds
    if error is None and before is not None:
        error = _transaction_left_open(before)
    if error is not None:
        if isinstance(error, asyncio.CancelledError) and context.late:
            return timed_out(job, definition, seconds)
        return _failure(job, definition, error, seconds, reachable)
    if ending.value is None:
        return Outcome(job, COMPLETE, seconds=seconds)
    try:
        limit = conf.current().PAYLOAD_MAX_BYTES
        result = payloads.dumps(ending.value, name="result", max_bytes=limit)
    except (JobError, MemoryError) as wrong:
        return Outcome(job, COMPLETE, seconds=seconds).unstorable(wrong)
    return Outcome(job, COMPLETE, result=result, seconds=seconds)


def _transaction_left_open(before: Mapping[str, int]) -> RuntimeError | None:
    """Return an error if the handler came back deeper in a transaction than it went: a job is not done whose
    work is rolled back before the next.
    """
    for alias, depth in between.depths().items():
        if depth > before.get(alias, 0):
            return RuntimeError(
                f'The handler left a transaction open on "{alias}" (or autocommit off); what it did there is '
                'rolled back. Use a block, "with transaction.atomic():".'
            )
    return None


def _indescribable(job: Job, definition: Definition, seconds: float) -> Outcome:
    """Return the outcome where even the end could not be described: out of memory, a class that bites."""
    error = RuntimeError("The attempt ended by an error that could not be described.")
    return _attempt_failed(job, definition, error, seconds)


def timed_out(job: Job, definition: Definition, seconds: float) -> Outcome:
    """Return the outcome of a job that has not come back ``seconds`` after its start."""
    text = (
        f"Timeout: the handler was still running {seconds:.1f} s after its start; its limit is "
        f"{definition.timeout:g} s."
    )
    error = TimeoutError(text)
    return _attempt_failed(job, definition, error, seconds, text=text)


def blocked(job: Job, definition: Definition, seconds: float) -> Outcome:
    """Return the outcome of a job that ran for ``seconds`` and let no other coroutine run."""
    error = TimeoutError(
        f"Timeout: the handler blocked the event loop; it had been running for {seconds:.1f} s. Await what "
        "takes time, or hand it to a thread with asyncio.to_thread(…)."
    )
    return _attempt_failed(job, definition, error, seconds, text=str(error))


def undone(outcome: Outcome, definition: Definition, error: BaseException) -> Outcome:
    """Return ``outcome``, but a failed attempt if a job would be done whose effects were rolled back."""
    if outcome.move is not COMPLETE:
        return outcome
    return _attempt_failed(outcome.job, definition, error, outcome.seconds)


def released(job: Job, reason: str, *, delay: float = 1.0) -> Outcome:
    """Return the outcome of a job whose worker stops before the handler is through."""
    return Outcome(job, RELEASE, delay=delay, facts={"reason": reason})


def _failure(
    job: Job,
    definition: Definition,
    error: BaseException,
    seconds: float,
    reachable: Callable[[], bool],
) -> Outcome:
    if isinstance(error, Snooze | Retry):
        return _said(job, definition, error, seconds)
    if isinstance(error, PermanentError):
        return Outcome(
            job,
            FAIL,
            error=failures.describe(error),
            facts=failures.facts(error),
            exception=error,
            seconds=seconds,
        )
    charged = _attempt_failed(job, definition, error, seconds)
    if faults.comes_from_outage(error) and not reachable():
        facts = {**failures.facts(error), "reason": "the queue's database was out of reach", "outage": True}
        return Outcome(job, RELEASE, delay=OUTAGE_DELAY, facts=facts, seconds=seconds, charged=charged)
    return charged


def _said(job: Job, definition: Definition, word: Retry | Snooze, seconds: float) -> Outcome:
    """Carry out ``Retry`` and ``Snooze``; an ``in_`` that is no duration is the handler's bug."""
    try:
        delay = None if word.in_ is None else conf.seconds(word.in_)
    except ValueError as error:
        wrong = ValueError(f"{type(word).__name__}(in_={payloads.in_words(word.in_)}): {error}")
        return _attempt_failed(job, definition, wrong, seconds)
    if isinstance(word, Snooze):
        return Outcome(job, SNOOZE, delay=delay, facts={"reason": failures.message(word)}, seconds=seconds)
    return _attempt_failed(job, definition, word, seconds, delay=delay)


def _attempt_failed(
    job: Job,
    definition: Definition,
    error: BaseException,
    seconds: float,
    *,
    delay: float | None = None,
    text: str | None = None,
) -> Outcome:
    text = failures.describe(error) if text is None else text
    if job.attempts >= job.max_attempts:
        return Outcome(job, BURY, error=text, facts=failures.facts(error), exception=error, seconds=seconds)
    if delay is None:
        fallback = conf.current().BACKOFF
        policy = fallback if definition.backoff is None else definition.backoff
        delay = backoff.delay(policy, job.attempts, error, fallback=fallback)
    return Outcome(
        job, RETRY, delay=delay, error=text, facts=failures.facts(error), exception=error, seconds=seconds
    )
