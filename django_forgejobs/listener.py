"""Wake-ups, the hearing half: a thread that tells a worker when jobs may have come, so that it need not wait
for its next look. It tells nothing else: what it misses, polling finds.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_forgejobs import between, conf, hints

logger = logging.getLogger("django_forgejobs")

#: Seconds between two looks whether a file has changed that cannot tell us; while it does, and when it is
#: quiet. A look costs 50 to 150 µs of CPU, nearly all of it for waking up.
LOOK_EVERY = 0.005
LOOK_EVERY_QUIET = 0.03
#: Seconds without a change after which it is quiet.
QUIET_AFTER = 2.0
#: Longest pause, in seconds, between tries to listen again.
AT_MOST = 15.0
#: Seconds that the thread gets to end in: it may be waiting for a server that does not answer.
END_WITHIN = 1.0

#: What ends a silent death of the line within a minute or so, unless OPTIONS say otherwise.
PATIENCE = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30000,
}


class CannotListen(Exception):
    """Trying again would not help."""


class Listener:
    """Calls ``wake``, from a thread of its own, when a job of ``queues`` (None: of any) may have come.

    PostgreSQL tells it, on one direct connection (``FORGEJOBS["LISTEN_DATABASE"]``) that no pool knows and no
    transaction is open on. A SQLite file is asked whether it was written to, while ``idle`` is true. Lost
    connections are opened again for as long as it takes, and ``wake`` is called after each. No error
    leaves the thread.
    """

    def __init__(self, *, db: str, queues: Collection[str] | None, wake: Callable[[], object]) -> None:
        settings = conf.current()
        self.alias = settings.LISTEN_DATABASE if db == settings.DATABASE else db
        self.queues = None if queues is None else frozenset(queue.encode() for queue in queues)
        self.wake = wake
        #: Whether a wake-up is of use just now; set by the worker.
        self.idle = True
        self._enabled = settings.LISTEN_DATABASE is not None
        self._notified = bool(hints.statement(db))
        #: How often in a row a line was lost, or was not to be had.
        self.failures = 0
        self._lost = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Listener:
        if self._enabled:
            self._ear, self._mouth = socket.socketpair()
            self._thread = threading.Thread(target=self._run, name="forgejobs-listen", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._mouth.close()  # the ear hears that
            self._thread.join(timeout=END_WITHIN)

    def _run(self) -> None:
        try:
            with self._ear, self._ears() as ears:
                while not self._told_to_stop(ears, _pause(self.failures)):
                    started = time.monotonic()
                    try:
                        self._listen()
                        return
                    except CannotListen as reason:
                        logger.warning("New jobs do not wake this worker, polling finds them: %s", reason)
                        return
                    except Exception as error:  # whatever it is, polling goes on
                        if time.monotonic() - started > AT_MOST:
                            self.failures = 0
                        self.failures += 1
                        self._say_lost(error)
        except BaseException:
            logger.critical("The listening thread died; polling goes on.", exc_info=True)

    def _listen(self) -> None:
        """Return when told to stop; raise what the connection is lost by."""
        connection = _direct(self.alias or "")
        try:
            connection.connect()
            if self._notified:
                self._hear(connection.connection)
            else:
                self._watch(connection.connection)
        finally:
            between.close(connection)

    def _hear(self, driver: Any) -> None:
        _listen_directly(driver, self.alias)
        self._begin()
        look_at: float | None = None
        held_back_until = 0.0
        with self._ears(driver) as ears:
            while not self._told_to_stop(ears, look_at and max(0.0, look_at - time.monotonic())):
                heard, now = self._concerned(driver.pgconn), time.monotonic()
                if heard:
                    held_back_until = now + hints.HELD_BACK
                    look_at = look_at or now
                # Whoever sent a hint may hold others back: look again when that is over. And not more often
                # than that while hints pour in, from however many processes.
                if look_at is not None and now >= look_at:
                    self.wake()
                    look_at = now + hints.HELD_BACK if now < held_back_until else None

    def _concerned(self, line: Any) -> bool:
        """Read all that has come, and return whether it concerns our queues."""
        line.consume_input()
        heard = False
        while (notification := line.notifies()) is not None:
            heard = heard or self.queues is None or notification.extra in self.queues
        return heard

    def _watch(self, driver: Any) -> None:
        seen, pause, quiet_at = None, 0.0, 0.0
        with self._ears() as ears:
            while not self._told_to_stop(ears, pause):
                now = time.monotonic()
                pause = LOOK_EVERY if now < quiet_at else LOOK_EVERY_QUIET
                if not self.idle:
                    continue
                (version,) = driver.execute("PRAGMA data_version").fetchone()
                if version == seen:
                    continue
                if seen is None:
                    self._begin()
                else:
                    self.wake()
                seen, pause, quiet_at = version, LOOK_EVERY, now + QUIET_AFTER

    def _begin(self) -> None:
        """Look once for what has come while nobody listened."""
        if self._lost:
            self._lost = False
            logger.warning("New jobs wake this worker again.")
        self.wake()

    def _say_lost(self, error: Exception) -> None:
        if not self._lost:
            self._lost = True
            text = " ".join(str(error).split()) or type(error).__name__
            logger.warning("New jobs do not wake this worker for now, polling finds them (%s).", text)

    @contextmanager
    def _ears(self, *others: Any) -> Iterator[selectors.BaseSelector]:
        with selectors.DefaultSelector() as ears:
            for ear in (self._ear, *others):
                ears.register(ear, selectors.EVENT_READ)
            yield ears

    def _told_to_stop(self, ears: selectors.BaseSelector, timeout: float | None) -> bool:
        """Wait until there is something to hear, or for ``timeout`` seconds; return whether it is to stop."""
        return any(key.fileobj is self._ear for key, _ in ears.select(timeout))


def _pause(failures: int) -> float:
    """Return how many seconds to wait after so many failures in a row."""
    return min(0.1 * 2 ** min(failures, 10), AT_MOST) * random.uniform(0.5, 1) if failures else 0.0  # noqa: S311


def _direct(alias: str) -> BaseDatabaseWrapper:
    """Return a connection, not yet opened, that belongs to no pool and outlives no silent death for long."""
    connection = connections[alias].copy()
    options = {**connection.settings_dict["OPTIONS"]}
    if hints.statement(alias):
        options.pop("pool", None)
        name = options.get("application_name") or os.environ.get("PGAPPNAME") or "forgejobs"
        options = {**PATIENCE, **options, "application_name": f"{name[:56]} listen"}
    connection.settings_dict |= {"OPTIONS": options, "AUTOCOMMIT": True}
    return connection


def _listen_directly(driver: Any, alias: str | None) -> None:
    line = getattr(driver, "pgconn", None)
    if line is None:
        raise CannotListen(f'database "{alias}" is not reached by psycopg 3.')
    (backend,) = driver.execute("SELECT pg_backend_pid()").fetchone()
    if backend != line.backend_pid:
        # A pooler: whom LISTEN reaches there is not who talks to us a statement later.
        raise CannotListen(
            f'database "{alias}" is reached through a pooler. Name an alias that goes to the server itself '
            "in FORGEJOBS['LISTEN_DATABASE'], or None to do without."
        )
    driver.execute("SET idle_session_timeout = 0")
    driver.execute(f"LISTEN {hints.CHANNEL}")
