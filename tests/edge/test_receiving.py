"""Bodies on their way to a sink: over real sockets, whatever way they come and however they end."""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from gateway.core.errors import ClientDisconnected
from gateway.edge.receiving import BUFFER_BYTES, DIRECT_BYTES_MIN, ReceiveThreads
from gateway.edge.server_state import ServerLimits
from gateway.s3.error_codes import s3_error
from tests.support.certificates import tls_files
from tests.support.manual_clock import ManualClock
from tests.support.serving import Wire, request, serving, talking
from tests.support.uploads import Collector, Uploads, md5
from tests.support.waiting import until

LARGE = random.Random(1).randbytes(3 * BUFFER_BYTES + 17)
CHUNKED = "Transfer-Encoding: chunked"
EXPECT = "Expect: 100-continue"
LIMITS = ServerLimits(body_timeout_seconds=10, min_body_rate_bytes_per_second=100, keep_alive_timeout_seconds=60)


def head(size_bytes: int, *headers: str) -> bytes:
    return request("PUT", "/", b"", f"Content-Length: {size_bytes}", *headers)


async def say_in_pieces(wire: Wire, data: bytes, at: list[int]) -> None:
    """With a turn of the event loop between the pieces."""
    for first, stop in zip([0, *at], [*at, len(data)], strict=True):
        await wire.say(data[first:stop])
        await asyncio.sleep(0)


SIZES = [
    1,
    DIRECT_BYTES_MIN,
    DIRECT_BYTES_MIN + 1,
    256 * 1024,
    BUFFER_BYTES - 1,
    BUFFER_BYTES,
    BUFFER_BYTES + 1,
    len(LARGE),
]


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("seed", [1, 2])
async def test_every_byte_reaches_the_sink_in_order(size_bytes: int, seed: int) -> None:
    """Whatever the packets; on threads only; and the connection goes on behind it."""
    body, chance = LARGE[:size_bytes], random.Random(seed)
    uploads = Uploads()
    async with talking(uploads) as (_, wire):
        cuts = sorted(chance.randrange(size_bytes) for _ in range(5))
        for _ in range(2):
            await wire.say(head(size_bytes))
            await say_in_pieces(wire, body, cuts)
            assert (await wire.answer()).body == md5(body)
            assert uploads.collector().content == body
            assert all(name.startswith("receive") for name in uploads.collector().threads)
            assert uploads.bodies[-1].received_bytes == size_bytes
        await wire.close()


async def test_a_large_body_comes_straight_from_the_socket_in_large_pieces() -> None:
    """The event loop sees at most what it had read before the application asked."""
    uploads = Uploads()
    async with talking(uploads, head(len(LARGE), EXPECT)) as (_, wire):
        assert await wire.head() == (100, {})
        await wire.say(LARGE)
        assert (await wire.answer()).body == md5(LARGE)
        assert uploads.collector().direct
        assert max(uploads.collector().sizes) <= BUFFER_BYTES
        await wire.close()


@pytest.mark.parametrize("body", [LARGE, LARGE[:1000], b"x"], ids=["direct", "queued", "read to its end"])
async def test_the_rest_of_a_body_can_be_received_after_some_was_read(body: bytes) -> None:
    """In order, nothing twice."""
    uploads = Uploads(read_first=True)
    async with talking(uploads) as (_, wire):
        for _ in range(2):
            await wire.say(request("PUT", "/", body))
            assert (await wire.answer()).body == md5(body)
            assert uploads.bodies[-1].received_bytes == len(body)
        await wire.close()


@pytest.mark.parametrize("headers", [(), (EXPECT,)], ids=["at once", "100-continue"])
async def test_requests_behind_a_direct_body_are_answered_in_order(headers: tuple[str, ...]) -> None:
    """Pipelining: not a byte of the successor gets into the body, and none is lost."""
    uploads = Uploads()
    async with talking(uploads) as (_, wire):
        stream = b"".join(head(len(LARGE), *headers) + LARGE + request("PUT", "/", b"small") for _ in range(3))
        saying = asyncio.create_task(wire.say(stream))
        for _ in range(3):
            for body in (LARGE, b"small"):
                status, fields = await wire.head()
                if status == 100:  # may be left out, where the body came first
                    status, fields = await wire.head()
                assert (status, await wire.body(fields)) == (200, md5(body))
        await saying
        await wire.close()


async def test_chunks_are_taken_off_and_come_in_batches() -> None:
    """The ordinary way, by the event loop; the sink runs on threads there too."""
    uploads = Uploads()
    async with talking(uploads) as (_, wire):
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (LARGE[:100_000], LARGE[100_000:]))
        await wire.say(request("PUT", "/", b"", CHUNKED) + chunks + b"0\r\n\r\n" + request("PUT", "/", b"next"))
        assert (await wire.answer()).body == md5(LARGE)
        assert not uploads.collector().direct
        assert all(name.startswith("receive") for name in uploads.collector().threads)
        assert (await wire.answer()).body == md5(b"next")
        await wire.close()


async def test_bad_chunks_are_the_bodys_failure() -> None:
    """As where it is read."""
    uploads = Uploads()
    async with talking(uploads, request("PUT", "/", b"", CHUNKED) + b"5\r\nabcdeX\r\n") as (_, wire):
        answer = await wire.answer()
        assert (answer.status, answer.body) == (400, b"BadRequest")
        assert await wire.rest() == b""
        await wire.close()


async def test_encrypted_bodies_arrive_too(tmp_path: Path) -> None:
    """TLS records are taken off by the event loop: nothing is read past it."""
    authority = trustme.CA()
    tls = tls_files(authority.issue_cert("localhost"), tmp_path)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    uploads = Uploads()
    async with serving(uploads, tls=tls) as port:
        wire = await port.connect(ssl=trusting, server_hostname="localhost")
        for body in (LARGE, b"small"):
            await wire.say(request("PUT", "/", body))
            assert (await wire.answer()).body == md5(body)
            assert not uploads.collector().direct
        await wire.close()


# Clients that leave, or say too little


@pytest.mark.parametrize("seed", range(8))
async def test_a_client_that_leaves_in_the_middle_is_gone(seed: int) -> None:
    """At any byte, gently or not: ClientDisconnected, what came before it was handed on, and nothing stays behind."""
    chance = random.Random(seed)
    kept = chance.randrange(1, len(LARGE))
    uploads, threads = Uploads(), ReceiveThreads()
    async with talking(uploads, head(len(LARGE)) + LARGE[:kept], receive_threads=threads) as (port, wire):
        if chance.random() < 0.5:
            wire.abort()
        else:
            await wire.close()
        await until(lambda: len(uploads.ends) == 1)
        assert isinstance(uploads.ends[0], ClientDisconnected)
        await port.connections(0)
        await port.requests(0)
        assert threads.asked == 0
        content = bytes(uploads.collector().content)
        assert content == LARGE[: len(content)]
        assert len(content) <= kept


@pytest.mark.parametrize("body", [LARGE, LARGE[:1000]], ids=["direct", "queued"])
async def test_a_body_that_stops_is_a_request_timeout(body: bytes) -> None:
    """The application gets S3's 400 RequestTimeout; the silence is counted from the last byte."""

    limits = replace(LIMITS, min_body_rate_bytes_per_second=1)
    clock, uploads, threads = ManualClock(), Uploads(), ReceiveThreads()

    async def waiting_with(size_bytes: int) -> None:
        await until(lambda: bool(uploads.sinks) and len(uploads.collector().content) == size_bytes)
        await until(lambda: threads.asked == 0)

    async with talking(uploads, head(len(body)) + body[:500], limits=limits, clock=clock, receive_threads=threads) as (
        _,
        wire,
    ):
        await waiting_with(500)
        await clock.advance(9)
        await wire.say(body[500:600])
        await waiting_with(600)
        await clock.advance(9)
        assert uploads.ends == []
        await clock.advance(2)
        answer = await wire.answer()
        assert (answer.status, answer.body, answer.headers["connection"]) == (400, b"RequestTimeout", "close")
        await wire.close()


@pytest.mark.slow
async def test_a_direct_body_that_trickles_is_a_request_timeout() -> None:
    """A byte now and then is no progress, also where the event loop does not see it."""
    clock, uploads, threads = ManualClock(), Uploads(), ReceiveThreads()
    async with talking(uploads, head(len(LARGE)), limits=LIMITS, clock=clock, receive_threads=threads) as (_, wire):
        await until(lambda: bool(uploads.sinks))
        for second in range(11):
            await wire.say(b"x")
            await until(lambda sent=second: len(uploads.collector().content) == sent + 1)  # type: ignore[misc]
            await until(lambda: threads.asked == 0)
            await clock.advance(1)
        assert (await wire.answer()).body == b"RequestTimeout"
        await wire.close()


@pytest.mark.slow
async def test_a_thousand_slow_bodies_hold_no_thread() -> None:
    """A thread is lent while bytes wait: others are served at once meanwhile, and the slow ones time out."""
    count = 1000
    clock, uploads, threads = ManualClock(), Uploads(), ReceiveThreads(1)
    async with serving(uploads, limits=LIMITS, clock=clock, receive_threads=threads) as port:
        wires = [await port.connect() for _ in range(count)]
        for wire in wires:
            await wire.say(head(len(LARGE)) + b"slow")
        await until(
            lambda: sum(len(sink.content) for sink in map(uploads.collector, range(len(uploads.sinks)))) == count * 4
        )
        await until(lambda: threads.asked == 0)
        assert port.server.requests_in_flight == count
        quick = await port.connect()
        await quick.say(head(len(LARGE)) + LARGE)
        assert (await quick.answer()).body == md5(LARGE)
        await clock.advance(11)
        for wire in wires:
            assert (await wire.answer()).body == b"RequestTimeout"


# Sinks that fail, callers that are cancelled


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("framing", ["direct", "chunked"])
async def test_what_a_sink_raises_reaches_the_client_while_the_body_still_comes(seed: int, framing: str) -> None:
    """At any piece; the client, which sends first and reads later, gets the answer; then the connection ends."""
    fail_at = random.Random(seed).randrange(len(LARGE))

    def sink() -> Collector:
        collector = Collector(lambda data: fail(collector, data))
        return collector

    def fail(collector: Collector, data: memoryview) -> None:
        if len(collector.content) + len(data) > fail_at:
            raise s3_error("SlowDown")

    uploads = Uploads(sink)
    async with talking(uploads) as (port, wire):
        if framing == "direct":
            await wire.say(head(8 * len(LARGE)))
            await wire.say_repeatedly(LARGE, 8)
        else:
            await wire.say(request("PUT", "/", b"", CHUNKED))
            await wire.say_repeatedly(b"%x\r\n%b\r\n" % (len(LARGE), LARGE), 8)
        answer = await wire.answer()
        assert (answer.status, answer.body, answer.headers["connection"]) == (503, b"SlowDown", "close")
        await wire.close()
        await port.connections(0)


@pytest.mark.parametrize("framing", ["direct", "queued", "chunked"])
async def test_a_cancelled_caller_is_told_when_no_thread_is_at_it_any_more(framing: str) -> None:
    """Neither sink nor buffer nor socket is touched once `receive` has raised."""
    body = LARGE[:50_000] if framing == "queued" else LARGE
    entered, gate = threading.Event(), threading.Event()

    def hold(_: memoryview) -> None:
        entered.set()
        assert gate.wait(20)

    uploads = Uploads(lambda: Collector(hold))
    async with talking(uploads) as (port, wire):
        if framing == "chunked":
            await wire.say(request("PUT", "/", b"", CHUNKED) + b"%x\r\n%b" % (len(body), body))
        else:
            await wire.say(head(len(body)) + body)
        await until(entered.is_set)
        uploads.tasks[0].cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert uploads.collector().busy
        assert uploads.ends == []
        gate.set()
        await until(lambda: len(uploads.ends) == 1)
        assert isinstance(uploads.ends[0], asyncio.CancelledError)
        assert not uploads.collector().busy
        await port.connections(0)


@pytest.mark.parametrize("seed", range(6))
async def test_cancelled_at_any_moment_nothing_is_left(seed: int) -> None:
    """The connection ends, the threads are free, and others go on."""
    chance = random.Random(seed)
    cancel_at = chance.randrange(8 * len(LARGE))
    uploads, threads = Uploads(), ReceiveThreads()
    async with serving(uploads, receive_threads=threads) as port:
        wire, other = await port.connect(), await port.connect()
        await wire.say(head(8 * len(LARGE) + 1))
        saying = asyncio.create_task(wire.say_repeatedly(LARGE, 8))
        await until(lambda: bool(uploads.tasks) and len(uploads.collector(0).content) >= cancel_at)
        uploads.tasks[0].cancel()
        await port.connections(1)
        assert threads.asked == 0
        await asyncio.wait((saying,))
        assert isinstance(saying.exception(), (ConnectionError, type(None)))
        await other.say(request("PUT", "/", LARGE))
        assert (await other.answer()).body == md5(LARGE)
        await other.close()


# The end of the server


async def test_an_upload_in_flight_is_finished_while_the_server_drains() -> None:
    """Its answer says that the connection ends."""
    uploads = Uploads()
    async with talking(uploads, head(len(LARGE)) + LARGE[:100_000]) as (port, wire):
        await until(lambda: bool(uploads.sinks) and len(uploads.collector().content) == 100_000)
        port.stop.set()
        await until(lambda: port.server.draining)
        await wire.say(LARGE[100_000:])
        answer = await wire.answer()
        assert (answer.body, answer.headers["connection"]) == (md5(LARGE), "close")
        await asyncio.wait_for(port.finished, 15)


async def test_an_upload_that_outlasts_the_grace_is_cut_off() -> None:
    """Its thread has ended before the server has."""
    uploads, threads = Uploads(), ReceiveThreads()
    async with talking(uploads, head(len(LARGE)) + LARGE[:100_000], grace_seconds=0.05, receive_threads=threads) as (
        port,
        _,
    ):
        await until(lambda: bool(uploads.sinks) and len(uploads.collector().content) == 100_000)
        port.stop.set()
        await asyncio.wait_for(port.finished, 15)
        assert isinstance(uploads.ends[0], asyncio.CancelledError)
        assert threads.asked == 0
