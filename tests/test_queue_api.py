"""The function API around the row: run jobs here, ask about them, call them off."""

import asyncio
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import Group
from django.db import DatabaseError, connection, transaction
from django.dispatch import Signal
from django.test import override_settings

from django_forgejobs import (
    JobError,
    Retry,
    acancel,
    aget_job,
    aheartbeat,
    arequeue,
    cancel,
    drain,
    enqueue,
    explain,
    get_job,
    heartbeat,
    job,
    managers,
    pending_count,
    process_one,
    registry,
    requeue,
    run_worker,
    signals,
)
from django_forgejobs.models import Job
from tests.factories import WORKER, in_seconds, make_job
from tests.processes.harness import Manage
from tests.sessions import session

pytestmark = pytest.mark.django_db
real_commits = pytest.mark.django_db(transaction=True)


def nothing(payload: Any) -> None: ...


def fail(payload: Any) -> None:
    raise ValueError("no")


# --- process_one ---------------------------------------------------------------------------------

WAYS = pytest.mark.parametrize(
    "way", [pytest.param(0, id="in a transaction"), pytest.param(1, id="alone", marks=real_commits)]
)


@WAYS
def test_one_job_is_run_and_its_result_kept(way: int) -> None:
    pk = enqueue("t", {"n": 2})
    assert process_one({"t": lambda payload: {"twice": payload["n"] * 2}})
    row = Job.objects.get()
    assert (row.pk, row.status, row.result, row.attempts) == (pk, "done", {"twice": 4}, 1)
    assert (row.claims, row.claim_token, row.history, row.last_error) == (1, None, [], "")
    assert row.finished_at is not None
    assert row.started_at is not None
    assert row.started_at <= row.finished_at


@WAYS
def test_without_a_job_that_is_due_nothing_is_run(way: int) -> None:
    enqueue("t", available_in=60)
    enqueue("t", queue="other")
    make_job(type="t", status="running")
    assert not process_one({"t": fail})
    assert drain({"t": fail}) == 0


def test_the_order_is_priority_then_time_then_id() -> None:
    for name, priority, due in (("d", 0, -5), ("b", 5, -1), ("a", 9, -1), ("c", 5, -1), ("e", 0, -4)):
        make_job(type="t", payload=name, priority=priority, run_at=in_seconds(due))
    seen: list[str] = []
    assert drain({"t": seen.append}) == 5
    assert seen == ["a", "b", "c", "d", "e"]


@WAYS
def test_a_job_fails_until_its_attempts_are_used_up_and_says_how_each_time(way: int) -> None:
    pk = enqueue("t", max_attempts=3)
    handlers: dict[str, Callable[[Any], None]] = {"t": fail}
    for attempt in (1, 2, 3):
        assert process_one(handlers)
        row = Job.objects.get()
        assert (row.attempts, row.last_error) == (attempt, "ValueError: no")
        if attempt < 3:
            assert row.status == "ready"
            assert row.run_at > row.created_at + timedelta(seconds=2)
            assert not process_one(handlers)
            assert Job.objects.run_now(pk)
    assert row.status == "dead"
    failures = [entry for entry in row.history if entry["event"] != "run_now"]
    assert [entry["event"] for entry in failures] == ["retry", "retry", "bury"]
    assert [entry["claim"] for entry in failures] == [1, 2, 3]
    for entry in failures:
        assert entry["error"] == "ValueError"
        assert "in fail\n" in entry["traceback"]
        assert entry["worker"]
        assert entry["started"] <= entry["at"]


@pytest.mark.parametrize("attempts", [46, 47, 63, 64, 1023, 1998])
@override_settings(FORGEJOBS={"BACKOFF": {"base": 1, "factor": 2, "cap": 3600, "jitter": 0.5}})
def test_a_late_attempt_is_due_again_within_the_cap(attempts: int) -> None:
    row = make_job(attempts=attempts, max_attempts=2000)
    assert process_one({"test.job": fail})
    after = Job.objects.get(pk=row.pk)
    assert (after.status, after.attempts) == ("ready", attempts + 1)
    ended = datetime.fromisoformat(after.history[-1]["at"])
    assert timedelta(seconds=1799) < after.run_at - ended < timedelta(seconds=3601)


@WAYS
def test_a_job_can_work_after_it_failed(way: int) -> None:
    enqueue("t", max_attempts=2)
    answers = iter([Retry(in_=0), None])

    def handler(payload: Any) -> None:
        if (answer := next(answers)) is not None:
            raise answer

    assert drain({"t": handler}) == 2
    row = Job.objects.get()
    assert (row.status, row.attempts, len(row.history)) == ("done", 2, 1)
    assert row.last_error.endswith("Retry: the handler asked for a retry")


@WAYS
def test_an_async_handler_runs_on_the_callers_connection(way: int) -> None:
    enqueue("t")
    Group.objects.create(name="theirs")

    async def handler(payload: Any) -> list[str]:
        await Group.objects.acreate(name="ours")
        return [name async for name in Group.objects.order_by("pk").values_list("name", flat=True)]

    assert process_one({"t": handler})
    assert Job.objects.get().result == ["theirs", "ours"]


@WAYS
def test_an_async_handler_ends_at_its_timeout(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_definitions", {})

    @job("t", timeout=0.1)
    async def endless(payload: Any) -> None:
        await asyncio.Event().wait()

    endless.enqueue()
    assert process_one()
    assert Job.objects.get().last_error.startswith("Timeout: the handler was still running 0.")


def test_the_registry_serves_its_own_types_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_definitions", {})
    enqueue("unknown", priority=9)
    assert drain() == 0
    job("known")(nothing).enqueue()
    assert drain() == 1
    assert pending_count() == 1


@pytest.mark.parametrize(
    "type_",
    [
        "os.system",
        "subprocess.run",
        "builtins.eval",
        "django.core.management.call_command",
        "tests.jobsapp.jobs.__loader__.load_module",
        "antigravity",
        "t",
    ],
)
def test_a_type_that_nobody_registered_is_failed_at_once_and_nothing_is_imported(
    type_: str, tmp_path: Path
) -> None:
    proof = tmp_path / "proof"
    pk = enqueue(type_, f"touch {proof}", max_attempts=9)
    assert process_one({"other": nothing})
    row = Job.objects.get(pk=pk)
    assert row.status == "failed"
    assert f'Unknown type: no handler is given for "{type_}". Register it' in row.last_error
    assert row.history[-1]["event"] == "fail"
    assert not proof.exists()
    assert "antigravity" not in sys.modules


# --- The caller's transaction --------------------------------------------------------------------


def integrity_error(payload: Any) -> None:
    Group.objects.create(name="handler")
    Group.objects.create(name="handler")


def plain_error(payload: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT nothing_of_that_name")


def swallowed(act: Callable[[Any], None]) -> Callable[[Any], None]:
    def handler(payload: Any) -> None:
        Group.objects.create(name="before")
        with pytest.raises(DatabaseError):
            act(payload)

    return handler


def rollback_wanted(payload: Any) -> None:
    Group.objects.create(name="before")
    transaction.set_rollback(True)


def left_open(payload: Any) -> None:
    transaction.atomic().__enter__()
    Group.objects.create(name="before")


def rolled_back(payload: Any) -> None:
    transaction.rollback()


BREAKING: list[tuple[Any, str]] = [
    (integrity_error, "IntegrityError"),
    (plain_error, "Error"),
    (swallowed(integrity_error), "The handler left its transaction broken or open; what it did is"),
    (rollback_wanted, "The handler left its transaction broken or open; what it did is undone."),
    (left_open, 'RuntimeError: The handler left a transaction open on "default"'),
    (rolled_back, "TransactionManagementError"),
]
if connection.vendor == "postgresql":  # where one error fails all that follows in its transaction
    BREAKING.append((swallowed(plain_error), "current transaction is aborted"))


@pytest.mark.parametrize(("handler", "said"), BREAKING)
def test_a_handler_that_breaks_its_transaction_leaves_the_callers_usable(handler: Any, said: str) -> None:
    with transaction.atomic():
        Group.objects.create(name="caller")
        enqueue("broken", priority=1)
        enqueue("next")
        depth = len(connection.savepoint_ids)
        assert drain({"broken": handler, "next": nothing}) == 2
        assert len(connection.savepoint_ids) == depth
        assert list(Group.objects.values_list("name", flat=True)) in (["caller"], ["caller", "handler"])
    rows = {row.type: row for row in Job.objects.all()}
    assert rows["next"].status == "done"
    assert rows["broken"].status == "dead"
    assert said in rows["broken"].last_error
    assert Group.objects.filter(name="caller").exists()


def test_what_was_to_happen_on_commit_is_undone_with_the_handler(
    django_capture_on_commit_callbacks: Any,
) -> None:
    called: list[str] = []

    def good(payload: Any) -> None:
        transaction.on_commit(lambda: called.append("good"))

    def bad(payload: Any) -> None:
        transaction.on_commit(lambda: called.append("bad"))
        rollback_wanted(payload)

    enqueue("good")
    enqueue("bad")
    with django_capture_on_commit_callbacks(execute=True):
        assert drain({"good": good, "bad": bad}) == 2
    assert called == ["good"]


def test_a_durable_block_works_in_a_test_case_as_it_does_in_a_worker() -> None:
    @transaction.atomic(durable=True)
    def handler(payload: Any) -> None:
        Group.objects.create(name="durable")

    enqueue("t")
    assert process_one({"t": handler})
    assert Job.objects.get().status == "done"


@real_commits
def test_a_transaction_rolled_back_leaves_its_jobs_as_they_were() -> None:
    pk = enqueue("t")
    with transaction.atomic():
        assert process_one({"t": lambda payload: Group.objects.create(name="effect") and None})
        transaction.set_rollback(True)
    row = Job.objects.get(pk=pk)
    assert (row.status, row.attempts, row.claims) == ("ready", 0, 0)
    assert not Group.objects.exists()


@real_commits
def test_a_handler_alone_commits_as_it_goes() -> None:
    enqueue("t")

    def handler(payload: Any) -> int:
        Group.objects.create(name="effect")
        with session("elsewhere"):
            return Group.objects.using("elsewhere").count()

    assert process_one({"t": handler})
    assert Job.objects.get().result == 1


@real_commits
@pytest.mark.postgres_only
def test_a_job_whose_connection_was_cut_is_given_back_and_not_charged() -> None:
    def cut(payload: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    enqueue("t")
    assert process_one({"t": cut})
    row = Job.objects.get()
    assert (row.status, row.attempts, row.last_error) == ("ready", 0, "")
    [entry] = row.history
    assert (entry["event"], entry["outage"]) == ("release", True)
    assert entry["reason"] == "the queue's database was out of reach"
    assert "terminating connection" in entry["message"]


def autocommit_left_off(payload: Any) -> None:
    transaction.set_autocommit(False)
    Group.objects.create(name="before")


@real_commits
@pytest.mark.parametrize("handler", [left_open, autocommit_left_off])
def test_a_job_is_not_done_whose_work_is_rolled_back(handler: Any) -> None:
    enqueue("t")
    assert process_one({"t": handler})
    row = Job.objects.get()
    assert row.status == "dead"
    assert row.last_error.startswith(
        'RuntimeError: The handler left a transaction open on "default" (or auto'
    )
    assert not Group.objects.exists()


@real_commits
def test_with_autocommit_off_a_job_is_part_of_the_callers_transaction() -> None:
    transaction.set_autocommit(False)
    try:
        enqueue("t")
        assert drain({"t": nothing}, max_jobs=2) == 1
        transaction.commit()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert Job.objects.get().status == "done"


@real_commits
@pytest.mark.postgres_only
def test_a_job_that_broke_its_own_transaction_is_charged() -> None:
    """What it raises then looks like an outage, but for the probe."""

    def careless(payload: Any) -> None:
        with transaction.atomic():
            swallowed(plain_error)(payload)
            connection.needs_rollback = False
            Group.objects.create(name="after")

    enqueue("t")
    assert process_one({"t": careless})
    row = Job.objects.get()
    assert (row.status, row.attempts) == ("dead", 1)
    assert "current transaction is aborted" in row.last_error


# --- drain, run_worker ---------------------------------------------------------------------------


@WAYS
def test_drain_counts_what_it_ran_whatever_came_of_it(way: int) -> None:
    for type_ in ("good", "bad", "unknown", "good"):
        enqueue(type_)
    assert drain({"good": nothing, "bad": fail}) == 4
    assert pending_count() == 0


def test_drain_also_runs_what_its_jobs_enqueue() -> None:
    def handler(payload: int) -> None:
        if payload:
            enqueue("t", payload - 1)

    enqueue("t", 3)
    assert drain({"t": handler}) == 4


@pytest.mark.parametrize("most", [0, 1, 3, 9])
def test_drain_runs_no_more_than_it_may(most: int) -> None:
    for _ in range(5):
        enqueue("t")
    assert drain({"t": nothing}, max_jobs=most) == min(most, 5)
    assert pending_count() == 5 - min(most, 5)


def test_drain_asks_between_two_jobs_whether_to_stop() -> None:
    seen: list[Any] = []
    for number in range(5):
        enqueue("t", number)
    assert drain({"t": seen.append}, stop=lambda: len(seen) == 2) == 2
    assert drain({"t": seen.append}, stop=lambda: True) == 0
    assert seen == [0, 1]


@real_commits
def test_a_worker_asks_between_two_jobs_on_a_full_queue_whether_to_stop() -> None:
    seen: list[Any] = []
    for number in range(9):
        enqueue("t", number)
    enqueue("t", queue="other", priority=9)
    run_worker({"t": seen.append}, poll_interval=0.01, stop=lambda: len(seen) >= 3)
    assert seen == [0, 1, 2]
    assert pending_count() == 6
    assert not Job.objects.filter(status="running").exists()


@real_commits
def test_a_worker_with_handlers_fails_a_type_that_they_do_not_name() -> None:
    enqueue("unknown")
    enqueue("t")
    seen: list[Any] = []
    run_worker({"t": seen.append}, poll_interval=0.01, stop=lambda: bool(seen))
    assert Job.objects.get(type="unknown").status == "failed"


# --- heartbeat -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lease", [5, -5])
def test_a_heartbeat_extends_a_claim_also_a_late_one(lease: float) -> None:
    row = make_job(status="running", lease=lease)
    assert heartbeat(str(row.claim_token))
    renewed = Job.objects.get()
    assert renewed.locked_until is not None
    assert row.locked_until is not None
    assert renewed.locked_until - row.locked_until > timedelta(seconds=800)
    assert renewed.claim_token == row.claim_token


def test_a_heartbeat_of_a_claim_that_is_gone_says_so() -> None:
    row = make_job(status="running")
    cancel(row)
    assert row.claim_token is not None
    assert not heartbeat(row.claim_token)
    assert not heartbeat(uuid.uuid4())


@pytest.mark.parametrize("token", [None, "", "not a token", 5, b"x" * 16, ["a" * 10_000]])
def test_a_heartbeat_of_what_is_no_token_is_refused(token: Any) -> None:
    with pytest.raises(JobError, match=r"^claim_token=.* is no claim token\. Give your handler") as caught:
        heartbeat(token)
    assert len(str(caught.value)) < 400


@WAYS
def test_a_handler_asks_by_token_or_context_and_learns_that_its_job_was_cancelled(way: int) -> None:
    pk = enqueue("t")
    answers: list[bool] = []

    def handler(payload: Any, claim_token: uuid.UUID, context: Any) -> None:
        answers.extend([heartbeat(claim_token), context.heartbeat()])
        context.renewed_at -= 60  # as if it had not asked for a minute
        cancel(pk)
        answers.extend([heartbeat(claim_token), context.heartbeat()])

    assert process_one({"t": handler})
    assert answers == [True, True, False, False]
    assert Job.objects.get().status == "cancelled"


# --- Questions, and moves by hand ----------------------------------------------------------------


def test_a_job_is_found_by_its_id_or_not_at_all() -> None:
    row = make_job()
    assert get_job(row.pk) == row
    assert get_job(row.pk + 1) is None
    assert get_job(2**70) is None


@real_commits
def test_a_poll_interval_may_be_a_timedelta() -> None:
    seen: list[Any] = []
    enqueue("t", {"n": 1}, available_in=0.1)  # so that it takes more than one look
    run_worker({"t": seen.append}, poll_interval=timedelta(milliseconds=20), stop=lambda: bool(seen))
    assert seen == [{"n": 1}]


def test_pending_are_the_ready_jobs_of_one_queue_also_those_in_the_future() -> None:
    make_job()
    make_job(run_at=in_seconds(3600), attempts=1)
    make_job(queue="other")
    for status in ("running", "done", "failed", "dead", "cancelled"):
        make_job(status=status)
    assert pending_count() == 2
    assert pending_count(queue="other") == 1
    assert pending_count(queue="none") == 0


@pytest.mark.parametrize("given", [lambda row: row, lambda row: row.pk], ids=["job", "id"])
def test_a_job_is_called_off_and_requeued_once_and_the_row_says_by_whom(given: Any) -> None:
    row = make_job()
    assert [cancel(given(row), by="ann") for _ in range(2)] == [True, False]
    assert [requeue(given(row), by="bob") for _ in range(2)] == [True, False]
    row.refresh_from_db()
    assert row.status == "ready"
    assert [(entry["event"], entry["by"]) for entry in row.history] == [
        ("cancel", "ann"),
        ("requeue", "bob"),
    ]
    assert not cancel(row.pk + 1)


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("a\0", "by contains a NUL character"),
        ("x" * 201, "is 201 characters, more than 200"),
        (Group(name="g"), "by=<Group: g> is of type Group, not a plain string"),
    ],
)
def test_a_name_that_cannot_be_stored_moves_nothing(by: Any, said: str) -> None:
    row = make_job()
    with pytest.raises(JobError) as caught:
        cancel(row, by=by)
    assert said in str(caught.value)
    row.refresh_from_db()
    assert row.status == "ready"


@pytest.mark.parametrize("wrong", ["5", None, True, 5.0, Job(type="unsaved"), ["x" * 10_000]])
@pytest.mark.parametrize("ask", [cancel, requeue, get_job, explain])
def test_what_is_no_job_is_refused_with_its_value(ask: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises(JobError, match=r"is neither a stored row nor the id of one, a whole number\.$"):
        ask(wrong)


def test_a_requeued_job_has_all_its_attempts_again() -> None:
    pk = enqueue("t", max_attempts=2)
    for _ in range(2):
        assert process_one({"t": fail})
        Job.objects.run_now(pk)
    assert requeue(pk)
    assert process_one({"t": nothing})
    row = Job.objects.get()
    assert (row.status, row.attempts, row.claims) == ("done", 1, 3)


def test_async_code_has_twins_for_what_it_needs() -> None:
    row = make_job(status="running")

    async def main() -> list[Any]:
        assert row.claim_token is not None
        return [
            await aget_job(row.pk),
            await aheartbeat(row.claim_token),
            await acancel(row.pk, by="ann"),
            await aheartbeat(row.claim_token),
            await arequeue(row),
        ]

    assert async_to_sync(main)() == [row, True, True, False, True]


def test_async_code_can_drain_in_a_thread() -> None:
    enqueue("t")

    async def handler(payload: Any) -> str:
        await asyncio.sleep(0)
        return "done"

    async def main() -> int:
        return await sync_to_async(drain)({"t": handler})

    assert async_to_sync(main)() == 1
    assert Job.objects.get().result == "done"


# --- Told ----------------------------------------------------------------------------------------


@pytest.fixture
def told() -> Iterator[list[tuple[str, str]]]:
    """Collect (signal, status in the database), behind receivers that raise."""
    seen: list[tuple[str, str]] = []
    connected: list[tuple[Signal, Any]] = []

    def connect(name: str, signal: Signal) -> None:
        def broken(**_: Any) -> None:
            raise ZeroDivisionError

        def receive(job: Job, **_: Any) -> None:
            seen.append((name, Job.objects.get(pk=job.pk).status))

        for receiver in (broken, receive):
            signal.connect(receiver)
            connected.append((signal, receiver))

    for name, signal in vars(signals).items():
        if isinstance(signal, Signal) and name != "enqueued":
            connect(name, signal)
    yield seen
    for signal, receiver in connected:
        signal.disconnect(receiver)


@WAYS
def test_what_happens_is_told_when_the_row_says_so_and_a_bad_receiver_changes_nothing(
    way: int, told: list[tuple[str, str]]
) -> None:
    enqueue("good")
    enqueue("bad", max_attempts=2)
    pk = enqueue("unknown")
    assert drain({"good": nothing, "bad": fail}) == 3
    assert told == [
        ("started", "running"),
        ("done", "done"),
        ("started", "running"),
        ("retried", "ready"),
        ("started", "running"),
        ("failed", "failed"),
    ]
    assert requeue(pk)
    assert cancel(pk)
    assert told[-2:] == [("requeued", "ready"), ("cancelled", "cancelled")]


# --- Why it is where it is -----------------------------------------------------------------------


def test_the_row_tells_one_reason_from_another() -> None:
    """Each with the worker, the claim and the times: what a person greps for."""

    def unstorable(payload: Any) -> float:
        return float("nan")

    enqueue("raises")
    enqueue("unstorable")
    enqueue("unknown")
    drain({"raises": fail, "unstorable": unstorable})
    make_job(type="killed", status="running", lease=-1, lease_expirations=2)
    Job.objects.reclaim_batch()
    make_job(type="called off")
    cancel(Job.objects.get(type="called off"), by="ann")
    reasons = {row.type: (row.status, row.last_error) for row in Job.objects.all()}
    assert reasons == {
        "raises": ("dead", "ValueError: no"),
        "unstorable": (
            "failed",
            "The result could not be stored: result is nan, which JSON does not have. Pass None or a string.",
        ),
        "unknown": (
            "failed",
            'django_forgejobs.exceptions.PermanentError: Unknown type: no handler is given for "unknown". '
            "Register it, then requeue the job.",
        ),
        "killed": (
            "dead",
            f"Its worker died: the lease of claim 1, held by {WORKER}, ran out (expiration 3 of 3).",
        ),
        "called off": ("cancelled", ""),
    }
    for row in Job.objects.exclude(type="called off"):
        [entry] = row.history
        assert entry["worker"] == row.locked_by != ""
        assert entry["claim"] == 1
        assert entry["started"] <= entry["at"]


# --- Ctrl-C --------------------------------------------------------------------------------------

PRESS = """
import json, os, signal, threading, time
from django.db import transaction
from django_forgejobs import drain, enqueue, signals

def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.001)  # a signal is handled between two steps of the main thread

def interrupted(payload):
    threading.Thread(target=press).start()
    time.sleep(20)

def own(payload):
    raise KeyboardInterrupt

def caught(payload):
    try:
        interrupted(payload)
    except KeyboardInterrupt:
        return "tidy"

handlers = {"t": lambda payload: None, **{f.__name__: f for f in (interrupted, own, caught)}}

def drained():
    try:
        return drain(handlers)
    except KeyboardInterrupt:
        return "raised again"
"""


@pytest.fixture
def pressing(manage: Manage) -> Callable[[str], Any]:
    """Return a function that runs a script in a process of its own and returns what it prints last."""

    def run(script: str) -> Any:
        process = manage("shell", "--verbosity=0", "--command", PRESS + script)
        assert process.wait() == 0, process.output
        return json.loads(process.output.splitlines()[-1])

    return run


def test_ctrl_c_gives_the_running_job_back_and_is_raised_again(pressing: Any) -> None:
    enqueue("interrupted")
    enqueue("t")
    assert pressing("print(json.dumps(drained()))") == "raised again"
    row = Job.objects.get(type="interrupted")
    assert (row.status, row.attempts, row.claims, row.last_error) == ("ready", 0, 1, "")
    assert [(entry["event"], entry["reason"]) for entry in row.history] == [
        ("release", "interrupted by Ctrl-C")
    ]
    assert Job.objects.get(type="t").claims == 0


def test_a_keyboard_interrupt_of_the_handlers_own_is_a_failure_like_any_other(pressing: Any) -> None:
    enqueue("own")
    enqueue("t")
    assert pressing("print(json.dumps(drained()))") == 2
    row = Job.objects.get(type="own")
    assert (row.status, row.last_error) == ("dead", "KeyboardInterrupt")


def test_a_handler_that_catches_ctrl_c_and_comes_to_its_end_is_done(pressing: Any) -> None:
    enqueue("caught")
    enqueue("t")
    assert pressing("print(json.dumps(drained()))") == "raised again"
    row = Job.objects.get(type="caught")
    assert (row.status, row.result) == ("done", "tidy")
    assert Job.objects.get(type="t").status == "ready"


@pytest.mark.parametrize(
    ("told", "status"), [("started", "ready"), ("done", "done")], ids=["before", "after"]
)
def test_ctrl_c_around_a_handler_leaves_no_claim_behind(told: str, status: str, pressing: Any) -> None:
    enqueue("t")
    enqueue("t")
    script = f"""
signals.{told}.connect(lambda **_: press(), weak=False)
print(json.dumps(drained()))
"""
    assert pressing(script) == "raised again"
    assert [row.status for row in Job.objects.order_by("pk")] == [status, "ready"]
    assert Job.objects.order_by("pk")[0].attempts == (1 if told == "done" else 0)


def test_ctrl_c_in_the_callers_transaction_is_raised_again_too(pressing: Any) -> None:
    enqueue("interrupted")
    script = """
with transaction.atomic():
    answer = drained()
print(json.dumps(answer))
"""
    assert pressing(script) == "raised again"
    row = Job.objects.get()
    assert (row.status, row.attempts, row.history[0]["event"]) == ("ready", 0, "release")


# --- Wrong calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: enqueue("t", db="nope"), r"db='nope' is not one of DATABASES \(default"),
        (lambda: drain({}, queue=5), "queue=5 is of type int"),  # type: ignore[arg-type]
        (lambda: process_one({}, queue=""), "queue is empty"),
        (lambda: pending_count(queue="a,b"), "commas"),
        (lambda: drain([nothing]), "handlers=.* is no dict of functions by type"),  # type: ignore[arg-type]
        (lambda: drain({}, max_jobs=-1), "max_jobs=-1 is not a whole number"),
        (lambda: run_worker({}, poll_interval=0, stop=lambda: True), "poll_interval=0: it must be more"),
        (lambda: run_worker({}, queue=None, stop=lambda: True), "queue=None"),  # type: ignore[arg-type]
        (lambda: enqueue("two\nlines"), "line breaks"),
        (lambda: enqueue("t", queue="a,b"), "commas"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_with_the_value_and_the_remedy(
    call: Callable[[], Any], said: str
) -> None:
    kept = enqueue("t")
    with pytest.raises(JobError, match=said):
        call()
    assert list(Job.objects.values_list("pk", "status")) == [(kept, "ready")]


@pytest.mark.parametrize("move", [cancel, requeue])
def test_an_id_that_no_row_can_have_moves_nothing(move: Callable[[int], bool]) -> None:
    assert not move(2**70)


@pytest.mark.postgres_only
@real_commits
def test_a_move_by_hand_does_not_wait_for_ever_for_somebodys_open_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(managers, "LOCKED_PATIENCE", 0.1)
    row = make_job()
    with session("holder"), transaction.atomic(using="holder"):
        Job.objects.using("holder").select_for_update().get(pk=row.pk)
        with pytest.raises(JobError, match="open transaction holds its row"):
            cancel(row.pk)
    assert cancel(row.pk)
