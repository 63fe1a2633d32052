"""From records to items: what the page shows of a run, in the order of its log.

A `Timeline` takes the records of a run and returns an item for each. What it keeps is small (the
turn, the calls that run), so a copy of it beside a place in the log lets one begin there.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clark_agent.errors import ConfigError
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
from clark_agent.view import items
from clark_agent.view.items import Item
from clark_agent.view.parts import Parts, source_of, tokens_of
from clark_agent.waiting import WaitingRequest

__all__ = ["Timeline", "items_of", "known_price", "model_name"]

_MOST_INSERTED = 20


def items_of(loaded: LoadedRun) -> list[Item]:
    """Return the items of a run, with whole texts and with images as ``data:`` URLs."""
    timeline = Timeline(Parts(None, inline=True))
    return [timeline.take(record) for record in loaded.records]


def known_price(model: ModelRef, prices: dict[str, Price] | None = None) -> Price | None:
    """Return the price of a model, if it is known."""
    try:
        return find_price(model, prices or {})
    except ConfigError:  # genai-prices is not installed
        return None


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
                return items.Added(
                    **place,
                    source=added.source,
                    messages=parts.messages(added.messages, seq, "messages"),
                    purposes=added.purposes,
                    steering=added.steering,
                    plugin=added.plugin,
                )
            case SteeringAccepted() as accepted:
                return items.Steered(
                    **place,
                    number=accepted.number,
                    message=parts.message(accepted.message, 0, seq, "message"),
                    when=accepted.when,
                    is_mail=accepted.mail is not None,
                )
            case ContextEdited() as edited:
                return self.context_changed(edited, place)
            case ToolsGated(plugin=plugin, allow=allow):
                return items.Gated(**place, plugin=plugin, allow=allow)
            case ToolsChanged(added=new, removed=removed):
                return items.ToolsChange(**place, added=tuple(new), removed=removed)
            case Asked(attempt=attempt, messages=messages):
                return items.RequestSent(**place, attempt=attempt, messages=messages)
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
                return items.ToolStart(
                    **place,
                    position=started.position,
                    call_id=started.tool_call_id,
                    name=started.tool_name,
                    arguments=None if changed is None else parts.json(changed, seq, "arguments"),
                )
            case ToolWithdrawn(position=position, tool_call_id=call_id):
                return items.ToolWithdraw(**place, position=position, call_id=call_id)
            case ToolProgress(position=position, partial=partial):
                text = parts.text(partial.plain_text, seq, "partial.content.0.text")
                return items.ToolProgressed(
                    **place, position=position, text=text, narration=partial.narration
                )
            case ToolEnded() as ended:
                return self._tool_result(ended, ms, place)
            case CallSuspended() as waits:
                request = waits.request
                return items.WaitingCall(
                    **place,
                    position=waits.position,
                    call_id=waits.tool_call_id,
                    name=self.name_of(waits.position, waits.tool_name),
                    request=None if request is None else parts.waiting(request, seq),
                    child_run_ids=waits.child_run_ids,
                    decisions=parts.decisions(waits.decisions, seq),
                )
            case BatchEnded(positions=positions):
                return items.BatchDone(**place, order=positions)
            case _:
                return self._of_the_run(record, ms, place)

    def _of_the_run(self, record: Record, ms: int | None, place: dict[str, Any]) -> Item:
        seq, parts = record.seq, self._parts
        match record.entry:
            case CancelReceived(reason=reason):
                return items.Cancelled(**place, reason=reason)
            case RunSuspended(usage=usage):
                return items.Suspended(**place, tokens=tokens_of(usage))
            case RequestDecided() as decided:
                return self._decided(decided, place)
            case RunResumed():
                return items.Resumed(**place, ms=ms)
            case RunEnded() as ended:
                return items.Ended(
                    **place,
                    outcome=ended.outcome,
                    limit=ended.limit,
                    tokens=tokens_of(ended.usage),
                    tree_tokens=tokens_of(ended.tree_usage),
                )
            case RunFailed() as failed:
                partial = () if failed.partial is None else failed.partial.content
                return items.Failed(
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
                return items.OtherRecord(**place, name=str(plain["kind"]), data=data)

    def _began(self, began: RunBegan, place: dict[str, Any]) -> Item:
        seq, parts = place["seq"], self._parts
        return items.Began(
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

    def context_changed(self, edited: ContextEdited, place: dict[str, Any]) -> items.ContextChanged:
        """Return what a plugin changed."""
        seq, edits = place["seq"], edited.edits
        changes = [
            items.ContextChange(
                edit.start,
                edit.removed,
                self._parts.messages(
                    edit.inserted[:_MOST_INSERTED], seq, f"edits.{n}.2", edit.start
                ),
                max(0, len(edit.inserted) - _MOST_INSERTED),
            )
            for n, edit in enumerate(edits[:_MOST_INSERTED])
        ]
        return items.ContextChanged(
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
        return items.Answer(
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
            sources=tuple(map(source_of, message.annotations)),
        )

    def _consultation(
        self, consulted: Consulted, ms: int, place: dict[str, Any]
    ) -> items.Consultation:
        message, model, seq = consulted.message, consulted.model, place["seq"]
        usage, price = message.usage, self.price_of(model)
        text = consulted.error_text
        return items.Consultation(
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
        return items.ToolResulted(
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
        return items.Decided(
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
