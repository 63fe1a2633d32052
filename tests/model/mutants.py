"""Breaks promises on purpose, one at a time, and looks whether the tests notice.

``python -m tests.model.mutants`` copies the package, makes one change to the copy, and runs the
sweeps, the random lives, the recorded scenarios and the tests of steering, budgets and sub-agents
against it. A mutant that survives is a promise that nobody checks. The list:
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/model/test_sweep.py",
    "tests/model/test_random.py",
    "tests/model/test_steering.py",
    "tests/loop/test_steering.py",
    "tests/conformance/test_loop.py",
    "tests/test_sub_agents.py",
    "tests/test_budget.py",
)

MUTANTS: dict[str, tuple[str, str, str]] = {
    "a turn that fails has no turn_end": (
        "run_state.py",
        "await self.emit_closing(TurnEnd(message, tuple(self.turn_results)))",
        "pass",
    ),
    "a run that fails has no agent_end": (
        "run_state.py",
        "await self.emit_closing(AgentEnd(self.messages.view()))",
        "pass",
    ),
    "an answer that is cut off is not discarded": (
        "run_state.py",
        "await self.emit_closing(MessageDiscarded(reason))",
        "pass",
    ),
    "an interrupted batch drops its results": (
        "run_state.py",
        "self.turn_results = await batch.settle()",
        "await batch.settle()",
    ),
    "calls of an answer that no batch has taken up stay unanswered": (
        "loop.py",
        "if state.has_unanswered_calls and state.turn_message is not None:",
        "if False:",
    ),
    "messages that were not announced yet are forgotten": (
        "run_state.py",
        "        for message in self._announcing:\n            await self.emit_closing(",
        "        for message in ():\n            await self.emit_closing(",
    ),
    "tasks of an interrupted batch are left running": (
        "execution.py",
        '        self.stop("aborted")\n        await self._tasks_done()',
        "        pass",
    ),
    "a tool that ignores everything is waited for": (
        "tool_run.py",
        "        self._leave = True\n        self._cancel_task()",
        "        pass",
    ),
    "timers of a call stay behind": ("tool_run.py", "timer.cancel()", "pass"),
    "a token's cancellation is left on the task": (
        "cancel_scope.py",
        "                task.uncancel()",
        "                pass",
    ),
    "the model's stream is not closed": ("turn.py", "await close()", "pass"),
    "progress after the return is told": ("base_tool.py", "self._settled = True", "pass"),
    "a truncated call is run": (
        "execution.py",
        "if self._asked_by.stop_reason is _MAX_TOKENS:",
        "if False:",
    ),
    "a cancelled task ends as aborted": (
        "loop.py",
        "by_token = state.signal.cancelled and not state.scope.cancelled_from_outside",
        "by_token = True",
    ),
    "state is shared between runs": (
        "plugin.py",
        'if not any(hasattr(plugin, "for_run") for plugin in self.plugins):',
        "if True:",
    ),
    "what waits when the run ends is not handed back": (
        "run_state.py",
        "left += channel.close()",
        "channel.close()",
    ),
    "a receipt names the turn before": (
        "run_state.py",
        "channel.delivered(self.iterations)",
        "channel.delivered(self.iterations - 1)",
    ),
    "what is sent after the run waits for the next": (
        "steering.py",
        "        if self.is_over:\n            try:",
        "        if False:\n            try:",
    ),
    "steering breaks nothing off": (
        "run_state.py",
        "if self.break_off is not None and self.intervention(SteerWhen.NOW) is not None:",
        "if False:",
    ),
    "steering holds no call back": (
        "execution.py",
        "why = self._run.intervention(SteerWhen.BEFORE_NEXT_TOOL)",
        "why = self._run.intervention(SteerWhen.NOW)",
    ),
    "steering cancels a listener that works": (
        "turn.py",
        "if not self.was_cancelled and not self._run.emitter.is_sending:",
        "if not self.was_cancelled:",
    ),
    "breaking off an answer leaves a cancellation on the task": (
        "turn.py",
        "self._run.scope.take_back()",
        "pass",
    ),
    "a child spends what it likes": (
        "run_state.py",
        "() if parent is None else parent.meters",
        "()",
    ),
    "a child's tokens are not added up": (
        "run_state.py",
        "above.children_usage += usage",
        "pass",
    ),
    "nobody is told that the budget is nearly spent": (
        "run_state.py",
        "limit = meter.nearly_reached()",
        "limit = None",
    ),
    "a child goes on when its call is stopped": (
        "sub_agents.py",
        "            task.cancel()  # and wait",
        "            pass  # and wait",
    ),
}


def survives(file: str, old: str, new: str) -> bool:
    """Whether all tests pass with the change made."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True)
        path = Path(folder, "clark_agent", file)
        source = path.read_text(encoding="utf-8")
        assert old in source, f"{file} has changed: {old!r} is not in it any more"
        path.write_text(source.replace(old, new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS]
        environment = {**os.environ, "PYTHONPATH": folder, "CLARK_AGENT_LIVES": "500"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, timeout=180, check=False
            )
        except subprocess.TimeoutExpired:  # it hangs: noticed
            return False
        # Anything else is a run that did not come to an end, and says nothing about the change.
        assert done.returncode in (0, 1), done.stdout.decode() + done.stderr.decode()
        return done.returncode == 0


def main() -> None:
    if not survives("__init__.py", "__all__", "__all__"):
        sys.exit("the tests fail, or take too long, without any change: they can tell nothing")
    survivors = []
    for name, change in MUTANTS.items():
        survived = survives(*change)
        print(f"{'SURVIVES' if survived else 'caught  '}  {name}", flush=True)
        survivors += [name] * survived
    print(f"{len(MUTANTS) - len(survivors)} of {len(MUTANTS)} caught")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
