"""Continues a run that another process has started and not ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from msgspec import to_builtins

from clark_agent.agent import Agent
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.engine.arguments import check_arguments
from clark_agent.engine.loop import start
from clark_agent.engine.resumption import (
    NEW_TURN,
    AfterAnswer,
    AfterBatch,
    EarlierChild,
    EarlierChildren,
    FinalAnswer,
    Resumption,
    Where,
)
from clark_agent.engine.spending import RunCost
from clark_agent.errors import (
    ConfigError,
    DecodeError,
    InvalidContinuationError,
)
from clark_agent.events import EventSink
from clark_agent.result import RunResult
from clark_agent.run_log._reading import in_background, mailbox_of
from clark_agent.run_log.fold import FoldedRun, fold
from clark_agent.run_log.fork import RunUsage, usage_of
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.recorded import recorded_end, suspended_result
from clark_agent.run_log.records import (
    RunBegan,
    RunEnded,
    RunSuspended,
    SteeringAccepted,
)
from clark_agent.run_log.requests import locked, open_requests, settle_requests
from clark_agent.run_log.store import LoadedRun, RunAppender, RunStore
from clark_agent.run_log.writer import Continuation, RunLog, store_of
from clark_agent.steering import SteeringReceipt, SteerWhen
from clark_agent.types import AgentContext

__all__ = [
    "LoggedChildren",
    "config_with_log",
    "continuation",
    "resume",
    "resume_folded",
    "spent_by",
]

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
"""How many seconds to wait for those who decide about a child run."""


async def resume(
    store: RunStore | RunLog,
    run_id: str,
    config: LoopConfig | Agent[Any, Any],
    signal: CancellationToken | None = None,
    *,
    sink: EventSink | None = None,
    trust_log: bool = False,
    deps: Any = None,
) -> RunResult:
    """Continue a run where its log ends, and run it to its end. ``config`` may be an `Agent`.

    Calls with a result are not run again. A call that had started and has no result gets a result
    that says so, unless its tool is ``idempotent``: then it is run again; or the tool knows what
    has happened (`AgentTool.did_it_happen`). A tool that runs an agent continues that agent's run.
    Calls that had not started are run. Messages that were accepted and not delivered are delivered.
    The log is continued.

    A suspended run goes on when all its requests, and those of its child runs, are decided or
    expired. Before that, nothing happens: the result is ``suspended`` with the same ``waiting``.

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
    if isinstance(config, Agent):
        config.check_deps(deps)
        config = config.config
    check_arguments(AgentContext(), config, signal)
    config, run_log = config_with_log(config, store)
    loaded = await in_background(run_log.store, lambda: run_log.store.load(run_id))
    folded = fold(loaded)
    if isinstance(folded.ending, RunEnded):
        _check_origin(folded, run_id, run_log, trust_log=trust_log)
        raise has_ended(run_id, folded.ending)
    return await resume_folded(
        loaded, folded, config, signal, sink=sink, trust_log=trust_log, deps=deps
    )


def has_ended(run_id: str, ending: RunEnded) -> InvalidContinuationError:
    """The error of a run that cannot be resumed, because it has ended."""
    return InvalidContinuationError(
        f"there is nothing to resume: the run {run_id!r} has ended ({ending.outcome})"
    )


async def resume_folded(
    loaded: LoadedRun,
    folded: FoldedRun,
    config: LoopConfig,
    signal: CancellationToken | None,
    *,
    sink: EventSink | None,
    trust_log: bool,
    deps: Any,
) -> RunResult:
    """Continue a run that was read and has not ended. Raises `RunBusy` if it has changed since."""
    run_id, run_log = loaded.run_id, config.run_log
    assert isinstance(run_log, RunLog)
    store = run_log.store
    _check_origin(folded, run_id, run_log, trust_log=trust_log)
    if loaded.unchecked:
        logger.warning("the log of run %s has no checksums; damage to it is not noticed", run_id)
    # From here on this process alone continues the run, and the log has not changed since it was
    # read.
    appender = store.reopen(run_id, after=folded.last.seq)
    try:
        await appender.barrier()
        now_ms = config.clock.now_ms()
        await settle_requests(store, folded, appender, now_ms)
        waiting = await in_background(store, lambda: open_requests(store, folded, now_ms))
        spent = await in_background(store, lambda: usage_of(store, run_id))
        if waiting and isinstance(folded.ending, RunSuspended):
            return suspended_result(folded, spent, config, waiting)
        _check_tools(folded, config)
        mailbox = await mailbox_of(store, run_id)
        context, resumption = continuation(folded, spent, run_log, appender, mailbox=mailbox)
        return await start((), context, config, signal, sink=sink, resumption=resumption, deps=deps)
    finally:
        appender.close()


def config_with_log(config: LoopConfig, given: RunStore | RunLog) -> tuple[LoopConfig, RunLog]:
    """Return the config with a log in this store."""
    store, run_log = store_of(given), config.run_log
    if run_log is None:
        run_log = given if isinstance(given, RunLog) else RunLog(store)
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
        if (wait := folded.waits.get(position)) is not None and not wait.needs_tool:
            continue
        if folded.calls.get(position) is None and config.registry.find(call.name) is None:
            raise ConfigError(
                f"a call in the log waits for the tool {call.name!r} (record "
                f"{folded.last.seq}), which the config does not have"
            )


def continuation(
    folded: FoldedRun,
    spent: RunUsage,
    run_log: RunLog,
    appender: RunAppender | None = None,
    children: EarlierChildren | None = None,
    *,
    mailbox: Sequence[Mail] | Exception | None = None,
) -> tuple[AgentContext, Resumption]:
    """Return the context and the state to continue a run with. Its newest answer is announced
    again, so the context ends before it.
    """
    folded.drop_placeholders()
    where = _where(folded)
    is_again = isinstance(where, AfterAnswer)
    waiting = {number: receipt_of(sent) for number, sent in folded.waiting.items()}
    after = Continuation(
        folded.last,
        waiting,
        folded.last_number,
        tuple([child.run_id for child in spent.children]),
        folded.sourced,
        appender,
        tuple(folded.consulted),
        frozenset(folded.mails),
        folded.cancelled,
        mailbox,
    )
    began = folded.began
    resumption = Resumption(
        where=where,
        journal=partial(run_log.journal, began.identity.run_id, after=after),
        turns=folded.turns,
        messages=tuple(folded.messages[:-1] if is_again else folded.messages),
        costs=tuple(_own_costs(spent)),
        costs_below=tuple([each for child in spent.children for each in spent_by(child)]),
        purposes=tuple(folded.purposes),
        added_by=frozenset(folded.added_by),
        outcomes=tuple(folded.outcomes),
        requests=tuple(folded.requests),
        worked_ms=folded.worked_ms,
        waiting=tuple(waiting.values()),
        sourced=frozenset(folded.sourced),
        traces=tuple(folded.traces),
        suspended_at=folded.suspended_at,
        children=children or LoggedChildren(run_log, began.identity.run_id),
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
    return AfterAnswer(
        answer,
        None if everything else offered,
        folded.calls,
        folded.arguments,
        folded.waits,
        folded.acted_on,
    )


def receipt_of(sent: SteeringAccepted) -> SteeringReceipt:
    """Return the receipt of a message that was accepted."""
    is_follow_up = sent.when == "follow_up"
    when = SteerWhen.AFTER_BATCH if is_follow_up else SteerWhen(sent.when)
    receipt = SteeringReceipt(sent.message, when, mail=sent.mail)
    receipt.is_follow_up = is_follow_up
    return receipt


class LoggedChildren:
    """The child runs of a run, as their logs have them. They are read when they are needed."""

    def __init__(self, run_log: RunLog, run_id: str) -> None:
        self._run_log = run_log
        self._run_id = run_id
        self._found: dict[int, list[RunBegan]] = {}

    def can_continue(self, tool_call_id: str) -> bool:
        """Return whether no child run of the call lacks its place."""
        return not any(
            began.call_place is None and began.tool_call_id == tool_call_id
            for began in self._children(self._run_log.store)
        )

    def find(
        self, config: LoopConfig, turn: int, position: int, number: int
    ) -> EarlierChild | None:
        """Return the child run of this number, from 0, of the call in that place."""
        run_log = config.run_log if isinstance(config.run_log, RunLog) else self._run_log
        store = run_log.store
        place = (turn, position, number)
        found = [began for began in self._children(store) if began.call_place == place]
        if not found:
            return None
        began = found[-1]
        run_id = began.identity.run_id
        _, ended = recorded_end(store, run_id, config)
        return EarlierChild(
            prompts=began.prompts,
            identity=began.identity,
            ended=ended,
            resume=None if ended is not None else partial(_resumption, run_log, run_id, config),
        )

    def _children(self, store: RunStore) -> list[RunBegan]:
        """Return the beginnings of the child runs, oldest first."""
        found = self._found.get(id(store))
        if found is None:
            summaries = store.runs(parent_run_id=self._run_id)
            entries = [store.load(run.run_id).records[0].entry for run in reversed(summaries)]
            found = [entry for entry in entries if isinstance(entry, RunBegan)]
            self._found[id(store)] = found
        return found


async def _resumption(
    run_log: RunLog, run_id: str, config: LoopConfig
) -> tuple[AgentContext, Resumption]:
    """Lock the log of a child run, and return where to continue it."""
    store = run_log.store
    # Whoever has made the last decision may still hold the log.
    folded, appender = await locked(store, run_id, lambda: fold(store.load(run_id)), _PATIENCE)
    try:
        await settle_requests(store, folded, appender, config.clock.now_ms())
        spent = await in_background(store, lambda: usage_of(store, run_id))
        mailbox = await mailbox_of(store, run_id)
        return continuation(folded, spent, run_log, appender, mailbox=mailbox)
    except BaseException:
        appender.close()
        raise


def _own_costs(run: RunUsage) -> Iterator[RunCost]:
    turns = run.turns
    for part in run.by_model:
        yield turns, part.usage, part.model
        turns = 0  # they count once


def spent_by(run: RunUsage) -> Iterator[RunCost]:
    """Yield turns, tokens and model of a run and of each run below it."""
    yield from _own_costs(run)
    for child in run.children:
        yield from spent_by(child)
