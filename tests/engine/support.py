"""What the loop is tested with: runs that are checked all over, and tools that do as they are told.

`observed_run` is the way in. Whatever a test is about, it also checks of every run that its events
keep to the grammar, that they tell of the very messages that the run returned or its error carries,
that a provider would take these, that all listeners saw the same, and that no task is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from inspect import isawaitable
from typing import Any, TypeVar

from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentEvent,
    AgentMessage,
    AgentTool,
    AssistantMessage,
    CancellationToken,
    FunctionPlugin,
    LoopConfig,
    LoopError,
    RunResult,
    StopReason,
    StreamErrorKind,
    StreamFn,
    SystemMessage,
    TextContent,
    ToolCall,
    ToolContext,
    ToolFatal,
    ToolResult,
    ToolResultMessage,
    Usage,
    UserMessage,
    run,
    run_continue,
)
from clark_agent.errors import InvalidArgumentsError, InvalidContinuationError
from clark_agent.history import repair_history
from clark_agent.stream import Chunk, Done, Error, Start, StreamEvent, TextChunk
from clark_agent.testing import (
    FakeClock,
    RecordingSink,
    ScriptedStream,
    Step,
    check_events,
    fold_events,
    say,
)

E = TypeVar("E", bound=BaseException)

CONTEXT = AgentContext("You are under test.")
PLACEHOLDER = AssistantMessage((), StopReason.OTHER)
FALLBACK_ID = "plain_text_terminal_fallback_"

Prompts = str | AgentMessage | Iterable[AgentMessage]
OnEvent = Callable[[AgentEvent], Awaitable[None] | None]


# --- runs -------------------------------------------------------------------------------------


async def observed_run(
    model: StreamFn | Iterable[Step],
    *tools: AgentTool,
    prompts: Prompts | None = "go",
    context: AgentContext = CONTEXT,
    signal: CancellationToken | None = None,
    on_event: OnEvent | None = None,
    valid: bool = True,
    leaves_tasks: bool = False,
    **settings: Any,
) -> tuple[RunResult | BaseException, RecordingSink]:
    """Run, check what holds of every run, and give the result or the error with the events.

    ``prompts=None`` continues the context instead. ``valid=False`` is for models that break the
    rules themselves, with ids that repeat, so that no transcript of theirs is one for a provider.
    """
    settings.setdefault("clock", FakeClock())
    stream = model if callable(model) else ScriptedStream(model)
    config = LoopConfig(stream=stream, tools=tools, **settings)
    return await observe(
        config,
        prompts=prompts,
        context=context,
        signal=signal,
        on_event=on_event,
        valid=valid,
        leaves_tasks=leaves_tasks,
    )


async def observe(
    config: LoopConfig,
    *,
    prompts: Prompts | None = "go",
    context: AgentContext = CONTEXT,
    signal: CancellationToken | None = None,
    on_event: OnEvent | None = None,
    valid: bool = True,
    leaves_tasks: bool = False,
) -> tuple[RunResult | BaseException, RecordingSink]:
    """The same for a config."""
    sink, observer = RecordingSink(), RecordingSink()

    async def listen(event: AgentEvent) -> None:
        sink(event)
        if on_event is not None and isawaitable(pending := on_event(event)):
            await pending

    def listen_at_once(event: AgentEvent) -> None:
        sink(event)

    config = config.replace(
        event_sink=listen_at_once if on_event is None else listen,
        plugins=(*config.plugins, FunctionPlugin("event_observer", observer, name="observer")),
    )
    history = context.messages
    task, tasks_before = asyncio.current_task(), asyncio.all_tasks()
    assert task is not None
    cancelling = task.cancelling()
    outcome: RunResult | BaseException
    try:
        if prompts is None:
            outcome = await run_continue(context, config, signal)
        else:
            outcome = await run(prompts, context, config, signal)
    except BaseException as error:
        outcome = error
    if not isinstance(outcome, asyncio.CancelledError):
        assert task.cancelling() == cancelling, "the run kept a cancellation of its own"
    if not leaves_tasks:
        assert asyncio.all_tasks() - tasks_before == set(), "the run left tasks behind"
    assert context.messages is history, "the run changed the context that it was given"
    check_outcome(outcome, sink.events, valid=valid)
    assert [id(event) for event in observer.events] == [id(event) for event in sink.events]
    return outcome, sink


def check_outcome(
    outcome: RunResult | BaseException, events: Sequence[AgentEvent], *, valid: bool = True
) -> None:
    """What holds of every run, however it ended."""
    if isinstance(outcome, InvalidContinuationError):
        assert not events
        return
    check_events(events)
    messages = carried(outcome)
    if messages is None:
        return
    assert fold_events(events) == messages
    if isinstance(outcome, LoopError) and outcome.partial is not None:
        assert outcome.partial not in messages
    if valid:
        assert [c for c in repair_history(messages).changes if not is_fallback(c)] == []


def is_fallback(change: Any) -> bool:
    """A synthesized result answers no call: that much is meant."""
    return bool(change.kind == "dropped_result" and change.tool_call_id.startswith(FALLBACK_ID))


def carried(outcome: RunResult | BaseException) -> tuple[AgentMessage, ...] | None:
    """The messages of the run: returned, or on the error, or on the cause of a cancellation."""
    if isinstance(outcome, asyncio.CancelledError):
        assert isinstance(outcome.__cause__, LoopError)
        return outcome.__cause__.messages
    if isinstance(outcome, RunResult | LoopError):
        return outcome.messages
    return None


async def completed(
    model: StreamFn | Iterable[Step], *tools: AgentTool, **settings: Any
) -> tuple[RunResult, RecordingSink]:
    """An observed run that comes to an end."""
    outcome, sink = await observed_run(model, *tools, **settings)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome, sink


async def failed(
    kind: type[E], model: StreamFn | Iterable[Step], *tools: AgentTool, **settings: Any
) -> tuple[E, RecordingSink]:
    """An observed run that ends with an error of this class, and of no other."""
    outcome, sink = await observed_run(model, *tools, **settings)
    if isinstance(outcome, BaseException) and type(outcome) is not kind:
        raise outcome
    assert isinstance(outcome, kind), f"the run should have failed and gave {outcome!r}"
    return outcome, sink


# --- tools ------------------------------------------------------------------------------------

Does = str | ToolResult | BaseException | Callable[[Any, ToolContext], Any]


class Work(AgentTool):
    """A tool that gives a text or a result, raises, or does what a function says.

    It remembers the arguments of every call that reached it. With ``require`` that argument must be
    there; ``prepare`` makes new arguments of the model's.
    """

    description = "a tool"

    def __init__(
        self,
        name: str = "work",
        does: Does = "done",
        *,
        require: str | None = None,
        prepare: Callable[[Any], Any] | None = None,
        **flags: Any,
    ) -> None:
        self.name = name
        self.does = does
        self.require = require
        self.prepare = prepare
        self.calls: list[Any] = []
        for flag, value in flags.items():
            assert hasattr(AgentTool, flag), flag
            setattr(self, flag, value)
        super().__init__()

    def prepare_arguments(self, args: Any) -> Any:
        return args if self.prepare is None else self.prepare(args)

    def validate(self, args: Any) -> None:
        if self.require is not None and self.require not in args:
            raise InvalidArgumentsError(self.name, f"{self.require!r} is missing")

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.calls.append(args)
        value = self.does(args, ctx) if callable(self.does) else self.does
        if isawaitable(value):
            value = await value
        if isinstance(value, BaseException):
            raise value
        return ToolResult.text(value) if isinstance(value, str) else value


FINISH = Work("finish", ToolResult.terminal("finished"))


class Stubborn:
    """A tool's work that waits until it is let go and takes no cancellation for an answer."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.ended = asyncio.Event()
        self.cancellations = 0

    async def __call__(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.started.set()
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancellations += 1
        self.ended.set()
        return ToolResult.text("ended after all")


class Waiting:
    """A tool's work that waits for good; tells when it has begun and when it was cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = False

    async def __call__(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return ToolResult.text("released")


async def let_others_run() -> None:
    """Give every other task so many turns that whatever can go on without waiting has done so."""
    for _ in range(100):
        await asyncio.sleep(0)


def hurry(seconds: float = 100) -> None:
    """Let time pass for the event loop, at once: the timers that are due by then go off."""
    loop: Any = asyncio.get_running_loop()
    if not isinstance(loop, asyncio.BaseEventLoop):  # its timers do not look at its clock
        loop.hurry(seconds)
        return
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
    loop.call_soon(lambda: None)


async def for_good() -> None:
    """Wait until somebody puts an end to it, while time passes."""
    hurry()
    await asyncio.sleep(5)
    raise ToolFatal("nobody has put an end to it")


# --- streams ----------------------------------------------------------------------------------


def failing(
    kind: StreamErrorKind | str, message: str = "broken", *said: str, started: bool = True
) -> list[StreamEvent]:
    """A stream that says something and then fails."""
    chunks = [Chunk(TextChunk(text)) for text in said]
    partial = AssistantMessage(
        (TextContent("".join(said)),) if said else (), StopReason.OTHER, timestamp=7
    )
    start = [Start(PLACEHOLDER)] if started else []
    return [*start, *chunks, Error(partial, StreamErrorKind(kind), message)]


def truncated(text: str = "cut o", *calls: Any) -> AssistantMessage:
    """An answer that ran into the output cap."""
    said = (TextContent(text),) if text else ()
    return AssistantMessage((*said, *calls), StopReason.MAX_TOKENS)


def paid(tokens: int, text: str = "", *calls: ToolCall) -> AssistantMessage:
    """An answer for which the provider reports so many tokens."""
    return replace(say(text, *calls), usage=Usage(tokens))


def done(message: AssistantMessage) -> list[StreamEvent]:
    """A transport that yields the final message alone."""
    return [Done(message)]


# --- looking at what came of it ---------------------------------------------------------------


def results(outcome: Any) -> list[ToolResultMessage]:
    """The tool results of a run, in order."""
    messages = outcome if isinstance(outcome, list | tuple) else carried(outcome)
    assert messages is not None
    return [message for message in messages if isinstance(message, ToolResultMessage)]


def texts(outcome: Any) -> list[str]:
    """The texts of the tool results of a run."""
    return [result.plain_text for result in results(outcome)]


def outline(messages: Iterable[AgentMessage]) -> list[str]:
    """The messages in short, as ``role: text``."""
    return [f"{role(message)}: {text_of(message)}" for message in messages]


def role(message: AgentMessage) -> str:
    return str(message.__struct_config__.tag)


def text_of(message: AgentMessage) -> str:
    match message:
        case SystemMessage():
            return message.content
        case UserMessage() | AssistantMessage() | ToolResultMessage():
            return message.plain_text
        case _:
            return message.kind


def shape(events: Iterable[AgentEvent]) -> list[str]:
    """The events in short: message events with the role, tool events with the call's id."""
    return [short(event) for event in events]


def short(event: AgentEvent) -> str:
    kind = str(event.__struct_config__.tag)
    message = getattr(event, "message", None)
    if kind in ("message_start", "message_end"):
        assert message is not None
        return f"{kind} {role(message)}"
    call_id = getattr(event, "tool_call_id", None)
    return kind if call_id is None else f"{kind} {call_id}"


def decided(result: ToolResultMessage) -> list[tuple[str, str]]:
    """Who has decided what about a call."""
    return [(entry["plugin"], entry["decision"]) for entry in result.details["decided_by"]]
