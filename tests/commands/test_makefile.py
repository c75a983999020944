"""`make test` runs both halves and says which failed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes.harness import CHECKOUT

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")

#: Stands for Python: tells of each half of the tests, and fails in those that $FAILING names.
PYTHON = """#!/bin/sh
case "$*" in
    *--check) exit 0 ;;
    *testproject.postgres*) half=embedded ;;
    *) half=${DATABASE_URL:-sqlite} ;;
esac
echo "half: $half"
case " $FAILING " in *" $half "*) exit 1 ;; esac
"""


def make_test(directory: Path, *arguments: str, failing: str) -> tuple[int, list[str], str]:
    """Run `make test` on a checkout that is installed; return exit code, halves that ran, and stderr."""
    shutil.copy(CHECKOUT / "Makefile", directory)
    python = directory / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (directory / ".venv").mkdir()
    for name in ("pyproject.toml", ".venv/.created", ".venv/.installed"):
        (directory / name).touch()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DATABASE_URL", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    done = subprocess.run(
        ["make", "test", f"PYTHON={python}", *arguments],
        cwd=directory,
        env=environment | {"FAILING": failing},
        capture_output=True,
        text=True,
        timeout=60,
    )
    halves = [line.removeprefix("half: ") for line in done.stdout.splitlines() if line.startswith("half: ")]
    return done.returncode, halves, done.stderr


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        ("", ""),
        ("embedded", "failed on: postgresql\n"),
        ("sqlite", "failed on: sqlite\n"),
        ("embedded sqlite", "failed on: postgresql sqlite\n"),
    ],
)
def test_each_half_of_the_tests_runs_and_one_that_failed_is_named(
    tmp_path: Path, failing: str, told: str
) -> None:
    code, halves, errors = make_test(tmp_path, failing=failing)
    assert halves == ["embedded", "sqlite"]
    assert (code != 0) == bool(told)
    assert told in errors
    assert ("failed on" in errors) == bool(told)


def test_a_server_of_ones_own_takes_the_place_of_the_embedded_one(tmp_path: Path) -> None:
    url = "postgresql://somewhere/else"
    code, halves, errors = make_test(tmp_path, f"DATABASE_URL={url}", failing=url)
    assert halves == [url, "sqlite"]
    assert code != 0
    assert "failed on: postgresql\n" in errors
