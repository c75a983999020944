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
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.management import get_commands
from django.db import connections
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from django_forgejobs import conf

TAG = "forgejobs"

#: The lowest version of each database that the queue runs on; there is no other.
VERSIONS = {"postgresql": (15,), "sqlite": (3, 37)}

#: Milliseconds that SQLite must at least wait for the one who writes.
BUSY_TIMEOUT = 5000

#: Connections of a worker beside those of its job threads: the loop's and the lease thread's.
BESIDE_JOBS = 2

#: Our commands by their names in the umbrella, ``manage.py forgejobs NAME``.
COMMANDS = {
    "worker": "runworker",
    "reclaim": "reclaim_jobs",
    "archive": "archive_jobs",
    "requeue": "requeue_jobs",
    "status": "jobs_status",
    "explain": "explain_job",
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
        found += [*vendor_errors(alias), *(_as_warning(e) for e in pool_errors(alias, 1))]
    return [*found, *_shadowed_commands()]


def check_database(app_configs: Any, databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the queue's database, if it is among those that may be asked."""
    if conf.problems() or (alias := conf.current().DATABASE) not in (databases or ()):
        return []
    if vendor_errors(alias):
        return []  # said already
    missing = missing_migrations(alias)
    if missing and not _applied_migrations(alias):
        return []  # not installed yet: this may be the very `migrate` that does it
    unapplied = [
        Warning(
            f'Database "{alias}" lacks migrations: {", ".join(missing)}.',
            hint="Run: manage.py migrate forgejobs",
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
    return [
        Error(
            f'The connection pool of database "{alias}" has at most {size} connections; a worker with '
            f"concurrency {concurrency} needs {needed}.",
            hint=f"Set DATABASES['{alias}']['OPTIONS']['pool']['max_size'] to {needed} or more, or lower "
            "--concurrency.",
            id="forgejobs.E004",
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
    return [*_version_errors(alias), *_sqlite_warnings(alias), *_missing_objects(alias)]


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
    connection = connections[alias]
    if connection.vendor != "sqlite":
        return []
    found: list[CheckMessage] = []
    with connection.cursor() as cursor:
        journal = cursor.execute("PRAGMA journal_mode").fetchone()[0]
        busy = cursor.execute("PRAGMA busy_timeout").fetchone()[0]
    if journal not in ("wal", "memory"):
        found.append(
            Warning(
                f'SQLite database "{alias}" has journal_mode {journal.upper()}: whoever reads holds up '
                "the one who writes, and jobs wait for the site.",
                hint=f"Set DATABASES['{alias}']['OPTIONS'] = {{'init_command': 'PRAGMA journal_mode=WAL', "
                "'transaction_mode': 'IMMEDIATE'}.",
                id="forgejobs.W004",
            )
        )
    if busy < BUSY_TIMEOUT:
        found.append(
            Warning(
                f'SQLite database "{alias}" gives up after {busy} ms when another connection writes.',
                hint=f"Set DATABASES['{alias}']['OPTIONS']['timeout'] to {BUSY_TIMEOUT // 1000} (seconds) "
                "or more.",
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
