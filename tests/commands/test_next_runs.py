"""`manage.py next_runs`: when an expression runs, or why it never will."""

import io
import json
import os
import subprocess
import sys
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.core.management import CommandError, call_command
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processes.harness import CHECKOUT

EXPRESSIONS = ["* * * * *", "30 2 * * *", "0 0 29 2 *", "@weekly", "H H * * *", "0 12 L * *", "0 0 30 2 *"]
VECTOR = ("30 2 * * *", "--tz", "America/New_York", "--start", "2026-03-07T12:00:00Z")


def next_runs(*arguments: str) -> str:
    out = io.StringIO()
    call_command("next_runs", *arguments, stdout=out, stderr=out)
    return out.getvalue()


def test_the_runs_are_json_for_programs() -> None:
    told = json.loads(next_runs(*VECTOR, "--count", "2", "--json"))
    assert told == {
        "cron": "30 2 * * *",
        "timezone": "America/New_York",
        "runs": [
            {
                "utc": "2026-03-08T07:00:00Z",
                "local": "2026-03-08T03:00:00-04:00",
                "note": "Clocks go forward on this day, 02:00 to 03:00. "
                "The time of this run does not exist: it runs when the gap ends.",
            },
            {"utc": "2026-03-09T06:30:00Z", "local": "2026-03-09T02:30:00-04:00", "note": ""},
        ],
    }


def test_the_runs_are_lines_for_people() -> None:
    lines = next_runs(*VECTOR, "--count", "2").splitlines()
    assert lines[0].startswith("Sun 2026-03-08 03:00 EDT  2026-03-08 07:00Z  Clocks go forward on this day")
    assert lines[1] == "Mon 2026-03-09 02:30 EDT  2026-03-09 06:30Z"


def test_without_options_ten_runs_follow_now_in_the_projects_zone(settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Kolkata"
    lines = next_runs("@daily").splitlines()
    assert len(lines) == 10
    assert "00:00 IST" in lines[0]


def test_a_step_that_is_no_interval_is_noted() -> None:
    assert next_runs("*/40 * * * *", "--count", "1").startswith("Note: */40 is no interval")


def test_a_hash_needs_the_name_that_it_hashes() -> None:
    with pytest.raises(CommandError, match="Give a name"):
        next_runs("H * * * *")
    assert next_runs("H * * * *", "--name", "a") == next_runs("H * * * *", "--name", "a")


def test_fewer_runs_than_asked_are_told_where_the_calendar_ends() -> None:
    assert "None" in next_runs("* * * * *", "--start", "9999-12-31T23:59:59-14:00")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["0 0 31 2 *"], "no such day"),
        ([""], "it has 0 fields"),
        (["* * * * * *"], "it has 6 fields"),
        (["@daily", "--tz", "Mars"], "no zone of the tz database"),
        (["@daily", "--tz", ""], "no zone of the tz database"),
        (["@daily", "--start", "yesterday"], "no instant in ISO 8601"),
        (["@daily", "--start", "2026-03-08T00:00"], "with an offset"),
        (["@daily", "--start", "2026-03-08"], "with an offset"),
        (["@daily", "--count", "0"], "no whole number from 1 to 1000"),
        (["@daily", "--count", "1001"], "no whole number from 1 to 1000"),
        (["@daily", "--count", "9" * 5000], "no whole number"),
        (["@daily", "--count", "x"], "no whole number"),
        (["0-59," * 2000 + "1 * * * *"], "more than 255"),
    ],
)
def test_what_is_refused_exits_2_with_a_sentence(arguments: list[str], why: str) -> None:
    with pytest.raises(CommandError, match=why) as caught:
        next_runs(*arguments)
    assert caught.value.returncode == 2
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(
    expression=st.one_of(
        st.sampled_from(EXPRESSIONS), st.text(), st.text("0123456789*/,-#LHR \tmonjan@()", max_size=40)
    ),
    zone=st.one_of(st.sampled_from(["UTC", "Europe/Berlin", "Pacific/Apia"]), st.text(max_size=20)),
    start=st.one_of(st.datetimes(timezones=st.timezones()).map(str), st.text(max_size=20)),
    count=st.one_of(st.integers(-1, 20).map(str), st.text(max_size=5)),
    name=st.text(max_size=20),
)
def test_whatever_is_asked_is_answered_or_refused_with_2(
    expression: str, zone: str, start: str, count: str, name: str
) -> None:
    # With = and after --, so that what begins with a dash reaches the command.
    options = (f"--tz={zone}", f"--start={start}", f"--count={count}", f"--name={name}", "--json")
    try:
        told = json.loads(next_runs(*options, "--", expression))
    except CommandError as error:
        if error.returncode != 2:
            raise
        return
    assert len(told["runs"]) <= int(count)
    for run in told["runs"]:
        assert datetime.fromisoformat(run["utc"]) > datetime.fromisoformat(start)
        assert datetime.fromisoformat(run["utc"]) == datetime.fromisoformat(run["local"])
        local = datetime.fromisoformat(run["utc"]).astimezone(ZoneInfo(zone))
        assert local.isoformat() == run["local"]


def manage(*arguments: str | bytes) -> subprocess.CompletedProcess[str]:
    """Run a command as a person would, with a database that is out of reach."""
    return subprocess.run(
        [sys.executable, "-m", "testproject.manage", *arguments],
        cwd=CHECKOUT,
        env=os.environ | {"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["next_runs", "0 0 31 2 *"], "CommandError: cron='0 0 31 2 *': there is no such day in any year."),
        (["next_runs", "é * * * *", b"--tz=\xff"], "CommandError: "),
        (["forgejobs", "next-runs", "-1 * * * *"], "CommandError: cron='-1 * * * *': "),
        (["next_runs"], "manage.py next_runs: error: the following arguments are required: cron"),
        (["next_runs", "@daily", "--every"], "manage.py next_runs: error: unrecognized arguments: --every"),
    ],
)
def test_a_process_refuses_with_one_line_and_without_a_traceback(
    arguments: list[str | bytes], why: str
) -> None:
    done = manage(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(why)
    assert "Traceback" not in done.stderr


def test_it_asks_no_database_under_either_name() -> None:
    arguments = (*VECTOR, "--count", "1")
    done = manage("forgejobs", "next-runs", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == next_runs(*arguments)
