"""Every recorded scenario runs as it was recorded, but for what the comparison evens out."""

from __future__ import annotations

import gzip
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from clark_agent.testing import check_events, fold_events
from tests.conformance.compare import difference
from tests.conformance.scenario import observe

DATA = Path(__file__).parent / "data" / "loop.jsonl.gz"
ROWS = [json.loads(line) for line in gzip.decompress(DATA.read_bytes()).splitlines()]


def test_all_rows_are_here_as_they_were_recorded() -> None:
    assert len(ROWS) == 548
    digest = "de37d3c724c264da4183cfa690eb826b6a176e51519c0d66cdc0f0419735ba49"
    assert sha256(gzip.decompress(DATA.read_bytes())).hexdigest() == digest


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
async def test_row(row: dict[str, Any]) -> None:
    got, events, messages = await observe(row["scenario"])
    assert difference(row["scenario"], got, row["expected"]) == ""
    assert fold_events(events) == messages
    if events:  # a refused continuation has none
        check_events(events)
