"""Faults: each breaks one promise of the package while tests run.

A fault acts at a seam, not on a line of code: it swallows an event on its way to the listeners,
ignores a transport's ``aclose``, or shifts the turn that a receipt names. `SEAMS` says where each
seam is. When code moves, update its entry there. A seam that cannot be found is an error.

A fault counts its activations. One that never fires proves nothing, whether the tests pass or fail.

``CLARK_AGENT_FAULT=<promise> python -m pytest -p tests.model.faults`` runs tests under a fault.
`tests.model.mutants` does so for every promise.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import pytest
from hypothesis import Phase, settings
from msgspec.structs import replace

import clark_agent as ca
from clark_agent import events as ev
from clark_agent.budget import Meter

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
    # Internal names: a refactoring may move these.
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

# Tests that notice a fault.
CANCELLED = "tests/model/test_sweep.py::test_every_suspension_point[{}]"
STEERED = "tests/model/test_steering.py::test_a_message_at_every_suspension_point[{}]"
STEERING = "tests/engine/test_steering.py::{}"


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
        self._restore = ExitStack()

    def wrap(self, seam: str, change: Callable[[Any], Any]) -> None:
        """Replace what is at the seam by what ``change`` makes of it."""
        owner, name = find(seam)
        original = vars(owner)[name]
        setattr(owner, name, change(original))
        self._restore.callback(setattr, owner, name, original)

    def remove(self) -> None:
        """Restore the originals."""
        self._restore.close()


@contextmanager
def broken(promise: str) -> Iterator[Fault]:
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


PROMISES: dict[str, Promise] = {}


def breaks(promise: str, noticed_by: str) -> Callable[[Callable[[Fault], None]], None]:
    """Register the fault that breaks a promise."""

    def enter(install: Callable[[Fault], None]) -> None:
        PROMISES[promise] = Promise(install, noticed_by)

    return enter


# --- events -----------------------------------------------------------------------------------


class _Nothing:
    """An awaitable that completes at once."""

    def __await__(self) -> Iterator[Any]:
        return iter(())


def is_failing() -> bool:
    """Whether an exception is being handled: events emitted now close a run that fails."""
    return sys.exception() is not None


def swallow(fault: Fault, is_swallowed: Callable[[ev.AgentEvent], bool]) -> None:
    """Drop these events while a failed run is being closed."""

    def change(emit: Any) -> Any:
        def emit_others(self: Any, event: ev.AgentEvent) -> Any:
            if not (is_failing() and is_swallowed(event)):
                return emit(self, event)
            fault.fired += 1
            return _Nothing()

        return emit_others

    fault.wrap("event", change)


@breaks("a turn that fails has no turn_end", CANCELLED.format("one fast tool"))
def _(fault: Fault) -> None:
    swallow(fault, lambda event: isinstance(event, ev.TurnEnd))


@breaks("a run that fails has no agent_end", CANCELLED.format("one fast tool"))
def _(fault: Fault) -> None:
    swallow(fault, lambda event: isinstance(event, ev.AgentEnd))


@breaks("an answer that is cut off is not discarded", CANCELLED.format("one fast tool"))
def _(fault: Fault) -> None:
    swallow(fault, lambda event: isinstance(event, ev.MessageDiscarded))


@breaks(
    "messages that were not announced yet are forgotten",
    CANCELLED.format("a hook observer that waits"),
)
def _(fault: Fault) -> None:
    """The results of an interrupted batch are left out: they belong to another promise."""
    settled: dict[int, object] = {}
    forgotten: dict[int, object] = {}

    def change(settle: Any) -> Any:
        async def remember(self: Any, *args: Any) -> Any:
            outcome = await settle(self, *args)
            settled.update({id(message): message for message in outcome.results})
            return outcome

        return remember

    def is_forgotten(event: ev.AgentEvent) -> bool:
        if isinstance(event, ev.MessageStart) and id(event.message) not in settled:
            forgotten[id(event.message)] = event.message
            return True
        return isinstance(event, ev.MessageEnd) and id(event.message) in forgotten

    fault.wrap("batch is settled", change)
    swallow(fault, is_forgotten)


# --- batches of tool calls --------------------------------------------------------------------


@breaks("an interrupted batch drops its results", CANCELLED.format("two tools at once"))
def _(fault: Fault) -> None:
    def change(settle: Any) -> Any:
        async def drop(self: Any, *args: Any) -> Any:
            outcome = await settle(self, *args)
            fault.fired += bool(outcome.results)
            return replace(outcome, results=[], calls=[])

        return drop

    fault.wrap("batch is settled", change)


@breaks(
    "calls of an answer that no batch has taken up stay unanswered",
    CANCELLED.format("a stream that is error_message"),
)
def _(fault: Fault) -> None:
    taken_up: WeakSet[Any] = WeakSet()

    def watch(execute: Any) -> Any:
        def take_up(self: Any, *args: Any) -> Any:
            taken_up.add(self)
            return execute(self, *args)

        return take_up

    def change(settle: Any) -> Any:
        async def drop(self: Any, *args: Any) -> Any:
            outcome = await settle(self, *args)
            if self in taken_up:
                return outcome
            fault.fired += bool(outcome.results)
            return replace(outcome, results=[], calls=[])

        return drop

    fault.wrap("batch is run", watch)
    fault.wrap("batch is settled", change)


@breaks("tasks of an interrupted batch are left running", CANCELLED.format("two tools at once"))
def _(fault: Fault) -> None:
    def unless_failing(stop: Any) -> Any:
        def stop_others(self: Any, **kwargs: Any) -> None:
            if not is_failing():
                stop(self, **kwargs)

        return stop_others

    def change(tasks_done: Any) -> Any:
        async def leave(self: Any) -> None:
            waiting = tasks_done(self)
            try:
                waiting.send(None)
            except StopIteration:  # there was nothing to wait for
                return
            waiting.close()
            fault.fired += 1

        return leave

    fault.wrap("calls are stopped", unless_failing)
    fault.wrap("batch awaits its tasks", change)


@breaks("a truncated call is run", CANCELLED.format("a stream that is truncated"))
def _(fault: Fault) -> None:
    """The batch sees an answer that is complete."""

    def whole(value: Any) -> Any:
        if not isinstance(value, ca.AssistantMessage):
            return value
        if value.stop_reason is not ca.StopReason.MAX_TOKENS or not value.tool_calls:
            return value
        fault.fired += 1
        return replace(value, stop_reason=ca.StopReason.TOOL_USE)

    def change(init: Any) -> Any:
        def init_whole(self: Any, *args: Any) -> None:
            init(self, *map(whole, args))

        return init_whole

    fault.wrap("batch is made", change)


# --- one tool call ----------------------------------------------------------------------------


@breaks(
    "a tool that ignores everything is waited for",
    CANCELLED.format("a tool that swallows its cancellation"),
)
def _(fault: Fault) -> None:
    def change(_: Any) -> Any:
        def wait_on(self: Any) -> None:
            fault.fired += 1

        return wait_on

    fault.wrap("grace of a call ends", change)


def ignore(fault: Fault, method: Any, is_ignored: Callable[[Any, str], bool]) -> Any:
    """The method, except that some calls have no effect, by object and by calling module."""

    def call_others(self: Any, *args: Any) -> Any:
        if not is_ignored(self, sys._getframe(1).f_globals["__name__"]):
            return method(self, *args)
        fault.fired += 1
        return None

    return call_others


@breaks("timers of a call stay behind", CANCELLED.format("two tools at once"))
def _(fault: Fault) -> None:
    runs_calls = find("grace of a call ends")[0].__module__
    fault.wrap(
        "timer is cancelled",
        lambda cancel: ignore(fault, cancel, lambda _, caller: caller == runs_calls),
    )


@breaks("progress after the return is told", CANCELLED.format("a tool that keeps its handle"))
def _(fault: Fault) -> None:
    returned: WeakSet[ca.ToolContext] = WeakSet()

    def change(_: Any) -> Any:
        def go_on(self: ca.ToolContext, **kwargs: Any) -> None:
            returned.add(self)

        return go_on

    def watch(update: Any) -> Any:
        def tell(self: ca.ToolContext, partial: Any) -> Any:
            fault.fired += self in returned
            return update(self, partial)

        return tell

    fault.wrap("call is over", change)
    fault.wrap("progress", watch)


# --- the model --------------------------------------------------------------------------------


class _Unclosed:
    """A stream whose ``aclose`` does nothing."""

    def __init__(self, fault: Fault, events: Any) -> None:
        self._fault = fault
        self._events = events

    def __aiter__(self) -> Any:
        return aiter(self._events)

    async def aclose(self) -> None:
        self._fault.fired += getattr(self._events, "ag_frame", self) is not None


class _Transport:
    """A transport whose streams ignore ``aclose``."""

    def __init__(self, fault: Fault, stream: Any) -> None:
        self._fault = fault
        self._stream = stream

    def __call__(self, request: Any, signal: Any) -> _Unclosed:
        return _Unclosed(self._fault, self._stream(request, signal))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@breaks("the model's stream is not closed", CANCELLED.format("one fast tool"))
def _(fault: Fault) -> None:
    fault.wrap(
        "transport",
        lambda field: property(lambda config: _Transport(fault, field.__get__(config))),
    )


# --- cancellation -----------------------------------------------------------------------------


def change_tasks(fault: Fault, method: str, is_ignored: Callable[[Any, str], bool]) -> None:
    """Make some calls of a task's method do nothing. In a subclass, since tasks are built in."""

    def change(task_type: Any) -> Any:
        ignoring = ignore(fault, getattr(task_type, method), is_ignored)
        return type(task_type.__name__, (task_type,), {method: ignoring})

    fault.wrap("task", change)


def keep_cancellation(fault: Fault, *after: type[ev.AgentEvent]) -> None:
    """Ignore ``uncancel`` while the newest event of the task's run is one of these."""
    newest: WeakKeyDictionary[Any, type[ev.AgentEvent]] = WeakKeyDictionary()

    def watch(emit: Any) -> Any:
        def remember(self: Any, event: ev.AgentEvent) -> Any:
            if (task := asyncio.current_task()) is not None:
                newest[task] = type(event)
            return emit(self, event)

        return remember

    fault.wrap("event", watch)
    change_tasks(
        fault,
        "uncancel",
        lambda task, caller: caller.startswith("clark_agent.") and newest.get(task) in after,
    )


@breaks("a token's cancellation is left on the task", CANCELLED.format("one fast tool"))
def _(fault: Fault) -> None:
    keep_cancellation(fault, ev.AgentEnd)


@breaks("breaking off an answer leaves a cancellation on the task", STEERED.format("one fast tool"))
def _(fault: Fault) -> None:
    keep_cancellation(fault, ev.ProviderRequestPrepared, ev.MessageStart, ev.MessageUpdate)


@breaks(
    "a cancelled task ends as aborted",
    "tests/model/test_sweep.py::test_a_task_that_is_cancelled_at_its_first_wait_is_cancelled",
)
def _(fault: Fault) -> None:
    def change(run: Any) -> Any:
        async def abort(*args: Any) -> Any:
            try:
                return await run(*args)
            except asyncio.CancelledError as error:
                if not isinstance(error.__cause__, ca.RunAborted):
                    raise
                fault.fired += 1
                raise error.__cause__ from None

        return abort

    fault.wrap("run", change)


# --- plugins ----------------------------------------------------------------------------------


@breaks("state is shared between runs", CANCELLED.format("steering at every poll"))
def _(fault: Fault) -> None:
    def change(_: Any) -> Any:
        def share(self: Any) -> Any:
            fault.fired += any(hasattr(plugin, "for_run") for plugin in self.plugins)
            return self

        return share

    fault.wrap("plugins for a run", change)


# --- steering ---------------------------------------------------------------------------------


@breaks(
    "what waits when the run ends is not handed back",
    STEERING.format("test_what_comes_while_the_last_batch_votes_to_end_expires"),
)
def _(fault: Fault) -> None:
    def change(close: Any) -> Any:
        def drop(self: Any, *, is_kept: bool = False) -> list[ca.AgentMessage]:
            fault.fired += bool(close(self, is_kept=is_kept))
            return []

        return drop

    fault.wrap("channel closes", change)


@breaks("a receipt names the turn before", STEERED.format("one fast tool"))
def _(fault: Fault) -> None:
    def change(settle: Any) -> Any:
        def settle_early(self: Any, status: Any, turn: int | None = None) -> None:
            fault.fired += turn is not None
            settle(self, status, None if turn is None else turn - 1)

        return settle_early

    fault.wrap("receipt", change)


@breaks("what is sent after the run waits for the next", STEERED.format("one fast tool"))
def _(fault: Fault) -> None:
    def change(is_over: Any) -> Any:
        def never(self: Any) -> bool:
            fault.fired += is_over.__get__(self)
            return False

        return property(never)

    fault.wrap("channel is over", change)


@breaks(
    "steering breaks nothing off",
    "tests/model/test_steering.py::test_a_message_during_the_first_answer_is_delivered_and_the_run_goes_on",
)
def _(fault: Fault) -> None:
    def change(listen: Any) -> Any:
        def sleep_on() -> None:
            fault.fired += 1

        return lambda self, wake: listen(self, sleep_on)

    fault.wrap("channel wakes a run", change)


@breaks(
    "steering holds no call back",
    STEERING.format("test_one_by_one_the_calls_after_the_one_that_runs_are_not_run"),
)
def _(fault: Fault) -> None:
    def change(urgency: Any) -> Any:
        def at_leisure(self: Any) -> ca.SteerWhen | None:
            when: ca.SteerWhen | None = urgency.__get__(self)
            if when is not ca.SteerWhen.BEFORE_NEXT_TOOL:
                return when
            fault.fired += 1
            return ca.SteerWhen.AFTER_BATCH

        return property(at_leisure)

    fault.wrap("channel is urgent", change)


@breaks(
    "steering cancels a listener that works",
    STEERING.format("test_a_listener_may_steer_at_every_event_and_is_never_cancelled"),
)
def _(fault: Fault) -> None:
    """Only the emitter itself sees that it is busy."""

    def change(field: Any) -> Any:
        emitter = find("event")[0].__module__

        def is_sending(self: Any) -> bool:
            is_busy: bool = field.__get__(self)
            if not is_busy or sys._getframe(1).f_globals["__name__"] == emitter:
                return is_busy
            fault.fired += 1
            return False

        return property(is_sending, field.__set__)

    fault.wrap("listener works", change)


# --- budgets and children ---------------------------------------------------------------------


@breaks(
    "a child spends what it likes",
    "tests/test_budget.py::test_what_any_run_of_the_tree_spends_counts_for_all",
)
def _(fault: Fault) -> None:
    def change(init: Any) -> Any:
        def forget(self: Any, *args: Any, above: Any = None, **kwargs: Any) -> None:
            init(self, *args, above=above, **kwargs)
            shared = () if above is None else above.meters
            fault.fired += bool(shared)
            self.meters = tuple([meter for meter in self.meters if meter not in shared])

        return forget

    fault.wrap("spending of a run", change)


@breaks(
    "a child's tokens are not added up",
    "tests/test_sub_agents.py::test_tokens_are_added_up_the_tree",
)
def _(fault: Fault) -> None:
    def change(run: Any) -> Any:
        async def forget(*args: Any) -> ca.RunResult:
            try:
                result: ca.RunResult = await run(*args)
            except ca.LoopError as error:
                fault.fired += error.tree_usage != error.usage
                error.tree_usage = error.usage
                raise
            fault.fired += result.tree_usage != result.usage
            return replace(result, tree_usage=result.usage)

        return forget

    fault.wrap("run", change)


@breaks(
    "nobody is told that the budget is nearly spent",
    "tests/test_budget.py::test_the_model_is_told_once_and_may_close",
)
def _(fault: Fault) -> None:
    def change(nearly_reached: Any) -> Any:
        def never(self: Meter) -> None:
            fault.fired += nearly_reached(self) is not None

        return never

    fault.wrap("budget warns", change)


@breaks(
    "a child goes on when its call is stopped",
    "tests/test_sub_agents.py::test_a_cancelled_task_stops_the_whole_tree",
)
def _(fault: Fault) -> None:
    owner, name = find("run_child")
    starts_children = vars(owner)[name].__module__
    change_tasks(fault, "cancel", lambda _, caller: caller == starts_children)


# --- running tests under a fault ----------------------------------------------------------------

NAME = "CLARK_AGENT_FAULT"
VERDICT = "CLARK_AGENT_FAULT_VERDICT"
"""Environment variables: the promise to break, and the file to write the `Verdict` to."""

# One counterexample is enough, so there is no need to shrink it.
settings.register_profile(
    "faults",
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)

_IDLE_SECONDS = 5
_MOST_SECONDS = 120


class Verdict(msgspec.Struct):
    """What the tests have shown about a fault."""

    fired: int = 0
    test: str | None = None
    """The first test that failed."""
    fired_in_test: int = 0
    hung: bool = False
    """Whether that test did not end."""


class _Watch:
    """Records how often the fault fires, and which test fails or hangs under it."""

    def __init__(self, fault: Fault, path: str) -> None:
        self._fault = fault
        self._path = Path(path)
        self._verdict = Verdict()
        self._test = ""
        self._fired_before = 0
        self._seconds = self._idle_seconds = 0
        self._cpu_seconds = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._test, self._fired_before = item.nodeid, self._fault.fired
        self._seconds = self._idle_seconds = 0
        signal.signal(signal.SIGALRM, self._second_is_over)
        signal.setitimer(signal.ITIMER_REAL, 1, 1)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _second_is_over(self, *_: object) -> None:
        used = time.process_time() - self._cpu_seconds
        self._cpu_seconds += used
        self._seconds += 1
        self._idle_seconds = self._idle_seconds + 1 if used < 0.05 else 0
        if self._idle_seconds >= _IDLE_SECONDS or self._seconds >= _MOST_SECONDS:
            self._failed(hung=True)
            self.pytest_sessionfinish()
            os._exit(1)  # an orderly exit would wait for what hangs

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._verdict.test is None:
            self._failed()

    def _failed(self, *, hung: bool = False) -> None:
        fired = self._fault.fired - self._fired_before
        self._verdict = Verdict(test=self._test, fired_in_test=fired, hung=hung)

    def pytest_sessionfinish(self) -> None:
        self._verdict.fired = self._fault.fired
        self._path.write_bytes(msgspec.json.encode(self._verdict))


def pytest_configure(config: pytest.Config) -> None:
    """Break the promise that the environment names, before any test module is imported."""
    if (promise := os.environ.get(NAME)) is None:
        return
    if promise not in PROMISES:
        raise pytest.UsageError(f"{NAME}: there is no promise {promise!r}")
    fault = config.stash[_installed] = Fault()
    try:
        PROMISES[promise].break_with(fault)
    except SeamGoneError as error:
        raise pytest.UsageError(str(error)) from error
    if (path := os.environ.get(VERDICT)) is not None:
        config.pluginmanager.register(_Watch(fault, path))


def pytest_unconfigure(config: pytest.Config) -> None:
    if (fault := config.stash.get(_installed, None)) is not None:
        fault.remove()


_installed = pytest.StashKey[Fault]()
