"""What `manage.py check` says of a set-up that cannot work, and that it is silent about one that can."""

import ast
import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import CheckMessage, Tags, run_checks
from django.core.management import CommandError, call_command, get_commands
from django.db import DEFAULT_DB_ALIAS, connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_forgejobs import checks
from django_forgejobs.management.base import JobsCommand
from django_forgejobs.models import Job
from testproject.postgres import EmbeddedServer
from tests.processes.harness import Manage
from tests.sessions import session
from tests.test_readme import blocks, run

APP = {"FORGEJOBS_TEST_APPS": "tests.jobsapp"}
STOCK = {"ENGINE": "django.db.backends.sqlite3", "OPTIONS": {}}


def found(*, database: bool = False) -> dict[str, CheckMessage]:
    """Return what our checks say, by id."""
    messages = run_checks(tags=[checks.TAG])
    if database:
        messages += run_checks(tags=[Tags.database], databases=[DEFAULT_DB_ALIAS])
    return {str(message.id): message for message in messages if str(message.id).startswith("forgejobs.")}


@pytest.fixture
def another_database() -> Iterator[Callable[..., str]]:
    """Return a function that adds an alias: the test database with other settings."""
    added: list[str] = []

    def add(**values: Any) -> str:
        alias = f"another{len(added)}"
        connections.databases[alias] = copy.deepcopy(connection.settings_dict) | values
        added.append(alias)
        return alias

    yield add
    for alias in added:
        BaseDatabaseWrapper.close(connections[alias])  # SQLite's own keeps one in memory open
        del connections[alias]
        del connections.databases[alias]


# --- Without a database --------------------------------------------------------------------------


def test_a_sound_set_up_is_not_complained_about() -> None:
    assert found() == {}


@pytest.mark.django_db
def test_a_sound_database_is_not_complained_about() -> None:
    assert found(database=True) == {}


def test_a_wrong_setting_is_an_error_with_the_likely_name(settings: Any) -> None:
    settings.FORGEJOBS = {"LEESE": 60, "GRACE": -1}
    messages = run_checks(tags=[checks.TAG])
    assert [message.id for message in messages] == ["forgejobs.E001"] * 2
    assert "Did you mean 'LEASE'?" in messages[0].msg
    assert "FORGEJOBS['GRACE'] = -1: it must not be negative" in messages[1].msg


def test_a_lease_shorter_than_three_heartbeats_is_an_error(settings: Any) -> None:
    settings.FORGEJOBS = {"LEASE": 10, "HEARTBEAT": 4}
    assert "shorter than three heartbeats" in found()["forgejobs.E001"].msg


def test_local_time_is_an_error(settings: Any) -> None:
    settings.USE_TZ = False
    assert list(found()) == ["forgejobs.E002"]


def test_a_database_of_another_kind_is_an_error(settings: Any, another_database: Callable[..., str]) -> None:
    alias = another_database(ENGINE="django.db.backends.dummy")
    settings.FORGEJOBS = {"DATABASE": alias}
    message = found()["forgejobs.E003"]
    assert alias in message.msg
    assert "django.db.backends.dummy" in message.msg


@pytest.mark.postgres_only
@pytest.mark.parametrize(
    ("pool", "concurrency", "size"),
    [
        (True, 2, None),
        (True, 3, 4),
        ({"max_size": 8}, 6, None),
        ({"max_size": 8}, 7, 8),
        ({"min_size": 2}, 1, 2),
    ],
)
def test_a_pool_must_have_two_connections_more_than_jobs_at_a_time(
    another_database: Callable[..., str], pool: Any, concurrency: int, size: int | None
) -> None:
    alias = another_database(OPTIONS={"pool": pool})
    messages = checks.pool_errors(alias, concurrency)
    assert len(messages) == (size is not None)
    for message in messages:
        assert f"at most {size} connections" in message.msg
        assert f"concurrency {concurrency} needs {concurrency + 2}" in message.msg
        wanted = f'"pool": {{"max_size": {concurrency + 2}}}' if pool is True else f"to {concurrency + 2},"
        assert wanted in str(message.hint)


@pytest.mark.postgres_only
def test_a_pool_too_small_for_any_worker_is_a_warning(settings: Any) -> None:
    settings_dict = connection.settings_dict
    before = settings_dict["OPTIONS"]
    settings_dict["OPTIONS"] = {**before, "pool": {"max_size": 2}}
    try:
        assert list(found()) == ["forgejobs.W002"]
    finally:
        settings_dict["OPTIONS"] = before


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (None, "DEFERRED"),
        ("deferred", "DEFERRED"),
        ("IMMEDIATE", None),
        ("immediate", None),
        ("EXCLUSIVE", None),
    ],
)
def test_sqlite_that_takes_its_lock_too_late_is_a_warning_that_asks_no_database(
    settings: Any, another_database: Callable[..., str], mode: str | None, said: str | None
) -> None:
    options = {} if mode is None else {"transaction_mode": mode}
    alias = another_database(**STOCK | {"NAME": "/nowhere/db", "OPTIONS": options})
    settings.FORGEJOBS = {"DATABASE": alias}
    message = found().get("forgejobs.W006")
    assert (message is None) == (said is None)
    if message is not None:
        assert f"transaction_mode {said}" in message.msg
        assert "database is locked" in message.msg


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", [":memory:", "file:memorydb_default?mode=memory&cache=shared"])
def test_a_test_run_in_memory_is_not_complained_about(
    settings: Any, another_database: Callable[..., str], name: str
) -> None:
    alias = another_database(**STOCK | {"NAME": name, "OPTIONS": {"timeout": 1}})
    connections[alias].connect()
    assert checks.alias_errors(alias) == []
    assert checks._sqlite_warnings(alias) == []


@pytest.mark.django_db(transaction=True)
def test_each_hint_for_sqlite_gives_the_options_of_the_readme(
    another_database: Callable[..., str], tmp_path: Path
) -> None:
    (readme,) = [run(text)["DATABASES"] for text in blocks("python") if "DATABASES" in text]
    alias = another_database(**STOCK | {"NAME": str(tmp_path / "db"), "OPTIONS": {"timeout": 1}})
    connections[alias].connect()
    messages = [*checks.alias_errors(alias), *checks._sqlite_warnings(alias)]
    assert [message.id for message in messages] == ["forgejobs.W006", "forgejobs.W004", "forgejobs.W005"]
    for message in messages:
        place, options = str(message.hint).split(" = ")
        assert place == f"Set DATABASES['{alias}']['OPTIONS']"
        assert ast.literal_eval(options) == readme["default"]["OPTIONS"]


def test_a_database_without_autocommit_is_an_error(
    settings: Any, another_database: Callable[..., str]
) -> None:
    alias = another_database(AUTOCOMMIT=False)
    settings.FORGEJOBS = {"DATABASE": alias}
    assert "'AUTOCOMMIT'] is False" in found()["forgejobs.E007"].msg
    settings.FORGEJOBS = {"DATABASE": another_database(ATOMIC_REQUESTS=True)}
    assert "forgejobs.E007" not in found()


def test_no_command_starts_on_a_database_without_autocommit(another_database: Callable[..., str]) -> None:
    """Pytest refuses all connections in this test."""
    alias = another_database(AUTOCOMMIT=False)
    with pytest.raises(CommandError) as caught:
        JobsCommand().start(alias, timeout=0)
    assert caught.value.returncode == 2
    assert "forgejobs.E007" in str(caught.value)


@pytest.mark.django_db(transaction=True)
def test_a_queue_with_a_database_of_its_own_is_told_what_that_costs_but_not_at_each_start(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.FORGEJOBS = {"DATABASE": "jobs"}
    with session("jobs"), caplog.at_level("INFO", "django_forgejobs"):
        (message,) = found(database=True).values()
        assert (message.id, message.is_serious()) == ("forgejobs.I001", False)
        assert 'atomic(using="jobs")' in str(message.hint)
        assert "forgejobs.I001" in call("check")
        assert "forgejobs.I001" not in call("runworker", "--burst") + caplog.text
        settings.SILENCED_SYSTEM_CHECKS = ["forgejobs.I001"]
        assert "forgejobs.I001" not in call("check")


def call(*arguments: str) -> str:
    """Call a command in this process and return what it printed."""
    out = io.StringIO()
    call_command(*arguments, stdout=out, stderr=out)
    return out.getvalue()


def test_a_command_that_another_app_shadows_is_named_with_the_way_out(settings: Any) -> None:
    settings.INSTALLED_APPS = ["tests.checks.shadow", *settings.INSTALLED_APPS]
    get_commands.cache_clear()  # type: ignore[attr-defined]
    try:
        (message,) = found().values()
    finally:
        del settings.INSTALLED_APPS
        get_commands.cache_clear()  # type: ignore[attr-defined]
    assert message.id == "forgejobs.W001"
    assert "manage.py runworker is the command of tests.checks.shadow" in message.msg
    assert "manage.py forgejobs worker" in str(message.hint)


# --- With a database -----------------------------------------------------------------------------


def test_no_check_asks_a_database_that_it_was_not_given() -> None:
    """Pytest refuses all connections in this test."""
    assert run_checks(tags=[checks.TAG]) == []
    assert checks.check_database(None, databases=["elsewhere"]) == []


@pytest.mark.django_db
def test_a_version_that_is_too_old_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.VERSIONS, connection.vendor, (99, 1))
    message = found(database=True)["forgejobs.E005"]
    assert "99.1 or later" in str(message.hint)
    assert ".".join(map(str, connection.get_database_version())) in message.msg


@pytest.mark.django_db(transaction=True)
def test_sqlite_without_wal_or_patience_is_a_warning(
    settings: Any, another_database: Callable[..., str], tmp_path: Path
) -> None:
    """Also before the first `migrate`, when a newcomer looks whether all is well."""
    alias = another_database(**STOCK | {"NAME": str(tmp_path / "db"), "OPTIONS": {"timeout": 1}})
    connections[alias].connect()
    settings.FORGEJOBS = {"DATABASE": alias}
    journal, busy = checks.check_database(None, databases=[alias])
    assert (journal.id, busy.id) == ("forgejobs.W004", "forgejobs.W005")
    assert "journal_mode DELETE" in journal.msg
    assert "gives up after 1000 ms" in busy.msg


def execute(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


@contextmanager
def without_table() -> Iterator[None]:
    execute("ALTER TABLE forgejobs_tally RENAME TO gone")
    try:
        yield
    finally:
        execute("ALTER TABLE gone RENAME TO forgejobs_tally")


@contextmanager
def without_key() -> Iterator[None]:
    execute("DROP INDEX forgejobs_job_key")
    try:
        yield
    finally:
        (unique,) = (one for one in Job._meta.constraints if one.name == "forgejobs_job_key")
        with connection.schema_editor() as editor:
            editor.add_constraint(Job, unique)


@contextmanager
def without_lane() -> Iterator[None]:
    execute("DROP INDEX forgejobs_job_lane")
    try:
        yield
    finally:
        (index,) = (one for one in Job._meta.indexes if one.name == "forgejobs_job_lane")
        with connection.schema_editor() as editor:
            editor.add_index(Job, index)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("without", "what"),
    [
        (without_table, 'no table "forgejobs_tally"'),
        (without_key, 'no constraint "forgejobs_job_key"'),
        (without_lane, 'no index "forgejobs_job_lane"'),
    ],
)
def test_a_table_constraint_or_index_that_somebody_dropped_is_named(
    without: Any, what: str, manage: Manage
) -> None:
    with without():
        assert what in found(database=True)["forgejobs.E006"].msg
        worker = manage("runworker", "--burst", env=APP)
        assert worker.wait() == 2, worker.output
        assert what in worker.output
        assert "Traceback" not in worker.output
    assert found(database=True) == {}


@pytest.mark.django_db(transaction=True)
def test_a_migration_that_is_not_applied_is_named_once_the_app_is_installed() -> None:
    def rename(old: str, new: str) -> None:
        execute(f"UPDATE django_migrations SET name = '{new}' WHERE app = 'forgejobs' AND name = '{old}'")

    rename("0001_initial", "0000_of_another_version")
    try:
        assert "forgejobs.0001_initial" in found(database=True)["forgejobs.W003"].msg
        assert checks.missing_migrations(DEFAULT_DB_ALIAS) == ["forgejobs.0001_initial"]
    finally:
        rename("0000_of_another_version", "0001_initial")


@pytest.mark.django_db(transaction=True)
def test_a_trigger_that_is_gone_is_named() -> None:
    """Without it, a schedule that is resumed would make up for the slots of its pause."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("SELECT sql FROM sqlite_master WHERE name = %s", [checks.TRIGGER])
            dropped = "DROP TRIGGER forgejobs_schedule_switched"
        else:
            trigger = "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname = %s"
            cursor.execute(trigger, [checks.TRIGGER])
            dropped = "DROP TRIGGER forgejobs_schedule_switched ON forgejobs_schedule"
        [definition] = cursor.fetchone()
    execute(dropped)
    try:
        assert "forgejobs_schedule_switched" in found(database=True)["forgejobs.W008"].msg
    finally:
        execute(definition)
    assert found(database=True) == {}


@pytest.mark.postgres_only
def test_the_first_migrate_of_a_new_site_is_not_complained_about(
    manage: Manage, own_server: Callable[..., EmbeddedServer]
) -> None:
    migrate = manage("migrate", database_url=own_server().url)
    assert migrate.wait() == 0
    assert "forgejobs.W" not in migrate.output
    assert "forgejobs.E" not in migrate.output


class KeepOut:
    """A router that lets the queue's tables into `jobs` alone."""

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool | None:
        return db == "jobs" if app_label == "forgejobs" else None


@pytest.mark.django_db(transaction=True)
def test_a_database_that_a_router_keeps_the_tables_out_of_is_told_from_one_that_lost_them(
    settings: Any, another_database: Callable[..., str], tmp_path: Path
) -> None:
    """Before `migrate` and after it, which records the migrations and makes no table."""
    alias = another_database(**STOCK | {"NAME": str(tmp_path / "db"), "OPTIONS": checks.SQLITE_OPTIONS})
    connections[alias].connect()
    settings.FORGEJOBS = {"DATABASE": alias}
    settings.DATABASE_ROUTERS = [f"{__name__}.KeepOut"]
    for _ in range(2):
        (message,) = checks.check_database(None, databases=[alias])
        assert message.id == "forgejobs.E006"
        assert "a router keeps forgejobs out of it" in message.msg
        assert "FORGEJOBS['DATABASE'] should name the alias that has it" in str(message.hint)
        with pytest.raises(CommandError, match="a router keeps forgejobs out") as caught:
            JobsCommand().start(alias, timeout=0)
        assert caught.value.returncode == 2
        call("migrate", "--database", alias, "-v", "0")
    assert checks.missing_migrations(alias) == []


@pytest.mark.django_db
def test_tables_that_are_there_are_taken_whatever_the_routers_say(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [f"{__name__}.KeepOut"]
    assert found(database=True) == {}


@pytest.mark.postgres_only
@pytest.mark.django_db
def test_a_server_with_too_few_connections_for_a_worker_is_a_warning_with_the_numbers(
    settings: Any,
) -> None:
    (message,) = checks.server_warnings(DEFAULT_DB_ALIAS, 100_000)
    assert message.id == "forgejobs.W007"
    available = int(message.msg.split(" connections for all")[0].split()[-1])
    assert f"has {available} connections" in message.msg
    assert "concurrency 100000 needs 100003" in message.msg
    assert "max_connections" in str(message.hint)
    assert checks.server_warnings(DEFAULT_DB_ALIAS, available - 3) == []
    assert len(checks.server_warnings(DEFAULT_DB_ALIAS, available - 2)) == 1
    settings.FORGEJOBS = {"LISTEN_DATABASE": None}
    assert checks.server_warnings(DEFAULT_DB_ALIAS, available - 2) == []


@pytest.mark.postgres_only
@pytest.mark.django_db(transaction=True)
def test_a_worker_says_at_its_start_that_the_server_has_too_few_connections(manage: Manage) -> None:
    worker = manage("runworker", "--burst", "--concurrency", 100_000, env=APP)
    assert worker.wait() == 0, worker.output
    assert "forgejobs.W007" in worker.output


# --- Set-up that asks nothing --------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [("check",), ("makemigrations", "--check", "--dry-run"), ("help", "runworker")]
)
def test_commands_of_a_site_whose_database_is_away_still_work(
    manage: Manage, command: tuple[str, ...]
) -> None:
    """Imports, ready() and the checks ask no database."""
    process = manage(
        *command, database_url="postgresql://nobody@127.0.0.1:1/nothing", env={"PYTHONWARNINGS": ""}
    )
    assert process.wait() == 0, process.output
