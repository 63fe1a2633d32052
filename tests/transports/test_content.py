"""What is neither text nor a call: it is kept, and goes back as it came.

Items of tools that run on the server's side, pictures, sources, files; on all four wires, in both
directions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    ConfigError,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    StopReason,
    StreamErrorKind,
    StreamRequest,
    TextContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
    dump_transcript,
    load_transcript,
)
from clark_agent.export import (
    to_anthropic_messages,
    to_markdown,
    to_openai_messages,
)
from clark_agent.messages.transcript import MessageLog
from clark_agent.stream import AnnotationChunk, BlockChunk, Chunk, Done, Error, Start
from clark_agent.testing.transport_kit import check_events_of
from clark_agent.transports import (
    Anthropic,
    Gemini,
    OpenAIChat,
    OpenAIResponses,
    Transport,
    convert_history,
)
from clark_agent.transports.dialects import COMPATIBLE, GROQ, OPENAI, OPENROUTER
from clark_agent.transports.http.response import Answer as Heard
from clark_agent.types import Annotation, AssistantBlock
from tests.transports import wires_anthropic as messages_wire
from tests.transports import wires_chat as chat_wire
from tests.transports import wires_gemini as gemini_wire
from tests.transports import wires_responses as responses_wire

NOWHERE = "http://127.0.0.1:9"
HI = UserMessage("Hi")
PNG = "data:image/png;base64,aGk="
PDF = "data:application/pdf;base64,aGk="
WAV = "data:audio/wav;base64,aGk="


def claude(model: str = "claude-sonnet-4-5", **settings: Any) -> Anthropic:
    return Anthropic(model, base_url=NOWHERE, **{"cache": False, **settings})


def responses(model: str = "gpt-5.2", **settings: Any) -> OpenAIResponses:
    return OpenAIResponses(model, base_url=f"{NOWHERE}/v1", **settings)


def chat(model: str = "m", **settings: Any) -> OpenAIChat:
    given = {"dialect": OPENAI, "api_key": "sk-none", **settings}
    return OpenAIChat(model, base_url=f"{NOWHERE}/v1", **given)


def gemini(model: str = "gemini-3-flash", **settings: Any) -> Gemini:
    return Gemini(model, base_url=NOWHERE, **settings)


EVERYBODY = {"anthropic": claude, "responses": responses, "chat": chat, "gemini": gemini}


def heard(transport: Transport[Any], *pieces: bytes) -> AssistantMessage:
    """The message that a whole response comes to, which must be what its chunks spell."""
    answer = Heard(thinking_tags=transport.thinking_tags, new_id=lambda: "new")
    decoder = transport._decoder(answer)
    for piece in pieces:
        decoder.feed(piece)
    decoder.end()
    answer.close()
    message = answer.message()
    assert decoder.is_complete
    assert isinstance(message, AssistantMessage), message
    begun = Start(AssistantMessage((), StopReason.OTHER))
    told = [Chunk(chunk) for chunk in answer.take()]
    assert not check_events_of([begun, *told, Done(message)])
    return stored(message)


def stored(message: AssistantMessage) -> AssistantMessage:
    """The same message, as it comes back from a file."""
    [loaded] = load_transcript(dump_transcript([message])).messages
    assert isinstance(loaded, AssistantMessage)
    assert loaded.content == message.content
    assert loaded.annotations == message.annotations
    return message


def asking(*history: AgentMessage, **fields: Any) -> StreamRequest:
    return StreamRequest(**{"system_prompt": "", "messages": history or (HI,), **fields})


def goes_back(transport: Transport[Any], *history: AgentMessage, **fields: Any) -> Any:
    """The history as the next request of the transport holds it."""
    body = transport.encode(asking(*history, **fields))
    return next(body[name] for name in ("messages", "input", "contents") if name in body)


def said(*blocks: AssistantBlock, notes: Sequence[Annotation] = ()) -> AssistantMessage:
    return AssistantMessage(blocks, StopReason.END_TURN, annotations=tuple(notes))


# --- Anthropic --------------------------------------------------------------------------------

SEARCH = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "srv_1",
    "content": [{"type": "web_search_result", "url": "https://a", "encrypted_content": "e=="}],
    "caller": {"type": "direct"},
}
SO = {"type": "text", "text": "So."}
CITED = {
    "type": "web_search_result_location",
    "url": "https://a",
    "title": "A",
    "cited_text": "in full",
    "encrypted_index": "i==",
}


class TestAnthropic:
    wire = messages_wire

    def pieces(self) -> list[bytes]:
        wire = self.wire
        return [
            wire.begun(input_tokens=5),
            wire.thinking(0, "Search.", "s1"),
            wire.start(1, "server_tool_use", id="srv_1", name="web_search", input={}),
            wire.delta(1, "input_json_delta", partial_json='{"que'),
            wire.delta(1, "input_json_delta", partial_json='ry": "x"}'),
            wire.stop(1),
            wire.event("content_block_start", index=2, content_block=FOUND),
            wire.stop(2),
            wire.thinking(3, "Found.", "s2"),
            wire.text(4, "So: "),
            wire.start(5, "text", text="", citations=[]),
            wire.delta(5, "citations_delta", citation=CITED),
            wire.delta(5, "text_delta", text="it is so"),
            wire.stop(5),
            wire.text(6, "."),
            wire.finished("end_turn", output_tokens=2),
            wire.END,
        ]

    def test_items_stand_between_the_thoughts_and_go_back_as_they_came(self) -> None:
        transport = claude()
        message = heard(transport, *self.pieces())
        kinds = [type(block) for block in message.content]
        assert kinds == [
            ReasoningContent,
            ReasoningDetailsContent,
            ProviderContent,
            ProviderContent,
            ReasoningContent,
            ReasoningDetailsContent,
            TextContent,
        ]
        assert [b.data for b in message.content if isinstance(b, ProviderContent)] == [
            SEARCH,
            FOUND,
        ]
        note = Annotation("url", "https://a", "A", "in full", 4, 12, "anthropic", CITED)
        assert message.annotations == (note,)
        assert message.plain_text[4:12] == "it is so"
        back = goes_back(transport, HI, message, UserMessage("And?"))[1]["content"]
        assert back == [
            {"type": "thinking", "thinking": "Search.", "signature": "s1"},
            SEARCH,
            FOUND,
            {"type": "thinking", "thinking": "Found.", "signature": "s2"},
            {"type": "text", "text": "So: "},
            {"type": "text", "text": "it is so", "citations": [CITED]},
            {"type": "text", "text": "."},
        ]

    def test_a_message_in_one_piece(self) -> None:
        cited = {"type": "text", "text": "So", "citations": [CITED]}
        whole = {"type": "message", "content": [SEARCH, FOUND, cited], "stop_reason": "end_turn"}
        message = heard(claude(), json.dumps(whole).encode())
        assert goes_back(claude(), HI, message, HI)[1]["content"] == [SEARCH, FOUND, cited]

    def test_marks_for_the_cache_do_not_stain_the_transcript(self) -> None:
        message = said(TextContent("So"), ProviderContent("anthropic", {"type": "x"}))
        for _ in range(2):
            claude(cache=True).encode(asking(messages=MessageLog([HI, message]).view()))
        assert message.content[-1] == ProviderContent("anthropic", {"type": "x"})

    def test_a_call_on_the_server_that_was_cut_off_is_left_out(self) -> None:
        items = [ProviderContent("anthropic", item) for item in (SEARCH, FOUND)]
        history = (HI, said(TextContent("So"), items[0]), HI)
        assert goes_back(claude(), *history)[1]["content"] == [{"type": "text", "text": "So"}]
        open_call = said(items[0], ToolCall("a", "look", {}))
        back = goes_back(claude(), HI, open_call, ToolResultMessage("a", "look", ()))
        assert back[1]["content"][0] == SEARCH, "the server answers it in the next turn"

    def test_a_result_on_the_server_without_its_call_is_left_out(self) -> None:
        search, found = (ProviderContent("anthropic", item) for item in (SEARCH, FOUND))
        so = TextContent("So.")
        only = AssistantMessage((found, so), StopReason.END_TURN)
        reversed_ = AssistantMessage((found, search, so), StopReason.END_TURN)
        for message in (only, reversed_):
            assert goes_back(claude(), HI, message, HI)[1]["content"] == [SO]

    def test_a_result_on_the_server_may_come_in_the_turn_after_its_call(self) -> None:
        search, found = (ProviderContent("anthropic", item) for item in (SEARCH, FOUND))
        asks = AssistantMessage((search, ToolCall("a", "look", {})), StopReason.TOOL_USE)
        result = ToolResultMessage("a", "look", (TextContent("Here"),))
        then = AssistantMessage((found, TextContent("So.")), StopReason.END_TURN)
        turns = goes_back(claude(), HI, asks, result, then, HI)
        assert turns[1]["content"][0] == SEARCH
        assert turns[3]["content"] == [FOUND, SO]

    def test_input_that_is_cut_off_is_kept(self) -> None:
        message = heard(
            claude(),
            self.wire.begun(),
            self.wire.start(0, "mcp_tool_use", id="m", name="n", server_name="s", input={}),
            self.wire.delta(0, "input_json_delta", partial_json='{"a'),
            self.wire.finished("max_tokens"),
            self.wire.END,
        )
        [block] = message.content
        assert isinstance(block, ProviderContent)
        assert block.data["input"] == {"invalid_json": '{"a'}

    def test_a_compaction_is_kept_whole(self) -> None:
        message = heard(
            claude(),
            self.wire.start(0, "compaction", content=None),
            self.wire.delta(0, "compaction_delta", content="Before: a lot."),
            self.wire.stop(0),
            self.wire.text(1, "So"),
            self.wire.finished("end_turn"),
            self.wire.END,
        )
        assert message.content[0] == ProviderContent(
            "anthropic", {"type": "compaction", "content": "Before: a lot."}
        )

    def paused(self, *pieces: bytes, container: str | None = None, **usage: int) -> Any:
        told = {"stop_reason": "pause_turn", "container": container and {"id": container}}
        end = self.wire.event("message_delta", delta=told, usage=usage)
        return self.wire.stream(self.wire.begun(input_tokens=5), *pieces, end, self.wire.END)

    @pytest.mark.slow
    async def test_a_turn_that_the_server_pauses_goes_on(self) -> None:
        wire = self.wire
        search = wire.event("content_block_start", index=1, content_block=SEARCH) + wire.stop(1)
        found = wire.event("content_block_start", index=0, content_block=FOUND) + wire.stop(0)
        script = [
            self.paused(wire.text(0, "Half "), search, container="c_1", output_tokens=2),
            wire.refused(529, "overloaded", "overloaded_error"),
            self.paused(found, wire.text(1, "an "), output_tokens=3),
            wire.stream(
                wire.begun(input_tokens=7),
                wire.text(0, "answer"),
                wire.finished("end_turn", output_tokens=4),
                wire.END,
            ),
        ]
        async with wire.serving(script) as (server, transport):
            request = asking(system_prompt="s", max_output_tokens=9)
            events = [e async for e in transport(request, CancellationToken())]
        assert not check_events_of(events)
        done = events[-1]
        assert isinstance(done, Done)
        assert done.message.content == (
            TextContent("Half "),
            ProviderContent("anthropic", SEARCH),
            ProviderContent("anthropic", FOUND),
            TextContent("an answer"),
        )
        assert done.message.stop_reason is StopReason.END_TURN
        assert done.message.usage == Usage(17, 9)
        first, *others = [json.loads(request.body) for request in server.requests]
        assert others[0] == others[1], "asked again after the refusal"
        half = {"type": "text", "text": "Half "}
        for body, blocks in ((others[0], [half, SEARCH]), (others[2], [half, SEARCH, FOUND])):
            assert body.pop("container", None) == ("c_1" if body is others[0] else None)
            more = [{"type": "text", "text": "an"}] if body is others[2] else []
            turn = {"role": "assistant", "content": [*blocks, *more]}
            assert body == {**first, "messages": [*first["messages"], turn]}

    @pytest.mark.slow
    async def test_pauses_have_an_end(self) -> None:
        pause = self.paused(self.wire.text(0, "x"))
        async with self.wire.serving(lambda _: pause) as (server, transport):
            [*_, done] = [e async for e in transport(asking(), CancellationToken())]
        assert isinstance(done, Done)
        assert done.message == AssistantMessage(
            (TextContent("x" * 11),), StopReason.OTHER, usage=Usage(55)
        )
        assert len(server.requests) == 11

    @pytest.mark.slow
    async def test_a_failure_behind_a_pause_loses_nothing(self) -> None:
        wire = self.wire
        script = [
            self.paused(wire.text(0, "Half "), output_tokens=1),
            wire.stream(wire.begun(), wire.start(0, "text", text="a"), wire.failed("no")),
        ]
        async with wire.serving(script) as (_, transport):
            events = [e async for e in transport(asking(), CancellationToken())]
        assert not check_events_of(events)
        assert isinstance(events[-1], Error)
        assert events[-1].partial.plain_text == "Half a"

    @pytest.mark.slow
    async def test_half_a_character_does_not_keep_a_paused_turn_from_going_on(self) -> None:
        wire = self.wire
        block = {**SEARCH, "input": {"query": "\ud83d"}}
        start = {"type": "content_block_start", "index": 0, "content_block": block}
        half = f"event: content_block_start\ndata: {json.dumps(start)}\n\n".encode()
        script = [self.paused(half, wire.stop(0)), wire.stream(*wire.said())]
        async with wire.serving(script) as (server, transport):
            [*_, done] = [e async for e in transport(asking(), CancellationToken())]
        assert isinstance(done, Done)
        [sent] = json.loads(server.requests[1].body)["messages"][-1]["content"]
        assert sent["input"] == {"query": "\ufffd"}

    @pytest.mark.slow
    async def test_an_event_behind_a_pause_that_is_no_json_is_asked_for_again(self) -> None:
        wire = self.wire
        script = [
            self.paused(wire.text(0, "Half ")),
            wire.stream(b"data: {\n\n", *wire.said()),
            wire.stream(*wire.said()),
        ]
        async with wire.serving(script) as (server, transport):
            events = [e async for e in transport(asking(), CancellationToken())]
        assert not check_events_of(events)
        assert isinstance(events[-1], Done)
        assert len(server.requests) == 3

    @pytest.mark.slow
    async def test_a_skill_is_loaded_again_into_the_container(self) -> None:
        script = [self.paused(container="c_1"), self.wire.stream(*self.wire.said())]
        extras = {"container": {"skills": [1]}}
        async with self.wire.serving(script) as (server, transport):
            request = asking(provider_extras=extras)
            async for _ in transport(request, CancellationToken()):
                pass
        assert json.loads(server.requests[1].body)["container"] == {"skills": [1], "id": "c_1"}


# --- Responses --------------------------------------------------------------------------------

WEB = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}}
CODE = {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "c"}
DRAWN = {
    "type": "image_generation_call",
    "id": "ig_1",
    "status": "completed",
    "output_format": "webp",
    "revised_prompt": "a cat",
    "result": "aGk=",
}
URL = {"type": "url_citation", "url": "https://a", "title": "A", "start_index": 1, "end_index": 3}


class TestResponses:
    wire = responses_wire

    def test_items_go_back_as_they_came(self) -> None:
        wire, transport = self.wire, responses()
        items = [
            wire.reasoning(["Search."], "blob1", "rs_1"),
            WEB,
            CODE,
            wire.reasoning(["Say."], "blob2", "rs_2"),
        ]
        pieces = [
            p for n, item in enumerate(items) for p in (wire.added(item, n), wire.done(item, n))
        ]
        pieces += [wire.text_delta("So", 4), wire.completed(*items, wire.message("So"))]
        message = heard(transport, *pieces)
        assert [b.data for b in message.content if isinstance(b, ProviderContent)] == [WEB, CODE]
        back = goes_back(transport, HI, message, HI)[1:-1]
        assert [item["type"] for item in back] == [
            "reasoning",
            "web_search_call",
            "code_interpreter_call",
            "reasoning",
            "message",
        ]
        assert back[1:3] == [WEB, CODE]

    def test_items_that_come_at_the_end_of_all(self) -> None:
        message = heard(responses(), self.wire.completed(WEB, self.wire.message("So"), CODE))
        assert message.content == (
            ProviderContent("openai", WEB),
            TextContent("So"),
            ProviderContent("openai", CODE),
        )

    def test_a_picture_is_shown_and_goes_back_as_it_came(self) -> None:
        message = heard(responses(), self.wire.done(DRAWN, 0), self.wire.completed(DRAWN))
        item = {name: value for name, value in DRAWN.items() if name != "result"}
        picture = ImageContent("data:image/webp;base64,aGk=", "image/webp", "a cat")
        assert message.content == (ProviderContent("openai", item), picture)
        assert goes_back(responses(), HI, message, HI)[1:-1] == [DRAWN]

    def test_an_item_that_waits_for_the_host_is_an_answer_and_stays_here(self) -> None:
        asked = {"type": "mcp_approval_request", "id": "m", "name": "rm", "arguments": "{}"}
        message = heard(responses(), self.wire.done(asked, 0), self.wire.completed(asked))
        assert message.content == (ProviderContent("openai", asked),)
        assert len(goes_back(responses(), HI, message, HI)) == 2

    def test_sources(self) -> None:
        whole = self.wire.message("é so.", "m")
        file = {"type": "file_citation", "file_id": "f", "filename": "a.pdf", "index": 0}
        whole["content"][0]["annotations"] = [URL, file]
        kind = "response.output_text.annotation.added"
        message = heard(
            responses(),
            self.wire.text_delta("<think>hm</think>", 0, "m"),
            self.wire.text_delta("One. ", 0, "m"),
            self.wire.text_delta("é so.", 1, "n"),
            self.wire.event(kind, annotation=URL, item_id="n", output_index=1, content_index=0),
            self.wire.done({**whole, "id": "n"}, 1),
            self.wire.completed(),
        )
        assert message.plain_text == "One. é so."
        assert message.annotations == (
            Annotation("url", "https://a", "A", None, 6, 8, "openai", URL),
            Annotation("file", title="a.pdf", provider="openai", data=file),
        )

    @pytest.mark.parametrize("in_pieces", [True, False])
    def test_custom_calls(self, in_pieces: bool) -> None:
        item = {"type": "custom_tool_call", "id": "ct", "call_id": "c1", "name": "py"}
        kind = "response.custom_tool_call_input"
        pieces = [
            self.wire.added({**item, "input": ""}, 0),
            self.wire.event(f"{kind}.delta", delta='say("', item_id="ct", output_index=0),
            self.wire.event(f"{kind}.delta", delta='é")\n', item_id="ct", output_index=0),
        ]
        whole = {**item, "input": 'say("é")\n'}
        ends = [self.wire.done(whole, 0), self.wire.completed(whole)]
        message = heard(responses(), *(pieces if in_pieces else ()), *ends)
        assert message.content == (ToolCall("c1", "py", {"input": 'say("é")\n'}),)
        result = ToolResultMessage("c1", "py", (TextContent("é"),))
        extras = {"tools": [{"type": "custom", "name": "py"}]}
        back = goes_back(responses(), HI, message, result, provider_extras=extras)
        sent = {name: value for name, value in whole.items() if name != "id"}
        assert back[1] == sent
        assert back[2] == {"type": "custom_tool_call_output", "call_id": "c1", "output": "é"}
        plain = goes_back(responses(), HI, message, result)
        assert [item["type"] for item in plain[1:]] == ["function_call", "function_call_output"]

    def test_the_key_of_the_cache(self) -> None:
        assert responses(prompt_cache_key="k").encode(asking())["prompt_cache_key"] == "k"
        assert "prompt_cache_key" not in responses().encode(asking())


# --- Chat Completions -------------------------------------------------------------------------


class TestChat:
    wire = chat_wire

    def answer(self, *deltas: dict[str, Any], finish: str = "stop", **settings: Any) -> Any:
        pieces = [self.wire.chunk(**delta) for delta in deltas]
        return heard(chat(**settings), *pieces, self.wire.chunk(finish))

    def test_sources_of_the_whole_answer(self) -> None:
        """Perplexity repeats them with every event; xAI has addresses alone, at the end."""
        found = [{"title": "A", "url": "https://a", "date": None}, {"url": 7}, 7]
        pieces = [
            self.wire.event({"choices": [{"index": 0, "delta": {"content": "It"}}], **more})
            for more in (
                {"search_results": found, "citations": ["https://a"]},
                {"search_results": found, "citations": ["https://a", "https://b", None]},
                {"search_results": {}, "citations": "https://c"},
            )
        ]
        message = heard(chat(), *pieces, self.wire.chunk("stop"))
        assert message.plain_text == "ItItIt"
        assert [(a.kind, a.url, a.title, a.data) for a in message.annotations] == [
            ("url", "https://a", "A", found[0]),
            ("url", "https://b", None, "https://b"),
        ]

    def test_pictures_and_sources(self) -> None:
        url = {"type": "url_citation", "url_citation": {**URL, "content": "in full"}}
        message = self.answer(
            {"content": " <think>hm</think>Look: "},
            {"images": [{"type": "image_url", "image_url": {"url": PNG}, "index": 0}]},
            {"content": "there", "annotations": [url, 7]},
        )
        assert message.content[-3:] == (
            TextContent("Look: "),
            ImageContent(PNG),
            TextContent("there"),
        )
        assert [(a.url, a.quote, a.data) for a in message.annotations] == [
            ("https://a", "in full", url)
        ]
        back = goes_back(chat(), HI, message, UserMessage("Now red."))
        assert [m["role"] for m in back] == ["user", "assistant", "user", "user"]
        assert back[2]["content"][1] == {"type": "image_url", "image_url": {"url": PNG}}

    def test_a_picture_alone_is_an_answer(self) -> None:
        message = self.answer({"images": [{"image_url": {"url": PNG}}]})
        assert message.content == (ImageContent(PNG),)

    def test_what_is_spoken_is_text(self) -> None:
        message = self.answer(
            {"audio": {"id": "a"}},
            {"audio": {"transcript": "He"}},
            {"audio": {"transcript": "llo"}},
        )
        assert message.content == (TextContent("Hello"),)

    def test_the_call_of_old(self) -> None:
        message = self.answer(
            {"function_call": {"name": "look", "arguments": ""}},
            {"function_call": {"arguments": '{"at": 1}'}},
            finish="function_call",
        )
        assert message.content == (ToolCall("new", "look", {"at": 1}),)
        assert message.stop_reason is StopReason.TOOL_USE

    def test_custom_calls(self) -> None:
        def piece(**fields: Any) -> dict[str, Any]:
            return {"tool_calls": [{"index": 0, **fields}]}

        message = self.answer(
            piece(id="c1", type="custom", custom={"name": "py", "input": 'say("'}),
            piece(custom={"input": "😀"}),
            piece(custom={"input": '")'}),
            finish="tool_calls",
        )
        assert message.content == (ToolCall("c1", "py", {"input": 'say("😀")'}),)
        extras = {"tools": [{"type": "custom", "custom": {"name": "py"}}]}
        result = ToolResultMessage("c1", "py", (TextContent("é"),))
        back = goes_back(chat(), HI, message, result, provider_extras=extras)
        custom = {"name": "py", "input": 'say("😀")'}
        assert back[1]["tool_calls"] == [{"id": "c1", "type": "custom", "custom": custom}]
        assert goes_back(chat(), HI, message, result)[1]["tool_calls"][0]["type"] == "function"

    def test_the_signature_of_a_call_goes_back_to_the_model_that_made_it(self) -> None:
        signed = {"google": {"thought_signature": "S=="}}
        calls = [
            {"index": n, "id": name, "function": {"name": "look", "arguments": "{}"}}
            for n, name in enumerate("ab")
        ]
        settings: dict[str, Any] = {"model": "gemini-3-pro", "dialect": COMPATIBLE}
        message = self.answer(
            {"tool_calls": [{**calls[0], "extra_content": signed}]},
            {"tool_calls": [calls[1]]},
            finish="tool_calls",
            **settings,
        )
        results = [ToolResultMessage(name, "look", (TextContent("x"),)) for name in "ab"]
        history = (HI, message, *results)
        back = goes_back(chat(**settings), *history)[1]["tool_calls"]
        assert [call.get("extra_content") for call in back] == [signed, None]
        others = goes_back(chat("gemini-3-flash", dialect=COMPATIBLE), *history)[1]["tool_calls"]
        skip = {"google": {"thought_signature": "skip_thought_signature_validator"}}
        assert [call.get("extra_content") for call in others] == [skip, None]
        for dialect in (OPENAI, GROQ, OPENROUTER):
            assert "extra_content" not in str(goes_back(chat(dialect=dialect), *history))
        assert "extra_content" not in str(goes_back(chat("qwen", dialect=COMPATIBLE), *history))

    def test_the_key_of_the_cache(self) -> None:
        assert chat(prompt_cache_key="k").encode(asking())["prompt_cache_key"] == "k"
        assert "prompt_cache_key" not in chat().encode(asking())


class TestCacheMarks:
    history = (
        HI,
        AssistantMessage.from_calls([ToolCall("a", "look", {})]),
        ToolResultMessage("a", "look", (TextContent("seen"),)),
        AssistantMessage.from_text("So"),
        UserMessage((TextContent("And"), ImageContent(PNG))),
    )

    def marked(self, model: str = "anthropic/claude-opus-4.6", **settings: Any) -> list[Any]:
        transport = chat(model, **{"dialect": OPENROUTER, **settings})
        view = MessageLog(self.history).view((UserMessage("for this request alone"),))
        body = transport.encode(asking(messages=view, system_prompt="s"))
        return [
            (place, part["cache_control"])
            for place, message in enumerate(body["messages"])
            for part in (message["content"] if isinstance(message["content"], list) else ())
            if "cache_control" in part
        ]

    def test_behind_openrouter(self) -> None:
        mark = {"type": "ephemeral"}
        assert self.marked() == [(0, mark), (3, mark), (5, mark)]
        assert self.marked("~anthropic/claude-sonnet-latest") == self.marked()

    def test_how_long(self) -> None:
        assert {str(mark) for _, mark in self.marked(cache="1h")} == {
            str({"type": "ephemeral", "ttl": "1h"})
        }
        body = claude(cache="1h").encode(asking(system_prompt="s"))
        assert body["system"][0]["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
        assert claude(cache="5m").encode(asking(system_prompt="s"))["system"][0][
            "cache_control"
        ] == {"type": "ephemeral", "ttl": "5m"}

    def test_where_they_are_not_wanted(self) -> None:
        assert self.marked(cache=False) == []
        assert self.marked("openai/gpt-5.2") == []
        assert self.marked(dialect=COMPATIBLE) == []

    @pytest.mark.parametrize("make", [claude, chat])
    def test_nonsense(self, make: Any) -> None:
        with pytest.raises(ConfigError, match="cache must be"):
            make(cache="2h")


# --- Gemini -----------------------------------------------------------------------------------

RAN = {"executableCode": {"language": "PYTHON", "code": "1"}}
CAME = {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}}


class TestGemini:
    wire = gemini_wire

    def test_items_and_pictures_go_back_signed_as_they_came(self) -> None:
        wire, transport = self.wire, gemini()
        inline = {"inlineData": {"mimeType": "image/png", "data": "aGk="}}
        speech = {"inlineData": {"mimeType": "audio/wav", "data": "aGk="}}
        draft = {**inline, "thought": True}
        parts = [
            {**RAN, "thoughtSignature": "s1"},
            CAME,
            wire.text("So"),
            draft,
            {**inline, "thoughtSignature": "s2"},
            speech,
        ]
        message = heard(transport, *[wire.chunk(part) for part in parts], wire.chunk(finish="STOP"))
        shown = [b for b in message.content if not isinstance(b, ReasoningDetailsContent)]
        assert shown == [
            ProviderContent("google", RAN),
            ProviderContent("google", CAME),
            TextContent("So"),
            ProviderContent("google", draft),
            ImageContent(PNG, "image/png"),
            ProviderContent("google", speech),
        ]
        assert goes_back(transport, HI, message, HI)[1]["parts"] == parts
        other = goes_back(gemini("gemini-3-pro"), HI, message, HI)[1]["parts"]
        unsigned = [{k: v for k, v in part.items() if k != "thoughtSignature"} for part in parts]
        assert other == unsigned, "a signature is for one model"

    def test_a_picture_alone_is_an_answer(self) -> None:
        inline = {"inlineData": {"mimeType": "image/png", "data": "aGk="}}
        message = heard(gemini(), self.wire.chunk(inline, finish="STOP"))
        assert message.content == (ImageContent(PNG, "image/png"),)

    def grounded(self, *pieces: bytes, **fields: Any) -> tuple[Annotation, ...]:
        last = self.wire.event({"candidates": [{"finishReason": "STOP", **fields}]})
        return heard(gemini(), *pieces, last).annotations

    def test_sources(self) -> None:
        web = [{"web": {"uri": f"https://{name}", "title": name}} for name in "ab"]
        kept = {"retrievedContext": {"uri": "gs://c", "title": "c", "text": "in full"}}
        supports = [
            {"segment": {"endIndex": 7, "text": "é so"}, "groundingChunkIndices": [0, 1, 9]},
            {"segment": {"startIndex": 8, "endIndex": 11}, "groundingChunkIndices": [1]},
        ]
        metadata = {
            "webSearchQueries": ["x"],
            "searchEntryPoint": {"renderedContent": "<b>"},
            "groundingChunks": [*web, kept],
            "groundingSupports": supports,
        }
        pieces = [
            self.wire.chunk(self.wire.text(t)) for t in ("<think>", "é</think>é é ", "so, yes")
        ]
        notes = self.grounded(*pieces, groundingMetadata=metadata)
        said = "é é so, yes"
        assert [(n.kind, n.title, n.quote) for n in notes] == [
            ("search", None, None),
            ("url", "a", None),
            ("url", "b", None),
            ("url", "b", None),
            ("url", "c", "in full"),
        ]
        assert notes[0].data == {name: metadata[name] for name in list(metadata)[:2]}
        assert all(n.end is None or n.end <= len(said) for n in notes)

    @pytest.mark.parametrize("text", ["It is so. Yes.", "é 😀. Yes."])
    def test_places_count_characters(self, text: str) -> None:
        start = len(text[:-4].encode())
        support = {
            "segment": {"startIndex": start, "endIndex": start + 4},
            "groundingChunkIndices": [0],
        }
        metadata = {"groundingChunks": [{"web": {"uri": "u"}}], "groundingSupports": [support]}
        [note] = self.grounded(self.wire.chunk(self.wire.text(text)), groundingMetadata=metadata)
        assert text[note.start : note.end] == "Yes."

    def test_what_was_copied_and_what_was_read(self) -> None:
        notes = self.grounded(
            self.wire.chunk(self.wire.text("So")),
            citationMetadata={"citationSources": [{"uri": "u", "endIndex": 2, "license": "MIT"}]},
            urlContextMetadata={"urlMetadata": [{"retrievedUrl": "v"}, 7]},
        )
        assert [(n.url, n.start, n.end) for n in notes] == [
            ("u", 0, 2),
            ("v", None, None),
            (None, None, None),
        ]

    def test_nonsense_is_no_reason_to_fail(self) -> None:
        metadata = {"groundingChunks": 7, "groundingSupports": [7, {"groundingChunkIndices": "a"}]}
        pieces = [self.wire.chunk(self.wire.text("So"))]
        assert self.grounded(*pieces, groundingMetadata=metadata) == ()
        assert self.grounded(*pieces, groundingMetadata=7) == ()


# --- files ------------------------------------------------------------------------------------

TAKEN: list[tuple[str, FileContent, Any]] = [
    (
        "anthropic",
        FileContent(PDF, name="a.pdf"),
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
            "title": "a.pdf",
        },
    ),
    (
        "anthropic",
        FileContent("https://x/a.pdf"),
        {"type": "document", "source": {"type": "url", "url": "https://x/a.pdf"}},
    ),
    (
        "anthropic",
        FileContent("data:text/markdown,%C3%A9"),
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "é"}},
    ),
    (
        "anthropic",
        FileContent(PNG),
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
    ),
    (
        "responses",
        FileContent(PDF, name="a.pdf"),
        {"type": "input_file", "filename": "a.pdf", "file_data": PDF},
    ),
    (
        "responses",
        FileContent("https://x/a.pdf"),
        {"type": "input_file", "file_url": "https://x/a.pdf"},
    ),
    (
        "responses",
        FileContent(PNG),
        {"type": "input_image", "image_url": PNG, "detail": "auto"},
    ),
    (
        "chat",
        FileContent(PDF),
        {"type": "file", "file": {"filename": "file.pdf", "file_data": PDF}},
    ),
    (
        "chat",
        FileContent(WAV),
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    ),
    (
        "chat",
        FileContent("data:;base64,aGk=", name="a.mp3"),
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "mp3"}},
    ),
    ("chat", FileContent(PNG), {"type": "image_url", "image_url": {"url": PNG}}),
    ("gemini", FileContent(PDF), {"inlineData": {"mimeType": "application/pdf", "data": "aGk="}}),
    (
        "gemini",
        FileContent("gs://b/a", "audio/ogg"),
        {"fileData": {"fileUri": "gs://b/a", "mimeType": "audio/ogg"}},
    ),
]
REFUSED: list[tuple[str, FileContent]] = [
    ("anthropic", FileContent(WAV)),
    ("anthropic", FileContent("https://x/a.txt")),
    ("responses", FileContent(WAV)),
    ("chat", FileContent("https://x/a.pdf")),
    ("chat", FileContent("data:audio/ogg;base64,aGk=")),
    ("chat", FileContent("data:text/plain,x")),
    ("gemini", FileContent("data:;base64,aGk=")),
]


class TestFiles:
    @pytest.mark.parametrize(("who", "file", "part"), TAKEN)
    def test_each_provider_has_its_own_block(self, who: str, file: FileContent, part: Any) -> None:
        [message] = goes_back(EVERYBODY[who](), UserMessage((TextContent("Read"), file)))
        assert message.get("content", message.get("parts"))[1] == part

    @pytest.mark.parametrize(("who", "file", "part"), TAKEN)
    def test_in_results(self, who: str, file: FileContent, part: Any) -> None:
        called = AssistantMessage.from_calls([ToolCall("a", "look", {})])
        result = ToolResultMessage("a", "look", (TextContent("Here"), file))
        assert str(part) in str(goes_back(EVERYBODY[who](), HI, called, result))

    @pytest.mark.parametrize(("who", "file"), REFUSED)
    async def test_what_is_not_taken_is_refused_before_the_request(
        self, who: str, file: FileContent
    ) -> None:
        transport = EVERYBODY[who]()
        request = asking(HI, UserMessage((TextContent("Read"), file)))
        [error] = [e async for e in transport(request, CancellationToken())]
        assert isinstance(error, Error)
        assert error.kind is StreamErrorKind.FATAL
        assert error.message.startswith(f"{transport.provider} does not accept a file")
        assert "block 1 of message 1 (user)" in error.message

    @pytest.mark.parametrize("who", EVERYBODY)
    @pytest.mark.parametrize(
        "source", ["", "a.pdf", "/etc/passwd", "file:///etc/passwd", "https://"]
    )
    async def test_what_nobody_could_fetch_is_refused(self, who: str, source: str) -> None:
        request = asking(UserMessage((FileContent(source, "application/pdf"),)))
        [error] = [e async for e in EVERYBODY[who]()(request, CancellationToken())]
        assert isinstance(error, Error)
        assert error.kind is StreamErrorKind.FATAL
        assert "block 0 of message 0 (user)" in error.message

    @pytest.mark.parametrize("who", EVERYBODY)
    @pytest.mark.parametrize(
        "source",
        [
            "data:application/pdf;base64,SGk/",
            "data:application/pdf;BASE64,SGk/",
            "DATA:Application/PDF;base64,SGk/",
            "data:application/pdf;base64,SGk%2F",
            "data:application/pdf;charset=x;base64,SGk/",
            "data:application/pdf,Hi%3F",
        ],
    )
    def test_a_data_url_may_be_spelled_in_every_way(self, who: str, source: str) -> None:
        file = FileContent("data:application/pdf;base64,SGk/", name="a.pdf")
        plain = goes_back(EVERYBODY[who](), UserMessage((file,)))
        assert (
            goes_back(EVERYBODY[who](), UserMessage((FileContent(source, name="a.pdf"),))) == plain
        )

    async def test_what_is_no_base64_is_an_error_and_no_exception(self) -> None:
        for data, is_fine in (("SGk", True), ("SGk=", True), ("S", False)):
            file = FileContent(f"data:text/plain;base64,{data}")
            if is_fine:
                [turn] = goes_back(claude(), UserMessage((file,)))
                assert turn["content"][0]["source"]["data"] == "Hi"
            else:
                request = asking(UserMessage((file,)))
                [error] = [e async for e in claude()(request, CancellationToken())]
                assert isinstance(error, Error)
                assert error.message == "a file of type text/plain is not valid base64"

    @pytest.mark.parametrize("who", ["anthropic", "chat", "gemini"])
    async def test_an_address_that_is_none_has_no_type(self, who: str) -> None:
        request = asking(UserMessage((FileContent("http://[a.pdf"),)))
        [error] = [e async for e in EVERYBODY[who]()(request, CancellationToken())]
        assert isinstance(error, Error)
        assert "does not accept a file of type unknown" in error.message

    @pytest.mark.parametrize(
        ("dialect", "file", "is_taken"),
        [
            (OPENROUTER, FileContent("https://x/a.pdf"), True),
            (COMPATIBLE, FileContent(PDF), True),
            (GROQ, FileContent(PDF), False),
            (GROQ, FileContent(WAV), False),
            (GROQ, FileContent(PNG), True),
        ],
    )
    def test_servers_differ(self, dialect: Any, file: FileContent, is_taken: bool) -> None:
        transport, request = chat(dialect=dialect), asking(UserMessage((file,)))
        if is_taken:
            transport.encode(request)
        else:
            with pytest.raises(Exception, match=f"{dialect.name} does not accept a file"):
                transport.encode(request)


# --- for everybody ----------------------------------------------------------------------------

PRESENT = said(
    TextContent("Look: "),
    ProviderContent("anthropic", SEARCH),
    ProviderContent("anthropic", FOUND),
    ProviderContent("openai", WEB),
    ProviderContent("google", RAN),
    ImageContent(PNG, alt="a cat"),
    notes=[Annotation("url", "https://a", "A", start=0, end=4)],
)
OWN: dict[str, list[Any]] = {
    "anthropic": [SEARCH, FOUND],
    "responses": [WEB],
    "chat": [],
    "gemini": [RAN],
}


@pytest.mark.parametrize("who", EVERYBODY)
def test_items_go_to_their_provider_alone_and_pictures_to_everybody(who: str) -> None:
    transport = EVERYBODY[who]()
    back = goes_back(transport, HI, PRESENT, UserMessage("And?"))
    written = str(back)
    for name, items in OWN.items():
        assert all((str(item) in written) is (name == who) for item in items), name
    assert "aGk=" in written
    again = goes_back(transport, HI, *convert_history([PRESENT], transport.target), HI)
    assert str(again[:2]) == str(back[:2])


def test_they_are_told_as_they_come() -> None:
    answer = Heard()
    block, note = ProviderContent("openai", WEB), Annotation("url", "u", start=0, end=1)
    answer.text("<thi")
    answer.block(block)
    answer.annotate(note)
    answer.text("So")
    told = answer.take()
    assert told[1:3] == [BlockChunk(block), AnnotationChunk(note)]
    answer.close()
    message = answer.message()
    assert isinstance(message, AssistantMessage)
    assert message.content == (TextContent("<thi"), block, TextContent("So"))


def test_in_the_forms_that_others_read() -> None:
    asked = UserMessage((TextContent("Read"), FileContent(PDF, name="a.pdf")))
    history: list[AgentMessage] = [asked, PRESENT]
    openai, anthropic = to_openai_messages(history), to_anthropic_messages(history)
    assert openai[0]["content"][1] == {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": PDF},
    }
    assert openai[1]["content"] == "Look: "
    assert openai[2]["content"][-1]["image_url"]["url"].endswith("aGk=")
    assert anthropic[0]["content"][1]["type"] == "document"
    page = to_markdown(history)
    for shown in ("[a.pdf](embedded)", "![a cat](embedded)", "Source: [A](https://a)", "srv_1"):
        assert shown in page


@pytest.mark.parametrize("make", EVERYBODY.values())
def test_where_tags_are_thoughts(make: Any) -> None:
    for given, meant in ((True, "leading"), (False, "off"), ("anywhere", "anywhere")):
        assert make(thinking_tags=given).thinking_tags == meant
    with pytest.raises(ConfigError, match="thinking_tags"):
        make(thinking_tags="sometimes")
