"""The examples run as they are, without a warning, and print what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))

EXPECTED = {
    "minimal.py": """\
Hello! How can I help?
(done, 2 messages)
""",
    "tool_call.py": """\
→ count_words({'text': 'to be or not to be'})
  counting …
← 6
Six words.
""",
    "structured_result.py": """\
invalid arguments for 'deliver': path $.decision: expected one of "approve", "reject", got the \
string "maybe"
Delivered.
Verdict(decision='approve', score=9)
""",
    "security_gate.py": """\
Paths with '..' are not allowed. Name the file inside the workspace.
    {'decided_by': [{'plugin': 'guard', 'decision': 'block'}]}
/workspace/notes.txt is gone
    {'decided_by': [{'plugin': 'guard', 'decision': 'rewrite', \
'args': {'path': '/workspace/notes.txt'}}]}
One was refused, the other is done.
""",
    "child_run.py": """\
child of parent: Rust 1.0 came out in May 2015.
In May 2015.
""",
}


def play(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example as a user does, from a folder that is not the project's."""
    return subprocess.run(
        [sys.executable, "-X", "utf8", "-W", "error", str(FOLDER / name)],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    ran = play(name, tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout
    if name in EXPECTED:  # the others only have to run
        assert ran.stdout == EXPECTED[name]
    assert list(tmp_path.iterdir()) == []  # it leaves nothing lying about


def test_every_promise_has_its_example() -> None:
    assert EXPECTED.keys() <= set(EXAMPLES)


def test_the_first_examples_are_short() -> None:
    """They are what a newcomer reads first."""
    lines = {name: len((FOLDER / name).read_text().splitlines()) for name in EXAMPLES}
    assert lines["minimal.py"] <= 25
    assert lines["tool_call.py"] <= 45


@pytest.mark.parametrize("name", EXAMPLES)
def test_importing_an_example_does_nothing(name: str, tmp_path: Path) -> None:
    """So that an editor or a documentation tool may load it."""
    code = f"import runpy; runpy.run_path({str(FOLDER / name)!r}, run_name='example')"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "")
