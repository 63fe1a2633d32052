"""What runs an agent for the page: forks, resumed runs and replays.

`RunAgents` is the interface; `AgentRuns` is that of one `Agent`.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from clark_agent.agent import Agent
from clark_agent.config import LoopConfig
from clark_agent.errors import ConfigError
from clark_agent.run_log.records import RunBegan
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog

__all__ = ["AgentRuns", "RunAgents", "Setup"]


class Setup(Struct, frozen=True):
    """What a run needs."""

    config: LoopConfig
    deps: Any = None


class RunAgents(Protocol):
    """Provides the agent for runs that the page starts.

    Contract: raises `ConfigError` with a sentence for people if that is not possible. If it has an
    async method ``aclose``, that is called when the server ends.
    """

    agent: str | None
    """What to call the agent; None if there is none, so that nothing can be run."""
    model: str | None
    """The model that it uses by default; None if that depends on the run."""

    def for_run(self, store: RunStore, model: str | None) -> Setup:
        """Return what a run needs that is logged in this store; ``model`` is another model."""
        ...

    def for_replay(self, began: RunBegan) -> Setup:
        """Return what a run needs that is only replayed: no model and no tool is called."""
        ...

    def check_resume(self, run_id: str) -> None:
        """Raise `ConfigError` if others go on with this outermost run, such as the workers of a
        queue.
        """
        ...


class AgentRuns:
    """Runs of one agent."""

    def __init__(self, agent: Agent[Any, Any], *, deps: Any = None) -> None:
        if not isinstance(agent, Agent):
            raise ConfigError(f"view_app: agent must be an Agent, not {type(agent).__name__}")
        agent.check_deps(deps)
        self._agent = agent
        self._deps = deps
        self.agent: str | None = agent.name or "agent"
        self.model = agent.config.model_id

    def for_run(self, store: RunStore, model: str | None) -> Setup:
        """Return what a run needs."""
        agent = self._agent if model is None else self._agent.replace(model=model, model_id=model)
        config, log = agent.config, agent.config.run_log
        if not isinstance(log, RunLog) or log.store is not store:
            config = config.replace(run_log=RunLog(store, live=True))
        return Setup(config, self._deps)

    def for_replay(self, began: RunBegan) -> Setup:
        """Return what a replay needs."""
        return Setup(self._agent.config, self._deps)

    def check_resume(self, run_id: str) -> None:
        """Any run may be resumed here."""
