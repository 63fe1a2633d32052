"""Run: the parts of one run. Each part owns one thing; this file only puts them together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clark_agent._kept_text import OpenKept
from clark_agent._text import message_of, well_formed
from clark_agent.audience import Audience
from clark_agent.cancellation import CancellationToken
from clark_agent.config import Journals, LoopConfig
from clark_agent.effects import DIRECT, Effects
from clark_agent.engine.answer import OpenAnswer
from clark_agent.engine.brackets import Brackets
from clark_agent.engine.emitter import Emitter
from clark_agent.engine.goal import Goal
from clark_agent.engine.inbox import Inbox
from clark_agent.engine.interrupts import Interrupts
from clark_agent.engine.journal import Emit, Journal
from clark_agent.engine.large_results import find_kept
from clark_agent.engine.lineage import Lineage
from clark_agent.engine.pace import current_pace
from clark_agent.engine.resumption import Resumption
from clark_agent.engine.spending import Spending
from clark_agent.engine.transcript import Transcript
from clark_agent.errors import RunAborted
from clark_agent.events import EventSink, MessageUpdate, ToolExecutionUpdate
from clark_agent.intake import accept_messages, accept_result
from clark_agent.output import NO_OUTPUT
from clark_agent.plugins.base import (
    RestoreContext,
    TransformContext,
    channels_among,
)
from clark_agent.plugins.hooks import observer_hook
from clark_agent.run_context import RunContext
from clark_agent.stream import StreamRequest
from clark_agent.tools.base import ToolContext, ToolResult
from clark_agent.tracing import ALL_RUNS, RunTrace, TracedRun, Tracer, start_trace
from clark_agent.types import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    RunIdentity,
    StopReason,
)
from clark_agent.waiting import WaitingRequest

if TYPE_CHECKING:
    from clark_agent.engine.batch import Batch

__all__ = ["Run"]


class Run:
    """One run.

    | part         | owns                                                               |
    |--------------|--------------------------------------------------------------------|
    | `lineage`    | its identity, and the run above it                                 |
    | `journal`    | what is recorded                                                   |
    | `transcript` | the messages, and what they cost                                   |
    | `spending`   | tokens and budgets                                                 |
    | `inbox`      | messages that wait                                                 |
    | `interrupts` | what interrupts it from outside                                    |
    | `emitter`    | the listeners                                                      |
    | `brackets`   | which events are open                                              |
    | `answer`     | the answer that is being streamed                                  |
    | `effects`    | model calls, tools and child runs                                  |
    | `trace`      | what follows it from outside, if anything does                     |
    """

    __slots__ = (
        "_may_wait",
        "answer",
        "batch",
        "brackets",
        "clock",
        "config",
        "deps",
        "effects",
        "emit",
        "emits_deltas",
        "emitter",
        "goal",
        "grace",
        "hooks",
        "inbox",
        "inherited_effects",
        "interrupts",
        "is_capped",
        "journal",
        "journals",
        "kept",
        "lineage",
        "loop",
        "output",
        "pace",
        "purposes",
        "registry",
        "reports_progress",
        "requested",
        "signal",
        "sourced",
        "spending",
        "system_prompt",
        "trace",
        "tracer",
        "transcript",
        "turns",
        "waiting",
    )

    def __init__(
        self,
        context: AgentContext,
        config: LoopConfig,
        signal: CancellationToken,
        *,
        sink: EventSink | None = None,
        parent: Run | None = None,
        call_id: str | None = None,
        call_place: tuple[int, int, int] | None = None,
        resumption: Resumption | None = None,
        deps: Any = None,
        can_wait: bool = True,
    ) -> None:
        self.config = config
        self.deps = deps
        """What the host gives to tools and hooks. Not recorded."""
        self.hooks = config.hooks.for_run()
        self.kept: dict[str, str] | None = None
        """The digests of the large results that it may read, by id, once there is one."""
        self.registry = config.registry
        """The tools of this turn."""
        self.sourced: object = None
        """The newest tools of the tool source."""
        self.system_prompt = well_formed(config.system_prompt_for(context.system_prompt))
        self.loop = asyncio.get_running_loop()
        self.pace = current_pace()
        """Lets other tasks run."""
        self.pace.begin()
        self.effects: Effects = config.effects or (
            DIRECT if parent is None else parent.inherited_effects
        )
        self.inherited_effects: Effects = self.effects
        """The effects of child runs: without the trace of this one."""

        self.lineage = Lineage(context.identity, config, parent, call_id, resumption, call_place)
        self.grace = self.lineage.grace
        self.journals: Journals | None = config.run_log
        if self.journals is None and parent is not None:
            self.journals = parent.journals
        self.journal = (
            Journal(config.clock)
            if self.journals is None
            else self._journal(self.journals, resumption)
        )
        self.clock = self.journal.clock
        self._may_wait = can_wait
        # Runs may share a token, and a message to one run must not cancel the others.
        self.signal = signal = signal.child() if self.journal.receives else signal

        self.transcript = Transcript(accept_messages(context.messages), config.token_estimator)
        self.spending: Spending = Spending(
            config.budget,
            config.model_ref,
            self.clock,
            self.transcript,
            above=None if parent is None else parent.spending,
            deadline=None if parent is None else self.lineage.deadline(parent),
        )
        self.inbox = Inbox(channels_among(self.hooks.plugins), self.journal)
        self.interrupts = Interrupts(signal, self.inbox, self.spending, self.journal)

        self.tracer: Tracer | None = self.hooks.tracer or (
            ALL_RUNS.tracer if parent is None else parent.tracer
        )
        self.trace: RunTrace | None = None
        if self.tracer is not None and self.journal.is_traced:
            self.trace = self._start_trace(self.tracer, resumption)

        self.emitter = self._emitter(sink)
        self.emit: Emit = self.journal.emitting(self.emitter.emit)
        """Emits the events that do not depend on the listeners. Deltas, progress and events of
        child runs go to the emitter directly."""
        self.emits_deltas = bool(self.emitter.listeners(MessageUpdate))
        """Whether a listener wants deltas."""
        self.reports_progress = self.journal.keeps_progress or bool(
            self.emitter.listeners(ToolExecutionUpdate)
        )
        """Whether a listener, or the journal, wants progress."""
        self.brackets = Brackets(self.emit)
        self.answer = OpenAnswer(self.brackets, self.transcript, self.journal)

        self.requested: tuple[StreamRequest, int] | None = None
        """The newest request, and how long the transcript was then; None if the transcript has
        changed since other than by growing."""
        self.turns = 0
        """How many turns have begun."""
        self.is_capped = config.max_iterations is not None or bool(self.spending.meters)
        """Whether turns or spending are limited."""
        self.batch: Batch | None = None
        """The batch whose results are not in the transcript yet."""
        self.goal = None if config.output is None else Goal(config.output, config.output_mode)
        """The output that the run must return."""
        self.output: Any = NO_OUTPUT
        """The output that it returns."""
        self.waiting: tuple[WaitingRequest, ...] = ()
        """What it waits for, once it is suspended."""
        self.purposes: set[str] = set()
        """Why messages were added that neither the model nor a tool gave."""

    def _journal(self, journals: Journals, resumption: Resumption | None) -> Journal:
        checks_calls = bool(self.hooks.before_tool_call)
        identity, clock = self.lineage.identify(), self.config.clock
        journal: Journal
        if resumption is not None:
            journal = resumption.journal(clock, checks_calls=checks_calls)
        else:
            journal = journals.journal(identity.run_id, clock, checks_calls=checks_calls)
        return journal

    def _emitter(self, sink: EventSink | None) -> Emitter:
        config, audience = self.config, self.config.audience
        publish = self.journal.publish
        if self.trace is not None:
            # First, so that what the others do on an event is in the right span.
            observers = (observer_hook(self.trace), *self.hooks.event_observer)
            audience = Audience(config.event_sink, observers, sink, publish)
        elif sink is not None or publish is not None or self.hooks is not config.hooks:
            audience = Audience(config.event_sink, self.hooks.event_observer, sink, publish)
        eager = self.loop.get_task_factory() is not None
        return Emitter(audience, config.hook_timeout, self.grace, eager=eager)

    def _start_trace(self, tracer: Tracer, resumption: Resumption | None) -> RunTrace | None:
        config, given, clock = self.config, self.lineage.given, self.config.clock
        since = None if resumption is None else resumption.suspended_at
        trace = start_trace(
            tracer,
            TracedRun(
                identity=given,
                identify=self.lineage.identify,
                agent_name=config.agent_name,
                conversation_id=config.conversation_id if given is None else given.conversation_id,
                model=config.model_ref,
                has_model=getattr(config.stream, "is_model", True) is not False,
                prices=self.spending.bill().prices,
                tool_call_id=self.lineage.call_id,
                turns=0 if resumption is None else resumption.turns_before,
                is_resumed=resumption is not None,
                traces=() if resumption is None else resumption.traces,
                suspended_ms=None if since is None else max(0, clock.now_ms() - since),
            ),
        )
        if trace is not None:
            self.effects = trace.effects(self.effects)
        return trace

    # --- for tools ------------------------------------------------------------------------------

    def identify(self) -> RunIdentity:
        """The identity of the run, made if the host has not set one."""
        return self.lineage.identify()

    @property
    def messages(self) -> Sequence[AgentMessage]:
        """The transcript so far."""
        return self.transcript.view()

    async def report(self, ctx: ToolContext, partial: ToolResult) -> None:
        """Send the progress of a call to the listeners. A tool may call this without waiting."""
        partial = accept_result(partial, f"ctx.update of the tool {ctx.tool_name!r}")
        self.journal.tool_progressed(ctx.position, partial)
        await self.emitter.emit(ToolExecutionUpdate(ctx.tool_call_id, ctx.tool_name, partial))
        await self.pace.pause_if_due()

    def find_kept(self, result_id: str) -> tuple[OpenKept, int]:
        """How to open a large result. Raises `ModelRetry` unless the run may."""
        return find_kept(self, result_id)

    # --- what needs several parts ---------------------------------------------------------------

    def at_cap(self) -> bool:
        """Whether no turn is left."""
        cap = self.config.max_iterations
        return (cap is not None and self.turns >= cap) or self.spending.limit is not None

    def replace_transcript(self, messages: Sequence[AgentMessage]) -> None:
        """Continue with another transcript."""
        self.transcript.replace(messages)
        self.requested = None

    def transform_context(self, iteration: int) -> TransformContext:
        """The context of transforms and of the overflow recovery."""
        transcript = self.transcript
        return TransformContext(
            self.signal,
            self.config.model_id or "",
            iteration,
            transcript.last_usage,
            transcript.estimator,
            transcript.tokens(),
            self.registry,
            self.deps,
        )

    @property
    def can_wait(self) -> bool:
        """Whether it may be suspended: it has a log, and so have the runs above."""
        return self._may_wait and self.journal.can_wait

    def continues_agent(self, call_id: str) -> bool:
        """Whether a tool that another process has started can take up the agent that it ran."""
        resumption = self.lineage.resumption
        return resumption is not None and resumption.children.can_continue(call_id)

    def host_context(self) -> RunContext[Any]:
        """What output validators get."""
        return RunContext(self.deps, self.identify(), self.messages)

    def failed_answer(self, error: BaseException) -> AssistantMessage:
        """The message in place of a missing answer, with what was streamed of it."""
        if isinstance(error, (RunAborted, asyncio.CancelledError)):
            return self.answer.so_far("the run was aborted")
        return self.answer.so_far(message_of(error), StopReason.ERROR)

    def restore(self, resumption: Resumption) -> None:
        """Restore the state that other processes have left."""
        self.turns = resumption.turns
        self.purposes.update(resumption.purposes)
        self.interrupts.restored()
        if self.goal is not None:
            self.goal.restore(resumption)
        self.hooks.restore(
            RestoreContext(
                turns=resumption.turns_before,
                messages=resumption.messages,
                calls=resumption.outcomes,
                purposes=resumption.purposes,
                requests=[self.transcript.first(length) for length in resumption.requests],
                estimator=self.transcript.estimator,
                tools=self.registry,
                deps=self.deps,
            )
        )
