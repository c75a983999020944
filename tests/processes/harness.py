"""Real processes of the test project, on the database that the current test uses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode

from django.db import DEFAULT_DB_ALIAS, connections

from tests.waiting import wait_for

CHECKOUT = Path(__file__).resolve().parent.parent.parent


class Process:
    """A started command; what it prints, stdout and stderr together, goes to a file."""

    def __init__(self, arguments: list[str], output: Path, environment: Mapping[str, str]) -> None:
        self.arguments = arguments
        self.output_path = output
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                arguments,
                cwd=CHECKOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.pid = self.popen.pid

    @property
    def output(self) -> str:
        """What the process has printed so far."""
        return self.output_path.read_text(errors="replace")

    def is_running(self) -> bool:
        """Say whether the process has not ended yet."""
        return self.popen.poll() is None

    def wait(self, timeout: float = 30) -> int:
        """Wait for the end and return the exit code, -N for signal N."""
        wait_for(
            lambda: not self.is_running(),
            timeout=timeout,
            message=lambda: f"{self.arguments} still runs. It printed:\n{self.output}",
        )
        return self.popen.returncode

    def wait_for_output(self, text: str, timeout: float = 30) -> str:
        """Wait until the text is printed and return all output; fail if the process ends first."""
        running = True

        def seen() -> bool:
            nonlocal running
            if text in self.output:
                return True
            if not running:
                raise AssertionError(
                    f"{self.arguments} ended with {self.popen.returncode} and did not print "
                    f"{text!r}, but:\n{self.output}"
                )
            running = self.is_running()  # one more look at what it printed last
            return False

        wait_for(seen, timeout=timeout, message=lambda: f"{text!r} was not printed, but:\n{self.output}")
        return self.output

    def terminate(self) -> None:
        """Ask it to stop (TERM)."""
        self.popen.terminate()

    def interrupt(self) -> None:
        """Ask it to stop, as a Ctrl-C does (INT)."""
        self.popen.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it without a chance to do anything (KILL)."""
        self.popen.kill()


Manage = Callable[..., Process]


class Processes:
    """Starts processes and kills, by their pid, those that still run at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self.started:
            if process.is_running():
                process.popen.send_signal(signal.SIGCONT)  # a test may have frozen it
                process.kill()
            process.popen.wait()

    def manage(
        self,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        forgejobs: Mapping[str, Any] | None = None,
        database_url: str | None = None,
        using: str = DEFAULT_DB_ALIAS,
    ) -> Process:
        """Start `manage.py ARGUMENTS` on the current test database, or on `database_url`.

        `forgejobs` is the FORGEJOBS setting of the process. Killed at the end of the test.
        """
        environment = {
            **os.environ,
            "DATABASE_URL": database_url or current_database_url(using),
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
            "PYTHONUNBUFFERED": "1",
            **({} if forgejobs is None else {"FORGEJOBS_JSON": json.dumps(forgejobs)}),
            **(env or {}),
        }
        return self.run(sys.executable, "-m", "testproject.manage", *arguments, env=environment)

    def run(self, *arguments: object, env: Mapping[str, str] | None = None) -> Process:
        """Start any command; `env` is its whole environment."""
        output = self.directory / f"process-{len(self.started)}.log"
        process = Process(
            [str(argument) for argument in arguments], output, os.environ if env is None else env
        )
        self.started.append(process)
        return process


def current_database_url(using: str = DEFAULT_DB_ALIAS) -> str:
    """Return the URL of the test database in use, for another process's DATABASE_URL."""
    connection = connections[using]
    values = {name: str(value or "") for name, value in connection.settings_dict.items()}
    if connection.vendor == "sqlite":
        return f"sqlite:///{quote(values['NAME'])}"
    options = {
        name: value
        for name, value in connection.settings_dict["OPTIONS"].items()
        if isinstance(value, str | int)
    }
    login = quote(values["USER"], safe="")
    if values["PASSWORD"]:
        login += ":" + quote(values["PASSWORD"], safe="")
    host = quote(values["HOST"], safe="")
    port = f":{values['PORT']}" if values["PORT"] else ""
    query = f"?{urlencode(options)}" if options else ""
    return f"postgresql://{login}@{host}{port}/{quote(values['NAME'], safe='')}{query}"
