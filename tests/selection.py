"""Which tests are left out of `make test-fast`, or grow in `make soak`.

A pytest plugin. Paths are relative to ``tests/``; a folder stands for all that is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test

__all__ = ["OUTSIDE", "SOAK", "UNCOUNTED"]

OUTSIDE = (
    "cli",
    "model/test_many.py",
    "model/test_random.py",
    "model/test_steering.py",
    "model/test_sweep.py",
    "run_log/test_crash.py",
    "run_log/test_replay.py",
    "run_log/test_resume.py",
    "run_log/test_sqlite.py",
    "run_log/test_stores.py",
    "toolkit",
    "transports",
    "test_all_pythons.py",
    "test_benchmarks.py",
    "test_checks.py",
    "test_event_loops.py",
    "test_examples.py",
    "test_package.py",
    "test_public_api.py",
    "test_readme.py",
    "test_running.py",
    "test_sub_agents.py",
    "test_typing.py",
)
"""What needs processes, servers or a model, or tries so much that it takes its time."""

INSIDE = (
    "toolkit/test_approval.py",
    "toolkit/test_ask.py",
    "toolkit/test_calculator.py",
    "toolkit/test_finish.py",
    "transports/test_answer.py",
    "transports/test_failures.py",
    "transports/test_local_arguments.py",
    "transports/test_local_prompts.py",
    "transports/test_outgoing.py",
    "transports/test_settings.py",
)
"""Exceptions to these."""

UNCOUNTED = (
    "model",
    "transports/test_gateway_load.py",
    "transports/test_local.py",
    "transports/test_local_end_to_end.py",
    "transports/test_misbehaviours.py",
    "transports/test_moving.py",
    "transports/test_odd_events.py",
)
"""Families that walk the same lines again and again. To count them takes as long as they do."""

SOAK = (
    "model/test_random.py",
    "model/test_steering.py",
    "run_log/test_crash.py",
    "toolkit/test_escapes.py",
    "transports/test_gateway.py",
    "transports/test_gateway_load.py",
    "transports/test_sse.py",
)
"""Files whose sizes stand in `tests.sizes`."""

_ROOT = Path(__file__).parent

_STARTS = frozenset(
    ["subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "socket.bind"]
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "no_cover: coverage is not measured here")
    config.addinivalue_line("markers", "soak: tries as much as it is given time for")
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if config.getoption("--fast") and runs_tests:
        sys.addaudithook(_refuse)


_running: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.pop()


def _refuse(event: str, arguments: object) -> None:
    if event in _STARTS and _running:
        raise RuntimeError(f"{event} in a fast test: list its file in tests.selection.OUTSIDE")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fast: list[pytest.Item] = []
    for item in items:
        path = item.path.relative_to(_ROOT).as_posix()
        if path.startswith(UNCOUNTED) or "_at_every_" in item.name or _is_made_up(item):
            item.add_marker(pytest.mark.no_cover)
        if path in SOAK:
            item.add_marker(pytest.mark.soak)
        if path in INSIDE or not path.startswith(OUTSIDE):
            fast.append(item)
    if config.getoption("--fast"):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(fast)])
        items[:] = fast


def _is_made_up(item: pytest.Item) -> bool:
    """Whether hypothesis makes up what the test is given."""
    return isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)
