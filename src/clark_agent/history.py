"""Turns any transcript into one that a provider accepts.

Providers require exactly one result for every tool call, directly after the message that made it,
and unique ids. Crashes, truncation, merges and servers that use one id for all calls break that.
`repair_history` repairs it, reports its changes, and changes nothing the second time.

Calls and results are matched by id within their turn, first come first served, because some servers
reuse ids from turn to turn. Only a result outside of its turn is matched across the transcript, and
only if no other call has its id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    TextContent,
    ToolCall,
    ToolResultMessage,
)

__all__ = [
    "HistoryChange",
    "HistoryChangeKind",
    "IdRenamer",
    "RepairedHistory",
    "repair_history",
    "unique_tool_call_ids",
]

MISSING_RESULT = "No result of this call was recorded. It may or may not have run."


class HistoryChangeKind(StrEnum):
    """The kind of a repair."""

    SYNTHESIZED_RESULT = "synthesized_result"
    """A call had no result and got one that says so."""
    DROPPED_RESULT = "dropped_result"
    """A result had no call, or its call already had a result."""
    MOVED_RESULT = "moved_result"
    """A result was not directly after its call."""
    RENAMED_CALL = "renamed_call"
    """A call's id was empty or in use; its result got the new id too."""


class HistoryChange(Struct, frozen=True):
    """One repair: ``index`` is the position of the message in the given transcript."""

    kind: HistoryChangeKind
    index: int
    tool_call_id: str
    tool_name: str
    new_id: str | None = None


class RepairedHistory(Struct, frozen=True):
    """The repaired transcript and the changes; no changes if it was valid."""

    messages: tuple[AgentMessage, ...]
    changes: tuple[HistoryChange, ...]


def repair_history(messages: Iterable[AgentMessage]) -> RepairedHistory:
    """A transcript that a provider accepts, with as much of the given one as possible."""
    given = tuple(messages)
    answers = _pair(given)
    paired = set(answers.values())
    ids = _Ids(given)
    changes: list[HistoryChange] = []
    kept: list[AgentMessage] = []
    for index, message in enumerate(given):
        if isinstance(message, ToolResultMessage):
            if index not in paired:
                changes.append(_about(message, HistoryChangeKind.DROPPED_RESULT, index))
        elif isinstance(message, AssistantMessage) and (calls := message.tool_calls):
            new_ids = [ids.claim(call.id) if call.id else ids.fresh() for call in calls]
            changes += _renames(index, calls, new_ids)
            kept.append(_with_call_ids(message, new_ids))
            sources = [answers.get((index, position)) for position in range(len(calls))]
            in_place = range(index + 1, _end_of_results(given, index + 1))
            for position in _answer_order(sources, in_place):
                call, new_id, source = calls[position], new_ids[position], sources[position]
                if source is None:
                    kept.append(_missing_result(call, new_id))
                    kind = HistoryChangeKind.SYNTHESIZED_RESULT
                    changes.append(HistoryChange(kind, index, call.id, call.name))
                    continue
                result = given[source]
                assert isinstance(result, ToolResultMessage)
                kept.append(_with_result_id(result, new_id))
                if source not in in_place:
                    changes.append(_about(result, HistoryChangeKind.MOVED_RESULT, source))
        else:
            kept.append(message)
    return RepairedHistory(tuple(kept) if changes else given, tuple(changes))


def unique_tool_call_ids(messages: Iterable[AgentMessage]) -> RepairedHistory:
    """The transcript with every repeated call id renamed, together with its result.

    Unlike `repair_history` this touches nothing else: the first use of an id keeps it, orphans
    stay orphans.
    """
    given = tuple(messages)
    renamer = IdRenamer()
    kept = renamer.rename(given)
    return RepairedHistory(tuple(kept) if renamer.changes else given, tuple(renamer.changes))


class IdRenamer:
    """`unique_tool_call_ids` for a transcript that comes in pieces."""

    def __init__(self) -> None:
        self.changes: list[HistoryChange] = []
        self._ids = _Ids(())
        self._index = -1
        self._results: dict[str, deque[str]] = {}

    def rename(self, messages: Sequence[AgentMessage]) -> list[AgentMessage]:
        """The next messages, with ids that no message before them has."""
        self._ids.reserve(messages)
        return [self._rename(message) for message in messages]

    def peek(self, results: Sequence[AgentMessage]) -> tuple[AgentMessage, ...]:
        """What results of the newest calls would become, without adding them."""
        waiting = {call_id: deque(new_ids) for call_id, new_ids in self._results.items()}
        renamed: list[AgentMessage] = []
        for message in results:
            if isinstance(message, ToolResultMessage):
                renamed.append(_with_new_id(message, waiting))
            else:
                waiting = {}
                renamed.append(message)
        return tuple(renamed)

    def _rename(self, message: AgentMessage) -> AgentMessage:
        self._index += 1
        if isinstance(message, ToolResultMessage):
            return _with_new_id(message, self._results)
        self._results = {}
        if not isinstance(message, AssistantMessage) or not (calls := message.tool_calls):
            return message
        new_ids = [self._ids.claim(call.id) for call in calls]
        self.changes += _renames(self._index, calls, new_ids)
        for call, new_id in zip(calls, new_ids, strict=True):
            self._results.setdefault(call.id, deque()).append(new_id)
        return _with_call_ids(message, new_ids)


def _pair(given: Sequence[AgentMessage]) -> dict[tuple[int, int], int]:
    """Which result answers which call: (message, position of the call in it) → message."""
    answers: dict[tuple[int, int], int] = {}
    strays: list[tuple[int, str]] = []
    calls_of_id: dict[str, list[tuple[int, int]]] = {}
    waiting: dict[str, deque[tuple[int, int]]] = {}
    for index, message in enumerate(given):
        if isinstance(message, AssistantMessage):
            waiting = {}
            for position, call in enumerate(message.tool_calls):
                waiting.setdefault(call.id, deque()).append((index, position))
                calls_of_id.setdefault(call.id, []).append((index, position))
        elif isinstance(message, ToolResultMessage):
            if queue := waiting.get(message.tool_call_id):
                answers[queue.popleft()] = index
            else:
                strays.append((index, message.tool_call_id))
    for index, call_id in strays:
        candidates = calls_of_id.get(call_id, [])
        if len(candidates) == 1 and candidates[0] not in answers:
            answers[candidates[0]] = index
    return answers


class _Ids:
    """Returns every id once."""

    def __init__(self, messages: Iterable[AgentMessage]) -> None:
        self._occurring: set[str] = set()
        self._claimed: set[str] = set()
        self._number = count(1)
        self.reserve(messages)

    def reserve(self, messages: Iterable[AgentMessage]) -> None:
        """Never return an id in these messages as a fresh one."""
        for message in messages:
            if isinstance(message, AssistantMessage):
                self._occurring.update([call.id for call in message.tool_calls])
            elif isinstance(message, ToolResultMessage):
                self._occurring.add(message.tool_call_id)

    def claim(self, wanted: str) -> str:
        """The wanted id if it is free, else a fresh one."""
        if wanted in self._claimed:
            return self.fresh()
        self._claimed.add(wanted)
        return wanted

    def fresh(self) -> str:
        """An id that occurs nowhere."""
        new_id = next(
            candidate
            for number in self._number
            if (candidate := f"clark_agent_call_{number}") not in self._occurring
        )
        self._claimed.add(new_id)
        return new_id


def _end_of_results(given: Sequence[AgentMessage], start: int) -> int:
    """Where the results that stand together from ``start`` on end."""
    while start < len(given) and isinstance(given[start], ToolResultMessage):
        start += 1
    return start


def _answer_order(sources: Sequence[int | None], in_place: range) -> list[int]:
    """The order of the results of one message's calls.

    Results in the right place keep their order; the others follow in the order of the calls.
    """

    def key(position: int) -> int:
        source = sources[position]
        return in_place.stop if source is None or source not in in_place else source

    return sorted(range(len(sources)), key=key)


def _about(result: ToolResultMessage, kind: HistoryChangeKind, index: int) -> HistoryChange:
    return HistoryChange(kind, index, result.tool_call_id, result.tool_name)


def _renames(index: int, calls: Sequence[ToolCall], new_ids: Sequence[str]) -> list[HistoryChange]:
    return [
        HistoryChange(HistoryChangeKind.RENAMED_CALL, index, call.id, call.name, new_id)
        for call, new_id in zip(calls, new_ids, strict=True)
        if call.id != new_id
    ]


def _missing_result(call: ToolCall, call_id: str) -> ToolResultMessage:
    return ToolResultMessage(
        call_id,
        call.name,
        (TextContent(MISSING_RESULT),),
        is_error=True,
        details={"kind": "missing_tool_result"},
    )


def _with_new_id(result: ToolResultMessage, waiting: dict[str, deque[str]]) -> ToolResultMessage:
    """The result with the id of the first call of its id that still waits for one."""
    new_ids = waiting.get(result.tool_call_id)
    return _with_result_id(result, new_ids.popleft()) if new_ids else result


def _with_result_id(result: ToolResultMessage, call_id: str) -> ToolResultMessage:
    return result if result.tool_call_id == call_id else replace(result, tool_call_id=call_id)


def _with_call_ids(message: AssistantMessage, new_ids: Sequence[str]) -> AssistantMessage:
    if [call.id for call in message.tool_calls] == new_ids:
        return message
    fresh = iter(new_ids)
    return replace(
        message,
        content=tuple(
            [replace(b, id=next(fresh)) if isinstance(b, ToolCall) else b for b in message.content]
        ),
    )
