"""Conversation: a context that grows with every run."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Any, Generic

from msgspec.structs import replace

from clark_agent._ids import random_id
from clark_agent._typing import OutputT_co
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.engine.arguments import check_arguments, check_continuation, prompt_messages
from clark_agent.engine.between_runs import CompactionReport, compact
from clark_agent.engine.loop import start
from clark_agent.errors import (
    ConfigError,
    DecodeError,
    InvalidContinuationError,
    LoopError,
    RunAborted,
    failure_of,
)
from clark_agent.events import EventSink
from clark_agent.messages.wire import decode_json, encode_message
from clark_agent.result import RunResult
from clark_agent.run_context import RunContext, SystemPrompt, resolve_system_prompt
from clark_agent.running import Prompts, RunStream
from clark_agent.types import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    StopReason,
    TextContent,
    ToolResultMessage,
)

__all__ = ["CompactionReport", "Conversation"]


class Conversation(Generic[OutputT_co]):
    """Holds a context, runs the agent on it, and keeps the messages of each run.

    This includes failed and cancelled runs: the transcript is valid, and the next `send` continues
    from there. The text of an answer that was interrupted is kept too, as a message with the stop
    reason ``aborted``: the user has seen it, and may refer to it.

    If the last run is suspended, the next `send` continues it, in any process: with its decisions,
    or, while requests are open, with the same result again. Prompts are then messages to that run.

    One run at a time; ``config`` and ``context`` may be changed between runs. ``system_prompt``, if
    given, takes the place of the context's; a function is called before each run.
    """

    def __init__(
        self,
        config: LoopConfig,
        context: AgentContext | str = "",
        *,
        deps: Any = None,
        system_prompt: SystemPrompt[Any] | None = None,
    ) -> None:
        self._is_running = self._has_run = False
        self._config = config
        self.deps = deps
        """The dependencies that tools and hooks get."""
        self._system_prompt = system_prompt
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
        """The transcript so far, and the system prompt."""
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

    @property
    def suspended_run_id(self) -> str | None:
        """The id of the last run, if it is suspended. The transcript says so, also when it was
        saved and loaded.
        """
        for message in reversed(self._context.messages):
            if not isinstance(message, ToolResultMessage):
                return None
            details: Any = message.details
            if isinstance(details, dict) and details.get("kind") == "suspended":
                return str(details.get("run_id"))
        return None

    async def send(
        self, prompts: Prompts | None = None, signal: CancellationToken | None = None
    ) -> RunResult[OutputT_co]:
        """Run the agent with the prompts; without prompts it continues the transcript.

        An interrupted answer at the end of the transcript is then requested again. Raises
        `RunBusy` if another process works on the suspended run; that run gets the prompts, and
        sending them again does not repeat them.
        """
        return await self._run(prompts, signal)

    def stream(
        self,
        prompts: Prompts | None = None,
        signal: CancellationToken | None = None,
        *,
        max_buffered: int = 256,
    ) -> RunStream[OutputT_co]:
        """The same as a stream of events; see `clark_agent.running.stream_run`."""
        return RunStream(
            lambda sink, token: self._run(prompts, token, sink),
            signal,
            max_buffered,
            output=self._config.output,
        )

    async def compact(self, signal: CancellationToken | None = None) -> CompactionReport | None:
        """Let a summary take the place of older turns now, as the `clark_agent.Compaction` of the
        config does it before a request that is too large.

        Return what was done; None if there is nothing to replace. If the model gives no summary,
        nothing is replaced, and the report says so. The compaction is a message at
        the end of the transcript, and so part of the history that the next run begins with, also in
        its log. The request for the summary is in no log, and counts for no budget.

        Raises `ConfigError` if the config has no `clark_agent.Compaction`, and `RunAborted` if the
        signal is cancelled. Then nothing has changed.
        """
        self._check_idle()
        check_arguments(self._context, self._config, signal)
        if (run_id := self.suspended_run_id) is not None:
            raise InvalidContinuationError(
                f"the last run ({run_id!r}) is suspended: continue it before you compact"
            )
        self._is_running = True
        try:
            done = await compact(self._context, self._config, signal, self.deps)
        finally:
            self._is_running = False
        if done is None:
            return None
        self._context, report = done
        return report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the context to a file, whole or not at all.

        An existing file keeps its permissions; a new one is accessible only to its owner.
        """
        target = os.path.realpath(path)
        folder, name = os.path.split(target)
        draft = os.path.join(folder, f".{name}.{random_id()}.tmp")
        try:
            mode = stat.S_IMODE(os.stat(target).st_mode) if os.path.exists(target) else 0o600
            with open(draft, "xb", opener=_open_private) as file:
                file.write(encode_message(self.context))
            os.chmod(draft, mode)
            os.replace(draft, target)
        except OSError as error:  # report the caller's path, not that of the draft
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: LoopConfig,
        *,
        system_prompt: SystemPrompt[Any] | None = None,
        deps: Any = None,
    ) -> Conversation:
        """Load a saved conversation, with another system prompt if one is given.

        Raises `DecodeError` for any other file.
        """
        try:
            with open(path, "rb") as file:
                context = decode_json(file.read(), AgentContext)
        except DecodeError as error:
            raise DecodeError(f"{path}: {error.reason}", path=error.path) from error
        if isinstance(system_prompt, str):
            context = replace(context, system_prompt=system_prompt)
            system_prompt = None
        return cls(config, context, deps=deps, system_prompt=system_prompt)

    def _check_idle(self) -> None:
        if self._is_running:
            raise RuntimeError(
                "the conversation has a run in progress: wait for it to end, or steer it"
            )

    async def _run(
        self,
        prompts: Prompts | None,
        signal: CancellationToken | None,
        sink: EventSink | None = None,
    ) -> RunResult:
        self._check_idle()
        check_arguments(self._context, self._config, signal)
        if (run_id := self.suspended_run_id) is not None:
            self._is_running = True
            try:
                return await self._resume(run_id, prompts, signal, sink)
            finally:
                self._is_running = False
        if prompts is None:
            self._context = without_broken_answer(self._context)
            check_continuation(self._context)
        self._is_running = True
        try:
            return await self._run_once(prompts, signal, sink)
        finally:
            self._is_running = False

    async def _resume(
        self,
        run_id: str,
        prompts: Prompts | None,
        signal: CancellationToken | None,
        sink: EventSink | None,
    ) -> RunResult:
        """Continue the suspended run. If another process has ended it, take what it has said."""
        from clark_agent.run_log import RunLog, recorded_end, resume, steer  # when first used

        run_log = self._config.run_log
        if not isinstance(run_log, RunLog):
            raise ConfigError(
                f"the run {run_id!r} of the conversation is suspended, and the config has no "
                "run_log to resume it from"
            )
        store, config = run_log.store, self._config
        history, ended = recorded_end(store, run_id, config)
        before = replace(self._context, messages=history)
        if ended is not None:
            self._context = before.extend(ended)
            if prompts is not None:
                return await self._run_once(prompts, signal, sink)
            if isinstance(ended, RunResult):
                return ended
            raise ended
        for number, message in enumerate(
            () if prompts is None else prompt_messages(prompts, config)
        ):
            mail_id = _mail_id(run_id, len(self._context.messages), number, message)
            steer(store, run_id, message, id=mail_id)
        try:
            result = await resume(store, run_id, config, signal, sink=sink, deps=self.deps)
        except BaseException as error:
            if (failure := failure_of(error)) is not None and failure.messages:
                self._context = extended(before, failure)
            raise
        self._context = before.extend(result)
        return result

    async def _run_once(
        self,
        prompts: Prompts | None,
        signal: CancellationToken | None,
        sink: EventSink | None,
    ) -> RunResult:
        context = self._context
        if self._system_prompt is not None:
            run_context = RunContext(self.deps, context.identity, context.messages)
            try:
                text = await resolve_system_prompt(
                    self._system_prompt, run_context, signal, self._config.hook_timeout
                )
            except LoopError as error:
                if prompts is not None:
                    error.messages = tuple(prompt_messages(prompts, self._config))
                    self._context = context.extend(error)
                raise
            context = self._context = replace(context, system_prompt=text)
        if self._has_run and context.identity is not None and self._config.run_log is not None:
            # In a log each run has its own id; they share the conversation.
            context = replace(context, identity=replace(context.identity, run_id=random_id()))
        self._has_run = True
        try:
            result = await start(
                () if prompts is None else prompts,
                context,
                self._config,
                signal,
                sink=sink,
                deps=self.deps,
            )
        except BaseException as error:
            if (failure := failure_of(error)) is not None:
                self._context = extended(self._context, failure)
            raise
        self._context = self._context.extend(result)
        return result


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def extended(context: AgentContext, failure: LoopError) -> AgentContext:
    """The context after a failed run; if it was stopped, with the text of the interrupted answer.

    Only the text: calls have no result, and a part of signed reasoning is useless.
    """
    context = context.extend(failure)
    partial = failure.partial
    if not isinstance(failure, RunAborted) or partial is None or not partial.plain_text.strip():
        return context
    interrupted = replace(
        partial, content=(TextContent(partial.plain_text),), stop_reason=StopReason.ABORTED
    )
    return context.extend([interrupted])


def without_broken_answer(context: AgentContext) -> AgentContext:
    """The context without an interrupted answer at its end."""
    last = context.messages[-1] if context.messages else None
    if isinstance(last, AssistantMessage) and last.stop_reason is StopReason.ABORTED:
        return replace(context, messages=context.messages[:-1])
    return context


def _mail_id(run_id: str, length: int, number: int, message: AgentMessage) -> str:
    """The id of a prompt for a suspended run: the same if it is sent again because the run was
    busy.
    """
    from hashlib import blake2b  # only runs that wait need it

    text = encode_message(replace(message, timestamp=None))
    key = f"{run_id} {length} {number} ".encode("utf-8", "surrogatepass")
    return f"send {blake2b(key + text, digest_size=16).hexdigest()}"
