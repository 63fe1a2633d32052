"""The smallest agent: a model, a prompt, an answer.

The model is scripted, so this runs without a key and a network. To use a real one, pass its name:
``Agent("anthropic:claude-sonnet-5")``.
"""

import asyncio

from clark_agent import Agent
from clark_agent.testing import ScriptedStream


async def main() -> None:
    agent = Agent(ScriptedStream(["Hello! How can I help?"]), system_prompt="You are friendly.")
    result = await agent.run("Hi there.")
    print(result.output)
    print(f"({result.outcome}, {len(result.messages)} messages)")


if __name__ == "__main__":
    asyncio.run(main())
