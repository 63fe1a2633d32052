"""A log that ends anywhere can be gone on with, and nothing is done twice.

The log of each story is cut behind every record, as a crash would, and resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentEvent,
    AgentMessage,
    AssistantMessage,
    ConfigError,
    LoopConfig,
    LoopError,
    RunAborted,
    RunIdentity,
    RunResult,
    StopReason,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    UserMessage,
    agent_tool,
    run,
    tool,
)
from clark_agent.errors import DecodeError, InvalidContinuationError
from clark_agent.events import MessageEnd
from clark_agent.history import repair_history
from clark_agent.messages.wire import encode_json
from clark_agent.replay import replay
from clark_agent.run_log import (
    JsonlStore,
    LoadedRun,
    LogDamaged,
    LogProblem,
    MemoryStore,
    RunBusy,
    RunLog,
    RunNotFound,
    RunStore,
    fold,
    resume,
    usage_tree,
)
from clark_agent.run_log._checksums import seal_all
from clark_agent.run_log.records import (
    RUN_LOG_VERSION,
    Answered,
    Asked,
    Record,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    SteeringAccepted,
    ToolEnded,
    ToolStarted,
)
from clark_agent.testing import ScriptedStream, call, check_events
from tests.run_log.stories import (
    FAILURES,
    STORIES,
    Story,
    begin,
    begun,
    carried,
    copy_of,
    fill,
    root_of,
    told,
    undated,
)
from tests.run_log.storing import last_of

# What the first process made of the ids of a batch is told apart by position, so these have to be
# left out where the id of a call says which it is.
_REPEATED_IDS = {"the_same_id_again"}


async def resumed(
    store: RunStore, run_id: str, story: Story, **more: Any
) -> RunResult | BaseException:
    """Take up a run; its result, or its error."""
    try:
        async with asyncio.timeout(10):
            return await resume(store, run_id, story.config(), story.signal, **more)
    except (Exception, asyncio.CancelledError) as error:
        return error


def uncertain(messages: Sequence[Any]) -> set[str]:
    """The calls of which nobody knows."""
    return {
        message.tool_call_id
        for message in messages
        if isinstance(message, ToolResultMessage)
        and isinstance(message.details, dict)
        and message.details.get("kind") == "tool_call_uncertain"
    }


def settled_before(records: Sequence[Record]) -> set[str]:
    """The calls that an earlier process has given up."""
    ended = [r.entry for r in records if isinstance(r.entry, ToolEnded)]
    return {e.tool_call_id for e in ended if "uncertain" in str(e.result.details)}


def was_decided(messages: Sequence[Any], call_id: str) -> bool:
    """Whether a plugin has changed the result, and with it perhaps what it says."""
    return any(
        isinstance(message, ToolResultMessage)
        and message.tool_call_id == call_id
        and "decided_by" in (message.details or {})
        for message in messages
    )


def started_without_end(records: Sequence[Record]) -> dict[str, str]:
    """The calls that had begun and have no result, by id: the names of their tools."""
    started, ended = begun(records)
    answers = 0
    found: dict[str, str] = {}
    for record in records:
        match record.entry:
            case Answered(discarded=None):
                answers += 1
                found = {}
            case ToolStarted() as entry if (answers, entry.position) in started - ended:
                found[entry.tool_call_id] = entry.tool_name
            case _:
                pass
    return found


def ran_before(records: Sequence[Record], *, ended: bool) -> set[str]:
    """The calls that have begun, or those that have their result, in the whole log."""
    kind = ToolEnded if ended else ToolStarted
    return {r.entry.tool_call_id for r in records if isinstance(r.entry, kind)}


async def check_cut(name: str, store: RunStore, whole: LoadedRun, outcome: Any, cut: int) -> None:
    """Cut the log behind so many records, resume it, and look at everything."""
    records = whole.records[:cut]
    cut_store = copy_of(store, whole.run_id, cut)
    story = begin(name)
    again = await resumed(cut_store, whole.run_id, story)
    where = f"cut behind record {cut - 1}, {records[-1].entry.__struct_config__.tag}"

    check_events(story.sink.events)
    if name in STORIES and isinstance(again, BaseException):
        again.add_note(where)
        raise again
    messages = carried(again)
    loaded = cut_store.load(whole.run_id)
    assert [record.seq for record in loaded.records] == list(range(len(loaded.records))), where
    folded = fold(loaded)
    assert folded.messages == list(messages), where
    valid = [c for c in repair_history(messages).changes if "plain_text" not in c.tool_call_id]
    assert valid == [] or name in _REPEATED_IDS, where

    open_calls = started_without_end(records)
    tools = story.config().registry.values()
    again_run = {t.name for t in tools if t.idempotent or t.runs_agent}
    lost = {call_id for call_id, tool in open_calls.items() if tool not in again_run}
    if name not in _REPEATED_IDS:
        said = uncertain(messages) - settled_before(records)
        assert said <= lost, where
        assert all(call_id in said or was_decided(messages, call_id) for call_id in lost), where
        assert not ran_before(records, ended=True) & set(story.ran), where
        assert not lost & set(story.ran), where
    if name == "steering" and cut < 3:
        return  # what was sent before it began is not in the log yet
    if name.startswith("time_runs_out"):
        return  # there is time again
    if not lost:
        assert undated(messages) == undated(carried(outcome)), where
        if isinstance(outcome, RunResult):
            assert isinstance(again, RunResult)
            assert (again.outcome, again.output, again.limit) == (
                outcome.outcome,
                outcome.output,
                outcome.limit,
            ), where


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
async def test_a_run_goes_on_behind_every_record(name: str) -> None:
    played = await told(name)
    problems: list[str] = []
    for cut in range(1, len(played.records)):
        try:
            await check_cut(name, played.store, played.loaded, played.outcome, cut)
        except Exception as error:
            tag = played.records[cut - 1].entry.__struct_config__.tag
            first = str(error).splitlines()[0] if str(error) else ""
            problems.append(f"behind {cut - 1} ({tag}): {type(error).__name__}: {first}")
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
async def test_a_resumed_run_can_be_resumed_behind_every_record_of_its_own(name: str) -> None:
    """Cut once in the middle, and what came of that behind every record."""
    played = await told(name)
    problems: list[str] = []
    for first_cut in {len(played.records) // 3 or 1, 2 * len(played.records) // 3 or 1}:
        cut_store = copy_of(played.store, played.run_id, first_cut)
        again = await resumed(cut_store, played.run_id, begin(name))
        second = cut_store.load(played.run_id)
        for cut in range(first_cut + 1, len(second.records)):
            try:
                await check_cut(name, cut_store, second, again, cut)
            except Exception as error:
                tag = second.records[cut - 1].entry.__struct_config__.tag
                first = str(error).splitlines()[0] if str(error) else ""
                text = f"{type(error).__name__}: {first}"
                problems.append(f"behind {first_cut - 1}, then {cut - 1} ({tag}): {text}")
    assert problems == []


@pytest.mark.parametrize("name", FAILURES)
async def test_a_run_that_failed_can_be_taken_up_behind_every_record(name: str) -> None:
    """It fails once more or goes on; in any case its log and its messages are sound."""
    played = await told(name)
    for cut in range(1, len(played.records) + 1):
        where = f"cut behind record {cut - 1}"
        cut_store = copy_of(played.store, played.run_id, cut)
        story = begin(name)
        again = await resumed(cut_store, played.run_id, story)
        check_events(story.sink.events)
        messages = carried(again)
        folded = fold(cut_store.load(played.run_id))
        assert folded.messages == list(messages), where
        ending = RunFailed if isinstance(again, BaseException) else RunEnded
        assert isinstance(folded.ending, ending), where
        assert repair_history(messages).changes == (), where
        records = played.records[:cut]
        assert not ran_before(records, ended=True) & set(story.ran), where
        assert not set(started_without_end(records)) & set(story.ran), where
        assert uncertain(messages) == set(started_without_end(records)), where


# --- single promises ------------------------------------------------------------------------------


def cut_behind(store: RunStore, loaded: LoadedRun, kind: type, number: int = 0) -> MemoryStore:
    """A store whose log ends with the so-manieth entry of a kind."""
    found = [i for i, r in enumerate(loaded.records) if isinstance(r.entry, kind)]
    return copy_of(store, loaded.run_id, found[number] + 1)


async def finished(store: RunStore, run_id: str, story: Story) -> RunResult:
    outcome = await resumed(store, run_id, story)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


async def test_a_tool_that_a_gate_hides_stays_hidden() -> None:
    """The gates were asked before the crash; what they said holds for the calls of that answer."""
    played = await told("gates")
    story = begin("gates")
    result = await finished(cut_behind(played.store, played.loaded, Answered), played.run_id, story)
    refused = [m for m in result.messages if isinstance(m, ToolResultMessage)][1]
    assert "t0c1" not in story.ran
    assert refused.plain_text == "danger is closed"


async def test_a_call_that_had_begun_is_never_said_not_to_have_run() -> None:
    """Also when somebody intervenes in the moment in which the run is taken up."""
    played = await told("steering_before_the_next_tool")
    story = begin("steering_before_the_next_tool")

    heard: list[AgentEvent] = []

    def steer(event: AgentEvent) -> None:
        if isinstance(event, MessageEnd) and not heard:
            heard.append(event)
            _ = story.steering.handle.steer("Once more: wait!", "before_next_tool")

    story.settings["event_sink"] = steer
    cut = cut_behind(played.store, played.loaded, ToolStarted)
    result = await finished(cut, played.run_id, story)
    assert uncertain(result.messages) == {"t0c0"}


async def test_a_run_that_had_its_answer_is_not_asked_for_it_again() -> None:
    """The last batch had voted to end the run; only the record of the end is missing."""
    played = await told("finishing")
    story = begin("finishing")
    cut = copy_of(played.store, played.run_id, len(played.records) - 1)
    result = await finished(cut, played.run_id, story)
    assert story.was_asked == 0
    assert result.output == played.outcome.output
    assert undated(result.messages) == undated(played.outcome.messages)


async def test_what_was_accepted_is_delivered_once_however_often_it_crashes() -> None:
    """Cut and resumed behind every record of the run that was resumed first."""
    played = await told("steering")
    kinds = [r.entry.__struct_config__.tag for r in played.records]
    first = kinds.index("tool_started") + 1
    cut_store = copy_of(played.store, played.run_id, first)
    await finished(cut_store, played.run_id, begin("steering"))
    second = cut_store.load(played.run_id)
    accepted = [r.entry for r in played.records[:first] if isinstance(r.entry, SteeringAccepted)]
    sent = {entry.message.plain_text for entry in accepted}
    assert sent
    for cut in range(first + 1, len(second.records)):
        last = copy_of(cut_store, played.run_id, cut)
        result = await finished(last, played.run_id, begin("steering"))
        said = [m.plain_text for m in result.messages if isinstance(m, UserMessage)]
        assert {text: said.count(text) for text in sent} == dict.fromkeys(sent, 1), cut


def is_steering(record: Record) -> bool:
    return isinstance(record.entry, SteeringAccepted)


async def test_what_is_sent_to_a_resumed_run_is_in_its_log_as_soon_as_it_is_accepted() -> None:
    played = await told("batches")
    cut_store = cut_behind(played.store, played.loaded, Asked)
    story = begin("batches")
    story.settings["plugins"] = [story.steering]
    accepted: list[int] = []

    async def steers(args: Any, ctx: ToolContext) -> ToolResult:
        _ = story.steering.handle.steer("While it was resumed.")
        await asyncio.sleep(0)
        records = cut_store.load(played.run_id).records
        accepted.append(sum(is_steering(record) for record in records))
        return ToolResult.text("steered")

    story.tools[1].does = steers
    result = await finished(cut_store, played.run_id, story)
    assert accepted == [1, 2]
    said = [m.plain_text for m in result.messages if isinstance(m, UserMessage)]
    assert said.count("While it was resumed.") == 2


async def test_numbers_of_steering_are_not_used_twice() -> None:
    played = await told("steering")
    cut_store = cut_behind(played.store, played.loaded, SteeringAccepted, 1)
    story = begin("steering")
    _ = story.steering.handle.steer("A third.")
    await finished(cut_store, played.run_id, story)
    records = cut_store.load(played.run_id).records
    numbers = [r.entry.number for r in records if isinstance(r.entry, SteeringAccepted)]
    assert len(set(numbers)) == len(numbers)


async def test_steering_that_arrives_in_the_batch_that_is_taken_up_comes_with_the_next_turn() -> (
    None
):
    played = await told("batches")
    story = begin("batches")
    story.settings["plugins"] = [story.steering]
    sent: list[str] = []

    async def steers(args: Any, ctx: ToolContext) -> ToolResult:
        if not sent:
            sent.append(ctx.tool_call_id)
            _ = story.steering.handle.steer("Listen.")
        return ToolResult.text("steered")

    story.tools[1].does = steers
    result = await finished(cut_behind(played.store, played.loaded, Answered), played.run_id, story)
    place = [m.plain_text for m in result.messages].index("Listen.")
    answers = [m for m in result.messages[:place] if isinstance(m, AssistantMessage)]
    assert len(answers) == 1


async def test_the_tokens_of_children_count_after_a_crash_too() -> None:
    played = await told("helpers")
    cut = copy_of(played.store, played.run_id, len(played.records) - 1)
    result = await finished(cut, played.run_id, begin("helpers"))
    assert result.usage == played.outcome.usage
    assert result.tree_usage == played.outcome.tree_usage


@pytest.mark.parametrize("name", STORIES)
async def test_usage_is_as_if_nothing_had_happened(name: str) -> None:
    """Cut behind the last answer: nobody is asked for anything that was paid already."""
    played = await told(name)
    cut = cut_behind(played.store, played.loaded, Answered, -1)
    result = await finished(cut, played.run_id, begin(name))
    assert result.usage == played.outcome.usage


async def test_an_idempotent_call_that_had_begun_is_run_again() -> None:
    played = await told("batches")
    starts = [r for r in played.records if isinstance(r.entry, ToolStarted)]
    names = [r.entry.tool_name for r in starts]  # type: ignore[union-attr]
    cut = cut_behind(played.store, played.loaded, ToolStarted, names.index("again"))
    story = begin("batches")
    result = await finished(cut, played.run_id, story)
    again = starts[names.index("again")].entry
    assert isinstance(again, ToolStarted)
    assert again.tool_call_id in story.ran
    assert again.tool_call_id not in uncertain(result.messages)
    assert uncertain(result.messages)  # the others of the batch


async def test_a_call_that_names_no_tool_does_not_keep_a_run_from_going_on() -> None:
    """The config is what it was: the model has made the name up."""
    played = await told("mistakes")
    result = await finished(
        cut_behind(played.store, played.loaded, Answered), played.run_id, begin("mistakes")
    )
    assert undated(result.messages) == undated(played.outcome.messages)


async def test_the_error_of_a_resumed_run_has_all_messages() -> None:
    played = await told("the_stream_fails")
    cut = cut_behind(played.store, played.loaded, Answered)
    error = await resumed(cut, played.run_id, begin("the_stream_fails"))
    assert isinstance(error, BaseException)
    assert undated(carried(error)) == undated(carried(played.outcome))
    assert len(carried(error)) == 4


async def test_a_sink_of_its_own_hears_the_resumed_run() -> None:
    played = await told("batches")
    story = begin("batches")
    heard: list[AgentEvent] = []
    await resume(
        cut_behind(played.store, played.loaded, Answered),
        played.run_id,
        story.config(),
        sink=heard.append,
    )
    assert heard == story.sink.events


# --- what cannot be resumed -----------------------------------------------------------------------


async def test_a_run_that_has_ended_is_not_resumed() -> None:
    played = await told("batches")
    before = len(played.store.load(played.run_id).records)
    with pytest.raises(InvalidContinuationError, match="has ended"):
        await resume(played.store, played.run_id, begin("batches").config())
    assert len(played.store.load(played.run_id).records) == before


async def test_a_config_without_the_tool_that_is_waited_for_is_refused() -> None:
    played = await told("batches")
    story = begin("batches")
    story.tools = story.tools[:2]
    cut = cut_behind(played.store, played.loaded, ToolStarted)
    before = len(cut.load(played.run_id).records)
    with pytest.raises(ConfigError, match="'again'"):
        await resume(cut, played.run_id, story.config())
    assert len(cut.load(played.run_id).records) == before
    assert story.ran == []
    await finished(cut, played.run_id, begin("batches"))  # and with it, it goes on


class Holed(MemoryStore):
    """A store that cannot read a record in the middle."""

    def load(self, run_id: str) -> LoadedRun:
        loaded = super().load(run_id)
        problem = LogProblem("line 3", "it is no JSON", "xx", 2)
        return LoadedRun(run_id, (*loaded.records[:2], *loaded.records[3:]), (problem,))


async def test_a_log_with_a_hole_is_not_resumed() -> None:
    played = await told("batches")
    store = Holed()
    fill(store, played.run_id, played.records[:-2])
    with pytest.raises(LogDamaged, match="line 3") as damage:
        await resume(store, played.run_id, begin("batches").config())
    assert damage.value.at == 2


async def test_a_log_without_a_beginning_is_not_resumed() -> None:
    played = await told("batches")
    store = MemoryStore()
    fill(store, played.run_id, played.records[1:-2])
    with pytest.raises(LogDamaged, match="its first record is missing"):
        await resume(store, played.run_id, begin("batches").config())
    store = MemoryStore()
    fill(store, played.run_id, ())
    with pytest.raises(RunNotFound):
        await resume(store, played.run_id, begin("batches").config())


async def test_a_run_that_somebody_writes_is_not_resumed() -> None:
    played = await told("batches")
    cut = cut_behind(played.store, played.loaded, Answered)
    held = cut.reopen(played.run_id, after=last_of(cut, played.run_id))
    story = begin("batches")
    with pytest.raises(RunBusy, match="another process, thread or task") as busy:
        await resume(cut, played.run_id, story.config())
    assert busy.value.run_id == played.run_id
    assert story.ran == []
    assert story.sink.events == []
    held.close()
    await finished(cut, played.run_id, begin("batches"))


async def test_a_run_that_nobody_knows_is_not_resumed() -> None:
    with pytest.raises(RunNotFound):
        await resume(MemoryStore(), "nobody", begin("batches").config())


async def test_a_log_of_a_newer_version_is_not_resumed(tmp_path: Any) -> None:
    played = await told("batches")
    store = JsonlStore(tmp_path)
    records = list(played.records[:-2])
    records[3] = replace(records[3], v=RUN_LOG_VERSION + 1)
    seal_all(records)
    appender = store.create(played.run_id)
    for record in records:
        appender.append(record, encode_json(record))
    appender.close()
    with pytest.raises(DecodeError, match="newer version"):
        await resume(store, played.run_id, begin("batches").config())


async def test_a_config_that_logs_elsewhere_is_refused() -> None:
    played = await told("batches")
    cut = cut_behind(played.store, played.loaded, Answered)
    with pytest.raises(ConfigError, match="must use the store that the run is resumed from"):
        await resume(cut, played.run_id, begin("batches").config(RunLog(MemoryStore())))
    story = begin("batches")
    await resume(cut, played.run_id, story.config(RunLog(cut)))  # with its own it is fine


async def test_the_log_says_where_it_was_taken_up() -> None:
    played = await told("batches")
    cut = cut_behind(played.store, played.loaded, Answered, 1)
    await finished(cut, played.run_id, begin("batches"))
    records = cut.load(played.run_id).records
    assert [r.entry for r in records if isinstance(r.entry, RunResumed)] == [RunResumed(2)]


async def test_a_fresh_run_of_the_same_config_is_not_disturbed_by_a_resumed_one() -> None:
    """Two runs of one config at once, one of them taken up."""
    played = await told("batches")
    cut = cut_behind(played.store, played.loaded, Answered, 1)
    story = begin("batches")
    config: LoopConfig = story.config(RunLog(cut))
    first, second = await asyncio.gather(
        resume(cut, played.run_id, config), run("Go on.", AgentContext("x"), config)
    )
    assert undated(first.messages) == undated(second.messages) == undated(played.outcome.messages)
    assert len(list(cut.runs())) == 2


# --- a log that somebody has changed ------------------------------------------------------------


def begun_in(store: MemoryStore, **notes: str) -> LoopConfig:
    return LoopConfig(stream=ScriptedStream(["done"]), run_log=RunLog(store, notes=notes))


@pytest.mark.parametrize("said", [{"root": "/"}, {}, {"root": "/work", "more": "1"}])
async def test_notes_that_are_not_those_of_the_config_are_refused(said: dict[str, str]) -> None:
    store = MemoryStore()
    await run("go", AgentContext(identity=RunIdentity.root("r")), begun_in(store, root="/work"))
    store.cut("r", 1)
    with pytest.raises(ConfigError, match=r"the log has .*(root: '/work', the config|more: None)"):
        await resume(store, "r", begun_in(store, **said))
    result = await resume(store, "r", begun_in(store, **said), trust_log=True)
    assert result.text == "done"


async def test_the_same_notes_need_no_trust() -> None:
    store = MemoryStore()
    await run("go", AgentContext(identity=RunIdentity.root("r")), begun_in(store, root="/work"))
    store.cut("r", 1)
    assert (await resume(store, "r", begun_in(store, root="/work"))).text == "done"


async def test_a_log_cannot_pass_for_that_of_another_run(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    for name in ("mine", "yours"):
        config = LoopConfig(stream=ScriptedStream([""]), run_log=RunLog(store))
        with suppress(LoopError):
            await run("go", AgentContext(identity=RunIdentity.root(name)), config)
    before = store.path_of("yours").read_bytes()
    path, records = store.path_of("mine"), store.load("mine").records
    began = records[0].entry
    assert isinstance(began, RunBegan)
    renamed = replace(records[0], entry=replace(began, identity=RunIdentity.root("yours")))
    lines = [renamed, *records[1:]]
    seal_all(lines)  # by somebody who knows how: every checksum is right
    for data, reason in (
        (before, "is a record of the run 'yours'"),
        (path.read_bytes().replace(b'"run_id":"mine"', b'"run_id":"yours"'), "checksum is wrong"),
        (b"".join([encode_json(line) + b"\n" for line in lines]), "belongs to run 'yours'"),
    ):
        path.write_bytes(data)
        with pytest.raises(DecodeError, match=reason):
            await resume(store, "mine", LoopConfig(stream=ScriptedStream(["done"])))
        assert path.read_bytes() == data
        assert store.path_of("yours").read_bytes() == before


# --- stopped, or steered, while it is taken up ----------------------------------------------------


def _paying() -> Story:
    s = Story()
    s.deed("pay", "paid")
    s.settings["default_execution_mode"] = "sequential"
    s.settings["plugins"] = [s.steering]
    s.model([call("pay", n=1), call("pay", n=2), call("pay", n=3)], "Done.")
    return s


async def _interrupted() -> tuple[MemoryStore, str]:
    """One call is done, one had begun, one had not."""
    store = MemoryStore()
    await _paying().play(RunLog(store))
    loaded = root_of(store)
    started = [n for n, r in enumerate(loaded.records) if isinstance(r.entry, ToolStarted)]
    return copy_of(store, loaded.run_id, started[1] + 1), loaded.run_id


@pytest.mark.parametrize("at", range(1, 9))
async def test_a_run_that_is_stopped_while_it_is_taken_up_keeps_its_results(at: int) -> None:
    store, run_id = await _interrupted()
    story, events = _paying(), 0

    def stop(event: AgentEvent) -> None:
        nonlocal events
        events += 1
        if events == at:
            story.signal.cancel("enough")

    with pytest.raises(RunAborted) as aborted:
        await resume(store, run_id, story.config(), story.signal, sink=stop)
    for messages in (aborted.value.messages, fold(store.load(run_id)).messages):
        results = [m for m in messages if isinstance(m, ToolResultMessage)]
        assert [m.tool_call_id for m in results] == ["t0c0", "t0c1", "t0c2"]
        assert results[0].plain_text == "paid"
        assert [m.details["kind"] for m in results[1:]] == [
            "tool_call_uncertain",
            "tool_call_not_executed",
        ]
    assert story.ran == []


async def test_what_is_sent_while_a_run_is_taken_up_is_in_the_log_at_once() -> None:
    store, run_id = await _interrupted()
    story, logged = _paying(), list[list[AgentMessage]]()

    def steer(event: AgentEvent) -> None:
        if isinstance(event, MessageEnd) and not logged:
            _ = story.steering.handle.steer("Wait.")
            waiting = fold(store.load(run_id)).waiting
            logged.append([accepted.message for accepted in waiting.values()])

    result = await resume(store, run_id, story.config(), sink=steer)
    assert logged == [[UserMessage("Wait.")]]
    assert UserMessage("Wait.") in result.messages


async def test_a_run_below_that_its_parent_did_not_live_to_tell_of_is_counted() -> None:
    def make() -> Story:
        s = Story()
        below = LoopConfig(stream=s.model("From below.", prefix="c"), clock=s.clock)
        s.tools.append(agent_tool("helper", "helps", below))
        s.model(call("helper", task="a"), "Done.")
        s.models.reverse()
        return s

    store = MemoryStore()
    played = await make().play(RunLog(store))
    assert isinstance(played, RunResult)
    loaded = root_of(store)
    started = [n for n, r in enumerate(loaded.records) if isinstance(r.entry, ToolStarted)]
    cut = copy_of(store, loaded.run_id, started[0] + 1)
    result = await resume(cut, loaded.run_id, make().config())
    assert result.tree_usage == played.tree_usage
    assert usage_tree(cut, loaded.run_id).tree_usage == played.tree_usage
    report = await replay(cut, loaded.run_id, make().config())
    assert report.is_identical, str(report)


@pytest.mark.parametrize("why", [StopReason.ERROR, StopReason.ABORTED])
async def test_the_calls_of_an_answer_that_ended_with_an_error_are_not_run(
    why: StopReason,
) -> None:
    ran: list[str] = []

    @tool
    async def work() -> str:
        """Work."""
        ran.append("work")
        return "done"

    store = MemoryStore()
    log = RunLog(store)

    def config(*steps: Any) -> LoopConfig:
        return LoopConfig(stream=ScriptedStream(steps), tools=[work], run_log=log)

    broken = replace(
        AssistantMessage.from_calls([call("work", call_id="c")]),
        stop_reason=why,
        error_message="the line broke",
    )
    with pytest.raises(LoopError, match="the line broke"):
        await run("go", AgentContext(), config(broken))
    (summary,) = store.runs()
    kinds = [type(r.entry).__name__ for r in store.load(summary.run_id).records]
    store.cut(summary.run_id, kinds.index("Answered") + 1)  # the process died there
    with pytest.raises(LoopError, match="the line broke"):
        await resume(store, summary.run_id, config("Never asked."))
    assert ran == []
