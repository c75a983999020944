"""``manage.py jobs_status``: counts by queue and status, and the six measures."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import CommandParser

from django_forgejobs import measures
from django_forgejobs.management.base import JobsCommand
from django_forgejobs.states import Status


class Command(JobsCommand):
    """Prints a snapshot as a table, or as JSON for a monitor."""

    help = "Show how many jobs are where, and the measures to watch."
    examples = """
jobs_status
jobs_status --json                    for a monitor; ages in seconds
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the format."""
        super().add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def work(self, alias: str, **options: Any) -> None:
        """Print the snapshot."""
        snapshot = measures.snapshot(alias)
        if options["json"]:
            self.stdout.write(json.dumps(snapshot.as_dict(), indent=2))
        else:
            self.stdout.write("\n".join([*_counts(snapshot), "", *_measures(snapshot)]))


def _counts(snapshot: measures.Snapshot) -> list[str]:
    """Return a table with a line for each queue."""
    statuses = [status.value for status in Status]
    rows = [["queue", *statuses]]
    for queue, counts in sorted(snapshot.counts.items()):
        rows.append([queue, *(str(counts.get(status, 0)) for status in statuses)])
    if not snapshot.counts:
        rows.append(["(no jobs)", *("0" for _ in statuses)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _measures(snapshot: measures.Snapshot) -> list[str]:
    """Return a line for each of the measures."""
    oldest, seen = snapshot.oldest_ready_seconds, snapshot.scheduler_seen_seconds
    lines = {
        "oldest ready job": "none" if oldest is None else f"{oldest:.1f} s",
        "running by type": _pairs(snapshot.running_by_type),
        "jobs by attempts": _pairs(snapshot.attempts),
        "lease expirations": f"{snapshot.lease_expirations_per_hour:g} per hour",
        "dead letters": str(snapshot.dead_letters),
        "missed slots": f"{snapshot.missed_slots} in 24 hours",
        "scheduler": "none has run" if seen is None else f"seen {seen:.0f} s ago",
    }
    return [f"{name:<18} {value}" for name, value in lines.items()]


def _pairs(counts: dict[Any, int]) -> str:
    return ", ".join(f"{key}: {count}" for key, count in sorted(counts.items())) or "none"
