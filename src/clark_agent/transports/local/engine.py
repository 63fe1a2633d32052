"""llama.cpp inside this process: loads a file of weights and continues text.

`xllamacpp` contains llama.cpp with its server, which caches the prompts that it has processed: of a
prompt with the same beginning, only the rest is processed. Several calls may run at once, each in
its own thread; the model serves them in turns, token by token. They share one window, and a call
that exceeded it would make others fail. A call that may not fit therefore waits for earlier ones.

Facts about `xllamacpp`:

- Loading holds the interpreter lock for a second or two, so it happens when a transport is created.
- It installs its own handlers for SIGINT and SIGTERM. The previous ones are restored at once;
  otherwise Ctrl-C would no longer reach Python.
- It always listens on a loopback port. A random, unpublished key blocks all access; this package
  does not use the port.
- A call that runs while the interpreter exits would crash the process. All calls are therefore
  stopped first at exit.
- Its threads busy-wait: with more threads than free cores a token takes many times longer. One
  thread is the default.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import secrets
import signal
import struct
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import msgspec
from msgspec import Struct

from clark_agent._extras import load_extra
from clark_agent.errors import ConfigError
from clark_agent.transports.http.request import with_extras

__all__ = ["Engine", "EngineSettings", "has_chat_template", "load_engine"]

_NEEDED_BY = "the local model"
# A call can be stopped after each batch of this many prompt tokens: about half a second on a slow
# core.
_BATCH = 128
_SLOTS = 4
_EXIT_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 0.1
# A file's metadata, vocabulary included, is in its first few megabytes.
_HEADER_BYTES = 64 * 1024 * 1024

OnEvent = Callable[[bytes], bool]
"""Receives an event as JSON. Returns True to stop the call."""


class EngineSettings(Struct, frozen=True):
    """The settings of an engine. Transports with equal settings share one."""

    path: Path
    window: int
    """How many tokens a prompt and its answer may have together."""
    threads: int
    chat_template: str | None = None


class Engine:
    """A model in memory. Thread-safe."""

    def __init__(self, settings: EngineSettings) -> None:
        xllamacpp = load_extra("xllamacpp", "local", _NEEDED_BY)
        self.settings = settings
        self._idle = threading.Condition()
        self._needs: list[int] = []  # how many tokens each running call may need
        self._is_closing = False
        try:
            with _signals_kept():
                self._server = xllamacpp.Server(_parameters(xllamacpp, settings))
        except RuntimeError as error:
            also = " that chat_template is valid," if settings.chat_template else ""
            raise ConfigError(
                f"llama.cpp cannot load {settings.path} ({error}): check that it is a complete "
                f"GGUF file,{also} and that there is memory for a window of {settings.window}"
            ) from None
        # The server's loop may not run yet, and would then miss a request to stop. A completed
        # call proves that it runs.
        self.complete({"prompt": "Hi", "max_tokens": 1}, lambda _: False)
        _engines.add(self)

    def complete(self, body: dict[str, Any], on_event: OnEvent) -> None:
        """Continue a text. Blocks until it has ended, or ``on_event`` returns True."""
        self._ask("handle_completions", body, on_event)

    def chat(self, body: dict[str, Any], on_event: OnEvent) -> None:
        """Continue a conversation, written with the model's chat template. Blocks as `complete`."""
        self._ask("handle_chat_completions", body, on_event)

    def close(self) -> None:
        """Stop all calls and wait until they have ended, at most ten seconds."""
        with self._idle:
            self._is_closing = True
            self._idle.wait_for(lambda: not self._needs, _EXIT_SECONDS)

    def _ask(self, method: str, body: dict[str, Any], on_event: OnEvent) -> None:
        asked = msgspec.json.encode(with_extras(body, None))

        def on_event_or_close(event: bytes) -> bool:
            return on_event(event) or self._is_closing

        # A token has at least one byte, so bytes are an upper bound. An answer without a limit may
        # need the whole window.
        window = self.settings.window
        prompt = body["prompt"].encode(errors="replace") if "prompt" in body else asked
        need = min(len(prompt) + body.get("max_tokens", window), window)
        if not self._waits_for_room(need, on_event_or_close):
            return
        try:
            getattr(self._server, method)(asked, on_event_or_close)
        finally:
            with self._idle:
                self._needs.remove(need)
                self._idle.notify_all()

    def _waits_for_room(self, need: int, on_event: OnEvent) -> bool:
        """Reserve ``need`` tokens of the window as soon as they are free.

        Returns False if the call was stopped first.
        """
        with self._idle:
            while not on_event(b"{}"):
                if not self._needs or sum(self._needs) + need <= self.settings.window:
                    self._needs.append(need)
                    return True
                self._idle.wait(_LOOK_AGAIN_SECONDS)
        return False


def _parameters(xllamacpp: Any, settings: EngineSettings) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = os.fspath(settings.path)
    if settings.chat_template is not None:
        params.chat_template = settings.chat_template
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [secrets.token_hex(16)]
    params.cors_origins = ""
    params.n_threads_http = 1
    params.ui = False
    params.cpuparams.n_threads = settings.threads
    params.cpuparams_batch.n_threads = settings.threads
    params.n_ctx = settings.window
    params.n_parallel = _SLOTS
    params.kv_unified = True  # a single call may use the whole window
    params.swa_full = True  # otherwise no part of a processed prompt can be reused
    params.n_batch = params.n_ubatch = _BATCH
    params.cache_ram_mib = 0
    params.fit_params = False
    params.warmup = False
    params.verbosity = -1
    return params


# --- shared engines ----------------------------------------------------------------------------

_engines: WeakSet[Engine] = WeakSet()
_shared: WeakValueDictionary[EngineSettings, Engine] = WeakValueDictionary()
_loading = threading.Lock()


def load_engine(settings: EngineSettings) -> Engine:
    """Return the engine with these settings; load it if needed. Raises `ConfigError`."""
    with _loading:
        engine = _shared.get(settings)
        if engine is None:
            engine = _shared[settings] = Engine(settings)
        return engine


@atexit.register
def _close_all() -> None:
    for engine in list(_engines):
        engine.close()


@contextmanager
def _signals_kept() -> Generator[None]:
    """Restore the handlers of SIGINT and SIGTERM on exit.

    Uses the C library, because Python sets handlers only in the main thread and does not notice
    that C code replaced its own.
    """
    if sys.platform == "win32":
        yield
        return
    libc = ctypes.CDLL(None)
    kept = {number: ctypes.create_string_buffer(512) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, action in kept.items():
        libc.sigaction(int(number), None, action)
    try:
        yield
    finally:
        for number, action in kept.items():
            libc.sigaction(int(number), action, None)


# --- files of weights --------------------------------------------------------------------------


def has_chat_template(path: Path) -> bool:
    """Whether a file of weights has a chat template.

    Raises `ConfigError` if it cannot be read or is not a GGUF file.
    """
    key = b"tokenizer.chat_template"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            is_model = data[:4] == b"GGUF"
            found = data.find(struct.pack("<Q", len(key)) + key, 0, _HEADER_BYTES) >= 0
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model {path}: {error}") from None
    if not is_model:
        raise ConfigError(f"{path} is not a GGUF file: it does not start with GGUF")
    return found
