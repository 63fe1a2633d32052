"""Loads an agent of the user's own: ``--agent module:name``."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from inspect import isroutine, signature
from typing import Any

from clark_agent._text import describe
from clark_agent.agent import Agent
from clark_agent.errors import ConfigError
from clark_agent.tools.repair import close_match

__all__ = ["load_agent", "load_agents", "load_deps"]


def load_agent(reference: str) -> Agent[Any, Any]:
    """Return the agent that ``module:name`` names: an `Agent`, or a function that returns one."""
    found = _called("--agent", reference)
    if not isinstance(found, Agent):
        raise ConfigError(
            f"--agent {reference}: expected an Agent or a function that returns one, but got "
            f"{type(found).__name__}"
        )
    return found


def load_agents(reference: str) -> list[Agent[Any, Any]]:
    """Return the agents that ``module:name`` names: one, a list of them, or a function's result."""
    found = _called("--agents", reference)
    agents: list[Any] = list(found) if isinstance(found, (list, tuple)) else [found]
    for agent in agents:
        if not isinstance(agent, Agent):
            raise ConfigError(
                f"--agents {reference}: expected an Agent, a list of them, or a function that "
                f"returns one of these, but got {type(agent).__name__}"
            )
    return agents


@cache
def load_deps(reference: str) -> Any:
    """Return the dependencies that ``module:name`` names: an object, or a function's result."""
    return _called("--deps", reference)


def _called(option: str, reference: str) -> Any:
    found = _load(option, reference)
    if not (isroutine(found) or isinstance(found, type)):
        return found
    try:
        signature(found).bind()
    except TypeError as error:
        raise ConfigError(f"{option} {reference}: call without arguments fails: {error}") from None
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{option} {reference} raised {describe(error)}") from error


def _load(option: str, reference: str) -> Any:
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{option} {reference}: write module:name, as in shop.agents:support")
    if module_name.endswith(".py"):
        shown = module_name.removesuffix(".py").replace(os.sep, ".")
        raise ConfigError(f"{option} {reference}: name the module, not the file: {shown}:{name}")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{option} {reference}: cannot import {module_name}: {describe(error)}"
        ) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            close = close_match(part, [n for n in dir(found) if not n.startswith("_")])
            hint = "" if close is None else f"; did you mean {close!r}?"
            raise ConfigError(
                f"{option} {reference}: {module_name} has no {name!r}{hint}"
            ) from None
    return found
