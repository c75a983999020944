"""``manage.py runworker``: run jobs."""

from __future__ import annotations

import logging
import os
import platform
import time
from contextlib import nullcontext
from typing import Any

import django
from django.core.management.base import CommandError, CommandParser

import django_forgejobs
from django_forgejobs import between, checks, logs, recycling, registry, reload, watchdog
from django_forgejobs.board import Note, Place
from django_forgejobs.jobs import BUILT_IN
from django_forgejobs.management.base import (
    FORCED,
    USAGE,
    count,
    names,
    positive_seconds,
    seconds,
)
from django_forgejobs.management.process import (
    ProcessCommand,
    describe_database,
    duration,
    watching,
)
from django_forgejobs.management.stopping import Stopping, Words, leave
from django_forgejobs.recycling import Recycling
from django_forgejobs.worker import Ended, Worker

logger = logging.getLogger("django_forgejobs")

NO_TYPES = (
    "No job type is registered, so there is nothing that this worker could run. Decorate a function with "
    '@job("app.name") in the jobs.py of an app in INSTALLED_APPS.'
)


class Command(ProcessCommand):
    """Parses, starts a worker or several processes of them, passes signals on, and says how it ended."""

    help = (
        "Run jobs until told to stop. TERM or Ctrl-C: finish what runs, then exit 0. A second one, or the "
        "grace is over: give unfinished jobs back, exit 1."
    )
    examples = """
runworker                             every queue, one job at a time
runworker --queues mail,default --concurrency 8
runworker --processes 4               on four cores; who dies is replaced, and its jobs run again at once
runworker --processes 4 --max-memory 500 --max-age 86400
runworker --burst                     what is due now, then exit (cron, CI)
runworker --log-format json           for a log collector
runworker --scheduler                 with the schedules, for small sites
"""
    role = "worker"

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the worker's options."""
        super().add_arguments(parser)
        add = parser.add_argument
        add("--queues", metavar="A,B", type=names, help="queues to serve (all)")
        add("--concurrency", metavar="N", type=count, default=1, help="jobs at a time, in each process (1)")
        add(
            "--async-concurrency",
            metavar="N",
            type=count,
            help="async def jobs at a time, beside the others (as many as --concurrency)",
        )
        add("--processes", metavar="M", type=count, default=1, help="worker processes (1)")
        add("--burst", action="store_true", help="exit when nothing is due")
        end = "then exit; one of several processes is replaced"
        add("--max-jobs", metavar="N", type=count, help=f"run so many jobs, {end}")
        add("--max-memory", metavar="MB", type=count, help=f"grow to so much resident memory, {end}")
        add(
            "--max-age",
            metavar="S",
            type=positive_seconds,
            help=f"run for so long, 10 %% more or less, {end}",
        )
        add("--grace", metavar="S", type=seconds, help="seconds to finish in (FORGEJOBS['GRACE'])")
        add(
            "--poll-interval",
            metavar="S",
            type=positive_seconds,
            help="seconds between two looks at the queue (FORGEJOBS['POLL_INTERVAL'])",
        )
        add(
            "--scheduler",
            action="store_true",
            help="tick the schedules in this process too (the first of several), for small sites",
        )

    def work(self, alias: str, **options: Any) -> None:
        """Run a worker to its end, or several."""
        concurrency, processes = options["concurrency"], options["processes"]
        if registry.has_async():
            concurrency += options["async_concurrency"] or options["concurrency"]
        concurrency += int(options["scheduler"])  # its thread has a connection of its own
        self.refuse(checks.pool_errors(alias, concurrency))
        self.refuse(checks.server_warnings(alias, concurrency, processes))
        if options["scheduler"]:
            self.refuse(checks.schedule_errors())
        if problem := recycling.too_small(options["max_memory"]):
            logger.warning("%s", problem)
        worker = self.worker(alias, **options)
        if not set(worker.types or ()) - BUILT_IN:
            raise CommandError(NO_TYPES, returncode=USAGE)
        place = None
        if processes > 1:
            place = self.supervise(worker, **options)
            if place is None:
                return
        self.run_worker(alias, place, **options)

    def worker(self, alias: str, place: Place | None = None, **options: Any) -> Worker:
        """Return a worker as the options want it, for one of several processes if it has a ``place``."""
        runs_suspects = place is not None and place.number == 0
        return Worker(
            db=alias,
            queues=options["queues"],
            concurrency=1 if runs_suspects and not options["burst"] else options["concurrency"],
            async_concurrency=options["async_concurrency"],
            poll_interval=options["poll_interval"],
            burst=options["burst"] or runs_suspects,
            max_jobs=None if runs_suspects else options["max_jobs"],
            grace=options["grace"],
            name=options["name"],
            place=place,
        )

    def run_worker(self, alias: str, place: Place | None, **options: Any) -> None:
        """Run a worker in this process; with a ``place``, in one of several."""
        worker = self.worker(alias, place, **options)
        limits = Recycling(
            max_jobs=worker.max_jobs, max_memory=options["max_memory"], max_age=options["max_age"]
        )
        board = worker.place.board
        watch = self.watch(on_change=worker.wake, **options)

        def has_done_enough() -> bool:
            if watch is not None and watch.changed:
                board.note(Note.CHANGED)
            if limits.is_due(worker.claimed):
                board.note(Note.LEAVING)
            return board.noted(Note.CHANGED) or board.noted(Note.LEAVING)

        worker.stop = has_done_enough
        ticker = self.ticker(alias) if options["scheduler"] and worker.place.number == 1 else None
        self.announce(worker, reloads=watch is not None, **options)
        self.started, self.counted = time.monotonic(), logs.counts.copy()
        self.stopping.grace = worker.grace
        self.stopping.on_stop = worker.request_stop
        if place is None:
            watchdog.tell(watchdog.READY)
        with watching(watch), ticker.in_background(worker.request_stop) if ticker else nullcontext():
            ended = self.run_to_end(worker)
        if place is None:
            watchdog.tell(watchdog.STOPPING)
        if ticker is not None and ticker.failed is not None:
            ended = Ended.FORCED
        self.sum_up(worker, ended, **options)
        if ended is Ended.FORCED:
            if self.has_own_process:
                leave(FORCED)
            raise CommandError("The worker was forced to end: see its log.", returncode=FORCED)
        if watch is not None and watch.changed and place is None and not self.stopping.signals:
            reload.restart()

    def supervise(self, worker: Worker, **options: Any) -> Place | None:
        """Keep several processes of workers like ``worker``; return in each of them its place, and None here
        when all have ended.
        """
        if not hasattr(os, "fork") or not self.has_own_process:
            raise CommandError(
                f"--processes {options['processes']} forks, which cannot be done "
                f"{'within another program' if hasattr(os, 'fork') else 'on ' + platform.system()}. "
                "Start so many workers instead, with --processes 1.",
                returncode=USAGE,
            )
        from django_forgejobs.supervisor import Supervisor  # which is of POSIX

        supervisor = Supervisor(
            db=worker.db,
            processes=options["processes"],
            concurrency=worker.concurrency + worker.async_concurrency,
            grace=worker.grace,
            name=options["name"],
            burst=options["burst"],
        )
        self.announce(worker, reloads=self.watch(on_change=worker.wake, **options) is not None, **options)
        started = time.monotonic()
        self.stopping.on_stop = supervisor.request_stop
        place = supervisor.run()
        if place is not None:
            self.stopping = Stopping(Words("", "", self.words.left), lifeline=place.lifeline)
            self.stopping.install()
            self.name_connections(**options)
            return place
        text = (
            f"Supervisor {worker.identity} ended after {duration(time.monotonic() - started)}: "
            f"{supervisor.starts} processes, of which {supervisor.deaths} died."
        )
        if options["log_format"] == "json":
            facts = {"worker": worker.identity, "starts": supervisor.starts, "deaths": supervisor.deaths}
            logger.info(text, extra={"event": "supervisor_ended", **facts})
        else:
            self.say(text, **options)
        if supervisor.forced:
            raise CommandError("Workers were forced to end: see the log.", returncode=FORCED)
        if supervisor.changed and not self.stopping.signals:
            reload.restart()
        return None

    def run_to_end(self, worker: Worker) -> Ended:
        """Run ``worker``; an error that nobody expected ends it as forced."""
        try:
            return worker.run()
        except Exception:
            logger.critical("The worker ends: it met an error that it does not know.", exc_info=True)
            return Ended.FORCED
        finally:
            if self.has_own_process:
                between.close_all()

    def announce(self, worker: Worker, *, reloads: bool, **options: Any) -> None:
        """Say what was started, where, and how to stop it."""
        types = worker.types or ()
        if worker.place.lifeline is not None and options["log_format"] != "json":
            logger.info(
                "Worker %s starts%s.", worker.identity, "" if worker.place.number else ", for suspects"
            )
            return
        facts = {
            "version": django_forgejobs.__version__,
            "worker": worker.identity,
            "database": describe_database(worker.db),
            "queues": list(worker.queues or ()),
            "types": list(types),
            "concurrency": worker.concurrency,
            "async_concurrency": worker.async_concurrency,
            "processes": options["processes"],
            "lease": worker.settings.LEASE,
            "heartbeat": worker.settings.HEARTBEAT,
            "grace": worker.grace,
        }
        if options["log_format"] == "json":
            logger.info("worker started", extra={"event": "worker_started", **facts})
            return
        coroutines = f", and {worker.async_concurrency} async" if registry.has_async() else ""
        lines = (
            ("database", facts["database"]),
            ("queues", ", ".join(worker.queues) if worker.queues else "all"),
            ("types", _some(types)),
            ("processes", f"{options['processes']}" if options["processes"] > 1 else ""),
            ("concurrency", f"{worker.concurrency}{coroutines}, a look every {worker.poll_interval:g} s"),
            ("lease", f"{facts['lease']:g} s, renewed every {facts['heartbeat']:g} s"),
            ("scheduler", "in this process" if options["scheduler"] else ""),
            ("reload", "when code changes" if reloads else ""),
            ("stop", f"Ctrl-C or TERM: finishes within {worker.grace:g} s. Twice: gives jobs back"),
        )
        self.say(
            f"django_forgejobs {facts['version']}, Django {django.__version__}, "
            f"Python {platform.python_version()}, "
            f"{'supervisor' if options['processes'] > 1 else 'worker'} {worker.identity}\n"
            + "\n".join(f"  {name:<12} {value}" for name, value in lines if value),
            **options,
        )

    def sum_up(self, worker: Worker, ended: Ended, **options: Any) -> None:
        """Say how it ended and what was done."""
        seconds = time.monotonic() - self.started
        counts = logs.counts - self.counted
        told = ", ".join(f"{number} {event}" for event, number in counts.most_common() if event != "started")
        how = "was forced to end" if ended is Ended.FORCED else "ended"
        text = f"Worker {worker.identity} {how} after {duration(seconds)}: {told or 'no jobs'}."
        if options["log_format"] == "json":
            facts = {"worker": worker.identity, "seconds": round(seconds, 3), **counts}
            logger.info(text, extra={"event": "worker_ended", **facts})
        else:
            self.say(text, **options)


def _some(types: tuple[str, ...], at_most: int = 12) -> str:
    more = f" and {len(types) - at_most} more" if len(types) > at_most else ""
    return ", ".join(types[:at_most]) + more
