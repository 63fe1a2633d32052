"""Logs with a flipped byte: ``python -m tests.run_log.damage_driver`` flips every one.

A damaged log is refused, with the place of the damage, or it is read as if nothing had happened,
because the byte does not matter. Nothing else may come of it: no other call, no other error.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from clark_agent import AgentContext, LoopConfig, RunIdentity, run, tool
from clark_agent.errors import DecodeError, LogDamaged, RunNotFound, RunStoreError
from clark_agent.run_log import LoadedRun, MemoryStore, RunLog, RunStore, SqliteStore, fold, fork
from clark_agent.run_log.records import Record, ToolStarted
from clark_agent.testing import ScriptedStream, call
from tests.run_log.stories import fill
from tests.run_log.storing import KINDS, append, open_store, writing

MASKS = (0x01, 0x12, 0x80, 0xFF)


@tool
def pay(n: int) -> str:
    """Pay."""
    return "ok"


@cache
def unfinished() -> list[Record]:
    """The log of a run that died when the last of its calls had begun."""
    store = MemoryStore()
    model = ScriptedStream([[call("pay", n=100), call("pay", n=7)], call("pay", n=3), "."])
    config = LoopConfig(stream=model, tools=[pay], run_log=RunLog(store))
    context = AgentContext(identity=RunIdentity("r"))
    with ThreadPoolExecutor(1) as pool:  # whoever asks may have a loop that runs
        pool.submit(lambda: asyncio.run(run("Go.", context, config))).result()
    records = store.load("r").records
    last = [n for n, r in enumerate(records) if isinstance(r.entry, ToolStarted)][-1]
    return list(records[: last + 1])


def write(kind: str, folder: Path, records: list[Record]) -> Path:
    """Write a log; the file that it is in."""
    store = open_store(kind, folder)
    with writing(store.create("r")) as appender:
        append(appender, records)
    if isinstance(store, SqliteStore):
        store.close()
    return folder / ("runs/r.jsonl" if kind == "jsonl" else "runs.db")


@contextmanager
def flipped(path: Path, place: int, mask: int) -> Generator[None]:
    """A file with one byte changed, in place: to write all of it anew takes much longer."""
    with path.open("r+b", buffering=0) as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ mask]))
        yield
        file.seek(place)
        file.write(bytes([byte]))


def check(kind: str, folder: Path, intact: MemoryStore, forked: set[int]) -> str:
    """What becomes of a damaged log."""
    store, whole = open_store(kind, folder), intact.load("r")
    loaded = whole
    try:
        loaded = store.load("r")
        fold(loaded)
    except LogDamaged as damage:
        check_place(damage, loaded, whole)
        if damage.at and damage.at not in forked:  # once for each record
            forked.add(damage.at)
            check_fork(store, intact, damage.at)
        return "refused"
    except DecodeError as error:
        if "newer version" in error.reason:
            return "refused"
        raise
    except (RunNotFound, RunStoreError):
        return "unreadable"
    finally:
        if isinstance(store, SqliteStore):
            store.close()
    assert loaded == whole
    return "harmless"


def check_place(damage: LogDamaged, loaded: LoadedRun, whole: LoadedRun) -> None:
    """What comes before the place is intact."""
    before = [record for record in loaded.records if record.seq < damage.at]
    assert before == list(whole.records[: damage.at]), damage
    assert (damage.at, damage.path) == (loaded.problems[0].seq, loaded.problems[0].where)


def check_fork(store: RunStore, intact: RunStore, before: int) -> None:
    messages = fork(store, "r", before=before).messages
    assert messages == fork(intact, "r", before=before).messages


def flip(kind: str, places: Iterable[int], masks: Iterable[int] = MASKS) -> Counter[str]:
    """Flip bytes of a log, one at a time."""
    came: Counter[str] = Counter()
    forked: set[int] = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write(kind, folder, unfinished())
        size, intact = path.stat().st_size, MemoryStore()
        fill(intact, "r", open_store(kind, folder).load("r").records)
        for place in places:
            if place >= size:
                break
            for mask in masks:
                try:
                    with flipped(path, place, mask):
                        came[check(kind, folder, intact, forked)] += 1
                except BaseException:
                    print(f"failed: {kind}, byte {place} of {size}, mask {mask:#x}")
                    raise
    return came


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--every", type=int, default=1, help="flip only every so-manieth byte")
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    for kind in given.stores:
        came = flip(kind, range(given.first, 1 << 30, given.every))
        print(f"{kind} " + " ".join(f"{what}={number}" for what, number in sorted(came.items())))


if __name__ == "__main__":
    main()
