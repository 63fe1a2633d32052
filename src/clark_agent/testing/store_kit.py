"""A conformance kit for your own store of runs.

    check_run_store(lambda: MyStore(address))

writes runs, reads them back, and raises `NonconformingStore` with every violation that could break
a log:

- After a barrier, every store on the same storage has the records, in order and unchanged, even if
  a wait for a barrier was cancelled.
- A run is created once, has one writer at a time, and continues where it stopped. If several
  threads have read the same log, one of them gets to write.
- The summaries match the records, are sorted newest first, and can be filtered.
- A tail returns exactly the records of the run, in order, from any number on, while another store
  writes them. What is published to it, it returns in order, if at all.
- A mailbox keeps every message once and in order, whoever posts.
- If it keeps large results, they are there with the next record, unchanged and in pieces.
- Any string is an id. Many runs and several threads do not disturb each other.

The function returns a store on the same storage each time it is called, as another process would
open it. The storage must be empty. Test a store for several processes with several processes too:
this kit cannot see what a lock, a killed process or a forked one leaves behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Barrier, Thread
from typing import Any

from clark_agent._threads import has_running_loop
from clark_agent.errors import ClarkAgentError, RunBusy, RunExists, RunNotFound
from clark_agent.messages.wire import encode_json
from clark_agent.run_log._checksums import seal_all
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.pages import START, read_end, read_page, tail_from
from clark_agent.run_log.records import (
    RUN_LOG_VERSION,
    Answered,
    ContextEdited,
    Edit,
    Entry,
    MessagesAdded,
    Record,
    RequestDecided,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    RunSuspended,
    SteeringAccepted,
    ToolEnded,
    ToolProgress,
    ToolsGated,
)
from clark_agent.run_log.store import RunAppender, RunStore, RunSummary, RunTail
from clark_agent.tools.base import ToolResult
from clark_agent.types import (
    AssistantMessage,
    CustomMessage,
    RunIdentity,
    StopReason,
    TextContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from clark_agent.waiting import Allow

__all__ = ["NonconformingStore", "check_run_store"]


class NonconformingStore(ClarkAgentError, AssertionError):
    """A store breaks the rules; ``problems`` lists how, one per line."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join([f"{len(problems)} problems with this store:", *problems]))
        self.problems = tuple(problems)


def check_run_store(make_store: Callable[[], RunStore]) -> None:
    """Check a store on an empty storage, which is not empty afterwards.

    Raises `NonconformingStore`.
    """
    if has_running_loop():  # the kit runs its own event loops
        caught: list[NonconformingStore] = []
        _in_threads([lambda: _caught(make_store, caught)])
        if caught:
            raise caught[0]
        return
    _check(make_store)


def _caught(make_store: Callable[[], RunStore], caught: list[NonconformingStore]) -> None:
    try:
        _check(make_store)
    except NonconformingStore as error:
        caught.append(error)


def _check(make_store: Callable[[], RunStore]) -> None:
    problems: list[str] = []
    for check in _CHECKS:
        trial = _Trial(make_store)
        try:
            check(trial)
        except Exception as error:
            trial.problems.append(f"{type(error).__name__}: {error}")
        trial.close()
        rule = (check.__doc__ or "").removesuffix(".")
        problems += [f"{rule}: {problem}" for problem in trial.problems]
    if problems:
        raise NonconformingStore(problems)


class _Trial:
    """Two stores on one storage, the appenders opened in them, and the problems found."""

    def __init__(self, make_store: Callable[[], RunStore]) -> None:
        self.here = make_store()
        self.there = make_store()
        self.problems: list[str] = []
        self._appenders: list[RunAppender] = []

    def create(self, run_id: str) -> RunAppender:
        return self.opened(self.here.create(run_id))

    def opened(self, appender: RunAppender) -> RunAppender:
        """Return an appender that has the run: a remote store says only at a barrier if not."""
        appender = self.kept(appender)
        asyncio.run(_awaited(appender))
        return appender

    def kept(self, appender: RunAppender) -> RunAppender:
        self._appenders.append(appender)
        return appender

    def close(self) -> None:
        for appender in self._appenders:
            with suppress(Exception):
                _close(appender)

    def expect(self, is_so: bool, otherwise: str) -> None:
        if not is_so:
            self.problems.append(otherwise)

    def expect_records(self, run_id: str, records: Sequence[Record], when: str) -> None:
        """Check that both stores have these records of the run, and report no problems."""
        for store, whose in ((self.here, "the same store"), (self.there, "another store")):
            loaded = store.load(run_id)
            seen, due = [r.seq for r in loaded.records], [r.seq for r in records]
            self.expect(seen == due, f"{when}, {whose} has the records {seen} instead of {due}")
            pairs = zip(loaded.records, records, strict=False)
            changed = [after for after, before in pairs if after != before]
            self.expect(not changed or seen != due, f"{when}, {whose} has changed {changed[:1]}")
            self.expect(loaded.run_id == run_id, f"{when}, {whose} has the id {loaded.run_id!r}")
            wrong = [*loaded.problems, *(["a torn end"] if loaded.is_torn else [])]
            self.expect(not wrong, f"{when}, {whose} reports {wrong}")

    @contextmanager
    def expect_error(self, kind: type[Exception], when: str) -> Generator[None]:
        try:
            yield
        except kind:
            return
        except Exception as error:
            self.problems.append(f"{when} raises {error!r} instead of {kind.__name__}")
        else:
            self.problems.append(f"{when} does not raise {kind.__name__}")


# --- records ----------------------------------------------------------------------------------

_CALL = ToolCall("call_1", "look", {"where": "Straße", "deep": [1, 2.5, None, {"é": "\0😀"}]})
_SAID = AssistantMessage(
    (TextContent('a "quoted"\nline\u2028'), _CALL), StopReason.TOOL_USE, timestamp=2_000
)
_STEP = ToolsGated(plugin="gate", allow=("look",))
_ENTRIES: tuple[Entry, ...] = (
    _STEP,
    SteeringAccepted(number=1, message=UserMessage("wait", 1), when="now"),
    MessagesAdded(source="turn", messages=(UserMessage("wait", 1),), steering=(1,)),
    ContextEdited(plugin="p", edits=(Edit(0, 1, (CustomMessage("note", {"a": 1}),)),)),
    Answered(message=_SAID, pieces=([0, 3], 4), details={"id": "x"}),
    ToolProgress(partial=ToolResult.text("half")),
    ToolEnded(tool_call_id="call_1", result=ToolResult.text("\t", details=_CALL.arguments)),
    MessagesAdded(source="loop", messages=(ToolResultMessage("c", "look", (), is_error=True),)),
    RunResumed(1),
)
_ENDED = RunEnded(outcome="done", usage=Usage(1, 2, 3, 4))
_SUSPENDED = RunSuspended(time=1_000)
_DECIDED = RequestDecided(request_id="r/1/0/x", decision=Allow(), by="somebody")
_FAILED = RunFailed(error="stream", text="it broke", undelivered=(UserMessage("more", 5),))


def _written(
    run_id: str,
    entries: Iterable[Entry] = (),
    *,
    parent: str | None = None,
    conversation: str | None = None,
    at: int = 1_700_000_000_000,
) -> list[Record]:
    """Return the records of a run with these entries, one second apart."""
    depth = 0 if parent is None else 1
    identity = RunIdentity(run_id, parent, depth, conversation)
    began = RunBegan(
        identity=identity,
        prompts=(UserMessage("go", 1),),
        tools={"look": {"description": "Look.", "parameters": {}}},
    )
    return _numbered(run_id, [began, *entries], at=at)


def _numbered(
    run_id: str, entries: Iterable[Entry], *, at: int = 0, after: Record | None = None
) -> list[Record]:
    seq = 0 if after is None else after.seq + 1
    records = [
        Record(RUN_LOG_VERSION, number, run_id, at + 1_000 * number, entry, (at,), (f"id{number}",))
        for number, entry in enumerate(entries, seq)
    ]
    seal_all(records, after)
    return records


def _append(appender: RunAppender, records: Iterable[Record], *, sync: bool = False) -> None:
    for record in records:
        appender.append(record, encode_json(record))
    appender.flush(sync=sync)
    _wait(appender)


def _close(appender: RunAppender) -> None:
    appender.close()
    _wait(appender)


def _wait(appender: RunAppender) -> None:
    asyncio.run(_awaited(appender))


def _in_threads(acts: Sequence[Callable[[], None]]) -> None:
    threads = [Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- the rules --------------------------------------------------------------------------------


def _check_flushing(trial: _Trial) -> None:
    """Records are there after a barrier, in order and unchanged."""
    records = _written("flushing", [*_ENTRIES, _ENDED])
    appender = trial.create("flushing")
    with suppress(RunNotFound):
        trial.expect(not trial.there.load("flushing").records, "there are records before a flush")
    _append(appender, records[:1])
    trial.expect_records("flushing", records[:1], "after the first flush")
    _append(appender, records[1:5])
    _append(appender, [])
    trial.expect_records("flushing", records[:5], "after a flush of several records")
    _append(appender, records[5:6], sync=True)
    _append(appender, [], sync=True)
    trial.expect_records("flushing", records[:6], "after a flush to the disk")
    for record in records[6:]:
        appender.append(record, encode_json(record))
    _close(appender)
    trial.expect_records("flushing", records, "after closing")
    _close(appender)
    trial.expect_records("flushing", records, "after closing twice")


def _check_beginning(trial: _Trial) -> None:
    """A run is created once."""
    with trial.expect_error(RunNotFound, "loading a run that was not created"):
        trial.here.load("beginning")
    with trial.expect_error(RunNotFound, "reopening a run that was not created"):
        trial.opened(trial.here.reopen("beginning", after=0))
    records = _written("beginning")
    appender = trial.create("beginning")
    for store, whose in ((trial.here, "in the same store"), (trial.there, "in another store")):
        with trial.expect_error(RunExists, f"creating an open run again {whose}"):
            trial.opened(store.create("beginning"))
    _append(appender, records)
    _close(appender)
    for store, whose in ((trial.here, "in the same store"), (trial.there, "in another store")):
        with trial.expect_error(RunExists, f"creating a closed run again {whose}"):
            trial.opened(store.create("beginning"))
    trial.expect_records("beginning", records, "after these attempts")


def _check_writers(trial: _Trial) -> None:
    """A run has one writer."""
    records = _written("writers", _ENTRIES)
    appender = trial.create("writers")
    _append(appender, records[:2])
    for store, whose in ((trial.here, "in the same store"), (trial.there, "in another store")):
        with trial.expect_error(RunBusy, f"reopening an open run {whose}"):
            trial.opened(store.reopen("writers", after=1))
    _append(appender, records[2:3])
    _close(appender)
    second = trial.opened(trial.there.reopen("writers", after=2))
    with trial.expect_error(RunBusy, "reopening a run that was reopened"):
        trial.opened(trial.here.reopen("writers", after=2))
    _close(appender)
    with trial.expect_error(RunBusy, "reopening it when the first writer was closed again"):
        trial.opened(trial.here.reopen("writers", after=2))
    with trial.expect_error(Exception, "appending to a closed run"):
        _append(appender, records[3:4])
    _append(second, records[3:4])
    _close(second)
    trial.expect_records("writers", records[:4], "after two writers")


def _check_reopening(trial: _Trial) -> None:
    """A run continues where it stopped."""
    records = _written("reopening", [_ENDED])
    appender = trial.create("reopening")
    _append(appender, records)
    _close(appender)
    _close(trial.opened(trial.there.reopen("reopening", after=1)))
    trial.expect_records("reopening", records, "reopened and closed")
    _expect_summary(trial, records, outcome="done")
    more = _numbered("reopening", [RunResumed(1), _STEP], after=records[-1], at=1_700_000_000_000)
    for after, what in ((0, "an earlier record"), (2, "a record that is not there")):
        with trial.expect_error(RunBusy, f"reopening a run after {what}"):
            trial.opened(trial.there.reopen("reopening", after=after))
    appender = trial.opened(trial.there.reopen("reopening", after=1))
    _append(appender, more)
    trial.expect_records("reopening", [*records, *more], "reopened")
    _expect_summary(trial, [*records, *more], outcome=None)
    _close(appender)
    _expect_summary(trial, [*records, *more], outcome=None)
    appender = trial.opened(trial.here.reopen("reopening", after=3))
    last = _numbered("reopening", [_FAILED], after=more[-1], at=1_700_000_000_000)
    _append(appender, last)
    _expect_summary(trial, [*records, *more, *last], outcome="failed")


def _expect_summary(trial: _Trial, records: Sequence[Record], *, outcome: str | None) -> None:
    first = records[0].entry
    identity = first.identity if isinstance(first, RunBegan) else RunIdentity("")
    due = RunSummary(
        run_id=records[0].run,
        parent_run_id=identity.parent_run_id,
        depth=identity.depth,
        conversation_id=identity.conversation_id,
        began_at=records[0].at,
        last_at=records[-1].at,
        records=len(records),
        outcome=outcome,
    )
    for store, whose in ((trial.here, "the same store"), (trial.there, "another store")):
        found = [summary for summary in store.runs() if summary.run_id == due.run_id]
        trial.expect(found == [due], f"{whose} returns {found} instead of {due}")


def _check_summaries(trial: _Trial) -> None:
    """The summaries match the records."""
    endings: tuple[tuple[str, list[Entry], str | None], ...] = (
        ("open", [_STEP], None),
        ("ended", [_STEP, _ENDED], "done"),
        ("failed", [_FAILED], "failed"),
        ("suspended", [_STEP, _SUSPENDED], "suspended"),
        ("decided", [_SUSPENDED, _DECIDED], "suspended"),
        ("resumed", [_SUSPENDED, _DECIDED, RunResumed(1)], None),
    )
    for name, entries, outcome in endings:
        records = _written(f"summaries {name}", entries, parent="summaries", conversation="c")
        appender = trial.create(records[0].run)
        _append(appender, records[:1])
        _expect_summary(trial, records[:1], outcome=None)
        _append(appender, records[1:])
        _expect_summary(trial, records, outcome=outcome)
        _close(appender)
        _expect_summary(trial, records, outcome=outcome)


def _check_listing(trial: _Trial) -> None:
    """The runs are listed newest first, and can be filtered."""
    for number in (3, 1, 4, 0, 2):
        conversation = "listing one" if number % 2 else "listing two"
        parent = "listing 0" if number > 2 else None
        run_id = f"listing {number}"
        appender = trial.create(run_id)
        _append(
            appender,
            _written(
                run_id,
                _LISTED[number],
                parent=parent,
                conversation=conversation,
                at=10_000_000 * number,
            ),
        )
        _close(appender)

    def listed(what: str, due: list[int], summaries: Iterable[RunSummary]) -> None:
        names = [s.run_id for s in summaries if s.run_id.startswith("listing ")]
        trial.expect(
            names == [f"listing {number}" for number in due], f"{what} are {names}, not {due}"
        )

    for store in (trial.here, trial.there):
        listed("all runs", [4, 3, 2, 1, 0], store.runs())
        listed("the runs of a conversation", [3, 1], store.runs(conversation_id="listing one"))
        listed("the children of a run", [4, 3], store.runs(parent_run_id="listing 0"))
        both = store.runs(parent_run_id="listing 0", conversation_id="listing two")
        listed("the children of a run in a conversation", [4], both)
        listed("the first two", [4, 2], store.runs(conversation_id="listing two", limit=2))
        listed("the first none", [], store.runs(limit=0))
        listed("those of an unknown conversation", [], store.runs(conversation_id="listing"))
        listed("those of an unknown parent", [], store.runs(parent_run_id="listing 1"))
        listed("those that are done", [4, 0], store.runs(outcome="done"))
        listed("those that failed", [1], store.runs(outcome="failed"))
        listed("those that are suspended", [3, 2], store.runs(outcome="suspended"))
        newest = store.runs(conversation_id="listing one", outcome="suspended", limit=1)
        listed("the newest suspended one of a conversation", [3], newest)
        both = store.runs(outcome="suspended", conversation_id="listing two")
        listed("the suspended ones of a conversation", [2], both)
        listed("those with an unknown outcome", [], store.runs(outcome="listing"))


_LISTED: tuple[tuple[Entry, ...], ...] = (
    (_ENDED,),
    (_FAILED,),
    (_SUSPENDED,),
    (_SUSPENDED, _DECIDED),
    (_SUSPENDED, _DECIDED, RunResumed(1), _ENDED),
)


ODD_IDS = (
    *("", " ", ".", "..", "../x", "a/b", "a\\b", "/", "~", "*", "con", "nul.txt", "-rf", "a b"),
    *("\0", "a\nb", "a\r", "%", "%41", "a%2Fb", "'; DROP TABLE runs; --", '"', "[x]", "_", "x%"),
    *("x" * 300, "x" * 299 + "y", "X" * 300, "é" * 300, "日本語", "😀", "é", "e\u0301", "\u202e"),
    *("case", "Case", "CASE", "a.jsonl", "a", ".hidden", "trailing.", "trailing "),
)
"""Ids that a file system, a URL or a database might misinterpret."""


def _check_ids(trial: _Trial) -> None:
    """Any string is an id."""
    runs = {run_id: _written(run_id, [_STEP], conversation=run_id) for run_id in ODD_IDS}
    for run_id, records in runs.items():
        try:
            appender = trial.create(run_id)
            _append(appender, records[:1])
            _close(appender)
            appender = trial.opened(trial.there.reopen(run_id, after=0))
            _append(appender, records[1:])
            _close(appender)
        except Exception as error:
            trial.problems.append(f"{run_id!r} raises {type(error).__name__}: {error}")
    for run_id, records in runs.items():
        trial.expect_records(run_id, records, f"under the id {run_id!r}")
        found = [summary.run_id for summary in trial.there.runs(conversation_id=run_id)]
        trial.expect(found == [run_id], f"{run_id!r} is listed as {found}")


def _check_many(trial: _Trial) -> None:
    """Many runs do not disturb each other."""
    runs = {
        f"many {number}": _written(f"many {number}", _ENTRIES[:2], conversation="many", at=number)
        for number in range(60)
    }
    appenders = {run_id: trial.create(run_id) for run_id in runs}
    for step in range(3):
        for run_id, records in runs.items():
            _append(appenders[run_id], records[step : step + 1])
    for run_id, records in runs.items():
        trial.expect_records(run_id, records, f"as one of {len(runs)} open runs")
    listed = [summary.run_id for summary in trial.there.runs(conversation_id="many")]
    trial.expect(listed == [*reversed(runs)], f"listed are {listed}")


def _check_threads(trial: _Trial) -> None:
    """Several threads may use a store."""
    names = [f"thread {number}" for number in range(4)]

    def work(name: str) -> None:
        try:
            for number in range(5):
                run_id = f"{name} {number}"
                records = _written(run_id, [_ENDED], conversation=name)
                appender = trial.here.create(run_id)
                for record in records:
                    _append(appender, [record])
                _close(appender)
                trial.expect_records(run_id, records, "from a thread")
            trial.expect(len([*trial.here.runs(conversation_id=name)]) == 5, "runs are missing")
        except Exception as error:
            trial.problems.append(f"{type(error).__name__}: {error}")

    _in_threads([partial(work, name) for name in names])


def _check_races(trial: _Trial) -> None:
    """If several threads try to write a run, one succeeds."""
    first, *others = records = _written("race", [RunResumed(turn) for turn in range(_ROUNDS)])
    _race(trial, first, lambda store: store.create("race"))
    for record in others:
        after = trial.here.load("race").records[-1].seq
        _race(trial, record, partial(_reopen, after=after))
    trial.expect_records("race", records, "after a race")


_ROUNDS = 10


def _reopen(store: RunStore, *, after: int) -> RunAppender:
    return store.reopen("race", after=after)


def _race(trial: _Trial, record: Record, opened: Callable[[RunStore], RunAppender]) -> None:
    """Have several threads, each with its own event loop, try to write the same record."""
    stores = (trial.here, trial.there, trial.here)
    together = Barrier(len(stores))
    winners: list[RunAppender] = []

    def want(store: RunStore) -> None:
        together.wait()
        try:
            appender = trial.kept(opened(store))
            _append(appender, [record])
            winners.append(appender)
        except (RunBusy, RunExists):
            pass
        except Exception as error:
            trial.problems.append(f"a losing thread gets {type(error).__name__}: {error}")

    _in_threads([partial(want, store) for store in stores])
    trial.expect(len(winners) == 1, f"{len(winners)} of {len(stores)} threads got to write")
    for appender in winners:
        _close(appender)


def _check_waiting(trial: _Trial) -> None:
    """A cancelled wait loses nothing."""
    records = _written("waiting", _ENTRIES)
    appender = trial.create("waiting")

    async def write() -> None:
        for record in records:
            appender.append(record, encode_json(record))
            appender.flush(sync=False)
            waiting = asyncio.ensure_future(_awaited(appender))
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.gather(*[_awaited(appender) for _ in range(3)])

    asyncio.run(write())
    trial.expect_records("waiting", records, "after barriers that were not waited for")


# --- tails ------------------------------------------------------------------------------------

_PATIENCE = 10.0


async def _collected(tail: RunTail, count: int) -> list[Record]:
    """Read this many records; fewer if the tail does not get them in time."""
    records: list[Record] = []
    clock = asyncio.get_running_loop().time
    until = clock() + _PATIENCE
    while len(records) < count and (left := until - clock()) > 0:
        new = tail.read()
        records += new
        if not new:
            await tail.wait(min(1.0, left))
    return [*records, *tail.read()]


def _check_tails(trial: _Trial) -> None:
    """A tail returns the records from any number on."""
    with trial.expect_error(RunNotFound, "the tail of a run that was not created"):
        trial.here.tail("tails").close()
    records = _written("tails", [*_ENTRIES, _ENDED])
    appender = trial.create("tails")
    _append(appender, records[:4])
    tails = [trial.there.tail("tails", after=after) for after in range(-1, len(records))]
    halves = [list(tail.read()) for tail in tails]
    _append(appender, records[4:])
    _close(appender)
    for number, (tail, before) in enumerate(zip(tails, halves, strict=True)):
        due = records[number:]
        found = [*before, *asyncio.run(_collected(tail, len(due) - len(before)))]
        seen = [record.seq for record in found]
        numbers = [record.seq for record in due]
        trial.expect(found == due, f"after {number - 1} it returns {seen} instead of {numbers}")
        trial.expect(not tail.read(), "a record is returned twice")
        asyncio.run(_waited(tail))
        tail.close()
        tail.close()
        if trial.problems:
            break


def _check_pages(trial: _Trial) -> None:
    """Pages and their ends fit together, whatever their size, also while the run is written."""
    for read in (read_page, read_end):
        with trial.expect_error(RunNotFound, "a page of a run that was not created"):
            read(trial.here, "pages")
    records = _written("pages", [*_ENTRIES, _STEP, _ENDED])
    appender = trial.create("pages")
    _append(appender, records[:4])
    for count, size in ((1, 1 << 20), (3, 1 << 20), (1000, 1), (1000, 1 << 20)):
        found: list[Record] = []
        places = [START]
        is_end = False
        while not is_end and len(places) <= len(records):
            page = read_page(trial.there, "pages", places[-1], records=count, size=size)
            trial.expect(len(page.records) <= count, f"{len(page.records)} records, not {count}")
            found += page.records
            places.append(page.end)
            is_end = page.is_end
        seen = [record.seq for record in found]
        trial.expect(found == records[: len(found)] and is_end, f"pages have {seen}")
        if len(found) == 4:  # the first time
            _append(appender, records[4:])
            more = read_page(trial.there, "pages", places[-1])
            trial.expect(list(more.records) == records[4:], f"news are {more.records}")
            trial.expect(more.problem is None, f"there is a problem: {more.problem}")
        for place in places:
            tail = tail_from(trial.there, "pages", place)
            due = [record for record in records if record.seq > place.seq]
            new = asyncio.run(_collected(tail, len(due)))
            trial.expect(new == due, f"a tail from {place} has {[r.seq for r in new]}")
            tail.close()
    _close(appender)
    for count in (1, 2, 1000):
        last = list(read_end(trial.there, "pages", records=count))
        trial.expect(last == records[-count:], f"the last {count} are {last}")
    short = list(read_end(trial.there, "pages", size=1))
    trial.expect(bool(short) and short == records[-len(short) :], f"the end is {short}")


async def _waited(tail: RunTail) -> None:
    await tail.wait(0)


def _check_following(trial: _Trial) -> None:
    """A tail returns what another store writes."""
    records = _written("following", [*_ENTRIES * 20, _ENDED])
    appender = trial.create("following")
    _append(appender, records[:1])
    tails = [trial.there.tail("following"), trial.here.tail("following", after=0)]

    def write() -> None:
        for start in range(1, len(records), 3):
            _append(appender, records[start : start + 3])
        _close(appender)

    def follow(tail: RunTail, due: Sequence[Record]) -> None:
        found = asyncio.run(_collected(tail, len(due)))
        trial.expect(found == due, f"it returns {[record.seq for record in found]}")
        tail.close()

    _in_threads([write, partial(follow, tails[0], records), partial(follow, tails[1], records[1:])])


def _check_publishing(trial: _Trial) -> None:
    """What is published reaches tails in order, or not at all."""
    appender = trial.create("publishing")
    _append(appender, _written("publishing"))
    trial.here.publish("publishing", b"early")
    trial.here.publish("nobody", b"early")
    tail = trial.there.tail("publishing")
    published = [b'{"number":%d}' % number for number in range(300)]
    found: list[bytes] = []
    for data in published:
        trial.here.publish("publishing", data)
        found += tail.read_live()
    found += tail.read_live()
    rest = iter(published)
    trial.expect(all(data in rest for data in found), f"it returns {found[:5]}…")
    tail.close()
    trial.here.publish("publishing", b"late")
    trial.expect_records("publishing", _written("publishing"), "after publishing")


# --- mailboxes --------------------------------------------------------------------------------


def _mail(mail_id: str, text: str = "") -> Mail:
    return Mail(id=mail_id, kind="steer", at=1_000, message=UserMessage(text, 1), when="now")


def _expect_mail(trial: _Trial, run_id: str, due: Sequence[Mail], when: str) -> None:
    for store, whose in ((trial.here, "the same store"), (trial.there, "another store")):
        for after in range(len(due) + 2):
            found = list(store.mail(run_id, after=after))
            ids, wanted = [mail.id for mail in found], [mail.id for mail in due[after:]]
            trial.expect(
                found == list(due[after:]),
                f"{when}, {whose} has {ids} after {after} instead of {wanted}",
            )


def _check_mail(trial: _Trial) -> None:
    """A mailbox keeps every message once, in order."""
    with trial.expect_error(RunNotFound, "posting to a run that was not created"):
        trial.here.post("mail", _mail("x"))
    _append(trial.create("mail"), _written("mail"))
    appender = trial.create("mail 2")
    _append(appender, _written("mail 2"))
    _expect_mail(trial, "mail", [], "before the first message")
    posted = [_mail(mail_id, f"line\nbreak {n}") for n, mail_id in enumerate(ODD_IDS)]
    posted.append(Mail(id="cancel", kind="cancel", at=2, reason="enough"))
    posted.append(Mail(id="event", kind="event", at=3, name="paid", payload={"é": [1, None]}))
    for number, mail in enumerate(posted):
        store = trial.there if number % 2 else trial.here
        trial.expect(store.post("mail", mail), f"the message {mail.id!r} is not new")
    _expect_mail(trial, "mail", posted, "after posting")
    for store in (trial.here, trial.there):
        is_new = store.post("mail", _mail(posted[0].id, "again"))
        trial.expect(not is_new, "a second message with the same id is new")
    _expect_mail(trial, "mail", posted, "after posting an id again")
    trial.expect(trial.here.post("mail 2", posted[0]), "an id of another mailbox is not new")
    _close(appender)
    trial.expect(trial.here.post("mail 2", posted[1]), "a run without a writer gets no messages")
    _expect_mail(trial, "mail 2", posted[:2], "in another mailbox")
    trial.expect_records("mail 2", _written("mail 2"), "after posting")


def _check_posting(trial: _Trial) -> None:
    """Several threads may post at once."""
    appender = trial.create("posting")
    _append(appender, _written("posting"))
    stores = (trial.here, trial.there, trial.here, trial.there)
    together = Barrier(len(stores))
    kept: list[str] = []

    def post(number: int, store: RunStore) -> None:
        together.wait()
        try:
            for place in range(_POSTS):
                if not store.post("posting", _mail(f"{number} {place}")):
                    trial.problems.append(f"the message {number} {place} is not new")
                if store.post("posting", _mail(f"same {place}", str(number))):
                    kept.append(f"same {place}")
        except Exception as error:
            trial.problems.append(f"{type(error).__name__}: {error}")

    _in_threads([partial(post, number, store) for number, store in enumerate(stores)])
    same = [f"same {place}" for place in range(_POSTS)]
    trial.expect(sorted(kept) == sorted(same), f"of messages with one id, new were {sorted(kept)}")
    found = [mail.id for mail in trial.there.mail("posting")]
    for name in ("same", *map(str, range(len(stores)))):
        ids = [mail_id for mail_id in found if mail_id.startswith(f"{name} ")]
        due = [f"{name} {place}" for place in range(_POSTS)]
        trial.expect(ids == due, f"the mailbox has {ids} instead of {due}")


_POSTS = 10


async def _awaited(appender: RunAppender) -> None:
    await appender.barrier()


def _check_kept(trial: _Trial) -> None:
    """A large result is kept in pieces, and is there with the next record"""
    here: Any = trial.here
    there: Any = trial.there
    records = _written("kept", [*_ENTRIES[:3], _ENDED])
    appender = trial.create("kept")
    keep: Any = getattr(appender, "keep", None)
    if not callable(getattr(here, "kept", None)) and not callable(keep):
        return  # it keeps none
    if not callable(getattr(here, "kept", None)) or not callable(keep):
        trial.expect(False, "kept of the store and keep of its appenders belong together")
        return
    pieces = [b"\0\xff first", b"", "\u00e9\u6f22".encode(), b"x" * 70_000, b"last"]
    _append(appender, records[:1])
    keep("1-0", [b"an earlier attempt", *pieces])
    keep("1-0", pieces)
    keep("1-0-1", [b"another one"])
    _append(appender, records[1:3])
    for store, whose in ((here, "the same store"), (there, "another store")):
        for start, stop in ((0, 99), (0, 1), (1, 3), (3, 4), (4, 5), (5, 9)):
            found = [bytes(piece) for piece in store.kept("kept", "1-0", start, stop)]
            trial.expect(
                found == pieces[start:stop], f"{whose} has other pieces from {start} to {stop}"
            )
        others = [bytes(piece) for piece in store.kept("kept", "1-0-1", 0, 9)]
        trial.expect(others == [b"another one"], f"{whose} mixes results up")
        for run_id, name in (("kept", "1-1"), ("kept", "../1-0"), ("not there", "1-0")):
            trial.expect(
                not store.kept(run_id, name, 0, 9), f"{whose} has a result {run_id}/{name}"
            )
    _close(appender)
    again: Any = trial.opened(trial.here.reopen("kept", after=2))
    trial.expect_records("kept", records[:3], "after it kept results")
    again.keep("1-0", [b"of another process"])
    _append(again, records[3:])
    _close(again)
    found = [bytes(piece) for piece in there.kept("kept", "1-0", 0, 9)]
    trial.expect(found == [b"of another process"], "a result is not replaced")


_CHECKS = (
    _check_flushing,
    _check_beginning,
    _check_writers,
    _check_reopening,
    _check_summaries,
    _check_listing,
    _check_ids,
    _check_many,
    _check_threads,
    _check_races,
    _check_waiting,
    _check_tails,
    _check_pages,
    _check_following,
    _check_publishing,
    _check_mail,
    _check_posting,
    _check_kept,
)
