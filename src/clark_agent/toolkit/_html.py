"""The readable text of an HTML page.

Keeps title, headings, paragraphs, lists, table rows and links as plain text in the style of
Markdown; drops scripts, styles and the like. Nothing is validated: any input is read to its end, in
time and memory proportional to its length. Tree-building parsers cannot promise that: HTML's rules
for unclosed tags let 50 KB grow to a gigabyte. The parser of the standard library takes quadratic
time on broken markup in many versions in use.
"""

from __future__ import annotations

import re
from html import unescape as _unescape
from urllib.parse import urljoin

from msgspec import Struct

__all__ = ["ReadablePage", "readable"]

_NAME = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9:-]*)")
_SPACE = re.compile(r"\s+")
_HEADING = re.compile(r"h[1-6]")
_NO_CHARACTER = re.compile(r"&#[0-9]{9,};?")

_WORDS = re.compile(r"\w+").findall
_DROPPED = frozenset(_WORDS("canvas iframe math noscript object script style svg template title"))
_PARAGRAPHS = frozenset(_WORDS("blockquote dl h1 h2 h3 h4 h5 h6 hr ol p pre table ul"))
_LINES = _PARAGRAPHS | frozenset(
    _WORDS(
        "address article aside body br caption dd details div dt fieldset figcaption figure footer "
        "form header li main nav option section summary tr"
    )
)


class ReadablePage(Struct, frozen=True):
    """The readable part of a page."""

    title: str
    text: str


def readable(html: str, url: str) -> ReadablePage:
    """Return the title and the text of a page. Links are made absolute, relative to ``url``."""
    page, at = _Page(url), 0
    while True:
        begin = html.find("<", at)
        if begin < 0:
            page.text(html[at:])
            break
        page.text(html[at:begin])
        at = _read_markup(page, html, begin)
        if at < 0:  # it is never closed
            break
    return ReadablePage(page.title, page.whole())


def _read_markup(page: _Page, html: str, begin: int) -> int:
    """Read the markup that starts at a ``<``. Return where it ends, or -1 if it never does."""
    tag = _NAME.match(html, begin)
    if tag is None:
        if html.startswith("<!--", begin):
            return _after(html, "-->", begin + 4)
        if html.startswith(("<!", "<?", "</"), begin):
            return _after(html, ">", begin)
        page.text("<")
        return begin + 1
    end, name = _end_of_tag(html, tag.end()), tag[2].lower()
    if end < 0:
        return -1
    if name in _DROPPED:
        if tag[1]:
            return end + 1
        closing = re.compile(rf"</{name}\b", re.IGNORECASE).search(html, end)
        if closing is None:
            return -1
        if name == "title" and not page.title:
            page.title = _SPACE.sub(" ", unescape(html[end + 1 : closing.start()])).strip()
        return _after(html, ">", closing.end())
    if tag[1]:
        page.close(name)
    else:
        page.open(name, html[tag.end() : end])
    return end + 1


def _after(html: str, what: str, at: int) -> int:
    found = html.find(what, at)
    return -1 if found < 0 else found + len(what)


def _end_of_tag(html: str, at: int) -> int:
    """Return the position of the ``>`` that ends a tag. A ``>`` in quotes is skipped, within a
    limit.
    """
    end = first = html.find(">", at)
    for _ in range(3):
        if end < 0 or html.count('"', at, end) % 2 == 0:
            break
        end = html.find(">", end + 1)
    return first if end < 0 or html.count('"', at, end) % 2 else end


class _Page:
    """The text so far: finished lines, and the pieces of the current line."""

    def __init__(self, url: str) -> None:
        self.title = ""
        self._url = url
        self._lines: list[str] = []
        self._line: list[str] = []
        self._marker = ""
        """The prefix of the next line with text: a bullet or a heading mark."""
        self._verbatim = 0
        self._link: tuple[str, int, list[str], int] | None = None
        """The open link: its address, the amount of text before it, and where it begins."""
        self._read = self._read_before = 0
        """The amount of text so far, and at the start of the line."""

    def text(self, raw: str) -> None:
        """Add text between two tags."""
        if not raw:
            return
        text = unescape(raw)
        self._read += len(text.strip())
        if not self._verbatim:
            self._line.append(_SPACE.sub(" ", text))
            return
        first, *others = text.split("\n")
        self._line.append(first)
        for line in others:
            self._break()
            self._line.append(line)

    def open(self, name: str, attributes: str) -> None:
        """Handle an opening tag."""
        if name in _LINES:
            self._break(blank=name in _PARAGRAPHS)
        if name == "pre":
            self._verbatim += 1
        elif name == "a":
            self._end_link()
            self._begin_link(_attribute("href", attributes).strip())
        elif name == "li":
            self._marker = "- "
        elif _HEADING.fullmatch(name):
            self._marker = "#" * int(name[1]) + " "
        elif name in ("td", "th") and self._read > self._read_before:
            self._line.append(" | ")
        elif name == "img" and (alt := _attribute("alt", attributes).strip()):
            self.text(f"[image: {alt}]")

    def close(self, name: str) -> None:
        """Handle a closing tag."""
        if name == "a":
            self._end_link()
        if name in _LINES:
            self._break(blank=name in _PARAGRAPHS)
        if name == "pre" and self._verbatim:
            self._verbatim -= 1
        elif name in ("li", "ul", "ol") or _HEADING.fullmatch(name):
            self._marker = ""

    def whole(self) -> str:
        """Return all of the text, with at most one blank line in a row."""
        self._end_link()
        self._break()
        return re.sub(r"\n{3,}", "\n\n", "\n".join(self._lines)).strip("\n")

    def _break(self, *, blank: bool = False) -> None:
        line, self._line, self._read_before = "".join(self._line), [], self._read
        line = line.rstrip() if self._verbatim else _SPACE.sub(" ", line).strip()
        if line:
            self._lines.append(self._marker + line)
            self._marker = ""
        elif self._verbatim:
            self._lines.append("")
        if blank and self._lines and self._lines[-1]:
            self._lines.append("")

    def _begin_link(self, href: str) -> None:
        if not href or href.startswith("#"):
            return
        try:
            url = urljoin(self._url, href)
        except ValueError:
            return
        if url.startswith(("http://", "https://")):
            self._link = (_SPACE.sub("%20", url), self._read, self._line, len(self._line))
            self._line.append("[")

    def _end_link(self) -> None:
        if self._link is None:
            return
        (url, read, line, begin), self._link = self._link, None
        if self._read > read:
            self._line.append(f"]({url})")
        elif line is self._line:  # a link without text
            del line[begin]


def unescape(text: str) -> str:
    """Replace character references. Python refuses to parse a number with too many digits."""
    return _unescape(_NO_CHARACTER.sub("\ufffd", text)) if "&" in text else text


def _attribute(name: str, attributes: str) -> str:
    found = re.search(
        rf"""(?<![\w-]){name}\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""",
        attributes,
        re.IGNORECASE,
    )
    return "" if found is None else unescape(found[1] or found[2] or found[3] or "")
