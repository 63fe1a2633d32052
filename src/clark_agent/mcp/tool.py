"""McpTool: a tool of a server, as a tool of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from clark_agent._threads import call_in_loop
from clark_agent.engine.supervised import is_cancelled
from clark_agent.errors import InvalidArgumentsError, McpError
from clark_agent.mcp.suspended_questions import Asked, answers_to, suspension
from clark_agent.tools.base import AgentTool, ToolContext, ToolResult
from clark_agent.tools.repair import explain_arguments, repair_arguments

if TYPE_CHECKING:
    from clark_agent.mcp._sdk import Client
    from clark_agent.mcp.definition import Definition
    from clark_agent.mcp.link import ServerLink

__all__ = ["McpTool", "error_result"]

_MOST_PENDING_REPORTS = 8
_REFUSED = (-32601, -32602)
"""The codes of errors after which a call has certainly not happened: an unknown method or tool, or
invalid arguments."""
_CANNOT_ASK = -32021
"""The code of the error of a server that needs something of the client, such as to ask the user."""


class McpTool(AgentTool[Any]):
    """A tool of an MCP server. `clark_agent.mcp.McpTools` makes them.

    It belongs to no event loop: a call uses the connection of the loop that it runs in.
    """

    def __init__(self, link: ServerLink, name: str, definition: Definition) -> None:
        super().__init__()
        self.name = name
        self.description = definition.description
        self.parameters_schema = definition.parameters
        self.definition = definition
        """What the server says about the tool."""
        self._checked: dict[str, Any] | None = None
        self._link = link
        server = link.server
        self.server = server.name
        """The name of the server."""
        self.remote_name = definition.name
        """The server's own name of the tool."""
        self._timeout = server.timeout
        if server.trust_annotations:
            self.reads_only = definition.reads_only
            self.idempotent = definition.reads_only or definition.idempotent

    def prepare_arguments(self, args: Any) -> Any:
        """Without the nulls that stand for omitted arguments in the strict form."""
        return self.definition.without_nulls(args)

    def validate(self, args: Any) -> Any:
        """The arguments, repaired where their meaning is clear. Raises `InvalidArgumentsError`.

        Patterns, formats and conditions of the schema are left to the server.
        """
        schema = self._checked
        if schema is None:
            schema = self._checked = self.definition.checked()
        problem = explain_arguments(args, schema)
        if problem is None:
            return None
        repaired = repair_arguments(args, schema)
        if repaired is not args:
            problem = explain_arguments(repaired, schema)
            if problem is None:
                return repaired
        raise InvalidArgumentsError(self.name, problem)

    async def execute(self, args: Any, ctx: ToolContext[Any]) -> ToolResult:
        """Call the tool. Raises nothing but a cancellation, and `ToolSuspended` for a question."""
        run = ctx.run
        if run is None:
            return await _until_cancelled(self._execute(args, ctx), ctx)
        if self._link.suspends or ctx.continued is not None:
            return await self._call_or_suspend(args, ctx)
        if not run.reports_progress:
            return await self.call(args)
        return await self._execute(args, ctx)

    async def _execute(self, args: Any, ctx: ToolContext[Any]) -> ToolResult:
        reports = _Reports(ctx)
        try:
            return await self.call(args, reports)
        finally:
            reports.cancel()

    async def call(self, arguments: Any, reports: _Reports | None = None) -> ToolResult:
        """Call the tool outside of a run."""
        link, name = self._link, self.remote_name
        problem = _problem_of_arguments(arguments)
        if problem is not None:
            return ToolResult.error(problem, details={"kind": "mcp", **self._origin})
        on_progress = None if reports is None else reports.on_progress
        connection = link.connection

        def work(client: Client) -> Coroutine[Any, Any, Any]:
            return client.call_tool(name, arguments, progress_callback=on_progress)

        try:
            result = await connection.request(work, within=self._timeout)
        except McpError as error:
            return error_result(error, link, name)
        return link.reader.tool_result(result, name)

    async def _call_or_suspend(self, arguments: Any, ctx: ToolContext[Any]) -> ToolResult:
        """Call the tool, or go on with a call whose question has been answered."""
        link, name = self._link, self.remote_name
        problem = _problem_of_arguments(arguments)
        if problem is not None:
            return ToolResult.error(problem, details={"kind": "mcp", **self._origin})
        given = (None, None) if ctx.continued is None else answers_to(ctx.continued)
        reports = _Reports(ctx)

        async def work(client: Client) -> Any:
            from clark_agent.mcp import _sdk

            return await _sdk.call_or_ask(client, name, arguments, reports.on_progress, *given)

        try:
            result = await link.connection.request(work, within=self._timeout)
        except McpError as error:
            return error_result(error, link, name)
        finally:
            reports.cancel()
        if isinstance(result, Asked):
            raise suspension(self.server, result)
        return link.reader.tool_result(result, name)

    @property
    def _origin(self) -> dict[str, str]:
        return {"server": self.server, "tool": self.remote_name}

    def preview(self, args: Any) -> str | None:
        """What the server says about the tool, for the person who approves the call."""
        return self.definition.preview(self.server)


def error_result(error: McpError, link: ServerLink, tool: str) -> ToolResult:
    """An error that the model can react to."""
    details: dict[str, Any] = {
        "kind": f"mcp_{error.kind}",
        "server": link.server.name,
        "tool": tool,
    }
    if error.code is not None:
        details["code"] = error.code
    match error.kind:
        case "timeout":
            text = (
                f"The tool has not answered within {link.server.timeout:g} seconds, and was "
                "cancelled. It may or may not have done its work."
            )
        case "connection_lost":
            text = (
                f"The connection to the server {link.server.name!r} was lost during the call. The "
                "call may or may not have happened: check before you call again."
            )
        case "unavailable":
            text = f"The server {link.server.name!r} cannot be reached. The call was not made."
            details["reason"] = error.text
        case "unauthorized":
            text = (
                f"The server {link.server.name!r} has refused the call: {error.text}. The call was "
                "not made, and calling again does not help."
            )
        case "protocol_error":
            code = "" if error.code is None else f" (error {error.code})"
            said = link.reader.quote(error.text)
            if error.code == _CANNOT_ASK:
                text = (
                    f"The server {link.server.name!r} has refused the call{code}: {said}\nIt needs "
                    "something that is not possible here, such as to ask the user. The call was "
                    "not made, and calling again does not help."
                )
            elif error.code in _REFUSED:
                text = f"The server {link.server.name!r} has refused the call{code}: {said}"
            else:
                text = (
                    f"The server {link.server.name!r} has not answered the call as it should{code}:"
                    f" {said}\nThe call may or may not have happened: check before you call again."
                )
        case _:
            assert_never(error.kind)
    return ToolResult.error(text, details=details)


def _problem_of_arguments(arguments: Any) -> str | None:
    """Why the arguments cannot be sent. Something that is not JSON would end the connection."""
    if not isinstance(arguments, dict):
        return "The arguments must be an object."
    try:
        msgspec.json.encode(arguments)
    except UnicodeError:
        return "The arguments have half of a character in them (a lone surrogate)."
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        return f"The arguments cannot be sent as JSON: {error}"
    return None


class _Reports:
    """The progress of a call on its way to the listeners.

    One report is being delivered, and a few wait. If more arrive, the oldest are dropped: a
    server may send them faster than anybody can read.
    """

    __slots__ = ("_ctx", "_pending", "on_progress", "task")

    def __init__(self, ctx: ToolContext[Any]) -> None:
        self._ctx = ctx
        self._pending: list[str] = []
        self.task: asyncio.Task[None] | None = None
        self.on_progress = self._on_progress

    async def _on_progress(self, progress: float, total: float | None, message: str | None) -> None:
        self._pending.append(_progress_text(progress, total, message))
        if len(self._pending) > _MOST_PENDING_REPORTS:
            del self._pending[0]
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self._deliver())

    def cancel(self) -> None:
        """Deliver nothing more."""
        if self.task is not None:
            self.task.cancel()

    async def _deliver(self) -> None:
        while self._pending:
            await self._ctx.update(self._pending.pop(0))


def _progress_text(progress: float, total: float | None, message: str | None) -> str:
    amount = f"{progress:g}" if not total else f"{progress:g}/{total:g}"
    return f"{amount}: {message}"[:2_000] if message else amount


async def _until_cancelled(
    call: Coroutine[Any, Any, ToolResult], ctx: ToolContext[Any]
) -> ToolResult:
    """The result, unless the signal is cancelled. In a run, the engine takes care of that."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(call)
    subscription = ctx.signal.subscribe(lambda: call_in_loop(loop, task.cancel))
    try:
        return await task
    except asyncio.CancelledError:
        if is_cancelled() or not ctx.signal.cancelled:
            raise
        return ToolResult.error("The call was cancelled.", details={"kind": "mcp_cancelled"})
    finally:
        subscription.close()
