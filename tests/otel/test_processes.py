"""One trace through several processes, received over OTLP, has no hole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clark_agent.run_log import SqliteStore
from clark_agent.run_log.records import RunBegan, RunResumed
from tests.otel.receiver import Receiver
from tests.selection import slow_fixture

ROOT = Path(__file__).parents[2]


def drive(what: str, endpoint: str, store: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.otel.driver", what, endpoint, str(store)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
@slow_fixture
def received(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    store = tmp_path_factory.mktemp("runs") / "runs.db"
    with Receiver() as receiver:
        assert drive("begin", receiver.endpoint, store) == "suspended"
        assert drive("resume", receiver.endpoint, store) == "done"
        return receiver.spans, store


@pytest.mark.slow
def test_every_span_is_below_another_one_of_the_same_trace(
    received: tuple[list[Any], Path],
) -> None:
    spans, _ = received
    by_id = {span.span_id: span for span in spans}
    first = next(s for s in spans if s.name == "invoke_agent buyer" and not s.parent_span_id)
    of_trace = [span for span in spans if span.trace_id == first.trace_id]
    assert [s.name for s in of_trace if s.parent_span_id not in by_id] == ["invoke_agent buyer"]
    names = {span.name for span in of_trace}
    assert names >= {
        "invoke_agent buyer",
        "execute_tool clerk",
        "invoke_agent clerk",
        "execute_tool shop_stock",
        "tools/call stock",  # of the server's process
        "execute_tool stock",
        "execute_tool order",  # of the process that resumed the run
    }

    def above(name: str) -> list[str]:
        span = next(s for s in of_trace if s.name == name)
        found = []
        while span.parent_span_id:
            span = by_id[span.parent_span_id]
            found.append(span.name)
        return found

    assert above("tools/call stock")[1:] == [
        "execute_tool shop_stock",
        "turn",
        "invoke_agent clerk",
        "execute_tool clerk",
        "turn",
        "invoke_agent buyer",
    ]
    # What a server of tools runs has no model, and is not an agent.
    assert above("execute_tool stock")[0] == "tools/call stock"
    assert not [span.name for span in spans if "mcp" in span.name]
    assert len([span for span in spans if span.name == "invoke_agent"]) == 0
    assert above("execute_tool order") == ["turn", "invoke_agent buyer", "invoke_agent buyer"]


def test_the_resumed_run_links_to_its_first_span(received: tuple[list[Any], Path]) -> None:
    spans, _ = received
    first, second = sorted(
        [s for s in spans if s.name == "invoke_agent buyer"],
        key=lambda s: s.start_time_unix_nano,
    )
    (link,) = second.links
    assert (link.trace_id, link.span_id) == (first.trace_id, first.span_id)
    attributes = {each.key: each.value for each in second.attributes}
    assert attributes["clark_agent.run.is_resumed"].bool_value
    assert attributes["clark_agent.run.suspended_seconds"].double_value > 0
    assert {each.key: each.value.string_value for each in first.attributes}[
        "clark_agent.run.outcome"
    ] == "suspended"


def test_the_log_has_the_span_of_each_process(received: tuple[list[Any], Path]) -> None:
    spans, path = received
    store = SqliteStore(path)
    (root,) = [run for run in store.runs() if not run.depth]
    entries = [record.entry for record in store.load(root.run_id).records]
    traces = [e.trace["traceparent"] for e in entries if isinstance(e, (RunBegan, RunResumed))]
    ids = {span.span_id.hex() for span in spans if span.name == "invoke_agent buyer"}
    assert {trace.split("-")[2] for trace in traces} == ids


@pytest.mark.slow
def test_the_prices_are_loaded_before_the_first_run() -> None:
    script = (
        "import sys; from clark_agent.otel import Tracing;"
        "before = 'genai_prices' in sys.modules; Tracing();"
        "print(before, 'genai_prices' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]
