"""What a plain function returns when callers await it and there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, cast

__all__ = ["FINISHED"]


class _Finished:
    """Can be awaited any number of times and never waits, without a frame of its own."""

    __slots__ = ()
    __await__ = ().__iter__


FINISHED: Final = cast("Awaitable[None]", _Finished())
