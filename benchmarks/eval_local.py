"""How well the packaged model drives tools: `make eval-local`.

Every task of `benchmarks.local_tasks` is run by the real loop, with the real model and real tools.
What is counted, for each kind of task:

    tool        the tools that it called are those that were due, in that order
    arguments   and it called them with the right arguments
    answer      the final text says what the last tool found

The tasks were written apart from the prompt and are not used to improve it. With ``--write`` the
table goes into docs/benchmarks/local-model.md. At the end comes what the model still knows of a
conversation that was compacted (`benchmarks.local_memory`); ``--memory`` does that alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from benchmarks import local_memory
from benchmarks.local_tasks import TASKS, TOOLS, UNSEEN, Task, answers, arguments_match
from clark_agent import AgentContext, AssistantMessage, LoopConfig, RunResult, run
from clark_agent.transports import LocalModel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "local-model.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
MOST_TURNS = 5


class Outcome(Struct, frozen=True):
    task: Task
    called: tuple[str, ...]
    tool: bool
    arguments: bool
    answer: bool
    text: str
    seconds: float


async def tried(task: Task, model: LocalModel) -> Outcome:
    config = LoopConfig(
        stream=model, tools=[TOOLS[name] for name in task.tools], max_iterations=MOST_TURNS
    )
    began = time.perf_counter()
    result = await run(task.question, AgentContext(), config)
    seconds = time.perf_counter() - began
    calls = _calls(result)
    is_tool = [name for name, _ in calls] == [expected.name for expected in task.calls]
    fits = is_tool and all(
        arguments_match(expected, arguments)
        for expected, (_, arguments) in zip(task.calls, calls, strict=True)
    )
    shown = tuple([f"{name} {arguments}" for name, arguments in calls])
    is_right = answers(task, result.text)
    return Outcome(task, shown, is_tool, fits, is_right, result.text, seconds)


def _calls(result: RunResult) -> list[tuple[str, dict[str, object]]]:
    return [
        (call.name, call.arguments if isinstance(call.arguments, dict) else {})
        for message in result.messages
        if isinstance(message, AssistantMessage)
        for call in message.tool_calls
    ]


def table(outcomes: Sequence[Outcome]) -> str:
    unseen = [o for o in outcomes if UNSEEN & {call.name for call in o.task.calls}]
    rows = [
        ("one step", [o for o in outcomes if o.task.kind == "one"]),
        ("— of these, invented tools", [o for o in unseen if o.task.kind == "one"]),
        ("two steps", [o for o in outcomes if o.task.kind == "two"]),
        ("no tool needed", [o for o in outcomes if o.task.kind == "none"]),
        ("all", list(outcomes)),
    ]
    lines = ["| tasks | | right tool | right arguments | right answer | seconds |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, group in rows:
        if group:
            shares = [
                _share([getattr(o, what) for o in group])
                for what in ("tool", "arguments", "answer")
            ]
            average = sum([o.seconds for o in group]) / len(group)
            lines.append(f"| {name} | {len(group)} | {' | '.join(shares)} | {average:.1f} |")
    return "\n".join(lines)


def _share(hits: Sequence[bool]) -> str:
    return f"{sum(hits) / len(hits):.0%}"


def shown(outcome: Outcome) -> str:
    marks = "".join(["·" if ok else letter for letter, ok in _marks(outcome)])
    calls = "; ".join(outcome.called) or "no call"
    return f"{marks} {outcome.task.question}\n      {calls} → {outcome.text!r}"


def _marks(outcome: Outcome) -> Iterable[tuple[str, bool]]:
    return zip("TAF", (outcome.tool, outcome.arguments, outcome.answer), strict=True)


async def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    parser.add_argument("--first", type=int, default=len(TASKS), help="only so many tasks")
    parser.add_argument("--memory", action="store_true", help="only what it knows of old turns")
    parser.add_argument("--weights", help="a GGUF file, for another model than the packaged one")
    options = parser.parse_args(arguments)
    model = LocalModel(options.weights)
    if options.memory:
        await local_memory.report(model)
        return 0
    print("T: wrong tool, A: wrong arguments, F: wrong final answer", flush=True)
    outcomes: list[Outcome] = []
    for number, task in enumerate(TASKS[: options.first], start=1):
        outcomes.append(await tried(task, model))
        print(f"{number:3}/{len(TASKS)} {shown(outcomes[-1])}", flush=True)
    found = table(outcomes)
    print(f"\n{found}")
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}", encoding="utf-8")
        print(f"written into {PAGE.name}")
    await local_memory.report(model)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
