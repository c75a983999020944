"""What the README shows works: its code runs. Its commands and links are in test_docs."""

from __future__ import annotations

import importlib
import re
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import django
import pytest
from django.conf import settings as tested

from django_forgejobs import conf, drain, enqueue, get_job, process_one, registry, scheduler, schedules
from django_forgejobs.models import Schedule
from django_forgejobs.registry import Handler
from tests.documents import Page, package, run

README = Page("README.md")
blocks = README.blocks


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[None]:
    """Make the package of the example importable."""
    with package(README, "accounts", tmp_path):
        yield


def test_the_example_works_and_its_own_test_passes(accounts: None, db: None) -> None:
    module = importlib.import_module("accounts.tests")
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner().run(suite)
    assert result.testsRun == 1
    assert result.wasSuccessful()


def test_the_schedule_of_the_example_is_planned_and_its_job_works(
    accounts: None, db: None, settings: Any, mailoutbox: list[Any]
) -> None:
    settings.MANAGERS = ["team@example.org"] if django.VERSION >= (6, 0) else [("team", "team@example.org")]
    module = importlib.import_module("accounts.jobs")
    scheduler.begin("default", schedules.declared())
    scheduler.tick("default")
    planned = Schedule.objects.get(name="accounts.digest").next_run_at
    assert planned is not None
    assert f"{planned.astimezone(ZoneInfo('Europe/Berlin')):%H:%M}" == "06:30"
    module.User.objects.create_user("ada")
    Schedule.objects.run_now(Schedule.objects.get(name="accounts.digest"))
    assert drain() == 1
    assert "ada" in mailoutbox[0].body


@pytest.mark.parametrize(
    ("payload", "status", "attempts"),
    [
        ({"url": "ftp://example.org"}, "failed", 1),
        ({"url": "https://example.org", "busy": True}, "ready", 1),
        ({"url": "https://example.org"}, "done", 1),
    ],
)
def test_the_three_words_of_a_handler_do_what_the_readme_says(
    payload: dict[str, Any], status: str, attempts: int, db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_definitions", dict(registry._definitions))
    (text,) = [text for text in blocks("python") if "Snooze" in text]
    handler = run(text)["fetch"]
    assert isinstance(handler, Handler)
    pk = enqueue("reports.fetch", payload)
    assert process_one()
    job = get_job(pk)
    assert job is not None
    assert (job.status, job.attempts, job.max_attempts) == (status, attempts, 8)


def test_the_settings_of_the_readme_are_sound(settings: Any) -> None:
    found = [run(text) for text in blocks("python") if text.startswith("# settings.py")]
    assert "django_forgejobs" in found[0]["INSTALLED_APPS"]
    settings.FORGEJOBS = found[0]["FORGEJOBS"]
    assert conf.problems() == []


@pytest.mark.sqlite_only
def test_the_options_for_sqlite_are_those_that_are_tested() -> None:
    (found,) = [run(text)["DATABASES"] for text in blocks("python") if "DATABASES" in text]
    ours = tested.DATABASES["default"]
    assert found["default"]["ENGINE"] == ours["ENGINE"]
    assert found["default"]["OPTIONS"] == ours["OPTIONS"]


def test_each_job_type_of_the_demo_is_in_the_printed_summary() -> None:
    types = {name for name in registry.types() if name.startswith("clocks.")}
    assert types == set(re.findall(r"^ +(clocks\.\w+) +\d", README.text, re.MULTILINE))
