"""How compactions look: live, and in a log."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from clark_agent.cli.commands.log import show
from clark_agent.cli.view import PlainScreen, View
from clark_agent.run_log import JsonlStore, RunLog
from tests.run_log.stories import begin

pytestmark = pytest.mark.slow

LINE = "turns 1 to 3 summarised: 324 → 217 tokens"


async def test_live_and_in_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = begin("compacting")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    folder = tmp_path / "clark-agent" / "runs"
    result: Any = await story.play(RunLog(JsonlStore(folder)))
    notes = StringIO()
    view = View(PlainScreen(StringIO(), notes))
    for event in story.sink.events:
        view(event)
    assert notes.getvalue().count(LINE) == 1
    again = StringIO()
    View(PlainScreen(StringIO(), again)).show(result.messages)
    assert again.getvalue().count(LINE) == 1
    shown = CliRunner().invoke(show, ["last"])
    assert shown.exit_code == 0, shown.output
    assert LINE in shown.output
    assert shown.output.count("compaction asked a model: ") == story_questions(story)
    trace = CliRunner().invoke(show, ["last", "--trace"])
    assert trace.output.count("asked by compaction") == story_questions(story)


def story_questions(story: Any) -> int:
    asked = [request.messages[-1].plain_text for request in story.models[0].asked]
    return sum(["Write a summary" in text for text in asked])
