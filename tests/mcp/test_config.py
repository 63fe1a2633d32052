"""Servers as values, their names, and `.mcp.json`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import ConfigError
from clark_agent.mcp import McpServer, McpTools, load_servers
from clark_agent.mcp.names import ToolNames, is_wanted
from clark_agent.mcp.secrets import Redaction
from clark_agent.tools.base import is_tool_name


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "needs either a command (to start it) or a url (to connect to it)"),
        ({"command": "a", "url": "http://b"}, "needs either a command"),
        ({"command": " "}, "command must be the name or path of a program"),
        ({"command": "a", "args": "-x"}, "args must be a list of strings"),
        ({"command": "a", "args": [1]}, "args must be a list of strings"),
        ({"command": "a", "env": {"A": 1}}, "env must be a mapping of names to strings"),
        ({"command": "a", "headers": {"A": "b"}}, "headers is for servers with a url"),
        ({"command": "a", "transport": "sse"}, "transport is for servers with a url"),
        ({"url": "example.org"}, "url must be a complete http:// or https:// address"),
        ({"url": "ftp://example.org"}, "url must be a complete"),
        ({"url": "http://a:port"}, "url must be a complete"),
        ({"url": "http://a", "transport": "carrier pigeon"}, "transport must be 'http' or 'sse'"),
        ({"url": "http://a", "headers": ["a"]}, "headers must be a mapping"),
        ({"url": "http://a", "env": {"A": "b"}}, "env is for servers with a command"),
        ({"command": "a", "timeout": 0}, "timeout must be more than 0 seconds, not 0"),
        ({"command": "a", "timeout": True}, "timeout must be more than 0 seconds"),
        ({"command": "a", "connect_timeout": float("nan")}, "connect_timeout must be"),
        ({"command": "a", "idle_seconds": -1}, "idle_seconds must be"),
        ({"command": "a", "max_result_bytes": 10}, "max_result_bytes must be at least 1000"),
        ({"command": "a", "include": "x*"}, "include must be a list of patterns"),
        ({"command": "a", "rename": {"a": 1}}, "rename must be a mapping"),
        ({"command": "a", "prefix": 1}, "prefix must be a string or None"),
        ({"command": "a", "required": "yes"}, "required must be True or False"),
        ({"command": "a", "log_level": "warn"}, "log_level must be one of debug, info, notice"),
        ({"command": "a", "roots": "/srv"}, "roots must be a list of folders"),
        ({"command": "a", "share": "user"}, "share must be a function"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        McpServer("s", **settings)
    assert str(caught.value).startswith(f"McpServer 's': {error}")


@pytest.mark.parametrize("name", ["", " ", None, 1])
def test_a_name_that_is_wrong(name: Any) -> None:
    with pytest.raises(ConfigError, match="the name must be a text"):
        McpServer(name, command="a")


def test_a_server_is_a_value() -> None:
    server = McpServer("s", command="a", args=["b"], cwd=Path("/tmp"), include=["x"])
    assert server == McpServer("s", command="a", args=("b",), cwd="/tmp", include=("x",))
    assert repr(server) == "McpServer('s', command='a', …)"
    web = McpServer("w", url="https://user:pass@example.org/mcp?key=1#x")
    assert repr(web) == "McpServer('w', url='https://example.org/mcp', …)"
    assert web.__rich_repr__() == [("name", "w"), ("url", "https://example.org/mcp")]


@pytest.mark.parametrize(
    ("servers", "settings", "error"),
    [
        ([], {}, "needs at least one McpServer"),
        (["s"], {}, "'s' is not an McpServer"),
        ([McpServer("s", command="a"), McpServer("s", command="b")], {}, "two servers have"),
        ([McpServer("s", command="a")], {"ask": lambda: "x"}, "ask must accept"),
    ],
)
def test_sets_that_are_wrong(servers: Any, settings: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        McpTools(*servers, **settings)


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"needs the package mcp: pip install '\.\[mcp\]'"):
        McpTools(McpServer("s", command="a"))


# --- names ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("ab"), st.text(max_size=80)), max_size=30), st.booleans())
def test_names_are_unique_and_accepted_by_every_provider(
    tools: list[tuple[str, str]], has_prefix: bool
) -> None:
    servers = {
        name: McpServer(name, command="x", prefix=None if has_prefix else "") for name in "ab"
    }
    names = ToolNames(servers.values(), reserved=["read_resource"])
    for name, tool in tools:
        names.claim(servers[name], tool)
    found = {pair: names.name_of(servers[pair[0]], pair[1]) for pair in tools}
    assert all(is_tool_name(name) for name in found.values())
    assert len(set(found.values())) == len(found)
    assert "read_resource" not in found.values()
    assert found == {pair: names.name_of(servers[pair[0]], pair[1]) for pair in tools}
    others = ToolNames([*servers.values()][::-1], reserved=["read_resource"])
    for name, tool in tools[::-1]:
        others.claim(servers[name], tool)
    assert found == {pair: others.name_of(servers[pair[0]], pair[1]) for pair in tools[::-1]}


def test_names_are_the_same_in_every_process() -> None:
    server = McpServer("my server", command="x")
    other = McpServer("s", command="x")
    names = ToolNames([server, other])
    assert names.name_of(server, "a/b") == ToolNames([server]).name_of(server, "a/b")
    assert names.name_of(other, "add") == "s_add"


@pytest.mark.parametrize("tool", ["x\u0112my\u2dcctool", "x\u01afget\u0de6report"])
@pytest.mark.parametrize("wanted", ["my.tool", "get_report_202601"])
def test_no_server_finds_a_name_that_becomes_another_one(tool: str, wanted: str) -> None:
    """These were found for additions of six digits, in a second."""
    hostile, victim = McpServer("s", command="x"), McpServer("s_x", command="y")
    alone = ToolNames([victim]).name_of(victim, wanted)
    for servers in ([hostile, victim], [victim, hostile]):
        names = ToolNames(servers)
        tools = {"s": tool, "s_x": wanted}
        for server in servers:
            names.claim(server, tools[server.name])
        found = {server.name: names.name_of(server, tools[server.name]) for server in servers}
        assert found["s_x"] == alone
        assert len(found["s"].rpartition("_")[2]) >= 16


def test_include_and_exclude() -> None:
    server = McpServer("s", command="x", include=["read_*", "list"], exclude=["*_secret"])
    wanted = ["read_file", "list", "read_secret", "write", "List"]
    assert [name for name in wanted if is_wanted(server, name)] == ["read_file", "list"]


def test_secrets() -> None:
    server = McpServer(
        "s",
        url="https://u:p%40ss@example.org/?token=abcdef&x=1",
        headers={"Authorization": "Bearer topsecret"},
    )
    redact = Redaction(server)
    redact.add_headers({"X": "another"})
    text = "p%40ss p@ss abcdef topsecret another example.org u 1 \ud800"
    assert redact(text) == "[hidden] [hidden] [hidden] [hidden] [hidden] example.org u 1 \ufffd"


def test_values_of_variables_are_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "k3y-of-the-host")
    monkeypatch.setenv("HOME", "/home/somebody")
    content: dict[str, Any] = {
        "a": {"command": "${HOME}/x", "args": ["--key=${KEY}", "${LEVEL:-a default value}"]},
        "b": {"url": "https://example.org/${KEY}/mcp"},
    }
    program, web = load_servers({"mcpServers": content})
    text = "--key=k3y-of-the-host /home/somebody/x a default value"
    assert Redaction(program)(text) == "--key=[hidden] /home/somebody/x a default value"
    assert program.address == "/home/somebody/x"
    assert web.address == "https://example.org/[hidden]/mcp"
    assert "k3y" not in repr(web)


# --- .mcp.json --------------------------------------------------------------------------------


def test_a_file_of_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOKEN", "t0ken")
    monkeypatch.delenv("PLACE", raising=False)
    file = tmp_path / ".mcp.json"
    content = {
        "mcpServers": {
            "time": {"command": "uvx", "args": ["mcp-server-time", "${PLACE:-Lima}"]},
            "env": {"command": "x", "env": {"A": "${TOKEN}", "N": 1, "B": True}, "cwd": "/tmp"},
            "web": {
                "type": "streamable-http",
                "url": "https://example.org/${TOKEN}",
                "headers": {"Authorization": "Bearer ${TOKEN}"},
                "timeout": 5,
            },
            "old": {"transport": "sse", "url": "http://example.org/sse", "commend": "x"},
            "off": {"command": "x", "disabled": True},
            "off2": {"disabled": True, "what": "ever"},
        }
    }
    file.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        servers = load_servers(file)
    assert servers == load_servers(str(file)) == load_servers(content)
    assert servers == load_servers({"servers": content["mcpServers"]})
    assert servers == (
        McpServer("time", command="uvx", args=["mcp-server-time", "Lima"]),
        McpServer(
            "env",
            command="x",
            env={"A": "t0ken", "N": "1", "B": "true"},
            cwd="/tmp",
            secrets=["t0ken"],
        ),
        McpServer(
            "web",
            url="https://example.org/t0ken",
            headers={"Authorization": "Bearer t0ken"},
            timeout=5,
            secrets=["t0ken", "t0ken"],
        ),
        McpServer("old", url="http://example.org/sse", transport="sse"),
    )
    assert f"{file}: mcpServers.old: unknown key 'commend' is ignored; did you mean 'command'?" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("nonsense", "is not valid JSON"),
        ("[]", "expected an object with the key mcpServers"),
        ("{}", "the key mcpServers (or servers) is missing"),
        ('{"mcpServers": []}', "mcpServers must be an object"),
        ('{"mcpServers": {"a": 1}}', "mcpServers.a must be an object"),
        ('{"mcpServers": {"a": {}}}', "mcpServers.a: McpServer 'a': needs either"),
        ('{"servers": {"a": {"type": "ws", "url": "x"}}}', "servers.a.type must be one of"),
        ('{"servers": {"a": {"type": "http"}}}', "servers.a: the type 'http' needs url"),
        ('{"servers": {"a": {"type": "stdio"}}}', "servers.a: the type 'stdio' needs command"),
        (
            '{"servers": {"a": {"command": "x", "args": ["${NO_SUCH_VARIABLE}"]}}}',
            "servers.a.args[0] needs the environment variable NO_SUCH_VARIABLE; set it, or write "
            "${NO_SUCH_VARIABLE:-default}",
        ),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, content: str, error: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_servers(file)
    assert str(file) in str(caught.value)
    assert error in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_servers(tmp_path / "x.json")


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe{}", b'{"mcpServers": {"a": {"command": "\xe9"}}}', b"[" * 20_000],
    ids=["another encoding", "a byte of Latin-1", "nested too deeply"],
)
def test_a_file_that_cannot_be_decoded_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "servers.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"servers\.json is not valid JSON"):
        load_servers(path)


def test_a_file_of_an_editor_that_writes_a_mark_first(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_bytes(b'\xef\xbb\xbf{"mcpServers": {"a": {"command": "a"}}}')
    assert [server.name for server in load_servers(path)] == ["a"]


def test_a_switch_that_is_neither_true_nor_false() -> None:
    servers = {"mcpServers": {"a": {"command": "a", "disabled": "yes"}}}
    with pytest.raises(ConfigError, match=r"mcpServers\.a\.disabled must be true or false"):
        load_servers(servers)
