"""Runs recorded cases through this package and gives back what it did, as plain JSON values.

`run_pure` covers the pure functions, `run_scenario` the loop. They use the public API and the
standard library alone.
"""

from __future__ import annotations

import json
from typing import Any

import clark_agent as ca
from clark_agent import reasoning, stream, trajectory
from clark_agent.errors import DecodeError
from clark_agent.messages import (
    JsonSizeEstimator,
    ProviderRequestSummary,
    ThinkingTagStreamFilter,
    decode_json,
    decode_message,
    encode_json,
    encode_message,
    strip_thinking_tags,
)
from clark_agent.reasoning import ReplayContract, audit_replay
from clark_agent.recovery import Double, Fixed, Linear, TokenScaling
from clark_agent.tools import (
    ToolIdentityPolicy,
    extract_args_key,
    extract_operation_key,
    extract_target,
)
from clark_agent.types import detect_arg_parse_error
from tests.conformance.scenario import run_scenario

__all__ = ["PURE", "run_pure", "run_scenario"]

NOW = "<now>"


def run_pure(case: dict[str, Any]) -> Any:
    """What this package gives for one case, in the shape of its ``expected``."""
    return PURE[case["op"]](case)


# --- JSON in, canonical JSON out --------------------------------------------------------------


def _message(case: dict[str, Any]) -> Any:
    try:
        message = decode_message(case["raw"])
    except DecodeError:
        return None
    return _masked(encode_message(message).decode(), case["raw"], message.timestamp)


def _masked(text: str, raw: str, timestamp: int | None) -> str:
    """The JSON with a clock reading masked: a timestamp that was not in the input."""
    if timestamp is None or "timestamp" in json.loads(raw):
        return text
    value = f'"timestamp":{timestamp}'
    assert text.count(value) == 1
    return text.replace(value, f'"timestamp":"{NOW}"')


def _plain(case: dict[str, Any]) -> Any:
    message = decode_message(case["raw"])
    assert isinstance(message, ca.AssistantMessage)
    return {
        "plain": message.plain_text,
        "thinking": message.thinking_text,
        "reasoning": message.reasoning_text,
        "details": list(message.reasoning_details_values),
        "calls": len(message.tool_calls),
    }


def _struct(kind: Any) -> Any:
    def run(case: dict[str, Any]) -> Any:
        try:
            value = decode_json(case["raw"], kind)
        except DecodeError:
            return None
        return encode_json(value).decode()

    return run


def _trajectory(case: dict[str, Any]) -> Any:
    try:
        record = trajectory.decode_record(case["raw"])
    except DecodeError:
        return None
    return trajectory.encode_record(record).decode()


# --- functions --------------------------------------------------------------------------------


def _reasoning_item(case: dict[str, Any]) -> Any:
    item = reasoning.parse_item(json.loads(case["raw"]))
    if item is None:
        return None
    contract = item.format.replay_contract.value
    return {
        "wire": encode_json(reasoning.item_to_json(item)).decode(),
        "format": item.format.value,
        "index": item.index,
        "signed": item.is_signed,
        "contract": contract.title().replace("_", ""),
    }


def _audit(case: dict[str, Any]) -> Any:
    block = ca.ReasoningDetailsContent(tuple(case["items"]))
    audit = audit_replay(
        block.as_items,
        ReplayContract(case["contract"]),
        next_turn_carries_tools=case["tools"],
    )
    return {
        "items": audit.item_count,
        "signed": audit.signed_count,
        "formats": [str(f) for f in audit.formats],
        "violation": audit.violation is not None,
        "has_signed": block.has_signed_payload,
    }


def _think(case: dict[str, Any]) -> Any:
    thinking = ThinkingTagStreamFilter()
    steps = []
    for delta in case["deltas"]:
        visible = thinking.feed(delta)
        thoughts = thinking.take_thoughts()
        # Of several thoughts in one feed the recording has the last; here none is lost.
        steps.append([visible, thoughts[-1] if thoughts else None])
    flush = thinking.flush()
    strip = strip_thinking_tags("".join(case["deltas"]))
    return {"steps": steps, "flush": flush, "strip": strip}


def _tokens(case: dict[str, Any]) -> Any:
    return JsonSizeEstimator().estimate_message(decode_message(case["raw"]))


def _next_cap(case: dict[str, Any]) -> Any:
    scaling: dict[str, TokenScaling] = {
        "double": Double(),
        "linear": Linear(case["step"]),
        "fixed": Fixed(tuple(case["caps"])),
    }
    recovery = ca.MaxTokensRecovery(scaling=scaling[case["scaling"]], ceiling=case["ceiling"])
    return recovery.next_cap(case["prev"], case["attempt"])


def _tool_identity(case: dict[str, Any]) -> Any:
    policy = ToolIdentityPolicy(operation_arg=case["operation_arg"], target=case["target_arg"])
    return {
        "operation": extract_operation_key(policy, case["args"]),
        "target": extract_target(policy, case["args"]),
        "key": extract_args_key(policy, "tool", case["args"]),
    }


def _summary(case: dict[str, Any]) -> Any:
    event = ca.events.ProviderRequestPrepared(
        iteration=3,
        model_id=case["model"],
        system_prompt=case["system"],
        messages=[decode_message(json.dumps(m)) for m in case["messages"]],
        tools=[ca.ToolSchema(t["name"], t["description"], t["parameters"]) for t in case["tools"]],
        temperature=None,
        max_output_tokens=5,
    )
    return json.loads(encode_json(ProviderRequestSummary.from_event(event)))


def _arg_error(case: dict[str, Any]) -> Any:
    found = detect_arg_parse_error(case["args"])
    return None if found is None else list(found)


PURE = {
    "message": _message,
    "tool_result": _struct(ca.ToolResult),
    "identity": _struct(ca.RunIdentity),
    "chunk": _struct(stream.StreamChunk),
    "trajectory": _trajectory,
    "plain": _plain,
    "reasoning_item": _reasoning_item,
    "audit": _audit,
    "think": _think,
    "tokens": _tokens,
    "next_cap": _next_cap,
    "tool_identity": _tool_identity,
    "summary": _summary,
    "arg_error": _arg_error,
}
