"""Job rows in any state, and schedules, each made by one INSERT on the database's clock.

Every other test arranges with these.
"""

import uuid
from typing import Any

from django.db import DEFAULT_DB_ALIAS
from django.db.models import Expression, Value
from django.db.models.functions import Now

from django_forgejobs.dialect import AfterSeconds
from django_forgejobs.models import Job, Schedule
from django_forgejobs.states import ENDED, Status
from django_forgejobs.timetable import PLANNED_FOR

WORKER = "factory:1:00000000"


def in_seconds(seconds: float) -> Expression:
    """Return the instant so many seconds from now (negative: ago), for any time field of a row."""
    return AfterSeconds(Value(float(seconds)))


def make_job(*, db: str = DEFAULT_DB_ALIAS, lease: float = 900, **fields: Any) -> Job:
    """Insert one job and return it as the database has it; what is not given suits its status.

    `make_job()` is due now. A running job has `lease` seconds left: with -1 they are over. An ended
    one finished just now, and somebody ran it, unless it is cancelled. Times may be instants or
    `in_seconds(…)`.
    """
    status = Status(fields.get("status", Status.READY))
    waits = status is Status.READY
    attempts = fields.get("attempts", 0 if waits or status is Status.CANCELLED else 1)
    claims = fields.get("claims", attempts)
    values: dict[str, Any] = {
        "type": "test.job",
        "status": status,
        "run_at": in_seconds(-1),
        "attempts": attempts,
        "max_attempts": max(attempts + waits, 1),
        "claims": claims,
    }
    if claims:
        # Not a second ago: claims older than the server's start get one heartbeat more.
        values |= {"locked_by": WORKER, "started_at": Now()}
    if status is Status.RUNNING:
        values |= {"claim_token": uuid.uuid4(), "locked_until": in_seconds(lease)}
    if status in ENDED:
        values |= {"finished_at": Now()}
    if status in (Status.FAILED, Status.DEAD):
        values |= {"last_error": "ValueError: arranged by a test"}
    job = Job.objects.using(db).create(**values | fields)
    job.refresh_from_db(using=db)
    return job


def make_schedule(*, db: str = DEFAULT_DB_ALIAS, **fields: Any) -> Schedule:
    """Insert one schedule and return it as the database has it.

    `make_schedule()` is new: the next tick plans it. With `next_run_at` it is planned already, for what else
    it is.
    """
    values: dict[str, Any] = {
        "name": f"schedule {uuid.uuid4().hex[:8]}",
        "job_type": "t.ok",
        "cron": "* * * * *",
        "timezone": "UTC",
    }
    values |= fields
    if "next_run_at" in values:
        values |= {f"planned_{name}": values.get(name) for name in PLANNED_FOR}
    schedule = Schedule.objects.using(db).create(**values)
    schedule.refresh_from_db(using=db)
    return schedule
