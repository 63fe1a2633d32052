"""What the shell tool is tried with: commands whose processes can be found again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from clark_agent import CancellationToken, TextContent, ToolContext, ToolResult
from clark_agent.toolkit._supervisor import children_listed, is_alive
from clark_agent.toolkit.sandbox import SandboxMode, sandbox_status
from clark_agent.toolkit.shell import shell_tool
from clark_agent.toolkit.untrusted import without_marks

MODES: tuple[SandboxMode, ...] = ("off", "require") if sandbox_status().works else ("off",)
"""In the sandbox as well, where there is one."""

MARK = "SHELL_TEST_MARK"
HANG_SECONDS = 30.0
"""Nothing takes that long: whoever waits longer waits for ever."""


def marked(mark: str) -> list[str]:
    """The processes that have the mark in their environment, as all below a command do."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
                if f"{MARK}={mark}".encode() in environment.split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:  # it has ended in the meantime
                continue
    return found


def wait_until(holds: Callable[[], object]) -> None:
    """Wait for another process to get somewhere."""
    until = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.01)


async def wait_here_until(holds: Callable[[], object]) -> None:
    """The same, while the event loop goes on."""
    until = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < until, "it never came to that"
        await asyncio.sleep(0.01)


def unmarked(result: ToolResult) -> ToolResult:
    """The result without the marks around what strangers have said."""
    blocks = [
        TextContent(without_marks(block.text)) if isinstance(block, TextContent) else block
        for block in result.content
    ]
    return replace(result, content=tuple(blocks))


class Commands:
    """A root, and commands that run in it, all of them marked."""

    def __init__(self, root: Path, mode: SandboxMode) -> None:
        self.root = root
        self.mode = mode
        self.mark = uuid4().hex
        self._children = set(children_listed(os.getpid()))

    def tool(self, **settings: Any) -> Any:
        environment = {**settings.pop("environment", {}), MARK: self.mark}
        settings.setdefault("sandbox", self.mode)
        settings.setdefault("timeout", HANG_SECONDS)
        settings.setdefault("readable", [sys.base_prefix])  # for commands that run Python
        return shell_tool(settings.pop("root", self.root), environment=environment, **settings)

    async def run(self, command: str, **settings: Any) -> ToolResult:
        """Run a command, after which nothing runs any more."""
        result = await self.start(command, **settings)
        self.check_nothing_is_left()
        return result

    async def start(
        self,
        command: str,
        *,
        signal: CancellationToken | None = None,
        emit: Any = None,
        seconds: float | None = None,
        **settings: Any,
    ) -> ToolResult:
        context = ToolContext(tool_call_id="c", tool_name="shell", signal=signal, emit=emit)
        arguments = {"command": command, "timeout": seconds}
        result = await self.tool(**settings).execute(arguments, context)
        assert isinstance(result, ToolResult)
        return unmarked(result)

    @property
    def running(self) -> list[str]:
        """The processes of commands, and their supervisors, which have no mark."""
        alive = [f"child {pid}" for pid in self._new_children if is_alive(pid)]
        return [*marked(self.mark), *alive]

    @property
    def left(self) -> list[str]:
        """What runs, and the children that nobody has waited for."""
        return [*marked(self.mark), *[f"child {pid}" for pid in self._new_children]]

    @property
    def _new_children(self) -> list[int]:
        return sorted(set(children_listed(os.getpid())) - self._children)

    def check_nothing_is_left(self) -> None:
        """No process of a command, and no child that nobody has waited for."""
        assert self.left == []


def host(
    program: str, *arguments: str, python: str = sys.executable, **environment: str
) -> subprocess.Popen[str]:
    """Another process that uses the shell tool. ``program`` is the body of an async function."""
    text = (
        "import asyncio, os, sys\n"
        "from clark_agent import ToolContext\n"
        "from clark_agent.toolkit.sandbox import sandbox_status\n"
        "from clark_agent.toolkit.shell import shell_tool\n"
        "async def main(*arguments):\n"
        "    context = ToolContext(tool_call_id='c', tool_name='shell')\n"
        + "".join([f"    {line}\n" for line in program.strip().splitlines()])
        + "asyncio.run(main(*sys.argv[1:]))\n"
    )
    return subprocess.Popen(
        [python, "-c", text, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def told_by(process: subprocess.Popen[str]) -> str:
    """What the other process has printed at its end."""
    said, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    return said
