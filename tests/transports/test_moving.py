"""A conversation that moves: from every provider to every other, and back.

Each provider tells a run of the loop in the bytes of its own wire: thoughts that are signed, sealed
or readable, a thought in tags, two calls at once, an error, an image. The transcript is stored,
loaded, and goes on with another provider, whose server gets a request that is held against what is
documented of its wire. `read_chat` and its sisters are the rules: they take a request apart, refuse
what a server would refuse or does not know, and give what was said in one form for all wires. So
there is one conversation to compare with, and whatever does not belong to it is foreign.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
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
    ToolResult,
    ToolResultMessage,
    ToolSchema,
    UserMessage,
    dump_transcript,
    load_transcript,
    run,
    run_continue,
    tool,
)
from clark_agent.reasoning import ReasoningFormat
from clark_agent.transports import (
    ChatDialect,
    ReasoningTarget,
    Transport,
    convert_history,
)
from clark_agent.transports.dialects import COMPATIBLE, DEEPSEEK, OPENAI, OPENROUTER
from tests.cases import all_cases
from tests.selection import slow_fixture
from tests.strategies import messages, open_json
from tests.transports import wires_anthropic as messages_wire
from tests.transports import wires_chat as chat_wire
from tests.transports import wires_gemini as gemini_wire
from tests.transports import wires_responses as responses_wire
from tests.transports.servers.bytes_server import Answer, ByteServer, Request

# --- reading a request ------------------------------------------------------------------------

Entry: TypeAlias = tuple[Any, ...]


class Refused(AssertionError):
    """A server would refuse the request, or has never heard of something in it."""


def need(holds: object, rule: str) -> None:
    if not holds:
        raise Refused(rule)


def only(value: Any, required: str, optional: str = "") -> None:
    """An object with these fields and no others."""
    need(isinstance(value, dict), f"an object is due, not {value!r}")
    missing = {*required.split()} - value.keys()
    unknown = value.keys() - {*required.split(), *optional.split()}
    need(not missing and not unknown, f"missing {missing}, unknown {unknown} in {value}")


def readable(text: Any) -> str:
    need(isinstance(text, str) and text.strip(), f"text is due, not {text!r}")
    return str(text)


def is_base64(text: Any) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except (binascii.Error, TypeError, ValueError):
        return False


_SYSTEM = re.compile(r"<system>\n(.*?)\n</system>(?:\n\n)?", re.DOTALL)
_LABEL = "Images from the tool look:"


class Reading:
    """What a request says, in the order in which it says it.

    ``reasoning`` has what only its own provider understands, each with the place of the entry that
    it stands before or on. Calls are numbered, for not every wire keeps their ids.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.reasoning: list[tuple[int, Any]] = []
        self.ids: dict[str, int] = {}
        self._waiting: list[str] = []

    @property
    def place(self) -> int:
        return len(self.entries)

    def system(self, text: Any) -> None:
        self.entries.append(("system", readable(text)))

    def user(self, text: Any) -> None:
        """A user's text, in which there may be instructions, as few wires take them anywhere."""
        end = 0
        for found in _SYSTEM.finditer(readable(text)):
            need(found.start() == end, f"an instruction in the middle of {text!r}")
            self.system(found[1])
            end = found.end()
        if (rest := text[end:]) and rest != _LABEL:
            self.entries.append(("user", rest))

    def image(self, source: Any) -> None:
        head, _, data = str(source).partition(";base64,")
        known = re.fullmatch(r"data:image/(png|jpeg|gif|webp)", head) and is_base64(data)
        need(known or re.fullmatch(r"https://\S+", str(source)), f"no image: {source!r}")
        self.entries.append(("image", source))

    def said(self, text: Any) -> None:
        if self.entries and self.entries[-1][0] == "said":
            self.entries[-1] = ("said", self.entries[-1][1] + text)
        else:
            self.entries.append(("said", text))

    def call(self, call_id: Any, name: Any, arguments: Any, *, names: str) -> None:
        need(isinstance(call_id, str) and call_id, f"a call needs an id, not {call_id!r}")
        need(call_id not in self.ids, f"the id {call_id!r} was there before")
        need(re.fullmatch(names, str(name)), f"no name of a tool: {name!r}")
        need(isinstance(arguments, dict), f"arguments are an object, not {arguments!r}")
        self.ids[call_id] = len(self.ids)
        self._waiting.append(call_id)
        self.entries.append(("call", self.ids[call_id], name, arguments))

    def result(self, call_id: Any, text: Any) -> None:
        need(call_id in self._waiting, f"{call_id!r} is not what is waited for: {self._waiting}")
        self._waiting.remove(call_id)
        self.entries.append(("result", self.ids[call_id], text))

    def all_answered(self) -> None:
        need(not self._waiting, f"calls without results: {self._waiting}")


def _arguments(text: Any) -> Any:
    need(isinstance(text, str), f"arguments are text, not {text!r}")
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise Refused(f"arguments are JSON, not {text!r}") from None


_SKIP = "skip_thought_signature_validator"  # what Google names for calls of other models
_WORD = r"[A-Za-z0-9_-]{1,64}"
_LONG_WORD = r"[A-Za-z0-9_-]{1,128}"


# --- Chat Completions


def read_chat(body: Any, dialect: ChatDialect) -> Reading:
    settings = "stream_options tool_choice max_tokens max_completion_tokens temperature"
    only(body, "model messages stream tools", f"{settings} reasoning reasoning_effort thinking")
    for declared in body["tools"]:
        only(declared, "type function")
        only(declared["function"], "name description parameters")
    reading, before = Reading(), None
    for message in body["messages"]:
        role = message.get("role")
        if role != "tool":
            reading.all_answered()
        match role:
            case "system":
                only(message, "role content")
                is_free = dialect.takes_system_anywhere or before is None
                need(is_free, "a template takes instructions at the front alone")
                reading.system(_chat_text(message["content"], dialect))
            case "user":
                only(message, "role content")
                need(dialect.takes_system_anywhere or before != "user", "two users in a row")
                _chat_user(reading, message["content"], dialect)
            case "assistant":
                _chat_assistant(reading, message, dialect)
            case "tool":
                only(message, "role tool_call_id content")
                text = readable(_chat_text(message["content"], dialect))
                reading.result(message["tool_call_id"], text)
            case _:
                raise Refused(f"nobody is called {role!r}")
        before = role
    reading.all_answered()
    need(repr(body["messages"]).count("'cache_control'") <= 4, "too many marks")
    return reading


def _chat_text(content: Any, dialect: ChatDialect) -> Any:
    """Text, which a mark for the cache makes a list of one part."""
    if isinstance(content, list) and dialect.takes_cache_marks:
        need(len(content) == 1, f"no text: {content!r}")
        only(content[0], "type text", "cache_control")
        return content[0]["text"]
    return content


def _chat_user(reading: Reading, content: Any, dialect: ChatDialect) -> None:
    if isinstance(content, str):
        reading.user(content)
        return
    need(isinstance(content, list) and content, f"no content: {content!r}")
    for part in content:
        mark = "cache_control" if dialect.takes_cache_marks else ""
        if part.get("type") == "text":
            only(part, "type text", mark)
            reading.user(part["text"])
        else:
            only(part, "type image_url", mark)
            need(part["type"] == "image_url", f"no part of a message: {part}")
            only(part["image_url"], "url", "detail")
            reading.image(part["image_url"]["url"])


def _chat_assistant(reading: Reading, message: Any, dialect: ChatDialect) -> None:
    fields = [*dialect.reasoning_fields, *(["reasoning_details"] if dialect.takes_details else [])]
    only(message, "role content", f"tool_calls {' '.join(fields)}")
    thought = {name: message[name] for name in dialect.reasoning_fields if message.get(name)}
    if thought:
        reading.reasoning.append((reading.place, thought))
    if (details := message.get("reasoning_details")) is not None:
        need(details, "no details at all")
        for item in details:
            _reasoning_item(item)
        if details := [item for item in details if item.get("data") != _SKIP]:
            reading.reasoning.append((reading.place, details))
    calls, content = message.get("tool_calls", ()), message["content"]
    need(content is None or readable(content), f"no content: {content!r}")
    need(calls or (content is not None and "tool_calls" not in message), "neither word nor call")
    if calls and dialect.wants_empty_reasoning:
        need(isinstance(message.get("reasoning_content"), str), "a call without its reasoning")
    if content is not None:
        reading.said(content)
    for call in calls:
        only(call, "id type function")
        only(call["function"], "name arguments")
        need(call["type"] == "function", f"no call: {call}")
        need(re.fullmatch(r"[A-Za-z0-9_-]{1,40}", call["id"]), f"no id: {call['id']!r}")
        function = call["function"]
        reading.call(call["id"], function["name"], _arguments(function["arguments"]), names=_WORD)


_ITEM_FIELDS = {
    "reasoning.text": "text",
    "reasoning.summary": "summary",
    "reasoning.encrypted": "data",
}


def _reasoning_item(item: Any) -> None:
    """An entry of OpenRouter's ``reasoning_details``, as they are documented."""
    payload = _ITEM_FIELDS.get(item.get("type"), "")
    need(payload, f"no kind of reasoning: {item}")
    signature = " signature" if payload == "text" else ""
    only(item, f"type {payload} format", f"id index{signature}")
    need(isinstance(item[payload], str), f"reasoning is text: {item}")
    need(item["format"] in [*ReasoningFormat], f"nobody's format: {item}")


# --- Responses


def read_responses(body: Any) -> Reading:
    settings = "instructions tool_choice max_output_tokens temperature reasoning include"
    only(body, "model input stream store tools", settings)
    need(body["store"] is False, "nothing is to be kept")
    for declared in body["tools"]:
        only(declared, "type name description parameters strict")
    reading, before = Reading(), None
    if "instructions" in body:
        reading.system(body["instructions"])
    for item in body["input"]:
        kind = item.get("type")
        if kind not in ("function_call", "function_call_output"):
            reading.all_answered()
        if before == "reasoning":
            is_answer = kind == "message" and item.get("role") == "assistant"
            follows = is_answer or kind in ("reasoning", "function_call")
            need(follows, "reasoning without the item that it led to")
        _responses_item(reading, kind, item)
        before = kind
    need(before != "reasoning", "reasoning comes last")
    reading.all_answered()
    return reading


def _responses_item(reading: Reading, kind: Any, item: Any) -> None:
    match kind:
        case "message" if item.get("role") == "assistant":
            only(item, "type role content", "phase")
            if "phase" in item:
                reading.reasoning.append((reading.place, {"phase": item["phase"]}))
            for part in item["content"]:
                only(part, "type text annotations")
                need(part["type"] == "output_text", f"an assistant does not say {part}")
                reading.said(readable(part["text"]))
        case "message":
            only(item, "type role content")
            need(item["role"] in ("user", "system", "developer"), f"nobody says {item}")
            tell = reading.user if item["role"] == "user" else reading.system
            need(item["content"], "nothing is said")
            _input_parts(reading, item["content"], tell)
        case "function_call":
            only(item, "type call_id name arguments")
            need(re.fullmatch(_WORD, item["call_id"]), f"no id: {item['call_id']!r}")
            arguments = _arguments(item["arguments"])
            reading.call(item["call_id"], item["name"], arguments, names=_LONG_WORD)
        case "function_call_output":
            only(item, "type call_id output")
            output, texts = item["output"], list[str]()
            if isinstance(output, str):
                reading.result(item["call_id"], output)
                return
            reading.result(item["call_id"], None)
            place = reading.place - 1
            _input_parts(reading, output, texts.append)
            reading.entries[place] = (*reading.entries[place][:-1], "".join(texts))
        case "reasoning":
            only(item, "type summary encrypted_content")
            need(isinstance(item["encrypted_content"], str), "reasoning without its blob")
            for part in item["summary"]:
                only(part, "type text")
                need(part["type"] == "summary_text", f"no summary: {part}")
            reading.reasoning.append((reading.place, item))
        case _:
            raise Refused(f"no item: {item}")


def _input_parts(reading: Reading, parts: Any, tell: Callable[[str], object]) -> None:
    for part in parts:
        if part.get("type") == "input_text":
            only(part, "type text")
            tell(readable(part["text"]))
        else:
            only(part, "type image_url detail")
            need(part["type"] == "input_image", f"no input: {part}")
            reading.image(part["image_url"])


# --- Messages


def read_messages(body: Any) -> Reading:
    settings = "system thinking output_config tool_choice"
    only(body, "model max_tokens stream messages tools", settings)
    for declared in body["tools"]:
        only(declared, "name description input_schema", "cache_control")
    need(str(body).count("'cache_control'") <= 4, "four marks at most")
    reading = Reading()
    for block in body.get("system", ()):
        only(block, "type text", "cache_control")
        reading.system(block["text"])
    for number, message in enumerate(body["messages"]):
        only(message, "role content")
        need(message["role"] == ("user", "assistant")[number % 2], "by turns, the user first")
        need(isinstance(message["content"], list) and message["content"], "nothing is said")
        turn = _messages_user if message["role"] == "user" else _messages_assistant
        turn(reading, message["content"])
    last = body["messages"][-1]
    need(last["role"] == "user", "the last word is the user's")
    reading.all_answered()
    if body.get("thinking", {}).get("type") == "enabled":
        _may_think(body["messages"])
    return reading


def _may_think(messages: Any) -> None:
    """A round of tools with a budget for thinking begins with thinking."""
    for turn in range(len(messages) - 1, 0, -2):
        if messages[turn]["content"][0]["type"] != "tool_result":
            return
        first = messages[turn - 1]["content"][0]["type"]
        need(first in ("thinking", "redacted_thinking"), f"a round that begins with {first}")


def _messages_user(reading: Reading, blocks: Any) -> None:
    behind_results = False
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            need(not behind_results, "results come first")
            only(block, "type tool_use_id content", "is_error cache_control")
            texts = [part["text"] for part in block["content"] if part["type"] == "text"]
            text = "".join(texts)
            need((block.get("is_error") is True) == (text == LOCKED), f"an error? {block}")
            reading.result(block["tool_use_id"], text)
            for part in block["content"]:
                if part["type"] != "text":
                    _messages_image(reading, part)
                else:
                    only(part, "type text")
                    readable(part["text"])
            continue
        if not behind_results:
            reading.all_answered()
        behind_results = True
        if kind == "text":
            only(block, "type text", "cache_control")
            reading.user(block["text"])
        else:
            _messages_image(reading, block)
    reading.all_answered()


def _messages_image(reading: Reading, block: Any) -> None:
    only(block, "type source", "cache_control")
    need(block["type"] == "image", f"no block: {block}")
    source = block["source"]
    if source.get("type") == "url":
        only(source, "type url")
        reading.image(source["url"])
    else:
        only(source, "type media_type data")
        reading.image(f"data:{source['media_type']};{source['type']},{source['data']}")


def _messages_assistant(reading: Reading, blocks: Any) -> None:
    for block in blocks:
        match block.get("type"):
            case "text":
                only(block, "type text", "cache_control")
                reading.said(readable(block["text"]))
            case "tool_use":
                only(block, "type id name input", "cache_control")
                need(re.fullmatch(r"[A-Za-z0-9_-]+", block["id"]), f"no id: {block['id']!r}")
                reading.call(block["id"], block["name"], block["input"], names=_LONG_WORD)
            case "thinking":
                only(block, "type thinking signature")
                need(block["signature"], "thinking that is not signed")
                reading.reasoning.append((reading.place, block))
            case "redacted_thinking":
                only(block, "type data")
                reading.reasoning.append((reading.place, block))
            case _:
                raise Refused(f"an assistant does not say {block}")
    need("thinking" not in blocks[-1]["type"], "thinking comes last")


# --- generateContent

_DATA = {"text", "inlineData", "fileData", "functionCall", "functionResponse"}


def read_contents(body: Any) -> Reading:
    only(body, "contents tools", "systemInstruction toolConfig generationConfig")
    for declared in body["tools"]:
        only(declared, "functionDeclarations")
        for function in declared["functionDeclarations"]:
            only(function, "name description parametersJsonSchema")
    reading = Reading()
    if "systemInstruction" in body:
        only(body["systemInstruction"], "parts", "role")
        for part in body["systemInstruction"]["parts"]:
            only(part, "text")
            reading.system(part["text"])
    for number, content in enumerate(body["contents"]):
        only(content, "role parts")
        need(content["role"] == ("user", "model")[number % 2], "by turns, the user first")
        need(content["parts"], "nothing is said")
        for part in content["parts"]:
            need(len(part.keys() & _DATA) == 1, f"one thing at a time: {part}")
        turn = _contents_user if content["role"] == "user" else _contents_model
        turn(reading, content["parts"])
    need(body["contents"][-1]["role"] == "user", "the last word is the user's")
    return reading


def _contents_user(reading: Reading, parts: Any) -> None:
    for part in parts:
        if "functionResponse" in part:
            only(part, "functionResponse")
            _function_response(reading, part["functionResponse"])
            continue
        reading.all_answered()
        if "text" in part:
            only(part, "text")
            reading.user(part["text"])
        else:
            reading.image(_blob(part))
    reading.all_answered()


def _function_response(reading: Reading, answer: Any) -> None:
    only(answer, "id name response", "parts")
    [(key, text)] = answer["response"].items()
    need(key == ("error" if text == LOCKED else "output"), f"an error? {answer}")
    reading.result(answer["id"], text)
    call = next(e for e in reading.entries if e[:2] == ("call", reading.ids[answer["id"]]))
    need(answer["name"] == call[2], f"a result of {answer['name']} to a call of {call[2]}")
    for part in answer.get("parts", ()):
        only(part, "inlineData")
        reading.image(_blob(part))


def _blob(part: Any) -> str:
    if "fileData" in part:
        only(part, "fileData")
        only(part["fileData"], "fileUri", "mimeType")
        return str(part["fileData"]["fileUri"])
    only(part, "inlineData")
    only(part["inlineData"], "mimeType data")
    return f"data:{part['inlineData']['mimeType']};base64,{part['inlineData']['data']}"


def _contents_model(reading: Reading, parts: Any) -> None:
    has_called = False
    for part in parts:
        signature = part.get("thoughtSignature")
        need(signature in (None, _SKIP) or is_base64(signature), f"no signature: {signature!r}")
        if "functionCall" in part:
            only(part, "functionCall", "thoughtSignature")
            call = part["functionCall"]
            only(call, "name args id")
            need(signature or has_called, "the first call of a step is not signed")
            has_called = True
            names = r"[A-Za-z_][A-Za-z0-9_.:-]{0,127}"
            reading.call(call["id"], call["name"], call["args"], names=names)
            signed: Any = signature
        else:
            only(part, "text", "thought thoughtSignature")
            need(part["text"] or signature, "an empty part")
            need(signature or not part.get("thought"), "a thought that is not signed")
            reading.said(part["text"])
            signed = signature and (part["text"], signature)
        if signature not in (None, _SKIP):
            reading.reasoning.append((reading.place - 1, signed))


# --- the conversation -------------------------------------------------------------------------

PICTURE = "data:image/png;base64,iVBORw0KGgo="
LAMP = "data:image/jpeg;base64,/9j/4AAQSkY="
REMOTE = "https://pictures.example/room.webp"
LOCKED = "The cellar is locked."
SYSTEM = "You are careful."
HOST = "host-only-5d1c"  # in what is the host's alone
FORMATS = {
    "anthropic": "anthropic-claude-v1",
    "openai": "openai-responses-v1",
    "google": "google-gemini-v1",
    "deepseek": "unknown",
}


@tool
def look(at: str) -> ToolResult:
    """Look somewhere."""
    if at == "cellar":
        return ToolResult.error(LOCKED)
    seen = (TextContent(f"On the {at}: a lamp."), ImageContent(LAMP, "image/jpeg", "a lamp"))
    return ToolResult(seen, details={"for": HOST}, narration=HOST)


QUESTION = UserMessage(
    (TextContent("What is here?"), ImageContent(PICTURE), ImageContent(REMOTE, "image/webp"))
)
BETWEEN = (SystemMessage("Be brief."), CustomMessage("mark", {"for": HOST}))

ROUND: list[Entry] = [
    ("system", SYSTEM),
    ("user", "What is here?"),
    ("image", PICTURE),
    ("image", REMOTE),
    ("said", "<thought>hm</thought>Let me look."),
    ("call", 0, "look", {"at": "cellar"}),
    ("call", 1, "look", {"at": "left"}),
    ("result", 0, LOCKED),
    ("result", 1, "On the left: a lamp."),
    ("image", LAMP),
]
STORY: list[Entry] = [
    *ROUND,
    ("said", "There is a lamp."),
    ("system", "Be brief."),
    ("user", "What else?"),
    ("said", "Only a chair."),
]
GOES_ON: list[Entry] = [*STORY, ("user", "Go on.")]
NEXT_ROUND: list[Entry] = [
    *GOES_ON,
    ("said", "Once more."),
    ("call", 2, "look", {"at": "right"}),
    ("result", 2, "On the right: a lamp."),
    ("image", LAMP),
]
GOES_BACK: list[Entry] = [*NEXT_ROUND, ("said", "Nothing new."), ("user", "Come back.")]

# Where in the conversation each answer begins.
PLACES = {
    number: next(place for place, entry in enumerate(GOES_BACK) if entry == ("said", said))
    for number, said in enumerate(
        (ROUND[4][1], "There is a lamp.", "Only a chair.", "Once more.", "Nothing new."), 1
    )
}


# --- the providers ----------------------------------------------------------------------------


class Said(Struct, frozen=True):
    """One answer of a model: which of the conversation, the text, and where it wants to look."""

    number: int
    text: str
    looks: tuple[str, ...] = ()


ANSWERS = {
    1: Said(1, "<think>hm</think>Let me look.", ("cellar", "left")),
    2: Said(2, "There is a lamp."),
    3: Said(3, "Only a chair."),
    4: Said(4, "Once more.", ("right",)),
    5: Said(5, "Nothing new."),
    6: Said(6, "Good bye."),
}


class Provider(Struct, frozen=True, kw_only=True):
    """A way to a model: how it is made, how it answers, and the rules of its wire."""

    name: str
    model: str
    make: Callable[..., Transport[Any]]
    read: Callable[[Any], Reading]
    history: str
    """Where the messages are in a request."""
    answer: Callable[[Provider, Said], Answer]
    kept: Callable[[Provider, Said], list[Any]]
    """The reasoning of that answer as the provider wants it back: with the place from the
    beginning of the answer."""
    vendor: str | None = None
    """Whose reasoning it takes, and makes."""
    ids: str = "call_{}"
    is_gateway: bool = False
    shows_thoughts: bool = False
    """Whether its readable reasoning is signed by nobody, so that anybody may have it."""

    @property
    def envelope(self) -> str:
        """What is in the ids that a server gives to its answers and items."""
        return f"envelope-of-{self.name}"

    def seal(self, number: int, more: str = "") -> str:
        return base64.b64encode(f"{self.name}: seal {number}{more}".encode()).decode()

    def thought(self, number: int) -> str:
        return f"Thought {number} of [{self.name}]."

    def call_id(self, said: Said, position: int) -> str:
        return self.ids.format(f"{said.number}{position}")

    def calls(self, said: Said) -> list[tuple[str, str]]:
        """The ids and arguments of the calls."""
        return [
            (self.call_id(said, position), msgspec.json.encode({"at": at}).decode())
            for position, at in enumerate(said.looks)
        ]

    def takes_reasoning_of(self, other: Provider) -> bool:
        return self.vendor is not None and self.vendor == other.vendor

    def expected(self, numbers: Iterable[int]) -> list[tuple[int, Any]]:
        """The reasoning of these answers, at its places."""
        return [
            (PLACES[number] + offset, value)
            for number in numbers
            for offset, value in self.kept(self, ANSWERS[number])
        ]


# --- Chat Completions

_Deltas = Callable[[Provider, Said], list[dict[str, Any]]]


def _chat_answer(provider: Provider, said: Said, *, thinks: _Deltas) -> Answer:
    """Reasoning, then the text in two pieces, then the calls side by side."""

    def chunk(finish: str | None = None, **delta: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        known = {"id": f"chatcmpl-{provider.envelope}", "model": provider.model}
        return chat_wire.event({**known, "choices": [choice]})

    deltas = thinks(provider, said)
    cut = len(said.text) // 2
    deltas += [{"content": said.text[:cut]}, {"content": said.text[cut:]}]
    for position, (call_id, arguments) in enumerate(provider.calls(said)):
        begun = chat_wire.piece(position, call_id, "look", "")
        deltas.append({"tool_calls": [begun]})
        deltas.append({"tool_calls": [chat_wire.piece(position, arguments=arguments)]})
    pieces = [chunk(**delta) for delta in deltas]
    finish = chunk("tool_calls" if said.looks else "stop")
    return chat_wire.stream(*pieces, finish, chat_wire.DONE)


def _no_deltas(provider: Provider, said: Said) -> list[dict[str, Any]]:
    return []


def _nothing(provider: Provider, said: Said) -> list[Any]:
    return []


def _shown(field: str, provider: Provider, said: Said) -> list[dict[str, Any]]:
    words = provider.thought(said.number).partition(" ")
    return [{field: word} for word in words if word]


def _shown_back(fields: Sequence[str], provider: Provider, said: Said) -> list[Any]:
    return [(0, dict.fromkeys(fields, provider.thought(said.number)))]


def _details(provider: Provider, said: Said) -> list[dict[str, Any]]:
    """The structured reasoning that a gateway sends for a vendor's model, and wants back."""
    thought, seal = provider.thought(said.number), provider.seal(said.number)
    own: dict[str, Any]
    match provider.vendor:
        case "anthropic":
            own = {"format": "anthropic-claude-v1"}
            return [
                {"type": "reasoning.text", "text": thought, "signature": seal, "index": 0, **own},
                {
                    "type": "reasoning.encrypted",
                    "data": provider.seal(said.number, " redacted"),
                    "id": f"{provider.envelope}-{said.number}",
                    "index": 1,
                    **own,
                },
            ]
        case "openai":
            own = {"format": "openai-responses-v1", "index": 0}
            item_id = f"rs_{provider.envelope}_{said.number}"
            return [
                {"type": "reasoning.summary", "summary": thought, **own},
                {"type": "reasoning.encrypted", "data": seal, "id": item_id, **own},
            ]
        case "google":
            own = {"format": "google-gemini-v1"}
            shown = [{"type": "reasoning.text", "text": thought, "index": 0, **own}]
            if not said.looks:
                return shown
            call_id = provider.call_id(said, 0)
            signed = {"type": "reasoning.encrypted", "data": seal, "id": call_id, "index": 1}
            return [*shown, {**signed, **own}]
        case _:
            return [{"type": "reasoning.text", "text": thought, "format": "unknown", "index": 0}]


def _details_deltas(provider: Provider, said: Said) -> list[dict[str, Any]]:
    """Readable reasoning comes word by word and twice, and its signature behind it."""
    deltas: list[dict[str, Any]] = []
    for item in _details(provider, said):
        field = _ITEM_FIELDS[item["type"]]
        if field == "data":
            deltas.append({"reasoning_details": [item]})
            continue
        kept = {name: item[name] for name in ("type", "format", "index")}
        deltas += [
            {"reasoning": word, "reasoning_details": [{**kept, field: word}]}
            for word in item[field].partition(" ")
        ]
        if "signature" in item:
            signature = {**kept, "signature": item["signature"]}
            deltas.append({"reasoning_details": [signature]})
    return deltas


def _details_back(provider: Provider, said: Said) -> list[Any]:
    return [(0, _details(provider, said))]


def _chat_provider(
    name: str,
    model: str,
    dialect: ChatDialect,
    *,
    thinks: _Deltas = _no_deltas,
    **fields: Any,
) -> Provider:
    needs_key: dict[str, Any] = {"api_key": "key"} if dialect.key_variables else {}
    return Provider(
        name=name,
        model=model,
        make=partial(chat_wire.transport, dialect=dialect, **needs_key),
        read=partial(read_chat, dialect=dialect),
        history="messages",
        answer=partial(_chat_answer, thinks=thinks),
        **{"kept": _nothing, **fields},
    )


def _behind_gateway(name: str, model: str, vendor: str) -> Provider:
    return _chat_provider(
        name,
        model,
        OPENROUTER,
        thinks=_details_deltas,
        kept=_details_back,
        vendor=vendor,
        is_gateway=True,
        ids=f"tool_{vendor}_{{}}",
    )


# --- Responses


def _responses_answer(provider: Provider, said: Said) -> Answer:
    number = said.number
    ids = [f"{prefix}_{provider.envelope}_{number}" for prefix in ("rs", "msg", "fc")]
    thought = responses_wire.reasoning(
        [provider.thought(number)], provider.seal(number), item_id=ids[0]
    )
    message = responses_wire.message(said.text, ids[1], phase=_phase(said))
    calls = [
        responses_wire.call(call_id, "look", arguments, f"{ids[2]}_{call_id}")
        for call_id, arguments in provider.calls(said)
    ]
    pieces: list[bytes] = []
    for index, item in enumerate([thought, message, *calls]):
        bare = {"arguments": "", "content": [], "summary": []}
        begun = {key: bare.get(key, value) for key, value in item.items()}
        pieces.append(responses_wire.added(begun, index))
        match item["type"]:
            case "reasoning":
                delta = responses_wire.summary_delta(provider.thought(number), index, ids[0], 0)
            case "message":
                delta = responses_wire.text_delta(said.text, index, ids[1])
            case _:
                delta = responses_wire.arguments_delta(item["arguments"], index, item["id"])
        pieces += [delta, responses_wire.done(item, index)]
    finish = responses_wire.completed(id=f"resp_{provider.envelope}", model=provider.model)
    return responses_wire.stream(*pieces, finish)


def _phase(said: Said) -> str:
    return "commentary" if said.looks else "final_answer"


def _responses_back(provider: Provider, said: Said) -> list[Any]:
    summary = [{"type": "summary_text", "text": provider.thought(said.number)}]
    sealed = {"encrypted_content": provider.seal(said.number)}
    item = {"type": "reasoning", "summary": summary, **sealed}
    return [(0, item), (0, {"phase": _phase(said)})]


# --- Messages


def _messages_answer(provider: Provider, said: Said) -> Answer:
    number, calls = said.number, provider.calls(said)
    opening = {
        "id": f"msg_{provider.envelope}",
        "type": "message",
        "role": "assistant",
        "content": [],
    }
    pieces = [
        messages_wire.event("message_start", message={**opening, "model": provider.model}),
        messages_wire.thinking(0, provider.thought(number), provider.seal(number)),
        messages_wire.start(1, "redacted_thinking", data=provider.seal(number, " redacted")),
        messages_wire.stop(1),
        messages_wire.text(2, said.text),
        *[
            messages_wire.tool_use(index, call_id, "look", arguments)
            for index, (call_id, arguments) in enumerate(calls, 3)
        ],
        messages_wire.finished("tool_use" if calls else "end_turn"),
        messages_wire.END,
    ]
    return messages_wire.stream(*pieces)


def _messages_back(provider: Provider, said: Said) -> list[Any]:
    thought, seal = provider.thought(said.number), provider.seal(said.number)
    redacted = provider.seal(said.number, " redacted")
    return [
        (0, {"type": "thinking", "thinking": thought, "signature": seal}),
        (0, {"type": "redacted_thinking", "data": redacted}),
    ]


# --- generateContent


def _contents_answer(provider: Provider, said: Said) -> Answer:
    """The first call is signed, or the end of the text, or nothing at all behind it."""
    seal, text = provider.seal(said.number), gemini_wire.text
    parts = [gemini_wire.thought(provider.thought(said.number))]
    if said.looks:
        parts.append(text(said.text))
        for position, at in enumerate(said.looks):
            signature = seal if position == 0 else None
            call_id = provider.call_id(said, position)
            parts.append(gemini_wire.call("look", call_id, signature, at=at))
    elif said.number % 2:
        parts += [text(said.text), text("", seal)]
    else:
        parts += [text(said.text[:-5]), text(said.text[-5:], seal)]
    finish = gemini_wire.chunk(finish="STOP", responseId=provider.envelope)
    return gemini_wire.stream(*[gemini_wire.chunk(part) for part in parts], finish)


def _contents_back(provider: Provider, said: Said) -> list[Any]:
    seal = provider.seal(said.number)
    if said.looks:
        return [(1, seal)]
    return [(0, ("" if said.number % 2 else said.text[-5:], seal))]


_PROVIDERS = [
    _chat_provider("openai", "gpt-5-mini", OPENAI),
    _chat_provider(
        "deepseek",
        "deepseek-reasoner",
        DEEPSEEK,
        thinks=partial(_shown, "reasoning_content"),
        kept=partial(_shown_back, DEEPSEEK.reasoning_fields),
        shows_thoughts=True,
    ),
    _chat_provider(
        "compatible",
        "qwen3-8b",
        COMPATIBLE,
        thinks=partial(_shown, "reasoning"),
        kept=partial(_shown_back, COMPATIBLE.reasoning_fields),
        shows_thoughts=True,
        ids="functions.look:{}",  # as some models write them; hardly anybody else takes it
    ),
    _behind_gateway("openrouter-anthropic", "anthropic/claude-opus-4.6", "anthropic"),
    _behind_gateway("openrouter-openai", "openai/gpt-5.2", "openai"),
    _behind_gateway("openrouter-google", "google/gemini-3-pro", "google"),
    _behind_gateway("openrouter-deepseek", "deepseek/deepseek-v4", "deepseek"),
    Provider(
        name="responses",
        model="gpt-5.1",
        make=responses_wire.transport,
        read=read_responses,
        history="input",
        answer=_responses_answer,
        kept=_responses_back,
        vendor="openai",
    ),
    Provider(
        name="anthropic",
        model="claude-sonnet-4-5",
        make=messages_wire.transport,
        read=read_messages,
        history="messages",
        answer=_messages_answer,
        kept=_messages_back,
        vendor="anthropic",
        ids="toolu_{}",
    ),
    Provider(
        name="gemini",
        model=gemini_wire.MODEL,
        make=gemini_wire.transport,
        read=read_contents,
        history="contents",
        answer=_contents_answer,
        kept=_contents_back,
        vendor="google",
        ids="fc-{}",
    ),
]
PROVIDERS = {provider.name: provider for provider in _PROVIDERS}
PAIRS = [*product(PROVIDERS, repeat=2)]


# --- servers ----------------------------------------------------------------------------------


class Story(Struct, frozen=True):
    """A conversation with one provider, as it was stored, and what the server was asked last."""

    stored: bytes
    last_body: Any

    @property
    def messages(self) -> tuple[AgentMessage, ...]:
        transcript = load_transcript(self.stored)
        assert not transcript.malformed
        return transcript.messages


class Host:
    """A provider's server, and the one transport to it."""

    def __init__(self, provider: Provider, server: ByteServer, answers: list[Answer]) -> None:
        self.provider = provider
        self.transport = provider.make(server.url, model=provider.model)
        self._answers = answers
        self._server = server
        self._seen = 0
        self._story: Story | None = None

    @property
    def config(self) -> LoopConfig:
        return LoopConfig(stream=self.transport, tools=[look], reasoning=ReasoningEffort.HIGH)

    def will_say(self, *numbers: int) -> None:
        assert not self._answers, "an earlier answer was not asked for"
        self._answers += [self.provider.answer(self.provider, ANSWERS[n]) for n in numbers]

    def asked(self) -> list[Request]:
        """The requests since the last time."""
        requests = self._server.requests[self._seen :]
        self._seen += len(requests)
        return requests

    async def story(self) -> Story:
        """Two runs with this provider, and between them a word of the host's."""
        if self._story is None:
            self.will_say(1, 2, 3)
            context = AgentContext(SYSTEM)
            first = await run(QUESTION, context, self.config)
            context = context.extend(first).extend(BETWEEN)
            second = await run("What else?", context, self.config)
            stored = dump_transcript(context.extend(second).messages)
            self._story = Story(stored, msgspec.json.decode(self.asked()[-1].body))
        return self._story


def _next_of(answers: list[Answer], _: Request) -> Answer:
    return answers.pop(0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
@slow_fixture
async def hosts() -> AsyncGenerator[dict[str, Host]]:
    async with AsyncExitStack() as stack:
        made: dict[str, Host] = {}
        for name, provider in PROVIDERS.items():
            answers: list[Answer] = []
            server = ByteServer(partial(_next_of, answers))
            await stack.enter_async_context(server)
            made[name] = Host(provider, server, answers)
            stack.push_async_callback(made[name].transport.aclose)
        yield made


in_one_loop = pytest.mark.asyncio(loop_scope="module")


def nothing_foreign(source: Provider, target: Provider, raw: bytes) -> None:
    """None of what is the source's alone is anywhere in the request."""
    found = raw.decode()
    assert HOST not in found
    if source is target:
        return
    shares = target.takes_reasoning_of(source)
    assert source.model not in found
    assert target.is_gateway or '"format"' not in found
    assert (shares and target.is_gateway) or source.envelope not in found
    assert shares or source.vendor is None or FORMATS[source.vendor] not in found
    for number in ANSWERS:
        for seal in (source.seal(number), source.seal(number, " redacted")):
            assert shares or seal not in found
        is_open = source.shows_thoughts and target.shows_thoughts
        assert shares or is_open or source.thought(number) not in found


def expected_reasoning(
    source: Provider, target: Provider, numbers: Iterable[int]
) -> list[tuple[int, Any]]:
    """What the target should get of the source's answers, unless they share a vendor."""
    if source is target:
        return source.expected(numbers)
    if not (source.shows_thoughts and target.shows_thoughts):
        return []
    values = target.expected(numbers)
    told = zip(values, numbers, strict=True)
    return [(p, dict.fromkeys(value, source.thought(n))) for (p, value), n in told]


def expected_ids(source: Provider, reading: Reading, numbers: Sequence[int]) -> None:
    """Ids that anybody takes are what they were."""
    given = [
        source.call_id(ANSWERS[number], position)
        for number in numbers
        for position in range(len(ANSWERS[number].looks))
    ]
    if ":" not in source.ids:
        assert [*reading.ids][: len(given)] == given


# --- from every provider to every other -------------------------------------------------------


@in_one_loop
@pytest.mark.parametrize(("origin", "goal"), PAIRS)
async def test_a_stored_conversation_goes_on_elsewhere_and_comes_back(
    hosts: dict[str, Host], origin: str, goal: str
) -> None:
    source, target = PROVIDERS[origin], PROVIDERS[goal]
    story = await hosts[origin].story()
    hosts[goal].will_say(4, 5)
    context = AgentContext(SYSTEM, story.messages)
    result = await run("Go on.", context, hosts[goal].config)
    assert result.text == "Nothing new."
    check_what_the_other_was_asked(source, target, hosts[goal].asked())

    stored = load_transcript(dump_transcript(context.extend(result).messages)).messages
    hosts[origin].will_say(6)
    result = await run("Come back.", AgentContext(SYSTEM, stored), hosts[origin].config)
    assert result.text == "Good bye."
    [request] = hosts[origin].asked()
    check_what_comes_back(source, target, story, request)


def check_what_the_other_was_asked(
    source: Provider, target: Provider, asked: Sequence[Request]
) -> None:
    """The question, and behind its call the round with the result."""
    assert len(asked) == 2
    for request, conversation in zip(asked, (GOES_ON, NEXT_ROUND), strict=True):
        nothing_foreign(source, target, request.body)
        reading = target.read(msgspec.json.decode(request.body))
        assert reading.entries == conversation
        expected_ids(source, reading, (1,))
        own = target.expected([4]) if conversation is NEXT_ROUND else []
        if source is target or not target.takes_reasoning_of(source):
            assert reading.reasoning == [*expected_reasoning(source, target, (1, 2, 3)), *own]
        else:
            assert reading.reasoning[len(reading.reasoning) - len(own) :] == own


def check_what_comes_back(
    source: Provider, other: Provider, story: Story, request: Request
) -> None:
    body = msgspec.json.decode(request.body)
    nothing_foreign(other, source, request.body)
    reading = source.read(body)
    assert reading.entries == GOES_BACK
    own = source.expected((1, 2, 3))
    assert reading.reasoning[: len(own)] == own
    if other is source or not source.takes_reasoning_of(other):
        assert reading.reasoning[len(own) :] == expected_reasoning(other, source, (4, 5))
    before = _unmarked(story.last_body[source.history])
    assert _unmarked(body[source.history])[: len(before)] == before, "the prompt cache would miss"


def _unmarked(value: Any) -> Any:
    """Without the marks for a cache, which wander."""
    if isinstance(value, dict):
        return {k: _unmarked(part) for k, part in value.items() if k != "cache_control"}
    return [_unmarked(part) for part in value] if isinstance(value, list) else value


@in_one_loop
@pytest.mark.parametrize(("origin", "goal"), PAIRS)
async def test_it_moves_in_the_middle_of_a_round(
    hosts: dict[str, Host], origin: str, goal: str
) -> None:
    source, target = PROVIDERS[origin], PROVIDERS[goal]
    messages = (await hosts[origin].story()).messages[:4]
    assert isinstance(messages[-1], ToolResultMessage)
    hosts[goal].will_say(5)
    result = await run_continue(AgentContext(SYSTEM, messages), hosts[goal].config)
    assert result.text == "Nothing new."
    [request] = hosts[goal].asked()
    nothing_foreign(source, target, request.body)
    reading = target.read(msgspec.json.decode(request.body))
    assert reading.entries == ROUND
    if source is target or not target.takes_reasoning_of(source):
        assert reading.reasoning == expected_reasoning(source, target, (1,))


# --- the same vendor by another way -----------------------------------------------------------

COUSINS = [
    (origin, goal)
    for origin, goal in PAIRS
    if origin != goal and PROVIDERS[goal].takes_reasoning_of(PROVIDERS[origin])
]
SEALED_FOR_AN_ACCOUNT = ("responses", "openrouter-openai")


def sealed_in(reasoning: Any, seals: Sequence[str]) -> list[str]:
    """Which of the seals there are, in their order."""
    found = msgspec.json.encode(reasoning).decode()
    return sorted([seal for seal in seals if f'"{seal}"' in found], key=found.index)


@in_one_loop
@pytest.mark.parametrize(
    ("origin", "goal"), [pair for pair in COUSINS if pair != SEALED_FOR_AN_ACCOUNT]
)
async def test_the_vendor_gets_its_reasoning_back_by_another_way(
    hosts: dict[str, Host], origin: str, goal: str
) -> None:
    source, target = PROVIDERS[origin], PROVIDERS[goal]
    messages = (await hosts[origin].story()).messages[:4]
    hosts[goal].will_say(5)
    await run_continue(AgentContext(SYSTEM, messages), hosts[goal].config)
    [request] = hosts[goal].asked()
    reading = target.read(msgspec.json.decode(request.body))
    seals = [source.seal(1)] + [source.seal(1, " redacted")] * (source.vendor == "anthropic")
    assert sealed_in(reading.reasoning, seals) == seals
    places = {place for place, _ in reading.reasoning}
    is_on_call = goal == "gemini"
    assert places == {PLACES[1] + is_on_call}


@in_one_loop
async def test_what_openai_sealed_for_one_account_is_of_no_use_to_a_gateways(
    hosts: dict[str, Host],
) -> None:
    """OpenAI refuses it, and behind a gateway nobody would ask again without."""
    source, target = [PROVIDERS[name] for name in SEALED_FOR_AN_ACCOUNT]
    messages = (await hosts[source.name].story()).messages[:4]
    hosts[target.name].will_say(5)
    await run_continue(AgentContext(SYSTEM, messages), hosts[target.name].config)
    [request] = hosts[target.name].asked()
    assert not target.read(msgspec.json.decode(request.body)).reasoning
    assert source.seal(1).encode() not in request.body


def test_three_vendors_can_be_reached_in_two_ways() -> None:
    assert len(COUSINS) == 6


# --- another model of the same provider -------------------------------------------------------


@in_one_loop
@pytest.mark.parametrize(
    ("name", "model", "stays"),
    [
        ("anthropic", "claude-opus-4-1", True),
        ("responses", "gpt-5.2", False),
        ("gemini", "gemini-3-pro", False),
        ("openrouter-anthropic", "anthropic/claude-haiku-4.5", True),
        ("openrouter-anthropic", "qwen/qwen3", False),
    ],
)
async def test_to_another_model(
    hosts: dict[str, Host], name: str, model: str, *, stays: bool
) -> None:
    provider = PROVIDERS[name]
    story = await hosts[name].story()
    transport = provider.make("http://127.0.0.1:9", model=model)
    history = (*story.messages, UserMessage("Go on."))
    request = StreamRequest(system_prompt=SYSTEM, messages=history, tools=[_SCHEMA])
    reading = provider.read(transport.encode(request))
    assert reading.entries == GOES_ON
    assert reading.reasoning == (provider.expected((1, 2, 3)) if stays else [])


_SCHEMA = ToolSchema("look", "Look somewhere.", {"type": "object", "properties": {}})


# --- a Gemini behind a gateway ----------------------------------------------------------------


@in_one_loop
@pytest.mark.parametrize("origin", [name for name in PROVIDERS if name != "openrouter-google"])
async def test_behind_a_gateway_too_gemini_wants_the_first_call_of_a_step_signed(
    hosts: dict[str, Host], origin: str
) -> None:
    """With its own signature, or with the words that Google names for calls of other models."""
    host = hosts["openrouter-google"]
    messages = (await hosts[origin].story()).messages[:4]
    host.will_say(5)
    await run_continue(AgentContext(SYSTEM, messages), host.config)
    [request] = host.asked()
    told = msgspec.json.decode(request.body)["messages"][2]
    signed = {
        item.get("id"): item["data"]
        for item in told.get("reasoning_details", ())
        if item["type"] == "reasoning.encrypted" and item["format"] == "google-gemini-v1"
    }
    own = PROVIDERS[origin].seal(1) if origin == "gemini" else _SKIP
    assert signed == {told["tool_calls"][0]["id"]: own}


# --- signed text with a thought in it ---------------------------------------------------------


@pytest.mark.slow
@in_one_loop
async def test_a_signature_stays_on_the_very_text_that_was_signed_or_goes() -> None:
    """The words of a thought in tags come back in other tags: that is not what was signed."""
    part = gemini_wire.text("<think>hm</think>Let me look.", "c2lnbmVk")
    answers = [gemini_wire.stream(gemini_wire.chunk(part, finish="STOP"))]
    answers.append(gemini_wire.stream(*gemini_wire.said()))
    async with gemini_wire.serving(answers) as (server, gemini):
        config = LoopConfig(stream=gemini)
        context = AgentContext().extend([UserMessage("Hi")])
        context = context.extend(await run_continue(context, config))
        await run("Go on.", context, config)
        asked = msgspec.json.decode(server.requests[1].body)["contents"][1]["parts"]
    assert "".join([part["text"] for part in asked]) == "<thought>hm</thought>Let me look."
    assert [p for p in asked if "thoughtSignature" in p and p["text"] != part["text"]] == []


# --- what other models make up ----------------------------------------------------------------

ODD_NAMES = ["functions.look", "look at", "9lives", "voir/près", "x" * 200, "ns:look", "-"]
ODD_IDS = ["functions.look:0", "a b", "é", "c" * 100, "call|fc_1", "0", "-"]


@pytest.mark.parametrize("odd", ODD_NAMES)
def test_a_tool_that_a_model_made_up_is_no_reason_to_refuse(odd: str) -> None:
    with all_cases() as case:
        for name in PROVIDERS:
            with case(name):
                reading = _read_by(name, ToolCall("a", odd, {}))
                assert [entry[0] for entry in reading.entries] == ["user", "call", "result"]


@pytest.mark.parametrize("odd", ODD_IDS)
def test_an_id_of_another_server_is_no_reason_to_refuse(odd: str) -> None:
    here, there = {"at": "here"}, {"at": "there"}
    calls = [ToolCall(odd, "look", here), ToolCall(f"{odd}'", "look", there)]
    with all_cases() as case:
        for name in PROVIDERS:
            with case(name):
                assert _read_by(name, *calls).entries[1:] == [
                    ("call", 0, "look", here),
                    ("call", 1, "look", there),
                    ("result", 0, "seen"),
                    ("result", 1, "seen"),
                ]


@pytest.mark.parametrize(
    "odd", [None, [1], "text", {"__clark_arg_parse_error": "e", "__clark_arg_raw": "{"}]
)
def test_arguments_that_are_no_object_are_no_reason_to_refuse(odd: Any) -> None:
    with all_cases() as case:
        for name in PROVIDERS:
            with case(name):
                reading = _read_by(name, ToolCall("a", "look", odd))
                assert [entry[0] for entry in reading.entries] == ["user", "call", "result"]


def _read_by(name: str, *calls: ToolCall) -> Reading:
    """How a provider is told of these calls."""
    results = [ToolResultMessage(c.id, c.name, (TextContent("seen"),)) for c in calls]
    said = AssistantMessage(calls, StopReason.TOOL_USE)
    history: list[AgentMessage] = [UserMessage("Look."), said, *results]
    provider = PROVIDERS[name]
    transport = provider.make("http://127.0.0.1:9", model=provider.model)
    request = StreamRequest(system_prompt="", messages=history, tools=[_SCHEMA])
    return provider.read(msgspec.json.decode(msgspec.json.encode(transport.encode(request))))


# --- the rules notice -------------------------------------------------------------------------

Break: TypeAlias = Callable[[Any], object]


def _body_of(name: str) -> Any:
    """A request with the whole conversation, written here."""
    provider = PROVIDERS[name]
    transport = provider.make("http://127.0.0.1:9", model=provider.model)
    calls = (ToolCall("a", "look", {"at": "cellar"}), ToolCall("b", "look", {"at": "left"}))
    said = AssistantMessage((TextContent("Let me look."), *calls), StopReason.TOOL_USE)
    locked = ToolResultMessage("a", "look", (TextContent(LOCKED),), is_error=True)
    seen = ToolResultMessage("b", "look", (TextContent("A lamp."), ImageContent(LAMP)))
    answer = AssistantMessage.from_text("There is a lamp.")
    history = (QUESTION, said, locked, seen, answer, UserMessage("What else?"))
    request = StreamRequest(system_prompt=SYSTEM, messages=history, tools=[_SCHEMA])
    return msgspec.json.decode(msgspec.json.encode(transport.encode(request)))


def _setting(path: str, value: Any) -> Break:
    """Sets what is at a path such as ``messages.2.role``."""

    def change(body: Any) -> None:
        *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        for step in way:
            body = body[step]
        body[last] = value

    return change


def _dropping(path: str) -> Break:
    def change(body: Any) -> None:
        *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        for step in way:
            body = body[step]
        del body[last]

    return change


_RESPONSES_THOUGHT: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
_MESSAGES_THOUGHT: dict[str, Any] = {"type": "thinking", "thinking": "x", "signature": "x"}

BREAKS: dict[str, list[Break]] = {
    "openai": [
        _dropping("messages.3"),
        _dropping("messages.2"),
        lambda body: body["messages"].insert(4, {"role": "user", "content": "between"}),
        lambda body: body["messages"].insert(3, body["messages"][4]),
        _setting("messages.2.reasoning_content", "x"),
        _setting("messages.2.tool_calls.0.id", "a b"),
        _setting("messages.2.tool_calls.0.id", "b"),
        _setting("messages.2.tool_calls.0.function.name", "look at"),
        _setting("messages.2.tool_calls.0.function.arguments", "{"),
        _setting("messages.2.tool_calls.0.format", "x"),
        _setting("messages.6.content", ""),
        _setting("messages.1.content.1.image_url.url", "data:image/png;base64,***"),
        _setting("messages.3.content", [{"type": "image_url"}]),
        _setting("format", "x"),
    ],
    "deepseek": [_dropping("messages.2.reasoning_content")],
    "compatible": [
        lambda body: body["messages"].append({"role": "user", "content": "again"}),
        lambda body: body["messages"].insert(2, {"role": "system", "content": "late"}),
    ],
    "openrouter-anthropic": [
        _setting("messages.2.reasoning_details", []),
        _setting("messages.2.reasoning_details", [{"type": "reasoning.text", "text": "x"}]),
        _setting(
            "messages.2.reasoning_details",
            [{"type": "reasoning.text", "text": "x", "format": "unknown", "model": "m"}],
        ),
        _setting("messages.2.reasoning", "x"),
    ],
    "responses": [
        _dropping("input.4"),
        _dropping("input.2"),
        lambda body: body["input"].insert(4, {**body["input"][0]}),
        lambda body: body["input"].insert(0, {**_RESPONSES_THOUGHT}),
        lambda body: body["input"].insert(6, {**_RESPONSES_THOUGHT, "id": "rs_1"}),
        lambda body: body["input"].append({**_RESPONSES_THOUGHT}),
        _setting("input.2.id", "fc_1"),
        _setting("input.2.name", "look at"),
        _setting("input.2.call_id", "x" * 65),
        _setting("input.1.content.0.type", "input_text"),
        _setting("store", True),
    ],
    "anthropic": [
        _dropping("messages.2"),
        _dropping("messages.2.content.0"),
        lambda body: body["messages"][2]["content"].insert(0, {"type": "text", "text": "x"}),
        _dropping("messages.2.content.0.is_error"),
        _setting("messages.1.content.1.id", "a:b"),
        _setting("messages.1.content.1.name", "look at"),
        _setting("messages.1.content.1.input", "{}"),
        lambda body: body["messages"][1]["content"].append(_MESSAGES_THOUGHT),
        lambda body: body["messages"][1]["content"].insert(0, {**_MESSAGES_THOUGHT, "index": 0}),
        lambda body: body["messages"][3]["content"].append({"type": "text", "text": " "}),
        _dropping("messages.4"),
        _setting("temperature", 0),
        lambda body: (
            body.update(thinking={"type": "enabled", "budget_tokens": 1024}),
            body.update(messages=body["messages"][:3]),
        ),
    ],
    "gemini": [
        _dropping("contents.2"),
        _dropping("contents.2.parts.0"),
        _dropping("contents.1.parts.1.thoughtSignature"),
        _setting("contents.1.parts.1.thoughtSignature", "not base64!"),
        _setting("contents.1.parts.0.format", "x"),
        _setting("contents.1.parts.1.functionCall.name", "9lives"),
        _setting("contents.1.parts.2.functionCall.id", "a"),
        _setting("contents.2.parts.0.functionResponse.name", "other"),
        _setting("contents.2.parts.0.functionResponse.response", {"output": LOCKED}),
        lambda body: body["contents"][2]["parts"].insert(0, {"text": "x"}),
        _setting("contents.1.role", "assistant"),
        _setting("contents.3.parts.0.text", ""),
    ],
}


@pytest.mark.parametrize("name", PROVIDERS)
def test_the_rules_take_a_sound_request(name: str) -> None:
    kinds = [entry[0] for entry in PROVIDERS[name].read(_body_of(name)).entries]
    assert kinds == [
        *("system", "user", "image", "image", "said", "call", "call", "result", "result"),
        *("image", "said", "user"),
    ]


@pytest.mark.parametrize("name", BREAKS)
def test_the_rules_notice_what_is_wrong(name: str) -> None:
    with all_cases() as case:
        for number, break_it in enumerate(BREAKS[name]):
            with case(f"break {number}"):
                body = _body_of(name)
                break_it(body)
                with pytest.raises(Refused):
                    PROVIDERS[name].read(body)


# --- the pure function ------------------------------------------------------------------------

MODELS = (None, "m1", "m2")


def _item(origin: ReasoningFormat, made_by: str | None) -> dict[str, Any]:
    named = {} if made_by is None else {"model": made_by}
    return {"type": "reasoning.encrypted", "data": "x", "format": str(origin), **named}


def _thoughtful(*items: Any) -> AssistantMessage:
    blocks = (
        ReasoningContent("So."),
        ReasoningDetailsContent(items),
        ThinkingContent("hm"),
        TextContent("Yes"),
        ToolCall("a", "look", {}),
    )
    return AssistantMessage(blocks, StopReason.TOOL_USE)


_formats = st.sampled_from([str(origin) for origin in ReasoningFormat])
_odd_items = open_json() | st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["reasoning.text", "reasoning.encrypted", "google.part"])
        | open_json(),
        "format": _formats | open_json(),
        "model": st.sampled_from(["m1", "m2"]) | open_json(),
        "data": open_json(),
        "signature": open_json(),
    },
)
_odd_messages = st.lists(_odd_items, max_size=3).map(lambda items: _thoughtful(*items))
_histories = st.lists(_odd_messages | messages(), max_size=4)
_targets = st.builds(
    ReasoningTarget,
    formats=st.frozensets(st.sampled_from(ReasoningFormat)),
    model=st.sampled_from(MODELS),
)


def _own(item: Any, target: ReasoningTarget) -> bool:
    if not isinstance(item, dict):
        return False
    origin = item.get("format")
    known = origin in [*ReasoningFormat] if isinstance(origin, str) else False
    if (origin if known else "unknown") not in target.formats:
        return False
    return target.model is None or item.get("model") in (None, target.model)


def _is_foreign(block: Any, target: ReasoningTarget) -> bool:
    """Whether it is an item that only another provider understands."""
    return isinstance(block, ProviderContent) and block.provider not in target.providers


@settings(max_examples=30)
@given(_histories, _targets)
def test_whatever_the_items_are(history: list[AgentMessage], target: ReasoningTarget) -> None:
    converted = convert_history(history, target)
    assert len(converted) == len(history)
    for before, after in zip(history, converted, strict=True):
        if not isinstance(before, AssistantMessage):
            assert after is before
            continue
        if all(_own(item, target) for item in before.reasoning_details_values) and not any(
            _is_foreign(block, target) for block in before.content
        ):
            assert after is before
            continue
        assert isinstance(after, AssistantMessage)
        items = [item for item in before.reasoning_details_values if _own(item, target)]
        assert [*after.reasoning_details_values] == items
        said = [
            b
            for b in before.content
            if not isinstance(b, _REASONING) and not _is_foreign(b, target)
        ]
        assert [b for b in after.content if not isinstance(b, _REASONING)] == said
        order = [b for b in after.content if not isinstance(b, ReasoningDetailsContent)]
        assert order == [b for b in before.content if b in order]
    again = convert_history(converted, target)
    assert all(one is other for one, other in zip(converted, again, strict=True))


_REASONING = (ReasoningContent, ReasoningDetailsContent)


def _deep(depth: int) -> Any:
    value: Any = "anthropic-claude-v1"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "odd",
    [_deep(1), _deep(100_000), 10**5000, float("nan"), {}, True, "\ud800", b"x"],
    ids=range(8),
)
@pytest.mark.parametrize("field", ["format", "model", "type"])
def test_no_item_is_too_odd(field: str, odd: Any) -> None:
    own = _item(ReasoningFormat.ANTHROPIC_CLAUDE_V1, None)
    told = _thoughtful({**own, field: odd})
    target = ReasoningTarget(formats=frozenset({ReasoningFormat.ANTHROPIC_CLAUDE_V1}), model="m1")
    [got] = convert_history([told], target)
    assert (got is told) == (field == "type")


_TRANSPORTS: dict[str, Transport[Any]] = {}


def _transport(name: str) -> Transport[Any]:
    if name not in _TRANSPORTS:
        provider = PROVIDERS[name]
        _TRANSPORTS[name] = provider.make("http://127.0.0.1:9", model=provider.model)
    return _TRANSPORTS[name]


_any_fields = {
    "type": st.sampled_from(
        ["reasoning.text", "reasoning.summary", "reasoning.encrypted", "google.part"]
    )
    | open_json(),
    "part": st.sampled_from(["call", "text", "thought", "other"]) | open_json(),
    "chars": st.integers(-2, 9) | open_json(),
    **dict.fromkeys(
        ("data", "text", "signature", "summary", "id", "value", "phase", "index"), open_json()
    ),
}


@pytest.mark.parametrize("name", PROVIDERS)
@settings(max_examples=12)
@given(data=st.data())
def test_odd_items_of_its_own_do_not_keep_a_request_from_being_written(
    name: str, data: st.DataObject
) -> None:
    transport = _transport(name)
    formats = [str(known) for known in transport.target.formats]
    origin = st.sampled_from(sorted(formats) or ["unknown"])
    item = st.fixed_dictionaries({"format": origin}, optional=_any_fields)
    message = _thoughtful(*data.draw(st.lists(item, max_size=3)))
    result = ToolResultMessage("a", "look", (TextContent("seen"),))
    history = (UserMessage("Look."), message, result, UserMessage("Go on."))
    request = StreamRequest(system_prompt="", messages=history, tools=[_SCHEMA])
    assert msgspec.json.encode(transport.encode(request))
