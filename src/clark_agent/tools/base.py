"""What a tool is: its description, its flags, what it gets when it runs and what it gives back.

`AgentTool` is the base class of all tools. Most are easier to write with what
`clark_agent.tools` builds on it, where a function's signature is the whole declaration.

This module knows neither the loop nor the events: a running tool reaches them only through the
callable in its `ToolContext`.
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
from clark_agent._threads import call_in_loop, is_running
from clark_agent._typing import DepsT_co, DepsT_contra
from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ToolDefinitionError
from clark_agent.stream import ToolSchema
from clark_agent.tools.identity import ToolIdentityPolicy
from clark_agent.types import AgentMessage, RunIdentity, TextContent, ToolResultBlock

__all__ = [
    "NEVER_CLIP",
    "AgentTool",
    "Emit",
    "ToolContext",
    "ToolHistoryPolicy",
    "ToolResult",
    "check_tool_name",
    "is_tool_name",
]

NEVER_CLIP: Final = "never"
"""As ``max_result_chars``: the results of this tool are kept whole."""

# How often a thread that waits for its update to be out looks whether waiting still makes sense.
_POLL_SECONDS = 0.05

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_NAME_LENGTH = 64

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


# --- what comes back --------------------------------------------------------------------------


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


# --- what a running tool gets -----------------------------------------------------------------


Emit: TypeAlias = Callable[[ToolResult], Awaitable[None]]
"""Where progress goes. Called on the event loop's thread."""


class ParentRun(Protocol):
    """The run around a tool call, as far as a tool may know it."""

    signal: CancellationToken
    deps: Any

    def identify(self) -> RunIdentity:
        """Whose run it is. Made when first asked for, if the host has not said."""
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
    def tells_progress(self) -> bool:
        """Whether anybody wants to know how far a call has come."""
        ...

    def report(self, ctx: ToolContext, partial: ToolResult) -> Awaitable[None]:
        """Tell listeners how far the call has come."""
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
        self.tells_progress = emit is not None
        self.loop = loop
        if emit is not None:
            self.loop = loop or asyncio.get_running_loop()

    def identify(self) -> RunIdentity:
        if self._identity is None:
            self._identity = RunIdentity.root()
        return self._identity

    def report(self, ctx: ToolContext, partial: ToolResult) -> Awaitable[None]:
        return FINISHED if self._emit is None else self._emit(partial)


_NO_RESULT = object()

# An event loop does not hold on to its tasks, and a thread may stop waiting for its own.
_reports: set[asyncio.Task[None]] = set()

_making_a_signal = Lock()


class ToolContext(Generic[DepsT_co]):
    """What a running tool gets: which call it is, the signal to stop, and a way to tell progress.

    For a test of a tool, ``ToolContext(tool_call_id="c", tool_name="t")`` will do: nothing
    listens and nothing cancels. With ``emit`` it must be made on the event loop's thread.
    """

    position = 0
    """Which call of the message it is."""
    _signal: CancellationToken | None = None
    _settled = False
    _reporting: asyncio.Task[None] | None = None
    is_reporting = False
    """Whether listeners are receiving an update of the tool."""
    when_reported: Callable[[], object] | None = None
    """What to do as soon as they are."""
    plain_result: object = _NO_RESULT
    """A result that needs no check, because what makes it has checked it."""
    failure_below: Exception | None = None
    """Why the run must end, whatever the tool makes of it: a run below could not be logged."""

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
    def is_watched(self) -> bool:
        """Whether the tool waits for the signal or left a callback with it."""
        return self._signal is not None and self._signal.is_watched

    @property
    def run(self) -> ParentRun | None:
        """The run that called the tool, for those who start another below it. None in a test."""
        return None if isinstance(self._run, _NoRun) else self._run

    @property
    def is_settled(self) -> bool:
        """Whether the call is over, as far as the run is concerned."""
        return self._settled

    @property
    def identity(self) -> RunIdentity:
        """Whose run it is. A run whose context has no identity is a fresh root."""
        return self._run.identify()

    def update(self, partial: ToolResult | str) -> Awaitable[None]:
        """Report progress.

        In an async tool await it. In a sync tool, which runs in a thread of its own, call it
        plainly: it returns when the event is out, or as soon as the call is over.

        Contract: what is reported after the tool has returned is dropped. An exception of a
        listener comes out here.
        """
        run = self._run
        if self._settled or not run.tells_progress:
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
        """Hand the update to the event loop's thread, and wait while that can help."""
        done: Future[None] = Future()

        async def report() -> None:
            try:
                await self._report(result)
            except asyncio.CancelledError:  # the loop is shutting down: no matter to the thread
                done.set_result(None)
                raise
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        def start() -> None:
            # Made only now: if the loop never comes here, no coroutine is left without an await.
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
        """The tool has returned: what it still reports is dropped.

        Also what is on its way, unless listeners should be left to finish with it.
        """
        self._settled = True
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
    """Of two calls with the same string here, only the later result is worth keeping."""
    summary_arg: str | None = None
    """The argument to show when a call is summarised in one line."""
    compactable_result: bool = False
    """Old results may go: the tool can be called again."""
    pins_active_plan: bool = False
    """The newest result is the plan that the model works by, and stays."""


class AgentTool(Generic[DepsT_contra]):
    """A tool that the model may call.

    A subclass has a ``name``, a ``description``, a ``parameters_schema`` (the JSON schema of the
    arguments, sent as it is) and `execute`. The flags are class attributes; an instance may set its
    own in ``__init__``, before anybody has asked for its `schema`.
    """

    name: str = ""
    description: str = ""
    parameters_schema: dict[str, Any] = _NO_PARAMETERS

    requires_exclusive_sandbox: bool = False
    """Nothing may run beside it: a batch with such a tool runs one call at a time."""
    max_result_chars: int | Literal["never"] | None = None
    """How much of a result later turns keep; None is the plugin's default, see `NEVER_CLIP`."""
    history_policy: ToolHistoryPolicy = ToolHistoryPolicy()
    """What may become of old results."""
    identity_policy: ToolIdentityPolicy = ToolIdentityPolicy()
    """When two calls are the same."""
    aborts_siblings_on_error: bool = False
    """When a call fails, those running beside it are of no use and are cancelled."""
    counts_toward_tool_call_limit: bool = True
    """A call takes one of the places that ``max_tool_calls_per_turn`` allows."""
    parallel_safe_per_turn: bool = False
    """Any number of calls in one turn is fine: they take no such place."""
    counts_toward_termination_vote: bool = True
    """Its results vote on whether the run ends. A mere note of progress should not."""
    timeout: float | None = None
    """Seconds after which a call has failed; None is the loop's own setting."""
    runs_in_thread: bool = False
    """It blocks a thread, which cannot be stopped from outside but may look at its signal."""
    idempotent: bool = False
    """Calling it twice does no more than calling it once: it may run again after a crash."""
    reads_only: bool = False
    """It changes nothing and sends nothing out: `clark_agent.toolkit.ApprovalGate` does not ask
    about it."""
    runs_agent: bool = False
    """All that it does is run an agent, whose log tells what came of it."""
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
            raise ToolDefinitionError(f"{cls.__qualname__}.execute must be an 'async def'")

    def __init__(self) -> None:
        cls = type(self)
        if cls.execute is AgentTool.execute:
            raise ToolDefinitionError(
                f"{cls.__qualname__} has no execute: define "
                "'async def execute(self, args, ctx) -> ToolResult'"
            )
        # A class with an __init__ of its own may be about to set the name; the registry looks too.
        if cls.__init__ is AgentTool.__init__:
            check_tool_name(self.name, cls.__qualname__)

    def prepare_arguments(self, args: Any) -> Any:
        """The arguments in the form that `validate` expects.

        Contract: pure; returns new arguments or the given ones, and changes nothing in place.
        """
        return args

    def validate(self, args: Any) -> Any:
        """Refuse arguments that will not do.

        Contract: raises `ToolValidationError` with a text that the model can act on. What is
        returned goes to `execute` instead of the arguments; None leaves them as they are.
        """
        return None

    async def execute(self, args: Any, ctx: ToolContext[DepsT_contra]) -> ToolResult:
        """Do the work.

        Contract: any exception becomes an error result that the model sees, but `ToolFatal` and
        `ToolAborted`, which end the run. Stop soon after ``ctx.signal`` is cancelled.
        """
        raise NotImplementedError

    def preview(self, args: Any) -> str | None:
        """What a call with these arguments would change, for the person who has to approve it.

        A unified diff, for example. None: the arguments say it all; they are shown in any case.

        Contract: has no effects. May block, it is called in a thread. If it raises, the call is
        shown without a preview.
        """
        return None

    def output(self, args: Any) -> Any:
        """The answer of a run that such a call has ended; see ``is_final_answer``."""
        return args

    @property
    def schema(self) -> ToolSchema:
        """The tool as the model sees it. Made once."""
        schema = self._schema
        if schema is None:
            check_tool_name(self.name, type(self).__qualname__)
            schema = ToolSchema(self.name, self.description, self.parameters_schema)
            self._schema = schema
        return schema

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def is_tool_name(name: str) -> bool:
    """Whether every provider takes the name: 1 to 64 letters, digits, ``_`` and ``-``."""
    return 0 < len(name) <= _NAME_LENGTH and _NAME_CHARACTERS.issuperset(name)


def check_tool_name(name: object, owner: str) -> None:
    """Raise unless every provider takes the name; ``owner`` says whose it is."""
    if not name:
        raise ToolDefinitionError(f"{owner} has no name: set 'name = \"…\"' in the class")
    if not isinstance(name, str) or not is_tool_name(name):
        raise ToolDefinitionError(
            f"{owner}: {name!r} will not do as the name of a tool; providers take "
            f"1 to {_NAME_LENGTH} letters, digits, '_' and '-'"
        )
