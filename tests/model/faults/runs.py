"""Faults of a run: events, batches, calls, cancellation, steering, budgets and child runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from msgspec.structs import replace

import clark_agent as ca
from clark_agent import events as ev
from clark_agent.budget import Meter
from tests.model.faults.base import Fault, breaks, find

# Tests that notice a fault.
CANCELLED = "tests/model/test_sweep.py::test_every_suspension_point[{}]"
STEERED = "tests/model/test_steering.py::test_a_message_at_every_suspension_point[{}]"
STEERING = "tests/engine/test_steering.py::{}"


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
