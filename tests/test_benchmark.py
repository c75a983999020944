"""The benchmark, tiny and with our queue only: it counts effects, refuses what is wrong, and writes JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testproject.postgres import is_available
from tests.benchmarks.effects import Effects
from tests.benchmarks.machine import BenchmarkError
from tests.benchmarks.queues import Load, queue
from tests.benchmarks.report import Report
from tests.processes.harness import CHECKOUT

PEERS = ("ours", "bare", "pgqueuer", "ox", "procrastinate", "huey")


def in_a_process(code: str, effects: Effects) -> None:
    subprocess.run(
        [sys.executable, "-c", f"from tests.benchmarks.effects import effect\n{code}"],
        cwd=CHECKOUT,
        env={**os.environ, **effects.environment},
        check=True,
        timeout=30,
    )


@pytest.mark.sqlite_only  # it has a PostgreSQL of its own: once is enough
@pytest.mark.skipif(not is_available(), reason="no embedded PostgreSQL on this platform")
def test_a_drain_is_measured_and_written_down(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "--tiny", "--no-peers", "--only", "drain", "--json", path],
        cwd=CHECKOUT,
        env={name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(path.read_text())
    (rate,) = (figure["value"] for figure in written["figures"] if figure["name"] == "ours")
    assert rate > 0
    assert written["notes"] == []
    assert written["about"]["machine"]["settings"]["fsync"] == "on"
    assert "django_forgejobs" in written["about"]["queues"]
    assert "jobs/s" in done.stdout


def test_an_effect_survives_the_kill_of_its_process(tmp_path: Path) -> None:
    effects = Effects(tmp_path / "effects", 4)
    code = "import os, signal\neffect(2)\nos.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(subprocess.CalledProcessError):
        in_a_process(code, effects)
    assert effects.counts() == [0, 0, 1, 0]
    assert list(effects.starts()) == [2]


def test_a_job_that_ran_in_two_processes_counts_twice(tmp_path: Path) -> None:
    effects = Effects(tmp_path / "effects", 3)
    for code in ("effect(0); effect(1)", "effect(1); effect(2)"):
        in_a_process(code, effects)
    assert effects.counts() == [1, 2, 1]
    assert effects.done() == 4


@pytest.mark.parametrize(
    ("ran", "complete", "told"),
    [
        ("effect(0); effect(0); effect(1)", True, "1 ran twice"),
        ("effect(0)", True, "1 never"),
        ("effect(0)", False, ""),
        ("effect(0); effect(1)", True, ""),
    ],
)
def test_a_drain_that_lost_or_repeated_a_job_is_refused(
    tmp_path: Path, ran: str, complete: bool, told: str
) -> None:
    from tests.benchmarks.drain import verify

    effects = Effects(tmp_path / "effects", 2)
    in_a_process(ran, effects)
    if told:
        with pytest.raises(BenchmarkError, match=told):
            verify(queue("ours"), effects, Load(2), complete=complete)
    else:
        verify(queue("ours"), effects, Load(2), complete=complete)


@pytest.mark.parametrize("name", PEERS)
def test_an_adapter_can_be_asked_without_its_queue_being_installed(name: str) -> None:
    adapter = queue(name)
    assert adapter.worker(Load(1))[0] == sys.executable
    assert adapter.missing == "" or adapter.name in adapter.missing


def test_a_goal_is_met_at_its_bound_and_not_beyond() -> None:
    report = Report()
    report.at_least(1, "fast enough", 2.0, 2)
    report.at_least(1, "too slow", 1.99, 2)
    report.at_most(2, "short enough", 1.0, 1)
    report.at_most(2, "too long", 1.01, 1)
    assert [verdict.met for verdict in report.verdicts] == [True, False, True, False]
    assert report.table().count("NOT MET") == 2
