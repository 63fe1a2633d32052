"""A handle for any thread: every message is delivered or expires, once, and the receipt says so."""

from __future__ import annotations

import asyncio
from threading import Barrier, Thread

import pytest

from clark_agent import AgentMessage, SteeringReceipt, SteerWhen, SystemMessage, UserMessage
from clark_agent.plugins import ChannelSteering
from clark_agent.plugins.hooks import Hooks


def begun(steering: ChannelSteering) -> ChannelSteering:
    """The channel as a run has it that has begun."""
    run = steering.for_run()
    run.listen(lambda: None)
    return run


def told(*receipts: SteeringReceipt) -> list[tuple[str, int | None]]:
    return [(receipt.status, receipt.turn) for receipt in receipts]


def test_what_is_sent_before_the_run_waits_for_it() -> None:
    steering = ChannelSteering()
    receipt = steering.handle.steer("early")
    assert told(receipt) == [("queued", None)]
    assert not receipt.is_settled
    run = begun(steering)
    assert run.next_steering_messages() == [UserMessage("early")]
    assert told(receipt) == [("queued", None)], "taken is not delivered"
    run.delivered(3)
    assert told(receipt) == [("delivered", 3)]
    assert receipt.is_settled


def test_messages_come_in_order_and_once() -> None:
    steering = ChannelSteering()
    run = begun(steering)
    note = SystemMessage("note")
    for message in ("a", note, "b"):
        _ = steering.handle.steer(message)
    first, second, third = run.next_steering_messages()
    assert (first, third) == (UserMessage("a"), UserMessage("b"))
    assert second is note
    assert run.next_steering_messages() == []
    _ = steering.handle.steer("c")
    assert run.next_steering_messages() == [UserMessage("c")]


def test_follow_ups_have_a_queue_of_their_own() -> None:
    steering = ChannelSteering()
    run = begun(steering)
    later, soon = steering.handle.follow_up("later"), steering.handle.steer("soon")
    assert run.next_steering_messages() == [UserMessage("soon")]
    assert run.next_follow_up_messages() == [UserMessage("later")]
    run.appended()
    assert told(later, soon) == [("delivered", None), ("queued", None)]
    assert run.close() == []
    assert told(soon) == [("expired", None)]


@pytest.mark.parametrize("nothing", [3, None, b"bytes", ["a"]])
def test_what_is_no_message_is_refused_at_once(nothing: object) -> None:
    steering = ChannelSteering()
    with pytest.raises(TypeError, match="expected a text or a message, not"):
        _ = steering.handle.steer(nothing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="soon"):
        _ = steering.handle.steer("hello", "soon")  # type: ignore[arg-type]
    assert steering.next_steering_messages() == []


def test_urgency_is_that_of_the_most_pressing_message() -> None:
    steering = ChannelSteering()
    run, urgencies = begun(steering), list[SteerWhen | None]()
    for when in ("after_batch", "before_next_tool", "now", "after_batch"):
        urgencies.append(run.urgency)
        _ = steering.handle.steer("x", when)
    assert urgencies == [None, *SteerWhen]
    run.next_steering_messages()
    assert run.urgency is None


def test_only_what_cannot_wait_wakes_the_run() -> None:
    steering, woken = ChannelSteering(), list[str]()
    run = steering.for_run()
    run.listen(lambda: woken.append("woken"))
    _ = steering.handle.steer("a")
    _ = steering.handle.steer("b", SteerWhen.BEFORE_NEXT_TOOL)
    _ = steering.handle.follow_up("c")
    assert woken == []
    _ = steering.handle.steer("d", SteerWhen.NOW)
    assert woken == ["woken"]
    run.close()
    _ = steering.handle.steer("e", SteerWhen.NOW)
    assert woken == ["woken"]


def test_nothing_is_lost_when_many_threads_send_to_runs_that_come_and_go() -> None:
    steering = ChannelSteering()
    senders, each = 8, 400
    start = Barrier(senders + 1)
    receipts: list[SteeringReceipt] = []
    got: list[AgentMessage] = []
    left: list[AgentMessage] = []

    def send(sender: int) -> None:
        start.wait()
        receipts.extend(steering.handle.steer(f"{sender} {n}") for n in range(each))

    threads = [Thread(target=send, args=(sender,)) for sender in range(senders)]
    for thread in threads:
        thread.start()
    start.wait()
    turn = 0
    while any(thread.is_alive() for thread in threads):
        run = begun(steering)
        for _ in range(5):
            turn += 1
            got += run.next_steering_messages()
            run.delivered(turn)
        left += run.close()
    for thread in threads:
        thread.join()
    assert len(receipts) == senders * each
    delivered = [r.message for r in receipts if r.status == "delivered"]
    expired = [r.message for r in receipts if r.status == "expired"]
    assert len(delivered) + len(expired) == len(receipts), "every message has its fate"
    assert sorted(map(id, delivered)) == sorted(map(id, got)), "and no other than its receipt says"
    assert set(map(id, left)) <= set(map(id, expired))
    for sender in range(senders):
        mine = [m.plain_text for m in got if m.plain_text.startswith(f"{sender} ")]
        assert mine == sorted(mine, key=lambda text: int(text.split()[1])), "in order"


def test_after_the_run_a_message_expires_at_once() -> None:
    steering = ChannelSteering()
    run = begun(steering)
    in_time = steering.handle.steer("in time")
    assert run.close() == [UserMessage("in time")]
    assert run.close() == [], "once"
    run.end_run()
    late = steering.handle.steer("late")
    assert told(in_time, late) == [("expired", None)] * 2
    assert steering.for_run().next_steering_messages() == []


def test_while_another_run_listens_messages_wait_for_it() -> None:
    steering = ChannelSteering()
    one, two = begun(steering), begun(steering)
    receipt = steering.handle.steer("for whoever looks first")
    assert one.close() == []
    assert two.next_steering_messages() == [UserMessage("for whoever looks first")]
    two.delivered(1)
    two.end_run()
    assert told(receipt, steering.handle.steer("late")) == [("delivered", 1), ("expired", None)]


def test_it_is_a_source_of_both_kinds_and_shared_by_runs() -> None:
    steering = ChannelSteering()
    hooks = Hooks.of([steering])
    assert {name for name, found in hooks.names.items() if found} == {"steering", "follow_up"}
    run = hooks.for_run()
    run.plugins[0].listen(lambda: None)
    _ = steering.handle.steer("hi")
    assert run.steering[0].call() == [UserMessage("hi")]
    run.end_run()
    assert steering.handle.steer("late").status == "expired"


def test_a_run_that_never_began_takes_nothing_with_it() -> None:
    steering = ChannelSteering()
    receipt = steering.handle.steer("hi")
    steering.for_run().end_run()
    assert told(receipt) == [("queued", None)]
    assert begun(steering).next_steering_messages() == [UserMessage("hi")]


def test_channels_are_apart() -> None:
    one, two = ChannelSteering(), ChannelSteering()
    _ = one.handle.steer("for one")
    assert two.next_steering_messages() == []


async def test_a_receipt_can_be_awaited_by_many_and_from_other_loops() -> None:
    steering = ChannelSteering()
    run = begun(steering)
    receipt = steering.handle.steer("hi")
    assert not receipt.wait(0)
    waiting = [asyncio.create_task(wait_for(receipt)) for _ in range(3)]
    in_thread = asyncio.create_task(asyncio.to_thread(asyncio.run, wait_for(receipt)))
    blocked = asyncio.create_task(asyncio.to_thread(receipt.wait, 10))
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in waiting)
    run.next_steering_messages()
    await asyncio.to_thread(run.delivered, 2)
    assert await asyncio.gather(*waiting, in_thread) == [receipt] * 4
    assert await blocked
    assert receipt.wait(0)
    assert repr(receipt) == "<SteeringReceipt delivered in turn 2>"


async def wait_for(receipt: SteeringReceipt) -> SteeringReceipt:
    return await receipt


async def test_an_event_loop_is_not_blocked_by_a_receipt() -> None:
    receipt = ChannelSteering().handle.steer("hi")
    with pytest.raises(RuntimeError, match="await receipt"):
        receipt.wait()
    assert not receipt.wait(0)
