"""A plugin that checks tool calls before they run: it can block, rewrite or answer them.

The details of each result name the decision, so you can see why a call did not run.
"""

import asyncio

from clark_agent import (
    AgentContext,
    BeforeToolCallContext,
    Block,
    LoopConfig,
    Rewrite,
    ToolResultMessage,
    run,
    tool,
)
from clark_agent.plugins.base import BeforeToolDecision
from clark_agent.testing import ScriptedStream, call


@tool
def delete(path: str) -> str:
    """Delete a file."""
    return f"{path} is gone"  # this example deletes nothing


class Guard:
    """Keeps deletions inside the workspace."""

    name = "guard"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
        path = ctx.args["path"]
        if ".." in path:
            return Block("Paths with '..' are not allowed. Name the file inside the workspace.")
        if not path.startswith("/workspace/"):
            return Rewrite({"path": f"/workspace/{path}"})
        return None


async def main() -> None:
    model = ScriptedStream(
        [
            [call("delete", path="../etc/passwd"), call("delete", path="notes.txt")],
            "One was refused, the other is done.",
        ]
    )
    config = LoopConfig(stream=model, tools=[delete], plugins=[Guard()])
    result = await run("Clean up.", AgentContext("You tidy up."), config)
    for message in result.messages:
        if isinstance(message, ToolResultMessage):
            print(f"{message.plain_text}\n    {message.details}")
    print(result.text)


if __name__ == "__main__":
    asyncio.run(main())
