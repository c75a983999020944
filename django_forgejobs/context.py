"""What a handler may ask about its own job while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from django_forgejobs.models import Job


class JobContext:
    """One claim, as its handler sees it: passed to handlers that have a ``context`` parameter.

    The lease thread writes to it, the handler reads; each field is one assignment, so no lock is needed.
    """

    def __init__(
        self,
        job: Job,
        *,
        lease: float,
        renew: Callable[[JobContext], bool],
        timeout: float | None = None,
    ) -> None:
        now = time.monotonic()
        self.db: str = job._state.db  # type: ignore[assignment] # the alias of the queue's database
        self.job_id: int = job.id
        self.type: str = job.type
        self.attempt: int = job.attempts
        self.max_attempts: int = job.max_attempts
        self.claim: int = job.claims
        self.claim_token: UUID = job.claim_token  # type: ignore[assignment]
        self.lease = lease
        self.renewed_at = now
        self.deadline = None if timeout is None else now + timeout
        self.revoked = False
        self.stopping = False
        self.over = False
        self.on_stop: Callable[[], object] | None = None
        self._renew = renew

    def heartbeat(self) -> bool:
        """Return whether the claim is still this handler's; ``False`` means somebody else may have it.

        Safe anywhere: inside a worker the lease thread answers on its own connection. While the database
        cannot be reached the answer is the last one known.
        """
        return not self.revoked and self._renew(self)

    @property
    def lease_lost(self) -> bool:
        """Whether the claim is gone, or could not be renewed for as long as the lease."""
        return self.revoked or time.monotonic() - self.renewed_at > self.lease

    @property
    def should_stop(self) -> bool:
        """Whether to come to an end: timeout, lost lease, or a worker that is shutting down.

        A handler that can be continued raises ``Snooze(in_=0)``; the attempt is not charged.
        """
        return self.late or self.stopping or self.lease_lost

    @property
    def late(self) -> bool:
        """Whether the type's timeout is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def revoke(self) -> None:
        """Note that the claim is gone, and tell the handler."""
        self.revoked = True
        self.tell()

    def tell(self) -> None:
        """Cancel an async handler; a sync one sees ``should_stop``."""
        stop = self.on_stop
        if stop is not None:
            with suppress(RuntimeError):  # its loop has closed meanwhile: it is over anyway
                stop()


_lock = threading.Lock()
_live: dict[UUID, JobContext] = {}


def enter(*contexts: JobContext) -> None:
    """Make ``contexts`` findable by their tokens in this process."""
    with _lock:
        _live.update((context.claim_token, context) for context in contexts)


def leave(*contexts: JobContext) -> None:
    """Forget ``contexts``."""
    with _lock:
        for context in contexts:
            _live.pop(context.claim_token, None)


def live(claim_token: UUID) -> JobContext | None:
    """Return the context of a job that this process is running."""
    return _live.get(claim_token)
