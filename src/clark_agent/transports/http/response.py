"""What one call to a provider has brought, in our terms.

A decoder knows its provider's wire and tells an `Answer` what came: text, reasoning, pieces of tool
calls, a finish reason, usage. What that means is decided here, once for all providers:

- thoughts between tags are kept apart from the visible text, and nothing that was said is lost;
- a piece of a tool call belongs to the call of its index. The first id that comes with it stays,
  because gateways change ids in mid-stream; a name that comes again does not make it longer;
- fragments of one structured reasoning item are joined, because that is how they must go back;
- an answer that took as many tokens as it was allowed is cut off, whatever the server says; one
  with tool calls is a request for tools, one without is not;
- an answer without text, images and calls cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clark_agent.messages.thinking import Piece, ThinkingTags, ThoughtSplitter
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    MessageAssembler,
    ReasoningChunk,
    ReasoningDetailsChunk,
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
    """Why there is no answer."""

    kind: StreamErrorKind
    message: str
    retry_after: float | None = None
    """How many seconds the server asks to wait."""
    cause: Exception | None = None
    status: int | None = None
    """Of the response that told it."""


class ProviderFailure(Exception):
    """Raised by a decoder: the provider told a failure inside its stream."""

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
        """Whether its arguments are: nothing can follow an object."""
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
        self.finish: StopReason | None = None
        self.withheld: str | None = None
        """Why the provider did not let the answer out, if it says so."""
        self.paused: dict[str, Any] | None = None
        """Set when the provider wants to be asked to go on, with what it needs for that."""
        self.heard = 0
        """How many characters of text have come, tags included."""
        self.unreadable: Failure | None = None
        """That an event could not be read: the answer may lack something."""
        self._cap = cap
        self._tags: ThinkingTags = thinking_tags
        self._new_id = new_id
        self._has_items = False
        self._clean = clean  # takes secrets out of what is not the model's own words
        self._chunks: list[StreamChunk] = []
        self._assembler = MessageAssembler(new_id)
        self._splitter = ThoughtSplitter(thinking_tags) if thinking_tags != "off" else None
        self._said = 0
        self._annotations: list[Annotation] = []  # with places in all that has come
        self._details: list[_Item] = []
        self._calls: dict[int | str, _Call] = {}
        self._last_call: _Call | None = None
        self._has_told = False
        self._is_usable = False
        self._usage_before: Usage | None = None

    def continued(self) -> Answer:
        """The answer that goes on where this one paused. This one must not be told any more.

        Several can be made, until one of them has told something: what a failed one was told does
        not show in the next.
        """
        more = Answer(
            cap=self._cap, thinking_tags=self._tags, new_id=self._new_id, clean=self._clean
        )
        more.heard, more._said = self.heard, self._said
        more._assembler = self._assembler  # fed with nothing but what is told
        more._calls = {f"before {n}": call for n, call in enumerate(self._calls.values())}
        more._is_usable, more._has_items = self._is_usable, self._has_items
        more._usage_before = self._total_usage()
        if self._splitter is None:
            more._splitter = None
        return more

    # --- what decoders tell ---------------------------------------------------------------------

    def text(self, delta: str) -> None:
        """More of what people see."""
        if not delta:
            return
        if self._details:
            self._end_details()
        self.heard += len(delta)
        splitter = self._splitter
        if splitter is None or splitter.passes(delta):
            self._visible(delta)
        else:
            self._tell_pieces(splitter.feed(delta))

    def reasoning(self, delta: str) -> None:
        """More of the readable reasoning from the provider's own channel."""
        if delta:
            self._tell(ReasoningChunk(delta))

    def reasoning_details(self, items: Iterable[Any]) -> None:
        """More structured reasoning: whole items, or fragments of the newest one."""
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
        """More of the tool call that the provider numbers ``key``.

        Without a number a piece that brings a name and another id begins a call, as does one with a
        name and arguments behind a call that is complete; any other goes on with the newest.
        """
        self._let_go()
        call = self._call_for(key, call_id, name, arguments)
        id_delta = name_delta = None
        if call_id and not call.id:
            id_delta = call.id = call_id
        if name and not (call.name and call.arguments):
            # Whole, a piece of it, or the whole of it again with more behind.
            name_delta = name.removeprefix(call.name)
            call.name += name_delta
        if arguments:
            call.arguments.append(arguments)
        if id_delta or name_delta or arguments:
            self._is_usable = True
            self._tell(ToolCallChunk(call.index, id_delta, name_delta, arguments or None))

    def custom_call(
        self,
        key: int | str | None,
        call_id: str | None = None,
        name: str | None = None,
        text: str | None = None,
    ) -> None:
        """More of a call whose input is plain text. It becomes the argument ``input``."""
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
        """A whole block. ``is_answer``: the answer can be used even if nothing else comes."""
        self._let_go()
        self._has_items = True
        if is_answer or isinstance(block, ImageContent):
            self._is_usable = True
        self._tell(BlockChunk(block if self._clean is None else self._clean(block)))

    def annotate(self, annotation: Annotation) -> None:
        """A source. Its places are counted in all the text that has come, as by `heard`."""
        self._annotations.append(annotation if self._clean is None else self._clean(annotation))
        if self._splitter is None:
            self._tell_annotations()

    # --- what the transport reads ---------------------------------------------------------------

    def take(self) -> list[StreamChunk]:
        """The chunks since the last time."""
        chunks, self._chunks = self._chunks, []
        return chunks

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been told yet; of one that goes on after a pause: nothing more."""
        return not self._has_told

    @property
    def has_calls(self) -> bool:
        """Whether the model asked for a tool."""
        return bool(self._calls)

    def close(self, *, is_whole: bool = True) -> None:
        """Nothing more will come: what was held back is told.

        Of an answer that broke off, half a tag is not shown: it counts as thought.
        """
        if self._splitter is not None:
            rest = self._splitter.flush()
            self._tell_pieces(rest if is_whole else [("thought", text) for _, text in rest])
        self._end_details()
        for call in self._calls.values():
            if call.is_custom:
                call.is_custom = False
                call.arguments.append('"}')
                self._tell(ToolCallChunk(call.index, None, None, '"}'))
        self._tell_annotations()

    def message(self) -> AssistantMessage | Failure:
        """The whole answer, or why it cannot be used. Everything has been told by now."""
        if self.unreadable is not None:
            return self.unreadable
        reason = self._stop_reason()
        if reason is StopReason.ERROR:
            return Failure(StreamErrorKind.TRANSIENT, "the provider says that it failed")
        if not self._is_usable and self.paused is None and reason is not StopReason.MAX_TOKENS:
            return self._nothing()
        return self._assembler.message(reason, usage=self._total_usage())

    def partial(self, failure: Failure) -> AssistantMessage:
        """What has come of an answer that failed."""
        is_aborted = failure.kind is StreamErrorKind.ABORTED
        reason = StopReason.ABORTED if is_aborted else StopReason.ERROR
        usage = self._total_usage()
        return self._assembler.message(reason, error_message=failure.message, usage=usage)

    # --- inside ---------------------------------------------------------------------------------

    def _tell(self, chunk: StreamChunk) -> None:
        self._has_told = True
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
            self._said += len(delta)
            self._tell(TextChunk(delta))

    def _tell_pieces(self, pieces: Iterable[Piece]) -> None:
        for kind, text in pieces:
            if kind == "said":
                self._visible(text)
            else:
                self._tell(ThinkingChunk(text))
        if self._splitter is not None and self._splitter.is_settled:
            self._splitter = None  # all that follows is text

    def _release(self) -> None:
        """Tell text that was held back because it might have become a tag."""
        if self._splitter is not None and self._splitter.is_holding:
            self._tell_pieces(self._splitter.flush())

    def _let_go(self) -> None:
        """Something else comes: what was held back because it might have become more is told."""
        if self._details:
            self._end_details()
        self._release()

    def _tell_annotations(self) -> None:
        """Tell the sources, with places in the visible text alone.

        What is hidden stands in front of it; where thoughts may be anywhere, nobody knows.
        """
        hidden = self.heard - self._said
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
            self._tell(AnnotationChunk(annotation))
        self._annotations.clear()

    def _end_details(self) -> None:
        if self._details:
            items, self._details = self._details, []
            self._tell(ReasoningDetailsChunk(tuple([item.build() for item in items])))

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
            # What follows under this number belongs to the new one.
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

    def _nothing(self) -> Failure:
        if self.withheld is not None:
            return Failure(StreamErrorKind.FATAL, self.withheld)
        text = "neither text nor a tool call came"
        if self._has_items:
            text += ", only items of the provider's own tools"
        elif not self._assembler.empty:
            text += ", only reasoning"
        return Failure(StreamErrorKind.ZERO_OUTPUT_TRANSPORT, text)


# The fields of a structured reasoning item that come piece by piece.
_GROWING = ("text", "summary")


class _Item:
    """A structured reasoning item, whole or in fragments."""

    __slots__ = ("_grown", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._grown: dict[str, list[str]] = {}

    def take(self, fragment: Any) -> bool:
        """Join another fragment of this item. False: it begins another one."""
        if not self._goes_on_with(fragment):
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
        """The item, untouched if it came in one piece."""
        for name, pieces in self._grown.items():
            self._value[name] = "".join(pieces)
        return self._value

    def _goes_on_with(self, fragment: Any) -> bool:
        first = self._value
        if not isinstance(first, dict) or not isinstance(fragment, dict):
            return False
        if any(first.get(name) != fragment.get(name) for name in ("type", "index")):
            return False
        if fragment.get("type") not in ("reasoning.text", "reasoning.summary"):
            return False  # a blob comes whole, and of the unknown nothing is known
        if fragment.get("index") is None and first.get("signature"):
            return False  # without a number, the signature is what closes an item
        ids = (first.get("id"), fragment.get("id"))
        return None in ids or ids[0] == ids[1]


def _is_another(call: _Call, call_id: str | None, name: str, arguments: str | None) -> bool:
    """Whether a piece with that id and name begins a call, though its number is that of another.

    Some servers number all calls alike. A name never follows complete arguments, and a name that
    has nothing to do with the one before is no more of it.
    """
    if not call_id:
        return not call.id and bool(arguments) and call.is_complete
    if not call.id or call_id == call.id:
        return False
    return call.is_complete if call.arguments else not name.startswith(call.name)
