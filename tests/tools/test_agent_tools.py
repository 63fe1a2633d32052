"""Tools: the base class, the context, functions and classes as tools, results, the registry."""

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Optional

import msgspec
import pydantic
import pytest
import typing_extensions
from msgspec import Meta, Struct

from clark_agent.cancellation import CancellationToken
from clark_agent.errors import InvalidArgumentsError, ToolExecutionError, ToolValidationError
from clark_agent.stream import ToolSchema
from clark_agent.tools import (
    NEVER_CLIP,
    AgentTool,
    FunctionTool,
    ToolContext,
    ToolDefinitionError,
    ToolHistoryPolicy,
    ToolRegistry,
    ToolResult,
    TypedTool,
    tool,
    tool_result,
)
from clark_agent.tools.base import is_tool_name
from clark_agent.tools.identity import ToolIdentityPolicy
from clark_agent.types import FileContent, ImageContent, TextContent

if TYPE_CHECKING:
    from clark_agent.nowhere import Missing  # type: ignore[import-not-found]

WAIT = 30.0
"""Long enough for any machine; no test waits for it when all is well."""


def context(**changes: Any) -> ToolContext:
    return ToolContext(tool_call_id="c", tool_name="t", **changes)


async def result_of(made: AgentTool, **args: Any) -> str:
    return (await made.execute(args, context())).plain_text


# --- the base class ---------------------------------------------------------------------------


TEXT_ARGUMENT = {"type": "object", "properties": {"text": {"type": "string"}}}


class Echo(AgentTool):
    name = "echo"
    description = "Say it again."
    parameters_schema = TEXT_ARGUMENT

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.text(args["text"])


async def test_a_plain_tool() -> None:
    echo = Echo()
    assert echo.schema == ToolSchema("echo", "Say it again.", Echo.parameters_schema)
    assert echo.schema is echo.schema
    assert echo.prepare_arguments({"text": "x"}) == {"text": "x"}
    assert echo.validate({"text": 5}) is None
    assert await result_of(echo, text="hi") == "hi"
    assert repr(echo) == "<Echo 'echo'>"


def test_the_flags_have_their_defaults() -> None:
    echo = Echo()
    assert echo.requires_exclusive_sandbox is False
    assert echo.max_result_chars is None
    assert echo.history_policy == ToolHistoryPolicy()
    assert echo.identity_policy == ToolIdentityPolicy()
    assert echo.aborts_siblings_on_error is False
    assert echo.counts_toward_tool_call_limit is True
    assert echo.parallel_safe_per_turn is False
    assert echo.counts_toward_termination_vote is True
    assert echo.timeout is None
    assert echo.idempotent is False


def test_a_name_given_by_the_constructor() -> None:
    class Named(Echo):
        name = ""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    assert Named("mine").schema.name == "mine"
    with pytest.raises(ToolDefinitionError, match=r"Named: invalid tool name 'no spaces'"):
        ToolRegistry([Named("no spaces")])


def test_a_tool_without_a_name() -> None:
    class Nameless(AgentTool):
        async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
            return ToolResult.text("never")

    with pytest.raises(ToolDefinitionError, match=r"Nameless has no name"):
        Nameless()


def test_a_tool_with_a_bad_name() -> None:
    with pytest.raises(ToolDefinitionError, match=r"Bad: invalid tool name 'no spaces'"):

        class Bad(AgentTool):
            name = "no spaces"


def test_a_tool_without_execute() -> None:
    class Idle(AgentTool):
        name = "idle"

    with pytest.raises(ToolDefinitionError, match=r"Idle has no execute"):
        Idle()


def test_a_tool_whose_execute_is_not_async() -> None:
    with pytest.raises(ToolDefinitionError, match=r"Blocking.execute must be an async def"):

        class Blocking(AgentTool):
            name = "blocking"

            def execute(self, args: Any, ctx: ToolContext) -> ToolResult:  # type: ignore[override]
                return ToolResult.text("never")


def test_an_execute_behind_a_decorator() -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args)

        return wrapper

    class Logged(AgentTool):
        name = "logged"

        @logged
        async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
            return ToolResult.text("ok")

    assert asyncio.run(Logged().execute({}, context())).plain_text == "ok"


async def test_the_base_class_itself_does_nothing() -> None:
    with pytest.raises(NotImplementedError):
        await AgentTool.execute(Echo(), {}, context())


@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 64])
def test_names(name: str) -> None:
    assert is_tool_name(name)


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "ä", "a.b"])
def test_names_that_providers_refuse(name: str) -> None:
    assert not is_tool_name(name)


# --- the context ------------------------------------------------------------------------------


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    async def __call__(self, partial: ToolResult) -> None:
        await asyncio.sleep(0)
        self.heard.append(partial.plain_text)


async def from_a_thread(ctx: ToolContext, text: str) -> None:
    def call() -> None:
        _ = ctx.update(text)

    await asyncio.to_thread(call)


async def test_progress_of_an_async_tool() -> None:
    listener = Listener()
    ctx = context(emit=listener)

    @tool
    async def work(ctx: ToolContext) -> str:
        await ctx.update("half")
        await ctx.update(ToolResult.text("most"))
        return "all"

    assert (await work.execute({}, ctx)).plain_text == "all"
    assert listener.heard == ["half", "most"]


async def test_progress_of_a_sync_tool_is_out_when_update_returns() -> None:
    listener = Listener()
    ctx = context(emit=listener)

    @tool
    def work(ctx: ToolContext) -> list[str]:
        _ = ctx.update("half")
        return list(listener.heard)

    assert (await work.execute({}, ctx)).plain_text == '["half"]'


async def test_updates_without_a_listener_are_dropped() -> None:
    @tool
    async def work(ctx: ToolContext) -> str:
        await ctx.update("half")
        finished = ctx.update("most")
        await finished
        await finished  # can be awaited again
        return "done"

    assert (await work.execute({}, context())).plain_text == "done"


async def test_updates_after_the_tool_has_settled_are_dropped() -> None:
    listener = Listener()
    ctx = context(emit=listener)
    early = ctx.update("early, awaited late")
    ctx.settle()
    await early
    await ctx.update("late")
    await from_a_thread(ctx, "late, from a thread")
    assert listener.heard == []


async def test_an_exception_of_a_listener_comes_out() -> None:
    async def broken(partial: ToolResult) -> None:
        raise TimeoutError(partial.plain_text)

    ctx = context(emit=broken)
    with pytest.raises(TimeoutError, match="half"):
        await ctx.update("half")
    with pytest.raises(TimeoutError, match="half"):
        await from_a_thread(ctx, "half")


async def test_a_cancelled_call_does_not_wait_for_a_listener() -> None:
    signal = CancellationToken()
    asked = asyncio.Event()
    never = asyncio.Event()

    async def stuck(partial: ToolResult) -> None:
        asked.set()
        await never.wait()

    ctx = context(emit=stuck, signal=signal)
    waiting = asyncio.create_task(from_a_thread(ctx, "half"))
    await asked.wait()
    signal.cancel()
    async with asyncio.timeout(WAIT):
        await waiting
        await from_a_thread(ctx, "more")
    never.set()


async def test_a_report_that_is_cancelled_does_not_trouble_the_tool() -> None:
    async def shut_down(partial: ToolResult) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    ctx = context(emit=shut_down)
    await from_a_thread(ctx, "half")


def test_a_loop_that_is_gone_does_not_hang_the_thread() -> None:
    async def make() -> ToolContext:
        return context(emit=Listener())

    ctx = asyncio.run(make())
    thread = threading.Thread(target=lambda: ctx.update("half"), daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()

    stopped = asyncio.new_event_loop()
    try:
        ctx = context(emit=Listener(), loop=stopped)
        thread = threading.Thread(target=lambda: ctx.update("half"), daemon=True)
        thread.start()
        thread.join(WAIT)
        assert not thread.is_alive()
    finally:
        stopped.close()


def test_a_context_for_tests() -> None:
    ctx = ToolContext(tool_call_id="c1", tool_name="search")
    assert not ctx.signal.cancelled
    assert repr(ctx) == "<ToolContext search c1>"


# --- functions as tools -----------------------------------------------------------------------


@tool
async def search(query: str, limit: int = 10) -> str:
    """Search the notes.

    All words must occur.

    Args:
        query: The words.
        limit: How many.
    """
    return f"{query} {limit}"


async def test_a_function_as_a_tool() -> None:
    assert search.schema == ToolSchema(
        "search",
        "Search the notes.\n\nAll words must occur.",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "The words."},
                "limit": {"type": "integer", "description": "How many.", "default": 10},
            },
            "required": ["query"],
        },
    )
    assert await search("x") == "x 10"
    assert await result_of(search, query="x", limit=3) == "x 3"
    assert await search.execute(search.validate({"query": "y"}), context()) == ToolResult.text(
        "y 10"
    )


def test_the_tool_looks_like_its_function() -> None:
    assert search.__name__ == "search"
    assert search.__doc__ is not None
    assert search.__doc__.startswith("Search the notes.")
    assert search.__module__ == __name__
    assert inspect.iscoroutinefunction(search.__wrapped__)
    assert list(inspect.signature(search).parameters) == ["query", "limit"]


def test_options() -> None:
    history, identity = ToolHistoryPolicy(dedup_arg="x"), ToolIdentityPolicy(target="x")

    @tool(
        name="other",
        description="Something else.",
        timeout=5,
        requires_exclusive_sandbox=True,
        max_result_chars=NEVER_CLIP,
        history_policy=history,
        identity_policy=identity,
        aborts_siblings_on_error=True,
        counts_toward_tool_call_limit=False,
        parallel_safe_per_turn=True,
        counts_toward_termination_vote=False,
        idempotent=True,
    )
    def made(x: int) -> int:
        """Docs."""
        return x

    assert made.schema.name == "other"
    assert made.schema.description == "Something else."
    assert made.timeout == 5
    assert made.requires_exclusive_sandbox
    assert made.max_result_chars == "never"
    assert made.history_policy is history
    assert made.identity_policy is identity
    assert made.aborts_siblings_on_error
    assert not made.counts_toward_tool_call_limit
    assert made.parallel_safe_per_turn
    assert not made.counts_toward_termination_vote
    assert made.idempotent
    assert made(3) == 3
    assert tool(made.__wrapped__, name="third").name == "third"
    with pytest.raises(TypeError, match=r"tool\(\) got unknown options: nmae"):
        tool(nmae="x")  # type: ignore[call-overload]


async def test_a_sync_function_runs_in_another_thread_with_the_callers_context() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    here = threading.get_ident()

    @tool
    def look() -> list[Any]:
        return [threading.get_ident() == here, variable.get()]

    variable.set("set")
    assert await result_of(look) == '[false,"set"]'
    assert look()[0] is True


async def test_a_sync_function_does_not_block_the_loop() -> None:
    release = threading.Event()

    @tool
    def wait() -> bool:
        return release.wait(WAIT)

    running = asyncio.create_task(wait.execute({}, context()))
    await asyncio.sleep(0)
    release.set()
    assert (await running).plain_text == "true"


async def test_exceptions_come_out() -> None:
    @tool
    def fail() -> None:
        raise KeyError("gone")

    @tool
    async def fail_too() -> None:
        raise KeyError("gone")

    for failing in (fail, fail_too):
        with pytest.raises(KeyError):
            await failing.execute({}, context())


async def test_an_async_function_behind_a_plain_wrapper() -> None:
    async def inner(x: int) -> int:
        return x

    def outer(x: int) -> Any:
        return inner(x)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    assert await result_of(tool(outer), x=1) == "1"
    assert await result_of(tool(wrapped), x=2) == "2"
    assert tool(wrapped).name == "inner"


class Service:
    async def look_up(self, key: str) -> str:
        return key.upper()


async def test_a_bound_method() -> None:
    assert await result_of(tool(Service().look_up), key="a") == "A"


@tool
async def context_first(ctx: ToolContext, x: int) -> list[Any]:
    return [ctx.tool_call_id, x]


@tool
async def context_between(x: int, ctx: ToolContext, y: int = 2) -> list[Any]:
    return [x, ctx.tool_call_id, y]


@tool
async def context_last(x: int, ctx: "ToolContext | None" = None) -> list[Any]:
    return [x, ctx and ctx.tool_call_id]


@tool
async def context_keyword(x: int, *, y: int = 2, ctx: Annotated[ToolContext, "it"]) -> list[Any]:
    return [x, y, ctx.tool_call_id]


@tool
async def keywords_only(*, x: int, y: int = 2, ctx: Optional[ToolContext] = None) -> list[Any]:  # noqa: UP045
    return [x, y, ctx and ctx.tool_call_id]


@tool
async def context_and_keywords(ctx: ToolContext, x: int, *, y: int = 2) -> list[Any]:
    return [ctx.tool_call_id, x, y]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (context_first, '["c",1]'),
        (context_between, '[1,"c",2]'),
        (context_last, '[1,"c"]'),
        (context_keyword, '[1,2,"c"]'),
        (keywords_only, '[1,2,"c"]'),
        (context_and_keywords, '["c",1,2]'),
    ],
    ids=lambda value: value.name if isinstance(value, AgentTool) else "",
)
async def test_the_context_is_given_wherever_it_is_asked_for(
    made: AgentTool, expected: str
) -> None:
    assert "ctx" not in made.parameters_schema["properties"]
    assert await result_of(made, x=1) == expected


async def test_only_the_context() -> None:
    @tool
    async def alone(ctx: ToolContext) -> str:
        return ctx.tool_name

    assert alone.parameters_schema == {"type": "object", "properties": {}}
    assert (await alone.execute(None, context())).plain_text == "t"


async def test_defaults_are_the_functions_own() -> None:
    marker = object()
    shared: list[int] = []

    @tool
    async def made(
        a: list[int] = shared,
        b: Any = marker,
        c: tuple[int, ...] = (1, 2),
        d: str | None = None,
    ) -> list[Any]:
        return [a is shared, b is marker, c, d]

    assert await result_of(made) == "[true,true,[1,2],null]"
    properties = made.parameters_schema["properties"]
    assert properties["a"]["default"] == []
    assert "default" not in properties["b"]
    assert properties["c"]["default"] == [1, 2]
    assert properties["d"]["default"] is None
    assert "required" not in made.parameters_schema


class Query(Struct):
    """What to look for."""

    text: str
    limit: Annotated[int, Meta(description="How many.")] = 5


async def test_a_lone_struct_is_all_arguments() -> None:
    @tool
    async def find(query: Query, ctx: ToolContext) -> str:
        """
        :param query: The query.
        :param text: The words.
        :param limit: Not this.
        """
        return f"{query.text} {query.limit}"

    assert find.parameters_schema == {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "The words."},
            "limit": {"type": "integer", "description": "How many.", "default": 5},
        },
        "required": ["text"],
    }
    assert find.description == "What to look for."
    assert await result_of(find, text="a", limit="3") == "a 3"
    assert (await find.execute(Query("b"), context())).plain_text == "b 5"
    with pytest.raises(InvalidArgumentsError, match=r"path \$\.text: expected a string, got 5"):
        find.validate({"text": 5})


async def test_a_struct_beside_others_is_nested() -> None:
    @tool
    async def find(query: Query, deep: bool = False) -> str:
        """Find.

        Args:
            query: The query.
        """
        return query.text

    assert find.parameters_schema["properties"]["query"]["description"] == "The query."
    assert await result_of(find, query={"text": "a"}) == "a"


async def test_a_lone_struct_with_a_default() -> None:
    @tool
    async def find(query: Query = Query("nothing", 0)) -> str:  # noqa: B008
        return f"{query.text} {query.limit}"

    assert await result_of(find) == "nothing 0"
    assert await result_of(find, text="a") == "a 5"


async def test_a_lone_struct_behind_an_alias_and_an_annotation() -> None:
    alias = typing_extensions.TypeAliasType("alias", Query)

    async def find(query: Any) -> str:
        return query.text  # type: ignore[no-any-return]

    find.__annotations__["query"] = Annotated[alias, "The query."]
    assert await result_of(tool(find), text="a") == "a"


class Options(pydantic.BaseModel):
    name: str
    size: Annotated[int, pydantic.Field(ge=0)] = 1

    @pydantic.field_validator("name")
    @classmethod
    def check(cls, value: str) -> str:
        if value == "bad":
            raise ValueError("not that one")
        return value


def test_a_pydantic_model_as_a_default() -> None:
    @tool
    async def make(n: int, options: Options = Options(name="d")) -> None: ...  # noqa: B008

    schema = make.parameters_schema["properties"]["options"]
    assert schema["default"] == {"name": "d", "size": 1}


async def test_a_pydantic_model_is_all_arguments() -> None:
    @tool
    async def make(options: Options) -> Options:
        return options

    assert await result_of(make, name="a", size="3") == '{"name":"a","size":3}'
    with pytest.raises(
        InvalidArgumentsError, match=r'path \$\.name: .*not that one, got "bad"'
    ) as caught:
        make.validate({"name": "bad"})
    assert isinstance(caught.value, ToolValidationError)


def test_a_pydantic_model_among_other_arguments_is_explained_as_well() -> None:
    @tool
    async def make(options: Options, others: list[Options], n: int = 1) -> None: ...

    bad, good = {"name": "bad"}, {"name": "a"}
    for arguments, path in (
        ({"options": bad, "others": []}, "$.options.name"),
        ({"options": good, "others": [good, bad]}, "$.others[1].name"),
    ):
        with pytest.raises(InvalidArgumentsError) as caught:
            make.validate(arguments)
        assert str(caught.value) == (
            f"invalid arguments for 'make': path {path}: Value error, not that one, got \"bad\""
        )


def test_a_long_reason_is_one_line_and_ends_with_a_word() -> None:
    class Long(Struct):
        n: int

        def __post_init__(self) -> None:
            raise ValueError("\n".join(["word"] * 200))

    @tool
    async def make(long: Long, n: int = 1) -> None: ...

    with pytest.raises(InvalidArgumentsError) as caught:
        make.validate({"long": {"n": 1}})
    assert re.search(r"path \$\.long: (word ){80,}…$", str(caught.value))


@dataclasses.dataclass
class Checked:
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low must not be above high")


def test_a_check_that_the_schema_does_not_know() -> None:
    @tool
    async def span(checked: Checked) -> None: ...

    @tool
    async def spans(first: Checked, text: Annotated[str, Meta(pattern="^a")] = "a") -> None: ...

    with pytest.raises(InvalidArgumentsError, match=r"path \$: low must not be above high"):
        span.validate({"low": 2, "high": 1})
    with pytest.raises(InvalidArgumentsError, match=r"path \$\.first: low must not be above high"):
        spans.validate({"first": {"low": 2, "high": 1}})
    with pytest.raises(InvalidArgumentsError, match=r"path \$\.text: expected str matching"):
        spans.validate({"first": {"low": 1, "high": 2}, "text": "b"})


def test_strict_tools_refuse_unknown_names() -> None:
    @tool(strict=True)
    async def made(path: str, line: int = 1) -> None: ...

    assert made.validate({"path": "a", "line": None}).line == 1
    with pytest.raises(
        InvalidArgumentsError, match='"lin" is not an argument; did you mean "line"'
    ):
        made.validate({"path": "a", "lin": 3})


def test_unknown_names_are_ignored_otherwise() -> None:
    assert search.validate({"query": "x", "noise": 1}).query == "x"


async def test_types_that_are_local_to_a_function() -> None:
    class Local(Struct):
        x: int

    @tool
    async def bare(local: "Local") -> str:
        return str(local.x)

    @tool(name="with_options")
    async def other(local: "Local", more: "list[Local]") -> str:
        return str(local.x)

    class Typed(TypedTool):
        name = "typed"

        async def run(self, local: "Local", n: int) -> str:
            return str(local.x)

    assert await result_of(bare, x=1) == "1"
    assert await result_of(other, local={"x": 2}, more=[]) == "2"
    assert await result_of(Typed(), local={"x": 3}, n=1) == "3"


def test_the_context_may_be_imported_for_type_checkers_only() -> None:
    namespace: dict[str, Any] = {"tool": tool}
    source = "async def made(x: 'int', ctx: 'ToolContext') -> 'Missing': ..."
    exec(source, namespace)
    assert list(tool(namespace["made"]).parameters_schema["properties"]) == ["x"]


# --- mistakes ---------------------------------------------------------------------------------


def untyped(query, limit: int = 1):  # type: ignore[no-untyped-def]
    ...


def starred(*queries: str) -> None: ...


def double_starred(**queries: str) -> None: ...


def positional(query: str, /) -> None: ...


def unsupported(query: complex) -> None: ...


def callback(when_done: Callable[[], None]) -> None: ...


def two_arrays(x: list[int] | set[int]) -> None: ...


def twice(a: ToolContext, b: ToolContext) -> None: ...


def unresolved(query: "Missing") -> None: ...


def generates() -> Iterator[int]:
    yield 1


async def generates_too() -> AsyncIterator[int]:
    yield 1


def misdocumented(limit: int) -> None:
    """Do.

    Args:
        limt: How many.
    """


class ArrayLike(Struct, array_like=True):
    x: int


def no_object(args: ArrayLike) -> None: ...


def open_dict(args: dict[str, int], n: int) -> None: ...


def unreadable() -> None: ...


vars(unreadable)["__signature__"] = 7


class Unbound:
    def method(self, x: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (untyped, r"untyped\(\): the parameter 'query' has no annotation: .*'query: str'"),
        (starred, r"starred\(\): the parameter 'queries' is variadic: name each"),
        (
            double_starred,
            r"double_starred\(\): the parameter 'queries' is variadic: name each",
        ),
        (positional, r"positional\(\): the parameter 'query' is positional-only"),
        (unsupported, r"unsupported\(\): the parameter 'query' has the type complex"),
        (callback, r"callback\(\): the parameter 'when_done' has the type"),
        (two_arrays, r"two_arrays\(\): the parameter 'x' has the type"),
        (twice, r"twice\(\) has more than one ToolContext parameter"),
        (unresolved, r"unresolved\(\): the parameter 'query' .*'Missing'.*cannot be resolved"),
        (generates, r"generates\(\) yields"),
        (generates_too, r"generates_too\(\) yields"),
        (misdocumented, r"misdocumented\(\): .*'limt'.*did you mean 'limit'"),
        (no_object, r"no_object\(\): arguments must be a JSON object, and ArrayLike is not"),
        (Unbound.method, r"Unbound.method\(\): the parameter 'self' .*tool\(obj.method\)"),
        (lambda: None, r"invalid tool name '<lambda>'"),
        (Unbound, r"tool\(\) needs a function, not <class"),
        (unreadable, r"unreadable\(\) has no readable signature"),
        (7, r"tool\(\) needs a function, not 7"),
    ],
)
def test_mistakes_are_told_where_the_tool_is_defined(function: Any, says: str) -> None:
    with pytest.raises(ToolDefinitionError, match=says) as caught:
        tool(function)
    assert isinstance(caught.value, TypeError)


def test_strict_mistakes_name_the_function() -> None:
    with pytest.raises(ToolDefinitionError, match=r"open_dict\(\): the strict form .*\$\.args"):
        tool(open_dict, strict=True)


# --- classes as tools -------------------------------------------------------------------------


class ReadFile(TypedTool):
    """Read a file.

    Args:
        path: Where it is.
    """

    name = "read_file"
    idempotent = True

    def __init__(self, files: dict[str, str]) -> None:
        super().__init__()
        self.files = files

    def run(self, path: str, ctx: ToolContext, lines: int = 10) -> str:
        """Read.

        Args:
            lines: How many.
        """
        return f"{self.files[path]} {lines} {ctx.tool_call_id}"


async def test_a_class_as_a_tool() -> None:
    made = ReadFile({"a": "text"})
    assert made.schema == ToolSchema(
        "read_file",
        "Read a file.",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "Where it is."},
                "lines": {"type": "integer", "description": "How many.", "default": 10},
            },
            "required": ["path"],
        },
    )
    assert await result_of(made, path="a") == "text 10 c"
    assert made.idempotent


async def test_subclasses_of_a_typed_tool() -> None:
    class Strict(ReadFile):
        name = "strict_read"
        strict = True

        async def unrelated(self) -> None: ...

    class Async(ReadFile):
        description = "Another."

        async def run(self, path: str) -> str:  # type: ignore[override]
            return self.files[path]

    strict = Strict({"a": "text"})
    assert strict.parameters_schema["additionalProperties"] is False
    assert await result_of(strict, path="a", lines=None) == "text 10 c"
    other = Async({"a": "text"})
    assert other.schema.description == "Another."
    assert list(other.schema.parameters["properties"]) == ["path"]
    assert await result_of(other, path="a") == "text"


def test_a_class_with_a_schema_of_its_own() -> None:
    class Own(TypedTool):
        """Docs."""

        name = "own"
        parameters_schema = TEXT_ARGUMENT

        def run(self, x: int) -> int:
            return x

    assert Own().schema.parameters == TEXT_ARGUMENT


def test_mistakes_in_a_class() -> None:
    with pytest.raises(ToolDefinitionError, match=r"NoSelf.run\(\): the first .*'self'"):

        class NoSelf(TypedTool):
            name = "no_self"

            def run(path: str) -> None:  # type: ignore[misc]  # noqa: N805
                ...

    with pytest.raises(ToolDefinitionError, match=r"Static.run\(\) must be a plain method"):

        class Static(TypedTool):
            name = "static"

            @staticmethod
            def run(path: str) -> None: ...

    with pytest.raises(ToolDefinitionError, match=r"Untyped.run\(\): the parameter 'x' has no"):

        class Untyped(TypedTool):
            name = "untyped"

            def run(self, x):  # type: ignore[no-untyped-def]
                ...

    class Idle(TypedTool):
        name = "idle"

    with pytest.raises(ToolDefinitionError, match="Idle has no run"):
        Idle()


# --- results ----------------------------------------------------------------------------------

IMAGE = ImageContent("data:image/png;base64,AA==")
TEXT = TextContent("x")
FILE = FileContent("data:application/pdf,x", name="a.pdf")


class Payload(Struct):
    x: int


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (ToolResult.error("no"), ToolResult.error("no")),
        ("text", ToolResult.text("text")),
        (None, ToolResult.text("Done.")),
        (IMAGE, ToolResult((IMAGE,))),
        ([TEXT, IMAGE], ToolResult((TEXT, IMAGE))),
        ((IMAGE,), ToolResult((IMAGE,))),
        (FILE, ToolResult((FILE,))),
        ([FILE, TEXT], ToolResult((FILE, TEXT))),
        ([], ToolResult.text("[]")),
        ([TEXT, 5], ToolResult.text('[{"type":"text","text":"x"},5]')),
        (5, ToolResult.text("5")),
        (True, ToolResult.text("true")),
        ({"a": [1]}, ToolResult.text('{"a":[1]}')),
        (Payload(1), ToolResult.text('{"x":1}')),
        (Checked(1, 2), ToolResult.text('{"low":1,"high":2}')),
        (Options(name="n"), ToolResult.text('{"name":"n","size":1}')),
        ([Options(name="n")], ToolResult.text('[{"name":"n","size":1}]')),
    ],
)
def test_return_values(value: object, expected: ToolResult) -> None:
    assert tool_result(value) == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"x", "returned bytes, which a model cannot read"),
        (bytearray(b"x"), "returned bytearray"),
        (object(), "returned a object, which cannot be written as JSON: object is not JSON"),
        ([object()], "returned a list"),
        ({1j: 1}, "returned a dict"),
        ("\ud800" and ["\ud800"], "returned a list"),
    ],
)
def test_return_values_that_a_model_cannot_read(value: object, says: str) -> None:
    with pytest.raises(ToolExecutionError, match=says):
        tool_result(value)


# --- the registry -----------------------------------------------------------------------------


def named(name: str, description: str = "") -> FunctionTool[[], None]:
    def made() -> None: ...

    return tool(made, name=name, description=description)


def test_the_registry_keeps_order_and_the_last_of_a_name() -> None:
    first, second, again = named("a"), named("b"), named("a", "again")
    registry = ToolRegistry([first, second, again])
    assert registry.names == ("a", "b")
    assert list(registry) == ["a", "b"]
    assert len(registry) == 2
    assert registry["a"] is again
    assert "b" in registry
    assert "c" not in registry
    assert registry.schemas == (again.schema, second.schema)
    assert registry.schemas is registry.schemas
    assert repr(registry) == "<ToolRegistry a, b>"


def test_a_registry_never_changes() -> None:
    registry = ToolRegistry([named("a")])
    larger = registry.with_tool(named("b"))
    assert registry.names == ("a",)
    assert larger.names == ("a", "b")
    with pytest.raises(TypeError):
        registry["c"] = named("c")  # type: ignore[index]
    with pytest.raises(AttributeError):
        registry.other = 1  # type: ignore[attr-defined]


def test_policies() -> None:
    @tool(
        history_policy=ToolHistoryPolicy(summary_arg="x"),
        identity_policy=ToolIdentityPolicy(operation_arg="x"),
    )
    def made(x: str) -> None: ...

    registry = ToolRegistry([made])
    assert registry.history_policy("made").summary_arg == "x"
    assert registry.identity_policy("made").operation_arg == "x"
    assert registry.history_policy("unknown") == ToolHistoryPolicy()
    assert registry.identity_policy("unknown") == ToolIdentityPolicy()
    assert registry.identity_policies() == {"made": made.identity_policy}


def test_plain_functions_become_tools() -> None:
    def plain(x: int) -> int:
        return x

    registry = ToolRegistry([plain, Service().look_up])
    assert registry.names == ("plain", "look_up")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Echo, r"pass Echo\(\), not the class"),
        ("search", r"must be an AgentTool or a function, not 'search'"),
        (None, r"must be an AgentTool or a function, not None"),
    ],
)
def test_what_is_no_tool(given: Any, says: str) -> None:
    with pytest.raises(ToolDefinitionError, match=says):
        ToolRegistry([given])


def test_the_schema_can_be_sent() -> None:
    registry = ToolRegistry([search, Echo()])
    assert msgspec.json.decode(msgspec.json.encode(registry.schemas))[0]["name"] == "search"


@pytest.mark.parametrize(
    "flags",
    [
        {"timeout": "5"},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": True},
        {"identity_policy": "path"},
        {"history_policy": {}},
    ],
)
def test_a_flag_that_makes_no_sense_is_refused_with_the_registry(flags: dict[str, Any]) -> None:
    @tool(**flags)
    def look(path: str) -> str:
        return path

    (name,) = flags
    with pytest.raises(ToolDefinitionError, match=f"look: {name} must be"):
        ToolRegistry([look])
