"""Extracts the searchable text of a record: what people and models see."""

from __future__ import annotations

from msgspec import Struct

from clark_agent.run_log.records import (
    Answered,
    Entry,
    MessagesAdded,
    RunBegan,
    RunFailed,
    ToolEnded,
)

__all__ = ["SearchHit", "text_of"]


class SearchHit(Struct, frozen=True):
    """A record that contains the words, with some of the text around them."""

    run_id: str
    seq: int
    snippet: str


def text_of(entry: Entry) -> str:
    """Return the visible text of the messages that an entry added to the run, one per line.

    Each text is indexed where it first appears. So this omits the history that a run began with (it
    is in earlier runs), accepted steering messages (they appear again when they are delivered),
    edits of the context by plugins, and the system prompt, which would match in every run.
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
