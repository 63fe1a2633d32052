"""The file tools: what a model reads, and what becomes of the files."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from clark_agent import (
    AgentContext,
    CancellationToken,
    LoopConfig,
    RunAborted,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    run,
)
from clark_agent.engine.supervised import left_behind
from clark_agent.messages import encode_json
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import _regex_worker
from clark_agent.toolkit._edits import EditRefused, replace_text, unified_diff
from clark_agent.toolkit._glob import Glob
from clark_agent.toolkit._regex_worker import read_frame, serve, write_frame
from clark_agent.toolkit._text import human_size
from clark_agent.toolkit.files import file_tools
from clark_agent.toolkit.workspace import Workspace
from tests.toolkit.commands import unmarked

CATASTROPHE = "(a|aa)+$"
"""Takes for ever on a line of many a's that ends in something else."""
TRAP = "a" * 200 + "!\n"


class Desk:
    """A workspace and its tools."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.workspace = Workspace(root)
        self.tools = {tool.name: tool for tool in file_tools(self.workspace, **options)}

    async def use(self, name: str, **arguments: Any) -> ToolResult:
        tool = self.tools[name]
        context = ToolContext(tool_call_id="call", tool_name=name)
        result = await tool.execute(tool.validate(arguments), context)
        encode_json(result)  # it goes into logs
        return unmarked(result)

    async def text(self, name: str, **arguments: Any) -> str:
        result = await self.use(name, **arguments)
        assert not result.is_error, result.plain_text
        return result.plain_text

    async def error(self, name: str, **arguments: Any) -> str:
        result = await self.use(name, **arguments)
        assert result.is_error, result.plain_text
        return result.plain_text

    def put(self, path: str, content: str | bytes) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.workspace.close()


def test_the_tools_of_a_workspace(tmp_path: Path) -> None:
    with Workspace(tmp_path) as workspace:
        assert {tool.name: tool.idempotent for tool in file_tools(workspace)} == {
            "read_file": True,
            "list_files": True,
            "search_files": True,
            "write_file": False,
            "edit_file": False,
        }
        for tool in file_tools(workspace):
            assert tool.runs_in_thread
            properties = tool.schema.parameters["properties"]
            assert all(about["description"] for about in properties.values()), tool.name
    with Workspace(tmp_path, read_only=True) as workspace:
        names = [tool.name for tool in file_tools(workspace)]
        assert names == ["read_file", "list_files", "search_files"]


# --- read_file --------------------------------------------------------------------------------


async def test_a_file_is_read_as_it_is(desk: Desk) -> None:
    desk.put("notes/a.txt", "one\n  two\n\nthree")
    result = await desk.use("read_file", path="notes/a.txt")
    assert result == ToolResult.text(
        "one\n  two\n\nthree",
        details={"path": "notes/a.txt", "size": 16, "first_line": 1, "last_line": 4, "lines": 4},
    ).with_narration("Read notes/a.txt")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "[The file is empty.]"),
        (b"one line\n", "one line"),
        (b"\n\n", "\n"),
        (b"\xef\xbb\xbfmarked", "marked"),
        ("grün\n日本".encode("utf-16"), "grün\n日本"),
        (b"\xfe\xff" + "big end".encode("utf-16-be"), "big end"),
        ("wide".encode("utf-32"), "wide"),
        (b"a\r\nb\r\n", "a\nb\n\n[The lines end in CRLF.]"),
        (b"caf\xe9\n", "caf\ufffd\n\n[\ufffd stands for bytes that are no valid text.]"),
        (b"form\x0cfeed\xe2\x80\xa8one line", "form\x0cfeed\u2028one line"),
        (b"a\0b", "[No text: file is binary data, 3 bytes.]"),
        (b"\x89PNG\r\n\x1a\n....", "[No text: file is a PNG image, 12 bytes.]"),
        (b"RIFF....WEBPVP8 ", "[No text: file is a WebP image, 16 bytes.]"),
        (b"%PDF-1.7 text", "[No text: file is a PDF document, 13 bytes.]"),
    ],
)
async def test_what_a_file_looks_like(desk: Desk, content: bytes, text: str) -> None:
    desk.put("file", content)
    assert await desk.text("read_file", path="file") == text


async def test_a_long_file_comes_in_parts(desk: Desk) -> None:
    desk.put("file", "".join([f"line {n}\n" for n in range(1, 2_501)]))
    first = await desk.text("read_file", path="file")
    assert first.startswith("line 1\nline 2\n")
    assert first.endswith("line 1000\n\n[Lines 1 to 1000 of 2500. Go on with offset=1001.]")
    assert await desk.text("read_file", path="file", offset=2_499, limit=10) == (
        "line 2499\nline 2500\n\n[Lines 2499 to 2500 of 2500.]"
    )
    assert await desk.text("read_file", path="file", offset=7, limit=1) == (
        "line 7\n\n[Lines 7 to 7 of 2500. Go on with offset=8.]"
    )
    assert (await desk.text("read_file", path="file", offset=-3, limit=0)).startswith("line 1\n\n")
    assert await desk.error("read_file", path="file", offset=2_501) == (
        "the file has only 2,500 lines: take a smaller offset"
    )


async def test_the_parts_of_a_file_are_all_of_it(desk: Desk) -> None:
    lines = [f"{n} {'x' * (n * 7 % 1_500)}" for n in range(400)]
    desk.put("file", "\n".join(lines))
    read: list[str] = []
    offset = 1
    while offset <= len(lines):
        result = await desk.use("read_file", path="file", offset=offset)
        assert len(result.plain_text) < 41_000
        read += result.plain_text.rpartition("\n\n[Lines")[0].split("\n")
        offset = result.details["last_line"] + 1
    assert read == lines


async def test_a_long_line_is_cut(desk: Desk) -> None:
    desk.put("file", f"{'a' * 2_000}\n{'b' * 2_001}\n{'c' * 300_000}\nshort")
    lines = (await desk.text("read_file", path="file")).split("\n")
    assert lines[:4] == ["a" * 2_000, "b" * 2_000, "c" * 2_000, "short"]
    assert lines[5:] == [
        "[Longer than 2000 characters, and cut there: lines 2, 3. "
        "search_files shows what is around a text in them.]"
    ]


async def test_an_enormous_file_is_not_read_whole(desk: Desk) -> None:
    file = desk.put("file", "text\n" * 5_000)
    os.truncate(file, 5 << 30)  # the rest is a hole
    tracemalloc.start()
    try:
        text = await desk.text("read_file", path="file", limit=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text == "text\ntext\n\n[Lines 1 to 2 of a file of 5.4 GB. Go on with offset=3.]"
    assert peak < 1 << 20
    assert "too large to be taken as a whole" in await desk.error(
        "edit_file", path="file", old="text", new="x"
    )
    assert await desk.text("read_file", path="file", offset=2, limit=1) == (
        "text\n\n[Lines 2 to 2 of a file of 5.4 GB. Go on with offset=3.]"
    )


async def test_a_line_without_end_is_not_read_to_its_end(desk: Desk) -> None:
    file = desk.put("file", "x" * 10_000)
    os.truncate(file, 40 << 30)  # the rest is a hole, and the same line
    text = await desk.text("read_file", path="file")
    assert text.startswith("x" * 2_000 + "\n\n[Longer than 2000 characters, and cut there: line 1.")
    assert text.endswith("[Lines 1 to 1 of a file of 42.9 GB. Go on with offset=2.]")
    assert "line 2 is more than 67,108,864 characters into the file, and no more is read" in (
        await desk.error("read_file", path="file", offset=2)
    )


async def test_a_missing_file_is_told_plainly(desk: Desk) -> None:
    desk.put("src/main.py", "")
    result = await desk.use("read_file", path="src/man.py")
    assert result == ToolResult.error(
        "there is no 'src/man.py'; did you mean 'src/main.py'?", details={"error": "not_found"}
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1_000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (5_000_000_000_000, "5,000.0 GB"),
    ],
)
def test_sizes_are_for_people(size: int, text: str) -> None:
    assert human_size(size) == text


# --- write_file -------------------------------------------------------------------------------


async def test_a_file_is_made_and_replaced(desk: Desk) -> None:
    made = await desk.use("write_file", path="a/b.txt", content="grün\nzwei")
    assert made == ToolResult.text(
        "Created a/b.txt: 2 lines, 10 bytes.",
        details={"path": "a/b.txt", "created": True, "size": 10, "lines": 2},
    ).with_narration("Created a/b.txt")
    assert (desk.root / "a/b.txt").read_bytes() == "grün\nzwei".encode()
    replaced = await desk.use("write_file", path="a/b.txt", content="one\r\n")
    assert replaced.plain_text == "Replaced a/b.txt: 1 line, 5 bytes."
    assert (desk.root / "a/b.txt").read_bytes() == b"one\r\n"
    emptied = await desk.use("write_file", path="a/b.txt", content="")
    assert emptied.plain_text == "Replaced a/b.txt: 0 lines, 0 bytes."
    assert os.listdir(desk.root / "a") == ["b.txt"]


async def test_half_a_character_is_not_written(desk: Desk) -> None:
    said = await desk.error("write_file", path="file", content="a\ud83d")
    assert said.startswith("'content' has half a character in it")
    assert os.listdir(desk.root) == []


# --- edit_file --------------------------------------------------------------------------------


async def test_a_text_is_replaced(desk: Desk) -> None:
    file = desk.put("a.py", "def f():\n    return 1\n\n\ndef g():\n    return 2\n")
    result = await desk.use("edit_file", path="a.py", old="    return 2", new="    return 3\n# !")
    assert file.read_text() == "def f():\n    return 1\n\n\ndef g():\n    return 3\n# !\n"
    assert result == ToolResult.text(
        "Edited a.py in 1 place at line 6.",
        details={
            "path": "a.py",
            "replaced": 1,
            "line": 6,
            "diff": "--- a.py\n+++ a.py\n@@ -3,4 +3,5 @@\n \n \n def g():\n-    return 2\n"
            "+    return 3\n+# !\n",
        },
    ).with_narration("Edited a.py")


async def test_a_text_is_replaced_everywhere(desk: Desk) -> None:
    file = desk.put("a.txt", "x y x\nz\nx\n")
    said = await desk.text("edit_file", path="a.txt", old="x", new="xx", replace_all=True)
    assert said == "Edited a.txt in 3 places, the first at line 1."
    assert file.read_text() == "xx y xx\nz\nxx\n"


@pytest.mark.parametrize(
    ("content", "old", "new", "said"),
    [
        ("abc", "", "x", "'old' is empty: give the text to replace"),
        ("abc", "b", "b", "'old' and 'new' are the same: there is nothing to change"),
        ("a\nb\na", "a", "x", "'old' is there 2 times, at the lines 1, 3: give more of the text"),
        ("aaa", "aa", "x", "'old' is there 2 times, at the lines 1, 1:"),
        ("a\n" * 50, "a\n", "x", "'old' is there more than 20 times, at the lines 1, 2, 3,"),
        ("a b", "nothing", "x", "'old' is not in the file: read it again, and copy the text"),
        ("", "text", "x", "'old' is not in the file"),
        ("done it", "to do it", "done it", "'old' is not in the file, but 'new' is: has this"),
        ("a\nb", "a\\nb", "x", "'old' has a backslash and an 'n' where the file has a line break"),
        (
            "if x:\n\treturn  1\n",
            "if x:\n    return 1",
            "x",
            "'old' is there only with other white space. The file has, lines 1 to 2:\nif x:\n"
            "\treturn  1",
        ),
        (
            "first\ndef compute(value):\n",
            "def compute(values):",
            "x",
            "'old' is not in the file. The line that is most like its beginning is line 2:\n"
            "def compute(value):",
        ),
    ],
)
async def test_an_edit_that_is_refused(
    desk: Desk, content: str, old: str, new: str, said: str
) -> None:
    file = desk.put("file", content)
    assert (await desk.error("edit_file", path="file", old=old, new=new)).startswith(said)
    assert file.read_text() == content
    assert os.listdir(desk.root) == ["file"]


async def test_a_file_that_is_no_text_is_not_edited(desk: Desk) -> None:
    desk.put("file", b"a\0b")
    desk.put("odd", b"\xff\xfea")
    assert await desk.error("edit_file", path="file", old="a", new="b") == (
        "file cannot be edited: it is not text but binary data"
    )
    assert await desk.error("edit_file", path="odd", old="a", new="b") == (
        "odd cannot be edited: it is not text but damaged UTF-16-LE text"
    )
    for argument in ({"old": "\udcff", "new": "x"}, {"old": "a", "new": "\udcff"}):
        assert "half a character" in await desk.error("edit_file", path="file", **argument)


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"a\r\nb\r\nc\r\n", "a\nb", "x\ny", b"x\r\ny\r\nc\r\n"),
        (b"a\r\nb\r\n", "b", "x\ny", b"a\r\nx\r\ny\r\n"),
        (b"a\r\nb\r\n", "a\r\nb", "x\r\ny", b"x\r\ny\r\n"),
        (b"a\r\nb\nc\n", "a\nb", "x\ny", b"x\r\ny\nc\n"),
        (b"a\r\nb\nc\n", "b\nc", "x\ny", b"a\r\nx\ny\n"),
        (b"\xef\xbb\xbfa b", "a", "x", b"\xef\xbb\xbfx b"),
        (b"\xff\xfea\0\xe4\0", "\u00e4", "\u20ac", b"\xff\xfea\0\xac\x20"),
        (b"\xfe\xff\0a\0b", "b", "c", b"\xfe\xff\0a\0c"),
        (b"\xff\xfe\x00\xd8a\0", "a", "b", b"\xff\xfe\x00\xd8b\0"),
        (b"\xff\xe9 a \xff", "a", "b", b"\xff\xe9 b \xff"),
        (b"no end", "no", "an", b"an end"),
        (b"end\n", "end\n", "end", b"end"),
    ],
)
async def test_all_that_is_not_replaced_stays_byte_for_byte(
    desk: Desk, before: bytes, old: str, new: str, after: bytes
) -> None:
    file = desk.put("file", before)
    await desk.text("edit_file", path="file", old=old, new=new)
    assert file.read_bytes() == after


@given(st.binary(), st.binary(), st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
def test_any_bytes_around_the_text_stay(
    tmp_path_factory: pytest.TempPathFactory, before: bytes, after: bytes, new: str
) -> None:
    before = b"# " + before  # or it might be an image
    data = before + b"@marker@" + after
    assume(data.count(b"@marker@") == 1 and new != "@marker@")
    assume(b"\0" not in data and b"\r\n" not in data)
    root = tmp_path_factory.mktemp("edit")
    with Workspace(root) as workspace:
        (root / "file").write_bytes(data)
        edit = file_tools(workspace)[-1]
        context = ToolContext(tool_call_id="call", tool_name="edit_file")
        arguments = {"path": "file", "old": "@marker@", "new": new}
        result = asyncio.run(edit.execute(edit.validate(arguments), context))
    assert not result.is_error, result
    encode_json(result)
    assert (root / "file").read_bytes() == before + new.encode() + after


def test_an_edit_may_not_make_a_file_without_measure() -> None:
    with pytest.raises(EditRefused, match="the file would have more than 1,000,000 characters"):
        replace_text("a" * 1_000, "a", "b" * 10_000, replace_all=True, max_chars=1_000_000)


def patched(text: str, diff: str) -> str:
    """What a unified diff makes of a text. Every line that it tells of the text must be there."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    result: list[str] = []
    at = 0
    told = re.findall(r"[^\n]*\n", diff)
    for number, line in enumerate(told):
        if header := re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n", line):
            start = int(header[1]) - (header[2] != "0")
            result += lines[at:start]
            at = start
            assert len(result) == int(header[3]) - (header[4] != "0")
            continue
        if line.startswith("\\"):
            continue
        is_open = told[number + 1 : number + 2] == ["\\ No newline at end of file\n"]
        content = line[1:-1] if is_open else line[1:]
        if line[0] in " -":
            assert lines[at] == content
            at += 1
        if line[0] in " +":
            result.append(content)
    return "".join(result + lines[at:])


short = st.text("ab\n", max_size=4)


long = st.text("ab\n\n", max_size=75)


@given(long, st.text("abc\n", min_size=1, max_size=4), long, short, st.booleans())
@example("a\n" * 30, "b", "\n" + "a\n" * 30 + "b", "", True)
@example("a", "b", "", "\n", False)
def test_the_difference_makes_the_one_of_the_other(
    before: str, old: str, after: str, new: str, replace_all: bool
) -> None:
    text = before + old + after
    try:
        edit = replace_text(text, old, new, replace_all=replace_all)
    except EditRefused:
        assert old == new or not old or old not in text or not replace_all
        return
    assert edit.text == text.replace(old, new)
    assert patched(text, edit.diff) == edit.text


TEXTS = st.lists(st.sampled_from(["a", "b", "", "c d"]), max_size=12).map("\n".join)


@given(TEXTS, TEXTS)
def test_the_difference_of_two_texts_makes_the_one_of_the_other(old: str, new: str) -> None:
    assert patched(old, unified_diff(old, new)) == new


def test_the_difference_of_two_texts_has_only_what_differs() -> None:
    lines = [f"line {n}\n" for n in range(40)]
    new = ["first\n", *lines[:10], *lines[11:30], "line 30, or so\n", *lines[31:]]
    changed = [
        line for line in unified_diff("".join(lines), "".join(new)).splitlines() if line[0] != " "
    ]
    assert changed == [
        *("@@ -1,3 +1,4 @@", "+first", "@@ -8,7 +9,6 @@", "-line 10"),
        *("@@ -28,7 +28,7 @@", "-line 30", "+line 30, or so"),
    ]


def test_the_difference_of_a_long_line_is_short_and_made_at_once() -> None:
    """Two million characters; what is quadratic would need minutes for them."""
    for text in ("ab" * 1_000_000, "ab" * 1_000_000 + "\n", "ab\n" * 500_000):
        edit = replace_text(text, "a", "cd", replace_all=True)
        assert edit.text == text.replace("a", "cd")
        assert edit.diff.startswith("@@ -1")
        assert edit.diff[100_000:] == "\n[the difference is longer, and cut here]\n"


@pytest.mark.parametrize("line", ["same\n", "{}\n"])
def test_the_difference_of_long_texts_is_short_and_made_at_once(line: str) -> None:
    """Of lines that all are the same, and of lines that stand in the opposite order."""
    lines = [line.format(n) for n in range(200_000)]
    diff = unified_diff("".join(lines), "".join([*lines, "other\n"][::-1]))
    assert diff.startswith("@@ -1,")
    assert len(diff) < 100_100


async def test_a_hint_takes_no_time_to_speak_of(desk: Desk) -> None:
    desk.put("file", "".join([f"    value_{n} = compute(value_{n - 1})\n" for n in range(100_000)]))
    desk.put("same", "same line\n" * 200_000)
    start = time.monotonic()
    await desk.error("edit_file", path="file", old="value = compute(other)\n" * 50, new="x")
    for lines in (190, 100_000):
        old = "same  line\n" * lines + "another"
        await desk.error("edit_file", path="same", old=old, new="x")
    assert time.monotonic() - start < 20


# --- list_files -------------------------------------------------------------------------------


async def test_a_tree_is_listed(desk: Desk) -> None:
    desk.put("src/app/main.py", "x" * 1_234)
    desk.put("src/app.py", "")
    desk.put("README", "hello")
    desk.put(".git/config", "")
    desk.put("web/node_modules/x/index.js", "")
    desk.put("a\nb", "")
    result = await desk.use("list_files")
    assert result.plain_text.split("\n") == [
        ".git/ (not entered)",
        "README (5 bytes)",
        "a\\nb (0 bytes)",
        "src/",
        "src/app/",
        "src/app/main.py (1.2 kB)",
        "src/app.py (0 bytes)",
        "web/",
        "web/node_modules/ (not entered)",
    ]
    assert result.details["complete"]
    assert result.details["entries"][5] == {
        "path": "src/app/main.py",
        "kind": "file",
        "size": 1_234,
    }
    assert result.narration == "Listed ."
    assert await desk.text("list_files", path="src/app") == "src/app/main.py (1.2 kB)"
    assert await desk.text("list_files", path="README") == "README (5 bytes)"
    assert await desk.text("list_files", path=".git") == ".git/config (0 bytes)"


async def test_names_that_are_no_text_can_be_told(desk: Desk) -> None:
    os.mkdir(os.fsencode(desk.root) + b"/\xff\xfe")
    listed = await desk.text("list_files")
    assert listed == ("\\udcff\\udcfe/\n\n[Not read: '\\udcff\\udcfe' is not valid Unicode.]")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.py", ["a.py", "src/b.py", "src/deep/test_c.py"]),
        ("test_*", ["src/deep/test_c.py"]),
        ("src/*.py", ["src/b.py"]),
        ("src/**/*.py", ["src/b.py", "src/deep/test_c.py"]),
        ("**/*.py", ["a.py", "src/b.py", "src/deep/test_c.py"]),
        ("./src/*", ["src/b.py", "src/d.ts", "src/deep"]),
        ("*.{ts,md}", ["notes.md", "src/d.ts"]),
        ("{src,other}/{b,d}.*", ["src/b.py", "src/d.ts"]),
        ("?.py", ["a.py", "src/b.py"]),
        ("[ab].py", ["a.py", "src/b.py"]),
        ("deep", ["src/deep"]),
        ("src/**", ["src", "src/b.py", "src/d.ts", "src/deep", "src/deep/test_c.py"]),
        ("A.py", []),
        ("{", []),
    ],
)
async def test_a_pattern_selects(desk: Desk, pattern: str, found: list[str]) -> None:
    for path in ("a.py", "src/b.py", "src/d.ts", "src/deep/test_c.py", "notes.md"):
        desk.put(path, "")
    result = await desk.use("list_files", pattern=pattern)
    assert [entry["path"] for entry in result.details["entries"]] == found
    if not found:
        assert result.plain_text == f"[Nothing matches {pattern}.]"


async def test_a_pattern_may_begin_at_the_folder_or_at_the_root(desk: Desk) -> None:
    desk.put("src/lib/a.py", "")
    for pattern in ("lib/*.py", "src/lib/*.py"):
        listed = await desk.text("list_files", path="src", pattern=pattern)
        assert listed == "src/lib/a.py (0 bytes)"


@given(st.text("a*?[]{,}/.", max_size=40), st.text("a/.", max_size=60))
def test_any_pattern_is_decided(pattern: str, path: str) -> None:
    try:
        Glob(pattern).matches(path)
    except ValueError as error:
        assert "more than 64 patterns" in str(error)  # noqa: PT017


def test_no_pattern_takes_for_ever() -> None:
    start = time.monotonic()
    assert not Glob("*a" * 60 + "b").matches("a" * 255)
    assert not Glob("**/" * 60 + "b").matches("a/" * 99 + "a")
    assert time.monotonic() - start < 20
    with pytest.raises(ValueError, match="more than 64"):
        Glob("{a,b}" * 50)


async def test_an_empty_folder_is_told_plainly(desk: Desk) -> None:
    (desk.root / "folder").mkdir()
    assert await desk.text("list_files", path="folder") == "[The folder is empty.]"


async def test_a_large_tree_is_told_from_the_top(desk: Desk) -> None:
    for folder in range(40):
        for file in range(19):
            desk.put(f"f{folder:02}/deep/{file:02}.txt", "")
    result = await desk.use("list_files")
    lines, cut, missing = result.plain_text.split("\n\n")
    shown = lines.split("\n")
    assert len(shown) == 500
    assert {f"f{folder:02}/deep/" for folder in range(40)} <= set(shown)
    assert cut == "[There is more in f22/deep: give a pattern.]"
    assert missing == (
        "[Not entered: f23/deep, f24/deep, f25/deep, f26/deep, f27/deep and 12 more. List one of "
        "them to see more.]"
    )
    assert not result.details["complete"]
    narrow = await desk.use("list_files", path="f39")
    assert narrow.details["complete"]
    found = await desk.use("list_files", pattern="f39/**/07.txt")
    assert [entry["path"] for entry in found.details["entries"]] == ["f39/deep/07.txt"]


async def test_a_listing_is_never_too_long_to_read(desk: Desk) -> None:
    for number in range(400):
        desk.put(f"{number:03}{'x' * 200}", "")
    listed = await desk.text("list_files")
    assert len(listed) < 50_000
    assert listed.endswith("[There is more in .: give a pattern.]")


class Later(CancellationToken):
    """A token that is cancelled after somebody has looked at it a number of times."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    @property
    def cancelled(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("read_file", {"path": "0/file", "offset": 100}),
        ("list_files", {}),
        ("search_files", {"pattern": "nowhere"}),
        ("search_files", {"pattern": "nowhere", "path": "0/file"}),
        ("write_file", {"path": "new", "content": "x"}),
        ("edit_file", {"path": "0/file", "old": "first", "new": "x"}),
    ],
)
async def test_all_of_them_stop_when_they_are_told(
    desk: Desk, name: str, arguments: dict[str, Any]
) -> None:
    for folder in range(20):
        desk.put(f"{folder}/file", "first\n" + "line\n" * 200_000 * (folder == 0))
    tool = desk.tools[name]
    for looks in (0, 2):
        if looks and name in ("write_file", "edit_file"):
            continue
        signal_to_stop = Later(looks)
        context = ToolContext(tool_call_id="call", tool_name=name, signal=signal_to_stop)
        result = await tool.execute(tool.validate(arguments), context)
        assert result == ToolResult.error("stopped before it was done")
        assert signal_to_stop.looks >= -2, "it went on"
    assert not (desk.root / "new").exists()
    assert (desk.root / "0/file").read_text().startswith("first\n")


async def test_a_listing_ends_when_its_time_is_up(tmp_path: Path) -> None:
    desk = Desk(tmp_path, max_seconds=1e-9)
    desk.put("a/b", "text")
    assert await desk.text("list_files") == (
        "a/\n\n[Not entered after 1e-09 seconds: a. List one of them to see more.]"
    )
    assert (await desk.text("search_files", pattern="nowhere")).endswith(
        "[Stopped after 1e-09 seconds: narrow it down with path, glob or pattern.]"
    )
    desk.workspace.close()


# --- search_files -----------------------------------------------------------------------------


@pytest.fixture
def library(desk: Desk) -> Desk:
    desk.put("src/a.py", "import os\n\ndef load(path):\n    return os.open(path)\r\n")
    desk.put("src/b.ts", "function load() {}\n")
    desk.put("notes.md", "How to Load: see load()\n")
    desk.put("image.png", b"\x89PNG\r\n\x1a\nload")
    desk.put("wide.txt", "nothing\nload it".encode("utf-16"))
    desk.put(".git/load", "load\n")
    return desk


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (
            {"pattern": "load"},
            [
                "notes.md:1: How to Load: see load()",
                "wide.txt:2: load it",
                "src/a.py:3: def load(path):",
                "src/b.ts:1: function load() {}",
            ],
        ),
        ({"pattern": "load("}, ["notes.md:1:", "src/a.py:3:", "src/b.ts:1:"]),
        ({"pattern": "Load"}, ["notes.md:1:"]),
        ({"pattern": "LOAD:", "ignore_case": True}, ["notes.md:1:"]),
        ({"pattern": "load", "glob": "*.{py,ts}"}, ["src/a.py:3:", "src/b.ts:1:"]),
        ({"pattern": "load", "path": "src", "glob": "*.py"}, ["src/a.py:3:"]),
        ({"pattern": "load", "path": "src/b.ts"}, ["src/b.ts:1:"]),
        ({"pattern": "load", "path": ".git"}, [".git/load:1:"]),
        ({"pattern": r"^\s+return .*\)$", "regex": True}, ["src/a.py:4:     return os.open(path)"]),
        ({"pattern": r"(def|function) \w+", "regex": True}, ["src/a.py:3:", "src/b.ts:1:"]),
        ({"pattern": r"HOW .o", "regex": True, "ignore_case": True}, ["notes.md:1:"]),
        ({"pattern": "import", "regex": True}, ["src/a.py:1: import os"]),
        ({"pattern": "^$", "regex": True, "path": "src/a.py"}, ["src/a.py:2: ", "src/a.py:5: "]),
    ],
)
async def test_lines_are_found(library: Desk, arguments: dict[str, Any], found: list[str]) -> None:
    lines = (await library.text("search_files", **arguments)).split("\n")
    assert len(lines) == len(found), lines
    assert all(line.startswith(start) for line, start in zip(lines, found, strict=True)), lines


@pytest.mark.slow
@pytest.mark.parametrize("regex", [False, True])
async def test_a_match_is_where_it_is_in_any_case(desk: Desk, regex: bool) -> None:
    """Some characters become two when they are folded, and the place of the match moved."""
    desk.put("file", "İ" * 1_000 + "NeedlE" + "ß" * 1_000 + "\n")
    pattern = "n[e]+dle" if regex else "nEEDLe"
    result = await desk.use("search_files", pattern=pattern, regex=regex, ignore_case=True)
    (match,) = result.details["matches"]
    assert "İNeedlEß" in match["text"]
    assert match["text"].index("NeedlE") == 101


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("ΟΔΟΣ", "οδος"),
        ("οδος", "ΔΟΣ"),
        ("ΣΑΣΑΣ", "σασ"),
        ("İstanbul", "istanbul"),
        ("STRAẞE", "raße"),
    ],
)
async def test_letters_are_found_in_any_case(desk: Desk, text: str, pattern: str) -> None:
    desk.put("file", f"{text}\n")
    assert text in await desk.text("search_files", pattern=pattern, ignore_case=True)


async def test_what_a_search_tells_the_host(library: Desk) -> None:
    result = await library.use("search_files", pattern="import")
    assert result.details == {
        "matches": [{"path": "src/a.py", "line": 1, "text": "import os"}],
        "files": 4,
        "complete": True,
    }
    assert result.narration == "Searched . for import: 1 match"


@pytest.mark.slow
async def test_what_is_not_found_is_told_with_what_may_be_the_reason(library: Desk) -> None:
    assert await library.text("search_files", pattern="qqq") == (
        "[No match in 4 files; 1 binary file left out.]"
    )
    assert await library.text("search_files", pattern="q.*", path="src") == (
        "[No match in 2 files. The pattern was taken as plain text: set regex for a regular "
        "expression.]"
    )
    assert await library.text("search_files", pattern="q.*", path="src", regex=True) == (
        "[No match in 2 files.]"
    )


@pytest.mark.slow
async def test_patterns_that_will_not_do(library: Desk) -> None:
    assert await library.error("search_files", pattern="load(", regex=True) == (
        "'load(' is not a regular expression: missing ), unterminated subpattern at position 4; to "
        "find it as plain text leave regex out"
    )
    assert "is empty" in await library.error("search_files", pattern="")
    assert "line break" in await library.error("search_files", pattern="a\nb")
    assert "half a character" in await library.error("search_files", pattern="\ud800")
    assert "is not a regular expression" in await library.error(
        "search_files", pattern="(" * 5_000 + ")" * 5_000, regex=True
    )
    assert "more than 64" in await library.error("search_files", pattern="x", glob="{a,b}" * 20)
    assert "there is no 'scr'; did you mean 'src'?" in await library.error(
        "search_files", pattern="x", path="scr"
    )


@pytest.mark.slow
async def test_many_matches_are_cut(desk: Desk) -> None:
    desk.put("many", "match\n" * 1_000)
    for number in range(20):
        desk.put(f"some/{number:02}", "match\n" * 30)
    result = await desk.use("search_files", pattern="match")
    lines, note = result.plain_text.split("\n\n")
    found = lines.split("\n")
    assert len(found) == 200
    assert sum(line.startswith("many:") for line in found) == 50
    assert note == (
        "[There is more in many. Stopped at 200 matches: narrow it down with path, glob or "
        "pattern.]"
    )
    assert not result.details["complete"]
    alone = await desk.use("search_files", pattern="match", path="many")
    assert len(alone.details["matches"]) == 200
    by_regex = await desk.use("search_files", pattern="m.tch", regex=True)
    assert by_regex.plain_text == result.plain_text


@pytest.mark.slow
@pytest.mark.parametrize("regex", [False, True])
async def test_long_lines_and_long_files(desk: Desk, regex: bool) -> None:
    """Files are read in blocks, and a match may be anywhere in one."""
    lines = [f"{n} {'é' * 90}" for n in range(1, 20_001)]
    for n in (1, 2_788, 2_789, 2_790, 11_000, 20_000):
        lines[n - 1] += " needle"
    lines.append("y" * 700_000 + "needle" + "z" * 700_000)
    desk.put("file", "\n".join([*lines, "needle at the end"]))
    pattern = "needl[e]" if regex else "needle"
    result = await desk.use("search_files", pattern=pattern, regex=regex)
    found = result.details["matches"]
    assert [match["line"] for match in found] == [
        1,
        2_788,
        2_789,
        2_790,
        11_000,
        20_000,
        20_001,
        20_002,
    ]
    assert found[4]["text"] == lines[10_999]
    assert len(found[6]["text"]) == 302
    assert "yyneedlezz" in found[6]["text"]


@pytest.mark.slow
async def test_a_regular_expression_cannot_stop_the_world(tmp_path: Path) -> None:
    desk = Desk(tmp_path, max_seconds=1.0)
    desk.put("a.txt", "aaa\n")
    desk.put("trap.txt", TRAP)
    desk.put("z.txt", "aaa\n")
    turns = 0
    search = asyncio.ensure_future(desk.use("search_files", pattern=CATASTROPHE, regex=True))
    while not search.done():
        await asyncio.sleep(0.01)
        turns += 1
    result = search.result()
    assert result.plain_text == (
        "a.txt:1: aaa\n\n[Not finished: it took too long, in trap.txt: use a simpler pattern.]"
    )
    assert turns > 5, "the event loop stood still"
    assert searchers() == []
    desk.workspace.close()


WORKER = inspect.getsource(_regex_worker)


def searchers() -> list[int]:
    """The processes that search for us."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            status = (process / "stat").read_text()
            command = (process / "cmdline").read_text()
        except OSError:
            continue
        is_ours = status.rpartition(")")[2].split()[1] == str(os.getpid())
        if is_ours and WORKER in command:
            found.append(int(process.name))
    return found


async def become(number: int) -> list[int]:
    """Wait until that many processes search."""
    end = time.monotonic() + 15
    while True:
        found = searchers()
        if len(found) == number:
            return found
        assert time.monotonic() < end, f"{len(found)} instead of {number} processes search"
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_searching_process_that_is_killed_is_told(desk: Desk) -> None:
    desk.put("trap.txt", TRAP)
    search = asyncio.ensure_future(desk.use("search_files", pattern=CATASTROPHE, regex=True))
    (process,) = await become(1)
    os.killpg(process, signal.SIGKILL)
    result = await search
    assert "[Not finished: the process that searches was killed" in result.plain_text


@pytest.mark.slow
def test_the_searching_process_does_not_outlive_its_limit() -> None:
    """Also when nobody is left to kill it."""
    command = [sys.executable, "-I", "-S", "-c", WORKER, "1", "exact", "10"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        write_frame(process.stdin, CATASTROPHE.encode())
        assert read_frame(process.stdout) == b""
        write_frame(process.stdin, TRAP.encode())
        assert read_frame(process.stdout) is None
        assert process.wait(timeout=60) < 0


def test_the_searching_process_answers_in_frames() -> None:
    requests, answers = BytesIO(), BytesIO()
    for frame in (b"b+", b"abb\nx\nb", "ü\nüb".encode(), b""):
        write_frame(requests, frame)
    requests.write(b"\x08\0\0\0cut")
    requests.seek(0)
    serve(requests, answers, ignore_case=False, limit=1)
    answers.seek(0)
    assert read_frame(answers) == b""
    assert read_frame(answers) == b"\0\0\0\0\1\0\0\0"
    assert read_frame(answers) == b"\1\0\0\0\1\0\0\0"
    assert read_frame(answers) == b""
    assert read_frame(answers) is None


# --- in a run ---------------------------------------------------------------------------------


async def test_edits_of_one_batch_are_all_done(desk: Desk) -> None:
    file = desk.put("list.txt", "".join([f"<{n}>\n" for n in range(20)]))
    calls = [call("edit_file", path="list.txt", old=f"<{n}>", new=f"done {n}") for n in range(20)]
    stream = ScriptedStream([calls, call("read_file", path="list.txt"), "Done."])
    config = LoopConfig(stream=stream, tools=list(desk.tools.values()))
    result = await run("Do it.", AgentContext(), config)
    assert result.text == "Done."
    results = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    assert not any(message.is_error for message in results)
    assert file.read_text() == "".join([f"done {n}\n" for n in range(20)])
    assert os.listdir(desk.root) == ["list.txt"]


async def test_errors_reach_the_model_in_plain_words(desk: Desk) -> None:
    stream = ScriptedStream([call("read_file", path="../x"), "Sorry."])
    config = LoopConfig(stream=stream, tools=list(desk.tools.values()))
    result = await run("Do it.", AgentContext(), config)
    (message,) = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    assert message.is_error
    assert message.plain_text.startswith("'../x' may lead out of the workspace: ")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["token", "task"])
async def test_a_run_is_cancelled_in_the_middle_of_a_search(desk: Desk, how: str) -> None:
    desk.put("trap.txt", TRAP)
    file = desk.put("written.txt", "old")
    stream = ScriptedStream(
        [
            [
                call("search_files", pattern=CATASTROPHE, regex=True),
                call("write_file", path="written.txt", content="new" * 100_000),
                call("list_files"),
            ]
        ]
    )
    token = CancellationToken()

    config = LoopConfig(stream=stream, tools=list(desk.tools.values()))
    task = asyncio.ensure_future(run("Do it.", AgentContext(), config, token))
    await become(1)
    start = time.monotonic()
    if how == "token":
        token.cancel()
    else:
        task.cancel()
    with pytest.raises(RunAborted if how == "token" else asyncio.CancelledError):
        await task
    assert time.monotonic() - start < 15, "it waited for the regular expression"
    await become(0)  # a task that is cancelled does not wait for its threads
    assert left_behind() == 0
    assert file.read_text() in ("old", "new" * 100_000)
    assert sorted(os.listdir(desk.root)) == ["trap.txt", "written.txt"]


@pytest.mark.slow
def test_nothing_is_left_with_a_token_after_a_search(desk: Desk) -> None:
    desk.put("file", "text\n")
    token = CancellationToken()
    context = ToolContext(tool_call_id="call", tool_name="search_files", signal=token)
    tool = desk.tools["search_files"]
    arguments = {"pattern": "t.xt", "regex": True}
    assert not asyncio.run(tool.execute(tool.validate(arguments), context)).is_error
    assert not token.has_subscribers
    assert searchers() == []
