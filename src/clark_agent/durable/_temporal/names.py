"""The names by which workers, workflows and callers know each other.

They are in the histories of workflows that wait for weeks: do not change them.
"""

from __future__ import annotations

from typing import Any, Final

from clark_agent.agent import Agent
from clark_agent.errors import ConfigError

__all__ = ["ADVANCE", "CANCELLED", "DECIDE", "REMOTE", "SEND", "SETTLE", "WORKFLOW", "name_of"]

WORKFLOW: Final = "ClarkRun"
ADVANCE: Final = "clark_agent_advance"
DECIDE: Final = "clark_agent_decide"
SEND: Final = "clark_agent_send"
SETTLE: Final = "clark_agent_settle"
REMOTE: Final = "temporal_agent"
"""The kind of request that waits for a run on another task queue."""
CANCELLED: Final = "the workflow was cancelled"


def name_of(agent: Any) -> str:
    """The name by which workers find an agent. Raises `ConfigError` if it has none."""
    if not isinstance(agent, Agent):
        raise ConfigError(f"an Agent is needed, not {type(agent).__name__}")
    if agent.name is None:
        raise ConfigError("the agent has no name, and workers find agents by it: Agent(name=...)")
    return agent.name
