"""`manage.py race`: many processes claim what is due, all at once. For the tests."""

import multiprocessing
import os
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from django_forgejobs.models import Job
from tests.jobsapp.jobs import append

PATIENCE = 60


class Command(BaseCommand):
    """Forks the racers, which start together, and fails unless all of them end well."""

    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Add how many race, and where they write what they got."""
        parser.add_argument("path", help="file for a line `process job` for each claim")
        parser.add_argument("--processes", type=int, default=50)
        parser.add_argument("--limit", type=int, default=5, help="jobs a claim")

    def handle(self, *args: Any, path: str, processes: int, limit: int, **options: Any) -> None:
        """Fork after everything is imported: fifty starts of Django would take a minute."""
        connections.close_all()  # no connection may be shared by two processes
        fork = multiprocessing.get_context("fork")
        start = fork.Barrier(processes)
        racers = [fork.Process(target=race, args=(path, limit, start)) for _ in range(processes)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(PATIENCE)
        if codes := {racer.exitcode for racer in racers} - {0}:
            raise CommandError(f"Racers ended with {codes}.")


def race(path: str, limit: int, start: Any) -> None:
    """Claim until nothing is left, and write down what was got."""
    worker = f"racer:{os.getpid()}"
    connections["default"].ensure_connection()
    start.wait(PATIENCE)
    jobs = Job.objects.claim(limit, worker=worker)
    start.wait(PATIENCE)  # everybody has had one turn: a fast one cannot have taken all
    while jobs:
        for job in jobs:
            append(path, f"{worker} {job.pk}")
        jobs = Job.objects.claim(limit, worker=worker)
