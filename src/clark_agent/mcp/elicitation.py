"""Elicitation: questions of servers, put to a person with an `AskUser` function.

A form becomes one question for each field; the answer is checked against the field's schema, and
the question asked again if it does not fit. A ``pattern`` is not checked: a regular expression of a
stranger may take for ever. A URL is shown, and the person consents or not.
Nothing that a server writes into a question is followed: it is shown to the person as a text of
that server.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from clark_agent._text import well_formed
from clark_agent.toolkit.ask import (
    AskUser,
    NobodyThere,
    OneAtATime,
    check_asking,
    put_to,
)

if TYPE_CHECKING:
    from clark_agent.mcp.connection import Connection

__all__ = [
    "Elicitation",
    "check_elicitation",
    "choices_of",
    "field_text",
    "shown_text",
    "value_of",
]

logger = logging.getLogger(__name__)

_Action: TypeAlias = Literal["accept", "decline", "cancel"]

_MOST_FIELDS = 30
_MOST_TRIES = 3
_LONGEST = 2_000
_CANCELLED: tuple[_Action, None] = ("cancel", None)
_YES, _NO = "yes", "no"
_SKIP = "skip"
_WORDS = {
    **dict.fromkeys(["yes", "y", "true", "1", "on", "ok"], True),
    **dict.fromkeys(["no", "n", "false", "0", "off"], False),
}


def check_elicitation(ask: object) -> None:
    """Raise `ConfigError` if servers cannot ask questions with ``ask``."""
    check_asking("McpTools", ask, None, "question", "choices")


class _DeclinedError(Exception):
    """The person does not want to answer."""


class Elicitation:
    """Answers the questions of servers."""

    suspends = False
    """Whether a question suspends the run."""

    def __init__(self, ask: AskUser) -> None:
        self._ask = ask
        self._one_at_a_time = OneAtATime()

    def callback(self, server: str, connection: Connection) -> Callable[[Any, Any], Awaitable[Any]]:
        """The SDK's callback for one connection."""

        async def elicit(_: Any, params: Any) -> Any:
            from clark_agent.mcp._sdk import types

            outcome = await connection.elicit(lambda: self._answer(server, params))
            action, content = _CANCELLED if outcome is None else outcome
            return types.ElicitResult(action=action, content=content)

        return elicit

    async def _answer(self, server: str, params: Any) -> tuple[_Action, dict[str, Any] | None]:
        """What the person decides, and the values."""
        try:
            async with self._one_at_a_time.turn():
                if params.mode == "url":
                    return await self._consent(server, params), None
                return "accept", await self._fill_in(server, params)
        except _DeclinedError:
            return "decline", None
        except NobodyThere:
            return "cancel", None
        except Exception:
            logger.exception("MCP server %r: asking the user failed", server)
            return "cancel", None

    async def _consent(self, server: str, params: Any) -> _Action:
        url, message = shown_text(str(params.url)), shown_text(params.message)
        question = (
            f"The MCP server {server!r} asks you to open this address:\n{url}\n{message}\n"
            "Open it yourself if you trust the server. Have you opened it?"
        )
        return "accept" if _WORDS.get(await self._put(question, (_YES, _NO))) else "decline"

    async def _fill_in(self, server: str, params: Any) -> dict[str, Any]:
        schema = params.requested_schema
        fields = schema.get("properties") or {}
        required = schema.get("required") or ()
        message = f"The MCP server {server!r} asks: {shown_text(params.message)}"
        if not fields:
            if not _WORDS.get(await self._put(message, (_YES, _NO))):
                raise _DeclinedError
            return {}
        if len(fields) > _MOST_FIELDS:
            logger.warning("MCP server %r asks for %d values: declined", server, len(fields))
            raise _DeclinedError
        values: dict[str, Any] = {}
        for name, field in fields.items():
            value = await self._field(message, name, field, is_required=name in required)
            if value is not None:
                values[name] = value
        return values

    async def _field(
        self, message: str, name: str, field: Mapping[str, Any], *, is_required: bool
    ) -> Any:
        asked = f"{message}\n{field_text(name, field)}"
        if not is_required:
            asked += f"\n(optional: answer {_SKIP!r} to leave it out)"
        choices = choices_of(field)
        shown = tuple(choices) if is_required else (*choices, _SKIP) if choices else ()
        problem = ""
        for _ in range(_MOST_TRIES):
            answer = await self._put(f"{asked}{problem}", shown)
            if answer == _SKIP and not is_required:
                return field.get("default")
            try:
                return value_of(answer, field, choices)
            except ValueError as error:
                problem = f"\n({error})"
        raise _DeclinedError

    async def _put(self, question: str, choices: Sequence[str]) -> str:
        answer = await put_to(self._ask, question, choices)
        if answer is None or not str(answer).strip():
            raise _DeclinedError
        text = str(answer).strip()
        return text.lower() if tuple(choices) == (_YES, _NO) else text


def field_text(name: str, field: Mapping[str, Any]) -> str:
    """What the server says about a field."""
    title = shown_text(str(field.get("title") or name))
    about = shown_text(str(field.get("description") or ""))
    return title + (f": {about}" if about else "")


def shown_text(text: str) -> str:
    """A text of a server, for a person: without what a terminal would execute."""
    plain = "".join([c for c in well_formed(text) if c.isprintable() or c == "\n"])
    return plain[:_LONGEST]


def choices_of(field: Mapping[str, Any]) -> dict[str, Any]:
    """What to choose from: the text to show → the value."""
    if field.get("type") == "boolean":
        return {_YES: True, _NO: False}
    items = field.get("items")
    source = items if field.get("type") == "array" and isinstance(items, Mapping) else field
    for keyword in ("oneOf", "anyOf"):
        options = source.get(keyword)
        if isinstance(options, list):
            return {
                shown_text(str(option.get("title") or option["const"])): option["const"]
                for option in options
                if isinstance(option, Mapping) and "const" in option
            }
    values = source.get("enum")
    if not isinstance(values, list):
        return {}
    names = source.get("enumNames")
    if not isinstance(names, list) or len(names) != len(values):
        names = values
    return {shown_text(str(name)): value for name, value in zip(names, values, strict=True)}


def value_of(answer: str, field: Mapping[str, Any], choices: Mapping[str, Any]) -> Any:
    """The answer as a value of the field. Raises ValueError that says what is expected."""
    kind = field.get("type")
    if kind == "array":
        return _several(answer, field, choices)
    if kind == "boolean":
        value = _WORDS.get(answer.lower())
        if value is None:
            raise ValueError("answer yes or no")
        return value
    if choices:
        return _chosen(answer, choices)
    if kind in ("integer", "number"):
        return _number(answer, field, whole=kind == "integer")
    return _text(answer, field)


def _chosen(answer: str, choices: Mapping[str, Any]) -> Any:
    if answer in choices:
        return choices[answer]
    for name, value in choices.items():
        if answer.lower() in (name.lower(), str(value).lower()):
            return value
    raise ValueError(f"choose one of: {', '.join(choices)}")


def _several(answer: str, field: Mapping[str, Any], choices: Mapping[str, Any]) -> list[Any]:
    parts = [part.strip() for part in answer.split(",") if part.strip()]
    values = [_chosen(part, choices) for part in parts] if choices else parts
    least, most = field.get("minItems", 0), field.get("maxItems", len(values))
    if not least <= len(values) <= most:
        raise ValueError(f"give {least} to {most} values, separated by commas")
    return values


def _number(answer: str, field: Mapping[str, Any], *, whole: bool) -> int | float:
    try:
        value = int(answer) if whole else float(answer)
    except ValueError:
        raise ValueError(
            "answer with a whole number" if whole else "answer with a number"
        ) from None
    least, most = field.get("minimum"), field.get("maximum")
    if (
        value != value
        or (least is not None and value < least)
        or (most is not None and value > most)
    ):
        raise ValueError(f"it must be {_range(least, most)}")
    return value


def _text(answer: str, field: Mapping[str, Any]) -> str:
    least, most = field.get("minLength"), field.get("maxLength")
    if (least is not None and len(answer) < least) or (most is not None and len(answer) > most):
        raise ValueError(f"its length must be {_range(least, most)} characters")
    match field.get("format"):
        case "email" if answer.count("@") != 1 or answer.startswith("@") or answer.endswith("@"):
            raise ValueError("answer with an e-mail address")
        case "uri" if ":" not in answer:
            raise ValueError("answer with a complete address, such as https://…")
        case "date" | "date-time" as form:
            _check_date(answer, form)
        case _:
            pass
    return answer


def _check_date(answer: str, form: str) -> None:
    from datetime import date, datetime

    try:
        if form == "date":
            date.fromisoformat(answer)
        else:
            datetime.fromisoformat(answer)
    except ValueError:
        example = "2026-01-31" if form == "date" else "2026-01-31T12:00:00Z"
        raise ValueError(f"answer like {example}") from None


def _range(least: Any, most: Any) -> str:
    if most is None:
        return f"at least {least}"
    return f"at most {most}" if least is None else f"{least} to {most}"
