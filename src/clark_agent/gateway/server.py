"""A server for a gateway: uvicorn with two safer settings.

- A connection that does not send the headers of a request in time is closed. uvicorn itself waits
  forever, so that a few hundred silent connections use up all that a process may open.
- The client's address is taken from the socket, not from ``X-Forwarded-For``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from clark_agent._extras import load_extra
from clark_agent._listening import listen
from clark_agent.errors import ConfigError

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["serve_gateway", "server_config"]


def serve_gateway(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    header_timeout: float = 10.0,
    on_listening: Callable[[str], object] | None = None,
) -> None:
    """Serve an app made by `clark_agent.gateway.app` until SIGTERM or Ctrl-C.

    Port 0 is any that is free. ``header_timeout`` is how many seconds a connection may take to send
    the headers of a request. ``on_listening`` is called with the URL as soon as clients can
    connect. Raises `ConfigError` if the port is in use, or the host is not of this machine.
    """
    uvicorn = load_extra("uvicorn", "gateway", "serve_gateway()")
    server = uvicorn.Server(server_config(app, header_timeout=header_timeout))
    with listen(host, port) as listener:
        if on_listening is not None:
            shown = f"[{host}]" if ":" in host else host
            on_listening(f"http://{shown}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])


def server_config(app: Starlette, *, header_timeout: float = 10.0, **settings: Any) -> Any:
    """Return the ``uvicorn.Config``, to run your own server; ``settings`` are passed to uvicorn."""
    given: Any = header_timeout
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not is_number or not 0 < given < float("inf"):
        raise ConfigError(f"header_timeout must be a number of seconds, not {given!r}")
    uvicorn = load_extra("uvicorn", "gateway", "serve_gateway()")
    fixed = {"log_level": "warning", "proxy_headers": False}
    return uvicorn.Config(app, http=_protocol(header_timeout), **{**fixed, **settings})


def _protocol(header_timeout: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol class, extended by a time limit for the headers."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class HeadersInTime(base):  # type: ignore[misc]
        """Closes a connection if no request starts in time. The timer runs between requests."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._restart()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_answering():
                self._stop()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._is_answering():
                self._restart()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _restart(self) -> None:
            self._stop()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(header_timeout, self._give_up)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            if not self._is_answering():
                self.transport.close()

    return HeadersInTime
