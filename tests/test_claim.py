"""The claim: the one door out of `ready`. Whom it takes, in which order, how many, and at what cost."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models.functions import Now

from django_forgejobs import enqueue_many, lanes, sql
from django_forgejobs.lanes import Suspects
from django_forgejobs.models import Job
from tests.factories import in_seconds, make_job
from tests.sessions import answer_lost, beside, gate, in_threads, isolation, session, statements

pytestmark = pytest.mark.django_db(transaction=True)


def claim(limit: int = 1, **options: Any) -> list[Job]:
    return Job.objects.claim(limit, worker=options.pop("worker", "me:1:1"), **options)


def ids(jobs: list[Job]) -> list[int]:
    return [job.pk for job in jobs]


# --- Whom it takes, and in which order -----------------------------------------------------------


def test_the_larger_priority_comes_first_and_ties_are_first_in_first_out() -> None:
    late = make_job(run_at=in_seconds(-5))
    low = make_job(priority=-100, run_at=in_seconds(-100))
    high = make_job(priority=100)
    early = make_job(run_at=in_seconds(-50))
    twins = [make_job(run_at=late.run_at) for _ in range(3)]
    assert ids(claim(9)) == [high.pk, early.pk, late.pk, *(twin.pk for twin in twins), low.pk]


def test_a_low_priority_waits_for_as_long_as_a_higher_one_is_due() -> None:
    low = make_job(priority=0, run_at=in_seconds(-3600))
    for _ in range(3):
        high = make_job(priority=100)
        assert ids(claim(1)) == [high.pk]
    assert ids(claim(1)) == [low.pk]


def test_queues_and_types_are_merged_in_claim_order_not_one_after_the_other() -> None:
    expected = []
    for number in range(12):
        queue, type_ = "ab"[number % 2], f"type.{number % 3}"
        expected.append(make_job(queue=queue, type=type_, run_at=in_seconds(-100 + number)).pk)
    taken = [*claim(5, queues=("a", "b")), *claim(5, queues=("b", "a")), *claim(5)]
    assert ids(taken) == expected


def test_only_due_rows_of_the_queues_and_types_asked_for_are_taken() -> None:
    make_job(run_at=in_seconds(3600))
    make_job(queue="other")
    make_job(type="other")
    for status in ("running", "done", "failed", "dead", "cancelled"):
        make_job(status=status, queue="mine", type="mine")
    mine = make_job(queue="mine", type="mine")
    assert ids(claim(9, queues=("mine",), types=("mine", "unheard.of"))) == [mine.pk]


@pytest.mark.parametrize("options", [{"limit": 0}, {"queues": ()}, {"types": ()}])
def test_a_claim_of_nothing_takes_nothing_and_asks_nobody(options: dict[str, Any]) -> None:
    make_job()
    assert statements(lambda: claim(**options)) == []
    assert Job.objects.get().status == "ready"


def test_a_claim_writes_what_the_matrix_says_and_a_token_of_its_own_for_each_row() -> None:
    first, second = make_job(attempts=1, claims=4, max_attempts=3), make_job()
    jobs = claim(2, worker="w:1:abc", lease=100)
    assert ids(jobs) == [first.pk, second.pk]
    for job, before in zip(jobs, (first, second), strict=True):
        row = Job.objects.annotate(left=in_seconds(100) - Now()).get(pk=job.pk)
        assert (row.status, row.locked_by) == ("running", "w:1:abc")
        assert (row.attempts, row.claims) == (before.attempts + 1, before.claims + 1)
        assert (row.run_at, row.history, row.last_error) == (before.run_at, [], before.last_error)
        assert row.claim_token == job.claim_token
        assert row.started_at is not None
        assert row.locked_until is not None
        assert abs(row.locked_until - row.started_at - timedelta(seconds=100)) < timedelta(seconds=0.01)
    assert jobs[0].claim_token != jobs[1].claim_token


# --- Suspects ------------------------------------------------------------------------------------


def test_a_suspect_is_claimed_by_itself_whatever_the_limit() -> None:
    suspects = [make_job(lease_expirations=1), make_job(lease_expirations=2)]
    fresh = [make_job(priority=9), make_job()]
    assert ids(claim(9, suspects=Suspects.NEVER)) == ids(fresh)
    assert ids(claim(9, suspects=Suspects.LAST)) == [suspects[0].pk]
    more = make_job(priority=100)
    assert ids(claim(9, suspects=Suspects.FIRST)) == [suspects[1].pk]
    assert ids(claim(9, suspects=Suspects.FIRST)) == [more.pk]


def test_a_claim_for_suspects_only_takes_one_and_never_anything_else() -> None:
    make_job(priority=100)
    suspects = [make_job(lease_expirations=1), make_job(lease_expirations=2)]
    assert [ids(claim(9, suspects=Suspects.ONLY)) for _ in range(3)] == [
        [suspects[0].pk],
        [suspects[1].pk],
        [],
    ]


def test_a_suspect_of_another_queue_or_type_or_in_the_future_is_left_alone() -> None:
    make_job(lease_expirations=1, queue="other")
    make_job(lease_expirations=1, type="other")
    make_job(lease_expirations=1, run_at=in_seconds(60))
    options = {"queues": ("default",), "types": ("test.job",)}
    assert claim(9, suspects=Suspects.FIRST, **options) == []


# --- Never more than asked, never twice ----------------------------------------------------------

ODD_PLANS = {
    "no joins worth having": ["enable_hashjoin=off", "enable_material=off"],
    # By these PostgreSQL 18 comes to the plan that the test below tells of.
    "inner sides read again": [
        "enable_hashjoin=off",
        "enable_material=off",
        "enable_hashagg=off",
        "enable_sort=off",
    ],
    "no indexes": ["enable_indexscan=off", "enable_bitmapscan=off", "enable_indexonlyscan=off"],
    "generic plans": ["plan_cache_mode=force_generic_plan"],
}


@pytest.mark.postgres_only
@pytest.mark.parametrize("plan", ODD_PLANS)
def test_eight_claimers_never_take_more_than_asked_whatever_the_plan(plan: str) -> None:
    """`id IN (SELECT … LIMIT 1 FOR UPDATE SKIP LOCKED)` took 2,000 rows for a limit of one here."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE forgejobs_job SET (autovacuum_enabled = off)")
        cursor.execute("ANALYZE forgejobs_job")  # empty: the planner will know nothing of the rows
    enqueue_many({"type": f"t{n % 3}", "queue": "ab"[n % 2]} for n in range(400))
    options: dict[str, Any] = {"options": " ".join(f"-c {setting}" for setting in ODD_PLANS[plan])}
    if plan == "generic plans":
        options |= {"prepare_threshold": 0, "server_side_binding": True}
    with session("odd", **options):

        def work(index: int) -> Counter[int]:
            taken: Counter[int] = Counter()
            limit = 1 + index % 3
            for turn in range(12):
                jobs = claim(limit, worker=f"w:{index}:{turn}", queues=("a", "b"), db="odd")
                changed = Job.objects.filter(locked_by=f"w:{index}:{turn}").count()
                assert len(jobs) == changed <= limit
                taken.update(ids(jobs))
            return taken

        total = sum(in_threads(8, work), Counter())
    assert max(total.values()) == 1
    assert total.keys() == set(Job.objects.filter(status="running").values_list("pk", flat=True))
    assert len(total) == sum(12 * (1 + index % 3) for index in range(8))


@pytest.mark.postgres_only
@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_a_lost_race_means_again_and_not_empty(level: str) -> None:
    """At the stricter levels the row that a rival took meanwhile raises 40001, which is no answer."""
    first, second = make_job(run_at=in_seconds(-9)), make_job()
    with (
        session("strict", options=isolation(level), application_name="late"),
        gate("late") as closed,
        beside(lambda: claim(1, db="strict")) as late,
    ):
        closed.wait()
        assert ids(claim(1)) == [first.pk]
        closed.open()
        assert ids(late.result(timeout=10)) == [second.pk]


@pytest.mark.postgres_only
def test_a_row_in_somebodys_open_transaction_is_passed_over_and_the_others_are_taken() -> None:
    locked, free = make_job(run_at=in_seconds(-9)), make_job()
    with session() as other, transaction.atomic(using="other"), other.cursor() as cursor:
        cursor.execute("SELECT 1 FROM forgejobs_job WHERE id = %s FOR UPDATE", [locked.pk])
        assert ids(claim(9)) == [free.pk]
    assert ids(claim(9)) == [locked.pk]


@pytest.mark.postgres_only
def test_a_job_that_an_open_transaction_refers_to_by_foreign_key_can_be_claimed() -> None:
    job = make_job()
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE note (job_id bigint REFERENCES forgejobs_job (id))")
    try:
        with session() as other, transaction.atomic(using="other"), other.cursor() as cursor:
            cursor.execute("INSERT INTO note VALUES (%s)", [job.pk])
            assert ids(claim()) == [job.pk]
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE note")


def test_eight_threads_claim_each_of_their_jobs_once() -> None:
    enqueue_many({"type": f"t{n % 2}"} for n in range(120))

    def work(index: int) -> list[int]:
        mine: list[int] = []
        while jobs := claim(4, worker=f"w:{index}"):
            mine += ids(jobs)
        return mine

    taken = [pk for mine in in_threads(8, work) for pk in mine]
    assert len(taken) == len(set(taken))
    # A claimer may stop early when the rest is just being claimed by others; then the rest is theirs.
    assert len(taken) == 120


# --- The answer that never came ------------------------------------------------------------------


def test_a_claim_whose_answer_was_lost_is_found_again_by_who_locked_it() -> None:
    job = make_job()
    make_job(status="running", locked_by="me:1:2")
    with answer_lost("UPDATE forgejobs_job"), pytest.raises(OperationalError):
        claim(worker="me:1:1")
    assert ids(Job.objects.held_by("me:1:1")) == [job.pk]


# --- What a claim costs on a big table -----------------------------------------------------------


def fill(count: int, **values: object) -> None:
    """Insert many rows by one statement; values are SQL, in which `n` counts from 1."""
    columns = {"type": "'test.job'", **values}
    with connection.cursor() as cursor:
        cursor.execute(
            f"WITH RECURSIVE series(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM series WHERE n < {count}) "
            f"INSERT INTO forgejobs_job ({', '.join(columns)}) "
            f"SELECT {', '.join(str(value) for value in columns.values())} FROM series"
        )


def in_sql(*, seconds: int) -> str:
    if connection.vendor == "postgresql":
        return f"now() + interval '{seconds} s'"
    return f"strftime('%Y-%m-%d %H:%M:%f', 'now', '{seconds} seconds')"


def analyze() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE forgejobs_job")


def compiled(limit: int, *, db: str = "default", **options: Any) -> sql.Statement:
    known: dict[str, Any] = {"queues": None, "types": None, "suspects": Suspects.FIRST, **options}
    return lanes.claim(db, limit, worker="w", lease=900.0, **known)


def explained(limit: int, *, db: str = "default", **options: Any) -> dict[str, Any]:
    """Return how PostgreSQL claims, executed and rolled back."""
    statement = compiled(limit, db=db, **options).whole
    with transaction.atomic(using=db), connections[db].cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement.text}", statement.params)
        answer = cursor.fetchone()[0]
        transaction.set_rollback(True, using=db)
    plan: dict[str, Any] = (json.loads(answer) if isinstance(answer, str) else answer)[0]["Plan"]
    return plan


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def cost(limit: int = 1, **options: Any) -> int:
    """Return what a claim reads: pages on PostgreSQL, hundreds of steps of its machine on SQLite."""
    if connection.vendor == "postgresql":
        plan = explained(limit, **options)
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
    steps = []
    connection.ensure_connection()
    connection.connection.set_progress_handler(lambda: steps.append(1), 100)
    try:
        with transaction.atomic():
            sql.run("default", compiled(limit, **options))
            transaction.set_rollback(True)
    finally:
        connection.connection.set_progress_handler(None, 0)
    return len(steps)


def test_a_claim_costs_no_more_when_more_is_ready() -> None:
    fill(2_000, queue="CASE n % 2 WHEN 0 THEN 'a' ELSE 'b' END", type="'t' || (n % 3)")
    options = {"queues": ("a", "b"), "types": ("t0", "t1")}
    before = cost(5, **options)
    fill(10_000, queue="CASE n % 2 WHEN 0 THEN 'a' ELSE 'b' END", type="'t' || (n % 3)")
    assert cost(5, **options) <= 1.5 * before
    analyze()
    assert cost(5, **options) <= 1.5 * before
    assert cost(5) <= 2.5 * before


def test_a_claim_costs_no_more_with_a_long_history_and_many_jobs_in_the_future() -> None:
    fill(100)
    past, future = in_sql(seconds=0), in_sql(seconds=3600)
    fill(2_000, status="'done'", finished_at=past)
    before = cost(10)
    fill(20_000, status="'done'", finished_at=past)
    fill(10_000, run_at=future)
    assert cost(10) <= 1.5 * before  # the statistics know nothing of them yet
    analyze()
    assert cost(10) <= 1.5 * before


def test_a_hundred_thousand_rows_that_nobody_serves_at_the_head_cost_a_claim_nothing() -> None:
    served = make_job(type="served")
    fill(200, type="'unserved.' || (n % 3)", priority="n % 3", run_at=in_sql(seconds=-3600))
    before = cost(types=("served",), queues=("default",))
    fill(20_000, type="'unserved.' || (n % 3)", priority="n % 3", run_at=in_sql(seconds=-3600))
    assert cost(types=("served",), queues=("default",)) <= 1.5 * before
    analyze()
    assert cost(types=("served",), queues=("default",)) <= 1.5 * before
    assert ids(claim(types=("served",))) == [served.pk]


@pytest.mark.postgres_only
@pytest.mark.parametrize("generic", [False, True], ids=["custom plan", "generic plan"])
def test_a_claim_neither_scans_nor_sorts_all_that_is_ready(generic: bool) -> None:
    fill(20_000, queue="CASE n % 2 WHEN 0 THEN 'a' ELSE 'b' END", run_at="now() - n * interval '1 ms'")
    analyze()
    options: dict[str, Any] = {"options": "-c plan_cache_mode=force_generic_plan"} if generic else {}
    with session("planner", server_side_binding=generic, **options):
        plan = explained(10, queues=("a", "b"), types=("test.job",), db="planner")
    touching = [node for node in nodes(plan) if node.get("Relation Name") == "forgejobs_job"]
    assert {node["Node Type"] for node in touching} <= {"Index Scan", "Index Only Scan", "ModifyTable"}
    assert {"forgejobs_job_lane", "forgejobs_job_suspect"} < {node.get("Index Name") for node in touching}
    assert max(node["Actual Rows"] for node in nodes(plan)) <= 20  # ten of each queue
