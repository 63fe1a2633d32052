"""Mistakes that a type checker must report, each on the line that says so. Never run."""

from clark_agent import (
    Agent,
    AgentContext,
    BeforeToolCallContext,
    Budget,
    ChannelSteering,
    LoopConfig,
    RunContext,
    ToolContext,
    ToolRegistry,
    UserMessage,
    agent_tool,
    tool,
)
from clark_agent.testing import ScriptedStream


@tool
def shout(text: str) -> str:
    return text.upper()


shout(5)  # E: arg-type
shout()  # E: call-arg
length: int = shout("x")  # E: assignment
tool(shout.__wrapped__, timeout="soon")  # E: call-overload
ToolRegistry([5])  # E: list-item

UserMessage(content=5)  # E: arg-type
UserMessage("x").content = "y"  # E: misc
AgentContext(messages=["hello"])  # E: arg-type


class TakesTooMuch:
    def on_before_tool_call(self, ctx: BeforeToolCallContext, extra: int) -> None: ...


class SaysTheWrongThing:
    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> bool:
        return True


class TakesTheWrongThing:
    def on_event(self, event: int) -> None: ...


class NoHook:
    pass


stream = ScriptedStream([])
LoopConfig()  # E: call-arg
LoopConfig(stream=5)  # E: arg-type
LoopConfig(stream=stream, max_iterations="3")  # E: arg-type
LoopConfig(stream=stream, plugins=[TakesTooMuch()])  # E: list-item
LoopConfig(stream=stream, plugins=[SaysTheWrongThing()])  # E: list-item
LoopConfig(stream=stream, plugins=[TakesTheWrongThing()])  # E: list-item
LoopConfig(stream=stream, plugins=[NoHook()])  # E: list-item
LoopConfig(stream=stream, budget=Budget(turns="3"))  # E: arg-type
agent_tool("ask", "Asks.", stream)  # E: arg-type
_ = ChannelSteering().handle.follow_up(5)  # E: arg-type


class Shop: ...


class Bank: ...


@tool
def stock(ctx: ToolContext[Shop], item: str) -> str:
    ctx.deps.balance  # E: attr-defined
    return item


@tool
def balance(ctx: ToolContext[Bank]) -> str:
    return ""


def prompt(ctx: RunContext[Bank]) -> str:
    return ""


agent = Agent(stream, tools=[stock], output=int, deps_type=Shop)
text: str = agent.run_sync("x", deps=Shop()).output  # E: assignment
agent.run_sync("x", deps=Bank())  # E: arg-type
agent.run_sync("x")  # E: call-arg
agent.conversation(deps=Bank())  # E: arg-type
Agent(stream, tools=[balance], deps_type=Shop)  # E: misc
Agent(stream, tools=[balance], output=int, deps_type=Shop)  # E: misc
Agent(stream, system_prompt=prompt, deps_type=Shop)  # E: arg-type
Agent(stream, temperature="hot")  # E: call-overload
Agent(5)  # E: call-overload
