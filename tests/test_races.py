"""A race of threads tells what went wrong in it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from tests.races import race


def test_all_jobs_run_and_are_waited_for() -> None:
    done: list[int] = []
    together = threading.Barrier(3, timeout=30)

    def job() -> None:
        done.append(together.wait())

    race(job, job, job)
    assert sorted(done) == [0, 1, 2]


def test_what_a_job_raises_is_raised_with_its_traceback_and_seen_by_the_others() -> None:
    failures: list[BaseException] = []

    def fail() -> None:
        raise ValueError("broken")

    def wait() -> None:
        while not failures:
            pass

    with pytest.raises(ExceptionGroup) as caught:
        race(fail, wait, failures=failures)
    [error] = caught.value.exceptions
    assert isinstance(error, ValueError)
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_next is not None
    assert error.__traceback__.tb_next.tb_frame.f_code is fail.__code__


@pytest.fixture
def second_thread_ends_early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its trace function raises, as one does that cannot be installed."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    started: list[FrameType] = []
    before = threading.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        sys.settrace(None)
        started.append(frame)
        if len(started) == 2:
            raise RuntimeError("cannot install a trace function")

    threading.settrace(trace)
    yield
    threading.settrace(before)


@pytest.mark.usefixtures("second_thread_ends_early")
def test_a_thread_that_never_begins_ends_the_race_before_any_job_runs() -> None:
    done: list[int] = []
    with pytest.raises(AssertionError, match="a thread ended before it began"):
        race(*[lambda: done.append(1)] * 3)
    assert done == []
