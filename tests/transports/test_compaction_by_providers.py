"""Providers that compact a conversation themselves: settings go out, and their blocks go back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clark_agent import Conversation, LoopConfig
from clark_agent.types import AssistantMessage, ProviderContent
from tests.transports import wires_anthropic, wires_responses
from tests.transports.servers.bytes_server import ByteServer

pytestmark = pytest.mark.slow


def sent(server: ByteServer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in server.requests]


async def two_turns(transport: Any, extras: dict[str, Any]) -> Conversation:
    talk = Conversation(LoopConfig(stream=transport, provider_extras=extras), "Be brief.")
    await talk.send("A long story.")
    await talk.send("And then?")
    return talk


async def test_anthropic() -> None:
    wire = wires_anthropic
    edits = [
        {"type": "clear_tool_uses_20250919", "exclude_tools": ["plan"]},
        {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}},
    ]
    block = {"type": "compaction", "content": "A story.", "encrypted_content": "e"}
    first = wire.stream(
        wire.begun(),
        wire.start(0, "compaction", content=None),
        wire.delta(0, "compaction_delta", content="A story.", encrypted_content="e"),
        wire.stop(0),
        wire.text(1, "I see."),
        wire.finished("end_turn"),
        wire.END,
    )
    second = wire.stream(wire.begun(), wire.text(0, "So."), wire.finished("end_turn"), wire.END)
    beta = {"anthropic-beta": "context-management-2025-06-27,compact-2026-01-12"}
    async with wire.serving([first, second], headers=beta) as (server, transport):
        talk = await two_turns(transport, {"context_management": {"edits": edits}})
        one, two = sent(server)
        headers = [dict(request.headers) for request in server.requests]
    assert one["context_management"] == two["context_management"] == {"edits": edits}
    assert all(given["anthropic-beta"] == beta["anthropic-beta"] for given in headers)
    answer = talk.messages[1]
    assert isinstance(answer, AssistantMessage)
    assert answer.content[0] == ProviderContent("anthropic", block)
    assert two["messages"][1]["content"][0] == block


async def test_openai() -> None:
    wire = wires_responses
    block = {"type": "compaction", "id": "cmp_1", "encrypted_content": "e"}
    first = wire.stream(
        wire.added(block, 0),
        wire.done(block, 0),
        wire.text_delta("I see.", 1),
        wire.completed(block, wire.message("I see.")),
    )
    second = wire.stream(wire.text_delta("So.", 0), wire.completed(wire.message("So.")))
    settings = [{"type": "compaction", "compact_threshold": 50_000}]
    async with wire.serving([first, second]) as (server, transport):
        await two_turns(transport, {"context_management": settings})
        one, two = sent(server)
    assert one["context_management"] == two["context_management"] == settings
    assert [item for item in two["input"] if item.get("type") == "compaction"] == [block]
