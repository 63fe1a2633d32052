"""Lives worth sweeping through: each is cancelled at every one of its suspension points."""

from __future__ import annotations

from tests.model.world import FAULTS, Scenario

HOOKS = ("before", "after", "transform", "gate", "observer", "follow_up")

SCENARIOS: dict[str, Scenario] = {
    "one fast tool": Scenario((("fast",), "ok")),
    "two tools at once": Scenario((("slow", "updates"), "ok")),
    "one by one": Scenario((("slow", "updates", "error"), "ok"), exclusive=True),
    "a tool that hangs": Scenario((("hangs",), "ok")),
    "one that hangs beside one that works": Scenario((("hangs", "slow"), "ok")),
    "a tool that swallows its cancellation": Scenario((("swallows",),)),
    "one that swallows it beside others": Scenario((("swallows", "fast", "hangs"),)),
    "a thread that looks at its signal": Scenario((("thread",), "ok")),
    "a thread that does not": Scenario((("stubborn_thread", "fast"), "ok")),
    "a fatal tool": Scenario((("fatal",),)),
    "a fatal tool beside one that hangs": Scenario((("fatal", "hangs"),)),
    "a tool that aborts": Scenario((("aborts", "slow"),)),
    "a tool that cancels itself": Scenario((("cancels_itself", "slow"), "ok")),
    "a tool that takes too long": Scenario((("times_out", "slow"), "ok")),
    "a tool that cleans up": Scenario((("cleans_up",), "ok")),
    "a tool that waits for its signal": Scenario((("waits_on_signal", "slow"), "ok")),
    "a tool that keeps its handle": Scenario((("keeps_handle",), "ok")),
    "tools that hand in garbage": Scenario(
        (("returns_garbage", "returns_odd_text", "slow"), ("raises_unspeakably",), "ok")
    ),
    "a tool that closes itself": Scenario((("closes_itself", "slow"), ("closes_itself",), "ok")),
    "a vote to end": Scenario((("terminal",), "never said")),
    "a failure that stops siblings": Scenario(
        (("slow", "error", "hangs"), "ok"), aborting_siblings=True
    ),
    "a failure that skips the rest": Scenario(
        (("slow", "error", "hangs"), "ok"), aborting_siblings=True, exclusive=True
    ),
    "one id for all calls": Scenario((("slow", "fast"), ("fast",), "ok"), repeated_ids=True),
    "too many turns": Scenario(
        (("slow",),) * 6, settings={"max_iterations": 4, "grace_iterations": 2}
    ),
    "too many calls": Scenario(
        (("slow", "fast", "fast"), "ok"), settings={"max_tool_calls_per_turn": 1}
    ),
    "steering at every poll": Scenario((("slow",), "a", "b"), steering=(1, 2, 3)),
    "prose for a result": Scenario(
        ("prose",),
        settings={
            "plain_text_terminal_fallback_tool": "terminal",
            "plain_text_terminal_fallback_eager": True,
            "plain_text_terminal_fallback_eager_nudge": True,
        },
    ),
    "a stop too many": Scenario(("prose",), settings={"empty_outcome_retry_budget": 0}),
    **{f"a stream that is {fault}": Scenario((fault, "ok")) for fault in FAULTS},
    **{
        f"a hook {hook} that {temper}": Scenario((("slow", "fast"), "ok"), {hook: temper})
        for hook in HOOKS
        for temper in ("acts", "raises", "waits", "hangs", "deaf", "garbage")
    },
}
