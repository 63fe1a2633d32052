"""Servers of others, and servers that misbehave. Tests are skipped where a program is missing; see
`tests.no_skips` for continuous integration.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.mcp.servers import install
from tests.selection import slow_fixture

if TYPE_CHECKING:
    from clark_agent.mcp import McpServer
    from tests.mcp.servers.everything import Everything

FAULTY = Path(__file__).parent / "servers" / "faulty.py"


class FaultyServers:
    """Stdio servers that misbehave, with one journal; see `tests.mcp.servers.faulty`."""

    def __init__(self, folder: Path) -> None:
        self._journal = folder / "journal.jsonl"

    def __call__(self, actions: dict[str, Any] | None = None, **settings: Any) -> McpServer:
        """Describe a server that does this."""
        from clark_agent.mcp import McpServer

        name = settings.pop("name", "faulty")
        program = ["-I", "-S", str(FAULTY), json.dumps(actions or {}), str(self._journal)]
        return McpServer(name, command=sys.executable, args=program, **settings)

    @property
    def journal(self) -> list[dict[str, Any]]:
        """What the servers noted, but for a line that is being written."""
        if not self._journal.exists():
            return []
        *lines, _ = self._journal.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The processes that were started: ``pid``, and ``at`` what time."""
        return [entry for entry in self.journal if "pid" in entry]

    def received(self, method: str) -> list[dict[str, Any]]:
        """The messages with this method."""
        return [entry for entry in self.journal if entry.get("method") == method]

    def running(self) -> list[int]:
        """The processes that have not ended."""
        return [entry["pid"] for entry in self.starts if _runs(entry["pid"])]


@pytest.fixture
@slow_fixture
def faulty(tmp_path: Path) -> Iterator[FaultyServers]:
    """Servers that misbehave. None of their processes may be left after the test."""
    servers = FaultyServers(tmp_path)
    yield servers
    deadline = time.monotonic() + 10
    while (left := servers.running()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # one that ended and was not waited for is no longer running
        return " Z " not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return True


@pytest.fixture(scope="session")
def foreign() -> Callable[[str], None]:
    """Skip the test unless the programs of these folders are installed."""

    def need(*names: str) -> None:
        for name in names:
            if reason := install.missing(name):
                pytest.skip(reason)

    return need


@pytest.fixture(scope="session")
@slow_fixture
def everything_http(foreign: Callable[[str], None]) -> Iterator[Everything]:
    """The server with every feature, over streamable HTTP."""
    from tests.mcp.servers.everything import Everything

    foreign("node")
    with Everything("streamableHttp") as server:
        yield server


@pytest.fixture(scope="session")
@slow_fixture
def everything_sse(foreign: Callable[[str], None]) -> Iterator[Everything]:
    """The server with every feature, over the older transport SSE."""
    from tests.mcp.servers.everything import Everything

    foreign("node")
    with Everything("sse") as server:
        yield server
