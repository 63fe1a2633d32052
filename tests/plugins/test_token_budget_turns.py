"""When results are not enough, whole turns give way: the oldest first, and never what matters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    ContextOverflowError,
    LoopConfig,
    StreamError,
    SystemMessage,
    TokenBudget,
    ToolResultMessage,
    UserMessage,
    run,
)
from clark_agent.errors import ConfigError
from clark_agent.events import ContextTransformApplied
from clark_agent.history import repair_history
from clark_agent.messages import estimate_messages
from clark_agent.messages.tokens import JsonSizeEstimator
from clark_agent.messages.transcript import MessageLog
from clark_agent.testing import ScriptedStream, call
from clark_agent.tools import ToolHistoryPolicy
from tests.engine.support import Work, completed, failed, failing
from tests.plugins.support import (
    Capped,
    CharacterEstimator,
    before_call,
    calling,
    cost,
    grow,
    result,
)

PLAN = Capped("plan", None)
PLAN.history_policy = ToolHistoryPolicy(pins_active_plan=True)
CONTEXT = before_call(CharacterEstimator(), PLAN, Capped("look", None))
budget_of = partial(TokenBudget, trim_trigger=0.8, trim_target=0.5, truncation_marker="-")


def send(budget: TokenBudget, messages: Sequence[AgentMessage]) -> tuple[AgentMessage, ...]:
    return tuple(budget.transform_context(messages, CONTEXT))


def total(messages: Sequence[AgentMessage]) -> int:
    return sum(map(cost, messages))


def is_note(message: AgentMessage) -> bool:
    return isinstance(message, SystemMessage) and "left out" in message.content


def chat(turns: int, size: int = 20) -> list[AgentMessage]:
    messages: list[AgentMessage] = [UserMessage("the task")]
    for number in range(turns):
        messages += [
            AssistantMessage.from_text(f"a{number:03}".ljust(size)),
            UserMessage(f"u{number:03}".ljust(size)),
        ]
    return messages


# --- what goes and what stays ---------------------------------------------------------------------


def test_the_oldest_turns_of_a_chat_give_way() -> None:
    messages = chat(50)
    sent = send(budget_of(500), messages)
    assert total(sent) <= 250
    assert sent[0] == messages[0]
    assert is_note(sent[1])
    assert sent[2:] == tuple(messages[-len(sent) + 2 :])


def test_results_go_first_and_turns_only_if_that_is_not_enough() -> None:
    messages: list[AgentMessage] = [UserMessage("go")]
    for number in range(6):
        messages += [calling((str(number), "look")), result(str(number), text="x" * 40)]
    sent = send(budget_of(200), messages)
    assert not any(map(is_note, sent))
    assert len(sent) == len(messages)
    sent = send(budget_of(120), [*messages[:1], *chat(3)[1:], *messages[1:]])
    assert any(map(is_note, sent)), "the newest result alone is nearly a half"
    assert sent[-2:] == tuple(messages[-2:])


def test_the_newest_words_of_the_user_stay_when_their_turn_goes() -> None:
    messages = chat(3)
    messages[-1] = UserMessage("do it all again")
    for number in range(30):
        messages += [calling((str(number), "look")), result(str(number), text="x" * 9)]
    sent = send(budget_of(120), messages)
    assert UserMessage("do it all again") in sent
    assert messages[3] not in sent
    assert repair_history(sent).changes == ()


def test_a_newer_plan_takes_the_place_of_the_pinned_one() -> None:
    log = MessageLog([UserMessage("go")])
    budget = budget_of(200)
    plans: list[str] = []
    for number in range(60):
        name = "plan" if number % 20 == 0 else "look"
        log.append(calling((str(number), name)))
        log.append(result(str(number), name, f"{name} {number} ".ljust(15)))
        sent = send(budget, log.view())
        assert repair_history(sent).changes == ()
        newest = [m for m in log if isinstance(m, ToolResultMessage) and m.tool_name == "plan"][-1]
        assert newest in sent, "whole"
        plans = [
            m.plain_text for m in sent if isinstance(m, ToolResultMessage) and m.tool_name == "plan"
        ]
    assert plans[-1].startswith("plan 40")
    assert len(plans) < 3


def test_what_the_host_pins_stays_with_the_turn_it_belongs_to() -> None:
    messages: list[AgentMessage] = [UserMessage("go")]
    for number in range(30):
        messages += [calling((str(number), "look")), result(str(number), text=f"{number:09}")]
    pinned = messages[6]
    sent = send(budget_of(100, pinned=lambda message: message is pinned), messages)
    assert messages[5] in sent
    assert pinned in sent
    assert repair_history(sent).changes == ()


def test_what_is_pinned_is_a_matter_of_a_function() -> None:
    with pytest.raises(ConfigError, match=r"pinned must be .* function of a message, not 'this'"):
        TokenBudget(pinned="this")  # type: ignore[arg-type]


NAMES = st.sampled_from(["look", "look", "plan"])


@st.composite
def lives(draw: st.DrawFn) -> list[list[AgentMessage]]:
    """What each turn of a sound transcript appends."""
    pieces: list[list[AgentMessage]] = [[UserMessage("task")]]
    ids = iter(range(1_000))
    for _ in range(draw(st.integers(1, 12))):
        calls = [(str(next(ids)), draw(NAMES)) for _ in range(draw(st.integers(0, 3)))]
        texts = [draw(st.integers(0, 30)) for _ in calls]
        answer = (
            calling(*calls) if calls else AssistantMessage.from_text("w" * draw(st.integers(0, 30)))
        )
        results = [result(i, n, "r" * size) for (i, n), size in zip(calls, texts, strict=True)]
        notes: list[list[AgentMessage]] = [[], [SystemMessage("s" * 9)], [UserMessage("u" * 9)]]
        note = draw(st.sampled_from(notes))
        pieces.append([answer, *results, *note])
    return pieces


def turn_of(messages: Sequence[AgentMessage], message: AgentMessage) -> list[AgentMessage]:
    """The answer and the results that a message belongs to."""
    place = next(n for n, m in enumerate(messages) if m is message)
    while not isinstance(messages[place], AssistantMessage):
        place -= 1
    end = place + 1
    while end < len(messages) and isinstance(messages[end], ToolResultMessage):
        end += 1
    return list(messages[place:end])


def cannot_go(messages: Sequence[AgentMessage]) -> list[AgentMessage]:
    """The task, the newest words of the user, plans, and a newest turn with results to read."""
    first = next(
        (n for n, m in enumerate(messages) if isinstance(m, AssistantMessage)), len(messages)
    )
    core = list(messages[:first])
    core += [m for m in messages[first:] if isinstance(m, UserMessage)][-1:]
    plans = [m for m in messages if isinstance(m, ToolResultMessage) and m.tool_name == "plan"]
    for plan in plans[-1:]:
        core += turn_of(messages, plan)
    last = max((n for n, m in enumerate(messages) if isinstance(m, AssistantMessage)), default=0)
    newest = messages[last]
    waits = isinstance(newest, AssistantMessage) and bool(newest.tool_calls)
    core += messages[last if waits else last + 1 :]
    return [m for m in messages if any(m is c for c in core)]


@given(lives(), st.integers(20, 400))
def test_a_growing_transcript_fits_and_stays_sound(
    made: list[list[AgentMessage]], max_tokens: int
) -> None:
    budget = budget_of(max_tokens)
    for view in grow(made):
        whole = tuple(view)
        try:
            sent = send(budget, view)
        except ContextOverflowError:
            least = [m if n >= len(whole) - 2 else short(m) for n, m in enumerate(whole)]
            kept = [n for n, m in enumerate(whole) if any(m is c for c in cannot_go(whole))]
            smallest = total([least[n] for n in kept]) + total([NOTE])
            # Notes before the newest answer belong to its turn, too.
            assert smallest + 40 > max_tokens
            return
        assert total(sent) <= max_tokens
        assert repair_history(sent).changes == ()
        ids = {m.tool_call_id for m in sent if isinstance(m, ToolResultMessage)}
        for message in cannot_go(whole):
            assert (
                message.tool_call_id in ids
                if isinstance(message, ToolResultMessage)
                else any(message is m for m in sent)
            )
        assert sent[-1:] == whole[-1:] or not cannot_go(whole[-1:])
        assert sum(map(is_note, sent)) <= 1
        assert send(budget, view) == sent, "and the same asked again"
        assert tuple(view) == whole


NOTE = next(m for m in send(budget_of(500), chat(50)) if is_note(m))


def short(message: AgentMessage) -> AgentMessage:
    if isinstance(message, ToolResultMessage) and message.tool_name != "plan":
        return min(replace(message, content=result("", text="-").content), message, key=cost)
    return message


@given(st.integers(300, 900))
def test_one_drop_lasts_for_many_turns(max_tokens: int) -> None:
    budget, log = budget_of(max_tokens), MessageLog(chat(0))
    sent: list[tuple[AgentMessage, ...]] = []
    for number in range(100):
        log.extend([AssistantMessage.from_text(f"{number:09}"), UserMessage(f"and {number:05}")])
        sent.append(send(budget, log.view()))
    broken = [n for n, (a, b) in enumerate(pairwise(sent)) if b[: len(a)] != a]
    room = max_tokens * 3 // 10 // 20
    assert len(broken) <= 100 // room + 1
    assert all(b - a >= room - 1 for a, b in pairwise(broken))


# --- in a run -------------------------------------------------------------------------------------


async def test_a_chat_of_more_than_a_million_characters_is_never_sent_whole() -> None:
    model = ScriptedStream(["Well."], at_end="repeat")
    config = LoopConfig(stream=model, plugins=[TokenBudget(60_000)])
    context = AgentContext()
    for _ in range(20):
        context = context.extend(await run("tell me more " * 6_500, context, config))
    assert sum(len(m.plain_text) for m in context.messages) > 1_600_000
    sizes = [estimate_messages(JsonSizeEstimator(), r.messages) for r in model.requests]
    assert 20_000 < max(sizes) <= 60_000


async def test_the_last_exchange_of_a_chat_goes_if_nothing_else_helps() -> None:
    messages: list[AgentMessage] = [
        UserMessage("go"),
        AssistantMessage.from_text("x" * 300),
        UserMessage("on"),
    ]
    assert send(budget_of(100), messages) == (messages[0], NOTE, messages[2])
    assert send(budget_of(350), messages) == tuple(messages)


async def test_what_cannot_fit_is_not_sent() -> None:
    model = ScriptedStream(["never"])
    error, _ = await failed(
        ContextOverflowError, model, prompts="x" * 1_600_000, plugins=[TokenBudget(60_000)]
    )
    assert model.requests == []
    assert error.kind == "context_overflow"
    assert "400," in str(error)
    assert "60,000" in str(error)
    assert len(error.messages) == 1


@pytest.mark.parametrize("as_setting", [False, True])
async def test_it_recovers_from_a_request_that_the_provider_finds_too_large(
    as_setting: bool,
) -> None:
    budget = TokenBudget(100_000)
    settings: dict[str, Any] = (
        {"overflow_recovery": budget} if as_setting else {"plugins": [budget]}
    )
    refused = failing("context_overflow")
    stream = ScriptedStream([*[call("work")] * 9, refused, refused, call("work"), "ok"])
    outcome, sink = await completed(stream, Work("work", "x" * 4_000), **settings)
    sizes = [estimate_messages(JsonSizeEstimator(), r.messages) for r in stream.requests]
    assert sizes[10] * 2 <= sizes[9] + 10
    assert sizes[11] * 2 <= sizes[10] + 10
    assert [len(m.plain_text) for m in outcome.messages if isinstance(m, ToolResultMessage)] == (
        [4_000] * 10
    )
    for request in stream.requests:
        assert repair_history(request.messages).changes == ()
    applied = [e for e in sink.events if isinstance(e, ContextTransformApplied)]
    assert "token_budget" in {e.plugin for e in applied}


async def test_a_recovery_of_the_config_goes_first() -> None:
    class Own:
        name = "own"

        def recover(self, messages: Sequence[AgentMessage], ctx: Any) -> Sequence[AgentMessage]:
            return messages[-1:]

    stream = ScriptedStream([failing("context_overflow"), "ok"])
    _, sink = await completed(
        stream,
        prompts=[UserMessage("x" * 99), UserMessage("y")],
        plugins=[TokenBudget()],
        overflow_recovery=Own(),
    )
    applied = [e.plugin for e in sink.events if isinstance(e, ContextTransformApplied)]
    assert "own" in applied


async def test_a_task_that_the_provider_finds_too_large_ends_the_run() -> None:
    stream = ScriptedStream([failing("context_overflow"), "never"])
    error, _ = await failed(StreamError, stream, prompts="x" * 400, plugins=[TokenBudget()])
    assert error.kind == "context_overflow"
    assert "the task and the newest turn alone" in error.__notes__[0]
    assert len(stream.requests) == 1


async def test_without_dropping_it_neither_recovers_nor_refuses() -> None:
    budget = TokenBudget(10, drop_turns=False)
    stream = ScriptedStream([call("work"), failing("context_overflow"), "never"])
    error, _ = await failed(StreamError, stream, Work("work", "x" * 400), plugins=[budget])
    assert not isinstance(error, ContextOverflowError)
    assert len(stream.requests) == 2


def test_the_settings_are_kept_for_each_run() -> None:
    fresh = TokenBudget(drop_turns=False).for_run()
    assert not fresh.drop_turns
