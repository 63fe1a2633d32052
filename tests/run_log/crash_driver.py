"""Runs that are killed and taken up again until they end: ``python -m tests.run_log.crash_driver``.

This process forks a child for every attempt, kills it with SIGKILL, and looks at what is left. The
child is killed from outside after a random time, or it kills itself at a random point on its way:
in the middle of an answer, before and after a flush of the log, around the effect of a tool.

The model is a function of the request. An effect is one line in a file, written with one write.
Each life is told by its seed, so a failure can be lived again: ``--first SEED --lives 1``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AssistantMessage,
    CancellationToken,
    LoopConfig,
    LoopError,
    RunIdentity,
    RunResult,
    StopReason,
    StreamRequest,
    ToolCall,
    ToolContext,
    ToolResultMessage,
    UserMessage,
    agent_tool,
    dump_transcript,
    load_transcript,
    run,
    tool,
)
from clark_agent.history import repair_history
from clark_agent.run_log import (
    JsonlStore,
    LoadedRun,
    OnFailure,
    RunLog,
    RunLogError,
    RunNotFound,
    SqliteStore,
    fold,
    resume,
)
from clark_agent.run_log.records import Record, RunBegan, ToolEnded, ToolStarted
from clark_agent.stream import Chunk, Done, Start, StreamEvent, TextChunk

KINDS = ("jsonl", "sqlite")
_EMPTY = AssistantMessage((), StopReason.OTHER)
_LONG = 12
_TIRED = 60
"""After so many attempts a life is lived to its end."""


def open_store(kind: str, folder: Path) -> JsonlStore | SqliteStore:
    return JsonlStore(folder / "runs") if kind == "jsonl" else SqliteStore(folder / "runs.db")


# --- the agent ------------------------------------------------------------------------------------


class Probe:
    """A point on the way where a child may have to die."""

    def __init__(self, at: int | None) -> None:
        self.left = at

    def __call__(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)


class Effects:
    """A file that says what has happened in the world."""

    def __init__(self, path: Path, probe: Probe) -> None:
        self._path = path
        self._probe = probe

    def happen(self, ctx: ToolContext, word: str) -> str:
        identity = ctx.identity
        assert identity is not None
        self._probe()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{identity.run_id} {ctx.tool_call_id} {word}\n".encode())
        finally:
            os.close(file)
        self._probe()
        return f"{word} happened"

    def read(self) -> list[tuple[str, str, str]]:
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines()
        return [(first, second, third) for first, second, third in map(str.split, lines)]


def make_tools(effects: Effects, probe: Probe) -> list[Any]:
    async def later(ctx: ToolContext, n: int = 0) -> str:
        """Something happens, after a while."""
        await asyncio.sleep(0.001 * (n % 3))
        done = effects.happen(ctx, "later")
        await asyncio.sleep(0.001 * (n % 2))
        return done

    def blocking(ctx: ToolContext, n: int = 0) -> str:
        """Something happens, in a thread."""
        time.sleep(0.001 * (n % 2))
        return effects.happen(ctx, "blocking")

    async def at_once(ctx: ToolContext, n: int = 0) -> str:
        """Something happens at once."""
        return effects.happen(ctx, "at_once")

    async def again(ctx: ToolContext, n: int = 0) -> str:
        """Something that may happen twice."""
        await asyncio.sleep(0.001)
        return effects.happen(ctx, "again")

    async def slow(ctx: ToolContext, n: int = 0) -> str:
        """Something that takes longer than others."""
        await asyncio.sleep(0.004)
        probe()
        return effects.happen(ctx, "slow")

    made: list[Any] = [tool(later), tool(blocking), tool(at_once), tool(again), tool(slow)]
    made[3].idempotent = True
    return made


class Mind:
    """A model whose answer follows from the request alone."""

    def __init__(self, probe: Probe, names: tuple[str, ...], turns: int) -> None:
        self._probe = probe
        self._names = names
        self._turns = turns

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        number = sum(isinstance(message, AssistantMessage) for message in request.messages)
        rng = random.Random(f"{request.messages[0].plain_text} {number}")
        yield Start(_EMPTY)
        words = [f"word{n} " for n in range(rng.randrange(1, 4))]
        for word in words:
            await asyncio.sleep(0.0005)
            self._probe()
            yield Chunk(TextChunk(word))
        if number >= self._turns:
            yield Done(replace(AssistantMessage.from_text("".join(words)), timestamp=2))
            return
        calls = [
            ToolCall(f"t{number}c{place}", name, self._arguments(name, rng, number))
            for place, name in enumerate(rng.choices(self._names, k=rng.randrange(1, 5)))
        ]
        yield Done(replace(AssistantMessage.from_calls(calls, "".join(words)), timestamp=2))

    def _arguments(self, name: str, rng: random.Random, number: int) -> dict[str, Any]:
        if name == "helper":
            return {"task": f"{rng.randrange(1000)} of turn {number}"}
        return {"n": rng.randrange(6)}


NAMES = ("later", "blocking", "at_once", "again", "slow", "helper")


def make_config(effects: Effects, probe: Probe, run_log: RunLog, turns: int = 3) -> LoopConfig:
    tools = make_tools(effects, probe)
    below = LoopConfig(stream=Mind(probe, NAMES[:4], 1), tools=tools)
    return LoopConfig(
        stream=Mind(probe, NAMES, turns),
        tools=[*tools, agent_tool("helper", "Helps.", below)],
        run_log=run_log,
    )


class Probing:
    """A store whose appenders pass a probe around every flush."""

    def __init__(self, store: JsonlStore | SqliteStore, probe: Probe) -> None:
        self._store = store
        self._probe = probe
        self.load = store.load
        self.runs = store.runs
        self.tail, self.post = store.tail, store.post
        self.mail, self.publish = store.mail, store.publish

    def create(self, run_id: str) -> ProbingAppender:
        self._probe()
        return ProbingAppender(self._store.create(run_id), self._probe)

    def reopen(self, run_id: str, *, after: int) -> ProbingAppender:
        return ProbingAppender(self._store.reopen(run_id, after=after), self._probe)


class ProbingAppender:
    def __init__(self, appender: Any, probe: Probe) -> None:
        self._appender = appender
        self._probe = probe
        self.append = appender.append
        self.close = appender.close

    def flush(self, *, sync: bool) -> None:
        self._probe()
        self._appender.flush(sync=sync)
        self._probe()

    async def barrier(self) -> None:
        self._probe()
        await self._appender.barrier()
        self._probe()


# --- one attempt ----------------------------------------------------------------------------------


class Life:
    """One run from its beginning to its end, over as many deaths as it takes."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self.kind = kind
        self.seed = seed
        self.folder = folder
        self.rng = random.Random(seed)
        self.run_id = "life-0"
        self.deaths = 0
        self.places: Counter[str] = Counter()
        self.turns = 3
        self.effects = Effects(folder / "effects", Probe(None))

    def live(self) -> None:
        """Run, die, and run again until there is a result; then look at everything."""
        attempts = 0
        while True:
            attempts += 1
            before = self.look()
            if not before and attempts > 1:
                self.run_id = f"life-{attempts}"
            seen = len(self.effects.read())
            dies_first = attempts == 1 and self.seed % 10 == 0  # before the first record
            is_over = self.attempt(
                None if attempts > _TIRED else self.rng, 0 if dies_first else None
            )
            self.check_not_again(before, self.effects.read()[seen:])
            if is_over:
                break
            self.deaths += 1
            records = self.look()
            place = str(records[-1].entry.__struct_config__.tag) if records else "nothing"
            self.places[place] += 1
            if place == "run_ended":  # killed when all was done
                break
        self.check(has_result=is_over)

    def attempt(self, rng: random.Random | None, at: int | None = None) -> bool:
        """Start a child, and kill it or let it end. Whether it ended."""
        if at is None and rng is not None and rng.random() >= 0.5:
            at = int(rng.expovariate(1 / 15))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            in_child(lambda: self.act(at, writer))
        os.close(writer)
        try:
            os.read(reader, 1)  # the run is about to begin
            if rng is not None and at is None:
                time.sleep(rng.random() ** 2 * 0.06)
                os.kill(child, signal.SIGKILL)
        finally:
            os.close(reader)
            _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL, status
            return False
        assert os.waitstatus_to_exitcode(status) == 0, "the child has failed; see above"
        return True

    def act(self, at: int | None, writer: int) -> None:
        probe = Probe(at)
        effects = Effects(self.folder / "effects", probe)
        store = Probing(open_store(self.kind, self.folder), probe)
        config = make_config(effects, probe, RunLog(store), self.turns)
        os.write(writer, b"x")
        result = asyncio.run(self.go(store, config))
        (self.folder / "result").write_bytes(dump_transcript(result.messages))

    async def go(self, store: Any, config: LoopConfig) -> RunResult:
        if loaded_or_none(store, self.run_id) is None:
            context = AgentContext("You live.", identity=RunIdentity(self.run_id))
            return await run(UserMessage(f"seed {self.seed}", 1), context, config)
        return await resume(store, self.run_id, config)

    # --- what must hold -------------------------------------------------------------------------

    def look(self) -> tuple[Record, ...]:
        """The log as it is now; it can be read at any moment."""
        store = open_store(self.kind, self.folder)
        loaded = loaded_or_none(store, self.run_id)
        if isinstance(store, SqliteStore):
            store.close()
        if loaded is None:
            return ()
        assert loaded.problems == (), loaded.problems
        assert [record.seq for record in loaded.records] == list(range(len(loaded.records)))
        return loaded.records

    def check_not_again(
        self, before: tuple[Record, ...], happened: list[tuple[str, str, str]]
    ) -> None:
        """What had its result before was not done again, nor what had begun and may not be."""
        ended = {r.entry.tool_call_id for r in before if isinstance(r.entry, ToolEnded)}
        started = {
            r.entry.tool_call_id
            for r in before
            if isinstance(r.entry, ToolStarted) and r.entry.tool_name != "again"
        }
        for run_id, call_id, _ in happened:
            if run_id == self.run_id:
                assert call_id not in ended | started, (call_id, "was done again")

    def check(self, *, has_result: bool) -> None:
        records = self.look()
        assert isinstance(records[0].entry, RunBegan)
        folded = fold(LoadedRun(self.run_id, records))
        messages = tuple(folded.messages)
        if has_result:
            result = (self.folder / "result").read_bytes()
            assert load_transcript(result).messages == messages
        assert folded.ending is not None
        assert repair_history(messages).changes == ()
        counts = Counter(self.effects.read())
        assert not [key for key, n in counts.items() if n > 1 and key[2] != "again"], counts
        here = {call_id: n for (run_id, call_id, _), n in counts.items() if run_id == self.run_id}
        names = {c.id: c.name for m in messages for c in getattr(m, "tool_calls", ())}
        for message in messages:
            if isinstance(message, ToolResultMessage):
                self.check_result(message, names[message.tool_call_id], here)

    def check_result(self, message: ToolResultMessage, name: str, here: dict[str, int]) -> None:
        call_id, details = message.tool_call_id, message.details or {}
        if isinstance(details, dict) and details.get("kind") == "tool_call_uncertain":
            assert name != "again", "it could have been run again"
            return
        if details == {"kind": "tool_call_stopped", "reason": "aborted", "still_running": False}:
            return  # beside a helper whose log could not be written
        assert not message.is_error, message
        if name != "helper":
            assert here.get(call_id, 0) >= 1, (call_id, "is said to have happened")


def loaded_or_none(store: Any, run_id: str) -> LoadedRun | None:
    """The log of a run; None before its first record."""
    try:
        loaded: LoadedRun = store.load(run_id)
    except RunNotFound:
        return None
    return loaded if loaded.records else None


def in_child(act: Callable[[], None]) -> None:
    """Do it and be gone, whatever happens."""
    code = 1
    try:
        act()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


# --- a disk that fills up -------------------------------------------------------------------------


def fill_the_disk(kind: str, limit: int, folder: Path, on_failure: str) -> dict[str, Any]:
    """A run whose files may not grow beyond a limit, and what came of it."""
    logging.disable()  # it says a lot about a disk that is full
    path = folder / "told"
    child = os.fork()
    if child == 0:
        in_child(lambda: _run_with_limit(kind, limit, folder, on_failure, path))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child has failed; see above"
    how, dropped = path.read_text().split()
    return {"how": how, "dropped": int(dropped)}


def _run_with_limit(kind: str, limit: int, folder: Path, on_failure: str, path: Path) -> None:
    probe = Probe(None)
    store = open_store(kind, folder)
    list(store.runs())  # the database is there before the disk is full
    log = RunLog(store, on_failure=OnFailure(on_failure))
    config = make_config(Effects(folder / "effects", probe), probe, log, _LONG)
    context = AgentContext("You live.", identity=RunIdentity("life"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    how = "done"
    try:
        asyncio.run(run(UserMessage(f"seed {limit}", 1), context, config))
    except RunLogError:
        how = "RunLogError"
    except LoopError as error:
        how = type(error).__name__
    # The disk stays full: a thread that tries a commit once more must not succeed after all.
    path.write_text(f"{how} {log.dropped}")


def check_full_disk(kind: str, limit: int, folder: Path) -> str:
    """The run stops; all that was done is in its log; with more room it goes on to its end."""
    told = fill_the_disk(kind, limit, folder, "fail")
    if told["how"] == "done":
        return "done"
    assert told["how"] == "RunLogError", told
    life = Life(kind, limit, folder)
    life.run_id, life.turns = "life", _LONG
    records = life.look()
    started = {r.entry.tool_call_id for r in records if isinstance(r.entry, ToolStarted)}
    happened = {call_id for run_id, call_id, _ in life.effects.read() if run_id == "life"}
    assert happened <= started, happened - started
    if not records:
        return "not begun"
    seen = len(life.effects.read())
    assert life.attempt(None)
    life.check_not_again(records, life.effects.read()[seen:])
    life.check(has_result=True)
    return "resumed"


def check_dropped(kind: str, limit: int, folder: Path) -> str:
    """The run goes on to its end; what its log has lost is counted."""
    told = fill_the_disk(kind, limit, folder, "drop")
    assert told["how"] == "done", told
    life = Life(kind, limit, folder)
    life.run_id = "life"
    ended = bool(life.look()) and life.look()[-1].entry.__struct_config__.tag == "run_ended"
    assert ended is (told["dropped"] == 0), told
    return "whole" if ended else "dropped"


def fill_disks(kinds: list[str], limits: range) -> Counter[str]:
    """With each limit once."""
    came: Counter[str] = Counter()
    for kind in kinds:
        for limit in limits:
            for check in (check_full_disk, check_dropped):
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        came[f"{kind}-{check(kind, limit, Path(folder)).replace(' ', '-')}"] += 1
                    except BaseException:
                        print(f"failed: {kind}, {limit} bytes, {check}", file=sys.stderr)
                        raise
    return came


# --- many lives -----------------------------------------------------------------------------------


def live_many(
    kinds: list[str], rounds: int, seconds: float, first: int, lives: int
) -> Counter[str]:
    """Live until so many deaths were died, or the time is over."""
    places: Counter[str] = Counter()
    deaths, seed, until = 0, first, time.monotonic() + seconds
    while deaths < rounds and time.monotonic() < until and seed < first + lives:
        kind = kinds[seed % len(kinds)]
        with tempfile.TemporaryDirectory() as folder:
            life = Life(kind, seed, Path(folder))
            try:
                life.live()
            except BaseException:
                print(f"failed: --stores {kind} --first {seed} --lives 1", file=sys.stderr)
                raise
        deaths += life.deaths
        places += life.places
        seed += 1
    places["lives"], places["deaths"] = seed - first, deaths
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="how often to kill")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--stores", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first life")
    parser.add_argument("--lives", type=int, default=10**9)
    parser.add_argument("--full-disk", nargs=3, type=int, help="limits in bytes: from, to, step")
    given = parser.parse_args()
    if given.full_disk is not None:
        came = fill_disks(given.stores, range(*given.full_disk))
        print(" ".join(f"{name}={number}" for name, number in sorted(came.items())))
        return
    began = time.monotonic()
    places = live_many(given.stores, given.rounds, given.seconds, given.first, given.lives)
    print(" ".join(f"{name}={number}" for name, number in sorted(places.items())))
    print(f"{time.monotonic() - began:.0f} seconds", file=sys.stderr)


if __name__ == "__main__":
    main()
