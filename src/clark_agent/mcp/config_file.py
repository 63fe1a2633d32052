"""load_servers: servers from ``.mcp.json``, the file that other programs write too.

    {"mcpServers": {"time": {"command": "uvx", "args": ["mcp-server-time"]},
                    "docs": {"type": "http", "url": "https://docs.example/mcp"}}}

``${NAME}`` and ``${NAME:-default}`` in any string come from the environment. Their values count as
secrets of the server.
"""

from __future__ import annotations

import logging
import os
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any

import msgspec

from clark_agent.errors import ConfigError
from clark_agent.mcp.server_config import McpServer
from clark_agent.tools.repair import close_match

__all__ = ["load_servers"]

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_NO_SECRETS = frozenset({"HOME", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER"})
_TRANSPORTS = {
    "stdio": None,
    "http": "http",
    "streamable-http": "http",
    "streamable_http": "http",
    "streamableHttp": "http",
    "sse": "sse",
}
_PLAIN = ("command", "args", "env", "cwd", "url", "headers")
_OWN = (
    "prefix",
    "include",
    "exclude",
    "rename",
    "timeout",
    "connect_timeout",
    "max_result_bytes",
    "trust_annotations",
    "untrusted",
    "strict",
    "log_level",
    "roots",
    "required",
)
"""Settings of `McpServer` that other programs ignore."""
_KNOWN = {*_PLAIN, *_OWN, "type", "transport", "disabled", "enabled"}
_IGNORED = {"description", "autoApprove", "alwaysAllow", "$schema"}
"""Settings of other programs that mean nothing here."""


def load_servers(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[McpServer, ...]:
    """The servers of a file, or of its content as a mapping.

    Raises `ConfigError` that names the file and the key. Disabled servers are left out, unknown
    keys are logged.
    """
    if isinstance(source, Mapping):
        return _servers(source, "the mapping")
    where = os.fspath(source)
    try:
        with open(where, "rb") as file:
            content = msgspec.json.decode(file.read().removeprefix(BOM_UTF8))
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    return _servers(content, where)


def _servers(content: Any, where: str) -> tuple[McpServer, ...]:
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: expected an object with the key mcpServers")
    for key in ("mcpServers", "servers"):
        if key in content:
            found = content[key]
            break
    else:
        raise ConfigError(f"{where}: the key mcpServers (or servers) is missing")
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{where}: {key} must be an object: the name of each server → its settings"
        )
    servers: list[McpServer] = []
    for name, settings in found.items():
        place = f"{where}: {key}.{name}"
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{place} must be an object")
        for switch in ("disabled", "enabled"):
            if not isinstance(settings.get(switch, False), bool):
                raise ConfigError(f"{place}.{switch} must be true or false")
        if settings.get("disabled") is True or settings.get("enabled") is False:
            continue
        servers.append(_server(str(name), settings, place))
    return tuple(servers)


def _server(name: str, settings: Mapping[str, Any], place: str) -> McpServer:
    for key in settings:
        if key not in _KNOWN and key not in _IGNORED:
            nearest = close_match(key, sorted(_KNOWN))
            hint = "" if nearest is None else f"; did you mean {nearest!r}?"
            logger.warning("%s: unknown key %r is ignored%s", place, key, hint)
    kind = _kind(settings, place)
    secrets: list[str] = []
    given = {
        key: _expanded(settings[key], f"{place}.{key}", secrets)
        for key in (*_PLAIN, *_OWN)
        if settings.get(key) is not None
    }
    if kind is not None:
        given["transport"] = kind
    if "env" in given and isinstance(given["env"], Mapping):
        # Other programs also write numbers and booleans here.
        given["env"] = {key: _as_text(value) for key, value in given["env"].items()}
    try:
        return McpServer(name, secrets=secrets, **given)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _kind(settings: Mapping[str, Any], place: str) -> Any:
    for key in ("type", "transport"):
        kind = settings.get(key)
        if kind is None:
            continue
        if not isinstance(kind, str) or kind not in _TRANSPORTS:
            known = ", ".join(["stdio", "http", "streamable-http", "sse"])
            raise ConfigError(f"{place}.{key} must be one of {known}, not {kind!r}")
        needed = "command" if _TRANSPORTS[kind] is None else "url"
        if settings.get(needed) is None:
            raise ConfigError(f"{place}: the type {kind!r} needs {needed}")
        return _TRANSPORTS[kind]
    return None


def _expanded(value: Any, place: str, secrets: list[str]) -> Any:
    """The value with variables of the environment, which are added to ``secrets``."""
    match value:
        case str():
            return _VARIABLE.sub(lambda found: _variable(found, place, secrets), value)
        case Mapping():
            fields: Mapping[str, Any] = value
            return {key: _expanded(item, f"{place}.{key}", secrets) for key, item in fields.items()}
        case list():
            items: list[Any] = value
            return [_expanded(item, f"{place}[{n}]", secrets) for n, item in enumerate(items)]
        case _:
            return value


def _variable(found: re.Match[str], place: str, secrets: list[str]) -> str:
    name, default = found[1], found[2]
    value = os.environ.get(name)
    if value is None and default is None:
        raise ConfigError(
            f"{place} needs the environment variable {name}; set it, or write ${{{name}:-default}}"
        )
    if not value and default is not None:
        return default
    assert value is not None
    if name not in _NO_SECRETS:
        secrets.append(value)
    return value


def _as_text(value: Any) -> Any:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case _:
            return value
