"""What a run must return: a type, how the model is asked for it, and what checks it.

`Output` is a setting of `clark_agent.LoopConfig`. With it, a run ends with a value of its type as
``RunResult.output``, or raises `clark_agent.errors.OutputError`. An answer that does not fit goes
back to the model with the reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum
from inspect import Parameter, isawaitable, signature
from typing import Any, Final, Generic, TypeAlias

import msgspec

from clark_agent._typing import OutputT_co
from clark_agent.errors import (
    ConfigError,
    HookError,
    ModelRetry,
    ToolDefinitionError,
    ToolValidationError,
)
from clark_agent.messages.thinking import strip_leading_thoughts
from clark_agent.run_context import RunContext
from clark_agent.stream import OutputSchema, StreamFn, output_mode_of
from clark_agent.tools.base import ToolContext, ToolResult
from clark_agent.tools.finish import FinishTool, finish_tool
from clark_agent.tools.schema import strict_schema
from clark_agent.tools.signature import members_of

__all__ = ["NO_OUTPUT", "CheckedFinish", "Output", "OutputMode", "OutputValidator"]

NO_OUTPUT: Final = object()
"""Stands for an output that there is not (yet); None may be one."""


class OutputMode(StrEnum):
    """How the model is asked for the output."""

    TOOL = "tool"
    """It calls a tool whose arguments are the output. Works with every model that calls tools."""
    NATIVE = "native"
    """The provider constrains the answer to the JSON schema of the output."""
    PROMPTED = "prompted"
    """The system prompt describes the JSON schema. Works with every model."""


OutputValidator: TypeAlias = (
    Callable[[Any], Any | Awaitable[Any]] | Callable[[Any, RunContext[Any]], Any | Awaitable[Any]]
)
"""Checks an output: ``check(value)`` or ``check(value, ctx)``, plain or async.

Contract: raises `clark_agent.ModelRetry` with a text for the model if the output is not acceptable.
Returns None or the value itself. Any other exception ends the run with a `HookError`.
"""


class Output(Generic[OutputT_co]):
    """What a run must return. Immutable, for any number of runs.

    ``output_type`` is any type that a tool can take as an argument, unions included. ``str`` is the
    text of the last answer. ``mode`` is by default the best one that the transport offers. The
    model has ``retries`` attempts after one that is not accepted, then the run raises
    `OutputError`. ``name`` and ``description`` are those of the tool, or of the schema. ``strict``
    asks for constrained decoding of the tool's arguments.
    """

    def __init__(
        self,
        output_type: Any,
        *,
        mode: OutputMode | str | None = None,
        retries: int = 2,
        validators: Iterable[OutputValidator] = (),
        name: str = "finish",
        description: str | None = None,
        strict: bool = False,
    ) -> None:
        attempts: Any = retries
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 0:
            raise ConfigError(f"output retries must be a number of at least 0, not {retries!r}")
        try:
            self.mode = None if mode is None else OutputMode(mode)
        except ValueError:
            choices = ", ".join(OutputMode)
            raise ConfigError(f"output mode must be one of {choices}, not {mode!r}") from None
        self.type = output_type
        self.retries = retries
        self.validators = tuple([_Validator(validator) for validator in validators])
        self.is_text = output_type is str
        """Whether the answer itself is the output."""
        self.accepts_text = str in members_of(output_type)
        """Whether an answer in plain text is an output."""
        self._description = description or ""  # the tool's own default speaks of a call
        options: dict[str, Any] = {} if description is None else {"description": description}
        made = finish_tool(output_type, name=name, strict=strict, **options)
        self.tool: FinishTool[Any] = CheckedFinish(made, self.check) if self.validators else made
        """The tool of the mode ``tool``. Its schema and its checks serve the other modes too."""

    def mode_for(self, stream: StreamFn, *, has_tools: bool) -> OutputMode | None:
        """The mode with this transport, beside tools or not; None: the output is plain text."""
        if self.is_text:
            return None
        if self.mode is not None:
            return self.mode
        mode = OutputMode(output_mode_of(stream, has_tools=has_tools))
        # Providers ensure a schema only in the strict form.
        return mode if mode is not OutputMode.NATIVE or self._has_strict_form else OutputMode.TOOL

    @property
    def _has_strict_form(self) -> bool:
        try:
            strict_schema(self.tool.parameters_schema)
        except ToolDefinitionError:
            return False
        return True

    @property
    def schema(self) -> OutputSchema:
        """The schema for the mode ``native``."""
        tool = self.tool
        return OutputSchema(tool.name, tool.parameters_schema, self._description)

    @property
    def instructions(self) -> str:
        """What the mode ``prompted`` adds to the system prompt."""
        return self.schema.instructions

    def parse(self, text: str, mode: OutputMode | None) -> OutputT_co:
        """Convert an answer. Raises `ModelRetry` with the reason if it does not fit."""
        value: Any
        if self.is_text or (mode is OutputMode.TOOL and self.accepts_text):
            value = text
            return value  # type: ignore[no-any-return]
        if mode is OutputMode.TOOL:
            raise ModelRetry(
                f"An answer in plain text is not accepted. Call the tool {self.tool.name!r} with "
                "the answer."
            )
        try:
            checked = self.tool.validate(
                msgspec.json.decode(_json_in(strip_leading_thoughts(text)))
            )
        except RecursionError:
            raise ModelRetry("The answer is nested too deeply.") from None
        except msgspec.DecodeError as error:
            raise ModelRetry(
                f"The answer is not valid JSON: {error}. Answer with the JSON object alone."
            ) from None
        except ToolValidationError as error:
            reason = getattr(error, "reason", str(error))
            raise ModelRetry(f"The answer does not match the schema: {reason}") from None
        value = self.tool.output(checked)
        return value  # type: ignore[no-any-return]

    async def check(self, value: Any, ctx: RunContext[Any]) -> None:
        """Call the validators. Raises `ModelRetry` or `HookError`."""
        for validator in self.validators:
            await validator.check(value, ctx)

    def __repr__(self) -> str:
        return f"<Output {getattr(self.type, '__name__', self.type)}>"


def _json_in(text: str) -> str:
    """The JSON object in a text that may have words or a fence around it."""
    _, fence, rest = text.partition("```")
    inside, closed, _ = rest.partition("```")
    if fence and closed and "{" in inside:
        text = inside
    start, end = text.find("{"), text.rfind("}")
    return text[start : end + 1] if 0 <= start < end else text


class _Validator:
    """One validator, whose parameters are checked when it is given."""

    def __init__(self, function: Any) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function = function
        try:
            parameters = list(signature(function).parameters.values())
        except (TypeError, ValueError):
            raise ConfigError(f"{function!r} is not an output validator: pass a function") from None
        required = [p for p in parameters if p.default is Parameter.empty and p.kind in _POSITIONAL]
        if len(required) not in (1, 2):
            raise ConfigError(
                f"the output validator {self.name!r} must take (value) or (value, ctx), not "
                f"{signature(function)}"
            )
        self._takes_context = len(required) == 2

    async def check(self, value: Any, ctx: RunContext[Any]) -> None:
        try:
            returned = self._function(*((value, ctx) if self._takes_context else (value,)))
            if isawaitable(returned):
                returned = await returned
            if returned is not None and returned is not value:
                raise TypeError(
                    f"an output validator returns None or the value itself, not {returned!r}"
                )
        except ModelRetry:
            raise
        except Exception as error:
            raise HookError("output validator", self.name, error) from error


_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class CheckedFinish(FinishTool[Any]):
    """A finish tool whose answer is checked by validators before it is accepted."""

    def __init__(
        self,
        made: FinishTool[Any],
        check: Callable[[Any, RunContext[Any]], Awaitable[None]],
    ) -> None:
        self.__dict__.update(made.__dict__)
        self._check = check

    async def execute(self, args: Any, ctx: ToolContext[Any]) -> ToolResult:
        """Check the answer, and accept it. Raises `ModelRetry` or `HookError`."""
        checked = args if type(args) is self._plan.kind else self.validate(args)
        messages = () if ctx.run is None else ctx.run.messages
        context = RunContext(ctx.deps, ctx.identity, messages)
        await self._check(self.output(checked), context)
        return await super().execute(checked, ctx)
