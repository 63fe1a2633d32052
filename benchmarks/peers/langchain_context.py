"""LangChain in `benchmarks.context`: `create_agent` with `SummarizationMiddleware`.

Given as JSON: the server, the size of the conversation, the window of the model, and the settings
of the middleware. It cannot pin messages.
"""

import asyncio
import json
import sys

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from benchmarks.context_script import SYSTEM, Script


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


async def main(url, asks, turns, window, settings):
    script = Script(asks, turns)
    profile = {"max_input_tokens": window}
    model = ChatOpenAI(model="scripted", base_url=url, api_key="none", profile=profile)
    pairs = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
    middleware = SummarizationMiddleware(model, **pairs)
    agent = create_agent(model, tools_of(script), system_prompt=SYSTEM, middleware=[middleware])
    messages = []
    for ask in script.asks:
        given = {"messages": [*messages, HumanMessage(ask.text)]}
        messages = (await agent.ainvoke(given, {"recursion_limit": 10**9}))["messages"]


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
