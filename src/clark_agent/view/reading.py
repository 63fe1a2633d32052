"""What the page reads: lists, runs, pages of their timelines, and runs as they go on.

All of it is read in threads. Indexes of the logs that were opened last are kept.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import ExitStack, suppress
from threading import Lock
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clark_agent._kept_text import KeptText
from clark_agent._version import __version__
from clark_agent.clock import now_ms
from clark_agent.errors import ClarkAgentError, DecodeError, RunNotFound
from clark_agent.messages.wire import decode_json
from clark_agent.prices import ModelRef, Price
from clark_agent.run_log import waiting_for
from clark_agent.run_log._reading import in_background, is_remote
from clark_agent.run_log.follow import LiveDelta
from clark_agent.run_log.kept import pieces_of
from clark_agent.run_log.pages import LogPlace, tail_from
from clark_agent.run_log.reader import outcome_of
from clark_agent.run_log.records import Record, RunEnded, RunFailed, ToolEnded
from clark_agent.run_log.store import RunStore, RunSummary, RunTail
from clark_agent.stream import ReasoningChunk, TextChunk, ThinkingChunk, ToolCallChunk
from clark_agent.types import Usage
from clark_agent.view import items, shapes
from clark_agent.view.catalog import RUNNING, Catalog, Query
from clark_agent.view.comparing import Compared, compare, diff_view
from clark_agent.view.index import LogIndex, Slice
from clark_agent.view.items import Delta
from clark_agent.view.parts import IMAGE_TYPES, KEPT, Parts, json_text, part_at, tokens_of
from clark_agent.view.requests import MOST_READ, SentRequest, TooLarge, request_view, sent_request
from clark_agent.view.shapes import ChildRun, Damage, Failure, Indexed, RunRow, RunView
from clark_agent.view.timeline import Timeline, known_price
from clark_agent.waiting import WaitingRequest

__all__ = ["MissingPart", "Reading"]

_MOST_INDEXES = 32
_MOST_CACHED = 4
_MOST_CHILDREN = 200
_MOST_WAITING = 200
_FIRST_READ = 1 << 21
"""About how many bytes of a log are read before the head of a run is shown."""
_HEARTBEAT = 15.0
_WAIT = 0.5
_MOST_DELTAS = 2000
_CHANNELS: dict[type, str] = {
    TextChunk: "text",
    ThinkingChunk: "thinking",
    ReasoningChunk: "reasoning",
}
_T = TypeVar("_T")


class MissingPart(LookupError):
    """There is no such turn, text or image. `str` is a sentence."""


class Reading:
    """Reads the runs of a store for the page."""

    def __init__(self, store: RunStore, *, prices: dict[str, Price] | None = None) -> None:
        self._store = store
        self._prices = prices or {}
        self.catalog = Catalog(store, prices=prices)
        self._indexes: OrderedDict[str, LogIndex] = OrderedDict()
        self._cache: OrderedDict[Any, Any] = OrderedDict()
        self._lock = Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def prepare(self) -> None:
        """Load the table of prices, which takes a while, in the background."""

        def load() -> bool:
            known_price(ModelRef("any"), self._prices)
            return False

        self._in_background("load prices", load)

    async def close(self) -> None:
        """End what goes on in the background."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _in_background(self, name: str, step: Callable[[], bool]) -> None:
        """Call a step in threads until it returns False, unless that goes on already."""
        if name in self._tasks:
            return

        async def work() -> None:
            try:
                with suppress(ClarkAgentError):  # whoever asks next gets it
                    while await asyncio.to_thread(step):
                        pass
            finally:
                self._tasks.pop(name, None)

        self._tasks[name] = asyncio.create_task(work(), name=name)

    def _index(self, run_id: str) -> LogIndex:
        with self._lock:
            found = self._indexes.pop(run_id, None)
            if found is None:
                found = LogIndex(self._store, run_id, prices=self._prices)
            self._indexes[run_id] = found
            while len(self._indexes) > _MOST_INDEXES:
                self._indexes.popitem(last=False)
            return found

    def _cached(self, key: Any, make: Callable[[], _T]) -> _T:
        with self._lock:
            found = self._cache.pop(key, None)
        if found is None:
            found = make()
        with self._lock:
            self._cache[key] = found
            while len(self._cache) > _MOST_CACHED:
                self._cache.popitem(last=False)
        kept: _T = found
        return kept

    def _summary(self, run_id: str) -> RunSummary:
        self.catalog.refresh()
        found = self.catalog.summary(run_id)
        if found is None:
            raise RunNotFound(run_id)
        return found

    def session(
        self,
        *,
        where: str,
        csrf: str,
        can_run: bool,
        can_replay: bool,
        agent: str | None,
        model: str | None,
        refresh_ms: int,
    ) -> shapes.Session:
        """What this server is and may do."""
        why_not = None
        if not csrf:
            why_not = "this server only shows runs: start it with --write to change something"
        elif not can_run:
            why_not = "to fork and resume runs, start it with --agent module:name or --model NAME"
        return shapes.Session(
            version=__version__,
            where=where,
            can_write=bool(csrf),
            can_run=can_run,
            can_replay=can_replay,
            why_not=why_not,
            agent=agent,
            model=model,
            csrf=csrf,
            search=self.catalog.kind,
            refresh_ms=refresh_ms,
            now=now_ms(),
        )

    # --- the list ---------------------------------------------------------------------------------

    async def runs(self, **query: Any) -> shapes.RunList:
        """Return a page of the list."""
        found = await asyncio.to_thread(self.catalog.list, Query(**query))
        if found.known < found.of:
            self._in_background("look at runs", self.catalog.look)
        return found

    async def waiting(self) -> shapes.WaitingList:
        """Return the open requests of all runs."""

        def read() -> shapes.WaitingList:
            found = waiting_for(self._store, limit=_MOST_WAITING)
            return shapes.WaitingList(tuple([self._waiting_anywhere(each) for each in found]))

        return await asyncio.to_thread(read)

    def _waiting_anywhere(self, request: WaitingRequest) -> items.Waiting:
        """Return a request of any run. Only if a text of it is cut, its log is read for the address
        of the rest.
        """
        parts = Parts()
        shown = parts.waiting(request)
        texts = [text for text in (shown.arguments, shown.request) if text is not None]
        if all(len(text.text) == text.length for text in texts):
            return shown
        index = self._index(request.run_id)
        index.reach(seq=1 << 62)
        for waits in index.waits.values():
            if waits.request is not None and waits.request.request_id == request.request_id:
                return parts.waiting(request, waits.seq)
        return shown

    # --- one run ----------------------------------------------------------------------------------

    async def run(self, run_id: str) -> RunView:
        """Return the head of a run. The rest of its log is read in the background."""
        index = self._index(run_id)

        def read() -> tuple[RunView, bool]:
            summary = self._summary(run_id)
            has_more = index.advance(_FIRST_READ)
            return self._view(summary, index), has_more

        view, has_more = await asyncio.to_thread(read)
        if has_more:
            self._in_background(f"index {run_id}", index.advance)
        return view

    def whole_run(self, run_id: str) -> tuple[RunView, LogIndex]:
        """Read a log to its end, in this thread. Return the head of its run, and its index."""
        summary, index = self._summary(run_id), self._index(run_id)
        while index.advance():
            pass
        return self._view(summary, index), index

    def _view(self, summary: RunSummary, index: LogIndex) -> RunView:
        catalog, run_id, began = self.catalog, summary.run_id, index.began
        row, ending = self._row(summary, index), index.ending
        usage = index.usage
        children = catalog.children(run_id)
        tree = ending.tree_usage if isinstance(ending, (RunEnded, RunFailed)) else None
        if tree is None:
            tree = sum([catalog.tree_usage(child) for child in children], usage)
        return RunView(
            run=row,
            indexed=self._indexed(index),
            provider=index.model().provider,
            tools=() if began is None else tuple(began.tools),
            plugins=() if began is None else began.plugins,
            turns=index.turns,
            model_calls=index.model_calls,
            tool_calls=index.tool_calls,
            worked_ms=index.worked_ms,
            tokens=tokens_of(usage),
            cost=index.cost,
            tree_tokens=tokens_of(tree),
            tree_cost=self._tree_cost(run_id, usage, index.cost),
            children=tuple(self._children(run_id)),
            waiting=tuple(self._waiting(index)),
            damage=self._damage(index.problem),
            error=ending.text if isinstance(ending, RunFailed) else None,
            parents=tuple(catalog.parents(run_id)),
            forks=tuple(catalog.forks(run_id)),
            last_seq=index.last_seq,
        )

    def _row(self, summary: RunSummary, index: LogIndex) -> RunRow:
        """Return the row of a run, with what its index knows better."""
        if index.is_complete or index.problem is not None:
            self.catalog.report(summary, index.problem)
        row = self.catalog.row(summary)
        if not index.is_complete and index.problem is None:
            return row
        ending = index.ending
        return replace(
            row,
            status=row.status if index.problem else (ending and outcome_of(ending)) or RUNNING,
            last_at=index.last_at,
            ms=max(0, index.last_at - index.began_at),
            records=index.records,
            turns=index.turns,
            tokens=tokens_of(index.usage),
            cost=index.cost,
        )

    def _tree_cost(self, run_id: str, usage: Usage, own: float | None) -> float | None:
        """Return the cost of a run and those below it; None if one has a price that is unknown."""
        total = 0.0 if usage == Usage() else own
        below = [*self.catalog.children(run_id)]
        while below and total is not None:
            child = below.pop()
            used = self.catalog.own_usage(child)
            if used != Usage():
                price = known_price(self.catalog.head(child).model, self._prices)
                total = None if price is None else total + price.of(used)
            below += self.catalog.children(child)
        return total

    def _indexed(self, index: LogIndex) -> Indexed:
        size = index.size
        read = None if size is None else min(index.bytes_read, size)
        if index.is_complete:
            read = size
        return Indexed(index.records, read, size, index.is_complete)

    def _damage(self, problem: Any) -> tuple[Damage, ...]:
        if problem is None:
            return ()
        return (Damage(problem.where, problem.reason, problem.seq, problem.is_newer),)

    def _children(self, run_id: str, most: int = _MOST_CHILDREN) -> Iterable[ChildRun]:
        for child in self.catalog.children(run_id)[:most]:
            summary = self.catalog.summary(child)
            if summary is not None:
                head = self.catalog.head(child)
                row = self.catalog.row(summary)
                yield ChildRun(row, head.turn, head.position, head.call_id)

    def _waiting(
        self, index: LogIndex, above: frozenset[str] = frozenset()
    ) -> Iterable[items.Waiting]:
        """Yield what a run and the child runs that it waits for have open."""
        if isinstance(index.ending, (RunEnded, RunFailed)) or index.run_id in above:
            return
        if index.waits and any(mail.kind == "cancel" for mail in self._store.mail(index.run_id)):
            return  # it will end
        parts = Parts()
        for _, waits in sorted(index.waits.items()):
            request = waits.request
            if request is not None and not waits.is_decided and not request.overdue(now_ms()):
                yield parts.waiting(request, waits.seq)
            for child in waits.child_run_ids:
                below = self._index(child)
                with suppress(ClarkAgentError):
                    below.reach(seq=1 << 62)
                    yield from self._waiting(below, above | {index.run_id})

    async def turns(self, run_id: str, first: int, limit: int) -> shapes.TurnList:
        """Return a page of the overview, as far as the log was read."""
        index = self._index(run_id)

        def read() -> shapes.TurnList:
            self._summary(run_id)
            index.reach(turn=first)
            index.advance(_FIRST_READ)
            rows = index.turn_rows(first, limit)
            has_more = rows and rows[-1].turn < index.turns
            have = {self.catalog.head(child).turn for child in self._some_children(run_id)}
            return shapes.TurnList(
                turns=tuple([replace(row, has_children=row.turn in have) for row in rows]),
                next=rows[-1].turn + 1 if has_more else None,
                total=index.turns,
                indexed=self._indexed(index),
            )

        return await asyncio.to_thread(read)

    def _some_children(self, run_id: str) -> Iterable[str]:
        return self.catalog.children(run_id)[: 5 * _MOST_CHILDREN]

    async def items(
        self, run_id: str, *, start: int | None, before: int | None, turn: int | None, limit: int
    ) -> shapes.ItemPage:
        """Return a page of the timeline."""
        index = self._index(run_id)

        def read() -> shapes.ItemPage:
            self._summary(run_id)
            if before is not None:
                return self._page(run_id, index.items_before(before, limit))
            first = start or 0
            if turn:
                index.reach(turn=turn)
                found = index.seq_of_turn(turn)
                if found is None:
                    raise MissingPart(f"the run {run_id!r} has no turn {turn}")
                first = found
            return self._page(run_id, index.items_from(first, limit))

        return await asyncio.to_thread(read)

    def _page(self, run_id: str, found: Slice) -> shapes.ItemPage:
        turns = {item.turn for item in found.items}
        calls = {getattr(item, "call_id", None) for item in found.items} - {None}
        children = [
            child
            for child in self._children(run_id, 5 * _MOST_CHILDREN)
            if (child.turn in turns if child.turn is not None else child.call_id in calls)
        ]
        damage = self._damage(found.problem)
        return shapes.ItemPage(
            items=found.items,
            next=found.next,
            previous=found.previous,
            last_seq=found.last_seq,
            children=tuple(children[:_MOST_CHILDREN]),
            damage=damage[0] if damage else None,
            bytes_read=found.bytes_read,
            records_read=found.records_read,
        )

    # --- parts of records -------------------------------------------------------------------------

    async def piece(
        self, run_id: str, *, at: int, path: str, start: int, length: int
    ) -> shapes.Piece:
        """Return more of a text."""

        def read() -> shapes.Piece:
            if path == KEPT:
                whole = self._kept(run_id, at)
                part = whole.part(start, start + length)
                return shapes.Piece(part, start, whole.characters)
            value = self._part(run_id, at, path)
            text = value if isinstance(value, str) else json_text(value)
            return shapes.Piece(text[start : start + length], start, len(text))

        return await asyncio.to_thread(read)

    async def image(self, run_id: str, *, at: int, path: str) -> tuple[str, bytes]:
        """Return the type and the bytes of an image."""

        def read() -> tuple[str, bytes]:
            value = self._part(run_id, at, path)
            start, comma, data = value.partition(",") if isinstance(value, str) else ("", "", "")
            kind, _, coding = start.removeprefix("data:").partition(";")
            kind = kind.lower()
            is_image = start.startswith("data:") and kind in IMAGE_TYPES
            if not (is_image and comma and coding.endswith("base64")):
                raise MissingPart("there is no image that can be shown")
            try:
                return kind, base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError):
                raise MissingPart("the image is damaged") from None

        return await asyncio.to_thread(read)

    def _kept(self, run_id: str, at: int) -> KeptText:
        """Return the text of a result that the store keeps aside. Raises `MissingPart`."""
        self._summary(run_id)
        record = self._index(run_id).record(at)
        entry = None if record is None else record.entry
        if not isinstance(entry, ToolEnded) or entry.kept is None:
            raise MissingPart(f"record {at} has no result that is kept aside")
        try:
            return KeptText(pieces_of(self._store, run_id, entry.kept.name))
        except LookupError:
            raise MissingPart("the store does not have this result any more") from None

    def _part(self, run_id: str, at: int, path: str) -> Any:
        """Return what is at an address in a run. Raises `MissingPart`."""
        self._summary(run_id)
        index = self._index(run_id)
        where, _, rest = path.partition(".")
        try:
            if where == "sent":
                index.reach(seq=at)
                sent = self._sent_at(index, at)
                return _inside(sent, rest)
            if where == "transcript":
                compared = self._compared(run_id, run_id)
                return _inside(compared, f"a.{rest}")
            record = index.record(at)
            if record is None:
                raise LookupError
            return part_at(record.entry, path)
        except LookupError:
            raise MissingPart(f"there is nothing at {path!r} in record {at}") from None

    def _sent_at(self, index: LogIndex, seq: int) -> SentRequest:
        """Return the request that a record sends, which was shown before."""
        turn = index.turn_at(seq)
        for attempt in range(1, index.attempts(turn) + 1):
            found = self._sent(index, turn, attempt, force=True)
            if found is not None and found.seq == seq:
                return found
        raise LookupError

    # --- requests and comparisons -----------------------------------------------------------------

    def _sent(
        self, index: LogIndex, turn: int, attempt: int | None, *, force: bool
    ) -> SentRequest | None:
        index.reach(turn=turn + 1)
        attempt = attempt or index.attempts(turn)
        key = ("sent", index.run_id, turn, attempt)
        return self._cached(key, lambda: sent_request(index, turn, attempt, force=force))

    async def request(
        self,
        run_id: str,
        turn: int,
        *,
        attempt: int | None,
        first: int | None,
        limit: int,
        force: bool,
    ) -> shapes.RequestView:
        """Return what the model saw in a turn."""
        index = self._index(run_id)

        def read() -> shapes.RequestView:
            self._summary(run_id)
            sent = self._sent(index, turn, attempt, force=force)
            if sent is None:
                what = f"turn {turn}" if attempt is None else f"attempt {attempt} in turn {turn}"
                raise MissingPart(f"the run {run_id!r} has no request of {what}")
            return request_view(run_id, sent, first, limit)

        return await asyncio.to_thread(read)

    def _compared(self, a: str, b: str, *, force: bool = True) -> Compared:
        ends: list[int] = []
        for run_id in (a, b):
            self._summary(run_id)
            index = self._index(run_id)
            index.reach(seq=1 << 62)
            if index.bytes_read > MOST_READ and not force:
                size = index.bytes_read >> 20
                raise TooLarge(f"the log of the run {run_id!r} has {size} MB, which are all read")
            ends.append(index.last_seq)
        key = ("compared", a, b, *ends)
        return self._cached(key, lambda: compare(self._store, a, b))

    async def diff(
        self, a: str, b: str, *, start: int | None, limit: int, force: bool
    ) -> shapes.DiffView:
        """Return two runs side by side."""

        def read() -> shapes.DiffView:
            compared = self._compared(a, b, force=force)
            rows = [self._row(self._summary(run_id), self._index(run_id)) for run_id in (a, b)]
            return diff_view(compared, rows[0], rows[1], start, limit)

        return await asyncio.to_thread(read)

    # --- following --------------------------------------------------------------------------------

    async def follow(
        self, run_id: str, after: int, closing: asyncio.Event, held: ExitStack
    ) -> AsyncGenerator[bytes]:
        """Return server-sent events of a run: the items behind a record, and those to come. What
        they are read from is open until ``held`` is closed.
        """
        index = self._index(run_id)

        def prepare() -> tuple[int, LogPlace, Timeline]:
            self._summary(run_id)
            index.reach(seq=after)
            # The record itself is read again: it may be the end of the run.
            known = min(after, index.last_seq)
            return known, *index.mark_before(known)

        after, place, timeline = await asyncio.to_thread(prepare)
        tail = await in_background(self._store, lambda: tail_from(self._store, run_id, place))
        held.callback(tail.close)
        return self._frames(_Follower(tail, timeline, place.seq, after), run_id, closing)

    async def _frames(
        self, follower: _Follower, run_id: str, closing: asyncio.Event
    ) -> AsyncGenerator[bytes]:
        clock = asyncio.get_running_loop().time
        quiet_since, children = clock(), -1
        if is_remote(self._store):
            await follower.tail.wait(0)
        while not closing.is_set():
            try:
                frames, has_more = follower.read()
            except DecodeError as error:
                yield _frame("failed", Failure("damaged", str(error)))
                return
            for frame in frames:
                yield frame
                quiet_since = clock()
            if has_more:
                await asyncio.sleep(0)
                continue
            count = await asyncio.to_thread(self._count_children, run_id)
            if follower.has_items or count != children:
                follower.has_items, children = False, count
                yield _frame("run", await self.run(run_id))
            if follower.is_over:
                yield _frame("end", {})
                return
            if clock() >= quiet_since + _HEARTBEAT:
                yield b":\n\n"
                quiet_since = clock()
            await follower.tail.wait(_WAIT)

    def _count_children(self, run_id: str) -> int:
        self.catalog.refresh()
        return len(self.catalog.children(run_id))


class _Follower:
    """Turns what a tail reads into server-sent events."""

    def __init__(self, tail: RunTail, timeline: Timeline, place: int, after: int) -> None:
        self.tail = tail
        self._timeline = timeline
        self._after = after
        self._seq = place
        """The number of the last record."""
        self._waiting: deque[LiveDelta] = deque(maxlen=_MOST_DELTAS)
        """Deltas behind records that were not read yet."""
        self._streamed = -1
        self.has_items = False
        """Whether there were items since this was reset."""
        self.is_over = False

    def read(self) -> tuple[list[bytes], bool]:
        """Return what is new, and whether there may be more. Raises `DecodeError`."""
        live = self.tail.read_live()  # first, so that a delta whose answer is there is dropped
        records = self.tail.read()
        frames = [frame for record in records for frame in self._recorded(record)]
        for data in live:
            with suppress(DecodeError):
                self._waiting.append(decode_json(data, LiveDelta))
        while self._waiting and self._waiting[0].seq <= self._seq + 1:
            frames += self._streaming(self._waiting.popleft())
        return frames, bool(records)

    def _recorded(self, record: Record) -> Iterable[bytes]:
        self._seq = record.seq
        self.is_over = isinstance(record.entry, (RunEnded, RunFailed))
        if record.seq <= self._after:
            self._timeline.note(record)
            return
        self.has_items = True
        yield _frame("item", self._timeline.take(record), record.seq)

    def _streaming(self, delta: LiveDelta) -> Iterable[bytes]:
        if delta.seq <= self._seq or self._seq < self._after:
            return
        if delta.seq != self._streamed:
            self._streamed = delta.seq
            yield _frame("delta", Delta(delta.seq, "start", "", None, None))
        match delta.event.chunk:
            case TextChunk(text) | ThinkingChunk(text) | ReasoningChunk(text) as chunk:
                channel: Any = _CHANNELS[type(chunk)]
                yield _frame("delta", Delta(delta.seq, channel, text, None, None))
            case ToolCallChunk(index=index) as chunk:
                text, name = chunk.arguments_delta or "", chunk.name_delta
                yield _frame("delta", Delta(delta.seq, "call", text, index, name))
            case _:
                pass


def _frame(name: str, data: Any, seq: int | None = None) -> bytes:
    place = b"" if seq is None else b"id: %d\n" % seq
    return b"%bevent: %b\ndata: %b\n\n" % (place, name.encode(), msgspec.json.encode(data))


def _inside(value: Struct, path: str) -> Any:
    """Return what is at a path, of which only the part that is needed is made JSON."""
    name, _, rest = path.partition(".")
    if name not in value.__struct_fields__:
        raise LookupError(path)
    found = getattr(value, name)
    if isinstance(found, (list, tuple)):
        step, _, rest = rest.partition(".")
        if not step.isdecimal() or int(step) >= len(found):
            raise LookupError(path)
        found = found[int(step)]
    return part_at(found, rest) if rest else found
