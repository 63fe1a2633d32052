"""Replays a logged run offline: `replay` reports differences, `assert_replays` is for tests."""

from clark_agent.replay.report import ReplayReport, assert_replays, replay

__all__ = ["ReplayReport", "assert_replays", "replay"]
