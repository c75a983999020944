"""`runworker --processes M`: real processes killed, frozen, recycled; what they held runs again at once."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from django_forgejobs import enqueue
from django_forgejobs.models import Job
from tests.processes.harness import Manage, Process
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()"),
]

APP = {"FORGEJOBS_TEST_APPS": "tests.jobsapp"}
#: A lease that no test could wait for.
LONG = {"LEASE": 900, "POLL_INTERVAL": 0.1, "SUSPECT_PATIENCE": 0.3}

Start = Callable[..., Process]


@pytest.fixture
def start(manage: Manage) -> Start:
    """Return a function that starts `runworker --processes 2` with these arguments on tests.jobsapp."""

    def start(*arguments: object, forgejobs: dict[str, Any] | None = None, **options: Any) -> Process:
        settings = LONG | (forgejobs or {})
        return manage("runworker", "--processes", 2, *arguments, env=APP, forgejobs=settings, **options)

    return start


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def children(supervisor: Process) -> list[int]:
    """Return the process ids of the workers that have said that they start."""
    return [int(pid) for pid in re.findall(r"Worker [^:\s]+:(\d+):\w+ starts", supervisor.output)]


def holder(id: int) -> int:
    """Return the process that runs a job."""
    return int(Job.objects.get(pk=id).locked_by.split(":")[1])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def states() -> set[str]:
    return set(Job.objects.values_list("status", flat=True))


def stop(supervisor: Process) -> None:
    supervisor.terminate()
    assert supervisor.wait() == 0, supervisor.output


# --- Death ---------------------------------------------------------------------------------------


def test_the_job_of_a_killed_process_runs_again_at_once_and_not_after_its_lease(
    start: Start, tmp_path: Path
) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    id = enqueue("t.stuck", {"started": str(begun), "until": str(until)})
    supervisor = start()
    wait_for(lambda: lines(begun), message=lambda: supervisor.output)
    victim = holder(id)
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(lines(begun)) == 2, timeout=3, message=lambda: supervisor.output)
    assert time.monotonic() - killed < 3
    until.touch()
    wait_for(lambda: states() == {"done"}, message=lambda: supervisor.output)
    row = Job.objects.get()
    assert (row.attempts, row.claims, row.lease_expirations) == (1, 2, 1)
    (entry,) = row.history
    assert entry["event"] == "reclaim"
    assert f"process {victim} " in row.last_error
    assert "was killed by SIGKILL (expiration 1 of 3)." in row.last_error
    stop(supervisor)
    assert "3 processes" in supervisor.output or "4 processes" in supervisor.output
