"""ApprovalGate: asks a person before a tool runs.

The gate is a plugin. Before each call that needs approval, it passes an `ApprovalRequest` to the
host's ``ask`` function, and runs the call only if the answer allows it. The rules:

- A tool with ``reads_only`` runs without a question. Every other tool is asked about.
- The request shows the whole call, and the tool's `AgentTool.preview` of what it would change.
- An approval is for one call: this tool with exactly these arguments. If they change while the
  question is open, the call is not run. Only ``always`` covers a tool with any arguments.
- With `SUSPEND` instead of an ``ask`` function, nothing waits in the process: the run is suspended,
  and `clark_agent.run_log.decide` answers, at any time and from any process. ``timeout`` is then
  how long the request stays open. The run needs a log. ``always`` and ``never`` are not among these
  answers.
- Nothing runs by mistake. If there is no ``ask``, or it raises, times out or returns anything else,
  the call is blocked and the model gets the reason.
- Only one question is open at a time, even if several runs, event loops or threads share the gate.
  An ``ask`` that reaches several people (`clark_agent.mcp.serving.elicited_approval`) has one line
  for each of them.
- Cancelling a run withdraws its question.
- A tool with questions of its own, as the file tools have about secrets, asks them through the
  gate: ``file_tools(workspace, ask=gate.ask)``. They queue with the gate's questions. A call that
  the person has just approved is not asked about again.
- The gate must see the call as it will run. ``is_interactive`` places it after all other plugins,
  because a later plugin could rewrite the call unseen.

``always`` and ``never`` apply to one conversation (the ``conversation_id`` of the run's identity),
or without one to the run and its child runs. They never apply to other users of the same config. A
new ``always`` also answers the queued questions of its conversation. Answers last as long as the
gate, or until `ApprovalGate.forget`. To keep them longer, a host stores the result of
`ApprovalGate.remembered` and makes a gate with that ``always`` for that conversation alone.

Child runs made with `LoopConfig.child` inherit the gate and its answers. An `agent_tool` with a
separately made config has only the plugins of that config, so add the gate there too.

A resumed run does not ask again about a call that has a result or had started, or that was allowed
while the run was suspended. It does ask again about a call that was approved in the process and had
not started: the log holds results and decisions, not answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from copy import copy
from enum import StrEnum
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from clark_agent._threads import run_in_thread
from clark_agent.errors import ConfigError
from clark_agent.plugins.base import (
    BeforeToolCallContext,
    Block,
)
from clark_agent.toolkit._visible import call_block, call_line, visible
from clark_agent.toolkit.ask import (
    SUSPEND,
    NobodyThere,
    Suspended,
    check_asking,
    line_of,
    put_to,
)
from clark_agent.tools.base import AgentTool
from clark_agent.tools.repair import close_match
from clark_agent.types import RunIdentity
from clark_agent.waiting import Suspend

__all__ = ["Approval", "ApprovalGate", "ApprovalRequest", "AskApproval", "Denied", "preview_of"]

logger = logging.getLogger(__name__)

_SHORT_CALL = 200
_MOST_CONVERSATIONS = 10_000
"""How many conversations the gate remembers. The oldest are dropped, and their questions asked
again.
"""


class Approval(StrEnum):
    """A person's answer to a call."""

    ONCE = "once"
    """Run this call."""
    ALWAYS = "always"
    """Run this call, and do not ask about this tool again in this conversation."""
    NO = "no"
    """Do not run this call."""
    NEVER = "never"
    """Do not run this call, and refuse this tool in this conversation without asking."""


class Denied(Struct, frozen=True):
    """A refusal with a message to the model, such as what to do instead."""

    reason: str


class ApprovalRequest(Struct, frozen=True):
    """A call that waits for approval."""

    tool_name: str
    arguments: Any
    """As the tool will get them. Do not modify them."""
    summary: str
    """The whole call in one line of any length, with invisible characters escaped."""
    tool_call_id: str
    run: RunIdentity | None = None
    """The run that makes the call. It identifies sub-agents and users."""
    preview: str | None = None
    """The tool's description of what the call would change, with invisible characters escaped."""
    path: str | None = None
    """The sensitive path that a file tool asks about. ``always`` and ``never`` then apply to this
    path, not to the tool.
    """

    @property
    def text(self) -> str:
        """Everything that a person should see: the call, over several lines if it is long, and the
        preview. Nothing is left out, and invisible characters are escaped.
        """
        if len(self.summary) <= _SHORT_CALL:
            parts = [self.summary, self.preview]
        else:
            head = f"{self.tool_name}: a call of {len(self.summary):,} characters"
            parts = [head, self.preview, call_block(self.arguments)]
        return "\n".join([part.rstrip("\n") for part in parts if part])


AskApproval: TypeAlias = Callable[
    [ApprovalRequest], Awaitable[Approval | Denied] | Approval | Denied
]
"""Asks a person for approval.

Contract: an ``async def`` ends when it is cancelled; a plain ``def`` runs in a thread and may
block. An exception, or any return value but an `Approval` or a `Denied`, counts as a refusal.
"""

_Answers: TypeAlias = dict[str, Approval]
"""The ``always`` and ``never`` answers, by tool."""

_Owner: TypeAlias = tuple[str, str]
"""The owner of the answers: a conversation or a run, and its id."""


def _is_plain(function: object) -> bool:
    return callable(function) and not iscoroutinefunction(function)


def _names(label: str, given: Any) -> frozenset[str]:
    """Return the tool names. Raises `ConfigError` for anything else, even for tool objects."""
    if isinstance(given, str):
        raise ConfigError(f"ApprovalGate: {label} must be a list of tool names: [{given!r}]")
    names = tuple(given)
    for name in names:
        if not isinstance(name, str):
            hint = f": write {name.name!r}" if isinstance(name, AgentTool) else ""
            raise ConfigError(f"ApprovalGate: {label} must be tool names, not {name!r}{hint}")
    return frozenset(names)


class ApprovalGate:
    """Asks before tools run. See the module docstring.

    ``tools`` names the tools to ask about; None means all that are not ``reads_only``. A name that
    no tool of the first config has is a `ConfigError`. If a later config (of a child run, for
    example) lacks one of the names, the gate also asks about every tool there that it has not seen
    before. With ``needs_approval`` the gate asks only about calls for which it returns true; if it
    raises, the gate asks. ``always`` names tools that run without a question in every conversation.
    ``timeout`` is how many seconds a person has to answer; the ``hook_timeout`` of the config
    applies too. Without ``ask``, calls that need approval are refused. With `SUSPEND`, the run is
    suspended; ``assignee`` is then who should decide, or a function of the call's context that
    returns it.
    """

    name = "approval_gate"
    inheritable_to_child = True
    is_interactive = True

    def __init__(
        self,
        ask: AskApproval | Suspended | None,
        *,
        tools: Iterable[str] | None = None,
        needs_approval: Callable[[BeforeToolCallContext], bool] | None = None,
        always: Iterable[str] = (),
        timeout: float | None = None,
        assignee: str | Callable[[BeforeToolCallContext], str | None] | None = None,
    ) -> None:
        check_asking("ApprovalGate", ask, timeout, "request")
        if assignee is not None and ask is not SUSPEND:
            raise ConfigError("ApprovalGate: assignee needs SUSPEND: ApprovalGate(SUSPEND, ...)")
        if needs_approval is not None and not _is_plain(needs_approval):
            raise ConfigError(
                "ApprovalGate: needs_approval must be a plain function of a call's context"
            )
        self._suspends = ask is SUSPEND
        self._assignee = assignee
        self._ask = None if ask is SUSPEND else ask
        self._tools = None if tools is None else _names("tools", tools)
        self._met: set[str] = set()
        """The tools of all configs that have every name in ``tools``."""
        self._needs_approval = needs_approval
        self._timeout = timeout
        self.always = _names("always", always)
        """The tools that run without a question in every conversation."""
        self._remembered: dict[_Owner, _Answers] = {}
        """The ``always`` and ``never`` answers, by conversation or run."""
        self._owners: dict[str, _Owner] = {}
        """The owner whose answers a running run uses, by run id."""
        self._approved: dict[str, dict[str, ApprovalRequest]] = {}
        """The approved calls of running runs, by run id and call id."""
        self._line = line_of(ask)
        self._run_id: str | None = None

    # --- remembered answers ---------------------------------------------------------------------

    def remembered(self, conversation_id: str) -> dict[str, Approval]:
        """Return the ``always`` and ``never`` answers of a conversation, by tool."""
        return dict(self._remembered.get(("conversation", conversation_id), {}))

    def forget(self, *tools: str, conversation_id: str | None = None) -> None:
        """Drop the answers for these tools, or for all; in one conversation, or in all."""
        for key, answers in tuple(self._remembered.items()):
            if conversation_id is None or key == ("conversation", conversation_id):
                for tool in tools or tuple(answers):
                    answers.pop(tool, None)

    def _remember(self, key: _Owner | None, tool: str, answer: Approval) -> None:
        if key is None:
            return
        self._remembered.setdefault(key, {})[tool] = answer
        while len(self._remembered) > _MOST_CONVERSATIONS:
            self._remembered.pop(next(iter(self._remembered)), None)

    def _known_answer(self, key: _Owner | None, tool: str) -> Approval | None:
        answer = None if key is None else self._remembered.get(key, {}).get(tool)
        return Approval.ALWAYS if answer is None and tool in self.always else answer

    def _owner(self, identity: RunIdentity | None) -> _Owner | None:
        """Return the conversation of a run, or else the outermost run that has this gate."""
        if identity is None:
            return None
        self._run_id = identity.run_id
        if identity.conversation_id:  # an empty id names no conversation
            return ("conversation", identity.conversation_id)
        above = self._owners.get(identity.parent_run_id or "")
        owner = above or ("run", identity.run_id)
        self._owners[identity.run_id] = owner
        return owner

    # --- plugin methods -------------------------------------------------------------------------

    def check_tools(self, tools: Mapping[str, AgentTool]) -> None:
        """Raise `ConfigError` if no tool has a name that ``tools`` lists."""
        missing = sorted((self._tools or frozenset()).difference(tools))
        if not missing:
            self._met.update(tools)
        elif not self._met:
            near = close_match(missing[0], tools)
            known = ", ".join(tools) or "none"
            hint = f"did you mean {near!r}?" if near else f"the tools are {known}"
            raise ConfigError(
                f"ApprovalGate: tools has {missing[0]!r}, but the config has no such tool: {hint}"
            )

    def for_run(self) -> ApprovalGate:
        """Return the gate for one run. It shares the answers of all conversations."""
        return copy(self)

    def end_run(self) -> None:
        """Drop the answers that apply to this run alone."""
        if self._run_id is not None:
            self._owners.pop(self._run_id, None)
            self._remembered.pop(("run", self._run_id), None)
            self._approved.pop(self._run_id, None)

    async def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Block | Suspend | None:
        """Ask, unless the call needs no approval or the answer is known."""
        name, owner = ctx.tool_call.name, self._owner(ctx.identity)
        if not self._must_ask(ctx):
            return None
        if ctx.was_allowed:
            self._note_approved(ctx, await self._request(ctx))
            return None
        if (known := self._known_answer(owner, name)) is not None:
            return _decision(known)
        if self._suspends:
            return await self._suspend(ctx)
        if self._ask is None:
            return _blocked("nobody_to_ask", _NOBODY)
        async with self._line().turn():
            if (
                known := self._known_answer(owner, name)
            ) is not None:  # answered while this call waited
                return _decision(known)
            return await self._put(self._ask, ctx, owner)

    async def _suspend(self, ctx: BeforeToolCallContext) -> Suspend:
        """Let the run wait for the answer."""
        asked = await self._request(ctx)
        request = {"kind": "approval", "summary": asked.summary}
        if asked.preview is not None:
            request["preview"] = asked.preview
        assignee = self._assignee(ctx) if callable(self._assignee) else self._assignee
        return Suspend(request, expires_in=self._timeout, assignee=assignee)

    def _must_ask(self, ctx: BeforeToolCallContext) -> bool:
        name = ctx.tool_call.name
        reads_only = ctx.tool is not None and ctx.tool.reads_only is True
        if self._tools is None:
            if reads_only:
                return False
        elif name not in self._tools and (reads_only or name in self._met):
            return False
        if self._needs_approval is None:
            return True
        try:
            return bool(self._needs_approval(ctx))
        except Exception:
            logger.exception("needs_approval failed for a call of %r; asking for approval", name)
            return True

    async def ask(self, request: ApprovalRequest) -> Approval | Denied:
        """Ask the person on behalf of a tool, queued with the gate's own questions.

        Returns ``once`` without asking for a call that the person has approved. Raises `EOFError`
        if the gate has no ``ask``, and `TimeoutError`.
        """
        if self._has_approved(request):
            return Approval.ONCE
        if self._ask is None:
            raise EOFError("the gate has no ask function")
        async with self._line().turn():
            return await self._answer(self._ask, request)

    def _has_approved(self, request: ApprovalRequest) -> bool:
        """Return whether the person approved this very call. The tool may have added defaults."""
        calls = {} if request.run is None else self._approved.get(request.run.run_id, {})
        seen = calls.pop(request.tool_call_id, None)
        if seen is None or seen.tool_name != request.tool_name:
            return False
        shown, asked = seen.arguments, request.arguments
        if isinstance(shown, dict) and isinstance(asked, dict):
            return all(name in asked and asked[name] == shown[name] for name in shown)
        return bool(shown == asked)

    async def _answer(self, ask: AskApproval, request: ApprovalRequest) -> Approval | Denied:
        async with asyncio.timeout(self._timeout):
            return _checked_answer(await put_to(ask, request))

    async def _request(self, ctx: BeforeToolCallContext) -> ApprovalRequest:
        call, summary = ctx.tool_call, call_line(ctx.tool_call.name, ctx.args)
        preview = None if ctx.tool is None else await preview_of(ctx.tool, ctx.args)
        return ApprovalRequest(call.name, ctx.args, summary, call.id, ctx.identity, preview)

    async def _put(
        self, ask: AskApproval, ctx: BeforeToolCallContext, owner: _Owner | None
    ) -> Block | None:
        call, shown, before = ctx.tool_call, _text(ctx.args), _cancellations()
        request = await self._request(ctx)
        try:
            answer = await self._answer(ask, request)
        except TimeoutError:
            return _blocked("approval_timeout", f"the user did not approve it in time. {_INSTEAD}")
        except NobodyThere:
            return _blocked("nobody_to_ask", _NOBODY)
        except Exception as error:
            logger.exception("asking about a call of %r failed; it is blocked", call.name)
            why = f"{type(error).__name__}: {error}"
            return _blocked("approval_failed", f"asking for approval failed ({why}). {_INSTEAD}")
        if _cancellations() > before:  # ``ask`` has swallowed the cancellation: too late
            raise asyncio.CancelledError
        if _text(ctx.args) != shown:
            return _blocked("arguments_changed", _CHANGED)
        if answer in (Approval.ALWAYS, Approval.NEVER):
            self._remember(owner, call.name, Approval(answer))
        if (decision := _decision(answer)) is None:
            self._note_approved(ctx, request)
        return decision

    def _note_approved(self, ctx: BeforeToolCallContext, request: ApprovalRequest) -> None:
        if ctx.identity is not None:
            self._approved.setdefault(ctx.identity.run_id, {})[ctx.tool_call.id] = request


_INSTEAD = "Go on without it, or say what you need it for."
_NOBODY = f"it needs approval, and no user is available to ask. {_INSTEAD}"
_CHANGED = "its arguments changed while it waited for approval. Send it again."


async def preview_of(tool: AgentTool, args: Any) -> str | None:
    """Return the tool's preview of the call, with invisible characters escaped."""
    if type(tool).preview is AgentTool.preview:
        return None
    try:
        text = await run_in_thread(tool.preview, args)
        return None if text is None else visible(text)
    except Exception:
        logger.exception("the preview of a call of %r failed; asking without it", tool.name)
        return None


def _cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _checked_answer(answer: object) -> Approval | Denied:
    if isinstance(answer, Denied):
        return answer
    if isinstance(answer, str) and answer in list(Approval):
        return Approval(answer)
    raise TypeError(f"ask must return an Approval or a Denied, not {answer!r}")


def _decision(answer: Approval | Denied) -> Block | None:
    """Return None to run the call."""
    match answer:
        case Approval.ONCE | Approval.ALWAYS:
            return None
        case Approval.NEVER:
            return _blocked(
                "denied", "the user does not want this tool used. Do not call it again."
            )
        case Denied(reason) if reason.strip():
            return _blocked("denied", f"the user refused it and says: {reason.strip()}")
        case _:
            return _blocked(
                "denied",
                "the user refused it. Do not send it again as it is: do without it, or ask what "
                "they want instead.",
            )


def _blocked(reason: str, text: str) -> Block:
    details = {"kind": "tool_call_not_executed", "reason": reason}
    return Block(f"The call was not run: {text}", details)


def _text(args: Any) -> str:
    """Return a text that is equal for equal arguments."""
    try:
        return msgspec.json.encode(args, order="deterministic").decode()
    except (TypeError, ValueError, RecursionError):
        return repr(args)
