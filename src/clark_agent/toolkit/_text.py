"""Detects whether a file is text, and in which encoding.

A byte order mark decides the encoding; without one it is UTF-8. A file is binary if it has a NUL
byte near its beginning, or starts with the signature of a known format.
"""

from __future__ import annotations

from io import BufferedReader, TextIOWrapper
from typing import Literal

from msgspec import Struct

__all__ = ["Document", "Encoding", "NotTextError", "human_size", "open_text", "read_document"]

_HEAD = 8_192

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"%PDF-", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive, or a document that is one"),
    (b"\x1f\x8b", "gzip data"),
    (b"BZh91AY&SY", "bzip2 data"),
    (b"\xfd7zXZ\x00", "xz data"),
    (b"\x28\xb5\x2f\xfd", "Zstandard data"),
    (b"\x7fELF", "an ELF program or library"),
    (b"SQLite format 3\x00", "an SQLite database"),
)


class NotTextError(Exception):
    """The file is binary; the message says what it seems to be."""


class Encoding(Struct, frozen=True):
    """The encoding of a text file."""

    codec: Literal["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]
    mark: bytes = b""
    """The byte order mark at the beginning, which does not belong to the text."""


_UTF_8 = Encoding("utf-8")

_MARKED = (  # longer marks before their prefixes
    Encoding("utf-8", b"\xef\xbb\xbf"),
    Encoding("utf-32-le", b"\xff\xfe\x00\x00"),
    Encoding("utf-32-be", b"\x00\x00\xfe\xff"),
    Encoding("utf-16-le", b"\xff\xfe"),
    Encoding("utf-16-be", b"\xfe\xff"),
)


def _encoding_of(head: bytes) -> Encoding:
    for encoding in _MARKED:
        if head.startswith(encoding.mark):
            return encoding
    for signature, description in _SIGNATURES:
        if head.startswith(signature):
            raise NotTextError(description)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        raise NotTextError("a WebP image")
    if b"\0" in head:
        raise NotTextError("binary data")
    return _UTF_8


def open_text(file: BufferedReader) -> TextIOWrapper:
    """Open the file as text, after the byte order mark. Only a line feed ends a line; line breaks
    are not translated.

    Invalid bytes are read as U+FFFD. Raises `NotTextError`.
    """
    head = file.read(_HEAD)
    encoding = _encoding_of(head)
    file.seek(len(encoding.mark))
    return TextIOWrapper(file, encoding=encoding.codec, errors="replace", newline="\n")


class Document(Struct, frozen=True):
    """A whole text file. Its own text is encoded back to the same bytes."""

    text: str
    encoding: Encoding

    def encode(self, text: str) -> bytes:
        """Encode another text like this file."""
        return self.encoding.mark + text.encode(self.encoding.codec, _errors(self.encoding))


def read_document(data: bytes) -> Document:
    """Decode a file so that unchanged parts can be written back byte for byte.

    Raises `NotTextError`.
    """
    encoding = _encoding_of(data[:_HEAD])
    try:
        text = data[len(encoding.mark) :].decode(encoding.codec, _errors(encoding))
    except UnicodeDecodeError:
        raise NotTextError(f"damaged {encoding.codec.upper()} text") from None
    return Document(text, encoding)


def _errors(encoding: Encoding) -> str:
    """The error handler that preserves invalid bytes."""
    return "surrogateescape" if encoding.codec == "utf-8" else "surrogatepass"


def human_size(size: int) -> str:
    """Format a number of bytes for people."""
    if size < 1_000:
        return f"{size} byte{'s' * (size != 1)}"
    value = size / 1_000
    for unit in ("kB", "MB"):
        if value < 999.95:
            return f"{value:.1f} {unit}"
        value /= 1_000
    return f"{value:,.1f} GB"
