"""Build hooks of the documentation."""

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page with the source of every example."""
    pages = ["# Examples\n\nEach of these programs runs as it is.\n"]
    for path in sorted(EXAMPLES.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        text = (ast.get_docstring(ast.parse(source)) or "").replace("``", "`")
        code = source.split('"""', 2)[2].strip()
        pages.append(f"## {path.name} {{#{path.stem}}}\n\n{text}\n\n```python\n{code}\n```\n")
    files.append(File.generated(config, "examples.md", content="\n".join(pages)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Hide the `no-run` marks of code blocks, which are meant for tests/test_readme.py.

    Links to the examples lead to their page.
    """
    markdown = re.sub(r"^( *```python) no-run[^\n]*$", r"\1", markdown, flags=re.MULTILINE)
    markdown = re.sub(
        r"\]\(((?:\.\./)*)\.\./examples/(\w+)\.py\)", r"](\1examples.md#\2)", markdown
    )
    return re.sub(r"\]\(((?:\.\./)*)\.\./examples/\)", r"](\1examples.md)", markdown)
