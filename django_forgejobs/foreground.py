"""One job in the calling thread: what ``process_one`` and ``drain`` do. No loop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from django.db import Error as DatabaseError
from django.db import connections

from django_forgejobs import between, conf, executor, intake, registry, signals
from django_forgejobs.context import JobContext
from django_forgejobs.lanes import Suspects
from django_forgejobs.lease import LeaseKeeper
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.registry import Definition
from django_forgejobs.states import COMPLETE
from django_forgejobs.worker import identity

#: Seconds for which an end is tried to be written whose row somebody has locked.
PATIENCE = 30.0


def process(handlers: Mapping[str, Callable[..., Any]] | None, *, queue: str, db: str | None) -> bool:
    """Claim, run and finish one job here; return whether there was one. See ``queue.process_one``."""
    alias = Job.objects.alias(db)
    intake.queues((queue,))
    definitions = registry.definitions(handlers)
    types = tuple(definitions) if handlers is None else None
    with CtrlC() as ctrl_c:
        claimed = Job.objects.claim(
            worker=identity(), queues=(queue,), types=types, suspects=Suspects.FIRST, db=alias
        )
        for job in claimed:
            signals.send(signals.started, job=job)
            run = _in_transaction if between.depths()[alias] else _alone
            run(job, definitions[job.type], alias, ctrl_c)
    return bool(claimed)


class CtrlC:
    """Tells a person's Ctrl-C from a ``KeyboardInterrupt`` that a handler raises.

    Pressed while a handler runs, it is raised in it. Pressed before or after, it waits for the end of the job
    to be written, so that no claim is left behind; a second one does not wait.
    """

    def __init__(self) -> None:
        self.pressed = False
        #: Whether a handler was interrupted by it.
        self.interrupted = False
        self._handling = False
        main = threading.current_thread() is threading.main_thread()
        self._ours = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def __enter__(self) -> CtrlC:
        if self._ours:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.pressed and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt

    def _press(self, number: int, frame: Any) -> None:
        again, self.pressed = self.pressed, True
        self.interrupted = self.interrupted or self._handling
        if again or self._handling:
            raise KeyboardInterrupt

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Let it interrupt the block."""
        try:
            self._handling = True
            if self.pressed:
                self._press(signal.SIGINT, None)
            yield
        finally:
            self._handling = False


def _alone(job: Job, definition: Definition, db: str, ctrl_c: CtrlC) -> None:
    """Run ``job`` with a lease thread beside it, and clean up after it."""
    settings = conf.current()
    with LeaseKeeper(db=db, lease=settings.LEASE, heartbeat=settings.HEARTBEAT) as keeper:
        context = JobContext(job, lease=settings.LEASE, renew=keeper.ask, timeout=definition.timeout)
        keeper.add(context)
        try:
            with between.jobs():
                outcome = _run(job, definition, context, ctrl_c, lambda: between.reachable(db))
            context.over = True
            _write(outcome, db)
        finally:
            keeper.remove(context)


def _in_transaction(job: Job, definition: Definition, db: str, ctrl_c: CtrlC) -> None:
    """Run ``job`` on the caller's connection, inside the caller's transaction.

    No lease thread (it could not see the row) and no clean-up (it would roll the caller back); a savepoint
    keeps the transaction usable when the handler breaks it.
    """
    settings = conf.current()

    def renew(context: JobContext) -> bool:
        return bool(Job.objects.renew({context.job_id: context.claim_token}, db=db))

    context = JobContext(job, lease=settings.LEASE, renew=renew, timeout=definition.timeout)
    connection = connections[db]
    savepoint = str(connection.savepoint())  # transaction.savepoint() is deprecated in Django 6.1
    open_blocks = list(connection.atomic_blocks), list(connection.savepoint_ids)
    callbacks = list(connection.run_on_commit)
    # An outage takes the caller's transaction with it, so there is nothing to probe.
    outcome = _run(job, definition, context, ctrl_c, lambda: True)
    try:
        if connection.needs_rollback or connection.savepoint_ids != open_blocks[1]:
            raise DatabaseError("The handler left its transaction broken or open; what it did is undone.")
        connection.savepoint_commit(savepoint)
    except DatabaseError as error:
        connection.atomic_blocks[:], connection.savepoint_ids[:] = open_blocks
        connection.run_on_commit = callbacks
        connection.needs_rollback = False
        connection.savepoint_rollback(savepoint)
        outcome = executor.undone(outcome, definition, error)
    Job.objects.finish([outcome], db=db)


def _run(
    job: Job,
    definition: Definition,
    context: JobContext,
    ctrl_c: CtrlC,
    reachable: Callable[[], bool],
) -> Outcome:
    outcome = interrupted = executor.released(job, "interrupted by Ctrl-C", delay=0.0)
    try:
        with _told_at(context), ctrl_c.heard():
            outcome = executor.execute(job, definition, context, reachable=reachable, before=between.depths())
    except KeyboardInterrupt:  # beside the handler: what that raises, execute() has caught
        if not ctrl_c.interrupted:
            raise
    # A handler that caught it and came to its end is done.
    return interrupted if ctrl_c.interrupted and outcome.move is not COMPLETE else outcome


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
