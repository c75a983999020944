"""``manage.py reclaim_jobs``: put back what dead workers held; for a timer or cron."""

from __future__ import annotations

import logging
import time
from typing import Any

from django_forgejobs import conf, reaper, tally
from django_forgejobs.management.base import JobsCommand, counted

logger = logging.getLogger("django_forgejobs")


class Command(JobsCommand):
    """One tick of the reaper."""

    help = (
        "Put back the jobs of dead workers, bury those that killed too many, and fail due jobs of types that "
        "no worker has announced for FORGEJOBS['UNKNOWN_TYPE_GRACE'], but only while workers have been "
        "announcing types for the whole of it: when all are down, silence says nothing about a type. Safe at "
        "any time, also twice at once. Workers do this too, while one runs."
    )
    examples = """
reclaim_jobs                          once, as the systemd timer does every five minutes
reclaim_jobs -v 0                     quiet, for cron
"""
    logs_events = True

    def work(self, alias: str, **options: Any) -> None:
        """Do one tick and say what it did."""
        if self.had_to_wait:
            wait = conf.current().HEARTBEAT
            logger.warning(
                "The database was out of reach: live workers get %g s to renew their leases first.",
                wait,
            )
            time.sleep(wait)
        done = reaper.tick(alias)
        tally.flush(alias)
        grace = conf.current().UNKNOWN_TYPE_GRACE
        self.say(
            f"{counted(done.put_back)} put back, {done.buried} buried, {done.unserved} failed whose type no "
            f"worker has announced for {grace:g} s while others announced theirs.",
            **options,
        )
