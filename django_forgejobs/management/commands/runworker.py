"""``manage.py runworker``: run jobs."""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from typing import Any

import django
from django.conf import settings
from django.core.checks import CheckMessage
from django.core.management.base import CommandError, CommandParser
from django.db import connections

import django_forgejobs
from django_forgejobs import between, checks, logs, reload
from django_forgejobs.management.base import (
    FORCED,
    USAGE,
    JobsCommand,
    count,
    names,
    positive_seconds,
    seconds,
)
from django_forgejobs.management.stopping import Stopping, leave
from django_forgejobs.worker import Ended, Worker

logger = logging.getLogger("django_forgejobs")

NO_TYPES = (
    "No job type is registered, so there is nothing that this worker could run. Decorate a function with "
    '@job("app.name") in the jobs.py of an app in INSTALLED_APPS.'
)


class Command(JobsCommand):
    """Parses, starts a worker, passes signals on to it, and says how it ended."""

    help = (
        "Run jobs until told to stop. TERM or Ctrl-C: finish what runs, then exit 0. A second one, or the "
        "grace is over: give unfinished jobs back, exit 1."
    )
    examples = """
runworker                             every queue, one job at a time
runworker --queues mail,default --concurrency 8
runworker --burst                     what is due now, then exit (cron, CI)
runworker --log-format json           for a log collector
"""
    logs_events = True

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the worker's options."""
        super().add_arguments(parser)
        add = parser.add_argument
        add("--queues", metavar="A,B", type=names, help="queues to serve (all)")
        add("--concurrency", metavar="N", type=count, default=1, help="jobs at a time (1)")
        add("--burst", action="store_true", help="exit when nothing is due")
        add("--max-jobs", metavar="N", type=count, help="exit after so many jobs")
        add("--grace", metavar="S", type=seconds, help="seconds to finish in (FORGEJOBS['GRACE'])")
        add("--name", default="", help="name in logs and rows (the host's)")
        add(
            "--poll-interval",
            metavar="S",
            type=positive_seconds,
            help="seconds between two looks at the queue (FORGEJOBS['POLL_INTERVAL'])",
        )
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
        if self.has_own_process:
            # So that pg_stat_activity says whose a connection is.
            name = options["name"] or socket.gethostname()
            os.environ.setdefault("PGAPPNAME", f"forgejobs worker {name}:{os.getpid()}"[:63])
        self.stopping = Stopping()
        self.stopping.install()
        try:
            super().handle(*args, **options)
        finally:
            if self.has_own_process:
                self.stopping.keep()
            else:
                self.stopping.restore()

    def work(self, alias: str, **options: Any) -> None:
        """Run a worker to its end."""
        self.refuse(checks.pool_errors(alias, options["concurrency"]))
        self.refuse(checks.server_warnings(alias, options["concurrency"]))
        worker = Worker(
            db=alias,
            queues=options["queues"],
            concurrency=options["concurrency"],
            poll_interval=options["poll_interval"],
            burst=options["burst"],
            max_jobs=options["max_jobs"],
            grace=options["grace"],
            name=options["name"],
            stop=lambda: watch is not None and watch.changed,
        )
        if not worker.types:
            raise CommandError(NO_TYPES, returncode=USAGE)
        wanted = settings.DEBUG if options["reload"] is None else options["reload"]
        watch = reload.CodeWatch(on_change=worker.wake) if wanted and self.has_own_process else None
        self.announce(worker, reloads=watch is not None, **options)
        ended = self.run_to_end(worker, watch)
        self.sum_up(worker, ended, **options)
        if ended is Ended.FORCED:
            if self.has_own_process:
                leave(FORCED)
            raise CommandError("The worker was forced to end: see its log.", returncode=FORCED)
        if watch is not None and watch.changed and not self.stopping.signals:
            reload.restart()

    def run_to_end(self, worker: Worker, watch: reload.CodeWatch | None) -> Ended:
        """Run ``worker``, with signals passed on; an error that nobody expected ends it as forced."""
        self.started, self.counted = time.monotonic(), logs.counts.copy()
        self.stopping.grace = worker.grace
        self.stopping.on_stop = worker.request_stop
        if watch is not None:
            watch.start()
        try:
            return worker.run()
        except Exception:
            logger.critical("The worker ends: it met an error that it does not know.", exc_info=True)
            return Ended.FORCED
        finally:
            if watch is not None:
                watch.stop()
            if self.has_own_process:
                between.close_all()

    def warn(self, message: CheckMessage) -> None:
        """A worker starts seldom enough to say what is not serious too."""
        logger.warning("%s", message)

    def announce(self, worker: Worker, *, reloads: bool, **options: Any) -> None:
        """Say what was started, where, and how to stop it."""
        types = worker.types or ()
        facts = {
            "version": django_forgejobs.__version__,
            "worker": worker.identity,
            "database": describe_database(worker.db),
            "queues": list(worker.queues or ()),
            "types": list(types),
            "concurrency": worker.concurrency,
            "lease": worker.settings.LEASE,
            "heartbeat": worker.settings.HEARTBEAT,
            "grace": worker.grace,
        }
        if options["log_format"] == "json":
            logger.info("worker started", extra={"event": "worker_started", **facts})
            return
        lines = (
            ("database", facts["database"]),
            ("queues", ", ".join(worker.queues) if worker.queues else "all"),
            ("types", _some(types)),
            ("concurrency", f"{worker.concurrency}, a look every {worker.poll_interval:g} s"),
            ("lease", f"{facts['lease']:g} s, renewed every {facts['heartbeat']:g} s"),
            ("reload", "when code changes" if reloads else ""),
            ("stop", f"Ctrl-C or TERM: finishes within {worker.grace:g} s. Twice: gives jobs back"),
        )
        self.say(
            f"django_forgejobs {facts['version']}, Django {django.__version__}, "
            f"Python {platform.python_version()}, worker {worker.identity}\n"
            + "\n".join(f"  {name:<12} {value}" for name, value in lines if value),
            **options,
        )

    def sum_up(self, worker: Worker, ended: Ended, **options: Any) -> None:
        """Say how it ended and what was done."""
        seconds = time.monotonic() - self.started
        counts = logs.counts - self.counted
        told = ", ".join(f"{number} {event}" for event, number in counts.most_common() if event != "started")
        how = "was forced to end" if ended is Ended.FORCED else "ended"
        text = f"Worker {worker.identity} {how} after {_duration(seconds)}: {told or 'no jobs'}."
        if options["log_format"] == "json":
            facts = {"worker": worker.identity, "seconds": round(seconds, 3), **counts}
            logger.info(text, extra={"event": "worker_ended", **facts})
        else:
            self.say(text, **options)


def describe_database(alias: str) -> str:
    """Return alias, product, version and name of a database; no password."""
    connection = connections[alias]
    version = ".".join(map(str, connection.get_database_version()))
    values = connection.settings_dict
    host = f" on {values['HOST']}" if values["HOST"] else ""
    return f"{alias}: {connection.display_name} {version}, {values['NAME']}{host}"


def _some(types: tuple[str, ...], at_most: int = 12) -> str:
    more = f" and {len(types) - at_most} more" if len(types) > at_most else ""
    return ", ".join(types[:at_most]) + more


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
