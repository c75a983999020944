"""An exception in words: bounded, always storable, whatever its class makes of itself."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import Any

from django_forgejobs import payloads

ERROR_CHARACTERS = 2000
TRACEBACK_CHARACTERS = 4000
_FRAMES = 15  # of each end of a deep traceback
_CAUSES = 5


def class_path(error: BaseException) -> str:
    """Return ``module.Class`` of ``error``; text only, nothing is imported by it later."""
    kind = type(error)
    path = f"{kind.__module__}.{kind.__qualname__}"
    return payloads.storable(path.removeprefix("builtins."), 200)


def describe(error: BaseException) -> str:
    """Return class and message of ``error``, at most ``ERROR_CHARACTERS``, also if ``str()`` of it raises."""
    path = class_path(error)
    text = message(error, ERROR_CHARACTERS - len(path) - 2)
    return f"{path}: {text}" if text else path


def message(error: BaseException, limit: int = ERROR_CHARACTERS) -> str:
    """Return ``str(error)``, cut before anything copies it: 200 MB of it must not cost 200 MB again."""
    try:
        return payloads.storable(str(error), limit)
    except BaseException as wrong:
        return f"<its message cannot be shown: {class_path(wrong)}>"


def facts(error: BaseException) -> dict[str, Any]:
    """Return what a history entry keeps of ``error``: class path, message and traceback, all bounded."""
    try:
        text = _traceback(error)
    except Exception as wrong:  # a module's loader is asked for the source: somebody else's code
        text = f"<the traceback cannot be shown: {describe(wrong)}>"
    return {
        "error": class_path(error),
        "message": describe(error),
        "traceback": payloads.storable(text, TRACEBACK_CHARACTERS),
    }


def _traceback(error: BaseException) -> str:
    """Format the traceback and its causes without ever holding an unbounded text or a 100,000-frame list."""
    parts: deque[str] = deque()
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _CAUSES:
        seen.add(id(link))
        members = [_shown(member) for member in islice(_members(link), _CAUSES)]
        parts.appendleft("\nholds\n\n".join([_shown(link), *members]))
        cause = link.__cause__
        link = cause if cause is not None or link.__suppress_context__ else link.__context__
    if link is not None and id(link) not in seen:
        parts.appendleft("… earlier causes are left out …\n")
    return "\ncaused\n\n".join(parts)


def _shown(error: BaseException) -> str:
    return f"{_frames(error.__traceback__)}{describe(error)}\n"


def _members(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group and of the groups in it."""
    groups = deque([error] if isinstance(error, BaseExceptionGroup) else [])
    while groups:
        for member in groups.popleft().exceptions:
            if isinstance(member, BaseExceptionGroup):
                groups.append(member)
            else:
                yield member


def _frames(tb: TracebackType | None) -> str:
    head: list[Any] = []
    tail: deque[Any] = deque(maxlen=_FRAMES)
    count = 0
    while tb is not None:
        (head.append if len(head) < _FRAMES else tail.append)((tb.tb_frame, tb.tb_lineno))
        count += 1
        tb = tb.tb_next
    lines = traceback.format_list(traceback.StackSummary.extract(iter(head)))
    if hidden := count - len(head) - len(tail):
        lines.append(f"  … {hidden:,} frames more …\n")
    return "".join(lines + traceback.format_list(traceback.StackSummary.extract(iter(tail))))
