"""What every part of a run is given."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.benchmarks.machine import BenchmarkError, Machine
from tests.benchmarks.queues import Queue, queue
from tests.benchmarks.report import Report


@dataclass
class Bench:
    """The machine, where results go, and how much is wanted: ``full``, a look, or ``tiny``, to see it run."""

    machine: Machine
    report: Report
    full: bool = False
    tiny: bool = False
    peers: bool = True
    flags: tuple[str, ...] = ()
    used: dict[str, Queue] = field(default_factory=dict)

    @property
    def ours(self) -> Queue:
        return self.take("ours")

    def take(self, name: str) -> Queue:
        """Return one of our own adapters."""
        return self.used.setdefault(name, queue(name))

    def peer(self, name: str) -> Queue | None:
        """Return a peer, or None when it is not installed or not wanted, said once."""
        if not self.peers:
            return None
        found = queue(name)
        if found.missing:
            self.report.note(found.missing)
            return None
        return self.used.setdefault(name, found)

    def size(self, full: int, look: int, tiny: int = 0) -> int:
        """Return how much of something is measured."""
        return full if self.full else tiny if self.tiny and tiny else look


__all__ = ["Bench", "BenchmarkError"]
