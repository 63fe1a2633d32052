"""The public API under type checkers, configured as a user's project would be.

tests/typing/api.py must check clean. In tests/typing/errors.py mypy must report each line
marked `# E: <code>`, with that code, and nothing else.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
API = ROOT / "tests" / "typing" / "api.py"
ERRORS = ROOT / "tests" / "typing" / "errors.py"

MARK = re.compile(r"# E: (?P<code>[a-z-]+)$")


def run_tool(*args: str | Path, cwd: Path) -> str:
    """Run a module of this interpreter; exit status 1 means that it has found something."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a mistake in its third line."""
    path = tmp_path_factory.mktemp("project") / "wrong.py"
    path.write_text("import clark_agent\n\nx: int = clark_agent.__version__\n")
    return path


@pytest.fixture(scope="module")
def mypy(wrong: Path) -> dict[Path, dict[int, list[str]]]:
    """Per file and line, the codes that mypy reports: strict, without this project's settings."""
    output = run_tool(
        "mypy",
        "--config-file=",
        "--strict",
        "--output=json",
        "--no-error-summary",
        f"--cache-dir={ROOT / '.mypy_cache' / 'typing'}",
        *(API, ERRORS, wrong),
        cwd=wrong.parent,
    )
    found: dict[Path, dict[int, list[str]]] = {API: {}, ERRORS: {}, wrong: {}}
    for row in filter(None, output.splitlines()):
        diagnostic = json.loads(row)
        if diagnostic["severity"] == "error":
            lines = found[Path(wrong.parent, diagnostic["file"]).resolve()]
            lines.setdefault(diagnostic["line"], []).append(diagnostic["code"])
    return found


@pytest.fixture(scope="module")
def basedpyright(wrong: Path) -> list[tuple[Path, int]]:
    """The files and lines in which basedpyright finds something."""
    config = {
        "include": [str(API), str(wrong)],
        "typeCheckingMode": "strict",
        "pythonVersion": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    (wrong.parent / "pyrightconfig.json").write_text(json.dumps(config))
    output = json.loads(
        run_tool("basedpyright", "--outputjson", "--pythonpath", sys.executable, cwd=wrong.parent)
    )
    assert output["summary"]["filesAnalyzed"] == 2
    return [
        (Path(row["file"]), row["range"]["start"]["line"] + 1)
        for row in output["generalDiagnostics"]
    ]


def marked_errors(path: Path) -> dict[int, list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {
        number: [mark["code"]]
        for number, line in enumerate(lines, start=1)
        if (mark := MARK.search(line))
    }


def test_api_is_clean_under_mypy(mypy: dict[Path, dict[int, list[str]]]) -> None:
    assert mypy[API] == {}


def test_api_is_clean_under_basedpyright_which_sees_a_mistake_beside_it(
    basedpyright: list[tuple[Path, int]], wrong: Path
) -> None:
    assert basedpyright == [(wrong, 3)]


def test_mistakes_are_caught(mypy: dict[Path, dict[int, list[str]]]) -> None:
    expected = marked_errors(ERRORS)
    assert expected, "no line is marked"
    assert mypy[ERRORS] == expected


def test_a_mistake_in_the_api_file_would_be_seen(
    mypy: dict[Path, dict[int, list[str]]], wrong: Path
) -> None:
    assert mypy[wrong] == {3: ["assignment"]}


@pytest.mark.parametrize("path", [API, ERRORS], ids=lambda path: path.name)
def test_typing_files_are_valid_python(path: Path) -> None:
    compile(path.read_text(encoding="utf-8"), path, "exec")
