"""A history as the Messages API wants it: turns of blocks, and marks for its cache.

- user and assistant speak by turns, the user first, and the last word is the user's, unless the
  model goes on with words that are put into its mouth;
- results of tools come first in the turn behind their calls, in the order of the calls;
- text must have something to read in it; what is blank is left out;
- thinking goes back as it came, signed and in its place, or not at all, and never comes last.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, assert_never
from urllib.parse import unquote_to_bytes

from clark_agent.reasoning import ReasoningEncrypted, ReasoningText, parse_items
from clark_agent.stream import StreamRequest
from clark_agent.transcript import MessageView
from clark_agent.transports.handover import ReplayTarget
from clark_agent.transports.outgoing import (
    arguments_object,
    safe_id,
    safe_name,
    sendable,
    woven_text,
)
from clark_agent.types import (
    AgentMessage,
    AssistantBlock,
    AssistantMessage,
    CustomMessage,
    ImageContent,
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

__all__ = ["MessagesWriter", "keep_in_cache", "may_think_with_budget", "seals_of"]

_Block = dict[str, Any]

_THINKING = ("thinking", "redacted_thinking")
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

# Said for a user where the wire wants one and there is none.
_OPENING = "(The conversation starts here.)"
_GO_ON = "Go on."
_NO_OUTPUT = "(no output)"

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

    def write_all(self, request: StreamRequest, target: ReplayTarget) -> None:
        """The system prompt and the messages, and behind which of them the stable part ends."""
        self._system(request.system_prompt)
        messages = sendable(request.messages, target)
        view = request.messages
        tail = view.tail if isinstance(view, MessageView) else ()
        passing = [message for message in tail if not isinstance(message, CustomMessage)]
        stable = max(0, len(messages) - len(passing))
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

    def _assistant(self, message: AssistantMessage) -> None:
        blocks: list[_Block] = []
        said: list[AssistantBlock] = []

        def end_text() -> None:
            text = woven_text(said)
            said.clear()
            if text.strip():
                blocks.append(_text(text))

        for block in message.content:
            match block:
                case TextContent() | ThinkingContent():
                    said.append(block)
                case ReasoningContent():
                    pass  # the readable side of what the details carry
                case ReasoningDetailsContent():
                    end_text()
                    thought = _thinking_blocks(block.details)
                    blocks += [b for b in thought if _seal(b) not in self._refused]
                case ToolCall():
                    end_text()
                    blocks.append(_tool_use(block))
                case _:
                    assert_never(block)
        end_text()
        while blocks and blocks[-1]["type"] in _THINKING:
            blocks.pop()  # it may not come last
        calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        self._positions = {call_id: position for position, call_id in enumerate(calls)}
        self._add("assistant", blocks)

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
        """The results so far, in the order of their calls."""
        results, self._results = self._results, []
        self._add("user", [block for _, block in sorted(results, key=lambda pair: pair[0])])


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


def _visible(blocks: Sequence[UserBlock | ToolResultBlock]) -> list[_Block]:
    written = [
        _text(block.text) if isinstance(block, TextContent) else _image(block) for block in blocks
    ]
    return [block for block in written if block["type"] != "text" or block["text"].strip()]


def _image(image: ImageContent) -> _Block:
    """The image, or a word for one that the server would not take."""
    source = image.source
    if source.startswith(("http://", "https://")):
        return {"type": "image", "source": {"type": "url", "url": source}}
    head, comma, data = source.partition(",")
    if head.startswith("data:") and comma:
        kind, *options = head.removeprefix("data:").split(";")
        media_type = (kind or image.media_type or "").lower().replace("image/jpg", "image/jpeg")
        if media_type in _IMAGE_TYPES:
            if "base64" not in options:
                data = b64encode(unquote_to_bytes(data)).decode()
            inline = {"type": "base64", "media_type": media_type, "data": data}
            return {"type": "image", "source": inline}
    return _text(f"[image: {image.alt}]" if image.alt else "[image]")


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


def keep_in_cache(writer: MessagesWriter, tools: Sequence[_Block]) -> None:
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
        block["cache_control"] = {"type": "ephemeral"}
