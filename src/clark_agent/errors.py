"""Everything this package raises on purpose.

    ClarkAgentError
    ├── ConfigError               a setting, a plugin or a tool is invalid
    │   └── ToolDefinitionError   a function or class cannot be made a tool
    ├── DecodeError               stored or received JSON is invalid
    │   └── LogDamaged            a run log was changed or cut after it was written
    ├── EventOrderError           an event breaks the grammar of events
    ├── McpError                  an MCP server cannot be reached, or refuses a request
    ├── TransportError            why a transport gave up; the cause of a StreamError
    │   ├── AccessRefused         the provider, or a gateway before it, does not accept the key
    │   ├── ReplayRefused         the history lacks a signature that the provider requires
    │   └── StreamTimeout         the server took too long
    ├── LoopError                 a run ended without a result; carries what it had
    │   ├── StreamError           the request to the model failed for good
    │   │   └── ContextOverflowError  what must be sent does not fit, so nothing was sent
    │   ├── RunAborted            the caller cancelled, or a tool did
    │   ├── RunStoppedByTool      a tool raised ToolFatal
    │   ├── HookError             a gate, a policy, a provider or a recovery raised
    │   ├── OutputError           the run has no output of the type that it must return
    │   ├── RunLogError           the run log could not be written
    │   ├── RunLetGo              this process gave the run up; another can resume it
    │   ├── InvalidContinuationError
    │   └── EmptyOutcomeError     the model kept stopping without calling a tool
    ├── RequestError              a request that waits cannot be decided
    │   ├── RequestNotFound       there is no such request
    │   ├── AlreadyDecided        another decision came first
    │   ├── RequestExpired        its time is over
    │   └── DecisionNotApplicable this decision does not fit the request
    ├── RunStoreError             a store of runs cannot do what was requested
    │   ├── RunNotFound           it has no run with that id
    │   ├── RunExists             it already has a run with that id
    │   └── RunBusy               another process, thread or task writes to the run
    │       └── RunTakenOver      another process has taken the run over: the lease was over
    └── ToolError                 raised by tools
        ├── ToolExecutionError    this call failed; the model gets the text and continues
        ├── ModelRetry            the model should try again; it gets the text
        ├── ToolAborted           end the run as aborted
        ├── ToolFatal             end the run as failed
        ├── ToolSuspended         the result comes later, from a decision
        ├── ToolContractError     a bug in the tool: it did not return a result
        └── ToolValidationError   invalid arguments; the model gets the text and can correct them
            ├── InvalidArgumentsError
            └── MissingFieldError

A failing tool does not fail the run: the model sees its result and decides. Only the branches
under `LoopError` leave `run`. `clark_agent.run_log.resume` also raises `LogDamaged` and the
branches under `RunStoreError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from clark_agent._text import describe
from clark_agent.reasoning import ReplayViolation
from clark_agent.stream import StreamErrorKind
from clark_agent.types import AgentMessage, AssistantMessage, Usage

if TYPE_CHECKING:
    from clark_agent.prices import Bill

__all__ = [
    "AccessRefused",
    "AlreadyDecided",
    "ClarkAgentError",
    "ConfigError",
    "ContextOverflowError",
    "DecisionNotApplicable",
    "DecodeError",
    "EmptyOutcomeError",
    "EventOrderError",
    "HookError",
    "InvalidArgumentsError",
    "InvalidContinuationError",
    "LogDamaged",
    "LoopError",
    "McpError",
    "MissingFieldError",
    "ModelRetry",
    "OutputError",
    "ReplayRefused",
    "RequestError",
    "RequestExpired",
    "RequestNotFound",
    "RunAborted",
    "RunBusy",
    "RunExists",
    "RunLetGo",
    "RunLogError",
    "RunNotFound",
    "RunStoppedByTool",
    "RunStoreError",
    "RunTakenOver",
    "StreamError",
    "StreamTimeout",
    "ToolAborted",
    "ToolContractError",
    "ToolDefinitionError",
    "ToolError",
    "ToolExecutionError",
    "ToolFatal",
    "ToolSuspended",
    "ToolValidationError",
    "TransportError",
]


class ClarkAgentError(Exception):
    """The root of all errors of this package.

    Each can be pickled and copied with all that it carries. A pickle has the cause too, if that can
    be pickled itself.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__, _picklable(self.__cause__))


def _restore(
    kind: type[ClarkAgentError],
    args: tuple[Any, ...],
    carried: dict[str, Any],
    cause: BaseException | None,
) -> ClarkAgentError:
    """Restore an error without its constructor, which would build the text again."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(carried)
    error.__cause__ = cause
    return error


def _picklable(cause: BaseException | None) -> BaseException | None:
    """The cause, unless it cannot cross a process boundary."""
    if cause is None:
        return None
    from pickle import dumps, loads  # only pickled errors need it

    try:
        loads(dumps(cause))
    except Exception:
        return None
    return cause


class ConfigError(ClarkAgentError, ValueError):
    """A setting, a plugin or a tool is invalid. Raised when it is given, not later."""


class ToolDefinitionError(ConfigError, TypeError):
    """The declaration of a tool is invalid. Raised where the tool is declared."""


class DecodeError(ClarkAgentError, ValueError):
    """JSON that cannot be read: ``path`` says where (``$`` is the whole), ``reason`` why."""

    def __init__(self, reason: str, *, path: str = "$") -> None:
        super().__init__(f"{reason} (at {path})")
        self.path = path
        self.reason = reason


class LogDamaged(DecodeError):
    """A run log was changed or cut after it was written.

    ``at`` is the number of the first damaged record; the records before it are intact. ``path`` is
    its place: line and byte in a file, number in a database.
    """

    def __init__(self, run_id: str, at: int, reason: str, *, path: str) -> None:
        super().__init__(f"the log of run {run_id!r} is damaged: {reason}", path=path)
        self.run_id = run_id
        self.at = at
        if at:
            self.add_note(
                f"What to do: fork(store, {run_id!r}, before={at}) returns a context with the "
                "intact part; start another run from it."
            )


class EventOrderError(ClarkAgentError, AssertionError):
    """An event out of order: its ``position`` from 0, its ``kind``, and the ``rule`` it breaks."""

    def __init__(self, position: int, kind: str, rule: str) -> None:
        super().__init__(f"event {position} ({kind}) is out of order: {rule}")
        self.position = position
        self.kind = kind
        self.rule = rule


class McpError(ClarkAgentError):
    """An MCP server cannot be reached, or refuses a request.

    ``server`` is its name. ``kind`` is a category: ``unavailable``, ``connection_lost``,
    ``timeout``, ``unauthorized`` or ``protocol_error``. ``code`` is the JSON-RPC code, if the
    server sent an error.
    """

    kind: Literal["unavailable", "connection_lost", "timeout", "unauthorized", "protocol_error"]

    def __init__(
        self,
        server: str,
        text: str,
        *,
        kind: Literal[
            "unavailable", "connection_lost", "timeout", "unauthorized", "protocol_error"
        ] = "unavailable",
        code: int | None = None,
    ) -> None:
        super().__init__(f"MCP server {server!r}: {text}")
        self.server = server
        self.text = text
        self.kind = kind
        self.code = code


# --- errors of a transport --------------------------------------------------------------------


class TransportError(ClarkAgentError):
    """Why a transport gave up, if a kind and a text are not enough.

    A transport does not raise: it puts this into its last event, and the `StreamError` that ends
    the run has it as its cause.
    """


class StreamTimeout(TransportError, TimeoutError):
    """The server took too long: ``phase`` is ``connect``, ``idle`` or ``total``."""

    def __init__(self, phase: Literal["connect", "idle", "total"], seconds: float | None) -> None:
        limit = "in time" if seconds is None else f"within {seconds:g} seconds"
        super().__init__(f"{_TIMED_OUT[phase]} {limit}")
        self.phase = phase
        self.seconds = seconds


_TIMED_OUT = {
    "connect": "the connection was not established",
    "idle": "the server did not send anything",
    "total": "the answer was not complete",
}


class AccessRefused(TransportError):
    """A server does not accept the key (status 401) or does not allow the request (403).

    ``by`` is the server that answered: the ``provider``, or a ``gateway`` on the way to it. If a
    provider behind a gateway refuses, the owner of the gateway must fix it; if the gateway refuses,
    its caller must.
    """

    def __init__(self, by: Literal["provider", "gateway"], status: int, message: str) -> None:
        super().__init__(message)
        self.by: Literal["provider", "gateway"] = by
        self.status = status


class ReplayRefused(TransportError):
    """The provider would reject this history: reasoning that it signed has lost its signature.

    ``index`` is the message in the request, ``violation`` the broken requirement.
    """

    def __init__(self, index: int, violation: ReplayViolation) -> None:
        formats = ", ".join(violation.formats)
        super().__init__(
            f"message {index} calls tools and carries reasoning ({formats}) without its signature; "
            "the provider would reject it. Keep the reasoning of a tool turn unchanged, or drop it"
        )
        self.index = index
        self.violation = violation


# --- errors of a run --------------------------------------------------------------------------


class LoopError(ClarkAgentError):
    """A run ended without a result. Nothing that it had is lost."""

    messages: tuple[AgentMessage, ...]
    """The run's messages so far. Every tool call in them has a result."""
    partial: AssistantMessage | None
    """An assistant message that was cut off mid-stream. It is not in ``messages``."""
    usage: Usage
    """The tokens of the run so far."""
    tree_usage: Usage
    """The tokens of the run and of its child runs."""
    bill: Bill | None = None
    """The tokens by model, which the cost is computed from."""
    undelivered: tuple[AgentMessage, ...]
    """Steering that was accepted and did not reach the model."""
    turn: int | None = None
    """The turn of the run in which it happened, from 1."""

    def __init__(
        self,
        text: str,
        *,
        messages: Sequence[AgentMessage] = (),
        partial: AssistantMessage | None = None,
        usage: Usage | None = None,
        undelivered: Sequence[AgentMessage] = (),
    ) -> None:
        super().__init__(text)
        self.messages = tuple(messages)
        self.partial = partial
        self.usage = self.tree_usage = usage or Usage()
        self.undelivered = tuple(undelivered)

    @property
    def cost(self) -> float | None:
        """The cost of ``usage``; see `clark_agent.RunResult.cost`."""
        return None if self.bill is None else self.bill.cost

    @property
    def tree_cost(self) -> float | None:
        """The cost of ``tree_usage``; see `clark_agent.RunResult.tree_cost`."""
        return None if self.bill is None else self.bill.tree_cost


class StreamError(LoopError):
    """The transport failed for good. ``kind`` is its category, ``message`` its text."""

    def __init__(self, kind: StreamErrorKind, message: str) -> None:
        super().__init__(f"the model's stream failed ({kind}): {message}")
        self.kind = kind
        self.message = message
        if kind in _ADVICE:
            self.add_note(_ADVICE[kind])


_ADVICE = {
    StreamErrorKind.CONTEXT_OVERFLOW: (
        "What to do: add Compaction(), a TokenBudget that fits the model's window, or an "
        "overflow_recovery that shrinks the transcript to the config. If it has one, the task and "
        "the newest turn alone are too large."
    ),
    StreamErrorKind.INCONSISTENT_TOOL_HISTORY: (
        "What to do: check how the transcript, or a context transform, pairs tool calls and "
        "results; the automatic repair did not help."
    ),
    StreamErrorKind.PROVIDER_RATE_LIMITED: "What to do: wait, then continue with run_continue.",
    StreamErrorKind.TRANSIENT: (
        "What to do: continue with run_continue; the messages are still valid."
    ),
    StreamErrorKind.EMPTY: (
        "What to do: check what the provider sends; its answers are always empty."
    ),
    StreamErrorKind.FATAL: (
        "What to do: do not retry; fix what the message or its cause describes."
    ),
}


class ContextOverflowError(StreamError):
    """A `clark_agent.TokenBudget` cannot make a request fit, so nothing was sent."""

    def __init__(self, message: str) -> None:
        super().__init__(StreamErrorKind.CONTEXT_OVERFLOW, message)


class RunAborted(LoopError):
    """The run was cancelled through its token, or by a tool that raised `ToolAborted`."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(f"the run was aborted: {reason}" if reason else "the run was aborted")
        self.reason = reason


class RunStoppedByTool(LoopError):
    """A tool raised `ToolFatal`."""

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(f"the tool {tool!r} cannot go on, and ended the run: {reason}")
        self.tool = tool
        self.reason = reason


class HookError(LoopError):
    """The host's own code raised where the run needs its result.

    ``__cause__`` is what it raised.
    """

    def __init__(self, kind: str, name: str, error: BaseException) -> None:
        super().__init__(
            f"the {kind} {name!r} raised {describe(error)}; the run cannot continue without its "
            "result"
        )
        self.kind = kind
        self.name = name


class OutputError(LoopError):
    """The run has no output of the type that it must return.

    ``reason`` says why: the model's attempts were not accepted, or the run ended before it gave
    one. ``attempts`` is the number of attempts that were not accepted.
    """

    def __init__(self, reason: str, attempts: int) -> None:
        super().__init__(f"the run has no output: {reason}")
        self.reason = reason
        self.attempts = attempts


class RunLogError(LoopError):
    """The run log could not be written, so the run was stopped. ``__cause__`` says why."""


class RunLetGo(LoopError):
    """This process gave the run up without ending it: its token was cancelled with
    `clark_agent.cancellation.LET_GO`.

    The log has every call that has ended, and no end of the run, so that another process can resume
    it.
    """

    def __init__(self) -> None:
        super().__init__("the run was let go: it has not ended, and can be resumed if it has a log")


class InvalidContinuationError(LoopError):
    """`run_continue` has nothing that a model could answer."""


class EmptyOutcomeError(LoopError):
    """The model stopped without a tool call more often than allowed."""

    def __init__(self, budget: int, observed: int) -> None:
        super().__init__(
            f"the model stopped {observed} times without calling a tool; "
            f"empty_outcome_retry_budget allows {budget}"
        )
        self.budget = budget
        self.observed = observed


def failure_of(error: BaseException) -> LoopError | None:
    """The error that carries the state of the run: itself, or its cause."""
    if isinstance(error, LoopError):
        return error
    return error.__cause__ if isinstance(error.__cause__, LoopError) else None


# --- errors of a decision ---------------------------------------------------------------------


class RequestError(ClarkAgentError):
    """A request that waits cannot be decided like this. Nothing was recorded, unless the text says
    so.
    """

    def __init__(self, text: str, request_id: str) -> None:
        super().__init__(text)
        self.request_id = request_id


class RequestNotFound(RequestError):
    """The run has no such request."""

    def __init__(self, request_id: str, run_id: str) -> None:
        super().__init__(f"the run {run_id!r} has no request {request_id!r}", request_id)
        self.run_id = run_id


class AlreadyDecided(RequestError):
    """The request was decided before: ``decision``, ``by`` whom, and ``at`` what time (Unix ms)."""

    def __init__(self, request_id: str, decision: Any, by: str | None, at: int) -> None:
        who = "" if by is None else f" by {by}"
        what = str(decision.__struct_config__.tag)
        super().__init__(f"the request {request_id!r} is already decided{who}: {what}", request_id)
        self.decision = decision
        self.by = by
        self.at = at


class RequestExpired(RequestError):
    """The time of the request was over at ``at`` (Unix ms). This is recorded."""

    def __init__(self, request_id: str, at: int) -> None:
        super().__init__(f"the time to decide the request {request_id!r} is over", request_id)
        self.at = at


class DecisionNotApplicable(RequestError):
    """The decision does not fit the request: a call that waits for its result has already run."""


# --- errors of a store ------------------------------------------------------------------------


class RunStoreError(ClarkAgentError):
    """A store of runs cannot do what was requested. ``run_id`` is the run, if it is about one."""

    def __init__(self, text: str, run_id: str | None = None) -> None:
        super().__init__(text)
        self.run_id = run_id


class RunNotFound(RunStoreError):
    """The store has no run with that id."""

    def __init__(self, run_id: str, text: str | None = None) -> None:
        super().__init__(text or f"run {run_id!r} not found", run_id)


class RunExists(RunStoreError):
    """The store already has a run with that id."""

    def __init__(self, run_id: str, text: str | None = None) -> None:
        super().__init__(text or f"run {run_id!r} already exists", run_id)


class RunBusy(RunStoreError):
    """The run has another writer, or had one since its log was read.

    Do not continue the run: the other writer does.
    """

    def __init__(self, run_id: str, text: str | None = None) -> None:
        super().__init__(
            text
            or f"the run {run_id!r} is being written: another process, thread or task has started "
            "or resumed it and has not ended it yet",
            run_id,
        )

    @classmethod
    def changed(cls, run_id: str, last: int, after: int) -> RunBusy:
        """The log has grown, or shrunk, since it was read."""
        return cls(
            run_id,
            f"the run {run_id!r} has changed since its log was read: it ends with record {last}, "
            f"not {after}; another process, thread or task has continued it",
        )


class RunTakenOver(RunBusy):
    """Another process has taken the run over, because the lease of this one was over. A run that
    learns this lets go: it raises `RunLetGo`.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(
            run_id,
            f"the run {run_id!r} was taken over by another process: the lease of this one was over",
        )


# --- errors of a tool -------------------------------------------------------------------------


class ToolError(ClarkAgentError):
    """Raised by a tool to say what a failure means. Any other exception fails the call."""


class ToolExecutionError(ToolError):
    """The call failed. The model gets the text as an error result."""


class ModelRetry(ToolError):
    """Raised by a tool or an output validator: the model gets the text and should try again."""


class ToolAborted(ToolError):
    """The call was cancelled and the run should end as aborted."""


class ToolFatal(ToolError):
    """The run must end as failed. Use sparingly: the model can handle most failures."""


class ToolSuspended(ToolError):
    """The call ends without a result: a decision will be its result.

    The run is suspended. The tool is not called again: `clark_agent.waiting.GiveResult`, an event
    or the end of a time gives the result, and `clark_agent.waiting.Deny` refuses it. The arguments
    are those of `clark_agent.waiting.Suspend`.

    With ``continues``, the tool is called again instead, with the same arguments, and finds what
    was given in `clark_agent.tools.ToolContext.continued`. It may raise this again.
    """

    def __init__(
        self,
        request: Any = None,
        *,
        expires_in: float | None = None,
        until: Any = None,
        event: str | None = None,
        assignee: str | None = None,
        continues: bool = False,
    ) -> None:
        super().__init__("the call waits for its result")
        self.request = request
        self.expires_in = expires_in
        self.until = until
        self.event = event
        self.assignee = assignee
        self.continues = continues


class ToolContractError(ToolError, TypeError):
    """A tool, or a hook instead of it, did not return a `ToolResult`: a bug, not a failed call."""


class ToolValidationError(ToolError):
    """The arguments are invalid. The model gets the text and may try again."""


class InvalidArgumentsError(ToolValidationError):
    """Arguments of the wrong type or value."""

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(f"invalid arguments for {tool!r}: {reason}")
        self.tool = tool
        self.reason = reason


class MissingFieldError(ToolValidationError):
    """An argument is missing that the chosen action needs."""

    def __init__(self, tool: str, action: str, field: str) -> None:
        super().__init__(f"{tool!r} needs the argument {field!r} for the action {action!r}")
        self.tool = tool
        self.action = action
        self.field = field
