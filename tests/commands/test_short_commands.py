"""The commands that do one thing and end: what they do, print and refuse."""

import io
import json
import logging
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.core.management import CommandError, call_command, load_command_class
from django.db import connection

from django_forgejobs import registry, tally
from django_forgejobs.checks import COMMANDS
from django_forgejobs.management.stopping import STOP_SIGNALS
from django_forgejobs.models import AnnouncedType, ArchivedJob, Job, Tally
from testproject.postgres import EmbeddedServer
from tests.factories import in_seconds, make_job
from tests.processes.harness import Manage

pytestmark = pytest.mark.django_db

DAYS = timedelta(days=1).total_seconds()


def run(*arguments: object, **options: Any) -> str:
    """Call a command in this process and return what it printed."""
    out = io.StringIO()
    call_command(*map(str, arguments), stdout=out, **options)
    return out.getvalue()


def refused(*arguments: object) -> tuple[int, str]:
    """Call a command that must refuse; return the exit code it would have, and what it says."""
    with pytest.raises(CommandError) as caught:
        run(*arguments)
    return caught.value.returncode, str(caught.value)


def statuses() -> list[str]:
    return list(Job.objects.order_by("pk").values_list("status", flat=True))


# --- All of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*COMMANDS.values(), "forgejobs"])
def test_help_shows_examples_and_exit_codes(name: str) -> None:
    text = load_command_class("django_forgejobs", name).create_parser("manage.py", name).format_help()
    if name == "forgejobs":
        assert [line.split()[0] for line in text.partition("commands:\n")[2].splitlines()] == [*COMMANDS]
    else:
        assert f"examples:\n  manage.py {name}" in text
        assert "4 migrations missing" in text


def test_the_umbrella_runs_the_same_code_with_the_same_options() -> None:
    job = make_job(status="dead")
    assert run("forgejobs", "requeue", job.pk, "--dry-run") == "1 job would be requeued.\n"
    assert json.loads(run("forgejobs", "status", "--json")) == json.loads(run("jobs_status", "--json"))


def test_the_umbrella_takes_verbosity_before_and_after_the_name() -> None:
    assert run("forgejobs", "reclaim", "-v", 0) == ""
    assert run("forgejobs", "reclaim", verbosity=0) == ""


@pytest.mark.django_db(transaction=True)
def test_a_worker_in_somebody_elses_process_gives_back_what_it_took(settings: Any) -> None:
    settings.DEBUG = True
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    connection.ensure_connection()
    session, handlers = connection.connection, list(logging.getLogger("django_forgejobs").handlers)
    assert "no jobs." in run("runworker", "--burst")
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert connection.connection is session
    assert logging.getLogger("django_forgejobs").handlers == handlers
    assert not [one for one in threading.enumerate() if one.name.startswith("forgejobs")]


@pytest.mark.parametrize("setting", [{"LEASE": -1}, {"LEASES": 1}])
def test_no_command_starts_with_wrong_settings(settings: Any, setting: dict[str, int]) -> None:
    settings.FORGEJOBS = setting
    for name, arguments in {"reclaim_jobs": (), "jobs_status": (), "explain_job": (1,)}.items():
        code, text = refused(name, *arguments)
        assert code == 2
        assert f"FORGEJOBS['{next(iter(setting))}']" in text


def test_no_command_starts_without_time_zones(settings: Any) -> None:
    settings.USE_TZ = False
    code, text = refused("reclaim_jobs")
    assert code == 2
    assert "Set USE_TZ = True" in text


def test_a_worker_without_any_job_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_definitions", {})
    code, text = refused("runworker", "--burst")
    assert code == 2
    assert '@job("app.name") in the jobs.py' in text


# --- reclaim_jobs --------------------------------------------------------------------------------


def test_reclaim_says_when_it_fails_jobs_whose_type_nobody_serves(settings: Any) -> None:
    """Not while all workers are down: their silence says nothing about a type."""
    settings.FORGEJOBS = {"UNKNOWN_TYPE_GRACE": 60}
    words = "whose type no worker has announced for 60 s while others announced theirs."
    make_job(type="unheard.of", run_at=in_seconds(-120))
    assert f" 0 failed {words}" in run("reclaim_jobs")
    AnnouncedType.objects.create(type="known", since=in_seconds(-90), seen_at=in_seconds(0))
    assert f" 1 failed {words}" in run("reclaim_jobs")
    text = load_command_class("django_forgejobs", "reclaim_jobs").help
    assert "no worker has announced for FORGEJOBS['UNKNOWN_TYPE_GRACE'], but only while workers have" in text


def test_reclaim_puts_back_buries_and_says_so() -> None:
    tally._counts.clear()  # what other tests of this process have left
    make_job(status="running", lease=-1)
    make_job(status="running", lease=-1, lease_expirations=2)
    make_job(status="running", lease=60)
    text = run("reclaim_jobs")
    assert text.startswith("1 job put back, 1 buried, 0 failed whose type no worker has announced for 900 s ")
    assert statuses() == ["ready", "dead", "running"]
    assert Tally.objects.get(event="lease_expired").count == 2


def test_a_quiet_reclaim_prints_nothing() -> None:
    make_job(status="running", lease=-1)
    assert run("reclaim_jobs", verbosity=0) == ""
    assert statuses() == ["ready"]


@pytest.mark.postgres_only
@pytest.mark.django_db(transaction=True)
def test_reclaim_that_had_to_wait_for_the_database_lets_live_workers_renew_first(
    manage: Manage, own_server: Callable[..., EmbeddedServer]
) -> None:
    server = own_server()
    options = {"database_url": server.url, "forgejobs": {"LEASE": 3, "HEARTBEAT": 1}}
    assert manage("migrate", "-v", 0, **options).wait() == 0
    with psycopg.connect(server.url, autocommit=True) as session:
        session.execute(
            "INSERT INTO forgejobs_job (type, status, attempts, claim_token, locked_until) "
            "VALUES ('x', 'running', 1, gen_random_uuid(), now() - interval '1 minute')"
        )
    server.stop()
    reclaim = manage("reclaim_jobs", **options)
    reclaim.wait_for_output("cannot be reached")
    server.start()
    reclaim.wait_for_output("live workers get 1 s to renew their leases first")
    with psycopg.connect(server.url, autocommit=True) as session:
        session.execute("UPDATE forgejobs_job SET locked_until = now() + interval '1 minute'")
    assert reclaim.wait() == 0
    assert "0 jobs put back, 0 buried" in reclaim.output


# --- requeue_jobs --------------------------------------------------------------------------------


def test_requeue_takes_what_the_filters_find_oldest_first() -> None:
    rows: tuple[dict[str, Any], ...] = (
        {"status": "dead", "type": "a"},
        {"status": "failed", "type": "a", "queue": "mail"},
        {"status": "cancelled", "type": "a"},
        {"status": "dead", "type": "b"},
        {"status": "done", "type": "a"},
    )
    for fields in rows:
        make_job(**fields)
    assert run("requeue_jobs", "--type", "a", "--dry-run") == "2 jobs would be requeued.\n"
    assert statuses() == ["dead", "failed", "cancelled", "dead", "done"]
    assert run("requeue_jobs", "--type", "a", "--limit", 1) == "1 of 1 job requeued.\n"
    assert statuses() == ["ready", "failed", "cancelled", "dead", "done"]
    run("requeue_jobs", "--queue", "mail", "--by", "Ann")
    run("requeue_jobs", "--status", "cancelled")
    run("requeue_jobs", "--all")
    assert statuses() == ["ready", "ready", "ready", "ready", "done"]
    by = Job.objects.get(queue="mail").history[-1]["by"]
    assert by == "manage.py requeue_jobs, Ann"


def test_requeue_by_id_says_which_could_not_be() -> None:
    dead, ready = make_job(status="dead"), make_job()
    text = run("requeue_jobs", dead.pk, ready.pk)
    assert f"Job {ready.pk} is ready: only failed, dead and cancelled ones can be requeued.\n" in text
    assert "1 of 2 jobs requeued." in text


def test_requeue_refuses_unknown_ids_and_everything_at_once() -> None:
    dead = make_job(status="dead")
    for arguments in ((dead.pk, 999_999), (), ("--limit", 5), (dead.pk, "--all")):
        code, _ = refused("requeue_jobs", *arguments)
        assert code == 2
    assert statuses() == ["dead"]


# --- archive_jobs --------------------------------------------------------------------------------


def test_archive_moves_what_retention_lets_go() -> None:
    old = make_job(status="done", finished_at=in_seconds(-8 * DAYS))
    make_job(status="done", finished_at=in_seconds(-6 * DAYS))
    make_job(status="dead", finished_at=in_seconds(-800 * DAYS))
    assert "1 done job is due." in run("archive_jobs", "--dry-run")
    assert len(statuses()) == 3
    assert run("archive_jobs") == "1 job archived.\n"
    assert statuses() == ["done", "dead"]
    assert ArchivedJob.objects.get().pk == old.pk
    assert run("archive_jobs") == "0 jobs archived.\n"


def test_archive_can_delete_instead() -> None:
    make_job(status="cancelled", finished_at=in_seconds(-8 * DAYS))
    assert run("archive_jobs", "--delete") == "1 job deleted.\n"
    assert (statuses(), ArchivedJob.objects.count()) == ([], 0)


# --- jobs_status, explain_job --------------------------------------------------------------------


def test_status_counts_by_queue_and_shows_the_measures() -> None:
    make_job(run_at=in_seconds(-90))
    make_job(queue="mail", status="running", type="email.send")
    make_job(queue="mail", status="dead")
    lines = [line.split() for line in run("jobs_status").splitlines()]
    assert lines[0] == ["queue", "ready", "running", "done", "failed", "dead", "cancelled"]
    assert lines[1:3] == [["default", "1", *"00000"], ["mail", "0", "1", "0", "0", "1", "0"]]
    text = run("jobs_status")
    assert "oldest ready job   9" in text
    assert "running by type    email.send: 1" in text
    assert "dead letters       1" in text


def test_status_as_json_is_one_object() -> None:
    make_job(status="dead", attempts=3)
    answer = json.loads(run("jobs_status", "--json"))
    assert answer["counts"] == {"default": {"dead": 1}}
    assert (answer["dead_letters"], answer["attempts"]) == (1, {"3": 1})
    assert answer["oldest_ready_seconds"] is None


def test_explain_gives_a_head_line_and_the_reasons() -> None:
    job = make_job(type="email.send", run_at=in_seconds(3600))
    head, *reasons = run("explain_job", job.pk).splitlines()
    assert head.startswith(f"job {job.pk} email.send: ready, queue default, attempt 0 of 1, due ")
    assert reasons
    assert all(line.startswith("- ") for line in reasons)


def test_explain_refuses_what_is_no_job_here() -> None:
    old = make_job(status="done", finished_at=in_seconds(-8 * DAYS))
    run("archive_jobs")
    code, text = refused("explain_job", old.pk)
    assert (code, "archive" in text) == (2, True)
    code, text = refused("explain_job", 999_999)
    assert (code, "999999" in text) == (2, True)


# --- From the command line -----------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_a_refusal_is_one_sentence_and_an_exit_code(manage: Manage) -> None:
    process = manage("explain_job", 999_999)
    assert process.wait() == 2
    assert "Traceback" not in process.output
    assert "999999" in process.output


@pytest.mark.django_db(transaction=True)
def test_an_unknown_database_is_a_usage_error(manage: Manage) -> None:
    process = manage("reclaim_jobs", "--database", "elsewhere")
    assert process.wait() == 2
    assert "'default'" in process.output
