"""A pytest plugin: in continuous integration a skipped test is a failed one.

A test that needs a server or a program is skipped on a machine without it. In continuous
integration nothing would check then what the test promises. Only a test for another operating
system or a newer Python may be skipped there, and its reason says so.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

ELSEWHERE = ("needs POSIX", "needs Linux", "needs Windows", "needs Python 3.12")

_Report = pytest.TestReport | pytest.CollectReport


def _refuse_skip(report: _Report) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or not os.environ.get("CI"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if reason not in ELSEWHERE:
        report.outcome = "failed"
        report.longrepr = f"skipped in continuous integration: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report
