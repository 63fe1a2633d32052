"""Trees of runs that wait, killed at any moment: ``python -m tests.run_log.waiting_driver``.

A life is a run with agents below it, three levels deep. Workers continue it with `advance`, and a
decider decides what it waits for, delivers events and sends messages. This process kills any of
them with SIGKILL, from outside after a random time, or they kill themselves at a random point on
their way, and it starts new ones until the run has ended. Then it looks at everything.

The model and the decisions are functions of what they are given, so each life must come to the same
results as one that nobody disturbs, except for calls that were running when a worker died. An
effect is a line in a file before it, and one after it, under the idempotency key of its call.

Each life is told by its seed; a failure prints it: ``--first SEED --rounds 1``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent import (
    Agent,
    AgentTool,
    AssistantMessage,
    BeforeToolCallContext,
    CancellationToken,
    LoopOutcome,
    RunResult,
    StreamRequest,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    Usage,
    UserMessage,
    dump_transcript,
    load_transcript,
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
    SqliteStore,
    WaitingRequest,
    advance,
    decide,
    deliver,
    fold,
    follow_up,
    steer,
    usage_tree,
    waiting_for,
)
from clark_agent.run_log.records import (
    Answered,
    CallSuspended,
    Record,
    RequestDecided,
    RunBegan,
    RunEnded,
    RunResumed,
    RunSuspended,
    ToolEnded,
    ToolStarted,
    ToolWithdrawn,
)
from clark_agent.stream import Chunk, Done, Start, StreamEvent, TextChunk
from clark_agent.types import StopReason
from clark_agent.waiting import Decision, Suspend
from tests.run_log.crash_driver import Probe, Probing, in_child
from tests.run_log.storing import KINDS, open_store

RUN = "life"
_EMPTY = AssistantMessage((), StopReason.OTHER)
_USAGE = Usage(10, 1)
_LEVELS = ("root", "middle", "bottom")
_TIRED = 40
"""After so many deaths a life is lived to its end."""
_PLAIN = ("later", "blocking", "at_once", "again", "knows", "pay", "pay", "ask", "event")


# --- the agents -----------------------------------------------------------------------------------


class Effect(Struct, frozen=True):
    """A line of the file."""

    when: str
    key: str
    run_id: str
    call_id: str
    name: str
    n: int
    process: int


class Effects:
    """A file that says what has happened in the world."""

    def __init__(self, path: Path, probe: Probe) -> None:
        self._path = path
        self._probe = probe

    def happen(self, ctx: ToolContext, n: int) -> str:
        self.note("before", ctx, n)
        self.note("after", ctx, n)
        return f"{ctx.tool_name} {n} happened"

    def note(self, when: str, ctx: ToolContext, n: int) -> None:
        run_id, name = ctx.identity.run_id, ctx.tool_name
        words = (when, ctx.idempotency_key, run_id, ctx.tool_call_id, name, n, os.getpid())
        self._probe()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, (" ".join(map(str, words)) + "\n").encode())
        finally:
            os.close(file)
        self._probe()

    def read(self) -> list[Effect]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        found: list[Effect] = []
        for line in lines:
            when, key, run_id, call_id, name, n, process = line.split()
            found.append(Effect(when, key, run_id, call_id, name, int(n), int(process)))
        return found


class Knows(AgentTool):
    """Writes down what it does, and can look it up."""

    name = "knows"
    description = "Does something that can be looked up."

    def __init__(self, effects: Effects) -> None:
        super().__init__()
        self._effects = effects

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        await asyncio.sleep(0.001)
        return ToolResult.text(self._effects.happen(ctx, args["n"]))

    async def did_it_happen(self, key: str) -> ToolResult | None:
        await asyncio.sleep(0)
        for effect in self._effects.read():
            if (effect.when, effect.key) == ("after", key):
                return ToolResult.text(f"knows {effect.n} happened")
        return None


def make_tools(effects: Effects) -> list[Any]:
    async def later(ctx: ToolContext, n: int) -> str:
        """Something happens, after a while."""
        await asyncio.sleep(0.001 * (n % 3))
        done = effects.happen(ctx, n)
        await asyncio.sleep(0.001 * (n % 2))
        return done

    def blocking(ctx: ToolContext, n: int) -> str:
        """Something happens, in a thread."""
        return effects.happen(ctx, n)

    async def at_once(ctx: ToolContext, n: int) -> str:
        """Something happens at once."""
        return effects.happen(ctx, n)

    async def again(ctx: ToolContext, n: int) -> str:
        """Something that may happen twice."""
        await asyncio.sleep(0.001)
        return effects.happen(ctx, n)

    async def pay(ctx: ToolContext, n: int) -> str:
        """Something that must be allowed."""
        await asyncio.sleep(0.001 * (n % 2))
        return effects.happen(ctx, n)

    async def ask(n: int) -> str:
        """Ask a person."""
        raise ToolSuspended({"question": n})

    async def event(n: int) -> str:
        """Wait for an event."""
        raise ToolSuspended(event=f"event-{n}")

    plain: list[Any] = [later, blocking, at_once, pay, ask, event]
    return [*[tool(each) for each in plain], tool(again, idempotent=True), Knows(effects)]


class Gate:
    name = "gate"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | None:
        return Suspend(ctx.args, assignee="ada") if ctx.tool_call.name == "pay" else None


class Mind:
    """A model whose answer follows from the request alone."""

    def __init__(self, level: int, probe: Probe) -> None:
        self._level = level
        self._probe = probe

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        number = sum(isinstance(message, AssistantMessage) for message in request.messages)
        first = request.messages[0].plain_text
        rng = random.Random(f"{first} {number}")
        yield Start(_EMPTY)
        await asyncio.sleep(0)
        self._probe()
        text = f"answer {number} to {first!r}"
        yield Chunk(TextChunk(text))
        if number >= (2, 1, 1)[self._level]:
            message = AssistantMessage.from_text(text)
        else:
            message = AssistantMessage.from_calls(self._calls(number, rng), text)
        yield Done(replace(message, timestamp=2, usage=_USAGE))

    def _calls(self, number: int, rng: random.Random) -> list[ToolCall]:
        names = rng.choices(_PLAIN, k=rng.randrange(1, 4))
        if self._level < len(_LEVELS) - 1:
            below = _LEVELS[self._level + 1]
            names += [below] * rng.choice([1, 1, 2] if number == 0 else [0, 1])
        rng.shuffle(names)
        calls: list[ToolCall] = []
        for place, name in enumerate(names):
            n = 100 * number + 10 * place + rng.randrange(10)
            arguments = {"task": f"{name} {rng.random()}"} if name in _LEVELS else {"n": n}
            calls.append(ToolCall(f"t{number}c{place}", name, arguments))
        return calls


def make_agent(effects: Effects, probe: Probe, run_log: RunLog | None = None) -> Agent[Any, Any]:
    tools, below = make_tools(effects), list[Any]()
    agent: Agent[Any, Any] | None = None
    for level in reversed(range(len(_LEVELS))):
        more: dict[str, Any] = {} if level else {"run_log": run_log}
        agent = Agent(
            Mind(level, probe),
            tools=[*tools, *below],
            plugins=[Gate()],
            name=_LEVELS[level],
            **more,
        )
        below = [agent.as_tool("Helps.")]
    assert agent is not None
    return agent


# --- what is decided ------------------------------------------------------------------------------


def choose(request: WaitingRequest) -> Decision:
    """The decision about a request: always the same about the same."""
    n = request.arguments["n"]
    rng = random.Random(f"{request.tool_name} {n}")
    if request.needs == "result":
        return rng.choice([GiveResult(f"answer {n}"), GiveResult({"n": n}), Deny(f"no {n}")])
    give = GiveArguments({"n": 1000 + n})
    return rng.choice([Allow(), Allow(), give, Deny(f"no {n}"), GiveResult(f"by hand {n}")])


async def settle(store: RunStore, request: WaitingRequest, *, urgent: bool = False) -> None:
    """Send a message to the run that waits, and end its wait."""
    run_id = request.run_id
    mail = UserMessage(f"mail for {run_id}", 3)
    steer(store, run_id, mail, "now" if urgent else "after_batch", id="mail")
    if run_id == RUN:
        follow_up(store, run_id, UserMessage("and then", 4), id="then")
    if request.event is not None:
        n = request.arguments["n"]
        deliver(store, run_id, request.event, {"event": n}, id=f"event {request.request_id}")
        return
    try:
        await decide(store, RUN, request.request_id, choose(request), by="decider")
        return
    except AlreadyDecided as late:  # by a decider that has died
        decided = (late.by, repr(late.decision))
    assert decided == ("decider", repr(choose(request)))


# --- processes ------------------------------------------------------------------------------------


class Life:
    """One run from its beginning to its end, over as many deaths as it takes."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self.kind = kind
        self.seed = seed
        self.folder = folder
        self.rng = random.Random(seed)
        self.urgent = self.rng.random() < 0.15
        """Whether messages stop what runs."""
        self.deaths: Counter[str] = Counter()
        self.drifts = False
        """Whether a replay differs."""
        self.prompt = UserMessage(f"seed {seed}", 1)
        self.effects = Effects(folder / "effects", Probe(None))

    def live(self) -> None:
        """Start processes and kill them until the run has ended; then look at everything."""
        running: dict[int, str] = {}
        try:
            while not self.go_on(running):
                pass
        finally:
            for process in running:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        self.check()

    def go_on(self, running: dict[int, str]) -> bool:
        """Start what is missing, and kill something after a while. Whether the run has ended."""
        is_tired = sum(self.deaths.values()) >= _TIRED
        roles = ["worker", "decider"] + ["worker"] * (self.rng.random() < 0.25)
        for role in [*(Counter(roles) - Counter(running.values())).elements()]:
            at = int(self.rng.expovariate(1 / 25)) if self.rng.random() < 0.4 else None
            running[self.start(role, None if is_tired else at)] = role
        until = time.monotonic() + (60.0 if is_tired else self.rng.random() ** 2 * 0.12)
        while time.monotonic() < until:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                time.sleep(0.0005)
                continue
            role = running.pop(process)
            if not os.WIFSIGNALED(status):
                assert os.waitstatus_to_exitcode(status) == 0, f"a {role} has failed; see above"
                return role == "worker"
            assert os.WTERMSIG(status) == signal.SIGKILL, status
            self.deaths[role] += 1
            return False
        assert not is_tired, "it does not come to its end"
        victim = self.rng.choice(sorted(running))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        self.deaths[running.pop(victim)] += 1
        return False

    def start(self, role: str, at: int | None) -> int:
        child = os.fork()
        if child == 0:
            probe = Probe(at)
            store: Any = Probing(open_store(self.kind, self.folder), probe)
            act = self.work(store, probe) if role == "worker" else self.decide(store)
            in_child(lambda: asyncio.run(act))
        return child

    async def work(self, store: RunStore, probe: Probe) -> None:
        """Continue the run until it has ended, and write down its result."""
        effects = Effects(self.folder / "effects", probe)
        agent = make_agent(effects, probe, RunLog(store, mail_every=0.01))
        while True:
            try:
                result = await advance(store, RUN, agent, self.prompt)
            except RunBusy:
                await asyncio.sleep(0.006)
                continue
            if result.outcome is not LoopOutcome.SUSPENDED:
                written = self.folder / f"result-{os.getpid()}"
                written.write_bytes(dump_transcript(result.messages))
                written.rename(self.folder / "result")  # there may be another worker
                return
            await asyncio.sleep(0.002)

    async def decide(self, store: RunStore) -> None:
        """Decide what the run waits for, until it has ended."""
        while True:
            try:
                waiting = waiting_for(store, RUN)
                for request in waiting:
                    await settle(store, request, urgent=self.urgent)
                if isinstance(store.load(RUN).records[-1].entry, RunEnded):
                    await asyncio.sleep(60)  # until it is killed
            except (RunBusy, RunNotFound, InvalidContinuationError):
                pass  # it works, has not begun, or has ended
            await asyncio.sleep(0.002)

    # --- what must hold -------------------------------------------------------------------------

    def check(self) -> None:
        store = open_store(self.kind, self.folder)
        try:
            self.check_store(store)
        finally:
            if isinstance(store, SqliteStore):
                store.close()

    def check_store(self, store: RunStore) -> None:
        logs = {run.run_id: store.load(run.run_id) for run in store.runs()}
        effects = self.effects.read()
        uncertain: set[str] = set()
        """The keys of the calls of which nothing is known."""
        for run_id, loaded in logs.items():
            assert loaded.problems == (), loaded.problems
            assert [record.seq for record in loaded.records] == list(range(len(loaded.records)))
            has_ended = isinstance(loaded.records[-1].entry, RunEnded)
            # A message that stops an agent which waits leaves its run as it is.
            assert has_ended or (self.urgent and run_id != RUN), (run_id, loaded.records[-1])
            uncertain |= check_log(run_id, loaded.records, urgent=self.urgent)
            if has_ended:
                check_mail(store, run_id)
        assert len(uncertain) <= 8 * self.deaths["worker"]
        check_effects(logs, effects, uncertain, urgent=self.urgent)
        self.check_result(store, uncertain)
        spent = usage_tree(store, RUN)
        entries = [record.entry for loaded in logs.values() for record in loaded.records]
        total = Usage()
        for entry in entries:
            if isinstance(entry, Answered) and entry.message.usage is not None:
                total += entry.message.usage
        ended = logs[RUN].records[-1].entry
        assert isinstance(ended, RunEnded)
        assert spent.tree_usage == ended.tree_usage == total, (spent.tree_usage, ended, total)
        agent = make_agent(self.effects, Probe(None))
        report = asyncio.run(_in_time(replay(store, RUN, agent.config)))
        # A message that stops tools comes in the middle of a step, and the log cannot always tell
        # of which: the order in which they stop may then differ.
        assert report.drift is None or self.urgent, report.drift
        self.drifts = report.drift is not None
        assert self.effects.read() == effects, "a replay had an effect"

    def check_result(self, store: RunStore, uncertain: set[str]) -> None:
        """The results are those of a run that nobody disturbs, and reported again."""
        folded = fold(store.load(RUN))
        messages = tuple(folded.messages)
        result = load_transcript((self.folder / "result").read_bytes())
        assert result.messages == messages, first_of(result.messages, messages)
        assert repair_history(messages).changes == ()
        agent = make_agent(self.effects, Probe(None), RunLog(store))
        again = asyncio.run(advance(store, RUN, agent, self.prompt))
        assert again.messages == messages
        assert again.outcome is LoopOutcome.DONE
        if self.urgent:  # what a message stops depends on when it comes
            return
        expected = undisturbed(self.prompt, self.folder)
        found, wanted = results_of(messages), results_of(expected.messages)
        assert found.keys() == wanted.keys()
        lost = {key.split("/", 1)[1] for key in uncertain if key.startswith(f"{RUN}/")}
        places = places_of(messages)
        different = {places[call_id] for call_id in found if found[call_id] != wanted[call_id]}
        assert different <= lost, (different, lost)
        if not uncertain:  # otherwise something may not have been asked
            assert again.output == expected.output


def undisturbed(prompt: UserMessage, folder: Path) -> RunResult:
    """The run as it is if nothing dies."""

    async def go() -> RunResult:
        probe, store = Probe(None), MemoryStore()
        agent = make_agent(Effects(folder / "expected", probe), probe, RunLog(store))
        while True:
            result = await advance(store, RUN, agent, prompt)
            if result.outcome is not LoopOutcome.SUSPENDED:
                return result
            for request in result.waiting:
                await settle(store, request)

    return asyncio.run(_in_time(go()))


def first_of(found: Any, wanted: Any) -> Any:
    """The first two that differ."""
    pairs = [pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]]
    return pairs[0] if pairs else (len(found), len(wanted))


async def _in_time(work: Any) -> Any:
    async with asyncio.timeout(60):
        return await work


def results_of(messages: Any) -> dict[str, tuple[str, bool]]:
    results = [message for message in messages if isinstance(message, ToolResultMessage)]
    return {message.tool_call_id: (message.plain_text, message.is_error) for message in results}


def places_of(messages: Any) -> dict[str, str]:
    """Turn and position of each call, by its id."""
    answers = [message for message in messages if isinstance(message, AssistantMessage)]
    return {
        call.id: f"{turn}/{position}"
        for turn, answer in enumerate(answers, 1)
        for position, call in enumerate(answer.tool_calls)
    }


def check_log(run_id: str, records: tuple[Record, ...], *, urgent: bool) -> set[str]:
    """Every request is decided once; only calls that were cut off are uncertain."""
    assert isinstance(records[0].entry, RunBegan)
    asked: set[str] = set()
    decided: set[str] = set()
    open_calls: dict[int, bool] = {}
    """The calls that have started, and whether their process is gone."""
    uncertain: set[str] = set()
    turn = 0
    for record in records:
        match record.entry:
            case Answered(discarded=None):
                turn, open_calls = turn + 1, {}
            case Answered():
                turn += 1
            case ToolStarted(position=position, tool_name=name):
                assert position not in open_calls or name in ("again", *_LEVELS), record
                open_calls[position] = False
            case ToolWithdrawn(position=position):
                assert open_calls.pop(position) is False, record
            case CallSuspended(position=position, request=request):
                open_calls.pop(position, None)
                if request is not None:
                    asked.add(request.request_id)
            case ToolEnded(position=position, by_runtime=why):
                was_cut_off = open_calls.pop(position, None)
                if why is not None and why.kind == "uncertain":
                    assert was_cut_off, f"{run_id}: {record} is uncertain, and was not cut off"
                    uncertain.add(f"{run_id}/{turn}/{position}")
                elif why is not None:
                    assert urgent, record
                    assert why.reason in ("steered", "aborted"), record
            case RequestDecided(request_id=request_id):
                assert request_id in asked
                assert request_id not in decided, "decided twice"
                decided.add(request_id)
            case RunResumed():
                open_calls = dict.fromkeys(open_calls, True)
            case RunSuspended():
                assert not open_calls, f"{run_id}: suspended while calls {[*open_calls]} run"
            case _:
                pass
    assert asked == decided or not isinstance(records[-1].entry, RunEnded)
    return uncertain


def check_mail(store: RunStore, run_id: str) -> None:
    """Each message is in the transcript once: there was a turn to come when it was sent."""
    texts = Counter(m.plain_text for m in fold(store.load(run_id)).messages)
    for mail in store.mail(run_id):
        if mail.message is not None:
            assert texts[mail.message.plain_text] == 1, (run_id, mail.id, texts)


def check_effects(logs: Any, effects: list[Effect], uncertain: set[str], *, urgent: bool) -> None:
    """Each effect has happened once if its result says so, and at most once if it is uncertain."""
    before = Counter(effect.key for effect in effects if effect.when == "before")
    after = Counter(effect.key for effect in effects if effect.when == "after")
    calls = {(e.key, e.run_id, e.call_id, e.name) for e in effects}
    assert len(calls) == len(before), "a key belongs to two calls, or a call has two keys"
    numbers = {(e.key, e.n) for e in effects}
    assert len(numbers) == len(before), "a call ran with other arguments the second time"
    for key, _, _, name in calls:
        if name != "again":
            assert before[key] == 1, (key, name, "was done twice")
            assert after[key] <= 1
    happened: set[str] = set()
    for run_id, loaded in logs.items():
        messages = fold(loaded).messages
        places = places_of(messages)
        for call_id, (text, is_error) in results_of(messages).items():
            key = f"{run_id}/{places[call_id]}"
            if text.endswith(" happened") and not is_error:
                happened.add(key)
                assert after[key] >= 1, (key, text, "is said to have happened")
                [n] = [n for k, n in numbers if k == key]
                assert text.split()[1] == str(n)
    for key, _, _, name in calls:
        is_known = key in happened or key in uncertain or urgent  # a message may stop a tool
        assert is_known, (key, name, "happened, and no result says so")
        if name == "knows" and key in uncertain:
            assert not after[key], (key, "the tool knew that it has happened")
        if name == "again" and not urgent:  # a message may hold it back
            assert key not in uncertain, (key, "could have been run again")


# --- many lives -----------------------------------------------------------------------------------


def live_many(
    kinds: list[str], rounds: int, seconds: float, first: int, said: Callable[[str], None]
) -> Counter[str]:
    """Live so many lives, or until the time is over."""
    came: Counter[str] = Counter()
    until = time.monotonic() + seconds
    for seed in range(first, first + rounds):
        if time.monotonic() > until:
            break
        kind = kinds[seed % len(kinds)]
        with tempfile.TemporaryDirectory() as folder:
            life = Life(kind, seed, Path(folder))
            try:
                life.live()
            except BaseException:
                said(f"failed: --stores {kind} --first {seed} --rounds 1")
                raise
        came[kind] += 1
        came["lives"] += 1
        came["urgent"] += life.urgent
        came["drifts"] += life.drifts
        came += life.deaths
    return came


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="how many lives")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--stores", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first life")
    given = parser.parse_args()
    began = time.monotonic()

    def said(text: str) -> None:
        print(text, file=sys.stderr)

    came = live_many(given.stores, given.rounds, given.seconds, given.first, said)
    print(" ".join(f"{name}={number}" for name, number in sorted(came.items())))
    said(f"{time.monotonic() - began:.0f} seconds")


if __name__ == "__main__":
    main()
