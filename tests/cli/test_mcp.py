"""``mcp``, ``mcp-serve`` and ``--mcp``: the real command, real servers, and a scripted model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.cli.command_line import CommandLine, Said, calls, command_line, says
from tests.mcp.own_servers import program

pytestmark = pytest.mark.slow

SERVER = '''
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

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
    return f"{text}\\x1b[31m"


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


server.run()
'''


@pytest.fixture
def notes(tmp_path: Path) -> tuple[str, str]:
    """The command of a server."""
    script = tmp_path / "notes.py"
    script.write_text(SERVER)
    return sys.executable, str(script)


def write_config(folder: Path, servers: dict[str, Any], name: str = ".mcp.json") -> Path:
    file = folder / name
    file.write_text(json.dumps({"mcpServers": servers}))
    return file


def both(notes: tuple[str, str], folder: Path) -> None:
    command, script = notes
    servers = {
        "notes": {"command": command, "args": [script]},
        "gone": {"command": str(folder / "no-such-program")},
    }
    write_config(folder, servers)


# --- mcp ----------------------------------------------------------------------------------------


async def test_tools_resources_and_prompts_of_a_command(
    tmp_path: Path, notes: tuple[str, str]
) -> None:
    run = CommandLine(tmp_path)

    async def said(*words: str) -> str:
        result = await run("mcp", *words, "--", *notes)
        assert (result.code, result.err) == (0, "")
        return result.out

    assert await said("tools") == "add     Add two numbers.\nrepeat  Repeat a text.\n"
    assert await said("list") == f"server  {sys.executable}  2 tools\n"
    listed = [json.loads(line) for line in (await said("tools", "--json")).splitlines()]
    assert [tool["name"] for tool in listed] == ["add", "repeat"]
    assert listed[0]["parameters"]["required"] == ["a"]
    assert await said("resources") == (
        "notes://today  today · text/plain\nnotes://{day}  on · text/plain\n"
    )
    assert await said("read", "notes://monday") == "nothing on monday\n"
    assert await said("prompts") == "review language=  Review code.\n"
    assert await said("prompts", "review", "language=C") == "user: Review this C code.\n"


async def test_a_server_with_tools_alone(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    server = program("large")
    for what in ("resources", "prompts"):
        said = await run("mcp", what, "--", server["command"], *server["args"])
        assert said == Said(0, "", f"There are no {what}.\n")


async def test_calls(tmp_path: Path, notes: tuple[str, str]) -> None:
    run = CommandLine(tmp_path)

    async def call(*words: str, given: str | None = None) -> Said:
        return await run("mcp", "call", *words, "--", *notes, given=given)

    assert await call("add", "a=2", "b=3") == Said(0, "5\n", "")
    assert await call("add", '{"a": 2}') == Said(0, "3\n", "")
    assert await call("add", "-", given='{"a": 5}') == Said(0, "6\n", "")
    # Text stays text, and control characters of a server do not reach the terminal.
    assert (await call("repeat", "text=12")).out == "12\\x1b[31m\n"
    failed = await call("repeat", "text=fail")
    assert (failed.code, failed.out) == (1, "")
    assert "no such text" in failed.err
    told = json.loads((await call("add", "a=2", "--json")).out)
    assert told["content"] == [{"type": "text", "text": "3"}]
    assert told["is_error"] is False


async def test_a_file_with_servers(tmp_path: Path, notes: tuple[str, str]) -> None:
    run = CommandLine(tmp_path)
    both(notes, run.root)
    listed = await run("mcp", "list")
    assert listed.code == 1
    first, second = listed.out.splitlines()
    assert first == f"notes  {sys.executable}  2 tools"
    assert second.startswith(f"gone   {run.root / 'no-such-program'}  ✗ ")
    assert (await run("mcp", "call", "-S", "notes", "add", "a=1")).out == "2\n"
    named = run.root / "other.json"
    (run.root / ".mcp.json").rename(named)
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


async def test_wrong_usage(tmp_path: Path, notes: tuple[str, str]) -> None:
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


async def test_a_call_of_a_tool_that_is_not_there(tmp_path: Path, notes: tuple[str, str]) -> None:
    said = await CommandLine(tmp_path)("mcp", "call", "ad", "--", *notes)
    assert said == Said(2, "", "clark-agent: the server has no tool 'ad': did you mean 'add'?\n")


# --- run --mcp ----------------------------------------------------------------------------------


async def test_an_agent_uses_the_tools_and_its_run_can_be_replayed_and_resumed(
    tmp_path: Path, notes: tuple[str, str]
) -> None:
    command, script = notes
    answers = [calls("notes_add", a=2, b=3), says("It is 5.")]
    async with command_line(tmp_path, answers) as (run, _):
        write_config(run.root, {"notes": {"command": command, "args": [script]}})
        said = await run("run", "--mcp", ".mcp.json", "--yes", "Add 2 and 3")
        assert (said.code, said.out) == (0, "It is 5.\n")
        assert "notes_add" in said.err
        (logged,) = run.store.runs()
        os.unlink(script)  # a replay needs no server
        (run.root / ".mcp.json").unlink()
        replayed = await run("replay", "last")
        assert replayed.code == 0, replayed
        shown, again = await run.each([("show", "last"), ("resume", "last")])
        assert re.search(r"^tools .*, current_time, .*notes_add, notes_", shown.out, re.MULTILINE)
        assert again.code == 2
        assert f"the run {logged.run_id!r} has ended (done)" in again.err


@pytest.mark.parametrize(("option", "ran"), [((), False), (("--allow", "notes_add"), True)])
async def test_tools_of_servers_need_approval(
    tmp_path: Path, notes: tuple[str, str], option: tuple[str, ...], ran: bool
) -> None:
    command, script = notes
    answers = [calls("notes_add", a=2, b=3), says("Well.")]
    async with command_line(tmp_path, answers) as (run, server):
        write_config(run.root, {"notes": {"command": command, "args": [script]}})
        said = await run("run", "--mcp", ".mcp.json", *option, "Add 2 and 3")
        assert said.code == 0
        last = json.loads(server.requests[1].body)["messages"][-1]["content"]
    assert ("5" in last) is ran
    assert ("needs approval" in last) is not ran


async def test_a_suspended_run_is_resumed_with_its_servers(
    tmp_path: Path, notes: tuple[str, str]
) -> None:
    command, script = notes
    answers = [calls("notes_add", a=2, b=3), says("It is 5.")]
    async with command_line(tmp_path, answers) as (run, server):
        write_config(run.root, {"notes": {"command": command, "args": [script]}})
        said = await run("run", "--mcp", ".mcp.json", "--suspend", "Add 2 and 3")
        assert said.code == 4, said
        decided = await run("decide", "last", "allow")
        assert decided.code == 0, decided
        refused = await run("resume", "last")
        assert refused.code == 2
        assert f"--mcp {run.root / '.mcp.json'}" in refused.err
        resumed = await run("resume", "last", "--mcp", ".mcp.json")
        assert (resumed.code, resumed.out) == (0, "It is 5.\n"), resumed
        assert "5" in json.loads(server.requests[1].body)["messages"][-1]["content"]


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
        assert "Hello, Ada!" in json.loads(server.requests[1].body)["messages"][-1]["content"]


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
    tmp_path: Path, notes: tuple[str, str]
) -> None:
    command, script = notes
    answers = [calls("notes_add", a=2, b=3), says("It is 5.")]
    async with command_line(tmp_path, answers) as (run, server):
        write_config(run.root, {"notes": {"command": command, "args": [script]}})
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = await run.start(
        "mcp-serve", "--tools", "calculator", "--http", address, "--token", "SECRET"
    )
    assert process.stderr is not None
    told = await process.stderr.readline()
    assert told.decode() == f"serving MCP at http://{address}/mcp; Ctrl-C stops\n"
    called = ("mcp", "call", f"http://{address}/mcp", "calculator", "expression=6*7")
    run.env["AUTH"] = "Bearer open sesame"
    said = await run(*called, "--header", "Authorization=AUTH")
    while said.code != 0:  # it listens soon after that line
        assert process.returncode is None
        said = await run(*called, "--header", "Authorization=AUTH")
    assert said.out == "42\n"
    refused = await run(*called)
    assert refused.code == 1
    assert "sesame" not in refused.err
    os.kill(process.pid, signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM
