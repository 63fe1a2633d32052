"""What one run knows while it goes on: its transcript, its open brackets, its listeners.

Whatever ends a run early ends it through `Run.close`, which closes every bracket that is open. For
that to work each step marks what it is about to do before it awaits anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Lock, get_ident
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from clark_agent._finished import FINISHED
from clark_agent._text import message_of, well_formed
from clark_agent.base_tool import ToolContext, ToolResult
from clark_agent.budget import Budget, BudgetLimit, Meter
from clark_agent.cancel_scope import CancelScope
from clark_agent.cancellation import CancellationToken
from clark_agent.clock import Clock
from clark_agent.config import LoopConfig
from clark_agent.emitter import Audience, Emitter
from clark_agent.errors import LoopError, RunAborted
from clark_agent.events import (
    AgentEnd,
    AgentEvent,
    AgentStart,
    EventSink,
    MessageDiscarded,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    RunIdentified,
    ToolExecutionUpdate,
    TurnEnd,
    TurnStart,
)
from clark_agent.intake import accept_chunks, accept_messages, accept_result
from clark_agent.pace import current_pace
from clark_agent.plugin import (
    BeforeToolDecision,
    EarlierCall,
    Hook,
    RestoreContext,
    TransformContext,
    channels_among,
    plugin_name,
)
from clark_agent.protocol import BUDGET_WRAP_UP
from clark_agent.run_log.log import LoggedClock, RunLog, RunWriter
from clark_agent.run_log.pieces import cut
from clark_agent.run_log.records import (
    Answered,
    Purpose,
    Record,
    RunBegan,
    RunResumed,
    RuntimeResult,
    ToolProgress,
)
from clark_agent.run_log.store import RunAppender
from clark_agent.steering import SteeringReceipt, SteerWhen
from clark_agent.stream import MessageAssembler, StreamChunk
from clark_agent.tokens import CachingEstimator
from clark_agent.transcript import MessageLog
from clark_agent.types import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    RunIdentity,
    StopReason,
    SystemMessage,
    ToolResultMessage,
    Usage,
)

__all__ = ["Intervention", "ReplayScript", "Replayed", "Resumption", "Run"]

logger = logging.getLogger(__name__)

_identifying = Lock()


Intervention: TypeAlias = Literal["steered", "out_of_time"]
"""Why something is not begun, or broken off, in a run that goes on."""

_EMPTY = AssistantMessage((), StopReason.OTHER)

# A child has less time to stop than its parent gives it, so that it is not left behind.
_CHILDS_SHARE_OF_GRACE = 0.4


class Resumption(Struct, frozen=True, kw_only=True):
    """Where a run goes on that another process has begun."""

    last: Record
    """The last record of its log."""
    appender: RunAppender | None = None
    """What goes on with its log, if that is taken already."""
    turns: int
    """How many turns have their answer."""
    messages: tuple[AgentMessage, ...] = ()
    """What the run has added before the answer."""
    usage: Usage = Usage()
    children_usage: Usage = Usage()
    below: tuple[str, ...] = ()
    """The runs right below, by their ids."""
    spent: tuple[tuple[int, Usage, str | None], ...] = ()
    """Turns and tokens of this run and of each below it, and of which model."""
    answer: AssistantMessage | None = None
    """The newest answer, if what follows from it is not done."""
    offered: frozenset[str] | None = None
    """The tools that it was offered; None: all."""
    ended: AssistantMessage | None = None
    """The newest answer, if its calls have all their results and nothing came behind them."""
    was_delivered: bool = False
    """Whether a text was taken for the final answer."""
    purposes: tuple[str, ...] = ()
    """Why messages were added that neither the model nor a tool gave."""
    outcomes: tuple[EarlierCall, ...] = ()
    """All calls that have their result."""
    requests: tuple[int, ...] = ()
    """How long the transcript was before each request."""
    worked_ms: int = 0
    """How long other processes have worked on the run."""
    calls: Mapping[int, ToolResult | None] = {}
    """Its calls by position: those with a result, and those (None) that had begun without one."""
    waiting: tuple[tuple[int, AgentMessage, str], ...] = ()
    """What was accepted and never delivered: its number, and when it wants to be."""
    last_number: int = 0


class Replayed(Struct, frozen=True):
    """A child run that is replayed: who it was, and its config with the outside replaced."""

    identity: RunIdentity
    prompts: Sequence[AgentMessage]
    config: LoopConfig
    script: ReplayScript


class ReplayScript(Protocol):
    """What a run is replayed from."""

    run: Run | None
    """The run that is replayed."""

    def child(
        self, tool_call_id: str, prompts: Sequence[AgentMessage], config: LoopConfig
    ) -> Replayed:
        """The run that a call started."""
        ...

    def decision(self, plugin: str, position: int) -> BeforeToolDecision | None:
        """What a plugin that asks outside has decided about a call of the newest answer.

        Raises if the plugin has failed there.
        """
        ...

    def stepped(self, sent: Awaitable[None]) -> Awaitable[None]:
        """The run has emitted an event or is about to ask a hook; await that it may go on."""
        ...

    def answered(self) -> Awaitable[None]:
        """A hook has answered; await that the run may go on."""
        ...

    def by_runtime(self, position: int) -> RuntimeResult | None:
        """Why the result that was recorded for a call of the newest answer was the runtime's."""
        ...

    def why_stopped(self, position: int, why: str) -> str:
        """Why a call was stopped from outside, which has happened now for this reason."""
        ...

    def abort_reason(self, reason: str | None) -> str | None:
        """What whoever cancelled the run said, which has happened now with this reason."""
        ...

    def passed(self) -> None:
        """The run has made a step for which it does not wait."""
        ...


class OpenBatch(Protocol):
    """A tool batch whose calls are not all answered yet."""

    async def settle(self) -> list[ToolResultMessage]:
        """Stop what runs, end every call, and give all results."""
        ...

    def results(self) -> list[ToolResultMessage]:
        """One message per call."""
        ...

    @property
    def is_resolved(self) -> bool:
        """Whether the log may say how every call has ended."""
        ...

    def positions(self) -> tuple[int, ...]:
        """Which calls the results answer, in the order of the results."""
        ...


class Run:
    """The state of one run. Made by `clark_agent.loop`, used by it and by the two modules below."""

    __slots__ = (
        "_announcing",
        "_begun",
        "_call_id",
        "_costs",
        "_details",
        "_discard",
        "_discarded",
        "_ended",
        "_estimated",
        "_estimated_count",
        "_left",
        "_left_follow_ups",
        "_open",
        "_parent",
        "_pending_follow_ups",
        "_placeholder",
        "_purposes",
        "_streaming",
        "_timers",
        "_turn_due",
        "_turn_open",
        "_was_announced",
        "_was_cancelled",
        "batch",
        "break_off",
        "can_intervene",
        "channels",
        "children_usage",
        "chunks",
        "clock",
        "config",
        "emit",
        "emitter",
        "exit",
        "failure",
        "follow_ups",
        "grace",
        "hooks",
        "identity",
        "iterations",
        "last_usage",
        "log",
        "loop",
        "messages",
        "meters",
        "output",
        "pace",
        "pending",
        "registry",
        "replays",
        "resumption",
        "run_log",
        "scope",
        "signal",
        "system_prompt",
        "tells_deltas",
        "tells_progress",
        "thread",
        "told",
        "transcript",
        "turn_message",
        "turn_results",
        "usage",
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
    ) -> None:
        self.scope = CancelScope(signal)
        self.config = config
        self.hooks = config.hooks.for_run()
        self.registry = config.registry
        self.clock: Clock = config.clock
        self.signal = signal
        self.system_prompt = well_formed(context.system_prompt)
        self.identity = context.identity
        self.run_log: RunLog | None = config.run_log
        if self.run_log is None and parent is not None:
            self.run_log = parent.run_log
        self.log: RunWriter | None = None
        if self.run_log is not None:
            self.identify()
            self.clock = LoggedClock(config.clock)
        self._call_id = call_id
        self.resumption: Resumption | None = None
        self.replays: ReplayScript | None = None
        audience = config.audience
        if sink is not None or self.hooks is not config.hooks:
            audience = Audience(config.event_sink, self.hooks.event_observer, sink)
        self.grace = config.cancel_grace
        if parent is not None:
            self.grace = min(self.grace, parent.grace * _CHILDS_SHARE_OF_GRACE)
        self.pace = current_pace()
        """Lets others run."""
        self.pace.begin()
        self.loop = asyncio.get_running_loop()
        eager = self.loop.get_task_factory() is not None
        self.emitter = Emitter(audience, config.hook_timeout, self.grace, eager=eager)
        self.emit: Callable[[AgentEvent], Awaitable[None]] = self.emitter.emit
        """Emits what every run of this kind emits. Deltas, progress and events of child runs, which
        depend on who listens, go to the emitter itself."""
        if isinstance(self.clock, LoggedClock):
            self.emit = _counting(self.emit, self.clock)
        self.tells_deltas = bool(self.emitter.listeners(MessageUpdate))
        """Whether anybody wants to see a message grow."""
        self.tells_progress = bool(self.emitter.listeners(ToolExecutionUpdate))
        self.tells_progress = self.tells_progress or self.run_log is not None
        """Whether anybody wants to know how far a call has come."""
        self._parent = parent

        self.transcript = MessageLog(accept_messages(context.messages))
        """What the model sees, before the transforms."""
        self.messages = MessageLog()
        """What this run has added to it."""
        self.usage = Usage()
        self.children_usage = Usage()
        self.output: Any = None
        """What the call that ended the run was given as its answer."""
        self.last_usage = _last_usage(context.messages)
        self.iterations = 0
        """How many turns have begun."""
        self.pending: list[AgentMessage] = []
        """Messages for the next turn."""
        self._pending_follow_ups = False
        """Whether these are follow-ups."""
        self.follow_ups: list[AgentMessage] = []
        """What follow-up sources have given, before it is decided what becomes of it."""
        self._left: list[SteeringReceipt] = []
        """Of these, what another process has accepted and not delivered."""
        self._left_follow_ups: list[SteeringReceipt] = []
        self.batch: OpenBatch | None = None
        self.chunks: list[StreamChunk] = []
        """What has been streamed of the open answer."""
        self.turn_message: AssistantMessage | None = None
        self.turn_results: list[ToolResultMessage] = []

        self._announcing: Iterator[AgentMessage] = iter(())
        """What is in the transcript and still to be told of."""
        self._open: AgentMessage | None = None
        self._streaming = False
        self._was_announced = True
        self._placeholder = _EMPTY
        self._details: Any = None
        self.failure: tuple[str, str, BaseException | None] | None = None
        """The kind and the text of the failure that the open answer ended with, and what the
        transport raised."""
        self._discard: str | None = None
        self._discarded: AssistantMessage | None = None
        self._begun = False
        self._turn_due = False
        self._turn_open = False
        self._ended = False
        self._was_cancelled = False
        self.scope.noticed = self.note_cancelled
        self.exit: BaseException | None = None
        """What told the interpreter to stop while the run was being closed."""
        self._costs: CachingEstimator | None = None
        self._estimated = 0
        self._estimated_count = 0

        self.break_off: Callable[[], None] | None = None
        """Stops what is in flight, while there is something that can be stopped."""
        self.told: set[Purpose] = set()
        """Why the model was told something that neither it nor a tool has said."""
        self._purposes: dict[int, Purpose] = {}
        """The same for messages that wait, by their identity, where a plugin has said it."""
        self._timers: tuple[asyncio.TimerHandle, ...] = ()
        self.thread = get_ident()
        self.meters: tuple[Meter, ...] = self._meters(() if parent is None else parent.meters)
        if self.meters:
            self._start_timers()
        self.channels = channels_among(self.hooks.plugins)
        for channel in self.channels:
            channel.listen(self._wake)
        self.can_intervene = bool(self.channels or self.meters)
        """Whether anything but a cancellation can reach into the run."""

    # --- the transcript -----------------------------------------------------------------------

    def add(self, messages: Sequence[AgentMessage]) -> Awaitable[None]:
        """Append messages to the transcript; await that all listeners are told."""
        self._append(messages)
        return self._announce()

    def pend(self, follow_ups: list[AgentMessage]) -> None:
        """Put follow-ups before the model with the next turn."""
        self.pending = follow_ups
        self._pending_follow_ups = True
        self._left += self._left_follow_ups
        self._left_follow_ups = []
        for channel in self.channels:
            channel.promoted()

    def add_follow_ups(self, messages: Sequence[AgentMessage]) -> Awaitable[None]:
        """Append what no turn is left to answer."""
        if self.log is not None and messages:
            purposes = ["follow_up"] * len(messages)
            receipts = [*self._left_follow_ups, *self._taken()]
            self.log.added("follow_up", messages, purposes, receipts)
        self._left_follow_ups = []
        for channel in self.channels:
            channel.appended()
        return self.add(messages)

    def say(self, message: AgentMessage, purpose: Purpose) -> Awaitable[None]:
        """Append a message in the loop's own words."""
        if self.log is not None:
            self.log.added("loop", [message], [purpose])
        return self.add([message])

    def add_results(self, batch: OpenBatch) -> Awaitable[None]:
        """Append the results of a batch."""
        results = batch.results()
        if self.log is not None:  # first: if that fails the batch is still open
            self.log.batch_ended(batch.positions(), results)
        self.batch, self.turn_results = None, results
        return self.add(results)

    def _append(self, messages: Sequence[AgentMessage]) -> None:
        self.transcript.extend(messages)
        self.messages.extend(messages)
        self._announcing = iter(messages)

    async def _announce(self) -> None:
        for message in self._announcing:
            self._open = message
            await self.emit(MessageStart(message))
            self._open = None
            await self.emit(MessageEnd(message))

    def replace_transcript(self, messages: Iterable[AgentMessage]) -> None:
        """Go on with another transcript. The messages of the run stay as they are."""
        self.transcript = MessageLog(messages)
        self.last_usage = _last_usage(self.transcript)
        self._estimated = self._estimated_count = 0

    def transform_context(self, iteration: int) -> TransformContext:
        """What transforms and the overflow recovery are told."""
        return TransformContext(
            self.signal,
            self.config.model_id or "",
            iteration,
            self.last_usage,
            self._estimator,
            self._estimated_tokens(),
            self.registry,
        )

    @property
    def _estimator(self) -> CachingEstimator:
        """The config's, for this run; made when somebody asks."""
        if self._costs is None:
            self._costs = CachingEstimator(self.config.token_estimator)
        return self._costs

    def _estimated_tokens(self) -> int:
        """What the transcript costs by the estimator, each message counted once."""
        estimate = self._estimator.estimate_message
        for index in range(self._estimated_count, len(self.transcript)):
            self._estimated += estimate(self.transcript[index])
        self._estimated_count = len(self.transcript)
        return self._estimated

    # --- the log --------------------------------------------------------------------------------

    def _open_log(self, run_log: RunLog, prompts: Sequence[AgentMessage]) -> None:
        identity, clock = self.identify(), self.clock
        assert isinstance(clock, LoggedClock)
        if (resumption := self.resumption) is not None:
            self.log = run_log.go_on(identity.run_id, clock, resumption.last, resumption.appender)
            self._take_over_steering(self.log, resumption)
            self.log.write(RunResumed(resumption.turns, resumption.below))
            for channel in self.channels:
                channel.watch(self._accepted)
                for receipt in channel.waiting():
                    self.log.accepted(receipt)
            return
        self.log = run_log.begin(identity.run_id, clock)
        for channel in self.channels:
            channel.watch(self._accepted)
        self.log.write(
            RunBegan(
                identity=identity,
                system_prompt=self.system_prompt,
                history=tuple(self.transcript),
                prompts=tuple(prompts),
                model_id=self.config.model_id,
                tools={
                    tool.name: {"description": tool.description, "parameters": tool.parameters}
                    for tool in self.registry.schemas
                },
                plugins=tuple([plugin_name(plugin) for plugin in self.hooks.plugins]),
                tool_call_id=self._call_id,
                host_notes={} if identity.depth else run_log.notes,
            )
        )
        for channel in self.channels:
            for receipt in channel.waiting():
                self.log.accepted(receipt)

    def _take_over_steering(self, log: RunWriter, resumption: Resumption) -> None:
        """What was accepted and not delivered waits as if it had been sent to this process."""
        receipts: dict[int, SteeringReceipt] = {}
        for number, message, when in resumption.waiting:
            is_follow_up = when == "follow_up"
            urgency = SteerWhen.AFTER_BATCH if is_follow_up else SteerWhen(when)
            receipt = receipts[number] = SteeringReceipt(message, urgency)
            receipt.is_follow_up = is_follow_up
            (self._left_follow_ups if is_follow_up else self._left).append(receipt)
        self.pending += [receipt.message for receipt in self._left]
        self.follow_ups += [receipt.message for receipt in self._left_follow_ups]
        self.can_intervene = self.can_intervene or bool(self._left)
        log.go_on_with(receipts, resumption.last_number)

    def restore(self, resumption: Resumption) -> None:
        """Take up what another process has left."""
        self.iterations = resumption.turns
        self.usage = resumption.usage
        self.children_usage = resumption.children_usage
        for meter in self.meters:
            meter.restore_time(resumption.worked_ms)
            for turns, usage, model_id in resumption.spent:
                meter.take_over(turns, usage, model_id)
        if self.replays is None:
            self._start_timers()
        self.told.update(resumption.purposes)
        self.hooks.restore(
            RestoreContext(
                turns=resumption.turns - (resumption.answer is not None),
                messages=resumption.messages,
                calls=resumption.outcomes,
                purposes=resumption.purposes,
                requests=[self.transcript.first(length) for length in resumption.requests],
                estimator=self._estimator,
                tools=self.registry,
            )
        )

    def tell_again(self, message: AssistantMessage) -> Awaitable[None]:
        """The answer that another process got. It is in the log already."""
        self.turn_message = message
        if message.usage is not None:
            self.last_usage = message.usage
        return self.add([message])

    def _accepted(self, receipt: SteeringReceipt) -> None:
        """Somebody has sent a message. Called on any thread."""
        if self.log is not None:
            # A signal handler may steer, in the middle of a record.
            if get_ident() == self.thread and not self.log.is_writing:
                self.log.heard(receipt)
                return
            try:
                self.loop.call_soon_threadsafe(self.log.heard, receipt)
            except RuntimeError:
                logger.debug("steered after the event loop of the run was closed")

    def collect(
        self, source: Hook, messages: Sequence[AgentMessage], into: list[AgentMessage]
    ) -> None:
        """Take the messages of a source of steering or follow-ups."""
        into.extend(messages)
        if source.purpose is not None:
            self._purposes.update([(id(message), source.purpose) for message in messages])

    def _purpose(self, message: AgentMessage) -> Purpose:
        """Why a message comes with a turn."""
        usual = "follow_up" if self._pending_follow_ups else "steering"
        return self._purposes.pop(id(message), usual)

    def note_taken(self) -> None:
        """Have the log say what was sent before it was taken."""
        if self.log is not None:
            for receipt in self._taken():
                self.log.heard(receipt)

    def _taken(self) -> list[SteeringReceipt]:
        return [receipt for channel in self.channels for receipt in channel.taken]

    def _log_answer(
        self, log: RunWriter, message: AssistantMessage, discarded: str | None = None
    ) -> None:
        failure, self.failure = self.failure, None
        kind, text, raised = failure or (None, None, None)
        # The record that a tool is about to run follows at once, and takes this one along.
        follows = bool(message.tool_calls) and discarded is None
        log.write(
            Answered(
                message=message,
                start=self._placeholder
                if self._was_announced and self._placeholder != _EMPTY
                else None,
                pieces=cut(self.chunks, message) if self._was_announced else None,
                details=self._details,
                discarded=discarded,
                error=kind,
                error_text=text,
                raised=None if raised is None else (type(raised).__name__, message_of(raised)),
            ),
            hand_on=not follows or bool(self.hooks.before_tool_call),
        )

    def replay_from(self, script: ReplayScript) -> None:
        """Have all that comes from outside come from a script."""
        emit = self.emit

        def emit_and_step(event: AgentEvent) -> Awaitable[None]:
            return script.stepped(emit(event))

        self.replays, self.emit, script.run = script, emit_and_step, self
        self.stop_timers()

    def asks(self) -> Awaitable[None]:
        """A hook is about to be asked."""
        if not isinstance(self.clock, LoggedClock):
            return FINISHED
        self.clock.asked += 1
        return FINISHED if self.replays is None else self.replays.stepped(FINISHED)

    def has_asked(self) -> Awaitable[None]:
        """The hook has answered."""
        if not isinstance(self.clock, LoggedClock):
            return FINISHED
        self.clock.asked += 1
        return FINISHED if self.replays is None else self.replays.answered()

    def passes(self) -> None:
        """A decision was made that depends on what others have done."""
        if isinstance(self.clock, LoggedClock):
            self.clock.asked += 1
            if self.replays is not None:
                self.replays.passed()

    @property
    def steps_since_record(self) -> int:
        """How many steps it has made since the newest record."""
        return self.clock.steps if isinstance(self.clock, LoggedClock) else 0

    @property
    def events_since_record(self) -> int:
        """How many of these were events."""
        return self.clock.events if isinstance(self.clock, LoggedClock) else 0

    def note_cancelled(self) -> None:
        """Have the log say where the run was cancelled."""
        if self.log is None or self.log.is_closing or self._was_cancelled:
            return
        self._was_cancelled = True
        self._note_interrupt("cancelled")

    def _note_interrupt(self, why: Literal["cancelled", "out_of_time"]) -> None:
        if isinstance(self.clock, LoggedClock):
            self.clock.interrupts.append((self.clock.steps, why))

    # --- limits ---------------------------------------------------------------------------------

    def at_cap(self) -> bool:
        """Whether no turn is left."""
        cap = self.config.max_iterations
        if cap is not None and self.iterations >= cap:
            return True
        return bool(self.meters) and self.limit is not None

    @property
    def limit(self) -> BudgetLimit | None:
        """What has run out."""
        for meter in self.meters:
            if (limit := meter.reached()) is not None:
                return limit
        return None

    def _warning(self) -> list[AgentMessage]:
        """A word to the model, once, when something is about to run out."""
        if "budget" in self.told:
            return []
        for meter in self.meters:
            limit = meter.nearly_reached()
            if limit is not None:
                text = meter.budget.message or BUDGET_WRAP_UP[limit]
                return [SystemMessage(text, self.clock.now_ms())]
        return []

    def _meters(self, inherited: tuple[Meter, ...]) -> tuple[Meter, ...]:
        """Those of the parent, and one of its own unless the budget is the same.

        The children of the outermost run also keep the deadline of its identity.
        """
        budget, meters = self.config.budget, inherited
        if budget is not None and all(meter.budget is not budget for meter in inherited):
            meters = (Meter(budget, self.clock), *inherited)
        if self._parent is not None and self._parent._parent is None:
            deadline = None if self.identity is None else self.identity.deadline_unix_ms
            if deadline is not None:
                clock = self._parent.clock
                seconds = max(0, deadline - clock.now_ms()) / 1000
                meters = (*meters, Meter(Budget(seconds=seconds), clock))
        return meters

    def _start_timers(self) -> None:
        self.stop_timers()
        timers: list[asyncio.TimerHandle] = []
        for meter in self.meters:
            left = meter.seconds_left()
            if left is not None:
                timers.append(self.loop.call_later(left, self._out_of_time, meter))
        self._timers = tuple(timers)

    def count_below(self, spent: Iterable[tuple[int, Usage, str | None]]) -> None:
        """Count what runs below have cost that are not replayed: turns, tokens, and the model."""
        for turns, usage, model_id in spent:
            above: Run | None = self
            while above is not None:
                above.children_usage += usage
                above = above._parent
            for meter in self.meters:
                meter.take_over(turns, usage, model_id)

    def stop_timers(self) -> None:
        """In a replay time runs out when the log says so."""
        for timer in self._timers:
            timer.cancel()

    def run_out_of_time(self) -> None:
        """The time is over, as it was in the run that is replayed."""
        for meter in self.meters:
            if meter.budget.seconds is not None:
                self._out_of_time(meter)

    def _out_of_time(self, meter: Meter) -> None:
        self._note_interrupt("out_of_time")
        meter.is_out_of_time = True
        self._intervene()

    def spend(self, message: AssistantMessage) -> None:
        """Count the tokens of an answer, here and in the runs above; estimated for the budget."""
        usage = message.usage
        if usage is not None:
            self.usage += usage
            above = self._parent
            while above is not None:
                above.children_usage += usage
                above = above._parent
        if self.meters:
            if usage is None:
                if not message.content:
                    return
                output = self._estimator.estimate_message(message)
                usage = Usage(self._estimated_tokens(), output)
            for meter in self.meters:
                meter.spend(usage, self.config.model_id)

    # --- intervening ----------------------------------------------------------------------------

    def intervention(self, when: SteerWhen) -> Intervention | None:
        """Why nothing more should be begun (before the next tool), or go on (now)."""
        if not self.can_intervene:
            return None
        for channel in self.channels:
            if channel.urgency in (when, SteerWhen.NOW):
                if self.log is not None:  # what takes effect was accepted before
                    for receipt in channel.waiting():
                        self.log.heard(receipt)
                return "steered"
        for receipt in self._left:
            if receipt.when in (when, SteerWhen.NOW):
                return "steered"
        if any(meter.is_out_of_time for meter in self.meters):
            return "out_of_time"
        return None

    def _wake(self) -> None:
        """Something urgent waits. Called on any thread."""
        try:
            self.loop.call_soon_threadsafe(self._intervene)
        except RuntimeError:  # the loop has closed in the meantime
            logger.debug("steered after the event loop of the run was closed")

    def _intervene(self) -> None:
        if self.break_off is not None and self.intervention(SteerWhen.NOW) is not None:
            self.break_off()

    def leave(self) -> tuple[AgentMessage, ...]:
        """Listen to nobody any more; what was accepted and never delivered."""
        self.stop_timers()
        left = [*self.pending, *self.follow_ups]
        for channel in self.channels:
            left += channel.close()
        return tuple(left)

    # --- what tools reach -----------------------------------------------------------------------

    async def report(self, ctx: ToolContext, partial: ToolResult) -> None:
        """Tell listeners how far a call has come. A tool may do so without ever waiting."""
        partial = accept_result(partial, f"ctx.update of the tool {ctx.tool_name!r}")
        if self.log is not None:
            self.log.write(ToolProgress(position=ctx.position, partial=partial), hand_on=False)
        await self.emitter.emit(ToolExecutionUpdate(ctx.tool_call_id, ctx.tool_name, partial))
        await self.pace.pause_if_due()

    # --- child runs -----------------------------------------------------------------------------

    def identify(self) -> RunIdentity:
        """Who this run is to its children, also when the host has not said."""
        if self.identity is None:
            with _identifying:  # two tools in threads may ask at the same time
                if self.identity is None:
                    self.identity = RunIdentity.root(
                        self.config.clock.new_id(), conversation_id=self.config.conversation_id
                    )
        return self.identity

    @property
    def tree_usage(self) -> Usage:
        """The tokens of this run and of those below it."""
        return self.usage + self.children_usage

    # --- brackets -----------------------------------------------------------------------------

    async def begin(self, prompts: Sequence[AgentMessage]) -> None:
        """Open the run and its first turn."""
        if self.run_log is not None:
            self._open_log(self.run_log, prompts)
            if self.log is not None:
                await self.log.barrier()
        self._append(prompts)
        self._begun = self._turn_due = True
        await self.emit(AgentStart())
        if self.identity is not None:
            await self.emit(RunIdentified(self.identity))
        self._turn_due, self._turn_open = False, True
        await self.emit(TurnStart())
        await self._announce()

    def begin_turn(self) -> Awaitable[None]:
        """Open a turn (the first is open already) and put pending messages first."""
        self.iterations += 1
        self.turn_message = self._discarded = None
        self.turn_results = []
        if self.pending or self.meters:
            for meter in self.meters:
                meter.begin_turn()
            return self._begin_turn_with_messages()
        if self._turn_open:
            return FINISHED
        self._turn_open = True
        return self.emit(TurnStart())

    async def _begin_turn_with_messages(self) -> None:
        if not self._turn_open:
            self._turn_open = True
            await self.emit(TurnStart())
        pending, self.pending = self.pending, []
        warning = self._warning()
        messages = [*pending, *warning]
        purposes = [*map(self._purpose, pending), *["budget" for _ in warning]]
        self.told.update(purposes)
        if self.log is not None and messages:
            self.log.added("turn", messages, purposes, [*self._left, *self._taken()])
        self._pending_follow_ups = False
        self._left = []
        for channel in self.channels:
            channel.delivered(self.iterations)
        await self.add(messages)

    def begin_answer(self, placeholder: AssistantMessage, details: Any = None) -> Awaitable[None]:
        """The model has begun to answer."""
        self._open = self._placeholder = placeholder
        self._streaming = self._was_announced = True
        self._details = details
        self.chunks = []
        return self.emit(MessageStart(placeholder, details))

    def end_answer(self, message: AssistantMessage) -> Awaitable[None]:
        """The model's message is whole and enters the transcript."""
        if not self._streaming:
            return self._unannounced(message, None)
        if self.log is not None:  # first: if that fails the message is still open
            self._log_answer(self.log, message)
        self._open = None
        self._streaming = False
        self.turn_message = message
        self.transcript.append(message)
        self.messages.append(message)
        if message.usage is not None:
            self.last_usage = message.usage
        return self.emit(MessageEnd(message))

    async def discard_answer(self, message: AssistantMessage, reason: str) -> None:
        """The model's message does not enter the transcript."""
        if not self._streaming:
            await self._unannounced(message, reason)
            return
        if self.log is not None:
            self._log_answer(self.log, message, reason)
        self._open = None
        self._streaming = False
        self._discard = reason
        self._discarded = message
        await self.emit(MessageEnd(message))
        self._discard = None
        await self.emit(MessageDiscarded(reason))

    async def _unannounced(self, message: AssistantMessage, discard: str | None) -> None:
        """Make up for a transport that did not announce its message."""
        begun = self.begin_answer(message)
        self._was_announced = False
        await begun
        if discard is None:
            await self.end_answer(message)
        else:
            await self.discard_answer(message, discard)

    def end_turn(self) -> Awaitable[None]:
        """Close the turn."""
        message = self.turn_message or self._discarded
        assert message is not None
        self._turn_open = False
        return self.emit(TurnEnd(message, tuple(self.turn_results)))

    async def end(self) -> None:
        """Close the run."""
        if self._turn_open:  # there was nothing to spend on the first turn
            self._turn_open = False
            await self.emit(TurnEnd(self.unanswered("there is no budget for a turn"), ()))
        self._ended = True
        await self.emit(AgentEnd(self.messages.view()))

    # --- the end of a run that fails ------------------------------------------------------------

    def is_cancelled(self) -> bool:
        """Whether the run was cancelled, by its token or by its task."""
        if not self.scope.is_cancelled():
            return False
        self.note_cancelled()  # whoever asks acts on it
        return True

    @property
    def abort_reason(self) -> str | None:
        """What whoever cancelled the run said."""
        reason = self.signal.reason
        return reason if self.replays is None else self.replays.abort_reason(reason)

    def check_cancelled(self) -> None:
        """Raise if the run was cancelled, also when somebody has swallowed that."""
        if self.scope.is_cancelled():
            self.note_cancelled()
            if self.scope.cancelled_from_outside:
                raise asyncio.CancelledError
            raise RunAborted(self.abort_reason)

    def failed_message(self, error: BaseException) -> AssistantMessage:
        """The assistant message for one that did not come, with what has been streamed of it."""
        if isinstance(error, (RunAborted, asyncio.CancelledError)):
            return self.unanswered("the run was aborted")
        return self.unanswered(message_of(error), StopReason.ERROR)

    def unanswered(
        self, why: str, stop_reason: StopReason = StopReason.ABORTED
    ) -> AssistantMessage:
        """An answer that was broken off, or never begun, with what has been streamed of it."""
        now = self.clock.now_ms()
        if not self._streaming or not isinstance(self._open, AssistantMessage):
            return AssistantMessage((), stop_reason, why, now)
        if not self.chunks:
            told = self._open
            return AssistantMessage(
                told.content, stop_reason, why, now, annotations=told.annotations
            )
        with suppress(TypeError):  # where it stops to make sense, the answer is broken off
            accept_chunks(self.chunks)
        assembler = MessageAssembler(self.clock.new_id)
        for chunk in self.chunks:
            assembler.feed(chunk)
        return assembler.message(stop_reason, error_message=why, timestamp=now)

    async def close(self, error: BaseException) -> AssistantMessage | None:
        """Close whatever is open, in order; return the message that was cut off, if one was.

        A cancellation that arrives meanwhile ends at most the listener that it hits. Once the run
        is cancelled listeners have no more than ``cancel_grace`` for all that is left.
        """
        cut_off: AssistantMessage | None = None
        if not self._begun:
            return None
        if self._turn_due:
            self._turn_due, self._turn_open = False, True
            await self.emit_closing(TurnStart())
        if self._open is not None:
            message = self._open
            if self._streaming:
                message = cut_off = self.failed_message(error)
                self.spend(message)
                self._streaming = False
                self._discard = str(message.stop_reason)
                if self.log is not None:
                    self._log_answer(self.log, message, self._discard)
            self._open = None
            await self.emit_closing(MessageEnd(message))
        if self._discard is not None:
            reason, self._discard = self._discard, None
            await self.emit_closing(MessageDiscarded(reason))
        for message in self._announcing:
            await self.emit_closing(MessageStart(message))
            await self.emit_closing(MessageEnd(message))
        await self._close_turn(error, cut_off)
        if not self._ended:
            self._ended = True
            await self.emit_closing(AgentEnd(self.messages.view()))
        return cut_off

    @property
    def has_unanswered_calls(self) -> bool:
        """Whether the turn's answer asks for tools and no batch has begun to answer it."""
        return (
            self.batch is None
            and self._turn_open
            and self.turn_message is not None
            and bool(self.turn_message.tool_calls)
            and not self.turn_results
        )

    async def _close_turn(self, error: BaseException, cut_off: AssistantMessage | None) -> None:
        if self.batch is not None:
            batch, self.batch = self.batch, None
            self.turn_results = await batch.settle()
            if self.log is not None and batch.is_resolved:
                self.log.batch_ended(batch.positions(), self.turn_results)
            if self.emitter.deadline is not None:  # the tools have had their grace first
                self._limit_listeners()
            for result in self.turn_results:
                self.transcript.append(result)
                self.messages.append(result)
                await self.emit_closing(MessageStart(result))
                await self.emit_closing(MessageEnd(result))
        if self._turn_open:
            self._turn_open = False
            message = self.turn_message or cut_off or self._discarded or self.failed_message(error)
            await self.emit_closing(TurnEnd(message, tuple(self.turn_results)))

    async def emit_closing(self, event: AgentEvent) -> None:
        """Emit an event that closes a bracket, also when the run is cancelled once more."""
        if self.is_cancelled() and self.emitter.deadline is None:
            self._limit_listeners()
        try:
            await self.emit(event)
        except asyncio.CancelledError:
            logger.debug("cancelled again while the run was being closed")
        except (Exception, GeneratorExit):
            raise
        except BaseException as stop:  # the rest is closed all the same
            self.exit = self.exit or stop

    def _limit_listeners(self) -> None:
        """From now on listeners have ``cancel_grace`` together, so that none can hold the run."""
        self.emitter.deadline = self.loop.time() + self.config.cancel_grace

    def carry(self, error: LoopError, partial: AssistantMessage | None = None) -> None:
        """Put on an error what the run had, so that nothing is lost with it."""
        error.messages = tuple(self.messages)
        if self.iterations:
            error.turn = self.iterations
            error.add_note(f"In turn {self.iterations} of the run.")
        error.partial = error.partial or partial or self._discarded
        error.usage = self.usage
        error.tree_usage = self.tree_usage
        error.undelivered = self.leave()


def _counting(
    emit: Callable[[AgentEvent], Awaitable[None]], clock: LoggedClock
) -> Callable[[AgentEvent], Awaitable[None]]:
    """Emit, and count. First: who acts on an event acts behind it."""

    def counted(event: AgentEvent) -> Awaitable[None]:
        clock.events += 1
        return emit(event)

    return counted


def _last_usage(messages: Iterable[AgentMessage]) -> Usage | None:
    for message in reversed(tuple(messages)):
        if isinstance(message, AssistantMessage) and message.usage is not None:
            return message.usage
    return None
