"""Estimates the tokens of a message, without the model's tokenizer.

A host with a real tokenizer passes its own `TokenEstimator`; all budgets use it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

from msgspec.structs import replace

from clark_agent.messages.wire import encode_message
from clark_agent.types import AgentMessage, FileContent, ImageContent

__all__ = ["CachingEstimator", "JsonSizeEstimator", "TokenEstimator", "estimate_messages"]


logger = logging.getLogger(__name__)


class TokenEstimator(Protocol):
    """Contract: pure, so that one estimate per message can be kept.

    Should not raise. If it does, a run logs that and uses the estimate of `JsonSizeEstimator`.
    """

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens."""
        ...


_IMAGE = 1_600
"""What an image costs, whatever its bytes. Anthropic scales images down to about this cost (1,568
pixels on the long side, a token for 750 pixels); most other models charge less. What a provider
counts corrects it."""

_CHARS_PER_TOKEN = {"text": 16 / 3, "audio": 500, "video": 500}
"""How many characters of base64 a token has, by the kind of media. A token of text has four bytes,
one of a recording at usual bit rates about 400."""
_CHARS_OF_DOCUMENT = 50
"""The same for other files. Pages of a PDF are billed as text and as images, at about 2,000 tokens,
and have from 30 to 300 kilobytes."""
_TEXTS = ("application/json", "application/xml", "application/yaml")


class JsonSizeEstimator:
    """A quarter of the bytes of the message's JSON: close enough for English, without a model.

    Images and files in base64 (``data:`` URLs) do not count with their bytes: an image costs 1,600
    tokens, a file what its kind and size suggest. The Rust crate counts their bytes, as of text.
    """

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens. Never raises."""
        content = getattr(message, "content", None)
        if isinstance(content, tuple) and not _MEDIA.isdisjoint(map(type, content)):
            inline = [block for block in content if _is_inline(block)]
            rest = [replace(b, source="") if _is_inline(b) else b for b in content]
            message = replace(message, content=tuple(rest))
            return len(encode_message(message)) // 4 + sum(map(_media_cost, inline))
        return len(encode_message(message)) // 4


_MEDIA = frozenset([ImageContent, FileContent])


def _is_inline(block: Any) -> bool:
    return type(block) in _MEDIA and bool(_base64_at(block.source))


def _base64_at(source: str) -> int:
    """Where the data of a ``data:`` URL in base64 begins; 0 if it is none."""
    head, comma, _ = source[:200].lower().partition(";base64,")
    return len(head) + len(comma) if comma and head.startswith("data:") else 0


def _media_cost(block: ImageContent | FileContent) -> int:
    """The cost of an image or a file in a ``data:`` URL."""
    if isinstance(block, ImageContent):
        return _IMAGE
    start = _base64_at(block.source)
    size = len(block.source) - start
    media_type = (block.media_type or block.source[5:start].partition(";")[0]).lower()
    kind = "text" if media_type in _TEXTS else media_type.partition("/")[0]
    if kind in _CHARS_PER_TOKEN:
        return int(size / _CHARS_PER_TOKEN[kind])
    return max(_IMAGE, size // _CHARS_OF_DOCUMENT)


def estimate_messages(estimator: TokenEstimator, messages: Iterable[AgentMessage]) -> int:
    """The cost of messages together: the sum over each."""
    estimate = estimator.estimate_message
    return sum([estimate(message) for message in messages])


class CachingEstimator:
    """Calls another estimator once for each message, by identity. For one run.

    Never raises: if the other estimator fails, it uses the size of the message.
    """

    def __init__(self, estimator: TokenEstimator) -> None:
        self._estimate = estimator.estimate_message
        self._has_failed = False
        # The message is kept with its cost: an id is unique only while the object lives.
        self._costs: dict[int, tuple[AgentMessage, int]] = {}

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens."""
        known = self._costs.get(id(message))
        if known is None:
            known = self._costs[id(message)] = (message, self._ask(message))
        return known[1]

    def _ask(self, message: AgentMessage) -> int:
        try:
            return max(0, int(self._estimate(message)))
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "the token estimator failed; the size of such messages is used instead",
                    exc_info=True,
                )
        return JsonSizeEstimator().estimate_message(message)
