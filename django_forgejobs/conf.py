"""The one setting, ``FORGEJOBS``, as a frozen dataclass. ``checks`` reports what is wrong with it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from django_forgejobs.states import Status


@dataclass(frozen=True)
class Backoff:
    """Exponential delays in seconds: ``base * factor ** (attempt - 1)``, capped, jittered.

    ``jitter`` is the share of the delay that chance decides: 0 is none, 0.5 (half) draws from the
    upper half of it, 1 from all of it. ``ValueError`` for numbers that make no sense.
    """

    base: float = 5.0
    factor: float = 2.0
    cap: float = 3600.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        for one in fields(self):
            try:
                number = seconds(getattr(self, one.name), what="a number")
            except ValueError as error:
                raise ValueError(f"{one.name}: {error}") from None
            object.__setattr__(self, one.name, number)
        if self.factor < 1:
            raise ValueError("factor must be 1 or more")
        if self.cap < self.base:
            raise ValueError(f"cap {self.cap:g} is below base {self.base:g}")
        if self.jitter > 1:
            raise ValueError("jitter is a share between 0 and 1")


RETENTION_DEFAULT: Mapping[str, float | None] = {
    Status.DONE.value: 7 * 86400.0,
    Status.CANCELLED.value: 7 * 86400.0,
    Status.FAILED.value: None,
    Status.DEAD.value: None,
}


@dataclass(frozen=True)
class Settings:
    """``FORGEJOBS`` with its defaults; seconds unless said."""

    DATABASE: str = "default"
    LISTEN_DATABASE: str | None = ""
    LEASE: float = 900.0
    HEARTBEAT: float = 0.0
    POLL_INTERVAL: float = 1.0
    RECLAIM_INTERVAL: float = 60.0
    GRACE: float = 25.0
    TIMEOUT_MARGIN: float = 10.0
    SUSPECT_PATIENCE: float = 10.0
    DEFAULT_MAX_ATTEMPTS: int = 1
    MAX_LEASE_EXPIRATIONS: int = 3
    UNKNOWN_TYPE_GRACE: float = 900.0
    PAYLOAD_MAX_BYTES: int = 1024 * 1024
    BACKOFF: Backoff = field(default_factory=Backoff)
    RETENTION: Mapping[str, float | None] = field(default_factory=lambda: dict(RETENTION_DEFAULT))
    SCHEDULES: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def current() -> Settings:
    """Return the settings of now; raise ``ImproperlyConfigured`` with every problem found."""
    return _load()


def problems() -> list[str]:
    """Return what is wrong with ``FORGEJOBS``, a sentence each; empty when it is sound."""
    return _parse(getattr(settings, "FORGEJOBS", {}))[1]


@lru_cache(maxsize=1)
def _load() -> Settings:
    parsed, wrong = _parse(getattr(settings, "FORGEJOBS", {}))
    if wrong:
        raise ImproperlyConfigured(" ".join(wrong))
    return parsed


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "FORGEJOBS":
        _load.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_forgejobs.conf")


def _parse(raw: Any) -> tuple[Settings, list[str]]:
    if not isinstance(raw, Mapping):
        return Settings(), [f"FORGEJOBS must be a dict, not {raw!r}."]
    wrong: list[str] = []
    values: dict[str, Any] = {}
    for key, value in raw.items():
        read = _READERS.get(key)
        if read is None:
            wrong.append(f"FORGEJOBS[{key!r}] is not a setting.{did_you_mean(key, _READERS)}")
            continue
        try:
            values[key] = read(value)
        except ValueError as error:
            wrong.append(f"FORGEJOBS[{key!r}] = {value!r}: {error}.")
    if not values.get("HEARTBEAT"):
        values["HEARTBEAT"] = min(values.get("LEASE", Settings.LEASE) / 3, 60.0)
    values.setdefault("LISTEN_DATABASE", values.get("DATABASE", Settings.DATABASE))
    loaded = Settings(**values)
    # Divided as above: three times a third of 3.1 is more than 3.1.
    if loaded.LEASE / 3 < loaded.HEARTBEAT:
        wrong.append(
            f"FORGEJOBS['LEASE'] = {loaded.LEASE:g} is shorter than three heartbeats of "
            f"{loaded.HEARTBEAT:g} s: two lost heartbeats would cost a live worker its job. Raise LEASE "
            f"to {3 * loaded.HEARTBEAT:g} or lower HEARTBEAT to {loaded.LEASE / 3:g}."
        )
    return loaded, wrong


def did_you_mean(word: object, known: Any) -> str:
    """Return a hint such as `` Did you mean 'LEASE'?``, or an empty string."""
    close = difflib.get_close_matches(str(word).upper(), [str(k).upper() for k in known], n=1)
    by_upper = {str(k).upper(): k for k in known}
    return f" Did you mean {by_upper[close[0]]!r}?" if close else ""


def seconds(value: float | timedelta, *, what: str = "a number of seconds") -> float:
    """Return ``value`` (seconds or ``timedelta``) as a finite float ≥ 0; ``ValueError`` otherwise."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"expected {what} or a timedelta")
    if value < 0:
        raise ValueError("it must not be negative")
    if value > 100 * 366 * 86400:
        raise ValueError("it is longer than a hundred years")
    return float(value)


def positive(value: Any) -> float:
    """Return ``value`` as seconds above 0; ``ValueError`` otherwise."""
    if (number := seconds(value)) == 0:
        raise ValueError("it must be more than zero")
    return number


def count(value: Any) -> int:
    """Return ``value`` if it is a whole number, 1 or more; ``ValueError`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31 - 1:
        raise ValueError("expected a whole number, 1 or more")
    return value


def _alias(value: Any) -> str:
    if not isinstance(value, str) or value not in settings.DATABASES:
        raise ValueError(f"it is not one of DATABASES ({', '.join(settings.DATABASES)})")
    return value


def _alias_or_none(value: Any) -> str | None:
    return None if value is None else _alias(value)


def backoff(value: Any) -> Backoff:
    """Return a dict of base, factor, cap and jitter as a ``Backoff``; ``ValueError`` otherwise."""
    if not isinstance(value, Mapping):
        raise ValueError("expected a dict with base, factor, cap, jitter")
    known = {f.name for f in fields(Backoff)}
    for key in value:
        if key not in known:
            raise ValueError(f"{key!r} is not one of base, factor, cap, jitter")
    return Backoff(**value)


def _retention(value: Any) -> Mapping[str, float | None]:
    if not isinstance(value, Mapping):
        raise ValueError("expected a dict of seconds (or None for never) by status")
    for status in value:
        if status not in RETENTION_DEFAULT:
            raise ValueError(f"{status!r} is not one of {', '.join(RETENTION_DEFAULT)}")
    ages = {str(k): None if age is None else seconds(age) for k, age in value.items()}
    return {**RETENTION_DEFAULT, **ages}


def _schedules(value: Any) -> Mapping[str, Mapping[str, Any]]:
    """What a schedule must be is for ``schedules`` to say."""
    if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
        raise ValueError('expected a dict of dicts by name, as {"nightly": {"cron": …, "job_type": …}}')
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "DATABASE": _alias,
    "LISTEN_DATABASE": _alias_or_none,
    "LEASE": positive,
    "HEARTBEAT": positive,
    "POLL_INTERVAL": positive,
    "RECLAIM_INTERVAL": seconds,
    "GRACE": seconds,
    "TIMEOUT_MARGIN": seconds,
    "SUSPECT_PATIENCE": seconds,
    "DEFAULT_MAX_ATTEMPTS": count,
    "MAX_LEASE_EXPIRATIONS": count,
    "UNKNOWN_TYPE_GRACE": seconds,
    "PAYLOAD_MAX_BYTES": count,
    "BACKOFF": backoff,
    "RETENTION": _retention,
    "SCHEDULES": _schedules,
}
