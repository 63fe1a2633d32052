"""Builds and runs one recorded scenario with this package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import clark_agent as ca
from clark_agent import events as ev
from clark_agent import stream as st
from clark_agent.errors import EmptyOutcomeError, InvalidContinuationError, MissingFieldError
from clark_agent.messages import decode_json, decode_message, encode_json
from clark_agent.plugins.base import ToolGateClass
from clark_agent.protocol import HiddenToolContext, HiddenToolError, PlainTextRecoveryContext
from clark_agent.recovery import Double, Fixed, Linear, TokenScaling
from clark_agent.testing import FakeClock, RecordingSink
from clark_agent.tools import NEVER_CLIP
from clark_agent.trajectory import InMemoryTrajectorySink, TrajectoryRecord, TrajectoryRecorder

FLAGS = (
    "requires_exclusive_sandbox",
    "aborts_siblings_on_error",
    "counts_toward_tool_call_limit",
    "parallel_safe_per_turn",
    "counts_toward_termination_vote",
)


async def run_scenario(scenario: dict[str, Any]) -> dict[str, Any]:
    """What the run emitted, gave back and asked for, in the shape of ``expected``."""
    return (await observe(scenario))[0]


async def observe(
    scenario: dict[str, Any],
) -> tuple[dict[str, Any], list[ev.AgentEvent], tuple[ca.AgentMessage, ...]]:
    """The same, with the events as they were and the messages returned or carried by the error."""
    sink, records, signal = RecordingSink(), InMemoryTrajectorySink(), ca.CancellationToken()
    stream = RecordedStream(scenario["stream"])
    config = build_config(scenario, stream, sink, records, signal)
    context = ca.AgentContext(
        scenario["system_prompt"],
        tuple([message(m) for m in scenario["history"]]),
        decode_json(json.dumps(scenario["identity"]), ca.RunIdentity)
        if scenario.get("identity")
        else None,
    )
    try:
        if scenario.get("continue"):
            outcome = await ca.run_continue(context, config, signal)
        else:
            prompts = [message(m) for m in scenario["prompts"]]
            outcome = await ca.run(prompts, context, config, signal)
    except ca.LoopError as error:
        result, messages = error_json(error), error.messages
    else:
        messages = outcome.messages
        result = {"outcome": outcome.outcome.value, "messages": [as_json(m) for m in messages]}
    seen = {
        "events": [event_json(event) for event in sink.events],
        "result": result,
        "requests": [request_json(request) for request in stream.requests],
        "trajectory": [record_json(record) for record in records.records],
    }
    return seen, sink.events, messages


# --- JSON -------------------------------------------------------------------------------------


def message(value: Any) -> Any:
    return decode_message(json.dumps(value))


def as_json(value: Any) -> Any:
    """Plain JSON without details that the recorded version of the crate does not have: the record
    of who decided what, and that arguments were the reason.
    """
    return without_decisions(json.loads(encode_json(value)))


def without_decisions(value: Any) -> Any:
    if isinstance(value, list):
        return [without_decisions(item) for item in value]
    if not isinstance(value, dict):
        return value
    details = value.get("details")
    if isinstance(details, dict):
        rest = {k: v for k, v in details.items() if k != "decided_by"}
        is_ours = rest.get("kind") == "tool_argument_validation"
        value = {**value, "details": None if is_ours or (details and not rest) else rest}
    return {key: without_decisions(item) for key, item in value.items()}


def event_json(event: ev.AgentEvent) -> dict[str, Any]:
    """The event, with long lists of messages as their length and tools as their names."""
    value: dict[str, Any] = as_json(event)
    counted = {
        "context_transform_applied": ("before", "after"),
        "provider_request_prepared": ("messages",),
        "agent_end": ("messages",),
    }.get(value["type"], ())
    for name in counted:
        value[name] = len(value[name])
    if "tools" in value:
        value["tools"] = [tool["name"] for tool in value["tools"]]
    return value


def request_json(request: st.StreamRequest) -> dict[str, Any]:
    value: dict[str, Any] = as_json(request)
    value["messages"] = value["messages"][-3:]
    value["tools"] = [tool["name"] for tool in value["tools"]]
    return value


def record_json(record: TrajectoryRecord) -> dict[str, Any]:
    value = as_json(record)
    names = ("seq", "run_id", "parent_run_id", "depth")
    return {**{name: value.get(name) for name in names}, "kind": value["payload"]["kind"]}


def error_json(error: ca.LoopError) -> dict[str, Any]:
    match error:
        case ca.StreamError():
            return {"error": "stream", "kind": error.kind.value, "message": error.message}
        case ca.RunAborted():
            return {"error": "aborted"}
        case ca.RunStoppedByTool():
            return {"error": "tool_fatal", "tool": error.tool, "reason": error.reason}
        case InvalidContinuationError():
            return {"error": "invalid_continuation"}
        case EmptyOutcomeError():
            return {
                "error": "empty_outcome_budget_exhausted",
                "budget": error.budget,
                "observed": error.observed,
            }
        case _:
            return {"error": type(error).__name__, "message": str(error)}


# --- the parts --------------------------------------------------------------------------------


class RecordedStream:
    """Plays the scenario's stream; calls past its end give an empty one."""

    def __init__(self, calls: Sequence[Sequence[dict[str, Any]]]) -> None:
        self.calls = calls
        self.requests: list[st.StreamRequest] = []

    async def __call__(
        self, request: st.StreamRequest, signal: ca.CancellationToken
    ) -> AsyncIterator[st.StreamEvent]:
        self.requests.append(request)
        number = len(self.requests) - 1
        for row in self.calls[number] if number < len(self.calls) else ():
            yield self.event(row)

    def event(self, row: dict[str, Any]) -> st.StreamEvent:
        match row["e"]:
            case "start":
                return st.Start(message(row["partial"]))
            case "chunk":
                chunk = decode_json(json.dumps(row["chunk"]), st.StreamChunk)
                return st.Chunk(chunk)
            case "done":
                return st.Done(message(row["message"]))
            case _:
                kind = st.StreamErrorKind(row["kind"])
                return st.Error(message(row["partial"]), kind, row["message"])


class RecordedTool(ca.AgentTool):
    """A tool that does what the scenario says, the last behaviour over and over."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name = spec["name"]
        self.description = spec.get("description", "a tool")
        self.parameters_schema = spec.get("schema", {"type": "object"})
        for flag in FLAGS:
            if flag in spec:
                setattr(self, flag, spec[flag])
        cap = spec.get("max_result_chars")
        self.max_result_chars = NEVER_CLIP if cap == "max" else cap
        self.require_arg = spec.get("require_arg")
        self.prepare_set = spec.get("prepare_set")
        self.behaviors = spec["behaviors"]
        self.calls = 0
        super().__init__()

    def prepare_arguments(self, args: Any) -> Any:
        if self.prepare_set and isinstance(args, dict):
            return {**args, **self.prepare_set}
        return args

    def validate(self, args: Any) -> None:
        if self.require_arg and not (isinstance(args, dict) and self.require_arg in args):
            raise MissingFieldError(self.name, "call", self.require_arg)

    async def execute(self, args: Any, ctx: ca.ToolContext) -> ca.ToolResult:
        does = self.behaviors[min(self.calls, len(self.behaviors) - 1)]
        self.calls += 1
        if does.get("delay_ms"):
            try:
                async with asyncio.timeout(does["delay_ms"] / 1000):
                    await ctx.signal.wait()
                raise ca.ToolExecutionError("aborted")
            except TimeoutError:
                pass
        text, details = does.get("text", ""), does.get("details")
        match does["kind"]:
            case "echo":
                said = args.get("text") if isinstance(args, dict) else None
                text = said if isinstance(said, str) else ""
            case "exec_error":
                raise ca.ToolExecutionError(text)
            case "fatal":
                raise ca.ToolFatal(text)
            case "aborted":
                raise ca.ToolAborted
            case _:
                pass
        make = {"terminal": ca.ToolResult.terminal, "error": ca.ToolResult.error}.get(
            does["kind"], ca.ToolResult.text
        )
        result = make(text, details=details)
        return result.with_narration(does["narration"]) if does.get("narration") else result


class RecordedPolicy(ca.ProtocolPolicy):
    name = "recorded"

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec

    def terminal_tool_names(self) -> set[str]:
        return set(self.spec.get("terminal_tool_names", ()))

    def plain_text_recovery_prompt(self, ctx: PlainTextRecoveryContext) -> str | None:
        return self.spec.get("recovery_prompt")

    def normalize_tool_calls(self, calls: Sequence[ca.ToolCall], registry: Any) -> Any:
        aliases = self.spec.get("aliases", {})
        return [ca.ToolCall(c.id, aliases.get(c.name, c.name), c.arguments) for c in calls]

    def hidden_tool_error(self, ctx: HiddenToolContext) -> HiddenToolError | None:
        text = self.spec.get("hidden_error")
        if text is None:
            return None
        return HiddenToolError(f"{text} {ctx.requested_tool}", {"product": True})


class Before:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.name = spec, spec["name"]

    def on_before_tool_call(self, ctx: ca.BeforeToolCallContext) -> ca.Block | None:
        if ctx.tool_call.name != self.spec["tool"]:
            return None
        reason = self.spec.get("reason")
        return ca.Block(reason, None if reason is None else self.spec.get("details"))


class After:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.name = spec, spec["name"]

    def on_after_tool_call(self, ctx: ca.AfterToolCallContext) -> ca.AfterToolDecision | None:
        spec = self.spec
        if spec.get("tool") is not None and spec["tool"] != ctx.tool_call.name:
            return None
        if spec.get("when_error") is not None and spec["when_error"] != ctx.is_error:
            return None
        result = None
        if spec.get("override_text") is not None:
            make = ca.ToolResult.error if spec.get("override_is_error") else ca.ToolResult.text
            result = make(spec["override_text"])
        return ca.AfterToolDecision(result, spec.get("mark_error"), spec.get("terminate"))


class Batches:
    """The n-th poll gives the n-th list."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name = spec["name"]
        self.batches = iter([[message(m) for m in batch] for batch in spec["batches"]])

    def poll(self) -> list[Any]:
        return next(self.batches, [])


class Steering(Batches):
    def next_steering_messages(self) -> list[Any]:
        return self.poll()


class FollowUp(Batches):
    def next_follow_up_messages(self) -> list[Any]:
        return self.poll()


class Transform:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.name = spec, spec["name"]

    def should_transform(self, messages: Sequence[Any], ctx: ca.TransformContext) -> bool:
        return len(messages) >= int(self.spec.get("min_messages", 0))

    def transform_context(self, messages: Sequence[Any], ctx: ca.TransformContext) -> Any:
        match self.spec["op"]:
            case "keep_last":
                return messages[max(0, len(messages) - self.spec["k"]) :]
            case "drop_custom":
                return [m for m in messages if not isinstance(m, ca.CustomMessage)]
            case "append_iteration":
                usage = ctx.last_provider_usage
                seen = -1 if usage is None else usage.input_tokens
                text = f"iteration={ctx.iteration} model={ctx.model_id} usage_in={seen}"
                return [*messages, ca.SystemMessage(text, timestamp=1)]
            case _:
                return messages


class Gate:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.name = spec, spec["name"]
        self.conflict_priority = spec.get("priority", 0)
        self.tool_gate_class = ToolGateClass(spec.get("class", "required"))

    def next_turn_tool_allowlist(self, ctx: ca.ToolGateContext) -> set[str] | None:
        allow = self.spec["allow"]
        names = allow.get(str(ctx.iteration), allow.get("*"))
        return None if names is None else set(names)

    def denial_reason(self, tool_name: str, ctx: ca.ToolGateContext) -> str | None:
        reasons: dict[str, str] = self.spec.get("denial", {})
        return reasons.get(tool_name)

    def suppresses_advisory_gates(self, ctx: ca.ToolGateContext) -> bool:
        return bool(self.spec.get("suppresses_advisory", False))


class OverflowRecovery:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.name, self.k = spec["name"], spec["k"]
        self.max_attempts = spec.get("max_attempts", 1)

    def recover(self, messages: Sequence[Any], ctx: ca.TransformContext) -> Any:
        return messages[max(0, len(messages) - self.k) :]


class CancelOn:
    name = "cancel_on"

    def __init__(self, spec: dict[str, Any], signal: ca.CancellationToken) -> None:
        self.event, self.left, self.signal = spec["event"], spec["nth"], signal

    def on_event(self, event: ev.AgentEvent) -> None:
        if event.__struct_config__.tag == self.event:
            self.left -= 1
            if self.left == 0:
                self.signal.cancel()


PLUGINS = {
    "before": Before,
    "after": After,
    "steering": Steering,
    "follow_up": FollowUp,
    "transform": Transform,
    "gate": Gate,
}


def build_plugin(
    spec: dict[str, Any], records: InMemoryTrajectorySink, signal: ca.CancellationToken
) -> Any:
    match spec["type"]:
        case "opening_gate":
            return ca.OpeningGate(spec["allow"])
        case "token_budget":
            return ca.TokenBudget(
                spec["max_tokens"],
                trim_trigger=spec["trim_trigger"],
                trim_target=spec["trim_trigger"],
                truncation_marker=spec["truncation_marker"],
                drop_turns=False,
            )
        case "unique_tool_call_ids":
            return ca.UniqueToolCallIds()
        case "trajectory":
            return TrajectoryRecorder(records)
        case "cancel_on":
            return CancelOn(spec, signal)
        case kind:
            return PLUGINS[kind](spec)


def build_config(
    scenario: dict[str, Any],
    stream: RecordedStream,
    sink: RecordingSink,
    records: InMemoryTrajectorySink,
    signal: ca.CancellationToken,
) -> ca.LoopConfig:
    settings = dict(scenario["config"])
    # The crate ignores these two without what they refine; here they are errors.
    if not settings.get("plain_text_terminal_fallback_tool"):
        settings.pop("plain_text_terminal_fallback_eager", None)
    if not settings.get("plain_text_terminal_fallback_eager"):
        settings.pop("plain_text_terminal_fallback_eager_nudge", None)
    plugins = list(scenario["plugins"])
    if "execution_mode" in settings:
        settings["default_execution_mode"] = settings.pop("execution_mode")
    if (text := settings.pop("wrap_up_message", None)) is not None:
        settings["graceful_turn_limit_message_provider"] = lambda: text
    if (grace := settings.pop("dynamic_grace", None)) is not None:
        settings["graceful_turn_limit_grace_provider"] = lambda: grace
    if (recovery := settings.pop("max_output_tokens_recovery", None)) is not None:
        settings["max_output_tokens_recovery"] = build_recovery(recovery)
    for spec in plugins:
        if spec["type"] == "overflow_recovery":
            settings["overflow_recovery"] = OverflowRecovery(spec)
    if "protocol" in scenario:
        settings["protocol"] = RecordedPolicy(scenario["protocol"])
    return ca.LoopConfig(
        stream=stream,
        tools=ca.ToolRegistry([RecordedTool(spec) for spec in scenario["tools"]]),
        plugins=[
            build_plugin(spec, records, signal)
            for spec in plugins
            if spec["type"] != "overflow_recovery"
        ],
        event_sink=sink,
        clock=FakeClock(),
        force_tool_call=True,
        **settings,
    )


def build_recovery(spec: dict[str, Any]) -> ca.MaxTokensRecovery:
    scaling: dict[str, TokenScaling] = {
        "double": Double(),
        "linear": Linear(spec.get("step") or 0),
        "fixed": Fixed(tuple(spec.get("caps") or ())),
    }
    return ca.MaxTokensRecovery(
        max_attempts=spec["max_attempts"],
        scaling=scaling[spec["scaling"]],
        ceiling=spec.get("ceiling"),
    )
