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


def mypy_errors(path: Path, cwd: Path) -> dict[int, list[str]]:
    """Per line, the codes that mypy reports: strict, without this project's configuration."""
    output = run_tool(
        "mypy",
        "--config-file=",
        "--strict",
        "--output=json",
        "--no-error-summary",
        f"--cache-dir={ROOT / '.mypy_cache' / 'typing'}",
        path,
        cwd=cwd,
    )
    found: dict[int, list[str]] = {}
    for row in filter(None, output.splitlines()):
        diagnostic = json.loads(row)
        if diagnostic["severity"] == "error":
            assert Path(cwd, diagnostic["file"]).resolve() == path, diagnostic
            found.setdefault(diagnostic["line"], []).append(diagnostic["code"])
    return found


def marked_errors(path: Path) -> dict[int, list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {
        number: [mark["code"]]
        for number, line in enumerate(lines, start=1)
        if (mark := MARK.search(line))
    }


def basedpyright_report(path: Path, cwd: Path) -> list[str]:
    config = {
        "include": [str(path)],
        "typeCheckingMode": "strict",
        "pythonVersion": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    (cwd / "pyrightconfig.json").write_text(json.dumps(config))
    output = json.loads(
        run_tool("basedpyright", "--outputjson", "--pythonpath", sys.executable, cwd=cwd)
    )
    assert output["summary"]["filesAnalyzed"] == 1
    return [
        f"{row['range']['start']['line'] + 1}: {row['message']}"
        for row in output["generalDiagnostics"]
    ]


def test_api_is_clean_under_mypy(tmp_path: Path) -> None:
    assert mypy_errors(API, tmp_path) == {}


def test_api_is_clean_under_basedpyright(tmp_path: Path) -> None:
    assert basedpyright_report(API, tmp_path) == []


def test_mistakes_are_caught(tmp_path: Path) -> None:
    expected = marked_errors(ERRORS)
    assert expected, "no line is marked"
    assert mypy_errors(ERRORS, tmp_path) == expected


def test_a_mistake_in_the_api_file_would_be_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import clark_agent\n\nx: int = clark_agent.__version__\n")
    assert mypy_errors(wrong, tmp_path) == {3: ["assignment"]}
    assert len(basedpyright_report(wrong, tmp_path)) == 1


@pytest.mark.parametrize("path", [API, ERRORS], ids=lambda path: path.name)
def test_typing_files_are_valid_python(path: Path) -> None:
    compile(path.read_text(encoding="utf-8"), path, "exec")
