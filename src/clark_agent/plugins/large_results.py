"""LargeResults: keeps results that are too large for the model aside, and shows it a part.

    config = LoopConfig(stream=…, tools=[…], plugins=[LargeResults()])

The model gets the beginning and the end of such a result, and the id under which the whole of it is
kept. With the tool ``read_result`` it reads any part of it, or searches it. An `Agent` with tools
has this plugin, unless its ``max_result_chars`` is None.

- It sees a result last, after all hooks, whether the tool returned it, failed, or a hook answered.
- The whole result is in the log of the run, before the record that refers to it; without a log, or
  with a store that keeps no results, it is in the memory of the process. With ``folder``, it is in
  files there.
- The id follows from the call: run, turn and position. A run that is resumed or replayed has the
  same ids and the same texts. Without a log, a random part makes it unique, because two runs may
  have the same run id.
- A model can read the results of its own run, of the runs above it, and those in the messages that
  the run began with, if their ``details`` have the digest of the text: whoever has it had the text.
  Ids in the text of a result or a message, or in the ``details`` of a tool, give no right.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import Any, Literal

from msgspec import Struct

from clark_agent._kept_text import Pieces, ReadPieces, pack
from clark_agent._untrusted import head_of, tail_of
from clark_agent.errors import ConfigError
from clark_agent.plugins._read_result import read_result_tool
from clark_agent.tools import NEVER_CLIP, AgentTool, ToolResult
from clark_agent.tools.base import check_tool_name
from clark_agent.types import TextContent, ToolResultBlock, ToolResultMessage

__all__ = ["KEPT_IN_MEMORY", "MAX_RESULT_CHARS", "LargeResults", "Shortened", "note_in"]

MAX_RESULT_CHARS = 50_000
"""How long a result may be before it is kept aside: about 12,000 tokens, a sixteenth of a window of
200,000, so that a batch of several results fits beside the history.
"""
_SHOWN_CHARS = 10_000
_PAGE_CHARS = 20_000
_MAX_DATA_CHARS = 20_000_000
_SMALLEST = 200


class Shortened(Struct, frozen=True):
    """A result as the model gets it, and what is kept of it."""

    content: tuple[ToolResultBlock, ...]
    text: Pieces | None
    """The pieces of its text, if that is kept."""
    data: tuple[tuple[int, Pieces], ...]
    """The pieces of its images and files that are kept, each with the index of its block."""


class LargeResults:
    """Keeps results aside that are too large for the model. See the module docstring.

    Args:
        max_chars: How many characters of text a result may have. A tool may have its own limit, or
            none, with its ``max_result_chars``.
        shown_chars: How many characters of a longer one the model gets: three fifths from its
            beginning, the rest from its end.
        page_chars: How many characters ``read_result`` returns at most.
        max_data_chars: How many characters the images and files of a result may have together.
            Those beyond are left out of the result, with a note in their place. The default is what
            all large providers accept in one request.
        folder: Where to keep the results, in files that only their owner can read. None: in the log
            of the run, or in memory.
        tool_name: The name of the tool that reads them.

    Raises `ConfigError` for a limit that is not a number of characters.
    """

    name = "large_results"
    inheritable_to_child = True

    def __init__(
        self,
        max_chars: int = MAX_RESULT_CHARS,
        *,
        shown_chars: int = _SHOWN_CHARS,
        page_chars: int = _PAGE_CHARS,
        max_data_chars: int = _MAX_DATA_CHARS,
        folder: str | os.PathLike[str] | None = None,
        tool_name: str = "read_result",
    ) -> None:
        for what, value in (
            ("max_chars", max_chars),
            ("shown_chars", shown_chars),
            ("page_chars", page_chars),
            ("max_data_chars", max_data_chars),
        ):
            number: Any = value
            least = _SMALLEST if what == "page_chars" else 1
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ConfigError(
                    f"LargeResults: {what} must be a number of characters, at least {least}, "
                    f"not {value!r}"
                )
        check_tool_name(tool_name, "LargeResults")
        self.max_chars = max_chars
        self.shown_chars = min(shown_chars, max_chars)
        self.page_chars = page_chars
        self.max_data_chars = max_data_chars
        self.folder = None if folder is None else os.path.abspath(folder)
        self.tool: AgentTool = read_result_tool(tool_name)
        self.tools: Sequence[AgentTool] = (self.tool,)

    # --- what the model gets --------------------------------------------------------------------

    def fits(self, result: ToolResult, tool: AgentTool | None) -> bool:
        """Whether the model can have the result as it is. Costs one comparison for most."""
        content = result.content
        if tool is None or tool.max_result_chars is None:
            cap: float = self.max_chars
        else:
            cap = _in_characters(tool.max_result_chars)
        if len(content) == 1:
            block = content[0]
            if type(block) is TextContent:
                return len(block.text) <= cap or self._is_page(tool)
        texts = data = 0
        for block in content:
            if isinstance(block, TextContent):
                texts += len(block.text)
            else:
                data += len(block.source)
        return texts <= cap and data <= self.max_data_chars

    def _is_page(self, tool: AgentTool | None) -> bool:
        """Whether the tool returns pages of large results, which are as long as they may be."""
        return tool is not None and tool.name == self.tool.name

    def shorten(self, result: ToolResult, tool: AgentTool | None, result_id: str) -> Shortened:
        """Return what the model gets of a result that does not fit, and what is to be kept."""
        own = None if tool is None else tool.max_result_chars
        cap = self.max_chars if own is None else _in_characters(own)
        text, left = result.plain_text, self.max_data_chars
        is_long = len(text) > cap
        content: list[ToolResultBlock] = []
        data: list[tuple[int, Pieces]] = []
        if is_long:
            content.append(TextContent(self._part_of(text, int(cap), result_id)))
        for index, block in enumerate(result.content):
            if isinstance(block, TextContent):
                if not is_long:
                    content.append(block)
            elif len(block.source) <= left:
                left -= len(block.source)
                content.append(block)
            else:
                kind = block.media_type or "of an unknown type"
                data.append((index, pack(block.source, media_type=kind)))
                note = (
                    f"[{_WHAT[type(block).__name__]} ({kind}, {len(block.source):,} characters) "
                    "is left out: it is too large for a request.]"
                )
                content.append(TextContent(note))
        return Shortened(tuple(content), pack(text) if is_long else None, tuple(data))

    def _part_of(self, text: str, cap: int, result_id: str) -> str:
        """The beginning and the end of a text, around a note."""
        shown = min(self.shown_chars, cap)
        first, last = shown - shown * 2 // 5, shown * 2 // 5
        stop, start = first, len(text) - last
        note = (
            f"[Characters {stop:,} to {start:,} of {len(text):,} are left out here. "
            f"To read or search them, call {self.tool.name} with the id {result_id}]"
        )
        return f"{head_of(text, stop)}\n\n{note}\n\n{tail_of(text, start)}"

    # --- where they are kept, if not in the log -------------------------------------------------

    def keep(self, run_id: str, name: str, pieces: Pieces) -> None:
        """Keep pieces in the folder, if there is one, or in memory."""
        if self.folder is None:
            KEPT_IN_MEMORY.keep(run_id, name, pieces)
        else:
            from clark_agent._kept_files import write_kept  # only a folder needs it

            write_kept(self.folder, run_id, name, pieces)

    def kept_in_folder(self, run_id: str, name: str, digest: str | None) -> ReadPieces:
        """How to read pieces from the folder, which the plugin must have."""
        from clark_agent._kept_files import read_kept  # only a folder needs it

        assert self.folder is not None
        return partial(read_kept, self.folder, run_id, name, digest)


def note_in(message: ToolResultMessage) -> str:
    """The note in a result that was shortened; empty if there is none."""
    if not isinstance(message.details, dict) or "kept_result" not in message.details:
        return ""
    found = re.search(r"\[Characters [\d,]+ to [^\[\]]+\]", message.plain_text)
    return "" if found is None else found[0]


def _in_characters(limit: int | Literal["never"]) -> float:
    return float("inf") if limit == NEVER_CLIP else limit


_WHAT = {"ImageContent": "An image", "FileContent": "A file"}


class _Memory:
    """Keeps the newest results of the process, up to a number of bytes. Safe to use in threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._kept: OrderedDict[tuple[str, str], tuple[bytes, ...]] = OrderedDict()
        self._lock = Lock()

    def keep(self, run_id: str, name: str, pieces: Pieces) -> None:
        """Keep pieces in place of what the name had. The oldest go, but never these."""
        with self._lock:
            self._drop((run_id, name))
            self._kept[run_id, name] = tuple(pieces)
            self._size += _size_of(pieces)
            while self._size > self._most and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[str, str]) -> None:
        pieces = self._kept.pop(key, None)
        if pieces is not None:
            self._size -= _size_of(pieces)

    def kept(self, run_id: str, name: str, start: int, stop: int) -> Pieces:
        """Return some of the pieces."""
        return self._kept.get((run_id, name), ())[start:stop]


def _size_of(pieces: Pieces) -> int:
    return sum([len(piece) for piece in pieces])


KEPT_IN_MEMORY = _Memory(128 << 20)
"""The results of runs without a log and without a folder. One for the process, so that the runs of
a conversation and child runs find them, whatever config they have.
"""
