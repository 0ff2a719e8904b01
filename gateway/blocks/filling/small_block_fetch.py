"""Fetching a small block: into memory, given to its readers from there, then packed.

Nobody waits for the disk but the other processes, which find the block in the index once it is written, and slow
readers, who go on from there. A disk that does not take it costs its readers nothing.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from gateway.blocks.directory import BlockDirectory
from gateway.blocks.files.open_files import OpenFiles
from gateway.blocks.files.segments import SmallBlock
from gateway.blocks.filling.body_checks import BodyCheck
from gateway.blocks.filling.fetch_locks import LockKey, lock_of_block
from gateway.blocks.filling.group_commit_writer import GroupCommitWriter
from gateway.blocks.filling.inflight_fetch import InflightFetch
from gateway.blocks.filling.pinned_get import PinnedGet
from gateway.blocks.layout import Block
from gateway.clock import Clock
from gateway.errors import BlockDamaged, StoreUnavailable
from gateway.objects import ByteRange
from gateway.origin.client import Origin, Purpose

GATHERED_BYTES = 256 * 1024
GATHERING_SECONDS_MAX = 0.1
"""Readers are told of this much, or of all that has come in this time: mostly once, when the block is complete."""

MAPPED_BYTES_MIN = 256 * 1024
"""From this size on a buffer is a mapping of its own: freed, it is the kernel's again. malloc keeps what it has
once got, and with it holes: 45 MiB of them with a thousand readers of blocks of a MiB."""


@dataclass(frozen=True, slots=True)
class SmallBlockFetcher:
    """Fetches small blocks: called in the task of each `InflightFetch`."""

    directory: BlockDirectory
    open_files: OpenFiles
    writer: GroupCommitWriter
    origin: Origin
    clock: Clock
    retries: int

    def fetch_inline(self, fetch: InflightFetch) -> bool:
        """Do it here and now, if the unpinned GET has brought all of the block, as promised, and memory has room.

        Then nothing is left but that it be written. The GET's lock, which nobody else can have had meanwhile, becomes
        the block's, and ends with the fetch.
        """
        response, block = fetch.response, fetch.block
        if response is None or not self.writer.has_room(block.length):
            return False
        headers, content = response.headers, response.whole(block.range)
        if content is None or not _is_promised(content, headers, block):
            return False
        response.get.becomes(lock_of_block(block, response.get.lock))
        fetch.give(content, block.length)
        self.writer.hold(block.length)
        self._put(fetch, content, self.clock.monotonic())
        return True

    async def fetch(self, fetch: InflightFetch, _lock: LockKey) -> None:
        """Have all bytes, and have them written soon: `persisted`. Raises what made it fail."""
        started, block = self.clock.monotonic(), fetch.block
        whole = ByteRange(block.offset, block.range.last)
        get = PinnedGet(
            self.origin, block.version, whole, fetch.headers, fetch.purpose, fetch.slot, self.clock, self.retries
        )
        get.begin_with(fetch.response)
        try:
            await get.start()
            self._put(fetch, await self._receive(fetch, get), started)
        finally:
            await get.aclose()

    def _put(self, fetch: InflightFetch, content: memoryview, started: float) -> None:
        small, wanted = SmallBlock(fetch.block, content), fetch.purpose is Purpose.WARM
        fetch.persisted = self.writer.put(small, fetch.slot, started, wanted=wanted)
        fetch.persisted.add_done_callback(partial(self._move_if_read, fetch))

    async def _receive(self, fetch: InflightFetch, get: PinnedGet) -> memoryview:
        """The block's bytes, for which room has been taken: only now, as an origin may take long to answer."""
        await self.writer.take_room(fetch.block.length)
        try:
            content = _memory(fetch.block.length)
            await self._receive_into(fetch, get, content)
        except BaseException:
            self.writer.give_back(fetch.block.length)
            raise
        return content

    async def _receive_into(self, fetch: InflightFetch, get: PinnedGet, content: memoryview) -> None:
        received, since = 0, self.clock.monotonic()
        async with aclosing(get.pieces()) as pieces:
            async for piece in pieces:
                content[received : received + len(piece)] = piece
                received += len(piece)
                late = self.clock.monotonic() - since >= GATHERING_SECONDS_MAX
                if received < fetch.block.length and (late or received - fetch.available >= GATHERED_BYTES):
                    fetch.give(content, received)
                    since = self.clock.monotonic()
        fetch.give(content, received)

    def _move_if_read(self, fetch: InflightFetch, persisted: asyncio.Future[bool]) -> None:
        if fetch.users and not persisted.cancelled() and persisted.result():
            self._move(fetch)

    def _move(self, fetch: InflightFetch) -> None:
        """Have those who still read a block go on from its file; where that cannot be, it stays in memory for them."""
        try:
            extent = self.directory.index.lookup(fetch.block.id)
            # Opened here and now: a file that has just been written costs no look at the disk.
            file = self.open_files.opened(extent, self.directory.store) if extent is not None else None
        except (
            BlockDamaged,
            StoreUnavailable,
        ):  # evicted already, or the disk fails: whoever fetches next will meet it
            return
        if extent is not None and file is not None:
            fetch.move(file, extent)
            file.close()


def _is_promised(content: memoryview, headers: Mapping[str, str], block: Block) -> bool:
    """Whether a block that is a whole object has the checksum that came with it, if one did."""
    check = BodyCheck.of(headers) if block.length == block.version.size_bytes else None
    if check is None:
        return True
    check.update(content)
    return check.holds()


def _memory(count: int) -> memoryview:
    if count < MAPPED_BYTES_MIN:
        return memoryview(bytearray(count))
    return memoryview(mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
