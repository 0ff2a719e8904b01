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
from gateway.blocks.index import BlockIndex
from gateway.blocks.layout import BlockSettings
from gateway.blocks.reader import RangeReader
from gateway.core.clock import Clock, SystemClock
from gateway.core.model import BodyPiece, BorrowedBuffer, ByteRange, FileSpan, ObjectKey, ObjectVersion
from gateway.origin.client import IS_AWAITED, Origin, OriginRequest, OriginResponse, Purpose
from gateway.origin.peer_protocol import Roles
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.telemetry import metrics
from tests.support.counting import by_label
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


def disk_state() -> str:
    """Return the state that a cache of this process has its directory in, as metrics say it."""
    [state] = by_label(metrics.CACHE_DISK_STATE, "state")
    return state


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
    roles: Roles | None = None,
    **settings: Any,
) -> AsyncIterator[BlockCache]:
    """Every block has a file of its own, unless `small_object_bytes_max` says otherwise."""
    settings = {"block_size_bytes": BLOCK, "disk_threads": 2, "small_object_bytes_max": 0, **settings}
    cache = await BlockCache.open(
        BlockSettings(directory, capacity_bytes, **settings),
        origin,
        worker=worker,
        clock=clock or TestClock(),
        roles=roles,
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


async def pass_until(clock: TestClock, condition: Callable[[], bool]) -> None:
    """Let time pass, a second now and then, until other tasks have brought something about."""
    while not condition():
        clock.advance(1.0)
        await asyncio.sleep(0.001)
