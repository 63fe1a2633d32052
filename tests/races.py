"""Threads that race in a test: all of them take part, and whatever one of them raises is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["race"]


def race(*jobs: Callable[[], object], failures: list[BaseException] | None = None) -> None:
    """Run each job in a thread of its own, all from the same moment, and wait for them.

    The exceptions of the jobs are raised as a group, with their tracebacks. They are in
    ``failures`` as soon as they are raised, for jobs that wait for what another one does.

    The threads are started one after the other: a thread begins with `sys.settrace` if coverage is
    measured, and Python 3.11 refuses that in one thread while an audit hook runs in another's.
    """
    failed: list[BaseException] = [] if failures is None else failures
    go, is_off = threading.Event(), False

    def take_part(job: Callable[[], object], ready: threading.Event) -> None:
        ready.set()
        go.wait()
        try:
            if not is_off:
                job()
        except BaseException as error:
            failed.append(error)

    threads: list[threading.Thread] = []
    try:
        for job in jobs:
            ready = threading.Event()
            thread = threading.Thread(target=take_part, args=(job, ready), daemon=True)
            thread.start()
            threads.append(thread)
            while not ready.wait(0.05):
                # What it raised before its first line went to `sys.unraisablehook`.
                assert thread.is_alive() or ready.is_set(), "a thread ended before it began"
    except BaseException:
        is_off = True
        raise
    finally:
        go.set()
        for thread in threads:
            thread.join()
    if failed:
        raise BaseExceptionGroup("in a race of threads", failed)
