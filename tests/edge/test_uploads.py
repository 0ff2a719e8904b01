"""Request bodies: 100-continue, back-pressure, early answers, bad chunks, slow senders."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import S3Error
from gateway.edge.s3_server import Message, Receive, Scope, Send
from gateway.edge.server_state import ServerLimits
from tests.edge.apps import echo, read_body, respond, unread
from tests.support.manual_clock import ManualClock
from tests.support.serving import request, talking

CHUNKED = "Transfer-Encoding: chunked"
EXPECT = "Expect: 100-continue"


async def tell_failure(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and answers with the error that reading it gives."""
    try:
        await respond(send, await read_body(receive))
    except S3Error as error:
        await respond(send, error.code.encode(), error.status)


async def test_100_continue_comes_when_the_application_reads() -> None:
    """The client holds its body back until then (RFC 9110, 10.1.1)."""
    async with talking(echo, request("PUT", "/", b"", EXPECT, "Content-Length: 4")) as (_, wire):
        assert await wire.head() == (100, {})
        await wire.say(b"body" + request("PUT", "/", b"next"))
        assert (await wire.answer()).body == b"body"
        assert (await wire.answer()).body == b"next"
        await wire.close()


async def test_100_continue_is_not_sent_to_who_did_not_wait() -> None:
    """RFC 9110, 10.1.1: it may be left out once some of the body has arrived."""
    async with talking(echo, request("PUT", "/", b"body", EXPECT)) as (_, wire):
        assert (await wire.head())[0] == 200
        await wire.close()


@pytest.mark.parametrize(
    "headers", [(EXPECT, "Content-Length: 4"), ("Content-Length: 4",), (CHUNKED,), (EXPECT, CHUNKED)]
)
async def test_an_answer_before_the_end_of_the_body_closes(headers: tuple[str, ...]) -> None:
    """The client may or may not send the rest: what follows cannot be told from a request."""
    async with talking(unread, request("PUT", "/", b"", *headers)) as (_, wire):
        answer = await wire.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await wire.rest() == b""
        await wire.close()


async def test_an_unread_body_that_has_arrived_keeps_the_connection() -> None:
    """Small bodies that nobody looks at cost no connection."""
    async with talking(unread, request("DELETE", "/", b"nobody reads this") * 2) as (_, wire):
        first, second = await wire.answer(), await wire.answer()
        assert "connection" not in {*first.headers, *second.headers}
        await wire.close()


async def test_a_client_that_sends_first_and_reads_later_gets_an_early_answer() -> None:
    """32 MiB more than anybody asked for: read, thrown away, and no reset before the answer is read."""
    async with talking(unread) as (_, wire):
        total = 32 * 1024 * 1024
        await wire.say(request("PUT", "/", b"", f"Content-Length: {total}"))
        await wire.say_repeatedly(bytes(65536), total // 65536)
        assert (await wire.answer()).body == b"unread"
        await wire.close()


@pytest.mark.parametrize("piece_bytes", [1, 65536])
async def test_a_body_that_nobody_reads_is_held_back(piece_bytes: int) -> None:
    """Memory is bounded by the receive buffer, in large pieces and in drizzle; then the client has to wait."""
    may_read, pieces = asyncio.Event(), 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal pieces
        await may_read.wait()
        while (await receive())["more_body"]:
            pieces += 1
        await respond(send)

    async with talking(app, limits=ServerLimits(receive_buffer_bytes=256 * 1024)) as (_, wire):
        total = 64 * 1024 * 1024 // (1 if piece_bytes > 1 else 16384)
        await wire.say(request("PUT", "/", b"", f"Content-Length: {total}"))
        sending = asyncio.create_task(wire.say_repeatedly(bytes(piece_bytes), total // piece_bytes))
        if piece_bytes > 1:
            _, waiting = await asyncio.wait((sending,), timeout=0.5)
            assert waiting, "64 MiB were taken although nobody reads"
        may_read.set()
        await sending
        assert (await wire.answer()).status == 200
        await wire.close()


async def test_pieces_arrive_while_the_body_is_still_being_sent() -> None:
    """Nothing waits for the whole body."""
    got: asyncio.Queue[Message] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            await got.put(await receive())
        await respond(send)

    async with talking(app, request("PUT", "/", b"", "Content-Length: 6") + b"one") as (_, wire):
        assert await got.get() == {"type": "http.request", "body": b"one", "more_body": True}
        await wire.say(b"two")
        assert await got.get() == {"type": "http.request", "body": b"two", "more_body": False}
        assert (await wire.answer()).status == 200
        await wire.close()


BAD_CHUNKS = {
    "no size": b"\r\nabc\r\n0\r\n\r\n",
    "a signed size": b"+3\r\nabc\r\n0\r\n\r\n",
    "a prefixed size": b"0x3\r\nabc\r\n0\r\n\r\n",
    "a space behind the size": b"3 \r\nabc\r\n0\r\n\r\n",
    "a space before the size": b" 3\r\nabc\r\n0\r\n\r\n",
    "a size above all": b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "a negative size in 64 bits": b"ffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "a line feed only": b"3\nabc\r\n0\r\n\r\n",
    "a chunk longer than its size": b"3\r\nabcd\r\n0\r\n\r\n",
    "a chunk without line end": b"3\r\nabc0\r\n\r\n",
    "an extension with a bare CR": b"3;a\rb\r\nabc\r\n0\r\n\r\n",
    "an endless extension": b"3;" + b"x" * 2000,
    "a bad trailer": b"0\r\nno colon\r\n\r\n",
    "endless trailers": b"0\r\n" + b"X: yyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 400,
}


@pytest.mark.parametrize("chunks", BAD_CHUNKS.values(), ids=BAD_CHUNKS.keys())
async def test_bad_chunks_fail_the_body_and_end_the_connection(chunks: bytes) -> None:
    """The application learns of it where it reads; no byte behind it is taken for a request."""
    async with talking(tell_failure, request("PUT", "/", b"", CHUNKED) + chunks + request("GET")) as (_, wire):
        answer = await wire.answer()
        assert (answer.status, answer.body) == (400, b"BadRequest")
        assert answer.headers["connection"] == "close"
        assert await wire.rest() == b""
        await wire.close()


LIMITS = ServerLimits(
    head_timeout_seconds=10, body_timeout_seconds=10, min_body_rate_bytes_per_second=100, keep_alive_timeout_seconds=60
)


async def test_a_body_that_stops_is_a_request_timeout() -> None:
    """The application gets S3's 400 RequestTimeout to answer with."""
    clock, reading = ManualClock(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        reading.set()
        await tell_failure(scope, receive, send)

    async with talking(app, request("PUT", "/", b"", "Content-Length: 9") + b"abc", limits=LIMITS, clock=clock) as (
        port,
        wire,
    ):
        await reading.wait()
        await clock.advance(9)
        assert port.server.requests_in_flight == 1
        await clock.advance(2)
        answer = await wire.answer()
        assert (answer.status, answer.body, answer.headers["connection"]) == (400, b"RequestTimeout", "close")
        await wire.close()


async def test_a_body_that_trickles_is_a_request_timeout() -> None:
    """A byte now and then is no progress: the average over the time waited counts."""
    clock, got = ManualClock(), asyncio.Queue[bytes]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def counted() -> Message:
            message = await receive()
            await got.put(message["body"])
            return message

        await tell_failure(scope, counted, send)

    async with talking(app, request("PUT", "/", b"", "Content-Length: 999"), limits=LIMITS, clock=clock) as (
        _,
        wire,
    ):
        for second in range(11):
            await wire.say(b"x")
            assert await got.get() == b"x", second
            await clock.advance(1)
        answer = await wire.answer()
        assert (answer.status, answer.body) == (400, b"RequestTimeout")
        await wire.close()


async def test_a_slow_application_is_not_the_clients_fault() -> None:
    """Only time spent waiting for the client counts."""
    clock, may_read, begun = ManualClock(), asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await may_read.wait()
        await tell_failure(scope, receive, send)

    async with talking(app, request("PUT", "/", b"abc"), limits=LIMITS, clock=clock) as (_, wire):
        await begun.wait()
        await clock.advance(1000)
        may_read.set()
        assert (await wire.answer()).body == b"abc"
        await wire.close()


async def test_a_head_that_does_not_end_is_a_request_timeout() -> None:
    """Counted from its first byte; a byte now and then does not help."""
    clock = ManualClock()
    async with talking(unread, request("GET"), limits=LIMITS, clock=clock) as (_, wire):
        await wire.answer()
        await clock.advance(59)
        await wire.say(b"GET / HTTP/1.1\r\n")
        for _ in range(14):
            await clock.advance(1)
            await wire.say(b"X: y\r\n")
        answer = await wire.answer()
        assert answer.status == 400
        assert b"<Code>RequestTimeout</Code>" in answer.body
        assert await wire.rest() == b""
        await wire.close()


@pytest.mark.parametrize(("requests", "seconds"), [(0, 10), (1, 60)])
async def test_a_silent_connection_is_closed_without_a_word(requests: int, seconds: int) -> None:
    """A new one after the head timeout, an idle one after the keep-alive timeout; nobody asked for an answer."""
    clock = ManualClock()
    async with talking(unread, limits=LIMITS, clock=clock) as (port, wire):
        for _ in range(requests):
            await wire.say(request("GET"))
            await wire.answer()
        await port.connections(1)
        await clock.advance(seconds - 1)
        assert port.server.open_connections == 1
        await clock.advance(2)
        assert await wire.rest() == b""
        await wire.close()
