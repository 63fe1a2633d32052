"""An HTTP server for MCP that misbehaves as it is told, in a thread of this process.

`answers` says, for each JSON-RPC method, what is answered instead of what should be: an `Answer`,
or a function from the message to one. It may be changed while the server runs. `requests` has what
was received. Sessions that it was told to `forget` are unknown from then on, as after a restart.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from tests.mcp.servers.faulty import ECHO, VERSION

Json = dict[str, Any]


class Answer(NamedTuple):
    """An answer of HTTP. With `cut`, the connection ends before so many more bytes are sent; with
    `drop`, it ends instead of an answer.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}
    cut: int = 0
    hang: bool = False
    drop: bool = False


class Request(NamedTuple):
    """A request as it was received. The names of headers are in lower case."""

    verb: str
    path: str
    headers: dict[str, str]
    message: Json


def json_answer(message: Json, *, status: int = 200, **headers: str) -> Answer:
    body = json.dumps({"jsonrpc": "2.0", **message}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, body, {"Content-Type": "application/json", **named})


def sse_answer(*events: bytes) -> Answer:
    return Answer(200, b"".join(events), {"Content-Type": "text/event-stream"})


class FaultyHttp:
    """A running server, to be used as a context manager."""

    def __init__(self, *, port: int = 0) -> None:
        self.answers: dict[str, Answer | Callable[[Json], Answer]] = {}
        self.requests: list[Request] = []
        self.sessions: list[str] = []
        self.known: set[str] = set()
        self.connections: set[socket.socket] = set()
        self.released = threading.Event()
        outer = self

        class Handler(_Handler):
            server_of = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = False  # joined when the server closes
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"{self.origin}/mcp"

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def methods(self) -> list[str]:
        """The JSON-RPC methods that were received by POST."""
        return [request.message["method"] for request in self.requests if request.verb == "POST"]

    def forget(self) -> None:
        """Lose all sessions."""
        self.known.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Listen no more, and end all connections; nothing if it has stopped."""
        if not self._thread.is_alive():
            return
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def answer(self, request: Request) -> Answer:
        message = request.message
        method = message.get("method", "")
        told = self.answers.get(method) or self.answers.get("*")
        if told is not None:
            return told(message) if callable(told) else told
        session = request.headers.get("mcp-session-id")
        if session is not None and session not in self.known:
            return json_answer(_error(message, -32001, "Session not found"), status=404)
        if "id" not in message:
            return Answer(202)
        return self.proper(message)

    def proper(self, message: Json) -> Answer:
        """What a server without faults would answer."""
        match message["method"]:
            case "server/discover":
                return json_answer(_error(message, -32601, "Method not found"))
            case "initialize":
                session = f"session-{len(self.sessions) + 1}"
                self.sessions.append(session)
                self.known.add(session)
                result: Json = {
                    "protocolVersion": VERSION,
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "faulty", "version": "1"},
                }
                return json_answer({"id": message["id"], "result": result}, Mcp_Session_Id=session)
            case "tools/list":
                return json_answer({"id": message["id"], "result": {"tools": [ECHO]}})
            case "tools/call":
                text = message["params"]["arguments"].get("text", "")
                content = [{"type": "text", "text": f"echo: {text}"}]
                return json_answer({"id": message["id"], "result": {"content": content}})
            case _:
                return json_answer(_error(message, -32601, "Method not found"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: FaultyHttp
    timeout = 10

    def setup(self) -> None:
        super().setup()
        self.server_of.connections.add(self.connection)

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has gone
            super().handle()

    def finish(self) -> None:
        self.server_of.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._serve(json.loads(body) if body else {})

    def do_GET(self) -> None:
        self._note("GET", {})
        self._send(Answer(405))

    def do_DELETE(self) -> None:
        self._note("DELETE", {})
        self._send(Answer(200))

    def _serve(self, message: Json) -> None:
        self._send(self.server_of.answer(self._note("POST", message)))

    def _note(self, verb: str, message: Json) -> Request:
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(verb, self.path, headers, message)
        self.server_of.requests.append(request)
        return request

    def _send(self, answer: Answer) -> None:
        if answer.hang:
            self.server_of.released.wait()
            self.close_connection = True
            return
        if answer.drop:
            self.close_connection = True
            return
        try:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body) + answer.cut))
            self.end_headers()
            self.wfile.write(answer.body)
        except OSError:  # the client has gone
            self.close_connection = True
        if answer.cut:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        """Say nothing."""


def _error(message: Json, code: int, text: str) -> Json:
    return {"id": message.get("id"), "error": {"code": code, "message": text}}
