"""Whatever a server does, a transport makes of it what it should, wherever the bytes are cut.

To try another wire, write a module like `wires_chat` and add it to `WIRES`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import AssistantMessage, StopReason, TextContent, ToolCall, Usage
from clark_agent.clock import Clock
from clark_agent.stream import Done, Error
from clark_agent.testing import FakeClock
from clark_agent.testing.misbehaviours import (
    MISBEHAVIOURS,
    Call,
    Comment,
    End,
    Finish,
    Misbehaviour,
    Reason,
    ReportUsage,
    Say,
    Step,
    cut_anywhere_problems,
)
from clark_agent.transports import RetryPolicy, Transport
from clark_agent.transports.http.response import Answer as Heard
from clark_agent.transports.http.response import ProviderFailure
from tests.cases import all_cases
from tests.strategies import cuts
from tests.transports import wires_anthropic, wires_chat, wires_gemini, wires_responses
from tests.transports.servers.bytes_server import Answer, ByteServer
from tests.transports.wires_chat import ask, asking


class Wire(Protocol):
    """What a module brings that knows a provider's bytes."""

    NAME: str

    def transport(
        self, url: str, *, retry: RetryPolicy | None = None, clock: Clock | None = None
    ) -> Transport[bytes]: ...

    def render(self, steps: Sequence[Step]) -> list[bytes]: ...


WIRES: tuple[Wire, ...] = (wires_chat, wires_responses, wires_anthropic, wires_gemini)
ONCE = RetryPolicy(attempts=1)

every_wire = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.NAME)
every_misbehaviour = pytest.mark.parametrize(
    ("wire", "misbehaviour"),
    [
        pytest.param(wire, misbehaviour, id=f"{wire.NAME}-{misbehaviour.name}")
        for wire in WIRES
        for misbehaviour in MISBEHAVIOURS
    ],
)


# --- as it comes ------------------------------------------------------------------------------


@pytest.mark.slow
@every_misbehaviour
async def test_what_must_come_of_it(wire: Wire, misbehaviour: Misbehaviour) -> None:
    async with ByteServer(lambda _: Answer(body=wire.render(misbehaviour.steps))) as server:
        transport = wire.transport(server.url, clock=FakeClock())
        events = await ask(transport, asking(max_output_tokens=misbehaviour.cap))
        await transport.aclose()
    assert not misbehaviour.problems(events)


# --- cut into reads ---------------------------------------------------------------------------


def heard(transport: Transport[bytes], pieces: Sequence[bytes], cap: int | None = None) -> Any:
    """The message, or the failure, that a response in these reads comes to."""
    answer = Heard(cap=cap, new_id=FakeClock().new_id)
    decoder = transport._decoder(answer)
    try:
        for piece in pieces:
            decoder.feed(piece)
        decoder.end()
    except ProviderFailure as failure:
        return answer.partial(failure.failure)
    answer.close()
    return answer.message() if decoder.is_complete else None


@every_wire
def test_cut_at_every_place_it_is_the_same(wire: Wire) -> None:
    transport = wire.transport("http://127.0.0.1:9")
    with all_cases() as case:
        for misbehaviour in MISBEHAVIOURS:
            with case(misbehaviour.name):
                cap = misbehaviour.cap
                whole = b"".join(wire.render(misbehaviour.steps))
                expected = heard(transport, [whole], cap)
                bytewise = [whole[place : place + 1] for place in range(len(whole))]
                assert heard(transport, bytewise, cap) == expected
                for place in range(len(whole)):
                    assert heard(transport, [whole[:place], whole[place:]], cap) == expected


texts = st.text(st.sampled_from("ab <>/think\n\r\u2028é🦀"), max_size=8)
argument_pieces = st.sampled_from(["{", "}", '"a"', ":", "1", '"é\\n"', "[]"])
steps: st.SearchStrategy[list[Step]] = st.lists(
    st.one_of(
        st.builds(Say, texts | st.sampled_from(["<think>", "</think>"])),
        st.builds(Reason, texts),
        st.builds(
            Call,
            st.integers(0, 2),
            st.none() | st.sampled_from(["", "a", "b"]),
            st.none() | st.sampled_from(["", "look", "lo", "see"]),
            st.none() | argument_pieces,
        ),
        st.builds(Finish, st.sampled_from([StopReason.END_TURN, StopReason.MAX_TOKENS])),
        st.builds(ReportUsage, st.builds(Usage, *[st.integers(0, 99)] * 4)),
        st.just(Comment()),
    ),
    max_size=8,
)


@every_wire
@given(steps, st.booleans(), st.data())
def test_any_steps_cut_anywhere_are_the_same(
    wire: Wire, told: list[Step], ends: bool, data: st.DataObject
) -> None:
    transport = wire.transport("http://127.0.0.1:9")
    whole = b"".join(wire.render([*told, *([End()] if ends else [])]))
    assert heard(transport, data.draw(cuts(whole))) == heard(transport, [whole])


@every_wire
@given(texts, st.data())
def test_text_cut_into_deltas_anywhere_is_the_same(
    wire: Wire, text: str, data: st.DataObject
) -> None:
    transport = wire.transport("http://127.0.0.1:9")
    rest: list[Step] = [Finish(StopReason.MAX_TOKENS), End()]
    pieces: list[Step] = [Say(delta) for delta in data.draw(cuts(text))]
    once = heard(transport, wire.render([Say(text), *rest]))
    assert heard(transport, wire.render([*pieces, *rest])) == once


# --- cut off ----------------------------------------------------------------------------------

WHOLE = AssistantMessage(
    (TextContent("é."), ToolCall("a", "look", {"at": 1})), StopReason.TOOL_USE, usage=Usage(9, 2)
)
STEPS: tuple[Step, ...] = (
    Reason("Hm"),
    Say("é"),
    Say("."),
    Call(0, "a", "look", '{"at"'),
    Call(0, None, None, ": 1}"),
    ReportUsage(Usage(9, 2)),
    Finish(StopReason.TOOL_USE),
    End(),
)


def without_a_socket(wire: Wire, pieces: Callable[[], AsyncIterator[bytes]]) -> Transport[bytes]:
    """A transport that reads what a generator makes: a thousand calls take no time."""
    transport = wire.transport("http://127.0.0.1:9", retry=ONCE)

    @asynccontextmanager
    async def opened(_: object) -> AsyncGenerator[AsyncIterator[bytes], None]:
        yield pieces()

    transport._open = opened  # type: ignore[method-assign, assignment]
    return transport


@every_wire
@pytest.mark.parametrize("how", ["closed", "ended"])
async def test_a_disconnect_at_every_byte(wire: Wire, how: str) -> None:
    """A proxy may also end an answer properly that it did not get to the end of."""
    whole = b"".join(wire.render(STEPS))
    place = 0

    async def cut() -> AsyncIterator[bytes]:
        yield whole[:place]
        if how == "closed":
            raise ConnectionResetError("cut")

    transport = without_a_socket(wire, cut)
    ends: list[type[Any]] = []
    for place in range(1, len(whole)):
        events = await ask(transport)
        assert not cut_anywhere_problems(events, WHOLE), whole[:place]
        ends.append(type(events[-1]))
    failed = ends.count(Error)
    assert ends == [Error] * failed + [Done] * (len(ends) - failed), "once whole, it stays so"
    assert ends[0] is Error
    if how == "ended":
        assert ends[-1] is Done, "an empty line is no loss"


@pytest.mark.slow
@every_wire
@pytest.mark.parametrize("how", ["closed", "ended", "reset"])
async def test_a_disconnect_around_the_ends_of_lines(wire: Wire, how: str) -> None:
    """The same with real connections, where cuts make a difference."""
    whole = b"".join(wire.render(STEPS))
    ends = [place for place in range(len(whole)) if whole[place : place + 1] == b"\n"]
    place = 0

    def cut(_: object) -> Answer:
        body = whole[:place]
        return Answer(body=body, cut_after=place if how == "closed" else None, reset=how == "reset")

    async with ByteServer(cut) as server:
        transport = wire.transport(server.url, retry=ONCE)
        for place in sorted({end + off for end in ends for off in (0, 1)} - {len(whole)}):
            events = await ask(transport)
            assert not cut_anywhere_problems(events, WHOLE), whole[:place]
        await transport.aclose()


@pytest.mark.slow
@every_wire
async def test_a_disconnect_between_events(wire: Wire) -> None:
    answer = Answer()
    async with ByteServer(lambda _: answer) as server:
        transport = wire.transport(server.url, retry=ONCE)
        with all_cases() as case:
            for misbehaviour in MISBEHAVIOURS:
                with case(misbehaviour.name):
                    pieces, whole = whole_of(wire, misbehaviour)
                    request = asking(max_output_tokens=misbehaviour.cap)
                    for count in range(len(pieces)):
                        answer = Answer(body=pieces[:count], reset=True)
                        events = await ask(transport, request)
                        assert not cut_anywhere_problems(events, whole), pieces[:count]
        await transport.aclose()


def whole_of(wire: Wire, misbehaviour: Misbehaviour) -> tuple[list[bytes], AssistantMessage]:
    """The events of the answer, and the message that they come to."""
    pieces = wire.render(misbehaviour.steps)
    whole = heard(wire.transport("http://127.0.0.1:9"), pieces, misbehaviour.cap)
    if not isinstance(whole, AssistantMessage):
        whole = AssistantMessage.from_text("Hello")  # the cases that fail begin to say this
    return pieces, replace(whole, content=misbehaviour.content or whole.content)
