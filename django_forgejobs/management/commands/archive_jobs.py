"""``manage.py archive_jobs``: finished jobs out of the way; for a nightly timer or cron."""

from __future__ import annotations

import time
from typing import Any

from django.core.management.base import CommandParser

from django_forgejobs import archive
from django_forgejobs.management.base import JobsCommand, count, counted

#: Seconds between two lines of progress.
PROGRESS = 5.0


class Command(JobsCommand):
    """Moves batch after batch until nothing is due."""

    help = (
        "Move finished jobs that are older than FORGEJOBS['RETENTION'] keeps them into the archive table. "
        "Small batches, a commit each: it can be interrupted and run beside workers."
    )
    examples = """
archive_jobs                          every night
archive_jobs --delete                 away with them, no archive
archive_jobs --dry-run                how many are due
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add what to do with them, and how many."""
        super().add_arguments(parser)
        parser.add_argument("--delete", action="store_true", help="delete instead of moving")
        parser.add_argument("--dry-run", action="store_true", help="only say how many are due")
        parser.add_argument(
            "--limit", metavar="N", type=count, help="start no further batch after so many jobs"
        )

    def work(self, alias: str, **options: Any) -> None:
        """Move what is due."""
        if options["dry_run"]:
            for status, number in archive.due(alias).items():
                self.say(f"{counted(number, status)} {'is' if number == 1 else 'are'} due.", **options)
            return
        verb = "deleted" if options["delete"] else "archived"
        total, told = 0, time.monotonic()
        for moved in archive.batches(alias, delete=options["delete"]):
            total += moved
            if options["limit"] is not None and total >= options["limit"]:
                break
            if time.monotonic() - told >= PROGRESS:
                told = time.monotonic()
                self.say(f"{counted(total)} {verb} so far", **options)
        archive.prune(alias)
        self.say(f"{counted(total)} {verb}.", **options)
