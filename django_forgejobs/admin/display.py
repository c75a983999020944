"""What a row's values look like on a page. All text is escaped: rows hold whatever somebody put there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html
from django.utils.timesince import timesince
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_forgejobs.fields import Unreadable

NONE = "-"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: Characters of one value that a page shows.
LONGEST = 200_000

EVENTS = {
    "retry": _("failed, to be retried"),
    "bury": _("dead"),
    "fail": _("failed"),
    "release": _("given back"),
    "snooze": _("snoozed"),
    "reclaim": _("worker died"),
    "cancel": _("cancelled"),
    "requeue": _("requeued"),
    "run_now": _("run now"),
    "omitted": _("left out"),
}


def span(earlier: datetime, later: datetime, *, depth: int = 1) -> str:
    """Return the time between two instants in words: ``3 minutes``."""
    seconds = int((later - earlier).total_seconds())
    if seconds < 60:
        return ngettext("%(count)d second", "%(count)d seconds", seconds) % {"count": seconds}
    return timesince(earlier, later, depth=depth)


def in_words(seconds: float) -> str:
    """Return a number of seconds in words: ``3 minutes``."""
    return span(_EPOCH, _EPOCH + timedelta(seconds=seconds))


def seconds_ago(seconds: float) -> str:
    """Return ``3 minutes ago``."""
    return gettext("%(span)s ago") % {"span": in_words(seconds)}


def distance(instant: datetime, now: datetime) -> str:
    """Return ``in 3 minutes`` or ``3 minutes ago``."""
    if instant > now:
        return gettext("in %(span)s") % {"span": span(now, instant)}
    return gettext("%(span)s ago") % {"span": span(instant, now)}


def moment(instant: datetime, text: str) -> str:
    """Return ``text`` marked up as ``instant``, which shows when pointed at."""
    return format_html('<time datetime="{}" title="{}">{}</time>', instant.isoformat(), local(instant), text)


def local(instant: datetime) -> str:
    """Return the instant to the second in the current time zone, which is named."""
    return timezone.localtime(instant).strftime("%Y-%m-%d %H:%M:%S %Z")


def when(instant: datetime | None, now: datetime) -> str:
    """Return the instant and how far from ``now`` it is."""
    if instant is None:
        return NONE
    return format_html(
        '<time datetime="{}">{}</time> ({})', instant.isoformat(), local(instant), distance(instant, now)
    )


def line(text: str, limit: int = 100) -> str:
    """Return the beginning of ``text`` on one line."""
    words = " ".join(text.split())
    return words if len(words) <= limit else words[: limit - 1] + "…"


def indented(value: Any) -> str:
    """Return indented JSON, lone surrogates escaped (SQLite has them); words for what cannot be read."""
    if isinstance(value, Unreadable):
        return gettext("It cannot be read: %(problem)s") % {"problem": value.problem}
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def pretty(value: Any) -> str:
    """Return the same, cut at ``LONGEST`` characters."""
    text = indented(value)
    if len(text) <= LONGEST:
        return text
    cut = gettext("… %(count)s more characters") % {"count": f"{len(text) - LONGEST:,}"}
    return f"{text[:LONGEST]}\n{cut}"


def history(entries: Any, now: datetime) -> Iterator[dict[str, Any]]:
    """Yield the lines of the history table; what is no entry of ours is shown as it is."""
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, Mapping):
            yield {"event": "?", "text": pretty(entry)}
            continue
        event = str(entry.get("event", "?"))
        yield {
            "when": _when(entry.get("at"), now),
            "event": EVENTS.get(event, event),
            "claim": entry.get("claim", NONE),
            "worker": entry.get("worker") or NONE,
            "text": _told(entry),
            "traceback": str(entry.get("traceback") or ""),
        }


def _told(entry: Mapping[str, Any]) -> str:
    parts = [entry.get("message") or entry.get("error"), entry.get("reason")]
    if by := entry.get("by"):
        parts.append(gettext("by %(who)s") % {"who": by})
    if isinstance(count := entry.get("count"), int):
        parts.append(ngettext("%(count)d entry", "%(count)d entries", count) % {"count": count})
    return " · ".join(str(part) for part in parts if part)


def _when(text: Any, now: datetime) -> str:
    try:
        instant = parse_datetime(str(text))
    except ValueError:
        instant = None
    if instant is None:
        return str(text or NONE)
    return when(instant if timezone.is_aware(instant) else timezone.make_aware(instant), now)
