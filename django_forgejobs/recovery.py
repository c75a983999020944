"""Has what dead workers held taken back by a process that lives only for that, again and again until it is
done. So the supervisor asks no database, and no outage keeps it from supervising.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass, field

from django.db import Error as DatabaseError

from django_forgejobs import conf, forks, takeover
from django_forgejobs.takeover import Death

logger = logging.getLogger("django_forgejobs")

#: Seconds after a death at which what the dead worker held is looked for. More than once: the server may
#: commit a claim that was under way when the worker died.
LOOKS = (0.0, 1.0, 5.0, 30.0)
#: Seconds for one look; a connection may hang.
WITHIN = 30.0
#: Longest pause, in seconds, between two tries when one has failed.
PAUSE_AT_MOST = 15.0

#: Exit codes of the process that takes back: done, to be tried again, done and there are suspects now.
DONE, AGAIN, SUSPECTS = 0, 1, 2


@dataclass(eq=False)
class Loss:
    """What a dead worker may have left, and when to look for it."""

    death: Death
    died: float = field(default_factory=time.monotonic)
    looks: int = 0
    tries: int = 0
    next_look: float = 0.0

    def looked(self, code: int) -> None:
        """Note how a look ended."""
        self.tries = self.tries + 1 if code not in (DONE, SUSPECTS) else 0
        if self.tries:
            pause = min(0.25 * 2 ** min(self.tries, 10), PAUSE_AT_MOST)
            self.next_look = time.monotonic() + pause
        else:
            self.looks += 1
            self.next_look = self.died + LOOKS[min(self.looks, len(LOOKS) - 1)]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do; or its leases have run out, and any reaper does it."""
        return self.looks == len(LOOKS) or self.next_look - self.died > conf.current().LEASE


class Recovery:
    """Of all the dead workers of one supervisor. ``turn`` it often; it never waits."""

    def __init__(self, db: str, parent: forks.Parent) -> None:
        self.db = db
        self._parent = parent
        self._losses: list[Loss] = []
        self._looking: list[Loss] = []
        self._pid = 0
        self._started = 0.0

    def add(self, death: Death) -> None:
        """Have taken back what this one held, from the next turn on."""
        self._losses.append(Loss(death))

    def is_pending(self, looks: int, *, within: float = float("inf")) -> bool:
        """Whether one that died less than ``within`` seconds ago has not been looked for so often yet."""
        now = time.monotonic()
        return any(loss.looks < looks and now - loss.died < within for loss in self._losses)

    def turn(self) -> int | None:
        """Start a look that is due, or see how one has ended: return DONE, AGAIN or SUSPECTS then."""
        now = time.monotonic()
        if self._looking:
            code = forks.exit_code(self._pid)
            if code is None:
                if now - self._started > WITHIN:
                    os.kill(self._pid, signal.SIGKILL)
                return None
            for loss in self._looking:
                loss.looked(code)
            self._losses = [loss for loss in self._losses if not loss.is_over]
            self._looking = []
            return code
        due = [loss for loss in self._losses if now >= loss.next_look]
        if due:
            self._look(due)
        return None

    def _look(self, due: list[Loss]) -> None:
        self._looking, self._started = due, time.monotonic()
        try:
            self._pid = self._parent.fork()
        except OSError as error:
            logger.error("What dead workers held cannot be taken back yet: %s", error)
            for loss in due:
                loss.looked(AGAIN)
            self._looking = []
            return
        if self._pid == 0:
            forks.allow_signals()
            forks.leave(_take_back([loss.death for loss in due], self.db))


def _take_back(deaths: list[Death], db: str) -> int:
    """Take back what the dead held; return how it ended."""
    code = DONE
    for death in deaths:
        try:
            put_back = any(job.finished_at is None for job in takeover.take_back(death, db))
        except DatabaseError as error:
            code = AGAIN
            what = " ".join(str(error).split())
            logger.warning("What %s held cannot be taken back yet: %s", death.worker, what)
        except BaseException:
            code = AGAIN
            logger.exception("What %s held cannot be taken back.", death.worker)
        else:
            code = SUSPECTS if put_back and code == DONE else code
    return code
