"""One client for each event loop, closed with it; what is said when a package or key is missing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from clark_agent import CancellationToken, ConfigError, StreamRequest, UserMessage
from clark_agent.stream import Done
from clark_agent.transports import OpenAIChat
from clark_agent.transports.http.sdk import LoopLocal, api_key_from
from tests.transports.servers.bytes_server import Answer, ByteServer


class Client:
    """Knows where it was made, and whether it was closed there."""

    def __init__(self) -> None:
        self.loop = weakref.ref(asyncio.get_running_loop())
        self.closed = 0

    async def close(self) -> None:
        await asyncio.sleep(0)
        assert self.loop() is asyncio.get_running_loop()
        self.closed += 1


class BoundClient(Client):
    """Holds its loop, as connections do."""

    def __init__(self) -> None:
        super().__init__()
        self.bound_to = asyncio.get_running_loop()


class Clients:
    """The clients of a transport, and all that were ever made."""

    def __init__(self, kind: type[Client] = Client) -> None:
        self.made: list[Client] = []
        self.kind = kind
        self.kept = LoopLocal(self.make, lambda client: client.close())

    def make(self) -> Client:
        self.made.append(self.kind())
        return self.made[-1]

    async def get(self) -> Client:
        return await self.kept.get()


# --- one for each loop --------------------------------------------------------------------------


async def test_a_loop_keeps_its_client() -> None:
    clients = Clients()
    first = await clients.get()
    assert await clients.get() is first
    assert [await task for task in [asyncio.create_task(clients.get()) for _ in range(5)]] == [
        first
    ] * 5
    await clients.kept.aclose()
    assert first.closed == 1


async def test_many_that_ask_at_once_get_the_same() -> None:
    clients = Clients()
    got = await asyncio.gather(*[clients.get() for _ in range(20)])
    assert set(map(id, got)) == {id(clients.made[0])}
    await clients.kept.aclose()
    assert [client.closed for client in clients.made] == [1]


def test_the_end_of_a_loop_closes_its_client() -> None:
    clients = Clients()
    first, second = asyncio.run(clients.get()), asyncio.run(clients.get())
    assert first is not second
    assert [client.closed for client in clients.made] == [1, 1]


@pytest.mark.parametrize("ending", [RuntimeError, asyncio.CancelledError, KeyboardInterrupt])
def test_a_loop_that_ends_badly_closes_its_client_too(ending: type[BaseException]) -> None:
    clients = Clients()

    async def fail() -> None:
        await clients.get()
        raise ending

    with pytest.raises(ending):
        asyncio.run(fail())
    assert [client.closed for client in clients.made] == [1]


def test_two_loops_in_two_threads_have_a_client_each() -> None:
    clients = Clients()
    both = threading.Barrier(2, timeout=10)
    got: list[Client] = []

    async def work() -> None:
        client = await clients.get()
        await asyncio.to_thread(both.wait)  # both loops run now
        assert await clients.get() is client
        assert client.closed == 0
        got.append(client)
        await asyncio.to_thread(both.wait)

    threads = [threading.Thread(target=asyncio.run, args=(work(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2
    assert got[0] is not got[1]
    assert [client.closed for client in got] == [1, 1]


def test_one_loop_after_the_other_is_not_touched_by_the_close_of_another() -> None:
    clients = Clients()
    with asyncio.Runner() as outer:
        client = outer.run(clients.get())

        def elsewhere() -> None:
            asyncio.run(clients.kept.aclose())  # has none, and closes none

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert client.closed == 0
        assert outer.run(clients.get()) is client
    assert client.closed == 1


# --- closing ------------------------------------------------------------------------------------


async def test_after_closing_there_is_a_new_one() -> None:
    clients = Clients()
    await clients.kept.aclose()  # nothing to close
    assert clients.made == []
    first = await clients.get()
    await clients.kept.aclose()
    await clients.kept.aclose()
    second = await clients.get()
    assert second is not first
    await clients.kept.aclose()
    assert [client.closed for client in clients.made] == [1, 1]


def test_a_client_that_was_closed_is_not_closed_again_with_its_loop() -> None:
    clients = Clients()

    async def work() -> None:
        await clients.get()
        await clients.kept.aclose()

    asyncio.run(work())
    assert [client.closed for client in clients.made] == [1]


async def test_a_client_that_cannot_be_made_is_tried_again() -> None:
    tries: list[int] = []

    def make() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise ConfigError("not yet")
        return "made"

    async def close(value: str) -> None:
        tries.clear()

    kept = LoopLocal(make, close)
    with pytest.raises(ConfigError, match="not yet"):
        await kept.get()
    assert await kept.get() == "made"
    await kept.aclose()
    assert tries == []


async def test_what_closing_raises_is_heard() -> None:
    async def fail(value: object) -> None:
        raise RuntimeError("cannot close")

    kept = LoopLocal(object, fail)
    first = await kept.get()
    with pytest.raises(RuntimeError, match="cannot close"):
        await kept.aclose()
    assert await kept.get() is not first
    with pytest.raises(RuntimeError, match="cannot close"):
        await kept.aclose()


# --- nothing is left ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Client, BoundClient])
def test_a_loop_that_is_gone_takes_its_client_along(kind: type[Client]) -> None:
    clients = Clients(kind)
    remains: list[weakref.ref[Any]] = []

    async def work() -> None:
        remains.append(weakref.ref(await clients.get()))
        remains.append(weakref.ref(asyncio.get_running_loop()))

    for _ in range(3):
        asyncio.run(work())
    clients.made.clear()
    gc.collect()
    assert [reference() for reference in remains] == [None] * 6


async def test_a_transport_that_is_gone_takes_its_client_along() -> None:
    clients = Clients()
    await clients.get()
    client = clients.made.pop()
    closed = asyncio.get_running_loop().create_future()

    async def close() -> None:
        closed.set_result(None)

    client.close = close  # type: ignore[method-assign]
    remains = weakref.ref(clients.kept)
    del clients
    gc.collect()
    await closed  # the loop closes what nobody holds any more
    assert remains() is None


@pytest.mark.slow
def test_a_transport_in_one_loop_after_the_other_leaves_no_connection() -> None:
    """An unclosed socket would be a warning, and warnings are errors here."""
    body = b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\n'
    request = StreamRequest(system_prompt="", messages=(UserMessage("hi"),))
    made: list[OpenAIChat] = []

    async def ask() -> None:
        async with ByteServer([Answer(body=body)] * 2) as server:
            # The first to ask makes the transport; it is another server each time, so the address
            # of the transport's client is set by hand.
            if not made:
                made.append(OpenAIChat("m", base_url=server.url))
            transport = made[0]
            client = await transport._clients.get()
            client.base_url = server.url
            for _ in range(2):
                events = [event async for event in transport(request, CancellationToken())]
                assert isinstance(events[-1], Done)
            assert server.open_connections == 1  # the second answer came by the same way
            await transport.aclose()
            await server.all_closed()

    for _ in range(2):
        asyncio.run(ask())
    gc.collect()


# --- the key --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "environment", "key"),
    [
        ("mine", {}, "mine"),
        ("mine", {"A_KEY": "a"}, "mine"),
        (" mine\n", {}, "mine"),
        (None, {"A_KEY": "a", "B_KEY": "b"}, "a"),
        (None, {"B_KEY": " b\n"}, "b"),
        (None, {"A_KEY": "", "B_KEY": "b"}, "b"),
        ("", {"A_KEY": "a"}, "a"),
        ("  ", {"A_KEY": "a"}, "a"),
    ],
)
def test_a_key_is_the_one_given_or_the_first_that_is_set(
    monkeypatch: pytest.MonkeyPatch, given: str | None, environment: dict[str, str], key: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert api_key_from(given, ("A_KEY", "B_KEY"), "TheirModel") == key


@pytest.mark.parametrize("given", [None, "", " "])
def test_without_a_key_the_variables_are_named(given: str | None) -> None:
    text = "TheirModel needs a key: set A_KEY or B_KEY, or pass api_key"
    with pytest.raises(ConfigError, match=text):
        api_key_from(given, ("A_KEY", "B_KEY"), "TheirModel")
