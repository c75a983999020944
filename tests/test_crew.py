"""What is claimed next, where a worker has hands of two kinds."""

from typing import Any

import pytest

from django_forgejobs import registry
from django_forgejobs.crew import Crew, Errands


def sync(payload: Any) -> None: ...


async def coroutine(payload: Any) -> None: ...


def crews(threads: int, coroutines: int) -> tuple[Crew, Crew]:
    return Crew(None, threads), Crew(None, coroutines)  # type: ignore[arg-type] # nothing is handed out


def errands(threads: Crew, coroutines: Crew, **handlers: Any) -> Errands:
    definitions = registry.definitions(handlers or {"sync": sync, "async": coroutine})
    return Errands(definitions, None, threads=threads, coroutines=coroutines, db="default")


def test_without_coroutines_the_threads_alone_decide() -> None:
    threads, coroutines = crews(4, 1)
    both = errands(threads, coroutines, sync=sync)
    assert (both.next().types, both.next().room, both.next().free) == (None, 4, 4)
    both.done(both.whole, full=True)
    assert both.next() is both.whole


def test_a_claim_of_both_kinds_brings_no_more_than_either_could_start() -> None:
    threads, coroutines = crews(2, 9)
    assert errands(threads, coroutines).next().room == 2
    threads.stuck = 1
    assert errands(threads, coroutines).next().room == 1


def test_the_kind_with_far_more_room_is_claimed_alone_until_it_brings_less() -> None:
    both = errands(*crews(1, 100))
    assert both.done(both.whole, full=True)
    assert (both.next().types, both.next().room) == (("async",), 100)
    assert both.done(both.next(), full=True)
    assert both.next().types == ("async",)
    assert both.done(both.next(), full=False), "of the others nobody has asked"
    assert both.next() is both.whole
    assert not both.done(both.whole, full=False)


def test_neither_kind_is_claimed_alone_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_forgejobs.crew.TURN", -1)
    both = errands(*crews(1, 100))
    both.done(both.whole, full=True)
    assert both.next() is both.whole


@pytest.mark.parametrize(("full", "left"), [("threads", "async"), ("coroutines", "sync")])
def test_what_one_kind_has_no_hands_for_is_not_claimed(full: str, left: str) -> None:
    threads, coroutines = crews(3, 3)
    crew = threads if full == "threads" else coroutines
    crew.busy = 3
    both = errands(threads, coroutines)
    assert both.next().types == (left,)
    assert not both.done(both.next(), full=False), "there is room for nothing else"


def test_a_blocked_loop_is_given_nothing_more() -> None:
    threads, coroutines = crews(1, 3)
    coroutines.blocked = True
    assert errands(threads, coroutines).next().types == ("sync",)
    assert errands(threads, coroutines, only=coroutine).next().room == 0
