"""`manage.py next_runs`: when an expression runs, or why it never will."""

import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command

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
