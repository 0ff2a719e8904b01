"""What is taken from the origin, and what is not."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gateway.blocks.origin_gets import PinnedGet
from gateway.core.errors import OriginAnswered, OriginBodyError, OriginError, OriginUnreachable
from gateway.core.model import ByteRange, ObjectVersion
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.s3.requests import Operation
from tests.support.blocks import (
    BLOCK,
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
def test_an_answer_of_something_else_is_refused_and_never_cached(tmp_path: Path, effect: Effect) -> None:
    """Wrong ETag, range, size or length: an error before the first byte, and nothing on disk."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", 2 * BLOCK)
        origin.inject(GET, effect, times=None)
        async with open_cache(tmp_path / "c", origin) as cache:
            with pytest.raises(OriginBodyError):
                await cache.open_range(version, ByteRange(0, BLOCK - 1))
            await cache.settle()
            assert cache.usage().blocks == 0
        assert block_files(tmp_path / "c") == partial_files(tmp_path / "c") == []

    asyncio.run(scenario())


@pytest.mark.parametrize("cut", [CutBody(0), CutBody(1), CutBody(100_000), CutBody(BLOCK - 1, reset=True)])
def test_a_body_that_breaks_off_is_resumed(tmp_path: Path, cut: CutBody) -> None:
    """What is missing is asked for from the missing byte on, pinned to the version; readers notice nothing."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCK)
        origin.inject(GET, cut)
        async with open_cache(tmp_path / "c", origin) as cache:
            assert await read(cache, version) == content_of(origin, version)
        second = origin.calls[1].headers
        assert second["range"] == f"bytes={cut.after_bytes}-{BLOCK - 1}"
        assert second["if-match"] == version.etag

    asyncio.run(scenario())


@pytest.mark.parametrize("effect", [CutBody(50_000), CutBody(70_000, reset=True)])
def test_a_body_that_always_breaks_off_is_an_error_never_a_short_body(tmp_path: Path, effect: Effect) -> None:
    """When retries are spent the reader gets an exception after right bytes, and nothing is cached."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_a_version_that_changes_half_way_ends_the_read() -> None:
    """The rest of another version is never appended: 412 on resuming is final."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_resuming_survives_a_busy_and_an_absent_origin() -> None:
    """503 and a refused connection while resuming count as tries, not as the end."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCK)
        origin.inject(GET, CutBody(1000))
        origin.inject(lambda call: call.number == 2, Answer(503, "SlowDown"))
        origin.inject(lambda call: call.number == 3, Unreachable())
        assert await fetch(origin, version, whole(version)) == content_of(origin, version)
        assert origin.count() == 4

    asyncio.run(scenario())


def test_the_first_answer_is_not_asked_for_twice() -> None:
    """Before the first byte there is nobody to keep waiting: the origin's refusal or absence is told at once."""

    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCK)
        origin.inject(lambda call: call.number == 1, Answer(503, "SlowDown"))
        origin.inject(lambda call: call.number == 2, Unreachable())
        with pytest.raises(OriginAnswered):
            await fetch(origin, version, whole(version))
        with pytest.raises(OriginUnreachable):
            await fetch(origin, version, whole(version))
        assert origin.count() == 2

    asyncio.run(scenario())


def test_an_origin_without_ranges_will_do_for_whole_objects() -> None:
    """A 200 that carries the whole object answers a range that is the whole object, and no other."""

    async def scenario() -> None:
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

    asyncio.run(scenario())
