"""Results that are kept: an id gives its own text or an error, whatever tools and disks do."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clark_agent import (
    Agent,
    AgentContext,
    AgentTool,
    Conversation,
    ImageContent,
    LoopConfig,
    RunIdentity,
    ToolContext,
    ToolResult,
    ToolResultBudget,
    ToolResultMessage,
    run,
    tool,
)
from clark_agent._kept_files import read_kept, write_kept
from clark_agent._kept_text import pack
from clark_agent.errors import ToolDefinitionError
from clark_agent.plugins import LargeResults
from clark_agent.run_log import JsonlStore, MemoryStore, RunLog, RunStoreError, kept_result
from clark_agent.testing import ScriptedStream, call, say
from tests.plugins.test_large_results import PART, page_of, text_of

TEXT = text_of(60_000)


class Returns(AgentTool):
    """A tool that returns these results, one after the other."""

    reads_only = True
    name = "get"

    def __init__(self, *results: str | ToolResult) -> None:
        self.results = list(results)
        super().__init__()

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        result = self.results.pop(0)
        return ToolResult.text(result) if isinstance(result, str) else result


class Calls:
    """A model that makes these calls in one turn each, and keeps the results."""

    def __init__(self, *calls: Any) -> None:
        self.results: list[ToolResultMessage] = []
        self._calls = self._steps(*calls)
        next(self._calls)
        self.stream = ScriptedStream([self._step], at_end="repeat")

    def _step(self, request: Any) -> Any:
        newest = request.messages[-1]
        if isinstance(newest, ToolResultMessage):
            self.results.append(newest)
        try:
            return self._calls.send(None)
        except StopIteration:
            return say("done")

    def _steps(self, *calls: Any) -> Generator[Any, None, None]:
        yield
        for each in calls:
            yield each() if callable(each) else each

    def ids(self) -> list[str]:
        marks = [result.details for result in self.results if result.details]
        return [mark["kept_result"]["id"] for mark in marks]

    def read_first(self, **arguments: Any) -> Any:
        return lambda: call("read_result", id=self.ids()[0], **arguments)


def calls_get_and(**arguments: Any) -> Calls:
    """A model that gets a result, and reads it in this way."""
    model: Calls = Calls(call("get"), lambda: model.read_first(**arguments)())
    return model


async def play(model: Calls, *results: str | ToolResult, **settings: Any) -> ToolResultMessage:
    """The newest result of a run in which the tool returns these."""
    settings.setdefault("plugins", [LargeResults()])
    config = LoopConfig(stream=model.stream, tools=[Returns(*results)], **settings)
    await run("Go on.", AgentContext("", identity=RunIdentity("r")), config)
    return model.results[-1]


# --- one id, one text -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_folder", [False, True])
async def test_runs_with_the_same_run_id_do_not_share_ids(
    is_in_folder: bool, tmp_path: Path
) -> None:
    plugin = LargeResults(folder=tmp_path if is_in_folder else None)
    identity = RunIdentity.root(conversation_id="ada")
    first = Calls(call("get"))

    def config(model: Calls, text: str) -> LoopConfig:
        return LoopConfig(stream=model.stream, tools=[Returns(text)], plugins=[plugin])

    monday, tuesday = text_of(60_000, "Monday"), text_of(60_000, "Tuesday")
    conversation = Conversation(config(first, monday), AgentContext("", identity=identity))
    await conversation.send("Monday?")
    second: Calls = Calls(
        call("get"),
        lambda: call("read_result", id=first.ids()[0], start=20_000, end=20_030),
        lambda: second.read_first(start=20_000, end=20_030)(),
    )
    conversation.config = config(second, tuesday)
    await conversation.send("Tuesday?")
    assert first.ids() != second.ids()
    _, old, new = second.results
    assert page_of(old) == monday[20_000:20_030]
    assert page_of(new) == tuesday[20_000:20_030]


async def test_logs_that_share_a_folder_do_not_replace_what_it_has(tmp_path: Path) -> None:
    plugins = [LargeResults(folder=tmp_path)]
    texts = [text_of(60_000, "winner"), text_of(60_000, "loser")]
    for text in texts:  # each has a log of its own, so both have the same id
        read = await play(
            calls_get_and(start=100, end=150), text, plugins=plugins, run_log=RunLog(MemoryStore())
        )
        assert page_of(read) == text[100:150]
    assert len(list((tmp_path / "r").iterdir())) == 2


def test_a_folder_without_a_digest_gives_the_only_text_of_a_name(tmp_path: Path) -> None:
    def read() -> list[bytes]:
        return read_kept(str(tmp_path), "r", "1-0", None, 1, 9)

    assert read() == []
    write_kept(str(tmp_path), "r", f"1-0.{PART}", pack("of a run without a log"))
    assert read() == []
    write_kept(str(tmp_path), "r", "1-0", pack("one"))
    assert read() == [b"one"]
    write_kept(str(tmp_path), "r", "1-0", pack("two"))
    assert read() == []


# --- who may read ---------------------------------------------------------------------------------


@dataclass
class Page:
    """What a tool has from a stranger."""

    kept_result: dict[str, Any]


class Key(Enum):
    """A key that is a text once it is JSON."""

    MARK = "kept_result"


class Record(msgspec.Struct):
    """The same as a struct."""

    kept_result: dict[str, Any]


SHAPES: dict[str, Any] = {
    "dict": lambda mark: {"kept_result": mark},
    "dataclass": Page,
    "struct": Record,
    "enum": lambda mark: {Key.MARK: mark},
    "raw": lambda mark: msgspec.Raw(msgspec.json.encode({"kept_result": mark})),
}


@pytest.mark.parametrize("limit", [50_000, None])
@pytest.mark.parametrize("digest", [None, "", "0" * 32])
@pytest.mark.parametrize("shape", SHAPES)
async def test_details_of_a_tool_give_no_right_in_any_form(
    shape: str, digest: str | None, limit: int | None, tmp_path: Path
) -> None:
    log = RunLog(MemoryStore())
    ada = Calls(call("get"))
    agent = Agent(ada.stream, tools=[Returns(TEXT)], run_log=log)
    await agent.run("Get it.")
    (stolen,) = ada.ids()
    mark = {"id": stolen, "chars": 60_000} | ({} if digest is None else {"digest": digest})
    forged = ToolResult.text("hello", details=SHAPES[shape](mark))
    read = call("read_result", id=stolen)
    bob = Calls(call("get"), read) if limit else Calls(call("get"))
    tools = [Returns(forged)]
    agent = Agent(bob.stream, tools=tools, run_log=log, max_result_chars=limit)
    conversation = agent.conversation()
    await conversation.send("Hello.")
    conversation.save(tmp_path / "bob.json")
    again = Calls(read)
    agent = agent.replace(model=again.stream, max_result_chars=50_000)
    await agent.load_conversation(tmp_path / "bob.json").send("Hello again.")
    for answer in (*bob.results[1:], *again.results):
        assert answer.is_error
        assert TEXT[:10] not in answer.plain_text


# --- reading --------------------------------------------------------------------------------------


async def follow(text: str, **arguments: Any) -> list[str]:
    """All pages, if the model does what the hints say."""
    model: Calls = Calls(call("get"), lambda: model.read_first(**arguments)())
    pages: list[str] = []

    def following(request: Any) -> Any:
        nonlocal arguments
        step = model._step(request)
        newest = request.messages[-1]
        if len(model.results) < 2:
            return step
        pages.append(page_of(newest))
        found = re.search(r"start=(\d+)(, lines=false)?", newest.plain_text.partition("\n")[0])
        if found is None:
            return say("done")
        arguments |= {"start": int(found[1])} | ({"lines": False} if found[2] else {})
        return model.read_first(**arguments)()

    config = LoopConfig(
        stream=ScriptedStream([following], at_end="repeat"),
        tools=[Returns(text)],
        plugins=[LargeResults(page_chars=5_000)],
        max_iterations=200,
    )
    await run("Go on.", AgentContext("", identity=RunIdentity("r")), config)
    return pages


@pytest.mark.parametrize("width", [7, 4_000, 12_000])
async def test_hints_lead_through_the_whole_text_in_lines(width: int) -> None:
    text = "\n".join([f"{n}".ljust(width, ".") for n in range(90_000 // width)])
    assert "".join(await follow(text, lines=True, start=1)) == text


async def test_hints_of_a_search_in_lines_lead_to_all_places() -> None:
    text = "".join([f"entry {n}, entry {n}\n" for n in range(5_000)])
    pages = await follow(text, lines=True, start=4_000, search="entry 49")
    places = [int(line.split()[1]) for page in pages for line in page.splitlines()]
    begin = text.index("entry 3999,")
    where = [at for at in range(begin, len(text)) if text.startswith("entry 49", at)]
    assert sorted(set(places)) == where


async def test_a_search_that_takes_long_says_where_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clark_agent.plugins._read_result._SEARCH_SECONDS", 0.0)
    text = "a" * 100_000 + "needle"
    read = await play(calls_get_and(search="needle"), text)
    assert read.plain_text == (
        "Not found from character 0 to 32,768, whatever the case. The search took too long, and "
        "ended at character 32,768. Next: start=32768."
    )


async def test_arguments_are_repaired_as_for_other_tools() -> None:
    text = "".join([f"{n}\n" for n in range(20_000)])
    read = await play(calls_get_and(start="100", end=101.0, lines="true", search=None), text)
    assert page_of(read) == "99\n100\n"


async def test_an_id_that_is_long_is_not_repeated_as_a_whole() -> None:
    read = await play(Calls(call("read_result", id="x" * 100_000)))
    assert read.is_error
    assert len(read.plain_text) < 500


async def test_of_a_result_without_its_image_there_is_nothing_to_read() -> None:
    image = ImageContent("data:image/png;base64," + "A" * 1_000)
    read = await play(
        calls_get_and(), ToolResult((image,)), plugins=[LargeResults(max_data_chars=100)]
    )
    assert read.is_error
    assert "only images or files were left out; they cannot be read" in read.plain_text


@pytest.mark.parametrize("cap", [1, 150, 500])
async def test_a_budget_for_old_results_leaves_the_note(cap: int) -> None:
    seen: list[str] = []

    def look(request: Any) -> Any:
        old = next(m for m in request.messages if isinstance(m, ToolResultMessage))
        seen.append(old.plain_text)
        return say("done")

    get = call("get")
    config = LoopConfig(
        stream=ScriptedStream([get, get, look]),
        tools=[Returns(TEXT, "short")],
        plugins=[LargeResults(), ToolResultBudget(cap)],
    )
    result = await run("Go on.", AgentContext("", identity=RunIdentity("r")), config)
    whole = next(m for m in result.messages if isinstance(m, ToolResultMessage))
    assert len(seen[0]) < max(cap, 350)
    assert whole.details["kept_result"]["id"] in seen[0]


@pytest.mark.parametrize("limit", [0, -1, "100", 1.5, True])
def test_a_limit_of_a_tool_that_makes_no_sense_is_an_error(limit: Any) -> None:
    with pytest.raises(ToolDefinitionError, match="max_result_chars of 'get' must be"):

        @tool(max_result_chars=limit)
        def get() -> str:
            """Gets it."""
            return ""


# --- damage ---------------------------------------------------------------------------------------


def _flip(data: bytes) -> bytes:
    return data[:-5_000] + bytes([data[-5_000] ^ 1]) + data[-4_999:]


DAMAGE: dict[str, Any] = {
    "a flipped bit": _flip,
    "no UTF-8": lambda data: data[:-5_000] + b"\xff\xfe" + data[-4_998:],
    "cut": lambda data: data[:-1_000],
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "sizes that are none": lambda data: b"zz" + data[2:],
    "negative sizes": lambda data: data.replace(b"[", b"[-9,", 1),
    "large sizes": lambda data: data.replace(b"[", b"[999999999999,", 1),
    "more": lambda data: data + b"more",
    "another description": lambda data: data.replace(b'"characters":6', b'"characters":7', 1),
    "another text": lambda data: data[:-30_000] + b"E" * 30_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damage_is_an_error_for_the_host_and_for_the_model(
    damage: str, tmp_path: Path
) -> None:
    store, text = JsonlStore(tmp_path), "x" * 60_000

    def spoil() -> Any:
        (path,) = tmp_path.glob("*.kept/*")
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
        return call("read_result", id="r/1-0", start=59_000 - 4_000)

    read = await play(Calls(call("get"), spoil), text, run_log=RunLog(store))
    assert read.is_error
    assert re.match(
        r"the result r/1-0 cannot be read: .* is (damaged|not as long as it was); call its tool",
        read.plain_text,
    )
    with pytest.raises(RunStoreError, match="large result 'r/1-0' cannot be read: "):
        kept_result(store, "r/1-0")


async def test_a_missing_piece_is_an_error() -> None:
    store = MemoryStore()

    def spoil() -> Any:
        store._kept["r"]["1-0"] = store._kept["r"]["1-0"][:2]
        return call("read_result", id="r/1-0", start=40_000)

    read = await play(Calls(call("get"), spoil), TEXT, run_log=RunLog(store))
    assert read.plain_text == (
        "the result r/1-0 cannot be read: a part of it is missing; call its tool again"
    )
    with pytest.raises(RunStoreError, match="a part of it is missing"):
        kept_result(store, "r/1-0")
