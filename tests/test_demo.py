"""The demo does what it says, counts honestly, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from django_forgejobs import enqueue
from django_forgejobs.models import Job, Schedule, ScheduleSlot
from testproject import postgres
from testproject.clocks.models import ClockChange, Run
from testproject.clocks.zones import next_changes, read_table
from testproject.demo import places, summary
from testproject.demo.narrator import Narrator
from testproject.demo.recurring import MINUTE, MINUTELY, TYPE, areas
from testproject.demo.service import service
from testproject.demo.story import MISSING_ZONE, Facts
from tests.factories import make_job, make_schedule
from tests.processes.harness import Process, Processes, current_database_url
from tests.waiting import wait_for

needs_embedded = pytest.mark.skipif(not postgres.is_available(), reason="no embedded PostgreSQL here")


def assert_nothing_lost(output: str) -> None:
    """Assert that it counts the jobs that we know of, and at least those of the schedules that we know of."""
    wanted = r"Nothing is lost: (\d+) enqueued \+ (\d+) by schedules = (\d+) done \+ 2 dead \+ 1 failed"
    found = re.search(wanted + r" \+ 1 cancelled\s+\+ 0\s+waiting\.", re.sub(r"\s+", " ", output))
    assert found, output
    enqueued, scheduled, done = map(int, found.groups())
    assert (enqueued, done) == (len(read_table()) + 7, len(read_table()) + 3 + scheduled)
    assert scheduled >= 2 + len(areas())
    assert 'minutes of "upcoming, every minute" were due = ' in output
    assert f"Each of {len(areas())} daily schedules fired once" in output


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


def demo(processes: Processes, *arguments: str, url: str = "", encoding: str = "utf-8") -> Process:
    """Start the demo as `make demo` does; without a URL it makes its own server."""
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    environment |= {"PYTHONIOENCODING": encoding, **({"DATABASE_URL": url} if url else {})}
    return processes.run(sys.executable, "-m", "testproject.demo", *arguments, env=environment)


def family(process: Process) -> list[str]:
    """Return pid and command of all the demo's children and theirs, servers included."""
    psutil = pytest.importorskip("psutil")
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended, a zombie included
            found.append(f"{child.pid} {' '.join(child.cmdline())}")
    return found


def alive(members: list[str]) -> list[str]:
    psutil = pytest.importorskip("psutil")

    def is_alive(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return [member for member in members if is_alive(int(member.split()[0]))]


def wait_until_gone(members: list[str]) -> None:
    assert [member for member in members if "runworker" in member]
    assert [member for member in members if "runserver" in member]
    assert [member for member in members if "runscheduler" in member]
    wait_for(lambda: not alive(members), timeout=20, message=lambda: f"still there: {alive(members)}")


# The whole of it


@pytest.mark.postgres_only
@needs_embedded
def test_the_demo_on_an_embedded_server_loses_nothing(processes: Processes) -> None:
    process = demo(processes, "--once")
    assert process.wait(120) == 0, process.output
    assert_nothing_lost(process.output)
    assert "an embedded PostgreSQL" in process.output
    assert "Nothing was lost." in process.output
    assert "✗" not in process.output


@pytest.mark.sqlite_only
def test_the_demo_stays_up_with_its_admin_until_a_ctrl_c(processes: Processes) -> None:
    process = demo(processes, url="sqlite://", encoding="ascii")
    output = process.wait_for_output("Ctrl-C ends all of it.", 120)
    assert_nothing_lost(output)
    assert "WRONG" not in output
    address = re.search(r"http://\S+/admin/", output)
    assert address is not None
    assert re.search(r"user: demo +password: \S{12} ", output)
    with build_opener(ProxyHandler({})).open(address[0], timeout=10) as page:
        assert b"csrfmiddlewaretoken" in page.read()
    members = family(process)
    process.interrupt()
    assert process.wait() == 0, process.output
    wait_until_gone(members)


# Its end


@pytest.mark.postgres_only
def test_nothing_of_a_killed_demo_runs_on(processes: Processes) -> None:
    process = demo(processes, url=current_database_url())
    process.wait_for_output("kill -9", 60)
    members = family(process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_until_gone(members)


@pytest.mark.postgres_only
def test_the_next_demo_drops_the_database_of_a_killed_one_only(
    db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    psycopg = pytest.importorskip("psycopg")
    server = current_database_url()
    killed, alive = f"{places.PREFIX}killed", f"{places.PREFIX}alive"
    monkeypatch.setenv("DATABASE_URL", server)
    with psycopg.connect(server, autocommit=True) as connection:
        for name in (killed, alive):
            connection.execute(f"CREATE DATABASE {name}")

        def databases() -> set[str]:
            return {name for (name,) in connection.execute("SELECT datname FROM pg_database").fetchall()}

        with psycopg.connect(server, dbname=alive), places.database(tmp_path) as own:
            assert alive in databases()
            assert own.url.rpartition("/")[2] in databases()
            assert killed not in databases()
        assert own.url.rpartition("/")[2] not in databases()
        connection.execute(f"DROP DATABASE {alive} WITH (FORCE)")


@pytest.mark.postgres_only
@needs_embedded
def test_a_demo_told_to_stop_takes_its_server_and_workers_with_it(processes: Processes) -> None:
    process = demo(processes)
    process.wait_for_output("kill -9", 60)
    members = family(process)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert [member for member in members if "postgres" in member]
    wait_until_gone(members)


def test_a_server_that_cannot_be_reached_is_named_with_the_way_out(processes: Processes) -> None:
    process = demo(processes, "--once", url="postgresql://nobody@127.0.0.1:1/nowhere")
    assert process.wait() == 2
    assert "Unset DATABASE_URL" in process.output
    assert "Traceback" not in process.output


# Its counting: the checks go red


@pytest.fixture
def facts(db: None, tmp_path: Path) -> Iterator[Facts]:
    """Return three zones that are done and mailed, and the one on Mars that has failed."""
    with service() as running:
        facts = Facts(running, tmp_path)
        for zone in ["Europe/Paris", "Asia/Tokyo", "Africa/Cairo", MISSING_ZONE]:
            pk = facts.zones[zone] = enqueue("clocks.zone", {"zone": zone})
            Run.objects.create(job_id=pk, type="clocks.zone", claim=1, pid=1)
            end = "failed" if zone == MISSING_ZONE else "done"
            Job.objects.filter(pk=pk).update(status=end, attempts=1, claims=1, finished_at=datetime.now(UTC))
            if zone != MISSING_ZONE:
                now = datetime.now(UTC)
                ClockChange.objects.create(zone=zone, after=now, changes=[], mailed_at=now)
                (tmp_path / f"{pk}.log").write_text(f"Message-ID: <job-{pk}@clocks.example>\n")
        yield facts


def wrong(facts: Facts) -> list[str]:
    jobs = {job.pk: job for job in Job.objects.all()}
    runs = Counter(Run.objects.values_list("job_id", flat=True))
    findings = summary.Findings(Narrator())
    summary._nothing_lost(findings, facts, jobs)
    summary._nothing_doubled(findings, facts, jobs, runs)
    return findings.wrong


def test_all_is_well_when_each_job_ran_once(facts: Facts) -> None:
    assert wrong(facts) == []


def test_a_row_that_is_missing_counts_as_lost(facts: Facts) -> None:
    Job.objects.filter(pk=facts.zones["Asia/Tokyo"]).delete()
    assert any("Nothing is lost: 4 enqueued + 0 by schedules = 2 done" in text for text in wrong(facts))


def test_a_job_that_still_waits_counts_as_lost(facts: Facts) -> None:
    facts.zones["Asia/Kabul"] = enqueue("clocks.zone")
    assert any("1 waiting" in text for text in wrong(facts))


def test_a_job_from_a_transaction_that_was_rolled_back_is_found(facts: Facts) -> None:
    facts.left_by_rollback = 1
    assert any("rolled-back" in text for text in wrong(facts))


def test_a_second_mail_is_wrong_unless_the_worker_died(facts: Facts) -> None:
    pk = facts.zones["Europe/Paris"]
    (facts.mail / "again.log").write_text(f"Message-ID: <job-{pk}@clocks.example>\n")
    assert any("Europe/Paris" in text and "4 mails" in text for text in wrong(facts))
    Job.objects.filter(pk=pk).update(lease_expirations=1, claims=2)
    assert wrong(facts) == []


def test_a_second_run_is_wrong_unless_the_worker_died(facts: Facts) -> None:
    pk = facts.zones["Europe/Paris"]
    Run.objects.create(job_id=pk, type="clocks.zone", claim=2, pid=2)
    Job.objects.filter(pk=pk).update(claims=2)
    assert len(wrong(facts)) == 2
    Job.objects.filter(pk=pk).update(lease_expirations=1)
    assert wrong(facts) == []


# Its schedules: the checks go red


@pytest.fixture
def scheduled(facts: Facts) -> Facts:
    """Return them with an hour of minutes of which 60 were missed, a daily slot of each area, and a job by
    hand: 13 jobs or so.
    """
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    known = facts.recurring
    known.since, known.this_minute, known.killed = now - 60 * MINUTE, now, [1]
    minutely = make_schedule(name=MINUTELY, job_type=TYPE, last_slot=now)
    minutely.slots.create(slot=known.since, until=now - MINUTE, count=60, fate="missed")
    fire(minutely, now)
    for area in areas():
        daily = make_schedule(name=area, job_type=TYPE, cron="0 1 * * *", payload={"area": area})
        fire(daily, now)
    known.by_hand = fire(minutely, now + timedelta(seconds=1), "by_hand")
    return facts


def fire(schedule: Schedule, slot: datetime, fate: str = "fired") -> int:
    job = make_job(type=TYPE, status="done", payload=schedule.payload)
    schedule.slots.create(slot=slot, fate=fate, job_id=job.pk)
    return job.pk


def wrong_slots(facts: Facts) -> list[str]:
    findings = summary.Findings(Narrator())
    summary._each_slot_once(findings, facts.recurring, {job.pk: job for job in Job.objects.all()})
    return findings.wrong


def test_all_is_well_when_each_slot_is_settled_once(scheduled: Facts) -> None:
    assert wrong_slots(scheduled) == []
    assert wrong(scheduled) == []


def test_a_slot_that_the_ledger_does_not_know_is_found(scheduled: Facts) -> None:
    ScheduleSlot.objects.filter(fate="missed").update(count=59)
    assert any("61 minutes" in text and "59 missed" in text for text in wrong_slots(scheduled))


def test_a_schedule_that_did_not_fire_is_found(scheduled: Facts) -> None:
    slot = ScheduleSlot.objects.get(schedule__name="Europe")
    Job.objects.filter(pk=slot.job_id).delete()
    slot.delete()
    assert any("daily schedules" in text and "(Europe)" in text for text in wrong_slots(scheduled))


def test_a_slot_that_fired_twice_is_found(scheduled: Facts) -> None:
    make_job(type=TYPE, status="done", payload={"area": "Europe"})
    assert len(wrong_slots(scheduled)) == 2
    assert any("those of the schedules" in text for text in wrong(scheduled))


# Its work


@pytest.mark.parametrize(
    ("zone", "changes"),
    [
        (
            "Europe/Paris",
            ["2026-03-29 01:00 UTC: +01:00 → +02:00", "2026-10-25 01:00 UTC: +02:00 → +01:00"],
        ),
        (
            "Australia/Lord_Howe",
            ["2026-04-04 15:00 UTC: +11:00 → +10:30", "2026-10-03 15:30 UTC: +10:30 → +11:00"],
        ),
        ("Asia/Tokyo", []),
    ],
)
def test_changes_are_found_to_the_second(zone: str, changes: list[str]) -> None:
    found = next_changes(zone, datetime(2026, 1, 1, tzinfo=UTC))
    assert [str(change) for change in found] == changes
    assert all(change.at.second == 0 for change in found)


def test_the_table_has_a_zone_of_each_continent_once() -> None:
    table = read_table()
    assert len(table) == len(set(table)) > 400
    assert {name.split("/")[0] for name in table} >= {"Africa", "America", "Asia", "Europe", "Pacific"}
