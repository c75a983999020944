"""When a worker has done enough."""

import logging

import pytest

from django_forgejobs.recycling import Recycling, resident

MB = 1024 * 1024


def test_a_worker_without_limits_never_leaves() -> None:
    assert not Recycling().is_due(10**9)


def test_after_its_jobs_it_leaves_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_forgejobs")
    limits = Recycling(max_jobs=3)
    assert [limits.is_due(jobs) for jobs in (0, 2, 3, 4)] == [False, False, True, True]
    assert caplog.text.count("has done enough (3 jobs)") == 1


def test_workers_that_were_started_together_do_not_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("django_forgejobs.recycling.time.monotonic", lambda: now)
    workers = [Recycling(max_age=100) for _ in range(200)]
    left = []
    for seconds in (89, 100, 111):
        now = 1000.0 + seconds
        left.append(sum(worker.is_due(1) for worker in workers))
    assert left[0] == 0
    assert 0 < left[1] < 200
    assert left[2] == 200


def test_memory_counts_once_it_has_run_a_job_whatever_it_starts_with() -> None:
    limits = Recycling(max_memory=1)
    assert not limits.is_due(0)
    assert limits.is_due(1)


def test_the_memory_of_this_process_is_what_the_system_says() -> None:
    before = resident()
    held = bytearray(b"x" * 64 * MB)
    assert 60 * MB < resident() - before < 100 * MB
    del held
