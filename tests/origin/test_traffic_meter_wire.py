"""Waiting for bandwidth over real connections: it is nobody's silence, and no time-out strikes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from gateway.core.clock import SystemClock
from gateway.origin.client import Direction, OriginRequest, OriginSettings, StreamedBody
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials
from gateway.origin.traffic_meter import AnswerKind, MeteredOrigin, OriginMeter
from gateway.s3.requests import Operation
from tests.origin.clients import MEBIBYTE, playing
from tests.origin.origins import STRICT_PAIR, Landing
from tests.support.memory_origin.faults import Answer, on
from tests.support.strict_origin import StrictOrigin

READ_TIMEOUT_SECONDS = 0.2
HELD_SECONDS = 3 * READ_TIMEOUT_SECONDS


class Held:
    """Ceilings that hold every piece back for longer than the origin may be silent. Tells nobody anything."""

    def limiter(self, direction: Direction, slot: str) -> Held:
        return self

    def answered(self, kind: AnswerKind, seconds: float) -> None:
        assert seconds >= 0

    def slowed(self, direction: Direction) -> None:
        raise AssertionError("nobody asks for less here")

    async def take(self, count: int, rank: Callable[[], int]) -> tuple[float, float]:
        await asyncio.sleep(HELD_SECONDS)
        return 0.0, HELD_SECONDS

    def passes(self, count: int, rank: Callable[[], int]) -> bool:
        return False

    def charge(self, count: int) -> None:
        raise AssertionError("nothing is sent again here")

    def release(self) -> None:
        return


def held_origin(strict: StrictOrigin) -> MeteredOrigin:
    meter = OriginMeter(Held())
    settings = OriginSettings(
        strict.endpoint_url,
        connect_timeout_seconds=60.0,
        read_timeout_seconds=READ_TIMEOUT_SECONDS,
        max_attempts=1,
    )
    credentials = StaticCredentials(STRICT_PAIR)
    origin = S3Origin(settings, credentials, SystemClock(), instance_id="gateway-1", on_attempt=meter.attempt)
    return MeteredOrigin(origin, meter)


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", [100 * 1024, MEBIBYTE + 1], ids=["all arrived", "more to come"])
@pytest.mark.parametrize(
    "landing",
    [None, *(Landing(MEBIBYTE, MEBIBYTE, threads=threads) for threads in (False, True))],
    ids=["as it comes", "landing", "threads"],
)
async def test_time_spent_waiting_to_read_is_no_silence_of_the_origin(
    strict: StrictOrigin, size_bytes: int, landing: Landing | None
) -> None:
    """10.3 Whether the rest of the body already lies here or is still to be sent."""
    strict.model.put("bucket", "big", bytes(size_bytes))
    origin = held_origin(strict)
    try:
        async with await origin.send(OriginRequest("GET", "bucket", "big")) as response:
            assert sum([len(piece) async for piece in response.stream(landing)]) == size_bytes
    finally:
        await origin.aclose()


async def chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(1000)


@pytest.mark.slow
@pytest.mark.parametrize("body", [bytes(1000), partial(StreamedBody, length_bytes=3000)], ids=["in memory", "streamed"])
async def test_time_spent_waiting_to_send_is_no_stall_of_the_origin(
    strict: StrictOrigin, body: bytes | partial[StreamedBody]
) -> None:
    """10.3 Neither before a request nor in the midst of its body."""
    origin = held_origin(strict)
    try:
        sent = body if isinstance(body, bytes) else body(chunks(3))
        async with await origin.send(OriginRequest("PUT", "bucket", "new", body=sent)) as response:
            assert response.status == 200
    finally:
        await origin.aclose()


async def test_a_body_that_is_sent_again_is_told_to_the_meter(strict: StrictOrigin) -> None:
    """Each time but the first, which was on the account before."""
    strict.model.inject(on(Operation.PUT_OBJECT), Answer(503, "SlowDown"), times=2)
    async with playing(strict) as client:
        async with await client.origin.send(
            OriginRequest("PUT", "bucket", "new", body=b"abcdefg", slot="a")
        ) as response:
            assert response.status == 200
        assert [attempt.sent_again_bytes for attempt in client.attempts] == [0, 7, 7]
        assert {attempt.slot for attempt in client.attempts} == {"a"}
