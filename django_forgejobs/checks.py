"""System checks, ``forgejobs.E001`` and on: what of the set-up cannot work, and how to mend it.

Without ``databases`` nothing here asks a database. The commands call the functions that end in
``_errors`` for the alias that they are to work on, so that a check and a start cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Tags, Warning, register
from django.core.management import get_commands
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from django_forgejobs import conf, schedules
from django_forgejobs.models import Job

TAG = "forgejobs"

#: The lowest version of each database that the queue runs on; there is no other.
VERSIONS = {"postgresql": (15,), "sqlite": (3, 37)}

#: Milliseconds that SQLite must at least wait for the one who writes.
BUSY_TIMEOUT = 5000

#: What SQLite needs for a site and workers beside each other; whole, so that a hint can be pasted.
SQLITE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}

#: Connections of a worker beside those of its job threads: the loop's and the lease thread's.
BESIDE_JOBS = 2
#: And those that come from no pool: what is listened on for new jobs.
BESIDE_POOL = 1

#: What makes a schedule be planned anew when ``enabled`` was switched, whoever wrote it.
TRIGGER = "forgejobs_schedule_switched"

#: Our commands by their names in the umbrella, ``manage.py forgejobs NAME``.
COMMANDS = {
    "worker": "runworker",
    "scheduler": "runscheduler",
    "reclaim": "reclaim_jobs",
    "archive": "archive_jobs",
    "requeue": "requeue_jobs",
    "status": "jobs_status",
    "explain": "explain_job",
    "next-runs": "next_runs",
}


def connect() -> None:
    """Register the checks."""
    register(check_settings, TAG)
    # Under no other tag: Django 6.1 gives every database to the checks of a tag that is asked for.
    register(check_database, Tags.database)


def check_settings(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """Check what can be known without asking a database."""
    found = settings_errors()
    if not conf.problems():
        alias = conf.current().DATABASE
        found += schedule_errors()
        found += [*alias_errors(alias), *(_as_warning(e) for e in pool_errors(alias, 1)), *_elsewhere(alias)]
    return [*found, *_shadowed_commands()]


def check_database(app_configs: Any, databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the queue's database, if it is among those that may be asked."""
    if conf.problems() or (alias := conf.current().DATABASE) not in (databases or ()):
        return []
    if vendor_errors(alias):
        return []  # said already
    if kept_out := router_errors(alias):
        return kept_out
    missing = missing_migrations(alias)
    if missing and not _applied_migrations(alias):
        return _sqlite_warnings(alias)  # not installed yet: this may be the very `migrate` that does it
    unapplied = [
        Warning(
            f'Database "{alias}" lacks migrations: {", ".join(missing)}.',
            hint=f"Run: manage.py migrate forgejobs{database_option(alias)}",
            id="forgejobs.W003",
        )
    ]
    return [*(unapplied if missing else ()), *database_errors(alias)]


# --- Settings ------------------------------------------------------------------------------------


def settings_errors() -> list[CheckMessage]:
    """Return what is wrong with ``FORGEJOBS`` and the settings it depends on."""
    found: list[CheckMessage] = [Error(text, id="forgejobs.E001") for text in conf.problems()]
    if not settings.USE_TZ:
        found.append(
            Error(
                "USE_TZ is False: run times would shift with the local clock, and jobs of the night when "
                "clocks go back would run an hour off.",
                hint="Set USE_TZ = True; TIME_ZONE stays as it is.",
                id="forgejobs.E002",
            )
        )
    return found


def schedule_errors() -> list[CheckMessage]:
    """Return what is wrong with the schedules that code declares."""
    return [Error(text, id="forgejobs.E008") for text in schedules.problems()]


def alias_errors(alias: str) -> list[CheckMessage]:
    """Return what of an alias of ``DATABASES`` does not suit the queue, from the settings alone."""
    return vendor_errors(alias) or [*_autocommit_errors(alias), *_deferred_warnings(alias)]


def vendor_errors(alias: str) -> list[CheckMessage]:
    """Return whether the queue can live in this kind of database at all."""
    connection = connections[alias]
    if connection.vendor in VERSIONS:
        return []
    return [
        Error(
            f'The queue\'s database "{alias}" is {connection.display_name} '
            f"({connection.settings_dict['ENGINE']}): only PostgreSQL and SQLite are supported.",
            hint="Name another alias of DATABASES in FORGEJOBS['DATABASE'].",
            id="forgejobs.E003",
        )
    ]


def _autocommit_errors(alias: str) -> list[CheckMessage]:
    if connections[alias].settings_dict["AUTOCOMMIT"]:
        return []
    return [
        Error(
            f"DATABASES['{alias}']['AUTOCOMMIT'] is False: nobody commits what a statement outside of "
            "atomic() writes, be it a migration, a job or its end.",
            hint="Remove it. ATOMIC_REQUESTS = True is what makes each request one transaction.",
            id="forgejobs.E007",
        )
    ]


def _deferred_warnings(alias: str) -> list[CheckMessage]:
    """Warn of transactions that take SQLite's write lock too late for the timeout to help."""
    if not _is_sqlite_file(alias):
        return []
    mode = connections[alias].settings_dict["OPTIONS"].get("transaction_mode") or "DEFERRED"
    if mode.upper() in ("IMMEDIATE", "EXCLUSIVE"):
        return []
    return [
        Warning(
            f'SQLite database "{alias}" has transaction_mode {mode.upper()}: a transaction that reads and '
            'then writes fails at once with "database is locked" when another has written meanwhile, '
            "whatever the timeout.",
            hint=_sqlite_hint(alias),
            id="forgejobs.W006",
        )
    ]


def _is_sqlite_file(alias: str) -> bool:
    """Whether it is a SQLite database that others can open; one in memory has nobody to wait for."""
    connection: Any = connections[alias]
    return connection.vendor == "sqlite" and not connection.is_in_memory_db()


def _sqlite_hint(alias: str) -> str:
    return f"Set DATABASES['{alias}']['OPTIONS'] = {SQLITE_OPTIONS}"


def _elsewhere(alias: str) -> list[CheckMessage]:
    """Tell whose queue has a database of its own what that costs; no command does at its start."""
    if alias == DEFAULT_DB_ALIAS:
        return []
    return [
        Info(
            f"FORGEJOBS['DATABASE'] is \"{alias}\": enqueue() takes part in transactions on that alias only. "
            "Within those of another, the job may be committed without the business rows.",
            hint=f'Keep on that alias what must be committed with a job, and use atomic(using="{alias}"). '
            'Silence this with SILENCED_SYSTEM_CHECKS = ["forgejobs.I001"].',
            id="forgejobs.I001",
        )
    ]


def pool_errors(alias: str, concurrency: int) -> list[CheckMessage]:
    """Return whether psycopg's pool has a connection for each that a worker needs at once.

    A worker of ``concurrency`` jobs needs one for each, one for its loop, one for its leases. Without,
    a lease might wait for the very job that it belongs to.
    """
    pool = connections[alias].settings_dict["OPTIONS"].get("pool")
    if not pool or connections[alias].vendor != "postgresql":
        return []
    options = pool if isinstance(pool, dict) else {}
    size = options.get("max_size") or options.get("min_size", 4)  # psycopg_pool's defaults
    if (needed := concurrency + BESIDE_JOBS) <= size:
        return []
    place = f"DATABASES['{alias}']['OPTIONS']"
    wanted = (
        f"{place}['pool']['max_size'] to {needed}"
        if options
        else f'"pool": {{"max_size": {needed}}} in {place}'
    )
    return [
        Error(
            f'The connection pool of database "{alias}" has at most {size} connections; a worker with '
            f"concurrency {concurrency} needs {needed}.",
            hint=f"Set {wanted}, or lower --concurrency.",
            id="forgejobs.E004",
        )
    ]


def server_warnings(alias: str, concurrency: int, processes: int = 1) -> list[CheckMessage]:
    """Return whether the server has connections enough for a worker, or for several and the one beside them
    that runs suspects, were there no other client.
    """
    if connections[alias].vendor != "postgresql":
        return []
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT current_setting('max_connections')::int"
            " - current_setting('superuser_reserved_connections')::int"
            " - coalesce(current_setting('reserved_connections', true), '0')::int"  # new in PostgreSQL 16
        )
        (available,) = cursor.fetchone()
    beside = BESIDE_JOBS + (BESIDE_POOL if conf.current().LISTEN_DATABASE is not None else 0)
    needed, who = concurrency + beside, f"a worker with concurrency {concurrency} needs"
    if processes > 1:
        needed = processes * needed + 1 + beside
        who = f"{processes} processes with concurrency {concurrency} need"
    if needed <= available:
        return []
    return [
        Warning(
            f'The server of database "{alias}" has {available} connections for all its clients together; '
            f"{who} {needed}.",
            hint="Raise the server's max_connections, or lower --concurrency, --async-concurrency or "
            f"--processes: all clients together have to stay below {available}, and jobs that get no "
            "connection fail.",
            id="forgejobs.W007",
        )
    ]


def _as_warning(message: CheckMessage) -> CheckMessage:
    """Soften a pool that is too small: the settings may be those of a site whose workers have others."""
    return Warning(message.msg, hint=message.hint, id="forgejobs.W002")


def _shadowed_commands() -> list[CheckMessage]:
    ours = apps.get_app_config("forgejobs").name
    return [
        Warning(
            f"manage.py {command} is the command of {owner}, not the job queue's.",
            hint=f"Use: manage.py forgejobs {name}. Or put {ours} before {owner} in INSTALLED_APPS.",
            id="forgejobs.W001",
        )
        for name, command in COMMANDS.items()
        if (owner := get_commands().get(command, ours)) != ours
    ]


# --- The database --------------------------------------------------------------------------------


def router_errors(alias: str) -> list[CheckMessage]:
    """Return whether a router keeps our tables out: `migrate` then says it has made them, and has not."""
    table = Job._meta.db_table
    if router.allow_migrate_model(alias, Job) or table in connections[alias].introspection.table_names():
        return []
    others = [f'"{other}"' for other in connections if router.allow_migrate_model(other, Job)]
    return [
        Error(
            f'Database "{alias}" has no table "{table}": a router keeps forgejobs out of it.',
            hint="FORGEJOBS['DATABASE'] should name the alias that has it"
            f"{': ' if others else ''}{' or '.join(others)}.",
            id="forgejobs.E006",
        )
    ]


def database_option(alias: str) -> str:
    """Return what to add to a command in a message, for it to ask the same database."""
    return "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"


def missing_migrations(alias: str) -> list[str]:
    """Return our migrations that the database does not have, in order.

    The names come from the files: Django's loader would import the migrations of all apps.
    """
    package, _ = MigrationLoader.migrations_module("forgejobs")
    if package is None:  # MIGRATION_MODULES: tables are made without migrations
        return []
    names = sorted(
        module.name for module in iter_modules(import_module(package).__path__) if module.name[0] not in "_~"
    )
    applied = _applied_migrations(alias)
    return [f"forgejobs.{name}" for name in names if name not in applied]


def _applied_migrations(alias: str) -> set[str]:
    applied = MigrationRecorder(connections[alias]).applied_migrations()
    return {name for app, name in applied if app == "forgejobs"}


def database_errors(alias: str) -> list[CheckMessage]:
    """Return what is wrong with a migrated database: version, journal, missing tables and indexes."""
    return [
        *_version_errors(alias),
        *_sqlite_warnings(alias),
        *_missing_objects(alias),
        *_missing_trigger(alias),
    ]


def _version_errors(alias: str) -> list[CheckMessage]:
    connection = connections[alias]
    lowest, version = VERSIONS[connection.vendor], connection.get_database_version()
    if version >= lowest:
        return []
    return [
        Error(
            f'Database "{alias}" is {connection.display_name} {_dotted(version)}.',
            hint=f"The queue needs {connection.display_name} {_dotted(lowest)} or later.",
            id="forgejobs.E005",
        )
    ]


def _sqlite_warnings(alias: str) -> list[CheckMessage]:
    if not _is_sqlite_file(alias):
        return []
    found: list[CheckMessage] = []
    with connections[alias].cursor() as cursor:
        journal = cursor.execute("PRAGMA journal_mode").fetchone()[0]
        busy = cursor.execute("PRAGMA busy_timeout").fetchone()[0]
    if journal not in ("wal", "memory"):
        found.append(
            Warning(
                f'SQLite database "{alias}" has journal_mode {journal.upper()}: whoever reads holds up '
                "the one who writes, and jobs wait for the site.",
                hint=_sqlite_hint(alias),
                id="forgejobs.W004",
            )
        )
    if busy < BUSY_TIMEOUT:
        found.append(
            Warning(
                f'SQLite database "{alias}" gives up after {busy} ms when another connection writes.',
                hint=_sqlite_hint(alias),
                id="forgejobs.W005",
            )
        )
    return found


def _missing_objects(alias: str) -> list[CheckMessage]:
    """Name tables, indexes and constraints that the models have and the database has not."""
    if missing_migrations(alias):
        return []
    connection = connections[alias]
    found: list[CheckMessage] = []
    with connection.cursor() as cursor:
        tables = set(connection.introspection.table_names(cursor))
        for model in apps.get_app_config("forgejobs").get_models():
            options = model._meta
            if options.proxy or not options.managed:
                continue
            if options.db_table not in tables:
                found.append(_missing(alias, "table", options.db_table))
                continue
            has = set(connection.introspection.get_constraints(cursor, options.db_table))
            named = [("index", index.name) for index in options.indexes]
            named += [("constraint", constraint.name) for constraint in options.constraints]
            found += [_missing(alias, kind, name) for kind, name in named if name not in has]
    return found


def _missing_trigger(alias: str) -> list[CheckMessage]:
    """Warn where nothing plans a resumed schedule anew: after a restore, or in tables without migrations."""
    connection = connections[alias]
    known = {
        "postgresql": "SELECT 1 FROM pg_trigger WHERE tgname = %s",
        "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'trigger' AND name = %s",
    }
    if missing_migrations(alias):
        return []
    with connection.cursor() as cursor:
        cursor.execute(known[connection.vendor], [TRIGGER])
        if cursor.fetchone():
            return []
    return [
        Warning(
            f'Database "{alias}" has no trigger "{TRIGGER}": a schedule that is resumed would make up for '
            "the slots of its pause.",
            hint="Migration forgejobs.0001 creates it, in forget_what_was_planned_at_a_switch().",
            id="forgejobs.W008",
        )
    ]


def _missing(alias: str, kind: str, name: str) -> CheckMessage:
    """An index too is an error: on SQLite the claim names the one that it reads."""
    return Error(
        f'Database "{alias}" has no {kind} "{name}", although the migrations that create it are applied.',
        hint="Somebody has dropped it. `manage.py sqlmigrate forgejobs 0001` shows the statement that "
        "creates it.",
        id="forgejobs.E006",
    )


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))
