"""What was enqueued, what became of it, and how often: counted from rows, mail and the web service."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from django.db.models import Count, Sum

from django_forgejobs import conf
from django_forgejobs.models import Job, Schedule, ScheduleSlot
from django_forgejobs.states import Status
from testproject.clocks.models import ClockChange, Run
from testproject.demo import recurring
from testproject.demo.narrator import Narrator
from testproject.demo.recurring import MINUTE, MINUTELY, TYPE, Recurring
from testproject.demo.story import MISSING_ZONE, Facts

ENDS = [Status.DONE, Status.DEAD, Status.FAILED, Status.CANCELLED]


@dataclass
class Findings:
    """Checks that were made, with what they found."""

    narrator: Narrator
    wrong: list[str] = field(default_factory=list)

    def check(self, ok: bool, text: str) -> None:
        """Print a finding, and remember it if it is bad."""
        self.narrator.check(ok, text)
        if not ok:
            self.wrong.append(text)


def summarise(narrator: Narrator, facts: Facts) -> Findings:
    """Print the table and the checks."""
    jobs = {job.pk: job for job in Job.objects.filter(pk__lte=facts.until)}
    runs = Counter(dict(Run.objects.values_list("job_id").annotate(Count("pk")).order_by()))
    narrator.title("Summary")
    _table(narrator, jobs, runs)
    narrator.show()
    findings = Findings(narrator)
    _nothing_lost(findings, facts, jobs)
    _nothing_doubled(findings, facts, jobs, runs)
    _each_slot_once(findings, facts.recurring, jobs)
    _each_kind(findings, facts, jobs, runs)
    return findings


def _table(narrator: Narrator, jobs: dict[int, Job], runs: Counter[int]) -> None:
    narrator.show(f"{'type':<20}{'jobs':>6}{'done':>8}{'dead':>8}{'failed':>8}{'cancelled':>11}{'runs':>8}")
    rows = {kind: [job for job in jobs.values() if job.type == kind] for kind in _kinds(jobs)}
    for kind, group in [*rows.items(), ("all", list(jobs.values()))]:
        count = Counter(job.status for job in group)
        ran = sum(runs[job.pk] for job in group)
        narrator.show(
            f"{kind:<20}{len(group):>6}{count['done']:>8}{count['dead']:>8}{count['failed']:>8}"
            f"{count['cancelled']:>11}{ran:>8}"
        )


def _kinds(jobs: dict[int, Job]) -> list[str]:
    return list(dict.fromkeys(job.type for job in sorted(jobs.values(), key=lambda job: job.pk)))


def _nothing_lost(findings: Findings, facts: Facts, jobs: dict[int, Job]) -> None:
    count = Counter(job.status for job in jobs.values())
    waiting = count["ready"] + count["running"]
    parts = " + ".join(f"{count[status]} {status.value}" for status in ENDS)
    total = sum(count[status] for status in ENDS)
    scheduled = set(recurring.scheduled(facts.until))
    findings.check(
        len(facts.enqueued) + len(scheduled) == total and not waiting,
        f"Nothing is lost: {len(facts.enqueued)} enqueued + {len(scheduled)} by schedules = {parts}"
        f" + {waiting} waiting.",
    )
    findings.check(
        set(jobs) == facts.enqueued | scheduled and not facts.left_by_rollback,
        "The rows are those that enqueue returned, and those of the schedules; the job of the rolled-back"
        " transaction is not there.",
    )
    first, second = facts.asked_twice
    findings.check(first == second, f"Two enqueues with one idempotency key gave one job ({first}).")


def _nothing_doubled(findings: Findings, facts: Facts, jobs: dict[int, Job], runs: Counter[int]) -> None:
    reasons = {pk: job.attempts + job.lease_expirations for pk, job in jobs.items()}
    unexplained = [str(job) for pk, job in jobs.items() if not runs[pk] <= reasons[pk] <= job.claims]
    given_back = sum(job.claims - reasons[pk] for pk, job in jobs.items())
    findings.check(
        not unexplained,
        "No job was run without a reason: each began once an attempt, and once more for each worker that died"
        f" with it{_listed(unexplained)}. Claimed ahead, and given back before they began: {given_back}.",
    )
    died_with = {pk for pk, job in jobs.items() if job.lease_expirations}
    again = [pk for pk in facts.zones.values() if runs[pk] > 1]
    unbegun = [pk for pk in died_with if runs[pk] < jobs[pk].claims]
    names = {pk: zone for zone, pk in facts.zones.items()}
    findings.check(
        set(again) <= died_with,
        f"Jobs that ran again because their worker was killed: {len(again)}"
        f"{_listed([names[pk] for pk in again])}. Claimed, but not yet begun: {len(unbegun)}.",
    )
    mails = _mails(facts.mail)
    doubled = [pk for pk, number in mails.items() if number > 1]
    wanted = set(facts.zones.values()) - {facts.zones[MISSING_ZONE]}
    rows = ClockChange.objects.filter(mailed_at__isnull=False).count()
    findings.check(
        set(mails) == wanted and rows == len(wanted) and set(doubled) <= died_with,
        f"{len(wanted)} zones have {rows} results and {mails.total()} mails. Mailed twice, because the worker"
        f" was killed between the mail and the mark: {len(doubled)}{_listed([names[pk] for pk in doubled])}.",
    )
    spared = _starved(jobs, facts)
    if spared:
        findings.narrator.show(
            f"({len(spared)} leases ran out although their worker lived: this machine was too busy to renew"
            f" them within {conf.current().LEASE:g} s.)"
        )


def _each_slot_once(findings: Findings, known: Recurring, jobs: dict[int, Job]) -> None:
    """Compare what should have fired, by the clock, with the ledger and with the jobs."""
    minutely = Schedule.objects.get(name=MINUTELY)  # first: slots that come later do not count
    assert known.since is not None
    assert known.this_minute is not None
    assert minutely.last_slot is not None
    due = (minutely.last_slot - known.since) // MINUTE + 1
    slots = ScheduleSlot.objects.filter(schedule=minutely, slot__lte=minutely.last_slot)
    counts = dict(slots.order_by("fate").values_list("fate").annotate(Sum("count")))
    rows = slots.filter(fate="missed").count()
    findings.check(
        bool(counts.get("fired")) and set(counts) <= {"fired", "missed"} and due == sum(counts.values()),
        f'Slots: {due} minutes of "{MINUTELY}" were due = {counts.get("fired", 0)} fired +'
        f" {counts.get('missed', 0)} missed (in {rows} row{'' if rows == 1 else 's'} of the ledger).",
    )
    made = Counter(job.payload["area"] for job in jobs.values() if "area" in job.payload)
    daily = ScheduleSlot.objects.filter(schedule__payload__has_key="area", fate="fired")
    fired = Counter(daily.filter(slot=known.this_minute).values_list("schedule__payload__area", flat=True))
    once = Counter(recurring.areas())
    wrong = sorted(area for area in once | made | fired if not made[area] == fired[area] == once[area])
    findings.check(
        not wrong and bool(known.killed),
        f"Each of {len(once)} daily schedules fired once, although a scheduler was killed:"
        f" {made.total()} jobs{_listed(wrong)}.",
    )
    fates = recurring.scheduled(max(jobs, default=0))
    found = {pk for pk, job in jobs.items() if job.type == TYPE}
    findings.check(
        found == set(fates) and fates.get(known.by_hand or 0) == "by_hand",
        f"The ledger names {len(fates)} jobs, 1 of them run by hand, and there are no others of {TYPE}.",
    )


def _each_kind(findings: Findings, facts: Facts, jobs: dict[int, Job], runs: Counter[int]) -> None:
    kinds = {name: jobs[pk] for name, pk in facts.others.items()}
    limit = conf.current().MAX_LEASE_EXPIRATIONS
    lease = conf.current().LEASE
    job = kinds["publish"]
    taken = facts.service.taken[str(job.pk)]
    findings.check(
        job.status == "done" and job.attempts == 3 and 1 <= taken <= 1 + job.lease_expirations,
        f"Retry: {job.type} was refused twice, then done at attempt {job.attempts}.",
    )
    job = kinds["fax"]
    findings.check(
        job.status == "dead" and job.attempts == job.max_attempts == runs[job.pk] - job.lease_expirations,
        f"Dead letter: {job.type} failed {job.attempts} times of {job.max_attempts}, so it is {job.status}.",
    )
    job = jobs[facts.zones[MISSING_ZONE]]
    findings.check(
        job.status == "failed" and job.attempts == 1,
        f"Failed without a retry, since none can help: {MISSING_ZONE}.",
    )
    job = kinds["survey"]
    seconds = (job.result or {}).get("seconds", 0)
    findings.check(
        job.status == "done" and seconds > lease,
        f"Heartbeat: {job.type} ran for {seconds:g} s on leases of {lease:g} s, and its lease ran out"
        f" {job.lease_expirations} times.",
    )
    findings.check(
        bool(facts.in_hands) and all(jobs[held.pk].status in ENDS for held in facts.in_hands),
        f"Kill -9: the {len(facts.in_hands)} jobs in the hands of the killed worker have all ended.",
    )
    job = kinds["crash_once"]
    findings.check(
        job.status == "done" and job.lease_expirations >= 1 and job.attempts == 1,
        f"Recovered: {job.type} killed its worker, was not charged for it, and was done by the next one.",
    )
    job = kinds["crash"]
    findings.check(
        job.status == "dead" and job.lease_expirations == limit,
        f"Poison: {job.type} killed {runs[job.pk]} workers and was then buried.",
    )
    job = kinds["cancelled"]
    findings.check(job.status == "cancelled" and not runs[job.pk], "Cancelled: never run.")


def _starved(jobs: dict[int, Job], facts: Facts) -> list[int]:
    """Return the jobs whose lease ran out although nobody had killed their worker."""
    killed = tuple(f":{pid}:" for pid in facts.killed)
    return [
        pk
        for pk, job in jobs.items()
        if any(
            entry["event"] == "reclaim" and not any(mark in entry["worker"] for mark in killed)
            for entry in job.history
        )
    ]


def _mails(directory: Path) -> Counter[int]:
    """Count the mails by job: their Message-ID names it."""
    found: Counter[int] = Counter()
    for path in directory.glob("*.log"):
        text = path.read_text(errors="replace")
        found.update(int(pk) for pk in re.findall(r"^Message-ID: <job-(\d+)@", text, re.MULTILINE))
    return found


def _listed(names: list[str], most: int = 10) -> str:
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return f" ({shown})" if names else ""
