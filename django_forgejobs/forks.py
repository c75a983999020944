"""What a process does that has children: fork them with nothing shared but memory, wait for signals, see who
has ended and how. Of POSIX.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from contextlib import suppress
from types import TracebackType

from django.db import connections

from django_forgejobs import between

#: Blocked in a new child until it handles them, or it would take a stop signal as its parent does.
_BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class Parent:
    """Of any number of children. Inside ``with``, the ends of children and the signals that are handled end
    a ``wait``; ``lifeline`` is, in the children, a pipe that ends with the parent.
    """

    def __enter__(self) -> Parent:
        self._pid = os.getpid()
        self._reader, self._writer = os.pipe()
        self.lifeline, self._alive = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._sigchld = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if os.getpid() == self._pid:
            signal.set_wakeup_fd(self._wakeup)
            signal.signal(signal.SIGCHLD, self._sigchld)
            for descriptor in (self._reader, self._writer, self.lifeline, self._alive):
                os.close(descriptor)

    def fork(self) -> int:
        """Return the child's process id, and 0 in the child; there TERM and INT are blocked, and will do what
        they do by default. Raises ``OSError`` if there can be no more processes.

        Connections are closed before: two processes on one would get each other's answers. The child has a
        process group of its own, so that a Ctrl-C, which reaches a whole group, is passed on once.
        """
        for connection in connections.all(initialized_only=True):
            between.close(connection)
            if close_pool := getattr(connection, "close_pool", None):
                close_pool()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()  # or both would write what waits in it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pid == 0:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in _BLOCKED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
            for descriptor in (self._reader, self._writer, self._alive):
                os.close(descriptor)
        return pid

    def wait(self, timeout: float) -> None:
        """Wait for a signal, one of a child's end included, or ``timeout`` seconds."""
        if select.select([self._reader], [], [], timeout)[0]:
            with suppress(BlockingIOError):
                while os.read(self._reader, 4096):
                    pass


def leave(code: int) -> None:
    """End a child at once, without what its parent would do at its end."""
    logging.shutdown()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def allow_signals() -> None:
    """In a child that leaves them as the system has them: let TERM and INT end it from now on."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


def exit_code(pid: int) -> int | None:
    """Return the exit code of a child, -N for signal N, None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 1  # somebody else has waited for it
    return os.waitstatus_to_exitcode(status) if ended else None


def in_words(code: int) -> str:
    """Return an exit code as the end of a sentence: "was killed by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
