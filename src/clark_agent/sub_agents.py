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
from msgspec.structs import replace

from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.effects import DIRECT
from clark_agent.engine.arguments import check_arguments, prompt_messages
from clark_agent.engine.loop import start
from clark_agent.engine.resumption import EarlierChild, Resumption
from clark_agent.engine.run import Run
from clark_agent.engine.suspension import ChildSuspended
from clark_agent.errors import (
    ConfigError,
    DecodeError,
    LoopError,
    RunAborted,
    RunLetGo,
    RunLogError,
    RunStoreError,
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

__all__ = ["ChildRun", "agent_tool", "child_answer", "child_failure", "run_child"]

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
    number: int = 0
    """How many runs the call has started before."""
    resumption: Resumption | None = None
    """Where to continue, if another process has started it."""

    @property
    def tool_call_id(self) -> str:
        """The call that starts it."""
        return self.ctx.tool_call_id

    def start(self) -> Awaitable[RunResult]:
        """Run it."""
        parent, ctx = cast("Run | None", self.ctx.run), self.ctx
        return start(
            self.prompts,
            self.context,
            self.config,
            self.signal,
            sink=_forward(self.ctx, self.context.identity, parent),
            parent=parent,
            call_id=self.tool_call_id,
            call_place=(ctx.turn, ctx.position, self.number),
            resumption=self.resumption,
            deps=self.deps,
            can_wait=_can_wait(self, parent),
        )


def _can_wait(child: ChildRun, parent: Run | None) -> bool:
    """Whether the call can come back to the child: its tool is called again when the run is
    resumed, and the logs of both are in one store.
    """
    if parent is None:
        return True
    tool, own = parent.registry.find(child.ctx.tool_name), child.config.run_log
    is_called_again = tool is not None and (tool.runs_agent or tool.idempotent)
    in_one_store = own is None or getattr(own, "store", own) is getattr(
        parent.journals, "store", None
    )
    return parent.can_wait and is_called_again and in_one_store


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
    number, ctx.children = ctx.children, ctx.children + 1
    earlier: EarlierChild | None = None
    if parent is not None and parent.lineage.resumption is not None:
        prompts = prompt_messages(prompts, config)  # an iterator can be read only once
        earlier = _earlier(parent.lineage.resumption, ctx, prompts, config, number)
    match None if earlier is None else earlier.ended:
        case RunResult() as result:
            return result
        case LoopError() as error:
            raise error
        case _:
            pass
    identity = _child_identity(parent, config) if earlier is None else earlier.identity
    if identity.depth > max_depth:
        raise ToolExecutionError(
            f"no agent may be started here: {max_depth} levels below the outermost run is the limit"
        )
    context = AgentContext(system_prompt, identity=identity)
    check_arguments(context, config)
    for meter in () if parent is None else parent.spending.meters:
        meter.budget.check_model(config.model_ref)
    resumption: Resumption | None = None
    if earlier is not None and earlier.resume is not None:
        try:
            context, resumption = await earlier.resume()
        except (RunStoreError, DecodeError) as error:
            ctx.failure_below = RunLogError(f"the run {identity.run_id!r}: {error}")
            raise ctx.failure_below from error
    child = ChildRun(
        ctx=ctx,
        prompts=prompts if resumption is None else (),
        context=context,
        config=config,
        signal=ctx.signal,
        deps=ctx.deps if deps is INHERIT else deps,
        number=number,
        resumption=resumption,
    )
    effects = DIRECT if parent is None else parent.effects
    # In its own task, so that its cancellations are separate from those of the parent.
    task = asyncio.get_running_loop().create_task(_held(effects.run_child(child)))
    ctx.runs_below.add(task)
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()  # and wait for it, as long as the run waits for the call
    ctx.runs_below.discard(task)
    try:
        outcome = task.result()
    except (RunLogError, RunLetGo) as error:
        ctx.failure_below = error
        raise
    if isinstance(outcome, BaseException):
        raise outcome
    if outcome.outcome is LoopOutcome.SUSPENDED and parent is not None:
        _note_suspended(ctx, identity.run_id, outcome)
        while ctx.runs_below:  # the tool may have started others beside it: the call ends after all
            await asyncio.wait(ctx.runs_below)
        assert ctx.failure_below is not None
        raise ctx.failure_below
    return outcome


def _earlier(
    resumption: Resumption,
    ctx: ToolContext,
    prompts: Iterable[AgentMessage],
    config: LoopConfig,
    number: int,
) -> EarlierChild | None:
    """The child that another process has started here, with the same prompts."""
    earlier = resumption.children.find(config, ctx.turn, ctx.position, number)
    if earlier is None:
        return None
    wanted = [replace(message, timestamp=None) for message in prompts]
    recorded = [replace(message, timestamp=None) for message in earlier.prompts]
    return earlier if wanted == recorded else None


def _note_suspended(ctx: ToolContext, run_id: str, result: RunResult) -> None:
    """Note what to raise through the tool. If it starts several children, the call waits for
    all.
    """
    before = ctx.failure_below
    if isinstance(before, ChildSuspended):  # raised already, if it did not wait for this one
        before.run_ids = (*before.run_ids, run_id)
        before.waiting = (*before.waiting, *result.waiting)
    elif before is None:
        ctx.failure_below = ChildSuspended((run_id,), result.waiting)


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

    If the child is suspended, so is the run above. When that is resumed, the child goes on.

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
        except (RunLogError, RunLetGo):  # those above must end too
            raise
        except LoopError as error:
            return child_failure(error, ctx.signal)
        return child_answer(result)

    made = FunctionTool(ask, name=name, description=description)
    made.timeout = timeout
    made.runs_agent = True
    return made


def child_answer(result: RunResult) -> ToolResult:
    """The result of a call whose child run has ended."""
    details = _details(str(result.outcome), result.tree_usage)
    if result.output is not None and result.outcome.is_complete:
        return ToolResult(tool_result(result.output).content, details=details)
    text = _last_words(result.messages)
    if result.outcome.is_complete:
        return ToolResult.text(text or "The agent ended without a word.", details=details)
    what = "turns" if result.outcome is LoopOutcome.HIT_MAX_ITERATIONS else str(result.limit)
    return ToolResult.text(_so_far(f"The agent ran out of {what}.", text), details=details)


def child_failure(error: LoopError, signal: CancellationToken | None = None) -> ToolResult:
    """The result of a call whose child run has failed, or was stopped with the call."""
    text = _last_words(error.messages)
    if error.partial is not None:
        text = error.partial.plain_text or text
    if isinstance(error, RunAborted) and signal is not None and signal.cancelled:
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
