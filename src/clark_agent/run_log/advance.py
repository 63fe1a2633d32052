"""One idempotent step for queues and workflow engines: begin a run, resume it, or report it.

An engine that delivers a run id at least once needs nothing else: the log says what has happened,
and its lock lets one process at a time continue it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from clark_agent._text import well_formed
from clark_agent.agent import Agent
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.engine.arguments import prompt_messages
from clark_agent.errors import ConfigError, RunBusy, RunExists, RunLogError, RunNotFound
from clark_agent.events import EventSink
from clark_agent.result import RunResult
from clark_agent.run_log._reading import in_background
from clark_agent.run_log.fold import FoldedRun, fold
from clark_agent.run_log.recorded import end_of
from clark_agent.run_log.records import RunSuspended
from clark_agent.run_log.requests import open_requests
from clark_agent.run_log.resume import config_with_log, resume_folded
from clark_agent.run_log.store import LoadedRun, RunStore
from clark_agent.run_log.writer import RunLog, store_of
from clark_agent.running import Prompts
from clark_agent.types import AgentMessage, RunIdentity

__all__ = ["advance"]

_O = TypeVar("_O")
_D = TypeVar("_D")


async def advance(
    store: RunStore | RunLog,
    run_id: str,
    agent: Agent[_O, _D],
    prompts: Prompts | None = None,
    signal: CancellationToken | None = None,
    *,
    deps: Any = None,
    sink: EventSink | None = None,
    retry_failed: bool = False,
    trust_log: bool = False,
) -> RunResult[_O]:
    """Begin a run with this id; or continue it, if it has begun; or return its result, if it has
    ended. Safe to call twice, in several processes, at once.

    A suspended run goes on if nothing is open any more; otherwise it is returned as it is. If a run
    suspends itself to wait for an event that has come before, it goes on at once. A run that has
    failed raises its error again, or with ``retry_failed`` is resumed. Without ``prompts``
    a run is not begun, only continued.

    Raises `RunBusy` while another process works on the run, `RunExists` if the run was begun with
    other prompts, and `RunNotFound` if there is none and no prompts are given; also what `run` and
    `resume` raise.
    """
    if not isinstance(agent, Agent):
        raise TypeError(f"advance needs an Agent, not {type(agent).__name__}")
    _check_id(run_id)
    run_store = store_of(store)
    config, _ = config_with_log(agent.config, store)
    wanted = None if prompts is None else prompt_messages(prompts, config)
    try:
        loaded, folded = await in_background(run_store, lambda: _read(run_store, run_id))
    except RunNotFound:
        if wanted is None:
            raise
        result = await _begin(agent, config, run_id, wanted, signal, deps, sink)
    else:
        _check_prompts(run_id, folded, wanted)
        ended = await in_background(run_store, lambda: end_of(run_store, folded, config))
        if isinstance(ended, RunResult):
            return ended
        if ended is not None and not retry_failed:
            raise ended
        agent.check_deps(deps)
        # Not read again: it may have ended or failed meanwhile, and then it is busy.
        result = await resume_folded(
            loaded, folded, config, signal, sink=sink, trust_log=trust_log, deps=deps
        )
    while any(request.event is not None for request in result.waiting):
        loaded, folded = await in_background(run_store, lambda: _read(run_store, run_id))
        now_ms = config.clock.now_ms()
        if not isinstance(folded.ending, RunSuspended):
            break  # another process has gone on with it
        if await in_background(run_store, partial(open_requests, run_store, folded, now_ms)):
            break
        try:  # what it waits for was delivered before it asked
            result = await resume_folded(
                loaded, folded, config, signal, sink=sink, trust_log=trust_log, deps=deps
            )
        except RunBusy:
            break
    return result


def _check_id(run_id: object) -> None:
    if not isinstance(run_id, str) or not run_id:
        raise ConfigError(f"advance needs the id of a run, not {run_id!r}")
    if well_formed(run_id) != run_id:
        raise ConfigError(f"the id of a run cannot have half of a character: {run_id!r}")


def _read(store: RunStore, run_id: str) -> tuple[LoadedRun, FoldedRun]:
    loaded = store.load(run_id)
    return loaded, fold(loaded)


async def _begin(
    agent: Agent[Any, Any],
    config: LoopConfig,
    run_id: str,
    prompts: Prompts,
    signal: CancellationToken | None,
    deps: Any,
    sink: EventSink | None,
) -> RunResult:
    identity = RunIdentity.root(run_id, conversation_id=config.conversation_id)
    try:
        return await agent.start(
            prompts, deps=deps, config=config, identity=identity, signal=signal, sink=sink
        )
    except RunLogError as error:
        if isinstance(error.__cause__, RunExists):  # another process was faster
            raise RunBusy(run_id) from error
        raise


def _check_prompts(
    run_id: str, folded: FoldedRun, wanted: tuple[AgentMessage, ...] | Any | None
) -> None:
    """Raise `RunExists` if the run was begun with other prompts."""
    if wanted is None:
        return
    recorded = [replace(message, timestamp=None) for message in folded.began.prompts]
    if [replace(message, timestamp=None) for message in wanted] != recorded:
        raise RunExists(run_id, f"run {run_id!r} already exists, with other prompts")
