"""LoopConfig: everything that a run is assembled from, checked once and never changed.

One config serves any number of runs, also at the same time. A run keeps its state to itself;
plugins with state give each run a fresh object (see `clark_agent.plugins.base.Plugin`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from functools import cached_property
from inspect import iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any, Protocol, Self

from msgspec import Struct, StructMeta, field
from msgspec.structs import force_setattr, replace

from clark_agent.audience import Audience
from clark_agent.budget import Budget
from clark_agent.clock import Clock, SystemClock
from clark_agent.effects import Effects
from clark_agent.errors import ConfigError
from clark_agent.events import AgentEvent, EventSink
from clark_agent.messages.tokens import JsonSizeEstimator, TokenEstimator
from clark_agent.output import Output, OutputMode
from clark_agent.plugins.base import (
    HOOK_OF,
    AfterToolCall,
    AfterToolCallContext,
    AfterToolDecision,
    BeforeRequest,
    BeforeRequestContext,
    BeforeToolCall,
    BeforeToolCallContext,
    BeforeToolDecision,
    Capability,
    ContextTransform,
    EventObserver,
    FollowUpSource,
    FunctionPlugin,
    MaybeAsync,
    Plugin,
    SteeringSource,
    ToolGate,
    ToolGateContext,
    TransformContext,
    plugin_name,
    tools_of,
)
from clark_agent.plugins.graceful_turn_limit import GracefulTurnLimit
from clark_agent.plugins.hooks import (
    Hook,
    Hooks,
    hook_of,
)
from clark_agent.prices import ModelRef
from clark_agent.protocol import ProtocolPolicy
from clark_agent.recovery import ContextOverflowRecovery, MaxTokensRecovery
from clark_agent.stream import OutputSchema, ReasoningEffort, StreamFn
from clark_agent.tool_source import ToolSource
from clark_agent.tools import AgentTool, ToolLike, ToolRegistry
from clark_agent.tools.repair import close_match
from clark_agent.types import AgentMessage

__all__ = ["AgentBuilder", "ExecutionMode", "LoopConfig"]


class ExecutionMode(StrEnum):
    """How the calls of one batch run."""

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


class Journals(Protocol):
    """Where runs are recorded: a `clark_agent.run_log.RunLog`."""

    def journal(self, run_id: str, clock: Clock, *, checks_calls: bool = False) -> Any:
        """The recorder of one run; ``checks_calls`` if hooks decide about tool calls."""
        ...


class _Named(StructMeta):
    """Rejects an unknown setting and suggests the one that may be meant."""

    if not TYPE_CHECKING:  # checkers know the fields

        def __call__(self, *args: Any, **settings: Any) -> Any:
            _check_names(settings.keys() - set(self.__struct_fields__))
            return super().__call__(*args, **settings)


class LoopConfig(Struct, metaclass=_Named, frozen=True, kw_only=True, dict=True, eq=False):
    """The settings of a run. Only ``stream`` is required.

    A config is immutable, and any number of runs may use it at once. `replace` returns a copy with
    other settings, `child` the config for a run that a run starts.

    Attributes:
        stream: The transport to the model.
        tools: Tools, or functions to make tools of. Two tools of one name are an error. Plugins may
            bring more.
        tool_source: Called once a turn for more tools, which may change from turn to turn.
        plugins: Objects with hooks, called in this order.
        event_sink: Receives every event. Plugins that observe events receive them too.
        protocol: The names, prompts and rules of your product.
        conversation_id: Passed to tool gates.
        agent_name: The name of the agent, for its log and its traces.
        model_id: Passed to plugins and events, and the name under which the price is looked up. The
            transport has its own model.
        token_estimator: Estimates the tokens of a message for plugins and budgets. By default from
            the size of its JSON.
        default_execution_mode: Whether the tool calls of one answer run in parallel (the default)
            or one after the other.
        max_tool_calls_per_turn: Calls beyond this number get an error result and do not run.
        tool_timeout: Seconds that a tool call may take, unless the tool has its own timeout.
        temperature: The sampling temperature. None: the provider's default.
        max_output_tokens: The longest answer of one model call. None: the provider's default.
        reasoning: How much the model should reason before it answers.
        provider_extras: Provider-specific parameters, passed to the transport unchanged.
        force_tool_call: Require a tool call in every turn, where the provider can.
        max_output_tokens_recovery: Whether and how to repeat an answer that was cut off at
            ``max_output_tokens`` with a higher limit.
        overflow_recovery: Shortens the transcript after the provider rejects it as too long.
        max_iterations: The largest number of turns. The run then ends with
            ``LoopOutcome.HIT_MAX_ITERATIONS``.
        grace_iterations: How many turns before ``max_iterations`` a message asks the model to wrap
            up. 0: never.
        graceful_turn_limit_message_provider: Returns the text of that message.
        graceful_turn_limit_grace_provider: Returns ``grace_iterations`` for a run when it starts.
        empty_outcome_retry_budget: How many answers in a row without a tool call follow-ups may
            recover. One more raises `EmptyOutcomeError`.
        budget: Limits on turns, tokens, cost and time, shared by the run and its children.
        plain_text_terminal_fallback_tool: A terminal tool. An answer in plain text becomes its
            result and ends the run, in turns that offer nothing but terminal tools.
        plain_text_terminal_fallback_eager: Do that in every turn.
        plain_text_terminal_fallback_eager_nudge: Remind the model of its tools up to two times
            first.
        cancel_grace: Seconds that a cancelled tool has to return.
        hook_timeout: Seconds that a call of a hook may take.
        clock: Time, sleeping and ids; replaced in tests and replays.
        run_log: A `clark_agent.run_log.RunLog`, which records everything that enters the run.
        effects: Wraps model calls, tool calls and child runs. None: they happen directly.
        output: The type that the run must return, as `clark_agent.Output`. None: the run may end
            with any answer.

    Raises `ConfigError` for an unknown or invalid setting.
    """

    stream: StreamFn
    tools: ToolRegistry | Iterable[ToolLike] = ()
    tool_source: ToolSource | None = None
    plugins: Iterable[Plugin] = ()
    event_sink: EventSink | None = None
    protocol: ProtocolPolicy = field(default_factory=ProtocolPolicy)
    conversation_id: str | None = None
    agent_name: str | None = None
    model_id: str | None = None
    token_estimator: TokenEstimator = field(default_factory=JsonSizeEstimator)

    default_execution_mode: ExecutionMode = ExecutionMode.PARALLEL
    max_tool_calls_per_turn: int | None = None
    tool_timeout: float | None = None

    temperature: float | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningEffort = ReasoningEffort.MINIMAL
    provider_extras: Any = None
    force_tool_call: bool = False

    max_output_tokens_recovery: MaxTokensRecovery | None = None
    overflow_recovery: ContextOverflowRecovery | None = None

    max_iterations: int | None = None
    grace_iterations: int = 5
    graceful_turn_limit_message_provider: Callable[[], str] | None = None
    graceful_turn_limit_grace_provider: Callable[[], int] | None = None
    empty_outcome_retry_budget: int | None = None
    budget: Budget | None = None

    plain_text_terminal_fallback_tool: str | None = None
    plain_text_terminal_fallback_eager: bool = False
    plain_text_terminal_fallback_eager_nudge: bool = False

    cancel_grace: float = 5.0
    hook_timeout: float | None = None
    clock: Clock = field(default_factory=SystemClock)
    run_log: Journals | None = None
    effects: Effects | None = None
    output: Output[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("tools", "plugins"):
            given: Any = getattr(self, name)
            if isinstance(given, (AgentTool, str)) or not isinstance(given, Iterable):
                raise ConfigError(f"{name} must be a list, not {given!r}")
        force_setattr(self, "plugins", tuple(self.plugins))
        if not isinstance(self.tools, ToolRegistry):
            force_setattr(self, "tools", _registry(self.tools))
        _check(self)
        self.hooks.check_tools(self.registry)  # binds the hooks now, so invalid plugins fail here

    @cached_property
    def registry(self) -> ToolRegistry:
        """The tools by name: the own ones, those of plugins, and the one for the output."""
        if self.output is None or self.output_mode is not OutputMode.TOOL:
            return self.all_tools
        return _registry([*self.all_tools.values(), self.output.tool])

    @cached_property
    def all_tools(self) -> ToolRegistry:
        """The tools by name, followed by those that plugins bring."""
        assert isinstance(self.tools, ToolRegistry)
        brought = [(plugin, tool) for plugin in self.plugins for tool in tools_of(plugin)]
        return _with_brought(self.tools, brought) if brought else self.tools

    @cached_property
    def output_mode(self) -> OutputMode | None:
        """How the model is asked for the output; None: it is not, or the output is plain text."""
        if self.output is None:
            return None
        has_tools = bool(self.all_tools) or self.tool_source is not None
        return self.output.mode_for(self.stream, has_tools=has_tools)

    @cached_property
    def output_schema(self) -> OutputSchema | None:
        """What the provider is asked to ensure."""
        if self.output is None or self.output_mode is not OutputMode.NATIVE:
            return None
        return self.output.schema

    @cached_property
    def forces_tool_call(self) -> bool:
        """Whether every turn must call a tool."""
        if self.output is None or self.output.accepts_text:
            return self.force_tool_call
        return self.force_tool_call or self.output_mode is OutputMode.TOOL

    def system_prompt_for(self, given: str) -> str:
        """The system prompt with the instructions for the output, if it has none yet."""
        if self.output is None or self.output_mode is not OutputMode.PROMPTED:
            return given
        instructions = self.output.instructions
        if given.endswith(instructions):  # that of a run that is resumed
            return given
        return f"{given}\n\n{instructions}" if given else instructions

    @cached_property
    def hooks(self) -> Hooks:
        """The plugins by capability, with those that the settings call for."""
        return Hooks.of([*self.plugins, *_installed(self)])

    @cached_property
    def source_hook(self) -> Hook | None:
        """The source of tools, ready to be called."""
        source = self.tool_source
        return None if source is None else hook_of(source, "tools_for_turn")

    @cached_property
    def audience(self) -> Audience:
        """Who listens to a run whose plugins keep no state."""
        return Audience(self.event_sink, self.hooks.event_observer)

    @cached_property
    def model_ref(self) -> ModelRef:
        """The names of the model, to find its price with."""
        return ModelRef.of(self.model_id, self.stream)

    @property
    def plugin_names(self) -> dict[str, tuple[str, ...]]:
        """The names of the plugins of each capability, in the order in which they are called."""
        return self.hooks.names

    def child(self, **changes: Any) -> LoopConfig:
        """The config for a child run, with the given settings changed.

        A child has the same transport, tools, sampling, recovery from truncation, policy, clock
        and timeouts, and those plugins that are ``inheritable_to_child``; plugins among the
        changes are added to these. It has no sink, no caps on turns and empty outcomes, no
        conversation, no provider extras and no recovery from overflow, unless the changes set them.
        """
        _check_names(changes)
        inherited = {name: getattr(self, name) for name in _INHERITED}
        plugins = [p for p in self.plugins if getattr(p, "inheritable_to_child", False)]
        changes["plugins"] = (*plugins, *changes.get("plugins", ()))
        return LoopConfig(**{**inherited, **changes})

    def replace(self, **changes: Any) -> LoopConfig:
        """The same config with the given settings changed."""
        _check_names(changes)
        return replace(self, **changes)

    def child_builder(self) -> AgentBuilder:
        """A builder that starts from `child`."""
        child = self.child()
        return AgentBuilder({name: getattr(child, name) for name in _SETTINGS})


_SETTINGS = frozenset(LoopConfig.__struct_fields__)

_NOT_INHERITED = frozenset(
    {
        "agent_name",
        "conversation_id",
        "empty_outcome_retry_budget",
        "event_sink",
        "graceful_turn_limit_grace_provider",
        "graceful_turn_limit_message_provider",
        "max_iterations",
        "output",
        "overflow_recovery",
        "plugins",
        "provider_extras",
    }
)
_INHERITED = _SETTINGS - _NOT_INHERITED


# The names of the settings in other libraries.
_KNOWN_AS = {
    "max_turns": "max_iterations",
    "max_steps": "max_iterations",
    "max_tokens": "max_output_tokens",
    "model": "stream",
    "llm": "stream",
    "client": "stream",
    "transport": "stream",
    "hooks": "plugins",
    "callbacks": "plugins",
    "parallel_tool_calls": "default_execution_mode",
}
_OF_THE_CONTEXT = ("system", "system_prompt", "instructions", "messages", "identity")


def _check_names(settings: Iterable[str]) -> None:
    for name in settings:
        if name in _SETTINGS:
            continue
        if name in _OF_THE_CONTEXT:
            raise ConfigError(f"unknown setting {name!r}: it belongs to the AgentContext")
        close = _KNOWN_AS.get(name) or close_match(name, _SETTINGS)
        hint = "" if close is None else f"; did you mean {close!r}?"
        raise ConfigError(f"unknown setting {name!r}{hint}")


def _registry(tools: Iterable[ToolLike]) -> ToolRegistry:
    """The tools of a plain list, in which each name must be unique."""
    given = tuple(tools)
    registry = ToolRegistry(given)
    if len(registry) < len(given):
        seen: dict[str, ToolLike] = {}
        for tool in given:
            name = tool.name if isinstance(tool, AgentTool) else tool.__name__
            if seen.setdefault(name, tool) != tool:
                raise ConfigError(
                    f"two different tools are named {name!r}: rename one, for example with "
                    "@tool(name=...), or pass a ToolRegistry, in which the last tool of a name wins"
                )
    return registry


def _with_brought(tools: ToolRegistry, brought: Iterable[tuple[object, AgentTool]]) -> ToolRegistry:
    """The tools, followed by those that plugins bring. One tool may come from several of them."""
    by_name = dict(tools)
    owners: dict[str, object] = {}
    for plugin, tool in brought:
        name = tool.schema.name
        if by_name.setdefault(name, tool) != tool:
            owner = owners.get(name)
            other = "tools has another one" if owner is None else _brings_it_too(plugin, owner)
            raise ConfigError(
                f"the plugin {plugin_name(plugin)!r} brings a tool named {name!r}, and {other}: "
                "rename one of them, or remove one"
            )
        owners.setdefault(name, plugin)
    return ToolRegistry(by_name.values())


def _brings_it_too(plugin: object, owner: object) -> str:
    name = plugin_name(owner)
    if name == plugin_name(plugin):
        return "so does another plugin of that name"
    return f"so does the plugin {name!r}"


def _installed(config: LoopConfig) -> list[GracefulTurnLimit]:
    """The plugins that the settings install. They come last, so other steering goes first."""
    if config.max_iterations is None or not GracefulTurnLimit.is_useful(
        config.max_iterations, config.grace_iterations
    ):
        return []
    return [
        GracefulTurnLimit(
            config.max_iterations,
            config.grace_iterations,
            message_provider=config.graceful_turn_limit_message_provider,
            grace_provider=config.graceful_turn_limit_grace_provider,
        )
    ]


# The types and the minimum of each numeric setting.
_NUMBERS: dict[str, tuple[tuple[type, ...], int]] = {
    "max_tool_calls_per_turn": ((int,), 1),
    "max_output_tokens": ((int,), 1),
    "max_iterations": ((int,), 1),
    "grace_iterations": ((int,), 0),
    "empty_outcome_retry_budget": ((int,), 0),
    "temperature": ((int, float), 0),
    "cancel_grace": ((int, float), 0),
    "tool_timeout": ((int, float), 0),
    "hook_timeout": ((int, float), 0),
}
_OPTIONAL = _NUMBERS.keys() - {"grace_iterations", "cancel_grace"}
_POSITIVE = ("tool_timeout", "hook_timeout")
_PROVIDERS = ("graceful_turn_limit_message_provider", "graceful_turn_limit_grace_provider")


# What a setting that is an object must be able to do.
_METHODS = {
    "clock": ("now_ms", "sleep", "new_id"),
    "token_estimator": ("estimate_message",),
    "protocol": ("terminal_tool_names", "normalize_tool_calls"),
    "max_output_tokens_recovery": ("next_cap",),
    "overflow_recovery": ("recover",),
}


def _check(config: LoopConfig) -> None:
    _check_stream(config.stream)
    if config.event_sink is not None and not callable(config.event_sink):
        raise ConfigError(f"event_sink must be a callable, not {config.event_sink!r}")
    for name in _PROVIDERS:
        provider = getattr(config, name)
        if provider is not None and not callable(provider):
            raise ConfigError(f"{name} must be a callable, not {provider!r}")
    for name, (kinds, least) in _NUMBERS.items():
        value: Any = getattr(config, name)
        if value is None and name in _OPTIONAL:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = "a whole number" if float not in kinds else "a number"
            raise ConfigError(f"{name} must be {wanted}, not {value!r}")
        if not getattr(config, name) >= least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
        if value == 0 and name in _POSITIVE:
            raise ConfigError(f"{name} must be more than 0 seconds (or None: no limit), not 0")
    _check_enum(config, "default_execution_mode", ExecutionMode)
    _check_enum(config, "reasoning", ReasoningEffort)
    _check_fallback(config)
    _check_methods(config)
    run_log: Any = config.run_log
    if run_log is not None and (
        isinstance(run_log, type) or not callable(getattr(run_log, "journal", None))
    ):
        raise ConfigError(
            f"run_log must be a RunLog, such as RunLog(JsonlStore('runs')), not {run_log!r}"
        )
    source: Any = config.tool_source
    if source is not None and (
        isinstance(source, type) or not callable(getattr(source, "tools_for_turn", None))
    ):
        raise ConfigError(f"tool_source must be an object with tools_for_turn(ctx), not {source!r}")
    effects: Any = config.effects
    if effects is not None and not isinstance(effects, Effects):
        raise ConfigError(f"effects must be an instance of a subclass of Effects, not {effects!r}")
    output: Any = config.output
    if output is not None and not isinstance(output, Output):
        raise ConfigError(f"output must be an Output, such as Output(MyType), not {output!r}")
    if output is not None:
        _check_final_answers(config, output)
    budget: Any = config.budget
    if budget is not None:
        if not isinstance(budget, Budget):
            raise ConfigError(f"budget must be a Budget, not {budget!r}")
        budget.check_model(config.model_ref)


def _check_methods(config: LoopConfig) -> None:
    for name, methods in _METHODS.items():
        given: Any = getattr(config, name)
        missing = [method for method in methods if not callable(getattr(given, method, None))]
        if missing and not (given is None and name.endswith("recovery")):
            raise ConfigError(f"{name} must have the method {missing[0]}, and {given!r} has not")


def _check_final_answers(config: LoopConfig, output: Output[Any]) -> None:
    for tool in config.all_tools.values():
        if tool.is_final_answer and tool is not output.tool:
            raise ConfigError(
                f"the tool {tool.name!r} ends the run with an answer of its own; remove it, "
                "or set output to the type of that answer"
            )


def _check_stream(stream: Any) -> None:
    if isinstance(stream, str):
        raise ConfigError(
            f"stream must be a transport, not a string: use connect({stream!r}) from "
            "clark_agent.transports"
        )
    if not callable(stream) or isinstance(stream, type):
        raise ConfigError(f"stream must be a transport (a callable), not {stream!r}")
    try:
        signature(stream).bind("request", "signal")
    except TypeError:
        raise ConfigError(
            f"stream{signature(stream)} cannot be called: a transport takes (request, signal)"
        ) from None
    except ValueError:  # a builtin without a signature cannot be checked
        pass
    if iscoroutinefunction(stream) or iscoroutinefunction(getattr(stream, "__call__", None)):  # noqa: B004
        raise ConfigError(
            "stream must be an async generator that yields Start, Chunk and Done, not a coroutine "
            "function"
        )


def _check_enum(config: LoopConfig, name: str, kind: type[StrEnum]) -> None:
    """Convert a plain string to its member; reject any other value."""
    value = getattr(config, name)
    try:
        force_setattr(config, name, kind(value))
    except ValueError:
        raise ConfigError(f"{name} must be one of {', '.join(kind)}, not {value!r}") from None


def _check_fallback(config: LoopConfig) -> None:
    if config.plain_text_terminal_fallback_eager_nudge and not (
        config.plain_text_terminal_fallback_eager
    ):
        raise ConfigError(
            "plain_text_terminal_fallback_eager_nudge does nothing without "
            "plain_text_terminal_fallback_eager"
        )
    if config.plain_text_terminal_fallback_eager and not config.plain_text_terminal_fallback_tool:
        raise ConfigError(
            "plain_text_terminal_fallback_eager does nothing without "
            "plain_text_terminal_fallback_tool"
        )


# --- the builder ------------------------------------------------------------------------------


class AgentBuilder:
    """A fluent way to a `LoopConfig`: a method per setting, one per capability, then `build`."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self._settings: dict[str, Any] = dict(settings or {})
        self._tools: list[ToolLike] = list(self._settings.pop("tools", ToolRegistry()).values())
        self._plugins: list[Any] = list(self._settings.pop("plugins", ()))

    def build(self) -> LoopConfig:
        """The config. Raises `ConfigError` for invalid settings."""
        if "stream" not in self._settings:
            raise ConfigError("no transport to the model: call stream(...) before build()")
        tools = ToolRegistry(self._tools)  # a child may replace a tool of the same name
        return LoopConfig(tools=tools, plugins=self._plugins, **self._settings)

    def _set(self, name: str, value: Any) -> Self:
        self._settings[name] = value
        return self

    def stream(self, stream: StreamFn) -> Self:
        """The transport to the model."""
        return self._set("stream", stream)

    def tool(self, tool: ToolLike) -> Self:
        """Add a tool."""
        self._tools.append(tool)
        return self

    def tools(self, tools: ToolRegistry | Iterable[ToolLike]) -> Self:
        """Add tools."""
        self._tools.extend(tools.values() if isinstance(tools, ToolRegistry) else tools)
        return self

    def event_sink(self, value: EventSink) -> Self:
        """Where events go."""
        return self._set("event_sink", value)

    def protocol(self, value: ProtocolPolicy) -> Self:
        """The product's vocabulary."""
        return self._set("protocol", value)

    def agent_name(self, value: str) -> Self:
        """The name of the agent, for its log and its traces."""
        return self._set("agent_name", value)

    def conversation_id(self, value: str) -> Self:
        """Passed to tool gates as ``conversation_id``."""
        return self._set("conversation_id", value)

    def model_id(self, value: str) -> Self:
        """Passed to plugins and events."""
        return self._set("model_id", value)

    def token_estimator(self, value: TokenEstimator) -> Self:
        """What counts tokens."""
        return self._set("token_estimator", value)

    def default_execution_mode(self, value: ExecutionMode) -> Self:
        """How the calls of a batch run."""
        return self._set("default_execution_mode", value)

    def max_tool_calls_per_turn(self, value: int | None) -> Self:
        """How many calls of a turn run."""
        return self._set("max_tool_calls_per_turn", value)

    def tool_timeout(self, value: float | None) -> Self:
        """Seconds that a tool may take."""
        return self._set("tool_timeout", value)

    def temperature(self, value: float | None) -> Self:
        """For sampling."""
        return self._set("temperature", value)

    def max_output_tokens(self, value: int | None) -> Self:
        """The output cap of a turn."""
        return self._set("max_output_tokens", value)

    def reasoning(self, value: ReasoningEffort) -> Self:
        """How much the model should think."""
        return self._set("reasoning", value)

    def provider_extras(self, value: Any) -> Self:
        """Passed to the transport as it is."""
        return self._set("provider_extras", value)

    def force_tool_call(self, value: bool = True) -> Self:
        """Insist on a tool call in every turn."""
        return self._set("force_tool_call", value)

    def max_output_tokens_recovery(self, value: MaxTokensRecovery | None) -> Self:
        """Ask again with a larger cap when an answer was cut off."""
        return self._set("max_output_tokens_recovery", value)

    def overflow_recovery(self, value: ContextOverflowRecovery | None) -> Self:
        """Shrink a transcript that does not fit."""
        return self._set("overflow_recovery", value)

    def max_iterations(self, value: int | None) -> Self:
        """The most turns of a run."""
        return self._set("max_iterations", value)

    def grace_iterations(self, value: int) -> Self:
        """How many turns before the cap the model is asked to wrap up."""
        return self._set("grace_iterations", value)

    def graceful_turn_limit_message_provider(self, value: Callable[[], str] | None) -> Self:
        """The text of that message."""
        return self._set("graceful_turn_limit_message_provider", value)

    def graceful_turn_limit_grace_provider(self, value: Callable[[], int] | None) -> Self:
        """A grace that changes during the run."""
        return self._set("graceful_turn_limit_grace_provider", value)

    def budget(self, value: Budget) -> Self:
        """What the run and its children may spend together."""
        return self._set("budget", value)

    def empty_outcome_retry_budget(self, value: int | None) -> Self:
        """How many stops without a tool call may be recovered."""
        return self._set("empty_outcome_retry_budget", value)

    def plain_text_terminal_fallback_tool(self, value: str | None) -> Self:
        """The tool that prose in place of a tool call becomes a result of."""
        return self._set("plain_text_terminal_fallback_tool", value)

    def plain_text_terminal_fallback_eager(self, value: bool = True) -> Self:
        """Do so at once."""
        return self._set("plain_text_terminal_fallback_eager", value)

    def plain_text_terminal_fallback_eager_nudge(self, value: bool = True) -> Self:
        """Remind the model of its tools first."""
        return self._set("plain_text_terminal_fallback_eager_nudge", value)

    def cancel_grace(self, value: float) -> Self:
        """Seconds that a cancelled tool has to end by itself."""
        return self._set("cancel_grace", value)

    def hook_timeout(self, value: float | None) -> Self:
        """Seconds that a hook may take."""
        return self._set("hook_timeout", value)

    def clock(self, value: Clock) -> Self:
        """Time and ids."""
        return self._set("clock", value)

    def run_log(self, value: Journals) -> Self:
        """Where the inputs of a run are recorded."""
        return self._set("run_log", value)

    def tool_source(self, value: ToolSource) -> Self:
        """A source of tools that may change during a run."""
        return self._set("tool_source", value)

    def effects(self, value: Effects) -> Self:
        """How models are called, tools run and child runs started."""
        return self._set("effects", value)

    def output(self, value: Output[Any]) -> Self:
        """The type that the run must return."""
        return self._set("output", value)

    def plugin(self, plugin: Plugin) -> Self:
        """Add a plugin, with all its hooks."""
        self._plugins.append(plugin)
        return self

    def _hook(self, capability: Capability, hook: Any) -> Self:
        is_plugin = hasattr(hook, HOOK_OF[capability])
        self._plugins.append(hook if is_plugin else FunctionPlugin(capability, hook))
        return self

    def before_tool_call(
        self,
        hook: BeforeToolCall
        | Callable[[BeforeToolCallContext], MaybeAsync[BeforeToolDecision | None]],
    ) -> Self:
        """Add a hook before each tool call: a plugin or a function of its context."""
        return self._hook("before_tool_call", hook)

    def after_tool_call(
        self,
        hook: AfterToolCall
        | Callable[[AfterToolCallContext], MaybeAsync[AfterToolDecision | None]],
    ) -> Self:
        """Add a hook after each tool call."""
        return self._hook("after_tool_call", hook)

    def before_request(
        self,
        hook: BeforeRequest
        | Callable[[BeforeRequestContext], MaybeAsync[Iterable[AgentMessage] | None]],
    ) -> Self:
        """Add a source of messages before each request to the model."""
        return self._hook("before_request", hook)

    def context_transform(
        self,
        hook: ContextTransform
        | Callable[[Sequence[AgentMessage], TransformContext], MaybeAsync[Sequence[AgentMessage]]],
    ) -> Self:
        """Add a transform of what the model sees."""
        return self._hook("context_transform", hook)

    def event_observer(
        self,
        hook: EventObserver | Callable[[AgentEvent], MaybeAsync[None]],
    ) -> Self:
        """Add an observer of events."""
        return self._hook("event_observer", hook)

    def steering(
        self,
        hook: SteeringSource | Callable[[], MaybeAsync[Iterable[AgentMessage]]],
    ) -> Self:
        """Add a source of messages between batches."""
        return self._hook("steering", hook)

    def follow_up(
        self,
        hook: FollowUpSource | Callable[[], MaybeAsync[Iterable[AgentMessage]]],
    ) -> Self:
        """Add a source of messages after a natural stop."""
        return self._hook("follow_up", hook)

    def tool_gate(
        self,
        hook: ToolGate | Callable[[ToolGateContext], MaybeAsync[AbstractSet[str] | None]],
    ) -> Self:
        """Add a gate that narrows the tools of a turn."""
        return self._hook("tool_gate", hook)
