"""finish_tool: the tool that ends a run, and whose arguments are the answer."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar, overload

from msgspec.structs import astuple

from clark_agent.tools.base import ToolResult
from clark_agent.tools.function import FunctionTool
from clark_agent.tools.signature import is_object_type

__all__ = ["FinishTool", "finish_tool"]

_T = TypeVar("_T")

_DESCRIPTION = "Give the final answer. Call this once, alone, when the work is done."


class HasOutput(Protocol):
    """A result with an answer, such as `clark_agent.RunResult`."""

    @property
    def output(self) -> Any:
        """The answer, or None."""
        ...


class FinishTool(FunctionTool[[Any], Any, Any], Generic[_T]):
    """A terminal tool for an answer of one type. See `finish_tool`."""

    is_wrapped = False
    """Whether the answer is the one parameter ``answer``."""
    is_final_answer = True
    reads_only = True
    idempotent = True

    def answer_of(self, result: HasOutput) -> _T | None:
        """``result.output``, typed; None if the run has ended without an answer."""
        return result.output  # type: ignore[no-any-return]

    def output(self, args: Any) -> _T:
        """The answer itself."""
        (answer,) = astuple(args)
        return answer  # type: ignore[no-any-return]


@overload
def finish_tool(
    output_type: type[_T],
    *,
    name: str = "finish",
    description: str = _DESCRIPTION,
    strict: bool = False,
) -> FinishTool[_T]: ...


@overload
def finish_tool(
    output_type: Any,
    *,
    name: str = "finish",
    description: str = _DESCRIPTION,
    strict: bool = False,
) -> FinishTool[Any]: ...


def finish_tool(
    output_type: Any,
    *,
    name: str = "finish",
    description: str = _DESCRIPTION,
    strict: bool = False,
) -> FinishTool[Any]:
    """A tool that ends the run with a value of this type, which becomes ``RunResult.output``.

    A struct, dataclass, ``TypedDict`` or Pydantic model gives the parameters; any other type is the
    one parameter ``answer``. Arguments that do not fit go back to the model with the reason. With
    ``force_tool_call`` in the config a model cannot answer in prose instead.

    Raises `ToolDefinitionError` for a type that cannot be read from JSON.
    """

    async def finish(answer: Any) -> ToolResult:
        return ToolResult.terminal("The answer was accepted.")

    finish.__annotations__["answer"] = output_type
    finish.__qualname__ = "finish_tool"
    made: FinishTool[Any] = FinishTool(finish, name=name, description=description, strict=strict)
    made.is_wrapped = not is_object_type(output_type)
    return made
