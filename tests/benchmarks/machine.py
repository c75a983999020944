"""The server, databases and processes of a run; all of it under a directory that is removed at the end."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import psycopg

from testproject.postgres import embedded_server
from tests.benchmarks.effects import Effects
from tests.benchmarks.queues import PYTHON, Load, Queue

CHECKOUT = Path(__file__).resolve().parent.parent.parent

#: Durable: fsync and synchronous_commit are on, which is their default. No checkpoint falls into a drain.
SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "max_connections": "100",
}


class BenchmarkError(Exception):
    """A measurement could not be made; the message says why."""


class Database:
    """One database, made for one measurement: how processes and this one reach it."""

    def __init__(self, machine: Machine, environment: Mapping[str, str], *, sqlite: bool = False) -> None:
        self.machine, self.environment, self.sqlite = machine, environment, sqlite

    @contextlib.contextmanager
    def connect(self, **options: Any) -> Iterator[psycopg.Connection[Any]]:
        """Open a connection in autocommit, closed at the end of the block."""
        host, name = self.environment["PGHOST"], self.environment["PGDATABASE"]
        options = {"autocommit": True, "application_name": "bench", **options}
        with contextlib.closing(psycopg.connect(host=host, user="postgres", dbname=name, **options)) as made:
            yield made

    def value(self, query: str) -> Any:
        """Return what a query answers, one value."""
        if self.sqlite:
            import sqlite3

            path = self.environment["BENCH_SQLITE"]
            with contextlib.closing(sqlite3.connect(path, timeout=30)) as connection:
                return connection.execute(query).fetchone()[0]
        with self.connect() as connection:
            return connection.execute(query).fetchone()[0]  # type: ignore[index]

    def execute(self, *statements: str) -> None:
        """Run statements one by one, each its own transaction."""
        if self.sqlite:
            import sqlite3

            path = self.environment["BENCH_SQLITE"]
            with contextlib.closing(sqlite3.connect(path, timeout=30)) as connection:
                for statement in statements:
                    connection.execute(statement)
                connection.commit()
            return
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement)  # type: ignore[arg-type]

    def settle(self, *, analyze: bool = False) -> None:
        """Leave no checkpoint due; with ``analyze``, leave the tables as autovacuum would a minute later."""
        if self.sqlite:
            self.execute(*(("ANALYZE",) if analyze else ()), "PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            self.execute(*(("VACUUM ANALYZE",) if analyze else ()), "CHECKPOINT")


class Machine:
    """Owns the server and every process that a run starts."""

    def __init__(self, *, say: Callable[[str], None], settings: Mapping[str, str] = SETTINGS) -> None:
        self.say, self.settings = say, settings
        self.checkout = CHECKOUT
        self._stack = contextlib.ExitStack()
        self._templates: dict[str, str] = {}
        self._count = 0

    def __enter__(self) -> Self:
        home = CHECKOUT / ".run" / "bench"
        home.mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="run-", dir=home))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.server = self._stack.enter_context(embedded_server(settings=self.settings))
        with psycopg.connect(self.server.url) as connection:
            self.host = connection.info.host
            self.postgres = connection.info.parameter_status("server_version")
        self.postgres_database = self._database("postgres")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    # --- databases -------------------------------------------------------------------------------

    def database(self, queue: Queue) -> Database:
        """Return a fresh database with the queue's tables."""
        self._count += 1
        if queue.sqlite:
            return self._sqlite(queue)
        if queue.name not in self._templates:
            name = f"template_{queue.module}"
            self.postgres_database.execute(f"CREATE DATABASE {name}")
            self._call(queue, self._database(name), "prepare")
            self._templates[queue.name] = name
        name = f"bench_{self._count}"
        self.postgres_database.execute(f"CREATE DATABASE {name} TEMPLATE {self._templates[queue.name]}")
        return self._database(name)

    def drop(self, database: Database) -> None:
        """Remove a database that is done with."""
        if database.sqlite:
            for path in self.directory.glob(Path(database.environment["BENCH_SQLITE"]).name + "*"):
                path.unlink()
        else:
            self.postgres_database.execute(f"DROP DATABASE {database.environment['PGDATABASE']} WITH (FORCE)")

    def enqueue(self, queue: Queue, database: Database, load: Load) -> dict[str, float]:
        """Put jobs in by the queue's fastest way; return what it says of it."""
        return self._call(queue, database, "enqueue", json.dumps(load.__dict__))

    def trickle(
        self, queue: Queue, database: Database, effects: Effects, load: Load, *, every: float
    ) -> dict[int, float]:
        """Put jobs in one by one; return when each was committed, by its number."""
        command = (
            *PYTHON,
            "tests.benchmarks.queues",
            queue.module,
            "trickle",
            json.dumps(load.__dict__),
            str(every),
        )
        environment = {**database.environment, **queue.environment, **effects.environment}
        return {int(number): moment for number, moment in self.ask(command, environment).items()}

    def _database(self, name: str) -> Database:
        url = f"postgresql://postgres@{quote(self.host, safe='')}/{name}"
        environment = {"PGHOST": self.host, "PGUSER": "postgres", "PGDATABASE": name, "DATABASE_URL": url}
        return Database(self, environment)

    def _sqlite(self, queue: Queue) -> Database:
        path = self.directory / f"{queue.module}-{self._count}.sqlite3"
        environment = {"BENCH_SQLITE": str(path), "DATABASE_URL": f"sqlite:///{quote(str(path))}"}
        database = Database(self, environment, sqlite=True)
        self._call(queue, database, "prepare")
        return database

    # --- processes -------------------------------------------------------------------------------

    def _call(self, queue: Queue, database: Database, *arguments: str) -> Any:
        command = (*PYTHON, "tests.benchmarks.queues", queue.module, *arguments)
        return self.ask(command, {**database.environment, **queue.environment})

    def ask(self, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        """Run a command of ours to its end; return the JSON that it prints last, or None."""
        done = subprocess.run(
            command,
            cwd=CHECKOUT,
            env=self.environment(environment),
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode:
            raise BenchmarkError(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        lines = done.stdout.strip().splitlines()
        return json.loads(lines[-1]) if lines else None

    def effects(self, slots: int, *, gate: bool = False) -> Effects:
        """Return an empty place for effects."""
        self._count += 1
        return Effects(self.directory / f"effects-{self._count}", slots, gate=gate)

    @contextlib.contextmanager
    def workers(
        self,
        queue: Queue,
        database: Database,
        effects: Effects,
        load: Load,
        *flags: str,
        processes: int = 1,
    ) -> Iterator[list[Worker]]:
        """Run workers for the length of the block; stop them with TERM, and kill what does not stop."""
        environment = {**database.environment, **queue.environment, **effects.environment}
        command = (*queue.worker(load), *flags)
        started: list[Worker] = []
        try:
            for _ in range(processes):
                self._count += 1
                log = self.directory / f"worker-{self._count}.log"
                started.append(Worker(command, self.environment(environment), log))
            yield started
        finally:
            for worker in started:
                worker.signal(queue.stop)
            for worker in started:
                worker.end()

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of a process: this one's, without what would lead it astray."""
        ours = {"DATABASE_URL", "FORGEJOBS_JSON", "FORGEJOBS_TEST_APPS", "DEBUG"}
        return {**{k: v for k, v in os.environ.items() if k not in ours}, "PYTHONPATH": str(CHECKOUT), **more}


class Worker:
    """A worker process, with its children in a group of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.command, self.log = command, log
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                command,
                cwd=CHECKOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.popen.pid

    def check(self) -> None:
        """Raise ``BenchmarkError`` if it has ended."""
        if self.popen.poll() is not None:
            raise BenchmarkError(f"{' '.join(self.command)} ended with {self.popen.returncode}:\n{self.said}")

    @property
    def said(self) -> str:
        """The end of what it has printed."""
        return self.log.read_text(errors="replace")[-3000:]

    def signal(self, number: int) -> None:
        """Send a signal to the process; one that has ended is left."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def end(self) -> None:
        """Wait for it to stop, then kill whatever is left of its group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(8)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()


def until(
    what: Callable[[], Any], seconds: float, *, every: float = 0.01, workers: Sequence[Worker] = ()
) -> bool:
    """Wait until ``what()`` is true; return whether it became so. A worker must not end first."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        for worker in workers:
            worker.check()
        time.sleep(every)
    return True


def describe(machine: Machine) -> dict[str, Any]:
    """Say what it was measured on."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "")
    memory = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return {
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 2**20, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "postgresql": machine.postgres,
        "settings": {**machine.settings, "fsync": "on", "synchronous_commit": "on"},
        "load_at_start": os.getloadavg()[0],
    }


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text().splitlines()
    return []
