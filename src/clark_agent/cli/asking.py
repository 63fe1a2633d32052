"""Asking the person at the terminal: may this tool run, and what does the agent want to know.

The terminal keeps its own line editing, and Ctrl-C still stops the run: a question that waits is
taken back. What was typed before the question was put is no answer to it.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import termios
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from clark_agent.cli.view import RichScreen, Screen, safe
from clark_agent.toolkit.approval import Approval, ApprovalRequest, Denied

__all__ = ["CHOICES", "Person", "approval_of", "find_person"]

CHOICES = "y yes · n no · a always · never · or say what to do instead"
_WORDS = {
    Approval.ONCE: ("y", "yes", "once"),
    Approval.ALWAYS: ("a", "always"),
    Approval.NO: ("", "n", "no"),
    Approval.NEVER: ("never",),
}
_POLL_SECONDS = 0.05


def approval_of(answer: str) -> Approval | Denied:
    """What a typed answer to `CHOICES` means; whatever is no choice is a no with a reason."""
    word = answer.strip()
    for approval, words in _WORDS.items():
        if word.lower() in words:
            return approval
    return Denied(word)


class Person:
    """Somebody who can be asked."""

    def __init__(self, screen: Screen, terminal: int) -> None:
        self._screen = screen
        self._terminal = terminal

    async def approve(self, request: ApprovalRequest) -> Approval | Denied:
        """Ask whether a call may run."""
        return approval_of(await self._ask(f"May it run?  {request.summary}\n{CHOICES}"))

    async def answer(self, question: str, choices: Sequence[str]) -> str:
        """Put a question of the agent; a number chooses."""
        offered = [f"  {number}. {choice}" for number, choice in enumerate(choices, 1)]
        answer = await self._ask("\n".join([question, *offered]))
        if answer.isdecimal() and 1 <= int(answer) <= len(choices):
            return choices[int(answer) - 1]
        return answer

    async def _ask(self, text: str) -> str:
        screen = self._screen
        with screen.quiet() if isinstance(screen, RichScreen) else nullcontext():
            screen.note(safe(text), "user")
            with suppress(termios.error):
                termios.tcflush(self._terminal, termios.TCIFLUSH)
            sys.stderr.write("? ")
            sys.stderr.flush()
            return (await self._line()).strip()

    async def _line(self) -> str:
        """The next line. Polled: not every system lets an event loop wait for a terminal."""
        while not select.select([self._terminal], [], [], 0)[0]:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        line = os.read(self._terminal, 1 << 16)
        if not line:
            raise EOFError("the terminal was closed")
        return line.decode("utf-8", "replace")


def find_person(screen: Screen) -> Person | None:
    """Whoever reads what is noted and can type; None: nobody."""
    if not (sys.stderr and sys.stderr.isatty()):
        return None
    if sys.stdin and sys.stdin.isatty():
        return Person(screen, sys.stdin.fileno())
    try:  # what is piped in is the prompt, and the keyboard is still there
        return Person(screen, os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError:
        return None
