"""Few-shot prompts for a model that was not trained to chat.

A base model continues text. The prompt shows a few exchanges with a call or an answer, and then the
question; the model's continuation is its call or its answer. Some examples are fixed, with tools
that exist only in the prompt. One example for each registered tool is generated from its
description and its schema.

Everything here is a pure function of the tools and the conversation.
`clark_agent.transports.local.packaged.guidance` decides which prompt to use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from math import inf
from sys import maxsize
from typing import Any

import msgspec
from msgspec import Struct

from clark_agent.stream import ToolSchema

__all__ = [
    "OPENINGS",
    "Step",
    "Turn",
    "answer_prompt",
    "call_prompt",
    "quoted",
    "shared_words",
    "with_facts",
]


class Step(Struct, frozen=True):
    """A call and its result."""

    name: str
    arguments: Mapping[str, Any]
    result: str
    is_error: bool = False


class Turn(Struct, frozen=True):
    """A question, the calls that followed, and the answer."""

    question: str
    steps: tuple[Step, ...] = ()
    answer: str = ""


# --- fixed examples -----------------------------------------------------------------------------

_EXAMPLE_TOOLS = (
    "book_table(restaurant: text, people: number): Book a table in a restaurant.",
    "population(country: text): Look up how many people live in a country.",
    'door(name: text, state: "open" | "closed"): Open or close a door.',
    "length(word: text): Count the letters of a word.",
    "add(sum: text): Add numbers.",
)
_EXAMPLES = (
    (
        "Book a table for 4 people at Luigi's.",
        'call book_table {"restaurant": "Luigi\'s", "people": 4}',
    ),
    ("How many people live in Kenya?", 'call population {"country": "Kenya"}'),
    ("Hi!", "say Hello! How can I help you?"),
    ("Please close the front door.", 'call door {"name": "front", "state": "closed"}'),
    ("How many letters are there in banana?", 'call length {"word": "banana"}'),
    ("What is the capital of Italy?", "say The capital of Italy is Rome."),
    ("The box holds 20. What is that and 5 more?", 'call add {"sum": "20+5"}'),
)
_TALK = (
    Turn("Hi!", answer="Hello! How can I help you?"),
    Turn("Who painted the Mona Lisa?", answer="Leonardo da Vinci painted the Mona Lisa."),
    Turn("What is the capital of Italy?", answer="The capital of Italy is Rome."),
    Turn("Thank you!", answer="You are welcome!"),
)
_REPORTS = (
    Turn(
        "How many people live in Kenya?",
        (Step("population", {"country": "Kenya"}, "53 million"),),
        "The answer is 53 million.",
    ),
    Turn(
        "Please close the front door.",
        (Step("door", {"name": "front", "state": "closed"}, "The front door is closed."),),
        "The front door is closed.",
    ),
    Turn(
        "Which rooms are free?",
        (Step("free_rooms", {}, "Room 12, Room 14"),),
        "The answer is Room 12, Room 14.",
    ),
    Turn(
        "What does the letter say?",
        (Step("open_letter", {}, "Come home soon."),),
        "It says: Come home soon.",
    ),
)
OPENINGS = ("The answer is ", "It says: ")
"""How an answer that reports a result may start, before the result itself."""


# --- prompts ------------------------------------------------------------------------------------


def call_prompt(tools: Sequence[ToolSchema], question: str) -> str:
    """Return the prompt for a decision. The model continues with ``call``, a tool and arguments, or
    with ``say``.
    """
    return f"{_call_head(tuple(tools))}user: {quoted(question)}\nassistant:"


# Cached: it is slow to build, and every step needs it again.
@lru_cache(maxsize=32)
def _call_head_of(key: str) -> str:
    tools = msgspec.json.decode(key, type=list[ToolSchema])
    lines = ["Tools:", *[_signature(tool) for tool in tools], *_EXAMPLE_TOOLS]
    own = [_example(tool) for tool in tools]
    for pair in zip_longest(_EXAMPLES, own):
        for asked, done in filter(None, pair):
            lines += ["", f"user: {asked}", f"assistant: {done}"]
    return "\n".join([*lines, "", ""])


def _call_head(tools: tuple[ToolSchema, ...]) -> str:
    return _call_head_of(msgspec.json.encode(tools).decode())


def answer_prompt(system: str, earlier: Iterable[Turn], turn: Turn) -> str:
    """Return the prompt for an answer, with the conversation so far and the last result."""
    shown = _REPORTS if turn.steps else _TALK
    turns = [_written(each) for each in (*shown, *earlier)]
    head = [system.strip()] if system.strip() else []
    return "\n\n".join([*head, *turns, _written(turn)])


def with_facts(question: str, facts: Iterable[str], *, longest: int = 600) -> str:
    """Return the question followed by the tool results so far."""
    told = [f"It says: {quoted(fact)[:longest].rstrip('. ')}." for fact in facts]
    return " ".join([quoted(question), *told])


def quoted(text: str) -> str:
    """Return the text on one line. A line break would end it, and a NUL would end the prompt."""
    return " ".join(text.replace("\0", " ").split())


def _written(turn: Turn) -> str:
    results = [f"result: {quoted(step.result)}" for step in turn.steps[-1:]]
    answer = f"assistant: {quoted(turn.answer)}" if turn.answer else "assistant:"
    return "\n".join([f"user: {quoted(turn.question)}", *results, answer])


# --- tool schemas -------------------------------------------------------------------------------


def _signature(tool: ToolSchema) -> str:
    parameters = [f"{quoted(name)}: {_type(schema)}" for name, schema in _parameters(tool).items()]
    return f"{tool.name}({', '.join(parameters)}): {_summary(tool)}"


def _example(tool: ToolSchema) -> tuple[str, str]:
    """Return a request in the words of the tool's description, and the matching call."""
    arguments = _object(tool.parameters)
    shown = ", ".join([_shown(value) for value in arguments.values()])
    asked = _summary(tool).rstrip(".")
    written = msgspec.json.encode(arguments).decode()
    return (f"{asked}: {shown}" if shown else asked), f"call {tool.name} {_spaced(written)}"


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the required properties, and more if ``minProperties`` requires them."""
    known, wanted = _named(schema), schema.get("required") or ()
    more = schema.get("additionalProperties")
    asked = {name: part for name, part in known.items() if name in wanted}
    spare = {name: known.get(name, more) for name in (*known, *_NAMES) if name not in asked}
    missing = max(0, schema.get("minProperties", 0) - len(asked))
    found: dict[str, Any] = {}
    for name, part in (*asked.items(), *list(spare.items())[:missing]):
        values = _values(name, part)
        # Two equal values would suggest to the model that all are equal.
        found[name] = next((value for value in values if value not in found.values()), values[0])
    return found


def _spaced(text: str) -> str:
    """Add spaces after colons and commas, as in most JSON that the model was trained on."""
    return re.sub(r'("(?:[^"\\]|\\.)*")|([:,])', lambda m: m[1] or f"{m[2]} ", text)


def _parameters(tool: ToolSchema) -> dict[str, Any]:
    return _named(tool.parameters)


def _named(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _summary(tool: ToolSchema) -> str:
    """The first sentence of the description, or the words of the name."""
    first = re.split(r"(?<=[.!?])\s|\n\s*\n", tool.description.strip(), maxsplit=1)[0]
    return quoted(first) or tool.name.replace("_", " ").replace("-", " ")


def _plain(schema: Any) -> dict[str, Any]:
    """The schema, merged with its first alternative (``anyOf``, ``oneOf``) that is not null."""
    if not isinstance(schema, dict):
        return {}
    for other in schema.get("anyOf") or schema.get("oneOf") or ():
        if isinstance(other, dict) and other.get("type") != "null":
            return {**schema, **other}
    return schema


_TYPES = {"string": "text", "integer": "number", "number": "number", "boolean": "true or false"}


def _type(schema: Any) -> str:
    known = _plain(schema)
    if choices := known.get("enum"):
        return " | ".join([msgspec.json.encode(choice).decode() for choice in choices])
    return _TYPES.get(str(known.get("type")), "list" if known.get("type") == "array" else "object")


# Example values for common parameter names.
_VALUES = {
    "path": "report.txt", "file": "report.txt", "filename": "report.txt", "folder": "work",
    "directory": "work", "city": "Lima", "country": "Peru", "language": "Spanish",
    "name": "Anna", "person": "Anna", "user": "Anna", "email": "anna@example.com",
    "to": "anna@example.com", "url": "https://example.com", "date": "2024-05-17",
    "time": "10:30", "text": "a red bird", "word": "garden", "query": "gardening",
    "pattern": "garden", "expression": "6*7", "command": "ls", "content": "a red bird",
}  # fmt: skip


_FORMATS = {
    "date": "2024-05-17",
    "date-time": "2024-05-17T10:30:00Z",
    "time": "10:30:00Z",
    "duration": "PT5M",
    "email": "anna@example.com",
    "uri": "https://example.com",
    "uuid": "0d4a1185-6c1f-4e2a-9b57-31c0e5f2a1bc",
}
_NAMES = ("Alpha", "Beta", "Gamma", "Delta")


def _values(name: str, schema: Any) -> list[Any]:
    """Return example values for an argument."""
    known = _plain(schema)
    for given in (known.get("examples"), known.get("enum")):
        if isinstance(given, list) and given:
            return given
    match known.get("type"):
        case "integer":
            return _within(known, [5, 2, 9])
        case "number":
            return _within(known, [12, 7, 30])
        case "boolean":
            return [True]
        case "array":
            count = max(known.get("minItems", 0), min(1, known.get("maxItems", 1)))
            return [[value] * count for value in _values(name, known.get("items"))]
        case "object":
            return [_object(known)]
        case "null":
            return [None]
        case _ if (form := known.get("format")) in _FORMATS:
            return [_FORMATS[form]]
        case _:
            usual = _VALUES.get(name) or _VALUES.get(re.split(r"[_-]", name)[-1])
            return _long_enough(known, [usual, *_NAMES] if usual else list(_NAMES))


def _within(schema: Mapping[str, Any], usual: list[Any]) -> list[Any]:
    least, most = schema.get("minimum", -inf), schema.get("maximum", inf)
    fitting = [value for value in usual if least <= value <= most]
    return fitting or [least if least > usual[0] else most]


def _long_enough(schema: Mapping[str, Any], usual: list[str]) -> list[str]:
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", maxsize)
    fitting = [text for text in usual if shortest <= len(text) <= longest]
    return fitting or [(usual[0] * (shortest // len(usual[0]) + 1))[:longest]]


def _shown(value: Any) -> str:
    return quoted(value) if isinstance(value, str) else msgspec.json.encode(value).decode()


# --- words that a question and a tool share -----------------------------------------------------

COMMON_WORDS = frozenset(
    [
        "a",
        "an",
        "the",
        "of",
        "to",
        "in",
        "into",
        "on",
        "for",
        "from",
        "is",
        "are",
        "am",
        "was",
        "be",
        "me",
        "my",
        "i",
        "you",
        "your",
        "please",
        "what",
        "which",
        "who",
        "how",
        "much",
        "many",
        "do",
        "does",
        "did",
        "have",
        "has",
        "it",
        "its",
        "that",
        "this",
        "there",
        "and",
        "or",
        "by",
        "with",
        "as",
        "at",
        "can",
        "could",
        "would",
        "will",
        "s",
        "tell",
        "give",
        "show",
    ]
)
_ENDINGS = ("ing", "ies", "es", "ed", "s", "e")


def shared_words(question: str, tool: ToolSchema) -> int:
    """How many words of the question occur in the tool's names, descriptions and choices."""
    parts = [tool.name.replace("_", " "), tool.description]
    for name, schema in _parameters(tool).items():
        known = _plain(schema)
        parts += [name.replace("_", " "), str(known.get("description", ""))]
        parts += [str(choice) for choice in known.get("enum") or ()]
    return len(_stems(question) & _stems(" ".join(parts)))


def _stems(text: str) -> set[str]:
    words = set(re.findall(r"[a-z]{2,}", text.lower())) - COMMON_WORDS
    return {_stem(word) for word in words}


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if len(word) > len(ending) + 2 and word.endswith(ending):
            return word.removesuffix(ending)
    return word
