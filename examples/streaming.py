"""Read the events of a run in a loop, and leave early."""

import asyncio

from clark_agent import Agent, RunAborted, RunStream, events, tool
from clark_agent.stream import TextChunk
from clark_agent.testing import ScriptedStream, call, say


@tool
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"22 °C and sunny in {city}"


async def show(stream: RunStream) -> None:
    async for event in stream:
        match event:
            case events.MessageUpdate(chunk=TextChunk(delta=delta)):
                print(delta, end="", flush=True)
            case events.ToolExecutionStart():
                print(f"\n→ {event.tool_name}({event.args})")
            case events.ToolExecutionEnd():
                print(f"← {event.result.plain_text}")
            case _:
                pass


async def main() -> None:
    model = ScriptedStream([say("Let me see.", call("weather", city="Lisbon")), "Sunny, 22 °C."])
    agent = Agent(model, tools=[weather], system_prompt="You know the weather.")
    async with agent.stream("Lisbon?") as stream:
        await show(stream)
    print(f"\n({stream.result.outcome}, {len(stream.result.messages)} messages)")

    agent = Agent(ScriptedStream(["It was a dark and stormy night. " * 1000]))
    async with agent.stream("A story!") as stream:
        words = 0
        async for _ in stream.text_stream():
            words += 1
            if words == 7:
                break
    # Leaving the block has stopped the run: its stream is closed, and no tool is running.
    try:
        print(stream.result)
    except RunAborted as error:
        print(f"{words} words were enough; {error}")


if __name__ == "__main__":
    asyncio.run(main())
