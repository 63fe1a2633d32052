"""End a run with a typed value: the arguments of the last call are the answer.

The first answer of the model does not fit the type. The model gets the reason and tries again.
"""

import asyncio
from typing import Literal

import msgspec

from clark_agent import AgentContext, LoopConfig, ToolResultMessage, finish_tool, run
from clark_agent.testing import ScriptedStream, call


class Verdict(msgspec.Struct):
    """The result of a review."""

    decision: Literal["approve", "reject"]
    score: int


async def main() -> None:
    model = ScriptedStream(
        [
            call("finish", decision="maybe", score=7),
            call("finish", decision="approve", score=9),
        ]
    )
    config = LoopConfig(stream=model, tools=[finish_tool(Verdict)], force_tool_call=True)
    result = await run("Review this change.", AgentContext("You review."), config)
    for message in result.messages:
        if isinstance(message, ToolResultMessage):
            print(message.plain_text)
    verdict: Verdict = result.output
    print(verdict)


if __name__ == "__main__":
    asyncio.run(main())
