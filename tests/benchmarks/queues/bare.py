"""No queue: a loop in psycopg that sends the statements of our worker and runs no handlers.

What a worker in Python could reach if threads, leases and the care between jobs cost nothing. The SQL is
taken from the package, so that it changes with it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any, NamedTuple

from tests.benchmarks.effects import effect
from tests.benchmarks.queues import PYTHON, ours

QUEUE = replace(
    ours.QUEUE,
    name="bare psycopg loop",
    module="bare",
    worker=lambda load: (*PYTHON, "tests.benchmarks.queues.bare"),
    settings="finish and claim in one statement, no handlers",
)

prepare, enqueue = ours.prepare, ours.enqueue


class Sql(NamedTuple):
    """What a busy worker sends. The first of ``finish_params`` is where the ended jobs go, as JSON."""

    finish: str
    claim: str
    finish_params: tuple[Any, ...]
    claim_params: tuple[Any, ...]


def statements(batch: int) -> Sql:
    """Return what our worker sends to finish and claim ``batch`` jobs at once. Django must be set up."""
    from django_forgejobs import lanes, registry, sql
    from django_forgejobs.states import COMPLETE

    finish = sql.finishing("default", COMPLETE, [{"id": 1, "claim_token": _AnyToken()}])
    claim = lanes.claim(
        "default",
        batch,
        queues=None,
        types=tuple(sorted(registry.definitions(None))),
        suspects=lanes.Suspects.NEVER,
        worker=f"bare-{batch}",
        lease=900.0,
    )
    return Sql(
        finish.whole.text,
        claim.whole.text,
        ("[]", *finish.whole.params[1:]),
        claim.whole.params,
    )


class _AnyToken:
    hex = ""

    def __str__(self) -> str:
        return ""


def work(batch: int) -> None:
    """Finish and claim until killed."""
    import django
    import psycopg

    django.setup()
    sql = statements(batch)
    text = (
        f"WITH finished(id) AS ({sql.finish}), claimed AS ({sql.claim}) "
        "SELECT id, claim_token, payload FROM claimed UNION ALL SELECT id, NULL, NULL FROM finished"
    )
    rest = (*sql.finish_params[1:], *sql.claim_params)
    connection = psycopg.connect(autocommit=True)
    # What another's claim has locked for a moment is not finished: it is tried again.
    held: dict[int, str] = {}
    with connection.cursor() as cursor:
        while True:
            done = json.dumps([{"id": job, "claim_token": token} for job, token in held.items()])
            cursor.execute(text, (done, *rest), prepare=True)
            for job, token, number in cursor.fetchall():
                if token is None:
                    del held[job]
                else:
                    held[job] = str(token)
                    effect(number)


if __name__ == "__main__":
    work(int(sys.argv[1]))
