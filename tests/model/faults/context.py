"""Faults of what the model gets: compactions and large results."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from clark_agent.plugins.compaction import Mark, mark_of
from tests.model.faults.base import Fault, breaks

COMPACTION = "tests/plugins/test_compaction.py::{}"


def change_marks(fault: Fault, **fields: Any) -> None:
    """Set fields in what each compaction says about itself."""

    def changed(mark: Mark) -> Mark:
        fault.fired += any(getattr(mark, name) != value for name, value in fields.items())
        return replace(mark, **fields)

    def change(before_request: Any) -> Any:
        async def compact(self: Any, ctx: Any) -> Any:
            messages = await before_request(self, ctx)
            marks = map(mark_of, messages or ())
            return [changed(mark).message() for mark in marks if mark is not None] or None

        return compact

    fault.wrap("compaction replaces", change)


@breaks(
    "a compaction replaces the newest messages",
    COMPACTION.format("test_a_message_behind_results_does_not_replace_them"),
)
def _(fault: Fault) -> None:
    change_marks(fault, kept=0)


@breaks(
    "a compaction replaces the earlier summaries",
    COMPACTION.format("test_summaries_add_up_and_keep_the_prefix"),
)
def _(fault: Fault) -> None:
    change_marks(fault, merges=True)


@breaks(
    "a compaction replaces pinned messages",
    COMPACTION.format("test_what_must_not_be_lost_is_in_every_request_after_four_compactions"),
)
def _(fault: Fault) -> None:
    def change(init: Any) -> Any:
        def unpinned(self: Any, *args: Any, pinned: Any = None, **kwargs: Any) -> None:
            fault.fired += pinned is not None
            init(self, *args, **kwargs)

        return unpinned

    fault.wrap("compaction is made", change)


@breaks(
    "a compaction replaces the task",
    COMPACTION.format("test_a_long_run_stays_within_the_window"),
)
def _(fault: Fault) -> None:
    def change(transform_context: Any) -> Any:
        def without_task(self: Any, messages: Any, ctx: Any) -> Any:
            found = transform_context(self, messages, ctx)
            if found is messages:
                return found
            fault.fired += 1
            return found[1:]

        return without_task

    fault.wrap("compacted messages", change)


@breaks(
    "the model gets the whole of a large result",
    "tests/plugins/test_large_results.py::"
    "test_the_model_gets_both_ends_and_reads_all_of_5_mb_byte_for_byte",
)
def _(fault: Fault) -> None:
    def change(fits: Any) -> Any:
        def always(self: Any, *args: Any) -> bool:
            fault.fired += not fits(self, *args)
            return True

        return always

    fault.wrap("large result", change)


@breaks(
    "what is left out of a large result is lost",
    "tests/run_log/test_large_results.py::test_a_fork_reads_what_the_run_before_has_kept",
)
def _(fault: Fault) -> None:
    def change(_: Any) -> Any:
        def lose(*_: Any) -> None:
            fault.fired += 1

        return lose

    fault.wrap("store keeps a large result", change)
