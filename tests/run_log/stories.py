"""Rich runs to log: each story is a fresh config whose model is a function of what it is asked.

The model looks at how many answers the request shows, so that a run which is resumed in the middle
gets the rest of the story. Whatever a tool does it writes into ``Story.ran``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import count
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    AgentContext,
    AgentEvent,
    AgentMessage,
    AgentTool,
    Answer,
    AssistantMessage,
    BeforeToolCallContext,
    Block,
    Budget,
    CancellationToken,
    ChannelSteering,
    Compaction,
    CustomMessage,
    ExecutionMode,
    FunctionPlugin,
    LoopConfig,
    LoopError,
    MaxTokensRecovery,
    ProtocolPolicy,
    Rewrite,
    RunAborted,
    RunResult,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamRequest,
    SystemMessage,
    TextContent,
    TokenBudget,
    ToolAborted,
    ToolCall,
    ToolContext,
    ToolFatal,
    ToolGateContext,
    ToolResult,
    ToolResultBudget,
    ToolResultMessage,
    TransformContext,
    UniqueToolCallIds,
    Usage,
    UserMessage,
    agent_tool,
    finish_tool,
    run,
    run_continue,
    tool,
)
from clark_agent.errors import failure_of
from clark_agent.history import repair_history
from clark_agent.messages.wire import decode_json, encode_json
from clark_agent.plugins.base import BeforeRequestContext, BeforeToolDecision
from clark_agent.recovery import Double
from clark_agent.run_log import LoadedRun, MemoryStore, RunLog, RunStore
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.memory import MemoryAppender
from clark_agent.run_log.records import Answered, Record, RunBegan, ToolEnded, ToolStarted
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    MessageAssembler,
    ReasoningChunk,
    ReasoningDetailsChunk,
    Start,
    StreamChunk,
    StreamEvent,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
)
from clark_agent.testing import RecordingSink, ScriptedStream, Step, call, say
from clark_agent.tool_source import ToolSourceContext

EMPTY = AssistantMessage((), StopReason.OTHER)

_ids = count(1)


class Ticking:
    """A clock that never says the same twice, in any process of time."""

    def __init__(self) -> None:
        self.time_ms = 1_000_000

    def now_ms(self) -> int:
        self.time_ms += 1
        return self.time_ms

    async def sleep(self, seconds: float) -> None:
        self.time_ms += round(seconds * 1000)
        await asyncio.sleep(0)

    def new_id(self) -> str:
        return f"id-{next(_ids)}"


class Model:
    """Answers by how many answers the request shows."""

    def __init__(self, *steps: Step, history: int = 0, prefix: str = "") -> None:
        self.steps = steps
        self.history = history
        self.prefix = prefix
        self.asked: list[StreamRequest] = []

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.asked.append(request)
        number = self.number(request)
        if number >= len(self.steps):
            yield Error(EMPTY, StreamErrorKind.FATAL, f"no step {number}")
            return
        step = self.steps[number]
        if callable(step):
            step = step(request)
        async for event in ScriptedStream([step])(request, signal):
            await asyncio.sleep(0)
            if isinstance(event, Done):
                event = Done(self._named(event.message, number))
            yield event

    def number(self, request: StreamRequest) -> int:
        """Which answer is due."""
        return sum(isinstance(m, AssistantMessage) for m in request.messages) - self.history

    def _named(self, message: AssistantMessage, number: int) -> AssistantMessage:
        content = [
            replace(block, id=f"{self.prefix}t{number}c{place}")
            if isinstance(block, ToolCall) and block.id.startswith("call_")
            else block
            for place, block in enumerate(message.content)
        ]
        return replace(message, content=tuple(content), usage=message.usage or Usage(100, 10))


class Story:
    """A run before it begins."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.ran: list[str] = []
        self.sink = RecordingSink()
        self.clock = Ticking()
        self.signal = CancellationToken()
        self.steering = ChannelSteering()
        self.prompts: Any = "Go on."
        self.context = AgentContext("You are in a story.")
        self.before: list[Callable[[], object]] = []
        """What happens before it is played."""
        self.models: list[Model] = []
        self.settings: dict[str, Any] = {}
        self.tools: list[Any] = []
        self.tasks: list[asyncio.Task[Any]] = []
        """That in which it is played, for those who want to cancel it."""

    def model(self, *steps: Step, **more: Any) -> Model:
        model = Model(*steps, **more)
        self.models.append(model)
        return model

    def deed(self, name: str = "work", does: Any = "done", **flags: Any) -> Deed:
        made = Deed(self, name, does, **flags)
        self.tools.append(made)
        return made

    def config(self, run_log: RunLog | None = None) -> LoopConfig:
        settings = {
            "stream": self.models[0] if self.models else None,
            "tools": self.tools,
            "event_sink": self.sink,
            "clock": self.clock,
            "run_log": run_log,
            **self.settings,
        }
        return LoopConfig(**settings)

    async def play(self, run_log: RunLog) -> RunResult | BaseException:
        """Run it; the result or the error."""
        config = self.config(run_log)
        for act in self.before:
            act()
        try:
            if self.prompts is None:
                return await run_continue(self.context, config, self.signal)
            return await run(self.prompts, self.context, config, self.signal)
        except (Exception, asyncio.CancelledError) as error:
            return error

    @property
    def was_asked(self) -> int:
        return sum(len(model.asked) for model in self.models)


class Deed(AgentTool):
    """A tool of a story."""

    description = "does something"

    def __init__(self, story: Story, name: str, does: Any, **flags: Any) -> None:
        self.story = story
        self.name = name
        self.does = does
        for flag, value in flags.items():
            assert hasattr(AgentTool, flag), flag
            setattr(self, flag, value)
        super().__init__()

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.story.ran.append(ctx.tool_call_id)
        value = self.does(args, ctx) if callable(self.does) else self.does
        if hasattr(value, "__await__"):
            value = await value
        if isinstance(value, BaseException):
            raise value
        return ToolResult.text(value) if isinstance(value, str) else value


STORIES: dict[str, Callable[[Story], None]] = {}
"""Runs that come to an end."""
FAILURES: dict[str, Callable[[Story], None]] = {}
"""Runs that end with an error."""


def story(tell: Callable[[Story], None]) -> Callable[[Story], None]:
    STORIES[tell.__name__] = tell
    return tell


def failure(tell: Callable[[Story], None]) -> Callable[[Story], None]:
    FAILURES[tell.__name__] = tell
    return tell


def begin(name: str) -> Story:
    """A fresh story."""
    new = Story(name)
    (STORIES.get(name) or FAILURES[name])(new)
    return new


def after(turns: int, text: str = "done") -> Callable[[Any, ToolContext], Any]:
    """A tool's work that lets others have so many turns."""

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        for _ in range(turns):
            await asyncio.sleep(0)
        return ToolResult.text(text, details={"turns": turns})

    return work


# --- batches ----------------------------------------------------------------------------------


@story
def plain(s: Story) -> None:
    s.model("Just words, a few of them.")


@story
def batches(s: Story) -> None:
    def blocking(path: str) -> list[str]:
        """Read a file."""
        s.ran.append(f"blocking {path}")
        return [path, "ä", "字"]

    s.deed("slow", after(9, "slow"))
    s.deed("quick", "quick")
    s.deed("again", after(4, "again"), idempotent=True)
    s.tools.append(tool(blocking))
    s.model(
        say("All at once.", call("slow"), call("quick"), call("again"), call("again")),
        call("quick", n=1),
        [call("again"), call("slow"), call("again")],
        [call("blocking", path="x")],
        "All is done.",
    )


@story
def one_after_the_other(s: Story) -> None:
    s.deed("work", after(2))
    s.deed("again", after(2), idempotent=True)
    s.deed("fails", ToolResult.error("no"), aborts_siblings_on_error=True)
    s.settings["default_execution_mode"] = ExecutionMode.SEQUENTIAL
    s.model(
        [call("work"), call("again"), call("work")],
        [call("work"), call("fails"), call("work")],
        "Done.",
    )


@story
def a_sibling_fails(s: Story) -> None:
    s.deed("slow", after(50))
    s.deed("fails", after(3), aborts_siblings_on_error=True)
    s.tools[-1].does = lambda args, ctx: ToolResult.error("no")
    s.model([call("slow"), call("fails"), call("slow")], "Done.")


@story
def mistakes(s: Story) -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        s.ran.append("add")
        return a + b

    s.tools.append(add)
    s.deed("breaks", ValueError("broken"))
    s.model(
        [call("nothing_of_that_name"), call("add", a="x", b=1), call("add", a=1, b=2)],
        AssistantMessage(
            (ToolCall("bad", "add", {"__arg_parse_error": "x", "__raw": "{"}),), StopReason.TOOL_USE
        ),
        call("breaks"),
        "Three.",
    )


@story
def too_many_calls(s: Story) -> None:
    s.deed("work", after(1))
    s.deed("note", "noted", counts_toward_tool_call_limit=False, idempotent=True)
    s.settings["max_tool_calls_per_turn"] = 2
    s.model(
        [call("work", n=1), call("note"), call("work", n=2), call("work", n=3), call("work", n=4)],
        [call("work"), call("note")],
        "Done.",
    )


@story
def the_same_id_again(s: Story) -> None:
    s.deed("work", after(2))
    s.settings["plugins"] = [UniqueToolCallIds()]
    s.model(
        [ToolCall("x", "work", {"n": 1}), ToolCall("x", "work", {"n": 2})],
        [ToolCall("x", "work", {"n": 3})],
        "Done.",
    )


class Renaming(ProtocolPolicy):
    name = "renaming"

    def normalize_tool_calls(self, calls: Sequence[ToolCall], registry: Any) -> Sequence[ToolCall]:
        return [replace(c, name="work") if c.name == "werk" else c for c in calls]


@story
def wrong_names(s: Story) -> None:
    s.deed("work", after(1))
    s.settings["protocol"] = Renaming()
    s.model([call("werk", n=1), call("work")], [call("werk")], "Done.")


@story
def progress(s: Story) -> None:
    async def works(args: Any, ctx: ToolContext) -> ToolResult:
        for part in range(3):
            await ctx.update(f"{part}/3")
            await asyncio.sleep(0)
        return ToolResult.text("whole").with_narration("It took three steps.")

    @tool
    def counts(to: int, ctx: ToolContext) -> str:
        """Count, in a thread."""
        s.ran.append("counts")
        for number in range(to):
            _ = ctx.update(str(number))
        return "counted"

    s.deed("works", works)
    s.tools.append(counts)
    s.model([call("works"), call("works")], call("counts", to=3), "Done.")


@story
def left_over_details(s: Story) -> None:
    s.deed("work", ToolResult.text("t", details={"a": [1, {"b": None}], "ü": "字"}))
    s.model(call("work"), "Done.")


# --- hooks ------------------------------------------------------------------------------------


class Meddling:
    name = "meddling"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
        match ctx.args.get("wants"):
            case "block":
                return Block("Not that.", {"why": "because"})
            case "rewrite":
                return Rewrite({"wants": "rewritten"})
            case "answer":
                return Answer(ToolResult.text("from the cache"))
            case "raise":
                raise ValueError("the hook fails")
            case _:
                return None

    async def on_after_tool_call(self, ctx: AfterToolCallContext) -> AfterToolDecision | None:
        await asyncio.sleep(0)
        match ctx.args.get("changes") if isinstance(ctx.args, dict) else None:
            case "result":
                return AfterToolDecision(ToolResult.text("changed", details={"by": "me"}))
            case "error":
                return AfterToolDecision(mark_error=True)
            case "raise":
                raise ValueError("the hook fails")
            case "end":
                return AfterToolDecision(terminate=True)
            case _:
                return None


@story
def hooks(s: Story) -> None:
    s.deed("work", after(2))
    s.settings["plugins"] = [Meddling()]
    s.model(
        [call("work", wants=w) for w in ("block", "rewrite", "answer", "raise", "nothing")],
        [call("work", changes=c) for c in ("result", "error", "raise", "nothing")],
        call("work", wants="block", changes="result"),
        call("work", wants="answer", changes="end"),
        "It is not asked for this.",
    )


class Gate:
    name = "gate"

    def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> frozenset[str] | None:
        answers = sum(isinstance(m, AssistantMessage) for m in ctx.messages)
        return frozenset({"work"}) if answers < 2 else None

    def denial_reason(self, tool_name: str, ctx: ToolGateContext) -> str | None:
        return f"{tool_name} is closed"


@story
def gates(s: Story) -> None:
    s.deed("work", after(1))
    s.deed("danger", "it happened")
    s.settings["plugins"] = [Gate()]
    s.model(
        [call("work"), call("danger", n=1)],
        [call("danger", n=2)],
        [call("danger", n=3), call("work")],
        "Done.",
    )


class Coming:
    """A source whose tools come and go: one stays, one goes with the second turn, one comes."""

    def __init__(self, s: Story) -> None:
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        always = tool(add)
        early = Deed(s, "early", after(1), aborts_siblings_on_error=True)
        late = Deed(s, "late", "late it is", requires_exclusive_sandbox=True)
        own = Deed(s, "work", "never run: the config has a tool of that name")
        self.early, self.late = (always, early, own), (always, late)
        self.asked = 0

    async def tools_for_turn(self, ctx: ToolSourceContext) -> Sequence[AgentTool]:
        await asyncio.sleep(0)
        self.asked += 1
        if ctx.turn == 3 and self.asked > 1:
            raise OSError("the server is away")
        return self.early if ctx.turn < 2 else self.late


@story
def tools_come_and_go(s: Story) -> None:
    s.deed("work", after(1))
    s.settings["tool_source"] = Coming(s)
    s.model(
        [call("early"), call("late"), call("add", a=1, b=2), call("work")],
        [call("late"), call("early"), call("add", a="one", b=2)],
        [call("late"), call("add", a=3, b=4)],
        "Done.",
    )


class Noting:
    """Adds a note of its own behind what the model sees."""

    name = "noting"

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        return [*messages, SystemMessage(f"note {len(messages)}", 5)]


@story
def transforms(s: Story) -> None:
    s.deed("read", lambda args, ctx: "x" * 400 + str(args))
    s.settings["plugins"] = [
        ToolResultBudget(100),
        TokenBudget(600, trim_trigger=0.5, drop_turns=False),
        Noting(),
    ]
    s.model(*[[call("read", n=n), call("read", m=n)] for n in range(6)], "Read.")


class Numbering(Model):
    """Knows by the ids of its calls which answer is due, whatever was left out before."""

    def number(self, request: StreamRequest) -> int:
        answers = [m for m in request.messages if isinstance(m, AssistantMessage)]
        return 1 + int(answers[-1].tool_calls[0].id[1:].partition("c")[0]) if answers else 0


@story
def turns_are_left_out(s: Story) -> None:
    s.deed("read", lambda args, ctx: "x" * 200 + str(args))
    s.settings["plugins"] = [TokenBudget(700)]
    s.models.append(Numbering(*[call("read", n=n) for n in range(14)], "Read."))


@story
def an_overflow_that_the_budget_recovers(s: Story) -> None:
    def refused(request: StreamRequest) -> Any:
        if len(request.messages) > 8:
            return [Start(EMPTY), Error(EMPTY, StreamErrorKind.CONTEXT_OVERFLOW, "too big")]
        return call("read")

    s.deed("read", "y" * 300)
    s.settings["plugins"] = [TokenBudget(100_000)]
    s.models.append(Numbering(*[refused] * 9, "Read."))


# --- talking to it ----------------------------------------------------------------------------


@story
def steering(s: Story) -> None:
    handle = s.steering.handle

    async def steers(args: Any, ctx: ToolContext) -> ToolResult:
        _ = handle.steer("In the middle.", "after_batch")
        await asyncio.sleep(0)
        _ = handle.follow_up("And then?")
        await asyncio.sleep(0)
        return ToolResult.text("steered")

    s.deed("steers", steers)
    s.deed("work", after(3))
    s.settings["plugins"] = [s.steering]
    s.before.append(lambda: handle.steer("Before it all."))
    s.before.append(lambda: handle.follow_up("After it all."))
    s.model([call("steers"), call("work")], call("work"), "First.", "Second.", "Third.")


@story
def steering_before_the_next_tool(s: Story) -> None:
    async def steers(args: Any, ctx: ToolContext) -> ToolResult:
        await asyncio.sleep(0)
        _ = s.steering.handle.steer("Wait!", "before_next_tool")
        await asyncio.sleep(0)
        return ToolResult.text("steered")

    s.deed("steers", steers)
    s.deed("work", after(3))
    s.settings["plugins"] = [s.steering]
    s.settings["default_execution_mode"] = ExecutionMode.SEQUENTIAL
    s.model([call("work"), call("steers"), call("work")], call("work"), "Done.")


@story
def steering_now_in_a_batch(s: Story) -> None:
    async def steers(args: Any, ctx: ToolContext) -> ToolResult:
        await asyncio.sleep(0)
        _ = s.steering.handle.steer("Stop!", "now")
        for _ in range(20):
            await asyncio.sleep(0)
        return ToolResult.text("was not stopped")

    s.deed("steers", steers)
    s.deed("work", after(100))
    s.deed("quick", "quick")
    s.settings["plugins"] = [s.steering]
    s.model([call("work"), call("quick"), call("steers")], call("quick"), "Done.")


def _told(request: StreamRequest, text: str) -> bool:
    return any(isinstance(m, UserMessage) and m.plain_text == text for m in request.messages)


class Interrupted(Model):
    """Says a little, is steered, and would go on for ever."""

    def __init__(self, steering: ChannelSteering, at: int, *steps: Step) -> None:
        super().__init__(*steps)
        self.steering = steering
        self.at = at

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        number = sum(isinstance(m, AssistantMessage) for m in request.messages)
        if number != self.at or _told(request, "Stop talking."):
            async for event in super().__call__(request, signal):
                yield event
            return
        self.asked.append(request)
        yield Start(EMPTY)
        yield Chunk(TextChunk("As I was "))
        await asyncio.sleep(0)
        yield Chunk(TextChunk("saying, "))
        _ = self.steering.handle.steer("Stop talking.", "now")
        for _ in range(20):
            await asyncio.sleep(0)
        yield Chunk(TextChunk("never"))
        yield Done(say("never"))


@story
def steering_now_in_the_first_answer(s: Story) -> None:
    s.settings["plugins"] = [s.steering]
    s.models.append(Interrupted(s.steering, 0, "Well.", "no"))


@story
def steering_now_in_a_later_answer(s: Story) -> None:
    s.deed("work", after(2))
    s.settings["plugins"] = [s.steering]
    s.models.append(Interrupted(s.steering, 1, [call("work"), call("work")], call("work"), "Ok."))


# --- the model's own ways ---------------------------------------------------------------------


@story
def deltas_of_all_kinds(s: Story) -> None:
    def streamed(request: StreamRequest) -> list[StreamEvent]:
        details = ({"type": "a", "n": 1}, {"type": "b"})
        chunks: list[StreamChunk] = [
            ThinkingChunk("hm"),
            ThinkingChunk(", hm"),
            ReasoningChunk("so"),
            ReasoningDetailsChunk(details[:1]),
            ReasoningDetailsChunk(details[1:]),
            TextChunk("I "),
            TextChunk(""),
            TextChunk("call"),
            ToolCallChunk(0, "c-1", "work", '{"n":'),
            ToolCallChunk(0, None, None, " 1}"),
        ]
        assembler = MessageAssembler()
        for chunk in chunks:
            assembler.feed(chunk)
        message = assembler.message(usage=Usage(7, 3), timestamp=99)
        return [Start(EMPTY, {"fallback": "second"}), *[Chunk(c) for c in chunks], Done(message)]

    s.deed("work", after(1))
    different: list[StreamEvent] = [
        Start(EMPTY),
        Chunk(TextChunk("nothing like")),
        Done(say("the message")),
    ]
    s.model(streamed, [Done(say("", call("work", call_id="unannounced")))], different)


@story
def cut_off(s: Story) -> None:
    def short(request: StreamRequest) -> AssistantMessage:
        if request.max_output_tokens is not None and request.max_output_tokens < 400:
            return AssistantMessage((TextContent("cut o"),), StopReason.MAX_TOKENS)
        return say("Not cut off.", call("work"))

    s.deed("work", after(1))
    s.settings["max_output_tokens"] = 100
    s.settings["max_output_tokens_recovery"] = MaxTokensRecovery(max_attempts=3, scaling=Double())
    s.model(
        short,
        AssistantMessage((TextContent("x"), ToolCall("c", "work", {})), StopReason.MAX_TOKENS),
        "Done.",
    )
    s.models[0].steps = (
        short,
        lambda request: (
            AssistantMessage((ToolCall("cut", "work", {}),), StopReason.MAX_TOKENS)
            if request.max_output_tokens == 800
            else AssistantMessage((TextContent("cut"),), StopReason.MAX_TOKENS)
        ),
        "Done.",
    )


@story
def broken_streams(s: Story) -> None:
    attempts, silences = count(1), count(1)

    def zero(request: StreamRequest) -> Any:
        if any(isinstance(m, SystemMessage) for m in request.messages):
            return call("work")
        return [Start(EMPTY), Error(EMPTY, StreamErrorKind.ZERO_OUTPUT_TRANSPORT, "broke")]

    def empty(request: StreamRequest) -> Any:
        if next(attempts) < 3:
            return [Start(EMPTY), Error(EMPTY, StreamErrorKind.EMPTY, "nothing")]
        return call("work")

    def silent(request: StreamRequest) -> Any:
        return [] if next(silences) < 3 else "Done."

    s.deed("work", after(1))
    s.model(zero, empty, silent)


class Shortening:
    name = "shortening"
    max_attempts = 2

    def recover(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        """Drop the oldest batch but for its answer; results become one note."""
        kept: list[AgentMessage] = []
        for message in messages:
            if isinstance(message, ToolResultMessage) and len(message.plain_text) > 50:
                message = replace(message, content=(TextContent("short"),))
            if isinstance(message, SystemMessage):
                continue
            kept.append(message)
        return [*kept, SystemMessage("something was left out", 3)]


@story
def overflows(s: Story) -> None:
    def fits(then: Step) -> Callable[[StreamRequest], Any]:
        def asked(request: StreamRequest) -> Any:
            if any(len(m.plain_text) > 50 for m in request.messages):
                return [Start(EMPTY), Error(EMPTY, StreamErrorKind.CONTEXT_OVERFLOW, "too big")]
            return then

        return asked

    s.deed("read", "y" * 300)
    s.settings["overflow_recovery"] = Shortening()
    s.model(
        [call("read"), call("read")],
        fits([call("read"), call("read")]),
        fits(call("read")),
        fits("Read."),
    )


def _strict(then: Step) -> Callable[[StreamRequest], Any]:
    """A provider that takes no history whose calls and results do not match."""

    def asked(request: StreamRequest) -> Any:
        if repair_history(request.messages).changes:
            kind = StreamErrorKind.INCONSISTENT_TOOL_HISTORY
            return [Start(EMPTY), Error(EMPTY, kind, "calls and results do not match")]
        return then

    return asked


@story
def calls_without_results(s: Story) -> None:
    left_open = AssistantMessage((ToolCall("old", "read", {}),), StopReason.TOOL_USE)
    s.context = AgentContext("You are in a story.", (UserMessage("Read."), left_open))
    s.deed("read", "read")
    s.model(
        _strict([call("read"), call("read")]), _strict(call("read")), _strict("Read."), history=1
    )


@story
def a_transform_parts_calls_and_results(s: Story) -> None:
    def forget(messages: Sequence[AgentMessage], ctx: TransformContext) -> Sequence[AgentMessage]:
        return [m for m in messages if not isinstance(m, ToolResultMessage)]

    s.deed("read", "read")
    s.settings["plugins"] = [FunctionPlugin("context_transform", forget, name="forget")]
    s.model([call("read"), call("read")], _strict(call("read")), _strict("Read."))


@story
def nudges(s: Story) -> None:
    s.deed("deliver", ToolResult.terminal("delivered"))
    s.deed("work", after(1))
    s.settings |= {
        "plain_text_terminal_fallback_tool": "deliver",
        "plain_text_terminal_fallback_eager": True,
        "plain_text_terminal_fallback_eager_nudge": True,
    }
    s.model("One.", call("work"), "Two.", "Three.", "Four.", "Five.", "Six.")


@story
def nudges_that_help(s: Story) -> None:
    s.deed("deliver", ToolResult.terminal("delivered"))
    s.settings |= {
        "plain_text_terminal_fallback_tool": "deliver",
        "plain_text_terminal_fallback_eager": True,
        "plain_text_terminal_fallback_eager_nudge": True,
    }
    s.model("One.", "Two.", call("deliver"), *["It is not asked for this."] * 4)


class Verdict(Struct):
    decision: str
    score: int


@story
def finishing(s: Story) -> None:
    s.tools.append(finish_tool(Verdict))
    s.deed("work", after(1))
    s.model(
        call("work"),
        [call("work"), call("finish", decision="no", score=1)],
        call("finish", decision="maybe"),
        call("finish", decision="yes", score=9),
        "It is not asked for this.",
    )


@story
def helpers(s: Story) -> None:
    grandchild = LoopConfig(
        stream=s.model(call("work"), "From the very bottom.", prefix="g"),
        tools=[Deed(s, "work", after(2))],
        clock=s.clock,
    )
    child = LoopConfig(
        stream=s.model([call("work"), call("deeper", task="dig")], "From below.", prefix="c"),
        tools=[Deed(s, "work", after(1)), agent_tool("deeper", "digs", grandchild)],
        clock=s.clock,
    )
    top = s.model(
        [call("helper", task="a"), call("work"), call("helper", task="b")],
        call("helper", task="c"),
        "All helped.",
    )
    s.models.insert(0, s.models.pop(s.models.index(top)))
    s.deed("work", after(2))
    s.tools.append(agent_tool("helper", "helps", child, system_prompt="You help."))


@story
def helpers_and_a_made_up_id(s: Story) -> None:
    """A child takes an id, and then the loop makes one for the text that it delivers."""
    child = LoopConfig(stream=s.model("From below.", prefix="c"), clock=s.clock)
    s.deed("deliver", ToolResult.terminal("delivered"))
    s.settings |= {
        "plain_text_terminal_fallback_tool": "deliver",
        "plain_text_terminal_fallback_eager": True,
    }
    top = s.model(call("helper", task="a"), "All helped.")
    s.models.insert(0, s.models.pop(s.models.index(top)))
    s.tools.append(agent_tool("helper", "helps", child))


@story
def turns_run_out(s: Story) -> None:
    s.deed("work", after(1))
    s.settings |= {"max_iterations": 4, "grace_iterations": 2}
    s.model(*[call("work", n=n) for n in range(9)])


@story
def wrapping_up(s: Story) -> None:
    def heeds(request: StreamRequest) -> Any:
        warned = any(isinstance(m, SystemMessage) for m in request.messages)
        return "I close." if warned else call("work")

    s.deed("work", after(1))
    s.settings |= {"max_iterations": 5, "grace_iterations": 2}
    s.model(*[heeds] * 9)


@story
def a_budget_of_turns(s: Story) -> None:
    s.deed("work", after(1))
    s.settings["budget"] = Budget(turns=4)
    s.model(*[call("work", n=n) for n in range(9)])


@story
def a_budget_of_tokens(s: Story) -> None:
    def heeds(request: StreamRequest) -> Any:
        warned = any(isinstance(m, SystemMessage) for m in request.messages)
        return "I close." if warned else replace(say("", call("work")), usage=Usage(250, 50))

    s.deed("work", after(1))
    s.settings["budget"] = Budget(tokens=1_000, wrap_up_at=0.6)
    s.model(*[heeds] * 9)


@story
def time_runs_out_in_a_tool(s: Story) -> None:
    s.deed("quick", "quick")
    s.deed("waits", lambda args, ctx: asyncio.sleep(60, "never"))
    s.settings["budget"] = Budget(seconds=0.2)
    s.model(call("quick"), [call("waits"), call("quick"), call("waits")], "It is not asked.")


@story
def time_runs_out_in_an_answer(s: Story) -> None:
    class Slow(Model):
        async def __call__(
            self, request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            if not any(isinstance(m, ToolResultMessage) for m in request.messages):
                async for event in super().__call__(request, signal):
                    yield event
                return
            self.asked.append(request)
            yield Start(EMPTY)
            yield Chunk(TextChunk("I think"))
            await asyncio.sleep(60)

    s.deed("quick", "quick")
    s.settings["budget"] = Budget(seconds=0.2)
    s.models.append(Slow(call("quick")))


@story
def a_tool_takes_too_long(s: Story) -> None:
    s.deed("waits", lambda args, ctx: asyncio.sleep(60, "never"), timeout=0.01)
    s.deed("work", after(2))
    s.settings["plugins"] = [Meddling()]
    s.model([call("work"), call("waits")], call("waits"), "Done.")


@story
def a_budget_with_helpers(s: Story) -> None:
    child = LoopConfig(
        stream=s.model(call("work"), "From below.", prefix="c"),
        tools=[Deed(s, "work", after(1))],
        clock=s.clock,
    )
    top = s.model(*[call("helper", task="a") for _ in range(9)])
    s.models.insert(0, s.models.pop(s.models.index(top)))
    s.tools.append(agent_tool("helper", "helps", child))
    s.settings["budget"] = Budget(tokens=1_000, wrap_up_at=None)


@story
def with_history(s: Story) -> None:
    history = (
        UserMessage("Before.", 1),
        say("Called.", ToolCall("h1", "work", {})),
        ToolResultMessage("h1", "work", (TextContent("r"),), timestamp=2),
        UserMessage("And now?", 3),
    )
    s.context = AgentContext("You have a past.", history)
    s.prompts = None
    s.deed("work", after(1))
    s.model(call("work"), "Done.", history=1)


@story
def several_prompts(s: Story) -> None:
    s.prompts = [UserMessage("One.", 1), SystemMessage("Two.", 2), UserMessage("Three.", 3)]
    s.deed("work", after(1))
    s.model(call("work"), "Done.")


# --- plugins that ask a model --------------------------------------------------------------------


class Asking(Model):
    """A model that also answers questions beside the turn, and in other ways fails to."""

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        question = request.messages[-1].plain_text
        if not question.startswith("Question"):
            async for event in super().__call__(request, signal):
                yield event
            return
        self.asked.append(request)
        await asyncio.sleep(0)
        match question.split()[-1]:
            case "raises":
                raise ConnectionError("no route to host")
            case "fails":
                said = replace(say("I was"), usage=Usage(70, 7))
                yield Error(said, StreamErrorKind.FATAL, "401")
            case "waits":
                yield Start(EMPTY)
                await asyncio.sleep(60)
            case _:
                text = f"{len(request.messages)} messages, {len(request.tools)} tools"
                yield Start(EMPTY)
                yield Chunk(TextChunk(text))
                await asyncio.sleep(0)
                yield Done(replace(say(text), usage=Usage(50, 5)))


class Curious:
    """Asks a model before each request, and says what it has learned."""

    name = "curious"
    purpose = "curiosity"

    def __init__(self, other: Model | None, *ways: str) -> None:
        self.other = other
        self.ways = ways

    async def before_request(self, ctx: BeforeRequestContext) -> list[AgentMessage]:
        way = self.ways[ctx.iteration % len(self.ways)]
        if way == "quiet":
            return []
        try:
            if way == "other":
                said = await ctx.ask_model("Question", system_prompt="Say.", stream=self.other)
            else:
                seconds = 0.01 if way == "waits" else 10
                said = await ctx.ask_model(f"Question {way}", max_seconds=seconds)
        except (StreamError, TimeoutError) as error:
            return [SystemMessage(f"It {type(error).__name__}: {error}")]
        return [CustomMessage("learned", {"by": way}), UserMessage(said.plain_text)]


@story
def questions(s: Story) -> None:
    s.deed("work", after(1))
    other = Asking()
    other.model, other.provider = "other", "elsewhere"  # type: ignore[attr-defined]
    s.settings["plugins"] = [Curious(other, "own", "other", "raises", "fails", "quiet", "waits")]
    s.settings["budget"] = Budget(tokens=1_000_000)
    s.models += [Asking(*[call("work") for _ in range(6)], "Done."), other]


@story
def questions_of_several_with_steering(s: Story) -> None:
    async def steers(args: Any, ctx: ToolContext) -> ToolResult:
        _ = s.steering.handle.steer("Hear me.")
        await asyncio.sleep(0)
        return ToolResult.text("steered")

    s.deed("steers", steers)
    second = Curious(None, "second", "quiet", "third")
    second.name = "second"
    s.settings["plugins"] = [Curious(None, "first"), second, s.steering]
    s.models.append(Asking(call("steers"), call("steers"), "Done."))


class Summarising(Model):
    """A model that summarises when it is asked to, and takes only so many characters.

    Which answer is due is in the id of the newest call: requests do not have all answers.
    """

    def __init__(self, *steps: Step, limit: int | None = None, summaries: bool = True) -> None:
        super().__init__(*steps)
        self.limit = limit
        self.summaries = summaries

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        texts = [message.plain_text for message in request.messages]
        size = sum(map(len, texts))
        if "Write a summary" in texts[-1]:
            self.asked.append(request)
            await asyncio.sleep(0)
            if self.summaries:
                said = say(f"A summary of {len(texts)} messages with {size} characters.")
                yield Done(replace(said, usage=Usage(size // 4, 9)))
            else:
                yield Error(EMPTY, StreamErrorKind.FATAL, "503")
        elif self.limit is not None and size > self.limit:
            self.asked.append(request)
            yield Start(EMPTY)
            text = f"too long: {size // 4} tokens > {self.limit // 4} maximum"
            yield Error(EMPTY, StreamErrorKind.CONTEXT_OVERFLOW, text)
        else:
            async for event in super().__call__(request, signal):
                if isinstance(event, Done):
                    event = Done(replace(event.message, usage=Usage(size // 4, 10)))
                yield event

    def number(self, request: StreamRequest) -> int:
        for message in reversed(request.messages):
            if isinstance(message, AssistantMessage) and message.tool_calls:
                return int(message.tool_calls[0].id[1:].partition("c")[0]) + 1
        return 0


def long_steps(s: Story, turns: int) -> list[Step]:
    s.deed("work", lambda args, ctx: f"Result {args['n']}: " + "something. " * 20)
    return [*[call("work", n=n) for n in range(turns)], "Done."]


@story
def compacting(s: Story) -> None:
    steps = long_steps(s, 12)
    s.settings["plugins"] = [Compaction(420)]
    s.settings["budget"] = Budget(tokens=1_000_000)
    s.models.append(Summarising(*steps))


@story
def compacting_after_overflows(s: Story) -> None:
    steps = long_steps(s, 9)
    s.settings["plugins"] = [Compaction()]
    s.models.append(Summarising(*steps, limit=1_300))


@story
def compacting_with_another_model_that_fails(s: Story) -> None:
    steps = long_steps(s, 10)
    other = Summarising(summaries=False)
    other.model = "other"  # type: ignore[attr-defined]
    s.settings["plugins"] = [ToolResultBudget(100), Compaction(320, model=other)]
    s.models += [Summarising(*steps), other]


@failure
def cancelled_while_a_plugin_asks(s: Story) -> None:
    class Cancelling(Asking):
        async def __call__(
            self, request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            if request.messages[-1].plain_text.startswith("Question"):
                s.signal.cancel("enough")
                await asyncio.sleep(1)
            async for event in super().__call__(request, signal):
                yield event

    s.deed("work", after(1))
    s.settings["plugins"] = [Curious(None, "quiet", "own")]
    s.models.append(Cancelling(call("work"), "Done."))


# --- runs that fail -----------------------------------------------------------------------------


@failure
def the_stream_fails(s: Story) -> None:
    s.deed("work", after(1))
    broken: list[StreamEvent] = [
        Start(EMPTY),
        Chunk(TextChunk("I was ")),
        Error(say("I was "), StreamErrorKind.FATAL, "401"),
    ]
    s.model([call("work"), call("work")], broken)


@failure
def the_transport_raises(s: Story) -> None:
    class Raising(Model):
        async def __call__(
            self, request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            self.asked.append(request)
            yield Start(EMPTY)
            yield Chunk(TextChunk("I was "))
            raise ConnectionError("no route to host")

    s.models.append(Raising())


@failure
def nothing_ever_comes(s: Story) -> None:
    s.model([])


@failure
def a_tool_is_fatal(s: Story) -> None:
    s.deed("work", after(30))
    s.deed("ends", ToolFatal("it is over"))
    s.model([call("work"), call("ends"), call("work")], "no")


@failure
def a_tool_aborts(s: Story) -> None:
    s.deed("work", after(30))
    s.deed("ends", ToolAborted("leave it"))
    s.settings["plugins"] = [Meddling()]
    s.model([call("work"), call("ends")], "no")


@failure
def a_tool_is_fatal_alone(s: Story) -> None:
    s.deed("ends", ToolFatal("it is over"))
    s.model(call("ends"), "no")


@failure
def cancelled_in_a_tool(s: Story) -> None:
    async def cancels(args: Any, ctx: ToolContext) -> ToolResult:
        await asyncio.sleep(0)
        s.signal.cancel("enough")
        await asyncio.sleep(1)
        return ToolResult.text("never")

    s.deed("cancels", cancels)
    s.deed("quick", "quick")
    s.model(call("quick"), call("cancels"), "no")


@failure
def cancelled_in_a_batch(s: Story) -> None:
    async def cancels(args: Any, ctx: ToolContext) -> ToolResult:
        await asyncio.sleep(0)
        s.signal.cancel("enough")
        await asyncio.sleep(1)
        return ToolResult.text("never")

    s.deed("cancels", cancels)
    s.deed("quick", "quick")
    s.deed("work", after(500))
    s.settings["plugins"] = [Meddling()]
    s.model([call("quick"), call("cancels"), call("work")], "no")


class Cancelled(Model):
    def __init__(self, s: Story, *steps: Step) -> None:
        super().__init__(*steps)
        self.story = s

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        if not any(isinstance(m, ToolResultMessage) for m in request.messages):
            async for event in super().__call__(request, signal):
                yield event
            return
        self.asked.append(request)
        yield Start(EMPTY)
        yield Chunk(TextChunk("As I "))
        yield Chunk(TextChunk("was"))
        self.story.signal.cancel("enough")
        await asyncio.sleep(1)
        yield Done(say("never"))


@failure
def cancelled_in_an_answer(s: Story) -> None:
    s.deed("quick", "quick")
    s.models.append(Cancelled(s, call("quick")))


@failure
def a_hook_ends_it(s: Story) -> None:
    class Strict:
        name = "strict"

        def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> frozenset[str] | None:
            if ctx.iteration:
                raise ValueError("a required gate fails")
            return None

    s.deed("work", after(1))
    s.settings["plugins"] = [Strict()]
    s.model(call("work"), "no")


@failure
def steered_and_failed(s: Story) -> None:
    async def steers(args: Any, ctx: ToolContext) -> ToolResult:
        _ = s.steering.handle.steer("Hear me.")
        _ = s.steering.handle.follow_up("And then?")
        await asyncio.sleep(0)
        raise ToolFatal("it is over")

    s.deed("steers", steers)
    s.settings["plugins"] = [s.steering]
    s.model(call("steers"), "First.", "Second.", "Third.")


class Long:
    """A model that calls a tool a thousand times."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        number = (len(request.messages) - 1) // 2
        done = number >= self.turns
        text = "This is what I want to do next, and why I want to do it. "
        message = say(text, *([] if done else [ToolCall(f"c{number}", "work", {"n": number})]))
        yield Start(EMPTY)
        for word in text.split(" "):
            yield Chunk(TextChunk(word + " ")) if word else Chunk(TextChunk(""))
        yield Done(message)


def long_config(turns: int, log: RunLog | None) -> tuple[Story, LoopConfig]:
    story = Story()
    story.deed("work", lambda args, ctx: f"Result number {args['n']}: " + "something. " * 10)
    config = LoopConfig(
        stream=Long(turns), tools=story.tools, run_log=log, clock=Ticking(), event_sink=story.sink
    )
    return story, config


# --- logs ---------------------------------------------------------------------------------------


def through_json(record: Record) -> Record:
    """The record as a file would give it back."""
    return decode_json(encode_json(record), Record)


class Told(Struct, frozen=True):
    """A story that was played to its end."""

    events: tuple[AgentEvent, ...]
    outcome: Any
    """The result or the error."""
    loaded: LoadedRun
    store: RunStore

    @property
    def run_id(self) -> str:
        return self.loaded.run_id

    @property
    def records(self) -> tuple[Record, ...]:
        return self.loaded.records


class SharedStore(MemoryStore):
    """Refuses to be written to once its story is over: whoever goes on with the run copies it."""

    is_over = False

    def create(self, run_id: str) -> MemoryAppender:
        self._check()
        return super().create(run_id)

    def reopen(self, run_id: str, *, after: int) -> MemoryAppender:
        self._check()
        return super().reopen(run_id, after=after)

    def post(self, run_id: str, mail: Mail) -> bool:
        self._check()
        return super().post(run_id, mail)

    def _check(self) -> None:
        assert not self.is_over, "other tests read this store too: write to a copy_of it"


_PLAYED: dict[str, Told] = {}


async def told(name: str) -> Told:
    """A story, which is played once for all tests of a process."""
    if name not in _PLAYED:
        store = SharedStore()
        _PLAYED[name] = await tell(name, RunLog(store))
        store.is_over = True
    return _PLAYED[name]


async def tell(name: str, run_log: RunLog) -> Told:
    """Play a story to its end, with a log of its own."""
    story = begin(name)
    outcome = await story.play(run_log)
    if isinstance(outcome, BaseException):
        _forget_frames(outcome)
    return Told(tuple(story.sink.events), outcome, root_of(run_log.store), run_log.store)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of the tasks and loops that the tracebacks of an error refer to."""
    while error is not None:
        error.__traceback__ = None
        for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            _forget_frames(inner)
        error = error.__cause__ or error.__context__


def root_of(store: RunStore) -> LoadedRun:
    (summary,) = [run for run in store.runs() if run.depth == 0]
    return store.load(summary.run_id)


def copy_of(store: RunStore, run_id: str, length: int | None = None) -> MemoryStore:
    """A store with the beginning of one run's log, and all of those that it had started by then."""
    copy = MemoryStore()
    kept = store.load(run_id).records[:length]
    fill(copy, run_id, kept)
    started = {r.entry.tool_call_id for r in kept if isinstance(r.entry, ToolStarted)}
    above = {run_id: started}
    for summary in sorted(store.runs(), key=lambda run: (run.depth, run.began_at)):
        records = store.load(summary.run_id).records
        began = records[0].entry
        assert isinstance(began, RunBegan)
        if began.tool_call_id in above.get(summary.parent_run_id or "", ()):
            fill(copy, summary.run_id, records)
            ours = {r.entry.tool_call_id for r in records if isinstance(r.entry, ToolStarted)}
            above[summary.run_id] = ours
    return copy


def fill(store: RunStore, run_id: str, records: Iterable[Record]) -> None:
    appender = store.create(run_id)
    for record in records:
        appender.append(through_json(record), encode_json(record))
    appender.close()


def undated(messages: Iterable[AgentMessage]) -> list[Any]:
    """The messages without what differs from one run to the next."""
    return [_undated(m) for m in messages]


def _undated(message: AgentMessage) -> AgentMessage:
    if isinstance(message, ToolResultMessage) and message.tool_call_id.startswith("plain_text"):
        message = replace(message, tool_call_id="plain_text")
    return replace(message, timestamp=None)


def carried(outcome: Any) -> tuple[AgentMessage, ...]:
    """The messages of a run, however it ended."""
    if isinstance(outcome, RunResult):
        return outcome.messages
    failure = failure_of(outcome)
    assert isinstance(failure, LoopError), repr(outcome)
    return failure.messages


def begun(records: Iterable[Record]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Which calls of which answer have begun, and which have their result."""
    started: set[tuple[int, int]] = set()
    ended: set[tuple[int, int]] = set()
    answers = 0
    for record in records:
        match record.entry:
            case Answered(discarded=None):
                answers += 1
            case ToolStarted(position=position):
                started.add((answers, position))
            case ToolEnded(position=position):
                ended.add((answers, position))
            case _:
                pass
    return started, ended


__all__ = [
    "FAILURES",
    "STORIES",
    "Deed",
    "Model",
    "RunAborted",
    "Story",
    "Ticking",
    "Told",
    "begin",
    "begun",
    "carried",
    "copy_of",
    "fill",
    "long_config",
    "root_of",
    "tell",
    "through_json",
    "told",
    "undated",
]
