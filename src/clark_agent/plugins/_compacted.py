"""What remains of a transcript that was compacted: a fold over its messages.

A compaction appends one `CustomMessage`, the marker, which no model gets. It says what replaces the
messages before it, and how many of the newest of them stay. `Projection` reads the transcript with
its markers and returns the messages for the model:

    the task                     everything before the first answer
    for each compaction          its text, then what must stay word for word of what it replaces
    the newest messages          those that stay before the last marker, and all that follow it

What remains changes only where a marker is, so a provider can keep it in its cache until then. A
marker also drops what no longer has to stay of what was compacted before it: plans and messages of
the user that are not the newest, and a note right before it if it is only a note, too. A marker
that ``merges`` takes the place of those before it.

Calls stay with their results: wherever a marker cuts, the cut moves back to the beginning of the
answer that it would split. So it does not matter whether another plugin has dropped messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

import msgspec
from msgspec import Struct

from clark_agent.messages.tokens import TokenEstimator
from clark_agent.messages.transcript import MessageLog, MessageView
from clark_agent.tools import AgentTool
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    SystemMessage,
    ToolResultMessage,
    UserMessage,
)

__all__ = ["KIND", "Mark", "Projection", "aligned", "mark_of"]

KIND = "compaction"

Pinned = Callable[[AgentMessage], bool]


class Mark(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The payload of a marker."""

    text: str
    """What the model gets in place of the messages."""
    kept: int = 0
    """How many messages right before the marker stay."""
    merges: bool = False
    """Whether the text covers what was compacted before, too."""
    drops_pins: bool = False
    """Whether nothing stays but open calls and the newest message of the user, because the request
    would otherwise be larger than the window."""
    has_summary: bool = True
    """False if a model was not asked, or did not give one: the messages are only left out."""
    first_turn: int = 0
    last_turn: int = 0
    """The turns that it replaces, from 1, counted over the conversation. 0: it replaces none."""
    messages: int = 0
    """How many messages it replaces."""
    tokens_before: int = 0
    tokens_after: int = 0
    """The size of the next request, without and with it."""
    window: int | None = None
    """What a provider has said about the window of the model."""
    model: str | None = None
    """The name of that model."""

    def message(self, timestamp: int | None = None) -> CustomMessage:
        """The marker."""
        return CustomMessage(KIND, msgspec.to_builtins(self), timestamp)


def mark_of(message: AgentMessage) -> Mark | None:
    """What a marker says; None for any other message."""
    if not isinstance(message, CustomMessage) or message.kind != KIND:
        return None
    try:
        return msgspec.convert(message.payload, Mark)
    except msgspec.ValidationError:
        return None


class Part(Struct, frozen=True):
    """What a compaction has made."""

    mark: Mark
    stays: list[AgentMessage]
    """The messages that had to stay of those that it replaces."""

    @property
    def messages(self) -> list[AgentMessage]:
        """What the model gets."""
        return [UserMessage(self.mark.text), *self.stays]


class Projection:
    """Follows a growing transcript. Each message is looked at once, and once per compaction that
    replaces it.
    """

    def __init__(self, pinned: Pinned | None = None) -> None:
        self._pinned = pinned
        self._forget()

    def _forget(self) -> None:
        self.seen: MessageView | None = None
        """The transcript that it has followed."""
        self.log: MessageLog | None = None
        """What remains; None while nothing was replaced."""
        self.task = 0
        """Where the first answer is; the length if there is none yet."""
        self._has_task = False
        self.start = 0
        """Where the messages begin that no compaction has replaced."""
        self.turns = 0
        """How many answers there are."""
        self.turns_before_start = 0
        self.total = 0
        """The estimated tokens of what remains."""
        self.summaries = 0
        """The estimated tokens of the texts of compactions."""
        self.parts: list[Part] = []
        """What compactions have made of the messages between the task and ``start``."""
        self.measured: tuple[int, int] | None = None
        """The tokens of the newest request that a provider has counted since the last compaction,
        and the estimate of its messages."""
        self.measured_before: tuple[int, int] | None = None
        """The same for the last request before it."""
        self.compacted = 0
        """``total`` after the newest compaction."""
        self.failures = 0
        """How many compactions in a row have no summary."""
        self.windows: dict[str, int] = {}
        """What providers have said about windows, by model."""

    def follow(
        self, view: MessageView, estimator: TokenEstimator, tools: Mapping[str, AgentTool]
    ) -> None:
        """Add the messages since the last call, or all messages of a different transcript."""
        if not view.grew_from(self.seen):
            self._forget()
        first = 0 if self.seen is None else self.seen.stable
        self.seen = view
        self._estimate = estimator.estimate_message
        self._tools = tools
        for index in range(first, view.stable):
            message = view[index]
            mark = mark_of(message)
            if mark is not None:
                self._cut(view, index, mark)
                continue
            self._note(message)
            self.total += self._estimate(message)
            if self.log is not None:
                self.log.append(message)

    def view(self, tail: tuple[AgentMessage, ...] = ()) -> MessageView:
        """What remains, with this tail."""
        assert self.seen is not None
        return self.seen.with_tail(tail) if self.log is None else self.log.view(tail)

    def _note(self, message: AgentMessage) -> None:
        if isinstance(message, AssistantMessage):
            self.turns += 1
            usage = message.usage
            if usage is not None:
                sent = (
                    usage.input_tokens
                    + usage.cache_read_input_tokens
                    + usage.cache_creation_input_tokens
                )
                if sent:
                    self.measured = (sent, self.total)
            self._has_task = True
        if not self._has_task:
            self.task += 1
            self.start = self.task

    def _cut(self, view: MessageView, end: int, mark: Mark) -> None:
        """Replace the messages before a marker by its text."""
        if mark.window is not None and mark.model is not None:
            self.windows[mark.model] = mark.window
        self._has_task = True  # even if another plugin has dropped all answers before it
        place = aligned(view, min(end, max(self.start, end - mark.kept)), self.start, end)
        self.parts = self.parts_with(mark, view, place, end)
        self.summaries = sum([self._estimate(UserMessage(part.mark.text)) for part in self.parts])
        self.failures = 0 if mark.has_summary else self.failures + 1
        self.turns_before_start += answers(view, self.start, place)
        self.start = place
        newest = [m for m in view[place:end] if mark_of(m) is None]
        task = [m for m in view[: self.task] if mark_of(m) is None]
        messages = [*task, *[m for part in self.parts for m in part.messages], *newest]
        self.log = MessageLog(messages)
        self.total = self.compacted = sum([self._estimate(message) for message in messages])
        if self.measured is not None:
            self.measured_before, self.measured = self.measured, None

    def parts_with(self, mark: Mark, view: MessageView, place: int, end: int) -> list[Part]:
        """What compactions make if this marker at ``end`` replaces what is before ``place``."""
        count = 0 if mark.merges else len(self.parts)
        if not mark.has_summary:
            count = min(count, self.before_notes)
        earlier, gone = self.parts[:count], self.parts[count:]
        replaced = [*[m for part in gone for m in part.stays], *view[self.start : place]]
        newest = _newest(chain(*[part.stays for part in earlier], replaced, view[place:end]))
        parts = [Part(part.mark, self._staying(part.stays, newest)) for part in earlier]
        stays = self._staying(replaced, newest, drops_pins=mark.drops_pins)
        return [*parts, Part(mark, stays)]

    @property
    def before_notes(self) -> int:
        """How many parts there are before the notes at the end, which have no summary."""
        count = len(self.parts)
        while count and not self.parts[count - 1].mark.has_summary:
            count -= 1
        return count

    def _staying(
        self,
        replaced: Sequence[AgentMessage],
        newest: AbstractSet[int],
        *,
        drops_pins: bool = False,
    ) -> list[AgentMessage]:
        """What must stay of these: what is pinned, the newest message of the user, the newest plan,
        open calls, and what people have decided.
        """
        stays: list[AgentMessage] = []
        for turn in turns_of(replaced, 0, len(replaced)):
            answer = replaced[turn.start]
            results: list[int] = []
            if isinstance(answer, AssistantMessage):
                results = [n for n in turn if isinstance(replaced[n], ToolResultMessage)]
                is_open = len(results) < len(answer.tool_calls)
                whole = [answer, *[replaced[n] for n in results]]
                if is_open or (
                    not drops_pins and any(self._must_stay(message, newest) for message in whole)
                ):
                    stays += whole
            for n in turn:
                note = replaced[n]
                if isinstance(note, (UserMessage, SystemMessage)) and (
                    id(note) in newest or (not drops_pins and self._is_pinned(note))
                ):
                    stays.append(note)
        return stays

    def _is_pinned(self, message: AgentMessage) -> bool:
        return self._pinned is not None and self._pinned(message)

    def _must_stay(self, message: AgentMessage, newest: AbstractSet[int]) -> bool:
        """Whether an answer or a result must stay, and so its whole turn."""
        if self._is_pinned(message):
            return True
        if not isinstance(message, ToolResultMessage):
            return False
        tool = self._tools.get(message.tool_name)
        policy = None if tool is None else tool.history_policy
        if policy is not None and policy.keeps_result:
            return True
        if policy is not None and policy.pins_active_plan:
            return id(message) in newest
        return is_decided_by_person(message)


def _newest(messages: Iterable[AgentMessage]) -> AbstractSet[int]:
    """The newest message of the user and the newest result of each tool, by identity."""
    newest: dict[str | None, int] = {}
    for message in messages:
        if isinstance(message, UserMessage):
            newest[None] = id(message)
        elif isinstance(message, ToolResultMessage):
            newest[message.tool_name] = id(message)
    return frozenset(newest.values())


# --- turns ----------------------------------------------------------------------------------------


def turns_of(view: Sequence[AgentMessage], start: int, stop: int) -> Iterator[range]:
    """Each answer with its results and what follows until the next one. What comes before the first
    answer is a range of its own.
    """
    begin = start
    for index in range(start, stop):
        if index > begin and isinstance(view[index], AssistantMessage):
            yield range(begin, index)
            begin = index
    if begin < stop:
        yield range(begin, stop)


def answers(view: Sequence[AgentMessage], start: int, stop: int) -> int:
    """How many answers there are."""
    return sum(isinstance(view[n], AssistantMessage) for n in range(start, stop))


def aligned(view: Sequence[AgentMessage], place: int, first: int, end: int) -> int:
    """The place, or where the answer begins that it would separate from results or that waits for
    some. ``first`` is the least, and messages from ``end`` on do not count.
    """
    answer = place - 1
    results = 0
    while answer >= first and not isinstance(view[answer], AssistantMessage):
        results += isinstance(view[answer], ToolResultMessage)
        answer -= 1
    if answer < first:
        return place
    message = view[answer]
    assert isinstance(message, AssistantMessage)
    after = place
    while after < end and not isinstance(view[after], AssistantMessage):
        if isinstance(view[after], ToolResultMessage):
            return answer
        after += 1
    return answer if results < len(message.tool_calls) else place


_BY_PEOPLE = frozenset({"deny", "give_result", "give_arguments"})


def is_decided_by_person(message: ToolResultMessage) -> bool:
    """Whether a person has refused the call, given its result, or changed it."""
    details: Any = message.details
    if not isinstance(details, dict):
        return False
    if details.get("reason") == "denied":
        return True
    decisions: Any = details.get("decided_by")
    if not isinstance(decisions, (list, tuple)):
        return False
    return any(
        isinstance(each, dict) and ("by" in each or each.get("decision") in _BY_PEOPLE)
        for each in decisions
    )
