"""Fifty processes race for the same jobs; each job is had by one of them."""

from pathlib import Path

import pytest

from django_forgejobs import enqueue_many
from django_forgejobs.models import Job
from tests.processes.harness import Manage

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
    assert len({worker for worker, _ in claims}) > 10, "this was no race"
