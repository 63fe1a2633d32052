"""A call as text that a person can judge: all of it, and nothing in it that hides.

Pure functions. What a terminal would obey, what turns the direction of text and what has no width
is shown escaped, so that nobody approves what they cannot see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

__all__ = ["call_block", "call_line", "visible"]

# Printable by Unicode's book, and yet nothing is seen of them: fillers, joiners, selectors.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)


def visible(text: str) -> str:
    """The text with everything escaped that does not show. Line feeds and tabs stay."""
    return "\n".join([_visible_line(line) for line in text.split("\n")])


def _visible_line(line: str) -> str:
    if not line.isprintable():
        line = "".join([c if c.isprintable() or c == "\t" else _escaped(c) for c in line])
    return _BLANK.sub(lambda found: _escaped(found[0]), line)


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]


def call_line(name: str, args: Any) -> str:
    """The whole call in one line."""
    if isinstance(args, dict):
        shown = [f"{_label(key)}={value!r}" for key, value in args.items()]
    else:
        shown = [repr(args)]
    line = f"{name}({', '.join(shown)})"
    # An object of the host's may have any repr.
    return visible(line).replace("\n", "\\n").replace("\t", "\\t")


def call_block(args: Any) -> str:
    """The arguments below each other, those of several lines as such, set off by a bar."""
    if not isinstance(args, dict):
        return "\n".join(_set_off(args))
    return "\n".join([line for key, value in args.items() for line in _argument(key, value)])


def _argument(key: object, value: Any) -> Iterator[str]:
    yield f"{visible(_label(key))}:"
    yield from _set_off(value)


def _set_off(value: Any) -> Iterator[str]:
    text = value if isinstance(value, str) else repr(value)
    for line in visible(text).split("\n"):
        yield f"  | {line}"


def _label(key: object) -> str:
    return key if isinstance(key, str) and key.isidentifier() else repr(key)
