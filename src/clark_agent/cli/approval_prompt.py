"""Asks the person at the terminal: whether a tool may run, and questions of the agent.

The terminal keeps its own line editing, and Ctrl-C still stops the run: it withdraws the open
question. Input typed before the question appeared is not taken as an answer.

A call that needs approval is shown completely. If it is longer than the screen, it is shown in
pages. It can be allowed only after the last page, and refused at any time.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import termios
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from shutil import get_terminal_size

from rich.cells import cell_len, chop_cells

from clark_agent.cli.view import RichScreen, Screen, safe
from clark_agent.toolkit.approval import Approval, ApprovalRequest, Denied
from clark_agent.toolkit.ask import OneAtATime

__all__ = ["CHOICES", "Person", "approval_of", "ask_approval", "find_person", "pages"]

CHOICES = "y yes · n no · a always · never · or type what to do instead"
_PATH = "always and never apply to this path"
_WORDS = {
    Approval.ONCE: ("y", "yes", "once"),
    Approval.ALWAYS: ("a", "always"),
    Approval.NO: ("n", "no"),
    Approval.NEVER: ("never",),
}
_POLL_SECONDS = 0.05
_ROWS_BELOW = 6  # for the question, and what the terminal shows below it


def approval_of(answer: str) -> Approval | Denied | None:
    """Parse a typed answer to `CHOICES`. Other text is a refusal with that text as the reason.

    Returns None for empty input.
    """
    word = answer.strip()
    if not word:
        return None
    for approval, words in _WORDS.items():
        if word.lower() in words:
            return approval
    return Denied(word)


async def ask_approval(
    request: ApprovalRequest,
    heading: str,
    screen: Screen,
    ask: Callable[[str], Awaitable[str]],
) -> Approval | Denied:
    """Show the whole call, in pages if it is long, and ask whether it may run."""
    text = safe(request.text)
    first, _, rest = text.partition("\n")
    screen.note(f"{heading}  {first}", "tool")
    columns, rows = get_terminal_size()
    parts = pages(rest, columns, max(5, rows - _ROWS_BELOW))
    for number, part in enumerate(parts, 1):
        if part:
            screen.note(part, "text")
        if number == len(parts):
            break
        label = f"page {number} of {len(parts)} · {len(text):,} characters · Enter more · n no"
        refusal = approval_of(await ask(label))
        while refusal in (Approval.ONCE, Approval.ALWAYS):
            refusal = approval_of(await ask(f"view every page first · {label}"))
        if refusal is not None:
            return refusal
    choices = CHOICES if request.path is None else f"{CHOICES} ({_PATH})"
    while (answer := approval_of(await ask(choices))) is None:
        pass  # ignore an empty line
    return answer


def pages(text: str, columns: int, rows: int) -> list[str]:
    """Split the text into pages of so many rows, between lines unless one line is longer than a
    page.
    """
    found: list[list[str]] = [[]]
    left = rows
    for line in text.split("\n"):
        pieces = chop_cells(line, columns) if cell_len(line) > columns else [line]
        for start in range(0, len(pieces), rows):
            part = pieces[start : start + rows]
            if len(part) > left:
                found.append([])
                left = rows
            found[-1].append("".join(part))
            left -= len(part)
    return ["\n".join(page) for page in found]


class Person:
    """The person at the terminal."""

    def __init__(self, screen: Screen, terminal: int) -> None:
        self._screen = screen
        self._terminal = terminal
        self._one_at_a_time = OneAtATime()

    async def approve(self, request: ApprovalRequest) -> Approval | Denied:
        """Ask whether a call may run."""
        async with self._turn():
            return await ask_approval(request, "May it run?", self._screen, self._ask)

    async def answer(self, question: str, choices: Sequence[str]) -> str:
        """Ask a question of the agent; a number selects a choice."""
        offered = [f"  {number}. {choice}" for number, choice in enumerate(choices, 1)]
        async with self._turn():
            answer = await self._ask("\n".join([question, *offered]))
        if answer.isdecimal() and 1 <= int(answer) <= len(choices):
            return choices[int(answer) - 1]
        return answer

    async def _ask(self, text: str) -> str:
        self._screen.note(safe(text), "user")
        with suppress(termios.error):
            termios.tcflush(self._terminal, termios.TCIFLUSH)
        sys.stderr.write("? ")
        sys.stderr.flush()
        return (await self._line()).strip()

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None]:
        """Allow one question at a time, and stop drawing on the screen until it is answered."""
        screen = self._screen
        async with self._one_at_a_time.turn():
            with screen.quiet() if isinstance(screen, RichScreen) else nullcontext():
                yield

    async def _line(self) -> str:
        """Read the next line. Polls, because not every system lets an event loop wait for a
        terminal.
        """
        while not select.select([self._terminal], [], [], 0)[0]:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        line = os.read(self._terminal, 1 << 16)
        if not line:
            raise EOFError("the terminal was closed")
        return line.decode("utf-8", "replace")


def find_person(screen: Screen) -> Person | None:
    """Return the person at the terminal; None without a terminal for both stderr and input."""
    if not (sys.stderr and sys.stderr.isatty()):
        return None
    if sys.stdin and sys.stdin.isatty():
        return Person(screen, sys.stdin.fileno())
    try:  # stdin is piped in as the prompt, but the keyboard is still there
        return Person(screen, os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError:
        return None
