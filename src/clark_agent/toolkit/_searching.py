"""Ways to look for something in a block of text, line by line.

`PlainSearch` looks for a text, which takes time in proportion to the block and no longer.
`RegexSearch` looks for a regular expression. A match of one may take for ever, and holds up all of
its process meanwhile, so it is given to another process, which can be killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from pathlib import Path
from struct import unpack
from threading import Timer
from typing import Protocol, Self, TypeAlias

from clark_agent.cancellation import CancellationToken
from clark_agent.toolkit import _regex_worker
from clark_agent.toolkit._regex_worker import read_frame, write_frame

__all__ = ["Hit", "PatternError", "PlainSearch", "RegexSearch", "Search", "SearchStopped"]

Hit: TypeAlias = tuple[int, int]
"""A line of the block that matches, from 0, and the place in it where the match begins."""


_NOT_HERE = "regular expressions cannot be searched for here ({}): search for plain text"


class PatternError(Exception):
    """The pattern will not do, in words for a model."""


class SearchStopped(Exception):
    """The search was stopped before its end: by the token, the time limit, or for no known reason.

    Which of these it was, the token and the clock say.
    """


class Search(Protocol):
    """Looks for one thing in many blocks."""

    def find(self, block: str) -> list[Hit]:
        """The lines that match, at most as many as were asked for."""
        ...


class PlainSearch:
    """Looks for a text as it is."""

    def __init__(self, text: str, *, ignore_case: bool, limit: int) -> None:
        self._form: Callable[[str], str] = str.lower if ignore_case else str
        self._text = self._form(text)
        self._limit = limit

    def find(self, block: str) -> list[Hit]:
        """The lines that have the text."""
        text = self._form(block)
        hits: list[Hit] = []
        line = counted = 0
        found = text.find(self._text)
        while found >= 0 and len(hits) < self._limit:
            line += text.count("\n", counted, found)
            hits.append((line, found - text.rfind("\n", 0, found) - 1))
            counted = found
            end = text.find("\n", found)
            found = -1 if end < 0 else text.find(self._text, end)
        return hits


class RegexSearch:
    """Looks for a regular expression, in a process of its own.

    Raises `PatternError` for one that is none. The process ends with the block, at the time limit,
    or when the token is cancelled; it does not outlive this one by more than the limit.
    """

    def __init__(
        self,
        pattern: str,
        *,
        ignore_case: bool,
        limit: int,
        seconds: float,
        signal: CancellationToken,
    ) -> None:
        self._pattern = pattern
        case = "ignore-case" if ignore_case else "exact"
        self._command = _command(str(ceil(seconds) + 1), case, str(limit))
        self._seconds = seconds
        self._signal = signal

    def __enter__(self) -> Self:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for us, and we end it
            )
        except OSError as error:
            raise PatternError(_NOT_HERE.format(error)) from error
        self._timer = Timer(self._seconds, self._process.kill)
        self._timer.daemon = True
        self._timer.start()
        self._subscription = self._signal.subscribe(self._process.kill)
        try:
            problem = self._ask(self._pattern.encode())
            if problem:
                raise PatternError(
                    f"{self._pattern!r} is no regular expression: {problem.decode()}; to find it "
                    "as plain text leave regex out"
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._subscription.close()
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what is still in the buffer has nowhere to go
                pipe.close()

    def find(self, block: str) -> list[Hit]:
        """The lines that match. Raises `SearchStopped`."""
        numbers = self._ask(block.encode("utf-8", "replace"))
        pairs = unpack(f"<{len(numbers) // 4}I", numbers)
        return list(zip(pairs[::2], pairs[1::2], strict=True))

    def _ask(self, frame: bytes) -> bytes:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            write_frame(stdin, frame)
            answer = read_frame(stdout)
        except OSError:
            answer = None
        if answer is None:
            raise SearchStopped
        return answer


def _command(*arguments: str) -> list[str]:
    if not sys.executable or getattr(sys, "frozen", False):
        raise PatternError(_NOT_HERE.format("there is no Python interpreter to start"))
    worker = Path(_regex_worker.__file__)
    return [sys.executable, "-I", "-S", "-B", str(worker), *arguments]
