"""The threads in which plain functions run."""

import asyncio
import contextvars
import gc
import os
import subprocess
import sys
import threading
import weakref
from typing import NoReturn

import pytest

from clark_agent._threads import WorkerThreads, run_in_thread

WAIT = 30.0
"""Long enough for any machine; no test waits for it when all is well."""


async def test_a_call_runs_in_another_thread_and_returns() -> None:
    here = threading.get_ident()
    there, name, daemon = await run_in_thread(
        lambda: (
            threading.get_ident(),
            threading.current_thread().name,
            threading.current_thread().daemon,
        )
    )
    assert there != here
    assert name.startswith("clark-agent-tool")
    assert daemon


async def test_arguments_are_passed_on() -> None:
    assert await run_in_thread(int, "ff", base=16) == 255


async def test_exceptions_come_back() -> None:
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 / 0)


async def test_a_stop_iteration_does_not_hang_the_caller() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await run_in_thread(next, iter(()))


async def test_the_event_loop_goes_on_meanwhile() -> None:
    release = threading.Event()
    waiting = asyncio.create_task(run_in_thread(release.wait, WAIT))
    await asyncio.sleep(0)
    release.set()  # this line would never be reached if the call were blocking
    assert await waiting is True


async def test_context_variables_are_seen_and_not_leaked() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("outer")

    def look_and_change() -> str:
        seen = variable.get()
        variable.set("inner")
        return seen

    assert await run_in_thread(look_and_change) == "outer"
    assert variable.get() == "outer"
    assert await run_in_thread(variable.get) == "outer"


async def test_idle_threads_are_used_again() -> None:
    threads = WorkerThreads("reuse")
    seen = {await threads.run(threading.get_ident) for _ in range(5)}
    assert len(seen) == 1


async def test_many_calls_that_wait_for_each_other_do_not_starve() -> None:
    threads = WorkerThreads("many")
    barrier = threading.Barrier(100)
    await asyncio.gather(*(threads.run(barrier.wait, WAIT) for _ in range(100)))


async def test_idle_threads_end() -> None:
    threads = WorkerThreads("short", idle_seconds=0.01)
    worker = await threads.run(threading.current_thread)
    worker.join(WAIT)
    assert not worker.is_alive()
    assert (await threads.run(threading.current_thread)) is not worker


async def test_a_cancelled_caller_leaves_the_thread_behind() -> None:
    threads = WorkerThreads("cancel")
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(WAIT)
        ended.set()

    task = asyncio.create_task(threads.run(work))
    await run_in_thread(started.wait, WAIT)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert await run_in_thread(ended.wait, WAIT)


def test_a_loop_that_closes_meanwhile_is_harmless() -> None:
    threads = WorkerThreads("closed")
    release = threading.Event()
    workers: list[threading.Thread] = []

    def work() -> None:
        workers.append(threading.current_thread())
        release.wait(WAIT)

    async def abandon() -> None:
        task = asyncio.create_task(threads.run(work))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(abandon())
    release.set()
    # The thread survives and serves another loop.
    assert asyncio.run(threads.run(lambda: 7)) == 7


async def test_nothing_is_held_after_a_call() -> None:
    class Thing:
        pass

    threads = WorkerThreads("held")
    thing = Thing()
    reference = weakref.ref(thing)
    await threads.run(lambda given: None, thing)
    del thing
    # The worker drops its job before it waits for the next; once it has run another, it has.
    await asyncio.gather(*(threads.run(int) for _ in range(3)))
    gc.collect()
    assert reference() is None


@pytest.mark.slow
def test_a_hanging_call_does_not_keep_the_process_alive() -> None:
    program = """
import asyncio, threading
from clark_agent._threads import run_in_thread

async def main():
    started = threading.Event()
    task = asyncio.create_task(run_in_thread(lambda: (started.set(), threading.Event().wait())))
    await run_in_thread(started.wait)
    task.cancel()

asyncio.run(main())
print("left")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "left"), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")
def test_a_forked_child_gets_threads_of_its_own() -> None:
    program = """
import asyncio, os, warnings
from clark_agent._threads import run_in_thread
warnings.simplefilter("ignore")

asyncio.run(run_in_thread(int))
child = os.fork()
if child == 0:
    os._exit(asyncio.run(run_in_thread(lambda: 7)))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "7", done.stderr


async def test_a_system_exit_reaches_the_caller() -> None:
    def leave() -> NoReturn:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await run_in_thread(leave)
