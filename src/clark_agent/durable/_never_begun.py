"""The log of a run that was cancelled before it began."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from clark_agent.clock import now_ms
from clark_agent.errors import RunAborted
from clark_agent.run_log._checksums import seal
from clark_agent.run_log.records import RUN_LOG_VERSION, Record, RunBegan, RunFailed
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import encode_entry
from clark_agent.types import AgentMessage, RunIdentity

__all__ = ["record_abort"]


def record_abort(
    store: RunStore, run_id: str, prompts: Iterable[AgentMessage], reason: str | None
) -> None:
    """Write the log of a run that was aborted before it began.

    Whoever creates the log of a run has it: after this, no process can begin the run. Raises
    `RunExists` if one was faster. Blocks, and works inside an event loop, too.
    """
    aborted = RunAborted(reason)
    entries = (
        RunBegan(identity=RunIdentity.root(run_id), prompts=tuple(prompts)),
        RunFailed(error=type(aborted).__name__, text=str(aborted), reason=reason),
    )
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(_write(store, run_id, entries))).result()


async def _write(store: RunStore, run_id: str, entries: Iterable[RunBegan | RunFailed]) -> None:
    appender, checksum, at = store.create(run_id), 0, now_ms()
    try:
        for seq, entry in enumerate(entries):
            record = Record(RUN_LOG_VERSION, seq, run_id, at, entry)
            data, checksum = seal(encode_entry(record), checksum)
            appender.append(record, data)
        appender.flush(sync=True)
        await appender.barrier()
    finally:
        appender.close()
    await appender.barrier()
