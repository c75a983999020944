"""What happened to a job, for whoever wants to know. Sent robustly: a receiver that raises is logged
and changes nothing.

``sender`` is the ``Job`` model, ``job`` the job as this process knows it; of a schedule's signals it is the
``Schedule`` model. ``enqueued`` is sent when the caller's transaction has committed; the others when the
database has the move.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

logger = logging.getLogger("django_forgejobs")

# Their receivers are looked up once, not for every job: that costs more than calling them.
enqueued = Signal(use_caching=True)  # job
started = Signal(use_caching=True)  # job
done = Signal(use_caching=True)  # job, seconds
#: What one statement wrote as done, before ``done`` is sent of each: for receivers that must be quick.
done_together = Signal(use_caching=True)  # outcomes (each with job, seconds)
retried = Signal(use_caching=True)  # job, error, delay (seconds), exception
failed = Signal(use_caching=True)  # job, error, exception: ended, retrying cannot cure it
dead = Signal(use_caching=True)  # job, error, exception: out of attempts, or its workers died
released = Signal(use_caching=True)  # job, reason
snoozed = Signal(use_caching=True)  # job, delay (seconds)
reclaimed = Signal(use_caching=True)  # job, error: its worker died, it is ready again
lost = Signal(use_caching=True)  # job, attempted: the claim was gone before the move called `attempted`
cancelled = Signal(use_caching=True)  # job, by
requeued = Signal(use_caching=True)  # job, by

slot_fired = Signal(use_caching=True)  # schedule, slot, job, late (seconds)
slots_skipped = Signal(use_caching=True)  # schedule, stretch (first, last, count), fate, reason
slot_left = Signal(
    use_caching=True
)  # schedule, slot, reason, grace (seconds): to a scheduler that knows the type
schedule_disabled = Signal(use_caching=True)  # schedule, reason: it cannot be understood


def send(signal: Signal, **facts: Any) -> None:
    """Send ``signal`` about a schedule or a job; what a receiver raises is logged and goes no further."""
    if not signal.receivers:
        return
    subject = facts.get("schedule") or facts.get("job") or facts["outcomes"][0].job
    try:
        signal.send_robust(sender=type(subject), **facts)
    except KeyboardInterrupt:
        raise
    except BaseException:  # send_robust() lets SystemExit and the like pass
        logger.exception("A receiver of a signal about %s failed.", subject)
