"""The index of one log: where its records are, and what its turns add up to.

It is built by reading the log once, in pages, a part at a time; later only what is new is read.
After every page it keeps the place behind it and a copy of the timeline there. So any part of the
timeline can be read from the nearest place before it: a page of items costs about as many bytes as
it has, however long the log is.

Threads may use an index at once: a lock guards it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from threading import Lock

from msgspec import Struct, field
from msgspec.structs import replace

from clark_agent.errors import LogDamaged
from clark_agent.plugins.compaction import mark_of
from clark_agent.prices import ModelRef, Price
from clark_agent.run_log.pages import START, LogPlace, read_page
from clark_agent.run_log.reader import error_of
from clark_agent.run_log.records import (
    Answered,
    Asked,
    CallSuspended,
    Consulted,
    ContextEdited,
    MessagesAdded,
    Record,
    RequestDecided,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    RunSuspended,
    ToolEnded,
    ToolStarted,
    ToolWithdrawn,
)
from clark_agent.run_log.store import LogProblem, RunStore
from clark_agent.types import Usage
from clark_agent.view.items import Item
from clark_agent.view.parts import Parts, tokens_of
from clark_agent.view.shapes import TurnRow
from clark_agent.view.timeline import Timeline
from clark_agent.waiting import WaitingRequest

__all__ = ["LogIndex", "Slice"]

_RECORDS, _SIZE = 256, 1 << 18
"""How much of a log is between two places that are kept."""
_MOST_READ = 1 << 20
"""About how many bytes a page of items reads."""
_MOST_NAMES = 20


class _Mark(Struct, frozen=True):
    """A place in a log, and what is known there."""

    place: LogPlace
    timeline: Timeline
    read: int
    """How many bytes come before it."""


class Spent(Struct):
    """Tokens by model."""

    own: Usage = Usage()
    """Those of the model of the run."""
    aside: dict[ModelRef, Usage] = {}
    """Those of other models that plugins asked."""

    def add(self, usage: Usage | None, model: ModelRef | None = None) -> None:
        """Count an answer; ``model`` is None for the model of the run."""
        if usage is None:
            return
        if model is None:
            self.own += usage
        else:
            self.aside[model] = self.aside.get(model, Usage()) + usage

    @property
    def usage(self) -> Usage:
        """All of them."""
        return sum(self.aside.values(), self.own)

    def cost(self, price_of: Callable[[ModelRef | None], Price | None]) -> float | None:
        """Return the cost; None if a price is not known."""
        price = price_of(None)
        if price is None:
            return None
        cost = price.of(self.own)
        for model, usage in self.aside.items():
            price = price_of(model)
            if price is None:
                return None
            cost += price.of(usage)
        return cost


class _Turn(Struct):
    """What is added up for a turn."""

    turn: int
    seq: int
    began_at: int
    ms: int | None = None
    spent: Spent = field(default_factory=Spent)
    model_ms: int = 0
    tools: list[str] = field(default_factory=list)
    calls: int = 0
    errors: int = 0
    discarded: int = 0
    attempts: int = 0
    edited_by: list[str] = field(default_factory=list)
    is_compacted: bool = False


class Waits(Struct, frozen=True):
    """What a call waits for."""

    seq: int
    """The number of the record that says so."""
    request: WaitingRequest | None
    child_run_ids: tuple[str, ...]
    is_decided: bool = False


class Slice(Struct, frozen=True, kw_only=True):
    """A part of a timeline."""

    items: tuple[Item, ...]
    next: int | None
    previous: int | None
    last_seq: int | None
    problem: LogProblem | None
    bytes_read: int
    records_read: int


class LogIndex:
    """Reads one log."""

    def __init__(
        self, store: RunStore, run_id: str, *, prices: dict[str, Price] | None = None
    ) -> None:
        self.run_id = run_id
        self._store = store
        self._prices = prices
        self._lock = Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._timeline = Timeline(Parts(), prices=self._prices)
        self._marks = [_Mark(START, self._timeline.copy(), 0)]
        self._seqs = [-1]
        """The number of the record before each mark."""
        self._turns: list[_Turn] = []
        self._end = START
        self.began: RunBegan | None = None
        """The first record, without history and prompts."""
        self.first_seq = 0
        self.began_at = self.last_at = 0
        self.records = self.bytes_read = 0
        self.size: int | None = None
        self.is_complete = False
        """Whether everything was read that there was."""
        self.problem: LogProblem | None = None
        self.spent = Spent()
        self.model_calls = self.tool_calls = self.worked_ms = 0
        self.ending: RunEnded | RunFailed | RunSuspended | None = None
        self.waits: dict[int, Waits] = {}

    # --- reading ----------------------------------------------------------------------------------

    @property
    def last_seq(self) -> int:
        """The number of the newest record that was read; -1 before the first."""
        return self._end.seq

    @property
    def usage(self) -> Usage:
        """All tokens of the run."""
        return self.spent.usage

    @property
    def cost(self) -> float | None:
        """What they cost; None if a price is not known."""
        return self.spent.cost(self._timeline.price_of)

    def advance(self, most: int = 1 << 22) -> bool:
        """Read on, at most about so many bytes. Return whether there is more.

        Raises `RunNotFound`. A log that has become shorter is read again.
        """
        with self._lock:
            read = 0
            while read < most:
                try:
                    page = read_page(
                        self._store, self.run_id, self._end, records=_RECORDS, size=_SIZE
                    )
                except LogDamaged:
                    if self._end == START:
                        raise
                    self._start_over()
                    continue
                for record in page.records:
                    self._take(record)
                self.problem, self.size = page.problem, page.size
                if page.records:
                    read += max(1, page.bytes_read)
                    self.bytes_read += page.bytes_read
                    self._mark(page.end)
                if page.is_end:
                    self.is_complete = True
                    return False
                self.is_complete = False
            return True

    def _mark(self, end: LogPlace) -> None:
        self._end = end
        last = self._marks[-1]
        is_far = end.seq - last.place.seq >= _RECORDS or self.bytes_read - last.read >= _SIZE
        if is_far or not self.is_complete:
            self._marks.append(_Mark(end, self._timeline.copy(), self.bytes_read))
            self._seqs.append(end.seq)

    def reach(self, *, seq: int | None = None, turn: int | None = None) -> None:
        """Read until a record, or until a turn has begun, or to the end."""
        while self._lacks(seq, turn) and self.advance():
            pass

    def _lacks(self, seq: int | None, turn: int | None) -> bool:
        if seq is not None:
            return self.last_seq < seq
        return turn is None or not self._turns or self._turns[-1].turn < turn

    # --- what records add up to -------------------------------------------------------------------

    def _take(self, record: Record) -> None:
        entry, at = record.entry, record.at
        spent = 0
        if self.began is None:
            self.first_seq, self.began_at = record.seq, at
        elif not isinstance(entry, (RunResumed, RequestDecided)):
            spent = max(0, at - self.last_at)
        self.worked_ms += spent
        self.last_at = at
        self.records += 1
        ms = self._timeline.note(record)
        turn = self._turn_with(record, spent)
        match entry:
            case RunBegan():
                self.began = replace(entry, history=(), prompts=())
            case Asked():
                turn.attempts += 1
            case Answered() as answered:
                self._answered(answered, ms, turn)
            case Consulted() as consulted:
                self._consulted(consulted, spent, turn)
            case MessagesAdded(messages=messages):
                turn.is_compacted |= any(mark_of(message) is not None for message in messages)
            case ContextEdited(plugin=plugin):
                if plugin not in turn.edited_by:
                    turn.edited_by.append(plugin)
            case ToolStarted(position=position):
                self.waits.pop(position, None)
                self.tool_calls += 1
            case ToolEnded(position=position, result=result):
                self.waits.pop(position, None)
                turn.errors += result.is_error
            case ToolWithdrawn():
                self.tool_calls -= 1
            case CallSuspended() as waits:
                self.waits[waits.position] = Waits(record.seq, waits.request, waits.child_run_ids)
            case RequestDecided(request_id=request_id):
                for position, waiting in self.waits.items():
                    if waiting.request is not None and waiting.request.request_id == request_id:
                        self.waits[position] = replace(waiting, is_decided=True)
            case RunEnded() | RunFailed() | RunSuspended():
                self.ending = entry
            case RunResumed():
                self.ending = None
            case _:
                pass

    def _turn_with(self, record: Record, spent: int) -> _Turn:
        """Return the turn that a record is in, and add the time since the record before."""
        number = self._timeline.turn_of(record)
        if not number:
            return _Turn(0, record.seq, record.at)  # before the first one
        if not self._turns or self._turns[-1].turn < number:
            self._turns.append(_Turn(number, record.seq, record.at))
            return self._turns[-1]
        turn = self._turns[-1]
        turn.ms = (turn.ms or 0) + spent
        return turn

    def _answered(self, answered: Answered, ms: int | None, turn: _Turn) -> None:
        self.model_calls += 1
        for spent in (self.spent, turn.spent):
            spent.add(answered.message.usage)
        turn.model_ms += ms or 0
        if answered.discarded is not None:
            turn.discarded += 1
            return
        self.waits = {}
        calls = answered.message.tool_calls
        turn.calls += len(calls)
        names = dict.fromkeys([call.name for call in calls if call.name not in turn.tools])
        turn.tools += [*names][: _MOST_NAMES - len(turn.tools)]

    def _consulted(self, consulted: Consulted, ms: int, turn: _Turn) -> None:
        self.model_calls += 1
        for spent in (self.spent, turn.spent):
            spent.add(consulted.message.usage, consulted.model)
        turn.model_ms += ms
        if turn.ms is None:  # it begins the turn
            turn.began_at -= ms
            turn.ms = ms

    @property
    def turns(self) -> int:
        """How many turns have begun."""
        return len(self._turns)

    def attempts(self, turn: int) -> int:
        """How many requests a turn has made."""
        found = self._turn(turn)
        return 0 if found is None else found.attempts

    def turn_rows(self, first: int, limit: int) -> list[TurnRow]:
        """Return the overview of turns from this one on."""
        start = bisect_left([turn.turn for turn in self._turns], first)
        return [self._row(turn) for turn in self._turns[start : start + limit]]

    def _row(self, turn: _Turn) -> TurnRow:
        return TurnRow(
            turn=turn.turn,
            seq=turn.seq,
            began_at=turn.began_at,
            ms=turn.ms,
            tokens=tokens_of(turn.spent.usage),
            cost=turn.spent.cost(self._timeline.price_of),
            model_ms=turn.model_ms,
            tools=tuple(turn.tools),
            calls=turn.calls,
            errors=turn.errors,
            discarded=turn.discarded,
            edited_by=tuple(turn.edited_by),
            has_children=False,
            is_compacted=turn.is_compacted,
        )

    def _turn(self, number: int) -> _Turn | None:
        place = bisect_left(self._turns, number, key=lambda turn: turn.turn)
        found = self._turns[place] if place < len(self._turns) else None
        return found if found is not None and found.turn == number else None

    def seq_of_turn(self, number: int) -> int | None:
        """Return the number of the first record of a turn."""
        found = self._turn(number)
        return None if found is None else found.seq

    def turn_at(self, seq: int) -> int:
        """Return the turn that a record is in; 0 before the first."""
        place = bisect_right(self._turns, seq, key=lambda turn: turn.seq)
        return self._turns[place - 1].turn if place else 0

    def bytes_before(self, seq: int) -> int:
        """Return about how many bytes of the log come before a record."""
        return self._marks[self._before(seq)].read

    def model(self) -> ModelRef:
        """The names of the model."""
        return ModelRef() if self.began is None else self.began.model_ref

    # --- pages of items ---------------------------------------------------------------------------

    def mark_before(self, seq: int) -> tuple[LogPlace, Timeline]:
        """Return the nearest place before a record, and a timeline to go on with from there."""
        with self._lock:
            mark = self._marks[self._before(seq)]
            return mark.place, mark.timeline.copy()

    def _before(self, seq: int) -> int:
        return max(0, bisect_left(self._seqs, seq) - 1)

    def items_from(self, seq: int, limit: int) -> Slice:
        """Return the items from a record on."""
        if seq > self.first_seq:
            self.reach(seq=seq - 1)
        return self._read(seq, limit, None)

    def items_before(self, seq: int, limit: int) -> Slice:
        """Return the items before a record: the last of them, as many as one page may read."""
        self.reach(seq=seq - 1)
        with self._lock:
            seq = min(seq, self._end.seq + 1)
            last = self._before(seq)
            first = last
            while first > 0 and self._seqs[first] + 1 > seq - limit:
                if self._marks[last].read - self._marks[first - 1].read > _MOST_READ:
                    break
                first -= 1
            start = max(self._seqs[first] + 1, seq - limit, self.first_seq)
        return self._read(start, seq - start, seq)

    def _read(self, start: int, limit: int, until: int | None) -> Slice:
        """Return the items from ``start`` on: at most ``limit``, and those before ``until``, or
        about as many as a page may read.
        """
        place, timeline = self.mark_before(start)
        items: list[Item] = []
        bytes_read = records_read = 0
        problem: LogProblem | None = None
        is_end = False
        while not is_end and len(items) < limit and (until or bytes_read < _MOST_READ):
            wanted = min(_RECORDS, max(1, start - place.seq - 1) + limit - len(items))
            page = read_page(self._store, self.run_id, place, records=wanted, size=_SIZE)
            bytes_read += page.bytes_read
            records_read += len(page.records)
            for record in page.records:
                if record.seq < start:
                    timeline.note(record)
                elif len(items) < limit:
                    items.append(timeline.take(record))
            place, problem, is_end = page.end, page.problem, page.is_end
        last = items[-1].seq if items else None
        has_more = not is_end or (last is not None and last < place.seq)
        return Slice(
            items=tuple(items),
            next=last + 1 if last is not None and has_more else None,
            previous=items[0].seq if items and items[0].seq > self.first_seq else None,
            last_seq=last,
            problem=None if has_more else problem,
            bytes_read=bytes_read,
            records_read=records_read,
        )

    def record(self, seq: int) -> Record | None:
        """Return one record; None if there is none with this number."""
        self.reach(seq=seq)
        place, _ = self.mark_before(seq)
        for record in self.records_from(place, seq):
            if record.seq == seq:
                return record
        return None

    def records_from(self, place: LogPlace, until: int) -> Iterator[Record]:
        """Yield the records behind a place, up to this number. Raises `LogDamaged` or `DecodeError`
        for damage before that.
        """
        while place.seq < until:
            page = read_page(self._store, self.run_id, place, records=_RECORDS, size=_SIZE)
            for record in page.records:
                if record.seq > until:
                    return
                yield record
            if page.problem is not None:
                raise error_of(self.run_id, page.problem)
            if page.is_end:
                return
            place = page.end
