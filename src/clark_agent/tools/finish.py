"""finish_tool: the tool that ends a run, and whose arguments are the answer."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar, Union, overload

from msgspec import Struct, defstruct
from msgspec.structs import astuple

from clark_agent.tools.base import ToolResult
from clark_agent.tools.function import FunctionTool
from clark_agent.tools.signature import is_object_type, members_of

__all__ = ["FinishTool", "finish_tool"]

_T = TypeVar("_T")

_DESCRIPTION = "Give the final answer. Call this once, alone, when the work is done."


class HasOutput(Protocol):
    """A result with an answer, such as `clark_agent.RunResult`."""

    @property
    def output(self) -> Any:
        """The answer, or None."""
        ...


class _Choice(Struct):
    """A member of a union, with the name of its type beside it."""

    value: Any


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
        if isinstance(answer, _Choice):
            answer = answer.value
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
    one parameter ``answer``. In a union of such types the model names the type of its answer.
    Arguments that do not fit go back to the model with the reason. With
    ``force_tool_call`` in the config a model cannot answer in prose instead.

    Raises `ToolDefinitionError` for a type that cannot be read from JSON.
    """

    async def finish(answer: Any) -> ToolResult:
        return ToolResult.terminal("The answer was accepted.")

    answer_type = finish.__annotations__["answer"] = _distinguishable(output_type)
    finish.__qualname__ = "finish_tool"
    made: FinishTool[Any] = FinishTool(finish, name=name, description=description, strict=strict)
    made.is_wrapped = not is_object_type(answer_type)
    return made


def _distinguishable(output_type: Any) -> Any:
    """The type, or for a union of several object types one whose members JSON tells apart."""
    members = members_of(output_type)
    objects = [member for member in members if is_object_type(member)]
    if len(objects) < 2 or all(_is_tagged(member) for member in objects):
        return output_type
    others = [member for member in members if member not in objects]
    choices = [
        defstruct(
            f"{member.__name__}Answer",
            [("value", member)],
            bases=(_Choice,),
            tag_field="type",
            tag=member.__name__,
        )
        for member in objects
    ]
    return Union[(*choices, *others)]


def _is_tagged(member: Any) -> bool:
    config: Any = getattr(member, "__struct_config__", None)
    return config is not None and config.tag is not None
