"""A config is checked once and never changes; a child of it inherits what the list says."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from inspect import cleandoc
from types import SimpleNamespace
from typing import Any

import pytest

from clark_agent import (
    AgentEvent,
    AgentMessage,
    Budget,
    MaxTokensRecovery,
    ReasoningEffort,
    SystemMessage,
)
from clark_agent.clock import SystemClock
from clark_agent.config import AgentBuilder, ExecutionMode, LoopConfig
from clark_agent.effects import Effects
from clark_agent.errors import ConfigError
from clark_agent.messages import JsonSizeEstimator
from clark_agent.output import Output
from clark_agent.plugins import GracefulTurnLimit
from clark_agent.plugins.base import (
    HOOK_OF,
    Capability,
    FunctionPlugin,
    TransformContext,
)
from clark_agent.protocol import ProtocolPolicy
from clark_agent.run_log.memory import MemoryStore
from clark_agent.run_log.writer import RunLog
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream
from clark_agent.tools import AgentTool, ToolContext, ToolDefinitionError, ToolRegistry, ToolResult

STREAM = ScriptedStream([])


class Named(AgentTool):
    """A tool of any name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__()

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.text(self.name)


class Source:
    def tools_for_turn(self, ctx: object) -> tuple[()]:
        return ()


class KeepNothing:
    def recover(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        return ()


def observer(name: str, *, inheritable: bool = False) -> FunctionPlugin:
    return FunctionPlugin(
        "event_observer", lambda event: None, name=name, inheritable_to_child=inheritable
    )


def steering(name: str) -> FunctionPlugin:
    return FunctionPlugin("steering", tuple, name=name)


# --- every setting ----------------------------------------------------------------------------

# What a child run has from its parent, and what it has not. A new setting belongs in one of them.
INHERITED: dict[str, Any] = {
    "stream": STREAM,
    "tools": ToolRegistry([Named("look")]),
    "protocol": ProtocolPolicy(),
    "model_id": "model",
    "token_estimator": JsonSizeEstimator(),
    "default_execution_mode": ExecutionMode.SEQUENTIAL,
    "max_tool_calls_per_turn": 3,
    "tool_timeout": 1.5,
    "temperature": 0.25,
    "max_output_tokens": 100,
    "reasoning": ReasoningEffort.HIGH,
    "force_tool_call": True,
    "max_output_tokens_recovery": MaxTokensRecovery(),
    "grace_iterations": 2,
    "budget": Budget(turns=3),
    "run_log": RunLog(MemoryStore()),
    "effects": Effects(),
    "tool_source": Source(),
    "plain_text_terminal_fallback_tool": "done",
    "plain_text_terminal_fallback_eager": True,
    "plain_text_terminal_fallback_eager_nudge": True,
    "cancel_grace": 1.25,
    "hook_timeout": 2.5,
    "clock": FakeClock(),
}
NOT_INHERITED: dict[str, Any] = {
    "event_sink": RecordingSink(),
    "conversation_id": "conversation",
    "agent_name": "clerk",
    "provider_extras": {"extra": 1},
    "overflow_recovery": KeepNothing(),
    "max_iterations": 9,
    "graceful_turn_limit_message_provider": lambda: "wrap up",
    "graceful_turn_limit_grace_provider": lambda: 1,
    "empty_outcome_retry_budget": 2,
    "output": Output(int, mode="prompted"),
}
ALL = {**INHERITED, **NOT_INHERITED}

DEFAULTS: dict[str, Any] = {
    "plugins": (),
    "event_sink": None,
    "conversation_id": None,
    "agent_name": None,
    "model_id": None,
    "default_execution_mode": ExecutionMode.PARALLEL,
    "max_tool_calls_per_turn": None,
    "tool_timeout": None,
    "temperature": None,
    "max_output_tokens": None,
    "reasoning": ReasoningEffort.MINIMAL,
    "provider_extras": None,
    "force_tool_call": False,
    "max_output_tokens_recovery": None,
    "overflow_recovery": None,
    "max_iterations": None,
    "grace_iterations": 5,
    "graceful_turn_limit_message_provider": None,
    "graceful_turn_limit_grace_provider": None,
    "empty_outcome_retry_budget": None,
    "budget": None,
    "run_log": None,
    "effects": None,
    "output": None,
    "tool_source": None,
    "plain_text_terminal_fallback_tool": None,
    "plain_text_terminal_fallback_eager": False,
    "plain_text_terminal_fallback_eager_nudge": False,
    "cancel_grace": 5.0,
    "hook_timeout": None,
}


def settings(config: LoopConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in LoopConfig.__struct_fields__}


def test_these_are_all_the_settings() -> None:
    assert not INHERITED.keys() & NOT_INHERITED.keys()
    assert {*ALL, "plugins"} == set(LoopConfig.__struct_fields__)


def test_help_describes_every_setting() -> None:
    assert LoopConfig.__doc__ is not None
    described = re.findall(r"^    (\w+): \w", cleandoc(LoopConfig.__doc__), re.MULTILINE)
    assert described == list(LoopConfig.__struct_fields__)


def test_every_value_here_differs_from_the_default() -> None:
    default = settings(LoopConfig(stream=ScriptedStream([])))
    assert [name for name, value in ALL.items() if value == default[name]] == []


def test_only_the_stream_is_required() -> None:
    config = LoopConfig(stream=STREAM)
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert config.stream is STREAM
    assert isinstance(config.tools, ToolRegistry)
    assert config.registry.names == ()
    assert type(config.protocol) is ProtocolPolicy
    assert type(config.token_estimator) is JsonSizeEstimator
    assert type(config.clock) is SystemClock
    assert config.plugin_names == dict.fromkeys(HOOK_OF, ())
    with pytest.raises(TypeError, match="stream"):
        LoopConfig()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        LoopConfig(STREAM)  # type: ignore[call-arg]


def test_settings_are_kept_as_given() -> None:
    kept = settings(LoopConfig(**ALL))
    assert [name for name, value in ALL.items() if kept[name] is not value] == []


@pytest.mark.parametrize("name", ["stream", "max_iterations", "plugins", "registry"])
def test_a_config_cannot_be_changed(name: str) -> None:
    config = LoopConfig(stream=STREAM)
    with pytest.raises(AttributeError):
        setattr(config, name, None)
    with pytest.raises(AttributeError):
        delattr(config, name)


def test_a_config_is_equal_to_itself_alone() -> None:
    config = LoopConfig(stream=STREAM)
    assert config == config
    assert config != LoopConfig(stream=STREAM)
    assert {config: 1}[config] == 1


# --- what makes no sense ----------------------------------------------------------------------

NAN = float("nan")


def given(name: str, value: Any) -> dict[str, Any]:
    return {"stream": STREAM, name: value}


def cases(name: str, *values: object) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r}") for value in values]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *cases("stream", None, "a model", 3),
        *cases("event_sink", "a file", [], 3),
        *cases("max_tool_calls_per_turn", 0, -1),
        *cases("max_output_tokens", 0, -1),
        *cases("max_iterations", 0, -1),
        *cases("grace_iterations", -1),
        *cases("empty_outcome_retry_budget", -1),
        *cases("temperature", -0.1, NAN),
        *cases("cancel_grace", -0.1, NAN),
        *cases("tool_timeout", 0, -1, NAN),
        *cases("hook_timeout", 0, -1, NAN),
        *cases("default_execution_mode", "serial", "", None, 1),
        *cases("reasoning", "maximal", "", None, 1),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        LoopConfig(**given(name, value))
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *cases("max_iterations", "3", 2.5, True),
        *cases("max_output_tokens", 2.5),
        *cases("empty_outcome_retry_budget", 2.5),
        *cases("grace_iterations", None, 1.5),
        *cases("cancel_grace", None, "5"),
        *cases("max_tool_calls_per_turn", "3"),
        *cases("temperature", "hot"),
        *cases("tool_timeout", "3s", True),
        *cases("hook_timeout", "3s"),
        *cases("graceful_turn_limit_message_provider", "wrap up"),
        *cases("graceful_turn_limit_grace_provider", 3),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        LoopConfig(**given(name, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *cases("max_tool_calls_per_turn", 1, None),
        *cases("max_output_tokens", 1),
        *cases("max_iterations", 1),
        *cases("grace_iterations", 0),
        *cases("empty_outcome_retry_budget", 0),
        *cases("temperature", 0, 2.0),
        *cases("cancel_grace", 0),
        *cases("tool_timeout", 0.001, None),
        *cases("hook_timeout", 0.001),
        *cases("event_sink", print),
    ],
)
def test_the_least_that_makes_sense_is_taken(name: str, value: Any) -> None:
    config = LoopConfig(**given(name, value))
    assert getattr(config, name) is value


@pytest.mark.parametrize("mode", ExecutionMode)
@pytest.mark.parametrize("effort", ReasoningEffort)
def test_plain_strings_will_do_for_enums(mode: ExecutionMode, effort: ReasoningEffort) -> None:
    plain: dict[str, Any] = {"default_execution_mode": mode.value, "reasoning": effort.value}
    config = LoopConfig(stream=STREAM, **plain)
    assert config.default_execution_mode is mode
    assert config.reasoning is effort


def test_a_bad_enum_is_told_the_good_ones() -> None:
    mode: Any = "serial"
    with pytest.raises(ConfigError, match="one of parallel, sequential, not 'serial'"):
        LoopConfig(stream=STREAM, default_execution_mode=mode)


FALLBACK = "plain_text_terminal_fallback"


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ({"eager_nudge": True}, "eager"),
        ({"eager_nudge": True, "tool": "done"}, "eager"),
        ({"eager": True}, "tool"),
        ({"eager": True, "tool": ""}, "tool"),
        ({"eager": True, "eager_nudge": True}, "tool"),
    ],
)
def test_fallback_settings_that_do_nothing_are_refused(flags: dict[str, Any], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"does nothing without {FALLBACK}_{missing}$"):
        LoopConfig(stream=STREAM, **{f"{FALLBACK}_{name}": value for name, value in flags.items()})


@pytest.mark.parametrize("flags", [{}, {"eager": True}, {"eager": True, "eager_nudge": True}])
def test_fallback_settings_that_do_something_are_taken(flags: dict[str, bool]) -> None:
    named: dict[str, Any] = {f"{FALLBACK}_{name}": value for name, value in flags.items()}
    config = LoopConfig(stream=STREAM, plain_text_terminal_fallback_tool="done", **named)
    assert config.plain_text_terminal_fallback_tool == "done"


def test_a_plugin_that_makes_no_sense_is_told_at_once() -> None:
    nothing: Any = SimpleNamespace(on_evnt=print)
    with pytest.raises(ConfigError, match="did you mean 'on_event'"):
        LoopConfig(stream=STREAM, plugins=[nothing])


# --- tools and plugins ------------------------------------------------------------------------


def look(place: str) -> str:
    """Look at a place."""
    return f"nothing at {place}"


def test_tools_may_be_functions() -> None:
    config = LoopConfig(stream=STREAM, tools=[look, Named("go")])
    assert config.registry.names == ("look", "go")
    assert isinstance(config.registry["look"], AgentTool)


def test_tools_may_come_from_any_iterable_and_as_a_registry() -> None:
    tools = [Named("a"), Named("b")]
    registry = ToolRegistry(tools)
    assert LoopConfig(stream=STREAM, tools=registry).registry is registry
    assert LoopConfig(stream=STREAM, tools=registry).tools is registry
    for some in (iter(tools), tuple(tools), (tool for tool in tools)):
        config = LoopConfig(stream=STREAM, tools=some)
        assert list(config.registry.values()) == tools
        assert config.tools is config.registry


def test_the_later_of_two_tools_with_one_name_wins_in_the_place_of_the_first() -> None:
    first, other, later = Named("a"), Named("b"), Named("a")
    registry = LoopConfig(stream=STREAM, tools=ToolRegistry([first, other, later])).registry
    assert registry.names == ("a", "b")
    assert registry["a"] is later


def test_two_tools_with_one_name_in_a_list_are_an_error() -> None:
    def a() -> None:
        """A function that would be a tool of this name."""

    for other in (Named("a"), a):
        with pytest.raises(ConfigError, match="two different tools are named 'a': rename one"):
            LoopConfig(stream=STREAM, tools=[Named("a"), Named("b"), other])
    same = Named("a")
    assert LoopConfig(stream=STREAM, tools=[same, same, Named("b")]).registry.names == ("a", "b")
    assert LoopConfig(stream=STREAM, tools=[a, a]).registry.names == ("a",)


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("max_turns", "; did you mean 'max_iterations'?"),
        ("max_iteration", "; did you mean 'max_iterations'?"),
        ("model", "; did you mean 'stream'?"),
        ("system_prompt", ": it belongs to the AgentContext"),
        ("zzz", ""),
    ],
)
def test_a_setting_that_there_is_not_names_the_one_that_is_meant(setting: str, meant: str) -> None:
    unknown: Any = {setting: 3}
    config = LoopConfig(stream=STREAM)
    makers: list[Callable[..., LoopConfig]] = [LoopConfig, config.child, config.replace]
    for make in makers:
        with pytest.raises(ConfigError) as raised:
            make(**{"stream": STREAM, **unknown})
        assert str(raised.value) == f"unknown setting {setting!r}{meant}"


def test_a_text_is_no_transport_and_connect_makes_one() -> None:
    text: Any = "openai:gpt-5"
    with pytest.raises(ConfigError, match=r"connect\('openai:gpt-5'\)"):
        LoopConfig(stream=text)


def test_a_transport_takes_a_request_and_a_signal() -> None:
    async def one(request: object) -> None: ...
    async def many(*args: object) -> AsyncIterator[Any]:
        yield

    async def three(request: object, signal: object, more: object) -> None: ...

    wrong: list[Any] = [one, three, lambda: None, ScriptedStream]
    for stream in wrong:
        with pytest.raises(ConfigError, match="stream"):
            LoopConfig(stream=stream)
    with pytest.raises(ConfigError, match=r"takes \(request, signal\)"):
        LoopConfig(stream=wrong[0])
    right: Any = many
    assert LoopConfig(stream=right).stream is right


def test_what_is_no_tool_is_refused() -> None:
    wrong: Any = [Named]
    with pytest.raises(ToolDefinitionError, match="instance"):
        LoopConfig(stream=STREAM, tools=wrong)


def test_plugins_may_come_from_any_iterable_and_keep_their_order() -> None:
    plugins = [observer("b"), steering("s"), observer("a")]
    config = LoopConfig(stream=STREAM, plugins=iter(plugins))
    assert config.plugins == tuple(plugins)
    assert config.plugin_names["event_observer"] == ("b", "a")
    assert config.plugin_names["steering"] == ("s",)
    assert list(config.plugin_names) == list(HOOK_OF)
    assert config.hooks is config.hooks, "found once"


def test_a_list_that_changes_later_changes_no_config() -> None:
    tools, plugins = [Named("a")], [observer("o")]
    config = LoopConfig(stream=STREAM, tools=tools, plugins=plugins)
    tools.append(Named("b"))
    plugins.append(observer("p"))
    assert config.registry.names == ("a",)
    assert config.plugin_names["event_observer"] == ("o",)


# --- the graceful limit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "grace", "installed"),
    [
        (None, 5, False),
        (6, 5, True),
        (5, 5, False),
        (4, 5, False),
        (9, 0, False),
        (2, 1, True),
        (1, 1, False),
        (1, 0, False),
    ],
)
def test_the_graceful_limit_is_installed_exactly_when_there_is_a_turn_to_warn_at(
    cap: int | None, grace: int, installed: bool
) -> None:
    config = LoopConfig(stream=STREAM, max_iterations=cap, grace_iterations=grace)
    expected = ("graceful_turn_limit",) if installed else ()
    assert config.plugin_names["steering"] == expected
    assert config.plugin_names["event_observer"] == expected
    assert config.plugins == ()


def test_the_graceful_limit_steers_last() -> None:
    config = LoopConfig(stream=STREAM, plugins=[steering("a"), steering("b")], max_iterations=9)
    assert config.plugin_names["steering"] == ("a", "b", "graceful_turn_limit")


def installed_limit(config: LoopConfig) -> GracefulTurnLimit:
    (limit,) = [p for p in config.hooks.plugins if isinstance(p, GracefulTurnLimit)]
    return limit


def test_the_graceful_limit_gets_its_settings() -> None:
    limit = installed_limit(LoopConfig(**ALL))
    assert (limit.max_iterations, limit.grace_iterations) == (9, 2)
    assert limit.message_provider is ALL["graceful_turn_limit_message_provider"]
    assert limit.grace_provider is ALL["graceful_turn_limit_grace_provider"]


def test_a_dynamic_grace_needs_a_useful_static_one() -> None:
    config = LoopConfig(
        stream=STREAM,
        max_iterations=4,
        grace_iterations=0,
        graceful_turn_limit_grace_provider=lambda: 2,
    )
    assert config.plugin_names["steering"] == ()


def test_each_run_counts_its_own_turns() -> None:
    config = LoopConfig(stream=STREAM, max_iterations=2, grace_iterations=1)
    first, second = config.hooks.for_run(), config.hooks.for_run()
    assert first.plugins[0] is not second.plugins[0]
    assert installed_limit(config) not in (*first.plugins, *second.plugins)


# --- child and replace ------------------------------------------------------------------------


@pytest.mark.parametrize("name", INHERITED)
def test_a_child_has_this_from_its_parent(name: str) -> None:
    assert getattr(LoopConfig(**ALL).child(), name) is ALL[name]


@pytest.mark.parametrize("name", NOT_INHERITED)
def test_a_child_does_not_have_this_from_its_parent(name: str) -> None:
    assert getattr(LoopConfig(**ALL).child(), name) == DEFAULTS[name]


@pytest.mark.parametrize("name", ALL)
def test_a_child_may_be_given_anything(name: str) -> None:
    child = LoopConfig(stream=ScriptedStream([])).child(
        # these three go together
        **{
            "plain_text_terminal_fallback_tool": "done",
            "plain_text_terminal_fallback_eager": True,
            name: ALL[name],
        }
    )
    assert getattr(child, name) is ALL[name]


def test_a_child_has_the_inheritable_plugins_and_those_added() -> None:
    plugins = [
        observer("mine"),
        observer("ours", inheritable=True),
        observer("all", inheritable=True),
    ]
    parent = LoopConfig(stream=STREAM, plugins=plugins)
    assert parent.child().plugins == tuple(plugins[1:])
    child = parent.child(plugins=[observer("new")])
    assert child.plugin_names["event_observer"] == ("ours", "all", "new")
    assert child.child().plugin_names["event_observer"] == ("ours", "all")
    assert parent.plugins == tuple(plugins)


def test_a_child_has_no_graceful_limit_of_its_parent_but_may_have_its_own() -> None:
    parent = LoopConfig(stream=STREAM, max_iterations=9, grace_iterations=2)
    assert parent.child().plugin_names["steering"] == ()
    assert installed_limit(parent.child(max_iterations=4)).soft_limit == 2


def test_changes_of_a_child_are_checked() -> None:
    parent = LoopConfig(stream=STREAM)
    with pytest.raises(ConfigError, match="max_iterations must be at least 1, not 0"):
        parent.child(max_iterations=0)


@pytest.mark.parametrize("method", ["child", "replace"])
def test_an_unknown_setting_is_refused_with_a_hint(method: str) -> None:
    make: Callable[..., LoopConfig] = getattr(LoopConfig(stream=STREAM), method)
    with pytest.raises(ConfigError, match=r"'max_iteration'; did you mean 'max_iterations'\?"):
        make(max_iteration=3)
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz'$"):
        make(zzz=3)


def test_replace_changes_what_it_is_told_and_nothing_else() -> None:
    config = LoopConfig(**ALL, plugins=[observer("o")])
    assert settings(config.replace()) == settings(config)
    changed = config.replace(max_iterations=3, tools=[Named("go")], plugins=[steering("s")])
    assert changed.registry.names == ("go",)
    assert changed.plugin_names["steering"] == ("s", "graceful_turn_limit")
    assert changed.plugin_names["event_observer"] == ("graceful_turn_limit",)
    assert installed_limit(changed).max_iterations == 3
    same = set(LoopConfig.__struct_fields__) - {"max_iterations", "tools", "plugins"}
    assert all(getattr(changed, name) is getattr(config, name) for name in same)
    assert config.registry.names == ("look",)
    assert config.plugin_names["event_observer"] == ("o", "graceful_turn_limit")
    with pytest.raises(ConfigError, match="grace_iterations"):
        config.replace(grace_iterations=-1)


def test_child_builder_starts_from_the_child() -> None:
    parent = LoopConfig(**ALL, plugins=[observer("mine"), observer("ours", inheritable=True)])
    builder = parent.child_builder()
    built = builder.build()
    assert settings(built) == {**settings(parent.child()), "tools": built.tools}
    assert list(built.registry.items()) == list(parent.registry.items())
    changed = builder.tool(Named("go")).plugin(observer("new")).max_iterations(3).build()
    assert changed.registry.names == ("look", "go")
    assert changed.plugin_names["event_observer"] == ("ours", "new", "graceful_turn_limit")
    assert parent.registry.names == ("look",)


# --- the builder ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_setting_has_a_method_of_its_name(name: str) -> None:
    builder = AgentBuilder().stream(STREAM)
    builder.plain_text_terminal_fallback_tool("done").plain_text_terminal_fallback_eager()
    assert getattr(builder, name)(ALL[name]) is builder
    built = getattr(builder.build(), name)
    if name == "tools":
        assert dict(built) == dict(ALL[name])
    else:
        assert built is ALL[name]


def test_every_setting_and_capability_has_a_method() -> None:
    methods = {name for name in vars(AgentBuilder) if not name.startswith("_")}
    plural = {"plugins"}
    assert methods == {*ALL, *HOOK_OF, "tool", "plugin", "build"} - plural


def test_flags_are_set_by_their_name_alone() -> None:
    config = (
        AgentBuilder()
        .stream(STREAM)
        .force_tool_call()
        .plain_text_terminal_fallback_tool("done")
        .plain_text_terminal_fallback_eager()
        .plain_text_terminal_fallback_eager_nudge()
        .build()
    )
    assert config.force_tool_call
    assert config.plain_text_terminal_fallback_eager
    assert config.plain_text_terminal_fallback_eager_nudge


def test_what_is_not_set_has_its_default() -> None:
    config = AgentBuilder().stream(STREAM).build()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_tools_add_up_in_order() -> None:
    a, b, c, again = Named("a"), Named("b"), Named("c"), Named("a")
    builder = AgentBuilder().stream(STREAM).tool(a).tools([b]).tools(ToolRegistry([c])).tool(again)
    registry = builder.build().registry
    assert registry.names == ("a", "b", "c")
    assert registry["a"] is again


@pytest.mark.parametrize("capability", HOOK_OF)
def test_every_capability_takes_a_function_or_a_plugin(capability: Capability) -> None:
    def function(*args: Any) -> None: ...

    plugin = SimpleNamespace(name="object", **{HOOK_OF[capability]: function})
    builder = AgentBuilder().stream(STREAM)
    add = getattr(builder, capability)
    assert add(function) is builder
    assert add(plugin) is builder
    config = builder.build()
    names = dict.fromkeys(HOOK_OF, ()) | {capability: ("function", "object")}
    assert config.plugin_names == names
    assert list(config.plugins)[1] is plugin
    with pytest.raises(ConfigError, match=capability):
        add(SimpleNamespace(other=function))


def test_a_plugin_with_several_hooks_is_added_once() -> None:
    class Both:
        name = "both"

        def on_event(self, event: AgentEvent) -> None: ...
        def next_steering_messages(self) -> list[AgentMessage]:
            return [SystemMessage("hm")]

    both = Both()
    config = AgentBuilder().stream(STREAM).steering(both).build()
    assert config.plugins == (both,)
    assert config.plugin_names["steering"] == config.plugin_names["event_observer"] == ("both",)


def test_there_is_no_agent_without_a_transport() -> None:
    with pytest.raises(ConfigError, match="stream"):
        AgentBuilder().max_iterations(3).build()


def test_settings_are_checked_when_it_is_built() -> None:
    builder = AgentBuilder().stream(STREAM).max_iterations(0)
    with pytest.raises(ConfigError, match="max_iterations"):
        builder.build()
    assert builder.max_iterations(1).build().max_iterations == 1


def test_a_builder_can_build_again() -> None:
    builder = AgentBuilder().stream(STREAM).tool(Named("a")).plugin(observer("o"))
    first, second = builder.build(), builder.build()
    assert first is not second
    assert list(first.registry.values()) == list(second.registry.values())
    assert first.plugins == second.plugins
    third = builder.tool(Named("b")).steering(tuple).temperature(1).build()
    assert third.registry.names == ("a", "b")
    assert third.plugin_names["steering"] == ("tuple",)
    assert first.registry.names == ("a",)
    assert first.plugin_names["steering"] == ()
    assert first.temperature is None


@pytest.mark.parametrize("name", ["tools", "plugins"])
@pytest.mark.parametrize("value", [5, "look", Named("look")])
def test_one_thing_where_a_list_is_meant_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a list"):
        LoopConfig(stream=STREAM, **{name: value})


@pytest.mark.parametrize(
    "name",
    ["clock", "token_estimator", "protocol", "max_output_tokens_recovery", "overflow_recovery"],
)
def test_an_object_that_cannot_do_what_is_needed_is_an_error(name: str) -> None:
    settings: dict[str, Any] = {name: 3}
    with pytest.raises(ConfigError, match=f"{name} must have the method"):
        LoopConfig(stream=STREAM, **settings)
