"""``clark-agent chat``, typed by tmux into a real terminal, with a real server behind it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from clark_agent import run
from clark_agent.cli.chat_session import Chat
from clark_agent.cli.options import Approvals, Settings
from clark_agent.cli.slash import obey
from clark_agent.cli.view import Style
from clark_agent.config import LoopConfig
from clark_agent.errors import ConfigError
from clark_agent.run_log import Allow, JsonlStore, RunLog, decide, waiting_for
from clark_agent.testing import ScriptedStream
from clark_agent.types import AgentContext, AgentMessage, AssistantMessage, UserMessage
from tests.cli.command_line import calls, calls_all, hangs, says
from tests.transports.servers.bytes_server import Answer, ByteServer
from tests.transports.wires_chat import bodies

pytestmark = pytest.mark.slow

PATIENCE = 20.0  # seconds until a screen that does not come is an error
ENV = {"OPENAI_API_KEY": "none", "LC_ALL": "C.UTF-8"}


LONG_TALK: list[AgentMessage] = [UserMessage("Talk.")]
for _number in range(30):
    LONG_TALK += [AssistantMessage.from_text("word " * 2_000), UserMessage(f"And {_number}?")]


def last_message(server: ByteServer) -> dict[str, Any]:
    message: dict[str, Any] = bodies(server)[-1]["messages"][-1]
    return message


# --- the terminal -----------------------------------------------------------------------------


class Terminal:
    """A tmux of our own with ``chat`` in it. Everything is done in a folder of the test's."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        self.root = home / "root"
        self.root.mkdir(exist_ok=True)
        self.url = url
        self.store = JsonlStore(home / "clark-agent" / "runs")
        self._socket = home / "tmux"

    async def open(self) -> None:
        env = {**ENV, "XDG_STATE_HOME": str(self.home)}
        if "SSL_CERT_FILE" in os.environ:
            env["SSL_CERT_FILE"] = os.environ["SSL_CERT_FILE"]
        given = [word for name, value in env.items() for word in ("-e", f"{name}={value}")]
        await self.tmux("new-session", "-d", "-x100", "-y40", "-c", str(self.root), *given, "sh")
        await self.tmux("set", "-g", "remain-on-exit", "on")

    async def start(self, *options: str) -> None:
        options = options or ("-m", f"{self.url}/v1#m", "-t", "default,shell,ask_user")
        await self.command("chat", *options)
        await self.sees("· ready")  # the line above it may be broken anywhere

    async def command(self, *words: str) -> None:
        line = subprocess.list2cmdline([sys.executable, "-m", "clark_agent", *words])
        then = "echo left: $? $(stty -a | grep -o '.icanon')"
        await self.tmux("respawn-pane", "-k", f"{line}; {then}")

    async def tmux(self, *words: str) -> str:
        command = ("tmux", "-f", os.devnull, "-S", str(self._socket), *words)
        # Said outright: a readline in this process may have put COLUMNS where Python does not look.
        env = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
        }
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
        )
        out, error = await process.communicate()
        assert process.returncode == 0, error.decode()
        return out.decode()

    async def keys(self, *keys: str) -> None:
        await self.tmux("send-keys", *keys)

    async def line(self, text: str) -> None:
        await self.tmux("send-keys", "-l", text)
        await self.keys("Enter")

    async def screen(self) -> str:
        return await self.tmux("capture-pane", "-p", "-S", "-")

    async def shown(self) -> str:
        """What the screen shows now, without what has left it at the top."""
        return await self.tmux("capture-pane", "-p")

    async def sees(self, text: str, times: int = 1) -> str:
        return await self.until(lambda screen: screen.count(text) >= times, text)

    async def until(self, is_so: Callable[[str], bool], what: str) -> str:
        screen = ""
        try:
            async with asyncio.timeout(PATIENCE):
                while not is_so(screen := await self.screen()):  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"never came: {what}\n{screen.rstrip()}")
        return screen

    async def pid(self) -> int:
        """Of the chat, which the pane's shell has started."""
        shell = int(await self.tmux("display", "-p", "#{pane_pid}"))
        process = await asyncio.create_subprocess_exec(
            *("ps", "-o", "pid=", "--ppid", str(shell)), stdout=subprocess.PIPE
        )
        return int((await process.communicate())[0])


@asynccontextmanager
async def opened(home: Path, *answers: Answer) -> AsyncGenerator[tuple[Terminal, ByteServer], None]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    async with ByteServer(answers) as server:
        terminal = Terminal(home, server.url)
        try:
            await terminal.open()
            yield terminal, server
        finally:
            await terminal.tmux("kill-server")


@asynccontextmanager
async def chatting(
    home: Path, *answers: Answer
) -> AsyncGenerator[tuple[Terminal, ByteServer], None]:
    async with opened(home, *answers) as (terminal, server):
        await terminal.start()
        yield terminal, server


# --- talking ----------------------------------------------------------------------------------


async def test_an_agent_of_ones_own_is_shown_by_its_name(tmp_path: Path) -> None:
    async with opened(tmp_path, says("Ahoy.")) as (terminal, server):
        (terminal.root / "own.py").write_text(
            "from clark_agent import Agent\n"
            "from clark_agent.testing import ScriptedStream\n"
            'shop = Agent(ScriptedStream(["Hi."]))\n'
        )
        await terminal.start("--agent", "own:shop")
        await terminal.sees("own:shop in ")
        await terminal.sees("own:shop · 0 tokens in, 0 out · ready")
        await terminal.line("/model")
        await terminal.sees("the model is that of the agent")
        await terminal.line(f"/model {server.url}/v1#m")
        await terminal.sees(f"the model is {server.url}/v1#m")
        await terminal.line("Hello")
        assert "None" not in await terminal.sees("Ahoy.")


def test_without_a_terminal_it_refuses_and_says_what_to_use() -> None:
    command = [sys.executable, "-m", "clark_agent", "chat"]
    done = subprocess.run(command, input="hi\n", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "chat needs a terminal" in done.stderr
    assert "clark-agent run" in done.stderr
    assert "Traceback" not in done.stderr


async def test_answers_are_rendered_logged_and_remembered(tmp_path: Path) -> None:
    answers = (says("Some **bo", "ld** text.\n\n\x1b]0;owned\x07\x1b[31mred"), says("Again."))
    async with chatting(tmp_path, *answers) as (terminal, server):
        await terminal.line("Hello")
        screen = await terminal.sees("done · 1 turn")
        assert "> Hello" in screen
        assert "Some bold text." in screen
        assert r"\x1b]0;owned\x07\x1b[31mred" in screen
        await terminal.line("More")
        await terminal.sees("Again.")
        await terminal.sees("200 tokens in, 40 out · ready")
        said = [m["content"] for m in bodies(server)[1]["messages"] if m["role"] == "user"]
        assert said == ["Hello", "More"]
        await terminal.keys("Up", "Up")
        await terminal.until(lambda s: s.count("> Hello") == 2, "the first line, from the history")
        await terminal.keys("C-c", "C-d")
        await terminal.sees("left: 0")
    runs = terminal.store.runs()
    assert [run.outcome for run in runs] == ["done", "done"]
    assert len({run.conversation_id for run in runs}) == 1
    history = tmp_path / "clark-agent" / "history"
    assert "+Hello" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


async def test_what_is_typed_meanwhile_steers_the_agent(tmp_path: Path) -> None:
    waiting = calls("shell", command="while [ ! -e go ]; do sleep 0.05; done; echo gone")
    async with chatting(tmp_path, waiting, says("Quickly, then.")) as (terminal, server):
        await terminal.line("Wait for it")
        await terminal.sees("wants to run  shell(")
        await terminal.line("y")
        await terminal.sees("● shell(command=")
        await terminal.line("and be quick")
        await terminal.sees("> and be quick")
        (terminal.root / "go").touch()
        await terminal.sees("delivered in turn 2: and be quick")
        await terminal.sees("Quickly, then.")
        result, steered = bodies(server)[1]["messages"][-2:]
        assert result["role"] == "tool"
        assert "gone" in result["content"]
        assert steered == {"role": "user", "content": "and be quick"}


async def test_tools_ask_in_the_same_line(tmp_path: Path) -> None:
    call = calls("shell", command="echo ran")
    asks = calls("ask_user", question="Which colour?", choices=["red", "blue"])
    answers = (call, says("1"), call, says("2"), call, says("3"), call, says("4"), asks, says("5"))
    async with chatting(tmp_path, *answers) as (terminal, server):
        for number, (answer, told) in enumerate(
            [
                ("n", "the user refused it"),
                ("use ls instead", "the user refused it and says: use ls instead"),
                ("a", "ran"),
            ],
            1,
        ):
            await terminal.line("Do it")
            await terminal.sees("wants to run  shell(", number)
            await terminal.sees("y yes · n no · a always")
            await terminal.line(answer)
            await terminal.sees("done · 2 turns", number)
            assert told in last_message(server)["content"]
        await terminal.line("Do it")  # allowed for good
        screen = await terminal.sees("done · 2 turns", 4)
        assert screen.count("wants to run") == 3
        assert "ran" in last_message(server)["content"]
        await terminal.line("Paint")
        await terminal.sees("your answer >")
        await terminal.line("2")
        await terminal.sees("done · 2 turns", 5)
        assert last_message(server)["content"] == "blue"
    assert "+use ls" not in (tmp_path / "clark-agent" / "history").read_text()


async def test_a_question_does_not_take_the_answer_to_another(tmp_path: Path) -> None:
    """Two tools of one turn ask: each answer is for the question that stands there."""
    batch = calls_all(
        ("ask_user", {"question": "Which colour?", "choices": ["red", "blue"]}),
        ("read_file", {"path": ".env"}),
    )
    async with chatting(tmp_path, batch, says("Fine.")) as (terminal, server):
        (terminal.root / ".env").write_text("KEY=1\n")
        await terminal.line("Paint")
        await terminal.sees("your answer >")
        await terminal.line("2")
        await terminal.sees("always and never apply to this path")
        await terminal.line("y")
        screen = await terminal.sees("done · 2 turns")
        assert screen.count("wants to run  read_file(path='.env'") == 1
        assert "[.env: it looks like a file with secrets]" in screen
        colour, read = [message["content"] for message in bodies(server)[1]["messages"][-2:]]
        assert colour == "blue"
        assert "KEY=1" in read


async def test_a_narrower_window_keeps_nothing_of_what_was_drawn(tmp_path: Path) -> None:
    story = "Once upon a time there was a fox. " * 8
    async with opened(tmp_path, hangs("A title.\n\n" * 6 + story)) as (terminal, _):
        await terminal.line("unset COLUMNS LINES")  # set where tests run in parallel
        await terminal.command("run", "-m", f"{terminal.url}/v1#m", "Tell")
        await terminal.sees("thinking")  # drawn for the first time, and listening for other sizes
        for columns in (100, 60):
            await terminal.tmux("resize-window", "-x", str(columns))
            await terminal.until(drawn_for(story, columns), f"{columns} columns")
        # It is drawn again for every size that the window passes through.
        await terminal.until(lambda screen: screen.count("A title.") == 6, "six titles")
        async with asyncio.timeout(PATIENCE):
            while (await terminal.shown()).count("fox") != 8:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.05)


def drawn_for(story: str, columns: int) -> Callable[[str], bool]:
    lines = set(textwrap.wrap(story, columns))
    return lambda screen: lines <= {line.strip() for line in screen.splitlines()}


# --- stopping ---------------------------------------------------------------------------------


async def test_ctrl_c_clears_the_line_or_stops_the_run(tmp_path: Path) -> None:
    answers = (hangs("I begin to sp"), says("Fine."))
    async with chatting(tmp_path, *answers) as (terminal, server):
        await terminal.keys("-l", "nonsense")
        await terminal.sees("> nonsense")
        await terminal.keys("C-c")
        await terminal.until(lambda s: "nonsense" not in s, "an empty line")
        await terminal.line("Go")
        await terminal.sees("I begin to sp")  # live: the block is open
        await terminal.line("too late")
        await terminal.sees("> too late")
        await terminal.keys("-l", "half a li")
        await terminal.keys("C-c")
        screen = await terminal.sees("stopped · 1 turn")
        assert screen.count("I begin to sp") == 1
        await terminal.sees("not delivered: too late")
        await server.client_gone()
        await terminal.line("ne")  # what was typed is still there
        await terminal.sees("Fine.")
        said = [m["content"] for m in bodies(server)[1]["messages"] if m["role"] == "user"]
        assert "Go" in said[0]
        assert "half a line" in said[-1]


async def test_ctrl_c_stops_a_compaction(tmp_path: Path) -> None:
    answers = (hangs("They"), says("I am here."))
    async with chatting(tmp_path, *answers) as (terminal, server):
        config = LoopConfig(stream=ScriptedStream(["Yes."]), run_log=RunLog(terminal.store))
        await run("Still there?", AgentContext("", tuple(LONG_TALK)), config)
        await terminal.line(f"/resume {terminal.store.runs()[0].run_id}")
        await terminal.sees("Yes.")
        await terminal.line("/compact")
        await terminal.until(lambda _: bool(bodies(server)), "the request for the summary")
        await terminal.keys("C-c")
        await terminal.sees("stopped; the conversation is as it was")
        await server.client_gone()
        await terminal.line("Are you there?")
        await terminal.sees("I am here.")
        roles = [m["role"] for m in bodies(server)[1]["messages"]]
        assert roles.count("assistant") == 31  # all of them


async def test_ctrl_c_twice_aborts_what_does_not_stop(tmp_path: Path) -> None:
    stubborn = calls("shell", command="trap '' INT TERM; echo $$ > began; sleep 60")
    async with chatting(tmp_path, stubborn, says("All right.")) as (terminal, server):
        await terminal.line("/tools shell")
        await terminal.line("Go")
        await terminal.sees("wants to run")
        await terminal.line("y")
        await terminal.until(lambda _: (terminal.root / "began").exists(), "the command")
        await terminal.keys("C-c", "C-c")
        await terminal.sees("aborted · 1 turn")
        await terminal.line("And now?")
        await terminal.sees("All right.")
        roles = [m["role"] for m in bodies(server)[1]["messages"]]
        assert roles[-3:] == ["assistant", "tool", "user"]  # what it had is kept, and valid


async def test_leaving_stops_the_run_and_restores_the_terminal(tmp_path: Path) -> None:
    async with chatting(tmp_path, hangs("I begin")) as (terminal, server):
        await terminal.line("Go")
        await terminal.sees("I begin")
        await terminal.keys("C-d")
        await terminal.sees("left: 0 icanon")  # and not -icanon
        await terminal.sees("clark-agent chat --resume")
        await server.client_gone()
    (run,) = terminal.store.runs()
    assert run.outcome == "failed"


async def test_a_chat_that_was_killed_is_taken_up(tmp_path: Path) -> None:
    waits = calls("shell", command="touch began; sleep 60")
    async with chatting(tmp_path, waits, says("I shall look."), says("Yes.")) as (terminal, server):
        await terminal.line("Go")
        await terminal.sees("wants to run")
        await terminal.line("y")
        await terminal.until(lambda _: (terminal.root / "began").exists(), "the command")
        os.kill(await terminal.pid(), 9)
        await terminal.sees("left: 137")
        await terminal.tmux("clear-history")
        await terminal.command("chat", "--resume", "last")
        screen = await terminal.sees("Continue with these? [y/N]:")
        assert f"model           {terminal.url}/v1#m" in screen
        assert "ask_user" in screen
        await terminal.line("y")
        screen = await terminal.sees("I shall look.")
        assert "> Go" in screen
        assert "may or may not have happened" in last_message(server)["content"]
        await terminal.line("And?")
        await terminal.sees("Yes.")
        assert [m["role"] for m in bodies(server)[2]["messages"][1:]] == [
            *("user", "assistant", "tool", "assistant", "user")
        ]


async def test_a_service_manager_ends_it_and_the_run_goes_on_elsewhere(tmp_path: Path) -> None:
    async with chatting(tmp_path, hangs("I begin"), says("The end.")) as (terminal, server):
        await terminal.line("Go")
        await terminal.sees("I begin")
        os.kill(await terminal.pid(), signal.SIGTERM)
        await terminal.sees("left: 143 icanon")
        await terminal.sees("clark-agent chat --resume")
        await server.client_gone()
        (run,) = terminal.store.runs()
        assert run.outcome is None  # not failed
        await terminal.tmux("clear-history")
        await terminal.command("chat", "--resume", "last")
        await terminal.sees("Continue with these? [y/N]:")
        await terminal.line("y")
        await terminal.sees("The end.")
    (run,) = terminal.store.runs()
    assert run.outcome == "done"


async def test_a_chat_waits_for_decisions_of_others(tmp_path: Path) -> None:
    call = calls("shell", command="echo ran")
    async with opened(tmp_path, call, says("Fine."), says("Really.")) as (terminal, server):
        options = ("-m", f"{terminal.url}/v1#m", "-t", "shell", "--suspend")
        await terminal.start(*options)
        await terminal.line("Do it")
        await terminal.sees("suspended · 1 turn")
        (run,) = terminal.store.runs()
        await terminal.sees(f"clark-agent decide {run.run_id[:8]}/1/0 allow")
        await terminal.sees(f"then: /resume {run.run_id[:8]}, or send a message")
        await terminal.line("Are you there?")
        await terminal.sees(f"clark-agent decide {run.run_id[:8]}/1/0 allow", 2)
        (request,) = waiting_for(terminal.store)
        await decide(terminal.store, run.run_id, request.request_id, Allow())
        await terminal.line(f"/resume {run.run_id[:8]}")
        await terminal.sees("Fine.")
        told = [m["content"] for m in bodies(server)[1]["messages"]]
        assert "ran" in told[-2]
        assert told[-1] == "Are you there?"
        await terminal.line("Really?")
        await terminal.sees("Really.")
    assert [run.outcome for run in terminal.store.runs()] == ["done", "done"]


async def test_a_chat_does_not_ask_again_what_the_log_allows(tmp_path: Path) -> None:
    call = calls("shell", command="echo ran")
    async with opened(tmp_path, call, says("Fine.")) as (terminal, server):
        options = ("-m", f"{terminal.url}/v1#m", "-t", "shell")
        await terminal.command("run", "--suspend", *options, "Go")
        await terminal.sees("left: 4")
        (request,) = waiting_for(terminal.store)
        await decide(terminal.store, request.run_id, request.request_id, Allow())
        await terminal.command("chat", "--resume", "last", *options)
        await terminal.sees("Fine.")
        assert "ran" in last_message(server)["content"]


# --- commands ---------------------------------------------------------------------------------


async def test_commands(tmp_path: Path) -> None:
    answers = [says(f"Answer {number}.") for number in range(1, 5)]
    async with chatting(tmp_path, *answers) as (terminal, server):
        await terminal.line("/modle x")
        await terminal.sees("unknown command /modle; did you mean /model?")
        await terminal.line("/model nope:x")
        await terminal.sees("unknown provider in 'nope:x'")
        await terminal.line("First")
        await terminal.sees("Answer 1.")
        await terminal.line(f"/model {terminal.url}/v1#other")
        await terminal.sees("#other · 100 tokens in, 20 out · ready")
        await terminal.line("/tools calculator")
        await terminal.sees("Compute an arithmetic")
        await terminal.line("/etc/passwd is no command")
        await terminal.sees("Answer 2.")
        moved = bodies(server)[1]
        assert moved["model"] == "other"
        offered = [tool["function"]["name"] for tool in moved["tools"]]
        assert offered == ["calculator", "read_earlier"]
        assert [m["content"] for m in moved["messages"][1:]] == [
            *("First", "Answer 1.", "/etc/passwd is no command")
        ]
        await terminal.line("/save talk.md")
        await terminal.sees("saved 4 messages to talk.md")
        assert "Answer 2." in (terminal.root / "talk.md").read_text()
        await terminal.line("/save talk.md")
        await terminal.sees("talk.md already exists")
        await terminal.line("/usage")
        await terminal.sees("200 tokens in, 40 out since this chat began")
        await terminal.line("/compact")
        await terminal.sees("there is nothing to compact yet")
        await check_branches(terminal, server)
        await terminal.keys("-l", "/qu")
        await terminal.sees("/quit  leave")  # the menu: a Tab before it is there does nothing
        await terminal.keys("Tab")
        await terminal.sees("> /quit")
        await terminal.keys("Enter")
        await terminal.sees("left: 0")


async def check_branches(terminal: Terminal, server: ByteServer) -> None:
    """Go back behind the first message, and from there to where it was."""
    newest = terminal.store.runs()[0].run_id
    await terminal.line("/fork 9")
    await terminal.sees("no message 9: you have sent 2")
    await terminal.line("/fork 1")
    await terminal.sees(f"new branch after message 1; /resume {newest[:8]} goes back")
    await terminal.line("Otherwise")
    await terminal.sees("Answer 3.")
    assert [m["content"] for m in bodies(server)[2]["messages"][1:]] == [
        *("First", "Answer 1.", "Otherwise")
    ]
    await terminal.line(f"/resume {newest[:8]}")
    await terminal.sees("> /etc/passwd is no command", 2)
    await terminal.line("Back")
    await terminal.sees("Answer 4.")
    assert [m["content"] for m in bodies(server)[3]["messages"][-3:]] == [
        *("/etc/passwd is no command", "Answer 2.", "Back")
    ]


# --- without a terminal -----------------------------------------------------------------------


class Notes:
    """A screen that calls back with every note."""

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self._on_note = on_note

    def note(self, text: str, style: Style = "info") -> None:
        self._on_note(text)

    def say(self, text: str) -> None: ...
    def end(self) -> None: ...
    def status(self, text: str) -> None: ...
    def close(self) -> None: ...


async def test_a_word_that_comes_too_late_begins_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    seen: list[str] = []
    ended = asyncio.Event()

    def on_note(text: str) -> None:
        seen.append(text)
        if text.startswith("done") and len(seen) == 2:
            chat.take("One more thing")  # the run has its result, and no longer reads its steering
        elif text.startswith("done"):
            ended.set()

    async with ByteServer([says("Done."), says("That too.")]) as server:
        settings = Settings(model=f"{server.url}/v1#m", tools=(), root=str(tmp_path))
        chat = Chat(settings, Notes(on_note), log=None, approvals=Approvals(), system="")
        chat.take("Go")
        await asyncio.wait_for(ended.wait(), PATIENCE)
        await chat.close()
        assert [m["content"] for m in bodies(server)[1]["messages"]] == [
            *("Go", "Done.", "One more thing")
        ]
    assert chat.usage.output_tokens == 40


async def test_a_chat_is_compacted_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    notes: list[str] = []
    async with ByteServer([says("They talked.")]) as server:
        settings = Settings(model=f"{server.url}/v1#m", tools=(), root=str(tmp_path))
        chat = Chat(settings, Notes(notes.append), log=None, approvals=Approvals(), system="")
        await obey(chat, "/compact")
        chat.conversation.context = chat.conversation.context.extend(LONG_TALK)
        await obey(chat, "/compact")
        assert notes[1] == "there is nothing to compact yet"
        assert notes[3].startswith("summarised: 20 turns, ")
        assert chat.usage.output_tokens == 20
        with pytest.raises(ConfigError, match="takes no argument"):
            await obey(chat, "/compact all")
        assert len(bodies(server)) == 1
        await chat.close()
    assert len(chat.conversation.messages) == len(LONG_TALK) + 1
