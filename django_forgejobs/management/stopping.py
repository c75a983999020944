"""Signals that stop a worker's process, and how it leaves when nothing else helps."""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType

logger = logging.getLogger("django_forgejobs")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

#: Seconds that a worker gets beyond its grace, or after the second signal, to give its jobs back.
LAST_RESORT = 10.0


@dataclass(frozen=True)
class Words:
    """What is said at the first and the second stop signal, and when nothing helps. ``first`` may name the
    grace.
    """

    first: str = "Stopping: what runs has {grace:g} s to finish. A second signal gives it back at once."
    second: str = "Stopping at once: what runs is given back."
    left: str = "The worker does not come to an end and is left: the leases of its jobs will end."


class Stopping:
    """Counts stop signals and passes them on to ``on_stop``; before that is set, the first one exits.

    A thread of its own ends the process if the main thread does not: it may hang in a read from a
    database that is gone, or in a write to a log that nobody takes. It learns of signals from the wake-up
    pipe, which the interpreter fills even while the main thread runs no Python.

    In a process that has a supervisor, ``lifeline`` is a pipe that ends with it, which counts as a signal.
    TERM is the first signal, however often it comes (systemd may send it to us too), INT the second.
    """

    def __init__(self, words: Words, *, lifeline: int | None = None) -> None:
        self.words = words
        self.signals = 0
        self.grace = 0.0
        self.on_stop: Callable[[], None] | None = None
        self._lifeline = lifeline
        self._orphaned = False
        self._undo = ExitStack()

    def install(self, *, watch: bool = True) -> None:
        """Handle the signals from now on. Call it in the main thread.

        Without ``watch`` there is no thread: whoever is to fork sees for itself that it comes to an end.
        """
        undo = self._undo.callback
        if watch:
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            thread = threading.Thread(target=self._watch, args=(reader,), name="forgejobs-stop", daemon=True)
            undo(os.close, reader)
            undo(thread.join)
            undo(os.close, writer)  # which ends the thread
            undo(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
            thread.start()
        for number in STOP_SIGNALS:
            undo(signal.signal, number, signal.signal(number, self._receive))
        if self._lifeline is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked since the fork

    def restore(self) -> None:
        """Give the signals back to whoever handled them, in a process that goes on."""
        self._undo.close()

    def keep(self) -> None:
        """Let a signal that comes while the interpreter ends not turn the exit code into its own."""
        for number in STOP_SIGNALS:
            atexit.register(signal.signal, number, signal.SIG_IGN)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        level = self.signals + 1
        if self._lifeline is not None:
            level = 2 if number == signal.SIGINT else max(self.signals, 1)
        while self.signals < level:
            self.signals += 1
            if self.on_stop is None:
                raise SystemExit(0)
            self.on_stop()

    def _watch(self, reader: int) -> None:
        """Leave when the grace is long over, soon after the second signal, or at the third."""
        supervised = self._lifeline is not None
        answer = self._signalled(reader, None, STOP_SIGNALS)
        if answer and not (supervised and answer == signal.SIGINT):
            _within(1.0, self._say, self.words.first)
            second = (signal.SIGINT,) if supervised else STOP_SIGNALS
            answer = self._signalled(reader, self.grace + LAST_RESORT, second)
        if answer:
            _within(1.0, self._say, self.words.second)
            answer = self._signalled(reader, LAST_RESORT, () if supervised else STOP_SIGNALS)
        if answer == 0:
            return
        os.set_blocking(2, False)  # whoever reads our output may be what hangs
        with suppress(OSError):
            os.write(2, f"{self.words.left}\n".encode())
        os._exit(1)

    def _say(self, text: str) -> None:
        if text:
            logger.info("%s", text.format(grace=self.grace))

    def _signalled(self, reader: int, timeout: float | None, numbers: Collection[int]) -> int | None:
        """Wait for a signal of ``numbers``; return it, 0 at the end, None after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            waiting = [reader] if self._lifeline is None or self._orphaned else [reader, self._lifeline]
            ready = select.select(waiting, [], [], left)[0]
            if not ready:
                return None
            if reader not in ready:
                self._orphaned = True
                logger.warning("The supervisor is gone: finishing what runs.")
                os.kill(os.getpid(), signal.SIGTERM)
                continue
            number = os.read(reader, 1)
            if not number:
                return 0
            if number[0] in numbers:
                return number[0]


def _within(seconds: float, act: Callable[..., object], *args: object) -> None:
    """Call ``act`` and wait for it, but not longer: it may need a lock that is never given back."""
    thread = threading.Thread(target=act, args=args, daemon=True)
    thread.start()
    thread.join(timeout=seconds)


def leave(code: int) -> None:
    """End the process now, without waiting for threads; only the logs get a second to be flushed."""
    _within(1.0, logging.shutdown)
    os._exit(code)
