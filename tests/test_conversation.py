"""A conversation keeps what every run has brought, however it ended, in memory and on disk."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentEvent,
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    ChannelSteering,
    Conversation,
    CustomMessage,
    ExecutionMode,
    HookError,
    ImageContent,
    LoopConfig,
    LoopError,
    ReasoningContent,
    ReasoningDetailsContent,
    RunAborted,
    RunIdentity,
    RunStoppedByTool,
    StopReason,
    StreamError,
    StreamEvent,
    StreamRequest,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolContext,
    ToolFatal,
    ToolResult,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from clark_agent.errors import DecodeError, InvalidContinuationError
from clark_agent.events import MessageDiscarded, MessageEnd
from clark_agent.export import to_openai_messages
from clark_agent.history import repair_history
from clark_agent.run_log.memory import MemoryStore
from clark_agent.run_log.writer import RunLog
from clark_agent.stream import (
    Chunk,
    Done,
    ReasoningChunk,
    Start,
    StreamChunk,
    TextChunk,
    ToolCallChunk,
)
from clark_agent.testing import (
    FakeClock,
    RecordingSink,
    ScriptedStream,
    Step,
    call,
    fold_events,
    say,
)
from clark_agent.transports import ReasoningTarget
from clark_agent.transports.http.request import sendable
from tests.engine.support import Waiting, Work, failing, outline
from tests.races import race
from tests.strategies import IDENTITIES, TEXT, transcripts


class PausingModel(ScriptedStream):
    """Lets others run before each event."""

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        async for event in super().__call__(request, signal):
            await asyncio.sleep(0)
            yield event


def config_of(*script: Step, **more: Any) -> LoopConfig:
    more.setdefault("clock", FakeClock())
    return LoopConfig(stream=PausingModel(script), **more)


def talk(*script: Step, **more: Any) -> Conversation:
    return Conversation(config_of(*script, **more), "Be brief.")


def check_valid(conversation: Conversation) -> None:
    assert repair_history(conversation.messages).changes == ()


# --- sending ------------------------------------------------------------------------------------


async def test_send_extends_the_context_with_what_the_run_brought() -> None:
    model = ScriptedStream(["one", call("work"), "two"])
    conversation = Conversation(LoopConfig(stream=model, tools=[Work()]), "Be brief.")
    assert conversation.messages == ()
    first = await conversation.send("first")
    assert conversation.messages == first.messages
    second = await conversation.send("second")
    assert conversation.messages == (*first.messages, *second.messages)
    assert outline(conversation.messages) == [
        "user: first", "assistant: one",
        "user: second", "assistant: ", "tool_result: done", "assistant: two",
    ]  # fmt: skip
    assert outline(model.requests[1].messages) == ["user: first", "assistant: one", "user: second"]
    assert [request.system_prompt for request in model.requests] == ["Be brief."] * 3


async def test_a_conversation_may_begin_with_any_context() -> None:
    identity = RunIdentity.root("me")
    context = AgentContext("Be kind.", (SystemMessage("note"),), identity)
    conversation = Conversation(config_of("ok"), context)
    await conversation.send("hi")
    assert outline(conversation.messages) == ["system: note", "user: hi", "assistant: ok"]
    assert conversation.context.identity is identity
    assert conversation.context.system_prompt == "Be kind."
    assert len(context.messages) == 1, "the context that was given is as it was"


async def test_without_a_context_there_is_no_system_prompt() -> None:
    conversation = Conversation(config_of("ok"))
    assert conversation.context == AgentContext()
    assert (await conversation.send("hi")).text == "ok"


@pytest.mark.parametrize(
    "prompts", [UserMessage("hi"), [UserMessage("hi")], iter([UserMessage("hi")])]
)
async def test_prompts_may_be_all_that_run_takes(prompts: Any) -> None:
    conversation = talk("ok")
    await conversation.send(prompts)
    assert outline(conversation.messages) == ["user: hi", "assistant: ok"]


def test_what_is_no_context_or_config_is_told_at_once() -> None:
    with pytest.raises(TypeError, match="must be an AgentContext"):
        Conversation(config_of(), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a LoopConfig"):
        Conversation("no config")  # type: ignore[arg-type]


async def test_config_and_context_may_be_changed_between_runs() -> None:
    conversation = talk("one")
    await conversation.send("first")
    other = ScriptedStream(["two", "three"])
    conversation.config = conversation.config.replace(stream=other)
    await conversation.send("second")
    assert outline(other.requests[0].messages) == ["user: first", "assistant: one", "user: second"]
    conversation.context = AgentContext("Be rude.", conversation.messages[:2])
    await conversation.send("third")
    assert other.requests[1].system_prompt == "Be rude."
    assert outline(conversation.messages) == [
        "user: first", "assistant: one", "user: third", "assistant: three",
    ]  # fmt: skip


async def test_a_conversation_can_be_steered_from_run_to_run() -> None:
    steering = ChannelSteering()
    conversation = talk("one", "two", "three", plugins=[steering])
    early = steering.handle.steer("early")
    await conversation.send("first")
    later = steering.handle.steer("between the runs")
    result = await conversation.send("second")
    assert (early.status, later.status) == ("delivered", "expired")
    assert outline(conversation.messages) == [
        "user: first", "user: early", "assistant: one", "user: second", "assistant: two",
    ]  # fmt: skip
    assert result.undelivered == ()


# --- going on -----------------------------------------------------------------------------------


async def test_send_without_a_prompt_goes_on_from_where_it_stands() -> None:
    conversation = talk(failing("transient", "overloaded"), "here you are")
    with pytest.raises(StreamError):
        await conversation.send("question")
    assert outline(conversation.messages) == ["user: question"]
    result = await conversation.send()
    assert outline(result.messages) == ["assistant: here you are"]
    assert outline(conversation.messages) == ["user: question", "assistant: here you are"]


async def test_going_on_from_nothing_is_refused_and_changes_nothing() -> None:
    conversation = talk("one", "two")
    with pytest.raises(InvalidContinuationError, match="nothing to continue"):
        await conversation.send()
    await conversation.send("first")
    before = conversation.context
    with pytest.raises(InvalidContinuationError, match="an assistant message; add a message"):
        await conversation.send()
    assert conversation.context is before
    assert (await conversation.send("second")).text == "two"


# --- runs that fail -----------------------------------------------------------------------------


class BrokenPlugin:
    broken = True

    def for_run(self) -> object:
        if self.broken:
            raise ValueError("no")
        return self

    def on_event(self, event: AgentEvent) -> None:
        """Nothing."""


FATAL = Work("work", ToolFatal("the disk is gone"))

FAILURES: dict[str, tuple[list[Step], type[LoopError], list[str]]] = {
    "in mid-stream": ([failing("fatal", "broken", "half an ")], StreamError, ["user: again"]),
    "in the transport": ([OSError("no route")], StreamError, ["user: again"]),
    "in a tool": (
        [[call("work"), call("work")]],
        RunStoppedByTool,
        ["user: again", "assistant: ", "tool_result", "tool_result"],
    ),
    "in the second turn": (
        [call("nope"), failing("fatal")],
        StreamError,
        ["user: again", "assistant: ", "tool_result"],
    ),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_a_failed_run_has_brought_is_kept(name: str, streamed: bool) -> None:
    script, kind, brought = FAILURES[name]
    conversation = talk("hello", *script, "better now", tools=[FATAL])
    await conversation.send("hi")
    before = conversation.messages
    with pytest.raises(kind) as caught:
        await send(conversation, "again", streamed)
    assert conversation.messages == (*before, *caught.value.messages)
    for line, wanted in zip(outline(caught.value.messages), brought, strict=True):
        assert line.startswith(wanted)
    check_valid(conversation)
    assert (await send(conversation, "and now?", streamed)).text == "better now"
    check_valid(conversation)


async def send(conversation: Conversation, prompts: Any, streamed: bool) -> Any:
    if not streamed:
        return await conversation.send(prompts)
    async with conversation.stream(prompts) as events:
        async for _ in events:
            pass
    return events.result


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(1)])
async def test_what_a_run_had_is_kept_also_when_the_interpreter_is_told_to_stop(
    stop: BaseException,
) -> None:
    conversation = talk(call("work"), tools=[Work("work", stop)])
    with pytest.raises(type(stop)):
        await conversation.send("go")
    assert len(conversation.messages) == 3
    check_valid(conversation)


async def test_a_run_that_cannot_begin_changes_nothing() -> None:
    plugin = BrokenPlugin()
    conversation = talk("ok", plugins=[plugin])
    before = conversation.context
    with pytest.raises(HookError):
        await conversation.send("hi")
    assert conversation.context == before
    plugin.broken = False
    assert (await conversation.send("hi")).text == "ok"


# --- runs that are cancelled --------------------------------------------------------------------


async def work(args: Any, ctx: ToolContext) -> ToolResult:
    await ctx.update("half")
    for _ in range(5):
        await asyncio.sleep(0)
    return ToolResult.text("done")


async def busy(mode: ExecutionMode) -> tuple[Conversation, RecordingSink]:
    """A conversation after its first run, with a busy one ahead, and a sink for that one."""
    sink = RecordingSink()
    script: list[Step] = [
        "hello",
        say("Let me see.", call("work"), call("nope"), call("work")),
        call("work"),
        "That is all.",
    ]
    conversation = talk(*script, tools=[Work("work", work)], default_execution_mode=mode)
    await conversation.send("hi")
    conversation.config = conversation.config.replace(event_sink=sink)
    return conversation, sink


def seen(events: Sequence[AgentEvent]) -> Iterator[AgentMessage]:
    """What the user has seen of a run: its messages, and the text of an answer that was stopped."""
    yield from fold_events(events)
    for before, event in pairwise(events):
        if isinstance(event, MessageDiscarded) and event.reason == "aborted":
            assert isinstance(before, MessageEnd)
            assert isinstance(before.message, AssistantMessage)
            if text := before.message.plain_text:
                yield replace(before.message, content=(TextContent(text),))


async def goes_on(conversation: Conversation) -> None:
    """Whatever has become of the last run, the next one works."""
    check_valid(conversation)
    before = conversation.messages
    conversation.config = config_of("And on we go.")
    await conversation.send("Well?")
    assert conversation.messages[: len(before)] == before
    assert outline(conversation.messages[len(before) :]) == [
        "user: Well?", "assistant: And on we go.",
    ]  # fmt: skip


@pytest.mark.parametrize("mode", list(ExecutionMode))
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_token_may_be_cancelled_at_every_event(mode: ExecutionMode, streamed: bool) -> None:
    aborted = 0
    for number in count():
        signal = CancellationToken()
        conversation, _ = await busy(mode)
        history, sink = conversation.messages, CancellingSink(number, signal)
        conversation.config = conversation.config.replace(event_sink=sink)
        outcome = await outcome_of(conversation, signal, streamed)
        assert conversation.messages == (*history, *seen(sink.events))
        await goes_on(conversation)
        if isinstance(outcome, RunAborted):
            aborted += 1
        elif not signal.cancelled:  # there are not so many events
            break
    assert aborted > 20


class CancellingSink(RecordingSink):
    """Cancels a token at an event, counted from 0."""

    def __init__(self, number: int, signal: CancellationToken) -> None:
        super().__init__()
        self._number = number
        self._signal = signal

    def __call__(self, event: AgentEvent) -> None:
        if len(self.events) == self._number:
            self._signal.cancel("enough")
        super().__call__(event)


async def outcome_of(conversation: Conversation, signal: CancellationToken, streamed: bool) -> Any:
    try:
        if not streamed:
            return await conversation.send("go", signal)
        async with conversation.stream("go", signal) as events:
            async for _ in events:
                pass
        return events.result
    except LoopError as error:
        return error


@pytest.mark.parametrize("mode", list(ExecutionMode))
@pytest.mark.parametrize("streamed", [False, True])
async def test_the_task_may_be_cancelled_at_every_await(
    mode: ExecutionMode, streamed: bool
) -> None:
    for steps in count():
        conversation, sink = await busy(mode)
        history = conversation.messages
        task = asyncio.create_task(send(conversation, "go", streamed))
        for _ in range(steps):
            await asyncio.sleep(0)
        was_cancelled = task.cancel()
        await asyncio.wait([task])
        assert conversation.messages == (*history, *seen(sink.events))
        await goes_on(conversation)
        if not was_cancelled:
            assert steps > 10
            break
        assert task.cancelled()


class Stopping:
    """A transport that says something, calls a tool, and is stopped in the middle."""

    def __init__(self, *chunks: StreamChunk) -> None:
        self._chunks = chunks
        self.requests: list[StreamRequest] = []

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        if len(self.requests) > 1:
            yield Done(AssistantMessage.from_text("All right."))
            return
        yield Start(AssistantMessage.from_calls([]))
        for chunk in self._chunks:
            yield Chunk(chunk)
        signal.cancel("enough")
        await asyncio.Event().wait()


async def test_what_the_user_saw_before_a_stop_is_kept_and_told_to_the_model() -> None:
    said = (ReasoningChunk("hm"), TextChunk("First, "), TextChunk("we"), ToolCallChunk(0, "c", "x"))
    model = Stopping(*said)
    conversation = Conversation(LoopConfig(stream=model))
    with pytest.raises(RunAborted):
        await conversation.send("Tell me.", CancellationToken())
    check_valid(conversation)
    broken = conversation.messages[-1]
    assert isinstance(broken, AssistantMessage)
    assert broken.content == (TextContent("First, we"),)
    assert (broken.stop_reason, broken.error_message) == (
        StopReason.ABORTED,
        "the run was aborted",
    )
    await conversation.send("First what?")
    assert [m.plain_text for m in model.requests[1].messages] == [
        *("Tell me.", "First, we", "First what?")
    ]
    assert [m["role"] for m in to_openai_messages(conversation.messages)] == [
        *("user", "assistant", "user", "assistant")
    ]


def test_of_what_was_broken_off_only_what_was_said_is_sent() -> None:
    made = ToolCall("c", "x", {})
    broken = [
        AssistantMessage((TextContent("said"),), StopReason.ABORTED),
        AssistantMessage((TextContent("said"), made), StopReason.ABORTED),
        AssistantMessage((TextContent(" "),), StopReason.ABORTED),
        AssistantMessage((TextContent("said"),), StopReason.ERROR),
    ]
    history = [message for each in broken for message in (UserMessage("go"), each)]
    sent = [m for m in sendable(history, ReasoningTarget()) if isinstance(m, AssistantMessage)]
    assert sent == broken[:1]


async def test_an_answer_that_was_stopped_can_be_asked_for_again() -> None:
    model = Stopping(TextChunk("First, we"))
    conversation = Conversation(LoopConfig(stream=model))
    with pytest.raises(RunAborted):
        await conversation.send("Tell me.", CancellationToken())
    await conversation.send()
    assert outline(conversation.messages) == ["user: Tell me.", "assistant: All right."]


async def test_a_token_that_is_cancelled_already_loses_no_prompt() -> None:
    signal = CancellationToken()
    signal.cancel()
    conversation = talk("ok")
    with pytest.raises(RunAborted):
        await conversation.send("hi", signal)
    assert outline(conversation.messages) == ["user: hi"]
    assert (await conversation.send()).text == "ok"


# --- streaming ----------------------------------------------------------------------------------


async def test_a_stream_extends_the_context_too() -> None:
    sink = RecordingSink()
    conversation = talk("one", call("work"), "two", tools=[Work()], event_sink=sink)
    await conversation.send("first")
    sink.events.clear()
    async with conversation.stream("second", max_buffered=1) as events:
        got = [event async for event in events]
        assert outline(conversation.messages)[-1] == "assistant: two"
    assert got == sink.events
    assert events.result.text == "two"
    assert conversation.messages[2:] == events.result.messages


async def test_a_stream_without_a_prompt_goes_on() -> None:
    conversation = talk(failing("transient"), "here you are")
    with pytest.raises(StreamError):
        await conversation.send("question")
    async with conversation.stream() as events:
        async for _ in events:
            pass
    assert outline(conversation.messages) == ["user: question", "assistant: here you are"]


@pytest.mark.parametrize("max_buffered", [1, 256])
async def test_a_stream_that_is_left_early_keeps_what_the_run_had(max_buffered: int) -> None:
    """At whatever event."""
    for number in count():
        conversation, sink = await busy(ExecutionMode.PARALLEL)
        history = conversation.messages
        ended = await leave_at(conversation, number, max_buffered)
        assert conversation.messages == (*history, *seen(sink.events))
        assert outline(conversation.messages)[2] == "user: go"
        await goes_on(conversation)
        if ended:
            assert number > 20
            break


async def leave_at(conversation: Conversation, number: int, max_buffered: int) -> bool:
    async with conversation.stream("go", max_buffered=max_buffered) as events:
        seen = 0
        async for _ in events:
            seen += 1
            if seen > number:
                return False
    return True


async def test_a_stream_that_is_not_entered_does_not_begin() -> None:
    conversation = talk("ok")
    events = conversation.stream("unsaid")
    with pytest.raises(RuntimeError, match="async with"):
        _ = events.result
    assert (await conversation.send("hi")).text == "ok"
    assert outline(conversation.messages) == ["user: hi", "assistant: ok"]


# --- one at a time ------------------------------------------------------------------------------


@pytest.mark.parametrize("first_streamed", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_two_runs_at_once_are_refused_and_nothing_is_lost(
    first_streamed: bool, streamed: bool
) -> None:
    waiting = Waiting()
    conversation = talk(call("wait"), "one", "two", tools=[Work("wait", waiting)])
    first = asyncio.create_task(send(conversation, "first", first_streamed))
    await waiting.started.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="run in progress: wait for it to end, or steer it"):
            await send(conversation, "too soon", streamed)
    waiting.release.set()
    assert (await first).text == "one"
    assert (await send(conversation, "second", streamed)).text == "two"
    assert outline(conversation.messages) == [
        "user: first", "assistant: ", "tool_result: released", "assistant: one",
        "user: second", "assistant: two",
    ]  # fmt: skip


async def test_a_crowd_gets_in_one_at_a_time() -> None:
    conversation = talk(*["ok"] * 10)
    outcomes = await asyncio.gather(
        *(conversation.send(str(number)) for number in range(10)), return_exceptions=True
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, RuntimeError)]
    assert len(refused) == 9
    assert outline(conversation.messages) == ["user: 0", "assistant: ok"]


async def test_conversations_with_one_config_run_at_once() -> None:
    config = config_of(*["ok"] * 10)
    conversations = [Conversation(config) for _ in range(10)]
    await asyncio.gather(*(c.send(str(number)) for number, c in enumerate(conversations)))
    for number, conversation in enumerate(conversations):
        assert outline(conversation.messages) == [f"user: {number}", "assistant: ok"]


# --- saving and loading -------------------------------------------------------------------------

EVERYTHING = AgentContext(
    "Be brief.\nAnd kind: é😀\u2028.",
    (
        SystemMessage("note", 1),
        UserMessage("plain", 2),
        UserMessage(
            (TextContent("look"), ImageContent("data:image/png;base64,AA==", "image/png", "a dot"))
        ),
        AssistantMessage(
            (
                ThinkingContent("a thought"),
                ReasoningContent("a reason"),
                ReasoningDetailsContent(
                    ({"type": "reasoning.encrypted", "data": "x", "new": [1]},)
                ),
                TextContent("I will look."),
                ToolCall("c1", "look", {"path": "/tmp", "deep": {"list": [1, 2.5, None, True]}}),
            ),
            StopReason.TOOL_USE,
            timestamp=3,
            usage=Usage(1, 2, 3, 4),
        ),
        ToolResultMessage(
            "c1",
            "look",
            (TextContent("seen"), ImageContent("https://example.org/a.png")),
            is_error=True,
            narration="Looked.",
            details={"kind": "x", "numbers": [1, 2]},
            timestamp=4,
        ),
        CustomMessage("mark", {"by": ["host"]}, 5),
        AssistantMessage((), StopReason.ERROR, "broken", 6),
    ),
    RunIdentity("child", "parent", 2, "talk", 1_900_000_000_000),
)


def test_what_was_saved_can_be_loaded(tmp_path: Path) -> None:
    path, config = tmp_path / "talk.json", config_of()
    Conversation(config, EVERYTHING).save(path)
    loaded = Conversation.load(path, config)
    assert loaded.context == EVERYTHING
    assert loaded.config is config


@given(TEXT, transcripts(), IDENTITIES)
@settings(max_examples=100)
def test_any_context_survives_the_disk(
    prompt: str, messages: list[AgentMessage], identity: RunIdentity
) -> None:
    context = AgentContext(prompt, tuple(messages), identity)
    with TemporaryDirectory() as folder:
        path = Path(folder, "talk.json")
        Conversation(config_of(), context).save(path)
        assert Conversation.load(path, config_of()).context == context


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_strings_or_path_like(
    kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    talk().save(kind("talk.json"))
    assert Conversation.load(kind("talk.json"), config_of()).context == AgentContext("Be brief.")
    assert os.listdir() == ["talk.json"]


def test_another_system_prompt_for_what_was_saved(tmp_path: Path) -> None:
    config = config_of()
    Conversation(config, EVERYTHING).save(tmp_path / "talk.json")
    for prompt in ("Be kind.", ""):
        loaded = Conversation.load(tmp_path / "talk.json", config, system_prompt=prompt)
        assert loaded.context == replace(EVERYTHING, system_prompt=prompt)


async def test_a_loaded_conversation_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    conversation = talk(call("work"), failing("transient"), tools=[Work()])
    with pytest.raises(StreamError):
        await conversation.send("go")
    conversation.save(path)
    model = ScriptedStream(["There you are."])
    loaded = Conversation.load(path, LoopConfig(stream=model))
    await loaded.send()
    assert tuple(model.requests[0].messages) == conversation.messages
    assert outline(loaded.messages) == [
        "user: go", "assistant: ", "tool_result: done", "assistant: There you are.",
    ]  # fmt: skip


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    Conversation(config_of(), EVERYTHING).save(path)
    talk().save(path)
    assert Conversation.load(path, config_of()).context == AgentContext("Be brief.")
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def small_disk(limit: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes."""
    resource = pytest.importorskip("resource", reason="needs POSIX")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_halfway_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk().save(path)
    before = path.read_bytes()
    large = Conversation(config_of(), AgentContext("x" * 3_000_000))
    with small_disk(1_000_000), pytest.raises(OSError, match="too large"):
        large.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_has_no_json_is_saved_as_text(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    context = AgentContext("half a character: \ud83d").extend([CustomMessage("x", {1, 2})])
    Conversation(config_of(), context.extend([CustomMessage("y", object())])).save(path)
    saved = Conversation.load(path, config_of()).context
    assert saved.system_prompt == "half a character: \ufffd"
    assert "object" in str(saved.messages[1])
    assert list(tmp_path.iterdir()) == [path]


def test_a_target_that_cannot_be_replaced_leaves_no_draft(tmp_path: Path) -> None:
    folder = tmp_path / "talk.json"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match=r"talk\.json"):
        talk().save(folder)
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(FileNotFoundError, match=r"nowhere/talk\.json'$"):
        talk().save(tmp_path / "nowhere" / "talk.json")


def test_a_saved_file_keeps_its_permissions_and_its_place(tmp_path: Path) -> None:
    path, link = tmp_path / "talk.json", tmp_path / "link.json"
    link.symlink_to(path.name)
    talk().save(link)
    assert path.stat().st_mode & 0o777 == 0o600  # nobody else's, to begin with
    for mode in (0o640, 0o400):
        path.chmod(mode)
        Conversation(config_of(), AgentContext(oct(mode))).save(link)
        assert path.stat().st_mode & 0o777 == mode
        assert Conversation.load(path, config_of()).context.system_prompt == oct(mode)
    assert link.is_symlink()


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path, config = tmp_path / "talk.json", config_of()
    sizes = [AgentContext("x" * size) for size in (10, 3_000_000)]
    stop, seen = threading.Event(), set[int]()

    def load() -> None:
        while not stop.is_set():
            seen.add(len(Conversation.load(path, config).context.system_prompt))

    Conversation(config, sizes[0]).save(path)
    reader = threading.Thread(target=load)
    reader.start()
    try:
        for number in range(50):
            with suppress(PermissionError):  # Windows, while the file is open
                Conversation(config, sizes[number % 2]).save(path)
    finally:
        stop.set()
        reader.join()
    assert seen <= {10, 3_000_000}
    assert list(tmp_path.iterdir()) == [path]


def test_two_may_save_to_one_file_at_once(tmp_path: Path) -> None:
    """The last one wins, and the file is always one of theirs."""
    path, config = tmp_path / "talk.json", config_of()
    contexts = [AgentContext(letter * 1_000_000) for letter in "abcd"]

    def save(context: AgentContext) -> None:
        for _ in range(20):
            Conversation(config, context).save(path)
            assert Conversation.load(path, config).context in contexts

    race(*(partial(save, context) for context in contexts))
    assert list(tmp_path.iterdir()) == [path]


GARBAGE: dict[str, tuple[bytes, str, str]] = {
    "nothing": (b"", "$", "truncated"),
    "no JSON": (b"hello", "$", "malformed"),
    "half a file": (b'{"system_prompt":"Be bri', "$", "truncated"),
    "no UTF-8": (b'{"system_prompt":"\xff"}', "$", "utf-8"),
    "a list": (b"[]", "$", "Expected `object`, got `array`"),
    "no list": (b'{"messages":5}', "$.messages", "Expected `array`, got `int`"),
    "a stranger": (b'{"messages":[{"role":"nobody"}]}', "$.messages[0].role", "nobody"),
    "half a message": (b'{"messages":[{"role":"user"}]}', "$.messages[0]", "content"),
    "a bad identity": (b'{"identity":{"run_id":1}}', "$.identity.run_id", "Expected `str`"),
    "too deep": (b'{"messages":[{"role":"custom","kind":"x","payload":'
                 + b"[" * 100_000 + b"]" * 100_000 + b"}]}", "$", "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("name", GARBAGE)
def test_a_file_that_holds_no_conversation_is_told_with_the_place(
    name: str, tmp_path: Path
) -> None:
    data, place, reason = GARBAGE[name]
    path = tmp_path / "talk.json"
    path.write_bytes(data)
    with pytest.raises(DecodeError) as caught:
        Conversation.load(path, config_of())
    assert caught.value.path == place
    assert reason in caught.value.reason


def test_a_file_that_is_not_there_is_told_as_usual(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Conversation.load(tmp_path / "talk.json", config_of())


def test_loading_needs_a_config(tmp_path: Path) -> None:
    talk().save(tmp_path / "talk.json")
    with pytest.raises(TypeError, match="must be a LoopConfig"):
        Conversation.load(tmp_path / "talk.json", None)  # type: ignore[arg-type]


async def test_what_it_holds_is_checked_when_it_is_set() -> None:
    conversation = Conversation(LoopConfig(stream=ScriptedStream(["ok"])))
    with pytest.raises(TypeError, match="must be an AgentContext, not str"):
        conversation.context = "x"  # type: ignore[assignment]
    with pytest.raises(TypeError, match="must be a LoopConfig, not int"):
        conversation.config = 5  # type: ignore[assignment]
    conversation.context = AgentContext("sys")
    assert (await conversation.send("go")).text == "ok"


async def test_nothing_is_set_in_the_middle_of_a_run() -> None:
    waiting = Waiting()
    stream = ScriptedStream([call("wait"), "ok"])
    conversation = Conversation(LoopConfig(stream=stream, tools=[Work("wait", waiting)]))
    task = asyncio.create_task(conversation.send("go"))
    await waiting.started.wait()
    with pytest.raises(RuntimeError, match="has a run in progress"):
        conversation.context = AgentContext("another")
    with pytest.raises(RuntimeError, match="has a run in progress"):
        conversation.config = LoopConfig(stream=stream)
    waiting.release.set()
    assert (await task).text == "ok"
    assert len(conversation.messages) == 4


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(b'{"system_prompt": 5}')
    with pytest.raises(DecodeError, match=r"talk\.json.*\$\.system_prompt"):
        Conversation.load(path, LoopConfig(stream=ScriptedStream([])))


async def test_each_run_of_a_logged_conversation_is_a_run_of_its_own() -> None:
    store = MemoryStore()
    config = LoopConfig(stream=ScriptedStream(["One.", "Two."]), run_log=RunLog(store))
    identity = RunIdentity.root("first", conversation_id="chat")
    conversation = Conversation(config, AgentContext("", identity=identity))
    await conversation.send("a")
    await conversation.send("b")
    runs = store.runs(conversation_id="chat")
    assert len({run.run_id for run in runs}) == len(runs) == 2
    assert runs[-1].run_id == "first"


async def test_a_logged_run_is_of_the_conversation_that_the_config_names() -> None:
    store = MemoryStore()
    config = LoopConfig(
        stream=ScriptedStream(["One.", "Two."]), run_log=RunLog(store), conversation_id="chat"
    )
    conversation = Conversation(config)
    await conversation.send("a")
    await conversation.send("b")
    assert len(store.runs(conversation_id="chat")) == 2
