"""The file tools: read_file, write_file, edit_file, list_files and search_files.

All of them work in a `Workspace` and refuse what it refuses, with a plain message: the model never
sees the name of a Python exception. Paths in results are relative to the root of the workspace, so
that the next call can use them unchanged.

- A result has at most about 40,000 characters. A note in square brackets at the end says what was
  left out and how to get it.
- Files are read in pieces, and no further than needed, so that a file may have any size. To find a
  line, read_file reads at most the first 67 million characters.
- Nothing blocks the event loop: the work runs in threads. A regular expression, which could block
  the whole process, runs in a separate process.
- All tools check the call's signal between pieces.
- Before a sensitive path (:mod:`clark_agent.toolkit.sensitive`) is read or written, a person is
  asked. Without an ``ask`` function the path is refused. A search of a folder skips files that may
  hold secrets.
- ``details`` holds the content of the text as data; for ``edit_file`` also the diff.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from io import TextIOWrapper
from time import monotonic
from typing import Any

from msgspec import Struct, structs

from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ToolExecutionError
from clark_agent.toolkit._edits import Edit, EditRefused, replace_text, unified_diff
from clark_agent.toolkit._glob import Glob
from clark_agent.toolkit._permission import Permission
from clark_agent.toolkit._searching import (
    PatternError,
    PlainSearch,
    RegexSearch,
    RegexWorker,
    Search,
    SearchStopped,
)
from clark_agent.toolkit._text import NotTextError, human_size, open_text, read_document
from clark_agent.toolkit.approval import AskApproval
from clark_agent.toolkit.sensitive import Access
from clark_agent.toolkit.untrusted import mark_untrusted
from clark_agent.toolkit.workspace import Entry, Folder, Workspace, WorkspaceError, shown
from clark_agent.tools import TypedTool
from clark_agent.tools.base import AgentTool, ToolContext, ToolHistoryPolicy, ToolResult

__all__ = ["EditFile", "ListFiles", "ReadFile", "SearchFiles", "WriteFile", "file_tools"]

_MOST_CHARS = 40_000
_MOST_CHARS_OF_LINE = 2_000
_MOST_CHARS_OF_MATCH = 300
_MOST_ENTRIES = 500
_MOST_MATCHES = 200
_MOST_MATCHES_OF_FILE = 50
_MOST_CHARS_READ = 1 << 26
"""How far read_file reads into a file to find its lines."""
_BLOCK = 1 << 18

_NOT_ENTERED = frozenset({".git", ".hg", ".svn", ".jj", "node_modules", "__pycache__", ".venv"})
"""Folders that are listed but not entered unless named: their content is generated."""

_STOPPED = "stopped before it was done"


def file_tools(
    workspace: Workspace, *, max_seconds: float = 20.0, ask: AskApproval | None = None
) -> list[AgentTool]:
    """Make the file tools for a workspace; only the reading ones if it is read-only.

    ``max_seconds`` is how long a listing or a search may take. It then returns what it has found.
    ``ask`` asks a person about the paths that the workspace calls sensitive; ``always`` and
    ``never`` apply to that path in that conversation. Without it such paths are refused. With an
    `ApprovalGate` pass its ``ask``: then each call is asked about only once.
    """
    permission = Permission(workspace, ask)
    reading: list[AgentTool] = [
        ReadFile(workspace, permission),
        ListFiles(workspace, permission, max_seconds=max_seconds),
        SearchFiles(workspace, permission, max_seconds=max_seconds),
    ]
    if workspace.read_only:
        return reading
    return [*reading, WriteFile(workspace, permission), EditFile(workspace, permission)]


class _FileTool(TypedTool):
    """The base of the file tools."""

    history_policy = ToolHistoryPolicy(summary_arg="path")
    access: tuple[Access, ...] = ()
    """What the tool does to the file at ``path``."""

    def __init__(self, workspace: Workspace, permission: Permission | None = None) -> None:
        self.workspace = workspace
        self._permission = permission or Permission(workspace, None)
        super().__init__()

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        """Ask if necessary, then call `run`. A refusal becomes an error result with its own
        message.
        """
        if not isinstance(args, Struct):
            args = self.validate(args)
        try:
            await self._permission.check(self, self.access, structs.asdict(args), ctx)
            return await super().execute(args, ctx)
        except WorkspaceError as error:
            return ToolResult.error(str(error), details={"error": error.kind})
        except ToolExecutionError as error:
            return ToolResult.error(str(error))
        except OSError as error:  # for example, the disk fails in the middle of a file
            return ToolResult.error(f"reading failed: {error.strerror}")

    def preview(self, args: Any) -> str | None:
        """Return why a person should look at this call, and what it would change."""
        given: Any = self.validate(args)
        lines: list[str] = []
        try:
            name = shown(self.workspace.name_of(given.path))
            reasons = self._permission.reasons(given.path, self.access)
            lines += [f"[{name}: {reason}]" for reason in reasons.values()]
            lines.append(self._diff(name, given))
        except (WorkspaceError, EditRefused) as error:
            lines.append(f"[{error}]")
        except NotTextError as error:
            lines.append(f"[{shown(given.path)} is {error}]")
        return "\n".join([line for line in lines if line]) or None

    def _diff(self, name: str, given: Any) -> str:
        """Return what would change, as a unified diff."""
        return ""


class _ReadingTool(_FileTool):
    """A tool that changes nothing, so it can be called again for the same result."""

    idempotent = True
    reads_only = True
    history_policy = ToolHistoryPolicy(summary_arg="path", compactable_result=True)


# --- reading ----------------------------------------------------------------------------------


class ReadFile(_ReadingTool):
    """Read a text file. Long files come in parts."""

    name = "read_file"
    access = ("read",)

    def run(self, ctx: ToolContext, path: str, offset: int = 1, limit: int = 1_000) -> ToolResult:
        """Read.

        Args:
            path: The file, relative to the workspace's root.
            offset: The line to begin with, from 1.
            limit: How many lines to read at most.
        """
        name = shown(self.workspace.name_of(path))
        with self.workspace.open(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            about: dict[str, Any] = {"path": name, "size": size}
            try:
                text = open_text(file)
            except NotTextError as error:
                note = f"[No text: {name} is {error}, {human_size(size)}.]"
                return ToolResult.text(note, details={**about, "binary": str(error)})
            with text:
                part = _Part(max(offset, 1), max(limit, 1))
                # Reading on to count the lines is worth it, but only up to a limit.
                part.read(text, ctx.signal, count=size <= self.workspace.max_read_bytes)
        return part.result(about).with_narration(f"Read {name}")


class _Part:
    """Some lines of a text, and notes about the rest."""

    def __init__(self, offset: int, limit: int) -> None:
        self._offset = offset
        self._limit = limit
        self._lines: list[str] = []
        self._total = 0
        """The number of lines seen."""
        self._is_all_seen = False
        self._has_crlf = False
        self._cut: list[int] = []
        """The numbers of the lines that were too long."""

    def read(self, text: TextIOWrapper, signal: CancellationToken, *, count: bool) -> None:
        """Read the lines. Read those after them only if ``count`` asks for their number."""
        chars = 0
        is_full = False
        lines = _Lines(text, signal)
        for line, is_cut in lines:
            if is_full and not count:
                return
            self._total += 1
            if self._total < self._offset or is_full:
                continue
            chars += len(line) + 1
            is_full = bool(self._lines) and chars > _MOST_CHARS
            if is_full:
                continue
            self._has_crlf = self._has_crlf or line.endswith("\r")
            self._lines.append(line.removesuffix("\r"))
            if is_cut:
                self._cut.append(self._total)
            is_full = len(self._lines) >= self._limit
        self._is_all_seen = not lines.is_cut

    def result(self, about: dict[str, Any]) -> ToolResult:
        if not self._total:
            return ToolResult.text("[The file is empty.]", details={**about, "lines": 0})
        if not self._lines and not self._is_all_seen:
            return ToolResult.error(
                f"line {self._offset} is more than {_MOST_CHARS_READ:,} characters into the file, "
                "and no more is read: find the place with search_files"
            )
        if not self._lines:
            lines = _count(self._total, "line")
            return ToolResult.error(f"the file has only {lines}: take a smaller offset")
        last = self._offset + len(self._lines) - 1
        text = "\n".join(self._lines)
        total = self._total if self._is_all_seen else None
        details = {**about, "first_line": self._offset, "last_line": last, "lines": total}
        notes = [*self._notes(text, last, about["size"])]
        return ToolResult.text("\n\n".join([mark_untrusted(text), *notes]), details=details)

    def _notes(self, text: str, last: int, size: int) -> Iterator[str]:
        if self._cut:
            numbers = ", ".join([str(number) for number in self._cut[:10]])
            yield (
                f"[Longer than {_MOST_CHARS_OF_LINE} characters, and cut there: "
                f"line{'s' * (len(self._cut) > 1)} {numbers}. "
                "search_files shows what is around a text in them.]"
            )
        if "\ufffd" in text:
            yield "[\ufffd stands for bytes that are no valid text.]"
        if self._has_crlf:
            yield "[The lines end in CRLF.]"
        if not self._is_all_seen:
            total = f"a file of {human_size(size)}"
        elif last < self._total or self._offset > 1:
            total = str(self._total)
        else:
            return
        is_end = self._is_all_seen and last == self._total
        more = "" if is_end else f" Go on with offset={last + 1}."
        yield f"[Lines {self._offset} to {last} of {total}.{more}]"


class _Lines:
    """The lines of a text without their ends, and whether each was cut because of its length."""

    def __init__(self, text: TextIOWrapper, signal: CancellationToken) -> None:
        self._text = text
        self._signal = signal
        self._left = _MOST_CHARS_READ
        self.is_cut = False
        """Whether there is more than was read."""

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        while line := self._read(_MOST_CHARS_OF_LINE):
            rest = line
            is_cut = False
            while not rest.endswith("\n") and (rest := self._read(_BLOCK)):
                is_cut = is_cut or rest.rstrip("\r\n") != ""
            yield line.removesuffix("\n"), is_cut or self.is_cut

    def _read(self, most: int) -> str:
        _check(self._signal)
        if self._left <= 0:
            self.is_cut = self.is_cut or self._text.read(1) != ""
            return ""
        text = self._text.readline(min(most, self._left))
        self._left -= len(text)
        return text


# --- writing ----------------------------------------------------------------------------------


class WriteFile(_FileTool):
    """Write a text file: make it, with the folders it is in, or replace all that it has.

    To change a part of a file use edit_file.
    """

    name = "write_file"
    access = ("write",)

    def run(self, ctx: ToolContext, path: str, content: str) -> ToolResult:
        """Write.

        Args:
            path: The file, relative to the workspace's root.
            content: Everything that the file should have.
        """
        data = _encoded("content", content)
        name = shown(self.workspace.name_of(path))
        _check(ctx.signal)
        is_new = self.workspace.write(path, data)
        lines = content.count("\n") + (not content.endswith("\n") and content != "")
        verb = "Created" if is_new else "Replaced"
        text = f"{verb} {name}: {_count(lines, 'line')}, {human_size(len(data))}."
        details = {"path": name, "created": is_new, "size": len(data), "lines": lines}
        return ToolResult.text(text, details=details).with_narration(f"{verb} {name}")

    def _diff(self, name: str, given: Any) -> str:
        try:
            before, old = name, read_document(self.workspace.read(given.path)).text
        except WorkspaceError as error:
            if error.kind != "not_found":
                raise
            before, old = "/dev/null", ""
        return f"--- {before}\n+++ {name}\n{unified_diff(old, given.content)}"


class EditFile(_FileTool):
    """Replace a text in a file by another. Everything else in the file stays as it is.

    The text must be in the file exactly as given, and only once unless replace_all is set.
    """

    name = "edit_file"
    access = ("read", "write")

    def run(
        self, ctx: ToolContext, path: str, old: str, new: str, replace_all: bool = False
    ) -> ToolResult:
        """Edit.

        Args:
            path: The file, relative to the workspace's root.
            old: The text to replace, copied exactly, with enough around it to be there only once.
            new: What to put in its place.
            replace_all: Replace it wherever it is.
        """
        _encoded("old", old)
        _encoded("new", new)
        name = shown(self.workspace.name_of(path))
        edit: Edit | None = None

        def change(data: bytes) -> bytes:
            nonlocal edit
            _check(ctx.signal)
            document = read_document(data)
            limit = self.workspace.max_read_bytes
            edit = replace_text(document.text, old, new, replace_all=replace_all, max_chars=limit)
            return document.encode(edit.text)

        try:
            self.workspace.update(path, change)
        except EditRefused as error:
            return ToolResult.error(str(error), details={"path": name, "error": "refused"})
        except NotTextError as error:
            return ToolResult.error(f"{name} cannot be edited: it is not text but {error}")
        assert edit is not None
        return _edited(name, edit)

    def _diff(self, name: str, given: Any) -> str:
        text = read_document(self.workspace.read(given.path)).text
        edit = replace_text(
            text,
            given.old,
            given.new,
            replace_all=given.replace_all,
            max_chars=self.workspace.max_read_bytes,
        )
        return f"--- {name}\n+++ {name}\n{edit.diff}"


def _edited(name: str, edit: Edit) -> ToolResult:
    places = "1 place" if edit.count == 1 else f"{edit.count:,} places, the first"
    diff = re.sub("[\ud800-\udfff]", "\ufffd", edit.diff)  # was invalid text in the file too
    details = {
        "path": name,
        "replaced": edit.count,
        "line": edit.line,
        "diff": f"--- {name}\n+++ {name}\n{diff}",
    }
    text = f"Edited {name} in {places} at line {edit.line}."
    return ToolResult.text(text, details=details).with_narration(f"Edited {name}")


def _encoded(argument: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ToolExecutionError(
            f"'{argument}' has half a character in it (a lone surrogate), which no file can have"
        ) from None


# --- listing ----------------------------------------------------------------------------------


class ListFiles(_ReadingTool):
    """List what is in a folder and below it, the upper levels first if there is too much."""

    name = "list_files"

    def __init__(
        self,
        workspace: Workspace,
        permission: Permission | None = None,
        *,
        max_seconds: float = 20.0,
    ) -> None:
        self._max_seconds = max_seconds
        super().__init__(workspace, permission)

    def run(self, ctx: ToolContext, path: str = ".", pattern: str | None = None) -> ToolResult:
        """List.

        Args:
            path: The folder, relative to the workspace's root.
            pattern: List only what matches, for example *.py or src/**/test_*.py.
        """
        start = self.workspace.look(path)
        listing = _Listing(_Filter(pattern, start.path))
        patience = _Patience(ctx.signal, self._max_seconds)
        if start.kind != "folder":
            listing.entries.append(start)
        else:
            for folder in self.workspace.walk(path, enter=_is_entered):
                listing.add(folder)
                if listing.is_full or patience.is_over():
                    break
        return listing.result(patience).with_narration(f"Listed {shown(start.path)}")


class _Listing:
    """The entries of a tree found so far."""

    def __init__(self, wanted: _Filter) -> None:
        self.entries: list[Entry] = []
        self._wanted = wanted
        self._chars = 0
        self._entered: set[str] = set()
        self._folders: list[str] = []
        """All folders that should be entered."""
        self._cut: list[str] = []
        """The folders whose entries are incomplete."""
        self._problems: list[WorkspaceError] = []

    @property
    def is_full(self) -> bool:
        return len(self.entries) >= _MOST_ENTRIES or self._chars >= _MOST_CHARS

    def add(self, folder: Folder) -> None:
        self._entered.add(folder.path)
        if folder.problem is not None:
            self._problems.append(folder.problem)
        is_cut = folder.is_cut
        for entry in folder.entries:
            if entry.kind == "folder" and _is_entered(entry):
                self._folders.append(entry.path)
            if not self._wanted.takes(entry.path):
                continue
            if self.is_full:
                is_cut = True
                continue
            self.entries.append(entry)
            self._chars += len(entry.path) + 20
        if is_cut:
            self._cut.append(folder.path)

    def result(self, patience: _Patience) -> ToolResult:
        missing = [path for path in self._folders if path not in self._entered]
        entries = sorted(self.entries, key=lambda entry: entry.path.split("/"))
        lines = "\n".join([_describe(entry) for entry in entries])
        blocks = [mark_untrusted(lines)] if entries else []
        if not entries and self._wanted.pattern is not None:
            blocks.append(f"[Nothing matches {self._wanted.pattern}.]")
        elif not entries:
            blocks.append("[The folder is empty.]")
        if self._cut:
            blocks.append(f"[There is more in {_some(self._cut)}: give a pattern.]")
        if missing:
            why = f" after {patience.seconds:g} seconds" if patience.ran_out else ""
            blocks.append(f"[Not entered{why}: {_some(missing)}. List one of them to see more.]")
        if self._problems:
            blocks.append(f"[Not read: {_some([str(problem) for problem in self._problems])}.]")
        details = {
            "entries": [
                {"path": shown(entry.path), "kind": entry.kind, "size": entry.size}
                for entry in entries
            ],
            "complete": not (self._cut or missing or self._problems),
        }
        return ToolResult.text("\n\n".join(blocks), details=details)


def _is_entered(entry: Entry) -> bool:
    return entry.path.rpartition("/")[2] not in _NOT_ENTERED


def _describe(entry: Entry) -> str:
    path = shown(entry.path)
    match entry.kind:
        case "file":
            return f"{path} ({human_size(entry.size)})"
        case "folder":
            return f"{path}/" if _is_entered(entry) else f"{path}/ (not entered)"
        case "symlink":
            return f"{path} (a symbolic link, not followed)"
        case "other":
            return f"{path} (no regular file)"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return ", ".join([shown(name) for name in names[:5]]) + more


class _Filter:
    """Selects paths by a pattern, relative to the root or to the start of a walk."""

    def __init__(self, pattern: str | None, start: str) -> None:
        self.pattern = pattern
        self._prefix = "" if start == "." else f"{start}/"
        try:
            self._glob = None if pattern is None else Glob(pattern)
        except ValueError as error:
            raise ToolExecutionError(f"the pattern {pattern} will not do: {error}") from None

    def takes(self, path: str) -> bool:
        if self._glob is None:
            return True
        return self._glob.matches(path.removeprefix(self._prefix)) or self._glob.matches(path)


class _Patience:
    """How long a call may run: until its time is up or its signal is cancelled."""

    def __init__(self, signal: CancellationToken, seconds: float) -> None:
        self._signal = signal
        self._end = monotonic() + seconds
        self.seconds = seconds
        self.ran_out = False

    def is_over(self) -> bool:
        """Return whether the time is up. Raises if the call was cancelled."""
        _check(self._signal)
        self.ran_out = self.ran_out or monotonic() > self._end
        return self.ran_out


def _check(signal: CancellationToken) -> None:
    if signal.cancelled:
        raise ToolExecutionError(_STOPPED)


# --- searching --------------------------------------------------------------------------------


class SearchFiles(_ReadingTool):
    """Find the lines that have a text, in a file or in all files of a folder and below it."""

    name = "search_files"
    access = ("read",)
    history_policy = ToolHistoryPolicy(summary_arg="pattern", compactable_result=True)

    def __init__(
        self,
        workspace: Workspace,
        permission: Permission | None = None,
        *,
        max_seconds: float = 20.0,
    ) -> None:
        self._max_seconds = max_seconds
        self._worker = RegexWorker.for_root(str(workspace.root))
        super().__init__(workspace, permission)

    def run(
        self,
        ctx: ToolContext,
        pattern: str,
        path: str = ".",
        glob: str | None = None,
        regex: bool = False,
        ignore_case: bool = False,
    ) -> ToolResult:
        """Search.

        Args:
            pattern: The text to find, within one line.
            path: The folder or file, relative to the workspace's root.
            glob: Search only files that match, for example *.py or src/**/test_*.py.
            regex: Take the pattern as a regular expression (of Python) instead of as plain text.
            ignore_case: Do not tell capital from small letters.
        """
        _check_pattern(pattern)
        patience = _Patience(ctx.signal, self._max_seconds)
        start = self.workspace.look(path)
        matches = _Matches(self.workspace, patience, is_one_file=start.kind != "folder")
        try:
            with self._searching(pattern, regex, ignore_case, ctx.signal) as search:
                for file in self._files(start, _Filter(glob, start.path)):
                    if start.kind == "folder" and self.workspace.sensitive(file, "read"):
                        matches.leave_out(file)
                    else:
                        matches.search(file, search)
                    if matches.is_full or patience.is_over():
                        break
        except PatternError as error:
            raise ToolExecutionError(str(error)) from None
        except SearchStopped:
            matches.was_interrupted(ctx.signal)
        result = matches.result(pattern, regex=regex)
        what = shown(pattern if len(pattern) <= 80 else f"{pattern[:80]}…")
        return result.with_narration(
            f"Searched {shown(start.path)} for {what}: {matches.summary()}"
        )

    def _searching(
        self, pattern: str, regex: bool, ignore_case: bool, signal: CancellationToken
    ) -> AbstractContextManager[Search]:
        """Choose the search. A pattern without special characters needs no other process."""
        if not regex or not _SPECIAL.intersection(pattern):
            return nullcontext(PlainSearch(pattern, ignore_case=ignore_case, limit=_MOST_MATCHES))
        return RegexSearch(
            pattern,
            self._worker,
            ignore_case=ignore_case,
            limit=_MOST_MATCHES,
            seconds=self._max_seconds,
            token=signal,
        )

    def _files(self, start: Entry, wanted: _Filter) -> Iterator[str]:
        if start.kind != "folder":
            self.workspace.open(start.path).close()  # the path was named, so report its errors
            yield start.path
            return
        for folder in self.workspace.walk(start.path, enter=_is_entered):
            for entry in folder.entries:
                if entry.kind == "file" and wanted.takes(entry.path):
                    yield entry.path


class _Matches:
    """The matches found so far."""

    def __init__(self, workspace: Workspace, patience: _Patience, *, is_one_file: bool) -> None:
        self._workspace = workspace
        self._patience = patience
        self._most_in_file = _MOST_MATCHES if is_one_file else _MOST_MATCHES_OF_FILE
        self._found: list[dict[str, Any]] = []
        self._chars = 0
        self._files = 0
        self._binary = 0
        self._current = ""
        self._cut: list[str] = []
        self._problems: list[str] = []
        self._left_out: list[str] = []
        self._interruption: str | None = None

    @property
    def is_full(self) -> bool:
        return len(self._found) >= _MOST_MATCHES or self._chars >= _MOST_CHARS

    def search(self, path: str, search: Search) -> None:
        """Search one file."""
        self._current = path
        try:
            with self._workspace.open(path) as file, open_text(file) as text:
                self._files += 1
                self._search_text(text, search)
        except NotTextError:
            self._binary += 1
        except WorkspaceError as error:
            self._problems.append(str(error))
        except OSError as error:
            self._problems.append(f"{path}: {error.strerror}")

    def leave_out(self, path: str) -> None:
        """Record a file that was skipped because a person would have to be asked."""
        self._left_out.append(path)

    def _search_text(self, text: TextIOWrapper, search: Search) -> None:
        first = 1
        count = 0
        while block := text.read(_BLOCK):
            if not block.endswith("\n"):
                block += text.readline(_BLOCK)
            hits = search.find(block)
            lines = block.split("\n") if hits else []
            for line, place in hits:
                if self.is_full or count >= self._most_in_file:
                    self._cut.append(self._current)
                    return
                self._add(first + line, _excerpt(lines[line], place))
                count += 1
            if self._patience.is_over():
                return
            first += block.count("\n")

    def _add(self, line: int, text: str) -> None:
        self._found.append({"path": shown(self._current), "line": line, "text": text})
        self._chars += len(self._current) + len(text) + 10

    def was_interrupted(self, signal: CancellationToken) -> None:
        """Record that the worker process for the regular expression has ended."""
        _check(signal)
        took_long = self._patience.is_over()
        reason = "it took too long" if took_long else "the process that searches was killed"
        where = f", in {shown(self._current)}" if self._current else ""
        self._interruption = f"{reason}{where}: use a simpler pattern"

    def summary(self) -> str:
        count = len(self._found)
        return f"{count} match{'es' * (count != 1)}"

    def result(self, pattern: str, *, regex: bool) -> ToolResult:
        lines = [f"{found['path']}:{found['line']}: {found['text']}" for found in self._found]
        found = mark_untrusted("\n".join(lines))
        blocks = [found if lines else self._nothing(pattern, regex=regex)]
        limits: list[str] = []
        if self._cut:
            limits.append(f"There is more in {_some(self._cut)}")
        if self.is_full:
            limits.append(f"Stopped at {self.summary()}")
        if self._patience.ran_out and self._interruption is None:
            limits.append(f"Stopped after {self._patience.seconds:g} seconds")
        if limits:
            blocks.append(f"[{'. '.join(limits)}: narrow it down with path, glob or pattern.]")
        if self._interruption is not None:
            blocks.append(f"[Not finished: {self._interruption}.]")
        if self._problems:
            blocks.append(f"[Not searched: {_some(self._problems)}.]")
        if self._left_out:
            names = _some(self._left_out)
            blocks.append(f"[Left out, because they may hold secrets: {names}. Name one to ask.]")
        details = {"matches": self._found, "files": self._files, "complete": len(blocks) == 1}
        return ToolResult.text("\n\n".join(blocks), details=details)

    def _nothing(self, pattern: str, *, regex: bool) -> str:
        text = f"No match in {_count(self._files, 'file')}"
        if self._binary:
            text += f"; {_count(self._binary, 'binary file')} left out"
        if not regex and _SPECIAL.intersection(pattern):
            text += ". The pattern was taken as plain text: set regex for a regular expression"
        return f"[{text}.]"


_SPECIAL = frozenset("\\^$.|?*+()[]{}")


def _check_pattern(pattern: str) -> None:
    _encoded("pattern", pattern)
    if not pattern:
        raise ToolExecutionError("the pattern is empty: give a text to find")
    if "\n" in pattern:
        raise ToolExecutionError("the pattern has a line break in it: search for one line of it")


def _excerpt(line: str, place: int) -> str:
    """Return the line, or the part of it around the match."""
    line = line.removesuffix("\r")
    if len(line) <= _MOST_CHARS_OF_MATCH:
        return line
    start = min(max(place - _MOST_CHARS_OF_MATCH // 3, 0), len(line) - _MOST_CHARS_OF_MATCH)
    end = start + _MOST_CHARS_OF_MATCH
    return f"{'…' * (start > 0)}{line[start:end]}{'…' * (end < len(line))}"
