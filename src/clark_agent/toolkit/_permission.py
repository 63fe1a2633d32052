"""Asking a person before a file tool touches a sensitive path.

`ApprovalGate` asks about tools. This asks about paths, also for a tool that only reads or that is
approved for good. All tools of a workspace share one `Permission`: an answer for good is about one
path, and holds for all of them.
"""

from __future__ import annotations

import logging
from typing import Any

from clark_agent.base_tool import ToolContext
from clark_agent.toolkit.approval import Approval, ApprovalRequest, AskApproval, Denied
from clark_agent.toolkit.ask import NobodyThere, OneAtATime, check_asking, put_to
from clark_agent.toolkit.sensitive import Access
from clark_agent.toolkit.workspace import Workspace, WorkspaceError, shown

__all__ = ["Permission"]

logger = logging.getLogger(__name__)

_HOW = (
    "Go on without it, or tell the user that you need it. The host allows it with "
    "file_tools(workspace, ask=...), or with other rules: Workspace(root, sensitive=...)"
)


class Permission:
    """What may be done with the sensitive paths of a workspace."""

    def __init__(self, workspace: Workspace, ask: AskApproval | None) -> None:
        check_asking("file_tools", ask, None)
        self._workspace = workspace
        self._ask = ask
        self._remembered: dict[tuple[str, Access], bool] = {}
        self._one_at_a_time = OneAtATime()

    async def check(
        self, path: str, access: Access, arguments: dict[str, Any], ctx: ToolContext
    ) -> None:
        """Ask if the path is sensitive. Raises `WorkspaceError` unless somebody agrees."""
        reason = self._workspace.sensitive(path, access)
        if reason is None:
            return
        key = (self._workspace.name_of(path), access)
        about = f"{shown(key[0])!r} was not {'read' if access == 'read' else 'written'}: {reason}"
        if self._ask is None:
            raise _refused(f"{about}, and there is nobody to ask. {_HOW}")
        async with self._one_at_a_time.turn():
            if key not in self._remembered:
                summary = f"{ctx.tool_name} wants to {access} {shown(key[0])!r}: {reason}"
                await self._put(self._ask, key, summary, arguments, about, ctx)
        if not self._remembered.get(key, True):
            raise _refused(f"{about}, and the user does not want that. Do not try it again")

    async def _put(
        self,
        ask: AskApproval,
        key: tuple[str, Access],
        summary: str,
        arguments: dict[str, Any],
        about: str,
        ctx: ToolContext,
    ) -> None:
        identity = None if ctx.run is None else ctx.run.identity
        request = ApprovalRequest(ctx.tool_name, arguments, summary, ctx.tool_call_id, identity)
        try:
            answer = await put_to(ask, request)
        except NobodyThere:
            raise _refused(f"{about}, and there is nobody to ask. {_HOW}") from None
        except Exception as error:
            logger.exception("nobody could be asked about %r", key[0])
            raise _refused(f"{about}, and asking failed ({type(error).__name__})") from error
        match answer:
            case Approval.ONCE:
                return
            case Approval.ALWAYS | Approval.NEVER:
                self._remembered[key] = answer is Approval.ALWAYS
            case Denied(said) if said.strip():
                raise _refused(f"{about}, and the user says: {said.strip()}")
            case _:
                raise _refused(f"{about}, and the user has refused it")


def _refused(text: str) -> WorkspaceError:
    return WorkspaceError(text, kind="sensitive")
