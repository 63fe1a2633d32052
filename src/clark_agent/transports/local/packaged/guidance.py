"""Guides a very small model to a call or an answer.

A model of a few hundred million weights, left to itself, invents tools. So this module reads from
the model how likely each possible next step is, and combines these values:

    relevance   how likely the name of a tool follows the question, minus half of its likelihood
                without a question, plus a bonus for each word that question and tool share
    call?       how much likelier a call is than an answer, plus the weighted relevance of the best
                tool
    arguments   written by the model, constrained to the tool's schema by a grammar
    put off     a call whose arguments were not said (see `arguments`) is put off while another
                one is possible; if none is, its texts are copied from the question
    go on?      after a result, there is another call only if it uses something from the result, and
                either was put off or uses words of the question that no call has used yet
    answer      one line, which contains the last result if that is short

The weights and limits were tuned on one set of questions and are evaluated on another, see
``make eval-local``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Struct

from clark_agent.stream import ToolSchema
from clark_agent.transports.http.failures import failure_in_stream
from clark_agent.transports.http.response import ProviderFailure
from clark_agent.transports.local.engine import Engine
from clark_agent.transports.local.packaged.arguments import (
    copying,
    held,
    is_said,
    with_choices_said,
    without_unsaid,
    words,
    words_of,
)
from clark_agent.transports.local.packaged.case import Case
from clark_agent.transports.local.packaged.prompts import (
    COMMON_WORDS,
    OPENINGS,
    answer_prompt,
    call_prompt,
    quoted,
    shared_words,
    with_facts,
)

__all__ = ["guide"]

# The fraction of a name's likelihood without a question that is subtracted, the bonus for a shared
# word, and the weight of the best tool's relevance in the decision whether to call.
_WITHOUT_QUESTION = 0.5
_SHARED_WORD = 2.5
_RELEVANCE = 0.4
_THRESHOLD = 0.0
_NO_QUESTIONS = ("N/A", "...", "Do something.")
# How many of the likeliest next tokens are read, and how many of the best tools are tried: more
# after a result than before the first one.
_TOKENS = 2000
_TRIED = 3
_TRIED_BEHIND = 6
# If only one name starts with a token of at least this length, the rest of the name is not scored.
_TELLING = 4
_SHORT_RESULT = 100
_LONGEST_TEXT = 64
_LONGEST_ARGUMENTS = 512
_GRAMMAR = "%llguidance {{}}\nstart: {}"
# Spaces only where the examples have them; otherwise the model might write nothing but spaces.
# ``lenient`` skips unknown keywords: a grammar that is rejected has no effect, without any error.
_AS_SHOWN = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": True,
    }
}


def guide(
    engine: Engine, case: Case, emit: Callable[[Any], None], is_wanted: Callable[[], bool]
) -> None:
    """Guide a model to a call or an answer. Blocking: run it in a separate thread.

    ``emit`` is called with the events of the answer as the model writes it, in the format of Chat
    Completions. ``is_wanted`` is checked at each token; once it is false, this returns.
    Raises `ProviderFailure`.
    """
    with suppress(_Stopped):
        _Thinker(engine, emit, is_wanted).think(case)


class _Stopped(Exception):
    """Raised when the call is no longer wanted."""


class Relevance(Struct, frozen=True):
    """The model's scores for a question."""

    margin: float
    """How much likelier a call is than an answer, in nats."""
    tools: Mapping[str, float]

    @property
    def best_first(self) -> list[str]:
        """The names of the tools, the most relevant first."""
        return sorted(self.tools, key=self.tools.__getitem__, reverse=True)


_seen: WeakKeyDictionary[Engine, dict[str, Relevance]] = WeakKeyDictionary()
"""The scores of earlier prompts, for each engine."""


class _Thinker:
    """One call to the model: its events, its usage, and whether it is still wanted."""

    def __init__(
        self, engine: Engine, emit: Callable[[Any], None], is_wanted: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._emit = emit
        self._is_wanted = is_wanted
        self._usage = _Usage()
        """Of the last completion, which writes the call or the answer."""

    def think(self, case: Case) -> None:
        """Emit a call or an answer. Raises `ProviderFailure` and `_Stopped`."""
        chosen = self._choose(case) if case.tools else None
        finish = self._answer(case) if chosen is None else self._call(case, chosen)
        # Completions that only make the decision read much the same prompt again: they count for
        # nothing.
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
        self._emit({**end, "usage": self._usage})

    # --- choosing a tool ------------------------------------------------------------------------

    def _choose(self, case: Case) -> ToolSchema | None:
        """Return the tool to call next; None: answer instead."""
        turn, tools = case.turn, {tool.name: tool for tool in case.tools}
        found = self._relevance(case.tools, turn.question)
        best = found.best_first
        if not turn.steps:
            worth = found.margin + _RELEVANCE * found.tools[best[0]]
            if worth < _THRESHOLD and not case.must_call:
                return None
            return self._first_possible(case, [tools[name] for name in best[:_TRIED]])
        if turn.steps[-1].is_error and not case.must_call:
            return None  # the model would use the error's text as arguments
        done = [step.name for step in turn.steps]
        ranks = [best.index(name) for name in done if name in best]
        for rank, name in enumerate(best[: _TRIED_BEHIND + len(done)]):
            if name in done:
                continue
            was_put_off = rank < min(ranks, default=0)
            if tool := self._leading_on(case, tools[name], was_put_off=was_put_off):
                return tool
        return tools[best[0]] if case.must_call else None

    def _first_possible(self, case: Case, tools: Sequence[ToolSchema]) -> ToolSchema:
        question = case.turn.question
        said = set(words(question))
        for tool in tools:
            narrow = with_choices_said(tool, said)
            arguments = self._arguments(case, narrow)
            if is_said(narrow, arguments, said):
                return without_unsaid(narrow, arguments, said)
        return copying(without_unsaid(with_choices_said(tools[0], said), {}, said), question)

    def _leading_on(self, case: Case, tool: ToolSchema, *, was_put_off: bool) -> ToolSchema | None:
        """Return the tool if its call passes the rules of ``go on?`` above, else None."""
        turn = case.turn
        asked = set(words(turn.question))
        said = asked | {word for step in turn.steps for word in words(step.result)}
        narrow = with_choices_said(tool, said)
        arguments = self._arguments(case, narrow)
        if not is_said(narrow, arguments, said):
            return None
        wanted = set(words_of(arguments)) - COMMON_WORDS
        takes_result = wanted & (set(words(turn.steps[-1].result)) - asked)
        takes_more = wanted & (asked - _used_up(case))
        leads_on = takes_result and (was_put_off or takes_more)
        return without_unsaid(narrow, arguments, said) if leads_on else None

    def _relevance(self, tools: Sequence[ToolSchema], question: str) -> Relevance:
        asked = self._look(tools, question)
        nothing = [self._look(tools, no_question) for no_question in _NO_QUESTIONS]
        count = len(nothing)
        return Relevance(
            asked.margin - sum([each.margin for each in nothing]) / count,
            {
                tool.name: asked.tools[tool.name]
                - _WITHOUT_QUESTION * sum([each.tools[tool.name] for each in nothing]) / count
                + _SHARED_WORD * shared_words(question, tool)
                for tool in tools
            },
        )

    def _look(self, tools: Sequence[ToolSchema], question: str) -> Relevance:
        prompt = call_prompt(tools, question)
        seen = _seen.setdefault(self._engine, {})
        if (known := seen.get(prompt)) is not None:
            return known
        ways = self._likelihoods(prompt, [" call", " say"])
        names = self._likelihoods(f"{prompt} call", [f" {tool.name} " for tool in tools])
        found = Relevance(
            ways[" call"] - ways[" say"], {name.strip(): value for name, value in names.items()}
        )
        if len(seen) >= 256:
            seen.clear()
        seen[prompt] = found
        return found

    def _likelihoods(self, prompt: str, texts: Sequence[str]) -> dict[str, float]:
        """The log likelihood in nats of each text as the continuation, token by token."""
        tokens = self._next_tokens(prompt)
        lowest = min(tokens.values(), default=0.0)  # tokens of partial characters are missing
        beginnings: dict[str, list[str]] = {}
        found: dict[str, float] = {}
        for text in texts:
            # A single space is a token too, but words do not start with it.
            fitting = [token for token in tokens if token.strip() and text.startswith(token)]
            if fitting:
                beginnings.setdefault(max(fitting, key=len), []).append(text)
            else:
                found[text] = 1.5 * lowest
        for token, group in beginnings.items():
            rests = [text[len(token) :] for text in group]
            if len(rests) == 1 and len(token) >= min(_TELLING, len(group[0])):
                found[group[0]] = tokens[token]
                continue
            further = self._likelihoods(prompt + token, rests)
            for text, rest in zip(group, rests, strict=True):
                found[text] = tokens[token] + further[rest]
        return found

    # --- writing a call or an answer ------------------------------------------------------------

    def _arguments(self, case: Case, tool: ToolSchema) -> dict[str, Any]:
        """Return the arguments that the model would write for the tool; empty if cut off."""
        written: list[str] = []
        self._write(*_call_request(case, tool), written.append)
        try:
            return msgspec.json.decode("".join(written), type=dict[str, Any])
        except msgspec.DecodeError:  # cut off
            return {}

    def _call(self, case: Case, tool: ToolSchema) -> str:
        # `MessageAssembler` creates the id, as for all providers that send none.
        self._emit_call({"name": tool.name})
        finish = self._write(
            *_call_request(case, tool), lambda text: self._emit_call({"arguments": text})
        )
        return "length" if finish == "length" else "tool_calls"

    def _answer(self, case: Case) -> str:
        prompt = answer_prompt(case.system, case.earlier, case.turn)
        if case.answer_schema is not None:
            longest = min(case.cap or _LONGEST_ARGUMENTS, _LONGEST_ARGUMENTS)
            settings = _json_settings(case.answer_schema, longest, case.temperature)
            return self._write(prompt, settings, self._emit_text)
        steps = case.turn.steps
        result = quoted(steps[-1].result) if steps else ""
        line, longest = r" ?[^ \n][^\n]*", _LONGEST_TEXT
        if 0 < len(result) <= _SHORT_RESULT:
            longest += len(result.encode(errors="replace"))
            openings = "|".join([_literal(opening) for opening in OPENINGS])
            line = rf" ({openings})?{_literal(result)}[.!]?"
        settings = {
            "grammar": _GRAMMAR.format(rf"/{line}\n/"),
            "stop": ["\n"],
            "max_tokens": case.cap or longest,
            "temperature": case.temperature,
        }
        return self._write(prompt, settings, self._emit_text)

    def _emit_text(self, text: str) -> None:
        self._emit({"choices": [{"index": 0, "delta": {"content": text}}]})

    def _emit_call(self, function: dict[str, Any]) -> None:
        call = {"index": 0, "function": function}
        self._emit({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})

    # --- the engine -----------------------------------------------------------------------------

    def _write(
        self,
        prompt: str,
        settings: Mapping[str, Any],
        emit: Callable[[str], None],
    ) -> str:
        """Let the model continue a text. Returns the finish reason."""
        finish, has_begun = "stop", False

        def on_choice(choice: _Choice) -> None:
            nonlocal finish, has_begun
            text = choice.text if has_begun else choice.text.lstrip()
            if text:
                has_begun = True
                emit(text)
            finish = choice.finish_reason or finish

        self._complete({"prompt": prompt, **settings}, on_choice)
        return finish

    def _next_tokens(self, prompt: str) -> dict[str, float]:
        """The likeliest next tokens after a text, with their log probabilities."""
        found: dict[str, float] = {}

        def on_choice(choice: _Choice) -> None:
            if choice.logprobs is not None:
                for token in choice.logprobs.content[0].top_logprobs:
                    found.setdefault(token.token, token.logprob)

        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": _TOKENS}
        self._complete(body, on_choice)
        return found

    def _complete(self, body: dict[str, Any], on_choice: Callable[[_Choice], None]) -> None:
        failure: list[Exception] = []

        def take(data: bytes) -> bool:
            if not self._is_wanted():
                return True
            try:
                event = _EVENTS.decode(data)
                if event.error is not None:
                    raise ProviderFailure(failure_in_stream(event.error))
                if event.usage is not None:
                    self._usage = event.usage
                if event.prompt_progress is not None:
                    self._emit({})  # a keep-alive while the prompt is processed
                for choice in event.choices:
                    on_choice(choice)
            except Exception as error:  # must not propagate through llama.cpp
                failure.append(error)
                return True
            return False

        # Progress events while a prompt is processed are also points where the call can be stopped.
        asked = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
        self._engine.complete({**asked, **body}, take)
        if failure:
            raise failure[0]
        if not self._is_wanted():
            raise _Stopped


def _call_request(case: Case, tool: ToolSchema) -> tuple[str, dict[str, Any]]:
    """Return the prompt for the arguments of a call, and settings that enforce the schema."""
    asked = with_facts(case.turn.question, [step.result for step in case.turn.steps])
    longest = min(case.cap or _LONGEST_ARGUMENTS, _LONGEST_ARGUMENTS)
    settings = _json_settings(tool.parameters, longest, case.temperature)
    return f"{call_prompt(case.tools, asked)} call {tool.name}", settings


def _json_settings(schema: Any, longest: int, temperature: float) -> dict[str, Any]:
    """Return settings that let the model write a space and JSON that matches the schema."""
    held_to = msgspec.json.encode({**held(schema), **_AS_SHOWN}).decode()
    return {
        "grammar": _GRAMMAR.format(f'" " json\njson: %json {held_to}'),
        "stop": ["\n"],  # occurs only if the grammar was rejected
        "max_tokens": longest,
        "temperature": temperature,
    }


def _used_up(case: Case) -> set[str]:
    """The words that earlier calls have used: their arguments, and their tools' names and
    descriptions, because those words selected the tool.
    """
    tools = {tool.name: tool for tool in case.tools}
    used: set[str] = set()
    for step in case.turn.steps:
        used.update(words_of(step.arguments))
        if tool := tools.get(step.name):
            used.update(words(f"{tool.name} {tool.description}"))
    return used


def _literal(text: str) -> str:
    """Escape the text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


# --- events of llama.cpp ------------------------------------------------------------------------


class _Token(Struct):
    token: str
    logprob: float


class _TopTokens(Struct):
    top_logprobs: list[_Token]


class _Logprobs(Struct):
    content: list[_TopTokens]


class _Choice(Struct):
    text: str = ""
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _PromptDetails(Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails = _PromptDetails()


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    prompt_progress: Any = None


_EVENTS = msgspec.json.Decoder(_Event)
