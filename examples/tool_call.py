"""The model calls a tool, gets its result, and answers. The tool reports progress meanwhile."""

import asyncio

from clark_agent import Agent, ToolContext, events, tool
from clark_agent.testing import ScriptedStream, call


@tool
async def count_words(ctx: ToolContext, text: str) -> int:
    """Count the words of a text.

    Args:
        text: What to count.
    """
    await ctx.update("counting …")
    return len(text.split())


def show(event: events.AgentEvent) -> None:
    match event:
        case events.ToolExecutionStart():
            print(f"→ {event.tool_name}({event.args})")
        case events.ToolExecutionUpdate():
            print(f"  {event.partial.plain_text}")
        case events.ToolExecutionEnd():
            print(f"← {event.result.plain_text}")
        case _:
            pass


async def main() -> None:
    model = ScriptedStream([call("count_words", text="to be or not to be"), "Six words."])
    agent = Agent(model, tools=[count_words], system_prompt="You count words.", event_sink=show)
    result = await agent.run("How many words?")
    print(result.output)


if __name__ == "__main__":
    asyncio.run(main())
