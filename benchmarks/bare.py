"""The floor: the least that an agent loop in Python can be.

An async generator with slotted dataclasses for its events, and a dict of tools. No hooks, no
validation, no limits, no cancellation, and whatever raises ends it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.work import ARGUMENTS, DELTA, MODEL_NAP, SHORT_RUN, TOOL_NAP, old_result, seen


@dataclass(slots=True)
class User:
    text: str


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Answer:
    text: str
    calls: list[Call]


@dataclass(slots=True)
class Result:
    id: str
    name: str
    text: str


@dataclass(slots=True)
class Delta:
    text: str


@dataclass(slots=True)
class Whole:
    answer: Answer


@dataclass(slots=True)
class RunStart:
    pass


@dataclass(slots=True)
class TurnStart:
    pass


@dataclass(slots=True)
class AnswerStart:
    pass


@dataclass(slots=True)
class AnswerUpdate:
    text: str


@dataclass(slots=True)
class AnswerEnd:
    answer: Answer


@dataclass(slots=True)
class ToolStart:
    call: Call


@dataclass(slots=True)
class ToolEnd:
    result: Result


@dataclass(slots=True)
class TurnEnd:
    answer: Answer
    results: list[Result]


@dataclass(slots=True)
class RunEnd:
    messages: list[Message]


Message: TypeAlias = User | Answer | Result
Event: TypeAlias = (
    RunStart
    | TurnStart
    | AnswerStart
    | AnswerUpdate
    | AnswerEnd
    | ToolStart
    | ToolEnd
    | TurnEnd
    | RunEnd
)
Model: TypeAlias = Callable[[list[Message]], AsyncIterator[Delta | Whole]]
Tool: TypeAlias = Callable[..., Awaitable[str]]


async def loop(
    model: Model, tools: dict[str, Tool], messages: list[Message]
) -> AsyncIterator[Event]:
    answer = Answer("", [])
    yield RunStart()
    while True:
        yield TurnStart()
        yield AnswerStart()
        async for piece in model(messages):
            if type(piece) is Delta:
                yield AnswerUpdate(piece.text)
            else:
                answer = piece.answer  # type: ignore[union-attr]
        yield AnswerEnd(answer)
        messages.append(answer)
        calls = answer.calls
        if not calls:
            yield TurnEnd(answer, [])
            break
        for call in calls:
            yield ToolStart(call)
        if len(calls) == 1:
            outputs = [await tools[calls[0].name](**json.loads(calls[0].arguments))]
        else:
            outputs = await asyncio.gather(
                *[tools[call.name](**json.loads(call.arguments)) for call in calls]
            )
        results = []
        for call, output in zip(calls, outputs, strict=True):
            result = Result(call.id, call.name, output)
            results.append(result)
            messages.append(result)
            yield ToolEnd(result)
        yield TurnEnd(answer, results)
    yield RunEnd(messages)


# --- the workloads ----------------------------------------------------------------------------


async def echo(x: int, s: str) -> str:
    seen.tools += 1
    return "ok: " + s


TOOLS: dict[str, Tool] = {"echo": echo}


def calling(turns: int) -> Model:
    """A model that calls the tool so many times, once a turn, and then says that it is done."""

    async def model(messages: list[Message]) -> AsyncIterator[Delta | Whole]:
        turn = (len(messages) - 1) // 2
        if turn < turns:
            yield Whole(Answer("", [Call(f"c{turn}", "echo", ARGUMENTS)]))
        else:
            yield Delta("done")
            yield Whole(Answer("done", []))

    return model


async def text_of(events: AsyncIterator[Event]) -> str:
    """Consume the events, as a listener that counts them does; return the last answer."""
    event = None
    async for event in events:  # noqa: B007
        seen.events += 1
    assert isinstance(event, RunEnd)
    last = event.messages[-1]
    assert isinstance(last, Answer)
    return last.text


async def text_unheard(events: AsyncIterator[Event]) -> str:
    """Consume the events without a look at them: a generator must be consumed."""
    event = None
    async for event in events:  # noqa: B007
        pass
    assert isinstance(event, RunEnd)
    last = event.messages[-1]
    assert isinstance(last, Answer)
    return last.text


async def turns(count: int) -> str:
    return await text_of(loop(calling(count), TOOLS, [User("go")]))


async def stream(count: int, listeners: int) -> str:
    async def model(messages: list[Message]) -> AsyncIterator[Delta | Whole]:
        parts = []
        for _ in range(count):
            parts.append(DELTA)
            yield Delta(DELTA)
        yield Whole(Answer("".join(parts), []))

    consume = text_of if listeners else text_unheard
    return await consume(loop(model, TOOLS, [User("go")]))


async def batch(count: int, nap: float = TOOL_NAP) -> str:
    async def rest(x: int, s: str) -> str:
        await asyncio.sleep(nap)
        seen.tools += 1
        return "ok: " + s

    async def model(messages: list[Message]) -> AsyncIterator[Delta | Whole]:
        if len(messages) == 1:
            yield Whole(Answer("", [Call(f"c{i}", "rest", ARGUMENTS) for i in range(count)]))
        else:
            yield Delta("done")
            yield Whole(Answer("done", []))

    return await text_of(loop(model, {"rest": rest}, [User("go")]))


async def short_run(nap: float = MODEL_NAP) -> str:
    inner = calling(SHORT_RUN)

    async def model(messages: list[Message]) -> AsyncIterator[Delta | Whole]:
        await asyncio.sleep(nap)
        async for piece in inner(messages):
            yield piece

    return await text_of(loop(model, TOOLS, [User("go")]))


def history(size: int) -> list[Message]:
    messages: list[Message] = []
    for n in range(size // 4):
        messages += [
            User(f"question {n}"),
            Answer("I look.", [Call(f"old{n}", "echo", ARGUMENTS)]),
            Result(f"old{n}", "echo", old_result(n)),
            Answer("Here it is.", []),
        ]
    return messages


async def append(count: int, past: Any) -> str:
    """Turns behind a long history, which a bare loop does nothing about."""

    async def model(messages: list[Message]) -> AsyncIterator[Delta | Whole]:
        turn = (len(messages) - 1 - len(past)) // 2
        seen.turn(turn)
        if turn < count:
            yield Whole(Answer("", [Call(f"c{turn}", "echo", ARGUMENTS)]))
        else:
            yield Delta("done")
            yield Whole(Answer("done", []))

    return await text_of(loop(model, TOOLS, [*past, User("go")]))
