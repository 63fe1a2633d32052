"""A receiver of OTLP over HTTP, on this machine: it decodes what exporters send."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["Receiver"]


class Receiver:
    """Use it as a context manager. One that ``hangs`` answers only when it is closed."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.spans: list[Any] = []
        self.asked = threading.Event()
        """Set with the first request."""
        self._answer = threading.Event()
        if not hangs:
            self._answer.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.asked.set()
                receiver._answer.wait()
                receiver._take(body)
                try:
                    self.send_response(200)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                except OSError:  # the exporter did not wait
                    pass

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def endpoint(self) -> str:
        """Where to send traces."""
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def answer(self) -> None:
        """Answer all requests from now on."""
        self._answer.set()

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
