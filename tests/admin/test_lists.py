"""A list costs the same whatever the size of the table."""

import json
import re
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_forgejobs.admin import changelist
from django_forgejobs.models import ArchivedJob, Job
from tests.admin.conftest import STATES, job_in, listing
from tests.factories import in_seconds

WAYS = [
    ("job", {}),
    ("job", {"p": "2"}),
    ("job", {"q": "17"}),
    ("job", {"type": "rare"}),
    ("job", {"queue": "rare"}),
    *[("job", {"status": state}) for state in STATES],
    ("job", {"status": "dead", "type": "rare"}),
    ("job", {"status": "ready", "queue": "rare"}),
    ("deadletter", {}),
    ("deadletter", {"status": "dead"}),
    ("deadletter", {"type": "rare"}),
    ("archivedjob", {}),
    ("archivedjob", {"status": "dead", "type": "rare"}),
]

MOST_QUERIES = 9  # two of them are Django's, for the session and the user


def ask(client: Client, model: str, parameters: dict[str, str]) -> list[str]:
    """Open the list; return the statements."""
    with CaptureQueriesContext(connection) as asked:
        assert client.get(listing(model), parameters).status_code == 200
    return [query["sql"] for query in asked.captured_queries]


def fill(count: int) -> None:
    """Insert `count` rows, in every state in turn, with the type "rare" now and then."""
    cycle = list(STATES)
    for number in range(count):
        job_in(cycle[number % len(cycle)], type="rare" if number % 7 == 0 else "usual")


def shown_ids(response: Any) -> list[int]:
    """Return the ids of a list, in order."""
    return [row.pk for row in response.context["cl"].result_list]


def test_a_list_asks_a_fixed_number_of_cheap_questions(boss: Client) -> None:
    fill(16)
    for model, parameters in WAYS:  # some things are asked once in a process, as the content types
        ask(boss, model, parameters)
    few = [len(ask(boss, model, parameters)) for model, parameters in WAYS]
    fill(120)
    ArchivedJob.objects.bulk_create(
        ArchivedJob(**row) for row in Job.objects.exclude(finished_at=None).values()
    )

    for (model, parameters), before in zip(WAYS, few, strict=True):
        statements = ask(boss, model, parameters)
        assert len(statements) == before <= MOST_QUERIES, (model, parameters)
        for statement in statements:
            assert "COUNT(" not in statement or f"LIMIT {changelist.LISTED + 1})" in statement
            assert "DISTINCT" not in statement or "FROM lane" in statement
            for column in ("payload", "result", "history"):
                assert f'"{column}"' not in statement
            # The error is read in part.
            assert not re.search(r'(?<!LEFT\()(?<!SUBSTR\()"forgejobs_\w+"."last_error"', statement)


@pytest.mark.parametrize("model", ["job", "archivedjob"])
def test_a_list_ends_where_counting_ends_and_says_so(
    boss: Client, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(changelist, "LISTED", 150)
    jobs = [Job(type="x", status="done", attempts=1, finished_at=in_seconds(0)) for _ in range(160)]
    Job.objects.bulk_create(jobs)
    ArchivedJob.objects.bulk_create(ArchivedJob(**row) for row in Job.objects.values())

    response = boss.get(listing(model))

    assert response.context["cl"].result_count == 150
    assert response.context["cl"].paginator.num_pages == 2
    assert "There are more than 150" in response.content.decode()
    assert "Select all 150" not in response.content.decode()
    monkeypatch.setattr(changelist, "LISTED", 160)
    assert "There are more than" not in boss.get(listing(model)).content.decode()


def test_a_filter_without_an_index_looks_at_the_newest_rows_and_says_so(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelist, "SEARCHED", 3)
    for _ in range(2):
        job_in("done", type="rare", queue="rare")
    newest = [job_in("done", type="rare", queue="rare").pk, job_in("cancelled").pk, job_in("ready").pk]

    for parameters in ({"type": "rare"}, {"queue": "rare"}):
        response = boss.get(listing(), parameters)
        # The row at the end of the newest is still looked at.
        assert newest[0] in shown_ids(response)
        assert len(shown_ids(response)) == 2
        assert "looked at the newest 3 rows only" in response.content.decode()
    assert len(shown_ids(boss.get(listing()))) == 5
    assert "rows only" not in boss.get(listing(), {"type": "rare", "status": "running"}).content.decode()


def test_a_search_finds_what_a_filter_no_longer_looks_at(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelist, "SEARCHED", 1)
    old = job_in("done", type="rare")
    for _ in range(3):
        job_in("done")

    assert shown_ids(boss.get(listing(), {"type": "rare"})) == []
    assert shown_ids(boss.get(listing(), {"type": "rare", "q": str(old.pk)})) == [old.pk]


def test_a_filter_of_ended_jobs_looks_at_the_newest_ends_of_that_status(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelist, "SEARCHED", 2)
    dead = [job_in("dead", type="rare", finished_at=in_seconds(-ago)) for ago in (40, 30, 20, 10)]
    for _ in range(5):
        job_in("done")

    found = shown_ids(boss.get(listing(), {"status": "dead", "type": "rare"}))

    assert found == [job.pk for job in reversed(dead[1:])]


def test_the_list_of_dead_letters_is_cut_without_losing_a_newer_one(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelist, "LISTED", 3)
    for ago in (90, 80, 70, 60):
        job_in("failed", finished_at=in_seconds(-ago))
    for ago in (50, 40, 30, 20):
        job_in("dead", finished_at=in_seconds(-ago))
    expected = Job.objects.order_by("-finished_at").values_list("pk", flat=True)[:3]

    response = boss.get(listing("deadletter"))

    assert shown_ids(response)[:3] == list(expected)
    assert "There are more than 3" in response.content.decode()
    # What is sorted: the newest of each status, cut at the higher end of the two.
    assert response.context["cl"].queryset.count() == 4


def test_waiting_jobs_are_listed_lane_by_lane_in_the_order_of_their_index(boss: Client) -> None:
    third = job_in("ready", queue="b", run_at=in_seconds(-5))
    second = job_in("ready", queue="a", run_at=in_seconds(-5))
    first = job_in("ready", queue="a", run_at=in_seconds(-50))

    assert shown_ids(boss.get(listing(), {"status": "ready"})) == [first.pk, second.pk, third.pk]


@pytest.mark.postgres_only
def test_no_list_reads_the_table_from_end_to_end(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelist, "LISTED", 200)
    monkeypatch.setattr(changelist, "SEARCHED", 500)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO forgejobs_job (type, queue, status, attempts, max_attempts, run_at, finished_at)
            SELECT 'type.' || i % 9, 'queue.' || i % 3, status, CASE WHEN status = 'ready' THEN 0 ELSE 1 END,
                3, now() + (i - 15000) * interval '1 s',
                CASE WHEN status <> 'ready' THEN now() - (30000 - i) * interval '1 s' END
            FROM (
                SELECT i, CASE WHEN i < 8000 OR i % 50 = 0 THEN 'ready' WHEN i % 50 = 1 THEN 'failed'
                    WHEN i % 50 < 5 THEN 'dead' ELSE 'done' END AS status
                FROM generate_series(1, 30000) AS i
            ) AS row
            """
        )
        cursor.execute("ANALYZE forgejobs_job")
        for model, parameters in WAYS:
            if model == "archivedjob":
                continue
            for statement in ask(boss, model, parameters):
                if '"forgejobs_job"' not in statement:
                    continue
                cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}")
                plan = cursor.fetchone()[0][0]["Plan"]
                assert "Seq Scan" not in json.dumps(plan), f"{statement}\n{json.dumps(plan, indent=1)}"
