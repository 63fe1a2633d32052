"""A workspace: what it opens, how it writes, and what it says when it does not."""

from __future__ import annotations

import gc
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import ConfigError
from clark_agent.toolkit import _descent
from clark_agent.toolkit.workspace import (
    Entry,
    Folder,
    Workspace,
    WorkspaceError,
    shown,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    with Workspace(root) as workspace:
        yield workspace


def refusal(workspace: Workspace, path: str) -> tuple[str, str]:
    """Why a file is not read."""
    with pytest.raises(WorkspaceError) as caught:
        workspace.read(path)
    return caught.value.kind, str(caught.value)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd" if os.path.exists("/proc/self/fd") else "/dev/fd"))


# --- the root ---------------------------------------------------------------------------------


def test_a_root_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"the folder .*missing.* does not exist: create it first"
    ):
        Workspace(tmp_path / "missing")
    with pytest.raises(ConfigError, match="file' is not a folder"):
        Workspace(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be a workspace"):
        Workspace("a\0b")


@pytest.mark.parametrize("root", ["/", "//", "/tmp/..", "/proc/self/root"])
def test_the_root_of_everything_is_no_workspace(root: str) -> None:
    before = descriptors()
    with pytest.raises(ConfigError, match="nothing is outside of it"):
        Workspace(root)
    assert descriptors() == before


def test_settings_that_make_no_sense(root: Path) -> None:
    with pytest.raises(ConfigError, match="protected must be a list of paths"):
        Workspace(root, protected="run.jsonl")
    with pytest.raises(ConfigError, match="protected must be a list of paths"):
        Workspace(root, protected=root / "run.jsonl")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_read_bytes"):
        Workspace(root, max_read_bytes=0)
    for whole in (".", root, f"{root}/"):
        with pytest.raises(ConfigError, match="it is the whole workspace"):
            Workspace(root, protected=[whole])


def test_a_system_without_descriptors_for_folders_is_told_plainly(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "supports_dir_fd", set())
    with pytest.raises(
        ConfigError, match="needs a system that can open files relative to a folder"
    ):
        Workspace(root)


def test_after_closing_nothing_is_opened(root: Path) -> None:
    (root / "a").write_text("x")
    workspace = Workspace(root)
    file = workspace.open("a")
    workspace.close()
    workspace.close()
    assert refusal(workspace, "a") == ("failed", "the workspace is closed")
    assert file.read() == b"x"
    file.close()


def test_a_forgotten_workspace_is_closed(root: Path) -> None:
    gc.collect()  # what others have forgotten does not count
    before = descriptors()
    workspace = Workspace(root)
    assert descriptors() == before + 1
    del workspace
    gc.collect()
    assert descriptors() == before


def test_it_says_what_it_is(root: Path) -> None:
    with Workspace(root) as one, Workspace(root, read_only=True) as other:
        assert repr(one) == f"<Workspace {root}>"
        assert repr(other) == f"<Workspace {root} (read-only)>"


# --- paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/b.txt", "a/b.txt"),
        ("./a/b.txt", "a/b.txt"),
        ("a//./b.txt", "a/b.txt"),
        ("{root}/a/b.txt", "a/b.txt"),
        ("{link}/a/b.txt", "a/b.txt"),
        ("{root}//./a/b.txt", "a/b.txt"),
        (".", "."),
        ("./", "."),
        ("{root}", "."),
        ("a/", "a"),
        ("~a", "~a"),
        ("...", "..."),
        ("-rf", "-rf"),
        ("a\nb", "a\nb"),
        (" ", " "),
        ("日本語/ü.txt", "日本語/ü.txt"),
    ],
)
def test_paths_that_lead_somewhere(tmp_path: Path, root: Path, path: str, name: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    with Workspace(link) as workspace:
        assert workspace.root == root
        given = path.format(root=root, link=link)
        assert workspace.name_of(given) == name
        if name != "." and not path.endswith("/"):
            assert workspace.write(given, b"content")
            assert (root / name).read_bytes() == b"content"
            assert workspace.read(given) == b"content"
            assert workspace.look(given) == Entry(name, "file", 7)


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("", "invalid", "the path is empty: the workspace's root is '.'"),
        ("a\0b", "invalid", r"'a\x00b' has a NUL character in it"),
        ("a\\b", "invalid", r"'a\b' has a backslash in it: put '/' between the names"),
        ("a\ud800", "invalid", r"'a\ud800' is not valid Unicode"),
        ("x" * 256, "invalid", f"'{'x' * 200}…' has a name in it that is too long"),
        ("ü" * 128, "invalid", f"'{'ü' * 128}' has a name in it that is too long"),
        ("ab/" * 1_500, "invalid", f"'{('ab/' * 67)[:200]}…' is too long"),
        ("a/" * 101, "invalid", f"'{'a/' * 100}…' has more than 100 folders in each other"),
        ("~", "outside", None),
        ("~/x", "outside", None),
        ("../x", "outside", None),
        ("/x", "outside", None),
        (".", "is_folder", "'.' stands for a folder: name a file"),
        ("folder/", "is_folder", "'folder/' stands for a folder: name a file"),
        ("folder", "is_folder", "'folder' is a folder, not a file"),
        ("file/x", "not_folder", "'file' is not a folder"),
        ("folder/filr", "not_found", "there is no 'folder/filr'; did you mean 'folder/file'?"),
        ("floder/file", "not_found", "there is no 'floder'; did you mean 'folder'?"),
        ("qqq", "not_found", "there is no 'qqq': list '.' to see what there is"),
    ],
)
def test_paths_that_will_not_do(
    root: Path, workspace: Workspace, path: str, kind: str, text: str | None
) -> None:
    (root / "folder").mkdir()
    (root / "folder" / "file").write_text("")
    (root / "file").write_text("")
    before = descriptors()
    said = refusal(workspace, path)
    assert said[0] == kind
    assert text is None or said[1] == text
    if kind != "not_found":
        with pytest.raises(WorkspaceError) as caught:
            workspace.write(path, b"")
        assert caught.value.kind == kind
    assert descriptors() == before
    assert sorted(os.listdir(root)) == ["file", "folder"]


@given(st.text())
def test_a_name_is_shown_in_one_line(name: str) -> None:
    text = shown(name)
    assert len(text.splitlines()) <= 1
    assert text.encode().decode() == text


def test_ordinary_names_are_shown_as_they_are() -> None:
    name = "Ünïcode 日本\u3000語 'quoted' \"twice\" (1).txt"
    assert shown(name) == name
    assert shown("a\nb\x1b[0m\udcff\u202e") == "a\\nb\\x1b[0m\\udcff\\u202e"


# --- reading ----------------------------------------------------------------------------------


def test_only_so_much_is_read_as_a_whole(root: Path) -> None:
    (root / "fits").write_bytes(b"x" * 100)
    (root / "large").write_bytes(b"x" * 101)
    with Workspace(root, max_read_bytes=100) as workspace:
        assert workspace.read("fits") == b"x" * 100
        assert refusal(workspace, "large") == (
            "too_large",
            "'large' has more than 100 bytes, which is too large to be taken as a whole",
        )
        with workspace.open("large") as file:
            assert file.read() == b"x" * 101


def test_a_folder_is_told_in_order(root: Path, workspace: Workspace) -> None:
    (root / "b").mkdir()
    (root / "b" / "inner").write_text("1234")
    (root / "a.txt").write_text("12")
    (root / "C").symlink_to("b")
    os.mkfifo(root / "pipe")
    (root / ".clark-agent-0123456789abcdef.tmp").write_text("left by a process that was killed")
    assert workspace.scan() == Folder(
        ".",
        (
            Entry("C", "symlink", 0),
            Entry("a.txt", "file", 2),
            Entry("b", "folder", 0),
            Entry("pipe", "other", 0),
        ),
    )
    assert workspace.scan("b").entries == (Entry("b/inner", "file", 4),)
    assert workspace.look("C") == Entry("C", "symlink", 0)
    assert workspace.look(".") == Entry(".", "folder", 0)


def test_a_very_large_folder_is_cut(
    root: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_descent, "_LARGEST_FOLDER", 5)
    for name in "abcde":
        (root / name).write_text("")
    assert not workspace.scan().is_cut
    (root / "f").write_text("")
    folder = workspace.scan()
    assert len(folder.entries) == 5
    assert folder.is_cut


def test_a_walk_goes_level_by_level(root: Path, workspace: Workspace) -> None:
    for path in ("b/deep/deeper", "a/deep", "skipped/inner", "with\\backslash"):
        (root / path).mkdir(parents=True)
    (root / "loop").symlink_to(".")
    walked = list(workspace.walk(enter=lambda entry: entry.path != "skipped"))
    assert [folder.path for folder in walked] == [
        ".",
        "a",
        "b",
        "with\\backslash",
        "a/deep",
        "b/deep",
        "b/deep/deeper",
    ]
    problems = [folder for folder in walked if folder.problem is not None]
    assert [folder.path for folder in problems] == ["with\\backslash"]
    with pytest.raises(WorkspaceError, match="there is no 'missing'"):
        list(workspace.walk("missing"))


def test_a_folder_that_goes_away_during_a_walk_is_a_problem(
    root: Path, workspace: Workspace
) -> None:
    (root / "a").mkdir()
    (root / "b").mkdir()
    walk = workspace.walk()
    assert [entry.path for entry in next(walk).entries] == ["a", "b"]
    (root / "a").rmdir()
    first, second = walk
    assert first.problem is not None
    assert first.problem.kind == "not_found"
    assert second == Folder("b", ())


def test_very_deep_trees_are_walked_as_far_as_paths_go(root: Path, workspace: Workspace) -> None:
    here = os.open(root, os.O_RDONLY)
    for _ in range(105):
        os.mkdir("d", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    walked = list(workspace.walk())
    assert len(walked) == 102
    assert walked[-1].problem is not None
    assert walked[-1].problem.kind == "invalid"


# --- writing ----------------------------------------------------------------------------------


def test_a_new_file_and_its_folders_are_made(root: Path, workspace: Workspace) -> None:
    mask = os.umask(0o027)
    try:
        assert workspace.write("a/b/c.txt", b"new")
    finally:
        os.umask(mask)
    assert (root / "a/b/c.txt").read_bytes() == b"new"
    assert stat.S_IMODE((root / "a/b/c.txt").stat().st_mode) == 0o640
    assert os.listdir(root / "a/b") == ["c.txt"]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755, 0o666, 0o200])
def test_a_replaced_file_keeps_its_mode_and_owner(
    root: Path, workspace: Workspace, mode: int
) -> None:
    file = root / "file"
    file.write_text("old")
    file.chmod(mode)
    if os.geteuid() == 0:
        os.chown(file, 12_345, 54_321)
    before = file.stat()
    assert not workspace.write("file", b"new")
    after = file.stat()
    assert file.read_bytes() == b"new"
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert after.st_ino != before.st_ino, "it was written in place"


def test_a_file_that_is_marked_read_only_stays(root: Path, workspace: Workspace) -> None:
    (root / "file").write_text("old")
    (root / "file").chmod(0o444)
    with pytest.raises(WorkspaceError, match="'file' is read-only"):
        workspace.write("file", b"new")
    with pytest.raises(WorkspaceError, match="'file' is read-only"):
        workspace.update("file", lambda data: b"new")
    assert (root / "file").read_text() == "old"


def test_a_read_only_workspace_writes_nothing(root: Path) -> None:
    (root / "file").write_text("old")
    with Workspace(root, read_only=True) as workspace:
        for write in (
            lambda: workspace.write("file", b"new"),
            lambda: workspace.write("a/other", b"new"),
            lambda: workspace.update("file", lambda data: b"new"),
        ):
            with pytest.raises(WorkspaceError, match="the workspace is read-only") as caught:
                write()
            assert caught.value.kind == "read_only"
    assert os.listdir(root) == ["file"]
    assert (root / "file").read_text() == "old"


def test_a_folder_is_not_replaced_by_a_file(root: Path, workspace: Workspace) -> None:
    (root / "folder").mkdir()
    with pytest.raises(WorkspaceError, match="'folder' is a folder, not a file"):
        workspace.write("folder", b"")
    (root / "folder" / "file").write_text("old")
    with pytest.raises(WorkspaceError, match="'folder/file' is not a folder"):
        workspace.write("folder/file/x", b"")
    assert os.listdir(root / "folder") == ["file"]
    assert (root / "folder" / "file").read_text() == "old"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    root: Path, workspace: Workspace
) -> None:
    """As on a full disk: the process may not write files longer than that."""
    (root / "file").write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(WorkspaceError, match="'file': File too large") as caught:
            workspace.write("file", b"x" * 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.kind == "failed"
    assert (root / "file").read_text() == "old"
    assert os.listdir(root) == ["file"]


def test_a_change_that_raises_leaves_the_file(root: Path, workspace: Workspace) -> None:
    (root / "file").write_text("old")

    def fail(data: bytes) -> bytes:
        raise ZeroDivisionError(data.decode())

    with pytest.raises(ZeroDivisionError, match="old"):
        workspace.update("file", fail)
    assert (root / "file").read_text() == "old"
    assert os.listdir(root) == ["file"]
    workspace.update("file", lambda data: data + b"er")  # and it is not locked
    assert (root / "file").read_text() == "older"


def test_no_change_of_many_at_once_is_lost(root: Path) -> None:
    (root / "count").write_text("0")
    with (
        Workspace(root) as one,
        Workspace(root) as other,
        ThreadPoolExecutor(8) as threads,
    ):
        for number in range(200):
            workspace = one if number % 2 else other
            threads.submit(workspace.update, "count", lambda data: b"%d" % (int(data) + 1))
    assert (root / "count").read_text() == "200"
    assert os.listdir(root) == ["count"]
    gc.collect()
    assert not _descent._locks, "locks of files that nobody writes are kept"


def test_writers_of_different_files_do_not_wait_for_each_other(
    root: Path, workspace: Workspace
) -> None:
    (root / "slow").write_text("")

    def slow(data: bytes) -> bytes:
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(workspace.write, "quick", b"done").result(timeout=20)
        return b"done"

    workspace.update("slow", slow)
    assert (root / "slow").read_text() == (root / "quick").read_text() == "done"


def test_many_threads_make_the_same_folders(root: Path, workspace: Workspace) -> None:
    with ThreadPoolExecutor(8) as threads:
        written = [threads.submit(workspace.write, f"a/b/c/{n}", b"") for n in range(40)]
    assert all(each.result() for each in written)
    assert len(os.listdir(root / "a/b/c")) == 40


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_file() -> None:
    """What must hold is written down in the driver."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.toolkit.killed_writers", "60"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    kills, versions, left = map(int, ran.stdout.split())
    assert kills == 60
    assert versions > 20, "the writers hardly wrote"
    assert left <= kills


def test_nothing_stays_open(root: Path, workspace: Workspace) -> None:
    before = descriptors()
    workspace.write("a/b/c", b"x")
    for _ in range(20):
        workspace.read("a/b/c")
        workspace.write("a/b/c", b"y")
        workspace.update("a/b/c", bytes)
        list(workspace.walk())
        refusal(workspace, "a/b/missing")
        refusal(workspace, "a/b/c/d")
    assert descriptors() == before
