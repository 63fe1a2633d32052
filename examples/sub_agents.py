"""Use agents as tools of another agent, and receive their events.

Two researchers work at the same time. Each event says which run it belongs to.
"""

import asyncio

from clark_agent import Agent, events
from clark_agent.testing import ScriptedStream, call

rust = Agent(
    ScriptedStream(["Rust 1.0 came out in May 2015."]),
    name="ask_about_rust",
    system_prompt="You are a careful researcher.",
    max_iterations=10,
)
go = rust.replace(model=ScriptedStream(["Go 1.0 came out in March 2012."]), name="ask_about_go")


def show(event: events.AgentEvent) -> None:
    match event:
        case events.ToolExecutionStart():
            print(f"→ {event.tool_name}: {event.args['task']}")
        case events.ChildRunEvent(event=events.AgentEnd(messages=messages)):
            print(f"  {event.tool_call_id}, depth {event.identity.depth}: {len(messages)} messages")
        case events.ToolExecutionEnd():
            print(f"← {event.result.plain_text} ({event.result.details['outcome']})")
        case _:
            pass


async def main() -> None:
    model = ScriptedStream(
        [
            [
                call("ask_about_rust", task="When was Rust 1.0 released?"),
                call("ask_about_go", task="When was Go 1.0 released?"),
            ],
            "Go is the elder, by three years.",
        ]
    )
    tools = [
        rust.as_tool("A researcher who knows the history of Rust."),
        go.as_tool("A researcher who knows the history of Go.", timeout=60),
    ]
    agent = Agent(model, tools=tools, system_prompt="You delegate.", event_sink=show)
    result = await agent.run("Which is older, Rust or Go?")
    print(result.output)


if __name__ == "__main__":
    asyncio.run(main())
