"""An awaitable for plain functions whose result is awaited, if there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, cast

__all__ = ["FINISHED"]


class _Finished:
    """Can be awaited any number of times, never waits, and needs no frame."""

    __slots__ = ()
    __await__ = ().__iter__


FINISHED: Final = cast("Awaitable[None]", _Finished())
