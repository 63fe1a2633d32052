"""The command ``gateway``: serves models to other machines, while the keys stay on this one."""

from __future__ import annotations

import os

import click

from clark_agent._extras import load_extra
from clark_agent.cli.app import examples
from clark_agent.cli.options import open_model, without_password
from clark_agent.errors import ConfigError
from clark_agent.gateway import SAFE_EXTRAS, serve_gateway
from clark_agent.gateway import gateway as make_gateway
from clark_agent.stream import StreamFn

__all__ = ["gateway"]


@click.command(
    epilog=examples(
        "clark-agent gateway fast=openai:gpt-5-mini good=anthropic:claude-sonnet-5",
        "ALICE=… clark-agent gateway openai:gpt-5.1 --host 0.0.0.0 --token alice=ALICE",
        "clark-agent run -m gateway+http://127.0.0.1:8000#fast Hello",
    )
)
@click.argument("models", nargs=-1, required=True, metavar="[NAME=]MODEL...")
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="The address to listen on. Default: reachable from this machine only.",
)
@click.option(
    "--port", metavar="N", default=8000, type=click.IntRange(0, 65535), help="Default: 8000."
)
@click.option(
    "--token",
    "tokens",
    multiple=True,
    metavar="NAME=VARIABLE",
    help="Who may call: a name for the log, and the environment variable that holds the secret. "
    "Without tokens, only this machine may call.",
)
@click.option(
    "--extra",
    "extras",
    multiple=True,
    metavar="FIELD",
    help="A field that callers may set in provider_extras, besides the safe ones.",
)
def gateway(
    *,
    models: tuple[str, ...],
    host: str,
    port: int,
    tokens: tuple[str, ...],
    extras: tuple[str, ...],
) -> None:
    """Serve MODELs to other machines; the API keys stay here.

    The first Ctrl-C waits for running answers to end; the second aborts them.
    """
    load_extra("uvicorn", "gateway", "the gateway")
    served = _models(models)
    app = make_gateway(served, tokens=_tokens(tokens), extras=SAFE_EXTRAS | {*extras})
    names = ", ".join(served)
    serve_gateway(
        app,
        host=host,
        port=port,
        on_listening=lambda url: click.echo(f"serving {names} at {url}; Ctrl-C stops", err=True),
    )


def _models(given: tuple[str, ...]) -> dict[str, StreamFn]:
    served: dict[str, StreamFn] = {}
    for word in given:
        name, is_named, model = word.partition("=")
        if not is_named or ":" in name:  # an address may contain a "="
            name, model = "default", word
        if name in served:
            raise ConfigError(
                f"two models have the name {name!r}: write NAME={without_password(model)}"
            )
        served[name] = open_model(model)
    return served


def _tokens(given: tuple[str, ...]) -> dict[str, str] | None:
    """Read the secrets from the environment: other users can see a command line."""
    tokens: dict[str, str] = {}
    for word in given:
        name, _, variable = word.partition("=")
        secret = os.environ.get(variable, "").strip()
        if not secret:
            what = (
                f"the variable {variable!r} is not set" if variable else "the variable is missing"
            )
            raise ConfigError(f"--token {word}: {what}; write NAME=VARIABLE")
        tokens[name] = secret
    return tokens or None
