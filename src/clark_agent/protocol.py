"""The interface for a product's vocabulary, and the default texts of the runtime.

The core knows no tool by name. The names of the tools that deliver an answer, the text that nudges
a model after prose, the aliases to repair, and the explanation of a hidden tool are all part of a
`ProtocolPolicy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from msgspec import Struct

from clark_agent.tools import AgentTool
from clark_agent.types import AgentMessage, ToolCall

__all__ = [
    "HiddenToolContext",
    "HiddenToolError",
    "PlainTextRecoveryContext",
    "ProtocolPolicy",
    "generic_hidden_tool_error",
    "hidden_tool_details",
]

PLAIN_TEXT_RECOVERY = (
    "[from the runtime, not from the user]\n"
    "Your last message was plain text without a tool call. Here only tool calls count: every turn "
    "calls a tool, and plain text reaches nobody.\n"
    "Look again at what was asked and call one tool now. If the answer is ready, hand it over with "
    "the tool for final answers. Ask a question only if you cannot go on without the user."
)

ZERO_OUTPUT_RECOVERY = (
    "[from the runtime, not from the user]\n"
    "The last attempt ended before anything of use had arrived: no text and no complete tool call. "
    "Do not think it all over again. Look at the newest result and make the next tool call at "
    "once; if the answer is ready, deliver it."
)

_CLOSE = (
    "Stop working now and give your final result: what you have done, what is still open, and "
    "whatever you found that others will need. Start no new work and call no further work tools. "
    "Ask a question only if nothing can be delivered without its answer."
)

WRAP_UP = f"Your turns for this task are nearly used up. {_CLOSE}"

BUDGET_WRAP_UP = {
    "turns": WRAP_UP,
    "tokens": f"Your tokens for this task are nearly used up. {_CLOSE}",
    "cost": f"Your budget for this task is nearly used up. {_CLOSE}",
    "seconds": f"Your time for this task is nearly over. {_CLOSE}",
}

_PREVIEWED_TOOLS = 12

_PERMISSION_OPENINGS = (
    "would you like",
    "shall i",
    "should i",
    "do you want",
    "what would you like",
    "what do you need",
    "what's your next move",
    "what is your next move",
    "continue what",
)
_SHORT_QUESTION_BYTES = 500


class PlainTextRecoveryContext(Struct, frozen=True):
    """A turn that ended in prose instead of a tool call."""

    messages: Sequence[AgentMessage]
    iteration: int
    available_tool_names: Sequence[str]
    terminal_fallback_tool: str | None


class HiddenToolContext(Struct, frozen=True):
    """A call to a tool that this turn does not offer."""

    requested_tool: str
    allowlist: AbstractSet[str]
    messages: Sequence[AgentMessage]


class HiddenToolError(Struct, frozen=True):
    """The message for the model, and details for the host."""

    message: str
    details: Any = None


class ProtocolPolicy:
    """The defaults name no tools. Override what your product needs.

    Contract: quick and pure. A method that raises ends the run with a typed error.
    """

    name: str = "default_protocol"

    def terminal_tool_names(self) -> AbstractSet[str]:
        """Tools that deliver or ask, besides the configured fallback tool."""
        return frozenset()

    def plain_text_recovery_prompt(self, ctx: PlainTextRecoveryContext) -> str | None:
        """The text that nudges a model after prose; None for the generic text."""
        return None

    def normalize_tool_calls(
        self, calls: Sequence[ToolCall], registry: Mapping[str, AgentTool]
    ) -> Sequence[ToolCall]:
        """The calls with aliases repaired: as many as given, in the same order."""
        return calls

    def hidden_tool_error(self, ctx: HiddenToolContext) -> HiddenToolError | None:
        """Why a hidden tool is rejected, if no gate gives a reason; None for the generic text."""
        return None

    def asks_permission(self, text: str) -> bool:
        """Whether a text only asks how to continue instead of answering. Detects English."""
        text = text.strip()
        if "?" not in text:
            return False
        lower = _ascii_lower(text)
        if lower.startswith(_PERMISSION_OPENINGS):
            return True
        is_short = len(text.encode("utf-8", "surrogatepass")) <= _SHORT_QUESTION_BYTES
        return is_short and "what" in lower and ("next" in lower or "continue" in lower)


def generic_hidden_tool_error(tool_name: str, allowlist: AbstractSet[str]) -> HiddenToolError:
    """The generic error for a hidden tool."""
    allowed = sorted(allowlist)
    preview = ", ".join(allowed[:_PREVIEWED_TOOLS])
    if len(allowed) > _PREVIEWED_TOOLS:
        preview += f", … ({len(allowed)} in all)"
    message = (
        f"The tool {tool_name!r} is not offered in this turn, so the call was not run. "
        f"Use one that is: {preview}."
    )
    return HiddenToolError(message, hidden_tool_details(tool_name, allowlist, "tool_gate"))


def hidden_tool_details(tool_name: str, allowlist: AbstractSet[str], gate: str) -> dict[str, Any]:
    """The details of the error for a hidden tool."""
    return {
        "runtime_block": True,
        "requested_tool": tool_name,
        "allowed_tools": sorted(allowlist),
        "gate": gate,
    }


def _ascii_lower(text: str) -> str:
    """Lower case for A to Z alone: other letters may change their length."""
    return text.translate(_ASCII_LOWER)


_ASCII_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}
