"""A history as Gemini wants it: contents of parts, signed as they came.

A part of an answer may be signed, and the signature must come back on the very part that it came
with. `clark_agent.transports.gemini` keeps it as a reasoning item right behind what it signs:

    {"type": "reasoning.encrypted", "part": "call", "id": …, "data": signature}
    {"type": "reasoning.encrypted", "part": "text", "chars": …, "data": signature}
    {"type": "reasoning.text", "part": "thought", "text": …, "signature": signature}
    {"type": "reasoning.encrypted", "part": "block", "data": signature}

A signed text is as many characters of what stands before the item; a part of none, which is how a
stream likes to end, is one too. A part of a kind that a transcript has no block for is kept whole,
as an item of this provider. An item that came through a gateway has no ``part``: it belongs to the
call of its id.

Gemini 3 refuses a step whose first call is not signed. A call that another model made gets the
words that Google names for that purpose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, assert_never

from clark_agent.transports.http.request import (
    arguments_object,
    inline_data,
    media_type_of,
    woven_text,
)
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UserBlock,
    UserMessage,
)

__all__ = ["PROVIDER", "UNSIGNED", "ContentsWriter", "Part", "generation_of", "takes_file"]

Part: TypeAlias = dict[str, Any]

PROVIDER = "google"
"""Whose items these parts are, in a transcript."""
# What the result of a function may hold beside text.
_IN_RESULTS = ("image/", "application/pdf")

_GENERATION = re.compile(r"gemini-(\d+)")
_ALIAS = re.compile(r"gemini-[a-z-]+-latest")  # of models that are not older than Gemini 3

_UNUSUAL = re.compile(r"[^A-Za-z0-9_.:-]")
_LONGEST_NAME = 128

UNSIGNED = "skip_thought_signature_validator"


def generation_of(model: str) -> int | None:
    """Which generation of Gemini a model is of; None: nobody knows."""
    name = model.rpartition("/")[2]
    if found := _GENERATION.match(name):
        return int(found[1])
    return 3 if _ALIAS.match(name) else None


class ContentsWriter:
    """Writes a history as contents.

    All results of a step stand in one content, in the order of the calls, and what the user says
    next behind them. Contents of the same role are joined, empty ones left out.
    """

    def __init__(self, model: str) -> None:
        generation = generation_of(model)
        self.instructions: list[str] = []
        self.contents: list[dict[str, Any]] = []
        # A model that knows no ids refuses them, one that gave some does not answer without.
        self._has_ids = generation is None or generation >= 3
        self._wants_signatures = self._takes_result_images = (generation or 0) >= 3
        self._open: dict[str, tuple[int, str]] = {}  # which calls are being answered, and of what
        self._results: list[ToolResultMessage] = []

    def write(self, message: AgentMessage) -> None:
        """Write the next message. Results are held back until all of a step are there."""
        if not isinstance(message, ToolResultMessage):
            self.flush_results()
        match message:
            case SystemMessage():
                self.system(message.content)
            case UserMessage():
                self._add("user", _user_parts(message.content))
            case AssistantMessage():
                calls = enumerate(message.tool_calls)
                self._open = {call.id: (n, _safe_name(call.name)) for n, call in calls}
                self._add("model", self._model_parts(message))
            case ToolResultMessage():
                self._results.append(message)
            case CustomMessage():
                raise AssertionError("custom messages are left out before")
            case _:
                assert_never(message)

    def system(self, text: str) -> None:
        """Write an instruction: with the system prompt, or as a user's once others have spoken."""
        if text and not self.contents:
            self.instructions.append(text)
        elif text:
            self._add("user", [{"text": f"<system>\n{text}\n</system>"}])

    def flush_results(self) -> None:
        """Write the results that have come, and behind them the images that do not fit in."""
        results, self._results = self._results, []
        results.sort(key=lambda result: self._open[result.tool_call_id])
        media: list[Part] = []
        self._add("user", [self._result(result, media) for result in results])
        self._add("user", media)

    def _add(self, role: str, parts: list[Part]) -> None:
        if not parts:
            return
        if self.contents and self.contents[-1]["role"] == role:
            self.contents[-1]["parts"] += parts
        else:
            self.contents.append({"role": role, "parts": parts})

    def _result(self, message: ToolResultMessage, media: list[Part]) -> Part:
        said = {"error" if message.is_error else "output": message.plain_text}
        _, name = self._open[message.tool_call_id]
        answer: dict[str, Any] = {"name": name, "response": said}
        if self._has_ids:
            answer["id"] = message.tool_call_id
        blocks = [b for b in message.content if not isinstance(b, TextContent)]
        seen = [_media_part(block) for block in blocks]
        if self._takes_result_images:
            inside = [part for part in seen if _fits_in_result(part)]
            seen = [part for part in seen if not _fits_in_result(part)]
            if inside:
                answer["parts"] = inside
        if seen:
            has_files = any(isinstance(block, FileContent) for block in blocks)
            media += [{"text": f"{'Files' if has_files else 'Images'} from the tool {name}:"}]
            media += seen
        return {"functionResponse": answer}

    def _model_parts(self, message: AssistantMessage) -> list[Part]:
        turn = _ModelTurn(has_ids=self._has_ids)
        for block in message.content:
            match block:
                case TextContent():
                    turn.text(block.text)
                case ThinkingContent():
                    turn.thought(woven_text([block]))
                case ToolCall():
                    turn.call(block)
                case ReasoningDetailsContent():
                    for item in block.details:
                        turn.item(item)
                case ImageContent():
                    turn.part(_media_part(block))
                case ProviderContent():
                    if isinstance(block.data, dict) and block.data:
                        turn.part({**block.data})
                case ReasoningContent():
                    pass
                case _:
                    assert_never(block)
        turn.sign_by_id()
        first = next((part for part in turn.parts if "functionCall" in part), None)
        if first is not None and self._wants_signatures:
            first.setdefault("thoughtSignature", UNSIGNED)
        return turn.parts


class _ModelTurn:
    """The parts of a model's content, each with the signature that it came with."""

    def __init__(self, *, has_ids: bool) -> None:
        self.parts: list[Part] = []
        self._has_ids = has_ids
        self._calls: dict[str, Part] = {}
        self._for_later: list[tuple[str, str]] = []  # ids of calls, and their signatures
        self._said = 0  # how many characters at the end are as the model wrote them

    def thought(self, text: str) -> None:
        """A thought in tags, which need not be those that the model wrote."""
        self.text(text)
        self._said = 0

    def text(self, text: str) -> None:
        self._said += len(text)
        if text and self.parts and self.parts[-1].keys() == {"text"}:
            self.parts[-1]["text"] += text
        elif text:
            self.parts.append({"text": text})

    def part(self, part: Part) -> None:
        """A whole part."""
        self.parts.append(part)

    def call(self, call: ToolCall) -> None:
        written: dict[str, Any] = {"name": _safe_name(call.name), "args": arguments_object(call)}
        if self._has_ids:
            written["id"] = call.id
        self.parts.append({"functionCall": written})
        self._calls.setdefault(call.id, self.parts[-1])

    def item(self, item: Any) -> None:
        """Take a reasoning item. One whose part is not there any more is left out."""
        match item:
            case {"type": "reasoning.encrypted", "part": "block", "data": str(signature)}:
                self._sign_block(signature)
            case {"part": "thought", "text": str(text), "signature": str(signature)}:
                thought = {"text": text, "thought": True, "thoughtSignature": signature}
                self.parts.append(thought)
            case {"type": "reasoning.encrypted", "part": "text", "data": str(signature)}:
                self._sign_text(item.get("chars"), signature)
            case {"type": "reasoning.encrypted", "data": str(signature)}:
                self._sign_call(item, signature)
            case _:
                pass

    def sign_by_id(self) -> None:
        """Sign the calls whose signatures did not stand behind them."""
        for call_id, signature in self._for_later:
            if (part := self._calls.get(call_id)) is not None:
                part.setdefault("thoughtSignature", signature)

    def _sign_text(self, chars: Any, signature: str) -> None:
        if chars == 0:
            self.parts.append({"text": "", "thoughtSignature": signature})
            return
        last = self.parts[-1] if self.parts else {}
        text = last["text"] if last.keys() == {"text"} else ""
        if not isinstance(chars, int) or not 0 < chars <= min(len(text), self._said):
            return
        signed = {"text": text[-chars:], "thoughtSignature": signature}
        self.parts[-1:] = [{"text": text[:-chars]}, signed] if chars < len(text) else [signed]

    def _sign_block(self, signature: str) -> None:
        """Sign the part that stands before the item, which came whole."""
        last = self.parts[-1] if self.parts else {}
        if last and not last.keys() & {"text", "functionCall"}:
            last.setdefault("thoughtSignature", signature)

    def _sign_call(self, item: Mapping[str, Any], signature: str) -> None:
        """Sign the call that stands before the item: its id may have been changed in between.

        An item that came through a gateway stands anywhere, and has nothing but the id.
        """
        last = self.parts[-1] if self.parts else {}
        if item.get("part") == "call" and "functionCall" in last:
            last.setdefault("thoughtSignature", signature)
        else:
            self._for_later.append((str(item.get("id")), signature))


def _safe_name(name: str) -> str:
    """A name in letters that the provider takes, the first of them no digit and no sign: models
    make up others.
    """
    known = _UNUSUAL.sub("_", name) or "unknown"
    return (known if known[0].isalpha() or known[0] == "_" else f"_{known}")[:_LONGEST_NAME]


def _user_parts(content: str | Sequence[UserBlock]) -> list[Part]:
    if isinstance(content, str):
        return [{"text": content}] if content else []
    return [
        {"text": block.text} if isinstance(block, TextContent) else _media_part(block)
        for block in content
        if not isinstance(block, TextContent) or block.text
    ]


def takes_file(file: FileContent) -> bool:
    """Whether the provider takes the file: it must know what it is."""
    return bool(media_type_of(file))


def _media_part(block: ImageContent | FileContent) -> Part:
    kind, data = media_type_of(block), inline_data(block.source)
    if data is None:
        return {"fileData": {"fileUri": block.source, **({"mimeType": kind} if kind else {})}}
    return {"inlineData": {"mimeType": kind or "image/png", "data": data}}


def _fits_in_result(part: Part) -> bool:
    inline = part.get("inlineData")
    return inline is not None and inline["mimeType"].startswith(_IN_RESULTS)
