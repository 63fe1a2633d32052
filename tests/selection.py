"""Which tests are left out of `make test-fast`, or grow in `make soak`.

A pytest plugin. Paths are relative to ``tests/``; a folder stands for all that is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

__all__ = ["OUTSIDE", "SOAK", "UNCOUNTED"]

OUTSIDE = (
    "cli",
    "durable",
    "gateway",
    "mcp/test_auth.py",
    "mcp/test_benchmark.py",
    "mcp/test_client.py",
    "mcp/test_elicitation.py",
    "mcp/test_everything.py",
    "mcp/test_faults.py",
    "mcp/test_foreign",
    "mcp/test_serving.py",
    "mcp/test_serving_http.py",
    "model/test_many.py",
    "model/test_random.py",
    "model/test_steering.py",
    "model/test_sweep.py",
    "otel/test_benchmark.py",
    "otel/test_exporters.py",
    "otel/test_processes.py",
    "otel/test_transports.py",
    "replay",
    "run_log/test_advance.py",
    "run_log/test_barrier.py",
    "run_log/test_crash.py",
    "run_log/test_follow.py",
    "run_log/test_growth.py",
    "run_log/test_let_go.py",
    "run_log/test_mail.py",
    "run_log/test_mailboxes.py",
    "run_log/test_resume.py",
    "run_log/test_sqlite.py",
    "run_log/test_stores.py",
    "run_log/test_tails.py",
    "run_log/test_waiting_stores.py",
    "testing/test_transport_kit.py",
    "toolkit",
    "transports",
    "view/test_actions.py",
    "view/test_aside.py",
    "view/test_browser",
    "view/test_command.py",
    "view/test_large.py",
    "view/test_live.py",
    "view/test_security.py",
    "view/test_server.py",
    "test_all_pythons.py",
    "test_benchmarks.py",
    "test_browser.py",
    "test_checks.py",
    "test_event_loops.py",
    "test_examples.py",
    "test_package.py",
    "test_public_api.py",
    "test_readme.py",
    "test_running.py",
    "test_sub_agents.py",
    "test_threads.py",
    "test_typing.py",
)
"""What needs processes, servers or a model, or tries so much that it takes its time."""

INSIDE = (
    "toolkit/test_ask.py",
    "toolkit/test_calculator.py",
    "toolkit/test_finish.py",
    "transports/http/test_response.py",
    "transports/local/test_arguments.py",
    "transports/local/test_prompts.py",
    "transports/http/test_request.py",
    "transports/http/test_retry.py",
)
"""Exceptions to these."""

UNCOUNTED = (
    "model",
    "gateway/test_load.py",
    "transports/local/test_local.py",
    "transports/local/test_end_to_end.py",
    "transports/test_misbehaviours.py",
    "transports/test_moving.py",
    "transports/test_odd_events.py",
)
"""Families that walk the same lines again and again. To count them takes as long as they do."""

SOAK = (
    "durable/test_kills.py",
    "model/test_random.py",
    "model/test_steering.py",
    "run_log/test_crash.py",
    "run_log/test_let_go.py",
    "toolkit/test_escapes.py",
    "gateway/test_gateway.py",
    "gateway/test_load.py",
    "transports/http/test_sse.py",
    "view/test_large.py",
)
"""Files whose sizes stand in `tests.sizes`, besides all that hypothesis makes up."""

_ROOT = Path(__file__).parent

_STARTS = frozenset(
    ["subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "socket.bind"]
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "no_cover: coverage is not measured here")
    config.addinivalue_line("markers", "soak: tries as much as it is given time for")
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if config.getoption("--fast") and runs_tests:
        settings.load_profile("few")
        sys.addaudithook(_refuse)


_fast: list[str] = []
"""The fast test that is running, if any."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if is_outside(item.path):
        return (yield)
    _fast.append(item.nodeid)
    try:
        return (yield)
    finally:
        _fast.pop()


def _refuse(event: str, arguments: object) -> None:
    if event in _STARTS and _fast:
        raise RuntimeError(f"{event} in a fast test: list its file in tests.selection.OUTSIDE")


def is_outside(path: Path) -> bool:
    """Whether the tests of a file are left out of a fast run."""
    name = path.relative_to(_ROOT).as_posix()
    return name.startswith(OUTSIDE) and name not in INSIDE


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In a fast run the modules of slow tests are not even imported."""
    if not config.getoption("--fast") or collection_path.suffix != ".py":
        return None
    return True if is_outside(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(_ROOT).as_posix()
        is_made_up = _is_made_up(item)
        if is_made_up or path.startswith(UNCOUNTED) or "_at_every_" in item.name:
            item.add_marker(pytest.mark.no_cover)
        if is_made_up or path in SOAK:
            item.add_marker(pytest.mark.soak)


def _is_made_up(item: pytest.Item) -> bool:
    """Whether hypothesis makes up what the test is given."""
    return isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)
