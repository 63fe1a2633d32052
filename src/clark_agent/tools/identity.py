"""When two calls of a tool are "the same": declared by the tool, used to detect repeated calls.

A tool that dispatches on an argument names it as ``operation_arg``; one that works on a file or a
URL names that as its ``target``. Without a policy, all calls of a tool are one operation without a
target, and are compared by all their arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import Struct

__all__ = [
    "ToolIdentityPolicy",
    "extract_args_key",
    "extract_operation_key",
    "extract_target",
]

TargetFn: TypeAlias = Callable[[Any], str | None]


class ToolIdentityPolicy(Struct, frozen=True, kw_only=True):
    """What names the operation, the target and the identity of a call."""

    operation_arg: str | None = None
    """The argument whose string value is the operation."""
    target: str | TargetFn | None = None
    """The argument that holds the target, or a function from all arguments to it."""
    args_key_fn: TargetFn | None = None
    """Returns the identity of a call, instead of tool and target."""


def extract_operation_key(policy: ToolIdentityPolicy, arguments: object) -> str:
    """The operation of a call; ``"default"`` if it has none."""
    name = policy.operation_arg
    operation = None if name is None else _string_argument(arguments, name)
    return "default" if operation is None else operation


def extract_target(policy: ToolIdentityPolicy, arguments: object) -> str | None:
    """What the call works on, or None."""
    match policy.target:
        case None:
            return None
        case str(name):
            return (_string_argument(arguments, name) or "").strip() or None
        case extract:
            return extract(arguments)


def extract_args_key(policy: ToolIdentityPolicy, tool_name: str, arguments: object) -> str | None:
    """The key that is equal for calls that are the same; None: compare their arguments."""
    if policy.args_key_fn is not None:
        return policy.args_key_fn(arguments)
    target = extract_target(policy, arguments)
    return None if target is None else f"target={tool_name}:{target}"


def _string_argument(arguments: object, name: str) -> str | None:
    if not isinstance(arguments, dict):
        return None
    fields: dict[str, object] = arguments
    value = fields.get(name)
    return value if isinstance(value, str) else None
