"""`manage.py runworker` as an operator meets it: real processes, real signals, exit codes, lines."""

import json
import signal
import socket
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from django_forgejobs import enqueue
from django_forgejobs.models import AnnouncedType, Job
from django_forgejobs.states import Status
from tests.processes.harness import Manage, Process
from tests.waiting import wait_for

APP = {"FORGEJOBS_TEST_APPS": "tests.jobsapp"}
STOPPING = "Stopping: what runs has"

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]


@pytest.fixture
def start(manage: Manage) -> Start:
    """Return a function that starts `runworker` with these arguments and the jobs of tests.jobsapp."""

    def start(*arguments: object, **options: Any) -> Process:
        return manage("runworker", "--poll-interval", 0.1, *arguments, **{"env": APP} | options)

    return start


def job(id: int) -> Job:
    return Job.objects.get(pk=id)


def run_until_told(tmp_path: Path, type: str = "t.stuck") -> tuple[int, Path, Path]:
    """Enqueue a job that runs until the second file exists and creates the first when it starts."""
    started, until = tmp_path / "started", tmp_path / "until"
    id = enqueue(type, {"started": str(started), "until": str(until)})
    return id, started, until


# --- Stopping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_told_to_stop_finishes_what_runs_takes_nothing_new_and_exits_0(
    start: Start, tmp_path: Path, number: int
) -> None:
    running, started, until = run_until_told(tmp_path)
    worker = start()
    wait_for(started.exists, message=lambda: worker.output)
    worker.popen.send_signal(number)
    worker.wait_for_output(STOPPING)
    other = enqueue("t.ok")
    until.touch()
    assert worker.wait() == 0, worker.output
    assert job(running).status == Status.DONE
    assert job(other).status == Status.READY
    assert "ended after" in worker.output
    assert "1 done" in worker.output


def test_an_idle_worker_says_little_and_leaves_at_once(start: Start) -> None:
    worker = start("--poll-interval", 30)
    wait_for(AnnouncedType.objects.exists, message=lambda: worker.output)
    told = time.monotonic()
    worker.terminate()
    assert worker.wait() == 0
    assert time.monotonic() - told < 1.5
    lines = worker.output.splitlines()
    assert lines[0].startswith("django_forgejobs ")
    names = [line.split()[0] for line in lines[1:] if line.startswith("  ")]
    assert names == ["database", "queues", "types", "concurrency", "lease", "stop"]
    (ended,) = (line for line in lines[7:] if STOPPING not in line)
    assert ended.endswith(": no jobs.")


def test_a_signal_that_comes_after_the_work_has_ended_changes_no_exit_code(start: Start) -> None:
    worker = start()
    worker.wait_for_output("  stop")
    worker.terminate()
    worker.wait_for_output("ended after")
    worker.interrupt()
    assert worker.wait() == 0, worker.output


def test_a_second_signal_gives_unfinished_jobs_back_and_waits_for_no_thread(
    start: Start, tmp_path: Path
) -> None:
    id, started, _ = run_until_told(tmp_path, "t.thread")
    worker = start()
    wait_for(started.exists, message=lambda: worker.output)
    worker.terminate()
    worker.wait_for_output(STOPPING)
    told = time.monotonic()
    worker.interrupt()
    assert worker.wait() == 1, worker.output
    assert time.monotonic() - told < 5
    given_back = job(id)
    assert (given_back.status, given_back.attempts, given_back.claim_token) == (Status.READY, 0, None)
    assert given_back.history[-1]["event"] == "release"
    assert f"job {id} t.thread given back" in worker.output
    assert "Unfinished jobs: 1 given back, 0 not, whose leases will end." in worker.output


def test_what_is_not_done_when_the_grace_is_over_is_given_back(start: Start, tmp_path: Path) -> None:
    id, started, _ = run_until_told(tmp_path)
    worker = start("--grace", 0.2)
    wait_for(started.exists, message=lambda: worker.output)
    worker.terminate()
    assert worker.wait() == 1, worker.output
    assert job(id).status == Status.READY
    assert "was forced to end" in worker.output


def test_a_signal_before_the_worker_works_ends_it_cleanly(manage: Manage) -> None:
    url = "postgresql://nobody@127.0.0.1:1/nothing"
    worker = manage("runworker", "--connect-timeout", 60, database_url=url, env=APP)
    worker.wait_for_output("cannot be reached")
    worker.terminate()
    assert worker.wait(timeout=5) == 0


@pytest.mark.postgres_only
def test_a_worker_that_hangs_in_a_statement_leaves_at_the_third_signal(start: Start) -> None:
    worker = start()
    worker.wait_for_output("  stop")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE forgejobs_job")
        wait_for(lambda: count(cursor, "SELECT count(*) FROM pg_locks WHERE NOT granted"))
        for words in (STOPPING, "Stopping at once"):
            worker.terminate()
            worker.wait_for_output(words)
        worker.terminate()
        assert worker.wait(timeout=5) == 1, worker.output
        assert "does not come to an end" in worker.output


def count(cursor: Any, query: str, *parameters: object) -> int:
    cursor.execute(query, parameters)
    (number,) = cursor.fetchone()
    return int(number)


# --- How much it does ----------------------------------------------------------------------------


def test_a_burst_runs_what_is_due_retries_included_and_exits_0(manage: Manage) -> None:
    due = [enqueue("t.ok"), enqueue("t.flaky", {"fails": 1}, max_attempts=3)]
    later = enqueue("t.ok", available_in=3600)
    worker = manage("forgejobs", "worker", "--burst", env=APP)
    assert worker.wait() == 0, worker.output
    assert [job(id).status for id in due] == [Status.DONE, Status.DONE]
    assert job(later).status == Status.READY
    assert "2 done, 1 retried." in worker.output


def test_a_worker_leaves_after_max_jobs(start: Start) -> None:
    for _ in range(5):
        enqueue("t.ok")
    assert start("--max-jobs", 3, "--concurrency", 2).wait() == 0
    assert Job.objects.filter(status=Status.DONE).count() == 3


def test_a_worker_serves_the_queues_it_was_given_and_no_others(start: Start) -> None:
    served = [enqueue("t.ok", queue=queue) for queue in ("a", "b")]
    other = enqueue("t.ok", queue="c")
    assert start("--queues", "a, b", "--burst").wait() == 0
    assert [job(id).status for id in (*served, other)] == ["done", "done", "ready"]


# --- Killed --------------------------------------------------------------------------------------


def test_a_job_whose_worker_was_killed_is_put_back_by_reclaim_jobs(start: Start, manage: Manage) -> None:
    id = enqueue("t.kill")
    worker = start(forgejobs={"LEASE": 0.6})
    assert worker.wait() == -signal.SIGKILL
    assert job(id).status == Status.RUNNING
    wait_for(lambda: Job.objects.expired().exists())
    reclaim = manage("reclaim_jobs", env=APP)
    assert reclaim.wait() == 0
    assert "1 job put back, 0 buried" in reclaim.output
    assert f"job {id} t.kill put back: Its worker died" in reclaim.output
    put_back = job(id)
    assert (put_back.status, put_back.attempts, put_back.lease_expirations) == (Status.READY, 0, 1)


def test_an_error_that_nobody_expected_ends_the_worker_with_1(start: Start) -> None:
    worker = start()
    worker.wait_for_output("  stop")
    try:
        rename("forgejobs_job", "forgejobs_hidden")
        assert worker.wait() == 1, worker.output
        assert "CRITICAL" in worker.output
        assert "Traceback" in worker.output
    finally:
        rename("forgejobs_hidden", "forgejobs_job")


def rename(table: str, to: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {to}")


# --- Exit codes 2, 3, 4 --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "forgejobs", "words"),
    [
        (("--queues", "a,,b"), None, "'a,,b': a queue's name is 1 to 64 characters, not ''"),
        (("--concurrency", "0"), None, "'0': expected a whole number, 1 or more"),
        (("--grace", "soon"), None, "'soon'"),
        (("--database", "elsewhere"), None, "'elsewhere'"),
        ((), {"LEESE": 900}, "FORGEJOBS['LEESE'] is not a setting. Did you mean 'LEASE'?"),
        ((), {"LEASE": 10, "HEARTBEAT": 10}, "shorter than three heartbeats"),
    ],
)
def test_wrong_usage_or_settings_exit_2_and_say_what_is_wrong(
    start: Start, arguments: tuple[str, ...], forgejobs: dict[str, Any] | None, words: str
) -> None:
    worker = start(*arguments, forgejobs=forgejobs)
    assert worker.wait() == 2
    assert words in worker.output
    assert "Traceback" not in worker.output


def test_a_database_out_of_reach_exits_3_after_some_tries(start: Start, tmp_path: Path) -> None:
    nowhere = {
        "postgresql": "postgresql://nobody@127.0.0.1:1/nothing",
        "sqlite": f"sqlite:///{tmp_path}/missing/db",
    }
    worker = start("--connect-timeout", 0.3, database_url=nowhere[connection.vendor])
    assert worker.wait() == 3
    assert 'Database "default" cannot be reached' in worker.output
    assert "Traceback" not in worker.output


def test_a_server_that_takes_a_connection_and_says_nothing_costs_no_minutes(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql://nobody@127.0.0.1:{server.getsockname()[1]}/nothing"
        worker = start("--connect-timeout", 0.5, database_url=url)
        assert worker.wait(timeout=10) == 3


def test_missing_migrations_exit_4_and_are_named(start: Start, tmp_path: Path) -> None:
    worker = start(database_url=f"sqlite:///{tmp_path}/empty.sqlite3")
    assert worker.wait() == 4
    assert "lacks migrations: forgejobs.0001_initial" in worker.output
    assert "manage.py migrate forgejobs" in worker.output
    assert "Traceback" not in worker.output


# --- Lines ---------------------------------------------------------------------------------------


def test_a_project_without_logging_sees_one_line_an_event_and_no_payload(start: Start) -> None:
    fine = enqueue("t.ok", {"password": "s3cr3t"}, max_attempts=3)
    bad = enqueue("t.fail", {"password": "s3cr3t"}, max_attempts=2)
    worker = start("--burst")
    assert worker.wait() == 0
    lines = worker.output.splitlines()
    assert [line for line in lines if f"INFO    job {fine} t.ok done in 0.0" in line]
    assert sum(f"job {fine} " in line for line in lines) == 1
    assert [line for line in lines if f"ERROR   job {bad} t.fail failed (attempt 1 of 2)" in line]
    assert [line for line in lines if f"ERROR   job {bad} t.fail dead (attempt 2 of 2)" in line]
    assert worker.output.count("Traceback (most recent call last)") == 2
    assert "ValueError: it always fails" in lines
    assert "s3cr3t" not in worker.output


def test_json_lines_are_all_that_a_worker_prints_with_log_format_json(start: Start) -> None:
    fine = enqueue("t.ok", {"password": "s3cr3t"}, queue="mail", max_attempts=3)
    bad = enqueue("t.fail")
    worker = start("--burst", "--log-format", "json")
    assert worker.wait() == 0
    lines = [json.loads(line) for line in worker.output.splitlines()]
    assert [line["event"] for line in lines] == ["worker_started", "done", "dead", "worker_ended"]
    assert {line["logger"] for line in lines} == {"django_forgejobs"}
    done, dead = lines[1:3]
    asked = ("level", "job_id", "type", "queue", "attempt", "max_attempts")
    assert [done[key] for key in asked] == ["INFO", fine, "t.ok", "mail", 1, 3]
    assert done["worker"] == job(fine).locked_by
    assert done["time"].endswith("+00:00")
    assert (dead["job_id"], dead["level"]) == (bad, "ERROR")
    assert "ValueError: it always fails" in dead["traceback"]
    assert "s3cr3t" not in worker.output


def test_a_name_that_the_terminal_cannot_show_ends_no_worker(start: Start) -> None:
    enqueue("t.ok", queue="caf\u00e9")
    worker = start("--burst", "--queues", "caf\u00e9", env={**APP, "PYTHONIOENCODING": "ascii"})
    assert worker.wait() == 0, worker.output
    assert "queues       caf\\xe9" in worker.output
    assert ": 1 done." in worker.output


@pytest.mark.postgres_only
def test_the_server_shows_whose_a_workers_connections_are(start: Start) -> None:
    worker = start("--name", "web")
    worker.wait_for_output("  stop")
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    with connection.cursor() as cursor:
        assert count(cursor, query, f"forgejobs worker web:{worker.pid}") >= 1


# --- Reload --------------------------------------------------------------------------------------

CODE = """
    import threading
    from pathlib import Path
    from django_forgejobs import job

    @job("w.run")
    def run(payload):
        if payload:
            Path(payload["started"]).touch()
            while not Path(payload["until"]).exists():
                threading.Event().wait(0.02)
        return VERSION
"""


def test_changed_code_is_run_after_what_runs_has_finished(start: Start, tmp_path: Path) -> None:
    app = tmp_path / "watched"
    app.mkdir()
    (app / "__init__.py").touch()
    code = textwrap.dedent(CODE)
    (app / "jobs.py").write_text(code.replace("VERSION", "1"))
    env = {"FORGEJOBS_TEST_APPS": "watched", "PYTHONPATH": str(tmp_path)}
    old, started, until = run_until_told(tmp_path, "w.run")
    worker = start("--reload", env=env)
    wait_for(started.exists, message=lambda: worker.output)

    (app / "jobs.py").write_text(code.replace("return VERSION", "return ("))
    worker.wait_for_output("goes on with the old code")
    (app / "jobs.py").write_text(code.replace("VERSION", "'two'"))
    worker.wait_for_output("finishing what runs, then restarting")
    new = enqueue("w.run")
    until.touch()
    wait_for(lambda: job(new).status == Status.DONE, message=lambda: worker.output)
    assert (job(old).result, job(old).attempts) == (1, 1)
    assert job(new).result == "two"
    worker.terminate()
    assert worker.wait() == 0, worker.output
