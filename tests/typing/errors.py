"""Mistakes that a type checker must report, each on the line that says so. Never run."""

from clark_agent import (
    Agent,
    AgentContext,
    BeforeToolCallContext,
    Budget,
    ChannelSteering,
    LoopConfig,
    RunContext,
    Suspend,
    ToolContext,
    ToolRegistry,
    ToolSuspended,
    UserMessage,
    agent_tool,
    tool,
)
from clark_agent.run_log import (
    Allow,
    Deny,
    MemoryStore,
    RunLog,
    advance,
    decide,
    deliver,
    steer,
    waiting_for,
)
from clark_agent.testing import ScriptedStream
from clark_agent.toolkit import SUSPEND, ApprovalGate
from clark_agent.waiting import Decision, Expired


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


Suspend(expires_in="an hour")  # E: arg-type
Suspend(until=1.5)  # E: arg-type
Suspend(assignee=["ada"])  # E: arg-type
Suspend(who="ada")  # E: call-arg
ToolSuspended("why", 3600)  # E: call-arg
Deny(reason=5)  # E: arg-type
ApprovalGate(SUSPEND, assignee=5)  # E: arg-type
decision: Decision = Expired(1)  # E: assignment

store = MemoryStore()
RunLog(store, mail_every="often")  # E: arg-type


async def wait_for_people() -> None:
    await decide(store, "run-1", "request-1", True)  # E: arg-type
    await decide(store, "run-1", "request-1", Expired(1))  # E: arg-type
    await decide(store, "run-1", "request-1", Allow(), "ada")  # E: call-arg
    await advance(store, "run-1", agent.config)  # E: arg-type
    await advance(store, "run-1", agent, 5)  # E: arg-type
    steer(store, "run-1", "Faster.", "soon")  # E: arg-type
    deliver(store, "run-1")  # E: call-arg
    waiting_for(store, assignee=agent)  # E: arg-type
