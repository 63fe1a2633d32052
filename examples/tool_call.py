"""The model calls a tool, gets its result, and answers. The tool reports progress meanwhile."""

import asyncio

from clark_agent import AgentContext, LoopConfig, ToolContext, events, run, tool
from clark_agent.testing import ScriptedStream, call


@tool
async def count_words(text: str, ctx: ToolContext) -> int:
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
    config = LoopConfig(stream=model, tools=[count_words], event_sink=show)
    result = await run("How many words?", AgentContext("You count words."), config)
    print(result.text)


if __name__ == "__main__":
    asyncio.run(main())
