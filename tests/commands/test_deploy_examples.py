"""The examples in docs/deploy/ are what systemd accepts, and stop a worker or a scheduler as they say."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from django_forgejobs import conf
from django_forgejobs.management.stopping import LAST_RESORT
from django_forgejobs.ticker import STOP_WITHIN
from tests.processes.harness import CHECKOUT, Manage

DEPLOY = CHECKOUT / "docs" / "deploy"
README = (DEPLOY / "README.md").read_text()
UNITS = sorted(DEPLOY.glob("forgejobs-*"))
PYTHON = "/srv/site/.venv/bin/python"


def section(unit: Path, name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    return parser[name]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    """On copies: it wants the program that ExecStart names to exist."""
    copies = []
    for unit in UNITS:
        copy = tmp_path / unit.name
        copy.write_text(unit.read_text().replace(PYTHON, sys.executable))
        copies.append(str(copy))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *copies], capture_output=True, text=True, timeout=60
    )
    assert len(copies) == 4
    complaints = [line for line in done.stderr.splitlines() if "forgejobs-" in line]
    assert (complaints, done.returncode) == ([], 0), done.stderr


def test_every_example_waits_longer_than_a_worker_needs_to_stop() -> None:
    needed = conf.Settings().GRACE + LAST_RESORT
    worker = section(DEPLOY / "forgejobs-worker.service", "Service")
    assert float(worker["TimeoutStopSec"]) > needed
    assert worker["KillMode"] == "mixed"
    waits = re.findall(r"(?:stop_grace_period|terminationGracePeriodSeconds|docker stop -t):? (\d+)", README)
    assert len(waits) == 3
    assert all(float(wait) > needed for wait in waits)


def test_the_scheduler_is_watched_and_has_time_enough_to_answer() -> None:
    unit = section(DEPLOY / "forgejobs-scheduler.service", "Service")
    assert unit["Type"] == "notify"  # what it tells is in test_scheduler_command
    assert float(unit["WatchdogSec"]) >= 30 * conf.Settings().POLL_INTERVAL
    assert float(unit["TimeoutStopSec"]) > STOP_WITHIN


def test_the_timer_runs_reclaim_jobs_every_five_minutes() -> None:
    assert section(DEPLOY / "forgejobs-reclaim.timer", "Timer")["OnCalendar"] == "*:0/5"
    service = section(DEPLOY / "forgejobs-reclaim.service", "Service")
    assert service["ExecStart"] == f"{PYTHON} manage.py reclaim_jobs"


def started() -> list[list[str]]:
    """Return the arguments after `manage.py` of every worker and scheduler that the examples start."""
    units = ("forgejobs-worker.service", "forgejobs-scheduler.service")
    lines = [shlex.split(section(DEPLOY / unit, "Service")["ExecStart"]) for unit in units]
    lines += [json.loads(found) for found in re.findall(r"(?:CMD|command:) (\[.*\])", README)]
    assert len(lines) == 6
    return [line[line.index("manage.py") + 1 :] for line in lines]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("arguments", sorted({tuple(line) for line in started()}))
def test_a_process_started_as_in_the_examples_stops_cleanly(
    manage: Manage, arguments: tuple[str, ...]
) -> None:
    process = manage(*arguments, env={"FORGEJOBS_TEST_APPS": "tests.jobsapp"})
    process.wait_for_output("django_forgejobs")
    process.terminate()
    assert process.wait() == 0, process.output
