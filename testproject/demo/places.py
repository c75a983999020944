"""Where a demo keeps things: a directory of its own below `.run/demo`, and a database of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from testproject.demo.processes import DemoError
from testproject.postgres import UNAVAILABLE, embedded_server, is_available

HOME = Path(__file__).resolve().parent.parent.parent / ".run" / "demo"
PREFIX = "forgejobs_demo_"


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Make the demo's directory; it stays, to be looked at, until the next demo begins."""
    HOME.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with (HOME / ".lock").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            for old in HOME.iterdir():
                if old.is_dir() and not _is_used(old):
                    shutil.rmtree(old)
            own = Path(tempfile.mkdtemp(prefix="", dir=HOME))
            lock = stack.enter_context((own / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield own


def _is_used(directory: Path) -> bool:
    with (directory / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclass(frozen=True)
class Database:
    """A database that is empty and the demo's alone; `name` is for people."""

    url: str
    name: str


@contextlib.contextmanager
def database(directory: Path) -> Iterator[Database]:
    """Make a database: on the server that DATABASE_URL names, else on an embedded one, else SQLite."""
    named = os.environ.get("DATABASE_URL", "")
    if named and not named.startswith("sqlite"):
        with _own_database(named) as url:
            yield Database(url, "a database of its own on the server that DATABASE_URL names")
    elif not named and is_available():
        with embedded_server() as server:
            yield Database(server.url, "an embedded PostgreSQL")
    else:
        url = f"sqlite:///{quote(str(directory / 'db.sqlite3'))}"
        yield Database(url, "SQLite" if named else f"SQLite. {UNAVAILABLE}")


@contextlib.contextmanager
def _own_database(server: str) -> Iterator[str]:
    """Create a database and drop it at the end; first drop those of demos that were killed."""
    import psycopg

    name = f"{PREFIX}{secrets.token_hex(4)}"
    parts = urlsplit(server)._replace(scheme="postgresql")
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(psycopg.connect(parts.geturl(), autocommit=True))
            _drop_unused(connection)
            connection.execute(f'CREATE DATABASE "{name}"')
        except psycopg.Error as error:
            raise DemoError(
                f"The demo wants a database of its own on the server that DATABASE_URL names: {error}\n"
                "Unset DATABASE_URL to use an embedded PostgreSQL, or DATABASE_URL=sqlite://."
            ) from error
        stack.callback(connection.execute, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        yield parts._replace(path=f"/{name}").geturl()


def _drop_unused(connection: Any) -> None:
    unused = connection.execute(
        "SELECT datname FROM pg_database WHERE starts_with(datname, %s)"
        " AND datname NOT IN (SELECT datname FROM pg_stat_activity WHERE datname IS NOT NULL)",
        [PREFIX],
    )
    for (name,) in unused.fetchall():
        with contextlib.suppress(Exception):  # somebody else's, or just taken
            connection.execute(f'DROP DATABASE "{name}"')
