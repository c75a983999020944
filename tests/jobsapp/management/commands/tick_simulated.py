"""`manage.py tick_simulated`: schedulers that go by a clock of the test's, and are killed. For the tests."""

import multiprocessing
import os
import random
import signal
import threading
from argparse import ArgumentParser
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connection, connections
from django.db.models import Subquery

from django_forgejobs import logs, scheduler
from django_forgejobs.models import Tally

fork = multiprocessing.get_context("fork")

#: One row of a table that schedulers read nothing from is the time, for all processes.
CLOCK = Subquery(Tally.objects.filter(event="clock").values("at")[:1])


def set_clock(at: datetime) -> None:
    """Let it be `at`."""
    Tally.objects.update_or_create(event="clock", defaults={"at": at, "type": "clock", "count": 1})


class Command(BaseCommand):
    """Forks the schedulers, since many starts of Django would take a minute, and kills them."""

    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add who dies when."""
        parser.add_argument("--processes", type=int, default=5)
        parser.add_argument("--seed", type=int, default=0, help="of the moments of death")
        parser.add_argument("--until", help="go on until this file exists")
        parser.add_argument(
            "--die-in",
            type=int,
            nargs="+",
            metavar="PK",
            help="settle the nth of these, die after statement n",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Kill by plan, or at random; fail if a scheduler ends in any other way."""
        logs.set_up("text", verbosity=1)
        connections.close_all()  # no connection may be shared by two processes
        if options["die_in"]:
            for number, pk in enumerate(options["die_in"], start=1):
                killed(start(partial(settle_and_die, pk, number)))
        else:
            self.kill_at_random(options["processes"], random.Random(options["seed"]), Path(options["until"]))

    def kill_at_random(self, processes: int, chance: random.Random, until: Path) -> None:
        """Kill one scheduler after the other, and start another in its place."""
        schedulers = [start(tick_on) for _ in range(processes)]
        kills = 0
        while not until.exists():
            threading.Event().wait(chance.uniform(0, 0.06))
            victim = schedulers.pop(chance.randrange(processes))
            kill(victim)
            kills += 1
            schedulers.append(start(tick_on))
        for each in schedulers:
            kill(each)
        self.stdout.write(f"{kills} killed")


def start(act: Callable[[], None]) -> Any:
    """Run `act` in a process of its own."""
    process = fork.Process(target=act)
    process.start()
    return process


def kill(process: Any) -> None:
    """Kill a process that runs."""
    process.kill()
    killed(process)


def killed(process: Any) -> None:
    """Wait for the end of a process; raise unless it was killed."""
    process.join(60)
    if process.exitcode != -signal.SIGKILL:
        raise CommandError(f"A scheduler ended with {process.exitcode}.")


def tick_on() -> None:
    """Tick without a pause, until killed or orphaned."""
    parent = os.getppid()
    while os.getppid() == parent:
        scheduler.tick("default", clock=CLOCK)


def settle_and_die(pk: int, number: int) -> None:
    """Settle one schedule, and die when `number` statements of it have been executed."""
    done = 0

    def count(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        nonlocal done
        answer = execute(sql, params, many, context)
        done += 1
        if done == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    connection.ensure_connection()  # not what it sends of its own, when it opens
    with connection.execute_wrapper(count):
        scheduler.settle(pk, "default", clock=CLOCK)
