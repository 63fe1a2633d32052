"""ChannelSteering: messages for a running agent, from anywhere."""

from __future__ import annotations

from collections import deque

from clark_agent.types import AgentMessage, UserMessage

__all__ = ["ChannelSteering", "SteeringHandle"]


class SteeringHandle:
    """The sending end. Any thread may use it, before, during and after a run."""

    __slots__ = ("_queue", "_state")

    def __init__(self, queue: deque[AgentMessage], state: _State) -> None:
        self._queue = queue
        self._state = state

    def steer(self, message: AgentMessage | str) -> bool:
        """Put a message before the model as soon as the running batch is done.

        False when the run is over: then the message was not taken.
        """
        if self._state.is_over:
            return False
        self._queue.append(UserMessage(message) if isinstance(message, str) else message)
        return True


class _State:
    """How many runs listen, shared by the source, its runs and the handle."""

    __slots__ = ("ended", "listening")

    def __init__(self) -> None:
        self.listening = 0
        self.ended = False

    @property
    def is_over(self) -> bool:
        return self.ended and self.listening == 0


class ChannelSteering:
    """A steering source fed through its ``handle``.

    What is sent before the run waits for it. If several runs share the source, the first to look
    gets the message.
    """

    name = "channel_steering"

    def __init__(self) -> None:
        self._queue: deque[AgentMessage] = deque()
        self._state = _State()
        self.handle = SteeringHandle(self._queue, self._state)

    def for_run(self) -> ChannelSteering:
        """The same channel, now with one run more that listens."""
        self._state.listening += 1
        return self

    def end_run(self) -> None:
        """One run less listens."""
        self._state.listening -= 1
        self._state.ended = True

    def next_steering_messages(self) -> list[AgentMessage]:
        """All messages that wait."""
        waiting: list[AgentMessage] = []
        while self._queue:
            waiting.append(self._queue.popleft())
        return waiting
