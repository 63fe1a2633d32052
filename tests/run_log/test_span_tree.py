"""A logged run as a tree of spans, and the tree as text."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unicodedata import combining, east_asian_width

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    Agent,
    AssistantMessage,
    BeforeToolCallContext,
    Price,
    StopReason,
    Suspend,
    TextContent,
    ToolExecutionError,
    ToolResult,
    ToolSuspended,
    tool,
)
from clark_agent.run_log import (
    Allow,
    GiveResult,
    JsonlStore,
    LoggedSpan,
    MemoryStore,
    RunLog,
    RunNotFound,
    decide,
    resume,
    span_tree,
    tree_lines,
    usage_tree,
    waiting_for,
)
from clark_agent.run_log.records import Asked, ToolStarted
from clark_agent.testing import FakeClock, ScriptedStream, call
from clark_agent.types import Usage

PRICE = Price(input=1.0, output=10.0)


class Model(ScriptedStream):
    model = "m"


def answer(text: str, *calls: Any) -> AssistantMessage:
    reason = StopReason.TOOL_USE if calls else StopReason.END_TURN
    return AssistantMessage((TextContent(text), *calls), reason, usage=Usage(1000, 100))


@tool
def look(item: str) -> str:
    """Look."""
    if item == "bad":
        raise ToolExecutionError("no")
    return item


def names(span: LoggedSpan, depth: int = 0) -> list[str]:
    found = ["." * depth + span.name]
    for child in span.children:
        found += names(child, depth + 1)
    return found


async def test_a_run_with_a_child_is_one_tree() -> None:
    store = MemoryStore()
    child = Agent(Model([answer("Here.")]), name="child")
    parent = Agent(
        Model(
            [
                answer("", call("child", task="a"), call("look", item="bad"), call("missing")),
                answer("Done."),
            ]
        ),
        tools=[child.as_tool("Finds."), look],
        run_log=RunLog(store),
        name="parent",
    )
    await parent.run("Go.")
    (root,) = [each for each in store.runs() if not each.depth]
    tree = span_tree(store, root.run_id, price=PRICE)
    assert sorted(names(tree)) == sorted(
        [
            "invoke_agent parent",
            ".turn 1",
            "..chat m",
            "..execute_tool child",
            "...invoke_agent child",
            "....turn 1",
            ".....chat m",
            "..execute_tool look",
            "..execute_tool missing",
            ".turn 2",
            "..chat m",
        ]
    )
    assert tree.usage == Usage(2000, 200)  # its own
    assert tree.cost == pytest.approx(0.004)
    assert tree.notes == ["done"]
    by_name = {span.name: span for span in tree.walk()}
    assert by_name["execute_tool look"].notes == ["error"]
    assert by_name["execute_tool missing"].notes == ["not run", "error"]
    assert by_name["invoke_agent child"].usage == Usage(1000, 100)
    for span in tree.walk():
        assert span.ended_at is not None
        assert tree.began_at <= span.began_at <= span.ended_at <= (tree.ended_at or 0)


async def test_the_time_in_which_a_run_was_suspended_is_a_span() -> None:
    class Ask:
        def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | None:
            return None if ctx.was_allowed else Suspend({"summary": "look"})

    store = MemoryStore()
    agent = Agent(
        Model([answer("", call("look", item="tea")), answer("Done.")]),
        tools=[look],
        plugins=[Ask()],
        run_log=RunLog(store),
    )
    await agent.run("Go.")
    (request,) = waiting_for(store)
    before = span_tree(store, request.run_id)
    assert names(before) == ["invoke_agent", ".turn 1", "..chat m", ".suspended"]
    assert before.ended_at is None
    assert [re.sub(r"(?<=\w)  .*", "", line) for line in tree_lines(before)] == [
        "invoke_agent",
        "├─ turn 1",
        "│  └─ chat m",
        "└─ suspended",
    ]
    await decide(store, request.run_id, request.request_id, Allow())
    await resume(store, request.run_id, agent)
    after = span_tree(store, request.run_id)
    found = names(after)
    assert found.count(".suspended") == 1
    assert "..execute_tool look" in found
    assert after.notes == ["done"]


@pytest.mark.parametrize(
    ("last", "drawn"),
    [
        (
            Asked,
            [
                "invoke_agent … ░░░░ not ended",
                "└─ turn 1 … ░░░░ not ended",
                " └─ chat m … ░░░░ not ended",
            ],
        ),
        (
            ToolStarted,
            [
                "invoke_agent … ░░░░ not ended",
                "└─ turn 1 … ░░░░ not ended",
                " ├─ chat m 1.0 s ████",
                " └─ execute_tool look … ░ not ended",
            ],
        ),
    ],
)
async def test_what_has_not_ended_is_marked(last: type, drawn: list[str], tmp_path: Path) -> None:
    store, clock = JsonlStore(tmp_path), FakeClock()

    class Slow(Model):
        """Works for a second."""

        async def __call__(self, *args: Any) -> AsyncIterator[Any]:
            clock.time_ms += 1000
            async for event in super().__call__(*args):
                yield event

    agent = Agent(
        Slow([call("look", item="tea"), "Done."]),
        tools=[look],
        run_log=RunLog(store),
        clock=clock,
    )
    await agent.run("Go.")
    (logged,) = store.runs()
    records = store.load(logged.run_id).records
    end = next(n for n, record in enumerate(records) if isinstance(record.entry, last))
    path = tmp_path / f"{logged.run_id}.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: end + 1]))  # killed
    tree = span_tree(JsonlStore(tmp_path), logged.run_id)
    assert [re.sub(" +", " ", line) for line in tree_lines(tree, bar=4)] == drawn
    for span in tree.walk():
        assert ("not ended" in span.notes) is (span.ended_at is None)


class Asks:
    """Suspends the run before a call, unless that was allowed."""

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | None:
        return None if ctx.was_allowed else Suspend({"summary": "look"})


async def test_a_call_that_waits_is_one_span_and_waiting_takes_no_time() -> None:
    store, clock = MemoryStore(), FakeClock()

    @tool
    def danger() -> str:
        """Work for two seconds."""
        clock.time_ms += 2000
        return "done"

    class Slow(Model):
        """Works for a second."""

        async def __call__(self, *args: Any) -> AsyncIterator[Any]:
            clock.time_ms += 1000
            async for event in super().__call__(*args):
                yield event

    child = Agent(
        Slow([call("danger"), "Done."]),
        tools=[danger],
        name="child",
        plugins=[Asks()],
        clock=clock,
    )
    parent = Agent(
        Slow([call("child", task="Go."), "Done."]),
        tools=[child.as_tool("Does it.")],
        name="parent",
        run_log=RunLog(store),
        clock=clock,
    )
    await parent.run("Go.")
    (request,) = waiting_for(store)
    clock.time_ms += 3 * 86_400_000
    await decide(store, request.run_id, request.request_id, Allow(), clock=clock)
    clock.time_ms += 86_400_000
    await resume(store, request.root_run_id, parent)
    tree = span_tree(store, request.root_run_id)
    assert names(tree) == [
        "invoke_agent parent",
        ".turn 1",
        "..chat m",
        "..execute_tool child",
        "...invoke_agent child",
        "....turn 1",
        ".....chat m",
        ".....execute_tool danger",
        "....suspended",
        "....turn 2",
        ".....chat m",
        ".suspended",
        ".turn 2",
        "..chat m",
    ]
    worked = {span.name: span.worked_ms for span in tree.walk()}
    usage = usage_tree(store, request.root_run_id)
    assert worked["invoke_agent parent"] == usage.milliseconds == 6000
    assert worked["invoke_agent child"] == usage.children[0].milliseconds == 4000
    assert worked["execute_tool child"] == 4000
    assert [span.worked_ms for span in tree.walk() if span.name == "turn 1"] == [5000, 3000]
    assert worked["suspended"] == 4 * 86_400_000
    assert not [note for span in tree.walk() for note in span.notes if note != "done"]
    for span in tree.walk():
        assert all(span.began_at <= below.began_at for below in span.children)
    lines = tree_lines(tree, bar=6)
    assert lines[0].endswith("  ██████  done")
    assert next(line for line in lines if "execute_tool child" in line).endswith("   ████")


async def test_a_call_that_waits_for_its_result_is_one_span() -> None:
    store, clock = MemoryStore(), FakeClock()

    @tool
    def ask() -> str:
        """Wait for a result."""
        clock.time_ms += 2000
        raise ToolSuspended({"summary": "what?"})

    agent = Agent(Model([call("ask"), "Done."]), tools=[ask], run_log=RunLog(store), clock=clock)
    await agent.run("Go.")
    (request,) = waiting_for(store)
    before = {span.name: span for span in span_tree(store, request.run_id).walk()}
    assert before["execute_tool ask"].notes == ["waits"]
    clock.time_ms += 86_400_000
    verdict = GiveResult(ToolResult.error("nothing"))
    await decide(store, request.run_id, request.request_id, verdict, clock=clock)
    await resume(store, request.run_id, agent)
    tree = span_tree(store, request.run_id)
    (found,) = [span for span in tree.walk() if span.name == "execute_tool ask"]
    assert (found.worked_ms, found.notes) == (2000, ["error"])
    assert tree.worked_ms == usage_tree(store, request.run_id).milliseconds == 2000


def test_the_lines_are_aligned() -> None:
    chat = LoggedSpan("chat m", 1000, 2500, Usage(1200, 80), 0.0023)
    late = LoggedSpan("execute_tool look", 2500, 3000, notes=["error"])
    turn = LoggedSpan("turn 1", 1000, 3000, children=[chat, late])
    root = LoggedSpan("invoke_agent a", 1000, 3000, Usage(1200, 80), 0.0023, ["done"], [turn])
    assert tree_lines(root, bar=8) == [
        "invoke_agent a            2.0 s  1,200 in · 80 out  0.0023  ████████  done",
        "└─ turn 1                 2.0 s                             ████████",
        "   ├─ chat m              1.5 s  1,200 in · 80 out  0.0023  ██████",
        "   └─ execute_tool look  500 ms                                   ██  error",
    ]
    assert tree_lines(root, bar=0)[1] == "└─ turn 1                 2.0 s"


CHAT = LoggedSpan("chat gpt-5", 1000, 2500, Usage(1200, 80), 0.0023)
ROOT = LoggedSpan("invoke_agent a", 1000, 3000, CHAT.usage, 0.0023, ["done"], [CHAT])


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (200, "invoke_agent a  2.0 s  1,200 in · 80 out  0.0023  ████████████████████████  done"),
        (72, "invoke_agent a  2.0 s  1,200 in · 80 out  0.0023  ████████████████  done"),
        (62, "invoke_agent a  2.0 s  1,200 in · 80 out  0.0023  ██████  done"),
        (61, "invoke_agent a  2.0 s  1.2k/80  0.0023  ███████████████  done"),
        (51, "agent a        2.0 s  1.2k/80  0.0023  ██████  done"),
        (49, "agent a        2.0 s  1.2k/80  0.0023  done"),
        (39, "agent a       2.0 s  1.2k/80  0.0023  …"),
    ],
)
def test_in_a_narrow_terminal_it_is_shorter(width: int, expected: str) -> None:
    first, second = tree_lines(ROOT, width=width)
    assert first == expected
    assert max(len(first), len(second)) <= width


def nested(depth: int) -> LoggedSpan:
    """A child run below a child run, and so on."""
    span = LoggedSpan("execute_tool price", 0, 1, Usage(12_345_678, 150), 1.5, ["error"])
    for n in range(depth):
        span = LoggedSpan(f"invoke_agent {n}", 0, 3000, Usage(1, 1), 0.1, children=[span])
    return span


def test_the_bars_stay_in_80_columns() -> None:
    for line in tree_lines(nested(6), width=80):
        assert set(line) & set("▏▎▍▌▋▊▉█")


texts = st.text(max_size=30)
spans = st.recursive(
    st.builds(
        LoggedSpan,
        texts,
        st.integers(0, 9),
        st.none() | st.integers(0, 10**9),
        st.none() | st.builds(Usage, st.integers(0, 10**9), st.integers(0, 10**9)),
        st.none() | st.floats(0, 1000),
        st.lists(texts, max_size=2),
    ),
    lambda below: st.builds(
        LoggedSpan, texts, st.integers(0, 9), children=st.lists(below, max_size=3)
    ),
    max_leaves=8,
)


@given(spans, st.integers(1, 120))
def test_every_span_is_one_line_that_fits(root: LoggedSpan, width: int) -> None:
    lines = tree_lines(root, width=width)
    assert len(lines) == len(list(root.walk())) == len(tree_lines(root))
    for line in (*lines, *tree_lines(root)):
        assert line.isprintable()
    for line in lines:
        wide = sum(east_asian_width(c) in "WF" for c in line)
        narrow = sum(not combining(c) for c in line if east_asian_width(c) not in "WF")
        assert 2 * wide + narrow <= width


def test_a_run_that_is_not_there() -> None:
    with pytest.raises(RunNotFound):
        span_tree(MemoryStore(), "none")


def test_a_name_that_a_model_made_up_is_not_endless() -> None:
    (line,) = tree_lines(LoggedSpan("execute_tool " + "x" * 1_000_000, 0, 1))
    assert len(line) < 150
