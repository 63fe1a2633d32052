"""A checksum behind every record, over its bytes and those of all records before it.

    {"v":2,"seq":1,"run":"r","at":1,"entry":{…},"crc":"5f0c1a2b"}

It is the CRC-32 of the JSON before ``,"crc":``, continued from that of the record before. So a
record that was changed, left out, put in, or taken from another log is noticed. A log from whose
end whole records were cut cannot be told from one that was shorter; and this guards against damage,
not against somebody who wants to deceive: they can compute it too.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from msgspec.structs import force_setattr

from clark_agent.messages.wire import encode_json
from clark_agent.run_log.records import Record

__all__ = ["SEALED", "checksum_in", "is_sealed", "seal", "seal_all"]

SEALED = b'%b,"crc":"%08x"}'
"""A record's JSON up to its last brace, and its checksum, make its line."""
_START = b',"crc":"'
_LENGTH = len(SEALED % (b"", 0))


def seal(data: bytes, before: int) -> tuple[bytes, int]:
    """The JSON of a record with its checksum, and the checksum.

    ``data`` is its JSON without; ``before`` the checksum of the record before, or 0.
    """
    body = data[:-1]
    checksum = crc32(body, before)
    return SEALED % (body, checksum), checksum


def seal_all(records: Iterable[Record], after: Record | None = None) -> None:
    """Give records that follow each other, and perhaps another one, their checksums."""
    before = 0 if after is None or after.crc is None else int(after.crc, 16)
    for record in records:
        force_setattr(record, "crc", None)
        _, before = seal(encode_json(record), before)
        force_setattr(record, "crc", f"{before:08x}")


def is_sealed(data: bytes, before: int) -> bool:
    """Whether the JSON has the checksum that it must have behind a record with that one."""
    return data[-_LENGTH:] == SEALED % (b"", crc32(data[:-_LENGTH], before))


def checksum_in(data: bytes) -> int | None:
    """The checksum that stands there, right or wrong; None if there is none."""
    end = data[-_LENGTH:]
    if end[: len(_START)] != _START or end[-2:] != b'"}':
        return None
    try:
        return int(end[len(_START) : -2], 16)
    except ValueError:
        return None
