"""What a run log holds: one record for everything that came into a run from outside, once.

    run_began       who, with what history and which prompts; and what the config is made of
    messages_added  steering, follow-ups, and what the loop itself says to the model
    steering_accepted
    context_edited  what a plugin changed for this request, against the last one
    tools_gated
    tools_changed   which tools a source has given, or taken away
    asked           a turn, and the fingerprint of its request, or all of it
    answered        what the provider said, and in which pieces; or how it failed
    tool_started    written before the tool runs
    tool_progress
    tool_ended      the result, and who had a hand in it
    batch_ended     all calls of the message have theirs, and they are in the transcript
    run_resumed     another process goes on from here
    run_ended, run_failed

A record is a line of JSON: the version of this vocabulary, its number in the run, the run, the
time, the entry, told apart by its ``kind``, what happened since the record before (what the clock
and the source of ids said, how many events were emitted, who stopped the run behind which of them),
and last a checksum (see ``clark_agent.run_log._checksums``). Fields may be added; a
reader ignores those it does not know, and refuses a version that is newer than its own.

Version 1 had no checksums, and said in prose what ``purposes``, ``by_runtime`` and the like say
now; see ``clark_agent.run_log._version_1``.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from clark_agent.engine.runtime_results import RuntimeResult
from clark_agent.tools.base import ToolResult
from clark_agent.types import AgentMessage, AssistantMessage, NonNegativeInt, RunIdentity, Usage

__all__ = [
    "RUN_LOG_VERSION",
    "Answered",
    "Asked",
    "BatchEnded",
    "ContextEdited",
    "Edit",
    "Entry",
    "MessagesAdded",
    "Purpose",
    "Record",
    "RunBegan",
    "RunEnded",
    "RunFailed",
    "RunResumed",
    "RuntimeResult",
    "SteeringAccepted",
    "ToolEnded",
    "ToolProgress",
    "ToolStarted",
    "ToolsChanged",
    "ToolsGated",
]

RUN_LOG_VERSION = 2

Purpose: TypeAlias = str
"""Why a message was added: ``steering``, ``follow_up``, ``wrap_up`` (the turns run out), ``budget``
(the budget does), ``nudge`` (the model has to be reminded of its tools), ``final_answer`` (its text
was taken for that), or what the plugin that steers says, such as ``repetition``."""


class Interrupt(Struct, frozen=True, array_like=True, gc=False):
    """What reached into the run, and behind how many steps since the record before.

    A step is an event that is emitted, a hook that is asked, or a hook's answer.
    """

    steps: NonNegativeInt
    why: Literal["cancelled", "out_of_time"]
    noticed_by: NonNegativeInt | None = None
    """The position of the call that found out and stopped the others, if one did."""


class _Entry(Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    """Base of all entries."""


class RunBegan(_Entry, frozen=True, kw_only=True, tag="run_began"):
    """A run begins."""

    identity: RunIdentity
    system_prompt: str = ""
    history: tuple[AgentMessage, ...] = ()
    """What the context held."""
    prompts: tuple[AgentMessage, ...] = ()
    model_id: str | None = None
    tools: dict[str, Any] = {}
    """What the config declares, by name."""
    tool_source: str | None = None
    """The name of the source of tools that come and go, if there is one."""
    plugins: tuple[str, ...] = ()
    tool_call_id: str | None = None
    """For a child: the call of its parent that it answers."""
    host_notes: dict[str, Any] = {}
    """What the host wants to know of it later; see `clark_agent.run_log.writer.RunLog`."""


class MessagesAdded(_Entry, frozen=True, kw_only=True, tag="messages_added"):
    """Messages entered the transcript that neither the model nor a tool gave."""

    source: Literal["turn", "follow_up", "loop"]
    """With a turn (steering, follow-ups that began it, a warning), behind the last one, or from the
    loop itself."""
    messages: tuple[AgentMessage, ...]
    purposes: tuple[Purpose, ...] = ()
    """Of each message; empty if that is not known."""
    steering: tuple[int, ...] = ()
    """Which of the accepted messages these deliver, by their numbers."""


class SteeringAccepted(_Entry, frozen=True, kw_only=True, tag="steering_accepted"):
    """Somebody sent a message to the run. It is numbered from 1."""

    number: NonNegativeInt
    message: AgentMessage
    when: str
    """A `clark_agent.steering.SteerWhen`, or ``follow_up``."""


class Edit(Struct, frozen=True, array_like=True):
    """In place of ``removed`` messages from ``start`` on, these."""

    start: NonNegativeInt
    removed: NonNegativeInt
    inserted: tuple[AgentMessage, ...] = ()


class ContextEdited(_Entry, frozen=True, kw_only=True, tag="context_edited"):
    """What the model sees differs from the transcript otherwise than it did before.

    The edits turn what the plugin gave last time, with what the transcript has grown by since, into
    what it gave now. ``is_lasting``: an overflow recovery or a repair
    changed the transcript itself.
    """

    plugin: str
    edits: tuple[Edit, ...]
    is_lasting: bool = False


class ToolsGated(_Entry, frozen=True, kw_only=True, tag="tools_gated"):
    """What a gate allows from now on; None: everything."""

    plugin: str
    allow: tuple[str, ...] | None = None


class ToolsChanged(_Entry, frozen=True, kw_only=True, tag="tools_changed"):
    """From now on there are these tools too, and these no more."""

    added: dict[str, dict[str, Any]] = {}
    """As in ``run_began``, with those ``flags`` of the tool that are not the usual ones."""
    removed: tuple[str, ...] = ()
    order: tuple[str, ...] | None = None
    """All tools of the source in their order, if that does not follow: kept ones, then new ones."""


class Asked(_Entry, frozen=True, kw_only=True, tag="asked"):
    """The model is asked. The digests are of the JSON of each part."""

    turn: NonNegativeInt
    attempt: NonNegativeInt = 1
    messages: NonNegativeInt
    """How many."""
    digest: str
    """Of all messages."""
    settings: dict[str, Any] | None = None
    """Every other field of the request, texts and schemas as digests; None: as before."""
    request: Any = None
    """All of it, if the log was asked to keep it."""


class Answered(_Entry, frozen=True, kw_only=True, tag="answered"):
    """What the provider said."""

    message: AssistantMessage
    start: AssistantMessage | None = None
    """How the message was announced, if not as an empty one."""
    pieces: tuple[Any, ...] | None = None
    """How the message was cut; see `clark_agent.run_log.chunking`. None: it came in one piece and
    was not announced."""
    details: Any = None
    """What the transport said about the call."""
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
    """Which call of the message."""
    tool_call_id: str
    tool_name: str
    arguments: Any = None
    """As the tool gets them, if repairs or hooks have changed what the model wrote."""


class ToolProgress(_Entry, frozen=True, kw_only=True, tag="tool_progress"):
    """A tool said how far it is."""

    position: NonNegativeInt = 0
    partial: ToolResult


class ToolEnded(_Entry, frozen=True, kw_only=True, tag="tool_ended"):
    """A call has its result."""

    position: NonNegativeInt = 0
    tool_call_id: str
    tool_name: str | None = None
    """As the policy has repaired it, if that is not what the model wrote."""
    result: ToolResult
    given: ToolResult | None = None
    """What the tool itself gave, if a plugin had a hand in the result."""
    by_runtime: RuntimeResult | None = None
    """That the runtime has made the result, and why; this counts, whatever the result says."""
    raised: Literal["fatal", "aborted"] | None = None
    """That the tool ended the run, and how."""
    raised_text: str | None = None
    """What it said."""
    hook_raised: tuple[str, str] | None = None
    """The type and the text of the exception of a hook, if the call was not run for it."""
    decisions: tuple[dict[str, Any], ...] = ()
    """Which plugins had a hand in it, and how."""


class BatchEnded(_Entry, frozen=True, tag="batch_ended"):
    """The results are in the transcript."""

    time: int | tuple[int, ...]
    """Their timestamps; one number if they are all the same."""
    positions: tuple[NonNegativeInt, ...] | None = None
    """Which calls they answer, in their order; None: that of the calls."""


class RunResumed(_Entry, frozen=True, tag="run_resumed"):
    """The run goes on in another process."""

    turn: NonNegativeInt
    below: tuple[str, ...] = ()
    """The runs right below that were there by then. Not all of them need be known otherwise: the
    process may have died before it wrote of one."""


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


Entry: TypeAlias = (
    RunBegan
    | MessagesAdded
    | SteeringAccepted
    | ContextEdited
    | ToolsGated
    | ToolsChanged
    | Asked
    | Answered
    | ToolStarted
    | ToolProgress
    | ToolEnded
    | BatchEnded
    | RunResumed
    | RunEnded
    | RunFailed
)


class Record(Struct, frozen=True, omit_defaults=True):
    """One entry, and where it stands."""

    v: NonNegativeInt
    seq: NonNegativeInt
    run: str
    at: NonNegativeInt
    entry: Entry
    now: tuple[int, ...] = ()
    """What the run's clock said since the record before."""
    ids: tuple[str, ...] = ()
    """The ids that were made since then."""
    events: NonNegativeInt = 0
    """How many events the run has emitted since then. Deltas, progress and what child runs emit do
    not count: whether they are emitted depends on who listens."""
    steps: NonNegativeInt = 0
    """For a message that somebody sent: behind how many steps since then."""
    returned: tuple[NonNegativeInt, NonNegativeInt] | None = None
    """For a call that ran beside others and has hooks behind it: which record was next when the
    tool returned, and behind how many steps."""
    interrupts: tuple[Interrupt, ...] = ()
    """What has reached into the run since then."""
    crc: str | None = None
    """Of this record and all before it; None: it was never written."""
