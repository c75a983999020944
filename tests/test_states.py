"""The matrix of moves, line by line: what each writes, that it leaves the rest alone, and its guard."""

import uuid
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db.models.functions import Now
from django.dispatch import Signal

from django_forgejobs import signals
from django_forgejobs.lanes import Suspects
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import (
    BURY,
    COMPLETE,
    ENDED,
    FAIL,
    GIVE_BACK,
    RELEASE,
    RETRY,
    SNOOZE,
    TRANSITIONS,
    Move,
    Status,
)
from tests.factories import WORKER, in_seconds, make_job

pytestmark = pytest.mark.django_db

DELAY = 100.0
LEASE = 50.0
Act = Callable[[Job], object]


def arrange(status: str, **fields: Any) -> Job:
    """Make a row that differs from the defaults in every column, so that each write shows."""
    values: dict[str, Any] = {
        "queue": "mail",
        "payload": {"to": "x"},
        "priority": 7,
        "idempotency_key": "k",
        "run_at": in_seconds(-3000),
        "created_at": in_seconds(-4000),
        "started_at": in_seconds(-2000),
        "attempts": 2,
        "max_attempts": 5,
        "claims": 4,
        "lease_expirations": 1,
        "last_error": "an old error",
        "result": {"an": "old result"},
        "history": [{"event": "old"}],
    }
    if status in ENDED:
        values["finished_at"] = in_seconds(-1000)
    return make_job(status=status, **values | fields)


# --- The moves, each through its door ------------------------------------------------------------


def claim(job: Job) -> object:
    return Job.objects.claim(worker="me", lease=LEASE, suspects=Suspects.FIRST)


def renew(job: Job) -> object:
    return Job.objects.renew({job.pk: job.claim_token or uuid.uuid4()}, lease=LEASE)


def end(move: Move, job: Job) -> object:
    """Finish `job` with everything that an outcome can carry, whether the move writes it or not."""
    outcome = Outcome(job, move, delay=DELAY, error="a new error", facts={"reason": "why"})
    if move is COMPLETE:
        outcome = Outcome(job, move, result='{"a": "new result"}')
    return Job.objects.finish([outcome]).accepted


def fail_unserved(job: Job) -> object:
    return Job.objects.fail_unserved(job.type, grace=60)


def reclaim(job: Job) -> object:
    return Job.objects.reclaim_batch()[0]


def by_hand(move: str, job: Job) -> object:
    return getattr(Job.objects, move)(job, by="ann")


# --- The matrix ----------------------------------------------------------------------------------

Check = Callable[[Any, Any, datetime], bool]


def near(seconds: float) -> Check:
    return lambda before, after, now: abs((after - now).total_seconds() - seconds) < 5


def plus(number: int) -> Check:
    return lambda before, after, now: after == before + number


def becomes(value: Any) -> Check:
    return lambda before, after, now: after == value


def says(text: str) -> Check:
    return lambda before, after, now: text in after


def is_new(before: Any, after: Any, now: datetime) -> bool:
    return isinstance(after, uuid.UUID) and after != before


@dataclass(frozen=True)
class Line:
    """A line of the matrix. What `writes` does not name must stay as it was."""

    name: str
    source: str
    act: Act
    target: str
    writes: dict[str, Check]
    entry: dict[str, Any] | None = None
    told: tuple[str, ...] = ()
    arranged: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} a {self.source} job"


CLAIM_ENDS = {"claim_token": becomes(None), "locked_until": becomes(None)}
ENDS = {"finished_at": near(0)}
WHY = {"reason": "why"}
LEASE_EXPIRED = {"event": "reclaim", "reason": "lease expired"}
# Claimed since the server started: others get a heartbeat more.
EXPIRED = {"lease": -1, "started_at": in_seconds(-1)}

MATRIX = [
    Line(
        "claim",
        "ready",
        claim,
        "running",
        {
            "attempts": plus(1),
            "claims": plus(1),
            "claim_token": is_new,
            "locked_until": near(LEASE),
            "locked_by": becomes("me"),
            "started_at": near(0),
        },
    ),
    Line("renew", "running", renew, "running", {"locked_until": near(LEASE)}),
    Line(
        "complete",
        "running",
        partial(end, COMPLETE),
        "done",
        CLAIM_ENDS | ENDS | {"result": becomes({"a": "new result"})},
        told=("done",),
    ),
    Line(
        "retry",
        "running",
        partial(end, RETRY),
        "ready",
        CLAIM_ENDS | {"run_at": near(DELAY), "last_error": becomes("a new error")},
        entry={"event": "retry", **WHY},
        told=("retried",),
    ),
    Line(
        "bury",
        "running",
        partial(end, BURY),
        "dead",
        CLAIM_ENDS | ENDS | {"last_error": becomes("a new error")},
        entry={"event": "bury", **WHY},
        told=("dead",),
    ),
    Line(
        "fail",
        "running",
        partial(end, FAIL),
        "failed",
        CLAIM_ENDS | ENDS | {"last_error": becomes("a new error")},
        entry={"event": "fail", **WHY},
        told=("failed",),
    ),
    Line(
        "fail",
        "ready",
        fail_unserved,
        "failed",
        ENDS | {"last_error": says('no worker has announced "test.job"')},
        entry={"event": "fail"},
        told=("failed",),
    ),
    Line(
        "release",
        "running",
        partial(end, RELEASE),
        "ready",
        CLAIM_ENDS | {"run_at": near(DELAY), "attempts": plus(-1)},
        entry={"event": "release", **WHY},
        told=("released",),
    ),
    Line(
        "give back",
        "running",
        partial(end, GIVE_BACK),
        "ready",
        CLAIM_ENDS | {"attempts": plus(-1)},
    ),
    Line(
        "snooze",
        "running",
        partial(end, SNOOZE),
        "ready",
        CLAIM_ENDS | {"run_at": near(DELAY), "attempts": plus(-1)},
        entry={"event": "snooze", **WHY},
        told=("snoozed",),
    ),
    Line(
        "reclaim",
        "running",
        reclaim,
        "ready",
        CLAIM_ENDS
        | {
            "attempts": plus(-1),
            "lease_expirations": plus(1),
            "last_error": says(f"Its worker died: the lease of claim 4, held by {WORKER}"),
        },
        told=("reclaimed",),
        entry=LEASE_EXPIRED,
        arranged=EXPIRED,
    ),
    Line(
        "reclaim for the last time",
        "running",
        reclaim,
        "dead",
        CLAIM_ENDS
        | ENDS
        | {
            "attempts": plus(-1),
            "lease_expirations": becomes(3),
            "last_error": says("ran out (expiration 3 of 3)"),
        },
        told=("reclaimed", "dead"),
        entry=LEASE_EXPIRED,
        arranged=EXPIRED | {"lease_expirations": 2},
    ),
    *(
        Line(
            "cancel",
            source,
            partial(by_hand, "cancel"),
            "cancelled",
            (CLAIM_ENDS if source == "running" else {}) | ENDS,
            entry={"event": "cancel", "by": "ann"},
            told=("cancelled",),
        )
        for source in ("ready", "running")
    ),
    *(
        Line(
            "requeue",
            source,
            partial(by_hand, "requeue"),
            "ready",
            {
                "run_at": near(0),
                "attempts": becomes(0),
                "lease_expirations": becomes(0),
                "finished_at": becomes(None),
            },
            entry={"event": "requeue", "by": "ann"},
            told=("requeued",),
        )
        for source in ("failed", "dead", "cancelled")
    ),
    Line(
        "run now",
        "ready",
        partial(by_hand, "run_now"),
        "ready",
        {"run_at": near(0)},
        entry={"event": "run_now", "by": "ann"},
        arranged={"run_at": in_seconds(3000)},
    ),
]


@pytest.mark.parametrize("line", MATRIX, ids=str)
def test_a_move_writes_what_the_matrix_says_and_nothing_else(line: Line) -> None:
    job = arrange(line.source, **line.arranged)
    before = values_of(job)
    assert line.act(job)
    after, now = values_of(job), database_now()
    writes = dict(line.writes)
    if line.target != line.source:
        writes["status"] = becomes(line.target)
    if line.entry is not None:
        writes["history"] = lambda b, a, n: a[:-1] == b and len(a) == 2
    changed = {name for name in before if before[name] != after[name]}
    assert changed == set(writes)
    for name, check in writes.items():
        assert check(before[name], after[name], now), f"{name}: {before[name]} → {after[name]}"


@pytest.mark.parametrize("line", [x for x in MATRIX if x.entry is not None], ids=str)
def test_a_recorded_move_leaves_an_entry_that_says_when_who_and_why(line: Line) -> None:
    job = arrange(line.source, **line.arranged)
    line.act(job)
    entry = values_of(job)["history"][-1]
    at, started = (datetime.fromisoformat(entry[name]) for name in ("at", "started"))
    assert abs(at - database_now()) < timedelta(seconds=5)
    assert job.started_at is not None
    assert abs(started - job.started_at) < timedelta(milliseconds=1)
    assert (entry["claim"], entry["worker"]) == (4, WORKER)
    assert entry | (line.entry or {}) == entry


@pytest.mark.parametrize("line", MATRIX, ids=str)
def test_a_move_is_told_by_its_signal(line: Line) -> None:
    told: list[str] = []
    receivers = []
    for name, signal in vars(signals).items():
        if isinstance(signal, Signal):
            receive = partial(lambda told, name, job, **_: told.append(name), told, name)
            signal.connect(receive)
            receivers.append((signal, receive))
    try:
        line.act(arrange(line.source, **line.arranged))
    finally:
        for signal, receive in receivers:
            signal.disconnect(receive)
    assert tuple(told) == line.told


def test_the_matrix_has_a_line_for_every_transition() -> None:
    described = {(line.name.split(" for ")[0].replace(" ", "_"), line.source, line.target) for line in MATRIX}
    declared = {(move.name, str(s), str(move.target)) for move in TRANSITIONS for s in move.sources}
    assert described == declared


# --- The guards ----------------------------------------------------------------------------------

ENDS_OF_A_CLAIM = [COMPLETE, RETRY, BURY, FAIL, RELEASE, GIVE_BACK, SNOOZE]


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("move", ENDS_OF_A_CLAIM, ids=lambda move: move.name)
def test_no_claim_is_ended_by_whoever_does_not_hold_it(move: Move, status: Status) -> None:
    row = arrange(status)
    old = copy(row)
    old.claim_token, old.claims = uuid.uuid4(), row.claims - 1
    before = values_of(row)
    settlement = Job.objects.finish([Outcome(old, move, delay=0, error="old")])
    assert [outcome.job for outcome in settlement.lost] == [old]
    assert values_of(row) == before


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize(
    ("act", "sources"),
    [
        (claim, {"ready"}),
        (renew, {"running"}),
        (reclaim, set()),
        (fail_unserved, {"ready"}),
        (partial(by_hand, "cancel"), {"ready", "running"}),
        (partial(by_hand, "requeue"), {"failed", "dead", "cancelled"}),
        (partial(by_hand, "run_now"), set()),
    ],
    ids=["claim", "renew", "reclaim", "fail_unserved", "cancel", "requeue", "run_now"],
)
def test_a_move_from_another_status_changes_nothing_and_says_so(
    act: Act, sources: set[str], status: Status
) -> None:
    job = arrange(status)
    before = values_of(job)
    if status in sources:
        assert act(job)
        assert values_of(job) != before
    else:
        assert not act(job)
        assert values_of(job) == before


def test_a_job_due_later_is_not_claimed() -> None:
    job = arrange("ready", run_at=in_seconds(5))
    assert claim(job) == []


# --- The history ---------------------------------------------------------------------------------


def test_a_history_keeps_its_ends_and_the_number_of_what_was_between() -> None:
    job = make_job()
    for number in range(1, 46):
        move = Job.objects.cancel if number % 2 else Job.objects.requeue
        assert move(job, by=str(number))
        names = [entry.get("by", entry.get("count")) for entry in values_of(job)["history"]]
        if number <= 20:
            assert names == [str(n) for n in range(1, number + 1)]
        else:
            first, last = range(1, 11), range(number - 9, number + 1)
            assert names == [*map(str, first), number - 20, *map(str, last)]
    assert values_of(job)["history"][10] == {"event": "omitted", "count": 25}


def test_a_job_that_simply_succeeds_pays_for_no_history() -> None:
    job = make_job()
    [claimed] = Job.objects.claim(worker="me")
    Job.objects.finish([Outcome(claimed, COMPLETE)])
    assert values_of(job)["history"] == []


def test_an_entry_of_a_job_that_never_ran_has_no_start() -> None:
    job = make_job()
    Job.objects.cancel(job)
    [entry] = values_of(job)["history"]
    assert (entry["claim"], entry["worker"], entry["started"]) == (0, "", None)
    assert "by" not in entry


def values_of(job: Job) -> dict[str, Any]:
    return Job.objects.filter(pk=job.pk).values().get()


def database_now() -> datetime:
    now = Job.objects.annotate(now=Now()).values_list("now", flat=True)[:1].get()
    assert isinstance(now, datetime)
    return now
