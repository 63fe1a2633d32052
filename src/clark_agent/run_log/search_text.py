"""What there is to find in a record: the text that people and models see."""

from __future__ import annotations

from clark_agent.run_log.records import (
    Answered,
    Entry,
    MessagesAdded,
    RunBegan,
    RunFailed,
    ToolEnded,
)

__all__ = ["text_of"]


def text_of(entry: Entry) -> str:
    """The visible text of the messages that an entry brought into the run, one a line.

    Each text is found where it first came in. So the history that a run began with is left out (the
    runs that it comes from have it), and so are steering messages when they are accepted (they come
    again when they are delivered), what a plugin made of the context, and the system prompt, which
    would be found in every run.
    """
    match entry:
        case RunBegan():
            texts = [message.plain_text for message in entry.prompts]
        case MessagesAdded():
            texts = [message.plain_text for message in entry.messages]
        case Answered():
            texts = [entry.message.plain_text]
        case ToolEnded():
            texts = [entry.result.plain_text]
        case RunFailed():
            texts = [message.plain_text for message in entry.undelivered]
        case _:
            texts = []
    return "\n".join([text for text in texts if text])
