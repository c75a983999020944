"""What was measured, beside what was wanted: lines while it runs, a table at the end, and JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMES = "×"  # noqa: RUF001 (the sign of multiplication is meant)


@dataclass(frozen=True)
class Figure:
    """One thing measured; ``samples`` when it is a median."""

    goal: int
    name: str
    value: float
    unit: str
    samples: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """A figure against its goal: at least ``bound``, or at most."""

    goal: int
    name: str
    value: float
    bound: float
    at_least: bool = True
    unit: str = TIMES

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {number(self.bound)} {self.unit}".rstrip()


@dataclass
class Report:
    """Collects figures and verdicts, and says each as it comes."""

    began: float = field(default_factory=time.monotonic)
    figures: list[Figure] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)

    def note(self, text: str) -> None:
        """Keep a remark for the end, once."""
        if text not in self.notes:
            self.notes.append(text)
            self.say(text)

    def figure(
        self, goal: int, name: str, values: float | Sequence[float], unit: str, note: str = ""
    ) -> float:
        """Keep a figure, the median where there are several; return it."""
        samples = tuple(values) if isinstance(values, Sequence) else ()
        value = statistics.median(samples) if samples else float(values)  # type: ignore[arg-type]
        self.figures.append(Figure(goal, name, value, unit, samples if len(samples) > 1 else (), note))
        self.say(f"{goal}  {name}: {number(value)} {unit}{_among(samples)}{f' ({note})' if note else ''}")
        return value

    def at_least(self, goal: int, name: str, value: float, bound: float, unit: str = TIMES) -> None:
        """Keep a verdict on what should be large."""
        self._judge(Verdict(goal, name, value, bound, True, unit))

    def at_most(self, goal: int, name: str, value: float, bound: float, unit: str = TIMES) -> None:
        """Keep a verdict on what should be small."""
        self._judge(Verdict(goal, name, value, bound, False, unit))

    def _judge(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self.say(
            f"{verdict.goal}  {verdict.name}: {number(verdict.value)} {verdict.unit}, "
            f"wanted {verdict.wanted}: {'met' if verdict.met else 'NOT MET'}"
        )

    def table(self) -> str:
        """Return everything as two tables."""
        lines = ["", "Goals", ""]
        lines += _columns(
            [
                (
                    str(v.goal),
                    v.name,
                    f"{number(v.value)} {v.unit}".rstrip(),
                    v.wanted,
                    "met" if v.met else "NOT MET",
                )
                for v in sorted(self.verdicts, key=lambda v: v.goal)
            ]
        )
        lines += ["", "Figures", ""]
        lines += _columns(
            [
                (str(f.goal), f.name, f"{number(f.value)} {f.unit}", _among(f.samples).strip(), f.note)
                for f in sorted(self.figures, key=lambda f: f.goal)
            ]
        )
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines)

    def write(self, path: Path, about: dict[str, Any]) -> None:
        """Write all of it as JSON."""
        verdicts = [{**dataclasses.asdict(v), "met": v.met} for v in self.verdicts]
        figures = [dataclasses.asdict(f) for f in self.figures]
        whole = {"about": about, "goals": verdicts, "figures": figures, "notes": self.notes}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


NOT_PEERS = ("django_forgejobs", "bare psycopg loop")


def markdown(written: dict[str, Any]) -> str:
    """Return what ``Report.write`` wrote as the tables of docs/performance.md."""
    about, machine = written["about"], written["about"]["machine"]
    peers = {name.removesuffix(" on SQLite"): q["version"] for name, q in about["queues"].items()}
    queues = ", ".join(f"{name} {version}" for name, version in peers.items() if name not in NOT_PEERS)
    settings = ", ".join(f"`{name} = {value}`" for name, value in machine["settings"].items())
    lines = [
        f"{about['date'][:10]}, {machine['cores']} cores ({machine['cpu']}), {machine['memory_gb']:.0f} GB, "
        f"{machine['system']}; PostgreSQL {machine['postgresql']}, Python {machine['python']}, "
        f"Django {about['django']}, psycopg {about['psycopg']}; {queues}; {settings}; load "
        f"{machine['load_at_start']:.1f} before it began; {about['seconds'] / 60:.0f} minutes.",
        "",
        "| | goal | wanted | measured | |",
        "|---|---|---|---|---|",
    ]
    for goal in sorted(written["goals"], key=lambda goal: int(goal["goal"])):
        verdict = Verdict(**{name: value for name, value in goal.items() if name != "met"})
        measured = f"{number(verdict.value)} {verdict.unit}".rstrip()
        met = "met" if verdict.met else "**not met**"
        lines.append(f"| {verdict.goal} | {verdict.name} | {verdict.wanted} | {measured} | {met} |")
    lines += ["", "| | figure | median | each time |", "|---|---|---|---|"]
    for figure in sorted(written["figures"], key=lambda figure: int(figure["goal"])):
        value = f"{number(figure['value'])} {figure['unit']}".rstrip()
        each = "; ".join(filter(None, (", ".join(map(number, figure["samples"])), figure["note"])))
        lines.append(f"| {figure['goal']} | {figure['name']} | {value} | {each} |")
    return "\n".join([*lines, *(f"\n{note.splitlines()[0]}" for note in written["notes"])])


def number(value: float) -> str:
    """Return a number as people read it: 12,345, 12.3, 1.23."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def _among(samples: Sequence[float]) -> str:
    return f" [{' '.join(number(sample) for sample in samples)}]" if len(samples) > 1 else ""


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return ["  nothing"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
