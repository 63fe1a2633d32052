"""Creates a transport from a string, as in a setting or on a command line.

openai:gpt-5.1                      OpenAI's Chat Completions, with OPENAI_API_KEY
openai-responses:gpt-5.6            OpenAI's Responses
anthropic:claude-sonnet-5           with ANTHROPIC_API_KEY
gemini:gemini-3-flash               with GEMINI_API_KEY or GOOGLE_API_KEY
openrouter:deepseek/deepseek-v4     with OPENROUTER_API_KEY
groq:…  deepseek:…  mistral:…  xai:…  moonshot:…  zai:…  cerebras:…  together:…  fireworks:…
local:                              a small model inside this process; local:/path/to/model.gguf
ollama:llama3.2                     Ollama on this machine
lmstudio:qwen3-8b                   LM Studio on this machine
http://host:8080/v1#model           any server that speaks Chat Completions
gateway+https://host#model          your own gateway, with CLARK_GATEWAY_TOKEN
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from clark_agent.errors import ConfigError
from clark_agent.tools.repair import close_match
from clark_agent.transports.anthropic import Anthropic
from clark_agent.transports.gemini import Gemini
from clark_agent.transports.http.base import Transport
from clark_agent.transports.http.redaction import without_credentials
from clark_agent.transports.http.retry import RetryPolicy, Timeouts
from clark_agent.transports.local import LocalModel
from clark_agent.transports.openai_chat import OpenAIChat
from clark_agent.transports.openai_responses import OpenAIResponses
from clark_agent.transports.proxy import ProxyStream

__all__ = ["connect"]

# Servers that speak Chat Completions, and their addresses; None: the SDK's default.
_CHAT_SERVERS: Mapping[str, str | None] = {
    "openai": None,
    "openrouter": "https://openrouter.ai/api/v1",
    "groq": "https://api.groq.com/openai/v1",
    "deepseek": "https://api.deepseek.com/v1",
    "mistral": "https://api.mistral.ai/v1",
    "xai": "https://api.x.ai/v1",
    "moonshot": "https://api.moonshot.ai/v1",
    "zai": "https://api.z.ai/api/paas/v4",
    "cerebras": "https://api.cerebras.ai/v1",
    "together": "https://api.together.xyz/v1",
    "fireworks": "https://api.fireworks.ai/inference/v1",
    "ollama": "http://localhost:11434/v1",
    "lmstudio": "http://localhost:1234/v1",
}
_OWN_APIS: Mapping[str, type[OpenAIResponses | Anthropic | Gemini]] = {
    "openai-responses": OpenAIResponses,
    "anthropic": Anthropic,
    "gemini": Gemini,
}
_GATEWAY_TOKEN = "CLARK_GATEWAY_TOKEN"


def connect(
    model: str,
    *,
    api_key: str | None = None,
    retry: RetryPolicy | None = None,
    timeouts: Timeouts | None = None,
) -> Transport[Any] | ProxyStream:
    """Create the transport for a string: ``provider:model``, or an address with ``#model``.

    Raises `ConfigError` if the provider is unknown, its package is not installed, or its key is not
    set; the text says what to do.
    """
    if not isinstance(model, str):
        raise ConfigError(f"connect() takes a string such as 'openai:gpt-5', not {model!r}")
    given, separator, name = model.strip().partition(":")
    scheme, name = given.strip().lower(), name.strip()
    if scheme in ("http", "https"):
        address, name = _split(model)
        return OpenAIChat(name, base_url=address, api_key=api_key, retry=retry, timeouts=timeouts)
    if scheme in ("gateway+http", "gateway+https"):
        token = api_key or os.environ.get(_GATEWAY_TOKEN)
        address, name = _split(model.strip().partition("+")[2], needs_model=False)
        return ProxyStream(address, token, model=name or None, retry=retry, timeouts=timeouts)
    if scheme == "local":
        return LocalModel(name or None, retry=retry, timeouts=timeouts)
    if scheme not in _CHAT_SERVERS and scheme not in _OWN_APIS:
        raise ConfigError(_unknown(model, scheme if separator else ""))
    if not name:
        raise ConfigError(f"missing model in {model!r}: write {scheme}:model")
    if (transport := _OWN_APIS.get(scheme)) is not None:
        return transport(name, api_key=api_key, retry=retry, timeouts=timeouts)
    return OpenAIChat(
        name, base_url=_CHAT_SERVERS[scheme], api_key=api_key, retry=retry, timeouts=timeouts
    )


def _split(given: str, *, needs_model: bool = True) -> tuple[str, str]:
    """Split into the address and the model after the ``#``. Raises `ConfigError`."""
    address, name = [part.strip() for part in given.partition("#")[::2]]
    try:
        parts = urlsplit(address)
    except ValueError:
        parts = None
    if parts is None or not parts.hostname:
        shown = without_credentials(given)
        raise ConfigError(f"missing host in {shown!r}: write http://host:port/v1#model")
    if needs_model and not name:
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # no password
        raise ConfigError(f"missing model in {shown!r}: add it after a #, as in {shown}#model")
    return address, name


def _unknown(model: str, scheme: str) -> str:
    schemes = [*_CHAT_SERVERS, *_OWN_APIS, "local"]
    known = ", ".join(f"{name}:" for name in schemes)
    near = close_match(scheme, schemes) if scheme else None
    hint = f" Did you mean {near}:?" if near else ""
    if not near and re.match(r"[\w.-]+:\d+(/|#|$)", model.strip()):
        hint = f" Did you mean http://{model.strip()}?"
    shown = without_credentials(model)
    return (
        f"unknown provider in {shown!r}.{hint} Write provider:model with one of {known} or the "
        "address of a server, as in http://localhost:8080/v1#model or gateway+https://host#model"
    )
