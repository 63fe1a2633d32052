"""The layers of the package are those that its docstring lists, and there are no import cycles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import clark_agent

ROOT = Path(clark_agent.__file__).parent


def layers() -> dict[str, int]:
    """Each module or package right below the root, with the number of its layer."""
    assert clark_agent.__doc__ is not None
    listed = re.findall(r"^- (.+?):", clark_agent.__doc__, re.MULTILINE)
    return {name: n for n, line in enumerate(listed) for name in re.findall(r"``(\w+)``", line)}


def module_of(path: Path) -> str:
    parts = ("clark_agent", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in ROOT.rglob("*.py")}


def imports(module: str) -> Iterator[str]:
    """The modules of the package that are loaded with this one; not those for type checkers."""
    for node in ast.parse(MODULES[module].read_text()).body:
        match node:
            case ast.ImportFrom(module=str(source), names=names):
                for alias in names:
                    below = f"{source}.{alias.name}"
                    if below in MODULES:
                        yield below
                    elif source in MODULES:
                        yield source
            case ast.Import(names=names):
                yield from [alias.name for alias in names if alias.name in MODULES]
            case _:
                pass


def top(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_module_has_its_layer() -> None:
    names = {top(module) for module in MODULES} - {""}
    assert {name for name in names if not name.startswith("_")} == layers().keys()


def test_no_layer_knows_a_later_one() -> None:
    order = layers()
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imports(module)
        if top(module) in order and order.get(top(other), -1) > order[top(module)]
    ]
    assert wrong == []


def test_there_are_no_import_cycles() -> None:
    graph = {module: set(imports(module)) - {"clark_agent", module} for module in MODULES}
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> None:
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for other in sorted(graph[module]):
            visit(other)
        path.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)
