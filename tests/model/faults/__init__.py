"""Faults: each breaks one promise of the package while tests run.

A fault acts at a seam, not on a line of code: it swallows an event on its way to the listeners,
ignores a transport's ``aclose``, or shifts the turn that a receipt names. `SEAMS` says where each
seam is. When code moves, update its entry there. A seam that cannot be found is an error.

A fault counts its activations. One that never fires proves nothing, whether the tests pass or fail.

``CLARK_AGENT_FAULT=<promise> python -m pytest -p tests.model.faults`` runs tests under a fault.
`tests.model.mutants` does so for every promise.

To add a fault, write it into the module of its family, here, with its seams in `SEAMS` of `base`.
Write a story for it into the file ``test_mutants.py`` that checks this family.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings

from tests.model.faults.base import PROMISES, Fault, SeamGoneError, broken

__all__ = ["FAMILIES", "NAME", "PROMISES", "VERDICT", "Story", "Verdict", "check", "promises_of"]

FAMILIES = (
    *("runs", "waiting", "takeovers", "leases", "logs", "context"),
    *("mcp", "tracing", "page"),
)
"""The modules of the faults."""

for family in FAMILIES:
    import_module(f"{__name__}.{family}")


# --- what holds of each fault -------------------------------------------------------------------

Story = Callable[[], Coroutine[Any, Any, object]]
"""Something short that happens, and has another outcome under a fault."""


def promises_of(*families: str) -> list[str]:
    """The promises that the faults of these families break."""
    return [name for name, promise in PROMISES.items() if promise.family in families]


def check(promise: str, story: Story) -> None:
    """The fault replaces what is at its seams, fires, changes what happens, and leaves no trace."""
    logging.disable(logging.CRITICAL)
    try:
        usual = asyncio.run(story())
        with broken(promise) as fault:
            assert fault.changed
            assert not any(_is_there(*each) for each in fault.changed)
            assert fault.fired == 0
            try:
                changed = asyncio.run(story())
            except AssertionError as error:
                changed = error
        fired = fault.fired
        assert fired > 0
        assert changed != usual
        assert all(_is_there(*each) for each in fault.changed)
        assert asyncio.run(story()) == usual
        assert fault.fired == fired
    finally:
        logging.disable(logging.NOTSET)


def _is_there(owner: Any, name: str, original: object) -> bool:
    return vars(owner)[name] is original


# --- running tests under a fault ----------------------------------------------------------------

NAME = "CLARK_AGENT_FAULT"
VERDICT = "CLARK_AGENT_FAULT_VERDICT"
"""Environment variables: the promise to break, and the file to write the `Verdict` to."""

# One counterexample is enough, so there is no need to shrink it.
settings.register_profile(
    "faults",
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)

_IDLE_SECONDS = 5
_MOST_SECONDS = 120


class Verdict(msgspec.Struct):
    """What the tests have shown about a fault."""

    fired: int = 0
    test: str | None = None
    """The first test that failed."""
    fired_in_test: int = 0
    hung: bool = False
    """Whether that test did not end."""


def _seconds_without_core() -> float:
    """How long the process would have worked, but had no core because others had them all."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except OSError:  # only Linux says it
        return 0.0


class _Watch:
    """Records how often the fault fires, and which test fails or hangs under it."""

    def __init__(self, fault: Fault, path: str) -> None:
        self._fault = fault
        self._path = Path(path)
        self._verdict = Verdict()
        self._test = ""
        self._fired_before = 0
        self._seconds = self._idle_seconds = 0
        self._cpu_seconds = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._test, self._fired_before = item.nodeid, self._fault.fired
        self._seconds = self._idle_seconds = 0
        signal.signal(signal.SIGALRM, self._second_is_over)
        signal.setitimer(signal.ITIMER_REAL, 1, 1)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _second_is_over(self, *_: object) -> None:
        used = time.process_time() + _seconds_without_core() - self._cpu_seconds
        self._cpu_seconds += used
        self._seconds += 1
        self._idle_seconds = self._idle_seconds + 1 if used < 0.05 else 0
        if self._idle_seconds >= _IDLE_SECONDS or self._seconds >= _MOST_SECONDS:
            self._failed(hung=True)
            self.pytest_sessionfinish()
            os._exit(1)  # an orderly exit would wait for what hangs

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._verdict.test is None:
            self._failed()

    def _failed(self, *, hung: bool = False) -> None:
        fired = self._fault.fired - self._fired_before
        self._verdict = Verdict(test=self._test, fired_in_test=fired, hung=hung)

    def pytest_sessionfinish(self) -> None:
        self._verdict.fired = self._fault.fired
        self._path.write_bytes(msgspec.json.encode(self._verdict))


def pytest_configure(config: pytest.Config) -> None:
    """Break the promise that the environment names, before any test module is imported."""
    if (promise := os.environ.get(NAME)) is None:
        return
    if promise not in PROMISES:
        raise pytest.UsageError(f"{NAME}: there is no promise {promise!r}")
    fault = config.stash[_installed] = Fault()
    try:
        PROMISES[promise].break_with(fault)
    except SeamGoneError as error:
        raise pytest.UsageError(str(error)) from error
    if (path := os.environ.get(VERDICT)) is not None:
        config.pluginmanager.register(_Watch(fault, path))


def pytest_unconfigure(config: pytest.Config) -> None:
    if (fault := config.stash.get(_installed, None)) is not None:
        fault.remove()


_installed = pytest.StashKey[Fault]()
