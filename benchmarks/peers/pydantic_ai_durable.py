"""Pydantic AI on DBOS and on Temporal, for `benchmarks.distributed`: prints its figures as JSON.

Both run the loop of the agent as a workflow, as the documentation shows: each request to the model
and each tool call is a step of DBOS, or an activity of Temporal. The model is a `FunctionModel`.
"""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from time import perf_counter

from dbos import DBOS
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from temporalio import workflow

TURNS, RUNS, SHORT = 50, 100, 5
NO_LIMIT = UsageLimits(request_limit=None)


def calling(turns):
    def answer(messages, _info):
        turn = (len(messages) - 1) // 2
        if turn < turns:
            return ModelResponse([ToolCallPart("echo", {"x": 1, "s": "a"}, f"c{turn}")])
        return ModelResponse([TextPart("done")])

    return FunctionModel(answer)


async def echo(x: int, s: str) -> str:
    """Say it again."""
    return "ok: " + s


async def measured(begin):
    await begin("warm", "short")
    began = perf_counter()
    await begin("alone", "long")
    alone = perf_counter() - began
    began = perf_counter()
    await asyncio.gather(*[begin(f"run-{number}", "short") for number in range(RUNS)])
    together = perf_counter() - began
    return {"ms_turn": 1000 * alone / TURNS, "turns_s": RUNS * SHORT / together}


@asynccontextmanager
async def on_dbos(url):
    from pydantic_ai.durable_exec.dbos import DBOSAgent

    DBOS(config={"name": "peer", "system_database_url": url})
    step = DBOS.step()(echo)
    agents = {
        name: DBOSAgent(Agent(calling(turns), tools=[step], name=name))
        for name, turns in (("long", TURNS), ("short", SHORT))
    }
    DBOS.launch()

    async def begin(run_id, name):
        result = await agents[name].run("go", usage_limits=NO_LIMIT)
        assert result.output == "done"

    try:
        yield begin
    finally:
        DBOS.destroy()


if "temporal" in sys.argv:
    from pydantic_ai.durable_exec.temporal import AgentPlugin, PydanticAIPlugin, TemporalAgent

    AGENTS = {
        name: TemporalAgent(Agent(calling(turns), tools=[echo], name=name))
        for name, turns in (("long", TURNS), ("short", SHORT))
    }

    @workflow.defn
    class Long:
        @workflow.run
        async def run(self) -> str:
            return (await AGENTS["long"].run("go", usage_limits=NO_LIMIT)).output

    @workflow.defn
    class Short:
        @workflow.run
        async def run(self) -> str:
            return (await AGENTS["short"].run("go", usage_limits=NO_LIMIT)).output

    @asynccontextmanager
    async def on_temporal(address):
        from temporalio.client import Client
        from temporalio.worker import UnsandboxedWorkflowRunner, Worker

        client = await Client.connect(address, plugins=[PydanticAIPlugin()])
        flows = {"long": Long, "short": Short}

        async def begin(run_id, name):
            done = await client.execute_workflow(
                flows[name].run, id=f"peer-{os.getpid()}-{run_id}", task_queue="peer"
            )
            assert done == "done"

        async with Worker(
            client,
            task_queue="peer",
            workflows=[Long, Short],
            plugins=[AgentPlugin(agent) for agent in AGENTS.values()],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ):
            yield begin


async def main(subject, url, address):
    async with on_dbos(url) if subject == "dbos" else on_temporal(address) as begin:
        print(json.dumps(await measured(begin)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
