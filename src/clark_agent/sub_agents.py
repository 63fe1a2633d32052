"""Child runs: a tool that is itself an agent.

A child run has its own identity, shares the budget of the run above it, is cancelled with
the call that started it, adds its tokens to the tree, and emits its events in the parent's stream.
`agent_tool` turns a config into a tool; `run_child` is for tools that do more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, cast

from msgspec import Struct, to_builtins

from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.effects import DIRECT
from clark_agent.engine.arguments import check_arguments
from clark_agent.engine.loop import start
from clark_agent.engine.run import Run
from clark_agent.errors import (
    ConfigError,
    LoopError,
    RunAborted,
    RunLogError,
    ToolExecutionError,
)
from clark_agent.events import AgentEvent, ChildRunEvent, EventSink
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.run_context import (
    RunContext,
    SystemPrompt,
    check_system_prompt,
    resolve_system_prompt,
)
from clark_agent.tools import AgentTool, FunctionTool, ToolContext, ToolResult, tool_result
from clark_agent.tools.base import check_tool_name
from clark_agent.types import AgentContext, AgentMessage, AssistantMessage, RunIdentity, Usage

__all__ = ["ChildRun", "agent_tool", "run_child"]

_MAX_DEPTH = 3

INHERIT: Final = object()
"""As ``deps``: those of the run above."""


class ChildRun(Struct, frozen=True, kw_only=True):
    """A child run that is about to start."""

    ctx: ToolContext
    """The context of the call that starts it."""
    prompts: str | AgentMessage | Iterable[AgentMessage]
    context: AgentContext
    config: LoopConfig
    signal: CancellationToken
    deps: Any = None

    @property
    def tool_call_id(self) -> str:
        """The call that starts it."""
        return self.ctx.tool_call_id

    def start(self) -> Awaitable[RunResult]:
        """Run it."""
        parent = cast("Run | None", self.ctx.run)
        return start(
            self.prompts,
            self.context,
            self.config,
            self.signal,
            sink=_forward(self.ctx, self.context.identity, parent),
            parent=parent,
            call_id=self.tool_call_id,
            deps=self.deps,
        )


async def run_child(
    ctx: ToolContext,
    prompts: str | AgentMessage | Iterable[AgentMessage],
    config: LoopConfig,
    *,
    system_prompt: str = "",
    max_depth: int = _MAX_DEPTH,
    deps: Any = INHERIT,
) -> RunResult:
    """Run an agent from inside a tool. Its context is empty except for the system prompt.

    Its ``deps`` are those of the run above, unless others are given. Raises what `run` raises, and
    `ToolExecutionError` when the child would be deeper than
    ``max_depth`` runs below the outermost one.
    """
    parent = cast("Run | None", ctx.run)
    identity = _child_identity(parent, config)
    if identity.depth > max_depth:
        raise ToolExecutionError(
            f"no agent may be started here: {max_depth} levels below the outermost run is the limit"
        )
    context = AgentContext(system_prompt, identity=identity)
    check_arguments(context, config)
    for meter in () if parent is None else parent.spending.meters:
        meter.budget.check_model(config.model_ref)
    child = ChildRun(
        ctx=ctx,
        prompts=prompts,
        context=context,
        config=config,
        signal=ctx.signal,
        deps=ctx.deps if deps is INHERIT else deps,
    )
    effects = DIRECT if parent is None else parent.effects
    # In its own task, so that its cancellations are separate from those of the parent.
    task = asyncio.get_running_loop().create_task(_held(effects.run_child(child)))
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()  # and wait for it, as long as the run waits for the call
    try:
        outcome = task.result()
    except RunLogError as error:
        ctx.failure_below = error
        raise
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


async def _held(child: Awaitable[RunResult]) -> RunResult | BaseException:
    """The child's result, or its KeyboardInterrupt or SystemExit, which the parent raises: raised
    from a task it would stop the event loop, with the runs above still open.
    """
    try:
        return await child
    except (KeyboardInterrupt, SystemExit) as stop:
        return stop


def _child_identity(parent: Run | None, config: LoopConfig) -> RunIdentity:
    if parent is None:
        return RunIdentity.child_of(RunIdentity.root(config.clock.new_id()), config.clock.new_id())
    return RunIdentity.child_of(parent.identify(), parent.clock.new_id())


def _forward(
    ctx: ToolContext, identity: RunIdentity | None, parent: Run | None
) -> EventSink | None:
    """Where the child's events go: into the parent's stream, if a listener there wants them."""
    if parent is None or identity is None or not parent.emitter.listeners(ChildRunEvent):
        return None

    async def forward(event: AgentEvent) -> None:
        if ctx.is_settled:  # left behind: its call is over
            return
        if not isinstance(event, ChildRunEvent):  # otherwise it is from further down
            event = ChildRunEvent(identity, ctx.tool_call_id, event)
        await parent.emitter.emit(event)

    return forward


def agent_tool(
    name: str,
    description: str,
    config: LoopConfig,
    *,
    system_prompt: SystemPrompt[Any] = "",
    max_depth: int = _MAX_DEPTH,
    timeout: float | None = None,
    deps: Any = INHERIT,
    check_deps: Callable[[Any], None] | None = None,
) -> AgentTool:
    """A tool that gives a task to an agent and returns its last text.

    If the child runs out of turns or budget, the result is its last text so far, and says so; if it
    fails or is stopped, an error with that text, except that a run log that cannot be written ends
    the run above too. If the child has a `finish_tool`, that answer is the result. A run more than
    ``max_depth`` levels below the outermost one is rejected.
    """
    check_tool_name(name, "agent_tool")
    if not isinstance(config, LoopConfig):
        raise ConfigError(f"agent_tool needs a LoopConfig, not {type(config).__name__}")
    if not isinstance(description, str):
        raise ConfigError(f"agent_tool: description must be a text, not {description!r}")
    check_system_prompt(system_prompt, "agent_tool")
    depth: Any = max_depth
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ConfigError(f"agent_tool: max_depth must be at least 0, not {max_depth!r}")

    async def ask(task: str, ctx: ToolContext) -> ToolResult:
        """Give a task to an agent.

        Args:
            task: What to do, with all that is needed to do it. Nothing else is known there.
        """
        given = ctx.deps if deps is INHERIT else deps
        if check_deps is not None:
            check_deps(given)
        try:
            prompt = await resolve_system_prompt(
                system_prompt, RunContext(given, ctx.identity), ctx.signal, config.hook_timeout
            )
            result = await run_child(
                ctx, task, config, system_prompt=prompt, max_depth=max_depth, deps=given
            )
        except RunLogError:  # a run that cannot be recorded must end, and so must those above
            raise
        except LoopError as error:
            return _failed(error, ctx.signal)
        return _answer(result)

    made = FunctionTool(ask, name=name, description=description)
    made.timeout = timeout
    made.runs_agent = True
    return made


def _answer(result: RunResult) -> ToolResult:
    details = _details(str(result.outcome), result.tree_usage)
    if result.output is not None and result.outcome.is_complete:
        return ToolResult(tool_result(result.output).content, details=details)
    text = _last_words(result.messages)
    if result.outcome.is_complete:
        return ToolResult.text(text or "The agent ended without a word.", details=details)
    what = "turns" if result.outcome is LoopOutcome.HIT_MAX_ITERATIONS else str(result.limit)
    return ToolResult.text(_so_far(f"The agent ran out of {what}.", text), details=details)


def _failed(error: LoopError, signal: CancellationToken) -> ToolResult:
    text = _last_words(error.messages)
    if error.partial is not None:
        text = error.partial.plain_text or text
    if isinstance(error, RunAborted) and signal.cancelled:
        reason = signal.reason or "aborted"
        details = {**_details("stopped", error.tree_usage), "reason": reason}
        what = _STOPPED.get(reason, "The agent was stopped.")
    else:
        details = _details("failed", error.tree_usage)
        what = f"The agent did not end well: {error}."
    return ToolResult.error(_so_far(what, text), details=details)


_STOPPED = {
    "timeout": "The agent took too long and was stopped.",
    "steered": "The agent was stopped because the user intervened.",
    "sibling": "The agent was stopped because another call of the same batch failed.",
    "out_of_time": "The agent was stopped because the time for the run is over.",
}


def _so_far(what: str, text: str) -> str:
    return f"{what} So far it had said:\n{text}" if text else f"{what} It had said nothing yet."


def _last_words(messages: Iterable[AgentMessage]) -> str:
    texts = [m.plain_text for m in messages if isinstance(m, AssistantMessage)]
    return next((text for text in reversed(texts) if text.strip()), "")


def _details(outcome: str, usage: Usage) -> dict[str, Any]:
    return {"kind": "sub_agent", "outcome": outcome, "usage": to_builtins(usage)}
