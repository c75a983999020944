"""The claim cursor: a drain does not walk over what it has claimed, and nothing stays behind it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection, connections, transaction

from django_forgejobs import cursor, enqueue, lanes
from django_forgejobs.cursor import ClaimCursor
from django_forgejobs.lanes import LaneEnd, Suspects
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import COMPLETE
from tests.factories import in_seconds, make_job
from tests.sessions import session
from tests.test_worker import at_work
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def end_of(job: Job) -> LaneEnd:
    return LaneEnd(job.queue, job.type, job.priority, job.run_at, job.pk)


def claim(limit: int = 10, **options: Any) -> list[int]:
    return [job.pk for job in Job.objects.claim(limit, worker="w", **options)]


def test_a_claim_goes_on_after_the_end_of_each_lane_and_looks_at_no_other() -> None:
    first, second, third = (make_job(queue="a", run_at=in_seconds(s - 10)) for s in range(3))
    other = make_job(queue="b")
    make_job(queue="c")
    found = claim(after=[end_of(first), end_of(other)])
    assert found == [second.pk, third.pk]


@pytest.mark.postgres_only  # on SQLite every claim sweeps, and a time has several spellings there
def test_jobs_of_one_instant_are_told_apart_by_their_ids() -> None:
    with transaction.atomic():
        jobs = [make_job(run_at=in_seconds(-5)) for _ in range(3)]
    Job.objects.update(run_at=jobs[0].run_at)
    jobs[1].refresh_from_db()
    assert claim(after=[end_of(jobs[1])]) == [jobs[2].pk]


def test_a_claim_that_goes_on_leaves_the_future_alone_and_keeps_the_order_of_priorities() -> None:
    low, high = make_job(priority=0), make_job(priority=5)
    later = [make_job(priority=priority) for priority in (0, 5, 0, 5)]
    make_job(priority=5, run_at=in_seconds(60))
    found = claim(after=[end_of(low), end_of(high)])
    assert found == [later[1].pk, later[3].pk, later[0].pk, later[2].pk]


# --- When it sweeps ------------------------------------------------------------------------------


@pytest.fixture
def sweeping() -> ClaimCursor:
    """A cursor on a database where rivals work side by side."""
    found = ClaimCursor("default")
    found._sweeps_only = False
    return found


def some(count: int, **values: Any) -> Any:
    known = {"queue": "q", "type": "t", "priority": 0, "run_at": None, "id": 1, **values}
    return [SimpleNamespace(**known) for _ in range(count)]


def test_what_a_sweep_cost_beyond_the_usual_decides_when_the_next_one_comes(sweeping: ClaimCursor) -> None:
    assert sweeping.after() == ()
    sweeping.claimed(some(2), wanted=2, swept=True, seconds=0.05)
    assert sweeping.sweeps_at == pytest.approx(time.monotonic() + 1.0, abs=0.5)
    assert [end.queue for end in sweeping.after()] == ["q"]
    sweeping.claimed(some(2, queue="r"), wanted=2, swept=False, seconds=10.0)
    assert [end.queue for end in sweeping.after()] == ["q", "r"]
    sweeping.claimed(some(2), wanted=2, swept=True, seconds=10.0)
    assert sweeping.after() == (), "a sweep that costs nothing more than other claims may come at any time"
    sweeping.claimed(some(2), wanted=2, swept=True, seconds=100.0)
    assert sweeping.sweeps_at <= time.monotonic() + 2.0, "what comes late would be found too late"


def test_lanes_that_run_out_are_followed_by_a_sweep_if_there_was_more(sweeping: ClaimCursor) -> None:
    sweeping.claimed(some(2), wanted=2, swept=True, seconds=1.0)
    sweeping.claimed(some(1), wanted=2, swept=False, seconds=0.0)
    assert sweeping.after() == (), "what lies beyond these lanes would have waited ten minutes"
    sweeping.claimed(some(1), wanted=2, swept=True, seconds=1.0)
    sweeping.claimed([], wanted=2, swept=False, seconds=0.0)
    assert sweeping.after() != (), "a sweep that found all there was is not repeated at once"


def test_more_lanes_than_can_be_handed_over_are_swept(sweeping: ClaimCursor) -> None:
    found = [job for n in range(cursor.MOST_LANES + 1) for job in some(1, queue=f"q{n}")]
    sweeping.claimed(found, wanted=len(found), swept=True, seconds=1.0)
    assert sweeping.after() == ()


# --- Under an old snapshot -----------------------------------------------------------------------


@contextmanager
def old_snapshot() -> Iterator[None]:
    """Hold a snapshot that sees the queue as it is now, as a backup does."""
    with session("backup") as backup, backup.cursor() as at:
        at.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        at.execute("SELECT COUNT(*) FROM forgejobs_job")
        yield
        at.execute("ROLLBACK")


def pages(**options: Any) -> int:
    """Return how many pages a claim of ten rows reads."""
    defaults: Any = {"queues": None, "types": None, "suspects": Suspects.NEVER}
    statement = lanes.claim("default", 10, worker="w", lease=900, **defaults | options).whole
    with transaction.atomic(), connections["default"].cursor() as at:
        at.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement.text}", statement.params)
        (answer,) = at.fetchone()
        transaction.set_rollback(True)
    plan = (json.loads(answer) if isinstance(answer, str) else answer)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.postgres_only
def test_a_claim_that_goes_on_does_not_walk_over_what_was_claimed_since_an_old_snapshot() -> None:
    with connection.cursor() as at:
        at.execute("INSERT INTO forgejobs_job (type) SELECT 't' FROM generate_series(1, 9000)")
    with old_snapshot():
        fresh = pages()
        done = Job.objects.claim(8000, worker="w")
        Job.objects.finish([Outcome(job, COMPLETE) for job in done])
        assert pages(after=[end_of(done[-1])]) <= 1.5 * fresh
        assert pages() > 2 * fresh, "nothing dead is in the way, so this test shows nothing"


@pytest.mark.postgres_only
@pytest.mark.usefixtures("slow_sweeps")
def test_what_comes_behind_the_cursor_is_found_all_the_same() -> None:
    """Late commits, retries and what was requeued, while every sweep is dear."""
    for _ in range(30):
        enqueue("t")
    ran: list[int] = []
    with at_work({"t": lambda payload, context: ran.append(context.job_id)}):
        wait_for(lambda: len(ran) == 30)
        late = make_job(type="t", run_at=in_seconds(-3600))
        other = make_job(type="t", queue="elsewhere", priority=-5)
        wait_for(lambda: {late.pk, other.pk} <= set(ran), message="a job behind the cursor was never found")


@pytest.fixture
def slow_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sweep come only once a second, as if it took a tenth of that."""
    monkeypatch.setattr(cursor, "PAUSE", 0)
    claimed = ClaimCursor.claimed

    def dear(self: ClaimCursor, jobs: Any, *, wanted: int, swept: bool, seconds: float) -> None:
        claimed(self, jobs, wanted=wanted, swept=swept, seconds=seconds)
        if swept:
            self.sweeps_at = time.monotonic() + 1.0

    monkeypatch.setattr(ClaimCursor, "claimed", dear)
