"""Processes that want the same run: ``python -m tests.run_log.contention_driver --rounds 200``.

In each round several processes resume one run at the same moment, or begin one. Each call of the
run writes a line to a file when it is done, so it shows if one was made twice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from clark_agent import (
    AgentContext,
    AssistantMessage,
    CancellationToken,
    LoopConfig,
    RunIdentity,
    StopReason,
    StreamRequest,
    ToolCall,
    run,
    tool,
)
from clark_agent.errors import InvalidContinuationError
from clark_agent.run_log import MemoryStore, RunBusy, RunExists, RunLog, RunLogError, resume
from clark_agent.run_log.records import Answered, Record, RunEnded
from clark_agent.stream import Done, Start, StreamEvent
from tests.run_log.crash_driver import in_child
from tests.run_log.storing import KINDS, append, open_store, writing

ROUNDS = 20
_TURNS = 2


def make_config(run_log: RunLog, effects: Path | None = None) -> LoopConfig:
    @tool
    async def charge(amount: int) -> str:
        """Charge an amount."""
        if effects is not None:
            file = os.open(effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{amount}\n".encode())
            os.close(file)
        await asyncio.sleep(0.001)
        return "charged"

    return LoopConfig(stream=answer, tools=[charge], run_log=run_log)


async def answer(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
    """Two calls a turn, no amount twice."""
    number = sum(isinstance(message, AssistantMessage) for message in request.messages)
    yield Start(AssistantMessage((), StopReason.OTHER))
    if number >= _TURNS:
        yield Done(AssistantMessage.from_text("Done."))
        return
    amounts = (10 * number, 10 * number + 1)
    calls = [ToolCall(f"c{amount}", "charge", {"amount": amount}) for amount in amounts]
    yield Done(AssistantMessage.from_calls(calls))


def unfinished() -> tuple[Record, ...]:
    """The log of a run that died when the model had answered for the first time."""
    store = MemoryStore()
    context = AgentContext(identity=RunIdentity("contended"))
    asyncio.run(run("Go.", context, make_config(RunLog(store))))
    records = store.load("contended").records
    [cut, *_] = [n for n, r in enumerate(records) if isinstance(r.entry, Answered)]
    return records[: cut + 1]


async def take_part(kind: str, folder: Path) -> str:
    """Resume the run, or begin it if there is none; what came of it."""
    store = open_store(kind, folder)
    config = make_config(RunLog(store), folder / "effects")
    try:
        if (folder / "resumes").exists():
            await resume(store, "contended", config)
        else:
            await run("Go.", AgentContext(identity=RunIdentity("contended")), config)
    except RunBusy:
        return "busy"
    except InvalidContinuationError:
        return "late"
    except RunLogError as error:
        if isinstance(error.__cause__, RunExists):
            return "busy"
        raise
    return "won"


OUTCOMES = ("won", "busy", "late")


def play(kind: str, processes: int, records: tuple[Record, ...], folder: Path) -> Counter[str]:
    """One round."""
    if records:
        with writing(open_store(kind, folder).create("contended")) as appender:
            append(appender, records)
        (folder / "resumes").touch()
    reader, writer = os.pipe()
    children: list[int] = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent closes its end
            in_child(lambda: os._exit(10 + OUTCOMES.index(asyncio.run(take_part(kind, folder)))))
        children.append(child)
    os.close(reader)
    os.close(writer)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert all(code >= 10 for code in codes), "a child has failed; see above"
    came = Counter([OUTCOMES[code - 10] for code in codes])
    made = (folder / "effects").read_text().split()
    assert sorted(made) == sorted([str(10 * turn + n) for turn in range(_TURNS) for n in (0, 1)])
    loaded = open_store(kind, folder).load("contended")
    assert loaded.problems == ()
    assert sum(isinstance(record.entry, RunEnded) for record in loaded.records) == 1
    assert came["won"] == 1, came
    return came


def play_many(kind: str, processes: int, rounds: int) -> Counter[str]:
    """So many rounds of each kind."""
    came: Counter[str] = Counter()
    records = unfinished()
    for number in range(rounds):
        for given in (records, ()):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    came += play(kind, processes, given, Path(folder))
                except BaseException:
                    what = "resuming" if given else "beginning"
                    print(f"round {number}: {kind}, {processes} {what}", file=sys.stderr)
                    raise
    return came


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--stores", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 3])
    given = parser.parse_args()
    for kind in given.stores:
        for processes in given.processes:
            came = play_many(kind, processes, given.rounds)
            told = " ".join(f"{name}={came[name]}" for name in OUTCOMES)
            print(f"{kind} processes={processes} rounds={given.rounds} {told}", flush=True)


if __name__ == "__main__":
    main()
