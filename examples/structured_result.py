"""A terminal tool whose arguments are the answer: the run ends with a typed value.

The first try of the model does not fit the type. It is told what is wrong and tries again.
"""

import asyncio
from typing import Literal

import msgspec

from clark_agent import AgentContext, LoopConfig, ToolResult, ToolResultMessage, run, tool
from clark_agent.testing import ScriptedStream, call


class Verdict(msgspec.Struct):
    """What a review comes to."""

    decision: Literal["approve", "reject"]
    score: int


@tool
async def deliver(verdict: Verdict) -> ToolResult:
    """Hand over the final verdict."""
    return ToolResult.terminal("Delivered.", details=msgspec.to_builtins(verdict))


async def main() -> None:
    model = ScriptedStream(
        [
            call("deliver", decision="maybe", score=7),
            call("deliver", decision="approve", score=9),
        ]
    )
    config = LoopConfig(stream=model, tools=[deliver], force_tool_call=True)
    result = await run("Review this change.", AgentContext("You review."), config)
    for message in result.messages:
        if isinstance(message, ToolResultMessage):
            print(message.plain_text)
    last = result.messages[-1]
    assert isinstance(last, ToolResultMessage)
    print(msgspec.convert(last.details, Verdict))


if __name__ == "__main__":
    asyncio.run(main())
