"""Resources and prompts of servers, as values."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clark_agent._text import well_formed
from clark_agent.mcp.results import Reader
from clark_agent.types import AgentMessage, AssistantMessage, StopReason, TextContent, UserMessage

__all__ = [
    "McpPrompt",
    "McpPromptArgument",
    "McpResource",
    "McpResourceTemplate",
    "prompt_messages",
    "prompt_of",
    "resource_of",
    "template_of",
]


class McpResource(Struct, frozen=True, omit_defaults=True):
    """Something that can be read from a server."""

    server: str
    uri: str
    name: str
    title: str | None = None
    description: str | None = None
    media_type: str | None = None
    size: int | None = None
    """In bytes, if the server knows it."""


class McpResourceTemplate(Struct, frozen=True, omit_defaults=True):
    """Resources whose URIs follow a pattern (RFC 6570)."""

    server: str
    uri_template: str
    name: str
    title: str | None = None
    description: str | None = None
    media_type: str | None = None


class McpPromptArgument(Struct, frozen=True, omit_defaults=True):
    """A value that a prompt needs."""

    name: str
    description: str | None = None
    required: bool = False


class McpPrompt(Struct, frozen=True, omit_defaults=True):
    """A prompt of a server."""

    server: str
    name: str
    title: str | None = None
    description: str | None = None
    arguments: tuple[McpPromptArgument, ...] = ()


def resource_of(server: str, given: Any) -> McpResource:
    """The SDK's resource as a value of ours."""
    return McpResource(
        server,
        well_formed(str(given.uri)),
        well_formed(given.name),
        _text(given.title),
        _text(given.description),
        _text(given.mime_type),
        given.size,
    )


def template_of(server: str, given: Any) -> McpResourceTemplate:
    """The SDK's template as a value of ours."""
    return McpResourceTemplate(
        server,
        well_formed(given.uri_template),
        well_formed(given.name),
        _text(given.title),
        _text(given.description),
        _text(given.mime_type),
    )


def prompt_of(server: str, given: Any) -> McpPrompt:
    """The SDK's prompt as a value of ours."""
    arguments = [
        McpPromptArgument(well_formed(a.name), _text(a.description), bool(a.required))
        for a in given.arguments or ()
    ]
    return McpPrompt(
        server,
        well_formed(given.name),
        _text(given.title),
        _text(given.description),
        tuple(arguments),
    )


def prompt_messages(reader: Reader, given: Any) -> tuple[AgentMessage, ...]:
    """The messages of a prompt. Texts are not marked: whoever asked for the prompt wants it."""
    messages: list[AgentMessage] = []
    blocks = reader.plain_blocks([message.content for message in given.messages])
    roles = [message.role for message in given.messages]
    for role, block in zip(roles, blocks, strict=False):  # at the limit, a note is the last block
        if role == "assistant":
            # An answer of the model has no files: what is not a text, is described.
            text = block if isinstance(block, TextContent) else TextContent("(a file)")
            messages.append(AssistantMessage((text,), StopReason.END_TURN))
        elif isinstance(block, TextContent):
            messages.append(UserMessage(block.text))
        else:
            messages.append(UserMessage((block,)))
    return tuple(messages)


def _text(text: str | None) -> str | None:
    return None if text is None else well_formed(text)
