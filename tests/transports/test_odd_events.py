"""One field of another type, one missing field or one bad byte costs at most its own event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import AssistantMessage, ImageContent, ProviderContent, StreamErrorKind
from clark_agent.intake import accept_answer
from clark_agent.messages import encode_json
from clark_agent.stream import Done, Error
from clark_agent.testing.transport_kit import check_events_of
from clark_agent.transports import Transport
from clark_agent.transports.http.response import Answer as Heard
from clark_agent.transports.http.response import Failure, ProviderFailure
from clark_agent.transports.stream_json import decode_event, encode_event
from tests.transports import wires_anthropic, wires_chat, wires_gemini, wires_responses
from tests.transports.servers.bytes_server import ByteServer
from tests.transports.wires_chat import ask, stream

# --- recorded streams -------------------------------------------------------------------------
# Every piece of text is a word of its own, so that one can see whether it is there.


def chat() -> list[Any]:
    def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1700000000,
            "model": "m",
            "choices": [choice],
            "usage": None,
        }

    def call(index: int, **fields: Any) -> dict[str, Any]:
        return {"index": index, **fields}

    begin = {"name": "look", "arguments": ""}
    thought = {"type": "reasoning.text", "text": "so", "index": 0, "format": "unknown"}
    cited = {"url": "u", "title": "t", "start_index": 0, "end_index": 5}
    source = {"type": "url_citation", "url_citation": cited}
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    return [
        chunk(role="assistant", content="", refusal=None),
        chunk(reasoning="hm", reasoning_details=[thought]),
        chunk(content="alpha "),
        chunk(content="beta "),
        chunk(content=[{"type": "text", "text": "gamma "}]),
        chunk(tool_calls=[call(0, id="c1", type="function", function=begin)]),
        chunk(tool_calls=[call(0, function={"arguments": '{"at": 1}'}, extra_content={"a": 1})]),
        chunk(images=[{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]),
        chunk(annotations=[source]),
        chunk("tool_calls"),
        {"id": "chatcmpl-1", "choices": [], "usage": usage},
        "[DONE]",
    ]


def responses() -> list[Any]:
    def delta(text: str) -> dict[str, Any]:
        return {
            "type": "response.output_text.delta",
            "item_id": "msg_1",
            "output_index": 1,
            "content_index": 0,
            "delta": text,
        }

    reasoning = {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": "sealed",
    }
    source = {"type": "url_citation", "url": "u", "title": "t", "start_index": 0, "end_index": 5}
    parts = [{"type": "output_text", "text": "alpha beta gamma ", "annotations": [source]}]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": parts}
    call = {
        "id": "fc_1",
        "type": "function_call",
        "call_id": "c1",
        "name": "look",
        "arguments": '{"at": 1}',
    }
    search = {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {}}
    picture = {"id": "ig_1", "type": "image_generation_call", "result": "aGk="}
    added = "response.output_item.added"
    done = "response.output_item.done"
    usage = {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 4,
    }
    response = {
        "id": "resp_1",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "output": [reasoning, message, search, picture, call],
        "usage": usage,
    }
    return [
        {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}},
        {"type": added, "output_index": 0, "item": {**reasoning, "encrypted_content": None}},
        {"type": done, "output_index": 0, "item": reasoning},
        {"type": added, "output_index": 1, "item": {**message, "content": []}},
        delta("alpha "),
        delta("beta "),
        delta("gamma "),
        {
            "type": "response.output_text.annotation.added",
            "item_id": "msg_1",
            "output_index": 1,
            "content_index": 0,
            "annotation": source,
        },
        {"type": done, "output_index": 1, "item": message},
        {"type": added, "output_index": 3, "item": search},
        {"type": done, "output_index": 3, "item": search},
        {"type": done, "output_index": 4, "item": picture},
        {"type": added, "output_index": 2, "item": {**call, "arguments": ""}},
        {
            "type": "response.function_call_arguments.delta",
            "item_id": "fc_1",
            "output_index": 2,
            "delta": '{"at": 1}',
        },
        {"type": done, "output_index": 2, "item": call},
        {"type": "response.completed", "response": response},
    ]


def messages() -> list[Any]:
    def delta(index: int, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": fields}

    def start(index: int, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": fields}

    def stop(index: int) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": index}

    usage = {"input_tokens": 9, "cache_read_input_tokens": 1, "output_tokens": 1}
    message = {"id": "msg_1", "role": "assistant", "content": [], "usage": usage}
    source = {"type": "web_search_result_location", "url": "u", "cited_text": "c"}
    end = {
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
        "container": {"id": "c"},
    }
    return [
        {"type": "message_start", "message": message},
        start(0, type="thinking", thinking="", signature=""),
        delta(0, type="thinking_delta", thinking="hm"),
        delta(0, type="signature_delta", signature="signed"),
        stop(0),
        start(1, type="redacted_thinking", data="sealed"),
        stop(1),
        start(2, type="text", text=""),
        {"type": "ping"},
        delta(2, type="text_delta", text="alpha "),
        delta(2, type="text_delta", text="beta "),
        delta(2, type="text_delta", text="gamma "),
        delta(2, type="citations_delta", citation=source),
        stop(2),
        start(3, type="server_tool_use", id="s1", name="web_search", input={}),
        delta(3, type="input_json_delta", partial_json='{"query": 1}'),
        stop(3),
        start(5, type="web_search_tool_result", tool_use_id="s1", content=[{"url": "u"}]),
        stop(5),
        start(4, type="tool_use", id="c1", name="look", input={}),
        delta(4, type="input_json_delta", partial_json='{"at": 1}'),
        stop(4),
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    ]


def gemini() -> list[Any]:
    def chunk(*parts: Any, finish: str | None = None, **more: Any) -> dict[str, Any]:
        candidate: dict[str, Any] = {
            "content": {"parts": list(parts), "role": "model"},
            "index": 0,
            **more,
        }
        if finish is not None:
            candidate["finishReason"] = finish
        usage = {
            "promptTokenCount": 9,
            "candidatesTokenCount": 4,
            "thoughtsTokenCount": 2,
            "cachedContentTokenCount": 1,
        }
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini-3"}

    call = {"name": "look", "args": {"at": 1}, "id": "c1"}
    segment = {"startIndex": 1, "endIndex": 5}
    grounding = {
        "webSearchQueries": ["q"],
        "groundingChunks": [{"web": {"uri": "u", "title": "t"}}],
        "groundingSupports": [{"segment": segment, "groundingChunkIndices": [0]}],
    }
    return [
        chunk({"text": "hm", "thought": True}),
        chunk({"text": "alpha "}),
        chunk({"text": "beta ", "thoughtSignature": "signed"}),
        chunk({"text": "gamma "}),
        chunk({"inlineData": {"mimeType": "image/png", "data": "aGk="}, "thoughtSignature": "s"}),
        chunk({"executableCode": {"code": "1"}}),
        chunk({"functionCall": call, "thoughtSignature": "signed"}),
        chunk({"text": ""}, finish="STOP", groundingMetadata=grounding),
    ]


WORDS = ("alpha ", "beta ", "gamma ")
TRANSPORTS: dict[str, tuple[Any, list[Any]]] = {
    "chat": (wires_chat, chat()),
    "responses": (wires_responses, responses()),
    "anthropic": (wires_anthropic, messages()),
    "gemini": (wires_gemini, gemini()),
}
every_wire = pytest.mark.parametrize("wire", TRANSPORTS)


def written(event: Any) -> bytes:
    payload = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
    name = event.get("type", "") if isinstance(event, dict) else ""
    head = f"event: {name}\n" if isinstance(name, str) and name else ""
    return f"{head}data: {payload}\n\n".encode()


@cache
def transport_of(wire: str) -> Transport[bytes]:
    made: Transport[bytes] = TRANSPORTS[wire][0].transport("http://127.0.0.1:9")
    return made


def heard(wire: str, data: bytes) -> AssistantMessage | tuple[Failure, AssistantMessage]:
    """What the bytes come to: a message, or a failure and what came before it."""
    answer = Heard()
    decoder = transport_of(wire)._decoder(answer)
    try:
        decoder.feed(data)
        decoder.end()
    except ProviderFailure as failed:
        answer.close()
        return failed.failure, answer.partial(failed.failure)
    answer.close()
    if not decoder.is_complete:
        unfinished = Failure(StreamErrorKind.EMPTY, "unfinished")
        return unfinished, answer.partial(unfinished)
    outcome = answer.message()
    if isinstance(outcome, Failure):
        return outcome, answer.partial(outcome)
    return outcome


def check(wire: str, events: list[bytes], spoilt: int, data: bytes) -> None:
    """What was said in the other events is all there, in its order, and nothing twice."""
    outcome = heard(wire, data)
    message = outcome[1] if isinstance(outcome, tuple) else outcome
    if isinstance(outcome, tuple):
        assert outcome[0].kind is not StreamErrorKind.FATAL, outcome[0]
        if not message.content:
            assert outcome[0].kind is StreamErrorKind.TRANSIENT, (
                "nothing came, and it is asked again"
            )
            return
    first = {word: [word.encode() in e for e in events].index(True) for word in WORDS}
    places = [message.plain_text.find(word) for word in WORDS if first[word] != spoilt]
    assert -1 not in places, (message.plain_text, data)
    assert places == sorted(places)
    assert all(message.plain_text.count(word) <= 1 for word in WORDS)


@every_wire
def test_as_recorded(wire: str) -> None:
    message = heard(wire, b"".join(map(written, TRANSPORTS[wire][1])))
    assert isinstance(message, AssistantMessage)
    assert message.plain_text == "alpha beta gamma "
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("look", {"at": 1})]
    assert message.usage is not None
    assert any(isinstance(block, ProviderContent) for block in message.content)
    assert any(isinstance(block, ImageContent) for block in message.content) or wire == "anthropic"
    assert [note.url for note in message.annotations if note.kind == "url"] == ["u"]


# --- a field ----------------------------------------------------------------------------------

Path = tuple[Any, ...]
OTHERS: tuple[Any, ...] = ("x", "0", 7, -1, 1.5, True, False, None, [], [7], {}, {"id": 7}, 1e300)
DROPPED = "(dropped)"
HALF = "\ud83d"


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every place in a document, the whole left out."""
    items: Any = value.items() if isinstance(value, dict) else ()
    for name, part in enumerate(value) if isinstance(value, list) else items:
        yield (*path, name)
        yield from paths(part, (*path, name))


def fields(wire: str) -> Iterator[tuple[int, Any, Path, Any]]:
    """Every field of a recorded answer: the number of its event, the event, its path, its value."""
    for number, event in enumerate(TRANSPORTS[wire][1]):
        for path in paths(event):
            value = event
            for name in path:
                value = value[name]
            yield number, event, path, value


def replaced(event: Any, path: Path, other: Any) -> Any:
    event = deepcopy(event)
    place = event
    for name in path[:-1]:
        place = place[name]
    if other is DROPPED:
        del place[path[-1]]
    else:
        place[path[-1]] = other
    return event


def is_of_another_type(value: Any, other: Any) -> bool:
    return type(value) is not type(other)


@every_wire
def test_any_field_may_be_of_any_other_type_or_missing(wire: str) -> None:
    events = [written(event) for event in TRANSPORTS[wire][1]]
    for number, event, path, before in fields(wire):
        for other in (*OTHERS, DROPPED):
            if other is not DROPPED and not is_of_another_type(before, other):
                continue
            spoilt = written(replaced(event, path, other))
            data = b"".join((*events[:number], spoilt, *events[number + 1 :]))
            check(wire, events, number, data)


@every_wire
@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_a_whole_event_may_be_anything(wire: str, other: Any) -> None:
    events = [written(event) for event in TRANSPORTS[wire][1]]
    for number in range(len(events) + 1):
        spoilt = written(json.dumps(other))
        check(wire, events, -1, b"".join((*events[:number], spoilt, *events[number:])))


# --- errors of other servers --------------------------------------------------------------------

TOLD = "This model's maximum context length is 10 tokens"
# As vLLM, DashScope, FastAPI, an API gateway and Google tell it in the middle of a stream.
ERRORS: dict[str, Any] = {
    "object": {"object": "error", "message": TOLD, "type": "BadRequestError", "code": 400},
    "flat": {"code": "InvalidParameter", "message": TOLD, "request_id": "r"},
    "typed": {"type": "error", "message": TOLD},
    "detail": {"detail": TOLD},
    "detail list": {"detail": [{"loc": ["body"], "msg": TOLD}]},
    "several": {"errors": [{"message": TOLD}]},
    "nested": {"error": {"message": TOLD}},
    "text": {"error": TOLD},
    "list": [{"error": {"message": TOLD, "code": 400}}],
}


@every_wire
@pytest.mark.parametrize("shape", ERRORS)
def test_an_error_of_another_shape_ends_the_answer(wire: str, shape: str) -> None:
    events = [written(event) for event in TRANSPORTS[wire][1]]
    for number in (0, 5, len(events) - 1):
        body = b"".join((*events[:number], written(ERRORS[shape]), written("[DONE]")))
        outcome = heard(wire, body)
        assert isinstance(outcome, tuple), "what is cut off by an error is not whole"
        assert TOLD in outcome[0].message
        assert outcome[0].kind is not StreamErrorKind.EMPTY


@every_wire
@pytest.mark.parametrize("shape", ERRORS)
def test_an_error_instead_of_a_stream_is_told(wire: str, shape: str) -> None:
    outcome = heard(wire, json.dumps(ERRORS[shape]).encode())
    assert isinstance(outcome, tuple)
    assert TOLD in outcome[0].message


@every_wire
@pytest.mark.parametrize(
    "news", [{"type": "warning", "message": "soon"}, {"message": {"a": 1}}, {}]
)
def test_what_is_no_error_is_none(wire: str, news: Any) -> None:
    events = [written(event) for event in TRANSPORTS[wire][1]]
    outcome = heard(wire, b"".join((*events[:4], written(news), *events[4:])))
    assert isinstance(outcome, AssistantMessage)
    assert outcome.plain_text == "alpha beta gamma "


@every_wire
@pytest.mark.parametrize("page", [b"<html><p>Please log in.</p>", b"Please log in.\n"])
def test_what_is_no_stream_is_quoted(wire: str, page: bytes) -> None:
    outcome = heard(wire, page)
    assert isinstance(outcome, tuple)
    assert outcome[0].kind is StreamErrorKind.EMPTY
    assert outcome[0].message.endswith("but: Please log in.")


# --- half a character ---------------------------------------------------------------------------


@every_wire
def test_half_a_character_may_stand_in_any_text(wire: str) -> None:
    """What comes of it can be written, by the gateway and by a log."""
    events = [written(event) for event in TRANSPORTS[wire][1]]
    for number, event, path, before in fields(wire):
        if not isinstance(before, (str, dict)):
            continue
        other = before + HALF if isinstance(before, str) else {**before, HALF: HALF}
        spoilt = written(json.dumps(replaced(event, path, other)))
        data = b"".join((*events[:number], spoilt, *events[number + 1 :]))
        check(wire, events, number, data)
        outcome = heard(wire, data)
        message = outcome[1] if isinstance(outcome, tuple) else outcome
        decode_event(encode_event(Done(message)))
        encode_json(accept_answer(message))


def whole_call(wire: str, arguments: Any) -> list[Any]:
    """A call whose arguments come as an object, in one piece."""
    call = {"name": "look", "arguments": arguments}
    match wire:
        case "chat":
            calls = [{"index": 0, "id": "c1", "function": call}]
            choice = {"index": 0, "delta": {"tool_calls": calls}, "finish_reason": "tool_calls"}
            return [{"choices": [choice]}, "[DONE]"]
        case "responses":
            item = {"id": "fc_1", "type": "function_call", "call_id": "c1", **call}
            return [{"type": "response.completed", "response": {"output": [item]}}]
        case "anthropic":
            block = {"type": "tool_use", "id": "c1", "name": "look", "input": arguments}
            return [{"type": "message", "content": [block], "stop_reason": "tool_use"}]
        case _:
            content = {"parts": [{"functionCall": {"name": "look", "args": arguments}}]}
            return [{"candidates": [{"content": content, "finishReason": "STOP"}]}]


@every_wire
def test_half_a_character_in_arguments_that_are_an_object_is_replaced(wire: str) -> None:
    payloads = [e if isinstance(e, str) else json.dumps(e) for e in whole_call(wire, {"at": HALF})]
    message = heard(wire, b"".join(map(written, payloads)))
    assert isinstance(message, AssistantMessage)
    assert [call.arguments for call in message.tool_calls] == [{"at": "\ufffd"}]


# --- a byte -----------------------------------------------------------------------------------


@every_wire
def test_any_byte_may_go_bad(wire: str) -> None:
    events = [written(event) for event in TRANSPORTS[wire][1]]
    for number, event in enumerate(events):
        for place in range(len(event)):
            spoilt = event[:place] + b"\xff" + event[place + 1 :]
            data = b"".join((*events[:number], spoilt, *events[number + 1 :]))
            check(wire, events, number, data)


@every_wire
def test_a_bad_byte_in_a_text_is_replaced(wire: str) -> None:
    data = b"".join(map(written, TRANSPORTS[wire][1]))
    place = data.index(b"alpha")
    message = heard(wire, data[:place] + b"\xff" + data[place + 1 :])
    assert isinstance(message, AssistantMessage)
    assert message.plain_text.startswith("\ufffdlpha beta gamma ")


@every_wire
@given(st.data())
def test_several_bytes_may_go_bad(wire: str, data: st.DataObject) -> None:
    whole = bytearray(b"".join(map(written, TRANSPORTS[wire][1])))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=5)):
        whole[place] = data.draw(st.integers(0, 255))
    heard(wire, bytes(whole))


# --- with a socket ----------------------------------------------------------------------------

ODD: dict[str, list[tuple[Path, Any]]] = {
    "chat": [
        (("choices", 0, "index"), "0"),
        (("choices", 0, "delta", "tool_calls", 0, "index"), "0"),
        (("choices", 0, "delta", "tool_calls", 0, "id"), 7),
        (("choices", 0, "delta", "refusal"), False),
        (("choices", 0, "delta", "reasoning"), {}),
        (("usage",), []),
        (("usage", "prompt_tokens_details"), [1]),
    ],
    "responses": [
        (("output_index",), "1"),
        (("item", "id"), 7),
        (("response", "usage"), []),
        (("response", "usage", "input_tokens_details"), 5),
    ],
    "anthropic": [
        (("index",), "2"),
        (("content_block", "id"), 7),
        (("message", "usage"), []),
        (("delta", "stop_details"), 5),
    ],
    "gemini": [
        (("candidates", 0, "index"), "0"),
        (("usageMetadata",), []),
        (("candidates", 0, "content", "parts", 0, "thoughtSignature"), 7),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("wire", "odd"), [(wire, odd) for wire in ODD for odd in ODD[wire]])
async def test_fields_that_servers_really_get_wrong(wire: str, odd: tuple[Path, Any]) -> None:
    """The field is wrong in every event that has it, and the answer is whole all the same."""
    path, other = odd

    def spoilt(event: Any) -> Any:
        return replaced(event, path, other) if path in list(paths(event)) else event

    module, recorded = TRANSPORTS[wire]
    assert any(path in list(paths(event)) for event in recorded), "it is there"
    body = [written(spoilt(event)) for event in recorded]
    async with ByteServer([stream(*body)]) as server:
        transport = module.transport(server.url)
        events = await ask(transport)
        await transport.aclose()
    assert not check_events_of(events)
    last = events[-1]
    assert isinstance(last, Done)
    assert last.message.plain_text == "alpha beta gamma "
    assert [call.arguments for call in last.message.tool_calls] == [{"at": 1}]


@pytest.mark.slow
@every_wire
async def test_an_event_that_is_no_json_is_told_at_the_end(wire: str) -> None:
    """The answer may lack something, so it failed; what came is all there."""
    module, recorded = TRANSPORTS[wire]
    body = [written(event) for event in recorded]
    place = next(number for number, event in enumerate(body) if b"beta" in event)
    body.insert(place, b'data: {"choices": [\n\n')
    async with ByteServer([stream(*body)]) as server:
        transport = module.transport(server.url)
        events = await ask(transport)
        await transport.aclose()
    assert not check_events_of(events)
    last = events[-1]
    assert isinstance(last, Error)
    assert last.kind is StreamErrorKind.TRANSIENT
    assert "cannot be decoded" in last.message
    assert last.partial.plain_text == "alpha beta gamma "


def test_a_bad_byte_in_an_event_of_a_gateway_is_replaced() -> None:
    event = Done(AssistantMessage.from_text("alpha"))
    assert decode_event(encode_event(event).replace(b"alp", b"al\xff")) == Done(
        AssistantMessage.from_text("al\ufffdha")
    )
