"""The operations of a workload are counted exactly, and compared with what is pinned; no pin is
raised without a reason; the pages show the figures as they were recorded, and ours are not older
than the code; and a long conversation is counted as its script and its requests are.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks import compare as comparison
from benchmarks import operations
from benchmarks.context import (
    PAGE,
    SUBJECTS,
    SUMMARY,
    TARGET,
    TRIGGER,
    Figures,
    Subject,
    cost,
    figures,
    measured,
    shown,
    summary,
    tables,
)
from benchmarks.context_clark import is_pinned
from benchmarks.context_provider import Account, Provider, Seen
from benchmarks.context_script import FACTS, PINNED, TASK, Script
from benchmarks.frameworks import FRAMEWORKS
from benchmarks.operations import compare, judge, read_pins
from benchmarks.report import BEGIN, END, README, files, filled, write
from benchmarks.report import tables as result_tables
from benchmarks.results import BARE, OURS, Cell, Installed, Machine, Results, Run, read, stale
from clark_agent.plugins import Compaction, TokenBudget
from clark_agent.prices import Price

ROOT = Path(__file__).resolve().parent.parent


def test_every_version_has_the_same_workloads_pinned() -> None:
    first, *others = [list(counts) for counts in read_pins().values()]
    assert first
    assert others == [first] * len(others)


@pytest.mark.parametrize(
    ("pinned", "now", "verdict"),
    [
        (1000, 1000, ("", True)),
        (1000, 1020, ("", True)),
        (1000, 1021, ("too high", False)),
        (1000, 980, ("", True)),
        (1000, 979, ("lower: pin it", True)),
        (0, 0, ("", True)),
        (0, 1, ("too high", False)),
        (None, 1, ("not pinned", False)),
        (1, None, ("not counted", False)),
    ],
)
def test_a_count_beside_its_pin(
    pinned: float | None, now: float | None, verdict: tuple[str, bool]
) -> None:
    assert judge(pinned, now) == verdict


def test_the_table() -> None:
    table, passed = compare({"turn": 1000, "nil": 0, "gone": 1}, {"turn": 1100, "nil": 0})
    assert [line.split() for line in table.splitlines()] == [
        ["pinned", "now", "change"],
        ["turn", "1,000.0", "1,100.0", "+10.0%", "too", "high"],
        ["nil", "0.0", "0.0"],
        ["gone", "1.0", "not", "counted"],
    ]
    assert not passed
    assert compare({"turn": 1000}, {"turn": 990})[1]


COUNTING = """
import asyncio
from benchmarks.operations import counted, per_unit

def steps(size, *, squared=False):
    namespace = {}
    exec(compile("async def work(n):\\n for _ in range(n): abs(1)", "made anew", "exec"), namespace)
    return lambda: namespace["work"](size * size if squared else size)

async def main():
    _, few, again, more = [await counted(steps(size)) for size in (1, 100, 100, 200)]
    assert few == again, "counts differ"
    assert more - few > 400, "not every bytecode is counted"
    assert await per_unit("steps", 100, steps) == (more - few) / 100
    try:
        await per_unit("squares", 10, lambda size: steps(size, squared=True))
    except AssertionError as error:
        print(error)

asyncio.run(main())
"""


@pytest.mark.slow
def test_operations_are_counted_exactly_and_growth_is_refused() -> None:
    """In another process: this one may be traced for its coverage."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTING], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("squares grows: ")


# --- pins and their reasons -------------------------------------------------------------------


def test_every_pin_is_recorded_and_every_raised_one_has_its_reason() -> None:
    assert operations.unrecorded(read_pins(), operations.read_record()) == []


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with pins of two workloads for a Python, and their record."""
    monkeypatch.setattr(operations, "PINS", tmp_path / "operations.json")
    monkeypatch.setattr(operations, "RECORD", tmp_path / "operations.md")
    monkeypatch.setattr(operations, "VERSION", "3.11")
    operations.RECORD.write_text("| date | Python | workload | before | after | reason |\n")
    assert operations.pin({"W1 turn": 2000.04, "W2 delta": 100}, "")
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_a_raised_pin_without_a_reason_is_refused_and_nothing_is_written(
    pins: Path, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(pins)
    capsys.readouterr()
    assert not operations.pin({"W1 turn": 2000.1, "W2 delta": 90}, reason)
    assert contents(pins) == before
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  W1 turn: 2000.0 → 2000.1",
        'make bench-pin REASON="what the operations buy"',
    ]


def test_a_pin_is_raised_with_its_reason_and_lowered_without(pins: Path) -> None:
    assert operations.pin({"W1 turn": 2100, "W2 delta": 100}, "results are\nchecked | twice")
    assert operations.pin({"W1 turn": 1900, "W3 call": 5}, "")
    changes = [tuple(change)[1:] for change in operations.read_record()]
    assert changes == [
        ("3.11", "W1 turn", None, 2000.0, ""),
        ("3.11", "W2 delta", None, 100.0, ""),
        ("3.11", "W1 turn", 2000.0, 2100.0, "results are checked / twice"),
        ("3.11", "W1 turn", 2100.0, 1900.0, ""),
        ("3.11", "W2 delta", 100.0, None, ""),
        ("3.11", "W3 call", None, 5.0, ""),
    ]
    assert read_pins() == {"3.11": {"W1 turn": 1900, "W3 call": 5}}
    assert operations.unrecorded(read_pins(), operations.read_record()) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        (
            "operations.json",
            "2000.0",
            "2100.0",
            "Python 3.11, W1 turn: 2100.0 in operations.json, 2000.0 in operations.md",
        ),
        (
            "operations.json",
            '"W1 turn": 2000.0,',
            "",
            "Python 3.11, W1 turn: None in operations.json, 2000.0 in operations.md",
        ),
        (
            "operations.json",
            '"W1',
            '"W0": 1, "W1',
            "Python 3.11, W0: 1.0 in operations.json, None in operations.md",
        ),
        (
            "operations.md",
            "2000.0",
            "1500.0 |  |\n| 2026-11-20 | 3.11 | W1 turn | 1500.0 | 2000.0",
            "no reason: | 2026-11-20 | 3.11 | W1 turn | 1500.0 | 2000.0 |  |",
        ),
    ],
)
def test_a_pin_that_is_edited_by_hand_fails_before_anything_is_counted(
    pins: Path, file: str, old: str, new: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pins / file
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    capsys.readouterr()
    assert not operations.check()
    assert capsys.readouterr().out.splitlines()[:-1] == [found]


def test_a_pin_that_was_raised_by_hand_is_not_taken_for_what_it_was(pins: Path) -> None:
    path = pins / "operations.json"
    path.write_text(path.read_text(encoding="utf-8").replace("2000.0", "2100.0"), encoding="utf-8")
    assert not operations.pin({"W1 turn": 2100, "W2 delta": 100}, "")


# --- the figures and their pages ----------------------------------------------------------------


def test_our_rows_are_not_older_than_the_code() -> None:
    ours = read().ours
    assert ours is not None
    found = stale(ours.operations, read_pins().get(ours.machine.version, {}))
    assert not found, (
        f"our rows of {ours.date} were measured with other operations (Python "
        f"{ours.machine.version}); measure them again with: make bench ONLY={OURS}\n"
        + "\n".join(found)
    )


@pytest.mark.parametrize(
    ("measured", "pinned", "found"),
    [
        ({"turn": 1000}, {"turn": 1100}, []),
        ({"turn": 1000}, {"turn": 900}, []),
        ({"turn": 1000}, {"turn": 1101}, ["turn: 1,000.0 when measured, 1,101.0 now"]),
        ({"turn": 1000}, {"turn": 899}, ["turn: 1,000.0 when measured, 899.0 now"]),
        ({"turn": 1000}, {"turn": 1000, "call": 1}, ["call: not measured"]),
        ({"turn": 1000, "call": 1}, {"turn": 1000}, ["call: no longer pinned"]),
        ({}, {"turn": 1000}, ["turn: not measured"]),
        ({"turn": 1000}, {}, ["turn: no longer pinned"]),
    ],
)
def test_rows_are_stale_with_a_tenth_more_or_less_or_a_workload_on_one_side(
    measured: dict[str, float], pinned: dict[str, float], found: list[str]
) -> None:
    assert stale(measured, pinned) == found


def test_the_pages_and_plots_show_the_recorded_figures() -> None:
    differ = [p.name for p, text in files(read()).items() if p.read_text(encoding="utf-8") != text]
    assert not differ, "write them with: python -m benchmarks.report"


def test_the_readme_shows_the_recorded_long_conversations() -> None:
    text = (ROOT / README).read_text(encoding="utf-8")
    shown = filled(text, summary(PAGE.read_text(encoding="utf-8")), *SUMMARY)
    assert text == shown, "write it with: make bench-context"


def test_prose_of_the_readme_about_what_is_measured_has_no_number() -> None:
    measured = re.split(r"^## ", (ROOT / README).read_text(encoding="utf-8"), flags=re.MULTILINE)
    [section] = [each for each in measured if each.startswith("Measured\n")]
    for begin, end in ((BEGIN, END), SUMMARY):
        before, rest = section.split(begin)
        section = before + rest.split(end)[1]
    assert re.findall(r"[^\n]*\d[^\n]*", section) == []


def test_a_figure_edited_by_hand_is_noticed_and_written_as_it_was_recorded(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs" / "benchmarks", tmp_path / "docs" / "benchmarks")
    shutil.copy(ROOT / README, tmp_path)
    write(read(), tmp_path)
    right = (tmp_path / README).read_text(encoding="utf-8")
    before, rest = right.split(BEGIN)
    (tmp_path / README).write_text(before + BEGIN + rest.replace("| bare", "| 1 bare", 1), "utf-8")
    assert (tmp_path / README).read_text(encoding="utf-8") != right
    texts = files(read(), tmp_path)
    differ = [path.name for path, text in texts.items() if path.read_text("utf-8") != text]
    assert differ == ["README.md"]
    write(read(), tmp_path)
    assert (tmp_path / README).read_text(encoding="utf-8") == right


def a_run(date: str, walls: dict[str, float], **more: Any) -> Run:
    """A run whose turns take so many microseconds in each framework."""
    workloads = {"w1": (50, 200), "w2": (10_000,), "w4": (1_000,), "w6": (20,)}
    return Run(
        date=date,
        quick=False,
        rounds=3,
        limit=60,
        machine=Machine("a processor", 2, "Linux", "3.11.7"),
        frameworks={name: Installed("", 1, 1, wall) for name, wall in walls.items()},
        cells=[
            Cell(name, workload, size, wall=size * wall * 1e-6, cpu=1, memory=1000, rounds=3)
            for workload, sizes in workloads.items()
            for size in sizes
            for name, wall in walls.items()
        ],
        **more,
    )


def test_renewed_rows_take_the_place_of_older_ones_and_all_keep_their_bare_loop() -> None:
    old = a_run("2026-01-01", {BARE: 10, OURS: 40, "pi": 70}, operations={"turn": 1}, wire={"a": 1})
    new = a_run("2026-02-02", {BARE: 8, OURS: 24}, operations={"turn": 2})
    results = Results([old]).renewed(new)
    assert [[*run.frameworks] for run in results.runs] == [[BARE, "pi"], [BARE, OURS]]
    assert [run.date for run in results.runs] == ["2026-01-01", "2026-02-02"]
    assert {cell.framework for cell in results.runs[0].cells} == {BARE, "pi"}
    assert (results.runs[0].operations, results.runs[0].wire) == ({}, {})
    assert results.ours == results.runs[1] == new
    assert results.renewed(new) == results
    everything = a_run("2026-03-03", {BARE: 8, OURS: 24, "pi": 60})
    assert results.renewed(everything) == Results([everything])


def test_a_page_of_two_runs_says_which_rows_are_of_one_run() -> None:
    old = a_run("2026-01-01", {BARE: 10, OURS: 40, "pi": 70})
    results = Results([old]).renewed(a_run("2026-02-02", {BARE: 8, OURS: 24}))
    page = result_tables(results).splitlines()
    machine = "Python 3.11.7 on Linux, 2 cores (a processor), the best of 3 rounds"
    how = f"{machine}, at most 60 s for one measurement"
    assert page[:7] == [
        "The rows are of 2 runs of `make bench`. Only rows of one run compare directly.",
        "",
        f"- A: {BARE}, {OURS}; 2026-02-02, {how}",
        f"- B: {BARE}, pi; 2026-01-01, {how}",
        "",
        "The bare loop was measured in each run: in B it took 1.25 to 1.25 times as long as in A.",
        "",
    ]
    turns = page.index("| µs a turn | run | 50 turns | 200 turns | growth |")
    assert page[turns + 2 : turns + 6] == [
        f"| {BARE} | A | 8.00 | 8.00 | 1.00 |",
        f"| **{OURS}** | A | 24.0 | 24.0 | 1.00 |",
        f"| {BARE} | B | 10.0 | 10.0 | 1.00 |",
        "| pi | B | 70.0 | 70.0 | 1.00 |",
    ]
    assert "| W1, a turn at 200 turns | 3 × | 3.00 |  |" in page
    rows = [line.count("|") for line in page if "**clark" in line or "Rust" in line]
    assert rows[0] == rows[1]


def test_a_page_of_one_run_has_no_letters() -> None:
    page = result_tables(Results([a_run("2026-01-01", {BARE: 10, OURS: 40})]))
    assert page.startswith("All rows are of one run of `make bench`: 2026-01-01, Python 3.11.7 on")
    assert "| µs a turn | 50 turns | 200 turns | growth |" in page
    assert "| W1, a turn at 200 turns | 3 × | 4.00 | missed |" in page


def test_only_names_frameworks_that_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        comparison.arguments(["--only", "clark"])
    said = capsys.readouterr().err
    assert "'clark'" in said
    assert all(each.name in said for each in FRAMEWORKS if each.name != BARE)
    assert comparison.arguments(["--only", OURS, "pi"]).only == [OURS, "pi"]


def test_only_measures_the_bare_loop_too_and_keeps_the_other_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measured(frameworks: list[Any], *_: object) -> Run:
        asked.extend(each.name for each in frameworks)
        return a_run("2027-01-01", {BARE: 8, OURS: 24})

    monkeypatch.setattr(comparison, "run", measured)
    comparison.main(["--only", OURS, "--print"])
    assert asked == [BARE, OURS]
    page = capsys.readouterr().out
    others = {name for run in read().runs for name in run.frameworks} - {BARE, OURS}
    assert others
    assert all(f"| {name} " in page for name in others)
    assert "| 24.0 |" in page


# --- a long conversation ----------------------------------------------------------------------


def test_the_script_is_the_same_each_time_and_says_each_fact_once() -> None:
    script, again = Script(), Script()
    assert [ask.text for ask in script.asks] == [ask.text for ask in again.asks]
    assert script.turns == again.turns
    calls = [call for turn in script.turns for call in turn.calls]
    results = [script.result(call.name, **call.arguments) for call in calls]
    assert results == [again.result(call.name, **call.arguments) for call in calls]
    assert len(script.turns) == 500
    assert len({call.key for call in calls}) == len({call.id for call in calls}) == len(calls)
    assert sum(len(result) > 19_000 for result in results) > 10
    everything = "\n".join(
        [*results, *[ask.text for ask in script.asks], *[turn.text for turn in script.turns]]
    )
    codes = [TASK, *PINNED, *[fact.code for fact in FACTS]]
    assert [everything.count(code) for code in codes] == [1] * len(codes)


def said(*texts: str, tools: int = 0) -> dict[str, Any]:
    """A request with messages of 4,000 tokens and more each."""
    messages = [{"role": "user", "content": text * 16_000} for text in texts]
    return {"messages": messages, "tools": [{"name": f"tool{n}"} for n in range(tools)]}


def test_what_a_request_shares_with_an_earlier_one() -> None:
    account = Account(Script(2, 3))
    for body, is_summary in [
        (said("a", "b"), False),
        (said("a", "b", "c"), False),
        (said("a", "b", "x"), True),
        (said("a", "y"), False),
        (said("a", "b", "x"), False),
        (said("a", "b", "x", tools=1), False),
    ]:
        account.add(body, {"content": "ok"}, is_summary=is_summary)
    one = account.seen[0].tokens // 2
    assert 4_000 < one < 4_020
    messages = [round(seen.cached / one) for seen in account.seen]
    assert messages == [0, 2, 2, 1, 3, 0]  # other tools come before all messages
    assert [seen.cached_blocks % 1_024 for seen in account.seen] == [0] * 6
    assert [seen.cached_blocks // 1_024 for seen in account.seen] == [0, 7, 7, 3, 11, 0]
    assert [round(seen.possible / one) for seen in account.seen] == [0, 2, 0, 3, 2, 3]
    assert [round(seen.kept / one) for seen in account.seen] == [0, 2, 0, 1, 1, 0]
    assert [seen.is_compacted for seen in account.seen] == [False] * 3 + [True, False, True]
    assert account.turn == 5


def test_what_a_conversation_costs() -> None:
    seen = Seen(is_summary=False, tokens=10_000, cached=9_000, cached_blocks=8_192, output=100)
    write = Price(input=3, cache_read=0.3, cache_write=3.75, output=15)
    assert cost([seen] * 1000, write) == pytest.approx(1_000 * 3.75 / 1e3 + 2.7 + 1.5)
    blocks = Price(input=1, cache_read=0.1, output=10)
    assert cost([seen] * 1000, blocks) == pytest.approx(1.808 + 0.8192 + 1.0)


def test_figures_leave_compactions_aside_and_want_each_code_in_every_last_request() -> None:
    plain = Seen(is_summary=False, tokens=10, cached=0, cached_blocks=0, output=1)
    turns = [
        plain,
        replace(plain, possible=10, kept=8),
        replace(plain, is_summary=True, tokens=40),
        replace(plain, possible=10, kept=2, is_compacted=True, codes=frozenset([TASK, PINNED[0]])),
        replace(plain, possible=10, kept=10, codes=frozenset([TASK, FACTS[0].code])),
    ]
    found = figures(turns, [], window=30)
    assert (found.requests, found.summaries, found.compactions, found.over) == (5, 1, 1, 1)
    assert (found.kept, found.kept_aside) == (20 / 30, 18 / 20)
    assert (found.has_task, found.pinned, found.facts) == (True, 0, 0)


def test_a_summary_repeats_the_facts_that_it_is_shown_but_not_what_is_to_be_pinned() -> None:
    provider = Provider(Script(3, 4))
    shown_facts = [f"# {fact.code}: {fact.sentence}." for fact in FACTS[:2]]
    text = "\n".join([f"{TASK}: move it. {PINNED[0]}: never.", *shown_facts, *shown_facts])
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}
    message, seen = provider.answer(body)
    assert seen.is_summary
    assert provider.account.turn == 0
    assert [message["content"].count(fact.code) for fact in FACTS[:3]] == [1, 1, 0]
    assert TASK not in message["content"]
    assert PINNED[0] not in message["content"]
    assert 6_000 <= len(message["content"]) < 6_100
    again, _ = provider.answer(body)
    assert again != message


@pytest.mark.slow
async def test_a_short_conversation_is_counted() -> None:
    price = [Price(input=1, output=1)]
    plain = await measured(SUBJECTS[0], price, 4, 6)
    assert (plain.requests, plain.summaries, plain.compactions) == (24, 0, 0)
    assert (plain.kept, plain.has_task, plain.pinned, plain.facts) == (1, True, 3, 8)
    assert plain.logged is not None
    assert plain.logged.kept == 1
    assert 0.8 < plain.cached_blocks < plain.cached < 1
    window = plain.largest // 2
    small = Subject(
        title="small", settings="", plugins=lambda: [TokenBudget(window, pinned=is_pinned)]
    )
    trimmed = await measured(small, price, 4, 6)
    assert trimmed.compactions > 0
    assert trimmed.largest <= window < trimmed.tokens < plain.tokens
    assert (trimmed.has_task, trimmed.pinned) == (True, 3)
    assert trimmed.facts < plain.facts
    assert trimmed.costs < plain.costs
    found: dict[str, Figures] = {"nothing": plain, "small": trimmed}
    lines = shown(tables(found, {"a model": price[0]})).splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("nothing", "small"))] == [
        *("nothing", "small"),
        *("nothing", "small"),
    ]


def test_others_are_set_as_compaction_is_by_default() -> None:
    assert (Compaction().trigger, Compaction().target) == (TRIGGER, TARGET)


@pytest.mark.slow
async def test_compaction_keeps_the_task_the_rules_and_all_facts() -> None:
    window = 12_000
    subject = Subject(
        title="compaction", settings="", plugins=lambda: [Compaction(window, pinned=is_pinned)]
    )
    found = await measured(subject, [], 4, 12)
    assert found.requests == 48 + found.summaries
    assert found.compactions >= 4
    assert found.summaries >= found.compactions
    assert (found.has_task, found.pinned, found.facts) == (True, 3, 8)
    assert found.kept_aside == 1
    assert found.logged is not None
    assert found.logged.kept_aside == 1
