"""The arguments of `run` and its companions, checked before anything happens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from clark_agent._text import describe, well_formed
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.errors import ConfigError, InvalidContinuationError, LoopError
from clark_agent.intake import accept_messages
from clark_agent.types import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    UserMessage,
)

__all__ = ["check_arguments", "check_continuation", "prompt_messages"]


def check_arguments(context: object, config: object, signal: object = None) -> None:
    """Raise `TypeError` unless these are a context, a config and a token."""
    if not isinstance(context, AgentContext):
        raise TypeError(f"the context must be an AgentContext, not {type(context).__name__}")
    if not isinstance(config, LoopConfig):
        raise TypeError(f"the config must be a LoopConfig, not {type(config).__name__}")
    if signal is not None and not isinstance(signal, CancellationToken):
        raise TypeError(f"the signal must be a CancellationToken, not {type(signal).__name__}")


_NOTES = 20
"""How many messages at the end are looked through for one that a model gets."""


def check_continuation(context: AgentContext) -> None:
    """Raise `InvalidContinuationError` unless the transcript waits for an answer."""
    if not context.messages:
        raise InvalidContinuationError("nothing to continue: the context has no messages")
    sent = [m for m in context.messages[-_NOTES:] if not isinstance(m, CustomMessage)]
    if sent and isinstance(sent[-1], AssistantMessage):
        raise InvalidContinuationError(
            "the transcript ends with an assistant message; add a message for it to answer"
        )


def prompt_messages(
    prompts: str | AgentMessage | Iterable[AgentMessage], config: LoopConfig
) -> Sequence[AgentMessage]:
    """The prompts as messages. Raises `TypeError` for other values, `ConfigError` for a blank."""
    if isinstance(prompts, str):
        if not prompts.strip():
            raise ConfigError(
                "the prompt is blank: say what the agent should do. To continue a transcript, pass "
                "None to an Agent with messages=..., call run_continue, or send() of a "
                "Conversation without a prompt"
            )
        return (UserMessage(well_formed(prompts), timestamp=config.clock.now_ms()),)
    given = prompts if isinstance(prompts, Iterable) else (prompts,)
    if not isinstance(given, Sequence):
        try:
            given = tuple(given)
        except Exception as error:
            text = f"the prompts could not be read: {describe(error)}"
            raise LoopError(text) from error
    try:
        return accept_messages(given)
    except TypeError as error:
        raise TypeError(
            f"prompts must be a text, a message or several messages: {error}. Use "
            "UserMessage('...') for each of several texts"
        ) from None
