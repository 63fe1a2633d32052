"""Loads an agent of the user's own: ``--agent module:name``."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from inspect import isroutine
from typing import Any

from clark_agent.agent import Agent
from clark_agent.errors import ConfigError

__all__ = ["load_agent", "load_deps"]


def load_agent(reference: str) -> Agent[Any, Any]:
    """Return the agent that ``module:name`` names: an `Agent`, or a function that returns one."""
    found = _called(_load("--agent", reference))
    if not isinstance(found, Agent):
        raise ConfigError(
            f"--agent {reference}: expected an Agent or a function that returns one, but got "
            f"{type(found).__name__}"
        )
    return found


@cache
def load_deps(reference: str) -> Any:
    """Return the dependencies that ``module:name`` names: an object, or a function's result."""
    return _called(_load("--deps", reference))


def _called(found: Any) -> Any:
    return found() if isroutine(found) or isinstance(found, type) else found


def _load(option: str, reference: str) -> Any:
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{option} {reference}: write module:name, as in shop.agents:support")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{option} {reference}: cannot import {module_name}: {error}") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"{option} {reference}: {module_name} has no {name!r}") from None
    return found
