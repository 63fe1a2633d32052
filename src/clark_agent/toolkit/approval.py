"""ApprovalGate: asks a person before a tool does something.

The gate is a plugin. Before each call that needs it, it puts an `ApprovalRequest` to the function
that the host gives and runs the call only if the answer says so. What that means:

- A tool whose object says ``reads_only`` runs unasked, any other is asked about, whatever its name.
- The request shows the whole call, and for tools with a `AgentTool.preview` what it would change.
- An approval is for one call: this tool with these very arguments. If they change while the
  question is open the call is not run. Only ``always`` is for a tool, whatever the arguments.
- Nothing runs by mistake. With nobody to ask, with an ``ask`` that raises, takes too long or
  returns something else, the call is blocked and the model is told why.
- One question at a time, also when several runs, event loops or threads share the gate.
- A run that is cancelled takes its question back.
- A tool that has questions of its own, as the file tools have about secrets, asks them through the
  gate: ``file_tools(workspace, ask=gate.ask)``. They wait for their turn like the others. What a
  person has just approved is not asked about a second time.
- It is asked about the call as it will run: ``asks_outside`` says that it comes behind all other
  plugins. What a plugin behind it rewrites would run unseen.

``always`` and ``never`` hold for one conversation (the ``conversation_id`` of the run's identity),
and without one for the run and its child runs: never for other users of the same config. An
``always`` that is given meanwhile answers the questions of its conversation that wait. They last as
long as the gate, until `ApprovalGate.forget`. A host that wants to keep them for longer stores what
`ApprovalGate.remembered` gives, and makes a gate with ``always`` of it for that conversation alone.

Child runs made with `LoopConfig.child` inherit the gate, and with it what was allowed; an
`agent_tool` whose config was made otherwise has the plugins of that config alone, so put the gate
there too.

A run that is resumed does not ask again about a call that has its result, or had begun. What was
approved and had not begun is asked again: an answer is not in the log, only what came of it.
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
from clark_agent.plugin import BeforeToolCallContext, Block
from clark_agent.toolkit._visible import call_block, call_line, visible
from clark_agent.toolkit.ask import NobodyThere, OneAtATime, check_asking, put_to
from clark_agent.tools.base import AgentTool
from clark_agent.tools.repair import close_match
from clark_agent.types import RunIdentity

__all__ = ["Approval", "ApprovalGate", "ApprovalRequest", "AskApproval", "Denied", "preview_of"]

logger = logging.getLogger(__name__)

_SHORT_CALL = 200
_MOST_CONVERSATIONS = 10_000
"""Of which answers are remembered; the oldest go, and are asked again."""


class Approval(StrEnum):
    """What a person says to a call."""

    ONCE = "once"
    """Run this one."""
    ALWAYS = "always"
    """Run this one, and do not ask about this tool again in this conversation."""
    NO = "no"
    """Do not run this one."""
    NEVER = "never"
    """Do not run this one, and refuse this tool in this conversation without asking."""


class Denied(Struct, frozen=True):
    """A no with a word to the model, such as what to do instead."""

    reason: str


class ApprovalRequest(Struct, frozen=True):
    """A call that waits for approval."""

    tool_name: str
    arguments: Any
    """As the tool will get them. They are to be looked at, not changed."""
    summary: str
    """The whole call in one line, however long, of characters that all show."""
    tool_call_id: str
    run: RunIdentity | None = None
    """Whose call it is; it tells the runs of sub-agents, and of users, apart."""
    preview: str | None = None
    """What the tool says that the call would change: lines of characters that all show."""
    path: str | None = None
    """The sensitive path that a file tool asks about; ``always`` and ``never`` are then for this
    path, and not for the tool."""

    @property
    def text(self) -> str:
        """Everything that a person should see: the call, over several lines if it is long, and the
        preview. Whatever the arguments hold shows, and none of it is left out.
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
"""Puts a request to a person.

Contract: an ``async def`` ends when it is cancelled; a plain ``def`` runs in a thread and may
block. Whatever it raises, or returns beside an `Approval` or a `Denied`, is a no.
"""

_Answers: TypeAlias = dict[str, Approval]
"""What was said for good, by tool."""

_Owner: TypeAlias = tuple[str, str]
"""Whose answers they are: a conversation, or a run, and its id."""


def _is_plain(function: object) -> bool:
    return callable(function) and not iscoroutinefunction(function)


def _names(label: str, given: Any) -> frozenset[str]:
    """The names of tools. Raises `ConfigError` for anything else, the tools themselves too."""
    if isinstance(given, str):
        raise ConfigError(f"ApprovalGate: {label} are names of tools: [{given!r}]")
    names = tuple(given)
    for name in names:
        if not isinstance(name, str):
            hint = f": write {name.name!r}" if isinstance(name, AgentTool) else ""
            raise ConfigError(f"ApprovalGate: {label} are names of tools, not {name!r}{hint}")
    return frozenset(names)


class ApprovalGate:
    """Asks before tools run. See the module.

    ``tools`` names those to ask about; None is all that are not ``reads_only``. A name that no tool
    of the first config has is a `ConfigError`. If a later config (of a child run, say) lacks one of
    the names, the gate also asks about every tool there that it has not met. With
    ``needs_approval`` the gate asks only about those of their calls for which it is true; if it
    raises, it asks. ``always`` names tools that run unasked for everybody. ``timeout`` is how many
    seconds a person has for an answer; the ``hook_timeout`` of the config counts too. Without
    ``ask`` there is nobody, and what needs approval is refused.
    """

    name = "approval_gate"
    inheritable_to_child = True
    asks_outside = True

    def __init__(
        self,
        ask: AskApproval | None,
        *,
        tools: Iterable[str] | None = None,
        needs_approval: Callable[[BeforeToolCallContext], bool] | None = None,
        always: Iterable[str] = (),
        timeout: float | None = None,
    ) -> None:
        check_asking("ApprovalGate", ask, timeout, "request")
        if needs_approval is not None and not _is_plain(needs_approval):
            raise ConfigError(
                "ApprovalGate: needs_approval must be a plain function of a call's context"
            )
        self._ask = ask
        self._tools = None if tools is None else _names("tools", tools)
        self._met: set[str] = set()
        """The tools of configs that have all that ``tools`` names."""
        self._needs_approval = needs_approval
        self._timeout = timeout
        self.always = _names("always", always)
        """The tools that run unasked for everybody."""
        self._remembered: dict[_Owner, _Answers] = {}
        """What was said for good, by conversation or run."""
        self._owners: dict[str, _Owner] = {}
        """In what of these a running run looks, by its id."""
        self._approved: dict[str, dict[str, ApprovalRequest]] = {}
        """The calls of running runs that a person has approved, by run and call."""
        self._one_at_a_time = OneAtATime()
        self._run_id: str | None = None

    # --- what was said for good -----------------------------------------------------------------

    def remembered(self, conversation_id: str) -> dict[str, Approval]:
        """What was said for good in a conversation: ``always`` or ``never``, by tool."""
        return dict(self._remembered.get(("conversation", conversation_id), {}))

    def forget(self, *tools: str, conversation_id: str | None = None) -> None:
        """Ask about these tools again, or about all; everywhere, or in one conversation."""
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

    def _said(self, key: _Owner | None, tool: str) -> Approval | None:
        answer = None if key is None else self._remembered.get(key, {}).get(tool)
        return Approval.ALWAYS if answer is None and tool in self.always else answer

    def _owner(self, identity: RunIdentity | None) -> _Owner | None:
        """The conversation of a run; without one the outermost run that has this gate."""
        if identity is None:
            return None
        self._run_id = identity.run_id
        if identity.conversation_id:  # one that is empty is nobody's
            return ("conversation", identity.conversation_id)
        above = self._owners.get(identity.parent_run_id or "")
        owner = above or ("run", identity.run_id)
        self._owners[identity.run_id] = owner
        return owner

    # --- what plugins have ----------------------------------------------------------------------

    def check_tools(self, tools: Mapping[str, AgentTool]) -> None:
        """Refuse names that no tool has. Raises `ConfigError`."""
        missing = sorted((self._tools or frozenset()).difference(tools))
        if not missing:
            self._met.update(tools)
        elif not self._met:
            near = close_match(missing[0], tools)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(tools) or 'none'}"
            raise ConfigError(
                f"ApprovalGate: tools names {missing[0]!r}, and the config has no such tool: {hint}"
            )

    def for_run(self) -> ApprovalGate:
        """The gate for one run. It shares what was said, by conversation."""
        return copy(self)

    def end_run(self) -> None:
        """Forget what was said for this run alone."""
        if self._run_id is not None:
            self._owners.pop(self._run_id, None)
            self._remembered.pop(("run", self._run_id), None)
            self._approved.pop(self._run_id, None)

    async def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Block | None:
        """Ask, unless the call needs no approval or the answer is known."""
        name, owner = ctx.tool_call.name, self._owner(ctx.identity)
        if not self._must_ask(ctx):
            return None
        if (said := self._said(owner, name)) is not None:
            return _decision(said)
        if self._ask is None:
            return _blocked("nobody_to_ask", _NOBODY)
        async with self._one_at_a_time.turn():
            if (said := self._said(owner, name)) is not None:  # while this one waited
                return _decision(said)
            return await self._put(self._ask, ctx, owner)

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
            logger.exception("needs_approval failed for a call of %r; it is asked about", name)
            return True

    async def ask(self, request: ApprovalRequest) -> Approval | Denied:
        """Put the question of a tool to the person, in turn with those of the gate.

        A call that they have approved is not put to them again: the answer is then ``once``.
        Raises `EOFError` if there is nobody, and `TimeoutError`.
        """
        if self._has_approved(request):
            return Approval.ONCE
        if self._ask is None:
            raise EOFError("there is nobody to ask")
        async with self._one_at_a_time.turn():
            return await self._answer(self._ask, request)

    def _has_approved(self, request: ApprovalRequest) -> bool:
        """Whether a person has seen this very call. The tool may have added its defaults."""
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
            return _understood(await put_to(ask, request))

    async def _put(
        self, ask: AskApproval, ctx: BeforeToolCallContext, owner: _Owner | None
    ) -> Block | None:
        call, shown, before = ctx.tool_call, _text(ctx.args), _cancellations()
        preview = None if ctx.tool is None else await preview_of(ctx.tool, ctx.args)
        request = ApprovalRequest(
            call.name, ctx.args, call_line(call.name, ctx.args), call.id, ctx.identity, preview
        )
        try:
            answer = await self._answer(ask, request)
        except TimeoutError:
            return _blocked("approval_timeout", f"nobody has approved it in time. {_INSTEAD}")
        except NobodyThere:
            return _blocked("nobody_to_ask", _NOBODY)
        except Exception as error:
            logger.exception("a call of %r could not be put to anybody, and is blocked", call.name)
            why = f"{type(error).__name__}: {error}"
            return _blocked("approval_failed", f"asking for approval failed ({why}). {_INSTEAD}")
        if _cancellations() > before:  # and ``ask`` has swallowed it: the answer comes too late
            raise asyncio.CancelledError
        if _text(ctx.args) != shown:
            return _blocked("arguments_changed", _CHANGED)
        if answer in (Approval.ALWAYS, Approval.NEVER):
            self._remember(owner, call.name, Approval(answer))
        if (decision := _decision(answer)) is None and ctx.identity is not None:
            self._approved.setdefault(ctx.identity.run_id, {})[call.id] = request
        return decision


_INSTEAD = "Go on without it, or say what you need it for."
_NOBODY = f"it needs approval, and there is nobody to ask. {_INSTEAD}"
_CHANGED = "its arguments changed while it waited for approval. Send it again."


async def preview_of(tool: AgentTool, args: Any) -> str | None:
    """What the tool says that the call would change, of characters that all show."""
    if type(tool).preview is AgentTool.preview:
        return None
    try:
        text = await run_in_thread(tool.preview, args)
        return None if text is None else visible(text)
    except Exception:
        logger.exception("the preview of a call of %r failed; it is shown without", tool.name)
        return None


def _cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _understood(answer: object) -> Approval | Denied:
    if isinstance(answer, Denied):
        return answer
    if isinstance(answer, str) and answer in list(Approval):
        return Approval(answer)
    raise TypeError(f"ask must return an Approval or a Denied, not {answer!r}")


def _decision(answer: Approval | Denied) -> Block | None:
    """None lets the call run."""
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
    """Equal for equal arguments."""
    try:
        return msgspec.json.encode(args, order="deterministic").decode()
    except (TypeError, ValueError, RecursionError):
        return repr(args)
