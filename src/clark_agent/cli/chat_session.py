"""Chat: a conversation with an agent that a person can talk to while it works.

A line that is sent while no run is active starts a run; during a run, it steers it. A line that
came too late for a run that ended by itself starts the next run. After a run that was stopped or
failed it does not, and a note says that it was not delivered. An open question (of an approval, or
of the agent) takes the next line. Each run has its own log, with the id of the conversation. If the
last run is suspended, a line goes to that run, which continues if its requests are decided.

This module does not handle keys or slash commands: see `clark_agent.cli.commands.chat` and
`clark_agent.cli.slash`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from clark_agent._ids import random_id
from clark_agent.cancellation import LET_GO, CancellationToken
from clark_agent.cli.app import can_resume
from clark_agent.cli.approval_prompt import ask_approval
from clark_agent.cli.options import (
    Approvals,
    CliAgent,
    Log,
    RunNames,
    Settings,
    make_agent,
    make_gate,
)
from clark_agent.cli.requests import how_to_decide, request_lines
from clark_agent.cli.view import Screen, View, one_line, output_text, safe
from clark_agent.config import LoopConfig
from clark_agent.conversation import CompactionReport, Conversation, extended
from clark_agent.errors import (
    InvalidContinuationError,
    LoopError,
    RunAborted,
    RunLetGo,
    failure_of,
)
from clark_agent.events import AgentEvent, RunIdentified
from clark_agent.result import RunResult
from clark_agent.run_log.fold import fold
from clark_agent.run_log.fork import fork
from clark_agent.run_log.mailbox import steer
from clark_agent.run_log.records import RunEnded
from clark_agent.run_log.resume import resume
from clark_agent.steering import SteeringReceipt, SteeringStatus
from clark_agent.toolkit.approval import Approval, ApprovalRequest, Denied
from clark_agent.toolkit.ask import SUSPEND, OneAtATime
from clark_agent.types import AgentContext, RunIdentity, Usage, UserMessage

if TYPE_CHECKING:
    from clark_agent.mcp.tool_set import McpTools

__all__ = ["Chat"]


Start: TypeAlias = Callable[[CancellationToken], Coroutine[Any, Any, RunResult]]
"""Starts a run under a token."""


class _Question:
    """A question that the next line answers."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Chat:
    """The conversation, the active run, and the open question."""

    def __init__(
        self,
        settings: Settings,
        screen: Screen,
        *,
        log: Log | None,
        approvals: Approvals,
        system: str | None = None,
    ) -> None:
        self.screen = screen
        self.log = log
        ask = SUSPEND if settings.suspend else self._ask_approval
        self.gate = make_gate(ask, approvals, settings)
        self.agent: CliAgent = self._made(settings)
        prompt = self.agent.system_prompt if system is None else system
        self.conversation = Conversation(
            self._config(),
            _branch(AgentContext(prompt if isinstance(prompt, str) else "")),
            deps=self.agent.deps,
            system_prompt=None if isinstance(prompt, str) else prompt,
        )
        self.usage = Usage()
        self.run_id: str | None = None
        """The id of the active or last run."""
        self.can_resume = True
        """Whether resuming that run may help."""
        self._view = View(screen)
        self._question: _Question | None = None
        self._one_question = OneAtATime()
        self._task: asyncio.Task[bool] | None = None
        self._is_closing = False
        self._token = CancellationToken()
        self._is_compacting = False
        self._receipts: list[SteeringReceipt] = []
        self._waiting: set[asyncio.Task[None]] = set()

    # --- state ------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a run is active."""
        return self._task is not None

    @property
    def is_asking(self) -> bool:
        """Whether the next line answers a question."""
        return self._question is not None

    @property
    def answers(self) -> dict[str, Approval]:
        """The person's ``always`` and ``never`` answers about tools."""
        identity = self.conversation.context.identity
        remembered = self.gate.remembered((identity and identity.conversation_id) or "")
        return {**dict.fromkeys(self.gate.always, Approval.ALWAYS), **remembered}

    @property
    def label(self) -> str:
        """The prompt before the input line."""
        return "> " if self._question is None else f"{self._question.label} > "

    @property
    def state(self) -> str:
        """The state of the chat in one word."""
        if self._question is not None:
            return "waiting for you"
        if self._task is None:
            return "ready"
        return "stopping" if self._token.cancelled else "working"

    # --- lines ------------------------------------------------------------------------------------

    def take(self, line: str) -> None:
        """Handle a line that is not a command: an answer, a message to the running agent, or a
        prompt.
        """
        if line:
            self.screen.note(safe(line), "user")
        if self._question is not None:
            self._question.answer.set_result(line)
            self._question = None
        elif self.is_running:
            self._steer(line)
        elif (waits := self.conversation.suspended_run_id) is not None and self.log is not None:
            self._send_to_suspended(line, self.log, waits)
        else:
            self.begin(lambda token: self.conversation.send(line, token))

    def _send_to_suspended(self, line: str, log: Log, run_id: str) -> None:
        try:
            steer(log.store, run_id, line)  # the model gets it when the run goes on
        except InvalidContinuationError:  # another process has resumed it, and it has ended
            self.continue_run(log, run_id)
            if self.is_running:
                self._steer(line)
            else:
                self.begin(lambda token: self.conversation.send(line, token))
        else:
            self.continue_run(log, run_id)

    def _steer(self, line: str) -> None:
        receipt = self.agent.steering.steer(line)
        self._receipts.append(receipt)

        async def report() -> None:
            settled = await receipt
            if settled.status is SteeringStatus.DELIVERED:
                self.screen.note(f"delivered in turn {settled.turn}: {one_line(line, 60)}")

        task = asyncio.create_task(report())
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    # --- runs -------------------------------------------------------------------------------------

    def begin(self, run: Start) -> None:
        """Start a run and return at once."""
        self._token = CancellationToken()
        self.can_resume = True
        self._task = asyncio.create_task(self._follow(run))
        self._task.add_done_callback(self._over)

    def interrupt(self) -> bool:
        """Ask the run to stop; the second call aborts it. Or stop the compaction. Return whether
        there was something to stop.
        """
        if self._is_compacting:
            self._token.cancel("interrupted")
            return True
        if self._task is None:
            return False
        if self._token.cancelled:
            self._task.cancel()
        else:
            self._token.cancel("interrupted")
            self.screen.note("stopping; Ctrl-C again aborts")
        return True

    async def close(self, *, let_go: bool = False) -> None:
        """Stop the active run, and start no other. With ``let_go`` the run does not end, and can be
        resumed.
        """
        self._is_closing = True
        if self._task is not None and let_go:
            self._token.cancel(LET_GO)
        elif self._task is not None and not self._token.cancelled:
            self.interrupt()
        while self._task is not None:
            await asyncio.wait([self._task])
        await _close(self.agent)
        if self.agent.mcp is not None:
            await self.agent.mcp.aclose()

    async def _follow(self, run: Start) -> bool:
        """Run to the end. Return whether the run ended by itself."""
        try:
            result = await run(self._token)
        except asyncio.CancelledError as error:
            self._failed(failure_of(error), "aborted")
        except LoopError as error:
            is_stop = isinstance(error, (RunAborted, RunLetGo)) and self._token.cancelled
            self._failed(error, "stopped" if is_stop else None)
        except Exception as error:
            self._failed(error, None)
        else:
            if (output := output_text(result)) is not None:
                self.screen.say(safe(output))
            self._ended(result.tree_usage, result.outcome)
            self._show_waiting(result)
            return True
        return False

    async def compact(self) -> CompactionReport | None:
        """Summarise older turns now. None if there is nothing to replace. Raises `RunAborted` after
        `interrupt`; then nothing has changed.
        """
        self._token = CancellationToken()
        self._is_compacting = True
        self.screen.note("compacting; Ctrl-C stops it")
        try:
            done = await self.conversation.compact(self._token)
        finally:
            self._is_compacting = False
        if done is not None:
            self.usage += done.usage
        return done

    def _failed(self, error: Exception | None, outcome: str | None) -> None:
        self.can_resume = can_resume(error)
        if outcome is None:
            self.screen.note(one_line(str(error), 400), "error")
            for note in getattr(error, "__notes__", ()):
                self.screen.note(one_line(note, 400))
        usage = error.tree_usage if isinstance(error, LoopError) else Usage()
        self._ended(usage, outcome or "failed")

    def _ended(self, usage: Usage, outcome: str) -> None:
        self.usage += usage
        self.screen.close()
        self.screen.note(self._view.summary(usage, outcome, self.run_id))

    def _show_waiting(self, result: RunResult) -> None:
        if not result.waiting or self.log is None or self.run_id is None:
            return
        names = RunNames(self.log)
        for request in result.waiting:
            for line in request_lines(request, names):
                self.screen.note(line)
            self.screen.note(f"  {how_to_decide(request, self.log, names)}")
        self.screen.note(f"then: /resume {names(self.run_id)}, or send a message")

    def _over(self, task: asyncio.Task[bool]) -> None:
        ended_by_itself = not task.cancelled() and task.result()
        self._task = None
        late = [r.message for r in self._receipts if r.status is SteeringStatus.EXPIRED]
        self._receipts.clear()
        if late and ended_by_itself and not self._is_closing:
            self.begin(lambda token: self.conversation.send(late, token))
            return
        for message in late:
            self.screen.note(
                f"not delivered: {one_line(message.plain_text, 60)} (press ↑ to edit it)"
            )
        self.screen.status("")

    # --- questions of the agent -------------------------------------------------------------------

    async def _ask_approval(self, request: ApprovalRequest) -> Approval | Denied:
        async with self._one_question.turn():
            return await ask_approval(request, "wants to run", self.screen, self._ask)

    async def _ask_user(self, question: str, choices: Sequence[str]) -> str:
        async with self._one_question.turn():
            self.screen.note(safe(question), "tool")
            for number, choice in enumerate(choices, 1):
                self.screen.note(f"{number}. {one_line(choice)}")
            while not (answer := await self._ask("your answer")):
                pass
        if answer.isdecimal() and 1 <= int(answer) <= len(choices):
            return choices[int(answer) - 1]
        return answer

    async def _ask(self, label: str) -> str:
        self._question = question = _Question(label)
        self.screen.status("")
        try:
            return (await question.answer).strip()
        finally:
            if self._question is question:
                self._question = None
            self.screen.status("")

    # --- changes between runs ---------------------------------------------------------------------

    async def change(self, settings: Settings) -> None:
        """Continue with another model or other tools. The conversation is kept."""
        before = self.agent
        mcp = before.mcp if settings.mcp == before.settings.mcp else None
        self.agent = self._made(settings, mcp)
        self.conversation.config = self._config()
        await _close(before)
        if before.mcp is not None and before.mcp is not self.agent.mcp:
            await before.mcp.aclose()

    def fork(self, number: int | None) -> None:
        """Continue on a new branch, after the answer to the person's message of this number."""
        context = self.conversation.context
        asked = [i for i, m in enumerate(context.messages) if isinstance(m, UserMessage)]
        if number is not None and number < len(asked):
            context = AgentContext(context.system_prompt, context.messages[: asked[number]])
        self.conversation.context = _branch(context)
        self.run_id = None

    def continue_run(self, log: Log, run_id: str) -> None:
        """Continue with another run, from its end or from where it was interrupted."""
        folded = fold(log.store.load(run_id))
        if isinstance(folded.ending, RunEnded):
            self.conversation.context = context = fork(log.store, run_id)
            self.run_id = run_id
            self._view.show(context.messages[len(folded.began.history) :])
            return
        self.run_id = run_id
        began = folded.began
        identity = RunIdentity.root(conversation_id=began.identity.conversation_id)
        context = AgentContext(began.system_prompt, began.history, identity)
        if self.conversation.suspended_run_id != run_id:  # otherwise the chat has just shown it
            folded.drop_placeholders()
            self._view.show([m for m in folded.messages if m is not folded.answer])

        async def resume_run(token: CancellationToken) -> RunResult:
            try:
                config = self.conversation.config  # the config of this chat, not one from the log
                result = await resume(
                    log.store, run_id, config, token, trust_log=True, deps=self.agent.deps
                )
            except BaseException as error:
                if (failure := failure_of(error)) is not None:
                    self.conversation.context = extended(context, failure)
                raise
            self.conversation.context = context.extend(result)
            return result

        self.begin(resume_run)

    def _made(self, settings: Settings, mcp: McpTools | None = None) -> CliAgent:
        ask = SUSPEND if settings.suspend else self._ask_user
        return make_agent(settings, log=self.log, gate=self.gate, ask=ask, mcp=mcp)

    def _config(self) -> LoopConfig:
        return self.agent.config.replace(event_sink=self._on_event)

    def _on_event(self, event: AgentEvent) -> None:
        if isinstance(event, RunIdentified):
            self.run_id = event.identity.run_id
        self._view(event)


async def _close(agent: CliAgent) -> None:
    if (close := getattr(agent.config.stream, "aclose", None)) is not None:
        await close()


def _branch(context: AgentContext) -> AgentContext:
    """Return the context as the start of a new conversation."""
    identity = RunIdentity.root(conversation_id=random_id())
    return AgentContext(context.system_prompt, context.messages, identity)
