"""One adapter for each queue: how its tables are made, jobs put in by its fastest way, its worker started.

An adapter can be imported without its queue. It has ``QUEUE``, ``prepare()``, ``enqueue(load)`` and, where
its latency is measured, ``trickle(load, moments)``; these run in a process of their own (``__main__``), whose
environment names the database: DATABASE_URL for Django, PGHOST and so on for the others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PYTHON = (sys.executable, "-m")


@dataclass(frozen=True)
class Load:
    """Jobs numbered from ``first``: spread over ``queues`` and ``priorities`` by their number.

    One queue is the default one; more are called q0, q1 and so on. ``keyed``: each with a key of its own;
    ``urgent`` is added to all priorities.
    """

    count: int
    first: int = 0
    queues: int = 1
    priorities: int = 1
    keyed: bool = False
    urgent: int = 0

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)

    def queue(self, number: int) -> str:
        return "default" if self.queues == 1 else f"q{number % self.queues}"

    def priority(self, number: int) -> int:
        return number % self.priorities + self.urgent

    @property
    def names(self) -> list[str]:
        return sorted({self.queue(number) for number in range(self.queues)})


@dataclass(frozen=True)
class Queue:
    """A queue that takes part. ``worker`` returns a command; ``open_jobs`` is SQL that counts what is due.

    ``finishes`` is SQL that counts the statements that finished jobs, where the tables tell.
    """

    name: str
    module: str
    worker: Callable[[Load], tuple[str, ...]]
    open_jobs: str
    distribution: str
    needs: tuple[str, ...] = ()
    settings: str = ""
    finishes: str = ""
    sqlite: bool = False
    stop: int = signal.SIGTERM
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """What to tell of a queue that is not installed; empty when it is."""
        if all(importlib.util.find_spec(name) for name in self.needs):
            return ""
        return (
            f"{self.name} is left out: it is not installed (pip install --group bench; Python 3.12 or later)."
        )

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.distribution)


def queue(name: str) -> Queue:
    """Return the adapter of that module name."""
    found: Queue = importlib.import_module(f"{__name__}.{name}").QUEUE
    return found
