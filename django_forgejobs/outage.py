"""How a loop lives through an outage of the database: it closes its connection, says so once a try, and
tries again after a growing pause, for as long as it takes.
"""

from __future__ import annotations

import logging
import random
import time

from django.db import Error as DatabaseError
from django.db import connections

from django_forgejobs import between, faults

logger = logging.getLogger("django_forgejobs")

#: Longest pause, in seconds, between tries to reach the database again.
AT_MOST = 15.0


class Outage:
    """Whether the database of ``db`` is out of reach, and when to try it again (monotonic clock)."""

    def __init__(self, db: str) -> None:
        self.db = db
        self.failures = 0
        self.retry_at = 0.0

    def met(self, error: DatabaseError, *, meanwhile: str = "") -> None:
        """Put off the next try after ``error``; raise it if it is no outage and no lost race."""
        if faults.is_again(error):
            self.retry_at = time.monotonic() + random.uniform(0.01, 0.1)  # noqa: S311
            return
        if not faults.is_outage(error):
            raise error
        self.failures += 1
        pause = min(0.1 * 2 ** min(self.failures, 10), AT_MOST) * random.uniform(0.5, 1)  # noqa: S311
        self.retry_at = time.monotonic() + pause
        between.close(connections[self.db])
        logger.warning(
            "The database is out of reach (%s): try %d, next in %.1f s.%s",
            " ".join(str(error).split()) or type(error).__name__,
            self.failures,
            pause,
            meanwhile and f" {meanwhile}",
        )

    def over(self) -> None:
        """Say that the database is back, if it was away."""
        if self.failures:
            logger.warning("The database is back after %d tries.", self.failures)
            self.failures = 0
