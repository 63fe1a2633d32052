"""``clark-agent run`` on a terminal: what a person sees, is asked, and interrupts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import chop_cells

from clark_agent.cli.approval_prompt import CHOICES, pages
from tests.cli.command_line import calls, calls_all, command_line, hangs, says
from tests.transports.wires_chat import bodies

pytestmark = pytest.mark.slow

QUESTION = f"{CHOICES}\r\n? "
MORE = "Enter more · n no\r\n? "
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


async def test_markdown_is_rendered_and_calls_are_shown(tmp_path: Path) -> None:
    script = [calls("calculator", expression="6*7"), says("It is **42**", ".\n\n- a\n- b\n")]
    async with (
        command_line(tmp_path, script) as (run, _),
        run.terminal("run", "Compute") as terminal,
    ):
        assert await terminal.ended() == 0
        text = await terminal.sees("done · 2 turns")
    assert "● calculator(expression='6*7')" in text
    assert "It is 42." in text
    assert " • a" in text
    assert "\x1b[1m42" in terminal.raw
    assert terminal.raw.count(HIDE_CURSOR) == terminal.raw.count(SHOW_CURSOR) > 0


async def test_a_person_is_asked_and_what_they_say_counts(tmp_path: Path) -> None:
    write = [calls("write_file", path=f"{n}.txt", content="x") for n in range(4)]
    async with (
        command_line(tmp_path, [*write, says("Done.")]) as (run, server),
        run.terminal("run", "Write") as terminal,
    ):
        terminal.type("y\n")  # before the question, so it is no answer
        await terminal.sees(QUESTION)
        assert "May it run?  write_file(path='0.txt', content='x')" in terminal.text
        terminal.type("y\n")
        await terminal.sees(QUESTION, times=2)
        terminal.type("use another name\n")
        await terminal.sees(QUESTION, times=3)
        terminal.type("always\n")  # and nothing is asked any more
        assert await terminal.ended() == 0
    assert sorted(path.name for path in run.root.iterdir()) == ["0.txt", "2.txt", "3.txt"]
    assert "use another name" in bodies(server)[2]["messages"][-1]["content"]


async def test_the_agent_asks_a_question(tmp_path: Path) -> None:
    script = [calls("ask_user", question="Which colour?", choices=["red", "blue"]), says("Fine.")]
    async with (
        command_line(tmp_path, script) as (run, server),
        run.terminal("run", "-t", "ask_user", "Paint") as terminal,
    ):
        await terminal.sees("  2. blue\r\n? ")
        terminal.type("2\n")
        assert await terminal.ended() == 0
    assert bodies(server)[1]["messages"][-1]["content"] == "blue"


PATH_QUESTION = f"{CHOICES} (always and never apply to this path)\r\n? "


async def test_secrets_and_what_others_run_are_asked_about_once(tmp_path: Path) -> None:
    """By the gate, or by the tool if the gate lets it run."""
    script = [
        calls("read_file", path=".env"),
        calls("write_file", path=".bashrc", content="x\n"),
        says("Done."),
    ]
    async with command_line(tmp_path, [*script, *script]) as (run, server):
        (run.root / ".env").write_text("KEY=1\n")
        async with run.terminal("run", "Look") as terminal:
            await terminal.sees(PATH_QUESTION)
            assert "May it run?  read_file(path='.env'" in terminal.text
            assert "[.env: it looks like a file with secrets]" in terminal.text
            terminal.type("y\n")
            await terminal.sees(QUESTION)
            assert "[.bashrc: a shell or the system runs it at its start]" in terminal.text
            assert "+++ .bashrc" in terminal.text
            terminal.type("y\n")  # and that is all
            assert await terminal.ended() == 0
        assert (run.root / ".bashrc").read_text() == "x\n"
        (run.root / ".bashrc").unlink()
        async with run.terminal("run", "--yes", "Look") as terminal:
            await terminal.sees(PATH_QUESTION)
            terminal.type("y\n")
            await terminal.sees(PATH_QUESTION, times=2)
            terminal.type("n\n")
            assert await terminal.ended() == 0
    assert not (run.root / ".bashrc").exists()
    results = [body["messages"][-1]["content"] for body in bodies(server)]
    assert ["KEY=1" in result for result in results] == [False, True, False, False, True, False]
    assert results[2].startswith("Created .bashrc")
    assert results[5].startswith("'.bashrc' was not written")


async def test_questions_come_one_after_the_other(tmp_path: Path) -> None:
    batch = calls_all(
        ("ask_user", {"question": "Which colour?", "choices": ["red", "blue"]}),
        ("read_file", {"path": ".env"}),
    )
    async with command_line(tmp_path, [batch, says("Fine.")]) as (run, server):
        (run.root / ".env").write_text("KEY=1\n")
        async with run.terminal("run", "-t", "files,ask_user", "Paint") as terminal:
            await terminal.sees("  2. blue\r\n? ")
            terminal.type("2\n")
            await terminal.sees(PATH_QUESTION)
            assert terminal.text.index("? 2\r\n") < terminal.text.index("May it run?")
            terminal.type("y\n")
            assert await terminal.ended() == 0
    colour, read = [message["content"] for message in bodies(server)[1]["messages"][-2:]]
    assert colour == "blue"
    assert "KEY=1" in read


async def test_ctrl_c_takes_the_question_of_a_tool_back(tmp_path: Path) -> None:
    async with command_line(tmp_path, [calls("read_file", path=".env")]) as (run, _):
        (run.root / ".env").write_text("KEY=1\n")
        async with run.terminal("run", "Look") as terminal:
            await terminal.sees(PATH_QUESTION)
            terminal.interrupt()
            assert await terminal.ended() == 130
            assert "left behind" not in terminal.text


async def test_ctrl_c_takes_a_question_back(tmp_path: Path) -> None:
    async with (
        command_line(tmp_path, [calls("write_file", path="a", content="")]) as (run, _),
        run.terminal("run", "Write") as terminal,
    ):
        await terminal.sees(QUESTION)
        terminal.interrupt()
        assert await terminal.ended() == 130
        await terminal.sees("to continue: clark-agent resume")
    assert not (run.root / "a").exists()
    assert run.store.runs()[0].outcome == "failed"


async def test_ctrl_c_gives_the_cursor_back(tmp_path: Path) -> None:
    async with (
        command_line(tmp_path, [hangs("Once upon a time")]) as (run, _),
        run.terminal("run", "Tell") as terminal,
    ):
        await terminal.sees("Once upon")
        terminal.interrupt()
        assert await terminal.ended() == 130
        await terminal.sees("interrupted · 1 turn")
    assert terminal.raw.rindex(SHOW_CURSOR) > terminal.raw.rindex(HIDE_CURSOR)


async def test_a_long_call_is_seen_to_its_end_before_it_is_approved(tmp_path: Path) -> None:
    content = "".join([f"line {n}\n" for n in range(60)]) + "\x1b[2J\u202eevil\n"
    write = [calls("write_file", path=f"{n}.txt", content=content) for n in range(2)]
    async with (
        command_line(tmp_path, [*write, says("Done.")]) as (run, server),
        run.terminal("run", "Write") as terminal,
    ):
        await terminal.sees(MORE)
        assert "May it run?  write_file: a call of " in terminal.text
        assert "+line 5\r\n" in terminal.text
        assert "line 59" not in terminal.text
        terminal.type("y\n")
        for number in range(2, 7):  # the first of them once more
            await terminal.sees(MORE, number)
            terminal.type("\n")
        await terminal.sees(QUESTION)
        assert "view every page first · page 1 of 6 · " in terminal.text
        assert r"+\x1b[2J\u202eevil" in terminal.text
        assert r"  | \x1b[2J\u202eevil" in terminal.text
        terminal.type("y\n")
        await terminal.sees(MORE, times=7)
        terminal.type("too long\n")
        assert await terminal.ended() == 0
    assert [path.name for path in run.root.iterdir()] == ["0.txt"]
    assert "too long" in bodies(server)[2]["messages"][-1]["content"]


@given(st.text(alphabet="ab\n 界", max_size=80), st.integers(2, 9), st.integers(1, 5))
def test_pages_have_all_of_a_text_and_fit(text: str, columns: int, rows: int) -> None:
    found = pages(text, columns, rows)
    assert "".join(found).replace("\n", "") == text.replace("\n", "")
    for page in found:
        heights = [max(1, len(chop_cells(line, columns))) for line in page.split("\n")]
        assert sum(heights) <= rows
