"""What the README shows works: its code runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import textwrap
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as tested
from django.core.management import get_commands, load_command_class

from django_forgejobs import conf, enqueue, get_job, process_one, registry
from django_forgejobs.registry import Handler

CHECKOUT = Path(__file__).resolve().parent.parent
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the code blocks of a language, also those in lists, without their indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", README, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


@pytest.fixture
def accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the blocks that name a file of the package `accounts` and make it importable."""
    package = tmp_path / "accounts"
    package.mkdir()
    (package / "__init__.py").touch()
    for text in blocks("python"):
        if name := re.match(r"# accounts/(\w+\.py)\n", text):
            (package / name[1]).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_definitions", dict(registry._definitions))
    yield
    for module in [module for module in sys.modules if module.split(".")[0] == "accounts"]:
        del sys.modules[module]


def run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"BASE_DIR": CHECKOUT}
    exec(compile(text, "README.md", "exec"), names)
    return names


def test_the_example_works_and_its_own_test_passes(accounts: None, db: None) -> None:
    module = importlib.import_module("accounts.tests")
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner().run(suite)
    assert result.testsRun == 1
    assert result.wasSuccessful()


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


def commands() -> list[str]:
    inline = re.findall(r"`python manage\.py ([^`]+)`", README)
    return inline + [
        line.removeprefix("python manage.py ").split("#")[0].strip()
        for text in blocks("sh")
        for line in text.splitlines()
    ]


@pytest.mark.parametrize("command", commands())
def test_each_command_of_the_readme_exists_and_takes_its_arguments(command: str) -> None:
    name, *arguments = shlex.split(command)
    found = load_command_class(get_commands()[name], name)  # type: ignore[arg-type]
    found.create_parser("manage.py", name).parse_args(arguments)  # exits on an unknown one


def test_each_link_of_the_readme_leads_to_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (CHECKOUT / link).is_file()] == []


def test_each_job_type_of_the_demo_is_in_the_printed_summary() -> None:
    types = {name for name in registry.types() if name.startswith("clocks.")}
    assert types == set(re.findall(r"^ +(clocks\.\w+) +\d", README, re.MULTILINE))
