"""Background jobs and cron schedules in one database table. Importing this touches no model."""

from __future__ import annotations

from django_forgejobs.exceptions import JobError, PermanentError, Retry, Snooze
from django_forgejobs.queue import (
    acancel,
    aenqueue,
    aenqueue_many,
    aget_job,
    aheartbeat,
    arequeue,
    cancel,
    drain,
    enqueue,
    enqueue_many,
    explain,
    get_job,
    heartbeat,
    pending_count,
    process_one,
    reclaim,
    requeue,
    run_worker,
)
from django_forgejobs.registry import job
from django_forgejobs.schedules import schedule

__version__ = "0.1.0.dev0"

__all__ = [
    "JobError",
    "PermanentError",
    "Retry",
    "Snooze",
    "acancel",
    "aenqueue",
    "aenqueue_many",
    "aget_job",
    "aheartbeat",
    "arequeue",
    "cancel",
    "drain",
    "enqueue",
    "enqueue_many",
    "explain",
    "get_job",
    "heartbeat",
    "job",
    "pending_count",
    "process_one",
    "reclaim",
    "requeue",
    "run_worker",
    "schedule",
]
