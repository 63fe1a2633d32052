"""The conversation of `benchmarks.context`: what is asked, answered, called and returned.

Made by code from a fixed seed, so that all frameworks have the same one, byte for byte. A user asks
20 times; each time the model takes 24 turns with tool calls and one for its answer. Sizes are those
of a coding agent at work: files of 1 to 10 KB, command outputs and searches of 0.5 to 6 KB, small
edits, some results of 20 KB, and some turns with two or three calls.

Needs nothing but the standard library: each framework runs in an environment of its own.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SEED = 2026
ASKS, TURNS = 20, 25
"""How often the user asks, and how many turns each takes."""

SYSTEM = " ".join(
    [
        "You are a coding agent in the repository of a billing service.",
        "Work in small steps: read before you edit, run the tests after each change, and say",
        "what you did.",
        "Prefer the tools to guesses. Keep to the style of the code around you.",
        "Never delete data, never rewrite history, and ask before you change a public interface.",
        *[
            f"Rule {number}: {rule}"
            for number, rule in enumerate(
                [
                    "amounts are integers in minor units; no floating point in money.",
                    "every write to the ledger is idempotent, and carries the key of its request.",
                    "times are UTC, with a zone, to the millisecond.",
                    "a migration can be undone, and runs while the service is up.",
                    "logs have no names, addresses or card numbers.",
                    "public errors have a code, a text and a link; internal ones a trace id.",
                    "tests use the real database in a container; nothing is patched.",
                    "a function that blocks is not called from the event loop.",
                    "new settings have a default, a check and a line in the manual.",
                    "commits have one idea each, with their tests.",
                ],
                start=1,
            )
        ],
    ]
)

TASK = "TASK-7c41d0"
PINNED = ("PIN-52ae91", "PIN-0b77f3", "PIN-e9d3c8")


@dataclass(frozen=True)
class Fact:
    """Something said once that matters later: its code, and a sentence with it."""

    code: str
    sentence: str
    where: str
    """In what: a request of the user, an answer, or the beginning or middle of a result."""
    ask: int
    """In the how-manieth request of the user, from 0."""


FACTS = (
    Fact("FACT-1a6f20", "the deadline of the migration is the 14th of March", "user", 2),
    Fact("FACT-9be045", "invoices of the tenant Nordwind stay on version 1", "user", 2),
    Fact("FACT-c3310e", "we agreed on idempotency keys of 26 characters", "answer", 1),
    Fact("FACT-04d9aa", "we rejected a second ledger table, as it doubles the locks", "answer", 1),
    Fact("FACT-e77b12", "the staging server listens on port 7443", "result", 0),
    Fact("FACT-5f08c6", "the retry queue is called billing.retry.v2", "result", 1),
    Fact("FACT-b2946d", "test_rounding_of_refunds fails since commit 4be1c", "deep", 1),
    Fact("FACT-81ecf5", "the table ledger_entry has 41,207,733 rows", "deep", 2),
    Fact("FACT-d65037", "discounts are computed before taxes, not after", "user", 9),
    Fact("FACT-3ec8b9", "the nightly job holds the lock for 340 seconds", "deep", 10),
)
"""Half of them come before the first tenth of the conversation has passed."""


@dataclass(frozen=True)
class Call:
    """A tool call of the model."""

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.name} {json.dumps(self.arguments, sort_keys=True)}"


@dataclass(frozen=True)
class Turn:
    """What the model says once; no calls in the last turn of an ask."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Ask:
    """What the user says, and the turns that follow."""

    text: str
    turns: tuple[Turn, ...]


class Script:
    """The whole conversation."""

    def __init__(self, asks: int = ASKS, turns: int = TURNS, seed: int = SEED) -> None:
        self._random = random.Random(seed)
        self._results: dict[str, str] = {}
        self._calls = 0
        self.asks = [self._ask(number, turns, asks) for number in range(asks)]

    @cached_property
    def turns(self) -> list[Turn]:
        """All turns in their order."""
        return [turn for ask in self.asks for turn in ask.turns]

    def result(self, name: str, **arguments: Any) -> str:
        """What a tool returns for these arguments, which occur once in the conversation."""
        return self._results[Call("", name, arguments).key]

    # --- what is said -------------------------------------------------------------------------

    def _ask(self, number: int, turns: int, asks: int) -> Ask:
        places = {"result": turns // 4, "deep": turns // 2}
        told = {places[f.where]: f for f in FACTS if f.ask == number and f.where in places}
        working = [self._turn(told.get(turn)) for turn in range(turns - 1)]
        answer = Turn(" ".join([self._prose(900), *self._facts("answer", number)]))
        return Ask(self._question(number, asks), (*working, answer))

    def _question(self, number: int, asks: int) -> str:
        if number == 0:
            opening = (
                f"{TASK}: move the billing service from version 1 of the ledger to version 2, one "
                "module at a time, without an hour of downtime. The old tables stay readable until "
                "all tenants are moved. When everything is done, write the notes of the release."
            )
        elif number == 1:
            rules = [
                "nothing under legacy/ is edited",
                "no migration runs on a Friday",
                "the schema of the public API stays as it is",
            ]
            lines = [f"{code}: {rule}." for code, rule in zip(PINNED, rules, strict=True)]
            opening = "Keep to these three rules, whatever happens later. " + " ".join(lines)
        elif number == asks - 1:
            opening = "All modules are moved. Check what I asked for, and write the notes."
        else:
            opening = f"Step {number}: now the module {self._path()}."
        return " ".join([opening, *self._facts("user", number), self._prose(350)])

    def _facts(self, where: str, ask: int) -> list[str]:
        return [f"{f.code}: {f.sentence}." for f in FACTS if (f.where, f.ask) == (where, ask)]

    def _turn(self, fact: Fact | None) -> Turn:
        chance = self._random
        count = 1 if fact or chance.random() < 0.85 else chance.choice((2, 3))
        return Turn(
            self._prose(chance.randint(60, 240)), tuple(self._call(fact) for _ in range(count))
        )

    def _call(self, fact: Fact | None) -> Call:
        chance = self._random
        self._calls += 1
        kinds = ("read_file", "run_command", "search", "edit_file")
        kind = chance.choices(kinds, (45, 25, 15, 15))[0]
        if fact is not None:
            kind = "read_file" if fact.where == "result" else "run_command"
        size = chance.randint(1_000, 10_000)
        arguments: dict[str, Any] = {"path": self._path(), "offset": self._calls, "limit": 400}
        if kind == "run_command":
            size = chance.randint(400, 6_000)
            arguments = {"command": f"make test ONLY={self._path()} SEED={self._calls}"}
        elif kind == "search":
            size = chance.randint(500, 3_000)
            arguments = {"pattern": f"{self._word()}_{self._calls}", "path": "src"}
        elif kind == "edit_file":
            old, new = (self._code(chance.randint(200, 800)) for _ in range(2))
            arguments = {"path": self._path(), "old": old, "new": f"{new}\n# {self._calls}"}
            size = 60
        if kind in ("read_file", "run_command") and (chance.random() < 0.05 or _is_deep(fact)):
            size = 20_000
        call = Call(f"call_{self._calls:04}", kind, arguments)
        self._results[call.key] = self._returned(size, fact)
        return call

    def _returned(self, size: int, fact: Fact | None) -> str:
        text = self._code(size)
        if fact is None:
            return text
        place = text.find("\n", size // 2) if fact.where == "deep" else text.find("\n")
        return f"{text[:place]}\n# {fact.code}: {fact.sentence}.{text[place:]}"

    # --- text ---------------------------------------------------------------------------------

    def _word(self) -> str:
        return self._random.choice(_WORDS)

    def _path(self) -> str:
        return f"src/{self._word()}/{self._word()}_{self._word()}.py"

    def _prose(self, size: int) -> str:
        words: list[str] = []
        left = size
        while left > 0:
            words.append(self._word())
            left -= len(words[-1]) + 1
        return " ".join(words).capitalize() + "."

    def _code(self, size: int) -> str:
        lines: list[str] = []
        left = size
        while left > 0:
            name, value, source = self._word(), self._random.randint(0, 9_999), self._word()
            lines.append(f"    {name}.{self._word()}_{value} = {source}({value}, {self._word()!r})")
            left -= len(lines[-1]) + 1
        return "\n".join(lines)


def _is_deep(fact: Fact | None) -> bool:
    return fact is not None and fact.where == "deep"


_WORDS: list[str] = re.findall(
    r"\w+",
    """
account amount audit balance batch billing branch buffer cache charge check client close code
commit config cost credit currency customer cycle debit default delay deploy discount draft due
entry error event export fee field filter flag gateway group guard handle hash header index
input invoice item job journal key ledger level limit line lock log merge meter method migrate
model month note number offset order output owner page parse patch payment period plan pool port
price proof query queue rate record refund region report request reserve result retry role round
route row rule scale schema scope search session settle shard sign source split stage state
status step stock store stream subject sum switch table task tax tenant term test token total
trace transfer trial update usage user value vendor version void
    """,
)
