"""Every recorded case of the pure functions gives what was recorded."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.adapter import PURE, run_pure

DATA = Path(__file__).parent / "data" / "pure.jsonl"
ROWS = [json.loads(line) for line in DATA.read_bytes().splitlines()]


def test_all_rows_are_here_as_they_were_recorded() -> None:
    assert len(ROWS) == 1074
    digest = "3a2621f53b45c559cc261f0dd9b5a0651cbcb49d50fd5f090db9954829cc1cd2"
    assert sha256(DATA.read_bytes()).hexdigest() == digest
    assert set(Counter(row["op"] for row in ROWS)) == set(PURE)


@pytest.mark.parametrize("op", sorted(PURE))
def test_rows_match(op: str) -> None:
    different = [
        (row, got)
        for row in ROWS
        if row["op"] == op and not identical(got := run_pure(row), row["expected"])
    ]
    assert not different, f"{len(different)} rows of {op!r} differ, the first: {different[0]}"


def identical(got: Any, expected: Any) -> bool:
    """Equal as JSON: unlike ``==``, 1, 1.0 and True are three different things."""
    return json.dumps(got, sort_keys=True) == json.dumps(expected, sort_keys=True)
