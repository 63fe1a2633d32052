"""The answer of one call, independent of the provider.

A decoder knows its provider's wire format and passes what it reads to an `Answer`: text, reasoning,
fragments of tool calls, a finish reason, usage. The rules for all providers are here:

- thoughts between tags are separated from the visible text, and no text is lost;
- a fragment of a tool call belongs to the call of its index. The first id of a call stays, because
  gateways change ids in mid-stream. A repeated name is not appended;
- fragments of one structured reasoning item are joined, because it must be sent back as one item;
- the stop reason is ``MAX_TOKENS`` if the answer used all tokens that it was allowed, whatever the
  server reports. Otherwise an answer with tool calls stops for tools, and one without does not;
- an answer without text, images and calls is a failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clark_agent._text import well_formed
from clark_agent.messages.thinking import Piece, ThinkingTags, ThoughtSplitter
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    MessageAssembler,
    ReasoningChunk,
    ReasoningDetailsChunk,
    ResponseInfo,
    StreamChunk,
    StreamErrorKind,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
)
from clark_agent.types import (
    Annotation,
    AssistantMessage,
    ImageContent,
    ProviderContent,
    StopReason,
    Usage,
)

__all__ = ["Answer", "Failure", "ProviderFailure"]


class Failure(Struct, frozen=True):
    """Why a call failed."""

    kind: StreamErrorKind
    message: str
    retry_after: float | None = None
    """How many seconds the server asks to wait."""
    cause: Exception | None = None
    status: int | None = None
    """The HTTP status of the response that reported the failure."""


class ProviderFailure(Exception):
    """Raised by a decoder: the provider reported a failure inside its stream."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Call:
    __slots__ = ("arguments", "id", "index", "is_custom", "name")

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = ""
        self.name = ""
        self.is_custom = False
        self.arguments: list[str] = []

    @property
    def is_complete(self) -> bool:
        """Whether its arguments are valid JSON: nothing can follow a complete object."""
        try:
            return bool(self.arguments) and msgspec.json.decode("".join(self.arguments)) is not None
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            return False


class Answer:
    """Collects an answer while it streams in."""

    def __init__(
        self,
        *,
        cap: int | None = None,
        thinking_tags: ThinkingTags = "leading",
        new_id: Callable[[], str] | None = None,
        clean: Callable[[Any], Any] | None = None,
    ) -> None:
        self.usage: Usage | None = None
        self.response: ResponseInfo | None = None
        """The id and the model that the provider has named."""
        self.finish: StopReason | None = None
        self.withheld: str | None = None
        """Why the provider withheld the answer, if it gives a reason."""
        self.paused: dict[str, Any] | None = None
        """Set when the provider paused the answer: the fields to send with the continuation."""
        self.received = 0
        """How many characters of text were received, tags included."""
        self.unreadable: Failure | None = None
        """Set when an event could not be decoded: the answer may be incomplete."""
        self._cap = cap
        self._tags: ThinkingTags = thinking_tags
        self._new_id = new_id
        self._has_items = False
        self._clean = clean  # redacts blocks and annotations
        self._chunks: list[StreamChunk] = []
        self._assembler = MessageAssembler(new_id)
        self._splitter = ThoughtSplitter(thinking_tags) if thinking_tags != "off" else None
        self._visible_size = 0
        self._annotations: list[Annotation] = []  # with positions in all received text
        self._details: list[_Item] = []
        self._calls: dict[int | str, _Call] = {}
        self._last_call: _Call | None = None
        self._has_emitted = False
        self._is_usable = False
        self._usage_before: Usage | None = None

    def continued(self) -> Answer:
        """Return a new answer that continues this paused one. Do not feed this one any more.

        Can be called again for a retry, as long as no continuation has emitted a chunk: what a
        failed continuation received without emitting is not in the next one.
        """
        more = Answer(
            cap=self._cap, thinking_tags=self._tags, new_id=self._new_id, clean=self._clean
        )
        more.received, more._visible_size = self.received, self._visible_size
        more._assembler = self._assembler  # holds only emitted chunks
        more._calls = {f"before {n}": call for n, call in enumerate(self._calls.values())}
        more._is_usable, more._has_items = self._is_usable, self._has_items
        more._usage_before = self._total_usage()
        if self._splitter is None:
            more._splitter = None
        return more

    # --- called by decoders ---------------------------------------------------------------------

    def named(self, response_id: Any, model: Any) -> None:
        """Keep the response's id and model, unless they are known or not text."""
        if self.response is None:
            given = (response_id, model)
            texts = [well_formed(each) if isinstance(each, str) else None for each in given]
            if any(texts):
                self.response = ResponseInfo(*[text or None for text in texts])

    def text(self, delta: str) -> None:
        """Add visible text. It may contain thinking tags."""
        if not delta:
            return
        if self._details:
            self._end_details()
        self.received += len(delta)
        splitter = self._splitter
        if splitter is None or splitter.passes(delta):
            self._visible(delta)
        else:
            self._emit_pieces(splitter.feed(delta))

    def reasoning(self, delta: str) -> None:
        """Add readable reasoning from the provider's own channel."""
        if delta:
            self._emit(ReasoningChunk(delta))

    def reasoning_details(self, items: Iterable[Any]) -> None:
        """Add structured reasoning: whole items, or fragments of the newest one."""
        self._release()
        for item in items:
            if not self._details or not self._details[-1].take(item):
                self._details.append(_Item(item))

    def call(
        self,
        key: int | str | None,
        call_id: str | None = None,
        name: str | None = None,
        arguments: str | None = None,
    ) -> None:
        """Add a fragment of the tool call that the provider numbers ``key``.

        A fragment without a number starts a new call if it has a name and another id, or a name and
        arguments after a complete call. Any other belongs to the newest call.
        """
        self._flush_held()
        call = self._call_for(key, call_id, name, arguments)
        id_delta = name_delta = None
        if call_id and not call.id:
            id_delta = call.id = call_id
        if name and not (call.name and call.arguments):
            # The whole name, a part of it, or the name so far with more appended.
            name_delta = name.removeprefix(call.name)
            call.name += name_delta
        if arguments:
            call.arguments.append(arguments)
        if id_delta or name_delta or arguments:
            self._is_usable = True
            self._emit(ToolCallChunk(call.index, id_delta, name_delta, arguments or None))

    def custom_call(
        self,
        key: int | str | None,
        call_id: str | None = None,
        name: str | None = None,
        text: str | None = None,
    ) -> None:
        """Add a fragment of a call with plain text input. It becomes the argument ``input``."""
        written = json.dumps(text)[1:-1] if text else None
        self.call(key, call_id, name)
        call = self._last_call
        assert call is not None, "there is a call by now"
        if not call.is_custom:
            call.is_custom = True
            written = '{"input":"' + (written or "")
        if written:
            self.call(key, arguments=written)

    def block(self, block: ImageContent | ProviderContent, *, is_answer: bool = False) -> None:
        """Add a whole block. ``is_answer``: the answer is usable even without other content."""
        self._flush_held()
        self._has_items = True
        if is_answer or isinstance(block, ImageContent):
            self._is_usable = True
        self._emit(BlockChunk(block if self._clean is None else self._clean(block)))

    def annotate(self, annotation: Annotation) -> None:
        """Add a source. Its positions count all received text, as `received` does."""
        self._annotations.append(annotation if self._clean is None else self._clean(annotation))
        if self._splitter is None:
            self._emit_annotations()

    # --- called by the transport ----------------------------------------------------------------

    def take(self) -> list[StreamChunk]:
        """Return the chunks since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks

    @property
    def is_empty(self) -> bool:
        """Whether no chunk was emitted yet; chunks before a pause do not count."""
        return not self._has_emitted

    @property
    def has_calls(self) -> bool:
        """Whether the answer has a tool call."""
        return bool(self._calls)

    def close(self, *, is_whole: bool = True) -> None:
        """Emit what was held back, after the last input.

        If the answer broke off, an incomplete tag is emitted as a thought and not as visible text.
        """
        if self._splitter is not None:
            rest = self._splitter.flush()
            self._emit_pieces(rest if is_whole else [("thought", text) for _, text in rest])
        self._end_details()
        for call in self._calls.values():
            if call.is_custom:
                call.is_custom = False
                call.arguments.append('"}')
                self._emit(ToolCallChunk(call.index, None, None, '"}'))
        self._emit_annotations()

    def message(self) -> AssistantMessage | Failure:
        """Return the whole answer, or why it cannot be used. Call it after `close`."""
        if self.unreadable is not None:
            return self.unreadable
        reason = self._stop_reason()
        if reason is StopReason.ERROR:
            return Failure(StreamErrorKind.TRANSIENT, "the provider reported a failure")
        if not self._is_usable and self.paused is None and reason is not StopReason.MAX_TOKENS:
            return self._failure_if_empty()
        return self._assembler.message(reason, usage=self._total_usage())

    def partial(self, failure: Failure) -> AssistantMessage:
        """Return what was emitted of an answer that failed."""
        is_aborted = failure.kind is StreamErrorKind.ABORTED
        reason = StopReason.ABORTED if is_aborted else StopReason.ERROR
        usage = self._total_usage()
        return self._assembler.message(reason, error_message=failure.message, usage=usage)

    # --- internals ------------------------------------------------------------------------------

    def _emit(self, chunk: StreamChunk) -> None:
        self._has_emitted = True
        self._assembler.feed(chunk)
        self._chunks.append(chunk)

    def _total_usage(self) -> Usage | None:
        if self._usage_before is None or self.usage is None:
            return self.usage or self._usage_before
        return self._usage_before + self.usage

    def _visible(self, delta: str) -> None:
        if delta:
            if not self._is_usable and not delta.isspace():
                self._is_usable = True
            self._visible_size += len(delta)
            self._emit(TextChunk(delta))

    def _emit_pieces(self, pieces: Iterable[Piece]) -> None:
        for kind, text in pieces:
            if kind == "said":
                self._visible(text)
            else:
                self._emit(ThinkingChunk(text))
        if self._splitter is not None and self._splitter.is_settled:
            self._splitter = None  # no more thoughts can follow

    def _release(self) -> None:
        """Emit text that was held back because it might have become a tag."""
        if self._splitter is not None and self._splitter.is_holding:
            self._emit_pieces(self._splitter.flush())

    def _flush_held(self) -> None:
        """Emit everything that was held back, before a chunk of another kind."""
        if self._details:
            self._end_details()
        self._release()

    def _emit_annotations(self) -> None:
        """Emit the sources, with positions in the visible text alone.

        Leading thoughts shift all positions by their length. If thoughts may be anywhere, the
        positions are unknown and dropped.
        """
        hidden = self.received - self._visible_size
        for annotation in self._annotations:
            start, end = annotation.start, annotation.end
            if hidden and self._tags == "anywhere":
                annotation = replace(annotation, start=None, end=None)
            elif hidden and (start is not None or end is not None):
                annotation = replace(
                    annotation,
                    start=None if start is None else max(0, start - hidden),
                    end=None if end is None else max(0, end - hidden),
                )
            self._emit(AnnotationChunk(annotation))
        self._annotations.clear()

    def _end_details(self) -> None:
        if self._details:
            items, self._details = self._details, []
            self._emit(ReasoningDetailsChunk(tuple([item.build() for item in items])))

    def _call_for(
        self, key: int | str | None, call_id: str | None, name: str | None, arguments: str | None
    ) -> _Call:
        last = self._last_call
        if key is None:
            begins = name and (
                call_id != (last and last.id)
                if call_id
                else arguments and last is not None and last.is_complete
            )
            if last is not None and not begins:
                return last
            key = f"unnumbered {len(self._calls)}"
        call = self._calls.get(key)
        if call is not None and name and _is_another(call, call_id, name, arguments):
            # Later fragments with this number belong to the new call.
            self._calls[f"{key} before {len(self._calls)}"] = call
            call = self._calls[key] = _Call(len(self._calls) - 1)
        if call is None:
            call = self._calls[key] = _Call(len(self._calls))
        self._last_call = call
        return call

    def _stop_reason(self) -> StopReason:
        usage, finish = self.usage, self.finish
        if self._cap is not None and usage is not None and usage.output_tokens >= self._cap:
            return StopReason.MAX_TOKENS
        if finish in (None, StopReason.END_TURN, StopReason.TOOL_USE):
            return StopReason.TOOL_USE if self._calls else StopReason.END_TURN
        return finish

    def _failure_if_empty(self) -> Failure:
        if self.withheld is not None:
            return Failure(StreamErrorKind.FATAL, self.withheld)
        text = "the answer has neither text nor a tool call"
        if self._has_items:
            text += ", only items of the provider's own tools"
        elif not self._assembler.empty:
            text += ", only reasoning"
        return Failure(StreamErrorKind.ZERO_OUTPUT_TRANSPORT, text)


# The fields of a structured reasoning item that arrive in fragments.
_GROWING = ("text", "summary")


class _Item:
    """A structured reasoning item, whole or in fragments."""

    __slots__ = ("_grown", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._grown: dict[str, list[str]] = {}

    def take(self, fragment: Any) -> bool:
        """Join another fragment of this item. Returns False if it starts a new item."""
        if not self._is_continued_by(fragment):
            return False
        if not self._grown:
            self._value = dict(self._value)
        for name, value in fragment.items():
            known = self._value.get(name)
            if name in _GROWING and isinstance(known, str) and isinstance(value, str):
                self._grown.setdefault(name, [known]).append(value)
            elif known is None:
                self._value[name] = value
        return True

    def build(self) -> Any:
        """Return the item, unchanged if it arrived whole."""
        for name, pieces in self._grown.items():
            self._value[name] = "".join(pieces)
        return self._value

    def _is_continued_by(self, fragment: Any) -> bool:
        first = self._value
        if not isinstance(first, dict) or not isinstance(fragment, dict):
            return False
        if any(first.get(name) != fragment.get(name) for name in ("type", "index")):
            return False
        if fragment.get("type") not in ("reasoning.text", "reasoning.summary"):
            return False  # encrypted items arrive whole; unknown types are not joined
        if fragment.get("index") is None and first.get("signature"):
            return False  # without an index, the signature ends an item
        ids = (first.get("id"), fragment.get("id"))
        return None in ids or ids[0] == ids[1]


def _is_another(call: _Call, call_id: str | None, name: str, arguments: str | None) -> bool:
    """Whether a fragment with that id and name starts a new call under a number already in use.

    Some servers give all calls the same number. A name never follows complete arguments, and a name
    that does not start with the known one does not continue it.
    """
    if not call_id:
        return not call.id and bool(arguments) and call.is_complete
    if not call.id or call_id == call.id:
        return False
    return call.is_complete if call.arguments else not name.startswith(call.name)
