"""End a run with a typed value.

The first answer of the model does not fit the type. The model gets the reason and tries again.
"""

import asyncio
from typing import Literal

import msgspec

from clark_agent import Agent, ToolResultMessage
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
    agent = Agent(model, output=Verdict, system_prompt="You review.")
    result = await agent.run("Review this change.")
    for message in result.messages:
        if isinstance(message, ToolResultMessage):
            print(message.plain_text)
    print(result.output)


if __name__ == "__main__":
    asyncio.run(main())
