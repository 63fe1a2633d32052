"""Commands about the installation: ``doctor``, ``models`` and ``completion``.

They report whether a key is set, never its value.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import click
from click.shell_completion import CompletionItem, get_completion_class
from msgspec import Struct

from clark_agent._extras import how_to_install
from clark_agent._version import __version__
from clark_agent.cli.app import PROGRAM, cli, examples
from clark_agent.cli.options import (
    DEFAULT_MODEL,
    Given,
    Log,
    log_options,
    open_model,
    settings_from,
    without_password,
)
from clark_agent.cli.view import one_line
from clark_agent.config import LoopConfig
from clark_agent.engine.loop import run
from clark_agent.errors import ClarkAgentError, ConfigError
from clark_agent.toolkit.sandbox import sandbox_status
from clark_agent.tools.repair import close_match
from clark_agent.transports import anthropic, gemini
from clark_agent.transports.connect import _CHAT_SERVERS
from clark_agent.transports.dialects import dialect_for
from clark_agent.types import AgentContext

__all__ = ["completion", "doctor", "models"]

_OPENAI = "https://api.openai.com/v1"
_TIMEOUT = 120.0  # seconds for a model to return one word


# --- providers ------------------------------------------------------------------------------------


class Provider(Struct, frozen=True):
    """A kind of model: the word before the colon."""

    scheme: str
    keys: tuple[str, ...]
    """The variables that may hold its key; empty if it needs none."""
    package: str
    extra: str
    url: str
    """The base URL; ``/models`` below it lists the models."""

    @property
    def key(self) -> str | None:
        """The name of the first variable that is set."""
        return next((name for name in self.keys if os.environ.get(name, "").strip()), None)

    def missing(self) -> str | None:
        """Return what is missing to use it and how to get it, or None."""
        if not _version(self.package):
            return how_to_install(self.extra)
        return f"set {' or '.join(self.keys)}" if self.keys and not self.key else None

    def readiness(self) -> str:
        """Return what it needs, as far as this can be told without asking it."""
        is_here = urlsplit(self.url).hostname == "localhost"
        return self.missing() or (f"needs a server at {self.url}" if is_here else "ready")


def _providers() -> list[Provider]:
    chat = [
        Provider(
            scheme, dialect_for(url or _OPENAI).key_variables, "openai", "openai", url or _OPENAI
        )
        for scheme, url in _CHAT_SERVERS.items()
    ]
    return [
        *chat,
        Provider("openai-responses", ("OPENAI_API_KEY",), "openai", "openai", _OPENAI),
        Provider(
            "anthropic",
            anthropic._KEY_VARIABLES,
            "anthropic",
            "anthropic",
            "https://api.anthropic.com/v1",
        ),
        Provider(
            "gemini",
            gemini._KEY_VARIABLES,
            "google-genai",
            "google",
            "https://generativelanguage.googleapis.com/v1beta/openai",
        ),
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# --- models ---------------------------------------------------------------------------------------


def _complete_providers(_: Any, __: Any, incomplete: str) -> list[CompletionItem]:
    names = [provider.scheme for provider in _providers()]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command(
    epilog=examples(
        "clark-agent models",
        "clark-agent models openrouter",
        "clark-agent models http://localhost:8080/v1",
    )
)
@click.argument("provider", required=False, shell_complete=_complete_providers)
def models(*, provider: str | None) -> None:
    """List providers, or the models of one PROVIDER.

    PROVIDER is a name from the list, or the URL of a server that speaks Chat Completions.
    """
    if provider is None:
        click.echo(f"{'local:':<28}a small model on this machine, or local:/path/to/model.gguf")
        for known in _providers():
            click.echo(f"{known.scheme + ':MODEL':<28}{known.readiness()}")
        click.echo(f"{'http://HOST:PORT/v1#MODEL':<28}a server that speaks Chat Completions")
        click.echo(f"{'gateway+https://HOST#MODEL':<28}a gateway, with CLARK_GATEWAY_TOKEN")
        return
    for name in _listed(provider):
        click.echo(one_line(name))


def _listed(given: str) -> list[str]:
    word = given.partition("#")[0]
    if word.startswith(("http://", "https://")):
        provider = Provider(word, (), "openai", "openai", word.rstrip("/"))
        return [f"{provider.url}#{name}" for name in _list_models(provider)]
    word = word.partition(":")[0]
    known = {provider.scheme: provider for provider in _providers()}
    if word not in known:
        near = close_match(word, list(known))
        hint = f" Did you mean {near}?" if near else f" See '{PROGRAM} models'."
        raise ConfigError(f"unknown provider {word!r}.{hint}")
    return [f"{word}:{name}" for name in _list_models(known[word])]


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect, so that a key goes only to its own host."""

    def redirect_request(self, req: Any, *_: Any, **__: Any) -> None:
        return None


def _list_models(provider: Provider) -> list[str]:
    """Return the models that a server lists."""
    headers = {"User-Agent": PROGRAM}
    if provider.keys:
        if provider.key is None:
            raise ConfigError(f"{provider.scheme} needs a key: set {' or '.join(provider.keys)}")
        secret = os.environ[provider.key].strip()
        headers |= {"Authorization": f"Bearer {secret}"}
        if provider.scheme == "anthropic":
            headers |= {"x-api-key": secret, "anthropic-version": "2023-06-01"}
            if provider.key == "ANTHROPIC_API_KEY":
                del headers["Authorization"]
    try:
        request = Request(f"{provider.url}/models?limit=1000", headers=headers)
        with build_opener(_NoRedirect).open(request, timeout=30) as reply:
            rows = json.load(reply)["data"]
        return sorted([str(row["id"]).removeprefix("models/") for row in rows])
    except (URLError, OSError) as error:
        why = getattr(error, "reason", None) or error
        raise ClarkAgentError(f"cannot list the models of {provider.url}: {why}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ClarkAgentError(f"{provider.url} did not return a list of models") from error


# --- doctor ---------------------------------------------------------------------------------------


class Finding(Struct, frozen=True):
    """One result of a check."""

    is_ok: bool
    what: str
    about: str


@click.command(epilog=examples("clark-agent doctor", "clark-agent doctor --offline"))
@click.option("--offline", is_flag=True, help="Do not load or call any model.")
@log_options()
def doctor(*, offline: bool, log: Log) -> int:
    """Check what works, what is missing, and how to get it.

    Sends a short prompt to the default model and to the model on this machine, unless --offline is
    given. Reports whether keys are set, never their values.

    Exit codes: 0 an agent can run here, 1 it cannot.
    """
    model = settings_from(Given()).model
    for finding in _findings(log):
        _print(finding)
    found = Finding(True, "model", f"{without_password(model)} (not called)")
    if not offline:
        found = _try(model)
        if model != DEFAULT_MODEL:
            _print(_try(DEFAULT_MODEL, "local model"))
    _print(found)
    if not found.is_ok and model == DEFAULT_MODEL:
        click.echo(
            "     or choose another: CLARK_AGENT_MODEL=openai:gpt-5.1; see clark-agent models"
        )
    return 0 if found.is_ok else 1


def _print(finding: Finding) -> None:
    mark = "ok " if finding.is_ok else "-- "
    line = f"{mark}  {finding.what:<24} {one_line(finding.about, 300)}"
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, max(width, 60), subsequent_indent=" " * 30)
    click.echo(line)


def _findings(log: Log) -> Iterator[Finding]:
    python = sys.version.split()[0]
    yield Finding(True, "clark-agent", f"{__version__}, Python {python} on {sys.platform}")
    extras = {p.package: p.extra for p in _providers()} | {
        "starlette": "gateway",
        "uvicorn": "gateway",
        "xllamacpp": "local",
        "genai_prices": "prices",
        "jiter": "partial",
        "psycopg": "postgres",
        "dbos": "dbos",
        "temporalio": "temporal",
        "mcp": "mcp",
        "opentelemetry-sdk": "otel",
    }
    for package, extra in extras.items():
        have = _version(package)
        yield Finding(have is not None, package, have or f"not installed: {how_to_install(extra)}")
    names = dict.fromkeys([name for provider in _providers() for name in provider.keys])
    for is_set, text in ((True, "keys"), (False, "keys that are not set")):
        found = [name for name in names if bool(os.environ.get(name, "").strip()) is is_set]
        if found:
            yield Finding(is_set, text, ", ".join(found))
    status = sandbox_status()
    yield Finding(status.works, "sandbox for shell", str(status))
    yield _log_finding(log)


def _log_finding(log: Log) -> Finding:
    if log.path is None:
        return Finding(True, "run log", f"{log.where}, {len(log.store.runs())} runs")
    folder = log.path
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return Finding(False, "run log", f"cannot write {log.path}: choose --log, or --no-log")
    if log.is_inside(os.getcwd()):
        where = f"{log.path} is inside this folder, where commands of an agent can change it"
        return Finding(False, "run log", f"{where}: choose --log")
    return Finding(True, "run log", f"{log.path}, {len(log.store.runs())} runs")


def _try(model: str, what: str = "model") -> Finding:
    """Check whether a model answers."""

    async def ask() -> None:
        async with asyncio.timeout(_TIMEOUT):
            config = LoopConfig(stream=open_model(model), max_iterations=1, max_output_tokens=16)
            await run("Say hello.", AgentContext(), config)

    name = without_password(model)
    try:
        asyncio.run(ask())
    except TimeoutError:
        return Finding(False, what, f"{name} did not answer in {_TIMEOUT:g} seconds")
    except ClarkAgentError as error:
        return Finding(False, what, f"{name}: {error}")
    return Finding(True, what, f"{name} answers")


# --- completion -----------------------------------------------------------------------------------


@click.command(
    epilog=examples(
        'eval "$(clark-agent completion bash)"      # in ~/.bashrc',
        'eval "$(clark-agent completion zsh)"       # in ~/.zshrc',
        "clark-agent completion fish > ~/.config/fish/completions/clark-agent.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(*, shell: str) -> None:
    """Print the completion script for a SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, PROGRAM, "_CLARK_AGENT_COMPLETE").source())
