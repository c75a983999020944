"""What may be stored as JSON, written so that both databases give it back equal; and how any text is
made storable.

PostgreSQL's jsonb refuses NUL, lone surrogates and NaN where SQLite takes them, and reads 1.2345e25 as
an integer: what is refused or written here is so on both, so that a test on SQLite does not lie.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any, NoReturn

from django_forgejobs.exceptions import JobError

MAX_DEPTH = 100
_MAX_INT_DIGITS = 4000
_MAX_INT = 10**_MAX_INT_DIGITS


def dumps(value: Any, *, name: str = "payload", max_bytes: int | None = None) -> str:
    """Return ``value`` as strict JSON text.

    Raises ``JobError`` that names the path of the first bad value, as in ``payload["to"][2]``, and the
    remedy; or says that the text is longer than ``max_bytes``. Tuples become lists.
    """
    # Nearly every payload is plain: a look and the encoder in C take a quarter of the time of `_write`, which
    # decides, and words, all else.
    longest = _PLAIN_BYTES if max_bytes is None else max_bytes
    if _is_plain(value, longest):
        text = _plain.encode(value)
        if "\\u0000" not in text and _is_short(text, longest):
            return text
    return written(value, name=name, max_bytes=max_bytes)


def written(value: Any, *, name: str = "payload", max_bytes: int | None = None) -> str:
    """Do what ``dumps`` does, for any value: one part after the other, each with its path at hand."""
    text = _Text(name, max_bytes)
    _write(value, name, 0, text.append)
    return text.read()


class _Text:
    """Text in the making, which stops growing when it is too long: a small list of itself, nested 40 times,
    would be a terabyte.
    """

    def __init__(self, name: str, max_bytes: int | None) -> None:
        self.name, self.max_bytes = name, max_bytes
        self.parts: list[str] = []
        self.characters = 0

    def append(self, part: str) -> None:
        self.parts.append(part)
        self.characters += len(part)
        if self.max_bytes is not None and self.characters > self.max_bytes:
            self.refuse("more than")

    def read(self) -> str:
        text = "".join(self.parts)
        if self.max_bytes is not None and (size := len(text.encode())) > self.max_bytes:
            self.refuse(f"{size:,} bytes of JSON, more than")
        return text

    def refuse(self, size: str) -> NoReturn:
        raise JobError(
            f"{self.name} is {size} PAYLOAD_MAX_BYTES ({self.max_bytes:,}) allows. Store the data elsewhere "
            "and pass its key, or raise FORGEJOBS['PAYLOAD_MAX_BYTES']."
        )


def _is_plain(value: Any, longest: int) -> bool:
    """Return whether the encoder in C writes ``value`` as ``_write`` would, but for NUL and lone surrogates.

    Level by level, and no further than text of ``longest`` characters could reach: a value that is huge as
    text, or holds itself, is not walked to its end.
    """
    level: list[Collection[Any]] = [(value,)]
    size = 0
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Collection[Any]] = []
        for items in level:
            size += len(items)
            if size > longest:
                return False
            for item in items:
                kind = type(item)
                if kind is str:
                    size += len(item)
                elif kind is int:
                    if not -(2**63) < item < 2**63:
                        return False
                elif kind is dict:
                    if not _only_str(map(type, item)):
                        return False
                    size += sum(map(len, item))
                    deeper.append(item.values())
                elif kind is list or kind is tuple:
                    deeper.append(item)
                elif kind is float:
                    # Within these Python writes no exponent; nan is within nothing.
                    if not (1e-4 <= abs(item) < 1e16 or item == 0):
                        return False
                elif item is not None and kind is not bool:
                    return False
        if not deeper:
            return True
        level = deeper
    return False


def _is_short(text: str, longest: int) -> bool:
    try:
        return len(text if text.isascii() else text.encode()) <= longest
    except UnicodeEncodeError:  # a lone surrogate
        return False


_only_str = frozenset({str}).issuperset
_plain = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))

#: Up to this size a value is looked at as a plain one, where its text may have any.
_PLAIN_BYTES = 1024 * 1024


class StrictEncoder(json.JSONEncoder):
    """The encoder of the JSON columns: a row saved by ORM or admin obeys the same rules."""

    def encode(self, o: Any) -> str:
        """Return strict JSON text, or raise ``JobError``."""
        return dumps(o, name="value")


def _write(value: Any, path: str, depth: int, write: Any) -> None:
    # Exact types: a subclass (an enum, a SafeString, a QueryDict) would come back as something else.
    kind = type(value)
    if kind is str:
        write(encode_basestring(check_text(value, path)))
    elif value is None:
        write("null")
    elif kind is bool:
        write("true" if value else "false")
    elif kind is int:
        write(_integer(value, path))
    elif kind is float:
        write(_float(value, path))
    elif depth >= MAX_DEPTH and kind in (dict, list, tuple):
        raise JobError(f"{path} is nested deeper than {MAX_DEPTH} levels; flatten it.")
    elif kind is dict:
        _write_object(value, path, depth, write)
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            write("," if index else "[")
            _write(item, f"{path}[{index}]", depth + 1, write)
        write("]" if value else "[]")
    else:
        raise JobError(
            f"{path} is {kind.__module__}.{kind.__qualname__}, which JSON cannot give back as it was. "
            "Convert it first: str(…), int(…), list(…), .isoformat() or its primary key."
        )


def _write_object(value: dict[Any, Any], path: str, depth: int, write: Any) -> None:
    for index, (key, item) in enumerate(value.items()):
        if type(key) is not str:
            raise JobError(
                f"{path} has the key {in_words(key)} ({type(key).__name__}); JSON keys are strings. "
                "Convert it with str(…), or pass a list of pairs."
            )
        write("," if index else "{")
        write(encode_basestring(check_text(key, f"a key of {path}")))
        write(":")
        _write(item, f"{path}[{_shown(key)}]", depth + 1, write)
    write("}" if value else "{}")


def _integer(value: int, path: str) -> str:
    if not -_MAX_INT < value < _MAX_INT:
        raise JobError(f"{path} is an integer of more than {_MAX_INT_DIGITS:,} digits; pass it as a string.")
    return int.__repr__(value)


def _float(value: float, path: str) -> str:
    if not math.isfinite(value):
        raise JobError(f"{path} is {value!r}, which JSON does not have. Pass None or a string.")
    text = float.__repr__(value)
    if "e" in text:
        text = format(Decimal(text), "f")
    return text if "." in text else text + ".0"


def check_text(text: str, path: str) -> str:
    """Return ``text``; raise ``JobError`` when a database would refuse it (NUL, lone surrogate)."""
    if "\0" in text:
        raise JobError(f"{path} contains a NUL character, which PostgreSQL cannot store. Remove it.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JobError(
            f"{path} contains a lone surrogate ({text[error.start]!a}), as os.fsdecode() makes them of "
            "undecodable bytes. Encode it (base64) or replace it."
        ) from None
    return text


def check_name(what: str, value: Any, longest: int) -> None:
    """Raise ``JobError`` unless ``value`` is text of 1 to ``longest`` characters that can be stored."""
    if type(value) is not str:
        kind = type(value).__name__
        raise JobError(
            f"{what}={in_words(value)} is of type {kind}, not a plain string; pass one, as str(…) makes it."
        )
    if not value:
        raise JobError(f"{what} is empty; name it.")
    check_text(value, what)
    if len(value) > longest:
        raise JobError(f"{what}={value[:40]!r}… is {len(value)} characters, more than {longest}. Shorten it.")


def check_label(what: str, value: Any, longest: int) -> None:
    """Raise ``JobError`` unless ``value`` is such a name, and one that a log line and a command can show."""
    if not (type(value) is str and value.isascii() and value.isprintable() and 0 < len(value) <= longest):
        check_name(what, value, longest)
    if not value.isprintable() or value != value.strip() or (what == "queue" and "," in value):
        comma = ", commas" if what == "queue" else ""  # runworker --queues a,b
        raise JobError(
            f"{what}={in_words(value)} has line breaks, control characters{comma} or blanks at an end. "
            "Choose a plain name."
        )


def check_whole(what: str, value: Any, least: int, most: int) -> None:
    """Raise ``JobError`` unless ``value`` is a whole number from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise JobError(f"{what}={in_words(value)} is not a whole number from {least} to {most}.")


def storable(text: str, limit: int) -> str:
    """Return ``text`` made fit for any text or JSON column: never raises, at most ``limit`` characters.

    What is too long keeps its head and its tail and says how much is missing.
    """
    if len(text) > limit:
        cut = f" … [{len(text) - limit:,} characters cut] … "
        keep = max(limit - len(cut), 2)
        text = text[: keep - keep // 3] + cut + text[len(text) - keep // 3 :]
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def in_words(value: object) -> str:
    """Return ``repr(value)`` for a message: bounded and storable, also if ``repr`` raises."""
    try:
        text = repr(value)
    except BaseException as error:
        text = f"<a {type(value).__name__} whose repr raises {type(error).__name__}>"
    return storable(text, 200)


def _shown(key: str) -> str:
    return json.dumps(key if len(key) <= 40 else key[:40] + "…", ensure_ascii=False)
