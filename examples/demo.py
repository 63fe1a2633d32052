"""What `make demo` shows: an agent at work, with real tools and a scripted model.

The loop is the real one: the answer streams, tools run in parallel and are checked against their
schemas, a plugin refuses one call, a wrong argument goes back to the model. Only what the model
says is written down in advance, so that it needs no key and no network.
"""

import asyncio
import sys
from pathlib import Path

from clark_agent import (
    AgentContext,
    BeforeToolCallContext,
    Block,
    FunctionPlugin,
    LoopConfig,
    ToolContext,
    events,
    run,
    tool,
)
from clark_agent.stream import TextChunk
from clark_agent.testing import ScriptedStream, call, say

ROOT = Path(__file__).resolve().parent.parent


@tool
def list_files(pattern: str) -> list[str]:
    """List files of the project.

    Args:
        pattern: A glob, relative to the project.
    """
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


@tool
async def count_lines(paths: list[str], ctx: ToolContext) -> dict[str, int]:
    """Count the lines of files.

    Args:
        paths: Files, relative to the project.
    """
    counts: dict[str, int] = {}
    for path in paths:
        counts[path] = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        await ctx.update(f"{path}: {counts[path]} lines")
    return counts


@tool
def delete_file(path: str) -> str:
    """Delete a file."""
    raise AssertionError("the guard never lets this happen")


def read_only(ctx: BeforeToolCallContext) -> Block | None:
    """Refuse whatever would change the project."""
    if ctx.tool_call.name.startswith("delete"):
        return Block("This workspace is read-only. Answer from what you can read.")
    return None


CORE = [f"src/clark_agent/{name}.py" for name in ("loop", "turn", "execution")]

MODEL = ScriptedStream(
    [
        say(
            "I look at the loop and the examples at the same time.",
            call("list_files", pattern="examples/*.py"),
            call("count_lines", paths=CORE),
        ),
        say("One of them looks unused, I remove it.", call("delete_file", path=CORE[0])),
        say("Then let me count again.", call("count_lines", paths=42)),
        "Nothing was changed. The loop is three short files: one for the turns, one for a call "
        "to the model, and one for a batch of tools.",
    ]
)


class Terminal:
    """Prints a run as it happens."""

    def __init__(self) -> None:
        self.colour = sys.stdout.isatty()

    def paint(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    async def __call__(self, event: events.AgentEvent) -> None:
        match event:
            case events.MessageUpdate(chunk=TextChunk(delta)):
                print(delta, end="", flush=True)
                await asyncio.sleep(0.03)
            case events.MessageEnd(message=message) if getattr(message, "stop_reason", None):
                print()
            case events.ToolExecutionStart():
                print(self.paint(f"  → {event.tool_name} {event.args}", 36))
            case events.ToolExecutionUpdate():
                print(self.paint(f"    {event.partial.plain_text}", 90))
            case events.ToolExecutionEnd():
                text = event.result.plain_text
                text = text if len(text) < 160 else text[:157] + "…"
                print(self.paint(f"  ← {event.tool_name}: {text}", 31 if event.is_error else 32))
            case _:
                pass


async def main() -> None:
    terminal = Terminal()
    prompt = "What does the loop of this project consist of?"
    print(terminal.paint(f"> {prompt}", 1))
    config = LoopConfig(
        stream=MODEL,
        tools=[list_files, count_lines, delete_file],
        plugins=[FunctionPlugin("before_tool_call", read_only)],
        event_sink=terminal,
    )
    result = await run(prompt, AgentContext("You answer questions about a project."), config)
    print(terminal.paint(f"{result.outcome}: {len(result.messages)} messages", 90))


if __name__ == "__main__":
    asyncio.run(main())
