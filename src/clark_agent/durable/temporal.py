"""Runs in Temporal: workers on any machine, and a handle to each run.

A worker:

    worker = Worker(client, task_queue="agents", plugins=[ClarkPlugin(store, agents=[support])])

A caller, such as a web server:

    run = await start(client, support, "Refund order 7", id="order-7", task_queue="agents")
    result = await run.result()

A run is a workflow with the same id. The workflow has one activity, which calls
`clark_agent.run_log.advance`. The log is the journal, so the history of the workflow stays small,
whatever the run does, and a deploy may change agents in the middle of runs. While the run is
suspended, no activity runs: the workflow waits for a decision, an event or a time.

- If a worker dies, the run is resumed by another one, when the heartbeat timeout is over.
- If a worker is shut down (``Worker.shutdown``, which a host calls on SIGTERM), it lets its runs
  go, and others resume them at once. A frozen worker that goes on too late lets its runs go too.
- A run that has failed is not repeated. What another deploy or a database that comes back can cure
  (an agent or a tool is missing, the store cannot be reached) is tried again for ever, at most once
  a minute. `RunHandle.problem` says what is wrong.
- If a workflow is cancelled, its run is aborted. If it is terminated, its run is left as it is, and
  goes on when it is started again.

A decision that was recorded with `clark_agent.run_log.decide`, without a handle, is found when the
workflow polls: after a minute, then after two, four, … up to an hour. `RunHandle.wake`, or the
signal ``wake`` to the workflow, makes it look at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clark_agent._extras import load_extra
from clark_agent.agent import Agent
from clark_agent.errors import ConfigError
from clark_agent.run_log.resume import config_with_log
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog

load_extra("temporalio", "temporal", "clark_agent.durable.temporal")

from temporalio.plugin import SimplePlugin  # noqa: E402

from clark_agent.durable._temporal.activities import Activities  # noqa: E402
from clark_agent.durable._temporal.handle import RunHandle, handle, start  # noqa: E402
from clark_agent.durable._temporal.names import name_of  # noqa: E402
from clark_agent.durable._temporal.remote import RemoteAgentTool, remote_agent_tool  # noqa: E402
from clark_agent.durable._temporal.workflow import ClarkRun  # noqa: E402

__all__ = [
    "ClarkPlugin",
    "ClarkRun",
    "RemoteAgentTool",
    "RunHandle",
    "handle",
    "remote_agent_tool",
    "start",
]


class ClarkPlugin(SimplePlugin):
    """Makes a Temporal worker run agents, which are found by their names.

    ``deps`` are the dependencies of the tools, or a function, plain or async, of the id of the run
    that returns them. All workers of a task queue use the same store.

    A worker needs a slot for each run that it works on (``max_concurrent_activities``), and none
    for those that are suspended. A tool that blocks the event loop for longer than the heartbeat
    timeout loses its run.

    Raises `ConfigError` if an agent has no name, two have the same, or one logs to another store.
    """

    def __init__(
        self,
        store: RunStore | RunLog,
        agents: Iterable[Agent[Any, Any]],
        *,
        deps: Any = None,
    ) -> None:
        found: dict[str, Agent[Any, Any]] = {}
        for agent in agents:
            name = name_of(agent)
            if name in found:
                raise ConfigError(f"two agents have the name {name!r}: give each its own name")
            config_with_log(agent.config, store)
            found[name] = agent
        made = Activities(store, found, deps)
        super().__init__(
            "clark_agent.ClarkPlugin",
            workflows=[ClarkRun],
            activities=[made.advance, made.decide, made.send, made.settle],
        )
