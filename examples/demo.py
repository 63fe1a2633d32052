"""What `make demo` runs: a real model on this machine uses real tools to answer a question.

The packaged model is very small (Gemma 3, 270 million weights). It shows how the parts work
together and is not for real tasks. To use another model, set CLARK_AGENT_MODEL, for example to
anthropic:claude-sonnet-5, and the key of that provider.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from clark_agent import AgentContext, AssistantMessage, ConfigError, LoopConfig, events, run
from clark_agent.stream import TextChunk
from clark_agent.toolkit import (
    Workspace,
    calculator,
    current_time_tool,
    file_tools,
    without_marks,
)
from clark_agent.transports import connect

DATA = Path(__file__).resolve().parent / "data"
QUESTION = "Read beans.txt and multiply the number in it by 3."


class Terminal:
    """Prints the events of a run."""

    def __init__(self) -> None:
        self.colour = sys.stdout.isatty()

    def paint(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    def say(self, text: str, code: int = 0) -> None:
        print(self.paint(text, code), flush=True)

    def __call__(self, event: events.AgentEvent) -> None:
        match event:
            case events.TurnStart():
                self.say("  the model thinks ...", 90)
            case events.MessageUpdate(chunk=TextChunk(delta)):
                print(self.paint(delta, 1), end="", flush=True)
            case events.MessageEnd(message=AssistantMessage() as message) if message.plain_text:
                print()
            case events.ToolExecutionStart():
                self.say(f"→ {event.tool_name} {event.args}", 36)
            case events.ToolExecutionEnd():
                text = without_marks(event.result.plain_text).strip()
                self.say(f"← {text}", 31 if event.is_error else 32)
            case _:
                pass


async def main() -> None:
    terminal = Terminal()
    began = time.monotonic()
    terminal.say("loading the model (the first time its parts are assembled, 253 MB) ...", 90)
    try:
        model = connect(os.environ.get("CLARK_AGENT_MODEL", "local:"))
    except ConfigError as error:  # such as a missing key
        sys.exit(str(error))
    tools = [*file_tools(Workspace(DATA, read_only=True)), calculator, current_time_tool()]
    terminal.say(f"> {QUESTION}", 1)
    config = LoopConfig(stream=model, tools=tools, event_sink=terminal)
    result = await run(QUESTION, AgentContext(), config)
    seconds = time.monotonic() - began
    terminal.say(f"{result.outcome} in {seconds:.1f} s, {result.usage.output_tokens} tokens", 90)


if __name__ == "__main__":
    asyncio.run(main())
