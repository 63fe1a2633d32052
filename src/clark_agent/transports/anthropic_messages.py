"""Writes a history for the Messages API: turns of blocks, and cache marks.

- user and assistant alternate, starting with the user. The last turn is the user's, unless the
  model continues a prefilled answer;
- tool results come first in the turn after their calls, in the order of the calls;
- blank text is left out, because the API rejects it;
- thinking is sent back unchanged, signed and in its place, or not at all. It is never last;
- calls and results of server tools, and the citations of a text, are sent back unchanged too;
- a picture that a model made is sent as the user's: assistant turns cannot hold pictures.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, assert_never

from clark_agent.errors import TransportError
from clark_agent.reasoning import ReasoningEncrypted, ReasoningText, parse_items
from clark_agent.stream import StreamRequest
from clark_agent.transports.http.reasoning_transfer import ReasoningTarget
from clark_agent.transports.http.request import (
    arguments_object,
    inline_data,
    media_type_of,
    safe_id,
    safe_name,
    sendable,
    stable_part,
    woven_text,
)
from clark_agent.types import (
    AgentMessage,
    Annotation,
    AssistantBlock,
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
    ToolResultBlock,
    ToolResultMessage,
    UserBlock,
    UserMessage,
)

__all__ = ["PROVIDER", "MessagesWriter", "keep_in_cache", "may_think_with_budget", "seals_of"]

PROVIDER = "anthropic"
"""The name of this provider in `ProviderContent` and `Annotation`."""

_Block = dict[str, Any]

_THINKING = ("thinking", "redacted_thinking")
_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
_PDF = "application/pdf"
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

# Texts for places where the API requires one and the history has none.
_OPENING = "(The conversation starts here.)"
_GO_ON = "Go on."
_NO_OUTPUT = "(no output)"
_MADE_BY_MODEL = "(Pictures that the assistant made:)"

_LONGEST_NAME = 128


class MessagesWriter:
    """Writes a history as turns of blocks, without thinking that the server has rejected."""

    def __init__(self, refused: Set[int]) -> None:
        self.system: list[_Block] = []
        self.messages: list[dict[str, Any]] = []
        self.stable: tuple[int, int] = (0, 0)
        """The number of stable messages, and the number of blocks in the last of them."""
        self._refused = refused
        self._results: list[tuple[int, _Block]] = []  # by the position of the call
        self._positions: dict[str, int] = {}
        self._images: list[_Block] = []  # pictures that the model made
        self._server_calls: set[Any] = set()  # the ids of calls of server tools

    def write_all(self, request: StreamRequest, target: ReasoningTarget, provider: str) -> None:
        """Write the system prompt and the messages, and record where the stable part ends."""
        self._system(request.system_prompt)
        messages = sendable(
            request.messages, target, provider=provider, takes_file=lambda file: bool(_file(file))
        )
        stable = len(stable_part(request.messages, messages))
        for message in messages[:stable]:
            self._write(message)
        self._flush_results()
        if self.messages:
            self.stable = (len(self.messages), len(self.messages[-1]["content"]))
        for message in messages[stable:]:
            self._write(message)
        self._flush_results()

    def finish(self, *, takes_prefill: bool) -> None:
        """End with a user turn, unless the model continues a prefilled answer."""
        if not self.messages:
            self._add("user", [_text(_OPENING)])
        last = self.messages[-1]
        if last["role"] == "user":
            return
        final = last["content"][-1]
        if takes_prefill and final["type"] == "text":
            final["text"] = final["text"].rstrip()
        else:
            self._add("user", [_text(_GO_ON)])

    def _write(self, message: AgentMessage) -> None:
        if not isinstance(message, ToolResultMessage):
            self._flush_results()
        match message:
            case SystemMessage():
                self._system(message.content)
            case UserMessage():
                content = message.content
                blocks = [TextContent(content)] if isinstance(content, str) else content
                self._add("user", _visible(blocks))
            case AssistantMessage():
                self._assistant(message)
            case ToolResultMessage():
                self._result(message)
            case CustomMessage():
                raise AssertionError("custom messages are left out before")
            case _:
                assert_never(message)

    def _system(self, text: str) -> None:
        if not text.strip():
            return
        if self.messages:
            self._add("user", [_text(f"<system>\n{text}\n</system>")])
        elif self.system:
            self.system[0]["text"] += f"\n\n{text}"
        else:
            self.system.append(_text(text))

    def _add(self, role: str, blocks: list[_Block]) -> None:
        if not blocks:
            return
        if not self.messages and role == "assistant":
            self.messages.append({"role": "user", "content": [_text(_OPENING)]})
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += blocks
        else:
            self.messages.append({"role": role, "content": blocks})

    def assistant_blocks(self, message: AssistantMessage) -> list[_Block]:
        """Return the blocks of an assistant message, in their order."""
        blocks: list[_Block] = []
        text_blocks: list[AssistantBlock] = []
        citations = _Citations(message.annotations)

        def end_text() -> None:
            text = woven_text(text_blocks)
            plain = "".join([block.text for block in text_blocks if isinstance(block, TextContent)])
            text_blocks.clear()
            cited = citations.cut(plain)
            if text.strip():
                blocks.extend(cited if text == plain else [_text(text)])

        for block in message.content:
            match block:
                case TextContent() | ThinkingContent():
                    text_blocks.append(block)
                case ReasoningContent() | ImageContent():
                    pass  # reasoning goes back as details, pictures in a user turn
                case ReasoningDetailsContent():
                    end_text()
                    thought = _thinking_blocks(block.details)
                    blocks += [b for b in thought if _seal(b) not in self._refused]
                case ProviderContent():
                    end_text()
                    if isinstance(block.data, dict) and "type" in block.data:
                        blocks.append({**block.data})
                case ToolCall():
                    end_text()
                    blocks.append(_tool_use(block))
                case _:
                    assert_never(block)
        end_text()
        while blocks and blocks[-1]["type"] in _THINKING:
            blocks.pop()  # thinking must not be last
        return blocks

    def _assistant(self, message: AssistantMessage) -> None:
        blocks = _answered(self._with_calls(self.assistant_blocks(message)))
        self._server_calls |= {b.get("id") for b in blocks if b["type"] in _SERVER_CALLS}
        calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        self._positions = {call_id: position for position, call_id in enumerate(calls)}
        self._add("assistant", blocks)
        self._images += [_image(b) for b in message.content if isinstance(b, ImageContent)]

    def _with_calls(self, blocks: list[_Block]) -> list[_Block]:
        """Drop results of server tools without an earlier call: the server rejects them."""
        called, kept = set(self._server_calls), []
        for block in blocks:
            if block["type"] in _SERVER_CALLS:
                called.add(block.get("id"))
            if "tool_use_id" not in block or block["tool_use_id"] in called:
                kept.append(block)
        return kept

    def _result(self, message: ToolResultMessage) -> None:
        call_id = safe_id(message.tool_call_id, 64)
        block: _Block = {
            "type": "tool_result",
            "tool_use_id": call_id,
            "content": _visible(message.content) or [_text(_NO_OUTPUT)],
        }
        if message.is_error:
            block["is_error"] = True
        self._results.append((self._positions.get(call_id, len(self._positions)), block))

    def _flush_results(self) -> None:
        """Write the pending results in the order of their calls, then the model's pictures."""
        results, self._results = self._results, []
        images, self._images = self._images, []
        self._add("user", [block for _, block in sorted(results, key=lambda pair: pair[0])])
        self._add("user", [_text(_MADE_BY_MODEL), *images] if images else [])


def _text(text: str) -> _Block:
    return {"type": "text", "text": text}


def _tool_use(call: ToolCall) -> _Block:
    return {
        "type": "tool_use",
        "id": safe_id(call.id, 64),
        "name": safe_name(call.name, _LONGEST_NAME),
        "input": arguments_object(call),
    }


def _thinking_blocks(details: Iterable[Any]) -> list[_Block]:
    """Return the blocks as the server sent them. It accepts only signed or encrypted ones."""
    blocks: list[_Block] = []
    for item in parse_items(details):
        match item:
            case ReasoningText(text=text, signature=str(signature)) if signature:
                blocks.append({"type": "thinking", "thinking": text, "signature": signature})
            case ReasoningEncrypted(data=data) if data:
                blocks.append({"type": "redacted_thinking", "data": data})
            case _:
                pass
    return blocks


def _seal(block: _Block) -> int:
    """Return a hash that identifies a block of thinking."""
    return hash(block["data" if block["type"] == "redacted_thinking" else "signature"])


def seals_of(messages: Iterable[AgentMessage]) -> set[int]:
    """Return the hashes of all blocks of thinking in a history."""
    return {
        _seal(block)
        for message in messages
        if isinstance(message, AssistantMessage)
        for block in _thinking_blocks(message.reasoning_details_values)
    }


def _answered(blocks: list[_Block]) -> list[_Block]:
    """Drop calls of server tools without a result, from an answer that was cut off: the server
    rejects them. If the message also calls the host's tools, the results follow in the next turn.
    """
    if any(block["type"] == "tool_use" for block in blocks):
        return blocks
    answered = {block.get("tool_use_id") for block in blocks}
    return [b for b in blocks if b["type"] not in _SERVER_CALLS or b.get("id") in answered]


class _Citations:
    """Assigns the citations of a message to its texts."""

    def __init__(self, annotations: Sequence[Annotation]) -> None:
        self._spans: dict[tuple[int, int], list[Any]] = {}
        self._place = 0
        for note in annotations:
            start, end, data = note.start, note.end, note.data
            is_own = note.provider == PROVIDER and isinstance(data, dict)
            if is_own and start is not None and end is not None:
                self._spans.setdefault((start, end), []).append(data)

    def cut(self, text: str) -> list[_Block]:
        """Split the next text of the message into blocks with and without citations."""
        blocks: list[_Block] = []
        begin, end = self._place, self._place + len(text)
        self._place = end
        place = begin
        for (start, stop), citations in sorted(self._spans.items()):
            if place <= start < stop <= end:
                blocks.append(_text(text[place - begin : start - begin]))
                cited = _text(text[start - begin : stop - begin])
                blocks.append({**cited, "citations": citations})
                place = stop
        blocks.append(_text(text[place - begin :]))
        return [block for block in blocks if block["text"].strip()]


def _visible(blocks: Sequence[UserBlock | ToolResultBlock]) -> list[_Block]:
    written = [_user_block(block) for block in blocks]
    return [block for block in written if block["type"] != "text" or block["text"].strip()]


def _user_block(block: UserBlock | ToolResultBlock) -> _Block:
    match block:
        case TextContent():
            return _text(block.text)
        case ImageContent():
            return _image(block)
        case FileContent():
            written = _file(block)
            assert written is not None, "a file that is not taken is refused before"
            return written
        case _:
            assert_never(block)


def _image(image: ImageContent) -> _Block:
    """Return the image, or a text in place of an image that the server does not accept."""
    if image.source.startswith(("http://", "https://")):
        return {"type": "image", "source": {"type": "url", "url": image.source}}
    data, media_type = inline_data(image.source), media_type_of(image)
    if data is not None and media_type in _IMAGE_TYPES:
        inline = {"type": "base64", "media_type": media_type, "data": data}
        return {"type": "image", "source": inline}
    return _text(f"[image: {image.alt}]" if image.alt else "[image]")


def _file(file: FileContent) -> _Block | None:
    """Write a PDF or a text as a document, an image as an image; None: not supported."""
    media_type, data = media_type_of(file), inline_data(file.source)
    if media_type in _IMAGE_TYPES:
        return _image(ImageContent(file.source, media_type))
    source: dict[str, Any]
    if media_type == _PDF and data is not None:
        source = {"type": "base64", "media_type": _PDF, "data": data}
    elif media_type == _PDF and file.source.startswith(("http://", "https://")):
        source = {"type": "url", "url": file.source}
    elif media_type.startswith("text/") and data is not None:
        try:
            text = b64decode(f"{data}==").decode(errors="replace")  # extra padding is ignored
        except ValueError:
            raise TransportError(f"a file of type {media_type} is not valid base64") from None
        source = {"type": "text", "media_type": "text/plain", "data": text}
    else:
        return None
    return {"type": "document", "source": source, **({"title": file.name} if file.name else {})}


def may_think_with_budget(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a model with a thinking budget may think here.

    The server rejects thinking in a tool round that began without it, for example with another
    model, and in a prefilled message.
    """
    last = messages[-1]
    if last["role"] == "assistant":
        return False
    is_round = last["content"][0]["type"] == "tool_result"
    return not is_round or messages[-2]["content"][0]["type"] in _THINKING


def keep_in_cache(writer: MessagesWriter, tools: Sequence[_Block], mark: Mapping[str, str]) -> None:
    """Mark the ends of the prompt prefixes to cache: at most four, the API's limit.

    The marks are at the end of the tools, of the system prompt, of the stable messages, and of the
    user turn before, where the last request ended. The last mark finds that cache entry even if
    more than twenty blocks were added since; the server looks back over only twenty by itself.
    """
    marked = [blocks[-1] for blocks in (tools, writer.system) if blocks]
    turns, size = writer.stable
    stable = writer.messages[:turns]
    if stable:
        marked.append(stable[-1]["content"][size - 1])
        earlier = [message for message in stable[:-1] if message["role"] == "user"]
        marked += [message["content"][-1] for message in earlier[-1:]]
    for block in marked:
        block["cache_control"] = {**mark}
