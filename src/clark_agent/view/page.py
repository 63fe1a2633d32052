"""The page as files, and as one file with data in it.

The page is a set of ES modules without a build step. A file that opens anywhere cannot import
modules, so `one_file` puts them into one script: each module becomes a function that returns its
exports. Modules use named imports and exports of functions, classes and constants only.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path

__all__ = ["CONTENT_TYPES", "STATIC", "json_for_script", "one_file"]

STATIC = Path(__file__).parent / "static"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_UNSAFE = re.compile(r"[<>&\u2028\u2029]")


def json_for_script(json: str) -> str:
    """Return JSON that can be the text of a script element, whatever its strings contain.

    These characters only occur inside of strings, where an escape means the same.
    """
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", json)


def one_file(title: str, data: Iterable[str]) -> Iterator[str]:
    """Return the page as pieces of one file. ``data`` is its JSON, made safe, in pieces."""
    style, script = _read("app.css"), _bundle()
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    )
    page = _read("index.html")
    page = page.replace("<title>Runs · clark-agent</title>", f"<title>{escape(title)}</title>")
    charset = '<meta charset="utf-8">'
    policy_tag = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace(charset, f"{charset}\n    {policy_tag}")
    page = page.replace('<link rel="stylesheet" href="static/app.css">', f"<style>{style}</style>")
    page = page.replace('    <script type="module" src="static/main.js"></script>\n', "")
    before, after = page.split("  </body>")
    yield f'{before}    <script type="application/json" id="embedded">'
    yield from data
    yield f'</script>\n    <script type="module">{script}</script>\n  </body>{after}'


def _read(name: str) -> str:
    return (STATIC / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


@cache
def _bundle() -> str:
    """All modules as one, each behind those that it imports."""
    done: dict[str, str] = {}
    _add("main", done)
    script = "\n" + "\n".join(done.values()) + "\n"
    if "</script" in script.lower() or "<!--" in script:
        raise ValueError("the page's own scripts cannot be put into one file")
    return script


def _add(name: str, done: dict[str, str]) -> None:
    source = _read(f"{name}.js")
    imported = [(found[1], found[2]) for found in _IMPORT.finditer(source)]
    done.setdefault(name, "")
    for _, other in imported:
        if other not in done:
            _add(other, done)
    del done[name]
    names = [f"const {{{' '.join(given.split())}}} = {other}_js;" for given, other in imported]
    body = _EXPORT.sub("", _IMPORT.sub("", source))
    exported = ", ".join(_EXPORT.findall(source))
    lines = [f"const {name}_js = (() => {{", *names, body, f"return {{ {exported} }};", "})();"]
    done[name] = "\n".join(lines)
