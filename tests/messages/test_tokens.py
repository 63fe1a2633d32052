"""The estimate is a quarter of the bytes on the wire, for each message by itself. Images and files
in base64 cost what their kind suggests.
"""

from __future__ import annotations

from base64 import b64encode

import pytest
from hypothesis import assume, given
from msgspec.structs import replace

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    FileContent,
    ImageContent,
    StopReason,
    TextContent,
    ToolResultMessage,
    UserMessage,
)
from clark_agent.messages import (
    JsonSizeEstimator,
    TokenEstimator,
    encode_message,
    estimate_messages,
)
from clark_agent.messages.tokens import CachingEstimator
from tests.strategies import messages, transcripts


def has_media(message: AgentMessage) -> bool:
    content = getattr(message, "content", ())
    return any(";base64," in getattr(block, "source", "").lower() for block in content)


@given(messages())
def test_a_quarter_of_the_bytes_rounded_down(message: AgentMessage) -> None:
    assume(not has_media(message))
    assert JsonSizeEstimator().estimate_message(message) == len(encode_message(message)) // 4


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 7), ("abc", 7), ("abcd", 8), ("éé", 8), ("😀", 8)]
)
def test_bytes_count_not_characters(text: str, tokens: int) -> None:
    assert len(encode_message(UserMessage(""))) == 28
    assert JsonSizeEstimator().estimate_message(UserMessage(text)) == tokens


@given(transcripts())
def test_the_sum_is_taken_over_rounded_estimates(given_messages: list[AgentMessage]) -> None:
    estimator = JsonSizeEstimator()
    total = estimate_messages(estimator, iter(given_messages))
    assert total == sum(estimator.estimate_message(message) for message in given_messages)


IMAGE = "data:image/png;base64," + "A" * 400_000


@pytest.mark.parametrize(
    "message",
    [
        UserMessage((ImageContent(IMAGE),)),
        UserMessage((ImageContent(IMAGE[:30], "image/png"),)),
        ToolResultMessage("c", "screenshot", (ImageContent(IMAGE),)),
        AssistantMessage((ImageContent(IMAGE),), StopReason.END_TURN),
    ],
)
def test_an_inline_image_has_one_cost(message: AgentMessage) -> None:
    assert 1_600 <= JsonSizeEstimator().estimate_message(message) < 1_650


def test_the_text_beside_inline_images_counts_as_ever() -> None:
    image = ImageContent(IMAGE, alt="a cat")
    text, other = TextContent("word " * 100), ImageContent("https://x.org/cat.png")
    blocks, bare = (text, image, image, other), replace(image, source="")
    size = len(encode_message(UserMessage((text, bare, bare, other)))) // 4
    assert JsonSizeEstimator().estimate_message(UserMessage(blocks)) == size + 3_200


@pytest.mark.parametrize(
    ("media_type", "size", "tokens"),
    [
        ("text/plain", 30_000, 7_500),
        ("application/json", 30_000, 7_500),
        ("application/pdf", 300_000, 8_000),
        ("application/pdf", 3_000, 1_600),
        ("audio/mpeg", 960_000, 2_560),
    ],
)
@pytest.mark.parametrize("has_type", [True, False])
def test_an_inline_file_costs_what_its_kind_and_its_size_suggest(
    media_type: str, size: int, tokens: int, has_type: bool
) -> None:
    data = b64encode(b"x" * size).decode()
    file = FileContent(f"data:{media_type};base64,{data}", media_type if has_type else None)
    assert tokens <= JsonSizeEstimator().estimate_message(UserMessage((file,))) <= tokens + 50


def test_any_estimator_will_do() -> None:
    class One:
        def estimate_message(self, message: AgentMessage) -> int:
            return 1

    estimator: TokenEstimator = One()
    assert estimate_messages(estimator, [UserMessage("a"), UserMessage("b" * 100)]) == 2


@given(transcripts())
def test_a_caching_estimator_asks_about_each_message_once(
    given_messages: list[AgentMessage],
) -> None:
    asked: list[AgentMessage] = []

    class Counting(JsonSizeEstimator):
        def estimate_message(self, message: AgentMessage) -> int:
            asked.append(message)
            return super().estimate_message(message)

    caching = CachingEstimator(Counting())
    for _ in range(2):
        total = estimate_messages(caching, given_messages)
        assert total == estimate_messages(JsonSizeEstimator(), given_messages)
    assert len(asked) == len({id(message) for message in given_messages})


def test_a_caching_estimator_is_not_fooled_by_an_id_that_is_used_again() -> None:
    caching = CachingEstimator(JsonSizeEstimator())
    costs = [caching.estimate_message(UserMessage("a" * (4 * size))) for size in range(200)]
    assert costs == list(range(7, 207))
