"""What a tracer, a processor or an exporter raises stays here: it must not touch the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

__all__ = ["PASSING", "guarded", "report"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

PASSING = (KeyboardInterrupt, SystemExit)
"""What ends the process. A cancellation of the run cannot arrive in a plain function."""

_reported: set[str] = set()


def guarded(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T | None]:
    """The method, which returns None if it raises. The first failure of each is a warning."""
    name = method.__qualname__

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return method(self, *args, **kwargs)
        except PASSING:
            raise
        except (
            BaseException
        ):  # a panic of an extension, a CancelledError of a future: not the run's
            report(name)
            return None

    return call


def report(name: str) -> None:
    """Log the exception that is handled: as a warning if it is the first one there."""
    level = logging.DEBUG if name in _reported else logging.WARNING
    _reported.add(name)
    logger.log(level, "tracing failed in %s; the run continues", name, exc_info=True)
