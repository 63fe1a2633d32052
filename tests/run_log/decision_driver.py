"""Processes that decide and continue the same runs: ``python -m tests.run_log.decision_driver``.

Several processes go through the same runs at once. Each looks what a run waits for, decides it
(each under its own name, and not all alike), and continues the run, until all runs have ended. A
run has two requests of its own and two in a child agent. An effect is one line in a file, with the
idempotency key of its call and the arguments it ran with.

With ``--stores memory`` threads take the place of the processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from clark_agent import (
    Agent,
    AssistantMessage,
    BeforeToolCallContext,
    CancellationToken,
    LoopOutcome,
    RunResult,
    StopReason,
    StreamRequest,
    ToolCall,
    ToolContext,
    ToolResultMessage,
    Usage,
    tool,
)
from clark_agent.errors import InvalidContinuationError, ToolSuspended
from clark_agent.history import repair_history
from clark_agent.replay import replay
from clark_agent.run_log import (
    Allow,
    AlreadyDecided,
    Deny,
    GiveArguments,
    GiveResult,
    MemoryStore,
    RunBusy,
    RunLog,
    RunNotFound,
    RunStore,
    WaitingRequest,
    advance,
    decide,
    fold,
    resume,
    usage_tree,
    waiting_for,
)
from clark_agent.run_log.records import RequestDecided, RunEnded, ToolEnded, ToolStarted
from clark_agent.stream import Done, Start, StreamEvent
from clark_agent.waiting import Decision, Suspend
from tests.races import race
from tests.run_log.crash_driver import in_child
from tests.run_log.storing import KINDS, open_anywhere

STORES = ("memory", *KINDS)
PROMPT = "Pay what is due."
_AT_ONCE = 25
"""How many runs a process goes through at the same time."""
_IN_A_STORE = 50
"""To find the child runs of a run, a store of files reads the beginning of each."""
_REQUESTS = 4
_PER_RUN = 2
"""The runs of a tree."""


# --- the agent ------------------------------------------------------------------------------------


class Effects:
    """A file that says what has happened in the world."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def happen(self, key: str, amount: int) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{key} {amount}\n".encode())
        finally:
            os.close(file)

    def read(self) -> list[tuple[str, int]]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        pairs = [line.rsplit(" ", 1) for line in lines]
        return [(key, int(amount)) for key, amount in pairs]


class Gate:
    """Holds back every payment."""

    name = "gate"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | None:
        return Suspend({"pay": ctx.args}) if ctx.tool_call.name == "pay" else None


def make_agent(effects: Effects) -> Agent[Any, Any]:
    @tool
    async def pay(ctx: ToolContext, amount: int) -> str:
        """Pay an amount."""
        effects.happen(ctx.idempotency_key, amount)
        await asyncio.sleep(0)
        return f"paid {amount}"

    @tool
    async def ask() -> str:
        """Ask a person."""
        raise ToolSuspended({"question": "Why?"})

    tools: list[Any] = [pay, ask]
    helper = Agent(_model(ToolCall("c0", "pay", {"amount": 3}), ToolCall("c1", "ask", {})))
    helper = helper.replace(tools=tools, plugins=[Gate()], name="helper")
    return Agent(
        _model(
            ToolCall("r0", "pay", {"amount": 1}),
            ToolCall("r1", "helper", {"task": "Help."}),
            ToolCall("r2", "ask", {}),
        ),
        tools=[*tools, helper.as_tool("Helps.")],
        plugins=[Gate()],
        name="root",
    )


def _model(*calls: ToolCall) -> Any:
    """One answer with these calls, then a text."""

    async def stream(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(AssistantMessage((), StopReason.OTHER))
        if any(isinstance(message, AssistantMessage) for message in request.messages):
            yield Done(replace(AssistantMessage.from_text("Done."), usage=Usage(20, 2)))
        else:
            yield Done(replace(AssistantMessage.from_calls(calls), usage=Usage(10, 1)))

    return stream


# --- one process ----------------------------------------------------------------------------------


def choose(request: WaitingRequest, who: str, rng: random.Random) -> Decision:
    """What somebody decides about a request."""
    number = rng.randrange(10, 1000)
    if request.needs == "result":
        return rng.choice([GiveResult(f"{who} says {number}"), Deny(f"{who} refuses")])
    give = GiveArguments({"amount": number})
    return rng.choice([Allow(), Deny(f"{who} refuses"), give, GiveResult(f"by {who}")])


class Decider:
    """Goes through the runs, and writes down what comes of it."""

    def __init__(self, store: RunStore, agent: Agent[Any, Any], who: str, seed: str) -> None:
        self.store = store
        self.agent = agent.replace(run_log=RunLog(store, mail_every=None))
        self.who = who
        self.rng = random.Random(f"{seed} {who}")
        self.told: list[dict[str, Any]] = []

    async def go(self, runs: list[str]) -> list[dict[str, Any]]:
        """See all runs through, several at a time."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(run_id: str) -> None:
            async with slots:
                await self.see_through(run_id)

        async with asyncio.TaskGroup() as group:
            for run_id in runs:
                group.create_task(one(run_id))
        return self.told

    async def see_through(self, run_id: str) -> None:
        """Decide what the run waits for, or continue it, until it has ended."""
        while True:
            waiting: list[WaitingRequest] = []
            with suppress(RunNotFound):
                waiting = waiting_for(self.store, run_id)
            self.rng.shuffle(waiting)
            for request in waiting[: self.rng.randrange(1, _REQUESTS + 1)]:
                await self.decide(run_id, request)
            try:
                result = await self.advance(run_id)
            except RunBusy:
                self.tell(run_id, "busy")
                await asyncio.sleep(0.03 + 0.06 * self.rng.random())
                continue
            if result.outcome is not LoopOutcome.SUSPENDED:
                self.tell(run_id, "ended")
                return

    async def advance(self, run_id: str) -> RunResult:
        if self.rng.random() < 0.5:
            with suppress(RunNotFound, InvalidContinuationError):  # not begun, or ended
                return await resume(self.store, run_id, self.agent.config)
        return await advance(self.store, run_id, self.agent, PROMPT)

    async def decide(self, run_id: str, request: WaitingRequest) -> None:
        decision = choose(request, self.who, self.rng)
        name = self.rng.choice([run_id, request.run_id])
        more = {"request": request.request_id, "decision": repr(decision)}
        try:
            await decide(self.store, name, request.request_id, decision, by=self.who)
        except AlreadyDecided as late:
            self.tell(run_id, "late", **more, first=late.by, made=repr(late.decision))
        except RunBusy:
            self.tell(run_id, "busy", **more)
        else:
            self.tell(run_id, "decided", **more)

    def tell(self, run_id: str, how: str, **more: Any) -> None:
        self.told.append({"run": run_id, "who": self.who, "how": how, **more})


# --- many processes -------------------------------------------------------------------------------


def in_processes(kind: str, folder: Path, processes: int, runs: list[str], seed: str) -> None:
    """Let processes go through the runs, from the same moment on."""
    reader, writer = os.pipe()
    children: list[int] = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent closes its end
            store = open_anywhere(kind, folder)
            in_child(lambda: take_part(store, folder, number, runs, seed))  # noqa: B023
        children.append(child)
    os.close(reader)
    os.close(writer)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * processes, "a process has failed; see above"


def in_threads(store: RunStore, folder: Path, processes: int, runs: list[str], seed: str) -> None:
    """Let threads, each with its own event loop, go through the runs."""
    race(*(partial(take_part, store, folder, number, runs, seed) for number in range(processes)))


def take_part(store: RunStore, folder: Path, number: int, runs: list[str], seed: str) -> None:
    decider = Decider(store, make_agent(Effects(folder / "effects")), f"process-{number}", seed)
    told = asyncio.run(decider.go(runs))
    (folder / f"told-{number}").write_text(json.dumps(told))


# --- what must hold -------------------------------------------------------------------------------


def play(
    kind: str, processes: int, runs: int, *, seed: str = "0", replays: int = 5
) -> Counter[str]:
    """Let them all go through the runs, a store after the other, and check what is left."""
    came: Counter[str] = Counter()
    for first in range(0, runs, _IN_A_STORE):
        names = [f"run-{number}" for number in range(first, min(runs, first + _IN_A_STORE))]
        with tempfile.TemporaryDirectory() as folder:
            came += _play(kind, Path(folder), processes, names, seed, replays)
    return came


def _play(
    kind: str, folder: Path, processes: int, names: list[str], seed: str, replays: int
) -> Counter[str]:
    if kind == "memory":
        store: RunStore = MemoryStore()
        in_threads(store, folder, processes, names, seed)
    else:
        in_processes(kind, folder, processes, names, seed)
        store = open_anywhere(kind, folder)
    texts = [(folder / f"told-{number}").read_text() for number in range(processes)]
    told = [each for text in texts for each in json.loads(text)]
    effects = Effects(folder / "effects")
    before = effects.read()
    came = check(store, names, told, before)
    agent = make_agent(effects)
    for run_id in random.Random(seed).sample(names, min(replays, len(names))):
        report = asyncio.run(replay(store, run_id, agent.config))
        assert report.drift is None, f"{run_id}: {report.drift}"
    assert effects.read() == before, "a replay had an effect"
    return came


def check(
    store: RunStore, names: list[str], told: list[dict[str, Any]], effects: list[tuple[str, int]]
) -> Counter[str]:
    came = Counter(each["how"] for each in told)
    keys = Counter(key for key, _ in effects)
    assert max(keys.values()) == 1, [key for key, count in keys.items() if count > 1]
    paid: dict[str, int] = {}
    summaries = store.runs()
    assert len(summaries) == _PER_RUN * len(names), len(summaries)
    assert {run.run_id for run in summaries if run.depth == 0} == set(names)
    decided: dict[str, RequestDecided] = {}
    for summary in summaries:
        decided |= check_run(store, summary.run_id, paid)
    assert dict(effects) == paid, "the effects are not those of the decisions"
    assert len(decided) == _REQUESTS * len(names)
    said = [each for each in told if "request" in each]
    won = {each["request"]: each for each in said if each["how"] == "decided"}
    assert came["decided"] == len(won) == len(decided)
    for request_id, record in decided.items():
        assert won[request_id]["who"] == record.by
        assert won[request_id]["decision"] == repr(record.decision)
    for each in said:
        if each["how"] == "late":
            record = decided[each["request"]]
            assert (each["first"], each["made"]) == (record.by, repr(record.decision))
    for name in names:
        check_usage(store, name)
    return came


def check_run(store: RunStore, run_id: str, paid: dict[str, int]) -> dict[str, RequestDecided]:
    """Look at one log. Adds the payments that its decisions allow; returns the decisions."""
    loaded = store.load(run_id)
    assert loaded.problems == (), loaded.problems
    assert not loaded.is_torn
    entries = [record.entry for record in loaded.records]
    assert sum(isinstance(entry, RunEnded) for entry in entries) == 1
    assert isinstance(entries[-1], RunEnded)
    messages = fold(loaded).messages
    assert repair_history(tuple(messages)).changes == ()
    results = {m.tool_call_id: m for m in messages if isinstance(m, ToolResultMessage)}
    decisions = [entry for entry in entries if isinstance(entry, RequestDecided)]
    started = Counter(entry.position for entry in entries if isinstance(entry, ToolStarted))
    ended = [entry for entry in entries if isinstance(entry, ToolEnded)]
    assert len(ended) == len(results)
    for entry in ended:
        assert entry.by_runtime is None, entry
    found: dict[str, RequestDecided] = {}
    answers = [m for m in messages if isinstance(m, AssistantMessage)]
    for decision in decisions:
        assert decision.request_id not in found, "decided twice"
        found[decision.request_id] = decision
        owner, turn, position, _ = decision.request_id.rsplit("/", 3)
        assert (owner, turn) == (run_id, "1")
        call = answers[0].tool_calls[int(position)]
        text, runs = results[call.id].plain_text, started[int(position)]
        match decision.decision:
            case Allow():
                amount = call.arguments["amount"]
                paid[f"{run_id}/1/{position}"] = amount
                assert (text, runs) == (f"paid {amount}", 1)
            case GiveArguments(args):
                paid[f"{run_id}/1/{position}"] = args["amount"]
                assert (text, runs) == (f"paid {args['amount']}", 1)
            case GiveResult(result):
                assert (text, runs) == (result.plain_text, int(call.name == "ask"))
            case Deny(reason):
                assert results[call.id].is_error
                assert (reason or "?") in text
                assert runs == (call.name == "ask")
            case _:
                raise AssertionError(f"nobody decides {decision}")
    return found


def check_usage(store: RunStore, run_id: str) -> None:
    """Each run of the tree has asked its model twice."""
    spent = usage_tree(store, run_id)
    [below] = spent.children
    assert spent.usage == below.usage == Usage(30, 3)
    ended = store.load(run_id).records[-1].entry
    assert isinstance(ended, RunEnded)
    assert ended.tree_usage == spent.tree_usage == Usage(60, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--stores", nargs="+", default=list(STORES), choices=STORES)
    parser.add_argument("--replays", type=int, default=5, help="how many runs to replay, of 50")
    parser.add_argument("--seed", default="0")
    given = parser.parse_args()
    for kind in given.stores:
        began = time.monotonic()
        try:
            came = play(kind, given.processes, given.runs, seed=given.seed, replays=given.replays)
        except BaseException:
            print(f"failed: --stores {kind} --seed {given.seed}", file=sys.stderr)
            raise
        told = " ".join(f"{name}={number}" for name, number in sorted(came.items()))
        print(f"{kind} runs={given.runs} {told}", flush=True)
        print(f"{time.monotonic() - began:.1f} seconds", file=sys.stderr)


if __name__ == "__main__":
    main()
