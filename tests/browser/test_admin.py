"""The admin in a real browser: with and without JavaScript, light and dark, by keyboard, under a strict
Content-Security-Policy.
"""

from typing import Any

import pytest

from django_forgejobs.models import Job
from tests.admin.conftest import STATES, job_in, listing
from tests.admin.conftest import page as address
from tests.browser.conftest import InBrowser, keep, shut_out
from tests.factories import in_seconds

MODES: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "plain": {"java_script_enabled": False},
    "narrow": {"viewport": {"width": 390, "height": 844}},
}

FAILURE = {
    "at": "2026-01-02T03:04:05+00:00",
    "event": "retry",
    "claim": 1,
    "worker": "host:17:0a1b2c3d",
    "started": "2026-01-02T03:04:01+00:00",
    "error": "smtplib.SMTPServerDisconnected",
    "message": "smtplib.SMTPServerDisconnected: Connection unexpectedly closed",
    "traceback": 'Traceback (most recent call last):\n  File "jobs.py", line 12, in send\n    smtp.send()\n',
}


def arrange() -> dict[str, str]:
    """Insert a job in each state; return the addresses of all pages by name."""
    payload = {"to": ["ann@example.org"], "subject": "Your invoice", "lines": [1, 2.5, None]}
    common = {"payload": payload, "history": [FAILURE], "created_at": in_seconds(-4000)}
    pages = {state: address(job_in(state, type="mail.send", **common)) for state in STATES}
    lists = {"list": listing(), "dead letters": listing("deadletter"), "archive": listing("archivedjob")}
    return lists | pages


@pytest.mark.parametrize("mode", MODES)
def test_every_page_opens_without_complaint(in_browser: InBrowser, mode: str) -> None:
    pages = arrange()

    def visit(page: Any) -> None:
        for name, where in pages.items():
            assert page.goto(where).ok
            for folded in page.locator("details:not([open]) > summary").all():
                folded.click()
            keep(page, f"{mode} {name}")
            if name in STATES:
                assert page.get_by_text("smtp.send()").is_visible()
                assert page.locator(".field-state").first.inner_text().splitlines()[1].startswith(name)

    in_browser(visit, **MODES[mode])


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_no_page_shuts_somebody_out(in_browser: InBrowser, mode: str) -> None:
    names = ("list", "dead letters", "archive", "scheduled", "running", "dead")
    every = arrange()
    assert shut_out(in_browser, {name: every[name] for name in names}, **MODES[mode]) == []


@pytest.mark.parametrize("mode", ["light", "plain"])
def test_a_job_is_requeued_by_keyboard(in_browser: InBrowser, mode: str) -> None:
    job = job_in("dead")

    def visit(page: Any) -> str:
        page.goto(address(job))
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.locator("button:focus", has_text="Requeue").count():
                break
        page.keyboard.press("Enter")
        page.get_by_text("1 job was requeued.").wait_for()
        keep(page, f"{mode} requeued")
        return str(page.url)

    assert in_browser(visit, **MODES[mode]).endswith(address(job))
    job.refresh_from_db()
    assert (job.status, job.history[-1]["by"]) == ("ready", "boss")


@pytest.mark.parametrize("mode", ["light", "plain"])
def test_selected_jobs_are_cancelled_from_the_list(in_browser: InBrowser, mode: str) -> None:
    chosen = [job_in("ready"), job_in("running"), job_in("done")]
    other = job_in("ready")

    def visit(page: Any) -> list[str]:
        page.goto(listing())
        for job in chosen:
            page.locator(f'input[name="_selected_action"][value="{job.pk}"]').check()
        page.locator('select[name="action"]').select_option("cancel")
        page.locator('button[name="index"]').click()
        page.locator(".messagelist").wait_for()
        keep(page, f"{mode} cancelled")
        return [str(line) for line in page.locator(".messagelist li").all_inner_texts()]

    done, interrupted, refused = in_browser(visit, **MODES[mode])

    assert done == "2 jobs were cancelled."
    assert interrupted.startswith("1 of them was running")
    assert refused.startswith("1 job was left as it is")
    assert {job.pk for job in Job.objects.filter(status="cancelled")} == {job.pk for job in chosen[:2]}
    other.refresh_from_db()
    assert other.status == "ready"


def test_pages_work_under_a_strict_content_security_policy(in_browser: InBrowser) -> None:
    pages = arrange()
    policy = (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; object-src 'none'"
    )

    def guard(route: Any) -> None:
        response = route.fetch()
        route.fulfill(response=response, headers={**response.headers, "content-security-policy": policy})

    def visit(page: Any) -> None:
        page.route("**/admin/**", guard)
        for name in ("list", "running", "dead"):
            page.goto(pages[name])
        page.get_by_role("button", name="Requeue").click()
        page.get_by_text("1 job was requeued.").wait_for()
        page.unroute_all(behavior="wait")

    in_browser(visit)


def test_what_a_job_says_never_runs(in_browser: InBrowser) -> None:
    evil = "</pre><img src=x onerror=console.error('ran')><script>console.error('ran')</script>"
    entry = FAILURE | {
        "event": evil,
        "worker": evil,
        "message": evil,
        "traceback": evil,
        "by": evil,
        "at": evil,
    }
    job = job_in(
        "dead",
        type=evil,
        queue=evil[:64],
        payload={evil: evil},
        locked_by=evil,
        last_error=evil,
        history=[entry],
    )

    def visit(page: Any) -> None:
        for where in (listing(), listing() + "?status=dead", address(job)):
            page.goto(where)
            assert page.get_by_text("onerror=").count()
            assert page.locator("img[src=x]").count() == 0
        page.get_by_role("button", name="Requeue").click()
        page.get_by_text("1 job was requeued.").wait_for()

    in_browser(visit)  # what runs complains
