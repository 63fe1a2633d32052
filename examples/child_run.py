"""A tool that runs an agent of its own, with a prompt and an identity that names its parent."""

import asyncio

from clark_agent import AgentContext, LoopConfig, RunIdentity, ToolContext, run, tool
from clark_agent.testing import ScriptedStream, call

PARENT = AgentContext("You delegate research.", identity=RunIdentity.root("parent"))

child_config = LoopConfig(stream=ScriptedStream(["Rust 1.0 came out in May 2015."]))


@tool
async def research(question: str, ctx: ToolContext) -> str:
    """Let a researcher find out.

    Args:
        question: What to find out.
    """
    context = PARENT.spawn_child("You are a careful researcher.")
    result = await run(question, context, child_config.child(max_iterations=10), ctx.signal)
    assert context.identity is not None
    print(f"child of {context.identity.parent_run_id}: {result.text}")
    return result.text


async def main() -> None:
    model = ScriptedStream([call("research", question="When was Rust 1.0?"), "In May 2015."])
    config = LoopConfig(stream=model, tools=[research])
    result = await run("When was Rust 1.0 released?", PARENT, config)
    print(result.text)


if __name__ == "__main__":
    asyncio.run(main())
