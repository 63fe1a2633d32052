"""Tools: made from a typed function or class, and kept in a registry.

A tool is declared once, by a signature::

    @tool
    async def search(query: str, limit: int = 10) -> list[str]:
        \"\"\"Search the notes.

        Args:
            query: Words that must all occur.
            limit: How many to return at most.
        \"\"\"

Schema, parsing and descriptions follow from it. Arguments arrive as the declared types; arguments
that do not fit are repaired if their meaning is clear, and otherwise returned to the model with the
reason. The result may be a `ToolResult`, text, content blocks, None, or anything that can be
written as JSON. Plain functions run in their own thread, so that they cannot block the event loop.

The base class of tools, without any of this, is in :mod:`clark_agent.tools.base`.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from inspect import isawaitable, isroutine
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import msgspec

from clark_agent._threads import run_in_thread
from clark_agent._typing import DefaultsToAny, DepsT_contra
from clark_agent.errors import ToolDefinitionError, ToolExecutionError
from clark_agent.tools.base import (
    AgentTool,
    ToolContext,
    ToolHistoryPolicy,
    ToolResult,
    check_max_result_chars,
    check_tool_name,
)
from clark_agent.tools.docstrings import Documentation, parse_docstring
from clark_agent.tools.identity import ToolIdentityPolicy
from clark_agent.tools.schema import encode_hook
from clark_agent.tools.signature import REFUSED, Plan, plan_call
from clark_agent.types import FileContent, ImageContent, TextContent

__all__ = ["FunctionTool", "ToolLike", "ToolRegistry", "TypedTool", "tool", "tool_result"]

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")

DONE = "Done."
"""What the model reads when a tool returns None."""

_DEFAULT_HISTORY_POLICY = ToolHistoryPolicy()
_DEFAULT_IDENTITY_POLICY = ToolIdentityPolicy()

# --- typed tools ------------------------------------------------------------------------------


class _PlannedTool(AgentTool[DepsT_contra]):
    """The base of tools whose arguments come from a signature."""

    _plan: Plan

    def _function(self) -> Callable[..., Any]:
        raise NotImplementedError

    def validate(self, args: Any) -> Any:
        """The arguments as the declared types. Raises `InvalidArgumentsError`."""
        plan = self._plan
        try:
            return plan.read(args)
        except REFUSED as failure:
            return plan.repair(args, failure, self.name)

    async def execute(self, args: Any, ctx: ToolContext[DepsT_contra]) -> ToolResult:
        """Call the function with the result of `validate`, or with raw arguments."""
        plan = self._plan
        if type(args) is not plan.kind:
            args = self.validate(args)
        if plan.is_async:
            value = await plan.call(self._function(), args, ctx)
        else:
            value = await run_in_thread(plan.call, self._function(), args, ctx)
            if isawaitable(value):  # an async function in a plain wrapper
                value = await value
        if type(value) is str:
            result = ToolResult((TextContent(value),))
            if value.isascii():
                ctx.plain_result = result
            return result
        return tool_result(value)


class FunctionTool(DefaultsToAny, _PlannedTool[DepsT_contra], Generic[P, R, DepsT_contra]):
    """A function that is a tool, made by `tool`. Called, it is still that function."""

    __wrapped__: Callable[P, R]

    def __init__(
        self,
        function: Callable[P, R],
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        strict: bool = False,
        localns: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(function, type) or not isroutine(function):
            raise ToolDefinitionError(f"tool() needs a function, not {function!r}")
        self.__wrapped__ = function
        self.__name__: str = function.__name__
        self.__qualname__: str = function.__qualname__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__
        owner = f"{function.__qualname__}()"
        self.name = function.__name__ if name is None else name
        check_tool_name(self.name, owner)
        documentation = parse_docstring(function.__doc__)
        self._plan = plan_call(
            function, owner=owner, documentation=documentation, strict=strict, localns=localns
        )
        self.runs_in_thread = not self._plan.is_async
        self.description = self._plan.description if description is None else description
        self.parameters_schema = self._plan.schema

    def _function(self) -> Callable[..., Any]:
        return self.__wrapped__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself: nothing is parsed, and no thread is used."""
        return self.__wrapped__(*args, **kwargs)


_FLAGS = frozenset(
    {
        "aborts_siblings_on_error",
        "counts_toward_termination_vote",
        "counts_toward_tool_call_limit",
        "did_it_happen",
        "history_policy",
        "idempotent",
        "identity_policy",
        "max_result_chars",
        "parallel_safe_per_turn",
        "reads_only",
        "requires_exclusive_sandbox",
        "timeout",
    }
)

if TYPE_CHECKING:  # costly to create at run time

    class ToolFlags(TypedDict, total=False):
        """The flags of `AgentTool`, as options of `tool`."""

        timeout: float | None
        requires_exclusive_sandbox: bool
        max_result_chars: int | Literal["never"] | None
        history_policy: ToolHistoryPolicy
        identity_policy: ToolIdentityPolicy
        aborts_siblings_on_error: bool
        counts_toward_tool_call_limit: bool
        parallel_safe_per_turn: bool
        counts_toward_termination_vote: bool
        idempotent: bool
        reads_only: bool
        did_it_happen: Callable[[str], object]

    class ToolDecorator(Protocol):
        """Makes a tool of a function: ``@tool(…)``."""

        @overload
        def __call__(
            self, function: Callable[Concatenate[ToolContext[D], P], R], /
        ) -> FunctionTool[Concatenate[ToolContext[D], P], R, D]: ...

        @overload
        def __call__(self, function: Callable[P, R], /) -> FunctionTool[P, R, Any]: ...


@overload
def tool(
    function: Callable[Concatenate[ToolContext[D], P], R],
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool = False,
    **flags: Unpack[ToolFlags],
) -> FunctionTool[Concatenate[ToolContext[D], P], R, D]: ...


@overload
def tool(
    function: Callable[P, R],
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool = False,
    **flags: Unpack[ToolFlags],
) -> FunctionTool[P, R, Any]: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool = False,
    **flags: Unpack[ToolFlags],
) -> ToolDecorator: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool = False,
    **flags: Any,
) -> Any:
    """Make a tool of a function, as ``@tool``, ``@tool(name=…)`` or ``tool(function, …)``.

    The name is the function's and the description its docstring, unless given. ``strict`` sends the
    schema in the form that constrained decoding requires, and rejects arguments without a
    parameter. The other options are the flags of `AgentTool`. ``did_it_happen``, a function of the
    idempotency key, sync or async, is `AgentTool.did_it_happen`: it returns what the tool would
    have returned, or None if that is not known.

    Raises `ToolDefinitionError` for a function that cannot be a tool.
    """
    unknown = flags.keys() - _FLAGS
    if unknown:
        raise TypeError(f"tool() got unknown options: {', '.join(sorted(unknown))}")

    def decorate(function: Callable[..., Any]) -> FunctionTool[..., Any]:
        # Types that are local to the function around the tool are found in its frame.
        frame = sys._getframe(2 if bare else 1)
        made = FunctionTool(
            function, name=name, description=description, strict=strict, localns=frame.f_locals
        )
        for flag, value in flags.items():
            setattr(made, flag, _looks_up(value) if flag == "did_it_happen" else value)
        check_max_result_chars(made)
        return made

    bare = function is not None
    return decorate if function is None else decorate(function)


def _looks_up(find: Callable[[str], Any]) -> Callable[[str], Awaitable[ToolResult | None]]:
    """`AgentTool.did_it_happen`, of a function that returns what the tool returns."""
    if not callable(find):
        raise ToolDefinitionError(f"did_it_happen must be a function of the key, not {find!r}")

    async def did_it_happen(key: str) -> ToolResult | None:
        value = find(key)
        if isawaitable(value):
            value = await value
        return None if value is None else tool_result(value)

    return did_it_happen


class TypedTool(_PlannedTool[DepsT_contra]):
    """The class form: a subclass defines ``run``, sync or async, and its signature is the tool's.

    The description is the class's docstring; either docstring may describe the parameters.
    For tools that hold something, such as a connection, which ``__init__`` sets.
    """

    strict: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__dict__.keys() & {"run", "strict"} and hasattr(cls, "run"):
            # The frame around the class has the types that are local to it.
            cls._make_plan(sys._getframe(1).f_locals)

    @classmethod
    def _make_plan(cls, localns: Mapping[str, Any]) -> None:
        run = vars(cls).get("run", getattr(cls, "run", None))
        owner = f"{cls.__qualname__}.run()"
        if not isinstance(run, FunctionType):
            raise ToolDefinitionError(f"{owner} must be a plain method")
        about_class = parse_docstring(cls.__dict__.get("__doc__"))
        about_run = parse_docstring(run.__doc__)
        documentation = Documentation(
            about_class.description or about_run.description,
            {**about_class.parameters, **about_run.parameters},
        )
        cls._plan = plan_call(
            run,
            owner=owner,
            documentation=documentation,
            method=True,
            strict=cls.strict,
            localns=localns,
        )
        cls.runs_in_thread = not cls._plan.is_async
        if "parameters_schema" not in cls.__dict__:
            cls.parameters_schema = cls._plan.schema
        if "description" not in cls.__dict__:
            cls.description = cls._plan.description

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(self, "run"):
            raise ToolDefinitionError(
                f"{type(self).__qualname__} has no run method: define 'def run(self, …)' or "
                "'async def run(self, …)'"
            )

    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = self.run  # type: ignore[attr-defined]
        return function


# --- results ----------------------------------------------------------------------------------


def tool_result(value: object) -> ToolResult:
    """Convert what a tool returned to a `ToolResult`.

    Text and content blocks stay as they are, None becomes a short confirmation, anything else is
    written as JSON. Raises `ToolExecutionError` if that is impossible.
    """
    match value:
        case ToolResult():
            return value
        case str():
            return ToolResult((TextContent(value),))
        case None:
            return ToolResult((TextContent(DONE),))
        case TextContent() | ImageContent() | FileContent():
            return ToolResult((value,))
        case bytes() | bytearray() | memoryview():
            raise ToolExecutionError(
                f"the tool returned {type(value).__name__}, which a model cannot read: "
                "return text, or an ImageContent or FileContent with a data: URL"
            )
        case [TextContent() | ImageContent() | FileContent(), *_]:
            kinds = TextContent | ImageContent | FileContent
            blocks = [block for block in value if isinstance(block, kinds)]
            if len(blocks) == len(value):
                return ToolResult(tuple(blocks))
        case _:
            pass
    try:
        text = msgspec.json.encode(value, enc_hook=encode_hook).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ToolExecutionError(
            f"the tool returned a {type(value).__name__}, which cannot be written as JSON: {error}"
        ) from error
    return ToolResult((TextContent(text),))


# --- the registry -----------------------------------------------------------------------------

ToolLike: TypeAlias = AgentTool | Callable[..., Any]
"""A tool, or a function that `tool` can turn into one."""


class ToolRegistry(Mapping[str, AgentTool]):
    """The tools of a run by name, in the order of their registration. It never changes.

    The last tool of a name wins, and takes the place of the earlier one.
    """

    __slots__ = ("_tools", "find", "names", "schemas")

    def __init__(self, tools: Iterable[ToolLike] = ()) -> None:
        by_name: dict[str, AgentTool] = {}
        for given in tools:
            added = _as_tool(given)
            by_name[added.schema.name] = added
        self._tools = by_name
        self.schemas = tuple([added.schema for added in by_name.values()])
        """All tools as the model sees them."""
        self.names: tuple[str, ...] = tuple(by_name)
        self.find: Callable[[str], AgentTool | None] = by_name.get
        """The tool of a name, or None."""

    def __getitem__(self, name: str) -> AgentTool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def with_tool(self, added: ToolLike) -> ToolRegistry:
        """A registry with this tool added, or in place of the one with its name."""
        return ToolRegistry([*self._tools.values(), added])

    def history_policy(self, name: str) -> ToolHistoryPolicy:
        """The policy of the tool; the default one for an unknown name."""
        found = self._tools.get(name)
        return _DEFAULT_HISTORY_POLICY if found is None else found.history_policy

    def identity_policy(self, name: str) -> ToolIdentityPolicy:
        """The policy of the tool; the default one for an unknown name."""
        found = self._tools.get(name)
        return _DEFAULT_IDENTITY_POLICY if found is None else found.identity_policy

    def identity_policies(self) -> dict[str, ToolIdentityPolicy]:
        """The policies of all tools."""
        return {name: found.identity_policy for name, found in self._tools.items()}

    def __repr__(self) -> str:
        return f"<ToolRegistry {', '.join(self.names)}>"


def _as_tool(given: object) -> AgentTool:
    if isinstance(given, AgentTool):
        _check_flags(given)
        return given
    if isinstance(given, type):
        raise ToolDefinitionError(
            f"a tool must be an instance: pass {given.__qualname__}(), not the class"
        )
    if isroutine(given):
        return FunctionTool(given)
    raise ToolDefinitionError(f"a tool must be an AgentTool or a function, not {given!r}")


def _check_flags(given: AgentTool) -> None:
    """Reject flags that would only fail when they are first used."""
    timeout: Any = given.timeout
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise ToolDefinitionError(
            f"{given.name}: timeout must be more than 0 seconds or None, not {timeout!r}"
        )
    for flag, kind in (
        ("identity_policy", ToolIdentityPolicy),
        ("history_policy", ToolHistoryPolicy),
    ):
        value = getattr(given, flag)
        if not isinstance(value, kind):
            raise ToolDefinitionError(
                f"{given.name}: {flag} must be a {kind.__name__}, not {value!r}"
            )
