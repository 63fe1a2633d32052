"""Loads the packages of optional extras when they are first used."""

from __future__ import annotations

import importlib
from types import ModuleType

from clark_agent.errors import ConfigError

__all__ = ["load_extra"]


def load_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import the package of an extra. Raises `ConfigError` that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package is installed, but one of its own imports is missing
        raise ConfigError(
            f"{needed_by} needs the package {module}: pip install 'clark-agent[{extra}]' (in a "
            f"checkout: pip install '.[{extra}]')"
        ) from None
