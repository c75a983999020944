"""The house: which room may use which, who writes `status`, and that coming in asks no database."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "django_forgejobs"

#: A module imports from its own floor and those below; a new module is given a floor here.
FLOORS = [
    # Words and arithmetic, no database.
    {
        "exceptions",
        "states",
        "conf",
        "backoff",
        "cron",
        "grid",
        "wallclock",
        "payloads",
        "faults",
        "failures",
        "watchdog",
    },
    # Declarations.
    {"signals", "registry", "outcomes", "intake", "schedules", "slots"},
    # The tables.
    {"dialect", "fields", "predicates", "announcements", "sql", "hints", "inserts", "lanes", "settlement"}
    | {"managers", "timetable", "models"},
    # One unit of work, no loop, no thread.
    {"between", "context", "executor", "outage", "scheduler", "reaper", "archive", "tally", "measures"}
    | {"takeover"},
    # Processes.
    {"lease", "cursor", "pace", "listener", "threads", "turns", "worker", "ticker", "foreground", "reload"}
    | {"board", "recycling", "forks", "recovery", "supervisor", "coroutines", "crew"},
    # Doors: parse, call, print.
    {"__init__", "queue", "apps", "checks", "jobs", "logs", "reasons", "admin", "management"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}

#: What a decorated function's own `.enqueue()` opens, when it is called.
EXCEPTIONS = {("registry", "queue")}


def modules() -> Iterator[Path]:
    return (path for path in sorted(PACKAGE.rglob("*.py")) if "migrations" not in path.parts)


def room(path: Path) -> str:
    """Return the module of the package that a file is, or belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def used_rooms(path: Path) -> set[str]:
    """Return which rooms a file imports, at its head or on call; for type checkers does not count."""
    used = set()
    waiting: list[ast.AST] = [tree(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.ImportFrom) and node.module == "django_forgejobs":
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("django_forgejobs."):
            used.add(str(node.module).split(".")[1])
    return {name if name in FLOOR else "__init__" for name in used} - {room(path)}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            yield name, node


def test_every_module_has_its_floor() -> None:
    assert {room(path) for path in modules()} == set(FLOOR)


def test_a_module_imports_from_its_own_floor_and_those_below() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {used}"
        for path in modules()
        for used in sorted(used_rooms(path))
        if FLOOR[used] > FLOOR[room(path)] and (room(path), used) not in EXCEPTIONS
    ]
    assert wrong == []


def test_no_module_needs_one_that_needs_it() -> None:
    needs: dict[str, set[str]] = {}
    for path in modules():
        needs.setdefault(room(path), set()).update(used_rooms(path))
    for one, other in EXCEPTIONS:
        needs[one].discard(other)
    while free := {name for name in needs if not needs[name] & set(needs)}:
        for name in free:
            del needs[name]
    assert needs == {}


def test_only_the_manager_writes_status() -> None:
    writers = set()
    for path in modules():
        for node in ast.walk(tree(path)):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and any(
                isinstance(target, ast.Attribute) and target.attr == "status" for target in targets
            ):
                writers.add(room(path))
        for name, call in calls(path):
            keywords = {keyword.arg for keyword in call.keywords}
            fields = ast.unparse(call)
            if (name == "update" and "status" in keywords) or (
                name in ("save", "bulk_update") and "status" in fields
            ):
                writers.add(room(path))
    assert writers <= {"managers", "sql"}


def test_nothing_is_unpickled_evaluated_or_imported_by_its_name_in_a_row() -> None:
    suspicious = {"eval", "exec", "__import__", "import_string", "import_module", "loads"}
    found = {
        (room(path), name)
        for path in modules()
        for name, call in calls(path)
        if name in suspicious and ast.unparse(call.func) != "json.loads"
    }
    assert found <= {("checks", "import_module")}  # of our own migrations
    text = "".join(path.read_text() for path in modules())
    assert not [word for word in ("pickle", "marshal", "shelve") if f"import {word}" in text]


def test_only_checks_ask_which_database_it_is() -> None:
    askers = {room(path) for path in modules() if re.search(r"\.vendor\b", path.read_text())}
    assert askers <= {"checks"}


# --- Coming in -----------------------------------------------------------------------------------


def python(script: str, *, path: Path | None = None) -> str:
    """Run a script in a process without settings, with all warnings as errors; return its output."""
    environment = {"PYTHONPATH": f"{PACKAGE.parent}:{path or ''}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_touches_no_model_and_needs_no_settings() -> None:
    python(
        """
import sys
from django_forgejobs import *
from django.conf import settings
assert not settings.configured
assert not {"django_forgejobs.models", "django_forgejobs.sql"} & set(sys.modules)

@job("t", max_attempts=3, backoff={"base": 1})
def handler(payload): ...
"""
    )


SETUP = """
import django
from django.conf import settings
from django.core.management import call_command

ours = "django_forgejobs"
contrib = [f"django.contrib.{app}" for app in ("admin", "auth", "contenttypes", "messages", "sessions")]
settings.configure(
    INSTALLED_APPS=[*(%(apps)s), "people", "django.contrib.staticfiles"],
    AUTH_USER_MODEL="people.Person",
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[{
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": [
            "django.template.context_processors.request",
            "django.contrib.auth.context_processors.auth",
            "django.contrib.messages.context_processors.messages",
        ]},
    }],
    DATABASES=%(databases)s,
    STATIC_URL="static/",
    STATIC_ROOT="%(directory)s/static",
    USE_TZ=True,
    SECRET_KEY="x" * 50,
)
django.setup()
"""


STARTED = """
from django_forgejobs import registry
assert set(registry.types()) == {"people.greet", "forgejobs.archive", "forgejobs.reclaim"}
call_command("collectstatic", interactive=False, verbosity=0)
if "default" in %(databases)s:
    call_command("check")
"""


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """Make an app with a user model of its own and a job, and return where it lies."""
    app = tmp_path / "people"
    app.mkdir()
    (app / "__init__.py").touch()
    (app / "models.py").write_text(
        "from django.contrib.auth.models import AbstractUser\nclass Person(AbstractUser): ...\n"
    )
    (app / "jobs.py").write_text(
        'from django_forgejobs import job\n@job("people.greet")\ndef greet(payload): ...\n'
    )
    return tmp_path


@pytest.mark.parametrize("apps", ["[ours] + contrib", "contrib + [ours]"])
@pytest.mark.parametrize(
    "databases", [{}, {"default": {"ENGINE": "django.db.backends.postgresql", "HOST": "/nowhere"}}]
)
def test_a_project_starts_and_is_checked_without_its_database(
    apps: str, databases: dict[str, object], people: Path
) -> None:
    """Without any, and with one that would raise at the first query."""
    python(
        (SETUP + STARTED) % {"apps": apps, "databases": databases, "directory": people},
        path=people,
    )


def test_a_fresh_database_is_migrated_in_the_usual_steps(people: Path) -> None:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(people / "db.sqlite3")}
    python(
        SETUP % {"apps": "[ours] + contrib", "databases": {"default": database}, "directory": people}
        + """
call_command("check")
call_command("showmigrations", verbosity=0)
call_command("makemigrations", "forgejobs", "--check", "--dry-run", verbosity=0)
call_command("migrate", "forgejobs", verbosity=0)
from django_forgejobs import enqueue, get_job
assert get_job(enqueue("people.greet")).status == "ready"
""",
        path=people,
    )
