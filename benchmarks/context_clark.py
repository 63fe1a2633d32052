"""clark-agent in `benchmarks.context`: a `Conversation` on a `LoopConfig`, logged in memory."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from benchmarks.context_provider import Provider, serving
from benchmarks.context_script import SYSTEM, Script
from clark_agent import AgentMessage, AgentTool, Conversation, LoopConfig, Plugin, UserMessage, tool
from clark_agent.run_log import MemoryStore, RunLog, check_prefix
from clark_agent.transports import OpenAIChat


class Logged(Struct, frozen=True):
    """What `check_prefix` says about the logs of all runs: shares of what could repeat."""

    kept: float
    kept_aside: float
    """Without the changes that the plugin of the subject made."""


def tools_of(script: Script) -> list[AgentTool]:
    @tool
    async def read_file(path: str, offset: int, limit: int) -> str:
        """Read lines of a file."""
        return script.result("read_file", path=path, offset=offset, limit=limit)

    @tool
    async def run_command(command: str) -> str:
        """Run a command in the shell, and return what it prints."""
        return script.result("run_command", command=command)

    @tool
    async def search(pattern: str, path: str) -> str:
        """Search files for a regular expression."""
        return script.result("search", pattern=pattern, path=path)

    @tool
    async def edit_file(path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file."""
        return script.result("edit_file", path=path, old=old, new=new)

    return [read_file, run_command, search, edit_file]


def is_pinned(message: AgentMessage) -> bool:
    """The user asked to keep to these rules, whatever happens later."""
    return isinstance(message, UserMessage) and "PIN-" in message.plain_text


async def converse(provider: Provider, plugins: Sequence[Plugin]) -> Logged:
    """Have the whole conversation."""
    script, store = provider.script, MemoryStore()
    async with serving(provider) as url:
        stream = OpenAIChat("scripted", base_url=url, api_key="none")
        config = LoopConfig(
            stream=stream, tools=tools_of(script), plugins=plugins, run_log=RunLog(store)
        )
        conversation: Conversation[str] = Conversation(config, SYSTEM)
        for ask in script.asks:
            await conversation.send(ask.text)
        await stream.aclose()
    run_ids = [summary.run_id for summary in store.runs(limit=len(script.asks))]
    reports = [check_prefix(store, run_id) for run_id in run_ids]
    names = [str(getattr(plugin, "name", "")) for plugin in plugins]
    totals = [[0, 0], [0, 0]]
    for report in reports:
        for total, each in zip(totals, (report, report.without(*names)), strict=True):
            total[0] += sum([request.kept_tokens for request in each.requests])
            total[1] += sum([request.possible_tokens for request in each.requests])
    return Logged(*[kept / possible if possible else 1.0 for kept, possible in totals])
