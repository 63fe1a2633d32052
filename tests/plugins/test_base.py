"""Hooks are found by their methods, once; what makes no sense is refused with a hint."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from clark_agent import AgentEvent, AgentMessage
from clark_agent.errors import ConfigError, HookError
from clark_agent.events import AgentStart, TurnEnd
from clark_agent.plugins.base import (
    HOOK_OF,
    AfterToolCall,
    BeforeRequest,
    BeforeToolCall,
    Capability,
    ContextTransform,
    EventObserver,
    FollowUpSource,
    FunctionPlugin,
    SteeringSource,
    ToolGate,
    ToolGateClass,
    plugin_name,
)
from clark_agent.plugins.hooks import Hooks

CAPABILITIES = list(HOOK_OF)

PARAMETERS = {
    "on_before_tool_call": 1,
    "on_after_tool_call": 1,
    "before_request": 1,
    "transform_context": 2,
    "on_event": 1,
    "next_steering_messages": 0,
    "next_follow_up_messages": 0,
    "next_turn_tool_allowlist": 1,
    "should_transform": 2,
    "denial_reason": 2,
    "suppresses_advisory_gates": 1,
    "for_run": 0,
    "end_run": 0,
}


def having(**attributes: Any) -> object:
    """An object with these attributes and nothing else."""
    return SimpleNamespace(**attributes)


def taking(count: int) -> Callable[..., None]:
    """A function with that many parameters."""
    functions: list[Callable[..., None]] = [
        lambda: None,
        lambda a: None,
        lambda a, b: None,
        lambda a, b, c: None,
    ]
    return functions[count]


# The hooks that others need beside them.
OWNERS = {"next_turn_tool_allowlist": taking(1), "transform_context": taking(2)}


def only_hook(hooks: Hooks, capability: Capability) -> Any:
    """The one hook there is, which must be of that capability."""
    found = {name: getattr(hooks, name) for name in CAPABILITIES}
    assert [name for name in CAPABILITIES if found[name]] == [capability]
    (hook,) = found[capability]
    return hook


def refusal(*plugins: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Hooks.of(plugins)
    return str(caught.value)


# --- what is found --------------------------------------------------------------------------------


def test_capabilities_and_hooks_are_those_of_the_protocols() -> None:
    protocols = {
        "before_tool_call": BeforeToolCall,
        "after_tool_call": AfterToolCall,
        "before_request": BeforeRequest,
        "context_transform": ContextTransform,
        "event_observer": EventObserver,
        "steering": SteeringSource,
        "follow_up": FollowUpSource,
        "tool_gate": ToolGate,
    }
    assert HOOK_OF.keys() == protocols.keys()
    for capability, protocol in protocols.items():
        methods = [name for name in vars(protocol) if not name.startswith("_")]
        assert methods == [HOOK_OF[capability]]  # type: ignore[index]
        (method,) = methods
        assert (
            len(inspect.signature(getattr(protocol, method)).parameters) - 1 == (PARAMETERS[method])
        )


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_capability_is_found_by_its_method(capability: Capability) -> None:
    method = HOOK_OF[capability]
    function = taking(PARAMETERS[method])
    plugin = having(name="it", **{method: function})
    hooks = Hooks.of([plugin])
    hook = only_hook(hooks, capability)
    assert hook.name == "it"
    inner = {"context_transform": "transform", "tool_gate": "allowlist"}.get(capability)
    bound = getattr(hook, inner) if inner else hook
    assert bound.call is function
    assert bound.is_async is False
    assert hooks.plugins == (plugin,)
    assert hooks.names == {name: ("it",) if name == capability else () for name in CAPABILITIES}


class Everything:
    """Has all hooks, some of them async."""

    conflict_priority = 7
    tool_gate_class = "advisory"
    observes = (TurnEnd,)

    def on_before_tool_call(self, ctx: Any) -> None: ...
    async def on_after_tool_call(self, ctx: Any) -> None: ...
    def before_request(self, ctx: Any) -> None: ...
    async def transform_context(self, messages: Any, ctx: Any) -> Any: ...
    def should_transform(self, messages: Any, ctx: Any) -> bool:
        return False

    def on_event(self, event: AgentEvent) -> None: ...
    async def next_steering_messages(self) -> list[AgentMessage]:
        return []

    def next_follow_up_messages(self) -> list[AgentMessage]:
        return []

    async def next_turn_tool_allowlist(self, ctx: Any) -> None: ...
    def denial_reason(self, tool_name: str, ctx: Any) -> str:
        return f"no {tool_name}"

    def suppresses_advisory_gates(self, ctx: Any) -> bool:
        return True


def test_one_object_may_have_all_of_them() -> None:
    hooks = Hooks.of([Everything()])
    assert hooks.names == dict.fromkeys(CAPABILITIES, ("everything",))
    assert not hooks.before_tool_call[0].is_async
    assert hooks.after_tool_call[0].is_async
    assert hooks.steering[0].is_async
    assert not hooks.follow_up[0].is_async
    assert not hooks.event_observer[0].is_async
    (transform,) = hooks.context_transform
    assert transform.transform.is_async
    assert transform.should_transform is not None
    assert not transform.should_transform([], None)
    (gate,) = hooks.tool_gate
    assert gate.allowlist.is_async
    assert (gate.priority, gate.is_advisory) == (7, True)
    assert gate.denial_reason is not None
    assert not gate.denial_reason.is_async
    assert gate.denial_reason.call("x", None) == "no x"
    assert gate.suppresses_advisory is not None
    assert gate.suppresses_advisory(None)  # type: ignore[arg-type]


def test_what_goes_with_a_hook_is_optional() -> None:
    hooks = Hooks.of([having(transform_context=taking(2), next_turn_tool_allowlist=taking(1))])
    assert hooks.context_transform[0].should_transform is None
    (gate,) = hooks.tool_gate
    assert gate.denial_reason is None
    assert gate.suppresses_advisory is None
    assert (gate.priority, gate.is_advisory) == (0, False)


def test_a_denial_reason_may_be_async() -> None:
    async def denial_reason(tool_name: str, ctx: Any) -> None: ...

    plugin = having(next_turn_tool_allowlist=taking(1), denial_reason=denial_reason)
    denial = Hooks.of([plugin]).tool_gate[0].denial_reason
    assert denial is not None
    assert denial.is_async


def test_a_gate_may_change_its_priority_and_class_as_it_goes() -> None:
    plugin = SimpleNamespace(next_turn_tool_allowlist=taking(1))
    (gate,) = Hooks.of([plugin]).tool_gate
    plugin.conflict_priority, plugin.tool_gate_class = 3, ToolGateClass.ADVISORY
    assert (gate.priority, gate.is_advisory) == (3, True)


def test_plugins_are_asked_in_the_order_of_registration() -> None:
    one = having(name="one", on_event=taking(1), next_steering_messages=taking(0))
    two = having(name="two", on_event=taking(1))
    three = having(name="three", next_steering_messages=taking(0), on_event=taking(1))
    names = Hooks.of([two, three, one]).names
    assert names["event_observer"] == ("two", "three", "one")
    assert names["steering"] == ("three", "one")
    assert names["tool_gate"] == ()
    assert list(names) == CAPABILITIES


def test_nothing_is_found_in_nothing() -> None:
    assert Hooks.of([]) == Hooks()
    assert Hooks().names == dict.fromkeys(CAPABILITIES, ())


@pytest.mark.parametrize("given", [(TurnEnd,), [TurnEnd], {TurnEnd}])
def test_an_observer_may_name_the_events_it_wants(given: Any) -> None:
    hooks = Hooks.of([having(on_event=taking(1), observes=given), having(on_event=taking(1))])
    assert [hook.observes for hook in hooks.event_observer] == [(TurnEnd,), None]


# --- sync or async, settled once ------------------------------------------------------------------


class SyncCallable:
    def __call__(self, event: AgentEvent) -> None: ...


class AsyncCallable:
    async def __call__(self, event: AgentEvent) -> None: ...

    async def method(self, event: AgentEvent) -> None: ...

    @classmethod
    async def of_class(cls, event: AgentEvent) -> None: ...

    @staticmethod
    async def of_nobody(event: AgentEvent) -> None: ...


async def _async(event: AgentEvent, label: str = "") -> None: ...


def _sync(label: str, event: AgentEvent) -> None: ...


@pytest.mark.parametrize(
    ("hook", "is_async"),
    [
        pytest.param(_async, True, id="function"),
        pytest.param(partial(_async, label="x"), True, id="partial"),
        pytest.param(partial(partial(_async), label="x"), True, id="partial of partial"),
        pytest.param(AsyncCallable(), True, id="object"),
        pytest.param(AsyncCallable().method, True, id="method"),
        pytest.param(AsyncCallable.of_class, True, id="class method"),
        pytest.param(AsyncCallable.of_nobody, True, id="static method"),
        pytest.param(partial(AsyncCallable().method), True, id="partial of method"),
        pytest.param(partial(AsyncCallable()), True, id="partial of object"),
        pytest.param(partial(_sync, "x"), False, id="sync partial"),
        pytest.param(SyncCallable(), False, id="sync object"),
        pytest.param(lambda event: None, False, id="lambda"),
        pytest.param([].append, False, id="builtin"),
        pytest.param({}.update, False, id="builtin without signature"),
        pytest.param(print, False, id="print"),
        pytest.param(max, False, id="max"),
    ],
)
def test_whether_a_hook_is_async_is_read_off_it(hook: Any, is_async: bool) -> None:
    (found,) = Hooks.of([having(on_event=hook)]).event_observer
    assert found.is_async is is_async


def test_the_hooks_of_a_run_do_not_change_when_the_plugin_does() -> None:
    plugin = SimpleNamespace(on_event=_async)
    hooks = Hooks.of([plugin])
    plugin.on_event = SyncCallable()
    assert hooks.event_observer[0].call is _async
    assert hooks.event_observer[0].is_async


# --- what is refused ------------------------------------------------------------------------------


def test_an_object_without_a_hook_is_no_plugin() -> None:
    for nothing in (object(), having(name="hm"), "on_event", having(for_run=taking(0))):
        text = refusal(nothing)
        assert "no hook" in text
        for hook in HOOK_OF.values():
            assert hook in text
    assert "'hm'" in refusal(having(name="hm"))


def test_a_class_is_no_plugin() -> None:
    text = refusal(Everything)
    assert "Everything" in text
    assert "instance" in text


MISSPELT = [
    ("on_before_toolcall", "on_before_tool_call"),
    ("before_tool_call", "on_before_tool_call"),
    ("on_before_tool_calls", "on_before_tool_call"),
    ("after_tool_call", "on_after_tool_call"),
    ("on_after_toolcall", "on_after_tool_call"),
    ("transform_contexts", "transform_context"),
    ("tranform_context", "transform_context"),
    ("on_events", "on_event"),
    ("onevent", "on_event"),
    ("next_steering_message", "next_steering_messages"),
    ("next_steer_messages", "next_steering_messages"),
    ("next_followup_messages", "next_follow_up_messages"),
    ("next_follow_up_message", "next_follow_up_messages"),
    ("next_turn_tools_allowlist", "next_turn_tool_allowlist"),
    ("next_turn_tool_allow_list", "next_turn_tool_allowlist"),
    ("should_transfrom", "should_transform"),
    ("denial_reasons", "denial_reason"),
    ("suppress_advisory_gates", "suppresses_advisory_gates"),
    ("for_runs", "for_run"),
]


@pytest.mark.parametrize(("wrong", "right"), MISSPELT)
def test_a_misspelt_hook_is_refused_with_the_right_name(wrong: str, right: str) -> None:
    alone = having(name="hm", **{wrong: taking(1)})
    other = "next_steering_messages" if "follow" in right else "next_follow_up_messages"
    beside = having(name="hm", **{other: taking(0), wrong: taking(1)})
    for plugin in (alone, beside):
        text = refusal(plugin)
        assert f"'hm' has a method {wrong!r}" in text
        assert f"{right!r}?" in text


@pytest.mark.parametrize("name", ["event", "log_event", "end_turn", "transform", "tools", "gate"])
def test_other_methods_of_a_plugin_are_its_own_business(name: str) -> None:
    plugin = having(on_event=taking(1), _on_events=taking(1), **{name: taking(3)})
    assert Hooks.of([plugin]).names["event_observer"] == ("simple_namespace",)


def test_data_with_a_name_like_a_hook_is_no_misspelt_hook() -> None:
    hooks = Hooks.of([having(on_event=taking(1), on_events=["seen"])])
    assert len(hooks.event_observer) == 1


@pytest.mark.parametrize("method", PARAMETERS)
def test_a_hook_that_cannot_be_called_is_refused_with_its_signature(method: str) -> None:
    count = PARAMETERS[method]
    names = inspect.signature(taking(count)).parameters

    def required_keyword(*args: Any, key: str) -> None: ...

    wrong = [taking(count + 1), required_keyword, *([taking(count - 1)] if count else [])]
    for function in wrong:
        text = refusal(having(name="hm", **{**OWNERS, method: function}))
        assert f"'hm': {method}{inspect.signature(function)}" in text
        right = text.partition("declare ")[2]
        assert right.startswith(f"{method}(self")
        assert right.count(",") == len(names)


@pytest.mark.parametrize("method", PARAMETERS)
def test_more_parameters_are_fine_when_they_need_no_argument(method: str) -> None:
    def with_defaults(a: Any = 0, b: Any = 0, c: Any = 0, *, key: str = "") -> None: ...
    def with_any(*args: Any, **kwargs: Any) -> None: ...

    for function in (with_defaults, with_any):
        plugin = having(**{**OWNERS, method: function})
        assert Hooks.of([plugin]).plugins == (plugin,)


def test_a_method_counts_without_self() -> None:
    class Wrong:
        def on_event(self) -> None: ...

    text = refusal(Wrong())
    assert text.startswith("the plugin 'wrong': on_event() ")
    assert text.endswith("cannot be called; declare on_event(self, event)")


@pytest.mark.parametrize(
    ("method", "value"),
    [*dict.fromkeys(PARAMETERS, "text").items(), ("on_event", None), ("on_event", 3)],
)
def test_a_hook_must_be_a_method(method: str, value: object) -> None:
    text = refusal(having(name="hm", **{**OWNERS, method: value}))
    assert f"{method!r} must be a method, not {value!r}" in text


@pytest.mark.parametrize(
    "method", ["should_transform", "suppresses_advisory_gates", "for_run", "end_run"]
)
def test_what_is_asked_in_passing_must_not_be_async(method: str) -> None:
    async def passing(*args: Any) -> None: ...

    plugin = having(
        transform_context=taking(2), next_turn_tool_allowlist=taking(1), **{method: passing}
    )
    text = refusal(plugin)
    assert repr(method) in text
    assert "plain def" in text


@pytest.mark.parametrize(
    ("method", "owner"),
    [
        ("should_transform", "transform_context"),
        ("denial_reason", "next_turn_tool_allowlist"),
        ("suppresses_advisory_gates", "next_turn_tool_allowlist"),
    ],
)
def test_what_goes_with_a_hook_is_nothing_without_it(method: str, owner: str) -> None:
    plugin = having(on_event=taking(1), **{method: taking(PARAMETERS[method])})
    text = refusal(plugin)
    assert repr(method) in text
    assert repr(owner) in text


def test_every_plugin_is_looked_at() -> None:
    assert "'second'" in refusal(having(on_event=taking(1)), having(name="second"))


def test_a_gate_class_that_does_not_exist_is_refused() -> None:
    text = refusal(having(next_turn_tool_allowlist=taking(1), tool_gate_class="adivsory"))
    assert "tool_gate_class" in text


def test_observes_must_name_classes() -> None:
    text = refusal(having(on_event=taking(1), observes=TurnEnd))
    assert "observes" in text


# --- names ----------------------------------------------------------------------------------------


class HTTPGate2Plugin: ...


class Snake: ...


def test_a_plugin_is_labelled_by_its_name_or_its_class() -> None:
    assert plugin_name(having(name="mine")) == "mine"
    assert plugin_name(Everything()) == "everything"
    assert plugin_name(Snake()) == "snake"
    assert plugin_name(HTTPGate2Plugin()) == "httpgate2_plugin"
    for useless in ("", None, 3, lambda: "x"):
        assert plugin_name(having(name=useless)) == "simple_namespace"


# --- functions as plugins -------------------------------------------------------------------------


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_function_can_be_the_hook_of_any_capability(capability: Capability) -> None:
    async def named(*args: Any) -> None: ...

    plugin = FunctionPlugin(capability, named)
    assert Hooks.of([plugin]).names[capability] == ("named",)
    hook = only_hook(Hooks.of([plugin]), capability)
    inner = {"context_transform": "transform", "tool_gate": "allowlist"}.get(capability)
    bound = getattr(hook, inner) if inner else hook
    assert bound.call is named
    assert bound.is_async
    assert plugin.inheritable_to_child is False
    assert repr(plugin) == "<FunctionPlugin named>"


def test_the_label_of_a_function_plugin() -> None:
    assert FunctionPlugin("event_observer", lambda event: None).name == "event_observer"
    assert FunctionPlugin("steering", lambda: ()).name == "steering"
    assert FunctionPlugin("event_observer", _async).name == "_async"
    assert FunctionPlugin("event_observer", _async, name="mine").name == "mine"
    assert FunctionPlugin("event_observer", AsyncCallable()).name == "AsyncCallable"
    assert FunctionPlugin("event_observer", partial(_async)).name == "partial"
    assert FunctionPlugin("event_observer", [].append).name == "append"


def test_a_function_plugin_can_be_inheritable() -> None:
    assert FunctionPlugin("steering", list, inheritable_to_child=True).inheritable_to_child


def test_a_function_with_the_wrong_parameters_is_refused_as_any_hook() -> None:
    text = refusal(FunctionPlugin("event_observer", taking(0), name="hm"))
    assert "'hm': on_event() cannot be called" in text


def test_function_plugins_need_a_capability_and_a_function() -> None:
    with pytest.raises(ConfigError) as caught:
        FunctionPlugin("on_event", _async)  # type: ignore[arg-type]
    assert "'on_event'" in str(caught.value)
    assert all(capability in str(caught.value) for capability in CAPABILITIES)
    with pytest.raises(ConfigError, match=r"steering.*not \[\]"):
        FunctionPlugin("steering", [])  # type: ignore[arg-type]


# --- one run --------------------------------------------------------------------------------------


class Counting:
    """Keeps state, so it gives every run a fresh one."""

    name = "counting"

    def __init__(self) -> None:
        self.seen = 0

    def for_run(self) -> Counting:
        return Counting()

    def on_event(self, event: AgentEvent) -> None:
        self.seen += 1


def test_a_run_gets_fresh_objects_of_the_plugins_that_offer_them() -> None:
    shared, counting = having(name="shared", on_event=taking(1)), Counting()
    hooks = Hooks.of([shared, counting])
    first, second = hooks.for_run(), hooks.for_run()
    for run in (first, second):
        assert run.plugins[0] is shared
        assert isinstance(run.plugins[1], Counting)
        assert run.names == hooks.names
    assert len({id(p) for p in (counting, first.plugins[1], second.plugins[1])}) == 3
    first.event_observer[1].call(AgentStart())
    assert [p.seen for p in (counting, first.plugins[1], second.plugins[1])] == [0, 1, 0]


def test_without_state_all_runs_share_the_hooks() -> None:
    hooks = Hooks.of([having(on_event=taking(1))])
    assert hooks.for_run() is hooks


def test_a_plugin_that_gives_no_object_for_the_run_is_named() -> None:
    def fail() -> None:
        raise ValueError("no")

    failing = having(name="hm", on_event=taking(1), for_run=fail)
    with pytest.raises(HookError, match="'hm'") as caught:
        Hooks.of([failing]).for_run()
    assert isinstance(caught.value.__cause__, ValueError)
    for useless in (None, having(next_steering_messages=taking(0))):
        forgetful = having(name="hm", on_event=taking(1), for_run=lambda useless=useless: useless)
        with pytest.raises(HookError, match=r"'hm'.*no on_event"):
            Hooks.of([forgetful]).for_run()


def test_at_the_end_of_a_run_the_plugins_that_want_it_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []

    def fail() -> None:
        told.append("failing")
        raise ValueError("no")

    hooks = Hooks.of(
        [
            having(on_event=taking(1), end_run=lambda: told.append("first")),
            having(on_event=taking(1)),
            having(name="hm", on_event=taking(1), end_run=fail),
            having(on_event=taking(1), end_run=lambda: told.append("last")),
        ]
    )
    assert told == []
    hooks.end_run()
    assert told == ["first", "failing", "last"]
    (record,) = caplog.records
    assert "end of the run" in record.getMessage()
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "no"
