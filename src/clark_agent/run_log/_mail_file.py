"""A mailbox in a file: one message per line, appended under a lock.

A line that a killed process has begun is not posted: it is ignored, and the next message replaces
it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from clark_agent._text import well_formed
from clark_agent.errors import DecodeError, RunStoreError
from clark_agent.messages.wire import decode_json, encode_strictly, jsonable
from clark_agent.run_log._files import create_file, lock_within
from clark_agent.run_log.mail import Mail

__all__ = ["Seen", "encode_mail", "post_mail", "read_mail"]

_PATIENCE = 30.0


class Seen(Struct, frozen=True):
    """How much of a mailbox was read."""

    count: int
    size: int


def encode_mail(mail: Mail) -> bytes:
    """Return the JSON of a message, on one line. What JSON cannot hold is described."""
    try:
        return encode_strictly(mail)
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError):
        return encode_strictly(jsonable(mail))


def post_mail(path: Path, run_id: str, mail: Mail) -> bool:
    """Append a message. Return False if there is one with the same id."""
    data = encode_mail(mail) + b"\n"
    same = b'\n{"id":%b,' % msgspec.json.encode(well_formed(mail.id))
    with create_file(path) as file:
        if not lock_within(file, _PATIENCE):
            raise RunStoreError(f"the mailbox of the run {run_id!r} stays locked", run_id)
        file.seek(0)
        before = file.readall()
        end = before.rfind(b"\n") + 1
        if same in b"\n" + before[:end]:
            return False
        if end < len(before):
            file.truncate(end)
        try:
            written = file.write(data)
            while written < len(data):
                written += file.write(memoryview(data)[written:])
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise
    return True


def read_mail(
    path: Path, run_id: str, after: int, seen: Seen | None
) -> tuple[Sequence[Mail], Seen | None]:
    """Return the messages without the first ``after`` of them, and what was read, unless another
    process was writing.
    """
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return (), None
    if seen is not None and seen.size == size and seen.count <= after:
        return (), seen
    data = path.read_bytes()
    *lines, rest = data.split(b"\n")
    try:
        mails = [decode_json(line, Mail) for line in lines[after:]]
    except DecodeError as error:
        reason = f"the mailbox of the run {run_id!r} is damaged: {error}"
        raise RunStoreError(reason, run_id) from error
    # A message that replaces an incomplete one may leave the size as it is.
    return mails, None if rest else Seen(len(lines), len(data))
