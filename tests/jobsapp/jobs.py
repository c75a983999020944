"""Jobs that do what a test needs to see. Importing this registers them, in the test's process too.

Paths in payloads are how a job talks to its test: what exists before the job writes is the test's.
"""

import asyncio
import builtins
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from django_forgejobs import PermanentError, Retry, Snooze, job
from django_forgejobs.context import JobContext

STEP = 0.02


def append(path: str, line: object) -> None:
    """Append a line in one write, so that processes that do it at once do not mix."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def tell_started(payload: dict[str, Any], context: JobContext) -> None:
    """Append the job's id to the file `started`, if the payload names one."""
    if "started" in payload:
        append(payload["started"], context.job_id)


@job("t.ok")
def ok(payload: Any) -> Any:
    """Return the payload, so that it is the result; {} and None return nothing."""
    return payload or None


@job("t.fail", backoff=0)
def fail(payload: Any) -> None:
    """Raise {"error": name of a built-in exception} ("ValueError") with {"message": text}."""
    payload = payload or {}
    error = getattr(builtins, payload.get("error", "ValueError"))
    raise error(payload.get("message", "it always fails"))


@job("t.flaky", max_attempts=10, backoff=0)
def flaky(payload: dict[str, Any], context: JobContext) -> str:
    """Fail {"fails": n} times (2), then work."""
    if context.attempt <= payload.get("fails", 2):
        raise ValueError(f"attempt {context.attempt} fails")
    return f"worked on attempt {context.attempt}"


@job("t.permanent", max_attempts=10)
def permanent(payload: Any) -> None:
    """Fail so that no retry can help."""
    raise PermanentError("no retry can help")


@job("t.retry", max_attempts=10)
def retry(payload: dict[str, Any]) -> None:
    """Ask for a retry {"in": seconds} from now (3600)."""
    raise Retry(in_=payload.get("in", 3600))


@job("t.snooze")
def snooze(payload: dict[str, Any]) -> None:
    """Ask to be called again {"in": seconds} from now (3600)."""
    raise Snooze(in_=payload.get("in", 3600))


@job("t.slow")
def slow(payload: dict[str, Any], context: JobContext) -> str:
    """Run until the file {"until": path} exists or {"seconds": n} are over, with heartbeats.

    {"started": path} gets the job's id at the start. It ignores should_stop, but with
    {"polite": true} it gives up then by Snooze. It ends early when its claim is gone.
    """
    tell_started(payload, context)
    end = time.monotonic() + payload.get("seconds", 60)
    until = Path(payload["until"]) if "until" in payload else None
    while time.monotonic() < end and not (until and until.exists()):
        if not context.heartbeat():
            return "the claim was gone"
        if payload.get("polite") and context.should_stop:
            raise Snooze("it was asked to stop", in_=0)
        threading.Event().wait(STEP)
    return "ran to its end"


@job("t.stuck")
def stuck(payload: dict[str, Any], context: JobContext) -> None:
    """Like t.slow, but deaf: it asks for nothing and ends at the file or the time alone."""
    tell_started(payload, context)
    end = time.monotonic() + payload.get("seconds", 60)
    until = Path(payload["until"]) if "until" in payload else None
    while time.monotonic() < end and not (until and until.exists()):
        threading.Event().wait(STEP)


@job("t.thread")
def in_a_thread(payload: dict[str, Any], context: JobContext) -> None:
    """Run t.stuck in a thread of its own, for which the interpreter waits at its end."""
    thread = threading.Thread(target=stuck.function, args=(payload, context), daemon=False)
    thread.start()
    thread.join()


@job("t.timeout", timeout=0.2)
def times_out(payload: dict[str, Any], context: JobContext) -> None:
    """Run like t.stuck, with a timeout of 0.2 s."""
    stuck(payload, context)


@job("t.gil", timeout=0.2, max_attempts=2, backoff=0)
def holds_everything(payload: dict[str, Any], context: JobContext) -> None:
    """Let no other thread of the process run for an hour; on the second attempt, return."""
    tell_started(payload, context)
    if context.attempt == 1:
        sum(range(10**12))


@job("t.async")
async def in_async(payload: dict[str, Any], context: JobContext) -> str:
    """Sleep for {"seconds": n} (0) on an event loop."""
    tell_started(payload, context)
    await asyncio.sleep(payload.get("seconds", 0))
    return "ran on a loop"


@job("t.effect")
def effect(payload: dict[str, Any], context: JobContext) -> None:
    """Have an effect that can be counted: append the job's id to the file {"path": path}.

    Then go on for {"seconds": n} (0), deaf.
    """
    append(payload["path"], context.job_id)
    if payload.get("seconds"):
        threading.Event().wait(payload["seconds"])


@job("t.kill")
def kill(payload: dict[str, Any], context: JobContext) -> None:
    """Kill the worker (SIGKILL), but {"times": n} claims only, if that is given."""
    if context.claim <= (payload or {}).get("times", context.claim):
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(60)


@job("t.exit")
def leave(payload: dict[str, Any]) -> None:
    """End the worker's process without a word: os._exit({"code": n} or 1)."""
    os._exit((payload or {}).get("code", 1))


@job("t.terminate")
def terminate(payload: dict[str, Any], context: JobContext) -> None:
    """Ask the own worker to stop (TERM), then run like t.stuck."""
    os.kill(os.getpid(), signal.SIGTERM)
    stuck(payload, context)
