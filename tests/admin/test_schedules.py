"""Schedules in the admin: seen, previewed, edited, moved; and nothing that ticks wrote is undone."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages
from django.db import connection
from django.db.models import DateTimeField, Value
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.html import escape

import tests.jobsapp.jobs  # noqa: F401 (registers the types)
from django_forgejobs import scheduler
from django_forgejobs.models import ArchivedJob, Job, Liveness, Schedule, ScheduleSlot
from django_forgejobs.slots import Fate
from tests.admin.conftest import listing, page, tables
from tests.factories import in_seconds, make_schedule
from tests.sessions import session

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>"

FORM: dict[str, Any] = {
    "name": "nightly",
    "job_type": "t.ok",
    "payload": '{"a": 1}',
    "cron": "30 2 * * *",
    "timezone": "Europe/Berlin",
    "enabled": "on",
    "spread": "0",
    "on_missed": "latest",
    "on_overlap": "allow",
}


class Sent(HTMLParser):
    """What a browser sends of a page's form when nothing is touched."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.data: dict[str, str] = {}
        self._choice = self._text = ""
        self._inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        one = dict(attrs)
        name, value = one.get("name", ""), one.get("value") or ""
        if tag == "form":
            self._inside = one.get("id") == "schedule_form"
        elif tag == "option" and self._choice and "selected" in one:
            self.data[self._choice] = value
        elif tag == "select":
            self._choice = name
        elif tag == "textarea":
            self._text = name
            self.data[name] = ""
        elif tag == "input" and self._inside and one.get("type") != "submit":
            if one.get("type") != "checkbox":
                self.data[name] = value
            elif "checked" in one:
                self.data[name] = "on"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("select", "textarea"):
            self._choice = self._text = ""

    def handle_data(self, data: str) -> None:
        if self._text:
            self.data[self._text] += data


def opened(client: Client, schedule: Schedule) -> dict[str, Any]:
    """Return what a browser sends that has the schedule's form open."""
    return Sent(client.get(page(schedule, model="schedule")).content.decode()).data


def send(client: Client, schedule: Schedule, form: dict[str, Any], **changes: Any) -> Any:
    """Send an open form with changes; None takes a field away."""
    data = {name: value for name, value in {**form, **changes}.items() if value is not None}
    return client.post(page(schedule, model="schedule"), data)


def add(client: Client, **changes: Any) -> Any:
    data = {name: value for name, value in {**FORM, **changes}.items() if value is not None}
    return client.post("/admin/forgejobs/schedule/add/", data)


def change(client: Client, schedule: Schedule, **changes: Any) -> Any:
    return send(client, schedule, opened(client, schedule), **changes)


def text(response: Any) -> str:
    assert response.status_code == 200
    return re.sub(r"\s+", " ", response.content.decode())


def tick(at: datetime = NOON) -> None:
    scheduler.tick("default", clock=Value(at, output_field=DateTimeField()))


# --- The list ------------------------------------------------------------------------------------


def test_the_list_tells_what_each_schedule_does_and_when_it_runs(boss: Client, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Kolkata"
    tokyo = make_schedule(
        name="tokyo",
        cron="0 9 * * *",
        timezone="Asia/Tokyo",
        next_run_at=datetime(2099, 1, 1, tzinfo=UTC),
    )
    Schedule.objects.run_now(tokyo)
    make_schedule(name="new")
    make_schedule(name="paused", enabled=False, disabled_reason="Paused by ada.")
    make_schedule(name="gone", source="code", gone_at=in_seconds(-3600))
    make_schedule(name="ended", next_run_at=None)
    found = text(boss.get(listing("schedule")))
    assert "Thu 2099-01-01 09:00 JST</time> <span>in 7" in found
    assert "yours: Thu 2099-01-01 05:30 IST" in found
    assert f'href="/admin/forgejobs/job/{Job.objects.get().pk}/change/"' in found
    broken = make_schedule(name="broken", cron="61 * * * *")
    scheduler.settle(broken.pk, "default")
    found = text(boss.get(listing("schedule")))
    for words in (
        'forgejobs-disabled">disabled<',
        "planned at the next tick",
        "Paused by ada.",
        "gone from the code",
        ">ended<",
    ):
        assert words in found


def test_two_hundred_schedules_cost_as_many_queries_as_two(boss: Client) -> None:
    counts = []
    for number in (2, 98):
        for _ in range(number):
            make_schedule(next_run_at=NOON, last_job_id=1)
        with CaptureQueriesContext(
            connection,
        ) as queries:
            boss.get(listing("schedule"))
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 10


def test_the_list_says_when_no_scheduler_runs(boss: Client) -> None:
    assert "No scheduler has run yet" in text(boss.get(listing("schedule")))
    scheduler.announce("default", {})
    assert "No scheduler" not in text(boss.get(listing("schedule")))
    Liveness.objects.update(seen_at=in_seconds(-3600))
    assert "one was last seen 1" in text(boss.get(listing("schedule")))


@pytest.mark.parametrize("state", ["active", "paused", "disabled", "gone", "new", "ended"])
def test_the_list_is_filtered_by_the_state_that_it_shows(boss: Client, state: str) -> None:
    make_schedule(name="is active", next_run_at=datetime(2099, 1, 1, tzinfo=UTC))
    make_schedule(name="is paused", enabled=False)
    Schedule.objects.pause(make_schedule(name="is paused too"), by="ada")
    scheduler.settle(make_schedule(name="is disabled", cron="61 * * * *").pk, "default")
    make_schedule(name="is gone", source="code", gone_at=NOON)
    make_schedule(name="is new")
    make_schedule(name="is ended", next_run_at=None)
    response = boss.get(listing("schedule"), {"state": state})
    assert {row.name.split()[1] for row in response.context["cl"].result_list} == {state}
    assert text(response).count(f'forgejobs-{state}">') == (2 if state == "paused" else 1)
    assert boss.get(listing("schedule"), {"state": "x"}).status_code == 302


# --- The form ------------------------------------------------------------------------------------


def test_a_schedule_is_made_with_the_form_and_planned_by_the_next_tick(boss: Client) -> None:
    assert add(boss).status_code == 302
    made = Schedule.objects.get()
    assert (made.name, made.cron, made.timezone, made.payload, made.source) == (
        "nightly",
        "30 2 * * *",
        "Europe/Berlin",
        {"a": 1},
        "admin",
    )
    assert made.next_run_at is None
    tick()
    made.refresh_from_db()
    assert made.next_run_at == datetime(2026, 6, 2, 0, 30, tzinfo=UTC)
    assert LogEntry.objects.get().is_addition()


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"cron": "61 * * * *"}, "cron", "the minute '61' has 61, which is not from 0 to 59"),
        ({"cron": "0 0 31 2 *"}, "cron", "there is no such day in any year"),
        ({"timezone": "Mars"}, "timezone", "is no zone of the tz database"),
        ({"spread": "86400"}, "spread", "is not shorter than the 86400 s"),
        ({"spread": "-1"}, "spread", "not a whole number from 0"),
        ({"job_type": "t.nowhere"}, "job_type", "Select a valid choice"),
        ({"job_type": "os.system"}, "job_type", "Select a valid choice"),
        ({"payload": "{"}, "payload", "This is no JSON: Expecting property name"),
        ({"payload": '{"x": NaN}'}, "payload", 'payload["x"] is nan'),
        ({"payload": "[" * 100_000}, "payload", "This JSON cannot be read"),
        ({"payload": "1" * 5000}, "payload", "This JSON cannot be read"),
        ({"payload": '"\\ud800"'}, "payload", "lone surrogate"),
        ({"queue": "a,b"}, "queue", "commas"),
        ({"priority": "101"}, "priority", "from -100 to 100"),
        ({"max_attempts": "0"}, "max_attempts", "from 1 to"),
        ({"name": ""}, "name", "This field is required"),
        ({"on_missed": "never"}, "on_missed", "Select a valid choice"),
        (
            {"ends_at_0": "2020-1-1", "ends_at_1": "0:00", "starts_at_0": "2021-1-1", "starts_at_1": "0:00"},
            "ends_at",
            "is before starts_at",
        ),
    ],
)
def test_what_no_scheduler_could_run_is_refused_beside_its_field(
    boss: Client, values: dict[str, str], field: str, message: str
) -> None:
    response = add(boss, **values)
    assert response.status_code == 200
    assert message in " ".join(response.context["adminform"].form.errors[field])
    assert not Schedule.objects.exists()


def test_a_name_is_had_once(boss: Client) -> None:
    make_schedule(name="nightly")
    response = add(boss)
    assert "There is a schedule of this name already." in text(response)
    assert Schedule.objects.count() == 1


def test_a_type_that_is_not_registered_here_is_kept(boss: Client) -> None:
    schedule = make_schedule(name="old", job_type="t.elsewhere")
    assert "t.elsewhere (not registered here)" in text(boss.get(page(schedule, model="schedule")))
    assert change(boss, schedule, cron="5 * * * *").status_code == 302
    schedule.refresh_from_db()
    assert (schedule.job_type, schedule.cron) == ("t.elsewhere", "5 * * * *")


def test_a_form_that_is_saved_after_some_ticks_undoes_nothing_of_theirs(boss: Client) -> None:
    """C009."""
    schedule = make_schedule(name="minutes", next_run_at=NOON)
    form = opened(boss, schedule)
    for number in range(3):
        tick(NOON + timedelta(minutes=number))
    written = Schedule.objects.values().get()
    assert send(boss, schedule, form).status_code == 302
    assert Schedule.objects.values().get() == written
    assert send(boss, schedule, form, queue="mail").status_code == 302
    assert Schedule.objects.values().get() == written | {"queue": "mail"}


@pytest.mark.parametrize(
    "meanwhile",
    [
        {"enabled": False, "disabled_reason": "Paused by ada."},
        {"cron": "5 * * * *", "spread": 900},
        {"timezone": "Asia/Tokyo"},
        {"payload": {"b": [2]}},
        {"starts_at": NOON, "ends_at": None},
        {"job_type": "t.fail"},
    ],
)
def test_a_form_undoes_nothing_that_others_did_while_it_was_open(
    boss: Client, meanwhile: dict[str, Any]
) -> None:
    """C009."""
    schedule = make_schedule(payload={"a": 1}, ends_at=NOON)
    form = opened(boss, schedule)
    Schedule.objects.update(**meanwhile)
    assert send(boss, schedule, form, queue="mail").status_code == 302
    written = Schedule.objects.values().get()
    assert written.items() >= (meanwhile | {"queue": "mail"}).items()


def test_a_change_is_checked_against_what_is_stored_by_now(boss: Client) -> None:
    schedule = make_schedule(cron="0 * * * *")
    form = opened(boss, schedule)
    Schedule.objects.update(cron="* * * * *")
    assert "is not shorter than the 60 s" in text(send(boss, schedule, form, spread="600"))
    schedule.refresh_from_db()
    assert schedule.spread == 0


@pytest.mark.parametrize("hour", [0, 1])
def test_a_time_that_no_field_can_show_is_kept(boss: Client, settings: Any, hour: int) -> None:
    """C095. Both are 02:30 in Berlin, and fields show no microseconds."""
    settings.TIME_ZONE = "Europe/Berlin"
    instant = datetime(2026, 10, 25, hour, 30, 0, 5, tzinfo=UTC)
    schedule = make_schedule(starts_at=instant)
    assert change(boss, schedule, queue="mail").status_code == 302
    schedule.refresh_from_db()
    assert (schedule.queue, schedule.starts_at) == ("mail", instant)


@pytest.mark.parametrize(
    ("date", "utc"),
    [("2026-10-25", datetime(2026, 10, 25, 0, 30)), ("2026-03-29", datetime(2026, 3, 29, 1, 30))],
)
def test_a_time_at_a_clock_change_is_taken_and_its_zone_is_said(
    boss: Client, settings: Any, date: str, utc: datetime
) -> None:
    """C095. 02:30 comes twice, or not at all."""
    settings.TIME_ZONE = "Europe/Berlin"
    assert "No slot before it. In Europe/Berlin." in text(boss.get("/admin/forgejobs/schedule/add/"))
    assert add(boss, starts_at_0=date, starts_at_1="02:30").status_code == 302
    assert Schedule.objects.get().starts_at == utc.replace(tzinfo=UTC)


@pytest.mark.parametrize(("before", "after"), [(1, "true"), (1, "1.0"), ({"a": True}, '{"a": 1}')])
def test_a_payload_that_only_python_takes_for_the_same_is_changed(
    boss: Client, before: Any, after: str
) -> None:
    schedule = make_schedule(payload=before)
    change(boss, schedule, payload=after)
    schedule.refresh_from_db()
    assert json.dumps(schedule.payload) == after


@pytest.mark.parametrize("payload", ["text", [], 0, "", {"é": "\u2028\n"}, {"long": "x" * 300_000}])
def test_a_payload_is_shown_so_that_saving_keeps_it(boss: Client, payload: Any) -> None:
    schedule = make_schedule(payload=payload)
    form = opened(boss, schedule)
    assert json.loads(form["payload"]) == payload
    assert send(boss, schedule, form, queue="mail", payload=form["payload"] + " ").status_code == 302
    schedule.refresh_from_db()
    assert (schedule.queue, schedule.payload) == ("mail", payload)


def test_a_form_does_not_save_what_a_tick_did_between_its_reading_and_its_writing(boss: Client) -> None:
    """Only the columns that were changed are written."""
    schedule = make_schedule(name="minutes", next_run_at=NOON)
    with CaptureQueriesContext(connection) as queries:
        change(boss, schedule, spread="30", cron="*/2 * * * *")
    [update] = [one["sql"] for one in queries if one["sql"].startswith('UPDATE "forgejobs_schedule"')]
    columns = re.findall(r'"(\w+)" = ', update.partition(" WHERE ")[0])
    assert sorted(columns) == ["cron", "spread"]


def test_enabling_by_the_form_fires_from_the_next_future_slot(boss: Client) -> None:
    """C037."""
    schedule = make_schedule(name="x", cron="0 9 * * *", next_run_at=NOON)
    change(boss, schedule, enabled=None)
    schedule.refresh_from_db()
    assert (schedule.enabled, schedule.disabled_reason) == (False, "Paused by boss.")
    Schedule.objects.update(disabled_reason="Something was wrong.")
    change(boss, schedule, enabled="on")
    tick(NOON + timedelta(days=2))
    schedule.refresh_from_db()
    assert schedule.next_run_at == datetime(2026, 6, 4, 9, tzinfo=UTC)
    assert schedule.disabled_reason == ""
    assert not Job.objects.exists()


def test_what_ticks_write_cannot_be_posted(boss: Client) -> None:
    schedule = make_schedule(name="x", next_run_at=NOON)
    change(
        boss,
        schedule,
        **{"next_run_at_0": "2020-01-01", "next_run_at_1": "00:00", "last_job_id": "5", "source": "code"},
    )
    schedule.refresh_from_db()
    assert (schedule.next_run_at, schedule.last_job_id, schedule.source) == (NOON, None, "admin")


# --- The preview ---------------------------------------------------------------------------------


def test_the_preview_shows_ten_runs_and_saves_nothing(boss: Client) -> None:
    response = add(boss, _preview="1", starts_at_0="2026-12-31", starts_at_1="00:00", cron="0 0 * * *")
    found = text(response)
    assert len(response.context["preview"].runs) == 10
    assert "nothing is saved yet" in found
    assert "Fri 2027-01-01 00:00 CET" in found
    assert "Thu 2026-12-31 23:00 UTC" in found
    assert "Please correct" not in found
    assert not Schedule.objects.exists()


def test_the_preview_tells_each_run_in_its_zone_in_utc_and_in_yours(boss: Client, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Kolkata"
    response = add(boss, _preview="1", starts_at_0="2027-01-01", starts_at_1="00:00", cron="0 0 * * *")
    assert response.context["preview"].runs[0]["times"] == [
        "Fri 2027-01-01 00:00 CET",
        "Thu 2026-12-31 23:00 UTC",
        "Fri 2027-01-01 04:30 IST",
    ]
    assert "Asia/Kolkata (yours)" in text(response)


def test_the_preview_marks_the_days_on_which_clocks_change(boss: Client) -> None:
    found = text(add(boss, _preview="1", starts_at_0="2027-03-27", starts_at_1="00:00"))
    assert "Sun 2027-03-28 03:00 CEST" in found
    assert "Clocks go forward on this day, 02:00 to 03:00." in found
    assert 'class="forgejobs-marked"' in found


def test_the_preview_refuses_with_the_reason(boss: Client) -> None:
    found = text(add(boss, _preview="1", cron="0 0 31 2 *"))
    assert "there is no such day in any year" in found
    assert not Schedule.objects.exists()


@pytest.mark.parametrize(("name", "value"), [("cron", "61 * * * *"), ("timezone", "Mars")])
def test_what_is_refused_is_not_previewed_as_it_was(boss: Client, name: str, value: str) -> None:
    schedule = make_schedule()
    response = change(boss, schedule, _preview="1", **{name: value})
    assert response.context["preview"].runs == []
    assert value in response.context["preview"].error


def test_a_preview_needs_no_more_than_an_expression_and_a_zone(boss: Client) -> None:
    response = add(boss, _preview="1", name="", job_type="", payload="{")
    assert len(response.context["preview"].runs) == 10
    assert "Give a name" in add(boss, _preview="1", name="", cron="H * * * *").context["preview"].error


def test_beside_the_preview_the_page_shows_what_is_stored(boss: Client) -> None:
    schedule = make_schedule(name="stored", next_run_at=NOON)
    found = text(change(boss, schedule, _preview="1", name="typed", enabled=None))
    assert "<h2>stored</h2>" in found
    assert 'forgejobs-active">' in found
    assert 'value="pause"' in found
    assert 'value="typed"' in found


def test_a_preview_of_something_else_leaves_out_what_is_skipped(boss: Client) -> None:
    schedule = make_schedule(cron="0 0 1 1 *", next_run_at=datetime(2099, 1, 1, tzinfo=UTC))
    Schedule.objects.skip_next(schedule)
    response = change(boss, schedule, _preview="1", spread="60")
    assert response.context["preview"].runs[0]["times"] == ["Fri 2100-01-01 00:00 UTC"]


def test_the_preview_warns_of_steps_that_are_no_intervals_and_tells_the_spread(boss: Client) -> None:
    found = text(add(boss, _preview="1", cron="*/40 * * * *", spread="600"))
    assert "*/40 is no interval" in found
    assert re.search(r"starts each run \d+ seconds after its slot", found)


def test_a_preview_of_what_ends_shows_no_more(boss: Client) -> None:
    data = {
        "starts_at_0": "2027-01-01",
        "starts_at_1": "00:00",
        "ends_at_0": "2027-01-03",
        "ends_at_1": "12:00",
    }
    response = add(boss, _preview="1", **data)
    assert len(response.context["preview"].runs) == 3
    gone = {"ends_at_0": "2020-01-03", "ends_at_1": "12:00"}
    assert "There is no slot left." in text(add(boss, _preview="1", **gone))


def test_the_page_of_a_schedule_shows_its_next_runs_and_leaves_out_what_is_skipped(boss: Client) -> None:
    schedule = make_schedule(cron="0 0 1 1 *", next_run_at=datetime(2099, 1, 1, tzinfo=UTC))
    response = boss.get(page(schedule, model="schedule"))
    assert response.context["preview"].runs[0]["times"] == ["Thu 2099-01-01 00:00 UTC"]
    Schedule.objects.skip_next(schedule)
    response = boss.get(page(schedule, model="schedule"))
    assert response.context["preview"].runs[0]["times"] == ["Fri 2100-01-01 00:00 UTC"]


# --- Schedules of the code -----------------------------------------------------------------------


def test_a_schedule_of_the_code_is_read_only_but_can_be_paused(boss: Client) -> None:
    schedule = make_schedule(name="of code", source="code", declared_at=in_seconds(0))
    found = text(boss.get(page(schedule, model="schedule")))
    assert "is declared in code, and is changed there" in found
    assert 'name="cron"' not in found
    assert 'name="_preview"' not in found
    change(boss, schedule, cron="5 5 * * *", name="renamed")
    schedule.refresh_from_db()
    assert (schedule.cron, schedule.name) == ("* * * * *", "of code")
    assert boss.post(page(schedule, "pause", "schedule")).status_code == 302
    schedule.refresh_from_db()
    assert schedule.enabled is False


# --- Moves ---------------------------------------------------------------------------------------


def from_list(client: Client, move: str, schedule: Schedule) -> list[str]:
    client.get(listing("schedule"))  # which shows, and so forgets, earlier messages
    data = {"action": move, "index": 0, "_selected_action": [schedule.pk]}
    response = client.post(listing("schedule"), data)
    assert response.status_code == 302
    return [str(message) for message in get_messages(response.wsgi_request)]


def from_page(client: Client, move: str, schedule: Schedule) -> list[str]:
    client.get(listing("schedule"))
    response = client.post(page(schedule, move, "schedule"))
    assert response.status_code == 302
    return [str(message) for message in get_messages(response.wsgi_request)]


WAYS = pytest.mark.parametrize("way", [from_list, from_page])
Way = Callable[[Client, str, Schedule], list[str]]


@WAYS
def test_run_now_enqueues_a_job_and_links_to_it(boss: Client, way: Way) -> None:
    schedule = make_schedule(name="x", next_run_at=NOON)
    messages = way(boss, "run_now", schedule)
    job = Job.objects.get()
    assert f'<a href="/admin/forgejobs/job/{job.pk}/change/">job {job.pk}</a> was enqueued.' in messages[0]
    assert messages[1] == "1 schedule was run."
    assert ScheduleSlot.objects.get().reason == "by boss"
    assert LogEntry.objects.get().get_change_message() == "Run now"


@WAYS
def test_pause_and_resume_are_made_or_refused(boss: Client, way: Way) -> None:
    schedule = make_schedule(name="x", next_run_at=NOON)
    assert way(boss, "pause", schedule) == ["1 schedule was paused."]
    schedule.refresh_from_db()
    assert (schedule.enabled, schedule.disabled_reason) == (False, "Paused by boss.")
    assert way(boss, "pause", schedule) == ["1 schedule was left as it is: it is paused already."]
    assert way(boss, "resume", schedule)[0].startswith("1 schedule was resumed")
    schedule.refresh_from_db()
    assert (schedule.enabled, schedule.disabled_reason) == (True, "")
    assert "only paused ones" in way(boss, "resume", schedule)[0]
    assert [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")] == ["Pause", "Resume"]


@WAYS
def test_skip_next_says_which_slot(boss: Client, way: Way) -> None:
    schedule = make_schedule(name="x", timezone="Asia/Tokyo", next_run_at=NOON)
    messages = way(boss, "skip_next", schedule)
    assert messages[0] == "x: the slot Mon 2026-06-01 21:00 JST is left out."
    schedule.refresh_from_db()
    assert schedule.next_run_at == NOON + timedelta(minutes=1)
    assert "it has no next slot" in way(boss, "skip_next", make_schedule(enabled=False))[0]


@WAYS
def test_a_schedule_that_no_job_can_be_made_of_says_why(boss: Client, way: Way) -> None:
    schedule = make_schedule(name="x", queue="a,b", cron="61 * * * *", next_run_at=NOON)
    for move, words in (("run_now", "x: queue='a,b' has"), ("skip_next", "x: queue='a,b' has")):
        [message] = way(boss, move, schedule)
        assert message.startswith(words)
    assert not Job.objects.exists()


@pytest.mark.parametrize("move", ["run_now", "pause", "resume", "skip_next"])
def test_nothing_changes_on_get_or_without_the_permission(
    boss: Client, staff: Callable[..., Client], move: str
) -> None:
    """C025."""
    schedule = make_schedule(next_run_at=NOON, enabled=move != "resume")
    viewer = staff("view_schedule")
    before = tables()
    assert boss.get(page(schedule, move, "schedule")).status_code == 405
    assert viewer.post(page(schedule, move, "schedule")).status_code == 403
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = boss.cookies
    assert strict.post(page(schedule, move, "schedule")).status_code == 403
    assert tables() == before
    assert 'name="move"' not in text(viewer.get(page(schedule, model="schedule")))


# --- The ledger ----------------------------------------------------------------------------------


def test_the_page_shows_what_became_of_the_newest_slots(boss: Client) -> None:
    schedule = make_schedule(timezone="Asia/Tokyo", next_run_at=NOON)
    tick(NOON + timedelta(minutes=180, seconds=20))
    found = text(boss.get(page(schedule, model="schedule")))
    assert "Mon 2026-06-01 21:00 JST … Mon 2026-06-01 23:59 JST" in found
    assert "180 slots. on_missed is latest" in found
    assert "20 seconds late" in found
    assert f'<a href="/admin/forgejobs/job/{Job.objects.get().pk}/change/">' in found


def test_a_job_is_found_in_the_archive_too(boss: Client) -> None:
    schedule = make_schedule()
    Schedule.objects.run_now(schedule)
    job = Job.objects.get()
    ArchivedJob.objects.create(**Job.objects.values().get() | {"status": "done", "finished_at": NOON})
    Job.objects.all().delete()
    for address in (listing("schedule"), page(schedule, model="schedule")):
        assert f'href="/admin/forgejobs/archivedjob/{job.pk}/change/"' in text(boss.get(address))


def test_of_many_slots_the_page_shows_the_newest_and_says_so(boss: Client) -> None:
    schedule = make_schedule(next_run_at=NOON)
    for number in range(60):
        Schedule.objects.record(schedule, NOON + timedelta(minutes=number), Fate.FIRED)
    response = boss.get(page(schedule, model="schedule"))
    assert len(response.context["ledger"]) == 50
    assert "The newest 50 are shown." in text(response)


# --- Another database ----------------------------------------------------------------------------


@pytest.mark.postgres_only
@pytest.mark.django_db(transaction=True)
def test_schedules_are_read_and_written_in_the_database_of_the_queue(boss: Client, settings: Any) -> None:
    with session("queue"):
        settings.FORGEJOBS = {"DATABASE": "queue"}
        with CaptureQueriesContext(connection) as asked:
            assert add(boss).status_code == 302
            assert "There is a schedule of this name already." in text(add(boss))
            schedule = Schedule.objects.using("queue").get()
            assert "nightly" in text(boss.get(listing("schedule")))
            assert change(boss, schedule, queue="mail").status_code == 302
            from_page(boss, "run_now", schedule)
            from_page(boss, "pause", schedule)
            assert "lots: 1" in text(boss.get(page(schedule, "delete", "schedule")))
            boss.post(page(schedule, "delete", "schedule"), {"post": "yes"})
            assert not Schedule.objects.using("queue").exists()
    assert [one["sql"] for one in asked if '"forgejobs_' in one["sql"]] == []


# --- Rows that plain SQL has written -------------------------------------------------------------


def test_a_script_in_any_column_stays_text(boss: Client) -> None:
    """C013."""
    schedule = make_schedule(
        name=EVIL, job_type=EVIL, cron=EVIL, timezone=EVIL[:64], queue=EVIL[:64], payload={EVIL: EVIL}
    )
    ScheduleSlot.objects.create(schedule=schedule, slot=NOON, fate="missed", reason=EVIL)
    Schedule.objects.update(enabled=False)
    Schedule.objects.update(disabled_reason=EVIL)
    addresses = [listing("schedule"), page(schedule, model="schedule"), page(schedule, "delete", "schedule")]
    for address in addresses:
        found = boss.get(address).content.decode()
        assert "<script>alert" not in found
        assert "<img src=x" not in found
        assert escape("<script>alert(1)") in found
    from_page(boss, "run_now", schedule)
    assert "<script>alert" not in boss.get(listing("schedule")).content.decode()


@pytest.mark.parametrize(
    "values",
    [
        {"timezone": "Mars"},
        {"cron": "nonsense"},
        {"spread": 10**6},
        # C095: in the gap, in the overlap.
        {"timezone": "America/New_York", "next_run_at": datetime(2026, 3, 8, 7, 30, tzinfo=UTC)},
        {"timezone": "America/New_York", "next_run_at": datetime(2026, 11, 1, 6, 30, tzinfo=UTC)},
        {"timezone": "Australia/Lord_Howe", "next_run_at": datetime(2026, 10, 3, 15, 45, tzinfo=UTC)},
    ],
)
def test_list_and_page_show_whatever_a_row_says(boss: Client, values: dict[str, Any]) -> None:
    schedule = make_schedule(**{"next_run_at": NOON, **values})
    Schedule.objects.record(schedule, NOON, Fate.FIRED)
    assert boss.get(listing("schedule")).status_code == 200
    assert boss.get(page(schedule, model="schedule")).status_code == 200


@pytest.mark.parametrize("source", ["admin", "code"])
def test_a_payload_that_cannot_be_read_is_said(boss: Client, source: str) -> None:
    schedule = make_schedule(source=source)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE forgejobs_schedule SET payload = %s", [f"[{'1' * 5000}]"])
    assert boss.get(listing("schedule")).status_code == 200
    assert "It cannot be read: ValueError: Exceeds the limit" in text(
        boss.get(page(schedule, model="schedule"))
    )
    if source == "admin":
        response = change(boss, schedule, queue="mail")
        assert "This is no JSON" in text(response)


# --- Deleting ------------------------------------------------------------------------------------


def test_a_schedule_is_deleted_with_its_slots_whose_number_is_said(boss: Client) -> None:
    schedule = make_schedule(next_run_at=NOON)
    for number in range(30):
        Schedule.objects.record(schedule, NOON + timedelta(minutes=number), Fate.FIRED)
    found = text(boss.get(page(schedule, "delete", "schedule")))
    assert "Slots: 30" in found or "slots: 30" in found
    assert found.count("2026-06-01 12:0") == 0
    assert boss.post(page(schedule, "delete", "schedule"), {"post": "yes"}).status_code == 302
    assert not Schedule.objects.exists()
    assert not ScheduleSlot.objects.exists()


def test_a_schedule_that_the_code_declares_cannot_be_deleted_until_it_is_gone(boss: Client) -> None:
    schedule = make_schedule(source="code")
    assert boss.get(page(schedule, "delete", "schedule")).status_code == 403
    data = {"action": "delete_selected", "index": 0, "_selected_action": [schedule.pk], "post": "yes"}
    assert boss.post(listing("schedule"), data).status_code == 403
    del data["post"]
    assert "which the code may declare" in text(boss.post(listing("schedule"), data))
    assert Schedule.objects.exists()
    Schedule.objects.update(gone_at=NOON)
    assert boss.post(page(schedule, "delete", "schedule"), {"post": "yes"}).status_code == 302
    assert not Schedule.objects.exists()
