"""The result or the error of a run that has ended, from its log."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from clark_agent import errors
from clark_agent.budget import BudgetLimit
from clark_agent.config import LoopConfig
from clark_agent.errors import LoopError, ModelRetry, RunAborted, StreamError, ToolError
from clark_agent.prices import Bill, ModelUsage
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.run_log.fold import FoldedRun, fold
from clark_agent.run_log.fork import RunUsage, usage_of
from clark_agent.run_log.records import RunEnded, RunFailed, RunSuspended
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog, store_of
from clark_agent.stream import StreamErrorKind
from clark_agent.types import AgentMessage, AssistantMessage
from clark_agent.waiting import WaitingRequest

__all__ = [
    "end_of",
    "ended_calls",
    "last_text",
    "output_from",
    "recorded_end",
    "recorded_failure",
    "recorded_result",
    "suspended_result",
]


def recorded_end(
    store: RunStore | RunLog, run_id: str, config: LoopConfig
) -> tuple[tuple[AgentMessage, ...], RunResult | LoopError | None]:
    """Return the messages before a run, and its result or its error if it has ended."""
    store = store_of(store)
    folded = fold(store.load(run_id))
    return folded.began.history, end_of(store, folded, config)


def end_of(store: RunStore, folded: FoldedRun, config: LoopConfig) -> RunResult | LoopError | None:
    """Return the result or the error of a run; None if it has not ended."""
    if isinstance(folded.ending, RunEnded):
        spent = usage_of(store, folded.began.identity.run_id)
        return recorded_result(folded, spent, config)
    return recorded_failure(folded) if isinstance(folded.ending, RunFailed) else None


def recorded_result(folded: FoldedRun, spent: RunUsage, config: LoopConfig) -> RunResult:
    """Return the result of a run that has ended. Output validators are not called again."""
    ending = folded.ending
    assert isinstance(ending, RunEnded)
    return RunResult(
        messages=tuple(folded.messages),
        outcome=LoopOutcome(ending.outcome),
        usage=ending.usage,
        output=output_from(config, ended_calls(folded), last_text(folded.messages)),
        limit=None if ending.limit is None else BudgetLimit(ending.limit),
        tree_usage=ending.tree_usage,
        bill=_bill(spent, config),
    )


def suspended_result(
    folded: FoldedRun, spent: RunUsage, config: LoopConfig, waiting: tuple[WaitingRequest, ...]
) -> RunResult:
    """Return the result of a run that still waits."""
    ending = folded.ending
    assert isinstance(ending, RunSuspended)
    return RunResult(
        messages=tuple(folded.messages),
        outcome=LoopOutcome.SUSPENDED,
        usage=ending.usage,
        tree_usage=ending.tree_usage,
        bill=_bill(spent, config),
        waiting=waiting,
    )


def recorded_failure(folded: FoldedRun) -> LoopError:
    """Return the error of a run that has failed. In a log of an earlier version, only an abort has
    its own class.
    """
    ending = folded.ending
    assert isinstance(ending, RunFailed)
    kind: Any = getattr(errors, ending.error, LoopError)
    if ending.error == RunAborted.__name__:
        failure: LoopError = RunAborted(ending.reason)
    elif ending.fields and issubclass(kind, LoopError):
        failure = kind.__new__(kind)
        LoopError.__init__(failure, ending.text)
        vars(failure).update(ending.fields)
        if isinstance(failure, StreamError):
            failure.kind = StreamErrorKind(failure.kind)
    else:
        has_no_fields = vars(kind).keys().isdisjoint(["__init__"]) and issubclass(kind, LoopError)
        failure = kind(ending.text) if has_no_fields else LoopError(ending.text)
    failure.messages = tuple(folded.messages)
    failure.partial = ending.partial
    failure.usage, failure.tree_usage = ending.usage, ending.tree_usage
    failure.undelivered = ending.undelivered
    failure.turn = folded.turns or None
    return failure


def _bill(spent: RunUsage, config: LoopConfig) -> Bill:
    below = [usage for child in spent.children for usage in _usages(child)]
    prices = {} if config.budget is None else dict(config.budget.prices)
    return Bill(spent.by_model, tuple(below), prices)


def _usages(spent: RunUsage) -> list[ModelUsage]:
    return [*spent.by_model, *[usage for child in spent.children for usage in _usages(child)]]


def ended_calls(folded: FoldedRun) -> list[tuple[str, Any]]:
    """Return the calls of the batch that ended the run, the last one first: tools and arguments."""
    if folded.ended is None:
        return []
    return [
        (folded.names.get(position, call.name), folded.arguments.get(position, call.arguments))
        for position, call in reversed(list(enumerate(folded.ended.tool_calls)))
    ]


def output_from(config: LoopConfig, calls: Iterable[tuple[str, Any]], text: str | None) -> Any:
    """Return the output again, from the call or the last text that gave it."""
    for name, arguments in calls:
        tool = config.registry.find(name)
        if tool is not None and tool.is_final_answer:
            args = tool.prepare_arguments(arguments)
            with suppress(ToolError):
                accepted = tool.validate(args)
                return tool.output(args if accepted is None else accepted)
    if config.output is None:
        return None
    if text is None:
        return ""
    with suppress(ModelRetry):
        return config.output.parse(text, config.output_mode)
    return text if config.output.is_text else None


def last_text(messages: Iterable[AgentMessage]) -> str | None:
    """Return what the model has said last; None if it has said nothing."""
    said = [message for message in messages if isinstance(message, AssistantMessage)]
    return said[-1].plain_text if said else None
