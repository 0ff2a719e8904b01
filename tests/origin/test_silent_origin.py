"""An origin that accepts connections and says nothing, and one that takes its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from gateway.core.errors import OriginBodyError, OriginUnreachable, OutcomeUnknown
from gateway.origin.client import OriginRequest, StreamedBody
from tests.origin.origins import Landing
from tests.origin.told_origin import NONE, Request, forever, head, told_origin
from tests.support.rest_is_slow import rest_is_slow

ATTEMPTS_MAX = 3
SLOW = [
    OriginRequest("PUT", "b", "k", body=b"x"),
    OriginRequest("PUT", "b", "k", body=bytes(8 * 1024**2)),
    OriginRequest("POST", "b", "k", [("uploadId", "u")], body=b"x"),
    OriginRequest("PUT", "b", "k", headers={"x-amz-copy-source": "/b/o"}),
    OriginRequest("GET", "b", None, [("list-type", "2")]),
    OriginRequest("POST", "b", None, [("delete", None)], body=b"x"),
    OriginRequest("DELETE", "b", "k"),
]
READS = [OriginRequest("GET", "b", "k"), OriginRequest("HEAD", "b", "k"), OriginRequest("HEAD", "b")]


async def _unanswered(sending: object, request: OriginRequest) -> float:
    """Seconds until the client was told that there is no answer."""
    began = time.monotonic()
    with pytest.raises(OriginUnreachable):
        await sending.send(request)  # type: ignore[attr-defined]
    return time.monotonic() - began


@pytest.mark.parametrize(
    "request_",
    rest_is_slow([*READS, *SLOW], READS[0], SLOW[-1]),
    ids=lambda one: f"{one.method} {one.query} {len(one.body)}",
)
async def test_a_silent_origin_is_found_out_and_everybody_told_at_once(request_: OriginRequest) -> None:
    """Whatever is asked first: within the time for a first byte; whatever comes behind it, at once."""
    async with told_origin(forever, read_timeout_seconds=20.0, **NONE) as told:
        assert await _unanswered(told.origin, request_) > 0.3
        asked = len(told.requests)
        for later in [*READS, *SLOW]:
            with pytest.raises(OriginUnreachable, match="lately"):
                await told.origin.send(later)
        assert {request.target for request in told.requests[asked:]} <= {"/"}  # questions of the gateway's own


async def test_a_streamed_upload_is_not_begun_for_an_origin_that_is_silent() -> None:
    """Its client's bytes are not even asked for."""
    asked = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal asked
        asked += 1
        yield b"x"

    async with told_origin(forever, **NONE) as told:
        await _unanswered(told.origin, READS[0])
        await _unanswered(told.origin, OriginRequest("PUT", "b", "k", body=StreamedBody(source(), 1)))
    assert asked == 0


@pytest.mark.slow
async def test_one_probe_at_a_time_finds_the_origin_when_it_is_back() -> None:
    """A question of the gateway's own: no client waits for it, and none is needed for it to succeed."""

    async def answering(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("Content-Length: 0"))

    async with told_origin(forever, **NONE) as told:
        await _unanswered(told.origin, READS[0])
        told.requests.clear()
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            await asyncio.gather(*(_unanswered(told.origin, READS[0]) for _ in range(10)))
        assert 1 <= len(told.requests) <= 4
        assert {request.target for request in told.requests} == {"/"}
        told.exchange = answering
        while True:
            try:
                async with await told.origin.send(READS[0]) as answer:
                    assert answer.status == 200
                break
            except OriginUnreachable:
                await asyncio.sleep(0.02)
        await asyncio.gather(*(told.origin.send(READS[1]) for _ in range(10)))


@pytest.mark.slow
@pytest.mark.parametrize("request_", SLOW, ids=lambda one: f"{one.method} {one.query} {len(one.body)}")
async def test_a_slow_answer_of_an_origin_that_lives_is_waited_for(request_: OriginRequest) -> None:
    """It answers a simple question meanwhile, or somebody else: nothing is given up, and nobody else refused."""

    async def slow(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.target != "/":
            await asyncio.sleep(3.2)
        writer.write(head("Content-Length: 0"))

    async with told_origin(slow, first_byte_timeout_seconds=1.0) as told:
        async with await told.origin.send(request_) as answer:
            assert answer.status == 200
        probes = [request for request in told.requests if request.target == "/"]
        assert 1 <= len(probes) <= 5
        assert not told.origin._breaker(f"127.0.0.1:{told.port}").is_open


@pytest.mark.slow
async def test_a_slow_operation_has_its_own_end() -> None:
    """However much the origin lives."""

    async def never(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.target != "/":
            await forever()
        writer.write(head("Content-Length: 0"))

    seconds = list[list[float]]()
    for _ in range(ATTEMPTS_MAX):  # a busy machine takes the origin for silent
        async with told_origin(
            never, first_byte_timeout_seconds=1.0, read_timeout_seconds=1.4, slow_timeout_seconds=4.0
        ) as told:
            seconds.append([await _unanswered(told.origin, SLOW[number]) for number in (0, 2, 0)])
        read, slow, again = seconds[-1]
        if 1.3 < read < 3.9 < slow and again > 1.3:  # and the breaker is closed
            return
    pytest.fail(f"{seconds}")


async def test_a_conditional_write_that_is_not_answered_is_unknown() -> None:
    """It has been sent."""
    async with told_origin(forever, **NONE) as told:
        with pytest.raises(OutcomeUnknown):
            await told.origin.send(OriginRequest("PUT", "b", "k", headers={"if-none-match": "*"}, body=b"x"))
        with pytest.raises(OriginUnreachable) as caught:
            await told.origin.send(OriginRequest("PUT", "b", "k", headers={"if-none-match": "*"}, body=b"x"))
        assert not isinstance(caught.value, OutcomeUnknown)  # not even sent


@pytest.mark.parametrize(
    ("size", "buffer"),
    [
        (100_000, None),
        (10 * 1024**2, None),
        (10 * 1024**2, Landing(256 * 1024, 64 * 1024, threads=False)),
        (10 * 1024**2, Landing(256 * 1024, 64 * 1024, threads=True)),
    ],
    ids=["whole", "queued", "direct", "threads"],
)
async def test_a_body_that_trickles_is_given_up(size: int, buffer: Landing | None) -> None:
    """A byte now and then is no progress, also where it is received piece by piece; what was there is given first."""

    async def trickle(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {size}") + b"x" * 10)
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.1)

    async with (
        told_origin(trickle, **NONE) as told,
        await told.origin.send(OriginRequest("GET", "b", "k")) as answer,
    ):
        received = 0
        with pytest.raises(OriginBodyError, match="nothing came"):  # noqa: PT012 - what came is counted
            async for piece in answer.stream(buffer):
                received += len(piece)
        assert 10 <= received < 50


@pytest.mark.slow
async def test_a_reader_that_is_slow_is_no_silence_of_the_origin() -> None:
    """The origin is held back, and its body comes whole when it is read on."""
    body = bytes(4 * 1024**2)

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {len(body)}") + body)

    async with (
        told_origin(answer, stall_timeout_seconds=0.5) as told,
        await told.origin.send(OriginRequest("GET", "b", "k")) as found,
    ):
        received, pauses = 0, 0
        async for piece in found.stream():
            received += len(piece)
            if pauses < 2:
                pauses += 1
                await asyncio.sleep(1.0)
        assert received == len(body)
