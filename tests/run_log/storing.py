"""Records to store, and processes that store them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from clark_agent import AssistantMessage, RunIdentity, UserMessage
from clark_agent.messages.wire import encode_json
from clark_agent.run_log._checksums import seal_all
from clark_agent.run_log.jsonl import JsonlStore
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.postgres import PostgresStore
from clark_agent.run_log.records import (
    RUN_LOG_VERSION,
    Answered,
    Entry,
    Record,
    RunBegan,
)
from clark_agent.run_log.sqlite import SqliteStore
from clark_agent.run_log.store import RunAppender, RunStore

KINDS = ("jsonl", "sqlite")


def open_store(kind: str, folder: Path) -> JsonlStore | SqliteStore:
    """A store on the storage that is in a folder."""
    return JsonlStore(folder / "runs") if kind == "jsonl" else SqliteStore(folder / "runs.db")


def open_anywhere(kind: str, folder: Path) -> RunStore:
    """The same, or for the URL of a database, a store in a schema with the name of the folder."""
    if kind.startswith("postgresql:"):
        return PostgresStore(kind, schema=f"of_{folder.name}"[:50])
    return open_store(kind, folder)


def numbered(
    run_id: str, entries: Iterable[Entry], start: int = 0, *, after: Record | None = None
) -> list[Record]:
    """Records with these entries, from a number on, or behind another record."""
    start = start if after is None else after.seq + 1
    records = [
        Record(RUN_LOG_VERSION, seq, run_id, 1_000 + seq, entry)
        for seq, entry in enumerate(entries, start)
    ]
    seal_all(records, after)
    return records


def began(run_id: str, prompt: str = "go") -> RunBegan:
    return RunBegan(identity=RunIdentity(run_id), prompts=(UserMessage(prompt, 1),))


def said(text: str) -> Answered:
    return Answered(message=AssistantMessage.from_text(text))


def some_records(run_id: str, count: int, text: str = "Ein Wört – 字") -> list[Record]:
    answers = [said(f"{text} {number}") for number in range(1, count)]
    return numbered(run_id, [began(run_id), *answers])


def mail_to(mail_id: str, text: str = "hello") -> Mail:
    """A message for a mailbox."""
    return Mail(id=mail_id, kind="steer", at=5, message=UserMessage(text, 1), when="after_batch")


def append(appender: RunAppender, records: Iterable[Record], *, sync: bool = False) -> None:
    """Append records, and wait until the store has them."""
    for record in records:
        appender.append(record, encode_json(record))
    appender.flush(sync=sync)
    wait_for(appender)


def close(appender: RunAppender) -> None:
    """Close an appender, and wait until all of it is there."""
    appender.close()
    wait_for(appender)


@contextmanager
def writing(appender: RunAppender) -> Generator[RunAppender]:
    """Close an appender in the end, and wait until all of it is there."""
    try:
        yield appender
    finally:
        close(appender)


def wait_for(appender: RunAppender) -> None:
    """Pass a barrier, in an event loop of its own."""

    async def wait() -> None:
        await appender.barrier()

    asyncio.run(wait())


def last_of(store: RunStore, run_id: str) -> int:
    """The number of a run's last record, to reopen the run behind it."""
    return store.load(run_id).records[-1].seq


@contextmanager
def child(task: str, *arguments: object) -> Generator[subprocess.Popen[str]]:
    """A process that does one of `tests.run_log.children`, and is killed if it is still there."""
    command = [sys.executable, "-m", "tests.run_log.children", task, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_from(process: subprocess.Popen[str]) -> str:
    """What a child says next."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], text: str = "") -> None:
    """Say something to a child that waits for a line."""
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()
