"""The tree of spans fits into the terminal, and cannot control it."""

from __future__ import annotations

from io import StringIO

import pytest

from clark_agent import Agent, Price
from clark_agent.cli.trace_view import show_trace
from clark_agent.cli.view import PlainScreen
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.testing import ScriptedStream


@pytest.mark.parametrize("width", [200, 80, 60, 30])
async def test_no_line_is_longer_than_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(ScriptedStream):
        model = "m\x1b[2J\nnew line\x07"

    store = MemoryStore()
    await Agent(Model(["Done."]), name="buyer", run_log=RunLog(store)).run("Go.")
    (run,) = store.runs()
    monkeypatch.setenv("COLUMNS", str(width))
    shown = StringIO()
    price = Price(input=1, output=1)
    show_trace(PlainScreen(StringIO(), shown), store, run.run_id, price=price)
    lines = shown.getvalue().splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= width
    assert all(line.isprintable() for line in lines)
    assert ("m\\x1b[2J\\nnew line\\x07" in lines[2]) is (width >= 60)
