"""Breaks promises on purpose, one at a time, and reports whether the tests notice.

``python -m tests.model.mutants`` (``make mutants``) runs tests under each fault of
`tests.model.faults`: first the test that is expected to notice, then, if it does not, those of
`TESTS` for the family of the fault. The outcome for each promise is one of

    caught        the fault fired in a test, and that test failed
    SURVIVES      the fault fired and every test passed: no test checks the promise
    NEVER FIRED   the fault did not fire, or not in the test that failed: nothing is proved
    BROKEN        the tests could not run under the fault

Anything but ``caught`` fails the command. At the end the tests that caught a fault must pass
without one. ``--only PART`` selects the promises whose name contains the text.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tests.model.faults import NAME, PROMISES, VERDICT, Verdict

ROOT = Path(__file__).resolve().parents[2]
TESTS = {
    "runs": (
        "tests/model/test_sweep.py",
        "tests/model/test_random.py",
        "tests/model/test_steering.py",
        "tests/engine/test_steering.py",
        "tests/conformance/test_loop.py",
        "tests/test_sub_agents.py",
        "tests/test_budget.py",
    ),
    "waiting": (
        "tests/run_log/test_suspending.py",
        "tests/run_log/test_expiry.py",
        "tests/run_log/test_waiting.py",
        "tests/toolkit/test_approval.py",
    ),
    "takeovers": ("tests/run_log/test_stores.py", "tests/run_log/test_resume.py"),
    "leases": ("tests/durable/test_postgres.py",),
    "logs": (
        "tests/run_log/test_damage.py",
        "tests/run_log/test_resume.py",
        "tests/run_log/test_exactly_once.py",
        "tests/run_log/test_barrier.py",
        "tests/run_log/test_mail.py",
        "tests/replay",
    ),
    "context": (
        "tests/plugins/test_compaction.py",
        "tests/plugins/test_compacted.py",
        "tests/plugins/test_large_results.py",
        "tests/run_log/test_large_results.py",
    ),
    "mcp": ("tests/mcp/test_client.py", "tests/mcp/test_faults.py"),
    "tracing": (
        "tests/otel/test_runs.py",
        "tests/otel/test_not_run.py",
        "tests/otel/test_failures.py",
    ),
    "page": (
        "tests/view/test_security.py",
        "tests/view/test_actions.py",
        "tests/view/test_server.py",
    ),
}
"""The tests to try if the expected one does not notice, by the module of the fault."""
PYTEST = (
    *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "tests.model.faults"),
    *("-p", "no:cacheprovider", "-p", "no:schemathesis", "--hypothesis-profile=faults"),
)


class Outcome(msgspec.Struct, frozen=True):
    """The result of trying a fault."""

    word: str
    told: str = ""
    test: str | None = None
    """The test that failed."""


def try_fault(promise: str) -> Outcome:
    """Run the expected test under the fault of a promise, then others if need be."""
    broken = PROMISES[promise]
    outcome = run_under(promise, [broken.noticed_by])
    if outcome.word in ("SURVIVES", "NEVER FIRED") and outcome.test is None:
        return run_under(promise, TESTS[broken.family])
    return outcome


def run_under(promise: str, tests: Iterable[str]) -> Outcome:
    """Run tests under a fault until one fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "verdict.json")
        try:
            done = run_tests(tests, {NAME: promise, VERDICT: str(path)})
        except subprocess.TimeoutExpired:
            return Outcome("BROKEN", "the tests did not end")
        if done.returncode not in (0, 1) or not path.exists():
            return Outcome("BROKEN", done.stderr.strip() or done.stdout.strip())
        return judge(msgspec.json.decode(path.read_bytes(), type=Verdict))


def judge(verdict: Verdict) -> Outcome:
    """The outcome that a verdict stands for."""
    if verdict.test is None:
        return Outcome("SURVIVES" if verdict.fired else "NEVER FIRED")
    if not verdict.fired_in_test:
        return Outcome("NEVER FIRED", f"yet {verdict.test} fails", verdict.test)
    hangs = ", which hangs" if verdict.hung else ""
    return Outcome("caught", f"by {verdict.test}{hangs}", verdict.test)


def run_tests(
    tests: Iterable[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTEST, *tests],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.model.mutants")
    parser.add_argument(
        "--only", metavar="PART", default="", help="only promises whose name contains this"
    )
    only = parser.parse_args().only
    promises = [promise for promise in PROMISES if only in promise]
    if not promises:
        parser.error(f"no promise contains {only!r}")
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for promise, outcome in zip(promises, pool.map(try_fault, promises), strict=True):
            print(f"{outcome.word:<11}  {promise}\n{'':13}{outcome.told}", flush=True)
            outcomes.append(outcome)
    caught = [outcome.test for outcome in outcomes if outcome.word == "caught"]
    seconds = time.monotonic() - started
    print(f"{len(caught)} of {len(promises)} caught in {seconds:.0f} seconds")
    tests = sorted({test for test in caught if test is not None})
    healthy = not tests or run_tests(tests, {}).returncode == 0
    if not healthy:
        print("The tests that caught these faults also fail without a fault.")
    sys.exit(0 if healthy and len(caught) == len(promises) else 1)


if __name__ == "__main__":
    main()
