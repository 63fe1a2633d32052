"""Faults of compactions and large results change what a model gets in short stories."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

import clark_agent as ca
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.stream import Done, Start, StreamEvent, StreamRequest
from clark_agent.testing import ScriptedStream, call
from tests.model.faults import Story, check, promises_of


@ca.tool
def look(number: int) -> str:
    """Look something up."""
    return f"IMPORTANT: {number}" if number == 1 else f"Result {number}. " * 30


async def compactions() -> object:
    """What a model gets in each request of a run in which old turns become summaries."""
    requests: list[list[str]] = []

    async def model(request: StreamRequest, signal: object) -> AsyncIterator[StreamEvent]:
        texts = [message.plain_text for message in request.messages]
        answers = [m for m in request.messages if isinstance(m, ca.AssistantMessage)]
        number = 1 + int(answers[-1].tool_calls[0].id) if answers else 0
        if "Write a summary" in texts[-1]:
            answer = ca.AssistantMessage.from_text("Nothing special so far.")
        elif number == 30:
            answer = ca.AssistantMessage.from_text("Done.")
        else:
            requests.append(texts)
            asked = ca.ToolCall(str(number), "look", {"number": number})
            answer = ca.AssistantMessage.from_calls([asked])
        yield Start(ca.AssistantMessage((), ca.StopReason.OTHER))
        yield Done(answer)

    compaction = ca.Compaction(2_000, pinned=lambda m: "IMPORTANT" in m.plain_text)
    config = ca.LoopConfig(stream=model, tools=[look], plugins=[compaction], max_iterations=40)
    await ca.run("Look up 30 numbers.", ca.AgentContext(), config)
    return requests


async def a_large_result() -> object:
    """What a model gets of a large result, and when it reads on."""

    @ca.tool
    def many() -> str:
        """Return a lot."""
        return "".join(f"line {n}\n" for n in range(200))

    read: Any = call("read_result", id="r/1-0", start=500, end=700)
    config = ca.LoopConfig(
        stream=ScriptedStream([call("many"), read, "Done."]),
        tools=[many],
        plugins=[ca.LargeResults(1_000, shown_chars=400, page_chars=200)],
        run_log=RunLog(MemoryStore()),
    )
    result = await ca.run("Go.", ca.AgentContext(identity=ca.RunIdentity("r")), config)
    return [message.plain_text for message in result.messages]


STORIES: dict[str, Story] = {
    "a compaction replaces the newest messages": compactions,
    "a compaction replaces the earlier summaries": compactions,
    "a compaction replaces pinned messages": compactions,
    "a compaction replaces the task": compactions,
    "the model gets the whole of a large result": a_large_result,
    "what is left out of a large result is lost": a_large_result,
}


@pytest.mark.parametrize("promise", promises_of("context"))
def test_a_fault_changes_what_a_model_gets(promise: str) -> None:
    check(promise, STORIES[promise])
