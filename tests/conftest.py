"""Settings shared by all tests."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from clark_agent._text import well_formed
from clark_agent.engine import pace
from tests import event_loops, sizes

pytest_plugins = ["tests.no_skips", "tests.selection"]

# The weights of the packaged model are put together once for all tests, and not in anybody's home.
os.environ.setdefault("CLARK_AGENT_CACHE", str(Path(__file__).resolve().parent.parent / ".cache"))

# dev looks for new counterexamples on every run. ci repeats the same examples, so a red
# build is red again when it is run again; the printed blob reproduces it locally.
# pytest --hypothesis-profile=NAME overrides the choice.
settings.register_profile("dev", deadline=None, print_blob=True, max_examples=sizes.EXAMPLES)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
# few is for the same tests on yet another Python or event loop.
settings.register_profile("few", settings.get_profile("ci"), max_examples=10)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# A shell starts what it runs in the background with Ctrl-C ignored, and the processes that a test
# starts would inherit that. They are there to be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where a run pauses for others depends on how fast the machine is, and some tests count at what
# points a run waits. Tests of the pauses themselves put the clock back.
vars(pace)["monotonic"] = lambda: -1.0


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a test has said reaches the other process also when it holds a lone surrogate."""
    return _well_formed((yield))


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, dict):
        return {key: _well_formed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_well_formed(item) for item in value])
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--event-loop", choices=event_loops.CHOICES, default="asyncio")


def pytest_collection_finish() -> None:
    """Later collections of garbage look at what tests make, not at the tests themselves."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--event-loop")
    if why := event_loops.missing(name):
        raise pytest.UsageError(f"--event-loop={name}: {why}")
    if name != "asyncio":
        event_loops.install(name)
