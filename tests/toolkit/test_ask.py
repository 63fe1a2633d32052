"""ask_user brings a question to a person and the answer to the model, whatever becomes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from clark_agent import (
    CancellationToken,
    ConfigError,
    RunAborted,
    ToolContext,
    ToolResult,
)
from clark_agent.testing import call
from clark_agent.toolkit.ask import AskUser, OneAtATime, ask_user_tool
from tests.engine.support import completed, failed, let_others_run, results, texts

GO_ON = "Go on by yourself: take the most sensible assumption, and say in the end what it was."


async def asked(ask: AskUser | None, seconds: float | None = None, **arguments: Any) -> ToolResult:
    ctx = ToolContext(tool_call_id="c", tool_name="ask_user")
    return await ask_user_tool(ask, timeout=seconds).execute(arguments, ctx)


class Person:
    """Answers by what it is told, and remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = [*answers]
        self.questions: list[tuple[str, Sequence[str]]] = []
        self.threads: list[int] = []

    def blocking(self, question: str, choices: Sequence[str]) -> str:
        self.questions.append((question, choices))
        self.threads.append(threading.get_ident())
        return self.answers.pop(0)

    async def __call__(self, question: str, choices: Sequence[str]) -> str:
        return self.blocking(question, choices)


async def test_the_answer_is_the_result() -> None:
    person = Person(" Blue. \n")
    result = await asked(person, question=" Which colour? ", choices=[" red", "blue ", " "])
    assert (result.plain_text, result.is_error) == ("Blue.", False)
    assert person.questions == [("Which colour?", ("red", "blue"))]


async def test_choices_may_be_left_out() -> None:
    person = Person("so", "so")
    await asked(person, question="How?")
    await asked(person, question="How?", choices=None)
    assert person.questions == [("How?", ())] * 2


async def test_a_plain_function_may_block_a_thread() -> None:
    person = Person("yes")
    result = await asked(person.blocking, question="Shall I?")
    assert result.plain_text == "yes"
    assert threading.get_ident() not in person.threads


async def test_any_kind_of_async_callable_will_do() -> None:
    person = Person("1", "2", "3")
    async_function: Any = partial(Person.__call__, person)
    for ask in (async_function, lambda q, c: person(q, c), person):
        await asked(ask, question="How many?")
    assert set(person.threads) == {threading.get_ident()}
    assert person.answers == []


# --- no answer ----------------------------------------------------------------------------------


async def test_with_nobody_to_ask_the_model_goes_on() -> None:
    result = await asked(None, question="Shall I?")
    assert result.is_error
    assert result.plain_text == f"No user is available to ask. {GO_ON}"


def at_its_end(question: str, choices: Sequence[str]) -> str:
    raise EOFError


async def withdrawn(question: str, choices: Sequence[str]) -> str:
    dialog: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    dialog.cancel()
    return await dialog


@pytest.mark.parametrize("ask", [at_its_end, withdrawn])
async def test_nobody_behind_the_terminal(ask: AskUser) -> None:
    result = await asked(ask, question="Shall I?")
    assert result.is_error
    assert result.plain_text == f"No user is available to answer. {GO_ON}"


@pytest.mark.parametrize("answer", ["", " \n", None])
async def test_a_blank_answer_is_said_to_be_one(answer: Any) -> None:
    result = await asked(Person(answer), question="Shall I?")
    assert not result.is_error
    assert result.plain_text == f"The user gave no answer. {GO_ON}"


async def test_a_blank_question_is_not_put() -> None:
    person = Person()
    result = await asked(person, question="  ")
    assert result.is_error
    assert person.questions == []


async def test_a_failing_host_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def broken(question: str, choices: Sequence[str]) -> str:
        raise OSError("no display")

    result = await asked(broken, question="Shall I?")
    assert result.is_error
    assert "could not be put to the user (OSError: no display)" in result.plain_text
    assert "asking the user failed" in caplog.text


async def test_a_person_who_takes_too_long() -> None:
    async def asleep(question: str, choices: Sequence[str]) -> str:
        await asyncio.Event().wait()
        return ""

    result = await asked(asleep, 0.01, question="Shall I?")
    assert result.is_error
    assert result.plain_text == f"The user has not answered in time. {GO_ON}"


def test_what_cannot_ask_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="ask must be a function"):
        ask_user_tool("input")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"ask must accept \(question, choices\), not \(question\)"
    ):
        ask_user_tool(lambda question: "yes")  # type: ignore[arg-type,misc]
    for timeout in (0, -1, True, "5"):
        with pytest.raises(ConfigError, match="timeout must be more than 0"):
            ask_user_tool(None, timeout=timeout)  # type: ignore[arg-type]


# --- in a run -----------------------------------------------------------------------------------


async def test_questions_of_one_batch_come_one_after_the_other() -> None:
    open_questions, most = 0, 0

    async def person(question: str, choices: Sequence[str]) -> str:
        nonlocal open_questions, most
        open_questions += 1
        most = max(most, open_questions)
        await let_others_run()
        open_questions -= 1
        return f"to {question}"

    made = ask_user_tool(person)
    batch = [call("ask_user", question=f"q{n}") for n in range(3)]
    result, _ = await completed([batch, "ok"], made)
    assert most == 1
    assert texts(result) == ["to q0", "to q1", "to q2"]


async def test_a_cancelled_run_takes_its_question_back() -> None:
    signal, is_asked = CancellationToken(), asyncio.Event()
    ended: list[str] = []

    async def person(question: str, choices: Sequence[str]) -> str:
        is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(question)
        return ""

    async def cancel() -> None:
        await is_asked.wait()
        signal.cancel("enough")

    batch = [call("ask_user", question="first"), call("ask_user", question="second")]
    canceller = asyncio.create_task(cancel())
    error, _ = await failed(
        RunAborted, [batch], ask_user_tool(person), signal=signal, leaves_tasks=True
    )
    await canceller
    assert ended == ["first"]
    assert [answer.details["kind"] for answer in results(error)] == ["tool_call_stopped"] * 2


async def test_a_thread_that_still_asks_does_not_hold_up_the_end() -> None:
    signal, is_asked, answered = CancellationToken(), threading.Event(), threading.Event()

    def person(question: str, choices: Sequence[str]) -> str:
        is_asked.set()
        answered.wait(30)
        return "too late"

    def cancel() -> None:
        is_asked.wait(30)
        signal.cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    error, _ = await failed(
        RunAborted, [call("ask_user", question="?")], ask_user_tool(person), signal=signal
    )
    assert texts(error) == ["The call was running when the run was stopped."]
    answered.set()
    canceller.join()


def test_one_at_a_time_on_every_event_loop() -> None:
    """A lock of asyncio belongs to the loop where it was first waited on."""
    gate = OneAtATime()

    async def three_times() -> list[int]:
        order: list[int] = []

        async def one(number: int) -> None:
            async with gate.turn():
                await let_others_run()
                order.append(number)

        await asyncio.gather(*[one(number) for number in range(3)])
        return order

    assert [asyncio.run(three_times()) for _ in range(3)] == [[0, 1, 2]] * 3
    assert not gate._is_taken


def test_the_model_is_told_what_it_is_for() -> None:
    made = ask_user_tool(None)
    assert made.name == "ask_user"
    assert made.idempotent
    properties = made.schema.parameters["properties"]
    assert all(properties[name]["description"] for name in ("question", "choices"))
    assert made.schema.parameters["required"] == ["question"]
