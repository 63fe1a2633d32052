"""What the packaged model still knows of a conversation after a compaction, for `make eval-local`.

Some facts are said before the compaction, and some after it. Then each is asked for: of the whole
conversation, of one with a summary that the model has written itself, and of one whose old turns
are left out. Nothing is asserted: the figures say something about the model, not about the code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    Conversation,
    LoopConfig,
    StreamEvent,
    StreamFn,
    StreamRequest,
    UserMessage,
    run,
)
from clark_agent.plugins import Compaction
from clark_agent.stream import Error, StreamErrorKind
from clark_agent.types import CustomMessage, StopReason


class Said(NamedTuple):
    """What the user said, what the model answered, how it is asked for, and what is right."""

    text: str
    answer: str
    question: str
    expected: str


BEFORE = (
    Said(
        "My sister is called Vera.",
        "Your sister is called Vera.",
        "What is my sister called?",
        "vera",
    ),
    Said(
        "My flight to Oslo leaves at 6:40.",
        "Your flight leaves at 6:40.",
        "When does my flight leave?",
        "6:40",
    ),
    Said(
        "The code of the garage is 4417.",
        "The code of the garage is 4417.",
        "What is the code of the garage?",
        "4417",
    ),
    Said(
        "I am allergic to walnuts.",
        "You are allergic to walnuts.",
        "What am I allergic to?",
        "walnut",
    ),
    Said(
        "The hotel is called Blue Heron.",
        "The hotel is called Blue Heron.",
        "What is the hotel called?",
        "blue heron",
    ),
    Said(
        "The meeting with Tom is on Thursday.",
        "The meeting is on Thursday.",
        "On which day is the meeting with Tom?",
        "thursday",
    ),
)
AFTER = (
    Said("My car is green.", "Your car is green.", "What colour is my car?", "green"),
    Said(
        "Our budget is 2,300 euros.",
        "Your budget is 2,300 euros.",
        "How much is our budget?",
        "2,300",
    ),
)
TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("What is the capital of Peru?", "The capital of Peru is Lima."),
    ("What is ice?", "Ice is frozen water."),
)
WINDOW = 160
"""So small that most of these few messages are compacted."""
LONGEST_ANSWER = 24
"""The tokens of an answer: a small model that does not know goes on and on."""


def messages(said: Sequence[Said], talk: Sequence[tuple[str, str]] = ()) -> list[AgentMessage]:
    """The conversation, with some talk around the facts."""
    pairs = [*talk[:1], *[(each.text, each.answer) for each in said], *talk[1:]]
    return [
        message
        for text, answer in pairs
        for message in (UserMessage(text), AssistantMessage.from_text(answer))
    ]


async def fails(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
    """A model that is away."""
    yield Error(AssistantMessage((), StopReason.ERROR), StreamErrorKind.FATAL, "there is no model")


async def compacted(model: StreamFn, summariser: StreamFn | None) -> AgentContext:
    """The conversation after a compaction."""
    plugin = Compaction(WINDOW, model=summariser, read_back=False)
    conversation: Conversation[str] = Conversation(
        LoopConfig(stream=model, plugins=[plugin]),
        AgentContext("", tuple(messages(BEFORE, TALK))),
    )
    await conversation.compact()
    return conversation.context


async def known(said: Sequence[Said], context: AgentContext, model: StreamFn) -> int:
    """How many of the facts the model still knows."""
    plugin = Compaction(read_back=False)  # with the model's own window, so that it does no more
    config = LoopConfig(
        stream=model, plugins=[plugin], max_iterations=1, max_output_tokens=LONGEST_ANSWER
    )
    texts = [(await run(each.question, context, config)).text.lower() for each in said]
    return sum([each.expected in text for each, text in zip(said, texts, strict=True)])


async def report(model: StreamFn) -> None:
    """Print the figures, and what stands in the place of the old turns."""
    ways = {
        "the whole conversation": AgentContext("", tuple(messages(BEFORE, TALK))),
        "its own summary": await compacted(model, None),
        "old turns left out": await compacted(model, fails),
    }
    print(
        f"\nwhat it knows of {len(BEFORE)} facts said before a compaction, and {len(AFTER)} after:"
    )
    for name, context in ways.items():
        whole = AgentContext("", (*context.messages, *messages(AFTER)))
        before, after = [await known(said, whole, model) for said in (BEFORE, AFTER)]
        print(f"  {name:24} {before} of {len(BEFORE)}   {after} of {len(AFTER)}", flush=True)
        for message in context.messages:
            if isinstance(message, CustomMessage):
                print(f"    {' '.join(str(message.payload['text']).split())}", flush=True)
