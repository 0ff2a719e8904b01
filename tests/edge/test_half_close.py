"""Clients that end their side of the connection behind their request: some wait for the answer, some have left. So with
those whose bytes nobody reads, because a request before them is not answered, or nobody wants the body yet."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from gateway.core import cancellation
from gateway.edge.connection import PROBE_SECONDS
from gateway.edge.cycle import in_task
from gateway.edge.s3_server import Message, Receive, Scope, Send, TlsFiles
from gateway.edge.server_state import ServerLimits
from tests.edge.apps import read_body, respond
from tests.edge.test_tls import authority, tls, trusting  # noqa: F401 - fixtures
from tests.support.descriptors import open_descriptors
from tests.support.manual_clock import ManualClock
from tests.support.serving import request, serving, talking


class Waiting:
    """An application that answers when it is told to, and ends with its client. It reads the body before, or then."""

    def __init__(self, *, reads_at_once: bool = True) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.reads_at_once = reads_at_once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await in_task()
        cancellation.register_request(anywhere=True)
        body = await read_body(receive) if self.reads_at_once else b""
        self.begun.set()
        await self.go_on.wait()
        if not self.reads_at_once:
            body = b"%d" % len(await read_body(receive))
        await respond(send, scope["raw_path"] + body)


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_who_has_only_ended_its_side_gets_its_answer(method: str) -> None:
    """`shutdown(SHUT_WR)` behind the request, while the answer is not known yet."""
    app = Waiting()
    async with talking(app, request(method, "/b/k", b"body" if method == "PUT" else b"")) as (port, wire):
        wire.writer.write_eof()
        assert (await wire.head())[0] == 100
        app.go_on.set()
        assert (await wire.answer()).body == (b"/b/kbody" if method == "PUT" else b"/b/k")
        assert await wire.rest() == b""
        await port.connections(0)


async def test_an_old_client_is_not_asked() -> None:
    """HTTP/1.0 knows no interim response (RFC 9110, 15.2)."""
    app = Waiting()
    async with talking(app, b"GET /b/k HTTP/1.0\r\n\r\n") as (_, wire):
        wire.writer.write_eof()
        await asyncio.wait_for(app.begun.wait(), 10)
        app.go_on.set()
        assert (await wire.answer()).body == b"/b/k"


async def test_all_that_was_asked_before_is_answered() -> None:
    """Several requests, then the end: one answer each. What is not whole gets none."""
    app = Waiting()
    async with talking(app, request("GET", "/b/1") + request("GET", "/b/2") + request("GET", "/b/3")[:-2]) as (
        _,
        wire,
    ):
        wire.writer.write_eof()
        assert (await wire.head())[0] == 100
        app.go_on.set()
        assert [(await wire.answer()).body for _ in range(2)] == [b"/b/1", b"/b/2"]
        assert await wire.rest() == b""


async def test_who_has_left_is_told_apart() -> None:
    """The same end of the stream, but nobody there: the request ends, and nothing is left."""
    app = Waiting()
    async with serving(app) as port:
        before = len(open_descriptors())
        for _ in range(20):
            app.begun.clear()
            wire = await port.connect()
            await wire.say(request("GET"))
            await asyncio.wait_for(app.begun.wait(), 10)
            await wire.close()
            await port.requests(0)
            await port.connections(0)
        assert len(open_descriptors()) == before


async def test_an_application_that_does_not_ask_for_it_is_not_cancelled() -> None:
    """ASGI's own way: `receive` tells."""
    told: asyncio.Queue[Message] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        await told.put(await receive())

    async with talking(app, request("GET")) as (port, wire):
        await port.requests(1)
        await wire.close()
        assert (await asyncio.wait_for(told.get(), 10))["type"] == "http.disconnect"


# --- where nothing is read -------------------------------------------------------------------------------------------


SMALL = ServerLimits(receive_buffer_bytes=64 * 1024)
BEHIND = request("GET", "/b/next", b"", "X: " + "x" * 1000) * 100
BODY_BYTES = 200 * 1024
"""More than is read ahead of the application, and less than what the kernel takes."""

UNREAD = {
    "pipelined requests": (True, request("GET") + BEHIND),
    "pipelined bytes": (True, request("GET") + b"GET /x HTTP/1.1\r\nX: " + b"x" * BODY_BYTES),
    "body": (False, request("PUT", "/b/k", bytes(BODY_BYTES))),
    "part of a body": (False, request("PUT", "/b/k", bytes(BODY_BYTES))[:-1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("name", UNREAD)
async def test_who_leaves_is_noticed_where_nothing_is_read(
    name: str,
    encrypted: bool,
    tls: TlsFiles,  # noqa: F811
    trusting: ssl.SSLContext,  # noqa: F811
) -> None:
    """The request ends, and nothing is left of it."""
    reads_at_once, said = UNREAD[name]
    app = Waiting(reads_at_once=reads_at_once)
    options = {"ssl": trusting, "server_hostname": "localhost"} if encrypted else {}
    async with serving(app, limits=SMALL, tls=tls if encrypted else None) as port:
        for _ in range(2):
            before = len(open_descriptors())
            wire = await port.connect(**options)
            await wire.say(said)
            await port.unread()
            wire.abort()
            await port.requests(0)
            await port.connections(0)
            assert len(open_descriptors()) == before


async def test_who_leaves_behind_more_than_the_kernel_takes_is_asked() -> None:
    """The end of the stream stands behind bytes that are never taken: only sending something finds out."""
    app, clock = Waiting(reads_at_once=False), ManualClock()
    async with talking(app, limits=SMALL, clock=clock) as (port, wire):
        wire.writer.write(request("PUT", "/b/k", bytes(32 * 2**20)))
        await port.unread()
        wire.abort()
        await clock.advance(PROBE_SECONDS[0] + 1)
        await port.requests(0)
        await port.connections(0)


async def test_who_is_there_is_asked_a_few_times_only() -> None:
    """Go's client takes no more than five interim responses."""
    app, clock = Waiting(reads_at_once=False), ManualClock()
    async with talking(app, request("PUT", "/b/k", bytes(BODY_BYTES)), limits=SMALL, clock=clock) as (port, wire):
        await port.unread()
        for _ in range(200):
            await clock.advance(1)
        app.go_on.set()
        heads = [await wire.head() for _ in range(1 + len(PROBE_SECONDS))]
        assert [status for status, _ in heads] == [100] * len(PROBE_SECONDS) + [200]
        assert await wire.body(heads[-1][1]) == b"/b/k%d" % BODY_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipelined requests", "body"])
async def test_who_ends_its_side_behind_what_nobody_reads_gets_its_answer(name: str) -> None:
    reads_at_once, said = UNREAD[name]
    app = Waiting(reads_at_once=reads_at_once)
    async with talking(app, said, limits=SMALL) as (port, wire):
        await port.unread()
        wire.writer.write_eof()
        assert (await wire.head())[0] == 100
        app.go_on.set()
        answers: list[bytes] = []
        while len(answers) < (1 if name == "body" else 101):
            status, headers = await wire.head()
            if status != 100:
                answers.append(await wire.body(headers))
        assert answers[0] == (b"/b/k%d" % BODY_BYTES if name == "body" else b"/bucket/key")
        assert await wire.rest() == b""
