"""Settings shared by all tests."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests import event_loops

# The weights of the packaged model are put together once for all tests, and not in anybody's home.
os.environ.setdefault("CLARK_AGENT_CACHE", str(Path(__file__).resolve().parent.parent / ".cache"))

# dev looks for new counterexamples on every run. ci repeats the same examples, so a red
# build is red again when it is run again; the printed blob reproduces it locally.
# pytest --hypothesis-profile=NAME overrides the choice.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
# few is for the same tests on yet another Python or event loop.
settings.register_profile("few", settings.get_profile("ci"), max_examples=10)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# A shell starts what it runs in the background with Ctrl-C ignored, and the processes that a test
# starts would inherit that. They are there to be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--event-loop", choices=event_loops.CHOICES, default="asyncio")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--event-loop")
    if why := event_loops.missing(name):
        raise pytest.UsageError(f"--event-loop={name}: {why}")
    if name != "asyncio":
        event_loops.install(name)
