"""From our values to those of the protocol: results of calls, and descriptions of tools.

Pure functions. The only module of the server that knows the SDK's types of content.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, assert_never
from urllib.parse import quote, unquote_to_bytes

from msgspec import Struct

from clark_agent._text import well_formed
from clark_agent.tools import AgentTool, ToolResult
from clark_agent.types import FileContent, ImageContent, TextContent, ToolResultBlock

if TYPE_CHECKING:
    import mcp_types as types

__all__ = ["Outcome", "describe_tool", "to_protocol"]


class Outcome(Struct, frozen=True):
    """What a call has returned."""

    result: ToolResult
    structured: dict[str, Any] | None = None
    """The result as JSON that fits the output schema of the tool."""


def describe_tool(
    tool: AgentTool, *, description: str, output_schema: dict[str, Any] | None = None
) -> types.Tool:
    """Describe a tool to clients. Flags that are not set say nothing, as in the protocol."""
    import mcp_types as types

    hints = None
    if tool.reads_only or tool.idempotent:
        hints = types.ToolAnnotations(
            read_only_hint=tool.reads_only or None, idempotent_hint=tool.idempotent or None
        )
    return types.Tool(
        name=tool.name,
        description=description or None,
        input_schema=dict(tool.parameters_schema),
        output_schema=output_schema,
        annotations=hints,
    )


def to_protocol(outcome: Outcome, *, notes: Iterable[str] = ()) -> types.CallToolResult:
    """Return the result for the client, followed by notes for the people who run it."""
    import mcp_types as types

    result = outcome.result
    content = [_block(block, number) for number, block in enumerate(result.content, 1)]
    content += [types.TextContent(text=well_formed(note)) for note in notes]
    return types.CallToolResult(
        content=content,
        structured_content=None if result.is_error else outcome.structured,
        is_error=result.is_error,
    )


def _block(block: ToolResultBlock, number: int) -> types.ContentBlock:
    import mcp_types as types

    match block:
        case TextContent(text):
            return types.TextContent(text=well_formed(text))
        case ImageContent(source, media_type, alt):
            data, kind = _data_of(source)
            if data is None:
                name = alt or f"image {number}"
                return types.ResourceLink(uri=source, name=name, mime_type=media_type)
            return types.ImageContent(data=data, mime_type=media_type or kind)
        case FileContent(source, media_type, name):
            data, kind = _data_of(source)
            if data is None:
                shown = name or f"file {number}"
                return types.ResourceLink(uri=source, name=shown, mime_type=media_type)
            kind = media_type or kind
            if kind.startswith("audio/"):
                return types.AudioContent(data=data, mime_type=kind)
            uri = f"attachment:///{quote(name or f'file-{number}')}"
            resource = types.BlobResourceContents(uri=uri, blob=data, mime_type=kind)
            return types.EmbeddedResource(resource=resource)
        case _:
            assert_never(block)


def _data_of(source: str) -> tuple[str | None, str]:
    """Return the base64 data of a ``data:`` URL, and its media type. None for any other URL."""
    if source[:5].lower() != "data:":
        return None, ""
    head, _, data = source[5:].partition(",")
    kind, *parameters = head.split(";")
    if "base64" not in [parameter.strip().lower() for parameter in parameters]:
        from base64 import b64encode

        data = b64encode(unquote_to_bytes(data)).decode()
    return data, kind.strip() or "text/plain"
