"""The coroutines of a worker: ``async def`` handlers by the hundred on one event loop in one thread, each in
a context of its own and with a database connection of its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext

from django_forgejobs import between, executor, faults, signals
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import GIVE_BACK

if TYPE_CHECKING:
    from django_forgejobs.board import Board
    from django_forgejobs.executor import Ending
    from django_forgejobs.threads import Running

logger = logging.getLogger("django_forgejobs")

#: Seconds without coming round after which the loop counts as blocked.
BLOCKED_AFTER = 1.0
#: Seconds that tasks and threads get which a handler left behind.
LEAVE_WITHIN = 5.0
#: Seconds that the loop gets to close.
CLOSE_WITHIN = 5.0


class JobLoop:
    """One event loop in a daemon thread, started by the first job; it runs up to ``limit`` jobs at once, the
    rest wait in the order of their handing out.

    ``ended`` is called with each job and its outcome, from any thread, when nothing of the job is left: no
    task, no thread, no connection. A job that uses no ORM (and no other ``sync_to_async``) costs neither.
    """

    def __init__(
        self, db: str, *, limit: int, ended: Callable[[Running, Outcome], object], board: Board
    ) -> None:
        self.db, self.limit, self.ended, self.board = db, limit, ended, board
        self._last_priority = 0
        self._waiting: deque[Running] = deque()
        self._places: set[_Place] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._called = False
        self._dismissed = False
        self._asked_at: float | None = None
        self._asks_at = 0.0
        self._complained = False
        self._abandoned: set[Future[Any]] = set()
        # Whether handlers may have connections on the loop's own thread.
        self._unsafe = bool(os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"))

    # --- from the worker's thread ------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many jobs wait for their turn."""
        return len(self._waiting)

    def hand_out(self, batch: list[Running]) -> None:
        """Have ``batch``, which is in claim order, run as there is room for it. What waits already and is
        less urgent runs after it.
        """
        if self._waiting and batch[0].job.priority > self._last_priority:
            batch = sorted(self.take_back() + batch, key=lambda running: -running.job.priority)
        self._last_priority = batch[-1].job.priority
        self._waiting.extend(batch)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._main, name="forgejobs-loop", daemon=True)
            self._thread.start()
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._fill, context=contextvars.Context())

    def take_back(self, keep: int = 0) -> list[Running]:
        """Return the jobs that have not begun, but for the first ``keep``, and let none of them begin."""
        waiting: deque[Running] = deque()
        try:
            while len(self._waiting) > keep:
                waiting.appendleft(self._waiting.pop())
        except IndexError:
            pass
        return list(waiting)

    def ask(self) -> None:
        """Find out whether the loop comes round."""
        if self._asked_at is None and self._loop is not None:
            self._asked_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._came_round)

    def blocked_since(self) -> float | None:
        """Return since when the loop has not come round, on the monotonic clock; None if it does. The first
        time, say who stands in its way. To be called about once a second.
        """
        now, asked_at = time.monotonic(), self._asked_at
        if asked_at is None:
            if self._places and now >= self._asks_at:
                self.ask()
            return None
        if now - asked_at < BLOCKED_AFTER:
            return None
        if not self._complained:
            self._complained = True
            self._complain()
        return asked_at

    def blocked_by(self) -> Running | None:
        """Return the job that the loop is at just now."""
        task = asyncio.current_task(self._loop)
        return next((place.running for place in list(self._places) if place.owns(task)), None)

    @property
    def abandoned(self) -> bool:
        """Whether calls go on whose jobs have ended: the interpreter would wait for them at its exit."""
        return bool(self._abandoned)

    def dismiss(self, *, wait: bool) -> None:
        """Cancel what still runs and close the loop; wait for that only if nothing is stuck."""
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._dismiss)
        if wait:
            self._thread.join(timeout=CLOSE_WITHIN)

    def _complain(self) -> None:
        blocker, thread = self.blocked_by(), self._thread
        frame = sys._current_frames().get(thread.ident or 0) if thread else None
        logger.warning(
            "%s blocks the event loop: %d other coroutines have waited for more than %g s. Await what takes "
            "time, or hand it to a thread with asyncio.to_thread(…). It is here:\n%s",
            blocker.job if blocker else "A callback",
            len(self._places) - bool(blocker),
            BLOCKED_AFTER,
            "".join(traceback.format_stack(frame, limit=8)) if frame else "",
        )

    # --- on the loop's thread ----------------------------------------------------------------------

    def _main(self) -> None:
        loop, pool = self._loop, _CleanPool(thread_name_prefix="forgejobs-to-thread")
        assert loop is not None  # set before the thread was started
        loop.set_default_executor(pool)
        loop.set_task_factory(_make_task)
        while not self._dismissed or self._places:
            try:
                loop.run_forever()
            except BaseException:  # SystemExit in a task: who awaits it is told too
                logger.exception("A task left the event loop by an exception; the loop goes on.")
        try:
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            loop.close()

    def _fill(self) -> None:
        self._called = False  # before looking: who adds a job from now on calls again
        while len(self._places) < self.limit and self._waiting:
            try:
                running = self._waiting.popleft()
            except IndexError:  # taken back
                return
            if running.context.lease_lost:
                self.ended(running, Outcome(running.job, GIVE_BACK))
            else:
                self._begin(running)

    def _begin(self, running: Running) -> None:
        running.start()
        slot = self.board.begin(running.job.id, running.overdue_at)
        place = _Place(running, self.db, partial(self._end, slot=slot))
        self._places.add(place)
        place.context.run(_enter, place)
        place.task = self._spawn(place, self._run(place))

    def _spawn(self, place: _Place, coroutine: Any) -> asyncio.Task[None]:
        """Make a task of our own in a job's context."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine, context=place.context)
        place.tasks.discard(task)
        return task

    async def _run(self, place: _Place) -> None:
        running = place.running
        try:
            if _heard_by_others():  # in a thread: who listens may use the ORM
                await asyncio.to_thread(signals.send, signals.started, job=running.job)
            else:
                signals.send(signals.started, job=running.job)
            try:
                ending = await executor.acall(running.job, running.definition, running.context)
            except BaseException as error:  # a GeneratorExit of the handler's passes all that await it
                ending = executor.Ending(time.monotonic() - (running.started or 0.0), error=error)
            # From here on nothing is awaited: the handler may have cancelled the task that it was.
            if place.left():
                self._spawn(place, self._leave(place, ending))
            else:
                self._finish(place, ending)
        except BaseException:
            self._fail(place)

    async def _leave(self, place: _Place, ending: Ending) -> None:
        """End what the handler started and did not wait for, lest it work on beside other jobs."""
        try:
            await asyncio.sleep(0)  # what was ending ends
            self._warn_of(place)
            told: set[asyncio.Task[Any]] = set()  # once: a second time would disturb a task that tidies up
            give_up = time.monotonic() + LEAVE_WITHIN
            while (left := place.left()) and (seconds := give_up - time.monotonic()) > 0:
                for task in place.tasks - told:
                    task.cancel()
                told |= place.tasks
                await asyncio.wait(left, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if left:
                self._abandon(place, left)
            self._finish(place, ending)
        except BaseException:
            self._fail(place)

    def _warn_of(self, place: _Place) -> None:
        names = [task.get_name() for task in place.tasks if not task.cancelling()]
        if names:
            logger.warning(
                "%s ended and left %d tasks behind, which are cancelled: %s. Await what you start, best in "
                "an asyncio.TaskGroup; start what is to outlive its job with context=contextvars.Context().",
                place.running.job,
                len(names),
                ", ".join(names[:5]),
            )

    def _abandon(self, place: _Place, left: list[asyncio.Future[Any]]) -> None:
        logger.error(
            "%s has ended, but %d of its tasks and threads have not within %g s, and go on: %s.",
            place.running.job,
            len(left),
            LEAVE_WITHIN,
            ", ".join(map(repr, left[:5])),
        )
        for call in list(place.calls):
            self._abandoned.add(call)
            call.add_done_callback(self._abandoned.discard)

    def _finish(self, place: _Place, ending: Ending) -> None:
        """Have the job judged where its connections are."""
        # A probe of the database needs a thread too.
        if place.has_thread or (ending.error is not None and faults.comes_from_outage(ending.error)):
            place.close(ending)
            return
        outcome = place.judge(ending, on_a_connection=self._unsafe)
        if self._unsafe:
            between.close_all()
        place.end(outcome)

    def _fail(self, place: _Place) -> None:
        """Give a job back that this module could not run, for want of a thread maybe."""
        logger.critical("Running %s failed.", place.running.job, exc_info=True)
        if place.has_thread:
            place.close()
        else:
            place.end(place.unfinished())

    def _end(self, place: _Place, outcome: Outcome, *, slot: int) -> None:
        """Hand a job back, from its own thread or the loop's."""
        self.board.end(slot)
        self.ended(place.running, outcome)
        if threading.current_thread() is self._thread:
            self._make_room(place)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._make_room, place, context=contextvars.Context())

    def _make_room(self, place: _Place) -> None:
        self._places.discard(place)
        del place.context, place.task  # or they would wait for the garbage collector
        if self._dismissed:
            self._dismiss()
        else:
            self._fill()

    def _came_round(self) -> None:
        if self._complained and self._asked_at is not None:
            logger.warning("The event loop came round after %.1f s.", time.monotonic() - self._asked_at)
        self._asks_at = time.monotonic() + BLOCKED_AFTER
        self._complained = False
        self._asked_at = None

    def _dismiss(self) -> None:
        self._dismissed = True
        for place in self._places:
            place.running.context.revoke()
        if not self._places:
            asyncio.get_running_loop().stop()


class _Place(Executor):
    """What one job has: a context, the tasks it started, its calls into the pool, and one thread for all that
    must run on its own connection (the ORM), begun by the first of it.
    """

    def __init__(self, running: Running, db: str, end: Callable[[_Place, Outcome], object]) -> None:
        self.running, self.db = running, db
        self.context = contextvars.Context()
        self.task: asyncio.Task[None]
        self.tasks: set[asyncio.Task[Any]] = set()
        self.calls: set[Future[Any]] = set()
        self._end = end
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._ending: Ending | None = None

    def owns(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether ``task`` is the job, or was started by it."""
        return task is not None and (task is getattr(self, "task", None) or task in self.tasks)

    def left(self) -> list[asyncio.Future[Any]]:
        """Return what the job started that has not ended."""
        return [*self.tasks, *(asyncio.wrap_future(call) for call in list(self.calls))]

    @property
    def has_thread(self) -> bool:
        """Whether anything had to run in the job's own thread."""
        return self._thread is not None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a call run in the job's thread. ``sync_to_async`` does."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self.running.job} has ended; nothing more can be run for it.")
            self._begin_thread()
            self._work.put(partial(_answer, future, fn, args, kwargs))
        return future

    def close(self, ending: Ending | None = None) -> None:
        """Have the job judged in its thread, after all that waits there, and end the thread."""
        with self._lock:
            self._begin_thread()
            self._closed = True
            self._ending = ending
            self._work.put(None)

    def judge(self, ending: Ending, *, on_a_connection: bool = True) -> Outcome:
        """Return what the ``ending`` means, on the thread that has the job's connections."""
        running = self.running
        return executor.judge(
            running.job,
            running.definition,
            running.context,
            ending,
            reachable=lambda: between.reachable(self.db),
            before=executor.NOT_AT_ALL if on_a_connection else None,
        )

    def unfinished(self) -> Outcome:
        """Return the outcome of a job that could not be run to its end, which was not its fault."""
        return executor.released(self.running.job, "it could not be run")

    def end(self, outcome: Outcome) -> None:
        """Hand the job back."""
        self._end(self, outcome)

    def _begin_thread(self) -> None:
        if self._thread is None:
            name = f"forgejobs-coroutine-{self.running.job.pk}"
            thread = threading.Thread(target=self._main, name=name, daemon=True)
            thread.start()  # raises if none can be had
            self._thread = thread

    def _main(self) -> None:
        outcome = self.unfinished()
        try:
            with between.jobs():
                while (work := self._work.get()) is not None:
                    work()
                    del work
                if self._ending is not None:
                    outcome = self.judge(self._ending)
        except BaseException:
            logger.critical("Cleaning up after %s failed.", self.running.job, exc_info=True)
        finally:
            between.close_all()
            self.end(outcome)


class _CleanPool(ThreadPoolExecutor):
    """The loop's threads for ``asyncio.to_thread`` and the like. They serve one job after another, so each
    call closes the connections that it opened; and a job is not over before its calls are.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(_cleanly, fn, *args, **kwargs)
        if (place := _mine.get(None)) is not None:
            place.calls.add(future)
            future.add_done_callback(place.calls.discard)
        return future


#: The job that code runs for.
_mine: contextvars.ContextVar[_Place] = contextvars.ContextVar("forgejobs_place")


def _make_task(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """Make a task, and note whose it is: the job's in whose context it runs."""
    task = asyncio.Task(coro, loop=loop, **kwargs)
    context = kwargs.get("context")
    place = _mine.get(None) if context is None else context.get(_mine)
    if place is not None:
        place.tasks.add(task)
        task.add_done_callback(place.tasks.discard)
    return task


def _enter(place: _Place) -> None:
    """Make this context that of ``place``, and ``place`` the executor of its ``sync_to_async``.

    What ``async with ThreadSensitiveContext()`` does, but its executor would be asgiref's, whose end blocks
    the loop in some versions and begins a thread in others.
    """
    sensitive = ThreadSensitiveContext()
    SyncToAsync.context_to_thread_executor[sensitive] = place
    SyncToAsync.thread_sensitive_context.set(sensitive)
    _mine.set(place)


def _cleanly(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        with between.jobs():
            return fn(*args, **kwargs)
    finally:
        between.close_all()


def _answer(future: Future[Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(fn(*args, **kwargs))
    except BaseException as error:
        future.set_exception(error)


def _heard_by_others() -> bool:
    """Whether somebody beside our own log listens to ``started``."""
    return any(not str(key[0]).startswith("django_forgejobs.") for key, *_ in signals.started.receivers)
