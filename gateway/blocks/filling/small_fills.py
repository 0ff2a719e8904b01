"""Filling a small block: fetched into memory, given to its readers from there, then packed.

One process fetches it at a time (claims.py). Nobody waits for the disk but the other processes, which find the block
in the index once it is written, and slow readers, who go on from there. A disk that does not take it costs its readers
nothing.
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
from gateway.blocks.files.watching import FileWatcher
from gateway.blocks.filling.body_checks import BodyCheck
from gateway.blocks.filling.claims import Claims, Place, place_of_fill
from gateway.blocks.filling.coalescing import Fill, FillUnneeded
from gateway.blocks.filling.packer import Packer
from gateway.blocks.filling.pinned_get import PinnedGet
from gateway.blocks.layout import Block
from gateway.blocks.observer import CacheObserver
from gateway.clock import Clock
from gateway.errors import BlockDamaged, ForebayError, StoreUnavailable
from gateway.objects import ByteRange
from gateway.origin.client import Origin, Purpose

GATHERED_BYTES = 256 * 1024
GATHERING_SECONDS_MAX = 0.1
"""Readers are told of this much, or of all that has come in this time: mostly once, when the block is complete."""

MAPPED_BYTES_MIN = 256 * 1024
"""From this size on a buffer is a mapping of its own: freed, it is the kernel's again. malloc keeps what it has
once got, and with it holes: 45 MiB of them with a thousand readers of blocks of a MiB."""


@dataclass(frozen=True, slots=True)
class SmallFiller:
    """Does the work of a small block's `Fill`: called once for each, in the fill's own task."""

    directory: BlockDirectory
    open_files: OpenFiles
    claims: Claims
    packer: Packer
    watcher: FileWatcher
    origin: Origin
    clock: Clock
    observer: CacheObserver
    retries: int

    def at_once(self, fill: Fill) -> bool:
        """Do it here and now, if the first answer has brought all of the block, as promised, and memory has room.

        Then nothing is left but that it be written. The first look's claim, which nobody else can have had meanwhile,
        becomes the fill's, and ends with it.
        """
        answer, block = fill.answer, fill.block
        if answer is None or not self.packer.has_room(block.length):
            return False
        headers, content = answer.headers, answer.whole(block.range)
        if content is None or not _is_promised(content, headers, block):
            return False
        answer.look.becomes(place_of_fill(block, fill.headers, answer.look.place.cell))
        fill.give(content, block.length)
        wanted = fill.purpose is Purpose.WARM
        self.packer.hold(block.length)
        fill.landed = self.packer.put(SmallBlock(block, content), fill.slot, self.clock.monotonic(), wanted=wanted)
        fill.landed.add_done_callback(partial(self._landed, fill, None))
        return True

    async def __call__(self, fill: Fill) -> None:
        """FillUnneeded when another process has kept the block meanwhile; else what made the fill fail."""
        place = place_of_fill(fill.block, fill.headers)
        claimed = fill.answer is not None and fill.answer.look.becomes(place)
        try:
            if not claimed:
                await self._claim(fill, place)
            if not fill.forsaken:
                await self._fill(fill)
        except FillUnneeded:
            raise
        except ForebayError:
            self.observer.fill_failed(fill.slot)
            raise
        finally:
            if fill.landed is not None:
                fill.landed.add_done_callback(partial(self._landed, fill, None if claimed else place))
            elif not claimed:
                self.claims.release(place)

    async def _claim(self, fill: Fill, place: Place) -> None:
        """Wait until no other process fetches the block, or nobody waits for the fill any more."""
        dead, waited = None, False
        while not fill.forsaken:
            holder = self.claims.claim(place, dead)
            # Looked up again under the claim: whoever had it before has entered the block before giving it back.
            if self.directory.index.lookup(fill.block.id) is not None:
                raise FillUnneeded("another process has kept the block")
            if holder is None or holder == self.claims.worker:
                return
            if not waited:
                self.observer.coalesced(fill.slot)
            waited = True
            dead = await self._wait(fill, place, holder)

    async def _wait(self, fill: Fill, place: Place, holder: int) -> int | None:
        """Wait until a claim is given back, or nobody waits for the fill; the holder, if it is dead."""
        with self.watcher.watch(self.claims.bell(holder)) as watch:
            while not fill.forsaken:
                watch.clear()
                if not self.claims.await_release(place, holder):
                    return None
                if not self.claims.lives(holder):
                    return holder
                await watch.changed()
        return None

    async def _fill(self, fill: Fill) -> None:
        started, block = self.clock.monotonic(), fill.block
        whole = ByteRange(block.offset, block.range.last)
        get = PinnedGet(
            self.origin, block.version, whole, fill.headers, fill.purpose, fill.slot, self.clock, self.retries
        )
        get.begin_with(fill.answer)
        try:
            await get.start()
            small = SmallBlock(block, await self._receive(fill, get))
            fill.landed = self.packer.put(small, fill.slot, started, wanted=fill.purpose is Purpose.WARM)
        finally:
            await get.aclose()

    async def _receive(self, fill: Fill, get: PinnedGet) -> memoryview:
        """The block's bytes, for which room has been taken: only now, as an origin may take long to answer."""
        await self.packer.take_room(fill.block.length)
        try:
            content = _memory(fill.block.length)
            await self._receive_into(fill, get, content)
        except BaseException:
            self.packer.give_back(fill.block.length)
            raise
        return content

    async def _receive_into(self, fill: Fill, get: PinnedGet, content: memoryview) -> None:
        received, since = 0, self.clock.monotonic()
        async with aclosing(get.pieces()) as pieces:
            async for piece in pieces:
                content[received : received + len(piece)] = piece
                received += len(piece)
                late = self.clock.monotonic() - since >= GATHERING_SECONDS_MAX
                if received < fill.block.length and (late or received - fill.available >= GATHERED_BYTES):
                    fill.give(content, received)
                    since = self.clock.monotonic()
        fill.give(content, received)

    def _landed(self, fill: Fill, place: Place | None, landed: asyncio.Future[bool]) -> None:
        """`place`: the claim that ends with the fill, unless it is the first look's."""
        if place is not None:
            self.claims.release(place)
        if fill.users and not landed.cancelled() and landed.result():
            self._move(fill)

    def _move(self, fill: Fill) -> None:
        """Have those who still read a block go on from its file; where that cannot be, it stays in memory for them."""
        try:
            extent = self.directory.index.lookup(fill.block.id)
            # Opened here and now: a file that has just been written costs no look at the disk.
            file = self.open_files.opened(extent, self.directory.store) if extent is not None else None
        except (BlockDamaged, StoreUnavailable):  # evicted already, or the disk fails: who fills next will meet it
            return
        if extent is not None and file is not None:
            fill.move(file, extent)
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
