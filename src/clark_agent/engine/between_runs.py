"""Compacts a conversation between its runs."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._threads import call_in_loop
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.effects import DIRECT, Effects
from clark_agent.engine.consult import Consultation, answered, first_request, transformer
from clark_agent.engine.pace import current_pace
from clark_agent.errors import ConfigError, RunAborted
from clark_agent.messages.tokens import CachingEstimator
from clark_agent.messages.transcript import MessageLog
from clark_agent.plugins.base import BeforeRequestContext, Question, TransformContext
from clark_agent.plugins.compaction import Compaction
from clark_agent.types import AgentContext, AssistantMessage, Usage

__all__ = ["CompactionReport", "compact"]


class CompactionReport(Struct, frozen=True, kw_only=True):
    """What a compaction between two runs has done. Without a summary, nothing."""

    first_turn: int
    last_turn: int
    """The turns that it is about, counted from 1 over the conversation."""
    messages: int
    """How many messages it has replaced."""
    has_summary: bool
    """False if the model gave none, or none that is shorter. Then nothing is replaced."""
    tokens_before: int
    tokens_after: int
    """The size of the next request, without and with it. Estimates."""
    usage: Usage
    """What it has cost."""


async def compact(
    context: AgentContext, config: LoopConfig, signal: CancellationToken | None, deps: Any
) -> tuple[AgentContext, CompactionReport] | None:
    """The compacted context; None if nothing can be replaced."""
    plugin = next((p for p in config.plugins if isinstance(p, Compaction)), None)
    if plugin is None:
        raise ConfigError("the config has no Compaction: add Compaction() to its plugins")
    asker = _Asker(context, config, signal or CancellationToken())
    estimator = CachingEstimator(config.token_estimator)
    transforming = TransformContext(
        asker.signal, config.model_id or "", 0, None, estimator, 0, config.registry, deps
    )
    ctx: BeforeRequestContext[Any] = BeforeRequestContext(
        signal=asker.signal,
        run_id="",
        model=config.model_ref,
        context_window=getattr(config.stream, "context_window", None),
        iteration=0,
        messages=asker.log.view(),
        system_prompt=asker.system_prompt,
        estimator=estimator,
        tools=config.registry,
        asker=asker,
        transformer=transformer(config, plugin.name, transforming),
        deps=deps,
    )
    mark = await plugin.for_run().compact(ctx)
    if mark is None:
        return None
    report = CompactionReport(
        first_turn=mark.first_turn,
        last_turn=mark.last_turn,
        messages=mark.messages if mark.has_summary else 0,
        has_summary=mark.has_summary,
        tokens_before=mark.tokens_before,
        tokens_after=mark.tokens_after if mark.has_summary else mark.tokens_before,
        usage=asker.usage,
    )
    if not mark.has_summary:
        return context, report
    marker = mark.message(config.clock.now_ms())
    return replace(context, messages=(*context.messages, marker)), report


class _Asker:
    """Asks a model outside of a run."""

    def __init__(
        self, context: AgentContext, config: LoopConfig, signal: CancellationToken
    ) -> None:
        self._config = config
        self.system_prompt = config.system_prompt_for(context.system_prompt)
        self.log = MessageLog(context.messages)
        self.effects: Effects = config.effects or DIRECT
        self.signal = signal
        self.grace = config.cancel_grace
        self.pace = current_pace()
        self.usage = Usage()

    async def __call__(self, question: Question) -> AssistantMessage:
        config = self._config
        tools = config.registry.schemas
        request = first_request(config, question, self.system_prompt, tools, self.log.view())
        asked = Consultation("compaction", 0, request)
        self.pace.begin()
        with _Cancelling(self.signal) as cancelling:
            try:
                done = await answered(
                    self, question.stream or config.stream, asked, question.max_seconds
                )
            except asyncio.CancelledError:
                cancelling.check()
                raise
        if done.message.usage is not None:
            self.usage += done.message.usage
        return done.answer()


class _Cancelling:
    """While it is entered, cancelling the token cancels the current task."""

    def __init__(self, signal: CancellationToken) -> None:
        self._signal = signal
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._has_cancelled = False

    def __enter__(self) -> _Cancelling:
        if self._signal.cancelled:
            raise RunAborted(self._signal.reason)
        self._subscription = self._signal.subscribe(lambda: call_in_loop(self._loop, self._cancel))
        return self

    def _cancel(self) -> None:
        if self._task is not None and not self._has_cancelled:
            self._has_cancelled = True
            self._task.cancel()

    def check(self) -> None:
        """Raise `RunAborted` if only the token has cancelled the task."""
        if self._has_cancelled and self._task is not None and self._task.uncancel() == 0:
            self._has_cancelled = False
            raise RunAborted(self._signal.reason)

    def __exit__(self, *_: object) -> None:
        self._subscription.close()
