"""RunLog, the setting, and RunWriter, which writes one run.

A record is written when something enters the run, and the store has it before it can have an
effect: a tool does not run before the record that announces it, and the result of a run is not
returned before the record of its end. The loop waits for that in `RunWriter.barrier`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from hashlib import blake2b
from math import isfinite
from operator import is_
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast
from zlib import crc32

import msgspec
from msgspec import Struct

from clark_agent._finished import FINISHED
from clark_agent._kept_text import Pieces
from clark_agent._text import message_of
from clark_agent._threads import call_in_loop, is_running
from clark_agent.cancellation import LET_GO
from clark_agent.clock import Clock, Timer, call_later
from clark_agent.engine.answer import EMPTY, OpenAnswer
from clark_agent.engine.consult import Consultation
from clark_agent.engine.journal import Emit, Journal
from clark_agent.errors import (
    ConfigError,
    LoopError,
    RunAborted,
    RunBusy,
    RunExists,
    RunLetGo,
    RunLogError,
    RunTakenOver,
)
from clark_agent.events import AgentEvent
from clark_agent.messages.transcript import MessageView
from clark_agent.messages.wire import encode_json, to_json_value
from clark_agent.plugins.base import plugin_name
from clark_agent.run_log._checksums import SEALED
from clark_agent.run_log._reading import caught, is_remote, may_have_mail
from clark_agent.run_log.chunking import cut
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.records import (
    RUN_LOG_VERSION,
    Answered,
    Asked,
    BatchEnded,
    CallSuspended,
    CancelReceived,
    Consulted,
    ContextEdited,
    Edit,
    Entry,
    Interrupt,
    MessagesAdded,
    Purpose,
    Record,
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
from clark_agent.run_log.store import RunAppender, RunStore
from clark_agent.steering import SteeringReceipt, SteerWhen
from clark_agent.stream import StreamRequest, ToolSchema
from clark_agent.tools.base import AgentTool, ToolResult
from clark_agent.types import AgentMessage, AssistantMessage, ToolResultMessage

if TYPE_CHECKING:
    from clark_agent.budget import BudgetLimit
    from clark_agent.engine.call import Call
    from clark_agent.engine.resumption import Resumption
    from clark_agent.engine.run import Run
    from clark_agent.result import LoopOutcome
    from clark_agent.tools import ToolRegistry

__all__ = [
    "Continuation",
    "Durability",
    "LiveEvent",
    "LoggedClock",
    "OnFailure",
    "RunLog",
    "RunWriter",
    "encode_entry",
    "is_kept_when_let_go",
    "store_of",
]

logger = logging.getLogger(__name__)


class Durability(StrEnum):
    """When records are forced to the disk. A killed process never loses written records."""

    SYSTEM = "system"
    """Whenever the operating system does it: a crash of the machine may lose the last seconds."""
    TURN = "turn"
    """With every turn."""
    RECORD = "record"
    """With every record. Slow."""


class OnFailure(StrEnum):
    """What happens to a run whose log cannot be written."""

    FAIL = "fail"
    """It stops, with a `RunLogError`."""
    DROP = "drop"
    """It continues without a log; `RunLog.dropped` counts the missing records."""


class RunLog:
    """Where and how runs are logged: the setting ``run_log`` of a config."""

    def __init__(
        self,
        store: RunStore,
        *,
        durability: Durability | Literal["system", "turn", "record"] = Durability.SYSTEM,
        on_failure: OnFailure | Literal["fail", "drop"] = OnFailure.FAIL,
        full_requests: bool = False,
        notes: Mapping[str, Any] | None = None,
        mail_every: float | None = 0.25,
        live: bool = False,
    ) -> None:
        missing = [name for name in _METHODS if not callable(getattr(store, name, None))]
        if isinstance(store, type) or len(missing) == len(_METHODS):
            raise ConfigError(f"RunLog needs a store, such as JsonlStore('runs'), not {store!r}")
        if missing:
            raise ConfigError(f"the store {store!r} has no method {', '.join(missing)}")
        seconds: Any = mail_every
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and isfinite(seconds) and seconds > 0):
            raise ConfigError(
                f"RunLog: mail_every must be more than 0 seconds or None, not {seconds!r}"
            )
        self.store = store
        self.mail_every = mail_every
        """How often, in seconds, a run looks into its mailbox; None: never. See
        `clark_agent.run_log.steer`.
        """
        self.durability = _choice("durability", Durability, durability)
        self.on_failure = _choice("on_failure", OnFailure, on_failure)
        self.live = live
        """Whether those who follow a run get the deltas of its answers, and the progress of its
        tools at once; see `clark_agent.run_log.follow`. Deltas are not recorded. Each costs a look
        for followers, and each turn one more write.
        """
        self.full_requests = full_requests
        """Whether to keep every request as a whole, not only its fingerprint. The log then grows
        with turns × history.
        """
        self.notes = dict(notes or {})
        """JSON of the host, recorded at the start of each run, but not of its child runs: what it
        needs to run it again. `diff` ignores it.
        """
        self.dropped = 0
        """The number of records that could not be written, in all runs."""
        self._has_warned = False

    def warn_that_nothing_is_kept(self) -> None:
        """Warn, once, that the store keeps no large results."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the store %r has no methods keep and kept: large results stay in the memory of "
                "this process; to keep them, use LargeResults(folder=...)",
                self.store,
            )

    def journal(
        self,
        run_id: str,
        clock: Clock,
        *,
        checks_calls: bool = False,
        after: Continuation | None = None,
    ) -> RunWriter:
        """Return the writer of a run. ``checks_calls`` is true if hooks decide about its tool
        calls; ``after`` is set if it continues a log.
        """
        return RunWriter(self, run_id, clock, checks_calls=checks_calls, after=after)


_CHOICES = tuple(SteerWhen)
_METHODS = ("create", "reopen", "load", "runs", "tail", "post", "mail", "publish")


def _is_taken(error: Exception | None) -> bool:
    """Return whether the log could be written, but another writer has it."""
    return isinstance(error, (RunExists, RunBusy))


_T = TypeVar("_T")


def _could_not(what: str, error: Exception | None) -> RunLogError:
    if error is None:
        return RunLogError(f"the run log could not {what}")
    failure = RunLogError(f"the run log could not {what}: {type(error).__name__}: {error}")
    if isinstance(error, RunExists):
        failure.add_note("What to do: use another run id, or resume the run.")
    return failure


_C = TypeVar("_C", bound=StrEnum)


def _choice(name: str, kind: type[_C], value: str) -> _C:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(kind)
        raise ConfigError(f"RunLog: {name} must be one of {choices}, not {value!r}") from None


def store_of(given: RunStore | RunLog) -> RunStore:
    """Return the store. Raises `ConfigError` for anything else."""
    store = given.store if isinstance(given, RunLog) else given
    if not callable(getattr(store, "load", None)):
        raise ConfigError(f"expected a store of runs, such as JsonlStore('runs'), not {store!r}")
    return store


_Noted: TypeAlias = tuple[tuple[int, ...], tuple[str, ...], tuple[Interrupt, ...]]
_NOTHING: _Noted = ((), (), ())


class LoggedClock:
    """A clock that records its readings, ids, steps and interrupts for the next record."""

    __slots__ = ("asked", "events", "ids", "interrupts", "readings", "time_ms", "unlogged")

    def __init__(self, clock: Clock) -> None:
        self.unlogged = clock
        self.time_ms: Callable[[], int] = getattr(clock, "peek_ms", clock.now_ms)
        """Reads the time without recording it. A clock that returns each reading once has
        ``peek_ms``.
        """
        self.readings: list[int] = []
        self.ids: list[str] = []
        self.events = 0
        """The number of events emitted."""
        self.asked = 0
        """The number of hook calls and returns together."""
        self.interrupts: list[Interrupt] = []

    @property
    def steps(self) -> int:
        """The number of events, hook calls and hook returns together."""
        return self.events + self.asked

    def take(self) -> _Noted:
        """Return and clear the readings, ids and interrupts."""
        noted = tuple(self.readings), tuple(self.ids), tuple(self.interrupts)
        self.readings.clear()
        self.ids.clear()
        self.interrupts.clear()
        return noted

    def now_ms(self) -> int:
        """Return and record the time."""
        now = self.unlogged.now_ms()
        self.readings.append(now)
        return now

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await self.unlogged.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Call the callback later."""
        return call_later(self.unlogged, seconds, callback)

    def new_id(self) -> str:
        """Return and record a new id."""
        new = self.unlogged.new_id()
        self.ids.append(new)
        return new


class LiveEvent(Struct, frozen=True):
    """What `RunStore.publish` gets: an event that is not recorded, and the number of the next
    record.
    """

    seq: int
    event: Any


class Continuation(Struct, frozen=True):
    """The point where a log of another process is continued."""

    last: Record
    """Its last record."""
    waiting: Mapping[int, SteeringReceipt]
    """The receipts of messages that were accepted and never delivered, by number."""
    last_number: int
    """The number of the last accepted message."""
    below: tuple[str, ...] = ()
    """The runs right below, by their ids."""
    sourced: Mapping[str, dict[str, Any]] = {}
    """The tools of a tool source, as the log declares them."""
    appender: RunAppender | None = None
    """The appender of the log, if it is already open."""
    consulted: Sequence[Consulted] = ()
    """What models have answered plugins since the newest request."""
    mails: frozenset[str] = frozenset()
    """The ids of the messages in the mailbox that the run has taken."""
    cancelled: CancelReceived | None = None
    """The message that cancels the run, if that is still to happen."""
    mailbox: Sequence[Mail] | Exception | None = None
    """What is in the mailbox of a remote store, or why it cannot be read; None: read it now."""


class RunWriter(Journal):
    """The journal of a logged run: writes its records, in order."""

    keeps_progress = True

    def __init__(
        self,
        log: RunLog,
        run_id: str,
        clock: Clock,
        *,
        checks_calls: bool = False,
        after: Continuation | None = None,
    ) -> None:
        super().__init__(LoggedClock(clock))
        self.log = log
        self.run_id = run_id
        self.noted = cast("LoggedClock", self.clock)
        """The clock, with what the next record holds besides its entry."""
        self._checks_calls = checks_calls
        self._after = after
        self._is_open = False
        self._has_ended = False
        """Whether the end of the run is recorded; then nothing follows."""
        self._is_closing = False
        """Whether the run is over, so that a failure of the log can no longer stop it."""
        self._is_let_go = False
        """Whether another process will continue the run."""
        self._appender: RunAppender | None = None
        last = None if after is None else after.last
        self._seq = self._confirmed = self.first = 0 if last is None else last.seq + 1
        self._checksum = 0 if last is None or last.crc is None else int(last.crc, 16)
        self._is_broken = False
        self._is_closed = False
        self._is_writing = False
        """Whether a record is being written."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.receives = log.mail_every is not None
        if log.live:
            self.publish = self._publish
        self._run: Run | None = None
        self._timer: asyncio.TimerHandle | None = None
        """The next look into the mailbox."""
        self._read = 0
        """How many messages of the mailbox were read."""
        self._mails: set[str] = set()
        """The ids of those that were taken."""
        self._mail_failed = False
        self._mail_task: asyncio.Task[None] | None = None
        self._accepted = 0
        self._steering: dict[SteeringReceipt, int] = {}
        self._views: dict[tuple[str, int], _View] = {}
        """What plugins have made of the transcript, as the log has it: a plugin that has edited
        nothing yet has none.
        """
        self._transforms: dict[str, int] = {}
        """How many plugins of a name have edited the next request."""
        self._gates: dict[str, tuple[str, ...] | None] = {}
        self._tools: dict[str, dict[str, Any]] = {}
        """The tools that the log knows of."""
        self._own: Sequence[str] = ()
        """Those of the config, by name."""
        self._attempts = (0, 0)
        """The newest turn, and its number of requests."""
        self._syncs_records = log.durability is Durability.RECORD
        self._fingerprint = _Fingerprint()
        self._consulted = [] if after is None else [*after.consulted]
        """What models have answered plugins in the turn that an earlier process did not finish."""

    @property
    def can_wait(self) -> bool:
        """Whether there is a log to resume from."""
        return not self._is_broken

    # --- start and end --------------------------------------------------------------------------

    def began(self, run: Run, prompts: Sequence[AgentMessage]) -> None:
        """Open the log and record the start of the run."""
        self._run = run
        self._open("be created", lambda: self.log.store.create(self.run_id), may_fail=True)
        self._own = run.config.registry.names
        self._tools = {tool.name: _declared(tool) for tool in run.registry.values()}
        identity, config = run.identify(), run.config
        self.write(
            RunBegan(
                identity=identity,
                system_prompt=run.system_prompt,
                history=tuple(run.transcript),
                prompts=tuple(prompts),
                model_id=config.model_id,
                model=config.model_ref.model,
                provider=config.model_ref.provider,
                tools={tool.name: _shown(tool.schema) for tool in run.registry.values()},
                tool_source=None if config.source_hook is None else config.source_hook.name,
                plugins=tuple([plugin_name(plugin) for plugin in run.hooks.plugins]),
                tool_call_id=run.lineage.call_id,
                call_place=run.lineage.call_place,
                host_notes={} if identity.depth else self.log.notes,
                trace={} if run.trace is None else dict(run.trace.carrier),
                agent_name=config.agent_name,
            )
        )
        self._schedule_mail()

    def resumed(self, run: Run, resumption: Resumption) -> None:
        """Record that the run of another process is continued."""
        after, self._run = self._after, run
        assert after is not None
        self._open(
            "be continued",
            lambda: after.appender or self.log.store.reopen(self.run_id, after=after.last.seq),
        )
        self._own = run.config.registry.names
        self._tools = {tool.name: _declared(tool) for tool in run.config.registry.values()}
        self._tools |= after.sourced
        self._accepted = after.last_number
        self._steering = {receipt: number for number, receipt in after.waiting.items()}
        parent = run.lineage.parent
        within = None if parent is None else parent.journal.first
        trace = {} if run.trace is None else dict(run.trace.carrier)
        self.write(RunResumed(resumption.turns, after.below, within, trace))
        if [*self._tools] != [*run.registry] or any(
            self._tools[tool.name] != _declared(tool) for tool in run.registry.values()
        ):
            self.tools_changed(run.registry)
        self._mails.update(after.mails)
        if after.cancelled is not None and self.log.mail_every is not None:
            run.signal.cancel(after.cancelled.reason)
        if after.mailbox is None:
            self._take_mail()
        elif self.log.mail_every is not None:  # before the run begins, as with other stores
            self._took_mail(after.mailbox)

    def _open(self, what: str, take: Callable[[], RunAppender], *, may_fail: bool = False) -> None:
        try:
            self._appender = take()
        except Exception as error:
            if not may_fail or self.log.on_failure is OnFailure.FAIL or _is_taken(error):
                raise _could_not(what, error) from error
            logger.exception("the log of run %s could not be created", self.run_id)
            self._is_broken = True
        self._is_open = True
        self._loop = asyncio.get_running_loop()

    def ended(self, run: Run, outcome: LoopOutcome, limit: BudgetLimit | None) -> None:
        """Record the result of the run."""
        self.write(
            RunEnded(
                outcome=str(outcome),
                usage=run.spending.usage,
                tree_usage=run.spending.tree_usage,
                limit=None if limit is None else str(limit),
            ),
            ends_turn=True,
        )
        self._end()

    def _end(self) -> None:
        """Note that nothing follows. A run in a remote store is given back with its last record, so
        that another process can go on at once.
        """
        self._has_ended = True
        if is_remote(self.log.store) and self._appender is not None:
            self._appender.close()

    def suspended(
        self, run: Run, calls: Sequence[Call], results: Sequence[ToolResultMessage]
    ) -> None:
        """Record that the run waits. The batch stays open."""
        time, positions = self._places(calls, results)
        self.write(
            RunSuspended(
                time=time,
                positions=positions,
                usage=run.spending.usage,
                tree_usage=run.spending.tree_usage,
            ),
            ends_turn=True,
        )
        self._end()

    def let_go(self) -> None:
        """Note that another process will continue the run."""
        self._is_let_go = True

    def closing(self) -> None:
        """Note that the run is over. From now on a lost record does not raise, and no message from
        the mailbox is taken.
        """
        self._is_closing = True

    def failed(self, failure: LoopError) -> None:
        """Record that the run ended with an error.

        A run that failed because of its log, or that of a child run, gets no such record: it can be
        resumed.
        """
        is_open = self._is_open and not self._has_ended
        if not is_open or isinstance(failure, (RunLogError, RunLetGo)):
            return
        self.write(
            RunFailed(
                error=type(failure).__name__,
                text=str(failure),
                reason=failure.reason if isinstance(failure, RunAborted) else None,
                usage=failure.usage,
                tree_usage=failure.tree_usage,
                partial=failure.partial,
                undelivered=failure.undelivered,
                fields=own_fields(failure),
            )
        )
        self._has_ended = True

    # --- records --------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[int, int]:
        """The number of the next record, and the number of steps since the last one."""
        return self._seq, self.noted.steps

    def write(
        self,
        entry: Entry,
        *,
        flush: bool = True,
        ends_turn: bool = False,
        steps: int = 0,
        returned: tuple[int, int] | None = None,
    ) -> None:
        """Write an entry. With ``flush``, the store writes it and all before it, at once or soon.

        ``steps`` and ``returned`` go into its record.
        """
        appender = self._appender
        if appender is None or self._is_broken:
            self._lost(None)
            return
        if self._is_let_go and not is_kept_when_let_go(entry):
            return
        self._is_writing = True
        clock, seq = self.noted, self._seq
        readings, ids, interrupts = _NOTHING
        if clock.readings or clock.ids or clock.interrupts:
            readings, ids, interrupts = clock.take()
        record = Record(
            RUN_LOG_VERSION,
            seq,
            self.run_id,
            clock.time_ms(),
            entry,
            readings,
            ids,
            clock.events,
            steps,
            returned,
            interrupts,
        )
        try:
            try:
                body = _encode(record)[:-1]
            except _UNENCODABLE:
                body = encode_entry(record)[:-1]
            self._checksum = checksum = crc32(body, self._checksum)
            appender.append(record, SEALED % (body, checksum))
            if self._syncs_records:
                appender.flush(sync=True)
            elif flush:
                appender.flush(sync=ends_turn and self.log.durability is Durability.TURN)
        except Exception as error:
            self._is_writing = False
            self._lost(error)
            return
        self._seq = seq + 1
        clock.events = clock.asked = 0
        self._is_writing = False

    def barrier(self) -> Awaitable[None]:
        """Wait until the store has written everything. Raises `RunLogError`."""
        appender = self._appender
        if appender is None or self._is_broken:
            self._lost(None, 0)
            return FINISHED
        try:
            waiting = appender.barrier()
        except Exception as error:
            self._lost(error, self._seq - self._confirmed)
            return FINISHED
        if waiting is FINISHED:
            self._confirmed = self._seq
            return FINISHED
        return self._wait(waiting, self._seq)

    async def _wait(self, waiting: Awaitable[None], written: int) -> None:
        try:
            await waiting
        except Exception as error:
            self._lost(error, self._seq - self._confirmed)
        else:
            self._confirmed = max(self._confirmed, written)

    async def settle(self, grace: float, *, is_cancelled: bool) -> None:
        """Wait for the last records of a run that is over; if it is cancelled, at most ``grace``
        seconds. Does not raise.
        """
        if is_remote(self.log.store) and self._appender is not None:
            self._appender.close()
        waiting = self.barrier() if self._is_open else FINISHED
        if waiting is FINISHED:
            return
        task = asyncio.ensure_future(waiting)
        now = asyncio.get_running_loop().time
        until = now() + grace if is_cancelled else None
        while not task.done() and (until is None or now() < until):
            try:
                await asyncio.wait([task], timeout=None if until is None else until - now())
            except asyncio.CancelledError:
                # This may be the cancellation that has ended the run, delivered only now.
                logger.debug("cancelled while the log of a run was being closed")
                until = now() + grace if until is None else until
        if not task.done():
            task.cancel()  # the store still writes
            logger.warning("the end of the log of run %s is not written yet", self.run_id)

    # --- input of the run -----------------------------------------------------------------------

    def asked(self, request: StreamRequest, turn: int) -> None:
        """Record the fingerprint of a request. With `Durability.TURN`, this syncs the earlier
        turns.
        """
        self._transforms.clear()
        last, attempt = self._attempts
        self._attempts = turn, attempt + 1 if turn == last else 1
        fingerprint = self._fingerprint
        syncs = self.log.durability is Durability.TURN
        entry = Asked(
            turn=turn,
            attempt=self._attempts[1],
            messages=len(request.messages),
            digest=fingerprint.of_messages(request.messages),
            settings=fingerprint.of_settings(request),
            request=msgspec.json.decode(encode_entry(request)) if self.log.full_requests else None,
        )
        self.write(entry, flush=syncs or self.log.live, ends_turn=syncs)

    def consulted_before(self, plugin: str, request: StreamRequest) -> Consultation | None:
        """Return the answer that an earlier process has recorded for this request, once."""
        if not self._consulted:
            return None
        digest = _digest(request)
        for number, entry in enumerate(self._consulted):
            if entry.plugin == plugin and entry.digest == digest:
                del self._consulted[number]
                return Consultation(
                    plugin, entry.turn, request, entry.message, entry.error, entry.error_text
                )
        return None

    def consulted(self, consultation: Consultation) -> None:
        """Record how a model has answered a plugin. The answer is paid for: it is flushed."""
        request = consultation.request
        self.write(
            Consulted(
                plugin=consultation.plugin,
                turn=consultation.turn,
                messages=len(request.messages),
                digest=_digest(request) or "",
                message=consultation.message,
                error=consultation.error,
                error_text=consultation.error_text,
                model=consultation.model,
            )
        )

    def answered(
        self, answer: OpenAnswer, message: AssistantMessage, discarded: str | None = None
    ) -> None:
        """Record the answer and how it was split, or how the stream failed."""
        failure, answer.failure = answer.failure, None
        kind, text, raised = failure or (None, None, None)
        is_announced = answer.was_announced
        # The record of a tool start follows at once, and flushes this one too.
        follows = bool(message.tool_calls) and discarded is None
        self.write(
            Answered(
                message=message,
                start=answer.placeholder if is_announced and answer.placeholder != EMPTY else None,
                pieces=cut(answer.chunks, message) if is_announced else None,
                details=answer.details,
                discarded=discarded,
                error=kind,
                error_text=text,
                raised=None if raised is None else (type(raised).__name__, message_of(raised)),
            ),
            flush=not follows or self._checks_calls,
        )

    def added(
        self,
        source: Literal["turn", "follow_up", "loop"],
        messages: Sequence[AgentMessage],
        purposes: Sequence[Purpose],
        receipts: Sequence[SteeringReceipt] = (),
        *,
        before_request: tuple[int, str] | None = None,
    ) -> None:
        """Record that messages enter the transcript, why, and which accepted ones they deliver."""
        turn, plugin = before_request or (None, None)
        numbers = tuple([self._number(receipt) for receipt in receipts])
        self.write(
            MessagesAdded(
                source=source,
                messages=tuple(messages),
                purposes=tuple(purposes),
                steering=numbers,
                turn=turn,
                plugin=plugin,
            )
        )

    def _number(self, receipt: SteeringReceipt) -> int:
        """Record that a message was sent, once. Return its number."""
        number = self._steering.get(receipt)
        if number is None:
            self._accepted += 1
            number = self._steering[receipt] = self._accepted
            when = "follow_up" if receipt.is_follow_up else str(receipt.when)
            accepted = SteeringAccepted(
                number=number, message=receipt.message, when=when, mail=receipt.mail
            )
            self.write(accepted, steps=self.noted.steps)
        return number

    def accepted(self, receipt: SteeringReceipt) -> None:
        """Record that a message was sent. A failure does not raise here, in the sender: the next
        record of the run raises it.
        """
        if not self._is_closed and not self._has_ended:
            with suppress(RunLogError):
                self._number(receipt)

    def message_sent(self, note: Callable[[], None]) -> None:
        """Call ``note`` in the run's event loop. Called on any thread."""
        if self._seq == self.first:  # the run is about to begin, and then checks what waits
            return
        loop = self._loop
        # A signal handler may steer while a record is being written.
        if is_running(loop) and not self._is_writing:
            note()
        elif loop is not None:
            call_in_loop(loop, note)

    # --- the mailbox ----------------------------------------------------------------------------

    def _schedule_mail(self) -> None:
        if self.log.mail_every is not None and self._loop is not None and self._takes_mail:
            self._timer = self._loop.call_later(self.log.mail_every, self._take_mail)

    @property
    def _takes_mail(self) -> bool:
        is_over = self._is_closing or self._has_ended or self._is_closed
        return not (is_over or self._is_broken or self._appender is None)

    def _take_mail(self) -> None:
        """Take what is new in the mailbox, and look again later. Does not raise."""
        if self.log.mail_every is None or not self._takes_mail:
            return
        store = self.log.store
        if getattr(self._appender, "is_lost", False):
            assert self._run is not None
            self._run.signal.cancel(LET_GO)
        elif not is_remote(store):
            self._took_mail(caught(self._new_mail))
        elif may_have_mail(store, self.run_id):
            self._mail_task = asyncio.ensure_future(self._fetch_mail())
        else:
            self._schedule_mail()

    def _new_mail(self) -> Sequence[Mail]:
        return self.log.store.mail(self.run_id, after=self._read)

    async def _fetch_mail(self) -> None:
        """Take what is new in the mailbox of a store that may have to wait for a network."""
        self._took_mail(await asyncio.to_thread(caught, self._new_mail))

    def _took_mail(self, mails: Sequence[Mail] | Exception) -> None:
        if isinstance(mails, Exception):
            if not self._mail_failed:  # once for each failure that lasts
                logger.warning("the mailbox of run %s cannot be read: %s", self.run_id, mails)
            self._mail_failed = True
        elif self._takes_mail:
            self._mail_failed = False
            self._read += len(mails)
            for mail in mails:
                if mail.id not in self._mails and self._takes_mail:
                    self._take(mail)
        self._schedule_mail()

    def _take(self, mail: Mail) -> None:
        run = self._run
        assert run is not None
        match mail.kind:
            case "cancel":
                self.cancel_received(CancelReceived(mail=mail.id, reason=mail.reason))
                run.signal.cancel(mail.reason)
            case "steer" | "follow_up" if mail.message is not None:
                is_steering = mail.kind == "steer" and mail.when in _CHOICES
                when = SteerWhen(mail.when or "") if is_steering else SteerWhen.AFTER_BATCH
                receipt = SteeringReceipt(mail.message, when, mail=mail.id)
                receipt.is_follow_up = mail.kind == "follow_up"
                self.receive(receipt)
            case _:  # events are for requests that wait
                return

    def receive(self, receipt: SteeringReceipt) -> None:
        """Pass a message from the mailbox to the run."""
        run = self._run
        assert run is not None
        assert receipt.mail is not None
        self._mails.add(receipt.mail)
        run.inbox.receive(receipt)
        run.interrupts.received()

    def cancel_received(self, entry: CancelReceived) -> None:
        """Record that a message cancels the run. A failure does not raise, as in `accepted`."""
        self._mails.add(entry.mail)
        with suppress(RunLogError):
            self.write(entry, steps=self.noted.steps)

    # --- tools and context ----------------------------------------------------------------------

    def tools_changed(self, tools: ToolRegistry) -> None:
        """Record which tools were added or removed. A reopened log compares them itself."""
        if not self._is_open:
            return
        known, self._tools = self._tools, {tool.name: _declared(tool) for tool in tools.values()}
        added = {name: tool for name, tool in self._tools.items() if known.get(name) != tool}
        removed = tuple([name for name in known if name not in self._tools])
        names = tuple([name for name in self._tools if name not in self._own])
        kept = [name for name in known if name in self._tools and name not in self._own]
        expected = (*kept, *[name for name in added if name not in kept])
        order = None if names == expected else names
        self.write(ToolsChanged(added=added, removed=removed, order=order), flush=False)

    def tool_started(self, call: Call) -> Awaitable[None]:
        """Record that a tool is about to run. Await the result before it runs."""
        wanted = call.call
        self.write(
            ToolStarted(
                position=call.position,
                tool_call_id=wanted.id,
                tool_name=wanted.name,
                arguments=None if call.args is wanted.arguments else call.args,
            ),
            flush=False,
        )
        return self.barrier()

    def tool_progressed(self, position: int, partial: ToolResult) -> None:
        """Record the progress of a tool."""
        self.write(ToolProgress(position=position, partial=partial), flush=self.log.live)

    def keep(self, name: str, pieces: Pieces) -> bool:
        """Keep a large result with the records that follow, if the store can."""
        keep = getattr(self._appender, "keep", None)
        if self._is_broken or keep is None:
            if keep is None and not self._is_broken:
                self.log.warn_that_nothing_is_kept()
            return False
        try:
            keep(name, pieces)
        except Exception:
            logger.exception("a large result of run %s could not be kept in its log", self.run_id)
            return False
        return True

    @property
    def may_lose(self) -> bool:
        """Whether the run continues without its records."""
        return self.log.on_failure is OnFailure.DROP

    def tool_ended(self, call: Call, result: ToolResult) -> None:
        """Record the result of a call; or that it has not run, for the process that goes on."""
        if self._is_let_go and call.is_announced:
            self.write(ToolWithdrawn(position=call.position, tool_call_id=call.call.id))
            return
        given, kept = call.given, call.kept
        if given is not None and kept is not None and kept.is_given:
            given = kept.leave_out(given)
        self.write(
            ToolEnded(
                position=call.position,
                tool_call_id=call.call.id,
                tool_name=call.repaired_name,
                result=result,
                given=given,
                kept=kept,
                by_runtime=call.by_runtime,
                raised=call.raised,
                raised_text=call.raised_text,
                hook_raised=call.hook_raised,
                decisions=tuple(call.decisions),
            ),
            returned=call.returned_at,
        )

    def call_suspended(self, call: Call) -> None:
        """Record that a call waits."""
        wait = call.wait
        assert wait is not None
        self.write(
            CallSuspended(
                position=call.position,
                tool_call_id=call.call.id,
                tool_name=call.repaired_name,
                request=wait.request,
                child_run_ids=wait.child_run_ids,
                decisions=tuple(call.decisions),
            )
        )

    def batch_ended(self, calls: Sequence[Call], results: Sequence[ToolResultMessage]) -> None:
        """Record that the results of a batch are in the transcript."""
        time, positions = self._places(calls, results)
        self.write(BatchEnded(time, positions), flush=False)

    def _places(
        self, calls: Sequence[Call], results: Sequence[ToolResultMessage]
    ) -> tuple[int | tuple[int, ...], tuple[int, ...] | None]:
        """Return the times of the results, and which calls they answer."""
        times = tuple([result.timestamp or 0 for result in results])
        # These readings were made only for the timestamps.
        del self.noted.readings[-len(times) :]
        if len(times) == 1:
            return times[0], None
        time = times[0] if len(set(times)) == 1 else times
        positions = tuple([call.position for call in calls])
        in_order = positions == tuple(range(len(positions)))
        return time, None if in_order else positions

    def edited(
        self,
        plugin: str,
        before: Sequence[AgentMessage],
        after: Sequence[AgentMessage],
        *,
        is_lasting: bool = False,
    ) -> None:
        """Record how a plugin's view differs from its last view plus the new messages.

        The common prefix is skipped if it is known without a comparison. `SentMessages` applies the
        edits to the same messages.
        """
        if is_lasting:
            self._views.clear()  # they do not extend to the new transcript
            self._write_edits(plugin, changes(before, after), is_lasting=True)
            return
        which = self._transforms[plugin] = self._transforms.get(plugin, -1) + 1
        last = self._views.get((plugin, which))
        if last is None:
            edits = () if after is before else changes(before, after)
            if not edits:
                return
        else:
            shared = _shared(last.made, after)
            expected = [*last.made[shared:], *before[last.taken :]]
            edits = changes(expected, after[shared:], shared)
        made = after if isinstance(after, MessageView) else tuple(after)
        self._views[plugin, which] = _View(len(before), made)
        self._write_edits(plugin, edits, which)

    def _write_edits(
        self, plugin: str, edits: tuple[Edit, ...], which: int = 0, *, is_lasting: bool = False
    ) -> None:
        if edits:
            self.write(
                ContextEdited(plugin=plugin, edits=edits, which=which, is_lasting=is_lasting),
                flush=False,
            )

    def gated(self, plugin: str, allow: tuple[str, ...] | None) -> None:
        """Record what a gate allows, if that has changed."""
        if self._gates.get(plugin) != allow:
            self._gates[plugin] = allow
            self.write(ToolsGated(plugin=plugin, allow=allow), flush=False)

    def _publish(self, event: AgentEvent) -> None:
        """Show a delta to those who follow the run, with the number of the next record: once they
        have that record, the delta is obsolete.
        """
        self.log.store.publish(self.run_id, encode_json(LiveEvent(self._seq, event)))

    # --- steps ----------------------------------------------------------------------------------

    def emitting(self, emit: Emit) -> Emit:
        """Wrap ``emit`` to count events, each before its listeners can react to it."""
        noted = self.noted

        def counted(event: AgentEvent) -> Awaitable[None]:
            noted.events += 1
            return emit(event)

        return counted

    def hook_asked(self) -> Awaitable[None]:
        """Count a hook call."""
        self.noted.asked += 1
        return FINISHED

    def hook_answered(self) -> Awaitable[None]:
        """Count the return of a hook."""
        self.noted.asked += 1
        return FINISHED

    def decided(self) -> None:
        """Count a decision that depends on events outside the run."""
        self.noted.asked += 1

    def interrupted(
        self, why: Literal["cancelled", "out_of_time"], noticed_by: int | None = None
    ) -> None:
        """Record that the run was cancelled here, or ran out of time."""
        if why == "out_of_time" or not self._is_closing:
            self.noted.interrupts.append(Interrupt(self.noted.steps, why, noticed_by))

    def close(self) -> None:
        """Close the log."""
        self._is_closed = True
        self._run = None
        if self._timer is not None:
            self._timer.cancel()
        if self._mail_task is not None:
            self._mail_task.cancel()
        try:
            if self._appender is not None:
                self._appender.close()
        except Exception:
            logger.exception("the log of run %s could not be closed", self.run_id)

    def _lost(self, error: Exception | None, records: int = 1) -> None:
        """Count records that cannot be written. Raises unless the run may continue without them."""
        self._is_broken = True
        self.log.dropped += records
        may_go_on = self.log.on_failure is OnFailure.DROP and not _is_taken(error)
        if may_go_on or self._is_closing:
            if error is not None:
                logger.error(
                    "the log of run %s cannot be written; the run continues without it: %s",
                    self.run_id,
                    error,
                )
            return
        if isinstance(error, RunTakenOver):
            self._is_let_go = True
            raise RunLetGo() from error
        raise _could_not("be written", error) from error


_OF_EVERY_ERROR = frozenset([*vars(LoopError("")), "__notes__", "turn", "bill"])


def own_fields(failure: LoopError) -> dict[str, Any]:
    """Return the attributes of an error that not every error of a run has."""
    own = {name: value for name, value in vars(failure).items() if name not in _OF_EVERY_ERROR}
    return cast("dict[str, Any]", msgspec.json.decode(encode_entry(own))) if own else {}


def is_kept_when_let_go(entry: Entry) -> bool:
    """Return whether a process that gives a run up records this: what has really happened."""
    if isinstance(entry, ToolEnded):
        return entry.by_runtime is None
    return isinstance(entry, (SteeringAccepted, CallSuspended, ToolWithdrawn))


def _shown(schema: ToolSchema) -> dict[str, Any]:
    return {"description": schema.description, "parameters": schema.parameters}


_FLAGS = (
    "requires_exclusive_sandbox",
    "aborts_siblings_on_error",
    "counts_toward_tool_call_limit",
    "parallel_safe_per_turn",
    "counts_toward_termination_vote",
    "idempotent",
    "reads_only",
    "runs_agent",
    "is_final_answer",
)


def _declared(tool: AgentTool) -> dict[str, Any]:
    """Return a tool as the model sees it, with the flags that the engine needs."""
    flags = {name: getattr(tool, name) for name in _FLAGS}
    unusual = {name: flag for name, flag in flags.items() if flag != getattr(AgentTool, name)}
    return {**_shown(tool.schema), **({"flags": unusual} if unusual else {})}


def _json_form(value: object) -> object:
    """Return the value if it is JSON, otherwise a description: host data must not end a run."""
    try:
        return to_json_value(value)
    except NotImplementedError:
        return {"not_json": repr(value)[:200]}


_encode = msgspec.json.Encoder(enc_hook=_json_form).encode
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)


def encode_entry(value: Any) -> bytes:
    """Encode an entry, or a part of one. Values without a JSON form are described instead."""
    try:
        return _encode(value)
    except _UNENCODABLE:
        return _encode(_described(value))


_DEPTH = 60


def _described(value: Any, depth: int = 0) -> Any:
    """Replace everything that JSON cannot hold: keys, cycles, lone surrogates."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else {"not_json": str(value)[:200]}
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if depth > _DEPTH:
        return {"not_json": "too deep, or a circle"}
    if isinstance(value, msgspec.Struct):
        return _described(_fields(value), depth + 1)
    if isinstance(value, dict):
        items = [(k if isinstance(k, str) else repr(k)[:200], v) for k, v in value.items()]
        return {_described(k): _described(v, depth + 1) for k, v in items}
    if isinstance(value, (list, tuple, set, frozenset, MessageView)):
        return [_described(item, depth + 1) for item in value]
    try:
        return msgspec.json.decode(_encode(value))
    except Exception:
        return {"not_json": repr(value)[:200]}


def _fields(value: msgspec.Struct) -> Any:
    """Return the fields of a struct as it encodes them, and its tag."""
    config = value.__struct_config__
    if config.array_like:
        return [getattr(value, name) for name in value.__struct_fields__]
    tag = {} if config.tag is None else {str(config.tag_field): config.tag}
    return tag | {
        encoded: getattr(value, name)
        for name, encoded in zip(
            value.__struct_fields__, value.__struct_encode_fields__, strict=True
        )
    }


class _View(Struct, frozen=True):
    """What a plugin has made of the messages that it got."""

    taken: int
    """How many it got."""
    made: Sequence[AgentMessage]


def _shared(earlier: Sequence[AgentMessage], later: Sequence[AgentMessage]) -> int:
    """Return how many messages at the front are known to be equal."""
    if isinstance(earlier, MessageView) and isinstance(later, MessageView):
        return earlier.stable if later.grew_from(earlier) else 0
    return 0


def changes(
    before: Sequence[AgentMessage], after: Sequence[AgentMessage], offset: int = 0
) -> tuple[Edit, ...]:
    """Return the edits that turn one into the other, compared by object identity; ``offset``
    messages come before both.
    """
    start, stop = 0, min(len(before), len(after))
    while start < stop and before[start] is after[start]:
        start += 1
    end = 0
    while end < stop - start and before[-1 - end] is after[-1 - end]:
        end += 1
    last = len(before) - end
    places = {id(before[place]): place for place in range(start, last)}
    edits: list[Edit] = []
    inserted: list[AgentMessage] = []
    for message in after[start : len(after) - end]:
        place = places.get(id(message), -1)
        if place < start:  # it is new or out of order
            inserted.append(message)
            continue
        if place > start or inserted:
            edits.append(Edit(offset + start, place - start, tuple(inserted)))
            inserted = []
        start = place + 1
    if last > start or inserted:
        edits.append(Edit(offset + start, last - start, tuple(inserted)))
    return tuple(edits)


_DIGEST_SIZE = 12


def _digest(value: Any) -> str | None:
    return (
        None
        if value is None
        else blake2b(encode_entry(value), digest_size=_DIGEST_SIZE).hexdigest()
    )


class _Fingerprint:
    """Digests of requests. While the transcript only grows, each message is digested once."""

    def __init__(self) -> None:
        self._view: MessageView | None = None
        self._digest = blake2b(digest_size=_DIGEST_SIZE)
        self._settings: tuple[Any, ...] = ()
        self._last: dict[str, Any] | None = None

    def of_messages(self, messages: Sequence[AgentMessage]) -> str:
        """Return a digest of all messages, in order."""
        if not isinstance(messages, MessageView):
            return self._of_all(messages)
        start = 0
        if self._view is not None and messages.grew_from(self._view):
            start = self._view.stable
        else:
            self._digest = blake2b(digest_size=_DIGEST_SIZE)
        digest = self._digest
        added = messages.stable_from(start)
        try:
            digest.update(b"".join(map(_encode, added)))
        except _UNENCODABLE:
            digest.update(b"".join(map(encode_entry, added)))
        self._view = messages
        if messages.tail:
            digest = digest.copy()
            for message in messages.tail:
                digest.update(encode_entry(message))
        return digest.hexdigest()

    def _of_all(self, messages: Sequence[AgentMessage]) -> str:
        digest = blake2b(digest_size=_DIGEST_SIZE)
        for message in messages:
            digest.update(encode_entry(message))
        return digest.hexdigest()

    def of_settings(self, request: StreamRequest) -> dict[str, Any] | None:
        """Return everything but the messages; None if it is unchanged since the last request."""
        settings = (
            request.system_prompt,
            request.tools,
            request.temperature,
            request.max_output_tokens,
            request.reasoning,
            request.provider_extras,
            request.force_tool_call,
            request.output_schema,
        )
        if all(map(is_, settings, self._settings)) and self._settings:
            return None
        self._settings = settings
        shown = {
            "system_prompt": _digest(request.system_prompt),
            "tools": {tool.name: _digest(tool) for tool in request.tools},
            "temperature": request.temperature,
            "max_output_tokens": request.max_output_tokens,
            "reasoning": str(request.reasoning),
            "provider_extras": _digest(request.provider_extras),
            "force_tool_call": request.force_tool_call,
        }
        if request.output_schema is not None:
            shown["output_schema"] = _digest(request.output_schema)
        last, self._last = self._last, shown
        return None if shown == last else shown
