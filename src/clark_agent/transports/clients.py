"""An SDK's client for each event loop, and what to say when the SDK is not there.

A client keeps connections, and these belong to the loop they were opened on: a transport that is
used from ``asyncio.run`` twice, or by `clark_agent.run_sync`, needs a new client each time.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from clark_agent.errors import ConfigError

__all__ = ["LoopLocal", "MissingKeyError", "api_key_from", "is_secret", "load_sdk", "secrets_in"]

T = TypeVar("T")


def load_sdk(module: str, extra: str, needed_by: str) -> ModuleType:
    """The provider's package; a `ConfigError` says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package is there and lacks something itself
        raise ConfigError(
            f"{needed_by} needs the package {module}: pip install 'clark-agent[{extra}]'"
        ) from None


class MissingKeyError(ConfigError):
    """No key was given, and none of the ``variables`` is set."""

    def __init__(self, needed_by: str, variables: tuple[str, ...]) -> None:
        names = " or ".join(variables)
        super().__init__(f"{needed_by} needs a key: set {names}, or pass api_key")
        self.needed_by = needed_by
        self.variables = variables


def api_key_from(given: str | None, variables: tuple[str, ...], needed_by: str) -> str:
    """The key that was given, or the first of the environment variables that is set."""
    for value in (given, *[os.environ.get(name) for name in variables]):
        if value and value.strip():
            return value.strip()
    raise MissingKeyError(needed_by, variables)


_SECRET = re.compile(
    r"authorization|cookie|header|passw|passphrase|secret|credential|bearer|"
    r"keys?$|token$|(^|[^a-z])auth$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a header or a field of that name holds what nobody should see."""
    return _SECRET.search(name) is not None


def secrets_in(headers: Mapping[str, str] | None) -> list[str]:
    """What of the headers must not be told: the values, and of ``Bearer …`` also the last word.

    What is too short for a key is none, and would turn up in every other text.
    """
    found: list[str] = []
    for name, value in (headers or {}).items():
        shortest = 4 if is_secret(name) else 8
        found += [word for word in {value.strip(), *value.split()[-1:]} if len(word) >= shortest]
    return found


class LoopLocal(Generic[T]):
    """One object for each event loop, made when first needed and closed with its loop.

    What holds it is an async generator, because that is what a loop closes before it ends.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[Any]]) -> None:
        self._make = make
        self._close = close
        self._kept: WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[T, None]]
        ] = WeakKeyDictionary()

    async def get(self) -> T:
        """The object of the running loop."""
        loop = asyncio.get_running_loop()
        kept = self._kept.get(loop)
        if kept is None:
            # A loop that was closed without closing its generators is held by its own keeper.
            for gone in [other for other in self._kept if other.is_closed()]:
                del self._kept[gone]
            keeper = self._keep()
            kept = self._kept[loop] = (await anext(keeper), keeper)
        return kept[0]

    async def aclose(self) -> None:
        """Close the object of the running loop, if there is one."""
        kept = self._kept.pop(asyncio.get_running_loop(), None)
        if kept is not None:
            await kept[1].aclose()

    async def _keep(self) -> AsyncGenerator[T, None]:
        loop = asyncio.get_running_loop()
        value = self._make()
        try:
            yield value
        finally:
            # A generator holds the loop that it belongs to, so that the entry would hold its key.
            self._kept.pop(loop, None)
            await self._close(value)
