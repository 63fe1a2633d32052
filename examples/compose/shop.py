"""An agent whose refunds wait for a manager: the one of the guide "Beyond one machine"."""

from clark_agent import Agent, StreamRequest, ToolCall, tool
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import SUSPEND, ApprovalGate


@tool
def refund(order: str) -> str:
    """Refund an order."""
    return f"refunded order {order}"


def answer(request: StreamRequest) -> str | ToolCall:
    """Stand in for a model, so that you need no key to try this."""
    if request.messages[-1].role == "tool_result":
        return "It is refunded."
    return call("refund", order="7")


support = Agent(
    ScriptedStream([answer], at_end="repeat"),  # or "anthropic:claude-sonnet-5"
    name="support",
    tools=[refund],
    plugins=[ApprovalGate(SUSPEND, timeout=3 * 86400, assignee="managers")],
)
