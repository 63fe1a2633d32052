"""Chat Completions: what is sent, in every dialect, and what is made of what comes back."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    ConfigError,
    CustomMessage,
    ImageContent,
    LoopConfig,
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
    TransportError,
    Usage,
    UserMessage,
    run_continue,
)
from clark_agent.errors import ReplayRefused
from clark_agent.history import MISSING_RESULT
from clark_agent.stream import Chunk, Done, Error, OutputSchema, ReasoningChunk, TextChunk
from clark_agent.testing.transport_kit import check_events_of
from clark_agent.transports import ChatDialect, OpenAIChat
from clark_agent.transports.dialects import (
    COMPATIBLE,
    DEEPSEEK,
    GROQ,
    KIMI,
    MISTRAL,
    OPENAI,
    OPENROUTER,
    XAI,
    ZAI,
    dialect_for,
    formats_of,
    openai_effort,
)
from clark_agent.transports.openai_chat import chat_tool
from clark_agent.types import AssistantBlock, arg_parse_error
from tests.strategies import cuts
from tests.transports.servers.bytes_server import Answer
from tests.transports.wires_chat import (
    DONE,
    ONCE,
    ask,
    asking,
    chunk,
    event,
    piece,
    said,
    sent,
    serving,
    stream,
    usage,
)

DIALECTS = (COMPATIBLE, OPENAI, OPENROUTER, DEEPSEEK, KIMI, ZAI, GROQ, MISTRAL, XAI)
PICTURE = "data:image/png;base64,AAAA"
LOOK = ToolSchema("look", "Look at a place.", {"type": "object", "properties": {}})

every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


# --- what a history becomes -------------------------------------------------------------------


def written(*messages: AgentMessage, dialect: ChatDialect = OPENAI, model: str = "m") -> Any:
    """The messages as they are sent."""
    return sent(asking(*messages), dialect=dialect, model=model)["messages"]


def calling(*calls: ToolCall, text: str = "") -> AssistantMessage:
    return AssistantMessage.from_calls(calls, text)


def result(call_id: str, *blocks: Any, **fields: Any) -> ToolResultMessage:
    content = blocks or (TextContent("seen"),)
    return ToolResultMessage(call_id, "look", content, **fields)


def sent_call(call_id: str, arguments: str = "{}", name: str = "look") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def sent_calls(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def sent_result(call_id: str, text: str = "seen") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


IMAGE_PART = {"type": "image_url", "image_url": {"url": PICTURE}}


def test_a_whole_request() -> None:
    request = StreamRequest(
        system_prompt="Be brief.",
        messages=(
            UserMessage((TextContent("What is this?"), ImageContent(PICTURE))),
            calling(ToolCall("a", "look", {"at": "é"}), text="Let me look."),
            result("a"),
        ),
        tools=(LOOK,),
        temperature=0.5,
        max_output_tokens=100,
        force_tool_call=True,
        provider_extras={"seed": 7},
    )
    assert sent(request, dialect=OPENAI, model="gpt-4.1") == {
        "model": "gpt-4.1",
        "messages": [
            {"role": "system", "content": "Be brief."},
            user([text_part("What is this?"), IMAGE_PART]),
            {
                "role": "assistant",
                "content": "Let me look.",
                "tool_calls": [sent_call("a", '{"at":"é"}')],
            },
            sent_result("a"),
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "look",
                    "description": "Look at a place.",
                    "parameters": {"type": "object", "properties": {}},
                },
            }
        ],
        "tool_choice": "required",
        "max_completion_tokens": 100,
        "temperature": 0.5,
        "seed": 7,
    }


def test_a_request_to_a_server_that_nobody_knows_asks_for_nothing_special() -> None:
    assert sent(asking(), dialect=COMPATIBLE) == {
        "model": "m",
        "messages": [user("Hi")],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.slow
async def test_what_is_encoded_is_what_the_server_gets() -> None:
    request = asking(UserMessage("é🦀"), tools=(LOOK,), temperature=0.0, max_output_tokens=5)
    async with serving([stream(*said())]) as (server, chat):
        await ask(chat, request)
        [got] = server.requests
        assert (got.method, got.path) == ("POST", "/v1/chat/completions")
        assert msgspec.json.decode(got.body) == chat.encode(request)


class TestSystemMessages:
    history = (
        SystemMessage("First."),
        UserMessage("Hi"),
        SystemMessage("It is late."),
        AssistantMessage.from_text("Good night"),
        SystemMessage("It is early."),
        UserMessage("Hi"),
        UserMessage((TextContent("Look"), ImageContent(PICTURE))),
    )

    def written(self, dialect: ChatDialect) -> Any:
        request = StreamRequest(system_prompt="Be brief.", messages=self.history)
        return sent(request, dialect=dialect)["messages"]

    @pytest.mark.parametrize("dialect", [OPENAI, OPENROUTER, GROQ, XAI, ZAI])
    def test_stay_where_they_are(self, dialect: ChatDialect) -> None:
        assert self.written(dialect) == [
            {"role": "system", "content": "Be brief."},
            {"role": "system", "content": "First."},
            user("Hi"),
            {"role": "system", "content": "It is late."},
            {"role": "assistant", "content": "Good night"},
            {"role": "system", "content": "It is early."},
            user("Hi"),
            user([text_part("Look"), IMAGE_PART]),
        ]

    @pytest.mark.parametrize("dialect", [COMPATIBLE, MISTRAL])
    def test_go_as_a_user_where_only_one_is_taken(self, dialect: ChatDialect) -> None:
        assert self.written(dialect) == [
            {"role": "system", "content": "Be brief.\n\nFirst."},
            user("Hi\n\n<system>\nIt is late.\n</system>"),
            {"role": "assistant", "content": "Good night"},
            user(
                [
                    text_part("<system>\nIt is early.\n</system>\n\nHi"),
                    text_part("Look"),
                    IMAGE_PART,
                ]
            ),
        ]

    def test_one_that_is_empty_is_left_out(self) -> None:
        assert written(SystemMessage(""), UserMessage("Hi")) == [user("Hi")]

    def test_behind_tool_results(self) -> None:
        history = (calling(ToolCall("a", "look", {})), result("a"), SystemMessage("Hurry."))
        assert written(UserMessage("Hi"), *history, dialect=COMPATIBLE) == [
            user("Hi"),
            sent_calls(sent_call("a")),
            sent_result("a"),
            user("<system>\nHurry.\n</system>"),
        ]


class TestAssistantMessages:
    def test_thoughts_go_back_into_the_text_where_they_stood(self) -> None:
        message = AssistantMessage(
            (
                ThinkingContent("hm"),
                TextContent("One. "),
                ThinkingContent("more?"),
                TextContent("Two."),
            ),
            StopReason.END_TURN,
        )
        assert written(UserMessage("Count"), message)[1:] == [
            {
                "role": "assistant",
                "content": "<thought>hm</thought>One. <thought>more?</thought>Two.",
            }
        ]

    @pytest.mark.parametrize(
        ("dialect", "fields"),
        [
            (COMPATIBLE, {"reasoning": "So.", "reasoning_content": "So."}),
            (OPENAI, {}),
            (OPENROUTER, {}),
            (DEEPSEEK, {"reasoning_content": "So."}),
            (KIMI, {"reasoning_content": "So."}),
            (ZAI, {"reasoning_content": "So."}),
            (GROQ, {"reasoning": "So."}),
            (MISTRAL, {}),
            (XAI, {}),
        ],
        ids=lambda value: getattr(value, "name", None),
    )
    def test_readable_reasoning_goes_where_the_server_reads_it(
        self, dialect: ChatDialect, fields: dict[str, str]
    ) -> None:
        blocks = (ReasoningContent("S"), ReasoningContent("o."), TextContent("Yes"))
        message = AssistantMessage(blocks, StopReason.END_TURN)
        assert written(UserMessage("Hi"), message, dialect=dialect)[1:] == [
            {"role": "assistant", "content": "Yes", **fields}
        ]

    @every_dialect
    def test_reasoning_that_is_not_there(self, dialect: ChatDialect) -> None:
        """Some servers refuse a history of a thinking model whose messages lack the field."""
        empty = {"reasoning_content": ""} if dialect in (DEEPSEEK, KIMI) else {}
        message = AssistantMessage.from_text("Yes")
        assert written(UserMessage("Hi"), message, dialect=dialect)[1:] == [
            {"role": "assistant", "content": "Yes", **empty}
        ]

    @pytest.mark.parametrize(
        "blocks",
        [(), (TextContent(""),), (ReasoningContent("So."),), (ReasoningDetailsContent(()),)],
    )
    @every_dialect
    def test_one_that_says_nothing_is_left_out(
        self, dialect: ChatDialect, blocks: tuple[AssistantBlock, ...]
    ) -> None:
        silent = AssistantMessage(blocks, StopReason.END_TURN)
        history = (UserMessage("Hi"), silent, UserMessage("Hello?"))
        roles = [message["role"] for message in written(*history, dialect=dialect)]
        assert set(roles) == {"user"}

    @pytest.mark.parametrize("reason", [StopReason.ERROR, StopReason.ABORTED])
    def test_one_that_was_cut_off_is_left_out_with_its_results(self, reason: StopReason) -> None:
        cut = AssistantMessage((TextContent("Let"), ToolCall("a", "look", {})), reason)
        history = (UserMessage("Hi"), cut, result("a"), UserMessage("Go on"))
        assert written(*history) == [user("Hi"), user("Go on")]

    def test_one_that_ran_into_its_limit_is_kept(self) -> None:
        cut = AssistantMessage((TextContent("And then"),), StopReason.MAX_TOKENS)
        assert written(UserMessage("Hi"), cut)[1] == {"role": "assistant", "content": "And then"}

    def test_custom_messages_are_left_out(self) -> None:
        history = (CustomMessage("mark", {"secret": 1}), UserMessage("Hi"), CustomMessage("mark"))
        assert written(*history) == [user("Hi")]


class TestCallsAndResults:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({}, "{}"),
            ({"at": [1, None, "é"]}, '{"at":[1,null,"é"]}'),
            (arg_parse_error("cut off", '{"at": '), '{"invalid_json":"{\\"at\\": "}'),
            ([1, 2], '{"value":[1,2]}'),
            ("there", '{"value":"there"}'),
            (None, '{"value":null}'),
            ({"at": 2**70}, '{"at":1180591620717411303424}'),
        ],
    )
    def test_arguments_are_an_object_in_json(self, arguments: Any, text: str) -> None:
        history = (calling(ToolCall("a", "look", arguments)), result("a"))
        assert written(*history) == [sent_calls(sent_call("a", text)), sent_result("a")]

    def test_an_error_is_told_by_its_text(self) -> None:
        failed = result("a", TextContent("no such place"), is_error=True, details={"code": 2})
        history = (calling(ToolCall("a", "look", {})), failed)
        assert written(*history)[1] == sent_result("a", "no such place")

    def test_images_follow_behind_all_results(self) -> None:
        history = (
            calling(
                ToolCall("a", "look", {}), ToolCall("b", "look", {}), ToolCall("c", "look", {})
            ),
            result("a", TextContent("a plot"), ImageContent(PICTURE, alt="a plot")),
            result("b", ImageContent(PICTURE), ImageContent(PICTURE)),
            result("c"),
        )
        expected = [
            sent_calls(sent_call("a"), sent_call("b"), sent_call("c")),
            sent_result("a", "a plot"),
            sent_result("b", "(see the images that follow)"),
            sent_result("c"),
        ]
        of_tool = text_part("Images from the tool look:")
        images = [of_tool, IMAGE_PART, of_tool, IMAGE_PART, IMAGE_PART]
        assert written(*history) == [*expected, user(images)]
        more = UserMessage("And now?")
        assert written(*history, more) == [*expected, user(images), user("And now?")]
        assert written(*history, more, dialect=COMPATIBLE) == [
            *expected,
            user([*images, text_part("And now?")]),
        ]

    def test_images_are_named_where_no_user_may_follow_a_tool(self) -> None:
        history = (
            calling(ToolCall("a", "look", {}), ToolCall("b", "look", {})),
            result("a", TextContent("a plot"), ImageContent(PICTURE, alt="sales")),
            result("b", ImageContent(PICTURE)),
        )
        assert written(*history, dialect=MISTRAL)[1:] == [
            sent_result("call00001", "a plot\n[image: sales]"),
            sent_result("call00002", "[image]"),
        ]

    def test_what_a_crash_left_behind_is_mended(self) -> None:
        history = (
            result("orphan"),
            UserMessage("Hi"),
            calling(ToolCall("a", "look", {}), ToolCall("b", "look", {})),
            result("b"),
            UserMessage("Go on"),
        )
        assert written(*history) == [
            user("Hi"),
            sent_calls(sent_call("a"), sent_call("b")),
            sent_result("b"),
            sent_result("a", MISSING_RESULT),
            user("Go on"),
        ]

    def test_ids_that_come_again_are_made_unique(self) -> None:
        same = (ToolCall("call_0", "look", {}), ToolCall("call_0", "look", {}))
        results = (result("call_0", TextContent("one")), result("call_0", TextContent("two")))
        got = written(calling(*same), *results)
        ids = [call["id"] for call in got[0]["tool_calls"]]
        assert len(set(ids)) == 2
        assert got[1:] == [sent_result(ids[0], "one"), sent_result(ids[1], "two")]

    @pytest.mark.parametrize(
        "call_id", ["x" * 41, "call|with|bars", "functions.look:0", "toolu_é", "a b", "\ud800"]
    )
    def test_ids_that_not_all_servers_take_are_replaced(self, call_id: str) -> None:
        history = (calling(ToolCall(call_id, "look", {})), result(call_id))
        got = written(*history)
        new = got[0]["tool_calls"][0]["id"]
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", new)
        assert got == [sent_calls(sent_call(new)), sent_result(new)]
        assert written(*history) == got, "the same each time, or the prompt cache is lost"

    def test_ids_of_nine_letters(self) -> None:
        history = (
            calling(ToolCall("toolu_1", "look", {}), ToolCall("toolu_2", "look", {})),
            result("toolu_2"),
            result("toolu_1"),
            calling(ToolCall("toolu_3", "look", {})),
            result("toolu_3"),
        )
        got = written(*history, dialect=MISTRAL)
        assert got == [
            sent_calls(sent_call("call00001"), sent_call("call00002")),
            sent_result("call00002"),
            sent_result("call00001"),
            sent_calls(sent_call("call00003")),
            sent_result("call00003"),
        ]

    @pytest.mark.parametrize("name", ["functions.look", "look it up", "", "x" * 100, "über"])
    def test_a_name_that_the_model_made_up_does_not_spoil_the_history(self, name: str) -> None:
        """OpenAI refuses every later request over a call with such a name."""
        history = (calling(ToolCall("a", name, {})), ToolResultMessage("a", name, ()))
        [call] = written(*history)[0]["tool_calls"]
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", call["function"]["name"])


class TestStructuredReasoning:
    model = "anthropic/claude-sonnet-5"
    signed: Mapping[str, Any] = {
        "type": "reasoning.text",
        "text": "So. ",
        "signature": "c2lnbmVk",
        "format": "anthropic-claude-v1",
        "index": 0,
        "id": None,
        "new_field": {"nested": [1, 2.5, None]},
    }
    sealed: Mapping[str, Any] = {
        "type": "reasoning.encrypted",
        "data": "AAAA",
        "format": "anthropic-claude-v1",
        "index": 1,
    }

    def turn(self, *details: Any) -> tuple[AgentMessage, ...]:
        blocks = (ReasoningDetailsContent(details), ToolCall("a", "look", {}))
        return (UserMessage("Hi"), AssistantMessage(blocks, StopReason.TOOL_USE), result("a"))

    @pytest.mark.slow
    async def test_goes_back_as_it_came(self) -> None:
        details = [self.signed, self.sealed]
        request = asking(*self.turn(*details))
        async with serving(
            [stream(*said())], dialect=OPENROUTER, api_key="k", model=self.model
        ) as (server, chat):
            await ask(chat, request)
            raw = server.requests[0].body
        assert b'"reasoning_details":' + msgspec.json.encode(details) in raw

    @pytest.mark.parametrize("dialect", [d for d in DIALECTS if d is not OPENROUTER])
    def test_goes_to_nobody_else(self, dialect: ChatDialect) -> None:
        assert "reasoning_details" not in str(written(*self.turn(self.signed), dialect=dialect))

    def test_of_another_vendor_is_left_out(self) -> None:
        history = self.turn(self.signed, {**self.signed, "format": "google-gemini-v1"})
        got = written(*history, dialect=OPENROUTER, model="google/gemini-3")
        assert got[1]["reasoning_details"] == [{**self.signed, "format": "google-gemini-v1"}]

    @pytest.mark.parametrize(
        ("model", "formats"),
        [
            ("anthropic/claude-sonnet-5", {"anthropic-claude-v1"}),
            ("google/gemini-3-pro:free", {"google-gemini-v1"}),
            ("openai/gpt-5.1", {"openai-responses-v1", "azure-openai-responses-v1"}),
            ("x-ai/grok-4", {"xai-responses-v1"}),
            ("qwen/qwen3", {"unknown"}),
        ],
    )
    def test_whose_reasoning_a_model_takes(self, model: str, formats: set[str]) -> None:
        assert formats_of(model) == formats

    @pytest.mark.slow
    async def test_that_lost_its_signature_is_refused_here(self) -> None:
        unsigned = {name: v for name, v in self.signed.items() if name != "signature"}
        history = (CustomMessage("mark"), *self.turn(unsigned))
        settings: dict[str, Any] = {"dialect": OPENROUTER, "api_key": "k", "model": self.model}
        async with serving([], **settings) as (_, chat):
            [last] = await ask(chat, asking(*history))
            assert isinstance(last, Error)
            assert last.kind is StreamErrorKind.FATAL
            assert isinstance(last.cause, ReplayRefused)
            assert last.cause.index == 2, "its place among the request's messages"
            with pytest.raises(StreamError) as failed:
                await run_continue(AgentContext(messages=history), LoopConfig(stream=chat))
        assert isinstance(failed.value.__cause__, ReplayRefused)

    def test_of_an_earlier_round_is_nobodys_business(self) -> None:
        unsigned = {name: v for name, v in self.signed.items() if name != "signature"}
        history = (*self.turn(unsigned), UserMessage("And now?"))
        got = written(*history, dialect=OPENROUTER, model=self.model)
        assert got[1]["reasoning_details"] == [unsigned]


# --- settings of a request --------------------------------------------------------------------

NONE, MINIMAL, LOW, MEDIUM, HIGH, XHIGH = ReasoningEffort
NOTHING: dict[str, Any] = {}
OFF = {"thinking": {"type": "disabled"}}


def level(word: str) -> dict[str, Any]:
    return {"reasoning_effort": word}


def thinking(word: str) -> dict[str, Any]:
    return {"thinking": {"type": "enabled"}, "reasoning_effort": word}


@pytest.mark.parametrize(
    ("dialect", "added"),
    [
        (
            COMPATIBLE,
            [level("none"), NOTHING, level("low"), level("medium"), level("high"), level("high")],
        ),
        (
            DEEPSEEK,
            [OFF, NOTHING, thinking("low"), thinking("high"), thinking("high"), thinking("max")],
        ),
        (KIMI, [OFF, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING]),
        (ZAI, [OFF, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING]),
        (GROQ, [NOTHING, NOTHING, level("low"), level("medium"), level("high"), level("high")]),
        (MISTRAL, [NOTHING, NOTHING, NOTHING, NOTHING, level("high"), level("high")]),
        (XAI, [NOTHING, NOTHING, level("low"), NOTHING, level("high"), level("high")]),
        (
            OPENROUTER,
            [
                {"reasoning": {"effort": word}}
                for word in ("none", "minimal", "low", "medium", "high", "xhigh")
            ],
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_efforts(dialect: ChatDialect, added: list[dict[str, Any]]) -> None:
    plain = {"model", "messages", "stream", "stream_options"}
    for effort, expected in zip(ReasoningEffort, added, strict=True):
        body = sent(asking(reasoning=effort), dialect=dialect)
        assert {name: body[name] for name in body.keys() - plain} == expected, effort


OPENAI_EFFORTS = """
model                none     minimal  low      medium   high     xhigh
gpt-4o               -        -        -        -        -        -
gpt-4.1-mini         -        -        -        -        -        -
chatgpt-4o-latest    -        -        -        -        -        -
o3                   low      low      low      medium   high     high
o4-mini-2025-04-16   low      low      low      medium   high     high
gpt-5                minimal  minimal  low      medium   high     high
gpt-5-nano           minimal  minimal  low      medium   high     high
gpt-5-2025-08-07     minimal  minimal  low      medium   high     high
gpt-5-chat-latest    -        -        -        -        -        -
gpt-5-pro            high     high     high     high     high     high
gpt-5-codex          low      low      low      medium   high     high
gpt-5.1              none     none     low      medium   high     high
gpt-5.1-chat-latest  medium   medium   medium   medium   medium   medium
gpt-5.1-codex        low      low      low      medium   high     high
gpt-5.1-codex-max    low      low      low      medium   high     xhigh
gpt-5.2              none     none     low      medium   high     xhigh
gpt-5.2-pro          medium   medium   medium   medium   high     xhigh
gpt-5.3-codex        low      low      low      medium   high     xhigh
gpt-6                none     none     low      medium   high     xhigh
"""


@pytest.mark.parametrize("row", OPENAI_EFFORTS.strip().splitlines()[1:], ids=lambda r: r.split()[0])
def test_efforts_of_openai_models(row: str) -> None:
    model, *words = row.split()
    for effort, word in zip(ReasoningEffort, words, strict=True):
        expected = None if word == "-" else word
        assert openai_effort(model, effort) == expected, effort
        body = sent(asking(reasoning=effort, temperature=0.5), dialect=OPENAI, model=model)
        assert body.get("reasoning_effort") == expected
        assert ("temperature" in body) == (expected in (None, "none"))


@pytest.mark.parametrize(
    ("model", "effort"),
    [("gpt-5.1", "high"), ("gpt-5", "high"), ("gpt-5.2", "none"), ("gpt-5.4-mini", "none")],
)
def test_models_that_do_not_think_and_call_tools_are_not_asked_to(model: str, effort: str) -> None:
    body = sent(asking(reasoning=HIGH, tools=(LOOK,)), dialect=OPENAI, model=model)
    assert body["reasoning_effort"] == effort


def test_what_the_limit_is_called() -> None:
    named = {d.name: _cap_of(sent(asking(max_output_tokens=7), dialect=d)) for d in DIALECTS}
    modern = {"OpenAI", "Groq", "xAI"}
    assert named == {
        d.name: ["max_completion_tokens" if d.name in modern else "max_tokens"] for d in DIALECTS
    }


def _cap_of(body: dict[str, Any]) -> list[str]:
    return [name for name, value in body.items() if value == 7]


@every_dialect
def test_usage_is_asked_for_unless_the_server_refuses_that(dialect: ChatDialect) -> None:
    body = sent(asking(), dialect=dialect)
    expected = None if dialect is MISTRAL else {"include_usage": True}
    assert body.get("stream_options") == expected


def test_a_tool_call_is_forced_only_where_there_are_tools() -> None:
    assert "tool_choice" not in sent(asking(force_tool_call=True), dialect=OPENAI)
    assert "tool_choice" not in sent(asking(tools=(LOOK,)), dialect=OPENAI)


def test_the_hosts_own_fields_win() -> None:
    extras: dict[str, Any] = {
        "model": "other",
        "stream_options": None,
        "reasoning_effort": "medium",
        "messages": None,
        "logit_bias": {"1": 6},
    }
    request = asking(provider_extras=extras, reasoning=HIGH)
    assert sent(request, dialect=COMPATIBLE) == {"stream": True, **extras}


def test_the_hosts_own_fields_take_nothing_away() -> None:
    extras = {
        "stream_options": {"include_obfuscation": False},
        "tools": [{"type": "web_search"}, chat_tool(LOOK)],
    }
    body = sent(asking(provider_extras=extras, tools=(LOOK,)), dialect=OPENAI)
    assert body["stream_options"] == {"include_usage": True, "include_obfuscation": False}
    assert body["tools"] == [chat_tool(LOOK), {"type": "web_search"}]


@pytest.mark.slow
async def test_the_hosts_own_fields_win_on_the_wire_too() -> None:
    extras = {"model": "other", "temperature": 1, "messages": [user("Bye")]}
    async with serving([stream(*said())]) as (server, chat):
        await ask(chat, asking(provider_extras=extras, temperature=0.0))
        assert msgspec.json.decode(server.requests[0].body) == {
            **extras,
            "messages": [user("Hi"), user("Bye")],
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class NoJson:
    def __repr__(self) -> str:  # an id of a test must be the same in every process
        return "NO_JSON"


NO_JSON = NoJson()


@pytest.mark.slow
class TestWhatCannotBeSent:
    @pytest.mark.parametrize(
        "fields",
        [
            {"provider_extras": [1]},
            {"provider_extras": "seed"},
            {"provider_extras": {"seed": NO_JSON}},
            {"provider_extras": {"seed": {1, 2}}},
            {"provider_extras": {"seed": b"\xff"}},
            {"provider_extras": {"seed": float("nan")}},
            {"temperature": float("inf")},
            {"tools": (ToolSchema("look", "", {"default": NO_JSON}),)},
        ],
        ids=str,
    )
    async def test_is_told_as_an_error(self, fields: dict[str, Any]) -> None:
        await self.check(asking(**fields))

    async def test_arguments_that_are_no_json(self) -> None:
        call = ToolCall("a", "look", {"at": object()})
        await self.check(asking(calling(call), result("a")))

    async def test_structured_reasoning_that_is_no_json(self) -> None:
        details = ReasoningDetailsContent(({"type": "reasoning.text", "text": object()},))
        message = AssistantMessage((details, TextContent("Hi")), StopReason.END_TURN)
        await self.check(asking(message, UserMessage("Hi")), model="qwen/qwen3", dialect=OPENROUTER)

    async def check(self, request: StreamRequest, **settings: Any) -> None:
        async with serving([], api_key="k", **settings) as (server, chat):
            events = await ask(chat, request)
        assert not check_events_of(events)
        last = events[-1]
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.FATAL
        assert server.requests == []

    def test_encode_says_why(self) -> None:
        with pytest.raises(TransportError, match="provider_extras must be a mapping, not list"):
            sent(asking(provider_extras=[1]), dialect=OPENAI)


@pytest.mark.slow
class TestHalfCharacters:
    """A file name, or an emoji that was cut, may hold what no encoder takes."""

    async def body(self, *messages: AgentMessage, **fields: Any) -> Any:
        async with serving([stream(*said())]) as (server, chat):
            events = await ask(chat, asking(*messages, **fields))
            assert isinstance(events[-1], Done), events[-1]
            return msgspec.json.decode(server.requests[0].body)

    async def test_in_text(self) -> None:
        body = await self.body(UserMessage("a\ud800b 🦀"))
        assert body["messages"] == [user("a\ufffdb 🦀")]

    async def test_in_a_result(self) -> None:
        history = (calling(ToolCall("a", "look", {})), result("a", TextContent("\udcff.txt")))
        body = await self.body(*history)
        assert body["messages"][-1] == sent_result("a", "\ufffd.txt")

    async def test_in_arguments(self) -> None:
        body = await self.body(calling(ToolCall("a", "look", {"at": "\ud83d!"})), result("a"))
        [call] = body["messages"][0]["tool_calls"]
        assert msgspec.json.decode(call["function"]["arguments"]) == {"at": "\ufffd!"}

    async def test_in_extras(self) -> None:
        body = await self.body(provider_extras={"user": "\ud800", "n\udfff": [("\ud800",)]})
        assert (body["user"], body["n\ufffd"]) == ("\ufffd", [["\ufffd"]])


class TestDialects:
    @pytest.mark.parametrize(
        ("url", "name"),
        [
            ("https://api.openai.com/v1", "OpenAI"),
            ("https://eu.api.openai.com/v1", "OpenAI"),
            ("https://openrouter.ai/api/v1", "OpenRouter"),
            ("https://api.deepseek.com", "DeepSeek"),
            ("https://api.groq.com/openai/v1", "Groq"),
            ("https://api.mistral.ai/v1", "Mistral"),
            ("https://api.x.ai/v1", "xAI"),
            ("https://api.moonshot.cn/v1", "Moonshot"),
            ("https://api.z.ai/api/paas/v4", "Z.ai"),
            ("https://api.together.xyz/v1", "Together"),
            ("http://localhost:8080/v1", "compatible server"),
            ("https://api.openai.com.evil.example/v1", "compatible server"),
            ("https://evilapi.openai.com/v1", "compatible server"),
            ("https://example.com/api.openai.com", "compatible server"),
        ],
    )
    def test_follow_from_the_address(self, url: str, name: str) -> None:
        assert dialect_for(url).name == name

    def test_a_given_one_wins(self) -> None:
        chat = OpenAIChat("m", base_url="http://127.0.0.1:9", dialect=DEEPSEEK, api_key="k")
        assert (chat.dialect, chat.provider) == (DEEPSEEK, "DeepSeek")

    @pytest.mark.parametrize("model", ["", "  ", None, 5])
    def test_a_model_is_needed(self, model: Any) -> None:
        with pytest.raises(ConfigError, match="needs the name of a model"):
            OpenAIChat(model, base_url="http://127.0.0.1:9")


# --- what comes back --------------------------------------------------------------------------


async def answer(*pieces: bytes, cap: int | None = None, **settings: Any) -> AssistantMessage:
    """What a response of these events comes to."""
    events = await heard(*pieces, cap=cap, **settings)
    assert isinstance(events[-1], Done), events[-1]
    return events[-1].message


async def failure(*pieces: bytes, **settings: Any) -> Error:
    events = await heard(*pieces, **settings)
    assert isinstance(events[-1], Error), events[-1]
    return events[-1]


async def heard(*pieces: bytes, cap: int | None = None, **settings: Any) -> list[Any]:
    async with serving([stream(*pieces)], retry=ONCE, **settings) as (_, chat):
        events = await ask(chat, asking(max_output_tokens=cap))
    assert not check_events_of(events)
    return events


def blocks_of(message: AssistantMessage, kind: type[Any]) -> list[Any]:
    return [block for block in message.content if isinstance(block, kind)]


@pytest.mark.slow
class TestReasoningDetails:
    def fragment(self, index: int | None = 0, **fields: Any) -> dict[str, Any]:
        kind = {"type": "reasoning.text", "format": "anthropic-claude-v1", "index": index}
        return {**kind, **fields}

    async def details(self, *fragments: dict[str, Any]) -> list[Any]:
        deltas = [chunk(content="", reasoning_details=[fragment]) for fragment in fragments]
        settings: dict[str, Any] = {"dialect": OPENROUTER, "api_key": "k"}
        message = await answer(*deltas, *said("Yes"), **settings)
        assert message.plain_text == "Yes"
        [block] = blocks_of(message, ReasoningDetailsContent)
        return list(block.details)

    async def test_fragments_are_joined_and_the_signature_comes_last(self) -> None:
        details = await self.details(
            self.fragment(text="Let "),
            self.fragment(text="me "),
            self.fragment(text="see."),
            self.fragment(signature="c2ln"),
        )
        assert details == [self.fragment(text="Let me see.", signature="c2ln")]

    async def test_a_signature_with_an_empty_text(self) -> None:
        details = await self.details(
            self.fragment(text="So."), self.fragment(text="", signature="c2ln")
        )
        assert details == [self.fragment(text="So.", signature="c2ln")]

    async def test_a_blob_of_the_same_number_is_another_item(self) -> None:
        sealed = {"type": "reasoning.encrypted", "data": "AAAA", "index": 0, "id": "rs_1"}
        told = {"type": "reasoning.summary", "index": 0}
        details = await self.details(
            {**told, "summary": "Thinking "}, {**told, "summary": "hard."}, sealed, sealed
        )
        assert details == [{**told, "summary": "Thinking hard."}, sealed, sealed]

    async def test_another_number_is_another_item(self) -> None:
        items = [self.fragment(0, text="One."), self.fragment(1, text="Two.")]
        assert await self.details(*items) == items

    async def test_without_numbers_a_signature_closes_an_item(self) -> None:
        details = await self.details(
            self.fragment(None, text="On"),
            self.fragment(None, text="e."),
            self.fragment(None, signature="c2ln"),
            self.fragment(None, text="Two."),
        )
        assert details == [
            self.fragment(None, text="One.", signature="c2ln"),
            self.fragment(None, text="Two."),
        ]

    async def test_items_of_an_unknown_kind_stay_as_they_are(self) -> None:
        items: list[dict[str, Any]] = [
            {"type": "reasoning.new", "index": 0, "x": 1},
            {"type": "reasoning.new"},
        ]
        assert await self.details(*items) == items

    async def test_they_come_before_the_calls_that_follow(self) -> None:
        message = await answer(
            chunk(reasoning_details=[self.fragment(text="So.", signature="c2ln")]),
            chunk("tool_calls", tool_calls=[piece(0, "a", "look", "{}")]),
            DONE,
        )
        assert [type(block) for block in message.content] == [ReasoningDetailsContent, ToolCall]

    async def test_they_go_back_as_they_were_joined(self) -> None:
        """From the wire through a history to the wire again."""
        item = self.fragment(text="Let me see.", signature="c2ln", id=None)
        answers = [
            stream(
                chunk(reasoning_details=[self.fragment(text="Let ", id=None)]),
                chunk(reasoning_details=[self.fragment(text="me see.", id=None)]),
                chunk(reasoning_details=[self.fragment(signature="c2ln", id=None)]),
                chunk("tool_calls", tool_calls=[piece(0, "a", "look", "{}")]),
                DONE,
            ),
            stream(*said()),
        ]
        settings: dict[str, Any] = {"dialect": OPENROUTER, "api_key": "k", "model": "anthropic/x"}
        async with serving(answers, **settings) as (server, chat):
            events = await ask(chat)
            assert isinstance(events[-1], Done)
            await ask(chat, asking(UserMessage("Hi"), events[-1].message, result("a")))
        got = msgspec.json.decode(server.requests[1].body)["messages"][1]
        assert got["reasoning_details"] == [item]


@pytest.mark.slow
class TestReasoning:
    @pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
    async def test_in_either_field(self, field: str) -> None:
        message = await answer(chunk(**{field: "Let me "}), chunk(**{field: "see."}), *said())
        assert message.content == (ReasoningContent("Let me see."), TextContent("Hello"))

    async def test_in_both_fields_is_told_once(self) -> None:
        both = chunk(reasoning="So.", reasoning_content="So.", content="")
        events = await heard(both, *said())
        chunks = [event.chunk for event in events if isinstance(event, Chunk)]
        assert chunks == [ReasoningChunk("So."), TextChunk("Hello")]

    async def test_in_parts_of_the_content(self) -> None:
        thought = {"type": "thinking", "thinking": [{"type": "text", "text": "So."}]}
        message = await answer(
            chunk(content=[thought]),
            chunk(content=[{"type": "text", "text": "Hel"}, {"type": "reference", "ids": [1]}]),
            chunk(content=[{"type": "text", "text": "lo"}]),
            chunk("stop", content=""),
            DONE,
        )
        assert message.content == (ReasoningContent("So."), TextContent("Hello"))

    @pytest.mark.parametrize("content", [[], {}, 5, ["a"], [{"type": "thinking", "thinking": "x"}]])
    async def test_content_of_an_odd_shape_does_no_harm(self, content: Any) -> None:
        message = await answer(chunk(content=content), *said())
        assert message.plain_text.endswith("Hello")

    async def test_thinking_of_an_odd_shape_does_no_harm(self) -> None:
        odd = {"type": "thinking", "thinking": ["So.", None, {"text": "Yes."}]}
        message = await answer(chunk(content=[odd]), *said())
        assert message.plain_text == "Hello"

    async def test_tags_are_left_alone_when_they_are_not_wanted(self) -> None:
        text = "<think>hm</think>Hello"
        assert (await answer(*said(text))).content == (
            ThinkingContent("hm"),
            TextContent("Hello"),
        )
        message = await answer(*said(text), thinking_tags=False)
        assert message.content == (TextContent(text),)

    async def test_a_refusal_is_text(self) -> None:
        message = await answer(chunk(content=None, refusal="I will not."), chunk("stop"), DONE)
        assert message.plain_text == "I will not."


@pytest.mark.slow
class TestCalls:
    async def calls(self, *deltas: list[dict[str, Any]]) -> list[ToolCall]:
        pieces = [chunk(tool_calls=delta) for delta in deltas]
        message = await answer(*pieces, chunk("tool_calls"), DONE)
        assert message.stop_reason is StopReason.TOOL_USE
        return list(message.tool_calls)

    ONE, TWO = ToolCall("a", "look", {"at": 1}), ToolCall("b", "see", {"at": 2})

    async def test_numbered(self) -> None:
        calls = await self.calls(
            [piece(0, "a", "look", "")],
            [piece(0, None, None, '{"at"')],
            [piece(0, None, None, ":1}"), piece(1, "b", "see", '{"at":')],
            [piece(1, None, None, "2}")],
        )
        assert calls == [self.ONE, self.TWO]

    async def test_numbered_from_one(self) -> None:
        calls = await self.calls(
            [piece(1, "a", "look", '{"at":1}')], [piece(2, "b", "see", '{"at":2}')]
        )
        assert calls == [self.ONE, self.TWO]

    async def test_not_numbered(self) -> None:
        calls = await self.calls(
            [piece(None, "a", "look", '{"at":1}'), piece(None, "b", "see", '{"at"')],
            [piece(None, None, None, ":2}")],
        )
        assert calls == [self.ONE, self.TWO]

    async def test_all_of_the_same_number(self) -> None:
        calls = await self.calls(
            [piece(0, "a", "look", '{"at":1}')], [piece(0, "b", "see", '{"at":2}')]
        )
        assert calls == [self.ONE, self.TWO]

    async def test_of_the_same_number_and_name(self) -> None:
        calls = await self.calls(
            [piece(0, "a", "look", '{"at":1}')], [piece(0, "b", "look", '{"at":2}')]
        )
        assert calls == [self.ONE, ToolCall("b", "look", {"at": 2})]

    @pytest.mark.parametrize("number", [None, 0])
    @pytest.mark.parametrize("no_id", [None, ""])
    async def test_whole_and_without_ids(self, number: int | None, no_id: str | None) -> None:
        """Gemini's server does this: each call comes in one piece and all of them look alike."""
        calls = await self.calls(
            [piece(number, no_id, "look", '{"at":1}'), piece(number, no_id, "look", '{"at":2}')]
        )
        assert [call.arguments for call in calls] == [{"at": 1}, {"at": 2}]
        assert len({call.id for call in calls}) == 2

    async def test_arguments_as_an_object(self) -> None:
        calls = await self.calls([piece(0, "a", "look", {"at": 1})])
        assert calls == [self.ONE]

    async def test_a_name_that_grows(self) -> None:
        calls = await self.calls(
            [piece(0, "a", "lo")],
            [piece(0, "a", "look")],
            [piece(0, "a", "look", '{"at"')],
            [piece(0, None, None, ":1}")],
        )
        assert calls == [self.ONE]

    async def test_a_name_in_pieces(self) -> None:
        calls = await self.calls(
            [piece(0, "a", "lo")], [piece(0, None, "ok")], [piece(0, None, None, '{"at":1}')]
        )
        assert calls == [self.ONE]

    async def test_without_a_function(self) -> None:
        calls = await self.calls([{"index": 0, "id": "a", "function": None}], [piece(0, None, "x")])
        assert calls == [ToolCall("a", "x", {})]

    async def test_arguments_that_are_not_json_are_kept_for_the_model(self) -> None:
        [call] = await self.calls([piece(0, "a", "look", '{"at": ]')])
        assert call.arguments["__clark_arg_raw"] == '{"at": ]'

    async def test_in_one_piece(self) -> None:
        """A completion that was not streamed has no numbers."""
        calls = [sent_call("a", '{"at":1}'), sent_call("b", '{"at":2}', "see")]
        choice = {"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
        message = await answer(msgspec.json.encode({"choices": [choice]}))
        assert message.tool_calls == (self.ONE, self.TWO)


@pytest.mark.slow
class TestUsage:
    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"prompt_tokens": 9, "completion_tokens": 2}, Usage(9, 2)),
            (
                {
                    "prompt_tokens": 9,
                    "completion_tokens": 2,
                    "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
                    "completion_tokens_details": {"reasoning_tokens": 1},
                },
                Usage(5, 2, 0, 4),
            ),
            (
                {
                    "prompt_tokens": 9,
                    "completion_tokens": 2,
                    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 3},
                },
                Usage(2, 2, 3, 4),
            ),
            (
                {
                    "prompt_tokens": 9,
                    "completion_tokens": 2,
                    "prompt_cache_hit_tokens": 8,
                    "prompt_cache_miss_tokens": 1,
                },
                Usage(1, 2, 0, 8),
            ),
            ({"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 7}, Usage(2, 2, 0, 7)),
            ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, 0)),
            ({"prompt_tokens": None, "completion_tokens": "2"}, Usage()),
            (
                {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}},
                Usage(0, 0, 0, 5),
            ),
        ],
    )
    async def test_of_each_kind(self, fields: dict[str, Any], expected: Usage) -> None:
        message = await answer(*said()[:-1], usage(**fields), DONE)
        assert message.usage == expected

    async def test_inside_a_choice(self) -> None:
        told = {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 3}
        choice = {"index": 0, "delta": {}, "finish_reason": "stop", "usage": told}
        message = await answer(chunk(content="Hi"), event({"choices": [choice]}), DONE)
        assert message.usage == Usage(6, 2, 0, 3)

    async def test_null_until_the_end_and_told_again_and_again(self) -> None:
        def counted(n: int | None) -> bytes:
            told = None if n is None else {"prompt_tokens": 9, "completion_tokens": n}
            choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": None}
            return event({"choices": [choice], "usage": told})

        message = await answer(
            counted(None), counted(1), counted(2), chunk("stop"), event({"usage": None}), DONE
        )
        assert message.usage == Usage(9, 2)

    async def test_not_told(self) -> None:
        assert (await answer(*said())).usage is None

    async def test_reasoning_that_is_counted_apart(self) -> None:
        told = usage(
            prompt_tokens=9,
            completion_tokens=2,
            completion_tokens_details={"reasoning_tokens": 30},
        )
        pieces = (*said()[:-1], told, DONE)
        assert (await answer(*pieces, dialect=XAI, api_key="k")).usage == Usage(9, 32)
        assert (await answer(*pieces)).usage == Usage(9, 2)

    async def test_of_an_answer_that_fails_is_not_lost(self) -> None:
        told = usage(prompt_tokens=9, completion_tokens=2)
        last = await failure(chunk(content="Hel"), told, event({"error": {"message": "oh"}}))
        assert last.partial.usage == Usage(9, 2)


@pytest.mark.slow
class TestFinish:
    @pytest.mark.parametrize(
        ("word", "reason"),
        [
            ("stop", StopReason.END_TURN),
            ("eos", StopReason.END_TURN),
            ("end_turn", StopReason.END_TURN),
            ("length", StopReason.MAX_TOKENS),
            ("max_tokens", StopReason.MAX_TOKENS),
            ("model_length", StopReason.MAX_TOKENS),
            ("content_filter", StopReason.OTHER),
            ("sensitive", StopReason.OTHER),
            ("something new", StopReason.OTHER),
            ("tool_calls", StopReason.END_TURN),
        ],
    )
    async def test_with_text(self, word: str, reason: StopReason) -> None:
        message = await answer(chunk(content="Hello"), chunk(word), DONE)
        assert (message.plain_text, message.stop_reason) == ("Hello", reason)

    @pytest.mark.parametrize("word", ["stop", "tool_calls", "function_call", "tool_use"])
    async def test_with_calls(self, word: str) -> None:
        message = await answer(chunk(word, tool_calls=[piece(0, "a", "look", "{}")]), DONE)
        assert message.stop_reason is StopReason.TOOL_USE

    async def test_the_filter_let_nothing_out(self) -> None:
        last = await failure(chunk(content=""), chunk("content_filter"), DONE)
        assert last.kind is StreamErrorKind.FATAL
        assert "content filter" in last.message

    @pytest.mark.parametrize(
        ("word", "kind"),
        [
            ("error", StreamErrorKind.TRANSIENT),
            ("abort", StreamErrorKind.TRANSIENT),
            ("insufficient_system_resource", StreamErrorKind.PROVIDER_RATE_LIMITED),
        ],
    )
    async def test_that_tells_a_failure(self, word: str, kind: StreamErrorKind) -> None:
        last = await failure(chunk(content="Hel"), chunk(word), DONE)
        assert (last.kind, last.partial.plain_text) == (kind, "Hel")

    async def test_an_error_inside_a_choice(self) -> None:
        choice = {"index": 0, "delta": {}, "error": {"code": 429, "message": "slow down"}}
        last = await failure(chunk(content="Hel"), event({"choices": [choice]}))
        assert last.kind is StreamErrorKind.PROVIDER_RATE_LIMITED
        assert "slow down" in last.message

    async def test_null_to_the_end(self) -> None:
        message = await answer(chunk(content="Hello"), DONE)
        assert (message.plain_text, message.stop_reason) == ("Hello", StopReason.END_TURN)

    async def test_without_the_last_event(self) -> None:
        message = await answer(*said()[:-1])
        assert (message.plain_text, message.stop_reason) == ("Hello", StopReason.END_TURN)

    async def test_without_either(self) -> None:
        last = await failure(chunk(content="Hel"))
        assert (last.kind, last.partial.plain_text) == (StreamErrorKind.EMPTY, "Hel")

    async def test_another_choice_is_nobodys(self) -> None:
        other = {"index": 1, "delta": {"content": "Bye"}, "finish_reason": "length"}
        message = await answer(*said()[:-1], event({"choices": [other]}), DONE)
        assert (message.plain_text, message.stop_reason) == ("Hello", StopReason.END_TURN)

    async def test_events_behind_the_last_one_are_not_read(self) -> None:
        message = await answer(*said(), b"data: no JSON\n\n", chunk(content="more"))
        assert message.plain_text == "Hello"


@pytest.mark.slow
class TestBodies:
    """What is not a stream of events, or not only."""

    async def test_an_answer_that_was_not_streamed(self) -> None:
        completion = {
            "id": "1",
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello", "reasoning_content": "Hm"},
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2},
        }
        for body in (msgspec.json.encode(completion), _indented(completion)):
            message = await answer(body)
            assert message.content == (ReasoningContent("Hm"), TextContent("Hello"))
            assert message.usage == Usage(9, 2)

    async def test_an_error_with_a_good_status(self) -> None:
        error = {"error": {"message": "Rate limit exceeded", "code": 429}}
        for body in (msgspec.json.encode(error), _indented(error)):
            last = await failure(body)
            assert last.kind is StreamErrorKind.PROVIDER_RATE_LIMITED
            assert "Rate limit exceeded" in last.message

    async def test_a_page(self) -> None:
        page = b"<!DOCTYPE html>\n<html><body><h1>Welcome</h1></body></html>"
        assert (await failure(page)).kind is StreamErrorKind.EMPTY

    async def test_a_page_of_an_error(self) -> None:
        page = b"<html><head><style>a {}</style></head><body><h1>502</h1>Bad gateway</body></html>"
        async with serving([Answer(status=502, body=page)], retry=ONCE) as (_, chat):
            [last] = await ask(chat)
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.TRANSIENT
        assert last.message == "the server answered 502: 502 Bad gateway"

    async def test_an_event_that_cannot_be_read(self) -> None:
        last = await failure(chunk(content="Hel"), b"data: {oops}\n\n", *said("lo"))
        assert (last.kind, last.partial.plain_text) == (StreamErrorKind.TRANSIENT, "Hello")
        assert "{oops}" in last.message

    async def test_a_compressed_stream(self) -> None:
        body = gzip.compress(b"".join(said()))
        headers = {"content-encoding": "gzip", "content-type": "text/event-stream"}
        pieces = [body[:20], body[20:]]
        async with serving([Answer(headers=headers, body=pieces)]) as (_, chat):
            events = await ask(chat)
        assert isinstance(events[-1], Done)
        assert events[-1].message.plain_text == "Hello"

    async def test_a_compressed_stream_that_is_damaged(self) -> None:
        headers = {"content-encoding": "gzip"}
        async with serving([Answer(headers=headers, body=b"no gzip")], retry=ONCE) as (_, chat):
            [last] = await ask(chat)
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.TRANSIENT

    async def test_an_empty_answer(self) -> None:
        assert (await failure()).kind is StreamErrorKind.EMPTY

    async def test_a_status_without_a_body(self) -> None:
        async with serving([Answer(status=204, headers={"content-length": "0"})]) as (_, chat):
            [last] = await ask(chat)
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.EMPTY

    async def test_lines_that_end_as_on_other_systems(self) -> None:
        for end in (b"\r\n", b"\r"):
            pieces = [piece.replace(b"\n", end) for piece in said()]
            assert (await answer(*pieces)).plain_text == "Hello"

    async def test_an_event_over_several_lines_and_with_other_fields(self) -> None:
        pretty = _indented({"choices": [{"delta": {"content": "Hello"}, "finish_reason": "stop"}]})
        lines = b"\n".join(b"data:" + line for line in pretty.splitlines())
        body = b"\xef\xbb\xbf: hello\nevent: message\nid: 1\nretry: 5\n" + lines + b"\n\n"
        assert (await answer(body, DONE)).plain_text == "Hello"


def _indented(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


# --- properties -------------------------------------------------------------------------------

details = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("reasoning.text"), "text": st.text(max_size=12)},
        optional={"signature": st.just("c2ln"), "format": st.just("anthropic-claude-v1")},
    )
    | st.fixed_dictionaries({"type": st.just("reasoning.summary"), "summary": st.text(max_size=12)})
    | st.fixed_dictionaries({"type": st.just("reasoning.encrypted"), "data": st.just("AAAA")}),
    max_size=4,
)


@given(details, st.data())
def test_items_of_reasoning_in_any_fragments_are_the_same(
    items: list[dict[str, Any]], data: st.DataObject
) -> None:
    from clark_agent.transports.http.response import Answer as Collected

    items = [{**item, "index": number} for number, item in enumerate(items)]
    collected = Collected()
    for item in items:
        for fragments in data.draw(cuts(_fragments(item, data))):
            collected.reasoning_details(fragments)
    collected.text("Hello")
    message = collected.message()
    assert isinstance(message, AssistantMessage)
    assert list(message.reasoning_details_values) == items


def _fragments(item: dict[str, Any], data: st.DataObject) -> list[dict[str, Any]]:
    """The item as a provider may send it: the text in pieces, then the signature."""
    grows = next((name for name in ("text", "summary") if name in item), None)
    if grows is None:
        return [item]
    head = {"type": item["type"], "index": item["index"]}
    first, *rest = data.draw(cuts(item[grows]))
    fragments = [{**head, grows: first}, *[{**head, grows: part} for part in rest]]
    others = {name: value for name, value in item.items() if name not in (*head, grows)}
    place = data.draw(st.integers(0, len(fragments)))
    return [*fragments[:place], {**head, **others}, *fragments[place:]]


# --- the schema of the answer -----------------------------------------------------------------

SCORE = {"type": "integer", "maximum": 10}
OUTPUT = OutputSchema(
    "verdict",
    {"type": "object", "properties": {"score": SCORE, "note": {"type": "string"}},
     "required": ["score"]},
    "A review.",
)  # fmt: skip
OPEN = OutputSchema("finish", {"type": "object", "additionalProperties": {"type": "integer"}})


class TestOutputSchema:
    def test_is_strict_if_it_can_be(self) -> None:
        body = sent(asking(output_schema=OUTPUT), dialect=OPENAI)
        assert body["response_format"] == {
            "type": "json_schema",
            "json_schema": {
                "name": "verdict",
                "description": "A review.",
                "schema": {
                    "type": "object",
                    "properties": {
                        "score": SCORE,
                        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    },
                    "required": ["score", "note"],
                    "additionalProperties": False,
                },
                "strict": True,
            },
        }

    @pytest.mark.parametrize("schema", [OPEN.schema, {}, True, {"properties": 5}])
    def test_is_sent_as_it_is_if_it_cannot_be_strict(self, schema: Any) -> None:
        body = sent(asking(output_schema=OutputSchema("finish", schema)), dialect=COMPATIBLE)
        sent_schema = {"name": "finish", "schema": schema, "strict": False}
        assert body["response_format"] == {"type": "json_schema", "json_schema": sent_schema}

    @pytest.mark.parametrize(
        "theirs",
        [
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "own", "schema": {"type": "object"}}},
        ],
    )
    def test_the_hosts_own_format_wins_whole(self, theirs: Any) -> None:
        request = asking(output_schema=OUTPUT, provider_extras={"response_format": theirs})
        for dialect in (OPENAI, DEEPSEEK):
            body = sent(request, dialect=dialect)
            assert body["response_format"] == theirs
            assert [message["role"] for message in body["messages"]] == ["user"]

    @every_dialect
    @pytest.mark.parametrize("tools", [(), (LOOK,)], ids=["alone", "with tools"])
    def test_where_a_server_rejects_it_the_prompt_describes_it(
        self, dialect: ChatDialect, tools: tuple[ToolSchema, ...]
    ) -> None:
        request = StreamRequest(
            system_prompt="Be brief.",
            messages=(UserMessage("Hi"),),
            tools=tools,
            output_schema=OUTPUT,
        )
        body = sent(request, dialect=dialect, model="m")
        rejects = dialect in (DEEPSEEK, ZAI, GROQ) or (dialect is MISTRAL and bool(tools))
        assert ("response_format" not in body) is rejects
        prompt = f"Be brief.\n\n{OUTPUT.instructions}" if rejects else "Be brief."
        assert body["messages"][0] == {"role": "system", "content": prompt}

    def test_half_a_character_does_not_keep_it_from_being_described(self) -> None:
        schema = {"type": "object", "properties": {"a": {"description": "\ud83e"}}}
        request = asking(output_schema=OutputSchema("finish", schema))
        [system, _] = sent(request, dialect=ZAI)["messages"]
        assert "\ufffd" in system["content"]

    async def test_what_is_not_json_is_an_error_and_not_raised(self) -> None:
        request = asking(output_schema=OutputSchema("finish", {"default": object()}))
        for dialect in (OPENAI, ZAI):
            chat = OpenAIChat("m", base_url="http://127.0.0.1:9", api_key="key", dialect=dialect)
            [told] = await ask(chat, request)
            assert isinstance(told, Error)
            assert isinstance(told.cause, TransportError)

    @pytest.mark.parametrize(
        ("dialect", "model", "alone", "with_tools"),
        [
            (OPENAI, "gpt-5.1", "native", "native"),
            (OPENAI, "gpt-4o-mini", "native", "native"),
            (OPENAI, "gpt-4.1", "native", "native"),
            (OPENAI, "o3", "native", "native"),
            (OPENAI, "gpt-4", "tool", "tool"),
            (OPENAI, "gpt-4-turbo", "tool", "tool"),
            (OPENAI, "ft:gpt-3.5-turbo:me", "tool", "tool"),
            (OPENAI, "o1-mini", "tool", "tool"),
            (XAI, "grok-4-fast", "native", "native"),
            (XAI, "grok-3-mini", "native", "tool"),
            (MISTRAL, "mistral-large-latest", "native", "tool"),
            (GROQ, "openai/gpt-oss-120b", "tool", "tool"),
            (DEEPSEEK, "deepseek-chat", "tool", "tool"),
            (OPENROUTER, "openai/gpt-5", "tool", "tool"),
            (COMPATIBLE, "gpt-5.1", "tool", "tool"),
        ],
    )
    def test_the_best_mode(
        self, dialect: ChatDialect, model: str, alone: str, with_tools: str
    ) -> None:
        chat = OpenAIChat(model, base_url="http://127.0.0.1:9", api_key="key", dialect=dialect)
        assert chat.best_output_mode(has_tools=False) == alone
        assert chat.best_output_mode(has_tools=True) == with_tools
