"""When a worker has done enough and leaves, so that another takes its place: jobs, memory, age."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from pathlib import Path

logger = logging.getLogger("django_forgejobs")

#: Seconds between two looks at the memory.
INTERVAL = 1.0

_MB = 1024 * 1024


class Recycling:
    """Says when. ``max_memory`` is MB of resident memory, ``max_age`` seconds, ten percent more or less, so
    that workers which were started together do not leave together.
    """

    def __init__(
        self, *, max_jobs: int | None = None, max_memory: int | None = None, max_age: float | None = None
    ) -> None:
        self.max_jobs = max_jobs
        self.max_memory = max_memory
        self._ends_at = float("inf")
        if max_age is not None:
            self._ends_at = time.monotonic() + max_age * random.uniform(0.9, 1.1)  # noqa: S311
        self._looks_at = 0.0
        self._said = False

    def is_due(self, jobs: int) -> bool:
        """Return whether a worker that has taken so many ``jobs`` should leave. Cheap: ask it often."""
        reason = self._reason(jobs)
        if reason and not self._said:
            self._said = True
            logger.info("This worker has done enough (%s): it finishes what runs and leaves.", reason)
        return self._said

    def _reason(self, jobs: int) -> str:
        if self._said:
            return ""
        if self.max_jobs is not None and jobs >= self.max_jobs:
            return f"{jobs:,} jobs"
        now = time.monotonic()
        if now >= self._ends_at:
            return "its age"
        # Not before its first job, or one whose limit is below what it starts with would do nothing else.
        if self.max_memory is not None and jobs and now >= self._looks_at:
            self._looks_at = now + INTERVAL
            if (memory := resident() / _MB) > self.max_memory:
                return f"{memory:.0f} MB of memory"
        return ""


def too_small(max_memory: int | None) -> str:
    """Return what is wrong with a limit that this process is above before its first job, or ""."""
    memory = resident() / _MB
    if max_memory is None or memory <= max_memory:
        return ""
    return (
        f"--max-memory {max_memory} (MB) is less than a worker has before its first job, {memory:.0f} MB: "
        f"each leaves after one job. Say {2 * memory:.0f} or more."
    )


def resident() -> int:
    """Return the bytes of memory that this process has resident; its peak where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
