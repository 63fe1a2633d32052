"""Continues a run that another process has started and not ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.engine.loop import start
from clark_agent.engine.resumption import (
    NEW_TURN,
    AfterAnswer,
    AfterBatch,
    FinalAnswer,
    Resumption,
    Where,
)
from clark_agent.engine.spending import RunCost
from clark_agent.errors import ConfigError, DecodeError, InvalidContinuationError, failure_of
from clark_agent.events import EventSink
from clark_agent.result import RunResult
from clark_agent.run_log.fold import FoldedRun, fold
from clark_agent.run_log.fork import RunUsage, usage_tree
from clark_agent.run_log.records import RunEnded, SteeringAccepted
from clark_agent.run_log.store import RunAppender, RunStore
from clark_agent.run_log.writer import Continuation, RunLog, store_of
from clark_agent.steering import SteeringReceipt, SteerWhen
from clark_agent.types import AgentContext, AgentMessage

__all__ = ["resume"]

logger = logging.getLogger(__name__)


async def resume(
    store: RunStore | RunLog,
    run_id: str,
    config: LoopConfig,
    signal: CancellationToken | None = None,
    *,
    sink: EventSink | None = None,
    trust_log: bool = False,
    deps: Any = None,
) -> RunResult:
    """Continue a run where its log ends, and run it to its end.

    Calls with a result are not run again. A call that had started and has no result gets a result
    that says so, unless its tool is ``idempotent``: then it is run again. Calls that had not
    started are run. Messages that were accepted and not delivered are delivered. The log is
    continued.

    The config decides where and how the run continues: model, tools, plugins and limits come from
    it, never from the log; ``deps`` are not in the log either. The conversation (system prompt,
    history, answers with their calls, results) and the identity of the run come from the log. So
    anyone who can write the log can add text to the run; but calls that have not started still pass
    the plugins of the config.

    If the notes in the log (`RunLog.notes`: a folder, a model, …) differ from those of the config,
    the run is rejected unless ``trust_log`` is set. Otherwise a config made from manipulated notes
    would work in a place where the run never was.

    The result has all messages of the run, including the earlier ones; so has the error that ends
    it. Raises `clark_agent.errors.RunBusy` if another process, thread or task continues the run,
    `clark_agent.errors.LogDamaged` for a damaged log, `clark_agent.errors.DecodeError` for the log
    of another run, `InvalidContinuationError` for a run that has ended, and `ConfigError` if the
    config lacks a tool that a pending call needs, or has other notes. In these cases nothing has
    changed.
    """
    store = store_of(store)
    config, run_log = _with_log(config, store)
    loaded = store.load(run_id)
    folded = fold(loaded)
    _check_origin(folded, run_id, run_log, trust_log=trust_log)
    if isinstance(folded.ending, RunEnded):
        raise InvalidContinuationError(
            f"there is nothing to resume: the run {run_id!r} has ended ({folded.ending.outcome})"
        )
    _check_tools(folded, config)
    if loaded.unchecked:
        logger.warning("the log of run %s has no checksums; damage to it is not noticed", run_id)
    # From here on this process alone continues the run, and the log has not changed since it was
    # read.
    appender = store.reopen(run_id, after=folded.last.seq)
    earlier: tuple[AgentMessage, ...] = ()
    try:
        context, resumption = continuation(folded, usage_tree(store, run_id), run_log, appender)
        earlier = resumption.messages
        result = await start(
            (), context, config, signal, sink=sink, resumption=resumption, deps=deps
        )
    except BaseException as error:
        if (failure := failure_of(error)) is not None:
            failure.messages = (*earlier, *failure.messages)
        raise
    finally:
        appender.close()
    return replace(result, messages=(*earlier, *result.messages))


def _with_log(config: LoopConfig, store: RunStore) -> tuple[LoopConfig, RunLog]:
    run_log = config.run_log
    if run_log is None:
        run_log = RunLog(store)
        return config.replace(run_log=run_log), run_log
    if not isinstance(run_log, RunLog) or run_log.store is not store:
        raise ConfigError("run_log of the config must use the store that the run is resumed from")
    return config, run_log


def _check_origin(folded: FoldedRun, run_id: str, run_log: RunLog, *, trust_log: bool) -> None:
    """Reject a log of another run, or with other notes."""
    began = folded.began
    if began.identity.run_id != run_id:
        reason = f"the log of run {run_id!r} belongs to run {began.identity.run_id!r}"
        raise DecodeError(reason, path="record 0")
    notes = {} if began.identity.depth else run_log.notes
    if trust_log or began.host_notes == to_builtins(notes):  # a child run has no notes
        return
    names = sorted({*began.host_notes, *notes})
    differing = [
        f"{name}: {_brief(began.host_notes.get(name))}, the config {_brief(notes.get(name))}"
        for name in names
        if began.host_notes.get(name) != to_builtins(notes.get(name))
    ]
    raise ConfigError(
        f"the notes in the log of run {run_id!r} differ from those of the config; the log has "
        f"{'; '.join(differing)}. Set the right ones with RunLog(store, notes=...), or set "
        "trust_log if only trusted code can change the log"
    )


def _brief(note: object) -> str:
    text = repr(note)
    return text if len(text) <= 300 else f"{text[:300]}…"


def _check_tools(folded: FoldedRun, config: LoopConfig) -> None:
    calls = () if folded.answer is None else folded.answer.tool_calls
    for position, call in enumerate(calls):
        if call.name not in folded.began.tools:
            continue  # the tool did not exist, or came from a tool source
        if folded.calls.get(position) is None and config.registry.find(call.name) is None:
            raise ConfigError(
                f"a call in the log waits for the tool {call.name!r} (record "
                f"{folded.last.seq}), which the config does not have"
            )


def continuation(
    folded: FoldedRun, spent: RunUsage, run_log: RunLog, appender: RunAppender | None = None
) -> tuple[AgentContext, Resumption]:
    """Return the context and the state to continue a run with. Its newest answer is announced
    again, so the context ends before it.
    """
    where = _where(folded)
    is_again = isinstance(where, AfterAnswer)
    waiting = {number: _receipt(sent) for number, sent in folded.waiting.items()}
    after = Continuation(
        folded.last,
        waiting,
        folded.last_number,
        tuple([child.run_id for child in spent.children]),
        folded.sourced,
        appender,
    )
    began = folded.began
    resumption = Resumption(
        where=where,
        journal=partial(run_log.journal, began.identity.run_id, after=after),
        turns=folded.turns,
        messages=tuple(folded.messages[:-1] if is_again else folded.messages),
        cost=(folded.turns, folded.usage, spent.model),
        costs_below=tuple([each for child in spent.children for each in spent_by(child)]),
        purposes=tuple(folded.purposes),
        outcomes=tuple(folded.outcomes),
        requests=tuple(folded.requests),
        worked_ms=folded.worked_ms,
        waiting=tuple(waiting.values()),
        sourced=frozenset(folded.sourced),
    )
    messages = folded.transcript[:-1] if is_again else folded.transcript
    return AgentContext(began.system_prompt, tuple(messages), began.identity), resumption


def _where(folded: FoldedRun) -> Where:
    if folded.was_delivered:
        return FinalAnswer()
    if folded.ended is not None:
        return AfterBatch(folded.ended, folded.calls, folded.arguments)
    answer = folded.answer
    if answer is None or not folded.transcript or folded.transcript[-1] is not answer:
        return NEW_TURN
    offered = frozenset(folded.offered)
    everything = offered.issuperset([*folded.began.tools, *folded.sourced])
    return AfterAnswer(answer, None if everything else offered, folded.calls, folded.arguments)


def _receipt(sent: SteeringAccepted) -> SteeringReceipt:
    is_follow_up = sent.when == "follow_up"
    when = SteerWhen.AFTER_BATCH if is_follow_up else SteerWhen(sent.when)
    receipt = SteeringReceipt(sent.message, when)
    receipt.is_follow_up = is_follow_up
    return receipt


def spent_by(run: RunUsage) -> Iterator[RunCost]:
    """Yield turns, tokens and model of a run and of each run below it."""
    yield run.turns, run.usage, run.model
    for child in run.children:
        yield from spent_by(child)
