"""Results and errors of runs as plain JSON values, small enough for an engine to carry.

Messages stay in the log. What is carried is what a caller without the store needs: the output, the
last text, how the run ended and what it cost; of an error, its class, its text and its fields.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from clark_agent import errors
from clark_agent.budget import BudgetLimit
from clark_agent.config import LoopConfig
from clark_agent.errors import ClarkAgentError, ConfigError, LoopError, StreamError
from clark_agent.messages.wire import decode_json, encode_json, jsonable
from clark_agent.prices import Bill
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.run_log.fold import FoldedRun
from clark_agent.run_log.recorded import ended_calls, last_text, output_from
from clark_agent.stream import StreamErrorKind
from clark_agent.types import AgentMessage, AssistantMessage, Usage
from clark_agent.waiting import Verdict

__all__ = [
    "carried_error",
    "carried_messages",
    "carried_result",
    "fits",
    "plain",
    "restored_error",
    "restored_messages",
    "restored_result",
]

_MOST_BYTES = 1_000_000
"""Temporal refuses payloads of more than 2 MB."""


def plain(value: Any) -> Any:
    """Return the JSON value of a struct or of several."""
    return msgspec.json.decode(encode_json(value))


def fits(value: Any, most: int = _MOST_BYTES) -> bool:
    """Return whether a value is small enough to be carried."""
    return len(encode_json(value)) <= most


def carried_messages(messages: Any) -> list[Any]:
    """Return messages as JSON values."""
    return [plain(message) for message in messages]


def restored_messages(carried: Any) -> tuple[AgentMessage, ...]:
    """Return the messages again. Raises `DecodeError`."""
    restored: tuple[AgentMessage, ...] = decode_json(encode_json(carried), tuple[AgentMessage, ...])
    return restored


# --- results --------------------------------------------------------------------------------------


class _Ended(Struct, frozen=True, kw_only=True, omit_defaults=True):
    outcome: LoopOutcome
    text: str | None = None
    """The last text of the model."""
    calls: tuple[tuple[str, Any], ...] = ()
    """The calls that gave the output."""
    usage: Usage = Usage()
    tree_usage: Usage = Usage()
    limit: BudgetLimit | None = None
    bill: Bill = Bill()
    is_cut: bool = False
    """Whether text and calls are left out, because they are too large."""


def carried_result(result: RunResult[Any], folded: FoldedRun, config: LoopConfig) -> dict[str, Any]:
    """Return the result of a run that has ended as a JSON value, without its messages."""
    found = [(name, config.registry.find(name), args) for name, args in ended_calls(folded)]
    ended = _Ended(
        outcome=result.outcome,
        text=last_text(folded.messages),
        calls=tuple([(name, args) for name, tool, args in found if tool and tool.is_final_answer]),
        usage=result.usage,
        tree_usage=result.tree_usage,
        limit=result.limit,
        bill=result.bill,
    )
    if not fits(ended):
        ended = msgspec.structs.replace(ended, text=None, calls=(), is_cut=True)
    carried: dict[str, Any] = plain(ended)
    return carried


def restored_result(carried: dict[str, Any], run_id: str, config: LoopConfig) -> RunResult[Any]:
    """Return the result again; its only message is the last text of the model."""
    ended = decode_json(encode_json(carried), _Ended)
    if ended.is_cut:
        raise ConfigError(
            f"the result of the run {run_id!r} is too large to be carried by the engine: it is in "
            "the store of the worker. Give this handle the store too (store=...)"
        )
    said = () if ended.text is None else (AssistantMessage.from_text(ended.text),)
    return RunResult(
        messages=said,
        outcome=ended.outcome,
        usage=ended.usage,
        output=output_from(config, ended.calls, ended.text),
        limit=ended.limit,
        tree_usage=ended.tree_usage,
        bill=ended.bill,
    )


# --- errors ---------------------------------------------------------------------------------------

_IN_THE_LOG = ("messages", "partial", "undelivered", "bill")
_TYPES: dict[str, Any] = {"usage": Usage, "tree_usage": Usage, "decision": Verdict}
_KINDS: dict[str, type[ClarkAgentError]] = {
    name: kind
    for name in errors.__all__
    if issubclass(kind := getattr(errors, name), ClarkAgentError)
}


def carried_error(error: ClarkAgentError) -> dict[str, Any]:
    """Return the text and the fields of an error as a JSON value, without the messages."""
    fields = {name: value for name, value in vars(error).items() if name not in _IN_THE_LOG}
    carried: dict[str, Any] = jsonable({"text": str(error), "fields": fields})
    return carried if fits(carried) else {"text": str(error)[:10_000], "fields": {}}


def restored_error(kind_name: str | None, carried: dict[str, Any]) -> ClarkAgentError | None:
    """Return the error again; None if this package has no error of that name."""
    kind = _KINDS.get(kind_name or "")
    if kind is None:
        return None
    error = kind.__new__(kind)
    error.args = (carried["text"],)
    if isinstance(error, LoopError):
        error.messages, error.partial, error.undelivered = (), None, ()
        error.usage = error.tree_usage = Usage()
    for name, value in carried["fields"].items():
        if name in _TYPES:
            value = decode_json(encode_json(value), _TYPES[name])
        elif name == "kind" and isinstance(error, StreamError):
            value = StreamErrorKind(value)
        vars(error)[name] = value
    return error
