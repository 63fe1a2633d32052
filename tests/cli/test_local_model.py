"""``clark-agent run`` with nothing set: the packaged model, two tools, and a log that replays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.command_line import CommandLine

pytestmark = pytest.mark.slow


async def test_a_task_with_two_tools_in_a_fresh_folder_and_its_replay(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    run.env["CLARK_AGENT_CACHE"] = os.environ["CLARK_AGENT_CACHE"]
    (run.root / "apples.txt").write_text("There are 6 apples in the basket.\n")
    said = await run.anew("run", "Read apples.txt and multiply the number in it by 7.")
    assert (said.code, said.out) == (0, "The answer is 42.\n")
    assert [line for line in said.err.splitlines() if line.startswith("●")] == [
        "● read_file(path='apples.txt')",
        "● calculator(expression='6*7')",
    ]
    assert "a very small model" in said.err
    (run.root / "apples.txt").unlink()  # a replay takes nothing from the world
    again = await run.anew("replay", "last")
    assert (again.code, again.out) == (0, "identical\n")
