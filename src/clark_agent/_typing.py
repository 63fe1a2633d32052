"""Type variables with defaults, which Python before 3.13 has for type checkers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["DefaultsToAny", "DepsT", "DepsT_co", "DepsT_contra", "OutputT", "OutputT_co"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    DepsT = TypeVar("DepsT", default=Any)
    DepsT_co = TypeVar("DepsT_co", default=Any, covariant=True)
    DepsT_contra = TypeVar("DepsT_contra", default=Any, contravariant=True)
    OutputT = TypeVar("OutputT", default=Any)
    OutputT_co = TypeVar("OutputT_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    DepsT = TypeVar("DepsT")
    DepsT_co = TypeVar("DepsT_co", covariant=True)
    DepsT_contra = TypeVar("DepsT_contra", contravariant=True)
    OutputT = TypeVar("OutputT")
    OutputT_co = TypeVar("OutputT_co", covariant=True)


class DefaultsToAny:
    """A generic class whose last parameters may be left out at run time too. They are `Any`."""

    if not TYPE_CHECKING:

        def __class_getitem__(cls, given):
            given = given if isinstance(given, tuple) else (given,)
            missing = len(cls.__parameters__) - len(given)
            return super().__class_getitem__((*given, *[Any] * missing))
