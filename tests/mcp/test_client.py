"""The tools of servers in runs: connecting, calling, sharing, closing."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from clark_agent import (
    Agent,
    CancellationToken,
    ConfigError,
    RunIdentity,
    ToolResult,
    ToolResultMessage,
    tool,
)
from clark_agent.errors import McpError
from clark_agent.mcp import McpServer, McpTool, McpTools
from clark_agent.mcp.names import ToolNames
from clark_agent.plugins import LargeResults
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog, resume
from clark_agent.testing import ScriptedStream, call
from clark_agent.tool_source import ToolSourceContext
from clark_agent.toolkit import ApprovalGate, without_marks
from clark_agent.toolkit.approval import Denied
from clark_agent.tools import ToolContext
from tests.mcp.own_servers import changing, plain, program, served

pytestmark = pytest.mark.slow


def stdio(name: str = "own", kind: str = "plain", **settings: Any) -> McpServer:
    return McpServer(name, **program(kind), **settings)


def said(result: ToolResult | ToolResultMessage) -> str:
    texts = [block.text for block in result.content if hasattr(block, "text")]
    return without_marks("\n".join(texts))


def results(messages: Any) -> list[ToolResultMessage]:
    return [message for message in messages if isinstance(message, ToolResultMessage)]


def turn(deps: Any = None, run_id: str = "r") -> ToolSourceContext[Any]:
    return ToolSourceContext(1, (), RunIdentity.root(run_id), CancellationToken(), deps)


@asynccontextmanager
async def nothing_left() -> AsyncGenerator[None]:
    """No task and no child process is left after the block."""
    tasks, children = asyncio.all_tasks(), _children()
    yield
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - tasks == set()
    assert _children() - children == set()


def _children() -> set[str]:
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(found.read_text().split()) if found.exists() else set()


# --- a run ------------------------------------------------------------------------------------


async def test_a_run_with_the_tools_of_a_server() -> None:
    stream = ScriptedStream([call("own_add", a=2, b=3), "five"])
    async with nothing_left(), McpTools(stdio()) as tools:
        result = await Agent(stream, tool_source=tools).run("2 + 3")
    assert result.text == "five"
    [answer] = results(result.messages)
    assert said(answer) == "5"
    assert not answer.is_error
    assert answer.details == {
        "kind": "mcp",
        "server": "own",
        "tool": "add",
        "structured": {"result": 5},
    }
    offered = {tool.name: tool.description for tool in stream.requests[0].tools}
    assert offered["own_add"] == "Add two numbers."


async def test_over_http_and_two_servers_at_a_time() -> None:
    async with (
        nothing_left(),
        served(plain().streamable_http_app()) as origin,
        McpTools(stdio(), McpServer("web", url=f"{origin}/mcp")) as tools,
    ):
        stream = ScriptedStream([[call("own_add", a=1), call("web_add", a=2)], "done"])
        result = await Agent(stream, tool_source=tools).run("go")
        assert [said(answer) for answer in results(result.messages)] == ["1", "2"]


async def test_over_sse() -> None:
    async with (
        served(plain().sse_app()) as origin,
        McpTools(McpServer("web", url=f"{origin}/sse", transport="sse")) as tools,
    ):
        assert said(await tools.call("web", "add", {"a": 4, "b": 5})) == "9"


async def test_the_log_is_replayed_without_the_server() -> None:
    store = MemoryStore()
    async with McpTools(stdio()) as tools:
        stream = ScriptedStream([call("own_add", a=2, b=3), call("own_fail"), "done"])
        agent = Agent(stream, tool_source=tools, run_log=RunLog(store))
        await agent.run("go", identity=RunIdentity.root("r"))
    again = Agent(ScriptedStream([]), plugins=[LargeResults()])  # as agents with tools have it
    report = await replay(store, "r", again.config)
    assert report.is_identical, report


async def test_a_run_is_resumed_with_the_tools_of_a_new_connection() -> None:
    store = MemoryStore()
    async with McpTools(stdio()) as tools:
        stream = ScriptedStream([call("own_add", a=2, b=3), RuntimeError("power cut")])
        agent = Agent(stream, tool_source=tools, run_log=RunLog(store))
        with pytest.raises(Exception, match="power cut"):
            await agent.run("go", identity=RunIdentity.root("r"))
    async with McpTools(stdio()) as tools:
        stream = ScriptedStream([call("own_add", a=3, b=4), "seven"])
        agent = Agent(stream, tool_source=tools, run_log=RunLog(store))
        result = await resume(store, "r", agent.config)
    assert result.text == "seven"
    assert [said(answer) for answer in results(result.messages)][-1] == "7"


def test_without_entering_and_without_an_event_loop() -> None:
    """Each `run_sync` has an event loop of its own, and so a connection of its own."""
    tools = McpTools(stdio())
    pids: list[str] = []
    for _ in range(2):
        stream = ScriptedStream([call("own_process"), "done"])
        result = Agent(stream, tool_source=tools).run_sync("go")
        pids.append(said(results(result.messages)[0]))
    assert pids[0] != pids[1]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_two_event_loops_at_a_time() -> None:
    tools = McpTools(stdio())
    found: list[str] = []

    def work() -> None:
        stream = ScriptedStream([call("own_process"), "done"])
        result = Agent(stream, tool_source=tools).run_sync("go")
        found.append(said(results(result.messages)[0]))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 2


async def test_importing_the_package_does_not_import_the_sdk() -> None:
    code = (
        "import sys, clark_agent.mcp as m; m.McpServer('x', command='y'); m.McpTools; "
        "m.load_servers({'mcpServers': {}}); m.OAuth; "
        "print([n for n in sys.modules if n == 'mcp' or n.startswith(('mcp.', 'mcp_types'))])"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# --- names and schemas ------------------------------------------------------------------------


async def test_names_filters_and_prefixes() -> None:
    server = stdio(prefix="", include=["a*", "erase", "process"], exclude=["proc*"],
                   rename={"erase": "delete"})  # fmt: skip
    async with McpTools(server) as tools:
        found = await tools.tools()
        assert [tool.name for tool in found] == ["add", "delete"]
        by_name = {tool.name: tool for tool in found}
        ctx = ToolContext(tool_call_id="c", tool_name="delete")
        assert said(await by_name["delete"].execute({"what": "all"}, ctx)) == "erased all"


async def test_two_servers_with_the_same_names() -> None:
    one = stdio("one", prefix="", include=["add"])
    two = stdio("two", prefix="", include=["add"])
    async with McpTools(one, two) as tools:
        first: Any = await tools.tools()
        assert [(p.server, p.tool) for p in tools.problems] == [("one", "add"), ("two", "add")]
    async with McpTools(two, one) as tools:
        second: Any = await tools.tools()
    names = {tool.server: tool.name for tool in first}
    assert all(name.startswith("add_") for name in names.values())
    assert len(set(names.values())) == 2
    assert names == {tool.server: tool.name for tool in second}


def names_of(servers: Sequence[McpServer], *listed: tuple[str, str]) -> list[str]:
    """The names of tools, given as server and tool, in this order."""
    by_name = {server.name: server for server in servers}
    names = ToolNames(servers)
    for server, name in listed:
        names.claim(by_name[server], name)
    return [names.name_of(by_name[server], name) for server, name in listed]


def test_a_name_with_the_prefix_of_another_server_is_not_given() -> None:
    """Whatever a server offers, and whichever is there first or alone."""
    short, long = McpServer("s", command="a"), McpServer("s_x", command="b")
    for servers in ([short, long], [long, short]):
        stolen, own = names_of(servers, ("s", "x_t"), ("s_x", "t"))
        assert (stolen[:6], own) == ("s_x_t_", "s_x_t")
        assert [own, stolen] == names_of(servers, ("s_x", "t"), ("s", "x_t"))
        assert [stolen] == names_of(servers, ("s", "x_t"))
        assert [own] == names_of(servers, ("s_x", "t"))
    bare = McpServer("bare", command="c", prefix="")
    (name,) = names_of([bare, short], ("bare", "s_t"))
    assert name != "s_t"


def test_a_server_cannot_take_the_name_with_which_another_one_is_told_apart() -> None:
    one, two = (McpServer(name, command="a", prefix="") for name in ("one", "two"))
    told_apart, _ = names_of([one, two], ("one", "t"), ("two", "t"))
    listed = [("two", told_apart), ("one", "t"), ("two", "t")]
    names = names_of([one, two], *listed)
    assert names[1] == told_apart
    assert len(set(names)) == 3


def test_a_name_stays_with_its_tool() -> None:
    one, two = (McpServer(name, command="a", prefix="") for name in ("one", "two"))
    names = ToolNames([one, two])
    names.claim(one, "t")
    assert names.name_of(one, "t") == "t"
    names.claim(two, "t")
    assert names.name_of(two, "t") != "t"
    assert names.name_of(one, "t") == "t"
    assert "one" in str(names.problem_of(two, "t"))
    assert names.problem_of(one, "t") is None


async def test_a_thousand_tools() -> None:
    async with McpTools(stdio("big", "large", prefix="")) as tools:
        found = await tools.tools()
        assert [tool.name for tool in found] == [f"t{n}" for n in range(1_000)]
        assert said(await tools.call("big", "t999")) == "t999"


async def test_strict_schemas_and_arguments_that_are_left_out() -> None:
    async with McpTools(stdio(strict=True, include=["add"])) as tools:
        stream = ScriptedStream([call("own_add", a=2, b=None), "done"])
        result = await Agent(stream, tool_source=tools).run("go")
    (schema,) = [tool.parameters for tool in stream.requests[0].tools if tool.name == "own_add"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["a", "b"]
    assert said(results(result.messages)[0]) == "2"


async def test_what_a_server_says_about_its_tools() -> None:
    async with McpTools(stdio(include=["add", "erase", "fail"])) as tools:
        add, erase, fail = await tools.tools()
        assert (add.reads_only, add.idempotent) == (False, False)
        assert add.preview({}) == (
            "add (tool 'add' of the MCP server 'own')\n"
            "The server says that it only reads, stays in its own world."
        )
        assert erase.preview({}) == (
            "Erase it (tool 'erase' of the MCP server 'own')\n"
            "The server says that it may destroy something."
        )
        assert "does not say" in str(fail.preview({}))
    async with McpTools(stdio(include=["add", "erase"], trust_annotations=True)) as tools:
        add, erase = await tools.tools()
        assert (add.reads_only, add.idempotent) == (True, True)
        assert (erase.reads_only, erase.idempotent) == (False, False)


async def test_a_person_approves_calls() -> None:
    asked: list[str] = []

    async def ask(request: Any) -> Any:
        asked.append(request.preview)
        return Denied("no")

    async with McpTools(stdio()) as tools:
        stream = ScriptedStream([call("own_erase", what="all"), "done"])
        agent = Agent(stream, tool_source=tools, plugins=[ApprovalGate(ask)])
        result = await agent.run("go")
    assert results(result.messages)[0].is_error
    assert "may destroy something" in asked[0]


# --- calls ------------------------------------------------------------------------------------


async def test_texts_are_marked_unless_the_server_is_trusted() -> None:
    async with McpTools(stdio(), stdio("mine", untrusted=False)) as tools:
        marked = await tools.call("own", "erase", {"what": "x"})
        plainly = await tools.call("mine", "erase", {"what": "x"})
    assert "<untrusted-" in marked.plain_text
    assert plainly.plain_text == "erased x"


async def test_a_tool_that_fails_and_one_that_does_not_exist() -> None:
    async with McpTools(stdio()) as tools:
        failed = await tools.call("own", "fail")
        unknown = await tools.call("own", "nothing")
        with pytest.raises(ConfigError, match="no server 'other'; it has 'own'"):
            await tools.call("other", "nothing")
    assert failed.is_error
    assert failed.details == {"kind": "mcp", "server": "own", "tool": "fail"}
    assert unknown.is_error


async def test_arguments_that_cannot_be_sent() -> None:
    async with McpTools(stdio()) as tools:
        [erase] = [tool for tool in await tools.tools() if tool.name == "own_erase"]
        ctx = ToolContext(tool_call_id="c", tool_name="own_erase")
        for arguments in ({"what": "\ud800"}, {"what": {1, 2}.__iter__}, [1], None):
            result = await erase.execute(arguments, ctx)
            assert result.is_error
        assert said(await erase.execute({"what": "x"}, ctx)) == "erased x"


@pytest.mark.parametrize("how", ["task", "signal"])
async def test_a_cancelled_call_leaves_the_connection_as_it_is(how: str) -> None:
    async with nothing_left(), McpTools(stdio()) as tools:
        [wait] = [tool for tool in await tools.tools() if tool.name == "own_wait"]
        began, signal = asyncio.Event(), CancellationToken()

        async def on_update(_: ToolResult) -> None:
            began.set()

        ctx = ToolContext(tool_call_id="c", tool_name="w", signal=signal, emit=on_update)
        task = asyncio.create_task(wait.execute({}, ctx))
        await began.wait()
        if how == "task":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            signal.cancel("enough")
            assert (await task).details == {"kind": "mcp_cancelled"}
        assert said(await tools.call("own", "add", {"a": 1})) == "1"


async def test_calls_at_the_same_time_on_one_connection() -> None:
    async with McpTools(stdio()) as tools:
        answers = await asyncio.gather(
            *[tools.call("own", "add", {"a": n, "b": 1}) for n in range(50)]
        )
        pids = {said(await tools.call("own", "process")) for _ in range(3)}
    assert [said(answer) for answer in answers] == [str(n + 1) for n in range(50)]
    assert len(pids) == 1


@pytest.mark.parametrize("over", ["stdio", "http"])
async def test_calls_that_are_cancelled_at_any_moment(over: str) -> None:
    async with served(plain().streamable_http_app()) as origin:
        server = stdio() if over == "stdio" else McpServer("own", url=f"{origin}/mcp")
        async with nothing_left(), McpTools(server) as tools:
            first = said(await tools.call("own", "process"))
            for turns in range(40):
                task = asyncio.create_task(tools.call("own", "add", {"a": turns}))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    assert said(task.result()) == str(turns)
            assert said(await tools.call("own", "process")) == first


async def test_a_server_that_dies_is_started_again_for_the_next_call() -> None:
    async with nothing_left(), McpTools(stdio()) as tools:
        first = said(await tools.call("own", "process"))
        before = await tools.tools()
        lost = await tools.call("own", "leave")
        second = said(await tools.call("own", "process"))
        assert await tools.tools() is before  # the same tools, so the same object
    assert lost.is_error
    assert lost.details["kind"] == "mcp_connection_lost"
    assert "may or may not have happened" in lost.plain_text
    assert first != second


# --- closing ----------------------------------------------------------------------------------


async def test_closing_twice_and_using_it_again() -> None:
    tools = McpTools(stdio())
    async with nothing_left():
        async with tools:
            assert await tools.tools()
        await tools.aclose()
        assert said(await tools.call("own", "add", {"a": 1})) == "1"
        await tools.aclose()


async def test_closing_during_a_call() -> None:
    async with nothing_left():
        tools = McpTools(stdio())
        began = asyncio.Event()

        async def on_update(_: ToolResult) -> None:
            began.set()

        [wait] = [tool for tool in await tools.tools() if tool.name == "own_wait"]
        ctx = ToolContext(tool_call_id="c", tool_name="w", emit=on_update)
        task = asyncio.create_task(wait.execute({}, ctx))
        await began.wait()
        await tools.aclose()
        result = await task
    assert result.is_error
    assert result.details["kind"] == "mcp_connection_lost"


async def test_a_server_that_is_not_required() -> None:
    gone = McpServer("gone", command="no-such-program-here", required=False)
    async with nothing_left(), McpTools(gone, stdio()) as tools:
        assert {tool.name.split("_")[0] for tool in await tools.tools()} == {"own"}
        [problem] = tools.problems
        assert (problem.server, problem.tool) == ("gone", None)
        assert "no such program" in problem.text
        answer = await tools.call("gone", "x")
        assert answer.details["kind"] == "mcp_unavailable"


async def test_a_required_server_that_is_away_fails_and_closes_the_others() -> None:
    gone = McpServer("gone", command="no-such-program-here")
    async with nothing_left():
        with pytest.raises(McpError, match="'gone': cannot start 'no-such-program-here'"):
            async with McpTools(gone, stdio()):
                raise AssertionError
        tools = McpTools(gone, stdio())
        with pytest.raises(McpError):
            await tools.tools()
        await tools.aclose()


# --- sharing ----------------------------------------------------------------------------------


async def test_each_user_has_a_connection() -> None:
    server = stdio(share=lambda ctx: ctx.deps)
    async with nothing_left(), McpTools(server) as tools:

        async def pid(user: str) -> str:
            stream = ScriptedStream([call("own_process"), "done"])
            agent: Agent[str, str] = Agent(stream, tool_source=tools, deps_type=str)
            return said(results((await agent.run("go", deps=user)).messages)[0])

        ann, bob, ann_again = await pid("ann"), await pid("bob"), await pid("ann")
        assert ann == ann_again
        assert ann != bob
        with pytest.raises(McpError, match="for each user or run"):
            await tools.call("own", "process")
        assert said(await tools.call("own", "process", ctx=turn("ann"))) == ann
        assert await tools.tools() == ()


async def test_headers_of_each_run() -> None:
    async def headers(ctx: ToolSourceContext[Any]) -> dict[str, str]:
        return {"Authorization": f"Bearer {ctx.deps}"}

    async with served(plain().streamable_http_app()) as origin:
        server = McpServer("web", url=f"{origin}/mcp", headers=headers)
        async with nothing_left(), McpTools(server) as tools:

            async def token(deps: str) -> str:
                arguments = {"name": "authorization"}
                return said(await tools.call("web", "header", arguments, ctx=turn(deps)))

            found = await asyncio.gather(token("ann-123"), token("bob-456"), token("ann-123"))
            assert [*found] == ["Bearer ann-123", "Bearer bob-456", "Bearer ann-123"]


async def test_new_headers_of_a_shared_connection() -> None:
    tokens = iter(["one", "two"])
    async with served(plain().streamable_http_app()) as origin:
        server = McpServer(
            "web",
            url=f"{origin}/mcp",
            headers=lambda _: {"X-Token": next(tokens)},
            share=lambda _: "same",
        )
        async with McpTools(server) as tools:
            for expected in ("one", "two"):
                result = await tools.call("web", "header", {"name": "x-token"}, ctx=turn())
                assert said(result) == expected


async def test_runs_that_share_a_key_do_not_share_a_token() -> None:
    async with served(plain().streamable_http_app()) as origin:
        server = McpServer(
            "web",
            url=f"{origin}/mcp",
            headers=lambda ctx: {"X-Token": ctx.deps},
            share=lambda _: "same",
        )
        async with McpTools(server) as tools:
            reads = (await tools.tools_for_turn(turn("reader")))[0]
            await tools.tools_for_turn(turn("admin"))  # another run, at the same time
            header = {tool.name: tool for tool in await tools.tools_for_turn(turn("reader"))}
            assert reads in header.values()
            ctx = ToolContext(tool_call_id="c", tool_name="web_header")
            result = await header["web_header"].execute({"name": "x-token"}, ctx)
            assert said(result) == "reader"


async def test_a_function_for_headers_that_fails_costs_the_tools_of_one_server() -> None:
    def fails(ctx: object) -> dict[str, str]:
        raise OSError("no token for secret-123")

    broken = McpServer("broken", url="http://127.0.0.1:9/mcp", headers=fails)
    async with nothing_left(), McpTools(broken, stdio()) as tools:
        names = [tool.name for tool in await tools.tools_for_turn(turn())]
        assert names
        assert not [name for name in names if name.startswith("broken_")]
        (problem,) = tools.problems
        assert (problem.server, problem.tool) == ("broken", None)
        assert "secret-123" not in problem.text


@pytest.mark.parametrize("value", ["Bearer secret\n", "Bearer s\x00", "Bearer é"])
async def test_a_header_that_cannot_be_sent_is_refused_without_its_value(value: str) -> None:
    with pytest.raises(ConfigError, match="Authorization") as error:
        McpServer("web", url="http://127.0.0.1:9/mcp", headers={"Authorization": value})
    assert value not in str(error.value)
    server = McpServer("web", url="http://127.0.0.1:9/mcp", headers=lambda _: {"X-Token": value})
    async with McpTools(server) as tools:
        assert await tools.tools_for_turn(turn()) == ()
        (problem,) = tools.problems
        assert "X-Token" in problem.text
        assert value not in problem.text


async def test_a_connection_that_is_not_used_is_closed_and_opened_again() -> None:
    server = stdio(share=lambda ctx: ctx.deps, idle_seconds=0.2)
    async with nothing_left(), McpTools(server) as tools:
        found = await tools.tools_for_turn(turn("ann"))
        first = said(await tools.call("own", "process", ctx=turn("ann")))
        async with asyncio.timeout(30):
            while _runs(int(first)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        [process] = [t for t in found if isinstance(t, McpTool) and t.remote_name == "process"]
        ctx = ToolContext(tool_call_id="c", tool_name="p")
        second = said(await process.execute({}, ctx))  # a run that has kept the tool
        assert second != first
        await process._link.close()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- tools that change ------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["stdio", "http"])
async def test_new_tools_come_last_and_known_ones_stay_the_same(over: str) -> None:
    @asynccontextmanager
    async def server() -> AsyncGenerator[McpServer]:
        if over == "stdio":
            yield stdio(kind="changing")
            return
        async with served(changing().streamable_http_app()) as origin:
            yield McpServer("own", url=f"{origin}/mcp")

    async with server() as described, McpTools(described) as tools:
        before = await tools.tools()
        assert await tools.tools_for_turn(turn()) is before
        await tools.call("own", "grow")
        async with asyncio.timeout(30):
            while (after := await tools.tools()) is before:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        assert after[:-1] == before
        assert after[-1].name == f"own_a{len(before)}"
        assert await tools.tools() is after


# --- resources and prompts --------------------------------------------------------------------


async def test_resources() -> None:
    async with McpTools(stdio()) as tools:
        listed = {resource.uri: resource for resource in await tools.resources()}
        [template] = await tools.resource_templates("own")
        [text] = await tools.read_resource("own", "note://today")
        [note] = await tools.read_resource("own", "note://monday/3")
        [picture] = await tools.read_resource("own", "file://picture")
        with pytest.raises(McpError) as caught:
            await tools.read_resource("own", "note://nowhere")
    assert listed["note://today"].title == "Today"
    assert listed["file://picture"].media_type == "image/png"
    assert template.uri_template == "note://{day}/{number}"
    assert without_marks(text.text) == "note://today:\nwrite tests"  # type: ignore[union-attr]
    assert "note 3 of monday" in note.text  # type: ignore[union-attr]
    assert picture.source == "data:image/png;base64,iVBORw=="  # type: ignore[union-attr]
    assert caught.value.kind == "protocol_error"


async def test_the_model_reads_resources() -> None:
    stream = ScriptedStream(
        [
            call("list_resources"),
            call("read_resource", server="own", uri="note://today"),
            call("read_resource", uri="note://nowhere"),
            call("read_resource", server="other", uri="x"),
            "done",
        ]
    )
    async with McpTools(stdio(include=["add"]), resources=True) as tools:
        assert [t.name for t in await tools.tools()] == [
            "own_add",
            "list_resources",
            "read_resource",
        ]
        result = await Agent(stream, tool_source=tools).run("go")
    listed, read, nowhere, other = results(result.messages)
    assert "own: note://today (Today)" in said(listed)
    assert said(read) == "note://today:\nwrite tests"
    assert nowhere.is_error
    assert "There is no server 'other'" in said(other)


async def test_prompts() -> None:
    async with McpTools(stdio()) as tools:
        [prompt] = await tools.prompts()
        messages = await tools.prompt("own", "review", {"code": "x = 1"})
        with pytest.raises(McpError):
            await tools.prompt("own", "nothing")
    assert (prompt.name, prompt.title) == ("review", "Review")
    assert [argument.name for argument in prompt.arguments] == ["code"]
    assert [message.plain_text for message in messages] == ["Please review: x = 1"]


# --- secrets ----------------------------------------------------------------------------------


async def test_secrets_are_in_no_text(caplog: pytest.LogCaptureFixture) -> None:
    secret = "hunter2-hunter2"
    caplog.set_level(logging.DEBUG, logger="clark_agent")
    code = "import os, sys; sys.exit('my key is ' + os.environ['KEY'])"
    server = McpServer("s", command=sys.executable, args=["-c", code, secret], env={"KEY": secret})
    with pytest.raises(McpError) as caught:
        async with McpTools(server):
            raise AssertionError
    web = McpServer(
        "w", url=f"http://user:{secret}@127.0.0.1:9/mcp?key={secret}", headers={"X": secret}
    )
    with pytest.raises(McpError) as refused:
        async with McpTools(web):
            raise AssertionError
    texts = [str(caught.value), str(refused.value), repr(server), repr(web), caplog.text]
    assert "my key is [hidden]" in texts[0]
    assert [text for text in texts if secret in text] == []


# --- what it costs ----------------------------------------------------------------------------


async def test_a_turn_without_changes_asks_no_server() -> None:
    async with McpTools(stdio()) as tools:
        first = await tools.tools_for_turn(turn())
        assert all([await tools.tools_for_turn(turn()) is first for _ in range(100)])


async def test_a_tool_of_the_config_wins() -> None:
    @tool(name="own_add")
    async def mine(a: int) -> str:
        """Mine."""
        return "mine"

    async with McpTools(stdio()) as tools:
        stream = ScriptedStream([call("own_add", a=1), "done"])
        result = await Agent(stream, tools=[mine], tool_source=tools).run("go")
    assert said(results(result.messages)[0]) == "mine"
