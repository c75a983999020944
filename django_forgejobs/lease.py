"""The lease thread: it renews every job that this process runs, in one statement, on a connection of its
own, until the last result is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.db import Error as DatabaseError

from django_forgejobs import between, context, faults
from django_forgejobs.context import JobContext
from django_forgejobs.models import Job

logger = logging.getLogger("django_forgejobs")

#: A handler that asks more often than this many seconds gets the last answer again.
FRESH = 1.0
#: Seconds a handler waits for an answer; then it gets the last one known.
ANSWER_WITHIN = 5.0
#: Longest pause, in seconds, between tries while the database cannot be reached.
RETRY_AT_MOST = 1.0


class LeaseKeeper:
    """Keeps the leases of one worker. ``add`` a context when its job is claimed, ``remove`` it when its
    end is written.

    A lease that cannot be renewed is not lost: only the database can say so. ``failed`` is set when the
    thread dies of something that is not an outage; a worker must then end.
    """

    def __init__(self, *, db: str, lease: float, heartbeat: float) -> None:
        self.db, self.lease, self.heartbeat = db, lease, heartbeat
        # Twice within the heartbeat that a reaper waits after an outage, or live workers would lose jobs.
        self.retry_every = min(RETRY_AT_MOST, heartbeat / 2)
        self.failed: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self.out_of_reach_since: float | None = None
        self._held: dict[int, JobContext] = {}
        self._wake = threading.Condition()
        self._asked = False
        self._rounds = 0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LeaseKeeper:
        self._thread = threading.Thread(target=self._run, name="forgejobs-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=ANSWER_WITHIN)

    def add(self, *held: JobContext) -> None:
        """Renew the leases of ``held`` from now on."""
        with self._wake:
            self._held.update((one.job_id, one) for one in held)
        context.enter(*held)

    def remove(self, *held: JobContext) -> None:
        """Stop renewing them: their ends are written, or their claims gone. Whoever still asks is told so."""
        for one in held:
            one.revoked = True
        context.leave(*held)
        with self._wake:
            for one in held:
                if self._held.get(one.job_id) is one:
                    del self._held[one.job_id]

    def ask(self, held: JobContext) -> bool:
        """Renew now on behalf of a handler, and return whether the claim is still its."""
        if time.monotonic() - held.renewed_at < FRESH or threading.current_thread() is self._thread:
            return not held.revoked
        with self._wake:
            seen = self._rounds
            self._asked = True
            self._wake.notify_all()
            # A round under way may have begun before the question: wait for one that has not.
            self._wake.wait_for(lambda: self._rounds > seen or self._stopped, ANSWER_WITHIN)
        return not held.revoked

    @property
    def healthy(self) -> bool:
        """Whether leases can be renewed just now; a worker that cannot takes no new jobs."""
        return self.failed is None and self.out_of_reach_since is None

    def _run(self) -> None:
        try:
            due = time.monotonic() + self.heartbeat
            while self._wait_until(due):
                due = time.monotonic() + (self.heartbeat if self._round() else self.retry_every)
        except BaseException as error:
            self.failed = error
            logger.critical("The lease thread died; the worker ends.", exc_info=True)
            self.on_failure()
        finally:
            between.close_all()

    def _wait_until(self, due: float) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._stopped or self._asked, max(0.0, due - time.monotonic()))
            self._asked = False
            return not self._stopped

    def _round(self) -> bool:
        """Renew all; return False when the database could not be reached."""
        with self._wake:
            held = dict(self._held)
        if not held:
            self.out_of_reach_since = None
            self._answered()
            return True
        started = time.monotonic()
        try:
            current = Job.objects.renew(
                {pk: one.claim_token for pk, one in held.items()}, lease=self.lease, db=self.db
            )
        except DatabaseError as error:
            if not faults.is_outage(error) and not faults.is_again(error):
                raise
            self._out_of_reach(error, started, held)
            return False
        if self.out_of_reach_since is not None:
            logger.warning("Leases are renewed again after %.1f s.", started - self.out_of_reach_since)
            self.out_of_reach_since = None
        for one in held.values():
            if one.claim_token in current:
                one.renewed_at = started
            elif not one.revoked:
                self._lost(one)
        self._answered()
        return True

    def _lost(self, one: JobContext) -> None:
        if one.over:
            return  # no handler to tell; whether its end was written, the finish itself finds out
        logger.warning(
            "Job %s %s: the lease of claim %s is gone (cancelled, or given to another worker). Its handler "
            "is told; its result will not be accepted.",
            one.job_id,
            one.type,
            one.claim,
        )
        one.revoke()

    def _out_of_reach(self, error: BaseException, started: float, held: dict[int, JobContext]) -> None:
        between.close_all()
        if self.out_of_reach_since is None:
            self.out_of_reach_since = started
        late = sum(one.lease_lost for one in held.values())
        logger.warning(
            "Leases cannot be renewed (%s): trying again every %g s, no new jobs meanwhile.%s",
            " ".join(str(error).split()) or type(error).__name__,
            self.retry_every,
            f" {late} of {len(held)} leases have run out." if late else "",
        )
        self._answered()

    def _answered(self) -> None:
        with self._wake:
            self._rounds += 1
            self._wake.notify_all()
