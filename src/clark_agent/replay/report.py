"""Runs a logged run again, with model, tools and clock answered from its log.

Input from outside is taken from the records, in order. Everything else (plugins, gates, policy, the
loop itself) runs for real, and writes a new log. If that differs from the original log, something
has changed, and the first difference shows what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._threads import has_running_loop
from clark_agent.config import LoopConfig
from clark_agent.engine.loop import start
from clark_agent.errors import DecodeError, LoopError
from clark_agent.events import EventSink
from clark_agent.messages.wire import decode_json
from clark_agent.replay.script import Script, parts_of
from clark_agent.result import RunResult
from clark_agent.run_log.diff import Difference, first_difference
from clark_agent.run_log.fold import fold
from clark_agent.run_log.jsonl import JsonlStore, read_log
from clark_agent.run_log.memory import MemoryStore
from clark_agent.run_log.records import Record, RunEnded, RunFailed, ToolEnded
from clark_agent.run_log.store import LoadedRun, RunStore
from clark_agent.run_log.writer import RunLog, store_of

__all__ = ["ReplayReport", "assert_replays", "replay"]

T = TypeVar("T")


class ReplayReport(Struct, frozen=True):
    """The result of a replay."""

    run_id: str
    drift: Difference | None
    """The first difference from the log; None if there is none."""
    result: RunResult | None = None
    error: LoopError | None = None

    @property
    def is_identical(self) -> bool:
        """Whether there is no difference."""
        return self.drift is None

    def __str__(self) -> str:
        if self.drift is None:
            return f"the run {self.run_id} replays as it was"
        return f"the run {self.run_id} does not replay as it was: {self.drift}"


async def replay(
    store: RunStore | RunLog,
    run_id: str,
    config: LoopConfig,
    *,
    sink: EventSink | None = None,
    deps: Any = None,
) -> ReplayReport:
    """Run a logged run again, offline, under a config; report the first difference.

    The config supplies plugins, policy, settings and the declarations of the tools. Its transport
    is not called, and no tool is run except tools that run agents: their runs are replayed too.
    Plugins with ``is_interactive`` repeat their recorded decisions. Other hooks are called, with
    ``deps`` in their context.
    """
    store = store_of(store)
    loaded = store.load(run_id)
    fold(loaded)  # raises for a damaged log
    copy = MemoryStore()
    outcome: RunResult | LoopError | None = None
    left: str | None = None
    for part in parts_of(loaded.records):
        script = Script(loaded.records, part, store, copy)
        outcome = await _replay_part(script, config, sink, deps)
        script.finish()
        left = left or script.first_left
    drift = _drift(store, copy, left)
    if isinstance(outcome, LoopError):
        return ReplayReport(run_id, drift, error=outcome)
    return ReplayReport(run_id, drift, outcome)


async def _replay_part(
    script: Script, config: LoopConfig, sink: EventSink | None, deps: Any
) -> RunResult | LoopError:
    context, resumption = script.beginning()
    try:
        return await start(
            () if resumption is not None else script.began.prompts,
            context,
            script.config(config),
            script.signal,
            sink=sink,
            call_id=script.began.tool_call_id,
            call_place=script.began.call_place,
            resumption=resumption,
            deps=deps,
        )
    except LoopError as error:
        return error


def _drift(store: RunStore, copy: RunStore, left: str | None) -> Difference | None:
    """Return the first difference between replayed and recorded runs: of the run that ``left`` its
    log first, then outermost run first.
    """
    for summary in sorted(copy.runs(), key=lambda run: (run.run_id != left, run.depth)):
        first = store.load(summary.run_id).records
        again = copy.load(summary.run_id).records
        if not isinstance(first[-1].entry, (RunEnded, RunFailed)):
            again = again[: len(first)]  # the process died before the run ended
        drift = first_difference(first, again)
        if drift is not None:
            return replace(drift, run_id=summary.run_id) if summary.parent_run_id else drift
    return None


def assert_replays(
    path: str | PathLike[str], config: LoopConfig, *, deps: Any = None
) -> ReplayReport:
    """For tests: fail with the first difference unless the run in a log file replays identically.

    The file was written by a `JsonlStore`, but may have any name; child runs are loaded from the
    same folder, and so are large results, which are in a folder of the run's name with the ending
    ``.kept``. Not async, so that any test can use it, even an async one.
    """
    store = _FileStore(Path(path))
    report = _run_anywhere(lambda: replay(store, store.run_id, config, deps=deps))
    assert report.is_identical, f"{report}{store.missing()}"
    return report


class _FileStore(JsonlStore):
    """A folder of logs in which one file may have any name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        data = path.read_bytes()
        try:
            self.run_id = decode_json(data.partition(b"\n")[0], Record).run
        except DecodeError as error:
            text = f"{path} is not the log of a run: {error.reason}"
            raise DecodeError(text, path="line 1") from None
        self._file = read_log(self.run_id, data)

    def missing(self) -> str:
        """A hint about the large results that the log refers to, and that are not there."""
        ended = [each.entry for each in self._file.records if isinstance(each.entry, ToolEnded)]
        names = [
            entry.kept.name
            for entry in ended
            if entry.kept is not None
            and entry.kept.texts
            and not self.kept(self.run_id, entry.kept.name, 0, 1)
        ]
        if not names:
            return ""
        folder = self.path_of(self.run_id).with_suffix(".kept")
        return f"; large results are missing: copy the folder {folder.name} to {folder} as well"

    def load(self, run_id: str) -> LoadedRun:
        return self._file if run_id == self.run_id else super().load(run_id)


def _run_anywhere(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it in a new event loop; in a new thread if a loop is already running."""
    if not has_running_loop():
        return asyncio.run(make())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(make())).result()
