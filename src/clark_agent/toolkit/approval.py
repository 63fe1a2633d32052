"""ApprovalGate: asks a person before a tool does something.

The gate is a plugin. Before each call that needs it, it puts an `ApprovalRequest` to the function
that the host gives and runs the call only if the answer says so. What that means:

- An approval is for one call: this tool with these very arguments. If they change while the
  question is open the call is not run. Only ``always`` is for a tool, whatever the arguments.
- Nothing runs by mistake. With nobody to ask, with an ``ask`` that raises, takes too long or
  returns something else, the call is blocked and the model is told why.
- One question at a time, also when several runs share the gate. An ``always`` that is given
  meanwhile answers the questions that wait.
- A run that is cancelled takes its question back.
- It is asked about the call as it will run: ``asks_outside`` says that it comes behind all other
  plugins. What a plugin behind it rewrites would run unseen.

``always`` and ``never`` hold for as long as the gate, over all runs and event loops that it is used
for, until `forget`. A host that wants to keep them for longer stores ``gate.always`` and passes it
to the next one.

Child runs made with `LoopConfig.child` inherit the gate, and with it what was allowed; an
`agent_tool` whose config was made otherwise has the plugins of that config alone, so put the gate
there too.

A run that is resumed does not ask again about a call that has its result, or had begun. What was
approved and had not begun is asked again: an answer is not in the log, only what came of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from copy import copy
from enum import StrEnum
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from clark_agent.errors import ConfigError
from clark_agent.events import AgentEvent, RunIdentified
from clark_agent.plugin import BeforeToolCallContext, Block
from clark_agent.toolkit.ask import NobodyThere, OneAtATime, check_asking, put_to
from clark_agent.types import RunIdentity

__all__ = ["READING_TOOLS", "Approval", "ApprovalGate", "ApprovalRequest", "AskApproval", "Denied"]

logger = logging.getLogger(__name__)

READING_TOOLS: Final = frozenset(
    {
        "ask_user",
        "calculator",
        "current_time",
        "finish",
        "list_files",
        "read_file",
        "search_files",
    }
)
"""The tools of the toolkit that change nothing and send nothing out."""

_SUMMARY_HEAD, _SUMMARY_TAIL = 160, 60


class Approval(StrEnum):
    """What a person says to a call."""

    ONCE = "once"
    """Run this one."""
    ALWAYS = "always"
    """Run this one, and do not ask about this tool again."""
    NO = "no"
    """Do not run this one."""
    NEVER = "never"
    """Do not run this one, and refuse this tool from now on without asking."""


class Denied(Struct, frozen=True):
    """A no with a word to the model, such as what to do instead."""

    reason: str


class ApprovalRequest(Struct, frozen=True):
    """A call that waits for approval."""

    tool_name: str
    arguments: Any
    """As the tool will get them. They are to be looked at, not changed."""
    summary: str
    """The call in one line of printable characters; a long one lacks its middle, and says so."""
    tool_call_id: str
    run: RunIdentity | None = None
    """Whose call it is, if the run has an identity; it tells the runs of sub-agents apart."""


AskApproval: TypeAlias = Callable[
    [ApprovalRequest], Awaitable[Approval | Denied] | Approval | Denied
]
"""Puts a request to a person.

Contract: an ``async def`` ends when it is cancelled; a plain ``def`` runs in a thread and may
block. Whatever it raises, or returns beside an `Approval` or a `Denied`, is a no.
"""


class ApprovalGate:
    """Asks before tools run. See the module.

    ``tools`` names those to ask about; None is all but `READING_TOOLS`. With ``needs_approval`` the
    gate asks only about those of their calls for which it is true; if it raises, it asks.
    ``always`` names tools that are approved from the start. ``timeout`` is how many seconds a
    person has for an answer; the ``hook_timeout`` of the config counts too. Without ``ask`` there
    is nobody, and what needs approval is refused.
    """

    name = "approval_gate"
    inheritable_to_child = True
    asks_outside = True
    observes = (RunIdentified,)

    def __init__(
        self,
        ask: AskApproval | None,
        *,
        tools: Iterable[str] | None = None,
        needs_approval: Callable[[BeforeToolCallContext], bool] | None = None,
        always: Iterable[str] = (),
        timeout: float | None = None,
    ) -> None:
        check_asking("ApprovalGate", ask, timeout)
        if needs_approval is not None and not callable(needs_approval):
            raise ConfigError("ApprovalGate: needs_approval must be a function of a call's context")
        for label, names in (("tools", tools), ("always", always)):
            if isinstance(names, str):
                raise ConfigError(f"ApprovalGate: {label} are names of tools: [{names!r}]")
        self._ask = ask
        self._tools = None if tools is None else frozenset(tools)
        self._needs_approval = needs_approval
        self._timeout = timeout
        self._remembered: dict[str, Approval] = dict.fromkeys(always, Approval.ALWAYS)
        self._one_at_a_time = OneAtATime()
        self._run: RunIdentity | None = None

    # --- what was said for good -----------------------------------------------------------------

    @property
    def always(self) -> frozenset[str]:
        """The tools that run without asking."""
        return self._kept(Approval.ALWAYS)

    @property
    def never(self) -> frozenset[str]:
        """The tools that are refused without asking."""
        return self._kept(Approval.NEVER)

    def forget(self, *tools: str) -> None:
        """Ask about these tools again; without names, about all."""
        for tool in tools or tuple(self._remembered):
            self._remembered.pop(tool, None)

    def _kept(self, answer: Approval) -> frozenset[str]:
        kept = self._remembered.copy()
        return frozenset([tool for tool, given in kept.items() if given is answer])

    # --- what plugins have ----------------------------------------------------------------------

    def for_run(self) -> ApprovalGate:
        """The gate for one run: it knows whose calls these are, and shares all that was said."""
        return copy(self)

    def on_event(self, event: AgentEvent) -> None:
        """Learn whose run it is."""
        if isinstance(event, RunIdentified):
            self._run = event.identity

    async def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Block | None:
        """Ask, unless the call needs no approval or the answer is known."""
        name = ctx.tool_call.name
        if not self._must_ask(ctx):
            return None
        if (said := self._remembered.get(name)) is not None:
            return _decision(said)
        if self._ask is None:
            return _blocked("nobody_to_ask", _NOBODY)
        async with self._one_at_a_time.turn():
            if (said := self._remembered.get(name)) is not None:  # while this one waited
                return _decision(said)
            return await self._put(self._ask, ctx)

    def _must_ask(self, ctx: BeforeToolCallContext) -> bool:
        name = ctx.tool_call.name
        if name in READING_TOOLS if self._tools is None else name not in self._tools:
            return False
        if self._needs_approval is None:
            return True
        try:
            return bool(self._needs_approval(ctx))
        except Exception:
            logger.exception("needs_approval failed for a call of %r; it is asked about", name)
            return True

    async def _put(self, ask: AskApproval, ctx: BeforeToolCallContext) -> Block | None:
        call, shown, before = ctx.tool_call, _text(ctx.args), _cancellations()
        request = ApprovalRequest(
            call.name, ctx.args, _summary(call.name, ctx.args), call.id, self._run
        )
        try:
            async with asyncio.timeout(self._timeout):
                answer = _understood(await put_to(ask, request))
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
            self._remembered[call.name] = Approval(answer)
        return _decision(answer)


_INSTEAD = "Go on without it, or say what you need it for."
_NOBODY = f"it needs approval, and there is nobody to ask. {_INSTEAD}"
_CHANGED = "its arguments changed while it waited for approval. Send it again."


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


# --- a call as text ---------------------------------------------------------------------------


def _text(args: Any) -> str:
    """Equal for equal arguments."""
    try:
        return msgspec.json.encode(args, order="deterministic").decode()
    except (TypeError, ValueError, RecursionError):
        return repr(args)


def _summary(name: str, args: Any) -> str:
    """The call in one line: ``repr`` escapes whatever a terminal would not show as it is."""
    if isinstance(args, dict):
        shown = [f"{_label(key)}={value!r}" for key, value in args.items()]
    else:
        shown = [repr(args)]
    text = "".join([_printable(c) for c in f"{name}({', '.join(shown)})"])
    left_out = len(text) - _SUMMARY_HEAD - _SUMMARY_TAIL
    if left_out <= _SUMMARY_TAIL:
        return text
    return f"{text[:_SUMMARY_HEAD]} […{left_out:,} characters…] {text[-_SUMMARY_TAIL:]}"


def _label(key: object) -> str:
    return key if isinstance(key, str) and key.isidentifier() else repr(key)


def _printable(character: str) -> str:
    """For what the ``repr`` of an object of the host's may have left."""
    return character if character.isprintable() else ascii(character)[1:-1]
