"""Limit what an agent and its helper may spend.

Both share a budget of money and time, and the helper has a budget of turns of its own. The helper
never finishes: it gets a warning, ignores it, and is stopped. The agent gets what the helper has so
far, and finishes with that.
"""

import asyncio

from msgspec.structs import replace

from clark_agent import AgentContext, Budget, LoopConfig, Price, Usage, agent_tool, run, tool
from clark_agent.events import AgentEvent, ChildRunEvent, MessageEnd, ToolExecutionEnd
from clark_agent.testing import ScriptedStream, call, say
from clark_agent.types import AssistantMessage, SystemMessage, ToolCall

PRICES = {"small": Price(input=0.25, output=1.25), "large": Price(input=3.0, output=15.0)}


@tool
async def search(query: str) -> str:
    """Search the archive."""
    return "nothing"


def paid(text: str, *calls: ToolCall) -> AssistantMessage:
    """Return an answer with the tokens that a provider would report."""
    return replace(say(text, *calls), usage=Usage(9_000, 1_000))


def show(event: AgentEvent) -> None:
    match event:
        case ChildRunEvent(event=MessageEnd(message=SystemMessage(content=text))):
            print(f"to the helper: {text}")
        case ToolExecutionEnd():
            print(f"from the helper: {event.result.plain_text}")
        case _:
            pass


async def main() -> None:
    searches = ScriptedStream([paid("No trace yet.", call("search", query="p"))], at_end="repeat")
    few = Budget(turns=4, message="One turn is left: say what you have.")
    archivist = LoopConfig(stream=searches, tools=[search], model_id="small", budget=few)
    helper = agent_tool("helper", "Searches the archive.", archivist)
    model = ScriptedStream([paid("", call("helper", task="Find it.")), paid("It is lost.")])
    budget = Budget(cost=0.50, seconds=60, prices=PRICES)
    config = LoopConfig(
        stream=model, tools=[helper], model_id="large", budget=budget, event_sink=show
    )
    result = await run("Where is the missing page?", AgentContext("You are thrifty."), config)
    assert result.spent is not None
    print(f"{result.text} ({result.spent.turns} turns for {result.spent.cost:.3f})")


if __name__ == "__main__":
    asyncio.run(main())
