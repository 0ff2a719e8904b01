"""What the tests of the block cache share: a cache over an origin in memory, readers that collect bytes, a clock."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gateway.blocks.cache import BlockCache
from gateway.blocks.index.index import BlockIndex
from gateway.blocks.layout import BlockSettings
from gateway.blocks.reading.reader import RangeReader
from gateway.core.clock import Clock, SystemClock
from gateway.core.model import BodyPiece, BorrowedBuffer, ByteRange, FileSpan, ObjectKey, ObjectVersion
from gateway.origin.client import IS_AWAITED, Origin, OriginRequest, OriginResponse, Purpose
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.telemetry.metric_observers import CacheMetrics, SlotBytes
from tests.support.memory_origin import MemoryOrigin

KIB = 1024
MIB = 1024 * KIB
BLOCK = 256 * KIB
BUCKET = "train"


class TestClock:
    """Short sleeps (pauses between retries) pass at once; long ones last until `advance`."""

    __test__ = False

    def __init__(self) -> None:
        self.time = 1_000_000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        if seconds < 1.0:
            self.time += seconds
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.time + seconds, future))
        await future

    def longest_sleep(self) -> float:
        """How long the last of those that sleep now still has to; 0 when nobody does."""
        return max((wake - self.time for wake, future in self._sleepers if not future.done()), default=0.0)

    def advance(self, seconds: float) -> None:
        self.time += seconds
        due = [future for wake, future in self._sleepers if wake <= self.time and not future.done()]
        for future in due:
            future.set_result(None)


@dataclass
class CountingObserver(CacheMetrics):
    """Keeps what it is told."""

    hits: int = 0
    misses: int = 0
    coalesced_readers: int = 0
    evicted_blocks: int = 0
    damaged_blocks: int = 0
    fills: int = 0
    failed_fills: int = 0
    unavailable: int = 0
    not_kept_blocks: int = 0
    not_kept_for: dict[str, int] = field(default_factory=dict)
    evicted_of: dict[str, int] = field(default_factory=dict)
    usages: list[Mapping[str, SlotBytes]] = field(default_factory=list)
    scrub_passes: int = 0
    scrubbed_blocks: list[int] = field(default_factory=list)
    disk_errors: list[str] = field(default_factory=list)
    disk_states: list[str] = field(default_factory=list)

    def hit_bytes(self, slot: str, count: int) -> None:
        self.hits += count

    def miss_bytes(self, slot: str, count: int) -> None:
        self.misses += count

    def coalesced(self, slot: str) -> None:
        self.coalesced_readers += 1

    def evicted(self, slot: str, blocks: int, size_bytes: int) -> None:
        self.evicted_blocks += blocks
        self.evicted_of[slot] = self.evicted_of.get(slot, 0) + blocks

    def damaged(self, slot: str) -> None:
        self.damaged_blocks += 1

    def fill_finished(self, slot: str, seconds: float, size_bytes: int) -> None:
        self.fills += 1

    def fill_failed(self, slot: str) -> None:
        self.failed_fills += 1

    def not_kept(self, slot: str, reason: str, blocks: int) -> None:
        self.not_kept_blocks += blocks
        self.not_kept_for[reason] = self.not_kept_for.get(reason, 0) + blocks

    def store_unavailable(self) -> None:
        self.unavailable += 1

    def usage(self, slots: Mapping[str, SlotBytes], unsurveyed_bytes: int, written_today_bytes: int) -> None:
        self.usages.append(slots)

    def scrubbed(self, size_bytes: int) -> None:
        self.scrubbed_blocks.append(size_bytes)

    def scrubbed_all(self) -> None:
        self.scrub_passes += 1

    def disk_error(self, trouble: str) -> None:
        self.disk_errors.append(trouble)

    def disk_state(self, state: str) -> None:
        self.disk_states.append(state)


@dataclass
class PacedOrigin:
    """Passes everything on; GET bodies come in small pieces and pause after `pause_after` bytes until `go` is set."""

    origin: Origin
    pause_after: int
    piece_bytes: int = 32 * KIB
    go: asyncio.Event = field(default_factory=asyncio.Event)
    paused: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, request: OriginRequest) -> OriginResponse:
        response = await self.origin.send(request)
        return PacedResponse(response, self) if request.method == "GET" else response

    async def aclose(self) -> None:
        await self.origin.aclose()


@dataclass
class PacedResponse:
    response: OriginResponse
    pace: PacedOrigin

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self.response.headers

    async def stream(self, buffer: ReceiveBuffer | None = None) -> AsyncIterator[bytes | memoryview]:
        given = 0
        async for whole in self.response.stream(buffer):
            for start in range(0, len(whole), self.pace.piece_bytes):
                if given >= self.pace.pause_after:
                    self.pace.paused.set()
                    await self.pace.go.wait()
                piece = whole[start : start + self.pace.piece_bytes]
                given += len(piece)
                yield piece

    def whole(self) -> memoryview | None:
        return None

    async def read(self, limit_bytes: int) -> bytes:
        return await self.response.read(limit_bytes)

    async def aclose(self) -> None:
        await self.response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


@dataclass
class NotingOrigin:
    """Passes everything on; notes of each request its purpose, and what tells whether somebody waits for it."""

    origin: Origin
    seen: list[tuple[Purpose, Callable[[], bool]]]

    async def send(self, request: OriginRequest) -> OriginResponse:
        is_awaited = IS_AWAITED.get()
        assert is_awaited is not None
        self.seen.append((request.purpose, is_awaited))
        return await self.origin.send(request)

    async def aclose(self) -> None:
        await self.origin.aclose()


def make_origin() -> MemoryOrigin:
    return MemoryOrigin(SystemClock())


def stored(origin: MemoryOrigin, key: str, size_bytes: int, seed: int = 0) -> ObjectVersion:
    """A generated object at the origin."""
    etag = origin.put_generated(BUCKET, key, size_bytes, seed)
    return ObjectVersion(ObjectKey(BUCKET, key), etag, size_bytes)


def content_of(origin: MemoryOrigin, version: ObjectVersion, byte_range: ByteRange | None = None) -> bytes:
    wanted = byte_range or whole(version)
    return origin.buckets[BUCKET].objects[version.key.key].content.read(wanted.first, wanted.length)


def whole(version: ObjectVersion) -> ByteRange:
    return ByteRange(0, version.size_bytes - 1)


@asynccontextmanager
async def open_cache(
    directory: Path,
    origin: Origin,
    *,
    capacity_bytes: int = 64 * MIB,
    worker: int = 0,
    clock: Clock | None = None,
    observer: CacheMetrics | None = None,
    **settings: Any,
) -> AsyncIterator[BlockCache]:
    """Every block has a file of its own, unless `small_object_bytes_max` says otherwise."""
    settings = {"block_size_bytes": BLOCK, "disk_threads": 2, "small_object_bytes_max": 0, **settings}
    cache = await BlockCache.open(
        BlockSettings(directory, capacity_bytes, **settings),
        origin,
        worker=worker,
        clock=clock or TestClock(),
        observer=observer or CacheMetrics(),
    )
    try:
        yield cache
    finally:
        await cache.close()


async def take(reader: RangeReader, spans: list[FileSpan] | None = None) -> bytes:
    """All bytes of a reader; the spans among its pieces go to `spans`."""
    taken = bytearray()
    async with aclosing(reader.body()) as body:
        async for piece in body:
            if isinstance(piece, FileSpan) and spans is not None:
                spans.append(piece)
            taken += bytes_of(piece)
    return bytes(taken)


def bytes_of(piece: BodyPiece) -> bytes:
    """What a client would get."""
    if isinstance(piece, BorrowedBuffer):
        return bytes(piece.content)
    if not isinstance(piece, FileSpan):
        return bytes(piece)
    content = os.pread(piece.descriptor, piece.count, piece.offset)
    assert len(content) == piece.count
    return content


async def read(cache: BlockCache, version: ObjectVersion, byte_range: ByteRange | None = None) -> bytes:
    return await take(await cache.open_range(version, byte_range or whole(version)))


def by_last_use(index: BlockIndex) -> list[bytes]:
    """Every block id, the least recently used first."""
    files = sorted(index.files(), key=lambda file: file.sequence)
    lying: dict[str, list[bytes]] = {}
    for block in index.blocks():
        lying.setdefault(block.extent.file, []).append(block.block_id)
    return [block_id for file in files for block_id in lying[file.file]]


def block_files(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "data").rglob("*") if path.is_file())


def partial_files(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "partial").rglob("*") if path.is_file())


def drop_page_cache(path: Path) -> None:
    """Have a file's bytes come from the device next time."""
    descriptor = os.open(path, os.O_RDWR)
    os.fdatasync(descriptor)
    for _ in range(10):  # pages on their way through the kernel's lists stay when asked once
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other tasks bring about; the test's own timeout is the deadline."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


async def pass_until(clock: TestClock, condition: Callable[[], bool]) -> None:
    """Let time pass, a second now and then, until other tasks have brought something about."""
    while not condition():
        clock.advance(1.0)
        await asyncio.sleep(0.001)
