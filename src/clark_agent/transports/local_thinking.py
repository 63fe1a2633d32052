"""How a very small model is led to a call or an answer.

Left alone, a model of a few hundred million weights makes up tools. So it is not left alone: what
it finds likely is asked for, step by step, and the steps are put together here.

    relevance   how likely the name of a tool is behind the question, less what it is behind none,
                and more for each word that question and tool share
    call?       how much likelier than an answer a call is, and the relevance of the best tool
    arguments   written by the model, held to the tool's schema by a grammar
    put off     a call whose arguments nobody has said (see local_arguments) waits while another
                can be made; if none can, its texts are copied from the question
    go on?      behind a result there is another call only if it takes something from the result,
                and either was put off or takes from the question what no call has taken yet
    answer      one line, which holds the last result if that is short

The weights and limits were chosen on questions of our own. How far this gets is measured on others,
see ``make eval-local``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from clark_agent.stream import ToolSchema
from clark_agent.transports.http.failures import failure_told
from clark_agent.transports.http.response import ProviderFailure
from clark_agent.transports.local_arguments import (
    copying,
    held,
    is_said,
    with_choices_said,
    without_unsaid,
    words,
    words_of,
)
from clark_agent.transports.local_engine import Engine
from clark_agent.transports.local_prompts import (
    COMMON_WORDS,
    OPENINGS,
    Turn,
    answer_prompt,
    call_prompt,
    quoted,
    shared_words,
    with_facts,
)
from clark_agent.types import Usage

__all__ = ["Case", "Stopped", "Thinker"]

# How much of what a name is worth without any question is taken off, what a shared word is worth,
# and how much the best tool's relevance counts when it is decided whether to call one at all.
_WITHOUT_QUESTION = 0.5
_SHARED_WORD = 2.5
_RELEVANCE = 0.4
_THRESHOLD = 0.0
_NO_QUESTIONS = ("N/A", "...", "Do something.")
# So many of the likeliest next tokens are looked at, and so many of the best tools are tried: more
# behind a result than before one.
_TOKENS = 2000
_TRIED = 3
_TRIED_BEHIND = 6
# Of a name that is the only one to begin so, the rest follows by itself.
_TELLING = 4
_SHORT_RESULT = 100
_LONGEST_TEXT = 64
_LONGEST_ARGUMENTS = 512
_GRAMMAR = "%llguidance {{}}\nstart: {}"
# Blanks where the examples have them, or it might write nothing else. A keyword that is not known
# is left out: a grammar that is refused holds nothing at all, and nobody says so.
_AS_SHOWN = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": True,
    }
}


class Stopped(Exception):
    """Nobody wants to know any more."""


class Case(Struct, frozen=True):
    """What a call to the model is about."""

    system: str
    earlier: tuple[Turn, ...]
    turn: Turn
    tools: tuple[ToolSchema, ...]
    must_call: bool = False
    cap: int | None = None
    temperature: float = 0.0


class Relevance(Struct, frozen=True):
    """What the model makes of a question."""

    margin: float
    """How much likelier a call is than an answer, in nats."""
    tools: Mapping[str, float]

    @property
    def best_first(self) -> list[str]:
        """The names of the tools."""
        return sorted(self.tools, key=self.tools.__getitem__, reverse=True)


class Thinker:
    """Leads a model through one call. Blocking: for a thread of its own.

    ``tell`` gets the events of the answer as the model writes it, in the form of Chat Completions;
    ``is_wanted`` is asked at each token.
    """

    def __init__(
        self, engine: Engine, tell: Callable[[Any], None], is_wanted: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._tell = tell
        self._is_wanted = is_wanted
        self._usage = Usage()
        self._written = 0

    def think(self, case: Case) -> None:
        """Tell a call or an answer. Raises `ProviderFailure` and `Stopped`."""
        chosen = self._choose(case) if case.tools else None
        finish = self._answer(case) if chosen is None else self._call(case, chosen)
        used = self._usage
        # What it wrote to find out is no part of the answer, and does not count against its cap.
        read = used.input_tokens + used.cache_read_input_tokens + used.output_tokens
        self._tell(
            {
                "choices": [{"index": 0, "delta": {}, "finish_reason": finish}],
                "usage": {
                    "prompt_tokens": read - self._written,
                    "completion_tokens": self._written,
                    "prompt_tokens_details": {"cached_tokens": used.cache_read_input_tokens},
                },
            }
        )

    # --- whether, and what ----------------------------------------------------------------------

    def _choose(self, case: Case) -> ToolSchema | None:
        """The tool to call next; None: it is time to answer."""
        turn, tools = case.turn, {tool.name: tool for tool in case.tools}
        found = self._relevance(case.tools, turn.question)
        best = found.best_first
        if not turn.steps:
            worth = found.margin + _RELEVANCE * found.tools[best[0]]
            if worth < _THRESHOLD and not case.must_call:
                return None
            return self._first_possible(case, [tools[name] for name in best[:_TRIED]])
        if turn.steps[-1].is_error and not case.must_call:
            return None  # it would make arguments of the error
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
        """The tool, if it makes something of the last result."""
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
        seen: dict[str, Relevance] = self._engine.memory
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
        """How likely each text is to come next, token by token, in nats."""
        tokens = self._next_tokens(prompt)
        lowest = min(tokens.values(), default=0.0)  # half a character is not told
        beginnings: dict[str, list[str]] = {}
        found: dict[str, float] = {}
        for text in texts:
            # A blank alone is a token too, but no way to begin a word.
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

    # --- what the model writes ------------------------------------------------------------------

    def _arguments(self, case: Case, tool: ToolSchema) -> dict[str, Any]:
        """What it would call the tool with."""
        written: list[str] = []
        self._write(*_call_request(case, tool), written.append)
        try:
            return msgspec.json.decode("".join(written), type=dict[str, Any])
        except msgspec.DecodeError:  # cut off
            return {}

    def _call(self, case: Case, tool: ToolSchema) -> str:
        # Its id is made where an answer is put together, as for all who send none.
        self._tell_call({"name": tool.name})
        finish = self._write(
            *_call_request(case, tool), lambda text: self._tell_call({"arguments": text})
        )
        return "length" if finish == "length" else "tool_calls"

    def _answer(self, case: Case) -> str:
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
        prompt = answer_prompt(case.system, case.earlier, case.turn)
        return self._write(prompt, settings, self._tell_text)

    def _tell_text(self, text: str) -> None:
        self._tell({"choices": [{"index": 0, "delta": {"content": text}}]})

    def _tell_call(self, function: dict[str, Any]) -> None:
        call = {"index": 0, "function": function}
        self._tell({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})

    # --- the engine -----------------------------------------------------------------------------

    def _write(
        self,
        prompt: str,
        settings: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> str:
        """Let the model go on with a text; returns why it ended."""
        finish, has_begun = "stop", False

        def hear(choice: _Choice) -> None:
            nonlocal finish, has_begun
            text = choice.text if has_begun else choice.text.lstrip()
            if text:
                has_begun = True
                tell(text)
            finish = choice.finish_reason or finish

        self._complete({"prompt": prompt, **settings}, hear)
        return finish

    def _next_tokens(self, prompt: str) -> dict[str, float]:
        """The likeliest tokens behind a text, and how likely each is."""
        found: dict[str, float] = {}

        def hear(choice: _Choice) -> None:
            if choice.logprobs is not None:
                for token in choice.logprobs.content[0].top_logprobs:
                    found.setdefault(token.token, token.logprob)

        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": _TOKENS}
        self._complete(body, hear)
        return found

    def _complete(self, body: dict[str, Any], hear: Callable[[_Choice], None]) -> None:
        failure: list[Exception] = []

        def take(data: bytes) -> bool:
            if not self._is_wanted():
                return True
            try:
                event = _EVENTS.decode(data)
                if event.error is not None:
                    raise ProviderFailure(failure_told(event.error))
                if event.usage is not None:
                    self._usage += event.usage.counted
                    self._written = event.usage.completion_tokens
                if event.prompt_progress is not None:
                    self._tell({})  # a sign of life: it reads
                for choice in event.choices:
                    hear(choice)
            except Exception as error:  # it must not go through llama.cpp
                failure.append(error)
                return True
            return False

        # Signs of life while a prompt is read are also when a call can be stopped.
        asked = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
        self._engine.complete({**asked, **body}, take)
        if failure:
            raise failure[0]
        if not self._is_wanted():
            raise Stopped


def _call_request(case: Case, tool: ToolSchema) -> tuple[str, dict[str, Any]]:
    """What asks for the arguments of a call, and holds them to the schema."""
    asked = with_facts(case.turn.question, [step.result for step in case.turn.steps])
    schema = msgspec.json.encode({**held(tool.parameters), **_AS_SHOWN}).decode()
    settings = {
        "grammar": _GRAMMAR.format(f'" " arguments\narguments: %json {schema}'),
        "stop": ["\n"],  # there is none in it, unless the grammar was refused
        "max_tokens": min(case.cap or _LONGEST_ARGUMENTS, _LONGEST_ARGUMENTS),
        "temperature": case.temperature,
    }
    return f"{call_prompt(case.tools, asked)} call {tool.name}", settings


def _used_up(case: Case) -> set[str]:
    """The words that the calls so far have taken, and those of their tools: they said which."""
    tools = {tool.name: tool for tool in case.tools}
    used: set[str] = set()
    for step in case.turn.steps:
        used.update(words_of(step.arguments))
        if tool := tools.get(step.name):
            used.update(words(f"{tool.name} {tool.description}"))
    return used


def _literal(text: str) -> str:
    """The text as part of a regular expression between slashes."""
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

    @property
    def counted(self) -> Usage:
        cached = self.prompt_tokens_details.cached_tokens
        return Usage(
            self.prompt_tokens - cached, self.completion_tokens, cache_read_input_tokens=cached
        )


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    prompt_progress: Any = None


_EVENTS = msgspec.json.Decoder(_Event)
