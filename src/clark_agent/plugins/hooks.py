"""The hooks of plugins: found, checked and bound when a config is made.

An object without a hook, a misspelt hook and one with the wrong parameters are errors then, not in
the middle of a run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.errors import ConfigError, HookError
from clark_agent.plugins.base import (
    HOOK_OF,
    Capability,
    RestoreContext,
    ToolGateClass,
    ToolGateContext,
    plugin_name,
)
from clark_agent.plugins.large_results import LargeResults
from clark_agent.tools import AgentTool
from clark_agent.tools.repair import close_match

__all__ = [
    "GateHook",
    "Hook",
    "Hooks",
    "ObserverHook",
    "TransformHook",
    "hook_of",
    "observer_hook",
]

logger = logging.getLogger(__name__)

_PARAMETERS = {
    "on_before_tool_call": ("ctx",),
    "on_after_tool_call": ("ctx",),
    "before_request": ("ctx",),
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
    "trace_run": ("run",),
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
    "trace_run",
)


class Hook(Struct, frozen=True):
    """One hook method of one plugin, ready to be called."""

    name: str
    call: Callable[..., Any]
    is_async: bool
    is_interactive: bool = False
    """Whether its decision comes from outside the run."""
    purpose: str | None = None
    """The ``purpose`` of its messages, if it has one."""


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
    """A tool gate with its optional methods. Its attributes are read when they are needed."""

    name: str
    allowlist: Hook
    denial_reason: Hook | None
    suppresses_advisory: Callable[[ToolGateContext], bool] | None
    plugin: Any

    @property
    def priority(self) -> int:
        """In a conflict, the gate with the larger value wins."""
        priority: int = getattr(self.plugin, "conflict_priority", 0)
        return priority

    @property
    def is_advisory(self) -> bool:
        """Whether the gate may be suppressed or ignored."""
        kind = getattr(self.plugin, "tool_gate_class", ToolGateClass.REQUIRED)
        return ToolGateClass(kind) is ToolGateClass.ADVISORY


class Hooks(Struct, frozen=True):
    """The hooks of all plugins, by capability, in the order of registration."""

    plugins: tuple[Any, ...] = ()
    before_tool_call: tuple[Hook, ...] = ()
    after_tool_call: tuple[Hook, ...] = ()
    before_request: tuple[Hook, ...] = ()
    context_transform: tuple[TransformHook, ...] = ()
    event_observer: tuple[ObserverHook, ...] = ()
    steering: tuple[Hook, ...] = ()
    follow_up: tuple[Hook, ...] = ()
    tool_gate: tuple[GateHook, ...] = ()
    tracer: Any = None
    """The plugin with ``trace_run``."""
    large_results: LargeResults | None = None
    """The last plugin that keeps large results."""

    @classmethod
    def of(cls, plugins: Iterable[object]) -> Hooks:
        """Find the hooks of the plugins. Raises `ConfigError` for an invalid plugin."""
        plugins = tuple(plugins)
        for plugin in plugins:
            _check(plugin)
        tracers = [plugin_name(plugin) for plugin in plugins if hasattr(plugin, "trace_run")]
        if len(tracers) > 1:
            raise ConfigError(f"an agent has one tracer, not {len(tracers)}: {', '.join(tracers)}")
        return cls._bind(plugins)

    @classmethod
    def _bind(cls, plugins: tuple[object, ...]) -> Hooks:
        def found(capability: Capability) -> tuple[Hook, ...]:
            hook = HOOK_OF[capability]
            return tuple([hook_of(p, hook) for p in plugins if hasattr(p, hook)])

        return cls(
            plugins=tuple([p for p in plugins if not _only_traces(p)]),
            # A person must approve the call as it will run, so hooks that ask one come last.
            before_tool_call=tuple(
                sorted(found("before_tool_call"), key=lambda hook: hook.is_interactive)
            ),
            after_tool_call=found("after_tool_call"),
            before_request=found("before_request"),
            context_transform=tuple(
                [_transform_hook(p) for p in plugins if hasattr(p, "transform_context")]
            ),
            event_observer=tuple([observer_hook(p) for p in plugins if hasattr(p, "on_event")]),
            steering=found("steering"),
            follow_up=found("follow_up"),
            tool_gate=tuple(
                [_gate_hook(p) for p in plugins if hasattr(p, "next_turn_tool_allowlist")]
            ),
            tracer=next((p for p in plugins if hasattr(p, "trace_run")), None),
            large_results=next((p for p in reversed(plugins) if isinstance(p, LargeResults)), None),
        )

    def check_tools(self, tools: Mapping[str, AgentTool]) -> None:
        """Let the plugins that name tools check those of the config."""
        for plugin in self.plugins:
            if hasattr(plugin, "check_tools"):
                plugin.check_tools(tools)

    def for_run(self) -> Hooks:
        """The hooks for one run: each plugin that keeps state is replaced by a fresh one."""
        if not any(hasattr(plugin, "for_run") for plugin in self.plugins):
            return self
        fresh: list[Any] = []
        try:
            fresh.extend(_fresh(plugin) for plugin in self.plugins)
        except HookError:
            Hooks(tuple(fresh)).end_run()
            raise
        return replace(self._bind(tuple(fresh)), tracer=self.tracer)

    def end_run(self) -> None:
        """Call ``end_run`` of the plugins that have it."""
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
        """Call ``restore`` of the plugins that have it. One that raises stays fresh."""
        for plugin in self.plugins:
            if hasattr(plugin, "restore"):
                try:
                    plugin.restore(ctx)
                except Exception:
                    logger.exception("the plugin %r could not restore its state", plugin)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The labels of the plugins of each capability, in the order of their calls."""
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
            missing = TypeError(f"for_run() returned {fresh!r}, which has no {hook}")
            raise HookError("plugin", name, missing) from missing
    return fresh


def _only_traces(plugin: object) -> bool:
    """Whether it only observes: it is no part of the run, and its log does not name it."""
    return hasattr(plugin, "trace_run") and not any(hasattr(plugin, h) for h in HOOK_OF.values())


def hook_of(plugin: object, method: str) -> Hook:
    """A method of a plugin, ready to be called."""
    call = getattr(plugin, method)
    is_interactive = getattr(plugin, "is_interactive", False) is True
    purpose = getattr(plugin, "purpose", None)
    purpose = purpose if isinstance(purpose, str) else None
    return Hook(plugin_name(plugin), call, _is_async(call), is_interactive, purpose)


def observer_hook(plugin: object) -> ObserverHook:
    """The ``on_event`` of a plugin, with the classes that it wants."""
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
        raise ConfigError(f"{plugin.__name__} is a class; register an instance")
    misspelt = _misspelt(plugin)
    if misspelt is not None:
        raise ConfigError(f"{label} has a method {misspelt[0]!r}; did you mean {misspelt[1]!r}?")
    has_hook = any(hasattr(plugin, hook) for hook in (*HOOK_OF.values(), "trace_run"))
    if not has_hook and not isinstance(plugin, LargeResults):
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
    except ValueError:  # a builtin without a signature cannot be checked
        return
    if method in _SYNC_ONLY and _is_async(call):
        raise ConfigError(f"{label}: {method!r} must be a plain def, not an async def")
