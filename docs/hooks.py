"""Build hooks of the documentation."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Hide the `no-run` mark of code blocks, which is meant for tests/test_readme.py."""
    return re.sub(r"^( *```python) no-run$", r"\1", markdown, flags=re.MULTILINE)
