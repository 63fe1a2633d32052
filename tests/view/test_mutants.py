"""Faults of the page of runs change what it answers."""

from __future__ import annotations

import httpx2
import pytest

from clark_agent import Agent, RunIdentity, tool
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import SUSPEND, ApprovalGate
from clark_agent.view import app as page
from tests.model.faults import check, promises_of
from tests.view.site import TOKEN


@tool
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


async def requests() -> object:
    """What several requests to the page get, while a run waits for a person."""
    store = MemoryStore()
    agent = Agent(
        ScriptedStream([call("pay", amount=7)]),
        tools=[pay],
        plugins=[ApprovalGate(SUSPEND)],
        run_log=RunLog(store),
    )
    await agent.run("Go.", identity=RunIdentity("r"))
    answers: list[object] = []
    for can_write in (False, True):
        app = page.view_app(store, token=TOKEN, can_write=can_write)
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers.append((await client.get("/api/session")).status_code)
            await client.get("/", params={"token": TOKEN})
            csrf = (await client.get("/api/session")).json()["csrf"]
            (waiting,) = (await client.get("/api/waiting")).json()["waiting"]
            answers.append((bool(csrf), waiting["arguments"] is None))
            for name, value in (("host", "evil.example"), ("sec-fetch-site", "cross-site")):
                response = await client.get("/api/runs", headers={name: value})
                answers.append(response.status_code)
    return answers


@pytest.mark.parametrize("promise", promises_of("page"))
def test_a_fault_changes_what_the_page_answers(promise: str) -> None:
    check(promise, requests)
