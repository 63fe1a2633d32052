"""A transport that tries several others in order, until one answers.

    stream = FirstOf([connect("anthropic:claude-sonnet-5"), connect("openai:gpt-5.2")])

Each transport first retries by its own policy. To fail over at once, give it
``RetryPolicy(attempts=1)``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ConfigError
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    OutputModeName,
    Start,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
    output_mode_of,
)
from clark_agent.types import AssistantMessage, StopReason

__all__ = ["FirstOf"]

logger = logging.getLogger(__name__)

_EMPTY = AssistantMessage((), StopReason.OTHER)
_OUTAGES = (StreamErrorKind.TRANSIENT, StreamErrorKind.PROVIDER_RATE_LIMITED)


class FirstOf:
    """Tries one transport after the other until one answers.

    A rate limit or an outage before the first chunk leads to the next transport. Any other failure,
    or one after the first chunk, is passed on. If another transport than the first answered, the
    ``details`` of `Start` have ``answered_by``, and ``failed`` with the name, the failure's kind
    and its text for each transport before.
    """

    def __init__(self, transports: Iterable[StreamFn]) -> None:
        given: Any = transports
        if not isinstance(given, Iterable):
            raise ConfigError(f"FirstOf takes a list of transports, not {given!r}")
        self.transports = tuple(given)
        if not self.transports:
            raise ConfigError("FirstOf needs at least one transport")
        for transport in self.transports:
            if not callable(transport):
                raise ConfigError(f"FirstOf takes transports, not {transport!r}")

    def __repr__(self) -> str:
        return f"FirstOf([{', '.join([_name(transport) for transport in self.transports])}])"

    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        """The best mode that works with all transports."""
        modes = [output_mode_of(each, has_tools=has_tools) for each in self.transports]
        if "prompted" in modes:
            return "prompted"
        return "tool" if "tool" in modes else "native"

    async def aclose(self) -> None:
        """Close the transports that have an ``aclose``."""
        for transport in self.transports:
            if (close := getattr(transport, "aclose", None)) is not None:
                await close()

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        """Call the first transport, and the next ones after outages."""
        failed: list[dict[str, Any]] = []
        for transport in self.transports:
            is_last = len(failed) + 1 == len(self.transports)
            has_begun = False
            start = Start(_EMPTY)
            answer = transport(request, signal)
            try:
                async for event in answer:
                    if isinstance(event, Error) and not has_begun:
                        if event.kind in _OUTAGES and not is_last and not signal.cancelled:
                            failed.append(_failure(transport, event))
                            text = "%s failed (%s); trying the next transport"
                            logger.warning(text, _name(transport), event.message)
                            break
                        yield _with_failures(event, failed)
                        return
                    if isinstance(event, (Chunk, Done)) and not has_begun:
                        has_begun = True
                        yield _with_details(start, transport, failed)
                    if not isinstance(event, Start):
                        yield event
                    elif not has_begun:
                        start = event
                else:
                    return
            finally:
                if (close := getattr(answer, "aclose", None)) is not None:
                    await close()


def _name(transport: StreamFn) -> str:
    """Return a readable name. The ``repr`` of a host's own transport is not used: it may hold a
    key.
    """
    kind = type(transport)
    if kind.__module__.startswith("clark_agent.transports."):
        host = urlsplit(getattr(transport, "base_url", "")).hostname
        shown = repr(transport)
        return f"{shown} at {host}" if host and host not in shown else shown
    return getattr(transport, "__name__", None) or kind.__name__


def _failure(transport: StreamFn, error: Error) -> dict[str, Any]:
    return {"transport": _name(transport), "kind": str(error.kind), "message": error.message}


def _with_details(start: Start, transport: StreamFn, failed: list[dict[str, Any]]) -> Start:
    """Add the transports that failed before to the transport's `Start`. If that transport is a
    `FirstOf` too, its own entries are kept.
    """
    if not failed:
        return start
    details: dict[str, Any] = start.details if isinstance(start.details, dict) else {}
    inner = details.get("failed", ())
    return replace(
        start,
        details={
            **details,
            "answered_by": details.get("answered_by", _name(transport)),
            "failed": [*failed, *(inner if isinstance(inner, list) else ())],
        },
    )


def _with_failures(error: Error, failed: list[dict[str, Any]]) -> Error:
    if not failed:
        return error
    before = "; ".join([f"{failure['transport']}: {failure['message']}" for failure in failed])
    return replace(error, message=f"{error.message}; before that, {before}")
