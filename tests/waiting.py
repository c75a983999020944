"""Waiting for something that another process or thread does. The only place where tests sleep."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    predicate: Callable[[], T],
    *,
    timeout: float = 15,
    message: str | Callable[[], str] = "the condition did not come true",
    interval: float = 0.02,
) -> T:
    """Call until the answer is true and return it; fail with the message after `timeout` seconds.

    The message may be a function, for what is known only at the end (a process's output).
    """
    deadline = time.monotonic() + timeout
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            text = message() if callable(message) else message
            raise AssertionError(f"After {timeout} s: {text}")
        time.sleep(interval)
    return answer
