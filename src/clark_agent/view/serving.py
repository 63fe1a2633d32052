"""A server for the page of runs: uvicorn on this machine, with a token of its own."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from clark_agent._extras import load_extra
from clark_agent._listening import is_loopback, listen

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["is_loopback", "listen", "new_token", "serve_view", "shown_url"]


def new_token() -> str:
    """Return a secret for the address of the page."""
    return secrets.token_urlsafe(24)


def shown_url(host: str, listening: socket.socket, token: str) -> str:
    """Return the address to open."""
    port = listening.getsockname()[1]
    name = "127.0.0.1" if host in ("", "0.0.0.0") else "::1" if host == "::" else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/?token={token}"


def serve_view(
    app: Starlette, listening: socket.socket, *, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Serve an app made by `clark_agent.view.app.view_app` until SIGTERM or Ctrl-C."""
    uvicorn: Any = load_extra("uvicorn", "view", "serve_view()")

    class Server(uvicorn.Server):  # type: ignore[misc]
        """Ends the streams of the page when it ends, so that it need not wait for them."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.view.close()
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_ready()

    # No access log: addresses have the token.
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    try:
        Server(config).run(sockets=[listening])
    except KeyboardInterrupt:  # after the server has ended, on Ctrl-C
        pass
    finally:
        listening.close()
