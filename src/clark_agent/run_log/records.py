"""The entries of a run log: one record for everything that enters a run from outside.

    run_began       identity, history and prompts; and what the config is made of
    messages_added  steering, follow-ups, and the loop's own messages to the model
    steering_accepted
    context_edited  what a plugin changed for this request, compared with the last one
    tools_gated
    tools_changed   which tools a source has added or removed
    asked           a turn, and the fingerprint of its request, or all of it
    consulted       a plugin asked a model beside the turn: what it answered; or how it failed
    answered        the answer of the provider and its pieces; or how it failed
    tool_started    written before the tool runs
    tool_withdrawn  it did not run: its process let the run go just then
    tool_progress
    tool_ended      the result, and which plugins changed it
    call_suspended  a call waits for a decision, or for the run that it started
    batch_ended     all calls of the message have results, and these are in the transcript
    cancel_received a message from another process cancels the run
    run_suspended   no process works on the run until its requests are decided
    request_decided a request has its decision; written by whoever decides, while no process works
    run_resumed     another process continues from here
    run_ended, run_failed

A record is a line of JSON: the version of this vocabulary, its number in the run, the run, the
time, the entry (distinguished by its ``kind``), what happened since the previous record (clock
readings, new ids, the number of emitted events, and interrupts with their position), and last a
checksum (see ``clark_agent.run_log._checksums``). Fields may be added; a reader ignores unknown
fields, and rejects a version that is newer than its own.

Version 1 had no checksums, and had only prose for what ``purposes``, ``by_runtime`` and similar
fields contain now; see ``clark_agent.run_log._version_1``.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from clark_agent.engine.runtime_results import RuntimeResult
from clark_agent.prices import ModelRef
from clark_agent.tools.base import ToolResult
from clark_agent.tools.kept import KeptResult
from clark_agent.types import AgentMessage, AssistantMessage, NonNegativeInt, RunIdentity, Usage
from clark_agent.waiting import Verdict, WaitingRequest

__all__ = [
    "RUN_LOG_VERSION",
    "Answered",
    "Asked",
    "BatchEnded",
    "CallSuspended",
    "CancelReceived",
    "Consulted",
    "ContextEdited",
    "Edit",
    "Entry",
    "MessagesAdded",
    "Purpose",
    "Record",
    "RequestDecided",
    "RunBegan",
    "RunEnded",
    "RunFailed",
    "RunResumed",
    "RunSuspended",
    "RuntimeResult",
    "SteeringAccepted",
    "ToolEnded",
    "ToolProgress",
    "ToolStarted",
    "ToolWithdrawn",
    "ToolsChanged",
    "ToolsGated",
]

RUN_LOG_VERSION = 2

Purpose: TypeAlias = str
"""Why a message was added: ``steering``, ``follow_up``, ``wrap_up`` (few turns are left),
``budget`` (little budget is left), ``nudge`` (reminds the model of its tools), ``final_answer``
(its text was accepted as the answer), or the ``purpose`` of the plugin that steers, such as
``repetition``.
"""


class Interrupt(Struct, frozen=True, array_like=True, gc=False):
    """An interrupt of the run, and the number of steps before it since the previous record.

    A step is an emitted event, a hook call, or the return of a hook.
    """

    steps: NonNegativeInt
    why: Literal["cancelled", "out_of_time"]
    noticed_by: NonNegativeInt | None = None
    """The position of the call that noticed it and stopped the others, if one did."""


class _Entry(Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    """Base of all entries."""


class RunBegan(_Entry, frozen=True, kw_only=True, tag="run_began"):
    """A run begins."""

    identity: RunIdentity
    system_prompt: str = ""
    history: tuple[AgentMessage, ...] = ()
    """The messages of the context."""
    prompts: tuple[AgentMessage, ...] = ()
    model_id: str | None = None
    model: str | None = None
    """The model and the provider of the transport, if it has them: to find prices with."""
    provider: str | None = None
    tools: dict[str, Any] = {}
    """What the config declares, by name."""
    tool_source: str | None = None
    """The name of the tool source, if there is one."""
    plugins: tuple[str, ...] = ()
    tool_call_id: str | None = None
    """For a child run: the call of its parent that started it."""
    call_place: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None = None
    """The turn of its parent, the position of that call (ids of calls can repeat), and how many
    runs the call had started before.
    """
    host_notes: dict[str, Any] = {}
    """Data for the host's own use; see `clark_agent.run_log.writer.RunLog`."""
    trace: dict[str, str] = {}
    """The span of the run, if it is traced: W3C ``traceparent`` and ``tracestate``."""
    agent_name: str | None = None

    @property
    def model_ref(self) -> ModelRef:
        """The names of the model, to find its price with."""
        return ModelRef(self.model_id, self.model, self.provider)


class MessagesAdded(_Entry, frozen=True, kw_only=True, tag="messages_added"):
    """Messages entered the transcript that came neither from the model nor from a tool."""

    source: Literal["turn", "follow_up", "loop"]
    """With a turn (steering, follow-ups that began it, a warning), after the last turn, or from the
    loop itself.
    """
    messages: tuple[AgentMessage, ...]
    purposes: tuple[Purpose, ...] = ()
    """The purpose of each message; empty if unknown."""
    steering: tuple[int, ...] = ()
    """The numbers of the accepted messages that these deliver."""
    turn: NonNegativeInt | None = None
    """Set if a plugin added them before a request of this turn; ``source`` is then ``loop``."""
    plugin: str | None = None
    """That plugin."""


class SteeringAccepted(_Entry, frozen=True, kw_only=True, tag="steering_accepted"):
    """A message was sent to the run. Its number counts from 1."""

    number: NonNegativeInt
    message: AgentMessage
    when: str
    """A `clark_agent.steering.SteerWhen`, or ``follow_up``."""
    mail: str | None = None
    """The id of the message in the mailbox of the run, if it came from there."""


class Edit(Struct, frozen=True, array_like=True):
    """Replaces ``removed`` messages from ``start`` on by these."""

    start: NonNegativeInt
    removed: NonNegativeInt
    inserted: tuple[AgentMessage, ...] = ()


class ContextEdited(_Entry, frozen=True, kw_only=True, tag="context_edited"):
    """A plugin's view of the transcript changed, other than by growing.

    The edits turn the plugin's last view, extended by the new messages of the transcript, into its
    current view. ``is_lasting``: an overflow recovery or a repair changed the transcript itself.
    """

    plugin: str
    edits: tuple[Edit, ...]
    is_lasting: bool = False
    which: NonNegativeInt = 0
    """Of several plugins with this name that edit requests: which one, in the order of calls."""


class ToolsGated(_Entry, frozen=True, kw_only=True, tag="tools_gated"):
    """What a gate allows from now on; None for all tools."""

    plugin: str
    allow: tuple[str, ...] | None = None


class ToolsChanged(_Entry, frozen=True, kw_only=True, tag="tools_changed"):
    """Tools were added or removed."""

    added: dict[str, dict[str, Any]] = {}
    """As in ``run_began``, with those ``flags`` of the tool that are not the defaults."""
    removed: tuple[str, ...] = ()
    order: tuple[str, ...] | None = None
    """All tools of the source in their order, if that does not follow: kept ones, then new ones."""


class Asked(_Entry, frozen=True, kw_only=True, tag="asked"):
    """A request is sent to the model. The digests are of the JSON of each part."""

    turn: NonNegativeInt
    attempt: NonNegativeInt = 1
    messages: NonNegativeInt
    """The number of messages."""
    digest: str
    """The digest of all messages."""
    settings: dict[str, Any] | None = None
    """All other fields of the request, with texts and schemas as digests; None if unchanged."""
    request: Any = None
    """The whole request, if the log keeps full requests."""


class Consulted(_Entry, frozen=True, kw_only=True, tag="consulted"):
    """A model was asked by a plugin, beside the turn. The question is not recorded."""

    plugin: str
    turn: NonNegativeInt
    messages: NonNegativeInt
    """The number of messages in the request."""
    digest: str
    """The digest of the request."""
    message: AssistantMessage
    """The answer. If it failed, what was received."""
    error: str | None = None
    """The kind of the failure: a `clark_agent.stream.StreamErrorKind`, or ``timeout``."""
    error_text: str | None = None
    model: ModelRef | None = None
    """The model, if it is not that of the run."""


class Answered(_Entry, frozen=True, kw_only=True, tag="answered"):
    """The answer of the provider."""

    message: AssistantMessage
    start: AssistantMessage | None = None
    """The announced message, unless it was empty."""
    pieces: tuple[Any, ...] | None = None
    """How the message was split; see `clark_agent.run_log.chunking`. None if it came in one piece
    and was not announced.
    """
    details: Any = None
    """Details of the call from the transport."""
    discarded: str | None = None
    """Why the message did not enter the transcript."""
    error: str | None = None
    """The kind of the failure, if the stream failed."""
    error_text: str | None = None
    raised: tuple[str, str] | None = None
    """The type and the text of the exception, if that is how the stream failed."""


class ToolStarted(_Entry, frozen=True, kw_only=True, tag="tool_started"):
    """A tool is about to run."""

    position: NonNegativeInt = 0
    """The position of the call in the message."""
    tool_call_id: str
    tool_name: str
    arguments: Any = None
    """The arguments that the tool gets, if repairs or hooks have changed those of the model."""


class ToolWithdrawn(_Entry, frozen=True, kw_only=True, tag="tool_withdrawn"):
    """A tool that was about to run did not: the run was let go first."""

    position: NonNegativeInt = 0
    tool_call_id: str


class ToolProgress(_Entry, frozen=True, kw_only=True, tag="tool_progress"):
    """A tool reported progress."""

    position: NonNegativeInt = 0
    partial: ToolResult


class ToolEnded(_Entry, frozen=True, kw_only=True, tag="tool_ended"):
    """A call has its result."""

    position: NonNegativeInt = 0
    tool_call_id: str
    tool_name: str | None = None
    """The repaired name, if it differs from the one that the model wrote."""
    result: ToolResult
    given: ToolResult | None = None
    """The tool's own result, if a plugin changed it."""
    kept: KeptResult | None = None
    """Set if the result was too large for the model: the store has it beside the records, and
    ``given`` does not repeat it.
    """
    by_runtime: RuntimeResult | None = None
    """Set if the runtime made the result, and why. It takes precedence over the result's text."""
    raised: Literal["fatal", "aborted"] | None = None
    """Set if the tool ended the run, and how."""
    raised_text: str | None = None
    """The message of that exception."""
    hook_raised: tuple[str, str] | None = None
    """The type and the text of a hook's exception, if that prevented the call."""
    decisions: tuple[dict[str, Any], ...] = ()
    """Which plugins affected the call, and how."""


class BatchEnded(_Entry, frozen=True, tag="batch_ended"):
    """The results are in the transcript."""

    time: int | tuple[int, ...]
    """The timestamps of the results; one number if they are equal."""
    positions: tuple[NonNegativeInt, ...] | None = None
    """The calls they answer, in the order of the results; None for the order of the calls."""


class CallSuspended(_Entry, frozen=True, kw_only=True, tag="call_suspended"):
    """A call waits. Its placeholder in the transcript is not recorded."""

    position: NonNegativeInt = 0
    tool_call_id: str
    tool_name: str | None = None
    """The repaired name, if it differs from the one that the model wrote."""
    request: WaitingRequest | None = None
    """What it waits for; None if it waits for runs that it started."""
    child_run_ids: tuple[str, ...] = ()
    """The runs that it started and that wait."""
    decisions: tuple[dict[str, Any], ...] = ()
    """Which plugins affected the call before, and how."""


class CancelReceived(_Entry, frozen=True, kw_only=True, tag="cancel_received"):
    """A message in the mailbox of the run cancels it."""

    mail: str
    reason: str | None = None


class RunSuspended(_Entry, frozen=True, kw_only=True, tag="run_suspended"):
    """The calls of the batch that can run have run, and others wait.

    The results of the batch, with placeholders for the calls that wait, are in the transcript until
    the run is resumed.
    """

    time: int | tuple[int, ...]
    positions: tuple[NonNegativeInt, ...] | None = None
    """As in ``batch_ended``."""
    usage: Usage = Usage()
    tree_usage: Usage = Usage()


class RequestDecided(_Entry, frozen=True, kw_only=True, tag="request_decided"):
    """A request has its decision. The first one counts."""

    request_id: str
    decision: Verdict
    by: str | None = None
    mail: str | None = None
    """The id of the message in the mailbox of the run, if it came from there."""


class RunResumed(_Entry, frozen=True, tag="run_resumed"):
    """Another process continues the run."""

    turn: NonNegativeInt
    below: tuple[str, ...] = ()
    """The ids of the direct child runs at that time. The log may not mention all of them: the
    process may have died before it recorded one.
    """
    within: NonNegativeInt | None = None
    """For a child run: the number of the first record that this process wrote for its parent."""
    trace: dict[str, str] = {}
    """As in ``run_began``, for the span of this process."""


class RunEnded(_Entry, frozen=True, kw_only=True, tag="run_ended"):
    """The run has its result."""

    outcome: str
    usage: Usage = Usage()
    tree_usage: Usage = Usage()
    limit: str | None = None


class RunFailed(_Entry, frozen=True, kw_only=True, tag="run_failed"):
    """The run ended with an error."""

    error: str
    text: str
    reason: str | None = None
    """Why it was aborted, if it was."""
    usage: Usage = Usage()
    tree_usage: Usage = Usage()
    partial: AssistantMessage | None = None
    undelivered: tuple[AgentMessage, ...] = ()
    fields: dict[str, Any] = {}
    """The attributes that errors of this class have."""


Entry: TypeAlias = (
    RunBegan
    | MessagesAdded
    | SteeringAccepted
    | ContextEdited
    | ToolsGated
    | ToolsChanged
    | Asked
    | Consulted
    | Answered
    | ToolStarted
    | ToolWithdrawn
    | ToolProgress
    | ToolEnded
    | CallSuspended
    | BatchEnded
    | CancelReceived
    | RunSuspended
    | RequestDecided
    | RunResumed
    | RunEnded
    | RunFailed
)


class Record(Struct, frozen=True, omit_defaults=True):
    """One entry with its position and context."""

    v: NonNegativeInt
    seq: NonNegativeInt
    run: str
    at: NonNegativeInt
    entry: Entry
    now: tuple[int, ...] = ()
    """The readings of the run's clock since the previous record."""
    ids: tuple[str, ...] = ()
    """The ids created since then."""
    events: NonNegativeInt = 0
    """The number of events emitted since then. Deltas, progress and events of child runs do not
    count: whether they are emitted depends on the listeners.
    """
    steps: NonNegativeInt = 0
    """For a message sent to the run: the number of steps before it since then."""
    returned: tuple[NonNegativeInt, NonNegativeInt] | None = None
    """For a call that ran in parallel and has hooks after it: the number of the next record when
    the tool returned, and the number of steps before that.
    """
    interrupts: tuple[Interrupt, ...] = ()
    """The interrupts of the run since then."""
    crc: str | None = None
    """The checksum of this record and all before it; None if it was never written."""
