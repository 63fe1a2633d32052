"""From options to an agent: the settings of a run on the command line, and its config.

`Settings` are what the person chose: a model, tools, a folder, a limit. They are recorded in the
log of every run (`RunLog.notes`), so that `settings_of` can restore them and the run can be
resumed, replayed and forked by its id alone. `make_agent` builds the agent from them.

Decorators add options to commands: `agent_options` (the argument ``given``, with the options that
were set), `approval_options` (``approvals``) and `log_options` (``log``). Invalid values raise
`ConfigError`, which ends the command with exit code 2.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click
import msgspec
from click.shell_completion import CompletionItem
from msgspec import Struct
from msgspec.structs import asdict, replace

from clark_agent._extras import load_extra
from clark_agent.cli.app import PROGRAM
from clark_agent.cli.own_agent import load_agent, load_deps
from clark_agent.config import LoopConfig
from clark_agent.durable._dbos_tables import DBOS_SCHEMA, Tables
from clark_agent.durable.dbos import attach
from clark_agent.errors import ClarkAgentError, ConfigError, RunNotFound, RunStoreError
from clark_agent.plugins import ChannelSteering, Compaction, LoopDetector
from clark_agent.plugins.base import plugin_name
from clark_agent.run_context import SystemPrompt
from clark_agent.run_log.families import outermost
from clark_agent.run_log.jsonl import JsonlStore
from clark_agent.run_log.records import RunBegan
from clark_agent.run_log.sqlite import SqliteStore
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog
from clark_agent.steering import SteeringHandle
from clark_agent.stream import StreamFn
from clark_agent.testing import ScriptedStream
from clark_agent.toolkit._visible import visible
from clark_agent.toolkit.approval import ApprovalGate, AskApproval
from clark_agent.toolkit.ask import AskUser, Suspended, ask_user_tool
from clark_agent.toolkit.untrusted import UNTRUSTED_TEXT
from clark_agent.toolkit.workspace import Workspace
from clark_agent.tools.base import AgentTool, is_tool_name
from clark_agent.tools.repair import close_match

if TYPE_CHECKING:
    from clark_agent.mcp.server_config import McpServer
    from clark_agent.mcp.tool_set import McpTools
    from clark_agent.run_log.postgres import PostgresStore

__all__ = [
    "DEFAULT_MODEL",
    "DEFAULT_SYSTEM",
    "DEFAULT_TOOLS",
    "LOG_INSIDE",
    "STORE_VARIABLE",
    "TOOLS",
    "TOO_SMALL",
    "Approvals",
    "CliAgent",
    "Given",
    "Log",
    "RunNames",
    "Settings",
    "agent_options",
    "approval_options",
    "find_run",
    "find_submitted",
    "is_postgres",
    "log_options",
    "make_agent",
    "make_gate",
    "make_tools",
    "mcp_servers",
    "open_log",
    "open_mcp",
    "open_model",
    "open_postgres",
    "read_system",
    "replay_agent",
    "resume_command",
    "run_argument",
    "settings_again",
    "settings_from",
    "settings_of",
    "settings_of_run",
    "state_folder",
    "system_option",
    "tool_names",
    "without_password",
    "without_secrets",
]

FILE_TOOLS = ("read_file", "write_file", "edit_file", "list_files", "search_files")
DEFAULT_TOOLS = (*FILE_TOOLS, "calculator", "current_time")
TOOLS = (*DEFAULT_TOOLS, "shell", "fetch_url", "ask_user", "finish")
DEFAULT_MODEL = "local:"
TOO_SMALL = "using a very small model, for a first try; choose a capable one with --model"
DEFAULT_TURNS = 50
DEFAULT_SYSTEM = (
    "You are an assistant on a command line. Be brief and exact. Use the tools where they help; "
    "the files are those of the folder that the user works in. Say what you have done, and do not "
    f"claim what you have not. {UNTRUSTED_TEXT}"
)
_NOTE = "clark-agent"  # the key in the notes of a log


# --- settings -------------------------------------------------------------------------------------


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of an agent on the command line."""

    model: str = DEFAULT_MODEL
    """In the format of `clark_agent.transports.connect`."""
    tools: tuple[str, ...] = DEFAULT_TOOLS
    root: str = "."
    """The folder of the tools; absolute if it comes from `settings_from`."""
    max_iterations: int = DEFAULT_TURNS
    agent: str | None = None
    """An agent of the user's own, as ``module:name``. Then an empty ``model`` is the agent's."""
    deps: str | None = None
    """Its dependencies, as ``module:name``."""
    suspend: bool = False
    """Whether approvals and questions suspend the run instead of asking at the terminal."""
    mcp: tuple[str, ...] = ()
    """Files with MCP servers, whose tools are added; absolute if from `settings_from`."""


class Given(Struct, frozen=True, kw_only=True):
    """The options of the command line; None if not given."""

    model: str | None = None
    tools: tuple[str, ...] | None = None
    root: str | None = None
    max_iterations: int | None = None
    agent: str | None = None
    deps: str | None = None
    mcp: tuple[str, ...] | None = None


class Approvals(Struct, frozen=True, kw_only=True):
    """Which tools may run without a question, and whether the others suspend the run."""

    yes: bool = False
    allow: tuple[str, ...] = ()
    suspend: bool | None = None
    """None if neither ``--suspend`` nor ``--no-suspend`` was given."""

    def applied_to(self, settings: Settings, *, log: Log | None) -> Settings:
        """Return the settings with ``--suspend`` or ``--no-suspend``. Raises `ConfigError`."""
        if self.suspend is not None:
            settings = replace(settings, suspend=self.suspend)
        if settings.suspend and log is None:
            raise ConfigError("--suspend needs a log, and --no-log turns it off")
        return settings


def settings_from(given: Given, base: Settings | None = None) -> Settings:
    """Return the base settings (or the defaults), overridden by the given options.

    ``CLARK_AGENT_MODEL`` is only a default: a run that is continued keeps its model.
    """
    options = {name: value for name, value in asdict(given).items() if value is not None}
    if base is None:
        base = Settings(model=os.environ.get("CLARK_AGENT_MODEL", "").strip() or DEFAULT_MODEL)
    settings = replace(base, **options)
    if settings.agent is None and given.deps is not None:
        raise ConfigError("--deps needs --agent")
    if given.agent is not None and given.tools is not None:
        raise ConfigError("--tools has no effect with --agent, which has its own tools")
    if given.agent is not None and given.model is None:
        settings = replace(settings, model="")
    return replace(
        settings,
        root=_absolute(settings.root),
        mcp=tuple([_absolute(file) for file in settings.mcp]),
    )


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def settings_of(began: RunBegan) -> Settings:
    """Return the settings of a logged run. For a run of another host, derive what its log shows."""
    try:
        return msgspec.convert(began.host_notes[_NOTE], Settings)
    except (KeyError, msgspec.ValidationError):
        known = tuple([name for name in TOOLS if name in began.tools])
        return Settings(model=began.model_id or DEFAULT_MODEL, tools=known, root=os.getcwd())


def settings_of_run(log: Log, run_id: str) -> Settings:
    """Return the settings of a run by its id."""
    records = log.store.load(run_id).records
    began = records[0].entry if records else None
    return settings_of(began) if isinstance(began, RunBegan) else Settings()


def settings_again(given: Given, log: Log, run_id: str, *, command: str, can_ask: bool) -> Settings:
    """Return the settings to continue a run with: the options, and otherwise those of its log.

    The run itself may have changed its log. So settings that only the log has are shown to the
    person, who must agree; if the person cannot be asked, they are refused. Settings that would be
    the same without the log need no question. Raises `ConfigError`.
    """
    settings, here = settings_from(given, settings_of_run(log, run_id)), settings_from(given)
    differs = {
        name: value
        for name, value in asdict(settings).items()
        if value != getattr(here, name) and value != "" and name in _OPTIONS
    }
    if settings.agent is not None:  # it has its own
        differs.pop("tools", None)
        differs.pop("model", None)
    is_inside = log.is_inside(settings.root)
    if not differs and not (is_inside and can_ask):
        return settings
    lines = [f"  {name:<16}{_shown(value)}" for name, value in differs.items()]
    if is_inside:
        lines.append(f"  {LOG_INSIDE}")
    if given.agent is not None:
        differs.setdefault("agent", given.agent)
    options = " ".join([_as_option(name, value) for name, value in differs.items()])
    name = shlex.quote(RunNames(log)(run_id))
    explicit = f"{PROGRAM} {command}{log.option} {name} {options}"
    if not can_ask:
        raise ConfigError(
            "the log has other settings than the command line:\n"
            + "\n".join(lines)
            + f"\nto use them, pass them as options: {explicit}"
        )
    click.echo("\n".join([f"settings from the log of run {name}:", *lines]), err=True)
    if not click.confirm("Continue with these?", err=True):
        raise ConfigError(f"not continued; to choose the settings: {explicit}".rstrip())
    return settings


LOG_INSIDE = "the log is inside the root, where commands of the agent can change it"
_OPTIONS = {
    "model": "--model",
    "tools": "--tools",
    "root": "--root",
    "max_iterations": "--max-iterations",
    "agent": "--agent",
    "deps": "--deps",
    "mcp": "--mcp",
}
"""The settings that need consent. To suspend is none of them: nothing runs without a decision."""


def _shown(value: object) -> str:
    text = ",".join(value) or "none" if isinstance(value, tuple) else str(value)
    return visible(text).replace("\n", "\\n")


def _as_option(name: str, value: object) -> str:
    each = value if name == "mcp" and isinstance(value, tuple) else (value,)
    return " ".join([f"{_OPTIONS[name]} {shlex.quote(_shown(one))}" for one in each])


def tool_names(given: Iterable[str]) -> tuple[str, ...]:
    """Resolve tool names and the groups ``all``, ``none``, ``default`` and ``files``."""
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    groups = {"all": TOOLS, "none": (), "default": DEFAULT_TOOLS, "files": FILE_TOOLS}
    chosen: set[str] = set()
    for word in words:
        if word not in groups and word not in TOOLS:
            near = close_match(word, [*TOOLS, *groups])
            hint = f" Did you mean {near}?" if near else ""
            raise ConfigError(
                f"unknown tool {word!r}.{hint} The tools are {', '.join(TOOLS)}; "
                "the groups are all, none, default, files"
            )
        chosen.update(groups.get(word, (word,)))
    return tuple([name for name in TOOLS if name in chosen])


def read_system(text: str | None) -> str | None:
    """Return the system prompt for ``--system``: the text, or after an ``@`` the content of the
    file. None if it was not given.
    """
    if text is None:
        return None
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the system prompt from {text[1:]}: {error}") from error


# --- the agent ------------------------------------------------------------------------------------


class CliAgent(Struct, frozen=True):
    """Everything for a run: the ``config``, and ``steering`` to send messages to it."""

    settings: Settings
    config: LoopConfig
    steering: SteeringHandle
    gate: ApprovalGate
    system_prompt: SystemPrompt[Any]
    deps: Any = None
    mcp: McpTools | None = None
    """The MCP servers. Connected in the first turn, unless it is entered before."""
    name: str | None = None
    """The name of the agent, if it is one of the user's own."""

    @property
    def title(self) -> str:
        """The agent and its model, to be shown."""
        return " · ".join([part for part in (self.name, self.config.model_id) if part])


def make_agent(
    settings: Settings,
    *,
    log: Log | None,
    gate: ApprovalGate | None = None,
    ask: AskUser | Suspended | None = None,
    stream: StreamFn | None = None,
    mcp: McpTools | None = None,
) -> CliAgent:
    """Make the agent that the settings describe. Raises `ConfigError`.

    ``gate`` approves tools with side effects and the reading of secrets (None refuses them all).
    Keep the gate when the settings change, because it remembers its answers. ``ask`` answers the
    tool ``ask_user`` and the questions of MCP servers. ``stream`` replaces the model. ``mcp`` are
    the servers of the settings, if they are open already.
    """
    gate = gate or ApprovalGate(None)
    steering = ChannelSteering()
    workspace = Workspace(settings.root, protected=log.files if log else ())
    run_log = None
    if log is not None:
        public = replace(settings, model=without_password(settings.model))
        notes = {_NOTE: msgspec.to_builtins(public)}
        run_log = RunLog(log.store, notes=notes, live=True)  # for clark-agent follow
    if stream is None and settings.model:
        stream = open_model(settings.model)
    mcp = mcp or open_mcp(settings.mcp, ask)
    if settings.agent is not None:
        return _own_agent(settings, gate, steering, run_log, stream, mcp)
    assert stream is not None
    config = LoopConfig(
        stream=stream,
        tools=make_tools(settings.tools, workspace, gate, ask),
        tool_source=mcp,
        plugins=[_compaction(settings), LoopDetector(), gate, steering],
        model_id=without_password(settings.model),
        max_iterations=settings.max_iterations,
        run_log=run_log,
    )
    return CliAgent(settings, config, steering.handle, gate, DEFAULT_SYSTEM, mcp=mcp)


def _compaction(settings: Settings) -> Compaction:
    """Without a tool that the packaged model would call when it means another one."""
    return Compaction(read_back=bool(settings.tools) and settings.model != DEFAULT_MODEL)


def open_mcp(files: Iterable[str], ask: AskUser | Suspended | None = None) -> McpTools | None:
    """Open the MCP servers of these files; None if there are no files. Raises `ConfigError`."""
    files = tuple(files)
    if not files:
        return None
    from clark_agent.mcp.tool_set import McpTools

    return McpTools(*mcp_servers(files), ask=ask)


def mcp_servers(files: Iterable[str]) -> list[McpServer]:
    """Return the MCP servers of these files. Raises `ConfigError`."""
    from clark_agent.mcp.config_file import load_servers

    return [server for file in files for server in load_servers(file)]


def _own_agent(
    settings: Settings,
    gate: ApprovalGate,
    steering: ChannelSteering,
    run_log: RunLog | None,
    stream: StreamFn | None,
    mcp: McpTools | None,
) -> CliAgent:
    """Make the agent of ``--agent``: its own settings, with approvals, steering and the log."""
    assert settings.agent is not None
    own = load_agent(settings.agent)
    deps = None if settings.deps is None else load_deps(settings.deps)
    try:
        own.check_deps(deps)
    except ConfigError as error:
        raise ConfigError(f"{error}; pass them with --deps module:name") from None
    changes: dict[str, Any] = {} if stream is None else {"stream": stream}
    if settings.model:
        changes["model_id"] = without_password(settings.model)
    if settings.max_iterations != DEFAULT_TURNS:
        changes["max_iterations"] = settings.max_iterations
    if mcp is not None:
        if own.config.tool_source is not None:
            raise ConfigError(f"--mcp: the agent {settings.agent} has a tool source of its own")
        changes["tool_source"] = mcp
    config = own.config.replace(
        plugins=[*own.config.plugins, gate, steering], run_log=run_log, **changes
    )
    name = own.name or settings.agent
    return CliAgent(settings, config, steering.handle, gate, own.system_prompt, deps, mcp, name)


def open_model(model: str) -> StreamFn:
    """Open the transport to a model. Raises `ConfigError` with a message for the command line."""
    from clark_agent.transports.connect import connect  # slow to import
    from clark_agent.transports.http.sdk import MissingKeyError

    try:
        return connect(model)
    except MissingKeyError as error:
        names = " or ".join(error.variables)
        raise ConfigError(
            f"{error.needed_by} needs a key: set {names} in the environment, or "
            f"choose another model with --model ('{PROGRAM} models' lists them)"
        ) from None


def replay_agent(settings: Settings, began: RunBegan) -> CliAgent:
    """Make the agent to replay a run: it asks no person, and the folder need not exist any more.
    The tools of MCP servers come from the log.
    """
    settings = replace(settings, mcp=())
    if not os.path.isdir(settings.root):
        settings = replace(settings, root=gettempdir())  # no tool runs
    agent = make_agent(settings, log=None, stream=ScriptedStream([]))
    if settings.agent is None:
        return agent
    return replace(agent, config=agent.config.replace(plugins=_as_logged(agent.config, began)))


def _as_logged(config: LoopConfig, began: RunBegan) -> list[Any]:
    """Return the plugins without those that `_own_agent` adds, if the run had none of these: it
    may come from a program of the user, which adds nothing.
    """
    *own, gate, steering = config.plugins
    logged = Counter(began.plugins)
    logged.subtract(map(plugin_name, own))
    return [*own, *[added for added in (gate, steering) if logged[plugin_name(added)] > 0]]


def make_gate(
    ask: AskApproval | Suspended | None,
    approvals: Approvals,
    settings: Settings,
) -> ApprovalGate:
    """Make the gate. ``ask`` asks the person; with None, calls that need approval are refused."""
    own = () if settings.agent is None else load_agent(settings.agent).config.registry.names
    if approvals.yes:
        named = (*TOOLS, *own)
        if not settings.mcp:
            return ApprovalGate(ask, always=named)
        # The names of the tools of MCP servers are not known yet.
        return ApprovalGate(
            ask, always=named, needs_approval=lambda ctx: ctx.tool_call.name in named
        )
    words = [word.strip() for text in approvals.allow for word in text.split(",")]
    prefixes = tuple([server.name_prefix for server in mcp_servers(settings.mcp)])
    known = [word for word in words if word in own or _is_of_server(word, prefixes)]
    others = tool_names([word for word in words if word not in known])
    return ApprovalGate(ask, always=(*known, *others))


def _is_of_server(word: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether it may be a tool of an MCP server. Which tools it has is not known yet."""
    return word not in TOOLS and is_tool_name(word) and word.startswith(prefixes)


def make_tools(
    names: Sequence[str],
    workspace: Workspace,
    gate: ApprovalGate,
    ask: AskUser | Suspended | None,
) -> list[AgentTool]:
    """Make the tools. Imports only what they need."""
    made: dict[str, AgentTool] = {}
    if not set(FILE_TOOLS).isdisjoint(names):
        from clark_agent.toolkit.files import file_tools

        made.update({tool.name: tool for tool in file_tools(workspace, ask=gate.ask)})
    if "calculator" in names:
        from clark_agent.toolkit.calculator import calculator

        made["calculator"] = calculator
    if "current_time" in names:
        from clark_agent.toolkit.clock_tool import current_time_tool

        made["current_time"] = current_time_tool()
    if "shell" in names:
        from clark_agent.toolkit.shell import shell_tool

        made["shell"] = shell_tool(workspace)
    if "fetch_url" in names:
        from clark_agent.toolkit.web import fetch_url_tool

        made["fetch_url"] = fetch_url_tool()
    if "ask_user" in names:
        made["ask_user"] = ask_user_tool(ask)
    if "finish" in names:
        from clark_agent.toolkit.finish import finish

        made["finish"] = finish
    return [made[name] for name in names]


def without_password(model: str) -> str:
    """Return the model without the password in its URL, because it is shown and logged."""
    if "://" not in model:
        return model
    parts = urlsplit(model)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


# --- the log --------------------------------------------------------------------------------------


STORE_VARIABLE = "CLARK_AGENT_STORE"


class Log(Struct, frozen=True):
    """Where runs are logged."""

    path: Path | None
    """None if it is a database server."""
    store: RunStore
    url: str = ""
    """The address of the server, without a password."""
    queues: Tables | None = None
    """The queues of runs in the database, if there are any."""

    @property
    def where(self) -> str:
        """The place, to be shown."""
        return self.url if self.path is None else str(self.path)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that tools must not touch."""
        if self.path is None:
            return ()
        name = self.path.name
        return (self.path, *[self.path.with_name(name + end) for end in ("-wal", "-shm")])

    @property
    def option(self) -> str:
        """The option for a command that should use the same log; empty for the default log."""
        return "" if self.where == _default_place() else f" --log {shlex.quote(self.where)}"

    def queue_of(self, run_id: str) -> str | None:
        """Return the queue that an outermost run belongs to, if it was submitted to one."""
        found = None if self.queues is None else self.queues.find(run_id)
        return None if found is None else found.queue

    def is_inside(self, root: str) -> bool:
        """Return whether it lies where commands of the agent can change it."""
        return self.path is not None and self.path.resolve().is_relative_to(os.path.realpath(root))


def state_folder() -> Path:
    """Return the folder for the persistent state of the command line."""
    home = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(home):
        return Path(home) / "clark-agent"
    usual = "~/Library/Application Support" if sys.platform == "darwin" else "~/.local/state"
    return Path(usual).expanduser() / "clark-agent"


def _default_place() -> str:
    """Return `Log.where` of the default log, for commands that are run as this one is."""
    named = os.environ.get(STORE_VARIABLE)
    if named and is_postgres(named):
        return without_secrets(named)
    return str(Path(named or state_folder() / "runs").expanduser().absolute())


def open_log(path: str | None = None) -> Log:
    """Open the log in a folder, or in a database if the path says so; None is a folder of the user,
    whatever ``CLARK_AGENT_STORE`` says.

    This creates nothing; the first use of a new database does. See `existing`.
    """
    if path is not None and is_postgres(path):
        store = open_postgres(path)
        has_queues = attach(store)  # decisions wake runs of a queue
        queues = Tables(store, DBOS_SCHEMA) if has_queues else None
        return Log(None, store, without_secrets(path), queues)
    if path is not None and _is_like_database(path):
        raise ConfigError(
            "--log takes a folder, a file that ends in .db, or the URL of a database, such as "
            "postgresql://user@host/database. For a new folder with this name: ./NAME"
        )
    where = Path(path or state_folder() / "runs").expanduser().absolute()
    if where.suffix in (".db", ".sqlite"):
        if where.is_dir():
            raise ConfigError(f"{where} is a folder: a name that ends in .db is that of a file")
        return Log(where, SqliteStore(where))
    if where.exists() and not where.is_dir():
        raise ConfigError(f"{where} is a file: --log takes a folder, or a path that ends in .db")
    return Log(where, JsonlStore(where))


def existing(log: Log) -> Log:
    """Return the log. Raises `ConfigError` if a person has named one that does not exist."""
    is_own = log.path == (state_folder() / "runs").absolute()  # no run was logged there yet
    if log.path is None or log.path.exists() or is_own:
        return log
    raise ConfigError(
        f"there is no log at {log.path}: name a folder, a file that ends in .db, or the URL of a "
        f"database. Without a name: {STORE_VARIABLE}, or a folder of yours"
    )


def is_postgres(text: str) -> bool:
    """Return whether a text is the URL of a PostgreSQL database."""
    return text.lower().startswith(("postgres://", "postgresql://"))


def _is_like_database(text: str) -> bool:
    """Return whether a text is meant to be a database, but is not a URL."""
    if text.startswith(("/", "./", "../", "~")) or Path(text).exists():
        return False
    return "@" in text or "=" in text or text.lower().startswith("postgres")


def without_secrets(url: str) -> str:
    """Return the URL of a database without password and parameters."""
    scheme, _, rest = url.partition("://")
    place = rest.partition("?")[0].partition("#")[0]
    account, at, host = place.rpartition("@")
    user = account.partition(":")[0]
    if rest.count("@") != len(at) or "/" in user:  # where the password ends is not certain
        return f"{scheme}://…"
    return f"{scheme}://{user}{at}{host}"


def open_postgres(url: str, *, lease: float = 15.0) -> PostgresStore:
    """Open the runs in a PostgreSQL database.

    Raises `ConfigError` for an invalid URL, and `RunStoreError` if the database cannot be reached.
    No error shows the password.
    """
    psycopg: Any = load_extra("psycopg", "postgres", "a log in PostgreSQL")
    from clark_agent.run_log.postgres import PostgresStore

    store = PostgresStore(url, lease=lease)
    try:
        psycopg.connect(url, connect_timeout=10).close()
    except psycopg.Error as error:
        text = str(error).strip().splitlines()
        reason = text[0] if text else type(error).__name__
        raise RunStoreError(f"cannot use {without_secrets(url)}: {reason}") from None
    return store


def find_run(log: Log, given: str) -> str:
    """Resolve a run: its id, a prefix of it, or ``last``. Raises `RunNotFound`, also for a run of a
    queue that has not begun.
    """
    run_id, queue = find_submitted(log, given)
    if queue is not None:
        raise RunNotFound(run_id, f"run {run_id!r} is queued: no worker has begun it yet")
    return run_id


def find_submitted(log: Log, given: str) -> tuple[str, str | None]:
    """Resolve a run like `find_run`. Return also its queue if it has not begun."""
    submitted = [] if log.queues is None or given == "last" else log.queues.queued()
    queued = {run.run_id: run.queue for run in submitted}
    every = log.store.runs()
    known = [run.run_id for run in (outermost(every) if given == "last" else every)]
    if given == "last" and known:
        return known[0], None
    for run_id in known:  # it may have begun meanwhile
        queued.pop(run_id, None)
    found = [run_id for run_id in (*known, *queued) if run_id.startswith(given)]
    if given in found or len(found) == 1:
        run_id = given if given in found else found[0]
        return run_id, queued.get(run_id)
    if found:
        several = ", ".join(sorted(found)[:5])
        raise ConfigError(f"{given!r} matches {len(found)} runs: {several}")
    raise RunNotFound(given, f"no run {given!r} in {log.where}: see 'clark-agent runs'")


class RunNames:
    """Short names for runs: a beginning of the id that no other run has."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: list[str] | None = None

    def __call__(self, run_id: str) -> str:
        """Return the short name of a run."""
        if self._known is None:
            self._known = [run.run_id for run in self._log.store.runs()]
        for length in range(_SHORT, len(run_id)):
            name = run_id[:length]
            if sum(known.startswith(name) for known in self._known) < 2:
                return visible(name)
        return visible(run_id)


def resume_command(log: Log, run_id: str) -> str:
    """Return the command that continues a run."""
    agent = settings_of_run(log, run_id).agent
    option = "" if agent is None else f" --agent {shlex.quote(agent)}"
    return f"{PROGRAM} resume{log.option} {shlex.quote(RunNames(log)(run_id))}{option}"


_SHORT = 8

# --- options --------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


def agent_options(command: F) -> F:
    """Add the argument ``given``: ``--model``, ``--tools``, ``--mcp``, ``--root``, …"""

    @wraps(command)
    def with_given(**options: Any) -> Any:
        tools = options.pop("tools")
        given = Given(
            model=options.pop("model"),
            tools=tool_names(tools) if tools else None,
            root=options.pop("root"),
            max_iterations=options.pop("max_iterations"),
            agent=options.pop("agent"),
            deps=options.pop("deps"),
            mcp=tuple(options.pop("mcp")) or None,
        )
        return command(given=given, **options)

    for option in reversed(_AGENT):
        with_given = option(with_given)
    return with_given  # type: ignore[return-value]


def approval_options(*, can_suspend: bool = True) -> Callable[[F], F]:
    """Add the argument ``approvals``: ``--yes``, ``--allow`` and ``--suspend``, which is left out
    for a command whose calls wait for a decision anyway.
    """

    def decorate(command: F) -> F:
        @wraps(command)
        def with_approvals(**options: Any) -> Any:
            approvals = Approvals(
                yes=options.pop("yes"),
                allow=tuple(options.pop("allow")),
                suspend=options.pop("suspend", None),
            )
            return command(approvals=approvals, **options)

        for option in reversed((*_APPROVAL, _SUSPEND) if can_suspend else _APPROVAL):
            with_approvals = option(with_approvals)
        return with_approvals  # type: ignore[return-value]

    return decorate


def log_options(*, can_be_off: bool = False, must_exist: bool = False) -> Callable[[F], F]:
    """Add the argument ``log``: ``--log``, and ``--no-log`` if the log is optional. The default is
    ``CLARK_AGENT_STORE``, or else a folder of the user.

    With ``must_exist``, for commands about runs that are there, a log that is named must exist.
    """

    def decorate(command: F) -> F:
        @wraps(command)
        def with_log(**options: Any) -> Any:
            path, is_off = options.pop("log"), options.pop("no_log", False)
            log = None if is_off else open_log(path)
            return command(log=existing(log) if log and must_exist else log, **options)

        if can_be_off:
            with_log = click.option("--no-log", is_flag=True, help="Do not write a log.")(with_log)
        return _LOG(with_log)  # type: ignore[return-value]

    return decorate


def _complete_tools(_: Any, __: Any, incomplete: str) -> list[CompletionItem]:
    before, comma, word = incomplete.rpartition(",")
    choices = (*TOOLS, "all", "none", "default", "files")
    return [CompletionItem(before + comma + name) for name in choices if name.startswith(word)]


def _complete_runs(context: click.Context, _: Any, incomplete: str) -> list[CompletionItem]:
    names = ["last"]
    with suppress(ClarkAgentError):
        log = existing(open_log(context.params.get("log")))
        names += [run.run_id for run in log.store.runs(limit=50)]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def run_argument(name: str = "run_id") -> Callable[[F], F]:
    """Add the argument ``RUN``, to be resolved with `find_run`."""
    return click.argument(name, metavar="RUN", shell_complete=_complete_runs)


_AGENT = (
    click.option(
        "-a",
        "--agent",
        metavar="MODULE:NAME",
        help="Your own Agent, or a function that returns one. Its tools and prompt are used.",
    ),
    click.option(
        "--deps",
        metavar="MODULE:NAME",
        help="The dependencies for --agent, or a function that returns them.",
    ),
    click.option(
        "-m",
        "--model",
        metavar="MODEL",
        help="The model, such as openai:gpt-5.1; see 'clark-agent models'. "
        "Default: CLARK_AGENT_MODEL, or a small model on this machine.",
    ),
    click.option(
        "-t",
        "--tools",
        metavar="NAMES",
        multiple=True,
        shell_complete=_complete_tools,
        help=f"Tools, separated by commas: {', '.join(TOOLS)}; or files, all, none, default.",
    ),
    click.option(
        "--mcp",
        metavar="FILE",
        multiple=True,
        type=click.Path(dir_okay=False),
        help="A file with MCP servers, such as .mcp.json. Their tools are added, and ask before "
        "they run. Repeatable; see 'clark-agent mcp'.",
    ),
    click.option(
        "-C",
        "--root",
        metavar="FOLDER",
        type=click.Path(file_okay=False),
        help="The folder that the tools work in and cannot leave. Default: the current one.",
    ),
    click.option(
        "--max-iterations",
        metavar="N",
        type=click.IntRange(min=1),
        help=f"The maximum number of turns. Default: {DEFAULT_TURNS}.",
    ),
)
_APPROVAL = (
    click.option(
        "-y",
        "--yes",
        is_flag=True,
        help="Run tools without asking, except for secrets and files that other programs run.",
    ),
    click.option(
        "--allow",
        metavar="NAMES",
        multiple=True,
        shell_complete=_complete_tools,
        help="Run these tools without asking.",
    ),
)
_SUSPEND = click.option(
    "--suspend/--no-suspend",
    default=None,
    help="Suspend the run instead of asking at the terminal: see 'clark-agent decide'. A run "
    "that is resumed keeps this.",
)
_LOG = click.option(
    "--log",
    "--store",
    "log",
    metavar="PATH",
    type=click.Path(),
    envvar=STORE_VARIABLE,
    help="Where runs are logged: a folder, a file that ends in .db, or postgresql://host/database. "
    f"Default: {STORE_VARIABLE}, or a folder of yours.",
)
system_option = click.option(
    "-s", "--system", metavar="TEXT", help="The system prompt; @FILE reads it from a file."
)
