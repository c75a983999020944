"""A deploy in the middle of the work: what runs ends once, its lease is kept, and the next worker goes on."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from django_forgejobs import enqueue, enqueue_many, reclaim
from django_forgejobs.models import Job
from tests.processes.harness import Manage, Process
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

SHORT = {"LEASE": 1.2, "HEARTBEAT": 0.3, "RECLAIM_INTERVAL": 0.2, "POLL_INTERVAL": 0.1}
Start = Callable[..., Process]


@pytest.fixture
def start(manage: Manage) -> Start:
    """Return a function that starts a worker with short leases on the jobs of tests.jobsapp."""

    def start(concurrency: int = 1) -> Process:
        env = {"FORGEJOBS_TEST_APPS": "tests.jobsapp"}
        return manage("runworker", "--concurrency", concurrency, env=env, forgejobs=SHORT)

    return start


def effects(path: Path) -> Counter[int]:
    return Counter(int(line) for line in path.read_text().splitlines()) if path.exists() else Counter()


def test_a_draining_worker_keeps_its_lease_until_the_very_last_result(start: Start, tmp_path: Path) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    enqueue("t.stuck", {"started": str(begun), "until": str(until)})
    draining = start()
    wait_for(lambda: effects(begun))
    draining.terminate()
    start()  # its reaper, and this test's, look for leases that have ended
    renewals: set[object] = set()

    def has_outlived_its_first_lease() -> bool:
        assert reclaim() == 0
        renewals.add(Job.objects.get().locked_until)
        return len(renewals) > 6

    wait_for(has_outlived_its_first_lease, message="the lease was not renewed during the drain")
    until.touch()
    assert draining.wait() == 0
    row = Job.objects.get()
    assert (row.status, row.claims, row.lease_expirations) == ("done", 1, 0)
    assert sum(effects(begun).values()) == 1


def test_a_rolling_deploy_runs_every_job_once_and_writes_down_what_has_ended(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "effects"
    enqueue_many({"type": "t.effect", "payload": {"path": str(path), "seconds": 0.02}} for _ in range(400))
    worker = start(4)
    for turn in range(1, 4):
        wait_for(lambda: len(effects(path)) >= 60 * turn, message="no progress")  # noqa: B023
        successor = start(4)
        worker.terminate()  # in the last moments of several jobs
        assert worker.wait() == 0
        worker = successor
    wait_for(lambda: not Job.objects.exclude(status="done").exists())
    # What had been claimed ahead and not begun was given back: claimed twice, but run once.
    assert set(Job.objects.values_list("attempts", "lease_expirations")) == {(1, 0)}
    assert set(effects(path).values()) == {1}
    assert len(effects(path)) == 400


def test_what_a_worker_gives_back_when_its_grace_is_over_is_run_by_the_next_at_once(
    start: Start, manage: Manage, tmp_path: Path
) -> None:
    """Not after a lease: the release is committed before the platform's SIGKILL can come."""
    begun, until = tmp_path / "begun", tmp_path / "until"
    id = enqueue("t.stuck", {"started": str(begun), "until": str(until)})
    env = {"FORGEJOBS_TEST_APPS": "tests.jobsapp"}
    leaving = manage("runworker", "--grace", 0.3, env=env)
    wait_for(lambda: effects(begun))
    leaving.terminate()
    assert leaving.wait() == 1
    row = Job.objects.get()
    assert (row.status, row.attempts, row.claim_token, row.lease_expirations) == ("ready", 0, None, 0)
    until.touch()
    start()
    wait_for(lambda: Job.objects.get().status == "done")
    assert (Job.objects.get().claims, effects(begun)[id]) == (2, 2)
