"""Agents for workers in processes of their own. They do what the prompt says, word by word.

Each word is a tool, called in a turn of its own. Every tool notes that it has begun, in a file in
the folder that the environment variable ``DEEDS`` names. Whatever happens to a worker: the answers
depend only on the transcript.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from clark_agent import Agent, AssistantMessage, ToolContext, ToolSuspended, UserMessage, tool
from clark_agent.stream import StreamRequest
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import SUSPEND, ApprovalGate

__all__ = ["agents", "deeds", "folder", "support"]


def folder() -> Path:
    return Path(os.environ["DEEDS"])


def deeds(run_id: str) -> list[str]:
    """The tools that have begun in a run, in order."""
    path = folder() / "deeds"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split("\t")[1] for line in lines if line.startswith(f"{run_id}\t")]


def note(ctx: ToolContext, what: str) -> None:
    with open(folder() / "deeds", "a") as file:
        file.write(f"{ctx.identity.run_id}\t{what}\n")


@tool(reads_only=True)
def pay(ctx: ToolContext) -> str:
    """Pay."""
    note(ctx, "pay")
    return "paid"


@tool(reads_only=True)
def hold(ctx: ToolContext) -> str:
    """Wait until there is a file with the name of the run."""
    note(ctx, "hold")
    while not (folder() / ctx.identity.run_id.partition(".")[0]).exists():
        time.sleep(0.01)
    return "held"


@tool
def refund(ctx: ToolContext) -> str:
    """Refund: a person must agree."""
    note(ctx, "refund")
    return "refunded"


@tool(reads_only=True)
def timer(ctx: ToolContext) -> str:
    """Wait for a time that comes soon."""
    note(ctx, "timer")
    raise ToolSuspended({"kind": "timer"}, until=int(time.time() * 1000) + 200)


@tool(reads_only=True)
def question(ctx: ToolContext) -> str:
    """Ask something that expires soon."""
    note(ctx, "question")
    raise ToolSuspended({"kind": "question"}, expires_in=0.2)


@tool(reads_only=True)
def payment(ctx: ToolContext) -> str:
    """Wait for an event."""
    note(ctx, "payment")
    raise ToolSuspended({"kind": "payment"}, event="paid")


def answer(request: StreamRequest) -> Any:
    prompt = next(m for m in request.messages if isinstance(m, UserMessage)).plain_text
    turn = len([m for m in request.messages if isinstance(m, AssistantMessage)])
    words = prompt.split()
    if turn >= len(words):
        return "Done."
    if words[turn] == "fail":
        return RuntimeError("the model is broken")
    if words[turn] == "clerks":
        return [call("clerk", call_id=f"call_{turn}_{n}", task="refund") for n in range(2)]
    return call(words[turn], call_id=f"call_{turn}")


def support() -> Agent[str, None]:
    gate = ApprovalGate(SUSPEND, tools=["refund"])
    clerk = Agent(ScriptedStream([answer], at_end="repeat"), tools=[refund], plugins=[gate])
    return Agent(
        ScriptedStream([answer], at_end="repeat"),
        name="support",
        tools=[
            *(pay, hold, refund, timer, question, payment),
            clerk.as_tool("Does what it is told.", name="clerk"),
        ],
        plugins=[gate],
        cancel_grace=10.0,
    )


def agents() -> list[Agent[str, None]]:
    return [support(), support().replace(name="billing")]
