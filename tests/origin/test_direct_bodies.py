"""Large bodies that are received where they are wanted: all that may happen on the connection."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import random
import socket
import statistics
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError
from gateway.origin.client import OriginRequest, OriginResponse
from gateway.origin.http1_client.connection import RECEIVED_AT_ONCE_BYTES
from gateway.origin.s3 import S3Origin
from tests.origin.origins import Landing, s3_origin
from tests.support.connections import answering
from tests.support.strict_origin import StrictOrigin

KIB = 1024
MIB = 1024 * KIB
BODY = hashlib.shake_128(b"body").digest(3 * MIB)
GET = OriginRequest("GET", "bucket", "key")

Exchange = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""What a server does once it has read the head of a request."""


class Server:
    """Answers every request as it is told; counts connections, and notes how each ended."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._open = AsyncExitStack()
        self.connections = 0
        self.ended = asyncio.Event()

    async def __aenter__(self) -> S3Origin:
        self._port = await self._open.enter_async_context(answering(self._serve))
        self.origin = self.client()
        return self.origin

    def client(self, read_timeout_seconds: float = 60.0) -> S3Origin:
        return s3_origin(f"http://127.0.0.1:{self._port}", max_attempts=1, read_timeout_seconds=read_timeout_seconds)

    async def __aexit__(self, *_: object) -> None:
        await self.origin.aclose()
        await self._open.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await self._exchange(writer)
                await writer.drain()
        finally:
            self.ended.set()


def head(*lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


def answer(body: bytes, behind: bytes = b"") -> Exchange:
    async def exchange(writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {len(body)}") + body + behind)

    return exchange


WITH_THREADS = [False]
"""Whether a thread receives what it can."""


@pytest.fixture(params=[False, True], ids=["loop", "threads"], autouse=True, scope="module")
def with_threads(request: pytest.FixtureRequest) -> None:
    WITH_THREADS[0] = request.param


def landing(size: int = MIB, enough: int = 256 * KIB) -> Landing:
    return Landing(size, enough, threads=WITH_THREADS[0])


async def receive(response: OriginResponse, into: Landing) -> tuple[bytes, list[int]]:
    """All there is, and the lengths of the pieces."""
    body, lengths = bytearray(), list[int]()
    async for piece in into.pieces(response):
        body += piece
        lengths.append(len(piece))
    return bytes(body), lengths


async def receive_broken(response: OriginResponse, what: str, on_bytes: Callable[[int], None] | None = None) -> bytes:
    """What comes before the body breaks off."""
    body = bytearray()

    async def run() -> None:
        async for piece in landing().pieces(response):
            body.extend(piece)
            if on_bytes is not None:
                on_bytes(len(body))

    with pytest.raises(OriginBodyError, match=what):
        await run()
    return bytes(body)


async def fetch(origin: S3Origin, into: Landing | None = None) -> bytes:
    async with await origin.send(GET) as response:
        body, _ = await receive(response, into or landing())
    return body


@asynccontextmanager
async def playing(exchange: Exchange) -> AsyncIterator[tuple[Server, S3Origin]]:
    async with (server := Server(exchange)) as origin, asyncio.timeout(10):
        yield server, origin


@pytest.fixture
def never_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of bodies that cannot land by themselves is closed."""

    def refuse(*_: object) -> None:
        raise AssertionError("this body could have landed by itself")

    monkeypatch.setattr("gateway.origin.http1_client.response_stream.gathered", refuse)


@pytest.mark.usefixtures("never_gathered")
async def test_bodies_come_over_one_connection_after_another() -> None:
    """Exactly Content-Length bytes are taken, then the connection is used again, by whichever way of reading."""
    async with playing(answer(BODY)) as (server, origin):
        for _ in range(3):
            assert await fetch(origin, into := landing()) == BODY
            assert (into.from_threads > len(BODY) // 2) is WITH_THREADS[0]
            async with await origin.send(GET) as response:
                assert await response.read(len(BODY)) == BODY
        assert server.connections == 1


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 700 * KIB),
    buffer=st.sampled_from([1000, 64 * KIB, 256 * KIB]),
    enough=st.integers(1, 300 * KIB),
    seed=st.integers(0, 2**32),
)
async def test_whatever_the_packets_the_bytes_are_the_same(size: int, buffer: int, enough: int, seed: int) -> None:
    """Pieces fit into the buffer, and none is empty. A thread takes what came with the head along."""
    dice = random.Random(seed)

    async def exchange(writer: asyncio.StreamWriter) -> None:
        sent = head(f"Content-Length: {size}") + BODY[:size]
        while sent:
            count = dice.choice([1, 100, 10_000, 400_000])
            writer.write(sent[:count])
            sent = sent[count:]
            await asyncio.sleep(0)

    async with playing(exchange) as (_, origin):
        async with await origin.send(GET) as response:
            body, lengths = await receive(response, landing(buffer, enough))
        assert body == BODY[:size]
        assert 0 < min(lengths) <= max(lengths) <= buffer + (RECEIVED_AT_ONCE_BYTES if WITH_THREADS[0] else 0)


@pytest.mark.parametrize("sent", [0, 1, 700 * KIB, len(BODY) - 1])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_short_body_is_an_error_behind_the_bytes_that_came(sent: int, reset: bool) -> None:
    """Closed or reset, never fewer bytes than announced without an error, and the next request has a new connection."""
    taken = asyncio.Event()

    async def exchange(writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {len(BODY)}") + BODY[:sent])
        await writer.drain()
        await taken.wait()
        if reset:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with playing(exchange) as (server, origin):
        for connections in (1, 2):
            taken.clear()
            if not sent:
                taken.set()
            async with await origin.send(GET) as response:
                body = await receive_broken(response, "broke off", lambda count: taken.set() if count == sent else None)
            assert body == BODY[:sent]
            assert server.connections == connections


@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("behind", [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"])
async def test_bytes_behind_a_body_belong_to_nobody(behind: bytes, late: bool) -> None:
    """The body is what it is, and its connection is not used again."""
    go = asyncio.Event()

    async def exchange(writer: asyncio.StreamWriter) -> None:
        await answer(BODY)(writer)
        if late:
            await go.wait()
        writer.write(behind)

    async with playing(exchange) as (server, origin):
        assert await fetch(origin, landing(700_001)) == BODY  # the last piece leaves room for more
        go.set()
        await server.ended.wait()
        assert await fetch(origin, landing(700_001)) == BODY
        assert server.connections == 2


async def test_silence_is_an_error() -> None:
    """After the time that an origin may be silent, behind the bytes that came; its connection is closed."""
    for_ever = asyncio.Event()

    async def exchange(writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {len(BODY)}") + BODY[: 600 * KIB])
        await for_ever.wait()

    async with playing(exchange) as (server, _):
        hasty = server.client(read_timeout_seconds=0.2)
        async with await hasty.send(GET) as response:
            body = await receive_broken(response, "nothing came")
            assert body == BODY[: 600 * KIB]
        await hasty.aclose()
        for_ever.set()


@pytest.mark.slow
async def test_a_pause_of_the_reader_is_no_silence() -> None:
    """However long nobody asks for the next piece; meanwhile the origin is held back."""
    sent = 0

    async def exchange(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(head(f"Content-Length: {64 * MIB}"))
        for _ in range(64):
            writer.write(bytes(MIB))
            await writer.drain()
            sent += 1

    async with playing(exchange) as (server, _):
        hasty = server.client(read_timeout_seconds=0.2)
        async with await hasty.send(GET) as response:
            pieces = landing().pieces(response)
            size = len(await anext(pieces)) + len(await anext(pieces))
            await asyncio.sleep(0.5)
            assert sent < 40
            size += sum([len(piece) async for piece in pieces])
            assert size == 64 * MIB
        async with await hasty.send(GET) as response:
            assert len((await receive(response, landing()))[0]) == 64 * MIB
        await hasty.aclose()
        assert server.connections == 1


async def test_slow_bytes_do_not_wait_for_a_whole_buffer() -> None:
    """What has come is given after a while, though more would be worth the trip."""
    go, part = asyncio.Semaphore(0), 200 * KIB

    async def exchange(writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {4 * part}"))
        for start in range(0, 4 * part, part):
            writer.write(BODY[start : start + part])
            await writer.drain()
            await go.acquire()

    async with playing(exchange) as (_server, origin):
        async with await origin.send(GET) as response:
            pieces, body = landing(enough=MIB).pieces(response), bytearray()
            for stop in range(part, 5 * part, part):
                while len(body) < stop:
                    body += await anext(pieces)
                go.release()
        assert body == BODY[: 4 * part]


async def test_a_body_that_is_given_up_closes_its_connection() -> None:
    """The rest is neither received nor left for the next request."""

    async def exchange(writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {64 * MIB}"))
        for _ in range(64):
            writer.write(bytes(MIB))
            await writer.drain()

    async with playing(exchange) as (server, origin):
        async with await origin.send(GET) as response:
            await anext(landing().pieces(response))
        await server.ended.wait()
        waiting = asyncio.create_task(fetch(origin))
        while server.connections < 2:  # noqa: ASYNC110 - connections have no event
            await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_closing_the_origin_ends_the_bodies_in_flight() -> None:
    """Who waits for bytes gets an error, and nothing is left open."""
    waits = asyncio.Event()

    async def exchange(writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {len(BODY)}") + BODY[: 600 * KIB])
        await writer.drain()

    async with playing(exchange) as (server, origin):
        async with await origin.send(GET) as response:
            receiving = asyncio.create_task(
                receive_broken(response, "broke off", lambda count: waits.set() if count == 600 * KIB else None)
            )
            await waits.wait()
            await origin.aclose()
            assert await receiving == BODY[: 600 * KIB]
        await server.ended.wait()


async def test_a_reader_that_is_cancelled_closes_its_connection() -> None:
    """In the middle of a piece."""
    for_ever = asyncio.Event()

    async def exchange(writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {len(BODY)}") + BODY[: 600 * KIB])
        await for_ever.wait()

    async with playing(exchange) as (server, origin):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await fetch(origin, landing(4 * MIB, 4 * MIB))
        for_ever.set()
        await server.ended.wait()


async def test_without_a_descriptor_to_spare_the_loop_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it receives what no thread may."""

    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async with playing(answer(BODY)) as (_, origin):
        monkeypatch.setattr("gateway.origin.http1_client.connection.os.dup", refuse)
        assert await fetch(origin, into := landing()) == BODY
        assert not into.from_threads


FRAMINGS = {
    "chunked": (head("Transfer-Encoding: chunked"), True),
    "to the end": (head("Connection: close"), False),
}


@pytest.mark.parametrize(("begin", "chunked"), FRAMINGS.values(), ids=FRAMINGS)
async def test_other_framings_are_read_as_ever(begin: bytes, chunked: bool) -> None:
    """Chunks, and bodies that end with their connection, land in the buffer all the same."""

    async def exchange(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        for start in range(0, len(BODY), 100_000):
            piece = BODY[start : start + 100_000]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            writer.write(b"0\r\n\r\n")
        else:
            writer.close()

    async with playing(exchange) as (server, origin):
        for _ in range(2):
            async with await origin.send(GET) as response:
                body, lengths = await receive(response, landing())
            assert body == BODY
            assert statistics.median(lengths[:-1]) >= 256 * KIB  # less where the machine lets the sender wait
        assert server.connections == (1 if chunked else 2)


async def test_a_body_that_has_all_arrived_and_one_without_bytes_land(strict: StrictOrigin) -> None:
    """In one piece, or in none."""
    strict.model.put("bucket", "none", b"")
    origin = s3_origin(strict.endpoint_url)
    for key, body in (("key", b"0123456789"), ("none", b"")):
        async with await origin.send(OriginRequest("GET", "bucket", key)) as response:
            assert (await receive(response, landing()))[0] == body
    await origin.aclose()


async def test_the_pool_bounds_the_connections(strict: StrictOrigin) -> None:
    """Twelve bodies at once go over at most three connections."""
    strict.model.put("bucket", "big", BODY)
    origin = s3_origin(strict.endpoint_url, max_connections=3)

    async def one() -> bytes:
        async with await origin.send(OriginRequest("GET", "bucket", "big")) as response:
            return (await receive(response, landing()))[0]

    assert await asyncio.gather(*(one() for _ in range(12))) == [BODY] * 12
    await origin.aclose()
    assert len(strict.clients) <= 3


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StrictOrigin, Path]]:
    authority, directory = trustme.CA(), tmp_path_factory.mktemp("tls")
    bundle, pair = directory / "ca.pem", directory / "server.pem"
    authority.cert_pem.write_to_path(str(bundle))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pair))
    with StrictOrigin(certificate_file=str(pair)) as origin:
        yield origin, bundle


@pytest.mark.usefixtures("never_gathered")
async def test_encrypted_bodies_land(encrypted: tuple[StrictOrigin, Path]) -> None:
    """Over TLS as over plain connections, one after another over the same one."""
    server, bundle = encrypted
    server.model.put("bucket", "big", BODY)
    origin, before = s3_origin(server.endpoint_url, ca_bundle=str(bundle)), len(server.clients)
    for _ in range(3):
        async with await origin.send(OriginRequest("GET", "bucket", "big")) as response:
            assert (await receive(response, into := landing()))[0] == BODY
            assert not into.from_threads
    await origin.aclose()
    assert len(server.clients) == before + 1
