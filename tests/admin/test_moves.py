"""Requeue, cancel and run now, from the list and from the page: the same rule both ways."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages
from django.db import transaction
from django.test import Client
from django.utils.http import urlencode

from django_forgejobs import managers
from django_forgejobs.models import Job
from django_forgejobs.outcomes import Outcome
from django_forgejobs.states import COMPLETE
from tests.admin.conftest import STATES, job_in, listing, page, tables
from tests.sessions import session

MOVES = {
    "requeue": {"failed", "dead", "cancelled"},
    "run_now": {"scheduled", "retrying"},
    "cancel": {"ready", "scheduled", "retrying", "running"},
}
AFTER = {"requeue": "ready", "run_now": "ready", "cancel": "cancelled"}
CASES = [(move, state) for move in MOVES for state in STATES]


def from_list(client: Client, move: str, *jobs: Job, model: str = "job", **data: Any) -> list[str]:
    """Run the action on `jobs`; return the messages."""
    selected = [job.pk for job in jobs]
    data = {"action": move, "index": 0, "_selected_action": selected, **data}
    response = client.post(listing(model), data)
    assert response.status_code == 302
    return [str(message) for message in get_messages(response.wsgi_request)]


def from_page(client: Client, move: str, job: Job, model: str = "job") -> list[str]:
    """Press the button; return the messages."""
    response = client.post(page(job, move, model))
    assert response.status_code == 302
    return [str(message) for message in get_messages(response.wsgi_request)]


@pytest.mark.parametrize("way", [from_list, from_page])
@pytest.mark.parametrize(("move", "state"), CASES)
def test_a_move_is_made_or_refused_the_same_way_from_list_and_page(
    boss: Client, way: Callable[..., list[str]], move: str, state: str
) -> None:
    job = job_in(state)
    before = Job.objects.filter(pk=job.pk).values().get()

    messages = way(boss, move, job)

    job.refresh_from_db()
    if state in MOVES[move]:
        assert job.status == AFTER[move]
        assert job.history[-1]["by"] == "boss"
        assert "left as it is" not in messages[0]
        log = LogEntry.objects.get()
        assert (log.object_id, log.user.get_username()) == (str(job.pk), "boss")
        assert len(messages) == 1 + (state == "running")
    else:
        assert Job.objects.filter(pk=job.pk).values().get() == before
        assert "left as it is" in messages[0]
        assert len(messages) == 1
        assert not LogEntry.objects.exists()


@pytest.mark.parametrize("state", STATES)
def test_the_page_offers_exactly_the_moves_that_the_job_can_make(boss: Client, state: str) -> None:
    job = job_in(state)

    html = boss.get(page(job)).content.decode()

    offered = {move for move in MOVES if f'formaction="{page(job, move)}"' in html}
    assert offered == {move for move, states in MOVES.items() if state in states}


def test_a_mixed_selection_is_counted(boss: Client) -> None:
    jobs = [job_in(state) for state in STATES]

    messages = from_list(boss, "requeue", *jobs)

    assert messages == [
        "3 jobs were requeued.",
        "5 jobs were left as they are: only failed, dead and cancelled jobs can be requeued.",
    ]
    assert LogEntry.objects.count() == 3


def test_cancelling_a_running_job_says_what_that_means(boss: Client) -> None:
    job = job_in("running")

    assert "told at its next heartbeat" in boss.get(page(job)).content.decode()
    assert any("told at its next heartbeat" in message for message in from_list(boss, "cancel", job))


def test_a_dead_letter_is_requeued_from_its_own_entry(boss: Client) -> None:
    first, second = job_in("dead"), job_in("failed")

    from_list(boss, "requeue", first, model="deadletter")
    from_page(boss, "requeue", second, model="deadletter")

    assert {job.status for job in Job.objects.all()} == {"ready"}
    assert set(LogEntry.objects.values_list("content_type__model", flat=True)) == {"job"}
    assert boss.get(page(second, "history")).content.decode().count("<tr>") >= 1


def test_the_entry_of_dead_letters_moves_nothing_else(boss: Client) -> None:
    waiting = job_in("cancelled")

    messages = from_list(boss, "requeue", waiting, model="deadletter")
    response = boss.post(page(waiting, "requeue", "deadletter"))

    waiting.refresh_from_db()
    assert waiting.status == "cancelled"
    assert "1 job was left as it is" in messages[0]
    assert response.status_code == 404


def test_a_row_that_has_left_the_filtered_list_counts_as_refused(boss: Client) -> None:
    job = job_in("dead")
    Job.objects.requeue(job)

    response = boss.post(
        listing() + "?status=dead", {"action": "requeue", "index": 0, "_selected_action": job.pk}
    )

    assert "1 job was left as it is" in str(next(iter(get_messages(response.wsgi_request))))


def test_an_action_moves_no_more_than_the_page_that_was_seen(boss: Client) -> None:
    seen, unseen = job_in("dead"), job_in("dead")

    from_list(boss, "requeue", seen, select_across=1)

    unseen.refresh_from_db()
    assert unseen.status == "dead"


def test_a_move_without_csrf_token_is_refused(boss: Client) -> None:
    job = job_in("dead")
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = boss.cookies
    before = tables()

    responses = [
        strict.post(page(job, "requeue")),
        strict.post(listing(), {"action": "requeue", "index": 0, "_selected_action": job.pk}),
    ]

    assert [response.status_code for response in responses] == [403, 403]
    assert tables() == before


def test_who_may_only_view_sees_no_button_and_moves_nothing(staff: Callable[..., Client]) -> None:
    viewer = staff("view_job", "view_deadletter")
    job = job_in("dead")
    before = tables()

    shown = viewer.get(page(job)).content.decode() + viewer.get(listing()).content.decode()
    refused = viewer.post(page(job, "requeue"))
    viewer.post(listing(), {"action": "requeue", "index": 0, "_selected_action": job.pk})

    assert "formaction" not in shown
    assert 'name="action"' not in shown
    assert refused.status_code == 403
    assert tables() == before


def test_who_may_change_jobs_may_move_them(staff: Callable[..., Client]) -> None:
    operator = staff("change_job")
    job = job_in("dead")

    assert "formaction" in operator.get(page(job)).content.decode()
    from_page(operator, "requeue", job)

    job.refresh_from_db()
    assert job.status == "ready"


def test_who_may_see_nothing_sees_nothing(staff: Callable[..., Client]) -> None:
    stranger = staff()
    job = job_in("dead")

    addresses = [listing(), page(job), listing("deadletter"), page(job, model="deadletter")]
    assert {stranger.get(address).status_code for address in addresses} == {403}
    assert stranger.post(page(job, "requeue")).status_code == 403


def test_a_stale_page_cannot_undo_what_a_worker_did(boss: Client) -> None:
    job = job_in("ready")
    boss.get(page(job))
    (claimed,) = Job.objects.claim(worker="w", types=[job.type])
    assert Job.objects.finish([Outcome(claimed, COMPLETE, result="1")]).accepted
    before = tables()

    responses = [
        boss.post(page(job), {"status": "ready", "attempts": 0, "claim_token": "", "_save": "Save"}),
        boss.post(page(job), {"_continue": ""}),
        boss.post(page(job, "cancel")),
        boss.post(page(job, "run_now")),
    ]

    assert [response.status_code for response in responses] == [403, 403, 302, 302]
    assert tables() == before


def test_a_move_leads_back_to_the_filtered_list(boss: Client) -> None:
    job = job_in("dead")
    kept = "?" + urlencode({"_changelist_filters": "status=dead"})

    html = boss.get(page(job, model="deadletter") + kept).content.decode()
    response = boss.post(page(job, "requeue", "deadletter") + kept)

    assert f'formaction="{page(job, "requeue", "deadletter")}{kept}"' in html
    assert response.headers["Location"] == listing("deadletter") + "?status=dead"


@pytest.mark.postgres_only
@pytest.mark.django_db(transaction=True)
def test_a_row_that_somebody_holds_is_told_not_waited_for(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managers, "LOCKED_PATIENCE", 0.1)
    job = job_in("dead")
    with session("holder"), transaction.atomic(using="holder"):
        Job.objects.using("holder").select_for_update().get(pk=job.pk)
        messages = from_page(boss, "requeue", job)
    assert "open transaction holds its row" in messages[0]
    job.refresh_from_db()
    assert job.status == "dead"
