"""A row that only plain SQL can make must not cost its neighbours anything."""

import pytest
from django.db import connection

from django_forgejobs import drain, enqueue, get_job
from django_forgejobs.fields import Unreadable

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("payload", ['{"n": ' + "9" * 5000 + "}", "[" * 990 + "]" * 990])
def test_a_payload_that_python_cannot_read_fails_its_own_job_only(payload: str) -> None:
    before = enqueue("t.ok")
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO forgejobs_job (type, payload) VALUES ('t.ok', %s) RETURNING id", [payload]
        )
        bad = cursor.fetchone()[0]
    after = enqueue("t.ok")

    ran: list[object] = []
    assert drain({"t.ok": ran.append}) == 3

    statuses = {pk: job.status for pk in (before, bad, after) if (job := get_job(pk))}
    row = get_job(bad)
    assert row is not None
    if statuses[bad] == "done":  # this Python reads it: then it was handed over as it is
        assert not isinstance(row.payload, Unreadable)
    else:
        assert statuses[bad] == "failed"
        assert "payload cannot be read" in row.last_error
    assert statuses[before] == statuses[after] == "done"
