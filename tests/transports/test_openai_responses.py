"""The Responses API: what is sent, and what is made of what comes back."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    ConfigError,
    CustomMessage,
    ImageContent,
    LoopConfig,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    ReasoningEffort,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamRequest,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    ToolSchema,
    Usage,
    UserMessage,
    dump_transcript,
    load_transcript,
    run,
    tool,
)
from clark_agent.errors import ReplayRefused, TransportError
from clark_agent.history import MISSING_RESULT
from clark_agent.stream import Chunk, Done, Error, OutputSchema, ReasoningChunk, StreamEvent
from clark_agent.testing import FakeClock
from clark_agent.testing.misbehaviours import (
    MISBEHAVIOURS,
    Call,
    End,
    Finish,
    Say,
    cut_anywhere_problems,
)
from clark_agent.testing.transport_kit import check_events_of, check_stream_fn
from clark_agent.transports import RecordingStream
from clark_agent.transports.http.response import Answer as Heard
from clark_agent.transports.http.response import ProviderFailure
from clark_agent.transports.openai_responses import OpenAIResponses
from clark_agent.types import arg_parse_error
from tests.cases import all_cases
from tests.strategies import cuts, open_json, transcripts
from tests.transports.servers.aimock import Aimock
from tests.transports.servers.bytes_server import Answer, Request
from tests.transports.servers.llama import LlamaServer
from tests.transports.wires_chat import ONCE, ask, asking, bodies
from tests.transports.wires_responses import (
    STYLES,
    Style,
    added,
    arguments_delta,
    call,
    completed,
    done,
    event,
    message,
    reasoning,
    serving,
    stream,
    summary_delta,
    text_delta,
    transport,
)

PICTURE = "data:image/png;base64,AAAA"
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
LOOK = ToolSchema("look", "Look at a place.", SCHEMA)
SUMMARY = [{"type": "summary_text", "text": "Where is it?"}]
THINKER = "gpt-5.1"


def sent(request: StreamRequest, model: str = "gpt-4.1") -> dict[str, Any]:
    """The body of a request."""
    return OpenAIResponses(model, base_url="http://127.0.0.1:9", api_key="key").encode(request)


def written(*messages: AgentMessage, model: str = THINKER) -> Any:
    """The messages as they are sent."""
    return sent(asking(*messages), model)["input"]


def user(text: str = "Hi") -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def said(text: str, **fields: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **fields}


def sent_call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    known = {"call_id": call_id, "name": "look", "arguments": arguments}
    return {"type": "function_call", **known}


def sent_result(call_id: str, output: Any = "seen") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def sent_reasoning(sealed: str, summary: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "reasoning", "summary": list(summary), "encrypted_content": sealed}


def result(call_id: str, *blocks: Any) -> ToolResultMessage:
    return ToolResultMessage(call_id, "look", blocks or (TextContent("seen"),))


def sealed(data: str = "blob", **fields: Any) -> dict[str, Any]:
    """Reasoning as this transport keeps it."""
    return {
        "type": "reasoning.encrypted",
        "id": "rs_1",
        "data": data,
        "format": "openai-responses-v1",
        "summary": SUMMARY,
        "model": THINKER,
        "index": 0,
        **fields,
    }


def phase(name: str) -> dict[str, Any]:
    known = {"format": "openai-responses-v1", "model": THINKER}
    return {"type": "openai.message_phase", "phase": name, **known}


def turn(*blocks: Any) -> AssistantMessage:
    calls = any(isinstance(block, ToolCall) for block in blocks)
    return AssistantMessage(blocks, StopReason.TOOL_USE if calls else StopReason.END_TURN)


def details(*entries: Any) -> ReasoningDetailsContent:
    return ReasoningDetailsContent(entries)


BLOCKS: tuple[Any, ...] = (
    details(sealed("one"), sealed("two")),
    details(sealed("three", summary=[])),
    ReasoningContent("Hm"),
    TextContent("Yes."),
    TextContent(""),
    ToolCall("a", "look", {}),
)
OUR_TURNS = st.lists(st.sampled_from(BLOCKS), max_size=5).map(lambda blocks: turn(*blocks))
"""Turns with reasoning that goes back, as `transcripts` has none."""


# --- the request ------------------------------------------------------------------------------


def test_a_whole_request() -> None:
    request = StreamRequest(
        system_prompt="Be brief.",
        messages=(
            UserMessage((TextContent("What is this?"), ImageContent(PICTURE))),
            turn(TextContent("Let me look."), ToolCall("a", "look", {"at": "é"})),
            result("a"),
            SystemMessage("Hurry."),
        ),
        tools=(LOOK,),
        temperature=0.5,
        max_output_tokens=100,
        force_tool_call=True,
        provider_extras={"prompt_cache_key": "k"},
    )
    assert sent(request) == {
        "model": "gpt-4.1",
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is this?"},
                    {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
                ],
            },
            said("Let me look."),
            sent_call("a", '{"at":"é"}'),
            sent_result("a"),
            {**user("Hurry."), "role": "system"},
        ],
        "stream": True,
        "store": False,
        "instructions": "Be brief.",
        "tools": [
            {
                "type": "function",
                "name": "look",
                "description": "Look at a place.",
                "parameters": SCHEMA,
                "strict": False,
            }
        ],
        "tool_choice": "required",
        "max_output_tokens": 100,
        "temperature": 0.5,
        "prompt_cache_key": "k",
    }


def test_the_least_that_can_be_asked() -> None:
    expected = {"model": "m", "input": [user()], "stream": True, "store": False}
    assert sent(asking(force_tool_call=True), "m") == expected


@pytest.mark.parametrize(
    ("model", "effort", "added_fields"),
    [
        ("gpt-4.1", ReasoningEffort.HIGH, {"temperature": 0.5}),
        ("gpt-5", ReasoningEffort.NONE, {"reasoning": {"effort": "minimal", "summary": "auto"}}),
        ("o3", ReasoningEffort.MINIMAL, {"reasoning": {"effort": "low", "summary": "auto"}}),
        ("gpt-5.4", ReasoningEffort.XHIGH, {"reasoning": {"effort": "xhigh", "summary": "auto"}}),
        (
            "gpt-5.1",
            ReasoningEffort.NONE,
            {"reasoning": {"effort": "none"}, "temperature": 0.5},
        ),
    ],
)
def test_a_model_that_reasons_is_asked_for_its_reasoning(
    model: str, effort: ReasoningEffort, added_fields: dict[str, Any]
) -> None:
    """One that does not refuses to be asked, and one that does refuses a temperature."""
    if "reasoning" in added_fields:
        added_fields["include"] = ["reasoning.encrypted_content"]
    plain = {"model": model, "input": [user()], "stream": True, "store": False}
    assert sent(asking(reasoning=effort, temperature=0.5), model) == {**plain, **added_fields}


@pytest.mark.parametrize(("asked", "cap"), [(1, 16), (16, 16), (17, 17)])
def test_a_cap_that_is_too_small_for_the_server(asked: int, cap: int) -> None:
    assert sent(asking(max_output_tokens=asked))["max_output_tokens"] == cap


@pytest.mark.slow
async def test_a_cap_that_is_too_small_for_the_server_is_still_a_cap() -> None:
    usage = {"input_tokens": 9, "output_tokens": 3}
    last = await end_of(text_delta("And then"), completed(usage=usage), cap=3)
    assert isinstance(last, Done)
    assert last.message.stop_reason is StopReason.MAX_TOKENS


def test_the_hosts_own_fields_win() -> None:
    extras = {"reasoning": {"effort": "high"}, "store": True, "model": "other"}
    body = sent(asking(provider_extras=extras), THINKER)
    assert {name: body[name] for name in extras} == extras


def test_the_hosts_own_fields_take_nothing_away() -> None:
    extras = {
        "include": ["web_search_call.action.sources"],
        "reasoning": {"summary": "detailed"},
        "tools": [{"type": "web_search"}],
    }
    body = sent(asking(provider_extras=extras, tools=(LOOK,)), "gpt-5.1")
    assert body["include"] == ["reasoning.encrypted_content", "web_search_call.action.sources"]
    assert body["reasoning"].keys() == {"effort", "summary"}
    assert body["reasoning"]["summary"] == "detailed"
    assert [tool["type"] for tool in body["tools"]] == ["function", "web_search"]


class TestOutputSchema:
    OUTPUT = OutputSchema(
        "verdict",
        {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]},
    )
    FORMAT: ClassVar[Any] = {
        "type": "json_schema",
        "name": "verdict",
        "schema": {**OUTPUT.schema, "additionalProperties": False},
        "strict": True,
    }

    def test_is_the_format_of_the_text(self) -> None:
        request = asking(output_schema=self.OUTPUT, tools=(LOOK,))
        assert sent(request)["text"] == {"format": self.FORMAT}

    def test_is_not_strict_if_it_cannot_be(self) -> None:
        schema = {"type": "object", "additionalProperties": {"type": "integer"}}
        body = sent(asking(output_schema=OutputSchema("finish", schema)))
        format_ = {"type": "json_schema", "name": "finish", "schema": schema, "strict": False}
        assert body["text"] == {"format": format_}

    def test_goes_with_other_fields_of_the_host_but_not_with_another_format(self) -> None:
        request = asking(output_schema=self.OUTPUT, provider_extras={"text": {"verbosity": "low"}})
        assert sent(request)["text"] == {"format": self.FORMAT, "verbosity": "low"}
        theirs = {"format": {"type": "json_schema", "name": "own", "schema": {"type": "object"}}}
        request = asking(output_schema=self.OUTPUT, provider_extras={"text": theirs})
        assert sent(request)["text"] == theirs

    @pytest.mark.parametrize(
        ("model", "url", "mode"),
        [
            ("gpt-5.1", None, "native"),
            ("gpt-4-turbo", None, "tool"),
            ("gpt-5.1", "http://127.0.0.1:9", "tool"),
        ],
    )
    def test_the_best_mode(self, model: str, url: str | None, mode: str) -> None:
        responses = OpenAIResponses(model, base_url=url, api_key="key")
        assert [responses.best_output_mode(has_tools=has) for has in (True, False)] == [mode] * 2


@pytest.mark.slow
async def test_what_is_encoded_is_what_the_server_gets() -> None:
    request = asking(provider_extras={"stream_options": {"include_obfuscation": False}})
    async with serving([stream(text_delta("Hi"), completed())]) as (server, responses):
        await ask(responses, request)
        assert bodies(server) == [responses.encode(request)]
        assert server.requests[0].path == "/v1/responses"


class TestHistory:
    def test_thoughts_go_back_into_the_text_where_they_stood(self) -> None:
        blocks = (TextContent("Well. "), ThinkingContent("Hm"), TextContent("Yes."))
        assert written(turn(*blocks)) == [said("Well. <thought>Hm</thought>Yes.")]

    def test_readable_reasoning_stays_at_home(self) -> None:
        assert written(turn(ReasoningContent("Hm"), TextContent("Yes."))) == [said("Yes.")]

    def test_everything_keeps_its_order(self) -> None:
        blocks = (TextContent("One."), ToolCall("a", "look", {}), TextContent("Two."))
        expected = [said("One."), sent_call("a"), said("Two."), sent_result("a")]
        assert written(turn(*blocks), result("a")) == expected

    def test_what_is_for_nobody_is_left_out(self) -> None:
        failed = AssistantMessage((TextContent("He"),), StopReason.ERROR)
        nothing = (CustomMessage("note"), SystemMessage(""), failed, turn(ReasoningContent("Hm")))
        assert written(UserMessage("Hi"), *nothing) == [user()]

    def test_a_result_with_an_image(self) -> None:
        shown = result("a", TextContent("Look:"), ImageContent(PICTURE))
        output = [
            {"type": "input_text", "text": "Look:"},
            {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
        ]
        expected = [sent_call("a"), sent_result("a", output)]
        assert written(turn(ToolCall("a", "look", {})), shown) == expected

    def test_a_result_in_several_texts(self) -> None:
        parts = result("a", TextContent("se"), TextContent("en"))
        assert written(turn(ToolCall("a", "look", {})), parts)[1] == sent_result("a")

    def test_a_call_without_a_result_gets_one(self) -> None:
        expected = [sent_call("a"), sent_result("a", MISSING_RESULT)]
        assert written(turn(ToolCall("a", "look", {}))) == expected

    @pytest.mark.parametrize("call_id", ["x" * 65, "a b", "é"])
    def test_ids_that_the_server_refuses_are_replaced(self, call_id: str) -> None:
        first, second = written(turn(ToolCall(call_id, "look", {})), result(call_id))
        assert first["call_id"] == second["call_id"] != call_id
        assert written(turn(ToolCall("x" * 64, "look", {})))[0]["call_id"] == "x" * 64

    def test_arguments_that_were_no_json(self) -> None:
        broken = ToolCall("a", "look", arg_parse_error("no JSON", '{"at": '))
        assert written(turn(broken))[0] == sent_call("a", r'{"invalid_json":"{\"at\": "}')

    @given(transcripts())
    def test_whatever_the_history_every_call_is_answered(self, history: list[AgentMessage]) -> None:
        try:
            items = written(*history) if history else []
        except TransportError as refused:
            if "a file" not in str(refused):
                raise
            reject()
        check_items(items)

    @given(st.lists(OUR_TURNS | st.just(result("a")) | st.just(UserMessage("Hi")), min_size=1))
    def test_whatever_the_reasoning_something_follows_it(self, history: list[AgentMessage]) -> None:
        check_items(written(*history))


def check_items(items: list[dict[str, Any]]) -> None:
    """Every call has its result before the user speaks again, and reasoning what it led to."""
    waiting: list[str] = []
    for before, item in zip([{"type": ""}, *items], [*items, {"type": ""}], strict=True):
        if before["type"] == "reasoning":
            assert item["type"] in ("reasoning", "message", "function_call")
            assert item.get("role", "assistant") == "assistant"
        match item:
            case {"type": "function_call", "call_id": call_id}:
                waiting.append(call_id)
            case {"type": "function_call_output", "call_id": call_id}:
                waiting.remove(call_id)
            case {"type": "message", "role": "user"}:
                assert not waiting
            case _:
                pass
    assert not waiting
    assert "id" not in {name for item in items for name in item}


class TestReasoningThatGoesBack:
    def test_in_front_of_what_it_led_to(self) -> None:
        blocks = (
            ReasoningContent("Where is it?"),
            details(sealed("one")),
            ToolCall("a", "look", {}),
            details(sealed("two", summary=[]), sealed("three", summary=[])),
            TextContent("Found."),
        )
        assert written(turn(*blocks), result("a")) == [
            sent_reasoning("one", SUMMARY),
            sent_call("a"),
            sent_reasoning("two"),
            sent_reasoning("three"),
            said("Found."),
            sent_result("a"),
        ]

    @pytest.mark.parametrize("behind", [(), (TextContent(""),), (ReasoningContent("Hm"),)])
    def test_not_where_nothing_follows(self, behind: tuple[Any, ...]) -> None:
        """The server refuses it, also if it is the next turn's reasoning that follows."""
        first = turn(TextContent("Yes."), details(sealed("one"), sealed("two")), *behind)
        second = turn(details(sealed("three", summary=[])), TextContent("No."))
        expected = [said("Yes."), sent_reasoning("three"), said("No.")]
        assert written(first, second) == expected

    @pytest.mark.parametrize("data", ["", None, 7])
    def test_not_without_its_blob(self, data: Any) -> None:
        assert written(turn(details(sealed(data)), TextContent("Yes."))) == [said("Yes.")]

    def test_as_a_gateway_tells_it(self) -> None:
        """It has the summaries as items of their own, and does not name the model."""
        known = {"format": "openai-responses-v1", "index": 0}
        entries = (
            {"type": "reasoning.summary", "summary": "Where is it?", **known},
            {"type": "reasoning.summary", "summary": "There.", **known},
            {"type": "reasoning.encrypted", "id": "rs_1", "data": "one", **known},
            {"type": "reasoning.encrypted", "data": "two", **known},
            {"type": "reasoning.summary", "summary": "of nothing", **known},
        )
        parts = [*SUMMARY, {"type": "summary_text", "text": "There."}]
        expected = [sent_reasoning("one", parts), sent_reasoning("two"), said("Yes.")]
        assert written(turn(details(*entries), TextContent("Yes."))) == expected

    @pytest.mark.parametrize(
        "foreign",
        [
            {"model": "gpt-5"},
            {"format": "anthropic-claude-v1"},
            {"format": "xai-responses-v1"},
            {"format": None},
        ],
    )
    def test_not_to_another_model(self, foreign: dict[str, Any]) -> None:
        blocks = (ReasoningContent("Hm"), details(sealed(**foreign)), TextContent("Yes."))
        assert written(turn(*blocks)) == [said("Yes.")]

    def test_what_azure_sealed_too(self) -> None:
        entry = sealed("one", format="azure-openai-responses-v1")
        expected = [sent_reasoning("one", SUMMARY), said("Yes.")]
        assert written(turn(details(entry), TextContent("Yes."))) == expected

    def test_phases(self) -> None:
        blocks = (
            details(sealed("one"), phase("commentary")),
            TextContent("I look."),
            ToolCall("a", "look", {}),
            TextContent("Then "),
            details(phase("final_answer")),
            TextContent("found."),
        )
        assert written(turn(*blocks), result("a")) == [
            sent_reasoning("one", SUMMARY),
            said("I look.", phase="commentary"),
            sent_call("a"),
            said("Then "),
            said("found.", phase="final_answer"),
            sent_result("a"),
        ]

    def test_a_phase_of_nothing(self) -> None:
        blocks = (details(phase("commentary")), ToolCall("a", "look", {}), TextContent("Yes."))
        assert written(turn(*blocks))[:2] == [sent_call("a"), said("Yes.")]

    async def test_an_open_round_that_lost_its_blob_is_refused_here(self) -> None:
        known = {"type": "reasoning.summary", "format": "openai-responses-v1"}
        history = turn(details({**known, "summary": "Hm"}), ToolCall("a", "look", {}))
        responses = transport("http://127.0.0.1:9", model=THINKER)
        [last] = await ask(responses, asking(history, result("a")))
        assert isinstance(last, Error)
        assert isinstance(last.cause, ReplayRefused)


# --- the answer -------------------------------------------------------------------------------


async def heard(*pieces: bytes, cap: int | None = None, **settings: Any) -> list[StreamEvent]:
    """What comes of these events, from a real server."""
    settings = {"retry": ONCE, "model": THINKER, **settings}
    async with serving([stream(*pieces)], **settings) as (_, responses):
        events = await ask(responses, asking(max_output_tokens=cap))
    assert not check_events_of(events)
    return events


async def end_of(*pieces: bytes, **settings: Any) -> Done | Error:
    last = (await heard(*pieces, **settings))[-1]
    assert isinstance(last, (Done, Error))
    return last


async def content_of(*pieces: bytes, **settings: Any) -> tuple[Any, ...]:
    last = await end_of(*pieces, **settings)
    assert isinstance(last, Done), last
    return last.message.content


LOOKED = ToolCall("c1", "look", {"at": 1})


@pytest.mark.slow
class TestReasoning:
    async def test_is_told_and_sealed(self) -> None:
        item = reasoning(["Where ", "is it?"], "blob", "rs_1")
        events = await heard(
            added(reasoning(item_id="rs_1", sealed="unfinished"), 0),
            summary_delta("Whe", 0, "rs_1", 0),
            summary_delta("re ", 0, "rs_1", 0),
            summary_delta("is it?", 0, "rs_1", 1),
            done(item, 0),
            added(message(item_id="msg_1"), 1),
            text_delta("There.", 1, "msg_1"),
            done(message("There.", "msg_1"), 1),
            completed(item, message("There.", "msg_1")),
        )
        told = [
            event.chunk.delta
            for event in events
            if isinstance(event, Chunk) and isinstance(event.chunk, ReasoningChunk)
        ]
        assert told == ["Whe", "re ", "\n\n", "is it?"]
        last = events[-1]
        assert isinstance(last, Done)
        assert last.message.content == (
            ReasoningContent("Where \n\nis it?"),
            details(sealed("blob", summary=item["summary"])),
            TextContent("There."),
        )

    async def test_of_two_items_between_calls(self) -> None:
        content = await content_of(
            summary_delta("One", 0, None, 0),
            done(reasoning(["One"], "one", "rs_1"), 0),
            summary_delta("Two", 1, None, 0),
            done(reasoning(["Two"], "two", "rs_2"), 1),
            done(call("c1", "look", '{"at": 1}'), 2),
            summary_delta("Three", 3, None, 0),
            done(reasoning(["Three"], "three", "rs_3"), 3),
            text_delta("There.", 4),
            completed(),
        )
        parts = [[{"type": "summary_text", "text": text}] for text in ("One", "Two", "Three")]
        assert content == (
            ReasoningContent("One\n\nTwo"),
            details(
                sealed("one", summary=parts[0]),
                sealed("two", id="rs_2", index=1, summary=parts[1]),
            ),
            LOOKED,
            ReasoningContent("Three"),
            details(sealed("three", id="rs_3", index=3, summary=parts[2])),
            TextContent("There."),
        )

    async def test_around_a_text(self) -> None:
        content = await content_of(
            summary_delta("One", 0), text_delta("Yes.", 1), summary_delta("Two", 2), completed()
        )
        expected = (ReasoningContent("One"), TextContent("Yes."), ReasoningContent("Two"))
        assert content == expected

    @pytest.mark.parametrize("blob", [None, ""])
    async def test_that_is_not_sealed_is_only_told(self, blob: str | None) -> None:
        content = await content_of(
            event("response.reasoning_text.delta", delta="Hm", item_id="rs_1"),
            done(reasoning(["Hm"], blob, "rs_1")),
            text_delta("Yes."),
            completed(),
        )
        assert content == (ReasoningContent("Hm"), TextContent("Yes."))

    @pytest.mark.parametrize(
        ("item", "text"),
        [
            (reasoning(["One.", "Two."]), "One.\n\nTwo."),
            ({**reasoning(), "content": [{"type": "reasoning_text", "text": "Hm"}]}, "Hm"),
        ],
    )
    async def test_that_came_whole(self, item: dict[str, Any], text: str) -> None:
        content = await content_of(done(item, 0), text_delta("Yes.", 1), completed())
        assert content == (ReasoningContent(text), TextContent("Yes."))

    async def test_that_nobody_can_read(self) -> None:
        content = await content_of(
            done(reasoning([], "blob", "rs_1"), 0), text_delta("Yes."), completed()
        )
        assert content == (details(sealed(summary=[])), TextContent("Yes."))


@pytest.mark.slow
class TestPhases:
    async def test_stand_in_front_of_the_text(self) -> None:
        content = await content_of(
            done(reasoning([], "blob", "rs_1"), 0),
            added(message(phase="commentary"), 1),
            text_delta("I look.", 1),
            done(message("I look.", phase="commentary"), 1),
            done(message("Found.", phase="final_answer"), 2),
            completed(),
        )
        assert content == (
            details(sealed(summary=[]), phase("commentary")),
            TextContent("I look."),
            details(phase("final_answer")),
            TextContent("Found."),
        )

    async def test_of_a_message_that_says_nothing(self) -> None:
        content = await content_of(
            added(message(phase="commentary"), 0),
            done(message(phase="commentary"), 0),
            done(call("c1", "look", '{"at": 1}'), 1),
            completed(),
        )
        assert content == (LOOKED,)


@pytest.mark.slow
class TestCalls:
    @pytest.mark.parametrize(
        "pieces",
        [
            [added(call("c1", "look"), 0), arguments_delta('{"at": 1}', 0)],
            [added(call("c1", "look"), 0), done(call("c1", "look", '{"at": 1}'), 0)],
            [
                added(call("c1", "look"), 0),
                arguments_delta('{"at"', 0),
                done(call("c1", "look", '{"at": 1}'), 0),
            ],
            [
                added(call("c1", "look"), 0),
                event("response.function_call_arguments.done", arguments='{"at": 1}'),
            ],
            [done(call("c1", "look", {"at": 1}), 0)],
            [added(call("c1", "look", '{"at": 1}'), 0)],
            [added(call("c1", "look", '{"at": 1}'), 0), arguments_delta('{"at": 1}', 0)],
            [arguments_delta('{"at": 1}', 0), done(call("c1", "look", '{"at": 1}'), 0)],
            [added(call("c1"), 0), done(call("c1", "look", '{"at": 1}'), 0)],
        ],
        ids=[
            "in pieces",
            "whole at its end",
            "the rest at its end",
            "whole when its arguments end",
            "without an announcement",
            "whole in its announcement",
            "whole in its announcement and in pieces",
            "announced by its pieces",
            "its name at its end",
        ],
    )
    async def test_however_they_come(self, pieces: list[bytes]) -> None:
        assert await content_of(*pieces, completed()) == (LOOKED,)

    async def test_that_end_differently_stay_as_they_were_told(self) -> None:
        content = await content_of(
            added(call("c1", "look"), 0),
            arguments_delta('{"at": 1}', 0),
            done(call("c9", "see", '{"at": 2}'), 0),
            completed(),
        )
        assert content == (LOOKED,)

    async def test_that_are_said_twice_are_called_once(self) -> None:
        item = call("c1", "look", '{"at": 1}', "fc_1")
        assert await content_of(done(item, 0), done(item, 0), completed(item)) == (LOOKED,)

    async def test_pieces_that_come_late(self) -> None:
        item = call("c1", "look", '{"at": 1}', "fc_1")
        finished = event(
            "response.function_call_arguments.done",
            arguments='{"at": 1}',
            item_id="fc_1",
            output_index=0,
        )
        assert await content_of(done(item, 0), finished, completed()) == (LOOKED,)

    async def test_numbered_like_the_item_before(self) -> None:
        content = await content_of(
            done(reasoning([], "blob", "rs_1"), 0),
            added(message(item_id="msg_1"), 0),
            text_delta("I look.", 0, "msg_1"),
            added(call("c1", "look", item_id="fc_1"), 0),
            added(call("c2", "look", item_id="fc_2"), 0),
            arguments_delta('{"at": 1}', 0, "fc_1"),
            arguments_delta('{"at": 2}', 0, "fc_2"),
            completed(),
        )
        second = ToolCall("c2", "look", {"at": 2})
        assert content[1:] == (TextContent("I look."), LOOKED, second)

    async def test_items_of_other_kinds_are_the_providers(self) -> None:
        search = {"type": "web_search_call", "id": "ws_1", "action": {"query": "x"}}
        content = await content_of(
            added(search, 0),
            done(search, 0),
            completed(search, call("c1", "look", '{"at": 1}')),
        )
        assert content == (ProviderContent("openai", search), LOOKED)


@pytest.mark.slow
class TestTheLastEvent:
    OUTPUT = (
        reasoning(["Hm"], "blob", "rs_1"),
        message("Yes.", "msg_1", phase="commentary"),
        call("c1", "look", '{"at": 1}', "fc_1"),
    )
    WHOLE = (
        ReasoningContent("Hm"),
        details(sealed(summary=[{"type": "summary_text", "text": "Hm"}]), phase("commentary")),
        TextContent("Yes."),
        LOOKED,
    )

    async def test_has_all_that_did_not_come(self) -> None:
        assert await content_of(completed(*self.OUTPUT)) == self.WHOLE

    async def test_has_what_did_not_come(self) -> None:
        content = await content_of(
            added(message(item_id="msg_1"), 1),
            text_delta("Ye", 1, "msg_1"),
            completed(*self.OUTPUT),
        )
        assert content[0] == TextContent("Ye")
        assert content[-2:] == (TextContent("s."), LOOKED)

    async def test_has_the_arguments_of_a_call_that_was_announced(self) -> None:
        rotated = call("c1", "look", '{"at": 1}', "fc_9")
        content = await content_of(added(call("c1", "look", item_id="fc_1"), 0), completed(rotated))
        assert content == (LOOKED,)

    async def test_has_no_other_call_where_one_was_announced(self) -> None:
        announced = added(call("c1", "look", '{"at": 1}', "fc_1"), 0)
        renamed = call("c9", "look", '{"at": 1}', "fc_9")
        assert await content_of(announced, completed(renamed)) == (LOOKED,)

    async def test_may_come_alone(self) -> None:
        """Some servers do not stream, whatever they are asked."""
        usage = {"input_tokens": 9, "output_tokens": 2}
        body = {"object": "response", "status": "completed", "error": None, "usage": usage}
        answer = Answer(
            headers={"content-type": "application/json"},
            body=msgspec.json.encode({**body, "output": self.OUTPUT}),
        )
        async with serving([answer], model=THINKER) as (_, responses):
            last = (await ask(responses))[-1]
        assert isinstance(last, Done)
        assert last.message.content == self.WHOLE
        assert last.message.usage == Usage(9, 2)

    async def test_nothing_is_read_behind_it(self) -> None:
        behind = b"data: [DONE]\n\n"
        assert await content_of(text_delta("Yes."), completed(), behind) == (TextContent("Yes."),)

    async def test_may_be_left_out_by_a_server_that_says_done(self) -> None:
        assert await content_of(text_delta("Yes."), b"data: [DONE]\n\n") == (TextContent("Yes."),)

    @pytest.mark.parametrize(
        ("usage", "expected"),
        [
            ({"input_tokens": 9, "output_tokens": 2}, Usage(9, 2)),
            (
                {
                    "input_tokens": 100,
                    "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
                    "output_tokens": 20,
                    "output_tokens_details": {"reasoning_tokens": 15},
                },
                Usage(10, 20, 30, 60),
            ),
            ({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 9}}, Usage(0, 0, 0, 9)),
            ({"input_tokens": None, "input_tokens_details": None, "output_tokens": -1}, Usage()),
        ],
    )
    async def test_has_the_usage(self, usage: dict[str, Any], expected: Usage) -> None:
        last = await end_of(text_delta("Yes."), completed(usage=usage))
        assert isinstance(last, Done)
        assert last.message.usage == expected

    @pytest.mark.parametrize("kind", ["response.incomplete", "response.completed"])
    @pytest.mark.parametrize(
        ("incomplete", "reason"),
        [
            ({"reason": "max_output_tokens"}, StopReason.MAX_TOKENS),
            (None, StopReason.MAX_TOKENS),
            ({"reason": "content_filter"}, StopReason.OTHER),
            ({"reason": "something new"}, StopReason.OTHER),
        ],
    )
    async def test_says_that_it_is_cut_off(
        self, kind: str, incomplete: Any, reason: StopReason
    ) -> None:
        response = {"status": "incomplete", "incomplete_details": incomplete}
        last = await end_of(text_delta("And th"), event(kind, response=response))
        assert isinstance(last, Done)
        assert last.message.stop_reason is reason

    async def test_need_not_say_it_twice(self) -> None:
        last = await end_of(text_delta("And th"), event("response.incomplete", response={}))
        assert isinstance(last, Done)
        assert last.message.stop_reason is StopReason.MAX_TOKENS

    async def test_the_filter_let_nothing_out(self) -> None:
        response = {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
        last = await end_of(event("response.incomplete", response=response))
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.FATAL
        assert "content filter" in last.message


@pytest.mark.slow
async def test_a_refusal_is_text() -> None:
    refused = event("response.refusal.delta", delta="I wo")
    whole = {**message(), "content": [{"type": "refusal", "refusal": "I won't."}]}
    assert await content_of(refused, done(whole), completed()) == (TextContent("I won't."),)


@pytest.mark.slow
async def test_tags_are_left_alone_when_they_are_not_wanted() -> None:
    text = "<think>Hm</think>Yes."
    pieces = (text_delta(text), completed())
    assert await content_of(*pieces, thinking_tags=False) == (TextContent(text),)
    assert await content_of(*pieces) == (ThinkingContent("Hm"), TextContent("Yes."))


LIMITED = {"code": "rate_limit_exceeded", "message": "Slow down."}


@pytest.mark.slow
class TestFailuresInTheStream:
    @pytest.mark.parametrize(
        "told",
        [
            event("error", **LIMITED, param=None, sequence_number=3),
            event("error", error={"type": "tokens", **LIMITED}, sequence_number=3),
            event("error", error={"code": "rate_limit_exceeded"}, message="Slow down."),
            event("response.failed", response={"status": "failed", "error": LIMITED}),
            event("response.failed", response={"error": LIMITED}),
            event("response.failed", error=LIMITED),
            event("response.failed", response={"status": "failed"}, error=LIMITED),
            event("response.completed", response={"status": "failed", "error": LIMITED}),
            b"data: %b\n\n" % msgspec.json.encode({"error": LIMITED}),
            msgspec.json.encode({"error": LIMITED}),
        ],
        ids=[
            "flat",
            "nested",
            "both",
            "failed",
            "failed without a status",
            "failed without a response",
            "failed beside the response",
            "completed",
            "without a type",
            "not streamed",
        ],
    )
    async def test_in_every_shape(self, told: bytes) -> None:
        last = await end_of(told)
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.PROVIDER_RATE_LIMITED
        assert last.message == "the server failed in the middle of the stream: Slow down."

    async def test_what_came_before_is_kept(self) -> None:
        usage = {"input_tokens": 9, "output_tokens": 2}
        failed = {"status": "failed", "error": {"code": "server_error"}, "usage": usage}
        last = await end_of(text_delta("Hel"), event("response.failed", response=failed))
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.TRANSIENT
        assert last.partial.content == (TextContent("Hel"),)
        assert last.partial.usage == Usage(9, 2)

    async def test_without_a_word(self) -> None:
        response = {"status": "failed", "error": None}
        last = await end_of(event("response.completed", response=response))
        assert isinstance(last, Error)
        assert last.message.endswith("the response has the status failed")

    async def test_an_event_that_cannot_be_read(self) -> None:
        last = await end_of(b'data: {"type": "response.completed", \n\n')
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.TRANSIENT


_TYPES = st.sampled_from(
    [
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.reasoning_summary_text.delta",
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
        "response.failed",
        "error",
        None,
    ]
)
_JSON = open_json()
_ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "reasoning", "other"])},
    optional={
        "id": st.sampled_from(["a", "b"]),
        "call_id": st.sampled_from(["a", "b"]),
        "arguments": _JSON,
        "content": _JSON | st.lists(st.fixed_dictionaries({"text": _JSON})),
        "summary": _JSON | st.lists(st.fixed_dictionaries({"text": _JSON})),
        "encrypted_content": st.just("blob"),
    },
)
_EVENTS = st.fixed_dictionaries(
    {"type": _TYPES},
    optional={
        "delta": _JSON,
        "output_index": st.integers(0, 2),
        "item_id": st.sampled_from(["a", "b"]),
        "arguments": _JSON,
        "item": _ITEMS,
        "error": _JSON,
        "response": st.fixed_dictionaries(
            {"status": _JSON | st.just("incomplete")},
            optional={"output": st.lists(_ITEMS, max_size=2), "error": _JSON},
        ),
    },
)


def decoded(pieces: Sequence[bytes], cap: int | None = None) -> Any:
    """The message, or the failure, that a response in these reads comes to."""
    answer = Heard(cap=cap, new_id=FakeClock().new_id)
    decoder = transport("http://127.0.0.1:9", model=THINKER)._decoder(answer)
    try:
        for piece in pieces:
            decoder.feed(piece)
        decoder.end()
    except ProviderFailure as failure:
        return answer.partial(failure.failure)
    answer.close()
    return answer.message() if decoder.is_complete else None


@given(st.lists(_EVENTS, max_size=6))
def test_no_event_is_too_odd(events: list[dict[str, Any]]) -> None:
    """Whatever comes is an answer or a failure of the provider's, never one of ours."""
    decoded([b"data: %b\n\n" % msgspec.json.encode(event) for event in events])


# --- what servers do --------------------------------------------------------------------------

# Before the end of an item that is not announced there is no place for a call's id.
_CANNOT_BE_SAID = {("items are not announced", "an id that changes in mid-stream")}


@pytest.mark.parametrize("style", STYLES[1:], ids=lambda style: style.name)
async def test_what_must_come_of_misbehaviours_in_every_style(style: Style) -> None:
    """The first style is in `test_misbehaviours`, with a server."""
    with all_cases() as case:
        for misbehaviour in MISBEHAVIOURS:
            if (style.name, misbehaviour.name) in _CANNOT_BE_SAID:
                continue
            with case(misbehaviour.name):
                responses = without_a_socket(style.render(misbehaviour.steps))
                events = await ask(responses, asking(max_output_tokens=misbehaviour.cap))
                assert not misbehaviour.problems(events)


def without_a_socket(pieces: Sequence[bytes]) -> OpenAIResponses:
    """A transport to which every request brings these reads."""
    responses = transport("http://127.0.0.1:9")

    async def reads() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    @asynccontextmanager
    async def opened(_: object) -> AsyncGenerator[AsyncIterator[bytes], None]:
        yield reads()

    responses._open = opened  # type: ignore[method-assign, assignment]
    return responses


# A turn as OpenAI sends it, shortened.
RECORDED = (
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":'
    b'{"id":"resp_1","object":"response","status":"in_progress","error":null,'
    b'"incomplete_details":null,"instructions":"Be brief.","output":[],"store":false,'
    b'"tools":[{"type":"function","name":"look"}],"usage":null}}\n\n'
    b"event: response.output_item.added\n"
    b'data: {"type":"response.output_item.added","sequence_number":2,"output_index":0,"item":'
    b'{"id":"rs_1","type":"reasoning","encrypted_content":"gAAAunfinished","summary":[]}}\n\n'
    b"event: response.reasoning_summary_part.added\n"
    b'data: {"type":"response.reasoning_summary_part.added","sequence_number":3,"item_id":"rs_1",'
    b'"output_index":0,"summary_index":0,"part":{"type":"summary_text","text":""}}\n\n'
    b"event: response.reasoning_summary_text.delta\n"
    b'data: {"type":"response.reasoning_summary_text.delta","sequence_number":4,"item_id":"rs_1",'
    b'"output_index":0,"summary_index":0,"delta":"**Caf\xc3\xa9**","obfuscation":"x9"}\n\n'
    b"event: response.output_item.done\n"
    b'data: {"type":"response.output_item.done","sequence_number":7,"output_index":0,"item":'
    b'{"id":"rs_1","type":"reasoning","encrypted_content":"gAAAA","summary":'
    b'[{"type":"summary_text","text":"**Caf\xc3\xa9**"}]}}\n\n'
    b"event: response.output_item.added\n"
    b'data: {"type":"response.output_item.added","sequence_number":8,"output_index":1,"item":'
    b'{"id":"msg_1","type":"message","status":"in_progress","content":[],'
    b'"phase":"commentary","role":"assistant"}}\n\n'
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","sequence_number":10,"item_id":"msg_1",'
    b'"output_index":1,"content_index":0,"delta":"I look ","logprobs":[]}\n\n'
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","sequence_number":11,"item_id":"msg_1",'
    b'"output_index":1,"content_index":0,"delta":"\xf0\x9f\xa6\x80.","logprobs":[]}\n\n'
    b"event: response.output_item.added\n"
    b'data: {"type":"response.output_item.added","sequence_number":14,"output_index":2,"item":'
    b'{"id":"fc_1","type":"function_call","status":"in_progress","arguments":"",'
    b'"call_id":"call_1","name":"look"}}\n\n'
    b"event: response.function_call_arguments.delta\n"
    b'data: {"type":"response.function_call_arguments.delta","sequence_number":15,'
    b'"item_id":"fc_1","output_index":2,"delta":"{\\"at\\":1}"}\n\n'
    b"event: response.output_item.done\n"
    b'data: {"type":"response.output_item.done","sequence_number":17,"output_index":2,"item":'
    b'{"id":"fc_1","type":"function_call","status":"completed","arguments":"{\\"at\\":1}",'
    b'"call_id":"call_1","name":"look"}}\n\n'
    b"event: response.completed\n"
    b'data: {"type":"response.completed","sequence_number":18,"response":{"id":"resp_1",'
    b'"object":"response","status":"completed","error":null,"incomplete_details":null,"output":[],'
    b'"usage":{"input_tokens":20,"input_tokens_details":{"cached_tokens":8},"output_tokens":30,'
    b'"output_tokens_details":{"reasoning_tokens":9},"total_tokens":50}}}\n\n'
)
RECORDED_MESSAGE = AssistantMessage(
    (
        ReasoningContent("**Café**"),
        details(
            sealed("gAAAA", summary=[{"type": "summary_text", "text": "**Café**"}]),
            phase("commentary"),
        ),
        TextContent("I look 🦀."),
        ToolCall("call_1", "look", {"at": 1}),
    ),
    StopReason.TOOL_USE,
    usage=Usage(12, 30, 0, 8),
)


def test_recorded_bytes_cut_at_every_place() -> None:
    assert decoded([RECORDED]) == RECORDED_MESSAGE
    assert decoded([RECORDED[n : n + 1] for n in range(len(RECORDED))]) == RECORDED_MESSAGE
    for place in range(len(RECORDED)):
        assert decoded([RECORDED[:place], RECORDED[place:]]) == RECORDED_MESSAGE


@given(cuts(RECORDED))
def test_recorded_bytes_cut_anywhere(pieces: list[bytes]) -> None:
    assert decoded(pieces) == RECORDED_MESSAGE


@pytest.mark.slow
async def test_the_package_reads_the_same_from_these_bytes() -> None:
    """What is recorded here is what OpenAI's own client understands."""
    from openai import AsyncOpenAI

    async with serving([stream(RECORDED)]) as (server, _):
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        events = await client.responses.create(model=THINKER, input="Hi", stream=True)
        types = [event.type async for event in events]
        await client.close()
    named = [line[7:].decode() for line in RECORDED.splitlines() if line.startswith(b"event: ")]
    assert types == named


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "ended"])
async def test_a_disconnect_at_every_byte(how: str) -> None:
    """A proxy may also end an answer properly that it did not get to the end of."""
    asked = Call(0, "a", "look", '{"at": 1}')
    steps = (Say("é."), asked, Finish(StopReason.TOOL_USE), End())
    content = (TextContent("é."), ToolCall("a", "look", {"at": 1}))
    expected = AssistantMessage(content, StopReason.TOOL_USE)
    whole = b"".join(STYLES[0].render(steps))
    place = 0

    def cut(_: object) -> Answer:
        return Answer(body=whole[:place], cut_after=place if how == "closed" else None)

    ends: list[str] = []
    async with serving(cut, retry=ONCE) as (_, responses):
        for place in range(1, len(whole) + 1):
            events = await ask(responses)
            assert not cut_anywhere_problems(events, expected), whole[:place]
            ends.append(type(events[-1]).__name__)
    assert ends == sorted(ends, reverse=True), "once it is whole it stays so"
    assert (ends[0], ends[-1]) == ("Error", "Done")


# --- how it behaves ---------------------------------------------------------------------------


async def test_it_conforms(aimock: Aimock) -> None:
    """The server has a process of its own: what it leaves behind is not ours."""
    calls = [{"name": "look", "arguments": '{"at": 1}'}]
    answer = {"content": "I look.", "reasoning": "Where is it?", "toolCalls": calls}
    aimock.load({"match": {}, "response": answer, "chunkSize": 2})
    responses = OpenAIResponses(THINKER, base_url=f"{aimock.url}/v1")
    report = await check_stream_fn(responses)
    await responses.aclose()
    assert report.error is None
    assert report.message.plain_text == "I look."
    assert report.message.reasoning_text == "Where is it?"
    assert [call.arguments for call in report.message.tool_calls] == [{"at": 1}]


@pytest.mark.slow
async def test_it_conforms_when_there_is_nobody() -> None:
    async with serving([]) as (server, _):
        nobody = server.url
    responses = transport(nobody, retry=ONCE)
    report = await check_stream_fn(responses)
    await responses.aclose()
    assert report.error is not None
    assert report.error.kind is StreamErrorKind.TRANSIENT


@pytest.mark.slow
async def test_cancelling_closes_the_connection_at_once() -> None:
    signal = CancellationToken()
    async with serving([stream(text_delta("Hel"), hold=True)]) as (server, responses):
        events = []
        async for told in responses(asking(), signal):
            events.append(told)
            if isinstance(told, Chunk):
                signal.cancel("enough")
        await server.client_gone()
    last = events[-1]
    assert isinstance(last, Error)
    assert (last.kind, last.message) == (StreamErrorKind.ABORTED, "enough")
    assert last.partial.plain_text == "Hel"


@pytest.mark.slow
async def test_it_asks_again_when_the_server_says() -> None:
    clock = FakeClock()
    limited = {"error": {"message": "Slow down.", "code": "rate_limit_exceeded"}}
    script = [
        Answer(status=429, headers={"retry-after": "7"}, body=msgspec.json.encode(limited)),
        stream(event("error", error=limited["error"])),
        stream(text_delta("Hi"), completed()),
    ]
    async with serving(script, clock=clock) as (server, responses):
        last = (await ask(responses))[-1]
    assert isinstance(last, Done)
    assert clock.sleeps[0] == 7.0
    assert len(clock.sleeps) == 2
    first, second, third = [request.body for request in server.requests]
    assert first == second == third


@pytest.mark.slow
async def test_it_does_not_ask_again_once_something_was_shown() -> None:
    script = [stream(text_delta("Hi"), event("error", code="server_error"))]
    async with serving(script) as (server, responses):
        last = (await ask(responses))[-1]
    assert isinstance(last, Error)
    assert len(server.requests) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"code": "context_length_exceeded"}, StreamErrorKind.CONTEXT_OVERFLOW),
        (400, {"code": "invalid_encrypted_content"}, StreamErrorKind.FATAL),
        (401, {"code": "invalid_api_key"}, StreamErrorKind.FATAL),
        (500, {"type": "server_error"}, StreamErrorKind.TRANSIENT),
    ],
)
async def test_refusals(status: int, error: dict[str, Any], kind: StreamErrorKind) -> None:
    body = msgspec.json.encode({"error": {"message": "No.", **error}})
    async with serving([Answer(status=status, body=body)], retry=ONCE) as (_, responses):
        [last] = await ask(responses)
    assert isinstance(last, Error)
    assert last.kind is kind
    assert last.message.startswith(f"the server answered {status}: No.")


@pytest.mark.slow
class TestWhatIsRefusedIsLeftOut:
    """Once, and from then on."""

    def refusal(self, text: str) -> Answer:
        return Answer(status=400, body=msgspec.json.encode({"error": {"message": text}}))

    async def test_summaries(self) -> None:
        text = "Your organization must be verified to generate reasoning summaries. Please go to…"
        answer = stream(text_delta("Hi"), completed())
        script = [self.refusal(text), answer, answer]
        async with serving(script, model=THINKER) as (server, responses):
            request = asking(reasoning=ReasoningEffort.LOW)
            for _ in range(2):
                assert isinstance((await ask(responses, request))[-1], Done)
        first, *others = bodies(server)
        assert first["reasoning"] == {"effort": "low", "summary": "auto"}
        assert [body["reasoning"] for body in others] == [{"effort": "low"}] * 2

    async def test_blobs(self) -> None:
        text = "The encrypted content gAAA...blob could not be verified."
        old = turn(details(sealed("old", summary=[])), TextContent("Yes."))
        new = turn(details(sealed("new", summary=[])), TextContent("No."))
        answer = stream(text_delta("Hi"), completed())
        script = [self.refusal(text), answer, answer]
        async with serving(script, model=THINKER) as (server, responses):
            for request in (asking(old), asking(old, new)):
                assert isinstance((await ask(responses, request))[-1], Done)
        assert [body["input"] for body in bodies(server)] == [
            [sent_reasoning("old"), said("Yes.")],
            [said("Yes.")],
            [said("Yes."), sent_reasoning("new"), said("No.")],
        ]

    @pytest.mark.parametrize(
        "text",
        [
            "The encrypted content gAAA...blob could not be verified.",
            "Your organization must be verified to generate reasoning summaries.",
        ],
    )
    async def test_a_server_that_refuses_all_the_same(self, text: str) -> None:
        before = turn(details(sealed()), TextContent("Yes."))
        request = asking(before, reasoning=ReasoningEffort.LOW)
        script = [self.refusal(text)] * 3
        async with serving(script, model=THINKER) as (server, responses):
            for asked in (2, 3):
                [last] = await ask(responses, request)
                assert isinstance(last, Error)
                assert last.kind is StreamErrorKind.FATAL
                assert len(server.requests) == asked


# --- keys -------------------------------------------------------------------------------------

CANARY = "sk-canary-0123456789"


def test_a_key_is_needed_for_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"OpenAI .* needs a key: set OPENAI_API_KEY"):
        OpenAIResponses(THINKER)
    assert OpenAIResponses(THINKER, api_key="key").base_url == "https://api.openai.com/v1"


@pytest.mark.slow
async def test_a_key_goes_to_the_host_that_it_belongs_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    monkeypatch.setenv("OPENAI_ORG_ID", "org-canary")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-canary")

    def answer(_: Request) -> Answer:
        return stream(text_delta("Hi"), completed())

    async with serving(answer) as (server, responses):
        await ask(responses)
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        ours = OpenAIResponses("m")
        await ask(ours)
        await ours.aclose()
    first, second = [request.headers for request in server.requests]
    assert "authorization" not in first
    assert "canary" not in str(first)
    assert second["authorization"] == f"Bearer {CANARY}"


@pytest.mark.slow
async def test_a_client_of_ones_own() -> None:
    from openai import AsyncOpenAI

    async with serving([stream(text_delta("Hi"), completed())] * 2) as (server, _):
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=CANARY)
        responses = OpenAIResponses("m", client=client)
        await ask(responses)
        await responses.aclose()
        assert isinstance((await ask(responses))[-1], Done), "it stays open"
        await client.close()
    assert server.requests[0].headers["authorization"] == f"Bearer {CANARY}"


@pytest.mark.slow
async def test_the_key_is_nowhere(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Not even where the server quotes it."""
    caplog.set_level(logging.DEBUG)
    quoted = {"error": {"message": f"Incorrect API key provided: {CANARY}"}}
    told = event("error", code="server_error", message=f"{CANARY} and other-canary")
    script = [
        stream(told),
        stream(text_delta("Hi"), completed()),
        Answer(status=401, body=msgspec.json.encode(quoted)),
    ]
    fixture = tmp_path / "answers.jsonl"
    settings = {"api_key": CANARY, "headers": {"X-Team-Token": "other-canary"}}
    async with serving(script, **settings) as (server, responses):
        recording = RecordingStream(responses, fixture)
        events = await ask(recording)
        with pytest.raises(StreamError) as failure:
            await run("Hi", AgentContext(), LoopConfig(stream=recording))
    headers = server.requests[0].headers
    assert headers["authorization"] == f"Bearer {CANARY}"
    assert headers["x-team-token"] == "other-canary"
    texts = [repr(events), str(failure.value), repr(failure.value), repr(responses), caplog.text]
    texts += [repr(failure.value.__cause__), fixture.read_text()]
    assert "retrying in" in caplog.text
    assert "[redacted]" in str(failure.value)
    assert not [text for text in texts if "canary" in text]


# --- with the loop ----------------------------------------------------------------------------


@tool
def look(at: int) -> str:
    """Look at a place."""
    return f"a crab at {at}"


def input_bytes(request: Request) -> bytes:
    """The history as it is on the wire."""
    return bytes(msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])["input"])


@pytest.mark.slow
async def test_a_turn_with_reasoning_goes_back_as_it_came() -> None:
    """Also after it was written down and read again."""
    second = (
        added(call("call_2", "look", item_id="fc_2"), 0),
        arguments_delta('{"at":2}', 0, "fc_2"),
        done(call("call_2", "look", '{"at":2}', "fc_2"), 0),
        completed(),
    )
    answer = stream(text_delta("A crab."), completed())
    script = [stream(RECORDED), stream(*second), answer, answer, answer]
    async with serving(script, model=THINKER) as (server, responses):
        config = LoopConfig(stream=responses, tools=[look])
        context = AgentContext("Be brief.")
        context = context.extend(await run("What is there?", context, config))
        loaded = load_transcript(dump_transcript(context.messages))
        assert not loaded.malformed
        await run("And now?", context, config)
        await run("And now?", AgentContext("Be brief.", loaded.messages), config)
    _, asked, last, remembered, read = server.requests
    assert read.body == remembered.body
    assert b'"encrypted_content":"gAAAA"' in read.body
    assert input_bytes(last).startswith(input_bytes(asked)[:-1])
    assert input_bytes(remembered).startswith(input_bytes(last)[:-1])
    assert msgspec.json.decode(input_bytes(remembered)) == [
        user("What is there?"),
        sent_reasoning("gAAAA", [{"type": "summary_text", "text": "**Café**"}]),
        said("I look 🦀.", phase="commentary"),
        sent_call("call_1", '{"at":1}'),
        sent_result("call_1", "a crab at 1"),
        sent_call("call_2", '{"at":2}'),
        sent_result("call_2", "a crab at 2"),
        said("A crab."),
        user("And now?"),
    ]


async def test_a_run_against_aimock(aimock: Aimock) -> None:
    calls = [{"name": "look", "arguments": '{"at": 1}'}, {"name": "look", "arguments": '{"at": 2}'}]
    usage = {"input_tokens": 20, "output_tokens": 9}
    aimock.play(
        {"response": {"toolCalls": calls, "reasoning": "Where is it?"}, "chunkSize": 4},
        {"response": {"content": "Two crabs.", "usage": usage}, "chunkSize": 3},
    )
    responses = OpenAIResponses(THINKER, base_url=f"{aimock.url}/v1", api_key=CANARY)
    config = LoopConfig(stream=responses, tools=[look])
    ran = await run("What is there?", AgentContext("Be brief."), config)
    await responses.aclose()
    assert ran.text == "Two crabs."
    first = ran.messages[1]
    assert isinstance(first, AssistantMessage)
    assert first.reasoning_text == "Where is it?"
    [entry] = first.reasoning_details_values
    blob = base64.b64encode(f"aimock-encrypted-reasoning:{entry['id']}".encode()).decode()
    expected = {**sealed(blob), "id": entry["id"]}
    assert entry == expected
    assert [call.arguments for call in first.tool_calls] == [{"at": 1}, {"at": 2}]
    assert ran.usage == Usage(20, 9)
    asked, answered = aimock.journal()
    assert {entry.path for entry in (asked, answered)} == {"/v1/responses"}
    assert {entry.response.status for entry in (asked, answered)} == {200}
    roles = [entry["role"] for entry in answered.body["messages"]]
    assert roles == ["system", "user", "assistant", "assistant", "tool", "tool"]
    ids = [call.id for call in first.tool_calls]
    sent_ids = [told["tool_calls"][0]["id"] for told in answered.body["messages"][2:4]]
    assert sent_ids == [told["tool_call_id"] for told in answered.body["messages"][4:]] == ids
    assert [told["content"] for told in answered.body["messages"][4:]] == [
        "a crab at 1",
        "a crab at 2",
    ]


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", StopReason.MAX_TOKENS), ("stop", StopReason.END_TURN)]
)
async def test_how_aimock_ends(aimock: Aimock, finish: str, reason: StopReason) -> None:
    aimock.play({"response": {"content": "And then", "finishReason": finish}})
    responses = OpenAIResponses("gpt-4.1", base_url=f"{aimock.url}/v1")
    last = (await ask(responses))[-1]
    await responses.aclose()
    assert isinstance(last, Done)
    assert last.message.stop_reason is reason
    assert last.message.plain_text == "And then"


async def test_aimock_breaks_off(aimock: Aimock) -> None:
    text = {"response": {"content": "a long answer"}, "chunkSize": 1, "truncateAfterChunks": 8}
    aimock.play(text)
    responses = OpenAIResponses("gpt-4.1", base_url=f"{aimock.url}/v1", retry=ONCE)
    last = (await ask(responses))[-1]
    await responses.aclose()
    assert isinstance(last, Error)
    assert last.kind is StreamErrorKind.TRANSIENT
    assert "a long answer".startswith(last.partial.plain_text)


async def test_a_real_model(llama_server: LlamaServer) -> None:
    responses = OpenAIResponses(llama_server.model, base_url=llama_server.url)
    request = asking(
        UserMessage("Hello"),
        turn(ReasoningContent("Hm"), TextContent("I look."), ToolCall("c1", "look", {"at": 1})),
        result("c1"),
        max_output_tokens=16,
    )
    report = await check_stream_fn(responses, request)
    await responses.aclose()
    assert report.error is None, report.error
    assert report.message.plain_text
    assert report.message.stop_reason is StopReason.MAX_TOKENS
    assert report.message.usage is not None
    assert report.message.usage.output_tokens == 16
