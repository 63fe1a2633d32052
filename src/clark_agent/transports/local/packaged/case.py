"""A request as the guide takes it: turns, each with a question, steps and an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.stream import StreamRequest, ToolSchema
from clark_agent.toolkit.untrusted import without_marks
from clark_agent.tools.schema import portable_schema
from clark_agent.transports.http.request import arguments_object
from clark_agent.transports.local.packaged.prompts import Step, Turn
from clark_agent.types import AgentMessage, AssistantMessage, ToolResultMessage, UserMessage

__all__ = ["Case", "case_of"]


class Case(Struct, frozen=True):
    """The input of one call to the model."""

    system: str
    earlier: tuple[Turn, ...]
    turn: Turn
    tools: tuple[ToolSchema, ...]
    must_call: bool = False
    cap: int | None = None
    temperature: float = 0.0
    answer_schema: Any = None
    """What the answer must match; None: it is a line of text."""


def case_of(messages: Iterable[AgentMessage], request: StreamRequest) -> Case:
    """Convert a request for the guide."""
    turns, schema = _turns(messages), request.output_schema
    return Case(
        request.system_prompt,
        tuple(turns[:-1]),
        turns[-1],
        tuple(
            [replace(tool, parameters=portable_schema(tool.parameters)) for tool in request.tools]
        ),
        must_call=request.force_tool_call,
        cap=request.max_output_tokens,
        temperature=request.temperature or 0.0,
        answer_schema=None if schema is None else portable_schema(schema.schema),
    )


def _turns(messages: Iterable[AgentMessage]) -> list[Turn]:
    """Group the conversation into turns, one for each user message."""
    turns: list[Turn] = []
    steps: list[Step] = []
    question = answer = ""
    pending: dict[str, Any] = {}
    for message in messages:
        match message:
            case UserMessage():
                if question or steps or answer:
                    turns.append(Turn(question, tuple(steps), answer))
                question, steps, answer = message.plain_text, [], ""
            case AssistantMessage():
                answer = message.plain_text
                pending = {call.id: arguments_object(call) for call in message.tool_calls}
            case ToolResultMessage():
                arguments = pending.get(message.tool_call_id, {})
                text = without_marks(message.plain_text)  # the model would only repeat the marks
                steps.append(Step(message.tool_name, arguments, text, message.is_error))
                answer = ""
            case _:
                pass
    return [*turns, Turn(question, tuple(steps), "")]
