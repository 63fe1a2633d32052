"""Nothing runs that needs approval and has none, and nobody is asked more than needed."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clark_agent import (
    AgentContext,
    AgentTool,
    AssistantMessage,
    BeforeToolCallContext,
    CancellationToken,
    ConfigError,
    ExecutionMode,
    LoopConfig,
    Rewrite,
    RunAborted,
    RunIdentity,
    RunResult,
    RunStoppedByTool,
    ToolCall,
    ToolContext,
    agent_tool,
    run,
    tool,
)
from clark_agent.errors import ToolFatal
from clark_agent.plugins.base import Block
from clark_agent.run_log import MemoryStore, RunLog, resume
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import (
    ask_user_tool,
    calculator,
    current_time_tool,
    fetch_url_tool,
    file_tools,
    finish,
    shell_tool,
)
from clark_agent.toolkit._visible import call_line, visible
from clark_agent.toolkit.approval import Approval, ApprovalGate, ApprovalRequest, Denied
from clark_agent.toolkit.ask import OneAtATime
from clark_agent.toolkit.workspace import Workspace
from tests.engine.support import (
    CONTEXT,
    Waiting,
    Work,
    completed,
    decided,
    failed,
    let_others_run,
    results,
    texts,
)
from tests.races import race

Said = Approval | Denied


class Person:
    """Answers in turn, ``once`` when there is nothing left to say; remembers the requests."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.requests: list[ApprovalRequest] = []

    async def __call__(self, request: ApprovalRequest) -> Any:
        self.requests.append(request)
        answer = self.answers.pop(0) if self.answers else Approval.ONCE
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @property
    def asked(self) -> list[str]:
        return [request.summary for request in self.requests]


def reasons(outcome: Any) -> list[str | None]:
    """Why each call was not run; None for those that were."""
    return [(answer.details or {}).get("reason") for answer in results(outcome)]


async def work_under(
    gate: ApprovalGate, *calls: ToolCall, **settings: Any
) -> tuple[RunResult, Work]:
    work = Work()
    settings.setdefault("plugins", [gate])
    model = ScriptedStream([[made] for made in calls] + ["ok"])
    result, _ = await completed(model, work, **settings)
    return result, work


# --- the answers --------------------------------------------------------------------------------


async def test_once_is_for_one_call() -> None:
    person = Person(Approval.ONCE, Approval.NO)
    result, work = await work_under(ApprovalGate(person), call("work", n=1), call("work", n=1))
    assert person.asked == ["work(n=1)", "work(n=1)"]
    assert work.calls == [{"n": 1}]
    assert reasons(result) == [None, "denied"]


def talking(conversation_id: str | None) -> AgentContext:
    return AgentContext(identity=RunIdentity.root(conversation_id=conversation_id))


async def test_always_is_for_the_tool_and_for_the_conversation() -> None:
    person = Person(Approval.ALWAYS)
    gate = ApprovalGate(person)
    for number in range(2):
        calls = call("work", n=number), call("work", n=9)
        _, work = await work_under(gate, *calls, context=talking("c"))
        assert len(work.calls) == 2
    assert person.asked == ["work(n=0)"]
    assert gate.remembered("c") == {"work": Approval.ALWAYS}
    assert gate.always == frozenset()


@pytest.mark.parametrize("said", [Approval.ALWAYS, Approval.NEVER])
@pytest.mark.parametrize(
    "conversations", [("a", "b"), ("a", None), (None, "a"), (None, None), ("", "")]
)
async def test_what_one_user_says_for_good_is_not_for_the_next(
    said: Approval, conversations: tuple[str | None, ...]
) -> None:
    person = Person(said, Approval.NO)
    work = Work()
    config = LoopConfig(stream=ScriptedStream([]), tools=[work], plugins=[ApprovalGate(person)])
    for number, conversation_id in enumerate(conversations):
        model = ScriptedStream([call("work", n=number), "ok"])
        await run("go", talking(conversation_id), config.replace(stream=model))
    assert person.asked == ["work(n=0)", "work(n=1)"]


async def test_without_an_identity_it_is_for_the_run() -> None:
    person = Person(Approval.ALWAYS, Approval.ALWAYS)
    gate = ApprovalGate(person)
    for _ in range(2):  # the clock of these gives the same ids to both
        await work_under(gate, call("work", n=1), call("work", n=2))
    assert person.asked == ["work(n=1)", "work(n=1)"]
    assert (gate._remembered, gate._owners) == ({}, {})  # nothing piles up


async def test_those_that_are_remembered_are_not_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clark_agent.toolkit.approval._MOST_CONVERSATIONS", 2)
    person = Person(*[Approval.ALWAYS] * 4)
    gate = ApprovalGate(person)
    for name in ("a", "b", "c", "a"):
        await work_under(gate, call("work"), context=talking(name))
    assert len(person.asked) == 4
    assert list(gate._remembered) == [("conversation", "c"), ("conversation", "a")]


async def test_no_is_for_one_call() -> None:
    person = Person(Approval.NO)
    result, work = await work_under(ApprovalGate(person), call("work", n=1), call("work", n=2))
    assert work.calls == [{"n": 2}]
    refused, _ = results(result)
    assert refused.is_error
    assert refused.plain_text.startswith("The call was not run: the user refused it.")
    assert refused.details["kind"] == "tool_call_not_executed"
    assert decided(refused) == [("approval_gate", "block")]


async def test_never_is_for_the_tool() -> None:
    person = Person(Approval.NEVER)
    gate = ApprovalGate(person)
    calls = call("work", n=1), call("work", n=2)
    result, work = await work_under(gate, *calls, context=talking("c"))
    assert work.calls == []
    assert len(person.asked) == 1
    assert reasons(result) == ["denied", "denied"]
    assert "does not want this tool used" in texts(result)[1]
    assert gate.remembered("c") == {"work": Approval.NEVER}


async def test_a_no_may_have_a_reason() -> None:
    person = Person(Denied(" Use the other disk. "), Denied(" "))
    result, work = await work_under(ApprovalGate(person), call("work"), call("work"))
    assert work.calls == []
    assert texts(result)[0].endswith("the user refused it and says: Use the other disk.")
    assert texts(result)[1].startswith("The call was not run: the user refused it. Do not send")


async def test_plain_strings_will_do() -> None:
    result, work = await work_under(
        ApprovalGate(Person("no", "once", "always")), *[call("work", n=n) for n in range(4)]
    )
    assert [c["n"] for c in work.calls] == [1, 2, 3]
    assert reasons(result) == ["denied", None, None, None]


async def test_what_was_said_for_good_can_be_forgotten() -> None:
    gate = ApprovalGate(Person(), always=["work"])
    _, work = await work_under(gate, call("work"))
    assert len(work.calls) == 1
    person = Person(*[Approval.NEVER] * 2)
    gate = ApprovalGate(person)
    for name in ("a", "b"):
        await work_under(gate, call("work"), context=talking(name))
    gate.forget("other")
    gate.forget("work", conversation_id="a")
    assert (gate.remembered("a"), gate.remembered("b")) == ({}, {"work": Approval.NEVER})
    gate.forget()
    assert gate.remembered("b") == {}
    assert gate.remembered("unknown") == {}


async def test_a_plain_function_may_block_a_thread() -> None:
    threads: list[int] = []

    def person(request: ApprovalRequest) -> Said:
        threads.append(threading.get_ident())
        return Approval.ONCE

    _, work = await work_under(ApprovalGate(person), call("work"))
    assert len(work.calls) == 1
    assert threads
    assert threading.get_ident() not in threads


# --- which calls --------------------------------------------------------------------------------


async def test_tools_that_only_read_are_not_asked_about() -> None:
    person = Person()
    quiet, other = Work("quiet"), Work("read_file")  # the name says nothing
    quiet.reads_only = True
    gate = ApprovalGate(person)
    await completed([[call("quiet"), call("read_file")], "ok"], quiet, other, plugins=[gate])
    assert person.asked == ["read_file()"]
    assert len(quiet.calls) == 1


def test_which_tools_of_the_toolkit_only_read(tmp_path: Path) -> None:
    with Workspace(tmp_path) as workspace:
        tools = [
            *file_tools(workspace),
            *(shell_tool(workspace), fetch_url_tool(), ask_user_tool(None), current_time_tool()),
            *(calculator, finish),
        ]
    assert sorted([tool.name for tool in tools if not tool.reads_only]) == [
        "edit_file",
        "fetch_url",
        "shell",
        "write_file",
    ]


def test_a_function_can_be_declared_to_read_only() -> None:
    @tool(reads_only=True)
    def balance() -> int:
        """Tell the balance."""
        return 3

    assert balance.reads_only
    assert not tool(balance.__wrapped__).reads_only


async def test_the_tools_to_ask_about_can_be_named() -> None:
    person = Person()
    work, read = Work(), Work("read_file")
    gate = ApprovalGate(person, tools=["read_file"])
    await completed([[call("work"), call("read_file")], "ok"], work, read, plugins=[gate])
    assert person.asked == ["read_file()"]


def test_a_name_that_no_tool_has_is_an_error() -> None:
    gate = ApprovalGate(None, tools=["refund_orders"])
    for tools, hint in (([Work("refund_order")], "did you mean 'refund_order'?"), ([], "none")):
        with pytest.raises(ConfigError, match=f"tools has 'refund_orders', .*{re.escape(hint)}"):
            LoopConfig(stream=ScriptedStream([]), tools=tools, plugins=[gate])


async def test_where_a_name_is_missing_later_what_is_new_is_asked_about() -> None:
    person = Person()
    gate = ApprovalGate(person, tools=["refund"])
    known, renamed, quiet = Work("known"), Work("refund_order"), Work("quiet")
    quiet.reads_only = True
    parent = LoopConfig(stream=ScriptedStream([]), tools=[Work("refund"), known], plugins=[gate])
    batch = [call("known"), call("refund_order"), call("quiet")]
    child = parent.child(stream=ScriptedStream([batch, "ok"]), tools=[known, renamed, quiet])
    await run("go", CONTEXT, child)
    assert person.asked == ["refund_order()"]


async def test_and_the_calls() -> None:
    def is_dangerous(ctx: BeforeToolCallContext) -> bool:
        return bool(ctx.args["n"] > 1)

    person = Person()
    gate = ApprovalGate(person, needs_approval=is_dangerous)
    _, work = await work_under(gate, call("work", n=1), call("work", n=2))
    assert person.asked == ["work(n=2)"]
    assert len(work.calls) == 2


async def test_a_judgement_that_fails_asks() -> None:
    person = Person(Approval.NO)
    gate = ApprovalGate(person, needs_approval=lambda ctx: ctx.args["missing"] > 1)
    _, work = await work_under(gate, call("work"))
    assert person.asked == ["work()"]
    assert work.calls == []


async def test_a_call_that_is_not_valid_is_not_asked_about() -> None:
    person = Person()
    work = Work(require="path")
    await completed([[call("work"), call("nowhere")], "ok"], work, plugins=[ApprovalGate(person)])
    assert person.asked == []


def test_nonsense_is_refused_at_once() -> None:
    wrong: list[Callable[[], ApprovalGate]] = [
        lambda: ApprovalGate("yes"),  # type: ignore[arg-type]
        lambda: ApprovalGate(None, tools="shell"),
        lambda: ApprovalGate(None, always="shell"),
        lambda: ApprovalGate(None, timeout=0),
        lambda: ApprovalGate(None, needs_approval=True),  # type: ignore[arg-type]
        lambda: ApprovalGate(None, needs_approval=asyncio.sleep),  # type: ignore[arg-type]
        lambda: ApprovalGate(lambda: Approval.ONCE),  # type: ignore[arg-type,misc]
        lambda: ApprovalGate(None, always=[3]),  # type: ignore[list-item]
    ]
    for make in wrong:
        with pytest.raises(ConfigError, match="ApprovalGate: "):
            make()
    with pytest.raises(ConfigError, match=r"must be tool names, not .*: write 'refund'"):
        ApprovalGate(None, tools=[Work("refund")])  # type: ignore[list-item]


# --- nothing runs by mistake --------------------------------------------------------------------


async def test_with_nobody_to_ask_it_is_refused() -> None:
    result, work = await work_under(ApprovalGate(None), call("work"))
    assert work.calls == []
    assert reasons(result) == ["nobody_to_ask"]
    assert texts(result)[0].startswith(
        "The call was not run: it needs approval, and no user is available to ask."
    )


@pytest.mark.parametrize(
    ("answer", "reason", "says"),
    [
        (OSError("no display"), "approval_failed", "(OSError: no display)"),
        (EOFError(), "nobody_to_ask", "no user is available to ask"),
        (asyncio.CancelledError(), "nobody_to_ask", "no user is available to ask"),
        (TimeoutError(), "approval_timeout", "in time"),
        (True, "approval_failed", "must return an Approval or a Denied, not True"),
        (None, "approval_failed", "not None"),
        ("yes", "approval_failed", "not 'yes'"),
        ("ONCE", "approval_failed", "not 'ONCE'"),
        ({"approved": True}, "approval_failed", "not {'approved': True}"),
        (Block, "approval_failed", "must return"),
    ],
)
async def test_what_is_no_yes_is_a_no(answer: Any, reason: str, says: str) -> None:
    result, work = await work_under(ApprovalGate(Person(answer)), call("work"))
    assert work.calls == []
    assert reasons(result) == [reason]
    assert says in texts(result)[0]


async def test_a_person_who_takes_too_long() -> None:
    ended: list[str] = []

    async def asleep(request: ApprovalRequest) -> Said:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request.summary)
        return Approval.ONCE

    result, work = await work_under(ApprovalGate(asleep, timeout=0.01), call("work"))
    assert work.calls == []
    assert ended == ["work()"]
    assert reasons(result) == ["approval_timeout"]


async def test_the_time_of_hooks_counts_too() -> None:
    async def asleep(request: ApprovalRequest) -> Said:
        await asyncio.Event().wait()
        return Approval.ONCE

    result, work = await work_under(ApprovalGate(asleep), call("work"), hook_timeout=0.01)
    assert work.calls == []
    assert decided(results(result)[0]) == [("approval_gate", "failed")]


async def test_arguments_that_change_meanwhile_are_not_what_was_approved() -> None:
    async def meddler(request: ApprovalRequest) -> Said:
        request.arguments["path"] = "/"
        return Approval.ALWAYS

    gate = ApprovalGate(meddler)
    result, work = await work_under(gate, call("work", path="/tmp/x"), context=talking("c"))
    assert work.calls == []
    assert reasons(result) == ["arguments_changed"]
    assert gate.remembered("c") == {}


@pytest.mark.parametrize("place", [0, 1])
async def test_what_is_asked_about_is_what_plugins_have_made_of_it(place: int) -> None:
    """Wherever the gate is in their list."""

    class Confine:
        name = "confine"

        def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Rewrite:
            return Rewrite({"path": "/safe" + ctx.args["path"]})

    person = Person()
    gate, plugins = ApprovalGate(person), list[Any]([Confine()])
    plugins.insert(place, gate)
    _, work = await work_under(gate, call("work", path="/x"), plugins=plugins)
    assert person.requests[0].arguments == {"path": "/safe/x"} == work.calls[0]
    assert person.asked == ["work(path='/safe/x')"]


async def test_arguments_are_shown_as_the_tool_gets_them() -> None:
    person = Person()
    work = Work(prepare=lambda args: {**args, "recursive": True})
    await completed([call("work", path="x"), "ok"], work, plugins=[ApprovalGate(person)])
    assert person.requests[0].arguments is work.calls[0]
    assert person.asked == ["work(path='x', recursive=True)"]


# --- several at once ----------------------------------------------------------------------------


class Slow(Person):
    """Takes a while, and counts how many questions are open at a time."""

    open = most = 0

    async def __call__(self, request: ApprovalRequest) -> Any:
        self.open += 1
        self.most = max(self.most, self.open)
        await let_others_run()
        self.open -= 1
        return await super().__call__(request)


@pytest.mark.parametrize("mode", ExecutionMode)
async def test_a_batch_is_asked_about_one_by_one(mode: ExecutionMode) -> None:
    person, work = Slow(Approval.ONCE, Approval.NO, Approval.ONCE), Work()
    batch = [call("work", n=n) for n in range(3)]
    result, _ = await completed(
        [batch, "ok"], work, plugins=[ApprovalGate(person)], default_execution_mode=mode
    )
    assert person.most == 1
    assert person.asked == ["work(n=0)", "work(n=1)", "work(n=2)"]
    assert [c["n"] for c in work.calls] == [0, 2]
    assert reasons(result) == [None, "denied", None]


async def test_runs_beside_each_other_are_asked_about_one_by_one() -> None:
    person = Slow(Approval.ONCE, Approval.ALWAYS)
    gate = ApprovalGate(person)
    context = talking("c")
    calls = [call("work", n=n) for n in range(6)]
    ran = await asyncio.gather(*[work_under(gate, each, context=context) for each in calls])
    assert person.most == 1
    assert [len(work.calls) for _, work in ran] == [1] * 6
    assert len(person.requests) == 2  # the others waited, and were told by the second answer


async def test_a_never_answers_those_who_wait() -> None:
    person = Slow(Approval.NEVER)
    gate = ApprovalGate(person)
    context = talking("c")
    ran = await asyncio.gather(*[work_under(gate, call("work"), context=context) for _ in range(4)])
    assert [len(work.calls) for _, work in ran] == [0] * 4
    assert len(person.requests) == 1


def test_one_gate_serves_one_event_loop_after_the_other() -> None:
    person = Slow()
    gate = ApprovalGate(person)

    async def two() -> None:
        await asyncio.gather(*[work_under(gate, call("work")) for _ in range(2)])

    for _ in range(3):
        asyncio.run(two())
    assert (person.most, len(person.requests)) == (1, 6)


def test_threads_that_share_a_gate_ask_one_at_a_time() -> None:
    """Each thread has an event loop of its own; a person has one screen."""
    most = is_open = 0
    lock = threading.Lock()

    def person(request: ApprovalRequest) -> Said:
        nonlocal most, is_open
        with lock:
            is_open += 1
            most = max(most, is_open)
        threading.Event().wait(0.005)  # long enough for others to come
        with lock:
            is_open -= 1
        return Approval.ONCE

    gate = ApprovalGate(person)
    done: list[int] = []

    def user() -> None:
        _, work = asyncio.run(work_under(gate, call("work"), call("work")))
        done.append(len(work.calls))

    race(user, user, user)
    assert (most, done) == (1, [2, 2, 2])


async def test_whoever_leaves_the_line_does_not_stop_it() -> None:
    line = OneAtATime()
    came: list[int] = []

    async def wait(number: int) -> None:
        async with line.turn():
            came.append(number)

    async with line.turn():
        waiting = [asyncio.create_task(wait(number)) for number in range(4)]
        await let_others_run()
        waiting[1].cancel()
    waiting[0].cancel()  # whose turn it is by now
    await asyncio.gather(*waiting, return_exceptions=True)
    assert came == [2, 3]
    async with line.turn():
        came.append(9)
    assert came[-1] == 9


def test_a_line_outlives_an_event_loop() -> None:
    line = OneAtATime()
    gone = asyncio.new_event_loop()

    async def main() -> None:
        async with line.turn():
            line._line.append(gone.create_future())
            gone.close()
        async with line.turn():
            pass

    asyncio.run(main())


# --- cancelled ----------------------------------------------------------------------------------


class Gone(Person):
    """Never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = asyncio.Event()
        self.ended = 0

    async def __call__(self, request: ApprovalRequest) -> Any:
        self.requests.append(request)
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


async def cancel_when_asked(person: Gone, cancel: Callable[[], object]) -> None:
    await person.is_asked.wait()
    cancel()


@pytest.mark.parametrize("count", [1, 3])
async def test_a_cancelled_run_takes_its_question_back(count: int) -> None:
    person, work, signal = Gone(), Work(), CancellationToken()
    gate = ApprovalGate(person)
    canceller = asyncio.create_task(cancel_when_asked(person, signal.cancel))
    error, _ = await failed(
        RunAborted,
        [[call("work", n=n) for n in range(count)]],
        work,
        plugins=[gate],
        signal=signal,
        leaves_tasks=True,
    )
    await canceller
    assert work.calls == []
    assert (len(person.requests), person.ended) == (1, 1)
    assert reasons(error) == ["aborted"] * count
    _, after = await work_under(ApprovalGate(Person()), call("work"))
    assert len(after.calls) == 1


async def test_so_does_a_cancelled_task() -> None:
    person, work = Gone(), Work()
    gate = ApprovalGate(person)
    config = LoopConfig(stream=ScriptedStream([call("work")]), tools=[work], plugins=[gate])
    task = asyncio.create_task(run("go", CONTEXT, config))
    await cancel_when_asked(person, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (work.calls, person.ended) == ([], 1)


async def test_one_that_waits_for_its_turn_leaves_the_line() -> None:
    person, signal = Gone(), CancellationToken()
    gate = ApprovalGate(person)
    asking = asyncio.create_task(work_under(gate, call("work", n=0), signal=signal))
    await person.is_asked.wait()
    other = CancellationToken()
    waiting = asyncio.create_task(work_under(gate, call("work", n=1), signal=other))
    await let_others_run()
    other.cancel()
    with pytest.raises(RunAborted):
        await waiting
    assert person.ended == 0
    signal.cancel()
    with pytest.raises(RunAborted):
        await asking
    assert person.asked == ["work(n=0)"]


async def test_an_answer_that_comes_too_late_counts_for_nothing() -> None:
    signal, is_asked = CancellationToken(), asyncio.Event()
    requests: list[str] = []

    async def stubborn(request: ApprovalRequest) -> Said:
        requests.append(request.summary)
        is_asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return Approval.ALWAYS
        raise AssertionError

    async def cancel() -> None:
        await is_asked.wait()
        signal.cancel()

    gate, work = ApprovalGate(stubborn), Work()
    canceller = asyncio.create_task(cancel())
    await failed(
        RunAborted,
        [[call("work", n=0), call("work", n=1)]],
        work,
        plugins=[gate],
        signal=signal,
        leaves_tasks=True,
    )
    await canceller
    assert work.calls == []
    assert requests == ["work(n=0)"]
    assert gate._remembered == {}


# --- runs below ---------------------------------------------------------------------------------


async def test_child_runs_inherit_the_gate_and_what_was_said() -> None:
    person, work = Person(Approval.ONCE, Approval.ALWAYS), Work()
    gate = ApprovalGate(person)
    parent = LoopConfig(stream=ScriptedStream([]), tools=[work], plugins=[gate])
    below = parent.child(stream=ScriptedStream([call("work", n=1), call("work", n=2), "done"]))
    helper = agent_tool("helper", "helps", below)
    config = parent.replace(
        stream=ScriptedStream([call("helper", task="do it"), call("work", n=3), "ok"]),
        tools=[work, helper],
    )
    identity = RunIdentity.root("top")
    await run("go", AgentContext(identity=identity), config)
    assert person.asked == ["helper(task='do it')", "work(n=1)"]
    assert [c["n"] for c in work.calls] == [1, 2, 3]
    above, child = [request.run for request in person.requests]
    assert above == identity
    assert child is not None
    assert (child.parent_run_id, child.depth) == ("top", 1)


async def test_a_config_of_its_own_has_plugins_of_its_own() -> None:
    person, work = Person(), Work()
    below = LoopConfig(stream=ScriptedStream([call("work"), "done"]), tools=[work])
    await completed(
        [call("helper", task="do it"), "ok"],
        agent_tool("helper", "helps", below),
        plugins=[ApprovalGate(person)],
    )
    assert person.asked == ["helper(task='do it')"]
    assert len(work.calls) == 1


async def test_a_run_without_an_identity_is_given_one() -> None:
    person = Person()
    await work_under(ApprovalGate(person), call("work"), call("work"))
    first, second = [request.run for request in person.requests]
    assert first == second
    assert first is not None
    assert person.requests[0].tool_call_id == "call_1"


# --- what is shown ------------------------------------------------------------------------------


async def summary_of(arguments: Any, name: str = "work") -> str:
    person = Person()
    made = ToolCall("c", name, arguments)
    ctx = BeforeToolCallContext(AssistantMessage.from_calls([made]), made, arguments, ())
    assert await ApprovalGate(person).on_before_tool_call(ctx) is None
    return person.asked[0]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({}, "work()"),
        ({"a": 1, "b": [True, None, "x"]}, "work(a=1, b=[True, None, 'x'])"),
        ({"cmd": "ls\n\x1b[2Jrm"}, r"work(cmd='ls\n\x1b[2Jrm')"),
        ({"cmd": "a\u202eb\u200bc\r"}, r"work(cmd='a\u202eb\u200bc\r')"),
        ({"x\x1b[0m": {"y\n": "\x07"}}, r"work('x\x1b[0m'={'y\n': '\x07'})"),
        ({"": 1}, "work(''=1)"),
        ({"a": "\ud800"}, r"work(a='\ud800')"),
        ("text", "work('text')"),
        (None, "work(None)"),
    ],
)
async def test_a_call_is_shown_in_one_plain_line(arguments: Any, shown: str) -> None:
    assert await summary_of(arguments) == shown


async def test_a_long_call_is_shown_whole() -> None:
    command = "echo " + " " * 5_000 + "; rm -rf / ;" + " " * 5_000 + "echo"
    summary = await summary_of({"command": command})
    assert summary == f"work(command={command!r})"


def request_of(arguments: Any, preview: str | None = None) -> ApprovalRequest:
    return ApprovalRequest("work", arguments, call_line("work", arguments), "c", None, preview)


def test_a_short_call_is_one_line_and_what_it_would_change() -> None:
    assert request_of({"n": 1}).text == "work(n=1)"
    assert request_of({"n": 1}, "-a\n+b\n").text == "work(n=1)\n-a\n+b"


def test_a_long_call_has_its_arguments_below_each_other() -> None:
    request = request_of({"path": "x", "text": "a\n  b\npath:\n" + "c" * 300, "n\n": [1]}, "-old")
    assert request.text.split("\n") == [
        f"work: a call of {len(request.summary)} characters",
        *("-old", "path:", "  | x", "text:", "  | a", "  |   b", "  | path:", f"  | {'c' * 300}"),
        *(r"'n\n':", "  | [1]"),
    ]
    assert request_of("x\n" * 150).text.count("\n  | x") == 150


@given(st.text(max_size=300))
def test_nothing_hides_in_what_is_shown(text: str) -> None:
    shown = request_of({"a": text}, visible(text)).text
    for line in shown.split("\n"):
        assert line.replace("\t", "").isprintable()
    assert not {"\u3164", "\u2800", "\ufe0f", "\u202e", "\u200b", "\r"}.intersection(shown)


@pytest.mark.parametrize(
    "hidden", ["\u202e", "\u2066", "\u200b", "\u3164", "\U000e0141", "\r", "\x9b"]
)
def test_what_has_no_shape_gets_one(hidden: str) -> None:
    assert visible(f"a{hidden}b\n\tc") == f"a{ascii(hidden)[1:-1]}b\n\tc"


# --- previews -----------------------------------------------------------------------------------


async def preview_of(work: AgentTool, **arguments: Any) -> str | None:
    person = Person(Approval.NO)
    await completed([call(work.name, **arguments), "ok"], work, plugins=[ApprovalGate(person)])
    return person.requests[0].preview


async def test_a_tool_says_what_it_would_change() -> None:
    class Previewed(Work):
        def preview(self, args: Any) -> str | None:
            if args["n"] > 1:
                raise ValueError("too much")
            return f"would do {args['n']}\u202e" if args["n"] else None

    assert [await preview_of(Previewed(), n=n) for n in range(3)] == [
        None,
        r"would do 1\u202e",
        None,
    ]


async def test_file_tools_show_a_diff(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\r\nthree\n")
    (tmp_path / "b.bin").write_bytes(b"\0\1")
    with Workspace(tmp_path) as workspace:
        tools = {tool.name: tool for tool in file_tools(workspace)}
        write, edit = tools["write_file"], tools["edit_file"]
        assert await preview_of(write, path="a.txt", content="one\n2\nthree") == (
            "--- a.txt\n+++ a.txt\n@@ -1,3 +1,3 @@\n one\n-two\\r\n-three\n+2\n+three\n"
            "\\ No newline at end of file\n"
        )
        assert await preview_of(write, path="new/c.txt", content="x\n") == (
            "--- /dev/null\n+++ new/c.txt\n@@ -0,0 +1 @@\n+x\n"
        )
        assert await preview_of(write, path="b.bin", content="x") == "[b.bin is binary data]"
        assert "may lead out" in str(await preview_of(write, path="../x", content=""))
        assert await preview_of(edit, path="a.txt", old="one", new="1") == (
            "--- a.txt\n+++ a.txt\n@@ -1,3 +1,3 @@\n-one\n+1\n two\\r\n three\n"
        )
        assert "not in the file" in str(await preview_of(edit, path="a.txt", old="four", new=""))
        assert await preview_of(edit, path="b.bin", old="a", new="") == "[b.bin is binary data]"
    assert (tmp_path / "a.txt").read_bytes() == b"one\ntwo\r\nthree\n"


class Odd:
    def __repr__(self) -> str:
        return "odd\n\x1b[1mvalue"


async def test_what_is_no_json_is_shown_plainly_too() -> None:
    assert await summary_of({"value": Odd()}) == r"work(value=odd\n\x1b[1mvalue)"


LEAVES = st.none() | st.integers() | st.text(max_size=30)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=9), LEAVES | st.lists(LEAVES, max_size=3), max_size=3))
async def test_no_call_can_fool_a_terminal(arguments: Any) -> None:
    summary = await summary_of(arguments)
    assert summary.isprintable()


# --- after a crash ------------------------------------------------------------------------------


def logged(store: MemoryStore, gate: ApprovalGate, *tools: Work) -> LoopConfig:
    model = ScriptedStream([[call("first", n=1), call("second", n=2)], "done"])
    mode = ExecutionMode.SEQUENTIAL
    return LoopConfig(
        stream=model,
        tools=tools,
        plugins=[gate],
        run_log=RunLog(store),
        default_execution_mode=mode,
    )


def cut_behind(store: MemoryStore, kind: str, tool: str) -> str:
    """Leave of the log what a process that died right behind this record would have left."""
    (summary,) = store.runs()
    for record in store.load(summary.run_id).records:
        entry: Any = record.entry
        tag = str(entry.__struct_config__.tag)
        if tag == kind and getattr(entry, "tool_call_id", "") == tool:
            store.cut(summary.run_id, record.seq + 1)
            return summary.run_id
    raise AssertionError(f"the log has no {kind} of {tool}")


@pytest.mark.parametrize(
    ("kind", "tool", "asked_again", "ran_again"),
    [
        ("tool_ended", "call_1", ["second(n=2)"], ["second"]),  # it has its result
        ("tool_started", "call_1", ["second(n=2)"], ["second"]),  # it may have happened
        ("tool_started", "call_2", [], []),
    ],
)
async def test_a_resumed_run_asks_about_what_has_not_begun(
    kind: str, tool: str, asked_again: list[str], ran_again: list[str]
) -> None:
    store = MemoryStore()
    tools = Work("first"), Work("second")
    before = Person()
    await run("go", CONTEXT, logged(store, ApprovalGate(before), *tools))
    assert before.asked == ["first(n=1)", "second(n=2)"]
    run_id = cut_behind(store, kind, tool)
    after, again = Person(), (Work("first"), Work("second"))
    config = logged(store, ApprovalGate(after), *again)
    result = await resume(store, run_id, config.replace(stream=ScriptedStream(["done"])))
    assert result.text == "done"
    assert after.asked == asked_again
    assert [tool.name for tool in again if tool.calls] == ran_again
    assert len(results(result)) == 2


async def test_what_was_approved_and_had_not_begun_is_asked_again() -> None:
    """Both calls of a batch are approved before the first of them begins."""
    store = MemoryStore()

    async def dies(args: Any, ctx: ToolContext) -> Any:
        raise ToolFatal("the process dies")

    before = Person()
    config = logged(store, ApprovalGate(before), Work("first", dies), Work("second", Waiting()))
    config = config.replace(default_execution_mode=ExecutionMode.PARALLEL)
    with pytest.raises(RunStoppedByTool):
        await run("go", CONTEXT, config)
    assert len(before.asked) == 2
    run_id = cut_behind(store, "tool_started", "call_1")
    after, again = Person(Approval.NO), (Work("first"), Work("second"))
    config = logged(store, ApprovalGate(after), *again)
    result = await resume(store, run_id, config.replace(stream=ScriptedStream(["done"])))
    assert after.asked == ["second(n=2)"]
    assert [tool.calls for tool in again] == [[], []]
    assert [answer.details.get("reason") for answer in results(result)] == ["interrupted", "denied"]
