"""What a process notes is there for its supervisor, whatever becomes of the process."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import tests.jobsapp.jobs  # noqa: F401 (registers the types)
from django_forgejobs import enqueue
from django_forgejobs.board import Board, Note, Place
from django_forgejobs.worker import Worker
from tests.sessions import beside, in_threads
from tests.waiting import wait_for


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_what_a_killed_process_was_at_can_be_read() -> None:
    board = Board()
    if (pid := os.fork()) == 0:
        board.begin(1)
        board.end(board.begin(2))
        board.begin(3, overdue_at=50.0)
        board.begin(4, overdue_at=70.0)
        board.note(Note.LEAVING)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert board.begun() == {1, 3, 4}
    assert board.over() == {2}
    assert (board.overdue(40), board.overdue(60), board.overdue(80)) == (set(), {3}, {3, 4})
    assert [board.noted(note) for note in (Note.LEAVING, Note.CHANGED)] == [True, False]


def test_a_handler_that_its_worker_has_given_up_is_not_overdue_any_more() -> None:
    board = Board()
    board.begin(1, overdue_at=50.0)
    board.begin(2, overdue_at=50.0)
    board.forgive(1)
    assert board.overdue(60) == {2}
    assert board.begun() == {1, 2}


def test_with_more_handlers_than_slots_nothing_is_known_rather_than_something_wrong() -> None:
    board = Board(2000)
    slots = [board.begin(number + 1) for number in range(2000)]
    assert board.begun() == set(range(1, 2001))
    board.end(board.begin(2001))
    assert board.begun() is None
    assert len(set(slots)) == 2000


def test_threads_do_not_get_each_others_slots() -> None:
    board = Board()

    def work(thread: int) -> None:
        for number in range(1, 1000):
            slot = board.begin(thread * 1000 + number)
            assert thread * 1000 + number in (board.begun() or ())
            board.end(slot)

    in_threads(3, work)
    assert board.begun() == set()


@pytest.mark.django_db(transaction=True)
def test_a_worker_notes_that_it_has_given_a_handler_up_so_that_it_is_not_killed_for_it(
    settings: Any, tmp_path: Path
) -> None:
    settings.FORGEJOBS = {"TIMEOUT_MARGIN": 0.1}
    board, until = Board(), tmp_path / "until"
    worker = Worker(db="default", burst=True, concurrency=2, place=Place("w", board))
    id = enqueue("t.timeout", {"until": str(until)})
    with beside(worker.run):
        wait_for(lambda: board.overdue(float("inf")) == {id})
        wait_for(lambda: board.overdue(float("inf")) == set())
        assert board.begun() == {id}
        until.touch()
    wait_for(lambda: board.begun() == set())
    assert board.rounds > 1
