"""Compacting a conversation between its runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AssistantMessage,
    CancellationToken,
    Compaction,
    ConfigError,
    Conversation,
    LoopConfig,
    RunAborted,
    StopReason,
    StreamRequest,
    Usage,
    UserMessage,
)
from clark_agent.errors import InvalidContinuationError
from clark_agent.plugins._compacted import mark_of
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.run_log.records import RunBegan
from clark_agent.stream import Done, Start, StreamEvent
from clark_agent.testing import ScriptedStream, say
from clark_agent.tools import ToolResult
from clark_agent.types import ToolResultMessage

EMPTY = AssistantMessage((), StopReason.OTHER)


class Talks:
    """A model that talks, and summarises when it is asked to."""

    def __init__(self) -> None:
        self.requests: list[StreamRequest] = []
        self.waits: asyncio.Event | None = None
        self.says: Any = "They talked."

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        yield Start(EMPTY)
        if "Write a summary" in request.messages[-1].plain_text:
            if self.waits is not None:
                self.waits.set()
                await asyncio.Event().wait()
            yield Done(replace(say(self.says), usage=Usage(90, 9)))
        else:
            yield Done(say("I see. " * 20))


async def talked(model: Talks, turns: int = 8, **settings: Any) -> Conversation:
    config = LoopConfig(stream=model, plugins=[Compaction(10_000)], **settings)
    talk = Conversation(config, "You talk.")
    for number in range(turns):
        await talk.send(f"Sentence {number}. " * 10)
    return talk


async def test_it_compacts_now_and_says_what_it_has_done(tmp_path: Path) -> None:
    model = Talks()
    talk = await talked(model)
    before = talk.messages
    report = await talk.compact()
    assert report is None, "all of it fits into the target"
    talk.config = LoopConfig(stream=model, plugins=[Compaction(500)])
    report = await talk.compact()
    assert report is not None
    assert report.first_turn == 1
    assert 1 < report.last_turn < 8
    assert report.has_summary
    assert report.tokens_after < report.tokens_before
    assert report.usage == Usage(90, 9)
    assert talk.messages[:-1] == before
    assert mark_of(talk.messages[-1]) is not None
    assert talk.messages[-1].timestamp is not None
    question = model.requests[-1]
    assert question.system_prompt == "You talk."
    assert list(question.messages[:-1]) == list(before)
    talk.save(tmp_path / "talk.json")
    loaded = Conversation.load(tmp_path / "talk.json", talk.config)
    await loaded.send("And now?")
    texts = [message.plain_text for message in model.requests[-1].messages]
    assert texts[0] == before[0].plain_text
    assert texts[1].endswith("They talked.")
    assert texts[-1] == "And now?"
    assert len(texts) < len(before)
    assert len(model.requests) == 8 + 1 + 1, "it is not compacted again"


async def test_the_next_run_has_it_in_its_history() -> None:
    store = MemoryStore()
    model = Talks()
    talk = await talked(model)
    talk.config = LoopConfig(stream=model, plugins=[Compaction(500)], run_log=RunLog(store))
    assert await talk.compact() is not None
    assert not store.runs()
    await talk.send("And now?")
    (summary,) = store.runs()
    began = store.load(summary.run_id).records[0].entry
    assert isinstance(began, RunBegan)
    assert mark_of(began.history[-1]) is not None


async def test_a_second_time_there_is_less_to_do() -> None:
    model = Talks()
    talk = await talked(model)
    talk.config = LoopConfig(stream=model, plugins=[Compaction(500)])
    assert await talk.compact() is not None
    messages = talk.messages
    assert await talk.compact() is None
    assert talk.messages == messages


async def test_a_conversation_that_ends_with_it_waits_for_no_answer() -> None:
    model = Talks()
    talk = await talked(model)
    talk.config = LoopConfig(stream=model, plugins=[Compaction(500)])
    await talk.compact()
    with pytest.raises(InvalidContinuationError, match="ends with an assistant message"):
        await talk.send()


@pytest.mark.parametrize("says", ["", "Much longer than what it is about. " * 500])
async def test_without_a_shorter_summary_nothing_changes(
    says: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Talks()
    model.says = says
    talk = await talked(model)
    talk.config = LoopConfig(stream=model, plugins=[Compaction(500)])
    messages = talk.messages
    report = await talk.compact()
    assert report is not None
    assert not report.has_summary
    assert report.messages == 0
    assert report.tokens_after == report.tokens_before
    assert report.usage.output_tokens > 0
    assert talk.messages == messages
    assert not caplog.records


async def test_it_can_be_cancelled() -> None:
    model = Talks()
    talk = await talked(model)
    talk.config = LoopConfig(stream=model, plugins=[Compaction(500)])
    messages, signal = talk.messages, CancellationToken()
    model.waits = asyncio.Event()
    task = asyncio.create_task(talk.compact(signal))
    await model.waits.wait()
    with pytest.raises(RuntimeError, match="in progress"):
        await talk.send("Hello?")
    signal.cancel("enough")
    with pytest.raises(RunAborted, match="enough"):
        await task
    with pytest.raises(RunAborted):
        await talk.compact(signal)
    assert talk.messages == messages
    task = asyncio.create_task(talk.compact())
    model.waits.clear()
    await model.waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    model.waits = None
    assert await talk.compact() is not None


async def test_it_needs_the_plugin_and_a_run_that_is_over() -> None:
    talk = Conversation(LoopConfig(stream=ScriptedStream(["x"])), "")
    with pytest.raises(ConfigError, match=r"add Compaction\(\)"):
        await talk.compact()
    waits = ToolResult.text("waits", details={"kind": "suspended", "run_id": "r"})
    messages = (UserMessage("x"), ToolResultMessage("c", "t", waits.content, details=waits.details))
    config = LoopConfig(stream=ScriptedStream([]), plugins=[Compaction()])
    with pytest.raises(InvalidContinuationError, match="suspended"):
        await Conversation(config, AgentContext("", messages)).compact()
