"""A logged run again, offline: `replay` reports where it differs, `assert_replays` is for tests."""

from clark_agent.replay.report import ReplayReport, assert_replays, replay

__all__ = ["ReplayReport", "assert_replays", "replay"]
