"""The short way to bytes that are here."""

from __future__ import annotations

import asyncio
import base64
import os
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.blocks import block_file, page_cache, small_block_fetch
from gateway.blocks.block_file import ChunkChecksums, lease_of
from gateway.blocks.cache import BlockCache
from gateway.blocks.directory import DiskThreads
from gateway.blocks.layout import block_at, data_offset
from gateway.blocks.page_cache import Residency
from gateway.blocks.reader import FillSource
from gateway.blocks.single_flight import InflightFetch
from gateway.core.clock import SystemClock
from gateway.core.errors import BlockDamaged
from gateway.core.model import ByteRange, FileSpan, ObjectKey, ObjectVersion, PinnedFileSpan
from gateway.origin.client import Purpose
from gateway.origin.traffic_meter import MeteredOrigin, OriginMeter
from gateway.policy.bandwidth import Bandwidth, Ceiling
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.telemetry import metrics
from tests.support.asgi import call
from tests.support.blocks import (
    BLOCK,
    MIB,
    block_files,
    bytes_of,
    content_of,
    make_origin,
    open_cache,
    read,
    stored,
    take,
    whole,
)
from tests.support.cache_label import cache_label
from tests.support.counting import by_label, counted
from tests.support.descriptors import open_descriptors
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import AlterBody, AlterHeaders, on
from tests.support.slots import Slot
from tests.support.whole_answers import WholeAnswers

SLOT = "default"


def span_of(cache: BlockCache, version: ObjectVersion, byte_range: ByteRange | None = None) -> PinnedFileSpan | None:
    asked = byte_range or whole(version)
    return cache.warm_span(version, asked.first, asked.length, slot=SLOT)


async def warm_up(cache: BlockCache, version: ObjectVersion) -> None:
    """Have an object filled, then read and verified."""
    for _ in range(2):
        await read(cache, version)
        await cache.settle()


def held_bytes_of(held: PinnedFileSpan) -> bytes:
    return os.pread(held.span.descriptor, held.span.count, held.span.offset)


async def test_nothing_is_given_at_once_where_nobody_tells_what_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what this process has opened, nor what it has filled and kept open."""
    monkeypatch.setattr(page_cache, "is_supported", lambda _: False)
    origin = make_origin()
    version = stored(origin, "k", BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        await warm_up(cache, version)
        assert span_of(cache, version) is None
        assert await read(cache, version) == content_of(origin, version)


@pytest.mark.parametrize("small_object_bytes_max", [0, BLOCK])
async def test_bytes_that_were_read_a_moment_ago_are_given_at_once(tmp_path: Path, small_object_bytes_max: int) -> None:
    """All of a block and any part of it, counted as hits when they are let go of; the file is closed then."""
    origin = make_origin()
    version = stored(origin, "k", BLOCK)
    async with open_cache(tmp_path / "c", origin, small_object_bytes_max=small_object_bytes_max) as cache:
        await warm_up(cache, version)
        open_before, hits = open_descriptors(), counted(metrics.CACHE_HIT_BYTES)
        for wanted in (whole(version), ByteRange(5, 9), ByteRange(BLOCK - 1, BLOCK - 1)):
            held = span_of(cache, version, wanted)
            assert held is not None
            assert held_bytes_of(held) == content_of(origin, version, wanted)
            held.close()
            held.close()
            hits += wanted.length
            assert counted(metrics.CACHE_HIT_BYTES) == hits
        assert open_descriptors() == open_before


async def test_what_must_be_waited_for_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not there; there and not verified yet, where it is much; verified in part; in two blocks; another version."""
    monkeypatch.setattr(block_file, "VERIFIED_AT_ONCE_BYTES_MAX", 0)
    origin = make_origin()
    version = stored(origin, "k", 2 * BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        first = ByteRange(0, BLOCK - 1)
        assert span_of(cache, version, first) is None
        await read(cache, version)
        await cache.settle()
        assert span_of(cache, version, first) is None, "what was written is verified when it is read"
        await read(cache, version)
        assert span_of(cache, version, first) is not None
    async with open_cache(tmp_path / "c", origin) as cache:
        assert span_of(cache, version, first) is None
        await read(cache, version, ByteRange(0, 0))
        assert span_of(cache, version, ByteRange(0, 9)) is not None
        assert span_of(cache, version, first) is None
        await read(cache, version)
        assert span_of(cache, version, first) is not None
        assert span_of(cache, version) is None
        other = ObjectVersion(version.key, '"other"', version.size_bytes)
        assert span_of(cache, other, first) is None


async def test_what_is_in_memory_and_little_is_verified_at_once(tmp_path: Path) -> None:
    """Nobody has read it since it was written."""
    origin = make_origin()
    version = stored(origin, "k", BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        await read(cache, version)
        await cache.settle()
        held = span_of(cache, version)
        assert held is not None
        assert held_bytes_of(held) == content_of(origin, version)
        held.close()


async def test_a_file_that_was_changed_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was verified was verified of the file as it was."""
    monkeypatch.setattr(block_file, "VERIFIED_AT_ONCE_BYTES_MAX", 0)
    origin = make_origin()
    version = stored(origin, "k", BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        await warm_up(cache, version)
        held = span_of(cache, version)
        assert held is not None
        os.utime(f"/proc/self/fd/{held.span.descriptor}")
        held.close()
        assert span_of(cache, version) is None


async def test_a_span_that_could_not_be_sent_is_verified_again(tmp_path: Path) -> None:
    """The next reader looks at every byte."""
    origin = make_origin()
    version = stored(origin, "k", BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        await warm_up(cache, version)
        held = span_of(cache, version)
        assert held is not None
        held.failed(BlockDamaged("the file ended early"))
        held.close()
        assert span_of(cache, version) is None
        assert await read(cache, version) == content_of(origin, version)


async def test_an_unreadable_directory_gives_nothing(tmp_path: Path) -> None:
    """The origin serves until the directory has proved itself again."""
    origin = make_origin()
    version = stored(origin, "k", BLOCK)
    async with open_cache(tmp_path / "c", origin) as cache:
        await warm_up(cache, version)
        held = span_of(cache, version)
        assert held is not None
        held.failed(OSError(5, "Input/output error"))
        held.close()
        assert not cache.isolation.readable
        assert span_of(cache, version) is None


GET = Operation.GET_OBJECT
CONTENT = bytes(range(256)) * 250
IMMUTABLE = (Slot("i", Prefix.parse("s3://bucket/"), consistency="immutable"),)


@asynccontextmanager
async def gateway(directory: Path, **options: object) -> AsyncIterator[GatewayApp]:
    origin = MemoryOrigin(SystemClock())
    origin.create_bucket("bucket")
    origin.put("bucket", "k", CONTENT)
    async with gateway_app(directory, origin=origin, through=WholeAnswers(origin), **options) as one:  # type: ignore[arg-type]
        yield one


async def settled(one: GatewayApp) -> None:
    await one.blocks.settle()
    await one.catalog.settle()


async def test_it_is_kept_though_nobody_filled_it_in_a_task(tmp_path: Path) -> None:
    """The answer needs no task of a fill; the block is on the disk a moment later, and read from there."""
    async with gateway(tmp_path, slots=IMMUTABLE) as one:
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        answer = await call(one.app, "GET", "/bucket/k")
        begun = {task.get_name() for task in asyncio.all_tasks()} - tasks
        assert (answer.status, answer.body, cache_label(answer)) == (200, CONTENT, "miss")
        assert "small object writer" in begun
        assert "block fill" not in begun
        await settled(one)
        assert one.blocks.usage().blocks == 1
        again = await call(one.app, "GET", "/bucket/k")
        assert (again.body, again.headers["x-forebay-cache"]) == (CONTENT, "hit")
        assert one.origin.count(GET) == 1


async def test_who_comes_before_it_has_landed_shares_it(tmp_path: Path) -> None:
    """5.3 A reader in the moment between memory and disk gets the same bytes, and the origin is not asked for them."""
    async with gateway(tmp_path) as one:
        first = await call(one.app, "GET", "/bucket/k")
        second = await call(one.app, "GET", "/bucket/k", {"Range": "bytes=10-19"})
        assert (first.body, second.body) == (CONTENT, CONTENT[10:20])
        assert second.headers["x-forebay-cache"] == "hit"
        assert one.origin.count(GET) == 1


async def test_who_closes_right_behind_the_answer_has_kept_it(tmp_path: Path) -> None:
    """What has arrived is written before the directory is left."""
    async with gateway(tmp_path, slots=IMMUTABLE) as one:
        await call(one.app, "GET", "/bucket/k")
    async with gateway(tmp_path, slots=IMMUTABLE) as one:
        assert one.blocks.usage().blocks == 1


def crc32(content: bytes) -> str:
    return base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()


@pytest.mark.parametrize("right", [True, False])
async def test_bytes_without_their_checksum_are_never_kept(tmp_path: Path, right: bool) -> None:
    """6.5 A body that is not what the origin says it is goes to no client and to no disk."""
    async with gateway(tmp_path) as one:
        one.origin.inject(on(GET), AlterHeaders({"x-amz-checksum-crc32": crc32(CONTENT)}), times=None)
        if not right:
            one.origin.inject(on(GET), AlterBody(lambda body: body[::-1]), times=None)
        answer = await call(one.app, "GET", "/bucket/k")
        await settled(one)
        assert (answer.body == CONTENT) is right
        assert CONTENT[::-1] not in answer.body
        assert one.blocks.usage().blocks == int(right)


async def test_where_memory_has_no_room_the_fill_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in memory stays bounded: the second of two objects takes the ordinary way, and is as good."""
    monkeypatch.setattr(small_block_fetch, "GATHERING_SECONDS", 0.05)
    monkeypatch.setattr(small_block_fetch, "HELD_BYTES_MAX", len(CONTENT) + 1)
    async with gateway(tmp_path) as one:
        one.origin.put("bucket", "l", CONTENT)
        answers = await asyncio.gather(*(call(one.app, "GET", f"/bucket/{key}") for key in "kl"))
        assert [answer.body for answer in answers] == [CONTENT] * 2
        assert one.blocks._dependencies.writers[0].held_bytes <= 2 * len(CONTENT)
        await settled(one)
        assert one.blocks.usage().blocks == 2
        assert one.origin.count(GET) == 2


async def test_a_slot_that_does_not_keep_it_passes_it_on(tmp_path: Path) -> None:
    """`kept_object_size_max` holds for what has come whole, too."""
    slots = (Slot("i", Prefix.parse("s3://bucket/"), consistency="immutable", kept_object_bytes_max=1000),)
    async with gateway(tmp_path, slots=slots) as one:
        assert (await call(one.app, "GET", "/bucket/k")).body == CONTENT
        await settled(one)
        assert one.blocks.usage().blocks == 0


@pytest.mark.parametrize("rate", [None, 1e9, 200_000.0], ids=["no ceiling", "a high one", "a low one"])
def test_every_byte_is_counted_and_held_to_its_ceiling(tmp_path: Path, rate: float | None) -> None:
    """10.3 Counted once each, and what a ceiling has no room for waits, though it has arrived."""

    async def scenario() -> float:
        origin, loop = MemoryOrigin(SystemClock()), asyncio.get_running_loop()
        origin.create_bucket("bucket")
        ceilings = [] if rate is None else [Ceiling("read", None, rate)]
        bandwidth = Bandwidth(ceilings, SystemClock())
        front = MeteredOrigin(WholeAnswers(origin), OriginMeter(bandwidth))
        async with gateway_app(tmp_path, origin=origin, through=front) as one:
            for number in range(3):
                origin.put("bucket", f"k{number}", CONTENT)
            started = loop.time()
            for number in range(3):
                assert (await call(one.app, "GET", f"/bucket/k{number}")).body == CONTENT
            await settled(one)
            assert by_label(metrics.ORIGIN_BYTES, "direction", purpose="live") == {"read": 3 * len(CONTENT)}
            return loop.time() - started

    seconds = asyncio.run(scenario())
    if rate is not None and rate < 1e6:
        assert seconds > len(CONTENT) / rate


@pytest.mark.parametrize(
    "fits",
    [lambda size: ByteRange(0, size - 1), lambda size: ByteRange(5, 9), lambda size: ByteRange(size - 1, size - 1)],
)
async def test_any_range_of_it_is_given(tmp_path: Path, fits: Callable[[int], ByteRange]) -> None:
    """From the first byte to the last."""
    async with gateway(tmp_path) as one:
        wanted = fits(len(CONTENT))
        answer = await call(one.app, "GET", "/bucket/k", {"Range": f"bytes={wanted.first}-{wanted.last}"})
        assert (answer.status, answer.body) == (206, CONTENT[wanted.first : wanted.stop])
        assert answer.headers["content-range"] == f"bytes {wanted.first}-{wanted.last}/{len(CONTENT)}"


async def test_an_object_whose_blocks_were_dropped_is_looked_at_anew(tmp_path: Path) -> None:
    """Its claim ended with its fill: nobody is kept out."""
    async with gateway(tmp_path) as one:
        for _ in range(3):
            assert (await call(one.app, "GET", "/bucket/k")).body == CONTENT
            await settled(one)
            await one.blocks.invalidate(ObjectKey("bucket", "k"))
        assert [asked.method for asked in one.origin.calls] == ["GET"] * 3


BLOCKS = 4


@pytest.fixture
def told(tmp_path: Path) -> None:
    """Without this the promise is not made."""
    with (tmp_path / "trial").open("wb", buffering=0) as file:
        file.write(bytes(MIB))
        if not Residency().unwritten(file.fileno(), 0, MIB):
            pytest.skip("this system does not tell what waits to be written")


def written_back(path: Path) -> None:
    """The device has it, and may give it back otherwise from now on."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())


def touched(path: Path) -> None:
    """Somebody else writes to the file: the same bytes, as far as he says."""
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(first)


async def read_on(cache: BlockCache, version: ObjectVersion, happens: Callable[[Path], None], directory: Path) -> bytes:
    """Read an object; when all of it has been fetched, and nothing was sent, something happens to the files."""
    reader = await cache.open_range(version, whole(version))
    taken = bytearray()
    async for piece in reader.body():
        if not taken:
            await cache.settle()
            for path in block_files(directory):
                happens(path)
        taken += bytes_of(piece)
    return bytes(taken)


@pytest.mark.parametrize(
    ("happens", "are_checked"),
    [(lambda _: None, False), (written_back, True), (touched, True)],
    ids=["nothing happens", "the device has them", "somebody writes to them"],
)
async def test_who_had_blocks_fetched_gets_them_as_they_were_written(
    tmp_path: Path, verified: list[str], happens: Callable[[Path], None], are_checked: bool
) -> None:
    """1.4 They are not read again as long as they wait to be written to the device; others have them checked."""
    origin = make_origin()
    version = stored(origin, "a", BLOCKS * MIB)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=MIB, readahead_bytes=BLOCKS * MIB) as cache:
        assert await read_on(cache, version, happens, tmp_path / "c") == content_of(origin, version)
        assert len(set(verified)) == (BLOCKS - 1 if are_checked else 0)
        verified.clear()
        assert await take(await cache.open_range(version, whole(version))) == content_of(origin, version)
        assert len(set(verified)) == (1 if are_checked else BLOCKS)


@pytest.mark.usefixtures("told")
async def test_a_span_is_doubted_when_its_bytes_may_come_from_the_device(tmp_path: Path, verified: list[str]) -> None:
    """1.4 A slow client's, too: before it is sent more, the bytes are read and checked."""
    origin = make_origin()
    version = stored(origin, "a", 2 * MIB)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=MIB, readahead_bytes=2 * MIB) as cache:
        body = (await cache.open_range(version, whole(version))).body()
        position = 0
        while position < MIB:
            position += len(bytes_of(await anext(body)))
            await cache.settle()
        span = await anext(body)
        assert isinstance(span, FileSpan)
        assert span.file is not None
        assert span.count == MIB
        assert span.file.intact(span.offset, span.count)
        for path in block_files(tmp_path / "c"):
            written_back(path)
        assert not span.file.intact(span.offset, span.count)
        assert not verified
        assert await span.file.restore(span.offset, span.count) is None
        assert span.file.intact(span.offset, span.count)
        await body.aclose()


RANDOM_CONTENT = os.urandom(2 * MIB)
VERSION = ObjectVersion(ObjectKey("bucket", "key"), '"etag"', len(RANDOM_CONTENT))


async def test_bytes_of_a_fill_are_doubted_as_soon_as_its_writer_doubts_them(tmp_path: Path) -> None:
    """1.4 Also those that a slow client was given before: they wait to be written again, whatever they are by now."""
    block, threads, doubted = block_at(VERSION, 0, len(RANDOM_CONTENT)), DiskThreads(1), 0
    fill = InflightFetch(block, "default", {}, Purpose.LIVE, None)
    with lease_of(os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)) as file:
        os.pwrite(file.descriptor, RANDOM_CONTENT, data_offset(block))
        checksums = ChunkChecksums(len(RANDOM_CONTENT))
        checksums.update(RANDOM_CONTENT)
        fill.enter()
        fill.advance(file, checksums, lambda: doubted)
        parts = SimpleNamespace(residency=Residency(), threads=threads)
        plan: Any = SimpleNamespace(dependencies=parts, purpose=Purpose.LIVE)
        source = FillSource(fill, plan)
        span = await source.read(0, len(RANDOM_CONTENT))
        assert isinstance(span, FileSpan)
        assert span.file is not None
        assert span.file.intact(span.offset, span.count)
        doubted = MIB
        assert not span.file.intact(span.offset, span.count)
        assert span.file.intact(span.offset + MIB, MIB)
        restored = await span.file.restore(span.offset, MIB)
        assert restored is not None
        assert restored == RANDOM_CONTENT[: len(restored)]
        assert isinstance(await source.read(0, len(RANDOM_CONTENT)), memoryview)
        await source.close()
        fill.end(None)
    threads.shut_down()
