"""What plugins are asked with: contexts, transcripts that grow, and estimators that count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    StopReason,
    SystemMessage,
    TextContent,
    ToolCall,
    ToolResultMessage,
    UserMessage,
)
from clark_agent.messages import JsonSizeEstimator, TokenEstimator
from clark_agent.messages.transcript import MessageLog, MessageView
from clark_agent.plugins.base import (
    ToolGateContext,
    TransformContext,
)
from clark_agent.tools import AgentTool, ToolContext, ToolRegistry, ToolResult


class Capped(AgentTool):
    """A tool with a cap of its own on what later turns keep of its results."""

    def __init__(self, name: str, max_result_chars: int | Literal["never"] | None) -> None:
        self.name = name
        self.max_result_chars = max_result_chars
        super().__init__()

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.text("")


def before_call(
    estimator: TokenEstimator | None = None, *tools: AgentTool, iteration: int = 0
) -> TransformContext:
    return TransformContext(
        signal=CancellationToken(),
        model_id="",
        iteration=iteration,
        last_provider_usage=None,
        estimator=estimator or JsonSizeEstimator(),
        estimated_tokens=0,
        tools=ToolRegistry(tools),
    )


def at_turn(iteration: int, *available: str) -> ToolGateContext:
    return ToolGateContext(iteration, (), None, available)


class CharacterEstimator:
    """One token a character of text, and one a message. Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[AgentMessage] = []

    def estimate_message(self, message: AgentMessage) -> int:
        self.asked.append(message)
        return cost(message)


def cost(message: AgentMessage) -> int:
    match message:
        case ToolResultMessage() | AssistantMessage() | UserMessage():
            return len(message.plain_text) + 1
        case SystemMessage():
            return len(message.content) + 1
        case _:
            return 1


# --- transcripts ------------------------------------------------------------------------------


def calling(*calls: tuple[str, str]) -> AssistantMessage:
    """A message that makes these calls, each an id and the name of a tool."""
    return AssistantMessage(
        tuple([ToolCall(call_id, name, {}) for call_id, name in calls]), StopReason.TOOL_USE
    )


def result(call_id: str, name: str = "look", text: str = "seen") -> ToolResultMessage:
    return ToolResultMessage(call_id, name, (TextContent(text),))


def grow(pieces: Iterable[Sequence[AgentMessage]]) -> Iterator[MessageView]:
    """One view after each piece, all of the same log."""
    log = MessageLog()
    for piece in pieces:
        log.extend(piece)
        yield log.view()


class CountingView(MessageView):
    """A view that counts the messages it hands out."""

    __slots__ = ("handed",)

    def __init__(self, items: list[AgentMessage]) -> None:
        super().__init__(items, len(items))
        self.handed = 0

    def __getitem__(self, index: Any) -> Any:
        got = super().__getitem__(index)
        self.handed += len(got) if isinstance(got, tuple) else 1
        return got

    def __iter__(self) -> Iterator[AgentMessage]:
        for message in super().__iter__():
            self.handed += 1
            yield message


TEXTS = st.integers(0, 12).map(lambda size: "abcdefghijkl"[:size])
NOTES: SearchStrategy[AgentMessage] = st.one_of(
    st.builds(UserMessage, TEXTS),
    st.builds(SystemMessage, TEXTS),
    st.builds(AssistantMessage.from_text, TEXTS),
)
FEW_IDS = st.sampled_from(["", "a", "b", "call_0"])


@st.composite
def batches(draw: DrawFn, ids: SearchStrategy[str] = FEW_IDS) -> list[AgentMessage]:
    """One turn: calls whose ids may repeat, and their results right behind.

    Which result belongs to which call is told by the tool's name, of which each call has its own;
    results of one id come in the order of their calls.
    """
    calls = [
        (draw(ids), f"{draw(st.sampled_from(['plain', 'short', 'never']))}{number}")
        for number in range(draw(st.integers(0, 4)))
    ]
    answers = draw(st.permutations(calls))
    in_order = {call_id: iter([c for c in calls if c[0] == call_id]) for call_id, _ in calls}
    paired = [next(in_order[call_id]) for call_id, _ in answers]
    return [calling(*calls), *[result(call_id, name, draw(TEXTS)) for call_id, name in paired]]


@st.composite
def turns(draw: DrawFn, ids: SearchStrategy[str] = FEW_IDS) -> list[list[AgentMessage]]:
    """What each turn of a run appends: sound, but for ids that repeat."""
    return [
        [*draw(batches(ids)), *draw(st.lists(NOTES, max_size=1))]
        for _ in range(draw(st.integers(1, 6)))
    ]


def heaps(ids: SearchStrategy[str] = FEW_IDS) -> SearchStrategy[tuple[AgentMessage, ...]]:
    """Calls, results and notes in any order."""
    calls = st.lists(st.tuples(ids, st.sampled_from(["look", "short", "never"])), max_size=3)
    results = st.builds(result, ids, st.sampled_from(["look", "short", "never"]), TEXTS)
    messages = calls.map(lambda made: calling(*made)) | results | results | NOTES
    return st.lists(messages, max_size=14).map(tuple)


def tails(ids: SearchStrategy[str] = FEW_IDS) -> SearchStrategy[tuple[AgentMessage, ...]]:
    """What may stand behind the log in one request: no calls."""
    results = st.builds(result, ids, st.just("look"), TEXTS)
    return st.lists(results | NOTES, max_size=4).map(tuple)
