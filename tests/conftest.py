"""Fixtures and markers for all tests: which database, servers of one's own, real processes."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection

from testproject.postgres import EmbeddedServer, embedded_server, is_available
from tests.processes.harness import Manage, Processes

ONE_DAY = 24 * 3600


def pytest_configure() -> None:
    """Take Ctrl-C as usual: a shell that starts pytest in the background lets it be ignored.

    The processes that tests start, and interrupt, would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remove what killed runs on SQLite have left, old enough to belong to no running one."""
    for path in Path(settings.RUN).glob("test-*.sqlite3*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ONE_DAY:
                path.unlink()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the database at hand cannot do."""
    vendor = connection.vendor
    for item in items:
        if vendor != "postgresql" and item.get_closest_marker("postgres_only"):
            item.add_marker(pytest.mark.skip(reason="needs PostgreSQL"))
        if vendor != "sqlite" and item.get_closest_marker("sqlite_only"):
            item.add_marker(pytest.mark.skip(reason="needs SQLite"))


@pytest.fixture(scope="session")
def own_server() -> Iterator[Callable[..., EmbeddedServer]]:
    """Return a function that starts a private PostgreSQL, for tests that restart or kill theirs.

    It takes the arguments of `embedded_server`; the server ends with the session.
    """
    if not is_available():
        pytest.skip("no embedded PostgreSQL on this platform")
    with contextlib.ExitStack() as stack:

        def start(version: int = 18, **options: Any) -> EmbeddedServer:
            return stack.enter_context(embedded_server(version, **options))

        yield start


@pytest.fixture
def manage(transactional_db: None, tmp_path: Path) -> Iterator[Manage]:
    """Return a function that starts a management command as a real process on the test database.

    It needs `transactional_db`: another process sees nothing of a test's open transaction. And the
    processes end before that fixture empties the tables, which their locks would hold up.
    """
    with Processes(tmp_path) as processes:
        yield processes.manage
