"""How many jobs a worker claims beyond those that it can start at once."""

from __future__ import annotations

import time
from collections import deque

#: Seconds: as many jobs are claimed ahead as are expected to start within them.
AHEAD = 0.1
#: At most so many. (Their payloads are bounded by the claim itself.)
AT_MOST = 1000
#: Seconds for which more jobs may wait in the worker than twice what will start within ``AHEAD``.
PATIENCE = 0.25


class Pace:
    """Counts how many jobs have ended within the last ``AHEAD`` seconds: as many will start in the next.

    So batches grow by themselves, twofold from claim to claim while the queue is full, and a worker whose
    jobs take long claims nothing ahead.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, int]] = deque()
        self._count = 0

    def ended(self, count: int) -> None:
        """Note that ``count`` jobs have ended just now."""
        if count:
            self._ended.append((time.monotonic(), count))
            self._count += count

    def ahead(self) -> int:
        """Return how many jobs to have waiting."""
        since = time.monotonic() - AHEAD
        while self._ended and self._ended[0][0] < since:
            self._count -= self._ended.popleft()[1]
        return min(self._count, AT_MOST)
