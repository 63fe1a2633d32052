"""JSON while it streams: outputs and tool arguments before they are complete.

Needs the package ``jiter``, which comes with the extras ``openai``, ``anthropic`` and ``partial``.
"""

from __future__ import annotations

from typing import Any

from clark_agent._extras import load_extra
from clark_agent.messages.thinking import strip_leading_thoughts
from clark_agent.output import Output
from clark_agent.stream import StreamChunk, TextChunk, ToolCallChunk

__all__ = ["PartialCalls", "PartialOutput", "parse_partial"]


def parse_partial(text: str) -> Any:
    """Parse the beginning of a JSON text: what is open is closed. None if there is nothing yet.

    Raises `ConfigError` if jiter is not installed.
    """
    jiter = load_extra("jiter", "partial", "a partial output")
    data = text.strip().encode("utf-16", "surrogatepass").decode("utf-16", "ignore").encode()
    try:
        return jiter.from_json(data, partial_mode="trailing-strings") if data else None
    except ValueError:
        return None


class PartialCalls:
    """The tool calls of one answer, as far as they have arrived."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._arguments: dict[int, str] = {}

    def feed(self, chunk: ToolCallChunk) -> tuple[str, Any]:
        """The name and the partial arguments of the call that the chunk belongs to."""
        index = chunk.index
        name = self._names[index] = self._names.get(index, "") + (chunk.name_delta or "")
        text = self._arguments.get(index, "") + (chunk.arguments_delta or "")
        self._arguments[index] = text
        return name, parse_partial(text)


class PartialOutput:
    """The output of a run, as far as the current answer has it."""

    def __init__(self, output: Output[Any] | None) -> None:
        self._tool_name = None if output is None else output.tool.name
        self._is_text = output is None or output.is_text
        self._is_wrapped = output is not None and output.tool.is_wrapped
        self.begin()

    def begin(self) -> None:
        """A new answer begins."""
        self._calls = PartialCalls()
        self._text = ""

    def feed(self, chunk: StreamChunk) -> Any:
        """The output after this chunk; None if it has none yet."""
        if isinstance(chunk, TextChunk):
            self._text += chunk.delta
            text = strip_leading_thoughts(self._text)
            if self._is_text:
                return text or None
            return self._unwrapped(parse_partial(text[max(text.find("{"), 0) :]))
        if isinstance(chunk, ToolCallChunk):
            name, arguments = self._calls.feed(chunk)
            if name == self._tool_name:
                return self._unwrapped(arguments)
        return None

    def _unwrapped(self, value: Any) -> Any:
        if self._is_wrapped and isinstance(value, dict):
            return value.get("answer")
        return value
