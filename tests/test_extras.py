"""The packages of optional extras."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from clark_agent import ConfigError
from clark_agent._extras import load_extra


def test_a_package_that_is_there_is_loaded() -> None:
    assert load_extra("json", "x", "Something") is sys.modules["json"]
    assert load_extra("xml.dom", "x", "Something").__name__ == "xml.dom"


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.part", "json.no_such_part"])
def test_a_package_that_is_not_there_is_named_with_its_extra(module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_extra(module, "maker", "TheirModel")
    assert str(caught.value) == (
        f"TheirModel needs the package {module}: "
        "pip install '.[maker]' in a checkout of clark-agent"
    )
    assert caught.value.__suppress_context__


def test_a_package_that_lacks_something_itself_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_an_sdk.py").write_text("import what_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        load_extra("half_an_sdk", "maker", "TheirModel")


def test_the_table_of_extras_has_them_all() -> None:
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    table = (root / "docs" / "index.md").read_text("utf-8").partition("## Extras")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", table, re.MULTILINE))
    assert set(rows) == set(project["optional-dependencies"])
    for extra, requirements in project["optional-dependencies"].items():
        for requirement in [] if extra == "all" else requirements:
            name = re.split(r"[\[<>=]", requirement)[0]
            if not name.startswith(("clark-agent", "gemma3", "opentelemetry")):
                assert name in rows[extra], extra
