"""Clients that leave, and clients that take nothing: who is told, and what is left behind."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gateway.core.errors import ClientDisconnected
from gateway.edge.s3_server import ASGIApp, Message, Receive, Scope, Send
from gateway.edge.server_state import ServerLimits
from tests.edge.apps import file_app, lending_app, respond, unread
from tests.support.descriptors import open_descriptors
from tests.support.manual_clock import ManualClock
from tests.support.serving import Serving, Wire, request, serving, talking

LARGE_BYTES = 64 * 1024 * 1024


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """More than all buffers between server and client hold (sparse)."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(LARGE_BYTES)
    return path


def descriptors() -> int:
    return len(open_descriptors())


async def narrow(port: Serving) -> Wire:
    """A connection whose receiving side takes little."""
    receiver = socket.socket()
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    receiver.setblocking(False)
    await asyncio.get_running_loop().sock_connect(receiver, ("127.0.0.1", port.port))
    wire = Wire(*await asyncio.open_connection(sock=receiver, limit=4096))
    port.wires.append(wire)
    return wire


def recording(app: ASGIApp, ends: asyncio.Queue[BaseException | None]) -> ASGIApp:
    """`app`, and how each of its runs ended."""

    async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except BaseException as error:
            await ends.put(error)
            raise
        await ends.put(None)

    return recorded


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    """A body in memory that does not end."""
    await send({"type": "http.response.start", "status": 200})
    while True:
        await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})


def sending(kind: str, large: Path) -> ASGIApp:
    """An application that sends more than a client takes, from memory, from a file, or lent from memory."""
    if kind == "bytes":
        return endless
    return file_app(large) if kind == "file" else lending_app(bytes(LARGE_BYTES))


@pytest.mark.parametrize("kind", ["bytes", "file", "lent"])
async def test_a_stream_stops_when_the_client_leaves(kind: str, large: Path) -> None:
    """The application gets ClientDisconnected; nothing is logged as a fault, no descriptor or task stays."""
    app = sending(kind, large)
    ends: asyncio.Queue[BaseException | None] = asyncio.Queue()
    async with serving(recording(app, ends)) as port:
        tasks, left_open = len(asyncio.all_tasks()), []
        for _ in range(2):  # the first opens what the server keeps
            for _ in range(10):
                wire = await narrow(port)
                await wire.say(request("GET"))
                await wire.head()
                wire.abort()
                assert isinstance(await asyncio.wait_for(ends.get(), 10), ClientDisconnected)
            await port.connections(0)
            await port.requests(0)
            left_open.append(descriptors())
        assert left_open[0] == left_open[1]
        assert len(asyncio.all_tasks()) == tasks


def test_leaving_is_not_a_fault(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients leave all the time: no warning."""

    async def scenario() -> None:
        async with serving(file_app(large)) as port:
            wire = await narrow(port)
            await wire.say(request("GET"))
            await wire.head()
            wire.abort()
            await port.requests(0)

    with caplog.at_level("INFO"):
        asyncio.run(scenario())
    assert not caplog.records


async def test_an_application_that_waits_learns_that_the_client_left() -> None:
    """`receive` tells: an answer that takes long can be given up."""
    begun, told = asyncio.Event(), asyncio.Queue[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["more_body"] is False
        begun.set()
        await told.put(await receive())
        with pytest.raises(ClientDisconnected):
            await respond(send)

    async with talking(app, request("GET")) as (port, wire):
        await begun.wait()
        await wire.close()
        assert (await asyncio.wait_for(told.get(), 10)) == {"type": "http.disconnect"}
        await port.requests(0)


async def test_receive_behind_the_response_says_disconnect() -> None:
    """As ASGI asks: there is nothing more to wait for."""
    told = asyncio.Queue[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send)
        await told.put(await receive())

    async with talking(app, request("GET")) as (_, wire):
        await wire.answer()
        assert (await asyncio.wait_for(told.get(), 10)) == {"type": "http.disconnect"}


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_gone() -> None:
    """A body that ends early never looks complete."""
    messages = asyncio.Queue[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            await messages.put(message)
        await messages.put(message)

    async with talking(app, request("PUT", "/", b"", "Content-Length: 6") + b"abc") as (_, wire):
        assert (await messages.get())["more_body"] is True
        await wire.close()
        assert (await asyncio.wait_for(messages.get(), 10))["type"] == "http.disconnect"


@pytest.mark.parametrize("kind", ["bytes", "file", "lent"])
async def test_a_client_that_takes_nothing_is_dropped(kind: str, large: Path) -> None:
    """After the write timeout, and not before."""
    app = sending(kind, large)
    clock, ends = ManualClock(), asyncio.Queue[BaseException | None]()
    limits = ServerLimits(write_timeout_seconds=30)
    async with serving(recording(app, ends), limits=limits, clock=clock) as port:
        wire = await narrow(port)
        await wire.say(request("GET"))
        await wire.head()
        await clock.advance(28)
        assert ends.empty()
        # What the server could still push while nobody reads ends within a few sweeps.
        await clock.advance(60)
        assert isinstance(await asyncio.wait_for(ends.get(), 10), ClientDisconnected)
        await port.connections(0)


@pytest.mark.slow
async def test_a_slow_client_is_not_a_stalled_one(large: Path) -> None:
    """Whoever takes a little within every timeout gets the whole file."""
    clock = ManualClock()
    async with serving(file_app(large), limits=ServerLimits(write_timeout_seconds=4), clock=clock) as port:
        wire = await narrow(port)
        await wire.say(request("GET"))
        await wire.head()
        received = 0
        while received < LARGE_BYTES:
            received += len(await wire.reader.readexactly(min(LARGE_BYTES - received, 4 * 1024 * 1024)))
            await clock.advance(2)
        await wire.say(request("HEAD"))
        assert (await wire.answer(to_head=True)).status == 200


async def test_many_connections_leave_nothing_behind() -> None:
    """Connections that are refused, answered, idle, half a head, or nothing at all."""
    async with serving(unread) as port:
        before, tasks = descriptors(), len(asyncio.all_tasks())
        for data in (
            b"",
            b"GET /",
            b"nonsense\n",
            request("GET"),
            request("PUT", "/", b"", "Content-Length: 3"),
        ) * 20:
            wire = await port.connect()
            await wire.say(data)
            await wire.close()
        await port.connections(0)
        await port.requests(0)
        assert descriptors() == before
        assert len(asyncio.all_tasks()) == tasks


async def test_an_early_answer_to_a_client_that_has_just_left_is_no_error() -> None:
    """The answer itself can reset the connection; the application must not be told of that as a failure of its own."""
    ends: asyncio.Queue[BaseException | None] = asyncio.Queue()
    with socket.socket() as client:

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            client.close()
            await respond(send, b"refused", 400)

        async with serving(recording(app, ends)) as port:
            client.connect(("127.0.0.1", port.port))
            client.send(b"PUT / HTTP/1.1\r\nHost: s3.local\r\nContent-Length: 9\r\n\r\n")
            async with asyncio.timeout(20):
                assert await ends.get() is None
            await port.connections(0)
