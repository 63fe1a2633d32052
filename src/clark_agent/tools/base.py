"""What a tool is: its description, its flags, the context in which it runs and its result.

`AgentTool` is the base class of all tools. Most are easier to write with
`clark_agent.tools.tool`, where a function's signature is the whole declaration.

This module knows neither the loop nor the events: a running tool reaches them only through its
`ToolContext`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from inspect import iscoroutinefunction, unwrap
from threading import Lock
from types import FunctionType
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._finished import FINISHED
from clark_agent._kept_text import OpenKept
from clark_agent._threads import call_in_loop, is_running
from clark_agent._typing import DepsT_co, DepsT_contra
from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ModelRetry, ToolDefinitionError
from clark_agent.stream import ToolSchema
from clark_agent.tools.identity import ToolIdentityPolicy
from clark_agent.types import AgentMessage, RunIdentity, TextContent, ToolResultBlock

__all__ = [
    "NEVER_CLIP",
    "AgentTool",
    "Continued",
    "Emit",
    "ToolContext",
    "ToolHistoryPolicy",
    "ToolResult",
    "check_max_result_chars",
    "check_tool_name",
    "is_tool_name",
]

NEVER_CLIP: Final = "never"
"""As ``max_result_chars``: the results of this tool are kept whole."""

# How often a thread that waits for its update to be emitted checks whether to stop waiting.
_POLL_SECONDS = 0.05

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_NAME_LENGTH = 64

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


# --- the result -------------------------------------------------------------------------------


class ToolResult(Struct, frozen=True, omit_defaults=True):
    """The outcome of a tool call.

    The model sees ``content``. ``details`` is structured data for the host, ``narration`` a
    one-sentence caption for people. ``terminate`` votes to end the run: it ends when every counted
    result of the batch votes so.
    """

    content: tuple[ToolResultBlock, ...]
    is_error: bool = False
    details: Any = None
    terminate: bool = False
    narration: str | None = None

    @classmethod
    def text(cls, text: str, *, details: Any = None) -> ToolResult:
        """A plain success."""
        return cls((TextContent(text),), details=details)

    @classmethod
    def terminal(cls, text: str, *, details: Any = None) -> ToolResult:
        """A success that votes to end the run."""
        return cls((TextContent(text),), details=details, terminate=True)

    @classmethod
    def error(cls, text: str, *, details: Any = None) -> ToolResult:
        """A failure that the model can react to. It does not end the run."""
        return cls((TextContent(text),), is_error=True, details=details)

    def with_narration(self, narration: str) -> ToolResult:
        """The same result with a caption; a blank one changes nothing."""
        narration = narration.strip()
        return replace(self, narration=narration) if narration else self

    @property
    def plain_text(self) -> str:
        """The text, joined over all text blocks."""
        return "".join([b.text for b in self.content if type(b) is TextContent])


# --- the context of a running tool ------------------------------------------------------------


Emit: TypeAlias = Callable[[ToolResult], Awaitable[None]]
"""Where progress goes. Called on the event loop's thread."""


class ParentRun(Protocol):
    """The part of the run around a tool call that the tool may use."""

    signal: CancellationToken
    deps: Any

    def identify(self) -> RunIdentity:
        """The identity of the run. Made when first needed, if the host has not set one."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop."""
        ...

    @property
    def messages(self) -> Sequence[AgentMessage]:
        """The transcript so far."""
        ...

    @property
    def reports_progress(self) -> bool:
        """Whether anything listens to the progress of calls."""
        ...

    def report(self, ctx: ToolContext, partial: ToolResult) -> Awaitable[None]:
        """Send the progress of the call to the listeners."""
        ...

    def find_kept(self, result_id: str) -> tuple[OpenKept, int]:
        """How to read a large result that the run may read."""
        ...


class _NoRun:
    """Stands in for the run of a tool that is called by itself."""

    _identity: RunIdentity | None = None
    messages: Sequence[AgentMessage] = ()

    def __init__(
        self,
        signal: CancellationToken | None,
        emit: Emit | None,
        loop: asyncio.AbstractEventLoop | None,
        deps: object,
    ) -> None:
        self.signal = CancellationToken() if signal is None else signal
        self.deps = deps
        self._emit = emit
        self.reports_progress = emit is not None
        self.loop = loop
        if emit is not None:
            self.loop = loop or asyncio.get_running_loop()

    def identify(self) -> RunIdentity:
        if self._identity is None:
            self._identity = RunIdentity.root()
        return self._identity

    def report(self, ctx: ToolContext, partial: ToolResult) -> Awaitable[None]:
        return FINISHED if self._emit is None else self._emit(partial)

    def find_kept(self, result_id: str) -> tuple[OpenKept, int]:
        raise ModelRetry(f"there is no result with the id {result_id!r}: no run is there")


_NO_RESULT = object()

# An event loop keeps no strong reference to its tasks, and a thread may stop waiting for its own.
_reports: set[asyncio.Task[None]] = set()

_making_a_signal = Lock()


class Continued(Struct, frozen=True):
    """A tool goes on: what it had asked for, and what it was given."""

    request: Any
    """The request of its `clark_agent.ToolSuspended`, as JSON."""
    result: ToolResult
    """Of `clark_agent.waiting.GiveResult`, an event, or the time."""


class ToolContext(Generic[DepsT_co]):
    """The context of a running tool: its call, the signal to stop, and a way to report progress.

    For a test of a tool, ``ToolContext(tool_call_id="c", tool_name="t")`` is enough: nothing
    listens and nothing cancels. With ``emit`` it must be made on the event loop's thread.
    """

    position = 0
    """The index of the call in its message."""
    turn = 0
    """The turn of the run, from 1."""
    children = 0
    """How many child runs the call has started."""
    _runs_below: set[asyncio.Task[Any]] | None = None
    _signal: CancellationToken | None = None
    _settled = False
    _reporting: asyncio.Task[None] | None = None
    is_reporting = False
    """Whether listeners are receiving an update of the tool."""
    when_reported: Callable[[], object] | None = None
    """Called as soon as they have it."""
    when_settled: Callable[[], object] | None = None
    """Called as soon as the call is over, as far as the run is concerned. The tool may still run.
    """
    plain_result: object = _NO_RESULT
    """A result that was checked where it was made."""
    continued: Continued | None = None
    """What a tool that has raised `clark_agent.ToolSuspended` with ``continues`` was given."""
    failure_below: Exception | None = None
    """Why the run must end even if the tool handles the error: a child run could not be logged."""

    def __init__(
        self,
        *,
        tool_call_id: str,
        tool_name: str,
        signal: CancellationToken | None = None,
        emit: Emit | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        run: ParentRun | None = None,
        deps: DepsT_co | None = None,
    ) -> None:
        self.tool_call_id = tool_call_id
        self.tool_name = tool_name
        self._run: ParentRun = _NoRun(signal, emit, loop, deps) if run is None else run
        if signal is not None:
            self._signal = signal

    @property
    def signal(self) -> CancellationToken:
        """Cancelled when the call should stop. Made when first read."""
        if self._signal is None:
            with _making_a_signal:
                if self._signal is None:
                    self._signal = self._run.signal.child()
        return self._signal

    @property
    def deps(self) -> DepsT_co:
        """The dependencies that the run was started with."""
        deps: DepsT_co = self._run.deps
        return deps

    @property
    def idempotency_key(self) -> str:
        """The call's own key, ``run/turn/position``: the same when the call is run again after a
        crash, in any process. Pass it to services that accept one.
        """
        return f"{self.identity.run_id}/{self.turn}/{self.position}"

    @property
    def is_watched(self) -> bool:
        """Whether the tool waits for the signal or has added a callback to it."""
        return self._signal is not None and self._signal.is_watched

    @property
    def messages(self) -> Sequence[AgentMessage]:
        """The transcript of the run so far, with its history. It ends with the answer that has made
        the call. Reading it copies nothing. Empty in a test.
        """
        return self._run.messages

    @property
    def run(self) -> ParentRun | None:
        """The run that called the tool, to start a child run. None in a test."""
        return None if isinstance(self._run, _NoRun) else self._run

    @property
    def runs_below(self) -> set[asyncio.Task[Any]]:
        """The tasks of the child runs of the call that are in progress."""
        if self._runs_below is None:
            self._runs_below = set()
        return self._runs_below

    @property
    def is_settled(self) -> bool:
        """Whether the call is over, as far as the run is concerned."""
        return self._settled

    @property
    def identity(self) -> RunIdentity:
        """The identity of the run. A run whose context has none is a fresh root."""
        return self._run.identify()

    def find_kept(self, result_id: str) -> tuple[OpenKept, int]:
        """How to open a result that `clark_agent.plugins.LargeResults` has kept, and
        how many characters to show at once. Raises `ModelRetry` if the run may not.
        """
        return self._run.find_kept(result_id)

    def update(self, partial: ToolResult | str) -> Awaitable[None]:
        """Report progress.

        In an async tool await it. In a sync tool, which runs in a thread of its own, call it
        plainly: it returns when the event was emitted, or as soon as the call is over.

        Contract: progress that is reported after the tool has returned is dropped. An exception of
        a listener is raised here.
        """
        run = self._run
        if self._settled or not run.reports_progress:
            return FINISHED
        result = ToolResult.text(partial) if isinstance(partial, str) else partial
        if is_running(run.loop):
            return self._report(result)
        assert run.loop is not None
        self._report_and_wait(run.loop, result)
        return FINISHED

    async def _report(self, result: ToolResult) -> None:
        if self._settled:
            return
        self.is_reporting = True
        try:
            await self._run.report(self, result)
        finally:
            self.is_reporting = False
            if self.when_reported is not None:
                self.when_reported()

    def _report_and_wait(self, loop: asyncio.AbstractEventLoop, result: ToolResult) -> None:
        """Pass the update to the event loop's thread, and wait until it is emitted or dropped."""
        done: Future[None] = Future()

        async def report() -> None:
            try:
                await self._report(result)
            except asyncio.CancelledError:  # the loop is shutting down; the thread need not know
                done.set_result(None)
                raise
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        def start() -> None:
            # Made here: if the loop never runs this, no coroutine is left without an await.
            task = self._reporting = loop.create_task(report())
            _reports.add(task)
            task.add_done_callback(_reports.discard)

        if not call_in_loop(loop, start):
            return
        while not self._settled and not self.signal.cancelled and loop.is_running():
            wait([done], _POLL_SECONDS)
            if done.done():
                done.result()
                return

    def settle(self, *, drop: bool = True) -> None:
        """Mark the call as over: further progress is dropped.

        With ``drop``, an update that is being sent is cancelled too.
        """
        self._settled = True
        if self.when_settled is not None:
            self.when_settled()
        if drop and self._reporting is not None:
            self._reporting.cancel()

    def __repr__(self) -> str:
        return f"<ToolContext {self.tool_name} {self.tool_call_id}>"


# --- the tool ---------------------------------------------------------------------------------


class ToolHistoryPolicy(Struct, frozen=True, kw_only=True, gc=False):
    """What a plugin that trims the transcript may do with the results of a tool.

    The loop itself does not look at it.
    """

    dedup_arg: str | None = None
    """Of calls with the same string in this argument, only the last result needs to be kept."""
    summary_arg: str | None = None
    """The argument to show when a call is summarised in one line."""
    compactable_result: bool = False
    """Old results may be dropped: the tool can be called again."""
    pins_active_plan: bool = False
    """The newest result is the plan that the model follows, and is kept."""
    keeps_result: bool = False
    """Results are never left out, for example because they are decisions of a person."""


class AgentTool(Generic[DepsT_contra]):
    """A tool that the model may call.

    A subclass has a ``name``, a ``description``, a ``parameters_schema`` (the JSON schema of the
    arguments, sent as it is) and `execute`. The flags are class attributes; an instance may set its
    own in ``__init__``, before its `schema` is first read.
    """

    name: str = ""
    description: str = ""
    parameters_schema: dict[str, Any] = _NO_PARAMETERS

    requires_exclusive_sandbox: bool = False
    """It must run alone: a batch with such a tool runs one call at a time."""
    max_result_chars: int | Literal["never"] | None = None
    """How much of a result the model gets, and later turns keep, if a plugin limits that; None is
    the plugin's default. See `clark_agent.plugins.LargeResults` and `NEVER_CLIP`.
    """
    history_policy: ToolHistoryPolicy = ToolHistoryPolicy()
    """What plugins may do with old results."""
    identity_policy: ToolIdentityPolicy = ToolIdentityPolicy()
    """When two calls count as the same."""
    aborts_siblings_on_error: bool = False
    """When a call fails, the calls that run beside it are cancelled."""
    counts_toward_tool_call_limit: bool = True
    """Its calls count toward ``max_tool_calls_per_turn``."""
    parallel_safe_per_turn: bool = False
    """Any number of calls in one turn is fine: they do not count toward that limit."""
    counts_toward_termination_vote: bool = True
    """Its results vote on whether the run ends. A progress note should not."""
    timeout: float | None = None
    """Seconds after which a call fails; None uses the config's ``tool_timeout``."""
    runs_in_thread: bool = False
    """It blocks a thread, which cannot be stopped from outside but may check its signal."""
    idempotent: bool = False
    """A second call changes nothing more, so it may run again after a crash."""
    reads_only: bool = False
    """It changes nothing and sends nothing out: `clark_agent.toolkit.ApprovalGate` does not ask
    about it."""
    runs_agent: bool = False
    """It does nothing but run an agent, whose log has the outcome."""
    is_final_answer: bool = False
    """When a call to it ends the run, `output` of its arguments is the run's answer."""

    _schema: ToolSchema | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__dict__.get("name")
        if isinstance(name, str) and name:
            check_tool_name(name, cls.__qualname__)
        execute = cls.__dict__.get("execute")
        if isinstance(execute, FunctionType) and not iscoroutinefunction(unwrap(execute)):
            raise ToolDefinitionError(f"{cls.__qualname__}.execute must be an async def")

    def __init__(self) -> None:
        cls = type(self)
        if cls.execute is AgentTool.execute:
            raise ToolDefinitionError(
                f"{cls.__qualname__} has no execute: define "
                "'async def execute(self, args, ctx) -> ToolResult'"
            )
        # A class with its own __init__ may still set the name; the registry checks it too.
        if cls.__init__ is AgentTool.__init__:
            check_tool_name(self.name, cls.__qualname__)

    def prepare_arguments(self, args: Any) -> Any:
        """The arguments in the form that `validate` expects.

        Contract: pure; returns new arguments or the given ones, and changes nothing in place.
        """
        return args

    def validate(self, args: Any) -> Any:
        """Check the arguments.

        Contract: raises `ToolValidationError` with a text that the model can act on. The returned
        value goes to `execute` instead of the arguments; None leaves them unchanged.
        """
        return None

    async def execute(self, args: Any, ctx: ToolContext[DepsT_contra]) -> ToolResult:
        """Do the work.

        Contract: an exception becomes an error result that the model sees, except `ToolFatal` and
        `ToolAborted`, which end the run. Stop soon after ``ctx.signal`` is cancelled.
        """
        raise NotImplementedError

    def preview(self, args: Any) -> str | None:
        """What a call with these arguments would change, for the person who has to approve it.

        A unified diff, for example. None if the arguments, which are always shown, are enough.

        Contract: has no effects. May block: it is called in a thread. If it raises, the call is
        shown without a preview.
        """
        return None

    def did_it_happen(self, key: str) -> Awaitable[ToolResult | None] | ToolResult | None:
        """The result of the call with this `ToolContext.idempotency_key`, if it has happened.

        Called when a run is resumed, about a call that had started and has no result. None means
        that it is not known: the result says that the call may or may not have happened.

        Contract: has no effects. May be ``async``; a plain ``def`` must not block. If it raises, it
        is not known.
        """
        return None

    def output(self, args: Any) -> Any:
        """The answer of a run that a call with these arguments ended; see ``is_final_answer``."""
        return args

    @property
    def schema(self) -> ToolSchema:
        """The tool as the model sees it. Made once."""
        schema = self._schema
        if schema is None:
            check_tool_name(self.name, type(self).__qualname__)
            check_max_result_chars(self)
            schema = ToolSchema(self.name, self.description, self.parameters_schema)
            self._schema = schema
        return schema

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def is_tool_name(name: str) -> bool:
    """Whether every provider accepts the name: 1 to 64 letters, digits, ``_`` and ``-``."""
    return 0 < len(name) <= _NAME_LENGTH and _NAME_CHARACTERS.issuperset(name)


def check_max_result_chars(tool: AgentTool) -> None:
    """Raise unless it is a number of characters, `NEVER_CLIP` or None."""
    limit: Any = tool.max_result_chars
    if limit not in (None, NEVER_CLIP) and (type(limit) is not int or limit < 1):
        raise ToolDefinitionError(
            f"max_result_chars of {tool.name!r} must be a number of characters, NEVER_CLIP or "
            f"None, not {limit!r}"
        )


def check_tool_name(name: object, owner: str) -> None:
    """Raise unless every provider accepts the name; ``owner`` is the tool's class or function."""
    if not name:
        raise ToolDefinitionError(f"{owner} has no name: set 'name = \"…\"' in the class")
    if not isinstance(name, str) or not is_tool_name(name):
        raise ToolDefinitionError(
            f"{owner}: invalid tool name {name!r}; use "
            f"1 to {_NAME_LENGTH} letters, digits, '_' and '-'"
        )
