"""``manage.py explain_job``: why a job is where it is."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_forgejobs import queue
from django_forgejobs.management.base import USAGE, JobsCommand


class Command(JobsCommand):
    """Prints the reasons, most important first."""

    help = "Say why a job is where it is, and what to do about it."
    examples = """
explain_job 17
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the id."""
        super().add_arguments(parser)
        parser.add_argument("id", type=int, help="id of the job")

    def work(self, alias: str, **options: Any) -> None:
        """Print a line about the job, then the reasons."""
        job = queue.get_job(options["id"], db=alias)
        reasons = queue.explain(options["id"], db=alias)
        if job is None:
            raise CommandError(" ".join(map(str, reasons)), returncode=USAGE)
        self.stdout.write(
            f"job {job.pk} {job.type}: {job.status}, queue {job.queue}, attempt {job.attempts} of "
            f"{job.max_attempts}, due {job.run_at:%Y-%m-%d %H:%M:%S %Z}"
        )
        for reason in reasons:
            self.stdout.write(f"- {reason}")
