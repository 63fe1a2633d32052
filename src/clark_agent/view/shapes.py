"""What the page of runs gets as JSON.

All addresses are relative to the page, because the app may be mounted anywhere. A run is named in
the query, because its id may be any text, such as ``..`` or ``a/items``. Every field is always
there: ``null`` is None. Times are Unix milliseconds. A request that fails has a body of the shape
`Failure` and a status: 400 wrong parameters, 401 no token, 403 not allowed, 404 not there, 409 not
possible now, 413 too large, 422 the log is damaged or of a newer version.

Reading:

    GET api/session                              Session
    GET api/runs                                 RunList
        q, status, model, agent, parent          search and filters; all optional
        all=1                                    includes runs that other runs in the store started
        after, limit                             the cursor ``RunList.next``; 1 to 200, default 50
    GET api/run?run=ID                           RunView
    GET api/turns?run=ID                         TurnList
        from, limit                              the number of a turn; 1 to 1000, default 500
    GET api/items?run=ID                         ItemPage, one of:
        from                                     items from the record of this number on
        before                                   the items before the record of this number
        turn                                     items from the beginning of a turn on
        (none of these)                          items from the beginning
        limit                                    1 to 500, default 100
    GET api/piece?run=ID                         Piece: more of a text that was cut
        at, path                                 the address: ``Text.at`` and ``Text.path``
        start, length                            in characters; at most 262144
    GET api/image?run=ID                         the bytes of an image (PNG, JPEG, GIF, WebP)
        at, path                                 ``ImageBlock.at`` and ``ImageBlock.path``
    GET api/request?run=ID&turn=N                RequestView: what the model saw
        attempt                                  default: the last one of the turn
        from, limit                              the messages to show; default: those that are new
        force=1                                  also for a very large log, which takes long
    GET api/events?run=ID                        server-sent events, see below
        after                                    a number of a record; or the header Last-Event-ID
    GET api/waiting                              WaitingList: open requests of all runs
    GET api/diff?a=ID&b=ID                       DiffView
        from, limit                              rows, by the index of a message
        force=1                                  also for very large logs

Acting. These need ``Session.can_write``, and the header ``X-Clark-Token: Session.csrf``. Bodies
are JSON with ``Content-Type: application/json``:

    POST api/steer?run=ID        Steer           Done
    POST api/cancel?run=ID       Cancel          Done
    POST api/decide?run=ID       Decide          Done
    POST api/resume?run=ID       {}              Done; needs ``Session.can_run``
    POST api/fork?run=ID         ForkRun         Done, with the id of the new run; ``can_run``
    POST api/replay?run=ID       {}              Replayed; ``can_replay``

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

from typing import Any, Literal

from msgspec import Struct

from clark_agent.view.items import ContextChanged, Item, MessageView, Text, Tokens, Waiting

__all__ = [
    "Cancel",
    "Cause",
    "ChildRun",
    "Damage",
    "Decide",
    "DiffRow",
    "DiffView",
    "DifferenceView",
    "Done",
    "Failure",
    "ForkRun",
    "ForkedFrom",
    "Indexed",
    "ItemPage",
    "Piece",
    "PrefixBreak",
    "PrefixView",
    "Replayed",
    "RequestView",
    "RunList",
    "RunRow",
    "RunView",
    "SearchInfo",
    "Session",
    "Steer",
    "ToolView",
    "TurnList",
    "TurnRow",
    "WaitingList",
]


class Failure(Struct, frozen=True):
    """Why a request failed."""

    error: str
    """A word for programs, such as ``not_found``, ``read_only``, ``too_large``, ``busy``."""
    message: str
    """A sentence for people."""


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
    unreadable: tuple[str, ...] = ()
    """Files in the folder that are named like logs, but do not begin with a record of the run that
    they are named after: damaged logs, whose runs are not in the list. At most 100.
    """


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
    refresh_ms: int
    """How often the page asks for its lists again."""
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
