"""The smallest agent: a model, a prompt, an answer.

The model is scripted, so this runs without a key and a network. To use a real one, replace it with
``connect("anthropic:claude-sonnet-5")`` from `clark_agent.transports`.
"""

import asyncio

from clark_agent import AgentContext, LoopConfig, run
from clark_agent.testing import ScriptedStream


async def main() -> None:
    config = LoopConfig(stream=ScriptedStream(["Hello! How can I help?"]))
    result = await run("Hi there.", AgentContext("You are a friendly assistant."), config)
    print(result.text)
    print(f"({result.outcome}, {len(result.messages)} messages)")


if __name__ == "__main__":
    asyncio.run(main())
