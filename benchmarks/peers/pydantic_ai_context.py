"""Pydantic AI in `benchmarks.context`: `SummarizingCompaction` of its harness.

Given as JSON: the server, the size of the conversation, and the settings of the compaction. The
rules that the user wants kept are pinned, as its documentation shows.
"""

import asyncio
import json
import sys

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai_harness import SummarizingCompaction
from pydantic_ai_harness.compaction import pin

from benchmarks.context_script import SYSTEM, Script

NO_LIMIT = UsageLimits(request_limit=None)


def tools_of(script):
    async def read_file(path: str, offset: int, limit: int) -> str:
        """Read lines of a file."""
        return script.result("read_file", path=path, offset=offset, limit=limit)

    async def run_command(command: str) -> str:
        """Run a command in the shell, and return what it prints."""
        return script.result("run_command", command=command)

    async def search(pattern: str, path: str) -> str:
        """Search files for a regular expression."""
        return script.result("search", pattern=pattern, path=path)

    async def edit_file(path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file."""
        return script.result("edit_file", path=path, old=old, new=new)

    return [read_file, run_command, search, edit_file]


async def main(url, asks, turns, settings):
    script = Script(asks, turns)
    model = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=url, api_key="none"))
    compaction = SummarizingCompaction(**settings)
    agent = Agent(model, instructions=SYSTEM, tools=tools_of(script), capabilities=[compaction])
    messages = []
    for ask in script.asks:
        prompt = pin(ask.text).content if "PIN-" in ask.text else ask.text
        result = await agent.run(prompt, message_history=messages, usage_limits=NO_LIMIT)
        messages = result.all_messages()


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
