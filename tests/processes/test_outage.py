"""The server goes away under real workers: no live worker loses a job, and nobody needs to restart one."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from django_forgejobs import between, enqueue, enqueue_many, reclaim
from django_forgejobs.models import Job
from testproject.postgres import EmbeddedServer
from tests.processes.harness import Manage, Process
from tests.sessions import session
from tests.waiting import wait_for

pytestmark = [pytest.mark.postgres_only, pytest.mark.django_db(transaction=True)]

DB = "outage"
Start = Callable[..., Process]


@pytest.fixture(scope="module")
def private_server(own_server: Callable[..., EmbeddedServer]) -> EmbeddedServer:
    return own_server(settings={"fsync": "off"})


@pytest.fixture
def server(private_server: EmbeddedServer, transactional_db: None) -> Iterator[EmbeddedServer]:
    """Return a server of our own with our tables, empty, and the alias `outage` for it."""
    with session(DB, url=private_server.url):
        call_command("migrate", "forgejobs", database=DB, verbosity=0)
        Job.objects.using(DB).all().delete()
        yield private_server


@pytest.fixture
def start(manage: Manage, server: EmbeddedServer) -> Start:
    """Return a function that starts a worker on that server."""

    def start(concurrency: int = 4, **forgejobs: Any) -> Process:
        return manage(
            "runworker",
            "--concurrency",
            concurrency,
            env={"FORGEJOBS_TEST_APPS": "tests.jobsapp"},
            forgejobs={"POLL_INTERVAL": 0.1, "RECLAIM_INTERVAL": 0.2, **forgejobs},
            database_url=server.url,
        )

    return start


def effects(path: Path) -> Counter[int]:
    return Counter(int(line) for line in path.read_text().splitlines()) if path.exists() else Counter()


def stop(server: EmbeddedServer, mode: str = "fast") -> None:
    """Stop the server; the test's own connection, at least, knows of it."""
    between.close(connections[DB])
    server.stop(mode)


def restart(server: EmbeddedServer, mode: str = "fast") -> None:
    stop(server, mode)
    server.start()


def jobs() -> Any:
    return Job.objects.using(DB)


def test_restarts_in_the_middle_of_the_work_cost_no_job_a_second_run(
    server: EmbeddedServer, start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "effects"
    payload = {"path": str(path), "seconds": 0.1}
    enqueue_many(({"type": "t.effect", "payload": payload} for _ in range(200)), db=DB)
    workers = [start(LEASE=60, HEARTBEAT=0.5) for _ in range(2)]
    for seen, mode in ((10, "immediate"), (80, "fast")):
        wait_for(lambda: len(effects(path)) >= seen, message="no progress")  # noqa: B023
        restart(server, mode)
    wait_for(lambda: not jobs().exclude(status="done").exists(), timeout=30)
    assert set(effects(path).values()) == {1}
    assert set(jobs().values_list("attempts", "claims", "lease_expirations")) == {(1, 1, 0)}
    for worker in workers:
        assert worker.is_running()
        worker.terminate()
        assert worker.wait() == 0


def test_an_outage_longer_than_the_lease_costs_live_workers_nothing(
    server: EmbeddedServer, start: Start, tmp_path: Path
) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    payload = {"started": str(begun), "until": str(until)}
    enqueue_many(({"type": "t.stuck", "payload": payload} for _ in range(6)), db=DB)
    workers = [start(3, LEASE=1.5, HEARTBEAT=0.5) for _ in range(2)]
    wait_for(lambda: len(effects(begun)) == 6)
    claims = set(jobs().values_list("pk", "claim_token"))
    stop(server)
    for worker in workers:
        worker.wait_for_output("3 of 3 leases have run out")
    server.start()
    assert reclaim(db=DB) == 0  # a reaper from a timer, the moment the server is up
    for worker in workers:
        worker.wait_for_output("Leases are renewed again")
        worker.wait_for_output("The database is back")
    assert set(jobs().values_list("pk", "claim_token")) == claims
    until.touch()
    wait_for(lambda: not jobs().exclude(status="done").exists())
    assert set(jobs().values_list("attempts", "claims", "lease_expirations")) == {(1, 1, 0)}
    assert set(effects(begun).values()) == {1}


def test_results_of_jobs_that_end_during_an_outage_are_written_when_it_is_over(
    server: EmbeddedServer, start: Start, tmp_path: Path
) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    enqueue("t.stuck", {"started": str(begun), "until": str(until)}, db=DB)
    worker = start(1, LEASE=60)
    wait_for(lambda: effects(begun))
    stop(server, "immediate")
    until.touch()
    worker.wait_for_output("try 2")
    server.start()
    wait_for(lambda: jobs().get().status == "done", message=lambda: worker.output)
    row = jobs().get()
    assert (row.claims, row.attempts, row.history) == (1, 1, [])
    enqueue("t.ok", db=DB)
    wait_for(lambda: jobs().filter(status="done").count() == 2)
    worker.terminate()
    assert worker.wait() == 0


def test_leases_that_ended_before_the_outage_are_reclaimed_one_heartbeat_after_it(
    server: EmbeddedServer, start: Start, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    enqueue("t.stuck", {"started": str(begun)}, db=DB)
    victim = start(1, LEASE=1, HEARTBEAT=0.3)
    wait_for(lambda: effects(begun))
    victim.kill()
    victim.wait()
    restart(server)
    start(1, LEASE=1, HEARTBEAT=0.3)
    wait_for(lambda: sum(effects(begun).values()) == 2, message="the dead worker's job never came back")
    assert jobs().get().lease_expirations == 1
