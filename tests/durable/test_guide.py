"""The guide about several machines, with a real database and a real Temporal server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import psycopg
import pytest

from clark_agent import Agent
from clark_agent.run_log import advance
from clark_agent.run_log.postgres import PostgresStore
from clark_agent.testing import ScriptedStream
from tests.test_readme import ROOT, python_blocks, run_page

pytestmark = pytest.mark.slow

GUIDE = ROOT / "docs/guide/beyond-one-machine.md"


def test_the_guide_runs(
    postgres_url: str, temporal_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code runs as it is printed, and then so do its queries."""
    monkeypatch.setenv("CLARK_AGENT_STORE", postgres_url)
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal_address)
    _do_the_first_part(postgres_url)
    run_page(GUIDE, tmp_path, monkeypatch)
    queries = re.findall(r"^```sql\n(.*?)^```$", GUIDE.read_text("utf-8"), re.M | re.S)
    found: dict[str, list[tuple[object, ...]]] = {}
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        for query in queries:
            found[query] = connection.execute(query.encode()).fetchall()
    by_outcome, _, requests, abandoned, *_, log, sizes = found.values()
    assert [row[:2] for row in by_outcome] == [("done", 5)]
    assert (requests, abandoned) == ([], [])
    assert log[0][2] == "run_began"
    assert log[-1][2] == "run_ended"
    assert {"runs", "records"} <= {row[0] for row in sizes}


def _do_the_first_part(url: str) -> None:
    """Leave behind what the commands at the beginning of the guide do: a run that is done."""
    store = PostgresStore(url)
    asyncio.run(advance(store, "order-7", Agent(ScriptedStream(["Done."])), "Refund order 7."))
    store.close()


def test_the_agent_of_the_compose_file_is_that_of_the_guide() -> None:
    given = (ROOT / "examples/compose/shop.py").read_text("utf-8")
    assert given.partition('"""\n\n')[2] == python_blocks(GUIDE)[0].source
