"""The page of runs on PostgreSQL: lists, pages, search, and a run that is followed and steered."""

from __future__ import annotations

import asyncio

import pytest

from clark_agent import AgentContext, LoopConfig, RunIdentity, UserMessage, run, tool
from clark_agent.run_log import RunLog
from clark_agent.run_log.postgres import PostgresStore
from clark_agent.testing import ScriptedStream, call, say
from tests.view.site import site

pytestmark = pytest.mark.slow


async def test_the_page_on_postgres(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    gate = asyncio.Event()

    @tool
    async def wait(why: str) -> str:
        """Wait."""
        await gate.wait()
        return "x" * 300_000

    config = LoopConfig(
        stream=ScriptedStream([call("wait", why="bread"), say("The baker is here.")]),
        tools=[wait],
        run_log=RunLog(store, live=True, mail_every=0.02),
        model_id="gpt-5",
    )
    context = AgentContext("You bake.", identity=RunIdentity("r"))
    running = asyncio.create_task(run(UserMessage("Bake bread."), context, config))
    try:
        async with site(store, can_write=True, where="a database") as page:
            while not (await page.get("runs"))["total"]:
                pass
            assert (await page.get("session"))["search"] == "full_text"
            seqs: list[int] = []
            kinds: list[str] = []
            async with page.events("r") as events:
                async for name, _, data in events:
                    if name == "item":
                        seqs.append(data["seq"])
                        kinds.append(data["kind"])
                    if name == "item" and data["kind"] == "tool_started":
                        await page.post("steer", {"message": "Rye bread."}, run="r")
                    if name == "item" and data["kind"] == "steered":
                        gate.set()
            assert kinds[-1] == "ended"
            assert seqs == list(range(len(seqs)))
            assert [item["seq"] for item in await page.every_item("r", limit=2)] == seqs
            view = await page.get("run", run="r")
            assert (view["run"]["status"], view["turns"]) == ("done", 2)
            before = await page.get("items", run="r", before=seqs[-1], limit=3)
            assert [item["seq"] for item in before["items"]] == seqs[-4:-1]
            request = await page.get("request", run="r", turn=2)
            assert request["messages"][-1]["blocks"][0]["text"]["text"] == "Rye bread."
            page.reading.catalog.refresh(force=True)
            (found,) = (await page.get("runs", q="BAKER"))["runs"]
            assert found["snippet_seq"] == seqs[kinds.index("answer", kinds.index("answer") + 1)]
        await running
    finally:
        gate.set()
        await asyncio.wait([running])
        await asyncio.to_thread(store.close)
