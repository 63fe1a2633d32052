"""Processes to be killed by `kill_driver`: workers and a decider.

A worker continues runs, and the decider decides what they wait for. All know the same agent, whose
answers are a function of the request, so a run must end with the same messages wherever it went.
What happens in the world is a line in a file, before it and after it, with the idempotency key of
the call and the process.

An engine here is what delivers the id of a run at least once. `Polling` is the smallest one: a file
that names the runs to begin, and what the store says about runs that nobody works on.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from clark_agent import (
    Agent,
    AssistantMessage,
    BeforeToolCallContext,
    CancellationToken,
    StreamRequest,
    ToolCall,
    ToolContext,
    Usage,
    UserMessage,
    tool,
)
from clark_agent.cancellation import LET_GO
from clark_agent.errors import RequestError, RunLetGo, RunLogError, RunStoreError
from clark_agent.run_log import (
    Allow,
    Deny,
    GiveArguments,
    RunBusy,
    RunLog,
    WaitingRequest,
    advance,
    decide,
    ready_runs,
    waiting_for,
)
from clark_agent.stream import Chunk, Done, Start, StreamEvent, TextChunk
from clark_agent.types import StopReason
from clark_agent.waiting import Decision, Suspend
from tests.durable.guard import end_with_parent
from tests.run_log import storing
from tests.run_log.crash_driver import Probe
from tests.run_log.waiting_driver import Effects

ENGINES = ("store", "dbos", "temporal")
STORES = ("postgres", "sqlite", "jsonl")
KINDS = ("tools", "waits", "tree", "tools")
"""What a run is like; the second word of its prompt is its id."""
TURNS = {"tools": 4, "waits": 3, "tree": 2, "below": 2}
_PLAIN: tuple[str, ...] = ("later", "blocking", "at_once", "again", "later", "again")
_DECIDED_AT_ONCE = 16
_EMPTY = AssistantMessage((), StopReason.OTHER)
_USAGE = Usage(10, 1)

logger = logging.getLogger(__name__)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all processes of a fleet know."""

    engine: str
    store: str
    folder: str
    url: str = ""
    address: str = ""
    lease: float
    pace: float
    """How many seconds an answer or a tool takes on average."""
    concurrency: int = 16
    """How many runs a worker works on at once."""

    @property
    def path(self) -> Path:
        return Path(self.folder)

    def open_store(self) -> Any:
        if self.store != "postgres":
            return storing.open_store(self.store, self.path)
        postgres = importlib.import_module("clark_agent.run_log.postgres")
        return postgres.PostgresStore(self.url, lease=self.lease)


def run_ids(count: int) -> list[str]:
    return [f"run-{number:05}" for number in range(count)]


def prompt_of(run_id: str) -> UserMessage:
    kind = KINDS[int(run_id.removeprefix("run-")) % len(KINDS)]
    return UserMessage(f"{kind} {run_id}", 1)


# --- the agent ------------------------------------------------------------------------------------


class Owners:
    """A file that says which process has worked on which run, and when."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, run_id: str) -> None:
        line = f"{time.time_ns() // 1_000_000} {os.getpid()} {run_id}\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def read(self) -> list[tuple[int, int, str]]:
        """The time in milliseconds, the process and the outermost run."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        words = [line.split() for line in lines]
        return [(int(at), int(process), run_id) for at, process, run_id in words]


class Mind:
    """A model whose answer follows from the request alone."""

    def __init__(self, owners: Owners | None, pace: float) -> None:
        self._owners = owners
        self._pace = pace

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        number = sum(isinstance(message, AssistantMessage) for message in request.messages)
        first = request.messages[0].plain_text
        kind, root, *_ = first.split()
        if self._owners is not None:
            self._owners.note(root)
        rng = random.Random(f"{first} {number}")
        yield Start(_EMPTY)
        await asyncio.sleep(2 * self._pace * rng.random())
        text = f"answer {number} to {first!r}"
        yield Chunk(TextChunk(text))
        if number >= TURNS[kind]:
            message = AssistantMessage.from_text(text)
        else:
            message = AssistantMessage.from_calls(_calls(kind, root, number, rng), text)
        yield Done(replace(message, timestamp=2, usage=_USAGE))


def _calls(kind: str, root: str, number: int, rng: random.Random) -> list[ToolCall]:
    names: list[str] = rng.choices(_PLAIN, k=rng.randrange(1, 4))
    if kind == "waits" and number < 2:
        names += ["pay"] * (2 - number)
    if kind == "below" and rng.random() < 0.3:
        names.append("pay")
    if kind == "tree":
        names += ["middle"] * (2 - number)
    rng.shuffle(names)
    calls: list[ToolCall] = []
    for place, name in enumerate(names):
        n = 100 * number + 10 * place + rng.randrange(10)
        task = {"task": f"below {root} {number} {place}"}
        calls.append(ToolCall(f"t{number}c{place}", name, task if name == "middle" else {"n": n}))
    return calls


def make_tools(effects: Effects, pace: float) -> list[Any]:
    async def later(ctx: ToolContext, n: int) -> str:
        """Something happens, after a while."""
        effects.note("before", ctx, n)
        await asyncio.sleep(2 * pace * (n % 10) / 9)
        effects.note("after", ctx, n)
        return f"later {n} happened"

    def blocking(ctx: ToolContext, n: int) -> str:
        """Something happens, in a thread."""
        effects.note("before", ctx, n)
        time.sleep(2 * pace * (n % 10) / 9)
        effects.note("after", ctx, n)
        return f"blocking {n} happened"

    async def at_once(ctx: ToolContext, n: int) -> str:
        """Something happens at once."""
        return effects.happen(ctx, n)

    async def again(ctx: ToolContext, n: int) -> str:
        """Something that may happen twice."""
        effects.note("before", ctx, n)
        await asyncio.sleep(2 * pace * (n % 10) / 9)
        effects.note("after", ctx, n)
        return f"again {n} happened"

    async def pay(ctx: ToolContext, n: int) -> str:
        """Something that must be allowed."""
        await asyncio.sleep(pace * (n % 2))
        return effects.happen(ctx, n)

    plain: list[Any] = [later, blocking, at_once, pay]
    return [*[tool(each) for each in plain], tool(again, idempotent=True)]


class Gate:
    name = "gate"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | None:
        return Suspend(ctx.args, assignee="ada") if ctx.tool_call.name == "pay" else None


def make_agent(
    effects: Effects, owners: Owners | None, pace: float, run_log: RunLog | None = None
) -> Agent[Any, Any]:
    """An agent with an agent below it; their names are those that `waiting_driver` knows."""
    tools, model = make_tools(effects, pace), Mind(owners, pace)
    below = Agent(model, tools=tools, plugins=[Gate()], name="middle")
    more: dict[str, Any] = {} if run_log is None else {"run_log": run_log}
    return Agent(
        model, tools=[*tools, below.as_tool("Helps.")], plugins=[Gate()], name="root", **more
    )


def agent_of(settings: Settings) -> Agent[Any, Any]:
    effects = Effects(settings.path / "effects", Probe(None))
    return make_agent(effects, Owners(settings.path / "owners"), settings.pace)


def choose(request: WaitingRequest) -> Decision:
    """The decision about a request: always the same about the same."""
    n = request.arguments["n"]
    rng = random.Random(f"{request.tool_name} {n}")
    return rng.choice([Allow(), Allow(), GiveArguments({"n": 1000 + n}), Deny(f"no {n}")])


# --- engines --------------------------------------------------------------------------------------


class Engine(Protocol):
    """Delivers runs to workers at least once."""

    async def submit(self, run_ids: Sequence[str]) -> None:
        """Have runs begun. Called in the process of the driver."""
        ...

    async def work(self, drain: CancellationToken) -> None:
        """Continue runs, until the token is cancelled."""
        ...

    async def decide(self, request: WaitingRequest) -> None:
        """Record the decision about a request, and have its run continued."""
        ...


def engine_of(settings: Settings) -> Engine:
    if settings.engine == "store":
        return Polling(settings)
    module = importlib.import_module(f"tests.durable.{settings.engine}_engine")
    engine: Engine = module.engine(settings)
    return engine


class Polling:
    """Workers that ask the store, and a file, what there is to do. Many want the same run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = settings.open_store()
        self._queue = settings.path / "queue"
        self._read = 0

    async def submit(self, run_ids: Sequence[str]) -> None:
        with self._queue.open("a") as file:
            file.writelines(f"{run_id}\n" for run_id in run_ids)

    async def decide(self, request: WaitingRequest) -> None:
        await decide(
            self._store, request.root_run_id, request.request_id, choose(request), by="decider"
        )

    async def work(self, drain: CancellationToken) -> None:
        agent, limit = agent_of(self._settings), self._settings.concurrency
        tasks: dict[str, asyncio.Task[None]] = {}
        wanted: dict[str, None] = {}
        begun = await self._begun()
        next_look = 0.0
        while not drain.cancelled:
            wanted |= dict.fromkeys(each for each in self._news() if each not in begun)
            if time.monotonic() > next_look:
                left = await asyncio.to_thread(self._left)
                wanted = {**dict.fromkeys(left), **wanted}
                next_look = time.monotonic() + 0.2 + 0.4 * random.random()
            free = [run_id for run_id in wanted if run_id not in tasks]
            for run_id in free[: limit - len(tasks)]:
                del wanted[run_id]
                tasks[run_id] = asyncio.create_task(self._continue(run_id, agent, drain.child()))
            await asyncio.sleep(0.03)
            for run_id, task in [*tasks.items()]:
                if task.done():
                    del tasks[run_id]
                    task.result()
        await asyncio.gather(*tasks.values())
        if hasattr(self._store, "close"):
            await asyncio.to_thread(self._store.close)

    async def _begun(self) -> set[str]:
        while True:
            try:
                return {each.run_id for each in await asyncio.to_thread(self._store.runs)}
            except RunStoreError:  # the database is away
                await asyncio.sleep(0.2)

    async def _continue(
        self, run_id: str, agent: Agent[Any, Any], signal: CancellationToken
    ) -> None:
        try:
            await advance(self._store, run_id, agent, prompt_of(run_id), signal)
        except (RunBusy, RunLetGo):
            return  # it is found again if nobody works on it
        except (RunLogError, RunStoreError):  # what a queue does with what it could not process
            logger.warning("run %s: tried again", run_id, exc_info=True)

    def _news(self) -> list[str]:
        if not self._queue.exists():
            return []
        lines = self._queue.read_text().splitlines()
        news, self._read = lines[self._read :], len(lines)
        random.shuffle(news)  # workers begin with different ones
        return news

    def _left(self) -> list[str]:
        """Runs that somebody has to continue."""
        try:
            return [*abandoned(self._store), *ready_runs(self._store)]
        except Exception:
            logger.warning("the store is asked again", exc_info=True)  # the database may be away
            return []


def abandoned(store: Any) -> Iterable[str]:
    if hasattr(store, "abandoned"):
        found: list[str] = store.abandoned()
        return found
    # A file does not tell who has it locked. Whoever tries is told.
    runs = store.runs()
    return [each.run_id for each in runs if each.outcome is None and each.depth == 0]


# --- processes ------------------------------------------------------------------------------------


async def work(settings: Settings) -> None:
    drain = CancellationToken()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, drain.cancel, LET_GO)
    await engine_of(settings).work(drain)


async def decide_all(settings: Settings) -> None:
    """Decide whatever runs wait for, until this process is killed."""
    engine, store = engine_of(settings), settings.open_store()
    while True:
        try:
            waiting = await asyncio.to_thread(waiting_for, store)
            # Together, because an engine may let the decision wait for a worker that is gone.
            for first in range(0, len(waiting), _DECIDED_AT_ONCE):
                some = waiting[first : first + _DECIDED_AT_ONCE]
                await asyncio.gather(*[_decide(engine, request) for request in some])
        except Exception:
            logger.exception("the decider tries again")  # the database may be away
        await asyncio.sleep(0.1)


async def _decide(engine: Engine, request: WaitingRequest) -> None:
    with suppress(RunBusy, RequestError):  # it works on other calls, or has been decided
        await engine.decide(request)


def live(role: str, settings: Settings, log: Path) -> None:
    """Be a worker or the decider. What this process says goes into a file."""
    end_with_parent(signal.SIGKILL)
    with log.open("wb") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    asyncio.run(work(settings) if role == "worker" else decide_all(settings))
