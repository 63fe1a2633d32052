"""What servers return, as content of ours.

Works on the SDK's values by their attributes, and does not import it. Nothing here raises because
of what a server has sent: content that cannot be used becomes a note about it.
"""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from clark_agent._text import well_formed
from clark_agent.toolkit.untrusted import mark_untrusted
from clark_agent.tools import ToolResult
from clark_agent.types import FileContent, ImageContent, TextContent, ToolResultBlock

__all__ = ["Reader", "clip", "json_value"]

_MEDIA_TYPE = re.compile(r"[a-zA-Z0-9.+-]+/[a-zA-Z0-9.+-]+")
_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_ANY_BYTES = "application/octet-stream"
_SERVER_INFO = "io.modelcontextprotocol/serverInfo"
"""The same in every result."""
_DEEPEST = 100
_MOST_BLOCKS = 1_000
_LONGEST_NAME = 2_000
_LONGEST_TYPE = 200
_ALL_MARKS = 200
"""Room for a marker in a text that is cut."""


class Reader:
    """Reads the results of one server."""

    __slots__ = ("_most", "_redact", "_server", "_untrusted")

    def __init__(
        self, server: str, *, most: int, untrusted: bool, redact: Callable[[str], str]
    ) -> None:
        self._server = server
        self._most = most
        self._untrusted = untrusted
        self._redact = redact

    def quote(self, text: str) -> str:
        """A text of the server, marked as such."""
        return mark_untrusted(text) if self._untrusted else text

    def tool_result(self, result: Any, tool: str) -> ToolResult:
        """The result of a call. Its content has at most ``max_result_bytes``, and so have its
        details.
        """
        details: dict[str, Any] = {"kind": "mcp", "server": self._server, "tool": tool}
        content = self.blocks(result.content)
        left = self._most
        structured = result.structured_content
        if structured is not None:
            value, encoded = json_value(structured)
            if len(encoded) <= left:
                left -= len(encoded)
                details["structured"] = value
            else:
                details["structured_bytes"] = len(encoded)
            if not content:
                content = (self._text(encoded.decode(), self._most),)
        said = {key: value for key, value in (result.meta or {}).items() if key != _SERVER_INFO}
        annotations = [_annotations(block) for block in result.content[: len(content)]]
        for name, given in (("meta", said), ("annotations", annotations)):
            if any(given):
                value, encoded = json_value(given)
                if len(encoded) <= left:
                    left -= len(encoded)
                    details[name] = value
        if not content:
            content = (TextContent("(The tool returned nothing.)"),)
        return ToolResult(content, bool(result.is_error), details)

    def blocks(self, content: Sequence[Any]) -> tuple[ToolResultBlock, ...]:
        """Content blocks of ours. All of them together have at most ``max_result_bytes``."""
        return self._limited(content, self._block)

    def plain_blocks(self, content: Sequence[Any]) -> tuple[ToolResultBlock, ...]:
        """Like `blocks`, with texts as they are."""
        plain = Reader(self._server, most=self._most, untrusted=False, redact=self._redact)
        return plain.blocks(content)

    def resources(self, contents: Sequence[Any]) -> tuple[ToolResultBlock, ...]:
        """The contents of a resource. All of them together have at most ``max_result_bytes``."""
        return self._limited(contents, self.resource)

    def _limited(
        self, given: Sequence[Any], convert: Callable[[Any, int], ToolResultBlock]
    ) -> tuple[ToolResultBlock, ...]:
        """The blocks up to the limit, and a note instead of the others."""
        found: list[ToolResultBlock] = []
        left = self._most
        for block in given[:_MOST_BLOCKS]:
            if left <= 0:
                break
            made = convert(block, left)
            left -= _size(made)
            found.append(made)
        missing = len(given) - len(found)
        if missing:
            found.append(TextContent(f"({missing:,} more parts are left out: it is too large)"))
        return tuple(found)

    def _block(self, block: Any, left: int) -> ToolResultBlock:
        match block.type:
            case "text":
                return self._text(block.text, left)
            case "image":
                return self._binary(block.data, block.mime_type, left, "an image")
            case "audio":
                return self._binary(block.data, block.mime_type, left, "a recording")
            case "resource":
                return self.resource(block.resource, left)
            case "resource_link":
                return self._text(_link_text(block), left)
            case kind:
                return TextContent(f"(The tool returned content of the type {kind[:100]!r}.)")

    def resource(self, resource: Any, left: int) -> ToolResultBlock:
        """The content of a resource, in at most ``left`` bytes."""
        uri = _short(well_formed(str(resource.uri)))
        text = getattr(resource, "text", None)
        if text is not None:
            return self._text(f"{uri}:\n{text}", left)
        media_type = resource.mime_type or _ANY_BYTES
        return self._binary(resource.blob, media_type, left, "a file", name=uri)

    def _text(self, text: str, left: int) -> TextContent:
        return TextContent(self.quote(clip(well_formed(text), left)))

    def _binary(
        self, data: str, media_type: str, left: int, what: str, *, name: str | None = None
    ) -> ToolResultBlock:
        where = "" if name is None else f" {name}"
        if len(media_type) > _LONGEST_TYPE or _MEDIA_TYPE.fullmatch(media_type) is None:
            media_type = _ANY_BYTES
        try:
            size = len(a2b_base64(data, strict_mode=True))
        except (Base64Error, ValueError):
            return self._note(f"({what}{where} is left out: its data is not valid base64)")
        if len(data) > left:
            return self._note(
                f"({what}{where} ({media_type}, {size:,} bytes) is left out: it is too large)"
            )
        media_type = media_type.lower()
        source = f"data:{media_type};base64,{data}"
        if media_type in _IMAGES:
            return ImageContent(source, media_type)
        return FileContent(source, media_type, name)

    def _note(self, text: str) -> TextContent:
        return TextContent(self.quote(text[0] + text[1:2].upper() + text[2:]))


def _size(block: ToolResultBlock) -> int:
    text = block.text if isinstance(block, TextContent) else block.source
    size = len(text) if text.isascii() else len(text.encode())
    if isinstance(block, FileContent) and block.name is not None:
        size += len(block.name.encode())
    return size


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_NAME else text[:_LONGEST_NAME] + "…"


def _annotations(block: Any) -> dict[str, Any] | None:
    """For whom a block is, and how important; None if the server does not say it."""
    said = block.annotations
    if said is None:
        return None
    found = {
        "audience": said.audience,
        "priority": said.priority,
        "lastModified": said.last_modified,
    }
    return {key: value for key, value in found.items() if value is not None}


def _link_text(block: Any) -> str:
    title = block.title or block.name
    parts = [f"{title}: {block.uri}"]
    if block.description:
        parts.append(block.description)
    return "\n".join(parts)


def clip(text: str, most: int) -> str:
    """The text in at most ``most`` bytes, and a marker where something is missing."""
    if len(text) * 4 <= most:
        return text
    data = text.encode()
    if len(data) <= most:
        return text
    kept = max(0, most - _ALL_MARKS)
    head, tail = kept - kept // 3, kept // 3
    start = data[:head].decode(errors="ignore")
    end = data[len(data) - tail :].decode(errors="ignore") if tail else ""
    missing = len(data) - len(start.encode()) - len(end.encode())
    return f"{start}\n[… {missing:,} bytes left out …]\n{end}"


def json_value(value: Any) -> tuple[Any, bytes]:
    """A value from JSON that can be written as JSON again, and that JSON."""
    try:
        return value, msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError):
        value = _plain(value, _DEEPEST)
        return value, msgspec.json.encode(value)


def _plain(value: Any, depth: int) -> Any:
    match value:
        case str():
            return well_formed(value)
        case None | bool() | int() | float():
            return value
        case dict() if depth:
            fields: dict[Any, Any] = value
            return {well_formed(str(key)): _plain(item, depth - 1) for key, item in fields.items()}
        case list() | tuple() if depth:
            return [_plain(item, depth - 1) for item in value]
        case dict() | list() | tuple():
            return "[nested too deeply]"
        case other:
            return well_formed(str(other))
