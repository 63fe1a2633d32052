"""Classification of failures: one table for all providers.

Providers agree on little. The same words mean "pay" at one and "wait" at another; a context
overflow may come with status 401 or 500, a rate limit with 413. The rules are therefore checked in
order. Each looks at the status, at the codes and types in the body, and at the body's text. The
tests check them against a collection of real responses; add a new response there first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec
from msgspec import Struct

from clark_agent.errors import ClarkAgentError, StreamTimeout
from clark_agent.stream import StreamErrorKind
from clark_agent.transports.http.response import Failure

__all__ = [
    "classify",
    "failure_from_response",
    "failure_in_stream",
    "failure_of_sdk",
    "no_stream",
    "undecodable_event",
]

_FATAL = StreamErrorKind.FATAL
_OVERFLOW = StreamErrorKind.CONTEXT_OVERFLOW
_HISTORY = StreamErrorKind.INCONSISTENT_TOOL_HISTORY
_LIMITED = StreamErrorKind.PROVIDER_RATE_LIMITED
_TRANSIENT = StreamErrorKind.TRANSIENT

_ANY = range(1000)
_STATUS = re.compile(r"[45][0-9][0-9]")
_IN_STREAM = 0  # the status of an error inside a stream that began with 200


class _Rule(Struct, frozen=True):
    """Matches if the status is in ``within`` and a status, a word or the text matches."""

    kind: StreamErrorKind
    statuses: frozenset[int] | range = frozenset()
    words: frozenset[str] = frozenset()
    text: re.Pattern[str] | None = None
    within: frozenset[int] | range = _ANY

    def holds(self, status: int, words: frozenset[str], text: str) -> bool:
        return status in self.within and (
            status in self.statuses
            or not self.words.isdisjoint(words)
            or (self.text is not None and self.text.search(text) is not None)
        )


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RULES = (
    # Waiting does not help: the account is out of credit.
    _Rule(
        _FATAL,
        statuses=frozenset({402}),
        words=_words(
            "insufficient_quota exceeded_current_quota_error insufficient_balance billing_error "
            "arrearage 1113"
        ),
        text=_any_of(
            r"insufficient balance",
            r"credit balance is too low",
            r"used all available credits",
            r"requires more credits",
            r"can only afford",
            r"extra usage is required",
        ),
    ),
    # Reported as a rate limit, but this single request exceeds it: waiting does not help.
    _Rule(
        _OVERFLOW,
        text=_any_of(r"request too large .{0,400}(must be reduced|reduce your message)"),
    ),
    _Rule(
        _LIMITED,
        statuses=frozenset({429, 529}),
        words=_words(
            "rate_limit_exceeded rate_limit_error rate_limited slow_down throttlingexception "
            "overloaded_error engine_overloaded_error server_is_overloaded resource_exhausted "
            "model_capacity_exhausted token_quota_exceeded request_quota_exceeded 1302 1305 "
            "insufficient_system_resource"
        ),
    ),
    # Calls and results of the conversation do not match. Malformed ids, wrong roles and missing
    # reasoning are other mistakes: pairing calls with results does not fix those.
    _Rule(
        _HISTORY,
        text=_any_of(
            r"tool_use`? ids (were found without|must be unique)",
            r"unexpected `?tool_use_id`? found in",
            r"each `?tool_use`? must have a single result",
            r"did not find \d+ `?tool_result`? block",
            r"number of toolresult blocks .{0,80}exceeds the number of tooluse",
            r"expected toolresult blocks at",
            r"message with ['\"]tool_calls['\"] must be followed by tool messages",
            r"role ['\"]tool['\"] must be a response to a prece+ding message",
            r"duplicate value for 'tool_call_id'",
            r"no tool (output|call) found for [\w ]{1,30}call",
            r"number of function response parts .{0,20}equal to",
            r"function (call|response) turn comes immediately after",
            r"not the same number of function calls and responses",
            r"unexpected tool call id .{0,80}in tool results",
            r"unexpected role (roleenum\.tool|'tool')",
            r"tool result's tool id ?\(.{0,80}\) not found",
            r"tool call (result does not follow tool call|and result not match)",
            r"tool_call_id +is not found",
        ),
    ),
    # Something is too large, but not the conversation.
    _Rule(
        _FATAL,
        statuses=frozenset({431}),
        words=_words(
            "string_above_max_length array_above_max_length integer_above_max_value "
            "unsupported_parameter"
        ),
        text=_any_of(
            r"(string|array) too long",
            r"string value length",
            r"image (exceeds|dimensions)",
            r"completion tokens, whereas",
            r"number of output tokens",
            r"range of max_tokens",
            r"max_tokens参数",
            r"invalid max_tokens value",
            r"integer above maximum",
            r"maximum tokens you requested",
            r"header (or cookie|fields) too large",
        ),
        within=range(500),
    ),
    _Rule(
        _OVERFLOW,
        words=_words(
            "context_length_exceeded model_max_prompt_tokens_exceeded exceed_context_size_error "
            "request_too_large requested_too_many_tokens tokens_limit_reached 1261"
        ),
    ),
    _Rule(
        _OVERFLOW,
        text=_any_of(
            r"(maximum|max|model'?s?|available|the) context (length|window|size)",
            r"context (length|window|limit|size) (of|is|exceed)",
            r"exceed(s|ed)? (the |max |maximum |model )*(context|token limit)",
            r"(prompt|input) (is )?too long",
            r"exceeds max length",
            r"maximum prompt length",
            r"longer than the (model's context|maximum model) length",
            r"token count.{0,40}(exceeds|but model only supports)",
            r"ContextWindowExceeded",
            r"input tokens exceeded",
            r"too many (input tokens\. max|tokens overall)",
            r"following a prompt of length \d+, which exceeds",
            r"(prompt|input) length \S* ?exceeds (the )?maximum (allowed )?(input|sequence) length",
            r"prompt length .{0,40}should not exceed max_num_tokens",
            r"prompt_tokens \(\d+\) must be less than max_seq_len",
            r"total message size \d+ exceeds",
            r"supports only \d+k context",
            r"range of input length",
            r"`inputs` (tokens \+ `max_new_tokens` must be <=|must have less than)",
            r"input length .{0,30}exceeds the (maximum|context)",
            r"tokens? exceed the configured limit",
            r"too many tokens: total",
            r"max_tokens must be at least 1, got -",
            r"n_keep.{0,20}n_ctx",
            r"keep the first \d+ tokens when context",
            r"reduce (the length of the (messages|input|prompt)|your prompt)",
        ),
        within=frozenset(_ANY) - {503},
    ),
    _Rule(_OVERFLOW, statuses=frozenset({413})),
    _Rule(
        _LIMITED,
        text=_any_of(
            r"overloaded",
            r"high demand",
            r"(at|no) capacity",
            r"capacity exceeded",
            r"rate.?limit",
            r"too many requests",
            r"tokens per (min|day)",
            r"please wait before trying again",
        ),
        within=frozenset({_IN_STREAM, *range(500, 600)}),
    ),
    _Rule(
        _TRANSIENT,
        statuses=frozenset({408, 409, *range(500, 600)}),
        words=_words("conversation_locked tool_use_failed"),
    ),
    _Rule(
        _FATAL,
        words=_words(
            "invalid_request_error authentication_error permission_error not_found_error "
            "invalid_argument invalid_prompt content_filter invalid_encrypted_content "
            "invalid_image image_too_large bio_policy misalignment_policy_violation "
            "data_residency_mismatch"
        ),
        within=frozenset({_IN_STREAM}),
    ),
    _Rule(_TRANSIENT, statuses=frozenset({_IN_STREAM})),
)


def classify(status: int, body: Any, headers: Mapping[str, str] | None = None) -> StreamErrorKind:
    """Classify a response of that status, or an error inside a stream (status 0)."""
    words, text = _read(body, headers)
    if status == _IN_STREAM:
        # The code of an error inside a stream is the HTTP status that it would have had.
        status = next((int(w) for w in sorted(words) if _STATUS.fullmatch(w)), 0)
    rules = (rule.kind for rule in _RULES if rule.holds(status, words, text))
    return next(rules, _FATAL)


def _read(body: Any, headers: Mapping[str, str] | None) -> tuple[frozenset[str], str]:
    words: set[str] = set()
    texts: list[str] = []
    for is_word, value in _walk(body):
        if is_word:
            words.add(value.lower())
        else:
            texts.append(value)
    if headers and (kind := headers.get("x-amzn-errortype")):
        words.add(kind.partition(":")[0].lower())
    return frozenset(words), "\n".join(texts)[:_LONGEST_READ]


_WORD_FIELDS = frozenset({"code", "type", "status", "reason", "quotaId"})
_TEXT_FIELDS = frozenset({"message", "detail", "raw", "title", "error"})
_INNER_FIELDS = frozenset({"error", "errors", "response", "details", "metadata"})


# No provider nests its reason deeper. The limits bound the time and the recursion.
_DEEPEST = 20
_LONGEST_READ = 100_000


def _walk(value: Any, depth: int = 0) -> Iterator[tuple[bool, str]]:
    """Yield the words (True) and texts (False) of a body of any known shape."""
    depth += 1
    if depth > _DEEPEST:
        return
    if isinstance(value, str):
        yield False, value
    elif isinstance(value, list):
        for part in value:
            yield from _walk(part, depth)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name in _WORD_FIELDS and isinstance(part, (str, int)):
                yield True, str(part)
            elif name in _TEXT_FIELDS and isinstance(part, str):
                yield False, part
            elif name.endswith("Exception"):
                yield True, name
                yield from _walk(part, depth)
            elif name in _INNER_FIELDS and isinstance(part, (dict, list)):
                yield from _walk(part, depth)


# --- failures ---------------------------------------------------------------------------------


def failure_from_response(
    status: int, body: Any, headers: Mapping[str, str] | None = None
) -> Failure:
    """Return the failure for a response with a status other than 2xx."""
    text = _message(body) or "no text"
    return Failure(
        classify(status, body, headers),
        f"the server answered {status}: {text}",
        _retry_after(headers or {}, body),
        status=status,
    )


def failure_in_stream(body: Any) -> Failure:
    """Return the failure for an error event inside a stream."""
    text = _message(body) or "no text"
    message = f"the server failed in the middle of the stream: {text}"
    return Failure(classify(_IN_STREAM, body), message, _retry_after({}, body))


def undecodable_event(payload: bytes, error: Exception) -> Failure:
    """Return the failure for an event that cannot be decoded."""
    start = payload[:200].decode(errors="replace")
    return Failure(
        _TRANSIENT, f"the server sent an event that cannot be decoded ({error}): {start}"
    )


def no_stream(body: bytes) -> Failure:
    """Return the failure for a body without events: a proxy's HTML page, plain text."""
    text = _message(body[:_LONGEST_READ]) or "an unreadable body"
    message = f"the server did not send an event stream, but: {text}"
    return Failure(StreamErrorKind.EMPTY, message)


def failure_of_sdk(error: Exception, address: str = "") -> Failure:
    """Return the failure for an exception of an SDK or of the HTTP library that it uses.

    Exceptions are recognized by the names of their classes, because which library defines them
    depends on the SDK's version. ``address`` is the server's address, for the message.
    """
    if isinstance(error, ClarkAgentError):
        return Failure(_FATAL, str(error), cause=error)
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and status >= 300:
        response = getattr(error, "response", None)
        headers = getattr(response, "headers", None)
        body = getattr(error, "body", None)
        return failure_from_response(status, str(error) if body is None else body, headers)
    if isinstance(status, int):  # an error event inside a stream that began well
        return failure_in_stream(getattr(error, "body", None) or str(error))
    below = names | {kind.__name__ for kind in type(error.__cause__).__mro__}
    if "LocalProtocolError" in below:  # its text quotes the header, which may be the key
        text = "the request was not sent: a key or a header has characters that HTTP does not allow"
        return Failure(_FATAL, text)
    if "ConnectTimeout" in below:
        timeout = StreamTimeout("connect", None)
        return Failure(_TRANSIENT, str(timeout), cause=timeout)
    if names & {"APITimeoutError", "TimeoutException"}:
        timeout = StreamTimeout("idle", None)
        return Failure(_TRANSIENT, str(timeout), cause=timeout)
    if names & {"APIConnectionError", "TransportError", "DecodingError", "OSError"}:
        reason = error.__cause__ or error
        where = f" to {address}" if address else ""
        return Failure(_TRANSIENT, f"the connection{where} failed: {_named(reason)}")
    if "APIError" in names:
        return failure_in_stream(getattr(error, "body", None) or str(error))
    return Failure(_FATAL, f"the request failed: {_named(error)}")


def _named(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_LONGEST_TEXT = 1000
# An unclosed tag extends to the end of the text. Otherwise the search would be quadratic.
_TAG = re.compile(
    r"<!--.*?(?:-->|\Z)|<(script|style)\b.*?(?:</\1\s*>|\Z)|<[^>]*(?:>|\Z)",
    re.DOTALL | re.IGNORECASE,
)


def _message(body: Any) -> str:
    """Return the first human-readable text of a body."""
    if isinstance(body, bytes):
        body = body.decode(errors="replace")
    texts = [value.strip() for is_word, value in _walk(body) if not is_word and value.strip()]
    text = texts[0] if texts else ""
    if len(texts) > 1 and texts[0] == "Provider returned error":  # a gateway; the reason follows
        text = f"{texts[0]}: {texts[1]}"
    if text.lstrip().startswith("<"):
        text = " ".join(_TAG.sub(" ", text).split())
    if not text and isinstance(body, (dict, list)) and body:
        text = _json_text(body)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def _json_text(body: Any) -> str:
    try:
        return msgspec.json.encode(body).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return ""


def _retry_after(headers: Mapping[str, str], body: Any) -> float | None:
    """Seconds that the server asks to wait: from the headers, the text or a `RetryInfo`."""
    if (seconds := _number(headers.get("retry-after-ms"))) is not None:
        return seconds / 1000
    given = headers.get("retry-after")
    if (seconds := _number(given)) is not None:
        return seconds
    if given:
        try:
            moment = parsedate_to_datetime(given)
        except (ValueError, OverflowError):
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    stated = _TRY_AGAIN.search(_read(body, None)[1])
    if stated is not None and (seconds := _number(stated["number"])) is not None:
        return seconds * _UNITS.get(stated["unit"].lower(), 1.0)
    return _retry_info(body)


_TRY_AGAIN = re.compile(
    r"(?:try again|retry) (?:in|after) (?P<number>\d+(?:\.\d+)?) ?(?P<unit>ms|s\b|sec|m\b|min|h)",
    re.IGNORECASE,
)
_UNITS = {"ms": 0.001, "m": 60.0, "min": 60.0, "h": 3600.0}


def _retry_info(body: Any, depth: int = 0) -> float | None:
    """Read Google's delay from the body: ``{"@type": "….RetryInfo", "retryDelay": "37s"}``."""
    if depth > _DEEPEST:
        return None
    if isinstance(body, list):
        found = (_retry_info(part, depth + 1) for part in body)
        return next((seconds for seconds in found if seconds is not None), None)
    if not isinstance(body, dict):
        return None
    delay = body.get("retryDelay")
    if isinstance(delay, str):
        return _number(delay.removesuffix("s"))
    return _retry_info([body.get(name) for name in ("error", "details")], depth + 1)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < float("inf") else None
