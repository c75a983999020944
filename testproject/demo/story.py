"""What the demo does, in order, and what it tells meanwhile. The counting is in `summary`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from django.core.management import call_command
from django.db import transaction

from django_forgejobs import cancel, conf, enqueue, enqueue_many, explain
from django_forgejobs.models import Job
from testproject.clocks.jobs import crash, crash_once, fax, publish, survey
from testproject.clocks.zones import read_table
from testproject.demo import recurring
from testproject.demo.narrator import Narrator
from testproject.demo.recurring import Recurring
from testproject.demo.service import Service
from testproject.demo.supervisor import Supervisor

MISSING_ZONE = "Mars/Olympus_Mons"
KILL_AFTER = 100  # zones done
PATIENCE = 90.0  # seconds for all jobs together


@dataclass
class Facts:
    """What the demo knows of its jobs beside their rows."""

    service: Service
    mail: Path
    zones: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    left_by_rollback: int = 0
    asked_twice: tuple[int, int] = (0, 0)
    in_hands: list[Job] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    recurring: Recurring = field(default_factory=Recurring)
    until: int = 2**63 - 1  # the last job that is counted: schedules go on

    @property
    def enqueued(self) -> set[int]:
        """The ids that enqueue returned and whose transaction was committed."""
        return {*self.zones.values(), *self.others.values()}


def migrate(narrator: Narrator) -> None:
    """Make the tables."""
    call_command("migrate", verbosity=0, interactive=False)
    narrator.say("Migrated.")


def enqueue_all(narrator: Narrator, facts: Facts) -> None:
    """Enqueue inside transactions: one that is rolled back, one that is committed."""
    lease = conf.current().LEASE
    now = datetime.now(UTC).replace(microsecond=0)
    fax_machine = {"url": f"{facts.service.url}/fax", "text": "The clocks change."}
    almanac = {"url": f"{facts.service.url}/almanac", "edition": date.today().year}
    try:
        with transaction.atomic():
            fax.enqueue(fax_machine)
            raise ValueError("the order was refused")
    except ValueError:
        facts.left_by_rollback = Job.objects.count()
        narrator.say("A job was enqueued in a transaction that was then rolled back: it never existed.")

    with transaction.atomic():
        names = [*read_table(), MISSING_ZONE]
        ids = enqueue_many(
            {"type": "clocks.zone", "payload": {"zone": zone, "after": now.isoformat()}} for zone in names
        )
        facts.zones = dict(zip(names, ids, strict=True))
        key = f"almanac-{now.year}"
        facts.asked_twice = (
            publish.enqueue(almanac, idempotency_key=key),
            publish.enqueue(almanac, idempotency_key=key),
        )
        facts.others = {
            "publish": facts.asked_twice[0],
            "fax": fax.enqueue(fax_machine),
            "survey": survey.enqueue({"after": now.isoformat(), "seconds": 2 * lease}),
            "crash": crash.enqueue(),
            "crash_once": crash_once.enqueue(),
            "cancelled": enqueue("clocks.fax", fax_machine, available_in=timedelta(days=1)),
        }
    cancel(facts.others["cancelled"], by="the demo")
    narrator.say(
        f"{len(facts.enqueued)} jobs were enqueued in one transaction: {len(names)} time zones (one of them"
        " on Mars) and six others. One was asked for twice with one idempotency key, one is due tomorrow and"
        " was cancelled."
    )


def start_workers(narrator: Narrator, supervisor: Supervisor) -> None:
    """Start three real worker processes, for three queues."""
    lease = conf.current().LEASE
    supervisor.fill("zones", "runworker", "--queues", "default", "--concurrency", "8")
    supervisor.fill("slow", "runworker", "--queues", "slow,reports", "--concurrency", "2")
    supervisor.fill("risky", "runworker", "--queues", "risky")
    narrator.say("Three workers start. Whoever dies is started again, as systemd would do:")
    for post in supervisor.posts.values():
        narrator.show(f"manage.py {post.child.command:<54} pid {post.child.pid}")
    narrator.show(
        f"(a lease is {lease:g} s here, so that recovery can be watched; the default is 15 minutes)"
    )


def run_all(narrator: Narrator, facts: Facts, supervisor: Supervisor, watch: Watch) -> None:
    """Wait until every job has ended; in the middle of the zones, kill their worker."""
    facts.killed = supervisor.killed
    deadline = time.monotonic() + PATIENCE
    steps = recurring.story(narrator, facts.recurring, supervisor)
    while not _all_ended(facts):
        next(steps, None)
        if not facts.in_hands:
            _kill(narrator, facts, supervisor)
        supervisor.tend()
        watch.look()
        if time.monotonic() > deadline:
            _tell_stuck(narrator)
            return
        time.sleep(0.05)
    watch.look()
    narrator.say("Every job has ended.")


def _all_ended(facts: Facts) -> bool:
    """Whether the schedules' story is told, and no job waits of those that there are by now."""
    facts.until = Job.objects.order_by("-pk").values_list("pk", flat=True)[0]
    alive = Job.objects.filter(pk__lte=facts.until, status__in=["ready", "running"])
    return facts.recurring.ended and not alive.exists()


def _kill(narrator: Narrator, facts: Facts, supervisor: Supervisor) -> None:
    done = Job.objects.filter(type="clocks.zone", status="done").count()
    if done < KILL_AFTER:
        return
    pid = supervisor.posts["zones"].child.pid
    facts.in_hands = supervisor.kill_if_busy("zones")
    if facts.in_hands:
        narrator.say(
            f"{done} of {len(facts.zones)} zones are done: kill -9 {pid}, the worker that runs"
            f" {', '.join(job.payload['zone'] for job in facts.in_hands)}."
            f" Started again, pid {supervisor.posts['zones'].child.pid}."
        )


def _tell_stuck(narrator: Narrator) -> None:
    narrator.say(f"Some jobs have not ended within {PATIENCE:g} s:")
    for job in Job.objects.filter(status__in=["ready", "running"])[:10]:
        narrator.show(f"{job}: {' '.join(str(reason) for reason in explain(job))}")


class Watch:
    """Tells once of each thing that the histories of the jobs say."""

    def __init__(self, narrator: Narrator) -> None:
        self.narrator = narrator
        self.told: set[tuple[int, int, str]] = set()

    def look(self) -> None:
        """Tell what is new."""
        back = []
        for job in Job.objects.exclude(history=[]).exclude(status="cancelled").order_by("pk"):
            for entry in job.history:
                mark = (job.pk, entry["claim"], entry["event"])
                if mark in self.told:
                    continue
                self.told.add(mark)
                if job.type == "clocks.zone" and entry["event"] == "reclaim":
                    back.append(job.payload["zone"])
                else:
                    self.narrator.say(_happened(job, entry))
        if back:
            self.narrator.say(
                f"The leases of {len(back)} zones ran out with their worker, so another one has put them back"
                f" into the queue, where each runs alone: {', '.join(back)}."
            )


def _happened(job: Job, entry: dict[str, str]) -> str:
    name = f"{job.type} (job {job.pk})"
    reason = entry.get("message") or job.last_error
    match entry["event"]:
        case "retry":
            return f"{name} failed and will be tried again: {reason}"
        case "bury":
            return f"{name} is out of attempts, so it is a dead letter: {reason}"
        case "fail":
            return f"{name} failed for good: {reason}"
        case "reclaim" if job.status == "dead":
            return f"{name} has killed its last worker, so it is a dead letter: {reason}"
        case "reclaim":
            return f"{name} is back in the queue: its worker died, and its lease ran out."
        case "requeue":
            return f"{name} was requeued by {entry.get('by', 'somebody')}."
        case event:
            return f"{name}: {event}."
