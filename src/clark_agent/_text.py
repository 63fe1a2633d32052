"""Text that comes from elsewhere: always encodable, also what an exception says of itself."""

from __future__ import annotations

__all__ = ["describe", "message_of", "os_reason", "well_formed"]


def well_formed(text: str) -> str:
    """The text as a plain `str` without lone surrogates: what every encoder accepts.

    Libraries return subclasses of `str` (a node of a document, a cell of an array), which have no
    JSON form.

    A provider may cut a character between two deltas and send each half as an escape of its own;
    once joined, the halves make the character. A half without its other becomes U+FFFD. So does
    each undecodable byte of a file name, as ``os.listdir`` returns it.
    """
    if type(text) is not str:
        text = str.__str__(text)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def message_of(error: BaseException) -> str:
    """What the exception says. Never raises, also if its ``__str__`` does."""
    try:
        return well_formed(str(error))
    except Exception:
        return "(the exception has no readable message)"


def describe(error: BaseException) -> str:
    """The exception's type and message."""
    return f"{type(error).__name__}: {message_of(error)}"


def os_reason(error: OSError) -> str:
    """What the system says, without the address that a server's socket adds in Python's notation:
    "Address already in use (while attempting to bind on address ('127.0.0.1', 8321))".
    """
    return (error.strerror or message_of(error)).partition(" (while")[0]
