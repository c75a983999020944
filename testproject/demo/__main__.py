"""The demo's command line: `python -m testproject.demo [--once]`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from testproject.demo import places
from testproject.demo.narrator import Narrator
from testproject.demo.processes import Children, DemoError, Stopped, stop_on_signals
from testproject.postgres import EmbeddedPostgresError

FORGEJOBS = {"LEASE": 2.0, "HEARTBEAT": 0.5, "POLL_INTERVAL": 0.2, "RECLAIM_INTERVAL": 0.5}


def main() -> int:
    """Run the demo; return 0 if nothing was lost or done twice, 1 if something was, 2 if it could not run."""
    parser = argparse.ArgumentParser(prog="make demo ARGS=…", description=main.__doc__)
    parser.add_argument("--once", action="store_true", help="do not stay up when all jobs have ended")
    options = parser.parse_args()
    narrator = Narrator()
    stop_on_signals()
    try:
        with _stage(narrator) as (directory, children):
            from testproject.demo import play

            return play.play(narrator, directory, children, once=options.once)
    except (DemoError, EmbeddedPostgresError) as error:
        narrator.say(str(error))
        return 2
    except Stopped as stopped:
        return 128 + stopped.number


@contextlib.contextmanager
def _stage(narrator: Narrator) -> Iterator[tuple[Path, Children]]:
    """Provide directory, database and Django, all of this run's own; nothing of it runs on afterwards."""
    narrator.title("django_forgejobs: a durable job queue in one database table")
    with places.directory() as directory, places.database(directory) as database:
        narrator.say(f"The database is {database.name}.")
        for name in ("DEBUG", "FORGEJOBS_TEST_APPS"):
            os.environ.pop(name, None)
        os.environ |= {
            "DATABASE_URL": database.url,
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
            "FORGEJOBS_JSON": json.dumps(FORGEJOBS),
            "MAIL_DIRECTORY": str(directory / "mail"),
        }
        import django

        django.setup()
        with Children(directory) as children:
            yield directory, children


if __name__ == "__main__":
    sys.exit(main())
