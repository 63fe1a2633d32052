"""Loads the packages of optional extras when they are first used."""

from __future__ import annotations

import importlib
from types import ModuleType

from clark_agent.errors import ConfigError

__all__ = ["how_to_install", "load_extra"]


def how_to_install(extra: str) -> str:
    """Say how to install an extra. There is no release: on PyPI the name may be a stranger's."""
    return f"pip install '.[{extra}]' in a checkout of clark-agent"


def load_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import the package of an extra. Raises `ConfigError` that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package is installed, but one of its own imports is missing
        raise ConfigError(
            f"{needed_by} needs the package {module}: {how_to_install(extra)}"
        ) from None
