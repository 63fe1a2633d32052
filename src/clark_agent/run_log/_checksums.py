"""A checksum at the end of every record, over its bytes and those of all records before it.

    {"v":2,"seq":1,"run":"r","at":1,"entry":{…},"crc":"5f0c1a2b"}

It is the CRC-32 of the JSON before ``,"crc":``, continued from that of the previous record. So it
detects a record that was changed, removed, inserted, or taken from another log. It cannot detect
that whole records were cut off the end. It protects against damage, not against deception: an
attacker can compute it too.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from msgspec.structs import force_setattr

from clark_agent.messages.wire import encode_json
from clark_agent.run_log.records import Record

__all__ = ["SEALED", "checksum_in", "is_sealed", "seal", "seal_all"]

SEALED = b'%b,"crc":"%08x"}'
"""The line of a record: its JSON up to the last brace, and its checksum."""
_START = b',"crc":"'
_LENGTH = len(SEALED % (b"", 0))


def seal(data: bytes, before: int) -> tuple[bytes, int]:
    """Return the JSON of a record with its checksum, and the checksum.

    ``data`` is the JSON without it; ``before`` is the checksum of the previous record, or 0.
    """
    body = data[:-1]
    checksum = crc32(body, before)
    return SEALED % (body, checksum), checksum


def seal_all(records: Iterable[Record], after: Record | None = None) -> None:
    """Set the checksums of consecutive records, which may follow the record ``after``."""
    before = 0 if after is None or after.crc is None else int(after.crc, 16)
    for record in records:
        force_setattr(record, "crc", None)
        _, before = seal(encode_json(record), before)
        force_setattr(record, "crc", f"{before:08x}")


def is_sealed(data: bytes, before: int) -> bool:
    """Return whether the JSON has the right checksum after that of the previous record."""
    return data[-_LENGTH:] == SEALED % (b"", crc32(data[:-_LENGTH], before))


def checksum_in(data: bytes) -> int | None:
    """Return the checksum in the JSON, right or wrong; None if there is none."""
    end = data[-_LENGTH:]
    if end[: len(_START)] != _START or end[-2:] != b'"}':
        return None
    try:
        return int(end[len(_START) : -2], 16)
    except ValueError:
        return None
