"""Workers that look for jobs every half minute only: what they do sooner, they were woken for."""

from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DEFAULT_DB_ALIAS, connection, connections

from django_forgejobs import enqueue, enqueue_many, requeue
from django_forgejobs.models import AnnouncedType, Job
from testproject.postgres import EmbeddedServer
from tests.factories import make_job
from tests.processes.harness import Manage, Process
from tests.sessions import session
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]

#: Seconds within which a woken worker has run a job, however busy the machine is.
SOON = 5


@pytest.fixture
def start(manage: Manage) -> Start:
    """Return a function that starts a worker which polls every half minute, and waits until it is idle."""

    def start(*arguments: object, **options: Any) -> Process:
        worker = manage(
            *("runworker", "--poll-interval", 30, *arguments),
            env={"FORGEJOBS_TEST_APPS": "tests.jobsapp"},
            **options,
        )
        worker.wait_for_output("  stop")
        return worker

    return start


def run_soon(*ids: int, worker: Process, db: str = DEFAULT_DB_ALIAS) -> None:
    jobs = Job.objects.using(db).filter(pk__in=ids)
    wait_for(
        lambda: jobs.filter(status="done").count() == len(ids),
        timeout=SOON,
        message=lambda: f"{list(jobs.values_list('status', flat=True))}\n{worker.output}",
    )


def pids(what: str, *, db: str = DEFAULT_DB_ALIAS) -> list[int]:
    """Return which backends serve connections whose name is like `what`."""
    with connections[db].cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity "
            "WHERE application_name LIKE %s AND datname = current_database()",
            [what],
        )
        return [pid for (pid,) in cursor.fetchall()]


def test_an_idle_worker_runs_a_job_as_soon_as_it_is_committed(start: Start) -> None:
    worker = start()
    for _ in range(3):
        run_soon(enqueue("t.ok"), worker=worker)
    run_soon(*enqueue_many([{"type": "t.ok"}] * 20), worker=worker)
    run_soon(*[enqueue("t.ok", queue=queue) for queue in "abc" * 5], worker=worker)
    dead = make_job(type="t.ok", status="dead")
    requeue(dead)
    run_soon(dead.pk, worker=worker)


def test_a_worker_of_one_queue_is_woken_by_its_jobs_alone(start: Start) -> None:
    worker = start("--queues", "a", "--concurrency", 2)
    other = enqueue("t.ok", queue="b")
    run_soon(enqueue("t.ok", queue="a"), worker=worker)
    assert Job.objects.get(pk=other).status == "ready"


@pytest.mark.postgres_only
def test_a_worker_whose_line_is_cut_listens_again_and_finds_what_came_meanwhile(start: Start) -> None:
    worker = start("--name", "cut")
    for _ in range(2):
        (pid,) = wait_for(lambda: pids("%worker cut:% listen"))
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
        meanwhile = enqueue("t.ok")
        worker.wait_for_output("wake this worker again")
        run_soon(meanwhile, enqueue("t.ok"), worker=worker)
    assert worker.output.count("do not wake this worker") == 2


@pytest.mark.postgres_only
def test_workers_are_woken_again_after_the_server_was_restarted(
    own_server: Callable[..., EmbeddedServer], start: Start, transactional_db: None
) -> None:
    server = own_server(settings={"fsync": "off"})
    with session("restarted", url=server.url) as there:
        call_command("migrate", "forgejobs", database="restarted", verbosity=0)
        worker = start(database_url=server.url)
        there.close()
        server.stop("immediate")
        worker.wait_for_output("do not wake this worker")
        server.start()
        worker.wait_for_output("wake this worker again")
        run_soon(enqueue("t.ok", db="restarted"), worker=worker, db="restarted")
        run_soon(enqueue("t.ok", db="restarted"), worker=worker, db="restarted")
        there.close()


@pytest.mark.postgres_only
def test_an_idle_worker_holds_one_connection_and_its_listener_one_whatever_its_concurrency(
    start: Start,
) -> None:
    workers = [start("--name", "idle", "--concurrency", 10) for _ in range(3)]
    jobs = enqueue_many([{"type": "t.ok"}] * 60)
    run_soon(*jobs, worker=workers[0])
    wait_for(lambda: AnnouncedType.objects.exists())
    for worker in workers:
        name = f"forgejobs worker idle:{worker.pid}"
        wait_for(lambda: len(pids(name)) == 1)  # noqa: B023
        assert len(pids(f"{name} listen")) == 1


@pytest.mark.postgres_only
def test_a_project_that_polls_alone_opens_no_second_connection(start: Start) -> None:
    worker = start("--name", "polls", forgejobs={"LISTEN_DATABASE": None})
    wait_for(AnnouncedType.objects.exists, message=lambda: worker.output)
    assert len(pids("%worker polls:%")) == 1
    worker.terminate()
    assert worker.wait() == 0
