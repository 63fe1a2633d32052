"""The command ``view``: a page to look at runs."""

from __future__ import annotations

import getpass
import socket
import webbrowser
from contextlib import suppress

import click
from click.core import ParameterSource
from msgspec.structs import replace

from clark_agent._extras import load_extra
from clark_agent.cli.app import examples
from clark_agent.cli.commands.run import check_not_queued
from clark_agent.cli.options import (
    Approvals,
    Given,
    Log,
    Settings,
    agent_options,
    approval_options,
    existing,
    log_options,
    make_agent,
    make_gate,
    open_log,
    open_mcp,
    replay_agent,
    settings_from,
    settings_of,
    without_password,
)
from clark_agent.config import LoopConfig
from clark_agent.errors import ConfigError
from clark_agent.run_log.records import RunBegan
from clark_agent.run_log.store import RunStore
from clark_agent.toolkit.ask import SUSPEND
from clark_agent.view.agents import Setup
from clark_agent.view.app import view_app
from clark_agent.view.serving import is_loopback, listen, new_token, serve_view, shown_url

__all__ = ["view"]


@click.command(
    epilog=examples(
        "clark-agent view                              # your runs, in the browser",
        "clark-agent view runs.db --no-browser",
        "clark-agent view postgresql://host/database",
        "clark-agent view --write                      # steer, cancel and approve",
        "clark-agent view --write --agent shop.agents:support",
    )
)
@click.argument("store", required=False, metavar="[STORE]")
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="The address to listen on. Default: reachable from this machine only.",
)
@click.option(
    "--port",
    metavar="N",
    default=8321,
    type=click.IntRange(0, 65535),
    help="Default: 8321; 0 for any that is free.",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option(
    "--write",
    "can_write",
    is_flag=True,
    help="Allow the page to steer, cancel and decide; and with --agent or --model, to fork, resume "
    "and replay.",
)
@agent_options
@approval_options(can_suspend=False)
@log_options()
def view(
    *,
    store: str | None,
    host: str,
    port: int,
    no_browser: bool,
    can_write: bool,
    given: Given,
    approvals: Approvals,
    log: Log,
) -> None:
    """Show runs on a page in the browser.

    STORE is what --log takes: a folder, a file that ends in .db, or the URL of a database. The page
    lists the runs, and shows what each did, what the model saw, and what goes on now. It only shows
    them, unless --write is given.

    The printed address has a secret; who does not know it sees nothing. Ctrl-C stops the server.
    """
    load_extra("starlette", "view", "clark-agent view")
    load_extra("uvicorn", "view", "clark-agent view")
    is_named = click.get_current_context().get_parameter_source("log")
    if store is not None and is_named is ParameterSource.COMMANDLINE:
        raise click.UsageError("name the log as STORE or with --log, not twice")
    if not can_write and given != Given():
        raise click.UsageError("--agent, --model and the like need --write")
    log = existing(log if store is None else open_log(store))
    if log.path is not None and log.path.is_file():
        log.store.runs(limit=1)  # a file that is no database of runs is an error at once
    agents = CommandLineAgents(given, approvals, log)
    token = new_token()
    listening = listen(host, port)
    url = shown_url(host, listening, token)
    app = view_app(
        log.store,
        token=token,
        hosts=_names(host),
        can_write=can_write,
        agent=agents,
        where=log.where,
        by=_user_name(),
    )
    if not is_loopback(host):
        text = "the page is not encrypted: others in the network may read it, and its secret"
        click.echo(f"warning: {text}", err=True)

    def ready() -> None:
        click.echo(url)
        click.echo(f"runs of {log.where}; Ctrl-C stops", err=True)
        if not no_browser:
            with suppress(webbrowser.Error, OSError):
                # Others on this machine see the arguments of programs, so this address works once.
                webbrowser.open(shown_url(host, listening, app.state.view.once.new()))

    serve_view(app, listening, on_ready=ready)


def _names(host: str) -> tuple[str, ...]:
    """Return the names that the page answers under."""
    if is_loopback(host):
        return ()
    own = socket.gethostname()
    return (host, own, f"{own}.local")


def _user_name() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user without a name
        return None


class CommandLineAgents:
    """The agent that the options describe, for runs that the page starts."""

    def __init__(self, given: Given, approvals: Approvals, log: Log) -> None:
        self._given = given
        self._approvals = approvals
        self._log = log
        self.agent: str | None = None
        self.model: str | None = None
        self._mcp = open_mcp(given.mcp or (), SUSPEND)
        """The MCP servers, which all runs share."""
        if given != Given():
            settings = settings_from(given)
            self.agent = settings.agent or "the agent of the command line"
            self.model = without_password(settings.model) or None
            self._make(settings)  # what is wrong shows at once

    def _make(self, settings: Settings) -> tuple[LoopConfig, object]:
        settings = self._approvals.applied_to(replace(settings, suspend=True), log=self._log)
        gate = make_gate(SUSPEND, self._approvals, settings)
        agent = make_agent(settings, log=self._log, gate=gate, ask=SUSPEND, mcp=self._mcp)
        return agent.config, agent.deps

    def for_run(self, store: RunStore, model: str | None) -> Setup:
        """Return what a run needs. What needs an approval suspends it."""
        given = self._given
        if model is not None:
            given = replace(given, model=model)
        config, deps = self._make(settings_from(given))
        return Setup(config, deps)

    def for_replay(self, began: RunBegan) -> Setup:
        """Return what a replay needs: the settings of the run, unless options change them."""
        settings = settings_from(self._given, settings_of(began))
        if settings.agent is not None and self._given.agent is None:
            raise ConfigError(
                f"the run used --agent {settings.agent}; start the server with it, because its "
                "module is imported"
            )
        agent = replay_agent(settings, began)
        return Setup(agent.config, agent.deps)

    async def aclose(self) -> None:
        """Disconnect from the MCP servers."""
        if self._mcp is not None:
            await self._mcp.aclose()

    def check_resume(self, run_id: str) -> None:
        """Leave runs of a queue to its workers."""
        check_not_queued(self._log, run_id)
