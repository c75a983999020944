"""What the lists and pages show, and that looking changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_forgejobs.admin import display
from django_forgejobs.models import AnnouncedType, ArchivedJob, Job
from tests.admin.conftest import STATES, job_in, listing, page, tables
from tests.factories import in_seconds

HOSTILE = [
    "</pre><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "javascript:alert(1)//\"'><svg onload=alert(1)>",
]


def archive(job: Job) -> ArchivedJob:
    """Put a copy of an ended job into the archive."""
    values = Job.objects.filter(pk=job.pk).values().get()
    return ArchivedJob.objects.create(**values)


def shown_ids(response: Any) -> list[int]:
    """Return the ids of a list, in order."""
    return [row.pk for row in response.context["cl"].result_list]


@pytest.mark.parametrize("state", STATES)
def test_each_state_is_shown_by_its_name_and_found_by_its_filter(boss: Client, state: str) -> None:
    jobs = {name: job_in(name) for name in STATES}

    response = boss.get(listing(), {"status": state})

    assert shown_ids(response) == [jobs[state].pk]
    assert f'forgejobs-{state}">{state}</span>' in response.content.decode()
    assert f'forgejobs-{state}">{state}</span>' in boss.get(page(jobs[state])).content.decode()


def test_a_line_shows_attempts_error_and_age(boss: Client) -> None:
    error = "ValueError: first line\nsecond line " + "x" * 500
    job_in("retrying", last_error=error, created_at=in_seconds(-200))

    html = boss.get(listing()).content.decode()

    assert "1 of 3" in html
    assert "ValueError: first line second line xxx" in html
    assert "x" * 200 not in html
    assert ">3\N{NO-BREAK SPACE}minutes</time>" in html


def test_a_retry_that_is_due_is_still_a_retry(boss: Client) -> None:
    job = job_in("retrying", run_at=in_seconds(-1))

    assert shown_ids(boss.get(listing(), {"status": "retrying"})) == [job.pk]
    assert shown_ids(boss.get(listing(), {"status": "ready"})) == []
    assert 'forgejobs-retrying">retrying</span>' in boss.get(page(job)).content.decode()


def test_a_very_long_payload_is_cut_and_says_so(boss: Client) -> None:
    job = job_in("ready", payload={"text": "x" * (display.LONGEST + 5000)})

    html = boss.get(page(job)).content.decode()

    assert "more characters" in html
    assert len(html) < display.LONGEST * 1.2


@pytest.mark.sqlite_only
def test_text_that_no_page_can_carry_is_shown_escaped(boss: Client) -> None:
    job = job_in("ready")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE forgejobs_job SET payload = %s", [r'{"name": "\ud800"}'])

    assert r"\ud800" in boss.get(page(job)).content.decode()


def test_a_payload_that_python_cannot_read_is_said(boss: Client) -> None:
    job = job_in("ready")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE forgejobs_job SET payload = %s", [f"[{'1' * 5000}]"])

    assert "It cannot be read: ValueError: Exceeds the limit" in boss.get(page(job)).content.decode()


def test_a_page_shows_payload_result_history_and_explanation(boss: Client) -> None:
    job = job_in("dead", payload={"name": "Zoé", "list": [1, 2]}, result={"sum": 3})
    Job.objects.requeue(job, by="ann")
    Job.objects.cancel(job, by="ben")

    html = boss.get(page(job)).content.decode()

    assert "&quot;name&quot;: &quot;Zoé&quot;" in html
    assert "&quot;sum&quot;: 3" in html
    assert "by ann" in html
    assert "Cancelled 0 s ago" in html
    assert "by ben." in html


def test_a_failed_attempt_shows_its_traceback_folded(boss: Client) -> None:
    entry = {
        "at": timezone.now().isoformat(),
        "event": "retry",
        "claim": 1,
        "worker": "host:1:abc",
        "error": "ValueError",
        "message": "ValueError: no",
        "traceback": "File x, line 1",
    }
    job = job_in("retrying", history=[entry])

    html = boss.get(page(job)).content.decode()

    assert "<details>" in html
    assert "File x, line 1" in html
    assert "ValueError: no" in html


@pytest.mark.parametrize("history", [[{"event": 1}], [1, None, ["x"]], [{"at": "2026-99-99"}]])
def test_a_history_that_somebody_else_wrote_is_shown_too(boss: Client, history: Any) -> None:
    job = job_in("done")
    job.history = history
    job.save(update_fields=["history"])

    assert boss.get(page(job)).status_code == 200


def test_times_are_shown_in_the_current_zone(boss: Client, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Kolkata"
    job = job_in("scheduled")

    html = boss.get(page(job)).content.decode()

    assert timezone.localtime(job.run_at).strftime("%Y-%m-%d %H:%M:%S IST") in html
    assert "(in 59\N{NO-BREAK SPACE}minutes)" in html


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_inert_everywhere(boss: Client, text: str) -> None:
    entry = dict.fromkeys(
        ("at", "event", "claim", "worker", "error", "message", "reason", "by", "traceback", "count"), text
    )
    fields = {
        "type": text,
        "queue": text,
        "last_error": text,
        "payload": {text: [text]},
        "locked_by": text,
        "idempotency_key": text,
        "history": [entry, text],
    }
    job = job_in("dead", **fields, result=text)
    AnnouncedType.objects.create(type=text)
    archive(job)
    waiting = job_in("ready", **fields | {"idempotency_key": None})
    running = job_in("running", **fields | {"idempotency_key": None})

    pages = [
        boss.get(listing()),
        boss.get(listing(), {"type": text, "queue": text, "status": "dead"}),
        boss.get(listing(), {"q": text}),
        boss.get(listing(), {"status": text}, follow=True),
        boss.get(listing("deadletter")),
        boss.get(listing("archivedjob")),
        boss.get(page(job)),
        boss.get(page(waiting)),
        boss.get(page(running)),
        boss.get(page(job, model="deadletter")),
        boss.get(page(job, model="archivedjob")),
        boss.post(page(job, "requeue"), follow=True),
        boss.post(page(running, "cancel"), follow=True),
        boss.post(listing(), {"action": "cancel", "index": 0, "_selected_action": waiting.pk}, follow=True),
        boss.get(page(job, "history")),
        boss.get(reverse("admin:index")),
    ]

    for response in pages:
        assert response.status_code == 200
        html = response.content.decode()
        for tag in ("<script>alert", "<img src=x", "<svg onload"):
            assert tag not in html
        assert 'href="javascript:' not in html
    assert any("alert(1)" in response.content.decode() for response in pages)


def test_looking_at_any_page_changes_nothing(boss: Client) -> None:
    jobs = [job_in(state) for state in STATES]
    archived = archive(jobs[-1])
    before = tables()

    entries = [(model, model_admin) for model, model_admin in admin.site._registry.items()]
    ours = [(model, entry) for model, entry in entries if model._meta.app_label == "forgejobs"]
    assert {model._meta.model_name for model, _entry in ours} >= {"job", "deadletter", "archivedjob"}
    asked = 0
    for _model, model_admin in ours:
        for pattern in model_admin.get_urls():
            for row in (*jobs, archived):
                keys = {"object_id": row.pk} if pattern.pattern.converters else {}
                name = pattern.name
                if name is None:  # Django's redirect from an old address
                    continue
                boss.get(reverse(f"admin:{name}", kwargs=keys))
                asked += 1
    assert asked > 100
    for model, _entry in ours:
        for parameters in ({"status": "dead"}, {"type": "x"}, {"queue": "x"}, {"q": "1"}, {"p": "2"}):
            boss.get(listing(str(model._meta.model_name)), parameters)

    assert tables() == before


@pytest.mark.parametrize("move", ["requeue", "run_now", "cancel"])
def test_a_move_is_not_made_by_a_link(boss: Client, move: str) -> None:
    assert boss.get(page(job_in("dead"), move)).status_code == 405


@pytest.mark.parametrize("model", ["job", "deadletter", "archivedjob"])
def test_nothing_is_added_edited_or_deleted(boss: Client, model: str) -> None:
    job = job_in("dead")
    archive(job)
    before = tables()

    form = {"type": "evil", "status": "ready", "payload": "{}", "_save": "Save"}
    responses = [
        boss.get(reverse(f"admin:forgejobs_{model}_add")),
        boss.post(reverse(f"admin:forgejobs_{model}_add"), form),
        boss.post(page(job, model=model), form),
        boss.get(page(job, "delete", model)),
        boss.post(page(job, "delete", model), {"post": "yes"}),
    ]
    boss.post(
        listing(model),
        {"action": "delete_selected", "index": 0, "_selected_action": job.pk, "post": "yes"},
    )

    assert {response.status_code for response in responses} == {403}
    assert tables() == before
    html = boss.get(page(job, model=model)).content.decode()
    assert 'name="_save"' not in html
    assert "delete" not in boss.get(listing(model)).content.decode().lower()


def test_what_only_the_machinery_needs_is_not_an_entry() -> None:
    names = {model._meta.model_name for model in admin.site._registry}
    assert not names & {"announcedtype", "tally"}


def test_types_and_queues_are_offered_without_asking_the_jobs(boss: Client) -> None:
    AnnouncedType.objects.create(type="announced.elsewhere")
    job_in("ready", queue="far.away", type="unheard.of")

    html = boss.get(listing()).content.decode()

    assert "?type=announced.elsewhere" in html
    assert "?queue=far.away" in html
    assert "?type=unheard.of" not in html


def test_a_name_that_nobody_knows_can_be_reached_from_a_job(boss: Client) -> None:
    job = job_in("dead", type="unheard.of")

    html = boss.get(page(job)).content.decode()
    response = boss.get(listing(), {"type": "unheard.of"})

    assert f'href="{listing()}?type=unheard.of"' in html
    assert shown_ids(response) == [job.pk]


def test_search_finds_an_exact_id_or_key_and_nothing_else(boss: Client) -> None:
    job = job_in("done", idempotency_key="invoice-17", type="invoice", payload={"n": "invoice-17"})
    job_in("done", type="invoice")

    def found(term: str, model: str = "job") -> list[int]:
        return shown_ids(boss.get(listing(model), {"q": term}))

    assert found(str(job.pk)) == [job.pk]
    assert found(" invoice-17 ") == [job.pk]
    assert found("invoice") == []
    assert found("9" * 5000) == []
    assert found("9223372036854775808") == []
    archive(job)
    assert found(str(job.pk), "archivedjob") == [job.pk]


@pytest.mark.parametrize("model", ["job", "deadletter", "archivedjob"])
def test_an_address_that_asks_for_more_is_refused_or_ignored(boss: Client, model: str) -> None:
    for parameters, codes in (
        ({"payload__icontains": "x"}, {400}),
        ({"last_error__contains": "x"}, {400}),
        ({"status": "nonsense"}, {302}),
        ({"o": "-3.5"}, {200}),
        ({"type": "\0"}, {200}),
        ({"all": ""}, {200}),
        ({"_facets": "True"}, {200}),
        ({"p": "10000"}, {200}),
        ({"q": "\0"}, {200}),
    ):
        assert boss.get(listing(model), parameters).status_code in codes, parameters


def test_dead_letters_are_listed_by_their_end(boss: Client) -> None:
    job_in("done")
    old = job_in("dead", finished_at=in_seconds(-50))
    new = job_in("failed", finished_at=in_seconds(-5))
    oldest = job_in("dead", finished_at=in_seconds(-500))

    assert shown_ids(boss.get(listing("deadletter"))) == [new.pk, old.pk, oldest.pk]
    assert boss.get(page(job_in("ready"), model="deadletter")).status_code == 302


def test_a_member_of_staff_sees_the_entries_that_are_permitted(staff: Callable[..., Client]) -> None:
    viewer = staff("view_deadletter")
    job = job_in("dead")

    assert viewer.get(listing("deadletter")).status_code == 200
    assert viewer.get(page(job, model="deadletter")).status_code == 200
    assert viewer.get(listing()).status_code == 403
