"""The Python code in README.md and docs/ runs as it is printed there.

The ```python blocks of a file run in order, as one script that may use `await` at the top
level. Of a block opened with ```python no-run only the imports run; the rest is compiled. With
``needs=celery,nats`` the imports of these packages are left out. A traceback names the Markdown
file and the line in it.

Pages that need a database run in tests/durable/test_guide.py.
"""

import ast
import asyncio
import inspect
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from tests.cases import all_cases

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

FENCE = re.compile(
    r"^(?P<indent>[ ]*)```python\b(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)

SERVED = {ROOT / "docs/guide/beyond-one-machine.md"}

OPENING = re.compile(r"^[ ]*(?:`{3,}|~{3,})[ ]*(?P<language>[^\s`]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    path: Path
    line: int
    """Where the code starts in its file, counted from 1."""
    source: str
    run: bool
    needs: frozenset[str] = frozenset()
    """The packages whose imports are left out, if it is not to be run."""

    def compile(self) -> CodeType:
        """All of the code, or if it is not to be run its imports."""
        # The empty lines make the code's line numbers those of the Markdown file.
        tree = ast.parse("\n" * (self.line - 1) + self.source, self.path)
        code = self._compile(tree)
        if self.run:
            return code
        tree.body = [node for node in tree.body if self._is_to_be_imported(node)]
        return self._compile(tree)

    def _is_to_be_imported(self, node: ast.stmt) -> bool:
        match node:
            case ast.Import(names=names):
                modules = {name.name for name in names}
            case ast.ImportFrom(module=str(module)):
                modules = {module}
            case _:
                return False
        return self.needs.isdisjoint({module.partition(".")[0] for module in modules})

    def _compile(self, tree: ast.Module) -> CodeType:
        code: CodeType = compile(
            tree, self.path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
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
            needs=frozenset(
                name
                for word in match["info"].split()
                if word.startswith("needs=")
                for name in word.removeprefix("needs=").split(",")
            ),
        )
        for match in FENCE.finditer(text)
    ]


def run_blocks(blocks: list[Block], namespace: dict[str, object]) -> None:
    # A loop that is only running inside a block with `await`, so that other blocks may
    # call asyncio.run.
    with asyncio.Runner() as runner:
        for block in blocks:
            code = block.compile()
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, namespace))
            else:
                exec(code, namespace)


PAGES = (README, *sorted(ROOT.glob("docs/**/*.md")))
FILES = [path for path in PAGES if python_blocks(path) and path not in SERVED]


def test_readme_shows_code() -> None:
    assert any(block.run for block in python_blocks(README))


def test_no_code_hides_behind_another_name() -> None:
    """A fence that says py or Python, or nothing at all, would not be run."""
    with all_cases() as case:
        for path in PAGES:
            with case(path.relative_to(ROOT).as_posix()):
                languages = Counter(OPENING.findall(path.read_text(encoding="utf-8")))
                assert languages.keys() <= {"", "python", "sh", "sql", "text", "yaml"}
                assert languages["python"] == len(python_blocks(path))
                assert languages[""] * 2 == languages.total(), "a fence without a language"


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(path, tmp_path, monkeypatch)


def run_page(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_imports_of_a_block_that_is_not_run_are_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python no-run\nfrom clark_agent import nothing_of_that_name\n1 / 0\n```\n")
    with pytest.raises(ImportError, match="nothing_of_that_name"):
        run_blocks(python_blocks(page), {})


def test_a_block_can_need_packages_that_are_not_installed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python no-run needs=not_there,nor_this\n"
        "import not_there\nfrom nor_this.part import x\nimport json\n```\n"
    )
    namespace: dict[str, object] = {}
    run_blocks(python_blocks(page), namespace)
    assert "json" in namespace


def test_failure_points_into_the_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nimport asyncio\n\nawait asyncio.sleep(0)\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(python_blocks(page), {})
    last = caught.traceback[-1]
    assert (Path(last.path), last.lineno + 1) == (page, 7)
