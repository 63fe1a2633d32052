"""The spans of one run: the run, its turns, its model calls and its tool calls.

    invoke_agent name        the run
      turn                   one for each turn
        chat model           one for each call to the model, so a retry has its own
        execute_tool name    one for each tool that ran
          invoke_agent name  a child run

The run's task has the span of the turn as the current one; a model call and a tool have their own.
No attribute is computed for a span that is not sampled. A run without a model has only the spans of
its tools.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context, attach, get_current, set_value
from opentelemetry.trace import (
    INVALID_SPAN,
    Span,
    Status,
    StatusCode,
)

from clark_agent._text import message_of, well_formed
from clark_agent.effects import Effects
from clark_agent.errors import ConfigError, LoopError, RunLetGo, failure_of
from clark_agent.events import (
    AgentEvent,
    ConsultationStart,
    MessageDiscarded,
    NotRun,
    ToolExecutionEnd,
    TurnEnd,
    TurnStart,
)
from clark_agent.otel import conventions as names
from clark_agent.otel._guard import guarded, report
from clark_agent.otel.calls import ModelCall, TracedEffects
from clark_agent.otel.current import InContext
from clark_agent.otel.logs import RUN_KEY
from clark_agent.otel.propagation import carrier_of, links_to, resumed_context
from clark_agent.otel.starting import encodable, start_span
from clark_agent.otel.usage import usage_attributes
from clark_agent.prices import ModelRef, Price, find_price
from clark_agent.result import RunResult
from clark_agent.tracing import RunTrace, TracedRun
from clark_agent.types import Usage

if TYPE_CHECKING:
    from clark_agent.otel.plugin import Tracing

__all__ = ["RunSpans"]


class RunSpans(RunTrace):
    """The trace of one run."""

    observes = (TurnStart, TurnEnd, MessageDiscarded, ToolExecutionEnd, ConsultationStart)

    def __init__(self, tracing: Tracing, run: TracedRun) -> None:
        self.tracing = tracing
        self.run = run
        self.turn = run.turns
        """The number of the turn, from 1."""
        self.run_id = "" if run.identity is None else run.identity.run_id
        self.conversation_id = well_formed(run.conversation_id or "")
        model = run.model
        self.model = model.model_id or model.model
        self.provider = _provider(model)
        self.agent_name = run.agent_name or tracing.agent_name
        self.labels = _labels(self.provider, self.model)
        """The attributes of its model calls in metrics."""
        self._began = perf_counter()
        self._price: Price | None = None
        self._knows_price = False
        self._usage = Usage()
        self._cost: float | None = 0.0
        self._retries = self._discarded = self.attempts = self._calls = 0
        self.model_call: ModelCall | None = None
        """The model call that has not ended."""
        self.asking = ""
        """The plugin that was the last to ask a model."""

        base = resumed_context(get_current(), run.traces)
        base = set_value(RUN_KEY, self, base)
        name = self.agent_name
        self.span: Span = INVALID_SPAN
        self.context: Context = base
        if run.has_model:
            self.span, self.context = start_span(
                tracing.tracer,
                names.INVOKE_AGENT if name is None else f"{names.INVOKE_AGENT} {name}",
                base,
                attributes=self._first_attributes(),
                links=links_to(run.traces),
            )
        self.turn_span: Span = INVALID_SPAN
        self.turn_context = self.context
        """The parent of what happens in the turn."""
        self.carrier = carrier_of(self.context)
        if run.suspended_ms is not None and tracing.metrics is not None:
            tracing.metrics.run_resumed(self._run_labels(), run.suspended_ms / 1000)

    def _first_attributes(self) -> dict[str, Any]:
        run = self.run
        found: dict[str, Any] = {
            names.OPERATION_NAME: names.INVOKE_AGENT,
            names.PROVIDER_NAME: self.provider,
        }
        optional = {
            names.AGENT_NAME: self.agent_name,
            names.REQUEST_MODEL: self.model,
            names.CONVERSATION_ID: self.conversation_id,
        }
        found.update((name, value) for name, value in optional.items() if value)
        if run.is_resumed:
            found[names.RUN_IS_RESUMED] = True
        if run.suspended_ms is not None:
            found[names.RUN_SUSPENDED] = run.suspended_ms / 1000
        return found

    def _run_labels(self) -> dict[str, str]:
        found = {**self.labels, names.OPERATION_NAME: names.INVOKE_AGENT}
        if self.agent_name is not None:
            found[names.AGENT_NAME] = self.agent_name
        return encodable(found)

    # --- what the engine calls ------------------------------------------------------------------

    def effects(self, effects: Effects) -> Effects:
        """The effects, with a span around each."""
        return TracedEffects(effects, self)

    def around(self, work: Coroutine[Any, Any, RunResult]) -> Awaitable[RunResult]:
        """The work of the run, with its span as the current one."""
        return InContext(work, self.context)

    @guarded
    def on_event(self, event: AgentEvent, /) -> None:
        """Open and close turns, and note what happens in them."""
        match event:
            case TurnStart():
                self._start_turn()
            case TurnEnd():
                self._end_turn()
            case MessageDiscarded(reason):
                self._discard(reason)
            case ToolExecutionEnd(not_run=None):
                self._calls += 1
            case ToolExecutionEnd(tool_call_id=call_id, tool_name=name, not_run=NotRun() as found):
                self._did_not_run(found, name, call_id)
            case ConsultationStart(plugin=plugin):
                self.asking = well_formed(plugin)
            case _:
                pass

    @guarded
    def ended(self, result: RunResult) -> None:
        """Close the run."""
        found = {names.RUN_OUTCOME: str(result.outcome), **self._tree_cost(result)}
        self._end(found, None, result.messages)

    @guarded
    def failed(self, error: BaseException) -> None:
        """Close the run, with its error."""
        failure = failure_of(error) or error
        if isinstance(failure, RunLetGo):
            found = {names.RUN_OUTCOME: "let_go", **self._tree_cost(failure)}
            self._end(found, None, failure.messages)
        elif isinstance(failure, LoopError):
            found = {names.RUN_OUTCOME: "failed", **self._tree_cost(failure)}
            self._end(found, failure, failure.messages)
        else:
            self._end({names.RUN_OUTCOME: "failed"}, failure, ())

    # --- turns ----------------------------------------------------------------------------------

    def _start_turn(self) -> None:
        if not self.run_id:
            self.run_id = self.run.identify().run_id
        self.turn += 1
        if self.attempts:  # the turn before it was not closed
            self._end_turn()
        self.attempts = self._calls = 0
        if not self.run.has_model:
            return
        self.turn_span, self.turn_context = start_span(
            self.tracing.tracer,
            names.TURN,
            self.context,
            attributes={names.TURN_NUMBER: self.turn},
        )
        attach(self.turn_context)  # kept by `InContext` until the next turn

    def _end_turn(self) -> None:
        self.leave_model_call()
        span, self.turn_span = self.turn_span, INVALID_SPAN
        if span.is_recording():
            span.set_attributes(
                {names.TURN_ATTEMPTS: self.attempts, names.TURN_TOOL_CALLS: self._calls}
            )
        self.turn_context = self.context
        attach(self.context)
        span.end()

    def _discard(self, reason: str) -> None:
        self.leave_model_call()
        self._discarded += 1
        if self.turn_span.is_recording():
            self.turn_span.add_event(names.ANSWER_DISCARDED, {names.REASON: reason})
        if self.tracing.metrics is not None:
            self.tracing.metrics.discarded(self.labels)

    def _did_not_run(self, found: NotRun, wanted: str, call_id: str) -> None:
        span = self.turn_span
        if not span.is_recording():
            return
        noted = self.call_id(names.TOOL_CALL_ID, call_id)
        noted[names.TOOL_NAME] = found.tool or self.said(wanted, names.UNKNOWN)
        name = names.NOT_RUN.get(found.why, names.TOOL_REJECTED)
        if name == names.TOOL_REJECTED:
            noted[names.REASON] = found.why
        elif name == names.TOOL_SUSPENDED:
            span.set_attribute(names.IS_SUSPENDED, True)
        span.add_event(name, noted)

    def said(self, text: str, instead: str) -> str:
        """A word that may be the model's, so it is content; ``instead``, if that is off."""
        content = self.tracing.content
        return instead if content is None else content.word(text)

    def call_id(self, name: str, call_id: str | None) -> dict[str, str]:
        """The attribute for the id of a call, if content is on: models can choose it."""
        content = self.tracing.content
        return {} if content is None or call_id is None else {name: content.word(call_id)}

    def leave_model_call(self) -> None:
        """End the span of a model call whose transport did not stop, and was left behind."""
        if self.model_call is not None:
            self.model_call.stopped()

    def begin_attempt(self) -> int:
        """Count a call to the model; return its number in the turn."""
        self.attempts += 1
        if self.attempts > 1:
            self._retries += 1
            if self.tracing.metrics is not None:
                self.tracing.metrics.retried(self.labels)
        return self.attempts

    # --- what it costs --------------------------------------------------------------------------

    def labels_of(self, beside: ModelRef) -> dict[str, str]:
        """The attributes of calls to a model that a plugin asks."""
        if not self._is_other(beside):
            return self.labels
        return _labels(_provider(beside), beside.model)

    def _is_other(self, model: ModelRef) -> bool:
        run = self.run.model
        return (model.model, model.provider) != (run.model, run.provider)

    @guarded
    def spend(self, usage: Usage, beside: ModelRef | None = None) -> float | None:
        """Count the tokens of a model call; return their cost, if the price is known. The call may
        be to a model ``beside`` that of the run.
        """
        if beside is not None and self._is_other(beside):
            return self._count(usage, _price(beside, self.run.prices))
        if not self._knows_price:
            self._knows_price = True
            self._price = _price(self.run.model, self.run.prices)
        return self._count(usage, self._price)

    def _count(self, usage: Usage, price: Price | None) -> float | None:
        cost = None if price is None else price.of(usage)
        self._usage += usage
        self._cost = None if cost is None or self._cost is None else self._cost + cost
        return cost

    def _tree_cost(self, end: RunResult | LoopError) -> dict[str, Any]:
        try:
            cost = end.tree_cost
        except Exception:
            report("tree_cost")
            cost = None
        return {} if cost is None else {names.RUN_TREE_COST: cost}

    # --- the end --------------------------------------------------------------------------------

    def _end(self, found: dict[str, Any], error: BaseException | None, messages: Any) -> None:
        if self.turn_span is not INVALID_SPAN:
            self._end_turn()
        if not self.run.has_model:
            return
        span, seconds = self.span, perf_counter() - self._began
        if span.is_recording():
            if self.run_id:
                found |= self._identity()
            if self._usage != Usage():
                found |= usage_attributes(self._usage)
            found |= {
                names.RUN_TURNS: self.turn,
                names.RUN_RETRIES: self._retries,
                names.RUN_DISCARDED: self._discarded,
            }
            if self._cost is not None and self._price is not None:
                found[names.COST] = self._cost
            found |= self.call_id(names.RUN_TOOL_CALL_ID, self.run.tool_call_id)
            span.set_attributes(found)
            if self.tracing.content is not None:
                span.set_attributes(self.tracing.content.of_run(messages))
        if error is not None:
            self.mark_failed(span, type(error).__qualname__, message_of(error))
        if self.tracing.metrics is not None:
            kind = None if error is None else type(error).__qualname__
            self.tracing.metrics.run_ended(self._run_labels(), seconds, kind)
        span.end()

    def _identity(self) -> dict[str, Any]:
        identity = self.run.identify()
        found: dict[str, Any] = {names.RUN_ID: identity.run_id, names.RUN_DEPTH: identity.depth}
        if identity.parent_run_id is not None:
            found[names.RUN_PARENT_ID] = identity.parent_run_id
        return encodable(found)

    def mark_failed(self, span: Span, kind: str, text: str) -> None:
        """Set the error of a span. Its text may have content, and is treated like it."""
        if not span.is_recording():
            return
        content = self.tracing.content
        span.set_attribute(names.ERROR_TYPE, kind)
        span.set_status(Status(StatusCode.ERROR, None if content is None else content.text(text)))


def _labels(provider: str, model: str | None) -> dict[str, str]:
    found = {names.OPERATION_NAME: names.CHAT, names.PROVIDER_NAME: provider}
    return encodable(found if model is None else {**found, names.REQUEST_MODEL: model})


def _provider(model: ModelRef) -> str:
    provider = (model.provider or names.UNKNOWN).lower()
    return names.PROVIDERS.get(provider, provider)


def _price(model: ModelRef, prices: Mapping[str, Price]) -> Price | None:
    try:
        return find_price(model, prices)
    except ConfigError:  # genai-prices is not installed
        return None
