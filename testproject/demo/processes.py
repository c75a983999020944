"""The demo's child processes: none outlives the demo, however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

CHECKOUT = Path(__file__).resolve().parent.parent.parent

# Reads a pipe from the demo. When that ends, because the demo is done or dead, it kills its process group,
# itself included. All children are started in that group, so there is no moment at which one is not watched.
_GUARD = "trap '' HUP INT TERM; read -r line; kill -KILL 0"


SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class Stopped(BaseException):
    """Somebody has asked the demo to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop_on_signals() -> None:
    """Raise `Stopped` at the first signal. Later ones are ignored: what follows takes a second or two."""

    def stop(number: int, _: object) -> NoReturn:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number)

    for number in SIGNALS:
        signal.signal(number, stop)


class Child:
    """A running management command; what it prints goes to `log`."""

    def __init__(self, popen: subprocess.Popen[bytes], command: str, log: Path) -> None:
        self.popen = popen
        self.command = command
        self.log = log
        self.pid = popen.pid

    @property
    def ended(self) -> int | None:
        """The exit code, -N for signal N, or None while it runs."""
        return self.popen.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; no error if the process has just ended."""
        self.popen.send_signal(number)


class Children:
    """Starts `manage.py` commands; at the end of the block they are stopped, then killed."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.started: list[Child] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,  # its own: a Ctrl-C at the terminal is for the demo alone
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        self.stop()
        self._guard.stdin.close()
        self._guard.wait()
        for child in self.started:
            child.popen.wait()

    def manage(self, *arguments: str, name: str, **environment: str) -> Child:
        """Start `manage.py ARGUMENTS`; its output is appended to NAME.log."""
        assert self._guard is not None
        path = self.logs / f"{name}.log"
        with path.open("ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", "testproject.manage", *arguments],
                cwd=CHECKOUT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
                process_group=self._guard.pid,
            )
        child = Child(popen, " ".join(arguments), path)
        self.started.append(child)
        return child

    def stop(self, patience: float = 5.0) -> list[Child]:
        """Ask all to stop (TERM), wait so many seconds; return those that ran, ended or not."""
        running = [child for child in self.started if child.ended is None]
        for child in running:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        for child in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.popen.wait(max(0.0, deadline - time.monotonic()))
        return running
