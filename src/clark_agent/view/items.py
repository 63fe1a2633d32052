"""The items of a timeline as JSON: what `clark_agent.view.shapes` calls an `Item`.

An `Item` is one record of a log. `clark_agent.view.timeline` makes them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

__all__ = [
    "Added",
    "Answer",
    "BatchDone",
    "Began",
    "Block",
    "CallBlock",
    "Cancelled",
    "CompactionBlock",
    "Consultation",
    "ContextChange",
    "ContextChanged",
    "Decided",
    "Delta",
    "Ended",
    "Failed",
    "FileBlock",
    "Gated",
    "HookDecision",
    "ImageBlock",
    "Item",
    "Kept",
    "MessageView",
    "OtherBlock",
    "OtherRecord",
    "RequestSent",
    "Result",
    "Resumed",
    "Source",
    "Steered",
    "Suspended",
    "Text",
    "TextBlock",
    "Tokens",
    "ToolProgressed",
    "ToolResulted",
    "ToolStart",
    "ToolWithdraw",
    "ToolsChange",
    "Waiting",
    "WaitingCall",
]


# --- texts, blocks, messages ----------------------------------------------------------------------


class Text(Struct, frozen=True):
    """A text, or the beginning of a long one."""

    text: str
    length: int
    """How many characters the whole text has. It was cut if ``text`` is shorter."""
    at: int | None = None
    path: str | None = None
    """The address of the whole text, for ``piece``: the number of the record, and where in it the
    text is. None if the text was not cut, or cannot be had here.
    """


class Tokens(Struct, frozen=True):
    """Tokens that a provider reports."""

    input: int = 0
    """Read neither from the cache nor into it."""
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0


class TextBlock(Struct, frozen=True, tag_field="kind", tag="text"):
    """Text of a message. ``channel`` is ``text`` for what people see, ``thinking`` for thoughts
    that were written into it, ``reasoning`` for those of the provider's own channel.
    """

    channel: Literal["text", "thinking", "reasoning"]
    text: Text


class ImageBlock(Struct, frozen=True, tag_field="kind", tag="image"):
    """An image. To show it, use ``data`` if it is there (in an exported file), or else the address
    ``image`` with ``at`` and ``path``; if there is none of these, only name it: an image from
    elsewhere is not loaded.
    """

    media_type: str | None
    alt: str | None
    at: int | None
    path: str | None
    data: str | None
    """A ``data:`` URL."""
    url: str | None
    """The address of an image from elsewhere, to be shown as text."""


class FileBlock(Struct, frozen=True, tag_field="kind", tag="file"):
    """A document, by name; its content is not shown."""

    name: str | None
    media_type: str | None
    size: int | None
    """In bytes, about; None if it is elsewhere."""
    url: str | None


class CallBlock(Struct, frozen=True, tag_field="kind", tag="call"):
    """A call of a tool."""

    position: int
    """Among the calls of the message, from 0."""
    id: str
    name: str
    arguments: Text
    """JSON, indented; or what the model wrote, if that was not JSON."""
    is_json: bool
    summary: str
    """The arguments on one line, short."""


class OtherBlock(Struct, frozen=True, tag_field="kind", tag="other"):
    """Something only its provider understands: structured reasoning, or a tool on its side."""

    name: str
    """``reasoning_details``, or the name of the provider."""
    data: Text
    """JSON."""


class CompactionBlock(Struct, frozen=True, tag_field="kind", tag="compaction"):
    """Turns of the conversation that the model does not get any more, and what it gets instead."""

    first_turn: int
    last_turn: int
    """Counted over the conversation; 0 if only earlier summaries were replaced."""
    messages: int
    tokens_before: int
    tokens_after: int
    """About the size of the next request, without and with it."""
    has_summary: bool
    """False: there is no summary, and the messages are only left out."""
    merges: bool
    """Whether it takes the place of earlier summaries too."""
    text: Text
    """What the model gets in their place."""


Block: TypeAlias = TextBlock | ImageBlock | FileBlock | CallBlock | OtherBlock | CompactionBlock


class Source(Struct, frozen=True):
    """A source that the answer cites. ``url`` is from outside: show it, and make it a link only if
    it begins with ``http://`` or ``https://``.
    """

    kind: str
    title: str | None
    url: str | None
    quote: str | None


class Kept(Struct, frozen=True):
    """A result that was too large for the model, which got a part of it."""

    text: Text | None
    """All of its text: ``piece`` reads it from the store, if that still has it. In an exported file
    it has the beginning. None if its text was not too large.
    """
    data: int
    """How many images and files were left out."""


class Result(Struct, frozen=True):
    """The result of a call."""

    blocks: tuple[Block, ...]
    is_error: bool
    narration: str | None
    """One sentence for people."""
    diff: Text | None
    """What an edit has changed, in the unified format."""
    details: Text | None
    """Data for the host, as JSON."""
    terminate: bool
    kept: Kept | None = None
    """What the store keeps aside of it, if the model got only a part."""


class MessageView(Struct, frozen=True):
    """A message of a transcript."""

    index: int
    role: Literal["system", "user", "assistant", "tool_result", "custom"]
    blocks: tuple[Block, ...]
    at: int | None = None
    call_id: str | None = None
    """For a result: which call it answers."""
    name: str | None = None
    """For a result: the tool. For a custom message: its kind."""
    is_error: bool = False
    is_new: bool = True
    """In `RequestView`: whether the request before did not have it here."""


# --- items of a timeline --------------------------------------------------------------------------


class _Item(Struct, frozen=True, kw_only=True, tag_field="kind"):
    seq: int
    """The number of the record."""
    at: int
    turn: int
    """0 before the first turn."""


class Began(_Item, frozen=True, kw_only=True, tag="began"):
    """The run begins."""

    system_prompt: Text
    history: int
    """How many messages it continues. They are the first ones of the first request."""
    messages: tuple[MessageView, ...]
    """The prompts."""
    model: str | None
    provider: str | None
    tools: tuple[str, ...]
    plugins: tuple[str, ...]
    tool_source: str | None


class Added(_Item, frozen=True, kw_only=True, tag="added"):
    """Messages that came neither from the model nor from a tool."""

    source: Literal["turn", "follow_up", "loop"]
    messages: tuple[MessageView, ...]
    purposes: tuple[str, ...]
    """Why, for each message: ``steering``, ``follow_up``, ``wrap_up``, ``budget``, ``nudge``,
    ``final_answer``, or the purpose of a plugin. Empty if unknown.
    """
    steering: tuple[int, ...]
    """The numbers of the accepted messages that these deliver; see `Steered`."""
    plugin: str | None
    """The plugin that added them before the request, if one did."""


class Steered(_Item, frozen=True, kw_only=True, tag="steered"):
    """A message was sent to the run, and accepted. `Added` shows when the model got it."""

    number: int
    message: MessageView
    when: str
    is_mail: bool
    """Whether another process sent it."""


class ContextChange(Struct, frozen=True):
    """Some messages of the request were replaced by others."""

    start: int
    removed: int
    inserted: tuple[MessageView, ...]
    more: int
    """How many more were inserted than are shown."""


class ContextChanged(_Item, frozen=True, kw_only=True, tag="context_changed"):
    """A plugin changed what the model sees."""

    plugin: str
    is_lasting: bool
    """Whether the transcript itself was changed."""
    changes: tuple[ContextChange, ...]
    more: int
    """How many more changes there are."""


class Gated(_Item, frozen=True, kw_only=True, tag="gated"):
    """A gate limits the tools from now on. None: it allows all."""

    plugin: str
    allow: tuple[str, ...] | None


class ToolsChange(_Item, frozen=True, kw_only=True, tag="tools_changed"):
    """A tool source has added or removed tools."""

    added: tuple[str, ...]
    removed: tuple[str, ...]


class RequestSent(_Item, frozen=True, kw_only=True, tag="request"):
    """A request was sent to the model. ``requests/{turn}?attempt=`` shows it."""

    attempt: int
    messages: int


class Answer(_Item, frozen=True, kw_only=True, tag="answer"):
    """The answer of the model, or of a failed attempt."""

    attempt: int
    blocks: tuple[Block, ...]
    stop_reason: str
    tokens: Tokens | None
    cost: float | None
    """In US dollars; None if the price is not known."""
    ms: int | None
    """How long it took."""
    discarded: str | None
    """Why it did not enter the transcript."""
    error: str | None
    error_text: str | None
    sources: tuple[Source, ...]


class Consultation(_Item, frozen=True, kw_only=True, tag="consulted"):
    """A plugin asked a model beside the turn. The question is not in the log."""

    plugin: str
    model: str | None
    """Its name, if it is not the model of the run."""
    messages: int
    """How many messages the request had."""
    blocks: tuple[Block, ...]
    """The answer. If it failed, what was received."""
    stop_reason: str
    tokens: Tokens | None
    cost: float | None
    """In US dollars; None if the price is not known."""
    ms: int
    """How long it took."""
    error: str | None
    """How it failed."""
    error_text: Text | None


class ToolStart(_Item, frozen=True, kw_only=True, tag="tool_started"):
    """A tool is about to run."""

    position: int
    call_id: str
    name: str
    arguments: Text | None
    """JSON, if repairs or hooks have changed those of the model."""


class ToolWithdraw(_Item, frozen=True, kw_only=True, tag="tool_withdrawn"):
    """It did not run: its process let the run go just then."""

    position: int
    call_id: str


class ToolProgressed(_Item, frozen=True, kw_only=True, tag="tool_progress"):
    """A tool reports progress."""

    position: int
    text: Text
    narration: str | None


class HookDecision(Struct, frozen=True):
    """What a plugin decided about a call."""

    plugin: str
    decision: str
    """``block``, ``rewrite``, ``answer``, ``change``, …"""
    data: Text | None
    """What else it says, as JSON."""


class ToolResulted(_Item, frozen=True, kw_only=True, tag="tool_result"):
    """A call has its result."""

    position: int
    call_id: str
    name: str
    result: Result
    given: Result | None
    """What the tool itself returned, if a plugin changed it."""
    decisions: tuple[HookDecision, ...]
    by_runtime: str | None
    """Why the runtime made the result, not the tool: ``not_executed: max_tokens``."""
    raised: str | None
    """An exception of the tool or of a hook that ended the run, or prevented the call."""
    ms: int | None
    """How long the tool ran; None if it did not."""


class Waiting(Struct, frozen=True):
    """A request that waits for a decision."""

    request_id: str
    run_id: str
    root_run_id: str
    turn: int
    position: int
    call_id: str
    tool_name: str
    arguments: Text
    """JSON."""
    asked_by: str
    needs: Literal["permission", "result"]
    """With ``result`` the call has run: only ``give_result`` and ``deny`` apply."""
    request: Text | None
    """What is asked, as JSON, or as a text."""
    assignee: str | None
    asked_at: int
    expires_at: int | None
    until: int | None
    event: str | None


class WaitingCall(_Item, frozen=True, kw_only=True, tag="waits"):
    """A call waits: for a decision, or for child runs."""

    position: int
    call_id: str
    name: str | None
    request: Waiting | None
    child_run_ids: tuple[str, ...]
    decisions: tuple[HookDecision, ...]


class BatchDone(_Item, frozen=True, kw_only=True, tag="batch_ended"):
    """All calls of the turn have results. ``order`` is that of the results, if it differs."""

    order: tuple[int, ...] | None


class Cancelled(_Item, frozen=True, kw_only=True, tag="cancelled"):
    """The run was cancelled from outside."""

    reason: str | None


class Suspended(_Item, frozen=True, kw_only=True, tag="suspended"):
    """No process works on the run until it is resumed."""

    tokens: Tokens


class Decided(_Item, frozen=True, kw_only=True, tag="decided"):
    """A request was decided."""

    request_id: str
    position: int | None
    decision: str
    """``allow``, ``deny``, ``give_arguments``, ``give_result``, ``expired``, ``elapsed``,
    ``delivered``."""
    data: Text | None
    """The reason, the arguments or the result, as JSON."""
    by: str | None


class Resumed(_Item, frozen=True, kw_only=True, tag="resumed"):
    """A process continues the run."""

    ms: int | None
    """How long it was suspended, if it was."""


class Ended(_Item, frozen=True, kw_only=True, tag="ended"):
    """The run has its result."""

    outcome: str
    limit: str | None
    tokens: Tokens
    tree_tokens: Tokens


class Failed(_Item, frozen=True, kw_only=True, tag="failed"):
    """The run ended with an error."""

    error: str
    text: Text
    reason: str | None
    partial: tuple[Block, ...]
    """What the model had said."""
    undelivered: tuple[MessageView, ...]
    tokens: Tokens
    tree_tokens: Tokens


class OtherRecord(_Item, frozen=True, kw_only=True, tag="other"):
    """A record that has no item of its own."""

    name: str
    """Its kind."""
    data: Text
    """JSON."""


Item: TypeAlias = (
    Began
    | Added
    | Steered
    | ContextChanged
    | Gated
    | ToolsChange
    | RequestSent
    | Answer
    | Consultation
    | ToolStart
    | ToolWithdraw
    | ToolProgressed
    | ToolResulted
    | WaitingCall
    | BatchDone
    | Cancelled
    | Suspended
    | Decided
    | Resumed
    | Ended
    | Failed
    | OtherRecord
)
"""One record of a log."""


class Delta(Struct, frozen=True):
    """More of the answer that is being streamed."""

    seq: int
    """The number of the record that the answer will have. Drop the deltas when its item comes."""
    channel: Literal["start", "text", "thinking", "reasoning", "call"]
    """``start``: a new attempt begins, drop the deltas before it."""
    text: str
    """More text; for a call, more of its arguments."""
    index: int | None
    """For a call: its position."""
    name: str | None
    """For a call: more of its name."""
