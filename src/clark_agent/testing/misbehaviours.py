"""Server behaviour outside any specification: a set of responses to test a transport with.

Each response is written in terms that every wire format has (`Say`, `Reason`, `Call`, …), together
with the required result. The author of a transport writes a function that turns these steps into
the bytes of the provider, serves them, and checks the events with `Misbehaviour.problems`.

    for case in MISBEHAVIOURS:
        events = await ask(my_transport, serving=my_wire(case.steps))
        assert not case.problems(events), case.name

A disconnect can happen at any byte: `cut_anywhere_problems` checks what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from clark_agent.stream import Done, Error, StreamErrorKind, StreamEvent
from clark_agent.testing.transport_kit import check_events_of
from clark_agent.types import (
    AssistantBlock,
    AssistantMessage,
    StopReason,
    TextContent,
    ToolCall,
    Usage,
)

__all__ = [
    "MISBEHAVIOURS",
    "Call",
    "Comment",
    "End",
    "Fail",
    "Finish",
    "Misbehaviour",
    "Reason",
    "ReportUsage",
    "Say",
    "Step",
    "cut_anywhere_problems",
]


class Say(Struct, frozen=True):
    """A delta of visible text."""

    text: str


class Reason(Struct, frozen=True):
    """A delta of readable reasoning, in the provider's own channel."""

    text: str


class Call(Struct, frozen=True):
    """A delta of a tool call. The first delta with an index starts the call."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str | None = None


class Finish(Struct, frozen=True):
    """The finish reason, in the provider's own words."""

    reason: StopReason


class ReportUsage(Struct, frozen=True):
    """Token counts. A wire format with a fixed place for them puts them there."""

    usage: Usage


class Comment(Struct, frozen=True):
    """A keep-alive: a comment line, a ping or an empty event, depending on the wire format."""


class Fail(Struct, frozen=True):
    """An error inside the stream: "overloaded", if the wire format has such a kind."""

    message: str


class End(Struct, frozen=True):
    """The terminal event of the wire format. Without it the bytes just end."""


Step: TypeAlias = Say | Reason | Call | Finish | ReportUsage | Comment | Fail | End


class Misbehaviour(Struct, frozen=True, kw_only=True):
    """A response of a server, and the result that a transport must produce."""

    name: str
    steps: tuple[Step, ...]
    content: tuple[AssistantBlock, ...] | None = None
    """The visible text and the calls of the message (reasoning is not compared); None: anything. A
    call with an empty id may have any id.
    """
    stop_reason: StopReason | None = None
    usage: Usage | None = None
    error: StreamErrorKind | None = None
    """The required kind of failure; None: it must not fail."""
    cap: int | None = None
    """The limit of output tokens in the request."""

    def problems(self, events: Sequence[StreamEvent]) -> list[str]:
        """Return what is wrong with the events of a transport; empty if they are correct."""
        found = check_events_of(events)
        last = events[-1] if events else None
        if isinstance(last, Error):
            if self.error is None:
                return [*found, f"it failed ({last.kind}: {last.message})"]
            if last.kind is not self.error:
                found.append(f"it failed as {last.kind}, not as {self.error}: {last.message}")
            return found
        if not isinstance(last, Done):
            return found
        if self.error is not None:
            return [*found, f"it must fail as {self.error}, but returned {last.message!r}"]
        return found + self._message_problems(last.message)

    def _message_problems(self, message: AssistantMessage) -> list[str]:
        found: list[str] = []
        if self.content is not None and not _same(_seen(message), self.content):
            found.append(f"the content is {_seen(message)!r}, not {self.content!r}")
        if self.stop_reason is not None and message.stop_reason is not self.stop_reason:
            found.append(f"the stop reason is {message.stop_reason}, not {self.stop_reason}")
        if self.usage is not None and message.usage != self.usage:
            found.append(f"the usage is {message.usage!r}, not {self.usage!r}")
        return found


def cut_anywhere_problems(events: Sequence[StreamEvent], whole: AssistantMessage) -> list[str]:
    """Check the events of a response whose connection broke, given the complete message.

    Either nothing was lost, or the stream failed. What arrived must be a prefix of the whole.
    """
    found = check_events_of(events)
    last = events[-1] if events else None
    if isinstance(last, Done) and not _same(_seen(last.message), _seen(whole)):
        found.append(f"a partial message was reported as complete: {last.message!r}")
    if isinstance(last, Error) and not whole.plain_text.startswith(last.partial.plain_text):
        found.append(f"the partial message is not a prefix of the whole: {last.partial!r}")
    return found


def _seen(message: AssistantMessage) -> tuple[AssistantBlock, ...]:
    return tuple([b for b in message.content if isinstance(b, (TextContent, ToolCall))])


def _same(got: Sequence[AssistantBlock], wanted: Sequence[AssistantBlock]) -> bool:
    return len(got) == len(wanted) and all(
        map(_same_block, got, wanted),
    )


def _same_block(got: Any, wanted: Any) -> bool:
    if isinstance(got, ToolCall) and isinstance(wanted, ToolCall) and not wanted.id:
        return bool(got.id) and (got.name, got.arguments) == (wanted.name, wanted.arguments)
    return bool(got == wanted)


# --- the set ----------------------------------------------------------------------------------

_STOP = (Finish(StopReason.END_TURN), End())
_TOOLS = (Finish(StopReason.TOOL_USE), End())

MISBEHAVIOURS: tuple[Misbehaviour, ...] = (
    Misbehaviour(
        name="well behaved",
        steps=(Say("Hel"), Say("lo"), ReportUsage(Usage(9, 2)), *_STOP),
        content=(TextContent("Hello"),),
        stop_reason=StopReason.END_TURN,
        usage=Usage(9, 2),
    ),
    Misbehaviour(
        name="two calls with the same id",
        steps=(
            Call(0, "same", "look", '{"at": 1}'),
            Call(1, "same", "look", '{"at": 2}'),
            *_TOOLS,
        ),
        content=(ToolCall("same", "look", {"at": 1}), ToolCall("same", "look", {"at": 2})),
        stop_reason=StopReason.TOOL_USE,
    ),
    Misbehaviour(
        name="the pieces of two calls in turns",
        steps=(
            Call(0, "a", "look", ""),
            Call(1, "b", "look", ""),
            Call(0, None, None, '{"at"'),
            Call(1, None, None, '{"at"'),
            Call(0, None, None, ": 1}"),
            Call(1, None, None, ": 2}"),
            *_TOOLS,
        ),
        content=(ToolCall("a", "look", {"at": 1}), ToolCall("b", "look", {"at": 2})),
        stop_reason=StopReason.TOOL_USE,
    ),
    Misbehaviour(
        name="an id that changes in mid-stream",
        steps=(
            Call(0, "first", "look", '{"at"'),
            Call(0, "second", None, ": "),
            Call(0, "third", None, "1}"),
            *_TOOLS,
        ),
        content=(ToolCall("first", "look", {"at": 1}),),
    ),
    Misbehaviour(
        name="id and name with every piece",
        steps=(
            Call(0, "a", "look", '{"at"'),
            Call(0, "a", "look", ": "),
            Call(0, "a", "look", "1}"),
            *_TOOLS,
        ),
        content=(ToolCall("a", "look", {"at": 1}),),
    ),
    Misbehaviour(
        name="a call without an id",
        steps=(Call(0, None, "look", "{}"), *_TOOLS),
        content=(ToolCall("", "look", {}),),
    ),
    Misbehaviour(
        name="a call without arguments",
        steps=(Call(0, "a", "look", ""), *_TOOLS),
        content=(ToolCall("a", "look", {}),),
    ),
    Misbehaviour(
        name="no terminal event",
        steps=(Say("Hel"), Say("lo")),
        error=StreamErrorKind.EMPTY,
    ),
    Misbehaviour(name="no event at all", steps=(), error=StreamErrorKind.EMPTY),
    Misbehaviour(
        name="nothing but the end",
        steps=_STOP,
        error=StreamErrorKind.ZERO_OUTPUT_TRANSPORT,
    ),
    Misbehaviour(
        name="reasoning and nothing else",
        steps=(Reason("Let me "), Reason("think."), *_STOP),
        error=StreamErrorKind.ZERO_OUTPUT_TRANSPORT,
    ),
    Misbehaviour(
        name="it stopped to call tools, and calls none",
        steps=(Say("Done."), *_TOOLS),
        content=(TextContent("Done."),),
        stop_reason=StopReason.END_TURN,
    ),
    Misbehaviour(
        name="it calls a tool, and says that it is done",
        steps=(Call(0, "a", "look", "{}"), *_STOP),
        content=(ToolCall("a", "look", {}),),
        stop_reason=StopReason.TOOL_USE,
    ),
    Misbehaviour(
        name="cut off at the cap, and says that it is done",
        steps=(Say("And then he"), ReportUsage(Usage(9, 64)), *_STOP),
        cap=64,
        content=(TextContent("And then he"),),
        stop_reason=StopReason.MAX_TOKENS,
    ),
    Misbehaviour(
        name="a call cut off at the cap, and says that it wants tools",
        steps=(Call(0, "a", "look", '{"at": '), ReportUsage(Usage(9, 64)), *_TOOLS),
        cap=64,
        stop_reason=StopReason.MAX_TOKENS,
    ),
    Misbehaviour(
        name="only reasoning, cut off",
        steps=(Reason("Let me think"), Finish(StopReason.MAX_TOKENS), End()),
        stop_reason=StopReason.MAX_TOKENS,
    ),
    Misbehaviour(
        name="arguments cut inside an escape",
        steps=(
            Call(0, "a", "look", '{"at": "\\u00'),
            Call(0, None, None, "e9\\"),
            Call(0, None, None, 'n"}'),
            *_TOOLS,
        ),
        content=(ToolCall("a", "look", {"at": "é\n"}),),
    ),
    Misbehaviour(
        name="characters outside the plane, as text and in arguments",
        steps=(Say("🦀 "), Say("é"), Call(0, "a", "look", '{"at": "🦀"}'), *_TOOLS),
        content=(TextContent("🦀 é"), ToolCall("a", "look", {"at": "🦀"})),
    ),
    Misbehaviour(
        name="a thought in tags, cut anywhere",
        steps=(Say("<thi"), Say("nk>I should"), Say(" greet</think"), Say(">Hello"), *_STOP),
        content=(TextContent("Hello"),),
    ),
    Misbehaviour(
        name="a tag in the middle of a sentence",
        steps=(Say("Wrap it in a <reason"), Say("ing> element."), Say(" Then deploy"), *_STOP),
        content=(TextContent("Wrap it in a <reasoning> element. Then deploy"),),
    ),
    Misbehaviour(
        name="usage after the finish reason",
        steps=(
            Say("Hello"),
            Finish(StopReason.END_TURN),
            ReportUsage(Usage(9, 2)),
            End(),
        ),
        content=(TextContent("Hello"),),
        usage=Usage(9, 2),
    ),
    Misbehaviour(
        name="usage before the text",
        steps=(ReportUsage(Usage(9, 2)), Say("Hello"), *_STOP),
        content=(TextContent("Hello"),),
        usage=Usage(9, 2),
    ),
    Misbehaviour(
        name="keep-alives everywhere",
        steps=(Comment(), Say("Hel"), Comment(), Comment(), Say("lo"), Comment(), *_STOP),
        content=(TextContent("Hello"),),
    ),
    Misbehaviour(
        name="an error in the middle",
        steps=(Say("Hel"), Fail("the server is overloaded"), End()),
        error=StreamErrorKind.PROVIDER_RATE_LIMITED,
    ),
    Misbehaviour(
        name="an error at once",
        steps=(Fail("the server is overloaded"),),
        error=StreamErrorKind.PROVIDER_RATE_LIMITED,
    ),
)
