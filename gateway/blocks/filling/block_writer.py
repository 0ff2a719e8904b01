"""The file of one large block, written from front to back."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.blocks.directory import BlockDirectory, FillFile
from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.mapped_pages import PAGE_BYTES
from gateway.blocks.files.residency import Residency
from gateway.blocks.files.verification import ChunkChecksums

FOLIO_BYTES_MAX = min(PAGE_BYTES // 8, 2048) * PAGE_BYTES
"""The largest unit in which the kernel keeps a file's pages: what one page of page table maps, 2 MiB of 4 KiB pages."""


@dataclass(slots=True)
class BlockWriter:
    """Writes what comes. `checksums` are of the bytes that were given to be written. `write` and `publish` block.

    The kernel counts a whole folio (of up to FOLIO_BYTES_MAX) as changed when one byte of it was written. So that a
    folio waits to be written to the device shows that its bytes are those given only from `unwritten_from` on: from
    where on no folio had been written to the device, and may have come back from there, before more was written to it.
    That is looked for before each write, wherever it writes: whoever asks whether bytes wait to be written, and then
    whether they lie from there on, is right.
    """

    directory: BlockDirectory
    filled: FillFile
    checksums: ChunkChecksums = field(init=False)
    unwritten_from: int = 0
    _written_bytes: int = 0
    _residency: Residency = field(default_factory=Residency)

    def __post_init__(self) -> None:
        self.checksums = ChunkChecksums(self.filled.block.length)

    def write(self, file: BlockLease, content: bytes | memoryview) -> None:
        """The block's next bytes, to `file`: a lease on the file of the fill. StoreUnavailable when the disk does not
        take them.
        """
        recorded = len(self.checksums.packed)
        self._look_back(file)
        self.checksums.update(content)
        self.directory.record_checksums(file, self.filled.block, self.checksums.packed, recorded)
        self.directory.store.write(file, content, self.filled.data_offset + self._written_bytes)
        self._written_bytes += len(content)

    def _look_back(self, file: BlockLease) -> None:
        """At what shares a folio with the header, and at what was written last."""
        offset, stop = self.filled.data_offset, self.filled.data_offset + self._written_bytes
        for begin, end in ((offset, min(FOLIO_BYTES_MAX, stop)), (stop - FOLIO_BYTES_MAX, stop)):
            first = max(begin, offset + self.unwritten_from)
            if first < end and not self._residency.unwritten(file.descriptor, first, end - first):
                self.unwritten_from = self._written_bytes

    def publish(self, file: BlockLease) -> bool:
        """Finish the file; whether it is used, and not another process's with the same block."""
        self._look_back(file)
        return self.directory.finish(self.filled, file, bytes(self.checksums.packed)) is not None
