"""Child processes whose lines count for coverage, where that is measured."""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from pathlib import Path

__all__ = ["counted_environment", "counted_source", "is_counting"]

_ROOT = Path(__file__).resolve().parent.parent
_SETTINGS = str(_ROOT / "pyproject.toml")
_DATA = str(_ROOT / ".coverage")

_COUNTED = """\
import sys
sys.path.append({packages!r})
from coverage import Coverage
_measured = Coverage({data!r}, True, config_file={settings!r}, source=[{folder!r}])
_measured.start()
try:
    exec(compile({source!r}, {path!r}, "exec"))
finally:
    _measured.stop()
    _measured.save()
"""


def is_counting() -> bool:
    """Whether this process measures coverage."""
    coverage = sys.modules.get("coverage")
    return coverage is not None and coverage.Coverage.current() is not None


def counted_environment() -> dict[str, str]:
    """What to add to the environment of a Python that counts as well; nothing if none does."""
    if not is_counting():
        return {}
    return {"COVERAGE_PROCESS_START": _SETTINGS, "COVERAGE_FILE": _DATA}


def counted_source(module: str) -> str:
    """The text of a module as a program that counts its lines, without site or environment."""
    source = inspect.getsource(import_module(module))
    if not is_counting():
        return source
    path = import_module(module).__file__
    assert path is not None
    coverage = sys.modules["coverage"].__file__
    assert coverage is not None
    return _COUNTED.format(
        packages=str(Path(coverage).parent.parent),
        settings=_SETTINGS,
        data=_DATA,
        folder=os.path.dirname(path),
        source=source,
        path=path,
    )
