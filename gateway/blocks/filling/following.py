"""Following a fill that another process leads: its file is read as it grows, every chunk verified before it counts."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.files.verification import ChunkChecksums
from gateway.blocks.files.watching import FileWatcher
from gateway.blocks.filling.coalescing import Fill
from gateway.blocks.filling.shared_fills import OtherFill, is_led, take_in
from gateway.blocks.layout import Block
from gateway.errors import BlockDamaged, StoreUnavailable


@dataclass(frozen=True, slots=True)
class Follower:
    """Gives the fills of this process the bytes that other processes write."""

    threads: DiskThreads
    watcher: FileWatcher

    async def follow(self, fill: Fill, other: OtherFill) -> bool:
        """Whether every byte has come while the leader lived, who will publish the block.

        Else nobody leads any more (all that was written has been taken in), or nobody waits for the fill.
        StoreUnavailable when the bytes are not what the leader wrote.
        """
        try:
            return await self._follow(fill, other)
        except BlockDamaged as error:
            raise StoreUnavailable(f"what another process fills does not come back: {error}") from error
        finally:
            other.file.close()

    async def _follow(self, fill: Fill, other: OtherFill) -> bool:
        checksums = ChunkChecksums(other.block.length)
        with self.watcher.watch(other.file.descriptor) as watch:
            while True:
                watch.clear()
                led = await self.threads.disk_holding(other.file, _look, other.block, checksums)
                _pass_on(fill, other, checksums)
                if checksums.complete or not led or fill.forsaken:
                    return checksums.complete and led
                await watch.changed()


def _look(file: BlockLease, block: Block, checksums: ChunkChecksums) -> bool:
    """Whether the fill is led, asked first: what a dead leader has written is then all there."""
    led = is_led(file)
    take_in(file, block, checksums)
    return led


def _pass_on(fill: Fill, other: OtherFill, checksums: ChunkChecksums) -> None:
    """A leader that began anew first comes to where this fill's readers are."""
    if checksums.complete_bytes and checksums.complete_bytes >= fill.available:
        fill.attach(other.file, checksums)
        fill.begin()
        fill.advance()
