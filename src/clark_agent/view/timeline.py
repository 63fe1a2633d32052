"""From records to items: what the page shows of a run, in the order of its log.

A `Timeline` takes the records of a run and returns an item for each. What it keeps is small (the
turn, the calls that run), so a copy of it beside a place in the log lets one begin there.

Long texts are cut. Their address in the log goes with them: the number of the record, and a path in
its entry. `part_at` finds what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clark_agent.errors import ConfigError
from clark_agent.messages.wire import encode_json
from clark_agent.plugins.compaction import Mark, mark_of
from clark_agent.prices import ModelRef, Price, find_price
from clark_agent.run_log.fold import BROKEN_OFF
from clark_agent.run_log.records import (
    Answered,
    Asked,
    BatchEnded,
    CallSuspended,
    CancelReceived,
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
    SteeringAccepted,
    ToolEnded,
    ToolProgress,
    ToolsChanged,
    ToolsGated,
    ToolStarted,
    ToolWithdrawn,
)
from clark_agent.run_log.store import LoadedRun
from clark_agent.tools.base import ToolResult
from clark_agent.tools.kept import KeptResult
from clark_agent.types import (
    AgentMessage,
    Annotation,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    detect_arg_parse_error,
)
from clark_agent.view import shapes
from clark_agent.view.shapes import Block, Item, MessageView, Text, Tokens
from clark_agent.waiting import WaitingRequest

__all__ = [
    "IMAGE_TYPES",
    "KEPT",
    "Parts",
    "Timeline",
    "items_of",
    "json_text",
    "known_price",
    "model_name",
    "one_line",
    "part_at",
    "tokens_of",
]

_CUT = 4000
"""How many characters of a text are shown."""
_MOST_INSERTED = 20
KEPT = "kept"
"""The path of the text of a result that is kept aside."""
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""The images that a page shows. Others, such as SVG, may contain programs."""
_Content: TypeAlias = (
    TextContent
    | ThinkingContent
    | ReasoningContent
    | ReasoningDetailsContent
    | ToolCall
    | ImageContent
    | FileContent
    | ProviderContent
)


def items_of(loaded: LoadedRun) -> list[Item]:
    """Return the items of a run, with whole texts and with images as ``data:`` URLs."""
    timeline = Timeline(Parts(None, inline=True))
    return [timeline.take(record) for record in loaded.records]


def tokens_of(usage: Usage) -> Tokens:
    """Return token counts as the page gets them."""
    return Tokens(
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_input_tokens,
        usage.cache_creation_input_tokens,
    )


def known_price(model: ModelRef, prices: dict[str, Price] | None = None) -> Price | None:
    """Return the price of a model, if it is known."""
    try:
        return find_price(model, prices or {})
    except ConfigError:  # genai-prices is not installed
        return None


def json_text(value: Any) -> str:
    """Return a value as indented JSON."""
    try:
        return msgspec.json.format(encode_json(value), indent=2).decode()
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def one_line(text: str, most: int) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 1] + "…"


def part_at(value: Any, path: str) -> Any:
    """Return what is at a path in an entry, or in anything that is JSON; all of it for an empty
    path. Raises `LookupError`.
    """
    found = msgspec.to_builtins(value)
    for step in path.split(".") if path else ():
        if isinstance(found, (list, tuple)):
            if not step.isdecimal() or int(step) >= len(found):
                raise LookupError(path)
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            raise LookupError(path)
    return found


# --- messages ---------------------------------------------------------------------------------


class Parts:
    """Makes the parts of items: texts, blocks, messages."""

    def __init__(
        self,
        most: int | None = _CUT,
        *,
        inline: bool = False,
        read_kept: Callable[[str, int], str] | None = None,
    ) -> None:
        """Create it: texts are cut after ``most`` characters; ``inline`` puts images into the
        items. ``read_kept`` returns the beginning of a result that is kept aside, by its name and
        up to a number of characters, to have it in the items.
        """
        self._most = most
        self._inline = inline
        self._read_kept = read_kept

    def text(self, text: str, at: int | None, path: str) -> Text:
        """A text, or its beginning."""
        if self._most is None or len(text) <= self._most:
            return Text(text, len(text))
        return Text(text[: self._most], len(text), at, None if at is None else path)

    def json(self, value: Any, at: int | None, path: str) -> Text:
        """A value as JSON, or the beginning of that."""
        return self.text(json_text(value), at, path)

    def message(self, message: AgentMessage, index: int, at: int | None, path: str) -> MessageView:
        """A message of a transcript."""
        view = MessageView(index, message.role, (), message.timestamp)
        match message:
            case ToolResultMessage():
                return replace(
                    view,
                    blocks=self.blocks(message.content, at, f"{path}.content"),
                    call_id=message.tool_call_id,
                    name=message.tool_name,
                    is_error=message.is_error,
                )
            case CustomMessage() if (mark := mark_of(message)) is not None:
                compaction = self._compaction(mark, at, f"{path}.payload.text")
                return replace(view, blocks=(compaction,), name=message.kind)
            case CustomMessage():
                data = self.json(message.payload, at, f"{path}.payload")
                block = shapes.OtherBlock(message.kind, data)
                return replace(view, blocks=(block,), name=message.kind)
            case AssistantMessage():
                is_error = message.error_message is not None
                blocks = self.blocks(message.content, at, f"{path}.content")
                return replace(view, blocks=blocks, is_error=is_error)
            case _ if isinstance(message.content, str):
                text = self.text(message.content, at, f"{path}.content")
                return replace(view, blocks=(shapes.TextBlock("text", text),))
            case _:
                return replace(view, blocks=self.blocks(message.content, at, f"{path}.content"))

    def messages(
        self, messages: Iterable[AgentMessage], at: int | None, path: str, first: int = 0
    ) -> tuple[MessageView, ...]:
        """Messages in a list."""
        return tuple(
            [self.message(m, first + n, at, f"{path}.{n}") for n, m in enumerate(messages)]
        )

    def blocks(self, content: Iterable[_Content], at: int | None, path: str) -> tuple[Block, ...]:
        """The blocks of a message."""
        found: list[Block] = []
        position = 0
        for number, block in enumerate(content):
            found.append(self._block(block, position, at, f"{path}.{number}"))
            position += isinstance(block, ToolCall)
        return tuple(found)

    def _block(self, block: _Content, position: int, at: int | None, path: str) -> Block:
        match block:
            case TextContent(text):
                return shapes.TextBlock("text", self.text(text, at, f"{path}.text"))
            case ThinkingContent(text):
                return shapes.TextBlock("thinking", self.text(text, at, f"{path}.text"))
            case ReasoningContent(text):
                return shapes.TextBlock("reasoning", self.text(text, at, f"{path}.text"))
            case ReasoningDetailsContent(details):
                data = self.json(details, at, f"{path}.details")
                return shapes.OtherBlock("reasoning_details", data)
            case ProviderContent(provider, data):
                return shapes.OtherBlock(provider, self.json(data, at, f"{path}.data"))
            case ToolCall():
                return self._call(block, position, at, path)
            case ImageContent():
                return self._image(block, at, path)
            case FileContent(source, media_type, name):
                is_here = source.startswith("data:")
                size = (len(source) - source.find(",") - 1) * 3 // 4 if is_here else None
                url = None if is_here else source[:_CUT]
                return shapes.FileBlock(name, media_type, size, url)

    def _call(self, call: ToolCall, position: int, at: int | None, path: str) -> shapes.CallBlock:
        wrong = detect_arg_parse_error(call.arguments)
        if wrong is not None:
            raw = self.text(wrong[1], at, f"{path}.arguments.__clark_arg_raw")
            summary = one_line(wrong[1], 120)
            return shapes.CallBlock(position, call.id, call.name, raw, False, summary)
        arguments = self.json(call.arguments, at, f"{path}.arguments")
        summary = _summary(call.arguments)
        return shapes.CallBlock(position, call.id, call.name, arguments, True, summary)

    def _image(self, image: ImageContent, at: int | None, path: str) -> shapes.ImageBlock:
        kind, alt, source = image.media_type, image.alt, image.source
        if not source.startswith("data:"):
            return shapes.ImageBlock(kind, alt, None, None, None, source[:_CUT])
        declared = source[5:100].partition(",")[0].partition(";")[0].lower()
        if declared not in IMAGE_TYPES:
            return shapes.ImageBlock(kind or declared, alt, None, None, None, None)
        if self._inline:
            return shapes.ImageBlock(declared, alt, None, None, source, None)
        return shapes.ImageBlock(declared, alt, at, f"{path}.source", None, None)

    def _compaction(self, mark: Mark, at: int | None, path: str) -> shapes.CompactionBlock:
        return shapes.CompactionBlock(
            first_turn=mark.first_turn,
            last_turn=mark.last_turn,
            messages=mark.messages,
            tokens_before=mark.tokens_before,
            tokens_after=mark.tokens_after,
            has_summary=mark.has_summary,
            merges=mark.merges,
            text=self.text(mark.text, at, path),
        )

    # --- results and requests -------------------------------------------------------------------

    def result(self, result: ToolResult, at: int, path: str) -> shapes.Result:
        """The result of a call."""
        details: Any = result.details
        diff = details.get("diff") if isinstance(details, dict) else None
        return shapes.Result(
            blocks=self.blocks(result.content, at, f"{path}.content"),
            is_error=result.is_error,
            narration=result.narration,
            diff=self.text(diff, at, f"{path}.details.diff") if isinstance(diff, str) else None,
            details=None if details is None else self.json(details, at, f"{path}.details"),
            terminate=result.terminate,
        )

    def kept(self, kept: KeptResult, at: int) -> shapes.Kept:
        """What is kept aside of a result."""
        if not kept.texts:
            return shapes.Kept(None, len(kept.data))
        text = ""
        if self._read_kept is not None and self._most is not None:
            text = self._read_kept(kept.name, self._most)
        return shapes.Kept(Text(text, sum(kept.texts), at, KEPT), len(kept.data))

    def decisions(
        self, decisions: Iterable[dict[str, Any]], at: int
    ) -> tuple[shapes.HookDecision, ...]:
        """What plugins decided."""
        return tuple([self._decision(each, at, n) for n, each in enumerate(decisions)])

    def _decision(self, given: dict[str, Any], at: int, number: int) -> shapes.HookDecision:
        more = {name: value for name, value in given.items() if name not in ("plugin", "decision")}
        data = self.json(more, at, f"decisions.{number}") if more else None
        return shapes.HookDecision(str(given.get("plugin")), str(given.get("decision")), data)

    def waiting(self, request: WaitingRequest, at: int | None = None) -> shapes.Waiting:
        """A request that waits; ``at`` is the record that says so."""
        asked = request.request
        text = None if asked is None else self.readable(asked, at, "request.request")
        return shapes.Waiting(
            request_id=request.request_id,
            run_id=request.run_id,
            root_run_id=request.root_run_id,
            turn=request.turn,
            position=request.position,
            call_id=request.tool_call_id,
            tool_name=request.tool_name,
            arguments=self.json(request.arguments, at, "request.arguments"),
            asked_by=request.asked_by,
            needs=request.needs,
            request=text,
            assignee=request.assignee,
            asked_at=request.asked_at,
            expires_at=request.expires_at,
            until=request.until,
            event=request.event,
        )

    def readable(self, value: Any, at: int | None, path: str) -> Text:
        """A value as text, if it is one, or as JSON."""
        is_text = isinstance(value, str)
        return self.text(value, at, path) if is_text else self.json(value, at, path)


def _summary(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        return one_line(_short(arguments), 120)
    return one_line(", ".join([f"{key}={_short(value)}" for key, value in arguments.items()]), 120)


def _short(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:59] + "…")
    return one_line(encode_json(value).decode(), 60)


def _source(annotation: Annotation) -> shapes.Source:
    url = None if annotation.url is None else annotation.url[:_CUT]
    title = None if annotation.title is None else annotation.title[:500]
    quote = None if annotation.quote is None else annotation.quote[:_CUT]
    return shapes.Source(annotation.kind, title, url, quote)


# --- items ------------------------------------------------------------------------------------


class _Running(Struct, frozen=True):
    """A call of the newest answer."""

    name: str
    call_id: str
    started_at: int | None = None


class Timeline:
    """Makes an item of each record of a run."""

    def __init__(
        self, parts: Parts | None = None, *, prices: dict[str, Price] | None = None
    ) -> None:
        self._parts = parts or Parts()
        self._prices = prices
        self.price: Price | None = None
        """That of the model, from the first record on."""
        self.turn = 0
        self.attempt = 1
        self.asked_at: int | None = None
        self.last_at = 0
        """The time of the newest record."""
        self.calls: dict[int, _Running] = {}
        """The calls of the newest answer, by position."""
        self._positions: dict[str, int] = {}
        """Of the calls that have requests."""
        self._suspended_at: int | None = None
        self._is_over = True
        """Whether the turn has all it can have, so that what changes a request is for the next."""

    def copy(self) -> Timeline:
        """Return a timeline that goes on from here by itself."""
        other = Timeline(self._parts, prices=self._prices)
        other.price, other.turn, other.attempt = self.price, self.turn, self.attempt
        other.asked_at, other._suspended_at = self.asked_at, self._suspended_at
        other._is_over, other.last_at = self._is_over, self.last_at
        other.calls, other._positions = dict(self.calls), dict(self._positions)
        return other

    def name_of(self, position: int, given: str | None = None) -> str:
        """Return the name of the tool of a call."""
        return given or (self.calls[position].name if position in self.calls else "?")

    def price_of(self, model: ModelRef | None) -> Price | None:
        """Return the price of a model; None is the model of the run."""
        return self.price if model is None else known_price(model, self._prices)

    def note(self, record: Record) -> int | None:
        """Keep what later items need. Return how long the step took that the record ends."""
        before, self.last_at = self.last_at, record.at
        match record.entry:
            case RunBegan() as began:
                self.price = known_price(began.model_ref, self._prices)
            case Asked(turn=turn, attempt=attempt):
                self.turn, self.attempt, self.asked_at = turn, attempt, record.at
                self._is_over = False
            case Consulted(turn=turn):
                self._begin(turn)
                return max(0, record.at - before)
            case MessagesAdded(turn=int() as turn):
                self._begin(turn)
            case Answered() as answered:
                if answered.discarded is None:
                    calls = enumerate(answered.message.tool_calls)
                    self.calls = {n: _Running(call.name, call.id) for n, call in calls}
                    self._positions = {}
                self._is_over = answered.discarded in BROKEN_OFF or not (
                    answered.discarded or self.calls
                )
                return None if self.asked_at is None else max(0, record.at - self.asked_at)
            case ToolStarted() as started:
                call = _Running(started.tool_name, started.tool_call_id, record.at)
                self.calls[started.position] = call
            case ToolEnded(position=position):
                began_at = self.calls[position].started_at if position in self.calls else None
                return None if began_at is None else max(0, record.at - began_at)
            case CallSuspended(position=position, request=WaitingRequest() as request):
                self._positions[request.request_id] = position
            case BatchEnded():
                self._is_over = True
            case RunSuspended():
                self._suspended_at = record.at
            case RunResumed():
                since, self._suspended_at = self._suspended_at, None
                return None if since is None else max(0, record.at - since)
            case _:
                pass
        return None

    def _begin(self, turn: int) -> None:
        """Begin a turn with what plugins do before its first request."""
        if turn > self.turn:
            self.turn, self.attempt, self.asked_at, self._is_over = turn, 1, None, False

    def turn_of(self, record: Record) -> int:
        """Return the turn of a record that was just noted."""
        match record.entry:
            case ContextEdited() | ToolsGated() | ToolsChanged() | MessagesAdded(source="turn"):
                return self.turn + self._is_over
            case _:
                return self.turn

    def take(self, record: Record) -> Item:
        """Return the item of the next record."""
        ms = self.note(record)
        seq, parts = record.seq, self._parts
        place: dict[str, Any] = {"seq": seq, "at": record.at, "turn": self.turn_of(record)}
        match record.entry:
            case RunBegan() as began:
                return self._began(began, place)
            case MessagesAdded() as added:
                return shapes.Added(
                    **place,
                    source=added.source,
                    messages=parts.messages(added.messages, seq, "messages"),
                    purposes=added.purposes,
                    steering=added.steering,
                    plugin=added.plugin,
                )
            case SteeringAccepted() as accepted:
                return shapes.Steered(
                    **place,
                    number=accepted.number,
                    message=parts.message(accepted.message, 0, seq, "message"),
                    when=accepted.when,
                    is_mail=accepted.mail is not None,
                )
            case ContextEdited() as edited:
                return self.context_changed(edited, place)
            case ToolsGated(plugin=plugin, allow=allow):
                return shapes.Gated(**place, plugin=plugin, allow=allow)
            case ToolsChanged(added=new, removed=removed):
                return shapes.ToolsChange(**place, added=tuple(new), removed=removed)
            case Asked(attempt=attempt, messages=messages):
                return shapes.RequestSent(**place, attempt=attempt, messages=messages)
            case Answered() as answered:
                return self._answer(answered, ms, place)
            case Consulted() as consulted:
                return self._consultation(consulted, ms or 0, place)
            case _:
                return self._of_a_call(record, ms, place)

    def _of_a_call(self, record: Record, ms: int | None, place: dict[str, Any]) -> Item:
        seq, parts = record.seq, self._parts
        match record.entry:
            case ToolStarted() as started:
                changed = started.arguments
                return shapes.ToolStart(
                    **place,
                    position=started.position,
                    call_id=started.tool_call_id,
                    name=started.tool_name,
                    arguments=None if changed is None else parts.json(changed, seq, "arguments"),
                )
            case ToolWithdrawn(position=position, tool_call_id=call_id):
                return shapes.ToolWithdraw(**place, position=position, call_id=call_id)
            case ToolProgress(position=position, partial=partial):
                text = parts.text(partial.plain_text, seq, "partial.content.0.text")
                return shapes.ToolProgressed(
                    **place, position=position, text=text, narration=partial.narration
                )
            case ToolEnded() as ended:
                return self._tool_result(ended, ms, place)
            case CallSuspended() as waits:
                request = waits.request
                return shapes.WaitingCall(
                    **place,
                    position=waits.position,
                    call_id=waits.tool_call_id,
                    name=self.name_of(waits.position, waits.tool_name),
                    request=None if request is None else parts.waiting(request, seq),
                    child_run_ids=waits.child_run_ids,
                    decisions=parts.decisions(waits.decisions, seq),
                )
            case BatchEnded(positions=positions):
                return shapes.BatchDone(**place, order=positions)
            case _:
                return self._of_the_run(record, ms, place)

    def _of_the_run(self, record: Record, ms: int | None, place: dict[str, Any]) -> Item:
        seq, parts = record.seq, self._parts
        match record.entry:
            case CancelReceived(reason=reason):
                return shapes.Cancelled(**place, reason=reason)
            case RunSuspended(usage=usage):
                return shapes.Suspended(**place, tokens=tokens_of(usage))
            case RequestDecided() as decided:
                return self._decided(decided, place)
            case RunResumed():
                return shapes.Resumed(**place, ms=ms)
            case RunEnded() as ended:
                return shapes.Ended(
                    **place,
                    outcome=ended.outcome,
                    limit=ended.limit,
                    tokens=tokens_of(ended.usage),
                    tree_tokens=tokens_of(ended.tree_usage),
                )
            case RunFailed() as failed:
                partial = () if failed.partial is None else failed.partial.content
                return shapes.Failed(
                    **place,
                    error=failed.error,
                    text=parts.text(failed.text, seq, "text"),
                    reason=failed.reason,
                    partial=parts.blocks(partial, seq, "partial.content.0.text"),
                    undelivered=parts.messages(failed.undelivered, seq, "undelivered"),
                    tokens=tokens_of(failed.usage),
                    tree_tokens=tokens_of(failed.tree_usage),
                )
            case entry:
                plain: dict[str, Any] = msgspec.to_builtins(entry)
                data = parts.json(plain, seq, "")
                return shapes.OtherRecord(**place, name=str(plain["kind"]), data=data)

    def _began(self, began: RunBegan, place: dict[str, Any]) -> Item:
        seq, parts = place["seq"], self._parts
        return shapes.Began(
            **place,
            system_prompt=parts.text(began.system_prompt, seq, "system_prompt"),
            history=len(began.history),
            messages=parts.messages(began.prompts, seq, "prompts", len(began.history)),
            model=model_name(began.model_ref),
            provider=began.provider,
            tools=tuple(began.tools),
            plugins=began.plugins,
            tool_source=began.tool_source,
        )

    def context_changed(
        self, edited: ContextEdited, place: dict[str, Any]
    ) -> shapes.ContextChanged:
        """Return what a plugin changed."""
        seq, edits = place["seq"], edited.edits
        changes = [
            shapes.ContextChange(
                edit.start,
                edit.removed,
                self._parts.messages(
                    edit.inserted[:_MOST_INSERTED], seq, f"edits.{n}.2", edit.start
                ),
                max(0, len(edit.inserted) - _MOST_INSERTED),
            )
            for n, edit in enumerate(edits[:_MOST_INSERTED])
        ]
        return shapes.ContextChanged(
            **place,
            plugin=edited.plugin,
            is_lasting=edited.is_lasting,
            changes=tuple(changes),
            more=max(0, len(edits) - _MOST_INSERTED),
        )

    def _answer(self, answered: Answered, ms: int | None, place: dict[str, Any]) -> Item:
        message = answered.message
        usage, price = message.usage, self.price
        raised = None if answered.raised is None else ": ".join(answered.raised)
        return shapes.Answer(
            **place,
            attempt=self.attempt,
            blocks=self._parts.blocks(message.content, place["seq"], "message.content"),
            stop_reason=str(message.stop_reason),
            tokens=None if usage is None else tokens_of(usage),
            cost=None if usage is None or price is None else price.of(usage),
            ms=ms,
            discarded=answered.discarded,
            error=answered.error,
            error_text=answered.error_text or raised or message.error_message,
            sources=tuple(map(_source, message.annotations)),
        )

    def _consultation(
        self, consulted: Consulted, ms: int, place: dict[str, Any]
    ) -> shapes.Consultation:
        message, model, seq = consulted.message, consulted.model, place["seq"]
        usage, price = message.usage, self.price_of(model)
        text = consulted.error_text
        return shapes.Consultation(
            **place,
            plugin=consulted.plugin,
            model=None if model is None else model_name(model) or model.provider or "another model",
            messages=consulted.messages,
            blocks=self._parts.blocks(message.content, seq, "message.content"),
            stop_reason=str(message.stop_reason),
            tokens=None if usage is None else tokens_of(usage),
            cost=None if usage is None or price is None else price.of(usage),
            ms=ms,
            error=consulted.error,
            error_text=None if text is None else self._parts.text(text, seq, "error_text"),
        )

    def _tool_result(self, ended: ToolEnded, ms: int | None, place: dict[str, Any]) -> Item:
        seq, parts, made = place["seq"], self._parts, ended.by_runtime
        result, kept = parts.result(ended.result, seq, "result"), ended.kept
        given = None if ended.given is None else parts.result(ended.given, seq, "given")
        if kept is not None:
            result = replace(result, kept=parts.kept(kept, seq))
            if given is not None and kept.is_given:  # the record has its content once
                given = replace(given, blocks=result.blocks, kept=result.kept)
        raised = None
        if ended.raised is not None:
            raised = f"{ended.raised}: {ended.raised_text or ''}".removesuffix(": ")
        elif ended.hook_raised is not None:
            raised = ": ".join(ended.hook_raised)
        return shapes.ToolResulted(
            **place,
            position=ended.position,
            call_id=ended.tool_call_id,
            name=self.name_of(ended.position, ended.tool_name),
            result=result,
            given=given,
            decisions=parts.decisions(ended.decisions, seq),
            by_runtime=None if made is None else ": ".join(filter(None, [made.kind, made.reason])),
            raised=raised,
            ms=ms,
        )

    def _decided(self, decided: RequestDecided, place: dict[str, Any]) -> Item:
        plain: dict[str, Any] = msgspec.to_builtins(decided.decision)
        kind = plain.pop("decision")
        path = "decision"
        data: Any = plain or None
        if len(plain) == 1:
            name, data = next(iter(plain.items()))
            path = f"decision.{name}"
        return shapes.Decided(
            **place,
            request_id=decided.request_id,
            position=self._positions.get(decided.request_id),
            decision=kind,
            data=None if data is None else self._parts.readable(data, place["seq"], path),
            by=decided.by,
        )


def model_name(model: ModelRef) -> str | None:
    """Return the name of a model."""
    return model.names[0] if model.names else None
