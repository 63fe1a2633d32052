"""The list of runs, kept in memory: summaries from the store, and what the logs say besides.

The store lists its runs; from the first record of each come the agent, the model and the task, and
from the last ones its tokens. First records are read once, in the background, newest runs first;
last ones when a run is shown, and again only if it has grown. So a request costs what is on its
page, not the number of runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.errors import ClarkAgentError, DecodeError
from clark_agent.prices import ModelRef, Price
from clark_agent.run_log.families import parent_in
from clark_agent.run_log.pages import START, read_end, read_page
from clark_agent.run_log.records import Asked, RunBegan, RunEnded, RunFailed, RunSuspended
from clark_agent.run_log.search_text import text_of
from clark_agent.run_log.store import LogProblem, RunStore, RunSummary
from clark_agent.types import Usage
from clark_agent.view.parts import one_line, tokens_of
from clark_agent.view.shapes import ForkedFrom, RunList, RunRow, SearchInfo
from clark_agent.view.timeline import known_price, model_name

__all__ = ["FORK_NOTE", "RUNNING", "Catalog", "Query"]

RUNNING = "running"
"""The status of a run that has not ended."""
FORK_NOTE = "forked_from"
"""The note in a log that says which run it was forked from."""
_TASK = 300
_FRESH = 0.5
"""For how many seconds a listing counts."""
_MOST_HITS = 1000
_MOST_FILES = 100
_MOST_SCANNED = 32 << 20
_LONGEST_SCAN = 2.0
_SNIPPET = 60
_CURSOR = re.compile(r"(-?[0-9]{1,20})\.(.+)", re.DOTALL)


class Query(Struct, frozen=True, kw_only=True):
    """What to list."""

    q: str = ""
    status: str | None = None
    model: str | None = None
    agent: str | None = None
    parent: str | None = None
    all: bool = False
    """Including runs that other runs in the store started."""
    after: str | None = None
    limit: int = 50


class Head(Struct, frozen=True, kw_only=True):
    """What the first record of a run says."""

    agent: str | None = None
    model: ModelRef = ModelRef()
    model_name: str | None = None
    task: str | None = None
    forked_from: ForkedFrom | None = None
    call_id: str | None = None
    turn: int | None = None
    position: int | None = None


class _End(Struct, frozen=True):
    """What the last records of a run say."""

    records: int
    """How many it had then."""
    turns: int | None
    usage: Usage | None
    tree_usage: Usage | None


class _Found(Struct, frozen=True):
    """Where a search found its words."""

    snippet: str
    seq: int


class Catalog:
    """Knows the runs of a store. Threads may use it at once."""

    def __init__(
        self,
        store: RunStore,
        *,
        prices: dict[str, Price] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._prices = prices
        self._clock = clock
        self._lock = Lock()
        self._listed_at = float("-inf")
        self._took = 0.0
        self._runs: list[RunSummary] = []
        """Newest first."""
        self._by_id: dict[str, RunSummary] = {}
        self._children: dict[str, list[str]] = {}
        self._heads: dict[str, Head] = {}
        self._ends: dict[str, _End] = {}
        self._unreadable: dict[str, str] = {}
        """The status of runs whose log cannot be read any further."""
        self._forks: dict[str, list[str]] = {}
        self._models: set[str] = set()
        self._agents: set[str] = set()
        self._statuses: tuple[str, ...] = ()
        self._files: tuple[str, ...] = ()
        """Files of the store that cannot be read."""

    @property
    def kind(self) -> Literal["full_text", "scan"]:
        """How it searches."""
        return "full_text" if hasattr(self._store, "search") else "scan"

    # --- what there is ----------------------------------------------------------------------------

    def refresh(self, *, force: bool = False) -> None:
        """List the runs again, unless that was done just now."""
        with self._lock:
            now = self._clock()
            if not force and now < self._listed_at + max(_FRESH, 2 * self._took):
                return
            runs = sorted(self._store.runs(), key=_place, reverse=True)
            by_id = {run.run_id: run for run in runs}
            children: dict[str, list[str]] = {}
            for run in reversed(runs):
                above = parent_in(by_id, run)
                if above is not None:
                    children.setdefault(above.run_id, []).append(run.run_id)
            self._runs, self._children, self._by_id = runs, children, by_id
            self._statuses = tuple(sorted({self._status(run) for run in runs}))
            unreadable = getattr(self._store, "unreadable", list)
            self._files = tuple(unreadable()[:_MOST_FILES])
            self._listed_at = self._clock()
            self._took = self._listed_at - now

    def summary(self, run_id: str) -> RunSummary | None:
        """Return what the store knows about a run."""
        if run_id not in self._by_id:
            self.refresh(force=True)
        return self._by_id.get(run_id)

    def report(self, run: RunSummary, problem: LogProblem | None) -> None:
        """Note what is wrong with a log, or that nothing is."""
        if problem is None:
            self._unreadable.pop(run.run_id, None)
        else:
            self._unreadable[run.run_id] = "newer" if problem.is_newer else "damaged"

    def _status(self, run: RunSummary) -> str:
        return self._unreadable.get(run.run_id) or run.outcome or RUNNING

    def children(self, run_id: str) -> Sequence[str]:
        """Return the direct child runs, the oldest first."""
        return self._children.get(run_id, ())

    def forks(self, run_id: str) -> Sequence[str]:
        """Return the runs that were forked from a run, as far as they were looked at."""
        return self._forks.get(run_id, ())

    def parents(self, run_id: str) -> Iterator[str]:
        """Yield the run that started it, and those above."""
        run = self._by_id.get(run_id)
        while run is not None and (run := parent_in(self._by_id, run)) is not None:
            yield run.run_id

    def head(self, run_id: str) -> Head:
        """Return what the first record of a run says."""
        found = self._heads.get(run_id)
        if found is None:
            found = _head(self._store, run_id)
            self._heads[run_id] = found
            if found.model_name:
                self._models.add(found.model_name)
            if found.agent:
                self._agents.add(found.agent)
            if found.forked_from is not None:
                self._forks.setdefault(found.forked_from.run_id, []).append(run_id)
        return found

    def look(self, most: int = 200) -> bool:
        """Read the first records of some runs that were not looked at yet. Return whether there
        are more.
        """
        heads = self._heads
        missing = [run.run_id for run in self._runs if run.run_id not in heads]
        for run_id in missing[:most]:
            self.head(run_id)
        return len(missing) > most

    # --- rows -------------------------------------------------------------------------------------

    def row(self, run: RunSummary) -> RunRow:
        """Return a run as the list shows it."""
        head, end = self.head(run.run_id), self._end(run)
        price = known_price(head.model, self._prices)
        usage = end.usage
        return RunRow(
            run_id=run.run_id,
            status=self._status(run),
            agent=head.agent,
            model=head.model_name,
            task=head.task,
            began_at=run.began_at,
            last_at=run.last_at,
            ms=max(0, run.last_at - run.began_at),
            records=run.records,
            turns=end.turns,
            tokens=None if usage is None else tokens_of(usage),
            cost=None if usage is None or price is None else price.of(usage),
            parent_run_id=run.parent_run_id,
            depth=run.depth,
            conversation_id=run.conversation_id,
            children=len(self.children(run.run_id)),
            forked_from=head.forked_from,
        )

    def tree_usage(self, run_id: str) -> Usage:
        """Return the tokens of a run and of those below it, as far as they are known."""
        total, below = Usage(), [run_id]
        while below:
            run = self._by_id.get(below.pop())
            if run is None:
                continue
            end = self._end(run)
            if end.tree_usage is not None:
                total += end.tree_usage
            else:
                total += end.usage or Usage()
                below += self.children(run.run_id)
        return total

    def own_usage(self, run_id: str) -> Usage:
        """Return the tokens of a run alone, as far as they are known."""
        run = self._by_id.get(run_id)
        return (None if run is None else self._end(run).usage) or Usage()

    def _end(self, run: RunSummary) -> _End:
        found = self._ends.get(run.run_id)
        if found is None or found.records != run.records:
            found = self._ends[run.run_id] = _end(self._store, run)
        return found

    # --- listing ----------------------------------------------------------------------------------

    def list(self, query: Query) -> RunList:
        """Return a page of the list."""
        self.refresh()
        found: dict[str, _Found] = {}
        search: SearchInfo | None = None
        if query.q.strip():
            found, search = self._search(query.q)
        runs = [run for run in self._runs if self._matches(run, query, found, search)]
        start = 0
        if query.after is not None:
            place = _cursor(query.after)
            later = (n for n, run in enumerate(runs) if _place(run) < place)
            start = next(later, len(runs))
        page = runs[start : start + query.limit]
        more = start + query.limit < len(runs)
        rows = [self._found(self.row(run), found.get(run.run_id)) for run in page]
        return RunList(
            runs=tuple(rows),
            total=len(runs),
            next=f"{page[-1].began_at}.{page[-1].run_id}" if more and page else None,
            models=tuple(sorted(self._models)),
            agents=tuple(sorted(self._agents)),
            statuses=self._statuses,
            known=min(len(self._heads), len(self._runs)),
            of=len(self._runs),
            search=search,
            unreadable=self._files,
        )

    def _found(self, row: RunRow, found: _Found | None) -> RunRow:
        if found is None:
            return row
        return replace(row, snippet=found.snippet, snippet_seq=found.seq)

    def _matches(
        self,
        run: RunSummary,
        query: Query,
        found: dict[str, _Found],
        search: SearchInfo | None,
    ) -> bool:
        if query.parent is not None and run.parent_run_id != query.parent:
            return False
        is_whole_list = query.all or query.parent is not None or search is not None
        if not is_whole_list and parent_in(self._by_id, run) is not None:
            return False
        if query.status not in (None, self._status(run)):
            return False
        if query.model is None and query.agent is None and search is None:
            return True
        head = self._heads.get(run.run_id) or Head()
        if query.model not in (None, head.model_name) or query.agent not in (None, head.agent):
            return False
        return search is None or run.run_id in found or _says(run, head, query.q)

    # --- searching --------------------------------------------------------------------------------

    def _search(self, q: str) -> tuple[dict[str, _Found], SearchInfo]:
        search: Any = getattr(self._store, "search", None)
        if search is not None:
            found: dict[str, _Found] = {}
            for hit in search(q, _MOST_HITS):
                found.setdefault(hit.run_id, _Found(one_line(hit.snippet, 200), hit.seq))
            return found, SearchInfo("full_text", len(self._runs), len(self._runs))
        return self._scan(q.casefold().split())

    def _scan(self, words: Sequence[str]) -> tuple[dict[str, _Found], SearchInfo]:
        """Search the newest logs: as many as fit into some bytes and seconds."""
        found: dict[str, _Found] = {}
        left, until = _MOST_SCANNED, self._clock() + _LONGEST_SCAN
        scanned = 0
        for run in self._runs:
            place, is_end = START, False
            while not is_end and left > 0 and self._clock() < until:
                try:
                    page = read_page(self._store, run.run_id, place, records=1000, size=1 << 20)
                except ClarkAgentError:
                    break
                for record in page.records:
                    text = text_of(record.entry)
                    if run.run_id not in found and _has(text, words):
                        found[run.run_id] = _Found(_snippet(text, words), record.seq)
                left -= max(page.bytes_read, 1)
                place, is_end = page.end, page.is_end or run.run_id in found
            if not is_end and (left <= 0 or self._clock() >= until):
                break
            scanned += 1
        return found, SearchInfo("scan", scanned, len(self._runs))


def _place(run: RunSummary) -> tuple[int, str]:
    return run.began_at, run.run_id


def _cursor(text: str) -> tuple[int, str]:
    """Return the place that a cursor names. Raises `ValueError`."""
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise ValueError(f"after must be next of the page before, not {text[:40]!r}")
    return int(found[1]), found[2]


def _says(run: RunSummary, head: Head, q: str) -> bool:
    known = [run.run_id, head.task, head.agent, head.model_name, run.conversation_id]
    text = "\n".join([part for part in known if part]).casefold()
    return all(word in text for word in q.casefold().split())


def _has(text: str, words: Sequence[str]) -> bool:
    lowered = text.casefold()
    return all(word in lowered for word in words)


def _snippet(text: str, words: Sequence[str]) -> str:
    lowered = text.casefold()
    place = min([lowered.find(word) for word in words])
    start = max(0, place - _SNIPPET)
    end = place + 2 * _SNIPPET
    return f"{'…' if start else ''}{one_line(text[start:end], 200)}{'…' if end < len(text) else ''}"


def _head(store: RunStore, run_id: str) -> Head:
    try:
        page = read_page(store, run_id, records=1, size=1)
    except ClarkAgentError:  # it is damaged, or gone
        return Head()
    entry = page.records[0].entry if page.records else None
    if not isinstance(entry, RunBegan):
        return Head()
    task = " ".join([message.plain_text[: 4 * _TASK] for message in entry.prompts])
    place = entry.call_place or (None, None, None)
    return Head(
        agent=entry.agent_name,
        model=entry.model_ref,
        model_name=model_name(entry.model_ref),
        task=one_line(task, _TASK),
        forked_from=_fork_note(entry.host_notes),
        call_id=entry.tool_call_id,
        turn=place[0],
        position=place[1],
    )


def _fork_note(notes: dict[str, Any]) -> ForkedFrom | None:
    note = notes.get(FORK_NOTE)
    match note:
        case {"run_id": str(run_id), "turn": int(turn)}:
            return ForkedFrom(run_id, turn)
        case _:
            return None


def _end(store: RunStore, run: RunSummary) -> _End:
    try:
        records = read_end(store, run.run_id)
    except (ClarkAgentError, DecodeError):
        return _End(run.records, None, None, None)
    turns = [record.entry.turn for record in records if isinstance(record.entry, Asked)]
    turn = turns[-1] if turns else None
    last = records[-1].entry if records else None
    if isinstance(last, (RunEnded, RunFailed, RunSuspended)):
        return _End(run.records, turn, last.usage, last.tree_usage)
    return _End(run.records, turn, None, None)
