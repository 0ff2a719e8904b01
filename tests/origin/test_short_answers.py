"""A read that begins without a wait gives what `send` gives, whatever the origin answers, and is sent once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from gateway.core.errors import ForebayError
from gateway.origin.client import BegunRead, HedgeOutcome, KeyPair, OriginRequest
from gateway.origin.http1_client.short_answer import HEAD_BYTES, KeptBuffers
from gateway.origin.s3 import BEGUN_MAX
from gateway.origin.signing import ChainCredentials, CredentialsOf
from tests.origin.told_origin import Request, ToldOrigin, forever, head, told_origin
from tests.support.waiting import until

GET = OriginRequest("GET", "b", "k ä", headers={"range": "bytes=0-99", "accept-encoding": "identity"})
HEAD = replace(GET, method="HEAD", headers={})
BODY = bytes(range(100))
LINES = ("Content-Length: 100", 'ETag: "a"', "X-Amz-Meta-B:  c\t", "x-amz-request-id: R")

ANSWERS: dict[str, tuple[bytes, ...]] = {
    "200": (head(*LINES) + BODY,),
    "206": (head(*LINES, "Content-Range: bytes 0-99/100", status="206 Partial Content") + BODY,),
    "kept alive": (head(*LINES, "Connection: keep-alive", "Keep-Alive: timeout=5") + BODY,),
    "to be closed": (head(*LINES, "Connection: close") + BODY,),
    "in pieces": (head(*LINES)[:20], head(*LINES)[20:], BODY[:1], BODY[1:]),
    "empty": (head("Content-Length: 0", 'ETag: "a"'),),
    "chunked": (head('ETag: "a"', "Transfer-Encoding: chunked") + b"64\r\n" + BODY + b"\r\n0\r\n\r\n",),
    "twice": (head(*LINES, 'ETag: "b"', "x-amz-meta-b: d") + BODY,),
    "latin": (head(*LINES).replace(b"c\t", b"\xe4\xff") + BODY,),
    "no value": (head(*LINES, "x-amz-meta-c:") + BODY,),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\n" + head(*LINES) + BODY,),
    "too much": (head(*LINES) + BODY + b"more",),
    "long": (head("Content-Length: 200000", 'ETag: "a"') + bytes(200_000),),
    "longest": (head("Content-Length: 131072", 'ETag: "a"') + bytes(131_072),),
    "long head": (head(*LINES, "x-amz-meta-d: " + "d" * 9000) + BODY,),
    "404": (head("Content-Length: 4", status="404 Not Found") + b"none",),
    "403": (head("Content-Length: 4", status="403 Forbidden") + b"none",),
    "301": (head("Content-Length: 0", "Location: /x", status="301 Moved Permanently"),),
    "304": (head('ETag: "a"', status="304 Not Modified"),),
    "503": (head("Content-Length: 4", status="503 Slow Down") + b"slow",),
    "no HTTP": (b"gopher\r\n\r\n",),
    "folded": (head(*LINES, "x-amz-meta-e: a\r\n b") + BODY,),
    "two lengths": (head(*LINES, "Content-Length: 7") + BODY,),
}
BROKEN: dict[str, bytes] = {
    "before the head": b"",
    "in the head": head(*LINES)[:30],
    "in the body": head(*LINES) + BODY[:50],
    "without a length": head('ETag: "a"') + BODY,
}

_WHOLE = {"200", "206", "kept alive", "in pieces", "empty", "latin", "no value", "too much", "longest"}

Seen = tuple[object, ...]


async def sent(told: ToldOrigin, request: OriginRequest) -> Seen:
    try:
        async with await told.origin.send(request) as response:
            return response.status, dict(response.headers), await response.read(2**20)
    except ForebayError as error:
        return type(error), str(error)


async def begun(told: ToldOrigin, request: OriginRequest, *, taken: bool = True) -> tuple[Seen | None, OriginRequest]:
    """What came of a read by the short way, None if it was not whole; and the request that goes on with it."""
    ended: asyncio.Future[tuple[Seen | None, OriginRequest]] = asyncio.get_running_loop().create_future()

    def on_end(reading: BegunRead) -> None:
        found: Seen | None = None
        if reading.is_whole:
            body = reading.whole() if taken else b""
            assert body is not None
            found = reading.status, dict(reading.headers), bytes(body)
        ended.set_result((found, reading.onward() if found is None or not taken else request))

    assert told.origin.begin_read(request, on_end) is not None
    return await ended


async def short(told: ToldOrigin, request: OriginRequest, *, taken: bool = True) -> tuple[Seen, bool]:
    """What came by the short way, or was handed over; and whether it was whole."""
    found, onward = await begun(told, request, taken=taken)
    if found is not None and taken:
        return found, True
    try:
        return await sent(told, onward), found is not None
    finally:
        assert onward.begun is not None
        onward.begun.close()


@asynccontextmanager
async def saying(
    parts: tuple[bytes, ...], *, then_close: bool = False, **settings: object
) -> AsyncIterator[ToldOrigin]:
    """An origin that says these words from its second request on; a connection to it is open."""

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.number == 1:
            writer.write(head("Content-Length: 0"))
            return
        for part in parts if request.method == "GET" else (head(*LINES),):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if then_close:
            writer.close()

    async with told_origin(exchange, **settings) as told:
        await sent(told, GET)
        yield told


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "handed over"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_it_gives_what_the_whole_way_gives(name: str, taken: bool) -> None:
    """Status, fields, body or error; by one request, counted once; and the connection serves another."""
    async with saying(ANSWERS[name]) as told:
        expected = await sent(told, GET)
    async with saying(ANSWERS[name]) as told:
        found, is_whole = await short(told, GET, taken=taken)
        assert found == expected
        assert is_whole is (name in _WHOLE)
        assert len(told.requests) == len(told.attempts) == 2
        assert (await sent(told, HEAD))[0] == 200
        one, other = told.attempts[0], told.attempts[1]
        assert (other.method, other.slot, other.key, other.origin) == (one.method, one.slot, one.key, one.origin)


@pytest.mark.parametrize("name", BROKEN)
async def test_an_answer_that_breaks_off_is_a_failed_attempt_of_the_whole_way(name: str) -> None:
    """Which is tried again, where the settings say so."""
    async with saying((BROKEN[name],), then_close=True) as told:
        expected = await sent(told, GET)
    async with saying((BROKEN[name],), then_close=True) as told:
        assert (await short(told, GET))[0] == expected
        assert len(told.attempts) == 2
    async with saying((b"",), then_close=True, max_attempts=3, backoff_base_seconds=0.0) as told:
        await short(told, GET)
        assert len(told.requests) == 1 + 3


async def test_it_is_signed_as_the_whole_way_signs() -> None:
    """The same lines, and a signature that holds for the path; for a temporary key, too."""
    for pair in (None, KeyPair("A", "b", "a-token")):
        async with saying(ANSWERS["200"]) as told:
            if pair is not None:
                signer: Any = told.origin._signer
                signer._credentials_of(GET).apply_settings(pair)
            for request in (GET, replace(GET, key="other/k+?%"), HEAD):
                assert (await short(told, request))[1]
                await sent(told, request)
                one, other = told.requests[-2:]
                assert one.target == other.target
                assert list(one.headers) == list(other.headers)
                if one.headers["x-amz-date"] == other.headers["x-amz-date"]:
                    assert one.headers == other.headers
                assert ("x-amz-security-token" in one.headers) is (pair is not None)


async def test_a_key_that_may_expire_is_asked_for_by_the_whole_way() -> None:
    async with saying(ANSWERS["200"]) as told:
        signer: Any = told.origin._signer
        chain = object.__new__(ChainCredentials)
        pair = KeyPair("A", "b")

        async def current() -> KeyPair:
            return pair

        chain.current = current  # type: ignore[method-assign]
        signer._credentials_of = cast(CredentialsOf, lambda _: chain)
        assert told.origin.begin_read(GET, print) is None
        await sent(told, GET)
        assert (await short(told, GET))[1]


async def test_a_late_answer_is_hedged_by_the_whole_way() -> None:
    """Once: the second connection's answer wins, and the budget of hedges pays for it."""

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.number == 2:
            await forever()
        writer.write(head(*LINES) + BODY)

    async with told_origin(exchange) as told:
        await sent(told, GET)
        told.origin._hedging.heads.after_seconds = 0.1
        found, is_whole = await short(told, GET)
        assert not is_whole
        assert found[2] == BODY
        assert told.outcomes == [HedgeOutcome.WON]
        assert len(told.requests) == 3


async def test_a_late_answer_that_comes_after_all_is_used() -> None:
    come = asyncio.Event()

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.number == 2:
            writer.write(head(*LINES)[:30])
            await come.wait()
            writer.write(head(*LINES)[30:] + BODY)
        else:
            writer.write(head(*LINES) + BODY)

    async with told_origin(exchange) as told:
        await sent(told, GET)
        told.origin._hedging._saved = 0.0
        told.origin._hedging.heads.after_seconds = 0.1
        found, onward = await begun(told, GET)
        assert found is None
        come.set()
        assert (await sent(told, onward))[2] == BODY
        assert len(told.requests) == 2


async def test_what_would_have_to_wait_is_not_begun() -> None:
    """A dead origin, a rate, too many at once, no free connection: `send` waits, or refuses."""
    async with saying(ANSWERS["200"]) as told:
        breaker = told.origin._breaker(f"127.0.0.1:{told.port}")
        breaker.is_open = True
        assert told.origin.begin_read(GET, print) is None
        breaker.is_open = False
        told.origin._rates = cast(Any, type("Full", (), {"passes": lambda *_: False}))
        assert told.origin.begin_read(GET, print) is None
        told.origin._rates = None
        told.origin._begun_count = BEGUN_MAX
        assert told.origin.begin_read(GET, print) is None
        told.origin._begun_count = 0
        assert (await short(told, GET))[1]
        first = told.origin.begin_read(GET, lambda _: None)
        assert first is not None
        assert told.origin.begin_read(GET, print) is None
        first.close()
        assert told.origin._begun_count == 0


async def test_a_closed_read_ends_its_connection() -> None:
    """`on_end` is not called any more."""
    gone = asyncio.Event()

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.number == 1:
            writer.write(head("Content-Length: 0"))
            return
        try:
            await forever()
        finally:
            gone.set()

    async with told_origin(exchange) as told:
        await sent(told, GET)
        called: list[BegunRead] = []
        reading = told.origin.begin_read(GET, called.append)
        assert reading is not None
        await until(lambda: len(told.requests) == 2)
        reading.close()
        reading.close()
        await until(lambda: not told.origin._client._pool._open)
        assert (called, told.origin._begun_count) == ([], 0)


def test_a_buffer_is_used_again_when_nothing_has_a_view_of_it() -> None:
    buffers = KeptBuffers(HEAD_BYTES, 2)
    first = buffers.take()
    view = memoryview(first)[:10]
    second = buffers.take()
    assert second is not first
    assert buffers.take() is second
    other = memoryview(second)
    view.release()
    assert buffers.take() is first
    other.release()
    assert len(first) == len(second) == HEAD_BYTES


async def test_one_that_waits_counts_in_the_traffic() -> None:
    """Whoever finds out what the link bears looks at all connections at work."""

    async def first_only(request: Request, writer: asyncio.StreamWriter) -> None:
        if len(told.requests) > 1:
            await forever(request, writer)
        writer.write(head(*LINES) + BODY)

    async with told_origin(first_only) as told:
        await sent(told, GET)
        before = told.origin.traffic()["read"]
        reading = told.origin.begin_read(GET, lambda _: None)
        assert reading is not None
        await until(lambda: len(told.requests) == 2)
        assert told.origin.traffic()["read"].arrived_bytes == before.arrived_bytes
        reading.close()


async def test_an_answer_that_is_complete_leaves_the_next_request_on_its_connection_alone() -> None:
    """It is not hedged for what the next one waits for, and does not end that."""
    come = asyncio.Event()

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.number == 2:
            writer.write(head("Content-Length: 4", status="404 Not Found") + b"none")
            return
        if request.number == 3:
            await come.wait()
        writer.write(head(*LINES) + BODY)

    async with told_origin(exchange) as told:
        await sent(told, GET)
        found, onward = await begun(told, GET)
        assert found is None
        told.origin._hedging.heads.after_seconds = 0.1
        later = asyncio.create_task(sent(told, GET))
        await until(lambda: len(told.requests) == 3)
        [connection] = told.origin._client._pool._busy
        limits = connection._supervision
        assert (await sent(told, onward))[0] == 404
        assert connection._supervision is limits
        come.set()
        assert (await later)[0] == 200


async def test_what_comes_behind_an_answer_answers_no_other() -> None:
    """Also where the buffer has no room for it."""
    lines = "Content-Length: 131072", "x-amz-meta-a: "
    long_head = head(*lines[:1], lines[1] + "a" * (HEAD_BYTES - len(head(*lines))))
    assert len(long_head) == HEAD_BYTES
    ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head(*LINES) + BODY if request.number == 1 else (long_head + bytes(131_072)) * 2)

    async with told_origin(exchange) as told:
        await sent(told, GET)

        def ask_next(reading: BegunRead) -> None:
            assert reading.is_whole
            soon = asyncio.get_running_loop().call_soon
            soon(lambda: ended.set_result(told.origin.begin_read(GET, lambda _: None)))

        assert told.origin.begin_read(GET, ask_next) is not None
        assert await ended is None, "its connection is used again"
