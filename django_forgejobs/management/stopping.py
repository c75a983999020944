"""Signals that stop a worker's process, and how it leaves when nothing else helps."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

#: Seconds beyond the grace, or after the second signal, in which a worker must have given its jobs back.
LAST_RESORT = 10.0


class Stopping:
    """Counts stop signals and passes them on to ``on_stop``; before that is set, the first one exits.

    A thread of its own ends the process if the main thread does not come back: it may hang in a read
    from a database that is gone. Its queue, unlike an event or a new thread, is safe in a signal handler.
    """

    def __init__(self) -> None:
        self.signals = 0
        self.grace = 0.0
        self.on_stop: Callable[[], None] | None = None
        self._told: queue.SimpleQueue[bool] = queue.SimpleQueue()

    @contextmanager
    def handled(self) -> Iterator[Stopping]:
        """Handle the signals inside; call it in the main thread. The old handlers come back after it."""
        old = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        threading.Thread(target=self._watch, name="forgejobs-stop", daemon=True).start()
        try:
            yield self
        finally:
            self._told.put(False)
            for number, handler in old.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.on_stop is None:
            raise SystemExit(0)
        self._told.put(True)
        self.on_stop()

    def _watch(self) -> None:
        """Leave when the grace is long over, soon after the second signal, or at the third."""
        if not self._told.get():
            return
        with suppress(queue.Empty):
            for patience in (self.grace + LAST_RESORT, LAST_RESORT):
                if not self._told.get(timeout=patience):
                    return
        # Whoever reads our output may be what hangs.
        os.set_blocking(2, False)
        with suppress(OSError):
            os.write(2, b"The worker did not come to an end: leaving. Leases of its jobs will end.\n")
        os._exit(1)


def leave(code: int) -> None:
    """End the process now, without waiting for threads; only the logs get a second to be flushed."""
    flush = threading.Thread(target=logging.shutdown, daemon=True)
    flush.start()
    flush.join(timeout=1.0)
    os._exit(code)
