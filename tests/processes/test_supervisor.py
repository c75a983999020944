"""`runworker --processes M`: real processes killed, frozen, recycled; what they held runs again at once."""

import json
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections

from django_forgejobs import between, enqueue, enqueue_many
from django_forgejobs.board import Board
from django_forgejobs.models import Job
from django_forgejobs.recovery import AGAIN, DONE, LOOKS, Loss
from django_forgejobs.supervisor import Child, Seat, hangs
from django_forgejobs.takeover import Death
from tests.factories import in_seconds, make_job, make_schedule
from tests.processes.harness import Manage, Process
from tests.sessions import gate, session
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()"),
]

APP = {"FORGEJOBS_TEST_APPS": "tests.jobsapp"}
#: A lease that no test could wait for, and no look for suspects after the first.
LONG = {"LEASE": 900, "POLL_INTERVAL": 0.1, "SUSPECT_PATIENCE": 60}

Start = Callable[..., Process]


@pytest.fixture
def start(manage: Manage) -> Iterator[Start]:
    """Return a function that starts `runworker --processes 2` with these arguments on tests.jobsapp."""
    started: list[Process] = []

    def start(*arguments: object, forgejobs: dict[str, Any] | None = None, **options: Any) -> Process:
        settings = LONG | (forgejobs or {})
        options.setdefault("env", APP)
        started.append(manage("runworker", "--processes", 2, *arguments, forgejobs=settings, **options))
        return started[-1]

    yield start
    for pid in (pid for supervisor in started for pid in workers(supervisor) if is_alive(pid)):
        os.kill(
            pid, signal.SIGCONT
        )  # a test that failed may have left it frozen; it will see its supervisor end


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def workers(supervisor: Process) -> list[int]:
    """Return the process ids of all workers that have said that they start, those for suspects included."""
    return [int(pid) for pid in re.findall(r"Worker [^:\s]+:(\d+):\w+ starts", supervisor.output)]


def holder(id: int) -> int:
    """Return the process that runs a job, or ran it last."""
    return int(Job.objects.get(pk=id).locked_by.split(":")[1])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")  # on Linux; one that has ended may wait for init to notice
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def states() -> set[str]:
    return set(Job.objects.values_list("status", flat=True))


def all_done(supervisor: Process, timeout: float = 15) -> None:
    wait_for(lambda: states() == {"done"}, timeout=timeout, message=lambda: supervisor.output)


def ready(supervisor: Process, number: int = 2) -> list[int]:
    """Wait until so many workers have started, and return their process ids."""
    wait_for(lambda: len(workers(supervisor)) >= number, message=lambda: supervisor.output)
    return workers(supervisor)


def stop(supervisor: Process) -> None:
    supervisor.terminate()
    assert supervisor.wait() == 0, supervisor.output
    assert not [pid for pid in workers(supervisor) if is_alive(pid)]


class Held:
    """Jobs that run until they are let go."""

    def __init__(self, directory: Path) -> None:
        self.begun, self.until = directory / "begun", directory / "until"

        self.payload = {"started": str(self.begun), "until": str(self.until)}

    def enqueue(self, type: str = "t.stuck", **options: Any) -> int:
        return enqueue(type, self.payload, **options)

    def wait(self, supervisor: Process, number: int = 1) -> None:
        wait_for(lambda: len(lines(self.begun)) >= number, message=lambda: supervisor.output)

    def let_go(self) -> None:
        self.until.touch()


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path)


# --- Death ---------------------------------------------------------------------------------------


def test_the_job_of_a_killed_process_runs_again_at_once_and_not_after_its_lease(
    start: Start, held: Held
) -> None:
    id = held.enqueue()
    supervisor = start()
    held.wait(supervisor)
    victim = holder(id)
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    held.wait(supervisor, 2)
    assert time.monotonic() - killed < 3
    held.let_go()
    all_done(supervisor)
    row = Job.objects.get()
    assert (row.attempts, row.claims, row.lease_expirations) == (1, 2, 1)
    (entry,) = row.history
    assert entry["event"] == "reclaim"
    assert f"process {victim} " in row.last_error
    assert "was killed by SIGKILL (expiration 1 of 3)." in row.last_error
    stop(supervisor)
    assert ", of which 1 died." in supervisor.output


def test_a_look_that_failed_is_no_look_and_the_next_comes_later_each_time() -> None:
    loss = Loss(Death("web:7:0", "died", frozenset()))
    pauses = []
    for _ in range(8):
        loss.looked(AGAIN)
        pauses.append(round(loss.next_look - time.monotonic(), 1))
    assert (loss.looks, loss.is_over) == (0, False)
    assert pauses == [0.5, 1, 2, 4, 8, 15, 15, 15]
    for _ in LOOKS:
        assert not loss.is_over
        loss.looked(DONE)
    assert loss.is_over


def test_a_suspect_does_not_wait_when_another_has_killed_their_process(start: Start) -> None:
    make_job(type="t.kill", lease_expirations=2)
    other = make_job(type="t.ok", lease_expirations=1)
    supervisor = start()
    wait_for(lambda: Job.objects.get(pk=other.pk).status == "done", message=lambda: supervisor.output)
    stop(supervisor)


@pytest.mark.parametrize("code", [0, 1, 7])
def test_a_job_that_ends_its_process_without_a_word_is_found_out_whatever_the_exit_code(
    start: Start, code: int
) -> None:
    id = enqueue("t.exit", {"code": code})
    supervisor = start(forgejobs={"MAX_LEASE_EXPIRATIONS": 2})
    wait_for(lambda: states() == {"dead"}, message=lambda: supervisor.output)
    assert f"ended with exit code {code} (expiration 2 of 2)." in Job.objects.get(pk=id).last_error
    stop(supervisor)


def test_a_killer_among_many_is_one_dead_job_and_nobody_stops_for_it(start: Start, tmp_path: Path) -> None:
    """Each time it is claimed it kills a process; the second and third time, one that is for suspects."""
    path = tmp_path / "effects"
    quick = {"type": "t.effect", "payload": {"path": str(path), "seconds": 0.02}}
    pks = enqueue_many([*[quick] * 20, {"type": "t.kill"}, *[quick] * 100])
    supervisor = start("--concurrency", 4)
    wait_for(lambda: not states() & {"ready", "running"}, message=lambda: supervisor.output)
    dead = Job.objects.get(status="dead")
    assert (dead.pk, dead.lease_expirations, dead.claims) == (pks[20], 3, 3)
    others = Job.objects.exclude(pk=dead.pk)
    assert set(others.values_list("status", flat=True)) == {"done"}
    # Only what ran beside it the first time may be a suspect too.
    suspects = others.filter(lease_expirations__gt=0)
    assert len(suspects) <= 3
    assert set(suspects.values_list("lease_expirations", flat=True)) <= {1}
    assert set(others.values_list("attempts", flat=True)) == {1}
    stop(supervisor)


def test_a_suspect_runs_in_a_process_of_its_own_while_the_others_go_on(start: Start, held: Held) -> None:
    suspect = make_job(type="t.stuck", lease_expirations=1, payload=held.payload)
    supervisor = start("--concurrency", 1)
    held.wait(supervisor)
    others = [enqueue("t.ok") for _ in range(10)]
    wait_for(lambda: Job.objects.filter(pk__in=others, status="done").count() == 10)
    assert Job.objects.get(pk=suspect.pk).status == "running"
    assert holder(suspect.pk) not in {holder(id) for id in others}
    held.let_go()
    all_done(supervisor)
    wait_for(lambda: not is_alive(holder(suspect.pk)), message="the process for suspects did not end")
    stop(supervisor)


def test_workers_that_die_at_once_again_and_again_are_started_after_growing_pauses(start: Start) -> None:
    enqueue_many({"type": "t.kill"} for _ in range(6))
    supervisor = start(forgejobs={"MAX_LEASE_EXPIRATIONS": 1})
    wait_for(lambda: states() == {"dead"}, timeout=20, message=lambda: supervisor.output)
    pauses = re.findall(
        r"It died at once, (\d+) in a row: the next one starts in ([\d.]+) s", supervisor.output
    )
    assert {("2", "0.5"), ("3", "1")} <= set(pauses), supervisor.output
    fine = enqueue("t.ok")
    wait_for(lambda: Job.objects.get(pk=fine).status == "done", message=lambda: supervisor.output)
    stop(supervisor)


@pytest.mark.postgres_only
def test_a_claim_that_was_committed_only_after_its_process_had_died_is_taken_back_too(start: Start) -> None:
    id = enqueue("t.ok")
    with gate("victim", per="ROW", when=f"NEW.id = {id} AND NEW.status = 'running'") as closed:
        supervisor = start(env=APP | {"PGAPPNAME": "victim"})
        closed.wait()
        for pid in ready(supervisor):
            os.kill(pid, signal.SIGKILL)
        ready(supervisor, 4)
        other = enqueue("t.ok")  # when it is done, the first look is over: that began before
        wait_for(lambda: Job.objects.get(pk=other).status == "done", message=lambda: supervisor.output)
        closed.open()
    all_done(supervisor)
    row = Job.objects.get(pk=id)
    assert (row.claims, row.attempts, row.lease_expirations, row.history) == (2, 1, 0, [])
    stop(supervisor)


@pytest.mark.postgres_only
def test_what_a_dead_process_held_is_taken_back_once_the_database_can_be_reached(
    manage: Manage, own_server: Callable[..., Any], held: Held
) -> None:
    """And meanwhile the supervisor goes on supervising."""
    server = own_server(settings={"fsync": "off"})
    with session("outage", url=server.url):
        call_command("migrate", "forgejobs", database="outage", verbosity=0)
        id = held.enqueue(db="outage")
        arguments = ("runworker", "--processes", 2)
        supervisor = manage(*arguments, env=APP, forgejobs=LONG, database_url=server.url)
        held.wait(supervisor)
        victims = ready(supervisor)
        between.close(connections["outage"])
        server.stop("immediate")
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        supervisor.wait_for_output("cannot be taken back yet")
        ready(supervisor, 4)
        server.start()
        held.wait(supervisor, 2)
        held.let_go()
        jobs = Job.objects.using("outage")
        wait_for(lambda: jobs.get(pk=id).status == "done", message=lambda: supervisor.output)
        assert (jobs.get().attempts, jobs.get().lease_expirations) == (1, 1)
        stop(supervisor)


def test_jobs_that_a_killed_process_had_not_begun_are_given_back_unharmed(start: Start, held: Held) -> None:
    """It looks ahead: beside the job that it runs it has claimed some that wait for their turn."""
    quick = [{"type": "t.ok"}] * 300
    enqueue_many([*quick, {"type": "t.kill", "payload": {"times": 1}}, *quick])
    supervisor = start("--concurrency", 2)
    all_done(supervisor)
    suspects = Job.objects.filter(lease_expirations__gt=0)
    assert "t.kill" in suspects.values_list("type", flat=True)
    assert len(suspects) <= 2
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}
    released = Job.objects.filter(lease_expirations=0).exclude(history=[])
    assert {job.history[-1]["event"] for job in released} <= {"release"}  # had run, but was not written
    stop(supervisor)


def test_kills_at_any_moment_lose_nothing_and_what_runs_twice_says_why(start: Start, tmp_path: Path) -> None:
    path, chance = tmp_path / "effects", random.Random(seed := random.randrange(1_000_000))
    enqueue_many({"type": "t.effect", "payload": {"path": str(path), "seconds": 0.01}} for _ in range(1200))
    supervisor = start("--concurrency", 4, forgejobs={"MAX_LEASE_EXPIRATIONS": 1000})
    for kills in range(1, 5):
        moment, seen = time.monotonic() + chance.uniform(0, 0.2), len(lines(path))
        wait_for(lambda: time.monotonic() > moment and len(lines(path)) > seen, interval=0.001)  # noqa: B023
        os.kill(chance.choice([pid for pid in workers(supervisor) if is_alive(pid)]), signal.SIGKILL)
        ready(supervisor, 2 + kills)
    all_done(supervisor)
    effects = Counter(lines(path))
    for job in Job.objects.all():
        assert (job.attempts, job.claims >= effects[job.pk] >= 1) == (1, True), (seed, job)
        assert effects[job.pk] == 1 or job.history, (seed, job)
    assert Job.objects.filter(lease_expirations__gt=0).count() <= 4 * 4, seed
    stop(supervisor)


def test_a_process_that_gives_no_sign_for_its_lease_is_killed_and_replaced(start: Start, held: Held) -> None:
    """Its job has no timeout, but by then it has been lost to others."""
    id = held.enqueue()
    supervisor = start(forgejobs={"LEASE": 1.5, "HEARTBEAT": 0.4, "RECLAIM_INTERVAL": 0})
    held.wait(supervisor)
    frozen = holder(id)
    os.kill(frozen, signal.SIGSTOP)
    held.wait(supervisor, 2)
    assert not is_alive(frozen)
    assert "it has given no sign for 1.5 s" in supervisor.output
    held.let_go()
    all_done(supervisor)
    assert Job.objects.get().lease_expirations == 1
    stop(supervisor)
    assert "of which 1 died" in supervisor.output


# --- Stop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_supervisor_told_to_stop_lets_all_workers_finish_what_runs_and_exits_0(
    start: Start, held: Held, number: int
) -> None:
    ids = [held.enqueue(), held.enqueue()]
    supervisor = start()
    held.wait(supervisor, 2)
    supervisor.popen.send_signal(number)
    supervisor.wait_for_output("Stopping: what runs has")
    other = enqueue("t.ok")
    held.let_go()
    assert supervisor.wait() == 0, supervisor.output
    assert [Job.objects.get(pk=id).status for id in (*ids, other)] == ["done", "done", "ready"]
    assert supervisor.output.count("Stopping: what runs has") == 1
    assert ": 2 processes, of which 0 died." in supervisor.output


def test_a_second_signal_gives_unfinished_jobs_back_at_once_and_exits_1(start: Start, held: Held) -> None:
    held.enqueue()
    held.enqueue("t.thread")
    supervisor = start()
    held.wait(supervisor, 2)
    supervisor.terminate()
    supervisor.wait_for_output("Stopping: what runs has")
    told = time.monotonic()
    supervisor.terminate()
    assert supervisor.wait() == 1, supervisor.output
    assert time.monotonic() - told < 3
    assert set(Job.objects.values_list("status", "attempts", "lease_expirations")) == {("ready", 0, 0)}
    assert [job.history[-1]["event"] for job in Job.objects.all()] == ["release", "release"]


def test_a_signal_to_every_process_of_the_service_is_one_signal(start: Start, held: Held) -> None:
    """As systemd sends it unless it is told otherwise."""
    held.enqueue()
    supervisor = start()
    held.wait(supervisor)
    pids = ready(supervisor)
    assert [os.getpgid(pid) for pid in pids] == pids  # a Ctrl-C reaches the supervisor alone
    for pid in (*pids, supervisor.pid):
        os.kill(pid, signal.SIGTERM)
    supervisor.wait_for_output("Stopping: what runs has")
    held.let_go()
    assert supervisor.wait() == 0, supervisor.output
    assert states() == {"done"}


def test_a_worker_that_does_not_stop_is_killed_and_its_job_given_back_without_suspicion(
    start: Start, held: Held
) -> None:
    id = held.enqueue()
    supervisor = start("--grace", 0.2)
    held.wait(supervisor)
    os.kill(holder(id), signal.SIGSTOP)
    for words in ("Stopping: what runs has", "Stopping at once"):
        supervisor.terminate()
        supervisor.wait_for_output(words)
    supervisor.terminate()
    assert supervisor.wait() == 1, supervisor.output
    row = Job.objects.get()
    assert (row.status, row.attempts, row.lease_expirations) == ("ready", 0, 0)
    assert "was killed, since it did not stop" in row.history[-1]["reason"]


def test_workers_whose_supervisor_was_killed_finish_what_runs_and_end(start: Start, held: Held) -> None:
    id = held.enqueue()
    supervisor = start()
    held.wait(supervisor)
    pids = ready(supervisor)
    supervisor.kill()
    supervisor.wait()
    idle = next(pid for pid in pids if pid != holder(id))
    wait_for(lambda: not is_alive(idle), message=lambda: supervisor.output)
    other = enqueue("t.ok")
    held.let_go()
    wait_for(lambda: not [pid for pid in pids if is_alive(pid)], message=lambda: supervisor.output)
    assert [Job.objects.get(pk=pk).status for pk in (id, other)] == ["done", "ready"]


def test_a_stop_before_anything_has_started_exits_0(start: Start) -> None:
    supervisor = start("--connect-timeout", 60, database_url="postgresql://nobody@127.0.0.1:1/nothing")
    supervisor.wait_for_output("cannot be reached")
    supervisor.terminate()
    assert supervisor.wait(timeout=5) == 0


# --- Enough --------------------------------------------------------------------------------------


def test_a_worker_leaves_after_max_jobs_and_another_takes_its_place(start: Start) -> None:
    enqueue_many({"type": "t.ok"} for _ in range(12))
    supervisor = start("--max-jobs", 3)
    all_done(supervisor)
    by_process = Counter(int(name.split(":")[1]) for name in Job.objects.values_list("locked_by", flat=True))
    assert max(by_process.values()) == 3 < len(by_process), by_process
    assert "This worker has done enough (3 jobs)" in supervisor.output
    stop(supervisor)
    assert "of which 0 died" in supervisor.output


@pytest.mark.parametrize("limit", ["--max-memory", "--max-age"])
def test_a_worker_that_is_too_big_or_too_old_is_replaced_before_its_last_job_has_ended(
    start: Start, held: Held, limit: str
) -> None:
    supervisor = start(limit, 1, "--concurrency", 2)
    first = held.enqueue()
    held.wait(supervisor)
    supervisor.wait_for_output("MB of memory)" if limit == "--max-memory" else "(its age)")
    wait_for(lambda: len(workers(supervisor)) > 2)
    second = held.enqueue()
    held.wait(supervisor, 2)
    assert is_alive(holder(first))
    held.let_go()
    all_done(supervisor)
    wait_for(lambda: not is_alive(holder(first)))
    assert Job.objects.get(pk=second).claims == 1
    stop(supervisor)


def test_a_worker_alone_exits_0_when_it_has_grown_too_big_or_too_old(manage: Manage) -> None:
    enqueue("t.ok")
    for limit in (("--max-memory", 1), ("--max-age", 0.3)):
        worker = manage("runworker", *limit, env=APP, forgejobs=LONG)
        assert worker.wait() == 0, worker.output
        assert "This worker has done enough" in worker.output
        assert ("is less than a worker has before its first job" in worker.output) is (limit[1] == 1)


# --- Overdue -------------------------------------------------------------------------------------


def test_a_handler_that_lets_nothing_else_run_is_ended_with_its_process_at_its_timeout(
    start: Start, held: Held
) -> None:
    """Its attempt has failed, like that of any that is late; what ran beside it is given back, uncharged."""
    beside, late = held.enqueue(), held.enqueue("t.gil", max_attempts=2)
    supervisor = start("--concurrency", 2, forgejobs={"TIMEOUT_MARGIN": 0.2})
    wait_for(lambda: Job.objects.get(pk=late).status == "done", message=lambda: supervisor.output)
    row = Job.objects.get(pk=late)
    assert (row.attempts, row.claims, row.lease_expirations) == (2, 2, 0)
    assert row.last_error.startswith("Timeout: the handler was still running")
    assert "gave no sign and was killed" in row.last_error
    held.let_go()
    all_done(supervisor)
    neighbour = Job.objects.get(pk=beside)
    assert (neighbour.attempts, neighbour.lease_expirations) == (1, 0)
    stop(supervisor)


def test_a_frozen_process_whose_job_is_overdue_is_killed_and_replaced(start: Start, held: Held) -> None:
    late = held.enqueue("t.timeout", max_attempts=1)
    supervisor = start(forgejobs={"TIMEOUT_MARGIN": 1})
    held.wait(supervisor)
    frozen = holder(late)
    os.kill(frozen, signal.SIGSTOP)
    wait_for(lambda: Job.objects.get().status == "dead", message=lambda: supervisor.output)
    assert not is_alive(frozen)
    stop(supervisor)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_a_further_process_costs_less_than_thirty_megabytes_of_its_own(start: Start) -> None:
    enqueue_many({"type": "t.ok"} for _ in range(50))
    supervisor = start()
    all_done(supervisor)
    for pid in ready(supervisor):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        private = sum(int(kb) for kb in re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE))
        assert private < 30_000, rollup
    stop(supervisor)


def test_a_machine_that_was_frozen_does_not_wake_up_to_kill_its_workers() -> None:
    """The first look sees a job that is long overdue, but its worker has yet to wake up itself."""
    child = Child(Seat(1), pid=0, identity="", board=Board())
    child.board.begin(7, overdue_at=100.0)
    assert hangs(child, now=5000.0, passed=0.5) == ""
    assert hangs(child, now=5002.9, passed=0.5) == ""
    assert "job 7" in hangs(child, now=5003.1, passed=0.5)
    assert child.overdue == {7}
    assert hangs(child, now=5003.2, passed=0.5) == ""  # once is enough


def test_an_overdue_handler_that_its_worker_gives_up_in_time_costs_no_process() -> None:
    child = Child(Seat(1), pid=0, identity="", board=Board())
    child.board.begin(7, overdue_at=100.0)
    assert hangs(child, now=101.0, passed=0.5) == ""
    child.board.forgive(7)
    child.board.begin(8, overdue_at=103.0)
    assert hangs(child, now=104.5, passed=0.5) == ""
    assert (child.late, child.overdue) == ({8: 104.5}, frozenset())


# --- With other options --------------------------------------------------------------------------


def test_a_burst_ends_when_nothing_is_due_any_more_suspects_included(start: Start) -> None:
    enqueue_many({"type": "t.ok"} for _ in range(20))
    make_job(type="t.kill", payload={"times": 1})
    make_job(type="t.ok", lease_expirations=1)
    later = enqueue("t.ok", available_in=3600)
    supervisor = start("--burst")
    assert supervisor.wait() == 0, supervisor.output
    assert Job.objects.exclude(pk=later).exclude(status="done").count() == 0
    assert Job.objects.get(pk=later).status == "ready"


@pytest.mark.postgres_only
def test_a_burst_does_not_end_before_what_a_dead_process_held_has_run(start: Start) -> None:
    """Also where the one that takes its place has found nothing due meanwhile."""
    id = enqueue("t.ok")
    with gate("victim", per="ROW", when="NEW.status = 'running'") as closed:
        supervisor = start("--burst", env=APP | {"PGAPPNAME": "victim"})
        closed.wait()
        supervisor.wait_for_output("ended after")
        wait_for(lambda: len([pid for pid in ready(supervisor) if is_alive(pid)]) == 1)
        (busy,) = [pid for pid in ready(supervisor) if is_alive(pid)]
        os.kill(busy, signal.SIGKILL)
        wait_for(lambda: supervisor.output.count("ended after") >= 2, message=lambda: supervisor.output)
        closed.open()
        assert supervisor.wait() == 0, supervisor.output
    row = Job.objects.get(pk=id)
    assert (row.status, row.claims, row.lease_expirations) == ("done", 2, 0)


def test_the_schedules_are_ticked_by_one_of_the_processes(start: Start) -> None:
    make_schedule(cron="0 0 1 1 *", next_run_at=in_seconds(-1))
    supervisor = start("--scheduler")
    wait_for(lambda: Job.objects.filter(status="done").exists(), message=lambda: supervisor.output)
    stop(supervisor)


@pytest.mark.parametrize("processes", [1, 2])
def test_systemd_is_told_by_the_main_process_alone(start: Start, tmp_path: Path, processes: int) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(address)
        notified.settimeout(15)
        supervisor = start("--processes", processes, env=APP | {"NOTIFY_SOCKET": address})
        assert notified.recv(100) == b"READY=1"
        ready(supervisor, processes if processes > 1 else 0)
        supervisor.terminate()
        while (said := notified.recv(100)) == b"WATCHDOG=1":
            pass
        assert said == b"STOPPING=1"
        assert supervisor.wait() == 0


@pytest.mark.postgres_only
def test_the_server_shows_which_process_has_a_connection(start: Start) -> None:
    supervisor = start("--name", "web")
    names = {f"forgejobs worker web:{pid}" for pid in ready(supervisor)}

    def shown() -> set[str]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT application_name FROM pg_stat_activity")
            return {name for (name,) in cursor.fetchall()}

    wait_for(lambda: names <= shown())
    assert f"forgejobs worker web:{supervisor.pid}" not in shown()  # it asks no database
    stop(supervisor)


def test_changed_code_is_run_by_all_processes_after_what_runs_has_finished(
    manage: Manage, tmp_path: Path
) -> None:
    app = tmp_path / "watched"
    app.mkdir()
    (app / "__init__.py").touch()
    code = "from django_forgejobs import job\n@job('w.version')\ndef version(payload):\n    return {}\n"
    (app / "jobs.py").write_text(code.format(1))
    env = {"FORGEJOBS_TEST_APPS": "watched,tests.jobsapp", "PYTHONPATH": str(tmp_path)}
    supervisor = manage("runworker", "--processes", 2, "--reload", env=env, forgejobs=LONG)
    held = Held(tmp_path)
    old = [enqueue("w.version"), held.enqueue()]
    held.wait(supervisor)
    (app / "jobs.py").write_text(code.format("'two'"))
    supervisor.wait_for_output("finishing what runs, then restarting")
    (idle,) = set(ready(supervisor)) - {holder(old[1])}
    wait_for(lambda: not is_alive(idle), message=lambda: supervisor.output)
    held.let_go()
    new = [enqueue("w.version") for _ in range(4)]
    all_done(supervisor)
    assert [Job.objects.get(pk=id).result for id in (old[0], *new)] == [1, "two", "two", "two", "two"]
    stop(supervisor)


def test_the_umbrella_command_has_processes_too(manage: Manage) -> None:
    enqueue_many({"type": "t.ok"} for _ in range(10))
    supervisor = manage("forgejobs", "worker", "--processes", 2, "--burst", env=APP, forgejobs=LONG)
    assert supervisor.wait() == 0, supervisor.output
    assert states() == {"done"}


def test_json_lines_are_all_that_is_printed_with_log_format_json(start: Start) -> None:
    id = enqueue("t.ok")
    supervisor = start("--burst", "--log-format", "json")
    assert supervisor.wait() == 0, supervisor.output
    events = [json.loads(line) for line in supervisor.output.splitlines()]
    assert [events[0]["event"], events[0]["processes"]] == ["worker_started", 2]
    assert (events[-1]["event"], events[-1]["starts"], events[-1]["deaths"]) == ("supervisor_ended", 2, 0)
    assert Counter(event["event"] for event in events) == {
        "worker_started": 3,
        "done": 1,
        "worker_ended": 2,
        "supervisor_ended": 1,
    }
    assert [event["job_id"] for event in events if event["event"] == "done"] == [id]


def test_processes_within_another_program_are_refused() -> None:
    with pytest.raises(CommandError, match="--processes 2 forks") as refused:
        call_command("runworker", processes=2)
    assert refused.value.returncode == 2
