"""The one point that all traffic with an origin passes: counted, held to ceilings, and else unchanged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from gateway.core.clock import Clock
from gateway.origin.client import IS_AWAITED, OriginRequest, Purpose, StreamedBody
from gateway.origin.traffic_meter import Attempt, MeteredOrigin, OriginMeter
from gateway.policy.bandwidth import Bandwidth, Ceiling
from gateway.shared.recent_requests import RecentRequests, recent_requests
from gateway.telemetry import metrics
from tests.support.counting import counted
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin

PIECE_BYTES = 256 * 1024


def passed_bytes() -> dict[tuple[str, ...], float]:
    """By direction, purpose and slot."""
    return {labels: number.get() for labels, number in metrics.ORIGIN_BYTES.kept().items()}


class Metered:
    """A memory origin with objects of ten bytes and of four pieces, behind a meter."""

    def __init__(self, *ceilings: Ceiling) -> None:
        self.clock = ManualClock()
        self.memory = MemoryOrigin(self.clock)
        self.memory.put("b", "small", b"0123456789")
        self.memory.put("b", "large", bytes(4 * PIECE_BYTES))
        self.meter = OriginMeter(bandwidth(self.clock, ceilings))
        self.origin = MeteredOrigin(self.memory, self.meter)

    async def read(self, slot: str, key: str = "large") -> float:
        """Read it all; returns when that was done."""
        async with await self.origin.send(OriginRequest("GET", "b", key, slot=slot)) as response:
            assert [len(piece) async for piece in response.stream()]
        return self.clock.monotonic()

    async def done(self, task: asyncio.Task[float]) -> float:
        while not task.done():
            await self.clock.advance(0.01)
        return task.result()


def bandwidth(clock: Clock, ceilings: tuple[Ceiling, ...]) -> Bandwidth | None:
    return Bandwidth(ceilings, clock) if ceilings else None


CEILINGS: list[tuple[Ceiling, ...]] = [(), (Ceiling("read", None, 1e9), Ceiling("write", None, 1e9))]


@pytest.mark.parametrize("ceilings", CEILINGS, ids=["unlimited", "limited"])
async def test_what_is_read_is_counted_by_slot_and_purpose(ceilings: tuple[Ceiling, ...]) -> None:
    """Streamed or as a whole; the answer is the origin's own."""
    metered = Metered(*ceilings)
    request = OriginRequest("GET", "b", "small", purpose=Purpose.WARM, slot="a")
    async with await metered.origin.send(request) as response:
        assert (response.status, response.headers["content-length"]) == (200, "10")
        assert b"".join([piece async for piece in response.stream()]) == b"0123456789"
    async with await metered.origin.send(OriginRequest("GET", "b", "small")) as response:
        assert await response.read(100) == b"0123456789"
    assert passed_bytes() == {("read", "warm", "a"): 10, ("read", "live", "default"): 10}


async def chunks(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize("ceilings", CEILINGS, ids=["unlimited", "limited"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_written_is_counted(ceilings: tuple[Ceiling, ...], streamed: bool) -> None:
    """In memory or streamed; it arrives whole."""
    metered = Metered(*ceilings)
    sent = StreamedBody(chunks(b"abc", b"defg"), 7) if streamed else b"abcdefg"
    request = OriginRequest("PUT", "b", "new", body=sent, purpose=Purpose.FLUSH, slot="a")
    async with await metered.origin.send(request) as response:
        assert response.status == 200
    assert passed_bytes()["write", "flush", "a"] == 7
    async with await metered.origin.send(OriginRequest("GET", "b", "new")) as response:
        assert await response.read(100) == b"abcdefg"


async def test_a_reader_that_stops_half_way_is_counted_so_far_and_gives_the_answer_back() -> None:
    """Closing the stream closes the origin's."""
    metered = Metered()
    async with await metered.origin.send(OriginRequest("GET", "b", "large")) as response:
        stream = response.stream()
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]  # a generator, as readers rely on
    assert passed_bytes() == {("read", "live", "default"): PIECE_BYTES}


async def test_a_ceiling_on_reads_holds_back_its_slot_and_no_other() -> None:
    """Four pieces at a piece a second: the last passes when three seconds are over, less what was saved up."""
    metered = Metered(Ceiling("read", "slow", PIECE_BYTES))
    slow = asyncio.create_task(metered.read("slow"))
    assert await metered.done(asyncio.create_task(metered.read("other"))) == 0.01
    assert 2.9 <= await metered.done(slow) <= 3.0
    assert list(metrics.BANDWIDTH_WAIT_SECONDS.kept()) == [("ceiling", "read", "slow")]
    assert 2.8 <= metrics.BANDWIDTH_WAIT_SECONDS.value("ceiling", "read", "slow") <= 3.0


async def test_the_links_ceiling_is_shared_by_all_slots() -> None:
    """Two readers of four pieces each at two pieces a second."""
    metered = Metered(Ceiling("read", None, 2 * PIECE_BYTES))
    tasks = [asyncio.create_task(metered.read(slot)) for slot in ("a", "b")]
    ends = [await metered.done(task) for task in tasks]
    assert 3.3 <= max(ends) <= 3.5


async def test_the_origin_is_not_read_ahead_of_the_ceiling() -> None:
    """Who waits takes nothing more from the connection: back-pressure is what slows the origin down."""
    metered = Metered(Ceiling("read", "slow", PIECE_BYTES))
    task = asyncio.create_task(metered.read("slow"))
    await metered.clock.advance(0)
    await metered.clock.advance(0.5)
    assert passed_bytes()["read", "live", "slow"] == 2 * PIECE_BYTES
    await metered.done(task)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_ceiling_on_writes_holds_back_what_is_sent(streamed: bool) -> None:
    """A body in memory before it is sent at all, a streamed one chunk by chunk."""
    metered = Metered(Ceiling("write", "slow", 1000))
    chunk = bytes(1000)

    async def put(body: bytes | StreamedBody) -> float:
        async with await metered.origin.send(OriginRequest("PUT", "b", "k", body=body, slot="slow")) as response:
            assert response.status == 200
        return metered.clock.monotonic()

    assert await metered.done(asyncio.create_task(put(chunk))) == 0.01
    body = StreamedBody(chunks(*[chunk] * 4), 4000) if streamed else bytes(4000)
    sent = asyncio.create_task(put(body))
    await metered.clock.advance(0)
    await metered.clock.advance(0.5)
    assert len(metered.memory.calls) == (2 if streamed else 1)
    ended = await metered.done(sent)
    assert (3.8 if streamed else 0.8) <= ended <= (4.0 if streamed else 1.0)
    assert passed_bytes()["write", "live", "slow"] == 5000


async def test_a_reader_that_leaves_while_it_waits_takes_nothing_with_it() -> None:
    """The next one waits no longer than if it had never been."""
    metered = Metered(Ceiling("read", "slow", PIECE_BYTES))
    await metered.read("slow", "small")
    leaving = asyncio.create_task(metered.read("slow"))
    await metered.clock.advance(0)
    await metered.clock.advance(0.5)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert leaving.cancelled()
    assert 3.8 <= await metered.done(asyncio.create_task(metered.read("slow"))) <= 4.0


async def test_an_answer_without_a_body_waits_for_nothing() -> None:
    """However deep in debt its slot is."""
    metered = Metered(Ceiling("read", "slow", 1))
    await metered.read("slow", "small")
    async with await metered.origin.send(OriginRequest("HEAD", "b", "small", slot="slow")) as response:
        assert await response.read(10) == b""
    assert metered.clock.monotonic() == 0


def test_an_attempt_without_an_answer_counts_as_unreachable_and_is_shown(tmp_path: Path) -> None:
    """It has no status. Failures are kept for those who look for them, successes are not."""
    recent = RecentRequests(tmp_path, 0)
    meter = OriginMeter(recent=recent)
    for status in (None, 200):
        meter.attempt(Attempt("imagenet", Purpose.LIVE, "GET", status, 1.0, origin="s3.example"))
    for told in ("unreachable", "200"):
        assert metrics.ORIGIN_REQUESTS.value("GET", told, "live", "imagenet", "s3.example") == 1
    assert counted(metrics.ORIGIN_REQUEST_SECONDS, purpose="live", origin="s3.example") == 2
    [failure] = recent_requests(tmp_path, 10, time.time())["origin_failures"]
    assert (failure["status"], failure["slot"]) == ("unreachable", "imagenet")
    recent.close()


async def test_a_body_in_memory_that_is_sent_again_counts_again() -> None:
    """Every byte that goes out is on the account; what comes behind it waits for it."""
    metered = Metered(Ceiling("write", "a", 1000))
    attempt = Attempt("a", Purpose.FORWARD, "POST", 503, 0.1, sent_again_bytes=1100)
    metered.meter.attempt(attempt)
    assert counted(metrics.ORIGIN_REQUESTS, method="POST", slot="a", status="503", purpose="forward") == 1
    assert passed_bytes() == {("write", "forward", "a"): 1100}
    limiter = metered.meter.of_body("write", OriginRequest("POST", "b", "k", slot="a"))
    waiting = asyncio.create_task(limiter.wait(1))
    await metered.clock.advance(0)
    await metered.clock.advance(0.99)
    assert not waiting.done()
    await metered.clock.advance(0.02)
    assert waiting.done()


@pytest.mark.parametrize(
    ("awaited", "order"),
    [
        ({}, ["live", "forward", "flush", "readahead", "warm", "refresh"]),
        (
            {Purpose.READAHEAD: True, Purpose.WARM: True, Purpose.FLUSH: True},
            ["live", "forward", "readahead", "warm", "flush", "refresh"],
        ),
        (
            {Purpose.LIVE: False, Purpose.READAHEAD: False, Purpose.WARM: True, Purpose.FLUSH: False},
            ["forward", "warm", "flush", "live", "readahead", "refresh"],
        ),
    ],
)
def test_pieces_of_a_slot_pass_by_their_purpose(awaited: Mapping[Purpose, bool], order: list[str]) -> None:
    """Whatever the order in which they came; what somebody waits for after all is moved ahead of what nobody does, and
    what a reader has begun who has left is among that."""

    async def run() -> list[str]:
        metered, passed = Metered(Ceiling("read", None, 5000)), list[str]()

        async def read(purpose: Purpose) -> None:
            if purpose in awaited:
                IS_AWAITED.set(lambda: awaited[purpose])
            meter = metered.meter.of_body("read", OriginRequest("GET", "b", "k", purpose=purpose, slot="a"))
            await meter.wait(200)
            passed.append(purpose.value)

        await metered.meter.of_body("read", OriginRequest("GET", "b", "k", slot="a")).wait(1000)
        came = [Purpose.REFRESH, Purpose.FLUSH, Purpose.LIVE, Purpose.FORWARD, Purpose.READAHEAD, Purpose.WARM]
        tasks = [asyncio.create_task(read(purpose)) for purpose in came]
        await metered.clock.advance(0)
        await metered.clock.advance(0.9)  # before any of them has waited too long for better ones
        await asyncio.gather(*tasks)
        return passed

    assert asyncio.run(run()) == order
