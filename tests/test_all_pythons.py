"""The script that runs the core tests on every Python: what it finds, chooses and says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import all_pythons
from scripts.all_pythons import Python, Row, announcement, ask, candidates, choose, counts, plan

ROOT = Path(__file__).resolve().parent.parent


def python(version: str, path: str = "", *, free: bool = False) -> Python:
    numbers = tuple(int(number) for number in version.split("."))
    return Python(path or f"/opt/{version}/python", version, numbers, free)


def test_candidates_are_found_in_path_and_in_pyenv(tmp_path: Path) -> None:
    (tmp_path / "pyenv/versions/3.13.0/bin").mkdir(parents=True)
    (tmp_path / "pyenv/versions/3.13.0/bin/python").touch()
    (tmp_path / "bin").mkdir()
    for name in ("3", "3.12", "3.13t", "3-config", "3.12-config", "2"):
        (tmp_path / f"bin/python{name}").touch()
    path = f"{tmp_path / 'bin'}:{tmp_path / 'nowhere'}:"
    found = [str(Path(p).relative_to(tmp_path)) for p in candidates(path, tmp_path / "pyenv")]
    assert found == [
        "bin/python3", "bin/python3.12", "bin/python3.13t", "pyenv/versions/3.13.0/bin/python",
    ]  # fmt: skip


@pytest.mark.slow
def test_two_names_of_one_interpreter_are_one(tmp_path: Path) -> None:
    link = tmp_path / "python3"
    link.symlink_to(sys.executable)
    here = ask(sys.executable)
    assert here is not None
    assert here.numbers == sys.version_info[:3]
    assert ask(str(link)) in (here, None)  # a link out of an environment may have lost its home


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["exit 127", "echo nonsense", 'echo \'["/p", "PyPy", "3.11.1", [3, 11, 1], false]\'',
     'echo \'["/p", "CPython", "3.10.9", [3, 10, 9], false]\''],
)  # fmt: skip
def test_what_is_no_cpython_that_is_new_enough_is_left_out(tmp_path: Path, text: str) -> None:
    program = tmp_path / "python3"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    assert ask(str(program)) is None


def test_of_each_minor_version_the_running_one_or_the_newest_is_chosen() -> None:
    running = python("3.11.2", "/usr/bin/python3.11")
    found = [python("3.13.0"), python("3.11.7"), python("3.12.1"), python("3.12.4"), running,
             python("3.13.0", free=True)]  # fmt: skip
    chosen = choose(found, running)
    assert [(p.version, p.name) for p in chosen] == [
        ("3.11.2", "3.11"), ("3.12.4", "3.12"), ("3.13.0", "3.13"), ("3.13.0", "3.13t"),
    ]  # fmt: skip


def test_what_is_absent_is_said() -> None:
    alone = python("3.11.7")
    supported = ["3.11", "3.12", "3.14"]
    assert announcement([alone, python("3.12.1")], supported).splitlines()[1:] == [
        "not on this machine: 3.14"
    ]
    assert announcement([alone], supported).splitlines()[1:] == [
        "not on this machine: 3.12, 3.14",
        "no other Python was found, so this is the only one that is tested",
    ]
    assert all_pythons.supported_versions()[0] == "3.11"


@pytest.mark.parametrize("fast", [False, True])
def test_every_python_has_something_to_run(fast: bool) -> None:
    def loops(version: str, *, is_running: bool) -> list[str]:
        return [loop for loop, _ in plan(python(version), is_running=is_running, fast=fast)]

    assert loops("3.11.7", is_running=False)[0] == "asyncio"
    assert "eager" not in loops("3.11.7", is_running=False)
    assert loops("3.12.1", is_running=False)[:2] == ["asyncio", "eager"]
    assert loops("3.13.0", is_running=True)[-1] == "uvloop"


def test_what_is_selected_and_what_is_left_out_exists() -> None:
    """A name in ``--deselect`` that fits nothing would be ignored."""
    lists = (all_pythons.CORE, all_pythons.FAST_CORE, all_pythons.ALSO, all_pythons.BEYOND_CORE,
             all_pythons.NOT_EAGER)  # fmt: skip
    for name in {name for names in lists for name in names}:
        file, _, test = name.partition("::")
        assert (ROOT / file).exists(), name
        if test:
            named = test.partition("[")[0]
            source = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {named}(" in source or f"class {named}:" in source, name


def test_the_table_and_the_verdict() -> None:
    good = Row("3.12.1", "asyncio", 120, 0, 9.6)
    bad = Row("3.13.0", "eager", 118, 2, 10.1)
    broken = Row("3.14.0", "", 0, 0, 0, "its environment cannot be made")
    assert all_pythons.table([good, bad, broken]) == (
        "Python  event loop  passed  failed  seconds\n"
        "3.12.1  asyncio        120       0  10\n"
        "3.13.0  eager          118       2  10\n"
        "3.14.0                   0       0  0  its environment cannot be made"
    )
    assert all_pythons.is_good([good])
    for rows in ([], [good, bad], [good, broken], [good._replace(passed=0)]):
        assert not all_pythons.is_good(rows)


def test_a_report_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert counts(report) == (0, 0)
    report.write_text(
        '<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10"/></testsuites>'
    )
    assert counts(report) == (4, 3)
