"""Prefix: how much of each request was the same as in the request before.

Providers keep the beginning of a request in a cache, and read it from there at a fraction of the
price while the next request begins in the same way. One changed message, tool or setting makes
everything behind it expensive. `check_prefix` finds these changes in a log: in which request,
where, and which plugin, gate or tool source made them.

A request begins with the tools, in their order, and the system prompt; the messages follow. A
setting that providers make part of the prompt (``reasoning``, ``force_tool_call``,
``output_schema``, ``provider_extras``) counts between the two. Tokens are estimates. A message
counts as a whole, and its time does not count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.errors import ClarkAgentError
from clark_agent.messages.tokens import CachingEstimator, JsonSizeEstimator, TokenEstimator
from clark_agent.messages.wire import encode_json
from clark_agent.run_log.fold import FoldedRun, fold, fold_in
from clark_agent.run_log.records import (
    Asked,
    ContextEdited,
    Entry,
    RunResumed,
    ToolsChanged,
    ToolsGated,
)
from clark_agent.run_log.sent import REPAIR, SentMessages
from clark_agent.run_log.store import LoadedRun, RunStore
from clark_agent.run_log.writer import RunLog, store_of
from clark_agent.types import AgentMessage

__all__ = [
    "PrefixCause",
    "PrefixChange",
    "PrefixChanged",
    "PrefixReader",
    "PrefixReport",
    "RequestPrefix",
    "check_prefix",
    "prefix_of",
]

Part: TypeAlias = Literal["tools", "system_prompt", "settings", "messages"]
CauseKind: TypeAlias = Literal[
    "plugin", "gate", "tool_source", "recovery", "repair", "retry", "resume", "settings", "unknown"
]

_IN_PROMPT = ("reasoning", "force_tool_call", "output_schema", "provider_extras")
"""The settings that some provider makes part of the prompt, or whose change clears its cache."""


class PrefixChanged(ClarkAgentError, AssertionError):
    """The requests of a run share less than was demanded; ``report`` says where they differ."""

    def __init__(self, report: PrefixReport, share: float) -> None:
        places = [str(request) for request in report.requests if request.change is not None]
        more = [f"… and {len(places) - _SHOWN} more"] if len(places) > _SHOWN else []
        super().__init__(
            f"{report.reuse:.1%} of what could repeat was the same in the next request of the run "
            f"{report.run_id!r}, less than {share:.1%}:\n" + "\n".join([*places[:_SHOWN], *more])
        )
        self.report = report
        self.share = share


_SHOWN = 10


class PrefixCause(Struct, frozen=True):
    """Who changed something: a plugin by its name, for example."""

    kind: CauseKind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} {self.name}".rstrip()


class PrefixChange(Struct, frozen=True, kw_only=True):
    """The first difference of two requests."""

    part: Part
    at: int = 0
    """The index of the first message, or of the first tool, that differs."""
    name: str | None = None
    """The name of that tool, or of the settings."""
    causes: tuple[PrefixCause, ...]
    """Who may have changed it, in the order of the records."""

    def __str__(self) -> str:
        where = {
            "tools": f"tool {self.at} ({self.name})",
            "system_prompt": "the system prompt",
            "settings": f"setting {self.name}",
            "messages": f"message {self.at}",
        }[self.part]
        return f"{where} changed by {', '.join(map(str, self.causes))}"


class RequestPrefix(Struct, frozen=True, kw_only=True):
    """A request, compared with the one before."""

    seq: int
    """The number of its record."""
    turn: int
    attempt: int
    messages: int
    tokens: int
    """All of it: tools, system prompt and messages."""
    kept_messages: int = 0
    """How many messages at its beginning the request before had too, with nothing different before
    them.
    """
    kept_tokens: int = 0
    possible_tokens: int = 0
    """The tokens of the request before, which could all have been kept; 0 for the first request."""
    change: PrefixChange | None = None
    """What ends the common prefix; None if the request before was kept as a whole."""
    is_certain: bool = True
    """False if the log does not have all changes: older versions did not record when a plugin with
    ``should_transform`` stopped to edit.
    """

    @property
    def reuse(self) -> float:
        """The share that was kept of what could repeat; 1 for the first request."""
        return self.kept_tokens / self.possible_tokens if self.possible_tokens else 1.0

    def __str__(self) -> str:
        place = f"turn {self.turn}" + (f", attempt {self.attempt}" if self.attempt > 1 else "")
        size = f"{self.messages} messages, {self.tokens:,} tokens"
        if not self.possible_tokens:
            return f"{place}: {size}"
        kept = f"{place}: {size}; kept {self.kept_messages} messages, {self.reuse:.1%}"
        return kept if self.change is None else f"{kept}; {self.change}"


class PrefixReport(Struct, frozen=True):
    """The requests of a run, each compared with the one before. str() has a line for each."""

    run_id: str
    requests: tuple[RequestPrefix, ...]

    @property
    def reuse(self) -> float:
        """The share of the tokens that could repeat, and did. 1 if nothing could."""
        possible = sum([request.possible_tokens for request in self.requests])
        kept = sum([request.kept_tokens for request in self.requests])
        return kept / possible if possible else 1.0

    @property
    def changes(self) -> tuple[RequestPrefix, ...]:
        """The requests that did not keep all of the one before."""
        return tuple([request for request in self.requests if request.change is not None])

    def without(self, *names: str) -> PrefixReport:
        """The report without the changes that these plugins, gates or recoveries made."""
        return replace(
            self, requests=tuple([r for r in self.requests if not _is_by(r.change, names)])
        )

    def require(self, share: float = 1.0) -> PrefixReport:
        """Return the report. Raises `PrefixChanged` if less than this share was kept."""
        if self.reuse < share:
            raise PrefixChanged(self, share)
        return self

    def __str__(self) -> str:
        total = f"{self.reuse:.1%} of what could repeat was kept, in {len(self.requests)} requests"
        return "\n".join([f"{self.run_id}  {total}", *[f"  {each}" for each in self.requests]])


def _is_by(change: PrefixChange | None, names: Collection[str]) -> bool:
    return change is not None and any(cause.name in names for cause in change.causes)


def check_prefix(
    store: RunStore | RunLog, run_id: str, *, estimator: TokenEstimator | None = None
) -> PrefixReport:
    """Compare each request of a run with the one before it.

    Costs what is in the log, once. Raises `LogDamaged` for a damaged log.
    """
    return prefix_of(store_of(store).load(run_id), estimator)


def prefix_of(loaded: LoadedRun, estimator: TokenEstimator | None = None) -> PrefixReport:
    """The same, for a run that is already loaded."""
    run = fold(replace(loaded, records=loaded.records[:1]))
    reader = PrefixReader(run, estimator or JsonSizeEstimator())
    requests: list[RequestPrefix] = []
    for record in loaded.records[1:]:
        fold_in(run, record)
        request = reader.read(record.entry, record.seq)
        if request is not None:
            requests.append(request)
    return PrefixReport(loaded.run_id, tuple(requests))


class _Front(Struct, frozen=True):
    """What comes before the messages of a request."""

    settings: Mapping[str, Any]
    """As in the record: texts and schemas as digests."""
    sizes: tuple[int, ...]
    """The tokens of the first 0, 1, 2 … tools."""
    system: int
    """The tokens of the system prompt."""

    @property
    def tools(self) -> Mapping[str, str]:
        """The tools by name, in their order, as digests."""
        return self.settings.get("tools") or {}

    @property
    def tokens(self) -> int:
        """All of it."""
        return self.sizes[-1] + self.system


class PrefixReader:
    """Follows the records of a run, which the caller folds, and compares its requests."""

    def __init__(self, run: FoldedRun, estimator: TokenEstimator) -> None:
        self._run = run
        self._sent = SentMessages(run)
        self._estimate = CachingEstimator(estimator).estimate_message
        self._sums = [0]
        """The tokens of the first 0, 1, 2 … messages of the newest request."""
        self._front: _Front | None = None
        """None before the first request."""
        self._edited: list[PrefixCause] = []
        self._gated: list[PrefixCause] = []
        """Who has edited messages, and who has changed tools, since the newest request."""

    @property
    def messages(self) -> Sequence[AgentMessage]:
        """The messages of the newest request."""
        return self._sent.messages

    def read(self, entry: Entry, seq: int) -> RequestPrefix | None:
        """Return the comparison if the entry, which is already folded, is a request."""
        kept = self._sent.follow(entry)
        match entry:
            case ContextEdited():
                self._edited.append(_cause(entry))
            case ToolsGated(plugin=plugin):
                self._gated.append(PrefixCause("gate", plugin))
            case ToolsChanged():
                source = self._run.began.tool_source or ""
                self._gated.append(PrefixCause("tool_source", source))
            case RunResumed():
                self._edited.append(PrefixCause("resume"))
                self._gated.append(PrefixCause("resume"))
            case Asked() if kept is not None:
                request = self._compared(entry, seq, kept)
                self._edited.clear()
                self._gated.clear()
                return request
            case _:
                pass
        return None

    def _compared(self, asked: Asked, seq: int, kept: int) -> RequestPrefix:
        before, sums = self._front, self._sums
        earlier, in_earlier, in_kept = len(sums) - 1, sums[-1], sums[kept]
        front = self._front = self._front_of(asked, before)
        costs = [self._estimate(message) for message in self._sent.messages[kept:]]
        sums[kept:] = accumulate(costs, initial=in_kept)
        request = RequestPrefix(
            seq=seq,
            turn=asked.turn,
            attempt=asked.attempt,
            messages=asked.messages,
            tokens=front.tokens + sums[-1],
            is_certain=asked.messages == len(self._sent.messages),
        )
        if before is None:
            return request
        change, in_front = _front_change(before, front, self._gated)
        if change is not None:
            kept = in_kept = 0
        elif kept < earlier:
            change = PrefixChange(part="messages", at=kept, causes=self._editors())
        return replace(
            request,
            kept_messages=kept,
            kept_tokens=in_front + in_kept,
            possible_tokens=before.tokens + in_earlier,
            change=change,
        )

    def _front_of(self, asked: Asked, before: _Front | None) -> _Front:
        if asked.settings is None and before is not None:
            return before
        settings = asked.settings or {}
        tools = {**self._run.began.tools, **self._run.sourced}
        sizes = [_tokens({"name": name, **tools.get(name, {})}) for name in settings["tools"]]
        system = _tokens(self._run.began.system_prompt)
        return _Front(settings, tuple(accumulate(sizes, initial=0)), system)

    def _editors(self) -> tuple[PrefixCause, ...]:
        retry = [PrefixCause("retry")] if self._sent.dropped_note else []
        return tuple(dict.fromkeys([*self._edited, *retry])) or (PrefixCause("unknown"),)


def _front_change(
    before: _Front, after: _Front, gated: Iterable[PrefixCause]
) -> tuple[PrefixChange | None, int]:
    """Return the first change before the messages, and how many tokens come before it."""
    if before is after:
        return None, before.tokens
    if (at := _first_difference(before.tools, after.tools)) is not None:
        names = [*after.tools] if at < len(after.tools) else [*before.tools]
        causes = tuple(dict.fromkeys(gated)) or (PrefixCause("unknown"),)
        return PrefixChange(part="tools", at=at, name=names[at], causes=causes), before.sizes[at]
    mine, theirs = before.settings, after.settings
    if mine.get("system_prompt") != theirs.get("system_prompt"):
        causes = (PrefixCause("settings"),)
        return PrefixChange(part="system_prompt", causes=causes), before.sizes[-1]
    changed = [name for name in _IN_PROMPT if mine.get(name) != theirs.get(name)]
    if changed:
        causes = (PrefixCause("settings", changed[0]),)
        return PrefixChange(part="settings", name=changed[0], causes=causes), before.tokens
    return None, before.tokens


def _first_difference(before: Mapping[str, str], after: Mapping[str, str]) -> int | None:
    for at, (old, new) in enumerate(zip(before.items(), after.items(), strict=False)):
        if old != new:
            return at
    return None if len(before) == len(after) else min(len(before), len(after))


def _cause(edited: ContextEdited) -> PrefixCause:
    if edited.plugin == REPAIR:
        return PrefixCause("repair", edited.plugin)
    return PrefixCause("recovery" if edited.is_lasting else "plugin", edited.plugin)


def _tokens(value: object) -> int:
    return len(encode_json(value)) // 4
