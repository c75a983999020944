"""Suspects get their turn on a busy worker, and cost it a bounded share of its slots."""

import pytest

from django_forgejobs import turns
from django_forgejobs.lanes import Suspects
from django_forgejobs.turns import Apart, Turns


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns, "time", clock)
    return clock


def shares(turn: Turns, clock: Clock, seconds: int) -> list[bool]:
    """Return, second by second, whether the worker makes room."""
    answers = []
    for _ in range(seconds):
        answers.append(turn.makes_room())
        clock.now += 1
    return answers


def test_an_idle_worker_takes_suspects_for_a_while_and_others_in_turn(clock: Clock) -> None:
    turn = Turns(10, lambda: True)
    for _ in range(2):
        for _ in range(3):
            assert turn.idle() is Suspects.FIRST
            turn.started(suspect=True)
            clock.now += 0.6
        assert turn.idle() is Suspects.FIRST
        turn.started(suspect=True)
        clock.now += 0.6
        assert turn.idle() is Suspects.LAST
        turn.started(suspect=False)


def test_an_idle_worker_that_found_no_suspect_does_not_look_again_at_once(clock: Clock) -> None:
    turn = Turns(10, lambda: True)
    turn.looked(turn.idle(), found=True)
    assert turn.idle() is Suspects.FIRST
    turn.looked(turn.idle(), found=False)
    assert turn.idle() is Suspects.NEVER
    clock.now += 1
    assert turn.idle() is Suspects.FIRST


def test_a_busy_worker_makes_room_only_when_a_suspect_has_waited(clock: Clock) -> None:
    assert not any(shares(Turns(10, lambda: False), clock, 60))
    assert shares(Turns(10, lambda: True), clock, 15) == [False] * 10 + [True] * 5


def test_room_that_nobody_could_use_is_given_back_and_next_time_it_is_longer(clock: Clock) -> None:
    answers = shares(Turns(10, lambda: True), clock, 300)
    assert answers[:20] == [False] * 10 + [True] * 10
    spans = "".join("r" if answer else "w" for answer in answers).replace("rw", "r|w").split("|")
    rooms = [span.count("r") for span in spans[:-1]]
    assert rooms == sorted(rooms)
    assert rooms[-1] > rooms[0]
    assert sum(answers) <= len(answers) / 2


def test_where_suspects_have_a_process_of_their_own_the_others_only_look_for_them(clock: Clock) -> None:
    told: list[float] = []
    turn = Apart(Suspects.NEVER, 10, lambda: clock.now >= 1015, lambda: told.append(clock.now))
    for _ in range(40):
        turn.look()
        assert turn.idle() is Suspects.NEVER
        assert not turn.makes_room()
        clock.now += 1
    assert told == [1020, 1030]


def test_the_process_for_suspects_takes_nothing_else_and_nothing_beside_one(clock: Clock) -> None:
    turn = Apart(Suspects.ONLY, 10, lambda: True, lambda: pytest.fail("it need not tell"))
    for _ in range(3):
        turn.look()
        assert turn.idle() is Suspects.ONLY
        turn.started(suspect=True)
        assert turn.makes_room()
        clock.now += 20
