"""Faults of runs that wait, of takeovers and of the run log change what short stories tell."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from clark_agent import Agent, Rewrite, RunIdentity, RunResult, UserMessage, tool
from clark_agent import replay as replays
from clark_agent import run_log as logs
from clark_agent.errors import RequestExpired, RunStoreError
from clark_agent.testing import FakeClock, ScriptedStream, call
from clark_agent.toolkit import SUSPEND, Approval, ApprovalGate, ApprovalRequest
from clark_agent.waiting import AnyDecision
from tests.model.faults import Story, check, promises_of


class Shop:
    """A run that pays 7, in a store."""

    def __init__(self) -> None:
        self.store = logs.MemoryStore()
        self.clock = FakeClock()
        self.paid: list[int] = []
        self.at_start: list[str] = []
        """The kind of the newest record whenever the tool starts."""

        @tool
        def pay(amount: int) -> str:
            """Pay an amount."""
            self.at_start += self.kinds[-1:]
            self.paid.append(amount)
            return f"paid {amount}"

        self.tools = [pay]

    @property
    def kinds(self) -> list[str]:
        """The kinds of the records."""
        if not self.store.runs():
            return []
        records = self.store.load("r").records
        return [str(record.entry.__struct_config__.tag) for record in records]

    def agent(self, *plugins: Any, steps: Any = None) -> Agent[str, Any]:
        steps = [call("pay", amount=7), "Done."] if steps is None else steps
        return Agent(
            ScriptedStream(steps),
            tools=self.tools,
            plugins=plugins,
            clock=self.clock,
            run_log=logs.RunLog(self.store),
        )

    async def run(self, agent: Agent[str, Any]) -> RunResult[str]:
        return await agent.run("Pay.", identity=RunIdentity("r"))


# --- waiting ------------------------------------------------------------------------------------


async def suspended() -> tuple[Shop, Agent[str, Any], RunResult[str]]:
    shop = Shop()
    agent = shop.agent(ApprovalGate(SUSPEND, timeout=60))
    return shop, agent, await shop.run(agent)


async def a_call_that_waits() -> object:
    shop, _, result = await suspended()
    return result.outcome, shop.paid


def decided(*decisions: AnyDecision, seconds: float = 0) -> Story:
    """The run is suspended and, so many seconds later, decided about."""

    async def story() -> object:
        shop, agent, result = await suspended()
        await shop.clock.sleep(seconds)
        for decision in decisions:
            request_id = result.waiting[0].request_id
            with suppress(logs.AlreadyDecided, RequestExpired):
                await logs.decide(shop.store, "r", request_id, decision, clock=shop.clock)
        await logs.resume(shop.store, "r", agent)
        return shop.paid

    return story


class PayMore:
    """Rewrites the amount."""

    name = "pay_more"

    def on_before_tool_call(self, ctx: Any) -> Rewrite:
        return Rewrite({"amount": 500})


async def other_arguments() -> object:
    shop, agent, result = await suspended()
    request_id = result.waiting[0].request_id
    await logs.decide(shop.store, "r", request_id, logs.Allow(), clock=shop.clock)
    changed = agent.replace(plugins=[PayMore(), ApprovalGate(SUSPEND)])
    await logs.resume(shop.store, "r", changed)
    return shop.paid


async def an_event_that_comes_twice() -> object:
    shop, *_ = await suspended()
    event = logs.Mail(id="payment-1", kind="event", at=1, name="paid")
    return [shop.store.post("r", event) for _ in range(2)], len(shop.store.mail("r"))


async def approved() -> object:
    """What a person is shown, and what then runs."""
    shown: list[str] = []

    async def ask(request: ApprovalRequest) -> Approval:
        shown.append(request.text)
        return Approval.ONCE

    shop = Shop()
    await shop.run(shop.agent(ApprovalGate(ask), PayMore()))
    shown.append(ApprovalRequest("pay", {}, f"pay({'more ' * 20})", "c").text)
    return shown, shop.paid


# --- takeovers ----------------------------------------------------------------------------------


async def a_run_with_a_writer() -> object:
    shop, *_ = await suspended()
    last = shop.store.load("r").records[-1].seq
    _ = shop.store.reopen("r", after=last)
    with suppress(logs.RunBusy):
        _ = shop.store.reopen("r", after=last)
        return "taken"
    return "busy"


async def a_run_that_has_changed() -> object:
    shop, *_ = await suspended()
    last = shop.store.load("r").records[-1].seq
    with suppress(logs.RunBusy):
        _ = shop.store.reopen("r", after=last - 1)
        return "taken"
    return "busy"


async def a_log_that_is_closed() -> object:
    shop, *_ = await suspended()
    last = shop.store.load("r").records[-1]
    appender = shop.store.reopen("r", after=last.seq)
    appender.close()
    with suppress(RunStoreError):
        appender.append(last, b"{}")
        return "written"
    return "closed"


# --- the log ------------------------------------------------------------------------------------


async def a_tool_that_reads_the_log() -> object:
    shop = Shop()
    await shop.run(shop.agent())
    return shop.at_start


async def a_log_with_another_digit() -> object:
    with TemporaryDirectory() as folder:
        shop = Shop()
        store = logs.JsonlStore(folder)
        await shop.run(shop.agent().replace(run_log=logs.RunLog(store)))
        change_digit(store.path_of("r"))
        return [problem.reason for problem in store.load("r").problems]


def change_digit(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"amount":7', b'"amount":9'))


def cut_behind(shop: Shop, kind: str) -> None:
    """Leave the log as if the process had been killed after the first record of this kind."""
    shop.store.cut("r", shop.kinds.index(kind) + 1)


async def a_run_that_is_resumed() -> object:
    shop = Shop()
    await shop.run(shop.agent())
    cut_behind(shop, "tool_ended")
    await logs.resume(shop.store, "r", shop.agent(steps=["Done."]))
    return shop.paid


async def a_message_that_was_taken() -> object:
    shop = Shop()
    await shop.run(shop.agent())
    cut_behind(shop, "tool_ended")
    logs.steer(shop.store, "r", "Hurry.")
    await logs.resume(shop.store, "r", shop.agent(steps=["Done.", "Done."]))
    cut_behind(shop, "steering_accepted")
    result = await logs.resume(shop.store, "r", shop.agent(steps=["Done.", "Done.", "Done."]))
    return [m.plain_text for m in result.messages if isinstance(m, UserMessage)]


async def a_replay_under_another_plugin() -> object:
    shop = Shop()
    await shop.run(shop.agent())
    report = await replays.replay(shop.store, "r", shop.agent(PayMore()).config)
    return report.is_identical


STORIES: dict[str, Story] = {
    "a call that waits is run": a_call_that_waits,
    "a suspended run says that it is done": a_call_that_waits,
    "the last decision counts": decided(logs.Deny(), logs.Allow()),
    "a denied call is run": decided(logs.Deny()),
    "the changed arguments are not the ones that run": decided(logs.GiveArguments({"amount": 3})),
    "a permission is for any arguments": other_arguments,
    "a decision counts after the time is over": decided(logs.Allow(), seconds=61),
    "an event that is delivered twice counts twice": an_event_that_comes_twice,
    "a call is changed after a person has approved it": approved,
    "a person sees a part of the call": approved,
    "a run that a process works on is taken by another one": a_run_with_a_writer,
    "a run that has changed since it was read is continued": a_run_that_has_changed,
    "a log that was closed is written": a_log_that_is_closed,
    "a tool starts before its record is written": a_tool_that_reads_the_log,
    "a wrong checksum is right": a_log_with_another_digit,
    "a resumed run repeats a call that has its result": a_run_that_is_resumed,
    "a message from another process is delivered again by a resumed run": a_message_that_was_taken,
    "a replay notices no difference": a_replay_under_another_plugin,
}


@pytest.mark.parametrize("promise", promises_of("waiting", "takeovers", "logs"))
def test_a_fault_changes_what_happens_to_a_run(promise: str) -> None:
    check(promise, STORIES[promise])
