"""What the log says of jobs, and who gets to read it when a command has set it up."""

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from django_forgejobs import Snooze, cancel, enqueue, logs, process_one, requeue, signals
from django_forgejobs.models import Job
from tests.factories import make_job

logger = logging.getLogger("django_forgejobs")


class Collecting(logging.Handler):
    """Keeps the records it gets, as a handler that mails or sends them away would."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def lines(self) -> list[str]:
        return [f"{record.levelname} {record.getMessage()}" for record in self.records]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Return a root logger of our logger's own, as it is in a project without LOGGING.

    Not the real one: pytest listens there.
    """
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logger, "parent", root)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logger, "propagate", True)
    last = logging._StderrHandler(logging.WARNING)  # type: ignore[attr-defined]
    monkeypatch.setattr(logging, "lastResort", last)
    logger.setLevel(logging.NOTSET)  # which makes it forget what levels it had, as an assignment would not
    yield root
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def heard(root: logging.Logger) -> Collecting:
    """Return a handler that hears all lines of ours."""
    handler = Collecting()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    return handler


def console(level: int = logging.NOTSET) -> logging.Handler:
    """Return what a project's LOGGING calls its console."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter("project: %(message)s"))
    return handler


def say_two() -> None:
    logger.info("an event")
    logger.warning("a warning")


# --- Who reads it --------------------------------------------------------------------------------


def test_a_project_without_logging_sees_info(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up()
    logs.set_up()
    say_two()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO    an event", "WARNING a warning"]


@pytest.mark.parametrize(("verbosity", "shown"), [(0, "cd"), (1, "bcd"), (2, "abcd")])
def test_verbosity_decides_what_is_shown(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], verbosity: int, shown: str
) -> None:
    logs.set_up(verbosity=verbosity)
    for level, word in zip(
        (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR), "abcd", strict=True
    ):
        logger.log(level, word)
    assert "".join(line[-1] for line in capsys.readouterr().err.splitlines()) == shown


def test_a_project_that_shows_our_lines_is_left_alone(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    root.addHandler(console())
    root.setLevel(logging.INFO)
    logs.set_up()
    say_two()
    assert capsys.readouterr().err == "project: an event\nproject: a warning\n"
    assert logger.handlers == []


@pytest.mark.parametrize("verbosity", [1, 2])
@pytest.mark.parametrize(
    ("level", "own", "propagate", "shown"),
    [
        (logging.WARNING, False, True, ["project: a warning"]),
        (logging.ERROR, True, False, []),
        (logging.NOTSET, True, True, ["project: a warning"] * 2),
        (logging.NOTSET, False, False, ["a warning"]),  # by what Python does where there is no handler
    ],
)
def test_a_project_that_has_configured_our_logger_is_left_alone(
    root: logging.Logger,
    capsys: pytest.CaptureFixture[str],
    verbosity: int,
    level: int,
    own: bool,
    propagate: bool,
    shown: list[str],
) -> None:
    """Also where that hides our lines: it was its word."""
    root.addHandler(console())
    if own:
        logger.addHandler(console())
    logger.setLevel(level)
    logger.propagate = propagate
    logs.set_up(verbosity=verbosity)
    say_two()
    assert capsys.readouterr().err.splitlines() == shown


def test_a_format_that_is_asked_for_is_that_of_a_console_of_our_logger_too(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.addHandler(console())
    logger.setLevel(logging.WARNING)
    logs.set_up("json")
    say_two()
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "a warning"


def test_a_console_for_warnings_gets_them_once_and_events_are_shown_beside_it(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    root.addHandler(console())
    logs.set_up()
    say_two()
    event, warning = capsys.readouterr().err.splitlines()
    assert event.endswith("INFO    an event")
    assert warning == "project: a warning"


def test_a_handler_that_mails_what_it_gets_gets_no_more_than_before(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    mail = Collecting()
    root.addHandler(mail)
    root.setLevel(logging.ERROR)
    logs.set_up()
    say_two()
    logger.error("an error")
    root.error("another's")
    assert mail.lines == ["ERROR an error", "ERROR another's"]
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_format_that_is_asked_for_wins_over_the_projects(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    root.addHandler(console())
    root.setLevel(logging.INFO)
    logs.set_up("json")
    say_two()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["an event", "a warning"]


def test_lines_of_others_are_json_too_when_json_is_asked_for(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up("json")
    root.warning("hear, hear")
    assert json.loads(capsys.readouterr().err)["message"] == "hear, hear"


def test_a_logger_that_dictconfig_has_disabled_speaks_again(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.disabled = True
    logs.set_up()
    logger.info("an event")
    assert "an event" in capsys.readouterr().err


def test_json_takes_whatever_a_line_holds(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("json")
    logger.info("lone \ud800 %s", "é\n", extra={"odd": {1, 2}, "event": "done"})
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["event"]) == ("lone \ud800 é\n", "done")


# --- What it says --------------------------------------------------------------------------------


@pytest.mark.django_db
def test_each_event_is_one_line(heard: Collecting) -> None:
    logs.connect()  # as at the start of a process whose level is DEBUG

    def snooze(payload: Any) -> None:
        raise Snooze(in_=60)

    def fail(payload: Any) -> None:
        raise ValueError("no")

    handlers = {"ok": lambda payload: None, "fail": fail, "snooze": snooze}
    ok = enqueue("ok", max_attempts=3)
    fails = enqueue("fail", max_attempts=2, priority=-1)
    snoozes = enqueue("snooze", priority=-2)
    unknown = enqueue("who?", priority=-3)
    while process_one(handlers):
        Job.objects.filter(pk=fails, status="ready").update(run_at=make_job(status="done").run_at)
    requeue(fails, by="Ann")
    cancel(fails, by="Bob")
    assert f"DEBUG job {ok} ok started (attempt 1 of 3)" in heard.lines
    lines = [line for line in heard.lines if not line.startswith("DEBUG")]
    assert lines == [
        f"INFO job {ok} ok done in 0.00 s (attempt 1 of 3)",
        f"ERROR job {fails} fail failed (attempt 1 of 2), again in {lines[1].split()[-4]} s: ValueError: no",
        f"ERROR job {fails} fail dead (attempt 2 of 2): ValueError: no",
        f"INFO job {snoozes} snooze snoozed for 60.0 s",
        lines[4],
        f"INFO job {fails} fail requeued by Ann",
        f"INFO job {fails} fail cancelled by Bob",
    ]
    assert lines[4].startswith(f"ERROR job {unknown} who? failed for good (attempt 1 of 1): ")
    assert 'Unknown type: no handler is given for "who?"' in lines[4]


@pytest.mark.django_db
def test_a_dead_worker_is_a_warning_and_its_last_victim_an_error(heard: Collecting) -> None:
    first = make_job(status="running", lease=-1)
    last = make_job(status="running", lease=-1, lease_expirations=2)
    Job.objects.reclaim_batch()
    warning, error = heard.lines
    assert warning.startswith(f"WARNING job {first.pk} test.job put back: Its worker died")
    assert error.startswith(f"ERROR job {last.pk} test.job dead (attempt 0 of 1): Its worker died")


@pytest.mark.django_db
def test_a_failed_attempt_and_a_dead_letter_carry_their_exception(heard: Collecting) -> None:
    """Sentry and AdminEmailHandler make their reports of it."""

    def fail(payload: Any) -> None:
        raise ValueError("no")

    enqueue("fail", {"password": "s3cr3t"})
    process_one({"fail": fail})
    (record,) = (record for record in heard.records if record.levelno == logging.ERROR)
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
    assert (record.type, record.attempt) == ("fail", 1)  # type: ignore[attr-defined]
    assert "s3cr3t" not in str(vars(record))


def chained(links: int) -> BaseException:
    """Return an exception with so many causes."""
    error: BaseException | None = None
    for number in range(links):
        link = ValueError(f"link {number}")
        link.__cause__ = error
        error = link
    assert error is not None
    return error


def deep() -> BaseException:
    """Return an exception with a traceback of hundreds of frames."""

    def dive(depth: int) -> None:
        if depth:
            dive(depth - 1)
        raise ValueError("deep")

    try:
        dive(700)
    except ValueError as error:
        return error
    raise AssertionError


def noted() -> BaseException:
    """Return an exception with a huge note."""
    error = ValueError("noted")
    error.add_note("x" * 1_000_000)
    return error


class Unspeakable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("never")


@pytest.mark.django_db
@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 1_000_000),
        BaseExceptionGroup("many", [ValueError("x" * 1_000_000)]),
        chained(1000),
        deep(),
        noted(),
        Unspeakable(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_too_big_to_print_is_logged_in_our_bounded_words(
    heard: Collecting, error: BaseException
) -> None:
    signals.send(signals.dead, job=make_job(status="dead"), error="text", exception=error)
    (record,) = heard.records
    assert not record.exc_info
    assert type(error).__name__ in record.getMessage()
    assert len(record.getMessage()) < 10_000


def raised_from(links: int) -> BaseException:
    """Return an exception that was raised from another, and so on: cause and context are the same."""
    try:
        if links:
            raise ValueError(f"link {links}") from raised_from(links - 1)
        raise ValueError("the first")
    except ValueError as error:
        return error


def round_and_round() -> BaseException:
    """Return an exception that is its own cause."""
    error = ValueError("round and round")
    error.__cause__ = error
    return error


@pytest.mark.django_db
@pytest.mark.parametrize("error", [raised_from(10), round_and_round()], ids=["chain", "circle"])
def test_an_ordinary_exception_is_handed_on_with_its_causes(heard: Collecting, error: BaseException) -> None:
    signals.send(signals.dead, job=make_job(status="dead"), error="text", exception=error)
    (record,) = heard.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.django_db
def test_a_name_cannot_forge_a_line_or_move_the_cursor(heard: Collecting) -> None:
    job = make_job(type="x\nERROR forged\x1b[2J", status="dead")
    signals.send(signals.dead, job=job, error="first \x1b[31m\nsecond", exception=None)
    (line,) = heard.lines
    assert line.isprintable()
    assert "forged" not in line
    assert line.endswith("first \\x1b[31m")
