"""Errors: the tree that the docstring draws is the real one, and each says what happened."""

from __future__ import annotations

import re

import pytest

from clark_agent import (
    AgentContext,
    AssistantMessage,
    ClarkAgentError,
    HookError,
    LoopError,
    RunAborted,
    RunStoppedByTool,
    StreamError,
    StreamErrorKind,
    ToolAborted,
    ToolExecutionError,
    ToolFatal,
    Usage,
    UserMessage,
    errors,
)
from clark_agent.errors import (
    DecodeError,
    EmptyOutcomeError,
    InvalidArgumentsError,
    InvalidContinuationError,
    MissingFieldError,
    ToolValidationError,
)
from tests.cases import all_cases

LOOP_ERRORS: list[LoopError] = [
    LoopError("over"),
    StreamError(StreamErrorKind.TRANSIENT, "reset"),
    RunAborted(),
    RunStoppedByTool("deploy", "no disk"),
    InvalidContinuationError("nothing to answer"),
    EmptyOutcomeError(2, 3),
    HookError("gate", "opening", KeyError("x")),
]


def drawn() -> list[tuple[str, str | None]]:
    """Each name in the docstring's tree with that of its parent."""
    assert errors.__doc__ is not None
    found: list[tuple[str, str | None]] = []
    above: dict[int, str] = {}
    for line in errors.__doc__.splitlines():
        if match := re.match(r"    ([ │├└─]*)([A-Z]\w+)", line):
            depth = len(match[1])
            above = {d: name for d, name in above.items() if d < depth}
            found.append((match[2], above[max(above)] if above else None))
            above[depth] = match[2]
    return found


def test_the_drawing_shows_every_error() -> None:
    names = [name for name, _ in drawn()]
    assert len(names) == len(set(names)) >= 15
    assert set(errors.__all__) <= set(names)


def test_the_tree_is_as_drawn() -> None:
    with all_cases() as case:
        for name, parent in drawn():
            with case(name):
                error = getattr(errors, name)
                assert error.__bases__[0] is (
                    Exception if parent is None else getattr(errors, parent)
                )
                assert issubclass(error, ClarkAgentError)
                assert name in errors.__all__


def test_a_decode_error_is_a_value_error_with_a_path() -> None:
    error = DecodeError("odd", path="$.content[0]")
    assert isinstance(error, ValueError)
    assert (error.reason, error.path, str(error)) == (
        "odd",
        "$.content[0]",
        "odd (at $.content[0])",
    )
    assert DecodeError("odd").path == "$"


# --- errors of a run --------------------------------------------------------------------------


@pytest.mark.parametrize("error", LOOP_ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_of_a_run_can_carry_what_the_run_had(error: LoopError) -> None:
    assert (error.messages, error.partial, error.usage, error.undelivered) == (
        (),
        None,
        Usage(),
        (),
    )
    error.messages = (UserMessage("hi"),)
    error.partial = AssistantMessage.from_text("I wa")
    error.usage = Usage(1, 2)
    error.undelivered = (UserMessage("stop"),)
    assert AgentContext("prompt").extend(error) == AgentContext("prompt", (UserMessage("hi"),))


def test_what_the_run_had_can_be_given_at_once() -> None:
    partial = AssistantMessage.from_text("I wa")
    error = LoopError(
        "over",
        messages=[UserMessage("hi")],
        partial=partial,
        usage=Usage(1),
        undelivered=[UserMessage("stop")],
    )
    assert error.messages == (UserMessage("hi"),)
    assert error.partial is partial
    assert error.usage == Usage(1)
    assert error.undelivered == (UserMessage("stop"),)
    assert str(error) == "over"


def test_stream_error() -> None:
    error = StreamError(StreamErrorKind.CONTEXT_OVERFLOW, "too long")
    assert (error.kind, error.message) == (StreamErrorKind.CONTEXT_OVERFLOW, "too long")
    assert "context_overflow" in str(error)
    assert "too long" in str(error)


def test_run_aborted() -> None:
    assert (RunAborted().reason, str(RunAborted())) == (None, "the run was aborted")
    error = RunAborted("the user left")
    assert error.reason == "the user left"
    assert str(error) == "the run was aborted: the user left"


def test_tool_fatal_error() -> None:
    error = RunStoppedByTool("deploy", "no disk")
    assert (error.tool, error.reason) == ("deploy", "no disk")
    assert "'deploy'" in str(error)
    assert "no disk" in str(error)


def test_empty_outcome_error() -> None:
    error = EmptyOutcomeError(budget=2, observed=3)
    assert (error.budget, error.observed) == (2, 3)
    assert "3 times" in str(error)
    assert "allows 2" in str(error)


def test_hook_error() -> None:
    error = HookError("gate", "opening", KeyError("x"))
    assert (error.kind, error.name) == ("gate", "opening")
    assert str(error).startswith("the gate 'opening' raised KeyError: 'x'")


# --- errors of a tool -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ToolExecutionError, ToolAborted, ToolFatal, ToolValidationError])
def test_a_tool_says_why_in_its_own_words(kind: type[Exception]) -> None:
    assert str(kind("no disk")) == "no disk"
    assert not issubclass(kind, LoopError), "a failing tool is no error of the run"


def test_invalid_arguments_error() -> None:
    error = InvalidArgumentsError("search", "limit must be positive")
    assert (error.tool, error.reason) == ("search", "limit must be positive")
    assert str(error) == "invalid arguments for 'search': limit must be positive"


def test_missing_field_error() -> None:
    error = MissingFieldError("files", action="write", field="content")
    assert (error.tool, error.action, error.field) == ("files", "write", "content")
    assert str(error) == "'files' needs the argument 'content' for the action 'write'"
