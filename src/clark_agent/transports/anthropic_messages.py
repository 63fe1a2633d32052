"""A history as the Messages API wants it: turns of blocks, and marks for its cache.

- user and assistant speak by turns, the user first, and the last word is the user's, unless the
  model goes on with words that are put into its mouth;
- results of tools come first in the turn behind their calls, in the order of the calls;
- text must have something to read in it; what is blank is left out;
- thinking goes back as it came, signed and in its place, or not at all, and never comes last;
- so do the calls of tools on the server's side and what came of them, and the citations of a text;
- a picture that a model made goes back as the user's: an assistant has no pictures here.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, assert_never

from clark_agent.errors import TransportError
from clark_agent.reasoning import ReasoningEncrypted, ReasoningText, parse_items
from clark_agent.stream import StreamRequest
from clark_agent.transports.http.reasoning_transfer import ReplayTarget
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
"""Whose items these blocks are, in a transcript."""

_Block = dict[str, Any]

_THINKING = ("thinking", "redacted_thinking")
_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
_PDF = "application/pdf"
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

# Said for a user where the wire wants one and there is none.
_OPENING = "(The conversation starts here.)"
_GO_ON = "Go on."
_NO_OUTPUT = "(no output)"
_MADE_BY_MODEL = "(Pictures that the assistant made:)"

_LONGEST_NAME = 128


class MessagesWriter:
    """Writes a history as turns of blocks, without the thinking that was refused."""

    def __init__(self, refused: Set[int]) -> None:
        self.system: list[_Block] = []
        self.messages: list[dict[str, Any]] = []
        self.stable: tuple[int, int] = (0, 0)
        """How many messages stay, and how many blocks of the last of them."""
        self._refused = refused
        self._results: list[tuple[int, _Block]] = []  # by the position of the call
        self._positions: dict[str, int] = {}
        self._images: list[_Block] = []  # that the model made
        self._server_calls: set[Any] = set()  # of tools on the server's side, by their ids

    def write_all(self, request: StreamRequest, target: ReplayTarget, provider: str) -> None:
        """The system prompt and the messages, and behind which of them the stable part ends."""
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
        """See that the user has the last word, unless the model goes on with its own."""
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
        """What the model said, as it came."""
        blocks: list[_Block] = []
        said: list[AssistantBlock] = []
        citations = _Citations(message.annotations)

        def end_text() -> None:
            text = woven_text(said)
            plain = "".join([block.text for block in said if isinstance(block, TextContent)])
            said.clear()
            cited = citations.cut(plain)
            if text.strip():
                blocks.extend(cited if text == plain else [_text(text)])

        for block in message.content:
            match block:
                case TextContent() | ThinkingContent():
                    said.append(block)
                case ReasoningContent() | ImageContent():
                    pass  # the readable side of what the details carry; what only a user can show
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
            blocks.pop()  # it may not come last
        return blocks

    def _assistant(self, message: AssistantMessage) -> None:
        blocks = _answered(self._with_calls(self.assistant_blocks(message)))
        self._server_calls |= {b.get("id") for b in blocks if b["type"] in _SERVER_CALLS}
        calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        self._positions = {call_id: position for position, call_id in enumerate(calls)}
        self._add("assistant", blocks)
        self._images += [_image(b) for b in message.content if isinstance(b, ImageContent)]

    def _with_calls(self, blocks: list[_Block]) -> list[_Block]:
        """Without the results of the server's tools whose calls are not before them: they are
        refused.
        """
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
        """The results so far, in the order of their calls, and the pictures of the model."""
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
    """The blocks as the server made them. What it has not signed it does not take back."""
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
    """What tells one block of thinking from all others."""
    return hash(block["data" if block["type"] == "redacted_thinking" else "signature"])


def seals_of(messages: Iterable[AgentMessage]) -> set[int]:
    """A number for each block of thinking in a history."""
    return {
        _seal(block)
        for message in messages
        if isinstance(message, AssistantMessage)
        for block in _thinking_blocks(message.reasoning_details_values)
    }


def _answered(blocks: list[_Block]) -> list[_Block]:
    """Without the calls of the server's tools that were never answered, in an answer that was cut
    off: they are refused. Beside calls of our own they are answered in the next turn.
    """
    if any(block["type"] == "tool_use" for block in blocks):
        return blocks
    answered = {block.get("tool_use_id") for block in blocks}
    return [b for b in blocks if b["type"] not in _SERVER_CALLS or b.get("id") in answered]


class _Citations:
    """The citations of a message, for the texts that they belong to."""

    def __init__(self, annotations: Sequence[Annotation]) -> None:
        self._spans: dict[tuple[int, int], list[Any]] = {}
        self._place = 0
        for note in annotations:
            start, end, data = note.start, note.end, note.data
            is_own = note.provider == PROVIDER and isinstance(data, dict)
            if is_own and start is not None and end is not None:
                self._spans.setdefault((start, end), []).append(data)

    def cut(self, text: str) -> list[_Block]:
        """The next text of the message, in the blocks that its citations make of it."""
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
    """The image, or a word for one that the server would not take."""
    if image.source.startswith(("http://", "https://")):
        return {"type": "image", "source": {"type": "url", "url": image.source}}
    data, media_type = inline_data(image.source), media_type_of(image)
    if data is not None and media_type in _IMAGE_TYPES:
        inline = {"type": "base64", "media_type": media_type, "data": data}
        return {"type": "image", "source": inline}
    return _text(f"[image: {image.alt}]" if image.alt else "[image]")


def _file(file: FileContent) -> _Block | None:
    """A PDF or a text as a document, an image as one; None: the server takes no such file."""
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
            text = b64decode(f"{data}==").decode(errors="replace")  # too much padding does no harm
        except ValueError:
            raise TransportError(f"a file of type {media_type} is no base64") from None
        source = {"type": "text", "media_type": "text/plain", "data": text}
    else:
        return None
    return {"type": "document", "source": source, **({"title": file.name} if file.name else {})}


def may_think_with_budget(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the server would let the model think here.

    A round of tools that began without thinking, with another model say, must end without; and so
    must a message that is begun for the model.
    """
    last = messages[-1]
    if last["role"] == "assistant":
        return False
    is_round = last["content"][0]["type"] == "tool_result"
    return not is_round or messages[-2]["content"][0]["type"] in _THINKING


def keep_in_cache(writer: MessagesWriter, tools: Sequence[_Block], mark: Mapping[str, str]) -> None:
    """Mark where the prompt should be kept: at most four places, each of them the last of its kind.

    The turn of the user before the newest is where the last request ended. With a mark there too,
    it is found however many blocks have come since; the server looks back over twenty by itself.
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
