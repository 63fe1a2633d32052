"""Runs that wait: each story is suspended at least once, and a policy decides what it asks.

The store keeps the order in which the records of all runs of a tree were written, so that a test
can cut the whole tree behind any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from clark_agent import (
    AgentContext,
    AgentTool,
    BeforeToolCallContext,
    Block,
    Budget,
    ExecutionMode,
    LoopConfig,
    LoopOutcome,
    Rewrite,
    RunIdentity,
    RunResult,
    ToolContext,
    ToolResult,
    agent_tool,
    run,
)
from clark_agent.errors import ToolSuspended
from clark_agent.messages.wire import encode_json
from clark_agent.run_log import MemoryStore, RunLog, RunStore, decide, deliver, resume
from clark_agent.run_log.records import Record
from clark_agent.run_log.store import RunAppender
from clark_agent.testing import call
from clark_agent.waiting import (
    Allow,
    Decision,
    Deny,
    GiveArguments,
    GiveResult,
    Suspend,
    WaitingRequest,
)
from tests.run_log.stories import Deed, Meddling, Story, after, through_json

ROOT = "root"

WAITING: dict[str, Callable[[Story], None]] = {}
"""The stories, by name."""


def story(tell: Callable[[Story], None]) -> Callable[[Story], None]:
    WAITING[tell.__name__] = tell
    return tell


def begin(name: str) -> Story:
    """A fresh story."""
    new = Story(name)
    new.context = AgentContext("You wait.", identity=RunIdentity(ROOT, conversation_id="talk"))
    WAITING[name](new)
    return new


# --- what asks ------------------------------------------------------------------------------------


class Gate:
    """Holds back every call of some tools."""

    inheritable_to_child = True

    def __init__(self, *tools: str, name: str = "gate", **how: Any) -> None:
        self.name = name
        self.tools = tools
        self.how = how

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | None:
        if ctx.tool_call.name not in self.tools:
            return None
        return Suspend({"may": ctx.tool_call.name}, **self.how)


def asking(s: Story, name: str = "ask", **how: Any) -> Deed:
    """A tool that waits for its result."""

    def asks(args: Any, ctx: ToolContext) -> ToolResult:
        raise ToolSuspended({"question": args.get("q", "?")}, **how)

    return Deed(s, name, asks)


def policy(request: WaitingRequest) -> Decision | None:
    """What is decided about a request; None: only time or an event decides it."""
    args = request.arguments if isinstance(request.arguments, dict) else {}
    if request.event is not None or request.until is not None or args.get("decide") == "expire":
        return None
    if request.needs == "result":
        return Deny("no answer") if args.get("q") == "deny" else GiveResult({"answer": 42})
    match args.get("decide"):
        case "deny":
            return Deny("too much")
        case "arguments":
            return GiveArguments({"n": 7})
        case "wrong":
            return GiveArguments("nothing like an object")
        case "result":
            return GiveResult("done by hand")
        case _:
            return Allow()


# --- the stories ----------------------------------------------------------------------------------


@story
def one_call_waits(s: Story) -> None:
    s.deed("pay")
    s.settings["plugins"] = [Gate("pay")]
    s.model(call("pay", n=1), "Paid.")


@story
def all_decisions(s: Story) -> None:
    s.deed("pay", after(2))
    s.deed("work", after(3))
    s.tools.append(asking(s))
    s.settings["plugins"] = [Gate("pay", assignee="ada"), Meddling()]
    s.model(
        [
            call("pay", n=n, decide=d)
            for n, d in enumerate(("allow", "deny", "arguments", "result"))
        ],
        [call("work"), call("ask", q="what"), call("pay", decide="wrong"), call("ask", q="deny")],
        [call("pay", changes="result"), call("work", wants="block"), call("ask", changes="error")],
        "Done.",
    )


@story
def one_after_the_other(s: Story) -> None:
    s.deed("pay", after(1))
    s.deed("work", after(1))
    s.tools.append(asking(s))
    s.settings["plugins"] = [Gate("pay")]
    s.settings["default_execution_mode"] = ExecutionMode.SEQUENTIAL
    s.model(
        [call("work", n=1), call("pay", n=2), call("work", n=3), call("pay", n=4), call("ask")],
        [call("ask"), call("work")],
        "Done.",
    )


@story
def two_gates_and_a_rewrite(s: Story) -> None:
    """The second gate asks when the first has allowed, and a change is asked about again."""

    class Rounds:
        name = "rounds"

        def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Rewrite | None:
            n = ctx.args.get("n", 0)
            return Rewrite({**ctx.args, "n": n // 10 * 10}) if n % 10 else None

    s.deed("pay", after(1))
    s.settings["plugins"] = [Gate("pay", name="first"), Rounds(), Gate("pay", name="second")]
    s.model([call("pay", n=25), call("pay", n=30, decide="arguments")], "Done.")


@story
def a_batch_that_ends_it(s: Story) -> None:
    s.deed("pay", ToolResult.terminal("that is all"))
    s.deed("fails", ToolResult.error("no"), aborts_siblings_on_error=True)
    s.settings["plugins"] = [Gate("pay")]
    s.model([call("pay"), call("fails")], [call("pay"), call("pay")], "It is not asked for this.")


@story
def time_and_events(s: Story) -> None:
    s.deed("pay", after(1))
    s.deed("later", "later")
    s.tools += [asking(s, "wake", until=1_500_000), asking(s, "hook", event="paid")]
    s.settings["plugins"] = [
        Gate("later", until=1_400_000),
        Gate("pay", name="hasty", expires_in=50),
    ]
    s.model(
        [call("later"), call("wake"), call("pay", decide="expire")],
        [call("hook"), call("later")],
        "Done.",
    )


def _tree(s: Story, gate: Gate, *, levels: int = 3) -> AgentTool:
    """An agent that has an agent, and so on. Each works, pays, and asks the next."""
    below: list[AgentTool] = []
    made: AgentTool | None = None
    for level in range(levels, 0, -1):
        calls = [call("work", n=level), call("pay", n=level)]
        steps: list[Any] = [
            [*calls, *[call(tool.name, task="down") for tool in below]],
            call("work", n=10 + level),
            f"Done on level {level}.",
        ]
        config = LoopConfig(
            stream=s.model(*steps, prefix=f"l{level}"),
            tools=[Deed(s, "work", after(2)), Deed(s, "pay", after(1)), *below],
            plugins=[gate],
            clock=s.clock,
        )
        made = agent_tool(f"level{level}", "goes down", config, system_prompt=f"Level {level}.")
        below = [made]
    assert made is not None
    return made


def _with_top(s: Story, *steps: Any) -> None:
    top = s.model(*steps)
    s.models.insert(0, s.models.pop(s.models.index(top)))


@story
def a_tree(s: Story) -> None:
    s.tools.append(_tree(s, Gate("pay")))
    s.deed("work", after(2))
    _with_top(s, [call("level1", task="go"), call("work")], call("work"), "All done.")


@story
def a_tree_with_a_budget(s: Story) -> None:
    s.tools.append(_tree(s, Gate("pay"), levels=2))
    s.settings["budget"] = Budget(tokens=2_000, wrap_up_at=None)
    _with_top(s, call("level1", task="go"), call("level1", task="again"), "All done.")


@story
def a_tree_that_waits_nowhere(s: Story) -> None:
    """Nothing is asked: only crashes part it."""
    s.tools.append(_tree(s, Gate()))
    s.deed("work", after(2))
    _with_top(s, [call("level1", task="go"), call("work")], "All done.")


@story
def agents_side_by_side(s: Story) -> None:
    """Two agents wait at once, one of them with the call of a tool that must be allowed itself."""
    child = LoopConfig(
        stream=s.model([call("pay", n=1), call("ask")], "Asked.", prefix="c"),
        tools=[Deed(s, "pay", after(1)), asking(s)],
        plugins=[Gate("pay", assignee="below")],
        clock=s.clock,
    )
    s.tools.append(agent_tool("helper", "helps", child))
    s.deed("pay", after(4))
    s.settings["plugins"] = [Gate("pay", "helper")]
    _with_top(
        s,
        [call("helper", task="a"), call("pay", n=2), call("helper", task="b")],
        call("helper", task="c"),
        "All done.",
    )


class Blocks:
    name = "blocks"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Block | None:
        return Block("not that one") if ctx.args.get("n") == 3 else None


@story
def other_hooks(s: Story) -> None:
    s.deed("pay", after(1), idempotent=True)
    s.settings["plugins"] = [Blocks(), Gate("pay"), Meddling()]
    s.settings["max_tool_calls_per_turn"] = 3
    s.model(
        [call("pay", n=n) for n in range(5)],
        call("pay", n=9, changes="end"),
        "It is not asked for this.",
    )


# --- living through them --------------------------------------------------------------------------


class OrderedStore(MemoryStore):
    """Keeps the order of the records of all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[Record] = []

    def create(self, run_id: str) -> Any:
        return _Ordered(super().create(run_id), self.order)

    def reopen(self, run_id: str, *, after: int) -> Any:
        return _Ordered(super().reopen(run_id, after=after), self.order)


class _Ordered:
    def __init__(self, appender: RunAppender, order: list[Record]) -> None:
        self._appender = appender
        self._order = order

    def append(self, record: Record, data: bytes, /) -> None:
        self._appender.append(record, data)
        self._order.append(record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._appender, name)


def store_with(records: Iterable[Record]) -> OrderedStore:
    """A store that has these records, in this order."""
    store = OrderedStore()
    of_run: dict[str, list[Record]] = {}
    for record in records:
        store.order.append(record)
        of_run.setdefault(record.run, []).append(record)
    for run_id, own in of_run.items():
        appender = MemoryStore.create(store, run_id)
        for record in own:
            appender.append(through_json(record), encode_json(record))
        appender.close()
    return store


async def settle(store: RunStore, result: RunResult, story: Story) -> None:
    """Decide what can be decided; let the time pass, and events happen, for the rest."""
    left: list[WaitingRequest] = []
    for request in result.waiting:
        decision = policy(request)
        if decision is None:
            left.append(request)
        else:
            await decide(store, ROOT, request.request_id, decision, by="tester", clock=story.clock)
    for request in left:
        if request.event is not None:
            deliver(store, request.run_id, request.event, {"paid": True}, id=request.request_id)
        times = [t for t in (request.until, request.expires_at) if t is not None]
        story.clock.time_ms = max([story.clock.time_ms, *times])


async def live(name: str) -> tuple[Story, RunResult, OrderedStore, list[Sequence[Any]]]:
    """Play a story to its end. Returns the events of each process too."""
    store, told = OrderedStore(), begin(name)
    config = told.config(RunLog(store))
    result = await run(told.prompts, told.context, config)
    parts: list[Sequence[Any]] = [tuple(told.sink.events)]
    while result.outcome is LoopOutcome.SUSPENDED:
        await settle(store, result, told)
        told.sink.events.clear()
        result = await resume(store, ROOT, config)
        parts.append(tuple(told.sink.events))
    return told, result, store, parts


async def carry_on(store: RunStore, told: Story) -> RunResult:
    """Resume a run, and decide what it asks, until it has ended."""
    config = told.config(RunLog(store))
    while True:
        result = await resume(store, ROOT, config)
        if result.outcome is not LoopOutcome.SUSPENDED:
            return result
        await settle(store, result, told)
