"""The claim cursor: where one worker's claims have come to in each lane, and so where the next begin."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from django.db import connections

from django_forgejobs.lanes import LaneEnd

if TYPE_CHECKING:
    from django_forgejobs.models import Job

#: A sweep may come again when this many times what it cost is over, and at the latest after so many seconds.
PAUSE = 20
AT_THE_LATEST = 2.0
#: With more lanes than this, to find them all anew is cheaper than to hand them over.
MOST_LANES = 100


class ClaimCursor:
    """Tells a claim where to begin: after the last job claimed in each lane, or, in a *sweep*, anywhere.

    Only a sweep finds new lanes, late commits, retries and what was given back; but while somebody holds an
    old snapshot it walks over the index entries of all the jobs that were claimed since. So what it costs,
    more than the last claim that went on, decides how often it comes: after one millisecond in twenty, after
    a hundred in two seconds.
    """

    def __init__(self, db: str) -> None:
        # Where one writer works at a time nothing dead stays in an index: every claim sweeps.
        self._sweeps_only = not connections[db].features.has_select_for_update_skip_locked
        self._ends: dict[tuple[str, str, int], LaneEnd] = {}
        self._more = True
        self._usual = 0.0
        self.sweeps_at = -float("inf")

    def after(self) -> tuple[LaneEnd, ...]:
        """Return where the next claim goes on; nothing for a sweep."""
        sweep = self._sweeps_only or time.monotonic() >= self.sweeps_at
        if sweep or not self._ends or len(self._ends) > MOST_LANES:
            return ()
        return tuple(self._ends.values())

    def claimed(self, jobs: Sequence[Job], *, wanted: int, swept: bool, seconds: float) -> None:
        """Note a claim of ``jobs``, in claim order, that was to find ``wanted`` and took ``seconds``."""
        full = len(jobs) >= wanted
        if swept:
            self._ends.clear()
            self._more = full
            self.sweeps_at = time.monotonic() + min(PAUSE * max(seconds - self._usual, 0.0), AT_THE_LATEST)
        else:
            self._usual = seconds
            if not full and self._more:
                self.sweeps_at = -float("inf")  # these lanes are empty, and there were jobs beyond them
        for job in jobs:
            self._ends[job.queue, job.type, job.priority] = LaneEnd(
                job.queue, job.type, job.priority, job.run_at, job.id
            )
