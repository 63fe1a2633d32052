"""The first difference of two JSON values, and how to show it."""

from __future__ import annotations

from typing import Any

from clark_agent.messages.wire import encode_json

__all__ = ["first_difference", "shown"]


def first_difference(first: Any, second: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The path of the first difference, and both values there.

    A null field differs from a missing one, though both are shown as None.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        for name in [*first, *[name for name in second if name not in first]]:
            here = f"{path}.{name}" if path else name
            if (name in first) != (name in second):
                return here, first.get(name), second.get(name)
            if found := first_difference(first[name], second[name], here):
                return found
        return None
    if isinstance(first, list) and isinstance(second, list):
        for index, (left, right) in enumerate(zip(first, second, strict=False)):
            if found := first_difference(left, right, f"{path}[{index}]"):
                return found
        if len(first) == len(second):
            return None
        index = min(len(first), len(second))
        return f"{path}[{index}]", _at(first, index), _at(second, index)
    return None if first == second else (path, first, second)


def _at(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def shown(value: Any, longest: int) -> str:
    """The value as JSON, cut off if it is longer than ``longest``."""
    text = "nothing" if value is None else encode_json(value).decode(errors="replace")
    return text if len(text) <= longest else text[: longest - 1] + "…"
