"""Tests with many cases: no failure hides another, and a failure names its case and its line."""

from __future__ import annotations

import re

import pytest

from tests.cases import all_cases


def test_all_cases_are_tried_and_those_that_fail_are_listed() -> None:
    tried = list[int]()

    def try_some() -> None:
        with all_cases() as case:
            for number in range(5):
                with case(f"number {number}"):
                    tried.append(number)
                    if number == 1:
                        raise ValueError("one\nand more")
                    if number == 3:
                        pytest.fail("three")

    with pytest.raises(AssertionError) as caught:
        try_some()
    assert tried == [0, 1, 2, 3, 4]
    assert re.sub(r":\d+:", ":LINE:", str(caught.value)) == (
        "2 of 5 cases failed:\n"
        "number 1: ValueError in test_cases.py:LINE: one\n    and more\n"
        "number 3: Failed in test_cases.py:LINE: three"
    )
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_inside_a_case_ends_the_test(error: type[BaseException]) -> None:
    def try_one() -> None:
        with all_cases() as case, case("interrupted"):
            raise error

    with pytest.raises(error):
        try_one()


def test_no_case_at_all_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="there was no case"), all_cases():
        pass
