"""More connections than a worker may have: idle ones make room, then new ones are refused, then they wait."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.edge.s3_server import Receive, Scope, Send, TlsFiles
from gateway.edge.server_state import ServerLimits
from tests.edge.apps import respond, unread
from tests.edge.test_tls import authority, tls  # noqa: F401 - fixtures
from tests.support.manual_clock import ManualClock
from tests.support.serving import Wire, request, serving
from tests.support.waiting import until


async def answered(wire: Wire) -> int:
    await wire.say(request("GET"))
    return (await wire.answer()).status


async def test_the_connection_that_has_idled_the_longest_makes_room() -> None:
    """Idle ones, and those whose request does not become whole; the client of the latter is told."""
    clock = ManualClock()
    async with serving(unread, limits=ServerLimits(max_connections=3), clock=clock) as port:
        wires = []
        for _ in range(3):
            wires.append(await port.connect())
            assert await answered(wires[-1]) == 200
            await clock.advance(1)
        assert await answered(wires[0]) == 200
        await wires[2].say(request("GET")[:-2])
        assert await answered(await port.connect()) == 200
        assert await wires[1].rest() == b""
        assert await answered(await port.connect()) == 200
        assert (await wires[2].answer()).status == 503
        assert await answered(wires[0]) == 200


REFUSED = {
    "a body that does not come": b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\nbeginning",
    "a 100 that is waited for": b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n",
    "chunks": b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "a bad chunk": b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "no head at all": b"\0\r\n\r\n",
}


@pytest.mark.parametrize("raw", REFUSED.values(), ids=list(REFUSED))
async def test_who_was_refused_keeps_nobody_out(raw: bytes) -> None:
    """What a stranger still sends behind a refusal is thrown away for a while, and only where there is room for him."""
    async with serving(unread, limits=ServerLimits(max_connections=3), clock=ManualClock()) as port:
        for _ in range(4):
            strangers = [await port.connect() for _ in range(3)]
            for wire in strangers:
                await wire.say(raw)
                await wire.reader.readuntil(b"\r\n\r\n")
            one = await port.connect()
            assert await answered(one) == 200
            for wire in (*strangers, one):
                wire.abort()
            await port.connections(0)


async def test_where_all_are_at_work_a_new_one_is_told_to_slow_down() -> None:
    """503 SlowDown, which SDKs try again; the ones behind it wait in the queue, and are served when there is room."""
    go_on, clock = asyncio.Event(), ManualClock()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await respond(send, b"done")

    async with serving(app, limits=ServerLimits(max_connections=2, refused_connections=1), clock=clock) as port:
        busy = [await port.connect() for _ in range(2)]
        for wire in busy:
            await wire.say(request("GET"))
        await port.requests(2)
        refused, queued = await port.connect(), await port.connect()
        assert await answered(refused) == 503
        await queued.say(request("GET"))
        assert port.server.open_connections == 3
        go_on.set()
        assert [(await wire.answer()).body for wire in busy] == [b"done"] * 2
        for wire in (*busy, refused):
            await wire.close()
        await port.connections(0)
        await clock.advance(2)
        assert (await queued.answer()).status == 200


async def test_connections_that_say_nothing_to_https_make_room(tls: TlsFiles) -> None:  # noqa: F811
    """They are no protocols yet; the oldest goes."""
    async with serving(unread, tls=tls, limits=ServerLimits(max_connections=2)) as port, AsyncExitStack() as stack:
        for _ in range(20):
            stack.callback((await port.connect()).abort)
        await until(lambda: port.server.open_connections == 2)
        wire = await port.connect()
        await wire.say(request("GET"))
        assert (await wire.answer()).status == 400


@pytest.mark.parametrize(("descriptors", "connections"), [(1024, 256), (1_048_576, 16_384), (2, 1)])
def test_some_descriptors_are_left_for_the_rest(descriptors: int, connections: int) -> None:
    """A worker that has only connections can open no block and reach no origin."""
    assert ServerLimits().connections_max(descriptors) == connections
