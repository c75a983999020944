"""Words for the log: working code sends a signal, a receiver here makes one line of it. Payloads never.

Also the handler that the commands add when the project has none that would show these lines.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django_forgejobs import failures, signals
from django_forgejobs.slots import Fate, Stretch

if TYPE_CHECKING:
    from django.dispatch import Signal

    from django_forgejobs.models import Job, Schedule
    from django_forgejobs.outcomes import Outcome

logger = logging.getLogger("django_forgejobs")

FORMATS = ("text", "json")

#: How many lines of each event this process has written, for a summary at its end.
counts: Counter[str] = Counter()

#: The slot of each schedule that was last left to another scheduler.
_left: dict[int, datetime] = {}

# Up to these an exception is handed to the log handlers as it is; beyond, our own bounded text is, since
# a handler formats all of it.
_MESSAGE_CHARACTERS = 10_000
_FRAMES = 500
_LINKS = 20


# --- One line an event ---------------------------------------------------------------------------


def connect() -> None:
    """Make a line of what the signals tell.

    Not of ``enqueued``: the web processes would pay for it, and their log is not ours to fill.
    """
    receivers: tuple[tuple[Signal, Callable[..., None]], ...] = (
        (signals.done_together, _done),
        (signals.retried, _retried),
        (signals.failed, _failed),
        (signals.dead, _dead),
        (signals.released, _released),
        (signals.snoozed, _snoozed),
        (signals.reclaimed, _reclaimed),
        (signals.lost, _lost),
        (signals.cancelled, _cancelled),
        (signals.requeued, _requeued),
        (signals.slot_fired, _slot_fired),
        (signals.slots_skipped, _slots_skipped),
        (signals.slot_left, _slot_left),
        (signals.schedule_disabled, _schedule_disabled),
    )
    if logger.isEnabledFor(logging.DEBUG):  # else no job shall pay for a line that nobody writes
        receivers = ((signals.started, _started), *receivers)
    for signal, receiver in receivers:
        signal.connect(receiver, dispatch_uid=f"django_forgejobs.logs{receiver.__name__}")


def _started(*, job: Job, **_: Any) -> None:
    _say(logging.DEBUG, "started", job, f"started ({_attempt(job)})")


def _done(*, outcomes: list[Outcome], **_: Any) -> None:
    told = _told(len(outcomes))
    counts["done"] += len(outcomes) - told
    for outcome in outcomes[:told]:
        text = f"done in {outcome.seconds:.2f} s ({_attempt(outcome.job)})"
        _say(logging.INFO, "done", outcome.job, text, seconds=round(outcome.seconds, 6))


def _retried(*, job: Job, error: str, delay: float | None, exception: BaseException | None, **_: Any) -> None:
    text = f"failed ({_attempt(job)}), again in {delay or 0:.1f} s: {_line(error)}"
    _say(logging.ERROR, "retried", job, text, exception, delay=delay)


def _failed(*, job: Job, error: str, exception: BaseException | None, **_: Any) -> None:
    text = f"failed for good ({_attempt(job)}): {_line(error)}"
    _say(logging.ERROR, "failed", job, text, exception)


def _dead(*, job: Job, error: str, exception: BaseException | None, **_: Any) -> None:
    _say(logging.ERROR, "dead", job, f"dead ({_attempt(job)}): {_line(error)}", exception)


def _released(*, job: Job, reason: str, **_: Any) -> None:
    _say(logging.INFO, "released", job, f"given back, attempt not charged: {_line(reason)}")


def _snoozed(*, job: Job, delay: float | None, **_: Any) -> None:
    _say(logging.INFO, "snoozed", job, f"snoozed for {delay or 0:.1f} s", delay=delay)


def _reclaimed(*, job: Job, error: str, **_: Any) -> None:
    if job.finished_at is None:  # one that is buried is told as dead
        _say(logging.WARNING, "reclaimed", job, f"put back: {_line(error)}")


def _lost(*, job: Job, attempted: str, **_: Any) -> None:
    text = f"its claim was gone before '{attempted}' could be written; nothing was changed"
    _say(logging.WARNING, "lost", job, text)


def _cancelled(*, job: Job, by: str, **_: Any) -> None:
    _say(logging.INFO, "cancelled", job, f"cancelled{_by(by)}")


def _requeued(*, job: Job, by: str, **_: Any) -> None:
    _say(logging.INFO, "requeued", job, f"requeued{_by(by)}")


def _slot_fired(*, schedule: Schedule, slot: datetime, job: Job, late: float, **_: Any) -> None:
    text = f"slot {_instant(slot)} fired: job {job.pk}" + (f", {late:.0f} s late" if late >= 1 else "")
    _say_of(logging.INFO, "slot_fired", schedule, text, slot=slot.isoformat(), job_id=job.pk, late=late)


def _slots_skipped(*, schedule: Schedule, stretch: Stretch, fate: Fate, reason: str, **_: Any) -> None:
    level = logging.INFO if fate is Fate.OVERLAP else logging.WARNING
    until = "" if stretch.count == 1 else f" to {_instant(stretch.last)}, {stretch.count:,} slots"
    text = f"slot {_instant(stretch.first)}{until} {fate.label}: {_line(reason)}"
    event = f"slot_{fate.value}"
    _say_of(level, event, schedule, text, slot=stretch.first.isoformat(), count=stretch.count)


def _slot_left(*, schedule: Schedule, slot: datetime, reason: str, grace: float, **_: Any) -> None:
    # Once a slot: a tick a second would say the same again and again.
    if _left.get(schedule.pk) == slot:
        return
    _left[schedule.pk] = slot
    text = (
        f"slot {_instant(slot)} is left to a scheduler that knows its type, for {grace:g} s: {_line(reason)}"
    )
    _say_of(logging.WARNING, "slot_left", schedule, text, slot=slot.isoformat())


def _schedule_disabled(*, schedule: Schedule, reason: str, **_: Any) -> None:
    text = f"disabled, since it cannot be understood: {_line(reason)} Mend it, then resume it."
    _say_of(logging.ERROR, "schedule_disabled", schedule, text)


def _say_of(level: int, event: str, schedule: Schedule, text: str, **facts: Any) -> None:
    counts[event] += 1
    extra = {"event": event, "schedule": schedule.name, "type": schedule.job_type, **facts}
    logger.log(level, "%s", f"schedule {_line(schedule.name)} {text}", extra=extra)


def _instant(slot: datetime) -> str:
    return f"{slot.astimezone(UTC):%Y-%m-%d %H:%M}Z"


#: Jobs done that are told one by one in a second, unless the level is DEBUG: a line costs more than a job.
TOLD_A_SECOND = 100

_this_second = {"began": 0.0, "done": 0, "explained": False}


def _told(done: int) -> int:
    """Return how many of so many jobs that are done get a line of their own; say, once a second, how many did
    not.
    """
    if not logger.isEnabledFor(logging.INFO):
        return 0
    if logger.isEnabledFor(logging.DEBUG):
        return done
    now = time.monotonic()
    if now - _this_second["began"] >= 1.0:
        if (untold := _this_second["done"] - TOLD_A_SECOND) > 0:
            facts = {"event": "many_done", "count": untold}
            logger.info("%d more jobs were done in that second.", untold, extra=facts)
        _this_second.update(began=now, done=0)
    told = min(done, max(TOLD_A_SECOND - _this_second["done"], 0))
    if not _this_second["explained"] and _this_second["done"] + done > TOLD_A_SECOND:
        _this_second["explained"] = True
        logger.info(
            "More than %d jobs are done within a second: the others are counted (at DEBUG, each is told).",
            TOLD_A_SECOND,
            extra={"event": "many_done"},
        )
    _this_second["done"] += done
    return int(told)


def _say(
    level: int,
    event: str,
    job: Job,
    text: str,
    exception: BaseException | None = None,
    **facts: Any,
) -> None:
    counts[event] += 1
    if not logger.isEnabledFor(level):
        return
    message = f"job {job.pk} {_line(job.type)} {text}"
    extra = {
        "event": event,
        "job_id": job.pk,
        "type": job.type,
        "queue": job.queue,
        "attempt": job.attempts,
        "max_attempts": job.max_attempts,
        "worker": job.locked_by,
        **facts,
    }
    if exception is not None and not _is_bounded(exception):
        message += "\n" + failures.facts(exception)["traceback"]
        exception = None
    # As an argument: a message with a percent sign in it is no format.
    logger.log(level, "%s", message, exc_info=exception, extra=extra)


def _attempt(job: Job) -> str:
    return f"attempt {job.attempts} of {job.max_attempts}"


def _by(by: str) -> str:
    return f" by {_line(by)}" if by else ""


def _line(text: str) -> str:
    """Return the first line of ``text``, bounded; what a terminal would obey is escaped."""
    first = text.strip().partition("\n")[0][:300]
    if first.isprintable():
        return first
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in first)


def _is_bounded(exception: BaseException) -> bool:
    """Whether formatting ``exception`` with its causes costs a sensible amount of time and memory."""
    for links, link in enumerate(_links(exception), start=1):
        if links > _LINKS or _is_awkward(link):
            return False
        frames, tb = 0, link.__traceback__
        while tb is not None:
            frames, tb = frames + 1, tb.tb_next
            if frames > _FRAMES:
                return False
    return True


def _links(exception: BaseException) -> Iterator[BaseException]:
    """Yield ``exception``, its causes and its members, each once."""
    seen: set[int] = set()
    todo = [exception]
    while todo:
        link = todo.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += [other for other in (link.__cause__, link.__context__) if other is not None]
        if isinstance(link, BaseExceptionGroup):
            todo += link.exceptions


def _is_awkward(link: BaseException) -> bool:
    """Whether ``link`` is long, or holds a lone surrogate: who writes UTF-8 would drop the line for it."""
    try:
        texts = [str(text) for text in (link, *getattr(link, "__notes__", ()))]
        if sum(map(len, texts)) > _MESSAGE_CHARACTERS:
            return True
        "".join(texts).encode()
    except BaseException:
        return True
    return False


# --- The handler of the commands -----------------------------------------------------------------


def set_up(format: str | None = None, *, verbosity: int = 1) -> None:
    """Make a command's process show our lines on its console.

    A project that shows them already, or has configured this very logger, is left alone, unless
    ``format`` ("text" or "json") is given: that is then the format of every handler that writes to the
    console. ``verbosity`` 0 shows warnings only, 2 and more also DEBUG.
    """
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    logger.disabled = False  # by a dictConfig that came after the first import of this package
    inherited = logger.getEffectiveLevel()
    handlers = list(_handlers())
    consoles = [handler for handler in handlers if _is_console(handler)]
    if format is not None:
        for handler in (*consoles, logging.lastResort):
            if handler is not None:
                handler.setFormatter(_formatter(format))
    if logger.level or logger.handlers or not logger.propagate:
        return  # the project has said what it wants of us
    if any(max(handler.level, inherited) <= max(level, logging.INFO) for handler in handlers):
        return
    # Lines below the project's own level go to our handler alone: one that mails all it gets must not
    # get every job. And what a console of the project's shows is not shown twice.
    for handler in handlers:
        handler.addFilter(_NotOurs(below=inherited))
    ours = logging.StreamHandler(sys.stderr)
    ours.setFormatter(_formatter(format or "text"))
    if consoles:
        shown_from = max(inherited, min(handler.level for handler in consoles))
        ours.addFilter(lambda record: record.levelno < shown_from)
    logger.addHandler(ours)
    logger.setLevel(level)


def _handlers() -> Iterator[logging.Handler]:
    """Yield the handlers that our records reach."""
    at: logging.Logger | None = logger
    while at is not None:
        yield from at.handlers
        at = at.parent if at.propagate else None


def _is_console(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout)


class _NotOurs(logging.Filter):
    """Keeps our records below a level away from a handler of the project's."""

    def __init__(self, *, below: int) -> None:
        super().__init__()
        self.below = below

    def filter(self, record: logging.LogRecord) -> bool:
        """Let pass what the handler would have got without us."""
        return record.levelno >= self.below or record.name.split(".")[0] != logger.name


def _formatter(format: str) -> logging.Formatter:
    if format == "json":
        return JsonFormatter()
    return logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and what ``extra`` brought."""

    _ALWAYS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        """Return ``record`` as JSON in ASCII, which every stream can take."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in self._ALWAYS}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
