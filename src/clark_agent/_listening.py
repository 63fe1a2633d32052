"""Opens the sockets of servers."""

from __future__ import annotations

import ipaddress
import socket

from clark_agent._text import os_reason
from clark_agent.errors import ConfigError

__all__ = ["is_loopback", "listen"]


def listen(host: str, port: int) -> socket.socket:
    """Open the socket of a server. Port 0 is any that is free. Raises `ConfigError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        hint = "; choose another port, or 0 for any that is free" if port else ""
        raise ConfigError(
            f"cannot listen on {host} port {port}: {os_reason(error)}{hint}"
        ) from None
    listening.setblocking(False)
    return listening


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
