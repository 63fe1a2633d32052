"""Renders a call as text that a person can judge: complete, with nothing hidden.

Pure functions. Terminal control characters, text direction marks and zero-width characters are
escaped, so that a person sees everything they approve.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

__all__ = ["call_block", "call_line", "label", "visible"]

# Printable according to Unicode, but invisible: fillers, joiners, selectors.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)


def visible(text: str) -> str:
    """Return the text with all invisible characters escaped. Line feeds and tabs stay."""
    return "\n".join([_visible_line(line) for line in text.split("\n")])


def _visible_line(line: str) -> str:
    if not line.isprintable():
        line = "".join([c if c.isprintable() or c == "\t" else _escaped(c) for c in line])
    return _BLANK.sub(lambda found: _escaped(found[0]), line)


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]


def call_line(name: str, args: Any) -> str:
    """Return the whole call in one line."""
    if isinstance(args, dict):
        shown = [f"{label(key)}={value!r}" for key, value in args.items()]
    else:
        shown = [repr(args)]
    line = f"{name}({', '.join(shown)})"
    # An object of the host's may have any repr.
    return visible(line).replace("\n", "\\n").replace("\t", "\\t")


def call_block(args: Any) -> str:
    """Return the arguments one below the other; multi-line ones are set off by a bar."""
    if not isinstance(args, dict):
        return "\n".join(_set_off(args))
    return "\n".join([line for key, value in args.items() for line in _argument(key, value)])


def _argument(key: object, value: Any) -> Iterator[str]:
    yield f"{visible(label(key))}:"
    yield from _set_off(value)


def _set_off(value: Any) -> Iterator[str]:
    text = value if isinstance(value, str) else repr(value)
    for line in visible(text).split("\n"):
        yield f"  | {line}"


def label(key: object) -> str:
    """Return the name of an argument, quoted unless it is a plain name."""
    return key if isinstance(key, str) and key.isidentifier() else repr(key)
