"""What a fault is made of: the seams at which it acts, and the list of promises that are broken."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import msgspec

from clark_agent.run_log import LoadedRun
from clark_agent.run_log.records import Record

SEAMS = {
    # Public names, and asyncio.
    "run": "clark_agent:run",
    "run_child": "clark_agent:run_child",
    "transport": "clark_agent:LoopConfig.stream",
    "progress": "clark_agent:ToolContext.update",
    "call is over": "clark_agent:ToolContext.settle",
    "receipt": "clark_agent:SteeringReceipt.settle",
    "channel wakes a run": "clark_agent:ChannelSteering.listen",
    "channel is urgent": "clark_agent:ChannelSteering.urgency",
    "channel closes": "clark_agent:ChannelSteering.close",
    "task": "asyncio.tasks:Task",
    "timer is cancelled": "asyncio:TimerHandle.cancel",
    "a result says how the run ended": "clark_agent:RunResult.outcome",
    "records are read": "clark_agent.run_log:LoadedRun.records",
    "decision": "clark_agent.run_log:decide",
    "store puts into a mailbox": "clark_agent.run_log:MemoryStore.post",
    "store continues a run": "clark_agent.run_log:MemoryStore.reopen",
    "store writes": "clark_agent.run_log.memory:MemoryAppender.append",
    "store keeps a large result": "clark_agent.run_log.memory:MemoryAppender.keep",
    "store lets others write": "clark_agent.run_log.memory:MemoryAppender.close",
    "time of a request": "clark_agent.run_log:WaitingRequest.overdue",
    "gate comes last": "clark_agent.toolkit:ApprovalGate.is_interactive",
    "person sees a call": "clark_agent.toolkit:ApprovalRequest.text",
    "replay is compared": "clark_agent.replay:ReplayReport.drift",
    "compaction is made": "clark_agent:Compaction.__init__",
    "compaction replaces": "clark_agent:Compaction.before_request",
    "compacted messages": "clark_agent:Compaction.transform_context",
    "large result": "clark_agent:LargeResults.fits",
    "server is called": "clark_agent.mcp:McpTool.call",
    "arguments for a server": "clark_agent.mcp:McpTool.validate",
    "time for a server": "clark_agent.mcp:McpServer.timeout",
    "tracing": "clark_agent.otel:Tracing.__init__",
    "trace of earlier processes": "clark_agent.tracing:TracedRun.traces",
    "span ends": "opentelemetry.sdk.trace:Span.end",
    "page": "clark_agent.view.app:view_app",
    # Internal names: a refactoring may move these.
    "request id": "clark_agent.engine.suspension:request_id_of",
    "name of a tool": "clark_agent.mcp.names:ToolNames.name_of",
    "hook": "clark_agent.plugins.hooks:hook_of",
    "checksum": "clark_agent.run_log.reader:is_sealed",
    "worker writes to PostgreSQL": "clark_agent.run_log._postgres.writing:GroupWriter._wrote",
    "request to the page": "clark_agent.view.guard:Guard.__call__",
    "page shows what waits": "clark_agent.view.parts:Parts.waiting",
    "channel is over": "clark_agent.steering:Channel.is_over",
    "budget warns": "clark_agent.budget:Meter.nearly_reached",
    "plugins for a run": "clark_agent.plugins.hooks:Hooks.for_run",
    "spending of a run": "clark_agent.engine.spending:Spending.__init__",
    "event": "clark_agent.engine.emitter:Emitter.emit",
    "listener works": "clark_agent.engine.emitter:Emitter.is_sending",
    "batch is made": "clark_agent.engine.batch:Batch.__init__",
    "batch is run": "clark_agent.engine.batch:Batch.execute",
    "batch is settled": "clark_agent.engine.batch:Batch.settle",
    "calls are stopped": "clark_agent.engine.call:Siblings.stop",
    "batch awaits its tasks": "clark_agent.engine.batch:Batch._tasks_done",
    "grace of a call ends": "clark_agent.engine.supervised:Supervised._end_of_grace",
}


class SeamGoneError(Exception):
    """A seam is not where `SEAMS` says."""


def find(seam: str) -> tuple[Any, str]:
    """The object that owns the attribute at the seam, and the name of the attribute."""
    path = SEAMS[seam]
    module, _, names = path.partition(":")
    *outer, name = names.split(".")
    try:
        owner: Any = import_module(module)
        for step in outer:
            owner = getattr(owner, step)
    except (ImportError, AttributeError):
        owner = None
    owners = owner.__mro__ if isinstance(owner, type) else (owner,)
    for owner in owners:
        if name in getattr(owner, "__dict__", ()):
            return owner, name
    raise SeamGoneError(f"the seam {seam!r} is not at {path} any more: update SEAMS")


class Fault:
    """An installed fault."""

    def __init__(self) -> None:
        self.fired = 0
        """How often it has changed what happens."""
        self.changed: list[tuple[Any, str, Any]] = []
        """Where it acts: the owner of each attribute, its name, and what was there."""

    def wrap(self, seam: str, change: Callable[[Any], Any]) -> None:
        """Replace what is at the seam by what ``change`` makes of it."""
        owner, name = find(seam)
        original = vars(owner)[name]
        setattr(owner, name, change(original))
        self.changed.append((owner, name, original))

    def remove(self) -> None:
        """Restore the originals."""
        for owner, name, original in reversed(self.changed):
            setattr(owner, name, original)


@contextmanager
def broken(promise: str) -> Generator[Fault]:
    """Break a promise inside a ``with`` block."""
    fault = Fault()
    try:
        PROMISES[promise].break_with(fault)
        yield fault
    finally:
        fault.remove()


class Promise(msgspec.Struct, frozen=True):
    """How a promise is broken, and the test that is expected to notice."""

    break_with: Callable[[Fault], None]
    noticed_by: str
    family: str
    """The module of the fault."""


PROMISES: dict[str, Promise] = {}


def breaks(promise: str, noticed_by: str) -> Callable[[Callable[[Fault], None]], None]:
    """Register the fault that breaks a promise."""

    def enter(install: Callable[[Fault], None]) -> None:
        family = install.__module__.rpartition(".")[2]
        PROMISES[promise] = Promise(install, noticed_by, family)

    return enter


def change_records(fault: Fault, change: Callable[[Sequence[Record]], Iterable[Record]]) -> None:
    """Change the records of a run when they are read, to continue the run or to look at it."""

    def reading(field: Any) -> Any:
        def changed(loaded: LoadedRun) -> tuple[Record, ...]:
            records: tuple[Record, ...] = field.__get__(loaded)
            found = tuple(change(records))
            fault.fired += any(one is not other for one, other in zip(records, found, strict=True))
            return found

        return property(changed)

    fault.wrap("records are read", reading)
