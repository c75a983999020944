"""What every command of ours shares: help with examples, --database, a start that names what is missing,
and the exit codes.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    DjangoHelpFormatter,
)
from django.db import (
    DatabaseError,
    InterfaceError,
    NotSupportedError,
    OperationalError,
    connections,
)

from django_forgejobs import between, checks, conf, faults, logs
from django_forgejobs.exceptions import JobError

logger = logging.getLogger("django_forgejobs")

#: Exit codes; 0 is clean.
FORCED, USAGE, UNREACHABLE, MIGRATIONS = 1, 2, 3, 4

EXIT_CODES = """\
exit codes:
  0 clean, 1 forced or unexpected, 2 usage or configuration,
  3 database out of reach at start, 4 migrations missing"""


class Help(DjangoHelpFormatter):
    """Django's order of options; several lines, which are examples, are left as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return super()._fill_text(text, width, indent)


def epilog(prog_name: str, examples: str) -> str:
    """Return the end of a command's help: the examples, each after ``prog_name``, and the exit codes."""
    lines = [f"  {prog_name} {line}" for line in examples.strip().splitlines()]
    return "\n".join(["examples:", *lines, "", EXIT_CODES])


class JobsCommand(BaseCommand):
    """A command on the queue's database. Subclasses have ``examples`` and ``work``."""

    #: Lines that follow ``manage.py``, with a comment each.
    examples = ""
    #: Only our own checks are run: a project's may import all its URLs, and take that memory.
    requires_system_checks = []
    #: Whether ``--log-format`` makes sense.
    logs_events = False

    #: Whether the database had to be waited for at the start.
    had_to_wait = False

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Add the examples and the exit codes to the help."""
        kwargs |= {"epilog": epilog(prog_name, self.examples), "formatter_class": Help}
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options that all commands have."""
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            choices=tuple(connections),
            help="alias of the queue's database (FORGEJOBS['DATABASE'])",
        )
        parser.add_argument(
            "--connect-timeout",
            metavar="S",
            type=seconds,
            default=10.0,
            help="seconds for which to try to reach the database at the start (10)",
        )
        if self.logs_events:
            parser.add_argument(
                "--log-format",
                choices=logs.FORMATS,
                help="format of the lines on the console; text, unless the project's LOGGING says otherwise",
            )

    def handle(self, *args: Any, **options: Any) -> None:
        """Start, work, and turn what went wrong into an exit code."""
        if self.has_own_process:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")  # no name of a job is worth an end
            # A server that takes a connection and says nothing would cost two minutes a try.
            os.environ.setdefault("PGCONNECT_TIMEOUT", str(max(1, math.ceil(options["connect_timeout"]))))
            logs.set_up(options.get("log_format"), verbosity=options["verbosity"])
        with exit_codes():
            alias = self.start(options["database"], timeout=options["connect_timeout"])
            self.work(alias, **options)

    @property
    def has_own_process(self) -> bool:
        """Whether this is a process of ours, not one that calls ``call_command``."""
        return getattr(self, "_called_from_command_line", False)

    def work(self, alias: str, **options: Any) -> None:
        """Do what the command is for, on a database that is there and migrated."""
        raise NotImplementedError

    def start(self, alias: str | None, *, timeout: float) -> str:
        """Return the queue's alias, connected and migrated, or raise ``CommandError`` with the remedy."""
        self.refuse(checks.settings_errors())
        alias = alias or conf.current().DATABASE
        self.refuse(checks.alias_errors(alias))
        self.had_to_wait = connect(alias, timeout=timeout)
        self.refuse(checks.router_errors(alias))
        if missing := checks.missing_migrations(alias):
            raise CommandError(
                f'Database "{alias}" lacks migrations: {", ".join(missing)}. '
                f"Run: manage.py migrate forgejobs{checks.database_option(alias)}",
                returncode=MIGRATIONS,
            )
        self.refuse(checks.database_errors(alias))
        return alias

    def refuse(self, found: Sequence[CheckMessage]) -> None:
        """Raise ``CommandError`` if something serious was found that the project has not silenced."""
        found = [message for message in found if not message.is_silenced()]
        if serious := [message for message in found if message.is_serious()]:
            raise CommandError("\n".join(str(message) for message in serious), returncode=USAGE)
        for message in found:
            self.warn(message)

    def warn(self, message: CheckMessage) -> None:
        """Say what is not serious; commands that run every few minutes do not."""

    def say(self, text: str, **options: Any) -> None:
        """Print one line at once, unless ``-v 0``."""
        if options["verbosity"] > 0:
            self.stdout.write(text)
            self.stdout.flush()


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors that need no traceback into a sentence and an exit code."""
    try:
        yield
    except ImproperlyConfigured as error:
        raise CommandError(str(error), returncode=USAGE) from error
    except JobError as error:
        raise CommandError(str(error), returncode=FORCED) from error
    except DatabaseError as error:
        if not faults.is_outage(error):
            raise
        raise CommandError(
            f"The database went out of reach: {one_line(error)}. What was committed stays; run it again.",
            returncode=FORCED,
        ) from error
    except KeyboardInterrupt as error:
        raise CommandError(
            "Interrupted. What was committed stays; run it again for the rest.", returncode=FORCED
        ) from error


def connect(alias: str, *, timeout: float) -> bool:
    """Connect, trying again for ``timeout`` seconds; return whether the first try failed."""
    started = time.monotonic()
    tries = 0
    while True:
        tries += 1
        try:
            connections[alias].ensure_connection()
            return tries > 1
        except NotSupportedError as error:
            raise CommandError(one_line(error), returncode=USAGE) from error
        except (OperationalError, InterfaceError) as error:
            between.close(connections[alias])
            waited = time.monotonic() - started
            if waited >= timeout:
                raise CommandError(
                    f'Database "{alias}" cannot be reached ({one_line(error)}): {tries} '
                    f"{'try' if tries == 1 else 'tries'} in {waited:.1f} s. Is the server up, and is "
                    "DATABASES right?",
                    returncode=UNREACHABLE,
                ) from error
            pause = min(0.25 * 2 ** min(tries, 4), timeout - waited)
            logger.warning(
                'Database "%s" cannot be reached (%s): next try in %.1f s.',
                alias,
                one_line(error),
                pause,
            )
            time.sleep(pause)


def one_line(error: BaseException) -> str:
    """Return the message of ``error`` without line breaks, or its class."""
    return " ".join(str(error).split()) or type(error).__name__


def counted(number: int, kind: str = "") -> str:
    """Return so many jobs in words: "1 job", "2 dead jobs", "3,000 jobs"."""
    return f"{number:,} {kind + ' ' if kind else ''}job{'' if number == 1 else 's'}"


# --- Types of arguments --------------------------------------------------------------------------


def _read(read: Callable[[Any], Any], convert: Callable[[str], Any], text: str) -> Any:
    try:
        value = convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' * (convert is int)}number") from None
    try:
        return read(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def seconds(text: str) -> float:
    """Read a number of seconds, 0 or more."""
    return float(_read(conf.seconds, float, text))


def positive_seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    return float(_read(conf.positive, float, text))


def count(text: str) -> int:
    """Read a whole number, 1 or more."""
    return int(_read(conf.count, int, text))


def names(text: str) -> tuple[str, ...]:
    """Read names of queues, separated by commas."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in found:
        if not 1 <= len(name) <= 64:
            raise argparse.ArgumentTypeError(f"{text!r}: a queue's name is 1 to 64 characters, not {name!r}")
    return found
