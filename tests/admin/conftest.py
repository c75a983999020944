"""Users of the admin, and jobs in every state."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.urls import reverse

from django_forgejobs.models import Job
from tests.factories import in_seconds, make_job


@pytest.fixture
def boss(client: Client, db: None) -> Client:
    """Return a client that may do everything."""
    client.force_login(User.objects.create_superuser("boss"))
    return client


@pytest.fixture
def staff(db: None) -> Callable[..., Client]:
    """Return a function that logs in a member of staff with the permissions named."""

    def log_in(*permissions: str) -> Client:
        user = User.objects.create_user(f"staff-{User.objects.count()}", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        assert user.user_permissions.count() == len(permissions)
        client = Client()
        client.force_login(user)
        return client

    return log_in


STATES: dict[str, dict[str, Any]] = {
    "ready": {},
    "scheduled": {"run_at": in_seconds(3600)},
    "retrying": {"run_at": in_seconds(60), "attempts": 1, "max_attempts": 3, "last_error": "ValueError: x"},
    "running": {"status": "running"},
    "done": {"status": "done", "result": {"sum": 3}},
    "failed": {"status": "failed"},
    "dead": {"status": "dead"},
    "cancelled": {"status": "cancelled"},
}


def job_in(state: str, **fields: Any) -> Job:
    """Insert a job that is shown in `state`."""
    return make_job(**STATES[state] | fields)


def tables() -> str:
    """Return every row of every table but the sessions: what nothing but a move may change."""
    ours = [name for name in connection.introspection.table_names() if name != "django_session"]
    rows = {}
    with connection.cursor() as cursor:
        for name in sorted(ours):
            cursor.execute(f"SELECT * FROM {connection.ops.quote_name(name)}")
            rows[name] = sorted(map(repr, cursor.fetchall()))
    return json.dumps(rows)


def page(job: Any, view: str = "change", model: str = "job") -> str:
    """Return the address of a job's page, or of one of its moves."""
    return reverse(f"admin:forgejobs_{model}_{view}", args=[job.pk])


def listing(model: str = "job") -> str:
    """Return the address of a list."""
    return reverse(f"admin:forgejobs_{model}_changelist")
