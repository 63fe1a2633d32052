"""What the model saw: a request, rebuilt from the log up to it, and compared with the one before.

A request has the whole transcript, so this reads all of the log before it. For a very large log
that has to be asked for (`MOST_READ`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.messages.tokens import JsonSizeEstimator
from clark_agent.run_log.fold import FoldedRun, fold, fold_in
from clark_agent.run_log.pages import START
from clark_agent.run_log.prefix import PrefixReader, RequestPrefix
from clark_agent.run_log.records import Asked, ContextEdited, Record
from clark_agent.run_log.store import LoadedRun
from clark_agent.types import AgentMessage
from clark_agent.view import shapes
from clark_agent.view.index import LogIndex
from clark_agent.view.parts import Parts, one_line
from clark_agent.view.shapes import RequestView
from clark_agent.view.timeline import Timeline

__all__ = ["MOST_READ", "SentRequest", "TooLarge", "request_view", "sent_request", "sent_requests"]

MOST_READ = 64 << 20
"""How many bytes of a log are read for a request unless one insists."""
_MOST_REPLACED = 50
_DIGESTS = ("system_prompt", "tools", "provider_extras", "output_schema")
"""Settings of which a log has only digests."""


class TooLarge(Exception):
    """It would take too long; one may insist."""


class SentRequest(Struct, frozen=True, kw_only=True):
    """A request as it was sent."""

    seq: int
    turn: int
    attempt: int
    attempts: int = 1
    system_prompt: str
    messages: Sequence[AgentMessage]
    before: Sequence[AgentMessage] = ()
    """Those of the request before."""
    tools: Mapping[str, Any]
    """Descriptions and parameters by name, in order."""
    digests: Mapping[str, str]
    old_digests: Mapping[str, str]
    """Those of the tools of the request before."""
    settings: Mapping[str, Any]
    prefix: RequestPrefix
    edits: tuple[tuple[Record, ContextEdited], ...]


def sent_request(
    index: LogIndex, turn: int, attempt: int | None = None, *, force: bool = False
) -> SentRequest | None:
    """Rebuild a request; None if there is no such. ``attempt`` is the last one by default.

    Raises `TooLarge`, and `LogDamaged` or `DecodeError` for damage before it.
    """
    index.reach(turn=turn + 1)
    attempts = index.attempts(turn)
    start = index.seq_of_turn(turn)
    attempt = attempts if attempt is None else attempt
    if start is None or not 1 <= attempt <= attempts:
        return None
    read = index.bytes_before(start)
    if read > MOST_READ and not force:
        raise TooLarge(
            f"the log has {read >> 20} MB before turn {turn}, and the request is rebuilt from all "
            "of it"
        )
    for sent in sent_requests(index, turn, attempt):
        return replace(sent, attempts=attempts)
    return None


def sent_requests(
    index: LogIndex, turn: int | None = None, attempt: int | None = None
) -> Iterator[SentRequest]:
    """Rebuild all requests, or one, by reading the log once. The messages of each are a copy.

    Raises `LogDamaged` or `DecodeError` for damage.
    """
    run: FoldedRun | None = None
    reader: PrefixReader | None = None
    edits: list[tuple[Record, ContextEdited]] = []
    settings: Mapping[str, Any] = {}
    for record in index.records_from(START, index.last_seq):
        if run is None or reader is None:
            run = fold(LoadedRun(index.run_id, (record,)))
            reader = PrefixReader(run, JsonSizeEstimator())
            continue
        entry = record.entry
        fold_in(run, record)
        if isinstance(entry, ContextEdited):
            edits.append((record, entry))
        is_wanted = isinstance(entry, Asked) and (
            turn is None or (entry.turn, entry.attempt) == (turn, attempt)
        )
        before = list(reader.messages) if is_wanted else ()
        prefix = reader.read(entry, record.seq)
        if not isinstance(entry, Asked):
            continue
        old, settings = settings, settings if entry.settings is None else entry.settings
        if is_wanted and prefix is not None:
            found = _sent(entry, run, reader, settings, old, prefix, edits)
            yield replace(found, before=before)
        edits.clear()


def _sent(
    asked: Asked,
    run: FoldedRun,
    reader: PrefixReader,
    settings: Mapping[str, Any],
    old: Mapping[str, Any],
    prefix: RequestPrefix,
    edits: Sequence[tuple[Record, ContextEdited]],
) -> SentRequest:
    digests = settings.get("tools") or {}
    declared = {**run.began.tools, **run.sourced}
    return SentRequest(
        seq=prefix.seq,
        turn=asked.turn,
        attempt=asked.attempt,
        system_prompt=run.began.system_prompt,
        messages=list(reader.messages),
        tools={name: declared.get(name) or {} for name in digests},
        digests=digests,
        old_digests=old.get("tools") or {},
        settings={name: value for name, value in settings.items() if name not in _DIGESTS},
        prefix=prefix,
        edits=tuple(edits),
    )


def request_view(
    run_id: str, sent: SentRequest, first: int | None, limit: int, *, parts: Parts | None = None
) -> RequestView:
    """Return a request as the page gets it, with some of its messages: by default the new ones."""
    parts, seq, kept = parts or Parts(), sent.seq, sent.prefix.kept_messages
    total = len(sent.messages)
    start = min(kept, total - 1) if first is None else first
    start = max(0, min(start, total))
    shown = parts.messages(sent.messages[start : start + limit], seq, "sent.messages", start)
    timeline = Timeline(parts)
    edits = [
        timeline.context_changed(entry, {"seq": r.seq, "at": r.at, "turn": sent.turn})
        for r, entry in sent.edits
    ]
    replaced = sent.before[kept : kept + _MOST_REPLACED]
    return RequestView(
        run_id=run_id,
        turn=sent.turn,
        attempt=sent.attempt,
        attempts=sent.attempts,
        seq=seq,
        system_prompt=parts.text(sent.system_prompt, seq, "sent.system_prompt"),
        tools=tuple([_tool(name, sent, parts) for name in sent.tools]),
        removed_tools=tuple([name for name in sent.old_digests if name not in sent.tools]),
        settings=parts.json(sent.settings, seq, "sent.settings") if sent.settings else None,
        total=total,
        first=start,
        messages=tuple([replace(message, is_new=message.index >= kept) for message in shown]),
        replaced=tuple(parts.messages(replaced, seq, "sent.before", kept)),
        edits=tuple(edits),
        prefix=_prefix(sent.prefix),
    )


def _tool(name: str, sent: SentRequest, parts: Parts) -> shapes.ToolView:
    declared = sent.tools[name]
    path = f"sent.tools.{name}"
    return shapes.ToolView(
        name=name,
        description=parts.text(
            str(declared.get("description", "")), sent.seq, f"{path}.description"
        ),
        parameters=parts.json(declared.get("parameters", {}), sent.seq, f"{path}.parameters"),
        is_new=bool(sent.old_digests) and sent.old_digests.get(name) != sent.digests[name],
    )


def _prefix(prefix: RequestPrefix) -> shapes.PrefixView:
    change = prefix.change
    at = None
    if change is not None:
        causes = tuple([shapes.Cause(cause.kind, cause.name) for cause in change.causes])
        at = shapes.PrefixBreak(
            change.part, change.at, change.name, one_line(str(change), 300), causes
        )
    return shapes.PrefixView(
        tokens=prefix.tokens,
        kept_messages=prefix.kept_messages,
        kept_tokens=prefix.kept_tokens,
        possible_tokens=prefix.possible_tokens,
        reuse=prefix.reuse,
        change=at,
        is_certain=prefix.is_certain,
    )
