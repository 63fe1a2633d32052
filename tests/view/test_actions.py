"""Acting on runs from the page: steer, cancel, decide, resume, fork and replay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from clark_agent import Agent, RunIdentity, tool
from clark_agent.run_log import JsonlStore, RunLog, RunStore, SqliteStore, fold
from clark_agent.testing import ScriptedStream, call, say
from clark_agent.toolkit.approval import ApprovalGate
from clark_agent.toolkit.ask import SUSPEND
from clark_agent.types import AssistantMessage
from tests.run_log.mailing import until
from tests.view.site import Site, site

pytestmark = pytest.mark.slow


class Shop:
    """An agent that pays, in a store. Paying needs an approval."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.paid: list[int] = []
        self.waiting = asyncio.Event()

        @tool
        async def pay(amount: int) -> str:
            """Pay an amount."""
            self.paid.append(amount)
            return f"paid {amount}"

        @tool
        async def wait() -> str:
            """Wait."""
            await self.waiting.wait()
            return "waited"

        self.tools: list[Any] = [pay, wait]

    def agent(self, steps: Sequence[Any], *, can_ask: bool = True) -> Agent[Any, Any]:
        gate = ApprovalGate(SUSPEND, needs_approval=lambda ctx: ctx.tool_call.name == "pay")
        return Agent(
            ScriptedStream(list(steps)),
            tools=self.tools,
            system_prompt="You keep a shop.",
            plugins=[gate] if can_ask else [],
            run_log=RunLog(self.store, live=True, mail_every=0.01),
            name="shop",
        )

    async def run(self, agent: Agent[Any, Any], run_id: str, prompt: str = "Pay it.") -> Any:
        return await agent.run(prompt, identity=RunIdentity(run_id, conversation_id="c"))


@pytest.fixture(params=["jsonl", "sqlite"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    jsonl = request.param == "jsonl"
    return Shop(JsonlStore(tmp_path) if jsonl else SqliteStore(tmp_path / "runs.db"))


@asynccontextmanager
async def writable(shop: Shop, agent: Agent[Any, Any] | None = None) -> AsyncGenerator[Site]:
    async with site(shop.store, can_write=True, agent=agent, by="ada") as page:
        yield page


def said(store: RunStore, run_id: str) -> list[str]:
    return [f"{m.role}: {m.plain_text}" for m in fold(store.load(run_id)).messages]


def is_over(store: RunStore, run_id: str) -> bool:
    return any(r.run_id == run_id and r.outcome == "done" for r in store.runs())


async def test_a_run_is_steered(shop: Shop) -> None:
    agent = shop.agent([call("wait"), say("I heard."), say("And now it is over.")])
    running = asyncio.create_task(shop.run(agent, "r"))
    await until(lambda: any(r.records > 3 for r in shop.store.runs()))
    async with writable(shop) as page:
        body = {"message": "Use the other account.", "when": "after_batch", "id": "m1"}
        first = await page.post("steer?run=r", body)
        again = await page.post("steer?run=r", body)
        assert (first["is_new"], again["is_new"]) == (True, False)
        later = await page.post("steer?run=r", {"message": "And now?", "when": "follow_up"})
        assert later["is_new"]
        await until(lambda: len(shop.store.mail("r")) == 2)
        await until(lambda: _kinds(shop, "r").count("steering_accepted") == 2)
        shop.waiting.set()
        await asyncio.wait([running])
        assert "user: Use the other account." in said(shop.store, "r")
        items = await page.every_item("r")
        steered = [item for item in items if item["kind"] == "steered"]
        assert [item["is_mail"] for item in steered] == [True, True]
        answer = await page.post("steer?run=r", {"message": "Too late."}, code=409)
        assert "has ended" in answer["message"]


def _kinds(shop: Shop, run_id: str) -> list[str]:
    records = shop.store.load(run_id).records
    return [str(record.entry.__struct_config__.tag) for record in records]


async def test_a_run_is_cancelled(shop: Shop) -> None:
    running = asyncio.create_task(shop.run(shop.agent([call("wait"), say("x")]), "r"))
    await until(lambda: any(r.records > 3 for r in shop.store.runs()))
    async with writable(shop) as page:
        await page.post("cancel?run=r", {"reason": "not needed"})
        await asyncio.wait([running])
        view = await page.get("run", run="r")
        assert view["run"]["status"] == "failed"
        assert "not needed" in view["error"]
    assert running.exception() is not None


async def test_what_waits_is_approved_and_the_run_goes_on(shop: Shop) -> None:
    steps = [call("pay", amount=7), say("It is paid.")]
    await shop.run(shop.agent(steps), "r")
    async with writable(shop, shop.agent(steps[1:])) as page:
        view = await page.get("run", run="r")
        assert view["run"]["status"] == "suspended"
        (request,) = view["waiting"]
        assert (request["tool_name"], request["needs"]) == ("pay", "permission")
        assert '"amount": 7' in request["arguments"]["text"]
        (same,) = (await page.get("waiting"))["waiting"]
        assert same["request_id"] == request["request_id"]
        body = {"request_id": request["request_id"], "decision": "allow"}
        done = await page.post("decide?run=r", body)
        assert done["waiting"] == []
        await until(lambda: is_over(shop.store, "r"))
        again = await page.post("decide?run=r", body, code=409)
        assert again["error"] == "already_decided"
        assert (await page.get("run", run="r"))["waiting"] == []
        items = await page.every_item("r")
        decided = next(item for item in items if item["kind"] == "decided")
        assert decided["by"] == "ada"
    assert shop.paid == [7]


async def test_other_decisions(shop: Shop) -> None:
    for number, (decision, value, paid) in enumerate(
        (
            ("deny", "too much", []),
            ("give_arguments", {"amount": 3}, [3]),
            ("give_result", "already paid", []),
        )
    ):
        run_id = f"r{number}"
        shop.paid.clear()
        steps = [call("pay", amount=7), say("So be it.")]
        await shop.run(shop.agent(steps), run_id)
        async with writable(shop, shop.agent(steps[1:])) as page:
            (request,) = (await page.get("run", run=run_id))["waiting"]
            body = {"request_id": request["request_id"], "decision": decision, "value": value}
            await page.post(f"decide?run={run_id}", body)
            await until(lambda run_id=run_id: is_over(shop.store, run_id))  # type: ignore[misc]
        assert shop.paid == paid
        text = "\n".join(said(shop.store, run_id))
        assert decision == "give_arguments" or str(value) in text


async def test_a_decision_without_an_agent_says_how_to_go_on(shop: Shop) -> None:
    await shop.run(shop.agent([call("pay", amount=7)]), "r")
    async with writable(shop) as page:
        session = await page.get("session")
        assert (session["can_write"], session["can_run"]) == (True, False)
        (request,) = (await page.get("run", run="r"))["waiting"]
        for value in (None, 3, "x"):
            wrong = {"request_id": request["request_id"], "decision": "give_arguments"}
            await page.post("decide?run=r", {**wrong, "value": value}, code=400)
        done = await page.post(
            "decide?run=r", {"request_id": request["request_id"], "decision": "allow"}
        )
        assert "clark-agent resume r" in done["message"]
        for action, body in (("resume", {}), ("fork", {"prompt": "x"}), ("replay", {})):
            answer = await page.post(f"{action}?run=r", body, code=400)
            assert "--agent" in answer["message"]
        await page.post("decide?run=r", {"request_id": "r/9/9/x", "decision": "allow"}, code=404)
    assert shop.paid == []


async def test_a_decision_counts_even_if_this_agent_cannot_go_on(shop: Shop) -> None:
    await shop.run(shop.agent([call("pay", amount=7)]), "r")
    other = Agent(ScriptedStream([]), run_log=RunLog(shop.store), name="other")
    async with writable(shop, other) as page:
        (request,) = (await page.get("run", run="r"))["waiting"]
        body = {"request_id": request["request_id"], "decision": "allow"}
        done = await page.post("decide?run=r", body)
        assert not done["is_running"]
        assert "not resumed here" in done["message"]
        assert "pay" in done["message"]
        assert (await page.get("run", run="r"))["waiting"] == []
        await page.post("resume?run=r", {}, code=400)
    assert shop.paid == []


async def test_a_fork_and_its_original_side_by_side(shop: Shop) -> None:
    steps = [say("Which shop?"), say("Later.")]
    await shop.run(shop.agent([call("pay", amount=1), *steps], can_ask=False), "r")
    other = shop.agent([say("Another answer.")], can_ask=False)
    async with writable(shop, other) as page:
        assert (await page.get("session"))["can_run"]
        done = await page.post("fork?run=r", {"turn": 1, "prompt": "What did you pay?"})
        new = done["run_id"]
        await until(lambda: is_over(shop.store, new))
        view = await page.get("run", run=new)
        assert view["run"]["forked_from"] == {"run_id": "r", "turn": 1}
        assert view["run"]["conversation_id"] == "c"
        assert new in (await page.get("run", run="r"))["forks"]
        began = (await page.get("items", run=new))["items"][0]
        assert (began["history"], began["system_prompt"]["text"]) == (3, "You keep a shop.")
        sides = await page.get("diff", a="r", b=new)
        assert sides["common"] == 3
        texts = [
            tuple([side and side["blocks"][0]["text"]["text"] for side in (row["a"], row["b"])])
            for row in sides["rows"]
            if not row["is_same"]
        ]
        assert texts == [("Which shop?", "What did you pay?"), (None, "Another answer.")]
    assert shop.paid == [1]


async def test_a_fork_from_the_beginning_may_ask_something_else(shop: Shop) -> None:
    await shop.run(shop.agent([say("Yes.")]), "r", "Is it open?")
    async with writable(shop, shop.agent([say("No."), say("Never.")])) as page:
        body = {"turn": 0, "prompt": "Is it closed?", "replace_prompt": True}
        first = await page.post("fork?run=r", {**body, "system_prompt": "You are rude."})
        await until(lambda: is_over(shop.store, first["run_id"]))
        assert said(shop.store, first["run_id"]) == ["user: Is it closed?", "assistant: No."]
        assert fold(shop.store.load(first["run_id"])).began.system_prompt == "You are rude."
        same = await page.post("fork?run=r", {"turn": 0})
        await until(lambda: is_over(shop.store, same["run_id"]))
        transcript = fold(shop.store.load(same["run_id"])).transcript
        assert [m.plain_text for m in transcript] == ["Is it open?", "Never."]


async def test_forks_that_are_not_possible(shop: Shop) -> None:
    await shop.run(shop.agent([say("Yes.")]), "r")
    async with writable(shop, shop.agent([])) as page:
        assert (await page.post("fork?run=r", {"turn": 9, "prompt": "x"}, code=409))["message"]
        assert (await page.post("fork?run=r", {}, code=409))["message"]
        model = {"prompt": "x", "model": "nonsense:x"}
        answer = await page.post("fork?run=r", model, code=400)
        assert "nonsense" in answer["message"]
        await page.post("fork?run=r", {"prompt": "x", "replace_prompt": True}, code=400)
        await page.post("fork?run=none", {"prompt": "x"}, code=404)
        assert (await page.get("runs"))["total"] == 1


async def test_a_replay_shows_the_first_difference(shop: Shop) -> None:
    steps = [call("pay", amount=1), say("Paid.")]
    await shop.run(shop.agent(steps, can_ask=False), "r")
    async with writable(shop, shop.agent([], can_ask=False)) as page:
        assert (await page.get("session"))["can_replay"]
        same = await page.post("replay?run=r", {})
        assert same == {"is_identical": True, "difference": None}
    async with writable(shop, shop.agent([])) as page:  # it has a gate now
        other = await page.post("replay?run=r", {})
        assert not other["is_identical"]
        assert other["difference"]["path"].startswith("plugins")
        assert "at the beginning" in other["difference"]["text"]
    assert shop.paid == [1]
    assert len(list(shop.store.runs())) == 1


async def test_runs_of_the_server_are_let_go_when_it_ends(shop: Shop) -> None:
    await shop.run(shop.agent([say("Yes.")]), "r")
    agent = shop.agent([call("wait"), say("At last.")])
    async with writable(shop, agent) as page:
        done = await page.post("fork?run=r", {"prompt": "Wait a while."})
        new = done["run_id"]
        assert done["is_running"]
        await until(lambda: "tool_started" in _kinds(shop, new))
        again = await page.post(f"resume?run={new}", {})
        assert (again["is_new"], again["is_running"]) == (False, True)
    loaded = shop.store.load(new)
    assert fold(loaded).ending is None
    shop.waiting.set()
    async with writable(shop, shop.agent([say("At last.")])) as page:
        assert (await page.get("run", run=new))["run"]["status"] == "running"
        await page.post(f"resume?run={new}", {})
        await until(lambda: is_over(shop.store, new))
    last = fold(shop.store.load(new)).messages[-1]
    assert isinstance(last, AssistantMessage)
    assert last.plain_text == "At last."


@pytest.mark.parametrize("who", ["this agent", "another agent", "no agent"])
async def test_a_run_that_waits_is_cancelled(shop: Shop, who: str) -> None:
    await shop.run(shop.agent([call("pay", amount=7)]), "r")
    other = Agent(ScriptedStream([]), run_log=RunLog(shop.store), name="other")
    agents = {"this agent": shop.agent([]), "another agent": other, "no agent": None}
    async with writable(shop, agents[who]) as page:
        (request,) = (await page.get("run", run="r"))["waiting"]
        done = await page.post("cancel?run=r", {"reason": "not needed"})
        body = {"request_id": request["request_id"], "decision": "allow"}
        if who == "this agent":
            await until(lambda: shop.store.runs()[0].outcome == "failed")
            await page.post("decide?run=r", body, code=404)
        else:
            assert "the run ends once it is resumed" in done["message"]
            assert ("pay" in done["message"]) == (who == "another agent")
            answer = await page.post("decide?run=r", body, code=409)
            assert answer["error"] == "not_possible"
            assert "was cancelled" in answer["message"]
            assert "request_decided" not in _kinds(shop, "r")
        assert (await page.get("run", run="r"))["waiting"] == []
        assert (await page.get("waiting"))["waiting"] == []
    assert shop.paid == []
