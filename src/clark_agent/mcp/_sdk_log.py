"""What the SDK logs about the input from a server, with a traceback: left out for our servers.

`Hooks.on_noise` reports such input once for each connection, and a request that fails says why.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

__all__ = ["is_ours", "quieten"]

is_ours: ContextVar[bool] = ContextVar("clark_agent_mcp_is_ours", default=False)
"""Set in the tasks that work for a connection of ours."""

_LOGGERS = ("mcp.client.stdio", "mcp.client.sse", "mcp.client.streamable_http")
_ABOUT_INPUT = (
    "Failed to parse JSONRPC message from server",
    "Error parsing ",
    "Unknown SSE event",
    "Unexpected content type",
)


def quieten() -> None:
    """Install the filter. May be called again."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not (is_ours.get() and str(record.msg).startswith(_ABOUT_INPUT))
