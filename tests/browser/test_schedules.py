"""Schedules in a real browser: a preview before saving, without JavaScript too, by keyboard, in the dark."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import tests.jobsapp.jobs  # noqa: F401 (registers the types)
from django_forgejobs.models import Schedule, ScheduleSlot
from django_forgejobs.slots import Fate
from tests.admin.conftest import listing
from tests.admin.conftest import page as address
from tests.browser.conftest import InBrowser, keep, shut_out
from tests.browser.test_admin import MODES
from tests.factories import in_seconds, make_job, make_schedule

SPRING = datetime(2099, 3, 28, tzinfo=UTC)
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
ADD = "/admin/forgejobs/schedule/add/"


def arrange() -> dict[str, str]:
    """Insert a schedule in each state; return the addresses of all pages by name."""
    active = make_schedule(
        name="invoices.send", job_type="t.ok", cron="30 2 * * *", timezone="Europe/Berlin", next_run_at=SPRING
    )
    Schedule.objects.record(active, NOON, Fate.FIRED, job=make_job(status="done"), late=0.4)
    ScheduleSlot.objects.create(
        schedule=active,
        slot=NOON + timedelta(days=1),
        until=NOON + timedelta(days=4),
        count=4,
        fate="missed",
        reason="on_missed is latest",
    )
    Schedule.objects.record(active, NOON + timedelta(days=5), Fate.FIRED, job=make_job(), late=95.0)
    code = make_schedule(name="stock.count", source="code", declared_at=in_seconds(-5), next_run_at=SPRING)
    bad = make_schedule(name="broken", cron="61 * * * *", enabled=False)
    Schedule.objects.filter(pk=bad.pk).update(
        disabled_reason="Schedule \"broken\": cron='61 * * * *': it cannot be understood."
    )
    make_schedule(name="paused", enabled=False, disabled_reason="Paused by ada.")
    make_schedule(name="old.cleanup", source="code", gone_at=in_seconds(-86400))
    make_schedule(name="new one")
    pages = {"invoices": active, "of code": code, "broken": bad}
    return {
        "schedules": listing("schedule"),
        "add": ADD,
        **{name: address(one, model="schedule") for name, one in pages.items()},
    }


@pytest.mark.parametrize("mode", MODES)
def test_every_page_of_schedules_opens_without_complaint(in_browser: InBrowser, mode: str) -> None:
    pages = arrange()

    def visit(page: Any) -> None:
        for name, where in pages.items():
            assert page.goto(where).ok
            keep(page, f"{mode} schedules {name}")

    in_browser(visit, **MODES[mode])


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_no_page_of_schedules_shuts_somebody_out(in_browser: InBrowser, mode: str) -> None:
    assert shut_out(in_browser, arrange(), **MODES[mode]) == []


@pytest.mark.parametrize("mode", ["light", "plain"])
def test_a_schedule_is_previewed_mended_and_saved(in_browser: InBrowser, mode: str) -> None:
    def visit(page: Any) -> None:
        page.goto(ADD)
        page.get_by_label("Name", exact=False).first.fill("nightly")
        page.locator("#id_job_type").select_option("t.ok")
        page.locator("#id_cron").fill("0 0 31 2 *")
        page.locator("#id_timezone").fill("Europe/Berlin")
        page.locator("#id_starts_at_0").fill("2027-03-27")
        page.locator("#id_starts_at_1").fill("00:00:00")
        page.keyboard.press("Enter")  # previews, and saves nothing
        page.get_by_text("there is no such day in any year").first.wait_for()
        keep(page, f"{mode} schedules refused")
        page.locator("#id_cron").fill("30 2 * * *")
        page.get_by_role("button", name="Preview").click()
        page.get_by_text("Sun 2027-03-28 03:00 CEST").wait_for()
        keep(page, f"{mode} schedules previewed")
        assert page.get_by_text("Clocks go forward on this day").is_visible()
        assert not page.locator(".errornote").count()
        page.locator('input[name="_save"]').click()
        page.locator(".messagelist").wait_for()

    in_browser(visit, **MODES[mode])
    saved = Schedule.objects.get()
    assert (saved.name, saved.cron, saved.timezone) == ("nightly", "30 2 * * *", "Europe/Berlin")


@pytest.mark.parametrize("mode", ["light", "plain"])
def test_a_schedule_is_paused_by_keyboard(in_browser: InBrowser, mode: str) -> None:
    schedule = make_schedule(name="x", next_run_at=SPRING)

    def visit(page: Any) -> None:
        page.goto(address(schedule, model="schedule"))
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.locator("button:focus", has_text="Pause").count():
                break
        page.keyboard.press("Enter")
        page.get_by_text("1 schedule was paused.").wait_for()

    in_browser(visit, **MODES[mode])
    schedule.refresh_from_db()
    assert schedule.disabled_reason == "Paused by boss."
