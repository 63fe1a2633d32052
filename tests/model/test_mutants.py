"""The list of mutants keeps up with the code: each still finds the one line that it breaks."""

from __future__ import annotations

import pytest

from tests.model.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_finds_its_line(name: str) -> None:
    file, old, new = MUTANTS[name]
    source = (ROOT / "src" / "clark_agent" / file).read_text(encoding="utf-8")
    assert source.count(old) == 1
    compile(source.replace(old, new), file, "exec")
