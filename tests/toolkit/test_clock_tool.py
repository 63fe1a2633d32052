"""current_time says what the clock says, in the zone that was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zoneinfo
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clark_agent import AgentContext, ConfigError, LoopConfig, ToolContext, ToolResult, run
from clark_agent.clock import Clock, now_ms
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.testing import FakeClock, ScriptedStream, call
from clark_agent.toolkit.clock_tool import current_time_tool
from tests.engine.support import results, texts

NOON = FakeClock(1_770_811_200_999)  # 2026-02-11, 12:00 in Greenwich
SUMMER = FakeClock(1_784_116_800_000)  # 2026-07-15, 12:00


async def told(
    timezone: str | None, *, clock: Clock | None = NOON, default: str | None = None
) -> ToolResult:
    made = current_time_tool(clock, default_timezone=default)
    ctx = ToolContext(tool_call_id="c", tool_name="current_time")
    return await made.execute({"timezone": timezone}, ctx)


@pytest.mark.parametrize(
    ("timezone", "says"),
    [
        ("Europe/Berlin", "2026-02-11T13:00:00+01:00, Wednesday (Europe/Berlin, CET)"),
        ("europe/BERLIN", "2026-02-11T13:00:00+01:00, Wednesday (Europe/Berlin, CET)"),
        ("America/New York", "2026-02-11T07:00:00-05:00, Wednesday (America/New_York, EST)"),
        ("Pacific/Auckland", "2026-02-12T01:00:00+13:00, Thursday (Pacific/Auckland, NZDT)"),
        ("UTC", "2026-02-11T12:00:00+00:00, Wednesday (UTC)"),
        (" z ", "2026-02-11T12:00:00+00:00, Wednesday (UTC)"),
        ("+05:30", "2026-02-11T17:30:00+05:30, Wednesday (UTC+05:30)"),
        ("-0330", "2026-02-11T08:30:00-03:30, Wednesday (UTC-03:30)"),
        ("UTC+2", "2026-02-11T14:00:00+02:00, Wednesday (UTC+02:00)"),
        ("GMT-11", "2026-02-11T01:00:00-11:00, Wednesday (UTC-11:00)"),
    ],
)
async def test_the_zone_is_the_one_that_was_asked_for(timezone: str, says: str) -> None:
    result = await told(timezone)
    assert (result.plain_text, result.is_error) == (says, False)


async def test_summer_time() -> None:
    result = await told("Europe/Berlin", clock=SUMMER)
    assert result.plain_text == "2026-07-15T14:00:00+02:00, Wednesday (Europe/Berlin, CEST)"


@pytest.mark.parametrize("timezone", [None, "", "  "])
async def test_without_a_zone_it_is_the_hosts_choice(timezone: str | None) -> None:
    result = await told(timezone, default="Asia/Tokyo")
    assert result.plain_text == "2026-02-11T21:00:00+09:00, Wednesday (Asia/Tokyo, JST)"


@pytest.fixture
def machine_in_lisbon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "WET0WEST,M3.5.0/1,M10.5.0")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("machine_in_lisbon")
async def test_or_that_of_the_machine() -> None:
    assert (await told(None)).plain_text == "2026-02-11T12:00:00+00:00, Wednesday (WET)"
    in_summer = await told(None, clock=SUMMER)
    assert in_summer.plain_text == "2026-07-15T13:00:00+01:00, Wednesday (WEST)"


async def test_the_clock_is_the_systems_unless_another_is_given() -> None:
    before = now_ms()
    result = await told("UTC", clock=None)
    said = datetime.fromisoformat(result.plain_text.split(",")[0]).timestamp() * 1000
    assert before - 1000 <= said <= now_ms()


@pytest.mark.parametrize(
    ("timezone", "meant"),
    [
        ("Berlin", "Europe/Berlin"),
        ("new york", "America/New_York"),
        ("Europ/Berln", "Europe/Berlin"),
        ("Asia/Tokio", "Asia/Tokyo"),
        ("Asia/Sydney", "Australia/Sydney"),
    ],
)
async def test_an_unknown_zone_comes_back_with_what_may_be_meant(timezone: str, meant: str) -> None:
    result = await told(timezone)
    assert result.is_error
    assert result.plain_text.startswith(f"Unknown time zone {timezone!r}. Did you mean ")
    assert meant in result.plain_text


@pytest.mark.parametrize("timezone", ["../../etc/passwd", "/etc/passwd", "Europe", "\0", "+15:00"])
async def test_what_is_no_zone_is_no_file_either(timezone: str) -> None:
    result = await told(timezone)
    assert result.is_error
    assert "Use an IANA name such as 'Europe/Lisbon'" in result.plain_text


@settings(max_examples=40)  # each looks through all zones
@given(st.text(max_size=80))
async def test_any_text_has_a_time_or_a_reason(timezone: str) -> None:
    result = await told(timezone)
    assert result.plain_text
    assert len(result.plain_text) < 500


def test_a_default_that_is_not_known_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="Did you mean Europe/Berlin"):
        current_time_tool(default_timezone="Berlin")


@pytest.mark.slow
def test_a_machine_without_zones_says_what_to_install() -> None:
    """As on Windows without tzdata. In a process of its own, where neither source is there."""
    program = """
import sys, asyncio
sys.modules["tzdata"] = None
from clark_agent import ToolContext
from clark_agent.toolkit.clock_tool import current_time_tool
made, ctx = current_time_tool(), ToolContext(tool_call_id="c", tool_name="t")
for zone in ("Europe/Berlin", "UTC", "+01:00", None):
    result = asyncio.run(made.execute({"timezone": zone}, ctx))
    print(result.is_error, "pip install tzdata" in result.plain_text)
"""
    env = {**os.environ, "PYTHONTZPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", *["False", "False"] * 3]
    assert zoneinfo.available_timezones()  # here they are


async def test_a_replay_tells_the_time_of_the_run() -> None:
    store = MemoryStore()
    made = current_time_tool(FakeClock(1_000), default_timezone="UTC")
    model = ScriptedStream([call("current_time"), "ok"])
    config = LoopConfig(stream=model, tools=[made], run_log=RunLog(store))
    result = await run("What time is it?", AgentContext(), config)
    assert texts(result) == ["1970-01-01T00:00:01+00:00, Thursday (UTC)"]
    (summary,) = store.runs()
    later = current_time_tool(NOON, default_timezone="UTC")
    report = await replay(store, summary.run_id, config.replace(tools=[later]))
    assert report.is_identical
    assert report.result is not None
    assert [r.plain_text for r in results(report.result)] == texts(result)
