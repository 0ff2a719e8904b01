"""Filling one block: room first, then the origin's bytes into a partial file, then header, rename and index.

Where another process leads the fill, its bytes are followed; where that process is killed, they are taken over, and
only what is missing is asked of the origin.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field

from gateway.blocks.directory import BlockDirectory, FillFile
from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.open_files import OpenFiles
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.files.verification import read_verified
from gateway.blocks.filling.buffers import Buffers
from gateway.blocks.filling.coalescing import Fill, FillUnneeded
from gateway.blocks.filling.fill_writer import FillWriter
from gateway.blocks.filling.following import Follower
from gateway.blocks.filling.pinned_get import PinnedGet
from gateway.blocks.filling.shared_fills import OwnFill, fill_key, lead_or_find
from gateway.blocks.layout import CHUNK_BYTES, Extent
from gateway.blocks.observer import CacheObserver
from gateway.clock import Clock
from gateway.errors import BlockDamaged, ForebayError, NotKept, StoreUnavailable
from gateway.objects import ByteRange
from gateway.origin.client import Origin, Purpose
from gateway.origin.landing import Landing

FOLLOWED_BYTES = 256 * 1024
"""What is written in one go while readers wait for it: the trip to a disk thread costs as much as the writing."""

AHEAD_BYTES = 1024 * 1024
"""The same where nobody waits yet: a buffer of this size for each fill, of which there are fewer."""


@dataclass(frozen=True, slots=True)
class BlockFiller:
    """Does the work of a `Fill`: called once for each, in the fill's own task."""

    directory: BlockDirectory
    origin: Origin
    threads: DiskThreads
    follower: Follower
    open_files: OpenFiles
    clock: Clock
    observer: CacheObserver
    retries: int
    buffers: Buffers = field(default_factory=Buffers)

    async def __call__(self, fill: Fill) -> None:
        """FillUnneeded when another process has published the block meanwhile, NotKept when it is not to be kept; else
        what made the fill fail."""
        started = self.clock.monotonic()
        try:
            led = await self._follow_or_lead(fill)
        except (FillUnneeded, NotKept):
            raise
        except ForebayError:
            self.observer.fill_failed(fill.slot)
            raise
        if led:
            self.observer.fill_finished(fill.slot, self.clock.monotonic() - started, fill.block.length)

    async def _follow_or_lead(self, fill: Fill) -> bool:
        """Whether this process was the one to publish the block."""
        key, given_up = fill_key(fill.block, fill.headers), None
        wanted = fill.purpose is Purpose.WARM
        while True:
            arguments = self.directory, fill.block, fill.slot, key, given_up, wanted
            found = await self.threads.index(lead_or_find, *arguments)
            if isinstance(found, OwnFill):
                await self._lead(fill, found)
                return True
            if found is None:
                if fill.all_arrived:
                    return False
                raise FillUnneeded("another process has filled the block")
            if fill.purpose is Purpose.READAHEAD and not fill.users:
                found.file.close()  # it is on its way, and nobody here waits for it yet
                return False
            if given_up is None:
                self.observer.coalesced(fill.slot)
            given_up = found.holder
            if await self.follower.follow(fill, found) or fill.forsaken:
                return False

    async def _lead(self, fill: Fill, own: OwnFill) -> None:
        own.evicted.tell(self.observer)
        filled, writer = own.filled, FillWriter(self.directory, own.filled)
        try:
            await self._inherit(fill, writer)
            fill.attach(filled.file, writer.checksums)
            fill.unwritten_from = lambda: writer.unwritten_from
            if not writer.checksums.complete:
                await self._fetch(fill, writer)
            await self._publish(writer)
        except Exception:
            await self._abandon(filled)
            raise
        finally:
            filled.file.close()

    async def _inherit(self, fill: Fill, writer: FillWriter) -> None:
        """Take over what a dead leader had written as far as this fill has verified it."""
        if fill.available:
            await self.threads.disk_holding(
                fill.file, _copy, fill.extent, fill.available, writer, writer.filled.file.share()
            )

    async def _fetch(self, fill: Fill, writer: FillWriter) -> None:
        """What is missing, from the origin."""
        block = fill.block
        missing = ByteRange(block.offset + writer.checksums.complete_bytes, block.range.last)
        get = PinnedGet(
            self.origin, block.version, missing, fill.headers, fill.purpose, fill.slot, self.clock, self.retries
        )
        get.begin_with(fill.answer)
        try:
            await get.start()
            fill.begin()
            await self._receive(fill, get, writer)
        finally:
            await get.aclose()

    async def _receive(self, fill: Fill, get: PinnedGet, writer: FillWriter) -> None:
        """While a piece is written, no more is taken from the origin."""
        buffer = self.buffers.take(FOLLOWED_BYTES if fill.purpose is Purpose.LIVE else AHEAD_BYTES)
        landing = Landing(buffer, _worth_writing(fill))
        async with aclosing(get.pieces(landing)) as pieces:
            async for piece in pieces:
                await self.threads.disk_holding(writer.filled.file, writer.write, piece)
                fill.advance()
                landing.enough_bytes = _worth_writing(fill)
        self.buffers.give_back(buffer)  # not after a failure: a thread may still be writing it

    async def _publish(self, writer: FillWriter) -> None:
        """The file stays open: whoever reads the block next need not open it."""
        if await self.threads.index_holding(writer.filled.file, writer.publish):
            self.open_files.keep(writer.filled.reservation.file, writer.filled.file)

    async def _abandon(self, filled: FillFile) -> None:
        try:
            await self.threads.index_holding(filled.file, self.directory.abandon, filled.reservation)
        except StoreUnavailable:  # the room stays reserved until the slot is opened again: the file may still be there
            self.observer.store_unavailable()


def _copy(source: BlockLease, extent: Extent, count: int, writer: FillWriter, target: BlockLease) -> None:
    try:
        with target:
            for position in range(0, count, FOLLOWED_BYTES):
                size = min(FOLLOWED_BYTES, count - position)
                writer.write(target, read_verified(source.descriptor, extent, position, size))
    except BlockDamaged as error:
        raise StoreUnavailable(f"what a dead process has filled does not come back: {error}") from error


def _worth_writing(fill: Fill) -> int:
    if not fill.users:
        return AHEAD_BYTES
    return FOLLOWED_BYTES if fill.available else CHUNK_BYTES
