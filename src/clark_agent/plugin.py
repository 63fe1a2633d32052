"""The seven places where a plugin joins a run, and how they are found.

A plugin is any object with at least one hook method. One object may have several, is registered
once, and is asked in the order of registration. Hooks may be ``def`` or ``async def``; which of the
two is settled when the config is made, and so is whether the object makes sense at all: an object
without a hook, a misspelt hook and one with the wrong number of parameters are errors then.

Each hook gets one frozen context and returns a decision, or None for "nothing from me".
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ConfigError, HookError
from clark_agent.events import AgentEvent
from clark_agent.messages.tokens import TokenEstimator
from clark_agent.messages.transcript import MessageView
from clark_agent.steering import SteeringHandle, SteeringReceipt, SteerWhen
from clark_agent.tools import AgentTool, ToolResult
from clark_agent.tools.repair import close_match
from clark_agent.types import AgentMessage, AssistantMessage, RunIdentity, ToolCall, Usage

__all__ = [
    "AfterToolCall",
    "AfterToolCallContext",
    "AfterToolDecision",
    "Answer",
    "BeforeToolCall",
    "BeforeToolCallContext",
    "BeforeToolDecision",
    "Block",
    "ContextTransform",
    "EarlierCall",
    "EventObserver",
    "FollowUpSource",
    "FunctionPlugin",
    "Hooks",
    "Plugin",
    "RestoreContext",
    "Rewrite",
    "SteeringSource",
    "ToolGate",
    "ToolGateClass",
    "ToolGateContext",
    "TransformContext",
    "plugin_name",
]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MaybeAsync: TypeAlias = _T | Awaitable[_T]


# --- contexts and decisions -------------------------------------------------------------------


class BeforeToolCallContext(Struct, frozen=True):
    """A call that is about to run: found, allowed and valid."""

    assistant_message: AssistantMessage
    tool_call: ToolCall
    args: Any
    """The arguments as the tool prepared them, with the rewrites of hooks before this one."""
    messages: Sequence[AgentMessage]
    tool: AgentTool | None = None
    """The tool that is about to run."""
    identity: RunIdentity | None = None
    """Whose run it is. A run whose context has none is a fresh root."""


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


BeforeToolDecision: TypeAlias = Block | Rewrite | Answer


class AfterToolCallContext(Struct, frozen=True, dict=True):
    """A call with its outcome, whether it ran or not."""

    assistant_message: AssistantMessage
    tool_call: ToolCall
    args: Any
    result: ToolResult
    is_error: bool
    messages: Sequence[AgentMessage]
    tool: AgentTool | None = None
    """The tool that was called; None when there is none of that name."""

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


class TransformContext(Struct, frozen=True):
    """What a context transform may want to know."""

    signal: CancellationToken
    model_id: str
    """Empty when the host has not said."""
    iteration: int
    """The number of the turn in this run, from 0."""
    last_provider_usage: Usage | None
    """The newest usage that a provider reported in this transcript."""
    estimator: TokenEstimator
    estimated_tokens: int
    """What the transcript costs by the estimator, before any transform. Kept by the loop."""
    tools: Mapping[str, AgentTool]
    """The tools of the run by name."""


class EarlierCall(Struct, frozen=True):
    """A call that ended in another process."""

    tool_call: ToolCall
    result: ToolResult
    decisions: Sequence[Mapping[str, Any]] = ()
    """Which plugins had a hand in the result, and how."""


class RestoreContext(Struct, frozen=True):
    """What a plugin may want to know of a run that another process has begun."""

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


class ToolGateContext(Struct, frozen=True):
    """What a tool gate may want to know."""

    iteration: int
    messages: Sequence[AgentMessage]
    """What the model will see, after all transforms."""
    conversation_id: str | None
    available_tool_names: Sequence[str]
    """All registered tools, in order."""


class ToolGateClass(StrEnum):
    """Whether a gate must be heeded."""

    REQUIRED = "required"
    """A boundary. If it fails the run fails."""
    ADVISORY = "advisory"
    """Guidance. A gate that suppresses advisory ones can silence it; if it fails it is ignored."""


# --- the capabilities -------------------------------------------------------------------------


class BeforeToolCall(Protocol):
    """Contract: quick, without side effects. If it raises the call is blocked."""

    def on_before_tool_call(
        self, ctx: BeforeToolCallContext, /
    ) -> MaybeAsync[BeforeToolDecision | None]:
        """Allow (None), block, rewrite or answer a call."""
        ...


class AfterToolCall(Protocol):
    """Contract: quick, without side effects. If it raises the result becomes an error."""

    def on_after_tool_call(
        self, ctx: AfterToolCallContext, /
    ) -> MaybeAsync[AfterToolDecision | None]:
        """Leave (None) or change the outcome of a call."""
        ...


class ContextTransform(Protocol):
    """Contract: returns what the model should see; if it raises the messages stay as they are.

    A plugin may also have ``should_transform(messages, ctx) -> bool``, a quick ``def`` that saves
    the call (and its event) when there is nothing to do.
    """

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext, /
    ) -> MaybeAsync[Sequence[AgentMessage]]:
        """The messages for the next request. Return the given ones when nothing changes."""
        ...


class EventObserver(Protocol):
    """Contract: observes. If it raises that is logged and the run goes on."""

    def on_event(self, event: AgentEvent, /) -> MaybeAsync[None]:
        """Take note of an event."""
        ...


class SteeringSource(Protocol):
    """Contract: returns at once, with nothing when there is nothing. Failure counts as nothing."""

    def next_steering_messages(self) -> MaybeAsync[Iterable[AgentMessage]]:
        """Messages to put before the model, asked between batches."""
        ...


class FollowUpSource(Protocol):
    """Contract: returns at once, with nothing when there is nothing. Failure counts as nothing."""

    def next_follow_up_messages(self) -> MaybeAsync[Iterable[AgentMessage]]:
        """Messages that start the agent again, asked when it has stopped by itself."""
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
        """The names of the tools for exactly the next call, or None not to narrow them."""
        ...


class SteeringChannel(Protocol):
    """A steering source that can also interrupt a run, and whose messages have receipts.

    A plugin is one if it has `listen`; see `clark_agent.plugins.ChannelSteering`.
    """

    handle: SteeringHandle

    @property
    def taken(self) -> tuple[SteeringReceipt, ...]:
        """What was taken from the queue and is not settled yet."""
        ...

    @property
    def urgency(self) -> SteerWhen | None:
        """How soon the most pressing message that waits wants to be heard."""
        ...

    def waiting(self) -> list[SteeringReceipt]:
        """What was sent and not taken yet."""
        ...

    def watch(self, accepted: Callable[[SteeringReceipt], None]) -> None:
        """Have ``accepted`` called, on any thread, with each message that is sent."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on any thread, when a message is sent that cannot wait."""
        ...

    def delivered(self, turn: int) -> None:
        """All that was taken is now in the transcript, before the answer of this turn."""
        ...

    def promoted(self) -> None:
        """The follow-ups that were taken wait for the next turn, like steering."""
        ...

    def appended(self) -> None:
        """The follow-ups that were taken are in the transcript, and no turn comes after them."""
        ...

    def close(self) -> list[AgentMessage]:
        """Listen no more; what was accepted and will not be delivered."""
        ...

    def detached(self) -> SteeringChannel:
        """A channel like this one that shares nothing with it. For a replay."""
        ...


def channels_among(plugins: Iterable[object]) -> tuple[SteeringChannel, ...]:
    """Those of the plugins that can interrupt a run."""
    found: list[Any] = [plugin for plugin in plugins if hasattr(plugin, "listen")]
    return tuple(found)


Capability: TypeAlias = Literal[
    "before_tool_call",
    "after_tool_call",
    "context_transform",
    "event_observer",
    "steering",
    "follow_up",
    "tool_gate",
]

HOOK_OF: dict[Capability, str] = {
    "before_tool_call": "on_before_tool_call",
    "after_tool_call": "on_after_tool_call",
    "context_transform": "transform_context",
    "event_observer": "on_event",
    "steering": "next_steering_messages",
    "follow_up": "next_follow_up_messages",
    "tool_gate": "next_turn_tool_allowlist",
}

_PARAMETERS = {
    "on_before_tool_call": ("ctx",),
    "on_after_tool_call": ("ctx",),
    "transform_context": ("messages", "ctx"),
    "on_event": ("event",),
    "next_steering_messages": (),
    "next_follow_up_messages": (),
    "next_turn_tool_allowlist": ("ctx",),
    "should_transform": ("messages", "ctx"),
    "denial_reason": ("tool_name", "ctx"),
    "suppresses_advisory_gates": ("ctx",),
    "check_tools": ("tools",),
    "for_run": (),
    "end_run": (),
    "restore": ("ctx",),
    "recover": ("messages", "ctx"),
}

_BELONGS_TO = {
    "should_transform": "transform_context",
    "denial_reason": "next_turn_tool_allowlist",
    "suppresses_advisory_gates": "next_turn_tool_allowlist",
}

_SYNC_ONLY = (
    "should_transform",
    "suppresses_advisory_gates",
    "check_tools",
    "for_run",
    "end_run",
    "restore",
)


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
            raise ConfigError(
                f"there is no capability {capability!r}; choose one of {', '.join(HOOK_OF)}"
            )
        if not callable(function):
            raise ConfigError(f"a function is needed for {capability}, not {function!r}")
        label = getattr(function, "__name__", type(function).__name__)
        self.name = name or (capability if label == "<lambda>" else label)
        self.inheritable_to_child = inheritable_to_child
        setattr(self, HOOK_OF[capability], function)

    def __repr__(self) -> str:
        return f"<FunctionPlugin {self.name}>"


Plugin: TypeAlias = (
    BeforeToolCall
    | AfterToolCall
    | ContextTransform
    | EventObserver
    | SteeringSource
    | FollowUpSource
    | ToolGate
    | FunctionPlugin
)
"""Anything with at least one of the hooks.

Besides, a plugin may have ``name`` (a label; the class's name by default), ``inheritable_to_child``
(False) and ``for_run()``, which gives the object to use for one run: a plugin that keeps state
returns a fresh one, so that one config serves many runs at once. That object may have
``end_run()``, which is called once when the run is over, however it ended. An observer may name
the event classes it wants as ``observes``; the others then cost it, and the run, nothing. A plugin
that names tools may have ``check_tools(tools)``, which gets the tools of each config that is made
with it, by name, and raises `ConfigError` for those it does not like. A plugin
whose ``on_before_tool_call`` asks a person, or anything else outside of the run, says so with
``asks_outside = True``: it is asked behind the others, and a replay takes its decisions from the
log.

When a run is resumed, a plugin with ``restore(ctx)`` is told once, before anything else, what has
happened so far; one that steers may say why with ``purpose``, a word that the run log keeps for
each of its messages. (``wrap_up`` means that the model was told to come to an end: a run that then
ends by itself ends as ``wrapped_up``.) A plugin with ``recover`` (see
`clark_agent.recovery.ContextOverflowRecovery`) is the recovery of a config that has no other.
"""


def plugin_name(plugin: object) -> str:
    """The label of a plugin: its ``name``, or its class's name in snake case."""
    name = getattr(plugin, "name", None)
    if isinstance(name, str) and name:
        return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(plugin).__name__).lower()


# --- hooks, found ------------------------------------------------------------------------------


class Hook(Struct, frozen=True):
    """One hook method of one plugin, ready to be called."""

    name: str
    call: Callable[..., Any]
    is_async: bool
    asks_outside: bool = False
    """Whether its decision comes from outside of the run."""
    purpose: str | None = None
    """Why it gives messages, if it says so."""


class ObserverHook(Struct, frozen=True):
    """An event observer with the event classes that it wants; None: all."""

    name: str
    call: Callable[..., Any]
    is_async: bool
    observes: tuple[type, ...] | None


class TransformHook(Struct, frozen=True):
    """A context transform with its pre-check."""

    name: str
    transform: Hook
    should_transform: Callable[..., bool] | None


class GateHook(Struct, frozen=True):
    """A tool gate with what goes with it. Its attributes are read when they are needed."""

    name: str
    allowlist: Hook
    denial_reason: Hook | None
    suppresses_advisory: Callable[[ToolGateContext], bool] | None
    plugin: Any

    @property
    def priority(self) -> int:
        """Which gate wins a conflict; the larger."""
        priority: int = getattr(self.plugin, "conflict_priority", 0)
        return priority

    @property
    def is_advisory(self) -> bool:
        """Whether the gate may be silenced or ignored."""
        kind = getattr(self.plugin, "tool_gate_class", ToolGateClass.REQUIRED)
        return ToolGateClass(kind) is ToolGateClass.ADVISORY


class Hooks(Struct, frozen=True):
    """The hooks of all plugins, by capability, in the order of registration."""

    plugins: tuple[Any, ...] = ()
    before_tool_call: tuple[Hook, ...] = ()
    after_tool_call: tuple[Hook, ...] = ()
    context_transform: tuple[TransformHook, ...] = ()
    event_observer: tuple[ObserverHook, ...] = ()
    steering: tuple[Hook, ...] = ()
    follow_up: tuple[Hook, ...] = ()
    tool_gate: tuple[GateHook, ...] = ()

    @classmethod
    def of(cls, plugins: Iterable[object]) -> Hooks:
        """Find the hooks of the plugins. Raises `ConfigError` for one that makes no sense."""
        plugins = tuple(plugins)
        for plugin in plugins:
            _check(plugin)
        return cls._bind(plugins)

    @classmethod
    def _bind(cls, plugins: tuple[object, ...]) -> Hooks:
        def found(capability: Capability) -> tuple[Hook, ...]:
            hook = HOOK_OF[capability]
            return tuple([hook_of(p, hook) for p in plugins if hasattr(p, hook)])

        return cls(
            plugins=plugins,
            # A person must approve the call as it will run, so hooks that ask one come last.
            before_tool_call=tuple(
                sorted(found("before_tool_call"), key=lambda hook: hook.asks_outside)
            ),
            after_tool_call=found("after_tool_call"),
            context_transform=tuple(
                [_transform_hook(p) for p in plugins if hasattr(p, "transform_context")]
            ),
            event_observer=tuple([_observer_hook(p) for p in plugins if hasattr(p, "on_event")]),
            steering=found("steering"),
            follow_up=found("follow_up"),
            tool_gate=tuple(
                [_gate_hook(p) for p in plugins if hasattr(p, "next_turn_tool_allowlist")]
            ),
        )

    def check_tools(self, tools: Mapping[str, AgentTool]) -> None:
        """Let the plugins that name tools look at those of the config."""
        for plugin in self.plugins:
            if hasattr(plugin, "check_tools"):
                plugin.check_tools(tools)

    def for_run(self) -> Hooks:
        """The hooks for one run: each plugin that keeps state stands in with a fresh one."""
        if not any(hasattr(plugin, "for_run") for plugin in self.plugins):
            return self
        fresh: list[Any] = []
        try:
            fresh.extend(_fresh(plugin) for plugin in self.plugins)
        except HookError:
            Hooks(tuple(fresh)).end_run()
            raise
        return self._bind(tuple(fresh))

    def end_run(self) -> None:
        """Tell the plugins that want to know that the run is over."""
        for plugin in self.plugins:
            if hasattr(plugin, "end_run"):
                try:
                    plugin.end_run()
                except Exception:
                    logger.exception("the plugin %r failed at the end of the run", plugin)

    @property
    def recovery(self) -> Any:
        """The first plugin that can shrink a transcript; None if there is none."""
        return next((plugin for plugin in self.plugins if hasattr(plugin, "recover")), None)

    def restore(self, ctx: RestoreContext) -> None:
        """Let the plugins know what another process has done. One that fails stays fresh."""
        for plugin in self.plugins:
            if hasattr(plugin, "restore"):
                try:
                    plugin.restore(ctx)
                except Exception:
                    logger.exception("the plugin %r could not restore its state", plugin)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The labels of the plugins behind each capability, in the order of their calls."""
        return {
            capability: tuple([hook.name for hook in getattr(self, capability)])
            for capability in HOOK_OF
        }


def _fresh(plugin: Any) -> Any:
    """The plugin for one run. It must have all hooks of the one that was registered."""
    if not hasattr(plugin, "for_run"):
        return plugin
    name = plugin_name(plugin)
    try:
        fresh = plugin.for_run()
    except Exception as error:
        raise HookError("plugin", name, error) from error
    for hook in HOOK_OF.values():
        if hasattr(plugin, hook) and not hasattr(fresh, hook):
            missing = TypeError(f"for_run() gave {fresh!r}, which has no {hook}")
            raise HookError("plugin", name, missing) from missing
    return fresh


def hook_of(plugin: object, method: str) -> Hook:
    """A method of a plugin, ready to be called."""
    call = getattr(plugin, method)
    asks_outside = getattr(plugin, "asks_outside", False) is True
    purpose = getattr(plugin, "purpose", None)
    purpose = purpose if isinstance(purpose, str) else None
    return Hook(plugin_name(plugin), call, _is_async(call), asks_outside, purpose)


def _observer_hook(plugin: object) -> ObserverHook:
    hook = hook_of(plugin, "on_event")
    observes = getattr(plugin, "observes", None)
    return ObserverHook(hook.name, hook.call, hook.is_async, observes and tuple(observes))


def _transform_hook(plugin: object) -> TransformHook:
    should = getattr(plugin, "should_transform", None)
    return TransformHook(plugin_name(plugin), hook_of(plugin, "transform_context"), should)


def _gate_hook(plugin: object) -> GateHook:
    return GateHook(
        plugin_name(plugin),
        hook_of(plugin, "next_turn_tool_allowlist"),
        hook_of(plugin, "denial_reason") if hasattr(plugin, "denial_reason") else None,
        getattr(plugin, "suppresses_advisory_gates", None),
        plugin,
    )


def _is_async(call: Callable[..., Any]) -> bool:
    while isinstance(call, partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )


# --- checks, made once ------------------------------------------------------------------------


def _check(plugin: object) -> None:
    label = f"the plugin {plugin_name(plugin)!r}"
    if isinstance(plugin, type):
        raise ConfigError(f"{plugin.__name__} is a class; register an instance of it")
    misspelt = _misspelt(plugin)
    if misspelt is not None:
        raise ConfigError(f"{label} has a method {misspelt[0]!r}; did you mean {misspelt[1]!r}?")
    if not any(hasattr(plugin, hook) for hook in HOOK_OF.values()):
        raise ConfigError(f"{label} has no hook; it needs one of {', '.join(HOOK_OF.values())}")
    for method, owner in _BELONGS_TO.items():
        if hasattr(plugin, method) and not hasattr(plugin, owner):
            raise ConfigError(f"{label} has {method!r}, which does nothing without {owner!r}")
    for method, parameters in _PARAMETERS.items():
        if hasattr(plugin, method):
            _check_method(label, method, getattr(plugin, method), parameters)
    _check_attributes(label, plugin)


def _check_attributes(label: str, plugin: object) -> None:
    kind = getattr(plugin, "tool_gate_class", ToolGateClass.REQUIRED)
    if kind not in list(ToolGateClass):
        choices = " or ".join(repr(str(choice)) for choice in ToolGateClass)
        raise ConfigError(f"{label}: tool_gate_class must be {choices}, not {kind!r}")
    observes = getattr(plugin, "observes", None)
    if observes is not None and not (
        isinstance(observes, (tuple, list, set, frozenset))
        and all(isinstance(event_class, type) for event_class in observes)
    ):
        raise ConfigError(f"{label}: observes must be a tuple of event classes, not {observes!r}")


def _misspelt(plugin: object) -> tuple[str, str] | None:
    for name in dir(plugin):
        if name.startswith("_") or name in _PARAMETERS:
            continue
        meant = close_match(name, _PARAMETERS, cutoff=0.85)
        if meant and not hasattr(plugin, meant) and callable(getattr(plugin, name, None)):
            return name, meant
    return None


def _check_method(label: str, method: str, call: Any, parameters: Sequence[str]) -> None:
    if not callable(call):
        raise ConfigError(f"{label}: {method!r} must be a method, not {call!r}")
    try:
        inspect.signature(call).bind(*parameters)
    except TypeError:
        wanted = f"{method}({', '.join(('self', *parameters))})"
        raise ConfigError(
            f"{label}: {method}{inspect.signature(call)} cannot be called; declare {wanted}"
        ) from None
    except ValueError:  # a builtin without a signature; it is taken at its word
        return
    if method in _SYNC_ONLY and _is_async(call):
        raise ConfigError(f"{label}: {method!r} is asked in passing and must be a plain def")
