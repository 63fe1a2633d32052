"""What is in the wheel and in the source distribution, and that the wheel works on its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import msgspec
import pytest

from clark_agent import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
STEM = f"clark_agent-{__version__}"

WHEEL = [
    "clark_agent/*.py",
    "clark_agent/py.typed",
    "clark_agent/view/static/*.css",
    "clark_agent/view/static/*.html",
    "clark_agent/view/static/*.js",
    f"{STEM}.dist-info/METADATA",
    f"{STEM}.dist-info/RECORD",
    f"{STEM}.dist-info/WHEEL",
    f"{STEM}.dist-info/entry_points.txt",
    f"{STEM}.dist-info/licenses/LICENSE",
    f"{STEM}.dist-info/licenses/NOTICE",
]
SDIST = [
    "src/clark_agent/*.py",
    "src/clark_agent/py.typed",
    "src/clark_agent/view/static/*",
    "benchmarks/*.json",
    "benchmarks/*.md",
    "benchmarks/*.mjs",
    "benchmarks/*.py",
    "docs/*.json",
    "docs/*.md",
    "docs/*.png",
    "docs/*.svg",
    "docs/hooks.py",
    "examples/*.py",
    "examples/compose/*",
    "examples/data/*.txt",
    "scripts/*.py",
    "tests/*.gz",
    "tests/*.jinja",
    "tests/*.json",
    "tests/*.jsonl",
    "tests/*.py",
    "tests/*.sql",
    "tests/mcp/servers/*.txt",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "NOTICE",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    "mkdocs.yml",
    "pyproject.toml",
]
LEFTOVERS = re.compile(
    r"\.(orig|rej|bak|tmp|log|prof|pyc|sw[a-p]|pem|key)$|~$|(^|/)(\.#|#)"
    r"|(^|/)(__pycache__|node_modules|\.env(\..*)?|\.DS_Store|\.[a-z]+_cache|\.venv.*)(/|$)"
)
"""What editors, merges, tools and carelessness leave behind."""

SECRETS = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}|\bgh[pousr]_\w{36}"
    rb"|\bsk-[\w-]{32}|\bAIza[\w-]{35}|\bxox[abp]-[\w-]{20}"
)
"""How private keys and the keys of providers begin."""


def build(target: str, source: Path, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    [built] = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    return folder / STEM


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def unexpected(names: list[str], patterns: list[str]) -> list[str]:
    return [
        name
        for name in names
        if LEFTOVERS.search(name) or not any(fnmatch(name, pattern) for pattern in patterns)
    ]


def unused(names: list[str], patterns: list[str]) -> list[str]:
    return [p for p in patterns if not any(fnmatch(name, p) for name in names)]


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    assert (unexpected(names, WHEEL), unused(names, WHEEL)) == ([], [])
    source = [path.relative_to(ROOT / "src") for path in ROOT.glob("src/clark_agent/**/*.py")]
    assert {name for name in names if name.endswith(".py")} == {p.as_posix() for p in source}
    page = [path.relative_to(ROOT / "src") for path in ROOT.glob("src/clark_agent/view/static/*")]
    assert {"clark_agent/view/static/index.html", *[p.as_posix() for p in page]} <= {*names}


def test_the_sources_are_whole_and_nothing_else(sources: Path) -> None:
    files = [path for path in sources.rglob("*") if path.is_file()]
    names = [path.relative_to(sources).as_posix() for path in files]
    assert (unexpected(names, SDIST), unused(names, SDIST)) == ([], [])


def test_the_sources_have_no_secrets(sources: Path) -> None:
    files = [path for path in sources.rglob("*") if path.is_file()]
    assert [path.name for path in files if SECRETS.search(path.read_bytes())] == []
    assert SECRETS.search(b"key = 'sk-" + b"x" * 32)


def test_the_sources_make_the_same_wheel(sources: Path, wheel: Path, tmp_path: Path) -> None:
    again = build("wheel", sources, tmp_path)
    assert names_in(again) == names_in(wheel)
    assert again.read_bytes() == wheel.read_bytes()


ALONE = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import clark_agent
OF_EXTRAS = (
    "clark_agent.cli.", "clark_agent.durable.temporal", "clark_agent.durable._temporal",
    "clark_agent.run_log._postgres.", "clark_agent.toolkit._http", "clark_agent.mcp._",
    "clark_agent.otel.",
)
assert clark_agent.__file__.startswith(sys.argv[1]), clark_agent.__file__
for module in pkgutil.walk_packages(clark_agent.__path__, "clark_agent."):
    if not module.name.startswith(OF_EXTRAS):
        importlib.import_module(module.name)
from clark_agent.cli import main
main()
"""


def test_installed_with_msgspec_alone_all_but_the_command_line_can_be_imported(
    wheel: Path, tmp_path: Path
) -> None:
    """And what is private to an extra, which is loaded when it is first used."""
    with zipfile.ZipFile(wheel) as archive:  # to install a wheel without scripts is to unpack it
        archive.extractall(tmp_path)
    (tmp_path / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    done = subprocess.run(
        # Without site-packages, the environment and the current directory.
        [sys.executable, "-I", "-S", "-W", "error", "-c", ALONE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("", 2), done.stderr
    missing = "clark-agent: the command line needs click, rich, prompt_toolkit: "
    how = "pip install '.[cli]' in a checkout of clark-agent"
    assert done.stderr == f"{missing}{how}\n"


def git(*arguments: str) -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no clone of the repository")
    done = subprocess.run(
        ["git", "ls-files", "-z", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout.split("\0")[:-1]


def test_nothing_left_over_is_in_the_repository() -> None:
    tracked = git()
    assert "README.md" in tracked
    assert [name for name in tracked if LEFTOVERS.search(name)] == []


def test_nothing_that_is_to_be_ignored_is_in_the_repository() -> None:
    """Such a file is in the clone, but neither in a build nor under the linters."""
    assert git("--cached", "--ignored", "--exclude-standard") == []


@pytest.mark.parametrize(
    "name",
    [
        "src/a.py.orig", "a.rej", "b/c.bak", "d~", "e/.env", ".env.local", "x/.#y", "#y#",
        "a/__pycache__/b.pyc", "tests/.mypy_cache/x", "z/.DS_Store", "t.py.swp", "server.key",
    ],
)  # fmt: skip
def test_what_counts_as_left_over(name: str) -> None:
    assert LEFTOVERS.search(name)
