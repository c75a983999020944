"""Run the handler of one claimed job and turn whatever happens into an outcome. Writes nothing."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
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


def execute(
    job: Job, definition: Definition, context: JobContext, *, reachable: Callable[[], bool]
) -> Outcome:
    """Run ``job`` and return its outcome; never raises, whatever the handler raises.

    The handler runs in a copy of the current context, so nothing it sets there reaches the next job. If
    the process dies inside, the row is still ``running`` and its lease will end. ``reachable`` is asked
    when the handler ends with a database error that looks like an outage.
    """
    started = time.monotonic()
    try:
        return _outcome(job, definition, context, reachable)
    except BaseException:  # not even its end could be described: out of memory, a class that bites
        error = RuntimeError("The attempt ended by an error that could not be described.")
        return _attempt_failed(job, definition, error, time.monotonic() - started)


def _outcome(job: Job, definition: Definition, context: JobContext, reachable: Callable[[], bool]) -> Outcome:
    started, depths, process = time.monotonic(), between.depths(), os.getpid()
    try:
        try:
            value = contextvars.copy_context().run(_call, definition, job, context)
        finally:
            if os.getpid() != process:
                os._exit(1)  # the handler forked and came back as the child, on its parent's connections
        _refuse_open_transactions(depths)
    except BaseException as error:
        seconds = time.monotonic() - started
        if isinstance(error, asyncio.CancelledError) and context.late:
            return timed_out(job, definition, seconds)
        return _failure(job, definition, error, seconds, reachable)
    done = Outcome(job, COMPLETE, seconds=time.monotonic() - started)
    if value is None:
        return done
    try:
        limit = conf.current().PAYLOAD_MAX_BYTES
        return replace(done, result=payloads.dumps(value, name="result", max_bytes=limit))
    except (JobError, MemoryError) as error:
        return done.unstorable(error)


def timed_out(job: Job, definition: Definition, seconds: float) -> Outcome:
    """Return the outcome of a job that has not come back ``seconds`` after its start."""
    text = (
        f"Timeout: the handler was still running {seconds:.1f} s after its start; its limit is "
        f"{definition.timeout:g} s."
    )
    error = TimeoutError(text)
    return _attempt_failed(job, definition, error, seconds, text=text)


def undone(outcome: Outcome, definition: Definition, error: BaseException) -> Outcome:
    """Return ``outcome``, but a failed attempt if a job would be done whose effects were rolled back."""
    if outcome.move is not COMPLETE:
        return outcome
    return _attempt_failed(outcome.job, definition, error, outcome.seconds)


def released(job: Job, reason: str, *, delay: float = 1.0) -> Outcome:
    """Return the outcome of a job whose worker stops before the handler is through."""
    return Outcome(job, RELEASE, delay=delay, facts={"reason": reason})


def _call(definition: Definition, job: Job, context: JobContext) -> Any:
    if isinstance(job.payload, Unreadable):
        raise PermanentError(f"The payload cannot be read: {job.payload.problem}")
    offered = {"claim_token": job.claim_token, "context": context}
    extra = {name: offered[name] for name in definition.wants}
    if inspect.iscoroutinefunction(definition.handler):
        return _call_async(definition.handler(job.payload, **extra), context)
    value = definition.handler(job.payload, **extra)
    return _call_async(value, context) if inspect.isawaitable(value) else value


def _refuse_open_transactions(before: Mapping[str, int]) -> None:
    """Raise if the handler came back deeper in a transaction than it went: a job is not done whose work
    is rolled back before the next.
    """
    for alias, depth in between.depths().items():
        if depth > before.get(alias, 0):
            raise RuntimeError(
                f'The handler left a transaction open on "{alias}" (or autocommit off); what it did there is '
                'rolled back. Use a block, "with transaction.atomic():".'
            )


def _call_async(awaitable: Any, context: JobContext) -> Any:
    """Run ``awaitable`` on a loop of its own.

    ``async_to_sync`` runs its ``sync_to_async`` parts (the ORM) on this very thread, hence on this
    thread's connection: two async jobs never share a transaction.
    """

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        context.on_stop = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await awaitable
        finally:
            context.on_stop = None

    return async_to_sync(run)()


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
