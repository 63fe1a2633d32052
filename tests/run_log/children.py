"""What other processes do to a store, as ``python -m tests.run_log.children TASK …``."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

from clark_agent import (
    AgentTool,
    CancellationToken,
    ExecutionMode,
    LoopConfig,
    RunAborted,
    ToolContext,
    ToolResult,
    run,
    tool,
)
from clark_agent.cancellation import LET_GO
from clark_agent.errors import RunBusy, RunExists, RunLetGo, RunNotFound, RunStoreError
from clark_agent.messages.wire import encode_json
from clark_agent.run_log import RunLog
from clark_agent.run_log.records import RunEnded
from clark_agent.run_log.sqlite import SqliteStore
from clark_agent.testing import ScriptedStream, call
from tests.races import race
from tests.run_log.mailing import GO, context, texts
from tests.run_log.storing import (
    append,
    close,
    mail_to,
    numbered,
    open_store,
    said,
    some_records,
    wait_for,
)


def say(text: object) -> None:
    print(text, flush=True)


def append_forever(kind: str, folder: str) -> None:
    """Write to the run "killed", and say the number of each record when it was flushed."""
    appender = open_store(kind, Path(folder)).create("killed")
    [last] = some_records("killed", 1)
    append(appender, [last])
    while True:
        records = numbered("killed", [said("x" * 300), said("y")], after=last)
        append(appender, records)
        last = records[-1]
        say(last.seq)


def contend(kind: str, folder: str) -> None:
    """On a signal, try to begin the run "contended"; then add to it in turn with others."""
    store = open_store(kind, Path(folder))
    sys.stdin.readline()
    try:
        appender = store.create("contended")
    except (RunExists, RunBusy):
        say("lost")
    else:
        say("won")
        append(appender, some_records("contended", 1))
        close(appender)
    written = 0
    while written < 6:
        try:
            last = store.load("contended").records[-1]
            appender = store.reopen("contended", after=last.seq)
        except (RunBusy, RunNotFound):  # a run is there from its first record on
            continue
        append(appender, numbered("contended", [said(str(os.getpid()))], after=last))
        written += 1
        close(appender)


def post_many(kind: str, folder: str, name: str, times: str) -> None:
    """On a signal, post to the run "box", and ids that others post too."""
    store = open_store(kind, Path(folder))
    sys.stdin.readline()
    new = [
        (store.post("box", mail_to(f"{name} {n}")), store.post("box", mail_to(f"same {n}", name)))
        for n in range(int(times))
    ]
    say(f"{sum([own for own, _ in new])} {sum([same for _, same in new])}")


def post_forever(kind: str, folder: str) -> None:
    """Post to the run "box", and say the number of each message when it was posted."""
    store = open_store(kind, Path(folder))
    for number in count():
        assert store.post("box", mail_to(str(number), "x" * 20_000))
        say(number)


def tail_forever(kind: str, folder: str) -> None:
    """Open a tail of the run "r", and keep it."""
    tail = open_store(kind, Path(folder)).tail("r")
    say(len(tail.read()))
    signal.pause()


def run_a_mailbox(kind: str, folder: str) -> None:
    """Run with tools that wait for a line, and say what was said in the end."""

    class Waiting(AgentTool):
        name = "waiting"
        description = "waits"

        async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
            say("tool")
            await asyncio.to_thread(sys.stdin.readline)
            return ToolResult.text("done")

    config = LoopConfig(
        stream=ScriptedStream(
            [
                call("waiting"),
                [call("waiting"), call("waiting")],
                call("waiting"),
                "finished",
                "that too",
            ]
        ),
        tools=[Waiting()],
        run_log=RunLog(open_store(kind, Path(folder)), mail_every=0.01),
        default_execution_mode=ExecutionMode.SEQUENTIAL,
    )

    async def go() -> None:
        try:
            result = await run(GO, context("r"), config)
        except RunAborted as aborted:
            say(f"RunAborted {aborted.reason}")
        else:
            for text in texts(result.messages):
                say(text)
        os._exit(0)  # a thread may still wait for a line

    asyncio.run(go())


def work_until_told(kind: str, folder: str) -> None:
    """Run with a quick tool and a slow one, and let the run go at SIGTERM."""
    token = CancellationToken()

    @tool
    async def quick() -> str:
        """Be quick."""
        return "quick"

    @tool
    async def slow() -> str:
        """Be slow."""
        say("working")
        await asyncio.sleep(60)
        return "slow"

    config = LoopConfig(
        stream=ScriptedStream([[call("quick"), call("slow")], "Done."]),
        tools=[quick, slow],
        run_log=RunLog(open_store(kind, Path(folder))),
        default_execution_mode=ExecutionMode.SEQUENTIAL,
    )

    async def go() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, token.cancel, LET_GO)
        try:
            await run(GO, context("root"), config, token)
        except RunLetGo:
            say("let go")

    asyncio.run(go())


def run_turns(kind: str, folder: str) -> None:
    """Run "r" for some turns, with tools that take a little while."""

    class Working(AgentTool):
        name = "working"
        description = "works"

        async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
            await ctx.update(ToolResult.text("half"))
            await asyncio.sleep(0.002)
            return ToolResult.text("done")

    begun: list[object] = []

    def sink(event: object) -> None:
        if not begun:
            begun.append(event)
            say("begun")

    steps: list[Any] = [[call("working"), call("working")] for _ in range(20)]
    config = LoopConfig(
        stream=ScriptedStream([*steps, "finished"]),
        tools=[Working()],
        run_log=RunLog(open_store(kind, Path(folder)), live=True),
        event_sink=sink,
    )
    asyncio.run(run(GO, context("r"), config))


def fill(kind: str, folder: str) -> None:
    """Write to the run "full" until no file may grow further; then lift that limit and go on."""
    store = open_store(kind, Path(folder))
    appender = store.create("full")
    records = some_records("full", 200, "z" * 1_000)
    append(appender, records[:1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    flushed = 1
    try:
        for seq in range(1, len(records), 3):
            append(appender, records[seq : seq + 3])
            flushed = seq + 3
    except (OSError, RunStoreError) as error:
        say(f"failed {type(error).__name__}")
    say(flushed)
    for _ in range(2):
        try:
            wait_for(appender)
            say("flushed")
        except (OSError, RunStoreError):
            say("failed again")
        loaded = store.load("full")
        say(f"{len(loaded.records)} {loaded.is_torn} {len(loaded.problems)}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    append(appender, records[flushed + 3 :])
    close(appender)


def many(folder: str, name: str) -> None:
    """On a signal, write 50 runs, some of them at the same time."""
    store = open_store("sqlite", Path(folder))
    sys.stdin.readline()
    for batch in range(10):
        names = [f"{name}.{batch}.{number}" for number in range(5)]
        appenders = [store.create(run_id) for run_id in names]
        for step in range(3):
            for run_id, appender in zip(names, appenders, strict=True):
                append(appender, some_records(run_id, 3)[step : step + 1])
        for run_id, appender in zip(names, appenders, strict=True):
            last = some_records(run_id, 3)[-1]
            append(appender, numbered(run_id, [RunEnded(outcome=name)], after=last))
            close(appender)
    say("done")


def fork(kind: str, folder: str) -> None:
    """Fork while a run is open: the new process may write its own run, and not this one."""
    store = open_store(kind, Path(folder))
    appender = store.create("parent")
    [first] = some_records("parent", 1)
    append(appender, [first])
    new = os.fork()
    if new == 0:
        try:
            append(appender, numbered("parent", [said("from the child")], after=first))
        except RunStoreError:
            say("refused")
        appender.close()
        own = store.create("child")
        append(own, some_records("child", 3))
        close(own)
        say(len(store.load("parent").records))
        sys.exit()
    os.waitpid(new, 0)
    try:
        open_store(kind, Path(folder)).reopen("parent", after=0)
    except RunBusy:
        say("still locked")
    append(appender, numbered("parent", [said("from the parent")], after=first))
    close(appender)


def fork_and_close(folder: str) -> None:
    """Fork while connections are open; close those here while the new process writes."""
    store = open_store("sqlite", Path(folder))
    assert isinstance(store, SqliteStore)
    appender = store.create("parent")
    append(appender, some_records("parent", 1))
    is_closed, closed = os.pipe()
    is_open, opened = os.pipe()
    new = os.fork()
    if new == 0:
        own = store.create("child")
        records = some_records("child", 3)
        append(own, records[:1])
        os.write(opened, b"x")
        os.read(is_closed, 1)
        append(own, records[1:])
        close(own)
        sys.exit()
    os.read(is_open, 1)
    close(appender)
    store.close()
    os.write(closed, b"x")
    os.waitpid(new, 0)
    say([len(store.load(name).records) for name in ("parent", "child")])


def end_at_once(folder: str) -> None:
    """Write the run "r", and wait for nothing."""
    appender = open_store("sqlite", Path(folder)).create("r")
    for record in some_records("r", 3):
        appender.append(record, encode_json(record))
    appender.close()


def leave_a_helper(kind: str, folder: str, how: str) -> None:
    """Begin the run "left", start a process that outlives this one, and say its id."""
    appender = open_store(kind, Path(folder)).create("left")
    append(appender, some_records("left", 2))
    if how == "fork":
        if os.fork():
            signal.pause()
        say(os.getpid())
        signal.pause()
    subprocess.Popen([sys.executable, "-c", _HELPER])
    signal.pause()


_HELPER = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


def read_at_once(kind: str, folder: str) -> None:
    """Read a run in several threads, none of which has read anything before."""
    store = open_store(kind, Path(folder))
    sys.setswitchinterval(1e-6)
    counts: list[int] = []

    def read() -> None:
        counts.append(len(store.load("r").records))

    race(read, read, read, read)
    say(counts)


TASKS = (
    append_forever,
    contend,
    end_at_once,
    fill,
    fork,
    fork_and_close,
    leave_a_helper,
    many,
    post_forever,
    post_many,
    read_at_once,
    run_a_mailbox,
    run_turns,
    tail_forever,
    work_until_told,
)

if __name__ == "__main__":
    chosen = {task.__name__: task for task in TASKS}
    chosen[sys.argv[1]](*sys.argv[2:])
