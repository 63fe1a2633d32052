"""Writes a history for Gemini: contents of parts, with their signatures.

A part of an answer may be signed, and the signature must be sent back on the same part.
`clark_agent.transports.gemini` keeps it as a reasoning item directly after what it signs:

    {"type": "reasoning.encrypted", "part": "call", "id": …, "data": signature}
    {"type": "reasoning.encrypted", "part": "text", "chars": …, "data": signature}
    {"type": "reasoning.text", "part": "thought", "text": …, "signature": signature}
    {"type": "reasoning.encrypted", "part": "block", "data": signature}

A signed text is the last ``chars`` characters before the item; 0 is a signed empty part, with which
streams often end. A part that no block of a transcript can hold is kept whole, as an item of this
provider. An item from a gateway has no ``part``: it belongs to the call with its id.

Gemini 3 rejects a step whose first call is not signed. A call that another model made gets the
placeholder that Google defines for this purpose (`UNSIGNED`).
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
"""The name of this provider in `ProviderContent` and `Annotation`."""
# The media types that a function's result may hold besides text.
_IN_RESULTS = ("image/", "application/pdf")

_GENERATION = re.compile(r"gemini-(\d+)")
_ALIAS = re.compile(r"gemini-[a-z-]+-latest")  # an alias of a model from Gemini 3 on

_UNUSUAL = re.compile(r"[^A-Za-z0-9_.:-]")
_LONGEST_NAME = 128

UNSIGNED = "skip_thought_signature_validator"


def generation_of(model: str) -> int | None:
    """Return the generation of a Gemini model; None: unknown."""
    name = model.rpartition("/")[2]
    if found := _GENERATION.match(name):
        return int(found[1])
    return 3 if _ALIAS.match(name) else None


class ContentsWriter:
    """Writes a history as contents.

    All results of a step are in one content, in the order of the calls, followed by the next user
    message. Contents of the same role are joined; empty ones are left out.
    """

    def __init__(self, model: str) -> None:
        generation = generation_of(model)
        self.instructions: list[str] = []
        self.contents: list[dict[str, Any]] = []
        # Models before Gemini 3 reject call ids; later ones require the ids that they sent.
        self._has_ids = generation is None or generation >= 3
        self._wants_signatures = self._takes_result_images = (generation or 0) >= 3
        self._open: dict[str, tuple[int, str]] = {}  # by call id: position and tool name
        self._results: list[ToolResultMessage] = []

    def write(self, message: AgentMessage) -> None:
        """Write the next message. Results are held back until the step is complete."""
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
        """Add to the system prompt; once there are contents, write a user message in tags."""
        if text and not self.contents:
            self.instructions.append(text)
        elif text:
            self._add("user", [{"text": f"<system>\n{text}\n</system>"}])

    def flush_results(self) -> None:
        """Write the pending results, then the media that results cannot hold."""
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
        response = {"error" if message.is_error else "output": message.plain_text}
        _, name = self._open[message.tool_call_id]
        answer: dict[str, Any] = {"name": name, "response": response}
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
    """Builds the parts of a model's content, each with its signature."""

    def __init__(self, *, has_ids: bool) -> None:
        self.parts: list[Part] = []
        self._has_ids = has_ids
        self._calls: dict[str, Part] = {}
        self._for_later: list[tuple[str, str]] = []  # call ids and their signatures
        self._unchanged = 0  # how many characters at the end are unchanged text of the model

    def thought(self, text: str) -> None:
        """Add a thought in tags. They may differ from the model's tags, so no signature fits."""
        self.text(text)
        self._unchanged = 0

    def text(self, text: str) -> None:
        self._unchanged += len(text)
        if text and self.parts and self.parts[-1].keys() == {"text"}:
            self.parts[-1]["text"] += text
        elif text:
            self.parts.append({"text": text})

    def part(self, part: Part) -> None:
        """Add a whole part."""
        self.parts.append(part)

    def call(self, call: ToolCall) -> None:
        written: dict[str, Any] = {"name": _safe_name(call.name), "args": arguments_object(call)}
        if self._has_ids:
            written["id"] = call.id
        self.parts.append({"functionCall": written})
        self._calls.setdefault(call.id, self.parts[-1])

    def item(self, item: Any) -> None:
        """Apply a reasoning item. It is skipped if its part is gone."""
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
        """Sign calls by id, for signatures that did not directly follow their call."""
        for call_id, signature in self._for_later:
            if (part := self._calls.get(call_id)) is not None:
                part.setdefault("thoughtSignature", signature)

    def _sign_text(self, chars: Any, signature: str) -> None:
        if chars == 0:
            self.parts.append({"text": "", "thoughtSignature": signature})
            return
        last = self.parts[-1] if self.parts else {}
        text = last["text"] if last.keys() == {"text"} else ""
        if not isinstance(chars, int) or not 0 < chars <= min(len(text), self._unchanged):
            return
        signed = {"text": text[-chars:], "thoughtSignature": signature}
        self.parts[-1:] = [{"text": text[:-chars]}, signed] if chars < len(text) else [signed]

    def _sign_block(self, signature: str) -> None:
        """Sign the whole part before the item."""
        last = self.parts[-1] if self.parts else {}
        if last and not last.keys() & {"text", "functionCall"}:
            last.setdefault("thoughtSignature", signature)

    def _sign_call(self, item: Mapping[str, Any], signature: str) -> None:
        """Sign the call before the item. Its id is not compared, because it may have changed.

        An item from a gateway may be anywhere and is matched by its id only.
        """
        last = self.parts[-1] if self.parts else {}
        if item.get("part") == "call" and "functionCall" in last:
            last.setdefault("thoughtSignature", signature)
        else:
            self._for_later.append((str(item.get("id")), signature))


def _safe_name(name: str) -> str:
    """Return a name that the provider accepts: models invent others. It starts with a letter or an
    underscore.
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
    """Whether the provider accepts the file: its media type must be known."""
    return bool(media_type_of(file))


def _media_part(block: ImageContent | FileContent) -> Part:
    kind, data = media_type_of(block), inline_data(block.source)
    if data is None:
        return {"fileData": {"fileUri": block.source, **({"mimeType": kind} if kind else {})}}
    return {"inlineData": {"mimeType": kind or "image/png", "data": data}}


def _fits_in_result(part: Part) -> bool:
    inline = part.get("inlineData")
    return inline is not None and inline["mimeType"].startswith(_IN_RESULTS)
