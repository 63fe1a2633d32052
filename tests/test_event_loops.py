"""The event loop that ``--event-loop`` names is the one in force, wherever a test gets a loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clark_agent import AgentContext, LoopConfig, run_sync, tool
from clark_agent.testing import ScriptedStream, call
from tests import event_loops
from tests.engine.support import hurry, let_others_run

ROOT = Path(__file__).resolve().parent.parent


def kind() -> str:
    """What the running loop is, by what it does."""
    loop = asyncio.get_running_loop()
    if type(loop).__mro__[1].__module__ == "uvloop":
        return "uvloop"
    begun: list[bool] = []

    async def begin() -> None:
        begun.append(True)

    task = loop.create_task(begin())
    was_eager = bool(begun)
    task.cancel()
    return "eager" if was_eager else "asyncio"


async def kind_here() -> str:
    return kind()


class TestInForce:
    @pytest.fixture
    def chosen(self, request: pytest.FixtureRequest) -> Any:
        return request.config.getoption("--event-loop")

    async def test_in_a_test_of_pytest_asyncio(self, chosen: str) -> None:
        assert kind() == chosen
        assert event_loops.starts_tasks_at_once() is (chosen == "eager")

    def test_in_a_test_that_calls_asyncio_run(self, chosen: str) -> None:
        assert asyncio.run(kind_here()) == chosen

    async def test_in_a_thread_with_a_loop_of_its_own(self, chosen: str) -> None:
        assert await asyncio.to_thread(lambda: asyncio.run(kind_here())) == chosen

    @pytest.mark.parametrize("place", ["script", "loop"])
    def test_in_a_loop_that_the_package_makes(self, chosen: str, place: str) -> None:
        seen: list[str] = []

        @tool
        async def look() -> str:
            """Look around."""
            seen.append(kind())
            return "done"

        config = LoopConfig(stream=ScriptedStream([call("look"), "ok"]), tools=[look])

        async def main() -> None:
            run_sync("go", AgentContext(), config)

        if place == "script":
            run_sync("go", AgentContext(), config)
        else:
            asyncio.run(main())
        assert seen == [chosen]

    async def test_a_task_for_later_waits(self) -> None:
        begun: list[bool] = []

        async def begin() -> None:
            begun.append(True)

        task = event_loops.task_for_later(begin())
        assert begun == []
        await task
        assert begun == [True]

    async def test_timers_are_seen_and_hurried(self) -> None:
        went_off: list[str] = []
        loop = asyncio.get_running_loop()
        later = loop.call_later(90, went_off.append, "second")
        loop.call_later(30, went_off.append, "first")
        never = loop.call_later(50, went_off.append, "never")
        never.cancel()
        last = loop.call_later(200, went_off.append, "last")
        assert later in event_loops.timers()
        assert never not in event_loops.timers()
        hurry(100)
        await let_others_run()
        assert went_off == ["first", "second"]
        assert event_loops.timers() == [last]
        last.cancel()
        assert event_loops.timers() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", event_loops.CHOICES)
def test_the_option_is_obeyed_or_refused(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--event-loop={name}",
         f"{__file__}::TestInForce"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if (why := event_loops.missing(name)) is None:
        assert ran.returncode == pytest.ExitCode.OK, ran.stdout
    else:
        assert ran.returncode == pytest.ExitCode.USAGE_ERROR
        assert why in ran.stderr
