"""A handle for any thread; what it takes is delivered, and it says when nobody listens."""

from __future__ import annotations

from threading import Barrier, Thread

from clark_agent import AgentMessage, SystemMessage, UserMessage
from clark_agent.plugin import Hooks
from clark_agent.plugins import ChannelSteering, SteeringHandle


def test_what_is_sent_before_the_run_waits_for_it() -> None:
    steering = ChannelSteering()
    assert steering.handle.steer("early")
    assert steering.for_run().next_steering_messages() == [UserMessage("early")]
    assert steering.next_steering_messages() == []


def test_messages_come_in_order_and_once() -> None:
    steering = ChannelSteering()
    run = steering.for_run()
    note = SystemMessage("note")
    assert [steering.handle.steer(message) for message in ("a", note, "b")] == [True] * 3
    first, second, third = run.next_steering_messages()
    assert (first, third) == (UserMessage("a"), UserMessage("b"))
    assert second is note
    assert run.next_steering_messages() == []
    assert steering.handle.steer("c")
    assert run.next_steering_messages() == [UserMessage("c")]


def test_nothing_is_lost_when_many_threads_send() -> None:
    steering = ChannelSteering()
    run, senders, each = steering.for_run(), 8, 400
    start = Barrier(senders + 1)
    taken: list[int] = []

    def send(sender: int) -> None:
        start.wait()
        taken.append(sum(steering.handle.steer(f"{sender} {n}") for n in range(each)))

    threads = [Thread(target=send, args=(sender,)) for sender in range(senders)]
    for thread in threads:
        thread.start()
    got: list[AgentMessage] = []
    start.wait()
    while any(thread.is_alive() for thread in threads):
        got += run.next_steering_messages()
    for thread in threads:
        thread.join()
    got += run.next_steering_messages()
    assert taken == [each] * senders
    texts = [m.plain_text for m in got if isinstance(m, UserMessage)]
    assert len(texts) == len(got) == senders * each
    for sender in range(senders):
        mine = [text for text in texts if text.startswith(f"{sender} ")]
        assert mine == [f"{sender} {n}" for n in range(each)]


def test_after_the_run_the_handle_says_so_and_takes_nothing() -> None:
    steering = ChannelSteering()
    run = steering.for_run()
    assert steering.handle.steer("in time")
    run.end_run()
    assert not steering.handle.steer("late")
    assert run.next_steering_messages() == [UserMessage("in time")], "taken, so still to be had"
    assert steering.for_run().next_steering_messages() == []


def test_while_another_run_listens_messages_are_taken() -> None:
    steering = ChannelSteering()
    one, two = steering.for_run(), steering.for_run()
    one.end_run()
    assert steering.handle.steer("for whoever looks first")
    assert two.next_steering_messages() == [UserMessage("for whoever looks first")]
    two.end_run()
    assert not steering.handle.steer("late")


def test_one_run_after_the_other() -> None:
    steering = ChannelSteering()
    for turn in range(3):
        run = steering.for_run()
        assert steering.handle.steer(f"run {turn}")
        assert run.next_steering_messages() == [UserMessage(f"run {turn}")]
        run.end_run()
        assert not steering.handle.steer("between")


def test_it_is_a_steering_source_alone_and_shared_by_runs() -> None:
    steering = ChannelSteering()
    assert isinstance(steering.handle, SteeringHandle)
    hooks = Hooks.of([steering])
    assert {name for name, found in hooks.names.items() if found} == {"steering"}
    run = hooks.for_run()
    assert steering.handle.steer("hi")
    assert run.steering[0].call() == [UserMessage("hi")]
    run.plugins[0].end_run()
    assert not steering.handle.steer("late")


def test_channels_are_apart() -> None:
    one, two = ChannelSteering(), ChannelSteering()
    assert one.handle.steer("for one")
    assert two.next_steering_messages() == []
