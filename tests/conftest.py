"""Settings shared by all tests."""

import os
import signal
from pathlib import Path

from hypothesis import settings

from clark_agent import pace

pytest_plugins = ["tests.no_skips"]

# The weights of the packaged model are put together once for all tests, and not in anybody's home.
os.environ.setdefault("CLARK_AGENT_CACHE", str(Path(__file__).resolve().parent.parent / ".cache"))

# dev looks for new counterexamples on every run. ci repeats the same examples, so a red
# build is red again when it is run again; the printed blob reproduces it locally.
# pytest --hypothesis-profile=NAME overrides the choice.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# A shell starts what it runs in the background with Ctrl-C ignored, and the processes that a test
# starts would inherit that. They are there to be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where a run pauses for others depends on how fast the machine is, and some tests count at what
# points a run waits. Tests of the pauses themselves put the clock back.
vars(pace)["monotonic"] = lambda: 0.0
