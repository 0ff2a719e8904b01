"""A read that is stuck goes on over another connection: the bytes are right, and few requests are sent for it."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable

import pytest

from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.origin.client import HedgeOutcome, OriginRequest, OriginResponse
from gateway.origin.hedging import SHARE_MAX, Hedging
from gateway.origin.receive_buffer import Receive
from tests.origin.origins import Landing
from tests.origin.told_origin import Request, ToldOrigin, forever, head, told_origin
from tests.support.waiting import until

ETAG = '"one"'
GET = OriginRequest("GET", "b", "k")
LIST = OriginRequest("GET", "b", None, [("list-type", "2")])


def content(size: int) -> bytes:
    return hashlib.shake_128(b"content").digest(size)


def hurried(told: ToldOrigin, seconds: float) -> None:
    """A read that is silent for so long is stuck."""
    told.origin._hedging.heads.after_seconds = told.origin._hedging.bodies.after_seconds = seconds


def _answer(request: Request, body: bytes, etag: str = ETAG) -> tuple[bytes, bytes]:
    """Head and body as S3 gives them."""
    wanted = request.headers.get("range")
    if request.headers.get("if-match", etag) != etag:
        return head("Content-Length: 0", status="412 Precondition Failed"), b""
    if wanted is None:
        return head(f"Content-Length: {len(body)}", f"ETag: {etag}"), body
    first, last = map(int, wanted.removeprefix("bytes=").split("-"))
    part = body[first : last + 1]
    lines = (f"Content-Length: {len(part)}", f"ETag: {etag}", f"Content-Range: bytes {first}-{last}/{len(body)}")
    return head(*lines, status="206 Partial Content"), part


WAYS = ("pieces", "buffer", "threads")


async def _read(told: ToldOrigin, request: OriginRequest, way: str) -> bytes:
    async with await told.origin.send(request) as answer:
        if way != "pieces":
            return await _all_of(Landing(256 * 1024, 64 * 1024, threads=way == "threads"), answer)
        return b"".join([bytes(piece) async for piece in answer.stream()])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wanted", [None, "bytes=1000-2999999"], ids=["whole", "range"])
@pytest.mark.parametrize("stop", [0, 1, 100_000, 700_001, 2_990_000])
async def test_a_body_that_stops_goes_on_over_another_connection(stop: int, wanted: str | None, way: str) -> None:
    """From the byte that was reached, of the same version, for ever stuck or not."""
    body = content(3_000_000)
    expected = body if wanted is None else body[1000:]

    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        begin, part = _answer(request, body)
        writer.write(begin + (part[:stop] if request.number == 1 else part))
        if request.number == 1:
            await forever()

    async with told_origin(stuck) as told:
        hurried(told, 0.1)
        headers = {} if wanted is None else {"range": wanted}
        assert await _read(told, OriginRequest("GET", "b", "k", headers=headers), way) == expected
        assert told.outcomes == [HedgeOutcome.WON]
        first = (1000 if wanted else 0) + stop
        assert told.requests[1].headers["range"] == f"bytes={first}-2999999"
        assert told.requests[1].headers["if-match"] == ETAG


async def test_bytes_that_a_thread_is_receiving_are_not_asked_for_again() -> None:
    """The second answer comes while a thread has bytes that nobody has counted yet: the first one goes on."""
    body, begun, go_on = content(1_000_000), asyncio.Event(), asyncio.Event()
    first: list[asyncio.StreamWriter] = []

    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        begin, part = _answer(request, body)
        if request.number == 1:
            writer.write(begin + part[:300_000])
            first.append(writer)
            await forever()
        first[0].write(part[:100_000])
        await begun.wait()
        writer.write(begin + part)

    class Slow(Landing):
        async def _receive_on_thread(self, receive: Receive) -> None:
            if len(told.requests) == 2:
                await super()._receive_on_thread(receive)
                begun.set()
                await go_on.wait()
            else:
                await super()._receive_on_thread(receive)

    async with told_origin(stuck) as told:
        hurried(told, 0.1)
        async with await told.origin.send(GET) as answer:
            reading = asyncio.create_task(_all_of(Slow(256 * 1024, 64 * 1024, threads=True), answer))
            await until(lambda: told.outcomes != [])
            assert told.outcomes == [HedgeOutcome.LOST]
            go_on.set()
            first[0].write(body[400_000:])
            assert await reading == body


async def _all_of(landing: Landing, answer: OriginResponse) -> bytes:
    return b"".join([bytes(piece) async for piece in landing.pieces(answer)])


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_an_answer_that_does_not_begin_is_asked_for_again(method: str) -> None:
    """The whole request, on another connection."""

    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.number == 1:
            await forever()
        writer.write(head("Content-Length: 0", f"ETag: {ETAG}"))

    async with told_origin(stuck) as told:
        hurried(told, 0.1)
        async with await told.origin.send(OriginRequest(method, "b", "k")) as answer:
            assert answer.headers["etag"] == ETAG
        assert told.outcomes == [HedgeOutcome.WON]


async def test_a_list_that_is_stuck_is_asked_for_again() -> None:
    """Nothing comes of a second LIST; what is usual of LISTs is their own."""

    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.number == 1:
            await forever()
        writer.write(head("Content-Length: 4") + b"<a/>")

    async with told_origin(stuck) as told:
        told.origin._hedging.lists.after_seconds = 0.1
        async with await told.origin.send(LIST) as answer:
            assert await answer.read(10) == b"<a/>"
        assert told.outcomes == [HedgeOutcome.WON]


@pytest.mark.parametrize("size", [1000, 400_000], ids=["small", "large"])
async def test_a_list_that_stops_is_asked_for_again(size: int) -> None:
    """When its body has not come forward for as long as any other."""

    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {size}") + b"x" * (size - 1))
        if request.number == 1:
            await forever()
        writer.write(b"x")

    async with told_origin(stuck, max_attempts=2, stall_timeout_seconds=0.5) as told:
        async with await told.origin.send(LIST) as answer:
            assert len(await answer.read(size)) == size
        assert len(told.requests) == 2


@pytest.mark.parametrize("request_", [LIST, OriginRequest("PUT", "b", "k", body=b"x"), GET], ids=["LIST", "PUT", "GET"])
async def test_an_error_document_that_stops_is_not_waited_for(request_: OriginRequest) -> None:
    """It is written at once, whatever was asked."""

    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("Content-Length: 1000", status="400 Bad Request") + b"<Err")
        await forever()

    async with (
        told_origin(stuck, read_timeout_seconds=60.0, stall_timeout_seconds=0.5) as told,
        await told.origin.send(request_) as answer,
    ):
        with pytest.raises(OriginBodyError):
            await answer.read(1000)


async def test_the_first_connection_may_win_after_all() -> None:
    """Then the other one is closed, and no byte comes twice."""
    body = content(1_000_000)
    resume = asyncio.Event()

    async def late(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.number == 2:
            resume.set()
            await forever()
        begin, part = _answer(request, body)
        writer.write(begin + part[:500_000])
        await resume.wait()
        writer.write(part[500_000:])

    async with told_origin(late) as told:
        hurried(told, 0.1)
        assert await _read(told, GET, way="pieces") == body
        await asyncio.sleep(0)
        assert told.outcomes == [HedgeOutcome.LOST]


@pytest.mark.parametrize(
    "change",
    [
        lambda request, body: _answer(request, body, '"two"'),
        lambda request, body: (head(f"Content-Length: {len(body)}", f"ETag: {ETAG}"), body),
        lambda request, body: (head("Content-Length: 0", status="503 Slow Down"), b""),
        lambda request, body: (
            head("Content-Length: 9", f"ETag: {ETAG}", "Content-Range: bytes 1-9/10", status="206 Partial Content"),
            body[1:10],
        ),
    ],
    ids=["another version", "no range", "refused", "another range"],
)
async def test_what_does_not_go_on_just_there_is_not_taken(
    change: Callable[[Request, bytes], tuple[bytes, bytes]],
) -> None:
    """No byte of another version or place: the body breaks off as if nobody had been asked."""
    body = content(300_000)

    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.number > 1:
            writer.write(b"".join(change(request, body)))
            return
        begin, part = _answer(request, body)
        writer.write(begin + part[:100_000])
        await forever()

    async with told_origin(stuck, stall_timeout_seconds=0.5) as told:
        hurried(told, 0.1)
        with pytest.raises(OriginBodyError):
            await _read(told, GET, way="threads")
        assert told.outcomes == [HedgeOutcome.FAILED]


@pytest.mark.parametrize(
    ("request_", "lines"),
    [
        (OriginRequest("GET", "b", "k", [("partNumber", "1")]), [f"ETag: {ETAG}"]),
        (OriginRequest("GET", "b", "k", [("tagging", None)]), [f"ETag: {ETAG}"]),
        (GET, []),
        (GET, ['ETag: W/"weak"']),
    ],
    ids=["a part", "no bytes of the object", "no ETag", "a weak ETag"],
)
async def test_what_cannot_be_asked_for_from_the_middle_is_not(request_: OriginRequest, lines: list[str]) -> None:
    """It breaks off, as ever."""

    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("Content-Length: 300000", *lines) + b"x" * 1000)
        await forever()

    async with told_origin(stuck, stall_timeout_seconds=0.5) as told:
        hurried(told, 0.1)
        with pytest.raises(OriginBodyError):
            await _read(told, request_, way="pieces")
        assert len(told.requests) == 1


@pytest.mark.slow
async def test_no_more_than_the_share_is_sent_again() -> None:
    """However stuck everything is: 2% of all reads, and one."""

    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.number % 3 == 0:
            await asyncio.sleep(0.15)
        writer.write(head("Content-Length: 0", f"ETag: {ETAG}"))

    async with told_origin(stuck) as told:
        reads = 0
        for _ in range(8):
            hurried(told, 0.05)
            for answer in await asyncio.gather(*(told.origin.send(GET) for _ in range(25))):
                await answer.aclose()
                reads += 1
        assert len(told.requests) - reads <= 1 + SHARE_MAX * len(told.requests)
        assert len(told.requests) > reads


def test_what_is_late_follows_from_what_is_usual() -> None:
    """Nearly all answers come well before."""
    hedging = Hedging()
    for number in range(512):
        hedging.answered()
        hedging.heads.add(0.05 if number % 100 else 0.3)
    assert hedging.heads.after_seconds == pytest.approx(0.2)
    for _ in range(512):
        hedging.answered()
        hedging.heads.add(0.001)
    assert hedging.heads.after_seconds == pytest.approx(0.1)
    assert hedging.bodies.after_seconds == 1.0


async def test_who_leaves_leaves_nothing_behind() -> None:
    """Cancelled while both are waited for: both connections end, and their shares come back."""
    async with told_origin(forever) as told:
        hurried(told, 0.1)
        sending = asyncio.create_task(told.origin.send(GET))
        await until(lambda: len(told.requests) == 2)
        sending.cancel()
        await asyncio.wait([sending])
        await until(lambda: not told.origin._client._pool._shares.granted)
        with pytest.raises(asyncio.CancelledError):
            sending.result()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_stuck_bodies_at_random(seed: int) -> None:
    """Many reads at once, of which some stop anywhere, hedges included: every body is right, or ends in an error."""
    body, rng = content(400_000), random.Random(seed)

    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        begin, part = _answer(request, body)
        whole = begin + part
        if rng.random() < 0.1:
            writer.write(whole[: rng.randrange(len(whole))])
            await asyncio.sleep(rng.choice([0.05, 0.15, 30.0]))
            writer.close()
            return
        cut = rng.randrange(len(whole))
        writer.write(whole[:cut])
        await asyncio.sleep(0)
        writer.write(whole[cut:])

    async with told_origin(stuck, stall_timeout_seconds=4.0, first_byte_timeout_seconds=4.0) as told:
        right = 0
        for _ in range(10):
            hurried(told, 0.1)
            told.origin._hedging._saved = 10.0
            reads = [_read(told, GET, way=WAYS[number % 3]) for number in range(10)]
            for result in await asyncio.gather(*reads, return_exceptions=True):
                if isinstance(result, BaseException):
                    assert isinstance(result, OriginBodyError | OriginUnreachable)
                else:
                    assert result == body
                    right += 1
        assert right >= 85
        assert HedgeOutcome.WON in told.outcomes
