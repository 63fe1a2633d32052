"""`make bench-context`: a conversation of 500 turns, and what becomes of its context.

The same script (`benchmarks.context_script`) is run with nothing, with budgets and with compaction,
here and in the frameworks whose summaries are compared. All send their requests to one scripted
provider (`benchmarks.context_provider`) on this machine, which counts. The tables go to
docs/benchmarks/context.md, and some columns of them to README.md. Nothing is timed, and every
figure is the same in each run.

    python -m benchmarks.context [--ours] [--only PART ...] [--no-write]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from typing import Any

from msgspec import Struct, field

from benchmarks.context_clark import Logged, converse, is_pinned
from benchmarks.context_provider import Provider, Seen, serving
from benchmarks.context_script import ASKS, FACTS, PINNED, TASK, TURNS, Script
from benchmarks.frameworks import FRAMEWORKS, ROOT, Framework
from benchmarks.report import README, filled
from clark_agent import Plugin, Usage
from clark_agent.plugins import Compaction, TokenBudget
from clark_agent.prices import Price, price_of

PAGE = ROOT / "docs" / "benchmarks" / "context.md"
BEGIN, END = "<!-- results: written by make bench-context -->", "<!-- end of results -->"
SUMMARY = ("<!-- context: written by make bench-context -->", "<!-- end of context -->")
WINDOW = 200_000
TRIGGER, TARGET = 0.75, 0.2
"""At which share of the window everyone begins to compact, and what is then left: the defaults of
`Compaction`.
"""
SMALL = 0.1
"""What is left where 20 messages are kept, about."""
MODELS = {"Claude Sonnet 4.5": "claude-sonnet-4-5", "GPT-5.1": "gpt-5.1"}
"""The first has a price for what is written to the cache, the second reads it in blocks."""


def _known(name: str) -> tuple[str, ...]:
    return next(each.requirements for each in FRAMEWORKS if each.name == name)


PYDANTIC_AI = Framework(
    "pydantic-ai-context",
    "benchmarks.peers.pydantic_ai_context",
    # The newest harness, and the version of Pydantic AI that it needs.
    ("pydantic-ai-harness==0.62.0", "pydantic-ai-slim[openai]==2.62.0"),
    "from pydantic_ai_harness import SummarizingCompaction",
)
LANGCHAIN = Framework(
    "langchain-context",
    "benchmarks.peers.langchain_context",
    (*_known("langchain"), "langchain-openai==1.7.3"),
    "from langchain.agents.middleware import SummarizationMiddleware",
)


class Subject(Struct, frozen=True, kw_only=True):
    """What is run: with plugins of ours, or in another framework with settings of its own."""

    title: str
    settings: str
    plugins: Callable[[], list[Plugin]] = list
    peer: Framework | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _budget() -> list[Plugin]:
    return [TokenBudget(WINDOW, trim_trigger=TRIGGER, trim_target=TARGET, pinned=is_pinned)]


def _compaction() -> list[Plugin]:
    return [Compaction(WINDOW, pinned=is_pinned)]


def _small_compaction() -> list[Plugin]:
    return [Compaction(WINDOW, target=SMALL, pinned=is_pinned)]


SUBJECTS = (
    Subject(title="nothing", settings="no plugin"),
    Subject(
        title="`TokenBudget`",
        settings=f"`TokenBudget({WINDOW:_}, trim_trigger={TRIGGER}, trim_target={TARGET}, "
        "pinned=…)`",
        plugins=_budget,
    ),
    Subject(
        title=f"`Compaction`, {SMALL:.0%} kept",
        settings=f"`Compaction({WINDOW:_}, target={SMALL}, pinned=…)`",
        plugins=_small_compaction,
    ),
    Subject(
        title=f"`Compaction`, {TARGET:.0%} kept",
        settings=f"`Compaction({WINDOW:_}, pinned=…)`",
        plugins=_compaction,
    ),
    Subject(
        title="pydantic-ai, 20 messages kept",
        settings=f"`SummarizingCompaction(max_fraction={TRIGGER}, context_window={WINDOW:_})`: "
        "by default 20 messages are kept, and 500 characters of each result are summarized",
        peer=PYDANTIC_AI,
        arguments={"settings": {"max_fraction": TRIGGER, "context_window": WINDOW}},
    ),
    Subject(
        title=f"pydantic-ai, {TARGET:.0%} kept, all summarized",
        settings=f"the same with `keep_tokens={round(WINDOW * TARGET):_}`, "
        "`tool_return_max_chars=None`",
        peer=PYDANTIC_AI,
        arguments={
            "settings": {
                "max_fraction": TRIGGER,
                "context_window": WINDOW,
                "keep_tokens": round(WINDOW * TARGET),
                "tool_return_max_chars": None,
            }
        },
    ),
    Subject(
        title="langchain, 20 messages kept",
        settings=f'`SummarizationMiddleware(model, trigger=("fraction", {TRIGGER}))`: by default '
        "20 messages are kept, and the newest 4,000 tokens of what is replaced are summarized",
        peer=LANGCHAIN,
        arguments={"window": WINDOW, "settings": {"trigger": ["fraction", TRIGGER]}},
    ),
    Subject(
        title=f"langchain, {TARGET:.0%} kept, all summarized",
        settings=f'the same with `keep=("fraction", {TARGET})`, `trim_tokens_to_summarize=None`',
        peer=LANGCHAIN,
        arguments={
            "window": WINDOW,
            "settings": {
                "trigger": ["fraction", TRIGGER],
                "keep": ["fraction", TARGET],
                "trim_tokens_to_summarize": None,
            },
        },
    ),
)


class Figures(Struct, frozen=True, kw_only=True):
    """What was counted for a subject."""

    requests: int
    summaries: int
    tokens: int
    cached: float
    cached_blocks: float
    costs: tuple[float, ...]
    largest: int
    over: int
    compactions: int
    kept: float
    kept_aside: float
    has_task: bool
    pinned: int
    facts: int
    logged: Logged | None = None


def figures(
    seen: Sequence[Seen],
    prices: Iterable[Price],
    window: int = WINDOW,
    logged: Logged | None = None,
) -> Figures:
    """Add up the requests of a conversation."""
    turns = [each for each in seen if not each.is_summary]
    grown = [each for each in turns if not each.is_compacted]
    tokens = sum([each.tokens for each in seen])
    codes = frozenset.intersection(*[each.codes for each in turns if each.codes is not None])
    return Figures(
        requests=len(seen),
        summaries=len(seen) - len(turns),
        tokens=tokens,
        cached=sum([each.cached for each in seen]) / tokens,
        cached_blocks=sum([each.cached_blocks for each in seen]) / tokens,
        costs=tuple([cost(seen, price) for price in prices]),
        largest=max([each.tokens for each in seen]),
        over=sum([each.tokens > window for each in seen]),
        compactions=len(turns) - len(grown),
        kept=_kept(turns),
        kept_aside=_kept(grown),
        has_task=TASK in codes,
        pinned=len(codes.intersection(PINNED)),
        facts=len(codes.intersection([fact.code for fact in FACTS])),
        logged=logged,
    )


def _kept(turns: Iterable[Seen]) -> float:
    pairs = [(each.kept, each.possible) for each in turns]
    possible = sum([possible for _, possible in pairs])
    return sum([kept for kept, _ in pairs]) / possible if possible else 1.0


def cost(seen: Iterable[Seen], price: Price) -> float:
    """In dollars. Where writing to the cache has a price, all that was not read is written."""
    total = 0.0
    for each in seen:
        if price.cache_write is None:
            usage = Usage(
                input_tokens=each.tokens - each.cached_blocks,
                cache_read_input_tokens=each.cached_blocks,
                output_tokens=each.output,
            )
        else:
            usage = Usage(
                cache_creation_input_tokens=each.tokens - each.cached,
                cache_read_input_tokens=each.cached,
                output_tokens=each.output,
            )
        total += price.of(usage)
    return total


def _peers(subjects: Iterable[Subject]) -> list[Framework]:
    found: dict[str, Framework] = {}
    for subject in subjects:
        if subject.peer is not None:
            found[subject.peer.name] = subject.peer
    return list(found.values())


# --- running ----------------------------------------------------------------------------------


async def measured(
    subject: Subject, prices: Sequence[Price], asks: int = ASKS, turns: int = TURNS
) -> Figures:
    """Have the conversation once."""
    provider = Provider(Script(asks, turns))
    logged = None
    if subject.peer is None:
        logged = await converse(provider, subject.plugins())
    else:
        await _peer(subject.peer, provider, {"asks": asks, "turns": turns, **subject.arguments})
    account = provider.account
    if account.turn != asks * turns:
        raise SystemExit(f"{subject.title}: the conversation ended after turn {account.turn}")
    return figures(account.seen, prices, logged=logged)


async def _peer(peer: Framework, provider: Provider, arguments: Mapping[str, Any]) -> None:
    async with serving(provider) as url:
        process = await asyncio.create_subprocess_exec(
            *(str(peer.python), "-m", peer.module, json.dumps({"url": url, **arguments})),
            cwd=ROOT,
            env={**peer.environment, "PYTHONPATH": os.fspath(ROOT)},
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
    if process.returncode:
        raise SystemExit(f"{peer.name}: {errors.decode().strip()}")


# --- the page ---------------------------------------------------------------------------------


def tables(found: Mapping[str, Figures], prices: Mapping[str, Price]) -> str:
    """What is sent, and what stays."""
    head = ["", "requests", "of these for a summary", "tokens sent", "from the cache", "by blocks"]
    sent = [[*head, *prices, "largest request", "over the window"]]
    head = ["", "compactions", "beginning kept", "compactions aside", "by the log"]
    stays = [[*head, "the task", "pinned rules", "facts"]]
    for title, each in found.items():
        sent.append([title, *_sent(each)])
        stays.append([title, *_stays(each)])
    return f"### What is sent\n\n{_table(sent)}\n### What stays\n\n{_table(stays)}"


def _sent(each: Figures) -> list[str]:
    return [
        f"{each.requests:,}",
        f"{each.summaries:,}",
        f"{each.tokens / 1e6:.1f} M",
        f"{each.cached:.1%}",
        f"{each.cached_blocks:.1%}",
        *[f"${amount:.2f}" for amount in each.costs],
        f"{each.largest:,}",
        f"{each.over:,}",
    ]


def _stays(each: Figures) -> list[str]:
    return [
        f"{each.compactions}",
        f"{each.kept:.1%}",
        f"{each.kept_aside:.1%}",
        "" if each.logged is None else f"{each.logged.kept:.1%}, {each.logged.kept_aside:.1%}",
        "yes" if each.has_task else "no",
        f"{each.pinned} of {len(PINNED)}",
        f"{each.facts} of {len(FACTS)}",
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    marks = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], marks, *rows[1:]))


def shown(text: str) -> str:
    """The tables for a terminal, in columns."""
    lines: list[str] = []
    block: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if block:
            rows = [block[0], *block[2:]]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for first, *rest in rows:
                cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
                lines.append("  ".join([first.ljust(widths[0]), *cells]))
            block = []
        lines.append(line)
    return "\n".join(lines)


def generated(found: Mapping[str, Figures], prices: Mapping[str, Price]) -> str:
    """What stands between the two marks of the page."""
    versions = "; ".join(", ".join(peer.requirements) for peer in _peers(SUBJECTS))
    lists = "\n".join(
        f"| {name} | {p.input} | {p.cache_read} | {p.cache_write or '–'} | {p.output} |"
        for name, p in prices.items()
    )
    settings = "\n".join(f"| {subject.title} | {subject.settings} |" for subject in SUBJECTS)
    return f"""{tables(found, prices)}
### Settings

| | |
|---|---|
{settings}

List prices of genai-prices {version("genai-prices")}, in dollars for a million tokens:

| | input | cached read | cache write | output |
|---|---:|---:|---:|---:|
{lists}

Run on {date.today()} with {versions}.
"""


def summary(page: str) -> str:
    """What the README shows of the tables of the page."""
    columns: dict[str, tuple[str, ...]] = {}
    for section in page.split("\n### ")[1:3]:  # what is sent, and what stays
        lines = [line for line in section.splitlines() if line.startswith("|")]
        head, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
        columns |= dict(zip(head, zip(*rows, strict=True), strict=True))
    model = next(iter(MODELS))
    shown = {
        f"a conversation of {ASKS * TURNS} turns": "",
        f"cost ({model})": model,
        f"requests over {WINDOW:,} tokens": "over the window",
        **{name: name for name in ("from the cache", "the task", "pinned rules", "facts")},
    }
    chosen = zip(*[columns[name] for name in shown.values()], strict=True)
    return _table([list(shown), *map(list, chosen)])


def write(text: str) -> None:
    """Put the tables into the page, and their summary into the README."""
    page = filled(PAGE.read_text(encoding="utf-8"), text, BEGIN, END)
    readme = ROOT / README
    shown = filled(readme.read_text(encoding="utf-8"), summary(page), *SUMMARY)
    PAGE.write_text(page, encoding="utf-8")
    readme.write_text(shown, encoding="utf-8")


async def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ours", action="store_true", help="without other frameworks")
    parser.add_argument("--only", nargs="+", help="parts of titles; writes nothing")
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args(arguments)
    chosen = [
        subject
        for subject in SUBJECTS
        if not (given.ours and subject.peer is not None)
        and (not given.only or any(part in subject.title for part in given.only))
    ]
    for peer in _peers(chosen):
        print(f"installing {peer.name} ...", file=sys.stderr, flush=True)
        peer.install()
    prices = {name: price for name, model in MODELS.items() if (price := price_of(model))}
    found: dict[str, Figures] = {}
    for subject in chosen:
        print(f"{subject.title} ...", file=sys.stderr, flush=True)
        found[subject.title] = await measured(subject, list(prices.values()))
    print(shown(tables(found, prices)))
    if len(chosen) == len(SUBJECTS) and not given.no_write:
        write(generated(found, prices))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
