"""The commands ``mcp …``: what MCP servers offer, and calls of their tools by hand.

A target is a file with servers (it ends in ``.json``; by default ``.mcp.json``), the URL of one
server, or a command after ``--`` that starts one. Results go to stdout, everything else to stderr.
What a server says is shown without control characters.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, assert_never
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clark_agent.cli.app import examples, is_debugging
from clark_agent.cli.approval_prompt import find_person
from clark_agent.cli.options import mcp_servers
from clark_agent.cli.view import PlainScreen, make_screen, one_line, safe, show_log_messages
from clark_agent.errors import ConfigError
from clark_agent.tools.repair import close_match
from clark_agent.types import AssistantMessage, FileContent, ImageContent, TextContent, UserMessage

if TYPE_CHECKING:
    from clark_agent.mcp.server_config import McpServer
    from clark_agent.mcp.tool import McpTool
    from clark_agent.mcp.tool_set import McpTools

__all__ = ["mcp"]

_FILE = ".mcp.json"


class Target(Struct, frozen=True):
    """Which servers a command is about."""

    servers: tuple[McpServer, ...]
    where: str
    """The file, the URL or the command."""

    @property
    def only(self) -> McpServer:
        """The server, if there is one. Raises `ConfigError`."""
        if len(self.servers) == 1:
            return self.servers[0]
        names = ", ".join([server.name for server in self.servers])
        raise ConfigError(f"{self.where} has several servers; choose with --server: {names}")


# --- targets --------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


class _Targeted(click.Command):
    """A command whose words after ``--`` are a command that starts a server."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


_COMMAND = "clark_agent.mcp.command"


def _targeted(rest: str = "") -> Callable[[F], F]:
    """Add the arguments ``target``, and ``words`` for what follows it: ``rest`` in the usage."""

    def decorate(command: F) -> F:
        @wraps(command)
        def with_target(**options: Any) -> Any:
            words, name = list(options.pop("words")), options.pop("server")
            headers, oauth = options.pop("headers"), options.pop("oauth")
            target = _target(words, name, headers, oauth)
            return command(target=target, words=tuple(words), **options)

        for option in reversed(_TARGET):
            with_target = option(with_target)
        words = click.argument("words", nargs=-1, metavar=f"[FILE|URL] {rest}".strip())
        return words(with_target)  # type: ignore[return-value]

    return decorate


def _target(words: list[str], name: str | None, headers: Sequence[str], oauth: bool) -> Target:
    """Return the target, and remove it from the words."""
    started: list[str] | None = click.get_current_context().meta.get(_COMMAND)
    url = words.pop(0) if words and _is_url(words[0]) else None
    file = words.pop(0) if words and url is None and words[0].endswith(".json") else None
    if started is not None:
        if url is not None or file is not None:
            raise ConfigError(f"{url or file}: a command after -- is a target of its own")
        target = _started(started)
    elif url is not None:
        target = _at(url, headers, oauth)
    else:
        target = _in_file(file, name)
    if url is None and (headers or oauth):
        raise ConfigError("--header and --oauth need a URL; a file has its own headers")
    if file is None and name is not None and (url is not None or started is not None):
        raise ConfigError("--server chooses a server of a file")
    return target


_TARGET = (
    click.option("-S", "--server", metavar="NAME", help="The server, if the file has several."),
    click.option(
        "--header",
        "headers",
        metavar="NAME=VARIABLE",
        multiple=True,
        help="A header for a URL, and the environment variable that holds its value.",
    ),
    click.option("--oauth", is_flag=True, help="Log in at a URL with OAuth, in the browser."),
)


def _is_url(word: str) -> bool:
    return word.lower().startswith(("http://", "https://"))


def _started(words: Sequence[str]) -> Target:
    from clark_agent.mcp.server_config import McpServer

    if not words:
        raise ConfigError("the command after -- is missing: -- uvx mcp-server-time")
    server = McpServer("server", command=words[0], args=words[1:], prefix="", untrusted=False)
    return Target((server,), words[0])


def _at(url: str, headers: Sequence[str], oauth: bool) -> Target:
    from clark_agent.mcp.server_config import McpServer

    auth = None
    if oauth:
        from clark_agent.mcp.auth import OAuth

        auth = OAuth()
    server = McpServer(
        "server", url=url, headers=_headers(headers), auth=auth, prefix="", untrusted=False
    )
    return Target((server,), urlsplit(url).hostname or "the URL")


def _headers(given: Sequence[str]) -> dict[str, str] | None:
    """Read the values from the environment: other users can see a command line."""
    headers: dict[str, str] = {}
    for word in given:
        name, _, variable = word.partition("=")
        value = os.environ.get(variable, "").strip()
        if not name or not value:
            what = f"the variable {variable!r} is not set" if variable else "no variable"
            raise ConfigError(f"--header {name}: {what}; write NAME=VARIABLE")
        headers[name] = value
    return headers or None


def _in_file(file: str | None, name: str | None) -> Target:
    path = file or _FILE
    if file is None and not os.path.exists(path):
        raise ConfigError(
            f"there is no {_FILE} here; name a file with servers, a URL, or -- and a command"
        )
    servers = [replace(server, untrusted=False) for server in mcp_servers([path])]
    if not servers:
        raise ConfigError(f"{path} has no servers")
    if name is None:
        return Target(tuple(servers), path)
    chosen = [server for server in servers if server.name == name]
    if not chosen:
        names = [server.name for server in servers]
        near = close_match(name, names)
        hint = f"did you mean {near!r}?" if near else f"the servers are {', '.join(names)}"
        raise ConfigError(f"{path} has no server {name!r}: {hint}")
    return Target(tuple(chosen), path)


# --- commands -------------------------------------------------------------------------------------


@click.group(
    epilog=examples(
        "clark-agent mcp list                                   # the servers of .mcp.json",
        "clark-agent mcp tools servers.json --server time",
        "clark-agent mcp tools https://docs.example/mcp --header Authorization=DOCS_AUTH",
        "clark-agent mcp call get_current_time timezone=America/Lima -- uvx mcp-server-time",
    )
)
def mcp() -> None:
    """Look at MCP servers: their tools, resources and prompts.

    A target is a FILE with servers that ends in .json (by default .mcp.json), the URL of a server,
    or a command after -- that starts one. 'clark-agent run --mcp FILE' lets an agent use them.
    """


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@mcp.command(
    "list",
    cls=_Targeted,
    epilog=examples("clark-agent mcp list", "clark-agent mcp list servers.json --json"),
)
@_targeted()
@json_option
def list_servers(*, target: Target, words: tuple[str, ...], as_json: bool) -> int:
    """List the servers, and whether they can be reached.

    The exit code is 1 if one of them cannot.
    """
    _no_more(words)

    async def look(server: McpServer) -> dict[str, Any]:
        row: dict[str, Any] = {"server": server.name, "address": server.address}
        from clark_agent.mcp.tool_set import McpTools

        tools = McpTools(server)
        try:
            async with tools:
                row["tools"] = len(await tools.tools())
        except Exception as error:
            row["error"] = str(error)
        else:
            if left_out := [str(problem) for problem in tools.problems]:
                row["problems"] = left_out
        return row

    async def look_at_all() -> list[dict[str, Any]]:
        return await asyncio.gather(*[look(server) for server in target.servers])

    rows = _run(look_at_all)
    width = max([len(row["server"]) for row in rows])
    for row in rows:
        if as_json:
            _print_json(row)
        elif "error" in row:
            click.echo(safe(f"{row['server']:{width}}  {row['address']}  ✗ {row['error']}"))
        else:
            count = f"{row['tools']} tool{'' if row['tools'] == 1 else 's'}"
            click.echo(safe(f"{row['server']:{width}}  {row['address']}  {count}"))
    return 1 if any("error" in row for row in rows) else 0


@mcp.command(
    "tools",
    cls=_Targeted,
    epilog=examples(
        "clark-agent mcp tools",
        "clark-agent mcp tools servers.json --server time --json",
        "clark-agent mcp tools -- uvx mcp-server-time",
    ),
)
@_targeted()
@json_option
def list_tools(*, target: Target, words: tuple[str, ...], as_json: bool) -> None:
    """List the tools of the servers. --json prints their schemas too."""
    _no_more(words)

    async def look(tools: McpTools) -> list[McpTool]:
        found: Any = await tools.tools()
        return list(found)

    found = _with(target, look)
    width = max([len(tool.remote_name) for tool in found], default=0)
    for tool in found:
        if as_json:
            row = {
                "server": tool.server,
                "name": tool.remote_name,
                "description": tool.description,
                "parameters": tool.parameters_schema,
            }
            _print_json(row)
        else:
            what = one_line(tool.description.strip().partition("\n")[0], 100)
            click.echo(f"{_origin(target, tool.server)}{safe(tool.remote_name):{width}}  {what}")


@mcp.command(
    "call",
    cls=_Targeted,
    epilog=examples(
        "clark-agent mcp call get_current_time timezone=America/Lima -- uvx mcp-server-time",
        "clark-agent mcp call servers.json --server time get_current_time timezone=Asia/Tokyo",
        """clark-agent mcp call https://docs.example/mcp search '{"query": "limits"}'""",
        "echo '{…}' | clark-agent mcp call search -",
    ),
)
@_targeted("TOOL [ARG]...")
@json_option
def call(*, target: Target, words: tuple[str, ...], as_json: bool) -> int:
    """Call a tool and print its result.

    After the target come the TOOL and its arguments: NAME=VALUE for each, or one JSON object, or
    "-" to read that from stdin. A VALUE is text if the tool expects text, and else JSON. The exit
    code is 1 if the tool reports an error, which then goes to stderr.
    """
    if not words:
        raise click.UsageError("missing the name of the tool")
    server, name, given = target.only, words[0], words[1:]

    async def work(tools: McpTools) -> Any:
        known: dict[str, Any] = {tool.remote_name: tool for tool in await _mcp_tools(tools)}
        if name not in known:
            near = close_match(name, known)
            hint = f"did you mean {near!r}?" if near else f"the tools are {', '.join(known)}"
            raise ConfigError(f"the server has no tool {name!r}: {hint}")
        arguments = _arguments(given, known[name].parameters_schema)
        return await tools.call(server.name, name, arguments)

    result = _with(target, work)
    if as_json:
        details = result.details if isinstance(result.details, dict) else {}
        row = {"content": result.content, "is_error": result.is_error}
        if "structured" in details:
            row["structured"] = details["structured"]
        _print_json(row)
    else:
        for block in result.content:
            click.echo(_shown(block), err=result.is_error)
    return 1 if result.is_error else 0


@mcp.command(
    "resources",
    cls=_Targeted,
    epilog=examples("clark-agent mcp resources", "clark-agent mcp resources -- ./server.py"),
)
@_targeted()
@json_option
def list_resources(*, target: Target, words: tuple[str, ...], as_json: bool) -> None:
    """List what can be read from the servers, and the patterns of further URIs."""
    _no_more(words)

    async def look(tools: McpTools) -> list[Any]:
        return [*await tools.resources(), *await tools.resource_templates()]

    for found in _with(target, look) or _none("resources"):
        if as_json:
            _print_json(found)
            continue
        uri = getattr(found, "uri", None) or found.uri_template
        about = " · ".join([word for word in (found.name, found.media_type) if word])
        click.echo(f"{_origin(target, found.server)}{safe(uri)}  {one_line(about)}")


@mcp.command(
    "read",
    cls=_Targeted,
    epilog=examples(
        "clark-agent mcp read notes://today",
        "clark-agent mcp read servers.json --server notes notes://today",
    ),
)
@_targeted("URI")
@json_option
def read(*, target: Target, words: tuple[str, ...], as_json: bool) -> None:
    """Print a resource.

    After the target comes its URI. Binary content is only described; --json prints it.
    """
    if len(words) != 1:
        raise click.UsageError("give one URI of a resource: see 'clark-agent mcp resources'")
    server = target.only

    async def work(tools: McpTools) -> Any:
        return await tools.read_resource(server.name, words[0])

    blocks = _with(target, work)
    if as_json:
        _print_json({"content": blocks})
        return
    for block in blocks:
        click.echo(_shown(block).removeprefix(f"{safe(words[0])}:\n"))


@mcp.command(
    "prompts",
    cls=_Targeted,
    epilog=examples(
        "clark-agent mcp prompts",
        "clark-agent mcp prompts servers.json --server review code_review language=python",
    ),
)
@_targeted("[NAME [ARG]...]")
@json_option
def prompts(*, target: Target, words: tuple[str, ...], as_json: bool) -> None:
    """List the prompts of the servers, or print one.

    After the target may come the NAME of a prompt, and its arguments as NAME=VALUE.
    """
    if not words:
        _list_prompts(target, as_json=as_json)
        return
    server = target.only
    arguments = dict([_pair(word) for word in words[1:]])

    async def work(tools: McpTools) -> Any:
        return await tools.prompt(server.name, words[0], arguments)

    for message in _with(target, work):
        if as_json:
            _print_json(message)
            continue
        assert isinstance(message, (UserMessage, AssistantMessage))
        content: Any = message.content
        blocks = (TextContent(content),) if isinstance(content, str) else content
        for block in blocks:
            click.echo(f"{message.role}: {_shown(block)}")


def _none(what: str) -> tuple[()]:
    click.echo(f"There are no {what}.", err=True)
    return ()


def _list_prompts(target: Target, *, as_json: bool) -> None:
    async def look(tools: McpTools) -> Any:
        return await tools.prompts()

    for prompt in _with(target, look) or _none("prompts"):
        if as_json:
            _print_json(prompt)
            continue
        takes = " ".join([f"{a.name}={'' if a.required else '?'}" for a in prompt.arguments])
        about = one_line(prompt.description or prompt.title or "", 100)
        name = f"{safe(prompt.name)} {safe(takes)}".strip()
        click.echo(f"{_origin(target, prompt.server)}{name}  {about}")


# --- shared ---------------------------------------------------------------------------------------

T = TypeVar("T")


def _with(target: Target, work: Callable[[McpTools], Awaitable[T]]) -> T:
    """Connect to the servers and do the work. Questions of a server go to the terminal."""

    async def connected() -> T:
        from clark_agent.mcp.tool_set import McpTools

        person = find_person(make_screen())
        ask = None if person is None else person.answer
        async with McpTools(*target.servers, ask=ask) as tools:
            return await work(tools)

    return _run(connected)


def _run(work: Callable[[], Awaitable[T]]) -> T:
    async def main() -> T:
        return await work()

    with show_log_messages(PlainScreen(), debug=is_debugging()):
        return asyncio.run(main())


async def _mcp_tools(tools: McpTools) -> list[McpTool]:
    found: Any = await tools.tools()
    return list(found)


def _origin(target: Target, server: str) -> str:
    """Return the name of the server before what it offers, if there are several."""
    if len(target.servers) == 1:
        return ""
    width = max([len(known.name) for known in target.servers])
    return f"{server:{width}}  "


def _no_more(words: tuple[str, ...]) -> None:
    if words:
        raise click.UsageError(
            f"unexpected {words[0]!r}: a target is a file that ends in .json, a URL, or -- and a "
            "command"
        )


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not name or not equals:
        raise click.UsageError(f"expected NAME=VALUE, not {word!r}")
    return name, value


def _arguments(given: Sequence[str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Read the arguments of a call."""
    if len(given) == 1 and (given[0] == "-" or given[0].lstrip().startswith("{")):
        text = sys.stdin.read() if given[0] == "-" else given[0]
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"the arguments are not a JSON object: {error}") from None
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return {name: _value(text, known.get(name)) for name, text in [_pair(word) for word in given]}


def _value(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _shown(block: TextContent | ImageContent | FileContent) -> str:
    match block:
        case TextContent(text):
            return safe(text)
        case ImageContent(source, media_type) | FileContent(source, media_type):
            kind = media_type or "data"
            if source[:5].lower() != "data:":
                return safe(f"[{kind}: {source}]")
            return safe(f"[{kind}, {len(source.partition(',')[2]) * 3 // 4:,} bytes]")
        case _:
            assert_never(block)


def _print_json(value: Any) -> None:
    click.echo(msgspec.json.encode(value).decode())
