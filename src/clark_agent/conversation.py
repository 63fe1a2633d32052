"""Conversation: a context that grows with every run."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from clark_agent._ids import random_id
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.errors import DecodeError, failure_of
from clark_agent.events import EventSink
from clark_agent.loop import RunResult, check_arguments, check_continuation, start
from clark_agent.running import Prompts, RunStream
from clark_agent.types import AgentContext, AgentMessage
from clark_agent.wire import decode_json, encode_message

__all__ = ["Conversation"]


class Conversation:
    """Holds a context, runs the agent on it, and keeps what each run has brought.

    Also what a failed or cancelled run has brought: the transcript is valid, and the next `send`
    goes on from there. One run at a time; ``config`` and ``context`` may be changed between runs.
    """

    def __init__(self, config: LoopConfig, context: AgentContext | str = "") -> None:
        self._is_running = self._has_run = False
        self._config = config
        self._context = AgentContext(context) if isinstance(context, str) else context
        check_arguments(self._context, config)

    @property
    def config(self) -> LoopConfig:
        """How the agent is run."""
        return self._config

    @config.setter
    def config(self, config: LoopConfig) -> None:
        self._check_idle()
        check_arguments(self._context, config)
        self._config = config

    @property
    def context(self) -> AgentContext:
        """What has been said so far, and the system prompt."""
        return self._context

    @context.setter
    def context(self, context: AgentContext) -> None:
        self._check_idle()
        check_arguments(context, self._config)
        self._context = context

    @property
    def messages(self) -> tuple[AgentMessage, ...]:
        """The transcript so far."""
        return self.context.messages

    async def send(
        self, prompts: Prompts | None = None, signal: CancellationToken | None = None
    ) -> RunResult:
        """Give the agent something to answer; without prompts it goes on from where it stands."""
        return await self._run(prompts, signal)

    def stream(
        self,
        prompts: Prompts | None = None,
        signal: CancellationToken | None = None,
        *,
        max_buffered: int = 256,
    ) -> RunStream:
        """The same as a stream of events; see `clark_agent.running.stream_run`."""
        return RunStream(lambda sink, token: self._run(prompts, token, sink), signal, max_buffered)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the context to a file, whole or not at all."""
        target = Path(path)
        draft = target.with_name(f".{target.name}.{random_id()}.tmp")
        try:
            draft.write_bytes(encode_message(self.context))
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: LoopConfig) -> Conversation:
        """The conversation that was saved. Raises `DecodeError` for a file that holds none."""
        try:
            context = decode_json(Path(path).read_bytes(), AgentContext)
        except DecodeError as error:
            raise DecodeError(f"{path}: {error.reason}", path=error.path) from error
        return cls(config, context)

    def _check_idle(self) -> None:
        if self._is_running:
            raise RuntimeError(
                "the conversation is in the middle of a run: wait for it, or steer it"
            )

    async def _run(
        self,
        prompts: Prompts | None,
        signal: CancellationToken | None,
        sink: EventSink | None = None,
    ) -> RunResult:
        self._check_idle()
        check_arguments(self._context, self._config, signal)
        if prompts is None:
            check_continuation(self._context)
        self._is_running = True
        context = self._context
        if self._has_run and context.identity is not None and self._config.run_log is not None:
            # In a log each run has an id of its own; what they share is the conversation.
            context = replace(context, identity=replace(context.identity, run_id=random_id()))
        self._has_run = True
        try:
            result = await start(
                () if prompts is None else prompts, context, self._config, signal, sink=sink
            )
        except BaseException as error:
            if (failure := failure_of(error)) is not None:
                self._context = self._context.extend(failure)
            raise
        finally:
            self._is_running = False
        self._context = self._context.extend(result)
        return result
