"""The load balancer of the tests: each request of a connection goes to another server, and nothing is changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from tests.support.connections import answering
from tests.support.one_address import RoundRobin

BODY = b"x" * 300_000


async def _serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request with the number of this server, and with what has come."""
    head = await reader.readuntil(b"\r\n\r\n")
    told = f"{number}:".encode() + head
    if b"refused" in head:
        writer.write(b"HTTP/1.1 403 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        return
    if b"expect" in head:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if b"content-length" in head:
        told += await reader.readexactly(len(BODY))
    if b"chunked" in head:
        told += await reader.readuntil(b"0\r\n\r\n")
    length = b"content-length: %d\r\n\r\n" % len(told)
    writer.write(b"HTTP/1.1 200 OK\r\n" + length + (told if not head.startswith(b"HEAD") else b""))
    await reader.read()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(answering(partial(_serve, number))) for number in range(3)]
        port = await stack.enter_async_context(answering(RoundRobin(ports).talk))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()


async def answered(reader: asyncio.StreamReader, *, has_body: bool = True) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].split()[0])
    return await reader.readexactly(length) if has_body else head


async def test_each_request_goes_to_the_next_server() -> None:
    """Also those that come at once, and whatever frames their bodies."""
    requests = [
        b"GET /a HTTP/1.1\r\nhost: h\r\n\r\n",
        b"PUT /b HTTP/1.1\r\nHost: h\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
        b"PUT /c HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"DELETE /d HTTP/1.1\r\nhost: h\r\n\r\n",
    ]
    async with connected() as (reader, writer):
        for number, request in enumerate(requests):
            writer.write(request)
            assert await answered(reader) == b"%d:" % (number % 3) + request
        writer.write(b"".join(requests))
        for number, request in enumerate(requests):
            assert await answered(reader) == b"%d:" % ((number + 1) % 3) + request


async def test_who_is_asked_to_go_on_goes_on_at_the_same_server() -> None:
    async with connected() as (reader, writer):
        head = b"PUT /a HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert await answered(reader) == b"0:" + head + BODY
        writer.write(b"HEAD /b HTTP/1.1\r\nhost: h\r\n\r\nGET /c HTTP/1.1\r\nhost: h\r\n\r\n")
        assert b" 200 OK" in await answered(reader, has_body=False)
        assert (await answered(reader)).startswith(b"2:")


async def test_who_is_refused_reads_why() -> None:
    """Though it has not sent its body yet, and then nobody takes that."""
    async with connected() as (reader, writer):
        writer.write(b"PUT /refused HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert b"403" in await reader.readuntil(b"\r\n\r\n")
        writer.write(BODY)
        assert await reader.read() == b""


async def test_what_is_no_request_goes_to_one_server() -> None:
    async with connected() as (reader, writer):
        request = b"G(T /a HTTP/1.1\r\nhost : h\r\n\r\n"
        writer.write(request)
        assert await answered(reader) == b"0:" + request
