"""The checks can fail: what each of them guards is broken on purpose, and it must be red.

A check that stays green whatever happens is worse than none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent

# --- pytest -------------------------------------------------------------------------------------

SUITE = {
    "passes": "def test(): pass",
    "for_windows": "@pytest.mark.skip(reason='needs Windows')\ndef test(): pass",
    "skipped": "@pytest.mark.skip(reason='no server')\ndef test(): pass",
    "skips_itself": "def test(): pytest.skip('no server')",
    "fixture_skips": (
        "@pytest.fixture\ndef server(): pytest.skip('no server')\ndef test(server): pass"
    ),
    "module_skips": "pytest.importorskip('no_such_module')\ndef test(): pass",
    "no_parameters": "@pytest.mark.parametrize('n', [])\ndef test(n): pass",
    "unknown_mark": "@pytest.mark.unheard_of\ndef test(): pass",
    "passes_after_all": "@pytest.mark.xfail\ndef test(): pass",
    "warns": "import warnings\ndef test(): warnings.warn('old')",
    "returns": "def test(): return 1 == 2",
    "never_awaited": "async def f(): pass\ndef test():\n    f()",
    "fails_in_a_thread": (
        "import threading\n"
        "def f(): raise ValueError\n"
        "def test():\n    t = threading.Thread(target=f)\n    t.start()\n    t.join()"
    ),
    "async_fails": "async def test(): assert False",
}
MAY_BE_SKIPPED = {"for_windows", "skipped", "skips_itself", "fixture_skips", "module_skips"}


def run_suite(folder: Path, *, ci: str) -> dict[str, set[str]]:
    """Run the files of `SUITE` with this project's settings; which of them passed, and so on."""
    for name, source in SUITE.items():
        (folder / f"test_{name}.py").write_text(f"import pytest\n{source}\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(folder), "-p", "pytest_asyncio.plugin", "-p", "tests.no_skips"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-rA", str(folder)]
    environment = {**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return {
        outcome: set(re.findall(rf"^(?:{words}) .*?\btest_(\w+)\.py", done.stdout, re.MULTILINE))
        for outcome, words in (
            ("passed", "PASSED"),
            ("skipped", "SKIPPED"),
            ("red", "FAILED|ERROR"),
        )
    }


def test_what_is_red_in_continuous_integration(tmp_path: Path) -> None:
    assert run_suite(tmp_path, ci="true") == {
        "passed": {"passes"},
        "skipped": {"for_windows"},
        "red": SUITE.keys() - {"passes", "for_windows"},
    }


def test_elsewhere_a_test_may_be_skipped(tmp_path: Path) -> None:
    assert run_suite(tmp_path, ci="") == {
        "passed": {"passes"},
        "skipped": MAY_BE_SKIPPED,
        "red": SUITE.keys() - MAY_BE_SKIPPED - {"passes"},
    }


def test_skips_are_refused_here_too(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.has_plugin("tests.no_skips")


SPEEDS = """
import socket, subprocess, sys
import pytest
from tests.selection import slow_fixture

@pytest.fixture
@slow_fixture
def server():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        yield listening

@pytest.fixture
def unmarked():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.fixture
def over(server): return server

def test_starts_nothing(): pass
def test_uses_a_slow_fixture(server): pass
def test_uses_it_through_another(over): pass
@pytest.mark.slow
def test_is_marked(): subprocess.run([sys.executable, "-c", ""], check=True)
def test_binds_a_socket():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
def test_forgives_whatever_starting_raises():
    try:
        subprocess.run([sys.executable, "-c", ""])
    except Exception:
        pass
def test_uses_an_unmarked_fixture(unmarked): pass
"""
FAST = {"starts_nothing"}
SLOW = {"uses_a_slow_fixture", "uses_it_through_another", "is_marked", "wholly"}
UNMARKED = {"binds_a_socket", "forgives_whatever_starting_raises", "uses_an_unmarked_fixture"}


@pytest.mark.parametrize(
    ("option", "passed", "failed"),
    [
        (["--fast"], FAST, UNMARKED),
        (["-m", "slow"], SLOW, set()),
        ([], FAST | SLOW | UNMARKED, set()),
    ],
)
def test_a_test_that_starts_something_is_slow_or_fails(
    option: list[str], passed: set[str], failed: set[str], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('few', max_examples=10)\n"
    )
    (tmp_path / "test_speeds.py").write_text(SPEEDS)
    (tmp_path / "test_all_of_it.py").write_text(
        "import sys, pytest\npytestmark = pytest.mark.slow\n"
        "assert '--fast' not in sys.argv, 'imported in a fast run'\ndef test_wholly(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-rA"]
    command += ["--rootdir", str(tmp_path), "-p", "pytest_asyncio.plugin"]
    command += ["-p", "tests.selection", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *option, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = {
        word: set(re.findall(rf"^{word} .*::test_(\w+)", done.stdout, re.MULTILINE))
        for word in ("PASSED", "FAILED", "ERROR")
    }
    assert found["PASSED"] - found["ERROR"] == passed, done.stdout + done.stderr
    assert found["FAILED"] | found["ERROR"] == failed


# --- make ---------------------------------------------------------------------------------------

TOOLS = {
    "check": ["ruff check", "ruff format", "mypy", "basedpyright", "mkdocs build"],
    "docs": ["mkdocs build"],
    "bench-smoke": ["benchmarks.smoke"],
    "test": ["pytest"],
}


FETCHED = {
    ".cache/aimock/.stamp": "tests/transports/servers/package.json",
    ".cache/mcp/.stamp": "tests/mcp/servers/package.json",
}
"""Programs of others that tests need, and the files that name their versions."""


def make(
    target: str, failing: str, folder: Path, *, ci: str = ""
) -> subprocess.CompletedProcess[str]:
    """Make a target, with a Python that only prints what it is asked, and fails at one tool."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@"\ncase "$*" in *"{failing}"*) exit 1;; esac\n', encoding="utf-8"
    )
    python.chmod(0o755)
    stamps = [f"--assume-old={folder}/.stamp-{name}" for name in ("core", "test", "docs")]
    for stamp, source in FETCHED.items():
        is_wanted = target == stamp
        stamps.append(f"--assume-new={source}" if is_wanted else f"--assume-old={stamp}")
    return subprocess.run(
        ["make", *stamps, f"VENV={folder}", f"PY={python}", target],
        cwd=ROOT,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("target", "tool"), [(target, tool) for target, tools in TOOLS.items() for tool in tools]
)
def test_a_tool_that_fails_fails_its_target(target: str, tool: str, tmp_path: Path) -> None:
    assert make(target, "nothing at all", tmp_path).returncode == 0
    done = make(target, f"-m {tool}", tmp_path)
    assert f"-m {tool}" in done.stdout
    assert done.returncode != 0


@pytest.mark.parametrize("target", ["check", "docs"])
def test_documentation_is_built_so_that_a_warning_fails(target: str, tmp_path: Path) -> None:
    [command] = re.findall("mkdocs build.*", make(target, "nothing at all", tmp_path).stdout)
    assert "--strict" in command
    assert "-q" not in command  # then the warnings are dropped before they are counted


@pytest.mark.parametrize("stamp", FETCHED)
def test_a_program_that_is_missing_fails_continuous_integration(stamp: str, tmp_path: Path) -> None:
    module = "servers.aimock" if "aimock" in stamp else "servers.install"
    assert make(stamp, module, tmp_path, ci="").returncode == 0
    assert make(stamp, module, tmp_path, ci="true").returncode != 0


CONTINUOUS_INTEGRATION = (
    "check",
    "bench-smoke",
    "test",
    "test-distributed",
    "test-all-pythons FAST=1",
)


@pytest.mark.parametrize("failing", ["nothing", *CONTINUOUS_INTEGRATION])
def test_continuous_integration_stops_at_the_first_failure(failing: str, tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    for name in ("make", "bwrap", "tmux"):  # found first, so nothing is installed or made
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\ncase "$*" in *" {failing}") exit 1;; esac\n')
        program.chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "run"],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    targets = [*[f"make {target}" for target in CONTINUOUS_INTEGRATION], "ok"]
    if failing != "nothing":
        del targets[targets.index(f"make {failing}") + 1 :]
    assert done.stdout.splitlines() == [f"==> {target}" for target in targets]
    assert (done.returncode == 0) is (failing == "nothing")
