"""Before a tool runs: is the call known, offered, well-formed and allowed?

`prepare` ends in one of two ways: the call is ready to run, or it already has its result: an error
that says what to do differently, or the answer of a hook.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from clark_agent._finished import FINISHED
from clark_agent._text import describe, message_of
from clark_agent.engine.call import Call
from clark_agent.engine.hooks import call_hook
from clark_agent.engine.resumption import EarlierWait
from clark_agent.engine.run import Run
from clark_agent.engine.runtime_results import IN_RESULT
from clark_agent.engine.suspension import (
    allow_given,
    continued,
    given_arguments,
    may_run,
    suspend_before_run,
)
from clark_agent.engine.turn import ModelAnswer
from clark_agent.errors import HookError, ToolValidationError
from clark_agent.intake import accept_json, accept_result
from clark_agent.plugins.base import (
    Answer,
    BeforeToolCallContext,
    Block,
    Rewrite,
    Suspend,
)
from clark_agent.plugins.hooks import Hook
from clark_agent.protocol import (
    HiddenToolContext,
    HiddenToolError,
    generic_hidden_tool_error,
    hidden_tool_details,
)
from clark_agent.tools import AgentTool, ToolResult
from clark_agent.tools.repair import close_matches
from clark_agent.types import detect_arg_parse_error

__all__ = ["accept", "ask_policy", "continue_agent", "prepare"]

logger = logging.getLogger(__name__)

_QUOTED_ARGUMENTS = 400
_MOST_OF_A_NAME = 100
# The details of results about invalid arguments, for hosts and plugins.
_BAD_ARGUMENTS = {"kind": "tool_argument_validation"}


def prepare(run: Run, answer: ModelAnswer, call: Call) -> Awaitable[None]:
    """Make the call ready to run, or set its result. Await the result."""
    wanted, tool = call.call, call.tool
    if tool is None:
        call.result = ToolResult.error(_unknown_tool(wanted.name, run.registry.names))
    elif call.earlier is not None:
        return _prepare_again(run, answer, call, tool)
    elif answer.allowlist is not None and wanted.name not in answer.allowlist:
        return _refuse_hidden(run, answer, call, answer.allowlist)
    elif (malformed := detect_arg_parse_error(wanted.arguments)) is not None:
        text = _syntax_error(wanted.name, *malformed)
        call.result = ToolResult.error(text, details=dict(_BAD_ARGUMENTS))
    else:
        call.result = accept(tool, call, wanted.arguments)
        if call.result is None and run.hooks.before_tool_call:
            return _ask_hooks(run, answer, call)
    return FINISHED


def _prepare_again(run: Run, answer: ModelAnswer, call: Call, tool: AgentTool) -> Awaitable[None]:
    """Make a call ready that has waited, with the arguments that were given, if any.

    Hooks see it again, unless its tool goes on with what it had begun.
    """
    if call.was_checked:
        return FINISHED
    if continued(call) is not None:  # it has run, with arguments that hooks have seen
        assert call.earlier is not None
        call.result = accept(tool, call, call.earlier.asked[-1].request.arguments)
        return FINISHED
    given = given_arguments(call)
    call.result = accept(tool, call, call.call.arguments if given is None else given.args)
    if call.result is None and given is not None:
        allow_given(run, call)
    if call.result is None and run.hooks.before_tool_call:
        return _ask_hooks(run, answer, call)
    return FINISHED


def continue_agent(call: Call, tool: AgentTool, arguments: Any) -> None:
    """Let a tool take up the run of the agent that it had started, with the same arguments."""
    call.earlier, call.was_checked = EarlierWait(), True
    call.result = accept(tool, call, arguments)


_MOST_TOOLS_NAMED = 30


def _unknown_tool(name: str, names: Sequence[str]) -> str:
    """The message for the model, with similar names; short, however many tools there are."""
    shown = name if len(name) <= _MOST_OF_A_NAME else name[:_MOST_OF_A_NAME] + "…"
    text = f"There is no tool {shown!r}."
    if len(names) <= _MOST_TOOLS_NAMED:
        return f"{text} The tools are: {', '.join(names) or 'none'}."
    if close := close_matches(name, names):
        return f"{text} Similar ones are: {', '.join(close)}."
    first = ", ".join(names[:_MOST_TOOLS_NAMED])
    return f"{text} The tools are: {first}, and {len(names) - _MOST_TOOLS_NAMED} more."


def accept(tool: AgentTool, call: Call, arguments: Any) -> ToolResult | None:
    """Let the tool check the arguments. Return an error result, or None."""
    try:
        call.args = tool.prepare_arguments(arguments)
        accepted = tool.validate(call.args)
    except ToolValidationError as error:
        return ToolResult.error(message_of(error), details=dict(_BAD_ARGUMENTS))
    except Exception as error:
        text = "the tool %r failed to check its arguments"
        logger.exception(text, tool.name, extra=IN_RESULT)
        call.exception = error
        return ToolResult.error(f"{tool.name!r} could not check the arguments: {describe(error)}")
    call.input = call.args if accepted is None else accepted
    return None


def _syntax_error(name: str, error: str, raw: str) -> str:
    quoted = raw if len(raw) <= _QUOTED_ARGUMENTS else raw[:_QUOTED_ARGUMENTS] + "…"
    return (
        f"The arguments of {name!r} are not valid JSON ({error}), so the call was not run. "
        f"Send it again with a complete JSON object. You sent: {quoted}"
    )


# --- hidden tools -----------------------------------------------------------------------------


async def _refuse_hidden(
    run: Run, answer: ModelAnswer, call: Call, allowlist: frozenset[str]
) -> None:
    error = await _why_hidden(run, answer, call.call.name, allowlist)
    call.result = ToolResult.error(error.message, details=error.details)


async def _why_hidden(
    run: Run, answer: ModelAnswer, name: str, allowlist: frozenset[str]
) -> HiddenToolError:
    """Why the tool is not offered: from a gate, else from the policy, else in general words."""
    assert answer.gate_context is not None
    for gate in run.hooks.tool_gate:
        if gate.denial_reason is None:
            continue
        try:
            reason = await call_hook(run, gate.denial_reason, name, answer.gate_context)
        except Exception:
            logger.exception("the gate %r failed to give a reason", gate.name)
            continue
        if reason is not None:
            return HiddenToolError(reason, hidden_tool_details(name, allowlist, gate.name))
    context = HiddenToolContext(name, allowlist, run.transcript.view())
    error = ask_policy(run, lambda: run.config.protocol.hidden_tool_error(context))
    return error or generic_hidden_tool_error(name, allowlist)


def ask_policy(run: Run, question: Callable[[], Any]) -> Any:
    """The answer of the protocol policy. If it raises, the run ends."""
    try:
        return question()
    except Exception as error:
        raise HookError("protocol policy", run.config.protocol.name, error) from error


# --- hooks before the call --------------------------------------------------------------------


async def _ask_hooks(run: Run, answer: ModelAnswer, call: Call) -> None:
    identity = run.identify()
    suspended: list[tuple[str, Suspend]] = []
    names: list[str] = []
    for hook in run.hooks.before_tool_call:
        names.append(hook.name)
        # Each of several plugins with one name needs its own permission.
        count = names.count(hook.name)
        asked_by = hook.name if count == 1 else f"{hook.name} #{count}"
        was_allowed = call.earlier is not None and may_run(run, call, asked_by)
        if was_allowed:
            suspended.append((asked_by, Suspend()))
        context = BeforeToolCallContext(
            answer.message,
            call.call,
            call.args,
            run.transcript.view(),
            call.tool,
            identity,
            run.deps,
            was_allowed,
        )
        decision: Any = None
        try:
            decision = await call_hook(run, hook, context)
            if not isinstance(decision, Suspend):
                _apply(hook, decision, call)
        except Exception as error:
            text = "the hook %r failed; the call is blocked"
            logger.exception(text, hook.name, extra=IN_RESULT)
            call.decided(hook.name, "failed")
            call.hook_raised = (type(error).__name__, message_of(error))
            call.result = ToolResult.error(
                f"The call was not run: the hook {hook.name!r} that checks it raised "
                + describe(error)
            )
        if isinstance(decision, Suspend):
            suspended.append((asked_by, decision))
            suspend_before_run(run, call, asked_by, decision)
        if call.result is not None:
            return
    for name, wanted in suspended:  # a later hook may have changed what was allowed
        if call.result is None:
            suspend_before_run(run, call, name, wanted)


def _apply(hook: Hook, decision: Any, call: Call) -> None:
    match decision:
        case None:
            return
        case Block(reason, details):
            call.decided(hook.name, "block")
            text = f"The call was blocked by {hook.name!r}." if reason is None else reason
            call.result = accept_result(ToolResult.error(text, details=details), hook.name)
        case Rewrite(args):
            assert call.tool is not None
            args = accept_json(args, f"what {hook.name!r} gave as arguments")
            refused = accept(call.tool, call, args)
            call.decided(hook.name, "rewrite", args=call.args)
            call.result = refused
        case Answer(result):
            call.result = accept_result(result, f"the Answer of {hook.name!r}")
            call.decided(hook.name, "answer")
        case _:
            raise TypeError(
                "on_before_tool_call must return Block, Rewrite, Answer, Suspend or None; got "
                f"{decision!r}"
            )
