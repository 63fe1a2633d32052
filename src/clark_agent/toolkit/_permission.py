"""Asks a person before a file tool touches a sensitive path.

`ApprovalGate` asks about tools. This module asks about paths, even for a tool that only reads or
that is always approved. Each call is one question, even if it both reads and writes. All tools of a
workspace share one `Permission`: ``always`` and ``never`` apply to one path in one conversation (or
in one run, if it has no conversation), for all these tools.
"""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

from clark_agent.toolkit._visible import call_line
from clark_agent.toolkit.approval import (
    Approval,
    ApprovalRequest,
    AskApproval,
    Denied,
    preview_of,
)
from clark_agent.toolkit.ask import NobodyThere, OneAtATime, check_asking, put_to, unless_stopped
from clark_agent.toolkit.sensitive import Access
from clark_agent.toolkit.workspace import Workspace, WorkspaceError, shown
from clark_agent.tools.base import AgentTool, ToolContext
from clark_agent.types import RunIdentity

__all__ = ["Permission"]

logger = logging.getLogger(__name__)

_MOST_ANSWERS = 10_000
"""How many answers are remembered. The oldest are dropped, and the question is asked again."""
_INSTEAD = "Go on without it, or tell the user that you need it"
_HOW = (
    "The host allows it with file_tools(workspace, ask=...), or with other rules: "
    "Workspace(root, sensitive=...)"
)

_Key: TypeAlias = tuple[str, str, str, Access]
"""The owner of the answer (conversation or run, and its id), the path, and the access."""


class Permission:
    """Decides access to the sensitive paths of a workspace."""

    def __init__(self, workspace: Workspace, ask: AskApproval | None) -> None:
        check_asking("file_tools", ask, None, "request")
        self._workspace = workspace
        self._ask = ask
        self._remembered: dict[_Key, bool] = {}
        self._one_at_a_time = OneAtATime()

    def reasons(self, path: str, access: tuple[Access, ...]) -> dict[Access, str]:
        """Return why a person should be asked, per kind of access. Empty if there is no reason."""
        found: dict[Access, str] = {}
        for each in access:
            if (reason := self._workspace.sensitive(path, each)) is not None:
                found[each] = reason
        return found

    async def check(
        self,
        tool: AgentTool,
        access: tuple[Access, ...],
        arguments: dict[str, Any],
        ctx: ToolContext,
    ) -> None:
        """Ask if the path is sensitive. Raises `WorkspaceError` unless the person agrees."""
        path = arguments["path"]
        reasons = self.reasons(path, access)
        if not reasons:
            return
        name = self._workspace.name_of(path)
        done = " or ".join(["read" if each == "read" else "written" for each in reasons])
        about = f"{shown(name)!r} was not {done}: {'; '.join(reasons.values())}"
        if self._ask is None:
            raise _refused(f"{about}, and no user is available to ask. {_INSTEAD}. {_HOW}")
        request = ApprovalRequest(
            ctx.tool_name,
            arguments,
            call_line(ctx.tool_name, arguments),
            ctx.tool_call_id,
            ctx.identity,
            await preview_of(tool, arguments),
            name,
        )
        keys: list[_Key] = [(*_owner(ctx.identity), name, each) for each in reasons]
        asking = self._settle(self._ask, request, keys, about)
        # A tool that runs in a thread cannot be cancelled, but waiting for an answer can.
        await unless_stopped(asking, ctx.signal)

    async def _settle(
        self, ask: AskApproval, request: ApprovalRequest, keys: list[_Key], about: str
    ) -> None:
        """Use the remembered answer, or ask for one."""
        async with self._one_at_a_time.turn():
            known = [self._remembered.get(key) for key in keys]
            if False in known:
                raise _refused(f"{about}, and the user does not want that. Do not try it again")
            if None in known:
                await self._put(ask, request, keys, about)

    async def _put(
        self, ask: AskApproval, request: ApprovalRequest, keys: list[_Key], about: str
    ) -> None:
        try:
            answer = await put_to(ask, request)
        except NobodyThere:
            raise _refused(f"{about}, and no user is available to ask. {_INSTEAD}") from None
        except TimeoutError:
            raise _refused(f"{about}, and the user did not answer in time. {_INSTEAD}") from None
        except Exception as error:
            logger.exception("asking about %r failed", request.path)
            raise _refused(f"{about}, and asking failed ({type(error).__name__})") from error
        match answer:
            case Approval.ONCE:
                return
            case Approval.ALWAYS:
                self._remember(keys, True)
            case Approval.NEVER:
                self._remember(keys, False)
                raise _refused(f"{about}, and the user does not want that. Do not try it again")
            case Denied(reason) if reason.strip():
                raise _refused(f"{about}, and the user says: {reason.strip()}")
            case _:
                raise _refused(f"{about}, and the user has refused it")

    def _remember(self, keys: list[_Key], answer: bool) -> None:
        self._remembered.update(dict.fromkeys(keys, answer))
        while len(self._remembered) > _MOST_ANSWERS:
            self._remembered.pop(next(iter(self._remembered)))


def _owner(identity: RunIdentity) -> tuple[str, str]:
    if identity.conversation_id is not None:
        return "conversation", identity.conversation_id
    return "run", identity.run_id


def _refused(text: str) -> WorkspaceError:
    return WorkspaceError(text, kind="sensitive")
