"""The gateway's OpenAPI 3.1 description.

The schemas are generated from the types that decode requests and encode answers, so they always
match.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from clark_agent._version import __version__
from clark_agent.transports.stream_json import EventRecord, StreamCall

__all__ = ["ErrorDetail", "ErrorReply", "Health", "Models", "describe"]


class ErrorDetail(Struct, frozen=True, omit_defaults=True):
    """An error: ``type`` for programs, ``message`` for people, ``path`` in the request."""

    type: str
    message: str
    path: str | None = None


class ErrorReply(Struct, frozen=True):
    """The body of every answer other than 200."""

    error: ErrorDetail


class Health(Struct, frozen=True):
    """``status`` is ``ok``, or ``draining`` during shutdown; ``streams`` counts running streams."""

    status: str
    streams: int


class Models(Struct, frozen=True):
    """The valid values of ``model`` in a call."""

    models: tuple[str, ...]


_REFUSALS = {
    400: "The body is not JSON, not a call, or has an extra that is not allowed; see ``path``.",
    401: "Missing or unknown token.",
    403: "Without tokens, the gateway serves only its own machine.",
    404: "Unknown model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The content type is not JSON, or the body is compressed.",
    429: "This token has reached its limit of concurrent streams.",
    500: "The gateway failed. The message names the incident in its log.",
    503: "The gateway is shutting down.",
}
_WAITS = {
    "Retry-After": {
        "description": "Seconds to wait.",
        "schema": {"type": "integer", "minimum": 0},
    }
}
_CHALLENGE = {"WWW-Authenticate": {"description": "Always `Bearer`.", "schema": {"type": "string"}}}
_HEADERS = {401: _CHALLENGE, 429: _WAITS, 503: _WAITS}


# The schema of an event-stream response describes a single event.
_EVENT = {
    "type": "object",
    "properties": {
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/StreamEvent"},
        }
    },
    "required": ["data"],
}


def describe(
    *, is_open: bool, has_several: bool, extras: frozenset[str] | None = None
) -> dict[str, Any]:
    """Return the OpenAPI document.

    ``is_open``: there are no tokens. ``has_several``: a call must name its model. ``extras``: the
    allowed fields of ``provider_extras``; None: all.
    """
    (call, event, reply, health, models), schemas = msgspec.json.schema_components(
        [StreamCall, EventRecord, ErrorReply, Health, Models],
        ref_template="#/components/schemas/{name}",
    )
    fields = schemas["StreamCall"]
    if extras is not None:
        allowed: dict[str, Any] = {name: {} for name in sorted(extras)}
        objects = {"type": "object", "properties": allowed, "additionalProperties": False}
        fields["properties"]["provider_extras"] = {"anyOf": [{"type": "null"}, objects]}
    if has_several:
        fields["properties"]["model"] = {"type": "string"}
        fields["required"] = [*fields["required"], "model"]
    access = 403 if is_open else 401
    components = {"schemas": {**schemas, "StreamEvent": event}}
    stream, names = _stream(call, reply, access), _models(models, reply, access)
    if not is_open:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        stream["security"] = names["security"] = [{"token": []}]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "clark-agent gateway",
            "version": __version__,
            "description": "Serves models to clients. The API keys stay in the gateway.",
        },
        "paths": {
            "/v1/stream": {"post": stream},
            "/v1/models": {"get": names},
            "/health": {"get": _health(health)},
            "/openapi.json": {"get": _itself()},
        },
        "components": components,
    }


def _stream(call: Any, reply: Any, access: int) -> dict[str, Any]:
    events = {
        "description": (
            "Server-sent events. The data of each is a `StreamEvent` as JSON, on one line, sent as "
            "soon as the model has produced it. `waiting` comes first if the request has to wait. "
            "The last one is `done`, or `error` if the model failed. Comments keep the connection "
            "alive while the model is silent."
        ),
        "content": {"text/event-stream": {"schema": _EVENT}},
    }
    return {
        "operationId": "stream",
        "summary": "Call a model.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": call}}},
        "responses": {
            "200": events,
            **_refusals(reply, [400, access, 404, 408, 413, 415, 429, 500, 503]),
        },
    }


def _models(models: Any, reply: Any, access: int) -> dict[str, Any]:
    return {
        "operationId": "models",
        "summary": "List the names of the models.",
        "responses": {"200": _json("The names.", models), **_refusals(reply, [access])},
    }


def _health(health: Any) -> dict[str, Any]:
    return {
        "operationId": "health",
        "summary": "Whether the gateway accepts calls, and how many streams run. Needs no token.",
        "responses": {
            "200": _json("The gateway accepts calls.", health),
            "503": {**_json("The gateway is shutting down.", health), "headers": _WAITS},
        },
    }


def _itself() -> dict[str, Any]:
    return {
        "operationId": "openapi",
        "summary": "This document. Needs no token.",
        "responses": {"200": _json("The OpenAPI document.", {"type": "object"})},
    }


def _json(description: str, schema: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusals(reply: Any, statuses: Iterable[int]) -> dict[str, Any]:
    return {
        str(status): {
            **_json(_REFUSALS[status], reply),
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        }
        for status in statuses
    }
