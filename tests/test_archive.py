"""The archive: finished jobs leave in small batches, dead letters stay until somebody deals with them."""

from typing import Any

import pytest
from django.db import connection, transaction

from django_forgejobs import archive
from django_forgejobs.models import ArchivedJob, Job
from tests.factories import in_seconds, make_job
from tests.sessions import session

pytestmark = pytest.mark.django_db(transaction=True)

WEEK = 7 * 86400


def ended(status: str = "done", *, ago: float = WEEK + 60, **fields: Any) -> Job:
    return make_job(status=status, finished_at=in_seconds(-ago), **fields)


def run(**options: Any) -> list[int]:
    return list(archive.batches("default", **options))


def test_by_default_what_ended_well_goes_after_a_week_and_dead_letters_never() -> None:
    gone = [ended("done"), ended("cancelled")]
    kept = [
        ended("failed"),
        ended("dead"),
        ended("done", ago=WEEK - 60),
        make_job(),
        make_job(status="running"),
    ]
    run()
    assert set(Job.objects.all()) == set(kept)
    assert {row.pk for row in ArchivedJob.objects.all()} == {job.pk for job in gone}


@pytest.mark.parametrize("status", ["done", "cancelled", "failed", "dead"])
def test_every_status_that_ends_a_job_can_have_an_age(status: str, settings: Any) -> None:
    settings.FORGEJOBS = {"RETENTION": {"done": None, "cancelled": None, status: 60}}
    old, young = ended(status, ago=120), ended(status, ago=1)
    assert archive.due("default")[status] == 1
    run()
    assert list(Job.objects.all()) == [young]
    assert [row.pk for row in ArchivedJob.objects.all()] == [old.pk]


def test_an_archived_job_keeps_all_that_it_was() -> None:
    job = ended(payload={"a": [1]}, result={"b": 2}, history=[{"event": "retry"}], idempotency_key="k")
    before = Job.objects.values().get(pk=job.pk)
    run()
    after: dict[str, Any] = {**ArchivedJob.objects.values().get(pk=job.pk)}
    assert after.pop("archived_at") is not None
    assert after == before


def test_batches_are_small_and_each_is_committed_so_that_a_killed_run_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(archive, "BATCH", 4)
    for _ in range(10):
        ended()
    batches: Any = archive.batches("default")
    assert next(batches) == 4
    assert not connection.in_atomic_block
    batches.close()  # as if killed here
    assert (Job.objects.count(), ArchivedJob.objects.count()) == (6, 4)
    assert run(delete=True) == [4, 2]
    assert (Job.objects.count(), ArchivedJob.objects.count()) == (0, 4)


@pytest.mark.postgres_only
def test_a_row_in_somebodys_open_transaction_is_left_for_the_next_run() -> None:
    held, free = ended(), ended()
    with session() as other, transaction.atomic(using="other"), other.cursor() as cursor:
        cursor.execute("SELECT 1 FROM forgejobs_job WHERE id = %s FOR UPDATE", [held.pk])
        run()
        assert [row.pk for row in ArchivedJob.objects.all()] == [free.pk]
    run()
    assert not Job.objects.exists()


def test_a_row_that_another_table_references_stays_and_spoils_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    referenced, free = ended(), ended()
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE note (job_id bigint REFERENCES forgejobs_job (id))")
        cursor.execute("INSERT INTO note VALUES (%s)", [referenced.pk])
    try:
        run()
        assert list(Job.objects.all()) == [referenced]
        assert [row.pk for row in ArchivedJob.objects.all()] == [free.pk]
        assert f"Job {referenced.pk} stays" in caplog.text
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE note")


@pytest.mark.postgres_only
def test_the_look_for_what_may_go_reads_an_index_and_no_ready_row() -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO forgejobs_job (type) SELECT 't' FROM generate_series(1, 20000)")
        cursor.execute("ANALYZE forgejobs_job")
    plan = Job.objects.ended_since("done", 60)[:500].explain(analyze=True)
    assert "forgejobs_job_ended" in plan
    assert "Seq Scan" not in plan
