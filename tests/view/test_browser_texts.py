"""Texts of a log on a page: Markdown, differences, and results in a notebook, in a real browser."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import AsyncGenerator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from clark_agent import AssistantMessage, ToolCall, ToolResultMessage, UserMessage
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.run_log import MemoryStore
from clark_agent.types import FileContent, ImageContent, TextContent, ThinkingContent, Usage
from clark_agent.view.page import STATIC
from tests.browsers import shot, started_browser
from tests.selection import slow_fixture
from tests.view.stories import EVIL, EVIL_MARKDOWN, TASK, answer, fixing, picture

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the modules of the page."""

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served() -> Any:
    handler = functools.partial(Quiet, directory=str(STATIC))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
@slow_fixture
async def page() -> AsyncGenerator[Any]:
    """An empty page that can import the modules."""
    with served() as address:
        async with started_browser() as browser:
            page = await browser.new_page()
            page.sent = []
            page.dialogs = []
            page.on("request", lambda request: page.sent.append(request.url))
            page.on("dialog", lambda dialog: page.dialogs.append(dialog.message))
            await page.goto(f"{address}/app.css")
            yield page


async def markdown(page: Any, text: str) -> str:
    """What the page makes of a text."""
    made: str = await page.evaluate(
        "async text => (await import('/markdown.js')).markdown(text).innerHTML", text
    )
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("# One\n\n### Two ##", "<h3>One</h3><h5>Two</h5>"),
        ("a **b *c* d** ~~e~~ __f__", "<p>a <strong>b <em>c</em> d</strong> <del>e</del> "
         "<strong>f</strong></p>"),
        ("snake_case_name 2 * 3 * 4 \\*no\\*", "<p>snake_case_name 2 * 3 * 4 *no*</p>"),
        ("*a **b* c**", "<p><em>a **b</em> c**</p>"),
        ("`a*b` `` c`d `` `e", "<p><code>a*b</code> <code>c`d</code> `e</p>"),
        ("- a\n  - b\n- c\n\n1. d\n2. e", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"
         "<ol><li>d</li><li>e</li></ol>"),
        ("3) a", '<ol start="3"><li>a</li></ol>'),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        ("a\n\n---\nb\nc", "<p>a</p><hr><p>b<br>c</p>"),
        ("```py\n<b>*x*\n```", '<pre class="code" tabindex="0" aria-label="code in py"><code>'
         "&lt;b&gt;*x*</code></pre>"),
        ("```\nopen", '<pre class="code" tabindex="0" aria-label="code"><code>open</code></pre>'),
        ("|a|b|\n|-|:-:|\n|1|`2`|", '<div class="table" tabindex="0" role="region" '
         'aria-label="table"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr>'
         "<td>1</td><td><code>2</code></td></tr></tbody></table></div>"),
        ("<script> &amp; <b>", "<p>&lt;script&gt; &amp;amp; &lt;b&gt;</p>"),
    ],
)  # fmt: skip
async def test_markdown(page: Any, text: str, made: str) -> None:
    assert await markdown(page, text) == made


LINK = 'rel="noopener noreferrer" target="_blank"'


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("[a *b*](https://x.y/z_(1))", f'<a href="https://x.y/z_(1)" {LINK}>a <em>b</em></a>'),
        ('[a](mailto:a@b.c "t")', f'<a href="mailto:a@b.c" {LINK}>a</a>'),
        ("(https://x.y/z).", f'(<a href="https://x.y/z" {LINK}>https://x.y/z</a>).'),
        ("![a](https://x.y/p.png)", f'<span class="image-link"><a href="https://x.y/p.png" {LINK}>'
         "image: a</a></span>"),
        ("![a](data:image/png;base64,QUJD)",
         '<img src="data:image/png;base64,QUJD" alt="a" loading="lazy">'),
    ],
)  # fmt: skip
async def test_links_and_images(page: Any, text: str, made: str) -> None:
    assert await markdown(page, text) == f"<p>{made}</p>"


@pytest.mark.parametrize(
    "address",
    [
        "javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", "vbscript:x",
        "data:text/html,x", "data:image/svg+xml;base64,QUJD", "file:///etc/passwd", "//x.y/z",
        "/x", "#x", "blob:null/z", "https:", "\x01javascript:alert(1)",
    ],
)  # fmt: skip
async def test_other_addresses_are_no_links_and_no_images(page: Any, address: str) -> None:
    made = await markdown(page, f"[click]({address}) ![picture]({address}) <{address}>")
    assert "<a " not in made
    assert "<img" not in made


async def test_hostile_markdown_is_text(page: Any) -> None:
    page.sent.clear()
    names = await page.evaluate(
        """async text => {
            const place = (await import('/markdown.js')).markdown(text);
            document.body.append(place);
            const all = [...place.querySelectorAll('*')];
            const attributes = all.flatMap(element => element.getAttributeNames());
            return [[...new Set(all.map(element => element.localName))], [...new Set(attributes)]];
        }""",
        EVIL_MARKDOWN,
    )
    elements, attributes = map(set, names)
    assert elements <= {"p", "a", "br", "span", "div", "table", "thead", "tbody", "tr", "th", "td",
                        "code", "strong", "pre"}  # fmt: skip
    assert attributes <= {"href", "rel", "target", "class", "title", "tabindex", "role",
                          "aria-label"}  # fmt: skip
    await page.evaluate("() => new Promise(done => requestAnimationFrame(() => done()))")
    assert page.dialogs == []
    assert [url for url in page.sent if "127.0.0.1" not in url] == []


UNFRIENDLY = {
    "stars": "*" * 39_000,
    "open emphasis": "*a " * 13_000,
    "mixed emphasis": "**a*b__c_" * 4_300,
    "brackets": "[" * 39_000,
    "open links": "[a](" * 9_700,
    "titles": '[x](y "' * 5_500,
    "ticks": "`a``b```c" * 4_300,
    "dots": "http://" + "." * 39_000 + "a",
    "fence": "```" + "a" * 300_000 + "`",
    "spaces": "# " + " " * 300_000 + "a",
    "rule": "a|b\n-" + " " * 300_000 + "x",
    "quotes": ">" * 300_000,
    "lists": "- " * 150_000,
    "steps": "\n".join(" " * depth + "- a" for depth in range(700)),
    "lines": "*a\n" * 100_000,
}


@pytest.mark.parametrize("name", UNFRIENDLY)
async def test_the_time_is_linear(page: Any, name: str) -> None:
    """Quadratic work on any of these would take minutes, linear work some milliseconds."""
    took = await page.evaluate(
        """async text => {
            const { markdown } = await import('/markdown.js');
            const start = performance.now();
            markdown(text);
            return performance.now() - start;
        }""",
        UNFRIENDLY[name],
    )
    assert took < 5_000


async def diff(page: Any, call: str, *texts: str) -> list[list[str]]:
    """The lines of a difference: their class and their text."""
    rows: list[list[str]] = await page.evaluate(
        f"""async texts => {{
            const {{ {call} }} = await import('/differences.js');
            const place = {call}(...texts);
            return [...place.children].map(row => [row.className, row.textContent]);
        }}""",
        texts,
    )
    return rows


async def test_a_unified_diff_has_colours(page: Any) -> None:
    text = "--- a\n+++ b\n@@ -1,3 +1,3 @@\n x\n-- y\n+z\n"
    assert await diff(page, "unifiedDiff", text) == [
        ["file", "--- a"],
        ["file", "+++ b"],
        ["hunk", "@@ -1,3 +1,3 @@"],
        ["same", " x"],
        ["removed", "-- y"],
        ["added", "+z"],
        ["same", " "],
    ]
    is_diff = "async t => (await import('/differences.js')).isDiff(t)"
    assert [await page.evaluate(is_diff, t) for t in (text, text[12:], "--- a\nb", "@@ x")] == [
        True,
        True,
        False,
        False,
    ]


async def test_two_texts_line_by_line(page: Any) -> None:
    before = "\n".join(["a", "b", *"123456789", "c", "d"])
    after = "\n".join(["a", "B", *"123456789", "d", "e"])
    assert await diff(page, "textDiff", before, after) == [
        ["same", "  a"],
        ["removed", "- b"],
        ["added", "+ B"],
        ["same", "  1"],
        ["same", "  2"],
        ["same", "  3"],
        ["hunk", "… 3 lines are the same"],
        ["same", "  7"],
        ["same", "  8"],
        ["same", "  9"],
        ["removed", "- c"],
        ["same", "  d"],
        ["added", "+ e"],
    ]


# --- notebooks ------------------------------------------------------------------------------------


async def rendered(page: Any, result: RunResult[Any]) -> Any:
    """The result as a notebook shows it: its HTML inside a page."""
    html = result._repr_html_()
    await page.set_content(f"<main>{html}</main>")
    return page.locator("main")


async def test_a_result_shows_itself_in_a_notebook(page: Any, tmp_path: Path) -> None:
    result = await fixing(MemoryStore(), tmp_path).run(TASK)
    shown = await rendered(page, result)
    text = await shown.inner_text()
    assert text.startswith("done 4 answers · 23,570 tokens in (18,100 cached), 900 out")
    assert TASK in text
    assert "floating point" in text
    calls = shown.locator("details:has(> summary code)")
    assert await calls.locator("> summary > code").all_inner_texts() == [
        "read_file", "run_tests", "edit_file", "delete", "delete", "review", "chart", "run_tests",
    ]  # fmt: skip
    edit = calls.nth(2)
    assert not await edit.locator("pre").first.is_visible()
    await edit.locator("summary").click()
    assert "Edited shop/prices.py in 1 place" in await edit.inner_text()
    await calls.nth(6).locator("summary").click()
    drawn = "image => image.complete && image.naturalWidth"
    assert await shown.locator("img").evaluate(drawn) == 240
    await shot(page, "notebook")


async def test_a_hostile_result_is_text_in_a_notebook(page: Any) -> None:
    evil = (
        UserMessage(EVIL_MARKDOWN),
        UserMessage((FileContent("javascript:alert(1)", None, EVIL), TextContent("\ud800"))),
        answer(EVIL, ToolCall("1", EVIL, {EVIL: EVIL}), thinking=EVIL, reasoning=EVIL),
        ToolResultMessage("1", EVIL, (TextContent(EVIL), ImageContent("https://x.y/z", None, EVIL),
                                      ImageContent('data:image/png;base64,"onerror=alert(1)')),
                          is_error=True),
        ToolResultMessage("2", EVIL, (ImageContent(picture(), None, '"><script>alert(1)//'),)),
        AssistantMessage((ThinkingContent(EVIL),), answer("").stop_reason, EVIL),
    )  # fmt: skip
    page.sent.clear()
    shown = await rendered(page, RunResult(evil, LoopOutcome.DONE, Usage(1, 2, 3, 4)))
    await page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    names = await shown.evaluate(
        "place => [...new Set([...place.querySelectorAll('*')].map(each => each.localName))]"
    )
    assert set(names) == {"div", "b", "span", "details", "summary", "code", "pre", "img"}
    assert await shown.locator("img").count() == 1
    assert await shown.get_by_text(EVIL, exact=True).count() >= 5
    assert page.dialogs == []
    assert [url for url in page.sent if not url.startswith("data:image/png")] == []


async def test_a_long_result_is_cut_in_a_notebook() -> None:
    messages = [AssistantMessage.from_text("x" * 1_000_000) for _ in range(1_000)]
    html = RunResult(tuple(messages), LoopOutcome.DONE)._repr_html_()
    assert "The first 800 messages are left out." in html
    assert "(996,000 more characters)" in html
    assert len(html) < 1_500_000
