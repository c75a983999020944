"""A real browser on a real server. It runs in a thread of its own: Playwright keeps an event loop going,
beside which Django refuses to ask the database.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--no-first-run",
]

SCREENSHOTS = Path(settings.RUN) / "screenshots"

#: Django's own parts, with faults of their own.
DJANGOS = {"exclude": [[".breadcrumbs"], ["#searchbar"]]}

InBrowser = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[tuple[ThreadPoolExecutor, Any]]:
    """Return the browser and the thread that it must be used in."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"needs a browser: one of {', '.join(PROGRAMS)}")
    with ThreadPoolExecutor(1, thread_name_prefix="browser") as thread:
        playwright = thread.submit(sync_api.sync_playwright().start).result()
        try:
            launch = playwright.chromium.launch
            chromium = thread.submit(launch, executable_path=program, args=OPTIONS).result()
            try:
                yield thread, chromium
            finally:
                thread.submit(chromium.close).result()
        finally:
            thread.submit(playwright.stop).result()


@pytest.fixture
def in_browser(browser: tuple[ThreadPoolExecutor, Any], live_server: Any) -> InBrowser:
    """Return a function that calls `visit(page)` in the browser, logged in, and returns what it returns.

    Other arguments are those of a browser context (`color_scheme`, `java_script_enabled`). What the
    page complains of in the console, or asks of another server, fails the test.
    """
    thread, chromium = browser
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    cookie = {"name": "sessionid", "value": client.cookies["sessionid"].value, "url": live_server.url}

    def call(visit: Callable[[Any], Any], **options: Any) -> Any:
        complaints: list[str] = []
        context = chromium.new_context(base_url=live_server.url, **options)
        try:
            context.set_default_timeout(10_000)
            context.add_cookies([cookie])
            page = context.new_page()
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda said: complaints.extend(_complaint(said)))
            page.on("request", lambda asked: complaints.extend(_elsewhere(asked.url, live_server.url)))
            answer = visit(page)
        finally:
            context.close()
        assert not complaints
        return answer

    return lambda visit, **options: thread.submit(call, visit, **options).result()


def _complaint(said: Any) -> list[str]:
    where = said.location.get("url", "")
    return [f"{said.text} {where}"] if said.type == "error" and not where.endswith("/favicon.ico") else []


def _elsewhere(asked: str, ours: str) -> list[str]:
    return [] if asked.startswith((ours, "data:")) else [f"asked for {asked}"]


def shut_out(in_browser: InBrowser, pages: dict[str, str], **options: Any) -> list[Any]:
    """Return what of `pages`, addresses by name, keeps somebody from using them, as axe sees it."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe").Axe()

    def visit(page: Any) -> list[Any]:
        found = []
        for name, where in pages.items():
            page.goto(where)
            for violation in axe.run(page, context=DJANGOS).response["violations"]:
                if violation["impact"] in ("serious", "critical"):
                    found.append((name, violation["id"], [node["html"] for node in violation["nodes"]]))
        return found

    found: list[Any] = in_browser(visit, **options)
    return found


def keep(page: Any, name: str) -> None:
    """Take a picture of the whole page, for a person to look at."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
