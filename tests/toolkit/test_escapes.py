"""Ways out of a workspace, all of which must be closed.

Next to the root there is an outside, with a canary in every file. Whatever the tools are told to
do, no canary may come back and nothing outside may change.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clark_agent import AgentTool, ToolContext, ToolResult
from clark_agent.messages import encode_json
from clark_agent.toolkit.files import file_tools
from clark_agent.toolkit.workspace import Workspace, WorkspaceError
from tests.sizes import RACES_WON
from tests.toolkit.commands import unmarked

pytestmark = pytest.mark.soak

CANARY = "CANARY-8d1f"
INSIDE = "inside-3c7a"


class Place:
    """A root and its outside."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.outside = folder / "outside"
        self.make()

    def make(self) -> None:
        for folder in (self.root, self.outside):
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "sub").mkdir(parents=True)
        for file in ("secret.txt", "sub/secret.txt", "canary-only.txt"):
            (self.outside / file).write_text(f"{CANARY}\n")
        for file in ("secret.txt", "sub/secret.txt"):
            (self.root / file).write_text(f"{INSIDE}\n")

    def outside_now(self) -> dict[str, tuple[bytes, int, int]]:
        """Everything outside: contents, times of change, and numbers of links."""
        return {
            str(path): (
                path.read_bytes() if path.is_file() else b"",
                path.stat().st_mtime_ns,
                path.stat().st_nlink,
            )
            for path in [self.outside, *sorted(self.outside.rglob("*"))]
        }

    @contextmanager
    def untouched(self) -> Iterator[None]:
        before = self.outside_now()
        yield
        assert self.outside_now() == before


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def tools_of(workspace: Workspace) -> dict[str, AgentTool]:
    return {tool.name: tool for tool in file_tools(workspace, max_seconds=10)}


def attempts(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Every tool, on a path."""
    return [
        ("read_file", {"path": path}),
        ("list_files", {"path": path}),
        ("search_files", {"path": path, "pattern": "-"}),
        ("write_file", {"path": path, "content": "overwritten"}),
        ("edit_file", {"path": path, "old": "-", "new": "edited", "replace_all": True}),
    ]


async def use(tool: AgentTool, arguments: dict[str, Any]) -> ToolResult:
    context = ToolContext(tool_call_id="call", tool_name=tool.name)
    result = unmarked(await tool.execute(tool.validate(arguments), context))
    assert CANARY.encode() not in encode_json(result), (tool.name, arguments)
    assert "canary-only" not in result.plain_text, (tool.name, arguments)
    return result


async def refused(place: Place, workspace: Workspace, path: str, *kinds: str) -> None:
    """No tool does anything with the path, and each says why."""
    with place.untouched():
        for name, arguments in attempts(path):
            result = await use(tools_of(workspace)[name], arguments)
            assert result.is_error, (name, path, result.plain_text)
            assert result.details["error"] in kinds, (name, path, result)
            assert "Error" not in result.plain_text, "the name of a Python type"


# --- paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../",
        "../outside/secret.txt",
        "./../outside/secret.txt",
        "sub/../../outside/secret.txt",
        "sub/../secret.txt",  # inside in the end, and still refused
        "sub/..",
        "sub/../",
        "sub//..//..//outside",
        "./..",
        "/..",
        "{root}/../outside/secret.txt",
        "{root}/..",
        "{outside}/secret.txt",
        "{outside}",
        "{root}x/secret.txt",
        "/",
        "//",
        "/etc/passwd",
        "//etc/passwd",
        "/proc/self/root/etc/passwd",
        "/proc/self/cwd",
        "/dev/stdin",
        "~",
        "~/.ssh/id_rsa",
    ],
)
async def test_no_path_leads_out(place: Place, path: str) -> None:
    with Workspace(place.root) as workspace:
        given = path.format(root=place.root, outside=place.outside)
        await refused(place, workspace, given, "outside")


@pytest.mark.parametrize(
    "path",
    [
        "..\\outside\\secret.txt",
        "sub\\..\\..\\outside\\secret.txt",
        "..\\",
        "\\etc\\passwd",
        "C:\\Windows",
        "\0",
        "../\0",
        "sub\0/../../outside/secret.txt",
        "{outside}/secret.txt\0.txt",
        "",
        "\ud800",
        "../\udcff",
        "x" * 256,
        "x/" * 200 + "../" * 201 + "outside",
        "../" * 2_000 + "etc/passwd",
        "x" * 100_000,
    ],
)
async def test_what_is_no_path_leads_nowhere(place: Place, path: str) -> None:
    with Workspace(place.root) as workspace:
        given = path.format(root=place.root, outside=place.outside)
        await refused(place, workspace, given, "invalid", "outside")


@pytest.mark.parametrize("path", ["%2e%2e/outside", "．．/outside", "..%2foutside", "…", "... /x"])
async def test_what_only_looks_like_a_way_up_is_a_name(place: Place, path: str) -> None:
    with Workspace(place.root) as workspace, place.untouched():
        result = await use(
            tools_of(workspace)["write_file"], {"path": f"{path}/new.txt", "content": "x"}
        )
        assert not result.is_error
        assert (place.root / path / "new.txt").read_text() == "x"


# --- links ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("../outside/secret.txt", "link"),
        ("{outside}/secret.txt", "link"),
        ("../outside", "link/secret.txt"),
        ("../outside", "link"),
        ("../outside", "link/"),
        ("../outside", "link/new/file.txt"),
        ("../outside/new.txt", "link"),  # which is not there
        ("..", "link/outside/secret.txt"),
        ("secret.txt", "link"),  # inside, and still not followed
        ("sub", "link/secret.txt"),
        (".", "link/secret.txt"),
        ("link", "link"),
        ("/proc/self/root", "link/etc/passwd"),
        ("/proc/self/cwd", "link"),
        ("/etc", "link/passwd"),
    ],
)
async def test_a_symbolic_link_is_not_followed(place: Place, target: str, path: str) -> None:
    (place.root / "link").symlink_to(target.format(outside=place.outside))
    with Workspace(place.root) as workspace, place.untouched():
        for name, arguments in attempts(path):
            result = await use(tools_of(workspace)[name], arguments)
            if name == "list_files" and path in ("link", "link/"):
                assert result.plain_text == "link (a symbolic link, not followed)"
            elif path.endswith("/") and name in ("read_file", "write_file", "edit_file"):
                assert result.details == {"error": "is_folder"}
            else:
                assert result.is_error, (name, path)
                assert result.details == {"error": "symlink"}, (name, path)
                assert "links are not followed, wherever they point" in result.plain_text
        assert (place.root / "link").is_symlink()


async def test_links_are_told_but_not_walked(place: Place) -> None:
    (place.root / "folder").symlink_to(place.outside)
    (place.root / "sub" / "file").symlink_to(place.outside / "secret.txt")
    with Workspace(place.root) as workspace:
        tools = tools_of(workspace)
        listed = await use(tools["list_files"], {})
        assert listed.plain_text.splitlines() == [
            "folder (a symbolic link, not followed)",
            "secret.txt (12 bytes)",
            "sub/",
            "sub/file (a symbolic link, not followed)",
            "sub/secret.txt (12 bytes)",
        ]
        searched = await use(tools["search_files"], {"pattern": "-"})
        assert [match["path"] for match in searched.details["matches"]] == [
            "secret.txt",
            "sub/secret.txt",
        ]


async def test_a_hard_link_to_the_outside_is_neither_read_nor_replaced(place: Place) -> None:
    os.link(place.outside / "secret.txt", place.root / "link")
    with Workspace(place.root) as workspace, place.untouched():
        tools = tools_of(workspace)
        for name, arguments in attempts("link"):
            result = await use(tools[name], arguments)
            if name != "list_files":
                assert result.details == {"error": "hard_link"}, name
        searched = await use(tools["search_files"], {"pattern": "-"})
        assert "[Not searched: 'link' has 2 hard links" in searched.plain_text


async def test_hard_links_can_be_allowed_and_a_write_still_changes_only_one_name(
    place: Place,
) -> None:
    os.link(place.outside / "secret.txt", place.root / "link")
    with Workspace(place.root, hard_links=True) as workspace:
        assert workspace.read("link") == f"{CANARY}\n".encode()
        assert not workspace.write("link", b"new")
    assert (place.outside / "secret.txt").read_text() == f"{CANARY}\n"
    assert (place.root / "link").read_text() == "new"


# --- what is no file --------------------------------------------------------------------------


async def test_a_pipe_is_not_waited_for(place: Place) -> None:
    os.mkfifo(place.root / "pipe")
    with Workspace(place.root) as workspace:
        tools = tools_of(workspace)
        for name, arguments in attempts("pipe"):
            result = await use(tools[name], arguments)
            if name == "list_files":
                assert result.plain_text == "pipe (no regular file)"
            else:
                assert result.details == {"error": "special"}, name
        searched = await use(tools["search_files"], {"pattern": "-"})
        assert len(searched.details["matches"]) == 2


@pytest.mark.slow
async def test_a_socket_is_no_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.root)  # the path of a socket may not be long
    with socket.socket(socket.AF_UNIX) as server, Workspace(place.root) as workspace:
        server.bind("door")
        for name, arguments in attempts("door"):
            result = await use(tools_of(workspace)[name], arguments)
            assert name == "list_files" or result.details == {"error": "special"}, name


async def test_devices_and_the_kernels_file_systems_are_not_read() -> None:
    """This root has devices in it, and file systems that are mounted below."""
    with Workspace("/dev", read_only=True) as workspace:
        tools = tools_of(workspace)
        assert sorted(tools) == ["list_files", "read_file", "search_files"]
        for path in ("zero", "null", "random"):
            for name in ("read_file", "search_files"):
                result = await use(tools[name], dict(attempts(path))[name])
                assert result.details == {"error": "special"}, (name, path)
        for name in tools:
            result = await use(tools[name], dict(attempts("pts/ptmx"))[name])
            assert result.details == {"error": "special"}, name
            assert "'pts' belongs to a file system of the kernel's" in result.plain_text
        assert not (await use(tools["list_files"], {"path": "shm"})).is_error


# --- the root itself --------------------------------------------------------------------------


async def test_a_root_that_is_renamed_stays_the_root(place: Place) -> None:
    with Workspace(place.root, protected=["log.jsonl"]) as workspace:
        moved = place.root.rename(place.root.with_name("moved"))
        tools = tools_of(workspace)
        read = await use(tools["read_file"], {"path": "secret.txt"})
        assert read.plain_text == INSIDE
        # Something else has its name now: a link to the outside.
        place.root.symlink_to(place.outside)
        with place.untouched():
            read = await use(tools["read_file"], {"path": "secret.txt"})
            assert read.plain_text == INSIDE
            read = await use(tools["read_file"], {"path": f"{place.root}/secret.txt"})
            assert read.plain_text == INSIDE
            await use(tools["write_file"], {"path": "new.txt", "content": "x"})
            assert (await use(tools["list_files"], {})).details["complete"]
            log = await use(tools["write_file"], {"path": "log.jsonl", "content": "x"})
            assert log.details == {"error": "protected"}
        assert (moved / "new.txt").read_text() == "x"


async def test_a_root_that_is_removed_has_nothing(place: Place) -> None:
    with Workspace(place.root) as workspace:
        shutil.rmtree(place.root)
        place.root.symlink_to(place.outside)
        await refused(place, workspace, "secret.txt", "not_found")
        await refused(place, workspace, "new/secret.txt", "not_found")


# --- what is protected ------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    "spelling", ["log.jsonl", "{root}/log.jsonl", "./log.jsonl", "sub/../log.jsonl"]
)
async def test_a_protected_file_is_out_of_reach(place: Place, spelling: str, exists: bool) -> None:
    log = place.root / "log.jsonl"
    if exists:
        log.write_text(CANARY)
    with Workspace(place.root, protected=[spelling.format(root=place.root)]) as workspace:
        for path in ("log.jsonl", "./log.jsonl", f"{place.root}/log.jsonl", "LOG.jsonl"):
            await refused(place, workspace, path, "protected")
        log.write_text(CANARY)  # it may come into being later
        await refused(place, workspace, "log.jsonl", "protected")
        tools = tools_of(workspace)
        listed = await use(tools["list_files"], {})
        assert "log" not in listed.plain_text
        searched = await use(tools["search_files"], {"pattern": "-"})
        assert searched.details["complete"]
        missing = await use(tools["read_file"], {"path": "log.json"})
        assert "jsonl" not in missing.plain_text
    assert log.read_text() == CANARY


async def test_another_name_of_a_protected_file_is_protected(place: Place) -> None:
    log = place.outside / "log.jsonl"
    os.link(place.outside / "secret.txt", log)
    os.link(log, place.root / "harmless.txt")
    with Workspace(place.root, protected=[log], hard_links=True) as workspace:
        await refused(place, workspace, "harmless.txt", "protected")
        listed = await use(tools_of(workspace)["list_files"], {})
        assert "harmless" not in listed.plain_text


async def test_a_protected_folder_is_out_of_reach_with_everything_below(place: Place) -> None:
    runs = place.root / "runs"
    with Workspace(place.root, protected=["runs"]) as workspace:
        await refused(place, workspace, "runs", "protected")
        await refused(place, workspace, "runs/a/b.jsonl", "protected")
        assert not runs.exists()
        (runs / "a").mkdir(parents=True)
        (runs / "a" / "b.jsonl").write_text(CANARY)
        await refused(place, workspace, "runs", "protected")
        await refused(place, workspace, "runs/a", "protected")
        await refused(place, workspace, "runs/a/b.jsonl", "protected")
        await refused(place, workspace, "runs/a/new.jsonl", "protected")
        tools = tools_of(workspace)
        assert "runs" not in (await use(tools["list_files"], {})).plain_text
        assert (await use(tools["search_files"], {"pattern": "-"})).details["complete"]
    assert (runs / "a" / "b.jsonl").read_text() == CANARY
    assert os.listdir(runs / "a") == ["b.jsonl"]


async def test_a_protected_file_in_a_folder_that_a_tool_makes(place: Place) -> None:
    with Workspace(place.root, protected=["new/runs/log.jsonl"]) as workspace:
        tools = tools_of(workspace)
        await refused(place, workspace, "new/runs/log.jsonl", "protected", "not_found")
        written = await use(tools["write_file"], {"path": "new/runs/notes.txt", "content": "x"})
        assert not written.is_error
        await refused(place, workspace, "new/runs/log.jsonl", "protected")
        assert os.listdir(place.root / "new/runs") == ["notes.txt"]


# --- races ------------------------------------------------------------------------------------


SWAP_FOR_EVER = """
import ctypes, os, sys
rename = ctypes.CDLL(None, use_errno=True).renameat2
pairs = [name.encode() for name in sys.argv[1:]]
print("ready", flush=True)
while True:
    for path in pairs:
        if rename(-100, path, -100, path + b".other", 2):  # 2 exchanges the two
            sys.exit(os.strerror(ctypes.get_errno()))
"""


@contextmanager
def swapped_for_ever(*paths: Path, target: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that puts links in the places of these, and back, as fast as it can."""
    for path in paths:
        path.with_name(f"{path.name}.other").symlink_to(target / path.name)
    command = [sys.executable, "-c", SWAP_FOR_EVER, *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


RACES: list[Callable[[Workspace], object]] = [
    lambda workspace: workspace.read("sub/secret.txt"),
    lambda workspace: workspace.read("secret.txt"),
    lambda workspace: [
        workspace.read(entry.path)
        for folder in workspace.walk()
        for entry in folder.entries
        if entry.kind == "file" and "secret" in entry.path
    ],
    lambda workspace: workspace.scan("sub"),
    lambda workspace: workspace.write("sub/new.txt", b"written"),
    lambda workspace: workspace.write("sub/new/er/file.txt", b"written"),
    lambda workspace: workspace.write("written.txt", b"written"),
    lambda workspace: workspace.update("sub/secret.txt", lambda data: data),
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_link_that_is_swapped_in_is_never_followed(place: Place) -> None:
    outcomes: Counter[str] = Counter()
    (place.root / "written.txt").write_text("old")
    (place.outside / "written.txt").write_text(CANARY)
    paths = [place.root / name for name in ("sub", "secret.txt", "written.txt")]
    with (
        place.untouched(),
        Workspace(place.root) as workspace,
        swapped_for_ever(*paths, target=place.outside) as swapping,
    ):
        # Until it was a race, which both have won a good many times.
        while min(outcomes["done"], outcomes["symlink"]) < RACES_WON:
            assert swapping.poll() is None
            for race in RACES:
                try:
                    told = repr(race(workspace))
                except WorkspaceError as error:
                    outcomes[error.kind] += 1
                else:
                    outcomes["done"] += 1
                    assert CANARY not in told
    # A folder may be looked at for the reason when it has become one again.
    assert not set(outcomes) - {"done", "symlink", "not_folder", "failed"}, outcomes


# --- any path ---------------------------------------------------------------------------------

NAMES = [
    "",
    ".",
    "..",
    "...",
    ".. ",
    " ..",
    "~",
    "~root",
    "sub",
    "secret.txt",
    "outside",
    "root",
    "link",
    "folder-link",
    "inner-link",
    "hard",
    "pipe",
    "log.jsonl",
    "new",
    "%2e%2e",
    "．．",
    "..\\",
    "\\..",
    "\0",
    "a\nb",
    "\udcff",
    "\u202e..",
    "x" * 255,
    "x" * 256,
    "proc/self/root",
    "proc/self/fd/0",
    "{root}",
    "{outside}",
]


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("any"))


@settings(max_examples=150)
@given(
    names=st.lists(st.sampled_from(NAMES) | st.text(max_size=4), min_size=1, max_size=6),
    separator=st.sampled_from(["/", "/", "//", "/./", "\\"]),
    start=st.sampled_from(["", "", "/", "{root}/", "{root}/../", "//", "/proc/self/cwd/"]),
    end=st.sampled_from(["", "", "/", "/.", "/..", " "]),
)
@example(names=["outside", "secret.txt"], separator="/", start="{root}/../", end="")
async def test_every_path_is_inside_or_refused(
    shared_place: Place, names: list[str], separator: str, start: str, end: str
) -> None:
    place = shared_place
    place.make()
    (place.root / "link").symlink_to(place.outside / "secret.txt")
    (place.root / "folder-link").symlink_to(place.outside)
    (place.root / "inner-link").symlink_to("sub")
    os.link(place.outside / "secret.txt", place.root / "hard")
    os.mkfifo(place.root / "pipe")
    (place.root / "log.jsonl").write_text(CANARY)
    path = start + separator.join(names) + end
    path = path.replace("{root}", str(place.root)).replace("{outside}", str(place.outside))
    with Workspace(place.root, protected=["log.jsonl"]) as workspace, place.untouched():
        tools = tools_of(workspace)
        for name, arguments in attempts(path):
            result = await use(tools[name], arguments)
            if not result.is_error and name == "write_file":
                inside = place.root / workspace.name_of(path)
                assert inside.resolve().is_relative_to(place.root)
                assert not inside.is_symlink()
        searched = await use(tools["search_files"], {"pattern": "-"})
        assert not searched.is_error
    assert (place.root / "log.jsonl").read_text() == CANARY
    assert (place.root / "link").is_symlink()
