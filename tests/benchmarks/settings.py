"""Settings of our workers: the test project's, and $BENCH_SYNCHRONOUS says how durable SQLite is."""

import os

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES, INSTALLED_APPS

if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    synchronous = os.environ.get("BENCH_SYNCHRONOUS", "FULL")
    DATABASES["default"]["OPTIONS"]["init_command"] = (
        f"PRAGMA journal_mode=WAL; PRAGMA synchronous={synchronous};"
    )

if os.environ.get("BENCH_BARE"):  # what Django itself weighs
    INSTALLED_APPS = [app for app in INSTALLED_APPS if app.startswith("django.")]
