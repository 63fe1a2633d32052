"""What every framework is given to do, so that all do the same.

Needs nothing but the standard library: each framework runs in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from time import perf_counter

ARGUMENTS = '{"x": 7, "s": "hello"}'
"""A tool call's arguments, as a provider sends them; whoever needs a dict parses them each time."""
DELTA = "abcd"
TOOL_NAP = 0.01
MODEL_NAP = 0.02
HISTORY = 10_000
"""Messages that were there before W6 begins."""
SHORT_RUN = 4
"""Tool turns of a run in W4; the answer is the fifth turn."""


class Seen:
    """What was done: without a look at it a framework could be fast by doing less."""

    def __init__(self) -> None:
        self.clock: Callable[[], float] = perf_counter
        self.reset()

    def reset(self) -> None:
        self.events = 0
        """Events that the listener got."""
        self.tools = 0
        """Tools that ran."""
        self.second_turn = self.last_turn = 0.0
        """What the clock said when the model was asked (W6 alone)."""

    def turn(self, number: int) -> None:
        """Note when the model is asked; turns count from 0."""
        self.last_turn = self.clock()
        if number == 1:
            self.second_turn = self.last_turn

    @property
    def since_second_turn(self) -> float:
        """What the turns took from the second on, to when the model was asked the last time."""
        return self.last_turn - self.second_turn

    def numbering(self) -> Callable[[object], int]:
        """Numbers turns as they come, where trimmed messages do not tell, and notes when."""
        numbers = count()

        def turn_of(_messages: object) -> int:
            turn = next(numbers)
            self.turn(turn)
            return turn

        return turn_of


seen = Seen()


def count_event(event: object) -> None:
    """The listener."""
    seen.events += 1


def old_result(number: int) -> str:
    """The result of a tool call in the long history of W6: 2,000 characters."""
    return f"line {number:05} " + "x" * 1989
