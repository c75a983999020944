"""How the demo speaks: with the time since its start, in colour and with signs where there are any."""

from __future__ import annotations

import os
import sys
import textwrap
import time

_PLAIN = str.maketrans({"✓": "ok", "✗": "WRONG", "→": "->", "…": "..."})
_COLOURS = {"title": "1;36", "good": "32", "bad": "1;31", "dim": "2"}
_INDENT = " " * 9


class Narrator:
    """Prints to stdout; each line goes out at once, so that a pipe shows it too."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.colour = (
            sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        )
        try:
            "✓✗→…".encode(sys.stdout.encoding or "ascii")
            self.signs = True
        except UnicodeEncodeError:
            self.signs = False

    def title(self, text: str) -> None:
        """Begin a part of the story."""
        self._print("\n" + self._in(text, "title"))

    def say(self, text: str) -> None:
        """Tell what has just happened, with the seconds since the start."""
        seconds = time.monotonic() - self.began
        lines = textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)
        self._print(self._in(f"{seconds:5.1f} s  ", "dim") + f"\n{_INDENT}".join(lines))

    def show(self, text: str = "") -> None:
        """Print lines as they are, below what was said."""
        self._print(textwrap.indent(text, _INDENT))

    def check(self, ok: bool, text: str) -> None:
        """Print one finding."""
        mark = self._in("✓", "good") if ok else self._in("✗", "bad")
        lines = textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)
        self._print(f"  {mark} " + "\n    ".join(lines))

    def _in(self, text: str, colour: str) -> str:
        return f"\033[{_COLOURS[colour]}m{text}\033[0m" if self.colour else text

    def _print(self, text: str) -> None:
        if not self.signs:
            encoding = sys.stdout.encoding or "ascii"
            text = text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
        print(text, flush=True)
