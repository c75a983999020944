"""Restart a worker when its code changes: notice, let it drain, execute the same command anew.

Django's own reloader runs the program in a thread, where signals cannot be handled, and leaves by
``sys.exit`` in the middle of jobs; only its lists of files and of arguments are used here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from django.utils import autoreload

logger = logging.getLogger("django_forgejobs")

#: Seconds between two looks at the files.
INTERVAL = 1.0


class CodeWatch:
    """A thread that watches the files of the imported modules; ``changed`` is true once one differs."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.changed = False
        self._on_change = on_change
        self._ended = threading.Event()
        self._seen = _modified()
        self._pending: set[Path] = set()

    def start(self) -> None:
        """Watch from now on; the thread is a daemon."""
        threading.Thread(target=self._watch, name="forgejobs-reload", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            now = _modified()
            # A module that was imported since the last look is new, not changed.
            different = {path for path, at in self._seen.items() if now.get(path) != at}
            self._seen = now
            self._pending |= different
            if different and all(map(_compiles, sorted(self._pending))):
                logger.info("%s changed: finishing what runs, then restarting.", min(different))
                self.changed = True
                self._on_change()
                return


def restart() -> None:
    """Replace this process by a new one with the same arguments and process id."""
    arguments = autoreload.get_child_arguments()
    os.execv(arguments[0], arguments)  # noqa: S606 (no shell: these are our own arguments)


def _modified() -> dict[Path, float]:
    """Return when each file of an imported module was changed; a file that is gone is left out."""
    found = {}
    for path in autoreload.iter_all_python_module_files():
        try:
            found[path] = path.stat().st_mtime
        except OSError:
            continue
    return found


def _compiles(path: Path) -> bool:
    """Whether the new version can be restarted into; half-written code would only end the worker."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except FileNotFoundError:
        return True
    except (SyntaxError, ValueError, OSError) as error:
        logger.error("%s changed, but the worker goes on with the old code: %s", path, error)
        return False
    return True
