"""Many cases in one test: each is tried, and the test fails with a list of those that failed.

    with all_cases() as case:
        for number, kind in enumerate(kinds):
            with case(f"{number}-{kind}"):
                assert ...

For cases that take the same path through the code. Cases with a reason of their own to fail are
parameters of a test.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

__all__ = ["Case", "all_cases"]

Case = Callable[[object], AbstractContextManager[None]]

_FAILURES = (Exception, pytest.fail.Exception)
_ROOT = Path(__file__).parent


@contextmanager
def all_cases() -> Generator[Case]:
    """Provide ``case(name)``, a block that may fail without ending the test.

    At the end the test fails if any case did, or if there was none. The first failure is the
    cause of the error, with its traceback.
    """
    tried = 0
    failures: list[tuple[str, BaseException]] = []

    @contextmanager
    def case(name: object) -> Generator[None]:
        nonlocal tried
        tried += 1
        try:
            yield
        except _FAILURES as error:
            failures.append((str(name), error))

    yield case
    assert tried, "there was no case"
    if failures:
        lines = [f"{len(failures)} of {tried} cases failed:"]
        lines += [f"{name}: {_summary(error)}" for name, error in failures]
        raise AssertionError("\n".join(lines)) from failures[0][1]


def _summary(error: BaseException) -> str:
    """The type and text of an error, and the line of a test in which it was raised."""
    text = str(error).replace("\n", "\n    ")
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_ROOT)]
    place = ours[-1] if ours else frames[-1]
    return f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {text}"
