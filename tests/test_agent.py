"""An `Agent` is a config and a system prompt; whatever it does, the functions below it do."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec import Struct

from clark_agent import (
    Agent,
    AgentContext,
    BeforeToolCallContext,
    Block,
    Budget,
    CancellationToken,
    ConfigError,
    HookError,
    LoopConfig,
    ModelRetry,
    OutputError,
    RunAborted,
    RunContext,
    RunIdentity,
    ToolContext,
    UserMessage,
    events,
    finish_tool,
    run,
    tool,
)
from clark_agent import agent as agent_module
from clark_agent.run_log import MemoryStore, RunLog, resume
from clark_agent.testing import RecordingSink, ScriptedStream, call
from clark_agent.tools import function
from clark_agent.tools.function import _FLAGS


class Verdict(Struct):
    score: int


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name


@tool
def shop_name(ctx: ToolContext[Shop]) -> str:
    """The name of the shop."""
    return ctx.deps.name


def scripted(*script: Any) -> ScriptedStream:
    return ScriptedStream([*script])


async def test_an_agent_runs() -> None:
    stream = scripted("Hello.")
    result = await Agent(stream, system_prompt="Be brief.").run("Hi.")
    assert (result.output, result.text, result.outcome) == ("Hello.", "Hello.", "done")
    assert stream.requests[0].system_prompt == "Be brief."


def test_run_sync() -> None:
    assert Agent(scripted("Hello.")).run_sync("Hi.").output == "Hello."


async def test_stream() -> None:
    async with Agent(scripted("Hello there.")).stream("Hi.") as stream:
        text = [delta async for delta in stream.text_stream()]
    assert "".join(text) == stream.result.output == "Hello there."


async def test_conversation() -> None:
    conversation = Agent(scripted("One.", "Two."), system_prompt="Count.").conversation()
    assert (await conversation.send("?")).output == "One."
    assert (await conversation.send("?")).output == "Two."
    assert conversation.context.system_prompt == "Count."
    assert len(conversation.messages) == 4


async def test_a_saved_conversation(tmp_path: Path) -> None:
    first = Agent(scripted("One."), system_prompt=lambda ctx: "Count.").conversation()
    await first.send("?")
    first.save(tmp_path / "talk.json")
    stream = scripted("Two.")
    agent = Agent(stream, system_prompt=lambda ctx: f"After {len(ctx.messages)}.")
    again = agent.load_conversation(tmp_path / "talk.json")
    assert (await again.send("?")).output == "Two."
    assert stream.requests[0].system_prompt == "After 2."


async def test_as_tool() -> None:
    below = Agent(scripted("In Lisbon."), name="research", system_prompt="Search.")
    agent = Agent(
        scripted(call("research", task="Where?"), "Done."),
        tools=[below.as_tool("Finds things out.")],
    )
    result = await agent.run("?")
    assert result.messages[2].plain_text == "In Lisbon."


def test_a_tool_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="as_tool"):
        Agent(scripted()).as_tool("Does something.")
    assert Agent(scripted()).as_tool("Does something.", name="helper").name == "helper"


async def test_the_messages_before_the_prompt() -> None:
    stream = scripted("You said hello.")
    agent = Agent(stream)
    history = (UserMessage("Hello."), UserMessage("Again."))
    result = await agent.run("What did I say?", messages=history)
    assert [m.plain_text for m in stream.requests[0].messages][:2] == ["Hello.", "Again."]
    assert len(result.messages) == 2


async def test_without_a_prompt_the_messages_are_continued() -> None:
    agent = Agent(scripted("Hello."))
    assert (await agent.run(None, messages=[UserMessage("Hi.")])).output == "Hello."


async def test_identity_and_signal_are_passed_on() -> None:
    sink, token = RecordingSink(), CancellationToken()
    agent = Agent(scripted("Hello."), event_sink=sink)
    await agent.run("Hi.", identity=RunIdentity.root("r1"))
    (identified,) = sink.of(events.RunIdentified)
    assert identified.identity.run_id == "r1"
    token.cancel("enough")
    for start in (agent.run("Hi.", signal=token), _read(agent, token)):
        with pytest.raises(RunAborted, match="enough"):
            await start
    with pytest.raises(RunAborted, match="enough"):
        await asyncio.to_thread(agent.run_sync, "Hi.", signal=token)


async def _read(agent: Agent, token: CancellationToken) -> None:
    async with agent.stream("Hi.", signal=token) as stream:
        async for _ in stream:
            pass


# --- it is a value ----------------------------------------------------------------------------


def test_an_agent_cannot_be_changed() -> None:
    agent = Agent(scripted(), name="a")
    with pytest.raises(AttributeError, match="replace"):
        agent.name = "b"  # type: ignore[misc]
    assert agent.name == "a"


async def test_replace_changes_what_it_is_given_and_nothing_else() -> None:
    agent: Agent[Verdict, None] = Agent(
        scripted(), output=Verdict, name="judge", system_prompt="Judge.", max_iterations=7
    )
    stream = scripted(call("finish", score=3))
    other = agent.replace(model=stream)
    assert (await other.run("?")).output == Verdict(3)
    assert (other.name, other.system_prompt, other.config.max_iterations) == ("judge", "Judge.", 7)
    assert agent.config.stream is not stream


def test_every_setting_of_the_config_is_one_of_the_agent() -> None:
    own = {"stream", "tools", "output"}
    of_the_config = set(LoopConfig.__struct_fields__) - own
    assert declared(agent_module, "AgentSettings") == of_the_config | {"max_result_chars"}


def declared(module: ModuleType, name: str) -> set[str]:
    """The keys of a TypedDict that exists for type checkers only."""
    assert module.__file__ is not None
    (found,) = [
        node
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    fields = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
    return {field.id for field in fields if isinstance(field, ast.Name)}


def test_every_option_of_tool_is_typed() -> None:
    assert declared(function, "ToolFlags") == set(_FLAGS)


def test_there_is_a_cap_on_turns() -> None:
    assert Agent(scripted()).config.max_iterations == 50
    assert Agent(scripted(), max_iterations=None).config.max_iterations is None
    assert LoopConfig(stream=scripted()).max_iterations is None


async def test_an_agent_warns_at_turn_45() -> None:
    @tool
    async def work() -> str:
        """Work."""
        return "more"

    stream = ScriptedStream([call("work")], at_end="repeat")
    result = await Agent(stream, tools=[work]).run("Go.")
    assert result.outcome == "hit_max_iterations"
    told = [n for n, request in enumerate(stream.requests, 1) if _is_warned(request)]
    assert (told[0], told[-1]) == (46, 50)


def _is_warned(request: Any) -> bool:
    return any(message.role == "system" for message in request.messages)


def test_the_model_id_is_that_of_the_transport() -> None:
    class Named(ScriptedStream):
        model = "large-1"

    assert Agent(Named([])).config.model_id == "large-1"
    assert Agent(Named([]), model_id="mine").config.model_id == "mine"
    assert Agent(scripted()).config.model_id is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "nonsense"},
        {"model": 5},
        {"tools": 5},
        {"tools": "read_file"},
        {"max_iters": 3},
        {"temperature": "hot"},
        {"system_prompt": 5},
        {"name": "not a name"},
        {"output": object},
        {"output_mode": "telepathy"},
        {"deps_type": "Shop"},
    ],
)
def test_mistakes_are_errors_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Agent(**{"model": scripted(), **wrong})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("instructions", "system_prompt"), ("output_type", "output"), ("temprature", "temperature")],
)
def test_a_name_from_elsewhere_is_an_error_with_the_one_that_is_meant(
    wrong: str, meant: str
) -> None:
    with pytest.raises(ConfigError, match=f"{wrong}.*did you mean '{meant}'"):
        Agent(**dict[str, Any]({"model": scripted(), wrong: "x"}))


@pytest.mark.parametrize(
    ("wrong", "meant"), [("message_history", "messages"), ("mesages", "messages"), ("x", None)]
)
async def test_an_unknown_option_of_a_run_is_an_error(wrong: str, meant: str | None) -> None:
    agent: Any = Agent(scripted("Hello."))
    expected = f"did you mean '{meant}'" if meant else "unknown argument 'x'"
    with pytest.raises(ConfigError, match=expected):
        await agent.run("Hi.", **{wrong: ()})
    with pytest.raises(ConfigError, match=expected):
        agent.stream("Hi.", **{wrong: ()})
    with pytest.raises(ConfigError, match=expected):
        await asyncio.to_thread(agent.run_sync, "Hi.", **{wrong: ()})


def test_tools_may_come_from_a_generator() -> None:
    agent = Agent(scripted(), tools=(made for made in [shop_name]), deps_type=Shop)
    assert agent.config.registry.names == ("shop_name", "read_result")
    assert agent.replace(name="x").config.registry.names == ("shop_name", "read_result")


# --- dependencies -----------------------------------------------------------------------------


async def test_deps_reach_tools_prompts_and_validators() -> None:
    def prompt(ctx: RunContext[Shop]) -> str:
        return f"You work for {ctx.deps.name}."

    def check(value: Verdict, ctx: RunContext[Shop]) -> None:
        if value.score < len(ctx.deps.name):
            raise ModelRetry("Too low.")

    stream = scripted(call("shop_name"), call("finish", score=1), call("finish", score=9))
    agent = Agent(
        stream,
        tools=[shop_name],
        system_prompt=prompt,
        output=Verdict,
        output_validators=[check],
    )
    result = await agent.run("?", deps=Shop("Alba"))
    assert result.output == Verdict(9)
    assert stream.requests[0].system_prompt == "You work for Alba."
    assert [m.plain_text for m in result.messages if m.role == "tool_result"] == [
        "Alba",
        "Too low.",
        "The answer was accepted.",
    ]


async def test_a_prompt_may_be_async_and_sees_the_conversation() -> None:
    async def prompt(ctx: RunContext[None]) -> str:
        await asyncio.sleep(0)
        return f"{len(ctx.messages)} messages so far."

    stream = scripted("One.", "Two.")
    conversation = Agent(stream, system_prompt=prompt).conversation()
    await conversation.send("?")
    await conversation.send("?")
    assert [request.system_prompt for request in stream.requests] == [
        "0 messages so far.",
        "2 messages so far.",
    ]


async def test_a_prompt_of_a_child_has_the_deps() -> None:
    stream = scripted("Done.")
    below = Agent(
        stream,
        name="below",
        system_prompt=lambda ctx: f"For {ctx.deps.name}.",
        deps_type=Shop,
    )
    agent = Agent(scripted(call("below", task="?"), "Done."), tools=[below.as_tool("Helps.")])
    await agent.run("?", deps=Shop("Alba"))
    assert stream.requests[0].system_prompt == "For Alba."


@pytest.mark.parametrize("prompt", [lambda ctx: 5, lambda ctx: ctx.deps.name])
async def test_a_prompt_that_fails_ends_the_run_before_it_begins(
    prompt: Callable[[Any], Any],
) -> None:
    stream = scripted("Hello.")
    agent = Agent(stream, system_prompt=prompt)
    with pytest.raises(HookError, match="system prompt"):
        await agent.run("?")
    with pytest.raises(HookError, match="system prompt"):
        await agent.conversation().send("?")
    assert stream.requests == []


async def test_deps_of_the_wrong_type_are_rejected() -> None:
    agent = Agent(scripted("Hello."), tools=[shop_name], deps_type=Shop)
    with pytest.raises(ConfigError, match="must be a Shop, not str"):
        await agent.run("?", deps="Alba")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a Shop, not NoneType"):
        agent.conversation()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="must be a Shop, not NoneType"):
        agent.stream("?")  # type: ignore[call-arg]


# --- with the rest ----------------------------------------------------------------------------


async def test_the_output_is_never_silently_none() -> None:
    agent = Agent(scripted(*["No."] * 9), output=Verdict, output_retries=1)
    with pytest.raises(OutputError) as caught:
        await agent.run("?")
    assert len(caught.value.messages) == 4
    assert AgentContext().extend(caught.value).messages


async def test_a_logged_run_of_an_agent_is_resumed() -> None:
    store = MemoryStore()
    agent = Agent(
        scripted(call("shop_name"), KeyboardInterrupt()),
        tools=[shop_name],
        output=Verdict,
        run_log=RunLog(store),
        budget=Budget(turns=9),
    )
    with pytest.raises(KeyboardInterrupt):
        await agent.run("?", deps=Shop("Alba"))
    (summary,) = store.runs()
    again = agent.replace(model=scripted(call("finish", score=4)))
    result = await resume(store, summary.run_id, again.config, deps=Shop("Alba"))
    assert result.output == Verdict(4)


async def test_the_config_of_an_agent_runs_one_floor_down() -> None:
    agent = Agent(scripted("Hello."))
    assert (await run("Hi.", AgentContext("Be brief."), agent.config)).text == "Hello."


def test_generics_may_be_written_with_fewer_parameters() -> None:
    made = Agent[Verdict](scripted(), output=Verdict)
    assert isinstance(made, Agent)
    assert "Agent" in repr(Agent[Verdict, Shop])
    assert repr(Agent(scripted(), name="judge")) == "<Agent judge>"


# --- what an agent must not do ----------------------------------------------------------------


async def test_plugins_from_a_generator_are_kept_by_replace() -> None:
    class Veto:
        def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Block:
            return Block("no")

    agent = Agent(scripted(), tools=[shop_name], plugins=(plugin for plugin in [Veto()]))
    other = agent.replace(model=scripted(call("shop_name"), "Done."))
    result = await other.run("?", deps=Shop("Alba"))
    assert result.messages[2].plain_text == "no"


def test_an_agent_cannot_be_taken_apart() -> None:
    class Mine(Agent[str, None]):
        pass

    agent = Mine(scripted())
    with pytest.raises(AttributeError, match="immutable"):
        del agent._config
    assert type(agent.replace(name="x")) is Mine


def test_a_second_final_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fin' ends the run with an answer of its own"):
        Agent(scripted(), output=int, tools=[finish_tool(Verdict, name="fin")])


async def test_a_prompt_function_can_be_stopped() -> None:
    async def slow(ctx: RunContext[None]) -> str:
        await asyncio.Event().wait()
        return ""

    agent, token = Agent(scripted("Hello."), system_prompt=slow), CancellationToken()
    task = asyncio.create_task(agent.run("Hi.", signal=token))
    await asyncio.sleep(0)
    token.cancel("enough")
    with pytest.raises(RunAborted, match="enough") as caught:
        await task
    assert [message.plain_text for message in caught.value.messages] == ["Hi."]
    with pytest.raises(HookError, match=r"0\.01 seconds"):
        await agent.replace(hook_timeout=0.01).run("Hi.")


async def test_a_failing_prompt_does_not_lose_the_message() -> None:
    conversation = Agent(scripted("Hello."), system_prompt=lambda ctx: 5).conversation()  # type: ignore[arg-type,return-value]
    with pytest.raises(HookError) as caught:
        await conversation.send("Hi.")
    assert [message.plain_text for message in caught.value.messages] == ["Hi."]
    assert [message.plain_text for message in conversation.messages] == ["Hi."]


async def test_the_deps_of_a_child_are_checked() -> None:
    below = Agent(scripted("Done."), name="below", deps_type=Shop)
    with pytest.raises(ConfigError, match="must be a Shop"):
        below.as_tool("Helps.", deps=5)
    agent = Agent(scripted(call("below", task="?"), "Done."), tools=[below.as_tool("Helps.")])
    result = await agent.run("?", deps=5)  # type: ignore[arg-type]
    assert "must be a Shop" in result.messages[2].plain_text


@pytest.mark.parametrize("wrong", [{"signal": 5}, {"messages": 5}, {"messages": "text"}])
async def test_options_of_the_wrong_type_are_errors(wrong: dict[str, Any]) -> None:
    agent: Any = Agent(scripted("Hello."))
    with pytest.raises((TypeError, ConfigError), match="must be"):
        await agent.run("Hi.", **wrong)
    with pytest.raises((TypeError, ConfigError), match="must be"):
        agent.run_sync("Hi.", **wrong)
