"""Seconds until the next attempt."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import TypeAlias

from django_forgejobs.conf import Backoff, seconds

logger = logging.getLogger("django_forgejobs")

#: A type's policy: exponential, constant seconds, or a callable of (attempt, error) → seconds.
Policy: TypeAlias = Backoff | float | Callable[[int, BaseException], float]

_LONGEST = 100 * 366 * 86400.0


def delay(policy: Policy, attempt: int, error: BaseException, *, fallback: Backoff) -> float:
    """Return the seconds to wait after ``attempt`` (1 is the first) failed with ``error``.

    Always finite and within ``[0, cap]``. A callable that raises, or answers something that is no
    number of seconds, is logged and ``fallback`` is used: a bug in a policy must not lose a retry.
    """
    if isinstance(policy, Backoff):
        return _exponential(policy, attempt)
    if not callable(policy):
        return seconds(policy)
    try:
        return seconds(policy(attempt, error))
    except BaseException:  # user code, like a handler: SystemExit out of it must not lose a retry
        logger.exception("A backoff callable failed on attempt %s; the default is used.", attempt)
        return _exponential(fallback, attempt)


def _exponential(policy: Backoff, attempt: int) -> float:
    # In logarithms, so that attempt 2,000 does not overflow before the cap applies.
    if policy.base <= 0:
        return 0.0
    cap = min(policy.cap, _LONGEST)
    exponent = math.log(policy.base) + (max(attempt, 1) - 1) * math.log(policy.factor)
    full = cap if exponent >= math.log(max(cap, 1e-9)) else math.exp(exponent)
    full = min(full, cap)
    return full - random.random() * policy.jitter * full  # noqa: S311 (spread, not secrecy)
