"""Runs of an agent on the tools of MCP servers, with a scripted model; what must hold for each."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, NamedTuple

from clark_agent import Agent, AgentEvent, RunIdentity, RunResult, ToolResultMessage
from clark_agent.events import ToolExecutionUpdate
from clark_agent.history import repair_history
from clark_agent.mcp import McpTools
from clark_agent.result import LoopOutcome
from clark_agent.testing import RecordingSink, ScriptedStream, Step, check_events
from clark_agent.toolkit.untrusted import without_marks
from clark_agent.types import FileContent

SAFETY_NET = 60.0
"""Seconds after which a test has failed because something hangs. Nothing waits for it."""


class Driven(NamedTuple):
    """A run that has ended."""

    result: RunResult[Any]
    events: list[AgentEvent]
    stream: ScriptedStream

    @property
    def answers(self) -> list[ToolResultMessage]:
        """The results of its tool calls, in order."""
        return [m for m in self.result.messages if isinstance(m, ToolResultMessage)]

    @property
    def texts(self) -> list[str]:
        """Their texts, without the marks of untrusted text."""
        return [text_of(answer) for answer in self.answers]

    @property
    def updates(self) -> list[str]:
        """What the tools said while they worked."""
        found = [event for event in self.events if isinstance(event, ToolExecutionUpdate)]
        return [str(event.partial) for event in found]

    @property
    def offered(self) -> list[list[str]]:
        """The names of the tools in each request."""
        return [[tool.name for tool in request.tools] for request in self.stream.requests]


def text_of(answer: Any) -> str:
    """The text of a tool result, without the marks of untrusted text."""
    texts = [block.text for block in answer.content if hasattr(block, "text")]
    return "\n".join(without_marks(text) for text in texts)


async def drive(tools: McpTools, *steps: Step, run_id: str = "r", **settings: Any) -> Driven:
    """Run an agent whose model plays these steps and then says "done".

    The run must end normally, with its events in order and a transcript that needs no repair.
    """
    stream, sink = ScriptedStream([*steps, "done"]), RecordingSink()
    agent = Agent(stream, tool_source=tools, event_sink=sink, max_result_chars=None, **settings)
    async with asyncio.timeout(SAFETY_NET):
        result = await agent.run("go", identity=RunIdentity.root(run_id))
    check(result, sink.events)
    return Driven(result, sink.events, stream)


def check(result: RunResult[Any], events: list[AgentEvent]) -> None:
    """What holds for every run, whatever its servers do."""
    check_events(events)
    assert result.outcome is LoopOutcome.DONE
    assert repair_history(result.messages).changes == ()


async def eventually(condition: Any) -> None:
    """Wait until `condition()` holds; for what another process does."""
    async with asyncio.timeout(SAFETY_NET):
        while not condition():  # noqa: ASYNC110 - nobody in this process could set an event
            await asyncio.sleep(0.02)


def text_of_blocks(blocks: Any) -> str:
    return "\n".join(block.text for block in blocks if hasattr(block, "text"))


def content_of(file: FileContent) -> bytes:
    """The bytes of a file that is a data URL."""
    return base64.b64decode(file.source.partition("base64,")[2])


class Person:
    """Gives the first answer whose key is in the question, else its last choice, else skips it."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.questions: list[str] = []

    async def __call__(self, question: str, choices: Any) -> str:
        self.questions.append(question)
        for key, answer in self.answers.items():
            if key in question:
                return answer
        return choices[-1] if choices else "skip"
