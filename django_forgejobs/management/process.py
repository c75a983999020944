"""What the commands share that run until they are told to stop: signals, a name, reloading."""

from __future__ import annotations

import gc
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage
from django.core.management.base import CommandParser
from django.db import connections

from django_forgejobs import checks, reload
from django_forgejobs.management.base import JobsCommand
from django_forgejobs.management.stopping import Stopping, Words
from django_forgejobs.ticker import Ticker

logger = logging.getLogger("django_forgejobs")


class ProcessCommand(JobsCommand):
    """A command that is a service. ``stopping`` takes its signals; ``role`` is what it is called, ``words``
    what it says when it is stopped.
    """

    role = ""
    words = Words()
    logs_events = True

    def add_arguments(self, parser: CommandParser) -> None:
        """Add its name, and whether it restarts when code changes."""
        super().add_arguments(parser)
        parser.add_argument("--name", default="", help="name in logs and rows (the host's)")
        group = parser.add_mutually_exclusive_group()
        group.add_argument(
            "--reload",
            action="store_true",
            default=None,
            help="finish what runs and restart when code changes (on under DEBUG)",
        )
        group.add_argument("--no-reload", action="store_false", dest="reload")

    def handle(self, *args: Any, **options: Any) -> None:
        """Take signals from the first moment on."""
        self.names_connections = self.has_own_process and "PGAPPNAME" not in os.environ
        self.name_connections(**options)
        if self.has_own_process:
            # Python looks for garbage after every 700 new objects; a batch of jobs is thousands, all in use.
            # Measured at full speed: 43 µs of CPU a job with its thresholds, 34 with these.
            gc.set_threshold(20_000, 20, 50)
        self.stopping = Stopping(self.words)
        self.stopping.install(watch=options.get("processes", 1) == 1)
        try:
            super().handle(*args, **options)
        finally:
            if self.has_own_process:
                self.stopping.keep()
            else:
                self.stopping.restore()

    def name_connections(self, **options: Any) -> None:
        """Let pg_stat_activity say whose a connection is."""
        if self.names_connections:
            name = options["name"] or socket.gethostname()
            os.environ["PGAPPNAME"] = f"forgejobs {self.role} {name}:{os.getpid()}"[:63]

    def warn(self, message: CheckMessage) -> None:
        """A service starts seldom enough to say what is not serious too."""
        logger.warning("%s", message)

    def ticker(self, alias: str, **options: Any) -> Ticker:
        """Return what ticks the schedules; refuse declared ones that are wrong."""
        self.refuse(checks.schedule_errors())
        return Ticker(db=alias, **options)

    def watch(self, *, on_change: Callable[[], None], **options: Any) -> reload.CodeWatch | None:
        """Return what watches the code, if it is to be watched."""
        wanted = settings.DEBUG if options["reload"] is None else options["reload"]
        return reload.CodeWatch(on_change=on_change) if wanted and self.has_own_process else None


@contextmanager
def watching(watch: reload.CodeWatch | None) -> Iterator[None]:
    """Watch the code while the block runs."""
    if watch is not None:
        watch.start()
    try:
        yield
    finally:
        if watch is not None:
            watch.stop()


def describe_database(alias: str) -> str:
    """Return alias, product, version and name of a database; no password."""
    connection = connections[alias]
    version = ".".join(map(str, connection.get_database_version()))
    values = connection.settings_dict
    host = f" on {values['HOST']}" if values["HOST"] else ""
    return f"{alias}: {connection.display_name} {version}, {values['NAME']}{host}"


def duration(seconds: float) -> str:
    """Return a time in words: "12.3 s", "5 min", "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
