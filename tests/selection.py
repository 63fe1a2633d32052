"""Which tests are slow, and which grow in `make soak`. A pytest plugin.

A test is slow if it uses a fixture that starts a server, a process, a browser or a model
(`slow_fixture`), or if it is marked ``slow`` itself, also because it computes for seconds.
``pytest --fast`` leaves the slow tests out, and fails any other test that starts a process or
listens on a socket. ``-m slow`` runs the rest.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import traceback
from collections.abc import Callable, Generator
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import is_hypothesis_test

__all__ = ["slow_fixture"]

_F = TypeVar("_F", bound=Callable[..., object])

_STARTS = (
    (subprocess.Popen, "__init__"),
    (os, "posix_spawn"),
    (os, "fork"),
    (os, "forkpty"),
    (socket.socket, "bind"),
)
_SLOW_MODULE = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)

_started: list[str] = []
"""Where the fast test that is running has started a process or bound a socket."""


def slow_fixture(function: _F) -> _F:
    """Make the tests that use a fixture slow. Put it below ``@pytest.fixture``."""
    vars(function)["is_slow"] = True
    return function


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="leave out what needs processes, servers or a model"
    )
    parser.addoption(
        "--also", action="append", default=[], metavar="ID", help="run these slow tests with --fast"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: starts something, or takes seconds")
    config.addinivalue_line("markers", "no_cover: coverage is not measured here")
    config.addinivalue_line("markers", "soak: tries as much as it is given time for")
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if config.getoption("--fast") and runs_tests:
        for owner, name in _STARTS:
            if hasattr(owner, name):
                setattr(owner, name, _recorded(getattr(owner, name)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In a fast run, modules that are slow as a whole are not even imported."""
    if not config.getoption("--fast") or not collection_path.match("test_*.py"):
        return None
    also = {config.rootpath / name.partition("::")[0] for name in config.getoption("--also")}
    return True if _is_slow_module(collection_path) and collection_path not in also else None


@cache
def _is_slow_module(path: Path) -> bool:
    return _SLOW_MODULE.search(path.read_text(encoding="utf-8")) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _is_slow_module(item.path) or _uses_slow_fixture(item):
            item.add_marker(pytest.mark.slow)
        is_made_up = isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)
        if is_made_up:
            item.add_marker(pytest.mark.soak)
        if is_made_up or "_at_every_" in item.name:  # they walk the same lines again and again
            item.add_marker(pytest.mark.no_cover)
    if config.getoption("--fast"):
        also = tuple(config.getoption("--also"))
        slow = {i for i in items if i.get_closest_marker("slow") and not i.nodeid.startswith(also)}
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]


def _uses_slow_fixture(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(getattr(each.func, "is_slow", False) for found in definitions for each in found)


# --- fast tests start nothing ---------------------------------------------------------------------


def pytest_collection_finish() -> None:
    _started.clear()  # by modules, when they were imported


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Note where a function is called.

    An audit hook would see more, but one that is written in Python lets another thread go on in the
    middle of `sys.settrace`, and then threads that coverage traces end before their first line.
    """

    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        stack = traceback.format_list(traceback.extract_stack(limit=8)[:-1])
        _started.append(f"{function.__qualname__}\n{''.join(stack)}")
        return function(*args, **kwargs)

    return recorded


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A fast test that has started something fails, also if it did not notice."""
    report = yield
    if _started and report.passed:
        report.outcome = "failed"
        where = "\n".join(_started)
        report.longrepr = f"not marked as slow, but it starts something ({call.when}):\n{where}"
    _started.clear()
    return report
