"""Keep a conversation over several runs, continue after a failure, and save it to a file."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from clark_agent import Agent, Conversation, StreamError
from clark_agent.testing import ScriptedStream


async def main() -> None:
    model = ScriptedStream(
        ["Hello Ada.", ConnectionError("no route to host"), "A machine that weaves numbers."]
    )
    agent = Agent(model, system_prompt="You are a historian.")
    conversation = agent.conversation()

    result = await conversation.send("I am Ada.")
    print(result.output)

    try:
        await conversation.send("What is an engine?")
    except StreamError as error:
        print(f"({error.__cause__}; {len(conversation.messages)} messages are safe)")
    result = await conversation.send()  # no new prompt: ask again
    print(result.output)

    with TemporaryDirectory() as folder:
        path = Path(folder, "talk.json")
        conversation.save(path)
        agent = agent.replace(model=ScriptedStream(["You are Ada."]))  # maybe on another day
        conversation = Conversation.load(path, agent.config)

    result = await conversation.send("Who am I?")
    print(result.text)
    for message in conversation.messages:
        print(f"  {message.plain_text}")


if __name__ == "__main__":
    asyncio.run(main())
