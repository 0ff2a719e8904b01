"""What all connections hold together of heads that are not whole, of bytes behind requests, and of refusals that nobody
takes: bounded, whoever sends them; and what a connection keeps that waits for its next request."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import Callable

import pytest

from gateway.edge.connection import S3Protocol
from gateway.edge.cycle import RESPONSE, in_task
from gateway.edge.response import EncodedResponse
from gateway.edge.s3_server import ASGIApp, Receive, Scope, Send
from gateway.edge.server_state import ServerLimits, SharedBytes
from tests.edge.apps import unread
from tests.support.manual_clock import ManualClock
from tests.support.serving import Serving, Wire, request, serving, talking

CLIENTS = 40
PIECE = 16 * 1024
BOUND = 128 * 1024
LIMITS = ServerLimits(unparsed_bytes=BOUND, unsent_refusals_bytes=BOUND, max_header_bytes=64 * 1024)
ANSWER = bytes(8 * 1024 * 1024)
"""More than the kernel takes for a client that does not read."""


async def _silent(scope: Scope, receive: Receive, send: Send) -> None:
    await in_task()
    await asyncio.Event().wait()


def _whole(status: int, body: bytes) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": RESPONSE, "response": EncodedResponse(status, (), b"", body, len(body))})

    return app


def _received(one: S3Protocol) -> int:
    return len(one._received)


def _unsent(one: S3Protocol) -> int:
    return one.transport.get_write_buffer_size()


async def _most(port: Serving, held: Callable[[S3Protocol], int], said: bytes, clients: int) -> tuple[int, list[Wire]]:
    """The most that all connections held at any time, and their clients, which do not read."""
    most, wires = 0, []
    for _ in range(clients):
        unread_socket = socket.socket()
        unread_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread_socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(unread_socket, ("127.0.0.1", port.port))
        wire = Wire(*await asyncio.open_connection(sock=unread_socket))
        port.wires.append(wire)
        wires.append(wire)
        await wire.say(said)
        for _ in range(20):
            await asyncio.sleep(0)
            most = max(most, sum(held(one) for one in port.protocols()))
    return most, wires


@pytest.mark.parametrize(
    ("app", "said"),
    [
        (unread, b"GET /b/k HTTP/1.1\r\nHost: h\r\nX: " + b"x" * PIECE),
        (_silent, request("GET") + b"GET /b/k HTTP/1.1\r\nHost: h\r\nX: " + b"x" * PIECE),
    ],
)
async def test_half_sent_requests_are_bounded_together(app: ASGIApp, said: bytes) -> None:
    """Alone, and behind a request: those that began first make room; whoever sends a whole one is answered."""
    async with serving(app, limits=LIMITS) as port:
        most, wires = await _most(port, _received, said, CLIENTS)
        assert BOUND // 2 < most <= BOUND + PIECE
        assert len(port.protocols()) <= 1 + BOUND // PIECE
        if app is unread:
            assert (await wires[0].answer()).status == 503
            await wires[-1].say(b"\r\n\r\n")
            assert (await wires[-1].answer()).status == 200


async def test_a_head_that_has_come_is_held_no_more() -> None:
    """In pieces, alone and behind others: nothing is left of them, so nobody has to make room."""
    async with serving(unread, limits=LIMITS) as port:
        head = request("GET", "/b/k", b"", "X: " + "x" * PIECE)
        wire = await port.connect()
        for _ in range(CLIENTS):
            for piece in (head[:1], head[1:100], head[100:-1], head[-1:] + head + head[:50], head[50:]):
                await wire.say(piece)
                await asyncio.sleep(0)
            for _ in range(3):
                assert (await wire.answer()).status == 200
        assert port.server._state.unparsed.held_bytes == 0


async def test_refusals_that_nobody_takes_are_bounded_together() -> None:
    limits = ServerLimits(unsent_refusals_bytes=2 * len(ANSWER))
    async with serving(_whole(403, ANSWER), limits=limits) as port:
        most, _ = await _most(port, _unsent, request("GET"), 8)
        assert len(ANSWER) // 2 < most <= limits.unsent_refusals_bytes


@pytest.mark.parametrize(("status", "left"), [(403, 0), (200, 3)])
async def test_who_does_not_take_a_refusal_is_cut_off(status: int, left: int) -> None:
    """After seconds; others have the time that all answers have."""
    clock, limits = ManualClock(), ServerLimits(unsent_refusals_bytes=2**30)
    async with serving(_whole(status, ANSWER), limits=limits, clock=clock) as port:
        await _most(port, _unsent, request("GET"), 3)
        await clock.advance(limits.refusal_timeout_seconds + 2)
        await port.connections(left)


async def test_who_takes_its_refusals_keeps_its_connection() -> None:
    """However many they are."""
    async with talking(_whole(403, bytes(PIECE)), limits=LIMITS) as (port, wire):
        for _ in range(CLIENTS):
            await wire.say(request("GET"))
            assert (await wire.answer()).status == 403
        assert port.server._state.unsent_refusals.held_bytes == 0


@pytest.mark.parametrize("method", ["GET", "NONSENSE"])
async def test_a_connection_that_waits_keeps_nothing_of_what_it_has_read(method: str) -> None:
    """Idle behind an answer, or thrown away behind a refusal."""
    async with serving(unread, limits=LIMITS) as port:

        async def ask() -> None:
            wire = await port.connect()
            await wire.say(request(method, "/b/k", b"", "X: " + "x" * PIECE))
            await wire.answer()

        await ask()
        tracemalloc.start()
        try:
            for _ in range(CLIENTS):
                await ask()
            kept_bytes = sum(trace.size for trace in tracemalloc.take_snapshot().traces if trace.size >= PIECE // 2)
        finally:
            tracemalloc.stop()
        assert len(port.protocols()) == CLIENTS + 1
        assert kept_bytes < CLIENTS * PIECE // 4


def test_the_oldest_give_way() -> None:
    """As many as are needed, and only once; whoever holds nothing any more begins anew."""
    told: list[str] = []
    first, second, third = (lambda name=name: told.append(name) for name in ("first", "second", "third"))
    shared = SharedBytes(100)
    shared.hold(first, 40)
    shared.hold(second, 40)
    shared.hold(first, 0)
    shared.hold(first, 20)
    assert (shared.held_bytes, told) == (60, [])
    shared.hold(third, 90)
    assert (shared.held_bytes, told) == (90, ["second", "first"])
    shared.hold(first, 0)
    shared.hold(third, 101)
    assert (shared.held_bytes, told) == (0, ["second", "first", "third"])
