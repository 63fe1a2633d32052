"""What is said in a run, as the conventions write it down: JSON in an attribute.

Every text and every number goes through the host's ``redact`` first. If that raises, or returns
something else than a string, it is replaced, so that nothing is recorded that was not redacted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import msgspec

from clark_agent._text import well_formed
from clark_agent.messages.wire import jsonable
from clark_agent.otel import conventions as names
from clark_agent.otel._guard import PASSING, report
from clark_agent.stream import StreamRequest
from clark_agent.tools.base import ToolResult
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    FileContent,
    ImageContent,
    ReasoningContent,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
)

__all__ = ["Content", "Redact"]

Redact = Callable[[str], str]
"""Returns the text without what must not be recorded.

Contract: a plain function, called in the run's event loop for each text, which therefore waits for
it. A number is passed as text; if that comes back unchanged, the number stays a number.
"""

P = ParamSpec("P")

_MEDIA_TYPE = re.compile(r"data:([\w.+-]+/[\w.+-]+)[;,]", re.ASCII)
_LONGEST_WORD = 100
NOT_REDACTED = "[removed: redact failed]"


def _or_nothing(method: Callable[P, dict[str, str]]) -> Callable[P, dict[str, str]]:
    """The method, which returns no attributes if it raises, so that the span still ends."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> dict[str, str]:
        try:
            return method(*args, **kwargs)
        except PASSING:
            raise
        except BaseException:
            report(method.__qualname__)
            return {}

    return call


class Content:
    """Writes content into attributes."""

    def __init__(self, redact: Redact | None = None) -> None:
        self._redact = redact

    # --- attributes -----------------------------------------------------------------------------

    @_or_nothing
    def of_request(self, request: StreamRequest) -> dict[str, str]:
        """The attributes of a model call that starts."""
        found = {names.INPUT_MESSAGES: self._json(self.messages(request.messages))}
        if request.system_prompt:
            instructions = [self._text_part(request.system_prompt)]
            found[names.SYSTEM_INSTRUCTIONS] = self._json(instructions)
        if request.tools:
            found[names.TOOL_DEFINITIONS] = self._json(
                [
                    {
                        "type": "function",
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.parameters,
                    }
                    for tool in request.tools
                ]
            )
        return found

    @_or_nothing
    def of_answer(self, message: AssistantMessage) -> dict[str, str]:
        """The attributes of a model call that has its answer."""
        return {names.OUTPUT_MESSAGES: self._json(self._answers([message]))}

    @_or_nothing
    def of_run(self, messages: Sequence[AgentMessage]) -> dict[str, str]:
        """The attributes of a run that has ended, from its messages."""
        given = [m for m in messages if not isinstance(m, (AssistantMessage, ToolResultMessage))]
        answers = [m for m in messages if isinstance(m, AssistantMessage)]
        return {
            names.INPUT_MESSAGES: self._json(self.messages(given)),
            names.OUTPUT_MESSAGES: self._json(self._answers(answers[-1:])),
        }

    @_or_nothing
    def of_arguments(self, args: Any) -> dict[str, str]:
        """The attributes of a tool call that starts."""
        return {names.TOOL_CALL_ARGUMENTS: self._json(self.redacted(_builtins(args)))}

    @_or_nothing
    def of_result(self, result: ToolResult) -> dict[str, str]:
        """The attributes of a tool call that has its result."""
        return {names.TOOL_CALL_RESULT: self._json(self._parts(result.content))}

    def text(self, text: str) -> str:
        """A text, redacted, as every exporter can encode it."""
        if self._redact is None:
            return well_formed(text)
        try:
            redacted: Any = self._redact(text)
        except PASSING:
            raise
        except BaseException:
            report("redact")
            return NOT_REDACTED
        return well_formed(redacted) if isinstance(redacted, str) else NOT_REDACTED

    def word(self, text: str) -> str:
        """A name or an id that the model chose: redacted, and not longer than a name."""
        found = self.text(text)
        return found if len(found) <= _LONGEST_WORD else f"{found[:_LONGEST_WORD]}…"

    def redacted(self, value: Any) -> Any:
        """JSON, with every string and every number in it redacted."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return self._object(value)
            case list() | tuple():
                return [self.redacted(each) for each in value]
            case int() | float() if self._redact is not None and not isinstance(value, bool):
                written = str(value)
                text = self.text(written)
                return value if text == written else text
            case _:
                return value

    def _object(self, value: dict[Any, Any]) -> dict[str, Any]:
        """An object, with its keys redacted. Keys that become the same are numbered."""
        found: dict[str, Any] = {}
        times: dict[str, int] = {}
        for name, each in value.items():
            key = text = self.text(str(name))
            while key in found:
                times[text] = times.get(text, 1) + 1
                key = f"{text} ({times[text]})"
            found[key] = self.redacted(each)
        return found

    # --- the conventions' form of messages --------------------------------------------------------

    def messages(self, messages: Iterable[AgentMessage]) -> list[dict[str, Any]]:
        """Messages by role, with their parts."""
        return [self._message(message) for message in messages]

    def _answers(self, answers: Iterable[AssistantMessage]) -> list[dict[str, Any]]:
        """Messages of the model. Receivers for version 1.41 of the conventions ignore a message
        without the reason why it ended; later versions only allow it.
        """
        return [
            {**self._message(answer), "finish_reason": names.finish_reason(answer.stop_reason)}
            for answer in answers
        ]

    def _message(self, message: Any) -> dict[str, Any]:
        if isinstance(message, ToolResultMessage):
            response = self._parts(message.content)
            part = {
                "type": "tool_call_response",
                "id": self.text(message.tool_call_id),
                "response": response,
            }
            return {"role": "tool", "parts": [part]}
        content = getattr(message, "content", None)
        if isinstance(content, str):
            parts = [self._text_part(content)]
        elif isinstance(content, (list, tuple)):
            parts = self._parts(content)
        else:  # a custom message of the host
            parts = [{"type": "custom", "content": self.redacted(_builtins(message))}]
        role = getattr(message, "role", "user")
        return {"role": role if isinstance(role, str) else "user", "parts": parts}

    def _parts(self, blocks: Iterable[Any]) -> list[dict[str, Any]]:
        return [self._part(block) for block in blocks]

    def _text_part(self, text: str) -> dict[str, Any]:
        return {"type": "text", "content": self.text(text)}

    def _part(self, block: Any) -> dict[str, Any]:
        match block:
            case TextContent(text):
                return self._text_part(text)
            case ThinkingContent() | ReasoningContent():
                return {"type": "reasoning", "content": self.text(block.text)}
            case ToolCall():
                arguments = self.redacted(_builtins(block.arguments))
                return {
                    "type": "tool_call",
                    "id": self.text(block.id),
                    "name": self.text(block.name),
                    "arguments": arguments,
                }
            case ImageContent() | FileContent():
                return self._media(block)
            case _:
                return {"type": type(block).__struct_config__.tag or "other"}

    def _media(self, block: ImageContent | FileContent) -> dict[str, Any]:
        """A reference, or inline data without its bytes."""
        kind = (block.media_type or "").partition("/")[0]
        modality = kind if kind in ("image", "audio", "video") else "document"
        if isinstance(block, ImageContent):
            modality = "image"
        media_type, is_inline = block.media_type, block.source.startswith("data:")
        if is_inline and (found := _MEDIA_TYPE.match(block.source)):
            media_type = found[1]
        part = {
            "modality": modality,
            "mime_type": None if media_type is None else self.text(media_type),
        }
        if is_inline:
            return {"type": "blob", **part, "content": ""}
        return {"type": "uri", **part, "uri": self.text(block.source)}

    def _json(self, value: Any) -> str:
        try:
            return msgspec.json.encode(value, enc_hook=repr).decode()
        except (ValueError, RecursionError):  # a lone surrogate, or it is nested too deeply
            return msgspec.json.encode(jsonable(value)).decode()


def _builtins(value: Any) -> Any:
    try:
        return msgspec.to_builtins(value, enc_hook=repr)
    except Exception:  # an object whose methods raise, or a cycle
        return jsonable(value)
