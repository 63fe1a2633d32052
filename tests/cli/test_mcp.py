"""``mcp``, ``mcp-serve`` and ``--mcp``: the real command, real servers, and a scripted model."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from clark_agent.toolkit.untrusted import without_marks
from tests.cli.command_line import CommandLine, Said, calls, command_line, says
from tests.mcp.conftest import FAULTY
from tests.mcp.own_servers import served
from tests.transports.servers.bytes_server import ByteServer

pytestmark = pytest.mark.slow


def notes_server() -> MCPServer:
    server = MCPServer("notes")

    @server.tool()
    def add(a: int, b: int = 1) -> int:
        """Add two numbers.

        More about it.
        """
        return a + b

    @server.tool()
    def repeat(text: str) -> str:
        """Repeat a text."""
        if text == "fail":
            raise ToolError("no such text")
        return f"{text}\x1b[31m"

    @server.resource("notes://today")
    def today() -> str:
        """Notes of today."""
        return "buy tea"

    @server.resource("notes://{day}")
    def on(day: str) -> str:
        """Notes of a day."""
        return f"nothing on {day}"

    @server.prompt()
    def review(language: str) -> str:
        """Review code."""
        return f"Review this {language} code."

    return server


@pytest.fixture
async def notes() -> AsyncGenerator[str]:
    """The URL of a server in this process."""
    async with served(notes_server().streamable_http_app()) as origin:
        yield f"{origin}/mcp"


@pytest.fixture
def echo(tmp_path: Path) -> tuple[str, ...]:
    """The command of a server with the tool ``echo``, over stdio and without the SDK."""
    return (sys.executable, "-I", "-S", str(FAULTY), "{}", str(tmp_path / "journal.jsonl"))


def write_config(folder: Path, servers: dict[str, Any], name: str = ".mcp.json") -> Path:
    file = folder / name
    file.write_text(json.dumps({"mcpServers": servers}))
    return file


def told(server: ByteServer) -> str:
    """The result of the tool that the model was told last, without the marks of untrusted text."""
    return without_marks(json.loads(server.requests[-1].body)["messages"][-1]["content"])


# --- mcp ----------------------------------------------------------------------------------------


async def test_tools_resources_and_prompts_of_a_server(tmp_path: Path, notes: str) -> None:
    asked = [
        ("tools", notes),
        ("list", notes),
        ("tools", notes, "--json"),
        ("resources", notes),
        ("read", notes, "notes://monday"),
        ("prompts", notes),
        ("prompts", notes, "review", "language=C"),
    ]
    said = await CommandLine(tmp_path).each([("mcp", *words) for words in asked])
    assert [(each.code, each.err) for each in said] == [(0, "")] * len(said)
    tools, servers, as_json, resources, read, prompts, prompt = [each.out for each in said]
    assert tools == "add     Add two numbers.\nrepeat  Repeat a text.\n"
    assert servers == f"server  {notes}  2 tools\n"
    listed = [json.loads(line) for line in as_json.splitlines()]
    assert [tool["name"] for tool in listed] == ["add", "repeat"]
    assert listed[0]["parameters"]["required"] == ["a"]
    assert resources == "notes://today  today · text/plain\nnotes://{day}  on · text/plain\n"
    assert read == "nothing on monday\n"
    assert prompts == "review language=  Review code.\n"
    assert prompt == "user: Review this C code.\n"


async def test_a_command_that_starts_a_server(tmp_path: Path, echo: tuple[str, ...]) -> None:
    run = CommandLine(tmp_path)
    assert await run.anew("mcp", "tools", "--", *echo) == Said(0, "echo  Return a text.\n", "")
    said = await run.each(
        [("mcp", *words, "--", *echo) for words in (("list",), ("call", "echo", "text=12"))]
    )
    assert said == [Said(0, f"server  {sys.executable}  1 tool\n", ""), Said(0, "echo: 12\n", "")]


async def test_a_server_with_tools_alone(tmp_path: Path, echo: tuple[str, ...]) -> None:
    empty = ("resources", "prompts")
    said = await CommandLine(tmp_path).each([("mcp", what, "--", *echo) for what in empty])
    assert said == [Said(0, "", f"There are no {what}.\n") for what in empty]


async def test_calls(tmp_path: Path, notes: str) -> None:
    run = CommandLine(tmp_path)

    async def call(*words: str, given: str | None = None) -> Said:
        return await run("mcp", "call", notes, *words, given=given)

    assert await call("add", "a=2", "b=3") == Said(0, "5\n", "")
    assert await call("add", '{"a": 2}') == Said(0, "3\n", "")
    assert await call("add", "-", given='{"a": 5}') == Said(0, "6\n", "")
    # Text stays text, and control characters of a server do not reach the terminal.
    assert await call("repeat", "text=12") == Said(0, "12\\x1b[31m\n", "")
    assert await call("repeat", "text=fail") == Said(
        1, "", "Error executing tool repeat: no such text\n"
    )
    row = json.loads((await call("add", "a=2", "--json")).out)
    assert row["content"] == [{"type": "text", "text": "3"}]
    assert row["is_error"] is False


async def test_a_file_with_servers(tmp_path: Path, notes: str, echo: tuple[str, ...]) -> None:
    run = CommandLine(tmp_path)
    gone = str(run.root / "no-such-program")
    servers = {
        "notes": {"type": "http", "url": notes},
        "echo": {"command": echo[0], "args": echo[1:]},
        "gone": {"command": gone},
    }
    file = write_config(run.root, servers)
    listed = await run("mcp", "list")
    assert listed.code == 1
    first, second, third = listed.out.splitlines()
    assert first == f"notes  {notes}  2 tools"
    assert second == f"echo   {sys.executable}  1 tool"
    assert third.startswith(f"gone   {gone}  ✗ ")
    assert (await run("mcp", "call", "-S", "notes", "add", "a=1")).out == "2\n"
    file.rename(run.root / "other.json")
    assert (await run("mcp", "tools", "other.json", "--server", "notes")).code == 0


async def test_a_variable_in_the_arguments_is_not_shown(tmp_path: Path) -> None:
    """Also if the program prints it before it ends."""
    run = CommandLine(tmp_path)
    run.env["SERVER_KEY"] = "k3y-of-the-host"
    script = "import sys; sys.exit('wrong key: ' + sys.argv[1])"
    key = {"command": sys.executable, "args": ["-c", script, "${SERVER_KEY}"]}
    write_config(run.root, {"key": key})
    listed = await run("mcp", "list")
    assert listed.code == 1
    assert "wrong key: [hidden]" in listed.out
    assert "k3y" not in listed.out + listed.err


async def test_wrong_usage(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    config = write_config(run.root, {"a": {"command": "x"}, "b": {"command": "y"}}, "servers.json")
    said = await run.each(
        [
            ("mcp", "tools"),
            ("mcp", "tools", "servers.json", "-S", "c"),
            ("mcp", "call", "servers.json", "add"),
            ("mcp", "call", "--", "x"),
            ("mcp", "tools", "--"),
            ("mcp", "tools", "servers.json", "--", "x"),
            ("mcp", "tools", "surplus", "--", "x"),
            ("mcp", "tools", "servers.json", "--oauth"),
            ("mcp", "tools", "https://example.com/mcp", "--header", "A=NOT_SET"),
            ("mcp", "read", "servers.json", "-S", "a"),
            ("mcp", "tools", "missing.json"),
            ("mcp-serve",),
            ("mcp-serve", "--tools", "files", "--agent", "x:y"),
            ("mcp-serve", "--tools", "files", "--token", "X"),
            ("mcp-serve", "--tools", "files", "--http", "127.0.0.1:0", "--token", "NOT_SET"),
            ("mcp-serve", "--tools", "files", "--http", "0.0.0.0:80"),
            ("mcp-serve", "--tools", "files", "--model", "x"),
            ("mcp-serve", "--agent", "x:y", "--root", "."),
            ("mcp-serve", "--tools", "files", "--http", "127.0.0.1:0", "--host", "https://a.b"),
            ("run", "--mcp", "missing.json", "-m", "local:", "Hello"),
        ]
    )
    assert [each.code for each in said] == [2] * len(said)
    texts = [each.err for each in said]
    expected = [
        "there is no .mcp.json here",
        "has no server 'c'",
        "choose with --server: a, b",
        "missing the name of the tool",
        "is missing",
        "a target of its own",
        "unexpected 'surplus'",
        "need a URL",
        "the variable 'NOT_SET' is not set",
        "one URI",
        "missing.json",
        "either --agent MODULE:NAME or --tools",
        "either --agent MODULE:NAME or --tools",
        "need --http",
        "the environment variable is not set, or empty",
        "needs a token",
        "--model needs --agent",
        "--root needs --tools",
        "expected a host",
        "missing.json",
    ]
    for text, part in zip(texts, expected, strict=True):
        assert part in text
        assert "Traceback" not in text
    assert config.exists()


async def test_a_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    said = await CommandLine(tmp_path)("mcp", "tools", "--", "no-such-program-here")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("clark-agent: ")
    assert "no-such-program-here" in said.err


async def test_a_call_of_a_tool_that_is_not_there(tmp_path: Path, notes: str) -> None:
    said = await CommandLine(tmp_path)("mcp", "call", notes, "ad")
    assert said == Said(2, "", "clark-agent: the server has no tool 'ad': did you mean 'add'?\n")


# --- run --mcp ----------------------------------------------------------------------------------


async def test_an_agent_uses_the_tools_and_its_run_can_be_replayed_and_resumed(
    tmp_path: Path, echo: tuple[str, ...]
) -> None:
    answers = [calls("notes_echo", text="tea"), says("It is tea.")]
    async with command_line(tmp_path, answers) as (run, server):
        config = write_config(run.root, {"notes": {"command": echo[0], "args": echo[1:]}})
        said = await run("run", "--mcp", ".mcp.json", "--yes", "Get tea")
        assert (said.code, said.out) == (0, "It is tea.\n")
        assert said.err.splitlines()[:2] == ["● notes_echo(text='tea')", "  echo: tea"]
        assert told(server) == "echo: tea"
        (logged,) = run.store.runs()
        config.unlink()  # a replay needs no server
        replayed, shown, again = await run.each(
            [("replay", "last"), ("show", "last"), ("resume", "last")]
        )
        assert (replayed.code, replayed.out) == (0, "identical\n")
        assert re.search(r"^tools .*, current_time, .*notes_echo", shown.out, re.MULTILINE)
        assert again.code == 2
        assert f"the run {logged.run_id!r} has ended (done)" in again.err


@pytest.mark.parametrize(
    ("option", "result"),
    [
        (
            (),
            "The call was not run: it needs approval, and no user is available to ask. Go on "
            "without it, or say what you need it for.",
        ),
        (("--allow", "notes_add"), "5"),
    ],
)
async def test_tools_of_servers_need_approval(
    tmp_path: Path, notes: str, option: tuple[str, ...], result: str
) -> None:
    answers = [calls("notes_add", a=2, b=3), says("Well.")]
    async with command_line(tmp_path, answers) as (run, server):
        write_config(run.root, {"notes": {"url": notes}})
        said = await run("run", "--mcp", ".mcp.json", *option, "Add 2 and 3")
        assert said.code == 0
        assert told(server) == result


async def test_a_suspended_run_is_resumed_with_its_servers(tmp_path: Path, notes: str) -> None:
    answers = [calls("notes_add", a=2, b=3), says("It is 5.")]
    async with command_line(tmp_path, answers) as (run, server):
        write_config(run.root, {"notes": {"url": notes}})
        said = await run("run", "--mcp", ".mcp.json", "--suspend", "Add 2 and 3")
        assert said.code == 4, said
        decided, refused, resumed = await run.each(
            [
                ("decide", "last", "allow"),
                ("resume", "last"),
                ("resume", "last", "--mcp", ".mcp.json"),
            ]
        )
        assert decided.code == 0, decided
        assert refused.code == 2
        assert f"--mcp {run.root / '.mcp.json'}" in refused.err
        assert (resumed.code, resumed.out) == (0, "It is 5.\n"), resumed
        assert told(server) == "5"


async def test_a_question_of_a_server_suspends_the_run(tmp_path: Path) -> None:
    modern = Path(__file__).parents[1] / "mcp" / "servers" / "modern.py"
    answers = [calls("asks_greet"), says("Greeted.")]
    async with command_line(tmp_path, answers) as (run, server):
        args = [str(modern), str(tmp_path / "journal")]
        write_config(run.root, {"asks": {"command": sys.executable, "args": args}})
        with_tool = ("--mcp", ".mcp.json", "--allow", "asks_greet")
        said = await run("run", *with_tool, "--suspend", "Greet")
        assert said.code == 4, said
        decided = await run("decide", "last", "result", "Ada")
        assert decided.code == 0, decided
        resumed = await run("resume", "last", *with_tool)
        assert (resumed.code, resumed.out) == (0, "Greeted.\n"), resumed
        assert told(server) == "Hello, Ada!"


async def test_a_required_server_that_is_away_ends_the_run_before_it_begins(
    tmp_path: Path,
) -> None:
    async with command_line(tmp_path, [says("never")]) as (run, server):
        write_config(run.root, {"gone": {"command": "no-such-program-here"}})
        said = await run("run", "--mcp", ".mcp.json", "Hello")
        assert (said.code, said.out) == (1, "")
        assert "gone" in said.err
        assert server.requests == []


async def test_a_chat_uses_the_tools_and_keeps_the_servers_when_the_model_changes(
    tmp_path: Path, notes: str
) -> None:
    answers = [calls("notes_add", a=2, b=3), says("It is 5.")]
    async with command_line(tmp_path, answers) as (run, server):
        write_config(run.root, {"notes": {"url": notes}})
        async with run.terminal("chat", "--mcp", ".mcp.json") as terminal:
            await terminal.sees("/help for help")
            terminal.type("/tools\r")
            await terminal.sees("notes_add")
            terminal.type(f"/model {server.url}/v1#other\r")
            await terminal.sees("the model is")
            terminal.type("Add 2 and 3\r")
            await terminal.sees("wants to run")
            terminal.type("y\r")
            await terminal.sees("It is 5.")
            terminal.type("/quit\r")  # it counts whenever it is read, unlike the end of the input
            assert await terminal.ended() == 0


async def test_an_agent_with_its_own_source_of_tools_takes_no_other(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    write_config(run.root, {"notes": {"command": "x"}})
    (run.root / "sourced.py").write_text(
        "from clark_agent import Agent\n"
        "from clark_agent.testing import ScriptedStream\n"
        "class Source:\n"
        "    def tools_for_turn(self, ctx):\n"
        "        return ()\n"
        "agent = Agent(ScriptedStream([]), tool_source=Source())\n"
    )
    said = await run("run", "--agent", "sourced:agent", "--mcp", ".mcp.json", "Hello")
    assert said.code == 2
    assert "has a tool source of its own" in said.err


# --- mcp-serve ----------------------------------------------------------------------------------

AGENT = '''
print("loading")

from clark_agent import Agent
from clark_agent.testing import ScriptedStream, call
from clark_agent.tools import tool


@tool
def sell(item: str) -> str:
    """Sell an item."""
    print("sold")
    return f"sold {item}"


shop = Agent(ScriptedStream([call("sell", item="tea"), "Done."]), tools=[sell])
'''


def serving(run: CommandLine, *words: str) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "clark_agent", "mcp-serve", *words],
        cwd=str(run.root),
        env=run.env,
    )


async def test_serve_tools(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    (run.root / "a.txt").write_text("hello")
    with (tmp_path / "stderr").open("w") as errors:
        server = stdio_client(serving(run, "--tools", "files,calculator"), errors)
        async with Client(server) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            read = await client.call_tool("read_file", {"path": "a.txt"})
            write = await client.call_tool("write_file", {"path": "b.txt", "content": "x"})
    assert names[0] == "read_file"
    assert names[-1] == "calculator"
    assert "hello" in str(read.content)
    assert write.is_error
    assert "does not support elicitation" in str(write.content)
    assert not (run.root / "b.txt").exists()


@pytest.mark.parametrize("option", ["--yes", "--allow=sell"])
async def test_serve_an_agent(tmp_path: Path, option: str) -> None:
    run = CommandLine(tmp_path)
    (run.root / "agents.py").write_text(AGENT)
    words = ("--agent", "agents:shop", option, "--description", "Sells.")
    with (tmp_path / "stderr").open("w") as errors:
        async with Client(stdio_client(serving(run, *words), errors)) as client:
            (listed,) = (await client.list_tools()).tools
            result = await client.call_tool("shop", {"task": "Sell tea"})
    assert (listed.name, listed.description) == ("shop", "Sells.")
    assert "Done." in str(result.content)
    assert (tmp_path / "stderr").read_text() == "loading\nsold\n"


async def test_serve_over_http_until_sigterm(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    run.env["SECRET"] = "open sesame"
    process = await run.start(
        *("mcp-serve", "--tools", "calculator", "--http", "127.0.0.1:0", "--token", "SECRET")
    )
    assert process.stderr is not None
    line = (await process.stderr.readline()).decode()
    found = re.fullmatch(r"serving MCP at (http://127\.0\.0\.1:\d+/mcp); Ctrl-C stops\n", line)
    assert found is not None, line
    run.env["AUTH"] = "Bearer open sesame"
    call = ("mcp", "call", found[1], "calculator", "expression=6*7")
    said, refused = await run.each([(*call, "--header", "Authorization=AUTH"), call])
    assert (said.code, said.out) == (0, "42\n"), said
    assert refused.code == 1
    assert "sesame" not in refused.err
    os.kill(process.pid, signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM
