"""The tree of spans fits into the terminal."""

from __future__ import annotations

import pytest

from clark_agent.cli.trace_view import lines_within
from clark_agent.run_log.span_tree import LoggedSpan
from clark_agent.types import Usage

CHAT = LoggedSpan("chat gpt-5", 1000, 2500, Usage(1200, 80), 0.0023)
ROOT = LoggedSpan("invoke_agent a", 1000, 3000, CHAT.usage, 0.0023, ["done"], [CHAT])


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (200, "invoke_agent a  2.0 s  1,200 in · 80 out  0.0023  ████████████████████████  done"),
        (72, "invoke_agent a  2.0 s  1,200 in · 80 out  0.0023  ████████████████  done"),
        (64, "invoke_agent a  2.0 s  1,200 in · 80 out  0.0023  ████████  done"),
        (63, "invoke_agent a  2.0 s  1,200 in · 80 out  0.0023  done"),
    ],
)
def test_bars_shrink_in_a_narrow_terminal(width: int, expected: str) -> None:
    first, second = lines_within(width, ROOT)
    assert first == expected
    assert max(len(first), len(second)) <= width
