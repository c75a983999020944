"""What the documentation shows works: commands and links on every page, and the guide to schedules."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command, get_commands, load_command_class
from django.db import connection

from django_forgejobs import JobError, archive, conf, cron, scheduler, schedules
from django_forgejobs.models import Job, Schedule, ScheduleSlot
from django_forgejobs.slots import Fate
from tests.documents import CHECKOUT, Page, package, run

PAGES = ["README.md", *sorted(str(path.relative_to(CHECKOUT)) for path in CHECKOUT.glob("docs/**/*.md"))]
GUIDE = Page("docs/schedules.md")


# Every page


@pytest.mark.parametrize("command", sorted({command for path in PAGES for command in Page(path).commands()}))
def test_each_command_that_is_shown_exists_and_takes_its_arguments(command: str) -> None:
    name, *arguments = shlex.split(command)
    found = load_command_class(get_commands()[name], name)  # type: ignore[arg-type]
    found.create_parser("manage.py", name).parse_args(arguments)  # exits on an unknown one


@pytest.mark.parametrize("path", [path for path in PAGES if "](" in Page(path).text])
def test_each_link_leads_to_a_file_and_a_heading(path: str) -> None:
    assert Page(path).broken_links() == []


def test_every_decision_is_in_the_index() -> None:
    index = Page("docs/decisions/README.md").text
    missing = [
        path.name for path in (CHECKOUT / "docs" / "decisions").glob("0*.md") if path.name not in index
    ]
    assert missing == []


# The guide to schedules


@pytest.fixture
def shop(tmp_path: Path, settings: Any) -> Iterator[None]:
    """Import the package of the example, with the settings of the guide."""
    with package(GUIDE, "shop", tmp_path):
        importlib.import_module("shop.jobs")
        (text,) = [text for text in GUIDE.blocks("python") if text.startswith("# settings.py")]
        settings.FORGEJOBS = run(text)["FORGEJOBS"]
        yield


def test_the_schedules_of_the_guide_are_sound_and_become_rows(shop: None, db: None) -> None:
    assert conf.problems() == []
    assert list(schedules.problems()) == []
    scheduler.begin("default", schedules.declared())
    names = {"shop.report", "shop.prices of A", "shop.prices of B", "shop.weekly"}
    assert names <= set(Schedule.objects.values_list("name", flat=True))


def test_the_calls_of_the_guide_do_what_it_says(shop: None, db: None) -> None:
    scheduler.begin("default", schedules.declared())
    scheduler.tick("default")
    planned = Schedule.objects.get(name="shop.report").next_run_at
    (pause, resume) = [
        text
        for text in GUIDE.blocks("python")
        if text.startswith("from django_forgejobs.models import Schedule\n")
    ]
    run(pause)
    row = Schedule.objects.get(name="shop.report")
    assert (row.enabled, Job.objects.get().pk) == (True, row.last_job_id)
    assert planned is not None
    assert set(row.slots.values_list("fate", "reason")) >= {("by_hand", "by ada")}
    assert not Schedule.objects.get(name="shop.prices of A").enabled
    run(resume)
    assert Schedule.objects.get(name="forgejobs.archive").enabled
    (sql,) = GUIDE.blocks("sql")
    with connection.cursor() as cursor:
        cursor.execute(sql)
    changed = Schedule.objects.get(name="shop.prices of A")
    assert (changed.cron, changed.enabled) == ("0 5 * * *", True)


def test_the_question_to_the_ledger_is_answered(db: None, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = Schedule.objects.create(name="hourly", job_type="t.ok", cron="@hourly")
    slot = datetime(2026, 1, 1, tzinfo=UTC)
    ScheduleSlot.objects.create(
        schedule=schedule, slot=slot, fate="missed", count=7, reason="on_missed is skip"
    )
    (text,) = [text for text in GUIDE.blocks("python") if "fate=" in text]
    run(text)
    assert capsys.readouterr().out == "hourly 2026-01-01 00:00:00+00:00 None 7 on_missed is skip\n"


@pytest.mark.parametrize("shown", GUIDE.blocks("console"))
def test_next_runs_prints_what_the_guide_shows(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, printed = shown.partition("\n")
    call_command(*shlex.split(command.removeprefix("$ python manage.py ")))
    out, err = capsys.readouterr()
    assert err + out == printed


def expressions(heading: str) -> list[str]:
    return [text for row in GUIDE.table(heading) for text in re.findall(r"`([^`]+)`", row[0])]


@pytest.mark.parametrize("expression", expressions("accepted"))
def test_what_the_guide_calls_accepted_is(expression: str) -> None:
    assert cron.parse(expression, "UTC", name="any").runs(datetime(2026, 1, 1, tzinfo=UTC), 1)


@pytest.mark.parametrize("expression", expressions("refused"))
def test_what_the_guide_calls_refused_is(expression: str) -> None:
    with pytest.raises(JobError):
        cron.parse(expression, "UTC", name="any")


@pytest.mark.parametrize("row", GUIDE.table("expression"), ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
def test_schedules_run_on_days_when_clocks_change_as_the_guide_says(row: list[str]) -> None:
    expression, zone, day, times = row[0].strip("`"), row[1], date.fromisoformat(row[2]), row[3]
    start = datetime.combine(day, datetime.min.time(), UTC) - timedelta(days=2)
    runs = cron.parse(expression, zone).runs(start, 200)
    assert ", ".join(f"{run.local:%H:%M}" for run in runs if run.local.date() == day) == times


def test_the_guide_names_every_field_fate_and_alias_and_how_long_the_ledger_is_kept() -> None:
    fields = {name for row in GUIDE.table("field") for name in re.findall(r"`(\w+)`", row[0])}
    assert fields == set(schedules.Declared.__dataclass_fields__)
    assert {row[0].strip("`") for row in GUIDE.table("`fate`")} == set(Fate.values)
    assert set(expressions("accepted")) >= set(cron.ALIASES)
    assert f"kept for {timedelta(seconds=archive.KEPT).days} days" in GUIDE.text


def test_the_guide_tells_when_the_built_in_schedules_run() -> None:
    declared = schedules.declared()
    shown = {row[0].strip("`"): row[1].strip("`") for row in GUIDE.table("schedule")}
    assert shown == {name: declared[name].cron for name in ("forgejobs.archive", "forgejobs.reclaim")}
