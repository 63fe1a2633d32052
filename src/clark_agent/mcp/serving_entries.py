"""What a server offers: an agent, or a tool, as one tool of the protocol.

A tool is run by the loop itself: a run of one turn, whose model is `_OneCall`. So arguments are
repaired and checked, plugins are asked, timeouts and cancellation work, and failures become
results, exactly as in a run of an agent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import astuple

from clark_agent._text import message_of
from clark_agent.agent import Agent
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.engine.call import Call
from clark_agent.engine.loop import start
from clark_agent.engine.prepare import accept
from clark_agent.errors import (
    ClarkAgentError,
    ConfigError,
    LoopError,
    RunAborted,
    RunLetGo,
    ToolValidationError,
)
from clark_agent.events import (
    AgentEvent,
    ChildRunEvent,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnStart,
)
from clark_agent.mcp.serving_calls import ServedCall
from clark_agent.mcp.serving_content import Outcome, describe_tool
from clark_agent.output import Output
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.stream import Done, StreamEvent, StreamRequest
from clark_agent.sub_agents import child_answer, child_failure
from clark_agent.tools import AgentTool, ToolResult, tool, tool_result
from clark_agent.tools.base import check_tool_name
from clark_agent.types import (
    AgentContext,
    AssistantMessage,
    ImageContent,
    RunIdentity,
    ToolCall,
    ToolResultMessage,
)

if TYPE_CHECKING:
    import mcp_types as types

__all__ = ["AgentEntry", "Entry", "ToolEntry", "tool_entries"]


class Entry(Protocol):
    """Something that clients can call."""

    @property
    def tool(self) -> AgentTool:
        """Its name, its flags and the schema of its arguments."""
        ...

    @property
    def can_be_resumed(self) -> bool:
        """Whether another process can continue its runs."""
        ...

    def describe(self) -> types.Tool:
        """Describe it to clients."""
        ...

    async def call(self, arguments: dict[str, Any], call: ServedCall) -> Outcome:
        """Run it. Contract: does not raise for anything that is the caller's or the tool's."""
        ...


# --- an agent -----------------------------------------------------------------------------------


def _task_tool(name: str) -> AgentTool:
    @tool(name=name)
    async def ask(task: str) -> ToolResult:
        """Give a task to an agent.

        Args:
            task: What to do, with everything that is needed to do it. Nothing else is known there.
        """
        raise NotImplementedError

    return ask


class AgentEntry:
    """An agent: every call is a run of its own."""

    def __init__(
        self, agent: Agent[Any, Any], *, name: str, description: str | None, deps: Any
    ) -> None:
        check_tool_name(name, "mcp_server")
        agent.check_deps(deps)
        self._agent = agent
        self._deps = deps
        self._description = description or f"Give a task to the agent {name!r}."
        self.tool = _task_tool(name)
        output = agent.config.output
        self._output = None if output is None or output.is_text else output

    @property
    def can_be_resumed(self) -> bool:
        """Whether another process can continue its runs: they have a log."""
        return self._agent.config.run_log is not None

    def describe(self) -> types.Tool:
        """Describe it to clients. An output type gives the output schema."""
        schema = None if self._output is None else dict(self._output.tool.parameters_schema)
        return describe_tool(self.tool, description=self._description, output_schema=schema)

    async def call(self, arguments: dict[str, Any], call: ServedCall) -> Outcome:
        """Run the agent."""
        checked = Call(ToolCall("task", self.tool.name, arguments), self.tool, arguments, 0)
        refused = accept(self.tool, checked, arguments)
        if refused is not None:
            return Outcome(refused)
        (task,) = astuple(checked.input)
        if not task.strip():
            return Outcome(
                ToolResult.error("The task is blank. Say in it what the agent should do.")
            )
        progress, identity = _Progress(call), RunIdentity.root(self._agent.config.clock.new_id())
        try:
            result = await self._agent.start(
                task,
                deps=self._deps,
                config=self._agent.config,
                identity=identity,
                signal=call.token,
                sink=progress.on_event,
            )
        except RunLetGo:
            text = f"The server is stopping. The run {identity.run_id} can be resumed there."
            return Outcome(ToolResult.error(text))
        except LoopError as error:
            return Outcome(_failure(error, call))
        except ClarkAgentError as error:
            return Outcome(ToolResult.error(f"The agent could not run: {message_of(error)}"))
        return self._answer(result, identity)

    def _answer(self, result: RunResult[Any], identity: RunIdentity) -> Outcome:
        if result.outcome is LoopOutcome.SUSPENDED:
            waits = len(result.waiting)
            return Outcome(
                ToolResult.error(
                    f"The agent is suspended: its run {identity.run_id} waits for {waits} "
                    f"decision{'' if waits == 1 else 's'} on the server. Its answer will not come "
                    "here."
                )
            )
        if not result.outcome.is_complete:
            return Outcome(ToolResult.error(child_answer(result).plain_text))
        if self._output is not None:
            structured = structured_output(self._output, result.output)
            text = msgspec.json.encode(structured).decode()
            return Outcome(ToolResult.text(text), structured)
        said = child_answer(result)
        return Outcome(ToolResult((*said.content, *_images(result))))


def _images(result: RunResult[Any]) -> tuple[ImageContent, ...]:
    """The images of the last answer."""
    for message in reversed(result.messages):
        if isinstance(message, AssistantMessage):
            return tuple([block for block in message.content if isinstance(block, ImageContent)])
    return ()


def structured_output(output: Output[Any], value: Any) -> dict[str, Any]:
    """Return the output of a run as the JSON object that its schema describes."""
    finish = output.tool
    plain = msgspec.json.decode(tool_result(_Json(value)).plain_text)["value"]
    # Members of a union that JSON does not tell apart stand beside the name of their type.
    for form in (plain, {"type": type(value).__name__, "value": plain}):
        wanted = {"answer": form} if finish.is_wrapped else form
        with suppress(ToolValidationError):
            finish.validate(wanted)
            return dict(wanted)
    raise TypeError(f"{type(value).__name__} does not fit the output schema")


class _Json(msgspec.Struct):
    """Makes even text be written as JSON."""

    value: Any


def _failure(error: LoopError, call: ServedCall) -> ToolResult:
    if isinstance(error, RunAborted) and call.token.cancelled:
        return ToolResult.error(f"The agent was stopped: {call.token.reason}.")
    return ToolResult.error(child_failure(error).plain_text)


class _Progress:
    """Tells the client what an agent does: turns and tools, also of agents below it."""

    def __init__(self, call: ServedCall) -> None:
        self._call = call
        self._turns: dict[str, int] = {}

    def on_event(self, event: AgentEvent) -> None:
        self._on_event(event, "", "")

    def _on_event(self, event: AgentEvent, run_id: str, indent: str) -> None:
        match event:
            case TurnStart():
                turn = self._turns[run_id] = self._turns.get(run_id, 0) + 1
                self._call.report(f"{indent}turn {turn}")
            case ToolExecutionStart(_, name):
                self._call.report(f"{indent}{name}: started")
            case ToolExecutionUpdate(_, name, partial) if text := partial.plain_text.strip():
                self._call.report(f"{indent}{name}: {text}")
            case ToolExecutionEnd(_, name, _, is_error):
                self._call.report(f"{indent}{name}: {'failed' if is_error else 'done'}")
            case ChildRunEvent(identity, _, below):
                self._on_event(below, identity.run_id, "  " * identity.depth)
            case _:
                pass


# --- a tool -------------------------------------------------------------------------------------


class _OneCall:
    """A model that makes one call, and is done when it has the result."""

    model = "mcp"
    is_model = False
    """For a trace: there is nothing to see of it."""

    def __init__(self, call: ToolCall) -> None:
        self._call = call

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        if any(isinstance(message, ToolResultMessage) for message in request.messages):
            yield Done(AssistantMessage.from_text("done"))
        else:
            yield Done(AssistantMessage.from_calls([self._call]))


def tool_entries(
    tools: Iterable[Any], *, plugins: Iterable[Any], tool_timeout: float | None, deps: Any
) -> list[ToolEntry]:
    """Return what is offered for these tools, or functions. Raises `ConfigError`."""
    nothing = _OneCall(ToolCall("call", "none", {}))
    config = LoopConfig(
        stream=nothing, tools=tools, plugins=plugins, tool_timeout=tool_timeout, model_id="mcp"
    )
    return [ToolEntry(each, config, deps) for each in config.registry.values()]


class ToolEntry:
    """A tool: every call is a run of one turn."""

    can_be_resumed = False

    def __init__(self, tool: AgentTool, config: LoopConfig, deps: Any) -> None:
        if tool.parameters_schema.get("type") != "object":
            raise ConfigError(
                f"the tool {tool.name!r} cannot be served: its schema is not that of an object"
            )
        self.tool = tool
        self._config = config
        self._deps = deps

    def describe(self) -> types.Tool:
        """Describe it to clients."""
        return describe_tool(self.tool, description=self.tool.description)

    async def call(self, arguments: dict[str, Any], call: ServedCall) -> Outcome:
        """Run the tool."""
        wanted = ToolCall("call", self.tool.name, arguments)
        results: list[ToolResult] = []

        def on_event(event: AgentEvent) -> None:
            match event:
                case ToolExecutionUpdate(_, _, partial) if text := partial.plain_text.strip():
                    call.report(text)
                case ToolExecutionEnd(_, _, result):
                    results.append(result)
                case _:
                    pass

        config = self._config.replace(stream=_OneCall(wanted))
        context = AgentContext(identity=RunIdentity.root(config.clock.new_id()))
        try:
            await start("call", context, config, call.token, sink=on_event, deps=self._deps)
        except LoopError as error:
            if call.token.cancelled:
                return Outcome(ToolResult.error(f"The call was stopped: {call.token.reason}."))
            if not results:
                return Outcome(ToolResult.error(message_of(error)))
        return Outcome(results[0])
