"""Replacements for the outside in the config of a replay: clock, log, tools, source, decisions.

Each has the interface of what it replaces, and gets what happened from the `Script`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from clark_agent.clock import Clock
from clark_agent.engine.journal import Emit
from clark_agent.engine.resumption import Resumption
from clark_agent.engine.run import Run
from clark_agent.errors import ToolValidationError
from clark_agent.events import AgentEvent
from clark_agent.plugins.base import (
    BeforeToolCallContext,
    BeforeToolDecision,
    plugin_name,
)
from clark_agent.run_log.fold import changed_tools
from clark_agent.run_log.records import BatchEnded, Entry, Record, RunSuspended
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import Continuation, RunLog, RunWriter
from clark_agent.tool_source import ToolSourceContext
from clark_agent.tools.base import AgentTool, ToolContext, ToolResult
from clark_agent.types import AgentMessage

if TYPE_CHECKING:
    from clark_agent.replay.script import Script

__all__ = [
    "RecordedDecisions",
    "RecordedSource",
    "ScriptedClock",
    "ScriptedLog",
    "UntimedTool",
]


class _Timer:
    """A timer that rings only when the script rings it."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Prevent it from ringing."""
        self._callback = None

    def ring(self) -> None:
        if self._callback is not None:
            self._callback()


class ScriptedClock:
    """Returns the recorded readings and ids, record by record."""

    def __init__(self, records: Sequence[Record], part: range) -> None:
        self._records = records
        self._part = part
        self._last = records[part.start].at
        self._readings: list[int] = []
        self._ids: list[str] = []
        self._timers: list[_Timer] = []
        self.move(part.start)

    def move(self, at: int) -> None:
        """Continue with the values of this record."""
        if at < self._part.stop:
            record = self._records[at]
            self._readings = [*record.now]
            if isinstance(record.entry, (BatchEnded, RunSuspended)):
                time = record.entry.time  # if it is one number, it is repeated
                self._readings += time if isinstance(time, tuple) else (time,)
            self._readings.reverse()
            self._ids = [*record.ids]

    def now_ms(self) -> int:
        """Return the next recorded reading."""
        if self._readings:
            self._last = self._readings.pop()
        return self._last

    def peek_ms(self) -> int:
        """Return the last reading."""
        return self._last

    async def sleep(self, seconds: float) -> None:
        """Let other tasks run."""
        await asyncio.sleep(0)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> _Timer:
        """Return a timer that rings when the log says so."""
        timer = _Timer(callback)
        self._timers.append(timer)
        return timer

    def ring(self) -> None:
        """Ring all timers: the time is up, as in the recorded run."""
        for timer in self._timers:
            timer.ring()

    def new_id(self) -> str:
        """Return the next recorded id."""
        return self._ids.pop(0) if self._ids else "no further id in the log"


class ScriptedLog(RunLog):
    """A log that keeps the script informed of the replay's position."""

    def __init__(self, script: Script, store: RunStore, **settings: Any) -> None:
        super().__init__(store, mail_every=None, **settings)
        self._script = script

    def journal(
        self,
        run_id: str,
        clock: Clock,
        *,
        checks_calls: bool = False,
        after: Continuation | None = None,
    ) -> RunWriter:
        """Return a writer that the script follows."""
        writer = ScriptedWriter(self, run_id, clock, checks_calls=checks_calls, after=after)
        writer.script = self._script
        return writer


class ScriptedWriter(RunWriter):
    """Writes the log, and lets the script repeat steering and interrupts at each step."""

    script: Script
    is_traced = False
    is_replay = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.receives = True  # from the script

    def began(self, run: Run, prompts: Sequence[AgentMessage]) -> None:
        self.script.run, self.script.writer = run, self
        super().began(run, prompts)

    def resumed(self, run: Run, resumption: Resumption) -> None:
        self.script.run, self.script.writer = run, self
        super().resumed(run, resumption)

    def barrier(self) -> Awaitable[None]:
        kept = super().barrier()
        return kept if self._is_closing else self.script.begun(kept)

    def write(self, entry: Entry, **more: Any) -> None:
        before, _ = self.place
        super().write(entry, **more)
        if self.place[0] > before:  # what is left out when a run is let go is not in the log either
            self.script.written(entry)

    def emitting(self, emit: Emit) -> Emit:
        counted, script = super().emitting(emit), self.script

        def emit_and_step(event: AgentEvent) -> Awaitable[None]:
            return script.stepped(counted(event))

        return emit_and_step

    async def hook_asked(self) -> None:
        await self.script.stepped(super().hook_asked())
        self.script.stalls.begin()  # one that raises never ends: the replay is not watched then

    def hook_answered(self) -> Awaitable[None]:
        self.noted.asked += 1
        self.script.stalls.end()
        return self.script.answered()

    def decided(self) -> None:
        super().decided()
        self.script.passed()


class UntimedTool(AgentTool):
    """Wraps a tool of the config without its timeout: the script decides when it ends, and what
    has happened.
    """

    def __init__(self, tool: AgentTool, script: Script) -> None:
        self._tool = tool
        self._script = script

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_THE_SCRIPT:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_tool"), name)

    def __eq__(self, other: object) -> bool:
        """Whether it stands for the other tool, which a plugin of the config may bring."""
        return other is self or other is self._tool

    def __hash__(self) -> int:
        return hash(self._tool)

    runs_in_thread = False
    timeout = None

    def did_it_happen(self, key: str) -> ToolResult | None:
        """Return the recorded answer."""
        return self._script.happened(int(key.rpartition("/")[2]))


_OF_THE_SCRIPT = (
    "_script",
    "_tool",
    "__class__",
    "did_it_happen",
    "runs_in_thread",
    "timeout",
)


class RecordedSource:
    """Returns the tools of the recorded tool source. Their results are in the log."""

    def __init__(self, script: Script, name: str) -> None:
        self.name = name
        self._script = script
        self._declared = script.sourced_before()
        self._tools: list[AgentTool] = self._made()

    def tools_for_turn(self, ctx: ToolSourceContext) -> list[AgentTool]:
        """Return the recorded tools of this turn."""
        changed = self._script.changed_tools()
        if changed is not None:
            self._declared = changed_tools(self._declared, changed)
            self._tools = self._made()
        return self._tools

    def _made(self) -> list[AgentTool]:
        return [RecordedTool(n, tool, self._script) for n, tool in self._declared.items()]


_RENAMED = {"takes_output": "is_final_answer"}
"""Flags that older logs have under another name."""


class RecordedTool(AgentTool):
    """A tool that is known only from the log."""

    def __init__(self, name: str, declared: dict[str, Any], script: Script) -> None:
        self.name = name
        self.description = declared["description"]
        self.parameters_schema = declared["parameters"]
        flags: dict[str, Any] = declared.get("flags", {})
        for flag, value in flags.items():
            setattr(self, _RENAMED.get(flag, flag), value)
        self.runs_agent = False  # its config is unknown, so its run is not replayed
        self._script = script

    def validate(self, args: Any) -> None:
        refused = self._script.refusal(self.name, args)
        if refused is not None:
            raise ToolValidationError(refused)

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        raise NotImplementedError  # the script answers


class RecordedDecisions:
    """Wraps a plugin of the config, and repeats its recorded decisions about calls."""

    def __init__(self, plugin: Any, script: Script) -> None:
        self._plugin = plugin
        self._script = script
        self.name = plugin_name(plugin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plugin, name)

    def for_run(self) -> RecordedDecisions:
        """Return the same for the plugin's object of one run."""
        fresh = self._plugin.for_run() if hasattr(self._plugin, "for_run") else self._plugin
        return RecordedDecisions(fresh, self._script)

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
        """Return the recorded decision."""
        calls = ctx.assistant_message.tool_calls
        same = [n for n, call in enumerate(calls) if call is ctx.tool_call]
        same = same or [n for n, call in enumerate(calls) if call.id == ctx.tool_call.id]
        return self._script.decision(self.name, same[0])
