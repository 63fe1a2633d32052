"""Messages that the SDK refuses as a whole although most of them is fine, mended.

- an answer with half of a character, deep nesting, or an error of another form, which its parser
  rejects: without it, the request would wait for its answer in vain
- a list of tools in which one tool is invalid, which would hide all the others
- a notification that is not valid, which would be logged with a traceback, or end the connection

Whatever is left out is reported.
"""

from __future__ import annotations

import json
import re
from typing import Any

import mcp_types as types
from mcp.shared.message import SessionMessage
from mcp_types import methods
from pydantic import ValidationError

from clark_agent._text import well_formed

__all__ = ["check_notification", "mended_message", "mended_tools"]

_DEEPEST = 100
_LARGEST_NUMBER = 10**300
"""Larger integers do not fit into a float."""
_ANY_VERSION = "2025-11-25"
"""Until the version of the protocol is known."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""A string, which may lack its end, or a bracket."""
_ID = re.compile(r'"id"\s*:\s*(\d+)')
_OPTIONAL = ("annotations", "icons", "execution", "title", "_meta", "description", "outputSchema")


def mended_message(error: ValidationError) -> SessionMessage | Exception:
    """The message that the parser has rejected, or an error for the request that it answers.

    What is not an answer stays an exception.
    """
    found = error.errors(include_url=False)
    answered = next((e["input"] for e in found if _is_answer(e["input"])), None)
    if answered is not None:
        text = "the result is not an object" if "result" in answered else "the error is not valid"
        return _failed(answered["id"], text)
    line = found[0].get("input")
    if not isinstance(line, str):
        return error
    try:
        message: Any = _clean(json.loads(_without_depths(line)), _DEEPEST)
        return SessionMessage(types.jsonrpc_message_adapter.validate_python(message, by_name=False))
    except (ValueError, RecursionError):
        pass
    if '"result"' not in line and '"error"' not in line:
        return error
    number = _ID.search(line[:200]) or _ID.search(line[-200:])
    if number is None:
        return error
    return _failed(int(number[1]), "the result is not valid JSON")


def check_notification(notification: types.JSONRPCNotification, version: str | None) -> None:
    """Raise ValueError if the SDK cannot take the notification."""
    params = notification.params
    if notification.method == "notifications/progress" and params is not None:
        for number in (params.get("progress"), params.get("total")):
            if isinstance(number, int) and abs(number) > _LARGEST_NUMBER:
                raise ValueError("notifications/progress with a number that is too large")
    try:
        methods.parse_server_notification(notification.method, version or _ANY_VERSION, params)
    except KeyError:  # one that the SDK does not know, and ignores
        pass
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        text = f"{notification.method} ({place}: {first['msg']})"
        raise ValueError(text) from None


def _is_answer(value: Any) -> bool:
    """Whether it answers a request, with a result or an error of the wrong type."""
    if not isinstance(value, dict):
        return False
    if "result" in value:
        if isinstance(value["result"], dict):
            return False
    elif "error" not in value or "method" in value:
        return False
    number: object = value.get("id")
    return isinstance(number, (int, str)) and not isinstance(number, bool)


def _without_depths(text: str) -> str:
    """The JSON without what is nested so deeply that a parser gives up."""
    parts: list[str] = []
    depth = kept_to = 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "[" | "{":
                depth += 1
                if depth == _DEEPEST + 1:
                    parts += [text[kept_to : token.start()], '"[nested too deeply]"']
            case "]" | "}":
                depth -= 1
                if depth == _DEEPEST:
                    kept_to = token.end()
            case _:  # a string
                pass
    return text if not parts else "".join([*parts, text[kept_to:]])


def _failed(request: int | str, text: str) -> SessionMessage:
    """An error in place of the answer to the request."""
    data = types.ErrorData(code=types.PARSE_ERROR, message=text)
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=request, error=data))


def _clean(value: Any, depth: int) -> Any:
    match value:
        case str():
            return well_formed(value)
        case dict():
            if not depth:
                return "[nested too deeply]"
            fields: dict[str, Any] = value
            return {well_formed(key): _clean(item, depth - 1) for key, item in fields.items()}
        case list():
            if not depth:
                return "[nested too deeply]"
            items: list[Any] = value
            return [_clean(item, depth - 1) for item in items]
        case _:
            return value


def mended_tools(
    result: dict[str, Any], version: str
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The result of ``tools/list`` with the tools that the SDK accepts, and what was left out."""
    if _problem(result, version) is None:
        return result, []
    kept: list[Any] = []
    left_out: list[tuple[str, str]] = []
    for tool in result["tools"]:
        made, problem = _mended_tool(tool, {**result, "tools": []}, version)
        if problem is None:
            kept.append(made)
        else:
            name = tool.get("name") if isinstance(tool, dict) else None
            left_out.append((well_formed(str(name))[:100], problem))
    return {**result, "tools": kept}, left_out


def _mended_tool(tool: Any, page: dict[str, Any], version: str) -> tuple[Any, str | None]:
    """The tool as it is, with a small correction, or without what is not essential."""
    if not isinstance(tool, dict):
        return tool, "it is not an object"
    schema = tool.get("inputSchema")
    if isinstance(schema, dict) and ("type" not in schema or _allows_object(schema["type"])):
        tool = {**tool, "inputSchema": {**schema, "type": "object"}}
    if _problem({**page, "tools": [tool]}, version) is None:
        return tool, None
    for key in _OPTIONAL:
        if key in tool:
            tool = {name: value for name, value in tool.items() if name != key}
            if _problem({**page, "tools": [tool]}, version) is None:
                return tool, None
    return tool, _problem({**page, "tools": [tool]}, version)


def _allows_object(kind: Any) -> bool:
    return isinstance(kind, list) and "object" in kind


def _problem(result: dict[str, Any], version: str) -> str | None:
    try:
        methods.validate_server_result("tools/list", version, result)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join([str(part) for part in first["loc"][2:]])
        return f"its definition is invalid ({place}: {first['msg']})"
    except (KeyError, ValueError):
        return None
    return None
