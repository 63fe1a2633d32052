"""What the page does to runs: it steers, cancels and decides, and forks, resumes and replays them.

Runs that are forked or resumed here are tasks of this process. When the server ends, they are let
go: they have not ended, and can be resumed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from msgspec.structs import replace

from clark_agent._text import describe
from clark_agent.cancellation import LET_GO, CancellationToken
from clark_agent.clock import now_ms
from clark_agent.config import LoopConfig
from clark_agent.engine.arguments import check_continuation
from clark_agent.engine.loop import start
from clark_agent.errors import (
    ConfigError,
    DecodeError,
    InvalidContinuationError,
    LoopError,
    RunBusy,
    RunNotFound,
)
from clark_agent.replay import replay
from clark_agent.run_log import cancel, decide, follow_up, resume, steer
from clark_agent.run_log.fold import FoldedRun, fold
from clark_agent.run_log.fork import fork
from clark_agent.run_log.pages import read_page
from clark_agent.run_log.records import RunSuspended
from clark_agent.run_log.requests import open_requests
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog
from clark_agent.types import AgentContext
from clark_agent.view.agents import RunAgents
from clark_agent.view.catalog import FORK_NOTE
from clark_agent.view.comparing import difference_view
from clark_agent.view.parts import Parts
from clark_agent.view.shapes import Cancel, Decide, Done, ForkRun, Replayed, Steer
from clark_agent.waiting import Allow, Decision, Deny, GiveArguments, GiveResult, WaitingRequest

__all__ = ["NO_AGENT", "Actions", "NotPossible"]

logger = logging.getLogger(__name__)

NO_AGENT = (
    "this server has no agent to run: start it with --agent module:name or --model provider:name"
)
_PATIENCE = 10.0
"""For how many seconds to wait until a new run is in its log."""
_POLL = 0.01


class NotPossible(Exception):
    """What is asked for is not possible now. `str` is a sentence."""


class Actions:
    """Acts on the runs of a store."""

    def __init__(self, store: RunStore, agents: RunAgents | None, *, by: str | None) -> None:
        self._store = store
        self._agents = agents
        self._by = by
        self._tasks: dict[asyncio.Task[object], CancellationToken] = {}
        self._running: set[str] = set()

    @property
    def can_run(self) -> bool:
        """Whether there is an agent."""
        return self._agents is not None and self._agents.agent is not None

    async def close(self) -> None:
        """Let the runs of this process go, and wait for that."""
        for token in self._tasks.values():
            token.cancel(LET_GO)
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=_PATIENCE)
        if (aclose := getattr(self._agents, "aclose", None)) is not None:
            await aclose()

    # --- messages to runs -----------------------------------------------------------------------

    async def steer(self, run_id: str, given: Steer) -> Done:
        """Send a message to a run."""
        if not given.message.strip():
            raise ConfigError("the message is empty")

        def post() -> bool:
            if given.when == "follow_up":
                return follow_up(self._store, run_id, given.message, id=given.id)
            return steer(self._store, run_id, given.message, given.when, id=given.id)

        return Done(run_id, is_new=await asyncio.to_thread(post))

    async def cancel(self, run_id: str, given: Cancel) -> Done:
        """End a run. One that is suspended is resumed for that, if it can be."""

        def post() -> tuple[bool, FoldedRun]:
            is_new = cancel(self._store, run_id, given.reason, id=given.id)
            return is_new, fold(self._store.load(run_id))

        is_new, folded = await asyncio.to_thread(post)
        if not isinstance(folded.ending, RunSuspended):
            return Done(run_id, is_new=is_new)
        message = f"the run ends once it is resumed: clark-agent resume {run_id}"
        if self.can_run:
            try:
                return replace(await self.resume(run_id), is_new=is_new)
            except (ConfigError, RunBusy) as error:  # it is cancelled all the same
                message = f"the run ends once it is resumed, which is not possible here: {error}"
        return Done(run_id, is_new=is_new, message=message)

    async def decide(self, run_id: str, given: Decide) -> Done:
        """Decide a request; go on with the run if nothing else is open."""
        decision = _decision(given)
        await asyncio.to_thread(self._check_not_cancelled, run_id)
        left = await decide(
            self._store, run_id, given.request_id, decision, by=self._by, patience=2.0
        )
        parts = Parts()
        waiting = tuple([parts.waiting(request) for request in left])
        if left:
            return Done(run_id, waiting=waiting)
        if given.resume and self.can_run:
            try:
                return await self.resume(run_id)
            except (ConfigError, RunBusy) as error:  # the decision counts all the same
                return Done(run_id, message=f"decided, but not resumed here: {error}")
        root = await asyncio.to_thread(self._root, run_id)
        return Done(run_id, message=f"nothing is open: clark-agent resume {root}")

    def _check_not_cancelled(self, run_id: str) -> None:
        """Raise `NotPossible` if a suspended run, or one above it, was cancelled: it will end."""
        for each in self._with_above(run_id):
            cancels = [mail.id for mail in self._store.mail(each) if mail.kind == "cancel"]
            if not cancels:
                continue
            folded = fold(self._store.load(each))
            if isinstance(folded.ending, RunSuspended) and not folded.mails.issuperset(cancels):
                raise NotPossible(
                    f"the run {each} was cancelled, so there is nothing to decide: it ends once "
                    "it is resumed"
                )

    def _root(self, run_id: str) -> str:
        """Return the outermost run above a run."""
        return self._with_above(run_id)[-1]

    def _with_above(self, run_id: str) -> list[str]:
        """Return a run and those above it."""
        found = [run_id]
        while True:
            page = read_page(self._store, found[-1], records=1, size=1)
            identity = getattr(page.records[0].entry, "identity", None) if page.records else None
            above = None if identity is None else identity.parent_run_id
            if above is None or above in found:
                return found
            found.append(above)

    # --- running agents ---------------------------------------------------------------------------

    def _setup(self, model: str | None) -> tuple[LoopConfig, RunLog, Any]:
        if self._agents is None or not self.can_run:
            raise ConfigError(NO_AGENT)
        setup = self._agents.for_run(self._store, model)
        log = setup.config.run_log
        assert isinstance(log, RunLog)
        return setup.config, log, setup.deps

    async def resume(self, run_id: str) -> Done:
        """Go on with a run in this process, or with the outermost run above it."""
        run_id = await asyncio.to_thread(self._root, run_id)
        if run_id in self._running:
            return Done(run_id, is_new=False, is_running=True)
        config, _, deps = await asyncio.to_thread(self._setup, None)
        assert self._agents is not None
        await asyncio.to_thread(self._agents.check_resume, run_id)

        def check() -> tuple[WaitingRequest, ...]:
            folded = fold(self._store.load(run_id))
            suspended = isinstance(folded.ending, RunSuspended)
            return open_requests(self._store, folded, now_ms()) if suspended else ()

        if waiting := await asyncio.to_thread(check):
            parts = Parts()
            shown = tuple([parts.waiting(request) for request in waiting])
            return Done(run_id, is_new=False, message="the run still waits", waiting=shown)
        token = CancellationToken()
        task = self._begin(
            run_id,
            resume(self._store, run_id, config, token, trust_log=True, deps=deps),
            token,
        )
        done, _ = await asyncio.wait([task], timeout=0.2)  # what is wrong shows at once
        if done:
            _raise_if_not_begun(task)
        return Done(run_id, is_running=not done)

    async def fork(self, run_id: str, given: ForkRun) -> Done:
        """Start a new run with the history of another, up to a turn."""
        prompt = given.prompt if given.prompt and given.prompt.strip() else None

        def prepare() -> tuple[AgentContext, LoopConfig, Any]:
            context = fork(self._store, run_id, turn=given.turn)
            folded = fold(self._store.load(run_id))
            if given.replace_prompt:
                if given.turn != 0 or prompt is None:
                    raise ConfigError("replace_prompt needs turn 0 and a prompt")
                context = replace(context, messages=folded.began.history)
            if given.system_prompt is not None:
                context = replace(context, system_prompt=given.system_prompt)
            if prompt is None:
                check_continuation(context)
            turn = folded.turns if given.turn is None else given.turn
            config, log, deps = self._setup(given.model or None)
            note = {FORK_NOTE: {"run_id": run_id, "turn": turn}}
            return context, config.replace(run_log=_noted(log, note)), deps

        context, config, deps = await asyncio.to_thread(prepare)
        assert context.identity is not None
        new, token = context.identity.run_id, CancellationToken()
        task = self._begin(new, start(prompt or (), context, config, token, deps=deps), token)
        await self._is_there(new, task)
        return Done(new, is_running=not task.done())

    async def _is_there(self, run_id: str, task: asyncio.Task[object]) -> None:
        """Wait until a new run is in the store."""
        clock = asyncio.get_running_loop().time
        until = clock() + _PATIENCE
        while clock() < until:
            try:
                await asyncio.to_thread(read_page, self._store, run_id, records=1)
                return
            except RunNotFound:
                if task.done():
                    _raise_if_not_begun(task)
                    return
                await asyncio.wait([task], timeout=_POLL)

    def _begin(
        self, run_id: str, running: Coroutine[Any, Any, object], token: CancellationToken
    ) -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.create_task(running, name=f"run {run_id}")
        self._tasks[task] = token
        self._running.add(run_id)

        def ended(task: asyncio.Task[object]) -> None:
            self._tasks.pop(task, None)
            self._running.discard(run_id)
            error = None if task.cancelled() else task.exception()
            if error is not None:  # its log says it, too
                logger.info("the run %s ended: %s", run_id, describe(error))

        task.add_done_callback(ended)
        return task

    async def replay(self, run_id: str) -> Replayed:
        """Replay a run, and return the first difference. Nothing is called."""
        agents = self._agents
        if agents is None:
            raise ConfigError(NO_AGENT)
        folded = await asyncio.to_thread(lambda: fold(self._store.load(run_id)))
        setup = await asyncio.to_thread(agents.for_replay, folded.began)
        report = await replay(self._store, run_id, setup.config, deps=setup.deps)
        return Replayed(report.is_identical, difference_view(report.drift))


def _raise_if_not_begun(task: asyncio.Task[object]) -> None:
    """Raise what prevented a run. A run that has begun and failed says so in its log."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, (RunBusy, ConfigError, InvalidContinuationError, DecodeError)):
        raise error
    if error is not None and not isinstance(error, LoopError):
        raise error


def _noted(log: RunLog, note: dict[str, Any]) -> RunLog:
    """Return the same log with a further note."""
    return RunLog(
        log.store,
        durability=log.durability,
        on_failure=log.on_failure,
        full_requests=log.full_requests,
        notes={**log.notes, **note},
        mail_every=log.mail_every,
        live=log.live,
    )


def _decision(given: Decide) -> Decision:
    value = given.value
    match given.decision:
        case "allow":
            return Allow()
        case "deny":
            if value is not None and not isinstance(value, str):
                raise ConfigError("the value of deny is a reason: a text")
            return Deny(value or None)
        case "give_arguments":
            if not isinstance(value, dict):
                raise ConfigError("the value of give_arguments is an object")
            return GiveArguments(value)
        case "give_result":
            if value is None:
                raise ConfigError("give_result needs a value")
            return GiveResult(value)
