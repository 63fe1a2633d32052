"""A model inside this process: no server, no key, no network.

    stream = connect("local:")                        # the packaged model, for a first try
    stream = connect("local:/models/qwen3-4b.gguf")   # any file of weights

The model runs in llama.cpp, from the package xllamacpp. Weights with a chat template were trained
to chat, and often to call tools: llama.cpp applies the template and parses the calls. Weights
without one only continue text, and are guided step by step, as the packaged model is (see
`clark_agent.transports.local.packaged`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from clark_agent.clock import Clock
from clark_agent.errors import ConfigError
from clark_agent.stream import OutputModeName, StreamErrorKind, StreamRequest
from clark_agent.transports.dialects import COMPATIBLE
from clark_agent.transports.http.base import Transport
from clark_agent.transports.http.request import (
    is_set,
    sendable,
    with_extras,
    with_schema_in_prompt,
)
from clark_agent.transports.http.response import Answer, Failure
from clark_agent.transports.http.retry import RetryPolicy, Timeouts
from clark_agent.transports.local import packaged
from clark_agent.transports.local.engine import (
    Engine,
    EngineSettings,
    has_chat_template,
    load_engine,
)
from clark_agent.transports.openai_chat import ChatDecoder, chat_messages, chat_tool

__all__ = ["LocalModel"]

_DIALECT = replace(COMPATIBLE, name="local model", takes_files=(), takes_extra_content=False)

_SMALLEST_WINDOW = 512
_LARGEST_WINDOW = 16 * 1024 * 1024
_MOST_THREADS = 512  # llama.cpp's limit; with more threads it ends the process

_Body: TypeAlias = dict[str, Any] | packaged.Case


class LocalModel(Transport[bytes]):
    """A model in this process. The constructor loads it, which blocks for a second or two.

    ``path`` is a GGUF file; None is the packaged model. ``window`` is how many tokens a
    conversation and its answer may have together. More ``threads`` than free cores make it slower,
    not faster. ``chat_template`` (Jinja) replaces the template in the file. Transports with the
    same settings share one model in memory, and may use it concurrently.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        window: int = 8192,
        threads: int = 1,
        chat_template: str | None = None,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        clock: Clock | None = None,
    ) -> None:
        _check("window", window, _SMALLEST_WINDOW, _LARGEST_WINDOW)
        _check("threads", threads, 1, _MOST_THREADS)
        template: Any = chat_template
        if template is not None and not (isinstance(template, str) and template.strip()):
            raise ConfigError(f"chat_template must be a Jinja template, not {template!r}")
        weights = packaged.weights() if path is None else _weights_at(path)
        name = packaged.NAME if path is None else weights.stem
        super().__init__(name, provider="local model", retry=retry, timeouts=timeouts, clock=clock)
        self.path = weights
        self.is_taught = chat_template is not None or has_chat_template(weights)
        """Whether the model has a chat template; otherwise it is guided step by step."""
        self.context_window = window
        """How many tokens a conversation can have."""
        self._settings = EngineSettings(weights, window, threads, chat_template)
        self._engine: Engine | None = load_engine(self._settings)

    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        """``native``; with a chat template, ``tool`` if there are tools."""
        return "tool" if has_tools and self.is_taught else "native"

    def encode(self, request: StreamRequest) -> _Body:
        """Return a conversation for the model's template, or the input of the guide without one."""
        if self.is_taught:
            return self._conversation(request)
        messages = sendable(request.messages, self.target, provider=self.provider)
        return packaged.case_of(messages, request)

    def _conversation(self, request: StreamRequest) -> dict[str, Any]:
        if is_set(request.provider_extras, "response_format"):
            request = replace(request, output_schema=None)
        elif request.tools:  # with a schema, llama.cpp allows no calls
            request = with_schema_in_prompt(request)
        body: dict[str, Any] = {
            "messages": chat_messages(request, _DIALECT, model=self.model, target=self.target),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        }
        if request.tools:
            body["tools"] = [chat_tool(tool) for tool in request.tools]
            if request.force_tool_call:
                body["tool_choice"] = "required"
        if request.max_output_tokens is not None:
            body["max_tokens"] = request.max_output_tokens
        if request.temperature is not None:
            body["temperature"] = request.temperature
        if (schema := request.output_schema) is not None:
            held_to = {"name": schema.name, "schema": schema.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": held_to}
        return with_extras(body, request.provider_extras)

    @asynccontextmanager
    async def _open(self, body: _Body) -> AsyncGenerator[AsyncIterator[bytes]]:
        if self._engine is None:
            self._engine = load_engine(self._settings)
        work = _Work(self._engine, body)
        try:
            yield work.pieces()
        finally:
            work.is_wanted = False

    def _decoder(self, answer: Answer) -> ChatDecoder:
        return ChatDecoder(answer, _DIALECT, self.model)

    def _failure(self, error: Exception) -> Failure:
        return Failure(StreamErrorKind.FATAL, f"the local model failed: {error}", cause=error)

    async def aclose(self) -> None:
        """Release the model. Its memory is freed when no other transport uses it.

        The next call loads it again.
        """
        self._engine = None


class _Work:
    """One call, in a separate thread, so that the event loop is not blocked.

    After a cancelled call, nothing waits for the thread. It stops at the next token.
    """

    def __init__(self, engine: Engine, body: _Body) -> None:
        self.is_wanted = True
        self._engine = engine
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        thread = threading.Thread(target=self._run, name="clark-agent local model", daemon=True)
        thread.start()

    async def pieces(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def _run(self) -> None:
        try:
            if isinstance(self._body, packaged.Case):
                packaged.guide(self._engine, self._body, self._emit, lambda: self.is_wanted)
            else:
                self._engine.chat(self._body, self._pass_on)
        except Exception as error:
            self._send(error)
        self._send(None)

    def _pass_on(self, event: bytes) -> bool:
        self._send(b"data: %b\n\n" % event)
        return not self.is_wanted

    def _emit(self, event: dict[str, Any]) -> None:
        self._send(b"data: %b\n\n" % msgspec.json.encode(event))

    def _send(self, piece: bytes | Exception | None) -> None:
        if not self.is_wanted:
            return
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the loop has closed
            self.is_wanted = False


# --- settings -----------------------------------------------------------------------------------


def _weights_at(given: str | Path) -> Path:
    try:
        path = Path(given).expanduser()
    except (TypeError, RuntimeError) as error:  # not a path, or an unknown home directory
        raise ConfigError(f"{given!r} is not the path of a GGUF file: {error}") from None
    if not path.is_file():
        raise ConfigError(
            f"no file {str(given)!r}: pass the path of a GGUF file, or no path for the packaged "
            f"model ({packaged.NAME})"
        )
    return path.resolve()


def _check(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} must be a number from {least} to {most}, not {value!r}")
