"""The input line at the bottom of the terminal. Text may appear above it during typing.

Text passed to `ChatPrompt.write` is printed above the line and stays there. Between the two, a few
lines show unfinished text. Each `refresh` redraws them, and they are not kept.

Ctrl-C never ends the program: it calls ``interrupt``, even between two lines, and clears the line
if there was nothing to interrupt.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from threading import get_ident
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.patch_stdout import patch_stdout
from prompt_toolkit.styles import Style
from rich.console import Console
from rich.text import Text

__all__ = ["ChatPrompt"]

_ANYWHERE = Console(file=StringIO())  # rich needs a console to wrap text; nothing is printed there
_LIVE_ROWS = 8
_REDRAWS_APART = 0.05
_LEAVE = (signal.SIGTERM, signal.SIGHUP)
_STYLE = Style.from_dict(
    {"prompt": "bold", "live": "ansibrightblack", "bottom-toolbar": "noreverse"}
)


class ChatPrompt:
    """Reads lines and shows the state of the chat.

    ``live`` returns the end of the unfinished text, about so many characters; ``label`` the text
    before the input line; ``status`` the toolbar. ``complete`` returns the completions at the
    cursor, each with a remark. ``keeps`` says whether the current input enters the history.
    """

    def __init__(
        self,
        history: Path,
        *,
        live: Callable[[int], str],
        label: Callable[[], str],
        status: Callable[[], str],
        interrupt: Callable[[], bool],
        complete: Callable[[str], Iterable[tuple[str, str]]],
        keeps: Callable[[], bool],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._unwritten: list[str] = []
        self._writing: Awaitable[None] | None = None
        self._live = live
        self._label = label
        self._interrupt = interrupt
        self.left_by: signal.Signals | None = None
        """The signal that ended the input."""
        self._session: PromptSession[str] = PromptSession(
            self._message,
            history=_History(_private(history), keeps),
            completer=_Words(complete),
            complete_while_typing=Condition(lambda: self._text.startswith("/")),
            bottom_toolbar=lambda: [("class:bottom-toolbar.text", f" {status()} ")],
            key_bindings=self._keys(),
            style=_STYLE,
            enable_suspend=True,
            erase_when_done=True,
        )
        self._session.app.min_redraw_interval = _REDRAWS_APART

    async def read(self) -> str:
        """Return the next line. Raises `EOFError` at the end of the input."""
        if self.left_by is not None:
            raise EOFError
        return await self._session.prompt_async(handle_sigint=False)

    def refresh(self) -> None:
        """Redraw the lower part soon."""
        self._session.app.invalidate()

    def write(self, text: str) -> None:
        """Print whole lines above the input line. Safe from any thread."""
        if get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self.write, text)
            return
        self._unwritten.append(text)
        if not self._session.app.is_running:
            self._flush()
        elif len(self._unwritten) == 1:  # otherwise the pending write prints this too
            self._writing = run_in_terminal(self._flush)

    def _flush(self) -> None:
        text = "".join(self._unwritten)
        self._unwritten.clear()
        output = self._session.app.output
        output.enable_autowrap()
        output.write_raw(text)
        output.flush()

    @contextmanager
    def owning(self) -> Generator[None]:
        """Handle signals inside the block, and keep output of others from breaking the screen."""
        loop = self._loop
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        for number in _LEAVE:
            loop.add_signal_handler(number, self._leave, number)
        try:
            with patch_stdout():
                yield
        finally:
            for number in (signal.SIGINT, *_LEAVE):
                loop.remove_signal_handler(number)

    @property
    def _text(self) -> str:
        return self._session.default_buffer.text

    def _interrupted(self, event: KeyPressEvent | None = None) -> None:
        if not self._interrupt():
            self._session.default_buffer.reset()

    def _leave(self, number: signal.Signals) -> None:
        self.left_by = self.left_by or number
        if self._session.app.is_running:
            self._session.app.exit(exception=EOFError)

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        keys.add("c-c")(self._interrupted)

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return keys

    def _message(self) -> StyleAndTextTuples:
        size = self._session.app.output.get_size()
        rows = max(1, min(_LIVE_ROWS, size.rows // 3))
        lines = self._live(rows * size.columns).expandtabs().split("\n")
        wrapped = [Text(line).wrap(_ANYWHERE, size.columns) for line in lines]
        pieces = [piece.plain for line in wrapped for piece in line]
        shown: StyleAndTextTuples = [("class:live", f"{piece}\n") for piece in pieces[-rows:]]
        return [*(shown if any(pieces) else []), ("class:prompt", self._label())]


def _private(history: Path) -> Path:
    """Create the file readable only by its owner, because people type secrets."""
    history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(history, os.O_CREAT | os.O_RDWR, 0o600))
    return history


class _History(FileHistory):
    def __init__(self, path: Path, keeps: Callable[[], bool]) -> None:
        super().__init__(str(path))
        self._keeps = keeps

    def append_string(self, string: str) -> None:
        if self._keeps() and string.strip():
            super().append_string(string)


class _Words(Completer):
    def __init__(self, complete: Callable[[str], Iterable[tuple[str, str]]]) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Any:
        before = document.text_before_cursor
        typed = before.rpartition(" ")[2]
        for word, remark in self._complete(before):
            if word.startswith(typed):
                yield Completion(word, -len(typed), display_meta=remark)
