"""Workers killed, workers frozen, and jobs that kill: nothing is lost, and little is done twice."""

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from django_forgejobs import enqueue, enqueue_many
from django_forgejobs.models import Job
from django_forgejobs.worker import Worker
from tests.factories import in_seconds, make_job
from tests.processes.harness import Manage, Process
from tests.sessions import beside, gate
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

SHORT = {
    "LEASE": 1.5,
    "HEARTBEAT": 0.4,
    "RECLAIM_INTERVAL": 0.3,
    "POLL_INTERVAL": 0.1,
    "SUSPECT_PATIENCE": 0.5,
}
Start = Callable[..., Process]


@pytest.fixture
def start(manage: Manage) -> Start:
    """Return a function that starts a worker with short leases on the jobs of tests.jobsapp."""

    def start(concurrency: int = 8, name: str = "victim", **forgejobs: Any) -> Process:
        env = {"FORGEJOBS_TEST_APPS": "tests.jobsapp", "PGAPPNAME": name}
        return manage(
            "runworker", "--concurrency", concurrency, "--name", name, env=env, forgejobs=SHORT | forgejobs
        )

    return start


def effects(path: Path) -> Counter[int]:
    return Counter(int(line) for line in path.read_text().splitlines()) if path.exists() else Counter()


def remaining() -> int:
    return Job.objects.filter(status__in=("ready", "running")).count()


def expire_all() -> None:
    Job.objects.filter(status="running").update(locked_until=in_seconds(-1))


# --- At any moment -------------------------------------------------------------------------------


def test_kills_at_any_moment_of_five_hundred_jobs_lose_none_and_double_only_what_had_died(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "effects"
    enqueue_many({"type": "t.effect", "payload": {"path": str(path), "seconds": 0.05}} for _ in range(500))
    # Chance must not kill the same job's worker three times: that would rightly bury it.
    workers = [start(MAX_LEASE_EXPIRATIONS=1000) for _ in range(2)]
    seed = random.randrange(1_000_000)
    chance = random.Random(seed)

    def is_time(moment: float, seen: int) -> bool:
        return (time.monotonic() > moment and len(effects(path)) > seen) or not remaining()

    kills = 0
    while kills < 5 and remaining():
        moment, seen = time.monotonic() + chance.uniform(0, 0.5), len(effects(path))
        wait_for(partial(is_time, moment, seen), interval=0.001, message=f"no progress (seed {seed})")
        victim = workers.pop(0)
        victim.kill()
        kills += 1
        workers.append(start(MAX_LEASE_EXPIRATIONS=1000))
        assert victim.wait() == -signal.SIGKILL
    wait_for(lambda: not remaining(), timeout=60, message=lambda: f"{remaining()} left (seed {seed})")
    done = effects(path)
    assert kills >= 3, "the jobs were over too soon for this to say anything"
    for job in Job.objects.all():
        assert (job.status, job.attempts) == ("done", 1), (seed, job, job.last_error)
        assert 1 <= done[job.pk] <= 1 + job.lease_expirations, (seed, job, done[job.pk])
        assert job.claims == 1 + job.lease_expirations, (seed, job)


# --- At chosen moments ---------------------------------------------------------------------------


def test_a_worker_killed_while_it_runs_a_job_costs_one_lease_and_no_attempt(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "effects"
    enqueue("t.stuck", {"started": str(path)})
    worker = start(RECLAIM_INTERVAL=0)
    wait_for(lambda: effects(path))
    worker.kill()
    worker.wait()
    assert Job.objects.get().status == "running"
    assert Job.objects.reclaim() == []  # its lease is not over
    wait_for(Job.objects.reclaim, message="the lease never ended")
    successor = Worker(db="default", handlers={"t.stuck": lambda payload: "done by another"}, burst=True)
    successor.run()
    row = Job.objects.get()
    assert (row.status, row.attempts, row.claims, row.lease_expirations) == ("done", 1, 2, 1)
    assert effects(path)[row.pk] == 1


@pytest.mark.postgres_only
@pytest.mark.parametrize("status", ["running", "done"])
def test_a_worker_killed_in_the_middle_of_a_write_leaves_it_done_or_not_done(
    status: str, start: Start, tmp_path: Path
) -> None:
    """Its server process goes on with the statement; either way the row is whole and nothing is lost."""
    path = tmp_path / "effects"
    enqueue("t.effect", {"path": str(path)})
    with gate("victim", per="ROW", when=f"NEW.status = '{status}' AND OLD.status <> NEW.status") as closed:
        worker = start(RECLAIM_INTERVAL=0)
        closed.wait()
        worker.kill()
        worker.wait()
        assert Job.objects.get().status == ("ready" if status == "running" else "running")
        closed.open()
        wait_for(lambda: Job.objects.get().status == status, message="the statement was not completed")
    assert effects(path)[Job.objects.get().pk] == (0 if status == "running" else 1)
    expire_all()
    Job.objects.reclaim()
    seen: list[int] = []
    Worker(db="default", handlers={"t.effect": lambda payload: seen.append(1)}, burst=True).run()
    assert Job.objects.get().status == "done"
    assert len(seen) == (1 if status == "running" else 0)


@pytest.mark.postgres_only
def test_a_killed_reaper_holds_up_nobody_and_the_next_one_does_the_rest(manage: Manage) -> None:
    for _ in range(5):
        make_job(status="running", lease=-1)
    with gate("victim", per="ROW") as closed:
        reaper = manage("reclaim_jobs", env={"PGAPPNAME": "victim"})
        closed.wait()
        reaper.kill()
        reaper.wait()
        with connection.cursor() as cursor:  # what a server does by itself once it notices
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'victim'"
            )
        wait_for(lambda: Job.objects.reclaim() or not remaining_running())
    assert set(Job.objects.values_list("status", "lease_expirations")) == {("ready", 1)}


def remaining_running() -> int:
    return Job.objects.filter(status="running").count()


# --- Frozen --------------------------------------------------------------------------------------


def test_a_frozen_worker_that_wakes_while_its_successor_runs_the_job_cannot_finish_it(
    start: Start, tmp_path: Path
) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    enqueue("t.stuck", {"started": str(begun), "until": str(until)})
    frozen = start(RECLAIM_INTERVAL=0)
    wait_for(begun.exists)
    frozen.popen.send_signal(signal.SIGSTOP)
    wait_for(Job.objects.reclaim, message="the lease of the frozen worker never ended")
    inside, let_out = tmp_path / "inside", tmp_path / "out"

    def by_successor(payload: Any) -> str:
        inside.touch()
        wait_for(let_out.exists)
        return "by the successor"

    successor = Worker(db="default", handlers={"t.stuck": by_successor}, burst=True)
    with beside(successor.run):
        wait_for(inside.exists)
        row = Job.objects.values().get()
        until.touch()
        frozen.popen.send_signal(signal.SIGCONT)
        frozen.wait_for_output("claim was gone before")
        assert Job.objects.values().get() == row
        let_out.touch()
    job = Job.objects.get()
    assert (job.status, job.result, job.claims) == ("done", "by the successor", 2)
    assert frozen.is_running()  # it goes on with other jobs


# --- Jobs that kill ------------------------------------------------------------------------------


def test_a_killer_with_two_hundred_neighbours_ends_as_exactly_one_dead_job(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "effects"
    jobs: list[dict[str, Any]] = [{"type": "t.effect", "payload": {"path": str(path)}} for _ in range(200)]
    jobs.insert(100, {"type": "t.kill", "max_attempts": 3})
    pks = enqueue_many(jobs)
    worker, starts = start(), 1

    def over() -> bool:
        nonlocal worker, starts
        if not worker.is_running():  # as a supervisor does
            worker, starts = start(), starts + 1
        return not remaining()

    wait_for(over, timeout=40, message=lambda: f"{remaining()} left, {starts} starts\n{worker.output}")
    dead = Job.objects.get(status="dead")
    assert dead.pk == pks[100]
    assert dead.last_error.startswith("Its worker died")
    assert (dead.lease_expirations, dead.attempts, dead.claims) == (3, 0, 3)
    assert starts == 4
    others = Job.objects.exclude(pk=dead.pk)
    assert set(others.values_list("status", flat=True)) == {"done"}
    done = effects(path)
    # What ran beside it the first time may have run twice. Afterwards it died alone.
    assert {1 + job.lease_expirations >= done[job.pk] >= 1 for job in others} == {True}
    assert max(others.values_list("lease_expirations", flat=True)) <= 1
