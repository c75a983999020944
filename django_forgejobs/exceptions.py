"""The errors callers see, and the words a handler uses to say how its attempt ended."""

from __future__ import annotations

from datetime import timedelta

__all__ = ["JobError", "PermanentError", "Retry", "Snooze"]


class JobError(Exception):
    """A call was refused and nothing was stored; the message carries the value and the remedy."""


class PermanentError(Exception):
    """Raised by a handler: trying again cannot help. The job ends as ``failed``."""


class Retry(Exception):
    """Raised by a handler: this attempt failed, try again ``in_`` seconds from now.

    ``in_`` is seconds or a ``timedelta``; ``None`` means the type's backoff. The attempt counts: on
    the last one the job is ``dead``.
    """

    def __init__(self, message: str = "", *, in_: float | timedelta | None = None) -> None:
        super().__init__(message or "the handler asked for a retry")
        self.in_ = in_


class Snooze(Exception):
    """Raised by a handler: not now, look again ``in_`` seconds from now.

    ``in_`` is seconds or a ``timedelta``. The attempt is given back, so this is unbounded by design: a
    handler that always snoozes runs for ever, and only its ``claims`` tell.
    """

    def __init__(self, message: str = "", *, in_: float | timedelta) -> None:
        super().__init__(message or "the handler asked to be called later")
        self.in_ = in_
