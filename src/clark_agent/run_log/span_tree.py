"""The spans of a logged run, as a tree: the run, its turns, model calls, tools and child runs.

The same tree as OpenTelemetry gets from a traced run, made from the records alone. `tree_lines`
draws it as text, with a bar for the time of each span::

    invoke_agent buyer      3.2 s  1,203 in · 88 out  0.0042  ████████████
    └─ turn 1               1.2 s                             █████
       └─ chat gpt-5        1.2 s  1,203 in · 88 out  0.0042  █████
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum, auto
from unicodedata import combining, east_asian_width

from msgspec import Struct, field

from clark_agent.errors import ConfigError, DecodeError
from clark_agent.prices import ModelRef, Price, find_price
from clark_agent.run_log.fold import WITHOUT_WORK, fold_intact
from clark_agent.run_log.fork import children_of
from clark_agent.run_log.records import (
    Answered,
    Asked,
    BatchEnded,
    CallSuspended,
    Consulted,
    Record,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    RunSuspended,
    ToolEnded,
    ToolStarted,
    ToolWithdrawn,
)
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog, store_of
from clark_agent.types import ToolCall, Usage

__all__ = ["BAR", "LoggedSpan", "intact_tree", "span_tree", "tree_lines"]

BAR = 24
"""How wide bars are, if there is room."""
_SHORTEST_BAR = 6
_SHORTEST_NAME = 12
_LONGEST_NAME = 100
_NOTES = 10
"""How much room notes have at least."""
_GAP = "  "
_WAITS = "waits"
_OPEN = "░"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class LoggedSpan(Struct):
    """A part of a run, with the parts inside of it in order."""

    name: str
    began_at: int
    """In milliseconds since 1970."""
    ended_at: int | None = None
    """None if it has not ended."""
    usage: Usage | None = None
    cost: float | None = None
    notes: list[str] = field(default_factory=list)
    """What else there is to say, such as why it failed."""
    children: list[LoggedSpan] = field(default_factory=list)
    pauses: list[tuple[int, int]] = field(default_factory=list)
    """When nothing worked on it: it waited, or its run was suspended or had no process."""

    @property
    def worked_ms(self) -> int | None:
        """How long it took, without its pauses; None if it has not ended."""
        if self.ended_at is None:
            return None
        return max(0, self.ended_at - self.began_at - sum(end - at for at, end in self.pauses))

    def walk(self) -> Iterator[LoggedSpan]:
        """This span and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def span_tree(store: RunStore | RunLog, run_id: str, *, price: Price | None = None) -> LoggedSpan:
    """The spans of a run and of the runs below it. ``price`` is that of all its tokens; without it
    the price of each model is looked up.

    Raises `clark_agent.run_log.RunNotFound`, and `clark_agent.run_log.LogDamaged`.
    """
    tree, damage = intact_tree(store_of(store), run_id, price)
    for error in damage:
        raise error
    return tree


def intact_tree(
    store: RunStore, run_id: str, price: Price | None = None
) -> tuple[LoggedSpan, list[DecodeError]]:
    """Return the tree of what can be read of a run and of the runs below it, and what is wrong with
    the rest. Raises only if nothing of the run itself can be read.
    """
    errors: list[DecodeError] = []
    return _tree(store, run_id, price, errors), errors


def _tree(
    store: RunStore, run_id: str, price: Price | None, errors: list[DecodeError]
) -> LoggedSpan:
    loaded, folded, damage = fold_intact(store.load(run_id))
    if damage is not None:
        errors.append(damage)
    builder = _Builder(folded.began, loaded.records[0].at, price)
    for record in loaded.records[1:]:
        builder.add(record)
    builder.mark_open("not ended" if damage is None else "damaged")
    for child in sorted(children_of(store, loaded, folded), key=lambda run: run.began_at):
        try:
            below = _tree(store, child.run_id, price, errors)
        except DecodeError as error:  # nothing of it can be read
            errors.append(error)
            continue
        first = store.load(child.run_id).records[0].entry
        assert isinstance(first, RunBegan)
        builder.parent_of(first).children.append(below)
    return builder.finished()


class _Builder:
    """Adds the records of one run to its span."""

    def __init__(self, began: RunBegan, at: int, price: Price | None) -> None:
        name = "invoke_agent" if began.agent_name is None else f"invoke_agent {began.agent_name}"
        self._run = LoggedSpan(name, at)
        self._model = began.model_ref
        self._price = price or _known_price(began.model_ref)
        self._turn: LoggedSpan | None = None
        self._number = 0
        self._asked_at = self._last_at = at
        self._is_asking = False
        """Whether a request has no answer yet."""
        self._calls: Sequence[ToolCall] = ()
        self._suspended: LoggedSpan | None = None
        self._tools: dict[tuple[int, int], LoggedSpan] = {}
        self._by_id: dict[str, LoggedSpan] = {}

    def add(self, record: Record) -> None:
        """Add a record."""
        at = record.at
        if isinstance(record.entry, WITHOUT_WORK):
            self._pause(at)
        match record.entry:
            case Asked(turn=turn):
                self._begin_turn(turn, at)
                self._asked_at, self._is_asking = at, True
            case Consulted() as consulted:
                self._consulted(consulted, at)
            case Answered() as answered:
                self._answered(answered, at)
            case ToolStarted() as started:
                self._tool(started.position, started.tool_call_id, started.tool_name, at)
            case ToolEnded() as ended:
                self._tool_ended(ended, at)
            case CallSuspended(position=position):
                tool = self._tools.get((self._number, position))
                if tool is not None and tool.ended_at is None:
                    tool.ended_at = at
                    tool.notes.append(_WAITS)
            case ToolWithdrawn(position=position):
                self._withdrawn(position, at)
            case BatchEnded():
                self._end_turn(at)
            case RunSuspended():
                self._end_turn(at)
                self._suspended = LoggedSpan("suspended", at)
                self._run.children.append(self._suspended)
            case RunResumed():
                self._resumed(at)
            case RunEnded(outcome=outcome):
                self._end(outcome, at)
            case RunFailed(error=error):
                self._end(f"failed: {error}", at)
            case _:
                pass
        self._last_at = at

    def mark_open(self, note: str) -> None:
        """After the last record: note at what has not ended that it is in progress, or was killed,
        or that its end cannot be read.
        """
        if self._run.ended_at is not None:
            return
        if self._suspended is not None:
            self._run.notes.append("suspended")
            return
        if self._is_asking:
            self._above().children.append(LoggedSpan(_chat(self._model), self._asked_at))
        for span in self._run.walk():
            if span.ended_at is None:
                span.notes.append(note)

    def parent_of(self, child: RunBegan) -> LoggedSpan:
        """The span of the call that started a child run."""
        if child.call_place is not None:
            turn, position, _ = child.call_place
            if (found := self._tools.get((turn, position))) is not None:
                return found
        return self._by_id.get(child.tool_call_id or "", self._run)

    def finished(self) -> LoggedSpan:
        """The span of the run, with its tokens and its cost."""
        run = self._run
        for span in run.walk():
            span.children.sort(key=lambda below: below.began_at)
        calls = [below for turn in run.children for below in turn.children]
        usages = [call.usage for call in calls if call.usage is not None and _is_model_call(call)]
        if usages:
            run.usage = sum(usages[1:], usages[0])
            costs = [call.cost for call in calls if call.usage is not None and _is_model_call(call)]
            known = [cost for cost in costs if cost is not None]
            run.cost = sum(known) if len(known) == len(costs) else None
        return run

    def _begin_turn(self, turn: int, at: int) -> None:
        if self._turn is None or turn != self._number:
            self._end_turn(at)
            self._number = turn
            self._turn = LoggedSpan(f"turn {turn}", at)
            self._run.children.append(self._turn)

    def _end_turn(self, at: int) -> None:
        if self._turn is not None and self._turn.ended_at is None:
            self._turn.ended_at = at

    def _above(self) -> LoggedSpan:
        return self._run if self._turn is None else self._turn

    def _answered(self, answered: Answered, at: int) -> None:
        self._is_asking = False
        call = LoggedSpan(_chat(self._model), self._asked_at, at)
        call.usage = answered.message.usage
        self._calls = answered.message.tool_calls
        if call.usage is not None and self._price is not None:
            call.cost = self._price.of(call.usage)
        if answered.error is not None:
            call.notes.append(f"failed: {answered.error}")
        if answered.discarded is not None:
            call.notes.append(f"discarded: {answered.discarded}")
        self._above().children.append(call)

    def _consulted(self, consulted: Consulted, at: int) -> None:
        self._begin_turn(consulted.turn, self._last_at)
        model = consulted.model or self._model
        price = self._price if consulted.model is None else _known_price(model)
        call = LoggedSpan(_chat(model), self._last_at, at)
        call.usage = consulted.message.usage
        call.notes.append(f"asked by {consulted.plugin}")
        if call.usage is not None and price is not None:
            call.cost = price.of(call.usage)
        if consulted.error is not None:
            call.notes.append(f"failed: {consulted.error}")
        self._above().children.append(call)

    def _tool(self, position: int, call_id: str, name: str, at: int) -> LoggedSpan:
        span = self._tools.get((self._number, position))
        if span is not None:  # it goes on, after it has waited or its process has died
            self._go_on(span, at)
            return span
        span = LoggedSpan(f"execute_tool {name}", at)
        self._tools[self._number, position] = self._by_id[call_id] = span
        self._above().children.append(span)
        return span

    def _tool_ended(self, ended: ToolEnded, at: int) -> None:
        span = self._tools.get((self._number, ended.position))
        if span is None:
            name = ended.tool_name or self._name_at(ended.position)
            span = self._tool(ended.position, ended.tool_call_id, name, at)
            span.notes.append("not run")
        self._go_on(span, at)  # it may have waited for its result
        span.ended_at = at
        if ended.result.is_error:
            span.notes.append("error")

    def _withdrawn(self, position: int, at: int) -> None:
        """The tool was announced, and did not run."""
        span = self._tools.get((self._number, position))
        if span is not None and span.pauses:  # what it waited for still holds
            span.ended_at = at
            span.notes.append(_WAITS)
        elif span is not None:
            del self._tools[self._number, position]
            above = self._above()
            above.children = [below for below in above.children if below is not span]

    def _name_at(self, position: int) -> str:
        return self._calls[position].name if position < len(self._calls) else "?"

    def _resumed(self, at: int) -> None:
        self._is_asking = False  # it asks again
        if self._suspended is not None:
            self._suspended.ended_at = at
            self._suspended = None
            if self._turn is not None:  # its calls go on
                self._go_on(self._turn, at)

    def _pause(self, at: int) -> None:
        """Nothing has worked on the run since the last record."""
        if at > self._last_at:
            for span in (self._run, self._turn, *self._tools.values()):
                if span is not None and span.ended_at is None:
                    span.pauses.append((self._last_at, at))

    def _go_on(self, span: LoggedSpan, at: int) -> None:
        """Continue a span that had ended for the time being."""
        if span.ended_at is not None:
            span.pauses.append((span.ended_at, max(at, span.ended_at)))
            span.ended_at = None
        if _WAITS in span.notes:
            span.notes.remove(_WAITS)

    def _end(self, outcome: str, at: int) -> None:
        self._end_turn(at)
        self._run.ended_at = at
        self._run.notes.append(outcome)


def _chat(model: ModelRef) -> str:
    return f"chat {model.names[0]}" if model.names else "chat"


def _is_model_call(span: LoggedSpan) -> bool:
    return span.name.partition(" ")[0] == "chat"


def _known_price(model: ModelRef) -> Price | None:
    try:
        return find_price(model, {})
    except ConfigError:  # genai-prices is not installed
        return None


# --- drawing --------------------------------------------------------------------------------------


def tree_lines(root: LoggedSpan, *, bar: int = BAR, width: int | None = None) -> list[str]:
    """The tree as lines of text: names, times, tokens, costs, bars of at most ``bar`` characters.

    With a ``width``, no line is longer: bars become shorter, then tokens and names are written in
    brief (``1.2k/80`` are those in and out); then there are no bars, and what is too long is cut.
    Control characters are escaped.
    """
    rows = list(_rows(root, "", ""))
    plain = _Table(rows, _Brief.NOTHING)
    if width is None:
        return plain.lines(bar)
    for table in (plain, _Table(rows, _Brief.TOKENS), _Table(rows, _Brief.NAMES)):
        room = width - table.width - len(_GAP)
        if bar <= room or room >= _SHORTEST_BAR:
            return [_cut(line, width) for line in table.lines(min(bar, room))]
    table.cut_names(table.width - width)
    return [_cut(line, width) for line in table.lines(0)]


class _Brief(IntEnum):
    """What is written in brief."""

    NOTHING = auto()
    TOKENS = auto()
    NAMES = auto()
    """Names and tokens."""


class _Table:
    """The cells of all lines."""

    def __init__(self, rows: Sequence[tuple[str, LoggedSpan]], brief: _Brief) -> None:
        self._spans = [span for _, span in rows]
        self._names = [
            stem + _name(_short(span.name) if brief is _Brief.NAMES else span.name)
            for stem, span in rows
        ]
        self._numbers = [
            (_seconds(s), _tokens(s.usage, brief=brief is not _Brief.NOTHING), _money(s.cost))
            for s in self._spans
        ]
        self._notes = [_escaped(", ".join(span.notes)) for span in self._spans]
        self._name_width = max(map(_columns, self._names))
        self._widths = [max(map(len, column)) for column in zip(*self._numbers, strict=True)]
        if not self._widths[-1]:  # no cost
            self._widths.pop()

    @property
    def width(self) -> int:
        """How wide the lines are without bars, with the first words of the notes."""
        notes = min(max(map(_columns, self._notes)), _NOTES)
        widths = [self._name_width, *self._widths, *([notes] if notes else [])]
        return sum(widths) + len(_GAP) * (len(widths) - 1)

    def cut_names(self, excess: int) -> None:
        """Make the names shorter, but not so short that nothing can be read."""
        self._name_width = max(_SHORTEST_NAME, self._name_width - max(0, excess))
        self._names = [_cut(name, self._name_width) for name in self._names]

    def lines(self, bar: int) -> list[str]:
        """The lines, with bars of this length; 0 for none."""
        root = self._spans[0]
        end = _worked_until(root, max(span.ended_at or span.began_at for span in self._spans))
        lines = []
        for name, numbers, span, notes in zip(
            self._names, self._numbers, self._spans, self._notes, strict=True
        ):
            columns = [name + " " * (self._name_width - _columns(name))]
            columns += [
                cell.rjust(width) for cell, width in zip(numbers, self._widths, strict=False)
            ]
            if bar > 0:
                columns.append(_bar(root, span, end, bar))
            columns.append(notes)
            lines.append(_GAP.join(columns).rstrip())
        return lines


_SHORT = {"invoke_agent": "agent", "execute_tool": "tool"}


def _short(name: str) -> str:
    operation, _, rest = name.partition(" ")
    return f"{_SHORT.get(operation, operation)} {rest}".rstrip()


def _name(name: str) -> str:
    """A name, which may be one that the model made up."""
    return _cut(_escaped(name[: _LONGEST_NAME + 1]), _LONGEST_NAME)


def _escaped(text: str) -> str:
    """The text on one line, as a terminal can show it."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])


def _columns(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum([2 if east_asian_width(c) in "WF" else not combining(c) for c in text])


def _cut(text: str, width: int) -> str:
    if _columns(text) <= width:
        return text
    text = text[:width]
    while text and _columns(text) >= width:
        text = text[:-1]
    return f"{text}…"


def _rows(span: LoggedSpan, stem: str, below: str) -> Iterator[tuple[str, LoggedSpan]]:
    yield stem, span
    for n, child in enumerate(span.children):
        is_last = n == len(span.children) - 1
        yield from _rows(
            child,
            f"{below}{'└─ ' if is_last else '├─ '}",
            f"{below}{'   ' if is_last else '│  '}",
        )


def _seconds(span: LoggedSpan) -> str:
    milliseconds = span.worked_ms
    if milliseconds is None:
        return "…"
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    if milliseconds < 120_000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds / 60_000:.0f} min"


def _tokens(usage: Usage | None, *, brief: bool) -> str:
    if usage is None:
        return ""
    given = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    if brief:
        return f"{_thousands(given)}/{_thousands(usage.output_tokens)}"
    return f"{given:,} in · {usage.output_tokens:,} out"


def _thousands(tokens: int) -> str:
    for unit, size in (("M", 1_000_000), ("k", 1000)):
        if tokens >= size:
            return (
                f"{tokens / size:.1f}{unit}" if tokens < 100 * size else f"{tokens // size}{unit}"
            )
    return str(tokens)


def _money(cost: float | None) -> str:
    return "" if cost is None else f"{cost:.4f}"


def _worked_until(root: LoggedSpan, at: int) -> int:
    """How long the whole was worked on until then: its pauses have no place on the line of time."""
    paused = sum(max(0, min(at, end) - begin) for begin, end in root.pauses)
    return at - root.began_at - paused


def _bar(root: LoggedSpan, span: LoggedSpan, end: int, width: int) -> str:
    """When the span was, between the start and the end of the whole: at least a thin line. One that
    has not ended is light, up to the newest that is known.
    """
    whole = max(1, end)
    ended = end if span.ended_at is None else _worked_until(root, span.ended_at)
    begins = round(_worked_until(root, span.began_at) * width * 8 / whole)
    ends = round(ended * width * 8 / whole)
    begins = min(max(0, begins), width * 8 - 1)
    full, rest = divmod(max(1, ends - begins), 8)
    if span.ended_at is None:
        drawn = _OPEN * max(1, width - begins // 8)
    else:
        drawn = "█" * full + (_EIGHTHS[rest] if rest else "")
    return (" " * (begins // 8) + drawn)[:width].ljust(width)
