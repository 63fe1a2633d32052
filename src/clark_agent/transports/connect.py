"""A transport from a string, the way it stands in a setting or on a command line.

openai:gpt-5.1                      OpenAI's Chat Completions, with OPENAI_API_KEY
openrouter:deepseek/deepseek-v4     with OPENROUTER_API_KEY
groq:…  deepseek:…  mistral:…  xai:…  moonshot:…  zai:…  cerebras:…  together:…  fireworks:…
ollama:llama3.2                     the Ollama on this machine
lmstudio:qwen3-8b                   the LM Studio on this machine
http://host:8080/v1#model           any server that speaks Chat Completions
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from clark_agent.argument_repair import close_match
from clark_agent.errors import ConfigError
from clark_agent.stream import StreamFn
from clark_agent.transports.openai_chat import OpenAIChat
from clark_agent.transports.settings import RetryPolicy, Timeouts

__all__ = ["connect"]

# Servers that speak Chat Completions, and where they are.
_CHAT_SERVERS: Mapping[str, str] = {
    "openai": "https://api.openai.com/v1",
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


def connect(
    model: str,
    *,
    api_key: str | None = None,
    retry: RetryPolicy | None = None,
    timeouts: Timeouts | None = None,
) -> StreamFn:
    """The transport that a string names: ``provider:model``, or an address with ``#model``.

    Raises `ConfigError` when the string names no provider, the provider's package is not installed,
    or its key is not set; the text says what to do.
    """
    if not isinstance(model, str):
        raise ConfigError(f"connect() takes a string such as 'openai:gpt-5', not {model!r}")
    given, separator, name = model.strip().partition(":")
    scheme = given.strip().lower()
    if scheme in ("http", "https"):
        address, name = [part.strip() for part in model.partition("#")[::2]]
        if not urlsplit(address).hostname:
            raise ConfigError(f"{model!r} names no host: write http://host:port/v1#model")
        if not name:
            raise ConfigError(f"{model!r} names no model: add it behind a #, as in {address}#model")
        return OpenAIChat(name, base_url=address, api_key=api_key, retry=retry, timeouts=timeouts)
    if scheme not in _CHAT_SERVERS:
        raise ConfigError(_unknown(model, scheme if separator else ""))
    if not name.strip():
        raise ConfigError(f"{model!r} names no model: write {scheme}:model")
    return OpenAIChat(
        name.strip(),
        base_url=None if scheme == "openai" else _CHAT_SERVERS[scheme],
        api_key=api_key,
        retry=retry,
        timeouts=timeouts,
    )


def _unknown(model: str, scheme: str) -> str:
    known = ", ".join(f"{name}:" for name in _CHAT_SERVERS)
    near = close_match(scheme, _CHAT_SERVERS) if scheme else None
    hint = f" Did you mean {near}:?" if near else ""
    return (
        f"{model!r} names no provider.{hint} Write provider:model with one of {known} "
        "or the address of a server, as in http://localhost:8080/v1#model"
    )
