"""Workers behind PgBouncer in transaction mode: nothing needs a session, and wake-ups go past it."""

import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connection

from django_forgejobs import enqueue, enqueue_many
from django_forgejobs.models import Job
from tests.factories import in_seconds, make_job, make_schedule
from tests.processes.harness import Manage, Processes, current_database_url
from tests.sessions import session
from tests.waiting import wait_for

pytestmark = [pytest.mark.postgres_only, pytest.mark.django_db(transaction=True)]

#: Where Debian puts it; not on the PATH of everybody.
PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

CONFIG = """
[databases]
{NAME} = {server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
ignore_startup_parameters = extra_float_digits
"""


@pytest.fixture
def pooled(transactional_db: None, tmp_path: Path) -> Iterator[str]:
    """Return the test database's URL by way of a PgBouncer that has two connections to it."""
    if PGBOUNCER is None:
        pytest.skip("there is no pgbouncer: install Debian's package of that name")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = connection.settings_dict
    names = ("HOST", "PORT", "USER", "PASSWORD")
    server = " ".join(f"{name.lower()}='{given[name]}'" for name in names if given[name])
    place = tmp_path / "pgbouncer"
    place.mkdir()
    config = place / "pgbouncer.ini"
    config.write_text(CONFIG.format(NAME=given["NAME"], server=server, port=port))
    # It refuses to run as root; and a socket may be its owner's alone.
    owner = Path(given["HOST"]).owner() if given["HOST"].startswith("/") else "nobody"
    with Processes(place) as processes:
        pgbouncer = processes.run(PGBOUNCER, *(["-u", owner] if os.geteuid() == 0 else []), config)
        pgbouncer.wait_for_output("process up")
        yield f"postgresql://{given['USER']}@127.0.0.1:{port}/{given['NAME']}"


def listeners() -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE application_name LIKE '% listen' AND datname = current_database()"
        )
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize("careful", [False, True], ids=["as it is", "no cursors, server-side binding"])
def test_eight_workers_behind_two_connections_run_every_job_once(
    pooled: str, manage: Manage, tmp_path: Path, careful: bool
) -> None:
    effects = tmp_path / "effects"
    payload = {"path": str(effects)}
    lost = make_job(status="running", type="t.effect", lease=-1, payload=payload)
    schedule = make_schedule(cron="0 0 1 1 *", next_run_at=in_seconds(-1))  # and not again within the test
    direct = {"FORGEJOBS_TEST_APPS": "tests.jobsapp", "LISTEN_DATABASE_URL": current_database_url()}
    workers = manage(
        *("runworker", "--processes", 8, "--concurrency", 2, "--scheduler"),
        env=direct | ({"DISABLE_SERVER_SIDE_CURSORS": "yes"} if careful else {}),
        forgejobs={
            "LISTEN_DATABASE": "direct",
            "RECLAIM_INTERVAL": 0.5,
            "HEARTBEAT": 0.5,
            "SUSPECT_PATIENCE": 1,
        },
        database_url=pooled + ("?server_side_binding=true" if careful else ""),
    )
    with session("pooled", url=pooled, **({"server_side_binding": True} if careful else {})):
        ids = enqueue_many(({"type": "t.effect", "payload": payload} for _ in range(200)), db="pooled")
        ids += [enqueue("t.effect", payload, db="pooled") for _ in range(20)]
        enqueue("t.fail", db="pooled")
        assert len({enqueue("t.ok", idempotency_key="k", db="pooled") for _ in range(2)}) == 1
    # What was enqueued, what a dead worker had, and what the schedule's slot is.
    wanted = Counter({"done": 220 + 1 + 1 + 1, "dead": 1})
    wait_for(
        lambda: Counter(Job.objects.values_list("status", flat=True)) == wanted,
        message=lambda: workers.output,
    )
    assert Counter(effects.read_text().split()) == Counter(map(str, [lost.pk, *ids]))
    schedule.refresh_from_db()
    assert schedule.last_slot is not None
    wait_for(lambda: listeners() >= 8, message=lambda: f"{listeners()} listen, past PgBouncer")
    workers.terminate()
    assert workers.wait() == 0, workers.output
    for word in ("CRITICAL", "out of reach", "do not wake"):
        assert word not in workers.output


def test_without_a_direct_connection_a_worker_polls_and_says_so_once(pooled: str, manage: Manage) -> None:
    worker = manage(
        "runworker",
        env={"FORGEJOBS_TEST_APPS": "tests.jobsapp"},
        forgejobs={"POLL_INTERVAL": 0.1},
        database_url=pooled,
    )
    worker.wait_for_output("is reached through a pooler. Name an alias")
    for _ in range(2):
        id = enqueue("t.ok")
        wait_for(lambda: Job.objects.get(pk=id).status == "done")  # noqa: B023
    worker.terminate()
    assert worker.wait() == 0
    assert worker.output.count("do not wake this worker") == 1
