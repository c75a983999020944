"""One job in the calling thread: what ``process_one`` and ``drain`` do. No loop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from django.db import Error as DatabaseError
from django.db import connections, transaction

from django_forgejobs import between, conf, executor, registry, signals
from django_forgejobs.context import JobContext
from django_forgejobs.lease import LeaseKeeper
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.registry import Definition
from django_forgejobs.sql import Suspects
from django_forgejobs.worker import identity

#: Seconds for which an end is tried to be written whose row somebody has locked.
PATIENCE = 30.0


def process(handlers: Mapping[str, Callable[..., Any]] | None, *, queue: str, db: str | None) -> bool:
    """Claim, run and finish one job here; return whether there was one. See ``queue.process_one``."""
    alias = Job.objects.alias(db)
    definitions = registry.definitions(handlers)
    types = tuple(definitions) if handlers is None else None
    claimed = Job.objects.claim(
        worker=identity(), queues=(queue,), types=types, suspects=Suspects.FIRST, db=alias
    )
    for job in claimed:
        signals.send(signals.started, job=job)
        run = _in_transaction if connections[alias].in_atomic_block else _alone
        run(job, definitions[job.type], alias)
    return bool(claimed)


def _alone(job: Job, definition: Definition, db: str) -> None:
    """Run ``job`` with a lease thread beside it, and clean up after it."""
    settings = conf.current()
    with (
        _ctrl_c() as pressed,
        LeaseKeeper(db=db, lease=settings.LEASE, heartbeat=settings.HEARTBEAT) as keeper,
    ):
        context = JobContext(job, lease=settings.LEASE, renew=keeper.ask, timeout=definition.timeout)
        keeper.add(context)
        try:
            with _told_at(context), between.jobs():
                outcome = executor.execute(job, definition, context, reachable=lambda: between.reachable(db))
            context.over = True
            if pressed:
                outcome = executor.released(job, "interrupted by Ctrl-C", delay=0.0)
            _write(outcome, db)
        finally:
            keeper.remove(context)
    if pressed:
        raise KeyboardInterrupt


def _in_transaction(job: Job, definition: Definition, db: str) -> None:
    """Run ``job`` on the caller's connection, inside the caller's transaction.

    No lease thread (it could not see the row) and no clean-up (it would roll the caller back); a savepoint
    keeps the transaction usable when the handler breaks it.
    """
    settings = conf.current()

    def renew(context: JobContext) -> bool:
        return bool(Job.objects.renew({context.job_id: context.claim_token}, db=db))

    context = JobContext(job, lease=settings.LEASE, renew=renew, timeout=definition.timeout)
    savepoint = transaction.savepoint(using=db)
    # An outage takes the caller's transaction with it, so there is nothing to probe.
    outcome = executor.execute(job, definition, context, reachable=lambda: True)
    try:
        if transaction.get_rollback(using=db):
            raise DatabaseError("the handler left a broken transaction")
        transaction.savepoint_commit(savepoint, using=db)
    except DatabaseError:
        transaction.set_rollback(False, using=db)
        transaction.savepoint_rollback(savepoint, using=db)
    Job.objects.finish([outcome], db=db)


def _write(outcome: Outcome, db: str) -> None:
    """Write ``outcome``; wait a while for a row that somebody has locked, or a database that is away."""
    give_up = time.monotonic() + PATIENCE
    pause = threading.Event()
    while True:
        settlement = Job.objects.finish([outcome], db=db)
        if not settlement.waiting:
            return
        if settlement.outage is not None:
            between.close(connections[db])
        if time.monotonic() >= give_up:
            raise settlement.outage or TimeoutError(
                f"The end of job {outcome.job.pk} could not be written for {PATIENCE:g} s: somebody holds "
                "its row locked. Its lease will run out and it will run again."
            )
        pause.wait(0.05 if settlement.outage is None else 0.5)


@contextmanager
def _told_at(context: JobContext) -> Iterator[None]:
    """Tell an async handler when its time is over."""
    if context.deadline is None:
        yield
        return
    timer = threading.Timer(max(0.0, context.deadline - time.monotonic()), context.tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _ctrl_c() -> Iterator[list[bool]]:
    """Tell a person's Ctrl-C from a ``KeyboardInterrupt`` that a handler raises: only one fills the list."""
    pressed: list[bool] = []
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        with nullcontext():
            yield pressed
        return

    def press(number: int, frame: Any) -> None:
        pressed.append(True)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
