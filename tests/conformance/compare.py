"""When a run of ours matches a recorded one.

Both sides are brought to one form, and the places where this implementation departs on purpose are
evened out. Nothing else is forgiven.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

RUNTIME, NOW = "<runtime>", "<now>"
PROSE = ("text", "content", "message", "reason", "narration", "error_message", "tool_call_id")
TOOL_EVENTS = ("tool_execution_start", "tool_execution_end")

Json = Any


def difference(scenario: Json, got: Json, expected: Json) -> str:
    """What is different, in words; empty when the two match."""
    known: set[Json] = set()
    collect(scenario, known)
    known.discard(scenario.get("protocol", {}).get("recovery_prompt"))
    got, expected = masked(got, known), masked(expected, known)
    if got["result"] != expected["result"]:
        return f"result {json.dumps(got['result'])}\n   not {json.dumps(expected['result'])}"
    if scenario.get("compare") == "result":
        return ""
    if got["requests"] != expected["requests"]:
        return (
            f"requests {json.dumps(got['requests'])}\n     not {json.dumps(expected['requests'])}"
        )
    failed = "error" in expected["result"]
    theirs = with_starts(relevant(expected["events"]))
    ours = in_their_order(relevant(got["events"]), theirs)
    if failed:  # ours goes on to close what is open
        ours = ours[: len(theirs)]
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return f"event {index} {json.dumps(a)}\n    not {json.dumps(b)}"
    if len(ours) != len(theirs):
        return f"{len(ours)} events, not {len(theirs)}"
    differs = kinds(expected) - kinds(got) if failed else kinds(got) != kinds(expected)
    if differs:
        return f"trajectory {kinds(got)} not {kinds(expected)}"
    return ""


def kinds(side: Json) -> Counter[str]:
    records = side.get("trajectory") or []
    return Counter(r["kind"] for r in records if r["kind"] != "message_appended")


# --- one form ---------------------------------------------------------------------------------


def collect(value: Json, known: set[Json]) -> None:
    """All strings and timestamps that the scenario itself contains."""
    if isinstance(value, str):
        known.add(value)
    elif isinstance(value, list):
        for item in value:
            collect(item, known)
    elif isinstance(value, dict):
        for key, item in value.items():
            collect(item, known)
            if key == "timestamp":
                known.add(item)


def masked(value: Json, known: set[Json]) -> Json:
    """Without the runtime's prose, the clock, and what absent and false have in common."""
    if isinstance(value, list):
        return [masked(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        if item is None or item is False:
            continue
        if key in PROSE and isinstance(item, str) and item not in known:
            item = RUNTIME
        elif key == "timestamp" and item not in known:
            item = NOW
        result[key] = masked(item, known)
    return result


def relevant(events: list[Json]) -> list[Json]:
    """Without deltas of progress, discards, and the messages that only ours announces."""

    def is_ours(event: Json) -> bool:
        if event["type"] in ("message_discarded", "tool_execution_update"):
            return True
        if event["type"] not in ("message_start", "message_end"):
            return False
        message = event["message"]
        runtime_note = message["role"] == "system" and message["content"] == RUNTIME
        return bool(runtime_note or message["role"] == "tool_result")

    return [event for event in events if not is_ours(event)]


def with_starts(events: list[Json]) -> list[Json]:
    """The crate ends a message that its transport did not start; ours starts it first."""
    started, result = False, []
    for event in events:
        if event["type"] == "message_start":
            started = True
        elif event["type"] == "message_end":
            if not started:
                result.append({"type": "message_start", "message": event["message"]})
            started = False
        result.append(event)
    return result


# --- parallel batches -------------------------------------------------------------------------


def turns(events: list[Json]) -> list[list[Json]]:
    """The events cut behind each turn_end."""
    result: list[list[Json]] = [[]]
    for event in events:
        result[-1].append(event)
        if event["type"] == "turn_end":
            result.append([])
    return result


def in_their_order(ours: list[Json], theirs: list[Json]) -> list[Json]:
    """Our events, those of parallel batches as starts and then ends in the order of the calls."""
    reference = turns(theirs)
    result: list[Json] = []
    for number, turn in enumerate(turns(ours)):
        if number < len(reference) and is_parallel(reference[number]):
            turn = sort_tool_events(turn, reference[number])
        result += turn
    return result


def is_parallel(turn: list[Json]) -> bool:
    """Whether no call ended before another one started."""
    types = [event["type"] for event in turn if event["type"] in TOOL_EVENTS]
    return types == sorted(types, reverse=True)


def sort_tool_events(turn: list[Json], reference: list[Json]) -> list[Json]:
    places = [index for index, event in enumerate(turn) if event["type"] in TOOL_EVENTS]
    order = [identity(event) for event in reference if event["type"] in TOOL_EVENTS]
    sorted_events = sorted(
        (turn[index] for index in places),
        key=lambda event: (
            event["type"] == "tool_execution_end",
            order.index(identity(event)) if identity(event) in order else len(order),
        ),
    )
    turn = list(turn)
    for index, event in zip(places, sorted_events, strict=True):
        turn[index] = event
    return turn


def identity(event: Json) -> tuple[str, ...]:
    return event["type"], event["tool_call_id"], event["tool_name"]
