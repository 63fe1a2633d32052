"""When two calls are the same: by operation, by target, or by a function of the tool's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from clark_agent.tools import (
    ToolIdentityPolicy,
    extract_args_key,
    extract_operation_key,
    extract_target,
)
from tests.strategies import open_json

PLAIN = ToolIdentityPolicy()
FILES = ToolIdentityPolicy(operation_arg="action", target="path")


@given(open_json())
def test_without_a_policy_all_calls_are_one_operation_without_a_target(arguments: object) -> None:
    assert extract_operation_key(PLAIN, arguments) == "default"
    assert extract_target(PLAIN, arguments) is None
    assert extract_args_key(PLAIN, "tool", arguments) is None


@given(open_json())
def test_odd_arguments_are_no_operation_and_no_target(arguments: object) -> None:
    assert extract_operation_key(FILES, arguments) == "default"
    assert extract_target(FILES, arguments) is None
    assert extract_args_key(FILES, "tool", arguments) is None


@pytest.mark.parametrize(
    ("value", "operation", "target"),
    [
        ("read", "read", "read"),
        (" a b ", " a b ", "a b"),
        ("", "", None),
        (" \t", " \t", None),
        (None, "default", None),
        (7, "default", None),
        (["read"], "default", None),
    ],
)
def test_operation_is_taken_as_it_is_and_target_is_trimmed(
    value: object, operation: str, target: str | None
) -> None:
    arguments = {"action": value, "path": value, "other": 1}
    assert extract_operation_key(FILES, arguments) == operation
    assert extract_target(FILES, arguments) == target
    key = extract_args_key(FILES, "files", arguments)
    assert key == (None if target is None else f"target=files:{target}")


def test_target_may_be_a_function_of_all_arguments() -> None:
    def host(arguments: Any) -> str | None:
        return None if arguments is None else str(arguments["url"]).split("/")[2]

    policy = ToolIdentityPolicy(target=host)
    assert extract_target(policy, {"url": "https://a.example/b"}) == "a.example"
    assert extract_args_key(policy, "get", {"url": "https://a.example/b"}) == "target=get:a.example"
    assert extract_target(policy, None) is None
    assert extract_args_key(policy, "get", None) is None


def test_a_key_function_has_the_last_word() -> None:
    policy = ToolIdentityPolicy(target="path", args_key_fn=lambda arguments: arguments.get("key"))
    assert extract_args_key(policy, "tool", {"path": "p", "key": "k"}) == "k"
    assert extract_args_key(policy, "tool", {"path": "p"}) is None
    assert extract_target(policy, {"path": "p", "key": "k"}) == "p"
