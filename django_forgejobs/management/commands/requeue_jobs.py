"""``manage.py requeue_jobs``: give dead letters another chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_forgejobs.management.base import USAGE, JobsCommand, count, counted
from django_forgejobs.models import Job
from django_forgejobs.states import DEAD_LETTERS, REQUEUE

BY = "manage.py requeue_jobs"

#: Ids that are read at a time.
CHUNK = 500

WHAT = (
    "Which jobs? Name ids, or --type, --status or --queue; --all is every dead letter. Nothing was requeued."
)


class Command(JobsCommand):
    """Finds ids, in order, and requeues one after the other."""

    help = (
        "Give failed, dead or cancelled jobs fresh attempts, due now. Row by row: interrupted, it has done "
        "a part, and can be run again."
    )
    examples = """
requeue_jobs 17 18                    these
requeue_jobs --type email.send        the dead letters of a type
requeue_jobs --status dead --limit 10 a few, to see whether the fix works
requeue_jobs --all --dry-run          how many there are
"""
    logs_events = True

    def add_arguments(self, parser: CommandParser) -> None:
        """Add what says which jobs."""
        super().add_arguments(parser)
        statuses = sorted(status.value for status in REQUEUE.sources)
        parser.add_argument("ids", nargs="*", type=int, metavar="ID", help="id of a job")
        parser.add_argument("--type", help="jobs of this type")
        parser.add_argument("--queue", help="jobs of this queue")
        parser.add_argument(
            "--status",
            action="append",
            choices=statuses,
            help="jobs with this status; may be repeated (failed and dead)",
        )
        parser.add_argument("--all", action="store_true", help="every job of these statuses")
        parser.add_argument("--limit", metavar="N", type=count, help="the N oldest at the most")
        parser.add_argument("--dry-run", action="store_true", help="only say how many")
        parser.add_argument("--by", default="", help="who asks, for the job's history")

    def work(self, alias: str, **options: Any) -> None:
        """Requeue what was named."""
        filtered = any(options[name] for name in ("type", "queue", "status", "all"))
        if options["ids"] and filtered:
            raise CommandError("Name ids or filters, not both.", returncode=USAGE)
        if not options["ids"] and not filtered:
            raise CommandError(WHAT, returncode=USAGE)
        ids = _named(alias, options["ids"]) if options["ids"] else _found(alias, **options)
        by = f"{BY}, {options['by']}" if options["by"] else BY
        seen = moved = 0
        for id in ids:
            if options["limit"] is not None and seen >= options["limit"]:
                break
            seen += 1
            if options["dry_run"]:
                continue
            if Job.objects.requeue(id, by=by, db=alias):
                moved += 1
            elif options["ids"]:
                status = Job.objects.using(alias).values_list("status", flat=True).get(pk=id)
                self.say(
                    f"Job {id} is {status}: only failed, dead and cancelled ones can be requeued.",
                    **options,
                )
        if options["dry_run"]:
            self.say(f"{counted(seen)} would be requeued.", **options)
        else:
            self.say(f"{moved:,} of {counted(seen)} requeued.", **options)


def _named(alias: str, ids: list[int]) -> list[int]:
    """Return ``ids`` once each, in order; ``CommandError`` if one of them is no job."""
    known = set(Job.objects.using(alias).filter(pk__in=ids).values_list("pk", flat=True))
    if unknown := sorted(set(ids) - known):
        raise CommandError(
            f"There is no job {', '.join(map(str, unknown))}. Nothing was requeued; archived jobs cannot be.",
            returncode=USAGE,
        )
    return sorted(known)


def _found(alias: str, **options: Any) -> Iterator[int]:
    """Yield the ids of the jobs that the filters find, oldest first; each once, whatever becomes of it."""
    statuses = options["status"] or sorted(status.value for status in DEAD_LETTERS)
    jobs = Job.objects.using(alias).filter(status__in=statuses).order_by("pk")
    for name in ("type", "queue"):
        if options[name]:
            jobs = jobs.filter(**{name: options[name]})
    after = 0
    while ids := list(jobs.filter(pk__gt=after).values_list("pk", flat=True)[:CHUNK]):
        yield from ids
        after = ids[-1]
