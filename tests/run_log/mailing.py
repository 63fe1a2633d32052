"""Runs that get mail: each tool sends it to its own run, as another process would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from clark_agent import LoopConfig, RunIdentity, ToolContext, ToolResult, UserMessage
from clark_agent.run_log import RunStore
from clark_agent.run_log.records import CancelReceived, SteeringAccepted
from clark_agent.tools import AgentTool
from clark_agent.types import AgentContext

Post = Callable[[RunStore, str], object]


def taken(store: RunStore, run_id: str) -> list[str | None]:
    """The ids of the mail that the run has taken, by its log."""
    entries = [record.entry for record in store.load(run_id).records]
    return [e.mail for e in entries if isinstance(e, (SteeringAccepted, CancelReceived))]


async def until_taken(store: RunStore, run_id: str, count: int = 1) -> None:
    await until(lambda: len(taken(store, run_id)) >= count)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - another process or a timer makes it so
        await asyncio.sleep(0.001)


class Posting(AgentTool):
    """Posts something to its run. Then it waits until the run has taken it, or forever."""

    name = "posting"
    description = "posts"

    def __init__(self, store: RunStore, post: Post, *, waits: bool = False) -> None:
        self.store = store
        self.post = post
        self.waits = waits
        self.ran = 0
        super().__init__()

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.ran += 1
        if self.ran == 1:
            run_id = ctx.identity.run_id
            self.post(self.store, run_id)
            if self.waits:
                await asyncio.Event().wait()
            await until_taken(self.store, run_id)
        return ToolResult.text("posted")


def context(run_id: str) -> AgentContext:
    return AgentContext("You get mail.", identity=RunIdentity(run_id))


def texts(config_or_messages: Any) -> list[str]:
    """What was said, by whom."""
    return [f"{m.role}: {m.plain_text}" for m in config_or_messages]


GO = UserMessage("go", 1)

__all__ = [
    "GO",
    "LoopConfig",
    "Post",
    "Posting",
    "context",
    "taken",
    "texts",
    "until",
    "until_taken",
]
