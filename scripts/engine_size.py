"""How large the engine is, and how far one tool call travels through it.

    python scripts/engine_size.py            the numbers of this checkout
    python scripts/engine_size.py --json     the same for a program

For the engine: its lines, its largest class by methods and by attributes, and its longest function.
For one tool call: the distinct functions that run between the model's answer and the next request,
the modules that they are in, and the calls that cross from one module into another; without a run
log and with one. Functions of other packages do not count, and neither do comprehensions.
"""

from __future__ import annotations

import ast
import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clark_agent
from clark_agent import AgentContext, LoopConfig, ToolResult, run, tool
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.testing import ScriptedStream, call

PACKAGE = Path(clark_agent.__file__).parent
ENGINE = PACKAGE / "engine"


class Journey:
    """Counts calls while it is installed as the profiler."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.hops = 0

    def __call__(self, frame: Any, event: str, _: object) -> None:
        """Take note of a call."""
        if event != "call" or not _is_ours(frame):
            return
        code = frame.f_code
        if (code.co_filename, code.co_qualname) in self.functions and _is_resumed(frame):
            return
        self.functions.add((code.co_filename, code.co_qualname))
        caller = frame.f_back
        while caller is not None and not _is_ours(caller):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.hops += 1

    @property
    def modules(self) -> int:
        """How many modules the functions are in."""
        return len({file for file, _ in self.functions})

    def numbers(self) -> dict[str, int]:
        """All that was counted."""
        return {"functions": len(self.functions), "modules": self.modules, "hops": self.hops}


def _is_ours(frame: Any) -> bool:
    code = frame.f_code
    return code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<")


def _is_resumed(frame: Any) -> bool:
    """Whether a coroutine goes on, rather than begins."""
    return bool(frame.f_lasti > 2)


def one_tool_call(*, is_logged: bool) -> dict[str, int]:
    """The journey of one call, from the answer that asks for it to the next request."""
    journey = Journey()

    class Model(ScriptedStream):
        def __call__(self, request: Any, signal: Any) -> Any:
            sys.setprofile(None)
            events = super().__call__(request, signal)
            return events if self.requests else _then_count(events, journey)

    @tool
    async def look(path: str) -> ToolResult:
        """Look at a file."""
        return ToolResult.text(path)

    log = RunLog(MemoryStore()) if is_logged else None
    config = LoopConfig(stream=Model([call("look", path="a"), "Done."]), tools=[look], run_log=log)
    try:
        asyncio.run(run("Look.", AgentContext(), config))
    finally:
        sys.setprofile(None)
    return journey.numbers()


async def _then_count(events: Any, journey: Journey) -> Any:
    async for event in events:
        if type(event).__name__ == "Done":
            sys.setprofile(journey)
        yield event


def _files() -> list[Path]:
    if ENGINE.is_dir():
        return sorted(ENGINE.glob("*.py"))
    old = "cancel_scope emitter execution fallback gates grammar hooks loop pace preparation"
    return [PACKAGE / f"{name}.py" for name in (*old.split(), "run_state", "supervised")] + [
        PACKAGE / f"{name}.py" for name in ("tool_run", "turn")
    ]


def _nodes(kind: type[Any]) -> Iterator[tuple[Path, Any]]:
    for file in _files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kind):
                yield file, node


def _methods(node: ast.ClassDef) -> int:
    return sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)


def _attributes(node: ast.ClassDef) -> int:
    """Slots and annotated fields, and what is set on ``self``."""
    names: set[str] = set()
    for each in ast.walk(node):
        match each:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) if each in node.body:
                names.add(name)
            case _:
                pass
    return len(names)


def _lines(node: Any) -> int:
    return int(node.end_lineno - node.lineno + 1)


def size() -> dict[str, Any]:
    """The numbers about the code."""
    classes = [(file.stem, node) for file, node in _nodes(ast.ClassDef)]
    by_methods = max(classes, key=lambda each: _methods(each[1]))[1]
    by_attributes = max(classes, key=lambda each: _attributes(each[1]))[1]
    functions = [
        node for kind in (ast.FunctionDef, ast.AsyncFunctionDef) for _, node in _nodes(kind)
    ]
    longest = max(functions, key=_lines)
    return {
        "lines": sum(len(file.read_text().splitlines()) for file in _files()),
        "most methods": f"{by_methods.name}: {_methods(by_methods)}",
        "most attributes": f"{by_attributes.name}: {_attributes(by_attributes)}",
        "longest function": f"{longest.name}: {_lines(longest)} lines",
        "log is not None": sum(file.read_text().count("log is not None") for file in _files()),
    }


def main() -> None:
    numbers = {
        "engine": size(),
        "one tool call": one_tool_call(is_logged=False),
        "one tool call, logged": one_tool_call(is_logged=True),
    }
    if "--json" in sys.argv:
        print(json.dumps(numbers, indent=2))
        return
    for name, values in numbers.items():
        print(name)
        for key, value in values.items():
            print(f"  {key:18} {value}")


if __name__ == "__main__":
    main()
