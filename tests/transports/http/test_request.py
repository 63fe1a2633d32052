"""A history on its way out: whatever it holds, a provider will take it."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from itertools import product
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from msgspec.structs import replace

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    ImageContent,
    ReasoningContent,
    ReasoningDetailsContent,
    StopReason,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    TransportError,
    UserMessage,
)
from clark_agent.errors import ReplayRefused
from clark_agent.reasoning import ReasoningFormat, item_to_json, parse_items
from clark_agent.transports import ChatDialect, ReasoningTarget, convert_history
from clark_agent.transports.dialects import (
    COMPATIBLE,
    DEEPSEEK,
    GROQ,
    KIMI,
    MISTRAL,
    OPENAI,
    OPENROUTER,
    XAI,
    ZAI,
)
from clark_agent.transports.http.request import (
    arguments_object,
    arguments_text,
    merged,
    safe_id,
    sendable,
    with_extras,
    woven_text,
)
from clark_agent.types import arg_parse_error
from tests.cases import all_cases
from tests.strategies import (
    REASONING_ITEMS,
    TEXT,
    broken_histories,
    calling,
    open_json,
    result,
    transcripts,
    without_files,
)
from tests.transports.wires_chat import asking, sent

ANYBODY = ReasoningTarget(formats=frozenset(ReasoningFormat))
NOBODY = ReasoningTarget()


# --- strategies -------------------------------------------------------------------------------

items = REASONING_ITEMS.map(item_to_json)
reasoning = st.builds(ReasoningContent, TEXT) | st.lists(items, max_size=3).map(
    lambda values: ReasoningDetailsContent(tuple(values))
)


@st.composite
def histories(draw: DrawFn) -> list[AgentMessage]:
    """Anything but files, with reasoning of anybody's in it."""
    history = draw(transcripts() | broken_histories())
    thoughtful = []
    for message in map(without_files, history):
        if isinstance(message, AssistantMessage) and draw(st.booleans()):
            blocks = (*draw(st.lists(reasoning, max_size=2)), *message.content)
            message = replace(message, content=blocks)
        thoughtful.append(message)
    return thoughtful


targets = st.builds(
    ReasoningTarget,
    formats=st.frozensets(st.sampled_from(ReasoningFormat)),
    model=st.none() | st.sampled_from(["m1", "m2"]),
)


# --- what every provider wants ----------------------------------------------------------------


def problems(messages: Any) -> list[str]:
    """What a provider would complain about."""
    found: list[str] = []
    ids: list[str] = []
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if isinstance(message, ToolResultMessage):
            if message.tool_call_id not in waiting:
                found.append(f"{place}: a result of no call before it")
            else:
                waiting.remove(message.tool_call_id)
            continue
        if waiting:
            found.append(f"{place}: {waiting} not answered before it")
        waiting = []
        if isinstance(message, AssistantMessage):
            waiting = [call.id for call in message.tool_calls]
            ids += waiting
            if not message.content:
                found.append(f"{place}: an assistant that says nothing")
            was_heard = message.plain_text.strip() and not message.tool_calls
            if message.stop_reason is StopReason.ERROR or (
                message.stop_reason is StopReason.ABORTED and not was_heard
            ):
                found.append(f"{place}: an answer that was cut off")
        if isinstance(message, CustomMessage):
            found.append(f"{place}: a message for nobody")
    if waiting:
        found.append(f"{waiting} not answered at the end")
    if len(set(ids)) < len(ids) or "" in ids:
        found.append(f"ids that are not unique: {ids}")
    return found


@given(histories(), targets)
def test_what_is_sendable_can_be_sent(history: list[AgentMessage], target: ReasoningTarget) -> None:
    try:
        messages = sendable(history, target)
    except ReplayRefused:
        return
    assert not problems(messages)
    assert list(sendable(messages, target)) == list(messages), "it finds nothing to do again"


def test_a_sound_history_is_passed_on_as_it_is() -> None:
    history = (UserMessage("Hi"), calling("a"), result("a"), AssistantMessage.from_text("Yes"))
    messages = sendable(history, NOBODY)
    assert all(given is kept for given, kept in zip(history, messages, strict=True))


@pytest.mark.parametrize(
    "message",
    [
        CustomMessage("mark"),
        AssistantMessage((), StopReason.END_TURN),
        AssistantMessage((TextContent("Hel"),), StopReason.ERROR),
        AssistantMessage((TextContent(" "),), StopReason.ABORTED),
        AssistantMessage((TextContent("Hel"), ToolCall("a", "look", {})), StopReason.ABORTED),
        AssistantMessage((TextContent(""),), StopReason.END_TURN),
        AssistantMessage(
            (ReasoningDetailsContent(({"type": "reasoning.encrypted", "data": "A"},)),),
            StopReason.END_TURN,
        ),
        UserMessage(""),
        UserMessage(()),
        UserMessage((TextContent(""),)),
    ],
    ids=lambda message: f"{message.role} {getattr(message, 'content', '')}"[:60],
)
def test_what_nobody_needs_to_see(message: AgentMessage) -> None:
    kept = UserMessage("Hi")
    assert list(sendable([kept, message], NOBODY)) == [kept]


def test_what_was_said_before_a_stop_is_passed_on() -> None:
    """The user has seen it, and may refer to it."""
    said = AssistantMessage((TextContent("Hel"),), StopReason.ABORTED)
    history: list[AgentMessage] = [UserMessage("Hi"), said]
    assert list(sendable(history, NOBODY)) == history


class TestSignatures:
    item: ClassVar = {"type": "reasoning.text", "text": "So.", "format": "anthropic-claude-v1"}
    target = ReasoningTarget(formats=frozenset({ReasoningFormat.ANTHROPIC_CLAUDE_V1}))

    def turn(self, **fields: Any) -> AssistantMessage:
        details = ReasoningDetailsContent(({**self.item, **fields},))
        return AssistantMessage((details, ToolCall("a", "look", {})), StopReason.TOOL_USE)

    def test_that_are_there(self) -> None:
        history: list[AgentMessage] = [UserMessage("Hi"), self.turn(signature="s"), result("a")]
        assert list(sendable(history, self.target)) == history

    def test_that_were_lost(self) -> None:
        history: list[AgentMessage] = [UserMessage("Hi"), self.turn(), result("a")]
        with pytest.raises(ReplayRefused) as refused:
            sendable(history, self.target)
        assert refused.value.index == 1
        assert refused.value.violation.formats == (ReasoningFormat.ANTHROPIC_CLAUDE_V1,)

    def test_that_were_lost_in_an_earlier_round_of_the_turn(self) -> None:
        again = replace(self.turn(signature="s"), content=(ToolCall("b", "look", {}),))
        history: list[AgentMessage] = [
            UserMessage("Hi"),
            self.turn(),
            result("a"),
            again,
            result("b"),
        ]
        with pytest.raises(ReplayRefused):
            sendable(history, self.target)

    @pytest.mark.parametrize(
        "message",
        [UserMessage("And now?"), UserMessage((ImageContent("data:,"),))],
    )
    def test_that_were_lost_before_the_user_spoke(self, message: UserMessage) -> None:
        history: list[AgentMessage] = [UserMessage("Hi"), self.turn(), result("a"), message]
        assert list(sendable(history, self.target)) == history

    def test_that_the_target_does_not_look_at(self) -> None:
        history: list[AgentMessage] = [UserMessage("Hi"), self.turn(), result("a")]
        messages = sendable(history, NOBODY)
        assert messages[1] == AssistantMessage((ToolCall("a", "look", {}),), StopReason.TOOL_USE)

    def test_of_a_provider_that_does_not_ask_for_them(self) -> None:
        history: list[AgentMessage] = [
            UserMessage("Hi"),
            self.turn(format="xai-responses-v1"),
            result("a"),
        ]
        assert list(sendable(history, ANYBODY)) == history


# --- as Chat Completions ----------------------------------------------------------------------

DIALECTS = (COMPATIBLE, OPENAI, OPENROUTER, DEEPSEEK, KIMI, ZAI, GROQ, MISTRAL, XAI)


def complaints(messages: list[dict[str, Any]], dialect: ChatDialect) -> list[str]:
    """What a Chat Completions server would complain about."""
    found: list[str] = []
    waiting: list[str] = []
    ids: list[str] = []
    allowed = r"[A-Za-z0-9]{9}" if dialect.has_short_ids else r"[A-Za-z0-9_-]{1,40}"
    for place, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "tool":
            is_text = isinstance(content, list if dialect.takes_cache_marks else str)
            if message["tool_call_id"] not in waiting or not is_text:
                found.append(f"{place}: {message}")
            else:
                waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            found.append(f"{place}: {waiting} not answered before it")
        waiting = [call["id"] for call in message.get("tool_calls", ())]
        ids += waiting
        if not content and not waiting:
            found.append(f"{place}: nothing in it: {message}")
        found += [
            f"{place}: arguments that are no object"
            for call in message.get("tool_calls", ())
            if not isinstance(json.loads(call["function"]["arguments"]), dict)
        ]
        if not dialect.takes_system_anywhere and place:
            if role == "system":
                found.append(f"{place}: a system message behind the first")
            if role == messages[place - 1]["role"] == "user":
                found.append(f"{place}: a user behind a user")
    found += [f"the id {name!r}" for name in ids if not re.fullmatch(allowed, name)]
    if waiting or len(set(ids)) < len(ids):
        found.append(f"{waiting} not answered, or ids that are not unique: {ids}")
    return found


@settings(max_examples=50)
@given(histories(), TEXT)
def test_every_history_is_written_in_a_form_that_is_taken(
    history: list[AgentMessage], system: str
) -> None:
    request = replace(asking(), messages=history, system_prompt=system)
    for dialect in DIALECTS:
        try:
            body = sent(request, dialect=dialect, model="anthropic/claude")
        except ReplayRefused:
            continue
        assert not complaints(body["messages"], dialect), dialect.name
        assert json.loads(json.dumps(body, allow_nan=False)) == body


# --- the parts --------------------------------------------------------------------------------


def test_thoughts_are_woven_into_the_text() -> None:
    blocks = (
        TextContent("a"),
        ReasoningContent("not this"),
        ThinkingContent("b"),
        ToolCall("1", "look", {}),
        TextContent("c"),
    )
    assert woven_text(blocks) == "a<thought>b</thought>c"
    assert woven_text(()) == ""


@given(open_json())
def test_arguments_are_always_an_object(value: Any) -> None:
    call = ToolCall("a", "look", value)
    expected = value if isinstance(value, dict) else {"value": value}
    assert arguments_object(call) == expected
    assert json.loads(arguments_text(call)) == expected


def test_arguments_that_could_not_be_read_are_quoted() -> None:
    call = ToolCall("a", "look", arg_parse_error("oh", '{"a": 🦀'))
    assert arguments_object(call) == {"invalid_json": '{"a": 🦀'}


@given(st.text(max_size=60), st.sampled_from([9, 40, 64]))
def test_an_id_is_made_of_letters_that_everybody_takes(call_id: str, longest: int) -> None:
    new = safe_id(call_id, max(longest, 29))
    assert re.fullmatch(r"[A-Za-z0-9_-]*", new)
    assert safe_id(new, max(longest, 29)) == new, "an id that will do stays"


@given(st.lists(st.text(max_size=50), unique=True))
def test_ids_stay_apart(ids: list[str]) -> None:
    assert len({safe_id(call_id, 40) for call_id in ids}) == len(ids)


class TestExtras:
    def test_win(self) -> None:
        body = {"a": 1, "b": {"c": 2}}
        assert with_extras(body, {"b": 3}) == {"a": 1, "b": 3}
        assert body == {"a": 1, "b": {"c": 2}}, "what was given stays as it is"

    @pytest.mark.parametrize(
        ("ours", "theirs", "both"),
        [
            ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3, "d": 4}}, {"a": {"b": 1, "c": 3, "d": 4}}),
            ({"a": [1, 2]}, {"a": [2, 3, 3]}, {"a": [1, 2, 3]}),
            ({"a": [1, 1]}, {"a": (4,)}, {"a": [1, 1, 4]}),
            ({"a": [{"b": 1}]}, {"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 2}]}),
            ({"a": [1]}, {"a": "x"}, {"a": "x"}),
            ({"a": {"b": 1}}, {"a": None}, {"a": None}),
            ({"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}),
            (
                {"t": {"type": "enabled", "budget_tokens": 9}},
                {"t": {"type": "disabled"}},
                {"t": {"type": "disabled"}},
            ),
            (
                {"t": {"type": "enabled", "budget_tokens": 9}},
                {"t": {"budget_tokens": 5}},
                {"t": {"type": "enabled", "budget_tokens": 5}},
            ),
        ],
    )
    def test_are_merged(self, ours: Any, theirs: Any, both: Any) -> None:
        assert with_extras(ours, theirs) == both

    @given(open_json(), open_json())
    def test_lose_nothing_of_either(self, ours: Any, theirs: Any) -> None:
        """Merged again they change nothing, and what is on top is all there."""
        before = deepcopy((ours, theirs))
        both = merged(ours, theirs)
        assert (ours, theirs) == before
        assert merged(both, theirs) == both
        if isinstance(ours, dict) and isinstance(theirs, dict) and "type" not in theirs:
            assert both.keys() == ours.keys() | theirs.keys()

    @pytest.mark.parametrize("extras", [None, {}])
    def test_that_are_none(self, extras: Any) -> None:
        assert with_extras({"a": 1}, extras) == {"a": 1}

    @pytest.mark.parametrize("extras", [[], "x", 5, [("a", 1)]])
    def test_that_are_no_mapping(self, extras: Any) -> None:
        with pytest.raises(TransportError, match="provider_extras must be a mapping"):
            with_extras({}, extras)

    def test_that_are_no_json(self) -> None:
        endless: dict[str, Any] = {}
        endless["self"] = endless
        for extras in ({"a": object()}, endless, {"a": 1j}):
            with pytest.raises(TransportError, match="cannot be written as JSON"):
                with_extras({}, extras)

    @given(open_json(st.text(st.characters(), max_size=4)))
    def test_half_characters_are_mended(self, value: Any) -> None:
        written = json.dumps(with_extras({"a": value}, None), ensure_ascii=False)
        written.encode()


# --- moving to another model ------------------------------------------------------------------


def detail(origin: ReasoningFormat, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning.text", "text": "So.", "format": str(origin), **fields}


def test_reasoning_goes_from_no_format_or_model_to_another() -> None:
    """An item that names no model is for all of them; all else in the history stays as it is."""
    models = (None, "m1", "m2")
    with all_cases() as case:
        for origin, goal, made_by, asked in product(
            ReasoningFormat, ReasoningFormat, models, models
        ):
            with case(f"from {origin} of {made_by} to {goal} of {asked}"):
                check_move(origin, goal, made_by, asked)


def check_move(
    origin: ReasoningFormat, goal: ReasoningFormat, made_by: str | None, asked: str | None
) -> None:
    named = {} if made_by is None else {"model": made_by}
    sealed = {"type": "reasoning.encrypted", "data": "x", "format": str(origin), **named}
    told = AssistantMessage(
        (
            ReasoningContent("So."),
            ReasoningDetailsContent((detail(origin, **named), sealed)),
            ThinkingContent("hm"),
            TextContent("Yes"),
            ToolCall("a", "look", {}),
        ),
        StopReason.TOOL_USE,
    )
    history = (SystemMessage("s"), UserMessage("u"), told, result("a"), CustomMessage("c"))
    target = ReasoningTarget(formats=frozenset({goal}), model=asked)
    converted = convert_history(history, target)
    if origin is goal and (made_by == asked or None in (made_by, asked)):
        assert all(given is kept for given, kept in zip(history, converted, strict=True))
    else:
        kept = replace(told, content=told.content[2:])
        assert converted == (*history[:2], kept, *history[3:])


def test_of_a_mixed_message_the_own_part_stays() -> None:
    own, foreign = ReasoningFormat.GOOGLE_GEMINI_V1, ReasoningFormat.ANTHROPIC_CLAUDE_V1
    blocks = (
        ReasoningContent("So."),
        ReasoningDetailsContent((detail(foreign), detail(own))),
        TextContent("Yes"),
        ReasoningDetailsContent((detail(foreign),)),
    )
    [got] = convert_history(
        [AssistantMessage(blocks, StopReason.END_TURN)], ReasoningTarget(formats=frozenset({own}))
    )
    assert isinstance(got, AssistantMessage)
    assert got.content == (
        ReasoningContent("So."),
        ReasoningDetailsContent((detail(own),)),
        TextContent("Yes"),
    )


@pytest.mark.parametrize(
    ("made_by", "asked", "stays"),
    [("m1", "m1", True), ("m1", "m2", False), ("m1", None, True), (None, "m1", True)],
)
def test_reasoning_that_names_its_model(
    made_by: str | None, asked: str | None, stays: bool
) -> None:
    named = {} if made_by is None else {"model": made_by}
    item = detail(ReasoningFormat.ANTHROPIC_CLAUDE_V1, **named)
    message = AssistantMessage((ReasoningDetailsContent((item,)),), StopReason.END_TURN)
    target = ReasoningTarget(formats=frozenset(ReasoningFormat), model=asked)
    [got] = convert_history([message], target)
    assert (got == message) is stays


def test_readable_reasoning_of_unknown_origin_stays() -> None:
    message = AssistantMessage((ReasoningContent("So."), TextContent("Yes")), StopReason.END_TURN)
    assert convert_history([message], NOBODY) == (message,)


@given(histories(), targets)
def test_nothing_foreign_stays_and_nothing_else_goes(
    history: list[AgentMessage], target: ReasoningTarget
) -> None:
    converted = convert_history(history, target)
    assert convert_history(converted, target) == converted
    assert len(converted) == len(history)
    for before, after in zip(history, converted, strict=True):
        if not isinstance(before, AssistantMessage):
            assert after is before
            continue
        assert isinstance(after, AssistantMessage)
        for item in parse_items(after.reasoning_details_values):
            assert item.format in target.formats
        assert _said(after) == _said(before)
        assert replace(after, content=()) == replace(before, content=())
        own = [value for value in before.reasoning_details_values if _is_own(value, target)]
        assert list(after.reasoning_details_values) == own


def _said(message: AssistantMessage) -> list[Any]:
    """All that is no reasoning."""
    kinds = (TextContent, ThinkingContent, ToolCall)
    return [block for block in message.content if isinstance(block, kinds)]


def _is_own(value: Any, target: ReasoningTarget) -> bool:
    if not isinstance(value, dict):
        return False
    made_by = value.get("model")
    by_another = target.model is not None and made_by is not None and made_by != target.model
    return ReasoningFormat.from_wire(value.get("format")) in target.formats and not by_another
