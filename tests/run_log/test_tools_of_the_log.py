"""What is in a log, when it is written, and what can be done with it besides going on."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    ConfigError,
    CustomMessage,
    ImageContent,
    LoopConfig,
    RunAborted,
    RunResult,
    StopReason,
    StreamErrorKind,
    SystemMessage,
    TextContent,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    UserMessage,
    agent_tool,
    dump_transcript,
    run,
    run_continue,
)
from clark_agent.errors import InvalidContinuationError, failure_of
from clark_agent.events import TurnEnd
from clark_agent.export import to_anthropic_messages, to_markdown, to_openai_messages
from clark_agent.history import repair_history
from clark_agent.messages.wire import decode_json, encode_json
from clark_agent.replay import replay
from clark_agent.run_log import (
    Durability,
    JsonlStore,
    LoadedRun,
    LogDamaged,
    LogProblem,
    MemoryStore,
    RunLog,
    RunLogError,
    SqliteStore,
    cancel,
    diff,
    fold,
    fork,
    resume,
    usage_tree,
)
from clark_agent.run_log.chunking import cut, joined
from clark_agent.run_log.records import (
    RUN_LOG_VERSION,
    Answered,
    Asked,
    ContextEdited,
    Entry,
    Record,
    RunBegan,
    RunFailed,
    SteeringAccepted,
    ToolEnded,
    ToolStarted,
    ToolWithdrawn,
)
from clark_agent.run_log.writer import RunWriter
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    Chunk,
    Done,
    Error,
    MessageAssembler,
    ReasoningChunk,
    ReasoningDetailsChunk,
    Start,
    StreamEvent,
    StreamRequest,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
)
from clark_agent.testing import ScriptedStream, Step, call, check_events, say
from clark_agent.trajectory import (
    InMemoryTrajectorySink,
    TrajectoryRecorder,
    decode_record,
    encode_record,
    from_trajectory,
    to_trajectory,
)
from clark_agent.trajectory import records as rec
from clark_agent.transports import OpenAIChat
from tests.cases import all_cases
from tests.engine.support import let_others_run
from tests.run_log.stories import (
    EMPTY,
    FAILURES,
    STORIES,
    Story,
    Ticking,
    Told,
    after,
    begin,
    carried,
    copy_of,
    fill,
    long_config,
    root_of,
    told,
    undated,
)
from tests.run_log.waiting_stories import live
from tests.strategies import images, provider_items, sources

ALL = [*STORIES, *FAILURES]


# --- all that a log says --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
async def test_what_the_log_of_a_run_says_is_what_the_run_was(name: str) -> None:
    played = await told(name)
    check_events(played.events)
    if name in STORIES and isinstance(played.outcome, BaseException):
        raise played.outcome
    assert isinstance(played.outcome, BaseException) is (name in FAILURES)
    with all_cases() as case:
        with case("messages"):
            assert fold(played.loaded).messages == list(carried(played.outcome))
            assert [record.seq for record in played.records] == list(range(len(played.records)))
        with case("tokens"):
            check_tokens(played)
        with case("export"):
            check_export(played)
        with case("trajectory"):
            check_trajectory(played)


def check_tokens(played: Told) -> None:
    outcome = played.outcome
    ended = outcome if isinstance(outcome, RunResult) else failure_of(outcome)
    assert ended is not None
    tree = usage_tree(played.store, played.run_id)
    assert tree.usage == ended.usage
    assert tree.tree_usage == ended.tree_usage


def check_export(played: Told) -> None:
    messages = [*loaded_history(played.loaded), *carried(played.outcome)]
    check_openai(to_openai_messages(messages, "Be nice."))
    check_anthropic(to_anthropic_messages(messages))
    assert to_openai_messages(messages, "Be nice.")[0] == {"role": "system", "content": "Be nice."}


def check_trajectory(played: Told) -> None:
    """It keeps the messages, also in bytes, and a log that was made from one keeps them again."""
    records = to_trajectory(played.loaded)
    assert [record.seq for record in records] == list(range(len(records)))
    for record in records:
        assert decode_record(encode_record(record)).seq == record.seq
    again = from_trajectory([decode_record(encode_record(record)) for record in records])
    messages = undated(carried(played.outcome))
    assert undated(fold(again).messages) == messages
    assert undated(fold(from_trajectory(to_trajectory(again))).messages) == messages


# --- fork -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
async def test_a_run_can_be_forked_at_the_end_of_every_turn(name: str) -> None:
    """The history is what the run had when the turn ended, as its events tell."""
    played = await told(name)
    ends = [0]
    messages = 0
    for event in played.events:
        kind = str(event.__struct_config__.tag)
        messages += (kind == "message_end") - (kind == "message_discarded")
        if isinstance(event, TurnEnd):
            ends.append(messages)
    if name in ("a_hook_ends_it", "cancelled_while_a_plugin_asks"):  # its turn left no request
        ends.pop()
    whole = fold(played.loaded).messages
    for turn, end in enumerate(ends):
        context = fork(played.store, played.run_id, turn=turn)
        own = list(context.messages[len(loaded_history(played.loaded)) :])
        expected = whole[:end] if turn else list(root_began(played.loaded).prompts)
        assert undated(own) == undated(expected), turn
        assert context.system_prompt == root_began(played.loaded).system_prompt
    with pytest.raises(InvalidContinuationError, match=f"has {len(ends) - 1} complete turns"):
        fork(played.store, played.run_id, turn=len(ends))
    with pytest.raises(InvalidContinuationError):
        fork(played.store, played.run_id, turn=-1)
    assert fork(played.store, played.run_id).messages == (*loaded_history(played.loaded), *whole)


def root_began(loaded: LoadedRun) -> RunBegan:
    began = loaded.records[0].entry
    assert isinstance(began, RunBegan)
    return began


def loaded_history(loaded: LoadedRun) -> tuple[Any, ...]:
    return root_began(loaded).history


@pytest.mark.parametrize("name", ["batches", "hooks", "steering", "helpers", "overflows"])
async def test_a_fork_is_a_context_to_go_on_from(name: str) -> None:
    played = await told(name)
    turns = sum(isinstance(r.entry, Asked) and r.entry.attempt == 1 for r in played.records)
    for turn in range(turns):
        context = fork(played.store, played.run_id, turn=turn)
        assert repair_history(context.messages).changes == ()
        log = RunLog(MemoryStore())
        config = LoopConfig(stream=ScriptedStream(["Elsewhere."]), run_log=log)
        if isinstance(context.messages[-1], AssistantMessage):
            result = await run("And now?", context, config)
        else:
            result = await run_continue(context, config)
        assert result.text == "Elsewhere."
        began = root_began(root_of(log.store))
        assert began.history == context.messages
        assert began.identity.run_id != played.run_id


async def test_a_run_that_crashed_is_forked_up_to_its_last_whole_turn() -> None:
    played = await told("batches")
    for length in range(1, len(played.records)):
        context = fork(copy_of(played.store, played.run_id, length), played.run_id)
        assert repair_history(context.messages).changes == ()


async def test_turns_keep_their_numbers_in_a_run_that_was_resumed() -> None:
    played = await told("the_stream_fails")
    store, story = copy_of(played.store, played.run_id), begin("batches")
    config = story.config().replace(tools=[*story.tools, *begin("the_stream_fails").tools])
    result = await resume(store, played.run_id, config)
    assert result.text == "All is done."
    turns = [
        m for m in result.messages if isinstance(m, AssistantMessage)
    ]  # one kept answer a turn, from the third on in the second process
    for turn, message in enumerate(turns, 1):
        assert message in fork(store, played.run_id, turn=turn).messages
        assert message not in fork(store, played.run_id, turn=turn - 1).messages


# --- diff -----------------------------------------------------------------------------------------


async def two(first: Story, second: Story) -> str | None:
    store = MemoryStore()
    await first.play(RunLog(store))
    one = root_of(store).run_id
    await second.play(RunLog(store))
    (other,) = [s.run_id for s in store.runs() if s.depth == 0 and s.run_id != one]
    difference = diff(store, one, other)
    assert diff(store, one, one) is None
    return None if difference is None else str(difference)


@pytest.mark.parametrize("name", sorted(set(STORIES) - {"progress", "batches"}))
async def test_the_same_run_twice_does_not_differ(name: str) -> None:
    """But for times and ids. (Threads may come in any order.)"""
    assert await two(begin(name), begin(name)) is None


async def test_the_ids_that_a_provider_gives_its_calls_are_no_difference() -> None:
    """They are never the same twice."""
    names = count(1)

    def streamed(request: Any) -> list[Any]:
        call_id = f"call_of_provider_{next(names)}"
        chunk = ToolCallChunk(0, call_id, "work", "{}")
        message = AssistantMessage((ToolCall(call_id, "work", {}),), StopReason.TOOL_USE)
        return [Start(EMPTY), Chunk(chunk), Done(message)]

    def made() -> Story:
        story = Story()
        story.deed("work", after(1))
        story.model(streamed, streamed, "Done.")
        return story

    assert await two(made(), made()) is None


async def test_the_first_difference_is_named() -> None:
    first, second = begin("one_after_the_other"), begin("one_after_the_other")
    second.tools[1].does = after(2, "otherwise")
    text = await two(first, second)
    assert text is not None
    assert "tool_ended" in text
    assert "result.content[0].text" in text
    assert '"otherwise"' in text
    second = begin("one_after_the_other")
    second.prompts = "Something else."
    assert "prompts[0].content" in (await two(begin("one_after_the_other"), second) or "")


# --- usage ----------------------------------------------------------------------------------------


async def test_usage_is_summed_over_the_runs_below() -> None:
    played = await told("helpers")
    tree = usage_tree(played.store, played.run_id)
    assert tree.usage == played.outcome.usage
    assert tree.tree_usage == played.outcome.tree_usage
    assert tree.outcome == "done"
    assert tree.model_calls == 3
    assert tree.tool_calls == 4
    assert [child.tool_calls for child in tree.children] == [2, 2, 2]
    assert [len(child.children) for child in tree.children] == [1, 1, 1]
    assert str(tree).count("\n") == 6
    for child in tree.children:
        assert child.tree_usage == child.usage + child.children[0].usage


# --- exports --------------------------------------------------------------------------------------

STRANGE: list[AgentMessage] = [
    SystemMessage("From the host.", 1),
    UserMessage((TextContent("Look:"), ImageContent("https://x/y.png", alt="y")), 2),
    CustomMessage("note", {"a": 1}, 3),
    AssistantMessage.from_calls(
        [ToolCall("a", "read", {"p": 1}), ToolCall("b", "read", "no object")], "Let me see."
    ),
    ToolResultMessage("a", "read", (TextContent("```\ncode\n```"),), timestamp=4),
    ToolResultMessage(
        "b", "read", (ImageContent("data:image/png;base64,AAAA"),), is_error=True, timestamp=5
    ),
    UserMessage("Two in a row.", 6),
    UserMessage("", 7),
    AssistantMessage((), StopReason.END_TURN, timestamp=8),
    UserMessage("Then?", 9),
]


def check_openai(messages: list[dict[str, Any]]) -> None:
    """What Chat Completions insists on."""
    json.dumps(messages)
    open_calls: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] in open_calls
            open_calls.remove(message["tool_call_id"])
            assert isinstance(message["content"], str)
            continue
        assert open_calls == [], "every call is answered right behind its message"
        if message["role"] == "assistant":
            calls = message.get("tool_calls", [])
            assert calls or isinstance(message["content"], str), "an answer says or calls something"
            assert calls or "tool_calls" not in message
            open_calls = [made["id"] for made in calls]
            assert len(set(open_calls)) == len(open_calls)
            for made in calls:
                assert made["type"] == "function"
                assert isinstance(json.loads(made["function"]["arguments"]), dict)
        else:
            assert message["role"] in ("system", "user")
            assert isinstance(message["content"], (str, list))
    assert open_calls == []


def check_anthropic(messages: list[dict[str, Any]]) -> None:
    """What the Messages API insists on."""
    json.dumps(messages)
    assert messages[0]["role"] == "user"
    uses: set[str] = set()
    for before, message in zip([None, *messages], messages, strict=False):
        assert message["role"] in ("user", "assistant")
        assert before is None or before["role"] != message["role"], "roles take turns"
        assert message["content"], "no message is empty"
        results = [b["tool_use_id"] for b in message["content"] if b["type"] == "tool_result"]
        assert set(results) == uses
        assert len(results) == len(uses)
        kinds = [block["type"] for block in message["content"]]
        assert kinds == sorted(kinds, key=lambda kind: kind != "tool_result"), "results come first"
        for block in message["content"]:
            assert block["type"] != "text" or block["text"].strip(), "no text is empty"
        uses = {b["id"] for b in message["content"] if b["type"] == "tool_use"}
        assert all(isinstance(b["input"], dict) for b in message["content"] if "input" in b)
    assert not uses


def test_strange_messages_are_exported_too() -> None:
    check_openai(to_openai_messages(STRANGE))
    check_anthropic(to_anthropic_messages(STRANGE))


def test_images_of_results_are_exported() -> None:
    written = to_openai_messages(STRANGE)
    images = [
        part["image_url"]["url"]
        for message in written
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    assert images == ["https://x/y.png", "data:image/png;base64,AAAA"]


def test_arguments_that_were_no_json_are_exported_as_the_model_wrote_them() -> None:
    sentinel = {"__clark_arg_parse_error": "eof", "__clark_arg_raw": '{"a":'}
    messages: list[AgentMessage] = [
        UserMessage("Go."),
        AssistantMessage.from_calls([ToolCall("a", "read", sentinel)]),
        ToolResultMessage("a", "read", (TextContent("no"),), is_error=True),
    ]
    for written in (to_openai_messages(messages), to_anthropic_messages(messages)):
        assert "__clark_arg" not in json.dumps(written)
    check_openai(to_openai_messages(messages))
    check_anthropic(to_anthropic_messages(messages))


def test_an_export_is_what_a_transport_sends() -> None:
    request = StreamRequest(system_prompt="Be nice.", messages=STRANGE, tools=())
    sent = OpenAIChat("gpt-4o", api_key="k").encode(request)
    assert to_openai_messages(STRANGE, "Be nice.") == sent["messages"]


def test_a_page_for_people() -> None:
    page = to_markdown(STRANGE, title="Talk", system_prompt="Be nice.")
    assert page.startswith("# Talk\n\n## System\n\nBe nice.\n")
    assert "![y](https://x/y.png)" in page
    assert "AAAA" not in page  # no pictures as text
    assert "### Result of `read`, failed" in page
    assert "````\n```\ncode\n```\n````" in page
    check_fences(page)


@given(st.lists(st.sampled_from(["`", "```", "````", "~~~", "x", "\n", " ", "``` x", "\t"])))
def test_nothing_breaks_out_of_its_fence(parts: list[str]) -> None:
    text = "".join(parts)
    result = ToolResultMessage("a", "read", (TextContent(text),), timestamp=4)
    page = to_markdown([say("", ToolCall("a", "read", {"x": text})), result, UserMessage("MARK")])
    assert check_fences(page)[-3:] == ["## User", "", "MARK"]


def check_fences(page: str) -> list[str]:
    """The lines outside of code blocks, by the rules of CommonMark; every block is closed."""
    outside: list[str] = []
    fence = ""
    for line in page.splitlines():
        bare = line.strip()
        found = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if fence and found and len(found[1]) >= len(fence) and bare == fence[0] * len(bare):
            fence = ""
        elif not fence and found and not (found[1][0] == "`" and "`" in bare[len(found[1]) :]):
            fence = found[1]
        elif not fence:
            outside.append(line)
    assert fence == ""
    return outside


# --- trajectories ---------------------------------------------------------------------------------


def of_interest(payload: Any) -> Any:
    """What both ways of making trajectory records tell."""
    match payload:
        case rec.TurnStarted():
            return "turn started"
        case rec.TurnEnded(message, results):
            return ("turn ended", message, tuple(results))
        case rec.MessageAppended(message):
            return ("appended", message)
        case rec.ToolStarted():
            return ("started", payload.tool_call_id, payload.tool_name)
        case rec.ToolEnded():
            return ("ended", payload.tool_call_id, payload.result, payload.is_error)
        case rec.RunStarted():
            return "run started"
        case rec.RunEnded():
            return "run ended"
        case _:
            return None


@pytest.mark.parametrize("name", ALL)
async def test_a_trajectory_from_a_log_is_as_its_recorder_would_have_it(name: str) -> None:
    """Answers that were thrown away are in neither."""
    story, sink, store = begin(name), InMemoryTrajectorySink(), MemoryStore()
    recorder = TrajectoryRecorder(sink, clock=Ticking())
    story.settings["plugins"] = [*story.settings.get("plugins", ()), recorder]
    await story.play(RunLog(store))
    loaded = root_of(store)
    made = [of_interest(r.payload) for r in to_trajectory(loaded)]
    recorded = [of_interest(r.payload) for r in sink.records]
    assert [r.seq for r in sink.records] == list(range(len(sink.records)))
    made, recorded = starts_first(made), starts_first(recorded)
    # A call that was stopped before its turn came is announced, and never begun.
    recorded = [r for r in recorded if r[0] != "started" or r in made]
    if name in ("a_hook_ends_it", "cancelled_while_a_plugin_asks"):  # the log has nothing of it
        recorded = [*recorded[:-3], recorded[-1]]
    for one, other in zip(made, recorded, strict=False):
        assert one == other
    assert len(made) == len(recorded)


def starts_first(told: Iterable[Any]) -> list[Any]:
    """In a batch the starts are told before, and written when they happen: kept in their order."""
    kept = [entry for entry in told if entry is not None]
    starts = [entry for entry in kept if entry[0] == "started"]
    return [*starts, *[entry for entry in kept if entry[0] != "started"]]


async def test_no_trajectory_is_made_of_a_damaged_log() -> None:
    played = await told("batches")
    for lost in played.records:
        kept = tuple([record for record in played.records if record is not lost])
        problem = LogProblem(f"record {lost.seq}", "its checksum is wrong", "", lost.seq)
        with pytest.raises(LogDamaged, match="its checksum is wrong"):
            to_trajectory(LoadedRun(played.run_id, kept, (problem,)))


# --- how an answer was cut ------------------------------------------------------------------------

TEXTS = st.text(max_size=6)
CHUNKS: st.SearchStrategy[Any] = st.one_of(
    st.builds(TextChunk, TEXTS),
    st.builds(ThinkingChunk, TEXTS),
    st.builds(ReasoningChunk, TEXTS),
    st.builds(
        ReasoningDetailsChunk,
        st.lists(st.dictionaries(TEXTS, st.integers(-9, 9), max_size=2), max_size=3).map(tuple),
    ),
    st.builds(
        ToolCallChunk,
        st.integers(0, 2),
        st.none() | TEXTS,
        st.none() | TEXTS,
        st.none() | st.sampled_from(["{", "}", '"a":1', ",", "nonsense", ""]),
    ),
    st.builds(BlockChunk, images(TEXTS) | provider_items(TEXTS)),
    st.builds(AnnotationChunk, sources(TEXTS)),
)


def through_json(pieces: Any) -> Any:
    return json.loads(encode_json(pieces))


@given(st.lists(CHUNKS, max_size=12), st.booleans())
def test_deltas_come_back_as_they_were(chunks: list[Any], is_spelt: bool) -> None:
    assembler = MessageAssembler(lambda: "made up")
    for chunk in chunks:
        assembler.feed(chunk)
    message = assembler.message() if is_spelt else say("Something else.")
    pieces = cut(chunks, message)
    assert list(joined(through_json(pieces), message)) == chunks


HALVES = st.lists(st.sampled_from(["a", "\ud83d", "\ude00", "é", "\ud83d\ude00"]), max_size=6)


@given(HALVES)
async def test_halves_of_a_character_are_no_harm(deltas: list[str]) -> None:
    """A provider may cut a character in two; a half is no character, and has no JSON."""
    assembler = MessageAssembler()
    for delta in deltas:
        assembler.feed(TextChunk(delta))
    message = assembler.message()
    events: list[StreamEvent] = [
        Start(EMPTY),
        *[Chunk(TextChunk(delta)) for delta in deltas],
        Done(message),
    ]
    story, store = Story(), MemoryStore()
    story.model(lambda request: events)
    outcome = await story.play(RunLog(store))
    assert isinstance(outcome, RunResult), outcome
    loaded = root_of(store)
    (answered,) = [r.entry for r in loaded.records if isinstance(r.entry, Answered)]
    written = decode_json(encode_entry_as_written(answered), Answered)
    chunks = list(joined(written.pieces or (), written.message))
    assert "".join([getattr(chunk, "delta", "") for chunk in chunks]) == message.plain_text


def encode_entry_as_written(entry: Answered) -> bytes:
    """The JSON that a store is given."""
    taken: list[bytes] = []

    class Taking:
        def append(self, record: Record, data: bytes) -> None:
            taken.append(data)

        def flush(self, *, sync: bool) -> None:
            pass

        async def barrier(self) -> None:
            pass

        def close(self) -> None:
            pass

    writer = RunWriter(RunLog(MemoryStore()), "x", Ticking())
    writer._appender = Taking()
    writer.write(entry)
    writer.close()
    return json.dumps(json.loads(taken[0])["entry"]).encode()


# --- what is in a log -----------------------------------------------------------------------------


async def test_every_kind_of_entry_occurs_and_can_be_read_back() -> None:
    seen: Counter[type] = Counter()
    for name in ALL:
        store = (await told(name)).store
        for summary in store.runs():
            for record in store.load(summary.run_id).records:
                seen[type(record.entry)] += 1
                again = decode_json(encode_json(record), Record)
                assert encode_json(again) == encode_json(record)
    played = await told("batches")
    taken_up = copy_of(played.store, played.run_id, 4)
    await resume(taken_up, played.run_id, begin("batches").config())
    seen.update(type(record.entry) for record in taken_up.load(played.run_id).records)
    _, _, waited, _ = await live("time_and_events")
    seen.update(type(record.entry) for record in waited.order)
    cancelled = MemoryStore()
    fill(cancelled, played.run_id, played.records[:4])
    cancel(cancelled, played.run_id, "enough")
    with pytest.raises(RunAborted, match="enough"):
        await resume(cancelled, played.run_id, begin("batches").config())
    seen.update(type(record.entry) for record in cancelled.load(played.run_id).records)
    # Only a run that is let go at the right moment has this one: see test_let_go.
    withdrawn = Record(RUN_LOG_VERSION, 0, "r", 0, ToolWithdrawn(tool_call_id="t"))
    assert decode_json(encode_json(withdrawn), Record) == withdrawn
    assert set(get_args(Entry)) - set(seen) == {ToolWithdrawn}


async def test_the_log_of_a_long_run_is_not_large(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    _, config = long_config(1_000, RunLog(store))
    result = await run("Go on.", AgentContext("Be quick."), config)
    assert len(result.messages) == 2_002
    (summary,) = store.runs()
    size = len(store.path_of(summary.run_id).read_bytes())
    assert size < 4 * len(dump_transcript(result.messages))


@pytest.mark.parametrize("kind", ["jsonl", "sqlite"])
async def test_a_call_is_in_the_log_before_it_runs(kind: str, tmp_path: Path) -> None:
    """A tool reads the log of its own run, as another process would."""
    seen: list[Any] = []

    def open_store() -> JsonlStore | SqliteStore:
        return JsonlStore(tmp_path) if kind == "jsonl" else SqliteStore(tmp_path / "runs.db")

    async def looks(args: Any, ctx: ToolContext) -> ToolResult:
        other = open_store()
        assert ctx.identity is not None
        entries = [record.entry for record in other.load(ctx.identity.run_id).records]
        if isinstance(other, SqliteStore):
            other.close()
        seen.append([e.tool_call_id for e in entries if isinstance(e, ToolStarted)])
        assert isinstance(entries[-1], ToolStarted)
        assert ctx.tool_call_id in seen[-1]
        assert any(isinstance(e, Answered) for e in entries)
        await asyncio.sleep(0)
        return ToolResult.text("seen")

    story = Story()
    story.deed("looks", looks)
    story.model([call("looks"), call("looks")], call("looks"), "Done.")
    store = open_store()
    outcome = await story.play(RunLog(store))
    assert isinstance(outcome, RunResult)
    results = [m for m in outcome.messages if isinstance(m, ToolResultMessage)]
    assert [m.plain_text for m in results] == ["seen"] * 3
    assert seen[-1] == ["t0c0", "t0c1", "t1c0"]
    if isinstance(store, SqliteStore):
        store.close()


async def test_the_results_of_a_call_are_in_the_log_before_the_next_begins() -> None:
    store = MemoryStore()
    story = begin("one_after_the_other")
    ended: list[int] = []

    async def looks(args: Any, ctx: ToolContext) -> ToolResult:
        (summary,) = store.runs()
        records = store.load(summary.run_id).records
        ended.append(sum(isinstance(r.entry, ToolEnded) for r in records))
        return ToolResult.text("seen")

    story.tools[0].does = looks
    await story.play(RunLog(store))
    assert ended == [0, 2, 3]


async def test_runs_at_once_and_children_have_logs_of_their_own(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    log = RunLog(store)
    stories = [begin("helpers") for _ in range(5)]
    outcomes = await asyncio.gather(*[story.play(log) for story in stories])
    assert all(isinstance(outcome, RunResult) for outcome in outcomes)
    summaries = list(store.runs())
    assert Counter(s.depth for s in summaries) == {0: 5, 1: 15, 2: 15}
    for summary in summaries:
        loaded = store.load(summary.run_id)
        assert loaded.problems == ()
        assert {record.run for record in loaded.records} == {summary.run_id}
        assert [record.seq for record in loaded.records] == list(range(len(loaded.records)))
        began = root_began(loaded)
        assert began.identity.parent_run_id == summary.parent_run_id
        assert (began.tool_call_id is None) is (summary.depth == 0)
        if summary.parent_run_id is not None:
            above = store.load(summary.parent_run_id).records
            started = [r.entry.tool_call_id for r in above if isinstance(r.entry, ToolStarted)]
            assert began.tool_call_id in started
    store.close()


async def test_what_is_sent_when_all_is_over_disturbs_nobody(tmp_path: Path) -> None:
    """From a listener, while the run closes; the event loop has nothing to complain of."""
    story = begin("steering_before_the_next_tool")
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c))

    def late(event: Any) -> None:
        if event.__struct_config__.tag == "agent_end":
            _ = story.steering.handle.steer("Too late.")

    story.settings["event_sink"] = late
    store = JsonlStore(tmp_path)
    log = RunLog(store)
    outcome = await story.play(log)
    await let_others_run()
    assert isinstance(outcome, RunResult)
    assert root_of(store).records[-1].entry.__struct_config__.tag == "run_ended"
    assert [str(m.plain_text) for m in outcome.undelivered] == ["Too late."]
    assert complaints == []
    assert log.dropped == 0


async def test_a_follow_up_is_written_down_as_one() -> None:
    """Also one that is sent just before it is looked for."""
    story = begin("plain")
    story.settings["plugins"] = [story.steering]
    sent: list[str] = []

    def follow(event: Any) -> None:
        if event.__struct_config__.tag == "turn_end" and not sent:
            sent.append("sent")
            _ = story.steering.handle.follow_up("One more thing.")

    story.settings["event_sink"] = follow
    story.models[0].steps = ("First.", "Second.")
    store = MemoryStore()
    outcome = await story.play(RunLog(store))
    assert isinstance(outcome, RunResult)
    accepted = [r.entry for r in root_of(store).records if isinstance(r.entry, SteeringAccepted)]
    assert [entry.when for entry in accepted] == ["follow_up"]


async def test_two_overflows_leave_the_transcript_that_the_model_was_shown() -> None:
    """What an overflow recovery changes for good is known to a run that is resumed."""
    story, store = begin("overflows"), MemoryStore()
    await story.play(RunLog(store))
    loaded = root_of(store)
    assert sum(isinstance(r.entry, ContextEdited) for r in loaded.records) >= 2
    last = story.models[0].asked[-1].messages
    folded = fold(loaded)
    assert undated(folded.transcript[: len(last)]) == undated(last)


async def test_overflows_that_drop_messages_leave_the_transcript_that_the_model_was_shown() -> None:
    class Dropping:
        def recover(self, messages: Sequence[AgentMessage], ctx: Any) -> Sequence[AgentMessage]:
            return [messages[0], *messages[-2:]]

    overflow: list[StreamEvent] = [
        Start(EMPTY),
        Error(EMPTY, StreamErrorKind.CONTEXT_OVERFLOW, "too big"),
    ]
    calls = [call("work", call_id=f"c{n}") for n in range(6)]
    script: list[Step] = [*calls[:3], overflow, *calls[3:], overflow, "Done."]
    story, store, model = Story(), MemoryStore(), ScriptedStream(script)
    story.deed("work", after(1))
    story.settings |= {"stream": model, "overflow_recovery": Dropping()}
    outcome = await story.play(RunLog(store))
    assert isinstance(outcome, RunResult), outcome
    folded = fold(root_of(store))
    assert folded.messages == list(outcome.messages)
    assert folded.transcript == [*model.requests[-1].messages, outcome.messages[-1]]
    assert len(folded.transcript) == 4


# --- logs that cannot be written ------------------------------------------------------------------


class Failing(MemoryStore):
    """A store whose so-manieth append or flush fails, in all its runs together."""

    def __init__(self, at: int, *, flushes: bool) -> None:
        super().__init__()
        self.at = at
        self.flushes = flushes
        self.count = 0

    def create(self, run_id: str) -> Any:
        return FailingAppender(super().create(run_id), self)

    def tick(self, *, is_flush: bool) -> None:
        if is_flush is self.flushes:
            self.count += 1
            if self.count > self.at:
                raise OSError(28, "No space left on device")


class FailingAppender:
    def __init__(self, appender: Any, store: Failing) -> None:
        self._appender = appender
        self._store = store
        self.close = appender.close

    def append(self, record: Record, data: bytes) -> None:
        self._store.tick(is_flush=False)
        self._appender.append(record, data)

    def flush(self, *, sync: bool) -> None:
        self._store.tick(is_flush=True)
        self._appender.flush(sync=sync)

    async def barrier(self) -> None:
        await asyncio.sleep(0)
        self._store.tick(is_flush=True)
        await self._appender.barrier()


FRAGILE = ["batches", "one_after_the_other", "hooks", "steering", "helpers", "finishing", "nudges"]


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("name", FRAGILE)
async def test_a_log_that_cannot_be_written_stops_the_run(name: str, flushes: bool) -> None:
    stopped, outcome = 0, None
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c))
    for at in range(200):
        story = begin(name)
        store = Failing(at, flushes=flushes)
        outcome = await story.play(RunLog(store))
        if isinstance(outcome, RunResult):
            break
        stopped += 1
        assert isinstance(outcome, RunLogError), (at, outcome)
        if story.sink.events:
            check_events(story.sink.events)
        changes = repair_history(outcome.messages).changes
        assert [c for c in changes if "plain_text" not in c.tool_call_id] == []
        records = [r for s in store.runs() for r in store.load(s.run_id).records]
        started = {r.entry.tool_call_id for r in records if isinstance(r.entry, ToolStarted)}
        if flushes:
            assert {c for c in story.ran if not c.startswith("blocking")} <= started, at
        await let_others_run()
        assert complaints == [], at
    assert stopped > 5
    assert isinstance(outcome, RunResult)


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("name", FRAGILE)
async def test_a_log_that_may_be_lost_stops_nobody(name: str, flushes: bool) -> None:
    played = await told(name)
    for at in range(200):
        log = RunLog(Failing(at, flushes=flushes), on_failure="drop")
        outcome = await begin(name).play(log)
        assert isinstance(outcome, RunResult), at
        assert undated(outcome.messages) == undated(played.outcome.messages)
        if not log.dropped:
            assert at > 5
            return
    raise AssertionError("it never comes through")


async def test_a_store_that_cannot_begin_a_run() -> None:
    class Closed(MemoryStore):
        def create(self, run_id: str) -> Any:
            raise OSError(30, "Read-only file system")

    story = begin("batches")
    outcome = await story.play(RunLog(Closed()))
    assert isinstance(outcome, RunLogError)
    assert isinstance(outcome.__cause__, OSError)
    assert (story.ran, story.sink.events, story.was_asked) == ([], [], 0)
    log = RunLog(Closed(), on_failure="drop")
    assert isinstance(await begin("batches").play(log), RunResult)
    assert log.dropped > 0


# --- durability -----------------------------------------------------------------------------------


class Counting(MemoryStore):
    """Writes down what its appenders are told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def create(self, run_id: str) -> Any:
        return CountingAppender(super().create(run_id), self.told)


class CountingAppender:
    def __init__(self, appender: Any, told: list[str]) -> None:
        self._appender = appender
        self._told = told
        self.close = appender.close

    def append(self, record: Record, data: bytes) -> None:
        self._told.append(str(record.entry.__struct_config__.tag))
        self._appender.append(record, data)

    def flush(self, *, sync: bool) -> None:
        self._told.append("SYNC" if sync else "flush")
        self._appender.flush(sync=sync)

    async def barrier(self) -> None:
        self._told.append("barrier")
        await self._appender.barrier()


async def told_to_the_store(durability: str, name: str = "one_after_the_other") -> list[str]:
    store = Counting()
    outcome = await begin(name).play(RunLog(store, durability=Durability(durability)))
    assert isinstance(outcome, RunResult)
    return store.told


async def test_by_default_the_disk_is_left_to_the_system() -> None:
    told_it = await told_to_the_store("system")
    assert "SYNC" not in told_it
    assert told_it[-2:] == ["flush", "barrier"]


async def test_with_every_record_the_disk_has_it() -> None:
    told_it = [what for what in await told_to_the_store("record") if what != "barrier"]
    assert "flush" not in told_it
    assert told_it[1::2] == ["SYNC"] * (len(told_it) // 2)
    assert "SYNC" not in told_it[::2]


async def test_with_every_turn_the_disk_has_what_it_brought() -> None:
    told_it = await told_to_the_store("turn")
    asked = [index for index, what in enumerate(told_it) if what == "asked"]
    assert [told_it[index + 1] for index in asked] == ["SYNC"] * len(asked)
    assert told_it[-3:] == ["run_ended", "SYNC", "barrier"]
    assert told_it.count("SYNC") == len(asked) + 1


@pytest.mark.parametrize("name", ALL)
async def test_everything_is_handed_on_before_the_next_effect(name: str) -> None:
    """Before a tool begins, and before anybody gets the result, the store is waited for."""
    store = Counting()
    await begin(name).play(RunLog(store))
    told_it = store.told
    after = [told_it[index + 1] for index, what in enumerate(told_it) if what == "tool_started"]
    assert after == ["barrier"] * len(after)
    assert told_it[1:3] == ["flush", "barrier"] or "steering" in name
    assert told_it[-2:] == ["flush", "barrier"]


# --- what is no JSON ------------------------------------------------------------------------------


class Thing:
    def __repr__(self) -> str:
        return "<a thing>"


def in_a_circle() -> dict[str, Any]:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    return circle


NOT_JSON: dict[str, Callable[[], Any]] = {
    "an object": Thing,
    "an object within": lambda: {"a": [Thing()]},
    "a set": lambda: {"a": {1, 2}},
    "a date": lambda: {"a": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
    "bytes": lambda: {"a": b"\xff\x00"},
    "keys that are pairs": lambda: {(1, 2): 3},
    "keys that are things": lambda: {Thing(): 3},
    "a circle": in_a_circle,
    "half a character": lambda: {"a": "\ud800"},
    "a very large number": lambda: {"a": 2**80},
    "no number": lambda: {"a": float("nan")},
    "a function": lambda: {"a": print},
    "an exception": lambda: ValueError("x"),
}


@pytest.mark.parametrize("full_requests", [False, True])
@pytest.mark.parametrize("what", NOT_JSON)
async def test_details_that_are_no_json_end_no_run(
    what: str, full_requests: bool, tmp_path: Path
) -> None:
    story = Story()
    story.deed("work", lambda args, ctx: ToolResult.text("t", details=NOT_JSON[what]()))
    story.model(call("work"), call("work"), "Done.")
    story.settings["event_sink"] = None
    store = JsonlStore(tmp_path)
    outcome = await story.play(RunLog(store, full_requests=full_requests))
    if isinstance(outcome, BaseException):
        raise outcome
    loaded = root_of(store)
    assert loaded.problems == ()
    assert [m.plain_text for m in fold(loaded).messages][-1] == "Done."
    again = Story()
    again.deed("work", lambda args, ctx: ToolResult.text("t", details=NOT_JSON[what]()))
    again.model()
    report = await replay(store, loaded.run_id, again.config())
    assert report.error is None


async def test_a_request_can_be_kept_whole() -> None:
    story, store = begin("transforms"), MemoryStore()
    await story.play(RunLog(store, full_requests=True))
    asked = [r.entry for r in root_of(store).records if isinstance(r.entry, Asked)]
    for entry, request in zip(asked, story.models[0].asked, strict=True):
        assert encode_json(entry.request) == encode_json(request)
        assert entry.messages == len(request.messages)


async def test_the_log_says_how_a_run_failed() -> None:
    for name in FAILURES:
        played = await told(name)
        failure = failure_of(played.outcome)
        assert failure is not None
        last = played.records[-1].entry
        assert isinstance(last, RunFailed)
        assert (last.error, last.text) == (type(failure).__name__, str(failure))
        assert undated(last.undelivered) == undated(failure.undelivered)
        (summary,) = played.store.runs()
        assert summary.outcome == "failed"


@pytest.mark.parametrize("store", ["runs", RunLog(MemoryStore()), MemoryStore, None])
def test_what_is_no_store_is_refused_at_once(store: Any) -> None:
    with pytest.raises(ConfigError, match="RunLog needs a store"):
        RunLog(store)


@pytest.mark.parametrize("name", ["durability", "on_failure"])
def test_a_choice_that_is_none_names_those_that_are(name: str) -> None:
    settings: Any = {name: "foo"}
    with pytest.raises(ConfigError, match=f"RunLog: {name} must be one of .*, not 'foo'"):
        RunLog(MemoryStore(), **settings)


async def test_a_log_will_do_where_a_store_is_due() -> None:
    log = RunLog(MemoryStore())
    await begin("one_after_the_other").play(log)
    (summary,) = log.store.runs()
    assert usage_tree(log, summary.run_id) == usage_tree(log.store, summary.run_id)
    assert diff(log, summary.run_id, summary.run_id) is None
    not_a_store: Any = "runs"
    with pytest.raises(ConfigError, match=r"expected a store of runs, such as .*, not"):
        fork(not_a_store, "x")


# --- what a host wants to know later ------------------------------------------------------------


async def test_notes_of_the_host_stand_in_the_first_record_of_a_run_and_nowhere_else() -> None:
    store = MemoryStore()
    helper = LoopConfig(stream=ScriptedStream(["found"]))
    tools = [agent_tool("ask", "Ask a helper.", helper)]
    model = ScriptedStream([call("ask", task="look"), "done"])
    notes = {"command": ["run", "--fast"], "root": "here"}
    config = LoopConfig(stream=model, tools=tools, run_log=RunLog(store, notes=notes))
    await run("go", AgentContext(), config)
    began = {
        summary.depth: [
            record.entry.host_notes
            for record in store.load(summary.run_id).records
            if isinstance(record.entry, RunBegan)
        ]
        for summary in store.runs()
    }
    assert began == {0: [notes], 1: [{}]}


async def test_notes_are_no_difference_between_two_runs() -> None:
    store = MemoryStore()
    for number in range(2):
        log = RunLog(store, notes={"number": number})
        await run("go", AgentContext(), LoopConfig(stream=ScriptedStream(["done"]), run_log=log))
    one, other = [summary.run_id for summary in store.runs()]
    assert diff(store, one, other) is None
