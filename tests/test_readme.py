"""The Python code in README.md and docs/ runs as it is printed there.

The ```python blocks of a file run in order, as one script that may use `await` at the top
level. A block opened with ```python no-run is compiled but not run. A traceback names the
Markdown file and the line in it.
"""

import ast
import asyncio
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

FENCE = re.compile(
    r"^(?P<indent>[ ]*)```python\b(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    path: Path
    line: int
    """Where the code starts in its file, counted from 1."""
    source: str
    run: bool

    def compile(self) -> CodeType:
        # The empty lines make the code's line numbers those of the Markdown file.
        code: CodeType = compile(
            "\n" * (self.line - 1) + self.source,
            self.path,
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )
        return code


def python_blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            path=path,
            line=text.count("\n", 0, match.start("body")) + 1,
            source=re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE),
            run="no-run" not in match["info"].split(),
        )
        for match in FENCE.finditer(text)
    ]


def run_blocks(blocks: list[Block], namespace: dict[str, object]) -> None:
    # A loop that is only running inside a block with `await`, so that other blocks may
    # call asyncio.run.
    with asyncio.Runner() as runner:
        for block in blocks:
            code = block.compile()
            if not block.run:
                continue
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, namespace))
            else:
                exec(code, namespace)


FILES = [path for path in (README, *sorted(ROOT.glob("docs/**/*.md"))) if python_blocks(path)]


def test_readme_shows_code() -> None:
    assert any(block.run for block in python_blocks(README))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module of its own, since annotations are resolved through sys.modules.
    script = ModuleType("__main__")
    script.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.chdir(tmp_path)
    run_blocks(python_blocks(path), vars(script))


def test_blocks_are_found_where_they_are(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n"
        "- item\n\n  ```python no-run\n  await x\n  ```\n"
        "```pythonic\nno\n```\n"
        "```text\nno\n```\n"
    )
    found = [(block.line, block.source, block.run) for block in python_blocks(page)]
    assert found == [(2, "x = 1\n", True), (7, "await x\n", False)]


def test_failure_points_into_the_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nimport asyncio\n\nawait asyncio.sleep(0)\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(python_blocks(page), {})
    last = caught.traceback[-1]
    assert (Path(last.path), last.lineno + 1) == (page, 7)
