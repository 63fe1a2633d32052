"""``--agent module:name`` runs an agent of the user's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clark_agent import Agent, AgentEvent, CancellationToken, RunAborted, RunIdentity, StreamRequest
from clark_agent.events import MessageUpdate
from clark_agent.run_log import RunLog, cancel
from clark_agent.stream import Chunk, Start, StreamEvent, TextChunk
from clark_agent.types import AssistantMessage, StopReason
from tests.cli.command_line import CommandLine
from tests.run_log.mailing import until

pytestmark = pytest.mark.slow

MODULE = '''
import json

from clark_agent import Agent, RunContext, ToolContext, tool
from clark_agent.testing import ScriptedStream, call
from msgspec import Struct


class Shop:
    name = "Alba"


class Verdict(Struct):
    score: int


@tool(reads_only=True)
def shop_name(ctx: ToolContext[Shop]) -> str:
    """The name of the shop."""
    return ctx.deps.name


@tool
def sell(item: str) -> str:
    """Sell an item."""
    return f"sold {item}"


def prompt(ctx: RunContext[Shop]) -> str:
    return f"You work for {ctx.deps.name}."


def answer(request):
    return f"{request.system_prompt} {request.messages[-1].plain_text}"


shop = Agent(
    ScriptedStream([call("shop_name"), answer]), tools=[shop_name], system_prompt=prompt,
    deps_type=Shop, name="shop",
)


def judge():
    return Agent(ScriptedStream([call("finish", score=9)]), output=Verdict)


@tool(reads_only=True)
def fails() -> str:
    """Fail."""
    raise ValueError("boom")


@tool(reads_only=True)
def stock() -> str:
    """The stock."""
    return json.dumps({"tea": 3, "milk": 4}, indent=2)


clerk = Agent(ScriptedStream([call("fails"), "It failed."]), tools=[fails], name="clerk")
shower = Agent(
    ScriptedStream([call("fails"), call("stock"), call("clerk", task="Try."), "Done."]),
    tools=[fails, stock, clerk.as_tool("Asks the clerk.")],
)
seller = Agent(ScriptedStream([call("sell", item="tea"), answer]), tools=[sell])
not_an_agent = 5
'''


@pytest.fixture
def line(tmp_path: Path) -> CommandLine:
    made = CommandLine(tmp_path, model="openai:never-used")
    (made.root / "own.py").write_text(MODULE)
    return made


async def test_an_agent_with_dependencies_is_run_logged_and_replayed(line: CommandLine) -> None:
    own = ("--agent", "own:shop", "--deps", "own:Shop")
    said = await line("run", *own, "Where am I?")
    assert (said.code, said.out.strip()) == (0, "You work for Alba. Alba"), said.err
    (summary,) = line.store.runs()
    assert summary.outcome == "done"
    again = await line("replay", "last", *own)
    assert (again.code, again.out.strip()) == (0, "identical"), again
    refused = await line("replay", "last")
    assert refused.code == 2
    assert "--agent own:shop" in refused.err, "a module is imported only if the user names it"


async def endless(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
    yield Start(AssistantMessage((), StopReason.OTHER))
    yield Chunk(TextChunk("Well"))
    await asyncio.Event().wait()


@pytest.mark.parametrize("way", ["program", "command"])
async def test_a_run_that_somebody_stops_replays_as_it_was(line: CommandLine, way: str) -> None:
    """Whether the command line has added plugins to the agent, or the user's program has not."""
    (line.root / "mine.py").write_text(
        "from tests.cli.test_own_agent import endless\n"
        "from clark_agent import Agent\n"
        "agent = Agent(endless)\n"
    )
    line.env["PYTHONPATH"] = str(Path(__file__).parents[2])  # for the module above
    mine = ("--agent", "mine:agent")
    if way == "program":

        def stop(event: AgentEvent) -> None:
            if isinstance(event, MessageUpdate):
                cancel(line.store, "mine", "enough")

        agent = Agent(endless, run_log=RunLog(line.store), event_sink=stop)
        with pytest.raises(RunAborted):
            await agent.run("Go.", identity=RunIdentity.root("mine"))
    else:
        process = await line.start("run", *mine, "Go.")
        await until(lambda: bool(line.store.runs()))
        cancel(line.store, line.store.runs()[0].run_id, "enough")
        await process.communicate()
    again = await line("replay", "last", *mine)
    assert (again.code, again.out) == (0, "identical\n"), again


async def test_an_agent_from_a_function_and_its_output(line: CommandLine) -> None:
    said = await line("run", "--json", "--agent", "own:judge", "Judge.")
    *_, result = [json.loads(row) for row in said.out.splitlines()]
    assert (result["outcome"], result["output"]) == ("done", {"score": 9})


async def test_the_tools_of_an_agent_need_approval(line: CommandLine) -> None:
    refused, allowed, yes = [
        await line("run", "--no-log", "--agent", "own:seller", *options, "Sell.")
        for options in ((), ("--allow", "sell"), ("--yes",))
    ]
    assert "sold tea" not in refused.out
    assert "sold tea" in allowed.out
    assert "sold tea" in yes.out


async def test_what_a_call_returned_is_shown_once_on_a_line(line: CommandLine) -> None:
    said = await line("run", "--yes", "--agent", "own:shower", "Go.")
    assert said.err.splitlines()[:-1] == [
        "● fails()",
        "✗ ValueError: boom",
        "● stock()",
        '  { "tea": 3, "milk": 4 }',
        "● clerk(task='Try.')",
        "●   fails()",
        "✗   ValueError: boom",
        "  It failed.",
    ]
    debugged = await line("run", "--yes", "--debug", "--agent", "own:shower", "Go.")
    assert "the tool 'fails' failed" in debugged.err


async def test_what_is_not_an_agent_is_an_error(line: CommandLine) -> None:
    cases = {
        "own": "write module:name",
        "own:missing": "has no 'missing'",
        "own:not_an_agent": "expected an Agent",
        "nowhere:agent": "cannot import nowhere",
        "own:selller": "did you mean 'seller'",
        "own.py:seller": "own:seller",
        "own:answer": "call without arguments fails",
    }
    said = await line.each([("run", "--no-log", "--agent", name, "Go.") for name in cases])
    for one, expected in zip(said, cases.values(), strict=True):
        assert one.code == 2
        assert expected in one.err
    both = await line("run", "--no-log", "--agent", "own:seller", "--tools", "shell", "Go.")
    assert (both.code, "--tools" in both.err) == (2, True)
    missing = await line("run", "--no-log", "--agent", "own:shop", "Go.")
    assert missing.code != 0
    assert "deps" in missing.err
