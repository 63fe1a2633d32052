"""Sent: the messages of each request, rebuilt from the records of a run.

The log has the transcript, and what each plugin changed in its own view of it (``context_edited``).
Each view is kept as one list that grows and is edited in place, so a request costs what is new or
changed in it, not the history.

This file mirrors `clark_agent.run_log.writer.RunWriter.edited`: what the writer compares a view
with is what the edits are applied to here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from clark_agent.history import repair_history
from clark_agent.protocol import ZERO_OUTPUT_RECOVERY
from clark_agent.run_log.fold import FoldedRun
from clark_agent.run_log.records import Answered, Asked, ContextEdited, Edit, Entry, RunResumed
from clark_agent.stream import StreamErrorKind
from clark_agent.types import AgentMessage, SystemMessage

__all__ = ["REPAIR", "SentMessages"]

REPAIR = repair_history.__name__
"""The name under which the engine records its own repairs."""

_Editor: TypeAlias = tuple[str, int]
"""The name of a plugin, and which one of that name it is."""
_REPAIR: _Editor = (REPAIR, 0)

_NOTE = SystemMessage(ZERO_OUTPUT_RECOVERY)


class SentMessages:
    """The messages of the newest request. Pass all records to `follow`, in order."""

    def __init__(self, run: FoldedRun) -> None:
        self._run = run
        """The state of the run, which the caller keeps up to date."""
        self._order = _order(run.began.plugins)
        self._views: dict[_Editor, _View] = {}
        self._edits: dict[_Editor, ContextEdited] = {}
        """What was recorded for the next request."""
        self._source: object = None
        """The list that the newest request was taken from."""
        self._stable = 0
        """How many messages of the newest request are still in that list, unchanged."""
        self._turn = 0
        self._has_note = False
        """Whether the requests of this turn end with a note of the engine."""
        self.messages: list[AgentMessage] = []
        self.dropped_note = False
        """Whether the request before ended with such a note, and this one does not have it."""

    def follow(self, entry: Entry) -> int | None:
        """Add the next entry, which is already folded into the run.

        Return None, or for a request how many messages at its beginning are those of the request
        before. Times do not count: no provider gets them.
        """
        match entry:
            case ContextEdited(is_lasting=True):  # the writer starts over, too
                self._start_over()
            case RunResumed():
                self._start_over()
                self._has_note = False
            case ContextEdited(plugin=plugin, which=which):
                self._edits[plugin, which] = entry
            case Answered(error=StreamErrorKind.ZERO_OUTPUT_TRANSPORT):
                self._has_note = True
            case Asked(turn=turn):
                self._has_note = self._has_note and turn == self._turn
                self._turn = turn
                return self._asked()
            case _:
                pass
        return None

    def _start_over(self) -> None:
        self._views.clear()
        self._edits.clear()  # of a request that was not made
        self._source = None

    def _asked(self) -> int:
        source, stable = self._newest()
        start = min(self._stable, stable) if source is self._source else 0
        sent = self.messages
        given = source[start:] if not self._adds_note(source) else [*source[start:], _NOTE]
        kept = start
        for old, new in zip(sent[start:], given, strict=False):
            if not _is_same(old, new):
                break
            kept += 1
        self.dropped_note = kept < len(sent) and sent[-1] is _NOTE
        sent[kept:] = given[kept - start :]
        self._source, self._stable = source, len(source)
        self._edits.clear()
        return kept

    def _adds_note(self, source: object) -> bool:
        return self._has_note and source is self._run.transcript

    def _newest(self) -> tuple[list[AgentMessage], int]:
        """The list with the messages of this request, and how many at its beginning were there
        before.
        """
        transcript = self._run.transcript
        source, stable = transcript, len(transcript)
        given: Sequence[AgentMessage] = [*transcript, _NOTE] if self._has_note else transcript
        for editor in self._chain():
            edited = self._edits.get(editor)
            if edited is None and editor == _REPAIR:  # made for single requests
                continue
            view = self._views.get(editor)
            if view is None:  # nothing is known of it before its first edit
                view = self._views[editor] = _View(given)
            stable = view.update(given, () if edited is None else edited.edits)
            given = source = view.messages
        return source, stable

    def _chain(self) -> list[_Editor]:
        """The plugins with views of their own, in the order in which they are called."""
        if not self._views and not self._edits:
            return []
        last = len(self._order)
        places = {**self._order, _REPAIR: last + 1}
        return sorted({**self._views, **self._edits}, key=lambda each: places.get(each, last))


def _order(names: Sequence[str]) -> dict[_Editor, int]:
    """The place of each plugin; those with the same name are numbered."""
    counts: dict[str, int] = {}
    order: dict[_Editor, int] = {}
    for place, name in enumerate(names):
        which = counts[name] = counts.get(name, -1) + 1
        order[name, which] = place
    return order


class _View:
    """What a plugin has made of the messages that it got."""

    def __init__(self, given: Iterable[AgentMessage]) -> None:
        self.messages = list(given)
        self._taken = len(self.messages)

    def update(self, given: Sequence[AgentMessage], edits: Sequence[Edit]) -> int:
        """Add the new messages, then apply the edits. Return where the first change is."""
        stable = len(self.messages)
        self.messages.extend(given[self._taken :])
        self._taken = len(given)
        for edit in reversed(edits):
            self.messages[edit.start : edit.start + edit.removed] = edit.inserted
        return min(stable, edits[0].start) if edits else stable


def _is_same(old: AgentMessage, new: AgentMessage) -> bool:
    return old is new or old == new or replace(old, timestamp=new.timestamp) == new
