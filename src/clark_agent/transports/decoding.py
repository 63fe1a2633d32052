"""Reading a response of JSON in server-sent events, whatever the provider."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from clark_agent.transports.answer import Answer, ProviderFailure
from clark_agent.transports.failures import not_understood
from clark_agent.transports.sse import SseDecoder

__all__ = ["JsonEventDecoder"]

E = TypeVar("E")


class JsonEventDecoder(ABC, Generic[E]):
    """A `clark_agent.transports.base.Decoder` for bytes; a provider brings ``_event``.

    ``_event`` tells the answer what an event says. It sets ``may_end`` when the answer is whole
    even if nothing more comes, and ``is_complete`` at the event that is always the last.
    """

    def __init__(self, answer: Answer, decoder: msgspec.json.Decoder[E]) -> None:
        self.is_complete = False
        self.may_end = False
        self._answer = answer
        self._decode = decoder.decode
        self._type: Any = decoder.type
        self._sse = SseDecoder()

    @abstractmethod
    def _event(self, event: E) -> None:
        """Take an event. Raises `ProviderFailure`."""

    def feed(self, piece: bytes) -> None:
        """Take the next bytes."""
        for payload in self._sse.feed(piece):
            if self.is_complete:
                return
            self._payload(payload)

    def end(self) -> None:
        """The response has ended.

        The last event may be cut off: then the answer is incomplete, and that says it all. A body
        without any event may be the answer, or an error, in one piece.
        """
        for payload in self._sse.end():
            if payload.startswith(b"[DONE]") or _is_json(payload):
                self._payload(payload)
        if not self.is_complete and (stray := self._sse.stray) and _is_json(stray):
            self._payload(stray)
        self.is_complete = self.is_complete or self.may_end

    def _payload(self, payload: bytes) -> None:
        if payload.startswith(b"[DONE]"):
            self.is_complete = True
            return
        if not payload.strip():
            return  # an event without data: a sign of life
        try:
            event = self._decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            event = self._with_half_a_character(payload, error)
        self._event(event)

    def _with_half_a_character(self, payload: bytes, error: Exception) -> E:
        """A character that is cut between two events comes as two escapes, each of them no text.

        Only the slower decoder takes them.
        """
        if b"\\ud" in payload.lower():
            with suppress(ValueError, RecursionError, msgspec.ValidationError):
                event: E = msgspec.convert(json.loads(payload), self._type)
                return event
        raise ProviderFailure(not_understood(payload, error)) from None


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
