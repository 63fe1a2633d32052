"""The command ``mcp-serve``: an agent, or tools, for MCP clients.

Over stdin and stdout nothing but the protocol is written to stdout. Tools with side effects ask the
user of the client before they run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import redirect_stdout
from typing import Any

import click

from clark_agent._extras import load_extra
from clark_agent.agent import Agent
from clark_agent.cli.app import examples
from clark_agent.cli.options import TOOLS, Approvals, make_tools, open_model, tool_names
from clark_agent.cli.own_agent import load_agent, load_deps
from clark_agent.errors import ConfigError
from clark_agent.mcp.serving import elicited_answer, elicited_approval, serve_mcp
from clark_agent.toolkit.approval import ApprovalGate
from clark_agent.toolkit.workspace import Workspace

__all__ = ["mcp_serve"]


@click.command(
    "mcp-serve",
    epilog=examples(
        "clark-agent mcp-serve --agent shop.agents:support",
        "clark-agent mcp-serve --tools files,calculator --root ~/notes",
        "TOKEN=… clark-agent mcp-serve --agent shop.agents:support --http 127.0.0.1:8000 "
        "--token TOKEN",
    ),
)
@click.option(
    "-a",
    "--agent",
    metavar="MODULE:NAME",
    help="Your own Agent, or a function that returns one. It is one tool, with a task.",
)
@click.option(
    "--deps",
    metavar="MODULE:NAME",
    help="The dependencies for --agent, or a function that returns them.",
)
@click.option("-m", "--model", metavar="MODEL", help="Another model for --agent.")
@click.option(
    "-t",
    "--tools",
    metavar="NAMES",
    multiple=True,
    help=f"Tools to serve instead, separated by commas: {', '.join(TOOLS)}; or files, all, "
    "default.",
)
@click.option(
    "-C",
    "--root",
    metavar="FOLDER",
    type=click.Path(file_okay=False),
    help="The folder that --tools work in and cannot leave. Default: the current one.",
)
@click.option("--name", metavar="NAME", help="The name of the server. Default: the agent's.")
@click.option(
    "--description", metavar="TEXT", help="What the agent can do, for the model that calls it."
)
@click.option(
    "--instructions", metavar="TEXT", help="What clients tell their model about the server."
)
@click.option(
    "--http",
    metavar="HOST:PORT",
    help="Serve streamable HTTP at /mcp. Default: stdin and stdout.",
)
@click.option(
    "--token",
    metavar="VARIABLE",
    help="The environment variable that holds the bearer token for --http. Without a token, only "
    "this machine may call.",
)
@click.option(
    "--host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="A name that clients use for the server, such as agents.example.com. Repeatable. "
    "Default: this machine.",
)
@click.option(
    "-y",
    "--yes",
    is_flag=True,
    help="Run tools without asking, except for secrets and files that other programs run.",
)
@click.option("--allow", metavar="NAMES", multiple=True, help="Run these tools without asking.")
def mcp_serve(
    *,
    agent: str | None,
    deps: str | None,
    model: str | None,
    tools: tuple[str, ...],
    root: str | None,
    name: str | None,
    description: str | None,
    instructions: str | None,
    http: str | None,
    token: str | None,
    hosts: tuple[str, ...],
    yes: bool,
    allow: tuple[str, ...],
) -> int:
    """Serve an agent, or tools, to MCP clients.

    Over stdin and stdout, the server ends when the client closes stdin. Tools with side effects ask
    the user of the client before they run; a client that cannot ask is refused, unless --yes or
    --allow permits them. If a client cancels a call, the run or the tool is cancelled.

    SIGTERM ends the server. Runs of an agent with a run log can be resumed then.
    """
    load_extra("mcp", "mcp", "mcp-serve")
    if (agent is None) == (not tools):
        raise ConfigError("give either --agent MODULE:NAME or --tools NAMES")
    approvals = Approvals(yes=yes, allow=allow)
    options: dict[str, Any] = {"name": name, "instructions": instructions}
    if http is not None:
        options |= {"http": http, "token": _token(token), "hosts": list(hosts) or None}
    elif token is not None or hosts:
        raise ConfigError("--token and --host need --http")
    if agent is not None:
        if root is not None:
            raise ConfigError("--root needs --tools: an agent brings its own")
        what: Any = _agent(agent, model, approvals)
        with redirect_stdout(sys.stderr):
            given_deps = None if deps is None else load_deps(deps)
        options |= {"description": description, "deps": given_deps}
    else:
        for option, given in (("deps", deps), ("model", model), ("description", description)):
            if given is not None:
                raise ConfigError(f"--{option} needs --agent")
        gate = _gate(approvals, ())
        workspace = Workspace(os.path.abspath(os.path.expanduser(root or ".")))
        what = make_tools(tool_names(tools), workspace, gate, elicited_answer())
        options["plugins"] = [gate]
    if http is not None:
        options["on_listening"] = lambda url: click.echo(
            f"serving MCP at {url}; Ctrl-C stops", err=True
        )
    ended_by = asyncio.run(serve_mcp(what, **options))
    return 0 if ended_by is None else 128 + ended_by


def _agent(reference: str, model: str | None, approvals: Approvals) -> Agent[Any, Any]:
    """Load the agent, with a gate that asks the client if it has none of its own."""
    with redirect_stdout(sys.stderr):  # what its module prints is not for the client
        own = load_agent(reference)
    changes: dict[str, Any] = {} if model is None else {"model": open_model(model)}
    plugins = tuple(own.config.plugins)
    if not any(isinstance(plugin, ApprovalGate) for plugin in plugins):
        gate = _gate(approvals, own.config.registry.names)
        changes["plugins"] = [*plugins, gate]
    elif approvals.yes or approvals.allow:
        raise ConfigError(f"--yes and --allow: the agent {reference} has its own ApprovalGate")
    if own.name is None:
        changes["name"] = reference.rpartition(":")[2].replace(".", "_")
    return own.replace(**changes)


def _gate(approvals: Approvals, own: Any) -> ApprovalGate:
    ask = elicited_approval()
    if approvals.yes:
        return ApprovalGate(ask, always=(*TOOLS, *own))
    words = [word.strip() for text in approvals.allow for word in text.split(",")]
    known = [word for word in words if word in own]
    others = tool_names([word for word in words if word not in known])
    return ApprovalGate(ask, always=(*known, *others))


def _token(variable: str | None) -> str | None:
    """Read the secret from the environment: other users can see a command line."""
    if variable is None:
        return None
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise ConfigError(f"--token {variable}: the environment variable is not set, or empty")
    return secret
