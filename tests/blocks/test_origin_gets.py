"""What is taken from the origin, and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gateway.blocks.origin_gets import PinnedGet
from gateway.core.errors import OriginAnswered, OriginBodyError, OriginBusy, OriginError, OriginUnreachable
from gateway.core.model import ByteRange, ObjectVersion
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.s3.requests import Operation
from tests.origin.origins import s3_origin
from tests.support.blocks import (
    BLOCK,
    BUCKET,
    MIB,
    TestClock,
    block_files,
    content_of,
    make_origin,
    open_cache,
    partial_files,
    read,
    stored,
    whole,
)
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import AlterBody, AlterHeaders, Answer, CutBody, Effect, Unreachable, on
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import until

GET = on(Operation.GET_OBJECT)


async def drain(get: PinnedGet) -> bytes:
    async with aclosing(get.pieces()) as pieces:
        return b"".join([piece async for piece in pieces])


async def fetch(origin: MemoryOrigin, version: ObjectVersion, asked: ByteRange, retries: int = 3) -> bytes:
    get = PinnedGet(origin, version, asked, {}, Purpose.LIVE, "default", TestClock(), retries)
    try:
        await get.start()
        return await drain(get)
    finally:
        await get.aclose()


@dataclass
class Rangeless:
    """An origin that ignores Range."""

    origin: MemoryOrigin

    async def send(self, request: OriginRequest) -> OriginResponse:
        headers = {name: value for name, value in request.headers.items() if name != "range"}
        return await self.origin.send(replace(request, headers=headers))

    async def aclose(self) -> None:
        await self.origin.aclose()


WRONG_ANSWERS: dict[str, Effect] = {
    "another ETag": AlterHeaders({"etag": '"other"'}),
    "no ETag": AlterHeaders({"etag": None}),
    "another range": AlterHeaders({"content-range": f"bytes 1-{BLOCK}/{2 * BLOCK}"}),
    "another size": AlterHeaders({"content-range": f"bytes 0-{BLOCK - 1}/{3 * BLOCK}"}),
    "no range": AlterHeaders({"content-range": None}),
    "another length": AlterHeaders({"content-length": str(BLOCK - 1)}),
    "longer body": AlterBody(lambda body: body + b"x"),
    "re-coded body": AlterBody(lambda body: body[: len(body) // 2]),
}


@pytest.mark.parametrize("effect", WRONG_ANSWERS.values(), ids=WRONG_ANSWERS.keys())
async def test_an_answer_of_something_else_is_refused_and_never_cached(tmp_path: Path, effect: Effect) -> None:
    """Wrong ETag, range, size or length: an error before the first byte, and nothing on disk."""
    origin = make_origin()
    version = stored(origin, "a", 2 * BLOCK)
    origin.inject(GET, effect, times=None)
    async with open_cache(tmp_path / "c", origin) as cache:
        with pytest.raises(OriginBodyError):
            await cache.open_range(version, ByteRange(0, BLOCK - 1))
        await cache.settle()
        assert cache.usage().blocks == 0
    assert block_files(tmp_path / "c") == partial_files(tmp_path / "c") == []


@pytest.mark.parametrize("cut", [CutBody(0), CutBody(1), CutBody(100_000), CutBody(BLOCK - 1, reset=True)])
async def test_a_body_that_breaks_off_is_resumed(tmp_path: Path, cut: CutBody) -> None:
    """What is missing is asked for from the missing byte on, pinned to the version; readers notice nothing."""
    origin = make_origin()
    version = stored(origin, "a", BLOCK)
    origin.inject(GET, cut)
    async with open_cache(tmp_path / "c", origin) as cache:
        assert await read(cache, version) == content_of(origin, version)
    second = origin.calls[1].headers
    assert second["range"] == f"bytes={cut.after_bytes}-{BLOCK - 1}"
    assert second["if-match"] == version.etag


@pytest.mark.parametrize("effect", [CutBody(50_000), CutBody(70_000, reset=True)])
async def test_a_body_that_always_breaks_off_is_an_error_never_a_short_body(tmp_path: Path, effect: Effect) -> None:
    """When retries are spent the reader gets an exception after right bytes, and nothing is cached."""
    origin = make_origin()
    version = stored(origin, "a", 4 * BLOCK)
    origin.inject(GET, effect, times=None)
    async with open_cache(tmp_path / "c", origin, readahead_bytes=0, fill_retries=2) as cache:
        with pytest.raises(OriginError):
            await read(cache, version)
        await cache.settle()
        assert (cache.usage().blocks, cache.usage().reserved_bytes) == (0, 0)
    assert origin.count() == 3
    assert block_files(tmp_path / "c") == partial_files(tmp_path / "c") == []


async def test_a_version_that_changes_half_way_ends_the_read() -> None:
    """The rest of another version is never appended: 412 on resuming is final."""
    origin = make_origin()
    version = stored(origin, "a", BLOCK)
    origin.inject(GET, CutBody(1000))
    get = PinnedGet(origin, version, whole(version), {}, Purpose.LIVE, "default", TestClock(), 3)
    await get.start()
    stored(origin, "a", BLOCK + 1, seed=2)
    with pytest.raises(OriginAnswered) as caught:
        await drain(get)
    assert caught.value.status == 412
    assert origin.count() == 2
    await get.aclose()


async def test_resuming_survives_a_busy_and_an_absent_origin() -> None:
    """503 and a refused connection while resuming count as tries, not as the end."""
    origin = make_origin()
    version = stored(origin, "a", BLOCK)
    origin.inject(GET, CutBody(1000))
    origin.inject(lambda call: call.number == 2, Answer(503, "SlowDown"))
    origin.inject(lambda call: call.number == 3, Unreachable())
    assert await fetch(origin, version, whole(version)) == content_of(origin, version)
    assert origin.count() == 4


@dataclass
class Queue:
    """Before the origin: each request takes its time there, and has to be sent before all of it is over."""

    origin: MemoryOrigin
    clock: TestClock
    takes_seconds: float
    seconds_max: float
    waited_before: list[float] = field(default_factory=list)

    async def send(self, request: OriginRequest) -> OriginResponse:
        self.waited_before.append(request.waited_seconds)
        self.clock.time += self.takes_seconds
        if request.waited_seconds + self.takes_seconds > self.seconds_max:
            raise OriginBusy("too many wait")
        return await self.origin.send(request)

    async def aclose(self) -> None:
        await self.origin.aclose()


async def test_all_requests_for_a_block_wait_for_one_time() -> None:
    """Bodies that break off again and again behind a queue: their reader waits for its turn no longer than others."""
    origin, clock = make_origin(), TestClock()
    version = stored(origin, "a", BLOCK)
    origin.inject(GET, CutBody(1000), times=None)
    queue = Queue(origin, clock, takes_seconds=8.0, seconds_max=20.0)
    get = PinnedGet(queue, version, whole(version), {}, Purpose.LIVE, "default", clock, 3)
    await get.start()
    with pytest.raises(OriginBusy):
        await drain(get)
    assert queue.waited_before == [0.0, 8.0, 16.0]
    await get.aclose()


async def test_the_first_answer_is_not_asked_for_twice() -> None:
    """Before the first byte there is nobody to keep waiting: the origin's refusal or absence is told at once."""
    origin = make_origin()
    version = stored(origin, "a", BLOCK)
    origin.inject(lambda call: call.number == 1, Answer(503, "SlowDown"))
    origin.inject(lambda call: call.number == 2, Unreachable())
    with pytest.raises(OriginAnswered):
        await fetch(origin, version, whole(version))
    with pytest.raises(OriginUnreachable):
        await fetch(origin, version, whole(version))
    assert origin.count() == 2


async def test_an_origin_without_ranges_will_do_for_whole_objects() -> None:
    """A 200 that carries the whole object answers a range that is the whole object, and no other."""
    origin = make_origin()
    version = stored(origin, "a", BLOCK)
    rangeless = Rangeless(origin)
    get = PinnedGet(rangeless, version, whole(version), {}, Purpose.LIVE, "default", TestClock(), 0)
    await get.start()
    assert await drain(get) == content_of(origin, version)
    await get.aclose()
    part = PinnedGet(rangeless, version, ByteRange(0, 9), {}, Purpose.LIVE, "default", TestClock(), 0)
    with pytest.raises(OriginBodyError, match="whole object"):
        await part.start()
    await part.aclose()


@pytest.fixture(scope="module")
def server() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        yield origin


@pytest.fixture
def version(server: StrictOrigin) -> ObjectVersion:
    """An object of three blocks and a bit."""
    server.model.faults.clear()
    server.model.calls.clear()
    server.clients.clear()
    return stored(server.model, "a", 13 * MIB)


def test_blocks_hold_the_objects_bytes(server: StrictOrigin, version: ObjectVersion, tmp_path: Path) -> None:
    """Cold, warm and after a restart; connections are used again."""

    async def scenario() -> None:
        origin = s3_origin(server.endpoint_url, max_connections=2)
        for _ in range(2):
            async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
                for _ in range(2):
                    assert await read(cache, version) == content_of(server.model, version)
                    await cache.settle()
        await origin.aclose()

    asyncio.run(scenario())
    assert server.model.count() == 4
    assert len(server.clients) <= 2


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("after_bytes", [0, 1, 300_000, 3 * MIB + 1, 4 * MIB - 1])
def test_a_body_that_breaks_off_on_the_wire_is_resumed(
    server: StrictOrigin, version: ObjectVersion, tmp_path: Path, after_bytes: int, reset: bool
) -> None:
    """Behind the bytes that came; readers notice nothing."""
    server.model.inject(GET, CutBody(after_bytes, reset=reset))

    async def scenario() -> None:
        origin = s3_origin(server.endpoint_url)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB, readahead_bytes=0) as cache:
            first = ByteRange(0, 4 * MIB - 1)
            assert await read(cache, version, first) == content_of(server.model, version, first)
            await cache.settle()
        await origin.aclose()

    asyncio.run(scenario())
    again = server.model.calls[1].headers["range"].removeprefix("bytes=").partition("-")
    assert again[2] == str(4 * MIB - 1)
    assert int(again[0]) == after_bytes or (reset and int(again[0]) < after_bytes)


async def test_a_whole_object_instead_of_a_range_is_refused(
    server: StrictOrigin, version: ObjectVersion, tmp_path: Path
) -> None:
    """Nothing of it is kept, and its connection is not left full of bytes for the next request."""
    origin = s3_origin(server.endpoint_url, max_connections=1)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB, readahead_bytes=0) as cache:
        server.model.inject(GET, AlterHeaders({"content-range": None}))
        with pytest.raises(OriginBodyError):
            await cache.open_range(version, ByteRange(0, 99))
        await cache.settle()
        assert partial_files(tmp_path / "c") == block_files(tmp_path / "c") == []
        assert await read(cache, version) == content_of(server.model, version)
    await origin.aclose()


def test_a_cache_that_closes_in_the_middle_of_bodies_leaves_nothing(
    server: StrictOrigin, version: ObjectVersion, tmp_path: Path
) -> None:
    """Neither files nor connections, and the next one begins anew."""
    server.bytes_per_second = 20 * MIB

    async def scenario() -> None:
        origin = s3_origin(server.endpoint_url)
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
            reader = await cache.open_range(version, ByteRange(0, version.size_bytes - 1))
            body = reader.body()
            await anext(body)
            await until(lambda: server.model.count() == 4)
            await body.aclose()
        assert partial_files(tmp_path / "c") == []
        server.bytes_per_second = None
        async with open_cache(tmp_path / "c", origin, block_size_bytes=4 * MIB) as cache:
            assert await read(cache, version) == content_of(server.model, version)
        await origin.aclose()

    try:
        asyncio.run(scenario())
    finally:
        server.bytes_per_second = None
