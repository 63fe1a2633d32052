"""The eight hooks of a run, their contexts and their decisions.

A plugin is any object with at least one hook method. One object may have several; it is registered
once, and plugins are called in the order of registration. Hooks may be ``def`` or ``async def``.
The config checks each plugin when it is made: an object without a hook, a misspelt hook and a hook
with the wrong number of parameters are errors then.

Each hook gets one frozen context and returns a decision, or None to decide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from clark_agent._typing import DepsT_co
from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ConfigError
from clark_agent.events import AgentEvent
from clark_agent.messages.tokens import TokenEstimator
from clark_agent.messages.transcript import MessageView
from clark_agent.plugins.large_results import LargeResults
from clark_agent.prices import ModelRef
from clark_agent.steering import SteeringHandle, SteeringReceipt, SteerWhen
from clark_agent.stream import StreamFn
from clark_agent.tools import AgentTool, ToolResult
from clark_agent.types import AgentMessage, AssistantMessage, RunIdentity, ToolCall, Usage
from clark_agent.waiting import Suspend

if TYPE_CHECKING:
    from clark_agent.tracing import RunTrace, TracedRun

__all__ = [
    "AfterToolCall",
    "AfterToolCallContext",
    "AfterToolDecision",
    "Answer",
    "BeforeRequest",
    "BeforeRequestContext",
    "BeforeToolCall",
    "BeforeToolCallContext",
    "BeforeToolDecision",
    "Block",
    "ContextTransform",
    "EarlierCall",
    "EventObserver",
    "FollowUpSource",
    "FunctionPlugin",
    "Plugin",
    "Question",
    "RestoreContext",
    "Rewrite",
    "SteeringSource",
    "Suspend",
    "ToolGate",
    "ToolGateClass",
    "ToolGateContext",
    "Tracer",
    "TransformContext",
    "plugin_name",
    "tools_of",
]

_T = TypeVar("_T")

MaybeAsync: TypeAlias = _T | Awaitable[_T]


# --- contexts and decisions -------------------------------------------------------------------


class BeforeToolCallContext(Struct, Generic[DepsT_co], frozen=True):
    """A call that is about to run: found, allowed and valid."""

    assistant_message: AssistantMessage
    tool_call: ToolCall
    args: Any
    """The arguments as the tool prepared them, with the rewrites of hooks before this one."""
    messages: Sequence[AgentMessage]
    tool: AgentTool | None = None
    """The tool that is about to run."""
    identity: RunIdentity | None = None
    """The identity of the run. A run whose context has none is a fresh root."""
    deps: DepsT_co = None  # type: ignore[assignment]
    """The dependencies of the run."""
    was_allowed: bool = False
    """Whether this plugin has suspended the run for exactly this call, and it was allowed."""


class Block(Struct, frozen=True):
    """Do not run the call. The model gets the reason as an error result."""

    reason: str | None = None
    details: Any = None


class Rewrite(Struct, frozen=True):
    """Run the call with these arguments instead. They are validated like the model's."""

    args: Any


class Answer(Struct, frozen=True):
    """Do not run the call; this is its result."""

    result: ToolResult


BeforeToolDecision: TypeAlias = Block | Rewrite | Answer | Suspend


class AfterToolCallContext(Struct, Generic[DepsT_co], frozen=True, dict=True):
    """A call with its outcome, whether it ran or not."""

    assistant_message: AssistantMessage
    tool_call: ToolCall
    args: Any
    result: ToolResult
    is_error: bool
    messages: Sequence[AgentMessage]
    tool: AgentTool | None = None
    """The tool that was called; None if no tool has that name."""
    deps: DepsT_co = None  # type: ignore[assignment]
    """The dependencies of the run."""

    @property
    def exception(self) -> Exception | None:
        """What the tool raised, if it did."""
        raised: Exception | None = self.__dict__.get("_exception")
        return raised


class AfterToolDecision(Struct, frozen=True):
    """What to change in the outcome. First the result is replaced, then the flags are set."""

    result: ToolResult | None = None
    mark_error: bool | None = None
    terminate: bool | None = None


class TransformContext(Struct, Generic[DepsT_co], frozen=True):
    """The context of a context transform."""

    signal: CancellationToken
    model_id: str
    """Empty if the host has not set it."""
    iteration: int
    """The number of the turn in this run, from 0."""
    last_provider_usage: Usage | None
    """The newest usage that a provider reported in this transcript."""
    estimator: TokenEstimator
    estimated_tokens: int
    """The estimate for the transcript, before any transform. Maintained by the loop."""
    tools: Mapping[str, AgentTool]
    """The tools of the run by name."""
    deps: DepsT_co = None  # type: ignore[assignment]
    """The dependencies of the run."""


class Question(Struct, frozen=True, kw_only=True):
    """A request to a model beside the turn; see `BeforeRequestContext.ask_model`."""

    prompt: str
    messages: Sequence[AgentMessage] | None = None
    system_prompt: str | None = None
    stream: StreamFn | None = None
    max_output_tokens: int | None = None
    max_seconds: float = 120.0

    @property
    def is_continued(self) -> bool:
        """Whether it continues the conversation, and is not a request of its own."""
        return self.system_prompt is None and self.stream is None


class BeforeRequestContext(Struct, Generic[DepsT_co], frozen=True, kw_only=True):
    """The context of a hook before a request."""

    signal: CancellationToken
    run_id: str
    model: ModelRef
    context_window: int | None
    """How many tokens the model can take, if the transport says so (``context_window``)."""
    iteration: int
    """The number of the turn in this run, from 0."""
    messages: MessageView
    """The transcript, before any transform."""
    system_prompt: str
    estimator: TokenEstimator
    tools: Mapping[str, AgentTool]
    """The tools of the run by name."""
    overflow: str | None = None
    """None before the first request of a turn. If a provider has rejected a request of this turn as
    too large: what it said.
    """
    has_requested: bool = False
    """Whether this process has made a request in the run that `ask_model` can continue."""
    asker: Callable[[Question], Awaitable[AssistantMessage]]
    """What `ask_model` calls."""
    transformer: Callable[[Sequence[AgentMessage]], Awaitable[Sequence[AgentMessage]]] | None = None
    """What `transformed` calls. None if no other plugin edits the context."""
    deps: DepsT_co = None  # type: ignore[assignment]
    """The dependencies of the run."""

    async def transformed(self, messages: Sequence[AgentMessage]) -> Sequence[AgentMessage]:
        """Return what the ``transform_context`` of the other plugins makes of these messages.

        For messages that are given to `ask_model`: so it does not get what a plugin removes from
        the requests of the run. The plugins are new instances (``for_run``), and there are no
        events.
        """
        return messages if self.transformer is None else await self.transformer(messages)

    async def ask_model(
        self,
        prompt: str,
        *,
        messages: Sequence[AgentMessage] | None = None,
        system_prompt: str | None = None,
        stream: StreamFn | None = None,
        max_output_tokens: int | None = None,
        max_seconds: float = 120.0,
    ) -> AssistantMessage:
        """Ask a model beside the turn. Neither the question nor the answer enters the transcript.

        By default it is the model of the run, and the question continues its newest request: the
        same system prompt, tools and settings, the same messages, what came since, and last the
        ``prompt``. A provider can read all but the end of it from its cache. If there was no
        request in this process, the transcript takes its place. With ``messages``, they come
        before the prompt instead. A tool call is not required, and none is run.

        With ``system_prompt`` or ``stream`` (another model) it is a request of its own, without
        tools, with ``messages`` (none by default) and the prompt.

        The tokens count for the run and its budgets. The answer is recorded, so a replay needs no
        model, and a resumed run does not ask again. ``hook_timeout`` does not count meanwhile:
        ``max_seconds`` does.

        Raises `clark_agent.errors.StreamError` if the model does not answer, and ``TimeoutError``.
        """
        return await self.asker(
            Question(
                prompt=prompt,
                messages=messages,
                system_prompt=system_prompt,
                stream=stream,
                max_output_tokens=max_output_tokens,
                max_seconds=max_seconds,
            )
        )


class EarlierCall(Struct, frozen=True):
    """A call that ended in another process."""

    tool_call: ToolCall
    result: ToolResult
    decisions: Sequence[Mapping[str, Any]] = ()
    """Which plugins changed the result, and how."""


class RestoreContext(Struct, Generic[DepsT_co], frozen=True):
    """What another process has done in the run that is resumed."""

    turns: int
    """How many turns are over."""
    messages: Sequence[AgentMessage]
    """What the run has added to the transcript so far."""
    calls: Sequence[EarlierCall]
    """All calls that have their result, in the order in which they ended."""
    purposes: Sequence[str]
    """Why messages were added that neither the model nor a tool gave, in order: ``steering``,
    ``follow_up``, ``budget``, ``nudge``, ``final_answer``, or the ``purpose`` of the plugin that
    gave them."""
    requests: Sequence[MessageView]
    """The transcript as it was before each request, oldest first, and before any transform."""
    estimator: TokenEstimator
    tools: Mapping[str, AgentTool]
    """The tools of the run by name."""
    deps: DepsT_co = None  # type: ignore[assignment]
    """The dependencies of the run."""


class ToolGateContext(Struct, Generic[DepsT_co], frozen=True):
    """The context of a tool gate."""

    iteration: int
    messages: Sequence[AgentMessage]
    """What the model will see, after all transforms."""
    conversation_id: str | None
    available_tool_names: Sequence[str]
    """All registered tools, in order."""
    deps: DepsT_co = None  # type: ignore[assignment]
    """The dependencies of the run."""


class ToolGateClass(StrEnum):
    """Whether a gate must be obeyed."""

    REQUIRED = "required"
    """A boundary. If it fails, the run fails."""
    ADVISORY = "advisory"
    """Guidance. Another gate can suppress it; if it fails, it is ignored."""


# --- the capabilities -------------------------------------------------------------------------


class BeforeToolCall(Protocol):
    """Contract: quick, without side effects. If it raises, the call is blocked."""

    def on_before_tool_call(
        self, ctx: BeforeToolCallContext, /
    ) -> MaybeAsync[BeforeToolDecision | None]:
        """Allow (None), block, rewrite or answer a call, or suspend the run until it is decided."""
        ...


class AfterToolCall(Protocol):
    """Contract: quick, without side effects. If it raises, the result becomes an error."""

    def on_after_tool_call(
        self, ctx: AfterToolCallContext, /
    ) -> MaybeAsync[AfterToolDecision | None]:
        """Leave (None) or change the outcome of a call."""
        ...


class BeforeRequest(Protocol):
    """Contract: returns nothing when there is nothing to add. Failure counts as nothing.

    It is called once before the first request of a turn, and again after a provider has rejected
    a request as too large (see `BeforeRequestContext.overflow`).
    """

    def before_request(
        self, ctx: BeforeRequestContext, /
    ) -> MaybeAsync[Iterable[AgentMessage] | None]:
        """Messages to append to the transcript: of the user, of the system, or of the host."""
        ...


class ContextTransform(Protocol):
    """Contract: returns what the model should see. If it raises, the messages stay unchanged.

    A plugin may also have ``should_transform(messages, ctx) -> bool``, a quick ``def`` that saves
    the call (and its event) when there is nothing to do.
    """

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext, /
    ) -> MaybeAsync[Sequence[AgentMessage]]:
        """The messages for the next request. Return the given ones when nothing changes."""
        ...


class EventObserver(Protocol):
    """Contract: only observes. If it raises, the error is logged and the run continues."""

    def on_event(self, event: AgentEvent, /) -> MaybeAsync[None]:
        """Handle an event."""
        ...


class SteeringSource(Protocol):
    """Contract: returns at once, with nothing when there is nothing. Failure counts as nothing."""

    def next_steering_messages(self) -> MaybeAsync[Iterable[AgentMessage]]:
        """Messages for the model. Called between batches."""
        ...


class FollowUpSource(Protocol):
    """Contract: returns at once, with nothing when there is nothing. Failure counts as nothing."""

    def next_follow_up_messages(self) -> MaybeAsync[Iterable[AgentMessage]]:
        """Messages that start the agent again. Called when it has stopped by itself."""
        ...


class ToolGate(Protocol):
    """Contract: a pure function of its context. A required gate that raises ends the run.

    A plugin may also have ``denial_reason(tool_name, ctx) -> str | None`` (why a call to a hidden
    tool is refused), ``suppresses_advisory_gates(ctx) -> bool``, and the attributes
    ``conflict_priority`` (0) and ``tool_gate_class`` (required).
    """

    def next_turn_tool_allowlist(
        self, ctx: ToolGateContext, /
    ) -> MaybeAsync[AbstractSet[str] | None]:
        """The names of the tools for exactly the next model call; None allows all."""
        ...


class Tracer(Protocol):
    """Follows runs from outside; see `clark_agent.tracing`. Contract: what it raises is logged."""

    def trace_run(self, run: TracedRun, /) -> RunTrace | None:
        """The object that follows this run, which starts; None: none does."""
        ...


class SteeringChannel(Protocol):
    """A steering source that can also interrupt a run, and whose messages have receipts.

    A plugin is one if it has `listen`; see `clark_agent.plugins.ChannelSteering`.
    """

    handle: SteeringHandle

    @property
    def taken(self) -> tuple[SteeringReceipt, ...]:
        """The messages that were taken from the queue and are not settled yet."""
        ...

    @property
    def urgency(self) -> SteerWhen | None:
        """How soon the most urgent queued message wants to be delivered."""
        ...

    def waiting(self) -> list[SteeringReceipt]:
        """The messages that were sent and not taken yet."""
        ...

    def watch(self, accepted: Callable[[SteeringReceipt], None]) -> None:
        """Register ``accepted``, called on any thread with each message that is sent."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Register ``wake``, called on any thread when an urgent message is sent."""
        ...

    def delivered(self, turn: int) -> None:
        """Settle all taken messages: they are in the transcript, before the answer of this turn."""
        ...

    def promoted(self) -> None:
        """Treat the taken follow-ups like steering, for the next turn."""
        ...

    def appended(self) -> None:
        """Settle the taken follow-ups: they are in the transcript, and no turn follows."""
        ...

    def close(self, *, is_kept: bool = False) -> list[AgentMessage]:
        """Stop listening. Return the accepted messages that will not be delivered; ``is_kept`` if
        the run gets them when it is resumed.
        """
        ...

    def detached(self) -> SteeringChannel:
        """A channel like this one that shares nothing with it. For a replay."""
        ...


def channels_among(plugins: Iterable[object]) -> tuple[SteeringChannel, ...]:
    """The plugins that can interrupt a run."""
    found: list[Any] = [plugin for plugin in plugins if hasattr(plugin, "listen")]
    return tuple(found)


Capability: TypeAlias = Literal[
    "before_tool_call",
    "after_tool_call",
    "before_request",
    "context_transform",
    "event_observer",
    "steering",
    "follow_up",
    "tool_gate",
]

HOOK_OF: dict[Capability, str] = {
    "before_tool_call": "on_before_tool_call",
    "after_tool_call": "on_after_tool_call",
    "before_request": "before_request",
    "context_transform": "transform_context",
    "event_observer": "on_event",
    "steering": "next_steering_messages",
    "follow_up": "next_follow_up_messages",
    "tool_gate": "next_turn_tool_allowlist",
}


class FunctionPlugin:
    """A plain function as a plugin with one hook."""

    def __init__(
        self,
        capability: Capability,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        inheritable_to_child: bool = False,
    ) -> None:
        if capability not in HOOK_OF:
            raise ConfigError(f"unknown capability {capability!r}; use one of {', '.join(HOOK_OF)}")
        if not callable(function):
            raise ConfigError(f"{capability} needs a function, not {function!r}")
        label = getattr(function, "__name__", type(function).__name__)
        self.name = name or (capability if label == "<lambda>" else label)
        self.inheritable_to_child = inheritable_to_child
        setattr(self, HOOK_OF[capability], function)

    def __repr__(self) -> str:
        return f"<FunctionPlugin {self.name}>"


Plugin: TypeAlias = (
    BeforeToolCall
    | AfterToolCall
    | BeforeRequest
    | ContextTransform
    | EventObserver
    | SteeringSource
    | FollowUpSource
    | ToolGate
    | Tracer
    | LargeResults
    | FunctionPlugin
)
"""Anything with at least one of the hooks, a tracer, or a `LargeResults`.

A plugin may also have ``name`` (a label; the class's name by default), ``inheritable_to_child``
(False) and ``for_run()``, which returns the object to use for one run: a plugin that keeps state
returns a fresh one, so that one config serves many runs at once. That object may have
``end_run()``, which is called once when the run is over, however it ended. An observer may list
the event classes it wants as ``observes``; the others then cost nothing. A plugin
that names tools may have ``check_tools(tools)``, which gets the tools of each config that is made
with it, by name, and raises `ConfigError` if they do not fit. A plugin may bring ``tools``, a
list of `AgentTool` objects: each config with the plugin offers them to the model, behind its own.
They are read from the plugin that was registered, not from the object of one run. A plugin
whose ``on_before_tool_call`` asks a person, or anything else outside of the run, sets
``is_interactive = True``: it is called after the others, and a replay takes its decisions from the
log.

When a run is resumed, ``restore(ctx)`` of a plugin is called once, before anything else, with what
has happened so far. A plugin that adds messages may say why with ``purpose``, a word that the run
log records with each of them. (``wrap_up`` means that the model was asked to finish: a run that
then ends by itself ends as ``wrapped_up``.) A plugin with ``recover`` (see
`clark_agent.recovery.ContextOverflowRecovery`) is the recovery of a config that has no other. A
plugin with ``trace_run`` is a `Tracer`.
"""


def tools_of(plugin: object) -> tuple[AgentTool, ...]:
    """The tools that a plugin brings. An attribute ``tools`` with anything else, such as names, is
    the plugin's own affair. Raises `ConfigError` for functions and classes among the tools.
    """
    tools: Any = getattr(plugin, "tools", ())
    if not isinstance(tools, (list, tuple)) or not any(map(callable, map(_execute_of, tools))):
        return ()
    for tool in tools:
        if not isinstance(tool, AgentTool):
            raise ConfigError(
                f"the plugin {plugin_name(plugin)!r}: its tools must be AgentTool objects, and "
                f"{tool!r} is none; for a function, use tool(function)"
            )
    return tuple(tools)


def _execute_of(tool: object) -> object:
    """What makes it a tool, or nearly one."""
    return tool if callable(tool) else getattr(tool, "execute", None)


def plugin_name(plugin: object) -> str:
    """The label of a plugin: its ``name``, or its class's name in snake case."""
    name = getattr(plugin, "name", None)
    if isinstance(name, str) and name:
        return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(plugin).__name__).lower()
