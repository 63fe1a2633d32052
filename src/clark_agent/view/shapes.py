"""What the page of runs gets as JSON.

All addresses are relative to the page, because the app may be mounted anywhere. Every field is
always there: ``null`` is None. Times are Unix milliseconds. A request that fails has a body of the
shape `Failure` and a status: 400 wrong parameters, 401 no token, 403 not allowed, 404 not there,
409 not possible now, 413 too large, 422 the log is damaged or of a newer version.

Reading:

    GET api/session                              Session
    GET api/runs                                 RunList
        q, status, model, agent, parent          search and filters; all optional
        all=1                                    includes runs that other runs started
        after, limit                             the cursor ``RunList.next``; 1 to 200, default 50
    GET api/runs/{id}                            RunView
    GET api/runs/{id}/turns                      TurnList
        from, limit                              the number of a turn; 1 to 1000, default 500
    GET api/runs/{id}/items                      ItemPage, one of:
        from                                     items from the record of this number on
        before                                   the items before the record of this number
        turn                                     items from the beginning of a turn on
        (none of these)                          items from the beginning
        limit                                    1 to 500, default 100
    GET api/runs/{id}/piece                      Piece: more of a text that was cut
        at, path                                 the address: ``Text.at`` and ``Text.path``
        start, length                            in characters; at most 262144
    GET api/runs/{id}/image                      the bytes of an image (PNG, JPEG, GIF, WebP)
        at, path                                 ``ImageBlock.at`` and ``ImageBlock.path``
    GET api/runs/{id}/requests/{turn}            RequestView: what the model saw
        attempt                                  default: the last one of the turn
        from, limit                              the messages to show; default: those that are new
        force=1                                  also for a very large log, which takes long
    GET api/runs/{id}/events                     server-sent events, see below
        after                                    a number of a record; or the header Last-Event-ID
    GET api/waiting                              WaitingList: open requests of all runs
    GET api/diff?a=ID&b=ID                       DiffView
        from, limit                              rows, by the index of a message
        force=1                                  also for very large logs

Acting. These need ``Session.can_write``, and the header ``X-Clark-Token: Session.csrf``. Bodies
are JSON with ``Content-Type: application/json``:

    POST api/runs/{id}/steer     Steer           Done
    POST api/runs/{id}/cancel    Cancel          Done
    POST api/runs/{id}/decide    Decide          Done
    POST api/runs/{id}/resume    {}              Done; needs ``Session.can_run``
    POST api/runs/{id}/fork      ForkRun         Done, with the id of the new run; ``can_run``
    POST api/runs/{id}/replay    {}              Replayed; ``can_replay``

Server-sent events of a run. ``id`` is the number of a record, so a browser that reconnects goes on
where it was. The connection ends with the event ``end``; close the `EventSource` then.

    event: item     an `Item`, as in `ItemPage.items`
    event: delta    a `Delta` of an answer that is being streamed; has no id, and may be missing
    event: run      a `RunView`, after items, and when a child run has begun
    event: end      {}: the run has ended and everything was sent
    event: failed   a `Failure`: the log cannot be read further

How to show a run: an `Item` is one record of its log. Those of one turn have the same ``turn``. The
calls of a turn are the blocks of kind ``call`` in its kept answer; items about a call have its
``position``. Child runs are in `ItemPage.children`, with the call that started them.

Outside a server, `clark_agent.view.timeline.items_of` makes the items of a loaded run, with whole
texts and with images as ``data:`` URLs.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

__all__ = [
    "Added",
    "Answer",
    "BatchDone",
    "Began",
    "Block",
    "CallBlock",
    "Cancel",
    "Cancelled",
    "Cause",
    "ChildRun",
    "CompactionBlock",
    "Consultation",
    "ContextChange",
    "ContextChanged",
    "Damage",
    "Decide",
    "Decided",
    "Delta",
    "DiffRow",
    "DiffView",
    "DifferenceView",
    "Done",
    "Ended",
    "Failed",
    "Failure",
    "FileBlock",
    "ForkRun",
    "ForkedFrom",
    "Gated",
    "HookDecision",
    "ImageBlock",
    "Indexed",
    "Item",
    "ItemPage",
    "Kept",
    "MessageView",
    "OtherBlock",
    "OtherRecord",
    "Piece",
    "PrefixBreak",
    "PrefixView",
    "Replayed",
    "RequestSent",
    "RequestView",
    "Result",
    "Resumed",
    "RunList",
    "RunRow",
    "RunView",
    "SearchInfo",
    "Session",
    "Source",
    "Steer",
    "Steered",
    "Suspended",
    "Text",
    "TextBlock",
    "Tokens",
    "ToolProgressed",
    "ToolResulted",
    "ToolStart",
    "ToolView",
    "ToolWithdraw",
    "ToolsChange",
    "TurnList",
    "TurnRow",
    "Waiting",
    "WaitingCall",
    "WaitingList",
]


class Failure(Struct, frozen=True):
    """Why a request failed."""

    error: str
    """A word for programs, such as ``not_found``, ``read_only``, ``too_large``, ``busy``."""
    message: str
    """A sentence for people."""


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


# --- runs -----------------------------------------------------------------------------------------


class ForkedFrom(Struct, frozen=True):
    """Where a run that was forked on this page comes from."""

    run_id: str
    turn: int


class RunRow(Struct, frozen=True, kw_only=True):
    """A run in a list."""

    run_id: str
    status: str
    """The outcome of a run that has ended (``completed``, ``failed``, ``max_turns``, …),
    ``suspended``, or ``running``: it has not ended, and its process may be dead. ``damaged`` or
    ``newer``: its log cannot be read any further, as far as that is known.
    """
    agent: str | None
    model: str | None
    task: str | None
    """The first words of the task; None until its log was read."""
    began_at: int
    last_at: int
    ms: int
    """From the first record to the last one."""
    records: int
    turns: int | None
    """None if unknown: the log was not read far enough."""
    tokens: Tokens | None
    """None until the run ends, unless the log was read."""
    cost: float | None
    """In US dollars. In a list, other models that plugins asked count as the model of the run."""
    parent_run_id: str | None
    depth: int
    conversation_id: str | None
    children: int
    forked_from: ForkedFrom | None
    snippet: str | None = None
    """The text that a search found."""
    snippet_seq: int | None = None
    """The record that has it."""


class SearchInfo(Struct, frozen=True):
    """What was searched."""

    kind: Literal["full_text", "scan"]
    """``full_text``: all visible texts, by the index of the store. ``scan``: the first words of
    each run, and the newest logs.
    """
    scanned: int
    """For a scan: how many logs were searched whole."""
    of: int


class RunList(Struct, frozen=True):
    """A page of the list of runs, newest first."""

    runs: tuple[RunRow, ...]
    total: int
    """How many runs match."""
    next: str | None
    """The cursor of the next page."""
    models: tuple[str, ...]
    """All models, agents and states that there are, to filter by."""
    agents: tuple[str, ...]
    statuses: tuple[str, ...]
    known: int
    """How many runs were looked at, of ``of``. Filters miss the others until then; ask again."""
    of: int
    search: SearchInfo | None


class Indexed(Struct, frozen=True):
    """How much of a log was read. Totals count that much."""

    records: int
    bytes: int | None
    of_bytes: int | None
    is_complete: bool


class Damage(Struct, frozen=True):
    """Where a log is damaged, or cannot be read any further."""

    where: str
    reason: str
    seq: int
    is_newer: bool
    """Whether it is intact, but was written by a newer version."""


class ChildRun(Struct, frozen=True):
    """A run that a call of this run started."""

    run: RunRow
    turn: int | None
    """The turn and the position of the call; None in old logs: see ``call_id``."""
    position: int | None
    call_id: str | None


class RunView(Struct, frozen=True, kw_only=True):
    """The head of a run."""

    run: RunRow
    indexed: Indexed
    provider: str | None
    tools: tuple[str, ...]
    plugins: tuple[str, ...]
    turns: int
    model_calls: int
    tool_calls: int
    worked_ms: int
    """How long processes worked on it."""
    tokens: Tokens
    cost: float | None
    tree_tokens: Tokens
    """With the runs below, as far as they were read."""
    tree_cost: float | None
    children: tuple[ChildRun, ...]
    """The first 200."""
    waiting: tuple[Waiting, ...]
    """What it waits for, and its child runs."""
    damage: tuple[Damage, ...]
    """The first problems of the log; a read stops there."""
    error: str | None
    """Why it failed."""
    parents: tuple[str, ...]
    """The run that started it and those above, the nearest first."""
    forks: tuple[str, ...]
    """Runs that were forked from it on this page."""
    last_seq: int
    """The number of the newest record that was read."""


class TurnRow(Struct, frozen=True):
    """A turn in the overview."""

    turn: int
    seq: int
    """The number of its first record, for ``items?from=``."""
    began_at: int
    ms: int | None
    tokens: Tokens
    cost: float | None
    model_ms: int
    tools: tuple[str, ...]
    """The names of the tools that were called, at most 20."""
    calls: int
    errors: int
    """Results that are errors."""
    discarded: int
    """Answers that were discarded."""
    edited_by: tuple[str, ...]
    """Plugins that changed its request."""
    has_children: bool
    is_compacted: bool
    """Whether a compaction replaced older turns before its request."""


class TurnList(Struct, frozen=True):
    """A page of the overview."""

    turns: tuple[TurnRow, ...]
    next: int | None
    """The number of the next turn."""
    total: int
    indexed: Indexed


class ItemPage(Struct, frozen=True):
    """A page of the timeline."""

    items: tuple[Item, ...]
    next: int | None
    """``from`` of the next page; None: there is no more yet."""
    previous: int | None
    """``before`` of the page before; None: this is the beginning."""
    last_seq: int | None
    """The last record of this page, for ``events?after=``."""
    children: tuple[ChildRun, ...]
    """The child runs of its turns."""
    damage: Damage | None
    """Where reading stopped, if it did."""
    bytes_read: int
    records_read: int


class Piece(Struct, frozen=True):
    """A part of a long text."""

    text: str
    start: int
    length: int
    """Of the whole text."""


# --- what the model saw ---------------------------------------------------------------------------


class Cause(Struct, frozen=True):
    """Who changed a request: ``kind`` is ``plugin``, ``gate``, ``tool_source``, ``recovery``,
    ``repair``, ``retry``, ``resume``, ``settings`` or ``unknown``.
    """

    kind: str
    name: str


class PrefixBreak(Struct, frozen=True):
    """Where the part of a request ends that a provider could have cached."""

    part: Literal["tools", "system_prompt", "settings", "messages"]
    index: int
    """Of the first tool or message that differs."""
    name: str | None
    text: str
    causes: tuple[Cause, ...]


class PrefixView(Struct, frozen=True):
    """A request compared with the one before. Tokens are estimates."""

    tokens: int
    kept_messages: int
    kept_tokens: int
    possible_tokens: int
    """0 for the first request."""
    reuse: float
    """0 to 1."""
    change: PrefixBreak | None
    is_certain: bool


class ToolView(Struct, frozen=True):
    """A tool that the model was offered."""

    name: str
    description: Text
    parameters: Text
    """JSON schema."""
    is_new: bool
    """Whether the request before did not offer it in this form."""


class RequestView(Struct, frozen=True, kw_only=True):
    """What the model saw."""

    run_id: str
    turn: int
    attempt: int
    attempts: int
    seq: int
    system_prompt: Text
    tools: tuple[ToolView, ...]
    removed_tools: tuple[str, ...]
    settings: Text | None
    """Other fields of the request, as JSON."""
    total: int
    """How many messages it has."""
    first: int
    """The index of the first one that is shown."""
    messages: tuple[MessageView, ...]
    replaced: tuple[MessageView, ...]
    """Messages of the request before that were at or behind `PrefixView.kept_messages`, at most
    50.
    """
    edits: tuple[ContextChanged, ...]
    """What plugins changed for this request."""
    prefix: PrefixView | None


# --- comparing ------------------------------------------------------------------------------------


class DifferenceView(Struct, frozen=True):
    """The first difference of two logs."""

    seq: int
    turn: int
    kind: str
    path: str
    first: Text
    second: Text
    text: str
    """All of it as a sentence."""
    run_id: str | None


class DiffRow(Struct, frozen=True):
    """Two messages side by side."""

    index: int
    a: MessageView | None
    b: MessageView | None
    is_same: bool


class DiffView(Struct, frozen=True, kw_only=True):
    """Two runs side by side: their transcripts, with the history that they began with."""

    a: RunRow
    b: RunRow
    difference: DifferenceView | None
    """The first difference of the records; None if there is none. For a run and its fork it is in
    the first record: look at the messages.
    """
    common: int
    """How many messages at the beginning are the same."""
    a_total: int
    b_total: int
    rows: tuple[DiffRow, ...]
    """By default from two messages before the first difference on."""
    next: int | None


class Replayed(Struct, frozen=True):
    """The result of a replay."""

    is_identical: bool
    difference: DifferenceView | None


# --- the server, and actions ----------------------------------------------------------------------


class Session(Struct, frozen=True, kw_only=True):
    """What this server is and may do."""

    version: str
    where: str
    """The store."""
    can_write: bool
    """Steer, cancel and decide."""
    can_run: bool
    """Fork and resume: an agent was given."""
    can_replay: bool = False
    """Replay: possible without an agent for runs of the command line."""
    why_not: str | None
    """What to do for what is not possible."""
    agent: str | None
    model: str | None
    """What forks and resumed runs use unless the request says otherwise; None: the model of the
    run.
    """
    csrf: str
    """The value of the header ``X-Clark-Token``; empty if nothing can be written."""
    search: Literal["full_text", "scan"]
    now: int
    """The time of the server."""


class Steer(Struct, frozen=True, forbid_unknown_fields=True):
    """A message to a run."""

    message: str
    when: Literal["after_batch", "before_next_tool", "now", "follow_up"] = "after_batch"
    id: str | None = None
    """Makes repeating the request harmless."""


class Cancel(Struct, frozen=True, forbid_unknown_fields=True):
    """End a run."""

    reason: str | None = None
    id: str | None = None


class Decide(Struct, frozen=True, forbid_unknown_fields=True):
    """Decide a request."""

    request_id: str
    decision: Literal["allow", "deny", "give_arguments", "give_result"]
    value: Any = None
    """For ``deny`` the reason, for ``give_arguments`` an object, for ``give_result`` a text."""
    resume: bool = True
    """Go on with the run in this server if nothing else is open and ``Session.can_run``."""


class ForkRun(Struct, frozen=True, forbid_unknown_fields=True):
    """Start a new run from a turn of another."""

    turn: int | None = None
    """Its history ends with this turn; 0: before the first, so with its prompts; None: all of it.
    """
    prompt: str | None = None
    """What comes next. Needed unless an answer of the model is due."""
    model: str | None = None
    system_prompt: str | None = None
    replace_prompt: bool = False
    """Only with turn 0: the prompt takes the place of those that the run began with."""


class Done(Struct, frozen=True):
    """An action was done."""

    run_id: str
    """The run, or the new run."""
    is_new: bool = True
    """False if it was done before."""
    is_running: bool = False
    """Whether this server works on the run now."""
    message: str | None = None
    """What to know, such as how to go on."""
    waiting: tuple[Waiting, ...] = ()
    """What the run still waits for."""


class WaitingList(Struct, frozen=True):
    """All open requests, those of the newest run first; at most 200."""

    waiting: tuple[Waiting, ...]
