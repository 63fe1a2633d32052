"""The default policy knows no product; the runtime's own words fit any."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import ToolCall, UserMessage, protocol
from clark_agent.protocol import (
    HiddenToolContext,
    PlainTextRecoveryContext,
    ProtocolPolicy,
    generic_hidden_tool_error,
    hidden_tool_details,
)
from clark_agent.tools import ToolRegistry

POLICY = ProtocolPolicy()

OPENINGS = (
    "would you like",
    "shall i",
    "should i",
    "do you want",
    "what would you like",
    "what do you need",
    "what's your next move",
    "what is your next move",
    "continue what",
)


# --- asking instead of answering ----------------------------------------------------------------


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_text_that_opens_like_a_question_for_permission_asks(opening: str) -> None:
    long = " x" * 600
    for text in (f"{opening} me to go on?", f"{opening}{long} ? {long}", f"{opening}?"):
        assert POLICY.asks_permission(text)
        assert POLICY.asks_permission(text.upper())
        assert POLICY.asks_permission(f" \n\t{text}\u3000\n")
    assert not POLICY.asks_permission(f"{opening} me to go on."), "no question mark"
    assert not POLICY.asks_permission(f"Well, {opening[1:]}{long}?"), "it must open so"


@pytest.mark.parametrize(
    "text",
    [
        "What next?",
        "So, what should come next?",
        "Continue with what?",
        "I can continue. What do you say?",
        "The next step? I know what it is.",
        "somewhat? nextdoor",  # parts of words count too
    ],
)
def test_a_short_question_about_what_comes_next_asks(text: str) -> None:
    assert POLICY.asks_permission(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "?",
        "What next",
        "What is this?",
        "Will you continue?",
        "And the next?",
        "The answer is 42.",
        "It is done. Would you like more?",
        "Shall we?",
    ],
)
def test_other_texts_answer(text: str) -> None:
    assert not POLICY.asks_permission(text)


@pytest.mark.parametrize("filler", ["x", "é", "€", "😀"])
def test_short_means_500_bytes_of_utf8(filler: str) -> None:
    question = "What next?"
    width = len(filler.encode())
    room, rest = divmod(500 - len(question), width)
    exact = question + filler * room + "y" * rest
    assert len(exact.encode()) == 500
    assert POLICY.asks_permission(exact)
    assert POLICY.asks_permission(f"  {exact}\n"), "blanks around it do not count"
    assert not POLICY.asks_permission(exact + "y")


@pytest.mark.parametrize(
    "text",
    [
        "\N{LATIN SMALL LETTER LONG S}hall i?",  # casefold() makes an ASCII s of it
        "What ne\N{FULLWIDTH LATIN SMALL LETTER X}t?",
        "WHAT NE\N{GREEK CAPITAL LETTER CHI}T?",
        "SHALL \N{LATIN CAPITAL LETTER I WITH DOT ABOVE}?",  # lower() gives an i and a dot
    ],
)
def test_case_is_folded_for_ascii_alone(text: str) -> None:
    assert not POLICY.asks_permission(text)


def test_ascii_case_does_not_matter_beside_other_letters() -> None:
    assert POLICY.asks_permission("SHALL I öffnen?")
    assert POLICY.asks_permission("\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}: WHAT NEXT?")
    assert POLICY.asks_permission("What next? \ud800"), "half a character does no harm"


@given(st.text(), st.sampled_from(OPENINGS) | st.text(string.ascii_letters + " ?'", max_size=30))
def test_without_a_question_mark_nothing_asks(text: str, opening: str) -> None:
    assert not POLICY.asks_permission((opening + text).replace("?", ""))


def test_a_product_may_read_its_own_language() -> None:
    class German(ProtocolPolicy):
        def asks_permission(self, text: str) -> bool:
            return text.startswith("Soll ich")

    assert German().asks_permission("Soll ich weitermachen?")
    assert not POLICY.asks_permission("Soll ich weitermachen?")


# --- hidden tools ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 11, 12, 13, 40])
def test_the_refusal_previews_at_most_twelve_names_in_order(count: int) -> None:
    names = {f"tool{number:02}" for number in range(count)}
    error = generic_hidden_tool_error("secret", names)
    shown = re.findall(r"tool\d\d", error.message)
    assert shown == sorted(names)[:12]
    assert ("40" in error.message) == (count == 40), "how many there are is told when some are cut"
    assert "'secret'" in error.message
    assert error.details == {
        "runtime_block": True,
        "requested_tool": "secret",
        "allowed_tools": sorted(names),
        "gate": "tool_gate",
    }


def test_details_have_a_fixed_shape_and_order() -> None:
    details = hidden_tool_details("secret", {"b", "a"}, "my_gate")
    assert list(details.items()) == [
        ("runtime_block", True),
        ("requested_tool", "secret"),
        ("allowed_tools", ["a", "b"]),
        ("gate", "my_gate"),
    ]


# --- the default policy ---------------------------------------------------------------------------


def test_the_default_policy_has_nothing_to_say() -> None:
    messages = [UserMessage("hm")]
    calls = [ToolCall("1", "look", {}), ToolCall("2", "unknown", {})]
    assert POLICY.name == "default_protocol"
    assert POLICY.terminal_tool_names() == frozenset()
    assert (
        POLICY.plain_text_recovery_prompt(PlainTextRecoveryContext(messages, 0, ["look"], "done"))
        is None
    )
    assert POLICY.normalize_tool_calls(calls, ToolRegistry()) is calls
    assert POLICY.hidden_tool_error(HiddenToolContext("look", {"done"}, messages)) is None


PROSE = {
    name: value
    for name, value in vars(protocol).items()
    if name.isupper() and not name.startswith("_") and isinstance(value, str)
}


def test_all_prose_is_looked_at() -> None:
    assert PROSE.keys() == {"PLAIN_TEXT_RECOVERY", "ZERO_OUTPUT_RECOVERY", "WRAP_UP"}


@pytest.mark.parametrize("name", PROSE)
def test_the_runtime_speaks_in_plain_words(name: str) -> None:
    prose = PROSE[name]
    assert prose == prose.strip()
    assert not re.search(r"\w_\w|`|\w\(|[a-z][A-Z]|<", prose), "no identifiers, no tags"
    products = "message_result message_ask message_info website slides browser shell file clark"
    assert not set(re.findall(r"\w+", prose.lower())) & set(products.split())


@pytest.mark.parametrize("name", ["PLAIN_TEXT_RECOVERY", "ZERO_OUTPUT_RECOVERY"])
def test_a_note_that_stands_among_user_words_says_who_speaks(name: str) -> None:
    assert PROSE[name].startswith("[from the runtime, not from the user]\n")
