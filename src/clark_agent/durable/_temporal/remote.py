"""Agents whose workers poll another task queue, as tools."""

from __future__ import annotations

from typing import Any

from clark_agent.agent import Agent
from clark_agent.durable._temporal.names import REMOTE, name_of
from clark_agent.durable._transfer import carried_messages
from clark_agent.engine.arguments import prompt_messages
from clark_agent.errors import ConfigError, ToolSuspended
from clark_agent.tools import FunctionTool, ToolContext, ToolResult

__all__ = ["RemoteAgentTool", "remote_agent_tool"]


class RemoteAgentTool(FunctionTool[..., Any]):
    """See `remote_agent_tool`."""

    agent: Agent[Any, Any]


def remote_agent_tool(
    name: str,
    description: str,
    agent: Agent[Any, Any],
    *,
    task_queue: str,
    expires_in: float | None = None,
) -> RemoteAgentTool:
    """A tool that gives a task to an agent whose workers poll another task queue.

    The run of that agent is a workflow of its own, with the id ``run/turn/position`` of the call.
    The run that asks is suspended until it has ended, so it holds no worker. If the other run is
    suspended too, decide its requests with a handle to it. It has its own budget, and its tokens
    are in the details of the result, not in the ``tree_usage`` of the run that asks; if that is
    aborted, so is it. All workers use the same store.
    """
    agent_name = name_of(agent)
    if not task_queue:
        raise ConfigError(f"remote_agent_tool: task_queue must be a text, not {task_queue!r}")

    async def ask(task: str, ctx: ToolContext) -> ToolResult:
        """Give a task to an agent.

        Args:
            task: What to do, with all that is needed to do it. Nothing else is known there.
        """
        raise ToolSuspended(
            {
                "kind": REMOTE,
                "agent": agent_name,
                "task_queue": task_queue,
                "prompts": carried_messages(prompt_messages(task, agent.config)),
            },
            expires_in=expires_in,
        )

    made = RemoteAgentTool(ask, name=name, description=description)
    made.agent = agent
    made.idempotent = True
    return made
