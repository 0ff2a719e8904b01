"""Stopping: nothing that has begun is cut within the grace time, and nothing is left open after it."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from gateway.edge import connection
from gateway.edge.s3_server import Receive, S3Server, Scope, Send
from gateway.edge.server_state import ServerLimits
from tests.edge.apps import echo, respond, unread
from tests.support.manual_clock import ManualClock
from tests.support.serving import Serving, listening_socket, request, serving, talking
from tests.support.waiting import until


class Gate:
    """An application that answers when it is let."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        await respond(send, b"answered")


async def finish(port: Serving) -> None:
    await asyncio.wait_for(port.finished, 15)


async def test_a_request_in_flight_is_answered() -> None:
    """Its answer says that the connection ends; nobody else gets in."""
    gate = Gate()
    async with talking(gate, request("GET")) as (port, wire):
        await gate.begun.wait()
        port.stop.set()
        await until(lambda: port.server.draining)
        with pytest.raises(ConnectionRefusedError):
            await port.connect()
        gate.may_answer.set()
        answer = await wire.answer()
        assert (answer.body, answer.headers["connection"]) == (b"answered", "close")
        assert await wire.rest() == b""
        await finish(port)


async def test_an_idle_connection_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain takes no longer than its work: nobody waits for the keep-alive timeout, or for a next request."""
    monkeypatch.setattr(connection, "FIRST_BYTE_SECONDS", 3600.0)
    async with talking(unread, request("GET"), grace_seconds=3600) as (port, wire):
        await wire.answer()
        port.stop.set()
        assert await wire.rest() == b""
        await finish(port)


async def test_a_request_whose_head_has_begun_is_finished() -> None:
    """A new connection, and one that has been used before."""
    async with serving(echo) as port:
        used, new = await port.connect(), await port.connect()
        await used.say(request("GET"))
        await used.answer()
        whole = request("PUT", "/", b"body")
        for wire in (used, new):
            await wire.say(whole[:20])
        # An answer proves that the loop has seen what was sent before it.
        probe = await port.connect()
        await probe.say(request("GET"))
        await probe.answer()
        port.stop.set()
        await probe.rest()
        for wire in (used, new):
            await wire.say(whole[20:])
            answer = await wire.answer()
            assert (answer.body, answer.headers["connection"]) == (b"body", "close")
        await finish(port)


async def test_a_connection_just_opened_may_still_ask() -> None:
    """Whoever was accepted is served if it asks soon; else the drain does not wait for it."""
    clock = ManualClock()
    async with serving(unread, clock=clock) as port:
        asks, silent = await port.connect(), await port.connect()
        await port.connections(2)
        port.stop.set()
        await until(lambda: port.server.draining)
        await asks.say(request("GET"))
        assert (await asks.answer()).body == b"unread"
        await clock.advance(ServerLimits().sweep_seconds() + connection.FIRST_BYTE_SECONDS)
        assert await silent.rest() == b""
        await finish(port)


async def test_what_is_not_done_by_the_end_of_the_grace_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """The application gets to clean up, the client sees a broken connection, the log says how many."""
    gate = Gate()
    async with talking(gate, request("GET"), grace_seconds=0.05) as (port, wire):
        await gate.begun.wait()
        port.stop.set()
        assert await wire.rest() == b""
        await finish(port)
        assert gate.cancelled
    assert "1 requests are cut off" in caplog.text


async def test_cancelling_the_server_leaves_nothing_open() -> None:
    """Requests are cancelled, connections closed, the listening socket too."""
    gate = Gate()
    async with talking(gate, request("GET")) as (port, wire):
        await gate.begun.wait()
        port.finished.cancel()
        await asyncio.wait((port.finished,))
        assert gate.cancelled
        assert await wire.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await port.connect()


async def test_another_process_goes_on_accepting_from_the_same_socket() -> None:
    """Only this process's descriptor is closed: a stopped worker loses no connection for the others."""
    listener = listening_socket()
    other = listener.dup()
    first, second = S3Server(unread, sockets=[listener]), S3Server(unread, sockets=[other])
    stop_first, stop_second = asyncio.Event(), asyncio.Event()
    port = other.getsockname()[1]
    running = [
        asyncio.create_task(server.serve(stop, grace_seconds=5, on_ready=lambda: None))
        for server, stop in ((first, stop_first), (second, stop_second))
    ]
    await asyncio.sleep(0)
    stop_first.set()
    await asyncio.wait_for(running[0], 10)
    for _ in range(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("GET"))
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()
    stop_second.set()
    await asyncio.wait_for(running[1], 10)


async def test_several_listening_sockets_are_served() -> None:
    """Each of them is one more way in."""
    listeners = [listening_socket(), listening_socket()]
    ports = [listener.getsockname()[1] for listener in listeners]
    stop, ready = asyncio.Event(), asyncio.Event()
    server = S3Server(unread, sockets=listeners, limits=ServerLimits())
    running = asyncio.create_task(server.serve(stop, grace_seconds=5, on_ready=ready.set))
    await asyncio.wait_for(ready.wait(), 10)
    for port in ports:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("GET"))
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()
    stop.set()
    await asyncio.wait_for(running, 10)


def test_running_out_of_descriptors_stops_accepting_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop does not spin on a connection that it cannot take; the next sweep tries again."""
    accept = socket.socket.accept
    failures = iter([OSError(24, "Too many open files")])

    def failing(self: socket.socket) -> object:
        for error in failures:
            raise error
        return accept(self)

    async def scenario() -> None:
        async with serving(unread, limits=ServerLimits(linger_seconds=0.2)) as port:
            monkeypatch.setattr(socket.socket, "accept", failing)
            wire = await port.connect()
            await wire.say(request("GET"))
            assert (await wire.answer()).status == 200

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "cannot accept connections for now" in caplog.text
