"""Questions of servers that suspend the run: asked as a request that waits, answered by a decision.

On current connections a server asks by ending the call with its questions and a state. The request
keeps both, and the call is sent again with them and the answers, by any process. On older
connections the server waits in the middle of the call, which cannot outlive the process.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from clark_agent.errors import ToolSuspended
from clark_agent.mcp.elicitation import choices_of, field_text, shown_text, value_of
from clark_agent.tools.base import Continued

if TYPE_CHECKING:
    from clark_agent.mcp.connection import Connection

__all__ = ["Asked", "SuspendingElicitation", "answers_to", "suspension"]

logger = logging.getLogger(__name__)

_CANNOT_WAIT = (
    "the user can be asked only by a tool call of a run, on a connection of the protocol 2026-07-28"
)
_YES_NO = ["yes", "no"]
_YES = ("yes", "y", "true", "ok")


class Asked(Struct, frozen=True):
    """How a call has ended that asks the user: with the parameters of each question, as JSON, and
    the state of the server.
    """

    questions: dict[str, Any]
    state: str | None


class SuspendingElicitation:
    """Refuses the questions that come in the middle of a call. Others suspend the run."""

    suspends = True

    def callback(self, server: str, _: Connection) -> Callable[[Any, Any], Awaitable[Any]]:
        """The SDK's callback for one connection."""

        async def refuse(_: Any, params: Any) -> Any:
            from clark_agent.mcp._sdk import types

            logger.warning("MCP server %r: a question is refused: %s", server, _CANNOT_WAIT)
            return types.ErrorData(code=types.INVALID_REQUEST, message=_CANNOT_WAIT)

        return refuse


def suspension(server: str, asked: Asked, problem: str | None = None) -> ToolSuspended:
    """What a tool raises to wait for the answers."""
    parts = [_question(server, question) for question in asked.questions.values()]
    if len(asked.questions) > 1:
        parts.append(f"Answer with a JSON object with the keys {', '.join(asked.questions)}.")
    if problem is not None:
        parts.append(f"({problem})")
    fields = [field for q in asked.questions.values() for field in _fields(q).values()]
    request = {
        "kind": "question",
        "question": "\n".join(parts),
        "choices": list(choices_of(fields[0]))
        if len(fields) == 1
        else _YES_NO
        if not fields
        else [],
        "server": server,
        "questions": asked.questions,
        "state": asked.state,
    }
    return ToolSuspended(request, continues=True)


def answers_to(given: Continued) -> tuple[dict[str, Any], str | None]:
    """The answers in the protocol's form, and the state. Raises `ToolSuspended` to ask again if an
    answer does not fit.
    """
    asked = Asked(given.request["questions"], given.request["state"])
    text = given.result.plain_text.strip()
    answers: dict[str, Any] = {}
    try:
        one_by_one = _object(text) if len(asked.questions) > 1 else {}
        for key, question in asked.questions.items():
            answer = one_by_one.get(key) if len(asked.questions) > 1 else text
            answers[key] = _answer(answer, question)
    except ValueError as error:
        raise suspension(given.request["server"], asked, str(error)) from None
    return answers, asked.state


def _fields(question: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = question.get("requestedSchema") or {}
    return schema.get("properties") or {}


def _question(server: str, question: Mapping[str, Any]) -> str:
    message = shown_text(str(question["message"]))
    if question.get("mode") == "url":
        return (
            f"The MCP server {server!r} asks to open this address:\n"
            f"{shown_text(str(question['url']))}\n{message}\nAnswer yes when it was opened."
        )
    fields = _fields(question)
    lines = [f"The MCP server {server!r} asks: {message}"]
    lines += [f"{name}: {field_text(name, field)}" for name, field in fields.items()]
    if len(fields) > 1:
        lines.append("Answer with a JSON object with these keys.")
    return "\n".join(lines)


def _answer(answer: Any, question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one question. Raises ValueError that says what is expected."""
    fields = _fields(question)
    is_page = question.get("mode") == "url"
    if is_page or not fields:
        if answer is not True and str(answer).strip().lower() not in _YES:
            return {"action": "decline"}
        return {"action": "accept"} if is_page else {"action": "accept", "content": {}}
    values = answer if isinstance(answer, dict) else _values(str(answer), fields)
    required = (question.get("requestedSchema") or {}).get("required") or ()
    content: dict[str, Any] = {}
    for name, field in fields.items():
        value = values.get(name)
        if value is None:
            if name in required:
                raise ValueError(f"{name} is missing")
            value = field.get("default")
        else:
            value = _checked(name, value, field)
        if value is not None:
            content[name] = value
    return {"action": "accept", "content": content}


def _checked(name: str, value: Any, field: Mapping[str, Any]) -> Any:
    match value:
        case bool():
            text = "yes" if value else "no"
        case list():
            text = ", ".join([str(item) for item in value])
        case _:
            text = str(value)
    try:
        return value_of(text, field, choices_of(field))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _values(answer: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object, or the value of the only field."""
    if len(fields) > 1 or answer.startswith("{"):
        return _object(answer)
    return {next(iter(fields)): answer}


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise ValueError("answer with a JSON object") from None
