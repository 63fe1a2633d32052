"""Chat Completions with servers that others wrote: a mock of the providers, and a real model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import pytest
from msgspec import Meta

from clark_agent import (
    AgentContext,
    AssistantMessage,
    CancellationToken,
    Conversation,
    LoopConfig,
    ReasoningContent,
    RunAborted,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamEvent,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    ToolSchema,
    Usage,
    UserMessage,
    run,
    run_sync,
    tool,
)
from clark_agent.stream import Chunk, Done, Error, TextChunk
from clark_agent.testing import FakeClock, RecordingSink
from clark_agent.testing.transport_kit import check_events_of, check_stream_fn
from clark_agent.transports import OpenAIChat, connect
from clark_agent.transports.dialects import OPENROUTER
from tests.transports.servers.aimock import Aimock
from tests.transports.servers.llama import SHORT, LlamaServer
from tests.transports.wires_chat import ask, asking, transport

pytestmark = pytest.mark.slow


def message_of(events: list[StreamEvent]) -> AssistantMessage:
    assert not check_events_of(events)
    last = events[-1]
    assert isinstance(last, Done), last
    return last.message


def error_of(events: list[StreamEvent]) -> Error:
    assert not check_events_of(events)
    last = events[-1]
    assert isinstance(last, Error), last
    return last


@tool
def weather(city: Annotated[str, Meta(max_length=20)]) -> str:
    """The weather of a city."""
    return f"22 °C and sunny in {city}"


WEATHER = ToolSchema(
    "weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
)


# --- a mock of the providers ------------------------------------------------------------------


class TestAimock:
    @pytest.fixture
    async def chat(self, aimock: Aimock) -> AsyncGenerator[OpenAIChat, None]:
        async with aclosing(transport(aimock.url, model="gpt-4o", api_key="key")) as chat:
            yield chat

    async def test_streamed_text(self, aimock: Aimock, chat: OpenAIChat) -> None:
        told = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
        aimock.play({"response": {"content": "Hello there!", "usage": told}, "chunkSize": 3})
        request = asking(UserMessage("Weather in Oslo?"), temperature=0.5, max_output_tokens=50)
        events = await ask(chat, request)
        message = message_of(events)
        assert (message.plain_text, message.stop_reason) == ("Hello there!", StopReason.END_TURN)
        assert message.usage == Usage(9, 2)
        chunks = [event.chunk for event in events if isinstance(event, Chunk)]
        assert chunks == [TextChunk(delta) for delta in ("Hel", "lo ", "the", "re!")]
        [entry] = aimock.journal()
        assert (entry.method, entry.path) == ("POST", "/v1/chat/completions")
        sent = chat.encode(request)
        assert {name: entry.body[name] for name in sent} == sent

    async def test_parallel_calls(self, aimock: Aimock, chat: OpenAIChat) -> None:
        calls = [
            {"name": "weather", "arguments": {"city": "Oslo"}, "id": "call_1"},
            {"name": "weather", "arguments": {"city": "Zürich 🦀"}, "id": "call_2"},
        ]
        aimock.play({"response": {"content": "Let me see.", "toolCalls": calls}, "chunkSize": 2})
        message = message_of(await ask(chat, asking(tools=(WEATHER,))))
        assert message.plain_text == "Let me see."
        assert message.tool_calls == (
            ToolCall("call_1", "weather", {"city": "Oslo"}),
            ToolCall("call_2", "weather", {"city": "Zürich 🦀"}),
        )
        assert message.stop_reason is StopReason.TOOL_USE

    async def test_reasoning(self, aimock: Aimock, chat: OpenAIChat) -> None:
        aimock.play({"response": {"content": "Yes.", "reasoning": "Let me think."}})
        message = message_of(await ask(chat))
        assert (message.reasoning_text, message.plain_text) == ("Let me think.", "Yes.")

    async def test_openrouter(self, aimock: Aimock) -> None:
        aimock.play({"response": {"content": "Yes.", "reasoning": "Let me think."}})
        chat = OpenAIChat(
            "qwen/qwen3", base_url=f"{aimock.url}/api/v1", api_key="key", dialect=OPENROUTER
        )
        async with aclosing(chat):
            message = message_of(await ask(chat))
        assert message.plain_text == "Yes."
        [entry] = aimock.journal()
        assert entry.body["reasoning"] == {"effort": "minimal"}

    async def test_asks_again_when_told_to(self, aimock: Aimock, chat: OpenAIChat) -> None:
        busy = {"error": {"message": "slow down"}, "status": 429, "retryAfter": 7}
        aimock.play({"response": busy}, {"response": {"content": "Hello"}})
        assert message_of(await ask(chat)).plain_text == "Hello"
        assert isinstance(chat.clock, FakeClock)
        assert chat.clock.sleeps == [7]
        assert [entry.response.status for entry in aimock.journal()] == [429, 200]

    async def test_a_connection_that_breaks(self, aimock: Aimock, chat: OpenAIChat) -> None:
        answer = {"response": {"content": "a long answer"}, "chunkSize": 1, "latency": 5}
        aimock.play({**answer, "truncateAfterChunks": 4})
        last = error_of(await ask(chat))
        assert last.kind in (StreamErrorKind.TRANSIENT, StreamErrorKind.EMPTY)
        assert "a long answer".startswith(last.partial.plain_text)
        assert last.partial.plain_text
        [entry] = aimock.journal()
        assert entry.response.interrupted

    async def test_a_run_goes_on_after_a_connection_broke(
        self, aimock: Aimock, chat: OpenAIChat
    ) -> None:
        answer = {"response": {"content": "a long answer"}, "chunkSize": 1, "latency": 5}
        aimock.play({**answer, "truncateAfterChunks": 4}, answer)
        conversation = Conversation(LoopConfig(stream=chat, clock=FakeClock()))
        with pytest.raises(StreamError) as failed:
            await conversation.send("Hi")
        assert failed.value.kind in (StreamErrorKind.TRANSIENT, StreamErrorKind.EMPTY)
        result = await conversation.send("Again, please")
        assert result.text == "a long answer"

    async def test_a_request_that_it_refuses(self, aimock: Aimock, chat: OpenAIChat) -> None:
        last = error_of(await ask(chat))
        assert last.kind is StreamErrorKind.FATAL
        assert last.message.startswith("the server answered 404")
        assert len(aimock.journal()) == 1

    async def test_an_agent_with_tools(self, aimock: Aimock, chat: OpenAIChat) -> None:
        calls = [
            {"name": "weather", "arguments": {"city": city}, "id": f"call_{city}"}
            for city in ("Oslo", "Rome")
        ]
        aimock.play(
            {"response": {"content": "Let me look.", "toolCalls": calls}},
            {"response": {"content": "Sunny in both."}},
        )
        sink = RecordingSink()
        config = LoopConfig(stream=chat, tools=[weather], event_sink=sink)
        result = await run("Oslo or Rome?", AgentContext("Be brief."), config)
        assert result.text == "Sunny in both."
        first, second = [entry.body["messages"] for entry in aimock.journal()]
        assert first == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Oslo or Rome?"},
        ]
        assert second[:2] == first
        assert [message["role"] for message in second[2:]] == ["assistant", "tool", "tool"]
        assert second[2]["content"] == "Let me look."
        assert [(m["tool_call_id"], m["content"]) for m in second[3:]] == [
            ("call_Oslo", "22 °C and sunny in Oslo"),
            ("call_Rome", "22 °C and sunny in Rome"),
        ]

    def test_a_run_without_async(self, aimock: Aimock) -> None:
        aimock.play({"response": {"content": "one"}}, {"response": {"content": "two"}})
        config = LoopConfig(stream=connect(f"{aimock.url}/v1#gpt-4o"))
        assert run_sync("Count", AgentContext(), config).text == "one"
        assert run_sync("Count", AgentContext(), config).text == "two"

    async def test_it_conforms(self, aimock: Aimock, chat: OpenAIChat) -> None:
        aimock.load({"match": {}, "response": {"content": "One, two, three."}, "chunkSize": 4})
        report = await check_stream_fn(chat)
        assert report.message.plain_text == "One, two, three."


# --- a real model -----------------------------------------------------------------------------


class TestLlama:
    @pytest.fixture
    async def chat(self, llama_server: LlamaServer) -> AsyncGenerator[OpenAIChat, None]:
        # It closes connections that were idle for a while, perhaps at the moment when we use one.
        async with aclosing(transport(llama_server.root, model=llama_server.model)) as chat:
            yield chat

    async def test_streams_and_counts(self, chat: OpenAIChat) -> None:
        events = await ask(chat, asking(UserMessage("Hello there"), max_output_tokens=8))
        message = message_of(events)
        assert message.plain_text
        assert message.stop_reason is StopReason.MAX_TOKENS
        assert message.usage is not None
        assert message.usage.output_tokens == 8
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 0
        assert sum(isinstance(event, Chunk) for event in events) > 2

    async def test_ends_by_itself(self, chat: OpenAIChat) -> None:
        request = asking(max_output_tokens=40, provider_extras={"stop": ["assistant"]})
        message = message_of(await ask(chat, request))
        assert message.plain_text
        assert message.stop_reason is StopReason.END_TURN

    async def test_an_agent_with_tools(self, chat: OpenAIChat) -> None:
        """The model calls a tool, and reads what we make of that for its next turn."""
        config = LoopConfig(
            stream=chat,
            tools=[weather],
            max_output_tokens=60,
            provider_extras=SHORT,
            max_iterations=2,
            grace_iterations=0,
        )
        result = await run("Weather in Oslo?", AgentContext(), config)
        called, told = result.messages[1:3]
        assert isinstance(called, AssistantMessage)
        assert called.stop_reason is StopReason.TOOL_USE
        [call] = called.tool_calls
        assert (call.name, call.arguments) == ("weather", {"city": "Oslo"})
        assert isinstance(told, ToolResultMessage)
        assert told.plain_text == "22 °C and sunny in Oslo"
        assert isinstance(result.messages[3], AssistantMessage)

    async def test_a_conversation_with_everything_in_it(self, chat: OpenAIChat) -> None:
        history: tuple[Any, ...] = (
            UserMessage("Hi"),
            SystemMessage("It is late."),
            AssistantMessage(
                (ReasoningContent("Hm"), ThinkingContent("so"), TextContent("Good night")),
                StopReason.END_TURN,
            ),
            UserMessage((TextContent("And "), TextContent("now?"))),
            AssistantMessage(
                (ToolCall("call.with|odd letters", "weather", {"city": "Oslo"}),),
                StopReason.TOOL_USE,
            ),
            ToolResultMessage("call.with|odd letters", "weather", (TextContent("sunny"),)),
            UserMessage("Thanks"),
        )
        request = asking(*history, tools=(WEATHER,), max_output_tokens=4)
        assert message_of(await ask(chat, request)).usage is not None

    async def test_a_prompt_that_does_not_fit(self, chat: OpenAIChat) -> None:
        long = UserMessage("one two three four five " * 2000)
        last = error_of(await ask(chat, asking(long, max_output_tokens=4)))
        assert last.kind is StreamErrorKind.CONTEXT_OVERFLOW

    async def test_cancelled_in_the_middle(
        self, llama_server: LlamaServer, chat: OpenAIChat
    ) -> None:
        signal = CancellationToken()
        events: list[StreamEvent] = []
        async for event in chat(asking(max_output_tokens=1500), signal):
            events.append(event)
            if len(events) == 5:
                signal.cancel("enough")
        last = error_of(events)
        assert (last.kind, last.message) == (StreamErrorKind.ABORTED, "enough")
        assert last.partial.plain_text
        # It has two slots; both are free at once, because it saw us go.
        answers = await asyncio.gather(*[ask(chat, asking(max_output_tokens=2)) for _ in range(2)])
        assert all(message_of(answer).plain_text for answer in answers)

    async def test_a_run_that_is_cancelled(self, chat: OpenAIChat) -> None:
        signal = CancellationToken()
        config = LoopConfig(
            stream=chat,
            max_output_tokens=1500,
            event_sink=lambda event: signal.cancel() if "Update" in type(event).__name__ else None,
        )
        with pytest.raises(RunAborted) as aborted:
            await run("Hi", AgentContext(), config, signal)
        assert aborted.value.partial is not None

    async def test_two_runs_at_once(self, chat: OpenAIChat) -> None:
        config = LoopConfig(stream=chat, max_output_tokens=6)

        async def count(word: str) -> str:
            return (await run(f"Count from {word}", AgentContext(), config)).text

        together = await asyncio.gather(count("one"), count("ten"))
        assert all(together)

    async def test_it_conforms(self, chat: OpenAIChat) -> None:
        report = await check_stream_fn(chat, asking(max_output_tokens=12))
        assert report.message.plain_text
