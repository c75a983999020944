"""``manage.py next_runs``: when a cron expression runs. Asks no database."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from django_forgejobs import cron
from django_forgejobs.cron import Run
from django_forgejobs.exceptions import JobError
from django_forgejobs.management.base import USAGE, Help, epilog

#: Runs that are shown at most.
AT_MOST = 1000


class Command(BaseCommand):
    """Parses, asks ``cron``, prints."""

    help = (
        "Show when a cron expression runs, with what clock changes do to it. Exits 2 with a reason for an "
        "expression that no schedule can have."
    )
    examples = """
next_runs "*/15 8-18 * * mon-fri"
next_runs "30 2 * * *" --tz Europe/Berlin --start 2026-03-28T00:00Z --count 3
next_runs "H H(1-4) * * *" --name nightly.report
next_runs @daily --json
"""
    requires_system_checks = []

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Add the examples to the help."""
        kwargs |= {"epilog": epilog(prog_name, self.examples), "formatter_class": Help}
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the expression, and where and when it runs."""
        parser.add_argument("cron", help="five fields in quotes, or an alias such as @daily")
        parser.add_argument("--tz", metavar="ZONE", help="time zone (TIME_ZONE)")
        parser.add_argument(
            "--start", metavar="ISO", help="instant, with Z or an offset, that runs follow (now)"
        )
        parser.add_argument("--count", metavar="N", default="10", help=f"number of runs, 1 to {AT_MOST} (10)")
        parser.add_argument("--name", help="name of the schedule, for H to hash")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the runs, or refuse with the reason."""
        zone = settings.TIME_ZONE if options["tz"] is None else options["tz"]
        try:
            found = cron.parse(options["cron"], zone, name=options["name"])
        except JobError as error:
            raise CommandError(str(error), returncode=USAGE) from error
        runs = found.runs(_start(options["start"]), _count(options["count"]))
        if options["json"]:
            told = {"cron": options["cron"], "timezone": zone, "runs": [_as_dict(run) for run in runs]}
            self.stdout.write(json.dumps(told, indent=2))
            return
        for warning in found.warnings:
            self.stderr.write(f"Note: {warning}")
        lines = [
            f"{run.local:%a %Y-%m-%d %H:%M %Z}  {run.slot:%Y-%m-%d %H:%M}Z  {run.note}".rstrip()
            for run in runs
        ]
        # At once: `| head` reads no more than it shows.
        self.stdout.write("\n".join(lines) or "None: there is no such day before the year 9000.")


def _start(text: str | None) -> datetime:
    if text is None:
        return datetime.now(UTC)
    try:
        start = datetime.fromisoformat(text)
    except ValueError:
        start = None
    if start is None or start.utcoffset() is None:
        raise CommandError(
            f"--start {text!r} is no instant in ISO 8601 with an offset, such as 2026-03-08T00:00Z or "
            "2026-03-08T00:00+01:00.",
            returncode=USAGE,
        )
    return start


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not 1 <= number <= AT_MOST:
        raise CommandError(f"--count {text!r} is no whole number from 1 to {AT_MOST}.", returncode=USAGE)
    return number


def _as_dict(run: Run) -> dict[str, str]:
    return {
        "utc": f"{run.slot:%Y-%m-%dT%H:%M:%SZ}",
        "local": run.local.isoformat(),
        "note": run.note,
    }
