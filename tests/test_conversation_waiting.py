"""A conversation goes on with a run that waits, in any process."""

from __future__ import annotations

from pathlib import Path

import pytest

from clark_agent import Agent, ConfigError, Conversation, LoopError, LoopOutcome, tool
from clark_agent.run_log import (
    Allow,
    Deny,
    MemoryStore,
    RunBusy,
    RunLog,
    RunStore,
    SqliteStore,
    decide,
    resume,
    waiting_for,
)
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import SUSPEND, ApprovalGate


def make(store: RunStore, *steps: object, paid: list[int]) -> Agent:
    @tool
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return f"paid {amount}"

    model = ScriptedStream(steps)  # type: ignore[arg-type]
    gate = ApprovalGate(SUSPEND)
    return Agent(model, tools=[pay], plugins=[gate], run_log=RunLog(store), conversation_id="ada")


def texts(conversation: Conversation) -> list[str]:
    return [message.plain_text for message in conversation.messages]


async def test_sending_nothing_resumes_the_run() -> None:
    store, paid = MemoryStore(), list[int]()
    agent = make(store, "Hello.", call("pay", amount=5), "Paid.", "Bye.", paid=paid)
    conversation = agent.conversation()
    await conversation.send("Hi.")
    waiting = await conversation.send("Pay 5.")
    assert waiting.outcome is LoopOutcome.SUSPENDED
    (request,) = waiting.waiting
    assert conversation.suspended_run_id == request.run_id
    before = texts(conversation)
    assert (await conversation.send()).waiting == waiting.waiting
    assert texts(conversation) == before
    await decide(store, request.run_id, request.request_id, Allow())
    result = await conversation.send()
    assert result.outcome is LoopOutcome.DONE
    assert paid == [5]
    assert texts(conversation) == ["Hi.", "Hello.", "Pay 5.", "", "paid 5", "Paid."]
    await conversation.send("Bye.")
    assert texts(conversation)[-2:] == ["Bye.", "Bye."]


async def test_prompts_are_messages_to_the_run_and_none_is_lost(tmp_path: Path) -> None:
    """In another process, from the saved conversation."""
    paid: list[int] = []
    store = SqliteStore(tmp_path / "runs.db")
    first = make(store, call("pay", amount=5), paid=paid).conversation()
    await first.send("Pay 5.")
    first.save(tmp_path / "talk.json")
    agent = make(SqliteStore(tmp_path / "runs.db"), "Then not.", paid=paid)
    again = agent.load_conversation(tmp_path / "talk.json")
    still = await again.send("Actually, leave it.")
    assert still.outcome is LoopOutcome.SUSPENDED
    (request,) = waiting_for(store)
    await decide(store, request.run_id, request.request_id, Deny("not today"))
    result = await again.send("Do you hear me?")
    assert result.text == "Then not."
    assert paid == []
    assert texts(again)[-3:] == ["Actually, leave it.", "Do you hear me?", "Then not."]
    assert "not today" in texts(again)[2]


async def test_a_run_that_another_process_has_ended_is_taken_over() -> None:
    store, paid = MemoryStore(), list[int]()
    agent = make(store, call("pay", amount=5), "Paid.", "Yes, 5.", paid=paid)
    conversation = agent.conversation()
    (request,) = (await conversation.send("Pay 5.")).waiting
    await decide(store, request.run_id, request.request_id, Allow())
    await resume(store, request.run_id, agent.config)
    result = await conversation.send("Is it paid?")
    assert result.text == "Yes, 5."
    assert texts(conversation) == ["Pay 5.", "", "paid 5", "Paid.", "Is it paid?", "Yes, 5."]
    assert paid == [5]


async def test_a_run_that_another_process_has_ended_is_reported() -> None:
    store, paid = MemoryStore(), list[int]()
    agent = make(store, call("pay", amount=5), ConnectionError("away"), paid=paid)
    conversation = agent.conversation()
    (request,) = (await conversation.send("Pay 5.")).waiting
    await decide(store, request.run_id, request.request_id, Allow())
    with pytest.raises(LoopError, match="away"):
        await resume(store, request.run_id, agent.config)
    with pytest.raises(LoopError, match="away"):
        await conversation.send()
    assert texts(conversation) == ["Pay 5.", "", "paid 5"]
    assert conversation.suspended_run_id is None


async def test_a_config_without_the_log_is_an_error_and_nothing_is_lost() -> None:
    store, paid = MemoryStore(), list[int]()
    agent = make(store, call("pay", amount=5), paid=paid)
    conversation = agent.conversation()
    await conversation.send("Pay 5.")
    conversation.config = conversation.config.replace(run_log=None)
    before = conversation.messages
    with pytest.raises(ConfigError, match="suspended"):
        await conversation.send("Go on.")
    assert conversation.messages == before


async def test_a_stream_resumes_too() -> None:
    store, paid = MemoryStore(), list[int]()
    conversation = make(store, call("pay", amount=5), "Paid.", paid=paid).conversation()
    (request,) = (await conversation.send("Pay 5.")).waiting
    await decide(store, request.run_id, request.request_id, Allow())
    async with conversation.stream() as events:
        kinds = [event.type async for event in events]
    assert kinds[0] == "agent_start"
    assert events.result.text == "Paid."
    assert paid == [5]


async def test_a_prompt_that_is_sent_again_because_the_run_is_busy_arrives_once() -> None:
    store, paid = MemoryStore(), list[int]()
    agent = make(store, call("pay", amount=5), "Paid.", "Quickly.", paid=paid)
    conversation = agent.conversation()
    (request,) = (await conversation.send("Pay 5.")).waiting
    await decide(store, request.run_id, request.request_id, Allow())
    worker = store.reopen(request.run_id, after=store.load(request.run_id).records[-1].seq)
    for _ in range(2):
        with pytest.raises(RunBusy):
            await conversation.send("Quickly!")
    worker.close()
    await conversation.send("Quickly!")
    assert texts(conversation).count("Quickly!") == 1
    assert paid == [5]
