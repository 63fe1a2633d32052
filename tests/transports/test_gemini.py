"""Gemini: what is sent, what is made of what comes back, and where signatures stay."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from google import genai
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    ConfigError,
    ImageContent,
    LoopConfig,
    ReasoningContent,
    ReasoningDetailsContent,
    ReasoningEffort,
    StopReason,
    StreamErrorKind,
    StreamEvent,
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
    run_continue,
    tool,
)
from clark_agent.errors import StreamTimeout
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    OutputSchema,
    ReasoningChunk,
    Start,
    TextChunk,
)
from clark_agent.testing import FakeClock, RecordingSink
from clark_agent.testing.misbehaviours import (
    cut_anywhere_problems,
)
from clark_agent.testing.transport_kit import check_events_of, check_stream_fn
from clark_agent.transports import RecordingStream, RetryPolicy, Timeouts
from clark_agent.transports.gemini import Gemini
from clark_agent.transports.http.response import Answer as Heard
from clark_agent.types import arg_parse_error
from tests import strategies
from tests.strategies import cuts, without_files
from tests.transports.servers.aimock import Aimock
from tests.transports.servers.bytes_server import Answer, ByteServer
from tests.transports.wires_chat import ONCE, ask, asking, bodies
from tests.transports.wires_gemini import (
    KEY,
    MODEL,
    call,
    chunk,
    event,
    failing,
    refusal,
    said,
    serving,
    stream,
    text,
    thought,
    usage,
)

OLDER = "gemini-2.5-flash"
UNKNOWN = "my-own-model"  # gets ids, and no signature that it did not make
SKIP = "skip_thought_signature_validator"
PICTURE = "data:image/png;base64,AAAA"
INLINE = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
LOOK = ToolSchema("look", "Look at a place.", {"type": "object", "properties": {}})


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY", "GOOGLE_GEMINI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def gemini(model: str = MODEL, **settings: Any) -> Gemini:
    """A transport that nobody asks anything."""
    return Gemini(model, api_key=KEY, **settings)


def sent(request: StreamRequest, *, model: str = UNKNOWN) -> dict[str, Any]:
    return gemini(model).encode(request)


def written(*messages: AgentMessage, model: str = UNKNOWN) -> Any:
    """The contents that messages become."""
    return sent(asking(*messages), model=model)["contents"]


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model_turn(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def answered(call_id: str | None, said: Any = None, *, name: str = "look", **more: Any) -> Any:
    response = {"name": name, "response": said or {"output": "seen"}, **more}
    return {"functionResponse": {**response, **({"id": call_id} if call_id else {})}}


def calling(*calls: ToolCall | str, text: str = "") -> AssistantMessage:
    made = [ToolCall(c, "look", {}) if isinstance(c, str) else c for c in calls]
    return AssistantMessage.from_calls(made, text)


def result(call_id: str, *blocks: Any, **fields: Any) -> ToolResultMessage:
    return ToolResultMessage(call_id, "look", blocks or (TextContent("seen"),), **fields)


async def heard(*pieces: bytes, cap: int | None = None, **settings: Any) -> list[StreamEvent]:
    """The events of a call that is answered so, and is not repeated."""
    async with serving([stream(*pieces)], retry=ONCE, **settings) as (_, transport):
        events = await ask(transport, asking(max_output_tokens=cap))
    assert not check_events_of(events)
    return events


async def answer(*pieces: bytes, **settings: Any) -> AssistantMessage:
    last = (await heard(*pieces, **settings))[-1]
    assert isinstance(last, Done), last
    return last.message


async def failure(*pieces: bytes, **settings: Any) -> Error:
    last = (await heard(*pieces, **settings))[-1]
    assert isinstance(last, Error), last
    return last


# --- what is sent -----------------------------------------------------------------------------


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
        reasoning=ReasoningEffort.LOW,
        force_tool_call=True,
        provider_extras={"top_p": 0.9},
    )
    assert sent(request, model=MODEL) == {
        "contents": [
            user({"text": "What is this?"}, INLINE),
            model_turn({"text": "Let me look."}, call("look", "a", SKIP, at="é")),
            user(answered("a")),
        ],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [
            {
                "functionDeclarations": [
                    {
                        "name": "look",
                        "description": "Look at a place.",
                        "parametersJsonSchema": {"type": "object", "properties": {}},
                    }
                ]
            }
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
        "generationConfig": {
            "maxOutputTokens": 100,
            "temperature": 0.5,
            "thinkingConfig": {"thinkingLevel": "LOW", "includeThoughts": True},
            "topP": 0.9,
        },
    }


def test_next_to_nothing() -> None:
    assert sent(asking(force_tool_call=True)) == {"contents": [user({"text": "Hi"})]}


@pytest.mark.slow
@pytest.mark.parametrize("version", [None, "v1beta"])
async def test_what_is_encoded_is_what_the_server_gets(version: str | None) -> None:
    request = asking(
        UserMessage("é🦀\u2028"),
        calling("a"),
        result("a"),
        tools=(LOOK,),
        temperature=0.0,
        max_output_tokens=5,
        force_tool_call=True,
    )
    settings = {"api_version": version, "headers": {"x-team": "blue"}}
    async with serving([stream(*said())], **settings) as (server, transport):
        assert isinstance((await ask(transport, request))[-1], Done)
        [got] = server.requests
        path = f"/{version or 'v1'}/models/{MODEL}:streamGenerateContent?alt=sse"
        assert (got.method, got.path) == ("POST", path)
        assert got.headers["x-goog-api-key"] == KEY
        assert got.headers["x-team"] == "blue"
        assert msgspec.json.decode(got.body) == transport.encode(request)


class TestMessages:
    def test_system_messages(self) -> None:
        request = StreamRequest(
            system_prompt="Be brief.",
            messages=(
                SystemMessage("Be kind."),
                SystemMessage(""),
                UserMessage("Hi"),
                SystemMessage("It is late."),
                AssistantMessage.from_text("Good night"),
                SystemMessage("It is early."),
            ),
        )
        assert sent(request) == {
            "systemInstruction": {"parts": [{"text": "Be brief.\n\nBe kind."}]},
            "contents": [
                user({"text": "Hi"}, {"text": "<system>\nIt is late.\n</system>"}),
                model_turn({"text": "Good night"}),
                user({"text": "<system>\nIt is early.\n</system>"}),
            ],
        }

    def test_of_the_same_role_are_one_content_and_empty_ones_none(self) -> None:
        assert written(
            UserMessage("Hi"),
            UserMessage(""),
            UserMessage((TextContent(""), TextContent("there"))),
            AssistantMessage((ReasoningContent("Hm"),), StopReason.END_TURN),
            UserMessage("?"),
            AssistantMessage.from_text("One"),
            AssistantMessage.from_text("Two"),
        ) == [
            user({"text": "Hi"}, {"text": "there"}, {"text": "?"}),
            model_turn({"text": "One"}, {"text": "Two"}),
        ]

    def test_thoughts_in_tags_go_back_into_the_text(self) -> None:
        blocks = (TextContent("So "), ThinkingContent("hm"), TextContent("yes"))
        message = AssistantMessage(blocks, StopReason.END_TURN)
        assert written(message) == [model_turn({"text": "So <thought>hm</thought>yes"})]

    @pytest.mark.parametrize(
        ("image", "part"),
        [
            (ImageContent(PICTURE), INLINE),
            (ImageContent("data:image/gif;name=a.gif;base64,AA=="), ("image/gif", "AA==")),
            (ImageContent("data:image/svg+xml,%3Csvg/%3E"), ("image/svg+xml", "PHN2Zy8+")),
            (ImageContent("data:;base64,AA==", media_type="image/webp"), ("image/webp", "AA==")),
            (ImageContent("https://host/a.jpg?size=1"), "image/jpeg"),
            (ImageContent("gs://bucket/a", media_type="image/png"), "image/png"),
            (ImageContent("https://host/picture"), None),
        ],
    )
    def test_images(self, image: ImageContent, part: Any) -> None:
        if isinstance(part, tuple):
            part = {"inlineData": {"mimeType": part[0], "data": part[1]}}
        elif not isinstance(part, dict):
            part = {"fileUri": image.source, **({"mimeType": part} if part else {})}
            part = {"fileData": part}
        assert written(UserMessage((image,))) == [user(part)]

    async def test_nothing_to_answer(self) -> None:
        [told] = await ask(gemini(), asking(UserMessage("")))
        assert isinstance(told, Error)
        assert told.kind is StreamErrorKind.FATAL
        assert "no message has text" in told.message


class TestCallsAndResults:
    def test_results_stand_together_in_the_order_of_the_calls(self) -> None:
        assert written(
            calling("a", "b"),
            result("b", TextContent("no"), is_error=True),
            result("a"),
            UserMessage("Well?"),
        ) == [
            model_turn(call("look", "a"), call("look", "b")),
            user(answered("a"), answered("b", {"error": "no"}), {"text": "Well?"}),
        ]

    @pytest.mark.parametrize("model", ["gemini-1.5-pro", "gemini-2.0-flash", OLDER])
    def test_older_models_know_no_ids(self, model: str) -> None:
        assert written(calling("a"), result("a"), model=model) == [
            model_turn(call("look")),
            user(answered(None)),
        ]

    def test_what_a_crash_left_behind_is_mended(self) -> None:
        [_, answers] = written(calling("a", "a"), result("a"))
        ids = [part["functionResponse"]["id"] for part in answers["parts"]]
        assert ids == ["a", "clark_agent_call_1"]
        assert "No result" in answers["parts"][1]["functionResponse"]["response"]["error"]

    @pytest.mark.parametrize(
        ("arguments", "args"),
        [
            ({"at": 1}, {"at": 1}),
            (7, {"value": 7}),
            (arg_parse_error("bad", "{a"), {"invalid_json": "{a"}),
        ],
    )
    def test_arguments_are_an_object(self, arguments: Any, args: Any) -> None:
        [turn, _] = written(calling(ToolCall("a", "look", arguments)), result("a"))
        assert turn == model_turn(call("look", "a", **args))

    @pytest.mark.parametrize(
        ("name", "safe"),
        [("mcp.look-at:it", "mcp.look-at:it"), ("look it up", "look_it_up"), ("", "unknown")],
    )
    def test_a_name_that_the_model_made_up_does_not_spoil_the_history(
        self, name: str, safe: str
    ) -> None:
        history = (calling(ToolCall("a", name, {})), ToolResultMessage("a", "look", ()))
        [turn, answers] = written(*history)
        assert turn == model_turn(call(safe, "a"))
        assert answers == user(answered("a", {"output": ""}, name=safe))

    def test_images_of_results(self) -> None:
        linked = ImageContent("https://host/a.png")
        history = (
            calling("a", "b"),
            result("a", TextContent("see"), ImageContent(PICTURE), linked),
            result("b"),
            UserMessage("Well?"),
        )
        title = {"text": "Images from the tool look:"}
        link = {"fileData": {"fileUri": linked.source, "mimeType": "image/png"}}
        output = {"output": "see"}
        assert written(*history, model=MODEL)[1] == user(
            answered("a", output, parts=[INLINE]), answered("b"), title, link, {"text": "Well?"}
        )
        assert written(*history, model=OLDER)[1] == user(
            answered(None, output), answered(None), title, INLINE, link, {"text": "Well?"}
        )


@given(strategies.transcripts() | strategies.broken_histories(), st.sampled_from([MODEL, OLDER]))
def test_whatever_was_said_the_server_takes_it(history: list[AgentMessage], model: str) -> None:
    reasoning = (ReasoningDetailsContent, ReasoningContent)
    plain = [
        msgspec.structs.replace(m, content=tuple(b for b in m.content if type(b) not in reasoning))
        if isinstance(m, AssistantMessage)
        else without_files(m)
        for m in history
    ]
    contents = written(UserMessage("Hi"), *plain, model=model)
    roles = [content["role"] for content in contents]
    assert all(one != other for one, other in pairwise(roles))
    for content, following in zip(contents, [*contents[1:], user()], strict=True):
        assert content["parts"]
        assert all(part.get("text", "x") for part in content["parts"])
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        answers = [p["functionResponse"] for p in following["parts"] if "functionResponse" in p]
        assert [(c["name"], c.get("id")) for c in calls] == [
            (a["name"], a.get("id")) for a in answers if calls
        ]
        if calls:
            first = next(part for part in content["parts"] if "functionCall" in part)
            assert first.get("thoughtSignature") == (SKIP if model == MODEL else None)


# A row for each model: what it is asked for at none, minimal, low, medium, high and xhigh.
THINKING = """
    gemini-3-flash-preview           MINIMAL MINIMAL LOW MEDIUM HIGH HIGH
    gemini-3.5-flash                 MINIMAL MINIMAL LOW MEDIUM HIGH HIGH
    gemini-3.1-flash-lite            MINIMAL MINIMAL LOW MEDIUM HIGH HIGH
    gemini-3.9-flash-lite-preview    MINIMAL MINIMAL LOW MEDIUM HIGH HIGH
    gemini-3.7-flash                 LOW LOW LOW MEDIUM HIGH HIGH
    models/gemini-3.8-flash          LOW LOW LOW MEDIUM HIGH HIGH
    gemini-3-pro-preview             LOW LOW LOW LOW HIGH HIGH
    gemini-3.1-pro-preview           LOW LOW LOW MEDIUM HIGH HIGH
    gemini-4-ultra                   LOW LOW LOW MEDIUM HIGH HIGH
    gemini-flash-latest              LOW LOW LOW MEDIUM HIGH HIGH
    gemini-2.5-flash                 0 512 2048 8192 24576 24576
    gemini-2.5-flash-lite            0 512 2048 8192 24576 24576
    gemini-2.5-pro                   128 128 2048 8192 24576 32768
    gemini-2.0-flash                 - - - - - -
    gemini-1.5-pro                   - - - - - -
    gemini-2.5-flash-image           - - - - - -
    gemini-3-pro-image-preview       - - - - - -
    gemini-2.5-flash-preview-tts     - - - - - -
    gemma-3-27b-it                   - - - - - -
"""


@pytest.mark.parametrize("row", THINKING.strip().splitlines(), ids=lambda row: row.split()[0])
def test_thinking(row: str) -> None:
    model, *levels = row.split()
    for effort, level in zip(ReasoningEffort, levels, strict=True):
        expected: dict[str, Any] = {}
        if level.isdigit():
            expected = {"thinkingBudget": int(level)}
        elif level != "-":
            expected = {"thinkingLevel": level}
        if expected and effort is not ReasoningEffort.NONE:
            expected["includeThoughts"] = True
        generation = sent(asking(reasoning=effort), model=model).get("generationConfig", {})
        assert generation == ({"thinkingConfig": expected} if expected else {})


class TestExtras:
    def test_go_where_the_api_has_them(self) -> None:
        extras = {
            "seed": 7,
            "max_output_tokens": 9,
            "thinking_config": {"thinking_budget": 5},
            "safety_settings": [{"category": "X", "threshold": "OFF"}],
            "cachedContent": "cachedContents/1",
            "tools": [{"google_search": {}}],
            "tool_config": {"retrieval_config": {}},
            "generationConfig": {"top_k": 3, "stopSequences": ["."]},
        }
        request = asking(tools=(LOOK,), max_output_tokens=5, provider_extras=extras)
        body = sent(request, model=OLDER)
        assert body["generationConfig"] == {
            "maxOutputTokens": 9,
            "thinkingConfig": {"thinkingBudget": 5},
            "seed": 7,
            "topK": 3,
            "stopSequences": ["."],
        }
        assert body["safetySettings"] == extras["safety_settings"]
        assert body["cachedContent"] == "cachedContents/1"
        assert body["toolConfig"] == {"retrievalConfig": {}}
        assert [*map(list, body["tools"])] == [["functionDeclarations"], ["google_search"]]

    def test_go_into_what_is_there(self) -> None:
        extras = {
            "thinking_config": {"include_thoughts": False},
            "tool_config": {"function_calling_config": {"allowed_function_names": ["look"]}},
        }
        request = asking(tools=(LOOK,), force_tool_call=True, provider_extras=extras)
        body = sent(request, model="gemini-3-flash")
        assert body["generationConfig"]["thinkingConfig"] == {
            "thinkingLevel": "MINIMAL",
            "includeThoughts": False,
        }
        assert body["toolConfig"] == {
            "functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}
        }

    @pytest.mark.parametrize("extras", [[1], "x", {"seed": object()}])
    async def test_that_cannot_be_sent(self, extras: Any) -> None:
        [told] = await ask(gemini(), asking(provider_extras=extras))
        assert isinstance(told, Error)
        assert told.kind is StreamErrorKind.FATAL

    @pytest.mark.parametrize("extras", [{"tools": 1}, {"generationConfig": None}, {1: 2}])
    def test_that_make_no_sense_are_the_servers_business(self, extras: Any) -> None:
        assert sent(asking(provider_extras=extras))["contents"]

    @pytest.mark.slow
    async def test_half_a_character_does_not_keep_a_request_from_being_sent(self) -> None:
        async with serving([stream(*said())]) as (server, transport):
            await ask(transport, asking(UserMessage("a\ud83e")))
            assert bodies(server)[0]["contents"] == [user({"text": "a\ufffd"})]


# --- the schema of the answer -----------------------------------------------------------------

OUTPUT = OutputSchema("verdict", {"type": "object", "properties": {"score": {"type": "integer"}}})


class TestOutputSchema:
    FORMAT: ClassVar[Any] = {
        "responseMimeType": "application/json",
        "responseJsonSchema": OUTPUT.schema,
    }

    @pytest.mark.parametrize(
        ("model", "tools"),
        [(OLDER, ()), ("gemini-3-flash", ()), ("gemini-3-flash", (LOOK,)), (UNKNOWN, (LOOK,))],
    )
    def test_is_part_of_the_generation(self, model: str, tools: tuple[ToolSchema, ...]) -> None:
        request = asking(output_schema=OUTPUT, tools=tools)
        without = sent(asking(tools=tools), model=model)
        generation = {**without.get("generationConfig", {}), **self.FORMAT}
        assert sent(request, model=model) == {**without, "generationConfig": generation}

    def test_next_to_functions_older_models_read_it_in_the_prompt(self) -> None:
        request = asking(output_schema=OUTPUT, tools=(LOOK,))
        described = {"parts": [{"text": OUTPUT.instructions}]}
        expected = {**sent(asking(tools=(LOOK,)), model=OLDER), "systemInstruction": described}
        assert sent(request, model=OLDER) == expected

    @pytest.mark.parametrize(
        "theirs",
        [
            {"response_schema": {"type": "OBJECT"}, "response_mime_type": "application/json"},
            {"generationConfig": {"responseMimeType": "text/x.enum"}},
        ],
    )
    def test_the_hosts_own_format_wins(self, theirs: Any) -> None:
        request = asking(output_schema=OUTPUT, provider_extras=theirs)
        assert sent(request) == sent(asking(provider_extras=theirs))

    @pytest.mark.parametrize(
        ("model", "alone", "with_tools"),
        [
            ("gemini-3-flash", "native", "native"),
            ("gemini-flash-latest", "native", "native"),
            ("gemini-2.5-pro", "native", "tool"),
            ("gemini-3-pro-image", "tool", "tool"),
            ("gemma-3-27b-it", "tool", "tool"),
        ],
    )
    def test_the_best_mode(self, model: str, alone: str, with_tools: str) -> None:
        assert gemini(model).best_output_mode(has_tools=False) == alone
        assert gemini(model).best_output_mode(has_tools=True) == with_tools


# --- signatures -------------------------------------------------------------------------------


def item(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning.encrypted", "format": "google-gemini-v1", **fields}


def kept(*blocks: Any) -> AssistantMessage:
    return AssistantMessage(tuple(blocks), StopReason.END_TURN)


def details(*items: Any) -> ReasoningDetailsContent:
    return ReasoningDetailsContent(items)


class TestSignatures:
    @pytest.mark.slow
    async def test_how_they_are_kept(self) -> None:
        message = await answer(
            chunk(thought("Hm", "T==")),
            chunk(text("Hel")),
            chunk(text("lo", "S1==")),
            chunk(text("!")),
            chunk(call("look", "a", "S2=="), call("look")),
            chunk(text("", "S3=="), finish="STOP"),
        )
        mine = {"format": "google-gemini-v1", "model": MODEL}
        blob = {"type": "reasoning.encrypted", **mine}
        signed = {"type": "reasoning.text", "part": "thought", "text": "Hm", "signature": "T=="}
        first = {**blob, "part": "text", "id": None, "chars": 2, "data": "S1==", "index": 1}
        second = {**blob, "part": "call", "id": "a", "data": "S2==", "index": 2}
        third = {**blob, "part": "text", "id": None, "chars": 0, "data": "S3==", "index": 3}
        assert message.content == (
            ReasoningContent("Hm"),
            details({**signed, **mine, "index": 0}),
            TextContent("Hello"),
            details(first),
            TextContent("!"),
            ToolCall("a", "look", {}),
            details(second),
            ToolCall("made-up", "look", {}),
            details(third),
        )

    @pytest.mark.slow
    async def test_a_call_without_an_id_gets_one_that_its_signature_knows(self) -> None:
        message = await answer(chunk(call("look", None, "S=="), finish="STOP"))
        [called] = message.tool_calls
        assert called.id == "made-up"
        assert message.reasoning_details_values[0]["id"] == "made-up"

    def test_behind_a_gateway_they_belong_to_the_call_of_their_id(self) -> None:
        items = [item(id="b", data="B=="), item(id="gone", data="C=="), item(id=None, data="D==")]
        message = kept(details(*items), TextContent("So"), *calling("a", "b").content)
        [turn, _] = written(message, result("a"), result("b"), model=OLDER)
        assert turn == model_turn({"text": "So"}, call("look"), call("look", None, "B=="))

    def test_an_id_that_was_made_unique_does_not_lose_its_signature(self) -> None:
        first = kept(ToolCall("same", "look", {}), details(item(part="call", id="same", data="1")))
        second = kept(ToolCall("same", "look", {}), details(item(part="call", id="same", data="2")))
        contents = written(first, result("same"), second, result("same"), model=MODEL)
        assert [turn["parts"][0]["thoughtSignature"] for turn in contents[::2]] == ["1", "2"]

    @pytest.mark.parametrize("origin", [{"model": "gemini-3-pro-preview"}, {"format": "other"}])
    def test_of_others_stay_at_home(self, origin: dict[str, str]) -> None:
        signed = item(part="call", id="a", data="S==", **{"model": MODEL, **origin})
        message = kept(*calling("a", "b").content[:1], details(signed), ToolCall("b", "look", {}))
        [turn, _] = written(message, result("a"), result("b"), model=MODEL)
        assert turn == model_turn(call("look", "a", SKIP), call("look", "b"))

    @pytest.mark.parametrize(
        "odd",
        [
            7,
            {"type": "?"},
            item(),
            item(data=7),
            item(part="text", chars=9, data="S=="),
            item(part="text", chars=-1, data="S=="),
            item(part="text", chars="1", data="S=="),
            item(part="call", id=["a"], data="S=="),
            {"type": "reasoning.text", "format": "google-gemini-v1", "text": "Hm"},
        ],
    )
    def test_that_fit_nowhere_are_left_out(self, odd: Any) -> None:
        assert written(kept(TextContent("So"), details(odd))) == [model_turn({"text": "So"})]

    def test_without_its_text_there_is_nothing_to_sign(self) -> None:
        signed = item(part="text", chars=1, data="S==")
        assert written(UserMessage("Hi"), kept(details(signed))) == [user({"text": "Hi"})]

    @pytest.mark.slow
    async def test_parts_of_other_kinds_go_back_as_they_came(self) -> None:
        others: list[dict[str, Any]] = [
            {"executableCode": {"language": "PYTHON", "code": "1"}, "thoughtSignature": "S=="},
            {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}},
        ]
        message = await answer(chunk(*others), chunk(text("One"), finish="STOP"))
        assert message.plain_text == "One"
        assert written(message, model=MODEL) == [model_turn(*others, {"text": "One"})]

    @pytest.mark.slow
    async def test_survive_the_shelf(self) -> None:
        """A signed run is stored, loaded and gone on with: its parts are what they were."""
        parallel = [call("look", "a", "U2ln+/A=", at=1), call("look", "b", at=2)]
        again = call("look", "c", "U2ln+/B=", at=3)
        last = [text("It is "), text("calm.", "U2ln+/C="), text("", "U2ln+/D=")]
        script = [
            stream(chunk(thought("Hm")), chunk(*parallel), chunk(finish="STOP")),
            stream(chunk(text("And there?"), again, finish="STOP")),
            stream(*[chunk(part) for part in last], chunk(finish="STOP")),
            stream(*said("Still.")),
        ]

        @tool
        def look(at: int) -> str:
            """Look at a place."""
            return f"calm at {at}"

        async with serving(script) as (server, transport):
            config = LoopConfig(stream=transport, tools=[look], clock=FakeClock())
            first = await run("Look around", AgentContext(), config)
            loaded = load_transcript(dump_transcript(first.messages))
            assert not loaded.malformed
            context = AgentContext(messages=(*loaded.messages, UserMessage("Sure?")))
            assert (await run_continue(context, config)).text == "Still."
        seen = [answered(i, {"output": f"calm at {n}"}) for n, i in enumerate("abc", start=1)]
        assert bodies(server)[-1]["contents"] == [
            user({"text": "Look around"}),
            model_turn(*parallel),
            user(*seen[:2]),
            model_turn({"text": "And there?"}, again),
            user(seen[2]),
            model_turn(*last),
            user({"text": "Sure?"}),
        ]


# Text that is no tag, and signatures that are not all alike.
_texts = st.text(st.sampled_from("ab \n\u2028é🦀"), max_size=4)
_signatures = st.none() | st.sampled_from(["AA==", "+/8=", "-_8="])
_parts = st.one_of(
    st.builds(text, _texts, _signatures),
    st.builds(text, _texts, _signatures),
    st.builds(thought, _texts, _signatures),
    st.builds(call, st.just("look"), st.sampled_from(["a", "b", "c"]), _signatures),
    st.just({"executableCode": {"code": "1"}}),
)


def canonical(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts that must go back: thoughts only if they are signed, unsigned text in one piece."""
    found: list[dict[str, Any]] = []
    for part in parts:
        is_signed = "thoughtSignature" in part
        if "text" in part and not is_signed and (part.get("thought") or not part["text"]):
            continue
        if part.keys() == {"text"} and found and found[-1].keys() == {"text"}:
            found[-1] = {"text": found[-1]["text"] + part["text"]}
        else:
            found.append(part)
    return found


@given(st.lists(_parts, max_size=8), st.data())
def test_what_came_goes_back(parts: list[dict[str, Any]], data: st.DataObject) -> None:
    transport = gemini(UNKNOWN)
    told = Heard(new_id=FakeClock().new_id)
    decoder = transport._decoder(told)
    for part in [*parts, text("end")]:
        decoder.feed(chunk(part))
    decoder.feed(chunk(finish="MAX_TOKENS"))
    decoder.end()
    told.close()
    message = told.message()
    assert isinstance(message, AssistantMessage)
    loaded = load_transcript(dump_transcript([message])).messages
    [turn, *_] = transport.encode(asking(*loaded))["contents"]
    expected = canonical([*parts, text("end")])
    # Ids that come again are made unique.
    for part in (*expected, *turn["parts"]):
        if "functionCall" in part:
            part["functionCall"].pop("id", None)
    assert turn["parts"] == expected


# --- what comes back --------------------------------------------------------------------------


@pytest.mark.slow
class TestAnswer:
    async def test_whole(self) -> None:
        events = await heard(
            chunk(thought("Let me "), usageMetadata=usage(20, 0, thoughtsTokenCount=3)),
            chunk(thought("see.")),
            chunk(text("Hel")),
            chunk(text("lo"), call("look", "a", at=[1, 2.5, None])),
            chunk(
                finish="STOP",
                usageMetadata=usage(
                    20,
                    7,
                    thoughtsTokenCount=5,
                    cachedContentTokenCount=8,
                    toolUsePromptTokenCount=2,
                ),
            ),
        )
        assert [type(event) for event in events] == [Start, *[Chunk] * 5, Done]
        assert [e.chunk for e in events if isinstance(e, Chunk)][:3] == [
            ReasoningChunk("Let me "),
            ReasoningChunk("see."),
            TextChunk("Hel"),
        ]
        assert events[-1] == Done(
            AssistantMessage(
                (
                    ReasoningContent("Let me see."),
                    TextContent("Hello"),
                    ToolCall("a", "look", {"at": [1, 2.5, None]}),
                ),
                StopReason.TOOL_USE,
                usage=Usage(14, 12, 0, 8),
            )
        )

    WHOLE = (
        chunk(thought("Hé")),
        chunk(text("Hel")),
        chunk(text("lo 🦀", "AQ==")),
        chunk(call("look", "a", "Ag==", at="é"), call("look", "b")),
        chunk(text("", "Aw=="), finish="STOP", usageMetadata=usage(9, 2)),
    )

    def read(self, *pieces: bytes) -> Any:
        told = Heard(new_id=FakeClock().new_id)
        decoder = gemini()._decoder(told)
        for piece in pieces:
            decoder.feed(piece)
        decoder.end()
        told.close()
        return told.message() if decoder.is_complete else None

    def test_cut_at_every_boundary_it_is_the_same(self) -> None:
        whole = b"".join(self.WHOLE)
        expected = self.read(whole)
        assert expected.stop_reason is StopReason.TOOL_USE
        assert self.read(*[whole[n : n + 1] for n in range(len(whole))]) == expected
        for place in range(len(whole)):
            assert self.read(whole[:place], whole[place:]) == expected

    @given(st.data())
    def test_cut_anywhere_it_is_the_same(self, data: st.DataObject) -> None:
        whole = b"".join(self.WHOLE)
        assert self.read(*data.draw(cuts(whole))) == self.read(whole)

    @pytest.mark.parametrize("how", ["closed", "ended"])
    async def test_a_disconnect_at_every_third_byte(self, how: str) -> None:
        whole = b"".join(self.WHOLE)
        expected = self.read(whole)
        place = 0

        def cut(_: object) -> Answer:
            return Answer(body=whole[:place], cut_after=place if how == "closed" else None)

        ends: list[bool] = []
        async with serving(cut, retry=ONCE) as (_, transport):
            for place in range(1, len(whole), 3):
                events = await ask(transport)
                assert not cut_anywhere_problems(events, expected), whole[:place]
                ends.append(isinstance(events[-1], Done))
        assert not ends[0]
        assert ends == sorted(ends), "once it is whole it stays so"

    @pytest.mark.parametrize(
        ("reason", "expected"),
        [
            ("STOP", StopReason.END_TURN),
            ("MAX_TOKENS", StopReason.MAX_TOKENS),
            ("CONTINUATION", StopReason.MAX_TOKENS),
            ("SAFETY", StopReason.OTHER),
            ("MALFORMED_FUNCTION_CALL", StopReason.OTHER),
            ("SOMETHING_NEW", StopReason.OTHER),
        ],
    )
    async def test_finish_reasons_with_text(self, reason: str, expected: StopReason) -> None:
        message = await answer(chunk(text("Well"), finish=reason))
        assert (message.plain_text, message.stop_reason) == ("Well", expected)

    @pytest.mark.parametrize("reason", ["STOP", "FUNCTION_CALL"])
    async def test_finish_reasons_with_calls(self, reason: str) -> None:
        message = await answer(chunk(call("look", "a"), finish=reason))
        assert message.stop_reason is StopReason.TOOL_USE

    @pytest.mark.parametrize(
        "reason",
        "SAFETY RECITATION LANGUAGE BLOCKLIST PROHIBITED_CONTENT SPII IMAGE_SAFETY".split(),  # noqa: SIM905
    )
    async def test_an_answer_that_is_withheld(self, reason: str) -> None:
        told = await failure(chunk(thought("Hm")), chunk(finish=reason))
        assert told.kind is StreamErrorKind.FATAL
        assert told.message == f"the provider stopped the answer: {reason}"

    async def test_a_prompt_that_is_blocked(self) -> None:
        feedback = {"blockReason": "PROHIBITED_CONTENT", "blockReasonMessage": "not here"}
        told = await failure(event({"promptFeedback": feedback, "usageMetadata": usage(9, 0)}))
        assert told.kind is StreamErrorKind.FATAL
        assert told.message == "the provider blocked the prompt: PROHIBITED_CONTENT (not here)"
        assert told.partial.usage == Usage(9, 0)

    @pytest.mark.parametrize(
        "reason",
        "MALFORMED_FUNCTION_CALL MALFORMED_RESPONSE UNEXPECTED_TOOL_CALL".split(),  # noqa: SIM905
    )
    async def test_what_the_provider_cannot_read_is_asked_for_again(self, reason: str) -> None:
        candidate = {"finishReason": reason, "finishMessage": "print(1)"}
        broken = [chunk(thought("Hm"), text("")), event({"candidates": [candidate]})]
        told = await failure(*broken)
        assert told.kind is StreamErrorKind.ZERO_OUTPUT_TRANSPORT
        assert f"{reason} (print(1))" in told.message
        async with serving([stream(*broken), stream(*said())], retry=ONCE) as (_, transport):
            config = LoopConfig(stream=transport, clock=FakeClock())
            assert (await run("Hi", AgentContext(), config)).text == "Hello"

    async def test_what_follows_a_finish_reason_is_not_lost(self) -> None:
        """Gemini 3 has been seen to begin with one."""
        async with serving([stream(chunk(finish="STOP"), 0.05, *said())]) as (_, transport):
            last = (await ask(transport))[-1]
        assert isinstance(last, Done)
        assert (last.message.plain_text, last.message.usage) == ("Hello", Usage(9, 2))

    async def test_another_candidate_is_nobodys(self) -> None:
        other = {"index": 1, "content": {"parts": [text("No")]}, "finishReason": "SAFETY"}
        message = await answer(event({"candidates": [other]}), *said())
        assert message.plain_text == "Hello"

    async def test_calls_in_pieces_that_a_host_asked_for_are_refused(self) -> None:
        part = {"functionCall": {"name": "look", "willContinue": True}}
        told = await failure(chunk(part))
        assert told.kind is StreamErrorKind.FATAL
        assert "in pieces" in told.message

    @pytest.mark.parametrize("in_a_list", [False, True])
    async def test_an_answer_in_one_piece(self, in_a_list: bool) -> None:
        whole: Any = {"candidates": [{"content": {"parts": [text("Hi")]}, "finishReason": "STOP"}]}
        body = msgspec.json.format(msgspec.json.encode([whole] if in_a_list else whole), indent=2)
        assert (await answer(body)).plain_text == "Hi"

    async def test_a_compressed_stream(self) -> None:
        zipped = Answer(headers={"content-encoding": "gzip"}, body=gzip.compress(b"".join(said())))
        async with serving([zipped]) as (_, transport):
            assert isinstance((await ask(transport))[-1], Done)

    async def test_an_event_that_cannot_be_read(self) -> None:
        told = await failure(chunk(text("Hel")), b"data: {oops\n\n")
        assert told.kind is StreamErrorKind.TRANSIENT
        assert "{oops" in told.message
        assert told.partial.plain_text == "Hel"

    async def test_tags_are_left_alone_when_they_are_not_wanted(self) -> None:
        pieces = [chunk(text("<think>a</think>b")), chunk(finish="STOP")]
        assert (await answer(*pieces)).plain_text == "b"
        plain = await answer(*pieces, thinking_tags=False)
        assert plain.plain_text == "<think>a</think>b"


# --- failures ---------------------------------------------------------------------------------

RETRY_INFO = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "37s"}
TOO_LONG = "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."


@pytest.mark.slow
class TestFailures:
    @pytest.mark.parametrize(
        ("code", "status", "message", "kind"),
        [
            (400, "INVALID_ARGUMENT", "API key not valid.", StreamErrorKind.FATAL),
            (400, "INVALID_ARGUMENT", TOO_LONG, StreamErrorKind.CONTEXT_OVERFLOW),
            (403, "PERMISSION_DENIED", "No.", StreamErrorKind.FATAL),
            (404, "NOT_FOUND", "no such model", StreamErrorKind.FATAL),
            (429, "RESOURCE_EXHAUSTED", "Quota", StreamErrorKind.PROVIDER_RATE_LIMITED),
            (500, "INTERNAL", "oops", StreamErrorKind.TRANSIENT),
            (503, "UNAVAILABLE", "overloaded", StreamErrorKind.PROVIDER_RATE_LIMITED),
        ],
    )
    async def test_statuses(
        self, code: int, status: str, message: str, kind: StreamErrorKind
    ) -> None:
        async with serving([refusal(code, message, status)], retry=ONCE) as (_, transport):
            [told] = await ask(transport)
        assert isinstance(told, Error)
        assert told.kind is kind
        assert told.message.startswith(f"the server answered {code}: {message}")

    async def test_a_page(self) -> None:
        page = Answer(status=502, body=b"<html><title>Bad Gateway</title></html>")
        async with serving([page], retry=ONCE) as (_, transport):
            [told] = await ask(transport)
        assert isinstance(told, Error)
        assert (told.kind, told.message) == (
            StreamErrorKind.TRANSIENT,
            "the server answered 502: Bad Gateway",
        )

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (failing(503, "The model is overloaded."), StreamErrorKind.PROVIDER_RATE_LIMITED),
            (failing(500, "Internal", "INTERNAL"), StreamErrorKind.TRANSIENT),
            (failing(400, "Bad", "INVALID_ARGUMENT"), StreamErrorKind.FATAL),
        ],
    )
    async def test_told_in_the_middle(self, error: Any, kind: StreamErrorKind) -> None:
        told = await failure(chunk(text("Hel")), event(error))
        assert told.kind is kind
        assert error["error"]["message"] in told.message
        assert told.partial.plain_text == "Hel"

    @pytest.mark.parametrize(
        ("first", "seconds"),
        [
            (refusal(429, "Quota", "RESOURCE_EXHAUSTED", RETRY_INFO), 37.0),
            (refusal(503, "Later", "UNAVAILABLE", retry_after="7"), 7.0),
            (stream(event(failing(429, "Quota", "RESOURCE_EXHAUSTED", RETRY_INFO))), 37.0),
        ],
    )
    async def test_the_server_says_when_to_come_back(self, first: Answer, seconds: float) -> None:
        clock = FakeClock()
        async with serving([first, stream(*said())], clock=clock) as (_, transport):
            assert isinstance((await ask(transport))[-1], Done)
        assert clock.sleeps == [seconds]

    @pytest.mark.parametrize("own", [False, True], ids=["its client", "a client of the host"])
    async def test_the_sdk_does_not_ask_again_by_itself(self, own: bool) -> None:
        down = refusal(503, "Later", "UNAVAILABLE")
        async with ByteServer(lambda _: down) as server:
            settings = {"client": host_client(server.url)} if own else {"base_url": server.url}
            transport = gemini(retry=RetryPolicy(attempts=2), clock=FakeClock(), **settings)
            _, told = await ask(transport)
            assert isinstance(told, Error)
            assert "(2 attempts)" in told.message
            assert len(server.requests) == 2
            await close(transport, settings.get("client"))

    async def test_a_server_that_is_silent(self) -> None:
        held = stream(*said()[:1], hold=True)
        limits = Timeouts(idle=0.2)
        async with serving([held], timeouts=limits, retry=ONCE) as (server, transport):
            await transport._clients.get()  # making one takes longer than this server may
            told = (await ask(transport))[-1]
            assert isinstance(told, Error)
            assert told.kind is StreamErrorKind.TRANSIENT
            assert isinstance(told.cause, StreamTimeout)
            await server.client_gone()

    async def test_nobody_is_there(self) -> None:
        transport = gemini(base_url="http://127.0.0.1:9", retry=ONCE)
        [told] = await ask(transport)
        assert isinstance(told, Error)
        assert told.kind is StreamErrorKind.TRANSIENT
        assert "connection failed" in told.message
        await transport.aclose()

    async def test_a_server_that_does_not_accept(self) -> None:
        with ExitStack() as stack:
            full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            transport = gemini(base_url=url, retry=ONCE, timeouts=Timeouts(connect=0.1))
            [told] = await asyncio.wait_for(ask(transport), 10)
            await transport.aclose()
        assert isinstance(told, Error)
        assert told.kind is StreamErrorKind.TRANSIENT
        assert isinstance(told.cause, StreamTimeout)
        assert told.cause.phase == "connect"

    async def test_a_model_that_the_sdk_refuses(self) -> None:
        transport = gemini("a?b", base_url="http://127.0.0.1:9")
        [told] = await ask(transport)
        assert isinstance(told, Error)
        assert told.kind is StreamErrorKind.FATAL
        await transport.aclose()


# --- connections ------------------------------------------------------------------------------


def host_client(url: str) -> genai.Client:
    """A client that a host has made for itself."""
    options = genai.types.HttpOptions(base_url=url)
    return genai.Client(api_key=KEY, vertexai=False, http_options=options)


async def close(transport: Gemini, client: Any = None) -> None:
    await transport.aclose()
    if client is not None:
        await client.aio.aclose()
        client.close()


async def let_it_read() -> None:
    """Let the transport read until it has to wait, for the server or for somebody to take it."""
    for _ in range(2000):
        await asyncio.sleep(0)


async def leave_by_signal(transport: Gemini) -> None:
    signal = CancellationToken()
    async for told in transport(asking(), signal):
        if isinstance(told, Chunk) and not signal.cancelled:
            await let_it_read()
            signal.cancel("enough")
    assert isinstance(told, Error)
    assert (told.kind, told.message) == (StreamErrorKind.ABORTED, "enough")


async def leave_by_closing(transport: Gemini) -> None:
    async with aclosing(transport(asking(), CancellationToken())) as events:  # type: ignore[type-var]
        async for told in events:
            if isinstance(told, Chunk):
                await let_it_read()
                break


async def leave_by_cancelling_the_task(transport: Gemini) -> None:
    has_begun = asyncio.Event()

    async def read() -> None:
        async for told in transport(asking(), CancellationToken()):
            if isinstance(told, Chunk):
                has_begun.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(read())
    await has_begun.wait()
    await let_it_read()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


WAYS = [leave_by_signal, leave_by_closing, leave_by_cancelling_the_task]


@pytest.mark.slow
class TestConnections:
    @pytest.mark.parametrize("leave", WAYS)
    @pytest.mark.parametrize("own", [False, True], ids=["its client", "a client of the host"])
    @pytest.mark.parametrize("much", [False, True], ids=["waiting", "more than is read"])
    async def test_leaving_early_closes_the_response(
        self, leave: Callable[[Gemini], Any], own: bool, much: bool
    ) -> None:
        more = [chunk(text("x" * 2000))] * 3000 if much else []
        endless = stream(chunk(text("Hel")), *more, hold=True)
        async with ByteServer([endless]) as server:
            client = host_client(server.url) if own else None
            settings = {"client": client} if own else {"base_url": server.url}
            transport = gemini(clock=FakeClock(), **settings)
            await asyncio.wait_for(leave(transport), 10)
            await server.all_closed()
            await close(transport, client)

    async def test_are_used_again(self) -> None:
        async with serving(lambda _: stream(*said())) as (server, transport):
            for _ in range(3):
                assert isinstance((await ask(transport))[-1], Done)
                assert server.open_connections == 1

    async def test_of_calls_at_once_do_not_mix(self) -> None:
        def echo(request: Any) -> Answer:
            [content] = msgspec.json.decode(request.body)["contents"]
            return stream(0.01, *said(content["parts"][0]["text"]))

        async with serving(echo) as (_, transport):
            asked = [asking(UserMessage(f"number {n}")) for n in range(20)]
            answers = await asyncio.gather(*[ask(transport, request) for request in asked])
        said_back = [events[-1].message.plain_text for events in answers]  # type: ignore[union-attr]
        assert said_back == [f"number {n}" for n in range(20)]

    async def test_are_closed(self) -> None:
        async with ByteServer(lambda _: stream(*said())) as server:
            transport = gemini(base_url=server.url)
            for _ in range(2):
                assert isinstance((await ask(transport))[-1], Done)
                await transport.aclose()
                await server.all_closed()

    async def test_the_conformance_kit(self) -> None:
        async with serving(lambda _: stream(*TestAnswer.WHOLE)) as (_, transport):
            report = await check_stream_fn(transport)
            assert report.message.plain_text == "Hello 🦀"

    async def test_the_conformance_kit_with_a_dead_port(self) -> None:
        transport = gemini(base_url="http://127.0.0.1:9", retry=ONCE)
        assert (await check_stream_fn(transport)).error is not None
        await transport.aclose()


@pytest.mark.slow
class TestClientOfTheHost:
    async def test_is_asked_the_same_and_says_the_same(self) -> None:
        async with ByteServer(lambda _: stream(*TestAnswer.WHOLE)) as server:
            client = host_client(server.url)
            theirs, ours = gemini(client=client), gemini(base_url=server.url)
            first, second = (await ask(theirs))[-1], (await ask(ours))[-1]
            assert isinstance(first, Done)
            assert first == second
            assert server.requests[0].body == server.requests[1].body
            await check_stream_fn(theirs)
            await theirs.aclose()
            assert isinstance((await ask(theirs))[-1], Done), "it stays open"
            await close(ours, client)

    async def test_does_not_go_on_by_itself(self) -> None:
        more = {"finishReason": "CONTINUATION", "continuationToken": "AA=="}
        first = event({"candidates": [{"content": {"parts": [text("Hel")]}, **more}]})
        async with ByteServer([stream(first)]) as server:
            client = host_client(server.url)
            transport = gemini(client=client)
            last = (await ask(transport))[-1]
            assert isinstance(last, Done)
            assert last.message.stop_reason is StopReason.MAX_TOKENS
            assert len(server.requests) == 1
            await close(transport, client)

    @pytest.mark.parametrize(
        ("reply", "kind"),
        [
            (refusal(400, TOO_LONG, "INVALID_ARGUMENT"), StreamErrorKind.CONTEXT_OVERFLOW),
            (stream(event(failing(503, "overloaded"))), StreamErrorKind.PROVIDER_RATE_LIMITED),
            (stream(b"data: {oops\n\n"), StreamErrorKind.TRANSIENT),
            (stream(chunk(text("Hel")), reset=True), StreamErrorKind.TRANSIENT),
        ],
    )
    async def test_failures(self, reply: Answer, kind: StreamErrorKind) -> None:
        async with ByteServer([reply]) as server:
            client = host_client(server.url)
            transport = gemini(client=client, retry=ONCE)
            told = (await ask(transport))[-1]
            assert isinstance(told, Error)
            assert told.kind is kind
            await close(transport, client)


@pytest.mark.slow
class TestKeys:
    def test_a_key_is_needed(self) -> None:
        with pytest.raises(ConfigError, match="GOOGLE_API_KEY or GEMINI_API_KEY"):
            Gemini(MODEL)
        with pytest.raises(ConfigError):
            Gemini(MODEL, base_url="https://generativelanguage.googleapis.com")

    def test_a_model_is_needed(self) -> None:
        with pytest.raises(ConfigError):
            Gemini("", api_key=KEY)

    @pytest.mark.parametrize("name", ["GOOGLE_API_KEY", "GEMINI_API_KEY"])
    async def test_from_the_environment(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        async with ByteServer(lambda _: stream(*said())) as server:
            monkeypatch.setenv("GEMINI_API_KEY", "second")
            monkeypatch.setenv(name, KEY)
            monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", server.url)
            # What else is there for other programs does not make this one talk to Vertex AI.
            monkeypatch.setenv("GOOGLE_GENAI_USE_VERTEXAI", "true")
            monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p")
            transport = Gemini(MODEL)
            await ask(transport)
            await transport.aclose()
        assert server.requests[0].headers["x-goog-api-key"] == KEY
        assert server.requests[0].path.startswith("/v1/models/")

    async def test_goes_only_where_it_belongs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GOOGLE_API_KEY", KEY)
        async with serving([stream(*said())], api_key=None) as (server, transport):
            assert isinstance((await ask(transport))[-1], Done)
            assert server.requests[0].headers["x-goog-api-key"] == "none"

    async def test_is_seen_nowhere(self, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        caplog.set_level(logging.DEBUG)
        secret = "canary-header-93ab"
        leak = f"the key {KEY} with {secret} is not valid"
        script = [
            refusal(503, leak, "UNAVAILABLE"),
            stream(event(failing(503, leak))),
            stream(chunk(text("Hel")), event(failing(400, leak, "INVALID_ARGUMENT"))),
            stream(*said()),
            refusal(401, leak, "UNAUTHENTICATED"),
        ]
        path, sink = tmp_path / "answers.jsonl", RecordingSink()
        seen: list[str] = []
        async with serving(script, headers={"x-secret": secret}) as (server, transport):
            recorder = RecordingStream(transport, path)
            for _ in range(2):
                seen += [repr(told) for told in await ask(recorder)]
            config = LoopConfig(stream=recorder, event_sink=sink, clock=FakeClock())
            with pytest.raises(Exception, match="redacted") as caught:
                await run("Hi", AgentContext(), config)
            assert len(server.requests) == len(script)
            assert server.requests[0].headers["x-secret"] == secret
            seen += [repr(transport), repr(caught.value), *map(repr, sink.events)]
        error: BaseException | None = caught.value
        while error is not None:
            seen += [str(error), repr(error.__dict__)]
            error = error.__cause__ or error.__context__
        seen += [path.read_text(), caplog.text]
        assert "[redacted]" in path.read_text()
        for text_ in seen:
            assert KEY not in text_
            assert secret not in text_


# --- a mock provider --------------------------------------------------------------------------


class TestAimock:
    def transport(self, aimock: Aimock, **settings: Any) -> Gemini:
        return gemini("gemini-2.5-flash", base_url=aimock.url, api_version="v1beta", **settings)

    async def test_the_kit(self, aimock: Aimock) -> None:
        aimock.load({"match": {}, "response": {"content": "Hello, one two three"}, "chunkSize": 4})
        transport = self.transport(aimock)
        report = await check_stream_fn(transport)
        assert report.message.plain_text == "Hello, one two three"
        await transport.aclose()

    async def test_a_run_with_tools(self, aimock: Aimock) -> None:
        calls = [{"name": "weather", "arguments": {"city": city}} for city in ("Oslo", "Rome")]
        aimock.play({"response": {"toolCalls": calls}}, {"response": {"content": "Cold and warm."}})

        @tool
        def weather(city: str) -> str:
            """Look up the weather of a city."""
            return f"weather of {city}"

        transport = self.transport(aimock)
        config = LoopConfig(stream=transport, tools=[weather], clock=FakeClock())
        result = await run("Oslo and Rome?", AgentContext("Be brief."), config)
        await transport.aclose()
        assert result.text == "Cold and warm."
        first, second = aimock.journal()
        assert first.path == "/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse"
        assert [message["role"] for message in first.body["messages"]] == ["system", "user"]
        assert first.body["tools"][0]["function"]["name"] == "weather"
        roles = [message["role"] for message in second.body["messages"]]
        assert roles == ["system", "user", "assistant", "tool", "tool"]
        answers = [message["content"] for message in second.body["messages"][-2:]]
        assert ["Oslo" in answers[0], "Rome" in answers[1]] == [True, True]
        asked = second.body["messages"][2]["tool_calls"]
        assert [msgspec.json.decode(c["function"]["arguments"]) for c in asked] == [
            {"city": "Oslo"},
            {"city": "Rome"},
        ]

    async def test_a_server_that_asks_for_patience(self, aimock: Aimock) -> None:
        error = {"error": {"message": "slow down"}, "status": 429, "retryAfter": 7}
        aimock.play({"response": error}, {"response": {"content": "Hello"}})
        clock = FakeClock()
        transport = self.transport(aimock, clock=clock)
        assert isinstance((await ask(transport))[-1], Done)
        assert clock.sleeps == [7.0]
        await transport.aclose()
