"""Settings of the project that the tests and the demo run in. Not an example for production.

Read from the environment: DATABASE_URL, LISTEN_DATABASE_URL (makes an alias `direct`),
DISABLE_SERVER_SIDE_CURSORS, DEBUG, FORGEJOBS_JSON (the FORGEJOBS dict, for tests that start real
processes), FORGEJOBS_TEST_APPS (comma separated apps to install besides) and MAIL_DIRECTORY (where mail
is written).
"""

import json
import os
from pathlib import Path
from urllib.parse import quote

import dj_database_url
import django

CHECKOUT = Path(__file__).resolve().parent.parent
RUN = CHECKOUT / ".run"
RUN.mkdir(exist_ok=True)

SECRET_KEY = "demo-and-tests-only-never-use-this-key-for-a-site"
DEBUG = os.environ.get("DEBUG", "").lower() in {"1", "true", "yes", "on"}
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_forgejobs",
    "testproject.clocks",
    *filter(None, os.environ.get("FORGEJOBS_TEST_APPS", "").split(",")),
]

FORGEJOBS = json.loads(os.environ.get("FORGEJOBS_JSON") or "{}")

DATABASES = {
    "default": dj_database_url.config(
        default=f"sqlite:///{quote(f'{RUN}/db.sqlite3')}",
        disable_server_side_cursors=bool(os.environ.get("DISABLE_SERVER_SIDE_CURSORS")),
    )
}
if "LISTEN_DATABASE_URL" in os.environ:
    DATABASES["direct"] = dj_database_url.parse(os.environ["LISTEN_DATABASE_URL"])

if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    # One writer at a time, and it waits for its turn: IMMEDIATE takes the write lock at BEGIN,
    # where the timeout applies. A deferred transaction that turns into a writer fails at once.
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
    # A file, so that threads and processes share it; one per test process, so that two runs in one
    # checkout do not meet.
    DATABASES["default"]["TEST"] = {"NAME": str(RUN / f"test-{os.getpid()}.sqlite3")}

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("fr", "Français")]
USE_I18N = True
USE_TZ = True
TIME_ZONE = "UTC"

# Mail goes to files.
MAIL_DIRECTORY = os.environ.get("MAIL_DIRECTORY") or str(RUN / "emails")
# Django 6.1 has a new setting for it and calls the old ones deprecated.
if django.VERSION >= (6, 1):
    MAILERS = {
        "default": {
            "BACKEND": "django.core.mail.backends.filebased.EmailBackend",
            "OPTIONS": {"file_path": MAIL_DIRECTORY},
        }
    }
else:
    EMAIL_BACKEND = "django.core.mail.backends.filebased.EmailBackend"
    EMAIL_FILE_PATH = MAIL_DIRECTORY
