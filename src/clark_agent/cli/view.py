"""Shows the events of a run on a screen.

`View` is an event sink. It turns each event into text for a person and passes it to a `Screen`,
which displays it:

- `PlainScreen`, without a terminal: the model's text goes to stdout as it arrives, and its actions
  to stderr, one line each. No colours, no animation.
- `RichScreen`, on a terminal: Markdown rendered as it streams, and below it the current activity.
  Complete blocks are printed once; only the last one, which may still change, is redrawn.

`JsonView` writes events unchanged. All text from a model, a tool or a file passes through `safe`
before it reaches a terminal, so that it contains no escape sequences.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Literal, Protocol, TextIO, TypeAlias

from rich.console import (
    Console,
    ConsoleOptions,
    ConsoleRenderable,
    Group,
    RenderableType,
    RenderResult,
)
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.spinner import Spinner
from rich.text import Text

from clark_agent import events as ev
from clark_agent.cli.markdown import MarkdownBlocks, rendered
from clark_agent.plugins.compaction import mark_of
from clark_agent.result import RunResult
from clark_agent.run_log.writer import encode_entry
from clark_agent.stream import TextChunk, ToolCallChunk
from clark_agent.toolkit._visible import label
from clark_agent.toolkit.untrusted import without_marks
from clark_agent.tools import tool_result
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    SystemMessage,
    ToolResultMessage,
    Usage,
    UserMessage,
)

__all__ = [
    "PART",
    "JsonView",
    "PlainScreen",
    "RichScreen",
    "Screen",
    "Style",
    "View",
    "call_line",
    "has_terminal",
    "make_screen",
    "one_line",
    "output_text",
    "safe",
    "show_log_messages",
    "time_text",
    "usage_text",
]

Style: TypeAlias = Literal["user", "tool", "ok", "error", "info", "text"]
"""The kind of a line."""

PART = " · "  # between the parts of a line
_STYLES: dict[str, tuple[str, str]] = {  # the prefix of the line, and its style
    "user": ("> ", "bold"),
    "tool": ("● ", "cyan"),
    "ok": ("  ", "dim"),
    "error": ("✗ ", "red"),
    "info": ("", "dim"),
    "text": ("", ""),  # unchanged
}


# --- text that is safe to show --------------------------------------------------------------------

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def safe(text: str) -> str:
    """Return the text with escape sequences and invisible characters escaped.

    Carriage returns are dropped. Line breaks and tabs stay.
    """
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r", ""))


def one_line(text: str, width: int = 160) -> str:
    """Return the text on one line, safe and cut if it is long."""
    line = safe(" ".join(text[: 4 * width].split()))
    return line if len(line) <= width and len(text) <= 4 * width else line[: width - 1] + "…"


def call_line(name: str, arguments: Any) -> str:
    """Format a call for people: ``read_file(path='a.txt')``."""
    if isinstance(arguments, dict):
        shown = [f"{_name(key)}={_value(value)}" for key, value in arguments.items()]
    else:
        shown = [_value(arguments)]
    return one_line(f"{name}({', '.join(shown)})", 200)


def _name(key: object) -> str:
    text = label(key)  # quoted, so that it cannot look like further arguments
    return text if len(text) <= 40 else f"{text[:30]}…{text[-5:]}"


def _value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}…{text[-10:]}"


def output_text(result: RunResult) -> str | None:
    """Return the output of a run as text, or None if the model's text already says it."""
    output: Any = result.output
    answers = [m for m in result.messages if isinstance(m, AssistantMessage)]
    if output is None or not answers or not answers[-1].tool_calls:
        return None  # the text of the answer is the output
    return output if isinstance(output, str) else tool_result(output).plain_text


def usage_text(usage: Usage) -> str:
    """Format token counts."""
    cached = usage.cache_read_input_tokens
    given = usage.input_tokens + cached + usage.cache_creation_input_tokens
    hint = f" ({cached:,} cached)" if cached else ""
    return f"{given:,} tokens in{hint}, {usage.output_tokens:,} out"


def time_text(unix_ms: int, form: str) -> str:
    """Format a time. The value from a log may be invalid."""
    try:
        return datetime.fromtimestamp(unix_ms / 1000).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "?"


# --- screens --------------------------------------------------------------------------------------


class Screen(Protocol):
    """Displays text to a person. All text that it gets is already safe."""

    def say(self, text: str) -> None:
        """Add to the model's text, in Markdown."""
        ...

    def end(self) -> None:
        """End the model's text."""
        ...

    def note(self, text: str, style: Style = "info") -> None:
        """Show a line about what happens."""
        ...

    def status(self, text: str) -> None:
        """Show the current activity, instead of the last one. An empty text clears it."""
        ...

    def close(self) -> None:
        """Restore the terminal. Closing twice is harmless."""
        ...


class PlainScreen:
    """Writes the model's text to one stream and its actions to another, one line each."""

    def __init__(self, out: TextIO | None = None, notes: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._notes = notes or sys.stderr
        self._is_open = False  # whether the last line is unfinished

    def say(self, text: str) -> None:
        """Write the text at once."""
        self._out.write(text)
        self._out.flush()
        self._is_open = not text.endswith("\n") if text else self._is_open

    def end(self) -> None:
        """End the line."""
        if self._is_open:
            self.say("\n")

    def note(self, text: str, style: Style = "info") -> None:
        """Write a line. An error such as a full disk is ignored: a note must not stop the run."""
        self.end()
        try:
            self._notes.write(f"{_STYLES[style][0]}{text}\n")
            self._notes.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass

    def status(self, text: str) -> None:
        """Do nothing: a plain screen shows no activity."""

    def close(self) -> None:
        """End the line."""
        self.end()


class RichScreen:
    """Markdown as it streams, and below it the current activity."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.blocks = MarkdownBlocks()
        """The model's text that is not printed yet."""
        self.under_way = ""
        self._live: _Drawing | None = None
        self._is_quiet = False

    def print(self, shown: RenderableType) -> None:
        """Print permanently, above the live part."""
        self.console.print(shown)

    def say(self, text: str) -> None:
        """Print the complete blocks, and draw the last one."""
        self._print_blocks(self.blocks.feed(text))
        self.draw()

    def end(self) -> None:
        """Print the last block."""
        blocks = self.blocks.close()
        self.draw()
        self._print_blocks(blocks)

    def note(self, text: str, style: Style = "info") -> None:
        """Print a line."""
        before, look = _STYLES[style]
        if style == "info":
            text = _by_parts(text, self.console.width)
        self.print(Text(before + text, look))

    def status(self, text: str) -> None:
        """Show the activity in the live part."""
        self.under_way = text
        self.draw()

    def close(self) -> None:
        """Remove the live part and restore the cursor."""
        self.under_way = ""
        self.end()

    @contextmanager
    def quiet(self) -> Generator[None]:
        """Draw nothing inside the block, because a person types."""
        self._is_quiet = True
        self.draw()
        try:
            yield
        finally:
            self._is_quiet = False
            self.draw()

    def _print_blocks(self, blocks: list[str]) -> None:
        for block in blocks:
            self.print(rendered(block))
            self.print("")

    def draw(self) -> None:
        """Draw what may still change: the end of the model's text, and the current activity."""
        tail = self.blocks.tail(_MOST_DRAWN)
        if self._is_quiet or not (tail.strip() or self.under_way):
            if self._live is not None:
                live, self._live = self._live, None
                live.stop()
            return
        parts: list[RenderableType] = [_LastLines(tail)] if tail.strip() else []
        if self.under_way:
            status = Text(self.under_way, "dim", overflow="ellipsis", no_wrap=True)
            parts.append(Spinner("dots", status))
        if self._live is None:
            self._live = _Drawing(console=self.console, transient=True, refresh_per_second=12)
            self._live.start()
        self._live.update(_Measured(Group(*parts), self._live))


_MOST_DRAWN = 4_000
_MOST_LINES = 12


class _Drawing(Live):
    """A live display that is also erased correctly if the window has become narrower.

    Terminals wrap the lines that no longer fit. So there are more rows than rich has drawn, but
    rich erases only as many as it has drawn.
    """

    widths: Sequence[int] = ()
    """The widths of the lines that were drawn last."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Erase the rows that rich does not know of, then continue as usual."""
        columns = max(1, self.console.width)
        broken = sum([max(0, width - 1) // columns for width in self.widths])
        row = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
        return [Control(*(row * broken)), *super().process_renderables(renderables)]


class _Measured:
    """A renderable that records the widths of its lines."""

    def __init__(self, shown: RenderableType, drawing: _Drawing) -> None:
        self._shown = shown
        self._drawing = drawing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [_trimmed(line) for line in console.render_lines(self._shown, options, pad=False)]
        self._drawing.widths = [Segment.get_line_length(line) for line in lines]
        for number, line in enumerate(lines):
            yield from [Segment.line(), *line] if number else line


def _trimmed(line: list[Segment]) -> list[Segment]:
    """Drop spaces at the end of a line: a narrower window would wrap them into extra rows."""
    while line and not line[-1].text.strip() and not (line[-1].style and line[-1].style.bgcolor):
        line = line[:-1]
    return line


class _LastLines:
    """The end of a text that may be longer than the screen; as plain text if it is very long."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self._text
        shown = rendered(text) if len(text) < _MOST_DRAWN else Text(text)
        lines = console.render_lines(shown, options, pad=False)
        for line in lines[-max(1, min(_MOST_LINES, options.size.height - 4)) :]:
            yield from line
            yield Segment.line()


def has_terminal() -> bool:
    """Return whether stdout and stderr are a terminal that can move the cursor."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    return sys.stdout.isatty() and sys.stderr.isatty()


def make_screen() -> PlainScreen | RichScreen:
    """Make the screen that fits the terminal."""
    return RichScreen() if has_terminal() else PlainScreen()


# --- views ----------------------------------------------------------------------------------------


class View:
    """An event sink that shows a run, and counts for `summary`."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._has_text = False
        self._began = time.monotonic()
        self._turns = self._calls = 0
        self._running: dict[str, str] = {}

    def __call__(self, event: ev.AgentEvent) -> None:
        """Show an event."""
        screen = self.screen
        match event:
            case ev.AgentStart():
                self._began, self._turns, self._calls = time.monotonic(), 0, 0
            case ev.TurnStart():
                self._turns += 1
                screen.status("thinking")
            case ev.RequestDelayed(reason=reason):
                screen.status(f"waiting ({one_line(reason)})")
            case ev.ConsultationStart(plugin=plugin):
                screen.status(f"{one_line(plugin)} asks a model")
            case ev.ConsultationEnd():
                screen.status("thinking")
            case ev.MessageStart(message=AssistantMessage()):
                self._has_text = False
            case ev.MessageUpdate(chunk=TextChunk(delta)):
                self._has_text = True
                screen.say(safe(delta))
            case ev.MessageUpdate(chunk=ToolCallChunk(name_delta=str(name))) if name:
                screen.status(f"calling {one_line(name)}")
            case ev.MessageEnd(message=AssistantMessage() as message):
                if not self._has_text and message.plain_text:
                    screen.say(safe(message.plain_text))
                screen.status("")
                screen.end()
            case ev.MessageEnd(message=CustomMessage() as message) if mark_of(message):
                screen.note(_custom_line(message))
            case ev.MessageDiscarded(reason=reason) if reason != "aborted":
                screen.note(f"answer discarded ({one_line(reason)})")
            case ev.ChildRunEvent(event=ev.ToolExecutionStart() as below):
                screen.note(f"  {call_line(below.tool_name, below.args)}", "tool")
            case ev.ChildRunEvent(event=ev.ToolExecutionEnd(is_error=True) as below):
                screen.note(f"  {one_line(without_marks(below.result.plain_text))}", "error")
            case _:
                self._show_tool(event)

    def _show_tool(self, event: ev.AgentEvent) -> None:
        screen = self.screen
        match event:
            case ev.ToolExecutionStart():
                line = call_line(event.tool_name, event.args)
                self._calls += 1
                self._running[event.tool_call_id] = line
                screen.note(line, "tool")
                screen.status(line)
            case ev.ToolExecutionUpdate(partial=partial):
                last = partial.narration or partial.plain_text.rstrip().rpartition("\n")[2]
                screen.status(one_line(f"{event.tool_name}: {last}"))
            case ev.ToolExecutionEnd(result=result):
                if self._running.pop(event.tool_call_id, None) is None:  # it was not run
                    screen.note(one_line(event.tool_name), "tool")
                screen.note(*_result_line(result.narration, result.plain_text, event.is_error))
                screen.status(next(reversed(self._running.values()), ""))
                details = result.details
                if isinstance(details, dict) and details.get("reason") == "nobody_to_ask":
                    screen.note(f"to allow it: --allow {one_line(event.tool_name)}, or --yes")
            case _:
                pass

    def show(self, messages: Iterable[AgentMessage]) -> None:
        """Show messages from the history."""
        screen = self.screen
        for message in messages:
            match message:
                case UserMessage():
                    screen.note(safe(message.plain_text).strip(), "user")
                case SystemMessage():
                    screen.note(one_line(message.plain_text))
                case AssistantMessage():
                    screen.say(safe(message.plain_text))
                    screen.end()
                    for call in message.tool_calls:
                        screen.note(call_line(call.name, call.arguments), "tool")
                case ToolResultMessage():
                    text = message.plain_text
                    screen.note(*_result_line(message.narration, text, message.is_error))
                case _:
                    screen.note(_custom_line(message))

    def summary(self, usage: Usage, outcome: str, run_id: str | None = None) -> str:
        """Return the last line: how the run ended, and what it used."""
        parts = [outcome, _count(self._turns, "turn"), _count(self._calls, "tool call")]
        parts += [usage_text(usage), f"{time.monotonic() - self._began:.1f} s"]
        if run_id is not None:
            parts.append(f"run {run_id[:8]}")
        return PART.join(parts)


def _custom_line(message: CustomMessage) -> str:
    mark = mark_of(message)
    if mark is None:
        return one_line(message.kind)
    what = "summarised" if mark.has_summary else "left out"
    size = f"{mark.tokens_before:,} → {mark.tokens_after:,} tokens"
    return f"turns {mark.first_turn} to {mark.last_turn} {what}: {size}"


def _by_parts(text: str, width: int) -> str:
    """Wrap the text between its parts if it is too long."""
    lines: list[str] = []
    for part in text.split(PART):
        if lines and len(lines[-1] + PART + part) <= width:
            lines[-1] += PART + part
        else:
            lines.append(part)
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _result_line(narration: str | None, text: str, is_error: bool) -> tuple[str, Style]:
    text = without_marks(text)
    if narration or is_error:
        line = one_line(narration or text)
    else:
        first, *others = text.strip().splitlines() or [""]
        if re.search(r"\w", first):
            line = one_line(first) + (f"  (+{_count(len(others), 'line')})" if others else "")
        else:  # such as the brace of JSON
            line = one_line(text)
    line = line or "(nothing)"
    return line, "error" if is_error else "ok"


class JsonView:
    """An event sink that writes each event as a line of JSON."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def __call__(self, event: ev.AgentEvent) -> None:
        """Write an event."""
        self.write(event)

    def write(self, value: Any) -> None:
        """Write any value that can be encoded as JSON."""
        text = encode_entry(value).decode()
        self._out.write(_UNSAFE.sub(lambda found: json.dumps(found[0])[1:-1], text) + "\n")
        self._out.flush()


# --- log messages of the library ------------------------------------------------------------------


class _LogMessages(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_in_result", False):  # the result of the call is shown
            return
        with suppress(OSError):  # logging must not fail
            self._show(one_line(record.getMessage(), 400))


@contextmanager
def show_log_messages(screen: Screen, *, debug: bool = False) -> Generator[None]:
    """Show warnings of the library (such as a retry) as notes inside the block."""
    if debug:  # the handlers of the root logger show everything
        yield
        return
    handler = _LogMessages(screen.note)
    logger = logging.getLogger("clark_agent")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
