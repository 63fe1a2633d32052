"""The tree of spans fits into the terminal, and cannot control it."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest

from clark_agent import Agent, Price
from clark_agent.cli.trace_view import show_trace
from clark_agent.cli.view import PlainScreen
from clark_agent.run_log import JsonlStore, LogDamaged, MemoryStore, RunLog, span_tree
from clark_agent.testing import ScriptedStream, call

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(
    ("damaged", "record", "shown"),
    [
        ("parent", 5, {"invoke_agent parent": "damaged", "invoke_agent child": "done"}),
        ("child", 3, {"invoke_agent parent": "done", "invoke_agent child": "damaged"}),
        ("child", 0, {"invoke_agent parent": "done"}),
    ],
)
async def test_what_is_intact_of_damaged_logs_is_drawn(
    tmp_path: Path, damaged: str, record: int, shown: dict[str, str]
) -> None:
    store = JsonlStore(tmp_path)
    child = Agent(ScriptedStream(["Here."]), name="child")
    parent = Agent(
        ScriptedStream([call("child", task="x"), "Done."]),
        tools=[child.as_tool("Finds.")],
        name="parent",
        run_log=RunLog(store),
    )
    await parent.run("Go.")
    ids = {"child" if run.depth else "parent": run.run_id for run in store.runs()}
    path = tmp_path / f"{ids[damaged]}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[record] = lines[record].replace(b"kind", b"kund")
    path.write_bytes(b"".join(lines))
    out = StringIO()
    show_trace(PlainScreen(StringIO(), out), JsonlStore(tmp_path), ids["parent"])
    drawn = out.getvalue().splitlines()
    runs = [line for line in drawn if "invoke_agent" in line]
    assert len(runs) == len(shown)
    for line, (name, note) in zip(runs, shown.items(), strict=True):
        assert name in line
        assert line.endswith(note)
    assert f"the log of run '{ids[damaged]}' is damaged" in drawn[-1]
    with pytest.raises(LogDamaged):
        span_tree(JsonlStore(tmp_path), ids["parent"])
