"""A transcript that grows, and views of it that never change.

Everything that reads the messages of a run (a request, an event, a hook's context) gets a
`MessageView`: the first entries of an append-only `MessageLog`, with perhaps a few of its own
after them. Making one copies nothing, however long the transcript, and messages that are appended
later are not in it.

A view also lets a reader that runs every turn skip what it has already seen: see
`MessageView.grew_from`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import overload

from clark_agent.types import AgentMessage

__all__ = ["MessageLog", "MessageView", "view_of"]


class MessageLog:
    """Messages in order. They can be appended, never changed or removed."""

    __slots__ = ("_items", "append", "extend")

    append: Callable[[AgentMessage], None]
    """Add one at the end."""
    extend: Callable[[Iterable[AgentMessage]], None]
    """Add several at the end."""

    def __init__(self, messages: Iterable[AgentMessage] = ()) -> None:
        self._items = list(messages)
        self.append = self._items.append
        self.extend = self._items.extend

    def view(self, tail: tuple[AgentMessage, ...] = ()) -> MessageView:
        """All messages so far, followed by ``tail``, which does not enter the log."""
        return MessageView(self._items, len(self._items), tail)

    def first(self, count: int) -> MessageView:
        """The first ``count`` messages."""
        return MessageView(self._items, min(count, len(self._items)))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> AgentMessage:
        return self._items[index]

    def __iter__(self) -> Iterator[AgentMessage]:
        return iter(self._items)


def view_of(messages: Sequence[AgentMessage]) -> MessageView:
    """The messages as a view; any other sequence becomes a new view that shares nothing."""
    return messages if isinstance(messages, MessageView) else MessageLog(messages).view()


class MessageView(Sequence[AgentMessage]):
    """An immutable sequence of messages. Two are equal when their messages are.

    ``stable`` of them are entries of a log, and first in every later view of it too. The ``tail``
    after them belongs only to this view: notes and results, never a message with tool calls.
    """

    __slots__ = ("_items", "_stable", "_tail")

    def __init__(
        self, items: list[AgentMessage], stable: int, tail: tuple[AgentMessage, ...] = ()
    ) -> None:
        self._items = items
        self._stable = stable
        self._tail = tail

    @property
    def stable(self) -> int:
        """How many leading messages all later views of the same log share."""
        return self._stable

    @property
    def tail(self) -> tuple[AgentMessage, ...]:
        """The messages after the stable ones."""
        return self._tail

    def stable_from(self, start: int) -> list[AgentMessage]:
        """The stable messages from a place on."""
        return self._items[start : self._stable]

    def with_tail(self, tail: tuple[AgentMessage, ...]) -> MessageView:
        """The same stable messages with this tail."""
        return MessageView(self._items, self._stable, tail)

    def grew_from(self, earlier: MessageView | None) -> bool:
        """Whether all stable messages of ``earlier`` are the first of this view. Costs nothing.

        If so, a reader continues after them with its earlier results; otherwise it starts over.
        """
        return (
            earlier is not None
            and earlier._items is self._items
            and earlier._stable <= self._stable
        )

    @overload
    def __getitem__(self, index: int) -> AgentMessage: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[AgentMessage, ...]: ...
    def __getitem__(self, index: int | slice) -> AgentMessage | tuple[AgentMessage, ...]:
        if type(index) is int and 0 <= index < self._stable:  # the usual case
            return self._items[index]
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1 and stop <= self._stable:
                return tuple(self._items[start:stop])
            return tuple([self[i] for i in range(start, stop, step)])
        size = len(self)
        if index < 0:
            index += size
        if not 0 <= index < size:
            raise IndexError("message index out of range")
        return self._items[index] if index < self._stable else self._tail[index - self._stable]

    def __len__(self) -> int:
        return self._stable + len(self._tail)

    def __iter__(self) -> Iterator[AgentMessage]:
        stable = islice(self._items, self._stable)
        return chain(stable, self._tail) if self._tail else stable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (MessageView, tuple, list)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<MessageView of {len(self)} messages>"
