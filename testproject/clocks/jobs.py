"""The demo's jobs. Each may run more than once, so each looks for its own effect before it acts."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfoNotFoundError

from django.core.mail import EmailMessage
from django.db.models.functions import Now

from django_forgejobs import PermanentError, Snooze, job, schedule
from django_forgejobs.context import JobContext
from testproject.clocks.models import ClockChange, Run
from testproject.clocks.zones import Change, next_changes, read_table

Handler = Callable[[Any, JobContext], Any]


def counted(handler: Handler) -> Handler:
    """Write a `Run` before the handler starts, committed at once, so that a killed run counts too."""

    @wraps(handler)
    def run(payload: Any, context: JobContext) -> Any:
        Run.objects.create(job_id=context.job_id, type=context.type, claim=context.claim, pid=os.getpid())
        return handler(payload, context)

    return run


@job("clocks.zone", max_attempts=3)
@counted
def zone_changes(payload: Any, context: JobContext) -> Any:
    """Store a zone's next clock changes and mail them.

    Killed after the row, it finds the row. Killed between the mail and the mark, it mails again: no
    order of the two is safe without the receiver's help, so both mails have the same Message-ID.
    """
    zone, after = payload["zone"], datetime.fromisoformat(payload["after"])
    try:
        changes = next_changes(zone, after)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise PermanentError(f"tzdata knows no zone {zone!r}.") from error
    row, _ = ClockChange.objects.get_or_create(
        zone=zone, defaults={"after": after, "changes": [_as_json(change) for change in changes]}
    )
    if row.mailed_at is None:
        _mail(zone, changes, message_id=f"<job-{context.job_id}@clocks.example>").send()
        ClockChange.objects.filter(pk=row.pk).update(mailed_at=Now())
    return {"changes": len(changes)}


@job("clocks.publish", max_attempts=3, backoff=0.3)
@counted
def publish(payload: Any, context: JobContext) -> Any:
    """Put the almanac's title page on a web service, which knows by the key what it already has."""
    return _call("PUT", payload["url"], {"edition": payload["edition"]}, key=context.job_id)


@job("clocks.fax", max_attempts=2, backoff=0.3)
@counted
def fax(payload: Any, context: JobContext) -> Any:
    """Ask the same service to send a fax, which it will never do again."""
    return _call("POST", payload["url"], {"text": payload["text"]}, key=context.job_id)


@job("clocks.survey", queue="slow")
@counted
def survey(payload: Any, context: JobContext) -> Any:
    """Count the clock changes of all zones, year after year, for as long as the payload says.

    It asks often whether the job is still its own. Told to stop, it hands the job back uncharged.
    """
    began = time.monotonic()
    year, changes, zones = 0, 0, read_table()
    while True:
        year += 1
        start = datetime.fromisoformat(payload["after"]) + timedelta(days=365 * year)
        for zone in zones:
            if not context.heartbeat():
                return None  # somebody else has the job now, and writes its result
            if context.should_stop:
                raise Snooze("the worker is shutting down", in_=0)
            changes += len(next_changes(zone, start, count=100, within=365 * 86400))
            seconds = time.monotonic() - began
            if seconds >= payload["seconds"]:
                return {"years": year, "changes": changes, "seconds": round(seconds, 1)}


@schedule("0 6 * * *", on_overlap="skip")
@job("clocks.upcoming", queue="reports", max_attempts=3)
@counted
def upcoming(payload: Any, context: JobContext) -> Any:
    """Report which clocks change next, of an area or of the world. It only reads, so twice does no harm."""
    area, now = payload.get("area", ""), datetime.now(UTC)
    first: dict[datetime, list[str]] = {}
    for zone in read_table():
        if zone.startswith(area):
            for change in next_changes(zone, now, count=1, within=366 * 86400):
                first.setdefault(change.at, []).append(zone)
    return {"at": min(first).isoformat(), "zones": first[min(first)]} if first else None


@job("clocks.crash", queue="risky")
@counted
def crash(payload: Any, context: JobContext) -> None:
    """Kill the worker, each time: what the kernel does to a job that eats all memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@job("clocks.crash_once", queue="risky")
@counted
def crash_once(payload: Any, context: JobContext) -> Any:
    """Kill the worker the first time, as a power cut would."""
    if context.claim == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"survived": True}


def _as_json(change: Change) -> dict[str, Any]:
    return {"at": change.at.isoformat(), "before": change.before, "after": change.after}


def _mail(zone: str, changes: list[Change], *, message_id: str) -> EmailMessage:
    lines = [str(change) for change in changes] or ["No change is planned."]
    return EmailMessage(
        subject=f"Clock changes in {zone}",
        body="\n".join(lines),
        from_email="clocks@clocks.example",
        to=["everybody@clocks.example"],
        headers={"Message-ID": message_id},
    )


def _call(method: str, url: str, body: dict[str, Any], *, key: int) -> Any:
    """Return the JSON answer of a web service; whatever is not a success is an exception."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=5)
    try:
        headers = {"Content-Type": "application/json", "Idempotency-Key": str(key)}
        connection.request(method, parts.path, json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.load(response)
    finally:
        connection.close()
    if response.status >= 400:
        raise ConnectionError(f"{method} {url}: {response.status} {answer['detail']}")
    return answer
