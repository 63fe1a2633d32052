"""Run the core tests on every CPython of this machine that the package supports.

    python scripts/all_pythons.py          all core tests, on every event loop
    python scripts/all_pythons.py --fast   those that are not slow, half a minute for each Python

Every Python gets an environment of its own (``.venv-3.12``) with the package, no extras and the
dependency group ``test-core``. The lists below are the only place that says what is run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)

# --- what is run --------------------------------------------------------------------------------

_NEED_EXTRAS = ("test_browser.py", "test_prices.py")
CORE = (
    *(
        f"tests/{path.name}"
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        if path.name not in _NEED_EXTRAS
    ),
    "tests/engine",
    "tests/plugins",
    "tests/model",
    "tests/conformance",
    "tests/messages",
    "tests/replay",
    "tests/run_log",
    "tests/testing/test_script.py",
    "tests/tools",
    "tests/trajectory",
)
"""All that needs neither an extra nor a server."""

LOOP = (
    "tests/engine",
    "tests/model/test_many.py",
    "tests/model/test_random.py",
    "tests/model/test_steering.py",
    "tests/model/test_sweep.py",
    "tests/plugins",
    "tests/conformance/test_loop.py",
    "tests/test_budget.py",
    "tests/test_cancellation.py",
    "tests/test_event_loops.py::TestInForce",
    "tests/run_log/test_suspending.py",
    "tests/test_rate_limit.py",
    "tests/test_running.py",
    "tests/test_sub_agents.py",
)
"""What depends on the event loop."""

FAST_CORE = (
    *LOOP,
    "tests/conformance",
    "tests/tools",
    "tests/test_errors.py",
    "tests/test_events.py",
    "tests/test_public_api.py",
    "tests/test_threads.py",
    "tests/test_types.py",
)
"""What depends on the version of Python."""

ALSO = (
    "tests/engine/test_stopping.py::test_a_run_can_be_stopped_at_every_await",
    "tests/model/test_random.py",
    *(
        f"tests/model/test_sweep.py::test_every_suspension_point[{name}]"
        for name in ("two tools at once", "one by one", "a fatal tool beside one that hangs")
    ),
)
"""Slow tests that are run with --fast too, since they depend on the event loop most of all."""

BEYOND_CORE = (
    "tests/run_log/test_crash.py",  # kills processes, for minutes
    "tests/run_log/test_tools_of_the_log.py::test_an_export_is_what_a_transport_sends",
    "tests/replay/test_replay.py::test_the_runs_of_the_examples_are_replayed[gateway]",
    "tests/test_examples.py::test_the_run_of_the_demo_is_replayed_and_prints_the_same",
    "tests/test_examples.py::test_an_example_runs_and_prints_what_it_promises[gateway.py]",
    "tests/test_examples.py::test_importing_an_example_does_nothing[gateway.py]",
    "tests/replay/test_replay.py::test_the_runs_of_the_examples_are_replayed[web_sse]",
    "tests/test_examples.py::test_an_example_runs_and_prints_what_it_promises[web_sse.py]",
    "tests/test_examples.py::test_importing_an_example_does_nothing[web_sse.py]",
    "tests/test_examples.py::test_an_example_runs_and_prints_what_it_promises[approval_web.py]",
    "tests/test_examples.py::test_importing_an_example_does_nothing[approval_web.py]",
    "tests/test_readme.py::test_code_runs[docs/guide/web.md]",
    "tests/test_readme.py::test_code_runs[docs/guide/mcp.md]",
    "tests/test_readme.py::test_code_runs[docs/guide/viewing-runs.md]",
    "tests/test_examples.py::test_the_demo_is_a_real_model_that_uses_two_tools_and_is_right",
    "tests/test_readme.py::test_code_runs[docs/guide/limits.md]",
    "tests/test_running.py::test_run_sync_works_in_a_notebook",
    "tests/test_typing.py",  # type checkers, which know every version themselves
)

NOT_EAGER = (
    "tests/test_rate_limit.py::test_a_hundred_runs_share_one_limit",
    "tests/test_rate_limit.py::test_a_small_request_does_not_overtake_a_large_one",
    "tests/test_rate_limit.py::test_no_minute_has_more_requests_than_allowed",
)
"""What expects that a task begins after the one that has started it goes on."""

# --- the Pythons of this machine ----------------------------------------------------------------

_PROBE = """
import json, os, platform, sys, sysconfig
import ensurepip, venv
print(json.dumps([
    os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    platform.python_implementation(),
    platform.python_version(),
    list(sys.version_info[:3]),
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
]))
"""


class Python(NamedTuple):
    """An interpreter that can make environments."""

    path: str
    version: str
    numbers: tuple[int, ...]
    is_free_threaded: bool = False

    @property
    def name(self) -> str:
        """Its minor version, which names its environment."""
        return f"{self.numbers[0]}.{self.numbers[1]}{'t' if self.is_free_threaded else ''}"


def candidates(path: str, pyenv: Path) -> Iterator[str]:
    """Files that may be a Python: by their name in the folders of PATH, and what pyenv has."""
    for folder in path.split(os.pathsep):
        if folder and Path(folder).is_dir():
            named = Path(folder).glob("python3*")
            yield from (str(p) for p in sorted(named) if re.fullmatch(r"python3(\.\d+t?)?", p.name))
    yield from (str(p) for p in sorted(pyenv.glob("versions/*/bin/python")))


def ask(candidate: str) -> Python | None:
    """What it says that it is; None for what is no CPython, too old, or cannot make a venv."""
    try:
        told = subprocess.run(
            [candidate, "-I", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            cwd="/",  # a .python-version of the project is not asked for its opinion
        )
        path, implementation, version, numbers, is_free_threaded = json.loads(told.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if implementation != "CPython" or tuple(numbers[:2]) < OLDEST:
        return None
    return Python(path, version, tuple(numbers), is_free_threaded)


def choose(found: Iterable[Python], running: Python) -> list[Python]:
    """One for each minor version, the oldest first: the one that runs this, or else the newest."""
    chosen = {running.name: running}
    for python in sorted(set(found), key=lambda python: python.numbers, reverse=True):
        chosen.setdefault(python.name, python)
    return sorted(chosen.values(), key=lambda python: (python.numbers, python.is_free_threaded))


def announcement(chosen: Sequence[Python], supported: Iterable[str]) -> str:
    """Which were found, and which of those that the package claims to support were not."""
    lines = [f"found {', '.join(f'{p.version} ({p.path})' for p in chosen)}"]
    absent = [version for version in supported if version not in {p.name for p in chosen}]
    if absent:
        lines.append(f"not on this machine: {', '.join(absent)}")
    if len(chosen) == 1:
        lines.append("no other Python was found, so this is the only one that is tested")
    return "\n".join(lines)


def supported_versions() -> list[str]:
    """The minor versions that the package names in its classifiers."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


# --- running ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """How the tests went on one Python and one event loop."""

    version: str
    event_loop: str
    passed: int
    failed: int
    seconds: float
    note: str = ""


def table(rows: Sequence[Row]) -> str:
    """The rows, for people."""
    lines = [("Python", "event loop", "passed", "failed", "seconds")]
    lines += [
        (
            r.version,
            r.event_loop,
            str(r.passed),
            str(r.failed),
            f"{r.seconds:.0f}  {r.note}".rstrip(),
        )
        for r in rows
    ]
    widths = [max(len(line[n]) for line in lines) for n in range(4)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}  {line[2]:>{widths[2]}}  "
        f"{line[3]:>{widths[3]}}  {line[4]}".rstrip()
        for line in lines
    )


def is_good(rows: Sequence[Row]) -> bool:
    """Whether tests have passed on every one of them, and none has failed."""
    return bool(rows) and all(row.passed and not row.failed and not row.note for row in rows)


def plan(python: Python, *, is_running: bool, fast: bool) -> list[tuple[str, Sequence[str]]]:
    """The event loops to use, each with what to run on it."""
    eager = python.numbers >= (3, 12)
    if fast and is_running:  # on asyncio's own loop `make test` runs everything
        return [("uvloop", LOOP)]
    loops: list[tuple[str, Sequence[str]]] = [("asyncio", FAST_CORE if fast else CORE)]
    if eager:
        loops.append(("eager", LOOP))
    return loops if fast else [*loops, ("uvloop", LOOP)]


_OF_MAKE = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")


def prepare(python: Python) -> Path | None:
    """The interpreter of an environment that has all that the tests need; None: it failed."""
    venv = f".venv-{python.name}"
    # What the make that has called this was told is not for the one below.
    env = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
    command = ["make", "--silent", f"PYTHON={python.path}", f"VENV={venv}"]
    made = subprocess.run([*command, f"{venv}/.stamp-test-core"], cwd=ROOT, env=env, check=False)
    return ROOT / venv / "bin" / "python" if made.returncode == 0 else None


def has_uvloop(interpreter: Path) -> bool:
    command = [str(interpreter), "-c", "import uvloop"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_tests(
    python: Python, interpreter: Path, event_loop: str, selected: Sequence[str], *, fast: bool
) -> Row:
    """Run the tests. What they say is shown only if they fail."""
    omitted = [*BEYOND_CORE, *(NOT_EAGER if event_loop == "eager" else ())]
    env = {"CLARK_AGENT_SOAK": "0.1" if fast else "0.4", **os.environ, "CI": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            str(interpreter), "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider",
            f"--event-loop={event_loop}", f"--hypothesis-profile={'few' if fast else 'ci'}",
            *(("--fast", *(f"--also={name}" for name in ALSO)) if fast else ()),
            f"--junit-xml={report}", *(f"--deselect={name}" for name in omitted), *selected,
        ]  # fmt: skip
        began = time.monotonic()
        ran = subprocess.run(
            command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            check=False,
        )  # fmt: skip
        passed, failed = counts(report)
    seconds = time.monotonic() - began
    if ran.returncode:
        print(ran.stdout)
    note = f"pytest exited with {ran.returncode}" if ran.returncode and not failed else ""
    return Row(python.version, event_loop, passed, failed, seconds, note)


def counts(report: Path) -> tuple[int, int]:
    """How many tests of a JUnit report have passed, and how many have not."""
    if not report.exists():
        return 0, 0
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    passed = failed = 0
    for suite in suites:
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        failed += bad
        passed += int(suite.get("tests", 0)) - bad - int(suite.get("skipped", 0))
    return passed, failed


def run_python(python: Python, *, is_running: bool, fast: bool) -> list[Row]:
    """Run the tests on all event loops of one Python."""
    interpreter = prepare(python)
    if interpreter is None:
        return [Row(python.version, "", 0, 0, 0, "its environment cannot be made")]
    todo = plan(python, is_running=is_running, fast=fast)
    if not has_uvloop(interpreter):
        print(f"{python.version} has no uvloop", flush=True)
        todo = [entry for entry in todo if entry[0] != "uvloop"] or [("asyncio", CORE)]
    rows = []
    for event_loop, selected in todo:
        print(f"testing {python.version} on {event_loop} ...", flush=True)
        rows.append(run_tests(python, interpreter, event_loop, selected, fast=fast))
    return rows


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--fast", action="store_true", help="a part, for continuous integration")
    fast: bool = options.parse_args().fast
    running = ask(sys.executable)
    if running is None:
        print(f"{sys.executable} is no CPython 3.11 or newer with venv: make PYTHON=python3.12 ...")
        return 1
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    paths = dict.fromkeys(candidates(os.environ.get("PATH", ""), pyenv))
    pythons = choose([python for python in map(ask, paths) if python is not None], running)
    print(announcement(pythons, supported_versions()), flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda p: run_python(p, is_running=p == running, fast=fast), pythons)
        rows = [row for rows in found for row in rows]
    print(table(rows))
    return 0 if is_good(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
