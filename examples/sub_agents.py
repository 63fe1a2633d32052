"""Use agents as tools of another agent, and receive their events.

Two researchers work at the same time. Each event says which run it belongs to.
"""

import asyncio

from clark_agent import AgentContext, LoopConfig, agent_tool, events, run
from clark_agent.testing import ScriptedStream, call

rust = agent_tool(
    "ask_about_rust",
    "A researcher who knows the history of Rust.",
    LoopConfig(stream=ScriptedStream(["Rust 1.0 came out in May 2015."]), max_iterations=10),
    system_prompt="You are a careful researcher.",
)
go = agent_tool(
    "ask_about_go",
    "A researcher who knows the history of Go.",
    LoopConfig(stream=ScriptedStream(["Go 1.0 came out in March 2012."]), max_iterations=10),
    system_prompt="You are a careful researcher.",
    timeout=60,
)


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
    config = LoopConfig(stream=model, tools=[rust, go], event_sink=show)
    result = await run("Which is older, Rust or Go?", AgentContext("You delegate."), config)
    print(result.text)


if __name__ == "__main__":
    asyncio.run(main())
