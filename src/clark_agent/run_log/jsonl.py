"""JsonlStore: a folder with one file a run, one record a line, readable with any tool.

    folder/5f0c….jsonl      {"v":1,"seq":0,"run":"5f0c…","at":…,"entry":{"kind":"run_began",…}}

- A record is there when its line break is. What stands behind the last line break, or a last line
  that is no JSON, was cut off in the middle of being written: `JsonlStore.load` says so, and
  `JsonlStore.reopen` cuts it off. Anything else that cannot be read is a problem of the log, and
  stays in it.
- `flush` writes once, everything since the last time. If that fails half-way the file is cut back
  to where it was; what was appended is kept, and the next flush tries again.
- Whoever writes holds a lock on the file, which goes away with the process. Reading needs none.
- A run is there from its first flush on; an empty file is nobody's.
- The name of a file is the run's id with everything but small letters, digits, ``.``, ``_`` and
  ``-`` as ``%XX``, so that ids that differ only in case have two files everywhere. A long id is
  cut, and told apart by a digest; the records name it in full.

Looking through the runs opens every file, and reads its first line and its last.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any

from msgspec import Struct

from clark_agent._private_files import make_folder
from clark_agent.errors import DecodeError
from clark_agent.run_log._files import create_file, open_file, sync_file, sync_folder, try_lock
from clark_agent.run_log._reading import FAILED, is_json, read_records
from clark_agent.run_log.records import Record
from clark_agent.run_log.store import (
    LoadedRun,
    RunAppender,
    RunBusy,
    RunExists,
    RunNotFound,
    RunStoreError,
    RunSummary,
)
from clark_agent.wire import decode_json

__all__ = ["JsonlStore"]

_SUFFIX = ".jsonl"
_LONGEST = 128
_CHUNK = 1 << 14


class JsonlStore:
    """Keeps each run in a file of its own. The folder is made when the first run begins."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()

    def path_of(self, run_id: str) -> Path:
        """The file of a run, whether there is one or not."""
        return self._folder / _file_name(run_id)

    def create(self, run_id: str) -> RunAppender:
        """Begin a run. Raises `RunExists`."""
        make_folder(self._folder)
        file = create_file(self.path_of(run_id))
        with _closed_on_failure(file):
            # A file that is empty and that nobody holds was left by a run that never wrote.
            if not try_lock(file) or os.fstat(file.fileno()).st_size:
                raise RunExists(f"there is a run {run_id!r} already", run_id)
            return _Appender(file, run_id, 0, new_in=self._folder)

    def reopen(self, run_id: str) -> RunAppender:
        """Go on with a run; a torn last record is cut off. Raises `RunNotFound` or `RunBusy`."""
        try:
            file = open_file(self.path_of(run_id))
        except FileNotFoundError:
            raise _not_found(run_id) from None
        with _closed_on_failure(file):
            if not try_lock(file):
                raise RunBusy(f"somebody is writing to the run {run_id!r}", run_id)
            end = _find_end(file)[0]
            size = file.seek(0, os.SEEK_END)
            if not size:
                raise _not_found(run_id)
            if end != size:
                file.truncate(end)
            return _Appender(file, run_id, end)

    def load(self, run_id: str) -> LoadedRun:
        """Read a run, also one that is being written. Raises `RunNotFound`."""
        try:
            data = self.path_of(run_id).read_bytes()
        except FileNotFoundError:
            raise _not_found(run_id) from None
        if not data:
            raise _not_found(run_id)
        lines = data.split(b"\n")
        is_torn = lines.pop() != b""
        if not is_torn and lines and not is_json(lines[-1]):
            is_torn = True
            lines.pop()
        rows = [(number, line) for number, line in enumerate(lines, 1) if line]
        records, problems = read_records(run_id, rows, noun="line")
        return LoadedRun(run_id, records, problems, is_torn)

    def runs(
        self,
        *,
        conversation_id: str | None = None,
        parent_run_id: str | None = None,
        limit: int | None = None,
    ) -> list[RunSummary]:
        """The runs, newest first; those of one conversation, or the children of one run.

        A file that is no log is not among them.
        """
        found: list[tuple[_Head, Path]] = []
        for path in _logs_in(self._folder):
            head = _read_head(path)
            if head is None or _file_name(head.run) != path.name:
                continue
            identity = head.entry.identity
            if conversation_id is not None and identity.conversation_id != conversation_id:
                continue
            if parent_run_id is not None and identity.parent_run_id != parent_run_id:
                continue
            found.append((head, path))
        found.sort(key=lambda pair: (pair[0].at, pair[0].run), reverse=True)
        return [_summarize(head, path) for head, path in found[:limit]]


# --- names ------------------------------------------------------------------------------------

_UNSAFE = re.compile(rb"[^a-z0-9._-]")
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d|)(?:\.|$)")  # by some systems, or hidden


def _file_name(run_id: str) -> str:
    raw = run_id.encode("utf-8", "surrogatepass")
    name = _UNSAFE.sub(lambda found: b"%%%02X" % ord(found[0]), raw).decode("ascii")
    if _RESERVED.match(name):
        name = f"%{ord(name[0]):02X}{name[1:]}" if name else "%"
    if len(name) > _LONGEST:
        name = f"{name[:40]}%~{sha256(raw).hexdigest()}"
    return name + _SUFFIX


def _logs_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.name.endswith(_SUFFIX) and e.is_file()]
    except FileNotFoundError:
        return []
    return [folder / name for name in names]


# --- the first line and the last --------------------------------------------------------------


class _Identity(Struct, frozen=True):
    parent_run_id: str | None = None
    depth: int = 0
    conversation_id: str | None = None


class _HeadEntry(Struct):
    identity: _Identity = _Identity()


class _Head(Struct):
    """As much of a first record as tells whose it is."""

    run: str
    seq: int
    at: int
    entry: _HeadEntry


class _LastEntry(Struct):
    kind: str
    outcome: Any = None


class _Last(Struct):
    """As much of a last record as tells how the run stands."""

    seq: int
    at: int
    entry: _LastEntry


def _read_head(path: Path) -> _Head | None:
    """The first record of a file; None if it has none, or is gone."""
    with suppress(FileNotFoundError, DecodeError), FileIO(path) as file:
        start = more = file.read(_CHUNK)
        while b"\n" not in more and (more := file.read(len(start))):
            start += more
        line, ending, _ = start.partition(b"\n")
        if ending:
            return decode_json(line, _Head)
    return None


def _summarize(head: _Head, path: Path) -> RunSummary:
    last = _Last(head.seq, head.at, _LastEntry(""))
    with suppress(FileNotFoundError, DecodeError), FileIO(path) as file:
        last = decode_json(_find_end(file)[1], _Last)
    outcome = {"run_ended": last.entry.outcome, "run_failed": FAILED}.get(last.entry.kind)
    return RunSummary(
        run_id=head.run,
        parent_run_id=head.entry.identity.parent_run_id,
        depth=head.entry.identity.depth,
        conversation_id=head.entry.identity.conversation_id,
        began_at=head.at,
        last_at=last.at,
        records=last.seq - head.seq + 1,
        outcome=outcome,
    )


def _find_end(file: FileIO) -> tuple[int, bytes]:
    """Where the last whole line ends, and the line."""
    size = file.seek(0, os.SEEK_END)
    end = _after_break(file, size)
    start = _after_break(file, end - 1)
    line = _read(file, start, end - 1)
    if end == size and not is_json(line):
        end, start = start, _after_break(file, start - 1)
        line = _read(file, start, end - 1)
    return end, line


def _after_break(file: FileIO, end: int) -> int:
    """The place behind the last line break before ``end``, or the beginning of the file."""
    while end > 0:
        start = max(0, end - _CHUNK)
        found = _read(file, start, end).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _read(file: FileIO, start: int, end: int) -> bytes:
    data = b""
    while start + len(data) < end:
        file.seek(start + len(data))
        more = file.read(end - start - len(data))
        if not more:
            break
        data += more
    return data


# --- writing ----------------------------------------------------------------------------------


def _not_found(run_id: str) -> RunNotFound:
    return RunNotFound(f"there is no run {run_id!r}", run_id)


@contextmanager
def _closed_on_failure(file: FileIO) -> Generator[None]:
    try:
        yield
    except BaseException:
        file.close()
        raise


class _Appender:
    """Writes to the end of a file that it has locked."""

    __slots__ = (
        "_end",
        "_file",
        "_is_unsure",
        "_is_unsynced",
        "_new_in",
        "_pending",
        "_process",
        "_run_id",
    )

    def __init__(self, file: FileIO, run_id: str, end: int, *, new_in: Path | None = None) -> None:
        self._file = file
        self._run_id = run_id
        self._new_in = new_in
        """The folder to sync, in which the file is new."""
        self._process = os.getpid()
        self._end = end
        self._pending: list[bytes] = []
        self._is_unsure = False
        """Whether there may be something behind the end."""
        self._is_unsynced = True

    def append(self, record: Record, data: bytes, /) -> None:
        """Take a record, and its JSON on one line."""
        if self._file.closed:
            raise RunStoreError(f"the log of the run {self._run_id!r} is closed", self._run_id)
        if b"\n" in data:
            raise ValueError("the JSON of a record must be on one line")
        self._pending += (data, b"\n")

    def flush(self, *, sync: bool) -> None:
        """Hand everything on."""
        if self._pending:
            self._write(b"".join(self._pending))
        if sync and self._is_unsynced:
            sync_file(self._file)
            if self._new_in is not None:
                sync_folder(self._new_in)
                self._new_in = None
            self._is_unsynced = False

    def _write(self, data: bytes) -> None:
        if self._process != os.getpid():
            raise RunStoreError("a run is written by the process that opened it", self._run_id)
        file = self._file
        if self._is_unsure:
            file.truncate(self._end)
        self._is_unsure = self._is_unsynced = True
        try:
            written = file.write(data)
            while written < len(data):
                written += file.write(memoryview(data)[written:])
        except BaseException:
            with suppress(OSError):
                file.truncate(self._end)
                self._is_unsure = False
            raise
        # Nothing can interrupt between these, so what is written is never written again.
        self._end, self._pending, self._is_unsure = self._end + written, [], False

    def close(self) -> None:
        """Flush, and let others write. Closing twice is harmless."""
        if self._file.closed:
            return
        try:
            self.flush(sync=False)
        finally:
            self._file.close()
