"""Repeat tests on one core that is busy with other work: it shows races that rarely show.

    python scripts/repeat.py tests/test_cancellation.py -n 50
    python scripts/repeat.py "tests/test_budget.py::test_x[seconds]" --load 8 -- --cov -x

It stops at the first round that fails, or when the time is over. What follows -- goes to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from copy import copy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


class Repeat:
    """A pytest plugin: all tests, many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Have a copy of every test for each round."""
        items[:] = [copy(item) for _ in range(self.times) for item in items]
        for item in items:
            if isinstance(item, pytest.Function):
                item._initrequest()  # its fixtures are its own


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("tests", nargs="+", help="files or ids of tests")
    options.add_argument("-n", "--times", type=int, default=200, help="default: %(default)s")
    options.add_argument("--load", type=int, default=4, help="busy processes beside: %(default)s")
    options.add_argument("--core", type=int, help="the core for all of it; default: the last one")
    options.add_argument("--seconds", type=int, default=600, help="time limit: %(default)s")
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given = options.parse_args(arguments[:cut])
    if hasattr(os, "sched_setaffinity"):
        core = max(os.sched_getaffinity(0)) if given.core is None else given.core
        os.sched_setaffinity(0, {core})  # its children inherit that
    os.nice(5)
    busy = [sys.executable, "-S", "-c", BUSY, str(os.getpid())]
    load = [subprocess.Popen(busy) for _ in range(given.load)]
    command = [sys.executable, __file__, "--run", str(given.times), "-x", "-q"]
    command += ["-p", "no:cacheprovider", *given.tests, *arguments[cut + 1 :]]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=given.seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"the time of {given.seconds} s is over", file=sys.stderr)
        return 124
    finally:
        for process in load:
            process.kill()
            process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(pytest.main(sys.argv[3:], plugins=[Repeat(int(sys.argv[2]))]))
    sys.exit(main())
