"""What a connection is used for, with the SDK: lists, calls, subscriptions, log levels.

Loaded with `clark_agent.mcp._sdk`, which opens the connections.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import anyio
import mcp_types as types
from mcp import MCPError
from mcp.client import Client
from mcp.client.session import ClientRequestContext
from mcp.client.subscriptions import ToolsListChanged
from mcp_types import INVALID_REQUEST, METHOD_NOT_FOUND
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from clark_agent.mcp.suspended_questions import Asked

if TYPE_CHECKING:
    from clark_agent.mcp._sdk import Hooks

__all__ = [
    "call_or_ask",
    "is_modern",
    "list_all",
    "list_tools",
    "listen_for_resource",
    "listen_for_tools",
    "set_log_level",
    "subscribe",
    "unsubscribe",
]

logger = logging.getLogger(__name__)

_MOST_PAGES = 1_000
_READY_SECONDS = 0.1


async def list_all(
    list_page: Callable[..., Awaitable[Any]],
    field: str,
    on_end: Callable[[str], None] | None = None,
) -> list[Any]:
    """All entries of a list that comes in pages. Ends, also if the pages do not; ``on_end`` is
    called with the reason.
    """
    found: list[Any] = []
    cursor: str | None = None
    seen: set[str] = set()
    for _ in range(_MOST_PAGES):
        page = await list_page(cursor=cursor)
        found.extend(getattr(page, field))
        cursor = page.next_cursor
        if not cursor:
            return found
        if cursor in seen:
            reason = "its list has the same page twice"
            break
        seen.add(cursor)
    else:
        reason = f"its list has more than {_MOST_PAGES:,} pages"
    if on_end is not None:
        on_end(f"{reason}: the rest is left out")
    return found


async def list_tools(client: Client, hooks: Hooks) -> tuple[list[Any], dict[str | None, str]]:
    """The tools of the server, and those that were left out with the reason. What it says for None
    is about the list.
    """
    left_out: dict[str | None, str] = {}
    hooks.left_out = left_out
    if client.server_capabilities.tools is None:
        return [], left_out

    def cut(reason: str) -> None:
        left_out[None] = reason

    return await list_all(client.list_tools, "tools", cut), left_out


def is_modern(client: Client) -> bool:
    """Whether the connection has the protocol 2026-07-28 or newer."""
    return client.protocol_version in MODERN_PROTOCOL_VERSIONS


async def set_log_level(client: Client, level: str | None) -> None:
    """Say which log messages are wanted. Current connections say it with each request."""
    if level is None or is_modern(client) or client.server_capabilities.logging is None:
        return
    wanted: Any = level
    request = types.SetLevelRequest(params=types.SetLevelRequestParams(level=wanted))
    try:
        await client.session.send_request(request, types.EmptyResult)
    except MCPError as error:
        logger.warning("the log level %r is refused: %s", level, error)


async def subscribe(client: Client, uri: str) -> bool:
    """Ask for updates of a resource. False on current connections, which `listen_for_resource`."""
    resources = client.server_capabilities.resources
    if resources is None or not (resources.subscribe or is_modern(client)):
        raise MCPError(METHOD_NOT_FOUND, "no updates")
    if is_modern(client):
        return False
    request = types.SubscribeRequest(params=types.SubscribeRequestParams(uri=uri))
    await client.session.send_request(request, types.EmptyResult)
    return True


async def unsubscribe(client: Client, uri: str) -> None:
    """Take back what `subscribe` has asked for."""
    if not is_modern(client):
        request = types.UnsubscribeRequest(params=types.UnsubscribeRequestParams(uri=uri))
        await client.session.send_request(request, types.EmptyResult)


async def listen_for_resource(client: Client, uri: str, on_begin: Callable[[], None]) -> None:
    """Receive updates of a resource, which `Hooks.on_message` gets, until the server ends it."""
    async with client.listen(resource_subscriptions=[uri]) as subscription:
        if not subscription.honored.resource_subscriptions:
            raise MCPError(METHOD_NOT_FOUND, "no updates")
        on_begin()
        async for _ in subscription:
            pass


async def listen_for_tools(client: Client, on_change: Callable[[], None]) -> None:
    """Report changes of the tools, on connections where a client has to ask for them.

    Returns when the server ends it or does not support it.
    """
    tools = client.server_capabilities.tools
    if not is_modern(client) or tools is None:
        return
    if not tools.list_changed:
        return
    async with client.listen(tools_list_changed=True) as subscription:
        if not subscription.honored.tools_list_changed:
            return
        async for event in subscription:
            if isinstance(event, ToolsListChanged):
                on_change()


async def call_or_ask(
    client: Client,
    tool: str,
    arguments: Any,
    on_progress: Any,
    answers: Mapping[str, Any] | None,
    state: str | None,
) -> types.CallToolResult | Asked:
    """Call a tool, with answers if the server has asked before. Returns what it asks the user."""
    if not is_modern(client):
        if answers is not None:
            raise MCPError(INVALID_REQUEST, "the server does not continue calls any more")
        return await client.call_tool(tool, arguments, progress_callback=on_progress)
    responses: dict[str, Any] | None = None
    if answers is not None:
        responses = {key: types.ElicitResult.model_validate(answers[key]) for key in answers}
    while True:
        result = await client.session.call_tool(
            tool,
            arguments,
            progress_callback=on_progress,
            input_responses=responses,
            request_state=state,
            allow_input_required=True,
        )
        if not isinstance(result, types.InputRequiredResult):
            return result
        asked, state = result.input_requests or {}, result.request_state
        questions = {
            key: request.params.model_dump(mode="json", by_alias=True, exclude_none=True)
            for key, request in asked.items()
            if isinstance(request, types.ElicitRequest)
        }
        if questions and len(questions) == len(asked):
            return Asked(questions, state)
        if not asked:  # it is not ready yet
            await anyio.sleep(_READY_SECONDS)
        responses = {key: await _input(client, key, asked[key]) for key in asked} or None


async def _input(client: Client, key: str, request: types.InputRequest) -> Any:
    """What a server needs besides the user, such as roots. Raises if there is nothing."""
    context = ClientRequestContext(session=client.session, request_id=key)
    given = await client.session.dispatch_input_request(context, request)
    if isinstance(given, types.ErrorData):
        raise MCPError.from_error_data(given)
    return given
