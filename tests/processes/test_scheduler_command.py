"""`manage.py runscheduler`, and `runworker --scheduler`, as an operator meets them: real processes."""

import json
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, connections

from django_forgejobs import between
from django_forgejobs.models import Job, Liveness, Schedule, ScheduleSlot
from testproject.postgres import EmbeddedServer
from tests.factories import in_seconds, make_schedule
from tests.processes.harness import Manage, Process
from tests.sessions import session
from tests.waiting import wait_for

APP = {"FORGEJOBS_TEST_APPS": "tests.jobsapp"}
QUICK = {"POLL_INTERVAL": 0.1}
YEARLY = "0 0 1 1 *"
REPORT = {"job_type": "t.ok", "cron": YEARLY, "payload": {"a": 1}}

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]


@pytest.fixture
def start(manage: Manage) -> Start:
    """Return a function that starts `runscheduler` with these arguments and the jobs of tests.jobsapp."""

    def start(
        *arguments: object,
        command: str = "runscheduler",
        forgejobs: Any = None,
        env: Any = None,
        **options: Any,
    ) -> Process:
        return manage(
            command, *arguments, forgejobs=QUICK | (forgejobs or {}), env=APP | (env or {}), **options
        )

    return start


def make_due(**fields: Any) -> Schedule:
    """Make a schedule with a slot that is due now, and none for a long time after it."""
    return make_schedule(cron=YEARLY, **{"next_run_at": in_seconds(-1)} | fields)


def is_fired(schedule: Schedule) -> bool:
    return ScheduleSlot.objects.filter(schedule=schedule, fate="fired").exists()


def errors(output: str) -> list[str]:
    words = ("ERROR", "CRITICAL", "Traceback", "Exception")
    return [line for line in output.splitlines() if any(word in line for word in words)]


# --- Starting and stopping -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_scheduler_makes_jobs_of_what_is_due_until_told_to_stop_and_leaves_at_once(
    start: Start, number: int
) -> None:
    first = make_due(payload={"a": 1})
    process = start()
    wait_for(lambda: is_fired(first), message=lambda: process.output)
    second = make_due()
    wait_for(lambda: is_fired(second), message=lambda: process.output)
    told = time.monotonic()
    process.popen.send_signal(number)
    assert process.wait() == 0, process.output
    assert time.monotonic() - told < 1.5
    assert sorted(Job.objects.values_list("type", "status")) == [("t.ok", "ready")] * 2
    lines = process.output.splitlines()
    assert lines[0].startswith("django_forgejobs ")
    assert [line.split()[0] for line in lines[1:] if line.startswith("  ")] == [
        "database",
        "schedules",
        "tick",
        "stop",
    ]
    assert sum("fired: job" in line for line in lines) == 2
    # Not always the last line: that of the signal is written by a thread.
    assert any("2 jobs enqueued, 0 slots missed" in line for line in lines[-2:])
    assert errors(process.output) == []


def test_an_idle_scheduler_leaves_at_once_however_long_it_sleeps(start: Start) -> None:
    process = start(forgejobs={"POLL_INTERVAL": 60})
    wait_for(Liveness.objects.exists, message=lambda: process.output)
    told = time.monotonic()
    process.terminate()
    assert process.wait() == 0, process.output
    assert time.monotonic() - told < 1.5


def test_a_signal_before_the_database_is_reached_ends_a_scheduler_cleanly(start: Start) -> None:
    url = "postgresql://nobody@127.0.0.1:1/nothing"
    process = start("--connect-timeout", 60, database_url=url)
    process.wait_for_output("cannot be reached")
    process.terminate()
    assert process.wait(timeout=5) == 0


def test_once_does_what_is_due_and_exits_0(start: Start) -> None:
    make_due()
    make_schedule(next_run_at=in_seconds(-600), on_missed="skip")
    process = start("--once")
    assert process.wait() == 0, process.output
    summary = r"1 job enqueued, 1[12] slots missed, 0 skipped, 0 schedules disabled\."
    assert re.fullmatch(summary, process.output.splitlines()[-1]), process.output
    again = start("--once")
    assert again.wait() == 0
    assert "0 jobs enqueued" in again.output
    assert Job.objects.count() == 1


def test_schedules_of_the_settings_become_rows_and_fire(start: Start) -> None:
    process = start(forgejobs={"SCHEDULES": {"report": REPORT}})
    wait_for(lambda: Schedule.objects.filter(name="report", next_run_at__isnull=False).exists())
    assert "2 declared in code, 2 built in" in process.output  # with two of our own and one of the demo's
    assert not Job.objects.exists()
    Schedule.objects.filter(name="report").update(next_run_at=in_seconds(-1))
    wait_for(Job.objects.exists, message=lambda: process.output)
    assert Job.objects.get().payload == {"a": 1}


# --- Exit codes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"job_type": "t.okay"}, "job type 't.okay' is not registered. Did you mean 't.ok'?"),
        ({"cron": "0 0 31 2 *"}, "there is no such day in any year"),
        ({"cron": "* * * *"}, "it has 4 fields"),
        ({"timezone": "Europe/Pari"}, "Europe/Pari"),
        ({"spread": "soon"}, "soon"),
        ({"crone": "* * * * *"}, "Did you mean"),
        ({"on_missed": "never"}, "latest, all, skip"),
    ],
)
def test_a_wrong_schedule_in_the_settings_exits_2_and_says_what_is_wrong(
    start: Start, wrong: dict[str, Any], words: str
) -> None:
    process = start(forgejobs={"SCHEDULES": {"report": REPORT | wrong}})
    assert process.wait() == 2, process.output
    assert words in process.output
    assert "report" in process.output
    assert "Traceback" not in process.output


def test_a_worker_with_a_wrong_schedule_in_the_settings_exits_2_if_it_is_to_tick(start: Start) -> None:
    wrong = {"SCHEDULES": {"report": REPORT | {"cron": "every day"}}}
    process = start("--scheduler", command="runworker", forgejobs=wrong)
    assert process.wait() == 2, process.output
    assert "report" in process.output


def test_a_database_out_of_reach_exits_3(start: Start, tmp_path: Path) -> None:
    nowhere = {
        "postgresql": "postgresql://nobody@127.0.0.1:1/nothing",
        "sqlite": f"sqlite:///{tmp_path}/missing/db",
    }
    process = start("--connect-timeout", 0.3, database_url=nowhere[connection.vendor])
    assert process.wait() == 3
    assert 'Database "default" cannot be reached' in process.output
    assert "Traceback" not in process.output


def test_missing_migrations_exit_4_and_are_named(start: Start, tmp_path: Path) -> None:
    process = start(database_url=f"sqlite:///{tmp_path}/empty.sqlite3")
    assert process.wait() == 4
    assert "lacks migrations: forgejobs.0001_initial" in process.output


def test_an_error_that_nobody_expected_ends_a_scheduler_with_1(start: Start) -> None:
    """C127: a table is gone."""
    process = start()
    wait_for(Liveness.objects.exists)
    try:
        rename("forgejobs_schedule", "forgejobs_hidden")
        assert process.wait() == 1, process.output
        assert "CRITICAL" in process.output
        assert "The scheduler was forced to end: see its log." in process.output
    finally:
        rename("forgejobs_hidden", "forgejobs_schedule")


def rename(table: str, to: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {to}")


# --- Lines ---------------------------------------------------------------------------------------


def test_json_lines_are_all_that_a_scheduler_prints_with_log_format_json(start: Start) -> None:
    schedule = make_due(payload={"password": "s3cr3t"})
    process = start("--log-format", "json", "--name", "web")
    wait_for(lambda: is_fired(schedule), message=lambda: process.output)
    process.terminate()
    assert process.wait() == 0
    lines = [json.loads(line) for line in process.output.splitlines()]
    events = [line["event"] for line in lines if "event" in line]
    assert events == ["scheduler_started", "slot_fired", "scheduler_ended"]
    begun, fired, ended = (line for line in lines if "event" in line)
    assert begun["scheduler"].startswith(f"web:{process.pid}:")
    assert begun["declared"] == ["clocks.upcoming", "forgejobs.archive", "forgejobs.reclaim"]
    asked = ("level", "schedule", "type", "job_id")
    assert [fired[key] for key in asked] == ["INFO", schedule.name, "t.ok", Job.objects.get().pk]
    assert (ended["fired"], ended["missed"]) == (1, 0)
    assert "s3cr3t" not in process.output


def test_a_service_manager_hears_of_the_start_of_every_round_and_of_the_end(
    start: Start, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(15)
        process = start(env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert [heard.recv(100) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
        process.terminate()
        while (word := heard.recv(100)) == b"WATCHDOG=1":
            pass
        assert word == b"STOPPING=1"
        assert process.wait() == 0


# --- Several, and killed -------------------------------------------------------------------------


def test_three_schedulers_fire_fifty_schedules_of_one_instant_once_each_and_say_no_error(
    start: Start,
) -> None:
    """C017."""
    processes = [start() for _ in range(3)]
    for process in processes:
        process.wait_for_output("  stop")
    schedules = [make_schedule(cron="0 23 * * *", next_run_at=in_seconds(2)) for _ in range(50)]
    wait_for(lambda: ScheduleSlot.objects.count() == 50, message=lambda: processes[0].output)
    for process in processes:
        process.terminate()
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert [error for process in processes for error in errors(process.output)] == []
    assert sum(process.output.count("fired: job") for process in processes) == 50
    assert Job.objects.count() == 50
    assert set(ScheduleSlot.objects.values_list("schedule", "fate")) == {(s.pk, "fired") for s in schedules}


def test_what_a_killed_scheduler_would_have_done_another_does_from_the_stored_slot(start: Start) -> None:
    """C003: killed before the slot, the next one starts after it."""
    victim = start()
    wait_for(Liveness.objects.exists, message=lambda: victim.output)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    schedule = make_schedule(next_run_at=in_seconds(-90))
    assert start("--once").wait() == 0
    assert list(schedule.slots.order_by("slot").values_list("fate", flat=True)) == ["missed", "fired"]
    assert Job.objects.count() == 1


@pytest.mark.postgres_only
def test_a_killed_scheduler_leaves_nothing_behind_in_the_database(start: Start) -> None:
    victim = start("--name", "victim")
    wait_for(Liveness.objects.exists, message=lambda: victim.output)
    assert sessions_of("scheduler victim") == 1
    victim.kill()
    victim.wait()
    wait_for(lambda: sessions_of("scheduler victim") == 0)


def sessions_of(name: str, then: str = "true", last: str = "%") -> int:
    """Return how many sessions a process has whose last statement is like that."""
    query = (
        f"SELECT count(*) FILTER (WHERE {then}) FROM pg_stat_activity "
        "WHERE application_name LIKE %s AND query LIKE %s AND datname = current_database()"
    )
    with connection.cursor() as cursor:
        cursor.execute(query, [f"forgejobs {name}:%", last])
        return int(cursor.fetchone()[0])


# --- Outages -------------------------------------------------------------------------------------


@pytest.mark.postgres_only
def test_a_scheduler_whose_connection_is_cut_goes_on_with_another(start: Start) -> None:
    """C061."""
    process = start("--name", "cut")
    for cuts in (1, 2):
        schedule = make_due()
        wait_for(partial(is_fired, schedule), message=lambda: process.output)
        assert sessions_of("scheduler cut", then="pg_terminate_backend(pid)") == 1
        process.wait_for_output("The database is back")
        wait_for(lambda: process.output.count("The database is back") == cuts)  # noqa: B023
    schedule = make_due()
    wait_for(partial(is_fired, schedule), message=lambda: process.output)
    assert process.output.count("out of reach") == 2
    process.terminate()
    assert process.wait() == 0
    assert errors(process.output) == []


@pytest.mark.postgres_only
def test_an_outage_costs_a_scheduler_one_line_a_try_and_no_slot(
    own_server: Callable[..., EmbeddedServer], start: Start, tmp_path: Path
) -> None:
    server = own_server(settings={"fsync": "off"})
    with session("outage", url=server.url), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        call_command("migrate", "forgejobs", database="outage", verbosity=0)
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(5)
        process = start(database_url=server.url, env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        process.wait_for_output("  stop")
        slots = ScheduleSlot.objects.using("outage")
        schedule = make_schedule(db="outage", cron=YEARLY, next_run_at=in_seconds(1))
        between.close(connections["outage"])
        server.stop("immediate")
        process.wait_for_output("try 3")
        assert hears_anew(heard) == b"WATCHDOG=1"  # no manager need restart it
        server.start()
        wait_for(
            lambda: slots.filter(schedule=schedule, fate="fired").exists(), message=lambda: process.output
        )
        process.wait_for_output("The database is back")
        process.terminate()
        assert process.wait() == 0
        tries = [line for line in process.output.splitlines() if "out of reach" in line]
        assert [f"try {number}," in line for number, line in enumerate(tries, start=1)] == [True] * len(tries)
        assert errors(process.output) == []
        assert Job.objects.using("outage").count() == 1


def hears_anew(heard: socket.socket) -> bytes:
    """Return what is said after all that has been said already."""
    heard.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            heard.recv(100)
    heard.settimeout(5)
    return heard.recv(100)


# --- Beside a worker -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_with_a_scheduler_runs_what_its_schedules_ask_for_and_both_end_at_once(
    start: Start, number: int
) -> None:
    process = start("--scheduler", command="runworker", forgejobs={"SCHEDULES": {"report": REPORT}})
    wait_for(lambda: Schedule.objects.filter(name="report", next_run_at__isnull=False).exists())
    Schedule.objects.filter(name="report").update(next_run_at=in_seconds(-1))
    wait_for(lambda: Job.objects.filter(status="done").exists(), message=lambda: process.output)
    assert Job.objects.get().result == {"a": 1}
    assert ScheduleSlot.objects.get().job_id == Job.objects.get().pk
    assert "  scheduler    in this process" in process.output
    told = time.monotonic()
    process.popen.send_signal(number)
    assert process.wait() == 0, process.output
    assert time.monotonic() - told < 1.5
    assert errors(process.output) == []


@pytest.mark.postgres_only
def test_a_scheduler_beside_a_worker_survives_the_cut_of_its_connection(start: Start) -> None:
    """C061."""
    process = start("--scheduler", "--name", "both", command="runworker")
    first = make_due()
    wait_for(lambda: is_fired(first), message=lambda: process.output)
    last = '%"forgejobs_schedule"%'
    wait_for(lambda: sessions_of("worker both", then="pg_terminate_backend(pid)", last=last) == 1)
    process.wait_for_output("The database is back")
    second = make_due()
    wait_for(lambda: is_fired(second), message=lambda: process.output)
    wait_for(lambda: Job.objects.filter(status="done").count() == 2, message=lambda: process.output)
    process.terminate()
    assert process.wait() == 0
    assert errors(process.output) == []


def test_a_worker_whose_scheduler_dies_gives_up_too(start: Start) -> None:
    """Or jobs would run, and nobody notice that none is enqueued any more."""
    process = start("--scheduler", command="runworker")
    wait_for(Liveness.objects.exists, message=lambda: process.output)
    try:
        rename("forgejobs_schedule", "forgejobs_hidden")
        assert process.wait() == 1, process.output
        assert "The scheduler's thread died; its worker ends." in process.output
    finally:
        rename("forgejobs_hidden", "forgejobs_schedule")
