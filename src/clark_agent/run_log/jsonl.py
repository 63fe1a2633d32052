"""JsonlStore: a folder with one file per run and one record per line, readable with any tool.

    folder/5f0c….jsonl      {"v":2,"seq":0,"run":"5f0c…","at":…,"entry":{"kind":"run_began",…},…}
    folder/5f0c….mail       its mailbox, once something was posted: one message per line
    folder/5f0c….kept/      results that are too large for the model, each in a file
    folder/5f0c….live       only while a tail of the run is open: what is published to it

- An interrupted write leaves the beginning of one record after the last line break, a torn end.
  `JsonlStore.load` reports it, and `JsonlStore.reopen` cuts it off. A record that lacks only its
  line break is complete. Any other change is a problem of the log, and stays in it.
- `flush` writes everything since the last flush at once. If that fails half-way, the file is
  truncated to its old length; the appended records are kept, and the next flush retries. After it
  there is nothing to wait for; with ``sync`` it waits for the disk itself.
- The writer holds a lock on the file, which ends with the process and is not inherited. Reading
  needs no lock.
- A run exists from its first record on. A process that died too early may leave an empty file, or a
  part of one record: the run can still be created.
- New files and the folder are accessible only to their owner (0600 and 0700).
- The name of a file is the run's id with everything but small letters, digits, ``.``, ``_`` and
  ``-`` as ``%XX``, so that ids that differ only in case have different files everywhere. A long id
  is cut and gets a digest; the records contain it in full.
- To delete a run, delete everything whose name begins like that of its file.
- A tail looks at the size of the file, up to a hundred times a second while the run writes, and
  five times a second otherwise. It reads what is new, up to the last line break.

Listing the runs opens every file that is new or has changed since the last listing, and reads its
first and its last line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from clark_agent._finished import FINISHED
from clark_agent._kept_files import read_kept_in, write_kept_in
from clark_agent._private_files import file_name, make_folder
from clark_agent.errors import (
    DecodeError,
    LogDamaged,
    RunBusy,
    RunExists,
    RunNotFound,
    RunStoreError,
)
from clark_agent.messages.wire import decode_json
from clark_agent.run_log import _live
from clark_agent.run_log._files import create_file, open_file, sync_file, sync_folder, try_lock
from clark_agent.run_log._live import LiveReader
from clark_agent.run_log._mail_file import Seen, post_mail, read_mail
from clark_agent.run_log._polling import Polling
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.pages import START, LogPage, LogPlace
from clark_agent.run_log.reader import FAILED, SUSPENDED, LogReader, is_torn
from clark_agent.run_log.records import Record
from clark_agent.run_log.store import LoadedRun, RunAppender, RunSummary

__all__ = ["JsonlStore"]

_SUFFIX, _MAIL, _LIVE, _KEPT = ".jsonl", ".mail", ".live", ".kept"
_CHUNK = 1 << 14
_LINE_BREAK = 0x0A  # finding a number in bytes is twenty times as fast as finding bytes
_LONGEST_READ = 1 << 20
_MAILBOXES = 1000
_PATIENCE = 0.05
"""How long a tail waits for the line break of a complete record."""
_FIRST = (0, 1)
"""The possible numbers of the first record of a log."""


class JsonlStore:
    """Keeps each run in its own file. The folder is created with the first run."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        self._listed: dict[str, _Listed] = {}
        """The runs at the last listing, by the names of their files."""
        self._skipped: dict[str, _Skipped] = {}
        """The files that were no logs then."""
        self._seen: dict[str, Seen] = {}
        """How much of each mailbox was read, for the latest ones: runs read theirs again and again,
        and most often there is nothing new.
        """

    def path_of(self, run_id: str) -> Path:
        """Return the file of a run, whether or not it exists."""
        return self._folder / _file_name(run_id)

    def create(self, run_id: str) -> RunAppender:
        """Create a run. Raises `RunExists`."""
        make_folder(self._folder)
        file = create_file(self.path_of(run_id))
        with _closed_on_failure(file):
            if not try_lock(file):
                raise RunExists(run_id)
            line, rest, _ = _find_end(file)
            if line is not None or (rest and not is_torn(rest, run_id, _FIRST)):
                raise RunExists(run_id)
            if rest:
                file.truncate(0)
            return _Appender(file, run_id, 0, self._kept_in(run_id), new_in=self._folder)

    def reopen(self, run_id: str, *, after: int) -> RunAppender:
        """Continue a run after its last record; a torn record is cut off.

        Raises `RunNotFound` or `RunBusy`.
        """
        try:
            file = open_file(self.path_of(run_id))
        except FileNotFoundError:
            raise RunNotFound(run_id) from None
        with _closed_on_failure(file):
            if not try_lock(file):
                raise RunBusy(run_id)
            line, rest, end = _find_end(file)
            last = None if line is None else _number_of(line, run_id, end)
            is_in_line = bool(rest) and not is_torn(
                rest, run_id, _FIRST if last is None else (last + 1,)
            )
            if is_in_line:
                last, end = _number_of(rest, run_id, end), end + len(rest)
            if last is None:
                raise RunNotFound(run_id)
            if last != after:
                raise RunBusy.changed(run_id, last, after)
            if rest and not is_in_line:
                file.truncate(end)
            return _Appender(file, run_id, end, self._kept_in(run_id), is_in_line=is_in_line)

    def load(self, run_id: str) -> LoadedRun:
        """Read a run, even while it is written. Raises `RunNotFound`."""
        try:
            data = self.path_of(run_id).read_bytes()
        except FileNotFoundError:
            raise RunNotFound(run_id) from None
        loaded = read_log(run_id, data)
        if not loaded.records and not loaded.problems:
            raise RunNotFound(run_id)
        return loaded

    def runs(
        self,
        *,
        conversation_id: str | None = None,
        parent_run_id: str | None = None,
        outcome: str | None = None,
        limit: int | None = None,
    ) -> list[RunSummary]:
        """Return the runs, newest first; those of one conversation, the children of one run, or
        those with one outcome.

        Files that are not logs are skipped; see `unreadable`.
        """
        found: list[_Listed] = []
        for listed in self._list():
            identity = listed.head.entry.identity
            if conversation_id is not None and identity.conversation_id != conversation_id:
                continue
            if parent_run_id is not None and identity.parent_run_id != parent_run_id:
                continue
            found.append(listed)
        found.sort(key=lambda listed: (listed.head.at, listed.head.run), reverse=True)
        if outcome is None:
            return [listed.summary() for listed in found[:limit]]
        summaries = (listed.summary() for listed in found)
        return list(islice((run for run in summaries if run.outcome == outcome), limit))

    def unreadable(self) -> list[str]:
        """Return the names of the files that the last listing skipped although they have a first
        line: it is not the first record of the run that the file is named after.
        """
        return sorted(name for name, skipped in self._skipped.items() if skipped.has_line)

    def _list(self) -> list[_Listed]:
        """Return all runs. A file is read again only if it has changed."""
        before, listed = self._listed, {}
        skipped: dict[str, _Skipped] = {}
        for path, state in _logs_in(self._folder):
            known = before.get(path.name)
            if known is None or known.state != state:
                earlier = self._skipped.get(path.name)
                if earlier is not None and earlier.state == state:
                    skipped[path.name] = earlier
                    continue
                is_same = known is not None and known.state[0] == state[0]
                head = known.head if known is not None and is_same else _read_head(path)
                if head is None or _file_name(head.run) != path.name:
                    skipped[path.name] = _Skipped(state, _has_line(path))
                    continue
                known = _Listed(path, state, head)
            listed[path.name] = known
        self._listed, self._skipped = listed, skipped
        return [*listed.values()]

    def tail(self, run_id: str, *, after: int = -1) -> JsonlTail:
        """Return a reader of the records after this number, and of those to come. Raises
        `RunNotFound`.
        """
        path = self.path_of(run_id)
        _check_exists(path, run_id)
        return JsonlTail(path, run_id, after)

    def tail_from(self, run_id: str, place: LogPlace) -> JsonlTail:
        """Return a reader of the records behind a place, and of those to come. Raises
        `RunNotFound`.
        """
        path = self.path_of(run_id)
        _check_exists(path, run_id)
        return JsonlTail(path, run_id, place=place)

    def read_page(self, run_id: str, place: LogPlace, *, records: int, size: int) -> LogPage:
        """Return the records behind a place: at most so many, and about so many bytes. Raises
        `RunNotFound`, and `LogDamaged` if the file ends before the place.
        """
        try:
            with FileIO(self.path_of(run_id)) as file:
                return _page(file, run_id, place, records, size)
        except FileNotFoundError:
            raise RunNotFound(run_id) from None

    def read_end(self, run_id: str, *, records: int, size: int) -> list[Record]:
        """Return the last records: at most so many, and about so many bytes."""
        try:
            with FileIO(self.path_of(run_id)) as file:
                line, rest, end = _find_end(file)
                start = max(0, end - max(size, len(line or b"") + 2))
                lines = _read(file, start, end).split(b"\n")
        except FileNotFoundError:
            raise RunNotFound(run_id) from None
        lines[-1] = rest
        return _readable(lines[1:] if start else lines)[-records:]

    def post(self, run_id: str, mail: Mail) -> bool:
        """Put a message into the mailbox of a run. Return False if it has one with the same id.

        Waits for other processes that post, up to half a minute. Raises `RunNotFound`.
        """
        path = self.path_of(run_id)
        _check_exists(path, run_id)
        return post_mail(path.with_suffix(_MAIL), run_id, mail)

    def mail(self, run_id: str, *, after: int = 0) -> Sequence[Mail]:
        """Return the messages in the mailbox of a run, without the first ``after`` of them."""
        path = self.path_of(run_id).with_suffix(_MAIL)
        found, seen = read_mail(path, run_id, after, self._seen.get(run_id))
        if seen is not None:
            self._seen[run_id] = seen
            if len(self._seen) > _MAILBOXES:
                self._seen.clear()
        return found

    def kept(self, run_id: str, name: str, start: int, stop: int) -> Sequence[bytes]:
        """Return pieces of a large result; nothing if the run has none of that name."""
        return read_kept_in(self._kept_in(run_id), name, start, stop)

    def _kept_in(self, run_id: str) -> Path:
        return self.path_of(run_id).with_suffix(_KEPT)

    def publish(self, run_id: str, data: bytes) -> None:
        """Show something to the tails of the run that exist now."""
        _live.publish(self.path_of(run_id).with_suffix(_LIVE), data)


def read_log(run_id: str, data: bytes) -> LoadedRun:
    """Return the run in the content of a file."""
    reader = LogReader(run_id, "line {}, byte {}")
    *lines, rest = data.split(b"\n")
    start = 0
    for number, line in enumerate(lines, 1):
        reader.take(line, number, start)
        start += len(line) + 1
    reader.take_rest(rest, len(lines) + 1, start)
    return reader.loaded()


def _page(file: FileIO, run_id: str, place: LogPlace, records: int, size: int) -> LogPage:
    whole, at = file.seek(0, os.SEEK_END), place.byte
    if whole < at:
        reason = "records that were read before are missing"
        raise LogDamaged(run_id, place.seq + 1, reason, path=f"byte {whole}")
    end = min(whole, at + size)
    data = _read(file, at, end)
    while end < whole and data.count(b"\n") <= place.is_in_line:  # a long line
        start, end = end, min(whole, end + len(data))
        data += _read(file, start, end)
    bytes_read, is_in_line = len(data), place.is_in_line
    if is_in_line and data:
        data, at, is_in_line = data.removeprefix(b"\n"), at + 1, False
    *lines, rest = data.split(b"\n")
    reader, number = LogReader(run_id, "line {}, byte {}", after=place), place.line
    for line in lines[:records]:
        reader.take(line, number + 1, at)
        if reader.is_damaged():
            break
        number, at = number + 1, at + len(line) + 1
    is_end = end == whole and len(lines) <= records and not reader.is_damaged()
    if is_end and len(lines) < records and rest and not is_torn(rest, run_id, reader.due):
        reader.take(rest, number + 1, at)
        if not reader.is_damaged():
            number, at, is_in_line = number + 1, at + len(rest), True
    found = reader.intact()
    if not (found or reader.is_damaged() or place.byte):
        raise RunNotFound(run_id)
    return LogPage(
        records=found,
        end=LogPlace.behind(found[-1], at, number, is_in_line=is_in_line) if found else place,
        is_end=is_end or reader.is_damaged(),
        problem=reader.problem,
        bytes_read=bytes_read,
        size=whole,
    )


def _readable(lines: Iterable[bytes]) -> list[Record]:
    found: list[Record] = []
    for line in lines:
        with suppress(DecodeError):
            found.append(decode_json(line, Record))
    return found


# --- names ------------------------------------------------------------------------------------


def _file_name(run_id: str) -> str:
    return file_name(run_id) + _SUFFIX


_Stat: TypeAlias = tuple[int, int, int]
"""The inode of a file, its size, and when it was changed."""


def _logs_in(folder: Path) -> Iterator[tuple[Path, _Stat]]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX) and entry.is_file():
                with suppress(FileNotFoundError):
                    found = os.stat(entry.path)
                    state = (found.st_ino, found.st_size, found.st_mtime_ns)
                    yield folder / entry.name, state


# --- the first line and the last --------------------------------------------------------------


class _Identity(Struct, frozen=True):
    parent_run_id: str | None = None
    depth: int = 0
    conversation_id: str | None = None


class _HeadEntry(Struct):
    identity: _Identity = _Identity()


class _Head(Struct):
    """The part of a first record that identifies the run."""

    run: str
    seq: int
    at: int
    entry: _HeadEntry


class _Numbered(Struct):
    seq: int


class _LastEntry(Struct):
    kind: str
    outcome: Any = None


class _Last(Struct):
    """The part of a last record that shows the state of the run."""

    seq: int
    at: int
    entry: _LastEntry


class _Listed:
    """A run in a listing, and the state of its file then."""

    __slots__ = ("_path", "_summary", "head", "state")

    def __init__(self, path: Path, state: _Stat, head: _Head) -> None:
        self._path = path
        self.state = state
        self.head = head
        self._summary: RunSummary | None = None

    def summary(self) -> RunSummary:
        """Its summary, for which the end of the file is read once."""
        if self._summary is None:
            self._summary = _summarize(self.head, self._path)
        return self._summary


def _read_head(path: Path) -> _Head | None:
    """Return the first record of a file; None if it has none, or is gone."""
    with suppress(FileNotFoundError, DecodeError), FileIO(path) as file:
        start = more = file.read(_CHUNK)
        while b"\n" not in more and (more := file.read(len(start))):
            start += more
        return decode_json(start.partition(b"\n")[0], _Head)
    return None


class _Skipped(Struct, frozen=True):
    """A file that is no log, and its state when it was read."""

    state: _Stat
    has_line: bool


def _has_line(path: Path) -> bool:
    """Return whether a file has a complete line. Without one, its first record is being written, or
    its writer has died too early.
    """
    with suppress(FileNotFoundError), FileIO(path) as file:
        while data := file.read(_CHUNK):
            if _LINE_BREAK in data:
                return True
    return False


def _summarize(head: _Head, path: Path) -> RunSummary:
    last = _Last(head.seq, head.at, _LastEntry(""))
    with suppress(FileNotFoundError, DecodeError), FileIO(path) as file:
        line, rest, _ = _find_end(file)
        last = decode_json(line or b"", _Last)
        if rest:  # a complete record, or a torn end
            last = decode_json(rest, _Last)
    kind = last.entry.kind
    outcome = last.entry.outcome if kind == "run_ended" else _OUTCOMES.get(kind)
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


_OUTCOMES = {"run_failed": FAILED, "run_suspended": SUSPENDED, "request_decided": SUSPENDED}


def _check_exists(path: Path, run_id: str) -> None:
    """Raise `RunNotFound` unless the file has a record, readable or not."""
    with suppress(FileNotFoundError), FileIO(path) as file:
        start = more = file.read(_CHUNK)
        while b"\n" not in more and (more := file.read(len(start))):
            start += more
        if b"\n" in start or (start and not is_torn(start, run_id, _FIRST)):
            return
    raise RunNotFound(run_id)


def _number_of(line: bytes, run_id: str, place: int) -> int:
    """Return the number of the record in a line near this place."""
    try:
        return decode_json(line, _Numbered).seq
    except DecodeError as error:
        raise LogDamaged(run_id, 0, error.reason, path=f"near byte {place}") from error


def _find_end(file: FileIO) -> tuple[bytes | None, bytes, int]:
    """Return the last line, the data after its line break, and where that begins."""
    size = file.seek(0, os.SEEK_END)
    end = _after_break(file, size)
    rest = _read(file, end, size)
    if not end:
        return None, rest, end
    return _read(file, _after_break(file, end - 1), end - 1), rest, end


def _after_break(file: FileIO, end: int) -> int:
    """Return the position after the last line break before ``end``, or 0."""
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


# --- following --------------------------------------------------------------------------------


class JsonlTail:
    """Reads a file as it grows."""

    def __init__(
        self, path: Path, run_id: str, after: int = -1, *, place: LogPlace = START
    ) -> None:
        self._path = path
        self._run_id = run_id
        self._after = after
        self._reader = LogReader(run_id, "line {}, byte {}", after=place)
        self._lines, self._at = place.line, place.byte
        """How many lines were read, and where the next one begins."""
        self._seen: int | None = None
        """How large the file was when it was read last; None: there is more to read."""
        self._rest = b""
        """What came after the last line break then, if it was a complete record."""
        self._rest_since = 0.0
        self._is_in_line = place.is_in_line
        """Whether the line break of the last record is missing."""
        self._live = LiveReader(path.with_suffix(_LIVE))
        self._polling = Polling(self._has_news)

    def read(self) -> Sequence[Record]:
        """Return the records since the last call, or the first of them. Raises `LogDamaged`."""
        while True:
            self._read_lines()
            records = self._reader.drain()
            if self._after >= 0:
                records = [record for record in records if record.seq > self._after]
            if records or self._seen is not None:
                return records

    def _read_lines(self) -> None:
        """Pass the next lines to the reader."""
        if self._reader.is_damaged():
            return
        try:
            with FileIO(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                end = min(size, self._at + _LONGEST_READ)
                data = _read(file, self._at, end)
                while end < size and _LINE_BREAK not in data:  # a long line
                    start, end = end, min(size, end + len(data))
                    data += _read(file, start, end)
        except FileNotFoundError:
            raise RunNotFound(self._run_id) from None
        if size < self._at:
            reason = "records that were read before are missing"
            raise LogDamaged(self._run_id, self._reader.due[0], reason, path=f"byte {size}")
        self._seen = size if end == size else None
        if self._is_in_line and data:
            self._is_in_line, data = False, data.removeprefix(b"\n")
            self._at += 1
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._lines += 1
            self._reader.take(line, self._lines, self._at)
            self._at += len(line) + 1
            if self._reader.is_damaged():
                return
        if self._seen is not None:
            self._take_rest(rest)

    def _take_rest(self, rest: bytes) -> None:
        """Read a record without a line break, if it stays so: its writer may still be writing, or
        cut it off.
        """
        if not rest or is_torn(rest, self._run_id, self._reader.due):
            self._rest = b""
        elif rest != self._rest:
            self._rest, self._rest_since = rest, time.monotonic()
        elif time.monotonic() >= self._rest_since + _PATIENCE:
            self._reader.take(rest, self._lines + 1, self._at)
            self._lines, self._at = self._lines + 1, self._at + len(rest)
            self._rest, self._is_in_line = b"", True

    def _has_news(self) -> bool:
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return True
        if self._rest and time.monotonic() >= self._rest_since + _PATIENCE:
            return True
        return size != self._seen or self._live.has_more

    def read_live(self) -> Sequence[bytes]:
        """Return what was published since the last call, or a part of it."""
        return self._live.read()

    def wait(self, seconds: float) -> Awaitable[None]:
        """Wait until there may be something new, at most this long."""
        return self._polling.wait(seconds)

    def close(self) -> None:
        """Release the file of what is published."""
        self._live.close()


# --- writing ----------------------------------------------------------------------------------


@contextmanager
def _closed_on_failure(file: FileIO) -> Generator[None]:
    try:
        yield
    except BaseException:
        file.close()
        raise


class _Appender:
    """Appends to a file that it has locked."""

    __slots__ = (
        "_end",
        "_file",
        "_is_unsure",
        "_is_unsynced",
        "_kept",
        "_kept_in",
        "_new_in",
        "_pending",
        "_run_id",
    )

    def __init__(
        self,
        file: FileIO,
        run_id: str,
        end: int,
        kept_in: Path,
        *,
        new_in: Path | None = None,
        is_in_line: bool = False,
    ) -> None:
        self._file = file
        self._run_id = run_id
        self._new_in = new_in
        """The folder to sync, if the file is new in it."""
        self._end = end
        self._pending: list[bytes] = [b""] if is_in_line else []
        self._is_unsure = False
        """Whether there may be data after the known end."""
        self._is_unsynced = True
        self._kept_in = kept_in
        self._kept: list[Path] = []
        """The files of large results that are to be synced."""

    def append(self, record: Record, data: bytes, /) -> None:
        """Buffer a record, with its JSON on one line."""
        if self._file.closed:
            raise RunStoreError(f"the log of the run {self._run_id!r} is closed", self._run_id)
        if _LINE_BREAK in data:
            raise ValueError("the JSON of a record must be on one line")
        self._pending.append(data)

    def keep(self, name: str, pieces: Sequence[bytes]) -> None:
        """Keep a large result."""
        self._kept.append(write_kept_in(self._kept_in, name, pieces))

    def flush(self, *, sync: bool) -> None:
        """Write everything to the file."""
        if sync and self._kept:
            self._sync_kept()
        if self._pending:
            self._write()
        if sync and self._is_unsynced:
            sync_file(self._file)
            if self._new_in is not None:
                sync_folder(self._new_in)
                self._new_in = None
            self._is_unsynced = False

    def barrier(self) -> Awaitable[None]:
        """Write everything to the file. There is nothing to wait for."""
        if self._pending:
            self._write()
        return FINISHED

    def _sync_kept(self) -> None:
        for path in self._kept:
            with suppress(FileNotFoundError), open_file(path) as file:
                sync_file(file)
        sync_folder(self._kept_in)
        sync_folder(self._kept_in.parent)
        self._kept.clear()

    def _write(self) -> None:
        file, pending = self._file, self._pending
        data = pending[0] + b"\n" if len(pending) == 1 else b"\n".join([*pending, b""])
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
        # Nothing can interrupt these assignments, so written data is never written again.
        self._end, self._pending, self._is_unsure = self._end + written, [], False

    def close(self) -> None:
        """Flush, and release the lock. Closing twice is harmless."""
        if self._file.closed:
            return
        try:
            self.flush(sync=False)
        finally:
            self._file.close()
