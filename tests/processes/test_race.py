"""Everybody at once: each job is had by one claimer, and nobody is told of a deadlock."""

from pathlib import Path
from typing import Any

import pytest

from django_forgejobs import archive, enqueue_many, reaper
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import BURY, COMPLETE, RETRY
from tests.factories import in_seconds
from tests.processes.harness import Manage
from tests.sessions import in_threads

pytestmark = pytest.mark.django_db(transaction=True)

APPS = {"FORGEJOBS_TEST_APPS": "tests.jobsapp"}


@pytest.mark.parametrize("limit", [1, 7])
def test_fifty_processes_claim_each_of_a_thousand_jobs_once(
    limit: int, manage: Manage, tmp_path: Path
) -> None:
    pks = enqueue_many({"type": f"t.{n % 3}", "queue": "ab"[n % 2], "priority": n % 2} for n in range(1000))
    got = tmp_path / "got"
    racing = manage("race", got, "--processes", 50, "--limit", limit, env=APPS)
    assert racing.wait(timeout=60) == 0, racing.output
    claims = [line.split() for line in got.read_text().splitlines()]
    assert sorted(int(pk) for _, pk in claims) == pks
    rows = Job.objects.values_list("pk", "locked_by", "claims", "attempts", "status")
    assert set(rows) == {(int(pk), worker, 1, 1, "running") for worker, pk in claims}
    assert Job.objects.values("claim_token").distinct().count() == 1000
    # Not all fifty: one that finds every row locked for a moment goes home.
    assert len({worker for worker, _ in claims}) > 10


def test_workers_reapers_archivers_and_people_at_once_get_no_deadlock_to_see(settings: Any) -> None:
    """Overlapping sets of rows, in whatever order each comes to them; what does clash is run again."""
    settings.FORGEJOBS = {"RETENTION": {"done": 0, "failed": 0, "dead": 0, "cancelled": 0}}
    enqueue_many({"type": "t", "priority": n % 5, "max_attempts": 99} for n in range(400))

    def work(turn: int) -> None:
        jobs = Job.objects.claim(20, worker=f"w:{turn}")
        ends = [Outcome(job, (COMPLETE, RETRY, BURY)[job.pk % 3], delay=0, error="e") for job in jobs[:15]]
        Job.objects.renew({job.pk: job.claim_token for job in jobs if job.claim_token})
        Job.objects.finish(ends[::-1])

    def reap(turn: int) -> None:
        for pk in Job.objects.filter(status="running").values_list("pk", flat=True):
            Job.objects.filter(pk=pk, status="running").update(locked_until=in_seconds(-1))
        reaper.tick("default")

    def archive_some(turn: int) -> None:
        for _ in archive.batches("default", delete=bool(turn % 2)):
            pass

    def requeue_and_cancel(turn: int) -> None:
        for pk in Job.objects.order_by("-pk").values_list("pk", flat=True)[:20]:
            if not Job.objects.requeue(pk):
                Job.objects.cancel(pk)

    def enqueue_more(turn: int) -> None:
        keys = [f"k{(turn + n) % 30}" for n in range(30)]
        enqueue_many({"type": "t", "idempotency_key": key} for key in keys[:: 1 if turn % 2 else -1])

    people = [requeue_and_cancel, enqueue_more, enqueue_more]
    parts = [work, work, work, reap, reap, archive_some, archive_some, *people]

    def take_part(index: int) -> None:
        for turn in range(15):
            parts[index](turn)

    in_threads(len(parts), take_part)
    assert Job.objects.exists()
