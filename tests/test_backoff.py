"""Seconds until the next attempt: capped, finite and fair whatever the numbers."""

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_forgejobs.backoff import delay
from django_forgejobs.conf import Backoff

ERROR = ValueError("no")
STEADY = Backoff(base=1, factor=2, cap=3600, jitter=0)

numbers = st.floats(min_value=0, max_value=1e9)
policies = st.builds(
    lambda base, factor, cap, jitter: Backoff(base, factor, max(base, cap), jitter),
    numbers,
    st.floats(min_value=1, max_value=1e9),
    numbers,
    st.floats(min_value=0, max_value=1),
)


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 1), (2, 2), (3, 4), (12, 2048), (13, 3600), (14, 3600)])
def test_the_delay_doubles_up_to_the_cap(attempt: int, seconds: float) -> None:
    assert delay(STEADY, attempt, ERROR, fallback=Backoff()) == pytest.approx(seconds)


@pytest.mark.parametrize("attempt", [46, 47, 63, 64, 1024, 1999, 2**31 - 1])
def test_a_late_attempt_waits_for_the_cap_and_overflows_nothing(attempt: int) -> None:
    assert delay(STEADY, attempt, ERROR, fallback=Backoff()) == 3600


@settings(deadline=None)
@given(policies, st.integers(min_value=0, max_value=2**31 - 1))
def test_every_delay_is_between_nothing_and_the_cap(policy: Backoff, attempt: int) -> None:
    assert 0 <= delay(policy, attempt, ERROR, fallback=Backoff()) <= policy.cap


def test_jitter_spreads_over_its_share_of_the_delay() -> None:
    half = Backoff(base=100, factor=1, cap=100, jitter=0.5)
    drawn = [delay(half, 1, ERROR, fallback=half) for _ in range(500)]
    assert min(drawn) >= 50
    assert max(drawn) <= 100
    assert max(drawn) - min(drawn) > 30


def test_a_base_of_nothing_retries_at_once() -> None:
    policy = Backoff(base=0, factor=2, cap=0, jitter=0.5)
    assert delay(policy, 50, ERROR, fallback=Backoff()) == 0


def test_a_number_is_a_constant_delay() -> None:
    assert delay(7.5, 1, ERROR, fallback=STEADY) == delay(7.5, 90, ERROR, fallback=STEADY) == 7.5


def test_a_callable_is_given_the_attempt_and_the_error() -> None:
    seen = []

    def policy(attempt: int, error: BaseException) -> float:
        seen.append((attempt, error))
        return 3

    assert delay(policy, 4, ERROR, fallback=STEADY) == 3
    assert seen == [(4, ERROR)]


def test_a_callable_may_answer_with_a_timedelta() -> None:
    answer: Any = timedelta(minutes=2)
    assert delay(lambda attempt, error: answer, 1, ERROR, fallback=STEADY) == 120


@pytest.mark.parametrize(
    "answer", [None, "5", -1, math.nan, math.inf, 10**400, True, timedelta(days=-1), 1e12]
)
def test_a_callable_that_answers_nonsense_is_logged_and_the_default_is_used(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert delay(lambda attempt, error: answer, 3, ERROR, fallback=STEADY) == 4
    assert "backoff callable failed on attempt 3" in caplog.text


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_a_callable_that_raises_is_logged_and_the_default_is_used(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(attempt: int, error: BaseException) -> float:
        raise kind

    assert delay(broken, 3, ERROR, fallback=STEADY) == 4
    assert kind.__name__ in caplog.text
