"""What a page of the documentation shows, taken out of it so that tests can run it."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from django_forgejobs import registry, schedules

CHECKOUT = Path(__file__).resolve().parent.parent


class Page:
    """A page in Markdown, by its path in the checkout."""

    def __init__(self, path: str) -> None:
        self.path = CHECKOUT / path
        self.text = self.path.read_text(encoding="utf-8")

    def blocks(self, language: str) -> list[str]:
        """Return the code blocks of a language, also those in lists, without their indentation."""
        found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", self.text, re.MULTILINE | re.DOTALL)
        return [textwrap.dedent(text) for _, text in found]

    def commands(self) -> list[str]:
        """Return what follows `python manage.py`, in sentences and in blocks."""
        inline = re.findall(r"`python manage\.py ([^`]+)`", self.text)
        lines = [
            line for kind in ("sh", "console") for text in self.blocks(kind) for line in text.splitlines()
        ]
        shown = [line.removeprefix("$ ").split("  #")[0].strip() for line in lines]
        start = "python manage.py "
        return inline + [line.removeprefix(start) for line in shown if line.startswith(start)]

    def table(self, first: str) -> list[list[str]]:
        """Return the cells of the table whose first heading is `first`, row by row."""
        _, _, rest = self.text.partition(f"\n| {first} |")
        lines = rest.partition("\n\n")[0].splitlines()[2:]
        return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]

    def broken_links(self) -> list[str]:
        """Return the links to files and headings of ours that are not there."""
        links = [link for link in re.findall(r"\]\(([^)]+)\)", self.text) if "://" not in link]
        assert links, f"{self.path} has no link"
        return [link for link in links if not self._leads_somewhere(link)]

    def _leads_somewhere(self, link: str) -> bool:
        path, _, heading = link.partition("#")
        target = self.path.parent / path if path else self.path
        return target.is_file() and (not heading or heading in _headings(target.read_text(encoding="utf-8")))


def _headings(text: str) -> set[str]:
    """Return the addresses that headings have on the web: in lower case, words joined by hyphens."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def run(text: str, **names: Any) -> dict[str, Any]:
    """Run a block; return the names it has defined."""
    names |= {"BASE_DIR": CHECKOUT}
    exec(compile(text, "a block of the documentation", "exec"), names)
    return names


@contextmanager
def package(page: Page, name: str, directory: Path) -> Iterator[None]:
    """Make the blocks that name a file of a package importable, and forget what they have registered."""
    folder = directory / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    for text in page.blocks("python"):
        if file := re.match(rf"# {name}/(\w+\.py)(, further down)?\n", text):
            with (folder / file[1]).open("a", encoding="utf-8") as module:
                module.write(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setattr(registry, "_definitions", dict(registry._definitions))
        patch.setattr(schedules, "_decorated", dict(schedules._decorated))
        yield
    for imported in [one for one in sys.modules if one.split(".")[0] == name]:
        del sys.modules[imported]
