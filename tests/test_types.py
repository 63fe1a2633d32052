"""Messages, blocks, identity and context as values: what they hold, and that sharing is safe."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

import clark_agent
from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    ImageContent,
    LoopError,
    ReasoningContent,
    ReasoningDetailsContent,
    RunIdentity,
    StopReason,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from clark_agent.errors import ConfigError
from clark_agent.messages import encode_json
from clark_agent.reasoning import ReasoningEncrypted, ReasoningFormat, ReasoningText
from clark_agent.types import arg_parse_error, detect_arg_parse_error
from tests.strategies import (
    IDENTITIES,
    REASONING_ITEMS,
    TEXT,
    USAGES,
    messages,
    open_json,
    transcripts,
)

# --- usage and messages -----------------------------------------------------------------------


@given(USAGES, USAGES)
def test_usage_adds_field_by_field(one: Usage, other: Usage) -> None:
    total = one + other
    assert total == other + one
    assert one + Usage() == one
    for name in Usage.__struct_fields__:
        assert getattr(total, name) == getattr(one, name) + getattr(other, name)


@given(messages())
def test_a_message_cannot_be_changed(message: AgentMessage) -> None:
    for name in message.__struct_fields__:
        with pytest.raises(AttributeError, match="immutable"):
            setattr(message, name, None)


def test_a_message_built_here_has_no_timestamp() -> None:
    built: list[AgentMessage] = [
        SystemMessage("s"),
        UserMessage("u"),
        AssistantMessage.from_text("a"),
        ToolResultMessage("id", "look", ()),
    ]
    assert [message.timestamp for message in built] == [None] * 4


def test_texts_of_an_assistant_message_by_channel() -> None:
    call = ToolCall("id", "look", {})
    message = AssistantMessage(
        (
            TextContent("one "),
            ThinkingContent("hm"),
            ReasoningContent("because "),
            ReasoningDetailsContent((1, {"a": 2})),
            call,
            TextContent("two"),
            ThinkingContent("ah"),
            ReasoningContent("so"),
            ReasoningDetailsContent((None,)),
        ),
        StopReason.TOOL_USE,
    )
    assert message.plain_text == "one two"
    assert message.thinking_text == "hm\nah"
    assert message.reasoning_text == "because so"
    assert message.reasoning_details_values == (1, {"a": 2}, None)
    assert message.tool_calls == (call,)
    assert message.tool_calls[0] is call


def test_an_empty_assistant_message_has_empty_texts() -> None:
    message = AssistantMessage((), StopReason.OTHER)
    assert (message.plain_text, message.thinking_text, message.reasoning_text) == ("", "", "")
    assert message.reasoning_details_values == message.tool_calls == ()


def test_plain_text_of_a_user_and_of_a_result_leaves_images_out() -> None:
    blocks = (TextContent("a"), ImageContent("data:,x", alt="no"), TextContent("b"))
    assert UserMessage(blocks).plain_text == "ab"
    assert UserMessage("a string").plain_text == "a string"
    assert ToolResultMessage("id", "look", blocks).plain_text == "ab"


def test_from_text() -> None:
    assert AssistantMessage.from_text("") == AssistantMessage(
        (TextContent(""),), StopReason.END_TURN
    )
    cut = AssistantMessage.from_text("cut", stop_reason=StopReason.MAX_TOKENS)
    assert cut.stop_reason is StopReason.MAX_TOKENS


@pytest.mark.parametrize("blank", [None, "", " \n\t"])
def test_from_calls_drops_blank_text(blank: str | None) -> None:
    calls = [ToolCall("1", "a", {}), ToolCall("2", "b", None)]
    message = AssistantMessage.from_calls(calls, blank)
    assert message == AssistantMessage(tuple(calls), StopReason.TOOL_USE)


def test_from_calls_puts_text_first_and_keeps_its_white_space() -> None:
    call = ToolCall("1", "a", {})
    message = AssistantMessage.from_calls(iter([call]), " hm ", stop_reason=StopReason.OTHER)
    assert message == AssistantMessage((TextContent(" hm "), call), StopReason.OTHER)


# --- reasoning details ------------------------------------------------------------------------


@given(st.lists(REASONING_ITEMS, max_size=4))
def test_reasoning_details_from_items_and_back(items: list[Any]) -> None:
    block = ReasoningDetailsContent.from_items(items)
    assert block.as_items == tuple(items)
    assert block.has_signed_payload == any(item.is_signed for item in items)


def test_details_of_an_unknown_kind_are_kept_but_not_viewed() -> None:
    odd: tuple[Any, ...] = ({"type": "reasoning.video", "frames": [1]}, "text", None, 7)
    known = {"type": "reasoning.text", "text": "so"}
    block = ReasoningDetailsContent((*odd, known))
    assert block.details == (*odd, known)
    assert block.as_items == (ReasoningText(None, ReasoningFormat.UNKNOWN, None, "so"),)
    assert not block.has_signed_payload


def test_an_encrypted_item_is_a_signed_payload() -> None:
    item = ReasoningEncrypted(None, ReasoningFormat.OPENAI_RESPONSES_V1, 0, "…")
    assert ReasoningDetailsContent.from_items([item]).has_signed_payload


# --- arguments that were not JSON -------------------------------------------------------------


@given(TEXT, TEXT)
def test_arg_parse_error_is_detected(error: str, raw: str) -> None:
    assert detect_arg_parse_error(arg_parse_error(error, raw)) == (error, raw)


@given(open_json())
def test_other_arguments_are_no_parse_error(arguments: object) -> None:
    assert detect_arg_parse_error(arguments) is None


@pytest.mark.parametrize("lost", ["__clark_arg_parse_error", "__clark_arg_raw"])
@pytest.mark.parametrize("odd", [None, 1, ["x"]])
def test_half_a_parse_error_is_none(lost: str, odd: object) -> None:
    whole = arg_parse_error("bad", "{")
    assert detect_arg_parse_error({**whole, lost: odd}) is None
    assert detect_arg_parse_error({k: v for k, v in whole.items() if k != lost}) is None


# --- identity ---------------------------------------------------------------------------------


def test_root_identities_are_fresh_uuids() -> None:
    one, other = RunIdentity.root(), RunIdentity.root()
    assert one.run_id != other.run_id
    assert UUID(one.run_id).version == 4
    assert one == RunIdentity(one.run_id)
    assert (one.parent_run_id, one.depth, one.conversation_id, one.deadline_unix_ms) == (
        None,
        0,
        None,
        None,
    )


def test_root_identity_with_everything_given() -> None:
    identity = RunIdentity.root("mine", conversation_id="talk", deadline_unix_ms=7)
    assert identity == RunIdentity("mine", None, 0, "talk", 7)


@given(IDENTITIES)
def test_child_identity_is_one_deeper_in_the_same_conversation(parent: RunIdentity) -> None:
    child = RunIdentity.child_of(parent)
    assert UUID(child.run_id).version == 4
    assert child.parent_run_id == parent.run_id
    assert child.depth == parent.depth + 1
    assert child.conversation_id == parent.conversation_id
    assert child.deadline_unix_ms == parent.deadline_unix_ms
    assert RunIdentity.child_of(parent, "mine").run_id == "mine"


# --- context ----------------------------------------------------------------------------------


@given(transcripts(), transcripts(), st.none() | IDENTITIES)
def test_extend_takes_messages_or_what_carries_them(
    before: list[AgentMessage], new: list[AgentMessage], identity: RunIdentity | None
) -> None:
    context = AgentContext("prompt", tuple(before), identity)
    kept = context.messages
    for produced in (new, tuple(new), iter(new), LoopError("ended", messages=new)):
        longer = context.extend(produced)
        assert (longer.system_prompt, longer.identity) == ("prompt", identity)
        assert len(longer.messages) == len(before) + len(new)
        for message, given_message in zip(longer.messages, [*before, *new], strict=True):
            assert message is given_message
    assert context.messages is kept
    assert context == AgentContext("prompt", tuple(before), identity)


def test_spawn_child_starts_empty_under_its_parent() -> None:
    parent = RunIdentity.root(conversation_id="talk", deadline_unix_ms=5)
    context = AgentContext("prompt", (UserMessage("hi"),), parent)
    child = context.spawn_child("other prompt")
    assert (child.system_prompt, child.messages) == ("other prompt", ())
    assert child.identity is not None
    assert child.identity == RunIdentity.child_of(parent, child.identity.run_id)
    assert context.messages == (UserMessage("hi"),)


def test_spawn_child_without_an_identity_has_a_fresh_root_above_it() -> None:
    context = AgentContext()
    child = context.spawn_child("prompt").identity
    assert child is not None
    assert child.depth == 1
    assert child.parent_run_id is not None
    assert UUID(child.parent_run_id).version == 4
    assert child.parent_run_id != child.run_id
    assert context.identity is None


@pytest.mark.parametrize(
    "message",
    [
        SystemMessage("x"),
        UserMessage("x"),
        AssistantMessage.from_text("x"),
        ToolResultMessage("c", "t", ()),
        CustomMessage("k"),
    ],
)
def test_the_role_is_that_of_the_json(message: AgentMessage) -> None:
    assert message.role == json.loads(encode_json(message))["role"]


@pytest.mark.parametrize("nothing", [None, 5, "hello"])
def test_a_context_is_extended_by_messages_alone(nothing: Any) -> None:
    with pytest.raises(TypeError, match="expected a result, an error of a run, or messages, not"):
        AgentContext().extend(nothing)


@pytest.mark.parametrize("wrong", [["hi"], "hi", [UserMessage("a"), {"role": "user"}], [None]])
def test_a_context_holds_messages_alone(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"messages must be messages, not .*: use UserMessage"):
        AgentContext(messages=wrong)
    with pytest.raises(TypeError, match="messages must be messages"):
        AgentContext().extend([*wrong, UserMessage("b")])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"messages": None}, "messages must be a list of messages, not NoneType"),
        ({"messages": UserMessage("hi")}, "messages must be a list of messages, not UserMessage"),
        ({"system_prompt": SystemMessage("hi")}, "system_prompt must be a text, not SystemMessage"),
        ({"system_prompt": None}, "system_prompt must be a text, not NoneType"),
        ({"identity": "run-1"}, "identity must be a RunIdentity, not str"),
    ],
)
def test_a_context_of_the_wrong_types(given: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=f"AgentContext: {problem}"):
        AgentContext(**given)


def test_messages_that_can_be_read_only_once_are_not_lost() -> None:
    said = [UserMessage("a"), UserMessage("b")]
    assert AgentContext(messages=iter(said)).messages == tuple(said)  # type: ignore[arg-type]
    context = AgentContext(messages=said)  # type: ignore[arg-type]
    said.clear()
    assert len(context.messages) == 2


def test_a_kind_of_message_of_ones_own_is_one() -> None:
    class Note(UserMessage, frozen=True):
        pass

    assert AgentContext(messages=(Note("a"),)).messages == (Note("a"),)


# --- what the cyclic collector may leave out ----------------------------------------------------

SCALARS = (str, bytes, int, float, bool, NoneType, Enum)


def uncollected(kind: type[Struct]) -> Iterator[type[Struct]]:
    """The structs of this package that the collector does not follow."""
    for each in kind.__subclasses__():
        if each.__module__.startswith("clark_agent.") and not each.__struct_config__.gc:
            yield each
        yield from uncollected(each)


def cannot_refer_back(kind: Any) -> bool:
    """Whether no value of the type can lead to what holds it."""
    if get_origin(kind) is Annotated:
        return cannot_refer_back(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType, tuple):
        return all(cannot_refer_back(part) for part in get_args(kind) if part is not ...)
    if get_origin(kind) is Literal:
        return True
    if not isinstance(kind, type):
        return False
    return issubclass(kind, SCALARS) or (issubclass(kind, Struct) and not kind.__struct_config__.gc)


def test_a_struct_that_is_not_collected_cannot_be_part_of_a_cycle() -> None:
    """Otherwise it would never be freed, nor would anything that it leads to."""
    for module in pkgutil.walk_packages(clark_agent.__path__, "clark_agent."):
        if module.name.endswith("__main__"):
            continue
        try:
            import_module(module.name)
        except ModuleNotFoundError as error:
            if str(error.name).startswith("clark_agent"):
                raise  # ours; anything else is an extra that is not installed
        except ConfigError as error:
            if "pip install '.[" not in str(error):
                raise
    found = set(uncollected(Struct))
    assert {TextContent, ImageContent, Usage} <= found
    assert not {
        f"{kind.__qualname__}.{field.name}: {field.type}"
        for kind in found
        for field in msgspec.structs.fields(kind)
        if not cannot_refer_back(field.type)
    }


@pytest.mark.parametrize(
    "kind", [Any, dict[str, int], list[int], object, tuple[Any, ...], str | ToolCall, ToolCall]
)
def test_what_is_open_can_be_part_of_a_cycle(kind: Any) -> None:
    assert not cannot_refer_back(kind)
