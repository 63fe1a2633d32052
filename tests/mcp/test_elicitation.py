"""Questions of servers to a person."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest

from clark_agent import ToolResult, ToolSuspended
from clark_agent.mcp import McpServer, McpTools
from clark_agent.mcp.elicitation import choices_of, value_of
from clark_agent.mcp.suspended_questions import Asked, answers_to, suspension
from clark_agent.mcp.watching import ResourceUpdates
from clark_agent.toolkit import without_marks
from clark_agent.tools import Continued, ToolContext, tool_result
from tests.mcp.own_servers import FORM, program


class Person:
    """Answers by the last line of the question that is not in brackets, in order."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.questions: list[str] = []
        self.choices: list[Sequence[str]] = []

    async def __call__(self, question: str, choices: Sequence[str]) -> str:
        self.questions.append(question)
        self.choices.append(choices)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)


def legacy(**settings: Any) -> McpServer:
    return McpServer("own", **program("legacy"), **settings)


def said(result: ToolResult) -> str:
    return without_marks(result.plain_text)


@pytest.mark.slow
async def test_a_form_is_a_question_for_each_field() -> None:
    person = Person("A", "Ann", "old", "-1", "42", "blue", "green", "skip", "ann@example.org")
    async with McpTools(legacy(), ask=person) as tools:
        result = await tools.call("own", "ask")
    assert said(result) == (
        "accept {'name': 'Ann', 'age': 42, 'colour': 'green', 'member': False, "
        "'mail': 'ann@example.org'}"
    )
    assert person.questions == [
        "The MCP server 'own' asks: Who are you?\nName",
        "The MCP server 'own' asks: Who are you?\nName\n(its length must be at least 2 characters)",
        "The MCP server 'own' asks: Who are you?\nage",
        "The MCP server 'own' asks: Who are you?\nage\n(answer with a whole number)",
        "The MCP server 'own' asks: Who are you?\nage\n(it must be 0 to 150)",
        "The MCP server 'own' asks: Who are you?\ncolour",
        "The MCP server 'own' asks: Who are you?\ncolour\n(choose one of: red, green)",
        "The MCP server 'own' asks: Who are you?\nmember\n"
        "(optional: answer 'skip' to leave it out)",
        "The MCP server 'own' asks: Who are you?\nmail\n(optional: answer 'skip' to leave it out)",
    ]
    assert person.choices[5] == ("red", "green")
    assert person.choices[7] == ("yes", "no", "skip")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "action"),
    [
        ([""], "decline"),
        ([EOFError()], "cancel"),
        ([RuntimeError("broken")], "cancel"),
        (["A", "A", "A"], "decline"),
    ],
)
async def test_a_person_who_does_not_answer(answers: list[Any], action: str) -> None:
    async with McpTools(legacy(), ask=Person(*answers)) as tools:
        assert said(await tools.call("own", "ask")) == f"{action} None"
        assert said(await tools.call("own", "add", {"a": 1})) == "1"


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "action"), [("Yes", "accept"), ("no", "decline")])
async def test_a_page_to_open(answer: str, action: str) -> None:
    person = Person(answer)
    async with McpTools(legacy(), ask=person) as tools:
        assert said(await tools.call("own", "open_page")) == action
    assert "https://example.org/sign-in" in person.questions[0]


@pytest.mark.slow
async def test_without_a_person_the_server_learns_that_nobody_answers() -> None:
    async with McpTools(legacy()) as tools:
        assert (await tools.call("own", "ask")).is_error


@pytest.mark.slow
async def test_the_time_of_the_person_does_not_count() -> None:
    """The call may take half a second. The person starts to answer after that."""
    loop = asyncio.get_running_loop()

    async def ask(question: str, choices: Sequence[str]) -> str:
        # Wait until the timer of the call would have gone off, on the clock that it uses.
        over = loop.create_future()
        loop.call_later(0.7, over.set_result, None)
        await over
        return ""

    async with McpTools(legacy(timeout=0.5), ask=ask) as tools:
        assert said(await tools.call("own", "ask")) == "decline None"


@pytest.mark.slow
async def test_a_cancelled_call_withdraws_its_question() -> None:
    asked, withdrawn = asyncio.Event(), asyncio.Event()

    async def ask(question: str, choices: Sequence[str]) -> str:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            withdrawn.set()
        return ""

    async with McpTools(legacy(), ask=ask) as tools:
        task = asyncio.create_task(tools.call("own", "ask"))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await withdrawn.wait()
        assert said(await tools.call("own", "add", {"a": 1})) == "1"


class Silent:
    """Is asked, and does not answer."""

    def __init__(self) -> None:
        self.asked, self.withdrawn = asyncio.Event(), asyncio.Event()

    async def __call__(self, question: str, choices: Sequence[str]) -> str:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.withdrawn.set()
        return ""


@pytest.mark.slow
async def test_a_question_stops_only_the_clocks_of_calls_that_it_may_belong_to() -> None:
    """Two calls are in progress when an older server asks. Neither stops its clock for ever."""
    person = Silent()
    async with asyncio.timeout(30), McpTools(legacy(timeout=0.5), ask=person) as tools:
        other = asyncio.create_task(tools.call("own", "wait"))
        asking = asyncio.create_task(tools.call("own", "ask"))
        await person.asked.wait()
        later = await tools.call("own", "wait")
        assert later.details["kind"] == "mcp_timeout"
        assert not other.done()
        assert not asking.done()
        other.cancel()
        asking.cancel()
        await person.withdrawn.wait()
        assert said(await tools.call("own", "add", {"a": 1})) == "1"


@pytest.mark.slow
async def test_a_question_that_may_belong_to_several_calls_stops_them_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clark_agent.mcp.connection._LONGEST_PAUSE", 0.1)
    person = Silent()
    async with asyncio.timeout(30), McpTools(legacy(timeout=0.5), ask=person) as tools:
        results = await asyncio.gather(tools.call("own", "wait"), tools.call("own", "ask"))
        assert [r.details["kind"] for r in results] == ["mcp_timeout", "mcp_timeout"]
        await person.withdrawn.wait()


@pytest.mark.slow
async def test_a_question_of_a_current_server_stops_the_clock_of_its_call(tmp_path: Path) -> None:
    person = Silent()
    program = [str(Path(__file__).parent / "servers" / "modern.py"), str(tmp_path / "journal")]
    server = McpServer("m", command=sys.executable, args=program, timeout=0.5)
    async with asyncio.timeout(30), McpTools(server, ask=person) as tools:
        other = asyncio.create_task(tools.call("m", "slow", {"seconds": 60}))
        asking = asyncio.create_task(tools.call("m", "greet"))
        await person.asked.wait()
        assert (await other).details["kind"] == "mcp_timeout"
        assert not asking.done()
        asking.cancel()
        await person.withdrawn.wait()


@pytest.mark.slow
async def test_without_a_person_a_current_server_refuses_the_call(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    program = [str(Path(__file__).parent / "servers" / "modern.py"), str(journal)]
    async with McpTools(McpServer("m", command=sys.executable, args=program)) as tools:
        result = await tools.call("m", "register", {"club": "chess"})
    assert result.is_error
    assert "not possible here, such as to ask the user" in result.plain_text
    assert "The call was not made" in result.plain_text
    assert not journal.exists()


@pytest.mark.slow
async def test_a_question_that_outlives_its_call_is_withdrawn() -> None:
    withdrawn = asyncio.Event()

    async def ask(question: str, choices: Sequence[str]) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            withdrawn.set()
        return ""

    async with asyncio.timeout(30), McpTools(legacy(), ask=ask) as tools:
        [leave] = [t for t in await tools.tools() if t.name == "own_ask_and_leave"]
        ctx = ToolContext(tool_call_id="c", tool_name="t")
        while not withdrawn.is_set():
            assert said(await leave.execute({}, ctx)) == "left"
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("field", "answer", "value"),
    [
        ({"type": "boolean"}, "YES", True),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "string", "format": "date"}, "2026-01-31", "2026-01-31"),
        ({"type": "string", "format": "date-time"}, "2026-01-31T10:00:00Z", "2026-01-31T10:00:00Z"),
        ({"type": "string", "format": "uri"}, "https://a", "https://a"),
        ({"type": "string", "enum": ["a", "b"], "enumNames": ["A!", "B!"]}, "B!", "b"),
        ({"type": "string", "oneOf": [{"const": "x", "title": "The X"}]}, "the x", "x"),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, "a, b", ["a", "b"]),
        ({"type": "array", "items": {"anyOf": [{"const": "a", "title": "A"}]}}, "A", ["a"]),
    ],
)
def test_answers_as_values(field: Any, answer: str, value: Any) -> None:
    assert value_of(answer, field, choices_of(field)) == value


@pytest.mark.parametrize(
    ("field", "answer"),
    [
        ({"type": "boolean"}, "perhaps"),
        ({"type": "number"}, "nan"),
        ({"type": "integer"}, "1.5"),
        ({"type": "string", "format": "date"}, "tomorrow"),
        ({"type": "string", "format": "date-time"}, "noon"),
        ({"type": "string", "format": "uri"}, "somewhere"),
        ({"type": "string", "format": "email"}, "@"),
        ({"type": "string", "maxLength": 2}, "long"),
        ({"type": "array", "items": {"enum": ["a"]}, "maxItems": 1}, "a, a"),
    ],
)
def test_answers_that_do_not_fit(field: Any, answer: str) -> None:
    with pytest.raises(ValueError, match=r"answer|length|must|give"):
        value_of(answer, field, choices_of(field))


def test_the_form_is_one_that_the_protocol_allows() -> None:
    types.ElicitRequestFormParams(message="m", requested_schema=FORM)


# --- answers of a decision ----------------------------------------------------------------------


def given(answer: Any, **questions: Any) -> Continued:
    request = {"server": "s", "questions": questions, "state": "opaque"}
    return Continued(request, tool_result(answer))


def form(**fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": fields, "required": [*fields][:1]}
    return {"mode": "form", "message": "Who?", "requestedSchema": schema}


PERSON = form(name={"type": "string"}, age={"type": "integer"}, member={"type": "boolean"})
TAGS = form(tags={"type": "array", "items": {"type": "string", "enum": ["a", "b"]}})
PAGE = {"mode": "url", "message": "Sign in", "url": "https://example.org/"}


@pytest.mark.parametrize(
    ("answer", "question", "content"),
    [
        ({"name": "Ann", "age": "42"}, PERSON, {"name": "Ann", "age": 42}),
        ('{"name": "Ann", "member": true}', PERSON, {"name": "Ann", "member": True}),
        ({"tags": ["a", "b"]}, TAGS, {"tags": ["a", "b"]}),
        ("b, a", TAGS, {"tags": ["b", "a"]}),
        ("yes", form(), {}),
    ],
)
def test_an_answer_in_the_form_of_the_protocol(answer: Any, question: Any, content: Any) -> None:
    answers, state = answers_to(given(answer, q=question))
    assert answers == {"q": {"action": "accept", "content": content}}
    assert state == "opaque"


@pytest.mark.parametrize("question", [PAGE, form()])
def test_a_question_with_yes_and_no(question: Any) -> None:
    assert suspension("s", Asked({"q": question}, None)).request["choices"] == ["yes", "no"]
    assert answers_to(given("Yes", q=question))[0]["q"]["action"] == "accept"
    assert answers_to(given("no", q=question))[0] == {"q": {"action": "decline"}}


def test_several_questions_at_once() -> None:
    answers, _ = answers_to(given({"a": {"name": "Ann"}, "b": "yes"}, a=PERSON, b=PAGE))
    assert answers["a"]["content"] == {"name": "Ann"}
    assert answers["b"]["action"] == "accept"


@pytest.mark.parametrize(
    ("answer", "questions", "problem"),
    [
        ("Ann", {"q": PERSON}, "answer with a JSON object"),
        ({"age": 3}, {"q": PERSON}, "name is missing"),
        ({"name": "Ann", "age": "old"}, {"q": PERSON}, "age: answer with a whole number"),
        ("c", {"q": TAGS}, "tags: choose one of: a, b"),
        ("yes", {"a": PERSON, "b": PAGE}, "answer with a JSON object"),
    ],
)
def test_an_answer_that_does_not_fit_is_asked_for_again(
    answer: Any, questions: Any, problem: str
) -> None:
    with pytest.raises(ToolSuspended) as caught:
        answers_to(given(answer, **questions))
    request = caught.value.request
    assert request["question"].endswith(f"({problem})")
    assert request["questions"] == questions
    assert request["state"] == "opaque"
    assert caught.value.continues


def test_what_the_server_writes_is_shown_without_what_a_terminal_would_execute() -> None:
    question = form(name={"type": "string", "title": "\x1b[2JName"})
    asked = suspension("s", Asked({"q": {**question, "message": "\x1b]0;x\x07Who?"}}, None))
    assert "\x1b" not in asked.request["question"]
    assert "\x07" not in asked.request["question"]


# --- updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("watched", "changed", "is_heard"),
    [
        ("file:///a", "file:///a", True),
        ("file:///a", "file:///a/b", True),
        ("file:///a/", "file:///a/b", True),
        ("file:///a", "file:///a#part", True),
        ("file:///a", "file:///ab", False),
        ("file:///a/b", "file:///a", False),
    ],
)
async def test_an_update_of_a_part_is_one_of_the_resource(
    watched: str, changed: str, is_heard: bool
) -> None:
    updates = ResourceUpdates(lambda: asyncio.Future(), watched)
    updates.updated(changed)
    assert [*updates.pending] == [changed] * is_heard
