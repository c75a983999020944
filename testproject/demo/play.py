"""The order of the demo: start, run, count, show."""

from __future__ import annotations

import os
import time
from pathlib import Path

from django.db import connections

from testproject.demo import story
from testproject.demo.narrator import Narrator
from testproject.demo.processes import CHECKOUT, Children, DemoError, Stopped
from testproject.demo.recurring import MINUTELY
from testproject.demo.service import service
from testproject.demo.site import USER, Site
from testproject.demo.story import Facts
from testproject.demo.summary import Findings, summarise
from testproject.demo.supervisor import Supervisor


def play(narrator: Narrator, directory: Path, children: Children, *, once: bool) -> int:
    """Run all of it and return the exit code; stay until a signal comes unless `once`."""
    with service() as running_service:
        try:
            facts = Facts(running_service, directory / "mail")
            supervisor = Supervisor(children, narrator)
            story.migrate(narrator)
            story.enqueue_all(narrator, facts)
            story.start_workers(narrator, supervisor)
            site = Site(children)
            watch = story.Watch(narrator)
            story.run_all(narrator, facts, supervisor, watch)
            findings = summarise(narrator, facts)
            _check_site(findings, site)
            if not once:
                _tell_addresses(narrator, directory, site)
                _stay(narrator, supervisor, watch, site)
            _check_stop(findings, children, supervisor)
        finally:
            connections.close_all()
    _verdict(narrator, findings)
    return 1 if findings.wrong else 0


def _check_site(findings: Findings, site: Site) -> None:
    for path in ("forgejobs/deadletter/", "forgejobs/schedule/"):
        findings.check(site.shows(path), f"The admin lets the superuser in and shows {path}.")


def _check_stop(findings: Findings, children: Children, supervisor: Supervisor) -> None:
    began = time.monotonic()
    children.stop()
    seconds = time.monotonic() - began
    codes = [post.child.ended for post in supervisor.posts.values()]
    findings.check(
        codes == [0] * len(codes),
        f"Workers and schedulers left {seconds:.1f} s after TERM, with codes {codes}.",
    )


def _tell_addresses(narrator: Narrator, directory: Path, site: Site) -> None:
    manage = "python -m testproject.manage"
    narrator.title("The admin")
    narrator.show(f"{site.address()}   user: {USER}   password: {site.password}   (for this run only)")
    narrator.show(
        "\nLook at: Dead letters → clocks.crash: its history names the three workers that it killed."
        "\n         Dead letters → clocks.fax: requeue it, and see it fail again."
        "\n         Clock changes → Europe/Paris: what its job has found."
        f"\n         Schedules → {MINUTELY}: its slots, and a new one each minute."
        "\n\nCount it yourself, in another terminal:"
        f"\n  export DATABASE_URL='{os.environ['DATABASE_URL']}'"
        f"\n  .venv/bin/{manage} jobs_status"
        f"\n  grep -rh ^Message-ID {_short(directory)}/mail | sort | uniq -c"
        f"\nThe logs of all processes are in {_short(directory)}."
    )
    narrator.title("Workers and schedulers go on. Ctrl-C ends all of it.")


def _stay(narrator: Narrator, supervisor: Supervisor, watch: story.Watch, site: Site) -> None:
    """Keep workers and site running and tell what happens, until a signal comes."""
    try:
        while site.child.ended is None:
            watch.look()
            supervisor.tend()
            time.sleep(0.2)
    except Stopped:
        narrator.show()
    else:
        raise DemoError(f"The site has ended with code {site.child.ended}: see {_short(site.child.log)}.")


def _verdict(narrator: Narrator, findings: Findings) -> None:
    if findings.wrong:
        narrator.title(f"{len(findings.wrong)} of the checks above went wrong.")
    else:
        narrator.title("Nothing was lost. Nothing was done twice, but for what a killed worker had begun.")


def _short(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))
