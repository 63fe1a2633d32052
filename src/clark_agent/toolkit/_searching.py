"""Searches for a text or a regular expression in a block of text, line by line.

`PlainSearch` searches for a text, in time proportional to the block. `RegexSearch` searches for a
regular expression. Matching one can take forever and block its whole process, so it runs in another
process, which can be killed. That process is started from memory and from outside of the root
(:mod:`clark_agent.toolkit._outside`), has an empty environment, and runs in the sandbox if there is
one, without write access to any file.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from math import ceil
from struct import unpack
from threading import Timer
from typing import Protocol, Self, TypeAlias

from msgspec import Struct

from clark_agent.cancellation import CancellationToken
from clark_agent.toolkit import _regex_worker
from clark_agent.toolkit._outside import Interpreter, find_interpreter, is_below, source_of
from clark_agent.toolkit._regex_worker import read_frame, write_frame
from clark_agent.toolkit.sandbox import SandboxStatus, sandbox_status, sandboxed

__all__ = [
    "Hit",
    "PatternError",
    "PlainSearch",
    "RegexSearch",
    "RegexWorker",
    "Search",
    "SearchStopped",
]

Hit: TypeAlias = tuple[int, int]
"""The number of a matching line, from 0, and the position in it where the match begins."""


_NOT_HERE = "regular expressions cannot be searched for here ({}): search for plain text"


class PatternError(Exception):
    """The pattern is invalid; the message is written for a model."""


class SearchStopped(Exception):
    """The search ended early: by the token, by the time limit, or because the process died.

    The token and the clock show which it was.
    """


class Search(Protocol):
    """Searches for one pattern in many blocks."""

    def find(self, block: str) -> list[Hit]:
        """Return the matching lines, up to the limit."""
        ...


class _Folding(dict[int, str]):
    """Maps each character to its case-folded form: always one character, to keep positions valid.

    Some characters fold to several (``ß``, ``İ``) or depend on their neighbours (``Σ``).
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        folded = character.casefold()
        one = folded if len(folded) == 1 else character.lower()[0]
        if len(self) < _MOST_FOLDED:
            self[code] = one
        return one


_MOST_FOLDED = 65_536


def _as_it_is(text: str) -> str:
    return text


def _folded(text: str) -> str:
    return text.lower() if text.isascii() else text.translate(_FOLDING)


_FOLDING = _Folding()


class PlainSearch:
    """Searches for a literal text."""

    def __init__(self, text: str, *, ignore_case: bool, limit: int) -> None:
        self._form: Callable[[str], str] = _folded if ignore_case else _as_it_is
        self._text = self._form(text)
        self._limit = limit

    def find(self, block: str) -> list[Hit]:
        """Return the lines that contain the text."""
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


class RegexWorker(Struct, frozen=True):
    """How to start the worker for a workspace. Made before any tool can change a file there."""

    root: str
    interpreter: Interpreter | None
    source: str

    @classmethod
    def for_root(cls, root: str) -> Self:
        """Return the worker for a root; its interpreter is None if all lie in the root."""
        try:
            source = source_of(_regex_worker.__name__)
        except OSError:
            return cls(root, None, "")
        return cls(root, find_interpreter(root), source)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the process. Raises `PatternError`."""
        if self.interpreter is None:
            why = f"there is no Python interpreter outside of {self.root}"
            raise PatternError(_NOT_HERE.format(why))
        argv = self.interpreter.command(self.source, *arguments)
        status = sandbox_status()
        is_inside = status.works and not is_below(status.program or "", self.root)
        try:
            with ExitStack() as files:
                if is_inside and _runs_in(status, self.interpreter):
                    return _start(*_inside(status, self.interpreter, argv, files))
                return _start(argv)
        except OSError as error:
            raise PatternError(_NOT_HERE.format(error)) from error


def _inside(
    status: SandboxStatus, interpreter: Interpreter, argv: Sequence[str], files: ExitStack
) -> tuple[list[str], list[int]]:
    folders = interpreter.folders
    return sandboxed(status, argv, files, readable=folders, scratch=1 << 20, session=False)


@lru_cache
def _runs_in(status: SandboxStatus, interpreter: Interpreter) -> bool:
    """Return whether the sandbox shows everything that this interpreter needs."""
    with ExitStack() as files:
        process = _start(*_inside(status, interpreter, interpreter.command(""), files))
    process.communicate()
    return process.returncode == 0


def _start(argv: Sequence[str], descriptors: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        cwd="/",
        env={},
        start_new_session=True,  # Ctrl-C is for this process, which then ends the worker
    )


class RegexSearch:
    """Searches for a regular expression in a separate process.

    Raises `PatternError` for an invalid pattern. The process ends when the ``with`` block ends, at
    the time limit, or when the token is cancelled. It outlives this process by at most the limit.
    """

    def __init__(
        self,
        pattern: str,
        worker: RegexWorker,
        *,
        ignore_case: bool,
        limit: int,
        seconds: float,
        token: CancellationToken,
    ) -> None:
        self._pattern = pattern
        self._worker = worker
        case = "ignore-case" if ignore_case else "exact"
        self._arguments = (str(ceil(seconds) + 1), case, str(limit))
        self._seconds = seconds
        self._token = token

    def __enter__(self) -> Self:
        self._process = self._worker.start(*self._arguments)
        self._timer = Timer(self._seconds, self._kill)
        self._timer.daemon = True
        self._timer.start()
        self._subscription = self._token.subscribe(self._kill)
        try:
            problem = self._ask(self._pattern.encode())
            if problem:
                raise PatternError(
                    f"{self._pattern!r} is not a regular expression: {problem.decode()}; to "
                    "find it as plain text leave regex out"
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._subscription.close()
        self._timer.cancel()
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # flushing the buffer fails if the process is gone
                pipe.close()

    def _kill(self) -> None:
        """Kill the whole group: the sandbox is a separate process around the searching one."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def find(self, block: str) -> list[Hit]:
        """Return the matching lines. Raises `SearchStopped`."""
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
