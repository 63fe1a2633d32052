"""What a run looks like: events to a screen.

`View` is an event sink. It knows what each event means to a person and says so to a `Screen`,
which knows how to show it:

- `PlainScreen`, without a terminal: what the model says goes to stdout as it comes, and what it
  does to stderr, a line each. No colours, nothing that moves.
- `RichScreen`, on a terminal: Markdown rendered as it streams, and below it what is under way.
  Blocks that are complete are printed for good; only the last one, which may still change, is
  drawn again and again.

`JsonView` writes events as they are. Whatever a model, a tool or a file says passes through `safe`
before it gets to a terminal: there are no escapes in it that the terminal would obey.
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
from clark_agent.run_log.writer import encode_entry
from clark_agent.stream import TextChunk, ToolCallChunk
from clark_agent.toolkit.untrusted import without_marks
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
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
    "safe",
    "show_log_messages",
    "usage_text",
]

Style: TypeAlias = Literal["user", "tool", "ok", "error", "info", "text"]
"""What a line is about."""

PART = " · "  # between the parts of a line
_STYLES: dict[str, tuple[str, str]] = {  # what stands before the line, and its look
    "user": ("> ", "bold"),
    "tool": ("● ", "cyan"),
    "ok": ("  ", "dim"),
    "error": ("✗ ", "red"),
    "info": ("", "dim"),
    "text": ("", ""),  # as it is
}


# --- text that is safe to show --------------------------------------------------------------------

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def safe(text: str) -> str:
    """The text with everything in it that a terminal would obey, or that would hide text, escaped.

    Carriage returns are dropped. Line breaks and tabs stay.
    """
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r", ""))


def one_line(text: str, width: int = 160) -> str:
    """The text on one line, safe and cut if it is long."""
    line = safe(" ".join(text[: 4 * width].split()))
    return line if len(line) <= width and len(text) <= 4 * width else line[: width - 1] + "…"


def call_line(name: str, arguments: Any) -> str:
    """A call for people: ``read_file(path='a.txt')``."""
    if isinstance(arguments, dict):
        shown = [f"{key}={_value(value)}" for key, value in arguments.items()]
    else:
        shown = [_value(arguments)]
    return one_line(f"{name}({', '.join(shown)})", 200)


def _value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}…{text[-10:]}"


def usage_text(usage: Usage) -> str:
    """Tokens in words."""
    cached = usage.cache_read_input_tokens
    given = usage.input_tokens + cached + usage.cache_creation_input_tokens
    hint = f" ({cached:,} cached)" if cached else ""
    return f"{given:,} tokens in{hint}, {usage.output_tokens:,} out"


# --- screens --------------------------------------------------------------------------------------


class Screen(Protocol):
    """Where a person looks. Everything that it is given is safe already."""

    def say(self, text: str) -> None:
        """More of what the model says, in Markdown."""
        ...

    def end(self) -> None:
        """The model has said what it says."""
        ...

    def note(self, text: str, style: Style = "info") -> None:
        """A line about what happens."""
        ...

    def status(self, text: str) -> None:
        """What is under way; it replaces what was. Empty: nothing is."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was found. Closing twice is harmless."""
        ...


class PlainScreen:
    """What the model says to one stream, what it does to another, a line each."""

    def __init__(self, out: TextIO | None = None, notes: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._notes = notes or sys.stderr
        self._is_open = False  # whether the last line has no end yet

    def say(self, text: str) -> None:
        """Write it at once."""
        self._out.write(text)
        self._out.flush()
        self._is_open = not text.endswith("\n") if text else self._is_open

    def end(self) -> None:
        """End the line."""
        if self._is_open:
            self.say("\n")

    def note(self, text: str, style: Style = "info") -> None:
        """Write a line. A full disk has no room for notes, and does not stop the run for that."""
        self.end()
        try:
            self._notes.write(f"{_STYLES[style][0]}{text}\n")
            self._notes.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass

    def status(self, text: str) -> None:
        """Nothing moves here."""

    def close(self) -> None:
        """End the line."""
        self.end()


class RichScreen:
    """Markdown as it streams, and below it what is under way."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.blocks = MarkdownBlocks()
        """What the model is saying, as far as it is not printed."""
        self.under_way = ""
        self._live: _Drawing | None = None
        self._is_quiet = False

    def print(self, shown: RenderableType) -> None:
        """Print something for good, above what is drawn."""
        self.console.print(shown)

    def say(self, text: str) -> None:
        """Print the blocks that are complete, draw the last."""
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
        """Draw it below."""
        self.under_way = text
        self.draw()

    def close(self) -> None:
        """Nothing moves any more, and the cursor is back."""
        self.under_way = ""
        self.end()

    @contextmanager
    def quiet(self) -> Generator[None]:
        """Draw nothing meanwhile: a person types."""
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
        """Draw what may still change: the end of the model's text, and what is under way."""
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
    """A live display that also goes away when the window has been made narrower meanwhile.

    Terminals break the lines that no longer fit, so that what was drawn has more rows than rich
    believes, which takes away only as many as it has drawn.
    """

    widths: Sequence[int] = ()
    """Of the lines that were drawn last."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Take away the rows that rich does not know of, and then as always."""
        columns = max(1, self.console.width)
        broken = sum([max(0, width - 1) // columns for width in self.widths])
        row = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
        return [Control(*(row * broken)), *super().process_renderables(renderables)]


class _Measured:
    """Something to draw; tells how wide its lines have become."""

    def __init__(self, shown: RenderableType, drawing: _Drawing) -> None:
        self._shown = shown
        self._drawing = drawing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [_trimmed(line) for line in console.render_lines(self._shown, options, pad=False)]
        self._drawing.widths = [Segment.get_line_length(line) for line in lines]
        for number, line in enumerate(lines):
            yield from [Segment.line(), *line] if number else line


def _trimmed(line: list[Segment]) -> list[Segment]:
    """The line without blanks at its end: a narrower window would give them rows of their own."""
    while line and not line[-1].text.strip() and not (line[-1].style and line[-1].style.bgcolor):
        line = line[:-1]
    return line


class _LastLines:
    """The end of a text that may be longer than the screen; rendered, unless it is very long."""

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
    """Whether a person sees both what is said and what is done, on more than a typewriter."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    return sys.stdout.isatty() and sys.stderr.isatty()


def make_screen() -> PlainScreen | RichScreen:
    """The screen for whoever is there."""
    return RichScreen() if has_terminal() else PlainScreen()


# --- views ----------------------------------------------------------------------------------------


class View:
    """An event sink that shows a run, and counts it for `summary`."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._has_said = False
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
            case ev.MessageStart(message=AssistantMessage()):
                self._has_said = False
            case ev.MessageUpdate(chunk=TextChunk(delta)):
                self._has_said = True
                screen.say(safe(delta))
            case ev.MessageUpdate(chunk=ToolCallChunk(name_delta=str(name))) if name:
                screen.status(f"calling {one_line(name)}")
            case ev.MessageEnd(message=AssistantMessage() as message):
                if not self._has_said and message.plain_text:
                    screen.say(safe(message.plain_text))
                screen.status("")
                screen.end()
            case ev.MessageDiscarded(reason=reason) if reason != "aborted":
                screen.note(f"this answer does not count ({one_line(reason)})")
            case ev.ChildRunEvent(event=ev.ToolExecutionStart() as below):
                screen.note(f"  {call_line(below.tool_name, below.args)}", "tool")
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

    def tell(self, messages: Iterable[AgentMessage]) -> None:
        """Show messages of the past."""
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
                    screen.note(one_line(message.kind))

    def summary(self, usage: Usage, outcome: str, run_id: str | None = None) -> str:
        """The line at the end: how it ended, and what it took."""
        parts = [outcome, _count(self._turns, "turn"), _count(self._calls, "tool call")]
        parts += [usage_text(usage), f"{time.monotonic() - self._began:.1f} s"]
        if run_id is not None:
            parts.append(f"run {run_id[:8]}")
        return PART.join(parts)


def _by_parts(text: str, width: int) -> str:
    """The text, broken between its parts where it is too long."""
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
        line = one_line(first) + (f"  (+{_count(len(others), 'line')})" if others else "")
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
        """Write anything that has JSON."""
        text = encode_entry(value).decode()
        self._out.write(_UNSAFE.sub(lambda found: json.dumps(found[0])[1:-1], text) + "\n")
        self._out.flush()


# --- what the library has to say ------------------------------------------------------------------


class _LogMessages(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # whoever logs must not fail because of it
            self._show(one_line(record.getMessage(), 400))


@contextmanager
def show_log_messages(screen: Screen, *, debug: bool = False) -> Generator[None]:
    """Show warnings of the library (a retry, a tool that did not stop) as notes meanwhile."""
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
