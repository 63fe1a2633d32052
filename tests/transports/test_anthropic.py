"""Anthropic's Messages API: what is sent, what is understood, and how it fails."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    CustomMessage,
    ImageContent,
    LoopConfig,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    ReasoningEffort,
    StopReason,
    StreamRequest,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
    dump_transcript,
    load_transcript,
    run,
    tool,
)
from clark_agent.errors import ConfigError, StreamError, StreamTimeout
from clark_agent.messages.transcript import MessageLog
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    OutputSchema,
    ReasoningChunk,
    ReasoningDetailsChunk,
    Start,
    StreamErrorKind,
    StreamEvent,
    ToolSchema,
)
from clark_agent.testing import FakeClock, RecordingSink
from clark_agent.testing.misbehaviours import (
    cut_anywhere_problems,
)
from clark_agent.testing.transport_kit import check_stream_fn
from clark_agent.transports import RecordingStream, RetryPolicy, Timeouts
from clark_agent.transports.anthropic import Anthropic
from clark_agent.transports.anthropic_models import model_named
from clark_agent.transports.http.response import Answer as Heard
from clark_agent.transports.http.response import Failure
from clark_agent.types import arg_parse_error
from tests.strategies import broken_histories, cuts, transcripts, without_files
from tests.transports.servers.aimock import Aimock
from tests.transports.servers.bytes_server import Answer, ByteServer
from tests.transports.servers.llama import LlamaServer
from tests.transports.wires_anthropic import (
    END,
    PING,
    begun,
    delta,
    event,
    failed,
    finished,
    refused,
    said,
    serving,
    start,
    stop,
    stream,
    text,
    thinking,
    tool_use,
)

ONCE = RetryPolicy(attempts=1)
OLD, NEW, NEWEST = "claude-sonnet-4-5", "claude-sonnet-5", "claude-opus-5-5"
EPHEMERAL = {"type": "ephemeral"}
PNG = "data:image/png;base64,aGk="
LOOK = ToolSchema("look", "Look somewhere.", {"type": "object", "properties": {}})
SEE = ToolSchema("see", "See something.", {"type": "object", "properties": {}})


def asking(*messages: AgentMessage, **fields: Any) -> StreamRequest:
    """A request with these messages, or with a greeting."""
    given = {"system_prompt": "", "messages": messages or (UserMessage("Hi"),), **fields}
    return StreamRequest(**given)


async def ask(
    transport: Anthropic,
    request: StreamRequest | None = None,
    signal: CancellationToken | None = None,
) -> list[StreamEvent]:
    answer = transport(request or asking(), signal or CancellationToken())
    return [event async for event in answer]


def offline(model: str = OLD, **settings: Any) -> Anthropic:
    return Anthropic(model, base_url="http://127.0.0.1:9", **settings)


def sent(request: StreamRequest, model: str = OLD, **settings: Any) -> dict[str, Any]:
    return offline(model, **{"cache": False, **settings}).encode(request)


def turns(*messages: AgentMessage, model: str = OLD) -> list[Any]:
    """The messages of a request, without cache marks."""
    body: list[Any] = sent(asking(*messages), model)["messages"]
    return body


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [_block(block) for block in blocks]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [_block(block) for block in blocks]}


def _block(block: Any) -> Any:
    return {"type": "text", "text": block} if isinstance(block, str) else block


def called(call_id: str, name: str = "look", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, *content: Any, **more: Any) -> dict[str, Any]:
    blocks = [_block(block) for block in content]
    return {"type": "tool_result", "tool_use_id": call_id, "content": blocks, **more}


def returned(call_id: str, *content: Any, is_error: bool = False) -> ToolResultMessage:
    blocks = [TextContent(c) if isinstance(c, str) else c for c in content]
    return ToolResultMessage(call_id, "look", tuple(blocks), is_error)


def spoke(*blocks: Any, reason: StopReason = StopReason.TOOL_USE) -> AssistantMessage:
    content = [TextContent(b) if isinstance(b, str) else b for b in blocks]
    return AssistantMessage(tuple(content), reason)


def signed(thought: str, signature: str, index: int = 0, **more: Any) -> dict[str, Any]:
    """A piece of reasoning as it stands in a transcript."""
    origin = {"format": "anthropic-claude-v1", "index": index, **more}
    return {"type": "reasoning.text", "text": thought, "signature": signature, **origin}


def sealed(data: str, index: int = 0, **more: Any) -> dict[str, Any]:
    origin = {"format": "anthropic-claude-v1", "index": index, **more}
    return {"type": "reasoning.encrypted", "data": data, **origin}


def details(*items: Any) -> ReasoningDetailsContent:
    return ReasoningDetailsContent(items)


def thought(words: str, signature: str) -> dict[str, Any]:
    """A block of thinking on the wire."""
    return {"type": "thinking", "thinking": words, "signature": signature}


HI = UserMessage("Hi")
CALL = ToolCall("a", "look", {})


# --- the request: the whole of it -------------------------------------------------------------


class TestBody:
    def test_everything_at_once(self) -> None:
        request = asking(
            HI,
            system_prompt="Be brief.",
            tools=[LOOK, SEE],
            max_output_tokens=5000,
            temperature=0.5,
            reasoning=ReasoningEffort.HIGH,
            provider_extras={"metadata": {"user_id": "u"}},
        )
        assert sent(request, "claude-opus-4-8", cache=True) == {
            "model": "claude-opus-4-8",
            "max_tokens": 5000,
            "stream": True,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": EPHEMERAL}],
            "messages": [user({"type": "text", "text": "Hi", "cache_control": EPHEMERAL})],
            "tools": [
                {"name": "look", "description": LOOK.description, "input_schema": LOOK.parameters},
                {
                    "name": "see",
                    "description": SEE.description,
                    "input_schema": SEE.parameters,
                    "cache_control": EPHEMERAL,
                },
            ],
            "thinking": {"type": "adaptive", "display": "summarized"},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": "u"},
        }

    def test_next_to_nothing(self) -> None:
        assert sent(asking()) == {
            "model": OLD,
            "max_tokens": 32000,
            "stream": True,
            "messages": [user("Hi")],
        }

    def test_extras_win(self) -> None:
        extras = {"temperature": 1, "max_tokens": 7, "thinking": {"type": "disabled"}}
        body = sent(asking(provider_extras=extras, temperature=0.2), NEW)
        assert {name: body[name] for name in extras} == extras

    def test_extras_take_nothing_away(self) -> None:
        extras = {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
        body = sent(asking(provider_extras=extras, tools=(LOOK,)), NEW)
        assert [tool["name"] for tool in body["tools"]] == ["look", "web_search"]

    def test_it_is_the_same_each_time(self) -> None:
        messages = (HI, spoke(CALL), returned("a", "1"))
        request = asking(*messages, tools=[LOOK], system_prompt="s")
        transport = offline()
        assert transport.encode(request) == transport.encode(request)


class TestOutputSchema:
    OUTPUT = OutputSchema(
        "verdict",
        {
            "type": "object",
            "properties": {
                "score": {"type": "integer", "minimum": 1, "maximum": 10, "description": "Stars"},
                "tags": {
                    "type": "array",
                    "items": {"type": "string", "pattern": "^a"},
                    "minItems": 1,
                    "maxItems": 3,
                },
                "by": {"anyOf": [{"type": "object", "properties": {}}, {"type": "null"}]},
            },
            "required": ["score"],
        },
    )
    CLOSED: ClassVar[Any] = {
        "type": "object",
        "properties": {
            "score": {"type": "integer", "description": "Stars (at least 1, at most 10)"},
            "tags": {
                "type": "array",
                "items": {"type": "string", "description": "matches the regular expression ^a"},
                "minItems": 1,
                "description": "at most 3 items",
            },
            "by": {
                "anyOf": [
                    {"type": "object", "properties": {}, "additionalProperties": False},
                    {"type": "null"},
                ]
            },
        },
        "required": ["score"],
        "additionalProperties": False,
    }
    OPEN = OutputSchema("finish", {"type": "object", "additionalProperties": {"type": "integer"}})

    def test_is_the_format_of_the_output(self) -> None:
        format_ = {"type": "json_schema", "schema": self.CLOSED}
        request = asking(output_schema=self.OUTPUT, tools=(LOOK,), reasoning=ReasoningEffort.HIGH)
        body = sent(request, "claude-opus-4-8")
        assert body["output_config"] == {"effort": "high", "format": format_}
        assert "system" not in body

    @pytest.mark.parametrize("name", ["claude-opus-4-1", "claude-3-7-sonnet-latest", "glm-5"])
    def test_a_model_without_formats_reads_it_in_the_prompt(self, name: str) -> None:
        body = sent(asking(output_schema=self.OUTPUT, system_prompt="Be brief."), name)
        prompt = f"Be brief.\n\n{self.OUTPUT.instructions}"
        assert body == sent(asking(system_prompt=prompt), name)

    def test_so_does_any_model_one_that_the_api_cannot_ensure(self) -> None:
        body = sent(asking(output_schema=self.OPEN), NEW)
        assert body == sent(asking(system_prompt=self.OPEN.instructions), NEW)

    def test_the_hosts_own_format_wins_whole(self) -> None:
        theirs = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        request = asking(output_schema=self.OUTPUT, provider_extras={"output_config": theirs})
        assert sent(request, "claude-sonnet-4-5")["output_config"] == theirs

    def test_an_answer_is_not_prefilled(self) -> None:
        begun_by_us = spoke("It", reason=StopReason.END_TURN)
        request = asking(HI, begun_by_us, output_schema=self.OUTPUT)
        assert sent(request, "claude-sonnet-4-5")["messages"][-1]["role"] == "user"

    @pytest.mark.slow
    async def test_one_that_the_server_rejects_is_described(self) -> None:
        script = [
            refused(400, "output_config.format.schema: Schema is too complex"),
            *[stream(*said("{}"))] * 2,
        ]
        request = asking(output_schema=self.OUTPUT)
        async with serving(script) as (server, transport):
            for _ in range(2):
                assert isinstance((await ask(transport, request))[-1], Done)
            first, *others = [msgspec.json.decode(request.body) for request in server.requests]
        assert "format" in first["output_config"]
        for body in others:
            assert "output_config" not in body
            assert body["system"][0]["text"] == self.OUTPUT.instructions

    @pytest.mark.slow
    async def test_one_that_was_described_already_is_not_sent_again(self) -> None:
        script = [refused(400, "a tool has no schema")] * 3
        async with serving(script, retry=ONCE) as (server, transport):
            for count in (2, 3):
                [error] = await ask(transport, asking(output_schema=self.OUTPUT))
                assert isinstance(error, Error)
                assert len(server.requests) == count

    @pytest.mark.parametrize(
        ("name", "url", "mode"),
        [
            ("claude-sonnet-4-5", None, "native"),
            ("claude-sonnet-5", None, "native"),
            ("claude-opus-4-1-20250805", None, "tool"),
            ("claude-sonnet-4-20250514", None, "tool"),
            ("claude-sonnet-4-5", "http://127.0.0.1:9", "tool"),
        ],
    )
    def test_the_best_mode(self, name: str, url: str | None, mode: str) -> None:
        transport = Anthropic(name, api_key="key", base_url=url)
        assert [transport.best_output_mode(has_tools=has) for has in (True, False)] == [mode] * 2


class TestTurns:
    def test_consecutive_turns_are_one(self) -> None:
        assert turns(
            HI, UserMessage("there"), spoke("a"), spoke("b"), UserMessage((TextContent("c"),))
        ) == [user("Hi", "there"), assistant("a", "b"), user("c")]

    def test_leading_system_messages_join_the_prompt(self) -> None:
        history = (SystemMessage("Two."), SystemMessage("Three."), HI)
        body = sent(asking(*history, system_prompt="One."))
        assert body["system"] == [{"type": "text", "text": "One.\n\nTwo.\n\nThree."}]
        assert body["messages"] == [user("Hi")]

    def test_later_ones_speak_in_a_turn_of_the_user(self) -> None:
        note = "<system>\nHurry.\n</system>"
        history = (HI, spoke(CALL), returned("a", "1"), SystemMessage("Hurry."), UserMessage("x"))
        assert turns(*history)[2] == user(result("a", "1"), note, "x")
        assert turns(HI, SystemMessage("Hurry.")) == [user("Hi", note)]

    def test_the_user_speaks_first(self) -> None:
        opening = "(The conversation starts here.)"
        assert turns(spoke("Hello"), HI) == [user(opening), assistant("Hello"), user("Hi")]
        assert turns(CustomMessage("mark")) == [user(opening)]

    def test_blank_text_is_left_out(self) -> None:
        blank = UserMessage((TextContent(""), TextContent(" \n"), TextContent("x")))
        history = (HI, spoke("\n\n", CALL), returned("a", "", " "), spoke(" "), blank)
        assert turns(*history) == [
            user("Hi"),
            assistant(called("a")),
            user(result("a", "(no output)"), "x"),
        ]

    def test_a_last_word_of_the_assistant(self) -> None:
        """Old models go on with it, if it does not end in white space; new ones refuse it."""
        assert turns(HI, spoke("I say \n"))[1:] == [assistant("I say")]
        assert turns(HI, spoke("I say \n"), model=NEW)[1:] == [
            assistant("I say \n"),
            user("Go on."),
        ]
        begun_for_it = asking(HI, spoke("I"), reasoning=ReasoningEffort.HIGH)
        assert "thinking" not in sent(begun_for_it)

    def test_other_assistant_text_stays_as_it_was(self) -> None:
        assert turns(HI, spoke("I say \n"), HI)[1] == assistant("I say \n")

    def test_thoughts_in_tags_go_back_into_the_text(self) -> None:
        message = spoke("a ", ThinkingContent("hm"), "b")
        assert turns(HI, message, HI)[1] == assistant("a <thought>hm</thought>b")

    def test_a_broken_off_answer_stays_at_home(self) -> None:
        assert turns(HI, spoke("par", reason=StopReason.ERROR), HI) == [user("Hi", "Hi")]


class TestCalls:
    def test_results_come_first_in_the_order_of_the_calls(self) -> None:
        history = (
            HI,
            spoke("So.", CALL, ToolCall("b", "see", {"x": [1]})),
            returned("b", "2", is_error=True),
            returned("a", "1"),
            UserMessage("and?"),
        )
        assert turns(*history)[1:] == [
            assistant("So.", called("a"), called("b", "see", x=[1])),
            user(result("a", "1"), result("b", "2", is_error=True), "and?"),
        ]

    def test_a_result_that_is_missing_is_made_up(self) -> None:
        [_, _, answer] = turns(HI, spoke(CALL), UserMessage("well?"))
        assert answer["content"][0]["tool_use_id"] == "a"
        assert answer["content"][0]["is_error"] is True
        assert answer["content"][1] == _block("well?")

    def test_ids_in_letters_that_the_server_takes(self) -> None:
        odd = spoke(ToolCall("call|1.x", "look", {}), ToolCall("y" * 65, "look", {}))
        [_, calls, results] = turns(HI, odd, returned("call|1.x", "1"), returned("y" * 65, "2"))
        ids = [block["id"] for block in calls["content"]]
        assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call_id) for call_id in ids)
        assert [block["tool_use_id"] for block in results["content"]] == ids
        assert len(set(ids)) == 2

    def test_arguments_are_an_object_always(self) -> None:
        unreadable = ToolCall("a", "look", arg_parse_error("bad", '{"x": '))
        [_, calls, _] = turns(HI, spoke(unreadable, ToolCall("b", "look", [1])))
        assert [c["input"] for c in calls["content"]] == [
            {"invalid_json": '{"x": '},
            {"value": [1]},
        ]

    @pytest.mark.parametrize(
        ("image", "block"),
        [
            (
                ImageContent(PNG),
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
                },
            ),
            (
                ImageContent("data:image/jpg;base64,aGk="),
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/jpeg", "data": "aGk="},
                },
            ),
            (
                ImageContent("data:,h%69", "image/webp"),
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/webp", "data": "aGk="},
                },
            ),
            (
                ImageContent("https://x.test/a.png"),
                {"type": "image", "source": {"type": "url", "url": "https://x.test/a.png"}},
            ),
            (ImageContent("data:image/svg+xml;base64,aGk=", alt="A cat"), _block("[image: A cat]")),
            (ImageContent("/tmp/a.png"), _block("[image]")),
        ],
    )
    def test_images(self, image: ImageContent, block: Any) -> None:
        assert turns(UserMessage((image, TextContent("?")))) == [user(block, "?")]
        [_, _, answer] = turns(HI, spoke(CALL), returned("a", "see", image))
        assert answer == user(result("a", "see", block))


class TestForcedCalls:
    @pytest.mark.parametrize("model", [OLD, "claude-opus-4-8", NEW, "claude-fable-5", "glm-5"])
    def test_are_demanded(self, model: str) -> None:
        body = sent(asking(tools=[LOOK], force_tool_call=True), model)
        assert body["tool_choice"] == {"type": "any"}

    @pytest.mark.parametrize(
        "model",
        [NEWEST, "claude-sonnet-5-5", "claude-fable-5-1", "claude-mythos-5-2", "claude-next-9"],
    )
    def test_are_left_to_models_that_cannot_be_forced(self, model: str) -> None:
        assert "tool_choice" not in sent(asking(tools=[LOOK], force_tool_call=True), model)

    def test_without_tools_there_is_nothing_to_force(self) -> None:
        assert "tool_choice" not in sent(asking(force_tool_call=True))

    def test_thinking_makes_room_where_it_must(self) -> None:
        request = asking(tools=[LOOK], force_tool_call=True, reasoning=ReasoningEffort.HIGH)
        for model in (OLD, "claude-opus-4-6"):
            assert not {"thinking", "output_config"} & sent(request, model).keys()
        assert sent(request, NEW)["thinking"]["type"] == "adaptive"


# --- the request: thinking by model -----------------------------------------------------------


def adaptive(effort: str, display: str | None = "summarized") -> dict[str, Any]:
    shown = {} if display is None else {"display": display}
    return {"thinking": {"type": "adaptive", **shown}, "output_config": {"effort": effort}}


def budget(tokens: int) -> dict[str, Any]:
    return {"thinking": {"type": "enabled", "budget_tokens": tokens}}


OFF = {"thinking": {"type": "disabled"}}
LEAST = {"output_config": {"effort": "low"}}
BUDGETS = [budget(2048), budget(8192), budget(16384)]
LEVELS = [adaptive("low"), adaptive("medium"), adaptive("high")]
PLAIN_LEVELS = [adaptive(word, None) for word in ("low", "medium", "high")]

# What is said about thinking for none, minimal, low, medium, high and xhigh.
THINKING: dict[str, list[dict[str, Any]]] = {
    "claude-3-5-haiku-20241022": [{}] * 6,
    "claude-3-7-sonnet-20250219": [{}, {}, *BUDGETS, budget(32768)],
    "claude-opus-4-1-20250805": [{}, {}, *BUDGETS, budget(30976)],
    "claude-haiku-4-5": [{}, {}, *BUDGETS, budget(32768)],
    "claude-opus-4-6": [{}, {}, *PLAIN_LEVELS, adaptive("max", None)],
    "claude-sonnet-4-6": [{}, {}, *PLAIN_LEVELS, adaptive("high", None)],
    "claude-opus-4-7": [{}, {}, *LEVELS, adaptive("xhigh")],
    "claude-opus-4-8": [{}, {}, *LEVELS, adaptive("xhigh")],
    "claude-sonnet-5": [OFF, adaptive("low"), *LEVELS, adaptive("xhigh")],
    "claude-opus-5": [OFF, adaptive("low"), *LEVELS, adaptive("xhigh")],
    "claude-haiku-5-5": [OFF, adaptive("low"), *LEVELS, adaptive("xhigh")],
    "claude-sonnet-5-5": [
        {"thinking": {"type": "between_tools"}},
        adaptive("low"),
        *LEVELS,
        adaptive("xhigh"),
    ],
    "claude-mythos-preview": [LEAST, adaptive("low"), *LEVELS, adaptive("max")],
    "claude-fable-5": [LEAST, adaptive("low"), *LEVELS, adaptive("xhigh")],
    "claude-mythos-5-1": [LEAST, adaptive("low"), *LEVELS, adaptive("xhigh")],
    "claude-opus-5-5": [LEAST, adaptive("low"), *LEVELS, adaptive("xhigh")],
    "claude-novel-7": [LEAST, adaptive("low"), *LEVELS, adaptive("xhigh")],
    "kimi-k3": [OFF, {}, *BUDGETS, budget(32768)],
}


class TestThinking:
    @pytest.mark.parametrize("model", THINKING)
    def test_by_model_and_level(self, model: str) -> None:
        asked = [sent(asking(reasoning=effort), model) for effort in ReasoningEffort]
        usual = {"model", "max_tokens", "stream", "messages"}
        said = [{name: body[name] for name in body if name not in usual} for body in asked]
        assert said == THINKING[model]

    @pytest.mark.parametrize("cap", [1, 1024, 2047, 2048, 4096, 20000])
    def test_a_budget_leaves_room_to_answer(self, cap: int) -> None:
        body = sent(asking(reasoning=ReasoningEffort.HIGH, max_output_tokens=cap))
        assert body["max_tokens"] == cap
        tokens = body.get("thinking", {}).get("budget_tokens")
        assert tokens == ({4096: 3072, 20000: 16384, 2048: 1024}.get(cap))

    @pytest.mark.parametrize(
        ("model", "usual", "long"),
        [
            ("claude-3-haiku-20240307", 4096, 4096),
            ("claude-3-5-sonnet-latest", 8192, 8192),
            ("claude-opus-4-1", 32000, 32000),
            (OLD, 32000, 64000),
            (NEWEST, 32000, 64000),
        ],
    )
    def test_the_limit_of_tokens(self, model: str, usual: int, long: int) -> None:
        assert sent(asking(), model)["max_tokens"] == usual
        assert sent(asking(reasoning=ReasoningEffort.XHIGH), model)["max_tokens"] == long
        most = sent(asking(max_output_tokens=10**6), model)["max_tokens"]
        assert most == model_named(model).most_output

    @pytest.mark.parametrize(
        ("gateway_name", "name"),
        [
            ("anthropic/claude-opus-4.1", "claude-opus-4-1"),
            ("claude-opus-4-1@20250805", "claude-opus-4-1"),
            ("us.anthropic.claude-opus-4-1-20250805-v1:0", "claude-opus-4-1"),
            ("claude-4-opus-20250514", "claude-opus-4-0"),
            ("claude-opus-4-20250514", "claude-opus-4-1"),
            ("claude-sonnet-4-20250514", "claude-sonnet-4-0"),
            ("anthropic/claude-sonnet-5.5", "claude-sonnet-5-5"),
            ("claude-2.1", "claude-3-opus-20240229"),
        ],
    )
    def test_names_that_gateways_give(self, gateway_name: str, name: str) -> None:
        assert model_named(gateway_name) == model_named(name)

    @pytest.mark.slow
    async def test_thinking_between_calls_is_a_beta_of_old_models(self) -> None:
        betas = []
        for model, tools in ((OLD, [LOOK]), (OLD, []), (NEW, [LOOK])):
            request = asking(tools=tools, reasoning=ReasoningEffort.LOW)
            given = {"anthropic-beta": "mine"}
            async with serving([stream(*said())], model=model, headers=given) as (
                server,
                transport,
            ):
                await ask(transport, request)
            betas.append(server.requests[0].headers["anthropic-beta"])
        assert betas == ["mine,interleaved-thinking-2025-05-14", "mine", "mine"]


# --- the request: thinking that goes back -----------------------------------------------------


class TestReplay:
    def test_signed_thinking_goes_back_as_it_came_and_where_it_stood(self) -> None:
        message = spoke(
            ReasoningContent("One. Two."),
            details(signed("One.", "s1"), sealed("blob", 1)),
            "So:",
            details(signed("", "s2", 2, model="claude-opus-5")),
            CALL,
        )
        [_, answer, _] = turns(HI, message, returned("a", "1"), model=NEW)
        assert answer == assistant(
            thought("One.", "s1"),
            {"type": "redacted_thinking", "data": "blob"},
            "So:",
            thought("", "s2"),
            called("a"),
        )

    def test_unsigned_thinking_stays_at_home(self) -> None:
        unsigned = {"type": "reasoning.text", "text": "?", "format": "anthropic-claude-v1"}
        message = spoke(details(unsigned, signed("?", "")), "So.")
        assert turns(HI, message, HI) == [user("Hi"), assistant("So."), user("Hi")]

    def test_thinking_of_others_stays_at_home(self) -> None:
        foreign = {"type": "reasoning.encrypted", "data": "x", "format": "openai-responses-v1"}
        message = spoke(ReasoningContent("Hm"), details(foreign), "So.")
        assert turns(HI, message, HI)[1] == assistant("So.")

    def test_thinking_does_not_come_last(self) -> None:
        cut_off = spoke(details(signed("Hm", "s")), reason=StopReason.MAX_TOKENS)
        assert turns(HI, cut_off, HI) == [user("Hi", "Hi")]
        trailing = spoke("So.", details(signed("Hm", "s")))
        assert turns(HI, trailing, HI)[1] == assistant("So.")

    def test_old_models_do_not_think_in_a_round_that_began_without(self) -> None:
        for first, expected in (((), False), ((details(signed("Hm", "s")),), True)):
            history = (HI, spoke(*first, CALL), returned("a", "1"))
            body = sent(asking(*history, tools=[LOOK], reasoning=ReasoningEffort.LOW))
            assert ("thinking" in body) is expected
        over = (HI, spoke(CALL), returned("a", "1"), spoke("So."), HI)
        assert "thinking" in sent(asking(*over, tools=[LOOK], reasoning=ReasoningEffort.LOW))

    def test_new_models_may(self) -> None:
        history = (HI, spoke(CALL), returned("a", "1"))
        assert "thinking" in sent(asking(*history, tools=[LOOK]), NEW)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "message",
        [
            "messages.1.content.0: Invalid `signature` in `thinking` block. The block is bound to "
            "a different conversation. The `system` prompt differs.",
            "messages.1.content.0: Invalid `data` in `redacted_thinking` block",
            "messages.1.content.0: `thinking` or `redacted_thinking` blocks in the latest "
            "assistant message cannot be modified.",
            "messages.1.content.0.thinking.signature: Field required",
            "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
            "`tool_use`.",
        ],
    )
    @pytest.mark.parametrize("model", [OLD, NEWEST])
    async def test_refused_thinking_is_left_out_at_once(self, message: str, model: str) -> None:
        history = (HI, spoke(details(signed("Hm", "s")), CALL), returned("a", "1"))
        request = asking(*history, tools=[LOOK], reasoning=ReasoningEffort.LOW)
        script = [refused(400, message), stream(*said())]
        async with serving(script, model=model, retry=ONCE) as (server, transport):
            events = await ask(transport, request)
        assert isinstance(events[-1], Done)
        first, second = [msgspec.json.decode(r.body) for r in server.requests]
        assert first["messages"][1]["content"][0] == thought("Hm", "s")
        [answer] = [m["content"] for m in second["messages"] if m["role"] == "assistant"]
        assert [block["type"] for block in answer] == ["tool_use"]
        assert ("thinking" in second) is (model == NEWEST)  # old ones want it signed or not at all

    @pytest.mark.slow
    async def test_what_was_refused_stays_out(self) -> None:
        """What the model thinks after that is bound to a history without it."""
        first = spoke(details(signed("Hm", "s"), sealed("x", 1)), CALL)
        history: list[AgentMessage] = [HI, first, returned("a", "1")]
        refusal = refused(400, "messages.1.content.0: Invalid `signature` in `thinking` block")
        script = [refusal, stream(*said()), stream(*said()), refusal, stream(*said())]
        async with serving(script, model=NEWEST) as (server, transport):
            await ask(transport, asking(*history))
            history += [spoke(details(signed("So", "s2")), "So."), HI]
            await ask(transport, asking(*history))
            await ask(transport, asking(*history))
        kinds = [re.findall(rb'"(s|x|s2)"', request.body) for request in server.requests]
        assert kinds == [[b"s", b"x"], [], [b"s2"], [b"s2"], []]

    @pytest.mark.slow
    async def test_but_only_once(self) -> None:
        history = (HI, spoke(details(signed("Hm", "s")), CALL), returned("a", "1"))
        refusal = refused(400, "Invalid `signature` in `thinking` block")
        async with serving([refusal, refusal]) as (_, transport):
            events = await ask(transport, asking(*history))
        [error] = events
        assert isinstance(error, Error)
        assert error.kind is StreamErrorKind.FATAL

    @pytest.mark.slow
    async def test_whoever_rewrites_is_asked_once(self) -> None:
        class Stubborn(Anthropic):
            def _rewritten(self, request: StreamRequest, failure: Failure) -> Any:
                return self.encode(request)

        async with ByteServer([refused(400, "no"), refused(400, "no")]) as server:
            transport = Stubborn(OLD, base_url=server.url, retry=ONCE)
            assert isinstance((await ask(transport))[-1], Error)
            await transport.aclose()

    @pytest.mark.slow
    async def test_and_only_if_there_was_any(self) -> None:
        refusal = refused(400, "Invalid `signature` in `thinking` block")
        async with serving([refusal]) as (server, transport):
            assert isinstance((await ask(transport))[-1], Error)
        assert len(server.requests) == 1


# --- the request: the cache -------------------------------------------------------------------


def marks(body: dict[str, Any]) -> list[Any]:
    """What has a mark, as a path."""
    found: list[Any] = []

    def look(value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, dict):
            if "cache_control" in value:
                assert value["cache_control"] == EPHEMERAL
                found.append(path)
            for name, part in value.items():
                look(part, (*path, name))
        elif isinstance(value, list):
            for index, part in enumerate(value):
                look(part, (*path, index))

    look(body, ())
    return found


class TestCache:
    HISTORY = (HI, spoke("So.", CALL), returned("a", "1"))

    def body(self, messages: Any, *, cache: bool = True) -> dict[str, Any]:
        request = asking(messages=messages, system_prompt="s", tools=[LOOK, SEE])
        return sent(request, cache=cache)

    def test_four_places(self) -> None:
        assert marks(self.body(self.HISTORY)) == [
            ("system", 0),
            ("messages", 0, "content", 0),
            ("messages", 2, "content", 0),
            ("tools", 1),
        ]

    def test_none_if_the_host_wants_none(self) -> None:
        assert marks(self.body(self.HISTORY, cache=False)) == []

    def test_what_is_there_for_one_request_is_behind_the_mark(self) -> None:
        log = MessageLog(self.HISTORY)
        note = SystemMessage("Two turns are left.")
        body = self.body(log.view((note, CustomMessage("mark"))))
        assert len(body["messages"][2]["content"]) == 2
        assert ("messages", 2, "content", 0) in marks(body)
        assert ("messages", 2, "content", 1) not in marks(body)

    def test_results_that_may_still_be_shortened_are_behind_it_too(self) -> None:
        body = self.body(MessageLog(self.HISTORY[:2]).view(self.HISTORY[2:]))
        assert [path[1:] for path in marks(body) if path[0] == "messages"] == [
            (0, "content", 0),
            (1, "content", 1),
        ]

    def test_the_marks_of_two_requests_meet(self) -> None:
        """The newest mark of a request is one of the next, with the same before it."""
        log = MessageLog(self.HISTORY)
        first = self.body(log.view((SystemMessage("note"),)))
        log.extend([spoke(*[ToolCall(f"b{n}", "look", {}) for n in range(30)])])
        log.extend([returned(f"b{n}", "1") for n in range(30)])
        second = self.body(log.view())
        newest = max(path for path in marks(first) if path[0] == "messages")
        assert newest in marks(second)

    def test_nothing_stays(self) -> None:
        assert marks(self.body(MessageLog().view((HI,)))) == [("system", 0), ("tools", 1)]


@given(transcripts() | broken_histories(), st.integers(0, 3), st.sampled_from([OLD, NEW, NEWEST]))
def test_whatever_was_said_the_server_takes_it(
    messages: list[AgentMessage], passing: int, model: str
) -> None:
    tail = tuple(SystemMessage("note") for _ in range(passing))
    messages = [without_files(message) for message in messages]
    request = asking(messages=MessageLog(messages).view(tail), tools=[LOOK], system_prompt="s")
    body = offline(model).encode(request)
    roles = [message["role"] for message in body["messages"]]
    assert roles == [("user", "assistant")[n % 2] for n in range(len(roles))]
    assert roles[-1] == "user" or model == OLD
    assert len(marks(body)) <= 4
    open_calls: list[str] = []
    for message in body["messages"]:
        blocks = message["content"]
        assert blocks
        assert all(block["text"].strip() for block in blocks if block["type"] == "text")
        answered = [b["tool_use_id"] for b in blocks if b["type"] == "tool_result"]
        assert answered == open_calls
        assert [b["type"] for b in blocks[: len(answered)]] == ["tool_result"] * len(answered)
        open_calls = [b["id"] for b in blocks if b["type"] == "tool_use"]
    assert open_calls == []


# --- the answer -------------------------------------------------------------------------------

WHOLE = b"".join(
    [
        begun(input_tokens=9, cache_creation_input_tokens=3, cache_read_input_tokens=4),
        PING,
        thinking(0, "Let me look. é🦀", "sig/+=="),
        start(1, "redacted_thinking", data="b64=="),
        stop(1),
        thinking(2, "", "sig2"),
        text(3, "I will. é🦀"),
        start(4, "tool_use", id="toolu_1", name="look", input={}),
        delta(4, "input_json_delta", partial_json=""),
        delta(4, "input_json_delta", partial_json='{"at": "\\u00e9'),
        delta(4, "input_json_delta", partial_json='", "n": 1.5}'),
        stop(4),
        tool_use(5, "toolu_2", "see", ""),
        finished("tool_use", input_tokens=None, output_tokens=42),
        END,
    ]
)
MESSAGE = AssistantMessage(
    (
        ReasoningContent("Let me look. é🦀"),
        details(
            signed("Let me look. é🦀", "sig/+==", 0, model=OLD),
            sealed("b64==", 1, model=OLD),
            signed("", "sig2", 2, model=OLD),
        ),
        TextContent("I will. é🦀"),
        ToolCall("toolu_1", "look", {"at": "é", "n": 1.5}),
        ToolCall("toolu_2", "see", {}),
    ),
    StopReason.TOOL_USE,
    usage=Usage(9, 42, 3, 4),
)


async def answer_to(*pieces: bytes, **settings: Any) -> StreamEvent:
    """The last event of an answer of these bytes."""
    async with serving([stream(*pieces)], **{"retry": ONCE, **settings}) as (_, transport):
        return (await ask(transport))[-1]


def heard(transport: Anthropic, *pieces: bytes) -> AssistantMessage:
    """The message that a whole response in these reads comes to."""
    answer = Heard()
    decoder = transport._decoder(answer)
    for piece in pieces:
        decoder.feed(piece)
    answer.close()
    message = answer.message()
    assert decoder.is_complete
    assert isinstance(message, AssistantMessage)
    return message


async def message_of(*pieces: bytes, **settings: Any) -> AssistantMessage:
    last = await answer_to(*pieces, **settings)
    assert isinstance(last, Done), last
    return last.message


@pytest.mark.slow
class TestAnswer:
    async def test_whole(self) -> None:
        async with serving([stream(WHOLE)]) as (_, transport):
            events = await ask(transport)
        assert events[-1] == Done(MESSAGE)
        assert isinstance(events[0], Start)
        chunks = [event.chunk for event in events if isinstance(event, Chunk)]
        assert [type(chunk) for chunk in chunks[:2]] == [ReasoningChunk, ReasoningDetailsChunk]

    async def test_what_it_becomes_when_it_goes_back(self) -> None:
        history = (HI, MESSAGE, returned("toolu_1", "1"), returned("toolu_2", "2"))
        assert turns(*history, model=NEW)[1] == assistant(
            thought("Let me look. é🦀", "sig/+=="),
            {"type": "redacted_thinking", "data": "b64=="},
            thought("", "sig2"),
            "I will. é🦀",
            called("toolu_1", at="é", n=1.5),
            called("toolu_2", "see"),
        )

    def test_cut_at_every_boundary_it_is_the_same(self) -> None:
        transport = offline()
        for place in range(len(WHOLE)):
            assert heard(transport, WHOLE[:place], WHOLE[place:]) == MESSAGE
        assert heard(transport, *[WHOLE[n : n + 1] for n in range(len(WHOLE))]) == MESSAGE

    @given(st.data())
    def test_cut_anywhere_it_is_the_same(self, data: st.DataObject) -> None:
        assert heard(offline(), *data.draw(cuts(WHOLE))) == MESSAGE

    async def test_a_disconnect_at_every_byte(self) -> None:
        place, pieces = 0, [thinking(0, "é", "s"), tool_use(1, "a", "look", "{}")]
        whole = b"".join([begun(), *pieces, finished("tool_use"), END])
        expected = heard(offline(), whole)

        def cut(_: object) -> Answer:
            return stream(whole, cut_after=place)

        ends = []
        async with serving(cut, retry=ONCE) as (_, transport):
            for place in range(1, len(whole)):
                events = await ask(transport)
                assert not cut_anywhere_problems(events, expected), whole[:place]
                ends.append(isinstance(events[-1], Done))
        assert ends == sorted(ends), "once it is whole it stays so"
        assert not ends[0]

    async def test_the_conformance_kit(self) -> None:
        async with serving(lambda _: stream(*said("Hello you"))) as (_, transport):
            report = await check_stream_fn(transport)
        assert report.message.plain_text == "Hello you"
        assert report.message.usage == Usage(3, 2)

    @pytest.mark.parametrize(
        ("word", "reason"),
        [
            ("end_turn", StopReason.END_TURN),
            ("stop_sequence", StopReason.END_TURN),
            ("max_tokens", StopReason.MAX_TOKENS),
            ("model_context_window_exceeded", StopReason.MAX_TOKENS),
            ("compaction", StopReason.OTHER),
            ("refusal", StopReason.OTHER),
            ("invented", StopReason.OTHER),
        ],
    )
    async def test_stop_reasons(self, word: str, reason: StopReason) -> None:
        message = await message_of(begun(), text(0, "Hm"), finished(word), END)
        assert (message.plain_text, message.stop_reason) == ("Hm", reason)

    @pytest.mark.parametrize(
        ("told", "text"),
        [
            ({"type": "refusal", "explanation": "Not this."}, "declined to answer: Not this."),
            ({"type": "refusal", "category": "bio"}, "declined to answer: bio"),
            (None, "declined to answer"),
        ],
    )
    async def test_a_refusal_without_an_answer(self, told: Any, text: str) -> None:
        last = await answer_to(begun(), finished("refusal", told), END)
        assert isinstance(last, Error)
        assert (last.kind, last.message) == (StreamErrorKind.FATAL, f"the model {text}")

    async def test_counts_are_totals_and_those_left_out_stay(self) -> None:
        message = await message_of(
            begun(input_tokens=9, output_tokens=1, cache_read_input_tokens=7),
            text(0, "Hi"),
            finished(None, output_tokens=5),
            finished("end_turn", input_tokens=8, output_tokens=6, cache_read_input_tokens=None),
            END,
        )
        assert message.usage == Usage(8, 6, 0, 7)

    async def test_kinds_that_are_not_known(self) -> None:
        message = await message_of(
            event("hello", index=1),
            begun(),
            start(0, "invented", value=1),
            stop(0),
            start(1, "redacted_thinking"),
            stop(1),
            start(2, "text", text=""),
            delta(2, "invented_delta", text="no"),
            delta(2, "text_delta", text="Hi"),
            stop(2),
            finished("end_turn"),
            END,
        )
        kept = ProviderContent("anthropic", {"type": "invented", "value": 1})
        assert message.content == (kept, TextContent("Hi"))

    async def test_a_start_that_brings_all(self) -> None:
        message = await message_of(
            begun(),
            start(0, "thinking", thinking="Hm", signature="s"),
            stop(0),
            start(1, "text", text="So."),
            stop(1),
            start(2, "tool_use", id="a", name="look", input={"at": 1}),
            stop(2),
            start(3, "tool_use", id="b", name="look", input={"at": 2}),
            delta(3, "input_json_delta", partial_json='{"at": 3}'),
            stop(3),
            finished("tool_use"),
            END,
        )
        assert message.content == (
            ReasoningContent("Hm"),
            details(signed("Hm", "s", model=OLD)),
            TextContent("So."),
            ToolCall("a", "look", {"at": 1}),
            ToolCall("b", "look", {"at": 3}),
        )

    async def test_blocks_that_nobody_closes(self) -> None:
        message = await message_of(
            begun(),
            start(0, "thinking", thinking="", signature=""),
            delta(0, "thinking_delta", thinking="Hm"),
            delta(0, "signature_delta", signature="s"),
            start(1, "tool_use", id="a", name="look", input={"at": 1}),
            finished("tool_use"),
            END,
        )
        assert message.content == (
            ReasoningContent("Hm"),
            details(signed("Hm", "s", model=OLD)),
            ToolCall("a", "look", {"at": 1}),
        )

    async def test_all_blocks_have_the_same_number(self) -> None:
        message = await message_of(
            begun(),
            thinking(0, "One.", "s1"),
            thinking(0, "Two.", "s2"),
            tool_use(0, "a", "look", '{"at": 1}'),
            tool_use(0, "b", "look", '{"at": 2}'),
            finished("tool_use"),
            END,
        )
        items = (signed("One.", "s1", 0, model=OLD), signed("Two.", "s2", 1, model=OLD))
        assert message.reasoning_details_values == items
        assert [call.arguments for call in message.tool_calls] == [{"at": 1}, {"at": 2}]

    async def test_thinking_that_is_not_signed_can_be_read_and_is_not_kept(self) -> None:
        pieces = [start(0, "thinking"), delta(0, "thinking_delta", thinking="Hm"), stop(0)]
        message = await message_of(begun(), *pieces, text(1, "So."), finished("end_turn"), END)
        assert message.content == (ReasoningContent("Hm"), TextContent("So."))

    async def test_an_answer_in_one_piece(self) -> None:
        body = {
            "type": "message",
            "role": "assistant",
            "content": [
                thought("Hm", "s"),
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "So."},
                called("a", at=1),
            ],
            "stop_reason": "tool_use",
            "usage": {"input_tokens": 3, "output_tokens": 4},
        }
        last = await answer_to(msgspec.json.encode(body))
        content = (
            ReasoningContent("Hm"),
            details(signed("Hm", "s", 0, model=OLD), sealed("x", 1, model=OLD)),
            TextContent("So."),
            ToolCall("a", "look", {"at": 1}),
        )
        assert last == Done(AssistantMessage(content, StopReason.TOOL_USE, usage=Usage(3, 4)))

    async def test_the_end_without_its_event(self) -> None:
        message = await message_of(begun(), text(0, "Hi"), finished("end_turn"))
        assert message.plain_text == "Hi"

    async def test_an_event_that_is_no_json(self) -> None:
        last = await answer_to(begun(), b"data: {oops\n\n")
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.TRANSIENT


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.slow
class TestFailures:
    @pytest.mark.parametrize(
        ("status", "kind", "message", "expected"),
        [
            (401, "authentication_error", "invalid x-api-key", StreamErrorKind.FATAL),
            (400, "invalid_request_error", "Your credit balance is too low", StreamErrorKind.FATAL),
            (
                400,
                "invalid_request_error",
                "prompt is too long: 210000 tokens > 200000 maximum",
                StreamErrorKind.CONTEXT_OVERFLOW,
            ),
            (
                400,
                "invalid_request_error",
                "input length and `max_tokens` exceed context limit: 190000 + 32000 > 200000",
                StreamErrorKind.CONTEXT_OVERFLOW,
            ),
            (413, "request_too_large", "too large", StreamErrorKind.CONTEXT_OVERFLOW),
            (429, "rate_limit_error", "slow down", StreamErrorKind.PROVIDER_RATE_LIMITED),
            (500, "api_error", "internal", StreamErrorKind.TRANSIENT),
            (529, "overloaded_error", "Overloaded", StreamErrorKind.PROVIDER_RATE_LIMITED),
        ],
    )
    async def test_statuses(
        self, status: int, kind: str, message: str, expected: StreamErrorKind
    ) -> None:
        async with serving([refused(status, message, kind)], retry=ONCE) as (_, transport):
            [error] = await ask(transport)
        assert isinstance(error, Error)
        assert error.kind is expected
        assert message in error.message

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("overloaded_error", StreamErrorKind.PROVIDER_RATE_LIMITED),
            ("api_error", StreamErrorKind.TRANSIENT),
            ("invalid_request_error", StreamErrorKind.FATAL),
        ],
    )
    async def test_told_in_the_middle(self, kind: str, expected: StreamErrorKind) -> None:
        """What was shown is not asked for again."""
        pieces = [begun(input_tokens=9), start(0, "text", text="Hel"), failed("no more", kind)]
        async with serving([stream(*pieces)]) as (server, transport):
            events = await ask(transport)
        last = events[-1]
        assert isinstance(last, Error)
        assert (last.kind, last.partial.plain_text) == (expected, "Hel")
        assert last.partial.usage == Usage(9)
        assert "no more" in last.message
        assert len(server.requests) == 1

    async def test_told_at_once_it_is_asked_again(self) -> None:
        clock = FakeClock()
        script = [stream(begun(), failed("Overloaded")), stream(*said())]
        async with serving(script, clock=clock) as (server, transport):
            events = await ask(transport)
        assert isinstance(events[-1], Done)
        assert len(clock.sleeps) == 1
        assert server.requests[0].body == server.requests[1].body

    async def test_the_server_says_when_to_come_back(self) -> None:
        clock = FakeClock()
        script = [
            refused(429, "slow down", "rate_limit_error", **{"retry-after": "7"}),
            refused(529, "Overloaded", "overloaded_error", **{"retry-after": "2.5"}),
            stream(*said()),
        ]
        async with serving(script, clock=clock) as (_, transport):
            events = await ask(transport)
        assert isinstance(events[-1], Done)
        assert clock.sleeps == [7.0, 2.5]

    async def test_the_sdk_does_not_ask_again_by_itself(self) -> None:
        async with serving([refused(500, "internal", "api_error")], retry=ONCE) as (server, stream):
            await ask(stream)
        assert len(server.requests) == 1

    @pytest.mark.parametrize("phase", ["idle", "total"])
    async def test_a_server_that_is_silent(self, phase: str) -> None:
        limits = Timeouts(**{"idle": None, "total": None, phase: 0.05})
        script = [stream(begun(), start(0, "text", text="Hel"), hold=True)]
        async with serving(script, timeouts=limits, retry=ONCE) as (server, transport):
            last = (await ask(transport))[-1]
            await server.all_closed()
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.TRANSIENT
        assert isinstance(last.cause, StreamTimeout)
        assert last.cause.phase == phase

    async def test_a_server_that_does_not_accept(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as full:
            waiting = [socket.socket() for _ in range(4)]
            for caller in waiting:
                caller.setblocking(False)
                caller.connect_ex(full.getsockname())
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            limits = Timeouts(connect=0.05)
            transport = Anthropic(OLD, base_url=url, timeouts=limits, retry=ONCE)
            [error] = await ask(transport)
            await transport.aclose()
            for caller in waiting:
                caller.close()
        assert isinstance(error, Error)
        assert isinstance(error.cause, StreamTimeout)
        assert error.cause.phase == "connect"

    async def test_nobody_is_there(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as server:
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
        transport = Anthropic(OLD, base_url=url, clock=FakeClock())
        report = await check_stream_fn(transport)
        await transport.aclose()
        assert report.error is not None
        assert report.error.kind is StreamErrorKind.TRANSIENT

    async def test_cancelling_closes_the_connection_at_once(self) -> None:
        signal = CancellationToken()
        script = [stream(begun(), start(0, "text", text="Hel"), hold=True)]
        async with serving(script) as (server, transport):
            events = []
            async for event in transport(asking(), signal):
                events.append(event)
                if isinstance(event, Chunk):
                    signal.cancel("enough")
            await server.client_gone()
        last = events[-1]
        assert isinstance(last, Error)
        assert (last.kind, last.message) == (StreamErrorKind.ABORTED, "enough")
        assert last.partial.plain_text == "Hel"

    async def test_so_does_cancelling_the_task_and_closing_the_stream(self) -> None:
        script = [stream(begun(), start(0, "text", text="Hel"), hold=True)] * 2
        async with serving(script) as (server, transport):
            begins = asyncio.Event()

            async def listen() -> None:
                async for _ in transport(asking(), CancellationToken()):
                    begins.set()

            task = asyncio.create_task(listen())
            await begins.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.client_gone()
            answer: Any = transport(asking(), CancellationToken())
            await anext(answer)
            await answer.aclose()
            await server.client_gone(times=2)


# --- who is asked, and with what key ----------------------------------------------------------

CANARY = "sk-ant-canary-4711"


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("no_keys")
class TestAddressAndKey:
    def test_anthropic_wants_a_key(self) -> None:
        with pytest.raises(ConfigError, match="ANTHROPIC_API_KEY or ANTHROPIC_AUTH_TOKEN"):
            Anthropic(OLD)

    def test_a_model_is_needed(self) -> None:
        with pytest.raises(ConfigError, match="the name of a model"):
            Anthropic(" ", api_key="k")

    @pytest.mark.parametrize("variable", ["ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"])
    async def test_the_environment(self, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
        async with ByteServer([stream(*said())]) as server:
            monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
            monkeypatch.setenv(variable, "from-env")
            transport = Anthropic(OLD)
            await ask(transport)
            await transport.aclose()
        [request] = server.requests
        assert (request.method, request.path) == ("POST", "/v1/messages")
        assert request.headers["authorization"] == "Bearer from-env"

    async def test_a_key_goes_only_where_it_belongs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ANTHROPIC_API_KEY", CANARY)
        async with serving([stream(*said())]) as (server, transport):
            await ask(transport)
        assert "authorization" not in server.requests[0].headers
        assert CANARY not in str(server.requests)

    async def test_nor_do_the_headers_that_it_has_for_anthropic(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", f"X-Account: {CANARY}\nX-Mine: theirs")
        given = {"X-Mine": "mine"}
        async with serving([stream(*said())], headers=given) as (server, transport):
            await ask(transport)
        assert CANARY not in str(server.requests)
        assert server.requests[0].headers["x-mine"] == "mine"

    async def test_an_address_with_v1_at_its_end(self) -> None:
        async with ByteServer([stream(*said())]) as server:
            transport = Anthropic(OLD, base_url=f"{server.url}/v1/", api_key="k")
            await ask(transport)
            await transport.aclose()
        assert server.requests[0].path == "/v1/messages"
        assert server.requests[0].headers["authorization"] == "Bearer k"

    async def test_a_client_of_the_host(self) -> None:
        import anthropic

        async with (
            ByteServer([stream(*said())] * 2) as server,
            anthropic.AsyncAnthropic(api_key="own", base_url=server.url) as client,
        ):
            transport = Anthropic(OLD, client=client)
            await ask(transport)
            await transport.aclose()
            await ask(transport)  # it is not ours to close
        assert [r.headers["authorization"] for r in server.requests] == ["Bearer own"] * 2

    async def test_a_connection_is_used_again(self) -> None:
        async with serving(lambda _: stream(*said())) as (server, transport):
            for _ in range(3):
                await ask(transport)
            assert server.open_connections == 1

    async def test_a_key_is_seen_nowhere(
        self, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """Not even when the server quotes it."""
        caplog.set_level(logging.DEBUG)
        headers = {"X-Secret": "canary-in-a-header"}
        told = f"not the key: {CANARY} nor canary-in-a-header"

        def quotes(request: Any) -> Answer:
            if len(server.requests) == 1:
                return refused(529, told, "overloaded_error")
            return refused(401, told, "authentication_error")

        async with ByteServer(quotes) as server:
            transport = Anthropic(
                OLD, base_url=server.url, api_key=CANARY, headers=headers, clock=FakeClock()
            )
            recorded = RecordingStream(transport, tmp_path / "answers.jsonl")
            sink = RecordingSink()
            with pytest.raises(StreamError) as raised:
                await run("Hi", AgentContext(), LoopConfig(stream=recorded, event_sink=sink))
            await transport.aclose()
        assert [r.headers["authorization"] for r in server.requests] == [f"Bearer {CANARY}"] * 2
        assert "not the key: [redacted]" in str(raised.value)
        seen = [str(raised.value), repr(raised.value.__cause__), repr(transport), repr(sink.events)]
        seen += [caplog.text, (tmp_path / "answers.jsonl").read_text()]
        assert "retrying in" in caplog.text
        assert "canary" not in "\n".join(seen)


# --- servers that speak it --------------------------------------------------------------------


@tool
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"22 °C in {city}"


def at(server: Aimock, model: str = OLD, **settings: Any) -> Anthropic:
    strict = {"X-AIMock-Strict": "true"}
    return Anthropic(model, base_url=server.url, api_key="mock", headers=strict, **settings)


class TestAimock:
    @pytest.mark.slow
    async def test_the_kit(self, aimock: Aimock) -> None:
        text = {"content": "Hello there, you.", "reasoning": "Hm", "usage": {"input_tokens": 5}}
        aimock.load({"match": {}, "response": text, "chunkSize": 4})
        transport = at(aimock)
        report = await check_stream_fn(transport)
        await transport.aclose()
        assert report.message.plain_text == "Hello there, you."
        assert report.message.usage == Usage(5)

    async def test_a_run_with_tools(self, aimock: Aimock) -> None:
        calls = [
            {"name": "weather", "arguments": {"city": city}, "id": f"toolu_{city}"}
            for city in ("Oslo", "Rome")
        ]
        aimock.play(
            {"response": {"toolCalls": calls}, "chunkSize": 3},
            {"response": {"content": "Mild.", "usage": {"input_tokens": 7, "output_tokens": 2}}},
        )
        transport = at(aimock, NEW)
        config = LoopConfig(stream=transport, tools=[weather])
        outcome = await run("Weather?", AgentContext("Be brief."), config)
        await transport.aclose()
        assert outcome.text == "Mild."
        assert outcome.usage == Usage(7, 2)
        first, second = aimock.journal()
        assert (first.path, first.response.status) == ("/v1/messages", 200)
        assert first.body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
        ]
        assert [(m["tool_call_id"], m["content"]) for m in second.body["messages"][3:]] == [
            ("toolu_Oslo", "22 °C in Oslo"),
            ("toolu_Rome", "22 °C in Rome"),
        ]

    async def test_a_server_that_asks_for_patience(self, aimock: Aimock) -> None:
        error = {"error": {"message": "slow", "type": "rate_limit_error"}, "status": 429}
        aimock.play({"response": {**error, "retryAfter": 3}}, {"response": {"content": "Now."}})
        clock = FakeClock()
        transport = at(aimock, clock=clock)
        events = await ask(transport)
        await transport.aclose()
        assert isinstance(events[-1], Done)
        assert clock.sleeps == [3.0]

    @pytest.mark.slow
    async def test_a_signed_turn_survives_the_shelf(self, aimock: Aimock) -> None:
        """What goes back after the transcript was written and read is the same, byte by byte."""
        aimock.play(
            {
                "response": {
                    "toolCalls": [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "t1"}],
                    "reasoning": "Let me look… é🦀",
                    "reasoningSignature": "EqQBCkYIARgCKkDz/+==",
                    "redactedThinking": ["EmwKAhgBEgy3va=="],
                }
            },
            {"response": {"content": "Mild.", "reasoning": "So.", "reasoningSignature": "c2ln"}},
        )
        transport = at(aimock)
        config = LoopConfig(stream=transport, tools=[weather], reasoning=ReasoningEffort.LOW)
        start = AgentContext("Be brief.")
        outcome = await run("Weather?", start, config)
        await transport.aclose()
        assert [entry.response.status for entry in aimock.journal()] == [200, 200]

        shelf = load_transcript(dump_transcript(outcome.messages))
        assert not shelf.malformed
        async with serving(lambda _: stream(*said("Go."))) as (server, again):
            config = config.replace(stream=again)
            for messages in (outcome.messages, shelf.messages):
                await run("And now?", start.extend(messages), config)
        kept, loaded = server.requests
        assert kept.body == loaded.body
        assert (
            '[{"type":"redacted_thinking","data":"EmwKAhgBEgy3va=="},'
            '{"type":"thinking","thinking":"Let me look… é🦀","signature":"EqQBCkYIARgCKkDz/+=="},'
            '{"type":"tool_use","id":"t1","name":"weather","input":{"city":"Oslo"}}]'
        ).encode() in loaded.body
        assert (
            b'[{"type":"thinking","thinking":"So.","signature":"c2ln"},'
            b'{"type":"text","text":"Mild."}]'
        ) in loaded.body


class TestLlama:
    def at(self, server: LlamaServer) -> Anthropic:
        return Anthropic(server.model, base_url=server.root)

    @pytest.mark.slow
    async def test_a_real_model_speaks(self, llama_server: LlamaServer) -> None:
        transport = self.at(llama_server)
        report = await check_stream_fn(transport, asking(max_output_tokens=8))
        await transport.aclose()
        assert report.message.plain_text
        assert report.message.stop_reason is StopReason.MAX_TOKENS
        assert report.message.usage is not None
        assert report.message.usage.output_tokens == 8

    async def test_a_real_model_calls_a_tool(self, llama_server: LlamaServer) -> None:
        transport = self.at(llama_server)
        city = {"type": "string", "maxLength": 20}
        schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
        request = asking(
            UserMessage("Weather in Oslo?"),
            tools=[ToolSchema("weather", "The weather of a city.", schema)],
            force_tool_call=True,
            max_output_tokens=50,
        )
        last = (await ask(transport, request))[-1]
        await transport.aclose()
        assert isinstance(last, Done), last
        assert {call.name for call in last.message.tool_calls} == {"weather"}
        assert isinstance(last.message.tool_calls[0].arguments["city"], str)
