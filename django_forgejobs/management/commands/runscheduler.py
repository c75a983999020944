"""``manage.py runscheduler``: make jobs of what is due by its schedule."""

from __future__ import annotations

import logging
import platform
import time
from typing import Any

import django
from django.core.management.base import CommandError, CommandParser

import django_forgejobs
from django_forgejobs import between, reload, watchdog
from django_forgejobs.jobs import BUILT_IN
from django_forgejobs.management.base import FORCED, counted
from django_forgejobs.management.process import (
    ProcessCommand,
    describe_database,
    duration,
    watching,
)
from django_forgejobs.management.stopping import Words
from django_forgejobs.scheduler import Tick
from django_forgejobs.ticker import Ticker
from django_forgejobs.worker import identity

logger = logging.getLogger("django_forgejobs")


class Command(ProcessCommand):
    """Parses, ticks until told to stop, and says what was done."""

    help = (
        "Enqueue the jobs of schedules when their slots come, each once. Any number may run at the same "
        "time, and any may be killed. It runs no jobs itself: workers do. TERM or Ctrl-C: exit 0."
    )
    examples = """
runscheduler                          until told to stop
runscheduler --once                   what is due now, for a systemd timer or cron
runworker --scheduler                 in a worker's process, for small sites
"""
    role = "scheduler"
    words = Words(
        first="Stopping after the schedule under way.",
        second="Stopping.",
        left="The scheduler does not come to an end and is left: what it had begun is rolled back.",
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add whether it ticks once."""
        super().add_arguments(parser)
        parser.add_argument("--once", action="store_true", help="tick once, then exit")

    def work(self, alias: str, **options: Any) -> None:
        """Tick once, or until told to stop."""
        # Also in an outage: another start of this process would not find the database sooner.
        ticker = self.ticker(alias, on_round=lambda: watchdog.tell(watchdog.ALIVE))
        self.stopping.on_stop = ticker.request_stop
        if options["once"]:
            self.say(f"{_told(ticker.once())}.", **options)
            return
        watch = self.watch(on_change=ticker.request_stop, **options)
        name = identity(options["name"])
        self.announce(ticker, name, reloads=watch is not None, **options)
        watchdog.tell(watchdog.READY)
        started = time.monotonic()
        try:
            with watching(watch):
                ticker.run()
        except Exception as error:
            logger.critical("The scheduler ends: it met an error that it does not know.", exc_info=True)
            raise CommandError("The scheduler was forced to end: see its log.", returncode=FORCED) from error
        finally:
            watchdog.tell(watchdog.STOPPING)
            if self.has_own_process:
                between.close_all()
        text = f"Scheduler {name} ended after {duration(time.monotonic() - started)}: {_told(ticker.done)}."
        if options["log_format"] == "json":
            logger.info(text, extra={"event": "scheduler_ended", "scheduler": name, **vars(ticker.done)})
        else:
            self.say(text, **options)
        if watch is not None and watch.changed and not self.stopping.signals:
            reload.restart()

    def announce(self, ticker: Ticker, scheduler: str, *, reloads: bool, **options: Any) -> None:
        """Say what was started, where, and how to stop it."""
        ours = ticker.declared.keys() - BUILT_IN
        facts = {
            "version": django_forgejobs.__version__,
            "scheduler": scheduler,
            "database": describe_database(ticker.db),
            "declared": sorted(ticker.declared),
        }
        if options["log_format"] == "json":
            logger.info("scheduler started", extra={"event": "scheduler_started", **facts})
            return
        lines = (
            ("database", facts["database"]),
            ("schedules", f"{len(ours)} declared in code, {len(BUILT_IN)} built in, and those of the admin"),
            ("tick", f"every {ticker.interval:g} s"),
            ("reload", "when code changes" if reloads else ""),
            ("stop", "Ctrl-C or TERM"),
        )
        self.say(
            f"django_forgejobs {facts['version']}, Django {django.__version__}, "
            f"Python {platform.python_version()}, scheduler {scheduler}\n"
            + "\n".join(f"  {what:<12} {value}" for what, value in lines if value),
            **options,
        )


def _told(tick: Tick) -> str:
    return (
        f"{counted(tick.fired)} enqueued, {tick.missed} slots missed, {tick.skipped} skipped, "
        f"{tick.disabled} schedules disabled"
    )
